"""Weights that a hand-written attention changes between its softmax and the values: what was applied is shown."""

import gc
import weakref
from math import inf

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, softmax

import regard
from regard.lens.taps import softmax as softmax_taps
from regard.lens.taps.softmax import is_dropout

B, H, NQ, NK, D = 2, 3, 5, 11, 7


class Attention(nn.Module):
    """softmax(q·kᵀ), an edit, and the product with the values; the weights really applied are kept for the test."""

    def __init__(self, edit, apply=torch.matmul, **attributes):
        super().__init__()
        self.edit, self.apply_to = edit, apply
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, q, k, v):
        weights = self.edit(softmax(q @ k.mT * D**-0.5, -1))
        self.applied = weights.detach().clone()
        return self.apply_to(weights, v)


def model_of(edit, **more):
    return nn.ModuleDict({"layer": nn.ModuleDict({"attn": Attention(edit, **more)})})


def qkv(batch=B, heads=H, nq=NQ, nk=NK, size=D, dtype=torch.float32):
    shapes = (batch, heads, nq, size), (batch, heads, nk, size), (batch, heads, nk, size)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def run(model, *args, calls=1, **options):
    """The capture of some calls, whose results are the same bits as without; and what was really applied in them."""
    attention = model["layer"]["attn"]
    torch.manual_seed(1)
    before = [attention(*args) for _ in range(calls)]
    torch.manual_seed(1)
    applied = []
    with regard.watch(model, keep="qk", **options) as seen:
        for expected in before:
            assert torch.equal(attention(*args), expected)
            applied.append(attention.applied)
    assert softmax_taps._pending == {}
    return seen, applied


def cells(view):
    return view.tile(slice(None), slice(None))


# -------------------------------------------------------------------------------------------------------- in place


def zero_one(w):
    w[..., 3, 1] = 0
    return w


def fill(w):
    return w.masked_fill_(torch.ones(NQ, NK).triu(2).bool(), 0)


def scale_all(w):
    w *= torch.linspace(0.5, 2, NK)
    return w


def gate_in_place(w):
    return w.mul_(torch.tensor([1.0, 0.25, 0.0]).view(H, 1, 1))


def through_data(w):
    w.data[..., 3, 1] = 0
    return w


# ----------------------------------------------------------------------------------------------------- out of place

MIX = torch.tensor([[0.5, -0.5, 1.0], [0.0, 1.0, 0.5], [1.0, 1.0, -1.0]])


def gate(w):
    return w * torch.tensor([1.0, 0.0, 2.0]).view(H, 1, 1)


def talking_heads(w):
    return torch.einsum("bhij,gh->bgij", w, MIX)


def talking_heads_by_linear(w):
    return (w.permute(0, 2, 3, 1) @ MIX).permute(0, 3, 1, 2)


def renormalised(w):
    w = w * torch.linspace(0.5, 2, NK)
    return w / w.sum(-1, keepdim=True)


def with_prior(w):
    return 0.5 * w + 0.5 / NK


def rolled(w):
    return w.roll(1, -1)


def thresholded(w):
    return torch.where(w < 0.05, 0.0, w)


EDITS = [
    zero_one,
    fill,
    scale_all,
    gate_in_place,
    through_data,
    gate,
    talking_heads,
    talking_heads_by_linear,
    renormalised,
    with_prior,
    rolled,
    thresholded,
]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_was_applied_is_shown_and_reported_with_module_and_call(edit, mode):
    model = model_of(edit)
    with mode():
        seen, applied = run(model, *qkv(), calls=2)
    for n, expected in enumerate(applied):
        assert torch.equal(cells(seen["layer.attn", n]), expected)
        assert seen["layer.attn", n].edited
    assert seen.edited == {"layer.attn": [0, 1]}
    assert seen.unseen == {}
    (finding,) = [f for f in seen.doctor().findings if f.code == "edited weights"]
    assert (finding.severity, finding.paths, dict(finding.values)["calls"]) == ("note", ("layer.attn",), (0, 1))
    for lang, words in (("en", "calls 0–1"), ("ko", "호출 0–1")):
        assert words in finding.text(lang)
        assert words in seen.summary(lang)
    assert "calls 0–1" in seen._repr_html_()
    assert "edited after softmax" in repr(seen["layer.attn", 0])


