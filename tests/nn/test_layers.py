"""Multi-head attention against itself written by hand, against torch's, in one pass and step by step with a cache."""

import re
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.nn import attention
from regard.nn.attention import FixedCache, GrowingCache, MultiHeadAttention
from regard.nn.projections import Joined
from regard.nn.sparse_attention import SlidingAttention
from regard.positions import T5, Rotary, Shaw, Swin, alibi
from regard.testing import assert_rule as assert_detached

B, N, M = 2, 7, 5
D_MODEL, HEADS, D = 30, 3, 10
D_CONTEXT = 11


def wide(layer):
    """The same layer in fp64."""
    return deepcopy(layer).double()


def assert_rule(ours, baseline, truth, **options):
    """The numeric rule on results that still have their graph."""
    assert_detached(ours.detach(), baseline.detach(), truth.detach(), **options)


def by_hand(layer, x, context=None, visible=None):
    """The layer head by head, from the formula; `visible` (N, M). No Rotary, no softcap."""
    source = x if context is None else context
    if layer.fused:
        rows = [layer.num_heads * layer.head_dim, *[layer.num_kv_heads * layer.head_dim] * 2]
        w = layer.w_qkv.weight.split(rows)
        b = (0, 0, 0) if layer.w_qkv.bias is None else layer.w_qkv.bias.split(rows)
    else:
        parts = (layer.w_q, layer.w_k, layer.w_v)
        w, b = [p.weight for p in parts], [0 if p.bias is None else p.bias for p in parts]
    q, k, v = x @ w[0].T + b[0], source @ w[1].T + b[1], source @ w[2].T + b[2]
    heads = []
    for h in range(layer.num_heads):
        mine = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        group = h // (layer.num_heads // layer.num_kv_heads)
        theirs = slice(group * layer.head_dim, (group + 1) * layer.head_dim)
        query, key = q[..., mine], k[..., theirs]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = layer.q_norm(query), layer.k_norm(key)
        scores = query @ key.mT * layer.scale  # (B, N, M)
        if layer.position is not None:
            term = layer.position.bias(layer.project(x)[0], layer.scale)
            scores = scores + term.dense(*scores.shape[-2:], dtype=x.dtype)[:, h]
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        heads.append(scores.softmax(-1) @ v[..., theirs])
    out = torch.cat(heads, -1) @ layer.w_o.weight.T
    return out if layer.w_o.bias is None else out + layer.w_o.bias


# ---------------------------------------------------------------------------------------------------------- the formula

LAYERS = {
    "separate": {},
    "fused": {"fused": True},
    "no bias": {"bias": False},
    "no bias, fused": {"bias": False, "fused": True},
    "no bias but in W_O": {"bias": False, "out_bias": True},
    "bias but not in W_O": {"out_bias": False},
    "one key head": {"num_kv_heads": 1},
    "one key head, fused": {"num_kv_heads": 1, "fused": True},
    "heads of another size": {"head_dim": 7},
    "heads of another size, fused": {"head_dim": 7, "fused": True},
    "another scale": {"scale": 0.7},
    "normed heads": {"head_norms": (nn.LayerNorm(D), nn.RMSNorm(D))},
    "normed heads, fused": {"head_norms": (nn.LayerNorm(D), nn.RMSNorm(D)), "fused": True},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_is_the_formula(options):
    layer = MultiHeadAttention(D_MODEL, HEADS, **options)
    x = torch.randn(B, N, D_MODEL)
    assert_rule(layer(x), by_hand(layer, x), by_hand(wide(layer), x.double()))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_looks_at_a_context(options):
    layer = MultiHeadAttention(D_MODEL, HEADS, **options)
    x, context = torch.randn(B, N, D_MODEL), torch.randn(B, M, D_MODEL)
    truth = by_hand(wide(layer), x.double(), context.double())
    assert_rule(layer(x, context), by_hand(layer, x, context), truth)


def test_context_may_have_another_width():
    layer = MultiHeadAttention(D_MODEL, HEADS, d_context=D_CONTEXT)
    x, context = torch.randn(B, N, D_MODEL), torch.randn(B, M, D_CONTEXT)
    truth = by_hand(wide(layer), x.double(), context.double())
    assert_rule(layer(x, context), by_hand(layer, x, context), truth)


def test_softcap_and_scale_reach_the_operation():
    layer = MultiHeadAttention(D_MODEL, HEADS, softcap=0.5, scale=2.0)
    x = torch.randn(B, N, D_MODEL)
    out = regard.attention(*layer.project(x), softcap=0.5, scale=2.0)
    assert torch.equal(layer(x), layer.w_o(out.transpose(1, 2).flatten(2)))
    assert not torch.equal(layer(x), MultiHeadAttention(D_MODEL, HEADS, softcap=0.5)(x))


@pytest.mark.parametrize("fused", [False, True])
def test_512_in_8_heads_has_1_050_624_parameters(fused):
    assert sum(p.numel() for p in MultiHeadAttention(512, 8, fused=fused).parameters()) == 1_050_624


def test_grouped_heads_have_fewer_parameters():
    layer = MultiHeadAttention(512, 8, num_kv_heads=2, bias=False)
    assert sum(p.numel() for p in layer.parameters()) == 2 * 512 * 512 + 2 * 512 * 128


def test_fused_projection_is_the_one_of_the_documents():
    layer = MultiHeadAttention(768, 12, fused=True)
    assert (layer.w_qkv.in_features, layer.w_qkv.out_features) == (768, 2304)
    x = torch.randn(B, N, 768)
    theirs = layer.w_qkv(x).reshape(B, N, 3, 12, 64).permute(2, 0, 3, 1, 4)
    for ours, expected in zip(layer.project(x), theirs, strict=True):
        assert ours.shape == (B, 12, N, 64)
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_is_separate_with_the_same_weights(kv_heads, bias):
    separate = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=kv_heads, bias=bias)
    fused = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=kv_heads, bias=bias, fused=True)
    state = separate.state_dict()
    for name in ("weight", "bias")[: 1 + bias]:
        state[f"w_qkv.{name}"] = torch.cat([state.pop(f"w_{part}.{name}") for part in "qkv"])
    fused.load_state_dict(state)
    x, context = torch.randn(B, N, D_MODEL), torch.randn(B, M, D_MODEL)
    for given in ((x,), (x, context)):
        truth = wide(separate)(*(t.double() for t in given))
        assert_rule(fused(*given), separate(*given), truth)


