"""Pairwise parameter grids: a test marked `pairwise` runs a few of its parameter sets which hold every pair of values.

A pytest plugin, named in conftest.py; `pytest --full-grids` runs every parameter set.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

import pytest

Row = tuple[int, ...]  # one parameter set: the identity of each value, since values need not be hashable


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-grids", action="store_true", help="run every parameter set, not pairs of values only")


def pytest_configure(config: pytest.Config) -> None:
    line = "pairwise(*names): take all pairs of values of these parameters, or of all, instead of their product"
    config.addinivalue_line("markers", line)


def pairwise(rows: Iterable[Row]) -> set[Row]:
    """A small subset of the rows in which every pair of values of two columns still occurs.

    Greedy: the next row is the one with most pairs that no row before it has, the first of equals.
    """
    pairs: dict[Row, set[object]] = {row: {*combinations(enumerate(row), 2)} or {row} for row in rows}
    missing: set[object] = set().union(*pairs.values())
    chosen = set()
    while missing:
        row = max(pairs, key=lambda row: len(pairs[row] & missing))
        chosen.add(row)
        missing -= pairs[row]
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what no grid needs. By sorted names, so that the choice is the same in every process and every order."""
    if config.getoption("--full-grids"):
        return
    grids: dict[tuple[object, ...], dict[Row, pytest.Item]] = defaultdict(dict)
    for item in sorted(items, key=lambda item: item.nodeid):
        marker = item.get_closest_marker("pairwise")
        if marker is not None:
            values = {name: id(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            names = marker.args or tuple(values)
            rest = tuple(value for name, value in values.items() if name not in names)
            grids[item.nodeid.split("[")[0], rest][tuple(values[name] for name in names)] = item
    spare = {grid[row] for grid in grids.values() for row in grid.keys() - pairwise(grid)}
    config.hook.pytest_deselected(items=[item for item in items if item in spare])
    items[:] = [item for item in items if item not in spare]
