"""Every backend against the definition, over the whole grid of regard.testing, and over random calls."""

from contextlib import contextmanager
from functools import cache, partial
from math import inf

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import regard
from regard import masks, testing
from regard.masks import mask as rules
from regard.masks import tiles
from regard.testing import ARGUMENTS, MASKS, SHAPES, Case, Shape, assert_rule, cases, conform, largest_error

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = ("tiled", "sdpa", "flex", "sparse", "auto")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that the suite's shapes cross: 139 × 271 becomes 5 × 6 tiles, or 9 × 17, the last ones short."""
    monkeypatch.setattr(regard.backends.tiled, "tile_size", lambda batch, heads, nq, nk: (32, 48))
    monkeypatch.setattr(tiles, "ROWS", (4, 16))
    monkeypatch.setattr(tiles, "COLS", 16)
    monkeypatch.setattr(rules, "_KEPT", {})


@contextmanager
def flex_without_compiling():
    """FlexAttention's own debugging path: the same mask_mod and score_mod, without thousands of compilations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regard.backends.flex, "_kernel_for", lambda call, with_lse: regard.backends.flex._kernel)
        patch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@pytest.fixture
def uncompiled_flex():
    with flex_without_compiling():
        yield


@pytest.fixture(scope="module")
def definition_once():
    """Compute the definition of a case, baseline and truth, once for all backends; its gradients always."""
    kept, differentiate = {}, testing._differentiate

    def once(attention, q, k, v, extra, gradient):
        if attention not in (testing._definition, testing._backwards):
            return differentiate(attention, q, k, v, extra, gradient)
        key = attention, q.dtype, given
        if key not in kept:
            kept[key] = differentiate(attention, q, k, v, extra, True)
        return kept[key]

    def conform_once(attention, case, dtype, device, *, gradient):
        nonlocal given
        given = case, dtype, device
        with pytest.MonkeyPatch.context() as patch:  # here alone: `conform` of other tests computes everything
            patch.setattr(testing, "_differentiate", once)
            conform(attention, case, dtype, device, gradient=gradient)

    given = None
    return conform_once


@cache
def refusals(case, dtype, device):
    """explain's reason why each backend cannot, or None."""
    q, k, v, extra = case.build(dtype, device)
    rows = regard.backends.explain(q, k, v, **extra).rows
    return {"auto": None} | {name: None if can else why for name, can, why in rows}


def conform_over_masks(backend, dtype, shape, arguments, device, conform=conform, masks=tuple(MASKS)):
    refused = []
    for mask in masks:
        case = Case(shape, mask, arguments)
        reason = refusals(case, dtype, device)[backend]
        if reason is not None:
            refused.append(reason)
            continue
        gradient = (backend, device) != ("flex", "cpu")  # FlexAttention has no backward there
        conform(partial(regard.attention, backend=backend), case, dtype, device, gradient=gradient)
    if len(refused) == len(masks):
        pytest.skip(refused[0])


@pytest.mark.pairwise("dtype", "shape", "arguments")
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_agrees_with_the_definition_under_every_mask(
    backend, dtype, shape, arguments, small_tiles, uncompiled_flex, definition_once, request
):
    # Half of the masks, the other half with the next shape and the next arguments: each mask meets all of both.
    half = (list(SHAPES).index(shape) + list(ARGUMENTS).index(arguments)) % 2
    names = list(MASKS) if request.config.getoption("--full-grids") else list(MASKS)[half::2]
    conform_over_masks(backend, DTYPES[dtype], shape, arguments, "cpu", definition_once, names)


@pytest.mark.parametrize("mask", ["none", "causal and padding", "window per head", "rows without keys"])
@pytest.mark.parametrize("arguments", ["plain", "all together"])
def test_compiled_flex_agrees_with_the_definition(mask, arguments):
    for shape in ("square", "fewer queries, grouped, narrow v"):
        conform(partial(regard.attention, backend="flex"), Case(shape, mask, arguments), gradient=False)


