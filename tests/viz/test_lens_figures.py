"""The lens's figures without looking at pixels: what is written where, which colour a number has, what is refused."""

import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.transforms import Bbox

from regard.masks.tiles import cell_edges
from regard.viz.atlas import short_names
from regard.viz.colors import DARK, LIGHT
from regard.viz.figures import (
    Axis,
    Quantity,
    atlas,
    atlas_html,
    links,
    map_with_marginals,
    save,
    text_heat,
    text_heat_html,
)
from regard.viz.text import readable

ROOT = Path(__file__).resolve().parents[2]
KOREAN = ["▁나는", "▁어제", "▁고양이", "를", "▁보았다"]
ENGLISH = ["[CLS]", "the", "animal", "didn", "'", "t", "cross", "the", "street", "because", "it", "was", "too", "tire"]
ENGLISH += ["##d", ".", "[SEP]"]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.1, 1.0, shape)


def weights(nq: int, nk: int) -> np.ndarray:
    made = np.tril(random(nq, nk), nk - nq)
    return made / made.sum(-1, keepdims=True)


def words(figure: Figure) -> list[str]:
    """What stands around the drawing."""
    return [text.get_text() for text in figure.texts if text.get_text()]


def written(figure: Figure) -> list[str]:
    """What stands in the drawing."""
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]


def colours(figure: Figure, rows: int, cols: int) -> np.ndarray:
    """The colours (R, C, 3) of the one map of that size."""
    arrays = [drawn.get_array() for axes in figure.axes for drawn in (*axes.collections, *axes.images)]
    (found,) = [np.asarray(array) for array in arrays if array is not None and array.shape[:2] == (rows, cols)]
    return found[..., :3] / (255 if found.dtype == np.uint8 else 1)


def place(figure: Figure, string: str) -> tuple[float, float]:
    """Where a text stands, in inches from the lower left corner."""
    (text,) = [text for text in figure.texts if text.get_text() == string]
    return tuple(np.array(text.get_position()) * figure.get_size_inches())


def extent(figure: Figure, axes) -> Bbox:
    """Where axes lie, in inches from the lower left corner."""
    return Bbox(np.array(axes.get_position()) * figure.get_size_inches())


def close(colour: str):
    return pytest.approx(to_rgb(colour), abs=0.003)


# --------------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["[CLS]", "the", "cat", "##s", "[SEP]"], "[CLS] the cats [SEP]"),
        (["The", "Ġcat", "s", "Ġsat", "."], "The cats sat."),
        (["▁The", "▁cat", "s", "."], "The cats."),
        (["the</w>", "cat", "s</w>", "sat</w>"], "the cats sat"),
        (["The", " cat", "s"], "The cats"),
        (["The", "cat", "sat"], "The cat sat"),
        (["ê³łìĸĳìĿ´", "Ġê³łìĸĳìĿ´"], "고양이 고양이"),
        (["Ġa", "ĠĠĠ", "Ċ", "ĉ"], "a ␣␣↵⇥"),
        (["###", "Ġtitle", "Ġhere"], "### title here"),
        (["<|im_start|>", "Ġhi", "한"], "<|im_start|> hi한"),
        (["▁", "▁a"], "␣ a"),
        ([""], "␣"),
    ],
)
def test_tokens_of_any_tokenizer_are_read_as_text(tokens, text):
    assert "".join(" " * piece.space + piece.text for piece in readable(tokens)) == text
    assert len(readable(tokens)) == len(tokens)


def test_part_of_a_letter_stays_as_its_bytes():
    assert [piece.text for piece in readable(["Ġok", "ìĸ", "´"])] == ["ok", "\\xec\\x96", "\\xb4"]


def test_line_end_is_marked():
    assert [piece.ends for piece in readable(["Ġa", "Ċ", ".Ċ", "Ċb"])] == [False, True, True, False]


# ---------------------------------------------------------------------------------------------------------------- atlas


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_atlas_colours_run_from_zero_to_the_largest_value(dark, theme):
    figure = atlas(np.array([[0.0, 1.0, 2.0], [0.5, np.nan, 1.5]]), dark=dark)
    drawn = colours(figure, 2, 3)
    assert tuple(drawn[0, 0]) == close(theme.weight[0])
    assert tuple(drawn[0, 1]) == close(theme.weight[4])
    assert tuple(drawn[0, 2]) == close(theme.weight[-1])
    assert tuple(drawn[1, 0]) == close(theme.weight[2])
    assert tuple(drawn[1, 1]) == close(theme.paper) == to_rgb(figure.get_facecolor()[:3])
    assert words(figure)[-5:] == ["entropy", "(nats)", "0", "2", "no such head"]


def test_absent_head_is_named_only_where_one_is_absent():
    assert "no such head" in words(atlas(np.array([[1.0, np.nan]])))
    assert "no such head" not in words(atlas(np.array([[1.0, 2.0]])))


def test_absent_head_has_no_number():
    assert written(atlas(np.array([[1.0, np.nan, 12.5]]))) == ["1.00", "12.5"]


def test_nan_of_a_head_that_is_there_is_red_and_said():
    values = np.array([[1.0, np.nan, np.nan], [np.nan, np.nan, np.nan]])
    figure = atlas(values, heads=[2, 1])
    assert tuple(colours(figure, 2, 3)[0, 1]) == tuple(colours(figure, 2, 3)[1, 0]) == close(LIGHT.alarm)
    assert tuple(colours(figure, 2, 3)[0, 2]) == tuple(colours(figure, 2, 3)[1, 1]) == close(LIGHT.paper)
    assert words(figure)[-2:] == ["no such head", "NaN"]
    assert written(figure) == ["1.00", "NaN", "NaN"]
    page = atlas_html(values, heads=[2, 1])
    assert ("layer 0, head 1: NaN" in page, "head 2" in page, page.count(": NaN")) == (True, False, 2)
    assert "NaN or infinite" in words(atlas(np.array([[np.nan, np.inf]]), heads=[2]))
    assert "no such head, or not known" in words(atlas(values, heads=[2, 0]))


def test_infinite_value_is_red_and_does_not_stretch_the_colours():
    figure = atlas(np.array([[1.0, np.inf, 2.0]]))
    assert tuple(colours(figure, 1, 3)[0, 1]) == close(LIGHT.alarm)
    assert tuple(colours(figure, 1, 3)[0, 2]) == close(LIGHT.weight[-1])
    assert "infinite" in words(figure)
    assert "infinite" not in words(atlas(np.array([[1.0, 2.0]])))


def test_negative_values_turn_the_colours_around_zero():
    drawn = colours(atlas(np.array([[-2.0, 0.0, 4.0]])), 1, 3)[0]
    assert tuple(drawn[0]) == close(LIGHT.signed[2])
    assert tuple(drawn[1]) == close(LIGHT.signed[4])
    assert tuple(drawn[2]) == close(LIGHT.signed[-1])


def test_limits_make_two_atlases_comparable():
    one, other = (atlas(np.array([[1.0, top]]), measure=Quantity("entropy", limits=(0, 8))) for top in (2.0, 8.0))
    assert tuple(colours(one, 1, 2)[0, 0]) == tuple(colours(other, 1, 2)[0, 0])
    assert tuple(colours(one, 1, 2)[0, 1]) == close(LIGHT.weight[2])
    assert "8" in words(one)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"measure": "effective"}, ["effective", "(keys, 1/Σp²)"]),
        ({"measure": "first"}, ["first", "0"]),
        ({"measure": Quantity("entropy", unit="bits")}, ["entropy", "(bits)"]),
        ({"measure": Quantity("entropy", unit="")}, ["entropy", "0"]),
    ],
)
def test_atlas_names_measure_and_unit(given, said):
    shown = words(atlas(random(2, 3), **given))
    assert shown[shown.index(said[0]) :][:2] == said


