"""`regard.verify` of models that look at pictures, and of models of long texts: what is compared, and what is not."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    BigBirdConfig,
    BlipConfig,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    DeiTConfig,
    Dinov2Config,
    IdeficsConfig,
    LlamaConfig,
    LlavaConfig,
    LongformerConfig,
    SwinConfig,
    ViTConfig,
)
from twins import Twin

import regard
from regard.models.model import Model
from regard.parity import passes
from regard.parity.passes import TensorPlace
from regard.parity.verification import Certificate, Line

VIT = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29, "num_labels": 7}
VIT |= {"image_size": [20, 12], "patch_size": 4}
SQUARE = VIT | {"image_size": 20, "encoder_stride": 4}
DINO = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "image_size": 20, "patch_size": 4}
# 11 × 18 patches, then 6 × 9 and 3 × 5, with padding in windows of 3.
SWIN = {"embed_dim": 10, "depths": [2, 3, 1], "num_heads": [2, 5, 4], "window_size": 3, "mlp_ratio": 2.5}
SWIN |= {"image_size": [22, 53], "patch_size": [2, 3], "num_labels": 7}
SEEN = {"hidden_size": 28, "num_hidden_layers": 2, "num_attention_heads": 7, "intermediate_size": 19}
SEEN |= {"image_size": 12, "patch_size": 4, "projection_dim": 11}
READ = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
READ |= {"max_position_embeddings": 23, "eos_token_id": 5, "projection_dim": 11}
CLIP = {"text_config": READ, "vision_config": SEEN, "projection_dim": 13, "num_labels": 3}
TOKENS = {"bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
BLIP_TEXT = READ | TOKENS | {"hidden_size": 28, "num_attention_heads": 7}
BLIP = {"vision_config": SEEN, "text_config": BLIP_TEXT, "image_text_hidden_size": 11, "projection_dim": 13}
LLAMA = {"vocab_size": 47, "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 37, "max_position_embeddings": 89, "pad_token_id": 0}
IDEFICS = {"vocab_size": 47, "additional_vocab_size": 3, "hidden_size": 30, "intermediate_size": 37}
IDEFICS |= {"num_hidden_layers": 4, "num_attention_heads": 5, "cross_layer_interval": 2, "max_position_embeddings": 43}
IDEFICS |= {"qk_layer_norms": True, "use_resampler": True, "alpha_type": "vector", "pad_token_id": 0}
IDEFICS |= {"freeze_text_layers": False, "freeze_vision_layers": False, "freeze_lm_head": False}
IDEFICS |= {"vision_config": {"embed_dim": 20, "image_size": 12, "patch_size": 4, "intermediate_size": 29}}
IDEFICS["vision_config"] |= {"num_hidden_layers": 3, "num_attention_heads": 5}
IDEFICS |= {"perceiver_config": {"resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 3}}
IDEFICS["perceiver_config"] |= {"resampler_head_dim": 8, "qk_layer_norms_perceiver": True}
LONG = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
LONGFORMER = LONG | {"max_position_embeddings": 43, "attention_window": [4, 12, 6], "pad_token_id": 1}
BIG_BIRD = LONG | {"max_position_embeddings": 41, "block_size": 3, "num_random_blocks": 2, "sep_token_id": 6}


def llava() -> LlavaConfig:
    vision = CLIPVisionConfig(**SEEN | {"num_hidden_layers": 3})
    return LlavaConfig(vision_config=vision, text_config=LlamaConfig(**LLAMA), image_token_index=5, image_seq_length=9)


TWINS = {
    "ViTModel": lambda: ViTConfig(**VIT),
    "ViTForImageClassification": lambda: ViTConfig(**VIT),
    "ViTForMaskedImageModeling": lambda: ViTConfig(**SQUARE),
    "DeiTForImageClassificationWithTeacher": lambda: DeiTConfig(**VIT),
    "Dinov2Model": lambda: Dinov2Config(**DINO),
    "SwinModel": lambda: SwinConfig(**SWIN),
    "SwinForImageClassification": lambda: SwinConfig(**SWIN),
    "SwinForMaskedImageModeling": lambda: SwinConfig(**SWIN | {"image_size": 24, "patch_size": 2, "encoder_stride": 8}),
    "CLIPModel": lambda: CLIPConfig(**CLIP),
    "CLIPTextModel": lambda: CLIPTextConfig(**READ),
    "CLIPTextModelWithProjection": lambda: CLIPTextConfig(**READ),
    "CLIPVisionModel": lambda: CLIPVisionConfig(**SEEN),
    "CLIPVisionModelWithProjection": lambda: CLIPVisionConfig(**SEEN),
    "CLIPForImageClassification": lambda: CLIPConfig(**CLIP),
    "BlipModel": lambda: BlipConfig(**BLIP),
    "BlipForConditionalGeneration": lambda: BlipConfig(**BLIP),
    "BlipForQuestionAnswering": lambda: BlipConfig(**BLIP),
    "BlipForImageTextRetrieval": lambda: BlipConfig(**BLIP),
    "LlavaModel": llava,
    "LlavaForConditionalGeneration": llava,
    "IdeficsModel": lambda: IdeficsConfig(**IDEFICS),
    "IdeficsForVisionText2Text": lambda: IdeficsConfig(**IDEFICS),
    **{
        f"Longformer{head}": lambda: LongformerConfig(**LONGFORMER)
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering")
    },
    **{
        f"BigBird{head}": lambda: BigBirdConfig(**BIG_BIRD)
        for head in ("Model", "ForPreTraining", "ForQuestionAnswering")
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Directories of tiny random checkpoints, each written once."""
    made: dict[str, Path] = {}

    def checkpoint(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            Twin(architecture, TWINS[architecture](), made[architecture])
        return made[architecture]

    return checkpoint


@pytest.fixture(scope="module")
def certified(checkpoint):
    """Their certificates in fp32, each made once."""
    return cache(lambda architecture: regard.verify(checkpoint(architecture)))


def whats(found: Certificate, part: str = "") -> list[str]:
    """What is compared of a part, once each, in order."""
    return list(dict.fromkeys(line.place.what for line in found.lines if line.place.part == part))


WEIGHED = ["embedding", "attention weights", "hidden states"]
TOWER = ["embedding", "hidden states"]


@pytest.mark.parametrize("architecture", TWINS)
def test_twins_of_every_family_are_the_same_in_fp32(architecture, certified):
    found = certified(architecture)
    assert found.result == "same", str(found)
    assert found.architecture == architecture
    assert all(line.place.what == "embedding" or line.error > 0 for line in found.lines), "not with itself"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "architecture",
    [
        "ViTModel",
        "SwinForImageClassification",
        "CLIPModel",
        "BlipForQuestionAnswering",
        "LlavaForConditionalGeneration",
        "IdeficsForVisionText2Text",
        "LongformerForSequenceClassification",
        "BigBirdModel",
    ],
)
def test_twins_are_the_same_in_other_dtypes(architecture, dtype, checkpoint):
    found = regard.verify(checkpoint(architecture), dtype=dtype)
    assert found.passed, str(found)
    assert found.dtype == str(dtype).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------- what is compared


