"""Runs that begin at the edited block give the bits of whole runs, and blocks that are not pure are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits

IDS = torch.tensor([[3, 5, 7, 11, 2, 13, 17, 6]])
SMALL = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 16, "vocab_size": 19,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": 19, "bos_token_id": 1}
T5 = {"d_model": 24, "num_heads": 4, "d_kv": 6, "d_ff": 16, "num_layers": 2, "vocab_size": 19}
PIXELS = torch.linspace(-1, 1, 3 * 16 * 16).sin().view(1, 3, 16, 16)
VIT = SMALL | {"image_size": 16, "patch_size": 4}
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bert": ("bert", SMALL, {"input_ids": IDS}, "blocks.0"),
    "gpt2": ("gpt2", GPT2, {"input_ids": IDS}, "blocks.0"),
    "t5": ("t5", T5, BOTH, "encoder.blocks.0"),
    "Llama": ("LlamaModel", SMALL, {"input_ids": IDS, "use_cache": False}, "layers.0"),
    "OPT": ("OPTModel", SMALL | {"ffn_dim": 16, "word_embed_proj_dim": 24}, {"input_ids": IDS, "use_cache": False},
            "decoder.layers.0"),
    "ViT": ("ViTModel", VIT, {"pixel_values": PIXELS}, ".0"),
    "BERT": ("BertModel", SMALL, {"input_ids": IDS}, "encoder.layer.0"),
    "GPT-2": ("GPT2Model", GPT2 | {"eos_token_id": 2}, {"input_ids": IDS, "use_cache": False}, "h.0"),
    "T5": ("T5Model", T5, BOTH | {"use_cache": False}, "encoder.block.0"),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Callable[..., Any], list[int]]:
    """A model, its run, and a list that grows when the first block computes something."""
    kind, options, inputs, first = MODELS[name]
    torch.manual_seed(0)
    if kind.islower():
        model: nn.Module = regard.build(kind, **options).eval()
    else:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, kind.replace("Model", "Config"))(**options)
        model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    block = next(module for path, module in model.named_modules() if path.endswith(first))
    computed: list[int] = []
    inner = next(module for module in block.modules() if "Norm" in type(module).__name__)
    forward = inner.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        computed.append(1)
        return forward(*args, **kwargs)

    inner.forward = counting  # type: ignore[method-assign]
    return model, lambda **more: model(**inputs | more), computed


def sum_of_squares(output: Any) -> Tensor:
    hidden = output.last_hidden_state
    return (hidden * torch.linspace(0, 1, hidden.shape[-1])).square().sum()


@pytest.mark.parametrize("name", MODELS)
def test_a_scan_gives_the_bits_of_whole_runs_and_computes_fewer_blocks(name: str) -> None:
    model, run, computed = build(name)
    with torch.no_grad(), regard.watch(model) as seen:
        before = run()
    per_run = len(computed)
    computed.clear()
    found = regard.scan(run, model, sum_of_squares)
    layers, heads = found.values.shape
    assert len(computed) == (2 + heads) * per_run  # two plain runs, and the edits of this block
    for layer in range(layers):
        with torch.no_grad(), regard.edit(model, edits.ablate(layer, 1)):
            edited = run()
        assert float(found.values[layer, 1]) == float(sum_of_squares(edited)) - float(sum_of_squares(before))
    assert float(found.values.abs().min()) > 0
    assert seen.names == found.names
    with torch.no_grad():
        assert torch.equal(run().last_hidden_state, before.last_hidden_state)
    assert not any(
        "forward" in vars(module) for path, module in model.named_modules() if path.rpartition(".")[2].isdigit()
    )


def test_an_effect_and_its_controls_are_those_of_whole_runs() -> None:
    model, run, computed = build("gpt2")
    path = next(name for name, _ in model.named_modules() if name.endswith("blocks.1"))
    single = edits.knock_out(2, 1, 5, 3) + edits.add(path, torch.ones(24))
    with torch.no_grad(), regard.edit(model, single):
        expected = float(sum_of_squares(run()))
    computed.clear()
    found = regard.effect(run, model, single, sum_of_squares, controls=3)
    assert found.after == expected
    assert len(computed) == 2
    whole = regard.effect(run, model, edits.ablate(head=1), sum_of_squares, controls=0)  # in every layer
    assert len(computed) == 2 + 3
    assert whole.value


@pytest.mark.parametrize("why", ["cache", "hook", "twice", "attentions"])
def test_blocks_that_are_not_pure_are_computed(why: str) -> None:
    model, run, computed = build("Llama")
    more: dict[str, Any] = {"use_cache": True} if why == "cache" else {}
    if why == "attentions":
        model.set_attn_implementation("eager")  # type: ignore[operator]
        more = {"output_attentions": True}
    if why == "hook":
        model.layers[0].mlp.register_forward_hook(lambda module, given, out: None)  # type: ignore[union-attr]

    def metric(output: Any) -> Tensor:
        return sum_of_squares(output) + sum(x.square().sum() for x in getattr(output, "attentions", None) or ())

    def whole() -> Any:
        if why == "twice":
            run()
        return run(**more)

    found = regard.scan(whole, model, metric)
    runs = 2 + found.values.numel() + (why == "hook")  # the other blocks can be skipped, which is tried once
    assert len(computed) == runs * (2 if why == "twice" else 1)
    with torch.no_grad(), regard.edit(model, edits.ablate(2, 1)):
        edited = float(metric(whole()))
    with torch.no_grad():
        plain = float(metric(whole()))
    assert float(found.values[2, 1]) == edited - plain
