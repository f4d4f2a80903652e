"""The explorer's protocol: one function per question about a session, each returning JSON values (session/protocol.py).

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> session = Session("toy", seen, ("a", "b", "c"))
    >>> overview(session)["labels"], tokens(session, 1, 3)
    (['a', 'b', 'c'], {'start': 1, 'labels': ['b', 'c']})
    >>> head(session, 0, 1)["sentence"][:38], links(session, 0, 1, count=2)["how"]
    ('Head 1 of layer 0 spreads about evenly', 'exact')
    >>> row(session, 0, 1, token=2)["top"][0], tile(session, 0, 1, (0, 2), (0, 3))["cells"]["shape"]
    ({'key': 0, 'weight': 0.3333333432674408}, [2, 3])
    >>> steps(session, 0, 1, token=2, key=1)["scale"]
    0.5

Server, notebook and exported page ask the same questions. All raise IndexError for a layer, head, token or key out of
range, LookupError if the capture lacks what is needed, and ValueError for a wrong size or language.

Axis letters: N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

from base64 import b64encode
from itertools import groupby
from math import isfinite
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from regard.layouts import Layout
from regard.lens.assembly import AssembledWeights
from regard.lens.files.saving import Photo
from regard.lens.measures.weights import ComputedWeights
from regard.lens.overlays import ImagePatches
from regard.locale import Lang, check_lang, translate
from regard.masks.tiles import cell_edges, pool
from regard.session import protocol
from regard.session.default_models import FETCH, KOREAN, TITLE, is_korean, name_of
from regard.session.effects import (
    align,
    changed_heads,
    check_link,
    measure_heads,
    measure_link,
    predict,
    unsupported_reason,
)
from regard.session.heads import (
    ComputedHead,
    HeadWeights,
    Layer,
    Span,
    head_of,
    layer_row,
    link_weights,
    patch_cells,
    place_in,
    pooled_tile,
    received_in_image,
    thumbnails_of,
)
from regard.session.labels import WARNING, sentence, shown, token_label, token_name
from regard.session.ranking import opening_of, ranked_links
from regard.session.session import Session

VERSION = 1
FIRST_LABELS = 4096  # in the overview
MOST_LABELS = 1 << 16  # in one answer
LONGEST_LABEL = 64  # characters: a token may have a million
LONGEST_TEXT = 1 << 18  # characters in the overview
DIGITS = 6  # of a fraction of an image's side
BINS = 1024  # of a measure by position, and of a ribbon
CELLS = 64  # of a map, each way
LINKS = 12
RANKED, CHANGED, MOST_RANKED = 8, 12, 64  # links of a whole session, heads that changed
TOP = 12  # keys of a row
WIDTH = 64  # cells of a row in all heads
MOST_ROWS = 1 << 24  # weights of a row in all heads
MOST_WEIGHTS = 1 << 17  # of a row in one answer
LARGEST_TILE = 256  # cells each way
MOST_KEYS = 64  # in the steps
FEW_CELLS = 1 << 24  # weights that are computed for one answer: 4,096 × 4,096
LINKS_AT_ONCE = 1 << 22  # weights in memory while links are searched


# --------------------------------------------------------------------------------------------------------------- checks


def _check_index(name: str, value: int, count: int, of: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
    if not 0 <= value < count:
        raise IndexError(f"{name} {value} is out of range: there are {count} {of}, counted from 0")


def _checked_span(name: str, start: int, stop: int | None, count: int, most: int | None = None) -> Span:
    """[start, stop) among `count`; stop defaults to the end, or to `most` items."""
    if stop is None:
        stop = count if most is None else max(start, min(count, start + most))
    if not 0 <= start <= stop <= count:
        raise IndexError(f"{name} {start} up to {stop} are out of range: there are {count}, counted from 0")
    if most is not None and stop - start > most:
        raise ValueError(f"{stop - start:,} {name} are too many for one answer: at most {most:,}")
    return start, stop


def _find_head(session: Session, layer: int, head: int) -> Layer:
    _check_index("layer", layer, len(session.layers), "layers")
    seen = session.layers[layer]
    _check_index("head", head, seen.view.sizes[1], "heads")
    return seen


def _exact_weights(session: Session, layer: int, head: int, what: str) -> tuple[Layer, HeadWeights]:
    seen = _find_head(session, layer, head)
    if seen.view.weights is None:
        raise LookupError(
            f"{what} needs queries and keys, which this capture does not hold: read its text with the model, or record "
            "it again with them"
        )
    return seen, head_of(seen, head)


# --------------------------------------------------------------------------------------------------------------- arrays


def packed(values: Tensor) -> protocol.ArrayJSON:
    """A tensor as JSON; NaN and infinities are kept."""
    numbers = values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return {"shape": list(values.shape), "f32": b64encode(numbers.tobytes()).decode("ascii")}


def binned(values: Tensor, bins: int, how: Literal["sum", "max"]) -> Tensor:
    """(…, N) → (…, min(N, bins)): the sum, in fp64 inside, or the maximum of each bin."""
    n = values.shape[-1]
    if n <= bins:
        return values.float()
    values = values.double() if how == "sum" else values
    lengths = torch.tensor(cell_edges(n, bins), device=values.device).diff().expand(*values.shape[:-1], -1)
    return torch.segment_reduce(values, how, lengths=lengths, axis=values.ndim - 1, unsafe=True).float()


def levels(values: Tensor) -> protocol.LevelsJSON:
    """(H, …) of non-negative numbers as bytes with a scale per head."""
    flat = values.detach().float().cpu().flatten(1)
    scale = flat.amax(1) / 255 if flat.shape[1] else flat.new_zeros(len(flat))
    scale = torch.where(flat.isfinite().all(1), scale, float("nan"))
    numbers = (flat / scale[:, None]).nan_to_num(0.0, 0.0, 0.0).round().to(torch.uint8)
    text = b64encode(numbers.numpy().tobytes()).decode("ascii")
    return {"shape": list(values.shape), "u8": text, "scale": packed(scale)}


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and isfinite(value) else None


# ------------------------------------------------------------------------------------------------------------- overview


def overview(session: Session, lang: Lang = "en") -> protocol.OverviewAnswer:
    """All heads at a glance, and what can be requested next. Computes rows only of calls of a few hundred tokens.

    lang: of the warning.
    """
    check_lang(lang)
    if not session.layers:
        session.capture[0]  # raises with the reason
    layouts, numbers = layouts_of(session)
    layers: list[protocol.LayerJSON] = []
    for index, layer in enumerate(session.layers):
        view, (nq, nk), offset = layer.view, layer.sizes, layer.view.place.offset
        first = nk - nq if offset is None else int(torch.as_tensor(offset).reshape(-1)[0])
        layers.append(
            {
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
                "layout": numbers[index],
                "no_effects": unsupported_reason(session, layer),
            }
        )
    images: list[protocol.ImageJSON] = []
    for number, frame in enumerate(session.frames):
        shown = session.images[number] if number < len(session.images) else None
        height, width = frame.image_size
        box = frame.boxes([0, 0, *frame.pixels]) / (height, width, height, width)
        images.append(
            {
                "height": height,
                "width": width,
                "name": None if shown is None else shown.name,
                "shown": shown is not None,
                "seen": box.round(DIGITS).tolist(),
            }
        )
    text, suggestion = session.text, None
    directory = None if session.model is None else session.model.directory
    if directory is not None and name_of(directory) == TITLE and is_korean(text or ""):
        suggestion = protocol.SuggestionJSON(
            name=KOREAN.name, fetched=KOREAN.is_fetched, command=FETCH, size=KOREAN.size
        )
    return {
        "version": VERSION,
        "name": session.name,
        "text": text if text is not None and len(text) <= LONGEST_TEXT else None,
        "length": len(session.tokens),
        "labels": _labels(session, 0, FIRST_LABELS),
        "rows": all(layer["rows"] for layer in layers),
        "layers": layers,
        "measures": _measures(session),
        "labels_of_heads": [[names[0] if names else None for names in n.names] for n in session.numbers],
        "rest_of_heads": [list(n.rest) for n in session.numbers],
        "opening": opening_of(session),
        "images": images,
        "layouts": layouts,
        "suggestion": suggestion,
        "warning": translate(WARNING, lang),
    }


def _labels(session: Session, start: int, stop: int) -> list[str]:
    words = session.tokens[start:stop]
    return [word if len(word) <= LONGEST_LABEL else word[: LONGEST_LABEL - 1] + "…" for word in words]


def _measures(session: Session) -> dict[str, protocol.ArrayJSON]:
    """name → (layers, most heads), for what at least one layer has."""
    lines = [numbers.measures for numbers in session.numbers]
    most = max((layer.view.sizes[1] for layer in session.layers), default=0)
    tables = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        table = torch.full((len(lines), most), float("nan"))
        for row, line in zip(table, lines, strict=True):
            if name in line:
                row[: len(line[name])] = line[name]
        tables[name] = packed(table)
    return tables


def layouts_of(session: Session) -> tuple[list[protocol.LayoutJSON], list[list[int] | None]]:
    """The distinct layouts of a session, and for each layer the numbers of its queries' and its keys' layout."""
    numbers: dict[Layout, int] = {}
    layouts: list[protocol.LayoutJSON] = []
    layers: list[list[int] | None] = []
    for layer in session.layers:
        if layer.sides is None:
            layers.append(None)
            continue
        for layout in (layer.sides.queries, layer.sides.keys):
            if layout in numbers:
                continue
            numbers[layout] = len(layouts)
            pairs = zip(layout.kind.ravel().tolist(), layout.image.ravel().tolist(), strict=True)
            patches = [ImagePatches(layout, frame, number) for number, frame in enumerate(layer.sides.frames)]
            layouts.append(
                {
                    "runs": [
                        {"kind": kind, "image": None if number < 0 else number, "count": len(list(run))}
                        for (kind, number), run in groupby(pairs)
                    ],
                    "grids": [_grid(one) for one in patches if len(one.tokens)],
                }
            )
        layers.append([numbers[layer.sides.queries], numbers[layer.sides.keys]])
    return layouts, layers


def _grid(patches: ImagePatches) -> protocol.PatchGridJSON:
    """Rows and columns as found among the boxes; boxes of different height at one place are different rows."""
    height, width = patches.frame.image_size
    boxes = (patches.boxes / (height, width, height, width)).round(DIGITS)  # (P, 4)
    rows, row = np.unique(boxes[:, [0, 2]], axis=0, return_inverse=True)
    columns, column = np.unique(boxes[:, [1, 3]], axis=0, return_inverse=True)
    cells = (row.ravel() * len(columns) + column.ravel()).tolist()
    return {
        "image": patches.image,
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "cells": None if cells == list(range(len(cells))) else cells,
    }


# ---------------------------------------------------------------------------------------------------- tokens and images


def tokens(session: Session, start: int = 0, stop: int | None = None) -> protocol.TokensAnswer:
    """The labels of tokens [start, stop), at most 65,536, each cut at 64 characters."""
    start, stop = _checked_span("tokens", start, stop, len(session.tokens), most=MOST_LABELS)
    return {"start": start, "labels": _labels(session, start, stop)}


def image(session: Session, number: int) -> protocol.ImageAnswer:
    """The bytes of an image. Raises LookupError if the session has none of that number."""
    photo = find_image(session, number)
    return {"kind": photo.kind, "base64": b64encode(photo.data).decode("ascii")}


def find_image(session: Session, number: int) -> Photo:
    """An image of a session by its number; raises as `image` does."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number must be an integer, got {type(number).__name__}: {number!r}")
    if not 0 <= number < len(session.images):
        there = f"it has {len(session.images)}, counted from 0" if session.images else "this session has none"
        raise LookupError(f"there is no image {number}: {there}")
    return session.images[number]


