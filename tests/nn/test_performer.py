"""Performer: against its definition, against the public package, as an estimate of softmax, and decoding."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.nn import feature_maps
from regard.nn.attention import GrowingCache
from regard.nn.blocks import Block, Embedding, FeedForward, Tower
from regard.nn.feature_maps import PerformerState, kernel_attention, log_features, orthogonal_features
from regard.nn.performer import PerformerAttention
from regard.positions import Rotary
from regard.testing import assert_rule

MASKS = {
    "everything": None,
    "causal": masks.causal(),
    "padding": masks.padding([211, 157]),
    "causal, padded left": masks.causal() & masks.padding([211, 157], side="left"),
    "one sequence of padding alone": masks.padding([0, 211]),
    "holes": masks.padding(torch.arange(211) % 3 != torch.tensor([[0], [1]])),
}


def call(nq=211, nk=211, dtype=torch.float64, size=1.0):
    """q, k, v and directions: 2 batch rows, 6 query heads on 3 key heads, D 5, Dv 7, 31 features."""
    random = torch.Generator().manual_seed(3)
    shapes = (2, 6, nq, 5), (2, 3, nk, 5), (2, 3, nk, 7)
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return (q * size).to(dtype), (k * size).to(dtype), v.to(dtype), orthogonal_features(31, 5, seed=5).to(dtype)


def definition(q, k, v, directions, *, mask=None, scale=None):
    """φ(q)·φ(k) for every pair, then normalised: output and lse, in the dtype that came."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    a, b = (log_features(x, directions, scale).together for x in (q, k))
    pairs = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), -1) - math.log(len(directions))  # (B, H, Nq, Nk)
    if mask is not None:
        pairs = pairs.masked_fill(~mask.dense(q.shape[2], k.shape[2]), -torch.inf)
    lse = torch.logsumexp(pairs, -1)
    return torch.exp(pairs - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)) @ v, lse


def package():
    with warnings.catch_warnings():  # it imports what Python and torch deprecate
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "performer_pytorch.performer_pytorch", reason="compares with it: pip install performer-pytorch"
        )


# ------------------------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_output_and_lse_are_those_of_the_definition(mask, size):
    q, k, v, w = call(size=size)
    output, lse = definition(q, k, v, w, mask=mask)
    rows = kernel_attention(q, k, v, w, mask=mask)
    torch.testing.assert_close(rows.output, output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rows.lse, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_single_precision_errs_no_more_than_the_definition_does(mask):
    wide, narrow = call(), call(dtype=torch.float32)
    truth, _ = definition(*(x.double() for x in narrow), mask=mask)
    baseline, _ = definition(*narrow, mask=mask)
    assert_rule(kernel_attention(*narrow, mask=mask).output, baseline, truth)
    assert narrow[0].dtype != wide[0].dtype


@pytest.mark.parametrize(("nq", "nk"), [(5, 211), (211, 5), (1, 1), (7, 7)])
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_queries_are_the_last_positions(nq, nk, mask):
    q, k, v, w = call(nq, nk)
    output, lse = definition(q, k, v, w, mask=mask)
    rows = kernel_attention(q, k, v, w, mask=mask)
    torch.testing.assert_close(rows.output, output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rows.lse, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, 3, 64])
def test_chunks_do_not_show(monkeypatch, chunk):
    q, k, v, w = call(71, 71)
    expected = {name: kernel_attention(q, k, v, w, mask=mask) for name, mask in (("", None), ("c", masks.causal()))}
    monkeypatch.setattr(feature_maps, "STEP", chunk)
    monkeypatch.setattr(feature_maps, "chunk_on", lambda device: chunk)
    for name, mask in (("", None), ("c", masks.causal())):
        rows = kernel_attention(q, k, v, w, mask=mask)
        torch.testing.assert_close(rows.output, expected[name].output, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(rows.lse, expected[name].lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.padding([23, 17], side="left")])
def test_gradients_are_those_of_the_definition(mask):
    q, k, v, w = call(23, 23)
    towards = torch.randn(2, 6, 23, 7, dtype=torch.float64)
    grads = []
    for function in (lambda *x: definition(*x, w, mask=mask)[0], lambda *x: kernel_attention(*x, w, mask=mask).output):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        grads.append(torch.autograd.grad(function(*leaves), leaves, towards))
    # −∞ of a row that sees nothing is NaN in the definition's gradient, and 0 here.
    for expected, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected.nan_to_num(0.0), rtol=1e-9, atol=1e-11)


