"""Text as it becomes certain token by token, up to an end token or a stop string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Reason = Literal["eos", "stop", "length"]
"""Why a row ended: an end token, a stop string, or as many new tokens as were asked for."""


class StopStrings:
    """Passes text through until one of `strings` occurs; what could be the beginning of one is held back.

    >>> stops = StopStrings(("END",))
    >>> stops.push("The E"), stops.push("gg. EN"), stops.push("D of it")
    (('The ', False), ('Egg. ', False), ('', True))
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._longest = max((len(s) for s in strings), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is now safe to show, and whether a stop string has occurred, before which it is cut."""
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._strings) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        safe = len(text) - self._waiting(text)
        self._held = text[safe:]
        return text[:safe], False

    def close(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _waiting(self, text: str) -> int:
        """Number of characters at the end of the text that could begin a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._strings):
                return n
        return 0


Decode = Callable[[list[int]], str]
"""Turns token ids into text; bytes that are not UTF-8 become U+FFFD."""

UNKNOWN = "\ufffd"
MAX_UNKNOWN = 8  # an unfinished character and the one before it, at most 4 bytes each: more is no character to come
MAX_WINDOW = 64  # tokens decoded at once, however little is certain


class TextPieces:
    """The text of one row, piece by piece.

    >>> pieces = TextPieces(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
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
        stuck = len(text) - len(sure) > MAX_UNKNOWN or len(self._window) > MAX_WINDOW
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
        """All text has been shown: the tokens since the last time become the context."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = len(self._decode(self._window))


class RowText:
    """The text of one row: what has been shown, and why it ended.

    Args:
        decode: turns token ids into text.
        eos: tokens that end the row.
        stop_strings: strings that end the row.
    """

    def __init__(self, decode: Decode, eos: tuple[int, ...], stop_strings: tuple[str, ...]) -> None:
        self._pieces, self._stops, self._eos = TextPieces(decode), StopStrings(stop_strings), eos
        self.length = 0  # tokens so far
        self.text = ""
        self.reason: Reason | None = None

    def push(self, token: int) -> str:
        """Add a token; returns the text to show now."""
        if self.reason is not None:
            return ""
        self.length += 1
        if token in self._eos:
            return self.close("eos")
        text, stopped = self._stops.push(self._pieces.push(token))
        self.reason = "stop" if stopped else None
        self.text += text
        return text

    def close(self, reason: Reason) -> str:
        """End the row; returns the text that was held back, unless a stop string is in it after all."""
        if self.reason is not None:
            return ""
        text, stopped = self._stops.push(self._pieces.close())
        self.reason = "stop" if stopped else reason
        text += self._stops.close()
        self.text += text
        return text
