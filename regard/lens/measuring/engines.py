"""Which engine makes the measuring pass: Triton on CUDA where it can, plain torch everywhere else.

Both give the same measures of the same weights; a view says which one it came from.
"""

from __future__ import annotations

from torch import Tensor

from regard.backends.call import Call
from regard.devices import no_triton
from regard.lens.measuring import streaming
from regard.lens.measuring.measures import Wanted
from regard.lens.measuring.weights import Given, Remembered, Weights

__all__ = ["measure", "measure_weights", "why_not_triton"]


def why_not_triton(call: Call, wanted: Wanted) -> str | None:
    """Why the Triton engine does not make this pass, or None.

    >>> import torch
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> why_not_triton(prepare(x, x, x), Wanted(frozenset(["entropy"])))
    'q is on cpu'
    """
    if call.device.type != "cuda":
        return f"q is on {call.device.type}"
    if (missing := no_triton()) is not None:
        return missing
    from regard.lens.measuring import gpu

    return gpu.refuse(call, wanted)


def measure(call: Call, lse: Tensor, wanted: Wanted) -> tuple[dict[str, Tensor], str]:
    """What `wanted` names of this call's weights, "lse", and the engine that measured it: "triton", or "torch (why)".

    >>> import torch
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> found, engine = measure(prepare(x, x, x), torch.full((1, 1, 2), 2.0).log(), Wanted(frozenset(["effective"])))
    >>> found["effective"], engine
    (tensor([[[2., 2.]]]), 'torch')

    call: on torch tensors.  lse: (B, H, Nq).
    "lse" is what the weights were made with: the given one, or, where that is large, one of fp64 scores and in fp64,
    for `Remembered`.
    """
    why = why_not_triton(call, wanted)
    if why is not None:
        return streaming.measure(call, lse, wanted), "torch" if call.device.type == "cpu" else f"torch ({why})"
    from regard.lens.measuring import gpu

    return gpu.measure(call, lse, wanted), "triton"


def measure_weights(weights: Weights, wanted: Wanted) -> dict[str, Tensor]:
    """The same from any source of exact weights.

    >>> import torch
    >>> measure_weights(Given(torch.eye(2).view(1, 1, 2, 2)), Wanted(frozenset(["received"])))
    {'received': tensor([[[1., 1.]]])}

    Raises LookupError for "max_logit" where the scores are not known.
    """
    if isinstance(weights, Remembered):
        found, _ = measure(weights.call, weights.lse, wanted)
        del found["lse"]  # a view has one already, which may be of other scores: see `raise_rows`
        return found
    if "max_logit" in wanted.names and not (isinstance(weights, Given) and weights.scores is not None):
        raise LookupError("max_logit needs the scores, which were not kept")
    if isinstance(weights, Given):
        return streaming.measure_given(weights, wanted)
    return streaming.measure_tiles(weights, wanted)
