"""Sessions on images: what each kind of model is given with an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.data.images import OpenedImage, Source, open_image, peek_image
from regard.layouts import Frame, Sides
from regard.lens.watch import watch
from regard.models.config import Config
from regard.models.dual_encoder import DualEncoder
from regard.models.family import empty
from regard.models.flamingo import FlamingoModel, last_image
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.loading import family_of, load
from regard.models.model import Model
from regard.models.vision import VisionModel
from regard.models.vision_language import VisionLanguageModel
from regard.nn.blocks import Inserted
from regard.session.session import MEASURES, Session, name_of_model, show_image, without_dropout
from regard.tasks.inputs import caption_prompt, expand_prompt, has_vision, question_prompt, without_special

WRITTEN = 32  # tokens that a model may generate
START = "[start]"


def look_at_image(
    image: Source,
    model: Model | str | Path,
    *,
    text: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Run a model on an image and watch every head. The model runs in eval mode and gets its mode back.

    >>> look_at_image("cat.jpg", "models/blip", text="a cat").images[0].size                  # doctest: +SKIP
    (300, 451)

    Generated text is read again without its last token, which the model never reads. The capture keeps a copy of the
    image, of at most 1,600 pixels a side, also in the file it is saved to; session.capture.save(path, photos=False)
    leaves it out.

    Args:
        image: a path, bytes, a Pillow image or an array, as `open_image` takes it.
        model: a vision or vision-language model from `regard.load`, or what that takes.
        text: a caption, a question, or a text to match. Vision models take none; models that write generate one if it
            is missing.
        progress: called with "loading" and "reading".

    Returns:
        A session with the live model.

    Raises:
        ValueError: for a model without image input, a text that it does not take, or a missing one that it needs; else
            as `open_image`, the model's preprocessor and `regard.load` raise.
    """
    source, _ = peek_image(image)  # checked before the model is loaded, which takes long
    tell = progress or (lambda stage: None)
    if not isinstance(model, Model):
        tell("loading")
        model = load(model)
    if not has_vision(model):
        raise ValueError(
            f"{model.family.title} takes no images: name a model that does, such as facebook/dinov2-small or "
            "google/vit-base-patch16-224"
        )
    opened = open_image(source)  # decoded only for a model that takes it
    inputs = _inputs(model, opened, text)
    tell("reading")
    with watch(model, measures=MEASURES, keep="qk", layouts=inputs.layouts, tokens=inputs.words) as seen:
        inputs.read()
    longest = max((sides.keys.kind.size for sides in inputs.layouts.values()), default=0)
    words = tuple(inputs.words[0]) if inputs.words else ("",) * longest
    seen.photos = shown = (show_image(opened),)
    return Session(name_of_model(model), seen, words, text=inputs.text, model=model, again=inputs.read, images=shown)


def takes_images(where: str) -> bool | None:
    """Whether a model takes images, from its config alone.

    >>> takes_images("no/such/directory") is None
    True

    Args:
        where: a directory or hub id, as `regard.load` takes it.

    Returns:
        None if the model is not on this machine, or if `regard.load` will refuse it.
    """
    directory = Path(os.path.expanduser(where))
    if not directory.is_dir():
        try:
            from huggingface_hub import errors, try_to_load_from_cache
        except ImportError:
            return None
        try:
            config = try_to_load_from_cache(where, "config.json")
        except errors.HFValidationError:  # a path, not a hub id
            return None
        if not isinstance(config, str):
            return None
        directory = Path(config).parent
    try:
        settings = Config.open(directory)
        family = family_of(settings)
        return has_vision(empty(family, settings, family.task_of(settings.values.get("architectures"))))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """A model with its inputs.

    read: runs the model on them.  layouts: where the tokens of each attention lie, by module path.
    words: labels of the text's tokens, one row; None without a text.  text: the text, and what was generated.
    """

    read: Callable[[], object]
    layouts: Mapping[str, Sides]
    words: list[list[str]] | None = None
    text: str | None = None


def _inputs(model: Model, image: OpenedImage, text: str | None) -> ImageInputs:
    prepared = model.preprocessor([image])
    pixels, frames = prepared.pixel_values.to(model.device), prepared.frames
    if isinstance(model, (VisionModel, DualEncoder)):
        if text is not None:
            raise ValueError(f"{model.family.title} sees only the image here: leave the text out")
        return ImageInputs(without_dropout(model, lambda: model(pixel_values=pixels)), model.layouts(frames[0]))
    if isinstance(model, Captioner):
        return _with_caption(model, image, pixels, frames[0], text)
    if isinstance(model, (Answerer, Matcher)):
        return _with_question(model, image, pixels, frames[0], text)
    assert isinstance(model, (VisionLanguageModel, FlamingoModel)), "the other models that take images"
    return _in_prompt(model, image, pixels, frames, text)


