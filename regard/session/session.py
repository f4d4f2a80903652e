"""A session: one capture with its text and images, and the model that ran if there is one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.call import Call
from regard.data.images import OpenedImage, Source, open_image, peek_image
from regard.layouts import Frame, Sides
from regard.lens.capture import Capture
from regard.lens.capture import open as open_capture
from regard.lens.edit_records import Effect
from regard.lens.files.saving import Photo
from regard.lens.watch import watch
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.family import Config, empty, family_of
from regard.models.flamingo import FlamingoModel, last_image
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.loading import load
from regard.models.model import Model, eval_mode
from regard.models.outputs import ModelOutput
from regard.models.text import TextModel
from regard.models.vision import VisionModel
from regard.models.vision_language import VisionLanguageModel
from regard.nn.blocks import Inserted
from regard.op import observe, unobserve
from regard.session.default_models import FETCH, KOREAN, default_model, is_korean, name_of
from regard.session.heads import HeadNumbers, Layer, Sink, head_numbers, layers_of, sinks_of
from regard.session.protocol import LinkEffectJSON, Opening
from regard.session.ranking import RankedLink, patch_links, rank_heads
from regard.tasks.inputs import caption_prompt, expand_prompt, has_vision, question_prompt, without_special

MEASURES = ("entropy", "effective", "received", "max_logit", "map", "patterns")
MOVED = "vector of "  # metrics of how far a vector moves begin so
LONGEST = 1600  # pixels of the longer side of an image's copy
FEW = 1 << 16  # pixels of a drawing or an icon, whose edges a JPEG would smear
MOST_VALUES = 64 << 20  # bytes of values that a session keeps, and those of one call more
MAX_NEW_TOKENS = 32  # of a generated caption or answer
START = "[start]"


@dataclass(frozen=True, eq=False)
class Session:
    """A capture to look at.

    >>> Session("two words", Capture(), ("a", "b")).tokens
    ('a', 'b')

    Args:
        name: for people.
        capture: from `watch`; exact rows need queries and keys in it.
        tokens: labels of the keys, "" where unknown.
        text: the input text, or None.
        model: the live model, or None.
        again: runs the model on the same input once more and returns its output.
        images: copies of the images that the model was given.
        opening: where a page opens; default the strongest link.
    """

    name: str
    capture: Capture
    tokens: tuple[str, ...]
    text: str | None = None
    model: Model | None = None
    again: Callable[[], object] | None = None
    images: tuple[Photo, ...] = ()
    opening: Opening | None = None
    display: ClassVar[Callable[[Session], dict[str, Any]] | None] = None  # for notebooks; `regard.explorer` sets it

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any] | None:
        return None if Session.display is None else Session.display(self)

    @property
    def model_name(self) -> str:
        """The name of the model; its class where a capture was read from a file."""
        return self.name if self.model is not None else self.capture.model or self.name

    @cached_property
    def effects(self) -> Effects:
        """What was measured of links: what the capture keeps of this kind, and what session/effects.py adds."""
        kept = Effects()
        for effect in self.capture.effects:
            match [(edit.function, edit.values) for edit in effect.edit]:
                case [("knock_out", {"layer": int(layer), "head": int(head), "queries": int(query), "keys": int(key)})]:
                    link = layer, head, query, key
                    single = len(effect.edit[0].values) == len(link) and effect.metric.startswith(MOVED)
                    if single and effect.weight is not None and self._has(link):
                        kept.add(link, effect)
        return kept

    def _has(self, link: tuple[int, int, int, int]) -> bool:
        layer, *at = link
        if not 0 <= layer < len(self.layers):
            return False
        return all(0 <= i < n for i, n in zip(at, self.layers[layer].view.sizes[1:], strict=True))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The attention modules, or each of their runs if they ran several times; answers number these."""
        return layers_of(self.capture, len(self.tokens))

    @cached_property
    def numbers(self) -> tuple[HeadNumbers, ...]:
        """The heads of each layer in numbers, computed once: at 100,000 tokens they take a moment."""
        return tuple(
            head_numbers(layer.view, layer.windows, None if layer.sides is None else layer.sides.queries)
            for layer in self.layers
        )

    def sinks(self, layer: int) -> tuple[Sink | None, ...]:
        """Where the heads of a layer rest, computed once."""
        if layer not in self._sinks:
            self._sinks[layer] = sinks_of(self.layers[layer], self.numbers[layer])
        return self._sinks[layer]

    @cached_property
    def _sinks(self) -> dict[int, tuple[Sink | None, ...]]:
        return {}

    @cached_property
    def ranked(self) -> dict[tuple[int, int], tuple[float, RankedLink]]:
        """(layer, head) → the strongest link between words and its score, computed once."""
        return rank_heads(self)

    @cached_property
    def patch_links(self) -> tuple[list[RankedLink], bool]:
        """The strongest links to patches, and whether every link was searched; computed once."""
        return patch_links(self)

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """Where the model's pixels lie in each image; empty without images."""
        return max((layer.sides.frames for layer in self.layers if layer.sides is not None), key=len, default=())

    def head_values(self, layer: int, head: int, window: int = 0) -> Tensor | None:
        """The values (Nk, Dv) of a head, from running the model again; None without a model.

        Calls wait for each other: the run is watched by a global observer.
        """
        seen = self.layers[layer]
        if self._values is None or len(seen.records) != 1:
            return None
        values = self._values.of(seen.records[0], len(self.capture.records))  # (B, Hkv, Nk, Dv)
        if values is None or values.shape[2] != seen.view.sizes[3]:
            return None
        return values[window, head * values.shape[1] // seen.view.sizes[1]]

    @cached_property
    def _values(self) -> _Values | None:
        return None if self.again is None else _Values(self.again)


@dataclass
class Effects:
    """Measured effects: by (layer, head, query, key) in one head, and by (query, key) in all heads.

    The latter are weights and effects, (layers, most heads).
    """

    links: dict[tuple[int, int, int, int], LinkEffectJSON] = field(default_factory=dict)
    heads: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, link: tuple[int, int, int, int], effect: Effect) -> None:
        """Add what was measured of a link: layer, head, query, key."""
        assert effect.weight is not None
        self.links[link] = {
            "layer": link[0],
            "head": link[1],
            "weight": effect.weight,
            "effect": effect.value,
            "controls": list(effect.controls),
            "p_value": effect.p_value,
            "method": "exact",
        }


