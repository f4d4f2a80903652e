"""The sparse backend: what it computes and what it does not. That it agrees with the definition on every mask is in
test_conformance.py; which tiles there are, in test_tiling.py."""

import re
import subprocess
import sys
from math import inf

import numpy as np
import pytest
import torch
from dense_measures import dense_measures

import regard
from regard import masks, positions
from regard.backends import reference, sparse
from regard.backends.call import prepare
from regard.masks import tiling
from regard.testing import assert_rule

B, H, KV, N, D, DV = 2, 6, 2, 211, 5, 3
LONGFORMER = masks.window(11, 7) | masks.globals([0, 130])
BIGBIRD = masks.random_blocks(N, 8, count=2, seed=0, heads=H) | masks.window(9, 9) | masks.globals([0, N - 1])
PADDED = LONGFORMER & masks.padding([N, 90])
DILATED = masks.dilated(9, 7, 11) | masks.globals([3])
MASKS = {"longformer": LONGFORMER, "bigbird": BIGBIRD, "padded": PADDED, "dilated": DILATED}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles, several to a batch, and batches that do not hold all heads."""
    monkeypatch.setattr(tiling, "ROWS", (8, 16))
    monkeypatch.setattr(tiling, "COLS", 4)
    monkeypatch.setattr(tiling, "_KEPT", {})
    monkeypatch.setattr(sparse, "CELLS_AT_ONCE", 3000)


def tensors(dtype=torch.float32, n=N):
    random = torch.Generator().manual_seed(0)
    shapes = (B, H, n, D), (B, KV, n, D), (B, KV, n, DV)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def judge(ours, extra, qkv):
    """Output and gradients of a call under the numeric rule."""
    found = []
    for run, dtype in ((ours, qkv[0].dtype), (ours, torch.float64), (by_definition, qkv[0].dtype)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = run(*leaves, **extra)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    truth_leaves = [x.detach().double().requires_grad_() for x in qkv]
    out = by_definition(*truth_leaves, **extra)
    truth = (out, *torch.autograd.grad(out.square().sum(), truth_leaves))
    slope = max(float(g.abs().max()) for g in truth[1:])
    for n, (mine, base, exact) in enumerate(zip(found[0], found[2], truth, strict=True)):
        assert_rule(mine, base, exact, gradient=n > 0, scale=slope if n else None, what=f"part {n}")
    for n, (mine, exact) in enumerate(zip(found[1], truth, strict=True)):
        assert (mine - exact).abs().max() <= 1e-12 * max(1.0, slope), f"part {n} in fp64"


def by_definition(*qkv, **extra):
    return regard.attention(*qkv, **extra, backend="reference")


def sparsely(*qkv, **extra):
    return regard.attention(*qkv, **extra, backend="sparse")


# -------------------------------------------------------------------------------------------------------- what it gives


@pytest.mark.parametrize("extra", [{}, {"softcap": 1.5}, {"scale": -0.3}, {"bias": positions.alibi(H)}], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_sparse_masks_of_published_models_agree_with_the_definition(name, extra):
    judge(sparsely, {"mask": MASKS[name], **extra}, tensors())


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, H)], ids=["no sinks", "sinks"])
def test_lse_is_each_rows(name, sinks):
    q, k, v = tensors()
    out, lse = sparse.forward_with_lse(prepare(q, k, v, mask=MASKS[name], sinks=sinks))
    made = [
        reference.stages(prepare(*(x.to(t) for x in (q, k, v)), mask=MASKS[name], sinks=sinks)).lse
        for t in (torch.float32, torch.float64)
    ]
    assert_rule(lse, *made, what="lse")
    assert torch.equal(out, sparsely(q, k, v, mask=MASKS[name], sinks=sinks))


def test_row_that_sees_nothing_has_an_lse_of_minus_infinity_and_a_zero():
    q, k, v = tensors()
    out, lse = sparse.forward_with_lse(prepare(q, k, v, mask=masks.causal(offset=-2)))
    assert (lse[:, :, :2] == -inf).all()
    assert lse[:, :, 2:].isfinite().all()
    assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2]))


def test_lse_carries_no_gradient():
    out, lse = sparse.forward_with_lse(prepare(*(x.requires_grad_() for x in tensors()), mask=LONGFORMER))
    assert out.requires_grad
    assert not lse.requires_grad


def test_dilated_mask_is_computed_in_an_order_of_its_own():
    assert tiling.visible_tiles(DILATED, N, N, torch.device("cpu")).order is not None


def test_numpy_in_numpy_out():
    arrays = [x.numpy() for x in tensors()]
    out = sparsely(*arrays, mask=LONGFORMER)
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, sparsely(*tensors(), mask=LONGFORMER).numpy())


def test_learned_bias_gets_its_gradient_from_visible_cells_only():
    q, k, v = tensors(torch.float64)
    table = torch.zeros(H, N, N, dtype=torch.float64, requires_grad=True)
    ours, truth = (
        torch.autograd.grad(run(q, k, v, mask=LONGFORMER, bias=table).square().sum(), table)[0]
        for run in (sparsely, by_definition)
    )
    assert (ours - truth).abs().max() < 1e-12 * truth.abs().max()
    assert not ours[:, ~LONGFORMER.dense(N)].any()


def test_hidden_keys_get_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors())
    mask = masks.window(11, 7) & masks.padding([N, 90])
    d_k, d_v = torch.autograd.grad(sparsely(q, k, v, mask=mask).sum(), [k, v])
    assert not d_k[1, :, 90:].any()
    assert not d_v[1, :, 90:].any()
    assert d_v[0, :, 90:].any()


def test_plain_operations_and_the_fused_kernel_agree(monkeypatch):
    fused = sparsely(*tensors(), mask=BIGBIRD)
    called = []
    monkeypatch.setattr(sparse, "_attend_fused", lambda *given: called.append(1) or sparse._attend(*given))
    plain = sparsely(*tensors(), mask=BIGBIRD)
    truth = by_definition(*tensors(torch.float64), mask=BIGBIRD)
    assert called
    assert_rule(plain, by_definition(*tensors(), mask=BIGBIRD), truth)
    assert not torch.equal(plain, fused)  # or the kernel was not called the first time


def test_mask_that_served_inference_can_be_trained_with():
    mask = masks.window(6, 6) & masks.padding([N, 50])
    with torch.inference_mode():
        expected = sparsely(*tensors(), mask=mask)
    leaves = [x.requires_grad_() for x in tensors()]
    out = sparsely(*leaves, mask=mask)
    torch.autograd.grad(out.sum(), leaves)
    assert torch.equal(out.detach(), expected)


def test_second_derivative_is_refused_instead_of_left_out():
    q, k, v = (x.requires_grad_() for x in tensors())
    out = sparsely(q, k, v, mask=LONGFORMER)
    with pytest.raises(RuntimeError, match=r"^the sparse backend has no second derivative; use backend='reference'"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


# ------------------------------------------------------------------------------------------------------- what it skips


def test_no_more_is_computed_than_is_listed(monkeypatch):
    cells = []

    def spy(plan, q, k, v, batch, term):
        cells.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return attend(plan, q, k, v, batch, term)

    attend = sparse._attend_fused
    monkeypatch.setattr(sparse, "_attend_fused", spy)
    sparsely(*tensors(), mask=LONGFORMER)
    found = tiling.visible_tiles(LONGFORMER, N, N, torch.device("cpu"))
    listed = sum(g.cols.numel() * g.size * p.queries.shape[1] for p in found.panels for g in p.groups)
    assert sum(cells) == B * H * listed
    assert listed < 0.3 * N * N


def test_batch_of_tiles_stays_small(monkeypatch):
    sizes = []

    def spy(plan, q, k, v, batch, term):
        sizes.append((q.shape[0] * q.shape[1], q.shape[2] * k.shape[2]))
        return attend(plan, q, k, v, batch, term)

    attend = sparse._attend_fused
    monkeypatch.setattr(sparse, "_attend_fused", spy)
    sparsely(*tensors(), mask=masks.window(3, 3))
    assert all(entries == 1 or entries * cells <= sparse.CELLS_AT_ONCE for entries, cells in sizes)
    assert any(entries > 1 for entries, _ in sizes)


def test_how_says_what_is_computed():
    call = prepare(*tensors(), mask=LONGFORMER)
    found = tiling.visible_tiles(LONGFORMER, N, N, torch.device("cpu"))
    said = f"visible tiles of {found.rows}×4 gathered: {found.share:.0%} of the cells; O(N) memory"
    assert sparse.how(call) == said
    assert sparse.how(prepare(*tensors())) == "visible tiles gathered, and nothing is hidden; O(N) memory"


PEAK = """
import re, torch, regard
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
mask = regard.masks.window(24, 24) | regard.masks.globals([0])
def step(n):
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    out = regard.attention(q, k, v, mask=mask, backend="sparse")
    out.backward(out.detach())
