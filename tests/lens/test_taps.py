"""Taps on torch's fused kernels and on our own operation: what is reported, whose it is, and that nothing else changes.

Attention written out by hand is in test_softmax_taps.py, FlexAttention and flash_attn in test_function_taps.py.
"""

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import nullcontext
from math import inf

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import regard
from regard import masks
from regard.backends.reference import stages
from regard.lens.taps import calls
from regard.lens.taps.calls import HERE, measuring, read_call, split_cells, trusted_lse
from regard.lens.taps.installation import CPU_KERNELS, Taps
from regard.op import observe, unobserve
from regard.testing import _backwards, assert_rule

B, H, NQ, NK, D = 2, 3, 5, 11, 7
FUSED = "_scaled_dot_product_flash_attention_for_cpu"
MATH = "_scaled_dot_product_attention_math"


COVERED = [*CPU_KERNELS, *((name, "CPU") for name in ("_softmax", "bmm", "baddbmm"))]


def state():
    """Where each kernel that we cover was registered, as torch tells it, and what else we change."""
    kernels = [str(torch.library.get_kernel(f"aten::{name}", key)) for name, key in COVERED]
    ours = torch.library._impls & {f"aten/{name}/{key}" for name, key in COVERED}
    return kernels, ours, torch.backends.mha.get_fastpath_enabled(), HERE.quiet, HERE.inside


@pytest.fixture(autouse=True)
def nothing_left():
    """After every test all is as it was."""
    before = state()
    yield
    assert state() == before


