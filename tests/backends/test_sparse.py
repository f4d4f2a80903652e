"""The sparse backend: what it computes and what it does not. That it agrees with the definition on every mask is in
test_conformance.py; which tiles there are, in test_tiling.py."""

from math import inf

import numpy as np
import pytest
import torch
from dense_measures import dense_measures

import regard
from regard import masks, positions
from regard.backends import reference, sparse
from regard.backends import sparse as tile_batches
from regard.backends.call import prepare
from regard.growth import peak_bytes
from regard.masks import mask as rules
from regard.masks import tiles
from regard.testing import assert_rule

B, H, KV, N, D, DV = 2, 6, 2, 211, 5, 3
LONGFORMER = masks.window(11, 7) | masks.globals([0, 130])
BIGBIRD = masks.random_blocks(N, 8, count=2, seed=0, num_heads=H) | masks.window(9, 9) | masks.globals([0, N - 1])
PADDED = LONGFORMER & masks.padding([N, 90])
DILATED = masks.dilated(9, 7, 11) | masks.globals([3])
MASKS = {"longformer": LONGFORMER, "bigbird": BIGBIRD, "padded": PADDED, "dilated": DILATED}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles, several to a batch, and batches that do not hold all heads."""
    monkeypatch.setattr(tiles, "ROWS", (8, 16))
    monkeypatch.setattr(tiles, "COLS", 4)
    monkeypatch.setattr(rules, "_KEPT", {})
    for module in (sparse, tile_batches):
        monkeypatch.setattr(module, "CELLS_AT_ONCE", 3000)


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


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_large_scores_under_a_scale_that_is_not_positive(scale):
    q, k, v = tensors()
    blocks = masks.blocks(torch.eye(-(-N // 16), dtype=torch.bool), 16)  # whose tiles hide nothing
    extra = {"mask": blocks, "scale": scale}
    ours, base = (run(q * 100, k, v, **extra) for run in (sparsely, by_definition))
    assert_rule(ours, base, by_definition(q.double() * 100, k.double(), v.double(), **extra))


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
    assert tiles.visible_tiles(DILATED, N, N, torch.device("cpu")).order is not None


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
def test_table_of_another_dtype_than_the_scores_is_trained(dtype, table_dtype):
    q, k, v = tensors(dtype)
    learned = positions.T5(H).to(table_dtype)
    found = []
    for run in (sparsely, by_definition):
        learned.zero_grad()
        run(q, k, v, mask=LONGFORMER, bias=learned.bias(q, 1.0)).float().square().sum().backward()
        found.append(next(learned.parameters()).grad)
    assert found[0].dtype == table_dtype
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05 * float(found[1].abs().max()))


@pytest.mark.parametrize("extra", [{}, {"softcap": 1.5}, {"bias": positions.alibi(H)}], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_dropout_zeroes_some_weights_and_its_gradient_is_of_those_kept(name, extra):
    q, k, _ = tensors(torch.float64)
    mask, eye = MASKS[name], torch.eye(N, dtype=torch.float64).expand(B, KV, N, N)  # the output is the weights
    torch.manual_seed(1)
    weights = sparsely(q, k, eye, mask=mask, dropout=0.25, **extra)
    whole = by_definition(q, k, eye, mask=mask, **extra)
    seen = (whole > 0).expand_as(whole)
    kept = weights > 0
    torch.testing.assert_close(weights, torch.where(kept, whole / 0.75, 0.0))
    share, many = 1 - float(kept[seen].double().mean()), int(seen.sum())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / many) ** 0.5

    values = torch.randn(eye.shape, dtype=torch.float64)  # as wide as before: how tiles are batched depends on it
    leaves = [x.requires_grad_() for x in (q, k, values)]
    torch.manual_seed(1)
    found = torch.autograd.grad(sparsely(*leaves, mask=mask, dropout=0.25, **extra).square().sum(), leaves)
    scores = regard.steps(leaves[0], leaves[1], leaves[2], mask=mask, **extra).weights  # (B, H, N, N)
    out = torch.where(kept, scores / 0.75, 0.0) @ values.repeat_interleave(H // KV, 1)
    for ours, truth in zip(found, torch.autograd.grad(out.square().sum(), leaves), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


def test_compiled_call_runs_the_same_lists_between_two_graphs():
    mask, graphs = masks.window(6, 6) | masks.globals([0]), []

    def note(graph, _):
        graphs.append(graph)
        return graph

    def around(q, k, v):
        return sparsely(q * 2, k, v, mask=mask) + 1

    compiled = torch.compile(around, backend=note)
    for n in (N, N - 10):
        assert torch.equal(compiled(*tensors(n=n)), around(*tensors(n=n)))
    called = {node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert len(called) <= 2, f"only the product and the sum around it are traced, got {called}"
    torch._dynamo.reset()


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
    monkeypatch.setattr(sparse, "_forward_fused", lambda *given: called.append(1) or sparse._forward_plain(*given))
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
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


# ------------------------------------------------------------------------------------------------------- what it skips


@pytest.fixture
def kernel_calls(monkeypatch):
    """What the fused kernel is called with: q, k and v of each call."""
    called = []
    kernel = sparse._kernel
    monkeypatch.setattr(sparse, "_kernel", lambda *given: called.append(given[:3]) or kernel(*given))
    return called


@pytest.mark.parametrize("name", MASKS)
def test_no_more_is_computed_than_is_listed(name, kernel_calls):
    sparsely(*tensors(), mask=MASKS[name])
    found = tiles.visible_tiles(MASKS[name], N, N, torch.device("cpu"))
    listed = 0
    for panel in found.panels:
        rows = panel.queries.shape[1]
        for group in panel.groups:
            listed += group.width * int((panel.count - group.row * rows).clamp(max=rows).sum())
    each = B * H // (MASKS[name].leading[0] * MASKS[name].leading[1])
    assert sum(q.shape[:3].numel() * k.shape[2] for q, k, _ in kernel_calls) == each * listed
    assert each * listed < 0.5 * B * H * N * N


@pytest.mark.parametrize("tokens_first", [True, False])
def test_keys_of_a_window_are_not_copied(tokens_first, kernel_calls):
    q, k, _ = tensors()
    if tokens_first:  # as projections leave them
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    sparsely(q, k, k, mask=masks.window(3, 3))
    apart = [i for i, call in enumerate(kernel_calls) if call[1].data_ptr() - k.data_ptr() not in range(k.nbytes)]
    assert len(kernel_calls) > len(apart)
    assert all(kernel_calls[i][0].shape[0] == 1 for i in apart)  # the end of the text, whose last tile is not full
    assert max(call[1].shape[0] for call in kernel_calls) > 8


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
def test_what_is_copied_at_once_stays_small(name, monkeypatch):
    sizes = []
    gathered = tiles.gathered
    monkeypatch.setattr(
        tiles, "gathered", lambda *given: sizes.append((len(given[1]), gathered(*given))) or sizes[-1][1]
    )
    sparsely(*tensors(), mask=MASKS[name])
    assert all(stretches == 1 or 2 * made.numel() <= sparse.CELLS_AT_ONCE for stretches, made in sizes)
    assert any(stretches > 1 for stretches, _ in sizes)


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
@pytest.mark.parametrize("count", [0, 1])
def test_terms_that_are_not_kept_are_computed_again(name, count, monkeypatch):
    expected = sparsely(*tensors(), mask=MASKS[name], bias=count * torch.eye(N))
    monkeypatch.setattr(tiles, "MOST_ADDED_CELLS", 1)
    monkeypatch.setattr(rules, "_KEPT", {})
    other = {"longformer": LONGFORMER & masks.padding([N]), "bigbird": BIGBIRD & masks.padding([N])}[name]
    assert torch.equal(sparsely(*tensors(), mask=other, bias=count * torch.eye(N)), expected)


def test_how_says_what_is_computed():
    call = prepare(*tensors(), mask=LONGFORMER)
    found = tiles.visible_tiles(LONGFORMER, N, N, torch.device("cpu"))
    said = f"visible tiles of {found.rows}×4: {found.share:.0%} of the cells; O(N) memory"
    assert sparse.how(call) == said
    assert sparse.how(prepare(*tensors())) == "visible tiles, and nothing is hidden; O(N) memory"


def test_65536_positions_are_trained_in_memory_linear_in_their_number(monkeypatch):
    monkeypatch.undo()  # the tiles of real calls: small ones would be half a million here
    mask = masks.window(24, 24) | masks.globals([0])
    q, k, v = (torch.randn(1, 1, 65536, 16, requires_grad=True) for _ in range(3))

    def step() -> None:
        out = regard.attention(q, k, v, mask=mask, backend="sparse")
        out.backward(out.detach())

    taken = peak_bytes(step, torch.device("cpu"))
    # Its gradients and its output alone are 16 MiB, N×N booleans would be 4096: less or more is not what it is.
    assert 16 * 2**20 <= taken < 200 * 2**20


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
