"""The atlas: pictures of all heads, rows of a word in all of them, one link in all of them, and its search."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from browsing import PLAYWRIGHT, ready, serving, until
from page_parts import node, ran
from seeing_twins import picture
from shown_twins import registers, windows
from speaking_twins import bert
from torch import Tensor
from unpacking import unlevelled, unpacked

from regard.explorer import answers, export
from regard.explorer.export import page_data, write_html
from regard.session.session import Session, look_at, look_at_image

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
TEXT = "The animal did not cross the street because it was too tired."


# ----------------------------------------------------------------------------------------------------------- pure parts


PATTERNS = ["first", "own", "previous", "next", "neighbours", "uniform", "delimiter", "same token", "induction"]


SENTENCES = {
    "heads that look at the previous word": "previous",
    "which heads look at the word before?": "previous",
    "이전 단어를 보는 헤드": "previous",
    "바로 앞 토큰에 주목하는 헤드": "previous",
    "heads that look at the next token": "next",
    "다음 단어를 보는 헤드": "next",
    "heads that rest on the sink": "first",
    "첫 토큰을 보는 헤드": "first",
    "heads that attend to punctuation": "delimiter",
    "마침표를 보는 헤드": "delimiter",
    "heads that look at the same word before": "same token",
    "같은 단어를 보는 헤드": "same token",
    "what came after the same word": "induction",
    "인덕션 헤드": "induction",
    "heads looking everywhere": "uniform",
    "고르게 보는 헤드": "uniform",
    "words around it": "neighbours",
    "주변 단어": "neighbours",
    "tokens that look at themselves": "own",
    "자기 자신을 보는 헤드": "own",
    "heads that do not look at the previous word": None,
    "interesting heads": None,
}


@node
def test_sentence_asks_for_the_pattern_that_it_tells_of():
    meant = ran("atlas/search.js", f"{json.dumps(list(SENTENCES))}.map((one) => page.meantPattern(one, {PATTERNS}))")
    assert dict(zip(SENTENCES, meant, strict=True)) == SENTENCES


SEARCHES = {
    "L3 H1": ["3.1"],
    "l3h1": ["3.1"],
    "3.1": ["3.1"],
    "3.10": ["3.10"],
    "layer 3, head 1": ["3.1"],
    "레이어 3, 헤드 1": ["3.1"],
    "L3": ["3.1", "3.10"],
    "L3 and induction > 0.4": ["3.10"],
    "induction > 0.4": ["3.10", "4.0"],
    "induction > 0.4 and not L4": ["3.10"],
    "인덕션 > 0.4": ["3.10", "4.0"],
    "previous": ["4.0"],
    "이전 단어": ["4.0"],
    "heads that look at the next word": ["3.1"],
    "layer = 4": ["4.0"],
}


@node
def test_search_finds_heads_by_place_number_pattern_and_sentence():
    heads = [
        {"numbers": {"layer": 3, "head": 1, "induction": 0.1}, "label": "first", "rest": "next"},
        {"numbers": {"layer": 3, "head": 10, "induction": 0.5}, "label": None, "rest": None},
        {"numbers": {"layer": 4, "head": 0, "induction": 0.6}, "label": "previous", "rest": None},
    ]
    names = json.dumps({"numbers": ["induction", "previous", "layer", "head"], "patterns": PATTERNS})
    found = f"{json.dumps(heads)}.filter(page.readSearch(text, {names}))"
    places = f"{found}.map(({{ numbers }}) => `${{numbers.layer}}.${{numbers.head}}`)"
    answered = ran("atlas/search.js", f"{json.dumps(list(SEARCHES))}.map((text) => {places})")
    assert dict(zip(SEARCHES, answered, strict=True)) == SEARCHES


@node
@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"name": "induction", "sign": ">", "value": 0.9}, (1, 0.6)),
        ({"name": "induction", "sign": "<=", "value": 0}, (0, 0.1)),
        ({"pattern": "induction"}, (1, 0.6)),
        ({"layer": 9, "head": None}, None),
        ({"name": "layer", "sign": ">", "value": 9}, None),
        ({"name": "unmeasured", "sign": ">", "value": 0}, None),
    ],
)
def test_search_without_result_names_the_head_that_comes_closest(part, place):
    heads = "[0.1, 0.6, NaN].map((induction, head) => ({layer: 0, head, numbers: {induction, layer: 0, head}}))"
    best = ran("atlas/heads.js", f"page.closest({heads}, {json.dumps(part)})")
    assert (best and (best["head"]["head"], best["value"])) == place


# -------------------------------------------------------------------------------------- what an exported file computes


def assert_same_levels(ours: dict[str, Any], theirs: Any) -> None:
    """Equal to a level: the page's sums are in another order."""
    scale = unpacked(theirs["scale"])
    assert ours["shape"] == theirs["shape"]
    torch.testing.assert_close(torch.tensor(ours["scale"]), scale, rtol=1e-4, atol=1e-9)
    values = torch.tensor(ours["data"], dtype=torch.float32).view(theirs["shape"])
    steps = scale.view(-1, *[1] * (values.ndim - 1))
    assert bool(((values * steps - unlevelled(theirs)).abs() <= 1.01 * steps).all())


