"""The forward pass with its lse, from the backend that `regard.attention` would take for the call.

torch's own kernels compute lse and drop it on the way to `scaled_dot_product_attention`'s caller; FlexAttention gives
it on request, the tiled backend always. Where a kernel keeps it to itself, lse costs one more pass over q·kᵀ.

It does not know what lse is needed for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends import choose, sdpa
from regard.backends.call import Call
from regard.lens.measuring.streaming import lse_of

__all__ = ["exact_lse", "forward"]


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
