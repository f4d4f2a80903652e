"""Images in the explorer's answers: against the lens' own rows, overlays and layouts, whole pictures and windows."""

import io
import json
import shutil
import subprocess
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from seeing_twins import blip, clip, idefics, llava, picture, put, vit
from shown_twins import registers, windows
from speaking_twins import bert
from torch import Tensor
from unpacking import unpacked

import regard
from regard.explorer import answers
from regard.explorer.answers import layouts_of
from regard.explorer.export import bundle, modules, page_data
from regard.layouts import Frame, Layout, Sides
from regard.models.loading import load
from regard.session.labels import token_label
from regard.session.protocol import LayoutJSON
from regard.session.session import Session, look_at_image, open_file, session_of, show_image

HIGH, WIDE = 37, 53


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """Two registers, 5 × 7 patches of 30 × 43 pixels, of which the last column is in no patch."""
    return registers(tmp_path_factory.mktemp("registers"))


@pytest.fixture(scope="module")
def session(seeing: Path) -> Session:
    return look_at_image(picture(), seeing)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Session:
    """7 × 11 patches in 3 × 4 windows of 9, padded; then 4 × 6 in 2 × 2, then 2 × 3."""
    return look_at_image(picture(), windows(tmp_path_factory.mktemp("windows")))


def array(packed) -> Tensor:
    return unpacked(packed)


# ------------------------------------------------------------------------------------------------------------- sessions


def test_image_is_read_and_its_row_is_that_of_a_plain_watch(session, seeing):
    model = load(seeing)
    prepared = model.preprocessor([picture()])
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(pixel_values=prepared.pixel_values)
    assert session.capture.names == seen.names
    got = array(answers.row(session, 2, 4, token=7)["weights"])
    torch.testing.assert_close(got, seen[2].row(7)[0, 4], rtol=0, atol=1e-6)


def test_session_keeps_a_bounded_upright_copy(tmp_path, seeing):
    path = tmp_path / "IMG 0815.jpg"
    turned = Image.Exif()
    turned[0x0112] = 6  # stands on its side
    Image.fromarray(picture(1, 20, 4001)).save(path, exif=turned)
    shown = show_image(path)
    assert (shown.name, shown.size, shown.kind) == ("IMG 0815.jpg", (4001, 20), "image/png")
    assert Image.open(io.BytesIO(shown.data)).size == (8, 1600)
    assert str(tmp_path) not in repr(shown)
    large = show_image(picture(1, 1700, 300))
    assert large.kind == "image/jpeg"
    assert Image.open(io.BytesIO(large.data)).size == (282, 1600)


def test_progress_is_told(seeing):
    said: list[str] = []
    look_at_image(picture(), seeing, progress=said.append)
    look_at_image(picture(), load(seeing), progress=said.append)
    assert said == ["loading", "reading", "reading"]


def test_image_that_is_none_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "notes.jpg").write_text("not a picture")
    with pytest.raises(ValueError, match=r"notes\.jpg"):
        look_at_image(tmp_path / "notes.jpg", tmp_path / "nowhere")


def test_model_of_texts_looks_at_no_image(tmp_path):
    with pytest.raises(ValueError, match="BERT"):
        look_at_image(picture(), bert(tmp_path, "Model"))


def test_model_of_image_alone_takes_no_text(seeing):
    with pytest.raises(ValueError, match="DINOv2"):
        look_at_image(picture(), seeing, text="a cat")


def test_tower_of_image_of_two_is_looked_into(tmp_path):
    found = look_at_image(picture(), clip(tmp_path))
    assert found.capture.names == [f"vision.blocks.{n}.attention" for n in range(3)]
    assert answers.overview(found)["layouts"][0]["runs"][1] == {"kind": "patch", "image": 0, "count": 25}