def test_padded_keys_cannot_influence_the_result():
    q, k, v, w = call()
    loud = [x.clone() for x in (k, v)]
    for x in loud:
        x[1, :, 157:] = 1e30
    mask = masks.padding([211, 157])
    leaves = [x.requires_grad_() for x in (q, *loud)]
    rows, expected = kernel_attention(*leaves, w, mask=mask), kernel_attention(q, k, v, w, mask=mask)
    assert torch.equal(rows.output, expected.output)
    grads = torch.autograd.grad(rows.output.sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in grads)
    assert all(not bool(g[1, :, 157:].any()) for g in grads[1:])


def test_row_that_sees_nothing_gives_zero():
    q, k, v, w = call(5, 5)
    q.requires_grad_()
    rows = kernel_attention(q, k, v, w, mask=masks.causal() & masks.padding([3, 5], side="left"))
    assert not rows.output[0, :, :2].any()
    assert bool((rows.lse[0, :, :2] == -torch.inf).all())
    assert not torch.autograd.grad(rows.output.sum(), q)[0][0, :, :2].any()


def test_offset_for_each_row_is_causal_where_the_queries_are_the_last():
    q, k, v, w = call(5, 7)
    expected = kernel_attention(q, k, v, w, mask=masks.causal() & masks.padding([7, 3]))
    rows = kernel_attention(q, k, v, w, mask=masks.causal(offset=[2, 2]) & masks.padding([7, 3]))
    assert torch.equal(rows.output, expected.output)


def test_no_keys_and_no_queries():
    q, k, v, w = call(5, 0)
    assert torch.equal(kernel_attention(q, k, v, w).output, torch.zeros(2, 6, 5, 7).double())
    q, k, v, w = call(0, 5)
    assert kernel_attention(q, k, v, w).output.shape == (2, 6, 0, 7)
    assert kernel_attention(q, k, v, w, mask=masks.causal()).lse.shape == (2, 6, 0)


# ------------------------------------------------------------------------------------------------------- extreme inputs


def extreme(kind):
    """fp32 with scores up to 1e4 and beyond."""
    q, k, v, w = call(37, 37, torch.float32)
    if kind == "scores of ±10,000":
        q, k = (x / x.norm(dim=-1, keepdim=True) * 150 for x in (q, k))
    elif kind == "zeros":
        q, k, v = (torch.zeros_like(x) for x in (q, k, v))
    elif kind == "constant rows":
        q, k = torch.full_like(q, 40.0), torch.full_like(k, -40.0)
    elif kind == "keys that grow":
        k = k * torch.linspace(0, 100, 37).view(-1, 1)
    elif kind == "keys that shrink":
        k = k * torch.linspace(100, 0, 37).view(-1, 1)
    return q, k, v, w


