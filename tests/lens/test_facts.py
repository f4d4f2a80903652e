"""What is read from a call: its mask by name, its padding, its bias, and numbers that are none."""

import json
from dataclasses import dataclass
from functools import reduce
from math import inf, nan
from operator import or_

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.backends import reference
from regard.backends.call import Call, prepare
from regard.lens import visibility
from regard.lens.files.container import CaptureFileError, Incoming, Outgoing
from regard.lens.files.records import pack_facts, unpack_facts
from regard.lens.visibility import Facts, RowCount, read_facts, read_weights, summarise_mask
from regard.positions import alibi

B, H, N, D = 3, 2, 7, 5
LEAST = torch.finfo(torch.float32).min


def call_of(nq: int = N, nk: int = N, **arguments: object) -> Call:
    q, k, v = (torch.randn(B, H, n, D) for n in (nq, nk, nk))
    return prepare(q, k, v, **arguments)


def cells(mask: masks.Mask, nq: int = N, nk: int = N) -> Tensor:
    dense = mask.dense(nq, nk)
    return dense if dense.ndim == 4 else dense[None, None]


def numbers(mask: masks.Mask, value: float, nq: int = N, nk: int = N) -> Tensor:
    """The mask as floats: 0 where visible, a number where hidden."""
    return torch.zeros(()).masked_fill(~cells(mask, nq, nk), value)


LEFT, RIGHT = masks.padding([4, 7, 6], side="left"), masks.padding([4, 7, 6])

# ------------------------------------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize(
    ("mask", "sizes", "text"),
    [
        (None, (7, 7), "none"),
        (masks.causal(), (7, 7), "causal"),
        (masks.causal(offset=0), (7, 7), "causal"),
        (masks.causal(offset=0), (3, 7), "causal, offset 0"),
        (masks.causal(offset=4), (3, 7), "causal"),
        (masks.causal(offset=[0, 1, 2]), (7, 7), "causal(offset=[0, 1, 2])"),
        (masks.window(2, 0), (7, 7), "window(2, 0)"),
        (RIGHT & masks.causal(), (7, 7), "padding([4, 7, 6]) & causal()"),
    ],
)
def test_rules_are_called_by_their_own_names(mask, sizes, text):
    assert read_facts(call_of(*sizes, mask=mask)).mask == text


def test_long_names_of_rules_are_cut():
    many = reduce(or_, [masks.window(n, 0) for n in range(20)])
    text = read_facts(call_of(mask=many)).mask
    assert len(text) == 100
    assert text.endswith("…")


@pytest.mark.parametrize("how", ["booleans", "minus infinity", "large negative", "scores"])
@pytest.mark.parametrize(
    ("mask", "text", "causal"),
    [
        (masks.causal(), "causal", "in mask"),
        (masks.window(2, 0), "window(2, 0)", "in mask"),
        (masks.window(2, 1), "window(2, 1)", "no"),
        (RIGHT, "all visible, padding right", "no"),
        (LEFT & masks.causal(), "causal, padding left", "in mask"),
        (masks.documents([0, 0, 1, 1, 1, 2, 2]), "dense 1×1×7×7", "no"),
    ],
)
def test_cells_are_named_alike_however_they_hide(how, mask, text, causal):
    if how == "booleans":
        facts = read_facts(call_of(mask=cells(mask)))
    elif how == "scores":
        scores = torch.randn(B, H, N, N) + numbers(mask, LEAST)
        facts = read_weights(scores, scores.softmax(-1))
        text = text.replace("dense 1×1", "dense 3×2")
    else:
        facts = read_facts(call_of(bias=numbers(mask, -inf if how == "minus infinity" else LEAST)))
    assert (facts.mask, facts.causal) == (text, causal)
    assert facts.bias_kind == {"booleans": None, "scores": "large negative"}.get(how, how)