def test_grouped_heads_are_repeated_heads():
    grouped = MultiHeadAttention(D_MODEL, 6, num_kv_heads=2)
    whole = MultiHeadAttention(D_MODEL, 6)
    state = grouped.state_dict()
    for name in ("w_k.weight", "w_k.bias", "w_v.weight", "w_v.bias"):
        state[name] = torch.cat(
            [head for head in state[name].split(5) for _ in range(3)]
        )  # query heads 0–2 read head 0
    whole.load_state_dict(state)
    x = torch.randn(B, N, D_MODEL)
    assert_rule(grouped(x), whole(x), wide(whole)(x.double()))


# ---------------------------------------------------------------------------------------------------- torch's own layer


MODULES = {  # options, and whether there is a context
    "self": ({}, False),
    "self, no bias": ({"bias": False}, False),
    "self, dropout": ({"dropout": 0.3}, False),
    "cross": ({}, True),
    "cross, no bias": ({"bias": False}, True),
    "cross, another width": ({"kdim": D_CONTEXT, "vdim": D_CONTEXT}, True),
    "cross, another width, no bias": ({"kdim": D_CONTEXT, "vdim": D_CONTEXT, "bias": False}, True),
}
HIDDEN = {"nothing": (), "ahead": ("ahead",), "padding": ("padding",), "ahead and padding": ("ahead", "padding")}


def hidden(kinds, nq, nk):
    """What torch is told, True = ignore, and what regard is told, True = may look."""
    ahead = torch.ones(nq, nk, dtype=torch.bool).triu(1) if "ahead" in kinds else None
    lengths = torch.tensor([nk, 3])
    padded = torch.arange(nk) >= lengths[:, None] if "padding" in kinds else None  # (B, Nk)
    mask = {
        (): None,
        ("ahead",): masks.causal(offset=0),
        ("padding",): masks.padding(lengths),
        ("ahead", "padding"): masks.causal(offset=0) & masks.padding(lengths),
    }[kinds]
    return ahead, padded, mask


def torchs(module, x, context, ahead, padded, backwards=False):
    """torch's result; `backwards` with the keys in reverse: the same numbers but for the order of summation."""
    flip = (lambda t, axis: None if t is None else t.flip(axis)) if backwards else (lambda t, axis: t)
    keys = flip(context, 1)
    return module(x, keys, keys, attn_mask=flip(ahead, 1), key_padding_mask=flip(padded, 1), need_weights=False)[0]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kinds", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize(("options", "cross"), MODULES.values(), ids=MODULES)
def test_layer_from_torch_gives_what_torch_gives(options, cross, kinds, dtype):
    module = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True, **options).to(dtype).eval()
    nn.init.normal_(module.out_proj.weight)
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)  # torch starts them at 0, where a forgotten bias would not show
    x = torch.randn(B, N, D_MODEL).to(dtype)
    context = torch.randn(B, M, options.get("kdim", D_MODEL)).to(dtype) if cross else x
    ahead, padded, mask = hidden(kinds, N, context.shape[1])
    ours = MultiHeadAttention.from_torch(module)(x, context if cross else None, mask=mask)
    truth = torchs(deepcopy(module).double(), x.double(), context.double(), ahead, padded)
    assert_rule(ours, torchs(module, x, context, ahead, padded, backwards=True), truth)


def test_layer_from_torch_takes_unbatched_input_as_torch_does():
    module = nn.MultiheadAttention(D_MODEL, HEADS).eval()  # sequence first, which without a batch is the same
    layer = MultiHeadAttention.from_torch(module)
    x, context = torch.randn(N, D_MODEL), torch.randn(M, D_MODEL)
    ahead, _, mask = hidden(("ahead",), N, M)
    truth = deepcopy(module).double()(x.double(), context.double(), context.double(), attn_mask=ahead)[0]
    assert_rule(layer(x, context, mask=mask), module(x, context, context, attn_mask=ahead)[0], truth)


def test_layer_from_torch_copies():
    module = nn.MultiheadAttention(D_MODEL, HEADS, dropout=0.25).double()
    layer = MultiHeadAttention.from_torch(module, backend="tiled")
    assert (layer.training, layer.dropout, layer.backend, layer.fused) == (True, 0.25, "tiled", True)
    assert layer.w_qkv.weight.dtype == torch.float64
    before = module.in_proj_weight.detach().clone()
    with torch.no_grad():
        layer.w_qkv.weight.zero_()
    assert torch.equal(module.in_proj_weight, before)
    assert not MultiHeadAttention.from_torch(module.eval()).training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, r"add_bias_kv.*add_zero_attn"),
        ({"add_zero_attn": True}, r"add_bias_kv.*add_zero_attn"),
        ({"kdim": 11, "vdim": 13}, r"kdim.*11.*vdim.*13"),
    ],
)
def test_layer_from_torch_refuses_what_it_does_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(D_MODEL, HEADS, **options))


def test_heads_are_normed_before_they_are_turned():
    turning, here = Rotary(D), torch.arange(N)
    layer = MultiHeadAttention(D_MODEL, HEADS, position=turning, head_norms=(nn.LayerNorm(D), nn.LayerNorm(D)))
    x = torch.randn(B, N, D_MODEL)
    q, k, v = layer.project(x)
    assert torch.allclose(q.mean(-1), torch.zeros(B, HEADS, N), atol=1e-6)
    out = regard.attention(turning.turn(q, here), turning.turn(k, here), v)
    assert torch.equal(layer(x), layer.w_o(out.transpose(1, 2).flatten(2)))