def carried(session: Session, what: str) -> Any:
    return ran("source/embedded.js", f"await new page.EmbeddedSource({json.dumps(page_data(session))}).{what}")


@node
@pytest.mark.parametrize("make", [bert, registers, windows], ids=["text", "image", "image in windows"])
def test_exported_file_answers_for_all_heads_as_the_server_does(make, tmp_path):
    checkpoint = bert(tmp_path, "Model") if make is bert else make(tmp_path)
    session = look_at(TEXT, checkpoint) if make is bert else look_at_image(picture(), checkpoint)
    rows, want = carried(session, 'rowsOfToken("1", 9, 0, 8)'), answers.rows_of_token(session, 9, 0, 8)
    for ours, theirs in zip(rows["layers"], want["layers"], strict=True):
        assert [ours[name] for name in ("token", "cols", "how")] == [theirs[name] for name in ("token", "cols", "how")]
        assert_same_levels(ours["levels"], theirs["levels"])
        assert len(ours["images"]) == len(theirs["images"]) == (0 if make is bert else 1)
        for one, other in zip(ours["images"], theirs["images"], strict=True):
            assert_same_levels(one, other)
        if theirs["other"] is not None:
            other = torch.tensor(ours["other"]["data"], dtype=torch.float32)
            torch.testing.assert_close(other, unpacked(theirs["other"]), rtol=0, atol=1e-5)
    link = carried(session, 'linkInHeads("1", 9, 2, 0)')
    weights = [float("nan") if weight is None else weight for weight in link["weights"]["data"]]
    expected = unpacked(answers.link_in_heads(session, 9, 2, 0)["weights"])
    torch.testing.assert_close(torch.tensor(weights).view_as(expected), expected, rtol=0, atol=1e-5, equal_nan=True)
    maps = carried(session, 'thumbnails("1")')["layers"]
    assert [one["cols"] for one in maps] == [one["cols"] for one in answers.thumbnails(session)["layers"]]


# ---------------------------------------------------------------------------------------------------------- the browser


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), "Model")


@pytest.fixture(scope="module")
def session(checkpoint: Path) -> Session:
    return look_at(TEXT, checkpoint)


@pytest.fixture(scope="module")
def eager(checkpoint: Path, session: Session) -> Tensor:
    """The weights of the same checkpoint in transformers, (layers, H, N, N)."""
    model = transformers.AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    ids = session.model.tokenizer.batch([TEXT]).input_ids
    with torch.no_grad():
        return torch.cat(model(ids, output_attentions=True).attentions)


@pytest.fixture(scope="module")
def site(session: Session) -> Iterator[str]:
    with serving([session]) as address:
        yield address


INKS = """([layer, head, rows, cols, image]) => {
  const canvas = document.querySelector(".atlas-pictures");
  const cell = document.querySelector(`.cell[data-layer="${layer}"][data-head="${head}"]`).getBoundingClientRect();
  const strip = parseFloat(getComputedStyle(document.querySelector(".atlas-grid")).getPropertyValue("--strip"));
  const box = canvas.getBoundingClientRect(), ratio = canvas.width / box.width;
  const room = [cell.width - 2, cell.height - strip - 3], each = [room[0] / cols, room[1] / rows];
  const [wide, high] = image ? [Math.min(...each), Math.min(...each)] : each;  // an image keeps its shape
  const [left, top] = [(room[0] - cols * wide) / 2, (room[1] - rows * high) / 2];
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  return Array.from({ length: rows }, (_, i) => Array.from({ length: cols }, (_, j) => {
    const [x, y] = [cell.x - box.x + 1 + left + (j + 0.5) * wide, cell.y - box.y + 1 + top + (i + 0.5) * high];
    const [r, g, b, a] = pen.getImageData(Math.floor(x * ratio), Math.floor(y * ratio), 1, 1).data;
    return a ? 255 * 3 - r - g - b : -1;
  }));
}"""