@dataclass(frozen=True, eq=False, repr=False)
class Foreign(masks.Mask):
    """A mask that only answers: as FlexAttention's functions do."""

    like: masks.Mask

    def bind(self, nq, nk, device, dtype):
        return self.like.bind(nq, nk, device, dtype)

    def bounds(self, grid):
        return self.like.bounds(grid)

    def varies(self):
        return self.like.leading

    def __repr__(self) -> str:
        return "foreign()"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.causal(), "causal"),
        (masks.causal() & LEFT, "causal, padding left"),
        (masks.documents([0, 0, 1, 1, 1, 2, 2]), "foreign()"),
    ],
)
def test_rules_from_elsewhere_are_named_by_what_they_show(mask, text):
    assert read_facts(call_of(mask=Foreign(mask))).mask == text


def test_masks_that_differ_by_head_are_dense():
    assert read_facts(call_of(mask=torch.rand(B, H, N, N) < 0.5)).mask == "dense 3×2×7×7"


@pytest.mark.parametrize(("mask", "offset"), [(masks.causal(), 4), (masks.causal(offset=0), 0), (None, None)])
def test_offset_is_where_the_causal_rule_puts_query_0(mask, offset):
    assert read_facts(call_of(3, 7, mask=mask)).offset == offset
    if mask is not None:
        assert read_facts(call_of(3, 7, mask=cells(mask, 3, 7))).offset == offset


def test_cross_attention_has_no_offset():
    assert read_facts(call_of(3, 7, mask=cells(masks.causal(), 3, 7)), kind="cross").offset is None
    facts = read_facts(call_of(1, 7, mask=masks.padding([3, 5, 4]).dense(1, 7)), kind="cross")
    assert (facts.mask, facts.offset) == ("all visible, padding right", None)


def test_offsets_that_differ_by_batch_row_are_no_one_offset():
    assert read_facts(call_of(mask=masks.causal(offset=[0, 1, 2]))).offset is None


# ------------------------------------------------------------------------------------------------------------ causality


@pytest.mark.parametrize(
    ("arguments", "causal"),
    [
        ({}, "no"),
        ({"mask": masks.causal()}, "flag"),
        ({"mask": masks.causal() & RIGHT}, "flag"),
        ({"mask": cells(masks.causal())}, "in mask"),
        ({"mask": masks.window(2, 0)}, "in mask"),
        ({"bias": numbers(masks.causal(), LEAST)}, "in mask"),
        ({"mask": masks.causal(), "bias": numbers(masks.causal(), LEAST)}, "both"),
        ({"mask": masks.causal(), "bias": numbers(masks.causal(), -inf)}, "both"),
        ({"mask": masks.causal() & masks.dense(cells(masks.causal() & RIGHT))}, "both"),
        ({"mask": masks.causal() & masks.dense(cells(RIGHT))}, "flag"),
        ({"mask": masks.causal(), "bias": numbers(RIGHT, LEAST)}, "flag"),
        ({"mask": masks.causal(), "bias": torch.randn(N, N)}, "flag"),
        ({"bias": torch.randn(N, N)}, "no"),
    ],
)
def test_causality_says_what_hides_the_future(arguments, causal):
    assert read_facts(call_of(**arguments)).causal == causal


def test_one_query_has_no_future():
    assert read_facts(call_of(1, N)).causal == "one query"
    assert read_facts(call_of(1, N, mask=masks.causal())).causal == "flag"


# -------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("mask", [RIGHT, LEFT, LEFT & masks.causal()])
@pytest.mark.parametrize("as_cells", [False, True])
def test_padding_is_what_no_query_sees(mask, as_cells):
    facts = read_facts(call_of(mask=cells(mask) if as_cells else mask))
    side = "right" if mask is RIGHT else "left"
    assert torch.equal(facts.padding, ~cells(RIGHT if side == "right" else LEFT)[:, 0, -1])
    assert facts.sides == (side, None, side)


def test_no_padding_is_none():
    facts = read_facts(call_of(mask=masks.causal()))
    assert facts.padding is None
    assert facts.sides == (None,) * B


def test_sides_are_as_many_as_batch_rows_where_all_share_one_mask():
    facts = read_facts(call_of(mask=torch.tensor([True] * 5 + [False] * 2)))
    assert facts.padding.shape == (1, N)
    assert facts.sides == ("right",) * B