def test_values_come_from_a_second_look(session):
    got = answers.steps(session, 1, 3, token=5, key=2)
    values = session.head_values(1, 3)  # (Nk, Dv)
    row = array(answers.row(session, 1, 3, token=5)["weights"])
    torch.testing.assert_close(array(got["v_sum"]), row @ values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(array(got["v"]), values[2])


# --------------------------------------------------------------------------------------------------- pictures and words


@pytest.fixture(scope="module")
def captioned(tmp_path_factory) -> Session:
    return look_at_image(picture(), blip(tmp_path_factory.mktemp("blip"), "ForConditionalGeneration"), text="a cat sat")


def test_words_look_at_the_image(captioned):
    assert captioned.tokens == ("[start]", "a", "cat", "sat")
    got = answers.overview(captioned)
    cross = [layer for layer in got["layers"] if layer["kind"] == "cross"]
    queries, keys = cross[0]["layout"]
    assert [run["kind"] for run in got["layouts"][queries]["runs"]] == ["text"]
    assert [(run["kind"], run["count"]) for run in got["layouts"][keys]["runs"]] == [("cls", 1), ("patch", 25)]
    row = array(answers.row(captioned, cross[-1]["index"], 2, token=2)["weights"])
    overlay = captioned.capture[cross[-1]["path"]].overlay(token=2, head=2)
    np.testing.assert_allclose(row.numpy(), overlay.weights, atol=1e-6)
    assert token_label(captioned, cross[0]["index"], 7) == "(1, 1)"


def test_caption_is_written_where_none_is_given(tmp_path):
    directory = blip(tmp_path, "ForConditionalGeneration")
    found = look_at_image(picture(), directory)
    written = load(directory).caption(picture(), max_new_tokens=32)
    assert found.text == written.text.strip()
    assert found.tokens == ("[start]", *load(directory).tokenizer.tokens(written.ids[:-1]))


def test_words_of_a_capture_come_back_with_it(captioned, tmp_path):
    captioned.capture.save(tmp_path / "run.regard")
    again = open_file(tmp_path / "run.regard")
    assert again.tokens == captioned.tokens
    assert answers.overview(again)["layouts"] == answers.overview(captioned)["layouts"]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("ForQuestionAnswering", r"BLIP.*'visual-question-answering'"),
        (
            "ForImageTextRetrieval",
            r"BLIP.*'image-text-matching'",
        ),
    ],
)
def test_text_that_is_missing_is_asked_for(tmp_path, head, words):
    with pytest.raises(ValueError, match=words):
        look_at_image(picture(), blip(tmp_path, head))


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForImageTextRetrieval"])
def test_question_and_text_are_read_beside_the_image(tmp_path, head):
    directory = blip(tmp_path, head)
    found = look_at_image(picture(), directory, text="a cat sat")
    assert found.tokens == ("[CLS]", "a", "cat", "sat", "[SEP]")
    assert {layer.path.split(".")[0] for layer in found.layers} == {"vision", "encoder"}
    answer = (
        load(directory).answer(picture(), "a cat sat", max_new_tokens=32).text.strip() if "Question" in head else None
    )
    assert found.text == ("a cat sat" if answer is None else f"a cat sat → {answer}")


@pytest.mark.parametrize("text", [None, "the street?"])
def test_image_stands_among_the_words_and_what_is_written_after_them(tmp_path, text):
    directory = llava(tmp_path)
    found = look_at_image(picture(), directory, text=text)
    layout = answers.overview(found)["layouts"][-1]
    assert [run["kind"] for run in layout["runs"]] == ["text", "patch", "text"]
    assert sum(run["count"] for run in layout["runs"]) == len(found.tokens)
    assert layout["grids"][0]["cells"] is None
    last = found.layers[-1]
    got = array(answers.row(found, len(found.layers) - 1, 1, token=len(found.tokens) - 1)["weights"])
    torch.testing.assert_close(got, last.view.row(-1)[0, 1], rtol=0, atol=1e-6)


