"""Selects the engine that measures a call: Triton on CUDA where it can, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends import choose, sdpa
from regard.backends.call import Call
from regard.devices import no_triton
from regard.lens.measures import streaming
from regard.lens.measures.measures import MeasureOptions
from regard.lens.measures.streaming import lse_of
from regard.lens.measures.weights import ComputedWeights, StoredWeights, Weights


def forward(call: Call, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv) as `regard.attention` gives it, and lse (B, H, Nq) in fp32 or wider, without gradient.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> forward(prepare(x, x, x))[1]
    tensor([[[1.0986, 1.0986, 1.0986]]])

    call: with queries, keys and values, of each at least one; NumPy's arrays become tensors.
    backend: "auto" or a name, as for `regard.attention`; raises as that does.
    """
    chosen = choose(call, backend)
    with torch.autocast(call.device.type, enabled=False):  # as attention does: in the dtype that came in
        output, lse = chosen.forward_with_lse(call)
        if chosen is sdpa:
            return output, exact_lse(call.in_torch(), lse)
        return torch.as_tensor(output), torch.as_tensor(lse).detach()


def exact_lse(call: Call, lse: Tensor | None) -> Tensor:
    """The lse that a kernel of torch gave for a call, or one by a pass of our own where it is not there or too rough.

    On a CPU, in half precision, torch's kernel takes a quick exponential: its output does not show it, but its lse is
    off by 5e-5, and all the weights of a row with it.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 1, 2)
    >>> exact_lse(prepare(x, x, x), None)
    tensor([[[0.]]])

    call: on torch tensors.  lse: (B, H, Nq), None where the kernel keeps it to itself.
    """
    rough = call.device.type == "cpu" and call.q.dtype.itemsize < 4
    return lse_of(call) if lse is None or rough else lse


def why_not_triton(call: Call, wanted: MeasureOptions) -> str | None:
    """Why the Triton engine does not make this pass, or None.

    >>> import torch
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> why_not_triton(prepare(x, x, x), MeasureOptions(frozenset(["entropy"])))
    'q is on cpu'
    """
    if call.device.type != "cuda":
        return f"q is on {call.device.type}"
    if (missing := no_triton()) is not None:
        return missing
    from regard.lens.measures import gpu

    return gpu.unsupported_reason(call, wanted)


def measure(call: Call, lse: Tensor, wanted: MeasureOptions) -> tuple[dict[str, Tensor], str]:
    """What `wanted` names of this call's weights, "lse", and the engine that measured it: "triton", or "torch (why)".

    >>> import torch
    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> lse, wanted = torch.full((1, 1, 2), 2.0).log(), MeasureOptions(frozenset(["effective"]))
    >>> found, engine = measure(prepare(x, x, x), lse, wanted)
    >>> found["effective"], engine
    (tensor([[[2., 2.]]]), 'torch')

    call: on torch tensors.  lse: (B, H, Nq).
    "lse" is what the weights were made with: the given one, or, where that is large, one of fp64 scores and in fp64,
    for `ComputedWeights`.
    """
    why = why_not_triton(call, wanted)
    if why is not None:
        return streaming.measure(call, lse, wanted), "torch" if call.device.type == "cpu" else f"torch ({why})"
    from regard.lens.measures import gpu

    return gpu.measure(call, lse, wanted), "triton"


def measure_weights(weights: Weights, wanted: MeasureOptions) -> dict[str, Tensor]:
    """The same from any source of exact weights.

    >>> import torch
    >>> measure_weights(StoredWeights(torch.eye(2).view(1, 1, 2, 2)), MeasureOptions(frozenset(["received"])))
    {'received': tensor([[[1., 1.]]])}

    Raises LookupError for "max_logit" where the scores are not known.
    """
    if isinstance(weights, ComputedWeights):
        found, _ = measure(weights.call, weights.lse, wanted)
        del found["lse"]  # a view has one already, which may be of other scores: see `raise_rows`
        return found
    if "max_logit" in wanted.names and not (isinstance(weights, StoredWeights) and weights.scores is not None):
        raise LookupError("max_logit needs the scores, which were not kept")
    if isinstance(weights, StoredWeights):
        return streaming.measure_given(weights, wanted)
    return streaming.measure_tiles(weights, wanted)
