"""The explorer protocol as types: one dictionary per question, in values that JSON carries."""

from __future__ import annotations

from base64 import b64decode, b64encode
from math import isfinite
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from regard.masks.tiles import cell_edges

# pydantic reads these for OpenAPI, and before Python 3.12 it reads typing_extensions' alone, which torch brings along


How = Literal["exact", "pooled"]


class ArrayJSON(TypedDict):
    """Numbers of any shape: base64 of float32, little-endian, row by row."""

    shape: list[int]
    f32: str


class LayerJSON(TypedDict):
    """One attention of the model: a module, or one of its runs.

    call: the number of its first call, where the module has several runs; else null.
    first: the position of query 0 among the keys; null in cross-attention.
    labelled: do the session's tokens name its keys?  rows: can exact rows be asked for?
    windows: how many sequences of equal length its tokens count through; queries and keys are those of all of them, and
    a query sees the keys of its window alone.
    layout: what its queries and its keys are, by their numbers in the overview's layouts; null where nobody said.
    """

    index: int
    path: str
    call: int | None
    heads: int
    queries: int
    keys: int
    kind: str
    first: int | None
    labelled: bool
    rows: bool
    windows: int
    layout: list[int] | None


class ImageJSON(TypedDict):
    """A picture that the model looked at.

    height, width: in pixels.  name: of its file, null where it is not known.  shown: can `picture` be asked for it?
    seen: top, left, bottom and right of what the model saw, as fractions of the picture's sides; outside 0 to 1 where
    the picture was padded.
    """

    height: int
    width: int
    name: str | None
    shown: bool
    seen: list[float]


class TokenRunJSON(TypedDict):
    """Tokens of one kind that follow each other. picture: which one they belong to, null for none."""

    kind: str
    picture: int | None
    count: int


class PatchGridJSON(TypedDict):
    """The patches of one picture, each in a row and a column.

    rows: top and bottom of each; columns: left and right of each; as fractions of the picture's sides.
    cells: of each patch in the order of the tokens, row · number of columns + column; null where that is 0, 1, 2 …
    """

    picture: int
    rows: list[list[float]]
    columns: list[list[float]]
    cells: list[int] | None


class LayoutJSON(TypedDict):
    """What the tokens of one side of an attention are, through all its windows, and where its patches lie."""

    runs: list[TokenRunJSON]
    grids: list[PatchGridJSON]


class ImageAnswer(TypedDict):
    """A picture to be shown, at most 1,600 pixels long. kind: its media type.  base64: its bytes."""

    kind: str
    base64: str


class Opening(TypedDict):
    """Where to look first: a head, a query of it and a key; null for a query or key that the page may choose itself."""

    layer: int
    head: int
    token: int | None
    key: int | None


class OverviewAnswer(TypedDict):
    """All heads at a glance.

    length: how many tokens there are.  labels: the first 4,096 of them; `tokens` gives the rest.
    text: what was read; null where it is not known or too long.  rows: can exact rows be asked for in every layer?
    measures: name → (layers, most heads), NaN where a layer has fewer heads or was not measured.
    labels_of_heads: by layer and head the pattern that gets half of its attention or more, or null.
    opening: where to look first; null where no exact rows are known.
    pictures: those that the model looked at; none for a text.  layouts: of tokens; layers name them by their numbers.
    """

    version: int
    name: str
    text: str | None
    length: int
    labels: list[str]
    rows: bool
    layers: list[LayerJSON]
    measures: dict[str, ArrayJSON]
    labels_of_heads: list[list[str | None]]
    opening: Opening | None
    pictures: list[ImageJSON]
    layouts: list[LayoutJSON]
    warning: str


class TokensAnswer(TypedDict):
    """The labels of a stretch of tokens."""

    start: int
    labels: list[str]


class LinkJSON(TypedDict):
    """How much of a query's attention goes to a key."""

    query: int
    key: int
    weight: float


class LinksAnswer(TypedDict):
    """The strongest links of a head. how: "exact" is of all there are, "pooled" of the map's strongest cells."""

    layer: int
    head: int
    links: list[LinkJSON]
    how: How


class NumbersJSON(TypedDict):
    """A head in numbers; null where they were not measured.

    entropy, effective: means over the queries of −Σ p ln p, in nats, and of 1/Σp², the effective number of keys.
    max_weight: the largest weight that is known.
    received_max: what the key that receives most gets of each query, on the mean.
    received_key: which key that is, or the first of them where they are pooled; received_last the last of them.
    """

    entropy: float | None
    effective: float | None
    max_weight: float | None
    received_max: float | None
    received_key: int | None
    received_last: int | None


