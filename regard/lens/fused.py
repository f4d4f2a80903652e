"""The forward pass with its lse, from the backend that `regard.attention` would take for the call.

torch's own kernels compute lse and drop it on the way to `scaled_dot_product_attention`'s caller; FlexAttention gives it
on request, the tiled backend always. Where a kernel keeps it to itself, lse costs one more pass over q·kᵀ.

It does not know what lse is needed for.
"""

from __future__ import annotations

from torch import Tensor

from regard.backends import choose, reference, tiled
from regard.backends.call import Call
from regard.lens.streaming import lse_of

__all__ = ["forward"]


def forward(call: Call, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv) as `regard.attention` gives it, and lse (B, H, Nq) in fp32 or wider, without gradient.

    call: on torch tensors.  backend: "auto" or a name, as for `regard.attention`; raises as that does.
    """
    chosen = choose(call, backend)
    name = chosen.__name__.rpartition(".")[2]
    if name == "reference":
        made = reference.stages(call)
        return made.output, made.lse.detach()
    if name == "tiled":
        return tiled.forward_with_lse(call)
    out, lse = chosen.forward_with_lse(call)
    return out, lse_of(call) if lse is None else lse