# ------------------------------------------------------------------------------------------------- positions and caches

POSITIONS = {
    "none": lambda: None,
    "rotary, half": lambda: Rotary(D),
    "rotary, interleaved": lambda: Rotary(D, layout="interleaved", base=100.0),
    "rotary, part": lambda: Rotary(D, rotated=4),
    "ALiBi": lambda: alibi(HEADS),
    "T5": lambda: T5(HEADS, buckets=8, max_distance=5),
    "T5, one direction": lambda: T5(HEADS, buckets=8, max_distance=9, bidirectional=False),
    "Shaw": lambda: Shaw(D, 3),
    "Shaw per head": lambda: Shaw(D, 3, num_heads=HEADS),
}
CHUNKS = {"step by step": [1] * 11, "in chunks": [4, 1, 3, 3], "a prompt, then steps": [7, 1, 1, 1, 1]}


def loud(position):
    """The position with a table of random numbers of size 1: the usual start of 0.02 would hide a mistake."""
    if isinstance(position, nn.Module):
        nn.init.normal_(position.table)
    return position


def cache_of(kind, layer, batch=B):
    if kind == "growing":
        return GrowingCache()
    return FixedCache(batch, layer.num_kv_heads, 13, layer.head_dim, dtype=layer.w_o.weight.dtype)


@torch.no_grad()
def continued(layer, x, chunks, cache, mask, positions=None):
    """x given to the layer chunk by chunk."""
    ends = [sum(chunks[:n]) for n in range(len(chunks) + 1)]
    parts = [slice(start, end) for start, end in pairwise(ends)]
    given = [None if positions is None else positions[..., part] for part in parts]
    return torch.cat(
        [layer(x[:, part], mask=mask, cache=cache, positions=p) for part, p in zip(parts, given, strict=True)], 1
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["growing", "fixed"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_decoding_with_a_cache_is_one_pass(position, chunks, kind):
    layer = MultiHeadAttention(D_MODEL, HEADS, position=loud(position()))
    x, mask, cache = torch.randn(B, 11, D_MODEL), masks.causal(), cache_of(kind, layer)
    ours = continued(layer, x, chunks, cache, mask)
    with torch.no_grad():
        assert_rule(ours, layer(x, mask=mask), wide(layer)(x.double(), mask=mask))
    assert len(cache) == 11


@pytest.mark.parametrize("kind", ["growing", "fixed"])
@pytest.mark.parametrize(
    "mask", [masks.window(2, 0), masks.causal() & masks.window(3, 1), masks.causal() | masks.prefix(1)]
)
def test_decoding_grouped_and_fused_is_one_pass_under_any_causal_mask(kind, mask):
    layer = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=1, fused=True, position=Rotary(D))
    x = torch.randn(B, 11, D_MODEL)
    ours = continued(layer, x, [4, 1, 3, 3], cache_of(kind, layer), mask)
    with torch.no_grad():
        assert_rule(ours, layer(x, mask=mask), wide(layer)(x.double(), mask=mask))


def test_cache_holds_the_keys_and_values_of_the_layer():
    layer = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=1, position=Rotary(D))
    x, cache = torch.randn(B, N, D_MODEL), GrowingCache()
    layer(x[:, :4], cache=cache)
    layer(x[:, 4:], cache=cache)
    nothing = torch.zeros(B, 1, 0, D)
    k, v = cache.append(nothing, nothing)
    parts = [layer.project(part) for part in (x[:, :4], x[:, 4:])]
    turned = [Rotary(D).turn(p[1], torch.arange(s, e)) for p, (s, e) in zip(parts, ((0, 4), (4, 7)), strict=True)]
    assert torch.equal(k, torch.cat(turned, 2))
    assert torch.equal(v, torch.cat([p[2] for p in parts], 2))


def test_gradient_flows_through_a_growing_cache():
    layer = MultiHeadAttention(D_MODEL, HEADS)
    x, cache = torch.randn(B, N, D_MODEL).requires_grad_(), GrowingCache()
    layer(x[:, :6], mask=masks.causal(), cache=cache)
    last = layer(x[:, 6:], mask=masks.causal(), cache=cache)
    (grad,) = torch.autograd.grad(last.sum(), x)
    x64 = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(wide(layer)(x64, mask=masks.causal())[:, 6:].sum(), x64)
    (baseline,) = torch.autograd.grad(layer(x, mask=masks.causal())[:, 6:].sum(), x)
    assert_rule(grad, baseline, truth, gradient=True)


def test_fixed_cache_in_training_is_refused():
    layer = MultiHeadAttention(D_MODEL, HEADS)
    with pytest.raises(ValueError, match="FixedCache"):
        layer(torch.randn(B, N, D_MODEL), cache=cache_of("fixed", layer))


def test_call_that_is_refused_leaves_the_cache_as_it_was():
    layer, cache = MultiHeadAttention(D_MODEL, HEADS), GrowingCache()
    layer(torch.randn(B, N, D_MODEL), cache=cache)
    with pytest.raises(ValueError, match="broadcast"):
        layer(torch.randn(B, 1, D_MODEL), cache=cache, mask=torch.ones(1, 4, dtype=torch.bool))
    assert len(cache) == N


@pytest.mark.parametrize("position", [p for name, p in POSITIONS.items() if "rotary" not in name])
def test_position_in_the_scores_is_the_formula(position):
    layer = MultiHeadAttention(D_MODEL, HEADS, position=loud(position()))
    x, visible = torch.randn(B, N, D_MODEL), masks.causal().dense(N)
    truth = by_hand(wide(layer), x.double(), visible=visible)
    assert_rule(layer(x, mask=masks.causal()), by_hand(layer, x, visible=visible), truth)


