"""Token ids are those of `transformers`' generate(), with each checkpoint's own settings: 200 new tokens of tiny twins.

Both compute in fp64: of logits that differ by rounding alone, random ones are sometimes so close that fp32 would put
either first. transformers takes its sdpa attention, since eager gives NaN for padded LLaMA in fp64; and a right-padded
batch where its encoder is BART's, which otherwise counts padding as positions. Ours pads on the left always.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from speaking_twins import bart, gpt2, llama, t5

from regard.models.loading import load
from regard.models.model import Model

PROMPTS = ["The cat sat", "한국", "it was too tired because"]
NEW = 200

# What each checkpoint says of generating. GPT-2 has one token for the end and for padding, as the real one.
GPT2 = {"max_new_tokens": NEW, "repetition_penalty": 1.3, "no_repeat_ngram_size": 4, "bad_words_ids": [[11], [13]]}
GPT2 |= {"min_new_tokens": NEW, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "eos_token_id": [2, 77],
    "pad_token_id": 0,
    "max_new_tokens": NEW,
}
T5 = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "max_length": NEW + 1, "length_penalty": 0.6}
T5 |= {"suppress_tokens": [5, 300], "min_length": 31, "no_repeat_ngram_size": 2}
BART = {"num_beams": 4, "max_length": NEW + 1, "min_length": 180, "length_penalty": 2.0, "no_repeat_ngram_size": 3}
BART |= {"early_stopping": True, "forced_bos_token_id": 0, "forced_eos_token_id": 2}
MAKERS: dict[str, Any] = {
    "gpt2": lambda directory: gpt2(directory, generation=GPT2),
    "llama": lambda directory: llama(directory, generation=LLAMA),
    "t5": lambda directory: t5(directory, generation=T5),
    "bart": lambda directory: bart(directory, also=BART),  # in config.json, as it used to be
}


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Model, Any]:
    directory: Path = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float64, attn_implementation="sdpa"
    )
    return load(directory, dtype=torch.float64), theirs.eval()


@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers: sampling flags beside do_sample=False
@pytest.mark.pairwise
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS], ids=["single", "padded"])
def test_ids_are_those_of_transformers(pair: tuple[Model, Any], prompts: list[str], beams: int) -> None:
    model, theirs = pair
    two = theirs.config.is_encoder_decoder
    batch = model.tokenizer.batch(prompts, pad="right" if two else "left")
    wanted = theirs.generate(
        batch.input_ids, attention_mask=batch.attention_mask.long(), num_beams=beams, do_sample=False
    )
    made = model.generate(prompts, num_beams=beams, temperature=0)
    start = 1 if two else batch.input_ids.shape[1]
    assert max(len(one.ids) for one in made) == NEW
    for row, one in zip(wanted, made, strict=True):
        assert row[start : start + len(one.ids)].tolist() == one.ids.tolist()
        after = set(row[start + len(one.ids) :].tolist())  # what transformers fills rows up with
        assert after <= {0, 1, 2}
        assert one.reason == "eos" or len(one.ids) == NEW
