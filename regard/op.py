"""The operation: `attention` computes it, `steps` keeps every intermediate. Observers are told of each call here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends import choose, reference
from regard.backends.call import Call, as_given, prepare
from regard.checks import check_dense
from regard.stages import Steps, project

__all__ = [
    "BeamObserver",
    "Observer",
    "attention",
    "observe",
    "observe_beams",
    "observed",
    "steps",
    "tell_beams",
    "unobserve",
    "unobserve_beams",
]

Observer = Callable[[Call, str, Any], None]
"""Told of each call: what was asked, the backend that ran, and its output (B, H, Nq, Dv)."""

BeamObserver = Callable[[Sequence[Sequence[int]], int], None]
"""Told of each beam search, see `observe_beams`."""

_observers: tuple[Observer, ...] = ()
_beam_observers: tuple[BeamObserver, ...] = ()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: object = None,
    bias: object = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Any:
    """softmax(q·kᵀ·scale)·v, by the fastest backend that computes exactly this call.

    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> regard.attention(x, x, x, mask=regard.masks.causal()).round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])

    Args:
        q: queries (…, H, Nq, D); also (N, D) and (B, N, D). NumPy in, NumPy out; torch in, torch out.
        k: keys (…, Hkv, Nk, D); query head h reads key head h // (H / Hkv).
        v: values (…, Hkv, Nk, Dv).
        mask: a regard.masks value, or booleans that broadcast to the weights (…, H, Nq, Nk); True = may look.
        bias: a regard.positions bias, or floats that broadcast to the weights; added after scale and softcap.
        scale: factor of the scores; default 1/√D.
        softcap: scores become softcap·tanh(scores/softcap); None for no cap.
        sinks: (H,), one logit per head that joins the softmax and has no value.
        dropout: probability of zeroing a weight, the others growing by 1/(1 − p); applied whenever above 0.
        backend: "auto", or one of "reference", "tiled", "sdpa", "flex", "sparse".

    Returns:
        The output (…, H, Nq, Dv) in q's dtype. A row that sees nothing is 0, with gradient 0.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: sizes that do not fit, or a named backend that cannot do the call.
    """
    call = prepare(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    chosen = choose(call, backend)
    with as_given(call.device):
        out = _empty(call) if 0 in call.sizes or 0 in v.shape else chosen.run(call)
    if call.numpy and isinstance(out, Tensor):
        out = out.detach().numpy()
    # In this order: a traced call must not depend on who observes, or torch.compile would compile it anew for them.
    if not torch.compiler.is_compiling() and _observers:
        for observer in _observers:
            observer(call, chosen.__name__.rpartition(".")[2], out)
    return out if q.ndim == 4 else out.reshape(*q.shape[:-1], v.shape[-1])


def _empty(call: Call) -> Any:
    """No queries: an empty result. No keys: zeros, still connected to the inputs for autograd."""
    group = call.q.shape[1] // max(1, call.k.shape[1])
    k, v = ((x.repeat(group, 1) if call.numpy else x.repeat_interleave(group, 1)) for x in (call.k, call.v))
    out = (call.q @ k.swapaxes(-1, -2)) @ v
    if call.wants_gradient:
        for extra in call.extras:
            out = out + extra.reshape(-1)[:0].sum()
    return out


def observe(observer: Observer) -> None:
    """Call `observer` after every later call of `attention`, in any thread.

    >>> import numpy as np, regard
    >>> from regard.op import observe, unobserve
    >>> seen = []
    >>> def note(call, backend, output):
    ...     seen.append((call.sizes, backend, output.shape))
    >>> observe(note)
    >>> _ = regard.attention(np.eye(3), np.eye(3), np.eye(3))
    >>> unobserve(note)
    >>> seen
    [((1, 1, 3, 3), 'sdpa', (1, 1, 3, 3))]

    Args:
        observer: called with the checked call, the backend's name and its output; what it raises, `attention` raises.
            Calls inside torch.compile are traced and not reported.
    """
    global _observers
    _observers = (*_observers, observer)


def observed() -> bool:
    """Whether there is an observer. Replayed CUDA graphs report nothing, so generation does not replay while there is.

    >>> observed()
    False
    """
    return bool(_observers)


def unobserve(observer: Observer) -> None:
    """Remove an observer. Raises ValueError if it was not added.

    >>> unobserve(print)
    Traceback (most recent call last):
        ...
    ValueError: <built-in function print> does not observe; observe(…) comes first
    """
    global _observers
    if observer not in _observers:
        raise ValueError(f"{observer!r} does not observe; observe(…) comes first")
    index = _observers.index(observer)
    _observers = _observers[:index] + _observers[index + 1 :]


def observe_beams(observer: BeamObserver) -> None:
    """Call `observer` after each beam search with the batch rows in which the returned sequences were computed.

    >>> from regard.op import observe_beams, tell_beams, unobserve_beams
    >>> observe_beams(print)
    >>> tell_beams([[0, 2], [0, -1]], 2)
    [[0, 2], [0, -1]] 2
    >>> unobserve_beams(print)

    Args:
        observer: called, in the thread of the search, with the rows (for each returned sequence its batch row in each
            pass of the model, −1 after its end) and the number of passes.
    """
    global _beam_observers
    _beam_observers = (*_beam_observers, observer)


def unobserve_beams(observer: BeamObserver) -> None:
    """Remove a beam observer, if it was added."""
    global _beam_observers
    _beam_observers = tuple(other for other in _beam_observers if other != observer)


def tell_beams(rows: Sequence[Sequence[int]] | Tensor, passes: int) -> None:
    """Report a beam search. Reading a tensor waits for the device, so it is read only if there is an observer."""
    if _beam_observers:
        listed = rows.tolist() if isinstance(rows, Tensor) else rows
        for observer in _beam_observers:
            observer(listed, passes)


def steps(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    x: Any = None,
    w_q: Any = None,
    w_k: Any = None,
    w_v: Any = None,
    num_heads: int = 1,
    mask: object = None,
    bias: object = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
) -> Steps:
    """The same operation with every intermediate kept and named: for small inputs, for teaching.

    >>> import numpy as np, regard
    >>> s = regard.steps(np.eye(2), np.eye(2), np.eye(2), labels=["The", "cat"])
    >>> s.weights.round(2)
    array([[0.67, 0.33],
           [0.33, 0.67]])

    Args:
        q: as in `attention`, like k, v, mask, bias, scale, softcap and sinks.
        k: keys.
        v: values.
        x: (…, N, d_model), instead of q, k and v, with the matrices w_q, w_k and w_v; q = x·w_q and so on.
        w_q: (d_model, num_heads·D), like w_k and w_v.
        w_k: of the keys.
        w_v: of the values.
        num_heads: heads in the columns of the matrices.
        mask: who may look at whom.
        bias: added to the scores.
        scale: default 1/√D.
        softcap: cap of the scores, or None.
        sinks: (H,), or None.
        labels: a word per query.
        key_labels: a word per key; default `labels` if there are as many.

    Returns:
        The intermediates, which print as tables.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`, and if both or neither of q, k, v and x are given.
    """
    given = [n for n, a in (("q", q), ("k", k), ("v", v)) if a is not None]
    source = [n for n, a in (("x", x), ("w_q", w_q), ("w_k", w_k), ("w_v", w_v)) if a is not None]
    if (len(given), len(source)) not in ((3, 0), (0, 4)):
        raise ValueError(
            f"steps takes q, k and v, or x with w_q, w_k and w_v; got {', '.join(given + source) or 'none'}"
        )
    if source:
        q, k, v = project(x, w_q, w_k, w_v, num_heads)
    elif num_heads != 1:
        raise ValueError("num_heads= goes with x, w_q, w_k and w_v; q, k and v carry their heads as an axis")
    call = prepare(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if not call.numpy:
        check_dense("q", call.q)
    if 0 in call.sizes:
        raise ValueError("nothing to show: {} batch rows, {} heads, {} queries, {} keys".format(*call.sizes))
    made = reference.stages(call, lead=tuple(q.shape[:-2]))
    return Steps.of(call, made, x=x, q=q, k=k, v=v, labels=labels, key_labels=key_labels)
