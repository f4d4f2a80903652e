"""The logit lens against norm and head written out by hand, in fp64, on regard's models and on transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, rms_norm

import regard

transformers = pytest.importorskip("transformers")

V, D, B, N, L = 29, 24, 2, 7, 3
IDS = torch.tensor([[3, 5, 7, 11, 2, 13, 17], [4, 9, 1, 12, 8, 10, 15]])
WRITTEN = IDS[:, :5].flip(1)
POSITIONS = [1, -1]
SIZES = {
    "hidden_size": D, "num_attention_heads": 4, "num_hidden_layers": L, "intermediate_size": 16, "vocab_size": V,
    "max_position_embeddings": 32, "initializer_range": 0.4, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "n_embd": D, "n_head": 4, "n_layer": L, "n_positions": 32, "vocab_size": V, "initializer_range": 0.4,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": D, "num_heads": 3, "d_kv": 8, "num_layers": L, "d_ff": 16, "vocab_size": V, "initializer_factor": 2.0,
    "decoder_start_token_id": 0,
}  # fmt: skip


def ours(family: str, task: str | None = None, **config: Any) -> Any:
    given = {} if task is None else {"task": task}
    return _moved(regard.build(family, **given, **config))


def theirs(name: str, **config: Any) -> Any:
    kind = getattr(transformers, name)
    return _moved(kind(kind.config_class(**config)))


def _moved(model: Any) -> Any:
    """In fp64, with norms and biases away from 1 and 0, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def after_blocks(model: nn.Module, path: str, run: Callable[[], Any]) -> list[Tensor]:
    """What the blocks of a list return, by a hook on each."""
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda m, a, out: states.append(out if isinstance(out, Tensor) else out[0]))
        for block in model.get_submodule(path)
    ]
    with torch.no_grad():
        run()
    for handle in hooks:
        handle.remove()
    return states


def bert_head(x: Tensor, dense: nn.Linear, norm: nn.LayerNorm, table: Tensor, bias: Tensor) -> Tensor:
    h = layer_norm(gelu(linear(x, dense.weight, dense.bias)), (D,), norm.weight, norm.bias, norm.eps)
    return linear(h, table, bias)


