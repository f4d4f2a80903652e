"""Pictures of weights, masks and steps, as matplotlib figures; Hangul is drawn as Hangul wherever they are opened.

    >>> import numpy as np
    >>> picture = heatmap(np.eye(3), ["나는", "cat", "sat"])
    >>> [text.get_text() for text in picture.texts][:4]
    ['looks at →', 'looks from ↓', '나는', 'cat']

Figures are built as objects: no pyplot, and no setting of matplotlib changed (`save` sets four and puts them back), so
a picture looks the same in every program. Places are computed in inches from measured text, so nothing is clipped.
Colours change evenly in perceived lightness (OKLab), towards more ink on light paper and more light on dark paper; a
hidden cell is bare paper.

This file does not know how weights are computed, nor anything of models. It imports matplotlib only to make a figure.
"""

from __future__ import annotations

import os
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import ceil, inf, nan
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.stages import NAMES, Steps, pick
from regard.tables import width as terminal_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text

__all__ = ["heatmap", "mask", "save", "steps"]

Array = NDArray[Any]
Pair = tuple[float, float]
Shape = tuple[int, int]
Labels = tuple[str, ...] | None  # None: positions are numbered
Key = tuple[str | Array, ...]  # an entry of the legend: words, and colours (K, 3) as a swatch or a ramp

