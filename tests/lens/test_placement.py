"""Layouts that are given for a capture: kept where they fit, refused where they do not, grown by text in generation."""

import warnings

import pytest
import torch
from torch import nn

import regard
from regard.layouts import Frame, Layout, Sides
from regard.lens.capture import Capture
from regard.lens.overlays import RunSizes, fit_layouts, read_layouts

H, D = 3, 4


class Attend(nn.Module):
    def forward(self, q, k):
        return nn.functional.scaled_dot_product_attention(q, k, k)


class Model(nn.Module):
    """Two attentions of their own sizes: (batch, queries, keys) of each are given when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = Attend(), Attend()

    def forward(self, first, second):
        for module, (batch, nq, nk) in ((self.patches, first), (self.words, second)):
            k = torch.randn(batch, H, nk, D)
            module(k if nq == nk else torch.randn(batch, H, nq, D), k)


def seen_of(first: tuple[int, ...] = (2, 7, 7), second: tuple[int, ...] = (2, 5, 7), **more: object) -> Capture:
    model = Model()
    with regard.watch(model, keep="qk", **more) as seen:
        model(first, second)
    return seen


PATCHES = Sides.patches((8, 12), patch=4)  # 1 cls and 6 patches
CROSS = Sides(Layout.text(5), PATCHES.keys, PATCHES.frames)


# ------------------------------------------------------------------------------------------------------------ they fit


def test_one_layout_for_all_is_kept_where_it_fits():
    seen = seen_of()
    assert seen.layouts == {}
    seen.layouts = PATCHES
    assert seen.layouts == {"patches": (PATCHES,)}
    assert seen["patches"].overlay(token="cls").image_size == (8, 12)
    with pytest.raises(LookupError, match=r"'words'.*'patches'"):
        seen["words"].overlay(token=0)


def test_layouts_by_path_are_kept_for_what_was_seen():
    seen = seen_of()
    seen.tokens = [list("abcde")]
    seen.layouts = {"patches": PATCHES, "words": [CROSS, CROSS], "somewhere.else": PATCHES}
    assert seen.layouts == {"patches": (PATCHES,), "words": (CROSS, CROSS)}
    title = "Model, layer 1, mean of 3 heads: “b” (1) → the image"
    assert seen["words"].overlay(token="b", batch=1).title == title
    seen.layouts = None
    assert seen.layouts == {}


def test_layouts_by_path_may_be_given_for_each_batch_entry():
    wide = Sides.patches(Frame.whole(31, 47).resized(8, 12), patch=4)  # as many patches, of another photograph
    across = Sides(Layout.text(5), wide.keys, wide.frames)
    seen = seen_of(layouts=[{"patches": PATCHES, "words": CROSS}, {"words": across, "patches": wide}])
    assert seen.layouts == {"patches": (PATCHES, wide), "words": (CROSS, across)}
    assert [seen["words"].overlay(batch=n).image_size for n in range(2)] == [(8, 12), (31, 47)]


def test_layouts_may_be_given_before_the_model_runs():
    seen = seen_of(layouts={"patches": PATCHES, "words": CROSS})
    assert seen.layouts == {"patches": (PATCHES,), "words": (CROSS,)}
    assert seen[1].overlay(token=3).boxes.shape == (6, 4)


def test_layouts_that_do_not_fit_after_all_are_named_when_the_model_has_run():
    with pytest.warns(UserWarning, match=r"layouts.*'patches'.*seen\.layouts"):
        seen = seen_of(layouts=Sides.patches(32))
    assert seen.layouts == {}
    with pytest.raises(LookupError, match="attention"):
        seen[0].overlay(token="cls")


def test_a_model_that_fails_or_is_not_called_is_not_blamed_on_its_layouts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with regard.watch(Model(), layouts=PATCHES) as seen:
            pass
        assert seen.layouts == {}
        with pytest.raises(ZeroDivisionError), regard.watch(Model(), layouts=PATCHES):
            raise ZeroDivisionError


def test_windows_of_a_batch_entry_follow_one_another():
    sides = Sides.windows((6, 9), stage=0, shifted=False, patch=3, window=2)
    seen = seen_of((2 * 2, 4, 4), layouts=sides)
    view = seen["patches"]
    assert view.placed.windows == 2
    for entry in (0, 1):
        weights = view.overlay(token=(1, 2), batch=entry, head=1).weights
        torch.testing.assert_close(torch.from_numpy(weights).float(), view.row(2)[2 * entry + 1, 1])


# ---------------------------------------------------------------------------------------------------------- they do not


def test_what_is_no_layout_is_refused_before_the_model_runs():
    wrong = r"layouts.*regard\.layouts\.Sides.*"
    for given, kind in (
        (PATCHES.keys, "Layout"),
        ({"patches": 3}, "int"),
        ([], "list"),
        ([CROSS, "x"], "str"),
    ):
        with pytest.raises(TypeError, match=wrong + kind):
            regard.watch(Model(), layouts=given)
        with pytest.raises(TypeError, match=wrong + kind):
            seen_of().layouts = given


def test_batch_entries_of_unlike_paths_are_refused():
    both, one = {"patches": PATCHES, "words": CROSS}, {"patches": PATCHES}
    with pytest.raises(ValueError, match=r"0.*2.*'words'"):
        seen_of().layouts = [both, both, one]
    with pytest.raises(ValueError, match=r"entry.*Sides.*2.*'patches'"):
        seen_of().layouts = [one, {"patches": [PATCHES, PATCHES]}]
    with pytest.raises(TypeError, match="dict"):
        seen_of().layouts = [PATCHES, one]


def test_layouts_of_a_run_that_saw_nothing_are_refused():
    with pytest.raises(LookupError, match="GPT2"):
        Capture("GPT2").layouts = PATCHES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Sides.patches(32),
            r"'patches'.*7.*5",
        ),
        ({"x": PATCHES, "y": PATCHES}, r"'x'.*'y'.*'patches'.*'words'"),
        (
            {"words": PATCHES},
            r"'words'.*5.*7.*Layout.*1",
        ),
        (
            {"words": Sides(Layout.text(5), Layout.text(6), ())},
            r"7.*6.*Layout\(6 text\)",
        ),
        ({"patches": [PATCHES] * 3}, r"3.*1.*2"),
        (
            {"patches": Sides.windows(12, stage=0, shifted=False, patch=4, window=2)},
            r"1.*4.*2",
        ),
    ],
)
def test_layouts_that_do_not_fit_their_calls_are_refused(given, message):
    seen = seen_of()
    with pytest.raises(ValueError, match=message):
        seen.layouts = given
    assert seen.layouts == {}


def test_unlike_numbers_of_windows_in_one_batch_are_refused():
    run = RunSizes("self", ((3, H, 4, 4),), (0,))
    two, one = (Sides.windows((6, n), stage=0, shifted=False, patch=3, window=2) for n in (9, 6))
    misfit = run.misfit((two, one))
    assert [sign for sign in misfit if sign.isdigit()] == ["2", "1", "2", "3"]


def test_a_call_of_other_sizes_than_its_modules_layouts_says_so():
    model = Model()
    with regard.watch(model, keep="qk") as seen:
        model((2, 7, 7), (2, 5, 7))
        model((2, 9, 9), (2, 5, 7))
    seen.layouts = {"patches": PATCHES}
    assert seen["patches", 0].overlay(token="cls").boxes.shape == (6, 4)
    with pytest.raises(LookupError, match=r"'patches'.*9"):
        seen["patches", 1].overlay(token="cls")


# ----------------------------------------------------------------------------------------------------------- generation


class Decoder(nn.Module):
    """A prompt, then token after token, over keys that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, prompt: int, steps: int):
        keys = torch.randn(1, H, prompt + steps, D)
        for n in range(steps + 1):
            end = prompt + n
            q = torch.randn(1, H, prompt if n == 0 else 1, D)
            self.attend(q, keys[:, :, :end])


