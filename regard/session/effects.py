"""What a link does: how far the query's vector moves when the key is hidden from it, in one head or in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from regard.edits import knock_out
from regard.edits.editing import edit
from regard.edits.effects import effect
from regard.edits.metrics import Metric, moved
from regard.lens.edit_records import Effect
from regard.models.model import eval_mode
from regard.session.heads import Layer
from regard.session.labels import shown
from regard.session.protocol import LinkEffectJSON, NoEffects
from regard.session.ranking import RankedLink
from regard.session.sentences import token_label
from regard.session.session import MOVED, Session

Link = tuple[int, int, int, int]
"""Layer, head, query, key."""

REASONS: dict[NoEffects, str] = {
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


def unsupported_reason(session: Session, layer: Layer) -> NoEffects | None:
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


def measure_link(session: Session, link: Link) -> LinkEffectJSON:
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

    Args:
        session: with the model that read the text.
        links: of the session.
        wanted: True measures, however long it takes; False does not; None does where it is quick.
        progress: called with the links done and their number.

    Raises:
        ValueError, LookupError: if they are wanted, and the model's attention cannot be edited.
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
