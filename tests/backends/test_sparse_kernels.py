"""The sparse backend's Triton kernels, interpreted where there is no GPU: held to the definition, forward and backward.

On a GPU test_conformance.py holds them to it over the whole grid."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from interpreting import interpreted

import regard
from regard import masks, positions
from regard.backends import reference, sparse, sparse_gpu
from regard.backends.call import Call, prepare
from regard.masks import mask as rules
from regard.nn.sparse_attention import Repeated
from regard.testing import MASKS, Case, assert_rule, conform

triton = pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, of −∞ − −∞ and the like


@pytest.fixture(scope="module", autouse=True)
def kernels_run_here() -> Iterator[None]:
    from regard.backends import sparse_kernels

    if DEVICE == "cuda":
        yield
        return
    with interpreted(sparse_kernels):
        yield


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that went to the kernels, in tiles of 16 × 16, on whatever device they are."""
    calls: list[Call] = []

    def unsupported_reason(call: Call) -> str | None:
        why = "nothing is hidden" if call.mask is None else sparse_gpu.kernel_unsupported_reason(call)
        calls.extend([call] if why is None else [])
        return why

    monkeypatch.setattr(sparse_gpu, "unsupported_reason", unsupported_reason)
    monkeypatch.setattr(sparse_gpu, "tile_size", lambda call: (16, 16))
    monkeypatch.setattr(rules, "_KEPT", {})
    return calls


def tensors(batch: int = 2, heads: int = 4, kv: int = 2, nq: int = 53, nk: int = 71) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = (batch, heads, nq, 24), (batch, kv, nk, 24), (batch, kv, nk, 16)
    return [torch.randn(shape, generator=random).to(DEVICE) for shape in shapes]


