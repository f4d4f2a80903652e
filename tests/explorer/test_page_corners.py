"""The explorer's page where things are unusual: short addresses, narrow windows, odd tokens, NaN, numbers all alike.

What it shows of ordinary texts is in `test_page.py`, of images in `test_image_page.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import PLAYWRIGHT, opened, ready, serving, until
from PIL import Image
from torch import Tensor

import regard
from regard.cli import main
from regard.explorer import export
from regard.explorer.export import write_html
from regard.lens.capture import Capture, Record
from regard.session.ranking import strongest
from regard.session.session import Session, session_of

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
SENTENCE = "The animal didn't cross the street because it was too tired."
WORDS = ["[CLS]", "the", "animal", "didn", "'", "t", "cross", "the", "street", "because"]
WORDS += ["it", "was", "too", "tired", ".", "[SEP]"]
LAYERS, HEADS, SIZE = 5, 3, 7
ODD = ("고양이", "a" * 300, "שלום", "\u202eevil", "\u200b", "\x00", "x\u200d", "क\u094d\u200dष", "\u3000", "tail")


# ------------------------------------------------------------------------------------------------------------- fixtures


def made(tokens: tuple[str, ...] | list[str], *parts: Any, name: str = "made", **told: Any) -> Session:
    """A session of layers with these q and k, each (1, H, N, D); told: what `regard.look` takes besides."""
    capture = Capture("Toy", [list(tokens)])
    measures = ["entropy", "effective", "received", "max_logit", "map"]
    for n, (q, k) in enumerate(parts):
        view = regard.look(q, k, k, measures=measures, **told)
        capture.records.append(Record(f"layers.{n}", 0, "self", "test", "test", view=view))
    return session_of(capture, name)


def drawn(layers: int, heads: int, n: int, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(2, 1, heads, n, SIZE, generator=random)) for _ in range(layers)]


@pytest.fixture(scope="module")
def session() -> Session:
    """The documents' sentence, as seen by nobody's model."""
    found = made(WORDS, *drawn(LAYERS, HEADS, len(WORDS)))
    return Session(found.name, found.capture, found.tokens, text=SENTENCE)


@pytest.fixture(scope="module")
def site(session: Session) -> Iterator[str]:
    with serving([session]) as address:
        yield address


@pytest.fixture(scope="module")
def exported(session: Session, tmp_path_factory: Any) -> str:
    return written(session, tmp_path_factory.mktemp("page"))


def written(session: Session, folder: Path) -> str:
    """The address of a session's exported page."""
    write_html(session, folder / "page.html")
    return (folder / "page.html").as_uri()


def chosen(page: Any, layer: int, head: int) -> None:
    expect(page.locator(f'.cell[data-layer="{layer}"][data-head="{head}"]')).to_have_attribute("aria-selected", "true")


# ----------------------------------------------------------------------------------------------------- what is left out


def test_steps_that_a_file_does_not_hold_are_said_without_alarm(browser, session, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "ROOM", 1000)
    address, (q, k) = written(session, tmp_path), drawn(LAYERS, HEADS, len(WORDS))[3]
    weights = regard.look(q, k, k).tile(range(len(WORDS)), range(len(WORDS)))[0, 1]
    faint = int(weights[10].argmin())
    for locale, words in (("en-US", "does not hold the steps of this pair"), ("ko-KR", "이 쌍의 계산 과정이 없습니다")):
        with opened(browser, locale=locale) as page:
            ready(page, f"{address}#layer=3&head=1&token=10&key={faint}&lang={locale[:2]}")
            expect(page.locator(".steps")).to_contain_text(words)
            expect(page.locator(".steps .error")).to_have_count(0)


# ------------------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize("where", ["site", "exported"])
def test_address_without_a_session_is_that_of_the_newest(page, where, request):
    ready(page, f"{request.getfixturevalue(where)}#layer=4&head=2&token=3")
    chosen(page, 4, 2)
    expect(page.locator(".said-query + .said-place")).to_have_text("3")
    expect(page.locator('.text-piece[data-index="3"]')).to_have_class("text-piece kind-word query")