def inks(page: Any, layer: int, head: int, rows: int, cols: int, image: bool = False) -> Tensor:
    """How dark each cell of a head's picture is drawn; −1 where nothing is."""
    return torch.tensor(page.evaluate(INKS, [layer, head, rows, cols, image]))


def showing(page: Any, token: str) -> None:
    """Wait until the pictures are rows of this token; "" for maps."""
    expect(page.locator(".pictured .atlas-pictures")).to_have_attribute("data-token", token)


def test_picture_of_every_head_is_darkest_where_eager_weights_are_largest(page, site, eager):
    page.set_viewport_size({"width": 1800, "height": 1400})
    ready(page, f"{site}/#cells=thumbnails&drawer=0")
    showing(page, "")
    n = eager.shape[-1]
    assert n <= 24
    for layer, head in [(layer, head) for layer in range(eager.shape[0]) for head in range(eager.shape[1])]:
        drawn, weights = inks(page, layer, head, n, n), eager[layer, head]
        assert int(drawn.min()) >= 0
        assert float(weights.flatten()[drawn.argmax()]) >= float(weights.max()) * 254 / 255, (layer, head)
        order = weights.flatten().argsort()
        assert int(drawn.flatten()[order[0]]) < int(drawn.flatten()[order[-1]])


def test_pointing_at_a_word_shows_its_row_in_every_head_and_a_click_keeps_it(page, site, eager):
    ready(page, f"{site}/#cells=thumbnails&drawer=0")
    showing(page, "")
    n, heads = eager.shape[-1], [(layer, head) for layer in range(eager.shape[0]) for head in range(eager.shape[1])]
    before = {place: inks(page, *place, n, n) for place in heads}
    page.locator(".text-piece[data-index='5']").hover()
    showing(page, "5")
    for layer, head in heads:
        drawn = inks(page, layer, head, 1, n)[0]
        row = eager[layer, head, 5]
        assert float(row[int(drawn.argmax())]) >= float(row.max()) * 254 / 255
        assert not torch.equal(inks(page, layer, head, n, n), before[layer, head])
    expect(page.locator(".atlas-caption")).to_contain_text(page.locator(".text-piece[data-index='5']").inner_text())
    page.mouse.move(2, 2)
    showing(page, "")
    page.locator(".text-piece[data-index='7']").click()
    page.mouse.move(2, 2)
    showing(page, "7")
    page.locator(".text-piece[data-index='9']").hover()  # the key, while a query is held
    showing(page, "7")
    page.locator(".atlas-caption button").click()
    showing(page, "")


def test_other_session_brings_its_own_pictures(page, session, checkpoint):
    short = look_at("the cat and the dog", checkpoint)
    with serving([short, session]) as address:
        ready(page, f"{address}/#session=2&cells=thumbnails&drawer=0")
        showing(page, "")
        before = inks(page, 0, 0, 7, 7)
        page.locator("[data-role=session]").select_option("1")
        expect(page.locator(".text-piece")).to_have_count(len(short.tokens))
        showing(page, "")
        until(page, lambda: not torch.equal(inks(page, 0, 0, 7, 7), before))
        drawn, weights = inks(page, 0, 0, len(short.tokens), len(short.tokens)), short.layers[0].view.map()[0, 0]
        assert float(weights.flatten()[drawn.argmax()]) >= float(weights.max()) * 254 / 255


def test_pointing_at_the_map_shows_the_row_of_the_query_there(page, site, eager):
    ready(page, f"{site}/#cells=thumbnails&drawer=0")
    canvas = page.locator(".map-canvas")
    box = canvas.bounding_box()
    canvas.hover(position={"x": 0.6 * box["width"], "y": 0.5 * box["height"]})
    query = page.locator(".tip-query .tip-place").inner_text()
    showing(page, query)


def test_chosen_link_colours_the_cells_by_its_weight_in_every_head(page, site, eager):
    ready(page, f"{site}/#token=5&key=2&drawer=0")
    expect(page.locator("[data-role=measure]")).to_have_value("link")
    for layer in range(eager.shape[0]):
        for head in range(eager.shape[1]):
            cell = page.locator(f'.cell[data-layer="{layer}"][data-head="{head}"]')
            shown = float(cell.get_attribute("title").partition("link weight ")[2].split(" ")[0].replace("−", "-"))
            assert shown == pytest.approx(float(eager[layer, head, 5, 2]), abs=5e-3)
    page.locator("[data-role=measure]").select_option("entropy")
    expect(page.locator(".cell").first).to_have_attribute("title", re.compile("entropy"))