# ----------------------------------------------------------------------------------------------------------------- head


def head(session: Session, layer: int, head: int, lang: Lang = "en") -> protocol.HeadAnswer:
    """The card of a head: map, received mass, entropy, numbers, a sentence and its strongest links.

    Needs a map, or q and k.
    """
    check_lang(lang)
    seen = _find_head(session, layer, head)
    view, numbers = seen.view, session.numbers[layer]
    cells, how = _map(seen, head)
    strongest = links(session, layer, head)
    received, entropy = None, None
    if "received" in view.held:
        values = view.received[0, head]
        if "received" in view.pooled:  # means of bins: back to sums
            received = packed(values * torch.tensor(cell_edges(view.sizes[3], len(values))).diff().to(values))
        else:
            received = packed(binned(values, BINS, "sum"))
    if "entropy" in view.held:
        entropy = packed(pool(view.entropy[0, head], BINS))

    def of_head(values: Tensor | None) -> float | None:
        return None if values is None else _finite(float(values[head]))

    share = of_head(numbers.share)
    first, last = numbers.keys[head] if share is not None else (None, None)
    summary: protocol.NumbersJSON = {
        "entropy": of_head(numbers.entropy),
        "effective": of_head(numbers.effective),
        "max_weight": _finite(max((link["weight"] for link in strongest["links"]), default=None)),
        "received_max": share,
        "received_key": first,
        "received_last": last,
    }
    patterns, shares = (
        {name: number for name, values in table.items() if (number := of_head(values)) is not None}
        for table in (numbers.patterns, numbers.shares)
    )
    names = numbers.names[head]
    return {
        "layer": layer,
        "head": head,
        "path": seen.path,
        "map": packed(cells),
        "how": how,
        "received": received,
        "entropy": entropy,
        "numbers": summary,
        "patterns": patterns,
        "shares": shares,
        "label": names[0] if names else None,
        "rest": numbers.rest[head],
        "sentence": sentence(session, layer, head, summary, lang),
        "links": strongest["links"],
        "links_how": strongest["how"],
    }


