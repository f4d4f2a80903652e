"""Outputs of the commands: lines on the terminal with their width, colours and language, JSON, and files."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from regard.cli.commands import Lang, LookOptions
from regard.locale import translate
from regard.tables import number, pad, width

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from regard.session.heads import Layer
    from regard.session.session import Session

Part = str | tuple[str, str]
"""A piece of a line: a text, or a text and its style in rich's words, such as ("Scores", "bold")."""
Tick = Callable[[int, int | None], None]
"""Progress so far, and the total where it is known."""

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
PIPE = 100  # cells on a line where there is no terminal
INDENT = "   "
MOST_SHOWN = 12  # rows and columns of a matrix
DECIMALS = 4
LARGE = 10_000.0  # from here on, each number in its own form: 1.48e+12
LINKS = 8  # unless --top says otherwise
# Paper to ink in equal steps of lightness, as regard.viz.figures draws weights; black or white reads on each.
HEAT = ("black on #c6f2f1", "black on #9adae1", "black on #6ec1d4", "black on #46a6cc", "white on #246bae")


class _Console(Console):
    """A console that raises when its reader left, instead of ending the process with 1, which is an answer here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Terminal:
    """Standard output in a language."""

    def __init__(self, lang: Lang = "en") -> None:
        self.lang = lang
        self._console = _Console(highlight=False, markup=False, emoji=False)

    def say(self, text: str, /, **values: object) -> str:
        """`text` in the language, with `values` filled in."""
        return translate(text, self.lang, **values)

    @property
    def room(self) -> int | None:
        """Width in cells, or None if standard output is not a terminal."""
        return self._console.width if self._console.is_terminal else None

    @property
    def coloured(self) -> bool:
        """Whether colours are shown: not in a pipe, nor where NO_COLOR or TERM says so."""
        return self._console.color_system is not None and not self._console.no_color

    def print(self, *parts: Part) -> None:
        """Print a line; a terminal wraps it between words."""
        line = Text.assemble(*parts)
        if self.room is None:
            line.rstrip()
        self._console.print(line, soft_wrap=self.room is None)

    def fold(self, text: str, cells: int) -> list[str]:
        """The text in lines of at most so many cells, cut between words."""
        return [line.plain.rstrip() for line in Text(text).wrap(self._console, cells)]

    def write(self, *parts: Part) -> None:
        """Print parts of a line that goes on, unwrapped."""
        self._console.print(Text.assemble(*parts), soft_wrap=True, end="")

    def render(self, renderable: RenderableType) -> None:
        """Print something that rich renders, such as Markdown."""
        self._console.print(renderable)

    def titled(self, text: str) -> None:
        """Print lines, the first of them bold."""
        title, *rest = text.split("\n")
        self.print((title, "bold"))
        self.print("\n".join(rest))

    def name_files(self, **paths: Path | None) -> None:
        """Print which files were written: figure, html, saved."""
        titles = {"html": "Page: {path}", "saved": "Capture: {path}", "figure": "Figure: {path}"}
        for name, path in paths.items():
            if path is not None:
                self.print(self.say(titles[name], path=path))


def print_json(values: Any) -> None:
    """Print values as JSON, with paths as text, and "nan", "inf" and "-inf" for the numbers that JSON lacks."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        not_a_number = isinstance(value, float) and not isfinite(value)
        return str(value) if not_a_number or isinstance(value, Path) else value

    print(json.dumps(plain(values), ensure_ascii=False, allow_nan=False))


