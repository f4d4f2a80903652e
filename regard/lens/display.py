"""Views and captures as pictures: which figure shows which of them. What a notebook draws for them by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from io import BytesIO
from math import isnan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard import tables
from regard.lens.capture import Capture, ModuleRun
from regard.lens.doctor.report import SAID, check_lang, format_calls
from regard.lens.measures.measures import MAP_SIZE, cell_edges
from regard.lens.patterns import CALLED, Patterns, label, label_rest
from regard.lens.view import View, per_head, table_of
from regard.stages import Lang
from regard.viz import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@dataclass(frozen=True)
class HeadSummary:
    """What one head of one batch row did.

    entropy, effective: means over its queries: −Σ p ln p in nats, and 1/Σp², the effective number of keys.
    keys: the first and the last key of those that receive most: one key, or a part of the keys where they are pooled.
    share: what such a key gets of each query, on the mean.
    patterns: the score of each pattern.  labels: those that get half of its attention or more, the strongest first.
    rest: where that is the first token, the pattern that gets half or more of what goes elsewhere, or None.
    """

    batch: int
    head: int
    entropy: float | None
    effective: float | None
    keys: tuple[int, int] | None
    share: float | None
    patterns: dict[str, float]
    labels: tuple[str, ...]
    rest: str | None


class Linked(NamedTuple):
    """A link of one head: how much of a query's attention goes to a key."""

    head: int
    query: int
    key: int
    weight: float


def plain(view: View) -> View:
    """The view with torch tensors of axes (B, H, …), whatever its own are.

    >>> import numpy as np, regard
    >>> plain(regard.look(*[np.zeros((3, 5))] * 3)).entropy.shape
    torch.Size([1, 1, 3])
    """
    return replace(view, lead=None, numpy=False)


def describe_heads(view: View, batch: int = 0) -> list[HeadSummary]:
    """A line for each head of a batch row.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> one = describe_heads(regard.look(x, x, x))[1]
    >>> one.head, round(one.entropy, 2), one.keys, one.share, one.labels
    (1, 1.39, (0, 0), 0.25, ('uniform', 'neighbours'))

    Raises IndexError for a batch row that is not there.
    """
    view = plain(view)
    count, heads, nq, nk = view.sizes
    if not 0 <= batch < count:
        raise IndexError(f"batch {batch} is out of range: there are {count}, counted from 0")
    means = {name: _numbers(view, name, batch) for name in ("entropy", "effective")}
    found = _patterns(view)
    scores, shares, beside = ({name: t[batch : batch + 1] for name, t in of.items()} for of in found)
    labels = label(shares)[0] if shares else [[]] * heads
    rest = label_rest(shares, beside)[0] if shares else [None] * heads
    most = _most_received(view, batch) if _known(view, "received") and nq and nk else [None] * heads
    lines = []
    for h in range(heads):
        entropy, effective = (None if values is None else values[h] for values in means.values())
        keys, share = most[h] or (None, None)
        patterns = {name: float(values[0, h]) for name, values in scores.items()}
        lines.append(HeadSummary(batch, h, entropy, effective, keys, share, patterns, tuple(labels[h]), rest[h]))
    return lines


def _known(view: View, name: str) -> bool:
    return name in view.held or f"mean {name}" in view.held or view.weights is not None


def _numbers(view: View, name: str, batch: int) -> list[float] | None:
    if not _known(view, name):
        return None
    numbers: list[float] = per_head(view, name)[batch].tolist()
    return numbers


def _patterns(view: View) -> Patterns:
    measured = any(name.startswith("pattern ") for name in view.held)
    return view.head_patterns() if measured or view.weights is not None else Patterns({}, {}, {})


def _most_received(view: View, batch: int) -> list[tuple[tuple[int, int], float] | None]:
    """For each head the keys that receive most, and what one of them gets of a query on the mean; None for NaN."""
    _, _, nq, nk = view.sizes
    received = view.received[batch]  # (H, keys), or (H, bins) of means where they are pooled
    edges = cell_edges(nk, received.shape[-1])
    best, at = received.max(-1)
    found = zip(best.tolist(), at.tolist(), strict=True)
    return [None if isnan(r) else ((edges[c], edges[c + 1] - 1), r / nq) for r, c in found]


