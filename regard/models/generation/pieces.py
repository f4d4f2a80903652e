"""Text from tokens as they come: each piece as soon as no later token can change it.

A character may be split over tokens (Hangul and emoji over byte tokens); until its last byte is there, decoding gives
U+FFFD in its place, and that is held back. Only the last few tokens are decoded again at each step: a decoder may
treat the first token of a text in its own way (sentencepiece drops its space), so those shown last stay as context.

It does not know any tokenizer: `decode` turns a list of ids into text.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Decode", "Pieces"]

Decode = Callable[[list[int]], str]
"""Turns token ids into text; bytes that are not UTF-8 become U+FFFD."""

UNKNOWN = "\ufffd"
MOST_UNKNOWN = 8  # an unfinished character and the one before it, at most 4 bytes each: more is no character to come
MOST_TOKENS = 64  # tokens decoded at once, however little is certain


class Pieces:
    """The text of one row, piece by piece.

    >>> pieces = Pieces(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    >>> [pieces.push(byte) for byte in "a한".encode()], pieces.close()
    (['a', '', '', '한'], '')

    All pieces joined are the text of all tokens at once, unless a decoder takes back what it gave (ByteFallback does,
    when bytes after a whole character turn out not to be one).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # the tokens that are decoded
        self._context = 0  # of these, how many have been shown in full and only give context
        self._shown = 0  # characters of the window's text that have been given out

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; often "", sometimes several characters."""
        self._window.append(token)
        text = self._decode(self._window)
        sure = text.rstrip(UNKNOWN)
        stuck = len(text) - len(sure) > MOST_UNKNOWN or len(self._window) > MOST_TOKENS
        if stuck:
            sure = text
        piece = sure[self._shown :]
        self._shown = max(self._shown, len(sure))
        if piece and sure == text:
            self._slide()
        elif stuck and not piece:
            del self._window[self._context :]  # they had no text
        return piece

    def close(self) -> str:
        """The text that was held back, when no more tokens come."""
        rest = self._decode(self._window)[self._shown :] if self._window else ""
        self._window, self._context, self._shown = [], 0, 0
        return rest

    def _slide(self) -> None:
        """All has been shown: what came since the last time becomes the context."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = len(self._decode(self._window))