@contextmanager
def bar(title: str) -> Iterator[Tick]:
    """A progress bar on stderr; nothing if that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(title), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# --------------------------------------------------------------------------------------------------------------- files


def check_output(path: Path | None, option: str = "", suffixes: tuple[str, ...] = ()) -> None:
    """Raise for a path that cannot be written, before anything is computed; a missing folder is made later."""
    from regard.files import check_target

    if path is None:
        return
    if suffixes and (path.suffix.lower() not in suffixes or path.is_dir()):
        raise ValueError(f"{option} {str(path)!r} must be a file that ends in {', '.join(suffixes)}")
    if path.parent.is_dir():
        check_target(path)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Make the folders on the way to a file that is written in this block. An OSError names the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {str(path.parent)!r}: {error.strerror or error}") from None
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # ours, which names the path already
            raise
        raise OSError(f"{error.strerror}: {str(path)!r}") from None


def cpu_floats(vectors: Tensor) -> Tensor:
    """Vectors on the CPU, in fp32 or wider: NumPy has no bfloat16."""
    return vectors.float().cpu() if vectors.dtype.itemsize < 4 else vectors.cpu()


def write_npy(vectors: Tensor, path: Path) -> None:
    """Write vectors to an .npy file, whole or not at all; missing folders are made."""
    from numpy.lib import format as npy

    from regard.files import atomic_file

    array = cpu_floats(vectors).contiguous().numpy()
    with output_to(path), atomic_file(path, "the vectors") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)  # np.save would not say why a disk takes no more


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure; missing folders are made."""
    from regard.viz import figures

    with output_to(path):
        figures.save(figure, path)


def write_session(session: Session, options: LookOptions) -> dict[str, Path | None]:
    """Write the page and the capture of `regard look`; return all written files by kind, also the figure."""
    if options.save is not None:
        with output_to(options.save):
            session.capture.save(options.save, photos=bool(session.images))
    if options.html is not None:
        from regard.explorer.export import write_html

        with output_to(options.html):
            write_html(session, options.html, lang=options.lang)
    return {"html": options.html, "saved": options.save, "figure": options.figure}


# ------------------------------------------------------------------------------------------------------------- colours


def colour_of(place: float) -> tuple[str, str]:
    """The colour of a weight from 0 to 1, and one that reads on it, both as #rrggbb.

    COLORFGBG may say that the terminal is light; then more is darker, else lighter.
    """
    import numpy as np

    from regard.viz.colors import DARK, LIGHT, Scale, readable_on

    light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    scale = Scale("", (LIGHT if light else DARK).weight, 0.0, 1.0, hidden=-1.0)
    cell = scale.colours(np.array(min(max(place, 0.0), 1.0)))
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in cell.tolist()), readable_on(cell)


def shade(place: float) -> str:
    """The style of a weight's cell in rich's words; "" for a weight of 0."""
    if not place > 0.0:
        return ""
    ground, ink = colour_of(place)
    return f"{ink} on {ground}"


def fit(items: Sequence[Sequence[tuple[str, str]]], room: int, indent: str = "", gap: str = " ") -> list[list[Part]]:
    """Items, each of styled parts that stay together, on as many lines as they need."""
    lines: list[list[Part]] = []
    used = room
    for item in items:
        cells = sum(width(text) for text, _ in item)
        if not lines or used + len(gap) + cells > room:
            lines.append([indent] if indent else [])
            used = len(indent)
        else:
            lines[-1].append(gap)
            used += len(gap)
        lines[-1] += item
        used += cells
    return lines


# ------------------------------------------------------------------------------------------------------------ matrices


