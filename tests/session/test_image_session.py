"""What a model reads of what it wrote: as it was while it wrote, whatever it wrote, up to the last position."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from seeing_twins import blip, idefics, llava, picture, vit
from speaking_twins import bert
from torch import Tensor, nn

import regard
from regard.models.loading import load
from regard.session.session import MAX_NEW_TOKENS, Session, look_at_image
from regard.tasks.inputs import expand_prompt, question_prompt, without_special

PHOTO = picture(1)
ALL = slice(None)


def captioner(directory: Path) -> Path:
    return blip(directory, "ForConditionalGeneration")


WRITERS: dict[str, tuple[Callable[[Path], Path], str | None, tuple[str, ...]]] = {
    "blip": (captioner, None, ("decoder.",)),
    "llava": (llava, "the street?", ("text.",)),
    "llava without a question": (llava, None, ("text.",)),
    "idefics": (idefics, "the street?", ("tower.", "looks.")),
    "idefics without a question": (idefics, None, ("tower.", "looks.")),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Path], Path]], Any]:
    """Load a model anew from a checkpoint that is made once."""
    checkpoint = cache(lambda make: make(tmp_path_factory.mktemp("checkpoint")))
    return lambda make: load(checkpoint(make))


def head_of(model: Any) -> nn.Module:
    return model.text.head if hasattr(model, "text") else model.head


@contextmanager
def forced(model: Any, token: int, at: int) -> Iterator[None]:
    """Inside, the new token number `at` of a text is this one: the head speaks once for each."""
    said = 0

    def speak(head: nn.Module, given: object, scores: Tensor) -> None:
        nonlocal said
        if said == at:
            scores[..., token] = 1e4
        said += 1

    hook = head_of(model).register_forward_hook(speak)
    try:
        yield
    finally:
        hook.remove()


def write(model: Any, text: str | None, **how: Any) -> Any:
    return model.caption(PHOTO, **how) if text is None else model.answer(PHOTO, text, **how)


def prompt_of(model: Any, text: str) -> list[int]:
    asked = expand_prompt(model, question_prompt(model, text), model.preprocessor([PHOTO]).pixel_values)
    found = without_special(model, [asked])[0] if hasattr(model, "looks") else model.tokenizer.batch([asked]).input_ids
    return found[0].tolist()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_those_of_the_writing_whatever_is_written(name: str, at: int, loaded: Any) -> None:
    make, text, begins = WRITERS[name]
    model = loaded(make)
    token = getattr(model, "placeholder", 5)
    with forced(model, token, at), regard.watch(model, keep="qk", measures=["entropy"]) as seen:
        written = write(model, text, max_new_tokens=MAX_NEW_TOKENS)
    with forced(model, token, at):
        session = look_at_image(PHOTO, model, text=text)
    assert written.ids[at] == token
    paths = [path for path in seen.names if path.startswith(begins)]
    assert len(paths) > 2
    for path in paths:
        ours, truth = session.capture[path], seen[path]
        assert ours.sizes == truth.sizes
        torch.testing.assert_close(ours.tile(ALL, ALL), truth.tile(ALL, ALL), rtol=1e-4, atol=1e-5)
    assert session.tokens[-len(written.ids) + 1 + at] == model.tokenizer.tokens([token])[0]


@pytest.mark.parametrize("name", ["llava", "idefics"])
def test_placeholder_that_was_written_is_a_word(name: str, loaded: Any) -> None:
    make, text, _ = WRITERS[name]
    model = loaded(make)
    with forced(model, model.placeholder, 2):
        session = look_at_image(PHOTO, model, text=text)
    sides = session.layers[-1].sides
    assert sides is not None
    assert sides.queries.kind[0, len(session.tokens) - MAX_NEW_TOKENS + 1 :].tolist() == ["text"] * (MAX_NEW_TOKENS - 1)
    assert session.head_values(len(session.layers) - 1, 0) is not None


@pytest.mark.parametrize("name", ["blip", "llava"])
def test_row_of_the_table_that_the_tokenizer_does_not_know_is_called_by_its_number(name: str, loaded: Any) -> None:
    make, text, _ = WRITERS[name]
    model = loaded(partial(llava, rows=1) if name == "llava" else make)
    with forced(model, model.tokenizer.size, 1):
        session = look_at_image(PHOTO, model, text=text)
    assert session.tokens[-MAX_NEW_TOKENS + 2] == f"[{model.tokenizer.size}]"


# ------------------------------------------------------------------------------------------------------- near the limit


def filled(model: Any, count: int) -> str:
    """A question of so many tokens with its prompt."""
    text = "cat"
    while len(prompt_of(model, text)) < count:
        text += "!"
    assert len(prompt_of(model, text)) == count
    return text


@pytest.mark.parametrize("room", [1, 2, MAX_NEW_TOKENS - 1, MAX_NEW_TOKENS, MAX_NEW_TOKENS + 1])
@pytest.mark.parametrize("make", [llava, idefics])
def test_as_much_is_written_as_there_is_room_for(make: Callable[[Path], Path], room: int, loaded: Any) -> None:
    model = loaded(make)
    count = model.max_positions - room + 1
    text = filled(model, count)
    written = write(model, text, max_new_tokens=min(room, MAX_NEW_TOKENS))
    session: Session = look_at_image(PHOTO, model, text=text)
    assert session.text == f"{text} → {written.text.strip()}"
    assert len(session.tokens) == count + len(written.ids) - 1 <= model.max_positions
    assert [*session.tokens[:count]] == model.tokenizer.tokens(prompt_of(model, text))


@pytest.mark.parametrize("make", [llava, idefics])
def test_prompt_longer_than_the_model_is_to_be_shortened(make: Callable[[Path], Path], loaded: Any) -> None:
    model = loaded(make)
    with pytest.raises(ValueError, match=rf"{model.max_positions + 1}.*tokens.*{model.max_positions}"):
        look_at_image(PHOTO, model, text=filled(model, model.max_positions + 1))


def test_short_decoder_writes_as_much_as_it_can(loaded: Any) -> None:
    model = loaded(captioner)
    model.decoder.embed.positions = nn.Embedding.from_pretrained(model.decoder.embed.positions.weight[:7])
    session = look_at_image(PHOTO, model)
    assert len(session.tokens) == model.decoder.embed.max_positions == 7


def test_image_is_not_decoded_for_a_model_that_looks_at_none(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("decoded for a model of texts"))
    stored = io.BytesIO()
    Image.fromarray(PHOTO).save(stored, "PNG")
    model = load(bert(tmp_path / "bert", "Model"))
    with pytest.raises(ValueError, match="BERT"):
        look_at_image(stored.getvalue(), model)


@pytest.mark.parametrize("size", [{"height": 30_000, "width": 30}, {"height": 3000, "width": 3000}])
def test_sizes_of_a_preprocessor_far_beyond_what_the_model_learnt_are_refused(tmp_path, size):
    path = vit(tmp_path / "vit")
    values = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(values | {"size": size}))
    model = load(path)
    with pytest.raises(ValueError, match=rf"{size['height'] // 6}.*{size['width'] // 6}.*5"):
        model.classify(PHOTO)
    with pytest.raises(ValueError, match="5 × 5"):
        look_at_image(PHOTO, model)