def _map(layer: Layer, head: int) -> tuple[Tensor, protocol.How]:
    """The measured map, or one from exact weights; of the first window."""
    view = layer.view
    if "map" in view.held:
        return view.map()[0, head], "exact" if view.how("map") == "exact" else "pooled"
    _, _, nq, nk = view.sizes
    if view.weights is None or nq * nk > FEW_CELLS:
        hint = f"of {nq:,} × {nk:,} weights is too large to make now" if view.weights is not None else "was not kept"
        raise LookupError(f"the map {hint}: read the text with the model, or record the capture again with its map")
    cells = pooled_tile(head_of(layer, head), (0, nq), (0, nk), CELLS)
    return cells, "exact" if max(nq, nk) <= CELLS else "pooled"


# ---------------------------------------------------------------------------------------------------------------- links


def links(session: Session, layer: int, head: int, count: int = LINKS) -> protocol.LinksAnswer:
    """The strongest links of a head, the strongest first: of all weights, or of the map's strongest cells.

    Queries that see a single key are left out. The list is empty if the capture has neither q and k, nor links, nor an
    exact map.
    """
    seen = _find_head(session, layer, head)
    view, (_, _, nq, nk), visible = seen.view, seen.view.sizes, seen.view.place.visible
    windows = [((w * nq, (w + 1) * nq), (w * nk, (w + 1) * nk)) for w in range(seen.windows)]
    strongest: list[protocol.LinkJSON] = []
    how: protocol.How = "exact"

    def add(weights: Tensor, rows: Span, first_key: int, keys: Tensor | None = None) -> None:
        """Add links of weights (rows, …) in one window; their columns are keys from `first_key` on, or `keys`."""
        weights = weights.nan_to_num(0.0)
        if visible is not None:
            window = rows[0] // max(1, nq) if seen.windows > 1 else 0
            counts = visible[window if visible.shape[0] > 1 else 0, head if visible.shape[1] > 1 else 0]
            single = counts[rows[0] - window * nq : rows[1] - window * nq] == 1
            weights = weights.masked_fill(single.to(weights.device)[:, None], 0.0)
        values, at = weights.reshape(-1).topk(min(count, weights.numel()))
        cells = [divmod(place, weights.shape[1]) for place in at.tolist()]
        for weight, (i, j) in sorted(zip(values.tolist(), cells, strict=True), key=lambda one: (-one[0], one[1])):
            if weight > 0:
                key = first_key + (j if keys is None else int(keys[i, j]))
                strongest.append({"query": rows[0] + i, "key": key, "weight": weight})
        strongest.sort(key=lambda link: -link["weight"])
        del strongest[count:]

    if "top_key" in view.held:
        top = view.top()
        for w, (rows, cols) in enumerate(windows):
            add(top.weight[w, head], rows, cols[0], top.index[w, head])
    elif view.weights is not None and (nq * nk <= FEW_CELLS or seen.windows > 1 or "map" in view.held):
        parts, weights = windows, head_of(seen, head)
        if nq * nk > FEW_CELLS and seen.windows == 1:
            how, cells = "pooled", view.map()[0, head].float().nan_to_num(0.0)  # the strongest are looked into
            edges = [cell_edges(n, m) for n, m in zip((nq, nk), cells.shape, strict=True)]
            best = cells.reshape(-1).topk(min(8, cells.numel())).indices.tolist()
            at = [divmod(place, cells.shape[1]) for place in best]
            parts = [((edges[0][i], edges[0][i + 1]), (edges[1][j], edges[1][j + 1])) for i, j in at]
        for (a, b), (c, d) in parts:
            at_once = max(1, LINKS_AT_ONCE // max(1, d - c))
            for i in range(a, b, at_once):
                span = (i, min(i + at_once, b))
                add(weights.tile(slice(*span), slice(c, d)), span, c)
    elif "map" in view.held and view.how("map") == "exact":
        for w, (rows, cols) in enumerate(windows):
            add(view.map()[w, head].float(), rows, cols[0])
    else:
        how = "pooled"
    return {"layer": layer, "head": head, "links": strongest, "how": how}


def ranked(session: Session, count: int = RANKED) -> protocol.RankedAnswer:
    """The strongest links of the session across all heads, ranked as `regard look` ranks them; at most 64."""
    if not 1 <= count <= MOST_RANKED:
        raise ValueError(f"count must be 1 to {MOST_RANKED}, got {count}")
    links, complete = ranked_links(session, count)
    opening, rows = opening_of(session), []
    for link in links:
        layer = session.layers[link.layer]
        query = link.query - (0 if layer.sides is not None else layer.start or 0)
        measured = session.effects.links.get((link.layer, link.head, query, link.key))
        if layer.sides is None:
            words = [token_name(session.tokens, at) for at in (link.query, link.key)]
        else:
            words = [
                shown(token_label(session, link.layer, query, "queries")) or str(query),
                shown(token_label(session, link.layer, link.key)) or str(link.key),
            ]
        rows.append(
            protocol.RankedLinkJSON(
                layer=link.layer,
                head=link.head,
                query=query,
                key=link.key,
                weight=link.weight,
                words=words,
                effect=None if measured is None else measured["effect"],
            )
        )
    places = [{"layer": row["layer"], "head": row["head"], "token": row["query"], "key": row["key"]} for row in rows]
    selected = next((n for n, place in enumerate(places) if place == opening), None)
    return {"links": rows, "complete": complete, "selected": selected}


# ---------------------------------------------------------------------------------------------------- all heads at once


def thumbnails(session: Session) -> protocol.ThumbnailsAnswer:
    """Small maps of all heads, and for images what patches receive in each head."""
    layers: list[protocol.ThumbnailsJSON | None] = []
    for layer in session.layers:
        small = thumbnails_of(layer)
        if small is None:
            layers.append(None)
            continue
        images: list[protocol.PatchLevelsJSON] = [
            {
                "image": cells.image,
                "rows": cells.rows.round(DIGITS).tolist(),
                "columns": cells.columns.round(DIGITS).tolist(),
                "levels": levels(values),
            }
            for cells, values in received_in_image(layer)
        ]
        layers.append(
            {
                "layer": layer.index,
                "levels": levels(small.cells),
                "rows": small.rows,
                "cols": small.cols,
                "how": "exact" if small.exact else "pooled",
                "images": images,
            }
        )
    return {"layers": layers}


def rows_of_token(session: Session, token: int, layer: int = 0, width: int = WIDTH) -> protocol.TokenRowsAnswer:
    """One query's row in every head, in at most `width` cells of keys, or in cells of patches.

    layer: the one that counts the query so. Other layers answer for the same token, or the patch at the same place.
    """
    _check_index("layer", layer, len(session.layers), "layers")
    source = session.layers[layer]
    _check_index("token", token, source.sizes[0], "queries")
    if not 1 <= width <= BINS:
        raise ValueError(f"width must be 1 to {BINS}, got {width}")
    places = [place_in(source, other, token, "queries") for other in session.layers]
    known = [other for other, place in zip(session.layers, places, strict=True) if place is not None]
    if (count := sum(other.view.sizes[1] * other.sizes[1] for other in known)) > MOST_ROWS:
        raise ValueError(f"{count:,} weights are too many for one answer: at most {MOST_ROWS:,}; `row` has one head's")
    layers: list[protocol.TokenRowsJSON | None] = []
    for other, place in zip(session.layers, places, strict=True):
        row = None if place is None else layer_row(other, place)  # (W, H, Nk)
        if place is None or row is None:
            layers.append(None)
            continue
        keys = row.transpose(0, 1).flatten(1)  # (H, W · Nk)
        images = [cells.sums(row) for cells in patch_cells(other)]
        rest = keys.sum(1) - sum((image.sum((1, 2)) for image in images), torch.zeros(len(keys)))
        layers.append(
            {
                "layer": other.index,
                "token": place,
                "levels": levels(binned(keys, width, "sum")),
                "cols": cell_edges(keys.shape[1], width),
                "how": "exact" if keys.shape[1] <= width else "pooled",
                "images": [levels(image) for image in images],
                "other": packed(rest.clamp(min=0)) if images else None,
            }
        )
    return {"token": token, "layer": layer, "layers": layers}


def link_in_heads(session: Session, token: int, key: int, layer: int = 0) -> protocol.LinkHeadsAnswer:
    """The weight of one link in every head, and its effects where they were measured.

    layer: the one that counts query and key so; others answer as in `rows_of_token`.
    """
    _check_index("layer", layer, len(session.layers), "layers")
    for name, value, count in zip(("token", "key"), (token, key), session.layers[layer].sizes, strict=True):
        _check_index(name, value, count, "queries" if name == "token" else "keys")
    weights = link_weights(session, token, key, layer)
    effects = torch.full_like(weights, float("nan"))
    if (token, key) in session.effects.heads:
        effects = session.effects.heads[token, key][1].clone()
    for (at, head, *link), found in session.effects.links.items():
        if link == [token, key]:
            effects[at, head] = found["effect"]
    measured = None if bool(effects.isnan().all()) else packed(effects)
    return {"token": token, "key": key, "layer": layer, "weights": packed(weights), "effects": measured}


# --------------------------------------------------------------------------------------------------------- row and tile


def row(
    session: Session, layer: int, head: int, token: int, start: int = 0, stop: int | None = None
) -> protocol.RowAnswer:
    """The exact weights of one query: those of keys [start, stop), a ribbon of all keys, and the largest.

    Needs q and k. At most 131,072 weights at once.
    """
    _, weights = _exact_weights(session, layer, head, "an exact row")
    nq, nk = weights.sizes
    _check_index("token", token, nq, "queries")
    start, stop = _checked_span("keys", start, stop, nk, most=MOST_WEIGHTS)
    p = weights.row(token).cpu()  # (Nk,)
    values, keys = p.nan_to_num(0.0).sort(descending=True, stable=True)  # the lower key first among equals
    largest = zip(keys[:TOP].tolist(), values[:TOP].tolist(), strict=True)
    return {
        "token": token,
        "start": start,
        "stop": stop,
        "weights": packed(p[start:stop]),
        "ribbon": {"sum": packed(binned(p, BINS, "sum")), "max": packed(binned(p, BINS, "max"))},
        "top": [{"key": key, "weight": weight} for key, weight in largest if weight > 0],
        "sum": _finite(float(p.double().sum())),
        "how": "exact",
    }


def tile(session: Session, layer: int, head: int, rows: Span, cols: Span, size: int = 128) -> protocol.TileAnswer:
    """A part of the map in at most size × size cells: single weights where they fit, else pooled.

    Up to 4,096 × 4,096 weights, a pooled cell is their exact sum divided by its number of queries. A larger part is cut
    from the measured map: the answer covers whole cells of that, and says which.

    Needs q and k.  rows, cols: queries and keys, [first, end).  size: 1 to 256.
    """
    seen, weights = _exact_weights(session, layer, head, "a tile of the map")
    if not 1 <= size <= LARGEST_TILE:
        raise ValueError(f"size must be 1 to {LARGEST_TILE}, got {size}")
    rows = _checked_span("rows", *rows, weights.sizes[0])
    cols = _checked_span("cols", *cols, weights.sizes[1])
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    if 0 in (height, width):
        raise ValueError(f"rows {rows} and cols {cols} must hold at least one position each")
    if height * width <= FEW_CELLS:
        how: protocol.How = "exact" if max(height, width) <= size else "pooled"
        return {"rows": [*rows], "cols": [*cols], "cells": packed(pooled_tile(weights, rows, cols, size)), "how": how}
    view = seen.view
    if "map" not in view.held:
        raise LookupError(
            f"{height:,} × {width:,} weights are too many to compute now, and no map was measured with the run: "
            f"zoom in to at most {FEW_CELLS:,} weights, or record the capture again with its map"
        )
    cells = view.map()[0, head]
    edges = [cell_edges(n, m) for n, m in zip(view.sizes[2:], cells.shape, strict=True)]
    (i, j), (c, d) = (  # the cells that the part touches
        (
            max(n for n, edge in enumerate(side[:-1]) if edge <= span[0]),
            min(n for n, edge in enumerate(side) if edge >= span[1]),
        )
        for span, side in zip((rows, cols), edges, strict=True)
    )
    return {
        "rows": [edges[0][i], edges[0][j]],
        "cols": [edges[1][c], edges[1][d]],
        "cells": packed(cells[i:j, c:d]),
        "how": "pooled",
    }


# ---------------------------------------------------------------------------------------------------------------- steps


def steps(session: Session, layer: int, head: int, token: int, key: int) -> protocol.StepsAnswer:
    """The steps of one query, for the requested key and its strongest ones; other masked keys are left out.

    Needs q and k; a model that computes its own softmax has none.
    """
    seen, whole = _exact_weights(session, layer, head, "showing the steps")
    _check_index("token", token, whole.sizes[0], "queries")
    _check_index("key", key, whole.sizes[1], "keys")
    # 1. The call that the query belongs to: i among its queries, j among its keys, which begin at `first`.
    weights = seen.view.weights
    window, i = divmod(token, max(1, seen.view.sizes[2])) if seen.windows > 1 else (0, token)
    batch, first = window, window * seen.view.sizes[3]
    if isinstance(weights, AssembledWeights):
        n = 0
        while i >= weights.counts[n]:
            i, n = i - weights.counts[n], n + 1
        moved = weights.rows[n]
        batch, first, weights = (batch if moved is None else moved[batch]), first + weights.first[n], weights.parts[n]
    if not isinstance(weights, ComputedWeights):
        raise LookupError(
            "the model computed these weights with its own softmax, so queries and keys are unknown: "
            "exact rows are available, the steps before them are not"
        )
    scored, j = ComputedHead(weights, head, batch), key - first
    if not 0 <= j < scored.sizes[1]:
        which = "is in another window than" if seen.windows > 1 else "did not exist yet for"
        raise IndexError(f"key {key} {which} token {token}, which sees keys {first} to {first + scored.sizes[1] - 1}")
    # 2. The keys to show: the requested one and those with the largest weights.
    rows = slice(i, i + 1)
    p = scored.row(i)  # (Nk,)
    hidden = scored.masked(rows)[0]  # (Nk,)
    masked = int(hidden.sum())
    largest = p.nan_to_num(0.0).masked_fill(hidden, -1.0).topk(min(MOST_KEYS, len(p) - masked)).indices.tolist()
    others = [at for at in largest if at != j][: MOST_KEYS - 1]
    shown = torch.tensor(sorted([j, *others]), device=p.device)  # (keys,)
    # 3. Their numbers.
    dots = scored.dots(rows, shown)[0]  # (keys,)
    scaled = dots * scored.call.scale
    q, k = scored.q[i].to(scored.call.wide), scored.k[j].to(scored.call.wide)
    v = session.head_values(layer, head, window)  # (Nk, Dv)
    v = v.to(p) if v is not None and len(v) == len(p) else None
    return {
        "token": token,
        "key": key,
        "d": len(q),
        "scale": float(scored.call.scale),
        "q": packed(q),
        "k": packed(k),
        "product": packed(q * k),
        "keys": [first + at for at in shown.tolist()],
        "there": len(p),
        "masked": masked,
        "dots": packed(dots),
        "scaled": packed(scaled),
        "scores": packed(scored.scores(scaled.clone()[None], rows, shown)[0]),
        "weights": packed(p[shown]),
        "rest": _finite(max(0.0, float(p.double().sum() - p[shown].double().sum()))),
        "lse": _finite(float(scored.lse[i])),
        "v": None if v is None else packed(v[j]),
        "v_sum": None if v is None else packed(p @ v),
    }


# -------------------------------------------------------------------------------------------------------------- effects


def effects(session: Session, token: int, key: int) -> protocol.EffectsAnswer:
    """What was measured of the link from a query to a key so far; `measure` measures."""
    for name, value, axis in (("token", token, 0), ("key", key, 1)):
        _check_index(name, value, max((layer.sizes[axis] for layer in session.layers), default=0), f"{name}s")
    heads: protocol.HeadEffectsJSON | None = None
    if (token, key) in session.effects.heads:
        weights, values = session.effects.heads[token, key]
        heads = {"weights": packed(weights), "effects": packed(values), "method": "exact"}
    links = [link for place, link in sorted(session.effects.links.items()) if place[2:] == (token, key)]
    return {"token": token, "key": key, "links": links, "heads": heads}


def measure(
    session: Session, token: int, key: int, layer: int | None = None, head: int | None = None
) -> protocol.EffectsAnswer:
    """Measure a link by running the model without it: in one head beside random other keys, or in every head by itself.

    Raises ValueError if it cannot be measured, and says why.
    """
    if layer is not None and head is not None:
        measure_link(session, (layer, head, token, key))
    else:
        check_link(session, token, key, layer, head)
        for _ in measure_heads(session, token, key):
            pass
    return effects(session, token, key)


# ---------------------------------------------------------------------------------------------------------- predictions


def predictions(session: Session, without: list[list[int]] | None = None) -> protocol.PredictionsAnswer:
    """What the model predicts, from running it once more. without: [layer, head] of heads to switch off."""
    places = without or []
    if not isinstance(places, list) or any(
        not isinstance(place, list) or [type(n) for n in place] != [int, int] for place in places
    ):
        raise TypeError(f"without must be [[layer, head], …], got {without!r}")
    return predict(session, [(layer, head) for layer, head in places])


# --------------------------------------------------------------------------------------------------------- two sessions


def changes(session: Session, other: Session, count: int = CHANGED) -> protocol.ChangesAnswer:
    """The heads whose attention differs most between two sessions of one model."""
    if not 1 <= count <= MOST_RANKED:
        raise ValueError(f"count must be 1 to {MOST_RANKED}, got {count}")
    heads, complete = changed_heads(session, other)
    aligned, both = align(session, other), (session, other)
    return {
        "counts": [*aligned.counts],
        "before": aligned.before,
        "after": aligned.after,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "moved": head.moved,
                "query": [*head.query],
                "key": [*head.key],
                "words": [
                    [token_name(one.tokens, at) for one, at in zip(both, place, strict=True)]
                    for place in (head.query, head.key)
                ],
                "before": head.before,
                "after": head.after,
            }
            for head in heads[:count]
        ],
        "complete": complete,
    }
