"""The sparse backend on CUDA: lists of visible tiles, and the launches of the Triton kernels that walk them.

A kernel is compiled once per kind of call, in a few seconds; of the lengths only whether they fill their tiles matters.
The lists are made once for a mask and size of call, and kept with it.
"""

from __future__ import annotations

from math import e, log2, prod
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call, rows_together
from regard.devices import ALIGNED, ROUNDED_ONCE, current, no_triton, power_of_two
from regard.masks.mask import keep, leaves
from regard.masks.tiles import TileLists, Tiles

__all__ = ["Launcher", "pays", "unsupported_reason"]

LOG2E = log2(e)
MOST_HEADS = 65535  # CUDA's limit for the second axis of a grid
MOST_TILES = 1 << 27  # in the table that is made while they are listed
WARPS = 4  # of a program
SIDES = (64, 32, 16)  # of a tile; 16 is what the product of two tiles needs
WIDEST = 128  # head size whose tiles fit into a core
SPARSE = 0.25  # share of the tiles that is visible, up to which the kernels are taken for any length
QUICK = 1 << 26  # visible cells of all heads, which the kernels do while FlexAttention is being launched
MEASURED_CELLS, MEASURED_WIDTH = 1 << 23, 64  # visible cells of a head, and head size


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot do a call that the sparse backend can, or None.

    >>> from regard.backends.call import prepare
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> unsupported_reason(prepare(x, x, x))
    'nothing is hidden'
    """
    if call.mask is None:
        return "nothing is hidden"
    if call.device.type != "cuda":
        return f"q is on {call.device.type}"
    if (missing := no_triton()) is not None:
        return missing
    if torch.compiler.is_compiling():
        return "torch.compile traces the call, and the lists of tiles depend on the mask's numbers"
    return kernel_unsupported_reason(call)


def kernel_unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot do a call on any machine, Triton's interpreter included, or None."""
    batch, heads, nq, nk = call.sizes
    if call.q.dtype == torch.float64:
        return "the Triton kernel has no float64"
    if max(call.q.shape[-1], call.v.shape[-1]) > WIDEST:
        return f"the Triton kernel holds head sizes up to {WIDEST}"
    if call.softcap is not None or call.dropout:
        return "the Triton kernel has no softcap, and no dropout"
    if batch * heads > MOST_HEADS:
        return f"the Triton kernel takes up to {MOST_HEADS} heads of all batch rows"
    size = tile_size(call)
    if -(-nq // size[0]) * -(-nk // size[1]) * prod(_leading(call)) > MOST_TILES:
        return f"more than {MOST_TILES:,} tiles to list"
    if call.bias is not None and (call.bias.tensors or not call.bias.one_per_tile(size)):
        return f"the Triton kernel knows biases that are one number for each tile, not {call.bias!r}"
    return None


def tile_size(call: Call) -> tuple[int, int]:
    """Queries and keys of a tile: what was fastest on an H200, or less where a bias is one number for smaller tiles."""
    bias = call.bias
    side = SIDES[0] if bias is None else next((n for n in SIDES if bias.one_per_tile((n, n))), SIDES[0])
    return side, side


def pays(call: Call) -> bool:
    """Whether the kernels are expected to be faster than FlexAttention, for a call that they support.

    Measured on an H200, bf16, heads of 64. 12 heads, 4,096 positions: a window of 512 takes 28 µs against 37, documents
    56 against 78, global tokens 38 against 576: booleans that a mask looks up, a byte each, cost FlexAttention that
    much. 64 heads, 2,048 positions, where more than a quarter is visible: a window of 1,024 takes 126 µs against 113, a
    prefix of a quarter 168 against 137; half of the square, 12 heads, 4,096 positions, is a tie. To launch
    FlexAttention takes about 100 µs of Python, in which our kernels do some 80 million cells. Wider heads have not been
    measured.
    """
    assert call.mask is not None
    booleans = any(isinstance(v, tuple) or (isinstance(v, Tensor) and v.dtype == torch.bool) for v in leaves(call.mask))
    if max(call.q.shape[-1], call.v.shape[-1]) > MEASURED_WIDTH and not booleans:
        return False
    share, (batch, heads, nq, nk) = Launcher.of(call).lists.share, call.sizes
    if booleans and share * nq * nk <= MEASURED_CELLS:
        return True
    return share <= SPARSE or share * batch * heads * nq * nk <= QUICK


class Launcher:
    """The launches of calls of one kind under one mask: `forward`, then `backward` with what it gave."""

    @classmethod
    def of(cls, call: Call) -> Launcher:
        """The launcher of a call, kept with the mask of one without a bias: to make it takes as long as a short kernel.

        call: on torch tensors, one that the kernels support, no size 0.
        """
        if call.bias is not None:
            return cls(call)
        assert call.mask is not None
        q, k, v = call.q, call.k, call.v
        kind = (call.sizes, k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device, call.scale)
        return keep(call.mask, ("launcher", *kind), lambda: cls(call))

    def __init__(self, call: Call) -> None:
        assert call.mask is not None
        mask, size, leading = call.mask, tile_size(call), _leading(call)
        # Not the call itself: what autograd lets go after backward would live as long as the graph.
        self.sizes, self.kv_heads, self.device = call.sizes, call.k.shape[1], call.q.device
        self.scale, self.bias, self.size = call.scale, call.bias, size
        _, _, nq, nk = call.sizes
        key = ("lists", nq, nk, size, leading, self.device)
        self.lists = keep(mask, key, lambda: TileLists(mask, nq, nk, size, self.device, leading))
        self.named = self._named(call.q, call.v)
        self.ready: dict[tuple[int, ...], Any] = {}  # compiled, by the steps in memory from number to number

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output (B, H, Nq, Dv) and lse (B, H, Nq, 1) in fp32, without sinks."""
        from regard.backends.sparse_kernels import attend

        q, k, v = rows_together(q), rows_together(k), rows_together(v)
        batch, heads, nq, _ = self.sizes
        out = q.new_empty(batch, nq, heads, v.shape[-1]).transpose(1, 2)  # as the layer after it reads it
        lse = q.new_empty(batch, heads, nq, 1, dtype=torch.float32)
        lists = self.lists
        steps = (*_steps(q), *_steps(k), *_steps(v), *_steps(out))
        given = (
            q, k, v, out, lse, lists.order, *self._tiles("full"), *self._tiles("mixed"), lists.cells,
            *steps, *lists.steps, *self.named.values(),
        )  # fmt: skip
        grid = (lists.order.shape[1], batch * heads, 1)
        # Triton looks at each argument for what to compile, which takes longer than to launch. With these steps, and
        # from addresses like these, it would find what it found before.
        common = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED
        with current(self.device):
            if common and steps in self.ready:
                self.ready[steps][grid](*given)
            else:
                made = attend[grid](*given, num_warps=WARPS, **ROUNDED_ONCE)
                if common and made is not None:  # triton's interpreter gives None
                    self.ready[steps] = made
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, from the output and lse (B, H, Nq), with sinks by now, and the output's own."""
        from regard.backends.sparse_kernels import differentiate_keys, differentiate_queries

        q, k, v, out, grad = (rows_together(x) for x in (q, k, v, out, grad))
        batch, heads, nq, _ = self.sizes
        lists, named = self.lists, {**self.named, "plain_scale": self.scale, "num_warps": WARPS, **ROUNDED_ONCE}
        d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        delta = lse.new_empty(batch, heads, nq)
        with current(self.device):
            differentiate_queries[(lists.order.shape[1], batch * heads)](
                q, k, v, out, grad, lse, delta, d_q,
                lists.order, *self._tiles("full"), *self._tiles("mixed"), lists.cells,
                *_steps(q), *_steps(k), *_steps(v), *_steps(out), *_steps(grad), *lists.steps, **named,
            )  # fmt: skip
            differentiate_keys[(lists.order_by_columns.shape[1], batch * k.shape[1])](
                q, k, v, grad, lse, delta, d_k, d_v,
                lists.order_by_columns, *self._tiles("full_by_columns"), *self._tiles("mixed_by_columns"),
                lists.numbers_by_columns, lists.cells,
                *_steps(q), *_steps(k), *_steps(v), *_steps(grad), *lists.steps, **named,
            )  # fmt: skip
        return d_q, d_k, d_v

    def _tiles(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Where lists begin, their tiles, and what is added to the scores of each in units of log₂."""
        tiles: Tiles = getattr(self.lists, name)
        bias = self.bias
        if bias is None:
            return tiles.begin, tiles.index, tiles.begin  # which nobody reads
        lists, added = bias.kept.get("tiles", (None, {}))
        if lists is not self.lists:  # kept for the mask that came last: all layers of a model have one
            lists, added = bias.kept["tiles"] = self.lists, {}
        if name not in added:
            b, h, row, col = self.lists.where(tiles, bias)
            term = bias.bind(self.sizes[2], self.sizes[3], self.device, torch.float32)
            added[name] = term(b, h, row * self.size[0], col * self.size[1]) * LOG2E
        return tiles.begin, tiles.index, added[name]

    def _named(self, q: Tensor, v: Tensor) -> dict[str, Any]:
        """What a kernel is given after tensors and steps, in the order of its arguments."""
        (_, heads, nq, nk), band = self.sizes, self.lists.band or (0, 0, 0)
        whole = q.dtype == torch.float32
        return {
            "heads": heads, "group": heads // self.kv_heads, "nq": nq, "nk": nk,
            "scale": self.scale * LOG2E, "offset": band[0], "before": band[1], "after": band[2],
            "D": q.shape[-1], "DV": v.shape[-1], "WIDTH": _width(q), "WIDTH_V": _width(v),
            "BLOCK_Q": self.size[0], "BLOCK_K": self.size[1],
            "EVEN_Q": nq % self.size[0] == 0, "EVEN_K": nk % self.size[1] == 0,
            "IEEE": whole, "BAND": self.lists.band is not None, "ADDED": self.bias is not None,
            "STAGES": 1 if whole else 2,  # loads in flight
        }  # fmt: skip


def _leading(call: Call) -> tuple[int, int]:
    """(B, H) over which mask and bias vary, and so the lists and what is added to their tiles."""
    if call.bias is None:
        return (1, 1) if call.mask is None else call.mask.leading
    given = [rule.leading for rule in (call.mask, call.bias) if rule is not None]
    return max(b for b, _ in given), max(h for _, h in given)


def _steps(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _width(x: Tensor) -> int:
    return max(SIDES[-1], power_of_two(x.shape[-1]))