class Attend(nn.Module):
    """Self-attention of x (B, N, H·D), by torch's fused kernel."""

    def __init__(self, heads=H, size=D, causal=False, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(heads * size, 3 * heads * size), nn.Linear(heads * size, heads * size)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        return self.out(sdpa(q, k, v, attn_mask=mask, is_causal=self.causal, dropout_p=p).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Two layers of it and a head."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList([Attend(**options) for _ in range(2)])
        self.head = nn.Linear(H * D, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Call(nn.Module):
    """Any function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def tokens(n=NQ, dtype=torch.float32):
    return torch.randn(B, n, H * D, dtype=dtype)


def qkv(nq=NQ, nk=NK, heads=H, kv_heads=H, dtype=torch.float32):
    shapes = (B, heads, nq, D), (B, kv_heads, nk, D), (B, kv_heads, nk, D)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def watched(model, *args):
    """The result of a watched call, and what was seen; nothing may have gone wrong."""
    seen = []
    with Taps(model, seen.append) as taps:
        out = model(*args)
    assert taps.errors == []
    return out, seen


def the_call(function, *args):
    _, seen = watched(Call(function), *args)
    (only,) = seen
    return only


def lse_of(call, dtype=torch.float64, turn=False):
    """lse by the definition; turned, sums run backwards."""
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    order = (lambda x, *axes: x.flip(axes)) if turn else (lambda x, *axes: x)
    scores = order(call.q.to(dtype), -1) @ order(k.to(dtype), -1).mT * call.scale
    nq, nk = call.sizes[2:]
    if call.bias is not None:
        scores = scores + call.bias.dense(nq, nk, scores.device, dtype)
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask.dense(nq, nk, scores.device), -inf)
    return order(scores, -1).logsumexp(-1)


def assert_explains(seen):
    """The reported call computes the reported output and lse, by the numeric rule."""
    call = seen.call
    extra = {"mask": call.mask, "bias": call.bias, "scale": call.scale}
    narrow, wide = (call.q, call.k, call.v), [x.double() for x in (call.q, call.k, call.v)]
    fp64 = call.q.dtype == torch.float64
    baseline = _backwards(*narrow, **extra) if fp64 else regard.attention(*narrow, **extra, backend="reference")
    assert_rule(seen.output, baseline, regard.attention(*wide, **extra, backend="reference"))
    if seen.lse is not None:
        exact = lse_of(call)
        rows = exact.isfinite()
        assert torch.equal(seen.lse == -inf, ~rows)
        assert_rule(seen.lse[rows], lse_of(call, call.wide, turn=fp64)[rows], exact[rows], what="lse")


# ----------------------------------------------------------------------------------------------------- what is reported


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fused_call_is_reported_with_what_it_computed(dtype):
    q, k, v = qkv(dtype=dtype)
    seen = the_call(sdpa, q, k, v)
    assert (seen.source, seen.kernel, seen.kind, seen.compiled, seen.trouble) == ("sdpa", FUSED, "self", False, None)
    assert [torch.equal(a, b) for a, b in ((seen.call.q, q), (seen.call.k, k), (seen.call.v, v))] == [True] * 3
    assert seen.call.sizes == (B, H, NQ, NK)
    assert seen.lse is not None
    assert_explains(seen)


def test_what_is_reported_is_detached_and_not_copied():
    q, k, v = (x.requires_grad_() for x in qkv())
    seen = the_call(sdpa, q, k, v)
    assert not any(t.requires_grad for t in (seen.call.q, seen.call.k, seen.call.v, seen.output, seen.lse))
    assert seen.call.q.data_ptr() == q.data_ptr()


def test_fewer_key_heads_are_reported_as_such():
    seen = the_call(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(heads=6, kv_heads=2))
    assert (seen.kernel, seen.call.k.shape[1]) == (FUSED, 2)
    assert_explains(seen)


class Grouped(nn.Module):
    """Six heads of x (B, N, 6·D) look at the keys and values of two, as in transformers before 5.23 and since."""

    num_key_value_groups = 3

    def __init__(self, packs):
        super().__init__()
        self.packs = packs

    def forward(self, x, k, v, mask=None):
        q = x.unflatten(-1, (6, -1)).transpose(1, 2)  # (B, 6, N, D)
        if self.packs and q.shape[2] == 1:
            packed = mask if mask is None or mask.shape[1] == 1 else mask.reshape(B, 2, 3, -1)
            return sdpa(q.reshape(B, 2, 3, -1), k, v, attn_mask=packed).reshape(q.shape)
        return sdpa(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("heads", [0, 1, 6])
def test_heads_of_one_query_that_stand_in_the_place_of_queries_are_reported_as_heads(heads, kernel):
    x, (k, v) = torch.randn(B, 1, 6 * D), (torch.randn(B, 2, NK, D) for _ in range(2))
    mask = torch.where(torch.rand(B, heads, 1, NK) < 0.3, -inf, torch.randn(B, heads, 1, NK)) if heads else None
    with sdpa_kernel(kernel):
        (out, (packed,)), (expected, (plain,)) = (watched(Grouped(packs), x, k, v, mask) for packs in (True, False))
    torch.testing.assert_close(out, expected)
    assert packed.kernel == plain.kernel
    assert packed.call.sizes == plain.call.sizes == (B, 6, 1, NK)
    assert packed.call.k.shape == (B, 2, NK, D)
    assert torch.equal(packed.call.q, plain.call.q)
    weights = [stages(one.call).weights for one in (packed, plain)]
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(packed.output, plain.output)
    assert (packed.lse is None) == (plain.lse is None) == (kernel == SDPBackend.MATH)
    if packed.lse is not None:
        torch.testing.assert_close(packed.lse, plain.lse)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_queries_as_many_as_heads_share_keys_stay_queries(n):
    k, v = (torch.randn(B, 2, NK, D) for _ in range(2))
    _, (seen,) = watched(Grouped(True), torch.randn(B, n, 6 * D), k, v)
    assert seen.call.sizes == (B, 6, n, NK)


def test_scale_is_reported():
    seen = the_call(lambda q, k, v: sdpa(q, k, v, scale=0.3), *qkv())
    assert seen.call.scale == 0.3
    assert_explains(seen)


@pytest.mark.parametrize(("nq", "nk"), [(NQ, NK), (NK, NQ), (NQ, NQ)])
def test_is_causal_is_upper_left(nq, nk):
    seen = the_call(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(nq, nk))
    assert seen.call.mask == masks.causal(offset=0)
    assert_explains(seen)


def some_hidden():
    """Key 3 is hidden from all, row 2 of batch row 1 sees nothing."""
    visible = torch.ones(B, 1, NQ, NK, dtype=torch.bool)
    visible[..., 3] = False
    visible[1, :, 2] = False
    return visible


def test_boolean_mask_is_a_mask():
    seen = the_call(lambda q, k, v: sdpa(q, k, v, attn_mask=some_hidden()), *qkv())
    assert torch.equal(seen.call.mask.dense(NQ, NK), some_hidden())
    assert seen.call.bias is None
    assert_explains(seen)


def test_lse_of_a_row_that_sees_nothing_is_minus_infinity():
    seen = the_call(lambda q, k, v: sdpa(q, k, v, attn_mask=some_hidden()), *qkv())
    assert (seen.lse[1, :, 2] == -inf).all()
    assert seen.lse[0].isfinite().all()


def test_float_mask_is_taken_apart_into_hidden_and_added():
    added = torch.randn(B, 1, NQ, NK)
    seen = the_call(lambda q, k, v: sdpa(q, k, v, attn_mask=added.masked_fill(~some_hidden(), -inf)), *qkv())
    assert torch.equal(seen.call.mask.dense(NQ, NK), some_hidden())
    assert torch.equal(seen.call.bias.dense(NQ, NK), added.masked_fill(~some_hidden(), 0.0))
    assert_explains(seen)


def test_smallest_number_of_the_dtype_is_added_not_hidden():
    lowest = torch.full((NQ, NK), torch.finfo(torch.float32).min)
    seen = the_call(lambda q, k, v: sdpa(q, k, v, attn_mask=lowest), *qkv())
    assert seen.call.mask is None
    assert torch.equal(seen.call.bias.dense(NQ, NK), lowest)
    assert seen.lse is None  # lowest + log(11) is lowest: no weight could be told from it


def test_zeros_are_neither_mask_nor_bias():
    assert split_cells(torch.zeros(NQ, NK)) == (None, None)


def test_nan_in_a_mask_stays_in_the_bias():
    cells = torch.zeros(NQ, NK)
    cells[1, 2] = torch.nan
    visible, added = split_cells(cells)
    assert visible is None
    assert added.isnan().sum() == 1


def test_repeated_axes_of_a_mask_are_not_multiplied_out():
    visible, added = split_cells(torch.tensor([0.0, -inf, 1.0])[None, None, None].expand(B, H, NQ, 3))
    assert visible.shape == added.shape == (1, 1, 1, 3)


def test_mask_of_another_sort_gives_no_lse():
    q, k, v = qkv(NQ, NQ)
    call = read_call(q, k, v, mask=masks.window(1, 1))
    assert trusted_lse(torch.zeros(B, H, NQ), call) is None


def test_lower_right_causal_hides_rows_without_keys_from_lse():
    q, k, v = qkv(NK, NQ)
    lse = trusted_lse(torch.zeros(B, H, NK), read_call(q, k, v, mask=masks.causal()))
    assert (lse == -inf).sum() == B * H * (NK - NQ)
    assert (lse[..., : NK - NQ] == -inf).all()


def test_causal_and_cells_together_hide_what_either_hides():
    q, k, v = qkv(NQ, NQ)
    cells = torch.ones(NQ, NQ, dtype=torch.bool)
    cells[:, 1] = False
    mask = read_call(q, k, v, cells=cells, mask=masks.causal()).mask
    assert torch.equal(mask.dense(NQ, NQ), cells & torch.ones(NQ, NQ).tril().bool())


def test_bias_beside_a_mask_is_added_to_what_the_mask_adds():
    q, k, v = qkv()
    one, two = torch.randn(NQ, NK), torch.randn(H, NQ, NK)
    assert torch.equal(read_call(q, k, v, cells=one, bias=two).bias.dense(NQ, NK)[0], one + two)


# ----------------------------------------------------------------------------------------------------- the unfused path


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((NQ, D), (1, 1, NQ, NQ)), ((B, NQ, D), (B, 1, NQ, NQ)), ((2, 3, H, NQ, D), (6, H, NQ, NQ))],
)
def test_any_number_of_axes_is_reported_with_four(shape, sizes):
    x = torch.randn(shape)
    seen = the_call(sdpa, x, x, x)
    if seen.kernel != MATH:  # torch 2.15 hands three axes to a fused kernel, as one batch row of several heads
        sizes = (1, sizes[0], NQ, NQ)
    assert (seen.lse is None) == (seen.kernel == MATH)
    assert seen.call.sizes == sizes
    assert seen.output.shape == (*sizes[:3], D)
    assert_explains(seen)


@pytest.mark.parametrize("guard", [nullcontext, torch.no_grad, torch.inference_mode])
def test_unfused_path_is_reported_once(guard):
    with guard(), sdpa_kernel(SDPBackend.MATH):
        _, seen = watched(Call(lambda q, k, v: sdpa(q, k, v, attn_mask=some_hidden())), *qkv())
    assert [s.kernel for s in seen] == [MATH]
    assert_explains(seen[0])


def test_batch_that_is_shared_is_spread():
    q, k, v = qkv()
    seen = the_call(sdpa, q, k[:1], v[:1])
    assert seen.call.k.shape == (B, H, NK, D)
    assert_explains(seen)


def test_call_that_we_cannot_describe_is_reported_with_the_reason():
    q, k, v = qkv()
    seen = the_call(lambda q, k, v: sdpa(q, k, v, dropout_p=1.0), q, k, v)
    assert seen.call is None
    assert all(named in seen.trouble for named in ("dropout", "1.0"))
    assert seen.output.shape == (B, H, NQ, D)


# ------------------------------------------------------------------------------------------------------ nothing changes


def gradients(model, x):
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def assert_same(one, two):
    assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [True] * len(one)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.5}], ids=["full", "causal", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_and_gradients_are_the_same_bits(options, dtype):
    model, x = Stack(**options).to(dtype), tokens(dtype=dtype)
    torch.manual_seed(1)
    before = gradients(model, x)
    seen = []
    torch.manual_seed(1)
    with Taps(model, seen.append):
        during = gradients(model, x)
    assert_same(before, during)
    assert [s.path for s in seen] == ["layers.0", "layers.1"]  # and none from the backward pass


@pytest.mark.parametrize(
    "guard", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_output_is_the_same_bits_under(guard):
    model, x = Stack(), tokens()
    with guard():
        before = model(x)
        during, seen = watched(model, x)
    assert torch.equal(before, during)
    assert len(seen) == 2


def test_callback_runs_without_graph_or_autocast_and_unseen():
    model, x, seen = Stack(), tokens().requires_grad_(), []

    def measure(observed):
        sdpa(observed.call.q, observed.call.k, observed.call.v)
        product = torch.ones(2, 3) @ model.head.weight[:, :2].new_ones(3, 2).requires_grad_()
        seen.append((product.requires_grad, product.dtype))

    with torch.autocast("cpu", dtype=torch.bfloat16), Taps(model, measure) as taps:
        model(x)
    assert taps.errors == []
    assert seen == [(False, torch.float32)] * 2


def test_own_code_is_not_watched_while_measuring():
    model, x, seen = Stack(), tokens(), []
    with Taps(model, seen.append), measuring():
        model(x)
    assert seen == []
    assert HERE.quiet == 0


def test_error_of_the_model_is_the_same_and_the_model_is_left_as_it_was():
    model = Call(lambda q, k: sdpa(q, k, k))
    q, k = torch.randn(B, H, NQ, D), torch.randn(B, H, NK, D + 1)
    before = error_of(model, q, k)
    with Taps(model, print):
        during = error_of(model, q, k)
    assert during == before
    assert before[0] is RuntimeError
    with pytest.raises(ZeroDivisionError), Taps(model, print):
        1 / 0  # noqa: B018


def error_of(model, *args):
    try:
        model(*args)
    except Exception as problem:
        return type(problem), str(problem)
    raise AssertionError("no error")


def test_error_of_the_callback_is_kept_and_the_model_runs():
    model, x = Stack(), tokens()
    with Taps(model, lambda observed: [][1]) as taps:
        during = model(x)
    assert torch.equal(during, model(x))
    assert [(path, type(problem)) for path, problem in taps.errors] == [
        ("layers.0", IndexError),
        ("layers.1", IndexError),
    ]


def test_error_that_is_kept_says_where_it_was_and_keeps_no_tensor_alive():
    kept = []

    def fail(observed):
        kept.append(weakref.ref(observed.output))
        raise ValueError("no") from KeyError("why")

    model = Attend()
    with torch.no_grad(), Taps(model, fail) as taps:
        model(tokens())
    gc.collect()
    ((_, problem),) = taps.errors
    assert "in fail" in problem.__notes__[0]
    assert kept[0]() is None


def test_interrupt_in_the_callback_passes_through():
    def stop(observed):
        raise KeyboardInterrupt

    model, x = Stack(), tokens()
    with pytest.raises(KeyboardInterrupt), Taps(model, stop):
        model(x)
    assert HERE.quiet == 0
    _, seen = watched(model, x)
    assert len(seen) == 2


def test_nothing_is_left_behind():
    model, seen, before = Stack(), [], state()
    with Taps(model, seen.append):
        kernels, ours, fast_path, *_ = state()
        assert not set(kernels) & set(before[0])
        assert (len(ours), fast_path) == (len(COVERED), False)
        model(tokens())
        hooks = [vars(m)[name] for m in model.modules() for name in vars(m) if "hook" in name]
        assert not any(hooks)
    assert state()[:3] == before[:3]
    model(tokens())
    assert len(seen) == 2


def test_switch_of_the_fast_path_is_put_back_to_what_it_was():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        watched(Stack(), tokens())
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_entering_warns_of_nothing_leaves_the_filters_and_imports_no_compiler():
    code = """
import sys, warnings, torch
from regard.lens.taps.installation import Taps
warnings.simplefilter("error")
before = list(warnings.filters)
model = torch.nn.MultiheadAttention(8, 2)
x = torch.zeros(3, 1, 8)
for _ in range(2):
    seen = []
    with Taps(model, seen.append):
        model(x, x, x, need_weights=False)
    assert len(seen) == 1
assert warnings.filters == before
print([name for name in ("torch._dynamo", "torch._inductor", "transformers", "triton") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.stderr, result.stdout) == ("", "[]\n")


def test_warning_of_torch_is_kept_from_the_user_even_where_torch_repeats_warnings():
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            watched(Stack(), tokens())
    finally:
        torch.set_warn_always(False)
    assert said == []


# ----------------------------------------------------------------------------------------------------------- whose call


def test_path_is_that_of_named_modules():
    model = Stack()
    _, seen = watched(model, tokens())
    assert [s.path for s in seen] == ["layers.0", "layers.1"]
    assert {s.path for s in seen} <= dict(model.named_modules()).keys()


def test_model_itself_has_the_empty_path():
    assert the_call(sdpa, *qkv()).path == ""


def test_module_under_two_names_has_the_first():
    model = Stack()
    model.layers[1] = model.layers[0]
    _, seen = watched(model, tokens())
    assert [s.path for s in seen] == ["layers.0", "layers.0"]


class Odd(nn.Module):
    """Attention in a method of another name, in a closure, of a `self` named otherwise."""

    def attend(this, x):  # noqa: N805
        def inner():
            return sdpa(x, x, x) * len([this])

        return inner()

    @torch.no_grad()
    def decorated(self, x):
        return self.attend(x)


def test_method_of_any_name_is_found():
    model = nn.ModuleDict({"odd": Odd()})
    x, seen = torch.randn(B, H, NQ, D), []
    with Taps(model, seen.append):
        model["odd"].attend(x)
        model["odd"].decorated(x)
    assert [s.path for s in seen] == ["odd", "odd"]


def test_forward_that_was_replaced_on_the_instance_is_found():
    model = Stack()
    attend = model.layers[0].forward
    model.layers[0].forward = lambda x: attend(x) * 2
    _, seen = watched(model, tokens())
    assert [s.path for s in seen] == ["layers.0", "layers.1"]


def test_calls_of_others_are_not_reported():
    model, other, seen = Stack(), Stack(), []
    with Taps(model, seen.append):
        other(tokens())
        q, k, v = qkv()
        sdpa(q, k, v)
    assert seen == []


def test_part_of_a_model_can_be_watched_alone():
    model, seen = Stack(), []
    with Taps(model.layers[1], seen.append):
        model(tokens())
    assert [s.path for s in seen] == [""]


def test_taps_inside_taps_each_see_their_own():
    model, other, outer, inner = Stack(), Stack(), [], []
    with Taps(model, outer.append):
        with Taps(other, inner.append):
            model(tokens())
            other(tokens())
        model(tokens())
    assert (len(outer), len(inner)) == (4, 2)


def test_taps_that_end_crosswise_leave_nothing():
    model, one, two = Stack(), [], []
    first, second = Taps(model, one.append), Taps(model, two.append)
    first.__enter__()
    second.__enter__()
    model(tokens())
    first.__exit__(None, None, None)
    model(tokens())
    second.__exit__(None, None, None)
    assert (len(one), len(two)) == (2, 4)


def test_model_and_its_part_watched_together_have_paths_of_their_own():
    model, whole, part = Stack(), [], []
    with Taps(model, whole.append), Taps(model.layers[1], part.append):
        model(tokens())
    assert [s.path for s in whole] == ["layers.0", "layers.1"]
    assert [s.path for s in part] == [""]


def test_taps_can_be_used_again_but_not_entered_twice():
    model, seen = Stack(), []
    taps = Taps(model, seen.append)
    for _ in range(2):
        with taps:
            model(tokens())
    assert len(seen) == 4
    with taps, pytest.raises(RuntimeError, match="installed"):
        taps.__enter__()


def test_threads_see_only_their_own():
    models, seen = [Stack(), Stack()], [[], []]
    barrier = threading.Barrier(2)

    def work(number):
        x = tokens()
        barrier.wait()
        for _ in range(20):
            with Taps(models[number], seen[number].append):
                models[number](x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(s) for s in seen] == [40, 40]


def test_model_that_runs_in_another_thread_is_seen():
    model, seen = Stack(), []
    with Taps(model, seen.append):
        thread = threading.Thread(target=model, args=(tokens(),))
        thread.start()
        thread.join()
    assert len(seen) == 2


def test_loop_of_generation_is_seen_step_by_step():
    model = Attend(causal=True)
    x, seen = tokens(3), []
    with torch.no_grad(), Taps(model, seen.append):
        for _ in range(4):
            x = torch.cat([x, model(x)[:, -1:]], 1)
    assert [s.call.sizes[2:] for s in seen] == [(n, n) for n in (3, 4, 5, 6)]


class Without:
    """Torch, or a part of it, without its private functions of these names."""

    def __init__(self, module, *names):
        self.module, self.names = module, names

    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        value = getattr(self.module, name)
        return Without(value, *self.names) if name in ("_C", "_functorch") else value


@pytest.fixture(params=["this torch", "a torch without private functions"])
def any_torch(request, monkeypatch):
    if request.param != "this torch":
        names = ("_current_graph_task_id", "_dispatch_keys", "is_functorch_wrapped_tensor")
        monkeypatch.setattr(calls, "torch", Without(torch, *names))


@pytest.mark.usefixtures("any_torch")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_seen_once(reentrant):
    model = Stack()

    def forward(x):
        for layer in model.layers:
            x = x + checkpoint(layer, x, use_reentrant=reentrant)
        return model.head(x)

    outer, x = Call(forward), tokens()
    outer.inner = model
    before, seen = gradients(outer, x), []
    with Taps(outer, seen.append):
        during = gradients(outer, x)
    assert_same(before, during)
    assert [s.path for s in seen] == ["inner.layers.0", "inner.layers.1"]


# -------------------------------------------------------------------------------------------------------- self or cross


class Cross(nn.Module):
    def forward(self, hidden_states, encoder_hidden_states=None):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return sdpa(hidden_states, source, source)


class Said(nn.Module):
    def forward(self, x, is_cross_attention):
        return sdpa(x, x, x)


def kinds(model, *args):
    _, seen = watched(model, *args)
    return [s.kind for s in seen]


def test_other_sequence_as_argument_is_cross():
    q, k, _ = qkv()
    assert kinds(Cross(), q) == ["self"]
    assert kinds(Cross(), q, q) == ["self"]  # the same sequence under the other name
    assert kinds(Cross(), q, k) == ["cross"]


@pytest.mark.parametrize("answer", [True, False])
def test_what_the_module_says_of_itself_counts_before_its_name(answer):
    model = nn.ModuleDict({"cross_attn": Said()})
    seen = []
    with Taps(model, seen.append):
        model["cross_attn"](qkv()[0], answer)
    assert [s.kind for s in seen] == ["cross" if answer else "self"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("decoder.layers.0.encoder_attn", "cross"),
        ("decoder.block.0.layer.1.EncDecAttention", "cross"),
        ("h.0.crossattention.self", "cross"),
        ("layers.0.cross_attn_token_to_image", "cross"),
        ("decoder.blocks.0.cross", "cross"),
        ("crossing.0.attention", "self"),
        ("layers.0.self_attn", "self"),
        ("cross_attention_block.self_attn", "self"),
        ("cross_encoder.layer.0.attention.self", "self"),
        ("encoder.attention", "self"),
    ],
)
def test_name_decides_where_nothing_else_does(path, kind):
    model = inner = nn.Module()
    *parents, last = path.split(".")
    for name in parents:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(last, Call(sdpa))
    seen = []
    with Taps(model, seen.append):
        model.get_submodule(path)(*qkv())
    assert [(s.path, s.kind) for s in seen] == [(path, kind)]


# -------------------------------------------------------------------------------------------------- torch's own modules


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_is_seen_with_its_kind(need_weights):
    model = nn.MultiheadAttention(H * D, H, batch_first=True)
    x, other, seen = tokens(), tokens(NK), []
    before = model(x, x, x, need_weights=need_weights)[0]
    with Taps(model, seen.append):
        during = model(x, x, x, need_weights=need_weights)[0]
        model(x, other, other, need_weights=need_weights)
    assert torch.equal(before, during)
    source = "softmax" if need_weights else "sdpa"
    assert [(s.path, s.kind, s.source) for s in seen] == [("", "self", source), ("", "cross", source)]
    cells = seen[1].weights.shape if need_weights else seen[1].call.sizes
    assert tuple(cells) == (B, H, NQ, NK)


def test_encoder_is_seen_in_spite_of_its_fast_path():
    layer = nn.TransformerEncoderLayer(H * D, H, 13, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    padding = torch.zeros(B, NQ, dtype=torch.bool)
    padding[1, 3:] = True
    x = tokens()
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
        seen = []
        with Taps(model, seen.append):
            during = model(x, src_key_padding_mask=padding)
    assert [(s.path, s.kind) for s in seen] == [("layers.0.self_attn", "self"), ("layers.1.self_attn", "self")]
    assert torch.equal(seen[0].call.mask.dense(NQ, NQ)[:, 0, 0], ~padding)
    assert_rule(during[~padding], before[~padding], model.double()(x.double(), src_key_padding_mask=padding)[~padding])


def test_decoder_layer_has_one_of_each_kind():
    model = nn.TransformerDecoderLayer(H * D, H, 13, batch_first=True).eval()
    _, seen = watched(model, tokens(), tokens(NK))
    assert [(s.path, s.kind) for s in seen] == [("self_attn", "self"), ("multihead_attn", "cross")]


# ------------------------------------------------------------------------------------------------------ compiled models


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_is_seen_without_compiling_again(backend):
    torch._dynamo.reset()
    original, x = Stack(causal=True), tokens()
    model = torch.compile(original, backend=backend)
    with torch.no_grad():
        before = model(x)
        count = torch._dynamo.utils.counters["frames"]["ok"]
        during, seen = watched(model, x)
        through_original = []
        with Taps(original, through_original.append):
            model(x)
    assert torch._dynamo.utils.counters["frames"]["ok"] == count
    assert torch.equal(before, during)
    assert [(s.path, s.compiled, s.kernel) for s in seen] == [("", True, FUSED)] * 2
    assert [(s.path, s.compiled) for s in through_original] == [("", True)] * 2
    assert_explains(seen[0])


@pytest.mark.usefixtures("compiler")
def test_model_compiled_by_inductor_is_seen_with_the_same_bits():
    torch._dynamo.reset()
    model, x, seen = torch.compile(Stack()), tokens(), []

    def check(observed):  # at once: Inductor uses the memory again
        seen.append(observed)
        assert_explains(observed)

    with torch.no_grad():
        before = model(x)
        with Taps(model, check) as taps:
            during = model(x)
    assert torch.equal(before, during)
    assert taps.errors == []
    assert [(s.path, s.compiled, s.order, s.kernel) for s in seen] == [("", True, 0, FUSED), ("", True, 1, FUSED)]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}])
def test_model_that_is_compiled_inside_the_block_is_seen(options):
    torch._dynamo.reset()
    model, x = Stack(**options), tokens()
    seen = []
    with Taps(model, seen.append) as taps:
        torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert taps.errors == []
    kernel = "softmax" if options else FUSED  # dropout takes the unfused path, which the compiler has taken apart
    assert [(s.path, s.compiled, s.kernel) for s in seen] == [("", True, kernel)] * 2


def test_compiled_layers_keep_their_paths():
    torch._dynamo.reset()
    model, x = Stack(), tokens()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1].compile(backend="eager")
    with torch.no_grad():
        before = model(x)
        during, seen = watched(model, x)
    assert torch.equal(before, during)
    assert [(s.path, s.compiled) for s in seen] == [("layers.0", True), ("layers.1", True)]


