"""Edits against the same edit written out on dense fp64 weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import edits, masks
from regard.training.tokenizers import byte_tokenizer

B, H, KV, NQ, D, DV = 2, 6, 3, 7, 5, 4
HEAD, ROWS, KEYS = 4, [3, 5], [1, 2]


class Attention(nn.Module):
    """One attention of a given form: how it is computed, and with which options."""

    def __init__(self, how: str, kv_heads: int, nk: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.how, self.options = how, options
        torch.manual_seed(1)
        self.q = nn.Parameter(torch.randn(B, H, NQ, D).double())
        self.k = nn.Parameter(torch.randn(B, kv_heads, nk, D).double())
        self.v = nn.Parameter(torch.randn(B, kv_heads, nk, DV).double())

    def forward(self) -> Tensor:
        q, k, v, options = self.q, self.k, self.v, self.options
        if self.how == "regard":
            return regard.attention(q, k, v, **options)
        groups = H // k.shape[1]
        visible = options["mask"].everywhere(NQ, k.shape[2], q.device, q.dtype) if "mask" in options else None
        if self.how == "flex":
            mask = options.get("mask")
            see = None if mask is None else mask.bind(NQ, k.shape[2], q.device, q.dtype)
            blocks = None if see is None else create_block_mask(see, B, H, NQ, k.shape[2], "cpu")
            q, k, v = (x.detach() for x in (q, k, v))  # on the CPU it has no backward
            return flex_attention(q, k, v, block_mask=blocks, enable_gqa=groups > 1)
        if self.how == "sdpa":
            return sdpa(q, k, v, attn_mask=visible, enable_gqa=groups > 1)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * D**-0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        if self.how == "einsum":
            return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return scores.softmax(-1) @ v


class CrossAttention(Attention):
    """Another sequence is looked at: by its name, positions of queries and keys are counted apart."""


def dense(model: Attention, change: Callable[[dict[str, Tensor]], None]) -> Tensor:
    """The call by the definition, with weights, values or output changed on the way."""
    q, k, v = (x.detach() for x in (model.q, model.k, model.v))
    parts = {"q": q.clone(), **{n: x.repeat_interleave(H // x.shape[1], 1) for n, x in (("k", k), ("v", v))}}
    parts["removed"] = torch.zeros(B, H, NQ, k.shape[2], dtype=torch.bool)
    parts["faded"] = parts["removed"].clone()
    change(parts)
    s = parts["q"] @ parts["k"].mT * D**-0.5
    options = model.options
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in options:
        s = s + options["bias"]
    if "mask" in options:
        s = s.masked_fill(~options["mask"].everywhere(*s.shape[2:], s.device, s.dtype), float("-inf"))
    s = s.masked_fill(parts["removed"], float("-inf"))
    if "sinks" in options:
        s = torch.cat([s, options["sinks"].view(1, H, 1, 1).expand(B, H, NQ, 1)], -1)
    p = s.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]] * ~parts["faded"]
    return p @ parts["v"]


FORMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "heads": (H, NQ, {}),
    "grouped heads": (KV, NQ, {}),
    "causal": (H, NQ, {"mask": masks.causal()}),
    "window": (KV, NQ, {"mask": masks.window(3, 1)}),
    "padding": (H, NQ, {"mask": masks.padding([7, 5])}),
    "cross": (H, 11, {}),
    "sinks": (KV, NQ, {"sinks": torch.linspace(-1, 1, H).double()}),
    "softcap": (H, NQ, {"softcap": 2.0, "mask": masks.causal()}),
    "bias": (KV, NQ, {"bias": torch.linspace(-1, 1, NQ * NQ).view(NQ, NQ).double()}),
}
PLAIN = ("heads", "grouped heads", "causal", "window", "padding", "cross")
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
CASES = [("regard", form) for form in FORMS] + [
    (how, f) for how in ("sdpa", "flex", "softmax", "einsum") for f in PLAIN
]


def build(how: str, form: str) -> Attention:
    kv_heads, nk, options = FORMS[form]
    return (CrossAttention if form == "cross" else Attention)(how, kv_heads, nk, options).eval()


def set_edges(parts: dict[str, Tensor], name: str) -> None:
    for row in ROWS:
        parts[name][:, HEAD, row, KEYS] = True


OTHER = torch.linspace(-2, 2, B * NQ * DV).view(B, 1, NQ, DV).double()

EDITS: dict[str, tuple[Callable[[], edits.Edit], Callable[[dict[str, Tensor]], None]]] = {
    "knock_out": (lambda: edits.knock_out(0, HEAD, ROWS, KEYS), lambda parts: set_edges(parts, "removed")),
    "knock_out, not renormalised": (
        lambda: edits.knock_out(0, HEAD, ROWS, KEYS, renormalise=False),
        lambda parts: set_edges(parts, "faded"),
    ),
    "edges": (
        lambda: edits.knock_out(0, HEAD, edges=masks.window(1, 1, offset=0)),
        lambda parts: parts["removed"][:, HEAD].logical_or_(
            masks.window(1, 1, offset=0).everywhere(*parts["removed"].shape[2:], torch.device("cpu"), torch.float64)[
                0, 0
            ]
        ),
    ),
    "zero_values": (
        lambda: edits.zero_values(0, HEAD, KEYS),
        lambda parts: parts["v"].__setitem__((slice(None), HEAD, KEYS), 0.0),
    ),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(("how", "form"), CASES)
def test_edited_attention_equals_the_dense_definition(how: str, form: str, name: str) -> None:
    model = build(how, form)
    make, change = EDITS[name]
    with torch.no_grad():
        plain = model()
        with regard.edit(model, make()) as editing:
            changed = model()
    expected = dense(model, change)
    assert torch.allclose(changed, expected, atol=1e-12, rtol=0)
    assert not torch.allclose(changed[:, HEAD], plain[:, HEAD])  # the edit does something
    others = [head for head in range(H) if head != HEAD]
    assert torch.equal(changed[:, others], plain[:, others])  # and nothing elsewhere
    assert editing.applied[0].calls == 1


@pytest.mark.parametrize(("how", "form"), [case for case in CASES if case[1] in ("heads", "grouped heads", "causal")])
def test_outputs_are_replaced(how: str, form: str) -> None:
    model = build(how, form)
    with torch.no_grad():
        plain = model()
        for by, expected in (
            ("zero", torch.zeros(())),
            ("mean", plain[:, HEAD].mean(1, keepdim=True)),
            (OTHER, OTHER[:, 0]),
        ):
            with regard.edit(model, edits.ablate(0, HEAD, by)):
                changed = model()
            assert torch.equal(changed[:, HEAD], expected.expand(B, NQ, DV).to(changed.dtype))
            assert torch.equal(changed[:, :HEAD], plain[:, :HEAD])
        with regard.edit(model, edits.patch(0, HEAD, "output", OTHER, positions=2)):
            changed = model()
    assert torch.equal(changed[:, HEAD, 2], OTHER[:, 0, 2])
    assert torch.equal(changed[:, HEAD, 3], plain[:, HEAD, 3])


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("how", ["regard", "sdpa"])
def test_patched_parts_of_another_run(how: str, part: str) -> None:
    model = build(how, "grouped heads")
    source = torch.linspace(-1, 1, B * NQ * D).view(B, 1, NQ, D).double()[..., : D if part != "v" else DV]
    with torch.no_grad(), regard.edit(model, edits.patch(0, HEAD, part, source)):
        changed = model()
    expected = dense(model, lambda parts: parts[part].__setitem__((slice(None), HEAD), source[:, 0]))
    assert torch.allclose(changed, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("how", ["regard", "sdpa", "softmax"])
def test_gradients_pass_through_an_edit(how: str) -> None:
    model = build(how, "causal")
    with regard.edit(model, edits.knock_out(0, HEAD, ROWS, KEYS)):
        model().square().sum().backward()
    got = [parameter.grad.clone() for parameter in (model.q, model.k, model.v)]
    by_hand = build("softmax", "causal")
    removed = torch.zeros(B, H, NQ, NQ, dtype=torch.bool)
    set_edges({"removed": removed}, "removed")
    scores = (by_hand.q @ by_hand.k.mT * D**-0.5).masked_fill(
        ~torch.ones(NQ, NQ).tril().bool() | removed, float("-inf")
    )
    (scores.softmax(-1) @ by_hand.v).square().sum().backward()
    for ours, parameter in zip(got, (by_hand.q, by_hand.k, by_hand.v), strict=True):
        assert torch.allclose(ours, parameter.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("how", ["regard", "sdpa", "softmax"])
def test_laws(how: str) -> None:
    model = build(how, "causal")
    with torch.no_grad():
        plain = model()
        with pytest.raises(LookupError, match="mask"), regard.edit(model, edits.knock_out(0, HEAD, 2, 5)):
            hidden = model()  # a hidden edge
        assert torch.equal(hidden, plain)
        with regard.edit(model, edits.knock_out(0, HEAD, 5, [0, 1, 2, 4, 5])):
            left = model()
        assert torch.allclose(left[:, HEAD, 5], model.v[:, HEAD, 3], atol=1e-12)  # one key is left: its value
        with regard.edit(model, edits.knock_out(0, HEAD, 5, slice(None))):
            nothing = model()
        assert torch.equal(nothing[:, HEAD, 5], torch.zeros(B, DV).double())


def test_edits_compose_and_print() -> None:
    both = edits.knock_out(0, HEAD, ROWS, KEYS) + edits.ablate(0, 1)
    assert repr(both) == "knock_out(layer=0, head=4, queries=(3, 5), keys=(1, 2)) + ablate(layer=0, head=1)"
    assert edits.knock_out(0, 1, 2, 3) == edits.knock_out(0, 1, 2, 3) != edits.knock_out(0, 1, 2, 4)
    model = build("regard", "heads")
    with torch.no_grad(), regard.edit(model, both) as editing:
        changed = model()
    assert torch.allclose(
        changed[:, HEAD], dense(model, lambda parts: set_edges(parts, "removed"))[:, HEAD], atol=1e-12
    )
    assert not changed[:, 1].any()
    assert [(a.calls, a.rows, a.edges) for a in editing.applied] == [(1, B * 2, B * 4), (1, B * NQ, 0)]


@pytest.mark.parametrize("how", ["regard", "sdpa", "flex", "softmax", "einsum"])
@pytest.mark.parametrize("first", ["edit", "watch"])
def test_watched_at_the_same_time_the_weights_are_the_edited_ones(how: str, first: str) -> None:
    model = build(how, "heads")
    editing, watching = (
        regard.edit(model, edits.knock_out(0, HEAD, ROWS, KEYS)),
        regard.watch(model, keep=["qk", "output"]),
    )
    with torch.no_grad(), ExitStack() as block:
        for context in (editing, watching) if first == "edit" else (watching, editing):
            block.enter_context(context)
        out = model()
    view = watching.capture[0]
    assert torch.equal(view.output, out)
    assert view.edited == (how in ("softmax", "einsum"))
    assert not view.row(3)[:, HEAD, KEYS].any()
    assert view.row(3)[:, HEAD].sum(-1) == pytest.approx(1.0)
    assert view.row(3)[:, HEAD - 1, KEYS].all()


@pytest.mark.parametrize("how", ["regard", "sdpa", "softmax"])
@pytest.mark.parametrize("first", ["edit", "watch"])
def test_watched_gradients_are_those_of_the_edited_output(how: str, first: str) -> None:
    model = build(how, "heads")
    editing = regard.edit(model, edits.knock_out(0, HEAD, ROWS, KEYS))
    watching = regard.watch(model, keep=["qk", "v"], gradients=True)
    with ExitStack() as block:
        for context in (editing, watching) if first == "edit" else (watching, editing):
            block.enter_context(context)
        out = model()
        out.square().sum().backward()
    assert torch.equal(watching.capture[0].output_gradient, 2 * out.detach())


def interrupted(model: nn.Module) -> None:
    with regard.edit(model, edits.ablate(0, HEAD)):
        model()
        raise KeyboardInterrupt


def test_nothing_stays_behind() -> None:
    model = build("softmax", "heads")
    with torch.no_grad():
        plain = model()
        with pytest.raises(KeyboardInterrupt):
            interrupted(model)
        assert torch.equal(model(), plain)


def test_what_cannot_be_edited_says_so() -> None:
    model = build("regard", "heads")
    with pytest.raises(ValueError, match="no module 'nowhere'"):
        regard.edit(model, edits.ablate("nowhere", 0))
    with pytest.raises(LookupError, match="0 to 0"), regard.edit(model, edits.ablate(3, 0)):
        model()
    with pytest.raises(IndexError, match="6 heads"), regard.edit(model, edits.ablate(0, H)):
        model()
    with pytest.raises(LookupError, match="7 positions"), regard.edit(model, edits.knock_out(0, 0, NQ, 0)):
        model()
    with pytest.raises(LookupError, match="no attention"), regard.edit(model, edits.ablate(0, 0)):
        pass
    with pytest.raises(ValueError, match="compile"):
        regard.edit(torch.compile(model), edits.ablate(0, 0))
    by_hand = build("softmax", "heads")
    with (
        pytest.raises(LookupError, match="inference_mode"),
        torch.inference_mode(),
        regard.edit(by_hand, edits.ablate(0, 0)),
    ):
        by_hand()
    with pytest.raises(ValueError, match="neither"):
        edits.knock_out(0, 0)
    with pytest.raises(ValueError, match="median"):
        edits.ablate(0, 0, "median")
    with pytest.raises(TypeError, match="layer"):
        edits.ablate(1.5, 0)
    with pytest.raises(TypeError, match="str"):
        regard.edit(model, "knock_out")


class Packing(nn.Module):
    """Gives SDPA all its heads in one call, and two by two in the next, as a release of transformers packs them."""

    def forward(self, q: Tensor, packed: bool) -> Tensor:
        x = q.unflatten(1, (2, -1)).flatten(2, 3) if packed else q
        return sdpa(x, x, x).view(q.shape)


def test_heads_that_are_packed_in_an_unknown_way_are_not_taken_for_others() -> None:
    model, q = Packing(), torch.randn(1, 6, 1, 4)
    with regard.edit(model, edits.ablate(0, 1)):
        model(q, False)
        with pytest.raises(ValueError, match=r"\b6\b.*\b2\b.*\b3\b"):
            model(q, True)


class TwoSizes(nn.Module):
    """Attends with six heads, then with two."""

    def forward(self, q: Tensor) -> Tensor:
        return torch.cat([sdpa(q, q, q), sdpa(q[:, :2], q[:, :2], q[:, :2])], 1)


def test_module_may_attend_with_different_numbers_of_heads() -> None:
    model, q = TwoSizes(), torch.randn(1, 6, 5, 4)
    with regard.edit(model, edits.ablate(0, 1)):
        changed = (model(q) != 0).flatten(2).any(-1)
    assert changed.tolist() == [[True, False, True, True, True, True, True, False]]


def test_a_vector_is_added_to_what_a_module_returns() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x, vector = torch.randn(2, 5, 3), torch.tensor([1.0, -2.0, 3.0])
    with torch.no_grad(), regard.edit(model, edits.add("0", vector, 2.0, positions=1)):
        changed = model(x)
    hidden = model[0](x)
    hidden[:, 1] += 2 * vector
    assert torch.equal(changed, hidden.relu())


def test_steps_of_a_generation_count_from_the_beginning() -> None:
    model = regard.build("gpt2", n_embd=12, n_head=3, n_layer=2, n_positions=32, vocab_size=256).eval()
    model.tokenizer = byte_tokenizer()
    single = edits.knock_out(1, 2, slice(6, None), 3) + edits.ablate(0, 1, queries=slice(6, None))
    with regard.edit(model, single) as editing:
        result = model.generate("hello", max_new_tokens=5)
    whole = torch.tensor([[*b"hello", *result.ids.tolist()]])
    with torch.no_grad(), regard.edit(model, single):
        logits = model(whole).logits
    assert editing.applied[0].edges == 3  # of the queries at 6, 7 and 8
    assert logits[0, 4:-1].argmax(-1).tolist() == whole[0, 5:].tolist()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hugging_face_models(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2, intermediate_size=16,
        vocab_size=19, max_position_embeddings=32, attn_implementation=attention, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.tensor([[3, 5, 7, 11, 2, 13]])
    single = edits.knock_out(1, 4, 5, [1, 2])
    with torch.no_grad():
        plain = model(ids).logits
        with regard.edit(model, single):
            changed = model(ids).logits

    def by_hand(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT * more["scaling"]).masked_fill(~torch.ones(6, 6).tril().bool(), float("-inf"))
        if module.layer_idx == 1:
            scores[:, 4, 5, [1, 2]] = float("-inf")
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    transformers.AttentionInterface.register("by_hand", by_hand)
    config._attn_implementation = "by_hand"
    twin = transformers.LlamaForCausalLM(config).double().eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = twin(ids).logits
    assert torch.allclose(changed, expected, atol=1e-10)
    assert not torch.allclose(changed[0, 5], plain[0, 5], atol=1e-4)
    assert torch.equal(changed[0, :5], plain[0, :5])


def test_keys_hidden_by_the_smallest_number_stay_hidden() -> None:
    """As Hugging Face's eager attention hides: a row that loses all its keys sees nothing, not what was hidden."""

    class ByHand(nn.Module):
        def forward(self, q: Tensor, hidden: Tensor) -> Tensor:
            return (q @ q.mT + hidden).softmax(-1) @ q

    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    hidden = torch.full((5, 5), torch.finfo(q.dtype).min).triu(1)
    model = ByHand()
    with torch.no_grad(), regard.edit(model, edits.knock_out(0, 1, 2, [0, 1, 2])):
        changed = model(q, hidden)
    assert not changed[0, 1, 2].any()
    assert changed[0, 1, 3].any()


