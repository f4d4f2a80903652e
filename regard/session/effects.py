"""What changes when the model runs again without a link, without some heads, or on a text with another word.

Axis letters: H heads, N positions, G groups of aligned tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.edits import ablate, knock_out
from regard.edits.editing import edit
from regard.edits.effects import effect
from regard.edits.metrics import Metric, moved
from regard.lens.edit_records import Effect
from regard.models.model import eval_mode
from regard.models.text import TextModel
from regard.session import protocol
from regard.session.heads import Layer
from regard.session.labels import is_word, shown, token_label, word_numbers
from regard.session.ranking import AT_ONCE, FIRST_LOOK, RankedLink
from regard.session.session import MOVED, Session, look_at, token_labels

Link = tuple[int, int, int, int]
"""Layer, head, query, key."""

REASONS: dict[protocol.NoEffects, str] = {
    "no_model": "there is no model to run again: a capture file holds what was read, not the model that read it",
    "repeated": "the model runs one layer several times, and an edit would change every run",
    "windows": "the layer reads in windows, so its queries are not the vectors that the model returns",
    "other_tokens": "the queries and keys of this layer are not the tokens of the text",
}
# A run of the model takes about 2 operations for each parameter and token, and a link one run. On two cores of a CPU
# 2·10¹¹ operations take about 2 s: 8 links of 500 tokens in MiniLM, or of 90 tokens in GPT-2.
OPERATIONS = 2 * 10**11
LONGEST = 1024  # tokens; beyond them the scores, which the estimate leaves out, weigh in too

Why = Literal["measured", "off", "cost", "capture", "links", "model"]
"""Whether the effects of links were measured, or why not: they were not wanted; it would take long; a capture has no
model to run; there are no links; this model's attention cannot be edited."""


@dataclass(frozen=True)
class LinkEffects:
    """The effects of links: None where they were not measured, or are not finite.

    reason: why this model's attention cannot be edited.
    """

    why: Why
    values: list[float | None]
    reason: str = ""


# --------------------------------------------------------------------------------------------------------------- checks


def unsupported_reason(session: Session, layer: Layer) -> protocol.NoEffects | None:
    """Why the links of a layer cannot be measured, a key of `REASONS`; None if they can."""
    if session.model is None or session.again is None:
        return "no_model"
    if any(one.call is not None for one in session.layers):
        return "repeated"
    if layer.windows > 1:
        return "windows"
    return "other_tokens" if layer.sides is None and layer.start is None else None


def check_single_runs(session: Session) -> None:
    """Raise ValueError if a module runs several times in one pass, as in ALBERT: an edit would change every run."""
    if session.model is not None and any(layer.call is not None for layer in session.layers):
        raise ValueError(f"{session.model.family.title} cannot be measured: {REASONS['repeated']}")


def check_link(session: Session, token: int, key: int, layer: int | None = None, head: int | None = None) -> None:
    """Raise before anything runs if a link, in one head or in any, cannot be measured.

    Raises:
        IndexError: a layer, head, query or key that is not there.
        ValueError: a layer without a head, or the reverse; the mask hides the key; or a reason of `REASONS`.
    """
    if (layer is None) != (head is None):
        raise ValueError(f"a head has a layer and a number: got layer {layer} and head {head}")
    if layer is not None and not 0 <= layer < len(session.layers):
        raise IndexError(f"layer {layer} is out of range: there are {len(session.layers)} layers, counted from 0")
    wanted = session.layers if layer is None else session.layers[layer : layer + 1]
    reasons = [unsupported_reason(session, one) for one in wanted]
    layers = [one for one, reason in zip(wanted, reasons, strict=True) if reason is None]
    if not layers:
        reason = reasons[0] if reasons else None
        raise ValueError(f"this link cannot be measured: {REASONS[reason or 'no_model']}")
    for name, value, axis in (("head", head, 1), ("token", token, 2), ("key", key, 3)):
        count = max(one.view.sizes[axis] for one in layers)
        if value is not None and not 0 <= value < count:
            raise IndexError(f"{name} {value} is out of range: there are {count}, counted from 0")
    picked = slice(None) if head is None else slice(head, head + 1)
    if not any(bool((_weights(one, token, key)[picked] != 0).any()) for one in layers):
        words = {at: shown(token_label(session, layers[0].index, at)) for at in (token, key)}
        query, to = (f"“{words[at]}” ({at})" if words[at] else f"token {at}" for at in (token, key))
        where = "any layer" if layer is None else f"layer {layer}"
        raise ValueError(f"{query} does not see {to} in {where}: the mask hides it, so there is no link to knock out")


