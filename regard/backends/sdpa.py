"""Attention through `torch.nn.functional.scaled_dot_product_attention`: the fused kernels that torch ships.

Full and plainly causal calls reach the fused kernel as they are. Any other mask or bias becomes a dense N×N tensor.
Softcap and sinks are not supported.
"""

from __future__ import annotations

from math import inf, isfinite, prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.backends.call import Call, Launch, cells_of_bias, cells_of_mask, forward_mode_unsupported_reason
from regard.checks import has_numbers, is_transforming
from regard.masks import Causal, DenseMask
from regard.masks.biases import DenseBias
from regard.masks.mask import keep
from regard.positions import SwinBias

__all__ = ["forward_with_lse", "how", "launcher", "plain", "run", "unsupported_reason"]

FLASH, CUDNN = 1, 3  # of torch.nn.attention.SDPBackend


def unsupported_reason(call: Call) -> str | None:
    """Why this backend cannot do the call, or None."""
    if call.softcap is not None:
        return "torch's SDPA has no softcap"
    if call.sinks is not None:
        return "torch's SDPA has no sinks"
    if call.bias is not None and not _keeps_bias(call):
        return f"torch's SDPA on {call.device.type} would round the bias, or its gradient, to {call.q.dtype}"
    if call.numpy and call.q.dtype.itemsize > 8:
        return f"{call.q.dtype} exists in NumPy only"
    return forward_mode_unsupported_reason()


def _keeps_bias(call: Call) -> bool:
    """Only the CPU kernel takes a mask wider than q; elsewhere every term must be a number of q's dtype already."""
    bias = call.bias
    if call.device.type == "cpu" or call.q.dtype.itemsize >= 4:
        return True
    if isinstance(bias, SwinBias):  # its terms are looked up in a table, not computed: they are numbers of its dtype
        differentiated = torch.is_grad_enabled() and bias.table.requires_grad  # the sum over windows would be rounded
        return bias.table.dtype == call.q.dtype and not differentiated
    return isinstance(bias, DenseBias) and bias.cells.dtype == call.q.dtype


def how(call: Call) -> str:
    """How it does the call, in a few words."""
    if call.dropout and call.device.type == "cpu":
        return "torch's unfused path (dropout on the CPU); builds N×N"
    return {
        "full": "torch's fused kernel",
        "causal": "torch's fused kernel, is_causal",
        None: "torch's kernel with a dense N×N mask",
    }[plain(call)]


def plain(call: Call) -> Literal["full", "causal"] | None:
    """How the kernel does the call without a dense N×N tensor, or None where it needs one.

    SDPA's is_causal counts from the first key, as ours does when the offset is 0, by default when Nq = Nk. One query at
    the last position (a decoding step) sees every key.
    """
    mask = call.mask
    if call.bias is not None:
        return None
    if mask is None:
        return "full"
    if not isinstance(mask, Causal) or isinstance(mask.offset, Tensor):
        return None
    _, _, nq, nk = call.sizes
    offset = nk - nq if mask.offset is None else mask.offset
    return "causal" if offset == 0 else "full" if nq == 1 and offset == nk - 1 else None


def run(call: Call) -> Tensor:
    """The output (B, H, Nq, Dv)."""
    return _run(call, with_lse=False)[0]


