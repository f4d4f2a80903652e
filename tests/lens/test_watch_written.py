"""Our own models, watched while they write: cross-attention is known as such, and its steps are one view of all rows.

The truth is one pass over what was read while writing, which takes the context itself and not its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_twins import blip, idefics, picture
from speaking_twins import bart, t5
from torch import Tensor
from transformers import MarianConfig
from twins import Twin

import regard
from regard.generation.loop import generate
from regard.lens.capture import Capture
from regard.models.loading import load
from regard.tasks.inputs import expand_prompt, without_special

NEW = 5
ALL = slice(None)
Made = tuple[Capture, Capture, str]
"""What was seen while it wrote, what one pass shows of the same tokens, and how paths of cross-attention begin."""


def watched(model: Any, do: Callable[[], Any]) -> tuple[Capture, Any]:
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        made = do()
    return seen, made


def begun(start: int, written: Any) -> Tensor:
    """What a decoder read: its start, and all that it wrote but the last. (1, NEW)"""
    assert len(written.ids) == NEW, "the twin must not end early"
    return torch.cat([torch.tensor([start]), written.ids[:-1]])[None]


def caption(directory: Path) -> Made:
    model = load(blip(directory, "ForConditionalGeneration"))
    seen, written = watched(model, lambda: model.caption(picture(1), max_new_tokens=NEW))
    ids, pixels = begun(model.start, written), model.preprocessor([picture(1)]).pixel_values
    return seen, watched(model, lambda: model(ids, pixel_values=pixels))[0], "decoder."


def answer(directory: Path) -> Made:
    model = load(blip(directory, "ForQuestionAnswering"))
    seen, written = watched(model, lambda: model.answer(picture(), "a cat sat", max_new_tokens=NEW))
    ids, pixels = model.tokenizer.batch(["a cat sat"]).input_ids, model.preprocessor([picture()]).pixel_values
    target = begun(model.start, written)
    return seen, watched(model, lambda: model(ids, pixel_values=pixels, decoder_input_ids=target))[0], "decoder."


def looks(directory: Path) -> Made:
    model, prompt = load(idefics(directory)), "the cat <image> sat"
    seen, written = watched(model, lambda: model.generate(prompt, images=picture(), max_new_tokens=NEW))
    pixels = model.preprocessor([picture()]).pixel_values
    first = without_special(model, [expand_prompt(model, prompt, pixels)])[0]
    ids = torch.cat([first, begun(0, written)[:, 1:]], 1)
    return seen, watched(model, lambda: model(ids, pixel_values=pixels[None]))[0], "looks."


def two_towers(directory: Path, twin: Callable[[Path], Path]) -> Made:
    model = load(twin(directory))
    seen, written = watched(model, lambda: model.generate("the cat sat", max_new_tokens=NEW))
    ids, target = model.tokenizer.batch(["the cat sat"]).input_ids, begun(model.start, written)
    return seen, watched(model, lambda: model(ids, decoder_input_ids=target))[0], "decoder."


def marian(directory: Path) -> Made:
    sides = {"layers": 2, "attention_heads": 5, "ffn_dim": 29}
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sides.items()}
    config = MarianConfig(vocab_size=47, d_model=20, pad_token_id=0, decoder_start_token_id=2, **sizes)
    model, ids = Twin("MarianMTModel", config, directory).ours(torch.float32), torch.arange(3, 14)[None]
    start = torch.tensor([[model.start]])
    seen, made = watched(
        model, lambda: generate(model.read(ids), start, max_new_tokens=NEW, eos_token_ids=(), pad_token_id=0)
    )
    target = torch.cat([start, made.ids[:, :-1]], 1)
    return seen, watched(model, lambda: model(ids, decoder_input_ids=target))[0], "decoder."


MODELS: dict[str, Callable[[Path], Made]] = {
    "caption": caption,
    "answer": answer,
    "looks": looks,
    "t5": lambda directory: two_towers(directory, t5),
    "bart": lambda directory: two_towers(directory, bart),
    "marian": marian,
}


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_cross_attention_are_one_view_of_all_rows(name: str, tmp_path: Path) -> None:
    seen, whole, begins = MODELS[name](tmp_path)
    paths = [path for path in whole.names if path.startswith(begins) and whole[path].kind == "cross"]
    assert paths
    for path in paths:
        assert [record.kind for record in seen.calls(path)] == ["cross"] * NEW
        assert seen[path].sizes == whole[path].sizes
        torch.testing.assert_close(seen[path].tile(ALL, ALL), whole[path].tile(ALL, ALL), rtol=1e-5, atol=1e-6)
    assert {path: seen[path].kind for path in seen.names} == {path: whole[path].kind for path in seen.names}


def test_second_text_about_the_same_picture_is_a_run_of_its_own(tmp_path: Path) -> None:
    model = load(blip(tmp_path, "ForConditionalGeneration"))
    seen, _ = watched(model, lambda: [model.caption(picture(1), max_new_tokens=NEW) for _ in range(2)])
    assert [(run.call, run.view.sizes[2]) for run in seen.runs() if run.path == "decoder.blocks.0.cross"] == [
        (0, NEW),
        (NEW, NEW),
    ]


def test_beams_are_one_run_in_cross_attention_as_in_self_attention(tmp_path: Path) -> None:
    model = load(blip(tmp_path, "ForConditionalGeneration"))
    seen, _ = watched(model, lambda: model.caption(picture(1), max_new_tokens=NEW, num_beams=3))
    rows = {
        part: [run.view.sizes[:3] for run in seen.runs() if run.path == f"decoder.blocks.1.{part}"]
        for part in ("attention", "cross")
    }
    assert rows["cross"] == rows["attention"] == [(1, 5, NEW)]


@pytest.mark.parametrize("beams", [1, 3])
def test_each_word_of_a_caption_is_laid_over_the_picture(beams: int, tmp_path: Path) -> None:
    model = load(blip(tmp_path, "ForConditionalGeneration"))
    (frame,) = model.preprocessor([picture(1)]).frames
    with regard.watch(model, keep="qk", layouts=model.layouts(frame, NEW)) as seen:
        model.caption(picture(1), max_new_tokens=NEW, num_beams=beams)
    view = seen["decoder.blocks.2.cross"]
    for word in range(view.sizes[2]):
        assert view.overlay(picture(1), word, head=3).weights == pytest.approx(view.row(word)[0, 3].numpy())


def test_each_beam_has_the_picture_of_its_own_prompt(tmp_path: Path) -> None:
    model = load(blip(tmp_path, "ForConditionalGeneration"))
    pictures = [picture(1), picture(2)]
    frames = model.preprocessor(pictures).frames
    with regard.watch(model, keep="qk", layouts=[model.layouts(frame, NEW) for frame in frames]) as seen:
        model.caption(pictures, max_new_tokens=NEW, num_beams=3)
    view = seen["decoder.blocks.2.cross"]
    assert (view.sizes[0], len(view.placed.sides)) == (2, 2)
    for batch, shown in enumerate(pictures):
        overlay = view.overlay(shown, 0, head=3, batch=batch)
        assert overlay.weights == pytest.approx(view.row(0)[batch, 3].numpy())


def test_looks_at_fewer_pictures_are_no_padding_on_the_right(tmp_path: Path) -> None:
    model = load(idefics(tmp_path))
    prompts, pictures = ["<image> the cat", "<image> and <image>"], [picture(), [picture(1), picture(2)]]
    seen, _ = watched(model, lambda: model.generate(prompts, images=pictures, max_new_tokens=3))
    assert "pad on the left" not in str(seen.doctor())
    assert seen.doctor().ok
