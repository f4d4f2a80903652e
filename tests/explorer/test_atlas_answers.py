"""All heads at once: thumbnails, one token's rows, one link, ranked links; against dense weights and eager twins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from seeing_twins import blip, picture
from shown_twins import registers, windows
from speaking_twins import bert, gpt2, t5
from torch import Tensor
from unpacking import unlevelled, unpacked

import regard
from regard.explorer import answers
from regard.explorer.export import page_data
from regard.explorer.jobs import ModelShelf
from regard.explorer.widget import answer
from regard.lens.capture import Capture, Record
from regard.lens.overlays import ImagePatches
from regard.lens.view import View
from regard.models.loading import load
from regard.session.session import Session, look_at, look_at_image, session_of

pytest.importorskip("fastapi", reason="needs the server: pip install 'regard[explorer]'")
pytest.importorskip("httpx", reason="needs fastapi's test client: pip install httpx")

from browsing import BEARER, TOKEN
from fastapi.testclient import TestClient

from regard.explorer import server

PORT = 8125
TEXT = "The animal did not cross the street because it was too tired."


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"bert": bert(folder / "bert", "Model"), "gpt2": gpt2(folder / "gpt2")}


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def session(checkpoints, name) -> Session:
    return look_at(TEXT, checkpoints[name])


@pytest.fixture(scope="module")
def eager(checkpoints, name, session) -> Tensor:
    """The weights of the same checkpoint in transformers, (layers, H, N, N)."""
    model = transformers.AutoModel.from_pretrained(checkpoints[name], attn_implementation="eager").eval()
    ids = session.model.tokenizer.batch([TEXT]).input_ids
    with torch.no_grad():
        return torch.cat(model(ids, output_attentions=True).attentions)


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return look_at_image(picture(), registers(tmp_path_factory.mktemp("registers")))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return look_at_image(picture(), windows(tmp_path_factory.mktemp("windows")))


def watched(n: int, heads: int = 3, **options: Any) -> Session:
    """A session of one layer with sharp heads."""
    torch.manual_seed(n)
    layer = torch.nn.TransformerEncoderLayer(4 * heads, heads, 5, batch_first=True).eval()
    layer.self_attn.in_proj_weight.data.mul_(4)
    with torch.no_grad(), regard.watch(layer, keep="qk", **options) as seen:
        layer(torch.randn(1, n, 4 * heads))
    return Session("toy", seen, tuple(f"w{i}" for i in range(n)))


def assert_levels(levels: Any, expected: Tensor) -> None:
    """Equal to half a level, which is the largest value of the head ÷ 255."""
    got, step = unlevelled(levels), expected.flatten(1).amax(1) / 255
    assert got.shape == expected.shape
    torch.testing.assert_close(unpacked(levels["scale"]), step, rtol=1e-4, atol=0)
    assert bool(((got - expected).abs().flatten(1) <= step[:, None] * 0.501).all())


# ----------------------------------------------------------------------------------------------------------- thumbnails


def test_thumbnail_of_a_short_text_is_every_weight(session, eager, monkeypatch):
    monkeypatch.setattr("regard.session.heads.CELLS", len(session.tokens))
    layers = answers.thumbnails(session)["layers"]
    for one, weights in zip(layers, eager, strict=True):
        assert one["how"] == "exact"
        assert one["rows"] == one["cols"] == list(range(weights.shape[-1] + 1))
        assert_levels(one["levels"], weights)
        assert one["images"] == []


@pytest.mark.parametrize("measured", [True, False], ids=["from the map", "without a map"])
@pytest.mark.parametrize("n", [25, 64, 131])
def test_thumbnail_of_a_longer_text_is_pooled_between_its_edges(n, measured):
    made = watched(n, **({} if measured else {"measures": ["entropy"]}))
    (one,) = answers.thumbnails(made)["layers"]
    weights = made.layers[0].view.tile(slice(None), slice(None))[0]
    assert one["levels"]["shape"] == [3, 24, 24]
    assert (one["rows"][0], one["rows"][-1], len(one["rows"])) == (0, n, 25)
    rows = [weights[:, a:b].mean(1) for a, b in pairwise(one["rows"])]
    cells = [torch.stack([row[:, a:b].sum(-1) for a, b in pairwise(one["cols"])], -1) for row in rows]
    assert_levels(one["levels"], torch.stack(cells, 1))
    assert one["how"] == "pooled"


def test_layer_without_a_map_and_without_weights_has_no_thumbnail():
    view = View((1, 2, 7, 7), {"entropy": torch.rand(1, 2, 7)})
    capture = Capture("Toy")
    capture.records.append(Record("layer", 0, "self", "test", "test", view=view))
    assert answers.thumbnails(session_of(capture))["layers"] == [None]


def test_head_with_nan_has_no_scale():
    held = {"map": torch.rand(1, 2, 7, 7)}
    held["map"][0, 1, 3] = float("nan")
    capture = Capture("Toy")
    capture.records.append(Record("layer", 0, "self", "test", "test", view=View((1, 2, 7, 7), held)))
    (one,) = answers.thumbnails(session_of(capture))["layers"]
    assert unpacked(one["levels"]["scale"]).isnan().tolist() == [False, True]
    torch.testing.assert_close(unlevelled(one["levels"])[0], held["map"][0, 0], rtol=0, atol=1 / 500)


def test_thumbnails_of_512_heads_stay_small():
    capture = Capture("Large")
    for layer in range(16):
        view = View((1, 32, 131_072, 131_072), {"map": torch.rand(1, 32, 64, 64)})
        capture.records.append(Record(f"layers.{layer}", 0, "self", "test", "test", view=view))
    assert len(json.dumps(answers.thumbnails(Session("large", capture, ("",) * 131_072)))) < 420_000


def patch_sums(layer: Any, values: Tensor, grid: Any) -> Tensor:
    """(W, H, Nk) → (H, rows, columns) by the places of patches in the image, one patch after the other."""
    patches = ImagePatches(layer.sides.keys, layer.sides.frames[grid["image"]], grid["image"])
    height, width = patches.frame.image_size
    sums = torch.zeros(values.shape[1], len(grid["rows"]), len(grid["columns"]))
    for (window, index), (top, left, bottom, right) in zip(patches.tokens, patches.boxes, strict=True):
        y, x = (top + bottom) / 2 / height, (left + right) / 2 / width
        (row,) = [n for n, (a, b) in enumerate(grid["rows"]) if a <= y < b]
        (column,) = [n for n, (a, b) in enumerate(grid["columns"]) if a <= x < b]
        sums[:, row, column] += values[window, :, index]
    return sums


@pytest.mark.parametrize("which", ["photo", "windowed"])
@pytest.mark.parametrize("cells", [24, 3], ids=["each patch", "pooled patches"])
def test_thumbnail_of_an_image_is_what_its_patches_receive(request, monkeypatch, which, cells):
    monkeypatch.setattr("regard.session.heads.CELLS", cells)
    seen = request.getfixturevalue(which)
    for layer, one in zip(seen.layers, answers.thumbnails(seen)["layers"], strict=True):
        (grid,) = one["images"]
        received = layer.view.tile(slice(None), slice(None))[: layer.windows].mean(2)  # (W, H, Nk)
        assert max(grid["levels"]["shape"][1:]) <= cells
        assert_levels(grid["levels"], patch_sums(layer, received, grid))


# ------------------------------------------------------------------------------------------------------ rows of a token


def test_rows_of_a_token_are_those_of_every_head(session, eager):
    for token in (0, 5, len(session.tokens) - 1):
        found = answers.rows_of_token(session, token)
        assert (found["token"], found["layer"], len(found["layers"])) == (token, 0, len(eager))
        for one, weights in zip(found["layers"], eager, strict=True):
            assert (one["token"], one["how"], one["other"]) == (token, "exact", None)
            assert_levels(one["levels"], weights[:, token])


def test_rows_of_a_token_are_pooled_to_the_width(session, eager):
    one = answers.rows_of_token(session, 5, width=4)["layers"][1]
    sums = torch.stack([eager[1, :, 5, a:b].sum(-1) for a, b in pairwise(one["cols"])], -1)
    assert (one["levels"]["shape"], one["how"]) == ([len(eager[1]), 4], "pooled")
    assert_levels(one["levels"], sums)


def test_rows_of_a_short_capture_without_queries_and_keys_come_from_its_map():
    kept, bare = watched(7), watched(7)
    capture = bare.capture
    capture.records[0].view.weights = None
    alone = Session("toy", capture, kept.tokens)
    assert alone.layers[0].view.weights is None
    assert_levels(answers.rows_of_token(alone, 3)["layers"][0]["levels"], kept.layers[0].view.row(3)[0])


def test_layer_that_has_no_such_token_has_no_row(tmp_path):
    both = look_at("the cat and the dog", load(t5(tmp_path / "t5")))
    rows = answers.rows_of_token(both, 2)["layers"]
    assert [one is not None for one in rows] == [layer.start is not None for layer in both.layers]
    cross = next(layer.index for layer in both.layers if layer.view.kind == "cross")
    rows = answers.rows_of_token(both, 0, cross)["layers"]
    assert {both.layers[one["layer"]].view.kind for one in rows if one is not None} == {"cross"}


def test_words_and_patches_of_an_image_text_model_are_not_mixed(tmp_path):
    seen = look_at_image(picture(), load(blip(tmp_path / "blip", "ForConditionalGeneration")), text="the cat")
    last = seen.layers[-1]
    rows = answers.rows_of_token(seen, 1, last.index)["layers"]
    counts = {seen.layers[one["layer"]].view.sizes[2] for one in rows if one is not None}
    assert counts == {last.view.sizes[2]}


@pytest.mark.parametrize("which", ["photo", "windowed"])
def test_rows_of_a_patch_lie_in_the_grid_of_each_layer(request, which):
    seen = request.getfixturevalue(which)
    grids = [one["images"][0] for one in answers.thumbnails(seen)["layers"]]
    asked = seen.layers[0]
    token = asked.sides.queries.indices("patch")[7]
    number = int(token @ (asked.sides.queries.shape[1], 1))
    place = ImagePatches(asked.sides.queries, asked.sides.frames[0], 0).boxes[7]
    y, x = (place[0] + place[2]) / 2, (place[1] + place[3]) / 2
    for layer, grid, one in zip(seen.layers, grids, answers.rows_of_token(seen, number)["layers"], strict=True):
        window, i = ImagePatches(layer.sides.queries, layer.sides.frames[0], 0).at(y, x)
        assert one["token"] == window * layer.view.sizes[2] + i
        row = torch.zeros(layer.windows, *layer.view.sizes[1::2])
        row[window] = layer.view.row(i)[window]
        assert_levels(one["images"][0], patch_sums(layer, row, grid))
        assert_levels(one["levels"], answers.binned(row.transpose(0, 1).flatten(1), 64, "sum"))
        in_image = unlevelled(one["images"][0]).sum((1, 2))
        torch.testing.assert_close(in_image + unpacked(one["other"]), row.sum((0, 2)), rtol=0, atol=0.05)


def test_row_of_cls_is_that_of_cls_in_every_layer(photo):
    rows = answers.rows_of_token(photo, 0)["layers"]
    assert [one["token"] for one in rows] == [0] * len(photo.layers)
    expected = [layer.view.row(0)[0] for layer in photo.layers]
    others = torch.from_numpy(photo.layers[0].sides.keys.kind[0] != "patch")
    for one, row in zip(rows, expected, strict=True):
        torch.testing.assert_close(unpacked(one["other"]), row[:, others].sum(-1))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"token": 99}, IndexError, "token 99"),
        ({"token": 1, "layer": 9}, IndexError, "layer 9"),
        ({"token": 1, "width": 0}, ValueError, "width.*0"),
        ({"token": True}, TypeError, "token.*bool"),
    ],
)
def test_rows_of_what_is_not_there_are_refused(session, given, error, words):
    with pytest.raises(error, match=words):
        answers.rows_of_token(session, **given)


def test_rows_of_too_many_weights_are_refused(session, monkeypatch):
    monkeypatch.setattr(answers, "MOST_ROWS", 10)
    with pytest.raises(ValueError, match="10"):
        answers.rows_of_token(session, 1)


# ------------------------------------------------------------------------------------------------------------- one link


def test_link_has_its_weight_in_every_head(session, eager):
    found = answers.link_in_heads(session, 5, 2)
    torch.testing.assert_close(unpacked(found["weights"]), eager[:, :, 5, 2], rtol=0, atol=1e-6)
    assert found["effects"] is None


def test_link_has_the_effects_that_were_measured(checkpoints):
    made = look_at(TEXT, checkpoints["bert"])
    link = answers.measure(made, 5, 2, 1, 2)["links"][0]
    effects = unpacked(answers.link_in_heads(made, 5, 2)["effects"])
    assert float(effects[1, 2]) == pytest.approx(link["effect"])
    assert int(effects.isnan().sum()) == effects.numel() - 1
    answers.measure(made, 5, 2)
    effects = unpacked(answers.link_in_heads(made, 5, 2)["effects"])
    torch.testing.assert_close(effects, made.effects.heads[5, 2][1])
    assert answers.link_in_heads(made, 5, 3)["effects"] is None


def test_link_of_patches_is_followed_through_windows(windowed):
    asked = windowed.layers[0]
    tokens = asked.sides.queries.indices("patch")
    same = [token for token in tokens if token[0] == tokens[0][0]]
    query, key = (int(token @ (asked.sides.queries.shape[1], 1)) for token in (same[0], same[4]))
    weights = unpacked(answers.link_in_heads(windowed, query, key)["weights"])
    for layer in windowed.layers:
        sides, frame = layer.sides, layer.sides.frames[0]
        boxes = [asked.sides.queries.box[tuple(token)] for token in (same[0], same[4])]
        centres = [((top + bottom) / 2, (left + right) / 2) for top, left, bottom, right in boxes]
        (w, i), (v, j) = (layout.at(*at) for layout, at in zip((sides.queries, sides.keys), centres, strict=True))
        expected = layer.view.row(i)[w, :, j] if w == v else torch.zeros(layer.view.sizes[1])
        torch.testing.assert_close(weights[layer.index, : len(expected)], expected)
        assert frame == asked.sides.frames[0]


# --------------------------------------------------------------------------------------------------------- ranked links


def test_ranked_links_have_the_weights_of_their_heads(session, eager):
    found = answers.ranked(session, 5)
    assert (len(found["links"]), found["complete"], found["selected"]) == (5, True, 0)
    for link in found["links"]:
        place = link["layer"], link["head"], link["query"], link["key"]
        assert link["weight"] == pytest.approx(float(eager[place]), abs=1e-6)
        assert link["effect"] is None
    opening = answers.overview(session)["opening"]
    assert opening["token"] == found["links"][0]["query"]


def test_ranked_link_has_the_effect_that_was_measured(checkpoints):
    made = look_at(TEXT, checkpoints["bert"])
    link = answers.ranked(made, 1)["links"][0]
    effect = answers.measure(made, link["query"], link["key"], link["layer"], link["head"])["links"][0]["effect"]
    assert answers.ranked(made, 2)["links"][0] == link | {"effect": effect}


def test_ranked_links_of_an_image_name_patches(photo):
    for link in answers.ranked(photo)["links"]:
        layout = photo.layers[link["layer"]].sides.keys
        patches = ImagePatches(layout, photo.frames[0], 0)
        row, column = patches.cells[patches.number((0, link["key"]))]
        assert link["words"][1] == f"({row}, {column})"
        assert layout.kind[0, link["query"]] != "patch" or link["words"][0].startswith("(")


# ------------------------------------------------------------------------------- over HTTP, in a notebook and in a file


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    made = server.app([session], ModelShelf(demo=False), port=PORT, token=TOKEN)
    with TestClient(made, base_url=f"http://127.0.0.1:{PORT}", headers=BEARER) as client:
        yield client


@pytest.mark.parametrize(
    ("question", "given"),
    [
        ("thumbnails", {}),
        ("rows_of_token", {"token": 5, "layer": 1, "width": 4}),
        ("link_in_heads", {"token": 5, "key": 2, "layer": 1}),
        ("ranked", {"count": 3}),
    ],
)
def test_server_and_notebook_answer_the_same(client, session, question, given):
    expected = getattr(answers, question)(session, **given)
    assert client.get(f"/api/session/1/{question}", params=given).json() == expected
    reply = answer([session], {"id": 1, "session": "1", "ask": question, "given": given})
    assert reply == {"id": 1, "answer": expected}
    json.dumps(expected, allow_nan=False)


def test_server_refuses_a_token_that_is_not_there(client):
    reply = client.get("/api/session/1/rows_of_token", params={"token": 999})
    assert reply.status_code == 404
    assert "999" in reply.json()["error"]


def test_exported_page_carries_thumbnails_and_ranked_links(session):
    (mine,) = page_data(session)["sessions"].values()
    assert mine["thumbnails"] == answers.thumbnails(session)
    assert mine["ranked"] == answers.ranked(session)
    assert mine["hover"] is True


def test_exported_page_of_a_long_text_has_no_rows_to_hover(monkeypatch):
    monkeypatch.setattr("regard.explorer.export.SHORT", 6)
    monkeypatch.setattr("regard.explorer.export.ROOM", 3 * 7 * 7)
    (mine,) = page_data(watched(7))["sessions"].values()
    assert mine["hover"] is False
    assert np.prod(mine["thumbnails"]["layers"][0]["levels"]["shape"]) == 3 * 7 * 7


def test_server_predicts_with_heads_switched_off(client, session):
    reply = client.get("/api/session/1/predictions", params={"without": "0.1,1.2"})
    assert reply.json() == answers.predictions(session, [[0, 1], [1, 2]])
    assert client.get("/api/session/1/predictions").json() == answers.predictions(session)
    assert client.get("/api/session/1/predictions", params={"without": "0.1;2"}).status_code == 422
    assert client.get("/api/session/1/predictions", params={"without": "0.99"}).status_code == 404


def test_overview_names_what_heads_do_beside_the_first_token(session):
    rest = answers.overview(session)["rest_of_heads"]
    for layer, names in zip(session.layers, rest, strict=True):
        assert names == [answers.head(session, layer.index, head)["rest"] for head in range(layer.view.sizes[1])]
