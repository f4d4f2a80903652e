"""The sides of a map: which positions its cells cover, what they are called, and the strips of bars along them.

Axis letters here: R × C cells over Nq queries and Nk keys.

This file does not know colours, nor where anything stands on a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard.lens.measuring.measures import cell_edges
from regard.lens.pictures.colours import Array
from regard.lens.pictures.drawn_input import read_numbers, read_tokens
from regard.lens.pictures.letters import clip, drawable
from regard.lens.pictures.page import Ticks, ruler, ticks_of
from regard.lens.pictures.pieces import readable
from regard.lens.pictures.sheet import Labels
from regard.rules import numbers

__all__ = ["Side", "Strip", "read_sides", "read_strip"]

BARS = 640  # of a strip at most: two dots each
WORDS = 96  # positions that are named by their tokens at most


@dataclass(frozen=True, eq=False)
class Side:
    """One side of the map: where its cells begin and end, in positions, and the positions' names."""

    edges: Array  # (R + 1,)
    known: bool  # edges are positions, not cells
    names: Labels

    @cached_property
    def first(self) -> int:
        """The first position."""
        return int(self.edges[0])

    @cached_property
    def count(self) -> int:
        """How many positions."""
        return int(self.edges[-1]) - self.first

    @cached_property
    def cells(self) -> int:
        """How many cells."""
        return len(self.edges) - 1

    @property
    def single(self) -> bool:
        """Is each cell one position?"""
        return self.known and self.count == self.cells

    def ticks(self, inches: float, *, side_by_side: bool) -> Ticks:
        """The names along the side: tokens, or round positions."""
        if self.names is not None:
            return ticks_of(self.names, self.count, inches, side_by_side=side_by_side)
        return ruler(self.first, self.first + self.count, inches, side_by_side=side_by_side)


def read_sides(
    shape: tuple[int, ...], rows: Any, columns: Any, exact: bool, tokens: Any, key_tokens: Any
) -> tuple[Side, Side]:
    """The side of the queries and the side of the keys, of (R, C) cells.

    Raises TypeError or ValueError for positions and tokens that do not fit the cells, or cells that cannot be exact.
    """
    edges = [_edges(*given) for given in (("rows", rows, shape[0]), ("columns", columns, shape[1]))]
    known = [exact or given is not None for given in (rows, columns)]
    if exact and any(end[-1] - end[0] >= len(end) for end in edges):
        spans = " × ".join(f"{end[-1] - end[0]:g}" for end in edges)
        raise ValueError(f"exact=True, but {shape[0]} × {shape[1]} cells cover {spans} positions: these are pooled")
    same = np.array_equal(edges[0], edges[1])
    named = (
        ("tokens", tokens, "queries"),
        ("key_tokens", tokens if same and key_tokens is None else key_tokens, "keys"),
    )
    down, across = (
        Side(end, sure, _names(name, given, end, what))
        for end, sure, (name, given, what) in zip(edges, known, named, strict=True)
    )
    return down, across


def _edges(name: str, given: Any, cells: int) -> Array:
    """Where `cells` cells begin and end: (cells + 1,) rising positions."""
    if given is None or isinstance(given, int | np.integer):
        given = range(cells if given is None else int(given))
    if isinstance(given, range):
        if given.step != 1 or given.start < 0 or len(given) < cells:
            raise ValueError(
                f"{name} must be at least as many positions as the {cells} cells, in steps of 1; got {given}"
            )
        return given.start + np.array(cell_edges(len(given), cells), dtype=float)
    edges = numbers(name, given).cpu().double().numpy()
    if edges.shape != (cells + 1,) or edges[0] < 0 or (np.diff(edges) < 1).any() or (edges % 1).any():
        raise ValueError(
            f"{name} must be a number of positions, a range, or the {cells + 1} rising whole edges of {cells} cells; "
            f"got {edges.size} from {edges.min(initial=np.inf):g} to {edges.max(initial=-np.inf):g}"
        )
    return np.asarray(edges)


def _names(name: str, tokens: Any, edges: Array, what: str) -> Labels:
    if tokens is None:
        return None
    count = int(edges[-1] - edges[0])
    pieces = readable(read_tokens(name, tokens, count, what))
    return tuple(clip(drawable(piece.text), 24) for piece in pieces) if count == len(edges) - 1 <= WORDS else None


@dataclass(frozen=True, eq=False)
class Strip:
    """Bars beside the map: one for each position or cell, or for several where there are more than dots."""

    name: str
    values: Array  # (K,)
    edges: Array  # (K + 1,)
    each: int  # how many values a bar stands for


def read_strip(name: str, values: Any, side: Side) -> Strip | None:
    """Bars of one value per position or per cell: of several, the highest received mass or the mean entropy.

    Raises TypeError or ValueError for values of a wrong kind or size, and for negative ones.
    """
    if values is None:
        return None
    values = read_numbers(name, values, "(positions,)")
    if len(values) not in (side.cells, side.count):
        raise ValueError(
            f"{name} has {len(values)} entries, but there are {side.count} positions in {side.cells} cells"
        )
    if (values < -1e-3).any():
        raise ValueError(f"{name} must not be negative, got {np.nanmin(values):.3g}")
    values = np.maximum(values, 0.0)  # an entropy of 0 may have been rounded to just below
    edges = side.edges if len(values) == side.cells else side.first + np.arange(side.count + 1.0)
    each = -(-len(values) // BARS)
    starts = np.arange(0, len(values), each)
    if name == "received":  # a lone key that many look at must not vanish
        bars = np.maximum.reduceat(values, starts)
    else:
        bars = np.add.reduceat(values, starts) / np.diff([*starts, len(values)])
    return Strip(name, bars, np.append(edges[starts], edges[-1]), each)
