"""The choice between backends: what `explain` says, what "auto" takes, and why a backend refuses.

That the backends compute the same is in test_conformance.py.
"""

import re
import warnings
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import regard
from regard import backends, masks, positions
from regard.backends import flex, reference, short, sparse_gpu, tiled
from regard.backends.call import Call, CallOptions, cells_of_bias, prepare
from regard.masks import mask as rules
from regard.testing import assert_rule

NAMES = ("reference", "tiled", "sdpa", "flex", "sparse", "short")
B, H, NQ, NK, D, DV = 2, 3, 5, 11, 7, 13


def tensors(batch=B, heads=H, nq=NQ, nk=NK, d=D, dv=DV, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    shapes = (batch, heads, nq, d), (batch, heads, nk, d), (batch, heads, nk, dv)
    return tuple(torch.randn(shape, generator=random).to(dtype) for shape in shapes)


def long(nq=4096):
    return tensors(1, 1, nq, 4096, 8, 8)


def reason(name, *qkv, **extra):
    """Why a backend cannot do the call, or None, as `explain` says it."""
    (row,) = [row for row in backends.explain(*qkv, **extra).rows if row[0] == name]
    return None if row[1] else row[2]


@pytest.fixture
def ran(monkeypatch):
    """The names of the backends that ran, in order; nothing is computed."""
    names = []

    def spy(name):
        def run(call):
            names.append(name)
            return torch.zeros(*call.q.shape[:-1], call.v.shape[-1])

        return run

    for name in NAMES:
        monkeypatch.setattr(backends.load(name), "run", spy(name))
    for name in ("sdpa", "flex"):
        monkeypatch.setattr(backends.load(name), "launcher", lambda call, reads: None)
    return names


@pytest.fixture
def on_cuda(monkeypatch):
    """Every call says that it is on a GPU: enough to ask what would be chosen there."""
    monkeypatch.setattr(Call, "device", torch.device("cuda"))
    monkeypatch.setattr(short, "_major", lambda device: 9)


# -------------------------------------------------------------------------------------------------------------- explain


def test_explain_prints_what_each_backend_says():
    said = backends.explain(*tensors(), mask=masks.causal(), sinks=torch.zeros(H))
    assert str(said) == (
        "backend    can  how, or why not\n"
        "─────────  ───  ───────────────────────────────────────────────────────────────────\n"
        "tiled      yes  plain torch, tiles of 5×11; O(N) memory, skips hidden tiles  ← auto\n"
        "sparse     yes  visible tiles of 5×11: 100% of the cells; O(N) memory\n"
        "flex       yes  FlexAttention, unfused on the CPU: builds N×N\n"
        "reference  yes  the definition, in torch; builds N×N\n"
        "sdpa       no   torch's SDPA has no sinks\n"
        "short      no   its kernel runs on cuda, and q is on cpu"
    )
    assert repr(said) == str(said)


def test_explain_is_a_table_in_a_notebook():
    html = backends.explain(*tensors(), softcap=2.0)._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == 1 + len(NAMES)
    assert html.count("← auto") == 1
    assert "torch&#x27;s SDPA has no softcap" in html


CALLS = {
    "full": (tensors, {}, "sdpa"),
    "causal": (tensors, {"mask": masks.causal()}, "sdpa"),
    "one query": (lambda: tensors(nq=1), {"mask": masks.causal()}, "sdpa"),
    "small window": (tensors, {"mask": masks.window(2, 1)}, "sdpa"),
    "long window": (long, {"mask": masks.window(64, 0)}, "sparse"),
    "long window with dropout": (long, {"mask": masks.window(64, 0), "dropout": 0.5}, "sparse"),
    "long window and globals": (long, {"mask": masks.window(64, 64) | masks.globals([0])}, "sparse"),
    "long window with softcap and sinks": (
        long,
        {"mask": masks.window(64, 0), "softcap": 2.0, "sinks": torch.zeros(1)},
        "sparse",
    ),
    "window over a few hundred": (lambda: tensors(1, 1, 640, 640, 8, 8), {"mask": masks.window(64, 0)}, "sdpa"),
    "window over a few more": (lambda: tensors(1, 1, 641, 641, 8, 8), {"mask": masks.window(64, 0)}, "sparse"),
    "long causal": (long, {"mask": masks.causal()}, "sdpa"),
    "half of a long call visible": (long, {"mask": masks.causal(offset=100)}, "sparse"),
    "most of a long call visible": (long, {"mask": masks.causal(offset=2000)}, "sdpa"),
    "long call with a bias": (long, {"bias": positions.alibi(1)}, "tiled"),
    "bias": (tensors, {"bias": positions.alibi(H)}, "sdpa"),
    "softcap": (tensors, {"softcap": 2.0}, "tiled"),
    "sinks": (tensors, {"sinks": torch.zeros(H)}, "tiled"),
    "dropout": (tensors, {"dropout": 0.5}, "sdpa"),
    "long call with dropout": (lambda: long(1024), {"dropout": 0.5}, "tiled"),
    "half precision": (lambda: tensors(dtype=torch.bfloat16), {"mask": masks.prefix(2)}, "sdpa"),
    "with gradient": (lambda: [x.requires_grad_() for x in tensors()], {"softcap": 2.0}, "tiled"),
    "NumPy": (lambda: [x.numpy() for x in tensors()], {"mask": masks.causal()}, "sdpa"),
    "long double": (lambda: [x.numpy().astype(np.longdouble) for x in tensors()], {}, "reference"),
}


@pytest.mark.parametrize("name", CALLS)
def test_auto_runs_what_explain_says(name, ran):
    make, extra, expected = CALLS[name]
    if name == "long double" and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("long double is double on this machine")
    qkv = make()
    said = backends.explain(*qkv, **extra)
    regard.attention(*qkv, **extra)
    assert ran == [said.chosen] == [expected]


@pytest.mark.parametrize("name", CALLS)
def test_explain_lists_every_backend_once_and_the_able_first(name):
    make, extra, _ = CALLS[name]
    said = backends.explain(*make(), **extra)
    assert sorted(row[0] for row in said.rows) == sorted(NAMES)
    able = [can for _, can, _ in said.rows]
    assert able == sorted(able, reverse=True)
    assert said.chosen == said.rows[0][0]
    assert str(said).count("← auto") == 1
    (line,) = [line for line in str(said).splitlines() if "← auto" in line]
    assert line.split()[:2] == [said.chosen, "yes"]


def test_explain_takes_the_arguments_of_attention():
    ours = dict(signature(regard.attention).parameters)
    assert ours.pop("backend").default == "auto"
    assert ours.pop("chunk").default is None  # it names the backend "tiled"
    named = set(signature(backends.explain).parameters) - {"options"}
    assert set(ours) == named | CallOptions.__annotations__.keys()
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(TypeError, match="backend"):
        backends.explain(x, x, x, backend="sdpa")


def test_explain_refuses_what_attention_refuses():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"q.*7.*k.*3"):
        backends.explain(q, k[..., :3], v)


