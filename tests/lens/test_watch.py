"""`watch`: what a capture holds, what it says of what it did not see, and that model and process stay as they were.

Models of transformers are in test_watch_models.py, how calls are caught in test_taps.py and its neighbours.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks
from regard.lens.capture import Capture
from regard.lens.taps import functions
from regard.lens.taps.calls import HERE, ObservedCall
from regard.lens.taps.installation import CPU_KERNELS
from regard.lens.watch import WatchContext
from regard.op import _observers

B, H, N, M, D = 2, 3, 5, 7, 11
ALL = slice(None)
COVERED = [*CPU_KERNELS, *((name, "CPU") for name in ("_softmax", "bmm", "baddbmm"))]


def state() -> tuple[Any, ...]:
    """All of the process that watching touches."""
    kernels = [str(torch.library.get_kernel(f"aten::{name}", key)) for name, key in COVERED]
    switch = torch.backends.mha.get_fastpath_enabled()
    return kernels, switch, HERE.quiet, HERE.inside, functions._bound, dict(functions._recorders), _observers


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


class Attend(nn.Module):
    """Self-attention of x (B, N, H·D) by torch's fused kernel."""

    def __init__(self, heads: int = H, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(heads * D, 3 * heads * D), nn.Linear(heads * D, heads * D)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        return self.out(sdpa(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Layers of it, one after the other."""

    def __init__(self, count: int = 3, heads: int = H, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attend(heads, dropout) for _ in range(count)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


class Function(nn.Module):
    """Any function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def x(n: int = N, heads: int = H, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, n, heads * D, dtype=dtype)


def qkv(nq: int = N, nk: int = M, kv_heads: int = H, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(B, heads, n, D, dtype=dtype) for heads, n in ((H, nq), (kv_heads, nk), (kv_heads, nk))]


def rows(view: Any) -> Tensor:
    return view.tile(ALL, ALL)


def weights(q: Tensor, k: Tensor, visible: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """By the definition, in fp64; 0 for rows that see nothing."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.double().mT / D**0.5
    scores = scores if bias is None else scores + bias.double()
    return (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(-1).nan_to_num()


def close(ours: Any, truth: Tensor) -> None:
    torch.testing.assert_close(ours.double(), truth.double(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- what a capture holds


def test_modules_are_named_in_the_order_of_their_calls() -> None:
    model = Stack()
    with regard.watch(model) as seen:
        model(x())
    assert seen.names == ["layers.0", "layers.1", "layers.2"]
    assert [(r.path, r.n, r.kind, r.source, r.compiled) for r in seen.records] == [
        (f"layers.{i}", 0, "self", "sdpa", False) for i in range(3)
    ]
    assert (len(seen), "layers.1" in seen, seen.unseen, seen.model) == (3, True, {}, "Stack")
    assert seen[0].sizes == seen["layers.0"].sizes == (B, H, N, N)


def test_capture_fills_while_the_model_runs() -> None:
    model = Stack()
    with regard.watch(model) as seen:
        assert seen.names == []
        model.layers[1](x())
        assert seen.names == ["layers.1"]
        model.layers[0](x())
    assert seen.names == ["layers.1", "layers.0"]


def test_measures_are_those_of_the_dense_weights() -> None:
    q, k, v = qkv(kv_heads=1, dtype=torch.float64)
    model = Function(lambda *qkv: sdpa(*qkv, enable_gqa=True))
    with regard.watch(model, measures=["entropy", "received", "max_logit", "effective", "map", "top"], top=2) as seen:
        model(q, k, v)
    view, truth = seen[0], weights(q, k)
    close(view.entropy, -(truth * truth.log()).sum(-1))
    close(view.received, truth.sum(-2))
    close(view.effective, 1 / truth.square().sum(-1))
    close(view.map(), truth)
    close(view.max_logit, (q @ k.mT / D**0.5).amax(-1))
    assert torch.equal(view.top(2).index, truth.topk(2).indices)


def test_only_asked_measures_are_made() -> None:
    model = Stack(1)
    with regard.watch(model, measures="entropy") as seen:
        model(x())
    assert sorted(seen[0].held) == ["entropy", "lse"]
    with pytest.raises(LookupError, match=r"received.*q.*k.*watch\(model, keep='qk'\)"):
        seen[0].received  # noqa: B018


def test_measures_may_come_from_a_generator() -> None:
    model = Stack(1)
    with regard.watch(model, measures=(name for name in ("patterns", "map"))) as seen:
        model(x())
    held = sorted(seen[0].held)
    assert [name for name in held if " " not in name] == ["entropy", "lse", "map", "received"]
    assert {"pattern previous", "share previous", "beside previous"} <= set(held)


def test_map_and_links_are_of_the_size_asked_for() -> None:
    model = Stack(1)
    with regard.watch(model, measures=["map", "top"], size=3, top=2) as seen:
        model(x())
    assert seen[0].map(3).shape == (B, H, 3, 3)
    assert seen[0].top(2).index.shape == (B, H, N, 2)
    with pytest.raises(LookupError, match=r"size.*4.*q.*k.*map\(3\)"):
        seen[0].map(4)


def test_nothing_is_kept_unless_asked_for() -> None:
    model = Stack(1)
    with regard.watch(model) as seen:
        model(x())
    with pytest.raises(LookupError, match=r"q.*k.*watch\(model, keep='qk'\)"):
        seen[0].row(0)
    with pytest.raises(LookupError, match=r"watch\(model, keep='output'\)"):
        seen[0].output  # noqa: B018


def test_rows_and_outputs_are_there_if_kept() -> None:
    q, k, v = qkv(dtype=torch.float64)
    model = Function(sdpa)
    with regard.watch(model, keep=["qk", "output"]) as seen:
        out = model(q, k, v)
    truth = weights(q, k)
    torch.testing.assert_close(rows(seen[0]), truth, rtol=0, atol=1e-12)
    torch.testing.assert_close(seen[0].row(-1), truth[:, :, -1], rtol=0, atol=1e-12)
    torch.testing.assert_close(seen[0].column(3), truth[..., 3], rtol=0, atol=1e-12)
    assert torch.equal(seen[0].output, out)


@pytest.mark.pairwise
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", ["nothing", "keys", "cells", "floats"])
def test_multihead_attention_gives_its_own_weights(batch_first: bool, need_weights: bool, masked: str) -> None:
    layer = nn.MultiheadAttention(H * D, H, batch_first=batch_first, dtype=torch.float64).eval()
    query, memory = x(dtype=torch.float64), x(M, dtype=torch.float64)
    visible = torch.rand(N, M) > 0.3
    visible[:, 0] = True
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[1, 4:] = True
    given = {
        "nothing": {},
        "keys": {"key_padding_mask": padding},
        "cells": {"attn_mask": ~visible},
        "floats": {"attn_mask": torch.randn(N, M, dtype=torch.float64)},
    }[masked]
    given |= {"need_weights": need_weights, "average_attn_weights": False}
    inputs = [t if batch_first else t.transpose(0, 1) for t in (query, memory, memory)]
    with torch.no_grad():
        unwatched = layer(*inputs, **given)
        with regard.watch(layer, keep="qk") as seen:
            watched = layer(*inputs, **given)
        truth = layer(*inputs, **given | {"need_weights": True})[1]
    assert torch.equal(unwatched[0], watched[0])
    assert (seen.names, seen.records[0].kind, len(seen.records)) == ([""], "cross", 1)
    torch.testing.assert_close(rows(seen[0]), truth, rtol=0, atol=1e-12)


def test_encoder_is_equal_to_rounding_to_its_fast_path_and_to_the_bit_to_its_slow_one() -> None:
    layer = nn.TransformerEncoderLayer(4 * D, 4, 13, batch_first=True)  # the fast path wants an even number of heads
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        fast = model(data := x(heads=4), src_key_padding_mask=padding)
        with regard.watch(model, keep="qk") as seen:
            watched = model(data, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(data, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(watched, slow)
    torch.testing.assert_close(watched[~padding], fast[~padding], rtol=1e-5, atol=1e-6)
    assert seen.names == ["layers.0.self_attn", "layers.1.self_attn"]
    assert not rows(seen[0])[1, :, :, 3:].any()


def test_decoder_has_one_of_each_kind() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(H * D, H, 13, batch_first=True), 2).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(N)
    with torch.no_grad():
        unwatched = model(target := x(), memory := x(M), tgt_mask=causal, tgt_is_causal=True)
        with regard.watch(model) as seen:
            watched = model(target, memory, tgt_mask=causal, tgt_is_causal=True)
    assert torch.equal(unwatched, watched)
    kinds = [("layers.{}.self_attn", "self", (N, N)), ("layers.{}.multihead_attn", "cross", (N, M))]
    assert [(r.path, r.kind, r.view.sizes[2:]) for r in seen.records] == [
        (path.format(i), kind, sizes) for i in range(2) for path, kind, sizes in kinds
    ]
    assert [r.facts.mask for r in seen.records[:2]] == ["causal", "none"]


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(2, 1),
    "padding": masks.padding([4, 6]),
    "documents": masks.documents([0, 0, 1, 1, 1, 2, 2]),
    "causal and padding": masks.causal() & masks.padding([4, 6]),
    "not": ~masks.window(1, 0),
    "globals": masks.globals([0, 3]) | masks.window(1, 1),
    "cells": torch.rand(M, M, generator=torch.Generator().manual_seed(1)) > 0.5,
}


@pytest.mark.parametrize("name", MASKS)
def test_own_operation_is_seen_with_every_mask(name: str) -> None:
    q, k, v = qkv(M, M, kv_heads=1, dtype=torch.float64)
    mask = MASKS[name]
    model = Function(lambda q, k, v: regard.attention(q, k, v, mask=mask))
    with regard.watch(model, keep="qk") as seen:
        out = model(q, k, v)
    assert torch.equal(out, model(q, k, v))
    assert seen.records[0].source == "regard"
    visible = None
    if mask is not None:
        visible = mask if isinstance(mask, Tensor) else mask.dense(M)
    torch.testing.assert_close(rows(seen[0]), weights(q, k, visible), rtol=0, atol=1e-12)


def test_own_layer_is_seen_by_its_path() -> None:
    model = nn.Sequential(regard.MultiHeadAttention(H * D, H), nn.Linear(H * D, 3))
    data = x()
    with torch.no_grad():
        unwatched = model(data)
        with regard.watch(model, keep="qk") as seen:
            watched = model(data)
    assert torch.equal(unwatched, watched)
    assert (seen.names, seen[0].sizes) == (["0"], (B, H, N, N))
    close(rows(seen[0]).sum(-1), torch.ones(B, H, N))


@pytest.mark.parametrize("sinks", [-3.0, 0.5, 40.0])
def test_own_operation_with_softcap_and_sinks_is_seen(sinks: float) -> None:
    q, k, v = qkv(dtype=torch.float64)
    logits = torch.full((H,), sinks, dtype=torch.float64)
    model = Function(lambda q, k, v: regard.attention(q, k, v, softcap=2.0, sinks=logits))
    with regard.watch(model, keep="qk") as seen:
        model(q, k, v)
    scores = 2 * (q @ k.mT / D**0.5 / 2).tanh()
    truth = torch.cat([scores, logits.view(H, 1, 1).expand(B, H, N, 1)], -1).softmax(-1)
    torch.testing.assert_close(rows(seen[0]), truth[..., :-1], rtol=0, atol=1e-12)
    torch.testing.assert_close(seen[0].entropy, -torch.xlogy(truth, truth).sum(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("size", "found"), [(2e4, True), (9999.0, False)])
def test_doctor_goes_by_lse_where_the_largest_logits_were_not_measured(size: float, found: bool) -> None:
    """lse − ln Nk is at most the largest logit: nothing is said of a head whose lse alone is above 10,000."""
    q, k = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 7, 4)
    q[0, 1, 3, 0], k[0, 1, :, 0] = size, 1.0
    model = Function(lambda q, k, v: regard.attention(q, k, v, scale=1.0))
    with regard.watch(model) as seen:
        model(q, k, k)
    assert "max_logit" not in seen[0].held
    findings = {finding.code: dict(finding.values) for finding in seen.doctor().findings}
    assert ("large logits" in findings) == found
    if found:
        assert (findings["large logits"]["count"], findings["large logits"]["list"]) == (1, "1 (≥ 2e+04)")


@pytest.mark.parametrize("size", [3e4, 8.0])
def test_sinks_are_no_logits_of_heads(size: float) -> None:
    """lse counts the sink, however large; keys that score nearly as high as it are found."""
    q, k = torch.zeros(1, 3, 5, 4), torch.zeros(1, 3, 7, 4)
    q[0, 2, 3, 0], k[0, 2, :, 0] = 2e4, 1.0
    sinks = torch.tensor([size, 0.0, 2e4])
    model = Function(lambda q, k, v: regard.attention(q, k, v, scale=1.0, sinks=sinks))
    with regard.watch(model) as seen:
        model(q, k, k)
    (finding,) = [finding for finding in seen.doctor().findings if finding.code == "large logits"]
    assert dict(finding.values)["list"] == "2 (≥ 2e+04)"


def test_padding_is_left_out_of_averages() -> None:
    model = Function(sdpa)
    q, k, v = qkv(M, M)
    real = torch.ones(B, M, dtype=torch.bool)
    real[1, 4:] = False
    with regard.watch(model) as seen:
        model(q, k, v, real[:, None, None])
    entropy = -torch.xlogy(p := weights(q, k, real[:, None, None]), p).sum(-1)
    mean = torch.stack([entropy[0].mean(-1), entropy[1, :, :4].mean(-1)])
    close(seen[0].mean("entropy"), mean)
    close(seen.atlas()[0], mean.mean(0))


def test_layers_of_unlike_sizes_share_an_atlas() -> None:
    model = nn.ModuleList([Attend(2), Attend(5)])
    with regard.watch(model) as seen:
        model[0](x(heads=2))
        model[1](x(heads=5))
    atlas = seen.atlas()
    assert atlas.shape == (2, 5)
    assert atlas[0].isnan().tolist() == [False, False, True, True, True]


def test_atlas_of_a_batch_row_is_its_own() -> None:
    model = Stack(2)
    with regard.watch(model) as seen:
        model(x())
    for batch in (1, -1):
        close(seen.atlas(batch=batch), torch.stack([view.mean("entropy")[batch] for view in seen]))
    with pytest.raises(IndexError, match=rf"batch.*{B}.*{B}.*batch"):
        seen.atlas(batch=B)


def decoder() -> tuple[nn.Module, Capture]:
    """A model whose second attention is cross-attention, and what was seen of it."""
    model = nn.TransformerDecoderLayer(H * D, H, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x(), x(M))
    return model, seen


def test_pattern_that_some_layers_lack_is_absent_there() -> None:
    _, seen = decoder()
    atlas = seen.atlas("previous")
    close(atlas[0], seen[0].patterns()["previous"].mean(0))
    assert atlas[1].isnan().all()
    assert [row is None for row in seen.atlas_rows("previous")] == [False, True]


def test_measure_that_no_layer_knows_is_refused_with_those_that_there_are() -> None:
    _, seen = decoder()
    known = "entropy.*own.*previous.*next.*first.*neighbours.*uniform"
    with pytest.raises(LookupError, match=rf"'nope'.*lse.*{known}"):
        seen.atlas("nope")
    with pytest.raises(LookupError, match=r"effective.*q.*k"):
        seen.atlas("effective")
    with regard.watch(model := Stack(1), measures=["entropy"]) as bare:
        model(x())
    with pytest.raises(LookupError, match=r"q.*k"):
        bare.atlas("own")


@pytest.mark.parametrize("pattern", ["induction", "same token", "delimiter"])
def test_pattern_that_goes_by_token_asks_for_tokens(pattern: str) -> None:
    with regard.watch(model := Stack(1)) as seen:
        model(x())
    for ask in (lambda: seen.atlas(pattern), lambda: seen.show(measure=pattern)):
        with pytest.raises(LookupError, match=rf"{pattern}.*tokens=.*5"):
            ask()
    _, both = decoder()
    with pytest.raises(LookupError, match="tokens="):
        both.atlas(pattern)


def test_pattern_of_delimiters_says_where_there_are_none() -> None:
    with regard.watch(model := Stack(1), tokens=[3, 1, 4, 1, 5]) as seen:
        model(x())
    assert seen.atlas("induction").shape == (1, 3)
    with pytest.raises(LookupError, match="numbers"):
        seen.atlas("delimiter")


# ------------------------------------------------------------------------------------------------------- tokens, device


def test_tokens_are_labels_and_make_patterns() -> None:
    model = Stack(1)
    words = [["The", "cat", ".", "The", "cat"]]
    with regard.watch(model, tokens=words) as seen:
        model(x())
    assert seen.tokens == words
    assert {"same token", "induction", "delimiter"} <= set(seen[0].patterns())


@pytest.mark.parametrize(
    "tokens",
    [
        torch.arange(N).repeat(B, 1),
        np.arange(N),
        list(range(N)),
        [torch.arange(N), torch.arange(N)],
        [[str(i) for i in range(N)]] * B,
    ],
    ids=["tensor", "array", "list", "list of tensors", "list of lists"],
)
def test_tokens_come_in_any_form(tokens: Any) -> None:
    model = Stack(1)
    with regard.watch(model, tokens=tokens) as seen:
        model(x())
    assert seen.tokens[0] == ["0", "1", "2", "3", "4"]
    assert seen[0].tokens.ids.shape[1] == N


def test_tokens_that_fit_no_call_are_warned_of() -> None:
    model = Stack(1)
    watch = regard.watch(model, tokens=["The", "cat"])
    with (
        pytest.warns(UserWarning, match=r"tokens=.*2.*1.*5.*2"),
        watch,
    ):
        model(x())


def test_tokens_are_not_warned_of_where_the_block_failed_or_nothing_ran() -> None:
    model = Stack(1)
    with regard.watch(model, tokens=["The", "cat"]):
        pass
    model.layers[0].out = Function(lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError), regard.watch(model, tokens=["The", "cat"]):
        model(x())


def test_device_is_where_everything_goes() -> None:
    model, data = Stack(1), x()
    with regard.watch(model, keep=["qk", "output"], device="cpu", tokens=list(range(N))) as seen:
        model(data, torch.rand(B, 1, N, N) > 0.2)
    view = seen[0]
    everything = [
        *view.held.values(),
        view.output,
        view.weights.lse,
        view.weights.call.q,
        *seen.records[0].heads.values(),
    ]
    assert {t.device.type for t in everything} == {"cpu"}


# --------------------------------------------------------------------------------------------------------- which layers


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("*.1", ["layers.1"]),
        (2, ["layers.2"]),
        ([0, "*.2"], ["layers.0", "layers.2"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        (range(2), ["layers.0", "layers.1"]),
    ],
)
def test_layers_are_chosen_by_path_or_number(layers: Any, names: list[str]) -> None:
    model = Stack()
    with regard.watch(model, layers=layers) as seen:
        model(x())
        model(x())
    assert (seen.names, seen.unseen) == (names, {})
    assert len(seen.records) == 2 * len(names)


@pytest.mark.parametrize("layers", ["*.7", 3])
def test_layers_that_fit_nothing_are_named(layers: Any) -> None:
    model = Stack()
    with regard.watch(model, layers=["*.0", layers]) as seen:
        model(x())
    assert seen.names == ["layers.0"]
    why = f"layers={layers!r} fits no attention that was seen: those that ran are layers.0–2"
    assert seen.unseen == {str(layers): why}


def test_capture_of_no_layer_says_what_there_was() -> None:
    model = Stack()
    with regard.watch(model, layers="encoder.*") as seen:
        model(x())
    with pytest.raises(LookupError, match=r"(?s)Stack.*layers='encoder\.\*'"):
        seen[0]


# ---------------------------------------------------------------------------------------------- several passes, indices


def test_several_passes_are_told_apart() -> None:
    model = Stack(1)
    with regard.watch(model, keep="qk") as seen:
        model(x())
        model(x(M))
        model(x())
    assert [seen["layers.0", n].sizes[2] for n in (0, 1, 2, -1)] == [N, M, N, N]
    message = r"'layers.0'.*3.*capture\['layers.0', n\].*0.*2"
    with pytest.raises(KeyError, match=message):
        seen["layers.0"]
    with pytest.raises(KeyError, match=message):
        list(seen)
    with pytest.raises(IndexError, match=r"'layers\.0'.*3"):
        seen["layers.0", 3]


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (7, IndexError, r"capture\[7\].*3"),
        (-4, IndexError, r"capture\[-4\].*3"),
        ("nowhere", KeyError, r"'nowhere'.*'layers.0'.*'layers.1'.*'layers.2'"),
        (1.5, TypeError, r"1.5"),
        (True, TypeError, "True"),
        (("layers.0", "x"), TypeError, r".'layers.0'.*'x'"),
    ],
)
def test_wrong_index_says_what_there_is(key: Any, error: type[Exception], message: str) -> None:
    model = Stack()
    with regard.watch(model) as seen:
        model(x())
    with pytest.raises(error, match=message):
        seen[key]


class Generator(nn.Module):
    """One layer with a cache, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Function(sdpa)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attn(q, k, v)


def test_generation_by_hand_is_assembled() -> None:
    q, k, v = qkv(M, M, dtype=torch.float64)
    model = Generator()
    with regard.watch(model, keep="qk") as seen:
        for end in (N, 6, 7):
            start = 0 if end == N else end - 1
            model(q[:, :, start:end], k[:, :, :end], v[:, :, :end])
    visible = torch.ones(M, M).tril().bool()
    visible[:N, :N] = True  # the prompt was not masked
    torch.testing.assert_close(rows(seen[0]), weights(q, k, visible), rtol=0, atol=1e-12)


@pytest.mark.parametrize("keep", ["qk", None])
def test_numbers_of_a_generation_are_of_all_its_steps(keep: str | None) -> None:
    q, k, v = qkv(M, M)
    model = Generator()
    with regard.watch(model, keep=keep) as seen:
        for end in range(1, M + 1):
            model(q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end])
    p = weights(q, k, torch.ones(M, M).tril().bool())
    entropy = -torch.xlogy(p, p).sum(-1).mean(-1)
    close(seen.atlas("entropy"), entropy.mean(0)[None])
    assert seen.row_names == seen.names == ["attn"]
    line = seen.summary().splitlines()[-1]
    assert f"{H}  {M} × {M}" in line
    assert f"{M}     {entropy.mean():.2f}" in line
    if keep is None:
        with pytest.raises(LookupError, match=r"q.*k"):
            seen.atlas("first")
        assert "own" not in line
    else:
        close(seen.atlas("first"), p[..., 0].mean(-1).mean(0)[None])


def test_runs_of_their_own_have_lines_and_rows_of_their_own() -> None:
    model = Stack(2)
    with regard.watch(model) as seen:
        model(x(3))
        model(x())
    names = [f"layers.{layer}, call {call}" for call in (0, 1) for layer in (0, 1)]
    assert seen.row_names == names
    calls = [seen[f"layers.{layer}", call] for call in (0, 1) for layer in (0, 1)]
    close(seen.atlas(), torch.stack([view.mean("entropy").mean(0) for view in calls]))
    lines = seen.summary().splitlines()[-4:]
    assert [name in line for name, line in zip(names, lines, strict=True)] == [True] * 4
    assert ["3 × 3" in line for line in lines] == [True, True, False, False]


def test_summary_speaks_korean_of_patterns_and_marks_nan() -> None:
    q = torch.eye(N, D).expand(B, H, N, D) * 90
    model = Function(lambda q: sdpa(q, q, q))
    with regard.watch(model) as seen:
        model(q)
    assert f"{H} own" in seen.summary()
    assert f"{H} 자기 자신" in seen.summary("ko")
    broken = q.clone()
    broken[0, 1, 0] = float("nan")
    with regard.watch(model) as seen:
        model(broken)
    assert f"NaN  {H - 1} own, 1 NaN" in seen.summary()


def test_second_conversation_is_not_taken_for_more_of_the_first() -> None:
    """The sizes would fit; the keys are others."""
    model = Generator()
    with regard.watch(model) as seen:
        model(*qkv(N, N))
        model(*qkv(1, N + 1))
    with pytest.raises(KeyError, match=r"2.*runs"):
        seen["attn"]


# --------------------------------------------------------------------------------------------------- what is kept stays


def test_cache_that_is_written_over_does_not_change_what_was_kept() -> None:
    q, k, v = qkv(1, M)
    cache = torch.zeros(B, H, M, D)
    model = Generator()
    mask = torch.arange(M).view(1, M) < 4
    cache[:, :, :4] = k[:, :, :4]
    with regard.watch(model, keep="qk") as seen:
        model.attn(q, cache, v, mask)
        cache.fill_(7.0)
        mask.fill_(True)
    close(rows(seen[0]), weights(q, k, torch.arange(M) < 4))


def test_step_that_saw_the_room_in_a_cache_keeps_what_was_there() -> None:
    """What comes into the cache later is not what this step saw."""
    q, k, v = qkv(M, M)
    cache = k.clone()
    cache[:, :, 4:] = 0.5

    class Reader(nn.Module):
        def forward(self, at: int, n: int) -> Tensor:
            window = masks.window(2, 3, offset=at)
            return regard.attention(q[:, :, at : at + n], cache, v, mask=window)

    model = Reader()
    with regard.watch(model, keep="qk") as seen:
        model(0, 4)
        before = cache.clone()
        cache[:, :, 4] = k[:, :, 4]
        model(4, 1)
    assert seen.records[1].link.after == 0
    visible = masks.window(2, 3, offset=0).dense(4, M)
    close(rows(seen["", 0]), weights(q[:, :, :4], before, visible))


def test_queries_that_are_written_over_do_not_change_what_was_kept() -> None:
    q, k, v = qkv()
    before = q.clone()
    q.add_(0)  # a buffer that is used again and again
    model = Function(sdpa)
    with regard.watch(model, keep="qk") as seen:
        model(q, k, v)
        q.zero_()
    close(rows(seen[0]), weights(before, k))


def test_outputs_and_weights_that_are_written_over_do_not_change_what_was_kept() -> None:
    layer = nn.MultiheadAttention(H * D, H, batch_first=True).eval()
    data = x()
    with regard.watch(model := Function(sdpa), keep="output") as seen, regard.watch(layer, keep="qk") as by_hand:
        out = model(*qkv())
        _, made = layer(data, data, data, average_attn_weights=False)
        truth, weighed = out.clone(), made.clone()
        out.zero_()
        made.zero_()
    assert torch.equal(seen[0].output, truth)
    assert by_hand.records[0].source == "softmax"
    assert torch.equal(rows(by_hand[0]), weighed)


def test_what_is_kept_does_not_hold_a_larger_tensor() -> None:
    packed = torch.randn(B, H, N, 100 * D)
    model = Function(sdpa)
    with regard.watch(model, keep="qk") as seen:
        model(packed[..., :D], packed[..., D : 2 * D], packed[..., :D])
    call = seen[0].weights.call
    assert call.q.untyped_storage().nbytes() == B * H * N * D * 4
    assert call.k.untyped_storage().nbytes() == B * H * N * D * 4


def test_tensors_are_let_go_without_keep() -> None:
    q, k, v = qkv()
    alive = weakref.ref(k.untyped_storage())
    model = Function(sdpa)
    with regard.watch(model) as seen:
        model(q, k, v)
        del k
        gc.collect()
        assert alive() is None
    assert len(seen) == 1


def test_inference_mode_can_be_looked_at_outside() -> None:
    model = Stack(1)
    with torch.inference_mode(), regard.watch(model, keep="qk") as seen:
        model(x(), torch.rand(B, 1, N, N) > 0.2)
    view = seen[0]
    close(rows(view).sum(-1), torch.ones(B, H, N))
    assert view.map(2).shape == (B, H, 2, 2)


# ---------------------------------------------------------------------------------------- rows hidden by finite numbers


@pytest.mark.parametrize("number", [-1e4, -65504.0, -1e9, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shape", [(1, 1, N, M), (B, 1, N, M), (B, 1, 1, M), (1, H, N, 1)], ids=str)
def test_row_hidden_by_a_finite_number_is_as_the_kernel_made_it(number: float, shape: tuple[int, ...]) -> None:
    q, k, _ = qkv()
    bias = torch.zeros(shape)
    bias[-1, -1, -1] = number
    values = torch.eye(M).expand(B, H, M, M)  # so that the output is the weights
    model = Function(sdpa)
    with regard.watch(model, keep="qk", measures=["entropy", "received", "max_logit", "effective", "top"]) as seen:
        kernel = model(q, k, values, bias)
    # In fp32 a number of this size leaves the scores few digits: what is lost is the kernel's.
    lost = abs(number) * 2**-24 if abs(number) < 1e8 else 0
    ours = rows(seen[0])
    torch.testing.assert_close(ours, kernel, rtol=2 * lost + 1e-5, atol=1e-7)
    view = seen[0]
    torch.testing.assert_close(view.received, ours.sum(2))
    torch.testing.assert_close(view.entropy, -torch.xlogy(ours, ours).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(view.effective, 1 / ours.square().sum(-1))
    torch.testing.assert_close(view.top(1).weight[..., 0], ours.amax(-1))
    hidden = (bias.expand(B, H, N, M) == number).all(-1)
    assert (view.max_logit[hidden] <= number / 2).all()
    assert (view.lse[hidden] <= number / 2).all()
    assert (view.lse[~hidden] > -100).all()


def test_row_hidden_by_finite_numbers_and_infinity_is_even_over_the_finite() -> None:
    q, k, _ = qkv()
    bias = torch.full((N, M), -1e9)
    bias[:, 4:] = -torch.inf
    bias[0] = 0
    values = torch.eye(M).expand(B, H, M, M)
    model = Function(sdpa)
    with regard.watch(model, keep="qk") as seen:
        kernel = model(q, k, values, bias)
    close(rows(seen[0]), kernel)
    close(rows(seen[0])[:, :, 1:, :4], torch.full((B, H, N - 1, 4), 0.25))


def test_row_hidden_twice_as_much_in_one_key_does_not_see_it() -> None:
    q, k, _ = qkv()
    bias = torch.full((N, M), -1e9)
    bias[:, 2] = -2e9
    values = torch.eye(M).expand(B, H, M, M)
    model = Function(sdpa)
    with regard.watch(model, keep="qk") as seen:
        kernel = model(q, k, values, bias)
    close(rows(seen[0]), kernel)
    assert not rows(seen[0])[..., 2].any()


def test_row_hidden_by_a_mask_and_finite_numbers_together() -> None:
    """Our own operation may have both: keys that the mask hides do not count, whatever is added to them."""
    q, k, v = qkv()
    mask, bias = masks.padding([4, 4]), torch.zeros(N, M)
    bias[1, :4] = -1e9
    model = Function(lambda q, k, v: regard.attention(q, k, v, mask=mask, bias=bias))
    with regard.watch(model, keep="qk") as seen:
        model(q, k, v)
    ours = rows(seen[0])
    close(ours[:, :, 1, :4], torch.full((B, H, 4), 0.25))
    close(ours[:, :, 2:], weights(q, k, torch.arange(M) < 4)[:, :, 2:])


def test_scores_too_large_to_be_swallowed_are_not() -> None:
    q, k = torch.zeros(B, H, N, 16), torch.zeros(B, H, M, 16)
    q[..., 0], k[..., 0] = 4.0, 640.0 * torch.arange(M)  # next to −1e9, fp32 knows multiples of 64
    values = torch.eye(M).expand(B, H, M, M)
    model = Function(sdpa)
    with regard.watch(model, keep="qk") as seen:
        kernel = model(q, k, values, torch.full((N, M), -1e9))
    assert (kernel[..., -1] == 1).all()
    close(rows(seen[0]), kernel)


def test_row_hidden_beside_slopes_is_even_too() -> None:
    """ALiBi of a long sequence reaches numbers that might be meant to hide, and are not."""
    q, k, _ = qkv()
    bias = -1500.0 * (torch.arange(N).view(N, 1) - torch.arange(M)).abs().float()
    bias[1] = torch.finfo(torch.float32).min
    values = torch.eye(M).expand(B, H, M, M)
    model = Function(sdpa)
    with regard.watch(model, keep="qk") as seen:
        kernel = model(q, k, values, bias)
    close(rows(seen[0]), kernel)
    close(rows(seen[0])[:, :, 1], torch.full((B, H, M), 1 / M))


def test_sink_takes_all_of_a_row_hidden_by_finite_numbers() -> None:
    q, k, v = qkv()
    bias = torch.zeros(N, M)
    bias[2] = -1e9
    model = Function(lambda q, k, v: regard.attention(q, k, v, bias=bias, sinks=torch.zeros(H)))
    with regard.watch(model, keep="qk") as seen:
        model(q, k, v)
    assert not rows(seen[0])[:, :, 2].any()
    assert rows(seen[0])[:, :, 3].any()


# ------------------------------------------------------------------------------------------------- nothing else changes


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_step_of_training_is_the_same_bits(dropout: float, dtype: torch.dtype) -> None:
    model = Stack(dropout=dropout).to(dtype).train()
    data = x(dtype=dtype)

    def step(guard: Any) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        torch.manual_seed(5)
        with guard:
            out = model(data)
            out.square().mean().backward()
        return out, [p.grad for p in model.parameters()]

    out, gradients = step(nullcontext())
    watch = regard.watch(model, keep="qk")
    watched, others = step(watch)
    assert torch.equal(out, watched)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert len(watch.capture.records) == 3
    assert not any(t.requires_grad for t in watch.capture[0].held.values())
    close(rows(watch.capture[0]).sum(-1), torch.ones(B, H, N))  # weights are those before dropout


def test_autocast_is_kept_and_measured_in_full() -> None:
    model, data = Stack(1), x()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        unwatched = model(data)
        with regard.watch(model, keep="qk") as seen:
            watched = model(data)
    assert torch.equal(unwatched, watched)
    assert seen[0].weights.call.q.dtype == torch.bfloat16
    assert seen[0].entropy.dtype == torch.float32
    close(rows(seen[0]).sum(-1), torch.ones(B, H, N))


def snapshot(model: nn.Module) -> list[Any]:
    """All that can be hung on a module."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_parameters", "_buffers", "_modules")
    return [
        (id(m), type(m), sorted(map(str, vars(m))), *(list(getattr(m, name)) for name in tables))
        for m in model.modules()
    ]


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_was_seen_before_an_exception_is_there_and_the_model_is_as_it_was(problem: type[BaseException]) -> None:
    model = nn.Sequential(Attend(), Function(lambda x: fail(x)), Attend())

    def fail(data: Tensor) -> Tensor:
        raise problem("inside")

    before, process = snapshot(model), state()
    watch = regard.watch(model)
    with pytest.raises(problem, match="inside"), watch:
        model(x())
    assert (snapshot(model), state()) == (before, process)
    assert watch.capture.names == ["0"]
    assert list(watch.capture.unseen) == []
    model[1].function = nn.Identity()
    with regard.watch(model) as seen:
        model(x())
    assert seen.names == ["0", "2"]


def test_error_in_measuring_is_named_and_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.lens.measures import engines

    def broken(*_: Any) -> Any:
        raise RuntimeError("no room")

    model, data = Stack(2), x()
    unwatched = model(data)
    monkeypatch.setattr(engines, "measure", broken)
    with regard.watch(model) as seen:
        watched = model(data)
    assert torch.equal(unwatched, watched)
    why = "measuring it failed: RuntimeError: no room"
    assert (seen.names, seen.unseen) == ([], {"layers.0": why, "layers.1": why})
    with pytest.raises(LookupError, match=r"layers\.0.*RuntimeError"):
        seen[0]


def test_watch_is_entered_once() -> None:
    model = Stack(1)
    watch = regard.watch(model)
    with watch:
        pass
    with pytest.raises(RuntimeError, match=r"regard\.watch\(…\)"), watch:
        pass


def test_watches_inside_each_other_see_each_their_own() -> None:
    model, other = Stack(2), Stack(1)
    with regard.watch(model) as outer:
        model(x())
        with regard.watch(model) as inner, regard.watch(other) as beside:
            model(x())
            other(x())
        model(x())
    assert [len(c.records) for c in (outer, inner, beside)] == [6, 2, 1]
    assert beside.names == ["layers.0"]


def test_model_and_its_part_are_watched_together() -> None:
    model = Stack(2)
    with regard.watch(model) as whole, regard.watch(model.layers[1]) as part:
        model(x())
    assert (whole.names, part.names) == (["layers.0", "layers.1"], [""])


def test_threads_do_not_mix() -> None:
    """Two threads run one watched model, a third another model."""
    model, other = Generator(), Generator()
    q, k, v = qkv(M, M)
    started = threading.Barrier(3)

    def run(model: nn.Module, shift: float) -> None:
        started.wait()
        for end in range(N, M + 1):
            start = 0 if end == N else end - 1
            model(q[:, :, start:end], k[:, :, :end] + shift, v[:, :, :end])

    with regard.watch(model, keep="qk") as seen:
        threads = [threading.Thread(target=run, args=args) for args in ((model, 0.0), (model, 1.0), (other, 2.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(r.n for r in seen.records) == list(range(6))
    from regard.lens.assembly import runs_of

    groups = runs_of([r.link for r in seen.calls("attn")])
    assert [[seen["attn", n].sizes[2:] for n in group] for group in groups] == [[(N, N), (1, 6), (1, 7)]] * 2


# ------------------------------------------------------------------------------------------------------------- compiled


def with_compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


WAYS = {
    "torch.compile(model)": lambda model: torch.compile(model, backend="aot_eager"),
    "fullgraph": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "model.compile()": lambda model: model.compile(backend="aot_eager") or model,
    "torch.compile(model.forward)": with_compiled_forward,
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_compiled_code_are_numbered(way: str, tmp_path: Path) -> None:
    plain, data = Stack(3), x()
    with torch.no_grad(), regard.watch(plain, keep="qk") as truth:
        plain(data)
    model = WAYS[way](plain)
    with torch.no_grad():
        unwatched = model(data)
        with regard.watch(model, keep="qk") as seen:
            watched = model(data)
    assert torch.equal(unwatched, watched)
    assert seen.names == ["compiled_call.0", "compiled_call.1", "compiled_call.2"]
    assert all(r.compiled for r in seen.records)
    assert (seen.model, seen.unseen) == ("Stack", {})
    seen.save(tmp_path / "run.regard")
    for capture in (seen, regard.open(tmp_path / "run.regard")):
        for n in range(3):
            close(rows(capture[n]), rows(truth[n]))
            close(rows(capture[f"compiled_call.{n}"]), rows(truth[n]))
        assert repr(capture) == "Capture(Stack: compiled_call.0–2; 3 calls)"
        assert capture.doctor().ok
        assert capture.atlas().shape == (3, H)
        assert "compiled_call.2" in capture.summary()
        assert capture.show() is not None
        assert capture.show(1, head=0).texts[0].get_text() == "Stack, layer 1, head 0"
    with pytest.raises(KeyError, match=r"layers\.0.*compiled_call\.0.*torch\.compile"):
        seen["layers.0"]


def test_runs_of_compiled_code_are_told_apart_also_where_it_is_compiled_anew() -> None:
    model = torch.compile(Stack(2), backend="eager")
    once, twice = x(), x()
    with regard.watch(model) as seen:
        with torch.no_grad():
            model(once)
        model(once)  # with gradients it is other code
        model(twice)
        model._orig_mod.layers[0](once)
    assert [(r.path, r.n) for r in seen.records if r.compiled] == [
        (f"compiled_call.{call}", run) for run in range(3) for call in range(2)
    ]
    assert [(r.path, r.n) for r in seen.records if not r.compiled] == [("layers.0", 0)]


def test_loop_over_a_compiled_forward_begins_to_count_in_each_turn() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(2)
            self.step = torch.compile(self.stack.forward, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.step(self.step(x))

    model = Loop()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x())
    assert [(r.path, r.n) for r in seen.records] == [
        (f"compiled_call.{call}", turn) for turn in range(2) for call in range(2)
    ]


@pytest.mark.parametrize(("layers", "names"), [(1, [1]), ("compiled_call.0", [0]), ("*.[12]", [1, 2])])
def test_layers_choose_calls_of_compiled_code(layers: Any, names: list[int]) -> None:
    model = torch.compile(Stack(3), backend="eager")
    with torch.no_grad(), regard.watch(model, layers=layers) as seen:
        model(x())
    assert (seen.names, seen.unseen) == ([f"compiled_call.{n}" for n in names], {})


def test_compiled_layers_keep_their_paths() -> None:
    model, data = Stack(2), x()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    with torch.no_grad():
        unwatched = model(data)
        with regard.watch(model) as seen:
            watched = model(data)
    assert torch.equal(unwatched, watched)
    assert [(r.path, r.compiled) for r in seen.records] == [("layers.0", True), ("layers.1", True)]


class FlexAttention(nn.Module):
    """Attention that torch.compile turns into a kernel of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)


def test_kernel_that_a_compiler_made_is_named() -> None:
    """Inductor takes seconds to make one; for us any code that calls nothing by name is the same."""

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *args: (args[0].tanh(),)

    q, k, v = (torch.randn(B, H, N, 16) for _ in range(3))
    model, inner = Function(lambda *qkv: model.attend(*qkv)), Function(lambda *qkv: inner.attend(*qkv))
    model.attend, inner.attend = FlexAttention(), FlexAttention()
    inner.attend.compile(backend=compiler)
    for whole in (torch.compile(model, backend=compiler), inner):
        with torch.no_grad(), regard.watch(whole) as seen:
            whole(q, k, v)
        why = "it is inside compiled code, of which only torch's fused kernels are seen; watch the model uncompiled"
        assert (seen.names, seen.unseen) == ([], {"attend": why})


# --------------------------------------------------------------------------------------------------------------- unseen


class LinearAttention(nn.Module):
    """No softmax anywhere."""

    def forward(self, data: Tensor) -> Tensor:
        return data @ (data.mT @ data)


NO_REASON = (
    "it did not run in the block (a copy of it, as DataParallel makes, does not count), or it makes its weights in a "
    "way that is not known here"
)


def test_attention_without_softmax_is_named() -> None:
    model = nn.Sequential(Attend(), LinearAttention())
    with regard.watch(model) as seen:
        model(x())
    assert (seen.names, seen.unseen) == (["0"], {"1": NO_REASON})
    assert f"not seen: 1: {NO_REASON}" in seen.summary()


def test_copy_of_a_module_is_not_the_module() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(H * D, H, batch_first=True)})
    data = x()
    with regard.watch(model) as seen:
        copy.copy(model["attention"])(data, data, data)
    assert (seen.names, seen.unseen) == ([], {"attention": NO_REASON})


def test_modules_not_asked_for_are_not_missed() -> None:
    model = nn.ModuleDict({"one": nn.MultiheadAttention(H * D, H), "two": LinearAttention()})
    data = x()
    with regard.watch(model, layers="one") as seen:
        model["one"](data, data, data)
    assert (seen.names, seen.unseen) == (["one"], {})


def test_class_named_after_attention_is_not_missed_where_a_part_was_seen() -> None:
    class AttentionModel(Stack):
        pass

    model = AttentionModel(1)
    with regard.watch(model) as seen:
        model(x())
    assert seen.unseen == {}


def test_call_that_cannot_be_read_is_named() -> None:
    model = nn.Sequential(Attend(), Function(lambda x: x))
    watch = WatchContext(model, regard.watch(model).options)
    with watch as seen:
        watch._record(ObservedCall(path="1", source="flash_attn", kernel="flash_attn_varlen_func", trouble="packed"))
        model(x())
    assert (seen.names, seen.unseen) == (["0"], {"1": "packed"})
    with pytest.raises(KeyError, match="'1'"):
        seen["1"]


def test_router_is_not_called_unseen_attention_beside_attention() -> None:
    class Router(nn.Module):
        def forward(self, data: Tensor) -> Tensor:
            return data * data[..., :4].softmax(-1).sum(-1, keepdim=True)

    model = nn.Sequential(Attend(), Router())
    with regard.watch(model) as seen:
        model(x())
    assert (seen.names, seen.unseen) == (["0"], {})


def test_softmax_is_named_where_nothing_else_was_seen() -> None:
    model = nn.Sequential(nn.Linear(H * D, 4), nn.Softmax(-1))
    with regard.watch(model) as seen:
        model(x())
    assert list(seen.unseen) == [""]
    assert str((B, N, 4)) in seen.unseen[""]


def test_model_that_did_not_run_says_so() -> None:
    with regard.watch(Stack()) as seen:
        pass
    with pytest.raises(LookupError, match="Stack"):
        seen.summary()
    with pytest.raises(LookupError, match="weights"):
        seen.atlas()


def test_watch_that_was_never_entered_cannot_be_left() -> None:
    with pytest.raises(RuntimeError, match="entered"):
        regard.watch(Stack()).__exit__(None, None, None)


def test_products_without_a_softmax_are_named_where_nothing_else_was_seen() -> None:
    def powers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT).exp()
        return p / p.sum(-1, keepdim=True) @ v

    with regard.watch(model := Function(powers)) as seen:
        model(*qkv())
    met = f"a product of shape {(B * H, N, M)} that met another without a softmax that is known here"
    assert seen.unseen == {"": met}
    with regard.watch(model := Function(lambda *qkv: sdpa(*qkv) + powers(*qkv))) as seen:
        model(*qkv())
    assert (len(seen), seen.unseen) == (1, {})


def test_attention_on_one_sequence_without_axes_for_batch_and_heads_is_seen() -> None:
    with regard.watch(model := Function(lambda q, k, v: (q @ k.T).softmax(-1) @ v)) as seen:
        model(*(t[0, 0] for t in qkv()))
    assert (seen[0].sizes, seen.unseen) == ((1, 1, N, M), {})


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"layers": []}, ValueError, "layers"),
        ({"layers": 1.5}, TypeError, r"layers.*float"),
        ({"layers": [True]}, TypeError, r"layers.*'\*.3.\*'.*0.*True"),
        ({"layers": -1}, TypeError, r"0.*-1"),
        ({"measures": 3}, TypeError, r"measures.*entropy.*int"),
        ({"measures": ["entropie"]}, ValueError, r"'entropie'.*entropy"),
        ({"keep": 3}, TypeError, r"keep.*'qk'.*'output'.*int"),
        ({"keep": ["qk", "kv"]}, ValueError, r"keep.*'qk'.*'output'.*'kv'"),
        ({"keep": [["qk"]]}, ValueError, r"\['qk'\]"),
        ({"size": 0}, ValueError, r"size.*1.*0"),
        ({"top": 2.0}, TypeError, r"top.*1.*float.*2.0"),
        ({"tokens": "The cat"}, TypeError, r"list.*'The cat'"),
        ({"tokens": []}, TypeError, r"list.*\[\]"),
        ({"tokens": 7}, TypeError, r"list.*7"),
        ({"tokens": [["a"], "b"]}, TypeError, r"list.*'b'"),
        ({"tokens": ["a", 1.5]}, TypeError, r"list.*1.5"),
        ({"device": 0}, TypeError, r"device.*'cpu'.*torch.device.*int"),
        ({"device": "nowhere"}, ValueError, r"device.*'nowhere'"),
    ],
    ids=str,
)
def test_wrong_argument_is_refused_before_anything_runs(given: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        regard.watch(Stack(), **given)


def test_only_modules_are_watched() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module.*str"):
        regard.watch("gpt2")
