"""Text as it becomes certain token by token, up to an end token or a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from regard.generation.loop import GeneratedTokens, TokenLoop

Reason = Literal["eos", "stop", "length"]
"""Why a row ended: an end token, a stop string, or the limit on new tokens."""
Decode = Callable[[list[int]], str]
"""Turns token ids into text; bytes that are not UTF-8 become U+FFFD."""

UNKNOWN = "\ufffd"
MAX_UNKNOWN = 8  # an unfinished character and the one before it, at most 4 bytes each: more is no character to come
MAX_WINDOW = 64  # tokens decoded at once, however little is certain


class Stream:
    """Text as it becomes certain: each item has one piece for each row ("" where there is nothing new).

    Pieces are whole characters and never part of a stop string. Nothing runs until it is iterated, and leaving the loop
    early leaves nothing behind. `stream` makes one.
    """

    def __init__(self, loop: TokenLoop, decode: Decode, on_token: Callable[[int], None] | None = None) -> None:
        self._loop, self._on_token = loop, on_token
        eos, stop_strings = loop.config.eos_token_ids or (), loop.config.stop_strings
        self._rows = [RowText(decode, eos, stop_strings) for _ in loop.prompt_lengths]
        self._steps = self._run()
        self._result: GeneratedTokens | None = None

    def _run(self) -> Iterator[tuple[str, ...]]:
        """The new text of each row after each step, and at last what was held back. Every step waits for its tokens."""
        for steps, tokens in enumerate(self._loop.steps(), 1):
            pieces = tuple(row.push(token) for row, token in zip(self._rows, tokens.tolist(), strict=True))
            if self._on_token is not None:
                self._on_token(steps)
            yield pieces
            if all(row.reason is not None for row in self._rows):
                return
        yield tuple(row.close("length") for row in self._rows)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return self

    def __next__(self) -> tuple[str, ...]:
        with torch.no_grad():  # here and not around a yield, where it would reach the reader's own code
            for pieces in self._steps:
                if any(pieces):
                    return pieces
            if self._result is None:
                self._result = self._loop.result(self._rows)
        raise StopIteration

    def text(self) -> Iterator[str]:
        """The pieces of the only row. Raises ValueError if there are more rows."""
        if len(self._rows) != 1:
            raise ValueError(f"text() is for one row, this stream has {len(self._rows)}: iterate over it instead")
        return (pieces[0] for pieces in self)

    @property
    def result(self) -> GeneratedTokens:
        """All that was generated. Raises RuntimeError before the stream has been read to its end."""
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end: iterate over it first")
        return self._result


class RowText:
    """The text of one row: what has been shown, and why it ended."""

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


class StopStrings:
    """Passes text through until one of `strings` occurs; what could be the beginning of one is held back.

    >>> stops = StopStrings(("END",))
    >>> stops.push("The E"), stops.push("gg. EN"), stops.push("D of it")
    (('The ', False), ('Egg. ', False), ('', True))
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings, self._longest = strings, max(map(len, strings), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is now safe to show, and whether a stop string has occurred, before which it is cut."""
        text = self._held + piece
        places = [at for at in (text.find(s) for s in self._strings) if at >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        # The longest end of the text that could begin a stop string is held back.
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        waiting = next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._strings)), 0)
        safe = len(text) - waiting
        self._held = text[safe:]
        return text[:safe], False

    def close(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held


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
        if piece and sure == text:  # all has been shown: the tokens since the last time become the context
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode(self._window))
        elif stuck and not piece:
            del self._window[self._context :]  # they had no text
        return piece

    def close(self) -> str:
        """The text that was held back, when no more tokens come."""
        rest = self._decode(self._window)[self._shown :] if self._window else ""
        self._window, self._context, self._shown = [], 0, 0
        return rest