KINDS = ["scores of ±10,000", "zeros", "constant rows", "keys that grow", "keys that shrink"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_extreme_inputs_give_finite_outputs_and_gradients(kind, mask):
    q, k, v, w = extreme(kind)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows = kernel_attention(*leaves, w, mask=mask)
    grads = torch.autograd.grad(rows.output.square().sum() + rows.lse.sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in (*rows, *grads))
    assert float(rows.output.detach().abs().max()) <= float(v.detach().abs().max()) * (1 + 1e-5)  # a mean of values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_extreme_inputs_in_double_precision_are_the_definition(kind, mask):
    q, k, v, w = (x.double() for x in extreme(kind))
    rows, (output, lse) = kernel_attention(q, k, v, w, mask=mask), definition(q, k, v, w, mask=mask)
    torch.testing.assert_close(rows.output, output, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(rows.lse, lse, rtol=1e-12, atol=1e-9)


def test_chunk_whose_later_keys_drown_the_earlier_is_halved(monkeypatch):
    """Without that, the first rows would be 0/0."""
    q, k, v, w = extreme("keys that shrink")
    k = k.flip(2) * 0 + torch.linspace(100, 0, 37).view(-1, 1)  # |k|² falls, so e^(−|k|²/2) rises by e^9000
    expected, _ = definition(*(x.double() for x in (q, k, v, w)), mask=masks.causal())
    rows = kernel_attention(q, k, v, w, mask=masks.causal())
    torch.testing.assert_close(rows.output.double(), expected, rtol=0.02, atol=0.02)
    monkeypatch.setattr(feature_maps, "SAFE", math.inf)
    assert not torch.allclose(kernel_attention(q, k, v, w, mask=masks.causal()).output.double(), expected, atol=0.1)


def test_half_precision_is_summed_in_single():
    q, k, v, w = call(dtype=torch.bfloat16)
    rows = kernel_attention(q, k, v, w)
    assert (rows.output.dtype, rows.lse.dtype) == (torch.bfloat16, torch.float32)
    wide = kernel_attention(q.float(), k.float(), v.float(), w.float())
    assert torch.equal(rows.output, wide.output.bfloat16())


def test_autocast_does_not_reach_the_sums():
    q, k, v, w = call(dtype=torch.float32)
    expected = kernel_attention(q, k, v, w)
    with torch.autocast("cpu", torch.bfloat16):
        rows = kernel_attention(q, k, v, w)
    assert torch.equal(rows.output, expected.output)


# ---------------------------------------------------------------------------------------------------------- an estimate


def test_directions_are_gaussian_and_orthogonal_in_blocks():
    w = orthogonal_features(11, 5, seed=7)
    assert torch.equal(w, orthogonal_features(11, 5, seed=7))
    assert not torch.equal(w, orthogonal_features(11, 5, seed=8))
    for block in (w[:5], w[5:10], w[10:]):
        products = block @ block.T
        assert float((products - products.diag().diag()).abs().max()) < 1e-12
    lengths = orthogonal_features(20_000, 5, seed=1).norm(dim=-1).square()  # chi-squared: mean 5, variance 10
    assert abs(float(lengths.mean()) - 5) < 4 * (10 / 20_000) ** 0.5


def test_kernel_estimate_is_unbiased():
    """z-test over redraws. Directions of a QR with LAPACK's own signs fail it by more than ten standard errors."""
    q = torch.tensor([[0.9, 0, 0, 0, 0], [0.3, 0.5, -0.2, 0.4, 0.1]], dtype=torch.float64)
    k = torch.tensor([[0.7, 0, 0, 0, 0], [-0.6, 0.2, 0.9, 0, 0.3], [0, 0, 0, 0, 0]], dtype=torch.float64)
    draws = []
    for seed in range(3000):
        w = orthogonal_features(7, 5, seed=seed)
        a, b = (log_features(x[None, None], w, 0.8).together.exp() for x in (q, k))
        draws.append((a @ b.transpose(-1, -2))[0, 0] / 7)
    drawn = torch.stack(draws)  # (3000, 2, 3)
    z = (drawn.mean(0) - (0.8 * q @ k.T).exp()) / (drawn.std(0) / 3000**0.5)
    assert float(z.abs().max()) < 3.5
    assert float((drawn.std(0) / drawn.mean(0)).max()) < 2  # so that 3.5 standard errors are less than 13 percent


def test_error_falls_as_one_over_the_root_of_the_features():
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 29, 8, generator=random, dtype=torch.float64) * s for s in (0.25, 0.25, 1.0))
    truth = regard.attention(q, k, v)
    counts = [16, 32, 64, 128, 256, 512, 1024]
    errors = torch.tensor(
        [
            [
                float((kernel_attention(q, k, v, orthogonal_features(m, 8, seed=99 * s + m)).output - truth).norm())
                for m in counts
            ]
            for s in range(60)
        ],
        dtype=torch.float64,
    ).log()
    x = torch.tensor(counts, dtype=torch.float64).log()
    x = x - x.mean()
    slopes = (errors * x).sum(1) / x.square().sum()  # one for each of 60 draws
    deviation = float(slopes.std()) / 60**0.5
    assert deviation < 0.015  # so that the band below is narrow
    assert abs(float(slopes.mean()) + 0.5) < 3 * deviation


def test_usual_number_of_features_is_at_least_one():
    assert [PerformerAttention(d, 1).features for d in (1, 64)] == [1, 266]


# ---------------------------------------------------------------------------------------------------------- the package


