"""`look`: `regard.attention` that also measures its weights, without an N×N matrix."""

from __future__ import annotations

from typing import Any

from regard.backends.call import prepare
from regard.checks import check_dense
from regard.lens.measures import engines
from regard.lens.measures.measures import MAP_SIZE, TOP, read_measures
from regard.lens.measures.weights import ComputedWeights
from regard.lens.values import StoredValues
from regard.lens.view import View
from regard.lens.visibility import summarise_mask
from regard.op import attention

__all__ = ["look"]


def look(
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
    measures: object = None,
    size: int = MAP_SIZE,
    top: int = TOP,
) -> View:
    """Compute attention with a fused kernel, and exact measures of its weights without an N×N matrix.

    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> view = regard.look(x, x, x, mask=regard.masks.causal())
    >>> view.row(2).round(2), view.received.round(2), view.top(1).index.ravel()
    (array([0.25, 0.25, 0.5 ]), array([1.58, 0.92, 0.5 ]), array([0, 1, 2]))

    Args:
        q: queries, as for `regard.attention`.
        k: keys.
        v: values.
        mask: as for `regard.attention`.
        bias: as for `regard.attention`.
        scale: as for `regard.attention`.
        softcap: as for `regard.attention`.
        sinks: as for `regard.attention`.
        dropout: as for `regard.attention`; the weights are those before dropout.
        backend: as for `regard.attention`.
        measures: names among "entropy", "received", "map", "max_logit", "effective", "top"; default the first three, in
            one pass. Other measures are computed by another pass when they are first read.
        size: rows and columns of the map.
        top: links per row.

    Returns:
        A `View`. Its output carries gradients as that of `attention`; measures carry none. It refers to q, k and v.

    Raises:
        ValueError: there is no such measure; and as `attention`.
        TypeError: as `attention`.
    """
    wanted = read_measures(measures, size, top)
    call = prepare(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    if call.numpy and call.q.dtype.itemsize > 8:
        raise TypeError(f"{call.q.dtype} exists in NumPy only; look needs float64 or narrower")
    if not call.numpy:
        check_dense("q", call.q)
    inner = call.in_torch()
    if 0 not in call.sizes and 0 not in call.v.shape:
        output, lse = engines.forward(call, backend)
    else:  # there is no kernel for empty tensors, but `attention` defines the result
        keywords = {name: getattr(inner, name) for name in ("mask", "bias", "scale", "softcap", "sinks", "dropout")}
        output, lse = attention(inner.q, inner.k, inner.v, **keywords, backend=backend), engines.lse_of(inner)
    results, engine = engines.measure(inner, lse, wanted)
    weights = ComputedWeights(inner, results["lse"])
    output = output if q.ndim == 4 else output.reshape(*q.shape[:-1], v.shape[-1])
    return View(
        sizes=call.sizes,
        held=results | {"lse": weights.lse.to(inner.wide)},
        given_output=output.detach().numpy() if call.numpy else output,
        weights=weights,
        place=summarise_mask(weights.call),
        size=wanted.size,
        lead=None if q.ndim == 4 else tuple(q.shape[:-2]),
        numpy=call.numpy,
        engine=engine,
        links=wanted.top,
        kept_values=StoredValues(inner.v),
    )