def test_swin_is_the_formula_and_has_nothing_to_continue():
    layer = MultiHeadAttention(D_MODEL, HEADS, position=loud(Swin((2, 3), HEADS)))
    x = torch.randn(B, 6, D_MODEL)
    truth = by_hand(wide(layer), x.double())
    assert_rule(layer(x), by_hand(layer, x), truth)
    assert_rule(layer(x, cache=GrowingCache()), by_hand(layer, x), truth)  # a whole window at once
    with pytest.raises(ValueError, match=r"6.*1"):
        layer(x[:, :1], cache=GrowingCache())


# ----------------------------------------------------------------------------------------------------- rotary positions


def test_rotary_positions_are_counted_from_zero_unless_given():
    layer = MultiHeadAttention(D_MODEL, HEADS, position=Rotary(D))
    x, context = torch.randn(B, N, D_MODEL), torch.randn(B, M, D_MODEL)
    n, m = torch.arange(N), torch.arange(M)
    assert torch.equal(layer(x, positions=n), layer(x))
    assert torch.equal(layer(x, positions=n.expand(B, N)), layer(x))
    assert torch.equal(layer(x, context, positions=n, context_positions=m), layer(x, context))
    assert torch.equal(layer(x, context, context_positions=m), layer(x, context))
    assert torch.equal(layer(x, context, positions=n), layer(x, context))


def test_only_distances_between_rotary_positions_count():
    layer = MultiHeadAttention(D_MODEL, HEADS, position=Rotary(D)).double()
    x, context = torch.randn(B, N, D_MODEL).double(), torch.randn(B, M, D_MODEL).double()
    n, m = torch.arange(N), torch.arange(M)
    here, there = layer(x, context), layer(x, context, positions=n + 3, context_positions=m + 3)
    back = layer(x.flip(1), context.flip(1), positions=n.flip(0), context_positions=m.flip(0)).flip(1)
    assert_rule(there, back, here)
    assert (layer(x, context, context_positions=m + 3) - here).abs().max() > 1e-3


@pytest.mark.parametrize("cached", [False, True])
def test_each_batch_row_may_have_positions_of_its_own(cached):
    # Two texts of 5 and 7 tokens, padded on the left to 7: each must give what it gives alone.
    layer = MultiHeadAttention(D_MODEL, HEADS, position=Rotary(D))
    x, lengths = torch.randn(B, N, D_MODEL), [5, 7]
    positions = (torch.arange(N) - torch.tensor([[2], [0]])).clamp(min=0)
    with torch.no_grad():
        if cached:
            prompt, rest, cache = slice(0, 6), slice(6, 7), GrowingCache()
            parts = [(prompt, masks.padding([4, 6], side="left")), (rest, masks.padding([5, 7], side="left"))]
            got = [
                layer(x[:, p], mask=masks.causal() & real, cache=cache, positions=positions[:, p]) for p, real in parts
            ]
            ours = torch.cat(got, 1)
        else:
            ours = layer(x, mask=masks.causal() & masks.padding(lengths, side="left"), positions=positions)
        for row, length in enumerate(lengths):
            alone = x[row : row + 1, N - length :]
            truth = wide(layer)(alone.double(), mask=masks.causal())
            assert_rule(ours[row : row + 1, N - length :], layer(alone, mask=masks.causal()), truth)


def test_layers_may_share_one_set_of_angles():
    layer = MultiHeadAttention(D_MODEL, HEADS, position=Rotary(D))
    x = torch.randn(B, N, D_MODEL)
    for positions in (torch.arange(N) + 3, torch.tensor([[*range(N)], [*range(5, 5 + N)]])):
        assert torch.equal(layer(x, positions=Rotary(D).angles(positions)), layer(x, positions=positions))


def test_angles_are_refused_where_there_is_no_rotary():
    with pytest.raises(ValueError, match=r"positions.*Rotary"):
        MultiHeadAttention(D_MODEL, HEADS)(torch.randn(B, N, D_MODEL), positions=Rotary(D).angles(torch.arange(N)))


# --------------------------------------------------------------------------------------- keys of a context, made once

CROSSING = {
    "separate": {"d_context": D_CONTEXT},
    "grouped, no bias": {"d_context": D_CONTEXT, "num_kv_heads": 1, "bias": False},
    "fused": {"fused": True},
    "fused, grouped, no bias": {"fused": True, "num_kv_heads": 1, "bias": False},
    "rotary": {"d_context": D_CONTEXT, "position": Rotary(D)},
}


@pytest.mark.parametrize("options", CROSSING.values(), ids=CROSSING)
def test_keys_made_once_are_the_context_itself(options):
    layer = MultiHeadAttention(D_MODEL, HEADS, **options)
    x, context = torch.randn(B, N, D_MODEL), torch.randn(B, M, layer.d_context)
    mask = masks.padding(torch.tensor([3, M]))
    made = layer.keys(context)
    assert made.k.shape == made.v.shape == (B, layer.num_kv_heads, M, D)
    assert torch.equal(layer(x, made, mask=mask), layer(x, context, mask=mask))
    steps = [layer(x[:, n : n + 1], made, mask=mask, **_from(layer, n)) for n in range(N)]
    with torch.no_grad():
        assert_rule(
            torch.cat(steps, 1), layer(x, context, mask=mask), wide(layer)(x.double(), context.double(), mask=mask)
        )


def _from(layer, n):
    return {"positions": torch.tensor([n])} if isinstance(layer.position, Rotary) else {}


def test_keys_of_a_context_are_its_projections_turned_to_its_positions():
    layer = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=1, position=Rotary(D))
    context, there = torch.randn(B, M, D_MODEL), torch.tensor([2, 3, 5, 7, 11])
    _, k, v = layer.project(context)
    made = layer.keys(context, there)
    assert torch.equal(made.k, Rotary(D).turn(k, there))
    assert torch.equal(made.v, v)
    x = torch.randn(B, N, D_MODEL)
    assert torch.equal(layer(x, made), layer(x, context, context_positions=there))


