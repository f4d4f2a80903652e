"""The explorer's protocol: from a session to JSON values, for server, notebook and exported page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from regard.layouts import Frame, Layout
from regard.lens.assembly import AssembledWeights
from regard.lens.files.container import pool
from regard.lens.files.media import Photo
from regard.lens.measures.measures import cell_edges
from regard.lens.measures.weights import ComputedWeights, Weights
from regard.lens.placement import Patches
from regard.lens.view import View
from regard.session.head_weights import (
    FEW_CELLS,
    Scored,
    checked_index,
    checked_span,
    exact_weights,
    find_head,
    head_of,
    pooled_tile,
    spoken,
)
from regard.session.ranking import HeadNumbers, SeenLayer, opening_of
from regard.session.sentences import WARNING, sentence
from regard.session.session import Session
from regard.session.types import (
    Array,
    Grid,
    Head,
    HeadLinks,
    Key,
    Layer,
    Link,
    Numbers,
    Overview,
    PictureAnswer,
    PictureLine,
    Row,
    Run,
    Steps,
    Tile,
    TokenLayout,
    Tokens,
    bin_edges,
    finite,
    largest_of_bins,
    packed,
    sums_of_bins,
)
from regard.stages import Lang

DIGITS = 6  # of a fraction of a side: a millionth


def pictures_of(session: Session) -> list[PictureLine]:
    """The pictures that a model looked at.

    >>> from regard.lens.capture import Capture
    >>> pictures_of(Session("toy", Capture(), ()))
    []
    """
    return [_line(frame, n, session.pictures) for n, frame in enumerate(session.frames)]


def _line(frame: Frame, number: int, pictures: Sequence[Photo]) -> PictureLine:
    shown = pictures[number] if number < len(pictures) else None
    seen = frame.boxes([0, 0, *frame.pixels]) / (frame.picture * 2)
    return {
        "height": frame.picture[0],
        "width": frame.picture[1],
        "name": None if shown is None else shown.name,
        "shown": shown is not None,
        "seen": seen.round(DIGITS).tolist(),
    }


def picture(session: Session, number: int) -> PictureAnswer:
    """The bytes of a picture to be shown. Raises LookupError where it is not there.

    >>> from regard.lens.capture import Capture
    >>> picture(Session("toy", Capture(), ()), 0)
    Traceback (most recent call last):
        ...
    LookupError: there is no picture 0 to be shown: this session has none
    """
    found = find_picture(session, number)
    return {"kind": found.kind, "base64": b64encode(found.data).decode("ascii")}


def find_picture(session: Session, number: int) -> Photo:
    """A picture by its number. Raises TypeError for what is no number, LookupError where it is not there."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number must be an integer, got {type(number).__name__}: {number!r}")
    if not 0 <= number < len(session.pictures):
        there = f"it has {len(session.pictures)}, counted from 0" if session.pictures else "this session has none"
        raise LookupError(f"there is no picture {number} to be shown: {there}")
    return session.pictures[number]


def layouts_of(session: Session) -> tuple[list[TokenLayout], list[list[int] | None]]:
    """The unlike layouts of a session, and for each layer which of them its queries and its keys have.

    >>> from regard.lens.capture import Capture
    >>> layouts_of(Session("toy", Capture(), ()))
    ([], [])
    """
    numbers: dict[Layout, int] = {}
    found: list[TokenLayout] = []
    layers: list[list[int] | None] = []
    for layer in session.layers:
        if layer.sides is None:
            layers.append(None)
            continue
        for layout in (layer.sides.queries, layer.sides.keys):
            if layout not in numbers:
                numbers[layout] = len(found)
                found.append(_layout(layout, layer.sides.frames))
        layers.append([numbers[layer.sides.queries], numbers[layer.sides.keys]])
    return found, layers


def _layout(layout: Layout, frames: Sequence[Frame]) -> TokenLayout:
    pairs = zip(layout.kind.ravel().tolist(), layout.picture.ravel().tolist(), strict=True)
    runs: list[Run] = [
        {"kind": kind, "picture": None if number < 0 else number, "count": len(list(run))}
        for (kind, number), run in groupby(pairs)
    ]
    patches = [Patches(layout, frame, number) for number, frame in enumerate(frames)]
    return {"runs": runs, "grids": [_grid(one) for one in patches if len(one.tokens)]}


