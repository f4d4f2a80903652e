"""JSON files beside config.json."""

from pathlib import Path

import pytest

from regard.formats import read_optional_json


def test_missing_file_is_none(tmp_path: Path) -> None:
    assert read_optional_json(tmp_path, "modules.json", list) is None
    assert read_optional_json(None, "modules.json", list) is None


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{", dict, r"x.json.*JSON.*Expecting"),
        (b"\xff\xfe", dict, r"x.json.*JSON"),
        (b"[" * 100_000, list, r"x.json.*JSON"),
        (b"[]", dict, r"x.json.*list"),
        (b"7", list, r"x.json.*list.*int"),
    ],
)
def test_what_is_not_such_json_is_refused(tmp_path: Path, content: bytes, kind: type, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_optional_json(tmp_path, "x.json", kind)


def test_a_number_of_thousands_of_digits_is_refused_with_the_file(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"max_length": ' + "9" * 5000 + "}")
    with pytest.raises(ValueError, match=r"generation_config\.json.*JSON.*Exceeds"):
        read_optional_json(tmp_path, "generation_config.json", dict)