def strongest_links(view: View, *, batch: int = 0, head: int | None = None, count: int = 8) -> list[Linked]:
    """The strongest links of a batch row, of one head or of all of them, the strongest first.

    >>> import torch, regard
    >>> q = torch.tensor([[1.0], [3.0]]).view(1, 1, 2, 1)
    >>> strongest_links(regard.look(q, q, q, mask=regard.masks.causal()), count=1)[0][:3]      # head, query, key
    (0, 1, 1)

    A query that sees a single key has no choice, and is left out.
    Raises LookupError where fewer links were measured and q and k were not kept; IndexError for a batch row or head
    that is not there.
    """
    view = plain(view)
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
    found = []
    for value, place in zip(best[:count].tolist(), at[:count].tolist(), strict=True):
        h, rest = divmod(place, nq * weight.shape[-1])
        i, k = divmod(rest, weight.shape[-1])
        found += [Linked(chosen[h], i, int(key[chosen[h], i, k]), value)] if value > 0 else []
    return found


LITTLE = 1 << 21  # weights of a run whose patterns are scored here, where they were not measured

WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "title": "{}: {} attention modules, {} calls",
        "headers": "|module|kind|heads|queries × keys|calls|entropy|patterns|seen by",
        "unseen": "not seen",
        "edited": "edited after softmax",
        "beams": "batch rows changed places, as in beam search: each is a beam of the last step; "
        "capture.returned(output) shows the sequences that were returned",
    },
    "ko": {
        "title": "{}: 어텐션 모듈 {}개, 호출 {}번",
        "headers": "|모듈|종류|헤드|쿼리 × 키|호출|엔트로피|패턴|찾은 곳",
        "unseen": "보지 못함",
        "edited": "소프트맥스 뒤에 수정됨",
        "beams": "빔 서치처럼 배치 행이 단계 사이에 자리를 바꿨습니다. 각 행은 마지막 단계의 빔입니다. "
        "반환된 시퀀스를 보려면 capture.returned(output)을 부르세요",
    },
}


def summarise(capture: Capture, lang: Lang = "en") -> str:
    """The table of a capture that is not empty, and what was not seen.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> print(summary_of(seen).splitlines()[0])
    TransformerEncoderLayer: 1 attention modules, 1 calls

    Raises ValueError for a language that is not spoken here.
    """
    words = WORDS[check_lang(lang)]
    rows = [_line(i, run, lang) for i, run in enumerate(capture.runs())]
    lines = [words["title"].format(capture.model or "model", len(capture.names), len(capture.records)), ""]
    lines.append(tables.text(words["headers"].split("|"), rows, right=[0, 3, 5, 6]))
    notes = [
        f"{words['edited']}: {path or '(the model itself)'}: {format_calls(calls, lang)}"
        for path, calls in capture.edited.items()
    ]
    notes += [f"{words['unseen']}: {path or '(the model itself)'}: {why}" for path, why in capture.unseen.items()]
    links = [record.link for record in capture.records if record.link is not None]
    if any(link.rows is not None for link in links) and all(link.returned is None for link in links):
        notes.append(words["beams"])
    return "\n".join([*lines, "", *notes]).rstrip()


def _line(i: int, run: ModuleRun, lang: Lang) -> list[str]:
    """A line of the summary."""
    first, view = run.records[0], run.view
    _, heads, nq, nk = view.sizes
    entropy = "–"
    if "entropy" in view.held:
        entropy = f"{float(per_head(view, 'entropy').mean()):.2f}".replace("nan", "NaN")
    seen_by = first.source + (" (compiled)" if first.compiled else "")
    kind, calls = SAID[lang].get(first.kind, first.kind), len(run.records)
    name = run.name if run.path else f"(model){run.name}"
    return [str(i), name, kind, str(heads), f"{nq} × {nk}", str(calls), entropy, _commonest(view, lang), seen_by]


def _commonest(view: View, lang: Lang) -> str:
    """The pattern names of the first batch row's heads with how many bear each, the most common first."""
    measured = any(name.startswith("pattern ") for name in view.held)
    if not measured and (view.weights is None or prod(view.sizes) > LITTLE):
        return "–"
    shares = view.head_patterns().shares
    if not shares:
        return "–"
    broken = torch.stack([values[0] for values in shares.values()]).isnan().any(0)  # (H,)
    names = [names[0] for names, nan in zip(label(shares)[0], broken, strict=True) if names and not nan]
    counts = sorted(((names.count(n), n) for n in set(names)), reverse=True)
    none = SAID[lang].get("none", "none")
    said = [f"{count} {CALLED[lang][name]}" for count, name in counts[:3]]
    return ", ".join([*said, *([f"{int(broken.sum())} NaN"] if broken.any() else [])]) or none