def test_names_stand_at_their_rows_and_heads_at_their_columns():
    figure = atlas(random(2, 3), layers=["a.x.attn", "a.y.attn"])
    box = extent(figure, figure.axes[0])
    assert [place(figure, name)[1] for name in "xy"] == pytest.approx(
        [box.y1 - box.height * part for part in (1 / 4, 3 / 4)]
    )
    assert [place(figure, name)[0] for name in "12"] == pytest.approx(
        [box.x0 + box.width * part for part in (3 / 6, 5 / 6)]
    )
    assert place(figure, "x")[0] < box.x0
    assert place(figure, "1")[1] > box.y1


@pytest.mark.parametrize("shape", [(6, 12), (32, 32), (80, 64), (1, 1), (2, 12)])
def test_squares_are_square_and_the_figure_fits_a_page(shape):
    figure = atlas(random(*shape), layers=[f"model.layers.{n}.self_attn" for n in range(shape[0])], title="모든 헤드")
    box = extent(figure, figure.axes[0])
    assert box.height / shape[0] == pytest.approx(box.width / shape[1])
    assert max(figure.get_size_inches()) <= 20
    assert [name for name in words(figure) if name.isdigit()].count(str(shape[0] - 1)) >= 1


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["encoder.layer.3.attention.self", "encoder.layer.11.attention.self"], ["3", "11"]),
        (["h.0.attn", "h.1.attn", "h.10.attn"], ["0", "1", "10"]),
        (["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"], ["0.0", "0.1", "1.0"]),
        (["enc.layers.0.self", "dec.layers.0.self", "dec.layers.0.cross"], ["enc.0.self", "dec.0.self", "dec.0.cross"]),
        (["a.w.b.x", "a.b.w.y"], ["x", "y"]),
        (["attn", "attn.1"], ["attn", "attn.1"]),
        (["a.attn", "a.attn"], ["a.attn", "a.attn"]),
        (["a.0.self"], ["a.0.self"]),
        (["0", "1"], ["0", "1"]),
        (["a.attn, call 0", "a.attn, call 1"], ["0", "1"]),
        (["a.attn, call 0", "b.attn"], ["a.attn, call 0", "b.attn"]),
    ],
)
def test_module_paths_lose_what_all_of_them_share(names, short):
    assert short_names(names) == short


def test_names_stay_different_when_words_between_are_cut():
    assert short_names(["p.w.b.q", "p.b.w.q", "p.c.w.b"]) == ["w.b.q", "b.w.q", "c.w.b"]


def test_legend_says_what_a_shortened_name_stands_for():
    assert "0 is h.0.attn" in words(atlas(random(2, 3), layers=["h.0.attn", "h.1.attn"]))
    assert not [word for word in words(atlas(random(2, 3), layers=["one", "two"])) if " is " in word]


def test_labels_are_written_where_they_fit():
    figure = atlas(random(2, 3), labels=[["first", "", "same-token"], ["", "next", ""]])
    assert written(figure) == ["first", "same-token", "next"]


def test_labels_that_do_not_fit_become_beginnings_with_a_key():
    labels = [[["next", "neighbours", "first", ""][(row + head) % 4] for head in range(31)] for row in range(29)]
    figure = atlas(random(29, 31), labels=labels)
    assert set(written(figure)) == {"nex", "nei", "f"}
    assert [word for word in words(figure) if " = " in word] == ["f = first", "nei = neighbours", "nex = next"]


def test_labels_that_do_not_fit_even_so_are_left_out_and_the_figure_says_so():
    figure = atlas(random(3, 251), labels=[[f"pattern{head}" for head in range(251)]] * 3)
    assert written(figure) == []
    assert "the labels do not fit into squares so small" in words(figure)


def test_labels_that_are_all_empty_write_nothing():
    assert written(atlas(random(2, 3), labels=[[""] * 3] * 2)) == []


def test_torch_values_of_any_precision_are_drawn_as_numpy_ones():
    values = np.array([[0.25, 0.5, 2.0]])
    tensor = torch.tensor(values, dtype=torch.bfloat16, requires_grad=True)
    assert np.array_equal(colours(atlas(tensor), 1, 3), colours(atlas(values), 1, 3))


@pytest.mark.parametrize(
    ("values", "given", "error", "message"),
    [
        (random(2, 3, 5), {}, ValueError, r"values.*heads.*\(2, 3, 5\)"),
        (np.zeros((0, 3)), {}, ValueError, r"values.*heads.*\(0, 3\)"),
        (np.full((2, 3), np.nan), {}, ValueError, "NaN"),
        (random(2, 3), {"heads": [3]}, ValueError, r"heads.*2.*0.*3.*\[3\]"),
        (random(2, 3), {"heads": [3, 4]}, ValueError, r"heads.*2.*0.*3.*\[3, 4\]"),
        (random(2, 3), {"heads": "33"}, ValueError, r"heads.*2.*0.*3.*'33'"),
        (np.zeros((2, 3), complex), {}, TypeError, r"values.*torch.complex128"),
        ("12", {}, TypeError, r"values.*NumPy.*str"),
        (random(257, 3), {}, ValueError, r"256.*heads.*\(257, 3\)"),
        (random(2, 3), {"layers": ["a"]}, ValueError, r"1.*2"),
        (random(2, 3), {"layers": "ab"}, TypeError, r"layers.*'ab'"),
        (
            random(2, 3),
            {"labels": [["a"] * 3]},
            ValueError,
            r"labels.*2.*3.*1",
        ),
        (random(2, 3), {"labels": "ab"}, ValueError, r"labels.*2.*3.*'ab'"),
        (random(2, 3), {"labels": [["a"] * 3, ["b"]]}, ValueError, r"labels\[1\].*1.*3.*heads"),
        (random(1, 1), {"measure": Quantity("entropy", limits=(0, 0.5, 1))}, TypeError, "limits"),
        (random(1, 1), {"measure": Quantity("entropy", limits=(1, 0))}, ValueError, "limits"),
        (np.array([[1.0, 3.0]]), {"measure": Quantity("entropy", limits=(0, 2))}, ValueError, r"limits.*0.*2.*1.*3"),
    ],
)
@pytest.mark.parametrize("draw", [atlas, atlas_html])
def test_values_that_make_no_atlas_are_refused(draw, values, given, error, message):
    with pytest.raises(error, match=message):
        draw(values, **given)


# ------------------------------------------------------------------------------------------------------------------ map


def strip(figure: Figure, number: int) -> StepPatch:
    """The bars of a strip: received first, then entropy."""
    (bars,) = [patch for patch in figure.axes[number].patches if isinstance(patch, StepPatch)]
    return bars


def test_strips_stand_at_the_keys_and_the_queries():
    figure = map_with_marginals(
        weights(5, 7), Axis(positions=5, marginal=random(5)), Axis(positions=7, marginal=random(7))
    )
    drawn, above, beside = (extent(figure, axes) for axes in figure.axes[:3])
    assert (above.x0, above.x1) == pytest.approx((drawn.x0, drawn.x1))
    assert (beside.y0, beside.y1) == pytest.approx((drawn.y0, drawn.y1))
    assert above.y0 > drawn.y1
    assert beside.x0 > drawn.x1
    assert strip(figure, 1).get_data().values.tolist() == random(7).tolist()
    assert strip(figure, 1).get_data().edges.tolist() == list(range(8))
    assert strip(figure, 2).get_data().values.tolist() == random(5).tolist()
    assert figure.axes[1].get_xlim() == (0, 7)
    assert figure.axes[2].get_ylim() == (5, 0)
    assert figure.axes[2].get_xlim() == (0, random(5).max())
    assert strip(figure, 2).orientation == "horizontal"