step(2048)
before = peak()
step(65536)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_65536_positions_are_trained_in_memory_linear_in_their_number():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    above = float(re.fullmatch(r"([\d.]+)\n", done.stdout)[1])
    assert above < 200, "MiB; q, k, v and their gradients alone are 24, N×N booleans would be 4096"


# ------------------------------------------------------------------------------------------------------------- the lens


@pytest.mark.parametrize("name", MASKS)
def test_view_of_a_sparse_call_holds_the_dense_weights_and_zeros_elsewhere(name):
    q, k, v = tensors(torch.float64)
    mask = MASKS[name]
    view = regard.look(q, k, v, mask=mask, backend="sparse", size=7, top=4)
    made = reference.stages(prepare(q, k, v, mask=mask))
    truth = dense_measures(made.weights, made.masked, made.lse, None, 7)
    for what in ("entropy", "received", "max_logit", "effective", "lse"):
        assert torch.allclose(getattr(view, what), truth[what], rtol=0, atol=1e-11), what
    assert torch.allclose(view.map(7), truth["map"], rtol=0, atol=1e-12)
    hidden = made.masked == -inf
    for i in (0, 1, 130, N - 1):
        assert torch.allclose(view.row(i), made.weights[:, :, i], rtol=0, atol=1e-12)
        assert not view.row(i)[hidden[:, :, i]].any()
    top, expected = view.top(4), made.weights.topk(4)
    assert torch.allclose(top.weight, expected.values, rtol=0, atol=1e-12)
    seen = top.index >= 0
    assert torch.equal(top.index[seen], expected.indices[seen])
