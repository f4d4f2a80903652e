"""Views and captures for people: figures, notebook output, a table of a run, and the numbers of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from io import BytesIO
from math import isnan, nan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard import tables
from regard.checks import index_among
from regard.lens.doctor import SAID, format_calls
from regard.lens.measures.measures import MAP_SIZE
from regard.lens.patterns import CALLED, Patterns, label, label_rest
from regard.locale import Lang, check_lang, translate
from regard.masks.tiles import cell_edges
from regard.viz import figures
from regard.viz.text import readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.lens.capture import Capture
    from regard.lens.view import View

MOST_HEADS = 16  # side by side in one figure
MOST_EDITS = 4  # lines of edits, and of effects
SCORED = 1 << 21  # weights of a run up to which a summary scores patterns that were not measured


# -------------------------------------------------------------------------------------------------------------- figures


def view_figure(
    view: View,
    *,
    batch: int = 0,
    head: int | None = None,
    tokens: Sequence[str] | None = None,
    subject: str | None = None,
    query: int | None = None,
    dark: bool = False,
    lang: Lang = "en",
) -> Figure:
    """The first 16 heads' maps side by side on one scale, or one head's map with margins; see `View.show`.

    Tokens are drawn as labels where the map's cells are single tokens.

    subject: what the view is of, for the title; default its model and layer, if it is of a capture.
    query: the query whose row is marked in one head's map.
    """
    check_lang(lang)
    view = view.in_torch()
    rows, heads, nq, nk = view.sizes
    index_among("batch", batch, rows, "batch rows")
    index_among("head", head or 0, heads, "heads")
    cells = view.map(view.size if "map" in view.held else MAP_SIZE)[batch].detach().cpu()  # (H, rows, columns)
    exact = max(nq, nk) <= max(cells.shape[1:])
    labels = list(tokens) if tokens is not None and exact and nq == nk == len(tokens) else None
    if head is None:
        title = translate("{nq} queries × {nk} keys, exact", lang, nq=nq, nk=nk)
        if not exact:
            sizes = {"nq": nq, "nk": nk, "rows": cells.shape[1], "columns": cells.shape[2]}
            title = translate("{nq} queries × {nk} keys, pooled, {rows} × {columns} cells", lang, **sizes)
        if heads > MOST_HEADS:
            title += translate(", the first {shown} of {heads} heads", lang, shown=MOST_HEADS, heads=heads)
        subject = subject or view.placed.name(lang)
        title = f"{subject} ({title})" if subject else title
        words = None if labels is None else [piece.text for piece in readable(labels)]
        return figures.heatmap(cells[:MOST_HEADS], words, title=title, dark=dark, lang=lang)
    marginals: dict[str, Tensor | None] = {"received": None, "entropy": None}
    for name, n in (("received", nk), ("entropy", nq)):  # drawn if held for every position or every cell of the map
        values = view.held.get(name)
        if values is not None and values.shape[-1] in (n, min(view.size, n)):
            marginals[name] = values[batch, head].detach().cpu()
    queries = figures.Axis(positions=nq, tokens=labels, marginal=marginals["entropy"], marked=query)
    keys = figures.Axis(positions=nk, tokens=labels, marginal=marginals["received"])
    title = subject or view.placed.name(lang, head)
    return figures.map_with_marginals(cells[head], queries, keys, title=title, dark=dark, lang=lang)


def view_png(view: View) -> bytes | None:
    """The figure of a view for a notebook; None (its text is shown) without matplotlib or a map."""
    if find_spec("matplotlib") is None or "map" not in view.held or 0 in view.sizes:
        return None
    return png(view_figure(view))


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def atlas_figure(
    capture: Capture,
    measure: str = "entropy",
    dark: bool = False,
    *,
    batch: int | None = None,
    subject: str | None = None,
    lang: Lang = "en",
) -> Figure:
    """All heads of a run, layers × heads, coloured by a measure as `Capture.atlas` gives it; NaN is red."""
    table, heads = _atlas_table(capture, measure, batch)
    names = capture.row_names
    title = subject or capture.model
    return figures.atlas(table, layers=names, heads=heads, measure=measure, title=title, dark=dark, lang=lang)


def _atlas_table(capture: Capture, measure: str, batch: int | None = None) -> tuple[Tensor, list[int]]:
    rows = capture.atlas_rows(measure, batch)
    heads = [0 if row is None else len(row) for row in rows]
    return stack_rows(rows, max(heads)), heads


def capture_html(capture: Capture) -> str:
    """The atlas of a capture for a notebook, without matplotlib, and what was not seen."""
    parts = [f"<pre>{escape(repr(capture))}</pre>"]
    if not capture.names:
        return parts[0]
    if any("entropy" in record.view.held for record in capture.records if record.view is not None):
        table, heads = _atlas_table(capture, "entropy")
        parts.append(figures.atlas_html(table, layers=capture.row_names, heads=heads, measure="entropy"))
    if notes := _notes(capture, "en"):
        parts.append(f"<pre>{escape(chr(10).join(notes))}</pre>")
    return "\n".join(parts)


def stack_rows(rows: Sequence[Tensor | None], heads: int) -> Tensor:
    """Rows of at most `heads` numbers as one tensor (rows, heads), NaN where there is none."""
    table = torch.full((len(rows), heads), nan)
    for line, row in zip(table, rows, strict=True):
        if row is not None:
            line[: len(row)] = row
    return table


# -------------------------------------------------------------------------------------------------------------- summary


def summarise(capture: Capture, lang: Lang = "en") -> str:
    """A table of a capture that is not empty, a line per run of a module, and notes on what was not seen."""
    check_lang(lang)
    title = translate(
        "{model}: {modules} attention modules, {calls} calls",
        lang,
        model=capture.model or "model",
        modules=len(capture.names),
        calls=len(capture.records),
    )
    headers = translate("|module|kind|heads|queries × keys|calls|entropy|patterns|seen by", lang).split("|")
    rows = []
    for i, run in enumerate(capture.runs()):
        first, view = run.records[0], run.view
        _, heads, nq, nk = view.sizes
        entropy = "–"
        if "entropy" in view.held:
            entropy = f"{float(view.per_head('entropy').mean()):.2f}".replace("nan", "NaN")
        source = first.source + (" (compiled)" if first.compiled else "")
        kind, calls = SAID[lang].get(first.kind, first.kind), len(run.records)
        name = run.name if run.path else f"(model){run.name}"
        common = _common_patterns(view, lang)
        rows.append([str(i), name, kind, str(heads), f"{nq} × {nk}", str(calls), entropy, common, source])
    lines = [title, "", tables.text(headers, rows, right=[0, 3, 5, 6]), "", *_notes(capture, lang)]
    links = [record.link for record in capture.records if record.link is not None]
    if any(link.rows is not None for link in links) and all(link.returned is None for link in links):
        lines.append(
            translate(
                "batch rows changed places, as in beam search: each is a beam of the last step; "
                "capture.returned(output) shows the sequences that were returned",
                lang,
            )
        )
    return "\n".join(lines).rstrip()


def _notes(capture: Capture, lang: Lang) -> list[str]:
    edited, unseen = translate("edited after softmax", lang), translate("not seen", lang)
    whole = "(the model itself)"
    notes = _edit_lines(capture, lang)
    notes += [f"{edited}: {path or whole}: {format_calls(calls, lang)}" for path, calls in capture.edited.items()]
    return notes + [f"{unseen}: {path or whole}: {why}" for path, why in capture.unseen.items()]


def _edit_lines(capture: Capture, lang: Lang) -> list[str]:
    """The edits that were active and the effects that were measured, a line each; at most 4 of both."""
    edits, calls = [], len(capture.records)
    effects = [
        translate("effect of {effect}", lang, effect=effect.text(lang).replace("\n  ", ": "))
        for effect in capture.effects
    ]
    for edit in capture.edits:
        part = translate(" (in {part} of {calls} calls)", lang, part=edit.calls, calls=calls)
        edits.append(translate("edited by {edit}", lang, edit=repr(edit)) + ("" if edit.calls == calls else part))
    for lines in (edits, effects):
        if len(lines) > MOST_EDITS:
            lines[MOST_EDITS:] = [translate("… and {more} more", lang, more=len(lines) - MOST_EDITS)]
    return edits + effects


def _common_patterns(view: View, lang: Lang) -> str:
    """The patterns of the first batch row's heads with their number of heads, the most common first."""
    measured = any(name.startswith("pattern ") for name in view.held)
    if not measured and (view.weights is None or prod(view.sizes) > SCORED):
        return "–"
    shares = view.head_patterns().shares
    if not shares:
        return "–"
    broken = torch.stack([values[0] for values in shares.values()]).isnan().any(0)  # (H,)
    names = [names[0] for names, is_nan in zip(label(shares)[0], broken, strict=True) if names and not is_nan]
    counts = sorted(((names.count(n), n) for n in set(names)), reverse=True)
    parts = [f"{count} {CALLED[lang][name]}" for count, name in counts[:3]]
    if broken.any():
        parts.append(f"{int(broken.sum())} NaN")
    return ", ".join(parts) or SAID[lang].get("none", "none")