def test_strips_name_themselves_and_their_range():
    figure = map_with_marginals(weights(2, 3), Axis(marginal=[0.25, 0.0]), Axis(marginal=[0.5, 2.25, 0.0]))
    assert [word for word in words(figure) if word in ("received", "0 to 2.25", "entropy", "0 to 0.25 nats")] == [
        "received",
        "0 to 2.25",
        "entropy",
        "0 to 0.25 nats",
    ]
    assert not {"received", "entropy"} & set(words(map_with_marginals(weights(2, 3))))


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_linear_colours_run_from_zero_to_the_largest_weight(dark, theme):
    drawn = colours(map_with_marginals(np.array([[0.0, 0.25, 0.5]]), dark=dark), 1, 3)[0]
    assert [tuple(colour) for colour in drawn] == [close(c) for c in (theme.paper, theme.heat[4], theme.heat[-1])]


def test_log_colours_run_by_powers():
    figure = map_with_marginals(np.array([[0.0, 1e-4, 1e-2, 1.0]]), scale="log")
    expected = (LIGHT.paper, LIGHT.weight[0], LIGHT.weight[4], LIGHT.weight[-1])
    assert [tuple(colour) for colour in colours(figure, 1, 4)[0]] == [close(colour) for colour in expected]
    assert words(figure)[-6:] == ["weight per cell,", "log scale", "0.0001", "1", "exactly 0", "pooled cells"]


def test_log_colours_end_at_a_millionth_of_the_largest_and_say_so():
    figure = map_with_marginals(np.array([[1e-12, 1e-6, 1.0]]), scale="log")
    first, second, _ = (tuple(colour) for colour in colours(figure, 1, 3)[0])
    assert first == second == close(LIGHT.weight[0])
    assert "1e-06 and less" in words(figure)


def test_rank_colours_are_even_whatever_the_sizes():
    figure = map_with_marginals(np.array([[1e-9, 0.0, 1e-3, 0.9]]), scale="rank")
    expected = (LIGHT.weight[0], LIGHT.paper, LIGHT.weight[4], LIGHT.weight[-1])
    assert [tuple(colour) for colour in colours(figure, 1, 4)[0]] == [close(colour) for colour in expected]
    assert "half of those above 0 are below 0.001" in words(figure)


def test_equal_weights_have_equal_ranks():
    drawn = colours(map_with_marginals(np.array([[0.1, 0.2, 0.2, 0.4]]), scale="rank"), 1, 4)[0]
    assert tuple(drawn[1]) == tuple(drawn[2]) == close(LIGHT.weight[4])


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_a_single_weight_is_the_largest(scale):
    assert tuple(colours(map_with_marginals(np.array([[0.5, 0.0]]), scale=scale), 1, 2)[0, 0]) == close(
        LIGHT.weight[-1]
    )


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_map_of_nothing_but_zeros_is_bare_paper(scale):
    assert (colours(map_with_marginals(np.zeros((2, 3)), scale=scale), 2, 3) == 1).all()


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_broken_weights_are_red_in_map_and_strips(scale):
    cells = np.array([[0.5, np.nan], [np.inf, 0.25]])
    figure = map_with_marginals(cells, Axis(marginal=[np.nan, 0.5]), scale=scale)
    drawn = colours(figure, 2, 2)
    assert tuple(drawn[0, 1]) == tuple(drawn[1, 0]) == close(LIGHT.alarm)
    assert tuple(drawn[0, 0]) == close(LIGHT.weight[-1])
    assert "NaN or infinite" in words(figure)
    bars, broken = (patch for patch in figure.axes[1].patches if isinstance(patch, StepPatch))
    assert bars.get_data().values.tolist() == [0.0, 0.5]
    assert broken.get_data().values.tolist() == [0.5, 0.0]
    assert to_rgb(broken.get_facecolor()[:3]) == close(LIGHT.alarm)


def test_strip_of_nothing_finite_says_so():
    assert "not finite" in words(map_with_marginals(weights(2, 2), keys=Axis(marginal=[np.nan, np.inf])))


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "said"),
    [
        ((4, 8), 512, 1024, "pooled, 128 × 128 tokens per cell"),
        ((4, 8), 512, 8, "pooled, 128 × 1 tokens per cell"),
        ((4, 3), 4, 7, "pooled, 1 × 2–3 tokens per cell"),
        ((2, 2), [0, 3, 5], [0, 1, 2], "pooled, 2–3 × 1 tokens per cell"),
        ((4, 4), 512, None, "pooled, 128 × 128 tokens per cell"),
        ((4, 8), None, None, "pooled cells"),
        ((4, 8), 512, None, "pooled cells"),
        ((4, 8), 4, 8, "exact: a cell is one weight"),
        ((4, 4), 4, None, "exact: a cell is one weight"),
        ((4, 8), range(100, 104), 8, "exact: a cell is one weight"),
    ],
)
def test_map_says_whether_it_is_exact_or_pooled(shape, rows, columns, said):
    figure = map_with_marginals(random(*shape), Axis(positions=rows), Axis(positions=columns))
    assert [word for word in words(figure) if word[:5] in ("poole", "exact")] == [said]


def test_cells_lie_where_their_positions_do():
    figure = map_with_marginals(random(3, 5), Axis(positions=7), Axis(positions=[0, 1, 2, 4, 8, 16]))
    corners = figure.axes[0].collections[0].get_coordinates()
    assert corners[0, :, 0].tolist() == [0, 1, 2, 4, 8, 16]
    assert corners[:, 0, 1].tolist() == cell_edges(7, 3)
    assert figure.axes[0].get_xlim() == (0, 16)
    assert figure.axes[0].get_ylim() == (7, 0)


def test_large_uneven_map_is_an_image_with_the_same_edges():
    figure = map_with_marginals(random(67, 71), Axis(positions=101), Axis(positions=71))
    (image,) = figure.axes[0].images
    assert list(image.get_extent()) == [0, 71, 0, 101]
    assert image._Ay.tolist() == cell_edges(101, 67)  # matplotlib has no other way to ask


def test_strip_may_have_a_value_per_position_or_per_cell():
    by_cell = map_with_marginals(random(2, 3), keys=Axis(positions=12, marginal=random(3)))
    by_key = map_with_marginals(random(2, 3), keys=Axis(positions=12, marginal=random(12)))
    assert strip(by_cell, 1).get_data().edges.tolist() == [0, 4, 8, 12]
    assert strip(by_key, 1).get_data().edges.tolist() == list(range(13))


