"""Pictures without looking at pixels: what is written where, in which font and colour, and what lands in the file."""

import re
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.transforms import Bbox

from regard.masks import causal, dense, padding, window
from regard.masks import globals as seen_by_all
from regard.op import steps as keep
from regard.viz import sheet
from regard.viz.colors import DARK, LIGHT
from regard.viz.figures import heatmap, mask, save, steps

KOREAN = ["나는", "어제", "고양이를", "보았다"]
ROOT = Path(__file__).resolve().parents[2]


def weights(*shape: int) -> np.ndarray:
    scores = np.random.default_rng(0).normal(size=shape)
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def words(figure: Figure) -> list[str]:
    """What stands around the panels."""
    return [text.get_text() for text in figure.texts if text.get_text()]


def numbers(figure: Figure, panel: int = 0) -> list[str]:
    """What stands in the cells of a panel, row by row."""
    return [text.get_text() for text in figure.axes[panel].texts]


def cells(figure: Figure, panel: int = 0) -> np.ndarray:
    """The colours (R, C, 3) of a panel."""
    drawn = [*figure.axes[panel].collections, *figure.axes[panel].images]
    assert len(drawn) == 1
    return np.asarray(drawn[0].get_array())[..., :3]


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """(text, extent in dots) of everything written."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]


def luminance(colour: object) -> float:
    rgb = np.array(to_rgb(colour))
    return float(np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722))


def lightness(colour: object) -> float:
    """CIE L*, 0 to 100."""
    return 116 * np.cbrt(luminance(colour)) - 16 if luminance(colour) > 0.008856 else 903.3 * luminance(colour)


def stages(nq: int = 3, nk: int = 5, features: int = 2, **changes: object) -> SimpleNamespace:
    """What regard.steps returns, as far as a picture reads it; a cap, bias and mask that change nothing."""
    scores = np.arange(nq * nk, dtype=float).reshape(nq, nk) - 4
    made = dict.fromkeys(("scaled", "capped", "biased", "masked"), scores / 2)
    names = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
    before = ("q", *names)
    formulas = {name: f"f({earlier})" for name, earlier in zip(names, before, strict=False)}
    output = np.linspace(-1, 1, nq * features).reshape(nq, features)
    given = {"scores": scores, "weights": weights(nq, nk), "output": output, "formulas": formulas}
    return SimpleNamespace(**({"labels": None, "key_labels": None} | given | made | changes))


# -------------------------------------------------------------------------------------------------------------- heatmap


def test_labels_stand_at_their_rows_and_columns():
    figure = heatmap(weights(2, 3), ["q0", "q1"], ["k0", "k1", "k2"])
    left, right, bottom, top = (getattr(figure.axes[0].get_position(), side) for side in ("x0", "x1", "y0", "y1"))
    at = {text.get_text(): text.get_position() for text in figure.texts}
    assert [at[f"q{i}"][1] for i in range(2)] == pytest.approx([top - (i + 0.5) * (top - bottom) / 2 for i in range(2)])
    assert [at[f"k{j}"][0] for j in range(3)] == pytest.approx(
        [left + (j + 0.5) * (right - left) / 3 for j in range(3)]
    )
    assert all(at[f"q{i}"][0] < left for i in range(2))
    assert all(at[f"k{j}"][1] > top for j in range(3))
    assert at["looks from ↓"][0] < left


def test_cells_show_the_value_and_small_ones_are_not_called_zero():
    figure = heatmap(np.array([[0.5, 0.496, 0.004], [0.0, 1.0, 1e-30]]))
    assert numbers(figure) == ["0.50", "0.50", "<.01", "·", "1.00", "<.01"]
    placed = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert placed[(0.5, 1.5)] == "·"
    assert placed[(1.5, 1.5)] == "1.00"


def test_labels_of_queries_serve_the_keys_where_there_are_as_many():
    assert words(heatmap(weights(4, 4), KOREAN)).count("고양이를") == 2
    assert words(heatmap(weights(4, 5), KOREAN)).count("고양이를") == 1
    assert [word for word in words(heatmap(weights(4, 5), KOREAN)) if word in "01234"][:5] == list("01234")


def test_key_labels_win_over_labels():
    figure = heatmap(weights(2, 2), ["a", "b"], ["c", "d"])
    assert [word for word in words(figure) if word in "abcd"] == ["a", "b", "c", "d"]


def test_heads_are_titled_and_share_one_scale():
    maps = np.stack([np.full((2, 3), 0.2), np.full((2, 3), 0.4), np.full((2, 3), 0.8)])
    figure = heatmap(maps)
    assert [word for word in words(figure) if word.startswith("head")] == ["head 0", "head 1", "head 2"]
    shades = [tuple(cells(figure, panel)[0, 0]) for panel in range(3)]
    assert shades[2] == pytest.approx(to_rgb(LIGHT.heat[-1]))
    assert shades[1] == pytest.approx(to_rgb(LIGHT.heat[4]))
    assert shades[0] == pytest.approx(to_rgb(LIGHT.heat[2]))
    assert "0.8" in words(figure)
    assert numbers(figure, 1) == ["0.40"] * 6


def test_one_head_of_three_axes_is_titled_and_two_axes_are_not():
    assert "head 0" in words(heatmap(weights(1, 2, 3)))
    assert "head 0" not in words(heatmap(weights(2, 3)))


@pytest.mark.parametrize(("heads", "columns"), [(1, 1), (2, 2), (3, 3), (5, 3), (7, 3), (8, 4), (12, 4), (16, 4)])
def test_heads_make_a_grid(heads, columns):
    figure = heatmap(weights(heads, 2, 2))
    lefts = {round(figure.axes[head].get_position().x0, 6) for head in range(heads)}
    assert len(lefts) == columns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_torch_weights_of_any_precision_and_with_gradient_are_drawn_as_numpy_ones(dtype):
    tensor = torch.tensor([[0.25, 0.75, 0.0]], dtype=dtype, requires_grad=True)
    figure, same = heatmap(tensor), heatmap(np.array([[0.25, 0.75, 0.0]]))
    assert numbers(figure) == ["0.25", "0.75", "·"]
    assert np.array_equal(cells(figure), cells(same))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64, bool])
def test_numpy_weights_of_any_real_kind_are_drawn(dtype):
    assert numbers(heatmap(np.array([[0, 1]], dtype=dtype))) == ["·", "1.00"]


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_zero_is_the_paper_and_colours_begin_there(dark, theme):
    figure = heatmap(np.array([[0.0, 1e-9, 0.1, 1.0]]), dark=dark)
    zero, tiny, some, large = cells(figure)[0]
    assert tuple(zero) == to_rgb(theme.paper) == to_rgb(figure.get_facecolor()[:3])
    assert abs(lightness(tiny) - lightness(zero)) < 1
    assert abs(lightness(some) - lightness(zero)) > 3
    assert abs(lightness(large) - lightness(zero)) > 60
    assert "exactly 0" not in words(figure)


def test_nan_and_infinity_are_loud_and_named():
    figure = heatmap(np.array([[np.nan, np.inf, 0.5]]))
    alarm = pytest.approx(to_rgb(LIGHT.alarm))
    assert numbers(figure) == ["nan", "inf", "0.50"]
    assert tuple(cells(figure)[0, 0]) == tuple(cells(figure)[0, 1]) == alarm
    assert tuple(cells(figure)[0, 2]) == pytest.approx(to_rgb(LIGHT.weight[-1]))
    assert "NaN or infinite" in words(figure)


def test_weights_that_are_all_hidden_are_drawn():
    assert numbers(heatmap(np.zeros((2, 3)))) == ["·"] * 6


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_change_evenly_in_lightness(theme):
    for ramp in (theme.weight, theme.heat, theme.signed[:5][::-1], theme.signed[4:]):
        change = np.diff([lightness(colour) for colour in ramp])
        assert np.all(np.sign(change) == np.sign(change[0]))
        assert np.abs(change).max() < 1.6 * np.abs(change).min()


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_contrast_with_their_cells(dark):
    figure = heatmap(np.linspace(0.01, 1, 143).reshape(11, 13), dark=dark)
    for text, cell in zip(figure.axes[0].texts, cells(figure).reshape(-1, 3), strict=True):
        bright, dim = sorted((luminance(text.get_color()), luminance(cell)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5


def test_values_are_printed_up_to_sixteen_and_on_demand():
    assert len(numbers(heatmap(weights(16, 13)))) == 16 * 13
    assert numbers(heatmap(weights(17, 13))) == []
    assert numbers(heatmap(weights(2, 3), values=False)) == []
    assert len(numbers(heatmap(weights(17, 19), values=True))) == 17 * 19


def test_values_too_small_to_read_are_left_out_by_default_and_refused_on_demand():
    assert numbers(heatmap(weights(36, 13, 13))) == []
    with pytest.raises(ValueError, match=r"values=True.*499.*503"):
        heatmap(weights(499, 503), values=True)


def test_many_labels_are_thinned_in_even_steps():
    names = [f"t{i}" for i in range(211)]
    shown = [word for word in words(heatmap(weights(211, 211), names)) if word in names]
    rows = [int(word[1:]) for word in shown[: shown.index("t0", 1)]]
    assert rows[0] == 0
    assert len(set(np.diff(rows))) == 1
    assert 20 < len(rows) < 106
    assert [name for name in words(heatmap(weights(61, 61), names[:61])) if name in names] == names[:61] * 2


def test_a_lone_peak_survives_where_cells_are_smaller_than_dots():
    lonely = np.zeros((2203, 2207))
    lonely[1001, 1003] = 1.0
    figure = heatmap(lonely)
    tile = -(-2203 // int(9.6 * 200))
    assert cells(figure).shape == (-(-2203 // tile), -(-2207 // tile), 3)
    assert tuple(cells(figure)[1001 // tile, 1003 // tile]) == pytest.approx(to_rgb(LIGHT.weight[-1]))
    assert (cells(figure) != 1).any(-1).sum() == 1
    assert f"a cell shows the largest of {tile} × {tile} weights" in words(figure)


def test_weights_without_pooling_do_not_speak_of_it():
    assert not [word for word in words(heatmap(weights(131, 137))) if "largest" in word]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((3, 3), None),
        ((1, 1), None),
        ((1, 601), None),
        ((601, 1), None),
        ((53, 53), 53),
        ((12, 7, 7), 7),
        ((144, 3, 3), 3),
        ((2, 1021, 1019), None),
        ((5, 31, 29), None),
    ],
)
def test_figure_fits_a_page(shape, names):
    labels = ["자연어처리에서의어텐션이란무엇인가"] * names if names else None
    width, height = heatmap(weights(*shape), labels, title="한 문장 " * 90).get_size_inches()
    assert 1 < width <= 20
    assert 1 < height <= 20


# -------------------------------------------------------------------------------------- nothing clipped, nothing hidden


PICTURES = {
    "three": lambda: heatmap(weights(3, 3), ["The", "cat", "sat"], title="The cat sat"),
    "one": lambda: heatmap(weights(1, 1), title="a title that is much wider than the one cell of this map, in lines"),
    "korean": lambda: heatmap(np.tril(weights(4, 4)), KOREAN, title=" ".join(KOREAN), dark=True),
    "long labels": lambda: heatmap(weights(3, 4), ["자연어처리에서의" * 3, "a", "b"], ["Ġlonglonglong" * 3, *"cde"]),
    "long last label": lambda: heatmap(weights(5, 11), None, [*"abcdefghij", "자연어처리에서의" * 3]),
    "heads": lambda: heatmap(weights(6, 5, 7), ["a", "어텐션", "c", "d", "e"], [f"key{j}고양이" for j in range(7)]),
    "numbered": lambda: heatmap(weights(127, 251)),
    "strip": lambda: heatmap(weights(1, 503)),
    "mask": lambda: mask(causal(), (5, 7)),
    "tiles": lambda: mask(window(128, 0) | seen_by_all([0]), 1024),
    "long mask": lambda: mask(causal(offset=list(range(60))), (4, 67), dark=True),
    "steps": lambda: steps(
        stages(labels=("나는", "어제", "보았다"), key_labels=tuple(f"열쇠말{j}번" for j in range(5)))
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_everything_written_lies_inside_the_figure(name):
    figure = PICTURES[name]()
    width, height = figure.get_size_inches() * figure.dpi
    outside = [(t, b.extents) for t, b in boxes(figure) if b.x0 < 0 or b.y0 < 0 or b.x1 > width or b.y1 > height]
    assert outside == []


@pytest.mark.parametrize("name", PICTURES)
def test_no_words_stand_on_each_other_or_on_a_map(name):
    figure = PICTURES[name]()
    upright = [text for text in figure.texts if text.get_text() and text.get_rotation() == 0]
    renderer = FigureCanvasAgg(figure).get_renderer()
    places = [(text.get_text(), text.get_window_extent(renderer)) for text in upright]
    places += [("a map", axes.get_window_extent(renderer)) for axes in figure.axes]
    assert [(a, b) for n, (a, box) in enumerate(places) for b, other in places[:n] if box.overlaps(other)] == []


def test_numbers_stay_inside_their_cells():
    figure = steps(stages(scores=np.array([[-1234.5, 99999.0, 0.0, 1.0, -0.001]] * 3)))
    renderer = FigureCanvasAgg(figure).get_renderer()
    assert numbers(figure)[:5] == ["−1234", "1e+05", "0.00", "1.00", "0.00"]
    for axes in figure.axes[:3]:
        side = axes.get_window_extent(renderer).width / 5
        assert max(text.get_window_extent(renderer).width for text in axes.texts) < side


# ---------------------------------------------------------------------------------------------------------------- fonts


def files_of(text) -> list[str]:
    """The font files that a text asks for, in order, resolved one by one."""
    font = text.get_fontproperties()
    return [
        str(findfont(FontProperties(family=family, weight=font.get_weight()), fallback_to_default=False))
        for family in font.get_family()
    ]


def test_hangul_comes_from_nanum_gothic():
    figure = heatmap(np.eye(4), KOREAN, title="나는")
    for text in figure.texts:
        assert Path(files_of(text)[0]).name == {400: "NanumGothic.ttf", 700: "NanumGothicBold.ttf"}[text.get_weight()]
    charmap = get_font(files_of(figure.texts[-1])[0]).get_charmap()
    assert all(ord(letter) in charmap for word in KOREAN for letter in word)
    assert figure.texts[0].get_weight() == 700


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_every_glyph_is_found_when_drawing(tmp_path, kind):
    """Warnings are errors, and matplotlib warns of a missing glyph."""
    labels = ["▁고양이", "Ġcat", "漢字", "naïve Ä", "$x_1$ \\alpha"]
    save(heatmap(np.eye(5), labels, title="▁Ġ고양이 −∞"), tmp_path / f"all.{kind}")


def test_a_missing_glyph_would_have_been_noticed(tmp_path):
    figure = heatmap(np.eye(2))
    figure.text(0.5, 0.5, "ไทย", fontproperties=sheet.font(9))
    with pytest.warns(UserWarning, match="font"):
        save(figure, tmp_path / "thai.png")


@pytest.mark.parametrize(
    ("label", "drawn"),
    [
        ("\n", "↵"),
        ("a\tb", "a⇥b"),
        ("", "␣"),
        ("a\\b", "a∖b"),
        ("ไ", "∖u0e44"),
        ("\u200d", "∖u200d"),
        ("\ud800", "∖ud800"),
        ("\U000e0041", "∖U000e0041"),
        (" cat", " cat"),
        ("$x$", "$x$"),
    ],
)
def test_what_has_no_glyph_is_written_as_its_code_and_space_by_a_sign(label, drawn, tmp_path):
    figure = heatmap(np.eye(2), [label, "b"])
    assert words(figure).count(drawn) == 2
    save(figure, tmp_path / "label.png")


def test_decomposed_hangul_is_composed():
    decomposed = unicodedata.normalize("NFD", "고양이")
    assert decomposed != "고양이"
    assert words(heatmap(np.eye(2), [decomposed, "b"])).count("고양이") == 2


def test_dollar_signs_are_not_mathematics():
    figure = heatmap(np.eye(2), ["$\\frac$", "$"], title="$\\broken{$")
    assert all(not text.get_parse_math() for text in figure.texts)
    assert figure.texts[0].get_text() == "$∖broken{$"


def test_long_label_is_cut_and_the_cut_is_marked():
    shown = words(heatmap(np.eye(2), ["x" * 25, "가" * 12]))
    assert "x" * 23 + "…" in shown
    assert "가" * 12 in shown


# ----------------------------------------------------------------------------------------------------------------- mask


@pytest.mark.parametrize("dark", [False, True])
def test_mask_is_drawn_cell_by_cell(dark):
    theme = DARK if dark else LIGHT
    rule = causal() & ~dense([[True, False, False, False, False]] * 3)
    figure = mask(rule, (3, 5), dark=dark)
    visible = (cells(figure) != to_rgb(theme.paper)).any(-1)
    assert visible.tolist() == rule.dense(3, 5).tolist()
    assert len(np.unique(cells(figure).reshape(-1, 3), axis=0)) == 2
    assert words(figure)[0] == repr(rule)
    assert [word for word in words(figure) if word in ("may look", "hidden", "partial")] == ["may look", "hidden"]


def test_mask_of_ninety_six_is_by_cell_and_of_ninety_seven_by_tile():
    assert cells(mask(causal(), 96)).shape == (96, 96, 3)
    assert cells(mask(causal(), 97)).shape == (49, 49, 3)
    assert cells(mask(causal(), (3, 97))).shape == (2, 49, 3)


def test_large_mask_is_drawn_by_the_class_of_its_tiles():
    rule = window(128, 0) | seen_by_all([0])
    figure = mask(rule, 1024)
    colour = {0: LIGHT.paper, 1: LIGHT.weight[2], 2: LIGHT.weight[6]}
    expected = [[to_rgb(colour[kind]) for kind in row] for row in rule.tiles(1024, size=16)[0, 0].tolist()]
    assert np.allclose(cells(figure), expected)
    legend = ["full: all may look", "partial", "empty: hidden", "a tile is 16 × 16 positions"]
    assert [word for word in words(figure) if word in legend] == legend


def test_last_tile_is_cut_where_the_positions_end():
    figure = mask(causal(), 1000)
    assert figure.axes[0].get_xlim() == (0, 62.5)
    assert figure.axes[0].get_ylim() == (62.5, 0)


def test_mask_of_a_million_positions_is_drawn_without_building_it():
    assert cells(mask(causal(), 1_000_003)).shape == (62, 62, 3)


def test_batch_row_and_head_of_a_mask_are_chosen():
    rule = padding([2, 3]) & window([[1, 0, 2]], 0)
    for batch, head in ((0, 0), (1, 2), (1, 1)):
        visible = (cells(mask(rule, 5, batch=batch, head=head)) != 1).any(-1)
        assert visible.tolist() == rule.dense(5)[batch, head].tolist()


def test_mask_takes_labels_and_title():
    figure = mask(causal(), 4, labels=KOREAN, title="한 방향")
    assert words(figure)[0] == "한 방향"
    assert words(figure).count("보았다") == 2
    assert mask(causal(), 4, title="").texts[0].get_text() == "looks at →"


# --------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_scores_diverge_from_zero(kind):
    figure = heatmap(kind(np.array([[2.0, -1.0, 0.0], [-4.0, 1.0, -np.inf]])))
    assert tuple(cells(figure)[1, 0]) == pytest.approx(to_rgb(LIGHT.signed[0]))
    assert tuple(cells(figure)[0, 0]) == pytest.approx(to_rgb(LIGHT.signed[6]))
    assert tuple(cells(figure)[0, 2]) == pytest.approx(to_rgb(LIGHT.signed[4]))
    assert (cells(figure)[1, 2] == 1).all()
    assert numbers(figure) == ["2.00", "−1.00", "0.00", "−4.00", "1.00", "−∞"]
    assert {"score", "−4", "4", "hidden"} <= set(words(figure))
    assert "weight" not in words(figure)


def test_numbers_that_no_weight_can_be_are_scores():
    assert "score" in words(heatmap(np.array([[0.3, 4.46]])))
    assert "weight" in words(heatmap(torch.full((2, 2), 1.0, dtype=torch.bfloat16)))


def test_words_of_a_heatmap_are_korean_on_request():
    drawn = words(heatmap(np.array([[[1.0, -1.0], [-np.inf, np.nan]]]), ["나는", "본다"], lang="ko", title="점수"))
    assert {"점수", "헤드 0", "보는 대상 →", "보는 쪽 ↓", "나는", "가려짐", "NaN 또는 무한대"} <= set(drawn)
    assert not any(re.search("[a-z]{3}", word) for word in drawn)
    assert "가중치" in words(heatmap(np.eye(2), lang="ko"))


def test_map_of_scores_pools_the_largest_and_no_padding():
    figure = heatmap(np.full((2203, 2203), -3.0))  # an odd number: the last tiles are cut
    assert np.allclose(cells(figure), to_rgb(LIGHT.signed[0]))


# ---------------------------------------------------------------------------------------------------------------- steps


def headings(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts if text.get_weight() == 700 and text.get_text()]


def test_stages_that_change_nothing_are_left_out():
    made = stages()
    assert headings(steps(made)) == ["scores", "scaled", "weights", "output"]
    assert "f(masked)" not in words(steps(made))
    assert [word for word in words(steps(made)) if word.startswith("f(")] == [
        "f(q)",
        "f(scores)",
        "f(scaled)",
        "f(weights)",
    ]


def test_stages_that_change_something_are_drawn():
    capped = np.tanh(stages().scaled)
    masked = np.where(np.tri(3, 5, 2, dtype=bool), capped + 1, -np.inf)
    figure = steps(stages(capped=capped, biased=capped + 1, masked=masked))
    assert headings(figure) == ["scores", "scaled", "capped", "biased", "masked", "weights", "output"]
    assert [n for n, row in enumerate(np.array(numbers(figure, 4)).reshape(3, 5)) for sign in row if sign == "−∞"] == [
        0,
        0,
        1,
    ]
    assert (cells(figure, 4)[0, 3:] == 1).all()
    assert "hidden" in words(figure)
    assert "hidden" not in words(steps(stages()))


def test_only_a_mask_after_the_scaling_names_its_source():
    masked = np.where(np.tri(3, 5, 2, dtype=bool), stages().scaled, -np.inf)
    formulas = [word for word in words(steps(stages(masked=masked))) if word.startswith("f(")]
    assert formulas == ["f(q)", "f(scores)", "f(scaled)", "f(masked)", "f(weights)"]


def test_scaling_shows_as_fading():
    figure = steps(stages())
    strongest = stages().scores[-1, -1]
    assert tuple(cells(figure, 0)[-1, -1]) == pytest.approx(to_rgb(LIGHT.signed[-1]))
    assert tuple(cells(figure, 1)[-1, -1]) == pytest.approx(to_rgb(LIGHT.signed[6]))
    assert numbers(figure, 0)[-1] == f"{strongest:.1f}"
    assert numbers(figure, 0)[0] == "−4.00"


def test_zero_score_is_neutral_and_not_hidden():
    figure = steps(stages())
    assert tuple(cells(figure, 0)[0, 4]) == pytest.approx(to_rgb(LIGHT.signed[4]))
    assert numbers(figure, 0)[4] == "0.00"


def test_output_has_a_row_per_query_and_numbers_its_features():
    figure = steps(stages(labels=("나", "너", "우리")))
    assert cells(figure, 3).shape == (3, 2, 3)
    assert "feature →" in words(figure)
    assert numbers(figure, 3) == ["−1.00", "−0.60", "−0.20", "0.20", "0.60", "1.00"]


def test_steps_of_real_attention_are_drawn_for_the_chosen_batch_and_head():
    q, k, v = (torch.randn(2, 3, n, d, requires_grad=True) for n, d in ((5, 7), (6, 7), (6, 2)))
    made = keep(q, k, v, mask=causal(), softcap=2.0, labels=list("abcde"), key_labels=list("uvwxyz"))
    figure = steps(made, batch=1, head=2)
    assert headings(figure) == ["scores", "scaled", "capped", "masked", "weights", "output"]
    expected = [f"{w:.2f}" if w >= 0.005 else "<.01" if w else "·" for w in made.weights[1, 2].flatten().tolist()]
    assert numbers(figure, 4) == expected
    assert "softmax(masked)" in words(figure)
    assert words(figure).count("u") == 5


def test_third_axis_of_steps_is_the_batch_as_in_attention():
    made = keep(*(np.random.default_rng(1).normal(size=(2, 3, 5)) for _ in range(3)))
    assert numbers(steps(made, batch=1), 2) == [f"{w:.2f}" for w in made.weights[1].flat]
    with pytest.raises(IndexError, match=r"head.*1"):
        steps(made, head=1)


def test_bfloat16_steps_are_drawn():
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    assert headings(steps(keep(x, x, x)))[-1] == "output"


# ----------------------------------------------------------------------------------------------------------------- save


def test_png_has_its_signature_and_size(tmp_path):
    figure = heatmap(weights(3, 3))
    path = save(figure, str(tmp_path / "map.PNG"))
    data = path.read_bytes()
    assert path == tmp_path / "map.PNG"
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    size = tuple(int.from_bytes(data[i : i + 4]) for i in (16, 20))
    assert size == pytest.approx(figure.get_size_inches() * 200, abs=1)
    assert len(data) > 5000


def test_pdf_embeds_its_fonts(tmp_path):
    data = save(heatmap(np.eye(4), KOREAN), tmp_path / "map.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert b"NanumGothic" in data
    assert b"CreationDate" not in data


def test_svg_is_xml_of_outlines_that_needs_no_font(tmp_path):
    root = ElementTree.parse(save(heatmap(np.eye(4), KOREAN, title="a -- b <&>"), tmp_path / "map.svg")).getroot()
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "path" in tags
    assert tags & {"text", "tspan", "image", "date"} == set()
    assert any("NanumGothic" in element.get("id", "") for element in root.iter())


def test_svg_is_of_outlines_even_where_the_program_asked_for_text(tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert b"<text" not in save(heatmap(np.eye(2)), tmp_path / "map.svg").read_bytes()


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_same_input_gives_the_same_bytes(tmp_path, kind):
    made = [save(heatmap(weights(3, 4), title="같다"), tmp_path / f"{n}.{kind}").read_bytes() for n in range(2)]
    assert made[0] == made[1]
    assert made[0] != save(heatmap(weights(3, 4), title="다르다"), tmp_path / f"other.{kind}").read_bytes()


def test_large_map_is_an_image_of_moderate_size_in_svg(tmp_path):
    assert save(heatmap(weights(499, 503)), tmp_path / "large.svg").stat().st_size < 3_000_000


def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "map.svg"
    path.write_text("before")
    figure = heatmap(np.eye(2))

    def fail(file, **settings):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        save(figure, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_save_replaces_a_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "map.svg"
    path.write_text("before")
    save(heatmap(np.eye(2)), path)
    assert path.read_text(encoding="utf-8").startswith("<?xml")
    assert list(tmp_path.iterdir()) == [path]


# -------------------------------------------------------------------------------------------------------- the program's


HOSTILE = {"text.usetex": True, "axes.grid": True, "font.family": "monospace", "figure.facecolor": "red"}
HOSTILE |= {"savefig.bbox": "tight", "savefig.facecolor": "red", "text.color": "red", "font.weight": "bold"}
HOSTILE |= {"image.origin": "lower", "figure.autolayout": True, "savefig.transparent": True, "font.style": "italic"}


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_settings_of_the_program_do_not_change_the_picture(tmp_path, kind):
    plain = save(heatmap(weights(3, 3), KOREAN[:3]), tmp_path / f"plain.{kind}").read_bytes()
    with matplotlib.rc_context(HOSTILE):
        assert save(heatmap(weights(3, 3), KOREAN[:3]), tmp_path / f"hostile.{kind}").read_bytes() == plain


def test_settings_and_fonts_of_the_program_are_left_alone(tmp_path):
    default = findfont(FontProperties())
    before = dict(matplotlib.rcParams)
    save(heatmap(np.eye(4), KOREAN), tmp_path / "map.svg")
    mask(causal(), 4)
    steps(stages())
    assert dict(matplotlib.rcParams) == before
    assert findfont(FontProperties()) == default
    ours = [entry for entry in fontManager.ttflist if "koreanize" in entry.fname]
    assert [(entry.name, entry.weight) for entry in ours] == [(sheet.FAMILY, 400), (sheet.FAMILY, 700)]


def test_figures_are_drawn_in_several_threads_at_once(tmp_path):
    plain = save(heatmap(weights(3, 3), KOREAN[:3]), tmp_path / "plain.svg").read_bytes()
    before, made = dict(matplotlib.rcParams), []

    def draw(n: int) -> None:
        made.append(save(heatmap(weights(3, 3), KOREAN[:3]), tmp_path / f"{n}.svg").read_bytes())

    threads = [threading.Thread(target=draw, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [plain] * 4
    assert dict(matplotlib.rcParams) == before


def fresh(code: str) -> str:
    """Run code in a new process; what it prints."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_import_leaves_matplotlib_and_drawing_pyplot_and_the_font_carrier_unimported():
    code = "import sys, numpy as np, regard.viz.figures as f; print('matplotlib' in sys.modules); "
    code += "f.heatmap(np.eye(2), ['가', '나']); "
    code += "print({'matplotlib.pyplot', 'koreanize_matplotlib'} & set(sys.modules))"
    assert fresh(code).split("\n") == ["False", "set()"]


