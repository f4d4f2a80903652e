"""One test per finding of the mask doctor, and a healthy model in which it finds nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.backends.call import prepare
from regard.lens.doctor import CHECKS, Diagnosis, Examination, Finding, examine
from regard.lens.visibility import Facts, read_facts

B, H, N, D = 3, 5, 7, 2
LEAST = torch.finfo(torch.float32).min
LEFT, RIGHT = masks.padding([4, 7, 6], side="left"), masks.padding([4, 7, 6])


@dataclass
class Seen:
    """A record as a capture keeps it, as far as the doctor reads it."""

    path: str
    facts: Facts | None
    n: int = 0
    kind: str = "self"
    heads: Mapping[str, Any] = field(default_factory=dict)


def facts(
    nq: int = N, nk: int = N, bad: Mapping[str, float] | None = None, kind: str = "self", **arguments: Any
) -> Facts:
    """The facts of a call; `bad` writes a number into one of its tensors."""
    made = {name: torch.randn(B, H, n, D) for name, n in (("q", nq), ("k", nk), ("v", nk), ("output", nq))}
    for name, value in (bad or {}).items():
        made[name][0, 0, 0, :] = value
    return read_facts(prepare(made["q"], made["k"], made["v"], **arguments), made["output"], kind=kind)


def layers(count: int, each: Facts, name: str = "layers.{}.attn", **rest: Any) -> list[Seen]:
    return [Seen(name.format(n), each, **rest) for n in range(count)]


def hidden(mask: masks.Mask, value: float) -> Tensor:
    return torch.zeros(()).masked_fill(~mask.dense(N), value)


def only(diagnosis: Diagnosis, code: str) -> Finding:
    assert [finding.code for finding in diagnosis.findings] == [code], str(diagnosis)
    return diagnosis.findings[0]


# -------------------------------------------------------------------------------------------------------------- healthy


@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.causal().dense(N),
        masks.window(2, 0),
        RIGHT,
        RIGHT.dense(N),
        masks.causal() & LEFT,
        (masks.causal() & LEFT).dense(N),
        (masks.window(1, 1) | masks.globals([2])) & ~masks.queries([2]),
        masks.window(1, 1) & masks.queries(torch.arange(N) != torch.tensor([[0], [5], [N]])),
    ],
)
def test_healthy_stack_has_no_findings(mask):
    heads = {name: torch.full((B, H), 0.4) for name in ("uniform", "first", "one key", "spread")}
    diagnosis = examine(layers(4, facts(mask=mask), heads=heads))
    assert diagnosis.findings == ()
    assert diagnosis.ok
    assert len(diagnosis.masks) == 1


def test_healthy_encoder_decoder_that_generates_has_no_findings():
    encoder = layers(2, facts(mask=RIGHT.dense(N)), "encoder.{}.attn")
    start = layers(2, facts(mask=masks.causal() & LEFT), "decoder.{}.attn")
    across = [Seen("decoder.0.cross", facts(3, N, mask=RIGHT.dense(3, N), kind="cross"), kind="cross")]
    steps = [Seen(f"decoder.{n}.attn", facts(1, N + t), n=t) for t in (1, 2, 3) for n in range(2)]
    assert examine([*encoder, *start, *across, *steps]).findings == ()


def test_left_padding_written_as_the_smallest_number_is_healthy():
    """The rows of padding have every key hidden by finite numbers; nobody reads them."""
    diagnosis = examine(layers(2, facts(bias=hidden(masks.causal() & LEFT, LEAST))))
    assert diagnosis.findings == ()
    assert diagnosis.masks[0].facts.unhidden_rows.count > 0


def test_nothing_seen_is_nothing_found():
    diagnosis = examine([])
    assert (diagnosis.ok, diagnosis.findings, diagnosis.masks, diagnosis.calls) == (True, (), (), 0)


def test_calls_that_could_not_be_read_are_counted_and_not_judged():
    diagnosis = examine([Seen("a", None), Seen("b", facts())])
    assert (diagnosis.calls, diagnosis.unread, diagnosis.findings) == (2, 1, ())


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_that_see_nothing_though_they_look_are_an_error():
    finding = only(examine(layers(2, facts(mask=masks.causal(offset=-1) & ~masks.queries([3])))), "empty rows")
    assert dict(finding.values) == {"tokens": B * H, "total": B * H * N, "example": (0, 0, 0)}


def test_rows_that_see_nothing_are_an_error_with_an_example():
    mask = torch.ones(B, H, N, N, dtype=torch.bool)
    mask[1, 2, 3] = False
    diagnosis = examine(layers(3, facts(mask=mask)))
    finding = only(diagnosis, "empty rows")
    assert finding.severity == "error"
    assert not diagnosis.ok
    assert finding.paths == ("layers.0.attn", "layers.1.attn", "layers.2.attn")
    for named in ("1 of 105", "batch row 1, head 2, query 3"):
        assert named in finding.text()


def test_rows_hidden_by_finite_numbers_alone_are_a_warning():
    bias = hidden(masks.causal(), -1e9)
    bias[2] = -1e9
    finding = only(examine(layers(2, facts(bias=bias))), "unhidden rows")
    assert finding.severity == "warning"
    assert "(-1e+09 and below)" in finding.text()
    assert "batch row 0, head 0, query 2" in finding.text()


def test_floats_of_zero_and_one_are_an_error():
    finding = only(examine(layers(2, facts(bias=masks.causal().dense(N).float()))), "zero-one mask")
    assert finding.severity == "error"
    assert "mask.bool()" in finding.advice()


# -------------------------------------------------------------------------------------------------------------- padding


def test_left_padding_in_an_encoder_is_a_warning():
    finding = only(examine(layers(2, facts(mask=LEFT.dense(N)))), "left padding")
    assert finding.severity == "warning"
    assert "2 of 3" in finding.text()


def test_left_padding_where_the_mask_is_of_another_shape_is_none_of_an_encoder():
    assert examine(layers(2, facts(mask=masks.prefix(3) & LEFT))).findings == ()


def test_right_padding_in_a_decoder_that_generates_is_a_warning():
    start = layers(2, facts(mask=masks.causal() & RIGHT))
    steps = layers(2, facts(1, N + 1), n=1)
    finding = only(examine([*start, *steps]), "right padding")
    assert finding.severity == "warning"
    assert "2 of 3" in finding.text()
    assert finding.paths == ("layers.0.attn", "layers.1.attn")


def test_right_padding_in_one_pass_of_a_decoder_is_a_note():
    start = layers(2, facts(mask=(masks.causal() & RIGHT).dense(N)))
    diagnosis = examine(start)
    assert only(diagnosis, "right padding once").severity == "note"
    assert diagnosis.ok
    assert only(examine(start, generates=True), "right padding").severity == "warning"


# ------------------------------------------------------------------------------------------------------------ causality


def test_causal_flag_from_the_upper_left_behind_a_cache_is_a_warning():
    finding = only(
        examine([Seen("attn", facts()), Seen("attn", facts(3, N, mask=masks.causal(offset=0)), n=1)]), "upper left"
    )
    assert finding.severity == "warning"
    for named in ("3 queries", "7 keys", "query 0", "position 0", "(4)"):
        assert named in finding.text()
    one = examine([Seen("attn", facts(1, N, mask=masks.causal(offset=0)))])
    assert only(one, "upper left").severity == "warning"


def test_first_call_may_fill_a_cache_with_room_for_more():
    finding = only(examine([Seen("attn", facts(3, N, mask=masks.causal(offset=0)))]), "upper left")
    assert finding.severity == "note"


def test_causal_flag_at_the_usual_place_is_healthy():
    assert examine([Seen("attn", facts(3, N, mask=masks.causal()), n=1)]).findings == ()
    assert examine([Seen("attn", facts(N, 3, mask=masks.causal(offset=0)), n=1)]).findings == ()


def test_stack_of_which_some_layers_are_not_causal_is_a_warning():
    run = layers(4, facts(mask=masks.causal()))
    run[2].facts = facts()
    finding = only(examine(run), "mixed causality")
    assert finding.severity == "warning"
    assert finding.paths == ("layers.2.attn",)
    for named in ("layers.0–1,3.attn", "layers.2.attn"):
        assert named in finding.text()


def test_encoder_beside_a_causal_decoder_is_healthy():
    run = layers(2, facts(), "encoder.{}.attn") + layers(2, facts(mask=masks.causal()), "decoder.{}.attn")
    assert examine(run).findings == ()


def test_cross_attention_need_not_be_causal():
    run = layers(2, facts(mask=masks.causal()), "decoder.{}.attn")
    run += layers(2, facts(kind="cross"), "decoder.{}.attn", kind="cross")
    assert examine(run).findings == ()


def test_decoder_by_name_that_hides_nothing_is_a_note():
    diagnosis = examine(layers(2, facts(mask=RIGHT.dense(N)), "Decoder.{}.attn"))
    finding = only(diagnosis, "decoder sees ahead")
    assert (finding.severity, diagnosis.ok) == ("note", True)
    assert "all visible, padding right" in finding.text()


def test_future_hidden_twice_is_a_note():
    twice = facts(mask=masks.causal(), bias=hidden(masks.causal(), LEAST))
    assert only(examine(layers(2, twice)), "causal twice").severity == "note"


def test_masks_that_differ_between_layers_are_a_note():
    run = layers(4, facts(mask=masks.causal()))
    run[1].facts = run[3].facts = facts(mask=masks.window(2, 0))
    finding = only(examine(run), "masks differ")
    assert finding.severity == "note"
    for named in ("causal: layers.0,2.attn", "window(2, 0): layers.1,3.attn"):
        assert named in finding.text()


def test_masks_that_differ_by_a_bias_alone_say_so():
    run = layers(2, facts())
    run[1].facts = facts(bias=torch.linspace(-3, 0, N * N).reshape(N, N))
    text = only(examine(run), "masks differ").text()
    for named in ("none: layers.0.attn", "(additive): layers.1.attn"):
        assert named in text


def test_masks_of_different_calls_are_not_compared():
    run = [
        Seen("layers.0.attn", facts(mask=masks.causal())),
        Seen("layers.0.attn", facts(5, 12, mask=masks.causal()), n=1),
    ]
    assert examine(run).findings == ()


# ---------------------------------------------------------------------------------------------------------- bad numbers


@pytest.mark.parametrize(("value", "name"), [(nan, "nan"), (inf, "infinity"), (-inf, "infinity")])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
def test_bad_numbers_that_came_in_are_told_from_those_born_here(value, name, tensor):
    run = layers(4, facts())
    run[1].facts = facts(bad={tensor: value, "output": value})
    run[2].facts = facts(bad={"q": value})
    finding = only(examine(run), f"{name} arrived")
    assert (finding.severity, finding.path) == ("error", "layers.1.attn")
    assert f"{tensor} (2)" in finding.text()
    assert dict(finding.values)["later"] == 1


@pytest.mark.parametrize(("value", "name"), [(nan, "nan"), (inf, "infinity")])
def test_bad_numbers_born_in_a_layer_are_named_with_the_tensor(value, name):
    run = layers(3, facts())
    run[2].facts = facts(bad={"output": value})
    finding = only(examine(run), f"{name} born")
    assert (finding.severity, finding.path) == ("error", "layers.2.attn")
    assert "output (2)" in finding.text()
    assert "overflow" in finding.advice()


def test_nan_beside_rows_that_see_nothing_is_put_down_to_them():
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[0] = False
    findings = examine([Seen("attn", facts(mask=mask, bad={"output": nan}))]).findings
    assert [finding.code for finding in findings] == ["empty rows", "nan born"]
    assert "rows" in findings[1].advice()


def test_nan_and_infinity_have_each_their_own_first_layer():
    run = layers(3, facts())
    run[0].facts, run[1].facts = facts(bad={"k": inf}), facts(bad={"v": nan})
    assert [(f.code, f.path) for f in examine(run).findings] == [
        ("nan arrived", "layers.1.attn"),
        ("infinity arrived", "layers.0.attn"),
    ]


# ---------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("name", ["first", "one key"])
def test_heads_that_rest_on_one_key_are_counted_per_layer(name):
    values = torch.full((B, H), 0.5)
    values[:, 1:3] = torch.tensor([[0.83], [0.95], [0.93]])  # above 0.9 on average
    values[:, 3] = torch.tensor([1.0, 1.0, 0.6])  # below
    run = layers(3, facts(), heads={name: values})
    run[2].heads = {name: torch.zeros(B, H)}
    diagnosis = examine(run)
    finding = only(diagnosis, "sinks")
    assert (finding.severity, diagnosis.ok) == ("note", True)
    for named in ("4 of 15", "0.9", "layers.0–1.attn: 2"):
        assert named in finding.text()


@pytest.mark.parametrize(("name", "dead", "alive"), [("uniform", 0.98, 0.97), ("spread", 0.001, 0.002)])
def test_heads_that_tell_nothing_apart_are_counted_per_layer(name, dead, alive):
    values = torch.full((B, H), alive, dtype=torch.float64)
    values[:, 4] = dead
    finding = only(examine([Seen("attn", facts(), heads={name: values.numpy()})]), "dead heads")
    assert "1 of 5 heads" in finding.text()
    assert finding.text().endswith("per layer: attn: 1")


def test_heads_with_large_logits_are_named_with_the_largest_of_all_calls():
    first, later = torch.full((B, H), 9e3), torch.full((B, H), 9e3)
    first[0, 3], later[1, 3], later[0, 1] = 2e4, 3e5, 1.5e4
    quiet = {"largest logit": torch.tensor([[1e4, -1e9, nan, inf, -inf]])}
    heads = ({"largest logit": values} for values in (first, later))
    run = [Seen("attn", facts(), n=n, heads=given) for n, given in enumerate(heads)]
    finding = only(examine([*run, Seen("other", facts(), heads=quiet)]), "large logits")
    assert (finding.severity, finding.paths) == ("warning", ("attn",))
    assert dict(finding.values) == {"count": 2, "total": H, "list": "3 (3e+05), 1 (1.5e+04)"}


def test_of_many_heads_with_large_logits_the_first_are_named():
    many = torch.linspace(2e4, 1e4 + 1, 12).expand(1, 12)
    finding = only(examine([Seen("attn", facts(), heads={"largest logit": many})]), "large logits")
    values = dict(finding.values)
    assert (values["count"], values["list"].count("("), values["list"][-1]) == (12, 8, "…")


def test_a_head_that_is_both_first_and_one_key_counts_once():
    ones = torch.ones(B, H)
    finding = only(examine([Seen("attn", facts(), heads={"first": ones, "one key": ones})]), "sinks")
    assert dict(finding.values)["count"] == H


def test_heads_are_not_judged_on_three_keys():
    ones = torch.ones(B, H)
    assert examine([Seen("attn", facts(3, 3), heads={"first": ones, "uniform": ones})]).findings == ()


def test_a_layer_is_judged_once_however_often_it_is_called():
    ones = {"first": torch.ones(B, H)}
    run = [Seen("attn", facts(), heads=ones), Seen("attn", facts(1, N), n=1, heads=ones)]
    assert dict(only(examine(run), "sinks").values)["total"] == H


def test_heads_whose_numbers_are_none_are_left_out():
    assert examine([Seen("attn", facts(), heads={"first": torch.full((B, H), nan)})]).findings == ()


# ------------------------------------------------------------------------------------------------------------- together


def test_findings_come_the_gravest_first():
    mask = (masks.causal() & RIGHT).dense(N).clone()
    mask[1, 0, 4] = False
    run = layers(2, facts(mask=mask, bad={"v": nan}))
    run += [Seen("other", facts(bias=torch.ones(N, N).tril()))]
    severities = [finding.severity for finding in examine(run, generates=True).findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert set(severities) == {"error", "warning"}


def test_findings_alike_are_said_once_for_all_layers():
    run = layers(12, facts(bias=torch.ones(N, N).tril()), "encoder.layer.{}.self")
    finding = only(examine(run), "zero-one mask")
    assert finding.where == "encoder.layer.0–11.self"


def test_checks_of_the_caller_run_instead_of_ours():
    """For instance a softcap that the model's settings ask for and its kernel was not given."""

    def softcap(case: Examination) -> list[Finding]:
        return [Finding("note", "causal twice", (r.path,)) for r, f in case.read if f.softcap is None]

    run = [Seen("a", facts(bias=torch.ones(N, N).tril())), Seen("b", facts(softcap=30.0))]
    assert [f.path for f in examine(run, checks=[softcap]).findings] == ["a"]
    both = examine(run, checks=[*CHECKS, softcap]).findings
    assert [f.code for f in both] == ["zero-one mask", "causal twice"]