def test_everything_that_a_vision_model_makes_is_compared(certified):
    bare, labels = certified("ViTModel"), certified("ViTForImageClassification")
    layers = [TensorPlace("", layer, what) for layer in range(3) for what in WEIGHED[1:]]
    last = [TensorPlace("", None, what) for what in ("last norm", "pooled")]
    assert [line.place for line in bare.lines] == [TensorPlace("", None, "embedding"), *layers, *last]
    assert [line.place for line in labels.lines] == [
        TensorPlace("", None, "embedding"),
        *layers,
        TensorPlace("", None, "logits"),
    ]
    assert (bare.pictures, bare.texts, bare.tokens, bare.random_ids, bare.not_compared) == (3, 0, 0, False, ())
    assert "\n3 pictures. Error: the largest" in str(bare)
    assert "\nPixels were drawn." in str(bare)
    assert "Not compared" not in str(bare)


def test_of_each_stage_of_swin_the_weights_of_the_last_block_are_compared(certified):
    found = certified("SwinModel")
    assert [line.place.layer for line in found.lines if line.place.what == "attention weights"] == [0, 1, 2]
    assert found.not_compared == ()


def test_weights_in_another_form_are_left_out_and_the_certificate_says_so(checkpoint, monkeypatch):
    run = passes._run

    def per_picture(*given, **asked):
        out = run(*given, **asked)
        out["attentions"] = tuple(w.unflatten(0, (3, -1)) if n == 1 else w for n, w in enumerate(out["attentions"]))
        return out

    monkeypatch.setattr(passes, "_run", per_picture)
    found = regard.verify(checkpoint("SwinModel"))
    assert found.result == "same", str(found)
    assert [line.place.layer for line in found.lines if line.place.what == "attention weights"] == [0, 2]
    assert found.not_compared == ("attention weights",)
    assert "\nNot compared: attention weights." in str(found)
    assert "\n비교하지 않은 것: 어텐션 가중치." in found.text("ko")
    assert found.as_dict()["not_compared"] == ["attention weights"]


