"""Pictures of weights, masks and steps, as matplotlib figures; Hangul is drawn as Hangul wherever they are opened.

    >>> import numpy as np
    >>> picture = heatmap(np.eye(3), ["나는", "cat", "sat"])
    >>> [text.get_text() for text in picture.texts][:4]
    ['looks at →', 'looks from ↓', '나는', 'cat']

Figures are built as objects: no pyplot, and no setting of matplotlib changed (`save` sets four and puts them back), so
a picture looks the same in every program. `colours.py` says what a colour means, `letters.py` which fonts write,
`sheet.py` where everything stands. The figures of the lens, which are files of their own, are found here too.

This file does not know how weights are computed, nor anything of models. It imports matplotlib only to make a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil, inf, nan
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from regard.atomic_files import atomic_file
from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.stages import NAMES, Steps, pick
from regard.viz.atlas import atlas, atlas_html
from regard.viz.colors import DARK, LIGHT, Array, Key, Scale, Theme, legend, rgb
from regard.viz.links import links
from regard.viz.map import map_with_marginals
from regard.viz.overlay import overlay
from regard.viz.sheet import (
    DPI,
    Labels,
    Panel,
    Shape,
    cell_signs,
    clip,
    compose,
    drawable,
    grid_columns,
    panel_inches,
    register_fonts,
    room_for,
)
from regard.viz.text_heat import text_heat, text_heat_html, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "atlas",
    "atlas_html",
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

METADATA: dict[str, dict[str, Any]] = {  # neither date nor version: the same picture is the same file
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_SAVING = Lock()


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
    title: above the picture; none unless given.  dark: for dark paper.

    Colours run from 0 to the largest weight. A weight of exactly 0 is bare paper; NaN and infinity are red. Where there
    are more weights than dots, a cell shows the largest of several, and the figure says so.

    Raises TypeError or ValueError for weights or labels of a wrong kind or size, for negative weights, and for
    values=True where the numbers would be too small to read.
    """
    register_fonts()
    heads, nq, nk = _weights_shape(weights)
    rows, cols = _both_labels(labels, key_labels, nq, nk)
    columns = grid_columns(heads)
    inches = panel_inches((nq, nk), columns, -(-heads // columns), 15.0 if values else 9.6)
    tile = (ceil(nq / (inches[0] * DPI)), ceil(nk / (inches[1] * DPI)))
    maps = [_pooled(weights[h] if weights.ndim == 3 else weights, tile) for h in range(heads)]
    theme = DARK if dark else LIGHT
    scale = Scale("weight", theme.weight, 0.0, max(map(_largest, maps)), hidden=0.0)
    panels = []
    for h, cells in enumerate(maps):
        signs = cell_signs(cells, scale, inches, values)
        name = f"head {h}" if weights.ndim == 3 else ""
        panels.append(Panel(scale.paint(cells, theme), (nq, nk), inches, rows, cols, tile, signs, name))
    keys = legend([scale], maps, theme)
    if max(tile) > 1:
        keys.append((f"a cell shows the largest of {tile[0]} × {tile[1]} weights",))
    return compose(panels, columns, title or "", keys, theme)


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
    register_fonts()
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
    cells = rgb(*(colours[kind] for kind in (EMPTY, PARTIAL, FULL)))[pick(kinds, batch, head).astype(int)]
    panel = Panel(cells, (nq, nk), panel_inches((nq, nk), 1, 1, 6.4), rows, cols, (tile, tile))
    keys: list[Key] = [(rgb(colours[kind]), name) for kind, name in names.items()]
    keys += [(f"a tile is {tile} × {tile} positions",)] if tile > 1 else []
    return compose([panel], 1, repr(mask) if title is None else title, keys, theme)


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
    register_fonts()
    (nq, nk), features = steps.scores.shape[-2:], steps.output.shape[-1]
    _check_size("steps", max(nq, features), nk, 256, "draw the weights alone with heatmap")
    stage = {name: pick(getattr(steps, name), batch, head).astype(float) for name in NAMES}  # (Nq, Nk), (Nq, Dv)
    rows, cols = _both_labels(steps.labels, steps.key_labels, nq, nk)
    theme = DARK if dark else LIGHT
    scales = _step_scales(stage, theme)
    inches = panel_inches((nq, nk), len(scales), 1, 9.6)
    panels, before = [], ""
    for name, scale in scales.items():
        size, names, across = inches, cols, ""
        if name == "output":
            size, names, across = (inches[0], min(features * inches[1] / nk, room_for(len(scales)))), None, "feature →"
        # The formula speaks of the stage drawn before, also where one that was given, and not drawn, changed nothing.
        formula = steps.formulas[name].replace(NAMES[NAMES.index(name) - 1], before) if before else steps.formulas[name]
        words = (name, clip(drawable(formula), 36), across)
        signs = cell_signs(stage[name], scale, size, None)
        shape = (nq, stage[name].shape[1])
        panels.append(Panel(scale.paint(stage[name], theme), shape, size, rows, names, (1, 1), signs, *words))
        before = name
    keys = legend(list(dict.fromkeys(scales.values())), [stage[name] for name in scales], theme)
    return compose(panels, len(panels), "", keys, theme)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix; the file is whole or absent, and the same bytes every time.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(heatmap(np.eye(2)), f"{folder}/eye.svg").name
    'eye.svg'

    figure: any matplotlib figure.  path: ends in .png, .svg or .pdf; its folder must exist.
    Letters become outlines in SVG and are embedded in PDF, so both show Hangul where no Korean font is installed.

    Raises TypeError for what is not a figure, ValueError for another suffix, FileNotFoundError for a missing folder,
    OSError for what is not a file, and where none can be written: what was there is then untouched.
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
    return tuple(clip(drawable(visible(label)), 24) for label in labels)


# -------------------------------------------------------------------------------------------------- scales of the steps


def _step_scales(stage: dict[str, Array], theme: Theme) -> dict[str, Scale]:
    """The stages to draw, in order, each with its scale."""
    drawn = ["scores", "scaled"]
    for before, name in (("scaled", "capped"), ("capped", "biased"), ("biased", "masked")):
        if not np.array_equal(stage[before], stage[name], equal_nan=True):
            drawn.append(name)
    score, output = max(_largest(abs(stage[name])) for name in drawn), _largest(abs(stage["output"]))
    return dict.fromkeys(drawn, Scale("score", theme.signed, -score, score, hidden=-inf)) | {
        "weights": Scale("weight", theme.weight, 0.0, _largest(stage["weights"]), hidden=0.0),
        "output": Scale("output", theme.signed, -output, output, hidden=nan),
    }
