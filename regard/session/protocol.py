"""Types of the explorer's protocol: one dictionary per question, and the values inside them."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic needs this one for OpenAPI before Python 3.12; torch depends on it

How = Literal["exact", "pooled"]
PredictionKind = Literal["next_token", "fill_mask", "labels", "none"]
NoPredictions = Literal["no_model", "no_head", "no_mask"]
NoEffects = Literal["no_model", "repeated", "windows", "other_tokens"]


class ArrayJSON(TypedDict):
    """An array of any shape: base64 of little-endian float32, row-major."""

    shape: list[int]
    f32: str


class LevelsJSON(TypedDict):
    """A small array of each head, (H, …): base64 of bytes, row-major; a value is its byte times its head's scale.

    scale: (H) fp32, the largest value of the head ÷ 255; NaN for a head with NaN or infinite weights.
    """

    shape: list[int]
    u8: str
    scale: ArrayJSON


class LayerJSON(TypedDict):
    """One attention layer of the model: a module, or one of its runs.

    call: number of the first call if the module ran several times, else null.
    first: position of query 0 among the keys; null in cross-attention.
    labelled: whether the session's tokens label its keys.  rows: whether exact rows can be requested.
    windows: number of windows of equal length; queries and keys count through all of them, and a query sees only the
    keys of its own window.
    layout: numbers of the queries' and the keys' layout in the overview's layouts; null if unknown.
    no_effects: why the effect of its links cannot be measured: there is no live model, the model runs a layer several
    times, the layer is cut into windows, or its queries and keys are not the session's tokens; null if it can be.
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
    no_effects: NoEffects | None


class ImageJSON(TypedDict):
    """An image that the model was given.

    height, width: in pixels.  name: of its file, or null.  shown: whether `image` can return it.
    seen: top, left, bottom and right of what the model saw, as fractions of the sides; outside 0 to 1 where the image
    was padded.
    """

    height: int
    width: int
    name: str | None
    shown: bool
    seen: list[float]


class TokenRunJSON(TypedDict):
    """Consecutive tokens of one kind. image: the number of the image they belong to, or null."""

    kind: str
    image: int | None
    count: int


class PatchGridJSON(TypedDict):
    """The patches of one image.

    rows: top and bottom of each row; columns: left and right of each column; as fractions of the image's sides.
    cells: row · number of columns + column of each patch in token order; null if that is 0, 1, 2 …
    """

    image: int
    rows: list[list[float]]
    columns: list[list[float]]
    cells: list[int] | None


class LayoutJSON(TypedDict):
    """What the tokens of one side of an attention are, through all its windows, and where its patches lie."""

    runs: list[TokenRunJSON]
    grids: list[PatchGridJSON]


class ImageAnswer(TypedDict):
    """An image of at most 1,600 pixels a side. kind: media type.  base64: its bytes."""

    kind: str
    base64: str


class Opening(TypedDict):
    """Where the page opens: a head, a query and a key; null for a query or key that the page may choose."""

    layer: int
    head: int
    token: int | None
    key: int | None


class SuggestionJSON(TypedDict):
    """A model that reads a text better. name: for people.  fetched: whether it is on this machine.

    command: which fetches it.  size: of the download, in MB.
    """

    name: str
    fetched: bool
    command: str
    size: int