class _Values:
    """The values of a model's attention calls: of all calls up to 64 MiB, and always of the one asked for last."""

    def __init__(self, again: Callable[[], object]) -> None:
        self.again = again
        self._lock = threading.Lock()
        self._kept: dict[int, Tensor] = {}  # by the number of the call
        self._calls: int | None = None

    def of(self, number: int, calls: int) -> Tensor | None:
        """The values (B, Hkv, Nk, Dv) of a call by its number; None if the run has another number of calls."""
        thread, count, held = threading.get_ident(), 0, 0

        def note(call: Call, backend: str, output: Any) -> None:
            nonlocal count, held
            if threading.get_ident() != thread:  # observers see the calls of every thread
                return
            if count == number or held + call.v.nbytes <= MOST_VALUES:
                self._kept[count] = call.v.detach().clone()
                held += call.v.nbytes
            count += 1

        with self._lock:
            if number not in self._kept or self._calls != calls:
                self._kept = {}
                observe(note)
                try:
                    self.again()
                finally:
                    unobserve(note)
                    self._calls = count
            return self._kept.get(number) if self._calls == calls else None


# -------------------------------------------------------------------------------------------------- from a capture file


def open_file(path: str | Path, *, images: Sequence[Source] = ()) -> Session:
    """A session from a capture file (.regard).

    >>> import tempfile, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with watch(layer, tokens=["a", "b", "c"]) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     seen.save(f"{folder}/run.regard")
    ...     open_file(f"{folder}/run.regard").tokens
    ('a', 'b', 'c')

    Args:
        path: a file that `capture.save` wrote.
        images: as in `session_of`.

    Returns:
        A session without a model. Raises as `regard.open` and `session_of` do.
    """
    return session_of(open_capture(path), Path(path).name, images=images)


