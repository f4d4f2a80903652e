"""Views and captures as pictures, and what a notebook shows of them by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.lens import display

matplotlib = pytest.importorskip("matplotlib")


def texts(figure: Any) -> list[str]:
    return [t.get_text() for t in figure.texts] + [t.get_text() for axes in figure.axes for t in axes.texts]


@pytest.fixture
def view() -> Any:
    q, k, v = (torch.randn(2, 3, 7, 5) for _ in range(3))
    return regard.look(q, k, v)


@pytest.fixture
def capture() -> Any:
    layer = torch.nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad(), regard.watch(model, tokens=["나는", "오늘", "밥을", "먹었다", "."]) as seen:
        model(torch.randn(1, 5, 12))
    return seen


def test_a_view_shows_the_maps_of_all_its_heads(view: Any) -> None:
    shown = texts(view.show())
    assert {"head 0", "head 1", "head 2"} <= set(shown)
    assert "7 queries × 7 keys, exact" in shown


def test_a_view_shows_one_head_with_its_margins(view: Any) -> None:
    shown = texts(view.show(head=1, batch=1))
    assert "head 1" in shown
    assert "received" in " ".join(shown)
    assert "entropy" in " ".join(shown)


def test_a_long_view_says_that_its_cells_are_pooled() -> None:
    x = torch.randn(1, 1, 150, 4)
    assert "150 queries × 150 keys, pooled, 64 × 64 cells" in texts(regard.look(x, x, x).show())


def test_more_heads_than_fit_are_said_to_be_left_out() -> None:
    x = torch.randn(1, 17, 3, 4)
    assert any("the first 16 of 17 heads" in t for t in texts(regard.look(x, x, x).show()))


@pytest.mark.parametrize("lead", [(), (2,), (1, 2, 3)])
def test_a_view_of_numpy_arrays_with_any_leading_axes_can_be_shown(lead: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(*lead, 5, 4))
    assert "5 queries × 5 keys, exact" in texts(regard.look(x, x, x).show())


@pytest.mark.parametrize(("name", "index"), [("head", 3), ("batch", 2)])
def test_a_head_or_batch_row_that_is_not_there_is_named(view: Any, name: str, index: int) -> None:
    with pytest.raises(IndexError, match=rf"{name}.*{index}"):
        view.show(**{name: index})


def test_a_notebook_draws_a_view_as_png(view: Any) -> None:
    assert view._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_gets_text_where_no_map_is_held() -> None:
    x = torch.randn(3, 4)
    assert regard.look(x, x, x, measures="entropy")._repr_png_() is None


def test_a_notebook_gets_text_without_matplotlib(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    assert view._repr_png_() is None


def test_a_capture_shows_its_atlas_with_layers_and_heads(capture: Any) -> None:
    assert "entropy" in " ".join(texts(capture.show()))
    assert "previous" in " ".join(texts(capture.show(measure="previous")))


def broken_capture(everywhere: bool) -> Any:
    """Of two batch rows, the second with NaN in all heads, or in one."""

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(2, 3, 5, 4)
    q[(1,) if everywhere else (1, 2)] = float("nan")
    with regard.watch(model := Attend()) as seen:
        model(q)
    return seen


def test_heads_that_are_nan_are_drawn_as_such() -> None:
    for everywhere, heads in ((False, 1), (True, 3)):
        seen = broken_capture(everywhere)
        shown = texts(seen.show())
        assert shown.count("NaN") == heads + 1  # and the legend
        assert "no such head" not in shown
        assert seen._repr_html_().count(": NaN") == heads
        assert "NaN" not in texts(seen.show(batch=0))


def test_layers_that_do_not_know_a_measure_are_said_to_be_so() -> None:
    model = torch.nn.TransformerDecoderLayer(12, 3, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(1, 5, 12), torch.randn(1, 7, 12))
    assert "no such head, or not known" in texts(seen.show(measure="previous"))
    assert "no such head, or not known" not in texts(seen.show(measure="first"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"batch": 1}, IndexError, r"batch.*1"),
        ({"layer": 0, "batch": 1}, IndexError, r"batch.*1"),
        ({"layer": 0, "head": 3}, IndexError, r"head.*3"),
        ({"head": 2}, ValueError, r"head.*2.*show\(layer, 2\)"),
        ({"layer": 0, "measure": "own"}, ValueError, "measure='own'"),
        ({"measure": "nope"}, LookupError, r"measure.*'nope'"),
    ],
)
def test_a_capture_refuses_to_show_what_is_not_there(
    capture: Any, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        capture.show(**given)


def test_each_run_of_a_module_is_a_row_of_the_picture() -> None:
    layer = torch.nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(layer(torch.randn(1, 5, 12)))
    assert {"0", "1", "0 is self_attn, call 0"} <= set(texts(seen.show()))


def test_a_captures_layer_is_shown_with_its_words(capture: Any) -> None:
    shown = texts(capture.show("layers.1.self_attn", head=2))
    assert "나는" in shown
    assert "먹었다" in shown


def test_a_notebook_draws_a_capture_as_html_and_names_what_was_not_seen(capture: Any) -> None:
    capture.unseen["odd"] = "a <strange> reason"
    html = capture._repr_html_()
    assert "TransformerEncoder" in html
    assert "a &lt;strange&gt; reason" in html
    assert "<script" not in html


def test_a_capture_of_nothing_says_so_in_a_notebook() -> None:
    with regard.watch(torch.nn.Linear(2, 2)) as seen:
        pass
    assert "no attention was seen" in seen._repr_html_()
