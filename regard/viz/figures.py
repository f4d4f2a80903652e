"""Figures of weights, masks and steps, with matplotlib; Hangul is drawn as Hangul wherever they are opened.

    >>> import numpy as np
    >>> figure = heatmap(np.eye(3), ["나는", "cat", "sat"])
    >>> [text.get_text() for text in figure.texts][:4]
    ['looks at →', 'looks from ↓', '나는', 'cat']

Figures are built as objects, without pyplot, and no setting of matplotlib is changed (`save` sets four and puts them
back), so a figure looks the same in every program. The figures of the lens are exported here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import ceil, inf, nan
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from regard.files import atomic_file
from regard.locale import Lang
from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.op import STEP_NAMES, Steps, pick
from regard.viz.atlas import Quantity, atlas, atlas_html
from regard.viz.colors import Array, Key, Scale, Theme, legend, rgb
from regard.viz.map import Axis, map_with_marginals, overlay
from regard.viz.sheet import (
    DPI,
    Labels,
    Panel,
    cell_signs,
    clip,
    compose,
    drawable,
    font,
    grid_columns,
    panel_inches,
    read_style,
    read_tokens,
    register_fonts,
    room_for,
)
from regard.viz.text import links, text_heat, text_heat_html, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Axis",
    "Curves",
    "Quantity",
    "atlas",
    "atlas_html",
    "growth_curves",
    "heatmap",
    "links",
    "map_with_marginals",
    "mask",
    "overlay",
    "save",
    "steps",
    "text_heat",
    "text_heat_html",
]

METADATA: dict[str, dict[str, Any]] = {  # neither date nor version: the same figure is the same file
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_SAVING = Lock()


def heatmap(
    weights: Any,
    labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    *,
    title: str | None = None,
    values: bool | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """Attention weights, or scores, as a heat map: a row per query, a column per key; several heads on one scale.

    >>> import numpy as np
    >>> figure = heatmap(np.full((2, 3), 1 / 3), ["나는", "본다"], ["I", "see", "you"], title="cross-attention")
    >>> figure.texts[0].get_text()
    'cross-attention'

    Colours run from the paper, for 0, to the largest weight; NaN and infinity are red. If there
    are more weights than dots, a cell shows the largest of several, and the figure says so.

    Numbers below 0 or above 1 are scores: blue above 0, orange below, with 0 in the middle; −∞ (hidden) is bare paper.

    >>> "score" in [text.get_text() for text in heatmap(np.array([[2.0, -1.0]])).texts]
    True

    Args:
        weights: (Nq, Nk), or (H, Nq, Nk) for a grid of heads; NumPy or torch, at most 4096 positions and 144 heads.
            Scores too, before or after scaling and masking.
        labels: one per query; for the keys too, if there are as many. Default: positions are numbered.
        key_labels: one per key.
        title: above the figure.
        values: print the number in each cell; default up to 16 × 16, where it is readable.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: for weights or labels of a wrong kind.
        ValueError: for wrong sizes, or values=True where the numbers would be too small to read.
    """
    style = read_style(title, dark, lang)
    if not isinstance(weights, np.ndarray | Tensor):
        raise TypeError(f"weights must be a NumPy array or a torch tensor, got {type(weights).__name__}")
    if weights.is_complex() if isinstance(weights, Tensor) else weights.dtype.kind not in "fiub":
        raise TypeError(f"weights must be real numbers, got {weights.dtype}")
    if weights.ndim not in (2, 3) or 0 in weights.shape:
        hint = "; choose a batch row with weights[b]" if weights.ndim == 4 else ""
        raise ValueError(f"weights must be (Nq, Nk) or (H, Nq, Nk), not empty; got {tuple(weights.shape)}{hint}")
    heads, nq, nk = (1, *weights.shape)[-3:]
    _check_size("heatmap", nq, nk, 4096, "View.map pools more")
    if heads > 144:
        raise ValueError(f"heatmap draws at most 144 heads, got {heads}; draw some of them: weights[:144]")
    rows, cols = _both_labels(labels, key_labels, nq, nk)
    columns = grid_columns(heads)
    inches = panel_inches((nq, nk), columns, -(-heads // columns), 15.0 if values else 9.6)
    tile = (ceil(nq / (inches[0] * DPI)), ceil(nk / (inches[1] * DPI)))
    signed = bool(((weights < 0) | (weights > 1.01) & (weights != inf)).any())  # bfloat16 may make 1.008 of a weight
    maps = []
    for h in range(heads):  # the largest number of each tile: a lone peak must not vanish between two dots
        head = pick(weights[h] if weights.ndim == 3 else weights, 0, 0).astype(float)
        padded = np.pad(head, ((0, -nq % tile[0]), (0, -nk % tile[1])), constant_values=-inf)
        maps.append(padded.reshape(-1, tile[0], padded.shape[1] // tile[1], tile[1]).max((1, 3)))
    theme = style.theme
    scale = Scale(style.say("weight"), theme.heat, 0.0, max(map(_largest, maps)), hidden=0.0)
    if signed:
        most = max(_largest(abs(cells)) for cells in maps)
        scale = Scale(style.say("score"), theme.signed, -most, most, hidden=-inf)
    panels = []
    for h, cells in enumerate(maps):
        signs = cell_signs(cells, scale, inches, values)
        name = style.say("head {head}", head=h) if weights.ndim == 3 else ""
        panels.append(Panel(scale.paint(cells, theme), (nq, nk), inches, rows, cols, tile, signs, name))
    keys = legend([scale], maps, style)
    if max(tile) > 1:
        note = f"a cell shows the largest of {{rows}} × {{columns}} {'scores' if signed else 'weights'}"
        keys.append((style.say(note, rows=tile[0], columns=tile[1]),))
    return compose(panels, columns, keys, style)


def mask(
    mask: Mask,
    size: int | tuple[int, int],
    *,
    labels: Sequence[str] | None = None,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """A mask, cell by cell; beyond 96 positions tile by tile (full, partial, empty).

    >>> from regard.masks import causal
    >>> mask(causal(), 4).texts[0].get_text()
    'causal()'

    A tile of a combination (`&`, `|`) may be called partial where every single cell would settle it.

    Args:
        mask: a value of regard.masks.
        size: number of queries and of keys; one number for both.
        labels: one per query; for the keys too, if there are as many.
        batch: which batch row to draw, if they differ.
        head: which head to draw, if they differ.
        title: default the mask as it prints.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        TypeError: if it is not a mask.
        ValueError: for sizes or labels that do not fit.
        IndexError: for a batch row or head out of range.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a regard.masks value, got {type(mask).__name__}; for booleans use masks.dense")
    style = read_style(repr(mask) if title is None else title, dark, lang)
    nq, nk = size if isinstance(size, tuple) else (size, size)
    _check_size("mask", nq, nk, 2**20, "draw fewer")
    rows, cols = _both_labels(labels, None, nq, nk)
    if max(nq, nk) <= 96:
        tile, names = 1, {FULL: style.say("may look"), EMPTY: style.say("hidden")}
        kinds = mask.dense(nq, nk).reshape(*mask.leading, nq, nk) * FULL
    else:
        tile = 1 << (ceil(max(nq, nk) / 64) - 1).bit_length()  # at most 64 tiles across
        names = {
            FULL: style.say("full: all may look"),
            PARTIAL: style.say("partial"),
            EMPTY: style.say("empty: hidden"),
        }
        kinds = mask.tiles(nq, nk, tile)
    colours = {EMPTY: style.theme.paper, PARTIAL: style.theme.weight[2], FULL: style.theme.weight[6]}
    cells = rgb(*(colours[kind] for kind in (EMPTY, PARTIAL, FULL)))[pick(kinds, batch, head).astype(int)]
    panel = Panel(cells, (nq, nk), panel_inches((nq, nk), 1, 1, 6.4), rows, cols, (tile, tile))
    keys: list[Key] = [(rgb(colours[kind]), name) for kind, name in names.items()]
    keys += [(style.say("a tile is {tile} × {tile} positions", tile=tile),)] if tile > 1 else []
    return compose([panel], 1, keys, style)