@pytest.mark.parametrize("where", ["site", "exported"])
def test_address_that_names_a_head_alone_gets_a_token_to_begin_with(page, where, request):
    ready(page, f"{request.getfixturevalue(where)}#layer=2&head=1")
    chosen(page, 2, 1)
    expect(page.locator(".said-weight")).to_be_visible()


def opens(page: Any, session: Session) -> None:
    """Wait until the page shows the link that ranks first in the session."""
    link = strongest(session, session.layers, count=1)[0]
    chosen(page, link.layer, link.head)
    expect(page.locator(".said-query")).to_have_text(WORDS[link.query])
    expect(page.locator(".said-key")).to_have_text(WORDS[link.key])
    expect(page.locator(".steps tr.chosen small")).to_have_text(str(link.key))


@pytest.mark.parametrize("where", ["site", "exported"])
@pytest.mark.parametrize("address", ["#lang=en&theme=light", "#session=1"])
def test_address_that_says_nothing_of_a_place_begins_with_the_link_that_ranks_first(
    page, session, where, address, request
):
    ready(page, request.getfixturevalue(where) + address)
    opens(page, session)


@pytest.mark.parametrize("where", ["site", "exported"])
def test_address_of_a_session_that_is_gone_shows_the_newest(page, where, request):
    ready(page, f"{request.getfixturevalue(where)}#session=77&layer=4&token=2")
    opens(page, request.getfixturevalue("session"))


def test_address_changed_by_hand_to_a_session_that_is_gone_shows_the_newest(page, session, exported):
    ready(page, f"{exported}#session=1&layer=4&head=2&token=3")
    page.evaluate("location.hash = '#session=constructor&layer=2'")
    opens(page, session)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--token", "tired"], {"token": "tired"}),
        (["--layer", "4", "--head", "2"], {"layer": 4, "head": 2}),
        (["--layer", "1", "--head", "0", "--token", "8"], {"layer": 1, "head": 0, "token": "street"}),
        (["--token", "[SEP]"], {"token": "[SEP]"}),
    ],
)
def test_command_s_choice_is_where_its_page_opens(page, session, tmp_path, monkeypatch, options, place):
    monkeypatch.setattr("regard.cli.look.read_text", lambda *given, **told: (session, len(WORDS)))
    assert main(["look", SENTENCE, *options, "--html", str(tmp_path / "page.html")]) == 0
    ready(page, (tmp_path / "page.html").as_uri())
    cell = page.locator('.cell[aria-selected="true"]')
    for name in {"layer", "head"} & set(place):
        expect(cell).to_have_attribute(f"data-{name}", str(place[name]))
    expect(page.locator(".said-query")).to_have_text(place.get("token", re.compile(".")))
    expect(page.locator(".steps h2")).to_contain_text(place.get("token", "looks"))


# -------------------------------------------------------------------------------------------------------------- colours


def colours(page: Any) -> set[str]:
    return set(page.locator(".cell").evaluate_all("cells => cells.map((at) => at.style.getPropertyValue('--tint'))"))


def test_heads_of_one_token_have_one_colour(page, tmp_path):
    ready(page, written(made(["word"], *drawn(2, 5, 1)), tmp_path))
    assert len(colours(page)) == 1
    expect(page.locator(".legend .ramp-numbers")).to_have_text("0 in every head")
    expect(page.locator(".facts")).to_have_text("made · 1 token · 2 layers × 5 heads")


def test_heads_whose_numbers_are_shown_alike_have_one_colour(page, tmp_path):
    parts = [(0.03 * q, k) for q, k in drawn(2, 5, 17)]
    found = made([f"w{n}" for n in range(17)], *parts)
    entropy = torch.cat([numbers.entropy for numbers in found.numbers])
    assert 1e-5 < float(entropy.max() - entropy.min()) < 1e-3
    ready(page, f"{written(found, tmp_path)}#measure=entropy")
    assert len(colours(page)) == 1
    expect(page.locator(".legend .ramp-numbers")).to_have_text(f"{float(entropy.max()):.2f} in every head")