# ------------------------------------------------------------------------------------------------------ heads and links


@dataclass(frozen=True)
class HeadSummary:
    """Numbers of one head of one batch row; None where something was not measured and q and k were not kept."""

    batch: int
    head: int
    entropy: float | None  # mean over its queries of −Σ p ln p, in nats
    effective: float | None  # mean over its queries of 1/Σp², the effective number of keys
    keys: tuple[int, int] | None  # the key that receives most, or the first and last of a bin of pooled keys
    share: float | None  # mean weight that a query gives to such a key; None, as keys, if a key receives NaN
    patterns: dict[str, float]  # the score of each
    labels: tuple[str, ...]  # the patterns that get half of its attention or more, the strongest first
    rest: str | None  # if that is the first token, the pattern that gets half or more of what goes elsewhere


class Linked(NamedTuple):
    """A link of one head: the weight that a query gives to a key."""

    head: int
    query: int
    key: int
    weight: float


def describe_heads(view: View, batch: int = 0) -> list[HeadSummary]:
    """Summaries of the heads of a batch row. Raises IndexError if there is no such row."""
    view = view.in_torch()
    count, heads, nq, nk = view.sizes
    if not 0 <= batch < count:
        raise IndexError(f"batch {batch} is out of range: there are {count}, counted from 0")

    def known(name: str) -> bool:
        return name in view.held or f"mean {name}" in view.held or view.weights is not None

    nothing: list[Any] = [None] * heads
    entropy, effective = (
        view.per_head(name)[batch].tolist() if known(name) else nothing for name in ("entropy", "effective")
    )
    measured = any(name.startswith("pattern ") for name in view.held)
    patterns = view.head_patterns() if measured or view.weights is not None else Patterns({}, {}, {})
    scores, shares, beside = ({name: t[batch : batch + 1] for name, t in part.items()} for part in patterns)
    labels = label(shares)[0] if shares else [[]] * heads
    rest = label_rest(shares, beside)[0] if shares else nothing
    keys, share = list(nothing), list(nothing)
    if known("received") and nq and nk:
        received = view.received[batch]  # (H, keys), or (H, bins) of means where they are pooled
        edges = cell_edges(nk, received.shape[-1])
        best, at = (x.tolist() for x in received.max(-1))
        for h in range(heads):
            if not isnan(best[h]):
                keys[h], share[h] = (edges[at[h]], edges[at[h] + 1] - 1), best[h] / nq
    return [
        HeadSummary(
            batch=batch,
            head=h,
            entropy=entropy[h],
            effective=effective[h],
            keys=keys[h],
            share=share[h],
            patterns={name: float(values[0, h]) for name, values in scores.items()},
            labels=tuple(labels[h]),
            rest=rest[h],
        )
        for h in range(heads)
    ]