def ln(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return layer_norm(x, (D,), norm.weight, norm.bias, norm.eps)


# Name → model, blocks, run, and the logits of a state by hand.
CASES: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Any], Callable[[Any, Tensor], Tensor]]] = {
    "gpt2": (
        lambda: ours("gpt2", **GPT2), "tower.blocks", lambda m: m(IDS),
        lambda m, x: ln(x, m.tower.norm) @ m.tower.embed.tokens.weight.T,
    ),
    "llama": (
        lambda: ours("llama", **SIZES), "tower.blocks", lambda m: m(IDS),
        lambda m, x: rms_norm(x, (D,), m.tower.norm.weight, m.tower.norm.eps) @ m.head.words.weight.T,
    ),
    "bert": (
        lambda: ours("bert", "fill-mask", **SIZES), "tower.blocks", lambda m: m(IDS),
        lambda m, x: bert_head(
            x, m.head.transform.dense, m.head.transform.norm, m.tower.embed.tokens.weight, m.head.bias
        ),
    ),
    "t5": (
        lambda: ours("t5", "text2text-generation", **T5), "decoder.blocks", lambda m: m(IDS, decoder_input_ids=WRITTEN),
        lambda m, x: rms_norm(x, (D,), m.decoder.norm.weight, m.decoder.norm.eps) * D**-0.5
        @ m.decoder.embed.tokens.weight.T,
    ),
    "GPT2LMHeadModel": (
        lambda: theirs("GPT2LMHeadModel", **GPT2), "transformer.h", lambda m: m(IDS),
        lambda m, x: ln(x, m.transformer.ln_f) @ m.lm_head.weight.T,
    ),
    "Gemma2ForCausalLM": (  # norms of weight 1 + w, and logits that are capped
        lambda: theirs("Gemma2ForCausalLM", **SIZES, num_key_value_heads=2, head_dim=6), "model.layers",
        lambda m: m(IDS, use_cache=False),
        lambda m, x: 30 * torch.tanh(
            rms_norm(x, (D,), 1 + m.model.norm.weight, m.model.norm.eps) @ m.lm_head.weight.T / 30
        ),
    ),
    "BertForMaskedLM": (
        lambda: theirs("BertForMaskedLM", **SIZES), "bert.encoder.layer", lambda m: m(IDS),
        lambda m, x: bert_head(
            x, m.cls.predictions.transform.dense, m.cls.predictions.transform.LayerNorm,
            m.cls.predictions.decoder.weight, m.cls.predictions.decoder.bias,
        ),
    ),
    "T5ForConditionalGeneration": (
        lambda: theirs("T5ForConditionalGeneration", **T5), "decoder.block",
        lambda m: m(IDS, decoder_input_ids=WRITTEN),
        lambda m, x: rms_norm(
            x, (D,), m.decoder.final_layer_norm.weight, m.decoder.final_layer_norm.variance_epsilon
        ) * D**-0.5 @ m.lm_head.weight.T,
    ),
}  # fmt: skip
THROUGH = {
    "gpt2": ("tower.norm", "head"), "llama": ("tower.norm", "head"), "bert": ("head",), "t5": ("decoder.norm", "head"),
    "GPT2LMHeadModel": ("transformer.ln_f", "lm_head"), "Gemma2ForCausalLM": ("model.norm", "lm_head"),
    "BertForMaskedLM": ("cls",), "T5ForConditionalGeneration": ("decoder.final_layer_norm", "lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_layer_equals_norm_and_head_by_hand(name: str) -> None:
    build, path, call, head = CASES[name]
    model = build()
    lens = regard.logit_lens(lambda: call(model), model, positions=POSITIONS, k=4)
    states = after_blocks(model, path, lambda: call(model))
    assert lens.layers == tuple(f"{path}.{n}" for n in range(L))
    assert lens.through == THROUGH[name]
    assert lens.tokens.shape == lens.probabilities.shape == (L, B, 2, 4)
    length = states[0].shape[1]
    assert lens.positions == (1, length - 1)
    eps = 1e-5 if name in ("Gemma2ForCausalLM", "T5ForConditionalGeneration") else 1e-12  # their norms are in fp32
    for layer, state in enumerate(states):
        with torch.no_grad():
            expected = head(model, state[:, list(lens.positions)]).softmax(-1).topk(4)
        assert torch.equal(lens.tokens[layer], expected.indices)
        assert torch.allclose(lens.probabilities[layer].double(), expected.values, atol=eps, rtol=0)
    with torch.no_grad():
        own = call(model).logits[:, list(lens.positions)].softmax(-1).topk(4)
    assert torch.equal(lens.tokens[-1], own.indices)
    assert torch.allclose(lens.probabilities[-1].double(), own.values.double(), atol=1e-12, rtol=0)
    assert not torch.equal(lens.tokens[0], lens.tokens[-1])


def test_one_position_or_all_give_the_same() -> None:
    model = ours("gpt2", **GPT2)
    every = regard.logit_lens(lambda: model(IDS), model, positions=slice(None))
    assert every.positions == tuple(range(N))
    one = regard.logit_lens(lambda: model(IDS), model, positions=2)
    assert torch.equal(one.tokens[:, :, 0], every.tokens[:, :, 2])
    assert torch.allclose(one.probabilities[:, :, 0], every.probabilities[:, :, 2], atol=1e-12)


def test_blocks_that_share_their_weights_are_layers_each() -> None:
    model = ours("albert", "fill-mask", **SIZES, embedding_size=8)
    lens = regard.logit_lens(lambda: model(IDS), model)
    assert len(lens.layers) == L
    assert len(set(lens.layers)) == 1
    own = model(IDS).logits[:, -1].softmax(-1).topk(5)
    assert torch.equal(lens.tokens[-1, :, 0], own.indices)
    assert not torch.equal(lens.probabilities[0], lens.probabilities[-1])


def test_an_edit_shows_from_its_layer_on() -> None:
    model = ours("gpt2", **GPT2)
    plain = regard.logit_lens(lambda: model(IDS), model)
    with regard.edit(model, regard.edits.ablate(1, 0)):
        edited = regard.logit_lens(lambda: model(IDS), model)
    same = [torch.equal(a, b) for a, b in zip(plain.probabilities, edited.probabilities, strict=True)]
    assert same == [True, False, False]


def test_it_prints_and_leaves_nothing_behind() -> None:
    model = ours("gpt2", **GPT2)
    with torch.no_grad():
        before = model(IDS).logits
    lens = regard.logit_lens(lambda: model(IDS), model, k=2, words=lambda token: f"<{token}>")
    lines = repr(lens).splitlines()
    assert lines[0] == "logit lens through tower.norm and head (heuristic)"
    assert f"<{int(lens.tokens[0, 0, 0, 0])}>" in lines[3]
    assert len(lines) == 3 + L
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_blocks_that_are_no_list_are_named() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.a, self.b = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + self.a(x).tanh()
            return self.b(x) @ self.embed.weight.T

    model = Plain()
    with pytest.raises(LookupError, match="layers="):
        regard.logit_lens(lambda: model(IDS), model)
    lens = regard.logit_lens(lambda: model(IDS), model, layers=["a", "b"])
    expected = (model.a(model.embed(IDS)) @ model.embed.weight.T)[:, -1].softmax(-1).topk(5)
    assert torch.equal(lens.tokens[0, :, 0], expected.indices)
    with pytest.raises(LookupError, match="nowhere"):
        regard.logit_lens(lambda: model(IDS), model, layers="nowhere.*")


def test_what_has_no_language_model_head_is_refused() -> None:
    without = theirs("BertModel", **SIZES)
    with pytest.raises(LookupError, match="language-model head"):
        regard.logit_lens(lambda: without(IDS), without)
    labels = ours("bert", "token-classification", **SIZES, num_labels=2)
    with pytest.raises(LookupError, match=f"over 2 .*{V} tokens.*language-model head"):
        regard.logit_lens(lambda: labels(IDS), labels)
    classes = ours("bert", "text-classification", **SIZES, num_labels=3)
    with pytest.raises(LookupError, match=r"\(2, 3\).*language-model head"):
        regard.logit_lens(lambda: classes(IDS), classes)


def test_other_runs_and_positions_are_refused() -> None:
    model = theirs("GPT2LMHeadModel", **GPT2)
    with pytest.raises(ValueError, match=r"\(2, 1, 29\).*\(2, 7, 24\)"):
        regard.logit_lens(lambda: model(IDS, logits_to_keep=1), model)
    with pytest.raises(ValueError, match="one forward pass"):
        regard.logit_lens(lambda: (model(IDS), model(IDS[:, :3]))[1], model)
    with pytest.raises(IndexError, match="7 positions"):
        regard.logit_lens(lambda: model(IDS), model, positions=N)
    with pytest.raises(ValueError, match="none of the 7"):
        regard.logit_lens(lambda: model(IDS), model, positions=slice(0, 0))
    dropping = theirs("T5ForConditionalGeneration", **T5).train()  # dropout behind its final norm
    with pytest.raises(ValueError, match=r"eval\(\)"):
        regard.logit_lens(lambda: dropping(IDS, decoder_input_ids=WRITTEN), dropping)