def print_matrix(
    values: Sequence[Sequence[float]],
    labels: Sequence[str] | None,
    headers: Sequence[str] | None,
    out: Terminal,
    *,
    heat: bool,
) -> None:
    """Print a matrix (N, M): at most 12 rows and 12 columns, fewer columns where there is no room, and what is left.

    labels, headers: of rows and columns; None numbers them.  heat: colour cells by their share of the largest number.
    """
    n, m = len(values), len(values[0])
    rows = list(labels or map(str, range(n)))[:MOST_SHOWN]
    columns = list(headers or map(str, range(m)))[:MOST_SHOWN]
    cells = _aligned([row[:MOST_SHOWN] for row in values[:MOST_SHOWN]])
    widths = [max(map(width, column)) for column in zip(columns, *cells, strict=True)]
    side, shown = max(map(width, rows)), len(columns)
    if out.room is not None:
        while shown > 1 and sum(w + 2 for w in widths[:shown]) > out.room - len(INDENT) - side:
            shown -= 1
    largest = max((value for row in values for value in row if isfinite(value)), default=0.0)

    def cell(text: str, column: int) -> str:
        return f" {pad(text, widths[column], right=True)} "

    def style(value: float) -> str:
        if not heat or not value > 0 or not isfinite(value):
            return ""
        return HEAT[min(int(value / largest * len(HEAT)), len(HEAT) - 1)]

    out.print(f"{INDENT}{pad('', side)} ", *((cell(columns[c], c), "dim") for c in range(shown)))
    for label, numbers, texts in zip(rows, values, cells, strict=False):
        out.print(f"{INDENT}{pad(label, side)} ", *((cell(texts[c], c), style(numbers[c])) for c in range(shown)))
    if (len(rows), shown) != (n, m):
        part, whole = f"{len(rows)} × {shown}", f"{n} × {m}"
        out.print((INDENT + out.say("… {part} of {whole}; --json has all", part=part, whole=whole), "dim"))


def _aligned(rows: Sequence[Sequence[float]]) -> list[list[str]]:
    """Numbers with as many decimals as the one that needs most, up to four. Only an exact 0 is written 0."""
    finite = [value for row in rows for value in row if isfinite(value)]
    large = any(abs(value) >= LARGE for value in finite)
    decimals = max((len(f"{value:.{DECIMALS}f}".rstrip("0").partition(".")[2]) for value in finite), default=0)

    def text(value: float) -> str:
        if not isfinite(value):
            return {inf: "∞", -inf: "−∞"}.get(value, "NaN")
        fixed = f"{value:.{decimals}f}"
        return number(value) if large or float(fixed) == 0 else fixed

    return [[text(value) for value in row] for row in rows]


# --------------------------------------------------------------------------------------------------------------- atlas

LETTERS = {
    "own": "o",
    "previous": "p",
    "next": "n",
    "first": "f",
    "neighbours": "b",
    "uniform": "u",
    "delimiter": "d",
    "same token": "s",
    "induction": "i",
}
CELL = 3
NOISE = 1e-5  # differences below it are rounding


def describe_atlas(session: Session, layers: list[Layer], measure: str | None) -> dict[str, Any]:
    """The layers, a measure of their heads (default: entropy), and the heads' patterns, in values that JSON holds."""
    measure = measure or "entropy"
    rows: list[list[float | None]] = []
    known: dict[str, None] = {}
    for layer in layers:
        measures = session.numbers[layer.index].measures
        known |= dict.fromkeys(measures)
        values = measures.get(measure)
        rows.append([None] * layer.view.sizes[1] if values is None else values.tolist())
    if measure not in known:
        raise ValueError(f"--measure {measure!r} is not known here; there are {', '.join(known)}")
    return {
        "layers": [
            {"index": layer.index, "path": layer.path, "kind": layer.view.kind}
            | dict(zip(("heads", "queries", "keys"), layer.view.sizes[1:], strict=True))
            for layer in layers
        ],
        "measure": measure,
        "atlas": rows,
        "patterns": [[list(names) for names in session.numbers[layer.index].names] for layer in layers],
        "rest": [list(session.numbers[layer.index].rest) for layer in layers],
    }


