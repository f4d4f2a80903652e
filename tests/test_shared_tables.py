"""A table that several parts share is read under whichever of its names a file has; what is not shared never is.

`safetensors.torch.save_model` keeps one name of each tensor: the first by the alphabet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from transformers import CLIPVisionConfig, LlamaConfig
from twins import build, change

from regard.models.loading import load

SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
TEXT = SIZES | {"vocab_size": 31, "max_position_embeddings": 13}
SEEN = SIZES | {"image_size": 12, "patch_size": 6}
PAIR = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 17))}
PAIR |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "max_position_embeddings": 13}
PAIR |= {"vocab_size": 31, "d_model": 12, "decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2}
TIED = {"tie_word_embeddings": True}
LLAVA = {"vision_config": CLIPVisionConfig(**SEEN), "text_config": LlamaConfig(**TEXT, **TIED), "image_token_index": 5}
VISION = {"embed_dim": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "image_size": 12, "patch_size": 6}
IDEFICS = TEXT | TIED | {"additional_vocab_size": 2, "vision_config": VISION | {"intermediate_size": 17}}
DISTIL = {"vocab_size": 31, "dim": 12, "n_layers": 1, "n_heads": 3, "hidden_dim": 17, "max_position_embeddings": 13}

WORDS = "embeddings.word_embeddings.weight"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2", {"vocab_size": 31, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 13}),
    "LlamaForCausalLM": ("Llama", TEXT | TIED),
    "BertForMaskedLM": ("Bert", TEXT),
    "BertForPreTraining": ("Bert", TEXT),
    "RobertaForMaskedLM": ("Roberta", TEXT | {"pad_token_id": 1}),
    "AlbertForMaskedLM": ("Albert", TEXT | {"embedding_size": 7}),
    "DistilBertForMaskedLM": ("DistilBert", DISTIL),
    "T5ForConditionalGeneration": (
        "T5",
        {"vocab_size": 31, "d_model": 12, "d_kv": 5, "d_ff": 17, "num_layers": 1, "num_heads": 2},
    ),
    "BartForConditionalGeneration": ("Bart", PAIR),
    "MarianMTModel": ("Marian", PAIR | {"decoder_vocab_size": 31}),
    "LlavaForConditionalGeneration": ("Llava", LLAVA | TIED),
    "IdeficsForVisionText2Text": ("Idefics", IDEFICS),
    "BlipForConditionalGeneration": ("Blip", {"text_config": TEXT, "vision_config": SEEN}),
    "BlipForQuestionAnswering": ("Blip", {"text_config": TEXT, "vision_config": SEEN}),
}
# Of each model: the name that a file may have alone, and the name that it has in files of transformers.
NAMES = [
    ("GPT2LMHeadModel", "lm_head.weight", "transformer.wte.weight"),
    ("LlamaForCausalLM", "lm_head.weight", "model.embed_tokens.weight"),
    ("BertForMaskedLM", "cls.predictions.decoder.weight", f"bert.{WORDS}"),
    ("BertForMaskedLM", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("BertForPreTraining", "cls.predictions.decoder.weight", f"bert.{WORDS}"),
    ("RobertaForMaskedLM", "lm_head.decoder.weight", f"roberta.{WORDS}"),
    ("RobertaForMaskedLM", "lm_head.decoder.bias", "lm_head.bias"),
    ("AlbertForMaskedLM", "predictions.decoder.weight", f"albert.{WORDS}"),
    ("DistilBertForMaskedLM", "vocab_projector.weight", f"distilbert.{WORDS}"),
    ("T5ForConditionalGeneration", "lm_head.weight", "shared.weight"),
    ("T5ForConditionalGeneration", "decoder.embed_tokens.weight", "shared.weight"),
    ("T5ForConditionalGeneration", "encoder.embed_tokens.weight", "shared.weight"),
    ("BartForConditionalGeneration", "lm_head.weight", "model.shared.weight"),
    ("BartForConditionalGeneration", "model.decoder.embed_tokens.weight", "model.shared.weight"),
    ("MarianMTModel", "lm_head.weight", "model.shared.weight"),
    ("MarianMTModel", "model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("LlavaForConditionalGeneration", "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    ("LlavaForConditionalGeneration", "lm_head.weight", "language_model.model.embed_tokens.weight"),
    ("IdeficsForVisionText2Text", "lm_head.weight", "model.embed_tokens.weight"),
    (
        "IdeficsForVisionText2Text",
        "lm_head.additional_fc.weight",
        "model.embed_tokens.additional_embedding.weight",
    ),
    ("BlipForConditionalGeneration", "text_decoder.cls.predictions.decoder.weight", f"text_decoder.bert.{WORDS}"),
    (
        "BlipForQuestionAnswering",
        "text_decoder.cls.predictions.decoder.bias",
        "text_decoder.cls.predictions.bias",
    ),
]


def made(architecture: str, directory: Path) -> Any:
    family, values = MODELS[architecture]
    model = build(architecture, getattr(transformers, f"{family}Config")(**values), torch.float32)
    model.save_pretrained(directory)
    return model


def renamed(directory: Path, old: str, *new: str) -> Path:
    """The same directory, a tensor under other names."""
    tensors = load_file(directory / "model.safetensors")
    tensor = tensors.pop(old)
    tensors |= {name: tensor.clone() for name in new}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def assert_equal(found: Any, expected: Any) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("architecture", "alone", "usual"), NAMES, ids=[f"{a} {n}" for a, n, _ in NAMES])
def test_a_shared_tensor_is_read_under_its_other_name(architecture, alone, usual, tmp_path):
    made(architecture, tmp_path)
    expected = load(tmp_path)
    assert_equal(load(renamed(tmp_path, usual, alone)), expected)


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_of_save_model_is_read(architecture, tmp_path):
    theirs = made(architecture, tmp_path)
    expected = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_model(theirs, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    assert_equal(load(tmp_path), expected)


@pytest.mark.parametrize(
    ("architecture", "task", "alone", "usual"),
    [
        ("GPT2LMHeadModel", "feature-extraction", "lm_head.weight", "transformer.wte.weight"),
        ("LlamaForCausalLM", "feature-extraction", "lm_head.weight", "model.embed_tokens.weight"),
        ("T5ForConditionalGeneration", "text-encoding", "lm_head.weight", "shared.weight"),
        ("BartForConditionalGeneration", "feature-extraction", "lm_head.weight", "model.shared.weight"),
    ],
)
def test_a_body_is_read_from_the_table_under_the_heads_name(architecture, task, alone, usual, tmp_path):
    made(architecture, tmp_path)
    expected = load(tmp_path, task=task)
    assert_equal(load(renamed(tmp_path, usual, alone), task=task), expected)


@pytest.mark.parametrize("task", ["text-generation", "feature-extraction"])
def test_a_table_of_a_head_that_is_not_tied_is_no_copy(task, tmp_path):
    made("LlamaForCausalLM", tmp_path)
    renamed(change(tmp_path, tie_word_embeddings=False), "model.embed_tokens.weight", "lm_head.weight")
    with pytest.raises(ValueError, match=r"1.*model\.embed_tokens\.weight"):
        load(tmp_path, task=task)


def test_two_other_names_must_hold_the_same_numbers(tmp_path):
    made("BartForConditionalGeneration", tmp_path)
    expected = load(tmp_path)
    renamed(tmp_path, "model.shared.weight", "lm_head.weight", "model.decoder.embed_tokens.weight")
    assert_equal(load(tmp_path), expected)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight.*model\.shared\.weight"):
        load(tmp_path)


def test_a_copy_of_another_shape_is_refused(tmp_path):
    made("GPT2LMHeadModel", tmp_path)
    renamed(tmp_path, "transformer.wte.weight", "lm_head.weight")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(29, 12)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight.*\(29, 12\).*\(31, 12\)"):
        load(tmp_path)
