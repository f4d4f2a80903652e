"""Stopping: a stop string is found wherever pieces split it, and no part of it is ever let through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.generation.config import read_eos, read_stop
from regard.generation.streaming import StopStrings


def run(strings, pieces):
    """What was shown after each piece, all that was shown at last, and whether it stopped."""
    stops, shown, after = StopStrings(strings), "", []
    for piece in pieces:
        text, stopped = stops.push(piece)
        shown += text
        after.append(shown)
        if stopped:
            return after, shown, True
    return after, shown + stops.close(), False


def first_end(strings, text):
    """Where the first stop string to be complete begins: the shortest beginning of text that holds one, cut there."""
    for n in range(len(text) + 1):
        found = [at for at in (text[:n].find(s) for s in strings) if at >= 0]
        if found:
            return min(found)
    return None


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab\n", max_size=3), max_size=12),
)
def test_shown_text_is_what_comes_before_the_first_stop_string(strings, pieces):
    strings, text = tuple(strings), "".join(pieces)
    after, shown, stopped = run(strings, pieces)
    assert stopped == any(s in text for s in strings)
    # A piece may complete two at once: the one that begins first decides, so compare letter by letter.
    assert run(strings, list(text))[1] == text[: first_end(strings, text)]
    if not stopped:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(s in shown for s in strings)
    for seen in after:  # nothing shown is taken back, nor is it the beginning of a stop string that came
        assert shown.startswith(seen)


@given(st.lists(st.text("ab", max_size=3), max_size=12))
def test_no_more_is_held_back_than_could_become_a_stop_string(pieces):
    stops, text, shown = StopStrings(("aab",)), "", ""
    for piece in pieces:
        text += piece
        new, stopped = stops.push(piece)
        shown += new
        if stopped:
            return
        assert text.removeprefix(shown) in ("", "a", "aa")


def test_without_stop_strings_all_goes_through_at_once():
    assert StopStrings(()).push("anything") == ("anything", False)


def test_of_several_strings_the_one_that_begins_first_cuts():
    assert StopStrings(("world", "lo w")).push("hello world") == ("hel", True)


def test_hangul_split_over_pieces_is_found():
    after, shown, stopped = run(("끝입니다",), ["이야기 끝", "입", "니다 더"])
    assert (after, shown, stopped) == (["이야기 ", "이야기 ", "이야기 "], "이야기 ", True)


@pytest.mark.parametrize(("eos", "want"), [(None, ()), (3, (3,)), ((), ()), ([5, 3, 5], (5, 3))])
def test_end_tokens_are_none_one_or_several(eos, want):
    assert read_eos(eos) == want


@pytest.mark.parametrize(
    ("eos", "error", "message"),
    [
        (-1, ValueError, r"eos.*0.*-1"),
        ([2, "3"], TypeError, r"eos.*str.*'3'"),
        ([None], TypeError, r"eos.*None"),
        ([[0]], TypeError, r"eos.*\[0\]"),
        (2.0, TypeError, r"eos.*2.0"),
    ],
)
def test_an_end_token_that_is_none_is_refused(eos, error, message):
    with pytest.raises(error, match=message):
        read_eos(eos)


def test_stop_strings_are_none_one_or_several():
    assert read_stop("ab") == ("ab",)
    assert read_stop(["ab", "c"]) == ("ab", "c")
    assert read_stop(()) == ()


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ValueError, match="stop"):
        read_stop(stop)


def test_a_stop_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match=r"stop.*str.*int.*5"):
        read_stop([5])


def test_stop_that_is_no_list_is_refused():
    with pytest.raises(TypeError, match=r"stop.*str.*int.*3"):
        read_stop(3)