# -------------------------------------------------------------------------------------------------------------- effects


def measure_link(session: Session, link: Link) -> protocol.LinkEffectJSON:
    """The effect of a link in one head beside random other keys, as `regard.effect` gives it; kept in the session.

    Raises as `check_link` and `regard.effect` do.
    """
    layer, head, token, key = link
    check_link(session, token, key, layer, head)
    model, again = session.model, session.again
    assert model is not None
    assert again is not None
    metric = moved_metric(session.layers[layer], [token], _vector_name(session, layer, token))
    with eval_mode(model):
        result = effect(again, model, knock_out(layer, head, token, key), metric)
    _keep(session, link, result)
    return session.effects.links[link]


def measure_links(
    session: Session,
    links: Sequence[RankedLink],
    wanted: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LinkEffects:
    """The effects of links of a text, each in its head and without controls; kept in the session.

    A session from a capture file gives back those that the file has.

    wanted: True measures, however long it takes, and raises if this model's attention cannot be edited; False does not
    measure; None does where it is quick.  progress: called with the links done and their number.
    """
    nothing: list[float | None] = [None] * len(links)
    if wanted is False:
        return LinkEffects("off", nothing)
    if session.model is None:
        kept = session.effects.links
        stored = [kept[at]["effect"] if (at := link[:4]) in kept else None for link in links]
        return LinkEffects("capture" if stored == nothing else "measured", stored)
    if not links:
        return LinkEffects("links", nothing)
    if wanted is None and (len(session.tokens) > LONGEST or operations(session, len(links)) > OPERATIONS):
        return LinkEffects("cost", nothing)
    values: list[float | None] = []
    try:
        check_single_runs(session)
        assert session.again is not None
        plain = session.again()
        for done, link in enumerate(links, 1):
            value = _effect(session, link[:4], plain)
            values.append(value if isfinite(value) else None)
            if isfinite(value):
                name = _vector_name(session, link.layer, link.query)
                _keep(session, link[:4], Effect(knock_out(*link[:4]), name, 0.0, value, link.weight))
            if progress is not None:
                progress(done, len(links))
    except (LookupError, ValueError) as problem:
        if wanted:
            raise
        return LinkEffects("model", nothing, str(problem))
    return LinkEffects("measured", values)


def operations(session: Session, links: int) -> int:
    """About how many operations the effects of so many links take; see OPERATIONS."""
    assert session.model is not None
    parameters = sum(parameter.numel() for parameter in session.model.parameters())
    return 2 * parameters * len(session.tokens) * (links + 1)


def measure_heads(session: Session, token: int, key: int) -> Iterator[tuple[int, int]]:
    """The effect of a link in each head by itself; yields (heads done, heads), and keeps all in the session at the end.

    The model runs between two steps only. Raises as `check_link` and `regard.edit` do.
    """
    check_link(session, token, key)
    assert session.again is not None
    most = max(layer.view.sizes[1] for layer in session.layers)
    weights, effects = (torch.full((len(session.layers), most), float("nan")) for _ in range(2))
    layers = [layer for layer in session.layers if unsupported_reason(session, layer) is None]
    plain = session.again()
    layers = [layer for layer in layers if _vectors(plain, layer) is not None]
    places = [(layer.index, head) for layer in layers for head in range(layer.view.sizes[1])]
    if not places:
        raise ValueError("this link cannot be measured: the model does not return a vector for each query")
    for layer in layers:
        row = _weights(layer, token, key)
        weights[layer.index, : len(row)] = row
    for done, at in enumerate(places, 1):
        effects[at] = _effect(session, (*at, token, key), plain) if float(weights[at]) != 0 else 0.0
        yield done, len(places)
    session.effects.heads[token, key] = weights, effects


def _effect(session: Session, link: Link, plain: object) -> float:
    """How far the query's vector moves from that of the plain output when the link is knocked out."""
    assert session.model is not None
    assert session.again is not None
    with edit(session.model, knock_out(*link)):
        output = session.again()
    return float(moved_metric(session.layers[link[0]], [link[2]], "").function(output, plain))


def _keep(session: Session, link: Link, result: Effect) -> None:
    session.effects.add(link, result)
    session.capture.add_effect(result)


def _vector_name(session: Session, layer: int, token: int) -> str:
    """The metric's name in captures: the English key of its translation."""
    word = "" if session.layers[layer].start is None else shown(session.tokens[token])
    return f"{MOVED}“{word}”" if word else f"{MOVED}token {token}"


def _weights(layer: Layer, token: int, key: int) -> Tensor:
    """The weight of a link in each head of a layer, (H,); 0 where the layer has no such query or key."""
    _, heads, nq, nk = layer.view.sizes
    if token >= nq or key >= nk:
        return torch.zeros(heads)
    return torch.as_tensor(layer.view.row(token))[0, :, key].float().cpu()


def moved_metric(layer: Layer, tokens: Sequence[int], name: str) -> Metric:
    """`metrics.moved` of the vectors that some queries of a layer become, as one vector."""
    distance = moved(0)

    def function(output: object, plain: object) -> Tensor:
        new, old = _vectors(output, layer), _vectors(plain, layer)
        if new is None or old is None:
            raise ValueError(
                f"this link cannot be measured: layer {layer.index} has {layer.view.sizes[2]} queries, and the model "
                "does not return a vector for each of them"
            )
        new, old = (hidden[:1, list(tokens)].flatten(1)[:, None] for hidden in (new, old))  # (1, 1, tokens · D)
        return distance.function(new, old)

    return Metric(name, function, relative=True)


def _vectors(output: object, layer: Layer) -> Tensor | None:
    """The last hidden state (B, N, D) that a layer's queries become: the encoder's, but for words beside an image."""
    beside = layer.sides is not None and bool((layer.sides.queries.kind == "text").any())
    names = ("last_hidden_state",) if beside else ("encoder_last_hidden_state", "last_hidden_state")
    for hidden in (getattr(output, name, None) for name in names):
        if isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.shape[1] == layer.view.sizes[2]:
            return hidden
    return None


# ---------------------------------------------------------------------------------------------------------- predictions

TASKS: dict[str, protocol.PredictionKind] = {
    "text-generation": "next_token",
    "text2text-generation": "next_token",
    "image-to-text": "next_token",
    "image-text-to-text": "next_token",
    "fill-mask": "fill_mask",
    "pretraining": "fill_mask",
    "text-classification": "labels",
    "image-classification": "labels",
    "image-classification-cls": "labels",
}
TOP = 10
# The log-sum-exp of all logits ÷ T cannot be told from the largest ones, so it is given for these T.
TEMPERATURES = tuple(round(0.1 * n, 1) for n in range(1, 21))


def predict(session: Session, without: Sequence[tuple[int, int]] = ()) -> protocol.PredictionsAnswer:
    """Run the model once and read what it predicts, with the output of some heads, (layer, head), set to 0.

    Raises:
        IndexError: a layer or head that is not there.
        ValueError: logits that are NaN; heads of a model that runs one layer several times, or that cannot be edited.
    """
    heads: dict[int, set[int]] = {}
    for layer, head in without:
        if not 0 <= layer < len(session.layers) or not 0 <= head < session.layers[layer].view.sizes[1]:
            raise IndexError(f"there is no head {head} in layer {layer}")
        heads.setdefault(layer, set()).add(head)
    if session.model is None or session.again is None:
        return _answer("none", without, reason="no_model")
    kind = TASKS.get(session.model.task)
    if kind is None:
        return _answer("none", without, reason="no_head")
    logits, before = _logits(session, heads), _logits(session, {}) if heads else None
    if logits is None:
        return _answer("none", without, reason="no_head")
    if kind == "labels":
        return _answer(kind, without, [_labels(session, logits, before)])
    if kind == "next_token":
        last = len(session.tokens) - 1 if len(logits) == len(session.tokens) else None  # else of a decoder's own text
        return _answer(kind, without, [_tokens(session, logits, before, -1, last)])
    mask = session.model.tokenizer.ids_of.mask
    (sign,) = session.model.tokenizer.tokens([mask]) if mask is not None else (None,)
    masks = [at for at, label in enumerate(session.tokens) if label == sign]
    places = [_tokens(session, logits, before, at, at) for at in masks]
    return _answer(kind, without, places, reason=None if places else "no_mask")


def _logits(session: Session, heads: dict[int, set[int]]) -> Tensor | None:
    """(N, V) or (labels,) in fp64, with these heads switched off; None if the model has none."""
    assert session.model is not None
    assert session.again is not None
    with ExitStack() as stack:
        if heads:
            check_single_runs(session)
            edits = [ablate(session.layers[layer].path, sorted(listed)) for layer, listed in heads.items()]
            stack.enter_context(edit(session.model, *edits))
        logits = getattr(session.again(), "logits", None)
    if not isinstance(logits, Tensor):
        return None
    if bool(logits.isnan().any()):
        raise ValueError("the model's logits are NaN: capture.doctor(), or regard doctor, says where NaN came first")
    return logits[0].double().cpu()


def _answer(
    kind: protocol.PredictionKind,
    without: Sequence[tuple[int, int]],
    places: Sequence[protocol.PredictedJSON] = (),
    reason: protocol.NoPredictions | None = None,
) -> protocol.PredictionsAnswer:
    return {
        "kind": kind,
        "reason": reason,
        "without": [[*place] for place in without],
        "temperatures": list(TEMPERATURES),
        "places": list(places),
    }


def _tokens(
    session: Session, logits: Tensor, before: Tensor | None, at: int, token: int | None
) -> protocol.PredictedJSON:
    assert session.model is not None
    logits, before = logits[at], None if before is None else before[at]  # (V,)
    ids = _likeliest(logits, before)
    return _predicted(logits, before, ids, token_labels(session.model, ids), token)


def _labels(session: Session, logits: Tensor, before: Tensor | None) -> protocol.PredictedJSON:
    assert session.model is not None
    names, problem = session.model.config.labels(len(logits)), session.model.config.get("problem_type")
    ids = _likeliest(logits, before)
    prediction = _predicted(logits, before, ids, [names[n] for n in ids.tolist()], None)
    if problem == "regression" or len(logits) == 1:
        chances: list[float | None] = [None] * len(ids)
    elif problem == "multi_label_classification":
        chances = list(logits[ids].sigmoid().tolist())
    else:
        return prediction
    for one, chance in zip(prediction["top"], chances, strict=True):
        one["probability"] = chance
    return prediction | {"lse": None}


def _likeliest(logits: Tensor, before: Tensor | None) -> Tensor:
    """The numbers of the largest logits, largest first, then of those that were the largest before."""
    ids = logits.topk(min(TOP, len(logits))).indices
    if before is None:
        return ids
    lost = before.topk(min(TOP, len(before))).indices
    lost = lost[~torch.isin(lost, ids)]
    return torch.cat([ids, lost[logits[lost].argsort(descending=True)]])


def _predicted(
    logits: Tensor, before: Tensor | None, ids: Tensor, labels: list[str], token: int | None
) -> protocol.PredictedJSON:
    sums = [float((logits / temperature).logsumexp(0)) for temperature in TEMPERATURES]
    chances = logits.softmax(0)[ids].tolist()
    values = logits[ids].clamp(min=-1e300).tolist()  # −∞ is no JSON
    old = [None] * len(ids) if before is None else before[ids].clamp(min=-1e300).tolist()
    rows = zip(ids.tolist(), labels, values, chances, old, strict=True)
    return {
        "token": token,
        "lse": sums,
        "top": [{"id": n, "label": s, "logit": logit, "probability": p, "before": b} for n, s, logit, p, b in rows],
    }


# ---------------------------------------------------------------------------------------------------- a word exchanged

LONGEST_WORD = 200  # characters


def swapped_text(session: Session, token: int, word: str) -> str:
    """The text of a session with another word in place of the one that a token belongs to.

    Raises:
        IndexError: a token that is not there.
        ValueError: no text or model, a special token, or a word that is empty or longer than 200 characters.
    """
    if session.text is None or session.model is None or session.frames:
        raise ValueError("a word can be exchanged where a model reads a text: open one with `regard serve --model`")
    if not 0 <= token < len(session.tokens):
        raise IndexError(f"token {token} is out of range: there are {len(session.tokens)} tokens, counted from 0")
    if not word.strip() or len(word) > LONGEST_WORD:
        raise ValueError(f"the new word must have 1 to {LONGEST_WORD} characters, got {len(word.strip())}")
    numbers = word_numbers(session.tokens)
    pieces = [at for at, number in enumerate(numbers) if number == numbers[token]]
    offsets = session.model.tokenizer.encode(session.text).offsets
    spans = [span for at in pieces if (span := offsets[at]) is not None and span[0] < span[1]]
    if not spans:
        raise ValueError(f"token {token}, {session.tokens[token]!r}, is no word of the text: choose another")
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    old = session.text[start:end]
    start, end = start + len(old) - len(old.lstrip()), end - len(old) + len(old.rstrip())
    return session.text[:start] + word.strip() + session.text[end:]


def swap_word(session: Session, token: int, word: str) -> Session:
    """A new session of the same model on the changed text, cut where the model's positions end. Raises as above."""
    text = swapped_text(session, token, word)
    assert session.model is not None
    most = session.model.max_positions if isinstance(session.model, TextModel) else None
    return look_at(text, session.model, truncate=most is not None and len(session.tokens) == most)


class ChangedHead(NamedTuple):
    """How much of a head's attention moved, and the link between two words that changed most.

    moved: ½ Σ |w − w'| of a query's row, the mean over the queries: the share of attention that goes elsewhere.
    query, key: of the link, in the first and in the second session.  before, after: its weight there.
    """

    layer: int
    head: int
    moved: float
    query: tuple[int, int]
    key: tuple[int, int]
    before: float
    after: float


@dataclass(frozen=True)
class Alignment:
    """Which tokens of two texts are the same: all if there are as many, else those before and after what differs.

    before, after: tokens alike at the beginning and at the end.  What is between them is one group.
    """

    counts: tuple[int, int]
    before: int
    after: int

    @property
    def groups(self) -> int:
        """G, of tokens that are compared with each other."""
        return self.before + self.after + (self.counts[0] != self.counts[1])

    def numbers(self, side: int) -> Tensor:
        """(N,) the group of each token."""
        count = self.counts[side]
        at = torch.arange(count)
        return torch.where(at < self.before, at, (at - count + self.groups).clamp(min=self.before))

    def first(self, group: int, side: int) -> int:
        """The first token of a group."""
        return group if group <= self.before else group - self.groups + self.counts[side]


def align(a: Session, b: Session) -> Alignment:
    """Align the tokens of two sessions."""
    counts = len(a.tokens), len(b.tokens)
    if counts[0] == counts[1]:
        return Alignment(counts, counts[0], 0)
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ends = list(zip(reversed(a.tokens), reversed(b.tokens), strict=False))[: min(counts) - before]
    after = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    if before + after == min(counts):  # a token was added or taken: it is compared together with a neighbour
        before, after = (before - 1, after) if before else (before, after - 1)
    return Alignment(counts, before, after)


def changed_heads(a: Session, b: Session) -> tuple[list[ChangedHead], bool]:
    """The heads of two sessions of one model, those whose attention moved most first; and whether all rows were read.

    Layers are those with the same path in both, whose queries and keys are the tokens. Of more than 2²⁵ weights, rows
    at even distances are compared. Pieces of a word that there are more or fewer of count as one token: their weights
    are added as keys, and averaged as queries.

    Raises LookupError if no layer can be compared.
    """
    layers = [
        (one, other)
        for one, other in zip(a.layers, b.layers, strict=False)
        if (one.path, one.call, one.view.sizes[1]) == (other.path, other.call, other.view.sizes[1])
        and all(layer.rankable and layer.start == 0 and layer.windows == 1 for layer in (one, other))
        and all(layer.sizes == (len(s.tokens),) * 2 for layer, s in ((one, a), (other, b)))
    ]
    if not layers:
        raise LookupError("the sessions cannot be compared: they need exact rows of the same layers of one model")
    aligned = align(a, b)
    total = sum(layer.view.sizes[1] * max(aligned.counts) ** 2 for layer, _ in layers)
    step = 1 + (total - 1) // FIRST_LOOK
    groups = torch.arange(0, aligned.groups, step)
    words = torch.tensor([is_word(a.tokens[aligned.first(group, 0)]) for group in range(aligned.groups)])
    changes = [change for pair in layers for change in _layer_changes(*pair, aligned, groups, words)]
    return sorted(changes, key=lambda change: (-change.moved, change)), step == 1


def _layer_changes(one: Layer, other: Layer, aligned: Alignment, groups: Tensor, words: Tensor) -> list[ChangedHead]:
    """The changes of each head. groups: those whose rows are read.  words: (G,) which are words."""
    heads = one.view.sizes[1]
    moved = torch.zeros(heads, dtype=torch.float64)
    best = [(-1.0, 0, 0, 0.0, 0.0)] * heads  # change, query group, key group, before, after
    every = torch.arange(aligned.groups)
    at_once = max(1, AT_ONCE // (heads * max(aligned.counts)))
    for part in torch.split(groups, at_once):
        old, new = (_grouped(layer, aligned, side, part) for side, layer in enumerate((one, other)))  # (H, g, G)
        gap = (new - old).abs()
        moved += gap.sum((1, 2)) / 2
        values, places = gap.masked_fill(~words | ~words[part, None] | (part[:, None] == every), 0.0).flatten(1).max(1)
        for head, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            if value > best[head][0]:
                i, j = divmod(place, aligned.groups)
                best[head] = value, int(part[i]), j, float(old[head, i, j]), float(new[head, i, j])
    changes = []
    for head, (_, query, key, before, after) in enumerate(best):
        pairs = [(aligned.first(group, 0), aligned.first(group, 1)) for group in (query, key)]
        share = float(moved[head]) / len(groups)
        changes.append(ChangedHead(one.index, head, share, pairs[0], pairs[1], before, after))
    return changes


def _grouped(layer: Layer, aligned: Alignment, side: int, groups: Tensor) -> Tensor:
    """(H, g, G) the weights of some groups of queries, averaged, on all groups of keys, summed; fp64."""
    numbers = aligned.numbers(side)  # (N,)
    rows = torch.isin(numbers, groups).nonzero().view(-1)
    weights = layer.view.tile(rows.tolist(), slice(None))[0].double().cpu()  # (H, r, N)
    into = torch.searchsorted(groups, numbers[rows])  # (r,)
    summed = weights.new_zeros(len(weights), len(rows), aligned.groups).index_add_(2, numbers, weights)
    sums = weights.new_zeros(len(weights), len(groups), aligned.groups).index_add_(1, into, summed)
    counts = torch.bincount(into, minlength=len(groups)).clamp(min=1)
    averaged: Tensor = sums / counts[:, None]
    return averaged