PAGE, CELL, MARGIN, GAP = 20.0, 0.56, 0.3, 0.3  # inches; a page and a cell are never larger
TITLE, HEADING, CAPTION = 12.0, 10.0, 8.5  # points
DPI = 200
FROM, AT = "looks from ↓", "looks at →"
HIDDEN_SIGNS = ("·", "−∞")
FAMILY = "regard NanumGothic"  # a name of our own: registering it changes no font that anybody else asks for
INSTALL = "pip install 'regard[figures]'"
METADATA: dict[str, dict[str, Any]] = {  # neither date nor version: the same picture is the same file
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_REGISTERING, _SAVING = Lock(), Lock()


@dataclass(frozen=True)
class _Theme:
    paper: str
    ink: str
    muted: str
    line: str
    alarm: str
    weight: tuple[str, ...]  # smallest to largest
    signed: tuple[str, ...]  # most negative, zero in the middle, most positive


# Equal steps of OKLab lightness. Orange against blue, never red against green, for colour-blind readers.
LIGHT = _Theme(
    *("#ffffff", "#1b1f26", "#68707d", "#c3c9d2", "#d81b60"),
    ("#c6f2f1", "#9adae1", "#6ec1d4", "#46a6cc", "#2388c3", "#246bae", "#274d98", "#213674", "#182052"),
    ("#824121", "#ab6230", "#d5863e", "#deba91", "#e8e8e8", "#a1c1e2", "#5c98d5", "#376db3", "#194292"),
)
DARK = _Theme(
    *("#14171c", "#e8ebf0", "#949dab", "#454d59", "#ff5c93"),
    ("#293363", "#324886", "#365eaa", "#357abf", "#3696d2", "#49b3d9", "#6ccedf", "#9ce5e4", "#cbfaf0"),
    ("#e7b369", "#c78c49", "#a6662b", "#6f4f34", "#38383a", "#425979", "#437eb9", "#60a6da", "#81cffc"),
)


@dataclass(frozen=True)
class _Scale:
    """What a colour means: numbers from low to high along a ramp, and the one number that means hidden."""

    name: str
    ramp: tuple[str, ...]
    low: float
    high: float
    hidden: float

    def colours(self, place: Array) -> Array:
        """Places along the ramp, 0 to 1 → colours (…, 3)."""
        stops = np.linspace(0.0, 1.0, len(self.ramp))
        return np.stack([np.interp(place, stops, channel) for channel in _rgb(*self.ramp).T], -1)

    def paint(self, values: Array, theme: _Theme) -> Array:
        """(R, C) numbers → (R, C, 3) colours."""
        finite = np.isfinite(values)
        cells = self.colours((np.where(finite, values, 0.0) - self.low) / ((self.high - self.low) or 1.0))
        cells[~finite] = _rgb(theme.alarm)
        cells[values == self.hidden] = _rgb(theme.paper)
        return cells

    def sign(self, value: float) -> str:
        """A number in the few signs that a cell has room for."""
        if value == self.hidden:
            return "·" if value == 0 else "−∞"
        if self.hidden == 0 and value < 0.005:
            return "<.01"
        digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
        return (f"{value:z.{digits}f}" if abs(value) < 9999.5 else f"{value:.0e}").replace("-", "−")

    def key(self) -> Key:
        """The scale as an entry of the legend."""
        low, high = (f"{value:.3g}".replace("-", "−") for value in (self.low, self.high))
        return self.name, low, self.colours(np.linspace(0.0, 1.0, 60)), high


@dataclass(frozen=True)
class _Panel:
    """One map and the words around it. A cell stands for `tile` positions."""

    cells: Array  # (R, C, 3)
    shape: Shape  # positions, (Nq, Nk)
    inches: Pair  # (height, width)
    rows: Labels
    cols: Labels
    tile: Shape = (1, 1)
    signs: Array | None = None  # (R, C) of str
    heading: str = ""
    formula: str = ""
    across: str = ""  # what the columns are, where they are not keys


# ------------------------------------------------------------------------------------------------------------ pictures


def heatmap(
    weights: Any,
    labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    *,
    title: str | None = None,
    values: bool | None = None,
    dark: bool = False,
) -> Figure:
    """Attention weights as a heat map: a row per query, a column per key; several heads on one scale.

    >>> import numpy as np
    >>> picture = heatmap(np.full((2, 3), 1 / 3), ["나는", "본다"], ["I", "see", "you"], title="cross-attention")
    >>> picture.texts[0].get_text()
    'cross-attention'

    weights: (Nq, Nk), or (H, Nq, Nk) for a grid of heads; NumPy or torch, at most 4096 positions and 144 heads.
    labels: one per query; for the keys too, where there are as many. Without labels positions are numbered.
    key_labels: one per key.
    values: print the number in each cell; by default up to 16 × 16, where it is readable.
    dark: for dark paper.

    Colours run from 0 to the largest weight. A weight of exactly 0 is bare paper; NaN and infinity are red. Where there
    are more weights than dots, a cell shows the largest of several, and the figure says so.

    Raises TypeError or ValueError for weights or labels of a wrong kind or size, for negative weights, and for
    values=True where the numbers would be too small to read.
    """
    _ready()
    heads, nq, nk = _weights_shape(weights)
    rows, cols = _both_labels(labels, key_labels, nq, nk)
    columns = _columns(heads)
    inches = _panel_inches((nq, nk), columns, -(-heads // columns), 15.0 if values else 9.6)
    tile = (ceil(nq / (inches[0] * DPI)), ceil(nk / (inches[1] * DPI)))
    maps = [_pooled(weights[h] if weights.ndim == 3 else weights, tile) for h in range(heads)]
    theme = DARK if dark else LIGHT
    scale = _Scale("weight", theme.weight, 0.0, max(map(_largest, maps)), hidden=0.0)
    panels = []
    for h, cells in enumerate(maps):
        signs = _signs(cells, scale, inches, values)
        name = f"head {h}" if weights.ndim == 3 else ""
        panels.append(_Panel(scale.paint(cells, theme), (nq, nk), inches, rows, cols, tile, signs, name))
    keys = _keys([scale], maps, theme)
    if max(tile) > 1:
        keys.append((f"a cell shows the largest of {tile[0]} × {tile[1]} weights",))
    return _compose(panels, columns, title or "", keys, theme)


def mask(
    mask: Mask,
    nq: int,
    nk: int | None = None,
    *,
    labels: Sequence[str] | None = None,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Who may look at whom: cell by cell, or beyond 96 positions tile by tile (full, partial, empty).

    >>> from regard.masks import causal
    >>> mask(causal(), 4).texts[0].get_text()
    'causal()'

    mask: a value of regard.masks.  nq, nk: how many queries and keys; nk is nq unless given.
    labels: one per query; for the keys too, where there are as many.
    batch, head: which one to draw, where the mask differs between them.
    title: by default the mask as it prints.  dark: for dark paper.

    A tile of a combination (`&`, `|`) may be called partial where a look at every cell would settle it.
    Raises TypeError for what is not a mask, ValueError for sizes or labels that do not fit, IndexError for batch, head.
    """
    _ready()
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a regard.masks value, got {type(mask).__name__}; for booleans use masks.dense")
    nk = nq if nk is None else nk
    _check_size("mask", nq, nk, 2**20, "draw fewer")
    rows, cols = _both_labels(labels, None, nq, nk)
    theme = DARK if dark else LIGHT
    if max(nq, nk) <= 96:
        tile, names = 1, {FULL: "may look", EMPTY: "hidden"}
        kinds = mask.dense(nq, nk).reshape(*mask.leading, nq, nk) * FULL
    else:
        tile = 1 << (ceil(max(nq, nk) / 64) - 1).bit_length()  # at most 64 tiles across
        names = {FULL: "full: all may look", PARTIAL: "partial", EMPTY: "empty: hidden"}
        kinds = mask.tiles(nq, nk, tile)
    colours = {EMPTY: theme.paper, PARTIAL: theme.weight[2], FULL: theme.weight[6]}
    cells = _rgb(*(colours[kind] for kind in (EMPTY, PARTIAL, FULL)))[pick(kinds, batch, head).astype(int)]
    panel = _Panel(cells, (nq, nk), _panel_inches((nq, nk), 1, 1, 6.4), rows, cols, (tile, tile))
    keys: list[Key] = [(_rgb(colours[kind]), name) for kind, name in names.items()]
    keys += [(f"a tile is {tile} × {tile} positions",)] if tile > 1 else []
    return _compose([panel], 1, repr(mask) if title is None else title, keys, theme)


def steps(steps: Steps, *, batch: int = 0, head: int = 0, dark: bool = False) -> Figure:
    """The stages of one head side by side, from scores to output; a cap, bias or mask only where it changed something.

    >>> import numpy as np
    >>> from regard.op import steps as keep
    >>> picture = steps(keep(np.eye(2), np.eye(2), np.eye(2), labels=["나는", "cat"]))
    >>> [text.get_text() for text in picture.texts if text.get_text() in ("scores", "scaled", "masked", "weights")]
    ['scores', 'scaled', 'weights']

    steps: what regard.steps returns; at most 256 queries, keys and features.
    batch, head: which one to draw.  dark: for dark paper.

    All stages before the softmax share one scale, so that scaling shows as fading. A hidden score is bare paper.
    Raises ValueError where there is too much to see, IndexError for a batch or head that is not there.
    """
    _ready()
    (nq, nk), features = steps.scores.shape[-2:], steps.output.shape[-1]
    _check_size("steps", max(nq, features), nk, 256, "draw the weights alone with heatmap")
    stage = {name: pick(getattr(steps, name), batch, head).astype(float) for name in NAMES}  # (Nq, Nk), (Nq, Dv)
    rows, cols = _both_labels(steps.labels, steps.key_labels, nq, nk)
    theme = DARK if dark else LIGHT
    scales = _step_scales(stage, theme)
    inches = _panel_inches((nq, nk), len(scales), 1, 9.6)
    panels, before = [], ""
    for name, scale in scales.items():
        size, names, across = inches, cols, ""
        if name == "output":
            size, names, across = (inches[0], min(features * inches[1] / nk, _reach(len(scales)))), None, "feature →"
        # The formula speaks of the stage drawn before, where those between changed nothing.
        formula = steps.formulas[name].replace(NAMES[NAMES.index(name) - 1], before) if before else steps.formulas[name]
        words = (name, _clip(_drawable(formula), 36), across)
        signs = _signs(stage[name], scale, size, None)
        shape = (nq, stage[name].shape[1])
        panels.append(_Panel(scale.paint(stage[name], theme), shape, size, rows, names, (1, 1), signs, *words))
        before = name
    keys = _keys(list(dict.fromkeys(scales.values())), [stage[name] for name in scales], theme)
    return _compose(panels, len(panels), "", keys, theme)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix; the file is whole or absent, and the same bytes every time.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(heatmap(np.eye(2)), f"{folder}/eye.svg").name
    'eye.svg'

    figure: any matplotlib figure.  path: ends in .png, .svg or .pdf; its folder must exist.
    Letters become outlines in SVG and are embedded in PDF, so both show Hangul where no Korean font is installed.

    Raises TypeError for what is not a figure, ValueError for another suffix, FileNotFoundError for a missing folder.
    """
    _ready()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path = Path(path)
    kind = path.suffix[1:].lower()
    if not isinstance(figure, Figure):
        raise TypeError(f"save takes a matplotlib figure, got {type(figure).__name__}")
    if kind not in METADATA:
        raise ValueError(f"cannot write {path.name!r}: the name must end in .{', .'.join(METADATA)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name!r}: there is no folder {str(path.parent)!r}; make it first")
    part = path.with_name(f".{uuid4().hex}.part")
    # These settings exist only as globals of matplotlib; the lock keeps two saves from restoring each other's.
    settings: dict[Any, Any] = {
        "svg.fonttype": "path",
        "svg.hashsalt": "regard",
        "savefig.bbox": None,
        "pdf.use14corefonts": False,
    }
    paper = figure.get_facecolor()
    try:
        with _SAVING, rc_context(settings), part.open("xb") as file:
            figure.savefig(file, format=kind, dpi="figure", facecolor=paper, metadata=METADATA[kind])
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


# ------------------------------------------------------------------------------------------------- reading what comes


def _weights_shape(weights: Any) -> tuple[int, int, int]:
    """(H, Nq, Nk) of weights that can be drawn."""
    if not isinstance(weights, np.ndarray | Tensor):
        raise TypeError(f"weights must be a NumPy array or a torch tensor, got {type(weights).__name__}")
    if weights.is_complex() if isinstance(weights, Tensor) else weights.dtype.kind not in "fiub":
        raise TypeError(f"weights must be real numbers, got {weights.dtype}")
    if weights.ndim not in (2, 3) or 0 in weights.shape:
        hint = "; choose a batch row with weights[b]" if weights.ndim == 4 else ""
        raise ValueError(f"weights must be (Nq, Nk) or (H, Nq, Nk), not empty; got {tuple(weights.shape)}{hint}")
    heads, nq, nk = (1, *weights.shape)[-3:]
    _check_size("heatmap", nq, nk, 4096, "that many are for the lens's pooled map, not for cells")
    if heads > 144:
        raise ValueError(f"heatmap draws at most 144 heads, got {heads}; draw some of them: weights[:144]")
    return heads, nq, nk


def _check_size(name: str, nq: int, nk: int, most: int, advice: str) -> None:
    if min(nq, nk) < 1:
        raise ValueError(f"{name} needs at least one query and one key, got {nq} × {nk}")
    if max(nq, nk) > most:
        raise ValueError(f"{name} draws at most {most} positions, got {nq} × {nk}; {advice}")


def _pooled(weights: Any, tile: Shape) -> Array:
    """(Nq, Nk) → the largest weight of each tile, (R, C): a lone peak must not vanish between two dots."""
    values = pick(weights, 0, 0)
    if (values < 0).any():
        raise ValueError(f"weights must not be negative, got {np.nanmin(values):.3g}; scores are drawn by steps")
    (r, c), (nq, nk) = tile, values.shape
    padded = np.pad(values.astype(float), ((0, -nq % r), (0, -nk % c)))
    return np.asarray(padded.reshape(-1, r, padded.shape[1] // c, c).max((1, 3)))


def _largest(values: Array) -> float:
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def _both_labels(labels: Any, key_labels: Any, nq: int, nk: int) -> tuple[Labels, Labels]:
    rows = _labels("labels", labels, nq, "queries")
    return rows, rows if key_labels is None and nq == nk else _labels("key_labels", key_labels, nk, "keys")


def _labels(name: str, labels: Any, count: int, what: str) -> Labels:
    if labels is None:
        return None
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"{name} must be a list of strings, got {labels!r}; a sentence has to be split first")
    if len(labels) != count:
        raise ValueError(f"{name} has {len(labels)} entries, but there are {count} {what}")
    return tuple(_clip(_drawable(label), 24) for label in labels)


def _clip(label: str, most: int) -> str:
    """At most so many terminal cells, the cut marked."""
    if terminal_width(label) <= most:
        return label
    while terminal_width(label) >= most:
        label = label[:-1]
    return label + "…"


# ------------------------------------------------------------------------------------------------- colours and numbers


def _step_scales(stage: dict[str, Array], theme: _Theme) -> dict[str, _Scale]:
    """The stages to draw, in order, each with its scale."""
    drawn = ["scores", "scaled"]
    for before, name in (("scaled", "capped"), ("capped", "biased"), ("biased", "masked")):
        if not np.array_equal(stage[before], stage[name], equal_nan=True):
            drawn.append(name)
    score, output = max(_largest(abs(stage[name])) for name in drawn), _largest(abs(stage["output"]))
    return dict.fromkeys(drawn, _Scale("score", theme.signed, -score, score, hidden=-inf)) | {
        "weights": _Scale("weight", theme.weight, 0.0, _largest(stage["weights"]), hidden=0.0),
        "output": _Scale("output", theme.signed, -output, output, hidden=nan),
    }


def _rgb(*colours: str) -> Array:
    """'#rrggbb' → (K, 3) in 0..1."""
    return np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])


def _readable_on(cell: Array) -> str:
    """Black or white, whichever contrasts more (WCAG 2 relative luminance): at least 4.5 to 1 on any colour."""
    linear = np.where(cell <= 0.04045, cell / 12.92, ((cell + 0.055) / 1.055) ** 2.4)
    return "#000000" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "#ffffff"


def _keys(scales: list[_Scale], maps: list[Array], theme: _Theme) -> list[Key]:
    """The legend: each scale, and hidden or broken cells where there are any."""
    keys, hidden = [scale.key() for scale in scales], scales[0].hidden
    if any((values == hidden).any() for values in maps):
        keys.append((_rgb(theme.paper), "exactly 0" if hidden == 0 else "hidden"))
    if any((np.isnan(values) | (values == inf)).any() for values in maps):
        keys.append((_rgb(theme.alarm), "NaN or infinite"))
    return keys


def _signs(values: Array, scale: _Scale, inches: Pair, force: bool | None) -> Array | None:
    """(R, C) numbers as text where they are asked for, or by default where they are few and readable."""
    if force is False or (force is None and max(values.shape) > 16):
        return None
    if _sign_size({"0.00"}, values.shape, inches) >= 3:  # before millions of numbers are written
        signs = np.array([[scale.sign(value) for value in row] for row in values.tolist()], dtype=object)
        if _sign_size(set(signs.flat), values.shape, inches) >= (3 if force else 5):
            return signs
    if force:
        raise ValueError(f"values=True: numbers in {values.shape[0]} × {values.shape[1]} cells are too small to read")
    return None


def _sign_size(signs: set[str], shape: tuple[int, ...], inches: Pair) -> float:
    """Points at which all of the signs fit a cell."""
    height, width = inches[0] / shape[0], inches[1] / shape[1]
    return min(9.5, 43 * height, 0.84 * width / max(_measure(sign, 1.0) for sign in signs))


# -------------------------------------------------------------------------------------------------------------- letters


def _ready() -> None:
    """See that matplotlib and the Korean font are there, and the font known under our own name."""
    try:
        from matplotlib.font_manager import FontEntry, fontManager
    except ImportError as error:
        raise ImportError(f"figures need matplotlib: {INSTALL}") from error
    # Only the files are wanted: importing koreanize_matplotlib would change the fonts of the whole program.
    carrier = find_spec("koreanize_matplotlib")
    folders = (carrier.submodule_search_locations if carrier else None) or []
    for name, weight in (("NanumGothic.ttf", 400), ("NanumGothicBold.ttf", 700)):
        files = [file for folder in folders if (file := Path(folder, "fonts", name)).is_file()]
        if not files:
            raise ImportError(f"figures need the font {name} of koreanize-matplotlib: {INSTALL}")
        entry = FontEntry(str(files[0]), name=FAMILY, weight=weight, stretch="normal", size="scalable")
        with _REGISTERING:
            if entry not in fontManager.ttflist:
                fontManager.ttflist.append(entry)


def _font(size: float, bold: bool = False) -> FontProperties:
    """NanumGothic, and DejaVu Sans (part of matplotlib) for the signs it lacks, such as ▁ and Ġ of tokenizers."""
    from matplotlib.font_manager import FontProperties

    plain: dict[str, Any] = {"style": "normal", "variant": "normal", "stretch": "normal"}  # not as the program has set
    return FontProperties(family=[FAMILY, "DejaVu Sans"], weight=700 if bold else 400, size=size, **plain)


@cache
def _glyphs() -> frozenset[str]:
    """The signs that can be drawn, in both weights."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    def drawn(weight: int) -> set[str]:
        fonts = [findfont(FontProperties(family=family, weight=weight)) for family in (FAMILY, "DejaVu Sans")]
        return {chr(code) for font in fonts for code in get_font(font).get_charmap()}

    return frozenset(drawn(400) & drawn(700))


def _drawable(string: str) -> str:
    """Hangul composed, and what has no glyph (a newline, Thai) as its code, never as an empty box."""
    composed = unicodedata.normalize("NFC", string)
    drawn = (sign if sign in _glyphs() and sign.isprintable() else ascii(sign)[1:-1] for sign in composed)
    return "".join(drawn).replace("\\", "∖")  # Korean fonts draw a Won in the backslash's place


def _measure(string: str, size: float, bold: bool = False) -> float:
    """Width in inches."""
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(string, _font(size, bold), False)[0]) / 72


# --------------------------------------------------------------------------------------------------------------- layout


def _columns(heads: int) -> int:
    """A full grid, not much wider than high, where the number of heads allows one."""
    full = [columns for columns in range(1, heads + 1) if heads % columns == 0 and heads <= columns**2 <= 4 * heads]
    return full[0] if full else ceil(heads**0.5)


def _reach(count: int) -> float:
    """Inches for each of `count` panels in a row, on a page that also holds labels, title and legend."""
    return (PAGE - 5.0) / count - 0.4


def _panel_inches(shape: Shape, columns: int, rows: int, most: float) -> Pair:
    """(height, width) of a panel: square cells, except that a short side is drawn up to an inch long."""
    (nq, nk), high, wide = shape, min(most, _reach(rows)), min(most, _reach(columns))
    cell = min(CELL, high / nq, wide / nk)
    return max(cell * nq, min(CELL * nq, high, 1.0)), max(cell * nk, min(CELL * nk, wide, 1.0))


@dataclass(frozen=True)
class _Ticks:
    """The labels along one side of a panel, thinned until they fit."""

    places: list[tuple[float, str]]  # inches from the panel's start, text
    size: float  # points
    lean: bool
    depth: float  # inches away from the panel
    over: float  # inches past the panel's end


def _ticks(labels: Labels, count: int, inches: float, *, side_by_side: bool) -> _Ticks:
    """Labels of the columns stand side by side, and lean where they must; those of the rows stand in a pile."""
    cell = inches / count
    size = min(9.5, max(7.0, 44 * cell))
    names, line = labels or tuple(map(str, range(count))), size / 72
    widest = max(_measure(name, size) for name in labels or names[-1:])
    lean = side_by_side and labels is not None and widest + 0.06 > cell
    pitch = 1.35 * line if lean else widest + 0.06 if side_by_side else 1.15 * line
    if labels is None and cell < pitch:
        pitch = 0.45  # numbers are read as a ruler
    step = 1 if cell >= pitch else min(s for e in range(7) for m in (1, 2, 5) if (s := m * 10**e) * cell >= pitch)
    places = [((i + 0.5) * cell, names[i]) for i in range(0, count, step)]
    slanted = 0.71 * (widest + line)
    depth = slanted if lean else line if side_by_side else widest
    return _Ticks(places, size, lean, depth, max(0.0, places[-1][0] + (slanted if lean else widest / 2) - inches))


class _Sheet:
    """A figure addressed in inches from its upper left corner."""

    def __init__(self, width: float, height: float, theme: _Theme) -> None:
        from matplotlib.figure import Figure

        self.width, self.height, self.theme = width, height, theme
        self.figure = Figure((width, height), DPI, facecolor=theme.paper, edgecolor=theme.paper)
        self.figure.set_layout_engine("none")

    def letters(self, size: float, colour: str, bold: bool = False) -> dict[str, Any]:
        """How text is drawn: a label is never read as mathematics, whatever dollar signs it holds."""
        return {"fontproperties": _font(size, bold), "color": colour, "parse_math": False, "usetex": False}

    def write(self, x: float, y: float, string: str, size: float, *, bold: bool = False, muted: bool = False) -> Text:
        """Draw text that begins at x with its baseline at y."""
        letters = self.letters(size, self.theme.muted if muted else self.theme.ink, bold)
        return self.figure.text(x / self.width, 1 - y / self.height, string, ha="left", va="baseline", **letters)

    def cells(self, x: float, y: float, inches: Pair, cells: Array, reach: Pair, gap: float) -> Axes:
        """Draw (R, C, 3) colours in a frame that shows the first `reach` rows and columns."""
        from matplotlib.patches import Rectangle

        height, width = inches[0] / self.height, inches[1] / self.width
        axes = self.figure.add_axes((x / self.width, 1 - y / self.height - height, width, height))
        axes.set_axis_off()
        rows, cols = cells.shape[:2]
        if rows * cols <= 4096:  # outlines, sharp at any size; with more of them an SVG grows to megabytes
            axes.pcolormesh(cells, edgecolors=self.theme.paper if gap else "face", linewidth=gap or 0.2, shading="flat")
        else:
            axes.imshow(cells, extent=(0, cols, rows, 0), aspect="auto", interpolation="nearest", origin="upper")
        axes.set(xlim=(0, reach[1]), ylim=(reach[0], 0))
        frame = Rectangle((0, 0), reach[1], reach[0], fill=False, edgecolor=self.theme.line, lw=0.8, clip_on=False)
        axes.add_patch(frame)
        return axes

    def panel(self, x: float, y: float, panel: _Panel, size: float) -> None:
        """Draw a map and the numbers in its cells, these in a size given in points."""
        shape, inches = panel.cells.shape[:2], panel.inches
        reach = (panel.shape[0] / panel.tile[0], panel.shape[1] / panel.tile[1])
        gap = min(1.2, 2.9 * min(inches[0] / shape[0], inches[1] / shape[1]))  # points: 4% of a cell
        axes = self.cells(x, y, inches, panel.cells, reach, gap)
        for (r, c), sign in np.ndenumerate(panel.signs) if panel.signs is not None else ():
            colour = self.theme.muted if sign in HIDDEN_SIGNS else _readable_on(panel.cells[r, c])
            axes.text(c + 0.5, r + 0.5, sign, ha="center", va="center", **self.letters(size, colour))

    def key(self, x: float, y: float, key: Key) -> None:
        """Draw an entry of the legend with its baseline at y."""
        for part in key:
            if isinstance(part, str):
                self.write(x, y, part, CAPTION, muted=True)
            else:  # (K, 3)
                self.cells(x, y - 0.11, (0.13, _part_width(part)), part[None], (1, len(part)), 0.0)
            x += _part_width(part) + 0.07

    def labels(self, x: float, y: float, ticks: _Ticks, *, side_by_side: bool) -> None:
        """Draw labels above (x, y) and to the right of it, or to its left and downwards."""
        for place, label in ticks.places:
            at = (x + place, y - 0.06) if side_by_side else (x - 0.08, y + place)
            text = self.write(*at, label, ticks.size)
            if ticks.lean:
                text.set(rotation=45, rotation_mode="anchor", va="bottom")
            else:
                text.set(ha="center") if side_by_side else text.set(ha="right", va="center")


def _part_width(part: str | Array) -> float:
    return _measure(part, CAPTION) if isinstance(part, str) else 0.14 if len(part) == 1 else 1.1


def _key_width(key: Key) -> float:
    return sum(_part_width(part) + 0.07 for part in key) + 0.2


def _flow(keys: list[Key], room: float) -> list[list[tuple[float, Key]]]:
    """Entries of the legend in lines no wider than `room`, each with its distance from the left."""
    lines: list[list[tuple[float, Key]]] = [[]]
    x = 0.0
    for key in keys:
        if lines[-1] and x + _key_width(key) > room:
            lines.append([])
            x = 0.0
        lines[-1].append((x, key))
        x += _key_width(key)
    return lines


def _wrapped(title: str, room: float) -> list[str]:
    """The title in at most four lines no wider than `room`."""
    likely = ceil(len(title) * room / max(_measure(title, TITLE, bold=True), room))
    for columns in range(min(len(title), likely + 20), 7, -1):
        lines = textwrap.wrap(title, columns, max_lines=4, placeholder=" …")
        if all(_measure(line, TITLE, bold=True) <= room for line in lines):
            return lines
    return [title] if title else []


def _across(panels: list[_Panel], tops: list[_Ticks], start: float) -> tuple[list[float], float]:
    """Where the panels of a row begin, and where the last one ends with all its words."""
    xs, x = [], start
    for n, (panel, top) in enumerate(zip(panels, tops, strict=True)):
        xs.append(x)
        runs_on = n + 1 < len(tops) and tops[n + 1].lean  # leaning labels pass above the next ones, which lean too
        words = max(_measure(panel.heading, HEADING, bold=True), _measure(panel.formula, CAPTION))
        x += max(panel.inches[1] + (0.0 if runs_on else top.over), words) + GAP
    return xs, x - GAP


def _compose(panels: list[_Panel], columns: int, title: str, keys: list[Key], theme: _Theme) -> Figure:
    """Panels in a grid, row by row: labels to the left of the first column and above the first row."""
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    high = panels[0].inches[0]
    side = _ticks(panels[0].rows, panels[0].shape[0], high, side_by_side=False)
    tops = [_ticks(panel.cols, panel.shape[1], panel.inches[1], side_by_side=True) for panel in grid[0]]
    xs, end = _across(grid[0], tops, MARGIN + max(side.depth, _measure(FROM, CAPTION)) + 0.1)
    title = _drawable(title)
    room = max(end - MARGIN, min(6.0, max(_measure(title, TITLE, bold=True), sum(map(_key_width, keys)))))
    lines, legend = _wrapped(title, room), _flow(keys, room)
    words = 0.22 * bool(panels[0].heading) + 0.17 * bool(panels[0].formula)
    depth = max(0.32, *(top.depth for top in tops))  # at least the two captions in the corner
    ys = [MARGIN + 0.28 * len(lines) + words + 0.1 + depth]
    ys += [ys[0] + row * (high + words + GAP) for row in range(1, len(grid))]
    foot = ys[-1] + high + 0.4
    printed = [(set(panel.signs.flat), panel.signs.shape, panel.inches) for panel in panels if panel.signs is not None]
    size = min((_sign_size(*signs) for signs in printed), default=0.0)  # one for all panels
    sheet = _Sheet(room + 2 * MARGIN, foot + 0.24 * (len(legend) - 1) + MARGIN, theme)

    for n, line in enumerate(lines):
        sheet.write(MARGIN, MARGIN + 0.14 + 0.25 * n, line, TITLE, bold=True)
    for line, y in ((AT, ys[0] - 0.27), (FROM, ys[0] - 0.11)):
        sheet.write(xs[0] - 0.08, y, line, CAPTION, muted=True).set(ha="right")
    for y, row in zip(ys, grid, strict=True):
        sheet.labels(xs[0], y, side, side_by_side=False)
        top = y - 0.08 - (0.04 + depth if row is grid[0] else 0.0)
        for x, panel in zip(xs, row, strict=False):
            sheet.write(x, top - 0.17 * bool(panel.formula), panel.heading, HEADING, bold=True)
            sheet.write(x, top, panel.formula, CAPTION, muted=True)
            sheet.panel(x, y, panel, size)
    for x, panel, ticks in zip(xs, grid[0], tops, strict=True):
        sheet.labels(x, ys[0], ticks, side_by_side=True)
        sheet.write(x, ys[0] - ticks.depth - 0.14, panel.across, CAPTION, muted=True)
    for n, entries in enumerate(legend):
        for x, key in entries:
            sheet.key(MARGIN + x, foot + 0.24 * n, key)
    return sheet.figure
