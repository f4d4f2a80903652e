"""The loss of every head that has one in transformers, from the same labels, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from twins import build, pictures, texts, their_names, widened

from regard.models.loading import load

V, N, LABELS = 31, 11, 5
BERT = {
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 23,
    "pad_token_id": 0,
    "num_labels": LABELS,
}
SEQ2SEQ = {
    "vocab_size": V,
    "d_model": 12,
    **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 17))},
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "max_position_embeddings": 23,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "num_labels": LABELS,
}
GPT2 = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 23, "pad_token_id": 0}
T5 = {"vocab_size": V, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}
VIT = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "image_size": 12,
    "patch_size": 4,
    "encoder_stride": 4,
    "num_labels": LABELS,
}
SWIN = {
    "image_size": 12,
    "patch_size": 2,
    "embed_dim": 6,
    "depths": [2],
    "num_heads": [3],
    "window_size": 3,
    "encoder_stride": 2,
    "num_labels": LABELS,
}
SEES = {key: VIT[key] for key in VIT if key not in ("encoder_stride", "num_labels")}
CLIP = {"text_config": BERT | {"eos_token_id": 2}, "vision_config": SEES, "projection_dim": 7, "num_labels": LABELS}
BLIP_TEXT = BERT | {"bos_token_id": 1, "sep_token_id": 2, "encoder_hidden_size": 12, "label_smoothing": 0.1}
BLIP = {"text_config": BLIP_TEXT, "vision_config": SEES, "projection_dim": 7}
LLAVA = {
    "text_config": BERT | {"model_type": "llama"},
    "vision_config": SEES | {"model_type": "clip_vision_model"},
    "image_token_id": 30,
}
IDEFICS = BERT | {
    "vision_config": {
        "embed_dim": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 17,
        "image_size": 12,
        "patch_size": 4,
    },
    "use_resampler": False,
}
ROBERTA = BERT | {"max_position_embeddings": 29, "pad_token_id": 1, "sep_token_id": 2}
DINO = {key: VIT[key] for key in VIT if key not in ("encoder_stride", "intermediate_size")}
ENCODER = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
IMAGE = ("ImageClassification", "MaskedImageModeling")
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Albert": (BERT | {"embedding_size": 7}, (*ENCODER, "PreTraining")),
    "Bart": (SEQ2SEQ, ("ConditionalGeneration", "SequenceClassification", "QuestionAnswering")),
    "Bert": (BERT, (*ENCODER, "PreTraining", "NextSentencePrediction")),
    "BigBird": (BERT | {"attention_type": "original_full", "sep_token_id": 2}, (*ENCODER, "PreTraining")),
    "Blip": (BLIP, ("ConditionalGeneration", "QuestionAnswering", "Model")),
    "CLIP": (CLIP, ("ImageClassification", "Model")),
    "DeiT": (VIT, IMAGE),
    "Dinov2": (DINO, ("ImageClassification",)),
    "Dinov2WithRegisters": (DINO | {"num_register_tokens": 2}, ("ImageClassification",)),
    "DistilBert": (
        {"vocab_size": V, "dim": 12, "hidden_dim": 17, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 23}
        | {"num_labels": LABELS},
        ENCODER,
    ),
    "Electra": (BERT | {"embedding_size": 7}, (*ENCODER, "PreTraining")),
    "GPT2": (GPT2 | {"num_labels": LABELS}, ("LMHeadModel", *ENCODER[1:])),
    "Idefics": (IDEFICS, ("VisionText2Text",)),
    "Llama": (BERT, ("CausalLM", *ENCODER[1:])),
    "Llava": (LLAVA, ("ConditionalGeneration",)),
    "Longformer": (ROBERTA | {"attention_window": 4}, ENCODER),
    "Marian": (SEQ2SEQ, ("MTModel",)),
    "Roberta": (ROBERTA, ENCODER),
    "Swin": (SWIN, IMAGE),
    "T5": (T5 | {"num_labels": LABELS, "decoder_start_token_id": 0}, ("ConditionalGeneration", *ENCODER[1:])),
    "ViT": (VIT, IMAGE),
    "XLMRoberta": (ROBERTA, ENCODER),
}
CASES = [(family, head, "") for family, (_, heads) in FAMILIES.items() for head in heads]
CASES += [(f, head, kind) for f, head, _ in CASES if head.endswith("Classification") and "Token" not in head
          for kind in ("regression", "multi_label_classification")]  # fmt: skip


def read_texts(family: str, *, padded: bool) -> dict[str, Tensor]:
    """Texts that end in their end token or separator, 2; those with separators have two more behind a question."""
    values = FAMILIES[family][0]
    given = texts(V - 1, "right", pad=values.get("pad_token_id", 0))
    ids, mask, at = given["input_ids"], given["attention_mask"], torch.arange(13)
    mask[:, :6] = True  # so that each text goes on behind its question
    mask |= torch.tensor(not padded)
    ids = ids.where(ids > 2, 7).where(mask, values.get("pad_token_id", 0))
    ids[at, mask.sum(1) - 1] = 1 if family == "T5" else 2
    if "sep_token_id" in values:
        ids[:, 2:4] = 2
    return {"input_ids": ids, "attention_mask": mask}


def call(family: str, head: str, kind: str) -> dict[str, Any]:
    """The arguments of a call with labels."""
    random = torch.Generator().manual_seed(5)
    images = {"pixel_values": pictures(12, 12, count=13)["pixel_values"]}
    if head in IMAGE or family in ("ViT", "DeiT", "Swin"):
        given: dict[str, Any] = images
    elif family in ("Blip", "CLIP"):
        given = read_texts(family, padded=head != "QuestionAnswering") | images
    elif family == "Llava":
        given = read_texts(family, padded=head != "QuestionAnswering") | images
        given["input_ids"] = torch.cat([torch.full((13, 9), 30), given["input_ids"]], 1)
        given["attention_mask"] = torch.cat([torch.ones(13, 9, dtype=torch.bool), given["attention_mask"]], 1)
    elif family == "Idefics":
        given = read_texts(family, padded=head != "QuestionAnswering") | {
            "pixel_values": images["pixel_values"].unsqueeze(1)
        }
        given["image_attention_mask"] = torch.ones(13, given["input_ids"].shape[1], 1, dtype=torch.bool)
    else:
        given = read_texts(family, padded=head != "QuestionAnswering")
    if head == "MaskedImageModeling":
        return given | {"bool_masked_pos": torch.randint(2, (13, 36 if family == "Swin" else 9), generator=random) == 1}
    if head == "Model":
        return given | {"return_loss": True}
    if head == "QuestionAnswering" and family != "Blip":
        start = torch.randint(0, N + 3, (13,), generator=random)  # some beyond the text, which are ignored
        return given | {"start_positions": start, "end_positions": start + 1}
    if kind == "regression":
        return given | {"labels": torch.randn(13, 1, generator=random, dtype=torch.float64)}
    if kind == "multi_label_classification":
        return given | {"labels": torch.randint(2, (13, LABELS), generator=random).double()}
    if head in ("SequenceClassification", "ImageClassification", "NextSentencePrediction"):
        return given | {"labels": torch.randint(2, (13,), generator=random)}
    shape = given["input_ids"].shape
    if (family, head) == ("Electra", "PreTraining"):
        return given | {"labels": torch.randint(2, shape, generator=random)}
    classes = LABELS if head == "TokenClassification" else V - 2
    labels = torch.randint(3, classes, shape, generator=random)
    # What padding reads differs: regard does not count its positions. Nobody learns from it.
    labels = labels.masked_fill((torch.rand(shape, generator=random) < 0.3) | ~given["attention_mask"], -100)
    if family == "Blip" and head == "QuestionAnswering":
        return given | {"labels": labels.clamp(min=3)}  # they are what the decoder reads
    if head == "PreTraining":
        name = "sentence_order_label" if family == "Albert" else "next_sentence_label"
        given |= {name: torch.randint(2, (13,), generator=random)}
    return given | {"labels": labels}


@pytest.mark.parametrize(("family", "head", "kind"), CASES, ids=lambda part: part or "labels")
def test_the_loss_of_labels_is_that_of_transformers(family: str, head: str, kind: str, tmp_path: Path) -> None:
    values = dict(FAMILIES[family][0])
    if kind:
        values |= {"problem_type": kind, "num_labels": 1 if kind == "regression" else LABELS}
    if head == "QuestionAnswering" or (family, head) == ("Albert", "PreTraining"):
        values["num_labels"] = 2
    architecture = family + (head if head in ("Model", "LMHeadModel", "MTModel") else f"For{head}")
    config = getattr(transformers, f"{family}Config")(**values)
    model = build(architecture, config, torch.float64)
    model.save_pretrained(tmp_path)
    given = call(family, head, kind)
    theirs = their_names({name: value for name, value in given.items() if isinstance(value, Tensor)})
    if "return_loss" in given:
        theirs["return_loss"] = True
    with widened(), torch.no_grad():
        expected = model(**theirs).loss
    with torch.no_grad():
        loss = load(tmp_path, dtype=torch.float64)(**given).loss
    assert loss is not None
    # Masked patches are counted in fp32, and transformers keeps rotary frequencies in it.
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
