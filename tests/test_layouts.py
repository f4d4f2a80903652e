"""Layouts: which pixels each token owns, compared with pixels that are pushed through padding, rolling, cutting and
merging one by one; and what is refused.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.layouts import KINDS, Frame, Layout, Sides

Grid = list[list[set[int]]]
"""The pixels of each token, rows of columns; a token of padding owns none."""


# ------------------------------------------------------------------------------------ the same, pixel by pixel, by hand


def cut_into_patches(height: int, width: int, patch: tuple[int, int]) -> Grid:
    """Pixel (y, x) has the number y · width + x; the last patches may be cut short."""
    rows, columns = -(-height // patch[0]), -(-width // patch[1])
    grid: Grid = [[set() for _ in range(columns)] for _ in range(rows)]
    for y, x in product(range(height), range(width)):
        grid[y // patch[0]][x // patch[1]].add(y * width + x)
    return grid


def merged(grid: Grid) -> Grid:
    rows, columns = len(grid), len(grid[0])
    after: Grid = [[set() for _ in range((columns + 1) // 2)] for _ in range((rows + 1) // 2)]
    for r, c in product(range(rows), range(columns)):
        after[r // 2][c // 2] |= grid[r][c]
    return after


def windows_of(grid: Grid, window: tuple[int, int], shift: tuple[int, int]) -> list[list[set[int]]]:
    """The tokens of each window: padded below and to the right, rolled up and left, cut row by row."""
    rows, columns = (-(-n // w) * w for n, w in zip((len(grid), len(grid[0])), window, strict=True))

    def owned(r: int, c: int) -> set[int]:
        r, c = (r + shift[0]) % rows, (c + shift[1]) % columns
        return grid[r][c] if r < len(grid) and c < len(grid[0]) else set()

    starts = product(range(0, rows, window[0]), range(0, columns, window[1]))
    return [[owned(r + i, c + j) for i, j in product(range(window[0]), range(window[1]))] for r, c in starts]


def inside(box: np.ndarray, width: int) -> set[int]:
    """The numbers of the pixels in a box; none in that of a token without one."""
    if np.isnan(box).any():
        return set()
    top, left, bottom, right = map(int, box)
    assert [top, left, bottom, right] == box.tolist()
    return {y * width + x for y, x in product(range(top, bottom), range(left, right))}


def owners(layout: Layout, width: int) -> list[list[set[int]]]:
    return [[inside(box, width) for box in row] for row in layout.box]


SWINS = {
    "whole windows": ((24, 36), (2, 3), (4, 4), (2, 2), 0),
    "not square, windows padded": ((37, 53), (3, 4), (5, 5), (2, 2), 0),
    "an odd grid, merged once": ((21, 35), (3, 5), (3, 3), (1, 1), 1),
    "odd after odd, merged twice": ((39, 27), (3, 3), (2, 2), (1, 1), 2),
    "unlike windows and shifts": ((30, 44), (2, 2), (5, 3), (3, 1), 0),
    "shifted across only": ((12, 20), (2, 2), (3, 5), (0, 4), 0),
    "a window bigger than the grid": ((10, 14), (2, 2), (11, 13), (5, 6), 0),
    "a window bigger than one side": ((10, 46), (2, 2), (7, 7), (3, 3), 1),
    "a single pixel": ((1, 1), (4, 4), (2, 3), (1, 2), 0),
}


@pytest.mark.parametrize(("pixels", "patch", "window", "shift", "stage"), SWINS.values(), ids=SWINS)
def test_windows_own_the_pixels_that_padding_rolling_and_cutting_bring_there(pixels, patch, window, shift, stage):
    grid = cut_into_patches(*pixels, patch)
    for _ in range(stage):
        grid = merged(grid)
    size = (patch[0] * 2**stage, patch[1] * 2**stage)
    layout = Layout.windows(len(grid), len(grid[0]), size, window, shift, pixels=pixels)
    expected = windows_of(grid, window, shift)
    assert owners(layout, pixels[1]) == expected
    assert (layout.kind == "patch").tolist() == [[bool(owned) for owned in row] for row in expected]
    assert (layout.image == 0).tolist() == [[bool(owned) for owned in row] for row in expected]
    assert set(layout.kind.ravel()) <= {"patch", "padding"}


sizes = st.integers(1, 19)


@given(
    st.tuples(sizes, sizes), st.tuples(*[st.integers(1, 4)] * 2), st.integers(1, 8), st.integers(0, 2), st.booleans()
)
def test_stages_of_a_swin_own_the_pixels_of_their_children(pixels, patch, window, stage, shifted):
    grid = cut_into_patches(*pixels, patch)
    for _ in range(stage):
        grid = merged(grid)
    shortest = min(len(grid), len(grid[0]))
    side, shift = (shortest, 0) if shortest <= window else (window, window // 2 if shifted else 0)
    sides = Sides.windows(pixels, stage=stage, shifted=shifted, patch=patch, window=window)
    assert sides.queries is sides.keys
    assert owners(sides.keys, pixels[1]) == windows_of(grid, (side, side), (shift, shift))


@given(st.tuples(sizes, sizes), st.tuples(*[st.integers(1, 6)] * 2), st.integers(0, 2), st.integers(0, 2))
def test_a_grid_owns_its_patches_row_by_row_and_other_tokens_own_nothing(pixels, patch, before, after):
    grid = cut_into_patches(*pixels, patch)
    kinds = ["cls", "register"]
    layout = Layout.grid(len(grid), len(grid[0]), patch, kinds[:before], kinds[:after], image=3, pixels=pixels)
    patches = [owned for row in grid for owned in row]
    assert owners(layout, pixels[1])[0] == [set()] * before + patches + [set()] * after
    assert layout.kind[0].tolist() == kinds[:before] + ["patch"] * len(patches) + kinds[:after]
    assert set(layout.image.ravel()) == {3}


def test_patches_leave_out_the_pixels_that_make_no_whole_patch():
    sides = Sides.patches((23, 40), patch=(7, 11), before=("cls", "distillation"), after=("register",))
    assert sides.keys == Layout.grid(3, 3, (7, 11), ("cls", "distillation"), ("register",))
    assert sides.frames == (Frame.whole(23, 40),)


def test_a_frame_stands_for_the_pixels():
    frame = Frame.whole(50, 70).resized(25, 35).cropped(2, 3, 21, 14)
    assert Sides.patches(frame, patch=7) == Sides(Layout.grid(3, 2, (7, 7)), Layout.grid(3, 2, (7, 7)), (frame,))
    assert Sides.windows(frame, stage=0, shifted=False, patch=7, window=2).frames == (frame,)


# ----------------------------------------------------------------------------------------------- transformers' own Swin


def swin_without_mixing(transformers):
    """A Swin whose attention changes nothing, so that a token depends on its own pixels alone."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=6, depths=[2, 2, 2], num_heads=[1, 2, 3], window_size=3
    )
    model = transformers.SwinModel(config).eval().double()
    blocks = [module for module in model.modules() if type(module).__name__ == "SwinLayer"]
    assert len(blocks) == 6
    for block in blocks:
        *_, last = [module for module in block.attention.modules() if isinstance(module, torch.nn.Linear)]
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)
    return model


