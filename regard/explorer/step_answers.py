"""One query's way through attention, with the real numbers: q·k, ÷√d, softmax, Σ w·v, and q⊙k for one pair.

For `answers.py`, which says what all share. Values are not kept with a capture: a live model is run once more for them.

Axis letters: H heads, N positions (Nq queries, Nk keys), D head size.

It does not know who asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.explorer.answer_types import Array, Steps
from regard.explorer.asked import checked_index, exact_weights, find_head
from regard.explorer.one_head import Scored
from regard.explorer.packing import finite, packed
from regard.explorer.seen_layers import SeenLayer
from regard.explorer.sessions import Session
from regard.lens.assembling import Assembled
from regard.lens.measuring.weights import Remembered, Weights

__all__ = ["steps"]

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
    if isinstance(weights, Assembled):
        n = 0
        while token >= weights.counts[n]:
            token, n = token - weights.counts[n], n + 1
        moved = weights.rows[n]
        batch, first, weights = (batch if moved is None else moved[batch]), weights.first[n], weights.parts[n]
    if not isinstance(weights, Remembered):
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