def test_features_are_those_of_the_package():
    theirs = package()
    q, k, _, w = call(13, 17)
    k = k.repeat_interleave(2, 1)
    for x, query in ((q, True), (k, False)):
        expected = theirs.softmax_kernel(x, projection_matrix=w, is_query=query)
        products = x @ w.T * 5**-0.25
        top = products.amax(-1, keepdim=True) if query else products.amax((-1, -2), keepdim=True)
        ours = log_features(x, w, 5**-0.5, epsilon=1e-4, top=top)
        assert torch.equal(ours.shift, top.expand_as(ours.shift))
        torch.testing.assert_close(ours.logs.exp() / 31**0.5, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_gradients_are_those_of_the_package(causal):
    theirs = package()
    q, k, v, w = call(139, 139)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)

    def expected(q, k, v):
        a, b = (theirs.softmax_kernel(x, projection_matrix=w, is_query=x is q) for x in (q, k))
        return theirs.causal_linear_attention_noncuda(a, b, v, eps=0.0) if causal else theirs.linear_attention(a, b, v)

    def ours(q, k, v):
        return kernel_attention(q, k, v, w, mask=masks.causal() if causal else None, epsilon=1e-4).output

    made = []
    for function in (expected, ours):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        made.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for theirs_, ours_ in zip(*made, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_layer_gives_the_numbers_of_the_package(qkv_bias):
    theirs = package().SelfAttention(12, heads=3, dim_head=5, nb_features=31, qkv_bias=qkv_bias).double()
    ours = PerformerAttention.from_package(theirs)
    x = torch.randn(2, 19, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-13)
    # The package counts padded keys in the denominator; ours are as if they were not there.
    padded = ours(x, mask=masks.padding([19, 11]))[1, :11]
    torch.testing.assert_close(padded, theirs(x[1:, :11])[0], rtol=0, atol=1e-13)


def test_causal_rows_of_the_package_sum_to_less_than_one_and_ours_do_not():
    theirs = package()
    q, k, v, w = call(19, 19)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    a, b = (theirs.softmax_kernel(x, projection_matrix=w, is_query=x is q) for x in (q, k))
    sums = theirs.causal_linear_attention_noncuda(a, b, torch.ones_like(v[..., :1]))  # 1e-6 in the denominator
    assert 1e-5 < float(1 - sums.min()) < 0.1
    rows = kernel_attention(q, k, v, w, mask=masks.causal(), epsilon=1e-4)
    torch.testing.assert_close(rows.output * sums, theirs.causal_linear_attention_noncuda(a, b, v), rtol=0, atol=1e-12)


def test_causal_layer_gives_the_numbers_of_the_package_without_its_millionth(capsys):
    theirs = package().SelfAttention(12, heads=3, dim_head=5, nb_features=31, causal=True).double()
    capsys.readouterr()  # it prints that it has no CUDA code
    ours = PerformerAttention.from_package(theirs)
    x = torch.randn(2, 19, 12, dtype=torch.float64)
    theirs.fast_attention.causal_linear_fn = lambda q, k, v: package().causal_linear_attention_noncuda(q, k, v, eps=0)
    torch.testing.assert_close(ours(x, mask=masks.causal()), theirs(x), rtol=0, atol=1e-13)


def test_cross_attention_gives_the_numbers_of_the_package():
    theirs = package().CrossAttention(12, heads=3, dim_head=5, nb_features=31).double()
    ours = PerformerAttention.from_package(theirs)
    x, context = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 13, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x, context), theirs(x, context=context), rtol=0, atol=1e-13)
    torch.testing.assert_close(ours(x, ours.keys(context)), ours(x, context), rtol=0, atol=0)


def test_from_package_refuses_what_has_no_counterpart():
    theirs = package()
    with pytest.raises(TypeError, match=r"performer_pytorch.*Linear"):
        PerformerAttention.from_package(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"generalized_attention.*dropout"):
        PerformerAttention.from_package(
            theirs.SelfAttention(6, heads=2, dim_head=3, generalized_attention=True, dropout=0.1)
        )


# ------------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("pieces", [[1] * 23, [7, 1, 5, 10], [23]])
def test_state_gives_the_whole_pass_piece_by_piece(pieces):
    layer = PerformerAttention(12, 4, num_kv_heads=2, features=19).double()
    x = torch.randn(2, 23, 12, dtype=torch.float64)
    state, parts, start = PerformerState(), [], 0
    for count in pieces:
        parts.append(layer(x[:, start : start + count], mask=masks.causal(), cache=state))
        start += count
        assert len(state) == start
        assert state.nbytes == 8 * 2 * 2 * 19 * (3 + 2)  # always: B·Hkv·m·(Dv + 2); 8 bytes each
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=masks.causal()), rtol=0, atol=1e-13)


