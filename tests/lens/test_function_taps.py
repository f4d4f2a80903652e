"""FlexAttention, Hugging Face's use of it, flash_attn: found under any name, passed on unchanged, names put back."""

import sys
import types
from math import inf

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks
from regard.lens.taps import functions
from regard.lens.taps.calls import HERE
from regard.lens.taps.installation import Taps
from regard.testing import assert_rule

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # What Hugging Face's own call of create_block_mask makes torch say.
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

B, H, NQ, NK, D = 2, 3, 5, 11, 8

# Compiled, but not by the compiler that takes ten seconds on a CPU.
compiled_flex = torch.compile(flex_attention, backend="eager")


@pytest.fixture(autouse=True)
def nothing_left():
    """After every test names are bound as before."""
    before = flex_attention, compiled_flex, flex_module.flex_attention, dict(vars(ByClass))
    yield
    assert (flex_attention, compiled_flex, flex_module.flex_attention, dict(vars(ByClass))) == before
    assert (functions._bound, functions._recorders, HERE.inside, HERE.kernel) == ([], {}, 0, None)


ITSELF = (flex_attention,)  # where no name is bound to it


class ByName(nn.Module):
    def forward(self, q, k, v, **given):
        return flex_attention(q, k, v, **given)


class ByCompiledName(nn.Module):
    def forward(self, q, k, v, **given):
        return compiled_flex(q, k, v, **given)


class ByModule(nn.Module):
    def forward(self, q, k, v, **given):
        return flex_module.flex_attention(q, k, v, **given)


class ByClass(nn.Module):
    attend = compiled_flex
    shared = staticmethod(flex_attention)

    def forward(self, q, k, v, **given):
        return type(self).attend(q, k, v, **given) + self.shared(q, k, v, **given)