def test_explain_computes_nothing(ran):
    backends.explain(*tensors(), mask=masks.causal())
    assert ran == []


# ------------------------------------------------------------------------------------------------------ a named backend


@pytest.mark.parametrize("name", [name for name in NAMES if name != "short"])  # which needs a GPU
def test_named_backend_is_the_one_that_runs(name, ran):
    regard.attention(*tensors(), mask=masks.causal(), backend=name)
    assert ran == [name]


REFUSED = {
    "sdpa softcap": ("sdpa", {"softcap": 2.0}, "softcap"),
    "sdpa sinks": ("sdpa", {"sinks": torch.zeros(H)}, "sinks"),
    "flex dropout": ("flex", {"dropout": 0.1}, "dropout"),
}


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"mask": masks.window(2, 1)}], ids=str)
def test_transforms_of_torch_func_get_a_backend_that_has_them(extra):
    q, k, v = (x.double() for x in tensors())
    truth = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(regard.attention(*truth, **extra, backend="reference").sum(), q)[0]

    def total(q):
        return regard.attention(q, k.detach(), v.detach(), **extra).sum()

    given = q.detach()
    torch.testing.assert_close(torch.func.grad(total)(given), expected)
    slope = torch.func.jvp(total, (given,), (torch.ones_like(given),))[1]
    torch.testing.assert_close(slope, expected.sum())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # torch's own kernel has no batched form
        torch.testing.assert_close(torch.vmap(torch.func.grad(total))(torch.stack([given, given]))[1], expected)


