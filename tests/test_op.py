"""`regard.attention` as its users meet it: beside torch's own attention, in every layout, and with wrong arguments.

Agreement of the backends with the definition is in test_conformance.py.
"""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import masks, positions
from regard.growth import peak_bytes
from regard.testing import assert_rule

BACKENDS = ("reference", "tiled", "sdpa", "flex", "sparse")
B, H, NQ, NK, D, DV = 2, 3, 5, 11, 7, 13


def tensors(q=(B, H, NQ, D), k=(B, H, NK, D), v=(B, H, NK, DV), dtype=torch.float32, seed=0):
    """q, k and v, random but always the same."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=random).to(dtype) for shape in (q, k, v))


def arrays(*shapes, dtype=np.float64):
    return tuple(x.double().numpy().astype(dtype) for x in tensors(*shapes))


def assert_agrees(theirs, q, k, v, **extra):
    """Every backend that can obeys the numeric rule, with `theirs` as the truth in fp64 and as the baseline."""
    truth, baseline = theirs(q.double(), k.double(), v.double()), theirs(q, k, v)
    for name, can, _ in regard.backends.explain(q, k, v, **extra).rows:
        if can and name != "flex":  # which is slow to compile, and judged in test_conformance.py
            assert_rule(regard.attention(q, k, v, **extra, backend=name), baseline, truth, what=name)


def assert_defined(out, q, k, v, **extra):
    """`out`, NumPy or torch, obeys the numeric rule for this call of torch tensors or arrays."""
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    truth = regard.attention(q.double(), k.double(), v.double(), **extra, backend="reference")
    baseline = regard.attention(q, k, v, **extra, backend="reference")
    assert_rule(torch.as_tensor(out), baseline, truth)


# -------------------------------------------------------------------------------------------------- beside torch's SDPA


def test_full_attention_is_sdpa():
    assert_agrees(sdpa, *tensors())


def test_square_causal_is_sdpas_is_causal():
    sizes = (B, H, NK, D)
    assert_agrees(lambda q, k, v: sdpa(q, k, v, is_causal=True), *tensors(sizes, sizes, sizes), mask=masks.causal())


@pytest.mark.parametrize(("nq", "nk"), [(NQ, NK), (NK, NQ)])
def test_causal_from_the_first_key_is_sdpas_is_causal(nq, nk):
    q, k, v = tensors((B, H, nq, D), (B, H, nk, D), (B, H, nk, DV))
    assert_agrees(lambda q, k, v: sdpa(q, k, v, is_causal=True), q, k, v, mask=masks.causal(offset=0))


def test_causal_by_default_is_torchs_causal_lower_right():
    # More queries than keys are left out: there causal_lower_right's rows without keys are NaN.
    q, k, v = tensors(v=(B, H, NK, D))
    assert_agrees(lambda q, k, v: sdpa(q, k, v, attn_mask=causal_lower_right(NQ, NK)), q, k, v, mask=masks.causal())


def test_boolean_mask_is_sdpas_boolean_attn_mask():
    mask = torch.rand(B, 1, NQ, NK) < 0.6
    mask[..., 0] = True
    assert_agrees(lambda q, k, v: sdpa(q, k, v, attn_mask=mask), *tensors(), mask=mask)


def test_bias_is_sdpas_float_attn_mask():
    bias = torch.randn(H, NQ, NK)
    assert_agrees(lambda q, k, v: sdpa(q, k, v, attn_mask=bias.to(q.dtype)), *tensors(), bias=bias)


def test_scale_is_sdpas_scale():
    assert_agrees(lambda q, k, v: sdpa(q, k, v, scale=0.7), *tensors(), scale=0.7)


def test_grouped_heads_are_sdpas_enable_gqa():
    q, k, v = tensors((B, 6, NQ, D), (B, 2, NK, D), (B, 2, NK, DV))
    assert_agrees(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v)


# ------------------------------------------------------------------------------------------------- beside FlexAttention

IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
SLOPES = torch.tensor([0.5, 0.25, 0.125])
TABLE = torch.linspace(-1, 1, H * 7).reshape(H, 7)

MASK_MODS = {
    "causal": (lambda b, h, i, j: j <= i, masks.causal(offset=0)),
    "sliding window": (lambda b, h, i, j: (j <= i) & (j >= i - 3), masks.window(3, 0, offset=0)),
    "documents": (lambda b, h, i, j: IDS[i] == IDS[j], masks.documents(IDS, offset=0)),
    "causal documents": (
        lambda b, h, i, j: (IDS[i] == IDS[j]) & (j <= i),
        masks.documents(IDS, offset=0) & masks.causal(offset=0),
    ),
    "prefix": (lambda b, h, i, j: (j < 4) | (j <= i), masks.prefix(4, offset=0)),
    "the last queries": (lambda b, h, i, j: j <= i + NK - NQ, masks.causal()),
    "rows without keys": (lambda b, h, i, j: j < i - 2, masks.causal(offset=-3)),
}
SCORE_MODS = {
    "softcap": (lambda s, b, h, i, j: 1.5 * torch.tanh(s / 1.5), {"softcap": 1.5}),
    "ALiBi": (
        lambda s, b, h, i, j: s - SLOPES.to(s.dtype)[h] * (i - j).abs(),
        {"bias": positions.alibi(H, slopes=SLOPES, offset=0)},
    ),
    "relative": (
        lambda s, b, h, i, j: s + TABLE.to(s.dtype)[h, (j - i).clamp(-3, 3) + 3],
        {"bias": positions.Relative(TABLE[None, :, None], offset=0)},
    ),
    "softcap, then ALiBi": (
        lambda s, b, h, i, j: 2 * torch.tanh(s / 2) - SLOPES.to(s.dtype)[h] * (i - j).abs(),
        {"softcap": 2.0, "bias": positions.alibi(H, slopes=SLOPES, offset=0)},
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_is_the_mask_mod_one_would_write(name):
    mod, mask = MASK_MODS[name]
    blocks = create_block_mask(mod, None, None, NQ, NK, device="cpu")
    assert_agrees(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks), *tensors(), mask=mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", SCORE_MODS)
def test_bias_and_softcap_are_the_score_mod_one_would_write(name):
    mod, extra = SCORE_MODS[name]
    assert_agrees(lambda q, k, v: flex_attention(q, k, v, score_mod=mod), *tensors(), **extra)


# ---------------------------------------------------------------------------------------------------------------- NumPy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_in_gives_numpy_of_the_same_dtype_out(dtype, backend):
    q, k, v = arrays(dtype=dtype)
    out = regard.attention(q, k, v, mask=masks.causal(), backend=backend)
    assert type(out) is np.ndarray
    assert out.dtype == dtype
    assert out.shape == (B, H, NQ, DV)
    tensor = [torch.from_numpy(x) for x in (q, k, v)]
    if backend != "reference":  # the same computation, to the bit
        assert torch.equal(torch.from_numpy(out), regard.attention(*tensor, mask=masks.causal(), backend=backend))
    elif dtype == "float64":  # where the definition is both truth and baseline: let SDPA be the baseline
        theirs = [regard.attention(*tensor, mask=masks.causal(), backend=b) for b in ("sdpa", "reference")]
        assert_rule(torch.from_numpy(out), *theirs)
    else:
        assert_defined(out, *tensor, mask=masks.causal())


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is double on this machine")
def test_longdouble_is_computed_in_longdouble_by_the_reference():
    q, k, v = arrays(dtype=np.longdouble)
    assert regard.backends.explain(q, k, v).chosen == "reference"
    out = regard.attention(q, k, v)
    assert out.dtype == np.longdouble
    scores = q @ k.swapaxes(-1, -2) * (np.longdouble(1) / np.sqrt(np.longdouble(D)))
    weights = np.exp(scores)
    expected = weights / weights.sum(-1, keepdims=True) @ v
    # The default scale is a double, 1e-16 off: what is left is far under a double's rounding of the result.
    assert np.abs(out - expected).max() < 1e-15
    assert np.abs(out - out.astype(np.float64)).max() > 0


AWKWARD = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "reversed": lambda x: np.ascontiguousarray(x[::-1, :, ::-1, ::-1])[::-1, :, ::-1, ::-1],
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "unaligned": lambda x: np.frombuffer(b"-" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", AWKWARD)
def test_awkward_arrays_give_what_plain_ones_give(form, backend):
    plain = arrays(dtype=np.float32)
    awkward = [AWKWARD[form](x) for x in plain]
    assert all(np.array_equal(a, x) for a, x in zip(awkward, plain, strict=True))
    out = regard.attention(*awkward, mask=masks.causal(), backend=backend)
    assert out.dtype == np.float32  # in native byte order, as NumPy's own arithmetic answers
    assert_defined(out, *plain, mask=masks.causal())


@pytest.fixture
def every_warning():
    """torch warns of some things once per process only, which would leave all but one test blind."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("form", ["reversed", "read-only", "big-endian"])