def forward_with_lse(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output, and each row's lse (B, H, Nq) if the kernel that torch takes hands it over; else None."""
    out, lse = _run(call, with_lse=True)
    return out, None if lse is None else lse.detach()


def launcher(call: Call, reads: bool) -> Launch | None:
    """The call for other q, k and v, without its checks; None where `run` has more to do.

    reads: mask or bias came as a tensor and is read in each call; else what the mask gives is kept where it is small.
    """
    (_, _, nq, nk), scale, grouped = call.sizes, call.scale, call.k.shape[1] != call.sizes[1]
    on_cpu, shape = call.device.type == "cpu", plain(call)
    if scale <= 0 or (on_cpu and call.v.shape[-1] != call.q.shape[-1]):
        return None
    if shape is not None:
        causal = shape == "causal"
        return lambda q, k, v, mask, bias: scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if not on_cpu or nq * nk * prod((1, 1) if call.mask is None else call.mask.leading) > MOST_KEPT:
        return None
    if reads:
        return _reading_launcher(call)
    cells, seen = _dense_cells(call)
    cells = torch.zeros((), dtype=call.q.dtype).masked_fill(~cells, -inf)  # as torch would do in every call
    cells = cells.expand(*cells.shape[:2], nq, nk)

    def launch(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any) -> Tensor:
        out = scaled_dot_product_attention(q, k, v, cells, scale=scale, enable_gqa=grouped)
        return out if seen is None else torch.where(seen, out, 0.0)

    return launch


def _reading_launcher(call: Call) -> Launch | None:
    """The launch of a call with a dense mask or bias, which sees to it that each row has something to look at."""
    rule = call.bias if call.mask is None else call.mask
    assert isinstance(rule, (DenseMask, DenseBias))
    sizes, scale, grouped = call.sizes, call.scale, call.k.shape[1] != call.sizes[1]
    four, whole = rule.cells.shape, (*rule.cells.shape[:2], *sizes[2:])
    if call.bias is not None and rule.cells.dtype != call.wide:
        return None

    def launch(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any) -> Tensor:
        cells = bias if mask is None else mask
        if cells.ndim != 4:
            cells = cells.view(four)
        if mask is None:
            full = isfinite((cells.detach() if cells.requires_grad else cells).sum().item())
        else:
            full = cells.any(-1).all().item()
        if full:
            if four != whole:
                cells = cells.expand(whole)
            return scaled_dot_product_attention(q, k, v, cells, scale=scale, enable_gqa=grouped)
        mask, bias = None if mask is None else DenseMask(cells), None if bias is None else DenseBias(cells)
        return run(Call(q, k, v, mask, bias, scale, None, None, 0.0, False, sizes))

    return launch


def _run(call: Call, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    call = call.in_torch()
    q, scale = call.q, call.scale
    if scale <= 0:  # fused kernels take the row maximum before scaling, which holds for scale > 0 only
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    shape = plain(call)
    if shape is not None:
        return _fused(call, q, scale, with_lse, is_causal=shape == "causal")
    cells, seen = _dense_cells(call)
    cells = cells.expand(*cells.shape[:2], *call.sizes[2:])  # a view: a mask of keys alone stays as small as it is
    out, lse = _fused(call, q, scale, with_lse, cells)
    if seen is None:
        return out, lse
    return torch.where(seen, out, 0.0), None if lse is None else torch.where(seen.squeeze(-1), lse, -inf)


def _fused(
    call: Call, q: Tensor, scale: float, with_lse: bool, cells: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor | None]:
    """SDPA, with equal widths on the CPU, whose fused kernel needs Dv = D: zero columns change nothing."""
    k, v, dv, dropout = call.k, call.v, call.v.shape[-1], call.dropout
    if q.device.type == "cpu" and dv != q.shape[-1]:
        width = max(dv, q.shape[-1])
        q, k, v = (pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    out, lse = _with_lse(q, k, v, cells, dropout, is_causal, scale) if with_lse else (None, None)
    if out is None:
        grouped = k.shape[1] != q.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=cells, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    return (out if out.shape[-1] == dv else out[..., :dv]), lse


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, cells: Tensor | None, dropout: float, is_causal: bool, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    """The kernel that `scaled_dot_product_attention` would take, called by its own name; None where it gives no lse.

    All four functions are private to torch; a release may lack one.
    """
    ops = torch.ops.aten
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None, None
    choice = choose(q, k, v, cells, dropout, is_causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    if choice == FLASH and q.device.type == "cpu" and hasattr(ops, "_scaled_dot_product_flash_attention_for_cpu"):
        if cells is not None and cells.dtype == torch.bool:
            cells = torch.zeros((), dtype=q.dtype).masked_fill(~cells, -inf)
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout, is_causal, attn_mask=cells, scale=scale
        )
        return out, lse
    if q.device.type == "cuda" and cells is None:
        if choice == CUDNN and (cudnn := getattr(ops, "_scaled_dot_product_cudnn_attention", None)) is not None:
            out, lse = cudnn(q, k, v, None, True, dropout, is_causal, False, scale=scale)[:2]
            return out, lse.reshape(q.shape[:-1])
        flash = getattr(ops, "_scaled_dot_product_flash_attention", None)
        if choice == FLASH and flash is not None and q.shape[-1] % 8 == 0:
            out, lse = flash(q, k, v, dropout, is_causal, False, scale=scale)[:2]
            return out, lse
    return None, None


MOST_KEPT = 1 << 18  # cells that are kept for a mask and a length: 1 MiB in fp32


def _dense_cells(call: Call) -> tuple[Tensor, Tensor | None]:
    """What SDPA adds or masks with, and which rows see anything (B, H, Nq, 1); None where all are known to.

    Rows that see nothing are opened, since kernels differ on them and may give NaN; their output, and with it their
    gradient, is set to 0 afterwards.
    """
    bias = cells_of_bias(call)
    on_cpu = call.device.type == "cpu"
    # Reading values saves copies on the CPU; it would wait for a GPU, and a graph being traced has none yet.
    ask = on_cpu and has_numbers(call.q) and not is_transforming()
    if bias is None:
        visible = cells_of_mask(call)
        assert visible is not None
        seen = visible.any(-1, keepdim=True)
        return (visible, None) if ask and bool(seen.all()) else (visible | ~seen, seen)
    if ask and isfinite(bias.detach().sum().item()):  # then only the mask hides, and not head by head
        hidden = None if call.mask is None else _added_by_mask(call)
        if call.mask is None or hidden is not None:
            return bias if hidden is None else bias + hidden, None
    visible = cells_of_mask(call)
    bias = bias if on_cpu else bias.to(call.q.dtype)  # exact, or the call is not supported; and half the bytes to move
    cells = bias if visible is None else torch.where(visible, bias, -inf)
    seen = cells.amax(-1, keepdim=True) != -inf  # a NaN is seen, and stays one
    if ask and bool(seen.all()):
        return cells, None
    return torch.where(seen, cells, 0.0), seen


def _added_by_mask(call: Call) -> Tensor | None:
    """0 where visible and −∞ where hidden, (B or 1, H or 1, Nq or 1, Nk or 1); None if a row sees nothing.

    Kept with the mask where it is small: Swin's blocks share one mask with biases of their own, again in every pass.
    """
    mask, (_, _, nq, nk) = call.mask, call.sizes
    assert mask is not None

    def added() -> tuple[Tensor | None]:
        visible = cells_of_mask(call)
        assert visible is not None
        hidden = torch.where(visible, torch.zeros((), dtype=call.wide), -inf)
        return (hidden if bool((hidden.amax(-1) == 0).all()) else None,)

    if nq * nk * prod(mask.leading) > MOST_KEPT:
        return added()[0]
    return keep(mask, ("added", nq, nk, call.device, call.wide), added)[0]