def test_state_with_padding_gives_the_whole_pass():
    layer = PerformerAttention(12, 4, features=19).double()
    x, real = torch.randn(2, 13, 12, dtype=torch.float64), torch.arange(13) >= torch.tensor([[0], [4]])
    whole = layer(x, mask=masks.causal() & masks.padding(real))
    state = PerformerState()
    first = layer(x[:, :7], mask=masks.causal() & masks.padding(real[:, :7]), cache=state)
    rest = [
        layer(x[:, i : i + 1], mask=masks.causal() & masks.padding(real[:, : i + 1]), cache=state) for i in range(7, 13)
    ]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole, rtol=0, atol=1e-13)


def test_new_positions_without_a_mask_see_each_other():
    layer = PerformerAttention(12, 4, features=19).double()
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    state = PerformerState()
    layer(x[:, :5], mask=masks.causal(), cache=state)
    torch.testing.assert_close(layer(x[:, 5:], cache=state), layer(x)[:, 5:], rtol=0, atol=1e-13)


def test_state_keeps_chosen_rows():
    layer = PerformerAttention(12, 4, features=19).double()
    x = torch.randn(3, 9, 12, dtype=torch.float64)
    state = PerformerState()
    layer(x[:, :8], mask=masks.causal(), cache=state)
    state.keep(torch.tensor([2, 0]))
    last = layer(x[[2, 0], 8:], mask=masks.causal(), cache=state)
    torch.testing.assert_close(last, layer(x, mask=masks.causal())[[2, 0], 8:], rtol=0, atol=1e-13)
    assert repr(state) == f"PerformerState(9 positions, {state.nbytes} bytes)"


def test_state_carries_gradients():
    layer, state = PerformerAttention(6, 2, features=19).double(), PerformerState()
    x = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    steps = [layer(x[:, i : i + 1], mask=masks.causal(), cache=state) for i in range(5)]
    torch.cat(steps, 1).square().sum().backward()
    stepwise, x.grad = x.grad, None
    layer(x, mask=masks.causal()).square().sum().backward()
    torch.testing.assert_close(stepwise, x.grad, rtol=1e-10, atol=1e-13)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@torch.no_grad()
def test_state_of_another_batch_raises():
    layer, state = PerformerAttention(6, 2), PerformerState()
    layer(torch.randn(1, 4, 6), mask=masks.causal(), cache=state)
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(3, 2\)"):
        layer(torch.randn(3, 1, 6), mask=masks.causal(), cache=state)


def test_dropout_of_weights_that_do_not_exist_raises():
    layer = PerformerAttention(6, 2)
    layer.dropout = 0.0
    with pytest.raises(ValueError, match="dropout"):
        layer.dropout = 0.5


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@torch.no_grad()
def test_copy_of_a_state_goes_on_as_the_state_does(copied):
    layer, x = PerformerAttention(6, 2, features=19), torch.randn(2, 7, 6)
    state = PerformerState()
    layer(x[:, :5], mask=masks.causal(), cache=state)
    other, steps = copied(state), []
    assert (len(other), other.nbytes) == (5, state.nbytes)
    for each in (state, other):
        steps.append([layer(x[:, i : i + 1], mask=masks.causal(), cache=each) for i in (5, 6)])
    assert torch.equal(torch.cat(steps[0]), torch.cat(steps[1]))
    assert len(other) == 7


@torch.no_grad()
def test_state_goes_along_with_a_copy_of_its_layer():
    layer, x, state = PerformerAttention(6, 2), torch.randn(1, 5, 6), PerformerState()
    layer(x[:, :4], mask=masks.causal(), cache=state)
    twin, copied = copy.deepcopy((layer, state))
    expected = layer(x[:, 4:], mask=masks.causal(), cache=state)
    assert torch.equal(twin(x[:, 4:], mask=masks.causal(), cache=copied), expected)


@torch.no_grad()
def test_compiled_step_is_one_graph_and_goes_on_with_what_came_before():
    layer, x = PerformerAttention(6, 2, features=19).double(), torch.randn(1, 5, 6, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for before in (0, 2):  # a state that is new to the compiled step, and one of an uncompiled layer
        state, parts = PerformerState(), []
        if before:
            parts.append(layer(x[:, :before], mask=masks.causal(), cache=state))
        parts += [compiled(x[:, i : i + 1], mask=masks.causal(), cache=state) for i in range(before, 4)]
        parts.append(layer(x[:, 4:], mask=masks.causal(), cache=state))
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=masks.causal()), rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------------------------------------ the layer