def judge(extra: dict[str, Any], qkv: list[torch.Tensor]) -> None:
    """Output and gradients under the numeric rule."""
    found = []
    for backend, dtype in (("sparse", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = regard.attention(*leaves, **extra, backend=backend)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    slope = max(float(g.abs().max()) for g in found[2][1:])
    for n, (mine, base, exact) in enumerate(zip(*found, strict=True)):
        assert_rule(mine, base, exact, gradient=n > 0, scale=slope if n else None, what=f"part {n}")


# ------------------------------------------------------------------------------------------------------- what they give


HIDING = [name for name in MASKS if name != "none"]


@pytest.mark.parametrize("mask", HIDING)
def test_every_mask_gives_what_the_definition_gives(mask: str, launched: list[Call]) -> None:
    conform(partial(regard.attention, backend="sparse"), Case("square", mask, "plain"), torch.float32, DEVICE)
    assert launched


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["fewer queries, grouped, narrow v", "more queries than keys, wide v"])
@pytest.mark.parametrize("arguments", ["negative scale", "sinks"])
def test_shapes_dtypes_and_arguments(shape: str, arguments: str, dtype: torch.dtype, launched: list[Call]) -> None:
    for mask in ("window per head", "rows without keys"):
        conform(partial(regard.attention, backend="sparse"), Case(shape, mask, arguments), dtype, DEVICE)
    assert launched


@pytest.mark.parametrize(
    "mask",
    [
        masks.window(20, 9) | masks.globals([0, 40]),
        masks.window(9, 9) & masks.padding([71, 30]) & masks.queries(torch.arange(53)[None] % 7 > 0),
        masks.random_blocks(71, 8, count=2, seed=0, num_heads=2) | masks.window(3, 0),
        masks.dilated(3, 3, 5),
        masks.window(16, 0),
    ],
    ids=["longformer", "padded", "drawn for each head", "dilated", "band"],
)
def test_masks_of_long_models_with_grouped_heads(mask: masks.Mask, launched: list[Call]) -> None:
    judge({"mask": mask}, tensors(heads=2, kv=1))
    assert launched


@pytest.mark.parametrize("heads", [1, 2])
def test_a_bias_that_is_one_number_for_a_tile(heads: int, launched: list[Call]) -> None:
    counts = torch.randint(0, 4, (1, heads, 2, 2), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    counts[..., 0] = 2  # every row of blocks sees something
    bias, mask = Repeated(counts.to(torch.int16), 32), masks.blocks(counts > 0, 32)
    one = masks.blocks(counts[:, :1] > 0, 32)  # for all heads
    for seen in (mask & masks.padding([30]), (masks.window(30, 30) | masks.globals([0])) & one & mask):
        judge({"mask": seen, "bias": bias}, tensors(batch=1, heads=2, kv=1, nk=53))
    assert launched


def test_sizes_that_fill_the_tiles_need_no_bounds(launched: list[Call]) -> None:
    judge({"mask": masks.window(20, 3) | masks.globals([2])}, tensors(nq=64, nk=64))
    assert launched


def test_lse_is_each_rows() -> None:
    q, k, v = tensors()
    mask = masks.window(9, 3) & masks.queries(torch.arange(53, device=DEVICE)[None] > 4)
    out, lse = sparse.forward_with_lse(prepare(q, k, v, mask=mask))
    made = [reference.stages(prepare(*(x.to(t) for x in (q, k, v)), mask=mask)).lse for t in (q.dtype, torch.float64)]
    assert_rule(lse[:, :, 5:], *(m[:, :, 5:] for m in made), what="lse")
    assert (lse[:, :, :5] == -inf).all()
    assert not out[:, :, :5].any()


def test_the_lists_of_a_mask_are_made_once(launched: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    lists = sparse_gpu.TileLists
    monkeypatch.setattr(sparse_gpu, "TileLists", lambda *given: made.append(given) or lists(*given))
    mask = masks.window(5, 5) & masks.padding([71, 30])
    for _ in range(2):
        regard.attention(*tensors(heads=2, kv=1), mask=mask, backend="sparse")
    assert len(launched) == 2
    assert len(made) == 1


def test_a_bias_gives_its_numbers_anew_for_another_mask() -> None:
    counts = torch.full((1, 1, 3, 3), 2, dtype=torch.int16, device=DEVICE)
    counts[..., 0] = 3
    bias = Repeated(counts, 32)
    for length in (71, 40, 71):
        given = {"mask": masks.padding([length]), "bias": bias}
        ours, truth = (
            regard.attention(*tensors(batch=1, heads=2, kv=1), **given, backend=name)
            for name in ("sparse", "reference")
        )
        torch.testing.assert_close(ours, truth, rtol=0, atol=2e-6)


def test_a_second_run_gives_the_same_bits() -> None:
    leaves = [x.requires_grad_() for x in tensors(batch=1, heads=2, kv=1)]
    mask = masks.window(20, 9) | masks.globals([0, 40])
    first, second = (
        torch.autograd.grad(regard.attention(*leaves, mask=mask, backend="sparse").square().sum(), leaves)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_tiles_are_as_small_as_a_bias_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v = tensors()
    counts = torch.ones(1, 1, 9, 9, dtype=torch.int16)
    sizes = [sparse_gpu.tile_size(prepare(q, k, v, bias=Repeated(counts, n))) for n in (128, 64, 96, 16, 10)]
    assert sizes == [(64, 64), (64, 64), (32, 32), (16, 16), (64, 64)]
    assert "one number" in sparse_gpu.kernel_unsupported_reason(prepare(q, k, v, bias=Repeated(counts, 10)))


# --------------------------------------------------------------------------------------------------- what they refuse


def test_what_the_kernels_do_not_do_is_computed_otherwise(launched: list[Call]) -> None:
    q, k, v = tensors(heads=2)
    mask = masks.window(9, 3)
    for extra in ({"softcap": 2.0}, {"bias": positions.alibi(2)}):
        ours = regard.attention(q, k, v, mask=mask, **extra, backend="sparse")
        torch.testing.assert_close(ours, regard.attention(q, k, v, mask=mask, **extra, backend="reference"))
    assert not launched


@pytest.mark.parametrize(
    ("wide", "extra", "why"),
    [
        (24, {"softcap": 2.0}, "softcap"),
        (24, {"bias": positions.alibi(4)}, "alibi"),
        (130, {}, "128"),
    ],
)
def test_the_reasons(wide: int, extra: dict[str, Any], why: str) -> None:
    q, k, v = (torch.zeros(1, 4, 5, wide) for _ in range(3))
    assert why in sparse_gpu.kernel_unsupported_reason(prepare(q, k, v, mask=masks.causal(offset=1), **extra))


def test_the_lists_die_with_their_mask(launched: list[Call]) -> None:
    mask = masks.window(5, 5) & masks.padding([71, 30])
    regard.attention(*tensors(), mask=mask, backend="sparse")
    launched.clear()
    (lists,) = [kept for kept in mask.kept.values() if isinstance(kept, sparse_gpu.TileLists)]
    alive = weakref.ref(lists)
    gc.disable()  # or it might come by
    try:
        del lists, mask
        assert alive() is None
    finally:
        gc.enable()


class Kernel:
    """In the place of a Triton kernel: notes who was looked at anew, and who was launched as before."""

    def __init__(self) -> None:
        self.looked_at, self.launched = [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*given: Any, **named: Any) -> Any:
            self.looked_at.append(given)
            return {grid: lambda *given: self.launched.append(given)}

        return first


def test_a_call_like_one_before_is_launched_without_a_look_at_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends import sparse_kernels

    kernel, mask = Kernel(), masks.window(5, 5) & masks.padding([71, 30])
    monkeypatch.setattr(sparse_kernels, "attend", kernel)
    q, k, v = tensors()

    def call(q: torch.Tensor, k: torch.Tensor = k, v: torch.Tensor = v, **extra: Any) -> tuple[int, int]:
        regard.attention(q, k, v, mask=mask, backend="sparse", **extra)
        return len(kernel.looked_at), len(kernel.launched)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        """The same at an address that is no multiple of 16."""
        return torch.empty(x.numel() + 1, device=DEVICE)[1:].view(x.shape).copy_(x)

    assert call(q) == (1, 0)
    assert call(q.clone()) == (1, 1)
    before, after = kernel.looked_at[0], kernel.launched[0]
    for a, b in zip(before[5:], after[5:], strict=True):  # after q, k, v, output and lse
        assert a is b if isinstance(a, torch.Tensor) else a == b
    other = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert call(other) == (2, 1)  # other steps in memory
    assert call(other) == (2, 2)
    for n, given in enumerate(((shifted(q), k, v), (q, shifted(k), v), (q, k, shifted(v)))):
        assert call(*given) == (3 + 2 * n, 2)
        assert call(*given) == (4 + 2 * n, 2)
    assert call(q, scale=0.3) == (9, 2)
    assert call(q, bias=Repeated(torch.ones(1, 1, 5, 5, dtype=torch.int64), 16)) == (10, 2)
    assert call(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)) == (11, 2)
    assert call(q, k, torch.cat([v, v], -1)[..., :31].contiguous()) == (12, 2)
    assert call(q.half(), k.half(), v.half()) == (13, 2)
    assert call(q, k, v) == (13, 3)