def strongest_links(view: View, *, batch: int = 0, head: int | None = None, count: int = 8) -> list[Linked]:
    """The strongest links of a batch row, strongest first. Queries that see a single key are left out.

    Raises LookupError if fewer links were measured and q and k were not kept, IndexError for another row or head.
    """
    view = view.in_torch()
    rows, heads, nq, _ = view.sizes
    for name, index, size in (("batch", batch, rows), ("head", head or 0, heads)):
        if not 0 <= index < size:
            raise IndexError(f"{name} {index} is out of range: there are {size}, counted from 0")
    top = view.top(count)
    weight, key = top.weight[batch].nan_to_num(0.0), top.index[batch]  # (H, Nq, k)
    visible = view.place.visible
    if visible is not None:
        weight[(visible.expand(rows, heads, nq)[batch] == 1).to(weight.device)] = 0
    chosen = range(heads) if head is None else [head]
    best, at = weight[list(chosen)].reshape(-1).sort(descending=True, stable=True)
    links = []
    for value, place in zip(best[:count].tolist(), at[:count].tolist(), strict=True):
        h, rest = divmod(place, nq * weight.shape[-1])
        i, k = divmod(rest, weight.shape[-1])
        links += [Linked(chosen[h], i, int(key[chosen[h], i, k]), value)] if value > 0 else []
    return links