def test_lone_key_survives_in_a_strip_with_more_keys_than_dots():
    received, entropy = np.zeros(10_007), np.ones(10_007)
    received[5003] = 9.0
    entropy[:16] = 3.0
    figure = map_with_marginals(random(8, 8), Axis(positions=10_007, marginal=entropy), Axis(marginal=received))
    bars = strip(figure, 1).get_data()
    assert len(bars.values) == -(-10_007 // 16) <= 640
    assert bars.values.argmax() == 5003 // 16
    assert bars.values.max() == 9.0
    assert bars.edges[-1] == 10_007
    assert strip(figure, 2).get_data().values.tolist()[:2] == [3.0, 1.0]
    assert strip(figure, 2).get_data().values[-1] == 1.0  # the last bar holds fewer: a mean all the same
    notes = ["a bar of received: the highest of 16 keys", "a bar of entropy: mean of 16 queries"]
    assert [word for word in words(figure) if word.startswith("a bar")] == notes


def test_sink_is_left_out_of_the_colours_and_hatched():
    cells = np.array([[0.9, 0.05, 0.05], [0.8, 0.1, 0.1]])
    figure = map_with_marginals(cells, Axis(positions=2), Axis(positions=3, marginal=[1.7, 0.15, 0.125]), sink=False)
    assert tuple(colours(figure, 2, 3)[1, 1]) == close(LIGHT.heat[-1])
    assert tuple(colours(figure, 2, 3)[0, 1]) == close(LIGHT.heat[4])
    assert figure.axes[1].get_ylim() == (0, 0.15)
    assert {"0.1", "0 to 0.15", "hatched: key 0, left out of the colours"} <= set(words(figure))
    (hatched,) = [axes for axes in figure.axes if any(isinstance(c, LineCollection) for c in axes.collections)]
    box, drawn, above = (extent(figure, axes) for axes in (hatched, *figure.axes[:2]))
    assert (box.x0, box.x1) == pytest.approx((drawn.x0, drawn.x0 + drawn.width / 3))
    assert (box.y0, box.y1) == pytest.approx((drawn.y0, above.y1))
    assert written(figure) == ["0.05", "0.05", "0.10", "0.10"]  # no number in the hatched column


def test_pooled_sink_says_which_keys_are_left_out():
    assert "hatched: keys 0 to 127, left out of the colours" in words(
        map_with_marginals(random(2, 4), Axis(positions=512), Axis(positions=512), sink=False)
    )
    assert "hatched: key 0, left out of the colours" in words(
        map_with_marginals(random(2, 4), Axis(positions=2), Axis(positions=4), sink=False)
    )
    assert "hatched: the first column, left out of the colours" in words(map_with_marginals(random(2, 4), sink=False))


def test_entropy_alone_is_named_below_its_strip_where_no_leaning_label_passes():
    figure = map_with_marginals(random(2, 7), Axis(marginal=[0.5, 0.25]), Axis(tokens=["a long word"] * 7))
    box = extent(figure, figure.axes[1])
    assert place(figure, "entropy")[1] < box.y0
    assert place(figure, "entropy")[0] == pytest.approx(box.x0)
    both = map_with_marginals(random(2, 7), Axis(marginal=[0.5, 0.25]), Axis(marginal=random(7)))
    assert place(both, "entropy")[1] > extent(both, both.axes[2]).y1


def test_few_tokens_are_written_and_many_are_numbered():
    figure = map_with_marginals(weights(5, 5), Axis(tokens=KOREAN))
    assert [words(figure).count(word) for word in ("나는", "고양이", "를")] == [2, 2, 2]
    many = map_with_marginals(random(97, 97), Axis(tokens=["cat"] * 97))
    assert "cat" not in words(many)
    assert {"0", "10", "90"} <= set(words(many))
    pooled = map_with_marginals(random(5, 5), Axis(positions=10, tokens=["cat"] * 10))
    assert "cat" not in words(pooled)


def test_tokens_of_queries_serve_the_keys_only_where_these_are_the_same():
    assert words(map_with_marginals(random(2, 2), Axis(tokens=["나", "너"]))).count("나") == 2
    shifted = map_with_marginals(random(2, 2), Axis(positions=range(5, 7), tokens=["나", "너"]), Axis(positions=2))
    assert words(shifted).count("나") == 1
    named = map_with_marginals(random(2, 2), Axis(tokens=["나", "너"]), Axis(tokens=["I", "you"]))
    assert [words(named).count(word) for word in ("나", "너", "I", "you")] == [1, 1, 1, 1]


def test_ticks_stand_at_round_positions():
    figure = map_with_marginals(random(8, 8), Axis(positions=range(4000, 5000)), Axis(positions=2048))
    box = extent(figure, figure.axes[0])
    assert place(figure, "800")[0] == pytest.approx(box.x0 + box.width * 800.5 / 2048)
    assert place(figure, "4500")[1] == pytest.approx(box.y1 - box.height * 500.5 / 1000)
    assert [word for word in words(figure) if word.isdigit() and int(word) >= 4000][:2] == ["4000", "4100"]


def test_exact_weights_are_printed_where_they_are_few():
    assert written(map_with_marginals(np.array([[0.25, 0.75]]), Axis(positions=1), Axis(positions=2))) == [
        "0.25",
        "0.75",
    ]
    assert written(map_with_marginals(np.array([[0.25, 0.75]]))) == []
    assert written(map_with_marginals(random(17, 3), Axis(positions=17), Axis(positions=3))) == []


@pytest.mark.parametrize("n", [131_072, 1_000_003])
def test_map_of_long_input_is_drawn(n):
    figure = map_with_marginals(random(61, 61), Axis(positions=n), Axis(marginal=random(61)), title=str(n))
    assert figure.axes[0].get_xlim() == (0, n)
    assert max(figure.get_size_inches()) < 12


@pytest.mark.parametrize(
    ("cells", "given", "error", "message"),
    [
        (random(2, 3, 5), {}, ValueError, r"cells.*\(R, C\).*\(2, 3, 5\)"),
        (np.zeros((2, 0)), {}, ValueError, r"cells.*\(R, C\).*\(2, 0\)"),
        (-random(2, 3), {}, ValueError, "cells"),
        (random(1025, 2), {}, ValueError, r"1024.*\(1025, 2\)"),
        (random(2, 3), {"scale": "sqrt"}, ValueError, r"scale.*'linear'.*'log'.*'rank'.*'sqrt'"),
        (
            random(2, 3),
            {"queries": Axis(positions=1)},
            ValueError,
            r"queries.*2.*range\(0, 1\)",
        ),
        (random(2, 3), {"keys": Axis(positions=range(0, 9, 2))}, ValueError, r"keys.*1"),
        (random(2, 3), {"queries": Axis(positions=[0, 2])}, ValueError, r"queries.*3"),
        (random(2, 3), {"queries": Axis(positions=[0, 2, 2])}, ValueError, r"queries.*3"),
        (random(2, 3), {"queries": Axis(positions=[0, 0.5, 2])}, ValueError, r"3.*2"),
        (random(2, 3), {"queries": Axis(positions="ab")}, TypeError, r"queries.*NumPy"),
        (random(2, 3), {"queries": ["a", "b"]}, TypeError, r"queries.*Axis\(tokens=…\).*list"),
        (
            random(2, 3),
            {"keys": Axis(marginal=random(4))},
            ValueError,
            r"received.*4.*3",
        ),
        (
            random(2, 3),
            {"queries": Axis(marginal=random(3))},
            ValueError,
            r"entropy.*3.*2",
        ),
        (random(2, 3), {"queries": Axis(marginal=-random(2))}, ValueError, "entropy"),
        (random(2, 3), {"queries": Axis(tokens=["a"])}, ValueError, r"queries.*2.*range\(0, 1\)"),
        (random(2, 3), {"queries": Axis(positions=2, tokens=["a"])}, ValueError, r"tokens.*queries.*1.*2"),
        (random(2, 3), {"keys": Axis(positions=7, tokens=["a"])}, ValueError, r"tokens.*keys.*1.*7"),
        (random(2, 1), {"sink": False}, ValueError, "sink=False"),
        (random(2, 3), {"sink": False, "keys": Axis(positions=range(7, 10))}, ValueError, r"key.*7"),
    ],
)
def test_map_that_cannot_be_drawn_is_refused(cells, given, error, message):
    with pytest.raises(error, match=message):
        map_with_marginals(cells, **given)


def test_entropy_rounded_to_just_below_zero_is_zero():
    figure = map_with_marginals(random(2, 3), Axis(marginal=[-1e-7, 0.5]))
    assert strip(figure, 1).get_data().values.tolist() == [0.0, 0.5]


# ------------------------------------------------------------------------------------------------------------ text heat


def boxes(figure: Figure) -> tuple[list[Bbox], np.ndarray]:
    """The boxes behind the words in inches from the drawing's upper left corner, and their colours (N, 3)."""
    (drawn,) = [c for axes in figure.axes for c in axes.collections if isinstance(c, PolyCollection)]
    return [path.get_extents() for path in drawn.get_paths()], drawn.get_facecolor()[:, :3]


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_word_is_coloured_by_its_weight_from_bare_paper_on(dark, theme):
    _, drawn = boxes(text_heat(["a", "b", "c"], [0.0, 1 / 3, 0.6], dark=dark))
    assert tuple(drawn[0]) == close(theme.paper)
    assert tuple(drawn[1]) == close(theme.weight[4])
    assert tuple(drawn[2]) == close(theme.weight[-1])


def test_every_word_stands_in_its_box_with_enough_contrast():
    figure = text_heat(ENGLISH, random(len(ENGLISH)), strongest=0)
    placed, drawn = boxes(figure)
    texts = figure.axes[0].texts
    assert [text.get_text() for text in texts] == [token.removeprefix("##") for token in ENGLISH]
    for text, box, colour in zip(texts, placed, drawn, strict=True):
        assert text.get_position()[0] == pytest.approx((box.x0 + box.x1) / 2)
        assert box.y0 < text.get_position()[1] < box.y1
        light = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4) @ (
            0.2126,
            0.7152,
            0.0722,
        )
        assert (1.05 / (light + 0.05) if text.get_color() == "#ffffff" else (light + 0.05) / 0.05) >= 4.5