def _grid(patches: Patches) -> Grid:
    """Rows and columns as they are found among the boxes; those of unlike heights at one place are unlike rows."""
    high, wide = patches.frame.picture
    boxes = (patches.boxes / (high, wide, high, wide)).round(DIGITS)  # (P, 4)
    rows, row = np.unique(boxes[:, [0, 2]], axis=0, return_inverse=True)
    columns, column = np.unique(boxes[:, [1, 3]], axis=0, return_inverse=True)
    cells = (row.ravel() * len(columns) + column.ravel()).tolist()
    return {
        "picture": patches.picture,
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "cells": None if cells == list(range(len(cells))) else cells,
    }


BINS = 1024  # of a ribbon
TOP = 12
MOST_WEIGHTS = 1 << 17  # of a row in one answer
LARGEST_TILE = 256  # cells each way

Span = tuple[int, int]


def row(session: Session, layer: int, head: int, token: int, start: int = 0, stop: int | None = None) -> Row:
    """The exact weights of one query: those of keys start up to stop, a ribbon of all keys, and the largest.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> row(Session("toy", seen, ("a", "b", "c")), 0, 1, token=2)["top"][0]
    {'key': 0, 'weight': 0.3333333432674408}

    token: the query.  stop: default the end.
    Raises IndexError for what is not there, LookupError where queries and keys were not kept, ValueError for more than
    131,072 weights at once.
    """
    weights = exact_weights(session, layer, head, "an exact row")
    nq, nk = weights.sizes
    checked_index("token", token, nq, "queries")
    start, stop = checked_span("keys", start, stop, nk, most=MOST_WEIGHTS)
    p = weights.row(token).cpu()  # (Nk,)
    return {
        "token": token,
        "start": start,
        "stop": stop,
        "weights": packed(p[start:stop]),
        "ribbon": {"sum": packed(sums_of_bins(p, BINS)), "max": packed(largest_of_bins(p, BINS))},
        "top": _largest(p),
        "sum": finite(float(p.double().sum())),
        "how": "exact",
    }


def _largest(p: Tensor) -> list[Key]:
    """The largest weights, the lower key first among equals; hidden keys are none of them."""
    values, keys = p.nan_to_num(0.0).sort(descending=True, stable=True)
    pairs = zip(keys[:TOP].tolist(), values[:TOP].tolist(), strict=True)
    return [{"key": key, "weight": weight} for key, weight in pairs if weight > 0]


def tile(session: Session, layer: int, head: int, rows: Span, cols: Span, size: int = 128) -> Tile:
    """A part of the map in at most size × size cells: single weights where they are as few, else pooled.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> answer = tile(Session("toy", seen, ("a", "b", "c")), 0, 1, (0, 2), (0, 3))
    >>> answer["cells"]["shape"], answer["how"]
    ([2, 3], 'exact')

    rows, cols: queries and keys, [first, end).  size: 1 to 256.
    Up to 4,096 × 4,096 weights a pooled cell is their exact sum, divided by its number of queries. A larger part is cut
    from the map that was measured with the run: its answer covers whole cells of that, and says which.

    Raises IndexError and LookupError as `row` does, ValueError for another size or an empty part.
    """
    weights = exact_weights(session, layer, head, "a tile of the map")
    if not 1 <= size <= LARGEST_TILE:
        raise ValueError(f"size must be 1 to {LARGEST_TILE}, got {size}")
    rows = _some("rows", rows, weights.sizes[0])
    cols = _some("cols", cols, weights.sizes[1])
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    if height * width > FEW_CELLS:
        return _of_map(find_head(session, layer, head).view, head, rows, cols)
    cells = pooled_tile(weights, rows, cols, size)
    exact = max(height, width) <= size
    return {"rows": list(rows), "cols": list(cols), "cells": packed(cells), "how": "exact" if exact else "pooled"}


def _some(name: str, span: Span, count: int) -> Span:
    start, stop = checked_span(name, span[0], span[1], count)
    if start == stop:
        raise ValueError(f"{name} {start} up to {stop} hold nothing: ask for at least one")
    return start, stop


def _of_map(view: View, head: int, rows: Span, cols: Span) -> Tile:
    """The cells of the measured map that a part touches."""
    if "map" not in view.held:
        raise LookupError(
            f"{rows[1] - rows[0]:,} × {cols[1] - cols[0]:,} weights are too many to compute now, and no map was "
            f"measured with the run: ask for at most {FEW_CELLS:,} weights, or record it with 'map' in measures="
        )
    cells = view.map()[0, head]
    (i, j, rows), (c, d, cols) = (
        _outward(span, bin_edges(n, m).tolist())
        for span, n, m in zip((rows, cols), view.sizes[2:], cells.shape, strict=True)
    )
    return {"rows": list(rows), "cols": list(cols), "cells": packed(cells[i:j, c:d]), "how": "pooled"}


