"""One caught attention call as values: q, k, v, mask, bias, lse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import torch
from torch import Tensor

from regard.backends.call import Call, prepare
from regard.lens.measures.weights import ComputedWeights
from regard.masks import Causal, DenseMask, Mask, as_mask
from regard.masks.biases import DenseBias
from regard.masks.rules import indices, part_of

Source = Literal["sdpa", "softmax", "flex", "flash_attn", "regard"]
"""What was tapped: torch's fused kernels, a softmax by hand, FlexAttention, the flash_attn package, our operation."""

Kind = Literal["self", "cross"]
"""Do the queries look at their own sequence, or at another."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedCall:
    """One attention call of a watched model. Tensors are detached, and are the model's own memory: never write to them.

    Attributes:
        path: the module that made the call, as in `named_modules()` of the watched model; "" is the model itself.
        kernel: what really ran, for example "_scaled_dot_product_flash_attention_for_cpu".
        kind: "self" or "cross", by the caller's arguments and name.
        call: q, k, v as the kernel got them, with mask, bias, scale, softcap and sinks; None for a plain softmax, and
            if there is a `trouble`. A later step of the model may overwrite them (a cache of fixed size).
        lse: (B, H, Nq) natural log of each row's sum of exponentials, −inf for a row that sees nothing; fp32 or fp64;
            None if the kernel gave none that can be trusted.
        output: (B, H, Nq, Dv), or None if it cannot be told apart.
        scores: of a plain softmax, (B, H, Nq, Nk); with a sink its column is last, Nk + 1 in all. None if the model
            wrote over them.
        weights: of a plain softmax, (B, H, Nq, Nk), without a sink's column; None if the model wrote over them.
        marks: of a plain softmax, (B, Nk) a number per key by which it is known again in a later call; or None.
        edited: the weights of a plain softmax were changed before they met the values. `weights` are those applied:
            rows need not sum to 1, and some may be negative. `scores` are those before the change.
        compiled: seen inside compiled code; `path` is then the module that was compiled.
        order: inside compiled code, which of the calls of one run of that code it is, from 0; else None.
        trouble: why the call could not be read; None if it could.
    """

    path: str = ""
    source: Source
    kernel: str
    kind: Kind = "self"
    call: Call | None = None
    lse: Tensor | None = None
    output: Tensor | None = None
    scores: Tensor | None = None
    weights: Tensor | None = None
    marks: Tensor | None = None
    edited: bool = False
    compiled: bool = False
    order: int | None = None
    trouble: str | None = None


@dataclass(frozen=True, eq=False)
class KernelResult:
    """The result of a kernel inside a larger call (FlexAttention, our operation), for the report of that call."""

    kernel: str
    lse: Tensor | None


class _Here(threading.local):
    """Where this thread stands."""

    quiet: int = 0  # depth of `measuring`, and of kernels that are already being reported
    inside: int = 0  # depth of larger calls that are being recorded
    kernel: KernelResult | None = None  # result of the latest kernel inside a larger call


HERE = _Here()


@contextmanager
def measuring() -> Iterator[None]:
    """What runs under it is ours: in this thread taps report nothing, no graph is recorded, autocast is off."""
    HERE.quiet += 1
    try:
        with torch.no_grad(), ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        HERE.quiet -= 1


LOWEST = -1e30  # an lse below: the dtype's smallest number was added to a whole row, and left no digit for the weights
HIDDEN = -1e4  # from here on, downwards, a number added to a whole row costs it digits; BERT hides by just this one
AT_ONCE = 1 << 22  # cells that are looked at in one piece


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

    q, k, v are (…, H, N, D) as `regard.attention` takes them; a batch axis that is 1 in one of them may differ. `cells`
    is what SDPA calls attn_mask: booleans (True = may look), or floats that are added, with −inf where hidden. `bias`
    is added and `mask` hides besides. Raises TypeError or ValueError where `regard.attention` would.
    """
    q, k, v = q.detach(), k.detach(), v.detach()
    if q.ndim == k.ndim == v.ndim:  # spread batch axes of size 1, as a product of matrices does
        lead = q.ndim - (3 if q.ndim >= 4 else 2)
        sizes = [max(t.shape[axis] for t in (q, k, v)) for axis in range(lead)]
        if all(t.shape[axis] in (1, n) for t in (q, k, v) for axis, n in enumerate(sizes)):
            q, k, v = (t.expand(*sizes, *t.shape[lead:]) for t in (q, k, v))
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
    cells = cells.detach()
    for axis, (size, stride) in enumerate(zip(cells.shape, cells.stride(), strict=True)):
        if stride == 0 and size > 1:  # one number repeated, as `expand` does
            cells = cells.narrow(axis, 0, 1)
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