def test_pieces_of_a_word_touch_and_words_do_not():
    placed, _ = boxes(text_heat(["the", "cat", "##s"], [0.3, 0.3, 0.4]))
    assert placed[1].x0 - placed[0].x1 > 0.04
    assert placed[2].x0 - placed[1].x1 < 0.02


def test_query_is_outlined_and_named():
    figure = text_heat(KOREAN, random(5), query=2)
    (outline,) = figure.axes[0].patches
    placed, _ = boxes(figure)
    assert outline.get_bbox().extents == pytest.approx(placed[2].extents)
    assert to_rgb(outline.get_edgecolor()[:3]) == close(LIGHT.ink)
    assert "outlined: the query “고양이” (2)" in words(figure)


def test_query_that_is_not_in_the_text_is_named_only():
    figure = text_heat(KOREAN, random(5), query="Ġcat")
    assert len(figure.axes[0].patches) == 0
    assert "the query: “cat”" in words(figure)
    assert not [word for word in words(text_heat(KOREAN, random(5))) if "query" in word]


def test_strongest_weights_are_printed_above_their_words():
    figure = text_heat(["a", "b", "c", "d"], [0.005, 0.6, 0.0, 0.345], strongest=3)
    at = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    assert set(at) == {*"abcd", "0.005", "0.6", "0.34"}
    assert at["0.6"][0] == at["b"][0]
    assert at["0.6"][1] < at["b"][1]
    assert written(text_heat(["a", "b"], [0.0, 1.0])) == ["a", "b", "1"]  # a weight of 0 is never among them


def test_short_words_make_room_for_their_numbers():
    figure = text_heat(["a"] * 9, np.linspace(0.101, 0.119, 9), strongest=9)
    renderer = FigureCanvasAgg(figure).get_renderer()
    spots = sorted(
        text.get_window_extent(renderer).extents[[0, 2]].tolist()
        for text in figure.axes[0].texts
        if "0." in text.get_text()
    )
    assert len(spots) == 9
    assert all(left[1] <= right[0] for left, right in pairwise(spots))


def test_sink_word_is_left_out_of_the_colours_hatched_and_told():
    figure = text_heat(["<s>", "cat", "sat"], [0.9, 0.06, 0.04], sink=False)
    placed, drawn = boxes(figure)
    assert len(placed) == 2
    assert tuple(drawn[0]) == close(LIGHT.weight[-1])
    assert {"0.06", "left out of the colours, hatched: token 0, of weight 0.9"} <= set(words(figure))
    assert written(figure) == ["<s>", "cat", "0.06", "sat", "0.04"]
    (hatched,) = [axes for axes in figure.axes if any(isinstance(c, LineCollection) for c in axes.collections)]
    assert extent(figure, hatched).x1 < extent(figure, figure.axes[1]).x0 + placed[0].x0


def test_text_is_wrapped_and_its_lines_are_numbered():
    figure = text_heat([f"w{n}" for n in range(199)], random(199))
    placed, _ = boxes(figure)
    lines = sorted({round(box.y0, 3) for box in placed})
    assert len(lines) > 5
    first = [n for n, box in enumerate(placed) if n == 0 or box.y0 > placed[n - 1].y0 + 0.1]
    assert [word for word in words(figure) if word.isdigit() and word != "0"] == [str(n) for n in reversed(first)][:-1]
    assert max(box.x1 for box in placed) == pytest.approx(7, abs=0.5)  # inches: a page of a text so short


def test_line_ends_where_the_text_does():
    placed, _ = boxes(text_heat(["Ġa", "Ċ", "Ġb", "Ġc"], random(4)))
    assert placed[1].y0 == placed[0].y0 < placed[2].y0 == placed[3].y0
    assert placed[2].x0 == placed[0].x0


def test_line_ends_are_run_on_where_there_are_too_many():
    tokens = ["Ġword", "Ċ"] * 61
    placed, _ = boxes(text_heat(tokens, random(122)))
    assert len(placed) == 122
    assert placed[2].y0 == placed[0].y0


def test_two_thousand_tokens_fit_a_page():
    figure = text_heat((ENGLISH * 118)[:2000], random(2000), title="한 문장 " * 90)
    placed, _ = boxes(figure)
    assert len(placed) == 2000
    assert max(figure.get_size_inches()) <= 20


def test_longer_text_is_shown_in_windows_that_account_for_all_the_weight():
    row = np.full(20_011, 1e-5)
    row[[7, 5003, 5010, 15_013]] = [0.2, 0.3, 0.1, 0.15]
    figure = text_heat([f"Ġw{n}" for n in range(20_011)], row, query=10_007, strongest=4)
    assert {"w7", "w5003", "w5010", "w15013", "w10007"} <= set(written(figure))
    placed, _ = boxes(figure)
    assert len(placed) < 2000
    assert f"{len(placed):,} of 20,011 tokens, around the strongest" in words(figure)
    gaps = [word.removeprefix("… ").removesuffix(" …") for word in words(figure) if word.startswith("…")]
    hidden = sum(int(gap.split()[0].replace(",", "")) for gap in gaps)
    assert hidden + len(placed) == 20_011
    assert sum(float(gap.split()[-1]) for gap in gaps) == pytest.approx(hidden * 1e-5, rel=0.03)
    assert max(figure.get_size_inches()) <= 20