def _outward(span: Span, edges: list[int]) -> tuple[int, int, Span]:
    """The first cell that a stretch touches, the one after its last, and the positions that these cover."""
    first = max(n for n, edge in enumerate(edges[:-1]) if edge <= span[0])
    end = min(n for n, edge in enumerate(edges) if edge >= span[1])
    return first, end, (edges[first], edges[end])


MOST_KEYS = 64


def steps(session: Session, layer: int, head: int, token: int, key: int) -> Steps:
    """The steps of one query, for its strongest keys and the one that was asked for; masked keys are left out else.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> answer = steps(Session("toy", seen, ("a", "b", "c")), 0, 1, token=2, key=1)
    >>> answer["d"], answer["scale"], answer["keys"], answer["v_sum"]
    (4, 0.5, [0, 1, 2], None)

    Raises IndexError for what is not there, LookupError where queries and keys were not kept or the model made its
    weights itself.
    """
    nq, nk = exact_weights(session, layer, head, "showing the steps").sizes
    checked_index("token", token, nq, "queries")
    checked_index("key", key, nk, "keys")
    seen = find_head(session, layer, head)
    assert seen.view.weights is not None
    window, own = divmod(token, max(1, seen.view.sizes[2])) if seen.windows > 1 else (0, token)
    scored, i, first = _part(seen.view.weights, head, own, window)
    first += window * seen.view.sizes[3]
    j = key - first
    if not 0 <= j < scored.sizes[1] and seen.windows > 1:
        raise IndexError(
            f"key {key} is in another window than token {token}, which sees keys {first} to "
            f"{first + scored.sizes[1] - 1}"
        )
    if not 0 <= j < scored.sizes[1]:
        raise IndexError(
            f"key {key} was not there when token {token} was read: it had keys {first} to {first + scored.sizes[1] - 1}"
        )
    rows = slice(i, i + 1)
    p = scored.row(i)  # (Nk,)
    hidden = scored.hidden(rows)[0]  # (Nk,)
    chosen = _chosen(p, j, hidden)
    dots = scored.dots(rows, chosen)[0]  # (keys,)
    scaled = dots * scored.call.scale
    q, k = scored.q[i].to(scored.call.wide), scored.k[j].to(scored.call.wide)
    v, v_sum = _values(session, seen, head, window, p, j)
    return {
        "token": token,
        "key": key,
        "d": len(q),
        "scale": float(scored.call.scale),
        "q": packed(q),
        "k": packed(k),
        "product": packed(q * k),
        "keys": [first + at for at in chosen.tolist()],
        "there": len(p),
        "masked": int(hidden.sum()),
        "dots": packed(dots),
        "scaled": packed(scaled),
        "scores": packed(scored.scores(scaled.clone()[None], rows, chosen)[0]),
        "weights": packed(p[chosen]),
        "rest": finite(max(0.0, float(p.double().sum() - p[chosen].double().sum()))),
        "lse": finite(float(scored.lse[i])),
        "v": v,
        "v_sum": v_sum,
    }


def _part(weights: Weights, head: int, token: int, batch: int) -> tuple[Scored, int, int]:
    """The call that a query belongs to, which of its queries it is, and where its keys begin among those of the run."""
    first = 0
    if isinstance(weights, AssembledWeights):
        n = 0
        while token >= weights.counts[n]:
            token, n = token - weights.counts[n], n + 1
        moved = weights.rows[n]
        batch, first, weights = (batch if moved is None else moved[batch]), weights.first[n], weights.parts[n]
    if not isinstance(weights, ComputedWeights):
        raise LookupError(
            "the model made these weights itself, by a softmax written out, so that no queries and keys were seen: "
            "there are exact rows, and no steps before them"
        )
    return Scored(weights, head, batch), token, first


def _chosen(p: Tensor, j: int, hidden: Tensor) -> Tensor:
    """The asked key and those with the largest weights that are not masked, in text order, (≤ 64)."""
    seen = len(p) - int(hidden.sum())
    largest = p.nan_to_num(0.0).masked_fill(hidden, -1.0).topk(min(MOST_KEYS, seen)).indices.cpu().tolist()
    others = [at for at in largest if at != j][: MOST_KEYS - 1]
    return torch.tensor(sorted([j, *others]), device=p.device)