def test_gradient_flows_through_keys_made_once():
    layer = MultiHeadAttention(D_MODEL, HEADS, fused=True)
    x, context = torch.randn(B, N, D_MODEL), torch.randn(B, M, D_MODEL, requires_grad=True)
    (ours,) = torch.autograd.grad(layer(x, layer.keys(context)).sum(), context)
    (theirs,) = torch.autograd.grad(layer(x, context).sum(), context)
    assert torch.equal(ours, theirs)


def test_keys_refuse_what_does_not_fit():
    layer = MultiHeadAttention(D_MODEL, HEADS, d_context=D_CONTEXT)
    for shape in ((B, M, D_MODEL), (M, D_CONTEXT)):
        with pytest.raises(ValueError, match=rf"context.*\(B, M, 11\).*{re.escape(str(shape))}"):
            layer.keys(torch.zeros(shape))
    turning = MultiHeadAttention(D_MODEL, HEADS, position=Rotary(D))
    made = turning.keys(torch.zeros(B, M, D_MODEL))
    with pytest.raises(ValueError, match=r"context_positions=.*keys\(…\)"):
        turning(torch.zeros(B, N, D_MODEL), made, context_positions=torch.arange(M))
    with pytest.raises(ValueError, match="cache"):
        turning(torch.zeros(B, N, D_MODEL), made, cache=GrowingCache())


def test_joined_is_several_linear_maps_under_one_another():
    joined, x = Joined(7, (5, 3, 2)), torch.randn(B, 7)
    parts = [nn.Linear(7, rows) for rows in (5, 3, 2)]
    with torch.no_grad():
        joined.weight.copy_(torch.cat([part.weight for part in parts]))
        joined.bias.copy_(torch.cat([part.bias for part in parts]))
    assert joined.rows == (5, 3, 2)
    torch.testing.assert_close(joined(x), torch.cat([part(x) for part in parts], -1))
    assert Joined(7, (5, 3), bias=False).bias is None


def test_positions_of_the_context_without_a_context_are_refused():
    layer = MultiHeadAttention(D_MODEL, HEADS, position=Rotary(D))
    with pytest.raises(ValueError, match="context_positions"):
        layer(torch.randn(B, N, D_MODEL), context_positions=torch.arange(M))


# ----------------------------------------------------------------------------------------------- training and gradients


def test_dropout_is_applied_in_training_only():
    layer = MultiHeadAttention(D_MODEL, HEADS, dropout=0.5)
    plain = MultiHeadAttention(D_MODEL, HEADS)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(B, N, D_MODEL)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), plain(x))


def test_dropout_hides_whole_weights_and_enlarges_the_others():
    layer = MultiHeadAttention(4, 1, dropout=0.75, bias=False)
    with torch.no_grad():
        for w in (layer.w_v, layer.w_o):
            w.weight.copy_(torch.eye(4))
    x = torch.randn(1, 1, 4)  # one key, so its weight is 1, and with dropout 0 or 4
    seen = {tuple((layer(x) / x).round().flatten().tolist()) for _ in range(100)}
    assert seen == {(0.0,) * 4, (4.0,) * 4}


PARAMETERS = {
    "separate": {},
    "fused": {"fused": True},
    "grouped": {"num_kv_heads": 1},
    "T5": {"position": T5(HEADS, buckets=8, max_distance=5)},
    "Shaw": {"position": Shaw(D, 3)},
    "Swin": {"position": Swin((1, N), HEADS)},
}


@pytest.mark.parametrize("options", PARAMETERS.values(), ids=PARAMETERS)
def test_gradient_reaches_every_parameter(options):
    layer, x = MultiHeadAttention(D_MODEL, HEADS, **deepcopy(options)), torch.randn(B, N, D_MODEL)
    loud(layer.position)
    towards = torch.randn(B, N, D_MODEL)

    def slopes(run, of, dtype):
        out = run(of, x.to(dtype))
        return torch.autograd.grad(out, list(of.parameters()), towards.to(dtype))

    names = [name for name, _ in layer.named_parameters()]
    ours = slopes(lambda of, x: of(x), layer, torch.float32)
    baseline, truth = slopes(by_hand, layer, torch.float32), slopes(by_hand, wide(layer), torch.float64)
    scale = float(max(t.abs().max() for t in truth))
    for name, mine, base, true in zip(names, ours, baseline, truth, strict=True):
        # A constant added to every key changes no weight, so the keys' bias is the one that learns nothing.
        assert name == "w_k.bias" or true.abs().max() > 1e-3
        assert_rule(mine, base, true, gradient=True, scale=scale, what=name)


STATES = {
    "separate": ({}, [f"w_{m}.{p}" for m in "qkvo" for p in ("weight", "bias")]),
    "no bias": ({"bias": False}, [f"w_{m}.weight" for m in "qkvo"]),
    "fused": ({"fused": True}, [f"w_{m}.{p}" for m in ("qkv", "o") for p in ("weight", "bias")]),
    "T5": ({"position": T5(HEADS)}, ["position.table", *(f"w_{m}.{p}" for m in "qkvo" for p in ("weight", "bias"))]),
    "ALiBi": ({"position": alibi(HEADS), "bias": False}, [f"w_{m}.weight" for m in "qkvo"]),
}


@pytest.mark.parametrize(("options", "names"), STATES.values(), ids=STATES)
def test_state_makes_the_same_layer_again(options, names):
    first, second = (MultiHeadAttention(D_MODEL, HEADS, **deepcopy(options)) for _ in range(2))
    loud(first.position)
    assert list(first.state_dict()) == names
    second.load_state_dict(first.state_dict())
    x = torch.randn(B, N, D_MODEL)
    assert torch.equal(second(x), first(x))