def steps(
    steps: Steps,
    *,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """The stages of one head side by side, from scores to output; a cap, bias or mask only where it changed something.

    >>> import numpy as np
    >>> from regard.op import steps as keep
    >>> figure = steps(keep(np.eye(2), np.eye(2), np.eye(2), labels=["나는", "cat"]))
    >>> [text.get_text() for text in figure.texts if text.get_text() in ("scores", "scaled", "masked", "weights")]
    ['scores', 'scaled', 'weights']

    All stages before the softmax share one scale, so that scaling shows as fading. A hidden score is bare paper.

    Args:
        steps: from regard.steps; at most 256 queries, keys and features.
        batch: which batch row to draw.
        head: which head to draw.
        title: above the figure.
        dark: for dark paper.
        lang: of the figure's own words, "en" or "ko".

    Raises:
        ValueError: for more positions than can be seen.
        IndexError: for a batch row or head out of range.
    """
    style = read_style(title, dark, lang)
    theme = style.theme
    (nq, nk), features = steps.scores.shape[-2:], steps.output.shape[-1]
    _check_size("steps", max(nq, features), nk, 256, "draw the weights alone with heatmap")
    stage = {name: pick(getattr(steps, name), batch, head).astype(float) for name in STEP_NAMES}  # (Nq, Nk), (Nq, Dv)
    rows, cols = _both_labels(steps.labels, steps.key_labels, nq, nk)
    scored = ["scores", "scaled"]  # and the stages that changed something
    for earlier, name in (("scaled", "capped"), ("capped", "biased"), ("biased", "masked")):
        if not np.array_equal(stage[earlier], stage[name], equal_nan=True):
            scored.append(name)
    score, output = max(_largest(abs(stage[name])) for name in scored), _largest(abs(stage["output"]))
    scales = dict.fromkeys(scored, Scale(style.say("score"), theme.signed, -score, score, hidden=-inf)) | {
        "weights": Scale(style.say("weight"), theme.heat, 0.0, _largest(stage["weights"]), hidden=0.0),
        "output": Scale(style.say("output"), theme.signed, -output, output, hidden=nan),
    }
    inches = panel_inches((nq, nk), len(scales), 1, 9.6)
    panels, before = [], ""
    for name, scale in scales.items():
        size, names, across = inches, cols, ""
        if name == "output":
            size, names = (inches[0], min(features * inches[1] / nk, room_for(len(scales)))), None
            across = style.say("feature →")
        # The formula speaks of the stage drawn before, also where one that was given, and not drawn, changed nothing.
        formula = (
            steps.formulas[name].replace(STEP_NAMES[STEP_NAMES.index(name) - 1], before)
            if before
            else steps.formulas[name]
        )
        called = name if lang == "en" else f"{style.say(name)} {name}"
        words = (called, clip(drawable(formula), 36), across)
        signs = cell_signs(stage[name], scale, size, None)
        shape = (nq, stage[name].shape[1])
        panels.append(Panel(scale.paint(stage[name], theme), shape, size, rows, names, (1, 1), signs, *words))
        before = name
    keys = legend(list(dict.fromkeys(scales.values())), [stage[name] for name in scales], style)
    return compose(panels, len(panels), keys, style)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix; the file is whole or absent, and the same bytes every time.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(heatmap(np.eye(2)), f"{folder}/eye.svg").name
    'eye.svg'

    Letters become outlines in SVG and are embedded in PDF, so both show Hangul where no Korean font is installed.

    Args:
        figure: any matplotlib figure.
        path: ends in .png, .svg or .pdf; its folder must exist.

    Returns:
        The path.

    Raises:
        TypeError: if it is not a figure.
        ValueError: for another suffix.
        FileNotFoundError: if the folder does not exist.
        OSError: if the file cannot be written; an existing file is then untouched.
    """
    register_fonts()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path = Path(path)
    kind = path.suffix[1:].lower()
    if not isinstance(figure, Figure):
        raise TypeError(f"save takes a matplotlib figure, got {type(figure).__name__}")
    if kind not in METADATA:
        raise ValueError(f"cannot write {path.name!r}: the name must end in .{', .'.join(METADATA)}")
    # These settings exist only as globals of matplotlib; the lock keeps two saves from restoring each other's.
    settings: dict[Any, Any] = {
        "svg.fonttype": "path",
        "svg.hashsalt": "regard",
        "savefig.bbox": None,
        "pdf.use14corefonts": False,
    }
    paper = figure.get_facecolor()
    drawn = BytesIO()
    with _SAVING, rc_context(settings):
        figure.savefig(drawn, format=kind, dpi="figure", facecolor=paper, metadata=METADATA[kind])
    with atomic_file(path, "the figure") as file:
        file.write(drawn.getbuffer())
    return path


# ------------------------------------------------------------------------------------------------- reading what comes


def _check_size(name: str, nq: int, nk: int, most: int, advice: str) -> None:
    if min(nq, nk) < 1:
        raise ValueError(f"{name} needs at least one query and one key, got {nq} × {nk}")
    if max(nq, nk) > most:
        raise ValueError(f"{name} draws at most {most} positions, got {nq} × {nk}; {advice}")


def _largest(values: Array) -> float:
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def _both_labels(labels: Any, key_labels: Any, nq: int, nk: int) -> tuple[Labels, Labels]:
    def read(name: str, labels: Any, count: int, what: str) -> Labels:
        if labels is None:
            return None
        return tuple(clip(drawable(visible(label)), 24) for label in read_tokens(name, labels, count, what))

    rows = read("labels", labels, nq, "queries")
    return rows, rows if key_labels is None and nq == nk else read("key_labels", key_labels, nk, "keys")


# --------------------------------------------------------------------------------------------------------------- curves


SIGNS = ("o", "s", "^", "D")  # so that lines are told apart without colours, too


class Curves(NamedTuple):
    """One panel: its title, the unit along its side, and name → a value for each length, None where there is none."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[float | None]]


def growth_curves(
    lengths: Sequence[int], panels: Sequence[Curves], *, title: str = "", xlabel: str = "n", dark: bool = False
) -> Figure:
    """Costs by sequence length, both axes logarithmic: a panel for each quantity; each line ends in its name.

    >>> figure = growth_curves([1, 2, 4], [Curves("time", "s", {"full": [1.0, 4.0, None], "kernel": [1.0, 2.0, 4.0]})])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['full', 'kernel']

    Args:
        lengths: along the x axis.
        panels: at least one, with at most four lines each.
        title: above the figure.
        xlabel: what the lengths are.
        dark: for dark paper.

    Raises:
        ValueError: for no length, no panel, too many lines, or a line of another length.
    """
    if not lengths or not panels:
        raise ValueError(f"curves need lengths and panels, got {len(lengths)} and {len(panels)}")
    for panel in panels:
        if len(panel.lines) > len(SIGNS):
            raise ValueError(f"a panel has at most {len(SIGNS)} lines, got {len(panel.lines)}")
        for name, values in panel.lines.items():
            if len(values) != len(lengths):
                raise ValueError(f"line {name!r} has {len(values)} values, but there are {len(lengths)} lengths")
    theme = read_style(title, dark, "en").theme
    from matplotlib.figure import Figure

    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    figure = Figure(figsize=(4.6 * columns, 3.7 * rows), dpi=150, facecolor=theme.paper, layout="constrained")
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        _draw_curves(axes, lengths, panel, theme)
        axes.set_xlabel(xlabel, fontproperties=font(9), color=theme.muted)
    if title:
        figure.suptitle(title, fontproperties=font(11, bold=True), color=theme.ink)
    return figure


def _draw_curves(axes: Axes, lengths: Sequence[int], panel: Curves, theme: Theme) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator

    axes.set_facecolor(theme.paper)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    colours = (theme.ink, theme.weight[4], theme.signed[1], theme.weight[6])
    ends = []
    for (name, values), sign, colour in zip(panel.lines.items(), SIGNS, colours, strict=False):
        points = [(n, value) for n, value in zip(lengths, values, strict=True) if value]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), marker=sign, markersize=4, linewidth=1.6, color=colour)
        ends.append((points[-1], name, colour))
    # Names at the end of the axis that would stand on each other move apart, by a fifteenth of the height. A line that
    # ends before is mostly the highest one: its name stands to the left of its end, where nothing else is.
    low, high = axes.get_ylim()
    wider = max(1.0, 10 * low / high) ** 0.5  # at least a power of ten: what hardly grows must look so
    low, high = low / wider, high * wider
    axes.set_ylim(low, high)
    room = (high / low) ** 0.065
    heights = {name: value for (n, value), name, _ in sorted(ends) if n == lengths[-1]}
    floor, ceiling = low, high
    for name, height in heights.items():  # upwards
        heights[name] = max(height, floor)
        floor = heights[name] * room
    for name, height in reversed(heights.items()):  # and down from the upper edge
        heights[name] = min(height, ceiling)
        ceiling = heights[name] / room
    for (n, value), name, colour in sorted(ends):
        before = lengths[len(lengths) // 2] < n < lengths[-1]
        axes.annotate(
            name,
            (n, heights.get(name, value)),
            xytext=(-12, 3) if before else (7, 0),
            textcoords="offset points",
            ha="right" if before else "left",
            va="center",
            color=colour,
            fontproperties=font(9, bold=True),
            annotation_clip=False,
        )
    axes.set_title(panel.title, fontproperties=font(10), color=theme.ink, loc="left", pad=14)
    axes.set_xticks(list(lengths), [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(EngFormatter(panel.unit))  # 10 ms, 1 GFLOP: powers of ten lack a sign in our font
    axes.grid(True, color=theme.line, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.muted, length=0)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font(8))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.line)
