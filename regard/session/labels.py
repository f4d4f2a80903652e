r"""Token labels as people read them: which are words, which pieces make one word, and where a word stands.

A label is what a tokenizer calls a token: "##ing", " cat", "[CLS]", "\xec" for a byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from unicodedata import lookup, name, normalize

SPECIAL = re.compile(r"\[[A-Z]+\d*\]|<(?!0x)\|?[^<>\s]+\|?>")
JAMO = ("HANGUL CHOSEONG ", "HANGUL JUNGSEONG ", "HANGUL JONGSEONG ")
LONGEST = 40  # characters: a token may have a million
SPACES = {"\n": "↵", "\t": "⇥"}
BYTES = re.compile(r" ?((?:\\x[0-9a-f]{2})+|(?:<0x[0-9A-F]{2}>)+)")  # a part of a character


def is_word(label: str) -> bool:
    """Whether a token is neither special nor punctuation. An unknown label, "", counts as a word."""
    bare = label.strip()
    return not label or (not SPECIAL.fullmatch(bare) and any(letter.isalnum() for letter in bare))


def shown(label: str) -> str:
    r"""A label for a line of text: no space around it, nothing that moves a cursor, single jamo as letters, cut at 40.

    >>> shown(" cat"), shown(" "), shown("a\x1b[2J"), shown("##\u1161")
    ('cat', '␣', 'a\\x1b[2J', '##ㅏ')
    """
    bare = normalize("NFC", label).strip(" ")
    if not bare:
        return "␣" if label else ""
    signs = "".join(_sign(letter) for letter in bare[: LONGEST + 1])
    return signs if len(signs) <= LONGEST else signs[: LONGEST - 1] + "…"


def _sign(letter: str) -> str:
    """One character that is safe to print and takes a cell of its own: a vowel without its consonant has none."""
    title = name(letter, "")
    for kind in JAMO:
        if title.startswith(kind):
            try:
                return lookup("HANGUL LETTER " + title.removeprefix(kind))
            except KeyError:  # an old letter that stands nowhere alone
                return letter
    if letter in SPACES:
        return SPACES[letter]
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def word_numbers(labels: Sequence[str]) -> list[int]:
    r"""For each token the number of the word it belongs to: pieces of one word, or bytes of one character, share it.

    >>> word_numbers(["[CLS]", "token", "##ization", "."]), word_numbers(["The", " c", "at", "."])
    ([0, 1, 1, 2], [0, 1, 1, 2])
    >>> word_numbers(["so", r" \xf0\x9f", r"\x98\x80", "!"])
    [0, 1, 1, 2]
    """
    by_space = any(len(label) > 1 and label[0] == " " for label in labels)  # else ## marks a piece that goes on
    numbers: list[int] = []
    for n, label in enumerate(labels):
        joined = label.startswith("##") and len(label) > 2
        if by_space and n:
            joined = is_word(label) and is_word(labels[n - 1]) and not label.startswith(" ") and bool(label)
            joined = joined and bool(labels[n - 1].strip())
        if n and _bytes(labels[n - 1]) and _bytes(label):
            joined = joined or 0x80 <= _bytes(label)[0] < 0xC0  # a byte that continues a character
        numbers.append((numbers[-1] if joined else numbers[-1] + 1) if numbers else 0)
    return numbers


def _bytes(label: str) -> bytes:
    """The bytes that a label names; none if it is text."""
    return bytes.fromhex(re.sub(r"[^0-9a-f]|0x", "", label.lower())) if BYTES.fullmatch(label) else b""


def spelled(labels: Sequence[str]) -> str:
    """The word that pieces make: "tokenization" of "token" and "##ization"; bytes become characters."""
    pieces = [label.removeprefix("##") for label in labels]
    word = "".join(pieces)
    if any(map(_bytes, labels)):
        with suppress(UnicodeDecodeError):
            word = b"".join(_bytes(piece) or piece.encode() for piece in pieces).decode()
    return normalize("NFC", word).strip()


def token_name(labels: Sequence[str], place: int) -> str:
    r"""A token as it is called in a link: its word, and in brackets the piece of it where it is not the whole.

    >>> labels = ["the", "token", "##ization"]
    >>> token_name(labels, 0), token_name(labels, 2), token_name(["", ""], 1)
    ('the', 'tokenization[##ization]', '1')
    >>> token_name([r"\xe2\x98", r"\x83"], 1)
    '☃'
    """
    piece = shown(labels[place])
    if not piece:
        return str(place)
    near = range(max(0, place - 32), min(len(labels), place + 33))  # a word has not more pieces than that
    numbers = word_numbers([labels[n] for n in near])
    own = numbers[place - near.start]
    pieces = [labels[n] for n, number in zip(near, numbers, strict=True) if number == own]
    if len(pieces) == 1:
        return piece
    word = shown(spelled(pieces))
    return word if all(map(_bytes, pieces)) else f"{word}[{piece}]"


def find_word(labels: Sequence[str], wanted: str) -> list[range]:
    """The runs of tokens that spell a word, ignoring case."""

    def folded(pieces: Sequence[str]) -> str:  # jamo that a tokenizer took apart are the beginning of their syllable
        return normalize("NFD", spelled(pieces).casefold())

    target = folded([wanted])
    runs = []
    for start in range(len(labels) if target else 0):
        text = ""
        for stop in range(start + 1, len(labels) + 1):
            text = folded(labels[start:stop])
            if not text or len(text) >= len(target) or not target.startswith(text):
                break
        if text == target:
            runs.append(range(start, stop))
    return runs