def test_long_words_leave_fewer_windows_and_still_fit_a_page():
    figure = text_heat(["자연어처리에서의어텐션이란" * 2] * 3001, random(3001), sink=False)
    assert max(figure.get_size_inches()) <= 20
    assert 25 <= len(boxes(figure)[0]) < 2000


def test_text_of_zero_weight_is_written_on_bare_paper():
    figure = text_heat(["a", "b"], [0.0, 0.0])
    assert (boxes(figure)[1] == 1).all()
    assert written(figure) == ["a", "b"]


@pytest.mark.parametrize(
    ("tokens", "row", "given", "error", "message"),
    [
        (
            ["a", "b"],
            [0.5, np.nan],
            {},
            ValueError,
            r"weights.*nan.*1.*regard.check",
        ),
        (["a", "b"], [0.5, np.inf], {}, ValueError, r"weights.*inf.*1"),
        (["a", "b"], [0.5, -0.5], {}, ValueError, r"weights.*-0.5"),
        (["a", "b"], [[0.5, 0.5]], {}, ValueError, r"weights.*\(1, 2\)"),
        (["a"], [], {}, ValueError, r"weights.*\(0,\)"),
        (["a"], [0.5, 0.5], {}, ValueError, r"1.*2"),
        ("ab", [0.5, 0.5], {}, TypeError, r"tokens.*'ab'"),
        ([7, 8], [0.5, 0.5], {}, TypeError, r"tokens.*7"),
        (["a", "b"], [0.5, 0.5], {"query": 2}, ValueError, r"query.*0…1.*2"),
        (["a", "b"], [0.5, 0.5], {"query": -1}, ValueError, r"query.*0…1.*2.*-1"),
        (["a", "b"], [0.5, 0.5], {"query": 0.0}, TypeError, r"query.*float.*0.0"),
        (
            ["a"],
            [0.5],
            {"sink": False},
            ValueError,
            r"sink=False.*token.*0",
        ),
    ],
)
@pytest.mark.parametrize("draw", [text_heat, text_heat_html])
def test_text_that_cannot_be_drawn_is_refused(draw, tokens, row, given, error, message):
    with pytest.raises(error, match=message):
        draw(tokens, row, **given)


def test_fewer_than_no_words_with_numbers_are_refused():
    with pytest.raises(ValueError, match=r"strongest.*0.*-1"):
        text_heat(["a"], [1.0], strongest=-1)


# ---------------------------------------------------------------------------------------------------------------- links