def test_compiled_flex_does_not_round_sinks_to_fp32():
    conform(partial(regard.attention, backend="flex"), Case("square", "none", "sinks"), torch.float64, gradient=False)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["tiled", "sdpa", "sparse"])
def test_backend_agrees_with_the_definition_on_a_gpu(backend, dtype, shape, arguments):
    conform_over_masks(backend, DTYPES[dtype], shape, arguments, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_flex_agrees_with_the_definition_under_every_mask_on_a_gpu(mask):
    conform_flex_on_gpu(Case("several tiles", mask, "plain"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_flex_agrees_with_the_definition_under_every_argument_on_a_gpu(arguments, dtype):
    conform_flex_on_gpu(Case("several tiles", "causal and padding", arguments), DTYPES[dtype])


def conform_flex_on_gpu(case, dtype):
    assert refusals(case, dtype, "cuda")["flex"] is None
    conform(partial(regard.attention, backend="flex"), case, dtype, "cuda")


# ----------------------------------------------------------------------------------------------------- random calls


@st.composite
def primitive_masks(draw, s):
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    ids = draw(st.lists(st.integers(-1, 3), min_size=s.nk, max_size=s.nk))
    tokens = draw(st.lists(st.booleans(), min_size=s.nk, max_size=s.nk))
    offsets = [draw(st.integers(-3, 5)) for _ in range(s.batch)]
    lengths = [draw(st.integers(0, s.nk)) for _ in range(s.batch)]
    return draw(
        st.sampled_from(
            [
                masks.causal(),
                masks.causal(offset=offsets),
                masks.window(before, after),
                masks.window(before, after, offset=offsets),
                masks.dilated(before, after, 2),
                masks.prefix(before),
                masks.padding(lengths),
                masks.padding(lengths, side="left"),
                masks.padding([tokens] * s.batch),
                masks.documents(ids),
                masks.globals([p for p in (0, after) if p < s.nk]),
                masks.random_blocks(max(s.nq, s.nk), 1 + before, count=1, seed=after),
            ]
        )
    )


@st.composite
def calls(draw):
    group = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 2))
    sizes = [draw(st.integers(1, 9)) for _ in range(4)]
    s = Shape(draw(st.integers(1, 3)), kv_heads * group, kv_heads, *sizes)
    mask = draw(primitive_masks(s))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(primitive_masks(s))
        mask = draw(st.sampled_from([mask & other, mask | other, ~mask & other, mask | ~other]))
    return s, mask, draw(st.integers(0, 1000)), draw(st.booleans()), draw(st.booleans())


@given(calls())
def test_backends_agree_on_random_masks_and_shapes(call):
    s, mask, seed, capped, sunk = call
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(s.batch, s.num_heads, s.nq, s.d, generator=random)
    k = torch.randn(s.batch, s.num_kv_heads, s.nk, s.d, generator=random)
    v = torch.randn(s.batch, s.num_kv_heads, s.nk, s.dv, generator=random)
    extra = {"mask": mask, "softcap": 2.0 if capped else None, "sinks": torch.zeros(s.num_heads) if sunk else None}
    truth = regard.attention(q.double(), k.double(), v.double(), **extra, backend="reference")
    baseline = regard.attention(q, k, v, **extra, backend="reference")
    with flex_without_compiling():
        for name in runnable(q, k, v, **extra):
            assert_rule(regard.attention(q, k, v, **extra, backend=name), baseline, truth, what=f"{name}, {mask!r}")


@given(calls(), st.integers(1, 5), st.integers(1, 5))
def test_tile_classes_are_sound_for_any_combination(call, rows, cols):
    s, mask, *_ = call
    cells = mask.dense(s.nq, s.nk).expand(*mask.leading, s.nq, s.nk)
    kinds = mask.tiles(s.nq, s.nk, (rows, cols))
    for b, h, r, c in torch.cartesian_prod(*(torch.arange(n) for n in kinds.shape)).reshape(-1, 4).tolist():
        tile = cells[b, h, r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
        kind = int(kinds[b, h, r, c])
        assert kind != masks.EMPTY or not tile.any(), f"{mask!r}: tile {r},{c} is called empty"
        assert kind != masks.FULL or tile.all(), f"{mask!r}: tile {r},{c} is called full"


# ------------------------------------------------------------------------------------------------ rows, hidden keys


def runnable(q, k, v, **extra):
    rows = regard.backends.explain(q, k, v, **extra).rows
    return [name for name, can, _ in rows if can]


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_that_sees_nothing_returns_zero_with_zero_gradient(dtype):
    q, k, v, extra = Case("square", "rows without keys", "plain").build(DTYPES[dtype])
    for backend in runnable(q.requires_grad_(), k, v, **extra):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = regard.attention(*leaves, **extra, backend=backend)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert torch.equal(out[0, :, 0], torch.zeros_like(out[0, :, 0])), backend
        assert torch.equal(grads[0][0, :, 0], torch.zeros_like(q[0, :, 0])), backend
        assert all(g.isfinite().all() for g in grads), backend


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_cannot_influence_the_result(dtype):
    huge = 6e4 if dtype == "fp16" else 1e30
    q, k, v, _ = Case("square", "none", "plain").build(DTYPES[dtype])
    mask = masks.padding([5, 3]) & masks.causal()
    hidden = ~masks.padding([5, 3]).dense(1, 7)[:, 0, 0]  # (B, Nk)
    loud_k, loud_v = (x.masked_fill(hidden[:, None, :, None], huge) for x in (k, v))
    for backend in runnable(q, k, v, mask=mask):
        quiet = regard.attention(q, k, v, mask=mask, backend=backend)
        loud = regard.attention(q, loud_k, loud_v, mask=mask, backend=backend)
        assert torch.equal(quiet, loud), backend
    for backend in runnable(q.requires_grad_(), k, v, mask=mask):
        out = regard.attention(q, loud_k, loud_v, mask=mask, backend=backend)
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all(), backend


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "sparse"])
def test_result_is_the_same_however_the_queries_are_split(backend, small_tiles):
    q, k, v, _ = Case("several tiles", "none", "plain").build(torch.float32)
    mask = masks.causal() & masks.window(40, 0)
    whole = regard.attention(q, k, v, mask=mask, backend=backend)
    truth = regard.attention(*(x.double() for x in (q, k, v)), mask=mask, backend="reference")
    nk, nq = k.shape[2], q.shape[2]
    parts = []
    for start in range(0, nq, 17):
        stop = min(start + 17, nq)
        seen = nk - nq + stop  # the cache as it is when these queries arrive
        parts.append(regard.attention(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], mask=mask, backend=backend))
    assert_rule(torch.cat(parts, 2), whole, truth)