# ---------------------------------------------------------------------------------------------------- what goes through


@pytest.mark.parametrize("options", [{}, {"fused": True, "num_kv_heads": 1}, {"position": Rotary(D)}])
def test_one_text_without_a_batch_is_a_batch_of_one(options):
    layer = MultiHeadAttention(D_MODEL, HEADS, **options)
    x, context = torch.randn(N, D_MODEL), torch.randn(M, D_MODEL)
    assert torch.equal(layer(x), layer(x[None])[0])
    assert torch.equal(layer(x, context), layer(x[None], context[None])[0])
    assert torch.equal(layer(x, mask=masks.causal()), layer(x[None], mask=masks.causal())[0])
    caches = GrowingCache(), GrowingCache()
    for part in (x[:4], x[4:]):
        assert torch.equal(layer(part, cache=caches[0]), layer(part[None], cache=caches[1])[0])


def test_hooks_of_a_layer_are_called_once_with_or_without_a_batch():
    layer, shapes = MultiHeadAttention(D_MODEL, HEADS), []
    layer.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    layer(torch.randn(B, N, D_MODEL))
    layer(torch.randn(N, D_MODEL))
    assert shapes == [(B, N, D_MODEL), (N, D_MODEL)]


def test_mask_may_be_a_mask_or_booleans():
    layer, x = MultiHeadAttention(D_MODEL, HEADS), torch.randn(B, N, D_MODEL)
    mask = masks.causal() & masks.padding([N, 4])
    cells = mask.dense(N)  # (B, 1, N, N)
    expected = layer(x, mask=mask)
    assert torch.equal(layer(x, mask=cells), expected)
    assert torch.equal(layer(x, mask=cells.expand(B, HEADS, N, N)), expected)
    assert torch.equal(layer(x, mask=cells.numpy()), expected)
    assert torch.equal(layer(x[:1], mask=cells[0, 0]), layer(x[:1], mask=masks.causal()))
    assert not torch.equal(layer(x), expected)


def test_query_that_sees_nothing_gives_the_bias_of_w_o():
    layer = MultiHeadAttention(D_MODEL, HEADS)
    out = layer(torch.randn(B, N, D_MODEL), mask=~masks.causal())  # the last query sees nothing
    assert torch.equal(out[:, -1], layer.w_o.bias.expand(B, D_MODEL))
    assert not torch.equal(out[:, 0], layer.w_o.bias.expand(B, D_MODEL))


@pytest.mark.parametrize("shape", [(B, 0, D_MODEL), (0, N, D_MODEL), (0, D_MODEL)])
def test_nothing_in_is_nothing_out(shape):
    assert MultiHeadAttention(D_MODEL, HEADS)(torch.zeros(shape)).shape == shape


def test_backend_reaches_the_operation(monkeypatch):
    ran, tiled = [], regard.backends.tiled.run
    monkeypatch.setattr(regard.backends.tiled, "run", lambda call: (ran.append(call.sizes), tiled(call))[1])
    x = torch.randn(B, N, D_MODEL)
    MultiHeadAttention(D_MODEL, HEADS)(x)
    assert ran == []
    MultiHeadAttention(D_MODEL, HEADS, backend="tiled")(x)
    assert ran == [(B, HEADS, N, N)]
    with pytest.raises(ValueError, match=r"backend.*'sdpa'.*softcap"):
        MultiHeadAttention(D_MODEL, HEADS, backend="sdpa", softcap=2.0)(x)
    with pytest.raises(ValueError, match=r"backend.*'fast'"):
        MultiHeadAttention(D_MODEL, HEADS, backend="fast")(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_result_has_the_dtype_of_the_layer(dtype):
    for position in (None, Rotary(D), alibi(HEADS), T5(HEADS), Shaw(D, 3)):
        layer = MultiHeadAttention(D_MODEL, HEADS, position=deepcopy(position)).to(dtype)
        assert layer(torch.randn(B, N, D_MODEL).to(dtype)).dtype == dtype


COMPILED = {
    "plain": {},
    "fused": {"fused": True},
    "grouped": {"num_kv_heads": 1},
    "rotary": {"position": Rotary(D)},
}


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_layer_compiles_into_one_graph(options):
    torch.compiler.reset()
    layer, x = MultiHeadAttention(D_MODEL, HEADS, **options), torch.randn(B, N, D_MODEL)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize(
    ("options", "mask"), [({}, masks.causal()), ({"position": alibi(HEADS)}, None)], ids=["causal", "ALiBi"]
)
def test_layer_with_a_rule_compiles_into_one_graph(options, mask):
    torch.compiler.reset()
    layer, x = MultiHeadAttention(D_MODEL, HEADS, **options), torch.randn(B, N, D_MODEL)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x, mask=mask), layer(x, mask=mask))