class OverviewAnswer(TypedDict):
    """All heads at a glance.

    length: number of tokens.  labels: the first 4,096; `tokens` returns the rest.
    text: the input text; null if unknown or too long.  rows: whether every layer has exact rows.
    measures: name → (layers, most heads), NaN where a layer has fewer heads or was not measured.
    labels_of_heads: by layer and head the pattern that gets at least half of its attention, or null.
    rest_of_heads: of a head that rests on the first token, the pattern that gets half of the other attention, or null.
    opening: where to look first; null if no exact rows are known.
    images: those the model was given.  layouts: of tokens; layers refer to them by number.
    suggestion: for a Korean text that the English default model read; else null.
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
    rest_of_heads: list[list[str | None]]
    opening: Opening | None
    images: list[ImageJSON]
    layouts: list[LayoutJSON]
    suggestion: SuggestionJSON | None
    warning: str


class TokensAnswer(TypedDict):
    """Labels of a range of tokens."""

    start: int
    labels: list[str]


class PatchLevelsJSON(TypedDict):
    """What the patches of one image get, (H, r, c) in at most 24 × 24 cells.

    rows, columns: top and bottom, left and right of each row and column of cells, as fractions of the image's sides.
    """

    image: int
    rows: list[list[float]]
    columns: list[list[float]]
    levels: LevelsJSON


class ThumbnailsJSON(TypedDict):
    """The small maps of a layer's heads.

    levels: (H, ≤ 24, ≤ 24), rows are queries; a cell is the sum of its weights divided by its number of queries.
    rows, cols: edges of the cells, in queries and in keys.  how: "exact" if a cell is one weight.
    images: what patches receive of a query on average, by image; empty without images.
    With windows, levels are those of the first one, and images those of all.
    """

    layer: int
    levels: LevelsJSON
    rows: list[int]
    cols: list[int]
    how: How
    images: list[PatchLevelsJSON]


class ThumbnailsAnswer(TypedDict):
    """The thumbnails of every head, by layer; null for a layer without a map."""

    layers: list[ThumbnailsJSON | None]


class TokenRowsJSON(TypedDict):
    """One query's row in all heads of a layer.

    token: the query's number in this layer.  levels: (H, ≤ width), sums by cells of keys.
    cols: edges of the cells, in keys; with windows, in keys of all of them.  how: "exact" if a cell is one weight.
    images: (H, r, c) sums by cells of patches, by image; rows and columns as in `ThumbnailsJSON`.
    other: (H) the weight on keys that are no patches; null without images.
    """

    layer: int
    token: int
    levels: LevelsJSON
    cols: list[int]
    how: How
    images: list[LevelsJSON]
    other: ArrayJSON | None


class TokenRowsAnswer(TypedDict):
    """One query's row in every head; null for a layer that has no such query, or no exact rows."""

    token: int
    layer: int
    layers: list[TokenRowsJSON | None]


class LinkHeadsAnswer(TypedDict):
    """One link in every head.

    weights: (layers, most heads), NaN where a layer has no such link or no exact rows.
    effects: the same of what was measured, NaN where nothing was; null if nothing was anywhere.
    """

    token: int
    key: int
    layer: int
    weights: ArrayJSON
    effects: ArrayJSON | None


class LinkJSON(TypedDict):
    """The weight of one query on one key."""

    query: int
    key: int
    weight: float


class LinksAnswer(TypedDict):
    """The strongest links of a head. how: "exact" of all weights, "pooled" of the map's strongest cells."""

    layer: int
    head: int
    links: list[LinkJSON]
    how: How


class RankedLinkJSON(TypedDict):
    """A strong link, in the head where it ranks highest.

    words: the query and the key for people: a word (of a piece, with the piece in brackets), a patch's row and column,
    a kind such as "cls", or a number.  effect: what was measured of it, as `LinkEffectJSON` says; null if nothing.
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float
    words: list[str]
    effect: float | None


class RankedAnswer(TypedDict):
    """The strongest links of the session across all heads, best first: words of a text, or patches of an image.

    complete: whether all links were searched; of long texts and large images some queries are.
    selected: which of them the page opens on, or null.
    """

    links: list[RankedLinkJSON]
    complete: bool
    selected: int | None


class NumbersJSON(TypedDict):
    """A head in numbers; null where not measured.

    entropy, effective: means over the queries of −Σ p ln p, in nats, and of 1/Σp².
    max_weight: the largest known weight.
    received_max: the mean weight per query of the key that receives most.
    received_key, received_last: that key, or the first and last key of its bin if they are pooled.
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
    how: "exact" if a cell is one weight.  received: (≤ 1024) sums by bins of keys.
    entropy: (≤ 1024) means by bins of queries.  links, links_how: as in `LinksAnswer`.
    patterns: mean weight on the keys that a pattern names.  shares: the part of all attention that goes to them.
    label: the pattern that gets at least half of it.  rest: if that is the first token, the pattern that gets half of
    the remaining attention; or null.
    With windows, map, received and entropy are those of the first one; `tile` returns the others.
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
    """The exact weights of one query: those of keys start to stop, a ribbon of all, the largest, and their sum."""

    token: int
    start: int
    stop: int
    weights: ArrayJSON
    ribbon: RibbonJSON
    top: list[KeyJSON]
    sum: float | None
    how: How