def test_heads_whose_numbers_differ_have_colours_and_a_legend(page, exported):
    ready(page, exported)
    assert len(colours(page)) > LAYERS
    expect(page.locator(".legend .ramp-numbers span")).to_have_count(3)


def test_same_text_twice_differs_in_no_colour(page, session):
    """Twice the same numbers but for rounding."""
    again = made(WORDS, *[(q * (1 + 1e-7), k) for q, k in drawn(LAYERS, HEADS, len(WORDS))])
    with serving([session, again]) as address:
        ready(page, f"{address}#session=1&with.session=2&with.difference=1")
        expect(page.locator("[data-side=second] .cell")).to_have_count(LAYERS * HEADS)
        cells = page.locator("[data-side=second] .cell")
        assert len(set(cells.evaluate_all("cells => cells.map((at) => at.style.getPropertyValue('--tint'))"))) == 1


# -------------------------------------------------------------------------------------------------------------- windows

OUTSIDE = """() => {
  const scrolls = (at) => {
    for (let up = at.parentElement; up && up.id !== "regard"; up = up.parentElement)
      if (up.scrollWidth > up.clientWidth && getComputedStyle(up).overflowX === "auto") return true;
    return false;
  };
  return [...document.querySelectorAll("#regard *")]
    .filter((at) => at.offsetParent !== null && !at.closest("svg, .unseen, .skip") && !scrolls(at))
    .map((at) => [at.className || at.tagName, at.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5))
    .map(([name, box]) => `${name}: ${box.left} to ${box.right}`);
}"""


@pytest.mark.parametrize(
    ("width", "height"), [(360, 740), (400, 800), (1024, 600), (979, 700), (980, 700), (1280, 800)]
)
def test_nothing_is_out_of_reach_in_a_window_of_any_width(browser, site, width, height):
    with opened(browser, viewport={"width": width, "height": height}) as page:
        ready(page, f"{site}#layer=3&head=1&token=10")
        expect(page.locator(".steps .sum")).to_be_attached()
        assert page.evaluate("document.scrollingElement.scrollWidth") == width
        assert page.evaluate(OUTSIDE) == []
        for button in page.locator(".top button").all():
            box = button.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width


def test_card_of_a_narrow_window_is_shown_whole_above_the_steps(browser, site):
    with opened(browser, viewport={"width": 400, "height": 800}) as page:
        ready(page, f"{site}#layer=3&head=1&token=10&drawer=1")
        expect(page.locator(".steps .sum")).to_be_attached()
        high = page.locator(".card").evaluate("at => [at.clientHeight, at.scrollHeight]")
        assert high[0] == high[1]
        assert page.locator(".steps").bounding_box()["y"] >= page.locator(".card .path").bounding_box()["y"]


def test_numbers_of_arcs_are_in_sight_while_two_are_compared(page, session):
    with serving([session, session]) as address:
        ready(page, f"{address}#session=1&layer=3&head=1&token=4&with.session=2&with.token=4&drawer=0")
        for side in ("first", "second"):
            expect(page.locator(f"[data-side={side}] .arc-number").first).to_be_attached()
            top = page.locator(f"[data-side={side}] .text-scroll").bounding_box()["y"]
            numbers = page.locator(f"[data-side={side}] .arc-number").all()
            assert numbers
            halo = 3  # pixels of paper around a digit, which count as part of its box
            assert [box for number in numbers if (box := number.bounding_box())["y"] + halo < top] == [], top


# --------------------------------------------------------------------------------------------------------------- labels


@pytest.fixture(scope="module")
def odd(tmp_path_factory: Any) -> str:
    return written(made(ODD, *drawn(1, 2, len(ODD))), tmp_path_factory.mktemp("odd"))


