"""Each kind of file opened as a user would, through the public interface; what comes back are its numbers.

Whatever is raised must be raised on purpose: by a `raise` in regard, or by the system (a file that is not there).
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

import regard
from regard.cli import main
from regard.data.image_processing import ImageProcessor
from regard.data.images import open_image as opened_image
from regard.data.images import peek_image
from regard.data.tokenizer import Tokenizer
from regard.explorer.export import page_data
from regard.session.session import look_at_image, session_of

PACKAGE = Path(regard.__file__).parent
TEXT = "the cat sat on the mat, 고양이! [MASK] <|endoftext|>"
PICTURE = (np.arange(37 * 53 * 3) % 251).astype(np.uint8).reshape(37, 53, 3)
REFUSALS = (ValueError, TypeError, OSError, LookupError)
LINE = 2000  # characters of a message that is still one sentence to read
Numbers = list[Any]


class UncontrolledError(Exception):
    """Something was raised that nobody meant to raise, or said in a way that nobody can read."""


# -------------------------------------------------------------------------------------------------- what may be raised


@cache
def raises_in(file: str) -> frozenset[int]:
    """The lines of a file on which a raise statement stands."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return frozenset(line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def is_refusal(error: BaseException) -> bool:
    """Is it an error of a documented class, raised on purpose, with something to say?"""
    if not isinstance(error, REFUSALS) or not 0 < len(str(error)) <= LINE:
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return True
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    return Path(file).is_relative_to(PACKAGE) and trace.tb_lineno in raises_in(file)


def attempt(numbers: Numbers, ask: Callable[[], Any]) -> None:
    """Ask for something of what was opened: it comes, or is refused on purpose."""
    try:
        numbers.append(ask())
    except Exception as error:
        if not is_refusal(error):
            raise
        numbers.append(f"{type(error).__name__}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


# --------------------------------------------------------------------------------------------------------------- kinds


def open_capture(path: Path) -> Numbers:
    """Opened, diagnosed, every view asked for everything, carried to the page, and shown in the terminal."""
    with quiet():
        capture = regard.open(path)
        numbers: Numbers = [repr(capture)]
        attempt(numbers, lambda: str(capture.doctor()))
        attempt(numbers, capture.summary)
        attempt(numbers, capture.atlas)
        for record in capture.records:
            if record.view is not None:
                _ask_view(numbers, record.view)
        for name in dict.fromkeys(capture.names):
            attempt(numbers, lambda name=name: repr(capture[name]))
        attempt(numbers, lambda: len(repr(page_data(session_of(capture)))))
        numbers.append(command("look", str(path)))
        numbers.append(command("doctor", str(path)))
        return numbers


def _ask_view(numbers: Numbers, view: Any) -> None:
    for name in ("output", "lse", "entropy", "max_logit", "effective", "received"):
        attempt(numbers, lambda name=name: getattr(view, name))
    for name in ("lse", "entropy", "max_logit", "effective"):
        attempt(numbers, lambda name=name: view.mean(name))
    asked = [view.map, lambda: view.map(3), view.top, lambda: view.top(2), view.patterns, view.check]
    asked += [
        lambda: view.row(0),
        lambda: view.column(0),
        lambda: view.tile(slice(0, 2), slice(0, 2)),
        lambda: repr(view),
    ]
    for ask in asked:
        attempt(numbers, ask)


def open_model(path: Path) -> Numbers:
    """Loaded, and asked what its family is for."""
    with quiet():
        model = regard.load(path)
        numbers: Numbers = [(name, p.detach()) for name, p in model.named_parameters()]
        match path.name.partition(".")[0]:
            case "bert":
                attempt(numbers, lambda: str(model.fill("the cat [MASK] on the mat")))
            case "gpt2":
                attempt(numbers, lambda: str(model.generate("the cat", max_new_tokens=3)))
                attempt(numbers, lambda: str(model.generate("the cat", max_new_tokens=3, num_beams=1, temperature=0)))
            case "vit":
                attempt(numbers, lambda: str(model.classify(PICTURE)))
                attempt(numbers, lambda: repr(look_at_image(PICTURE, model).capture))
            case "clip":
                attempt(numbers, lambda: str(model.match(PICTURE, ["the cat", "mat"])))
        return numbers


def open_tokenizer(path: Path) -> Numbers:
    """Opened; texts, pairs and batches cut, and joined again."""
    with quiet():
        tokenizer = Tokenizer.open(path)
        numbers: Numbers = [tokenizer.size]
        attempt(numbers, lambda: tokenizer.encode(TEXT))
        attempt(numbers, lambda: tokenizer.encode("the cat", "the mat"))
        attempt(numbers, lambda: tokenizer.batch([TEXT, "cat"], length=7, truncate=True))
        attempt(numbers, lambda: tokenizer.decode(tokenizer.encode(TEXT).ids))
        attempt(numbers, lambda: tokenizer.tokens(range(0, min(tokenizer.size, 50), 7)))
        return numbers


def open_array(path: Path) -> Numbers:
    """As input of `regard steps` and `regard look`."""
    with quiet():
        return [command("steps", "--input", str(path), "--json"), command("look", str(path))]


def open_image(path: Path) -> Numbers:
    """Glanced at, opened, and made pixels of."""
    with quiet():
        numbers: Numbers = []
        attempt(numbers, lambda: peek_image(path)[1])
        attempt(numbers, lambda: opened_image(path).size)  # refused where there are several frames
        opened = opened_image(path, frame=0)
        numbers.append(np.asarray(opened.image))
        attempt(numbers, lambda: ImageProcessor.of("CLIP")(opened).pixel_values)
        attempt(numbers, lambda: ImageProcessor.of("Llava", {"do_pad": True})(opened).pixel_values)
        return numbers


def command(*arguments: str) -> tuple[int, str]:
    """Run the command line in this process; its exit code and what it printed. Complaints are one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    said = err.getvalue()
    if code not in (0, 1, 2) or (code == 2) != (said != "") or said.count("\n") > 1 or len(said) > LINE + 200:
        raise UncontrolledError(f"regard {' '.join(arguments)} ended with {code} and said {said!r:.300}")
    return code, out.getvalue().replace(os.sep, "/")


OPENERS = {
    "captures": open_capture,
    "models": open_model,
    "tokenizers": open_tokenizer,
    "arrays": open_array,
    "images": open_image,
}


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, NaN included, through lists, dictionaries and dataclasses."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(a.numpy(), b.numpy())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__") and type(a) is type(b):
        return same(vars(a), vars(b))
    return bool(a == b)
