"""How stored outputs compare with new ones: by value, with room for rounding and for nothing else."""

import json

import pytest
from stored_outputs import differences, to_json

RANKED = [{"word": "a", "score": 0.5}, {"word": "b", "score": 0.500001}, {"word": "c", "score": 0.25}]


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        (0.5, 0.50004),
        (0.0, 9e-6),
        ("layer 1: 0.25 of 3", "layer 1: 0.26 of 3"),
        ("error 1.5e-07", "error 2e-07"),
        ([1, None, "a", True], [1, None, "a", True]),
        (RANKED, [RANKED[1], RANKED[0], RANKED[2]]),
    ],
)
def test_rounding_and_ties_are_no_difference(stored, now):
    assert differences(stored, now) == []


@pytest.mark.parametrize(
    ("stored", "now", "places"),
    [
        (0.5, 0.5002, [""]),
        (3, 4, [""]),
        (1, True, [""]),
        (None, 0, [""]),
        ("layer 1: 0.25", "layer 2: 0.25", [""]),
        ("layer 1: 0.25", "layer 1: 0.27", [""]),
        ([1, 2], [1, 2, 3], [""]),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, [".a.b", ".a.c"]),
        ({"a": [0.5, {"b": "x"}]}, {"a": [0.6, {"b": "y"}]}, [".a[0]", ".a[1].b"]),
        (RANKED, [RANKED[2], RANKED[1], RANKED[0]], ["[0].word", "[0].score", "[2].word", "[2].score"]),
    ],
)
def test_every_other_difference_is_named_by_its_place(stored, now, places):
    assert [line.split(": ")[0] for line in differences(stored, now)] == places


def test_json_keeps_its_values_and_shortens_its_numbers():
    value = {"weights": [n / 7 for n in range(40)], "tokens": ["고양이"] * 30, "one": {"layer": 1, "none": None}}
    text = to_json(value)
    assert max(map(len, text.splitlines())) <= 120
    assert differences(value, json.loads(text)) == []
    assert "0.142857," in text
    assert '"one": {"layer": 1, "none": null}' in text