def test_layers_with_one_mask_are_one_line():
    run = [*layers(6, facts(mask=masks.causal())), Seen("pool", facts(3, N, kind="cross"), kind="cross")]
    uses = examine(run).masks
    assert [(use.paths, use.calls, use.kind, use.facts.mask) for use in uses] == [
        (tuple(f"layers.{n}.attn" for n in range(6)), 6, "self", "causal"),
        (("pool",), 1, "cross", "none"),
    ]


def test_same_cells_with_other_padding_are_another_mask():
    run = [Seen("a", facts(mask=RIGHT.dense(N))), Seen("b", facts(mask=masks.padding([5, 7, 6]).dense(N)))]
    assert len(examine(run).masks) == 2


def test_steps_of_generation_are_one_line():
    run = [Seen("attn", facts(mask=masks.causal()))]
    run += [Seen("attn", facts(1, N + step), n=step) for step in range(1, 6)]
    uses = examine(run).masks
    assert [(use.calls, use.keys) for use in uses] == [(1, (7, 7)), (5, (8, 12))]


def test_steps_with_a_cache_of_fixed_size_are_one_line():
    filled = [torch.arange(N) <= step for step in range(2, 6)]
    run = [Seen("attn", facts(1, N, mask=mask.view(1, N)), n=n) for n, mask in enumerate(filled)]
    assert [(use.calls, use.facts.mask) for use in examine(run).masks] == [(4, "all so far")]