def test_redraw_changes_the_features_and_a_seed_brings_them_back():
    layer, x = PerformerAttention(6, 2, seed=3), torch.randn(1, 5, 6)
    first = layer(x)
    layer.redraw(seed=4)
    assert not torch.equal(layer(x), first)
    layer.redraw(seed=3)
    assert torch.equal(layer(x), first)
    assert "directions" in layer.state_dict()  # they are saved: other features are another function


def test_directions_drawn_in_inference_mode_can_be_trained_with():
    softmax = regard.MultiHeadAttention(6, 2)
    with torch.inference_mode():
        layer = PerformerAttention.in_place_of(softmax, features=19)
    layer(torch.randn(1, 5, 6)).square().sum().backward()
    assert softmax.w_q.weight.grad.any()
    softmax.w_q.weight.grad = None
    with torch.inference_mode():
        layer.redraw(seed=1)
    layer(torch.randn(1, 5, 6)).square().sum().backward()
    assert softmax.w_q.weight.grad.any()


def test_weights_of_multi_head_attention_load_and_more_features_come_closer():
    torch.manual_seed(2)
    softmax = regard.MultiHeadAttention(12, 3)
    x = torch.randn(1, 31, 12)
    errors = []
    for count in (8, 4096):
        layer = PerformerAttention(12, 3, features=count)
        layer.load_state_dict({**softmax.state_dict(), "directions": layer.directions})
        with torch.no_grad():
            errors.append(float((layer(x) - softmax(x)).norm() / softmax(x).norm()))
    assert errors[1] < errors[0] / 4
    assert errors[1] < 0.02


@pytest.mark.parametrize("bias", [True, False])
def test_fused_projections_are_the_separate_ones(bias):
    """By one product for x itself, by some of the rows for a context and its keys."""
    fused = PerformerAttention(10, 4, num_kv_heads=2, head_dim=3, features=19, fused=True, bias=bias).double()
    separate = PerformerAttention(10, 4, num_kv_heads=2, head_dim=3, features=19, bias=bias).double()
    with torch.no_grad():
        for part, rows in zip((separate.w_q, separate.w_k, separate.w_v), ((0, 12), (12, 18), (18, 24)), strict=True):
            for mine, whole in zip(part.parameters(), fused.w_qkv.parameters(), strict=True):
                mine.copy_(whole[slice(*rows)])
    separate.w_o.load_state_dict(fused.w_o.state_dict())
    x, context = torch.randn(2, 7, 10, dtype=torch.float64), torch.randn(2, 5, 10, dtype=torch.float64)
    for looked_at in (None, context):
        torch.testing.assert_close(fused(x, looked_at), separate(x, looked_at), rtol=0, atol=1e-13)
    torch.testing.assert_close(fused(x, fused.keys(context)), separate(x, context), rtol=0, atol=1e-13)


def test_each_head_is_normed_before_its_features():
    norms = nn.LayerNorm(3).double(), nn.RMSNorm(3).double()
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.tensor([0.5, 2.0, 1.5]))
    layer = PerformerAttention(6, 2, head_norms=norms).double()
    plain = PerformerAttention(6, 2).double()
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "norm" not in key})
    x = torch.randn(1, 7, 6, dtype=torch.float64)
    (q, k, v), (wide_q, wide_k, wide_v) = layer.heads_of(x), plain.heads_of(x)
    assert torch.equal(q, norms[0](wide_q))
    assert torch.equal(k, norms[1](wide_k))
    assert torch.equal(v, wide_v)


def test_new_cache_takes_as_much_as_a_state_that_was_used():
    layer, x = PerformerAttention(6, 2, num_kv_heads=1, features=19), torch.randn(3, 5, 6)
    state = layer.new_cache(3, 5, dtype=torch.float32, device="cpu")
    empty = state.nbytes
    assert empty == 3 * 19 * (3 + 2) * 4
    torch.testing.assert_close(layer(x, mask=masks.causal(), cache=state), layer(x, mask=masks.causal()))
    assert (state.nbytes, len(state)) == (empty, 5)


