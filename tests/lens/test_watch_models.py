"""`watch` on models of transformers, tiny and random: the rows are those of eager attention, and nothing else changes.

Truth is what the same weights give under eager attention with output_attentions=True. Models that torch's fused kernel
does not serve (ALiBi written out, disentangled attention, softcap, sinks) are watched under eager, where their rows are
to be the same bits, and one under FlexAttention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import regard

tf = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

B, N, M = 2, 7, 3
ALL = slice(None)
HEADS, GROUPED = 3, {"num_attention_heads": 6, "num_key_value_heads": 2}
TEXT = {"vocab_size": 31, "num_hidden_layers": 2, "intermediate_size": 17, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
PLAIN = TEXT | {"hidden_size": 15, "num_attention_heads": HEADS}
ROTARY = TEXT | {"hidden_size": 60} | GROUPED
IMAGE = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 17}
IMAGE |= {"image_size": 12, "patch_size": 4}
SEQ2SEQ = {"vocab_size": 31, "d_model": 15, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
SEQ2SEQ |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ |= {"encoder_ffn_dim": 17, "decoder_ffn_dim": 17, "decoder_start_token_id": 1}


def ids(n: int = N) -> torch.Tensor:
    return torch.randint(3, 30, (B, n), generator=torch.Generator().manual_seed(n))


def padded(side: str) -> dict[str, torch.Tensor]:
    real = torch.ones(B, N, dtype=torch.long)
    real[1, slice(0, 2) if side == "left" else slice(5, N)] = 0
    return {"input_ids": ids(), "attention_mask": real}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[-1]))


def own(out: Any) -> list[torch.Tensor]:
    return list(out.attentions)


def both(out: Any) -> list[torch.Tensor]:
    """Encoder, then each layer's own and cross."""
    pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return [*out.encoder_attentions, *(x for pair in pairs for x in pair)]


def twins(out: Any) -> list[torch.Tensor]:
    return [*out.vision_model_output.attentions, *out.text_model_output.attentions]


@dataclass(frozen=True)
class Case:
    """A model, its input, and where its output has the weights, in the order of the calls.

    paths: the modules that attend, in the order of the calls.  cross: how the paths of cross-attention end.
    fp32: the model's own softmax is in fp32 whatever the rest is.
    empty: queries that are padding see nothing under the fused kernel: causal, and padded on the left.
    """

    model: str
    config: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    paths: list[str]
    truth: Callable[[Any], list[torch.Tensor]] = own
    cross: tuple[str, ...] = ()
    fp32: bool = False
    empty: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32 else torch.float64


def layers(path: str, count: int = 2) -> list[str]:
    return [path.format(n) for n in range(count)]


def alternating(one: str, two: str) -> list[str]:
    return [path.format(n) for n in range(2) for path in (one, two)]


def decoder() -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": ids(M)}


def llava() -> Any:
    vision = tf.CLIPVisionConfig(**IMAGE)
    return tf.LlavaConfig(
        vision_config=vision, text_config=tf.LlamaConfig(**ROTARY), image_token_index=30, vision_feature_layer=-1
    )