# -------------------------------------------------------------------------------------------------------- rows and bias


def test_rows_that_see_nothing_are_counted_in_every_batch_row_and_head():
    mask = torch.ones(B, H, N, N, dtype=torch.bool)
    mask[1, 1, 3:5] = False
    assert read_facts(call_of(mask=mask)).empty_rows == RowCount(2, 2, (1, 1, 3))
    shared = torch.ones(N, N, dtype=torch.bool)
    shared[4] = False
    assert read_facts(call_of(mask=shared)).empty_rows == RowCount(B * H, B * H, (0, 0, 4))


def test_rows_of_padding_that_see_nothing_are_no_tokens():
    facts = read_facts(call_of(mask=cells(LEFT & masks.causal())))
    assert facts.empty_rows == RowCount((3 + 0 + 1) * H, 0, (0, 0, 0))
    assert read_facts(call_of(mask=cells(LEFT & masks.causal())), kind="cross").empty_rows.tokens == 4 * H


def test_rows_of_padding_follow_the_offset_of_the_causal_mask():
    """3 queries at positions 1 to 3 of a cache with room for 7 keys; positions 0 and 1 of row 0 are padding."""
    real = torch.ones(B, 1, 1, 7, dtype=torch.bool)
    real[0, ..., :2] = False
    cells_ = masks.causal(offset=1).dense(3, 7) & real
    assert read_facts(call_of(3, 7, mask=cells_)).empty_rows == RowCount(H, 0, (0, 0, 0))
    rule = masks.causal(offset=1) & masks.padding(real[:, 0, 0])
    assert read_facts(call_of(3, 7, mask=rule)).empty_rows == RowCount(H, 0, (0, 0, 0))


def test_batch_row_of_nothing_but_padding_is_not_excused():
    facts = read_facts(call_of(mask=masks.padding([0, 7, 7])))
    assert facts.empty_rows == RowCount(H * N, H * N, (0, 0, 0))
    assert facts.sides == ("whole", None, None)


LOOKING = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [False] + [True] * 6])


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (masks.queries([0, 1, 2, 3, 6]), RowCount(B * H * 2, 0, (0, 0, 4))),
        (~masks.queries([4, 5]), RowCount(B * H * 2, 0, (0, 0, 4))),
        (masks.window(1, 1) & masks.queries(LOOKING), RowCount(4 * H, 0, (1, 0, 4))),
        (masks.queries(LOOKING) & ~masks.queries([0]), RowCount((1 + 4 + 1) * H, 0, (0, 0, 0))),
    ],
)
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_rows_of_queries_that_do_not_look_are_excused(mask, rows, kind):
    assert read_facts(call_of(mask=mask), kind=kind).empty_rows == rows


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_rows_that_are_empty_for_another_reason_are_not_excused(kind):
    """Query 0 looks and sees nothing, query 4 does not look."""
    rows = RowCount(B * H * 2, B * H, (0, 0, 0))
    assert read_facts(call_of(mask=masks.causal(offset=-1) & ~masks.queries([4])), kind=kind).empty_rows == rows
    either = (masks.causal(offset=-1) & ~masks.queries([4])) | masks.queries([])
    # Who looks is not said of the whole.
    assert read_facts(call_of(mask=either), kind=kind).empty_rows.tokens == 2 * B * H


def test_padding_and_queries_that_do_not_look_are_excused_together():
    mask = LEFT & masks.causal() & ~masks.queries([5])
    assert read_facts(call_of(mask=mask)).empty_rows == RowCount((3 + 0 + 1 + B) * H, 0, (0, 0, 0))
    assert read_facts(call_of(mask=mask), kind="cross").empty_rows.tokens == 4 * H


def test_example_is_a_token_where_there_is_one():
    mask = cells(LEFT & masks.causal()).clone()
    mask[2, 0, 5] = False
    assert read_facts(call_of(mask=mask)).empty_rows == RowCount(4 * H + H, H, (2, 0, 5))


