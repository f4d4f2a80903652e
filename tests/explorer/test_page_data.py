"""What an exported page carries, and that the page makes the same answers of it as Python does."""

import json
import shutil
import subprocess
import zlib
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from unpacking import unpacked

import regard
from regard.explorer import answers, export
from regard.explorer.export import bundle, modules, page_data
from regard.session.heads import one_head
from regard.session.session import Session

node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's modules")
KEYS = 13


def session(n: int = KEYS, keep: str | None = "qk", layers: int = 2, heads: int = 3) -> Session:
    """A small decoder with sharp heads, over tokens of which one is a trap for HTML."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(5 * heads, heads, 7, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    for one in model.layers:
        one.self_attn.in_proj_weight.data.mul_(4)
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(n)
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:
        model(torch.randn(1, n, 5 * heads), mask=hidden, is_causal=True)
    return Session("toy", seen, ("</script>", *(f"w{i}" for i in range(1, n))))


def one(data: dict[str, Any]) -> dict[str, Any]:
    (found,) = data["sessions"].values()
    return found


def numbers(array: dict[str, Any]) -> np.ndarray[Any, Any]:
    """An array read back as carrying.py says it is written."""
    (kind,) = {"f32", "u8", "u16", "u32"} & set(array)
    raw = b64decode(array[kind])
    plain = zlib.decompress(raw) if array.get("deflate") else raw
    values = np.frombuffer(plain, {"f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}[kind])
    return values.reshape(array["shape"]) * array.get("unit", 1)


def asked(data: dict[str, Any], what: str) -> Any:
    """What the page's EmbeddedSource answers to a question, with arrays as lists; {"error"} for what it throws."""
    script, name = bundle(modules(), "source/embedded.js")
    ask = f"""
const source = new {name}.EmbeddedSource({json.dumps(data)});
const plain = (name, value) => (value instanceof Float32Array ? Array.from(value) : value); // NaN becomes null
const all = async () => {what};
console.log(JSON.stringify(await all().catch((error) => ({{ error: error.message }})), plain));
"""
    done = subprocess.run(
        ["node", "--input-type=module"], input=script + ask, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def exact(s: Session, layer: int, head: int) -> np.ndarray[Any, Any]:
    return one_head(s.layers[layer].view.weights, head).tile(slice(None), slice(None)).numpy()


# ------------------------------------------------------------------------------------------------------ what is carried


def test_a_small_capture_is_carried_whole():
    s = session()
    data = page_data(s, "ko")
    mine = one(data)
    assert (data["version"], data["lang"]) == (1, "ko")
    assert mine["overview"] == answers.overview(s, "ko")
    assert mine["left_out"] is None
    assert mine["labels"] is None
    assert sorted(mine["heads"]) == sorted(mine["arrays"]) == [f"{i}.{h}" for i in range(2) for h in range(3)]
    assert mine["heads"]["1.2"] == answers.head(s, 1, 2, "ko")
    for lang in ("en", "ko"):
        assert mine["sentences"][lang]["1.2"] == answers.head(s, 1, 2, lang)["sentence"]
    for layer in range(2):
        for head in range(3):
            array = mine["arrays"][f"{layer}.{head}"]["weights"]
            assert "error" not in array
            np.testing.assert_array_equal(numbers(array), exact(s, layer, head))


def test_all_of_it_is_json_without_nan():
    json.dumps(page_data(session()), allow_nan=False)


@pytest.mark.parametrize(
    ("room", "words", "korean"),
    [
        (2 * 6 * KEYS**2, "1/65535", "가중치는 1/65535 단위로 반올림했습니다."),
        (1000, "1/200 of the largest of their head", "가중치는 헤드마다 최댓값의 1/200 단위로 반올림했습니다."),
    ],
)
def test_weights_beyond_the_room_are_rounded_and_say_by_how_much(monkeypatch, room, words, korean):
    monkeypatch.setattr(export, "ROOM", room)
    monkeypatch.setattr(export, "STEP_ROOM", 1000)
    monkeypatch.setattr(export, "STEP_BYTES", 150)  # of two heads
    s = session()
    mine = one(page_data(s))
    for head in range(3):
        array, weights = mine["arrays"][f"1.{head}"]["weights"], exact(s, 1, head)
        step = 1 / 65535 if room > 1000 else weights.max() / 200
        if (1, head) != (mine["overview"]["opening"]["layer"], mine["overview"]["opening"]["head"]):
            assert array["error"] == pytest.approx(step / 2)
        assert np.abs(numbers(array) - weights).max() <= array["error"] * (1 + 1e-3)  # and half an fp32 step
    assert "q" not in mine["arrays"]["1.2"]
    assert mine["left_out"]["en"] == (
        f"Weights are rounded to {words}. It holds the steps of the 3 strongest links of 2 heads. "
        "`regard serve` shows everything."
    )
    assert mine["left_out"]["ko"] == (
        f"{korean} 계산 과정은 헤드 2개의 가장 강한 연결 3개씩만 들어 있습니다. "
        "`regard serve`에서는 모두 볼 수 있습니다."
    )


def test_the_head_that_a_page_opens_on_is_rounded_least(monkeypatch):
    monkeypatch.setattr(export, "ROOM", 1000)
    s = replace(session(), opening={"layer": 1, "head": 2, "token": 3, "key": None})
    errors = {name: array["weights"]["error"] for name, array in one(page_data(s))["arrays"].items()}
    assert errors.pop("1.2") == 0.5 / 65535
    assert min(errors.values()) > 1e-4


@node
def test_the_page_pools_the_map_that_is_not_carried(monkeypatch):
    s = session(n=131, layers=1)
    monkeypatch.setattr(export, "ROOM", 1000)
    data = page_data(s)
    array = one(data)["arrays"]["0.1"]["weights"]
    assert one(data)["heads"]["0.1"]["map"] is None
    got = asked(data, '(await source.head("1", 0, 1, "en")).map')
    theirs = unpacked(answers.head(s, 0, 1)["map"])
    assert got["shape"] == list(theirs.shape) == [64, 64]
    most = -(-131 // 64) * array["error"]  # of all columns of a cell
    np.testing.assert_allclose(np.array(got["data"]).reshape(64, 64), theirs, atol=most * (1 + 1e-3), rtol=0)


def test_every_weight_of_16_by_16_patches_a_cls_and_four_registers_is_carried(monkeypatch):
    monkeypatch.setattr(export, "ROOM", 1 << 17)  # less than one head
    (array,) = one(page_data(session(n=261, layers=1, heads=1)))["arrays"].values()
    assert array["weights"]["shape"] == [261, 261]


def test_of_long_texts_the_strongest_heads_carry_rows_and_others_links(monkeypatch):
    monkeypatch.setattr(export, "SHORT", KEYS - 1)
    monkeypatch.setattr(export, "ROOM", 2 * KEYS * KEYS * 2)  # two heads of two bytes; links of three
    monkeypatch.setattr(export, "LINKS", 4)
    s = session()
    mine = one(page_data(s))
    whole = [name for name, array in mine["arrays"].items() if "weights" in array]
    links = [name for name, array in mine["arrays"].items() if "top" in array]
    assert (len(whole), len(links)) == (2, 3)
    best = {name: export.strength(answer) for name, answer in mine["heads"].items()}
    order = sorted(best, key=lambda name: -best[name])
    assert (set(order[:2]), set(order[2:5])) == (set(whole), set(links))
    assert mine["left_out"]["en"].startswith(
        "This file holds every weight of 2 of 6 heads. Of 3 heads it holds the 4 strongest links of each token. "
        "Of 1 heads it holds the map and the strongest links only. Weights are rounded to 1/65535."
    )


def test_links_are_the_strongest_of_each_query(monkeypatch):
    monkeypatch.setattr(export, "SHORT", 1)
    monkeypatch.setattr(export, "ROOM", KEYS * KEYS)  # room for links, not for a whole head
    monkeypatch.setattr(export, "LINKS", 2)
    monkeypatch.setattr(export, "AT_ONCE", 3 * KEYS)  # in five parts
    s = session(layers=1, heads=1)
    top = one(page_data(s))["arrays"]["0.0"]["top"]
    index, weight, weights = numbers(top["index"]), numbers(top["weight"]), exact(s, 0, 0)
    assert top["keys"] == KEYS
    for i in range(KEYS):
        order = np.argsort(-weights[i])[:2]
        np.testing.assert_array_equal(index[i, weight[i] > 0], order[weights[i, order] > 1e-5])
        np.testing.assert_allclose(weight[i], weights[i, order], atol=top["weight"]["error"] * (1 + 1e-3), rtol=0)


def test_weights_that_are_no_numbers_stay_so(monkeypatch):
    monkeypatch.setattr(export, "ROOM", 1000)
    weights = torch.full((2, 3), 0.25)
    weights[1, 2] = torch.nan
    array = export.packed_weights(weights, export.LEVELS)
    assert "error" not in array
    np.testing.assert_array_equal(numbers(array), weights)


def test_links_stop_where_they_would_take_too_long(monkeypatch):
    monkeypatch.setattr(export, "SHORT", 1)
    monkeypatch.setattr(export, "ROOM", KEYS * KEYS)
    monkeypatch.setattr(export, "LINKS", 1)
    monkeypatch.setattr(export, "WORK", 2 * KEYS * KEYS)
    assert len(one(page_data(session()))["arrays"]) == 2


def test_without_queries_and_keys_there_are_no_rows_and_the_page_is_told():
    mine = one(page_data(session(keep=None)))
    assert mine["arrays"] == {}
    assert mine["left_out"]["en"] == (
        "Of 6 heads it holds the map and the strongest links only. The steps are not in it. "
        "The capture was made without queries and keys."
    )


def test_labels_beyond_those_of_the_overview_are_carried(monkeypatch):
    monkeypatch.setattr(answers, "FIRST_LABELS", 5)
    labels = json.loads(zlib.decompress(b64decode(one(page_data(session()))["labels"])))
    assert labels == ["</script>", *(f"w{i}" for i in range(1, KEYS))]


def test_a_language_that_is_not_spoken_is_refused():
    with pytest.raises(ValueError, match=r"lang.*'fr'"):
        page_data(session(), "fr")


def test_arrays_that_shrink_are_compressed_and_others_are_not():
    small = export.packed(np.zeros((3, 50)), "f32")
    noise = export.packed(np.random.default_rng(0).standard_normal((3, 50)), "f32")
    assert small["deflate"]
    assert "deflate" not in noise
    np.testing.assert_array_equal(numbers(small), np.zeros((3, 50)))
    assert numbers(export.packed(np.array([70000]), "u32")) == [70000]


# ------------------------------------------------------------------------------------------------ what the page makes


@node
def test_the_page_gives_the_rows_that_python_gives():
    s = session()
    row = asked(page_data(s), 'await source.row("1", 1, 2, 7, 2, 11)')
    want = answers.row(s, 1, 2, 7, 2, 11)
    assert row["weights"]["data"] == exact(s, 1, 2)[7, 2:11].tolist()
    assert row["weights"]["data"] == pytest.approx(unpacked(want["weights"]).tolist(), rel=1e-5, abs=0)  # other sums
    assert row["ribbon"]["sum"]["data"] == pytest.approx(unpacked(want["ribbon"]["sum"]).tolist(), rel=1e-6)
    assert row["ribbon"]["max"]["data"] == pytest.approx(unpacked(want["ribbon"]["max"]).tolist(), rel=1e-6)
    assert [link["key"] for link in row["top"]] == [link["key"] for link in want["top"]]
    assert row["sum"] == pytest.approx(1.0, abs=1e-6)
    assert (row["token"], row["start"], row["stop"], row["how"], row["error"]) == (7, 2, 11, "exact", 0)


@node
@pytest.mark.parametrize(("rows", "cols", "size"), [((0, 13), (0, 13), 5), ((3, 7), (1, 6), 16), ((2, 13), (0, 3), 4)])
def test_the_page_gives_the_tiles_that_python_gives(rows, cols, size):
    s = session()
    tile = asked(page_data(s), f'await source.tile("1", 0, 1, {list(rows)}, {list(cols)}, {size})')
    want = answers.tile(s, 0, 1, rows, cols, size)
    assert (tile["rows"], tile["cols"], tile["how"]) == (want["rows"], want["cols"], want["how"])
    assert tile["cells"]["shape"] == want["cells"]["shape"]
    np.testing.assert_allclose(tile["cells"]["data"], unpacked(want["cells"]).flatten(), rtol=1e-5, atol=1e-8)


@node
@pytest.mark.parametrize(("token", "key"), [(7, 4), (12, 0), (3, 11)])
def test_the_page_takes_the_steps_that_python_takes(token, key):
    s = session()
    steps = asked(page_data(s), f'await source.steps("1", 1, 0, {token}, {key})')
    want = answers.steps(s, 1, 0, token, key)
    chosen = [
        want["keys"].index(k) for k in steps["keys"]
    ]  # the page leaves out keys of weight 0 that nobody asked for
    assert key in steps["keys"]
    assert (steps["d"], steps["scale"], steps["v"], steps["v_sum"]) == (5, pytest.approx(5**-0.5), None, None)
    assert steps["lse"] == pytest.approx(want["lse"], rel=1e-6)
    for name in ("q", "k", "product"):
        np.testing.assert_allclose(steps[name]["data"], unpacked(want[name]), rtol=1e-5, atol=1e-6)
    for name in ("dots", "scaled", "scores", "weights"):
        ours = [-np.inf if value is None else value for value in steps[name]]
        np.testing.assert_allclose(ours, unpacked(want[name])[chosen], rtol=1e-4, atol=1e-5)


@node
def test_the_page_adds_up_the_values_where_they_are_there():
    data = page_data(session())
    v = torch.randn(KEYS, 3)
    one(data)["arrays"]["1.0"]["v"] = export.packed(v.numpy(), "f32")
    steps = asked(data, 'await source.steps("1", 1, 0, 9, 4)')
    np.testing.assert_allclose(steps["v"]["data"], v[4], rtol=1e-6)
    np.testing.assert_allclose(steps["v_sum"]["data"], exact(session(), 1, 0)[9] @ v.numpy(), rtol=1e-5, atol=1e-6)


@node
def test_steps_of_strong_links_are_carried_where_vectors_are_not(monkeypatch):
    monkeypatch.setattr(export, "ROOM", 1000)
    monkeypatch.setattr(export, "STEP_BYTES", 1000 // 3 // 6)
    s = session()
    data = page_data(s)
    assert len(one(data)["steps"]) == 6 * 3
    link = one(data)["heads"]["1.2"]["links"][2]
    steps = asked(data, f'await source.steps("1", 1, 2, {link["query"]}, {link["key"]})')
    want = answers.steps(s, 1, 2, link["query"], link["key"])
    assert (steps["keys"], steps["lse"]) == (want["keys"], want["lse"])
    assert steps["product"]["data"] == unpacked(want["product"]).tolist()


@node
def test_rows_of_links_say_that_the_rest_is_not_known(monkeypatch):
    monkeypatch.setattr(export, "SHORT", 1)
    monkeypatch.setattr(export, "ROOM", KEYS * KEYS)
    monkeypatch.setattr(export, "LINKS", 3)
    s = session(layers=1, heads=1)
    row = asked(page_data(s), 'await source.row("1", 0, 0, 11, 0, 13)')
    weights, known = exact(s, 0, 0)[11], np.array([w is not None for w in row["weights"]["data"]])
    assert known.sum() == 3
    assert weights[known].min() >= weights[~known].max()
    assert row["how"] == "strongest"
    assert row["sum"] == pytest.approx(weights[known].sum(), abs=3e-5)
    assert [link["key"] for link in row["top"]] == np.argsort(-weights)[:3].tolist()


@node
def test_tiles_without_rows_are_cut_out_of_the_map():
    s = session(n=131, keep=None)
    data = page_data(s)
    tile = asked(data, 'await source.tile("1", 0, 1, [5, 9], [0, 131], 128)')
    edges = [c * 131 // 64 for c in range(65)]
    first, end = max(e for e in edges if e <= 5), min(e for e in edges if e >= 9)
    assert (tile["rows"], tile["cols"], tile["how"]) == ([first, end], [0, 131], "pooled")
    want = s.layers[0].view.map()[0, 1][edges.index(first) : edges.index(end)]
    assert tile["cells"]["shape"] == list(want.shape)
    np.testing.assert_allclose(tile["cells"]["data"], want.flatten(), rtol=1e-6)


@node
def test_a_rounded_row_says_by_how_much(monkeypatch):
    monkeypatch.setattr(export, "ROOM", 2 * 6 * KEYS**2)
    row, tile = asked(
        page_data(session()),
        '[await source.row("1", 0, 0, 3, 0, 13), await source.tile("1", 0, 0, [0, 4], [0, 4], 128)]',
    )
    assert (row["how"], row["error"]) == (tile["how"], tile["error"]) == ("rounded", 0.5 / 65535)


@node
@pytest.mark.parametrize(
    ("question", "words"),
    [
        ('source.row("1", 0, 0, 3, 0, 13)', "layer 0, head 0"),
        ('source.steps("1", 0, 0, 3, 0)', "layer 0, head 0"),
        ('source.head("1", 7, 0, "en")', "layer 7, head 0"),
        ('source.overview("2")', "session 2"),
        ('source.look.start("text")', "`regard serve`"),
    ],
)
def test_what_is_not_in_the_page_is_said(question, words):
    assert words in asked(page_data(session(keep=None)), f"await {question}")["error"]


@node
def test_steps_without_vectors_and_tokens_out_of_range_are_said(monkeypatch):
    s = session()
    assert asked(page_data(s), 'await source.row("1", 0, 0, 13, 0, 13)')["error"].count("13") == 2
    monkeypatch.setattr(export, "ROOM", 1000)
    said = asked(page_data(s), 'await source.steps("1", 0, 0, 3, 0)')["error"]
    assert "steps" in said


@node
def test_the_page_knows_its_session_its_tokens_and_both_languages():
    s = session()
    sessions, tokens, english, korean, left = asked(
        page_data(s),
        '[await source.sessions(), await source.tokens("1", 0, 2), (await source.head("1", 0, 1, "en")).sentence, '
        '(await source.head("1", 0, 1, "ko")).sentence, source.leftOut("1", "en")]',
    )
    assert sessions == [{"id": "1", "name": "toy", "text": None, "length": KEYS}]
    assert tokens == {"start": 0, "labels": ["</script>", "w1"]}
    assert english == answers.head(s, 0, 1, "en")["sentence"]
    assert korean == answers.head(s, 0, 1, "ko")["sentence"]
    assert left is None
