"""Reading training data: tables as programs write them, and the fingerprint that tells data apart."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data.rows import fingerprint, read_documents, read_rows
from regard.training.recipes.labelled_texts import label_number


def test_tables_of_spreadsheets_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"two\r\nlines, and ""quotes""",1\r\n\r\nplain,0\r\n')
    rows = read_rows(path, ("text", "label"))
    assert [row["label"] for row in rows] == ["1", "0"]
    assert rows[0]["text"] == 'two\nlines, and "quotes"'
    (tmp_path / "b.tsv").write_text('a "b\t1\n')
    assert read_rows(tmp_path / "b.tsv", ("text", "label")) == [{"text": 'a "b', "label": "1"}]


def test_table_of_more_columns_must_name_them(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,review\n1,"a dog, a cat"\n')
    with pytest.raises(ValueError, match=r"a\.csv.*'id', 'review'.*text"):
        read_rows(path, ("text",))
    assert read_rows(path, ("review",)) == [{"id": "1", "review": "a dog, a cat"}]


@pytest.mark.parametrize("line", ["7", '"text"', "null", "[1]", '{"text": "a"}', '{"text": "a", "label": null}'])
def test_rows_without_the_columns_are_refused_by_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a", "label": 0}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl.*row 1.*label"):
        read_rows(path, ("text", "label"))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt"):
        read_documents(tmp_path / "a.txt")


def test_fingerprints_tell_contents_apart_and_nothing_else(tmp_path):
    array = np.zeros((100, 100))
    other = array.copy()
    other[50, 50] = 1  # left out of an array's repr
    assert fingerprint((array, [1])) == fingerprint((array.copy(), [1])) != fingerprint((other, [1]))
    assert fingerprint([torch.from_numpy(array)]) != fingerprint([torch.from_numpy(other)])
    images = [[{"image": Image.new("L", (4, 4), color), "text": "a"}] for color in (0, 0, 1)]
    first, same, different = map(fingerprint, images)
    assert first == same != different
    names = []
    for folder in ("cat", "dog"):
        (tmp_path / folder / folder).mkdir(parents=True)
        (tmp_path / folder / folder / "1.png").write_bytes(b"same")
        names.append(fingerprint(tmp_path / folder))
    assert names[0] != names[1]


@pytest.mark.parametrize("label", [0.5, float("inf"), float("nan"), 2, -1, "c", None, [1]])
def test_labels_that_the_model_does_not_have_are_refused(label):
    with pytest.raises(ValueError, match="row 3"):
        label_number(label, ("a", "b"), 3)
    assert [label_number(label, ("a", "b"), 3) for label in ("b", 1, 1.0, "1", np.int64(1))] == [1] * 5