def _with_caption(model: Captioner, image: OpenedImage, pixels: Tensor, frame: Frame, text: str | None) -> ImageInputs:
    """An image and its caption, given or generated."""
    if text is None:
        written = model.caption(image, max_new_tokens=_room(model.decoder.embed.max_positions, 1))
        text = str(written.text).strip()
        ids = torch.cat([torch.tensor([model.start]), written.ids[:-1]])[None]  # (1, N)
    else:
        ids, _ = model.prompt(model.tokenizer.batch([text]).input_ids)
    ids = ids.to(model.device)
    words = [START, *_labels(model, ids[0, 1:])]  # the tokenizer may not know `start`
    read = without_dropout(model, lambda: model(ids, pixel_values=pixels))
    return ImageInputs(read, model.layouts(frame, ids.shape[1]), [words], text)


def _with_question(
    model: Answerer | Matcher, image: OpenedImage, pixels: Tensor, frame: Frame, text: str | None
) -> ImageInputs:
    """An image, and a question or a text that may match it. Of an Answerer, the reading of the question is watched."""
    if not text:
        what = "a question" if isinstance(model, Answerer) else "a text that may match the image"
        raise ValueError(f"{model.family.title} with task {model.task!r} reads {what}: give it as the text")
    ids = model.tokenizer.batch([text]).input_ids.to(model.device)  # (1, N)
    n, words = ids.shape[1], [model.tokenizer.tokens(ids[0])]
    if isinstance(model, Matcher):
        return ImageInputs(
            without_dropout(model, lambda: model(ids, pixel_values=pixels)), model.layouts(frame, n), words, text
        )
    answer = model.answer(image, text, max_new_tokens=_room(model.decoder.embed.max_positions, 1))
    read = without_dropout(model, lambda: model.read_image(pixels, ids))
    layouts = {path: sides for path, sides in model.layouts(frame, n, 1).items() if not path.startswith("decoder.")}
    return ImageInputs(read, layouts, words, f"{text} → {answer.text.strip()}")


def _in_prompt(
    model: VisionLanguageModel | FlamingoModel,
    image: OpenedImage,
    pixels: Tensor,
    frames: tuple[Frame, ...],
    text: str | None,
) -> ImageInputs:
    """An image among the words of a prompt, and what the model generates after it."""
    prompt_text = caption_prompt(model, None) if text is None else question_prompt(model, text)
    question = expand_prompt(model, prompt_text, pixels)
    if isinstance(model, VisionLanguageModel):
        prompt = model.tokenizer.batch([question]).input_ids.to(model.device)  # (1, n)
    else:
        prompt = without_special(model, [question])[0].to(model.device)
    room = _room(model.max_positions, prompt.shape[1])
    if text is None:
        written = model.caption(image, max_new_tokens=room)
    else:
        written = model.answer(image, text, max_new_tokens=room)
    after = written.ids[None, :-1].to(model.device)
    ids = torch.cat([prompt, after], 1)  # (1, N)
    if isinstance(model, VisionLanguageModel):
        layouts = model.layouts(torch.cat([prompt, torch.full_like(after, -1)], 1)[0], frames)  # −1: no placeholder
        places = pad(prompt == model.placeholder, (0, after.shape[1]))  # (1, N): a generated placeholder has no image
        read = without_dropout(
            model, lambda: model.text(ids, inserted=Inserted(places, model.encode(pixels).flatten(0, 1)))
        )
    else:
        layouts = model.layouts(frames, ids.shape[1])
        sees = last_image(prompt, len(pixels), placeholder=model.placeholder, ends=model.ends)  # (1, n, P)
        sees = torch.cat([sees, sees[:, -1:].expand(-1, after.shape[1], -1)], 1)  # (1, N, P)
        read = without_dropout(model, lambda: model(ids, pixel_values=pixels[None], image_attention_mask=sees))
    answer = written.text.strip()
    return ImageInputs(read, layouts, [_labels(model, ids[0])], f"{text} → {answer}" if text else answer)


def _room(most: int | None, count: int) -> int:
    """How many tokens may be generated after `count`; if these are too many already, generation raises.

    >>> _room(None, 5), _room(37, 36), _room(37, 41)
    (32, 2, 1)
    """
    return WRITTEN if most is None else max(1, min(WRITTEN, most - count + 1))  # the last one takes no position


def _labels(model: Model, ids: Tensor) -> list[str]:
    """The labels of ids (N,). A model may generate rows of its table that the tokenizer does not know: [30523]."""
    size = model.tokenizer.size
    return [model.tokenizer.tokens([n])[0] if n < size else f"[{n}]" for n in ids.tolist()]
