"""Captures of edited runs: which edits were active, what they did, and both from a file."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import edits, masks, metrics
from regard.lens.capture import Capture
from regard.lens.comparison import compare
from regard.lens.edit_records import CapturedEdit, Effect
from regard.lens.files.container import CaptureFileError, read, write

X = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))


def encoder(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def seen_with(*active: Any, model: torch.nn.Module | None = None) -> Capture:
    model = encoder() if model is None else model
    with torch.no_grad(), regard.edit(model, *active), regard.watch(model, keep="qk") as seen:
        model(X)
    return seen


def saved(capture: Capture, path: Path) -> Capture:
    capture.save(path)
    return regard.open(path)


# ------------------------------------------------------------------------------------------------ active edits


def test_capture_names_the_edits_that_were_active_and_so_does_its_file(tmp_path):
    knocked, ablated = edits.knock_out(0, 1, 4, 2), edits.ablate(1, by="mean", queries=slice(2, None))
    seen = seen_with(knocked + ablated)
    assert [repr(edit) for edit in seen.edits] == [repr(knocked), repr(ablated)]
    assert [edit.calls for edit in seen.edits] == [2, 2]
    again = saved(seen, tmp_path / "edited.regard")
    assert again.edits == seen.edits
    assert [(edit.function, edit.values) for edit in again.edits] == [
        ("knock_out", {"layer": 0, "head": 1, "queries": 4, "keys": 2}),
        ("ablate", {"layer": 1, "by": "mean", "queries": {"slice": [2, None, None]}}),
    ]
    for lang, word in (("en", "edited by"), ("ko", "편집")):
        assert f"{word}{': ' if lang == 'ko' else ' '}{knocked!r}\n" in again.summary(lang)
    assert repr(knocked) in repr(again)


def test_tensor_of_an_edit_is_kept_as_shape_norm_and_hash(tmp_path):
    vector = torch.arange(8, dtype=torch.float32)
    seen = saved(seen_with(edits.add("layers.0", vector, scale=2.0)), tmp_path / "steered.regard")
    (single,) = seen.edits
    digest = sha256(vector.numpy().tobytes()).hexdigest()
    summary = {"shape": [8], "dtype": "float32", "norm": pytest.approx(140**0.5), "sha256": digest}
    assert single.values == {"path": "layers.0", "vector": {"tensor": summary}, "scale": 2.0}
    assert repr(single) == f"add(path='layers.0', vector=<(8,), norm 11.83, sha256 {digest[:8]}>, scale=2.0)"
    assert vector.numpy().tobytes() not in (tmp_path / "steered.regard").read_bytes()


def test_masks_and_captures_of_edits_are_kept_as_text(tmp_path):
    model = encoder()
    with torch.no_grad(), regard.watch(model, keep="output") as other:
        model(X)
    active = edits.knock_out(0, edges=masks.causal()) + edits.patch(1, source=other)
    seen = saved(seen_with(active, model=model), tmp_path / "a.regard")
    assert [edit.values.get("edges") for edit in seen.edits] == [{"text": repr(masks.causal())}, None]
    assert seen.edits[1].values["source"] == {"text": repr(other)}


def test_calls_without_an_edit_do_not_count_and_equal_edits_are_one():
    model, single = encoder(), edits.knock_out(0, 1, 4, 2)
    with torch.no_grad(), regard.watch(model) as seen:
        model(X)
        for _ in range(2):
            with regard.edit(model, single):
                model(X)
    assert [(repr(edit), edit.calls) for edit in seen.edits] == [(repr(single), 4)]
    assert "4 of 6" in seen.summary()
    with torch.no_grad(), regard.watch(model) as after:
        model(X)
    assert after.edits == []


def test_edit_of_another_model_is_not_named_but_that_of_a_part_is():
    model, other = encoder(), encoder()
    with torch.no_grad(), regard.watch(model) as seen:
        with regard.edit(other, edits.ablate(0)):
            model(X)
            other(X)
        with regard.edit(model.layers[1], edits.ablate("self_attn")):
            model(X)
    assert [repr(edit) for edit in seen.edits] == ["ablate(layer='self_attn')"]


# ------------------------------------------------------------------------------------------------ effects


def test_effects_survive_the_file_and_are_summarised(tmp_path):
    model, seen = encoder(), seen_with(edits.ablate(0))
    found = regard.effect(lambda: model(X), model, edits.knock_out(0, 1, 4, 2) + edits.ablate(1, 0), metrics.moved(4))
    seen.add_effect(found)
    seen.effects.append(found)  # a live one is written too
    (kept, _) = saved(seen, tmp_path / "a.regard").effects
    assert (kept.value, kept.weight, kept.controls, kept.p_value, kept.metric) == (
        found.value, found.weight, found.controls, found.p_value, found.metric,
    )  # fmt: skip
    assert repr(kept) == repr(found)
    assert f"{found.value:.4g}" in regard.open(tmp_path / "a.regard").summary("ko")


@pytest.mark.parametrize("wrong", [0.3, None, "0.3", edits.ablate(0)])
def test_only_effects_are_kept_as_effects(wrong):
    with pytest.raises(TypeError, match=type(wrong).__name__):
        Capture().add_effect(wrong)


def test_effect_that_is_not_finite_is_not_kept():
    with pytest.raises(ValueError, match="nan"):
        Capture().add_effect(Effect(edits.ablate(0), "logit", 0.0, float("nan")))


# ------------------------------------------------------------------------------------------------------ files of others

EDIT = {"function": "ablate", "values": [["layer", 0]], "calls": 1}
TENSOR = {"shape": [2], "dtype": "float32", "norm": 1.0, "sha256": "0" * 64}
EFFECT = {
    "edit": [EDIT], "metric": "KL", "before": 0.0, "after": 1.0, "weight": None, "controls": [0.5],
    "control_weight": None, "method": "exact",
}  # fmt: skip


def forged(path: Path, **more: Any) -> Capture:
    """A capture with other edits or effects in its header, and right checksums."""
    seen_with(edits.ablate(0)).save(path)
    header, tensors = read(path)
    write(path, json.loads(json.dumps(header | more)), tensors)
    return regard.open(path)


def test_forged_header_that_is_right_opens(tmp_path):
    values = [["layer", "a.b"], ["by", {"tensor": TENSOR}], ["queries", {"slice": [None, 3, None]}], ["head", [1, 2]]]
    seen = forged(tmp_path / "a.regard", edits=[EDIT | {"values": values}], effects=[EFFECT])
    assert repr(seen.edits[0]).startswith(
        "ablate(layer='a.b', by=<(2,), norm 1, sha256 00000000>, queries=slice(None, 3"
    )
    assert seen.effects == [Effect((CapturedEdit("ablate", {"layer": 0}),), "KL", 0.0, 1.0, None, (0.5,))]


WRONG_VALUES = [
    ["layer"], ["layer", 0, 1], [3, 0], ["a b", 0], ["layer", "\x1b[2J"], ["layer", "x" * 1001], ["layer", [0, True]],
    ["layer", {"slice": [0, 1]}], ["layer", {"slice": [0, 1, "2"]}], ["layer", {"text": 3}], ["layer", {"other": "x"}],
    ["layer", {"text": "x", "more": 1}], ["by", {"tensor": TENSOR | {"sha256": "xyz"}}],
    ["by", {"tensor": TENSOR | {"dtype": "float31"}}], ["by", {"tensor": TENSOR | {"shape": [-1]}}],
    ["by", {"tensor": TENSOR | {"norm": -1.0}}], ["by", {"tensor": {"shape": [2]}}],
]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        *({"edits": [EDIT | {"values": [value]}]} for value in WRONG_VALUES),
        {"edits": [EDIT | {"values": [["layer", 10**400]]}]},
        {"edits": [EDIT | {"values": [["by", {"tensor": TENSOR | {"norm": 10**400}}]]}]},
        {"edits": {}},
        {"edits": ["ablate"]},
        {"edits": [EDIT | {"function": "\x1b[2J"}]},
        {"edits": [EDIT | {"calls": -1}]},
        {"edits": [EDIT | {"more": 1}]},
        {"effects": [EFFECT | {"edit": []}]},
        {"effects": [EFFECT | {"edit": ["ablate"]}]},
        {"effects": [EFFECT | {"metric": "\x1b[2J"}]},
        {"effects": [EFFECT | {"method": "guessed"}]},
        {"effects": [EFFECT | {"controls": [0.5, "x"]}]},
        {"effects": [EFFECT | {"after": 1e308}]},
        {"effects": [EFFECT | {"after": True}]},
        {"effects": [{"edit": [EDIT]}]},
    ],
)
def test_what_is_never_written_is_refused(tmp_path, more):
    with pytest.raises(CaptureFileError, match=r"a\.regard"):
        forged(tmp_path / "a.regard", **more)


# ------------------------------------------------------------------------------------------------ comparison


def test_comparison_names_the_edits_and_ranks_the_heads_by_what_moved():
    model = encoder()
    with torch.no_grad(), regard.watch(model, keep="qk") as plain:
        model(X)
    single = edits.knock_out(1, 1, queries=[3, 4, 5], keys=2)
    found = compare(plain, seen_with(single, model=model), tolerance=1e-5)
    assert [[repr(edit) for edit in edits] for edits in found.edits] == [[], [repr(single)]]
    (only,) = found.heads  # of the last layer: nothing behind it that could change
    assert (only.path, only.n, only.head) == (plain.names[1], 0, 1)
    weight = plain[1].row(3)[0, 1, 2] + plain[1].row(4)[0, 1, 2] + plain[1].row(5)[0, 1, 2]
    assert only.moved == pytest.approx(weight.item() / 6, rel=1e-5)  # what the key had is with the others now
    assert f"B was edited by {single!r}" in found.text()
    assert "A: 편집 없음" in found.text("ko")


def test_comparison_of_plain_runs_says_nothing_of_edits():
    plain = seen_with(edits.ablate(0))
    plain.edits.clear()
    assert "edited" not in compare(plain, plain).text()


def test_heads_are_ranked_by_received_weights_where_there_is_no_map():
    model = encoder()
    captures = []
    for active in (edits.ablate(0, 0), edits.ablate(0, 1)):
        with torch.no_grad(), regard.edit(model, active), regard.watch(model, measures=["received"]) as seen:
            model(X)
        captures.append(seen)
    found = compare(*captures)
    assert {(head.path, head.head) for head in found.heads} == {(captures[0].names[1], 0), (captures[0].names[1], 1)}
    assert found.heads[0].moved >= found.heads[1].moved > 0
    assert found.heads == tuple(sorted(found.heads, key=lambda head: -head.moved))
    assert replace(found.heads[0], n=2).where.endswith("[2]")


# -------------------------------------------------------------------------------------------- weights after edits


@pytest.mark.parametrize("head", [None, 1, [0, 2]])
def test_weights_of_an_edited_run_are_the_same_from_its_file(tmp_path, head):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(9, 3, 16, batch_first=True).eval()
    single, x = edits.knock_out(0, head, queries=4, keys=2), torch.randn(2, 6, 9)
    with torch.no_grad(), regard.edit(model, single), regard.watch(model, keep="qk") as seen:
        model(x)
    again, hidden = (
        saved(seen, tmp_path / "edited.regard"),
        [0, 1, 2] if head is None else [head] if head == 1 else head,
    )
    assert torch.equal(again[0].row(4), seen[0].row(4))
    weights = again[0].row(4)[:, :, 2]  # (B, H)
    assert [h for h in range(3) if bool((weights[:, h] == 0).all())] == hidden
    torch.testing.assert_close(again[0].row(4).sum(-1), torch.ones(2, 3))
    if head is not None:
        assert "knock_out" in again.calls("self_attn")[0].facts.mask


@pytest.mark.parametrize(
    ("metric", "korean"),
    [
        (metrics.moved(5), "5번 토큰의 벡터"),
        (metrics.logit_diff(3, 7), "로짓 3 − 로짓 7"),
        (metrics.log_prob(3), "log p(3)"),
        (metrics.kl(), "KL 발산"),
        (metrics.Metric("vector of “it”", lambda new, old: new), "“it”의 벡터"),
        (metrics.Metric("my vector of token 5", lambda new, old: new), "my vector of token 5"),
    ],
)
def test_effect_names_its_metric_in_the_language(metric, korean):
    found = Effect((edits.ablate(0, 1),), metric.name, 0.0, 0.5)
    assert found.text("ko").splitlines()[1].strip().startswith(f"{korean}: 0.5")
    assert f"{metric.name}: 0.5" in found.text()