PROMPT = Layout.text(2) + Layout.grid(2, 3, (4, 4), before=()) + Layout.text(1)  # 9 tokens
FRAMES = (Frame.whole(8, 12),)


@pytest.mark.parametrize("given", ["prompt", "whole"])
def test_what_a_generation_adds_to_its_prompt_is_text(given):
    model, layout = Decoder(), PROMPT if given == "prompt" else PROMPT + Layout.text(3)
    with regard.watch(model, keep="qk") as seen:
        model(9, 3)
    seen.layouts = Sides(layout, layout, FRAMES)
    view = seen["attend"]
    assert view.sizes == (1, H, 12, 12)
    assert view.placed.sides[0].keys == view.placed.sides[0].queries == PROMPT + Layout.text(3)
    last = view.overlay(token=11, head=2)
    torch.testing.assert_close(torch.from_numpy(last.mass).float(), view.row(11)[0, 2, 2:8])
    assert last.shares["text"] == pytest.approx(1 - last.shares["patch"], rel=1e-5)

    first, step = seen["attend", 0].placed.sides[0], seen["attend", 2].placed.sides[0]
    assert first.queries == first.keys == PROMPT
    assert step.queries == Layout.text(1)
    assert step.keys == PROMPT + Layout.text(2)
    assert seen["attend", -2].overlay(token=0, head=1).boxes.shape == (6, 4)


def test_a_step_that_drops_the_oldest_keys_keeps_the_places_of_the_others():
    run = RunSizes("self", ((1, H, 9, 9), (1, H, 1, 9)), (0, 1))
    sides = (Sides(PROMPT, PROMPT, FRAMES),)
    (step,) = run.cut(sides, 1)
    assert step.keys.kind[0].tolist() == [*PROMPT.kind[0, 1:].tolist(), "text"]
    assert run.cut(sides, None)[0].keys == PROMPT + Layout.text(1)


def test_room_that_a_cache_of_fixed_size_has_left_counts_as_text():
    run = RunSizes("self", ((1, H, 9, 20), (1, H, 1, 20)), (0, 0))
    sides = (Sides(PROMPT, PROMPT, FRAMES),)
    assert run.misfit(sides) is None
    assert run.cut(sides, 0)[0].keys == PROMPT + Layout.text(11)
    for other in (RunSizes("cross", run.sizes, run.first), RunSizes("self", run.sizes[:1], (0,))):
        assert all(str(named) in other.misfit(sides) for named in (20, 9, PROMPT))


def test_a_layout_that_fits_is_not_copied():
    run = RunSizes("self", ((1, H, 9, 9),), (0,))
    sides = (Sides(PROMPT, PROMPT, FRAMES),)
    assert run.cut(sides, None) is sides
    assert fit_layouts(read_layouts(sides), {"a": [run]})["a"] == sides