class OfOurs(nn.Module):
    """Attends by the operation itself."""

    def forward(self, q: Tensor) -> Tensor:
        return regard.attention(q, q, q, mask=masks.causal())


def test_watched_weights_of_the_operation_are_those_of_a_patched_key() -> None:
    model, q, new = OfOurs(), torch.randn(1, 1, 5, 8), 3 * torch.randn(1, 1, 1, 8)
    edit = edits.patch(0, 0, "k", new, positions=2)
    with torch.no_grad(), regard.edit(model, edit), regard.watch(model, keep="qk") as seen:
        model(q)
    k = q.clone()
    k[:, :, 2] = new
    scores = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(seen[0].lse, scores.logsumexp(-1))
    assert seen[0].check().ok


@pytest.mark.parametrize("model", [OfOurs(), Packing()], ids=["operation", "sdpa"])
def test_weights_that_a_fused_kernel_does_not_show_are_said_not_to_be_seen(model: nn.Module) -> None:
    q = torch.randn(1, 6, 5, 4)
    given = (q,) if isinstance(model, OfOurs) else (q, False)
    edit = edits.knock_out(0, 0, queries=3, keys=1, renormalise=False)
    with torch.no_grad(), regard.edit(model, edit), regard.watch(model) as seen:
        model(*given)
    with pytest.raises(LookupError, match="renormalise=False"):
        seen.summary()


@pytest.mark.parametrize("at", [[4, 1], [-1, 1], [2, 2], slice(4, 2, -1)])
def test_positions_of_rows_must_ascend(at: Any) -> None:
    model, q, source = OfOurs(), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 2, 8)
    listed = re.escape(str(list(range(6)[at]) if isinstance(at, slice) else at))
    for edit in (
        edits.patch(0, source=source, positions=at),
        edits.patch(0, None, "v", source, positions=at),
        edits.ablate(0, by=source, queries=at),
        edits.add("", source[0, 0], positions=at),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=listed), regard.edit(model, edit):
            model(q)
