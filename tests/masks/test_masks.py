"""Masks against loops written from their docstrings: cell by cell, tile by tile, as values, in print, and refused."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from regard import masks
from regard.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    as_mask,
    blocks,
    causal,
    dense,
    dilated,
    documents,
    padding,
    prefix,
    queries,
    random_blocks,
    window,
)
from regard.masks import globals as globals_

B, H = 3, 2
SIZES = [(7, 7), (5, 11), (11, 5), (1, 7), (7, 1)]
OFFSETS = {"default": None, "given": 2, "negative": -3, "per batch row": [1, -2, 4]}
PER_HEAD = {"per head": [[2, -1]], "per row and head": [[0, 3], [-2, 1], [5, 2]]}
PLACES = pytest.mark.parametrize("offset", (OFFSETS | PER_HEAD).values(), ids=OFFSETS | PER_HEAD)


def pick(value, b, h):
    """One number, one per batch row, or one per row and head, as the docstrings say."""
    if not isinstance(value, list):
        return value
    row = value[b % len(value)]
    return row[h % len(row)] if isinstance(row, list) else row


def assert_cells(make, see, offset=None):
    """At all sizes make(nq, nk) says what see(b, h, p, j, nk) says of the query at position p and the key j."""
    for nq, nk in SIZES:
        mask = make(nq, nk)
        batch, heads = mask.leading
        got = mask.dense(nq, nk)
        assert got.shape == ((nq, nk) if batch * heads == 1 else (batch, heads, nq, nk))
        assert got.dtype == torch.bool
        got = got.expand(B, H, nq, nk).tolist()
        for b, h, i, j in product(range(B), range(H), range(nq), range(nk)):
            p = i + (nk - nq if offset is None else pick(offset, b, h))
            where = f"{mask!r}, {nq} × {nk}, at batch row {b}, head {h}, query {i}, key {j}"
            assert got[b][h][i][j] == see(b, h, p, j, nk), where


# -------------------------------------------------------------------------------------------------------- cell by cell


@PLACES
def test_causal_sees_its_own_position_and_all_before(offset):
    assert_cells(lambda nq, nk: causal(offset), lambda b, h, p, j, nk: j <= p, offset)


SPANS = [(0, 0), (2, 0), (0, 3), ([0, 1, 4], 1), (2, [[0, 3]]), ([[0, 1], [2, 3], [4, 5]], [5, 0, 1])]


@PLACES
@pytest.mark.parametrize(("before", "after"), SPANS)
def test_window_sees_so_many_before_and_after(offset, before, after):
    def see(b, h, p, j, nk):
        return p - pick(before, b, h) <= j <= p + pick(after, b, h)

    assert_cells(lambda nq, nk: window(before, after, offset=offset), see, offset)


@PLACES
@pytest.mark.parametrize(
    ("before", "after", "dilation"),
    [(2, 1, 1), (2, 1, 2), (0, 2, 3), ([1, 0, 3], 0, 2), (1, 1, [1, 4, 2]), ([[1, 0]], 2, [[3, 2]])],
)
def test_dilated_sees_every_so_manyth_position(offset, before, after, dilation):
    def see(b, h, p, j, nk):
        steps = range(-pick(before, b, h), pick(after, b, h) + 1)
        return j in [p + n * pick(dilation, b, h) for n in steps]

    assert_cells(lambda nq, nk: dilated(before, after, dilation, offset=offset), see, offset)


@PLACES
@pytest.mark.parametrize("length", [0, 3, 100, [0, 2, 5], [[1, 4]]])
def test_prefix_shows_its_keys_to_all_and_the_rest_causally(offset, length):
    def see(b, h, p, j, nk):
        return j < pick(length, b, h) or j <= p

    assert_cells(lambda nq, nk: prefix(length, offset=offset), see, offset)


def test_padding_by_lengths_hides_the_end_or_the_beginning():
    def lengths(nk):
        return [0, nk, (nk + 1) // 2]

    assert_cells(lambda nq, nk: padding(lengths(nk)), lambda b, h, p, j, nk: j < lengths(nk)[b])
    assert_cells(lambda nq, nk: padding(lengths(nk), side="left"), lambda b, h, p, j, nk: j >= nk - lengths(nk)[b])


def test_padding_by_booleans_hides_what_is_no_token():
    def tokens(nk):
        return [[(j * j + b) % 3 != 0 for j in range(nk)] for b in range(B)]

    assert_cells(lambda nq, nk: padding(tokens(nk)), lambda b, h, p, j, nk: tokens(nk)[b][j])
    assert_cells(lambda nq, nk: padding(tokens(nk)[1:2]), lambda b, h, p, j, nk: tokens(nk)[1][j])


IDS = {
    "one row": lambda nk: [j // 3 for j in range(nk)],
    "with gaps": lambda nk: [7 * (j // 2) for j in range(nk)],
    "interleaved": lambda nk: [j % 2 for j in range(nk)],
    "some in no document": lambda nk: [-1 if j % 4 == 1 else j // 5 for j in range(nk)],
    "per batch row": lambda nk: [[j // (b + 1) for j in range(nk)] for b in range(B)],
}


def same_document(ids, b, p, j, nk):
    row = ids[b] if isinstance(ids[0], list) else ids
    return 0 <= p < nk and row[p] == row[j] and row[p] >= 0


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_documents_see_only_themselves(offset, ids):
    def see(b, h, p, j, nk):
        return same_document(ids(nk), b, p, j, nk)

    assert_cells(lambda nq, nk: documents(ids(nk), offset=offset), see, offset)


def test_documents_by_lengths_are_documents_by_ids():
    assert documents(lengths=[2, 0, 3]) == documents([0, 0, 2, 2, 2])
    assert documents(lengths=torch.tensor([1, 2])) == documents([0, 1, 1])


CHOSEN = {
    "none": lambda nk: [],
    "first": lambda nk: [0],
    "several": lambda nk: [nk - 1, nk // 2, nk - 1],
}


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_globals_by_positions_see_all_and_are_seen_by_all(offset, chosen):
    def see(b, h, p, j, nk):
        return j in chosen(nk) or p in chosen(nk)

    assert_cells(lambda nq, nk: globals_(chosen(nk), offset=offset), see, offset)


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("rows", [1, B])
def test_globals_by_booleans_see_all_and_are_seen_by_all(offset, rows):
    def chosen(nk):
        return [[j % 3 == b for j in range(nk)] for b in range(rows)]

    def see(b, h, p, j, nk):
        row = chosen(nk)[b % rows]
        return row[j] or (0 <= p < nk and row[p])

    assert_cells(lambda nq, nk: globals_(chosen(nk), offset=offset), see, offset)


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_queries_by_indices_look_at_all_and_others_at_nothing(chosen):
    for nq, nk in SIZES:
        assert queries(chosen(nq)).dense(nq, nk).tolist() == [[i in chosen(nq)] * nk for i in range(nq)]


@pytest.mark.parametrize("rows", [1, B])
def test_queries_by_booleans_look_at_all_and_others_at_nothing(rows):
    for nq, nk in SIZES:
        looking = [[i % 3 == b for i in range(nq)] for b in range(rows)]
        cells = queries(looking).dense(nq, nk).expand(rows, 1, nq, nk)[:, 0]
        assert cells.tolist() == [[[looks] * nk for looks in row] for row in looking]


LAYOUTS = {"shared": (1, 1), "per head": (1, H), "per batch row": (B, 1), "per row and head": (B, H)}


def checkered(leading, rows, cols):
    """Booleans (B or 1, H or 1, rows, cols) that differ along every axis."""
    b, h, r, c = (torch.arange(n) for n in (*leading, rows, cols))
    return (b[:, None, None, None] + 2 * h[:, None, None] + 3 * r[:, None] + 5 * c * c) % 7 < 3


@pytest.mark.pairwise
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("leading", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("size", [1, 3])
def test_blocks_are_seen_where_the_layout_says(offset, leading, size):
    layout = checkered(leading, -(-16 // size), -(-11 // size))  # 16 positions of queries are the most there are

    def see(b, h, p, j, nk):
        return p >= 0 and bool(layout[b % leading[0], h % leading[1], p // size, j // size])

    assert_cells(lambda nq, nk: blocks(layout, size, offset=offset), see, offset)


@pytest.mark.parametrize("offset", PER_HEAD.values(), ids=PER_HEAD)
@pytest.mark.parametrize("kind", ["documents", "globals", "blocks"])
def test_offset_may_differ_by_head_in_masks_of_a_value_per_position(kind, offset):
    layout = checkered((1, 1), 16, 11)
    make, see = {
        "documents": (
            lambda nk, o: documents(IDS["one row"](nk), offset=o),
            lambda b, h, p, j, nk: same_document(IDS["one row"](nk), b, p, j, nk),
        ),
        "globals": (lambda nk, o: globals_([0], offset=o), lambda b, h, p, j, nk: 0 in (j, p)),
        "blocks": (
            lambda nk, o: blocks(layout, 1, offset=o),
            lambda b, h, p, j, nk: p >= 0 and bool(layout[0, 0, p, j]),
        ),
    }[kind]
    assert_cells(lambda nq, nk: make(nk, offset), see, offset)


@pytest.mark.parametrize("leading", [(), (H,), (1, H), (B, 1), (B, H)])
def test_dense_is_what_was_brought(leading):
    def cells(nq, nk):
        return checkered((1, 1, *leading)[-2:], nq, nk).reshape(*leading, nq, nk)

    for nq, nk in SIZES:
        whole = cells(nq, nk).expand(B, H, nq, nk)
        assert torch.equal(dense(cells(nq, nk)).dense(nq, nk).expand(B, H, nq, nk), whole)


def test_dense_shares_axes_of_size_one():
    row, column = [[True, False, True]], [[True], [False]]
    assert dense(row).dense(2, 3).tolist() == [[True, False, True], [True, False, True]]
    assert dense(column).dense(2, 3).tolist() == [[True, True, True], [False, False, False]]


@pytest.mark.parametrize(
    "mask", [causal(), window(1, 0), prefix(1), padding([2]), dilated(1, 0, 2), documents([0, 0, 1])]
)
def test_square_unless_the_number_of_keys_is_given(mask):
    assert torch.equal(mask.dense(3), mask.dense(3, 3))
    assert torch.equal(mask.tiles(3, size=2), mask.tiles(3, 3, size=2))
    assert mask.draw(3) == mask.draw(3, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: causal(),
        lambda: window(1, 0),
        lambda: prefix(1),
        lambda: dilated(1, 0, 2),
        lambda: padding([0, 0]),
        lambda: globals_([]),
        lambda: documents(lengths=[0]),
    ],
    ids=["causal", "window", "prefix", "dilated", "padding", "globals", "documents"],
)
def test_no_keys_is_an_empty_matrix(make):
    assert make().dense(3, 0).shape[-2:] == (3, 0)
    assert make().tiles(3, 0, 2).shape[-2:] == (2, 0)


@pytest.mark.parametrize("mask", [causal(), window(1, 0), documents([0, 0, 1]), globals_([2]), padding([1, 2])])
def test_no_queries_is_an_empty_matrix(mask):
    assert mask.dense(0, 3).shape[-2:] == (0, 3)
    assert mask.tiles(0, 3, 2).shape[-2:] == (0, 2)
    assert mask.draw(0, 3) == ""


# --------------------------------------------------------------------------------------------------------- combinations


@pytest.mark.parametrize(("nq", "nk"), SIZES)
def test_combinations_are_the_combinations_of_their_cells(nq, nk):
    a, b, c = window(2, 1, offset=[0, 1, -1]), padding([nk, 0, 1]), prefix([[1, 0]])
    x, y, z = (m.dense(nq, nk).expand(B, H, nq, nk) for m in (a, b, c))
    for mask, cells in [
        (a & b, x & y),
        (a | c, x | z),
        (~a, ~x),
        (~(a & b) | c, ~(x & y) | z),
        ((a | b) & ~c, (x | y) & ~z),
    ]:
        assert torch.equal(mask.dense(nq, nk).expand(B, H, nq, nk), cells), repr(mask)


def test_combination_varies_over_what_its_parts_vary_over():
    assert (causal() & window(1, 0)).leading == (1, 1)
    assert (causal(offset=[0, 1, 2]) | window([[1, 2]], 0)).leading == (3, 2)
    assert (~padding([1, 2])).leading == (2, 1)


def test_not_not_is_the_mask_itself():
    mask = causal() & window(1, 0)
    assert ~~mask is mask


@pytest.mark.parametrize(
    "other", [3, True, None, "causal", [[True]], torch.ones(3, 3, dtype=torch.bool), np.eye(3) > 0]
)
def test_mask_combines_only_with_masks(other):
    for combine in (
        lambda: causal() & other,
        lambda: causal() | other,
        lambda: other & causal(),
        lambda: other | causal(),
    ):
        with pytest.raises(TypeError, match="unsupported"):
            combine()


# --------------------------------------------------------------------------------------------------------- tile by tile

TILES = [(1, 1), (2, 3), (3, 2), (5, 1), (7, 7)]


def classes(cells, size):
    """What a look at every cell says of each tile: nested lists, (B, H, Tq, Tk)."""

    def of(matrix, r, c):
        tile = [x for row in matrix[r : r + size[0]] for x in row[c : c + size[1]]]
        return FULL if all(tile) else PARTIAL if any(tile) else EMPTY

    return [
        [[[of(m, r, c) for c in range(0, len(m[0]), size[1])] for r in range(0, len(m), size[0])] for m in row]
        for row in cells
    ]


def assert_exact(make):
    """Every tile of make(nq, nk) is called what it is, at all sizes from 1 to 6."""
    for nq, nk in product(range(1, 7), repeat=2):
        mask = make(nq, nk)
        cells = mask.dense(nq, nk).expand(*mask.leading, nq, nk).tolist()
        for size in TILES:
            assert mask.tiles(nq, nk, size).tolist() == classes(cells, size), f"{mask!r}, {nq} × {nk}, tiles {size}"


EXACT = {
    "causal": lambda nq, nk: causal(),
    "causal, offset": lambda nq, nk: causal(offset=1),
    "causal, offset per row and head": lambda nq, nk: causal(offset=[[0, -2], [3, 1]]),
    "window": lambda nq, nk: window(2, 1),
    "window of one": lambda nq, nk: window(0, 0),
    "window, offset per batch row": lambda nq, nk: window(1, 0, offset=[2, -1]),
    "window, per head": lambda nq, nk: window([[0, 3]], [2, 1]),
    "dilated": lambda nq, nk: dilated(1, 1, 2),
    "dilated by 3": lambda nq, nk: dilated(2, 0, 3),
    "dilated by 1": lambda nq, nk: dilated(2, 1, 1),
    "dilated, per head, offset": lambda nq, nk: dilated(1, [[0, 1]], [[2, 3]], offset=[1, -2]),
    "prefix": lambda nq, nk: prefix(2),
    "prefix, per batch row": lambda nq, nk: prefix([0, 3], offset=[1, -1]),
    "padding right": lambda nq, nk: padding([0, nk // 2, nk]),
    "padding left": lambda nq, nk: padding([0, nk // 2, nk], side="left"),
    "padding booleans": lambda nq, nk: padding([[(j + b) % 3 != 0 for j in range(nk)] for b in range(3)]),
    "globals": lambda nq, nk: globals_([0, nk - 1]),
    "globals, none": lambda nq, nk: globals_([]),
    "globals, booleans": lambda nq, nk: globals_([[(j + b) % 3 == 0 for j in range(nk)] for b in range(3)]),
    "globals, offset": lambda nq, nk: globals_([0], offset=[0, -2, 3]),
    "queries": lambda nq, nk: queries([0, nq - 1]),
    "queries, none": lambda nq, nk: queries([]),
    "queries, booleans": lambda nq, nk: queries([[(i + b) % 3 == 0 for i in range(nq)] for b in range(3)]),
    "not queries": lambda nq, nk: ~queries([nq // 2]),
    "blocks": lambda nq, nk: random_blocks(6, 2, count=2, seed=1, num_heads=2),
    "blocks, offset": lambda nq, nk: random_blocks(9, 2, count=2, seed=1, offset=[-2, 3]),
    "dense": lambda nq, nk: dense(torch.rand(2, 3, nq, nk, generator=torch.Generator().manual_seed(nq)) < 0.7),
    "dense, one row": lambda nq, nk: dense([[j % 3 != 1 for j in range(nk)]]),
    "documents in order": lambda nq, nk: documents([j // 2 for j in range(nk)]),
    "documents in order, per batch row": lambda nq, nk: documents(
        [[5 * j // (b + 1) for j in range(nk)] for b in (0, 2)]
    ),
    "nothing": lambda nq, nk: ~causal(offset=9),
    "everything": lambda nq, nk: causal(offset=9),
    "not window": lambda nq, nk: ~window(1, 0),
}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_tile_is_called_empty_or_full_exactly_when_all_its_cells_are(make):
    assert_exact(make)


def test_documents_out_of_order_may_be_called_partial_and_nothing_else():
    mask = documents([0, 5, 2, 2, 5, 0])  # the tile of rows 0–1 and keys 2–3 is empty, but 2 lies between 0 and 5
    kinds, facts = mask.tiles(6, size=2)[0, 0].tolist(), classes([[mask.dense(6).tolist()]], (2, 2))[0][0]
    assert (kinds[0][1], facts[0][1]) == (PARTIAL, EMPTY)
    assert all(kinds[r][c] in (PARTIAL, facts[r][c]) for r, c in product(range(3), repeat=2))


def test_tiles_have_a_row_per_batch_row_and_head_that_the_mask_varies_over():
    kinds = causal(offset=[[0, 2], [1, 3], [-9, 9]]).tiles(5, 4, (5, 4))
    assert kinds.dtype == torch.int8
    assert kinds[..., 0, 0].tolist() == [[PARTIAL, PARTIAL], [PARTIAL, FULL], [EMPTY, FULL]]


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in made)])
        return out


N = 100_000
LONG = {
    "causal": lambda: causal(),
    "causal, offset per batch row": lambda: causal(offset=[0, 5]),
    "window": lambda: window(4096, 0),
    "dilated": lambda: dilated(64, 0, 64),
    "prefix": lambda: prefix(1000),
    "padding right": lambda: padding([N, 7]),
    "padding left": lambda: padding([N, 7], side="left"),
    "padding booleans": lambda: padding(torch.arange(N).expand(2, N) % 2 == 0),
    "documents": lambda: documents(lengths=[1, N - 2, 1]),
    "globals": lambda: globals_([0, 5]),
    "queries": lambda: queries(torch.arange(N).expand(2, N) % 2 == 0),
    "blocks": lambda: random_blocks(N, 1000, count=3, seed=0),
    "combination": lambda: causal() & ~window(4096, 0) | globals_([0]),
}


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_tiles_of_a_long_text_are_found_without_n_by_n(make):
    mask = make()
    with Largest() as made:
        kinds = mask.tiles(N, size=1024)
    assert kinds.shape[-2:] == (98, 98)
    assert made.elements <= 3 * N


def test_the_watch_for_n_by_n_sees_it():
    with Largest() as made:
        causal().dense(50)
    assert made.elements == 2500


# --------------------------------------------------------------------------------------------------------------- random


def test_random_blocks_are_reproducible_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    assert random_blocks(24, 2, count=3, seed=5) == random_blocks(24, 2, count=3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_blocks_of_other_seeds_and_of_other_heads_differ():
    assert random_blocks(24, 2, count=3, seed=5) != random_blocks(24, 2, count=3, seed=6)
    cells = random_blocks(24, 2, count=3, seed=5, num_heads=3).dense(24)
    assert cells.shape == (1, 3, 24, 24)
    assert not torch.equal(cells[0, 0], cells[0, 1])
    assert not torch.equal(cells[0, 1], cells[0, 2])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_each_block_of_queries_sees_so_many_blocks_of_keys(count):
    cells = random_blocks(11, 3, count=count, seed=2, num_heads=5).dense(11)  # 4 blocks, the last of 2 positions
    seen = cells[0, :, ::3, ::3]  # (5, 4, 4), one cell of each block
    assert torch.equal(seen.sum(-1), torch.full((5, 4), count))
    assert torch.equal(seen.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, :11, :11], cells[0])


def test_random_blocks_take_an_offset():
    whole = random_blocks(12, 3, count=2, seed=4)
    assert torch.equal(random_blocks(12, 3, count=2, seed=4, offset=5).dense(4, 12), whole.dense(12)[5:9])


# ------------------------------------------------------------------------------------------------------------ as values


BOOLEANS = [[True, False, True], [False, True, True]]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda v: causal(offset=v), [1, 2]),
        (lambda v: window(v, 0), [1, 2]),
        (lambda v: window(0, v), [[1, 2], [3, 4]]),
        (lambda v: dilated(1, 1, v), [1, 2]),
        (lambda v: prefix(v), [1, 2]),
        (lambda v: padding(v), [1, 2]),
        (lambda v: padding(v, side="left"), [1, 2]),
        (lambda v: padding(v), BOOLEANS),
        (lambda v: documents(v), [0, 0, 1]),
        (lambda v: documents(lengths=v), [2, 1]),
        (lambda v: globals_(v), [0, 2]),
        (lambda v: globals_(v), BOOLEANS),
        (lambda v: queries(v), [0, 2]),
        (lambda v: queries(v), BOOLEANS),
        (lambda v: blocks(v, 2), BOOLEANS),
        (lambda v: dense(v), BOOLEANS),
        (lambda v: causal() & ~window(v, 1), [1, 2]),
    ],
)
def test_mask_is_the_same_value_from_a_list_an_array_and_a_tensor(make, value):
    made = [make(value), make(np.array(value)), make(torch.tensor(value))]
    assert made[0] == made[1] == made[2]
    assert len({hash(m) for m in made}) == 1
    assert len(set(made)) == 1
    assert {made[0]: "found"}[made[2]] == "found"


def test_integers_of_another_width_make_the_same_mask():
    for kind in (torch.uint8, torch.int16, torch.int32):
        short = torch.tensor([2, 1], dtype=kind)
        assert window(short, 0) == window([2, 1], 0)
        assert padding(short) == padding([2, 1])
        assert documents(short) == documents([2, 1])
        assert globals_(short) == globals_([2, 1])
        assert queries(short) == queries([2, 1])


DIFFERENT = [
    causal(),
    causal(offset=0),
    causal(offset=[0]),
    causal(offset=[0, 0]),
    causal(offset=[[0, 0]]),
    window(1, 0),
    window(0, 1),
    window(1, 0, offset=0),
    window([1], 0),
    window([1, 2], 0),
    window([1, 3], 0),
    dilated(1, 0, 1),
    dilated(1, 0, 2),
    prefix(1),
    padding([1, 2]),
    padding([2, 1]),
    padding([1, 2], side="left"),
    padding([[True, False], [True, True]]),
    documents([0, 0, 1]),
    documents([1, 1, 0]),
    documents([[0, 0, 1], [0, 0, 1]]),
    globals_([]),
    globals_([0]),
    globals_([1]),
    globals_([[True, False]]),
    queries([]),
    queries([0]),
    queries([1]),
    queries([[True, False]]),
    queries([[True, False], [True, False]]),
    blocks(BOOLEANS, 2),
    blocks(BOOLEANS, 3),
    dense(BOOLEANS),
    dense([BOOLEANS, BOOLEANS]),
    ~causal(),
    causal() & window(1, 0),
    window(1, 0) & causal(),
    causal() | window(1, 0),
    ~(causal() | window(1, 0)),
]


def test_masks_of_different_numbers_or_shapes_differ():
    for (m, a), (n, b) in product(enumerate(DIFFERENT), repeat=2):
        assert (a == b) == (m == n), f"{a!r} and {b!r}"
    assert len(set(DIFFERENT)) == len(DIFFERENT)


def test_order_and_repetition_of_positions_and_queries_do_not_count():
    assert globals_([2, 0, 2]) == globals_([0, 2])
    assert queries([2, 0, 2]) == queries([0, 2])


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda v: causal(offset=v), [1, 2]),
        (lambda v: window(v, v), [1, 2]),
        (lambda v: dilated(v, v, v), [1, 2]),
        (lambda v: prefix(v), [1, 2]),
        (lambda v: padding(v), [1, 2]),
        (lambda v: padding(v), BOOLEANS),
        (lambda v: documents(v), [[0, 0, 1], [2, 1, 1]]),
        (lambda v: globals_(v), BOOLEANS),
        (lambda v: queries(v), BOOLEANS),
        (lambda v: blocks(v, 2), BOOLEANS),
        (lambda v: dense(v), BOOLEANS),
    ],
)
def test_writing_into_what_was_given_does_not_change_the_mask(make, value):
    tensor, array = torch.tensor(value), np.array(value)
    kept, from_tensor, from_array = make(torch.tensor(value)), make(tensor), make(array)
    tensor.fill_(1)
    array[...] = 1
    assert make(tensor) != kept
    assert from_tensor == kept
    assert from_array == kept


@pytest.mark.parametrize(
    ("mask", "field"),
    [
        (causal(), "offset"),
        (window(1, 0), "before"),
        (padding([1]), "lengths"),
        (queries([1]), "looking"),
        (causal() & window(1, 0), "left"),
        (causal() | window(1, 0), "right"),
        (~causal(), "inner"),
    ],
)
def test_mask_is_frozen(mask, field):
    with pytest.raises(AttributeError, match=f"'{field}'"):
        setattr(mask, field, None)


@pytest.mark.parametrize("array", [np.array([3, 2, 1])[::-1], np.broadcast_to(np.array([2]), (3,))])
def test_array_may_be_reversed_or_read_only(array):
    assert padding(array) == padding(array.tolist())
    assert window(array, 0) == window(array.tolist(), 0)


def test_boolean_array_may_be_reversed():
    cells = np.tril(np.ones((3, 3), dtype=bool))[::-1, ::-1]
    assert as_mask(cells, (3, 3)) == as_mask(cells.copy(), (3, 3))


# ------------------------------------------------------------------------------------------------------------- in print


PRINTED = {
    "causal()": causal(),
    "causal(offset=3)": causal(offset=3),
    "causal(offset=[0, -4])": causal(offset=[0, -4]),
    "causal(offset=[[1, 2], [3, 4]])": causal(offset=[[1, 2], [3, 4]]),
    "window(2, 0)": window(2, 0),
    "window(2, [[0, 5]], offset=1)": window(2, [[0, 5]], offset=1),
    "dilated(2, 1, 3)": dilated(2, 1, 3),
    "dilated([1, 2], 1, [3, 4], offset=-1)": dilated([1, 2], 1, [3, 4], offset=-1),
    "prefix(4)": prefix(4),
    "prefix([4, 2], offset=[0, 1])": prefix([4, 2], offset=[0, 1]),
    "padding([3, 0])": padding([3, 0]),
    "padding([3, 0], side='left')": padding([3, 0], side="left"),
    "globals([0, 2])": globals_([2, 0]),
    "globals([])": globals_([]),
    "globals([1], offset=2)": globals_([1], offset=2),
    "queries([0, 2])": queries([2, 0]),
    "queries([])": queries([]),
    "window(2, 0) & ~queries([1])": window(2, 0) & ~queries([1]),
    "~causal()": ~causal(),
    "causal() & window(2, 0)": causal() & window(2, 0),
    "causal() | window(2, 0)": causal() | window(2, 0),
    "causal() & window(2, 0) & prefix(1)": (causal() & window(2, 0)) & prefix(1),
    "causal() | window(2, 0) | prefix(1)": (causal() | window(2, 0)) | prefix(1),
    "causal() & window(2, 0) | prefix(1)": causal() & window(2, 0) | prefix(1),
    "causal() | window(2, 0) & prefix(1)": causal() | window(2, 0) & prefix(1),
    "causal() & (window(2, 0) | prefix(1))": causal() & (window(2, 0) | prefix(1)),
    "(causal() | window(2, 0)) & prefix(1)": (causal() | window(2, 0)) & prefix(1),
    "~(causal() & window(2, 0)) | ~prefix(1)": ~(causal() & window(2, 0)) | ~prefix(1),
    "~(causal() | ~(window(2, 0) & prefix(1)))": ~(causal() | ~(window(2, 0) & prefix(1))),
}
SUMMARISED = {
    "padding(<2×3 booleans, 4 True>)": padding(BOOLEANS),
    "documents(<1×5 ids, 2 documents>)": documents([0, 0, 1, 1, 1]),
    "documents(<2×3 ids, 1 to 3 documents>)": documents([[0, 0, 0], [0, 1, 2]]),
    "documents(<1×3 ids, 2 documents>, offset=4)": documents([0, 0, 1], offset=4),
    "globals(<2×3 booleans, 4 True>)": globals_(BOOLEANS),
    "queries(<2×3 booleans, 4 True>)": queries(BOOLEANS),
    "blocks(<2×3 booleans, 4 True>, size=5)": blocks(BOOLEANS, 5),
    "blocks(<7×2×2 booleans, 14 True>, size=4, offset=[0, 1])": random_blocks(
        8, 4, count=1, seed=0, num_heads=7, offset=[0, 1]
    ),
    "dense(<2×3 booleans, 4 True>)": dense(BOOLEANS),
    "dense(<1 booleans, 1 True>)": dense([[True]]),
    "causal() & dense(<2×3 booleans, 4 True>)": causal() & dense(BOOLEANS),
}


@pytest.mark.parametrize(("text", "mask"), [*PRINTED.items(), *SUMMARISED.items()])
def test_mask_prints_as_it_is_written(text, mask):
    assert repr(mask) == text


@pytest.mark.parametrize("mask", PRINTED.values(), ids=PRINTED)
def test_what_is_printed_makes_the_same_mask_again(mask):
    assert eval(repr(mask), vars(masks).copy()) == mask


@pytest.mark.parametrize(
    "mask",
    [
        causal() & (window(2, 0) & prefix(1)),
        causal() | (window(2, 0) | prefix(1)),
        ~(causal() & (window(2, 0) & prefix(1))),
    ],
)
def test_what_is_printed_of_a_combination_on_the_right_makes_the_same_mask_again(mask):
    assert eval(repr(mask), vars(masks).copy()) == mask


def combined(inner):
    pairs = st.tuples(inner, inner)
    return pairs.map(lambda p: p[0] & p[1]) | pairs.map(lambda p: p[0] | p[1]) | inner.map(lambda m: ~m)


@given(st.recursive(st.sampled_from([causal(), window(1, 0), prefix(2), globals_([3])]), combined, max_leaves=6))
def test_what_is_printed_means_the_same(mask):
    assert torch.equal(eval(repr(mask), vars(masks).copy()).dense(5, 7), mask.dense(5, 7))


def test_ids_in_no_document_are_not_counted_as_one():
    assert repr(documents([0, 0, 1, -1, -1])) == "documents(<1×5 ids, 2 documents>)"


def test_draw_shows_each_cell():
    assert dilated(1, 0, 2).draw(3, 5) == "■ · ■ · ·\n· ■ · ■ ·\n· · ■ · ■"
    assert (causal() & ~window(1, 0)).draw(4) == "· · · ·\n· · · ·\n■ · · ·\n■ ■ · ·"


def test_draw_shows_the_batch_row_and_head_that_is_asked_for():
    mask = prefix([[0, 1], [2, 3], [4, 5]], offset=-9)
    drawn = [[mask.draw(1, 6, batch=b, head=h).count("■") for h in range(2)] for b in range(3)]
    assert drawn == [[0, 1], [2, 3], [4, 5]]
    assert mask.draw(1, 6, batch=-1, head=-2) == mask.draw(1, 6, batch=2, head=0)


def test_draw_of_many_positions_shows_tiles():
    # 97 positions and at most 48 signs a side: tiles of 3, of which there are 33.
    lines = causal().draw(97).split("\n")
    assert [line.split() for line in lines] == [["■"] * r + ["▒"] + ["·"] * (32 - r) for r in range(32)] + [["■"] * 33]
    assert causal().draw(5, limit=2) == "▒ ·\n■ ▒"


def test_the_last_short_tile_of_a_drawing_is_called_what_it_is():
    assert causal().draw(4, limit=2) == "▒ ·\n■ ▒"
    assert causal().draw(3, limit=2) == "▒ ·\n■ ■"  # the last tile is one cell


def test_draw_of_as_many_positions_as_the_limit_shows_cells():
    assert "▒" not in causal().draw(48)
    assert len(causal().draw(48).split("\n")) == 48
    assert len(causal().draw(49).split("\n")) == 25


# -------------------------------------------------------------------------------------------------------- what is given


def test_as_mask_passes_masks_and_none_through():
    mask = causal()
    assert as_mask(mask, (2, 3, 5, 7)) is mask
    assert as_mask(None, (2, 3, 5, 7)) is None


@pytest.mark.parametrize(
    ("cells", "weights"),
    [((5, 7), (5, 7)), ((5, 7), (3, 2, 5, 7)), ((3, 5, 7), (3, 5, 7)), ((3, 1, 1, 7), (3, 2, 5, 7)), ((7,), (5, 7))],
)
def test_as_mask_reads_booleans_that_broadcast_to_the_weights(cells, weights):
    given_ = torch.rand(cells) < 0.5
    whole = given_.expand(weights)
    whole = whole[:, None] if len(weights) == 3 else whole
    for form in (given_, given_.numpy()):
        mask = as_mask(form, weights)
        assert torch.equal(mask.dense(5, 7).expand_as(whole), whole)


AS_MASK = [
    ([[True]], TypeError, r"mask.*None.*list"),
    ("causal", TypeError, "str"),
    (torch.zeros(5, 7), TypeError, r"mask.*torch\.float32.*bias=…"),
    (np.zeros((5, 7)), TypeError, r"torch\.float64"),
    (torch.zeros(5, 7).int(), TypeError, r"torch\.int32.*mask\.bool\(\).*0.*1"),
    (
        torch.ones(5, 6) > 0,
        ValueError,
        r"\(5, 6\).*\(3, 2, 5, 7\)",
    ),
    (
        torch.ones(3, 7) > 0,
        ValueError,
        r"regard\.masks\.padding\(mask\)",
    ),
]


@pytest.mark.parametrize(("value", "error", "message"), AS_MASK)
def test_as_mask_refuses_what_is_no_mask(value, error, message):
    with pytest.raises(error, match=message):
        as_mask(value, (3, 2, 5, 7))


NUMBERS = [
    (lambda: causal(offset=1.0), TypeError, r"offset.*float.*1.0"),
    (lambda: causal(offset=[1.5]), TypeError, r"offset.*torch\.float(32|64)"),
    (lambda: causal(offset=torch.zeros(2, 3, 5).long()), ValueError, r"offset.*shape.*\(2, 3, 5\)"),
    (lambda: window(-1, 0), ValueError, r"before.*0.*-1"),
    (lambda: window(0, [2, -3]), ValueError, r"after.*0.*\[\[2\], \[-3\]\]"),
    (lambda: window(None, 0), TypeError, r"before.*NoneType.*None"),
    (lambda: window(0, 0, offset="a"), TypeError, "offset"),
    (lambda: dilated(-1, 0, 2), ValueError, r"before.*0.*-1"),
    (lambda: dilated(0, -1, 2), ValueError, r"after.*0.*-1"),
    (lambda: dilated(0, 0, 0), ValueError, r"dilation.*1.*0"),
    (lambda: prefix(-1), ValueError, r"length.*0.*-1"),
]
PER_POSITION = [
    (lambda: padding([True, False]), ValueError, r"booleans.*B.*Nk.*shape.*\(2,\)"),
    (lambda: padding(BOOLEANS, side="left"), ValueError, "side="),
    (lambda: padding([2, 3], side="up"), ValueError, r"side.*'right'.*'left'.*'up'"),
    (lambda: padding(3), TypeError, r"list.*NumPy.*int.*3"),
    (lambda: padding([[2, 3]]), ValueError, r"True.*torch\.int64.*\(1, 2\)"),
    (lambda: padding([1.0, 2.0]), ValueError, r"torch\.float(32|64).*\(2,\)"),
    (lambda: padding([2, -1]), ValueError, r"lengths.*0.*\[\[2\], \[-1\]\]"),
    (lambda: padding([2, 8]).dense(5, 7), ValueError, r"8.*7"),
    (lambda: padding(BOOLEANS).dense(5, 7), ValueError, r"3.*7"),
    (lambda: documents(), ValueError, "lengths=…"),
    (lambda: documents([0], lengths=[1]), ValueError, "exactly"),
    (lambda: documents(lengths=[[1, 2]]), ValueError, r"lengths.*\(B, N\)"),
    (lambda: documents(lengths=3), ValueError, r"lengths.*list"),
    (lambda: documents(lengths=[-1]), ValueError, r"lengths.*0.*\[\[-1\]\]"),
    (
        lambda: documents([0.0, 1.0]),
        ValueError,
        r"ids.*torch\.float(32|64).*\(2,\)",
    ),
    (lambda: documents([True]), ValueError, r"torch\.bool.*\(1,\)"),
    (lambda: documents(3), TypeError, r"list.*NumPy.*int.*3"),
    (lambda: documents([0, 1]).dense(5, 7), ValueError, r"2.*7"),
    (lambda: globals_(3), TypeError, r"list.*NumPy.*int.*3"),
    (lambda: globals_([[1]]), ValueError, r"torch\.int64.*\(1, 1\)"),
    (lambda: globals_([True]), ValueError, r"torch\.bool.*\(1,\)"),
    (lambda: globals_([1.0]), ValueError, r"torch\.float(32|64).*\(1,\)"),
    (lambda: globals_([3, -2]), ValueError, r"positions.*0.*-2"),
    (lambda: globals_([7]).dense(5, 7), ValueError, r"position.*7"),
    (lambda: globals_(BOOLEANS).dense(5, 7), ValueError, r"3.*7"),
    (lambda: queries(3), TypeError, r"queries.*NumPy.*int.*3"),
    (
        lambda: queries([[1]]),
        ValueError,
        r"\[i, …\].*B.*N.*torch\.int64.*\(1, 1\)",
    ),
    (lambda: queries([True]), ValueError, r"torch\.bool.*\(1,\)"),
    (lambda: queries([1.0]), ValueError, r"torch\.float(32|64).*\(1,\)"),
    (lambda: queries([3, -2]), ValueError, r"queries.*0.*-2"),
    (lambda: queries([1, 5]).dense(5, 7), ValueError, r"query.*5"),
    (lambda: queries(BOOLEANS).dense(5, 3), ValueError, r"3.*5"),
    (lambda: queries(BOOLEANS).fit(5, 2, 3, 7), ValueError, r"2.*5"),
]
PER_CELL = [
    (lambda: blocks([[1, 0]], 2), TypeError, r"layout.*torch\.int64"),
    (lambda: blocks([True], 2), ValueError, r"layout.*2.*4.*shape.*\(1,\)"),
    (lambda: blocks(BOOLEANS, 0), ValueError, r"size.*1.*0"),
    (lambda: blocks(BOOLEANS, 2.0), ValueError, r"size.*1.*2.0"),
    (lambda: blocks(BOOLEANS, True), ValueError, r"size.*1.*True"),
    (
        lambda: blocks(BOOLEANS, 2).dense(5, 6),
        ValueError,
        r"2.*4.*6",
    ),
    (
        lambda: blocks(BOOLEANS, 2, offset=[0, 3]).dense(2, 6),
        ValueError,
        r"2.*4.*5",
    ),
    (
        lambda: blocks(BOOLEANS, 2, offset=0).dense(2, 7),
        ValueError,
        r"3.*2.*6.*7",
    ),
    (lambda: random_blocks(0, 2, count=1, seed=0), ValueError, r"positions.*1.*0"),
    (lambda: random_blocks(4, 0, count=1, seed=0), ValueError, r"size.*1.*0"),
    (lambda: random_blocks(4, 2, count=-1, seed=0), ValueError, r"count.*0.*-1"),
    (lambda: random_blocks(4, 2, count=1, seed=0, num_heads=0), ValueError, r"heads.*1.*0"),
    (
        lambda: random_blocks(5, 2, count=4, seed=0),
        ValueError,
        r"4.*5.*3.*2",
    ),
    (lambda: dense([[1, 0]]), TypeError, r"cells.*torch\.int64"),
    (lambda: dense([True]), ValueError, r"cells.*2.*4.*shape.*\(1,\)"),
    (
        lambda: dense(torch.ones(1, 1, 1, 1, 1) > 0),
        ValueError,
        r"cells.*2.*4.*shape.*\(1, 1, 1, 1, 1\)",
    ),
    (
        lambda: dense(BOOLEANS).dense(5, 3),
        ValueError,
        r"dense\(<2×3 booleans, 4 True>\).*5.*3",
    ),
    (lambda: dense(BOOLEANS).dense(2, 7), ValueError, r"2.*7"),
]
WHOLE = [
    (
        lambda: (padding([1, 2]) & causal(offset=[0, 1, 2])).dense(5),
        ValueError,
        r"\[2, 3\]",
    ),
    (lambda: window([[1, 2]], [[1, 2, 3]]).dense(5), ValueError, r"\[2, 3\]"),
    (lambda: documents([[0], [0]], offset=[1, 2, 3]).dense(1), ValueError, r"\[2, 3\]"),
    (lambda: (causal() & padding([9])).tiles(5), ValueError, r"9.*5"),
    (lambda: (~globals_([9])).tiles(5), ValueError, r"position.*9.*5"),
    (lambda: causal().tiles(5, size=0), ValueError, r"size.*1.*\(0, 0\)"),
    (lambda: causal().tiles(5, size=(2, -1)), ValueError, r"size.*1.*\(2, -1\)"),
    (lambda: causal().draw(5, batch=1), IndexError, r"batch.*1"),
    (lambda: causal(offset=[0, 1]).draw(5, batch=-3), IndexError, r"batch.*-3.*2"),
    (lambda: window([[0, 1, 2]], 0).draw(5, head=3), IndexError, r"head.*3"),
]


@pytest.mark.parametrize(("make", "error", "message"), [*NUMBERS, *PER_POSITION, *PER_CELL, *WHOLE])
def test_mask_refuses_bad_input_and_says_what_came(make, error, message):
    with pytest.raises(error, match=message):
        make()