def test_latents_gather_the_image_and_words_look_at_them(tmp_path):
    found = look_at_image(picture(), idefics(tmp_path), text="the cat?")
    got = answers.overview(found)
    kinds = [[run["kind"] for run in layout["runs"]] for layout in got["layouts"]]
    assert sorted(map(tuple, kinds)) == [("cls", "patch"), ("cls", "patch", "latent"), ("latent",), ("text",)]
    looks = next(layer for layer in got["layers"] if layer["path"].startswith("looks."))
    assert token_label(found, looks["index"], 2) == "latent 2"
    gathers = next(n for n, layer in enumerate(found.layers) if {"patch", "latent"} <= set(layer.sides.keys.kind.flat))
    first = int((found.layers[gathers].sides.keys.kind[0] == "latent").argmax())
    assert token_label(found, gathers, first + 1) == "latent 1"


# --------------------------------------------------------------------------------------------------------- the overview


def boxes_of(layout: LayoutJSON, number: int) -> np.ndarray:
    """(P, 4) the boxes that a layout's grid of a picture says, in the order of the tokens."""
    (grid,) = (grid for grid in layout["grids"] if grid["image"] == number)
    rows, columns = grid["rows"], grid["columns"]
    cells = range(len(rows) * len(columns)) if grid["cells"] is None else grid["cells"]
    found = [(rows[c // len(columns)], columns[c % len(columns)]) for c in cells]
    return np.array([[top, left, bottom, right] for (top, bottom), (left, right) in found])


def test_overview_says_which_image_and_what_its_tokens_are(session):
    got = answers.overview(session)
    (line,) = got["images"]
    assert {name: line[name] for name in ("height", "width", "name", "shown")} == {
        "height": HIGH, "width": WIDE, "name": "array", "shown": True
    }  # fmt: skip
    np.testing.assert_allclose(line["seen"], [0, 0, 1, 1], atol=1e-6)
    (layout,) = got["layouts"]
    assert layout["runs"] == [
        {"kind": "cls", "image": 0, "count": 1},
        {"kind": "register", "image": 0, "count": 2},
        {"kind": "patch", "image": 0, "count": 35},
    ]
    assert [(layer["layout"], layer["windows"], layer["keys"]) for layer in got["layers"]] == [([0, 0], 1, 38)] * 3
    assert layout["grids"][0]["cells"] is None
    json.dumps(got, allow_nan=False)


def test_boxes_of_patches_are_those_of_the_overlay(session):
    overlay = session.capture[0].overlay(token="cls", head=0)
    got = boxes_of(answers.overview(session)["layouts"][0], 0) * [HIGH, WIDE, HIGH, WIDE]
    np.testing.assert_allclose(got, overlay.boxes, atol=1e-4)


def test_cropped_image_says_what_was_seen(tmp_path):
    found = look_at_image(picture(0, 30, 60), clip(tmp_path))
    assert answers.overview(found)["images"][0]["seen"] == [0.0, 0.25, 1.0, 0.75]


def test_grid_is_a_hundredth_of_its_boxes(windowed):
    """14 × 14 patches take rows and columns alone: a box for each would be ten times as much."""
    layout = Layout.grid(14, 14, size=(16, 16))
    seen = replace(
        windowed.layers[0], sides=regard.layouts.Sides(layout, layout, (regard.layouts.Frame.whole(224, 224),))
    )
    toy = Session("toy", windowed.capture, ())
    toy.__dict__["layers"] = (seen,)
    assert len(json.dumps(layouts_of(toy)[0])) < 1300


def test_text_has_neither_image_nor_layouts(session):
    toy = regard.look(*[torch.zeros(1, 2, 3, 4)] * 3)
    capture = regard.lens.capture.Capture("toy", [["a", "b", "c"]])
    capture.records.append(regard.lens.capture.Record("attn", 0, "self", "test", "test", view=toy))
    got = answers.overview(session_of(capture))
    assert (got["images"], got["layouts"], got["layers"][0]["layout"]) == ([], [], None)


# --------------------------------------------------------------------------------------------------------------- labels


def test_tokens_are_called_by_what_they_are(session):
    assert [token_label(session, 0, n) for n in (0, 1, 2, 3, 9, 10, 37)] == [
        "cls", "register 0", "register 1", "(0, 0)", "(0, 6)", "(1, 0)", "(4, 6)"
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's modules")
def test_page_calls_tokens_as_python_does():
    both = Layout.grid(1, 2, (4, 4), before=("cls", "register", "register")) + Layout.latents(3, image=0)
    both += Layout.grid(2, 1, (4, 4), before=("cls",), image=1) + Layout.latents(2, image=1)
    both += Layout.of(["padding"] * 2)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 7, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(torch.randn(1, both.shape[1], 6))
    seen.layouts = Sides(both, both, (Frame.whole(4, 8), Frame.whole(8, 4)))
    found = Session("toy", seen, ())
    script, name = bundle(modules(), "image/patches.js")
    (layout,) = answers.overview(found)["layouts"]
    ask = f"""
const tokens = {name}.placedTokens({json.dumps(layout)});
console.log(JSON.stringify(tokens.kinds.map((_, token) => tokens.name(token))));
"""
    done = subprocess.run(
        ["node", "--input-type=module"], input=script + ask, capture_output=True, text=True, check=True
    )
    names = json.loads(done.stdout)
    assert names == [token_label(found, 0, key) for key in range(both.shape[1])]
    assert names[1:3] == ["register 0", "register 1"]
    assert names[5:9] == ["latent 0 of image 0", "latent 1 of image 0", "latent 2 of image 0", "cls of image 1"]
    assert names[-2:] == ["padding 0", "padding 1"]


def test_sentence_names_the_patch_that_receives_most(session):
    card = answers.head(session, 1, 2)
    key = card["numbers"]["received_key"]
    assert f"Token {key} “{token_label(session, 1, key)}” receives most" in card["sentence"]


# -------------------------------------------------------------------------------------------------------------- picture


def test_image_is_given_as_bytes(session):
    got = answers.image(session, 0)
    image = Image.open(io.BytesIO(b64decode(got["base64"])))
    assert (got["kind"], image.size) == ("image/png", (WIDE, HIGH))
    assert np.array_equal(np.asarray(image), picture())


@pytest.mark.parametrize("number", [1, -1])
def test_image_that_is_not_there_is_refused(session, number):
    with pytest.raises(LookupError, match=rf"image.*{number}.*1.*0"):
        answers.image(session, number)


@pytest.mark.parametrize("number", ["0", True, 0.0, None])
def test_number_of_an_image_is_a_number(session, number):
    with pytest.raises(TypeError, match="number"):
        answers.image(session, number)


# ------------------------------------------------------------------------------------------------------- captures saved


def test_capture_has_its_image_and_without_it_can_be_given_it_again(session, tmp_path):
    file = tmp_path / "run.regard"
    session.capture.save(file)
    assert answers.overview(open_file(file))["images"] == answers.overview(session)["images"]
    assert answers.image(open_file(file), 0) == answers.image(session, 0)
    session.capture.save(file, photos=False)
    bare = answers.overview(open_file(file))
    assert bare["layouts"] == answers.overview(session)["layouts"]
    assert (bare["images"][0]["name"], bare["images"][0]["shown"]) == (None, False)
    with pytest.raises(LookupError, match=r"image.*0"):
        answers.image(open_file(file), 0)
    again = open_file(file, images=[picture()])
    assert answers.image(again, 0) == answers.image(session, 0)


def test_image_of_another_size_is_not_the_captures(session):
    with pytest.raises(ValueError, match=r"images.*37.*53.*37.*54"):
        session_of(session.capture, images=[picture(0, 37, 54)])
    with pytest.raises(ValueError, match=r"37.*53.*37.*53"):
        session_of(session.capture, images=[picture(), picture(1)])


# -------------------------------------------------------------------------------------------------------------- windows


def every_window(found: Session, layer: int, head: int) -> Tensor:
    """(W·N, W·N) weights of a head, from the view's own rows."""
    seen = found.layers[layer]
    count, n = seen.windows, seen.view.sizes[2]
    whole = torch.zeros(count * n, count * n)
    for i in range(n):
        rows = seen.view.row(i)[:, head]  # (W, N)
        for w in range(count):
            whole[w * n + i, w * n : (w + 1) * n] = rows[w]
    return whole


def test_windows_are_one_layer_whose_tokens_count_through_them(windowed):
    got = answers.overview(windowed)["layers"]
    assert [(layer["windows"], layer["queries"], layer["keys"]) for layer in got] == [
        (12, 108, 108), (12, 108, 108), (4, 36, 36), (2, 8, 8), (2, 8, 8)
    ]  # fmt: skip


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_row_of_a_window_is_the_views_own_and_exactly_zero_elsewhere(windowed, layer):
    whole = every_window(windowed, layer, 1)
    for token in range(len(whole)):
        got = answers.row(windowed, layer, 1, token)
        weights = array(got["weights"])
        torch.testing.assert_close(weights, whole[token], rtol=0, atol=1e-6)
        assert torch.equal(weights == 0, whole[token] == 0)
        assert {one["key"] for one in got["top"]} <= set(whole[token].nonzero().ravel().tolist())


def test_part_of_a_row_is_of_the_asked_keys(windowed):
    whole = every_window(windowed, 0, 0)
    got = answers.row(windowed, 0, 0, token=31, start=27, stop=36)
    torch.testing.assert_close(array(got["weights"]), whole[31, 27:36], rtol=0, atol=1e-6)


def test_row_of_a_window_is_what_its_overlay_shows(windowed):
    view, seen = windowed.capture[1], windowed.layers[1]
    overlay = view.overlay(token=(4, 2), head=1)
    number = 4 * seen.view.sizes[2] + 2
    row = array(answers.row(windowed, 1, 1, number)["weights"]).reshape(seen.windows, -1)
    got = row[tuple(torch.tensor(overlay.tokens).T)]
    np.testing.assert_allclose(got.numpy(), overlay.mass, atol=1e-6)
    layout = answers.overview(windowed)["layouts"][answers.overview(windowed)["layers"][1]["layout"][1]]
    np.testing.assert_allclose(boxes_of(layout, 0) * [HIGH, WIDE, HIGH, WIDE], overlay.boxes, atol=1e-4)


def test_tile_across_windows_has_their_blocks(windowed):
    whole = every_window(windowed, 0, 1)
    got = answers.tile(windowed, 0, 1, rows=(5, 23), cols=(7, 40))
    torch.testing.assert_close(array(got["cells"]), whole[5:23, 7:40], rtol=0, atol=1e-6)
    assert got["how"] == "exact"


def test_links_are_of_all_windows(windowed):
    """A shifted window may leave a patch alone at the edge; such a query has no choice, and no link."""
    whole = every_window(windowed, 1, 0)
    whole[(whole > 0).sum(1) == 1] = 0
    got = answers.links(windowed, 1, 0, count=9)["links"]
    values = whole.flatten().sort(descending=True).values[:9]
    torch.testing.assert_close(torch.tensor([link["weight"] for link in got]), values, rtol=0, atol=1e-6)
    for link in got:
        assert abs(float(whole[link["query"], link["key"]]) - link["weight"]) < 1e-6


def test_steps_of_a_token_in_a_window_lead_to_its_weight(windowed):
    whole = every_window(windowed, 0, 1)
    got = answers.steps(windowed, 0, 1, token=40, key=38)
    assert set(got["keys"]) == set(range(36, 45))
    torch.testing.assert_close(array(got["weights"]), whole[40, 36:45], rtol=0, atol=1e-6)
    values = windowed.head_values(0, 1, window=4)
    torch.testing.assert_close(array(got["v_sum"]), whole[40, 36:45] @ values, rtol=1e-5, atol=1e-6)


def test_key_of_another_window_has_no_steps(windowed):
    with pytest.raises(IndexError, match=r"key.*45.*token.*40.*keys.*36.*44"):
        answers.steps(windowed, 0, 1, token=40, key=45)


def test_numbers_of_a_head_are_of_all_windows(windowed):
    view, count = windowed.layers[0].view, windowed.layers[0].windows
    got = answers.overview(windowed)["measures"]["entropy"]
    real = torch.from_numpy(windowed.layers[0].sides.queries.kind != "padding")  # (W, 9)
    assert not real.all()
    mean = view.entropy[:count].transpose(1, 2)[real].mean(0)  # over the queries that are no padding
    torch.testing.assert_close(array(got)[0, :2], mean, rtol=1e-5, atol=1e-6)
    received = every_window(windowed, 0, 1)[real.flatten()].sum(0)
    card, best = answers.head(windowed, 0, 1), int(received.argmax())
    assert card["numbers"]["received_key"] == best
    assert abs(card["numbers"]["received_max"] - float(received[best] / real[best // 9].sum())) < 1e-6
    assert card["sentence"].endswith("of the attention in its window.")
    assert "그 윈도 안 어텐션의" in answers.head(windowed, 0, 1, "ko")["sentence"]


def test_map_of_a_head_is_of_the_first_window(windowed):
    whole = every_window(windowed, 0, 1)
    card = answers.head(windowed, 0, 1)
    torch.testing.assert_close(array(card["map"]), whole[:9, :9], rtol=0, atol=1e-6)


def test_weights_without_queries_and_keys_are_refused(tmp_path):
    model = load(vit(tmp_path))
    prepared = model.preprocessor([picture()])
    with torch.no_grad(), regard.watch(model, layouts=model.layouts(prepared.frames[0])) as seen:
        model(pixel_values=prepared.pixel_values)
    found = session_of(seen)
    with pytest.raises(LookupError, match="queries and keys"):
        answers.row(found, 0, 0, token=0)
    assert answers.overview(found)["layers"][0]["layout"] == [0, 0]


# ------------------------------------------------------------------------------------------------------ what is carried


def numbers(packed) -> np.ndarray:
    import zlib

    kind = next(kind for kind in ("f32", "u16") if kind in packed)
    raw = b64decode(packed[kind])
    plain = zlib.decompress(raw) if packed.get("deflate") else raw
    return np.frombuffer(plain, {"f32": "<f4", "u16": "<u2"}[kind]).reshape(packed["shape"])


def test_exported_page_carries_the_image(session):
    held = page_data(session)["sessions"]["1"]
    assert held["images"] == [f"data:image/png;base64,{answers.image(session, 0)['base64']}"]


def test_exported_page_carries_the_windows_below_each_other(windowed):
    held = page_data(windowed)["sessions"]["1"]
    whole = every_window(windowed, 0, 1)
    got = numbers(held["arrays"]["0.1"]["weights"])
    assert got.shape == (108, 9)
    for w in range(12):
        part = slice(9 * w, 9 * w + 9)
        np.testing.assert_allclose(got[part], whole[part, part].numpy(), atol=1e-6)
    assert held["images"][0].startswith("data:image/png;base64,")


def test_session_of_a_text_carries_no_image(tmp_path):
    from regard.session.session import look_at

    found = look_at("The animal was tired.", load(bert(tmp_path, "Model")))
    assert page_data(found)["sessions"]["1"]["images"] == []


def test_checkpoint_without_a_preprocessor_says_so(tmp_path):
    import transformers

    config = transformers.ViTConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=1, image_size=4, patch_size=2
    )
    directory = put(tmp_path, "ViTModel", config)
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        look_at_image(picture(), directory)