@pytest.mark.parametrize("name", ["mask", "bias", "sinks"])
def test_awkward_masks_biases_and_sinks_give_what_plain_ones_give(name, form):
    q, k, v = arrays(dtype=np.float32)
    random = np.random.default_rng(0)
    plain = random.standard_normal(H if name == "sinks" else (B, H, NQ, NK)).astype(np.float32)
    plain = plain > 0 if name == "mask" else plain
    awkward = plain[::-1].copy()[::-1] if name == "sinks" and form == "reversed" else AWKWARD[form](plain)
    out, expected = (regard.attention(q, k, v, **{name: x}, backend="tiled") for x in (awkward, plain))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_mapped_arrays_work(tmp_path, backend):
    q, k, v = arrays(dtype=np.float32)
    mapped = []
    for name, x in {"q": q, "k": k, "v": v}.items():
        np.save(tmp_path / f"{name}.npy", x)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    assert_defined(regard.attention(*mapped, backend=backend), q, k, v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numpy_bias_of_another_precision_works(backend):
    q, k, v = arrays(dtype=np.float32)
    bias = np.random.default_rng(0).standard_normal((NQ, NK))  # float64, as NumPy makes them
    assert_defined(regard.attention(q, k, v, bias=bias, backend=backend), q, k, v, bias=bias)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa"])
def test_numpy_call_with_a_trained_bias_works(backend):
    q, k, v = arrays(dtype=np.float32)
    bias = torch.randn(NQ, NK, requires_grad=True)
    out = regard.attention(q, k, v, bias=bias, backend=backend)
    assert_defined(out, q, k, v, bias=bias.detach())


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_never_modified(backend, numpy):
    given = dict(zip("qkv", tensors(), strict=True)) | {"mask": torch.rand(NQ, NK) < 0.5, "bias": torch.randn(NQ, NK)}
    if backend != "sdpa":
        given["sinks"] = torch.randn(H)
    before = {n: x.clone() for n, x in given.items()}
    regard.attention(
        **({n: x.numpy() for n, x in given.items()} if numpy else given),
        softcap=None if backend == "sdpa" else 2.0,
        backend=backend,
    )
    assert all(torch.equal(given[n], x) for n, x in before.items())


# -------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (3, 5, 2)])
def test_every_layout_gives_what_four_axes_give(lead, numpy):
    q, k, v = tensors((*lead, NQ, D), (*lead, NK, D), (*lead, NK, DV))
    four = {0: (1, 1), 1: (3, 1), 2: (3, 2), 3: (15, 2)}[len(lead)]
    expected = regard.attention(*(x.reshape(*four, *x.shape[-2:]) for x in (q, k, v)), mask=masks.causal())
    out = regard.attention(*(x.numpy() if numpy else x for x in (q, k, v)), mask=masks.causal())
    assert tuple(out.shape) == (*lead, NQ, DV)
    assert torch.equal(torch.as_tensor(out), expected.reshape(*lead, NQ, DV))


FITTING = [
    ((), (NQ, NK)),
    ((), (1, NK)),
    ((3,), (NQ, NK)),
    ((3,), (3, NQ, NK)),
    ((3,), (3, 1, NK)),
    ((3, 2), (NQ, NK)),
    ((3, 2), (2, NQ, NK)),
    ((3, 2), (2, NQ, 1)),
    ((3, 2), (3, 1, NQ, NK)),
    ((3, 2), (3, 2, NQ, NK)),
    ((3, 5, 2), (NQ, NK)),
    ((3, 5, 2), (2, NQ, NK)),
    ((3, 5, 2), (5, 1, NQ, NK)),
    ((3, 5, 2), (3, 5, 1, NQ, NK)),
    ((3, 5, 2), (3, 1, 2, 1, NK)),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa"])
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(("lead", "shape"), FITTING)
def test_masks_and_biases_broadcast_to_the_weights(lead, shape, name, backend):
    q, k, v = tensors((*lead, NQ, D), (*lead, NK, D), (*lead, NK, DV))
    cells = torch.randn(shape)
    cells = cells > -0.5 if name == "mask" else cells
    whole = cells.expand(*lead, NQ, NK)
    out = regard.attention(q, k, v, **{name: cells}, backend=backend)
    scores = q.double() @ k.double().mT / D**0.5
    scores = scores.masked_fill(~whole, -torch.inf) if name == "mask" else scores + whole
    truth = torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()  # a row that sees nothing is 0/0 here
    baseline = regard.attention(q, k, v, **{name: whole}, backend="reference")
    assert_rule(out, baseline, truth)


def test_numpy_masks_and_biases_broadcast_like_tensors():
    q, k, v = arrays((B, H, NQ, D), (B, H, NK, D), (B, H, NK, DV))
    mask, bias = np.random.default_rng(0).random((B, 1, NQ, NK)) < 0.5, np.ones((H, 1, NK))
    out = regard.attention(q, k, v, mask=mask, bias=bias)
    ours = [torch.from_numpy(x) for x in (q, k, v, mask, bias)]
    assert np.array_equal(out, regard.attention(*ours[:3], mask=ours[3], bias=ours[4]).numpy())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_query_head_reads_its_groups_key_head(kv_heads, backend):
    q, k, v = tensors((B, 6, NQ, D), (B, kv_heads, NK, D), (B, kv_heads, NK, DV))
    out = regard.attention(q, k, v, backend=backend)
    for h in range(6):
        group = h // (6 // kv_heads)
        assert_defined(out[:, h], q[:, h], k[:, group], v[:, group])


# -------------------------------------------------------------------------------------------------------------- dropout

DROPPING = ("reference", "tiled", "sdpa", "sparse")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 2 × 3, so that these small calls cross several."""
    monkeypatch.setattr(regard.backends.tiled, "tile_size", lambda batch, heads, nq, nk: (min(2, nq), min(3, nk)))


@pytest.mark.parametrize("backend", DROPPING)
def test_mean_over_many_draws_is_the_result_without_dropout(backend, small_tiles):
    draws, p = 4001, 0.3
    q, k, v = (x.expand(draws, *x.shape[1:]) for x in tensors((1, 2, NQ, D), (1, 2, NK, D), (1, 2, NK, DV)))
    weights = regard.steps(q[0].double(), k[0].double(), v[0].double()).weights  # (2, Nq, Nk)
    mean = regard.attention(q, k, v, dropout=p, backend=backend).double().mean(0)
    # Each weight is multiplied by 0 or 1/(1 − p), of variance p/(1 − p); five standard errors fail once in a million.
    error = (p / (1 - p) * (weights.square() @ v[0].double().square()) / draws).sqrt()
    assert ((mean - weights @ v[0].double()).abs() < 5 * error).all()


@pytest.mark.parametrize("backend", DROPPING)
def test_dropout_zeroes_weights_and_grows_the_others(backend, small_tiles):
    q, k, _ = tensors((B, H, 61, D), (B, H, 67, D))
    eye = torch.eye(67).expand(B, H, 67, 67)  # with these values the output is the weights
    truth = regard.attention(q.double(), k.double(), eye.double()) / 0.75
    baseline = regard.attention(q, k, eye, backend="reference") / 0.75
    out = regard.attention(q, k, eye, dropout=0.25, backend=backend)
    dropped = out == 0
    assert_rule(torch.where(dropped, truth, out.double()).float(), baseline, truth)
    n = dropped.numel()
    assert abs(int(dropped.sum()) - 0.25 * n) < 5 * (0.25 * 0.75 * n) ** 0.5


@pytest.mark.parametrize("backend", DROPPING)
def test_dropout_draws_anew_for_each_batch_row_head_query_and_tile(backend, small_tiles):
    q, k, _ = tensors((B, H, 59, D), (B, H, 60, D))
    out = regard.attention(q, k, torch.eye(60).expand(B, H, 60, 60), dropout=0.5, backend=backend)
    dropped = (out == 0).reshape(B * H * 59, 60)
    assert len(dropped.unique(dim=0)) == len(dropped)
    tiles = (out == 0)[:, :, :58].unflatten(-1, (20, 3)).unflatten(2, (29, 2)).movedim(-2, 2)  # (B, H, 20, 29, 2, 3)
    # 36 cells over the batch and heads of one tile, the same cells in each: two tiles alike are one in 10¹¹.
    patterns = tiles.movedim((2, 3), (0, 1)).reshape(580, -1)
    assert len(patterns.unique(dim=0)) == 580


@pytest.mark.parametrize("backend", DROPPING)
def test_the_same_seed_drops_the_same_weights(backend):
    q, k, v = tensors()
    torch.manual_seed(3)
    first, second = (regard.attention(q, k, v, dropout=0.4, backend=backend) for _ in range(2))
    torch.manual_seed(3)
    again = regard.attention(q, k, v, dropout=0.4, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", DROPPING)
def test_dropout_applies_to_numpy_and_without_gradient(backend):
    q, k, v = arrays()
    with torch.no_grad():
        out = regard.attention(q, k, v, dropout=0.5, backend=backend)
    assert not np.allclose(out, regard.attention(q, k, v))


# ------------------------------------------------------------------------------------------------------------ gradients

LEAVES = {"q": (2, 4, 3, 2), "k": (2, 2, 5, 2), "v": (2, 2, 5, 3)}


def leaves(**shapes):
    random = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"softcap": 1.3}, {"mask": masks.causal(offset=0)}, {"mask": masks.causal(offset=-1)}, {"scale": -0.4}],
    ids=str,
)
def test_gradient_is_the_slope(extra, backend, small_tiles):
    given = leaves(**LEAVES)
    assert torch.autograd.gradcheck(
        lambda *x: regard.attention(*x, **extra, backend=backend), tuple(given.values()), fast_mode=True
    )


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 1, 3, 1), (1, 5)])
def test_gradient_of_everything_together_is_the_slope(shape, backend, small_tiles):
    given = leaves(**LEAVES, bias=shape, sinks=(4,))

    def together(*x):
        return regard.attention(
            **dict(zip(given, x, strict=True)), softcap=2.0, mask=masks.causal(offset=0), backend=backend
        )

    assert torch.autograd.gradcheck(together, tuple(given.values()), fast_mode=True)


@pytest.mark.parametrize("backend", DROPPING)
def test_gradient_with_dropout_is_the_slope_for_the_weights_kept(backend, small_tiles):
    given = leaves(**LEAVES)

    def dropping(*x):
        torch.manual_seed(5)
        return regard.attention(*x, dropout=0.4, backend=backend)

    assert torch.autograd.gradcheck(dropping, tuple(given.values()), fast_mode=True)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_sink_of_minus_infinity_is_no_sink(backend):
    q, k, v = tensors()
    sinks = torch.full((H,), -torch.inf, requires_grad=True)
    mask = masks.causal(offset=-2)  # the first two queries see nothing
    out = regard.attention(q, k, v, mask=mask, sinks=sinks, backend=backend)
    assert_defined(out.detach(), q, k, v, mask=mask)
    assert torch.equal(torch.autograd.grad(out.sum(), sinks)[0], torch.zeros(H))


def test_sink_of_minus_infinity_is_no_sink_in_flex():
    q, k, v = tensors()
    out = regard.attention(q, k, v, mask=masks.causal(offset=-2), sinks=torch.full((H,), -torch.inf), backend="flex")
    assert_defined(out, q, k, v, mask=masks.causal(offset=-2))


def test_reference_has_a_second_derivative():
    given = leaves(**LEAVES)
    assert torch.autograd.gradgradcheck(
        lambda *x: regard.attention(*x, backend="reference"), tuple(given.values()), fast_mode=True
    )


def test_tiled_refuses_a_second_derivative_instead_of_leaving_it_out():
    q, k, v = (x.requires_grad_() for x in tensors())
    out = regard.attention(q, k, v, backend="tiled")

    def penalised():
        slope = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum() + q.sum(), q)

    with pytest.raises(RuntimeError, match=r"twice|second"):
        penalised()


# ---------------------------------------------------------------------------------------------------------- wrong input

Q, K, V = tensors()
META = torch.device("meta")

WRONG = {
    "head sizes": ({"k": K[..., :3]}, ValueError, r"q.*7.*k.*3.*-1"),
    "head size 0": ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, r"q.*k.*0.*-1"),
    "keys of k and v": ({"k": K[:, :, :4]}, ValueError, r"k.*4.*v.*11.*-2"),
    "batch": ({"k": K[:1], "v": V[:1]}, ValueError, r"q.*2.*k.*1.*0"),
    "batch of v": ({"v": V[:1]}, ValueError, r"k.*2.*v.*1.*0"),
    "heads of v": ({"v": V[:, :1]}, ValueError, r"k.*3.*v.*1"),
    "heads that do not divide": (
        {"k": K[:, :2], "v": V[:, :2]},
        ValueError,
        r"q.*3.*k.*2.*-3.*q.*k",
    ),
    "fewer query heads than key heads": ({"q": Q[:, :1]}, ValueError, r"q.*1.*k.*3.*-3"),
    "no key heads": ({"k": K[:, :0], "v": V[:, :0]}, ValueError, r"q.*3.*k.*0.*-3"),
    "three axes, other batch": (
        {"q": Q[0], "k": K[0, :2], "v": V[0, :2]},
        ValueError,
        r"q.*3.*k.*2.*0",
    ),
    "number of axes": (
        {"q": Q[0]},
        ValueError,
        r"q.*k.*v.*\(N, D\).*\(B, N, D\).*\(…, H, N, D\).*\(3, 5, 7\).*\(2, 3, 11, 7\)",
    ),
    "one axis": (
        {"q": Q[0, 0, 0], "k": K[0, 0, 0], "v": V[0, 0, 0]},
        ValueError,
        r"\(N, D\).*\(B, N, D\).*\(…, H, N, D\)",
    ),
    "float as mask": (
        {"mask": torch.zeros(NQ, NK)},
        TypeError,
        r"mask.*torch\.float32.*bias=…",
    ),
    "integer mask": ({"mask": torch.ones(NQ, NK, dtype=torch.int64)}, TypeError, r"0.*1"),
    "list as mask": ({"mask": [[True]]}, TypeError, r"mask.*None"),
    "mask like padding": (
        {"mask": torch.ones(B, NK, dtype=torch.bool)},
        ValueError,
        r"regard\.masks\.padding\(mask\)",
    ),
    "mask that does not broadcast": (
        {"mask": torch.ones(4, NK, dtype=torch.bool)},
        ValueError,
        r"mask.*\(4, 11\).*\(2, 3, 5, 11\)",
    ),
    "mask with too many axes": (
        {"mask": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)},
        ValueError,
        r"mask.*\(1, 1, 1, 1, 1\)",
    ),
    "mask for another batch": (
        {"mask": masks.padding([1, 2, 3])},
        ValueError,
        r"padding\(\[1, 2, 3\]\).*3.*2",
    ),
    "mask for other heads": (
        {"mask": masks.window([[1, 2]], 0)},
        ValueError,
        r"window\(\[\[1, 2\]\], 0\).*2.*3",
    ),
    "mask for other lengths": (
        {"mask": masks.dense(torch.ones(4, 4) > 0)},
        ValueError,
        r"5.*11",
    ),
    "bias that does not broadcast": (
        {"bias": torch.ones(4, NK)},
        ValueError,
        r"bias.*\(4, 11\).*\(2, 3, 5, 11\)",
    ),
    "bias for other heads": ({"bias": positions.alibi(2)}, ValueError, r"2.*3"),
    "boolean bias": (
        {"bias": torch.ones(NQ, NK, dtype=torch.bool)},
        TypeError,
        r"bias.*torch\.bool.*mask=…",
    ),
    "list as bias": (
        {"bias": [[0.0]]},
        TypeError,
        r"bias.*None.*list",
    ),
    "integers": ({"q": Q.long()}, TypeError, r"q.*torch\.int64"),
    "integer array": (
        dict.fromkeys("qkv", np.ones((NQ, D), np.int32)),
        TypeError,
        r"q.*int32.*float16.*bfloat16.*float32.*float64.*q\.astype\(np\.float32\)",
    ),
    "complex": (dict.fromkeys("qkv", Q + 0j), TypeError, r"q.*torch\.complex64"),
    "complex array": (dict.fromkeys("qkv", np.ones((3, 2), complex)), TypeError, r"q.*complex128"),
    "mixed dtypes": (
        {"k": K.half()},
        TypeError,
        r"q.*k.*v.*q.*torch\.float32.*k.*torch\.float16.*v.*torch\.float32",
    ),
    "mixed devices": (
        {"k": K.to(META)},
        ValueError,
        r"q.*k.*v.*q.*cpu.*k.*meta.*v.*cpu",
    ),
    "NumPy with torch": (
        {"k": K.numpy()},
        TypeError,
        r"q.*k.*v.*NumPy.*q.*k.*NumPy.*v",
    ),
    "lists": ({"q": [[1.0]], "k": [[1.0]], "v": [[1.0]]}, TypeError, r"q.*builtins\.list.*k.*builtins\.list"),
    "NaN scale": ({"scale": float("nan")}, ValueError, r"scale.*nan"),
    "infinite scale": ({"scale": float("inf")}, ValueError, r"scale.*inf"),
    "text scale": ({"scale": "0.1"}, TypeError, r"scale.*str.*'0\.1'"),
    "boolean scale": ({"scale": True}, TypeError, r"scale.*bool.*True"),
    "tensor scale": ({"scale": torch.tensor(2.0)}, TypeError, r"scale.*Tensor"),
    "softcap 0": ({"softcap": 0}, ValueError, r"softcap.*0.*None"),
    "negative softcap": ({"softcap": -2.0}, ValueError, r"softcap.*0.*-2\.0"),
    "NaN softcap": ({"softcap": float("nan")}, ValueError, r"softcap.*nan"),
    "boolean softcap": ({"softcap": True}, TypeError, r"softcap.*bool.*True"),
    "dropout −0.1": ({"dropout": -0.1}, ValueError, r"dropout.*0.*1.*-0\.1"),
    "dropout 1": ({"dropout": 1.0}, ValueError, r"dropout.*0.*1.*1\.0"),
    "dropout 1.5": ({"dropout": 1.5}, ValueError, r"dropout.*0.*1.*1\.5"),
    "NaN dropout": ({"dropout": float("nan")}, ValueError, r"dropout.*nan"),
    "boolean dropout": ({"dropout": True}, TypeError, r"dropout.*bool.*True"),
    "no dropout at all": ({"dropout": None}, TypeError, r"dropout.*NoneType.*None"),
    "sinks of another shape": (
        {"sinks": torch.zeros(2)},
        ValueError,
        r"sinks.*\(3,\).*shape.*\(2,\)",
    ),
    "sinks with two axes": ({"sinks": torch.zeros(B, H)}, ValueError, r"shape.*\(2, 3\)"),
    "sinks of another kind": (
        {"sinks": np.zeros(3)},
        TypeError,
        r"sinks.*q.*NumPy",
    ),
    "sinks as a list": ({"sinks": [0.0] * 3}, TypeError, r"sinks.*q.*builtins\.list"),
    "integer sinks": (
        {"sinks": torch.zeros(3, dtype=torch.int32)},
        TypeError,
        r"sinks.*torch\.int32",
    ),
    "sinks elsewhere": (
        {"sinks": torch.zeros(3, device=META)},
        ValueError,
        r"sinks.*device.*sinks.*meta.*q.*cpu",
    ),
    "unknown backend": (
        {"backend": "fast"},
        ValueError,
        r"backend.*'fast'.*reference.*tiled.*sdpa.*flex.*sparse.*'auto'",
    ),
    "backend that cannot": (
        {"backend": "sdpa", "softcap": 2.0},
        ValueError,
        r"backend.*'sdpa'.*SDPA.*softcap.*backend='auto'.*'tiled'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_by_name(name):
    wrong, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        regard.attention(**({"q": Q, "k": K, "v": V} | wrong))


def test_hint_for_an_integer_mask_is_what_a_tensor_understands():
    with pytest.raises(TypeError) as caught:
        regard.attention(Q, K, V, mask=torch.ones(NQ, NK, dtype=torch.int64))
    hints = re.findall(r"mask\.(\w+)\(", str(caught.value))
    assert hints
    assert all(hasattr(torch.Tensor, hint) for hint in hints)


def test_sinks_follow_the_kind_of_q_in_numpy():
    q, k, v = arrays()
    with pytest.raises(TypeError, match=r"sinks.*NumPy.*q"):
        regard.attention(q, k, v, sinks=torch.zeros(H))


def test_masked_arrays_are_refused_rather_than_read_without_their_mask():
    q, k, v = arrays()
    with pytest.raises(TypeError, match="mask"):
        regard.attention(q, np.ma.masked_array(k, np.zeros(k.shape, bool)), v)


# ------------------------------------------------------------------------------------------------------ empty sequences

EMPTY = {
    "no queries": ((B, H, 0, D), (B, H, NK, D), (B, H, NK, DV)),
    "no keys": ((B, H, NQ, D), (B, H, 0, D), (B, H, 0, DV)),
    "no keys, grouped": ((B, 6, NQ, D), (B, 2, 0, D), (B, 2, 0, DV)),
    "no queries, grouped": ((B, 6, 0, D), (B, 2, NK, D), (B, 2, NK, DV)),
    "neither": ((B, H, 0, D), (B, H, 0, D), (B, H, 0, DV)),
    "no batch rows": ((0, H, NQ, D), (0, H, NK, D), (0, H, NK, DV)),
    "no heads": ((B, 0, NQ, D), (B, 0, NK, D), (B, 0, NK, DV)),
    "no queries, two axes": ((0, D), (NK, D), (NK, DV)),
    "no keys, three axes": ((B, NQ, D), (B, 0, D), (B, 0, DV)),
    "no batch rows, five axes": ((2, 0, H, NQ, D), (2, 0, H, NK, D), (2, 0, H, NK, DV)),
}


def mask_for(kind, lead, nq, nk):
    whole = torch.ones((*lead, nq, nk), dtype=torch.bool)
    return {"none": None, "causal": masks.causal(), "booleans": whole[(0,) * len(lead)], "all axes": whole}[kind]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_see_gives_zeros_and_nothing_to_ask_gives_nothing(name, backend):
    q, k, v = tensors(*EMPTY[name])
    for given in ((q, k, v), tuple(x.numpy() for x in (q, k, v))):
        out = regard.attention(*given, mask=masks.causal(), backend=backend)
        assert type(out) is type(given[0])
        assert tuple(out.shape) == (*q.shape[:-1], DV)
        assert out.dtype == given[0].dtype
        assert not out.any()


@pytest.mark.parametrize("name", [n for n in EMPTY if 0 not in EMPTY[n][0][:-2]])
@pytest.mark.parametrize("kind", ["none", "causal", "booleans", "all axes"])
def test_empty_sequences_take_any_mask_and_bias(name, kind):
    q, k, v = tensors(*EMPTY[name])
    mask = mask_for(kind, q.shape[:-2], q.shape[-2], k.shape[-2])
    bias = None if mask is None or kind == "causal" else mask.float()
    out = regard.attention(q, k, v, mask=mask, bias=bias)
    assert out.shape == (*q.shape[:-1], DV)
    assert not out.any()


@pytest.mark.parametrize("name", ["no queries", "no keys", "no keys, grouped", "no batch rows"])
def test_empty_sequences_have_zero_gradients(name):
    given = [x.requires_grad_() for x in tensors(*EMPTY[name])]
    sinks = torch.zeros(given[0].shape[1], requires_grad=True)
    bias = torch.zeros(1, 1, requires_grad=True)
    out = regard.attention(*given, bias=bias, sinks=sinks)
    grads = torch.autograd.grad(out.sum(), (*given, bias, sinks))
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, (*given, bias, sinks), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_no_width_give_a_result_of_no_width(backend):
    q, k, v = tensors()
    assert regard.attention(q, k, v[..., :0], backend=backend).shape == (B, H, NQ, 0)


# ---------------------------------------------------------------------------------------------------- torch's own modes


@pytest.fixture
def fresh_compiler():
    """No function compiled yet, and none of this test's left to count against another's limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "extra",
    [{}, {"mask": masks.causal()}, {"mask": masks.causal(offset=0)}, {"mask": masks.window(2, 1)}, {"softcap": 2.0}],
    ids=str,
)
def test_compiles_into_one_graph(extra):
    def function(q, k, v):
        return regard.attention(2 * q, k, v, **extra) + 1

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(Q, K, V), function(Q, K, V))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_a_mask_made_inside():
    def function(q, k, v):
        return regard.attention(q, k, v, mask=masks.causal())

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for nq in (NQ, 3):
        assert torch.equal(compiled(Q[:, :, :nq], K, V), function(Q[:, :, :nq], K, V))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_layers_feed_attention_and_it_keeps_its_precision(backend):
    torch.manual_seed(2)
    linear = torch.nn.Linear(D, D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q, k = linear(Q), linear(K)
        assert q.dtype == torch.bfloat16
        out = regard.attention(q, k, k, mask=masks.window(3, 0), backend=backend)
    assert out.dtype == torch.bfloat16
    # The scores stay in fp32: autocast is for the products that a user writes, not for the inside of the operation.
    assert torch.equal(out, regard.attention(q, k, k, mask=masks.window(3, 0), backend=backend))


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa"])
def test_gradients_through_autocast_obey_the_rule(backend):
    def slopes(dtype, name, autocast=False):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in (Q, K, V)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = regard.attention(*given, backend=name)
        return torch.autograd.grad(out.sum(), given)

    truth, baseline = slopes(torch.float64, "reference"), slopes(torch.bfloat16, "reference")
    scale = max(float(x.abs().max()) for x in truth)
    for ours, base, true in zip(slopes(torch.bfloat16, backend, True), baseline, truth, strict=True):
        assert_rule(ours, base, true, gradient=True, scale=scale)


def test_backends_agree_on_the_dtype_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = {name: regard.attention(Q, K, V, backend=name).dtype for name in BACKENDS}
    assert len(set(dtypes.values())) == 1, dtypes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", [{}, {"mask": masks.window(2, 1)}, {"bias": positions.alibi(H)}], ids=str)
def test_inference_mode_gives_the_same(extra, backend):
    expected = regard.attention(Q, K, V, **extra, backend=backend)
    with torch.inference_mode():
        assert torch.equal(regard.attention(Q, K, V, **extra, backend=backend), expected)


def test_threads_do_not_disturb_each_other():
    given = [masks.causal(), masks.window(2, 1), masks.prefix(3), masks.padding([4, 9])]
    jobs = [(mask, backend) for mask in given for backend in ("reference", "tiled", "sdpa", "auto")]
    expected = [regard.attention(Q, K, V, mask=m, backend=b) for m, b in jobs]
    start, wrong = threading.Barrier(4), []

    def work(first):
        start.wait()
        for n in range(200):
            mask, backend = jobs[turn := (first * 4 + n) % len(jobs)]
            try:
                if not torch.equal(regard.attention(Q, K, V, mask=mask, backend=backend), expected[turn]):
                    wrong.append((mask, backend))
            except Exception as error:
                wrong.append((mask, backend, error))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------------ memory and time


def test_tiled_takes_little_memory_at_32768_positions():
    q, k, v = (torch.randn(1, 1, 32768, 64, requires_grad=True) for _ in range(3))
    mask = masks.window(256, 0)  # causal() grows no more, and takes ten times as long
    bare = [x.detach() for x in (q, k, v)]
    forward = peak_bytes(lambda: regard.attention(*bare, mask=mask, backend="tiled"), torch.device("cpu"))
    with_gradient = peak_bytes(
        lambda: regard.attention(q, k, v, mask=mask, backend="tiled").sum().backward(), torch.device("cpu")
    )
    # One N×N matrix would be 4 GiB. The output is 8 MiB, and so is each gradient: less would mean that nothing is seen.
    assert 8 * 2**20 <= forward < 200 * 2**20
    assert 32 * 2**20 <= with_gradient < 200 * 2**20


# ---------------------------------------------------------------------------------------------------- chunks of queries


@pytest.mark.parametrize("chunk", [1, 2, NQ, 32])
@pytest.mark.parametrize("extra", [{}, {"mask": masks.causal(), "softcap": 2.0}, {"bias": positions.alibi(H)}], ids=str)
def test_queries_in_chunks_give_the_same_forward_and_backward(chunk, extra):
    def gradients(dtype, **how):
        inputs = [x.requires_grad_() for x in tensors(dtype=dtype)]
        out = regard.attention(*inputs, **extra, **how)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    ours, plain = gradients(torch.float32, chunk=chunk), gradients(torch.float32, backend="reference")
    truth = gradients(torch.float64, backend="reference")
    for n, results in enumerate(zip(ours, plain, truth, strict=True)):
        assert_rule(*results, gradient=n > 0)


def test_chunks_take_numpy_and_two_axes():
    q, k, v = arrays((NQ, D), (NK, D), (NK, DV), dtype=np.float32)
    assert_defined(regard.attention(q, k, v, chunk=3), q, k, v)


def test_chunk_bounds_the_scores_in_memory():
    q = torch.randn(1, 1, 1024, 8)
    plain, chunked = (
        peak_bytes(lambda how=how: regard.attention(q, q, q, **how), torch.device("cpu"))
        for how in ({"backend": "reference"}, {"chunk": 32})
    )
    assert plain > 4 * 1024 * 1024  # one N×N matrix in fp32
    assert chunked < 4 * 1024 * 1024 / 4


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"chunk": 0}, ValueError, r"chunk.*0"),
        ({"chunk": -3}, ValueError, r"chunk.*-3"),
        ({"chunk": 2.0}, TypeError, r"chunk.*2\.0"),
        ({"chunk": True}, TypeError, r"chunk.*True"),
        ({"chunk": 2, "backend": "sdpa"}, ValueError, r"2.*'tiled'.*'sdpa'"),
    ],
)
def test_chunk_that_cannot_be_is_refused(bad, error, message):
    with pytest.raises(error, match=message):
        regard.attention(*tensors(), **bad)


