"""The backends: six ways to compute one operation, and the choice between them.

Each backend is a module with `unsupported_reason(call)` (why it cannot do a call, or None), `how(call)` (a description)
and `run(call)`. All agree with `reference` under the numeric rule of `regard.testing`.

    >>> import torch, regard
    >>> q = k = v = torch.zeros(1, 2, 5, 4)
    >>> print(regard.backends.explain(q, k, v, softcap=30.0))
    backend    can  how, or why not
    ─────────  ───  ─────────────────────────────────────────────────
    tiled      yes  plain torch, tiles of 5×5; O(N) memory  ← auto
    sparse     yes  visible tiles, and nothing is hidden; O(N) memory
    flex       yes  FlexAttention, unfused on the CPU: builds N×N
    reference  yes  the definition, in torch; builds N×N
    sdpa       no   torch's SDPA has no softcap
    short      no   its kernel runs on cuda, and q is on cpu
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard import tables
from regard.backends import flex, reference, sdpa, short, sparse, sparse_gpu, tiled
from regard.backends.call import Call, CallOptions, Launch, prepare
from regard.checks import has_numbers, is_transforming, untraced
from regard.masks import Mask
from regard.masks.biases import DenseBias
from regard.masks.tiles import visible_tiles

__all__ = ["MODULES", "NAMES", "Explanation", "choose", "explain", "load", "place_of_launch", "prepare_launch"]

MODULES: dict[str, ModuleType] = {
    "reference": reference,
    "tiled": tiled,
    "sdpa": sdpa,
    "flex": flex,
    "sparse": sparse,
    "short": short,
}
NAMES = tuple(MODULES)

SMALL = 512 * 512  # cells per head up to which compiling a kernel does not pay
FEW_QUERIES = 64  # their dense mask is small; our kernels have one program for so many and would leave a GPU idle
# On the CPU, fp32, 1 and 12 heads of 64, windows, documents and prefixes of 520 to 2048 positions: `sparse` against a
# dense mask is 0.4 to 2.4× as fast at 520, 0.9 to 3× at 768, 1.2 to 5× at 1024 and more beyond, if no more than 0.6 of
# the cells are computed; against `tiled` it is 1.1 to 8× as fast.
DENSE_UP_TO = 640 * 640  # cells per head up to which a dense mask costs less than anything clever
DENSE_FROM = 0.6  # share of the cells in visible tiles from which skipping the others no longer pays
MOST_DENSE = 1 << 28  # cells of a dense mask that are worth its memory
FEW_CELLS = 1 << 26  # cells of all heads that are worth the memory of dense weights


def load(name: str) -> ModuleType:
    """The module of a backend by name. Raises ValueError with the valid names."""
    if not isinstance(name, str) or name not in MODULES:
        raise ValueError(f"unknown backend {name!r}; the backends are {', '.join(NAMES)}, or 'auto' to choose")
    return MODULES[name]


def choose(call: Call, name: str = "auto") -> ModuleType:
    """The backend for a call: the named one, or with "auto" the fastest that supports the call.

    Raises ValueError if the name is unknown, or if the named backend cannot do the call (with its reason).
    """
    if name == "auto":
        # The common call first, without ranking the others: this is on the path of every small attention.
        if not call.dropout and sdpa.plain(call) is not None and sdpa.unsupported_reason(call) is None:
            return sdpa
        return next(m for m in map(load, ranked(call)) if m.unsupported_reason(call) is None)
    module = load(name)
    reason = module.unsupported_reason(call)
    if reason is not None:
        auto = _name(choose(call))
        raise ValueError(f"backend {name!r} cannot do this call: {reason}. backend='auto' would take {auto!r}")
    return module


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def ranked(call: Call) -> tuple[str, ...]:
    """The backends by expected speed for this call, fastest first, whether or not they can do it."""
    if call.device.type != "cuda":
        return (*_ranked_elsewhere(call), "short")
    order, (_, _, nq, nk) = _ranked_on_cuda(call), call.sizes
    quick = nq * nk <= SMALL and not call.dropout and sdpa.plain(call) is None and short.pays(call)
    return ("short", *order) if quick else (*order, "short")


def _ranked_elsewhere(call: Call) -> tuple[str, ...]:
    if _dense_pays(call):
        return ("sdpa", "tiled", "sparse", "flex", "reference")
    if call.mask is None or _share(call) > DENSE_FROM:
        return ("tiled", "sparse", "sdpa", "flex", "reference")
    return ("sparse", "tiled", "sdpa", "flex", "reference")


def _ranked_on_cuda(call: Call) -> tuple[str, ...]:
    if sdpa.plain(call) is not None:
        return ("sdpa", "flex", "tiled", "sparse", "reference")
    if call.dropout:  # which our kernels and flex do not have; a dense mask, as long as there is memory for it
        dense = call.mask is None or _cells(call) <= MOST_DENSE
        return (*(("sdpa", "sparse", "tiled") if dense else ("sparse", "tiled", "sdpa")), "flex", "reference")
    # A kernel takes seconds to compile, a small dense mask no time. What SDPA cannot do, as Swin's bias in training, is
    # a product of small matrices, which would be bound by launches if it were done tile by tile.
    if call.sizes[2] * call.sizes[3] <= SMALL:
        if prod(call.sizes) <= FEW_CELLS:
            return ("sdpa", "reference", "tiled", "sparse", "flex")
        return ("sdpa", "tiled", "sparse", "flex", "reference")
    if call.sizes[2] < FEW_QUERIES:
        return ("sdpa", "flex", "tiled", "sparse", "reference")
    if sparse_gpu.unsupported_reason(call) is None and sparse_gpu.pays(call):
        return ("sparse", "flex", "sdpa", "tiled", "reference")
    return ("flex", "sdpa", "tiled", "sparse", "reference")


def _dense_pays(call: Call) -> bool:
    """On the CPU: is torch's fused kernel with a dense N×N mask faster than skipping hidden tiles?"""
    _, _, nq, nk = call.sizes
    if sdpa.plain(call) is not None:
        return not call.dropout or nq * nk <= DENSE_UP_TO
    if nq * nk <= DENSE_UP_TO:
        return True
    if call.mask is None:
        return isinstance(call.bias, DenseBias)  # it is N×N already
    if call.dropout or _cells(call) > MOST_DENSE:
        return False
    return _share(call) > DENSE_FROM