def session_of(capture: Capture, name: str = "", *, images: Sequence[Source] = ()) -> Session:
    """A session from a capture.

    >>> session_of(Capture("GPT2", [["a", "b"]])).tokens
    ('a', 'b')

    Args:
        capture: from `watch` or `regard.open`.
        name: for people; default the model's class.
        images: those that the model was given; default the copies that the capture holds.

    Returns:
        A session without a model. Its tokens are "" for keys that the capture has no labels for.

    Raises:
        ValueError: for images of other sizes or another number than the capture's.
    """
    labels = tuple(capture.tokens[0] if capture.tokens else ())
    if not (labels and capture.layouts):  # with layouts, some calls are of patches and may have more keys than words
        labels += ("",) * (max((layer.sizes[1] for layer in layers_of(capture, 0)), default=0) - len(labels))
    session = Session(name or capture.model or "capture", capture, labels)
    shown = tuple(show_image(image) for image in images) or capture.photos
    if not shown:
        return session
    sizes, expected = [image.size for image in shown], [frame.image_size for frame in session.frames]
    if sizes != expected:
        listed = [", ".join(f"{high} × {wide}" for high, wide in both) or "no size" for both in (expected, sizes)]
        raise ValueError(f"the capture has images of {listed[0]} (height × width), got {listed[1]}")
    return replace(session, images=shown)


def show_image(source: Source) -> Photo:
    """A copy of an image of at most 1,600 pixels a side, as JPEG, or as PNG if it is small. Raises as `open_image`."""
    opened = open_image(source)
    copy = opened.image.copy()
    copy.thumbnail((LONGEST, LONGEST))
    small, data = copy.width * copy.height <= FEW, BytesIO()
    if small:
        copy.save(data, "PNG")
    else:
        copy.save(data, "JPEG", quality=88)
    return Photo(opened.name, opened.size, "image/png" if small else "image/jpeg", data.getvalue())


# ----------------------------------------------------------------------------------------------------- models and texts