@pytest.mark.parametrize("name", ["tiled", "sparse", "flex"])
def test_named_backend_without_transforms_says_so(name):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"torch.func"):
        torch.func.grad(lambda q: regard.attention(q, k, v, backend=name).sum())(q)


@pytest.mark.parametrize("name", ["tiled", "sparse", "flex", "sdpa"])
def test_named_backend_without_forward_mode_says_so(name):
    q, k, v = tensors()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        regard.attention(forward_ad.make_dual(q, q), k, v, backend=name)


@pytest.mark.parametrize(
    "extra", [{}, {"mask": masks.causal()}, {"mask": masks.window(9, 9), "softcap": 2.0}, {"dropout": 0.1}], ids=str
)
@pytest.mark.parametrize("n", [5, 1024])
def test_tensors_without_numbers_have_a_shape(n, extra):
    x = torch.empty(1, 2, n, 8, device="meta")
    assert regard.attention(x, x, x, **extra).shape == (1, 2, n, 8)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.zeros(1, 2, n, 8))
        assert regard.attention(x, x, x, **extra).shape == (1, 2, n, 8)
    x = torch.zeros(1, 2, n, 8)
    assert type(regard.attention(x, x, x, **extra)) is torch.Tensor  # nothing fake was kept
    with pytest.raises(ValueError, match=r"q.*Tensor.*meta"):
        regard.attention(*(x.to("meta"),) * 3, backend="sparse")


@pytest.mark.parametrize("name", ["tiled", "sparse"])
def test_autocast_around_a_backward_does_not_reach_inside(name):
    leaves = [x.requires_grad_() for x in tensors()]

    def gradients():
        out = regard.attention(*leaves, mask=masks.window(2, 1), softcap=5.0, backend=name)
        return torch.autograd.grad(out.square().sum(), leaves)

    expected = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    assert all(map(torch.equal, found, expected))