def test_search_without_result_says_the_highest_value_and_where(page, site, session):
    ready(page, site)
    page.locator("[data-role=search]").fill("previous > 0.99")
    scores = torch.stack([numbers.patterns["previous"] for numbers in session.numbers])
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    expect(page.locator(".found")).to_contain_text(f"{float(scores.max()):.2f} in L{layer} H{head}")
    assert page.locator(".cell:not(.dim)").count() == 0
    page.locator(".found button").click()
    expect(page.locator(f'.cell[data-layer="{layer}"][data-head="{head}"]')).to_have_attribute("aria-selected", "true")
    page.locator("[data-role=search]").fill("L1 H2")
    expect(page.locator(".cell:not(.dim)")).to_have_count(1)
    page.locator("[data-role=search]").press("Enter")
    expect(page.locator('.cell[data-layer="1"][data-head="2"]')).to_have_attribute("aria-selected", "true")
    page.locator("[data-role=search]").fill("L77 H1")
    expect(page.locator(".found")).to_contain_text("L77 H1")


def test_list_is_best_first_with_the_chosen_head_on_top(page, site, session):
    ready(page, f"{site}/#view=list&measure=previous&layer=0&head=1")
    scores = torch.stack([numbers.patterns["previous"] for numbers in session.numbers])
    order = [divmod(int(at), scores.shape[1]) for at in scores.flatten().argsort(descending=True, stable=True)]
    expect(page.locator(".atlas-line .place").first).to_have_text("L{} H{}".format(*order[0]))
    expect(page.locator(".pinned-line .place")).to_have_text("L0 H1")
    page.locator(".atlas-line").first.click()
    expect(page.locator(".pinned-line .place")).to_have_text("L{} H{}".format(*order[0]))


def test_cells_are_reached_by_keys_and_show_colours_on_demand(page, site):
    ready(page, f"{site}/#cells=thumbnails&layer=0&head=0")
    cell = page.locator('.cell[data-layer="0"][data-head="0"]')
    cell.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator('.cell[data-layer="0"][data-head="1"]')).to_be_focused()
    choice = page.locator("[data-choice=cells]")
    choice.locator("[data-value=thumbnails]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".pictured")).to_have_count(0)
    expect(choice.locator("[data-value=colour]")).to_be_focused()
    until(page, lambda: "cells=colour" in page.url)
    count = "all => new Set(all.map((at) => getComputedStyle(at).backgroundColor)).size"
    assert page.locator(".cell").evaluate_all(count) > 1


def test_exported_file_shows_rows_where_it_carries_them_and_says_where_not(page, session, tmp_path, monkeypatch):
    write_html(session, tmp_path / "whole.html")
    ready(page, f"file://{tmp_path}/whole.html#cells=thumbnails")
    page.locator(".text-piece[data-index='5']").hover()
    showing(page, "5")
    monkeypatch.setattr(export, "SHORT", 1)
    monkeypatch.setattr(export, "ROOM", 2 * len(session.tokens) ** 2)
    write_html(session, tmp_path / "part.html")
    ready(page, f"file://{tmp_path}/part.html#cells=thumbnails")
    page.locator(".text-piece[data-index='5']").hover()
    expect(page.locator(".atlas-caption")).to_contain_text("regard serve")
    showing(page, "")


def test_patch_under_the_pointer_is_shown_in_every_head(page, tmp_path):
    seen = look_at_image(picture(), registers(tmp_path))
    with serving([seen]) as address:
        page.goto(f"{address}/#cells=thumbnails&drawer=0")
        expect(page.locator(".image-canvas")).to_be_visible()
        showing(page, "")
        box = page.locator(".image-canvas").bounding_box()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"], steps=3)
        expect(page.locator(".atlas-caption .atlas-token")).to_be_visible()
        token = int(page.locator(".atlas-pictures").get_attribute("data-token"))
        want = answers.rows_of_token(seen, token)["layers"][1]["images"][0]
        _, rows, cols = want["shape"]
        values = unlevelled(want)[0].flatten()
        drawn = inks(page, 1, 0, rows, cols, True).flatten()
        assert float(values[int(drawn.argmax())]) >= float(values.max()) * 254 / 255
        assert int(drawn[int(values.argmin())]) < int(drawn.max())