def look_at(
    text: str,
    model: Model | str | Path | None = None,
    *,
    truncate: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Run a model on a text and watch every head. The model runs in eval mode and gets its mode back.

    >>> look_at("It was too tired.").tokens                                                   # doctest: +SKIP
    ('[CLS]', 'it', 'was', 'too', 'tired', '.', '[SEP]')

    Args:
        text: the input.
        model: from `regard.load`, or what it takes; default the demo's MiniLM, or for a Korean text the model that
            `regard fetch korean` brought; without that one, a warning says so.
        truncate: cut a text that is longer than the model's positions instead of raising.
        progress: called with "loading" and "reading".

    Returns:
        A session with the live model.

    Raises:
        ValueError: for a text without tokens or longer than the model takes, and for a model that needs an image.
        ImportError: without a model, if the demo package is not installed.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    tell = progress or (lambda stage: None)
    if not isinstance(model, Model):
        if model is None:
            model = default_model(text)
            if is_korean(text) and model != KOREAN.directory:
                warnings.warn(f"{name_of(model)} does not know Korean; get a model that does: {FETCH}", stacklevel=2)
        tell("loading")
        model = load(model)
    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(f"{model.family.title} needs an image: look_at_image(image, model)")
    most = model.max_positions if isinstance(model, TextModel) else None
    ids = model.tokenizer.batch([text], length=most, truncate=truncate).input_ids  # (1, N)
    labels = model.tokenizer.tokens(ids[0])
    tell("reading")
    again = _in_eval_mode(model, lambda: read_ids(model, ids))
    with watch(model, measures=MEASURES, keep="qk", tokens=[labels]) as seen:
        again()
    return Session(_name_of_model(model), seen, tuple(labels), text=text, model=model, again=again)


def read_ids(model: Model, ids: Tensor) -> ModelOutput:
    """Run a text model on token ids (1, N); an encoder-decoder predicts the first token of its answer."""
    here = ids.to(model.device)  # where the model is now: it may have moved since
    more = {}
    if isinstance(model, EncoderDecoder):
        more = {"decoder_input_ids": torch.full((1, 1), model.start, device=model.device)}
    output: ModelOutput = model(here, **more)
    return output


def _in_eval_mode(model: Model, read: Callable[[], object]) -> Callable[[], object]:
    def again() -> object:
        with torch.no_grad(), eval_mode(model):
            return read()

    return again


def _name_of_model(model: Model) -> str:
    return name_of(model.directory) if model.directory is not None else model.family.title


# --------------------------------------------------------------------------------------------------------------- images


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
    inputs = _image_inputs(model, opened, text)
    tell("reading")
    with watch(model, measures=MEASURES, keep="qk", layouts=inputs.layouts, tokens=inputs.words) as seen:
        inputs.read()
    longest = max((sides.keys.kind.size for sides in inputs.layouts.values()), default=0)
    words = tuple(inputs.words[0]) if inputs.words else ("",) * longest
    seen.photos = shown = (show_image(opened),)
    return Session(_name_of_model(model), seen, words, text=inputs.text, model=model, again=inputs.read, images=shown)


def takes_images(where: str) -> bool | None:
    """Whether a model takes images, from its config alone; `where` as in `regard.load`.

    None if the model is not on this machine, or if `regard.load` will refuse it.
    """
    try:
        if (config := _config_of(where)) is None:
            return None
        family = family_of(config)
        return has_vision(empty(family, config, family.task_of(config.values.get("architectures"))))
    except (OSError, ValueError):
        return None


def writes_answers(where: str) -> bool | None:
    """Whether a model is an encoder–decoder, such as one that translates; `where` and None as in `takes_images`."""
    try:
        config = _config_of(where)
        return None if config is None else config.values.get("is_encoder_decoder") is True
    except (OSError, ValueError):
        return None


def _config_of(where: str) -> Config | None:
    """The config of a model that is on this machine, else None."""
    directory = Path(os.path.expanduser(where))
    if not directory.is_dir():
        try:
            from huggingface_hub import errors, try_to_load_from_cache
        except ImportError:
            return None
        try:
            file = try_to_load_from_cache(where, "config.json")
        except errors.HFValidationError:  # a path, not a hub id
            return None
        if not isinstance(file, str):
            return None
        directory = Path(file).parent
    return Config.open(directory)


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


def _image_inputs(model: Model, image: OpenedImage, text: str | None) -> ImageInputs:
    prepared = model.preprocessor([image])
    pixels, frames = prepared.pixel_values.to(model.device), prepared.frames
    if isinstance(model, (VisionModel, DualEncoder)):
        if text is not None:
            raise ValueError(f"{model.family.title} sees only the image here: leave the text out")
        return ImageInputs(_in_eval_mode(model, lambda: model(pixel_values=pixels)), model.layouts(frames[0]))
    if isinstance(model, Captioner):
        return _caption_inputs(model, image, pixels, frames[0], text)
    if isinstance(model, (Answerer, Matcher)):
        return _question_inputs(model, image, pixels, frames[0], text)
    assert isinstance(model, (VisionLanguageModel, FlamingoModel)), "the other models that take images"
    return _prompt_inputs(model, image, pixels, frames, text)


def _caption_inputs(
    model: Captioner, image: OpenedImage, pixels: Tensor, frame: Frame, text: str | None
) -> ImageInputs:
    if text is None:
        written = model.caption(image, max_new_tokens=_new_tokens(model.decoder.embed.max_positions, 1))
        text = str(written.text).strip()
        ids = torch.cat([torch.tensor([model.start]), written.ids[:-1]])[None]  # (1, N)
    else:
        ids, _ = model.prompt(model.tokenizer.batch([text]).input_ids)
    ids = ids.to(model.device)
    words = [START, *token_labels(model, ids[0, 1:])]  # the tokenizer may not know `start`
    read = _in_eval_mode(model, lambda: model(ids, pixel_values=pixels))
    return ImageInputs(read, model.layouts(frame, ids.shape[1]), [words], text)


def _question_inputs(
    model: Answerer | Matcher, image: OpenedImage, pixels: Tensor, frame: Frame, text: str | None
) -> ImageInputs:
    """An image, and a question or a text that may match it. Of an Answerer, the reading of the question is watched."""
    if not text:
        what = "a question" if isinstance(model, Answerer) else "a text that may match the image"
        raise ValueError(f"{model.family.title} with task {model.task!r} reads {what}: give it as the text")
    ids = model.tokenizer.batch([text]).input_ids.to(model.device)  # (1, N)
    n, words = ids.shape[1], [model.tokenizer.tokens(ids[0])]
    if isinstance(model, Matcher):
        read = _in_eval_mode(model, lambda: model(ids, pixel_values=pixels))
        return ImageInputs(read, model.layouts(frame, n), words, text)
    answer = model.answer(image, text, max_new_tokens=_new_tokens(model.decoder.embed.max_positions, 1))
    read = _in_eval_mode(model, lambda: model.read_image(pixels, ids))
    layouts = {path: sides for path, sides in model.layouts(frame, n, 1).items() if not path.startswith("decoder.")}
    return ImageInputs(read, layouts, words, f"{text} → {answer.text.strip()}")


def _prompt_inputs(
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
    room = _new_tokens(model.max_positions, prompt.shape[1])
    if text is None:
        written = model.caption(image, max_new_tokens=room)
    else:
        written = model.answer(image, text, max_new_tokens=room)
    after = written.ids[None, :-1].to(model.device)
    ids = torch.cat([prompt, after], 1)  # (1, N)
    if isinstance(model, VisionLanguageModel):
        layouts = model.layouts(torch.cat([prompt, torch.full_like(after, -1)], 1)[0], frames)  # −1: no placeholder
        places = pad(prompt == model.placeholder, (0, after.shape[1]))  # (1, N): a generated placeholder has no image
        read = _in_eval_mode(
            model, lambda: model.text(ids, inserted=Inserted(places, model.encode(pixels).flatten(0, 1)))
        )
    else:
        layouts = model.layouts(frames, ids.shape[1])
        sees = last_image(prompt, len(pixels), placeholder=model.placeholder, ends=model.ends)  # (1, n, P)
        sees = torch.cat([sees, sees[:, -1:].expand(-1, after.shape[1], -1)], 1)  # (1, N, P)
        read = _in_eval_mode(model, lambda: model(ids, pixel_values=pixels[None], image_attention_mask=sees))
    answer = written.text.strip()
    return ImageInputs(read, layouts, [token_labels(model, ids[0])], f"{text} → {answer}" if text else answer)


def _new_tokens(max_positions: int | None, prompt: int) -> int:
    """How many tokens to generate after a prompt; if that is too long already, generation raises."""
    if max_positions is None:
        return MAX_NEW_TOKENS
    return max(1, min(MAX_NEW_TOKENS, max_positions - prompt + 1))  # the last one takes no position


def token_labels(model: Model, ids: Tensor) -> list[str]:
    """The labels of ids (N,). A model may generate rows of its table that the tokenizer does not know: [30523]."""
    size = model.tokenizer.size
    return [model.tokenizer.tokens([n])[0] if n < size else f"[{n}]" for n in ids.tolist()]
