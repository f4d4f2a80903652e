"""`look`: attention that also says what it looked at. The same call as `regard.attention`, and no N×N.

It does not know models: `watch` does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.backends.call import Call, prepare
from regard.checks import check_dense
from regard.lens.doctor.mask_summary import see
from regard.lens.measures import engines, streaming
from regard.lens.measures.measures import MAP_SIZE, TOP, read_measures
from regard.lens.measures.weights import ComputedWeights
from regard.lens.view import View
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
    """Attention, and what it looked at: the fused output plus measures of the weights, exact, without N×N.

    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> view = regard.look(x, x, x, mask=regard.masks.causal())
    >>> view.row(2).round(2), view.received.round(2), view.top(1).index.ravel()
    (array([0.25, 0.25, 0.5 ]), array([1.58, 0.92, 0.5 ]), array([0, 1, 2]))

    q, k, v and mask, bias, scale, softcap, sinks, dropout, backend: as `regard.attention`. Weights are those before
        dropout. The output carries gradients as that of `attention` does; measures carry none.
    measures: names among "entropy", "received", "max_logit", "effective", "map", "top"; default the first three and
        "map", in one pass. What is not named is measured when it is first asked for, by another pass.
    size, top: of the map, and how many links per row.

    The view refers to q and k; it does not copy them. Raises as `attention` does, and ValueError for a measure that
    does not exist.
    """
    wanted = read_measures(measures, size, top)
    call = prepare(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    if call.numpy and call.q.dtype.itemsize > 8:
        raise TypeError(f"{call.q.dtype} exists in NumPy only; look needs float64 or narrower")
    if not call.numpy:
        check_dense("q", call.q)
    output, lse = _forward(call, backend)
    inner = call.in_torch()
    found, engine = engines.measure(inner, lse, wanted)
    weights = ComputedWeights(inner, found["lse"])
    output = output if q.ndim == 4 else output.reshape(*q.shape[:-1], v.shape[-1])
    return View(
        sizes=call.sizes,
        held=found | {"lse": weights.lse.to(inner.wide)},
        given_output=output.detach().numpy() if call.numpy else output,
        weights=weights,
        place=see(weights.call),
        size=wanted.size,
        lead=None if q.ndim == 4 else tuple(q.shape[:-2]),
        numpy=call.numpy,
        engine=engine,
        links=wanted.top,
    )


def _forward(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Output and lse; of nothing there is no kernel, and `attention` says what comes of it."""
    if 0 not in call.sizes and 0 not in call.v.shape:
        return engines.forward(call, backend)
    inner = call.in_torch()
    keywords = {name: getattr(inner, name) for name in ("mask", "bias", "scale", "softcap", "sinks", "dropout")}
    return attention(inner.q, inner.k, inner.v, **keywords, backend=backend), streaming.lse_of(inner)