def test_signs_that_show_nothing_or_turn_the_writing_around_are_written_as_numbers(page, odd):
    ready(page, odd)
    assert page.locator(".text-piece").all_inner_texts() == [
        *("고양이", "a" * 40 + "…", "שלום", "‹U+202E›evil", "‹U+200B›", "‹U+0000›", "x‹U+200D›"),
        *("क\u094d\u200dष", "‹U+3000›", "tail"),  # what joins two letters belongs to them
    ]


def test_sentence_of_a_head_is_not_turned_around_by_a_token(page, tmp_path):
    q, k = drawn(1, 1, 3)[0]
    k[..., 1, :], q[:] = 4.0, 4.0  # everything looks at token 1
    ready(page, written(made(["a", "\u202eevil", "b"], (q, k)), tmp_path))
    expect(page.locator(".card .sentence")).to_contain_text("Token 1 “‹U+202E›evil” receives most")


def test_label_in_words_has_a_direction_of_its_own(page, odd):
    ready(page, f"{odd}#session=1&token=2&key=3")
    expect(page.locator(".steps h2 bdi")).to_have_text("“שלום”")
    for place in (".said-query", ".said-key", ".link-word", ".links .called", ".text-word", ".keys th button > *"):
        assert page.locator(place).evaluate_all("found => new Set(found.map((at) => at.tagName)).size") == 1, place
        assert page.locator(place).first.evaluate("at => at.tagName") == "BDI", place


def test_token_of_300_letters_stays_in_its_column_of_the_steps(page, odd):
    ready(page, f"{odd}#session=1&token=1&key=1")
    expect(page.locator(".steps .explained li")).to_have_count(4)
    wide = page.locator(".steps .explained li").evaluate_all(
        "found => found.map((at) => [at.clientWidth, at.scrollWidth])"
    )
    assert all(room == needed for room, needed in wide)
    words = page.locator(".steps h2, .steps h3").evaluate_all("f => f.map((at) => [at.clientWidth, at.scrollWidth])")
    assert all(room == needed for room, needed in words)


# ------------------------------------------------------------------------------------------------------------------ NaN


def broken(rows: bool) -> Session:
    """Layer 0 is whole; in head 1 of layer 1 one query, or one key and with it every weight, is NaN."""
    (q, k), (p, r) = drawn(2, 2, 5)
    (p if rows else r)[0, 1, 2, 0] = float("nan")
    return made(list("abcde"), (q, k), (p, r))


def red(page: Any) -> float:
    """The share of the map's canvas that is of a red."""
    shot = np.asarray(Image.open(io.BytesIO(page.locator(".map-canvas").screenshot())).convert("RGB")).astype(int)
    return float(((shot[..., 0] - shot[..., 1] > 40) & (shot[..., 0] - shot[..., 2] > 40)).mean())


def test_head_of_nan_says_so_in_the_atlas_the_map_the_card_and_the_steps(page, tmp_path):
    ready(page, f"{written(broken(rows=False), tmp_path)}#session=1&layer=1&head=1&token=1")
    expect(page.locator('.cell[data-layer="1"][data-head="1"]')).to_have_class("cell broken")
    expect(page.locator('.cell[data-layer="1"][data-head="1"]')).to_have_text("NaN")
    expect(page.locator(".cell.broken, .cell.unknown")).to_have_count(1)
    expect(page.locator(".readout")).to_contain_text("entropy NaN")
    expect(page.locator(".pane.map .pane-note")).to_have_text("weights are NaN: see regard doctor")
    expect(page.locator(".map-legend")).to_have_text("NaNexact")
    expect(page.locator(".card [role=alert]")).to_contain_text("Weights are NaN, all of this head: regard doctor")
    expect(page.locator(".card .tag")).to_have_text("NaN")
    assert page.locator(".card .sentence:not(.error)").count() == 0
    expect(page.locator(".said-weight")).to_have_text("NaN")
    expect(page.locator(".text-piece.broken")).to_have_count(5)
    expect(page.locator(".steps tbody tr")).to_have_count(5)
    assert page.locator(".steps td.weight .number").all_inner_texts() == ["NaN"] * 5
    assert page.locator(".steps td.weight i").evaluate_all("found => found.map((at) => at.offsetWidth)") == [0] * 5
    expect(page.locator(".steps .explained")).to_contain_text("one NaN among the scores makes every weight")
    assert red(page) > 0.05
    page.locator("[data-choice=lang] [data-value=ko]").click()
    expect(page.locator(".pane.map .pane-note")).to_have_text("가중치가 NaN입니다: regard doctor로 확인하세요")
    expect(page.locator(".card [role=alert]")).to_contain_text("가중치가 모두 NaN입니다")