def regard_calls(function: Callable[[], object]) -> int:
    """How many functions of regard are called, in Python, while a function runs."""
    count, inside = 0, str(Path(regard.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(inside)

    was = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(was)
    return count


@pytest.mark.parametrize("causal", [False, True])
def test_attention_calls_one_kernel_and_few_functions_around_it(causal):
    q, mask = torch.randn(1, 1, 3, 8), masks.causal() if causal else None
    names: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    regard.attention(q, q, q, mask=mask)  # what is looked up once is looked up
    with Noted():
        sdpa(q, q, q, is_causal=causal)
    theirs = list(names)
    names.clear()
    with Noted():
        regard.attention(q, q, q, mask=mask)
    assert names == theirs, "nothing is computed that torch's own call does not compute"
    assert regard_calls(lambda: regard.attention(q, q, q, mask=mask)) <= 40, "21 were counted"


# ------------------------------------------------------------------------------------------ tensors that are no numbers

X = torch.ones(1, 2, 5, 4)
STRANGE = {
    "sparse": X.to_sparse(),
    "mkldnn": X.to_mkldnn(),
    "complex": X.to(torch.complex64),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("call", [regard.attention, regard.steps, regard.look])
def test_tensor_of_a_strange_kind_is_refused_by_name(kind, call):
    strange = STRANGE[kind]
    named = "q.*complex64" if kind == "complex" else rf"q.*{strange.layout}"
    with pytest.raises(TypeError, match=named):
        call(strange, strange, strange)
    with pytest.raises(TypeError, match="weights"):
        regard.check(strange)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_sparse_and_meta_cells_are_refused_by_name(name):
    cells = torch.ones(5, 5, dtype=torch.bool if name == "mask" else torch.float32)
    for strange in (cells.to_sparse(), cells.to("meta")):
        with pytest.raises(TypeError, match=name):
            regard.attention(X, X, X, **{name: strange})


def test_meta_tensors_have_shapes_and_nothing_to_show():
    nothing = X.to("meta")
    assert regard.attention(nothing, nothing, nothing).shape == X.shape
    for call in (regard.steps, regard.look):
        with pytest.raises(TypeError, match=r"q.*meta"):
            call(nothing, nothing, nothing)
    with pytest.raises(TypeError, match="meta"):
        regard.check(nothing)