def picture_in_text() -> dict[str, torch.Tensor]:
    """A word, nine patches, two words."""
    words = ids(M)
    text = torch.cat([words[:, :1], torch.full((B, 9), 30), words[:, 1:]], 1)
    return {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": noise(B, 3, 12, 12)}


ENCODER_LAYER = "encoder.layer.{}.attention.self"
SDPA = {
    "bert": Case("BertModel", lambda: tf.BertConfig(**PLAIN), lambda: padded("right"), layers(ENCODER_LAYER)),
    "bert, left": Case("BertModel", lambda: tf.BertConfig(**PLAIN), lambda: padded("left"), layers(ENCODER_LAYER)),
    "roberta": Case("RobertaModel", lambda: tf.RobertaConfig(**PLAIN), lambda: padded("right"), layers(ENCODER_LAYER)),
    "albert": Case(
        "AlbertModel",
        lambda: tf.AlbertConfig(**PLAIN, embedding_size=5),
        lambda: padded("right"),
        ["encoder.albert_layer_groups.0.albert_layers.0.attention"] * 2,
    ),
    "gpt2": Case(
        "GPT2Model",
        lambda: tf.GPT2Config(vocab_size=31, n_embd=15, n_layer=2, n_head=HEADS, bos_token_id=1, eos_token_id=2),
        lambda: padded("left"),
        layers("h.{}.attn"),
        empty=True,
    ),
    "llama": Case(
        "LlamaModel",
        lambda: tf.LlamaConfig(**ROTARY),
        lambda: padded("left"),
        layers("layers.{}.self_attn"),
        fp32=True,
        empty=True,
    ),
    "llama, right": Case(
        "LlamaModel",
        lambda: tf.LlamaConfig(**ROTARY),
        lambda: padded("right"),
        layers("layers.{}.self_attn"),
        fp32=True,
    ),
    "qwen2": Case(
        "Qwen2Model",
        lambda: tf.Qwen2Config(**ROTARY),
        lambda: padded("left"),
        layers("layers.{}.self_attn"),
        fp32=True,
        empty=True,
    ),
    "mistral": Case(
        "MistralModel",
        lambda: tf.MistralConfig(**ROTARY, sliding_window=3),
        lambda: padded("left"),
        layers("layers.{}.self_attn"),
        fp32=True,
        empty=True,
    ),
    "phi": Case(
        "PhiModel",
        lambda: tf.PhiConfig(**TEXT, hidden_size=24, num_attention_heads=HEADS),
        lambda: padded("left"),
        layers("layers.{}.self_attn"),
        fp32=True,
        empty=True,
    ),
    "gpt-neox": Case(
        "GPTNeoXModel",
        lambda: tf.GPTNeoXConfig(**TEXT, hidden_size=24, num_attention_heads=HEADS),
        lambda: padded("right"),
        layers("layers.{}.attention"),
        fp32=True,
    ),
    "t5": Case(
        "T5Model",
        lambda: tf.T5Config(
            vocab_size=31, d_model=15, d_kv=5, d_ff=17, num_layers=2, num_heads=HEADS, decoder_start_token_id=0
        ),
        lambda: padded("right") | decoder(),
        [
            *layers("encoder.block.{}.layer.0.SelfAttention"),
            *alternating("decoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.1.EncDecAttention"),
        ],
        both,
        ("EncDecAttention",),
        fp32=True,
    ),
    "bart": Case(
        "BartModel",
        lambda: tf.BartConfig(**SEQ2SEQ),
        lambda: padded("right") | decoder(),
        [
            *layers("encoder.layers.{}.self_attn"),
            *alternating("decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"),
        ],
        both,
        ("encoder_attn",),
    ),
    "whisper": Case(
        "WhisperModel",
        lambda: tf.WhisperConfig(**SEQ2SEQ | {"d_model": 18}, num_mel_bins=5, max_source_positions=11),
        lambda: {"input_features": noise(B, 5, 22)} | decoder(),
        [
            *layers("encoder.layers.{}.self_attn"),
            *alternating("decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"),
        ],
        both,
        ("encoder_attn",),
    ),
    "wav2vec2": Case(
        "Wav2Vec2Model",
        lambda: tf.Wav2Vec2Config(
            hidden_size=15,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=17,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=3,
        ),
        lambda: {"input_values": noise(B, 150)},
        layers("encoder.layers.{}.attention"),
    ),
    "vit": Case(
        "ViTModel",
        lambda: tf.ViTConfig(**IMAGE),
        lambda: {"pixel_values": noise(B, 3, 12, 12)},
        layers("layers.{}.attention"),
        fp32=True,
    ),
    "clip": Case(
        "CLIPModel",
        lambda: tf.CLIPConfig(text_config=PLAIN, vision_config=IMAGE, projection_dim=5),
        lambda: padded("right") | {"pixel_values": noise(B, 3, 12, 12)},
        [*layers("vision_model.encoder.layers.{}.self_attn"), *layers("text_model.encoder.layers.{}.self_attn")],
        twins,
        fp32=True,
    ),
}

EAGER = {
    "deberta-v2": Case(
        "DebertaV2Model",
        lambda: tf.DebertaV2Config(
            **PLAIN,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=4,
            norm_rel_ebd="layer_norm",
        ),
        lambda: padded("right"),
        layers(ENCODER_LAYER),
    ),
    "bloom": Case(
        "BloomModel",
        lambda: tf.BloomConfig(vocab_size=31, hidden_size=15, n_layer=2, n_head=HEADS),
        lambda: padded("left"),
        layers("h.{}.self_attention"),
        fp32=True,
    ),
    "xlnet": Case(
        "XLNetModel",
        lambda: tf.XLNetConfig(vocab_size=31, d_model=18, n_layer=2, n_head=HEADS, d_inner=17),
        lambda: padded("left"),
        layers("layer.{}.rel_attn"),
        fp32=True,
    ),
    "gemma2": Case(
        "Gemma2Model",
        lambda: tf.Gemma2Config(**ROTARY, head_dim=10, sliding_window=3, attn_logit_softcapping=0.5),
        lambda: padded("left"),
        layers("layers.{}.self_attn"),
        fp32=True,
    ),
    "gpt-oss": Case(
        "GptOssModel",
        lambda: tf.GptOssConfig(
            **TEXT | {"hidden_size": 48, "intermediate_size": 16},
            **GROUPED,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=3,
        ),
        lambda: padded("left"),
        layers("layers.{}.self_attn"),
        fp32=True,
    ),
    "blip": Case(
        "BlipModel",
        lambda: tf.BlipConfig(text_config=PLAIN | {"encoder_hidden_size": 15}, vision_config=IMAGE, projection_dim=5),
        lambda: padded("right") | {"pixel_values": noise(B, 3, 12, 12)},
        [*layers("vision_model.encoder.layers.{}.self_attn"), *layers("text_model.encoder.layer.{}.attention.self")],
        twins,
    ),
}


def built(case: Case, implementation: str) -> Any:
    torch.manual_seed(3)
    model = getattr(tf, case.model)._from_config(case.config(), attn_implementation=implementation, dtype=case.dtype)
    for parameter in model.parameters():  # as they come, rows would hardly differ from even ones
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def inputs(case: Case) -> dict[str, torch.Tensor]:
    return {name: x.to(case.dtype) if x.is_floating_point() else x for name, x in case.inputs().items()}


def tensors(out: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(dict(out)) if isinstance(x, torch.Tensor)]


def watched(model: Any, batch: dict[str, torch.Tensor], **asked: Any) -> Any:
    """A capture; the watched outputs are the same bits as the unwatched."""
    with torch.no_grad():
        before = tensors(model(**batch))
        with regard.watch(model, keep="qk", **asked) as seen:
            during = tensors(model(**batch))
    assert before
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    return seen


def rows_of(seen: Any) -> list[torch.Tensor]:
    return [record.view.tile(ALL, ALL) for record in seen.records]


def eager(model: Any) -> Any:
    """The same model with the same weights, under eager attention."""
    twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager", dtype=model.dtype)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def eager_rows(model: Any, case: Case) -> list[torch.Tensor]:
    with torch.no_grad():
        return case.truth(eager(model)(**inputs(case), output_attentions=True))


def assert_rows(ours: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    exact = {"rtol": 0, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(ours, truth, **exact)


def assert_placed(seen: Any, case: Case) -> None:
    """Every call is named, in order, with its kind, and nothing is missing."""
    assert [record.path for record in seen.records] == case.paths
    for record in seen.records:
        assert record.kind == ("cross" if record.path.endswith(case.cross or "nothing") else "self")
    assert seen.names == list(dict.fromkeys(case.paths))


# ------------------------------------------------------------------------------------------------------------- one pass


@pytest.mark.parametrize("name", SDPA)
def test_rows_under_the_fused_kernel_are_those_of_eager(name: str) -> None:
    case = SDPA[name]
    model, batch = built(case, "sdpa"), inputs(case)
    seen = watched(model, batch)
    assert_placed(seen, case)
    assert {record.source for record in seen.records} == {"sdpa"}
    assert seen.unseen == {}
    for ours, truth in zip(rows_of(seen), eager_rows(model, case), strict=True):
        nothing = torch.zeros(ours.shape[:3], dtype=torch.bool)
        if case.empty:  # under eager they are hidden by the dtype's smallest number, and so see every key alike
            nothing |= ~batch["attention_mask"].bool()[:, None]
        assert_rows(ours[~nothing], truth[~nothing], case.dtype)
        assert not ours[nothing].any()


@pytest.mark.parametrize("name", EAGER)
def test_rows_under_eager_are_the_same_bits(name: str) -> None:
    case = EAGER[name]
    model = built(case, "eager")
    seen = watched(model, inputs(case))
    assert_placed(seen, case)
    assert {record.source for record in seen.records} == {"softmax"}
    for ours, truth in zip(rows_of(seen), eager_rows(model, case), strict=True):
        assert torch.equal(ours, truth)


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention compiled, but not by the compiler that takes ten seconds on a CPU."""
    from transformers.integrations.flex_attention import WrappedFlexAttention

    wrapped = WrappedFlexAttention.__new__(WrappedFlexAttention)
    monkeypatch.setattr(WrappedFlexAttention, "_instance", wrapped)
    monkeypatch.setattr(wrapped, "_is_flex_compiled", True, raising=False)
    monkeypatch.setattr(wrapped, "training", False, raising=False)
    compiled = torch.compile(flex_attention, backend="eager")
    monkeypatch.setattr(wrapped, "_compiled_flex_attention", compiled, raising=False)


@pytest.mark.usefixtures("flex")
@pytest.mark.usefixtures("compiler")
def test_softcap_and_windows_under_flex_are_those_of_eager() -> None:
    """torch's kernel knows no softcap. Nor sinks: transformers refuses those under FlexAttention on a CPU as well."""
    case = EAGER["gemma2"]
    model, batch = built(case, "flex_attention"), inputs(case)
    seen = watched(model, batch)
    assert_placed(seen, case)
    assert {record.source for record in seen.records} == {"flex"}
    real = batch["attention_mask"].bool()[:, None].expand(B, 6, N)
    for ours, truth in zip(rows_of(seen), eager_rows(model, case), strict=True):
        assert_rows(ours[real], truth[real], case.dtype)
        assert not ours[~real].any()


def test_windows_of_swin_are_batch_rows() -> None:
    """Its table of relative positions goes to torch's kernel as floats; eager returns the last block of each stage."""
    config = tf.SwinConfig(embed_dim=12, depths=[2, 2], num_heads=[2, 3], image_size=24, patch_size=2, window_size=3)
    case = Case(
        "SwinModel",
        lambda: config,
        lambda: {"pixel_values": noise(B, 3, 24, 24)},
        [f"encoder.layers.{stage}.blocks.{block}.attention" for stage in range(2) for block in range(2)],
        fp32=True,
    )
    model = built(case, "sdpa")
    seen = watched(model, inputs(case))
    assert_placed(seen, case)
    truth = eager_rows(model, case)
    assert [view.sizes for view in seen] == [(B * 16, 2, 9, 9)] * 2 + [(B * 4, 3, 9, 9)] * 2
    for ours, rows in zip(rows_of(seen)[1::2], truth, strict=True):
        assert_rows(ours, rows, case.dtype)


def test_picture_and_text_of_llava_are_both_seen() -> None:
    paths = [*layers("vision_tower.encoder.layers.{}.self_attn"), *layers("language_model.layers.{}.self_attn")]
    case = Case("LlavaModel", llava, picture_in_text, paths, fp32=True)
    model, batch = built(case, "sdpa"), inputs(case)
    seen = watched(model, batch)
    assert_placed(seen, case)
    truth = eager_rows(model, case)
    with torch.no_grad():
        picture = eager(model).vision_tower(batch["pixel_values"], output_attentions=True).attentions
    for ours, rows in zip(rows_of(seen), [*picture, *truth], strict=True):
        assert_rows(ours, rows, case.dtype)


def test_rows_hidden_by_finite_numbers_are_as_even_as_the_kernel_makes_them() -> None:
    """Falcon adds ALiBi to a mask of smallest numbers: queries that are padding see every key alike."""
    config = tf.FalconConfig(
        vocab_size=31, hidden_size=18, num_hidden_layers=2, num_attention_heads=HEADS, alibi=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    case = Case("FalconModel", lambda: config, lambda: padded("left"), layers("h.{}.self_attention"), fp32=True)
    seen = watched(built(case, "sdpa"), inputs(case))
    assert_placed(seen, case)
    for record, ours in zip(seen.records, rows_of(seen), strict=True):
        even = ours[1, :, :2]
        assert (even == even[..., :1]).all()
        assert_rows(even, torch.full_like(even, 1 / N), torch.float32)
        assert (ours[1, :, 2:, :2] == 0).all()
        torch.testing.assert_close(ours.sum(-1), torch.ones(B, HEADS, N))
        assert record.facts.unhidden_rows.count == 2 * HEADS
        assert (record.view.lse[1, :, :2] < -1e38).all()


# ----------------------------------------------------------------------------------------------------------- generation


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}


def generated(
    model: Any, batch: dict[str, torch.Tensor], layers: str | None = None, **asked: Any
) -> tuple[Any, torch.Tensor]:
    """A capture of a generation, and the tokens, which are those of the unwatched run."""
    with torch.no_grad():
        before = model.generate(**batch, **GREEDY | asked)
        with regard.watch(model, keep="qk", layers=layers) as seen:
            during = model.generate(**batch, **GREEDY | asked)
    assert torch.equal(before, during)
    assert seen.unseen == {}
    return seen, during


def whole_pass(model: Any, text: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
    """The eager rows of all tokens but the last, which was never read, in one pass without a cache."""
    mask = torch.cat([real, real.new_ones(len(text), text.shape[1] - real.shape[1])], 1)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
        out = eager(model)(
            text[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions,
            output_attentions=True,
            use_cache=False,
        )
    return list(out.attentions)


CAUSAL = {
    "gpt2": ("GPT2LMHeadModel", SDPA["gpt2"]),
    "llama": ("LlamaForCausalLM", SDPA["llama"]),
    "mistral": ("MistralForCausalLM", SDPA["mistral"]),  # a window of 3: its cache drops what is older
}
CACHES = {"growing": {}, "fixed": {"cache_implementation": "static", "disable_compile": True}}


def causal(name: str, implementation: str = "sdpa") -> Any:
    kind, case = CAUSAL[name]
    return built(Case(kind, case.config, case.inputs, [], fp32=True), implementation)


@pytest.mark.pairwise
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_steps_of_generation_are_one_view_of_all_rows(name: str, implementation: str, cache: str) -> None:
    model, batch = causal(name, implementation), padded("left")
    seen, text = generated(model, batch, **CACHES[cache])
    real = torch.ones(B, N + 4, dtype=torch.bool)
    real[1, :2] = False
    for view, truth in zip(seen, whole_pass(model, text, batch["attention_mask"]), strict=True):
        assert view.sizes == (B, truth.shape[1], N + 4, N + 4)
        rows = real[:, None].expand(view.sizes[:3])
        assert_rows(view.tile(ALL, ALL)[rows], truth[rows], torch.float32)
        assert_rows(view.received, view.tile(ALL, ALL).sum(2), torch.float32)
        assert torch.equal(view.place.padding, ~real)
        assert view.place.offset is None
        assert_rows(view.mean("entropy"), mean_entropy(truth, real), torch.float32)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_fixed_cache_that_comes_into_sight_after_the_prompt_is_one_run(name: str) -> None:
    """Without padding, SDPA gets the keys of the prompt alone, and all of the cache from the first step on."""
    model, batch = causal(name), {**padded("left"), "attention_mask": torch.ones(B, N, dtype=torch.long)}
    seen, text = generated(model, batch, **CACHES["fixed"])
    assert [seen.records[n].view.sizes[3] for n in (0, len(seen.names))] == [N, N + 4]  # or this would test nothing
    for view, truth in zip(seen, whole_pass(model, text, batch["attention_mask"]), strict=True):
        assert_rows(view.tile(ALL, ALL), truth, torch.float32)


def mean_entropy(rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """(B, H) over the queries that are no padding."""
    entropy = -torch.xlogy(rows, rows).sum(-1)
    return (entropy * real[:, None]).sum(-1) / real.sum(-1, keepdim=True)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_call_of_a_generation_is_there_too(implementation: str) -> None:
    model, batch = causal("llama", implementation), padded("left")
    seen, _ = generated(model, batch)
    with torch.no_grad():
        steps = (
            eager(model).generate(**batch, **GREEDY, output_attentions=True, return_dict_in_generate=True).attentions
        )
    for layer, path in enumerate(seen.names):
        for n, step in enumerate(steps):
            real = slice(2, None) if n == 0 else ALL
            assert_rows(seen[path, n].tile(ALL, ALL)[:, :, real], step[layer][:, :, real], torch.float32)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_beams_that_change_places_are_followed(name: str, implementation: str) -> None:
    """Each row of the assembled view is the history of one beam: the one pass over its own tokens."""
    model, batch = causal(name, implementation), padded("left")
    seen, text = generated(model, batch, num_beams=3, num_return_sequences=3)
    assert any(record.link.rows is not None for record in seen.records)  # or this would test nothing
    real = batch["attention_mask"].repeat_interleave(3, 0)
    for view, truth in zip(seen, whole_pass(model, text, real), strict=True):
        real_rows = view.tile(ALL, ALL)[:, :, 2:]
        for rows in truth[:, :, 2:]:
            assert (real_rows - rows).abs().amax((1, 2, 3)).min() < 1e-6
        keys = torch.arange(N + 4) // 2
        chosen = view.tile(ALL, ALL).gather(-1, keys.expand(view.sizes[:3]).unsqueeze(-1)).squeeze(-1)
        assert_rows(view.weights.pairs(keys), chosen, torch.float32)


SEQUENCES = {
    "t5": ("T5ForConditionalGeneration", SDPA["t5"]),
    "bart": ("BartForConditionalGeneration", SDPA["bart"]),
    "whisper": ("WhisperForConditionalGeneration", SDPA["whisper"]),
}


@pytest.mark.parametrize(("name", "beams"), [("t5", 1), ("t5", 3), ("bart", 1), ("bart", 3), ("whisper", 1)])
def test_cross_attention_of_a_generation_is_assembled(name: str, beams: int) -> None:
    kind, case = SEQUENCES[name]
    model = built(Case(kind, case.config, case.inputs, [], fp32=True), "sdpa")
    batch = {key: x.float() if x.is_floating_point() else x for key, x in case.inputs().items()}
    del batch["decoder_input_ids"]
    seen, text = generated(model, batch, num_beams=beams, num_return_sequences=beams)
    text = text if text.shape[1] > 5 else torch.cat([torch.full((len(text), 1), 1), text], 1)  # Whisper drops the start
    whole = {key: x.repeat_interleave(beams, 0) for key, x in batch.items()}
    with torch.no_grad():
        out = eager(model)(**whole, decoder_input_ids=text[:, :-1], output_attentions=True)
    paths = [path for path in seen.names if "decoder" in path]
    for own, other, path in zip(out.decoder_attentions, out.cross_attentions, paths[::2], strict=True):
        assert_same_rows(seen[path], own)
        assert_same_rows(seen[paths[paths.index(path) + 1]], other)


def test_beams_are_followed_in_cross_attention_that_is_watched_alone() -> None:
    kind, case = SEQUENCES["t5"]
    model = built(Case(kind, case.config, case.inputs, [], fp32=True), "sdpa")
    beams = {"num_beams": 3, "num_return_sequences": 3}
    both_kinds, _ = generated(model, padded("right"), **beams)
    alone, _ = generated(model, padded("right"), layers="*.EncDecAttention", **beams)
    truth = [record.link for record in both_kinds.records if record.kind == "cross"]
    assert any(link.rows is not None for link in truth)
    assert [record.link for record in alone.records] == truth


def assert_same_rows(view: Any, truth: torch.Tensor) -> None:
    """Batch rows may come in another order: beams are returned by their score."""
    ours = view.tile(ALL, ALL)
    assert ours.shape == truth.shape
    assert view.place.offset is None
    for rows in truth:
        assert (ours - rows).abs().amax((1, 2, 3)).min() < 1e-6


def test_passes_without_a_cache_are_not_put_together() -> None:
    seen, _ = generated(causal("gpt2"), padded("left"), use_cache=False)
    path = seen.names[0]
    with pytest.raises(KeyError, match=r"5.*'transformer"):
        seen[path]
    assert seen[path, 4].sizes[2:] == (N + 4, N + 4)


def test_keys_of_a_generation_are_kept_once() -> None:
    for cache in CACHES.values():
        seen, _ = generated(causal("llama"), padded("left"), **cache)
        for path in seen.names:
            assert len({record.view.weights.call.k.data_ptr() for record in seen.calls(path)}) == 1


# --------------------------------------------------------------------------------------------------------------- unseen


def test_model_without_attention_says_so() -> None:
    config = tf.MambaConfig(vocab_size=31, hidden_size=15, num_hidden_layers=2, state_size=3)
    case = Case("MambaModel", lambda: config, lambda: {"input_ids": ids()}, [])
    seen = watched(built(case, "eager"), inputs(case))
    assert (seen.names, seen.unseen) == ([], {})
    with pytest.raises(LookupError, match="MambaModel"):
        seen[0]


def test_attention_in_pieces_is_named() -> None:
    """Longformer's weights are bands cut out of chunks."""
    config = tf.LongformerConfig(**PLAIN, attention_window=4)
    case = Case("LongformerModel", lambda: config, lambda: padded("right"), [])
    seen = watched(built(case, "eager"), inputs(case))
    assert seen.names == []
    assert list(seen.unseen) == layers(ENCODER_LAYER)
    assert all("(2, 8, 3, 5)" in why for why in seen.unseen.values())


def test_attention_that_did_not_run_is_named() -> None:
    case = EAGER["blip"]
    seen = watched(built(case, "eager"), inputs(case))
    assert list(seen.unseen) == layers("text_model.encoder.layer.{}.crossattention.self")
    assert all(why.startswith("it did not run in the block") for why in seen.unseen.values())