def test_rotary_turns_queries_and_keys_and_goes_on_after_the_state():
    layer = PerformerAttention(12, 3, features=19, position=Rotary(4)).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    whole = layer(x, mask=masks.causal())
    q, k, _ = layer.heads_of(x)
    plain = PerformerAttention(12, 3, features=19).double()
    plain.load_state_dict(layer.state_dict())
    unturned = plain.heads_of(x)
    torch.testing.assert_close(q, Rotary(4).turn(unturned[0], torch.arange(9)))
    torch.testing.assert_close(k, Rotary(4).turn(unturned[1], torch.arange(9)))
    state = PerformerState()
    parts = [layer(x[:, :5], mask=masks.causal(), cache=state), layer(x[:, 5:], mask=masks.causal(), cache=state)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(layer(x, mask=masks.causal(), positions=torch.arange(9)), whole, rtol=0, atol=0)


def test_layer_without_memory_can_be_made():
    with torch.device("meta"):
        layer = PerformerAttention(6, 2)
    assert layer.directions.is_meta


def test_positions_alone_are_one_batch_row():
    layer, x = PerformerAttention(6, 2), torch.randn(7, 6)
    assert torch.equal(layer(x), layer(x[None])[0])
    assert torch.equal(layer(x, x[:3]), layer(x[None], x[None, :3])[0])


@pytest.mark.parametrize(
    ("make", "problem", "message"),
    [
        (lambda: PerformerAttention(6, 2, features=0), ValueError, r"features.*1.*0"),
        (lambda: orthogonal_features(3, 0, seed=0), ValueError, r"size.*1.*0"),
        (lambda: PerformerAttention(6, 2, epsilon=-1.0), ValueError, r"epsilon.*0.*1.*-1.0"),
        (lambda: PerformerAttention(6, 2, scale=0.0), ValueError, r"scale.*0.*0.0"),
        (lambda: PerformerAttention(6, 2, scale=math.inf), ValueError, r"scale.*0.*inf"),
        (lambda: PerformerAttention(6, 2, scale=math.nan), ValueError, r"scale.*0.*nan"),
        (
            lambda: PerformerAttention.in_place_of(regard.MultiHeadAttention(6, 2, scale=math.inf)),
            ValueError,
            r"scale.*inf.*features.*scale.*0",
        ),
        (
            lambda: PerformerAttention(6, 2, features=3.5),
            TypeError,
            r"features.*float.*3.5",
        ),
        (lambda: PerformerAttention(6, 2, features=True), TypeError, r"features.*bool.*True"),
        (lambda: PerformerAttention(6, 2, seed=1.5), TypeError, r"seed.*float.*1.5"),
        (lambda: PerformerAttention(6, 2).redraw("1"), TypeError, r"seed.*str.*'1'"),
        (lambda: PerformerAttention(6.0, 2), TypeError, r"d_model.*float.*6.0"),
        (lambda: PerformerAttention(6, 2, head_dim=1.5), TypeError, r"head_dim.*float.*1.5"),
        (
            lambda: PerformerAttention(6, 2)(torch.zeros(2, 3, 6), mask=masks.causal(offset=[0, 1])),
            ValueError,
            r"causal\(offset=\[0, 1\]\).*3",
        ),
        (
            lambda: PerformerAttention(6, 2, position=regard.positions.alibi(2)),
            TypeError,
            r"position.*regard.positions.Rotary.*None",
        ),
        (
            lambda: PerformerAttention(6, 2)(torch.zeros(1, 3, 6), cache=GrowingCache()),
            TypeError,
            r"cache.*PerformerState.*GrowingCache",
        ),
        (
            lambda: PerformerAttention(6, 2)(torch.zeros(1, 3, 6), positions=torch.arange(3)),
            ValueError,
            r"positions.*Rotary",
        ),
        (
            lambda: PerformerAttention(8, 2, position=Rotary(4))(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)),
            ValueError,
            "Rotary",
        ),
        (
            lambda: PerformerAttention(6, 2)(torch.zeros(1, 3, 6), torch.zeros(1, 3, 6), cache=PerformerState()),
            ValueError,
            "cache",
        ),
        (
            lambda: PerformerAttention(6, 2)(torch.zeros(1, 3, 6), mask=masks.window(1, 0)),
            ValueError,
            r"window\(1, 0\).*masks.padding\(…\).*Performer.*masks.causal\(\)",
        ),
        (
            lambda: PerformerAttention(6, 2, epsilon=1e-4)(torch.zeros(1, 3, 6), cache=PerformerState()),
            ValueError,
            r"epsilon.*state",
        ),
        (
            lambda: kernel_attention(*call(5, 3), state=PerformerState()),
            ValueError,
            r"5.*state.*3",
        ),
        (
            lambda: kernel_attention(*(torch.zeros(3, 5),) * 3, torch.ones(3, 5)),
            ValueError,
            r"q.*k.*v.*\(B, H, Nq, D\).*\(3, 5\)",
        ),
        (
            lambda: kernel_attention(torch.zeros(1, 2, 3, 5), *(torch.zeros(1, 2, 3, 7),) * 2, torch.ones(3, 5)),
            ValueError,
            r"q.*k.*v.*\(1, 2, 3, 5\).*\(1, 2, 3, 7\)",
        ),
        (
            lambda: kernel_attention(torch.zeros(1, 3, 3, 5), *(torch.zeros(1, 2, 3, 5),) * 2, torch.ones(3, 5)),
            ValueError,
            r"H a multiple of Hkv.*\(1, 3, 3, 5\).*\(1, 2, 3, 5\)",
        ),
        (
            lambda: kernel_attention(*(torch.zeros(1, 2, 3, 5),) * 3, torch.ones(3, 7)),
            ValueError,
            r"directions.*features.*5.*\(3, 7\)",
        ),
    ],
)
def test_wrong_input_is_refused(make, problem, message):
    with pytest.raises(problem, match=message):
        make()