class HeadAnswer(TypedDict):
    """The card of a head.

    map: (≤ 64, ≤ 64), rows are queries; a cell is the sum of its weights divided by its number of queries.
    how: "exact" where a cell is one weight.  received: (≤ 1024) sums by bins of keys.
    entropy: (≤ 1024) means by bins of queries.  links, links_how: as in `HeadLinks`.
    patterns: the mean weight on the keys that a pattern names.  shares: the part of all attention that goes to them.
    label: the pattern that gets half of it or more.  rest: where that is the first token, the pattern that gets half of
    what goes elsewhere; null for none.
    Of a layer cut into windows, map, received and entropy are of the first one; `tile` gives the others.
    """

    layer: int
    head: int
    path: str
    map: ArrayJSON
    how: How
    received: ArrayJSON | None
    entropy: ArrayJSON | None
    numbers: NumbersJSON
    patterns: dict[str, float]
    shares: dict[str, float]
    label: str | None
    rest: str | None
    sentence: str
    links: list[LinkJSON]
    links_how: How


class RibbonJSON(TypedDict):
    """A row in at most 1,024 bins of keys: the sum and the largest weight of each."""

    sum: ArrayJSON
    max: ArrayJSON


class KeyJSON(TypedDict):
    """A key and its weight."""

    key: int
    weight: float


class RowAnswer(TypedDict):
    """The exact weights of one query: those of a window, a ribbon of all, the largest, and their sum."""

    token: int
    start: int
    stop: int
    weights: ArrayJSON
    ribbon: RibbonJSON
    top: list[KeyJSON]
    sum: float | None
    how: How


class TileAnswer(TypedDict):
    """A part of the map. rows, cols: what it covers, [first, end); more than was asked for where it is the map's."""

    rows: list[int]
    cols: list[int]
    cells: ArrayJSON
    how: How


class StepsAnswer(TypedDict):
    """One query's way through attention, with its numbers.

    d: head size.  q, k, product: (D) of the query, of the asked key, and q⊙k, whose sum is q·k.
    keys: the asked key and those with the largest weights, in text order, without masked ones unless asked for; of
    each: dots q·k, scaled (dots · scale), scores (what the softmax gets: capped, biased, −∞ where masked) and weights
    e^(score − lse).  there: how many keys the query had.  masked: how many of them are masked for it.
    rest: the weight on all other keys.  v, v_sum: (Dv) the asked key's value and Σ weight·value over all keys; null
    without a live model.
    """

    token: int
    key: int
    d: int
    scale: float
    q: ArrayJSON
    k: ArrayJSON
    product: ArrayJSON
    keys: list[int]
    there: int
    masked: int
    dots: ArrayJSON
    scaled: ArrayJSON
    scores: ArrayJSON
    weights: ArrayJSON
    rest: float | None
    lse: float | None
    v: ArrayJSON | None
    v_sum: ArrayJSON | None


def packed(values: Tensor) -> ArrayJSON:
    """A tensor of any shape as a dictionary of its shape and its numbers; NaN and infinities stay what they are.

    >>> packed(torch.zeros(0))
    {'shape': [0], 'f32': ''}
    """
    numbers = values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return {"shape": list(values.shape), "f32": b64encode(numbers.tobytes()).decode("ascii")}


def unpacked(array: ArrayJSON) -> Tensor:
    """The tensor that was packed, in fp32.

    >>> unpacked(packed(torch.tensor([[0.5, 0.25]])))
    tensor([[0.5000, 0.2500]])

    Raises ValueError for numbers that do not fill the shape.
    """
    numbers = np.frombuffer(b64decode(array["f32"]), "<f4").astype(np.float32)
    return torch.from_numpy(numbers).reshape(array["shape"])


def finite(value: float | None) -> float | None:
    """A number that JSON has a sign for, or None.

    >>> finite(0.5), finite(float("nan"))
    (0.5, None)
    """
    return value if value is not None and isfinite(value) else None


def bin_edges(n: int, bins: int) -> Tensor:
    """Where bins begin and end, (min(n, bins) + 1,): as even as integers allow.

    >>> bin_edges(7, 3)
    tensor([0, 2, 4, 7])
    """
    return torch.tensor(cell_edges(n, bins))


def sums_of_bins(values: Tensor, bins: int) -> Tensor:
    """(…, N) → (…, min(N, bins)): the sum of each bin, in fp64 inside.

    >>> sums_of_bins(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    tensor([ 3., 12.])
    """
    n = values.shape[-1]
    if n <= bins:
        return values.float()
    return _reduced(values.double(), bins, "sum").float()


def largest_of_bins(values: Tensor, bins: int) -> Tensor:
    """(…, N) → (…, min(N, bins)): the largest of each bin.

    >>> largest_of_bins(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    tensor([2., 5.])
    """
    return values.float() if values.shape[-1] <= bins else _reduced(values, bins, "max").float()


def _reduced(values: Tensor, bins: int, how: str) -> Tensor:
    lengths = bin_edges(values.shape[-1], bins).diff().to(values.device)
    return torch.segment_reduce(
        values, how, lengths=lengths.expand(*values.shape[:-1], -1), axis=values.ndim - 1, unsafe=True
    )