def test_rows_of_nan_are_crossed_and_the_others_keep_their_colours(page, tmp_path):
    found = broken(rows=True)
    with serving([found]) as address:
        ready(page, f"{address}#session=1&layer=1&head=1&token=1")
        expect(page.locator(".card [role=alert]")).to_contain_text("Some weights of this head are NaN")
        expect(page.locator(".map-nan")).to_have_text("NaN")
        expect(page.locator(".map-high")).not_to_have_text("1.0000")
        expect(page.locator(".text-piece.broken")).to_have_count(0)
        assert 0.01 < red(page) < 0.15
        page.locator('.text-piece[data-index="2"]').hover()
        expect(page.locator(".text-piece.broken")).to_have_count(5)
        expect(page.locator('.said-weight[data-query="2"]')).to_have_text("NaN")
        ready(page, f"{address}#session=1&layer=0&head=0")
        expect(page.locator(".map-nan, .card [role=alert]")).to_have_count(0)


def test_model_of_nan_from_the_first_layer_on_says_so_in_every_head(page, tmp_path):
    parts = [(q * float("nan"), k) for q, k in drawn(2, 3, 4)]
    ready(page, written(made(list("abcd"), *parts), tmp_path))
    expect(page.locator(".cell.broken")).to_have_count(6)
    expect(page.locator(".legend .ramp-numbers")).to_have_text("NaN in every head")


@pytest.mark.parametrize(
    ("keys", "broken"),
    [
        ((3000, 3000), [["entropy", "own"], []]),  # asked for, so it was measured in both
        ((3000, 30), [[], []]),  # it may be that the little one alone was measured
        ((30, 3000), [["entropy", "own"], []]),
    ],
)
def test_number_that_was_not_measured_is_told_from_nan(page, site, keys, broken):
    """Layer 0 has NaN in everything; layer 1 has an entropy, and a kind of attention that "own" does not fit."""
    ready(page, site)
    found = page.evaluate(
        """async (keys) => {
          const { headsOf } = await import("/page/atlas/heads.js");
          const measure = (...numbers) => ({ shape: [2, 1], data: Float32Array.from(numbers) });
          const layers = keys.map((n) => ({ heads: 1, queries: n, keys: n, rows: true }));
          const measures = { entropy: measure(NaN, 1.5), own: measure(NaN, NaN) };
          return headsOf({ layers, measures, labels_of_heads: [] }).map(({ broken }) => [...broken].sort());
        }""",
        keys,
    )
    assert found == broken


def test_weights_that_an_exported_page_does_not_hold_are_not_called_nan(page, tmp_path, monkeypatch):
    from regard.explorer import export

    monkeypatch.setattr(export, "ROOM", 13_000)
    monkeypatch.setattr(export, "SHORT", 8)
    n = 83
    found = made([f"w{i}" for i in range(n)], *drawn(1, 1, n))
    ready(page, f"{written(found, tmp_path)}#session=1&token=5")
    expect(page.locator(".said-how")).to_have_text("strongest only")
    page.locator('.text-piece[data-index="5"]').click()
    weights = page.locator(".text-piece").evaluate_all("found => found.map((at) => at.dataset.weight)")
    assert sum(weight != "" for weight in weights) == 12
    page.locator(f'.text-piece[data-index="{weights.index("")}"]').hover()
    expect(page.locator(f'.said-weight[data-key="{weights.index("")}"]')).to_have_text("–")
    expect(page.locator(".text-piece.broken, .map-nan")).to_have_count(0)


# ---------------------------------------------------------------------------------------------------------------- steps


