"""The kernel of short sequences, interpreted where there is no GPU: held to the definition."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from interpreting import interpreted

import regard
from regard import backends, masks
from regard.backends import reference, short
from regard.backends.call import Call, prepare
from regard.nn.windows import WindowTable
from regard.positions import SwinBias
from regard.testing import MASKS, Case, assert_rule, conform

triton = pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, of −∞ − −∞ and the like


@pytest.fixture(scope="module", autouse=True)
def kernel_runs_here() -> Iterator[None]:
    from regard.backends import short_kernels

    if DEVICE == "cuda":
        yield
        return
    with interpreted(short_kernels):
        yield


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "unsupported_reason", short.kernel_unsupported_reason)


def judge(case: Case, dtype: torch.dtype) -> None:
    conform(partial(regard.attention, backend="short"), case, dtype, DEVICE, gradient=False)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_gives_what_the_definition_gives(mask: str) -> None:
    judge(Case("square", mask, "plain"), torch.float32)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["fewer queries, grouped, narrow v", "more queries than keys, wide v", "one query"])
@pytest.mark.parametrize("arguments", ["negative scale", "zero scale", "bias", "bias with −∞", "ALiBi"])
def test_shapes_dtypes_and_arguments(shape: str, arguments: str, dtype: torch.dtype) -> None:
    for mask in ("none", "window per head", "rows without keys"):
        judge(Case(shape, mask, arguments), dtype)


def windows(batch: int = 3, heads: int = 2, side: int = 4, d: int = 8) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v as one projection of windows leaves them, a table of relative positions, and regions as a mask."""
    random = torch.Generator().manual_seed(0)
    n = side * side
    joined = torch.randn(batch, n, 3, heads, d, generator=random).to(DEVICE)
    table = torch.randn((2 * side - 1) ** 2, heads, generator=random).to(DEVICE)
    regions = torch.randint(0, 2, (batch, n), generator=random).to(DEVICE)
    qkv = [x.transpose(1, 2) for x in joined.unbind(2)]
    return qkv, {"bias": SwinBias(table, (side, side)), "mask": masks.documents(regions)}


@pytest.mark.parametrize("hidden", [True, False])
def test_windows_with_relative_positions(hidden: bool) -> None:
    qkv, extra = windows()
    if not hidden:
        del extra["mask"]
    found = regard.attention(*qkv, **extra, backend="short")
    bias = SwinBias(extra["bias"].table.double(), extra["bias"].window)
    truth = reference.run(prepare(*(x.double() for x in qkv), **(extra | {"bias": bias})))
    assert_rule(found, reference.run(prepare(*qkv, **extra)), truth, what="windows")
    assert found.transpose(1, 2).is_contiguous()  # as the projection after it reads it


def test_a_head_is_cut_into_blocks_of_queries() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=random).to(DEVICE) for n in (139, 70, 70))
    mask = masks.window(40, 9, offset=0)
    found = regard.attention(q, k, v, mask=mask, backend="short")
    wide = reference.run(prepare(*(x.double() for x in (q, k, v)), mask=mask))
    assert_rule(found, reference.run(prepare(q, k, v, mask=mask)), wide, what="139 queries")


@pytest.mark.parametrize("far", [torch.finfo(torch.float32).min, 3e38], ids=["lowest", "highest"])
def test_a_bias_near_the_limit_of_fp32(far: float) -> None:
    q, k, v = (torch.randn(1, 2, 7, 8, device=DEVICE) for _ in range(3))
    bias = torch.zeros(1, 1, 7, 7, device=DEVICE)
    bias[..., 2], bias[..., 3, :] = far, far  # one key in all rows, and a whole row
    found = regard.attention(q, k, v, bias=bias, backend="short")
    torch.testing.assert_close(found, reference.run(prepare(q, k, v, bias=bias)))