def _values(
    session: Session, seen: SeenLayer, head: int, window: int, p: Tensor, j: int
) -> tuple[Array | None, Array | None]:
    """The value of key j, and Σ p·v, (Dv) each; None where no live model can be asked."""
    if session.values is None or len(seen.records) != 1:
        return None, None
    values = session.values.of(seen.records[0], len(session.capture.records))
    heads = seen.view.sizes[1]
    if values is None or values.shape[2] != len(p):
        return None, None
    v = values[window, head // (heads // values.shape[1])].to(p)  # (Nk, Dv)
    return packed(v[j]), packed(p @ v)


VERSION = 1
FIRST_LABELS = 4096  # that come with the overview
MOST_LABELS = 1 << 16  # in one answer
LONGEST_LABEL = 64  # characters: a token may have a million
LONGEST_TEXT = 1 << 18  # characters that come back with the overview
OVERVIEW_BINS = 1024  # of a measure by position
CELLS = 64  # of a map, each way
LINKS = 12


def overview(session: Session, lang: Lang = "en") -> Overview:
    """All heads at a glance, and what can be asked next; no row is computed, but for calls of a few hundred tokens.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> answer = overview(Session("toy", seen, ("a", "b", "c")))
    >>> answer["rows"], answer["labels"], answer["measures"]["entropy"]["shape"]
    (False, ['a', 'b', 'c'], [1, 2])

    lang: of the warning. Raises ValueError for a language that is not spoken here, LookupError where nothing was seen.
    """
    lang = spoken(lang)
    if not session.layers:
        session.capture[0]  # says why nothing was seen
    layouts, placed = layouts_of(session)
    layers = [_layer(session, n, layer, placed[n]) for n, layer in enumerate(session.layers)]
    text = session.text
    return {
        "version": VERSION,
        "name": session.name,
        "text": text if text is not None and len(text) <= LONGEST_TEXT else None,
        "length": len(session.tokens),
        "labels": [_cut(word) for word in session.tokens[:FIRST_LABELS]],
        "rows": all(layer["rows"] for layer in layers),
        "layers": layers,
        "measures": _measures(session),
        "labels_of_heads": [[names[0] if names else None for names in n.names] for n in session.numbers],
        "opening": opening_of(session),
        "pictures": pictures_of(session),
        "layouts": layouts,
        "warning": WARNING[lang],
    }


def _layer(session: Session, index: int, layer: SeenLayer, layout: list[int] | None) -> Layer:
    view, (nq, nk) = layer.view, layer.sizes
    offset = view.place.offset
    first = nk - nq if offset is None else int(torch.as_tensor(offset).reshape(-1)[0])
    return {
        "index": index,
        "path": layer.path,
        "call": layer.call,
        "heads": view.sizes[1],
        "queries": nq,
        "keys": nk,
        "kind": view.kind,
        "first": None if view.kind == "cross" else first,
        "labelled": nk == len(session.tokens) and any(session.tokens),
        "rows": view.weights is not None,
        "windows": layer.windows,
        "layout": layout,
    }


def _measures(session: Session) -> dict[str, Array]:
    """name → (layers, most heads), for what at least one layer has."""
    lines = [_numbers_by_name(numbers) for numbers in session.numbers]
    most = max((layer.view.sizes[1] for layer in session.layers), default=0)
    found = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        table = torch.full((len(lines), most), float("nan"))
        for at, line in zip(table, lines, strict=True):
            if name in line:
                at[: len(line[name])] = line[name]
        found[name] = packed(table)
    return found


def _numbers_by_name(numbers: HeadNumbers) -> dict[str, Tensor]:
    given = {"entropy": numbers.entropy, "effective": numbers.effective, "received_max": numbers.share}
    return {name: values for name, values in given.items() if values is not None} | numbers.patterns


def _cut(word: str) -> str:
    return word if len(word) <= LONGEST_LABEL else word[: LONGEST_LABEL - 1] + "…"


def tokens(session: Session, start: int = 0, stop: int | None = None) -> Tokens:
    """The labels of tokens start up to stop; a label longer than 64 characters is cut.

    >>> from regard.lens.capture import Capture
    >>> tokens(Session("toy", Capture(), ("a", "b", "c")), 1, 3)
    {'start': 1, 'labels': ['b', 'c']}

    stop: default the end. Raises IndexError for what is not there, ValueError for more than 65,536 at once.
    """
    start, stop = checked_span("tokens", start, stop, len(session.tokens), most=MOST_LABELS)
    return {"start": start, "labels": [_cut(word) for word in session.tokens[start:stop]]}


def head(session: Session, layer: int, head: int, lang: Lang = "en") -> Head:
    """The card of a head: its map, what keys receive, the entropy of its queries, its numbers, a sentence and links.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model) as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> head(Session("toy", seen, ("a", "b", "c")), 0, 1)["sentence"][:38]
    'Head 1 of layer 0 spreads about evenly'

    Raises IndexError for a layer or head that is not there, LookupError where neither a map nor q and k were kept.
    """
    lang, found = spoken(lang), find_head(session, layer, head)
    view, numbers = found.view, session.numbers[layer]
    cells, how = _map(found, head)
    strong = links(session, layer, head)
    known = [link["weight"] for link in strong["links"]]
    said = _numbers(numbers, head, max(known, default=None))
    names = numbers.names[head]
    patterns, shares = ({n: float(t[head]) for n, t in of.items()} for of in (numbers.patterns, numbers.shares))
    return {
        "layer": layer,
        "head": head,
        "path": found.path,
        "map": packed(cells),
        "how": "exact" if how == "exact" else "pooled",
        "received": _received(view, head),
        "entropy": _entropy(view, head),
        "numbers": said,
        "patterns": {name: score for name, score in patterns.items() if finite(score) is not None},
        "shares": {name: share for name, share in shares.items() if finite(share) is not None},
        "label": names[0] if names else None,
        "rest": numbers.rest[head],
        "sentence": sentence(session, layer, head, said, lang),
        "links": strong["links"],
        "links_how": strong["how"],
    }


def _map(layer: SeenLayer, head: int) -> tuple[Tensor, str]:
    """The map that was measured, or one from exact weights; of the first window where there are several."""
    view = layer.view
    if "map" in view.held:
        cells: Tensor = view.map()[0, head]
        return cells, view.how("map")
    _, _, nq, nk = view.sizes
    if view.weights is None or nq * nk > FEW_CELLS:
        hint = f"of {nq:,} × {nk:,} weights is too large to make now" if view.weights is not None else "was not kept"
        raise LookupError(f"the map {hint}: watch(model) measures one while the model runs, if 'map' is in measures=")
    exact = max(nq, nk) <= CELLS
    return pooled_tile(head_of(layer, head), (0, nq), (0, nk), CELLS), "exact" if exact else "pooled"


def _received(view: View, head: int) -> Array | None:
    if "received" not in view.held:
        return None
    values = view.received[0, head]
    if "received" in view.pooled:  # means of bins: back to sums
        return packed(values * torch.tensor(cell_edges(view.sizes[3], len(values))).diff().to(values))
    return packed(sums_of_bins(values, OVERVIEW_BINS))


def _entropy(view: View, head: int) -> Array | None:
    return packed(pool(view.entropy[0, head], OVERVIEW_BINS)) if "entropy" in view.held else None


def _numbers(numbers: HeadNumbers, head: int, largest: float | None) -> Numbers:
    def one(values: Tensor | None) -> float | None:
        return None if values is None else finite(float(values[head]))

    share = one(numbers.share)
    first, last = numbers.keys[head] if share is not None else (None, None)
    return {
        "entropy": one(numbers.entropy),
        "effective": one(numbers.effective),
        "max_weight": finite(largest),
        "received_max": share,
        "received_key": first,
        "received_last": last,
    }


# ---------------------------------------------------------------------------------------------------------------- links


def links(session: Session, layer: int, head: int, count: int = LINKS) -> HeadLinks:
    """The strongest links of a head, the strongest first: of all of them, or of the map's strongest cells.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> answer = links(Session("toy", seen, ("a", "b", "c")), 0, 1, count=2)
    >>> len(answer["links"]), answer["how"]
    (2, 'exact')

    A query that sees a single key has no choice, and is left out. Where neither q and k nor links nor an exact map were
    kept there are none. Raises IndexError for a layer or head that is not there.
    """
    seen = find_head(session, layer, head)
    view, (_, _, nq, nk) = seen.view, seen.view.sizes
    windows = [((w * nq, (w + 1) * nq), (w * nk, (w + 1) * nk)) for w in range(seen.windows)]
    if "top_key" in view.held:
        found, how = _measured_links(seen, head, count), "exact"
    elif view.weights is not None and (nq * nk <= FEW_CELLS or seen.windows > 1):
        found, how = _links_in(seen, head, windows, count), "exact"
    elif view.weights is not None and "map" in view.held:
        found, how = _links_in(seen, head, _strongest_cells(view, head), count), "pooled"
    elif "map" in view.held and view.how("map") == "exact":
        maps = [(view.map()[w, head].float(), rows, cols) for w, (rows, cols) in enumerate(windows)]
        parts = [
            _largest_cells(_chosen_rows(seen, cells, rows, head), (rows[0], cols[0]), count)
            for cells, rows, cols in maps
        ]
        found, how = _first(parts, count), "exact"
    else:
        found, how = [], "pooled"
    return {"layer": layer, "head": head, "links": found, "how": "exact" if how == "exact" else "pooled"}


def _first(parts: Iterable[list[Link]], count: int) -> list[Link]:
    """The strongest of all parts' links."""
    return sorted((link for part in parts for link in part), key=lambda link: -link["weight"])[:count]


def _measured_links(layer: SeenLayer, head: int, count: int) -> list[Link]:
    (_, _, nq, nk), top = layer.view.sizes, layer.view.top()
    found = list[Link]()
    for w in range(layer.windows):
        rows, keys = (w * nq, (w + 1) * nq), top.index[w, head]
        weight = _chosen_rows(layer, top.weight[w, head].nan_to_num(0.0), rows, head)
        for link in _largest_cells(weight, (0, 0), count):
            key = w * nk + int(keys[link["query"], link["key"]])
            found.append({"query": rows[0] + link["query"], "key": key, "weight": link["weight"]})
    return _first([found], count)


TokenSpan = tuple[int, int]


def _links_in(layer: SeenLayer, head: int, parts: list[tuple[TokenSpan, TokenSpan]], count: int) -> list[Link]:
    """The strongest links in some parts of the weights, a few million of them at once."""
    weights, found = head_of(layer, head), list[Link]()
    for (a, b), (c, d) in parts:
        at_once = max(1, (1 << 22) // max(1, d - c))
        for i in range(a, b, at_once):
            span = (i, min(i + at_once, b))
            tile = _chosen_rows(layer, weights.tile(slice(*span), slice(c, d)), span, head)
            found = _first([found, _largest_cells(tile, (i, c), count)], count)
    return found


def _chosen_rows(layer: SeenLayer, weights: Tensor, rows: TokenSpan, head: int) -> Tensor:
    """(rows, …) of one window without NaN, and without those of queries that see a single key."""
    visible, weights = layer.view.place.visible, weights.nan_to_num(0.0)
    if visible is None:
        return weights
    window = rows[0] // max(1, layer.view.sizes[2]) if layer.windows > 1 else 0
    first, end = (i - window * layer.view.sizes[2] for i in rows)
    seen = visible[window if visible.shape[0] > 1 else 0, head if visible.shape[1] > 1 else 0, first:end]
    return weights.masked_fill((seen == 1).to(weights.device)[:, None], 0.0)


def _largest_cells(weights: Tensor, corner: TokenSpan, count: int) -> list[Link]:
    values, at = weights.reshape(-1).topk(min(count, weights.numel()))
    cells = [divmod(place, weights.shape[1]) for place in at.tolist()]
    found = sorted(zip(values.tolist(), cells, strict=True), key=lambda one: (-one[0], one[1]))
    return [{"query": corner[0] + i, "key": corner[1] + j, "weight": w} for w, (i, j) in found if w > 0]


def _strongest_cells(view: View, head: int, most: int = 8) -> list[tuple[TokenSpan, TokenSpan]]:
    """Where the map is strongest: the queries and keys of some cells."""
    cells = view.map()[0, head].float().nan_to_num(0.0)
    rows, cols = bin_edges(view.sizes[2], cells.shape[0]).tolist(), bin_edges(view.sizes[3], cells.shape[1]).tolist()
    places = cells.reshape(-1).topk(min(most, cells.numel())).indices.tolist()
    found = [divmod(place, cells.shape[1]) for place in places]
    return [((rows[i], rows[i + 1]), (cols[j], cols[j + 1])) for i, j in found]
