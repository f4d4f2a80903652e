"""JSON files beside config.json."""

from pathlib import Path

import pytest

from regard.models.checkpoint.side_files import read_side


def test_missing_file_is_none(tmp_path: Path) -> None:
    assert read_side(tmp_path, "modules.json", list) is None
    assert read_side(None, "modules.json", list) is None


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{", dict, "x.json is not JSON: Expecting property name"),
        (b"\xff\xfe", dict, "x.json is not JSON: "),
        (b"[" * 100_000, list, "x.json is not JSON: "),
        (b"[]", dict, "x.json must hold an object, it holds list"),
        (b"7", list, "x.json must hold a list, it holds int"),
    ],
)
def test_what_is_not_such_json_is_refused(tmp_path: Path, content: bytes, kind: type, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_side(tmp_path, "x.json", kind)


def test_a_number_of_thousands_of_digits_is_refused_with_the_file(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"max_length": ' + "9" * 5000 + "}")
    with pytest.raises(ValueError, match=r"generation_config\.json is not JSON: Exceeds the limit"):
        read_side(tmp_path, "generation_config.json", dict)