def test_taps_are_not_traced_where_the_compiler_left_a_function_alone():
    torch._dynamo.reset()
    left_alone = torch._dynamo.disable(recursive=False)(lambda x: sdpa(x, x, x))
    model, x = Call(torch.compile(lambda x: left_alone(x + 1) + 1, backend="eager")), qkv()[0]
    with torch.no_grad():
        before = model(x)
        start = torch._dynamo.utils.counters["frames"]["ok"]
        model(x)
        unwatched = torch._dynamo.utils.counters["frames"]["ok"]
        during, seen = watched(model, x)
    # A function left alone is counted in every call.
    assert torch._dynamo.utils.counters["frames"]["ok"] - unwatched == unwatched - start
    assert torch.equal(before, during)
    assert [(s.path, s.compiled) for s in seen] == [("", False)]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore:`torch.jit.trace:FutureWarning")
def test_traced_module_is_seen_as_one():
    x = tokens()
    model = nn.ModuleDict({"traced": torch.jit.trace(Stack(), x)})
    before, seen = model["traced"](x), []
    with Taps(model, seen.append):
        during = model["traced"](x)
    assert torch.equal(before, during)
    assert [(s.path, s.compiled, s.order) for s in seen] == [("traced", True, 0), ("traced", True, 1)]


@pytest.mark.usefixtures("any_torch")
def test_stand_ins_for_tensors_are_not_reported():
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen = []
    with FakeTensorMode(), Taps(model := Stack(dropout=0.5), seen.append) as taps:
        model(torch.randn(B, NQ, H * D))
    assert (seen, taps.errors) == ([], [])


@pytest.mark.usefixtures("any_torch")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms_are_seen_as_the_kernel_that_runs():
    model, x, seen = Attend(), torch.randn(3, B, NQ, H * D), []
    with Taps(model, seen.append) as taps:
        torch.func.grad(lambda x: torch.func.vmap(model)(x).sum())(x)
        torch.func.functionalize(model)(x[0])
    assert taps.errors == []
    assert seen != []
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(s.call.q) for s in seen)
    assert len(watched(model, x[0])[1]) == 1
    numbers = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert calls.WatchedModel(model, print).storages == numbers


# ---------------------------------------------------------------------------------------------------- our own operation


def test_own_layer_is_reported_once_with_the_kernel_and_lse_inside():
    layer, x = regard.MultiHeadAttention(H * D, H), tokens()
    before = layer(x)
    during, seen = watched(layer, x)
    assert torch.equal(before, during)
    (only,) = seen
    assert (only.path, only.source, only.kernel, only.kind) == ("", "regard", FUSED, "self")
    assert not only.call.q.requires_grad
    assert_explains(only)
    assert only.lse is not None


def test_own_layer_with_a_mask_lends_no_lse():
    layer, x = regard.MultiHeadAttention(H * D, H), tokens()
    seen = []
    with Taps(layer, seen.append):
        layer(x, mask=masks.padding([NQ, 0]))  # one batch row sees nothing, which the kernel is not told
        layer(x, mask=masks.window(1, 0))
    assert [(s.source, s.lse) for s in seen] == [("regard", None)] * 2
    assert_explains(seen[0])


def test_own_layer_with_a_context_is_cross():
    layer, seen = regard.MultiHeadAttention(H * D, H), []
    with Taps(layer, seen.append):
        layer(tokens(), tokens(NK))
        layer(tokens(), layer.keys(tokens(NK)))
    assert [(s.kind, s.call.sizes) for s in seen] == [("cross", (B, H, NQ, NK))] * 2


@pytest.mark.parametrize("backend", ["reference", "tiled", "flex"])
def test_own_operation_names_its_backend_and_nothing_inside_is_reported(backend):
    seen = the_call(lambda q, k, v: regard.attention(q, k, v, backend=backend), *qkv())
    assert (seen.source, seen.kernel, seen.lse) == ("regard", backend, None)
    assert_explains(seen)


def test_own_operation_on_arrays_is_reported_in_tensors():
    x = torch.randn(NQ, D).double().numpy()
    seen = the_call(lambda x: regard.attention(x, x, x), x)
    assert seen.call.sizes == (1, 1, NQ, NQ)
    assert_explains(seen)


def test_own_operation_inside_compiled_code_is_seen_as_the_kernel_without_compiling_again():
    torch._dynamo.reset()
    model, x = torch.compile(regard.MultiHeadAttention(H * D, H), backend="eager"), tokens()
    with torch.no_grad():
        before = model(x)
        count = torch._dynamo.utils.counters["frames"]["ok"]
        during, seen = watched(model, x)
    assert torch._dynamo.utils.counters["frames"]["ok"] == count
    assert torch.equal(before, during)
    assert [(s.source, s.kernel, s.compiled) for s in seen] == [("sdpa", FUSED, True)]


def test_observers_are_told_in_order_until_they_leave():
    told = []

    def first(call, backend, output):
        told.append(("first", call.sizes, backend))

    def second(call, backend, output):
        told.append(("second", output.shape, backend))

    observe(first)
    observe(second)
    try:
        q, k, v = qkv()
        regard.attention(q, k, v, backend="tiled")
        unobserve(first)
        regard.attention(q, k, v, backend="reference")
    finally:
        unobserve(second)
    regard.attention(q, k, v)
    assert told == [
        ("first", (B, H, NQ, NK), "tiled"),
        ("second", (B, H, NQ, D), "tiled"),
        ("second", (B, H, NQ, D), "reference"),
    ]
    with pytest.raises(ValueError, match="observe"):
        unobserve(second)


# ----------------------------------------------------------------------------------------------------------------- CUDA


CUDA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA)
@pytest.mark.parametrize("masked", [False, True, "causal"])
@pytest.mark.parametrize("grad", [False, True])
def test_cuda_kernels_are_seen_with_the_same_bits(backend, masked, grad):
    if masked is True and backend == SDPBackend.FLASH_ATTENTION:
        pytest.skip("CUDA's flash kernel takes no mask")
    n, size = 67, 64
    q, k, v = (torch.randn(B, H, n, size, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))
    visible = torch.ones(B, 1, n, n, dtype=torch.bool, device="cuda")
    visible[..., 3] = visible[1, :, 2] = False
    given = {"attn_mask": visible} if masked is True else {"is_causal": masked == "causal"}

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return sdpa(q, k, v, **given)

    before = attend(q, k, v)
    during, (seen,) = watched(Call(attend), q, k, v)
    assert torch.equal(before, during)
    assert seen.trouble is None
    assert (seen.lse is None) == (backend == SDPBackend.MATH)
    if seen.lse is not None:
        exact = lse_of(seen.call)
        rows = exact.isfinite()
        assert torch.equal(seen.lse == -inf, ~rows)
        assert_rule(seen.lse[rows], lse_of(seen.call, torch.float32)[rows], exact[rows], what="lse")


def test_code_compiled_after_a_watched_compilation_has_its_gradients():
    """Torch remembers which kernel an operation has: it must not remember ours when they are gone."""
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)

    class Attention(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    (expected,) = torch.autograd.grad(Attention()(x).square().sum(), bias)
    with regard.watch(compiled := torch.compile(Attention(), backend="aot_eager")):
        compiled(x)
    torch._dynamo.reset()
    again = torch.compile(Attention(), backend="aot_eager")
    (found,) = torch.autograd.grad(again(x).square().sum(), bias)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA)
@pytest.mark.parametrize("heads", [0, 1, 6])
def test_packed_heads_are_reported_as_heads_by_every_cuda_kernel(backend, heads):
    if heads and backend == SDPBackend.FLASH_ATTENTION:
        pytest.skip("CUDA's flash kernel takes no mask")
    given = {"device": "cuda", "dtype": torch.bfloat16}
    x, (k, v) = torch.randn(B, 1, 6 * 64, **given), (torch.randn(B, 2, NK, 64, **given) for _ in range(2))
    mask = torch.rand(B, heads, 1, NK, device="cuda") < 0.7 if heads else None
    with sdpa_kernel(backend):
        (_, (packed,)), (_, (plain,)) = (watched(Grouped(packs), x, k, v, mask) for packs in (True, False))
    assert packed.trouble is None
    assert packed.call.sizes == plain.call.sizes == (B, 6, 1, NK)
    assert torch.equal(packed.call.q, plain.call.q)
    weights = [stages(one.call).weights for one in (packed, plain)]
    assert torch.equal(weights[0] == 0, weights[1] == 0)
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(packed.output, plain.output)
    if packed.lse is not None:
        torch.testing.assert_close(packed.lse, plain.lse)