def test_layer_prints_its_sizes():
    assert str(MultiHeadAttention(12, 3, bias=False)) == (
        "MultiHeadAttention(\n"
        "  12, num_heads=3, head_dim=4\n"
        "  (w_q): Linear(in_features=12, out_features=12, bias=False)\n"
        "  (w_k): Linear(in_features=12, out_features=12, bias=False)\n"
        "  (w_v): Linear(in_features=12, out_features=12, bias=False)\n"
        "  (w_o): Linear(in_features=12, out_features=12, bias=False)\n"
        ")"
    )
    assert str(MultiHeadAttention(12, 6, num_kv_heads=2, head_dim=5, fused=True)) == (
        "MultiHeadAttention(\n"
        "  12, num_heads=6, head_dim=5, num_kv_heads=2\n"
        "  (w_qkv): Joined(in_features=12, out_features=50, bias=True)\n"
        "  (w_o): Linear(in_features=30, out_features=12, bias=True)\n"
        ")"
    )


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MultiHeadAttention(30, 7),
            ValueError,
            r"d_model.*30.*7.*head_dim=",
        ),
        (
            lambda: MultiHeadAttention(30, 6, num_kv_heads=4),
            ValueError,
            r"num_heads.*num_kv_heads.*6.*4",
        ),
        (lambda: MultiHeadAttention(0, 3), ValueError, r"d_model.*1.*0"),
        (lambda: MultiHeadAttention(30, 0), ValueError, r"heads.*1.*0"),
        (lambda: MultiHeadAttention(30, 3, num_kv_heads=0), ValueError, r"kv_heads.*1.*0"),
        (lambda: MultiHeadAttention(30, 3, d_context=-1), ValueError, r"d_context.*1.*-1"),
        (lambda: MultiHeadAttention(30, 3, head_dim=0), ValueError, r"head_dim.*1.*0"),
        (
            lambda: MultiHeadAttention(30, 3, fused=True, d_context=7),
            ValueError,
            r"fused.*d_context.*d_model.*7.*30",
        ),
        (
            lambda: MultiHeadAttention(30, 3, position="rotary"),
            TypeError,
            r"position.*regard\.positions\.Rotary.*bias\(q, scale\).*None.*str",
        ),
        (lambda: MultiHeadAttention(30, 3, position=nn.Linear(2, 3)), TypeError, "Linear"),
        (lambda: MultiHeadAttention(30, 3, position=T5), TypeError, "type"),
    ],
)
def test_layer_refuses_sizes_that_do_not_fit(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"x": (B, N, 29)}, r"x.*\(B, N, 30\).*\(N, 30\).*\(2, 7, 29\)"),
        ({}, {"x": (30,)}, r"x.*\(B, N, 30\).*\(N, 30\).*\(30,\)"),
        ({}, {"x": (B, 3, N, 30)}, r"x.*\(B, N, 30\).*\(N, 30\).*\(2, 3, 7, 30\)"),
        ({"d_context": 11}, {"x": (B, N, 30)}, r"context.*11.*context="),
        ({}, {"x": (B, N, 30), "context": (B, M, 11)}, r"context.*\(2, M, 30\).*\(2, 5, 11\)"),
        ({}, {"x": (B, N, 30), "context": (1, M, 30)}, r"context.*\(2, M, 30\).*\(1, 5, 30\)"),
        ({}, {"x": (B, N, 30), "context": (M, 30)}, r"context.*\(2, M, 30\).*\(5, 30\)"),
    ],
)
def test_layer_refuses_input_of_another_shape(options, arguments, message):
    layer = MultiHeadAttention(30, 3, **options)
    with pytest.raises(ValueError, match=message):
        layer(**{name: torch.zeros(shape) for name, shape in arguments.items()})


def test_layer_refuses_arguments_that_would_not_count():
    layer, x = MultiHeadAttention(D_MODEL, HEADS), torch.randn(B, N, D_MODEL)
    with pytest.raises(ValueError, match=r"positions.*Rotary"):
        layer(x, positions=torch.arange(N))
    with pytest.raises(ValueError, match=r"positions.*Rotary"):
        layer(x, torch.randn(B, M, D_MODEL), context_positions=torch.arange(M))
    with pytest.raises(ValueError, match="cache"):
        layer(x, torch.randn(B, M, D_MODEL), cache=GrowingCache())


def test_layer_refuses_a_position_for_other_heads_and_a_float_mask():
    x = torch.randn(B, N, D_MODEL)
    with pytest.raises(ValueError, match=r"Rotary.*dim=6.*\(2, 3, 7, 10\)"):
        MultiHeadAttention(D_MODEL, HEADS, position=Rotary(6))(x)
    with pytest.raises(ValueError, match=r"4.*3"):
        MultiHeadAttention(D_MODEL, HEADS, position=alibi(4))(x)
    with pytest.raises(TypeError, match="mask"):
        MultiHeadAttention(D_MODEL, HEADS)(x, mask=torch.zeros(N, N))


# ------------------------------------------------------------------------------------- some of the heads, in a process


def share(layer, rank, size=2):
    """A layer with the rows of w_q, w_k and w_v and the columns of w_o that one of so many processes has."""
    part = deepcopy(layer)
    for name, axis in (("w_q", 0), ("w_k", 0), ("w_v", 0), ("w_o", 1)):
        whole, held = getattr(layer, name), getattr(part, name)
        held.weight = nn.Parameter(whole.weight.detach().chunk(size, axis)[rank].clone())
        if axis == 0:
            held.bias = nn.Parameter(whole.bias.detach().chunk(size)[rank].clone())
    part.w_o.bias = None if rank else layer.w_o.bias
    return part


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_heads_keep_their_width_when_a_process_has_some_of_them(kv_heads):
    layer, x = MultiHeadAttention(21, 4, num_kv_heads=kv_heads, head_dim=5), torch.randn(B, N, 21)
    baseline, truth = layer(x), wide(layer)(x.double())
    parts = [share(layer, rank) for rank in range(2)]
    assert_rule(parts[0](x) + parts[1](x), baseline, truth)
    here = slice(kv_heads // 2, None)
    assert_rule(parts[1].keys(x).k, layer.keys(x).k[:, here], wide(layer).keys(x.double()).k[:, here])
    context = torch.randn(B, M, 21)
    made = sum(part(x, part.keys(context)) for part in parts)
    assert_rule(made, layer(x, context), wide(layer)(x.double(), context.double()))


def test_shares_of_the_heads_that_do_not_fit_each_other_are_refused():
    layer, x = MultiHeadAttention(20, 4, num_kv_heads=2), torch.randn(B, N, 20)
    part = share(layer, 0)
    part.w_k, part.w_v = layer.w_k, layer.w_v  # all keys: head 2 would look at those of head 0
    with pytest.raises(ValueError, match=r"2.*4.*2.*key/value"):
        part(x)
    part = share(layer, 0)
    part.w_o = layer.w_o
    with pytest.raises(ValueError, match=r"2.*4.*5.*w_o.*20"):
        part(x)
    with pytest.raises(ValueError, match=r"6.*4"):
        share(MultiHeadAttention(12, 3), 0)(torch.randn(B, N, 12))
    normed = MultiHeadAttention(20, 4, head_norms=(nn.RMSNorm(5), nn.RMSNorm(5)))
    with pytest.raises(ValueError, match=r"2.*4"):
        share(normed, 0)(x)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("position", [None, Rotary(10)], ids=["", "rotary"])
def test_half_of_a_fused_projection_is_refused(context, position):
    layer, x = MultiHeadAttention(30, 3, fused=True, position=position), torch.randn(B, N, 30)
    layer.w_qkv = nn.Linear(30, 45)
    layer.w_qkv.register_forward_hook(lambda *given: None)  # as ColwiseParallel has
    with pytest.raises(ValueError, match=r"90.*45"):
        layer(x, torch.randn(B, M, 30)) if context else layer(x)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "bias": False}], ids=["", "grouped, no bias"])
