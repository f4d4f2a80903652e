"""Overlays: the weight of every pixel of the photograph, compared with a count pixel by pixel; which token is meant;
what a view says where it cannot answer; and how it is drawn.
"""

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import regard
from regard.layouts import Frame, Layout, Sides
from regard.lens import overlays
from regard.lens.files.saving import make_overview
from regard.lens.overlays import ImagePatches, Overlay, TokenPlacement, find_token, name_token
from regard.lens.view import View

H, D = 3, 5
STEP = 2.0**-23  # of fp32, in which heat is given


def looked(sides: Sides | list[Sides], entries: int = 1, words: list[list[str]] | None = None, **more: object) -> View:
    """A view of random attention, in fp64, whose tokens lie so, in a batch of so many entries."""
    several = sides if isinstance(sides, list) else [sides]
    batch = entries * several[0].queries.shape[0]
    q = torch.randn(batch, H, several[0].queries.shape[1], D, dtype=torch.float64)
    k, v = torch.randn(2, batch, H, several[0].keys.shape[1], D, dtype=torch.float64)
    view = regard.look(q * 2, k, v, **more)
    view.placed = TokenPlacement("layer", tuple(several), words, model="Toy", layer=3)
    return view


def exact(view: View) -> np.ndarray:
    """All weights, (B, H, Nq, Nk), for sizes at which one can."""
    return view.tile(slice(None), slice(None)).numpy()


# ----------------------------------------------------------------------------------------------- heat, pixel by pixel


