"""What a link does: how far the query's vector moves when the key is hidden from it, in one head or in each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.edits import knock_out
from regard.edits.editing import edit
from regard.edits.effects import effect
from regard.edits.metrics import Metric, moved
from regard.session.heads import Layer
from regard.session.labels import shown
from regard.session.protocol import LinkEffectJSON, NoEffects
from regard.session.sentences import key_label
from regard.session.session import Session
from regard.tasks.inputs import eval_mode

Link = tuple[int, int, int, int]
"""Layer, head, query, key."""

REASONS: dict[NoEffects, str] = {
    "no_model": "there is no model to run again: a capture file holds what was read, not the model that read it",
    "repeated": "the model runs one layer several times, and an edit would change every run",
    "windows": "the layer reads in windows, so its queries are not the vectors that the model returns",
    "other_tokens": "the queries and keys of this layer are not the tokens of the text",
}


def unsupported_reason(session: Session, layer: Layer) -> NoEffects | None:
    """Why the links of a layer cannot be measured, a key of `REASONS`; None if they can."""
    if session.model is None or session.again is None:
        return "no_model"
    if any(one.call is not None for one in session.layers):
        return "repeated"
    if layer.windows > 1:
        return "windows"
    return "other_tokens" if layer.sides is None and layer.start is None else None


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
        words = {at: shown(key_label(session, layers[0].index, at)) for at in (token, key)}
        query, to = (f"“{words[at]}” ({at})" if words[at] else f"token {at}" for at in (token, key))
        where = "any layer" if layer is None else f"layer {layer}"
        raise ValueError(f"{query} does not see {to} in {where}: the mask hides it, so there is no link to knock out")


def measure_link(session: Session, link: Link) -> LinkEffectJSON:
    """The effect of a link in one head beside random other keys, as `regard.effect` gives it; kept in the session.

    Raises as `check_link` and `regard.effect` do.
    """
    layer, head, token, key = link
    check_link(session, token, key, layer, head)
    model, again = session.model, session.again
    assert model is not None
    assert again is not None
    with eval_mode(model):
        found = effect(again, model, knock_out(layer, head, token, key), _moved(session.layers[layer], token))
    session.effects.add(link, found)
    session.capture.add_effect(found)
    return session.effects.links[link]


def measure_heads(session: Session, token: int, key: int) -> Iterator[tuple[int, int]]:
    """The effect of a link in each head by itself; yields (heads done, heads), and keeps all in the session at the end.

    The model runs between two steps only. Raises as `check_link` and `regard.edit` do.
    """
    check_link(session, token, key)
    model, again = session.model, session.again
    assert model is not None
    assert again is not None
    most = max(layer.view.sizes[1] for layer in session.layers)
    weights, effects = (torch.full((len(session.layers), most), float("nan")) for _ in range(2))
    layers = [layer for layer in session.layers if unsupported_reason(session, layer) is None]
    plain = again()
    layers = [layer for layer in layers if _vectors(plain, layer) is not None]
    places = [(layer, head) for layer in layers for head in range(layer.view.sizes[1])]
    if not places:
        raise ValueError("this link cannot be measured: the model does not return a vector for each query")
    for layer in layers:
        row = _weights(layer, token, key)
        weights[layer.index, : len(row)] = row
    for done, (layer, head) in enumerate(places, 1):
        at = layer.index, head
        effects[at] = 0.0
        if float(weights[at]) != 0:
            with eval_mode(model), torch.no_grad(), edit(model, knock_out(layer.index, head, token, key)):
                output = again()
            effects[at] = float(_moved(layer, token).function(output, plain))
        yield done, len(places)
    session.effects.heads[token, key] = weights, effects


def _weights(layer: Layer, token: int, key: int) -> Tensor:
    """The weight of a link in each head of a layer, (H,); 0 where the layer has no such query or key."""
    _, heads, nq, nk = layer.view.sizes
    if token >= nq or key >= nk:
        return torch.zeros(heads)
    return torch.as_tensor(layer.view.row(token))[0, :, key].float().cpu()


def _moved(layer: Layer, token: int) -> Metric:
    """`metrics.moved` of the vectors that the queries of a layer become."""
    distance = moved(token)

    def function(output: object, plain: object) -> Tensor:
        new, old = _vectors(output, layer), _vectors(plain, layer)
        if new is None or old is None:
            raise ValueError(
                f"this link cannot be measured: layer {layer.index} has {layer.view.sizes[2]} queries, and the model "
                "does not return a vector for each of them"
            )
        return distance.function(new, old)

    return Metric(distance.name, function, relative=True)


def _vectors(output: object, layer: Layer) -> Tensor | None:
    """The last hidden state (B, N, D) that a layer's queries become: the encoder's, but for words beside an image."""
    beside = layer.sides is not None and bool((layer.sides.queries.kind == "text").any())
    names = ("last_hidden_state",) if beside else ("encoder_last_hidden_state", "last_hidden_state")
    for hidden in (getattr(output, name, None) for name in names):
        if isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.shape[1] == layer.view.sizes[2]:
            return hidden
    return None