@pytest.mark.parametrize(
    ("architecture", "parts", "head", "unseen"),
    [
        ("CLIPModel", ("picture", "text"), ["pooled", "text vectors", "picture vectors", "logits"], ()),
        ("CLIPTextModelWithProjection", ("text",), ["text vectors"], ()),
        ("CLIPVisionModelWithProjection", ("picture",), ["picture vectors"], ()),
        ("BlipModel", ("picture", "text"), ["pooled", "text vectors", "picture vectors", "logits"], ()),
        ("BlipForConditionalGeneration", ("picture", "text"), ["logits"], ("greedy ids",)),
        ("BlipForQuestionAnswering", ("picture", "question", "answer"), ["logits"], ("greedy ids",)),
        ("BlipForImageTextRetrieval", ("picture", "text"), ["cosines", "logits"], ()),
        ("LlavaModel", ("picture", "text"), [], ()),
        ("LlavaForConditionalGeneration", ("picture", "text"), ["logits"], ("greedy ids",)),
        ("IdeficsModel", ("picture", "text"), [], ()),
        ("IdeficsForVisionText2Text", ("picture", "text"), ["logits"], ("greedy ids",)),
    ],
)
def test_both_towers_and_the_head_are_compared_beside_texts(architecture, parts, head, unseen, certified):
    found = certified(architecture)
    assert tuple(dict.fromkeys(line.place.part for line in found.lines if line.place.part)) == parts
    assert all(whats(found, part)[:2] == TOWER for part in parts)
    assert whats(found) == head
    assert found.not_compared == ("attention weights", *unseen)
    assert (found.texts > 0) == ("Vision" not in architecture or "Text2Text" in architecture)
    assert (found.pictures > 0) == ("TextModel" not in architecture)


def test_counts_and_what_was_drawn_are_said(certified):
    found = certified("CLIPModel")
    assert (found.pictures, found.texts, found.tokens, found.random_ids) == (3, 5, 19 + 11 + 5 + 17 + 7, True)
    assert "\n3 pictures, 5 texts, 59 tokens. Error" in str(found)
    assert "\nPixels and ids were drawn." in str(found)
    korean = found.text("ko")
    assert "\n이미지 3개, 텍스트 5개, 토큰 59개. 오차" in korean
    assert not [word for word in ("picture", "text ", "drawn", "vectors", "Not") if word in korean]