def _cells(call: Call) -> int:
    """Cells of the call's mask, if it were dense."""
    _, _, nq, nk = call.sizes
    return nq * nk * prod((1, 1) if call.mask is None else call.mask.leading)


@untraced("whether a mask is sparse is read from its tiles; a named backend reads nothing")
def _share(call: Call) -> float:
    """The share of all cells that lie in visible tiles; 1 if the tensors have no values to read."""
    if not call.numpy and not has_numbers(call.q):
        return 1.0
    return visible_tiles(call.mask, *call.sizes[2:], torch.device("cpu")).share


# ------------------------------------------------------------------------------------------------------------- launches

MOST_LAUNCHES = 64  # that are kept for masks without tensors, and with each mask that has some
_LAUNCHES: dict[Any, Launch] = {}

LaunchPlace = tuple[dict[Any, Launch], tuple[Any, ...]]
"""Where a launch is kept, and its key: all that the checks of a call and the choice of its backend depend on."""

# A release of torch without these is never at rest: its calls are checked each time.
_dispatch_depth = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def place_of_launch(q: Any, k: Any, v: Any, mask: Any, bias: Any, scale: Any) -> LaunchPlace | None:
    """Where the launch of a call without other options is kept; None for a call that has to be checked each time.

    A launch lives with a mask that holds tensors, until one of them is written to, and with equal masks otherwise.
    Tensors that are themselves mask or bias are read in every call: memory that torch shares with NumPy counts no
    writes.
    """
    # 1. Plain tensors on one device, and nothing that follows or changes operations.
    if not (type(q) is type(k) is type(v) is Tensor and q.layout is k.layout is v.layout is torch.strided):
        return None
    if q.is_nested or k.is_nested or v.is_nested or q.dtype is not k.dtype or q.dtype is not v.dtype:
        return None
    device, shape = q.device, q.shape
    if len(shape) != 4 or device != k.device or device != v.device or not (scale is None or type(scale) is float):
        return None
    if not (q.is_cpu or q.is_cuda):
        return None
    if torch.is_autocast_enabled(device.type) or getattr(forward_ad, "_current_level", 0) >= 0:
        return None
    if is_transforming() or _dispatch_depth() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None
    # 2. The key, and where it belongs.
    kept = _LAUNCHES
    if isinstance(mask, Mask):
        if not mask.never_stale:
            return None
        if mask.holds_tensors:
            kept, mask = mask.kept, "launch"
    elif mask is not None:
        mask = _plain_form(mask, device)
        if mask is None or bias is not None:
            return None
    if bias is not None:
        bias = _plain_form(bias, device)
        if bias is None or mask is not None:
            return None
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return kept, (mask, bias, shape, k.shape, v.shape, q.dtype, device, scale, gradient)


