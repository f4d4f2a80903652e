"""Pieces: the tokens of any tokenizer as people read them, with the spaces where they belong.

    >>> "".join(" " * piece.space + piece.text for piece in readable(["the", "cat", "##s", "sat"]))
    'the cats sat'

It goes by the marks that tokenizers leave: ##ing (WordPiece), Ġword (bytes), ▁word (SentencePiece), word</w>, " word".
Where none is found every token is a word. A tokenizer of bytes also writes all but ASCII in stand-ins (ê³łìĸĳìĿ´ for
고양이); those are turned back.

This file does not know tokenizers, fonts, nor where anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Piece", "readable", "visible"]


@dataclass(frozen=True)
class Piece:
    """A token to read: its text, whether a space stands before it, and whether a line ends with it."""

    text: str
    space: bool
    ends: bool = False


def readable(tokens: Sequence[str]) -> list[Piece]:
    r"""Tokens as people read them, one piece for each.

    >>> [piece.text for piece in readable(["Ġê³łìĸĳìĿ´", "Ċ", "Ġìĸ"])]
    ['고양이', '↵', '\\xec\\x96']

    tokens: the strings of a tokenizer. What is not a whole letter stays as its bytes, a line end is ↵, a tab ⇥, and
    a token of nothing but spaces ␣.
    """
    marks = {name: sum(map(marked, tokens)) for name, (marked, _) in _STYLES.items()}
    style = max(marks, key=lambda name: marks[name]) if any(marks.values()) else "words"
    plain = _STYLES[style][1] if style != "words" else _word
    texts = [plain(token) for token in tokens]
    spaces = [text.startswith(" ") for text in texts]
    if style == "ends":
        spaces = [False, *(token.endswith("</w>") for token in tokens[:-1])]
    return [
        Piece(visible(text.removeprefix(" ")), space and n > 0, text.endswith("\n"))
        for n, (text, space) in enumerate(zip(texts, spaces, strict=True))
    ]


def visible(text: str) -> str:
    r"""A text with signs for what would not be seen: ↵ for a line's end, ⇥ for a tab, ␣ for nothing but spaces.

    >>> visible("\n"), visible(""), visible("a\tb"), visible(" a")
    ('↵', '␣', 'a⇥b', ' a')
    """
    if not text.strip(" "):
        return "␣" * max(1, len(text))
    return text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥") or "↵"


# -------------------------------------------------------------- a token as plain text, " " before what a space precedes


def _word(token: str) -> str:
    return " " + token.removeprefix(" ")


def _of_wordpiece(token: str) -> str:
    return token[2:] if _in_wordpiece(token) else " " + token


def _in_wordpiece(token: str) -> bool:
    return token.startswith("##") and len(token) > 2


def _of_bytes(token: str) -> str:
    if not all(sign in _BYTE for sign in token):  # a special token with signs of its own
        return token
    return bytes(_BYTE[sign] for sign in token).decode("utf-8", errors="backslashreplace")


def _byte_signs() -> dict[str, int]:
    """The sign by which GPT-2's tokenizer, and all after it, write each byte: itself, or the next from Ā on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE = _byte_signs()
_STYLES: dict[str, tuple[Callable[[str], bool], Callable[[str], str]]] = {  # is it marked so; as plain text
    "bytes": (lambda token: token.startswith(("Ġ", "Ċ")), _of_bytes),
    "sentencepiece": (lambda token: token.startswith("▁"), lambda token: token.replace("▁", " ")),
    "wordpiece": (_in_wordpiece, _of_wordpiece),
    "ends": (lambda token: token.endswith("</w>"), lambda token: token.removesuffix("</w>")),
    "spaces": (lambda token: token.startswith(" "), lambda token: token),
}