def curves(figure: Figure) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Points (4, 2) of each curve, the widths and the colours, in the order of drawing."""
    drawn = next(c for c in figure.axes[0].collections if isinstance(c, PathCollection) and len(c.get_linewidths()) > 0)
    return [path.vertices for path in drawn.get_paths()], drawn.get_linewidths(), drawn.get_edgecolor()[:, :3]


def spots(figure: Figure) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.get_position() for text in figure.axes[0].texts}


def test_columns_link_queries_at_the_left_with_keys_at_the_right():
    figure = links(["q0", "q1"], [(0, 2, 0.1), (1, 0, 0.2), (1, 1, 0.4)], key_tokens=["k0", "k1", "k2"])
    drawn, at = curves(figure)[0], spots(figure)
    ends = [(at[f"q{s}"][1], at[f"k{t}"][1]) for s, t in ((0, 2), (1, 0), (1, 1))]
    assert [(points[0, 1], points[-1, 1]) for points in drawn] == [pytest.approx(end) for end in ends]
    assert all(at["q0"][0] < points[0, 0] < points[-1, 0] < at["k0"][0] for points in drawn)
    assert {"looks from", "looks at", "3 links"} <= set(words(figure))


def test_heavier_links_are_thicker_deeper_and_on_top():
    figure = links(["a", "b", "c"], [(0, 0, 0.7), (1, 1, 0.0), (2, 2, 0.4)])
    drawn, widths, shades = curves(figure)
    assert list(widths) == pytest.approx([0.6, 0.6 + 3.2 * 4 / 7, 0.6 + 3.2])
    assert tuple(shades[0]) == close(LIGHT.paper)
    assert tuple(shades[-1]) == close(LIGHT.weight[-1])
    assert tuple(shades[1]) == close(LIGHT.weight[5])
    heights = [points[0, 1] for points in drawn]
    assert heights == [sorted(heights)[n] for n in (1, 2, 0)]  # b, c, a


def test_only_what_is_given_is_drawn_and_words_without_links_are_muted():
    figure = links(ENGLISH, [(10, 2, 0.68)])
    assert len(curves(figure)[0]) == 1
    assert "1 link" in words(figure)
    shade = {}
    for text in figure.axes[0].texts:
        shade.setdefault(text.get_color(), []).append((text.get_text(), text.get_ha()))
    assert shade[LIGHT.ink] == [("it", "right"), ("animal", "left")]
    assert len(shade[LIGHT.muted]) == 2 * len(ENGLISH) - 2


def test_arcs_look_back_above_the_line_and_ahead_below_it():
    figure = links(["a", "b", "c"], [(2, 0, 0.2), (0, 1, 0.4), (1, 1, 0.6)], kind="arcs")
    (back, ahead, own), at = curves(figure)[0], spots(figure)
    line = at["a"][1]
    assert at["b"][1] == at["c"][1] == line
    assert (back[0, 0], back[-1, 0]) == pytest.approx((at["c"][0], at["a"][0]))
    assert (ahead[0, 0], ahead[-1, 0]) == pytest.approx((at["a"][0], at["b"][0]))
    assert max(back[:, 1]) < line < min(ahead[:, 1])  # downwards, as text is read
    assert max(own[:, 1]) < line
    assert own[[0, -1], 0].mean() == pytest.approx(at["b"][0])
    assert {"above: looks back, or at itself", "below: looks ahead"} <= set(words(figure))
    assert "below: looks ahead" not in words(links(["a", "b"], [(1, 0, 1.0)], kind="arcs"))


@pytest.mark.parametrize("kind", ["columns", "arcs"])
def test_a_dot_marks_what_is_looked_at(kind):
    figure = links(["a", "b", "c"], [(2, 0, 0.2), (0, 1, 0.4)], kind=kind)
    dots = figure.axes[0].collections[1].get_offsets()
    assert np.asarray(dots).tolist() == [points[-1].tolist() for points in curves(figure)[0]]


def test_arcs_stay_inside_the_drawing():
    figure = links(KOREAN, [(4, 0, 0.2), (0, 4, 0.4), (3, 2, 0.6)], kind="arcs")
    height, width = figure.axes[0].get_ylim()[0], figure.axes[0].get_xlim()[1]
    (drawn,) = figure.axes[0].collections[:1]
    for path in drawn.get_paths():
        box = path.get_extents()
        assert -1e-9 <= box.x0 <= box.x1 <= width
        assert -1e-9 <= box.y0 <= box.y1 <= height + 1e-9


@pytest.mark.parametrize("kind", ["columns", "arcs"])
def test_of_many_words_only_the_linked_are_written_with_their_positions(kind):
    figure = links([f"Ġw{n}" for n in range(1009)], [(500, 0, 0.5), (501, 1008, 0.25)], kind=kind)
    expected = ["⋮", "w500 500", "w501 501", "⋮", "w0 0", "⋮", "w1008 1008"]
    if kind == "arcs":
        expected = ["w0 0", "⋮", "w500 500", "w501 501", "⋮", "w1008 1008"]
    assert written(figure) == expected


@pytest.mark.parametrize("kind", ["columns", "arcs"])
def test_a_hundred_words_fit_a_page(kind):
    tokens = ["자연어처리에서의어텐션"] * 100
    assert max(links(tokens, [(0, 99, 0.5), (99, 0, 0.25)], kind=kind).get_size_inches()) <= 20


def test_links_of_weight_zero_are_drawn_all_the_same():
    assert len(curves(links(["a", "b"], [(0, 1, 0.0), (1, 0, 0.0)]))[0]) == 2


def test_links_take_what_top_returns():
    index, weight = torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.bfloat16)
    found = zip([0, 0, 1, 1], index.flatten(), weight.flatten().float(), strict=True)
    assert "4 links" in words(links(["a", "b"], list(found)))
    stacked = torch.stack([torch.tensor([0, 0, 1, 1]), index.flatten(), weight.flatten()], -1)
    assert "4 links" in words(links(["a", "b"], stacked))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": []}, ValueError, "tokens"),
        ({"tokens": "abc"}, TypeError, r"tokens.*'abc'"),
        ({"links": [(0, 1, 0.5), (3, 1, 0.5)]}, ValueError, r"query.*0…2.*3"),
        ({"links": [(0, -1, 0.5)]}, ValueError, r"key.*0…2.*-1.*−1.*View.top"),
        ({"links": [(0, 2, 0.5)], "key_tokens": ["x", "y"]}, ValueError, r"key.*0…1.*2"),
        ({"links": [(0.5, 1, 0.5)]}, ValueError, r"query.*0…2.*0\.5"),
        ({"links": []}, ValueError, r"links.*\(links, 3\).*\(0,\)"),
        ({"links": [(0, 1)]}, ValueError, r"links.*query, key, weight.*2"),
        ({"links": [(0, 1, 0.5), (1, 2)]}, TypeError, "links"),
        ({"links": [(0, 1, 0.5), (1, 2, np.nan)]}, ValueError, r"weights.*nan.*1"),
        ({"links": [(0, 1, 0.5), (1, 2, -1.0)]}, ValueError, r"weights.*-1"),
        ({"kind": "lines"}, ValueError, r"kind.*'columns'.*'arcs'.*'lines'"),
        ({"kind": "arcs", "key_tokens": ["x"] * 3}, ValueError, r'key_tokens.*kind="columns"'),
    ],
)
def test_links_that_cannot_be_drawn_are_refused(change, error, message):
    given = {"tokens": ["a", "b", "c"], "links": [(0, 1, 0.5), (1, 2, 0.25)]} | change
    with pytest.raises(error, match=message):
        links(**given)


def test_links_among_too_many_words_are_refused():
    with pytest.raises(ValueError, match=r"100.*101.*1009"):
        links(["a"] * 1009, [(n, 0, 0.5) for n in range(101)])


# ----------------------------------------------------------------------------------------------------------------- HTML


class Page(HTMLParser):
    """Reads HTML and checks that what is opened is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.elements: list[dict[str, str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(dict(attrs))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1] != "style" else ""

    def titled(self, title: str) -> str:
        """The style of the element that says so on hover."""
        (found,) = [element for element in self.elements if element.get("title") == title]
        return found["style"]


def test_html_of_text_has_the_figures_colours_and_words():
    page = Page(text_heat_html(["Ġ<b>", "Ġcat", "s", "Ċ"], [0.0, 0.9, 0.4, 0.1], query=2, title="<i>"))
    assert "<b> cats↵" in page.text
    assert page.text.startswith("<i>")
    assert f"background:var(--regard-w8,{LIGHT.weight[8]})" in page.titled("token 1: 0.9")
    assert f"background:var(--regard-w3,{LIGHT.weight[3]})" in page.titled("token 2: 0.4")
    assert "background" not in page.titled("token 0: 0")
    assert [n for n in range(4) if "outline" in page.titled(f"token {n}: {[0, 0.9, 0.4, 0.1][n]}")] == [2]
    assert "outlined: the query “s” (2)" in page.text


def test_html_of_text_leaves_the_sink_out_of_the_colours():
    page = Page(text_heat_html(["a", "b", "c"], [0.9, 0.05, 0.1], sink=False))
    assert "repeating-linear-gradient" in page.titled("token 0: 0.9")
    assert "--regard-w8," in page.titled("token 2: 0.1")


def test_html_of_long_text_is_shown_in_windows():
    row = np.full(131_071, 1e-6)
    row[77_777] = 0.5
    html = text_heat_html([f"▁w{n}" for n in range(131_071)], row)
    assert "w77777" in html
    assert "tokens, together" in html
    assert len(html) < 500_000


def test_html_of_atlas_tells_every_head():
    values = np.array([[0.0, 2.0, 1.0], [np.inf, np.nan, 0.5]])
    page = Page(
        atlas_html(values, layers=["h.0.attn", "h.1.attn"], labels=[["", "a&b", ""], ["", "", ""]], title="모두")
    )
    assert f"--regard-w0,{LIGHT.weight[0]}" in page.titled("layer 0, head 0: 0 nats")
    assert f"--regard-w8,{LIGHT.weight[8]}" in page.titled("layer 0, head 1: 2 nats, a&b")
    assert f"--regard-w4,{LIGHT.weight[4]}" in page.titled("layer 0, head 2: 1 nats")
    assert LIGHT.alarm in page.titled("layer 1, head 0: inf nats")
    assert not [
        element for element in page.elements if "head 1" in element.get("title", "") and "layer 1" in element["title"]
    ]
    assert page.text.startswith("모두")
    assert "entropy (nats) 0" in page.text


def test_html_of_signed_values_has_the_signed_colours():
    assert f"--regard-s0,{LIGHT.signed[0]}" in Page(atlas_html([[-1.0, 1.0]])).titled("layer 0, head 0: -1 nats")


@pytest.mark.parametrize("html", [text_heat_html(["a"], [1.0]), atlas_html([[1.0]])], ids=["text", "atlas"])
def test_html_is_whole_in_itself_and_knows_dark_pages(html):
    assert "http" not in html
    assert "<script" not in html
    assert f"--regard-w8:{DARK.weight[8]}" in html
    assert "prefers-color-scheme:dark" in html
    assert "[data-jp-theme-light=false] .regard-figure" in html


def test_html_of_a_large_atlas_stays_small():
    assert len(atlas_html(random(80, 64))) < 600_000


# ------------------------------------------------------------------------------------------------------ all the figures


def many(count: int, kind: str):
    rng = np.random.default_rng(1)
    found = np.stack([rng.integers(0, 89, count), rng.integers(0, 89, count), random(count)], -1)
    return links((ENGLISH * 9)[:89], found, kind=kind)


PICTURES = {
    "atlas": lambda: atlas(random(6, 12), layers=[f"encoder.layer.{n}.self" for n in range(6)], title="한국어"),
    "atlas of one": lambda: atlas(random(1, 1)),
    "large atlas": lambda: atlas(random(80, 64), dark=True, title="80 × 64"),
    "labelled atlas": lambda: atlas(random(7, 11), labels=[["neighbours", *["first"] * 10]] * 7, measure="long"),
    "long names": lambda: atlas(random(2, 3), layers=["encoder.자연어처리.SelfAttention", "decoder.x.EncDecAttention"]),
    "map": lambda: map_with_marginals(
        weights(5, 5), Axis(tokens=KOREAN, marginal=random(5), marked=3), Axis(marginal=random(5), marked=0)
    ),
    "map of one": lambda: map_with_marginals(np.ones((1, 1)), Axis(positions=1, marginal=[0.0]), Axis(marginal=[1.0])),
    "long tokens": lambda: map_with_marginals(
        weights(3, 4), Axis(tokens=["자연어처리에서의어텐션이란"] * 3, marginal=random(3)),
        Axis(tokens=["Ġlonglonglonglonglong"] * 4, marginal=random(4), marked=1), dark=True,
    ),
    "pooled map": lambda: map_with_marginals(
        random(64, 64), Axis(positions=131_072, marginal=random(131_072)), Axis(marginal=random(64)), sink=False,
        scale="log",
    ),
    "bare map": lambda: map_with_marginals(random(61, 31), scale="rank", title="제목"),
    "entropy alone": lambda: map_with_marginals(random(67, 67), Axis(marginal=random(67), tokens=["cat"] * 67)),
    "flat map": lambda: map_with_marginals(random(1, 503), Axis(positions=1, marginal=[1.0]), Axis(positions=503)),
    "text": lambda: text_heat(ENGLISH, random(len(ENGLISH)), query=10, title="it"),
    "one word": lambda: text_heat(["나는"], [1.0]),
    "long text": lambda: text_heat(KOREAN * 37, random(185), query=100, sink=False, dark=True),
    "windows": lambda: text_heat(["▁고양이", "s"] * 1511, np.eye(3022)[1501] + 1e-9, query=7),
    "columns": lambda: links(ENGLISH, [(10, 2, 0.68), (3, 16, 0.1)], title="it"),
    "arcs": lambda: links(KOREAN, [(4, 0, 0.3), (0, 3, 0.2), (2, 2, 0.1)], kind="arcs", dark=True),
    "many columns": lambda: many(53, "columns"),
    "many arcs": lambda: many(53, "arcs"),
}  # fmt: skip


def texts_of(figure: Figure) -> list[tuple[str, Bbox]]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]