def _plain_form(cells: Any, device: torch.device) -> tuple[torch.Size, torch.dtype] | None:
    """The properties in which two plain dense tensors must agree to be read in the same way."""
    if type(cells) is not Tensor or cells.layout is not torch.strided or cells.is_nested or cells.device != device:
        return None
    return cells.shape, cells.dtype


def prepare_launch(call: Call, chosen: ModuleType, place: LaunchPlace) -> Launch | None:
    """The launch of a checked call, kept at its place; None for a call that has to be checked each time."""
    if 0 in call.sizes or 0 in call.v.shape:
        return None
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # what is made now belongs to the graph
    kept, key = place
    reads = type(key[0]) is tuple or key[1] is not None  # mask or bias is a tensor
    with torch.inference_mode(False):  # a later call may differentiate with what is kept here
        launch: Launch | None = chosen.launcher(call, reads) if chosen in (sdpa, flex) else None
    if launch is None:
        if reads:
            return None
        scale, sizes = call.scale, call.sizes

        def launch(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any) -> Tensor:
            out: Tensor = chosen.run(Call(q, k, v, mask, bias, scale, None, None, 0.0, False, sizes))
            return out

    while len(kept) >= MOST_LAUNCHES:  # oldest first; another thread may remove it at the same time
        kept.pop(next(iter(kept)), None)
    kept[key] = launch
    return launch


@dataclass(frozen=True)
class Explanation:
    """Which backends can do one call; prints as a table. `chosen` is what "auto" takes."""

    chosen: str
    rows: tuple[tuple[str, bool, str], ...]  # name, can, how or why not

    def __str__(self) -> str:
        return tables.text(*self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return tables.html(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        mark = {self.chosen: "  ← auto"}
        rows = [[name, "yes" if can else "no", why + mark.get(name, "")] for name, can, why in self.rows]
        return ["backend", "can", "how, or why not"], rows


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: object = None,
    bias: object = None,
    **options: Unpack[CallOptions],
) -> Explanation:
    """Which backends can do this call, how, or why not, and which one "auto" takes.

    >>> import numpy as np
    >>> x = np.zeros((3, 4))
    >>> explain(x, x, x).chosen
    'sdpa'

    Args:
        q: as in `regard.attention`, like all others.
        k: keys.
        v: values.
        mask: who may look at whom.
        bias: added to the scores.
        options: scale, softcap, sinks and dropout.

    Returns:
        A table with a row per backend; `chosen` is what "auto" takes.
    """
    call = prepare(q, k, v, mask=mask, bias=bias, **options)
    reasons = [(name, load(name).unsupported_reason(call)) for name in ranked(call)]
    reasons.sort(key=lambda row: row[1] is not None)  # those that can first, each part in order of speed
    rows = tuple((name, reason is None, load(name).how(call) if reason is None else reason) for name, reason in reasons)
    return Explanation(_name(choose(call)), rows)
