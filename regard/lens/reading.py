"""From what a kernel was given to a checked `Call`: a float mask is taken apart into what is hidden and what is added.

This file does not know which kernel it was, nor how the call was caught.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from regard.backends.call import Call, prepare
from regard.masks import Causal, DenseMask, Mask, as_mask

__all__ = ["read_call", "split_cells", "trusted_lse"]

LOWEST = -1e30
"""An lse below it means that the dtype's smallest number was added to a whole row: no digit is left for the weights."""


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cells: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Call:
    """The call that a kernel computed, detached from the model.

    >>> q = torch.zeros(1, 2, 3, 5)
    >>> read_call(q, q, q, cells=torch.tensor([0.0, 0.0, -inf]).expand(3, 3)).mask
    dense(<3 booleans, 2 True>)

    q, k, v: (…, H, N, D) as `regard.attention` takes them; an axis of batch that is 1 in one of them may differ.
    cells: what SDPA calls attn_mask: booleans (True = may look), or floats that are added, with −inf where hidden.
    bias: floats that are added besides.  mask: what is hidden besides.
    scale, softcap, sinks, dropout: as `regard.attention`.

    Raises TypeError or ValueError where `regard.attention` would.
    """
    q, k, v = _same_batch(q.detach(), k.detach(), v.detach())
    visible, added = split_cells(cells)
    if bias is not None:
        added = bias.detach() if added is None else added + bias.detach()
    dense = as_mask(visible, (*q.shape[:-1], k.shape[-2]))
    if dense is not None:
        mask = dense if mask is None else mask & dense
    sinks = None if sinks is None else sinks.detach()
    return prepare(q, k, v, mask=mask, bias=added, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)


def split_cells(cells: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """SDPA's mask taken apart: booleans (True = may look) and floats to add, each None where there is nothing to say.

    >>> [part.tolist() for part in split_cells(torch.tensor([[0.0, 2.0, -inf]]))]
    [[[True, True, False]], [[0.0, 2.0, 0.0]]]

    Only −inf hides. The dtype's smallest number is added like any other: a row that holds nothing else is uniform.
    """
    if cells is None:
        return None, None
    cells = _without_repeats(cells.detach())
    if cells.dtype == torch.bool:
        return cells, None
    visible = cells != -inf
    # One answer from the device for both questions: on a GPU each would be waited for.
    some_hidden, some_added = torch.stack([~visible.all(), ((cells != 0) & visible).any()]).tolist()
    added = cells if not some_hidden else torch.where(visible, cells, 0.0)
    return visible if some_hidden else None, added if some_added else None


def trusted_lse(lse: Tensor | None, call: Call) -> Tensor | None:
    """A kernel's lse with −inf where a row sees nothing, which kernels mark as they please; None if it cannot be used.

    >>> q = torch.zeros(1, 1, 2, 3)
    >>> call = read_call(q, q, q, cells=torch.tensor([[True, False], [False, False]]))
    >>> trusted_lse(torch.zeros(1, 1, 2), call)
    tensor([[[0., -inf]]])
    """
    if lse is None or (call.mask is None and call.bias is None):
        return lse
    _, _, nq, nk = call.sizes
    if isinstance(call.mask, DenseMask):
        lse = torch.where(call.mask.cells.any(-1), lse, -inf)
    elif isinstance(call.mask, Causal) and not isinstance(call.mask.offset, Tensor):
        first = nk - nq if call.mask.offset is None else call.mask.offset
        lse = torch.where(torch.arange(first, first + nq, device=lse.device) >= 0, lse, -inf)
    elif call.mask is not None:
        return None
    if call.bias is not None and bool(((lse < LOWEST) & (lse > -inf)).any()):
        return None
    return lse


def _same_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Axes before the heads, of which some are 1, spread to one size, as a product of matrices does."""
    if len({t.ndim for t in tensors}) > 1:
        return tensors
    batch_axes = tensors[0].ndim - (3 if tensors[0].ndim >= 4 else 2)
    sizes = [max(t.shape[axis] for t in tensors) for axis in range(batch_axes)]
    fits = [all(t.shape[axis] in (1, n) for axis, n in enumerate(sizes)) for t in tensors]
    if not all(fits):
        return tensors
    return tuple(t.expand(*sizes, *t.shape[batch_axes:]) for t in tensors)


def _without_repeats(cells: Tensor) -> Tensor:
    """Axes along which one number was repeated, as `expand` does, taken back to 1."""
    for axis, (size, stride) in enumerate(zip(cells.shape, cells.stride(), strict=True)):
        if stride == 0 and size > 1:
            cells = cells.narrow(axis, 0, 1)
    return cells
