"""The patches of one picture among the tokens of a side, and the token that somebody asks for.

Axis letters: W sequences of a batch entry, N positions, P patches of one picture.

It knows neither views nor weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regard.frames import Frame
from regard.layouts import KINDS, Layout
from regard.lens.indexing import index_among

__all__ = ["Patches", "Place", "Token", "beyond", "find_token", "name_kind", "name_token"]

HAIR = 1e-6  # of a picture's longer side: rounding, and no part of a patch

Token = int | str | tuple[int, int] | None
"""Which token is asked for: its index, its kind or word where there is one such, or its window and its index there."""

Place = tuple[int, int]
"""Window and index of a token."""


@dataclass(frozen=True)
class Patches:
    """The patches of one picture.

    >>> three = Patches(Layout.grid(1, 3, size=(4, 4)), Frame.whole(8, 24).resized(4, 12), 0)
    >>> three.cells.tolist(), three.boxes[2].tolist()
    ([[0, 0], [0, 1], [0, 2]], [0.0, 16.0, 8.0, 24.0])
    """

    layout: Layout
    frame: Frame
    picture: int

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """(P, 2) window and index of each."""
        return np.argwhere((self.layout.kind == "patch") & (self.layout.picture == self.picture))

    @cached_property
    def boxes(self) -> NDArray[np.float64]:
        """(P, 4) top, left, bottom, right of each in the photograph."""
        return self.frame.boxes(self._pixels)

    @cached_property
    def beyond(self) -> NDArray[np.bool_]:
        """(P,) which lie wholly beyond the photograph, on what was padded around it."""
        return beyond(self.boxes, self.frame.picture)

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        """(P, 2) row and column of each in the grid that they make."""
        top, left = self._pixels[:, 0], self._pixels[:, 1]
        ranks = [np.unique(edge, return_inverse=True)[1].ravel() for edge in (top, left)]
        return np.stack(ranks, -1).astype(np.int64)

    def number(self, place: Place) -> int | None:
        """Which of the patches a token is; None for none of them."""
        found = np.flatnonzero((self.tokens == place).all(-1))
        return int(found[0]) if len(found) else None

    def at(self, y: float, x: float) -> Place:
        """The patch at a place in the photograph.

        Raises LookupError where the model did not see it, TypeError for what is no number.
        """
        if any(isinstance(n, bool) or not isinstance(n, (int, float, np.integer, np.floating)) for n in (y, x)):
            raise TypeError(f"at must be two numbers, (y, x) in the photograph's pixels; got ({y!r}, {x!r})")
        (height, width), where = self.frame.picture, f"at=({y:g}, {x:g})"
        if not (0 <= y < height and 0 <= x < width):
            raise LookupError(f"{where} is outside the picture, which is {height} pixels high and {width} wide")
        try:
            return self.layout.at(*self.frame.pixel(y, x), self.picture)
        except LookupError:
            (top, left), (bottom, right) = self.boxes[:, :2].min(0), self.boxes[:, 2:].max(0)
            raise LookupError(
                f"{where} is a place that the model did not see: it saw rows {max(top, 0):.4g} to "
                f"{min(bottom, height):.4g} and columns {max(left, 0):.4g} to {min(right, width):.4g} of the picture"
            ) from None

    @property
    def _pixels(self) -> NDArray[np.float64]:
        return np.asarray(self.layout.box[tuple(self.tokens.T)])


def beyond(boxes: NDArray[np.float64], picture: tuple[int, int]) -> NDArray[np.bool_]:
    """Which boxes, (…, 4), have no part in a photograph of this height and width.

    >>> beyond(np.array([[-8.0, 0, 0, 8], [-4, 0, 4, 8]]), (16, 16)).tolist()
    [True, False]
    """
    near = HAIR * max(picture)
    top, left, bottom, right = np.moveaxis(boxes, -1, 0)
    height, width = picture
    return np.asarray((bottom <= near) | (right <= near) | (top >= height - near) | (left >= width - near))


def find_token(layout: Layout, token: Token, words: Sequence[str] | None, name: str) -> Place:
    """Window and index of the token that is meant.

    >>> find_token(Layout.grid(2, 2, size=(4, 4)), "cls", None, "query")
    (0, 0)
    >>> find_token(Layout.text(3), "cat", ["the", " cat", " sat"], "query")
    (0, 1)

    words: of the tokens, where they are known. One that is so written comes before one with space around it, and this
        before one in other letters, capital or small.  name: "query" or "key", for the messages.
    Raises LookupError for a kind or word of which there is none, or several; IndexError for an index that is not there;
    TypeError for what is no token.
    """
    windows, n = layout.shape
    if isinstance(token, str):
        return _by_name(layout, token, words, name)
    if isinstance(token, tuple) and len(token) == 2:
        return index_among("window", token[0], windows, "windows"), _index(token[1], n, name)
    if windows > 1:
        raise LookupError(
            f"token {token!r} is in each of {windows} windows: say which with token=(window, index), or at=(y, x)"
        )
    return 0, _index(token, n, name)


def _index(token: object, n: int, name: str) -> int:
    try:
        return index_among("token", token, n, {"query": "queries", "key": "keys"}[name])
    except IndexError as error:
        raise IndexError(f"no {name} of this attention: {error}") from None


def _by_name(layout: Layout, token: str, words: Sequence[str] | None, name: str) -> Place:
    """A token by its kind, or else by its word."""
    found = [(int(w), int(i)) for w, i in layout.indices(token)] if token in KINDS else []
    known = list(words) if words is not None and layout.shape == (1, len(words)) else None
    if not found and known is not None:
        found = _by_word(known, token)
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(str(i if layout.shape[0] == 1 else (w, i)) for w, i in found[:4])
        raise LookupError(f"{len(found)} tokens are {token!r} ({some}{', …' if len(found) > 4 else ''}): name an index")
    raise LookupError(f"no {name} of this attention is {token!r}: {layout}{'' if token in KINDS else _words(known)}")


def _by_word(words: Sequence[str], token: str) -> list[Place]:
    """The tokens of a word: as it is written, or else without space around it, or else whatever its capitals."""
    ways: list[Callable[[str], str]] = [str, str.strip, lambda word: word.strip().casefold()]
    for way in ways:
        wanted = way(token)
        found = [(0, i) for i, word in enumerate(words) if wanted and way(word) == wanted]
        if found:
            return found
    return []


def _words(words: Sequence[str] | None, most: int = 6) -> str:
    """What can be named instead, for a message."""
    if words is None:
        return "; its words are not known: watch(model, tokens=…) tells them"
    known = list(dict.fromkeys(word.strip() for word in words if word.strip()))
    return f"; its words are {', '.join(map(repr, known[:most]))}{', …' if len(known) > most else ''}" if known else ""


def name_kind(layout: Layout, place: Place) -> str:
    """A token by its kind, counted among those of its kind in its picture where there are several.

    >>> resampled = Layout.grid(2, 2, size=(4, 4)) + Layout.latents(3, picture=0)
    >>> name_kind(resampled, (0, 0)), name_kind(resampled, (0, 5))
    ('cls', 'latent 0')
    """
    kind, picture = str(layout.kind[place]), int(layout.picture[place])
    alike = np.argwhere((layout.kind == kind) & (layout.picture == picture))
    several = (layout.kind == kind).sum() > len(alike)
    of = f" of picture {picture}" if several and picture >= 0 else ""
    return (kind if len(alike) == 1 else f"{kind} {int((alike == place).all(-1).argmax())}") + of


def name_token(patches: Patches, place: Place, words: Sequence[str] | None) -> str:
    """A token in words: a patch by its row and column, text by its word, any other by its kind.

    >>> name_token(Patches(Layout.grid(2, 2, size=(4, 4)), Frame.whole(8, 8), 0), (0, 3), None)
    'patch (1, 0)'
    """
    layout = patches.layout
    kind, picture = str(layout.kind[place]), int(layout.picture[place])
    if kind == "patch":
        own = patches if picture == patches.picture else Patches(layout, patches.frame, picture)
        number = own.number(place)
        assert number is not None
        of = "" if own is patches else f" of picture {picture}"
        return f"patch ({own.cells[number, 0]}, {own.cells[number, 1]}){of}"
    if words is not None and layout.shape == (1, len(words)):
        return f"“{words[place[1]].strip() or words[place[1]]}” ({place[1]})"
    return name_kind(layout, place)