def test_rows_hidden_by_finite_numbers_alone_see_everything():
    bias = numbers(masks.causal(), LEAST)
    bias[..., 2, :] = LEAST
    facts = read_facts(call_of(bias=bias))
    assert facts.unhidden_rows == RowCount(B * H, B * H, (0, 0, 2))
    assert facts.empty_rows == RowCount()
    assert summarise_mask(call_of(bias=bias)).visible.tolist() == [[[1, 2, 7, 4, 5, 6, 7]]]


def test_bias_is_told_by_its_numbers():
    assert read_facts(call_of(bias=cells(masks.causal()).float())).bias_kind == "zero-one"
    assert read_facts(call_of(bias=torch.randn(N, N))).bias_kind == "additive"
    assert read_facts(call_of(bias=alibi(H))).bias_kind == "additive"
    facts = read_facts(call_of(bias=numbers(masks.causal(), -1e9)))
    assert (facts.bias_kind, facts.bias_from) == ("large negative", -1e9)


@pytest.mark.parametrize("mask", [None, masks.causal(), cells(RIGHT), masks.window(1, 1) | masks.globals([0])])
def test_visible_counts_are_the_rows_of_the_dense_mask(mask):
    call = call_of(mask=mask)
    dense = reference.stages(call).masked > -inf
    assert torch.equal(summarise_mask(call).visible.expand(B, H, N), dense.sum(-1))


# ---------------------------------------------------------------------------------------------------------- bad numbers


@pytest.mark.parametrize("name", ["q", "k", "v", "output", "lse", "bias"])
def test_bad_numbers_are_counted_tensor_by_tensor(name):
    given = {n: torch.randn(B, H, N, D) for n in ("q", "k", "v", "output")}
    given |= {"lse": torch.randn(B, H, N), "bias": torch.randn(1, 1, N, N)}
    given[name].view(-1)[[1, 3]] = nan
    given[name].view(-1)[4] = inf
    call = prepare(given["q"], given["k"], given["v"], bias=given["bias"])
    assert read_facts(call, given["output"], given["lse"]).bad == {name: (2, 1)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_largest_numbers_of_a_dtype_are_not_bad(dtype):
    x = torch.full((1, 1, 3, 2), torch.finfo(dtype).max, dtype=dtype)
    assert read_facts(prepare(x, x, x), -x).bad == {}


def test_minus_infinity_is_bad_but_where_it_means_hidden():
    call = call_of(mask=masks.causal(offset=-1), bias=numbers(masks.causal(), -inf))
    lse = torch.zeros(B, H, N)
    lse[..., 0] = -inf
    assert read_facts(call, None, lse).bad == {}
    lse[1, 1, 5] = -inf
    assert read_facts(call, torch.full((B, H, N, D), -inf), lse).bad == {"output": (0, B * H * N * D), "lse": (0, 1)}


def test_bad_scores_and_weights_are_counted():
    scores = torch.randn(B, H, N, N)
    scores[0, 0, 1, 2], scores[0, 0, 3] = inf, -inf
    weights = scores.softmax(-1)
    assert read_weights(scores, weights).bad == {"scores": (0, 1), "weights": (2 * N, 0)}


# -------------------------------------------------------------------------------------------------- a softmax by itself


def test_column_of_a_sink_is_left_out():
    scores = torch.randn(B, H, N, N + 1)
    scores[..., :N] += numbers(masks.causal(), -inf)
    facts = read_weights(scores, scores.softmax(-1)[..., :N])
    assert (facts.sizes, facts.mask, facts.bias_kind) == ((B, H, N, N), "causal", None)


def test_without_scores_weights_of_zero_are_hidden():
    weights = (torch.randn(B, H, N, N) + numbers(LEFT & masks.causal(), LEAST)).softmax(-1)
    weights = torch.where(cells(LEFT & masks.causal()), weights, 0)
    facts = read_weights(None, weights)
    assert (facts.mask, facts.causal, facts.sides) == ("causal, padding left", "in mask", ("left", None, "left"))


def test_without_weights_scores_say_what_is_hidden():
    facts = read_weights(torch.randn(B, H, 3, N) + numbers(masks.causal(), -1e4, 3), None)
    assert (facts.mask, facts.bias_from is not None, facts.sizes) == ("causal", True, (B, H, 3, N))


def test_scores_that_hide_nothing_are_all_visible():
    scores = torch.randn(B, H, N, N)
    facts = read_weights(scores, scores.softmax(-1))
    assert (facts.mask, facts.bias_kind, facts.bad) == ("none", None, {})


# ------------------------------------------------------------------------------------------------------ small and saved


def there_and_back(facts: Facts, change: dict[str, object] | None = None) -> tuple[Facts, Outgoing]:
    out = Outgoing()
    packed = pack_facts(facts, "0", out) | (change or {})
    text = json.dumps({key: value for key, value in packed.items() if value != "missing"}, allow_nan=False)
    return unpack_facts(json.loads(text), "record 0", Incoming(out.tensors)), out


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mask": cells(LEFT & masks.causal()), "softcap": 30.0},
        {"bias": numbers(masks.causal(offset=-1), LEAST)},
    ],
)
def test_facts_go_through_json_and_back(arguments):
    call = call_of(**arguments)
    call.q[0, 0, 0, 0] = nan
    facts = read_facts(call)
    again, out = there_and_back(facts)
    assert pack_facts(again, "0", Outgoing()) == pack_facts(facts, "0", Outgoing())
    assert (again.empty_rows, again.sizes, again.sides, again.bad) == (
        facts.empty_rows,
        facts.sizes,
        facts.sides,
        facts.bad,
    )
    assert set(out.tensors) == ({"0/bands"} if facts.padding is None else {"0/bands", "0/padding"})
    assert again.softcap == arguments.get("softcap")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"novelty": 1}, "novelty"),
        ({"mask": "missing"}, "mask"),
        ({"tensors": {}}, "bands"),
        ({"tensors": {"bands": "0/bands", "more": "0/bands"}}, "more"),
    ],
)
def test_json_of_something_else_is_refused(change, name):
    with pytest.raises(CaptureFileError, match=name):
        there_and_back(read_facts(call_of()), change)