def print_atlas(description: dict[str, Any], out: Terminal) -> None:
    """Print what `describe_atlas` returned, and what the letters of the patterns mean; NaN weights are marked !!."""
    from regard.lens.patterns import CALLED

    # 1. The scale: 0 to 1 for a pattern, else from the least to the most there is.
    measure, atlas = description["measure"], description["atlas"]
    low, high = 0.0, 1.0
    if measure not in LETTERS and measure != "received_max":
        known = [v for row in atlas for v in row if v is not None and isfinite(v)]
        low, high = (min(known), max(known)) if known else (nan, nan)
        if f"{low:.3g}" == f"{high:.3g}" or high - low < NOISE:
            high = low
    if isnan(low):
        scale = out.say(": no numbers")
    elif low == high:
        scale = out.say(": {low:.3g} in every head", low=low)
    else:
        scale = out.say(": 0 is {low:.3g}, 9 is {high:.3g}", low=low, high=high)
    names = {"effective": "effective keys (1/Σw²)", "received_max": "received_max", "entropy": "entropy"}
    called = out.say(names[measure]) if measure in names else CALLED[out.lang].get(measure, measure)
    out.print((out.say("Heads by {measure}", measure=called), "bold"), scale)

    # 2. The heads: a digit and a letter each, in blocks as wide as the terminal.
    def cell(value: float | None, patterns: list[str]) -> list[Part]:
        letter = LETTERS[patterns[0]] if patterns else "·"
        if value is not None and isnan(value):
            return [" ", ("!!", "bold red")]
        if value is None or not isfinite(value):
            return [f" –{letter}"]
        place = (value - low) / (high - low) if high > low else 0.0
        digit = min(9, int(10 * max(0.0, place)))
        return [" ", (f"{digit}{letter}", shade(max(place, 1e-6)) if out.coloured else "")]

    rows = [out.say("layer {index}", index=layer["index"]) for layer in description["layers"]]
    label = max(width(name) for name in [*rows, out.say("head")]) + 2
    heads = max(map(len, atlas), default=0)
    block = max(1, ((out.room or PIPE) - label) // CELL)
    for first in range(0, heads, block):
        shown = range(first, min(first + block, heads))
        out.print((pad(out.say("head"), label) + "".join(f"{h:>{CELL}}" for h in shown), "dim"))
        for name, values, patterns in zip(rows, atlas, description["patterns"], strict=True):
            parts: list[Part] = [(pad(name, label), "dim")]
            for h in shown:
                value = values[h] if h < len(values) else None
                parts += cell(value, patterns[h]) if h < len(patterns) else [" " * CELL]
            out.print(*parts)
    out.print()

    # 3. What the letters mean.
    count = Counter(
        names[0] if names else ""
        for patterns, values in zip(description["patterns"], atlas, strict=True)
        for names, value in zip(patterns, values, strict=False)
        if value is None or not isnan(value)
    )
    broken = sum(value is not None and isnan(value) for values in atlas for value in values)
    if broken:
        out.print((f"{out.say('!! weights are NaN: see regard doctor')} ×{broken}", "bold red"))
    _print_patterns(count, Counter(name for row in description["rest"] for name in row if name), out)


def _print_patterns(count: Counter[str], rests: Counter[str], out: Terminal) -> None:
    """A line for each pattern that is first among a head's.

    count: how many heads each pattern names; "" for those that have none.
    rests: how often each pattern gets half of what heads do not give to the first token.
    """
    from regard.lens.patterns import CALLED, MEANING

    called, meanings = CALLED[out.lang], dict(MEANING[out.lang])
    if rests:
        named = ", ".join(f"{called[name]} ×{rests[name]}" for name in LETTERS if rests[name])
        meanings["first"] += out.say("; what goes elsewhere: {named}", named=named)
    headings = {name: f"{letter} {called[name]} ×{count[name]}" for name, letter in LETTERS.items() if count[name]}
    wide = max(map(width, headings.values()), default=0)
    for name, heading in headings.items():
        lines = fit([[(word, "")] for word in meanings[name].split()], max(16, (out.room or PIPE) - wide - 3))
        for n, line in enumerate(lines):
            out.print((pad("" if n else heading, wide) + "   ", "bold"), *line)
    if count[""]:
        out.print((out.say("· no single pattern ×{count}", count=count[""]), "dim"))
    if headings:
        how = "A letter is the pattern that gets half of a head's attention or more; u: 90% of the largest entropy."
        out.print((out.say(how), "dim"))
