"""Views and captures as pictures: which figure shows which of them. What a notebook draws for them by itself.

It does not know how figures are drawn: `regard.figures` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.lens.doctor.findings import format_calls
from regard.lens.head_values import table_of
from regard.lens.measures.measures import MAP_SIZE
from regard.lens.view import View
from regard.viz import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.capture import Capture

__all__ = ["atlas_of", "html_of", "picture_of", "png_of"]

MOST_HEADS = 16  # side by side in one picture


def view_figure(
    view: View, *, batch: int = 0, head: int | None = None, tokens: Sequence[str] | None = None, dark: bool = False
) -> Figure:
    """One head's map with what each key receives and each query's entropy; or the maps of all heads side by side.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2, 5, 4)
    >>> picture_of(regard.look(x, x, x), head=1).axes != []
    True

    batch, head: which ones; without a head, the first 16 are drawn on one scale.
    tokens: labels, drawn where the map's cells are single tokens.  dark: for dark paper.
    Raises IndexError for a batch row or head that is not there, LookupError where no map was measured.
    """
    b, heads, nq, nk = view.sizes
    _there("batch", batch, b)
    cells = _four(view, view.map(view.size if "map" in view.held else MAP_SIZE))[batch]  # (H, rows, columns)
    exact = max(nq, nk) <= max(cells.shape[1:])
    if head is None:
        named = list(tokens) if tokens is not None and exact and nq == nk == len(tokens) else None
        more = f", the first {MOST_HEADS} of {heads} heads" if heads > MOST_HEADS else ""
        size = "exact" if exact else f"pooled, {cells.shape[1]} × {cells.shape[2]} cells"
        return figures.heatmap(cells[:MOST_HEADS], named, title=f"{nq} queries × {nk} keys, {size}{more}", dark=dark)
    _there("head", head, heads)
    labels = list(tokens) if tokens is not None and exact and nq == nk == len(tokens) else None
    return figures.map_with_marginals(
        cells[head],
        received=_strip(view, "received", nk, batch, head),
        entropy=_strip(view, "entropy", nq, batch, head),
        rows=nq,
        columns=nk,
        tokens=labels,
        exact=exact,
        title=f"head {head}",
        dark=dark,
    )


def _strip(view: View, name: str, n: int, batch: int, head: int) -> Tensor | None:
    """A measure of one head where the view holds it for every position or for every cell of the map."""
    held = view.held.get(name)
    fits = held is not None and held.shape[-1] in (n, min(view.size, n))
    return _four(view, getattr(view, name))[batch, head] if fits else None


def atlas_figure(capture: Capture, measure: str = "entropy", dark: bool = False, *, batch: int | None = None) -> Figure:
    """All heads of a run, layers × heads, coloured by a measure; a head whose number is NaN is red.

    measure, batch: as for `Capture.atlas`.  dark: for dark paper.
    """
    values, heads = _atlas(capture, measure, batch)
    return figures.atlas(values, layers=capture.row_names, heads=heads, measure=measure, dark=dark)


def _atlas(capture: Capture, measure: str, batch: int | None = None) -> tuple[Tensor, list[int]]:
    """The atlas (layers, heads), and how many heads each layer has in it."""
    rows = capture.atlas_rows(measure, batch)
    heads = [0 if row is None else len(row) for row in rows]
    return table_of(rows, max(heads)), heads


def capture_html(capture: Capture) -> str:
    """What a notebook shows of a capture: the atlas, without matplotlib, and what was not seen."""
    if not capture.names:
        return f"<pre>{escape(repr(capture))}</pre>"
    parts = [f"<pre>{escape(repr(capture))}</pre>"]
    if any("entropy" in record.view.held for record in capture.records if record.view is not None):
        values, heads = _atlas(capture, "entropy")
        parts.append(figures.atlas_html(values, layers=capture.row_names, heads=heads, measure="entropy"))
    of_all = "(the model itself)"
    notes = [f"edited after softmax: {p or of_all}: {format_calls(calls)}" for p, calls in capture.edited.items()]
    notes += [f"not seen: {path or of_all}: {why}" for path, why in capture.unseen.items()]
    return "\n".join([*parts, *([f"<pre>{escape(chr(10).join(notes))}</pre>"] if notes else [])])


def view_png(view: View) -> bytes | None:
    """What a notebook shows of a view; None, and so its text, where matplotlib is not installed or no map is held."""
    if find_spec("matplotlib") is None or "map" not in view.held or 0 in view.sizes:
        return None
    buffer = BytesIO()
    view_figure(view).savefig(buffer, format="png")
    return buffer.getvalue()


def _four(view: View, x: Any) -> Tensor:
    """A measure with its axes (B, H, …), whatever the caller's were."""
    batch, heads, _, _ = view.sizes
    whole = torch.as_tensor(x).detach().cpu()
    lead = 2 if view.lead is None else len(view.lead)
    return whole.reshape(batch, heads, *whole.shape[lead:])


def _there(name: str, index: int, count: int) -> None:
    if not -count <= index < count:
        raise IndexError(f"{name} {index} is out of range: there are {count}")