@pytest.mark.parametrize("name", PICTURES)
def test_everything_written_lies_inside_and_nothing_on_anything_else(name):
    figure = PICTURES[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.get_size_inches() * figure.dpi
    around, inside = figure.texts, [text for axes in figure.axes for text in axes.texts]
    found = [(text, text.get_window_extent(renderer)) for text in (*around, *inside) if text.get_text()]
    out = [text.get_text() for text, box in found if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    assert out == []
    # The box around a leaning word is larger than the word; and the sides of letters may touch.
    upright = [(text.get_text(), box.padded(-1)) for text, box in found if text.get_rotation() in (0, 90)]
    assert [(a, b) for n, (a, box) in enumerate(upright) for b, other in upright[:n] if box.overlaps(other)] == []
    drawn = [axes.get_window_extent(renderer) for axes in figure.axes]
    outer = upright[: sum(text in around and text.get_rotation() in (0, 90) for text, _ in found)]
    lines_of_their_own = ("…", "looks from", "looks at")  # inside the drawing, where nothing else stands
    on = [text for text, box in outer if any(map(box.overlaps, drawn)) and not text.startswith(lines_of_their_own)]
    assert on == []


DRAWN = ["labelled atlas", "pooled map", "map", "long text", "arcs", "columns"]
HOSTILE = {"text.usetex": True, "axes.grid": True, "font.family": "monospace", "figure.facecolor": "red"}
HOSTILE |= {"savefig.bbox": "tight", "text.color": "red", "font.weight": "bold", "scatter.marker": "x"}
HOSTILE |= {"image.origin": "lower", "figure.autolayout": True, "hatch.linewidth": 9.0, "axes.facecolor": "red"}
HOSTILE |= {
    "patch.edgecolor": "red",
    "patch.force_edgecolor": True,
    "lines.linewidth": 9.0,
    "image.interpolation": "sinc",
}


@pytest.mark.parametrize("name", DRAWN)
def test_picture_is_the_same_in_every_program_and_its_files_stay_small(tmp_path, name):
    """Warnings are errors, and matplotlib warns of a missing glyph."""
    before = dict(matplotlib.rcParams)
    plain = save(PICTURES[name](), tmp_path / "plain.svg").read_bytes()
    assert len(plain) < 1_500_000
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context(HOSTILE):
        figure = PICTURES[name]()
        assert save(figure, tmp_path / "hostile.svg").read_bytes() == plain
        assert save(figure, tmp_path / "hostile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("title", ["$x_1$ \\alpha", "ไทย", "한 문장 " * 90])
def test_any_title_is_drawn(tmp_path, title):
    for figure in (atlas(random(2, 3), title=title), text_heat(["a"], [1.0], title=title)):
        assert figure.texts[0].get_weight() == 700
        save(figure, tmp_path / "title.png")


FRESH = """
import sys
from regard.viz.figures import atlas, atlas_html, links, map_with_marginals, text_heat, text_heat_html
print("matplotlib" in sys.modules)
sys.modules["matplotlib"] = None
atlas_html([[1.0]]), text_heat_html(["a"], [1.0])
for draw in (atlas, map_with_marginals):
    try:
        draw([[1.0]])
    except ImportError as error:
        print(error)
del sys.modules["matplotlib"]
atlas([[1.0]]), links(["a"], [(0, 0, 1.0)]), map_with_marginals([[1.0]]), text_heat(["a"], [1.0])
print("matplotlib.pyplot" in sys.modules)
"""


def test_html_needs_no_matplotlib_and_figures_no_pyplot():
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    missing = "figures need matplotlib: pip install 'regard[figures]'"
    assert found.stdout.splitlines() == ["False", missing, missing, "False"]


# ------------------------------------------------------------------------------------------------------ the asked query


def frames(figure, colour):
    """The marks around rows or columns of a map: left, top, right, bottom in positions."""
    from matplotlib.patches import Rectangle

    marks = [patch for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)]
    marks = [mark for mark in marks if mark.get_edgecolor()[:3] == pytest.approx(to_rgb(colour))]
    return [(*mark.get_xy(), mark.get_x() + mark.get_width(), mark.get_y() + mark.get_height()) for mark in marks]


def test_row_of_the_asked_query_and_column_of_the_asked_key_are_framed():
    plain = map_with_marginals(weights(3, 4), Axis(positions=3), Axis(positions=4))
    assert frames(plain, LIGHT.query) == frames(plain, LIGHT.key) == []
    both = map_with_marginals(weights(3, 4), Axis(positions=3, marked=1), Axis(positions=4, marked=3))
    assert (frames(both, LIGHT.query), frames(both, LIGHT.key)) == ([(0, 1, 4, 2)], [(3, 0, 4, 3)])
    assert {"outlined: query 1", "dashed: key 3"} <= set(words(both))
    pooled = map_with_marginals(weights(3, 4), Axis(positions=9, marked=5), Axis(positions=8))
    assert frames(pooled, LIGHT.query) == [(0, 3, 8, 6)]
    named = map_with_marginals(weights(2, 2), Axis(tokens=["나", "너"], marked=1), Axis(marked=0))
    assert {"outlined: the query “너” (1)", "dashed: the key “나” (0)"} <= set(words(named))


@pytest.mark.parametrize("marked", [-1, 3])
def test_marked_position_outside_the_map_is_refused(marked):
    with pytest.raises(ValueError, match=rf"marked {marked}\b.*queries.*0 to 2"):
        map_with_marginals(weights(3, 4), Axis(positions=3, marked=marked))
