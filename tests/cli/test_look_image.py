"""`regard look` at a picture: what it prints is what the lens lays over it, in two languages and on any terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from seeing_twins import picture
from shown_twins import registers, windows
from speaking_twins import bert

from regard.cli import look_image
from regard.cli.commands import LookOptions
from regard.cli.inputs import is_image
from regard.cli.look_image import print_patches, print_strongest
from regard.cli.outputs import Terminal
from regard.locale import translate
from regard.models.loading import load
from regard.session.labels import WARNING
from regard.session.session import Session, look_at_image, open_file

KEYS = {
    "version", "name", "text", "image", "prepared", "pixels", "seen", "layer", "head", "of", "shares", "grid",
    "strongest", "layers", "measure", "atlas", "patterns", "rest", "sentence", "warning", "html", "saved",
    "figure", "photo",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    return str(registers(tmp_path_factory.mktemp("twins") / "registers"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: Any) -> str:
    return str(windows(tmp_path_factory.mktemp("twins") / "windows"))


@pytest.fixture(scope="module")
def session(model: str) -> Session:
    return look_at_image(picture(), model)


@pytest.fixture
def photo(tmp_path: Path) -> str:
    Image.fromarray(picture()).save(tmp_path / "photo.png")
    return "photo.png"


@pytest.fixture
def run(run: Any) -> Any:
    """Of `regard look`."""
    return partial(run, "look")


@pytest.fixture
def fail(fail: Any) -> Any:
    """Of `regard look`."""
    return partial(fail, "look")


# ------------------------------------------------------------------------------------------------------ what is printed


def test_what_the_model_saw_and_where_cls_looks_are_printed(run, photo, model, session):
    out = run(photo, "--model", model)
    lines = out.splitlines()
    assert lines[0] == "registers (DINOv2 with registers)"
    assert lines[1] == "photo.png: 37 × 53 pixels, high and wide"
    assert lines[2].startswith("prepared: resize the shorter side to 30")
    assert lines[3].endswith("as 30 × 42 pixels in 5 × 7 patches")
    assert lines[5] == "cls → the image   layer 2, mean of 5 heads"
    overlay = session.capture[2].overlay(token="cls")
    best = int(overlay.mass.argmax())
    first = lines[lines.index("Strongest patches") + 1]
    row, column = overlay.cells[best]
    assert first.startswith(f"  ({row}, {column})  {overlay.mass[best]:.4f}  rows ")
    assert "Heads by entropy" in out
    assert out.endswith(WARNING + "\n")


def test_json_holds_what_the_overlay_says(run, photo, model, session):
    said = json.loads(
        run(photo, "--model", model, "--layer", "1", "--head", "3", "--token", "1", "--json", "--top", "5")
    )
    assert set(said) == KEYS
    overlay = session.capture[1].overlay(token=1, head=3)
    assert said["shares"] == pytest.approx(overlay.shares)
    np.testing.assert_allclose(np.array(said["grid"]).ravel(), overlay.mass, atol=1e-7)
    assert said["image"] == {"name": "photo.png", "height": 37, "width": 53}
    assert (said["layer"], said["head"]) == ({"index": 1, "path": "tower.blocks.1.attention", "windows": 1}, 3)
    assert len(said["strongest"]) == 5
    assert [one["weight"] for one in said["strongest"]] == sorted(overlay.mass.tolist(), reverse=True)[:5]
    place = said["strongest"][0]
    number = place["row"] * 7 + place["column"]
    np.testing.assert_allclose(place["box"], overlay.boxes[number], atol=0.005)
    assert said["sentence"].startswith("Head 3 of layer 1 ")
    assert len(said["atlas"]) == 1


def test_picture_on_standard_input_is_looked_at(run, fail, photo, model, monkeypatch):
    def piped(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    wanted = json.loads(run(photo, "--model", model, "--json"))
    piped(Path(photo).read_bytes())
    found = json.loads(run("-", "--model", model, "--json", "--figure", "seen.png"))
    assert found["grid"] == wanted["grid"]
    assert Path("seen.png").exists()
    piped(Path(photo).read_bytes())
    assert "image" in fail("-")
    piped(b"\xff\xfe no picture")
    assert re.search(r"UTF-8.*byte.*0", fail("-"))


def test_place_in_the_picture_is_the_patch_there(run, photo, model, session):
    said = json.loads(run(photo, "--model", model, "--at", "20,30.5", "--layer", "0", "--json"))
    overlay = session.capture[0].overlay(at=(20, 30.5))
    assert said["of"] == overlay.title.partition(": ")[2]
    np.testing.assert_allclose(np.array(said["grid"]).ravel(), overlay.mass, atol=1e-7)


def test_window_is_drawn_in_its_place(run, photo, windowed):
    session = look_at_image(picture(), windowed)
    said = json.loads(run(photo, "--model", windowed, "--at", "20,30", "--layer", "1", "--head", "1", "--json"))
    overlay = session.capture[1].overlay(at=(20, 30), head=1)
    grid = np.zeros((7, 11))
    grid[tuple(overlay.cells.T)] = overlay.mass
    np.testing.assert_allclose(said["grid"], grid, atol=1e-7)
    assert 1 <= int((grid > 0).sum()) <= 9
    assert "; 12 windows here" in run(photo, "--model", windowed, "--at", "20,30", "--layer", "1")


def test_token_of_a_window_counts_through_the_windows(run, photo, windowed):
    session = look_at_image(picture(), windowed)
    said = json.loads(run(photo, "--model", windowed, "--token", "40", "--layer", "0", "--head", "1", "--json"))
    overlay = session.capture[0].overlay(token=(4, 4), head=1)
    assert said["of"] == overlay.title.partition(": ")[2]


def test_without_cls_it_is_what_all_look_at(run, photo, windowed):
    assert json.loads(run(photo, "--model", windowed, "--json"))["of"] == "all queries → the image"


def test_korean_says_the_same(run, photo, model):
    out = run(photo, "--model", model, "--lang", "ko", "--layer", "2", "--head", "1")
    assert "photo.png: 37 × 53 픽셀 (세로 × 가로)" in out
    assert "가중치가 큰 패치" in out
    assert "레이어 2, 헤드 1" in out
    assert out.endswith(translate(WARNING, "ko") + "\n")
    lines = out.splitlines()
    assert lines[2].startswith("전처리: 짧은 변을 30에 맞춰 크기 조정 (")
    assert lines[2].endswith("정규화")
    assert lines[5] == "cls → 이미지   레이어 2, 헤드 1"
    assert set(re.findall(r"[^ ]+(?= \d\.\d{3})", lines[6])) == {"패치", "cls", "레지스터"}


# ------------------------------------------------------------------------------------------------------ on the terminal


def test_patches_are_digits_without_colours(capsys):
    print_patches([[0.0, 0.2, 0.019], [0.1, 0.021, 0.199]], Terminal())
    assert capsys.readouterr().out == ("Patches by weight: 9 is 0.200, · is under a tenth of that\n  · 9 ·\n  5 1 9\n")


def test_patches_are_half_blocks_with_colours(capsys, terminal):
    terminal(80)
    print_patches([[0.0, 0.5], [1.0, 0.25], [0.0, 1.0]], Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 24  # 3 rows, each 16 halves high
    assert all(re.sub(r"\x1b\[[0-9;]*m", "", line).strip() == "▀" * 32 for line in lines[1:])
    brightest = "203;250;240"  # the end of the house's ramp on dark paper
    assert f"38;2;{brightest}" not in lines[1]
    assert f"38;2;{brightest}" in lines[9]


def test_wide_grid_fits_the_terminal(capsys, terminal):
    terminal(20)
    print_patches([[0.5] * 37, [0.25] * 37], Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= 20 for line in lines[1:])


def test_nothing_that_is_strong_is_said(capsys):
    print_strongest([], Terminal())
    print_patches([[0.0]], Terminal("ko"))
    out = capsys.readouterr().out
    assert out == "Strongest patches\n  none\n패치별 가중치: 9 = 0.000, · = 그 1/10 미만\n  ·\n"


# ---------------------------------------------------------------------------------------------------------------- files


def test_page_capture_and_figure_are_written(run, photo, model, tmp_path):
    out = run(photo, "--model", model, "--html", "a/page.html", "--save", "b/run.regard", "--figure", "c/over.png")
    assert out.splitlines()[-4:] == [
        "Page: a/page.html",
        "Capture: b/run.regard",
        "Figure: c/over.png",
        "The photo is inside the written files; --no-photo leaves it out.",
    ]
    page = (tmp_path / "a/page.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert str(tmp_path) not in page
    assert open_file("b/run.regard").frames[0].image_size == (37, 53)
    with Image.open("c/over.png") as figure:
        assert figure.size[0] > 300


def drawn(path: str) -> np.ndarray:
    with Image.open(path) as figure:
        return np.asarray(figure.convert("RGB")).astype(int)


def test_capture_of_a_picture_draws_the_same_overlay_when_the_picture_is_gone(run, photo, model, tmp_path):
    asks = ["--token", "cls", "--layer", "1", "--head", "3"]
    fresh = json.loads(run(photo, "--model", model, *asks, "--save", "run.regard", "--figure", "fresh.png", "--json"))
    assert (fresh["photo"], fresh["saved"]) == (True, "run.regard")
    (tmp_path / photo).unlink()
    again = json.loads(run("run.regard", *asks, "--figure", "again.png", "--json"))
    assert again["image"] == {"name": "photo.png", "height": 37, "width": 53}
    pictures = [
        drawn(f"{name}.png")[150:] for name in ("again", "fresh")
    ]  # below the title: a file knows the class only
    assert np.abs(pictures[0] - pictures[1]).max() <= 2  # grey by Pillow's rounding, not by ours
    run("run.regard", *asks, "--figure", "bare.png", "--no-photo")
    assert np.abs(drawn("bare.png") - drawn("fresh.png")).max() > 40


def test_photo_is_left_out_of_everything_if_asked(run, photo, model, tmp_path):
    asks = [photo, "--model", model, "--no-photo"]
    out = run(*asks, "--html", "page.html", "--save", "run.regard", "--figure", "over.png", "--lang", "ko")
    assert "--no-photo" not in out
    assert "photo.png" in out  # what was looked at is still said
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," not in page
    assert "photo.png" not in page
    assert open_file("run.regard").images == ()
    assert b"photo.png" not in (tmp_path / "run.regard").read_bytes()
    assert json.loads(run(*asks, "--save", "run.regard", "--json"))["photo"] is False
    assert "저장한 파일 안에 이미지가 들어 있습니다" in run(*asks[:3], "--save", "run.regard", "--lang", "ko")
    again = json.loads(run("run.regard", "--no-photo", "--save", "less.regard", "--json"))
    assert (again["photo"], open_file("less.regard").images) == (False, ())


def test_nothing_is_said_of_the_photo_where_nothing_is_written(run, photo, model):
    assert "inside" not in run(photo, "--model", model)
    assert json.loads(run(photo, "--model", model, "--json"))["photo"] is False


def test_photo_of_a_capture_that_cannot_be_decoded_is_told_in_words(run, fail, session, tmp_path):
    shown = session.images[0]
    broken = replace(shown, name="cat.png", data=shown.data[:60] + bytes(len(shown.data) - 60))
    capture = open_file(saved(session, tmp_path)).capture
    capture.photos = (broken,)
    capture.save(tmp_path / "run.regard")
    words = fail("run.regard", "--token", "cls", "--figure", "over.png")
    assert "'cat.png'" in words
    assert "--no-photo" in words
    assert "cat.png: 37 × 53 pixels" in run("run.regard", "--token", "cls", "--figure", "over.png", "--no-photo")


def saved(session: Session, folder: Path) -> Path:
    session.capture.save(folder / "run.regard")
    return folder / "run.regard"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["photo.png", "--no-photo"], r"--no-photo.*--save.*--html.*--figure"),
        (["a text", "--no-photo", "--save", "a.regard"], "--no-photo"),
        (["qkv.npy", "--no-photo", "--figure", "a.png"], "--no-photo"),
    ],
)
def test_no_photo_is_refused_where_there_is_none(fail, photo, arguments, words):
    np.save("qkv.npy", np.zeros((3, 4), np.float32))
    assert re.search(words, fail(*arguments))


def test_capture_of_a_picture_is_looked_at_without_the_picture(run, session, tmp_path):
    session.capture.save(tmp_path / "run.regard", photos=False)
    said = json.loads(run("run.regard", "--at", "20,30.5", "--layer", "1", "--head", "2", "--json"))
    assert said["image"] == {"name": None, "height": 37, "width": 53}
    overlay = session.capture[1].overlay(at=(20, 30.5), head=2)
    np.testing.assert_allclose(np.array(said["grid"]).ravel(), overlay.mass, atol=1e-7)
    out = run("run.regard", "--token", "cls", "--figure", "over.svg")
    assert "an image that is not in the capture: 37 × 53 pixels, high and wide" in out
    assert "prepared" not in out
    assert (tmp_path / "over.svg").stat().st_size > 1000
    assert "tower.blocks.2.attention" in run("run.regard")  # the modules, as of every capture


def test_capture_of_a_text_has_no_places(fail, tmp_path):
    from regard.session.session import look_at

    look_at("The animal was tired.", load(bert(tmp_path / "bert", "Model"))).capture.save(tmp_path / "run.regard")
    words = fail("run.regard", "--at", "1,2")
    assert "--at" in words


# ------------------------------------------------------------------------------------------- what is a picture, and who


@pytest.mark.parametrize(
    ("name", "body", "found"),
    [
        ("a.jpg", b"anything", True),
        ("b.JPEG", b"", True),
        ("photo", b"\x89PNG\r\n\x1a\n", True),
        ("photo.bin", b"\xff\xd8\xff\xe0", True),
        ("moving", b"RIFF\x00\x00\x00\x00WEBPVP8 ", True),
        ("new", b"\x00\x00\x00\x20ftypavif", True),
        ("notes.txt", b"a text", False),
        ("run.regard", b"\x10\x00\x00\x00\x00\x00\x00\x00{", False),
    ],
)
def test_file_is_a_picture_by_its_name_or_its_first_bytes(tmp_path, name, body, found):
    (tmp_path / name).write_bytes(body)
    assert is_image(name) is found


@pytest.mark.parametrize("what", ["a cat.jpg", "x" * 5000, "nul\0l", "."])
def test_what_is_no_file_is_no_picture(what):
    assert is_image(what) is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [],
            r"--model.*DIR.*--model.*facebook/dinov2",
        ),
        (
            ["--model", "M", "--row", "1"],
            r"--row.*--layer.*--head.*--token.*--at",
        ),
        (["--model", "M", "--all"], "--all"),
        (["--model", "M", "--truncate"], "--truncate"),
        (["--model", "M", "--at", "1;2"], r"--at.*Y,X.*--at.*120,300.*'1;2'"),
        (["--model", "M", "--at", "1,2,3"], r"--at.*Y,X"),
        (["--model", "M", "--at", "99,2"], r"at=\(99, 2\).*37.*53"),
        (["--model", "M", "--at", "1,2", "--token", "cls"], r"--token.*cls.*--at"),
        (["--model", "M", "--head", "1"], r"--head.*1.*--layer"),
        (["--model", "M", "--layer", "0", "--head", "5"], r"--head.*5.*0"),
        (["--model", "M", "--layer", "7"], r"--layer.*7.*3.*0"),
        (["--model", "M", "--token", "38"], r"--token.*38.*0"),
        (["--model", "M", "--token", "register"], r"2.*'register'.*\(1, 2\)"),
        (["--model", "M", "--token", "word"], "'word'"),
        (["--model", "M", "--measure", "height"], r"--measure.*'height'.*entropy"),
        (["--model", "M", "--text", "a cat"], "picture|image"),
        (["--model", "M", "--device", "moon"], r"--device.*'moon'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(fail, photo, model, arguments, words):
    assert re.search(words, fail(photo, *[model if one == "M" else one for one in arguments]))


def test_model_of_texts_refuses_a_picture(fail, photo, tmp_path):
    assert "BERT" in fail(photo, "--model", str(bert(tmp_path / "bert", "Model")))


def test_model_of_pictures_refuses_a_text(fail, model):
    words = fail("a cat on a mat", "--model", model)
    assert re.search(r"'a cat on a mat'.*photo\.jpg", words)


def test_picture_that_is_not_there_is_missed_as_a_file(fail):
    assert "'photo.jpg'" in fail("photo.jpg", "--model", "M")


def test_text_named_as_a_picture_is_refused_before_the_model_is_loaded(fail, tmp_path):
    (tmp_path / "photo.jpg").write_text("a text")
    assert "photo.jpg" in fail("photo.jpg", "--model", "nowhere")


@pytest.mark.parametrize("option", [("--at", "1,2"), ("--text", "a cat")])
def test_options_of_pictures_are_refused_for_texts(fail, option):
    assert option[0] in fail("a text", *option)


def test_session_without_an_image_is_refused(session):
    with pytest.raises(LookupError, match="no attention"):
        look_image.show_image(Session("empty", type(session.capture)(), ()), LookOptions(), None)


def test_picture_is_served(model, photo, monkeypatch):
    from regard.cli import serve
    from regard.explorer.jobs import ModelShelf

    (found,) = serve._sessions([photo], ModelShelf([model], demo=False), truncate=False)
    assert (found.images[0].name, load(model).family.title) == ("photo.png", "DINOv2 with registers")
