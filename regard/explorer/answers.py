"""The one protocol of the explorer: from a session to plain dictionaries, for the server, the notebook and files.

    >>> from regard.explorer.sessions import look_at
    >>> session = look_at("The animal didn't cross the street because it was too tired.")     # doctest: +SKIP
    >>> row(session, 3, 1, 10)["top"][0]                                                      # doctest: +SKIP
    {'key': 2, 'weight': 0.68}

`overview`, `tokens`, `head` and `links` are here; `row` and `tile`, which compute exact weights, in `weight_answers`;
`steps` in `step_answers`; `picture` in `picture_answers`. Layers, heads, tokens and keys count from 0, tokens through
the windows that a layer is cut into; answers are of the first batch entry.

It does not know who asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from regard.explorer.answer_types import Array, Head, HeadLinks, Layer, Link, Numbers, Overview, Tokens
from regard.explorer.asked import checked_span, find_head, spoken
from regard.explorer.head_numbers import HeadNumbers
from regard.explorer.packing import bin_edges, finite, packed, sums_of_bins
from regard.explorer.picture_answers import layouts_of, picture, pictures_of
from regard.explorer.pooled_tiles import FEW_CELLS, pooled_tile
from regard.explorer.ranking import opening_of
from regard.explorer.seen_layers import SeenLayer
from regard.explorer.sentences import WARNING, sentence
from regard.explorer.sessions import Session
from regard.explorer.step_answers import steps
from regard.explorer.weight_answers import row, tile
from regard.explorer.windowed_head import head_of
from regard.lens.files.packing import pool
from regard.lens.measuring.measures import cell_edges
from regard.lens.view import View
from regard.stages import Lang

__all__ = ["head", "links", "overview", "picture", "row", "steps", "tile", "tokens"]

VERSION = 1
FIRST_LABELS = 4096  # that come with the overview
MOST_LABELS = 1 << 16  # in one answer
LONGEST_LABEL = 64  # characters: a token may have a million
LONGEST_TEXT = 1 << 18  # characters that come back with the overview
BINS = 1024  # of a measure by position
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
    return packed(sums_of_bins(values, BINS))


def _entropy(view: View, head: int) -> Array | None:
    return packed(pool(view.entropy[0, head], BINS)) if "entropy" in view.held else None


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
            _largest(_chosen_rows(seen, cells, rows, head), (rows[0], cols[0]), count) for cells, rows, cols in maps
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
        for link in _largest(weight, (0, 0), count):
            key = w * nk + int(keys[link["query"], link["key"]])
            found.append({"query": rows[0] + link["query"], "key": key, "weight": link["weight"]})
    return _first([found], count)


Span = tuple[int, int]


def _links_in(layer: SeenLayer, head: int, parts: list[tuple[Span, Span]], count: int) -> list[Link]:
    """The strongest links in some parts of the weights, a few million of them at once."""
    weights, found = head_of(layer, head), list[Link]()
    for (a, b), (c, d) in parts:
        at_once = max(1, (1 << 22) // max(1, d - c))
        for i in range(a, b, at_once):
            span = (i, min(i + at_once, b))
            tile = _chosen_rows(layer, weights.tile(slice(*span), slice(c, d)), span, head)
            found = _first([found, _largest(tile, (i, c), count)], count)
    return found


def _chosen_rows(layer: SeenLayer, weights: Tensor, rows: Span, head: int) -> Tensor:
    """(rows, …) of one window without NaN, and without those of queries that see a single key."""
    visible, weights = layer.view.place.visible, weights.nan_to_num(0.0)
    if visible is None:
        return weights
    window = rows[0] // max(1, layer.view.sizes[2]) if layer.windows > 1 else 0
    first, end = (i - window * layer.view.sizes[2] for i in rows)
    seen = visible[window if visible.shape[0] > 1 else 0, head if visible.shape[1] > 1 else 0, first:end]
    return weights.masked_fill((seen == 1).to(weights.device)[:, None], 0.0)


def _largest(weights: Tensor, corner: Span, count: int) -> list[Link]:
    values, at = weights.reshape(-1).topk(min(count, weights.numel()))
    cells = [divmod(place, weights.shape[1]) for place in at.tolist()]
    found = sorted(zip(values.tolist(), cells, strict=True), key=lambda one: (-one[0], one[1]))
    return [{"query": corner[0] + i, "key": corner[1] + j, "weight": w} for w, (i, j) in found if w > 0]


def _strongest_cells(view: View, head: int, most: int = 8) -> list[tuple[Span, Span]]:
    """Where the map is strongest: the queries and keys of some cells."""
    cells = view.map()[0, head].float().nan_to_num(0.0)
    rows, cols = bin_edges(view.sizes[2], cells.shape[0]).tolist(), bin_edges(view.sizes[3], cells.shape[1]).tolist()
    places = cells.reshape(-1).topk(min(most, cells.numel())).indices.tolist()
    found = [divmod(place, cells.shape[1]) for place in places]
    return [((rows[i], rows[i + 1]), (cols[j], cols[j + 1])) for i, j in found]