def steps(page: Any, address: str) -> tuple[str, str, list[str]]:
    """What the steps say of the second step and of the pair, and the heads of their columns."""
    ready(page, f"{address}#session=1&token=3&key=1")
    expect(page.locator(".steps .sum")).to_be_visible()
    second, pair = page.locator(".steps .explained li").nth(1).inner_text(), page.locator(".steps .sum").inner_text()
    return second, pair, page.locator(".steps thead th").all_inner_texts()


def numbers(q: Tensor, k: Tensor, scale: float, bias: float = 0.0) -> tuple[str, str, str]:
    """q·k of query 3 and key 1, that times the scale, and with the bias, in two digits after the point."""
    dot = float(q[0, 0, 3].double() @ k[0, 0, 1].double())
    return tuple(f"{value:.2f}".replace("-", "−") for value in (dot, dot * scale, dot * scale + bias))


def number(shown: str) -> float:
    return float(shown.replace("−", "-"))


def test_steps_of_a_model_that_does_not_scale_and_adds_a_bias_say_so(page, tmp_path):
    q, k = drawn(1, 1, 5, seed=11)[0]
    bias = torch.linspace(-1, 1, 25).reshape(5, 5)
    found = made(list("abcde"), (q, k), scale=1.0, bias=bias)
    second, pair, columns = steps(page, written(found, tmp_path))
    dot, _, score = numbers(q, k, 1.0, float(bias[3, 1]))
    assert second == f"This model does not divide by √{SIZE}: its scale is 1."
    assert f"q·k = {dot}; score with what the model adds: {score}; weight " in pair
    assert columns == ["key", "q·k", "× 1", "score", "softmax"]


def test_steps_of_a_model_with_another_scale_name_it(page, tmp_path):
    q, k = drawn(1, 1, 5, seed=12)[0]
    second, pair, columns = steps(page, written(made(list("abcde"), (q, k), scale=0.625), tmp_path))
    dot, scaled, _ = numbers(q, k, 0.625)
    assert second == "Multiplied by this model's scale, 0.625."
    assert f"q·k = {dot}; times 0.625: {scaled}; weight " in pair
    assert columns == ["key", "q·k", "× 0.625", "softmax"]


def test_steps_of_a_model_that_divides_say_so_as_before(page, tmp_path):
    q, k = drawn(1, 1, 5, seed=13)[0]
    second, pair, columns = steps(page, written(made(list("abcde"), (q, k)), tmp_path))
    dot, scaled, _ = numbers(q, k, SIZE**-0.5)
    assert second.startswith(f"Divided by √{SIZE} = ")
    assert f"q·k = {dot}; divided: {scaled}; weight " in pair
    assert columns == ["key", "q·k", "÷ √d", "softmax"]


def test_score_of_a_key_that_is_masked_by_a_huge_number_is_short(page, tmp_path):
    q, k = drawn(1, 1, 5, seed=14)[0]
    bias = torch.zeros(5, 5)
    bias[3, 4] = torch.finfo(torch.float32).min
    with serving([made(list("abcde"), (q, k), bias=bias)]) as address:
        steps(page, address)
        expect(page.locator('.steps tr[data-key="4"] td').nth(2)).to_have_text("−3e+38")


