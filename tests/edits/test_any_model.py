"""Edits of transformers' models that have no family here, against the same edit made by hand in the eager model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits
from regard.edits.values import Edit, KnockOut

transformers = pytest.importorskip("transformers")

ROW, KEYS, N = 6, [1, 4], 8
IDS = torch.tensor([[3, 5, 7, 11, 2, 13, 17, 6], [4, 9, 1, 12, 8, 10, 15, 2]])
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
FRAMES = torch.linspace(-3, 3, 2 * 8 * 20).cos().view(2, 8, 20)
SMALL: dict[str, Any] = dict(
    hidden_size=24, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2, intermediate_size=16,
    vocab_size=19, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
ALIKE = {"head_dim": 4}


@dataclass
class Case:
    """One attention of an architecture: how the model is made and called, and where this attention is."""

    model: str
    config: str
    path: str
    projection: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": IDS})
    small: bool = True
    head: int = 4

    def build(self, attention: str) -> nn.Module:
        config = getattr(transformers, self.config)(**(SMALL if self.small else {}) | self.options)
        config._attn_implementation = attention
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config).double().eval()
        return model

    def run(self, model: nn.Module) -> Tensor:
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in self.inputs.items()}
        with torch.no_grad():
            output = model(**inputs, use_cache=False) if "Vision" not in self.model else model(**inputs)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state


LLAMA = ("model.layers.1.self_attn", "o_proj")
WHISPER: dict[str, Any] = dict(
    d_model=24, encoder_attention_heads=6, decoder_attention_heads=6, encoder_layers=2, decoder_layers=2, vocab_size=19,
    encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=10, max_target_positions=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, init_std=0.3,
)  # fmt: skip


def whisper(path: str) -> Case:
    inputs = {"input_features": FRAMES, "decoder_input_ids": IDS}
    return Case("WhisperForConditionalGeneration", "WhisperConfig", path, "out_proj", WHISPER, inputs, small=False)


CASES = {
    "Qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", *LLAMA, ALIKE),
    "Gemma3": Case(
        "Gemma3ForCausalLM", "Gemma3TextConfig", *LLAMA,
        {"head_dim": 4, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Gemma2, softcap": Case("Gemma2ForCausalLM", "Gemma2Config", *LLAMA, {"head_dim": 4, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "Mistral, window": Case("MistralForCausalLM", "MistralConfig", *LLAMA, {"sliding_window": 6}),
    "gpt_oss, sinks": Case(
        "GptOssForCausalLM", "GptOssConfig", *LLAMA,
        {"head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6,
         "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Phi3, q, k and v in one": Case("Phi3ForCausalLM", "Phi3Config", *LLAMA),
    "OLMo2": Case("Olmo2ForCausalLM", "Olmo2Config", *LLAMA),
    "Granite": Case("GraniteForCausalLM", "GraniteConfig", *LLAMA, {"attention_multiplier": 0.3}),
    "Cohere": Case("CohereForCausalLM", "CohereConfig", *LLAMA),
    "SmolLM3": Case("SmolLM3ForCausalLM", "SmolLM3Config", *LLAMA),
    "GLM4": Case("Glm4ForCausalLM", "Glm4Config", *LLAMA, {"head_dim": 4}),
    "Falcon, ALiBi": Case("FalconForCausalLM", "FalconConfig", "transformer.h.1.self_attention", "dense", {"alibi": True, "new_decoder_architecture": False, "multi_query": True, "ffn_hidden_size": 16}),
    "Falcon": Case("FalconForCausalLM", "FalconConfig", "transformer.h.1.self_attention", "dense", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 3, "ffn_hidden_size": 16}),
    "Bloom, ALiBi": Case("BloomForCausalLM", "BloomConfig", "transformer.h.1.self_attention", "dense", {"n_layer": 2, "n_head": 6}),
    "DeepSeek-V3": Case("DeepseekV3ForCausalLM", "DeepseekV3Config", *LLAMA, {"num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 2}),
    "ModernBERT": Case("ModernBertForMaskedLM", "ModernBertConfig", "model.layers.1.attn", "Wo", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "OPT": Case("OPTForCausalLM", "OPTConfig", "model.decoder.layers.1.self_attn", "out_proj", {"ffn_dim": 16, "word_embed_proj_dim": 24}),
    "GPT-NeoX": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", "gpt_neox.layers.1.attention", "dense"),
    "MPT": Case("MptForCausalLM", "MptConfig", "transformer.blocks.1.attn", "out_proj", {"d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 32}),
    "SigLIP": Case(
        "SiglipVisionModel", "SiglipVisionConfig", "encoder.layers.1.self_attn", "out_proj",
        {"image_size": 16, "patch_size": 4}, {"pixel_values": PIXELS},
    ),
    "Whisper encoder": whisper("model.encoder.layers.1.self_attn"),
    "Whisper decoder": whisper("model.decoder.layers.1.self_attn"),
    "Whisper cross": whisper("model.decoder.layers.1.encoder_attn"),
}  # fmt: skip


def hide(module: nn.Module, args: Any, kwargs: dict[str, Any], head: int, heads: int, keys: int) -> Any:
    """A pre-hook of an eager attention: its additive mask with the edges hidden."""
    name = "attention_mask"
    hidden = args[0] if args else kwargs["hidden_states"]
    given = kwargs.get(name)
    mask = hidden.new_zeros(1, 1, hidden.shape[1], keys) if given is None else given
    mask = mask.expand(hidden.shape[0], heads, -1, -1).clone()
    mask[:, head, ROW, KEYS] = torch.finfo(mask.dtype).min
    return args, kwargs | {name: mask}


def by_hand(case: Case, model: nn.Module, single: Edit) -> Tensor:
    attention = model.get_submodule(case.path)
    projection = attention.get_submodule(case.projection)
    if isinstance(single, KnockOut):
        keys = 10 if "Whisper" in case.model and "decoder.layers.1.self" not in case.path else N
        keys = 16 if "Vision" in case.model else keys
        handle = attention.register_forward_pre_hook(
            lambda module, args, kwargs: hide(module, args, kwargs, case.head, 6, keys), with_kwargs=True
        )
    else:

        def zero(module: nn.Module, args: Any) -> Any:
            heads = args[0].unflatten(-1, (6, -1)).clone()
            heads[..., case.head, :] = 0.0
            return heads.flatten(-2)

        handle = projection.register_forward_pre_hook(zero)
    try:
        return case.run(model)
    finally:
        handle.remove()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_edits_equal_those_made_by_hand(name: str, attention: str) -> None:
    case = CASES[name]
    model, eager = case.build(attention), case.build("eager")
    plain = case.run(model)
    assert torch.allclose(plain, case.run(eager), atol=1e-5), (plain - case.run(eager)).abs().max()
    for single in (edits.knock_out(case.path, case.head, ROW, KEYS), edits.ablate(case.path, case.head)):
        with regard.edit(model, single) as editing:
            changed = case.run(model)
        expected = by_hand(case, eager, single)
        difference = (changed - expected).abs().max().item()
        print(name, attention, single.function, difference, (changed - plain).abs().max().item())
        assert difference < 1e-5, difference
        assert (changed - plain).abs().max() > 1e-6
        assert editing.applied[0].calls == 1
