"""Sessions on images: what each kind of model is given with an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.data.images import Picture, Source, glance, open_picture
from regard.layouts import Frame, Sides
from regard.lens.watch import watch
from regard.models.config import Settings
from regard.models.dual_encoder import DualEncoder
from regard.models.flamingo import FlamingoModel, last_image
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.loading import empty, family_of, load
from regard.models.model import Model
from regard.models.vision import VisionModel
from regard.models.vision_language import VisionLanguageModel
from regard.nn.blocks import Inserted
from regard.session.session import MEASURES, Session, name_of_model, show_picture, without_dropout
from regard.tasks.images import caption_prompt, looks, question_prompt, spoken, without_special


def takes_pictures(where: str) -> bool | None:
    """Whether the model of a directory or hub id looks at pictures; None where that cannot be told yet.

    >>> takes_pictures("no/such/directory") is None
    True

    where: what `regard.load` takes. A model that is not on this machine, and one that `regard.load` will refuse with
        its own words, cannot be told.
    """
    directory = _directory(where)
    if directory is None:
        return None
    try:
        settings = Settings.open(directory)
        family = family_of(settings)
        return looks(empty(family, settings, family.task_of(settings.values.get("architectures"))))
    except (OSError, ValueError):
        return None


def _directory(where: str) -> Path | None:
    """Where the model's config.json lies: the directory itself, or that of the hub's cache."""
    path = Path(os.path.expanduser(where))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import errors, try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(where, "config.json")
    except errors.HFValidationError:  # a path, and no id of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


WRITTEN = 32  # tokens that a model may write
START = "[start]"


@dataclass(frozen=True, eq=False)
class Given:
    """A model with its inputs at hand.

    read: lets the model read them.  layouts: where the tokens of each attention lie, by path.
    words: the labels of the text's tokens, one row; None without a text.  text: what is read, in words.
    """

    read: Callable[[], object]
    layouts: Mapping[str, Sides]
    words: list[list[str]] | None = None
    text: str | None = None


def given_to(model: Model, picture: Picture, text: str | None) -> Given:
    """A picture, and a text where the model reads one, as the model takes them.

    Raises ValueError for a model that does not look at pictures, a text that it does not take, or a missing one that it
    needs; and as `model.preprocessor` and the model's verbs do.
    """
    check_sight(model)
    if isinstance(model, (VisionModel, DualEncoder)):
        return _alone(model, picture, text)
    if isinstance(model, Captioner):
        return _captioned(model, picture, text)
    if isinstance(model, (Answerer, Matcher)):
        return _beside(model, picture, text)
    assert isinstance(model, (VisionLanguageModel, FlamingoModel)), "the other models that look at pictures"
    return _among(model, picture, text)


def check_sight(model: Model) -> None:
    """Raise ValueError for a model that does not look at pictures."""
    if not looks(model):
        raise ValueError(
            f"{model.family.title} reads texts and looks at no pictures: name a model that does, "
            "such as facebook/dinov2-small or google/vit-base-patch16-224"
        )


def _alone(model: VisionModel | DualEncoder, picture: Picture, text: str | None) -> Given:
    """A picture without a text."""
    if text is not None:
        raise ValueError(
            f"{model.family.title} looks at the picture alone here, and no text beside it changes what it sees: "
            "leave the text out"
        )
    pixels, (frame,) = _prepared(model, picture)
    return Given(without_dropout(model, lambda: model(pixel_values=pixels)), model.layouts(frame))


def _captioned(model: Captioner, picture: Picture, text: str | None) -> Given:
    """A picture and its caption: the one that is given, or what the model writes."""
    pixels, (frame,) = _prepared(model, picture)
    if text is None:
        written = model.caption(picture, new_tokens=_room(model.decoder.embed.most, 1))
        text, after = str(written.text).strip(), written.ids[:-1]
        ids = torch.cat([torch.tensor([model.start]), after])[None]  # (1, N)
    else:
        ids, _ = model.prompt(model.tokenizer.batch([text]).ids)
    ids = ids.to(model.device)
    words = [START, *_labels(model, ids[0, 1:])]  # of `start` the tokenizer may know nothing
    read = without_dropout(model, lambda: model(ids, pixel_values=pixels))
    return Given(read, model.layouts(frame, ids.shape[1]), [words], text)


def _beside(model: Answerer | Matcher, picture: Picture, text: str | None) -> Given:
    """A picture, and a question or a text that may match it. Of who answers, the reading of the question is seen."""
    if not text:
        what = "a question" if isinstance(model, Answerer) else "a text that may match the picture"
        raise ValueError(f"{model.family.title} with task {model.task!r} reads {what}: give it as the text")
    pixels, (frame,) = _prepared(model, picture)
    ids = model.tokenizer.batch([text]).ids.to(model.device)  # (1, N)
    n = ids.shape[1]
    if isinstance(model, Matcher):
        read = without_dropout(model, lambda: model(ids, pixel_values=pixels))
        return Given(read, model.layouts(frame, n), [model.tokenizer.tokens(ids[0])], text)
    answer = model.answer(picture, text, new_tokens=_room(model.decoder.embed.most, 1))
    read = without_dropout(model, lambda: model.read_image(pixels, ids))
    layouts = model.layouts(frame, n, 1)
    seen = {path: sides for path, sides in layouts.items() if not path.startswith("decoder.")}
    return Given(read, seen, [model.tokenizer.tokens(ids[0])], f"{text} → {answer.text.strip()}")


def _among(model: VisionLanguageModel | FlamingoModel, picture: Picture, text: str | None) -> Given:
    """A picture among the words of a prompt, and what the model writes after it."""
    pixels, frames = _prepared(model, picture)
    asked = spoken(model, caption_prompt(model, None) if text is None else question_prompt(model, text), pixels)
    if isinstance(model, VisionLanguageModel):
        prompt = model.tokenizer.batch([asked]).ids.to(model.device)  # (1, n)
    else:
        prompt = without_special(model, [asked])[0].to(model.device)
    count = _room(model.most, prompt.shape[1])
    written = (
        model.caption(picture, new_tokens=count) if text is None else model.answer(picture, text, new_tokens=count)
    )
    after = written.ids[None, :-1].to(model.device)
    ids = torch.cat([prompt, after], 1)  # (1, N)
    if isinstance(model, VisionLanguageModel):
        layouts = model.layouts(torch.cat([prompt, torch.full_like(after, -1)], 1)[0], frames)  # −1: no placeholder
        read = _inserted(model, prompt, ids, pixels)
    else:
        layouts, read = model.layouts(frames, ids.shape[1]), _looked_at(model, prompt, ids, pixels)
    said = f"{text} → {written.text.strip()}" if text else written.text.strip()
    return Given(without_dropout(model, read), layouts, [_labels(model, ids[0])], said)


def _inserted(model: VisionLanguageModel, prompt: Tensor, ids: Tensor, pixels: Tensor) -> Callable[[], object]:
    """Reads prompt (1, n) and what follows, ids (1, N): a placeholder that was written stands for no picture."""
    places = pad(prompt == model.placeholder, (0, ids.shape[1] - prompt.shape[1]))  # (1, N)
    return lambda: model.text(ids, inserted=Inserted(places, model.encode(pixels).flatten(0, 1)))


def _looked_at(model: FlamingoModel, prompt: Tensor, ids: Tensor, pixels: Tensor) -> Callable[[], object]:
    """The same, where what was written sees what the last token of the prompt sees. pixels: (P, C, H, W)."""
    sees = last_image(prompt, len(pixels), placeholder=model.placeholder, ends=model.ends)  # (1, n, P)
    sees = torch.cat([sees, sees[:, -1:].expand(-1, ids.shape[1] - prompt.shape[1], -1)], 1)  # (1, N, P)
    return lambda: model(ids, pixel_values=pixels[None], image_attention_mask=sees)


def _room(most: int | None, count: int) -> int:
    """How many tokens may be written after so many; where these are too many themselves, the verb will say so.

    >>> _room(None, 5), _room(37, 36), _room(37, 41)
    (32, 2, 1)
    """
    return WRITTEN if most is None else max(1, min(WRITTEN, most - count + 1))  # the last one takes no position


def _labels(model: Model, ids: Tensor) -> list[str]:
    """The words of ids (N,). A model may write rows of its table that the tokenizer does not know: [30523]."""
    size = model.tokenizer.size
    return [model.tokenizer.tokens([n])[0] if n < size else f"[{n}]" for n in ids.tolist()]


def _prepared(model: Model, picture: Picture) -> tuple[Tensor, tuple[Frame, ...]]:
    prepared = model.preprocessor([picture])
    return prepared.pixels.to(model.device), prepared.frames


def look_at_picture(
    picture: Source,
    model: Model | str | Path,
    *,
    text: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Let a model look at a picture, and see every head while it does.

    >>> look_at_picture("cat.jpg", "models/blip", text="a cat").pictures[0].size              # doctest: +SKIP
    (300, 451)

    picture: a path, bytes, a Pillow image or an array, as `open_picture` opens it.
    model: one that `regard.load` gave and that looks at pictures, or what it takes.
    text: what is read beside it: a caption, a question, a text that may match. Models of pictures alone take none;
        those that write about a picture write without one, too.
    progress: told what is being done, in a word.

    What a model writes is read again, but for its last token: that was read by nobody. The model reads in eval mode,
    and is left in the mode that it was in.

    The session's capture has a copy of the picture, of at most 1,600 pixels, which goes into the file that it is saved
    to: session.capture.save(path, photos=False) leaves it out.

    Raises ValueError for a model that does not look at pictures, for a text that it does not take or a missing one that
    it needs; else as `open_picture`, the model's preprocessor and `regard.load` do.
    """
    source, _ = glance(picture)  # what is none is refused before a model is loaded, which takes long
    tell = progress or (lambda said: None)
    if not isinstance(model, Model):
        tell("loading")
        model = load(model)
    check_sight(model)
    opened = open_picture(source)  # decoded only for a model that looks at it
    given: Given = given_to(model, opened, text)
    tell("reading")
    with watch(model, measures=MEASURES, keep="qk", layouts=given.layouts, tokens=given.words) as seen:
        given.read()
    longest = max((sides.keys.kind.size for sides in given.layouts.values()), default=0)
    words = tuple(given.words[0]) if given.words else ("",) * longest
    seen.photos = shown = (show_picture(opened),)
    return Session(name_of_model(model), seen, words, text=given.text, model=model, again=given.read, pictures=shown)