class TileAnswer(TypedDict):
    """A part of the map. rows, cols: the range [first, end) it covers, which may exceed the requested one."""

    rows: list[int]
    cols: list[int]
    cells: ArrayJSON
    how: How


class StepsAnswer(TypedDict):
    """One query's way through attention.

    d: head size.  q, k, product: (D) of the query, of the requested key, and q⊙k, whose sum is q·k.
    keys: the requested key and those with the largest weights, in text order, without masked ones; of each: dots q·k,
    scaled (dots · scale), scores (the softmax's input: capped, biased, −∞ if masked) and weights e^(score − lse).
    there: number of keys of the query.  masked: how many of them are masked.  rest: the weight on all other keys.
    v, v_sum: (Dv) the requested key's value and Σ weight·value over all keys; null without a live model.
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


class LinkEffectJSON(TypedDict):
    """What hiding the key from the query in one head does: ‖h − h₀‖ ÷ ‖h₀‖ of the query's last hidden state.

    controls: the same for random other keys.  p_value: as `regard.effect` gives it; null without controls.
    method: "exact", the model ran again.
    """

    layer: int
    head: int
    weight: float
    effect: float
    controls: list[float]
    p_value: float | None
    method: Literal["exact"]


class HeadEffectsJSON(TypedDict):
    """The same in each head by itself, (layers, most heads): 0 where the mask hides the key, NaN where unknown."""

    weights: ArrayJSON
    effects: ArrayJSON
    method: Literal["exact"]


class EffectsAnswer(TypedDict):
    """What was measured of the link from a query to a key. links: in single heads.  heads: in all, or null."""

    token: int
    key: int
    links: list[LinkEffectJSON]
    heads: HeadEffectsJSON | None


class PredictionJSON(TypedDict):
    """A token or label.

    probability: at temperature 1; null for a regression.  before: its logit with all heads on; null if none is off.
    """

    id: int
    label: str
    logit: float
    probability: float | None
    before: float | None


class PredictedJSON(TypedDict):
    """What is predicted at one place: the 10 likeliest tokens or labels, best first; with heads off, those that were
    among the 10 likeliest before follow.

    token: the mask token that is filled, or the last token of the text, after which the next one is predicted; null for
    labels, and for the first token that an encoder–decoder writes.
    lse: log Σ e^(logit ÷ T) over the whole vocabulary for each of the answer's temperatures T, so that
    e^(logit ÷ T − lse) is the exact probability; null where probabilities are no softmax: of a regression, or of
    labels of which several may hold.
    """

    token: int | None
    lse: list[float] | None
    top: list[PredictionJSON]


class PredictionsAnswer(TypedDict):
    """What the model predicts.

    reason: why there are no places: there is no live model, it has no head for tokens or labels, or the text has no
    mask token to fill.
    without: [layer, head] of the heads whose output was set to 0.
    """

    kind: PredictionKind
    reason: NoPredictions | None
    without: list[list[int]]
    temperatures: list[float]
    places: list[PredictedJSON]


class HeadChangeJSON(TypedDict):
    """How a head changed between two sessions.

    moved: the share of its attention that goes elsewhere, ½ Σ |w − w′| of a row, the mean over the queries.
    query, key: of the link between words that changed most, in the first and in the second session.
    words: those of the query in either session, and those of the key.
    before, after: its weight in the first and in the second.
    """

    layer: int
    head: int
    moved: float
    query: list[int]
    key: list[int]
    words: list[list[str]]
    before: float
    after: float


class ChangesAnswer(TypedDict):
    """The heads that changed most between two sessions, best first.

    counts: tokens of either.  before, after: how many tokens at the beginning and at the end are aligned one by one;
    those between them are compared as one. With as many tokens in both, all are aligned one by one.
    complete: whether every query was compared; of long texts some are.
    """

    counts: list[int]
    before: int
    after: int
    heads: list[HeadChangeJSON]
    complete: bool