def test_bands_of_batch_rows_and_heads_that_are_alike_are_kept_once():
    assert read_facts(call_of(mask=torch.ones(B, H, N, N, dtype=torch.bool))).bands.shape == (1, 1, N, N)
    differing = torch.ones(B, H, N, N, dtype=torch.bool)
    differing[1, :, 0, 0] = False
    assert read_facts(call_of(mask=differing)).bands.shape == (B, 1, N, N)


def test_facts_of_a_long_call_are_small():
    x = torch.zeros(1, 1, 4001, 2)
    facts = read_facts(prepare(x, x, x, mask=masks.causal()))
    assert facts.bands.shape == (1, 1, 32, 32)
    assert len(json.dumps(pack_facts(facts, "0", Outgoing()))) < 600


def test_what_was_counted_once_is_not_counted_again(monkeypatch):
    call = call_of(mask=cells(masks.causal()))
    summary = summarise_mask(call)
    assert summary.visible.tolist() == [[[1, 2, 3, 4, 5, 6, 7]]]
    monkeypatch.setattr(visibility, "survey", lambda *_: pytest.fail("counted again"))
    assert read_facts(call, summary=summary).mask == "causal"


def test_numpy_calls_are_read_too():
    x = torch.randn(N, D).numpy()
    assert read_facts(prepare(x, x, x, mask=masks.causal())).mask == "causal"


def test_gradients_are_left_alone():
    q = torch.randn(B, H, N, D, requires_grad=True)
    facts = read_facts(prepare(q, q, q, bias=torch.zeros(N, N, requires_grad=True)), q * 2)
    assert not facts.bands.requires_grad
    assert facts.bad == {}


@pytest.mark.parametrize(("nq", "nk"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys_can_be_read(nq, nk):
    facts = read_facts(call_of(nq, nk))
    assert facts.empty_rows.count == B * H * nq
    assert facts.sizes == (B, H, nq, nk)