def heat_by_hand(weight: dict[tuple[int, int], float], frame: Frame) -> np.ndarray:
    """The heat of a photograph, from the weight of each of the model's pixels (those that no token owns are not there).

    In exact fractions: each of the photograph's pixels is the mean over the pixels of the model that overlap it, by the
    area of the overlap.
    """
    (height, width), (sy, sx) = frame.image_size, map(Fraction, frame.scale)
    top, left = map(Fraction, frame.corner)
    heat = np.full((height, width), np.nan)
    for y, x in product(range(height), range(width)):
        total = area = Fraction(0)
        rows = range(int((y - top) // sy), int((y + 1 - top) // sy) + 1)
        columns = range(int((x - left) // sx), int((x + 1 - left) // sx) + 1)
        for r, c in product(rows, columns):
            down = min(y + 1, top + (r + 1) * sy) - max(y, top + r * sy)
            across = min(x + 1, left + (c + 1) * sx) - max(x, left + c * sx)
            if (r, c) in weight and down > 0 and across > 0:
                area += down * across
                total += down * across * Fraction(weight[r, c])
        if area:
            heat[y, x] = float(total / area)
    return heat


def test_heat_of_a_vit_is_that_of_every_pixel_counted_by_hand():
    # 3/2 down and 5/4 across, so that pixels of the photograph lie across borders of patches; cut at all four sides
    frame = Frame.whole(36, 45).resized(24, 36).cropped(3, 2, 19, 31)
    view = looked(Sides.patches(frame, patch=(3, 5), before=("cls", "register")), entries=2)
    row = exact(view)[1, 2, 9]
    weight = {(y, x): row[2 + y // 3 * 6 + x // 5] for y, x in product(range(18), range(30))}  # 6 × 6 patches
    seen = view.overlay(token=9, head=2, batch=1)
    expected = heat_by_hand(weight, frame)
    np.testing.assert_allclose(seen.heat, expected, rtol=STEP)
    assert seen.heat.dtype == np.float32
    assert np.isnan(expected).any()
    np.testing.assert_allclose(seen.weights, row, rtol=1e-12)
    assert seen.shares == pytest.approx({"patch": row[2:].sum(), "cls": row[0], "register": row[1]}, rel=1e-12)


def test_padding_around_a_photograph_is_no_part_of_its_heat():
    frame = Frame.whole(10, 14).resized(5, 7).cropped(-2, -1, 9, 9)
    view = looked(Sides.patches(frame, patch=3))
    row = exact(view)[0].mean(0)[0]
    weight = {(y, x): row[1 + y // 3 * 3 + x // 3] for y, x in product(range(9), range(9))}
    np.testing.assert_allclose(view.overlay(token="cls").heat, heat_by_hand(weight, frame), rtol=STEP)


def test_patches_beyond_the_photograph_have_a_share_of_their_own():
    frame = Frame.whole(6, 12).cropped(-3, 0, 12, 12)  # a row of patches above it, one below
    view = looked(Sides.patches(frame, patch=3))
    row = exact(view)[0].mean(0)[0]
    seen = view.overlay(token="cls")
    parts = {"cls": row[0], "patch": row[5:13], "beyond the image": np.concatenate([row[1:5], row[13:]])}
    assert seen.shares == pytest.approx({name: part.sum() for name, part in parts.items()}, rel=1e-12)
    assert "beyond the image 0." in repr(seen)
    beside, within = (view.overlay(token=token).figure() for token in (2, 6))
    assert "the patch itself" not in [text.get_text() for text in beside.texts]
    assert "the patch itself" in [text.get_text() for text in within.texts]


def test_a_patch_that_reaches_into_the_photograph_is_not_beyond_it():
    frame = Frame.whole(5, 7).cropped(-2, -1, 9, 9)
    assert "beyond the image" not in looked(Sides.patches(frame, patch=3)).overlay(token="cls").shares


SWINS = {
    "stage 0": ((18, 23), 2, 3, 0, Frame.whole(18, 23)),
    "stage 0, a window as large as the grid": ((9, 9), 3, 3, 0, Frame.whole(9, 9)),
    "stage 1, odd": ((19, 25), 2, 3, 1, Frame.whole(38, 75).resized(19, 25)),
    "stage 1, cropped": ((17, 22), 2, 2, 1, Frame.whole(30, 40).resized(20, 32).cropped(1, 5, 17, 22)),
    "stage 2, padded": ((21, 13), 1, 2, 2, Frame.whole(13, 13).cropped(-4, 0, 21, 13)),
}


@pytest.mark.parametrize(("pixels", "patch", "window", "stage", "frame"), SWINS.values(), ids=SWINS)
@pytest.mark.parametrize("shifted", [False, True])
def test_heat_of_a_swin_is_that_of_every_pixel_pushed_through_merging_shift_and_windows(
    pixels, patch, window, stage, frame, shifted
):
    labels = np.arange(pixels[0] * pixels[1]).reshape(pixels)
    owned = {(r, c): labels[r : r + 1, c : c + 1] for r, c in product(*map(range, pixels))}  # by pixel
    rows, columns = pixels
    for factor in (patch, *[2] * stage):  # into patches, then merging two by two
        rows, columns = -(-rows // factor), -(-columns // factor)
        joined = {(r, c): [] for r, c in product(range(rows), range(columns))}
        for (r, c), some in owned.items():
            joined[r // factor, c // factor].append(some.ravel())
        owned = {cell: np.concatenate(parts) for cell, parts in joined.items()}
    shift = window // 2 if shifted and min(rows, columns) > window else 0
    high, wide = (-(-n // window) * window for n in (rows, columns))
    grid = np.full((high, wide), -1)
    grid[:rows, :columns] = np.arange(rows * columns).reshape(rows, columns)
    grid = torch.roll(torch.from_numpy(grid), (-shift, -shift), (0, 1))
    cut = grid.unfold(0, window, window).unfold(1, window, window).reshape(-1, window * window)  # (W, N)

    sides = Sides.windows(frame, stage=stage, shifted=shifted, patch=patch, window=window)
    view = looked(sides, entries=2)
    weights = exact(view)[len(cut) :].mean(1)  # (W, N, N) of the second batch entry
    cells = list(owned)
    asked = cells[len(cells) // 2 + 1] if len(cells) > 1 else cells[0]
    at_window, index = (cut == asked[0] * columns + asked[1]).nonzero()[0].tolist()
    weight = {(int(y), int(x)): 0.0 for y, x in zip(*np.unravel_index(labels.ravel(), pixels), strict=True)}
    for token, number in enumerate(cut[at_window].tolist()):
        for label in owned[cells[number]] if number >= 0 else ():
            weight[divmod(int(label), pixels[1])] = weights[at_window, index, token]
    expected = heat_by_hand(weight, frame)

    found = view.overlay(token=(at_window, index), batch=1)
    np.testing.assert_allclose(found.heat, expected, rtol=STEP)
    assert found.title.endswith(f": patch {asked} → the image")
    padding = cut[at_window] < 0
    assert found.shares.get("padding", 0.0) == pytest.approx(weights[at_window, index][padding].sum(), abs=1e-12)
    y, x = divmod(int(owned[asked][0]), pixels[1])
    box = frame.boxes([y, x, y + 1, x + 1])
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    if all(0 <= place < size for place, size in zip(middle, frame.image_size, strict=True)):
        assert np.array_equal(view.overlay(at=middle, batch=1).heat, found.heat, equal_nan=True)


def test_a_column_is_where_a_patch_is_looked_at_from():
    view = looked(Sides.windows(24, stage=0, shifted=True, patch=2, window=5), entries=2)
    windows = view.placed.windows
    seen = view.overlay(token=(4, 7), batch=1, head=1, column=True)
    column = exact(view)[windows + 4, 1, :, 7]
    np.testing.assert_allclose(seen.weights, column, rtol=1e-12)
    for number, (window, token) in enumerate(seen.tokens):
        assert seen.mass[number] == (seen.weights[token] if window == 4 else 0)
    assert sum(seen.shares.values()) == pytest.approx(column.sum())
    assert "head 1: the image → patch" in seen.title


def test_without_a_token_it_is_the_mean_of_all_queries():
    view = looked(Sides.windows((12, 18), stage=0, shifted=True, patch=2, window=3), entries=2)  # fills its windows
    windows = view.placed.windows
    seen = view.overlay(batch=1)
    mean = exact(view)[windows:].mean((1, 2)) / windows  # (W, N)
    np.testing.assert_allclose(seen.weights, mean.ravel(), rtol=1e-12)
    np.testing.assert_allclose(seen.mass, mean[tuple(seen.tokens.T)], rtol=1e-12)
    assert sum(seen.shares.values()) == pytest.approx(1)
    assert seen.token_box is None
    assert seen.title == "Toy, layer 3, mean of 3 heads: all queries → the image"


PADDED = Sides.windows((10, 14), stage=0, shifted=True, patch=2, window=3)  # 5 × 7 patches in 6 × 9


def test_queries_that_are_padding_have_no_part_in_the_mean_of_all(monkeypatch):
    monkeypatch.setattr(overlays, "AT_ONCE", 1000)  # so that rows come in several parts
    view, real = looked(PADDED, entries=2), PADDED.queries.kind == "patch"  # (W, N)
    rows = exact(view)[len(real) :]  # (W, H, N, N) of the second entry
    mean = (rows * real[:, None, :, None]).sum(2).mean(1) / 35  # (W, N)
    seen = view.overlay(batch=1)
    np.testing.assert_allclose(seen.weights, mean.ravel(), rtol=1e-12)
    assert seen.shares == pytest.approx({"patch": mean[real].sum(), "padding": mean[~real].sum()}, rel=1e-12)
    assert sum(seen.shares.values()) == pytest.approx(1)
    assert seen.title == "Toy, layer 3, mean of 3 heads: all queries → the image"
    one = view.overlay(batch=1, head=2).weights
    np.testing.assert_allclose(one, (rows[:, 2] * real[..., None]).sum(1).ravel() / 35, rtol=1e-12)


def test_padding_that_cannot_be_left_out_is_said():
    view = looked(PADDED, measures=["received"])
    every = exact(view).mean((1, 2)) / len(PADDED.queries.kind)
    view.weights = None
    seen = view.overlay()
    np.testing.assert_allclose(seen.weights, every.ravel(), rtol=1e-12)
    assert seen.title == "Toy, layer 3, mean of 3 heads: all queries (padding included) → the image"


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_every_box_is_its_cell_of_the_grid(rows, columns, before):
    frame = Frame.whole(rows * 8, columns * 10).resized(rows * 4, columns * 5)
    view = looked(Sides.patches(frame, patch=(4, 5), before=("register",) * before))
    seen = view.overlay()
    assert seen.cells.tolist() == [[r, c] for r, c in product(range(rows), range(columns))]
    assert seen.boxes.tolist() == [[8 * r, 10 * c, 8 * r + 8, 10 * c + 10] for r, c in seen.cells.tolist()]
    assert seen.tokens.tolist() == [[0, before + n] for n in range(rows * columns)]


# ------------------------------------------------------------------------------------------------- which token is meant


WORDS = [["the", "cat", "sat", "the"]]


def words_and_pictures() -> Sides:
    """Four words that look at themselves, at two pictures of unlike sizes, and at latents."""
    pictures = Layout.grid(2, 3, (4, 4), before=()) + Layout.grid(1, 2, (4, 4), before=("cls",), image=1)
    frames = (Frame.whole(16, 24).resized(8, 12), Frame.whole(4, 8))
    return Sides(Layout.text(4), Layout.text(4) + pictures + Layout.latents(2, image=0), frames)


def test_a_word_looks_at_either_picture():
    view = looked(words_and_pictures(), words=WORDS)
    row = exact(view)[0].mean(0)[1]
    first, second = (view.overlay(token="cat", image_index=n) for n in (0, 1))
    assert first.title == "Toy, layer 3, mean of 3 heads: “cat” (1) → image 0"
    np.testing.assert_allclose(first.mass, row[4:10], rtol=1e-12)
    np.testing.assert_allclose(second.mass, row[11:13], rtol=1e-12)
    assert first.image_size == (16, 24)
    assert second.heat.shape == (4, 8)
    parts = {"text": row[:4], "cls": row[10], "latent": row[13:], "patch": row[4:10], "other images": row[11:13]}
    assert first.shares == pytest.approx({name: part.sum() for name, part in parts.items()}, rel=1e-12)
    assert second.shares["patch"] == first.shares["other images"]


def test_a_token_is_named_by_index_kind_word_or_place():
    frame = Frame.whole(18, 24).resized(9, 12)
    view = looked(Sides.patches(frame, patch=3), words=[[f"w{n}" for n in range(13)]])
    by_index = view.overlay(token=7)
    assert by_index.title.endswith(": patch (1, 2) → the image")
    assert by_index.token_box.tolist() == [6, 12, 12, 18]
    for same in (
        view.overlay(token=-6),
        view.overlay(token=(0, 7)),
        view.overlay(token="w7"),
        view.overlay(at=(6, 12)),
        view.overlay(at=(11.9, 17.9)),
        view.overlay(token=np.int64(7)),
    ):
        assert np.array_equal(same.weights, by_index.weights)
        assert same.title == by_index.title
    assert view.overlay(token="cls").title.endswith(": “w0” (0) → the image")
    assert view.overlay(token="cls").token_box is None


def test_a_patch_of_another_picture_is_named_as_such():
    both = Layout.grid(1, 2, (4, 4), before=()) + Layout.grid(2, 1, (4, 4), before=("register",) * 2, image=1)
    view = looked(Sides(both, both, (Frame.whole(4, 8), Frame.whole(8, 4))))
    seen = view.overlay(token=5, image_index=0)
    assert seen.title.endswith(": patch (1, 0) of image 1 → image 0")
    assert seen.token_box is None
    assert view.overlay(token=3).title.endswith(": register 1 → image 0")
    assert view.overlay(token=5, image_index=1).token_box.tolist() == [4, 0, 8, 4]


def test_a_latent_has_one_name_among_queries_and_keys():
    latents = Layout.latents(3, image=0)
    view = looked(Sides(latents, Layout.grid(2, 2, (4, 4)) + latents, (Frame.whole(8, 8),)))
    assert view.overlay(token=1).title.endswith(": latent 1 → the image")
    assert name_token(ImagePatches(view.placed.sides[0].keys, Frame.whole(8, 8), 0), (0, 6), None) == "latent 1"


def test_tokens_of_a_kind_are_counted_in_each_picture():
    both = Layout.grid(1, 2, (4, 4), before=("cls", "register", "register")) + Layout.latents(2, image=0)
    both += Layout.grid(1, 1, (4, 4), before=("cls",), image=1) + Layout.latents(2, image=1) + Layout.text(2)
    patches = ImagePatches(both, Frame.whole(4, 8), 0)
    names = [name_token(patches, (0, n), None) for n in range(both.shape[1])]
    first = ["cls of image 0", "register 0", "register 1", "patch (0, 0)", "patch (0, 1)"]
    first += ["latent 0 of image 0", "latent 1 of image 0"]
    second = ["cls of image 1", "patch (0, 0) of image 1", "latent 0 of image 1", "latent 1 of image 1"]
    assert names == [*first, *second, "text 0", "text 1"]


def test_words_with_space_around_them_are_named_without():
    layout = Layout.text(7)
    words = ["The", " cat", "\n", " the", "cat", " sat", "Sat"]
    assert find_token(layout, " cat", words, "query") == (0, 1)
    assert find_token(layout, "cat", words, "query") == (0, 4), "as it is written comes first"
    assert find_token(layout, "sat", words, "query") == (0, 5)
    assert find_token(layout, "the", words, "query") == (0, 3)
    assert find_token(layout, "CAT", ["a", " Cat"] + [""] * 5, "query") == (0, 1)
    with pytest.raises(LookupError, match=r"2.*'THE'.*\(0, 3\)"):
        find_token(layout, "THE", words, "query")
    for absent in ("dog", "", " "):
        with pytest.raises(LookupError, match=r"Layout\(7 text\).*'The'.*'cat'.*'the'.*'sat'.*'Sat'"):
            find_token(layout, absent, words, "query")
    with pytest.raises(LookupError, match=r"'w0'.*'w1'.*'w2'.*'w3'.*'w4'.*'w5'"):
        find_token(layout, "dog", [f" w{n}" for n in range(7)], "query")
    view = looked(words_and_pictures(), words=[["the", " cat", " sat", " "]])
    assert view.overlay(token="cat").title.endswith(": “cat” (1) → image 0")
    assert view.overlay(token=3).title.endswith(": “ ” (3) → image 0")


def test_a_sink_has_its_share():
    view = looked(Sides.patches(8, patch=4), sinks=torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64))
    seen = view.overlay(token="cls", head=0)
    assert seen.shares["sink"] == pytest.approx(1 - exact(view)[0, 0, 0].sum(), rel=1e-12)
    assert seen.shares["sink"] > 0.1
    assert view.overlay().shares["sink"] == pytest.approx(1 - exact(view)[0].mean((0, 1)).sum(), rel=1e-5)
    assert "sink" not in view.overlay(token=1, column=True).shares


def test_views_of_arrays_without_batch_and_heads_have_overlays_too():
    x = np.random.default_rng(0).normal(size=(5, 4))
    view = regard.look(x, x, x)
    view.placed = TokenPlacement(sides=(Sides.patches(8, patch=4),))
    np.testing.assert_allclose(view.overlay(token=2).weights, view.row(2), rtol=1e-12)
    assert repr(view.overlay(token="cls")).startswith("Overlay(head 0: cls → the image; patch 0.")


def test_each_batch_entry_has_the_layout_that_is_its_own():
    one, other = Sides.patches(Frame.whole(8, 12), patch=4), Sides.patches(Frame.whole(12, 8), patch=4)
    view = looked([one, other], entries=2)
    assert view.overlay(batch=0).image_size == (8, 12)
    assert view.overlay(batch=1).image_size == (12, 8)
    assert view.overlay(batch=-1).cells.tolist()[-1] == [2, 1]
    np.testing.assert_allclose(view.overlay(token=1, batch=1, head=2).weights, exact(view)[1, 2, 1], rtol=1e-12)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_view_of_which_nothing_was_said_tells_how_to_say_it():
    x = torch.zeros(1, 1, 5, 4)
    with pytest.raises(LookupError, match=r"seen\.layouts.*Sides\.patches.*224"):
        regard.look(x, x, x).overlay(token="cls")


def test_a_token_that_is_not_there_is_refused():
    view = looked(words_and_pictures(), words=WORDS)
    with pytest.raises(IndexError, match=r"token.*4"):
        view.overlay(token=4)
    with pytest.raises(IndexError, match=r"token.*15"):
        looked(Sides(words_and_pictures().keys, words_and_pictures().keys, words_and_pictures().frames)).overlay(
            token=15, column=True
        )
    with pytest.raises(LookupError, match=r"2.*'the'.*\(0, 3\)"):
        view.overlay(token="the")
    with pytest.raises(LookupError, match=r"'dog'.*Layout\(4 text\).*'the'.*'cat'.*'sat'"):
        view.overlay(token="dog")
    with pytest.raises(LookupError, match=r"'cls'.*Layout\(4 text\)"):
        view.overlay(token="cls")
    with pytest.raises(LookupError, match=r"'dog'.*watch\(model, tokens=…\)"):
        looked(words_and_pictures()).overlay(token="dog")
    with pytest.raises(TypeError, match=r"token.*float.*1\.5"):
        view.overlay(token=1.5)
    with pytest.raises(LookupError, match=r"6.*'register'.*\(0, 1, 2, 3, …\)"):
        looked(Sides.patches(4, patch=4, before=("register",) * 6)).overlay(token="register")


def test_a_token_of_windows_is_named_with_its_window():
    view = looked(Sides.windows(8, stage=0, shifted=False, patch=2, window=2))
    with pytest.raises(LookupError, match=r"token.*1.*4.*token=.*window.*at="):
        view.overlay(token=1)
    with pytest.raises(IndexError, match=r"window.*4"):
        view.overlay(token=(4, 0))
    with pytest.raises(IndexError, match=r"token.*4"):
        view.overlay(token=(0, 4))
    with pytest.raises(LookupError, match=r"16.*'patch'.*\(0, 0\).*\(0, 1\).*\(0, 2\).*\(0, 3\)"):
        view.overlay(token="patch")


def test_a_place_that_was_not_seen_is_refused():
    frame = Frame.whole(40, 60).resized(20, 30).cropped(1, 5, 17, 18)
    view = looked(Sides.patches(frame, patch=4))
    with pytest.raises(LookupError, match=r"at=\(0\.5, 30\).*rows.*2.*34"):
        view.overlay(at=(0.5, 30))
    with pytest.raises(LookupError, match=r"10.*42"):
        view.overlay(at=(35, 30))  # seen by the model, but in no patch: 17 pixels are four patches and one pixel
    for outside in ((40, 3), (-1, 3), (3, 60), (3, -0.1)):
        with pytest.raises(LookupError, match=r"40.*60"):
            view.overlay(at=outside)


def test_an_attention_without_patches_on_a_side_is_refused_there():
    view = looked(words_and_pictures())
    with pytest.raises(LookupError, match=r"image.*0.*column=True"):
        view.overlay(at=(1, 1))
    with pytest.raises(LookupError, match=r"image.*0.*column=True"):
        view.overlay(token=5, column=True)
    turned = looked(Sides(words_and_pictures().keys, Layout.text(4), words_and_pictures().frames))
    with pytest.raises(LookupError, match=r"image.*1.*Layout\(4 text\).*column=True"):
        turned.overlay(token=5, image_index=1)
    neither = looked(Sides(Layout.text(4), Layout.text(4), (Frame.whole(4, 4),)))
    with pytest.raises(LookupError, match=r"image.*0.*Layout\(4 text\)"):
        neither.overlay(token=1)


def test_arguments_that_do_not_go_together_are_refused():
    view = looked(Sides.patches(8, patch=4), entries=2)
    with pytest.raises(ValueError, match=r"token=.*at=.*1.*\(0, 0\)"):
        view.overlay(token=1, at=(0, 0))
    with pytest.raises(ValueError, match=r"column=True.*token.*token=.*at="):
        view.overlay(column=True)
    for at in (3, (1, 2, 3), "ab"):
        with pytest.raises(TypeError, match=r"at.*\(y, x\)"):
            view.overlay(at=at)
    for at in (("3", "4"), (3, None), (True, 2)):
        with pytest.raises(TypeError, match=r"at.*\(y, x\)"):
            view.overlay(at=at)
    assert view.overlay(at=(np.float32(3), np.int64(4))).title == view.overlay(at=(3.0, 4)).title
    with pytest.raises(IndexError, match=r"batch.*2"):
        view.overlay(batch=2)
    with pytest.raises(IndexError, match=r"head.*3"):
        view.overlay(token=0, head=3)
    with pytest.raises(IndexError, match=r"image.*1"):
        view.overlay(token=0, image_index=1)


def test_rows_that_were_not_kept_are_refused_and_received_mass_is_not():
    view = looked(Sides.patches(8, patch=4))
    received = view.overlay().weights
    view.weights = None
    np.testing.assert_array_equal(view.overlay().weights, received)
    with pytest.raises(LookupError, match=r"q.*k.*watch\(model, keep='qk'\)"):
        view.overlay(token="cls")


def test_received_mass_that_was_pooled_is_refused():
    view = looked(Sides.patches(40, patch=4))
    small = make_overview(view)
    with pytest.raises(
        LookupError,
        match="overview=True",
    ):
        small.overlay()


# ---------------------------------------------------------------------------------------------------- somebody's models


def test_a_vit_of_transformers_is_laid_out_in_one_line():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=(24, 36),
        patch_size=6,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=7,
    )
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    pixels = torch.randn(2, 3, 24, 36)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(pixels)
    seen.layouts = Sides.patches((24, 36), patch=6)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(pixels, output_attentions=True).attentions
    assert len(seen) == len(weights) == 2
    for layer, (view, theirs) in enumerate(zip(seen, weights, strict=True)):
        shown = view.overlay(token="cls", head=1, batch=1)
        torch.testing.assert_close(torch.from_numpy(shown.weights).float(), theirs[1, 1, 0])
        grid = theirs[1, 1, 0, 1:].reshape(4, 6).repeat_interleave(6, 0).repeat_interleave(6, 1)
        torch.testing.assert_close(torch.from_numpy(shown.heat), grid)
        assert shown.title.startswith(f"ViTModel, layer {layer}, head 1: cls →")


def test_a_swin_of_transformers_is_laid_out_in_a_line_per_block():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=24, patch_size=2, embed_dim=6, depths=[2, 2], num_heads=[1, 3], window_size=3, initializer_range=0.5
    )
    model = transformers.SwinModel(config, add_pooling_layer=False).eval()
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(pixels)
    blocks = [(stage, shifted) for stage in (0, 1) for shifted in (False, True)]
    seen.layouts = {
        path: Sides.windows(24, stage=stage, shifted=shifted, patch=2, window=3)
        for path, (stage, shifted) in zip(seen.names, blocks, strict=True)
    }
    for view, (stage, _) in zip(seen, blocks, strict=True):
        shown = view.overlay(at=(9, 13), batch=1)
        side = 4 // (2 - stage)  # pixels of a patch: 2, then 4
        assert shown.token_box.tolist() == [
            9 // side * side,
            13 // side * side,
            9 // side * side + side,
            13 // side * side + side,
        ]
        assert shown.heat.sum() == pytest.approx(side * side, rel=1e-5)  # nothing is padding here
        assert (shown.mass > 0).sum() <= 9


# ------------------------------------------------------------------------------------------------------------- pictures


def photograph(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)


def drawn(overlay: Overlay, dark: bool = False) -> SimpleNamespace:
    """The figure's words, and its dots (height, width, 3)."""
    figure = overlay.figure(dark=dark)
    (image,) = (image for axes in figure.axes for image in axes.images)
    words = [text.get_text() for text in figure.texts]
    return SimpleNamespace(words=words, dots=np.asarray(image.get_array()), paper=figure.get_facecolor())


def test_the_picture_says_whose_it_is_and_where_the_rest_went():
    frame = Frame.whole(60, 80).resized(30, 40).cropped(3, 5, 24, 30)
    shown = looked(Sides.patches(frame, patch=6)).overlay(photograph(60, 80), at=(30, 40), head=1)
    words = drawn(shown).words
    assert words[0] == "Toy, layer 3, head 1: patch (2, 2) → the image"
    assert words[-1] == f"weight in all: patch {shown.shares['patch']:.3f}, cls {shown.shares['cls']:.3f}"
    assert {"the patch itself", "hatched: the model did not see it", "0", f"{shown.mass.max():.3g}"} <= set(words)


def test_a_picture_seen_whole_is_not_hatched_and_a_cls_not_outlined():
    words = drawn(looked(Sides.patches(24, patch=6)).overlay(token="cls")).words
    assert "the patch itself" not in words
    assert not any("hatched" in word for word in words)


@pytest.mark.parametrize("dark", [False, True])
def test_more_weight_is_more_ink_on_light_paper_and_more_light_on_dark(dark):
    sides = Sides.patches(Frame.whole(40, 40).cropped(0, 0, 20, 40), patch=20, before=())
    view = looked(sides)
    shown = view.overlay(token=0)
    dots = drawn(shown, dark).dots
    height, width = dots.shape[:2]
    left, right = (dots[height // 4, width * n // 4].sum() for n in (1, 3))
    more_on_the_left = shown.mass[0] > shown.mass[1]
    assert (left > right) == (more_on_the_left == dark)


def test_the_same_picture_is_the_same_file(tmp_path):
    shown = looked(Sides.patches(12, patch=6)).overlay(photograph(12, 12), token="cls")
    one, two = (shown.save(tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert one == two
    assert one.startswith(b"\x89PNG")
    assert shown.save(tmp_path / "dark.png", dark=True).read_bytes() != one
    assert shown._repr_png_().startswith(b"\x89PNG")


def test_the_photograph_is_shown_upright_and_must_be_the_models_own():
    sides = Sides.patches(Frame.whole(12, 18), patch=6)
    turned = Image.fromarray(photograph(18, 12))
    turned.getexif()[0x0112] = 6  # taken with the camera on its side
    shown = looked(sides).overlay(turned, token="cls")
    upright = np.rot90(np.asarray(turned), -1) @ np.array([0.299, 0.587, 0.114]) / 255
    np.testing.assert_allclose(shown.image, upright, atol=1e-6)
    with pytest.raises(ValueError, match=r"18.*12.*18"):
        looked(sides).overlay(photograph(18, 12), token="cls")