def test_long_texts_are_drawn_so_long_that_attention_is_sparse(certified):
    longformer, big = certified("LongformerModel"), certified("BigBirdModel")
    assert (longformer.texts, longformer.tokens) == (2, 12 + 19 + 6 + 11)
    assert (big.texts, big.tokens) == (2, 39 + 27 // 2 + 11)  # 46 would be more than the positions that fill blocks
    for found in (longformer, big):
        assert found.not_compared == ("attention weights",)
        assert whats(found) == [*TOWER, "pooled"]


def test_short_texts_are_compared_in_big_bird_where_it_changes_to_full_attention(tmp_path):
    Twin("BigBirdModel", BigBirdConfig(**BIG_BIRD | {"max_position_embeddings": 23}), tmp_path)
    found = regard.verify(tmp_path)
    assert found.result == "same", str(found)
    assert whats(found) == [*TOWER, "pooled"]
    assert found.not_compared == ("attention weights",)


def test_weights_are_compared_in_big_bird_with_full_attention(tmp_path):
    Twin("BigBirdModel", BigBirdConfig(**BIG_BIRD | {"attention_type": "original_full"}), tmp_path)
    found = regard.verify(tmp_path)
    assert found.result == "same", str(found)
    assert whats(found) == [*WEIGHED, "pooled"]
    assert (found.texts, found.not_compared) == (5, ())


def test_both_tokenizers_are_compared_beside_pictures(tmp_path):
    Twin("BlipForConditionalGeneration", BlipConfig(**BLIP), tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD] [UNK] [CLS] [SEP] [MASK] yes . the animal too".replace(" ", "\n"))
    found = regard.verify(tmp_path)
    assert found.result == "same", str(found)
    assert [str(line.place) for line in found.lines[:2]] == ["token ids", "picture, embedding"]
    assert (found.texts, found.random_ids) == (5, True)


def test_a_certificate_does_not_say_that_a_tokenizer_is_missing_where_it_was_compared(certified):
    found = certified("LongformerModel")
    assert "\nNo tokenizer: ids were drawn." in str(found)
    tokens = Line(TensorPlace("", None, "token ids"), 0.0, 0.0, 0.0)
    said = replace(found, lines=(tokens, *found.lines))
    assert "\nIds were drawn." in str(said)
    assert "\nid를 무작위로 만들었습니다." in said.text("ko")


def test_a_seed_draws_other_pixels(checkpoint):
    def errors(**more: int) -> list[float]:
        return [line.error for line in regard.verify(checkpoint("ViTModel"), **more).lines]

    assert errors() == errors(seed=0, rows=8)
    assert errors() != errors(seed=1)


# -------------------------------------------------------------------------------------------------------- broken models


def scaled(path: str):
    """Break the scale of an attention."""

    def broken(model: Model) -> None:
        model.get_submodule(path).scale *= 1.01

    return broken


def shifted(path: str):
    """Break a weight."""

    def broken(model: Model) -> None:
        model.get_parameter(path).data += 0.05

    return broken


@pytest.mark.parametrize(
    ("architecture", "broken", "where"),
    [
        ("ViTModel", scaled("tower.blocks.1.attention"), "layer 1, attention weights"),
        ("ViTModel", shifted("tower.norm.bias"), "last norm"),
        ("ViTForMaskedImageModeling", shifted("tower.embed.hidden"), "embedding"),
        ("SwinModel", scaled("tower.stages.1.blocks.2.attention"), "layer 1, attention weights"),
        ("SwinForImageClassification", scaled("tower.stages.1.blocks.1.attention"), "layer 1, attention weights"),
        ("CLIPModel", scaled("text.blocks.2.attention"), "text layer 2, hidden states"),
        ("CLIPModel", shifted("head.image.weight"), "picture vectors"),
        ("CLIPModel", shifted("head.scale"), "logits"),
        ("BlipForConditionalGeneration", scaled("decoder.blocks.1.cross"), "text layer 1, hidden states"),
        ("BlipForQuestionAnswering", scaled("vision.blocks.1.attention"), "picture layer 1, hidden states"),
        ("BlipForQuestionAnswering", scaled("encoder.blocks.2.cross"), "question layer 2, hidden states"),
        ("BlipForQuestionAnswering", scaled("decoder.blocks.0.cross"), "answer layer 0, hidden states"),
        ("BlipForImageTextRetrieval", shifted("head.text.weight"), "cosines"),
        ("BlipForImageTextRetrieval", shifted("head.score.bias"), "logits"),
        ("LlavaForConditionalGeneration", shifted("projector.w_out.bias"), "text, embedding"),
        ("LlavaForConditionalGeneration", scaled("vision.blocks.1.attention"), "picture layer 1, hidden states"),
        ("IdeficsForVisionText2Text", scaled("looks.1.attention"), "text layer 2, hidden states"),
        ("IdeficsForVisionText2Text", scaled("vision.blocks.2.attention"), "picture layer 2, hidden states"),
        ("LongformerForSequenceClassification", scaled("tower.blocks.1.attention"), "layer 1, hidden states"),
        (
            "LongformerForQuestionAnswering",
            shifted("tower.blocks.2.attention.whole.w_q.weight"),
            "layer 2, hidden states",
        ),
        ("BigBirdForQuestionAnswering", scaled("tower.blocks.0.attention"), "layer 0, hidden states"),
        ("BigBirdForQuestionAnswering", shifted("head.norm.bias"), "logits"),
    ],
)
def test_a_broken_model_is_a_bug_and_its_first_place_is_named(architecture, broken, where, checkpoint):
    model = regard.load(checkpoint(architecture))
    broken(model)
    assert regard.verify(model).verdict == f"bug: first in {where}"


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("architecture", ["ViTModel", "CLIPModel"])
def test_texts_for_a_model_of_pictures_are_refused(architecture, checkpoint):
    with pytest.raises(ValueError, match="texts"):
        regard.verify(checkpoint(architecture), texts=["yes"])


def test_pictures_that_transformers_cannot_rebuild_are_refused(tmp_path):
    Twin("ViTForMaskedImageModeling", ViTConfig(**VIT | {"encoder_stride": 4}), tmp_path)
    with pytest.raises(ValueError, match=r"5.*3"):
        regard.verify(tmp_path)


@pytest.mark.parametrize("architecture", ["LongformerForQuestionAnswering", "BigBirdForQuestionAnswering"])
def test_texts_without_a_question_are_refused(architecture, checkpoint):
    with pytest.raises(ValueError, match="'question-answering'"):
        regard.verify(checkpoint(architecture), texts=["yes"])


def test_a_kind_of_model_that_is_not_compared_yet_is_refused_in_words(checkpoint):
    class Other(Model):
        pass

    other = Other(regard.load(checkpoint("ViTModel")).config)
    with pytest.raises(ValueError, match="Other"):
        passes.visual_inputs(other, 8, 0)
