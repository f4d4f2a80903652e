"""Edits of transformers' models that have no family here, against the same edit made by hand in the eager model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import edits
from regard.edits.values import Edit, Edits

transformers = pytest.importorskip("transformers")

HEADS, HEAD, ROW, KEYS = 6, 4, 6, [1, 4]
IDS = torch.tensor([[3, 5, 7, 11, 2, 13, 17, 6], [4, 9, 1, 12, 8, 10, 15, 7]])
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
FRAMES = torch.linspace(-3, 3, 2 * 8 * 20).cos().view(2, 8, 20)
SMALL = {
    "hidden_size": 24, "num_attention_heads": HEADS, "num_key_value_heads": 3, "num_hidden_layers": 2,
    "intermediate_size": 16, "vocab_size": 19, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MIXED = {"head_dim": 4, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
WHISPER = {
    "d_model": 24, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_layers": 2,
    "decoder_layers": 2, "vocab_size": 19, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8,
    "max_source_positions": 10, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 18,
    "decoder_start_token_id": 1, "init_std": 0.3,
}  # fmt: skip


@dataclass
class Case:
    """One attention of an architecture: how the model is made and called, and where this attention is."""

    model: str
    config: str
    path: str = "model.layers.1.self_attn"
    projection: str = "o_proj"
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": IDS})
    dtype: torch.dtype = torch.float64
    attentions: tuple[str, ...] = ("eager", "sdpa")
    keys: int = IDS.shape[1]

    def build(self, attention: str, dtype: torch.dtype | None = None) -> nn.Module:
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = attention
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config).to(dtype or self.dtype).eval()
        return model

    def run(self, model: nn.Module, edit: Edit | Edits | None = None) -> Tensor:
        inputs = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}
        with torch.no_grad(), nullcontext() if edit is None else regard.edit(model, edit):
            output = model(**inputs)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state


def causal(model: str, config: str, **options: Any) -> Case:
    return Case(model, config, options=SMALL | options)


def whisper(path: str, keys: int) -> Case:
    inputs = {"input_features": FRAMES, "decoder_input_ids": IDS}
    name = "WhisperForConditionalGeneration"
    return Case(name, "WhisperConfig", f"model.{path}", "out_proj", WHISPER, inputs, keys=keys)


CASES = {
    "Qwen3": causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=4),
    "Gemma 3, window": causal("Gemma3ForCausalLM", "Gemma3TextConfig", **MIXED),
    "Gemma 2, softcap": causal("Gemma2ForCausalLM", "Gemma2Config", **MIXED, attn_logit_softcapping=2.0),
    "Mistral, window": causal("MistralForCausalLM", "MistralConfig", sliding_window=6),
    "gpt_oss, sinks": causal("GptOssForCausalLM", "GptOssConfig", **MIXED, **EXPERTS),
    "Phi 3, q, k and v in one": causal("Phi3ForCausalLM", "Phi3Config"),
    "OLMo 2": causal("Olmo2ForCausalLM", "Olmo2Config"),
    "Granite, scale": causal("GraniteForCausalLM", "GraniteConfig", attention_multiplier=0.3),
    "DeepSeek-V3, wider keys than values": causal("DeepseekV3ForCausalLM", "DeepseekV3Config", **LATENT),
    "Falcon": Case(
        "FalconForCausalLM", "FalconConfig", "transformer.h.1.self_attention", "dense",
        SMALL | {"new_decoder_architecture": True, "num_kv_heads": 3, "ffn_hidden_size": 16},
    ),
    "Bloom, ALiBi": Case(
        "BloomForCausalLM", "BloomConfig", "transformer.h.1.self_attention", "dense",
        SMALL | {"n_layer": 2, "n_head": HEADS}, attentions=("eager",),
    ),
    "ModernBERT": Case(
        "ModernBertForMaskedLM", "ModernBertConfig", "model.layers.1.attn", "Wo",
        SMALL | {"local_attention": 12, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "SigLIP": Case(
        "SiglipVisionModel", "SiglipVisionConfig", "encoder.layers.1.self_attn", "out_proj",
        {name: SMALL[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")}
        | {"image_size": 16, "patch_size": 4}, {"pixel_values": PIXELS}, keys=16,
    ),
    "Whisper, encoder": whisper("encoder.layers.1.self_attn", 10),
    "Whisper, decoder": whisper("decoder.layers.1.self_attn", 8),
    "Whisper, cross": whisper("decoder.layers.1.encoder_attn", 10),
}  # fmt: skip
for without_sdpa in ("Gemma 2, softcap", "gpt_oss, sinks"):
    CASES[without_sdpa].attentions = ("eager",)
CASES["gpt_oss, sinks"].dtype = torch.float32  # its experts have no fp64


def knocked_out_by_hand(case: Case, model: nn.Module) -> Tensor:
    """The eager model with a mask of its own for this attention."""

    def hide(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = args[0] if args else given["hidden_states"]
        mask = given.get("attention_mask")
        mask = hidden.new_zeros(1, 1, hidden.shape[1], case.keys) if mask is None else mask
        mask = mask.expand(len(hidden), HEADS, -1, -1).clone()
        mask[:, HEAD, ROW, KEYS] = torch.finfo(mask.dtype).min
        return args, given | {"attention_mask": mask}

    handle = model.get_submodule(case.path).register_forward_pre_hook(hide, with_kwargs=True)
    try:
        return case.run(model)
    finally:
        handle.remove()


def ablated_by_hand(case: Case, model: nn.Module, head: int = HEAD, left: float = 0.0) -> Tensor:
    """The eager model with one head's part of what the output projection gets set to 0, or to a share of it."""

    def scale(module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        heads = args[0].unflatten(-1, (HEADS, -1)).clone()
        heads[..., head, :] *= left
        return heads.flatten(-2)

    projection = model.get_submodule(f"{case.path}.{case.projection}")
    handle = projection.register_forward_pre_hook(scale)
    try:
        return case.run(model)
    finally:
        handle.remove()


@pytest.mark.parametrize(("name", "attention"), [(n, how) for n, case in CASES.items() for how in case.attentions])
def test_edits_equal_those_made_by_hand(name: str, attention: str) -> None:
    case = CASES[name]
    model, eager = case.build(attention), case.build("eager")
    plain = case.run(model)
    # Eager models compute their softmax, and most their norms, in fp32 whatever their dtype is.
    tolerance = 1e-10 if attention == "eager" and case.dtype == torch.float64 else 1e-5
    for edit, expected in (
        (edits.knock_out(case.path, HEAD, ROW, KEYS), knocked_out_by_hand(case, eager)),
        (edits.ablate(case.path, HEAD), ablated_by_hand(case, eager)),
    ):
        assert torch.allclose(case.run(model, edit), expected, atol=tolerance, rtol=0)
        assert (expected - plain).abs().max() > 1e-3
    assert torch.equal(case.run(model), plain)


@pytest.mark.parametrize(("name", "attention"), [("Qwen3", "sdpa"), ("gpt_oss, sinks", "eager"), ("Falcon", "eager")])
def test_gradients_of_heads_equal_differences_made_by_hand(name: str, attention: str) -> None:
    case = CASES[name]
    model, metric = case.build(attention), regard.metrics.logit_diff(3, 4)
    found = regard.scan(lambda: model(IDS), model, metric, method="gradient")
    layer, step = found.names.index(case.path), 1e-2
    for head in (0, HEAD):
        more, less = (metric.function(ablated_by_hand(case, model, head, 1 - e), None).item() for e in (step, -step))
        assert found.values[layer, head].item() == pytest.approx((more - less) / (2 * step), rel=1e-2, abs=1e-3)
        assert abs(found.values[layer, head].item()) > 1e-2


class Grouped(nn.Module):
    """Six heads of a new token (B, 1, 6·D) look at the keys of two; packed as transformers does since 5.23, or not."""

    num_key_value_groups = 3

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.packs = packs

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        q = x.unflatten(-1, (6, -1)).transpose(1, 2)
        if self.packs:
            return sdpa(q.reshape(len(x), 2, 3, -1), k, k).reshape(q.shape)
        k = k.repeat_interleave(3, 1)
        return sdpa(q, k, k)


@pytest.mark.parametrize(
    ("edit", "head"),
    [(edits.knock_out("", 4, 6, [1, 3]), 4), (edits.ablate("", 5), 5), (edits.ablate("", 1, queries=6), 1)],
    ids=str,
)
def test_heads_that_are_packed_as_queries_are_edited_as_heads(edit: Edit, head: int) -> None:
    random = torch.Generator().manual_seed(2)
    x, k = torch.randn(2, 1, 30, generator=random), torch.randn(2, 2, 7, 5, generator=random)
    made = []
    for packs in (True, False):
        model = Grouped(packs)
        with regard.edit(model, edit):
            made.append(model(x, k))
        changed = (made[-1] != model(x, k)).flatten(2).any(-1)  # (B, H)
        assert changed.nonzero()[:, 1].unique().tolist() == [head]
    assert made[0].shape == (2, 6, 1, 5)
    assert torch.allclose(made[0], made[1], atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- generation

NEW = 5
LATER = slice(ROW, None)
STEPS = edits.knock_out(1, HEAD, LATER, [3, 5]) + edits.ablate(0, 2, queries=slice(9, None))
GENERATING = [(name, how) for name in ("Qwen3", "Gemma 3, window", "Bloom, ALiBi") for how in CASES[name].attentions]
GENERATING.append(("gpt_oss, sinks", "eager"))


def generate(model: Any, edit: Edit | Edits, **given: Any) -> Any:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    with regard.edit(model, edit):
        return model.generate(**options | given)


def again(model: nn.Module, edit: Edit | Edits | None, new_tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Logits of the new tokens with the whole sequence read at once, without a cache."""
    with torch.no_grad(), nullcontext() if edit is None else regard.edit(model, edit):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits[:, -new_tokens.shape[1] - 1 : -1]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("name", "attention"), GENERATING)
def test_a_cached_generation_equals_reading_the_whole_text(name: str, attention: str, cache: str | None) -> None:
    model = CASES[name].build(attention, torch.float32)
    padding = torch.ones_like(IDS)
    padding[1, :3] = 0  # on the left
    made = generate(
        model, STEPS, input_ids=IDS, attention_mask=padding, cache_implementation=cache, output_logits=True
    )  # fmt: skip
    inputs = {"input_ids": made.sequences, "attention_mask": torch.nn.functional.pad(padding, (0, NEW), value=1)}
    if "Bloom" not in name:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    new, logits = made.sequences[:, -NEW:], torch.stack(made.logits, 1)
    expected = again(model, STEPS, new, **inputs)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert torch.equal(expected.argmax(-1), new)
    assert (logits - again(model, None, new, **inputs)).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "attention"), GENERATING)
def test_beams_score_as_the_whole_text_does(name: str, attention: str) -> None:
    model = CASES[name].build(attention, torch.float32)
    made = generate(
        model, STEPS, input_ids=IDS, attention_mask=torch.ones_like(IDS), num_beams=3, length_penalty=0.0,
        output_scores=True,
    )  # fmt: skip
    new = made.sequences[:, -NEW:]
    edited, plain = (
        again(model, edit, new, input_ids=made.sequences).log_softmax(-1).gather(2, new[..., None]).sum((1, 2))
        for edit in (STEPS, None)
    )
    assert torch.allclose(made.sequences_scores, edited, atol=1e-4)
    assert (made.sequences_scores - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("attention", "beams", "cache"),
    [("eager", 1, None), ("sdpa", 1, None), ("sdpa", 3, None), ("sdpa", 1, "static"), ("sdpa", 3, "static")],
)
@pytest.mark.parametrize(
    "path", ["encoder.layers.1.self_attn", "decoder.layers.1.self_attn", "decoder.layers.1.encoder_attn"]
)
def test_whisper_generates_under_an_edit(path: str, attention: str, beams: int, cache: str | None) -> None:
    model = CASES["Whisper, cross"].build(attention, torch.float32)
    edit = edits.knock_out(f"model.{path}", (0, 2, HEAD), LATER, [3, 5])
    made = generate(
        model, edit, input_features=FRAMES, decoder_input_ids=IDS, num_beams=beams, length_penalty=0.0,
        output_scores=True, output_logits=True, cache_implementation=cache,
    )  # fmt: skip
    new = made.sequences[:, -NEW:]
    edited, plain = (
        again(model, e, new, input_features=FRAMES, decoder_input_ids=made.sequences) for e in (edit, None)
    )
    if beams == 1:
        assert torch.allclose(torch.stack(made.logits, 1), edited, atol=1e-4)
        assert not torch.allclose(edited, plain, atol=1e-2)
    else:
        edited, plain = (x.log_softmax(-1).gather(2, new[..., None]).sum((1, 2)) for x in (edited, plain))
        assert torch.allclose(made.sequences_scores, edited, atol=1e-4)
        assert not torch.allclose(edited, plain, atol=1e-3)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_negative_positions_count_from_the_newest_token(attention: str, cache: str | None) -> None:
    model = CASES["Qwen3"].build(attention, torch.float32)
    with regard.edit(model, edits.knock_out(1, HEAD, -1, -2)) as editing:
        model.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache_implementation=cache)
    assert (editing.applied[0].calls, editing.applied[0].edges) == (NEW, NEW * len(IDS))


VECTOR = torch.linspace(-2, 2, 24)


@pytest.mark.parametrize(("attention", "cache"), [("sdpa", None), ("eager", None), ("sdpa", "static")])
@pytest.mark.parametrize("path", ["embed_tokens", "layers.0.input_layernorm", "layers.0", "layers.1.mlp", "norm"])
def test_a_vector_is_added_at_its_place_in_the_text(path: str, attention: str, cache: str | None) -> None:
    model, edit = CASES["Qwen3"].build(attention, torch.float32), edits.add(f"model.{path}", VECTOR, positions=[2, 9])
    made = generate(model, edit, input_ids=IDS, cache_implementation=cache, output_logits=True)
    logits, new = torch.stack(made.logits, 1), made.sequences[:, -NEW:]
    edited, plain = (again(model, e, new, input_ids=made.sequences) for e in (edit, None))
    assert torch.allclose(logits, edited, atol=1e-4)
    assert (logits - plain).abs().max() > 1e-2


@pytest.mark.parametrize("path", ["decoder.embed_tokens", "decoder.layers.1", "decoder.layer_norm", "encoder.layers.0"])
def test_a_vector_is_added_at_its_place_in_the_text_of_a_decoder(path: str) -> None:
    model = CASES["Whisper, cross"].build("sdpa", torch.float32)
    edit = edits.add(f"model.{path}", VECTOR, positions=[2, 9])
    made = generate(model, edit, input_features=FRAMES, decoder_input_ids=IDS, output_logits=True)
    new = made.sequences[:, -NEW:]
    edited, plain = (
        again(model, e, new, input_features=FRAMES, decoder_input_ids=made.sequences) for e in (edit, None)
    )
    assert torch.allclose(torch.stack(made.logits, 1), edited, atol=1e-4)
    assert (edited - plain).abs().max() > 1e-2


# -------------------------------------------------------------------------------------------------- what cannot be done


def test_places_in_the_text_that_cannot_be_known_are_refused() -> None:
    model = CASES["Qwen3"].build("sdpa", torch.float32)
    with pytest.raises(ValueError, match="1 of 8 positions"):  # Hugging Face asks for the newest logits alone
        generate(model, edits.add("lm_head", torch.ones(19), positions=0), input_ids=IDS)
    first = edits.add("model.embed_tokens", VECTOR, positions=0)
    with torch.no_grad(), regard.edit(model, first):
        model(IDS)
        with pytest.raises(ValueError, match=r"at position 8.* at 0"):
            model(IDS[:, :1])  # another text of one token, or a step?
    with torch.no_grad(), regard.edit(model, first) as editing:
        model(IDS)
        model(IDS[:, :3])
    assert editing.applied[0].calls == 2
    eager = CASES["Qwen3"].build("eager", torch.float32)
    with torch.inference_mode(), pytest.raises(ValueError, match="attention"):
        generate(eager, first, input_ids=IDS)


def test_attention_of_a_form_that_is_not_known_is_named() -> None:
    config = transformers.LongformerConfig(**SMALL | {"attention_window": [4, 4], "eos_token_id": 2})
    model = transformers.LongformerModel(config).eval()
    path = "encoder.layer.1.attention.self"
    for layer in (path, None, 0):
        with (
            torch.no_grad(),
            pytest.raises(LookupError, match=r"attention\.self.*softmax"),
            regard.edit(model, edits.ablate(layer, 0)),
        ):
            model(IDS)
    with pytest.raises(LookupError, match=r"attention\.self.*softmax"):
        regard.effect(lambda: model(IDS), model, edits.ablate(path, 0), regard.metrics.moved(0))


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.float32).min, float("-inf")])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_edge_that_a_bias_hides_cannot_be_knocked_out(attention: str, hidden: float) -> None:
    case = CASES["Qwen3"]
    model = case.build(attention, torch.float32)
    seen = torch.ones(8, 8).tril().bool()
    mask = torch.zeros(2, 1, 8, 8).masked_fill(~seen, hidden)
    with torch.no_grad():
        plain = model(IDS, attention_mask=mask).logits
        with pytest.raises(LookupError, match="hides"), regard.edit(model, edits.knock_out(0, HEAD, 2, 5)):
            changed = model(IDS, attention_mask=mask).logits
    assert torch.equal(changed, plain)
