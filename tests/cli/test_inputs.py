"""Names of files among what was typed: one that is not there is told, and not read as a text."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from seeing_twins import picture, vit
from speaking_twins import bert

from regard.cli import main, serve
from regard.cli.commands import LookOptions
from regard.cli.inputs import is_file
from regard.cli.outputs import write_session
from regard.explorer.jobs import ModelShelf
from regard.lens.capture import Capture
from regard.session.session import Session

pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: Any) -> str:
    return str(bert(tmp_path_factory.mktemp("bert"), "ForSequenceClassification"))


@pytest.fixture(scope="module")
def seer(tmp_path_factory: Any) -> str:
    return str(vit(tmp_path_factory.mktemp("vit")))


@pytest.fixture
def photo() -> str:
    Image.fromarray(picture(0, 37, 53)).save("photo.png")
    return "photo.png"


@pytest.mark.parametrize("name", ["nope.JPG", "nope.txt", "nope.md", "dir/nope.npz", "nope.regard"])
def test_name_of_a_file_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'"):
        is_file(name, "look takes a text")


@pytest.mark.parametrize("text", ["see nope.jpg", "-", "고양이", "x" * 5000, "a.b"])
def test_text_is_no_name_of_a_file(text: str) -> None:
    assert not is_file(text, "")


def test_file_that_is_there_is_one_whatever_it_is_called() -> None:
    Path("고양이").touch()
    assert is_file("고양이", "")


@pytest.mark.parametrize("name", ["nope.jpg", "nope.txt"])
@pytest.mark.parametrize("kind", ["reader", "seer"])
def test_serve_does_not_read_the_name_of_a_missing_file(request: Any, name: str, kind: str) -> None:
    models = ModelShelf([request.getfixturevalue(kind)], demo=False)
    with pytest.raises(ValueError, match=f"'{name}'"):
        serve._sessions([name], models, truncate=False)


def test_serve_reads_a_text_file_and_a_text(reader: str) -> None:
    Path("a.txt").write_text("the cat")
    found = serve._sessions(["a.txt", "a dog"], ModelShelf([reader], demo=False), truncate=False)
    assert [session.text for session in found] == ["the cat", "a dog"]


def test_serve_says_how_a_picture_is_named_to_a_model_of_pictures(seer: str) -> None:
    wanted = r"ViT.*'a dog'.*photo.jpg.*--m"
    with pytest.raises(ValueError, match=wanted):
        serve._sessions(["a dog"], ModelShelf([seer], demo=False), truncate=False)


def test_serve_without_anything_begins_empty_where_the_model_looks_at_pictures(seer: str, reader: str) -> None:
    assert serve._sessions([], ModelShelf([seer], demo=False), truncate=False) == []
    (found,) = serve._sessions([], ModelShelf([reader], demo=False), truncate=False)
    assert found.text == serve.FIRST


@pytest.mark.parametrize("command", ["embed", "classify"])
def test_picture_that_is_not_there_is_no_text(fail: Any, reader: str, command: str) -> None:
    said = fail(command, "a text", "nope.jpg", "--model", reader)
    assert "'nope.jpg'" in said


@pytest.mark.parametrize(("command", "who"), [("embed", "embed"), ("classify", "BERT")])
def test_picture_is_no_text(fail: Any, reader: str, photo: str, command: str, who: str) -> None:
    assert re.search(rf"'photo\.png'.*{who}", fail(command, photo, "--model", reader))


def test_names_of_pictures_in_sentences_and_of_other_files_are_texts(reader: str) -> None:
    assert main(["embed", "see nope.jpg", "nope.txt", "--model", reader]) == 0
    assert main(["classify", "see nope.jpg", "nope.txt", "--model", reader]) == 0


def test_capture_that_cannot_be_written_is_named() -> None:
    Path("folder").mkdir()
    with pytest.raises(OSError, match="'folder'"):
        write_session(Session("toy", Capture(), ()), LookOptions(save=Path("folder")))


def test_question_to_a_model_of_texts_is_refused_before_its_head_is_looked_for(
    fail: Any, reader: str, photo: str
) -> None:
    said = fail("answer", photo, "what?", "--model", reader)
    assert "BERT" in said
    assert "BERT" in fail("caption", photo, "--model", reader)