def test_separated_projections_are_the_fused_ones(options):
    layer, x = MultiHeadAttention(30, 3, fused=True, **options), torch.randn(B, N, 30)
    layer.w_qkv.weight.requires_grad = False
    before, rows = layer(x), layer.w_qkv.weight
    layer.separate()
    assert torch.equal(torch.cat([layer.w_q.weight, layer.w_k.weight, layer.w_v.weight]), rows)
    assert not layer.w_k.weight.requires_grad
    assert "w_qkv.weight" not in layer.state_dict()
    torch.testing.assert_close(layer(x), before)
    layer.separate()  # nothing is left to do


def test_separating_does_not_lose_a_hook():
    layer = MultiHeadAttention(30, 3, fused=True)
    layer.w_qkv.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"Joined.*90"):
        layer.separate()
    assert layer.fused


# ------------------------------------------------------------------------------------------- broken off, and autocast


@torch.no_grad()
@pytest.mark.parametrize("problem", [KeyboardInterrupt, torch.OutOfMemoryError, ValueError])
def test_call_that_is_broken_off_leaves_the_cache_as_it_was(problem, monkeypatch):
    layer = MultiHeadAttention(6, 2)
    cache = layer.new_cache(1, 9, dtype=torch.float32, device="cpu")
    layer(torch.zeros(1, 5, 6), cache=cache)

    def stop(*given, **named):
        raise problem

    monkeypatch.setattr(attention, "attention", stop)
    with pytest.raises(problem):
        layer(torch.zeros(1, 3, 6), cache=cache)
    assert len(cache) == 5


def test_heads_are_normed_in_the_dtype_of_their_norm_under_autocast():
    layer = MultiHeadAttention(6, 2, head_norms=(nn.RMSNorm(3), nn.RMSNorm(3)))
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = layer.project(torch.randn(1, 5, 6))
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------- return_weights


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("position", [None, Rotary(D), alibi(HEADS)], ids=str)
def test_weights_are_returned_beside_the_same_output(fused, position):
    layer = MultiHeadAttention(D_MODEL, HEADS, fused=fused, position=position)
    x = torch.randn(B, N, D_MODEL)
    output, weights = layer(x, mask=masks.causal(), return_weights=True)
    assert torch.equal(output, layer(x, mask=masks.causal()))
    with regard.watch(layer, keep="qk") as seen:
        layer(x, mask=masks.causal())
    exact = seen[0].tile(slice(None), slice(None))
    truth = wide(layer)(x.double(), mask=masks.causal(), return_weights=True)[1]
    assert weights.shape == (B, HEADS, N, N)
    assert regard.check(weights.detach())
    assert_rule(weights, exact, truth)


def test_returned_weights_make_the_output():
    layer, x, context = MultiHeadAttention(D_MODEL, HEADS), torch.randn(B, N, D_MODEL), torch.randn(B, M, D_MODEL)
    output, weights = layer(x, context, return_weights=True)
    values = layer.keys(context).v  # (B, H, M, D)
    again = layer.joined(weights @ values)
    assert_rule(output, again, wide(layer)(x.double(), context.double()))
    single = layer(x[0], context[0], return_weights=True)
    assert torch.equal(single[1], weights[0])
    assert single[0].shape == (N, D_MODEL)
    gradient = torch.autograd.grad(weights[..., 0].sum(), layer.w_q.weight)[0]
    assert gradient.any()


def test_returned_weights_of_a_step_reach_over_the_cache():
    layer, x, cache = MultiHeadAttention(D_MODEL, HEADS), torch.randn(B, N, D_MODEL), GrowingCache()
    layer(x[:, :-1], mask=masks.causal(), cache=cache)
    _, step = layer(x[:, -1:], mask=masks.causal(), cache=cache, return_weights=True)
    _, whole = layer(x, mask=masks.causal(), return_weights=True)
    truth = wide(layer)(x.double(), mask=masks.causal(), return_weights=True)[1]
    assert_rule(step, whole[:, :, -1:], truth[:, :, -1:])


def test_more_weights_than_fit_are_refused_and_leave_the_cache_as_it_was():
    layer, cache = MultiHeadAttention(4, 2), GrowingCache()
    layer(torch.zeros(1, 3, 4), cache=cache)
    with pytest.raises(ValueError, match=r"\(1, 2, 6000, 6003\).*67,108,864.*regard\.look.*regard\.watch"):
        layer(torch.zeros(1, 6000, 4), cache=cache, return_weights=True)
    assert len(cache) == 3


def test_layer_of_windows_refuses_to_build_its_weights():
    layer = SlidingAttention(D_MODEL, HEADS, reach=1)
    with pytest.raises(ValueError, match=r"return_weights.*regard\.watch"):
        layer(torch.zeros(B, N, D_MODEL), return_weights=True)