def test_autocast_does_not_reach_arrays():
    q, k, v = (x.numpy() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        found = regard.attention(q, k, v)
    assert np.array_equal(found, regard.attention(q, k, v))


@pytest.mark.parametrize("case", REFUSED)
def test_named_backend_that_cannot_says_why_and_nothing_runs(case, ran):
    name, extra, why = REFUSED[case]
    assert why in reason(name, *tensors(), **extra)
    chosen = backends.explain(*tensors(), **extra).chosen
    message = f"'{name}'.*{why}.*backend='auto'.*'{chosen}'"
    with pytest.raises(ValueError, match=message):
        regard.attention(*tensors(), **extra, backend=name)
    assert ran == []


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is double on this machine")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "short"])  # which has no NumPy arrays at all
def test_long_double_exists_in_numpy_only(name):
    qkv = [x.numpy().astype(np.longdouble) for x in tensors()]
    expected = None if name == "reference" else f"{np.dtype(np.longdouble)} exists in NumPy only"
    assert reason(name, *qkv) == expected


@pytest.mark.parametrize("source", ["q", "sinks", "bias"])
def test_flex_refuses_a_gradient_on_the_cpu_wherever_it_comes_from(source):
    given = dict(zip("qkv", tensors(), strict=True)) | {"sinks": torch.zeros(H), "bias": torch.zeros(NQ, NK)}
    given[source].requires_grad_()
    assert "CPU" in reason("flex", **given)
    with torch.no_grad():
        assert reason("flex", **given) is None


@pytest.mark.parametrize("name", ["fast", "", None, 3])
def test_unknown_backend_is_an_error_that_lists_the_names(name):
    message = f"{re.escape(repr(name))}.*reference.*tiled.*sdpa.*flex.*sparse.*'auto'"
    with pytest.raises(ValueError, match=message):
        backends.load(name)


def test_names_are_the_modules_and_each_has_the_three_functions():
    assert backends.NAMES == NAMES
    for name in NAMES:
        module = backends.load(name)
        assert module.__name__ == f"regard.backends.{name}"
        assert all(callable(getattr(module, function)) for function in ("unsupported_reason", "how", "run"))


# --------------------------------------------------------------------------------------------------- the order of speed


def order(*qkv, **extra):
    return backends.ranked(prepare(*qkv, **extra))


@pytest.fixture
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(backends, "SMALL", NQ * NK - 1)
    monkeypatch.setattr(backends, "FEW_QUERIES", NQ)


@pytest.mark.usefixtures("on_cuda", "nothing_is_small")
@pytest.mark.parametrize(
    ("extra", "first"),
    [
        ({}, "sdpa"),
        ({"mask": masks.causal(offset=0)}, "sdpa"),
        ({"mask": masks.causal()}, "sparse"),
        ({"mask": masks.window(2, 1)}, "sparse"),
        ({"mask": masks.window(2, 1), "sinks": torch.zeros(H)}, "sparse"),
        ({"mask": masks.window(2, 1), "softcap": 2.0}, "flex"),
        ({"mask": masks.window(2, 1), "bias": positions.alibi(H)}, "flex"),
        ({"bias": torch.zeros(NQ, NK)}, "flex"),
        ({"mask": masks.window(2, 1), "dropout": 0.5}, "sdpa"),
    ],
    ids=str,
)
def test_on_a_gpu_plain_calls_go_to_sdpa_masks_to_our_kernels_and_the_rest_to_flex(extra, first, monkeypatch):
    monkeypatch.setattr(sparse_gpu, "no_triton", lambda: None)
    assert order(*tensors(), **extra)[0] == first
    monkeypatch.setattr(sparse_gpu, "no_triton", lambda: "triton is not installed")
    assert order(*tensors(), **extra)[0] == first.replace("sparse", "flex")


@pytest.mark.usefixtures("on_cuda", "nothing_is_small")
@pytest.mark.parametrize(
    ("mask", "d", "first"),
    [
        (masks.window(9, 0), 64, "sparse"),
        (masks.causal() & masks.padding([300]), 64, "flex"),  # half of the square, and many cells
        (masks.window(99, 0), 64, "flex"),
        (masks.window(99, 0) | masks.globals([0]), 64, "sparse"),  # as many, but booleans
        (masks.window(9, 0), 65, "flex"),  # a wider head than was measured
        (masks.window(9, 0) | masks.globals([0]), 65, "sparse"),  # booleans, of which FlexAttention reads a byte each
        (masks.window(9, 0) & masks.queries(torch.ones(1, 320, dtype=torch.bool)), 65, "sparse"),
        (masks.documents(torch.arange(320) // 20), 65, "flex"),
    ],
    ids=str,
)
def test_on_a_gpu_our_kernels_are_taken_where_they_are_faster(mask, d, first, monkeypatch):
    monkeypatch.setattr(sparse_gpu, "no_triton", lambda: None)
    monkeypatch.setattr(sparse_gpu, "QUICK", 320 * 40)
    monkeypatch.setattr(sparse_gpu, "SIDES", (16,))
    assert order(*tensors(1, 1, 320, 320, d, d), mask=mask)[0] == first


@pytest.mark.usefixtures("on_cuda", "nothing_is_small")
@pytest.mark.parametrize(("heads", "first"), [(1, "sparse"), (4, "flex")])
def test_on_a_gpu_our_kernels_are_taken_for_what_they_do_while_flex_is_launched(heads, first, monkeypatch):
    monkeypatch.setattr(sparse_gpu, "no_triton", lambda: None)
    monkeypatch.setattr(sparse_gpu, "QUICK", 2 * 320 * 320)
    assert order(*tensors(1, heads, 320, 320, 64, 64), mask=masks.causal() & masks.padding([300]))[0] == first


@pytest.mark.usefixtures("on_cuda", "nothing_is_small")
def test_on_a_gpu_a_traced_call_goes_to_flex_and_few_queries_to_sdpa(monkeypatch):
    monkeypatch.setattr(sparse_gpu, "no_triton", lambda: None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert order(*tensors(), mask=masks.window(2, 1))[0] == "flex"
    monkeypatch.setattr(backends, "FEW_QUERIES", NQ + 1)
    assert order(*tensors(), mask=masks.window(2, 1))[:2] == ("sdpa", "flex")  # which does what SDPA does not have


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(("most", "first"), [(B * NQ * NK, "sdpa"), (B * NQ * NK - 1, "sparse")])
def test_on_a_gpu_dropout_makes_no_mask_that_memory_cannot_hold(most, first, monkeypatch):
    monkeypatch.setattr(backends, "MOST_DENSE", most)
    assert order(*tensors(), mask=masks.window(2, 1) & masks.padding([3] * B), dropout=0.5)[0] == first
    assert order(*tensors(), mask=masks.causal(offset=0), dropout=0.5)[0] == "sdpa"  # its kernel needs none


@pytest.mark.usefixtures("on_cuda")
def test_on_a_gpu_nobody_waits_for_a_kernel_where_a_dense_mask_is_small(monkeypatch):
    monkeypatch.setattr(backends, "SMALL", NQ * NK)
    assert order(*tensors(), mask=masks.window(2, 1)) == ("sdpa", "reference", "tiled", "sparse", "flex", "short")
    monkeypatch.setattr(backends, "FEW_CELLS", B * H * NQ * NK - 1)
    assert order(*tensors(), mask=masks.window(2, 1)) == ("sdpa", "tiled", "sparse", "flex", "reference", "short")


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("name", CALLS)
def test_auto_is_the_fastest_that_can_and_slowest_is_the_definition(name, device, monkeypatch):
    monkeypatch.setattr(Call, "device", torch.device(device))
    monkeypatch.setattr(short, "_major", lambda device: 9)
    make, extra, _ = CALLS[name]
    call = prepare(*make(), **extra)
    ranked = backends.ranked(call)
    assert sorted(ranked) == sorted(NAMES)
    assert ranked[-2:] == ("reference", "short") or device == "cuda"  # where a small call is bound by launches
    able = [n for n in ranked if backends.load(n).unsupported_reason(call) is None]
    assert backends.choose(call) is backends.load(able[0])


@pytest.mark.usefixtures("on_cuda")
def test_flex_on_a_gpu_refuses_what_its_kernel_lacks():
    assert reason("flex", *tensors(d=16, dv=16)) is None
    assert "float64" in reason("flex", *tensors(d=16, dv=16, dtype=torch.float64))
    for sizes in ({"d": 15, "dv": 16}, {"d": 16, "dv": 15}):
        assert re.search("16.*15", reason("flex", *tensors(**sizes)))


def test_flex_refuses_other_devices(monkeypatch):
    monkeypatch.setattr(Call, "device", torch.device("mps"))
    assert re.search("CUDA.*mps", reason("flex", *tensors(d=16, dv=16)))


ROUNDS = "torch's SDPA on cuda would round the bias, or its gradient, to "


@pytest.mark.usefixtures("on_cuda")
def test_sdpa_on_a_gpu_refuses_to_round_a_bias():
    half, bias = tensors(dtype=torch.bfloat16), torch.zeros(NQ, NK)
    assert reason("sdpa", *half, bias=bias) == ROUNDS + "torch.bfloat16"
    assert reason("sdpa", *half, bias=positions.alibi(H)) is not None
    assert reason("sdpa", *half, bias=bias.bfloat16()) is None
    assert reason("sdpa", *tensors(), bias=bias) is None


@pytest.mark.usefixtures("on_cuda")
def test_sdpa_on_a_gpu_takes_a_table_of_the_queries_dtype_that_nobody_differentiates():
    half = tensors(nq=6, nk=6, dtype=torch.bfloat16)
    table = torch.zeros(15, H, dtype=torch.bfloat16)
    assert backends.explain(*half, bias=positions.SwinBias(table, (2, 3))).chosen == "sdpa"
    assert reason("sdpa", *half, bias=positions.SwinBias(table.float(), (2, 3))) == ROUNDS + "torch.bfloat16"
    assert reason("sdpa", *half, bias=positions.SwinBias(table.half(), (2, 3))) == ROUNDS + "torch.bfloat16"
    learnt = positions.SwinBias(table.requires_grad_(), (2, 3))
    assert reason("sdpa", *half, bias=learnt) == ROUNDS + "torch.bfloat16"
    with torch.no_grad():
        assert reason("sdpa", *half, bias=learnt) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_terms_of_a_window_are_the_numbers_of_its_table(dtype):
    """So that a GPU's kernel may have them in the table's dtype: nothing is lost."""
    table = torch.randn(15, H, generator=torch.Generator().manual_seed(0)).to(dtype)
    call = prepare(*tensors(nq=6, nk=6, dtype=dtype), bias=positions.SwinBias(table, (2, 3)))
    cells = cells_of_bias(call)
    assert cells.dtype == torch.float32
    assert torch.equal(cells.to(dtype).float(), cells)
    assert set(cells.unique().tolist()) == set(table.float().unique().tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("shifted", [False, True], ids=["whole windows", "shifted windows"])
def test_windows_on_a_gpu_in_half_precision_agree_with_the_definition(shifted):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(13, H, 49, 32, generator=random).to("cuda", torch.bfloat16) for _ in range(3))
    bias = positions.SwinBias(torch.randn(169, H, generator=random).to("cuda", torch.bfloat16), (7, 7))
    regions = torch.arange(49).expand(13, 49) // torch.arange(7, 20).unsqueeze(1)
    mask = masks.documents(regions.cuda()) if shifted else None
    assert backends.explain(q, k, v, mask=mask, bias=bias).chosen == "sdpa"
    ours, baseline = (regard.attention(q, k, v, mask=mask, bias=bias, backend=b) for b in ("sdpa", "reference"))
    wide = positions.SwinBias(bias.table.double(), (7, 7))
    truth = regard.attention(q.double(), k.double(), v.double(), mask=mask, bias=wide, backend="reference")
    assert_rule(ours, baseline, truth)


def test_sdpa_on_the_cpu_keeps_the_precision_of_a_bias():
    assert reason("sdpa", *tensors(dtype=torch.bfloat16), bias=torch.zeros(NQ, NK)) is None


# ------------------------------------------------------------------------------------------------------- how it is done


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "torch's fused kernel"),
        ({"mask": masks.causal(offset=0)}, "torch's fused kernel, is_causal"),
        ({"mask": masks.causal()}, "torch's kernel with a dense N×N mask"),
        ({"dropout": 0.5}, "torch's unfused path (dropout on the CPU); builds N×N"),
    ],
    ids=str,
)
def test_sdpa_says_whether_it_builds_the_square(extra, said):
    assert backends.load("sdpa").how(prepare(*tensors(), **extra)) == said


@pytest.mark.parametrize("extra", [{}, {"mask": masks.causal(offset=0)}, {"mask": masks.causal()}], ids=str)
def test_sdpa_builds_a_dense_mask_only_where_it_says_so(extra, monkeypatch):
    module, given = backends.load("sdpa"), SimpleNamespace()

    def spy(q, k, v, attn_mask, is_causal, **rest):
        given.mask, given.is_causal = attn_mask, is_causal
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(module, "scaled_dot_product_attention", spy)
    call = prepare(*tensors(), **extra)
    module.run(call)
    assert (given.mask is not None) == ("dense" in module.how(call))
    assert given.is_causal == ("is_causal" in module.how(call))


def test_tiled_visits_only_tiles_that_somebody_sees(monkeypatch):
    visited = []

    def spy(plan, tile, *rest):
        visited.append((tile.rows.start // 8, tile.cols.start // 8, tile.masked))
        return scores(plan, tile, *rest)

    scores = tiled._Plan.scores
    monkeypatch.setattr(tiled, "tile_size", lambda batch, heads, nq, nk: (8, 8))
    monkeypatch.setattr(tiled._Plan, "scores", spy)
    regard.attention(*tensors(nq=40, nk=40), mask=masks.window(16, 0), backend="tiled")
    # Tile row r sees the tiles r − 2, r − 1 and r: the diagonal and the far edge need their cells masked.
    expected = [(r, c, c != r - 1) for r in range(5) for c in range(max(0, r - 2), r + 1)]
    assert visited == expected


@pytest.mark.parametrize("batch_and_heads", [(1, 1), (1, 8), (64, 16), (128, 32)])
def test_tile_of_all_batch_rows_and_heads_stays_small(batch_and_heads):
    rows, cols = tiled.tile_size(*batch_and_heads, 4096, 8192)
    assert batch_and_heads[0] * batch_and_heads[1] * rows * cols <= tiled.TILE_CELLS


@pytest.mark.parametrize("extra", [{}, {"mask": masks.causal(offset=-2)}, {"sinks": torch.ones(H)}], ids=str)
def test_tiled_returns_each_rows_lse(extra, monkeypatch):
    monkeypatch.setattr(tiled, "tile_size", lambda batch, heads, nq, nk: (2, 3))
    q, k, v = tensors()
    out, lse = tiled.forward_with_lse(prepare(q, k, v, **extra))
    truth, base = (
        reference.stages(prepare(*given, **extra)).lse for given in ([x.double() for x in (q, k, v)], (q, k, v))
    )
    nothing = truth == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing)
    assert nothing.any() == ("mask" in extra)
    assert_rule(*(x.masked_fill(nothing, 0) for x in (lse, base, truth)), what="lse")
    assert torch.equal(out, regard.attention(q, k, v, **extra, backend="tiled"))


def test_tiled_lse_carries_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors())
    out, lse = tiled.forward_with_lse(prepare(q, k, v))
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.fixture
def fresh_compiler():
    """No function compiled yet, and none of this test's left to count against another's limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("what", ["d", "heads", "batch", "nk"])
def test_flex_works_for_more_shapes_than_torch_compiles_of_one_function(what):
    with torch._dynamo.config.patch(recompile_limit=3):  # 8 otherwise, and each takes a quarter of a second
        for n in range(2, 2 + flex.OWN_KERNELS + 3 + 1):
            q, k, v = tensors(**({"nq": 2, "nk": 3, "dv": n if what == "d" else D} | {what: n}))
            out = regard.attention(q, k, v, mask=masks.causal(), backend="flex")
            truth = regard.attention(*(x.double() for x in (q, k, v)), mask=masks.causal(), backend="reference")
            assert_rule(out, regard.attention(q, k, v, mask=masks.causal(), backend="reference"), truth)


@pytest.mark.gpu
def test_flex_trains_after_the_same_mask_served_inference():
    qkv = [x.cuda() for x in tensors(d=16, dv=16)]
    mask = masks.window(2, 1)
    with torch.inference_mode():
        expected = regard.attention(*qkv, mask=mask, backend="flex")
    out = regard.attention(*(x.requires_grad_() for x in qkv), mask=mask, backend="flex")
    torch.autograd.grad(out.sum(), qkv)
    assert torch.equal(out.detach(), expected)


def test_block_mask_made_in_inference_can_be_trained_with():
    with torch.inference_mode():
        kept = flex._kept_block_mask(masks.window(2, 1) & masks.padding([4, 5]), 5, 7, torch.device("cpu"))
    parts = [part for part in kept.as_tuple() if isinstance(part, torch.Tensor)]
    assert len(parts) == 8
    assert not any(part.is_inference() for part in parts)


def test_block_masks_kept_are_found_again_and_bounded():
    first = masks.window(3, 0)
    kept = flex._kept_block_mask(first, 5, 7, torch.device("cpu"))
    assert flex._kept_block_mask(masks.window(3, 0), 5, 7, torch.device("cpu")) is kept
    for n in range(2 * rules.MOST_KEPT):
        flex._kept_block_mask(masks.window(n, 1), 5, 7, torch.device("cpu"))
    assert len(rules._KEPT) == rules.MOST_KEPT


def test_fresh_mask_of_tensors_is_not_compared_with_those_kept(monkeypatch):
    def compared(*_):
        raise AssertionError("reads two tensors, which on a GPU waits for everything before them")

    monkeypatch.setattr(torch, "equal", compared)
    for _ in range(3):
        flex._kept_block_mask(masks.documents([0, 0, 1, 1, 1]), 5, 5, torch.device("cpu"))


@pytest.mark.parametrize("mask", [masks.window(3, 0), masks.causal() & masks.padding([9]), masks.documents([0] * 17)])
def test_flex_compiles_into_one_graph_with_what_surrounds_it(mask):
    x = torch.randn(1, 2, 17, 8)

    def surrounded(q):
        return regard.attention(2 * q, x, x, mask=mask, backend="flex") + 1

    expected = regard.attention(2 * x, x, x, mask=mask, backend="flex") + 1
    assert torch.equal(torch.compile(surrounded, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own, of its CPU kernel
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_and_biases_are_batched_by_vmap(name):
    q = torch.randn(3, 1, 2, 5, 7, dtype=torch.float64)
    cells = torch.randn(3, 1, 1, 5, 5, dtype=torch.float64)
    cells = cells if name == "bias" else cells > 0
    cells[0, 0, 0, 2] = False if name == "mask" else -torch.inf  # a row that sees nothing
    together = torch.func.vmap(lambda x, own: regard.attention(x, x, x, **{name: own}))(q, cells)
    alone = [regard.attention(x, x, x, **{name: own}, backend="reference") for x, own in zip(q, cells, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone))