def raise_rows(call: Call) -> tuple[Call, Tensor | None]:
    """The same weights from scores of ordinary size, where every key of a row carries a large negative number.

    A softmax stays as it is when a row loses one number throughout. In e^(s − lse) such numbers leave no digits. Where
    a number was so large that it swallowed the scores, as the dtype's smallest does, the kernel never saw them: there
    q becomes 0, and the row is as even as it was in the kernel.

    Returns the call, and (B or 1, H or 1, Nq or 1) what was taken off, 0 in other rows; None where there are no such
    rows. With sinks nothing is done: a sink does not move with the row, and leaves nothing of it.
    """
    if not isinstance(call.bias, DenseBias) or call.sinks is not None or 0 in call.sizes:
        return call, None
    cells = call.bias.cells.detach()
    if not bool(cells.amin() <= HIDDEN):
        return call, None
    most = _most_added(call)
    rows = (most <= HIDDEN) & (most > -inf)
    if not bool(rows.any()):
        return call, None
    taken = torch.where(rows, most, 0.0)
    # A number x leaves x·eps/2 at most of what is added to it, half of that just above a power of two.
    swallowed = rows & (_largest_scores(call, rows) <= taken.abs() * (torch.finfo(call.wide).eps / 4))
    q = call.q.masked_fill(swallowed.unsqueeze(-1), 0.0)
    return replace(call, q=q, bias=DenseBias(cells.to(call.wide) - taken.unsqueeze(-1))), taken


def _most_added(call: Call) -> Tensor:
    """The largest number that is added to a visible score of each row, (B or 1, H or 1, Nq), or 1 where rows agree."""
    assert isinstance(call.bias, DenseBias)
    (_, _, nq, nk), mask, cells = call.sizes, call.mask, call.bias.cells.detach()
    count = 1 if mask is None and cells.shape[2] == 1 else nq
    see = None if mask is None else mask.bind(nq, nk, call.device, call.wide)
    i, j = (torch.arange(n, device=call.device) for n in (count, nk))
    found = []
    for part in torch.split(i, max(1, AT_ONCE // max(1, nk))):
        added = part_of(cells, slice(int(part[0]), int(part[-1]) + 1), slice(None)).to(call.wide)
        if mask is not None and see is not None:
            added = torch.where(see(*indices(*mask.leading, part, j, call.device)), added, -inf)
        found.append(added.amax(-1).expand(-1, -1, len(part)))
    return torch.cat(found, -1)


def _largest_scores(call: Call, rows: Tensor) -> Tensor:
    """(B, H, Nq) the largest score of these rows before anything is added, whichever its sign; 0 in other rows."""
    batch, heads, nq, nk = call.sizes
    largest = torch.zeros(batch, heads, nq, dtype=call.wide, device=call.device)
    bare = ComputedWeights(replace(call, mask=None, bias=None), largest)
    chosen = rows.any(0).any(0).expand(nq).nonzero().view(-1)
    for part in torch.split(chosen, max(1, AT_ONCE // max(1, batch * heads * nk))):
        largest[:, :, part] = bare.scores(part, slice(None)).abs().amax(-1)
    return largest