# --------------------------------------------------------------------------------------------------------------- errors


def test_missing_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.font_manager", None)
    for draw in (
        lambda: heatmap(np.eye(2)),
        lambda: mask(causal(), 2),
        lambda: steps(stages()),
        lambda: save(None, "a.png"),
    ):
        with pytest.raises(ImportError, match=r"'regard\[figures\]'"):
            draw()


def test_missing_font_package_names_what_to_install(monkeypatch):
    monkeypatch.setattr(sheet, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"NanumGothic.ttf.*'regard"):
        heatmap(np.eye(2))


def test_missing_font_file_is_named(monkeypatch, tmp_path):
    (tmp_path / "fonts").mkdir()
    (tmp_path / "fonts" / "NanumGothic.ttf").symlink_to(files_of(heatmap(np.eye(2)).texts[0])[0])
    before = list(fontManager.ttflist)
    monkeypatch.setattr(fontManager, "ttflist", before)
    monkeypatch.setattr(sheet, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(ImportError, match=r"NanumGothicBold.ttf"):
        heatmap(np.eye(2))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([[1.0]], TypeError, r"weights.*NumPy.*list"),
        (np.array([["a"]]), TypeError, r"weights.*<U1"),
        (np.array([[1j]]), TypeError, r"weights.*complex128"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, r"weights.*torch.complex64"),
        (np.ones(3), ValueError, r"weights.*Nq.*Nk.*H.*Nq.*Nk.*\(3,\)"),
        (np.ones((2, 3, 5, 7)), ValueError, r"\(2, 3, 5, 7\).*weights\[b\]"),
        (np.ones((0, 3)), ValueError, r"\(0, 3\)"),
        (np.ones((1, 4097)), ValueError, r"4096.*1.*4097"),
        (np.ones((145, 2, 2)), ValueError, r"144.*145.*weights\[:144\]"),
    ],
)
def test_weights_that_cannot_be_drawn_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        heatmap(given)