@pytest.mark.parametrize(
    ("where", "mask", "seen"),
    [
        ("served", regard.masks.causal(), [0, 1]),
        ("exported", regard.masks.causal(), [0, 1]),
        ("served", regard.masks.window(1, 1), [0, 1, 2]),
        ("exported", regard.masks.padding([3]), [0, 1, 2]),
    ],
    ids=["causal", "causal, exported", "window", "padding, exported"],
)
def test_masked_keys_have_no_part_in_the_steps_and_an_asked_one_is_minus_infinity(page, tmp_path, where, mask, seen):
    found, masked = made(list("abcdef"), *drawn(1, 1, 6, seed=21), mask=mask), 6 - len(seen)
    with serving([found]) as served:
        address = served if where == "served" else written(found, tmp_path)
        ready(page, f"{address}#session=1&token=1&key=0")
        rows = page.locator(".steps tbody tr")
        expect(rows).to_have_count(len(seen))
        assert sorted(int(key) for key in rows.evaluate_all("rows => rows.map((row) => row.dataset.key)")) == seen
        expect(page.locator(".steps caption")).to_contain_text(f"{masked} masked")
        expect(page.locator(".steps .explained li").nth(2)).to_contain_text(f"{masked} keys are masked")
        weights = [number(text) for text in page.locator(".steps .weight .number").all_inner_texts()]
        assert abs(sum(weights) - 1) < 0.01 * len(seen)
        ready(page, f"{address}#session=1&token=1&key=5")
        asked = page.locator('.steps tr[data-key="5"] td')
        expect(asked).to_have_count(4)
        assert page.locator(".steps thead th").all_inner_texts() == ["key", "q·k", "÷ √d", "masked", "softmax"]
        assert asked.nth(2).inner_text() == "−∞"
        assert asked.nth(3).inner_text().strip() == "0"
        expect(page.locator(".steps .sum")).to_contain_text("masked, so the score is −∞; weight 0")
        page.locator("[data-choice=lang] [data-value=ko]").click()
        expect(page.locator(".steps caption")).to_contain_text(f"가려진 키 {masked}개")
        expect(page.locator(".steps .sum")).to_contain_text("마스크에 가려져 점수는 −∞")


def test_query_that_sees_nothing_is_said_to(page, tmp_path):
    hidden = torch.ones(5, 5, dtype=torch.bool)
    hidden[2] = False
    found = made(list("abcde"), *drawn(1, 1, 5, seed=22), mask=regard.masks.dense(hidden))
    ready(page, f"{written(found, tmp_path)}#session=1&token=2&key=1")
    expect(page.locator(".steps .explained li").nth(2)).to_contain_text("Every key is masked")


# -------------------------------------------------------------------------------------------------- what is under way


@contextmanager
def held_back(page: Any, *questions: str) -> Iterator[list[Any]]:
    """Requests that the server gets only afterwards."""
    waiting: list[Any] = []
    for question in questions:
        page.route(f"**/{question}?*", lambda route: waiting.append(route))
    yield waiting
    for route in waiting:
        route.continue_()
    for question in questions:
        page.unroute(f"**/{question}?*")


def test_steps_that_are_under_way_are_said_to_be(page, site):
    ready(page, f"{site}#session=1&layer=2&head=1")
    page.goto("about:blank")
    with held_back(page, "steps") as waiting:
        page.goto(f"{site}#session=1&layer=2&head=1&token=5")
        until(page, lambda: bool(waiting))
        expect(page.locator(".steps")).to_contain_text("Computing the steps")
        assert "Choose a token" not in page.locator(".steps").inner_text()
    expect(page.locator(".steps h2")).to_contain_text(WORDS[5])
    with held_back(page, "steps") as waiting:
        page.keyboard.press("j")
        until(page, lambda: bool(waiting))
        expect(page.locator(".steps")).to_have_attribute("aria-busy", "true")
    expect(page.locator(".steps h2")).to_contain_text(WORDS[6])
    assert page.locator(".steps").get_attribute("aria-busy") is None


def test_effective_keys_say_which_they_are(page, session, site):
    ready(page, f"{site}#session=1&layer=2&head=1&token=5")
    expect(page.locator(".card .numbers")).to_contain_text("effective keys (1/Σw²)")
    expect(page.locator(".card .sentence")).to_contain_text("effective keys (1/Σw²)")
    shown = number(page.locator(".card .numbers div").nth(1).locator("dd").inner_text())
    weights = session.layers[2].view.tile(range(len(WORDS)), range(len(WORDS)))[0, 1].double()
    assert abs(shown - float((1 / weights.square().sum(-1)).mean())) < 0.05
    page.locator("[data-choice=lang] [data-value=ko]").click()
    expect(page.locator(".card .numbers")).to_contain_text("유효 키 수(1/Σw²)")