@pytest.mark.parametrize(
    "apply",
    [
        lambda w, v: torch.einsum("bhij,bhjd->bhid", w, v),
        lambda w, v: torch.einsum("bhij,bhjd->hbid", w, v),
        lambda w, v: torch.einsum("...ij,...jd->...id", w, v),
        lambda w, v: torch.einsum("bhdj,bhij->bhdi", v.mT, w),
        lambda w, v: torch.einsum("b h j i, b h j d -> b h i d", w.mT, v),
        lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)),
        lambda w, v: torch.baddbmm(torch.ones(B * H, NQ, D), w.flatten(0, 1), v.flatten(0, 1)),
        lambda w, v: w.contiguous() @ v,
    ],
)
@pytest.mark.parametrize("edit", [zero_one, talking_heads, renormalised])
def test_products_of_every_form_apply_edited_weights(apply, edit):
    seen, (applied,) = run(model_of(edit, apply=apply), *qkv())
    assert torch.equal(cells(seen[0]), applied)
    assert seen.edited == {"layer.attn": [0]}


def test_einsum_that_puts_groups_behind_queries_is_read_in_the_order_of_the_model():
    """(B, Hkv, group, Nq, Nk) weights, whose rows einsum joins as queries × group."""

    def attend(q, k, v):
        w = softmax(torch.einsum("bgrid,bgjd->bgrij", q.unflatten(1, (2, 3)), k), -1)
        w = torch.einsum("bgrij,rs->bgsij", w, MIX)
        model.applied = w.flatten(1, 2)
        return torch.einsum("bgrij,bgjd->bigrd", w, v)

    class Grouped(nn.Module):
        num_heads = 6

        def forward(self, *args):
            return attend(*args)

    model = Grouped()
    q, k, v = torch.randn(B, 6, NQ, D), torch.randn(B, 2, NK, D), torch.randn(B, 2, NK, D)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(q, k, v)
    assert torch.equal(cells(seen[0]), model.applied)
    assert seen.edited == {"": [0]}


@pytest.mark.parametrize(("edit", "edited"), [(lambda w: w, {}), (lambda w: w.clone(), {}), (gate, {"": [0]})])
def test_heads_that_share_their_values_and_are_joined_to_the_queries(edit, edited):
    """Multi-query attention: (B·H, Nq, Nk) weights meet (B, Nk, D) values as (B, H·Nq, Nk)."""

    class Shared(nn.Module):
        num_heads = H

        def forward(self, q, k, v):
            w = softmax((q @ k.mT).flatten(0, 1), -1)  # (B·H, Nq, Nk)
            self.applied = edit(w.unflatten(0, (B, H)))
            return torch.bmm(self.applied.flatten(1, 2), v)

    q, k, v = qkv()
    with torch.no_grad(), regard.watch(model := Shared(), keep="qk") as seen:
        model(q, k, v[:, 0])
    assert torch.equal(cells(seen[0]), model.applied)
    assert (seen.edited, seen.unseen) == (edited, {})