def test_negative_number_is_found_even_where_pooling_would_hide_it():
    large = np.ones((2203, 2203))
    large[7, 7] = -1
    assert {"score", "a cell shows the largest of 2 × 2 scores"} <= set(words(heatmap(large)))


def test_unknown_language_of_a_heatmap_is_refused():
    with pytest.raises(ValueError, match=r"lang.*'fr'"):
        heatmap(np.eye(2), lang="fr")


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ({"labels": ["a", "b"]}, ValueError, r"labels.*2.*3"),
        ({"key_labels": ["a", "b"]}, ValueError, r"key_labels.*2.*5"),
        ({"labels": ["a", "b", "c", "d", "e"]}, ValueError, r"labels.*5.*3"),
        ({"labels": "cat"}, TypeError, r"labels.*'cat'"),
        ({"labels": ["a", "b", 3]}, TypeError, r"labels.*3"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, error, message):
    with pytest.raises(error, match=message):
        heatmap(weights(3, 5), **labels)


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (
            lambda: mask(np.eye(3, dtype=bool), 3),
            TypeError,
            r"regard.masks.*ndarray.*masks.dense",
        ),
        (lambda: mask(causal(), 0), ValueError, "0 × 0"),
        (lambda: mask(causal(), (3, 2**20 + 1)), ValueError, r"1048576.*3.*1048577"),
        (lambda: mask(causal(), 3, batch=1), IndexError, r"batch.*1"),
        (lambda: mask(causal(), 3, head=2), IndexError, r"head.*2.*1"),
        (lambda: mask(causal(), 3, labels=["a"]), ValueError, r"labels.*1.*3"),
        (lambda: mask(padding([4]), 3), ValueError, r"4.*3"),
    ],
)
def test_mask_that_cannot_be_drawn_is_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()


@pytest.mark.parametrize(("nq", "nk", "features"), [(257, 3, 2), (3, 257, 2), (3, 5, 257)])
def test_steps_too_large_to_see_are_refused(nq, nk, features):
    with pytest.raises(ValueError, match="256"):
        steps(stages(nq, nk, features))


@pytest.mark.parametrize("name", ["map", "map.jpg", "map.", ".png"])
def test_unknown_suffix_is_refused_with_the_known_ones(tmp_path, name):
    with pytest.raises(ValueError, match=r".png.*.svg.*.pdf"):
        save(heatmap(np.eye(2)), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'.*a.png'.*'.*nowhere'"):
        save(heatmap(np.eye(2)), tmp_path / "nowhere" / "a.png")


def test_what_is_not_a_figure_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match="ndarray"):
        save(np.eye(2), tmp_path / "a.png")