class ByInstance(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = compiled_flex

    def forward(self, q, k, v, **given):
        return self.attend(q, k, v, **given)


def qkv(nq=NQ, nk=NK, kv_heads=H, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in ((B, H, nq, D), (B, kv_heads, nk, D), (B, kv_heads, nk, D))]


def watched(model, *args, **given):
    """What was seen; the result is the same bits as without."""
    seen = []
    with torch.no_grad():
        before = model(*args, **given)
        with Taps(model, seen.append) as taps:
            during = model(*args, **given)
    for one, two in zip(*(x if isinstance(x, tuple) else (x,) for x in (before, during)), strict=True):
        assert torch.equal(getattr(one, "lse", one), getattr(two, "lse", two))
    assert (taps.errors, taps.unconfirmed) == ([], [])
    return seen


def assert_explains(seen):
    """The reported call computes the reported output, by the numeric rule."""
    call = seen.call
    extra = {"mask": call.mask, "bias": call.bias, "scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in extra.items()}
    truth = regard.attention(call.q.double(), call.k.double(), call.v.double(), **wide, backend="reference")
    assert_rule(seen.output, regard.attention(call.q, call.k, call.v, **extra, backend="reference"), truth)


# -------------------------------------------------------------------------------------------------------- FlexAttention


@pytest.mark.parametrize("kind", [ByName, ByCompiledName, ByModule, ByClass, ByInstance])
def test_function_is_found_under_any_name(kind):
    q, k, v = qkv()
    model = nn.ModuleDict({"attn": kind()})
    seen = []
    with torch.no_grad(), Taps(model, seen.append) as taps:
        model["attn"](q, k, v)
    assert taps.errors == []
    assert [(s.path, s.source, s.kernel, s.kind, s.trouble) for s in seen] == [
        ("attn", "flex", "flex_attention", "self", None)
    ] * (2 if kind is ByClass else 1)
    assert torch.equal(seen[0].call.q, q)
    assert seen[0].call.mask is None
    assert_explains(seen[0])


def test_attribute_of_an_instance_is_put_back():
    model = ByInstance()
    before = dict(vars(model))
    watched(model, *qkv())
    assert vars(model) == before


@pytest.mark.parametrize("kind", [ByName, ByCompiledName])
def test_block_mask_is_read_as_a_mask(kind):
    def diagonal(b, h, i, j):
        return (j - i < 3) & (h != b)

    blocks = create_block_mask(diagonal, B, H, NQ, NK, device="cpu")
    (seen,) = watched(kind(), *qkv(), block_mask=blocks, scale=0.3)
    b, h, i, j = (torch.arange(n) for n in (B, H, NQ, NK))
    expected = diagonal(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j)
    assert torch.equal(seen.call.mask.dense(NQ, NK), expected)
    assert seen.call.scale == 0.3
    assert_explains(seen)


def test_grouped_heads_are_read():
    (seen,) = watched(ByName(), *qkv(kv_heads=1), enable_gqa=True)
    assert seen.call.k.shape[1] == 1
    assert_explains(seen)


def test_lse_is_reported_where_the_model_asked_for_it():
    q, k, v = qkv()
    (seen,) = watched(ByName(), q, k, v, return_aux=AuxRequest(lse=True))
    scores = q.double() @ k.double().mT * D**-0.5
    assert_rule(seen.lse, (q @ k.mT * D**-0.5).logsumexp(-1), scores.logsumexp(-1))


def test_score_mod_is_named_as_the_trouble():
    (seen,) = watched(ByName(), *qkv(), score_mod=lambda score, b, h, i, j: score * 2)
    assert seen.call is None
    assert "score_mod" in seen.trouble
    assert seen.output.shape == (B, H, NQ, D)


def test_calls_outside_the_model_are_not_reported():
    seen = []
    with torch.no_grad(), Taps(nn.Linear(2, 2), seen.append):
        ByName()(*qkv())
    assert seen == []


def test_error_of_the_function_passes_through_unchanged():
    model, (q, k, v) = ByName(), qkv()
    with Taps(model, print) as taps, pytest.raises(NotImplementedError, match="4D"):
        model(q[0], k[0], v[0])
    assert taps.errors == []


def test_two_taps_record_a_call_once_each():
    model, one, two = ByName(), [], []
    with torch.no_grad(), Taps(model, one.append):
        with Taps(model, two.append):
            model(*qkv())
        model(*qkv())
    assert (len(one), len(two)) == (2, 1)


def test_model_that_is_watched_second_is_bound_too():
    first, second, seen = ByName(), ByInstance(), []
    before = dict(vars(second))
    with torch.no_grad(), Taps(first, print), Taps(second, seen.append):
        second(*qkv())
    assert len(seen) == 1
    assert vars(second) == before


def test_name_that_is_imported_inside_the_block_is_put_back():
    module = types.ModuleType("imported_meanwhile")
    sys.modules["imported_meanwhile"] = module
    try:
        with Taps(ByName(), print):
            module.attend = flex_module.flex_attention
            assert module.attend is not ITSELF[0]
        assert module.attend is ITSELF[0]
    finally:
        del sys.modules["imported_meanwhile"]


@pytest.mark.parametrize("nested", [False, True])
def test_name_that_is_given_between_two_blocks_is_recorded(nested):
    helper = types.ModuleType("named_later")
    helper.attend = None
    sys.modules["named_later"] = helper

    class Indirect(nn.Module):
        def forward(self, q, k, v):
            return helper.attend(q, k, v)

    model, seen = Indirect(), []
    try:
        with torch.no_grad(), Taps(model, print):
            if nested:
                helper.attend = ITSELF[0]
                with Taps(model, seen.append):
                    model(*qkv())
        helper.attend = ITSELF[0]
        with torch.no_grad(), Taps(model, seen.append):
            model(*qkv())
        assert len(seen) == 1 + nested
        assert helper.attend is ITSELF[0]
    finally:
        del sys.modules["named_later"]


def test_modules_are_searched_again_only_if_a_name_is_new(monkeypatch):
    searched = []

    def namespaces(among=None, _all=functions._namespaces):
        searched.append(0)
        for space in _all(among):
            searched[-1] += 1
            yield space

    monkeypatch.setattr(functions, "_namespaces", namespaces)
    monkeypatch.setattr(functions, "_searched", {})
    for _ in range(2):
        with Taps(ByName(), print), Taps(ByName(), print):
            pass
    holder = [flex_attention]
    with Taps(ByName(), print):
        holder.clear()
    assert [count > 100 for count in searched] == [True, False, False, False, True]


# ------------------------------------------------------------------------------------------------- beside torch.compile


def test_what_is_compiled_inside_the_block_holds_nothing_of_ours():
    torch._dynamo.reset()
    kept = []
    with Taps(ByName(), print):
        kept.append(torch.compile(flex_attention, backend="eager"))
    assert kept[0]._torchdynamo_orig_callable is ITSELF[0]


def test_model_compiled_as_a_whole_is_not_bound_and_not_compiled_again():
    torch._dynamo.reset()
    model, args = torch.compile(ByName(), backend="eager"), qkv()
    with torch.no_grad():
        before = model(*args)
        count = torch._dynamo.utils.counters["frames"]["ok"]
        with Taps(model, print):
            assert flex_attention is ITSELF[0]
            during = model(*args)
    assert torch._dynamo.utils.counters["frames"]["ok"] == count
    assert torch.equal(before, during)


def test_recorder_is_traced_as_the_function_itself():
    torch._dynamo.reset()
    inner = torch.compile(lambda q, k, v: flex_attention(q, k, v), backend="eager", fullgraph=True)
    q, k, v = qkv()
    model = nn.ModuleList([ByName()])
    with torch.no_grad(), Taps(model, print) as taps:
        assert flex_attention is not ITSELF[0]
        during = inner(q, k, v)
    assert taps.errors == []
    assert_rule(during, sdpa(q, k, v), sdpa(q.double(), k.double(), v.double()))


def test_own_operation_by_flex_is_reported_as_ours_alone():
    class Own(nn.Module):
        def forward(self, q, k, v):
            return regard.attention(q, k, v, backend="flex")

    (seen,) = watched(Own(), *qkv())
    assert (seen.source, seen.kernel) == ("regard", "flex")


# --------------------------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture
def hugging_face(monkeypatch):
    """transformers, with FlexAttention compiled quickly."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.flex_attention import WrappedFlexAttention

    wrapped = WrappedFlexAttention.__new__(WrappedFlexAttention)
    monkeypatch.setattr(WrappedFlexAttention, "_instance", wrapped)
    monkeypatch.setattr(wrapped, "_is_flex_compiled", True, raising=False)
    monkeypatch.setattr(wrapped, "training", False, raising=False)
    monkeypatch.setattr(wrapped, "_compiled_flex_attention", compiled_flex, raising=False)
    return transformers


SIZES = {
    "vocab_size": 31,
    "hidden_size": 6 * D,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 17,
    "attn_implementation": "flex_attention",
}


def padded_batch():
    real = torch.ones(B, NQ, dtype=torch.long)
    real[1, :2] = 0
    return {"input_ids": torch.randint(0, 31, (B, NQ)), "attention_mask": real}


def table():
    from transformers.modeling_utils import AttentionInterface

    return dict(AttentionInterface._global_mapping)


@pytest.mark.usefixtures("compiler")
def test_hugging_face_model_is_read_with_its_mask(hugging_face):
    model = hugging_face.LlamaModel(hugging_face.LlamaConfig(**SIZES)).eval()
    batch, before = padded_batch(), table()
    seen = []
    with torch.no_grad():
        unwatched = model(**batch).last_hidden_state
        with Taps(model, seen.append) as taps:
            assert table() != before
            during = model(**batch).last_hidden_state
    assert (taps.errors, table()) == ([], before)
    assert torch.equal(unwatched, during)
    assert [(s.path, s.source, s.trouble) for s in seen] == [(f"layers.{n}.self_attn", "flex", None) for n in range(2)]
    visible = torch.ones(NQ, NQ).tril().bool() & batch["attention_mask"].bool()[:, None, None]
    assert torch.equal(seen[0].call.mask.dense(NQ, NQ), visible)
    assert seen[0].call.k.shape[1] == 2
    assert_explains(seen[0])


@pytest.mark.usefixtures("compiler")
def test_softcap_of_a_hugging_face_model_is_read(hugging_face):
    config = hugging_face.Gemma2Config(**SIZES, head_dim=D, attn_logit_softcapping=0.1, sliding_window=3)
    model = hugging_face.Gemma2Model(config).eval()
    seen = []
    with torch.no_grad(), Taps(model, seen.append):
        model(**padded_batch())
    assert [s.call.softcap for s in seen] == [0.1, 0.1]
    assert not torch.equal(*(s.call.mask.dense(NQ, NQ) for s in seen))  # one layer has a window
    for one in seen:
        assert_explains(one)


class Forward(nn.Module):
    """Hugging Face's function, looked up as its models do."""

    def forward(self, *args, **given):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS["flex_attention"](self, *args, **given)[0]


def test_mask_tensor_and_position_bias_of_hugging_face_are_added(hugging_face):
    cells = torch.randn(B, 1, NQ, NK + 2)
    cells[1, :, 2, 3] = -inf
    bias = torch.randn(B, H, NQ, NK)
    seen = []
    model = Forward().eval()
    with torch.no_grad(), Taps(model, seen.append) as taps:
        model(*qkv(), cells, scaling=0.3, position_bias=bias)
    assert taps.errors == []
    (only,) = seen
    assert (only.call.mask.dense(NQ, NK) == False).sum() == 1  # noqa: E712
    assert only.call.scale == 0.3
    assert_explains(only)


def test_booleans_given_to_hugging_face_as_a_tensor_are_added_as_it_does(hugging_face):
    seen = []
    model = Forward().eval()
    visible = torch.ones(B, 1, NQ, NK, dtype=torch.bool).tril()
    with torch.no_grad(), Taps(model, seen.append):
        model(*qkv(), visible)
    assert seen[0].call.mask is None
    assert torch.equal(seen[0].call.bias.dense(NQ, NK), visible.float())
    assert_explains(seen[0])


# ----------------------------------------------------------------------------------------------------------- flash_attn


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    return_attn_probs=False,
):
    """A stand-in with the package's signature and meaning, by the definition."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    nq, nk = q.shape[2], k.shape[2]
    before, after = (n if n >= 0 else nq + nk for n in window_size)
    distance = torch.arange(nk) - torch.arange(nq).view(-1, 1) - (nk - nq)
    visible = (distance >= -before) & (distance <= (0 if causal else after))
    given = {"mask": visible, "scale": softmax_scale, "softcap": softcap or None}
    out = regard.attention(q, k, v, **given, backend="reference").transpose(1, 2)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (softmax_scale or q.shape[-1] ** -0.5)
    lse = scores.masked_fill(~visible, -inf).logsumexp(-1).nan_to_num(neginf=inf)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k):
    return q


@pytest.fixture
def flash(monkeypatch):
    """The package as it is when somebody has imported it."""
    package = types.ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    package.flash_attn_with_kvcache = lambda q, k_cache, v_cache: q
    package.__version__ = "2.8"
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return package


class Flash(nn.Module):
    def __init__(self, name="flash_attn_func"):
        super().__init__()
        self.name = name

    def forward(self, *args, **given):
        return getattr(sys.modules["flash_attn"], self.name)(*args, **given)


def sequences(nq=NQ, nk=NK, kv_heads=1):
    return [x.transpose(1, 2) for x in qkv(nq, nk, kv_heads)]  # (B, N, H, D)


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, None),
        ({"causal": True}, masks.causal()),
        ({"window_size": (2, 1)}, masks.window(2, 1)),
        ({"window_size": (2, 1), "causal": True}, masks.window(2, 0)),
        ({"window_size": (2, -1)}, masks.window(2, NK + NQ)),
        ({"window_size": (-1, 1)}, masks.window(NK + NQ, 1)),
        ({"window_size": (-1, 1), "causal": True}, masks.causal()),
        ({"softcap": 1.5, "softmax_scale": 0.3}, None),
    ],
)
@pytest.mark.parametrize(("nq", "nk"), [(NQ, NK), (NK, NQ)])
def test_flash_attn_is_read(flash, given, mask, nq, nk):
    seen = watched_flash(*sequences(nq, nk), **given)
    assert (seen.source, seen.kernel, seen.trouble) == ("flash_attn", "flash_attn_func", None)
    assert seen.call.sizes == (B, H, nq, nk)
    dense = torch.ones(nq, nk, dtype=torch.bool) if mask is None else mask.dense(nq, nk)
    ours = torch.ones(nq, nk, dtype=torch.bool) if seen.call.mask is None else seen.call.mask.dense(nq, nk)
    assert torch.equal(ours, dense)
    assert_explains(seen)


def watched_flash(*args, name="flash_attn_func", **given):
    model, seen = Flash(name), []
    before = model(*args, **given)
    with Taps(model, seen.append) as taps:
        during = model(*args, **given)
    assert taps.errors == []
    pairs = zip(before, during, strict=True) if isinstance(before, tuple) else [(before, during)]
    assert all(one is two or torch.equal(one, two) for one, two in pairs)
    (only,) = seen
    return only


def test_lse_of_flash_attn_is_reported_with_minus_infinity_for_rows_that_see_nothing(flash):
    seen = watched_flash(*sequences(NK, NQ), causal=True, return_attn_probs=True)
    assert (seen.lse[..., : NK - NQ] == -inf).all()
    assert seen.lse[..., NK - NQ :].isfinite().all()


@pytest.mark.parametrize(
    ("name", "args", "trouble"),
    [
        ("flash_attn_func", sequences(), "alibi_slopes of flash_attn are not read yet"),
        (
            "flash_attn_varlen_func",
            [torch.zeros(3, H, D)] * 3 + [torch.tensor([0, 3])] * 2,
            "flash_attn_varlen_func: packed sequences are not taken apart yet",
        ),
        (
            "flash_attn_with_kvcache",
            [torch.zeros(B, 3, H, D)] * 3,
            "flash_attn_with_kvcache: only flash_attn_func is read yet",
        ),
    ],
)
def test_what_of_flash_attn_cannot_be_read_is_named(flash, name, args, trouble):
    given = {"alibi_slopes": torch.ones(H)} if name == "flash_attn_func" else {}
    seen = watched_flash(*args, name=name, **given)
    assert (seen.call, seen.trouble) == (None, trouble)


def test_names_of_flash_attn_are_put_back(flash):
    before = dict(vars(flash))
    watched_flash(*sequences())
    assert vars(flash) == before
