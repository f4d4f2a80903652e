import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.tables import html, number, pad, text, width

WORDS = st.text(st.sampled_from("ab 0.·고양이―한ﾊＡe\u0301<&"), max_size=8)


# --------------------------------------------------------------------------------------------------------------- width


@pytest.mark.parametrize(
    ("string", "cells"),
    [
        ("", 0),
        ("cat", 3),
        ("고양이", 6),
        ("cat 고양이", 10),
        ("猫", 2),
        ("Ａ", 2),  # full-width Latin
        ("ﾊ", 1),  # half-width katakana
        ("e\u0301", 1),  # e and a combining accent
        ("O(n²·d)", 7),
        ("─■·", 3),
    ],
)
def test_width_counts_terminal_cells(string, cells):
    assert width(string) == cells


@given(WORDS, WORDS)
def test_width_of_two_strings_adds_up(a, b):
    assert width(a + b) == width(a) + width(b)


# ----------------------------------------------------------------------------------------------------------------- pad


def test_pad_fills_on_the_right_or_on_the_left():
    assert pad("고양이", 8) == "고양이  "
    assert pad("고양이", 8, right=True) == "  고양이"


def test_pad_leaves_a_longer_string_whole():
    assert pad("고양이", 5) == "고양이"


@given(WORDS, st.integers(0, 20), st.booleans())
def test_padded_string_has_the_width_that_was_asked_for(string, cells, right):
    padded = pad(string, cells, right)
    assert width(padded) == max(cells, width(string))
    assert padded.endswith(string) if right else padded.startswith(string)


# -------------------------------------------------------------------------------------------------------------- number


@pytest.mark.parametrize(
    ("value", "string"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (-1.0, "-1"),
        (0.25, "0.25"),
        (0.12345, "0.1235"),
        (100.0, "100"),
        (123.456, "123.5"),
        (0.001, "0.001"),
        (0.0009, "0.0009"),
        (0.00002, "2e-05"),
        (-0.00002, "-2e-05"),
        (1234567.0, "1.23e+06"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (3, "3"),
    ],
)
def test_number_is_written_in_few_signs(value, string):
    assert number(value) == string


@given(st.floats(-1e300, 1e300))
def test_number_is_short_and_close_to_the_value(value):
    string = number(value)
    assert len(string) <= len("-1.23e+308")
    assert math.isclose(float(string), value, rel_tol=0.05)


# ---------------------------------------------------------------------------------------------------------------- text


def test_text_lines_up_under_its_rule_with_hangul_in_a_cell():
    table = text(["word", "weight", "x"], [["고양이", "0.5", "a"], ["sat", "0.25", "한"]], right=[1])
    assert table.splitlines() == [
        "word    weight  x",
        "──────  ──────  ──",
        "고양이     0.5  a",
        "sat       0.25  한",
    ]


def test_text_sets_headers_flush_with_their_column():
    assert text(["a", "b"], [["long", "long"]], right=[0]).splitlines()[0] == "   a  b"


def test_text_without_rows_is_the_header_and_its_rule():
    assert text(["word", "무게"], []) == "word  무게\n────  ────"


def test_text_lines_carry_no_trailing_spaces():
    assert text(["a", "b"], [["1", ""], ["", ""]]) == "a  b\n─  ─\n1\n"


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=4), st.sets(st.integers(0, 2)))
def test_text_lines_all_end_at_the_same_cell_when_the_last_column_is_flush_right(rows, right):
    lines = text(["x", "y", "z"], [(a, b, c + "|") for a, b, c in rows], right=[*right, 2]).splitlines()
    assert len(lines) == 2 + len(rows)
    assert {width(line) for line in lines} == {width(lines[0])}


@pytest.mark.parametrize("cells", [["1"], ["1", "2", "3"]])
def test_text_refuses_rows_of_another_length(cells):
    with pytest.raises((IndexError, ValueError)):
        text(["a", "b"], [cells])


# ---------------------------------------------------------------------------------------------------------------- html


def test_html_is_a_table_with_head_and_body():
    assert html(["a", "b"], [["1", "2"], ["3", "4"]]) == (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td>2</td></tr><tr><td>3</td><td>4</td></tr></tbody></table>"
    )


def test_html_escapes_headers_and_cells():
    page = html(['<a href="x">'], [["<script>'&'</script>"]])
    assert "<th>&lt;a href=&quot;x&quot;&gt;</th>" in page
    assert "<td>&lt;script&gt;&#x27;&amp;&#x27;&lt;/script&gt;</td>" in page


def test_html_sets_chosen_columns_flush_right_in_head_and_body():
    assert html(["a", "b"], [["1", "2"]], right=[1]) == (
        '<table><thead><tr><th>a</th><th style="text-align:right">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td style="text-align:right">2</td></tr></tbody></table>'
    )


def test_html_without_rows_has_an_empty_body():
    assert html(["a"], []) == "<table><thead><tr><th>a</th></tr></thead><tbody></tbody></table>"