# -------------------------------------------------------------------------------------------------------- the rule


def test_rule_names_the_three_errors_and_the_worst_index():
    truth = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"0\.5.*\(1, 0\).*0"):
        assert_rule(truth.float() + torch.tensor([[0, 0], [0.5, 0]]), truth.float(), truth)


def test_rule_refuses_what_is_not_finite():
    truth = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="inf"):
        assert_rule(torch.tensor([0.0, float("nan"), 0.0]), truth.float(), truth)


def test_rule_refuses_another_shape_and_another_dtype():
    truth = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_rule(torch.zeros(2), torch.zeros(3), truth)
    with pytest.raises(AssertionError, match="dtype"):
        assert_rule(truth, torch.zeros(3), truth)


def test_suite_is_every_shape_under_every_mask_with_every_argument():
    every = list(cases())
    assert len(every) == len(set(every)) == len(SHAPES) * len(MASKS) * len(ARGUMENTS)


def test_suite_catches_a_wrong_attention():
    def forgets_the_offset(q, k, v, mask, **extra):
        mask = masks.causal(offset=0) if mask == masks.causal() else mask
        return regard.attention(q, k, v, mask=mask, **extra)

    with pytest.raises(AssertionError, match="queries"):
        conform(forgets_the_offset, Case("fewer queries, grouped, narrow v", "causal", "plain"))


def test_largest_error_counts_nan_as_infinite():
    assert largest_error(torch.tensor([float("nan")]), torch.zeros(1)) == (inf, (0,))