def test_plain_matrices_that_are_edited_are_one_head():
    seen, (applied,) = run(model_of(zero_one), *(x[0, 0] for x in qkv()))
    assert torch.equal(cells(seen[0])[0, 0], applied)
    assert seen.edited == {"layer.attn": [0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_edits_in_other_dtypes(dtype):
    seen, (applied,) = run(model_of(lambda w: (w * 0.5).to(dtype)), *qkv(dtype=dtype))
    assert torch.equal(cells(seen[0]), applied.to(torch.promote_types(dtype, torch.float32)))
    assert seen.edited == {"layer.attn": [0]}


def test_edited_under_autocast():
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        seen, (applied,) = run(model_of(gate), *qkv())
        plain, _ = run(model_of(lambda w: w), *qkv())
    assert torch.equal(cells(seen[0]), applied.bfloat16().float())
    assert (seen.edited, plain.edited) == ({"layer.attn": [0]}, {})


class TalkingHeads(nn.Module):
    """As CaiT writes it: a linear layer over the heads, of which there may be as many as queries or keys."""

    def __init__(self, heads, bias):
        super().__init__()
        self.mix = nn.Linear(heads, heads, bias=bias)

    def forward(self, q, k, v):
        self.applied = self.mix(softmax(q @ k.mT, -1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.applied @ v


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(B, H, NQ, NK, D), (1, 4, 4, 4, 4), (2, 4, 4, 4, 6)])
def test_talking_heads_by_a_layer_of_the_model(bias, sizes):
    model = TalkingHeads(sizes[1], bias)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(*qkv(*sizes))
    assert torch.equal(cells(seen[0]), model.applied)
    assert (seen.edited, seen.unseen) == ({"": [0]}, {})


# --------------------------------------------------------------------------------------------------- other head counts


def average_heads(w):
    return w.mean(1, keepdim=True)


@pytest.mark.parametrize("batch", [1, B])
def test_heads_that_are_averaged_before_the_values_are_shown_as_one(batch):
    seen, (applied,) = run(model_of(average_heads, apply=lambda w, v: w @ v[:, :1]), *qkv(batch))
    assert torch.equal(cells(seen[0]), applied)
    assert seen.edited == {"layer.attn": [0]}


def difference_of_halves(w):
    """Differential attention as its authors write it: one softmax over 2·H heads."""
    first, second = w.unflatten(1, (-1, 2)).unbind(2)
    return first - 0.8 * second


def test_differential_attention_of_one_softmax_shows_the_difference():
    seen, (applied,) = run(model_of(difference_of_halves, apply=lambda w, v: w @ v[:, ::2]), *qkv(heads=6))
    assert bool((applied < 0).any())
    assert torch.equal(cells(seen[0]), applied)
    assert seen.edited == {"layer.attn": [0]}


class Differential(nn.Module):
    """Two softmaxes, of which a combination is applied."""

    def __init__(self, combine, nested=False):
        super().__init__()
        self.combine, self.nested = combine, nested

    def weights(self, q, k):
        return softmax(q @ k.mT, -1)

    def forward(self, q1, k1, q2, k2, v):
        if self.nested:
            first, second = self.weights(q1, k1), self.weights(q2, k2)
        else:
            first = softmax(q1 @ k1.mT, -1)
            second = softmax(q2 @ k2.mT, -1)
        combined = self.combine(first, second)
        self.applied = combined.clone()
        return combined @ v


def in_place_difference(first, second):
    return second.mul_(-0.5).add_(first)


@pytest.mark.pairwise
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [D, NK])
@pytest.mark.parametrize("combine", [lambda a, b: a - 0.8 * b, lambda a, b: a + b, in_place_difference])
def test_differential_attention_of_two_softmaxes_shows_what_was_applied_alone(nested, size, combine):
    """Also where a head is as wide as there are keys, so that the second q has the shape of the first weights."""
    model = nn.ModuleDict({"attn": Differential(combine, nested)})
    (q1, k1, v), (q2, k2, _) = qkv(size=size), qkv(size=size)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model["attn"](q1, k1, q2, k2, v)
    assert [r.path for r in seen.records] == ["attn"]
    assert torch.equal(cells(seen[0]), model["attn"].applied)
    assert (seen.edited, seen.unseen) == ({"attn": [0]}, {})


def test_two_softmaxes_that_meet_values_of_their_own_are_two_calls_that_were_not_edited():
    class Both(nn.Module):
        def forward(self, q1, k1, q2, k2, v):
            self.made = softmax(q1 @ k1.mT, -1), softmax(q2 @ k2.mT, -1)
            return self.made[0] @ v - self.made[1] @ v

    model, (q1, k1, v), (q2, k2, _) = Both(), qkv(), qkv()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(q1, k1, q2, k2, v)
    assert [torch.equal(cells(seen["", n]), made) for n, made in enumerate(model.made)] == [True, True]
    assert (seen.edited, seen.unseen) == ({}, {})


# ------------------------------------------------------------------------------------------------------- not edited


def clipped(w):
    return w.clamp_(0, 1)


def hidden_set_to_zero(w):
    return w.masked_fill(w == 0, 0.0)


UNCHANGED = [
    lambda w: w,
    lambda w: w.contiguous(),
    lambda w: w.clone(),
    lambda w: w.to(torch.bfloat16).to(torch.bfloat16),
    lambda w: w.double(),
    lambda w: w.flatten(0, 1).unflatten(0, (B, H)),
    lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    lambda w: torch.nan_to_num(w),
    lambda w: w * torch.ones(H, 1, 1),
    lambda w: dropout(w, 0.5, training=False),
    clipped,
    hidden_set_to_zero,
]


@pytest.mark.parametrize("edit", UNCHANGED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_stay_the_same_are_not_called_edited(edit, mode):
    def masked(w):  # the softmax's own weights, for comparison
        made.append(w.clone())
        return edit(w)

    made = []
    model = model_of(masked, apply=lambda w, v: w @ v.to(w.dtype))
    with mode():
        seen, _ = run(model, *qkv())
    assert seen.edited == {}
    assert not seen[0].edited
    assert torch.equal(cells(seen[0]), made[0])
    assert not [f for f in seen.doctor().findings if f.code == "edited weights"]


@pytest.mark.pairwise
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_before_dropout(inplace, p, dtype):
    model = model_of(lambda w: dropout(w, p, training=True, inplace=inplace))
    with torch.no_grad():
        seen, _ = run(model, *(qkv(dtype=dtype)))
    assert seen.edited == {}
    assert seen[0].check()


def test_gate_of_zeros_and_a_factor_is_not_taken_for_dropout():
    """Its numbers are those of dropout, but nothing was drawn."""
    w = torch.rand(B, H, NQ, NK).softmax(-1)
    mask = torch.tensor([0.0, 2.0, 2.0]).view(H, 1, 1)
    assert is_dropout(w * mask, w)
    seen, (applied,) = run(model_of(lambda w: w * mask), *qkv())
    assert torch.equal(cells(seen[0]), applied)
    assert seen.edited == {"layer.attn": [0]}


def test_dropout_is_told_from_other_numbers():
    w = torch.rand(3, 50).softmax(-1)
    dropped = dropout(w, 0.3, training=True)
    assert is_dropout(dropped, w)
    assert is_dropout(dropped.bfloat16(), w)
    added = dropped.clone()
    added[0, 0] += 0.1
    for other in (w, w / 2, w * 2, -dropped, dropped / 2, torch.zeros_like(w), added):
        assert not is_dropout(other, w)


def test_row_that_sees_nothing_and_is_set_to_zero_is_no_edit():
    """Its softmax is NaN; 0 is what a row that sees nothing has in every other attention."""
    hide = torch.zeros(NQ, NK)
    hide[2] = -inf

    class Masked(nn.Module):
        def forward(self, q, k, v):
            return softmax(q @ k.mT + hide, -1).nan_to_num(0.0) @ v

    with torch.no_grad(), regard.watch(model := Masked(), keep="qk") as seen:
        model(*qkv())
    assert seen.edited == {}
    assert bool((cells(seen[0])[:, :, 2] == 0).all())
    assert seen[0].check().empty_rows == B * H


def with_sink(q, k, v, edit):
    scores = torch.cat([q @ k.mT, torch.ones(B, H, NQ, 1)], -1)
    weights = edit(softmax(scores, -1)[..., :-1])
    return weights @ v, weights


@pytest.mark.parametrize(("edit", "edited"), [(lambda w: w, {}), (lambda w: w * 0.5, {"": [0]}), (zero_one, {"": [0]})])
def test_weights_without_their_sink_are_compared_too(edit, edited):
    class Sink(nn.Module):
        def forward(self, q, k, v):
            out, self.applied = with_sink(q, k, v, edit)
            return out

    with torch.no_grad(), regard.watch(model := Sink(), keep="qk") as seen:
        model(*qkv())
    assert torch.equal(cells(seen[0]), model.applied)
    assert seen.edited == edited


TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.2}
SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
SMALL |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_dropout": 0.2}
IMAGE = {"image_size": 32, "patch_size": 8}
MODELS = {
    "Bert": (TEXT, "text", 1),
    "GPT2": (
        {"vocab_size": 99, "n_embd": 32, "n_layer": 1, "n_head": 4, "eos_token_id": 2, "bos_token_id": 1},
        "text",
        1,
    ),
    "Llama": (GROUPED, "text", 1),
    "Gemma2": (GROUPED, "text", 1),
    "GptOss": (GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1}, "text", 1),
    "Deberta": (TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "text", 1),
    "XLNet": ({"vocab_size": 99, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48}, "text", 1),
    "T5": ({"vocab_size": 99, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 48}, "both", 3),
    "Whisper": (
        {"vocab_size": 99, "num_mel_bins": 8, "max_source_positions": 20, "pad_token_id": 1} | SMALL,
        "sound",
        3,
    ),
    "ViT": ({k: v for k, v in TEXT.items() if k != "vocab_size"} | IMAGE, "image", 1),
    "Swin": (IMAGE | {"patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}, "image", 2),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_eager_models_of_transformers_are_not_called_edited(name, training):
    transformers = pytest.importorskip("transformers")
    values, kind, calls = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}Model")(config).train(training)
    ids = torch.randint(3, 99, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    inputs = {
        "text": {"input_ids": ids, "attention_mask": mask},
        "both": {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]},
        "sound": {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids[:, :5]},
        "image": {"pixel_values": torch.randn(2, 3, 32, 32)},
    }[kind]
    torch.manual_seed(1)
    with torch.no_grad():
        before = model(**inputs)[0]
        torch.manual_seed(1)
        with regard.watch(model, measures=["received"]) as seen:
            assert torch.equal(model(**inputs)[0], before)
    assert [record.source for record in seen.records] == ["softmax"] * calls
    assert (seen.edited, seen.unseen) == ({}, {})


# ------------------------------------------------------------------------------------------------- what a view says


def test_measures_of_edited_weights_are_of_those_that_were_applied():
    model = model_of(difference_of_halves, apply=lambda w, v: w @ v[:, ::2])
    seen, (applied,) = run(
        model, *qkv(heads=6), measures=["entropy", "effective", "received", "map", "top", "patterns"]
    )
    view = seen[0]
    torch.testing.assert_close(view.received, applied.sum(-2))
    assert torch.equal(view.map(), applied)
    top = view.top(3)
    assert torch.equal(top.index, applied.abs().sort(dim=-1, descending=True, stable=True).indices[..., :3])
    assert torch.equal(top.weight, applied.gather(-1, top.index))
    assert bool((top.weight < 0).any())
    assert torch.equal(view.row(2), applied[:, :, 2])
    for name in ("lse", "max_logit"):
        with pytest.raises(LookupError, match=f"{name}.*edited"):
            getattr(view, name)


def test_entropy_is_nan_in_rows_that_are_no_distribution():
    seen, (applied,) = run(model_of(zero_one), *qkv(), measures=["entropy", "effective"])
    wrong = torch.zeros(NQ, dtype=torch.bool)
    wrong[3] = True
    for values in (seen[0].entropy, seen[0].effective):
        assert torch.equal(values.isnan(), wrong.expand(B, H, NQ))
    expected = -(applied * applied.log()).nan_to_num(0).sum(-1)
    torch.testing.assert_close(seen[0].entropy[..., ~wrong], expected[..., ~wrong])
    whole, _ = run(model_of(renormalised), *qkv())
    assert not bool(whole[0].entropy.isnan().any())


def infinite(w):
    w[0, 1, 2, 3] = inf
    return w * 2


def test_check_of_edited_weights_looks_for_nan_and_infinity_alone():
    seen, _ = run(model_of(gate), *qkv())
    report = seen[0].check()
    assert report.ok
    assert report.edited
    seen, _ = run(model_of(infinite), *qkv())
    (problem,) = seen[0].check().problems
    assert (problem.kind, problem.batch, problem.head, problem.row) == ("infinite", 0, 1, 2)


def test_doctor_does_not_take_what_an_edit_set_to_zero_for_hidden():
    """Neither a head that a gate closed, nor one whose scores were written over."""

    def forgetful(w):
        model["layer"]["attn"].scores.zero_()
        return w.mul_(torch.tensor([1.0, 0.0, 1.0]).view(H, 1, 1))

    class Forgetful(Attention):
        def forward(self, q, k, v):
            self.scores = q @ k.mT
            self.applied = forgetful(softmax(self.scores, -1))
            return self.applied @ v

    gated, _ = run(model_of(gate), *qkv())
    assert "empty rows" not in [f.code for f in gated.doctor().findings]
    model = nn.ModuleDict({"layer": nn.ModuleDict({"attn": Forgetful(None)})})
    with torch.no_grad():
        seen, (applied,) = run(model, *qkv())
    assert torch.equal(cells(seen[0]), applied)
    assert seen.edited == {"layer.attn": [0]}
    assert "empty rows" not in [f.code for f in seen.doctor().findings]


@pytest.mark.parametrize("overview", [False, True])
def test_file_says_that_weights_were_edited(tmp_path, overview):
    seen, (applied,) = run(model_of(talking_heads), *qkv())
    seen.save(tmp_path / "run.regard", overview)
    opened = regard.open(tmp_path / "run.regard")
    assert opened.edited == {"layer.attn": [0]}
    assert [f.code for f in opened.doctor().findings] == ["edited weights"]
    if not overview:
        assert torch.equal(cells(opened[0]), applied)
        assert torch.equal(opened[0].effective, seen[0].effective) or bool(seen[0].effective.isnan().any())
    plain, _ = run(model_of(lambda w: w), *qkv())
    plain.save(tmp_path / "plain.regard", overview)
    assert regard.open(tmp_path / "plain.regard").edited == {}


def test_steps_of_a_generation_are_put_together_from_what_was_applied():
    model = model_of(gate)
    k, v = torch.randn(1, H, NK, D), torch.randn(1, H, NK, D)
    applied = []
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        for n in range(NK - 2, NK + 1):
            first = 0 if n == NK - 2 else n - 1
            model["layer"]["attn"](k[:, :, first:n], k[:, :, :n], v[:, :, :n])
            applied.append(model["layer"]["attn"].applied)
    view = seen["layer.attn"]
    assert view.edited
    assert view.sizes == (1, H, NK, NK)
    assert torch.equal(view.row(-1), applied[-1][:, :, -1])
    assert seen.edited == {"layer.attn": [0, 1, 2]}


# ------------------------------------------------------------------------------------------------------ nothing stays


def test_gradients_are_the_same_bits():
    model, args = model_of(talking_heads), [x.requires_grad_() for x in qkv()]
    expected = torch.autograd.grad(model["layer"]["attn"](*args).square().sum(), args)
    with regard.watch(model):
        found = torch.autograd.grad(model["layer"]["attn"](*args).square().sum(), args)
    assert all(map(torch.equal, found, expected))


def test_model_that_was_compiled_shows_what_was_applied():
    torch._dynamo.reset()
    model, args = Attention(talking_heads), qkv()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        expected = compiled(*args)
        with regard.watch(compiled, keep="qk") as seen:
            assert torch.equal(compiled(*args), expected)
    assert torch.equal(cells(seen[0]), talking_heads(softmax(args[0] @ args[1].mT * D**-0.5, -1)))
    assert seen.edited == {"": [0]}


@pytest.mark.parametrize("size", [D, NK])
def test_nothing_of_an_edited_call_is_kept_alive(size):
    references = []

    def remembered(w):
        w = talking_heads(w)
        references.append(weakref.ref(w))
        return w

    with torch.no_grad(), regard.watch(model := Attention(remembered)):
        model(*qkv(size=size))
    gc.collect()
    assert [r() for r in references] == [None]
