"""JSON objects out of files: what is read, and in whose words the rest is refused."""

import pytest

from regard.formats import Refusal, parsed


class DamagedError(ValueError):
    """An error that only these tests raise."""


REFUSAL = Refusal(
    error=DamagedError,
    deep="too deep",
    broken="broken: {why}",
    other="a {kind}: {value}",
    twin="{key} comes {times} times",
)


@pytest.mark.parametrize("text", ['{"a": [1, {"a": 2}], "한": null}', '{"a": [1, {"a": 2}], "한": null}'.encode()])
def test_object_is_read_with_its_keys_in_order(text):
    value = parsed(text, REFUSAL)
    assert value == {"a": [1, {"a": 2}], "한": None}
    assert list(value) == ["a", "한"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "broken: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "broken: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"\xff": 1}', "broken: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
        (b"\xed\xa0\x80", "broken: 'utf-8' codec can't decode byte 0xed in position 0: invalid continuation byte"),
        ("{}".encode("utf-16"), "broken: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("[" * 200_000, "too deep"),
        ("[3, 5]", "a list: [3, 5]"),
        ("null", "a NoneType: None"),
        ('{"a": 1, "b": 2, "b": 3, "a": 4, "b": 5}', "'b' comes 3 times"),
        ('[{"{key}": 1, "{key}": 2}]', "'{key}' comes 2 times"),
    ],
)
def test_anything_else_is_refused_in_the_words_given(text, message):
    with pytest.raises(DamagedError) as caught:
        parsed(text, REFUSAL)
    assert str(caught.value) == message


def test_integer_of_thousands_of_digits_is_refused():
    with pytest.raises(DamagedError, match="Exceeds"):
        parsed('{"a": ' + "9" * 5000 + "}", REFUSAL)


def test_long_value_is_shortened_in_the_refusal():
    with pytest.raises(DamagedError) as caught:
        parsed('"' + "x" * 10_000 + '"', REFUSAL)
    assert len(str(caught.value)) < 60