def test_negated_views_keep_their_sign() -> None:
    (q, k, v), _ = windows()
    bias = torch._neg_view(torch.randn(1, 2, 16, 16, device=DEVICE))
    found = regard.attention(torch._neg_view(q), k, v, bias=bias, backend="short")
    torch.testing.assert_close(found, reference.run(prepare(-q, k, v, bias=bias.resolve_neg())), rtol=1e-4, atol=1e-4)


def test_transforms_of_torch_func_go_elsewhere_also_when_compiled() -> None:
    (q, k, v), _ = windows()

    def reason(x: torch.Tensor) -> torch.Tensor:
        assert "torch.func" in str(short.kernel_unsupported_reason(prepare(x, k, v)))
        return x

    torch.func.vmap(reason)(q[None])
    torch.compile(torch.func.vmap(reason), backend="eager")(q[None])


def test_a_compiled_call_serves_a_range_of_lengths() -> None:
    def reason(x: torch.Tensor) -> torch.Tensor:
        return x if short.kernel_unsupported_reason(prepare(x, x, x)) is None else -x

    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(reason, backend=keep, dynamic=True)
    for n in (33, 37, 49, 64):
        compiled(torch.zeros(2, 2, n, 8))
    assert len(graphs) == 1


def test_lse_is_each_rows() -> None:
    (q, k, v), extra = windows()
    extra["mask"] = extra["mask"] & masks.queries(torch.arange(16, device=DEVICE)[None] > 4)
    out, lse = short.forward_with_lse(prepare(q, k, v, **extra))
    made = [reference.stages(prepare(*(x.to(t) for x in (q, k, v)), **extra)).lse for t in (q.dtype, torch.float64)]
    assert_rule(lse[:, :, 5:], *(m[:, :, 5:] for m in made), what="lse")
    assert (lse[:, :, :5] == -inf).all()
    assert not out[:, :, :5].any()


def test_nothing_to_look_at_gives_zeros() -> None:
    q = torch.randn(1, 2, 5, 8, device=DEVICE)
    out, lse = short.forward_with_lse(prepare(q, q[:, :, :0], q[:, :, :0]))
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -inf).all()


@pytest.mark.parametrize(
    ("sizes", "extra", "reason"),
    [
        ((9, 257, 8), {}, "up to 256 keys"),
        ((9, 9, 129), {}, "head sizes up to 128"),
        ((9, 256, 128), {}, "more than the 64 KiB"),
        ((9, 9, 8), {"softcap": 2.0}, "no softcap"),
        ((9, 9, 8), {"sinks": torch.zeros(2)}, "no sinks"),
        ((9, 9, 8), {"dropout": 0.5}, "no dropout"),
    ],
    ids=str,
)
def test_what_it_cannot_do(sizes: tuple[int, int, int], extra: dict[str, Any], reason: str) -> None:
    nq, nk, d = sizes
    q, k = torch.zeros(1, 2, nq, d), torch.zeros(1, 2, nk, d)
    assert reason in str(short.kernel_unsupported_reason(prepare(q, k, k, **extra)))


def test_gradients_and_fp64_go_elsewhere() -> None:
    q = torch.zeros(1, 2, 9, 8)
    assert "float64" in str(short.kernel_unsupported_reason(prepare(q.double(), q.double(), q.double())))
    grown = q.clone().requires_grad_()
    assert "no backward" in str(short.kernel_unsupported_reason(prepare(grown, q, q)))
    with torch.no_grad():
        assert short.kernel_unsupported_reason(prepare(grown, q, q)) is None


@pytest.mark.parametrize(("batch", "first"), [(2, "short"), (1, "sdpa")])
def test_on_a_gpu_it_is_taken_for_many_short_sequences(batch: int, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "device", torch.device("cuda"))
    monkeypatch.setattr(short, "MANY_CELLS", 2 * 3 * 49 * 49)
    q = torch.zeros(batch, 3, 49, 8)
    bias = WindowTable(7, 3).bias(q, 1.0)
    with torch.no_grad():
        assert backends.ranked(prepare(q, q, q, bias=bias))[0] == first
        assert backends.ranked(prepare(q, q, q))[0] == "sdpa"  # torch's kernel without a mask is as fast