def queries_of(model, pixels):
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(pixels)
    return seen, [view.weights.call.q for view in seen]


def test_windows_are_those_that_transformers_makes():
    """A changed pixel changes the query of one token of each block: the one that the layout says."""
    model = swin_without_mixing(pytest.importorskip("transformers"))
    height, width, batch = 37, 46, 2
    pixels = torch.randn(batch, 3, height, width, dtype=torch.float64)
    seen, before = queries_of(model, pixels)
    sides = [Sides.windows((height, width), stage=n // 2, shifted=n % 2 == 1, patch=2, window=3) for n in range(6)]
    seen.layouts = dict(zip(seen.names, sides, strict=True))  # checked against the calls
    for y, x in ((0, 0), (36, 45), (36, 0), (17, 31), (20, 9)):
        changed = pixels.clone()
        changed[1, :, y, x] += 1
        _, after = queries_of(model, changed)
        for side, old, new in zip(sides, before, after, strict=True):
            rows, _, tokens, _ = (old != new).nonzero().unbind(-1)
            window, index = side.queries.at(y, x)
            assert set(rows.tolist()) == {side.queries.shape[0] + window}  # of the second batch entry
            assert set(tokens.tolist()) == {index}


# --------------------------------------------------------------------------------------------------------------- values


def test_text_latents_and_patches_join_in_order():
    whole = Layout.text(2) + Layout.latents(3, image=1) + Layout.grid(1, 2, (4, 5), image=0) + Layout.text(1)
    assert whole.shape == (1, 9)
    assert whole.kind[0].tolist() == ["text"] * 2 + ["latent"] * 3 + ["cls"] + ["patch"] * 2 + ["text"]
    assert whole.image[0].tolist() == [-1, -1, 1, 1, 1, 0, 0, 0, -1]
    assert np.isnan(whole.box[0, [0, 1, 2, 3, 4, 5, 8]]).all()
    assert whole.box[0, 7].tolist() == [0, 5, 4, 10]


def test_layouts_print_in_one_line():
    assert repr(Layout.grid(14, 14, (16, 16))) == "Layout(1 cls, 196 patches of image 0)"
    assert repr(Layout.text(0)) == "Layout(no tokens)"
    assert repr(Layout.text(1) + Layout.latents(2, image=1)) == "Layout(1 text, 2 latents of image 1)"
    two = Layout.grid(1, 1, (2, 2), before=()) + Layout.grid(1, 1, (2, 2), before=(), image=1)
    assert repr(two) == "Layout(1 patch of image 0, 1 patch of image 1)"
    padded = Layout.windows(3, 5, (4, 4), (2, 2), (1, 1))
    assert repr(padded) == "Layout(6 windows of 4: 15 patches of image 0, 9 padding)"


def test_a_patch_is_found_by_a_place_in_it():
    layout = Layout.grid(3, 5, (4, 7), before=("cls", "register"))
    assert layout.at(0, 0) == (0, 2)
    assert layout.at(4, 6.999) == (0, 7)  # the upper edge is the patch's own, the right one its neighbour's
    assert layout.at(3.999, 7) == (0, 3)
    assert layout.at(11.5, 34.5) == (0, 16)
    with pytest.raises(LookupError, match=r"image.*0.*\(12, 3\).*Layout.*1"):
        layout.at(12, 3)
    with pytest.raises(LookupError, match=r"image.*1"):
        layout.at(0, 0, image=1)


def test_indices_of_a_kind_name_window_and_place():
    layout = Layout.windows(1, 3, (4, 4), (1, 2), (0, 1))
    assert layout.indices("padding").tolist() == [[1, 0]]
    assert layout.indices("patch").tolist() == [[0, 0], [0, 1], [1, 1]]
    assert layout.indices("cls").shape == (0, 2)
    with pytest.raises(ValueError, match=r"'patches'.*text.*patch.*cls"):
        layout.indices("patches")


def test_equal_layouts_are_equal_and_hash_alike():
    one, same = Layout.grid(2, 3, (4, 5)), Layout.grid(2, 3, (4, 5))
    assert one == same
    assert hash(one) == hash(same)
    assert one != Layout.grid(2, 3, (4, 6))
    assert one != Layout.grid(2, 3, (4, 5), image=1)
    assert one != Layout.grid(2, 3, (4, 5), before=("register",))
    assert one != "Layout"


def test_a_layout_cannot_be_changed():
    given = np.array([["text"]])
    layout = Layout(given, np.array([[-1]]), np.full((1, 1, 4), np.nan))
    given[0, 0] = "cls"
    assert layout.kind[0, 0] == "text"
    with pytest.raises(ValueError, match="read-only"):
        layout.image[0, 0] = 1


def test_sides_compare_by_what_they_hold():
    assert Sides.patches(32) == Sides.patches((32, 32))
    assert Sides.patches(32) != Sides.patches(32, before=())


# -------------------------------------------------------------------------------------------------------------- refused


NAN = np.full((1, 2, 4), np.nan)
BOXES = np.array([[[0, 0, 4, 4], [0, 4, 4, 8.0]]])


@pytest.mark.parametrize(
    ("kind", "image", "box", "message"),
    [
        (
            ["text"],
            [[0]],
            NAN,
            r"\(W, N\).*\(W, N, 4\).*\(1,\).*\(1, 1\).*\(1, 2, 4\)",
        ),
        ([["text"] * 2], [[0]], NAN, "layout"),
        ([["text"] * 2], [[0, 0]], NAN[..., :2], "layout"),
        ([["text", "image"]], [[0, 0]], NAN, rf"'image'.*{', '.join(KINDS)}"),
        ([["patch"] * 2], [[0, -1]], BOXES, r"patch.*image.*0"),
        ([["text"] * 2], [[-1, -2]], NAN, "−1"),
        ([["patch", "text"]], [[0, 0]], BOXES, r"patch.*NaN"),
        ([["patch"] * 2], [[0, 0]], NAN, "patch"),
        ([["patch"] * 2], [[0, 0]], BOXES[..., [2, 1, 0, 3]], "bottom"),
        ([["patch"] * 2], [[0, 0]], BOXES[..., [0, 3, 2, 1]], "bottom"),
        ([["patch"] * 2], [[0, 0]], np.where(BOXES == 4, np.inf, BOXES), "patch"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(kind, image, box, message):
    with pytest.raises(ValueError, match=message):
        Layout(kind, image, box)


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(ValueError, match=r"0.*-1"):
        Layout.text(-1)
    with pytest.raises(ValueError, match=r"image.*0.*-1"):
        Layout.latents(3, image=-1)
    with pytest.raises(ValueError, match=r"image.*0.*-1"):
        Layout.grid(1, 1, (4, 4), image=-1)
    with pytest.raises(ValueError, match=r"image.*0.*-1"):
        Layout.windows(1, 1, (4, 4), image=-1)
    with pytest.raises(ValueError, match=r"1.*0"):
        Layout.grid(0, 3, (4, 4))
    with pytest.raises(ValueError, match=r"1.*0"):
        Layout.grid(3, 3, (4, 0))
    with pytest.raises(ValueError, match=r"3.*1.*0"):
        Layout.windows(3, 3, (4, 4), (4, 3), (3, 3))
    with pytest.raises(ValueError, match=r"window.*0.*shift.*0"):
        Layout.windows(3, 3, (4, 4), (0, 3), (0, 0))
    with pytest.raises(ValueError, match=r"3.*2.*4.*5.*8.*10.*pixels"):
        Layout.grid(3, 2, (4, 5), pixels=(8, 10))
    with pytest.raises(ValueError, match=r"2.*3.*4.*5.*8.*10.*pixels"):
        Layout.windows(2, 3, (4, 5), (2, 2), (0, 0), pixels=(8, 10))
    with pytest.raises(ValueError, match=r"1.*Layout.*4"):
        Layout.text(4) + Layout.windows(4, 4, (2, 2), (2, 2), (0, 0))
    with pytest.raises(ValueError, match=r"stage.*0.*-1"):
        Sides.windows(32, stage=-1, shifted=False)
    with pytest.raises(ValueError, match=r"patch.*1.*0"):
        Sides.windows(32, stage=0, shifted=False, patch=0)
    with pytest.raises(ValueError, match=r"patch.*1.*0"):
        Sides.patches(32, patch=0)
    with pytest.raises(ValueError, match=r"15.*32.*pixels.*patch.*16"):
        Sides.patches((15, 32))


def test_sides_that_do_not_go_together_are_refused():
    patches, frame = Layout.grid(2, 3, (4, 5)), Frame.whole(8, 15)
    with pytest.raises(ValueError, match=r"Layout\(6 text\).*Layout.*4"):
        Sides(Layout.text(6), Layout.windows(4, 4, (2, 2), (2, 2), (0, 0)), (frame,))
    with pytest.raises(ValueError, match=r"image.*0.*image"):
        Sides(Layout.text(6), patches, ())
    with pytest.raises(ValueError, match=r"image.*1"):
        Sides(Layout.latents(2, image=1), patches, (frame,))
    beyond = r"image.*0.*8.*15.*8.*14.*pixels="
    with pytest.raises(ValueError, match=beyond):
        Sides(patches, Layout.text(1), (Frame.whole(8, 14),))
    assert Sides(patches, patches, [frame]).frames == (frame,)


def test_sequences_of_unlike_lengths_do_not_stand_beside_each_other():
    both = Layout.stacked([Layout.text(3), Layout.of(["padding"] * 3)])
    assert both.shape == (2, 3)
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        Layout.stacked([Layout.text(3), Layout.text(2)])
    with pytest.raises(ValueError, match="length"):
        Layout.stacked([])