# ------------------------------------------------------------------------------------------------- in blocks, and seen


def decoder(*, cross=False):
    blocks = []
    for _ in range(2):
        norms = [nn.LayerNorm(6) for _ in range(3 if cross else 2)]
        other = PerformerAttention(6, 3, features=19) if cross else None
        attention = PerformerAttention(6, 3, features=19, position=Rotary(2))
        feed_forward = FeedForward(6, 11, "gelu")
        blocks.append(Block(attention, feed_forward, norms, norm_first=True, cross=other))
    return Tower(Embedding(13, 6), blocks, causal=True, norm=nn.LayerNorm(6)).double().eval()


def test_tower_of_performer_blocks_decodes_padded_texts_step_by_step():
    tower, ids = decoder(), torch.randint(13, (2, 11))
    mask = torch.arange(11) >= torch.tensor([[0], [4]])
    whole = tower(ids, attention_mask=mask).last_hidden_state
    caches = [PerformerState(), PerformerState()]
    steps = [tower(ids[:, :6], attention_mask=mask[:, :6], caches=caches).last_hidden_state]
    steps += [
        tower(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], caches=caches).last_hidden_state for i in range(6, 11)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole[1, 4:], tower(ids[1:, 4:]).last_hidden_state[0], rtol=0, atol=1e-12)


def test_decoder_of_performer_blocks_looks_at_a_memory():
    tower, ids = decoder(cross=True), torch.randint(13, (2, 5))
    memory, real = torch.randn(2, 7, 6, dtype=torch.float64), torch.arange(7) < torch.tensor([[7], [3]])
    whole = tower(ids, encoder_hidden_states=memory, encoder_attention_mask=real).last_hidden_state
    ready = tower(ids, encoder_hidden_states=tower.keys(memory), encoder_attention_mask=real).last_hidden_state
    torch.testing.assert_close(ready, whole, rtol=0, atol=1e-13)
    cut = tower(ids[1:], encoder_hidden_states=memory[1:, :3]).last_hidden_state
    torch.testing.assert_close(whole[1:], cut, rtol=0, atol=1e-12)


def test_watch_says_that_it_saw_nothing():
    tower = decoder()
    with torch.no_grad(), regard.watch(tower) as seen:
        tower(torch.randint(13, (1, 5)))
    assert seen.names == []
    assert list(seen.unseen) == ["blocks.0.attention", "blocks.1.attention"]
    for why in seen.unseen.values():
        assert "regard.lens.efficient_views.look_features" in why


def test_watch_does_not_advise_to_watch_a_performer_uncompiled():
    layer = PerformerAttention(6, 3, features=19)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad(), regard.watch(compiled) as seen:
        compiled(torch.zeros(1, 5, 6))
    assert seen.unseen == {"": PerformerAttention.why_unseen}


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gpu_errs_no_more_than_the_definition_does(mask):
    narrow = call(dtype=torch.float32)
    truth, _ = definition(*(x.double() for x in narrow), mask=mask)
    baseline, _ = definition(*narrow, mask=mask)
    rows = kernel_attention(*(x.cuda() for x in narrow), mask=mask)
    assert_rule(rows.output.cpu(), baseline, truth)
