"""Images in the explorer's page, in a real browser: what is shown of a patch, against the lens' own rows."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import BEARER, PLAYWRIGHT, serving, until
from PIL import Image
from seeing_twins import blip, llava, picture
from shown_twins import registers, windows
from speaking_twins import bert

import regard
from regard.cli import main
from regard.explorer import export
from regard.explorer.export import write_html
from regard.explorer.jobs import ModelShelf
from regard.explorer.widget import answer, module
from regard.layouts import Frame, Sides
from regard.models.loading import load
from regard.session.session import Session, look_at_image, open_file

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
ROWS, COLUMNS, BEFORE = 5, 7, 3  # patches; cls and two registers before them


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    return registers(tmp_path_factory.mktemp("registers"))


@pytest.fixture(scope="module")
def session(seeing: Path) -> Session:
    return look_at_image(picture(), seeing)


@pytest.fixture(scope="module")
def site(session: Session) -> Iterator[str]:
    with serving([session]) as address:
        yield address


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Session:
    return look_at_image(picture(), windows(tmp_path_factory.mktemp("windows")))


# -------------------------------------------------------------------------------------------------------------- reading


def ready(page: Any, address: str) -> Any:
    """The page at an address, once its panes are drawn."""
    page.goto(address)
    expect(page.locator("#regard[data-state=ready]")).to_be_visible()
    expect(page.locator(".image-canvas[data-plot]")).to_be_visible()
    expect(page.locator(".image-share").first).to_be_visible()
    return page


def over(page: Any, y: float, x: float) -> tuple[float, float]:
    """Where a place of the picture, in fractions of its sides, is on the screen, once it stays there."""
    before, now = None, picture_place(page)
    while now != before:  # on a busy machine a pane is laid out after what it shows was drawn
        page.wait_for_timeout(100)
        before, now = now, picture_place(page)
    left, top, width, height = now
    return left + x * width, top + y * height


def picture_place(page: Any) -> list[float]:
    """Left, top, width and height of the picture on the screen, all read at the same moment."""
    return page.locator(".image-canvas").evaluate(
        """canvas => {
            const box = canvas.getBoundingClientRect();
            const [left, top, width, height] = canvas.dataset.plot.split(" ").map(Number);
            return [box.x + left, box.y + top, width, height];
        }"""
    )


def middle(session: Session, layer: int, token: int) -> tuple[float, float]:
    """The middle of a patch, in fractions of the picture's sides."""
    sides = session.layers[layer].sides
    box = sides.frames[0].boxes(sides.keys.box.reshape(-1, 4)[token])
    high, wide = sides.frames[0].image_size
    return (box[0] + box[2]) / 2 / high, (box[1] + box[3]) / 2 / wide


def said(page: Any, query: int, key: int | None = None) -> tuple[str, float]:
    """What is read out for a query, once it is: the weight in its digits, and as a number."""
    which = f'[data-query="{query}"]' + ("" if key is None else f'[data-key="{key}"]')
    found = page.locator(f".said-weight{which}")
    expect(found).to_be_visible()
    return found.inner_text(), float(found.get_attribute("data-weight"))


def shares(page: Any) -> dict[str, float]:
    found = page.locator(".image-share")
    return {
        one.get_attribute("data-kind"): float(one.get_attribute("data-share"))
        for one in (found.nth(n) for n in range(found.count()))
    }


def colour(page: Any, y: float, x: float) -> np.ndarray:
    """Red, green and blue on the screen at a place of the picture."""
    left, top = over(page, y, x)
    shot = page.screenshot(clip={"x": int(left), "y": int(top), "width": 1, "height": 1})
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))[0, 0].astype(int)


# ----------------------------------------------------------------------------------------------------- the first moment


def stands_out(session: Session, layer: int, token: int) -> int:
    """The head in which a patch gets most of a token beyond what it gets from all of them on the mean."""
    weights = session.layers[layer].view.tile(slice(None), slice(None))[0]  # (H, N, N)
    beyond = (weights - weights.mean(1, keepdim=True))[:, token, BEFORE:].clone()
    if token >= BEFORE:
        beyond[:, token - BEFORE] = 0
    return int(beyond.amax(-1).argmax())


def test_row_of_cls_is_shown_on_the_image(page, site, session):
    head = stands_out(session, 2, 0)
    ready(page, f"{site}#layer=2&head={head}&token=0")
    row = session.capture[2].row(0)[0, head]
    shown, exact = said(page, 0, int(row.argmax()))
    assert abs(exact - float(row.max())) < 1e-6
    assert abs(float(shown) - float(row.max())) <= 5e-5 + 1e-6
    assert page.locator(".image-chips .text-piece").all_inner_texts() == ["cls", "register 0", "register 1"]
    expect(page.locator(".image-note")).to_contain_text("5 × 7 patches")
    expect(page.locator(".facts")).to_contain_text("37 × 53 pixels (h × w)")
    overlay = session.capture[2].overlay(token="cls", head=head)
    assert shares(page) == pytest.approx(overlay.shares, abs=1e-6)


def test_page_fits_the_window(page, site):
    for width, height in ((1280, 800), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        ready(page, site)
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert size == [width, height]


# ---------------------------------------------------------------------------------------------------- patches and hands


@pytest.mark.parametrize(("layer", "head", "token"), [(0, 0, BEFORE), (1, 4, BEFORE + 17), (2, 3, BEFORE + 34)])
def test_patch_that_is_pointed_at_shows_its_exact_row(page, site, session, layer, head, token):
    ready(page, f"{site}/#session=1&layer={layer}&head={head}&token=0")
    row = session.capture[layer].row(token)[0, head]
    page.mouse.move(*over(page, *middle(session, layer, token)))
    shown, exact = said(page, token, int(row.argmax()))
    assert abs(exact - float(row.max())) < 1e-6
    assert abs(float(shown.replace("−", "-")) - float(row.max())) <= 5e-5 + 1e-6
    assert f"({(token - BEFORE) // COLUMNS}, {(token - BEFORE) % COLUMNS})" in page.locator(".said-query").inner_text()
    page.locator('.text-piece[data-index="1"]').scroll_into_view_if_needed()
    for index in (0, 1, 2):
        weight = float(page.locator(f'.text-piece[data-index="{index}"]').get_attribute("data-weight"))
        assert abs(weight - float(row[index])) < 1e-6


@pytest.mark.parametrize(("height", "width"), [(3000, 15), (20, 2000)])
def test_patches_of_an_image_that_is_a_mere_line_can_be_hit(page, height, width, tmp_path):
    seen = look_at_image(picture(1, height, width), windows(tmp_path / "windows"))
    write_html(seen, tmp_path / "line.html")
    ready(page, (tmp_path / "line.html").as_uri() + "#session=1&layer=0&head=1&token=0")
    sides = list(map(float, page.locator(".image-canvas").get_attribute("data-plot").split()))[2:]
    assert min(sides) >= 29  # as in the figures: 0.3 inches
    for row, column in ((0, 0), (3, 5), (5, 9)):  # of 4 × 4 pixels of 27 × 41
        page.mouse.move(*over(page, (4 * row + 2) / 27, (4 * column + 2) / 41))
        expect(page.locator(".said-query")).to_have_text(f"({row}, {column})")
    expect(page.locator(".facts")).to_contain_text(f"{height} × {width} pixels (h × w)")
    expect(page.locator(".image-note")).to_contain_text("drawn broader than it is")
    page.locator("[data-choice=lang] [data-value=ko]").click()
    expect(page.locator(".facts")).to_contain_text(f"{height} × {width} 픽셀 (세로 × 가로)")
    expect(page.locator(".image-note")).to_contain_text("실제보다 넓게 그렸습니다")


def test_patches_of_nan_are_crossed_and_their_shares_are_nan(page, seeing):
    model = load(seeing)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "1.attention" in name and "bias" in name)[0] = float("nan")
    with serving([look_at_image(picture(), model)]) as address:
        ready(page, f"{address}#session=1&layer=1&head=0&token=0")
        expect(page.locator(".said-weight")).to_have_text("NaN")
        assert page.locator(".image-share b").all_inner_texts() == ["NaN"] * 3
        expect(page.locator(".image-legend")).to_have_count(0)
        shot = Image.open(io.BytesIO(page.locator(".image-canvas").screenshot())).convert("RGB")
        red = np.asarray(shot).astype(int)
        assert ((red[..., 0] - red[..., 1] > 25) & (red[..., 0] - red[..., 2] > 25)).mean() > 0.05
        ready(page, f"{address}#session=1&layer=0&head=0&token=0")
        expect(page.locator(".image-legend")).to_be_visible()


def test_patches_beyond_the_photograph_have_a_share_of_their_own(page):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 7, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer, keep="qk") as seen:
        layer(torch.randn(1, 17, 6))
    seen.layouts = Sides.patches(Frame.whole(6, 12).cropped(-3, 0, 12, 12), patch=3)  # a row above, one below
    with serving([Session("toy", seen, ())]) as address:
        ready(page, f"{address}#session=1&layer=0&head=1&token=0")
        expected = seen[0].overlay(token="cls", head=1).shares
        assert set(expected) == {"cls", "patch", "beyond the image"}
        assert shares(page) == pytest.approx(expected, abs=1e-6)
        outside = page.locator('.image-share[data-kind="beyond the image"]')
        expect(outside).to_contain_text("beyond the image 0.")
        page.locator("[data-choice=lang] [data-value=ko]").click()
        expect(outside).to_contain_text("이미지 밖 0.")


def test_image_of_an_ordinary_shape_keeps_it(page, site):
    ready(page, site)
    wide, high = list(map(float, page.locator(".image-canvas").get_attribute("data-plot").split()))[2:]
    assert abs(wide / high - 53 / 37) < 0.01
    assert "drawn" not in page.locator(".image-note").inner_text()


def test_held_patch_reads_single_weights_until_it_is_let_go(page, site, session):
    ready(page, f"{site}/#session=1&layer=1&head=2&token=0")
    row = session.capture[1].row(BEFORE + 8)[0, 2]
    page.mouse.click(*over(page, *middle(session, 1, BEFORE + 8)))
    expect(page.locator(".said-hint")).to_contain_text("held")
    for key in (BEFORE, BEFORE + 20, BEFORE + 34):
        page.mouse.move(*over(page, *middle(session, 1, key)))
        assert abs(said(page, BEFORE + 8, key)[1] - float(row[key])) < 1e-6
    page.locator('.text-piece[data-index="2"]').hover()
    assert abs(said(page, BEFORE + 8, 2)[1] - float(row[2])) < 1e-6
    page.mouse.click(*over(page, *middle(session, 1, BEFORE + 8)))
    expect(page.locator(".said-hint")).to_have_text("click to hold")


def test_register_that_is_held_is_read_over_the_image(page, site, session):
    ready(page, f"{site}/#session=1&layer=2&head=1&token=0")
    page.locator('.text-piece[data-index="1"]').click()
    row = session.capture[2].row(1)[0, 1]
    for key in (BEFORE + 3, BEFORE + 30):
        page.mouse.move(*over(page, *middle(session, 2, key)))
        assert abs(said(page, 1, key)[1] - float(row[key])) < 1e-6


def test_arrow_keys_walk_from_patch_to_patch_and_j_and_k_through_all_tokens(page, site):
    ready(page, f"{site}/#session=1&layer=1&head=2&token={BEFORE + 8}")
    page.locator(".image-canvas").focus()
    for key, token in (
        ("ArrowRight", 9),
        ("ArrowDown", 16),
        ("ArrowLeft", 15),
        ("ArrowUp", 8),
        ("ArrowUp", 1),
        ("ArrowUp", 1),
    ):
        page.keyboard.press(key)
        said(page, BEFORE + token)
    expect(page.locator('.cell[data-layer="1"][data-head="2"]')).to_have_attribute("aria-selected", "true")
    page.keyboard.press("k")
    said(page, BEFORE)
    page.keyboard.press("k")
    said(page, BEFORE - 1)
    page.keyboard.press("Enter")
    expect(page.locator(".said-hint")).to_contain_text("held")
    page.keyboard.press("ArrowDown")
    said(page, BEFORE - 1, BEFORE + 2 * COLUMNS + 3)  # from no patch to the middle of the picture
    page.keyboard.press("Escape")
    expect(page.locator(".said-hint")).to_have_text("click to hold")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_strongest_patch_has_the_strongest_colour_and_the_weakest_shows_the_photograph(page, site, session, theme):
    ready(page, f"{site}/#session=1&layer=2&head=4&token=0&theme={theme}")
    expect(page.locator(".image-high")).to_be_visible()
    mass = session.capture[2].row(0)[0, 4][BEFORE:]
    far = [203, 250, 240] if theme == "dark" else [24, 32, 82]  # the end of the house's ramp

    def strength() -> np.ndarray:
        return colour(page, *middle(session, 2, BEFORE + int(mass.argmax())))

    until(page, lambda: np.abs(strength() - far).max() <= 0.08 * 255 + 3)  # 92 hundredths of the colour are to be seen
    strong = strength()
    weak = colour(page, *middle(session, 2, BEFORE + int(mass.argmin())))
    assert np.abs(weak - far).max() > np.abs(strong - far).max() + 20


# A pointer that crosses the picture in one breath: a machine that is busy cannot make it rest on its way.
CROSS = """(canvas, [from, to]) => {
  for (let step = 0; step <= 30; step += 1) {
    const [clientX, clientY] = from.map((start, axis) => start + ((to[axis] - start) * step) / 30);
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true, pointerType: "mouse" }));
  }
}"""


def test_rows_are_asked_for_where_the_pointer_rests_not_on_its_way(page, site, session):
    ready(page, f"{site}/#session=1&layer=1&head=1&token=0")
    said(page, 0)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/row?" in request.url else None)
    ends = [over(page, *middle(session, 1, BEFORE + token)) for token in (0, 34)]
    page.locator(".image-canvas").evaluate(CROSS, ends)
    said(page, BEFORE + 34)
    tokens = [int(re.search(r"token=(\d+)", one)[1]) for one in asked]
    assert set(tokens) <= {0, BEFORE + 34}, "of what lies between nothing is asked"
    assert BEFORE + 34 in tokens


# ---------------------------------------------------------------------------------------------------- what is not there


def test_capture_without_its_photograph_shows_patches_on_bare_paper(page, session, tmp_path):
    session.capture.save(tmp_path / "run.regard", photos=False)
    found = open_file(tmp_path / "run.regard")
    with serving([found]) as address:
        ready(page, f"{address}/#session=1&layer=1&head=2&token=0")
        expect(page.locator(".image-note")).to_contain_text("the image itself is not in this capture")
        page.mouse.move(*over(page, *middle(found, 1, BEFORE + 12)))
        assert abs(said(page, BEFORE + 12)[1] - float(session.capture[1].row(BEFORE + 12)[0, 2].max())) < 1e-6


def test_capture_that_is_dropped_brings_its_photograph(page, session, tmp_path):
    session.capture.save(tmp_path / "run.regard")
    with serving([]) as address:
        page.goto(address)
        expect(page.locator("[data-role=start]")).to_be_visible()
        with page.expect_response("**/image/0") as came:
            dropped(page, "run.regard", "application/octet-stream", (tmp_path / "run.regard").read_bytes())
        assert came.value.body() == session.images[0].data
        expect(page.locator(".facts")).to_contain_text("37 × 53 pixels (h × w)")
        expect(page.locator(".image-canvas[data-plot]")).to_be_visible()
        expect(page.locator(".image-note")).not_to_contain_text("the image itself is not in this capture")


def test_photograph_that_does_not_come_is_said(page, site):
    page.route("**/image/0", lambda route: route.fulfill(status=200, content_type="image/png", body=b"no picture"))
    page.goto(site)
    note = page.locator(".image-note")
    expect(note).to_contain_text("the image did not come: ")
    expect(note).to_contain_text(re.compile("decode|image|source", re.IGNORECASE))
    page.locator(".image-canvas").hover()
    expect(page.locator(".text-readout")).to_contain_text("exact")  # rows come without it
    expect(note).to_contain_text("the image did not come: ")  # and do not wipe that away


# -------------------------------------------------------------------------------------------------------------- windows


def test_patch_of_a_window_sees_its_window_alone(page, windowed):
    seen = windowed.layers[1]
    n = seen.view.sizes[2]
    kinds = seen.sides.keys.kind.ravel().tolist()
    token = next(t for t in range(4 * n, 5 * n) if kinds[t] == "patch")
    row = seen.view.row(token % n)[4, 1]
    with serving([windowed]) as address:
        ready(page, f"{address}/#session=1&layer=1&head=1&token={token + 1}")
        page.mouse.move(*over(page, *middle(windowed, 1, token)))
        _, exact = said(page, token, 4 * n + int(row.argmax()))
        assert abs(exact - float(row.max())) < 1e-6
        expect(page.locator(".map-window")).to_have_text("window 4 of 12")
        expect(page.locator(".image-note")).to_contain_text("12 windows: a patch sees its own window alone")
        expect(page.locator(".map-how")).to_have_attribute("data-how", "exact")
        assert sum(shares(page).values()) == pytest.approx(1, abs=1e-5)
        label = page.locator(".map-canvas").get_attribute("aria-label")
        assert "9 queries by 9 keys" in label


def test_map_follows_the_window_of_the_chosen_patch(page, windowed):
    with serving([windowed]) as address:
        ready(page, f"{address}/#session=1&layer=0&head=1&token=0")
        expect(page.locator(".map-window")).to_have_text("window 0 of 12")
        for _ in range(9):
            page.keyboard.press("j")
        expect(page.locator(".map-window")).to_have_text("window 1 of 12")
        box = page.locator(".map-canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tip = page.locator(".map-tip b")
        expect(tip).to_be_visible()
        weight = float(tip.get_attribute("data-weight"))
        weights = windowed.layers[0].view.tile(slice(None), slice(None))[1, 1]
        assert float((weights - weight).abs().min()) < 1e-6


# --------------------------------------------------------------------------------------------------- pictures and words


def test_word_that_is_pointed_at_shows_where_it_looks_and_held_it_is_read_over_the_image(page, tmp_path):
    found = look_at_image(picture(), blip(tmp_path, "ForConditionalGeneration"), text="a cat sat")
    layer = max(n for n, one in enumerate(found.layers) if one.view.kind == "cross")
    view = found.layers[layer].view
    with serving([found]) as address:
        head = 1
        ready(page, f"{address}#layer={layer}&head={head}&token=3")
        assert said(page, 3)[1] == pytest.approx(float(view.row(3)[0, head].max()), abs=1e-6)
        words = page.locator(".image-line").nth(0).locator(".text-piece")
        assert words.all_inner_texts() == ["[start]", "a", "cat", "sat"]
        words.nth(2).hover()
        row = view.row(2)[0, head]
        assert said(page, 2, int(row.argmax()))[1] == pytest.approx(float(row.max()), abs=1e-6)
        assert page.locator(".said-query").inner_text() == "cat"
        words.nth(2).click()
        for key in (1, 13, 25):
            page.mouse.move(*over(page, *middle(found, layer, key)))
            assert said(page, 2, key)[1] == pytest.approx(float(row[key]), abs=1e-6)
        page.locator(".image-line").nth(1).locator(".text-piece").first.hover()  # cls, a key alone
        assert said(page, 2, 0)[1] == pytest.approx(float(row[0]), abs=1e-6)


def test_image_among_words_is_coloured_and_so_are_the_words(page, tmp_path):
    found = look_at_image(picture(), llava(tmp_path), text="the street?")
    layer, last = len(found.layers) - 1, len(found.tokens) - 1
    row = found.layers[layer].view.row(last)[0, 1]
    with serving([found]) as address:
        ready(page, f"{address}/#session=1&layer={layer}&head=1&token={last}")
        assert said(page, last)[1] == pytest.approx(float(row.max()), abs=1e-6)
        kinds = found.layers[layer].sides.keys.kind[0]
        got = shares(page)
        assert got["patch"] == pytest.approx(float(row[torch.tensor(kinds == "patch")].sum()), abs=1e-5)
        assert got["text"] == pytest.approx(float(row[torch.tensor(kinds == "text")].sum()), abs=1e-5)
        shown = page.locator(".image-chips .text-piece")
        assert shown.count() == int((kinds == "text").sum())
        index = int(shown.nth(3).get_attribute("data-index"))
        assert float(shown.nth(3).get_attribute("data-weight")) == pytest.approx(float(row[index]), abs=1e-6)


# --------------------------------------------------------------------------------------------------------- new pictures


def dropped(page: Any, name: str, kind: str, body: bytes) -> None:
    """Drop a file on the page."""
    data = page.evaluate_handle(
        """([name, kind, bytes]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], name, { type: kind }));
          return data;
        }""",
        [name, kind, list(body)],
    )
    page.dispatch_event("#regard", "drop", {"dataTransfer": data})


def as_png(number: int, folder: Path) -> bytes:
    Image.fromarray(picture(number, 41, 59)).save(folder / "a.png")
    return (folder / "a.png").read_bytes()


def test_image_that_is_dropped_is_looked_at(page, session, seeing, tmp_path):
    with serving([session], ModelShelf([str(seeing)], demo=False)) as address:
        ready(page, address)
        dropped(page, "고양이.png", "image/png", as_png(3, tmp_path))
        expect(page.locator(".facts")).to_contain_text("41 × 59 pixels (h × w)")
        assert "고양이.png" in page.locator("[data-role=session] option:checked").inner_text()
        first = look_at_image(picture(3, 41, 59), seeing).patch_links[0][0]
        assert said(page, first.query, first.key)[1] == pytest.approx(first.weight, abs=1e-6)


def test_image_is_chosen_from_the_disk(page, seeing, tmp_path):
    with serving([], ModelShelf([str(seeing)], demo=False)) as address:
        page.goto(address)
        expect(page.locator("[data-role=start]")).to_be_visible()
        (tmp_path / "photo.png").write_bytes(as_png(4, tmp_path))
        page.locator("input[type=file]").set_input_files(tmp_path / "photo.png")
        expect(page.locator(".facts")).to_contain_text("41 × 59 pixels (h × w)")


def test_text_named_as_an_image_is_refused_in_words(browser, seeing):
    with serving([], ModelShelf([str(seeing)], demo=False)) as address:
        context = browser.new_context(locale="en-US", extra_http_headers=BEARER)
        try:
            page = context.new_page()
            page.goto(address)
            expect(page.locator("[data-role=start]")).to_be_visible()
            dropped(page, "notes.jpg", "image/jpeg", b"not a picture at all")
            expect(page.locator(".progress .error")).to_contain_text("'notes.jpg'")
        finally:
            context.close()


def test_model_of_texts_says_that_it_looks_at_no_image_and_the_image_stays_chosen(browser, seeing, tmp_path):
    reader = bert(tmp_path / "bert", "Model")
    with serving([], ModelShelf([str(reader), str(seeing)], demo=False)) as address:
        context = browser.new_context(locale="en-US", extra_http_headers=BEARER)  # a refusal stands in its console
        try:
            page = context.new_page()
            page.goto(address)
            expect(page.locator("[data-role=start]")).to_be_visible()
            dropped(page, "cat.png", "image/png", as_png(5, tmp_path))
            expect(page.locator(".progress .error")).to_contain_text("takes no images")
            expect(page.locator(".chosen-name")).to_have_text("Image: cat.png")
            page.locator("[data-role=model]").select_option("1")
            page.locator("[data-role=start]").click()
            expect(page.locator(".facts")).to_contain_text("41 × 59 pixels (h × w)")
        finally:
            context.close()


def test_image_are_offered_to_be_opened_only_where_the_model_looks_at_them(page, seeing, tmp_path):
    reader = bert(tmp_path / "bert", "Model")
    with serving([], ModelShelf([str(reader), str(seeing)], demo=False)) as address:
        page.goto(address)
        button, file = page.locator("[data-role=file]"), page.locator("input[type=file]")
        expect(button).to_have_text("Open a text or a .regard file")
        expect(file).not_to_have_attribute("accept", re.compile("image"))
        assert page.locator("[data-role=model] option").all_inner_texts() == [
            "automatic",
            "bert",
            f"{seeing.name} (images)",
        ]
        page.locator("[data-role=model]").select_option("1")
        expect(button).to_have_text("Open an image or a .regard file")
        expect(file).to_have_attribute("accept", re.compile("image"))
        expect(file).to_have_attribute("aria-label", "Open an image or a .regard file")
        file.set_input_files({"name": "cat.png", "mimeType": "image/png", "buffer": as_png(5, tmp_path)})
        expect(page.locator(".facts")).to_contain_text("41 × 59 pixels (h × w)")


def test_model_that_nobody_knows_yet_may_be_given_an_image(page):
    line = {"id": "0", "name": "far away", "default": True, "images": None}
    with serving([]) as address:
        page.route("**/api/models", lambda route: route.fulfill(json={"models": [line]}))
        page.goto(address)
        expect(page.locator("[data-role=model] option")).to_have_text(["automatic", "far away"])
        expect(page.locator("[data-role=file]")).to_have_text("Open an image or a .regard file")
        expect(page.locator("input[type=file]")).to_have_attribute("accept", re.compile("image"))


def test_image_that_is_too_large_is_not_sent(page, seeing):
    with serving([], ModelShelf([str(seeing)], demo=False)) as address:
        page.goto(address)
        expect(page.locator("[data-role=start]")).to_be_visible()
        data = page.evaluate_handle(
            """() => { const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(33 * 2 ** 20)], "big.jpg", { type: "image/jpeg" }));
            return data; }"""
        )
        page.dispatch_event("#regard", "drop", {"dataTransfer": data})
        expect(page.locator(".progress .error")).to_have_text("“big.jpg” is too large: at most 32 MB.")


# ---------------------------------------------------------------------------------------------- language and everything


def test_no_english_word_is_left_in_the_korean_image_pane(page, site):
    ready(page, f"{site}/#session=1&layer=2&head=0&token=0&lang=ko")
    expect(page.locator(".image-note")).to_contain_text("패치 5 × 7")
    texts = [page.locator(at).inner_text() for at in (".image-bar", ".image-note", ".said-hint", ".said-how")]
    assert set(re.findall(r"[A-Za-z]{2,}", " ".join(texts))) <= {"cls"}
    assert re.search("[가-힣]", page.locator(".image-canvas").get_attribute("aria-label"))


def test_image_is_reached_by_keys_and_has_a_name(page, site):
    ready(page, site)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached |= set(
            page.evaluate(
                "[...document.activeElement.classList].filter((name) => /image-canvas|text-piece/.test(name))"
            )
        )
    assert reached >= {"image-canvas", "text-piece"}
    label = page.locator(".image-canvas").get_attribute("aria-label")
    assert label.startswith("Image array in 5 × 7 patches")


def test_text_and_image_take_each_others_place(page, session, tmp_path):
    from regard.session.session import look_at

    text = look_at("The animal was tired.", bert(tmp_path, "Model"))
    with serving([text, session]) as address:
        ready(page, address)
        page.locator("[data-role=session]").select_option("1")
        expect(page.locator(".text-words .text-piece").nth(1)).to_be_visible()
        expect(page.locator(".image-canvas")).to_have_count(0)
        page.locator("[data-role=session]").select_option("2")
        expect(page.locator(".image-canvas")).to_be_visible()
        assert page.locator("[data-pane=text]").get_attribute("aria-label") == "Image"
        with page.expect_download() as saved:
            page.locator("[data-role=share]").click()
            page.locator("[data-save=svg][data-of=text]").click()
        first = session.patch_links[0][0]
        assert saved.value.suggested_filename == f"regard-image-{first.layer}.{first.head}.svg"
        drawn = Path(saved.value.path()).read_text(encoding="utf-8")
        assert f"Image: layer {first.layer}, head {first.head}" in drawn
        assert "data:image/png" in drawn, "the canvas is part of it"


def test_words_and_numbers_of_a_text_do_not_stand_beside_an_image(page, session, tmp_path):
    from regard.session.session import look_at

    text = look_at("The animal was tired.", bert(tmp_path, "Model"))
    with serving([text, session]) as address:
        page.goto(f"{address}#session=1&layer=1&head=1&token=2&key=1")
        expect(page.locator(".steps h2")).to_contain_text("animal")
        waiting = []
        for question in ("head", "row", "steps"):
            page.route(f"**/session/2/{question}?*", lambda route: waiting.append(route))
        page.locator("[data-role=session]").select_option("2")
        until(page, lambda: len(waiting) >= 2)
        expect(page.locator(".steps")).to_contain_text("Computing")
        assert page.locator(".steps table").count() == 0
        assert "animal" not in page.locator(".steps").inner_text() + page.locator(".card").inner_text()
        until(page, lambda: "session=2" in page.url)  # the address follows a little later
        page.unroute_all()
        page.reload()
        expect(page.locator(".steps h2")).to_contain_text("cls")


# -------------------------------------------------------------------------------------------------------- exported page


@pytest.mark.parametrize(
    ("options", "layer", "head", "token"),
    [
        ([], 2, None, 0),
        (["--layer", "1", "--token", "7"], 1, None, 7),
        (["--at", "20,30"], 2, None, BEFORE + 2 * 7 + 3),
        (["--layer", "0", "--head", "2", "--at", "20,30"], 0, 2, BEFORE + 2 * 7 + 3),
    ],
)
def test_command_s_choice_is_where_its_page_opens(page, session, tmp_path, monkeypatch, options, layer, head, token):
    monkeypatch.setattr("regard.cli.look_image.read_image", lambda *given, **told: session)
    Image.new("RGB", (53, 37)).save(tmp_path / "photo.png")
    file = tmp_path / "page.html"
    assert main(["look", str(tmp_path / "photo.png"), *options, "--html", str(file)]) == 0
    ready(page, file.as_uri())
    chosen = page.locator('.cell[aria-selected="true"]')
    expect(chosen).to_have_attribute("data-layer", str(layer))
    expect(chosen).to_have_attribute("data-head", str(stands_out(session, layer, token) if head is None else head))
    expect(page.locator(f'.said-weight[data-query="{token}"]')).to_be_visible()


def test_exported_page_shows_the_image_and_the_same_weights_from_a_file(page, session, tmp_path):
    target = tmp_path / "고양이 cat.html"
    write_html(session, target)
    ready(page, f"{target.as_uri()}#session=1&layer=1&head=2&token=0")
    token = BEFORE + 19
    row = session.capture[1].row(token)[0, 2]
    page.mouse.move(*over(page, *middle(session, 1, token)))
    _, exact = said(page, token, int(row.argmax()))
    assert abs(exact - float(row.max())) < 1e-6
    expect(page.locator(".said-how")).to_have_text("exact")
    assert (colour(page, *middle(session, 1, BEFORE + 34)) < 250).any(), "the photograph is there, not bare paper"


@pytest.mark.parametrize(
    ("lang", "words"),
    [
        ("en", "strongest only: of bare patches this file does not hold the weight"),
        ("ko", "강한 것만: 색이 없는 패치의 가중치는 이 파일에 없습니다"),
    ],
)
def test_exported_page_of_the_strongest_links_gives_no_shares(page, session, tmp_path, monkeypatch, lang, words):
    monkeypatch.setattr(export, "SHORT", 1)
    monkeypatch.setattr(export, "LINKS", 2)
    monkeypatch.setattr(export, "ROOM", 2 * (BEFORE + ROWS * COLUMNS) ** 2 - 1)  # room for links, for no whole head
    target = tmp_path / "links.html"
    write_html(session, target)
    page.goto(f"{target.as_uri()}#session=1&layer=2&head=0&token=0&lang={lang}")
    expect(page.locator("#regard[data-state=ready]")).to_be_visible()
    expect(page.locator(".image-part")).to_have_text(words)
    assert shares(page) == {}, "what is not in the file was counted as 0"


def test_exported_page_shows_windows(page, windowed, tmp_path):
    target = tmp_path / "swin.html"
    write_html(windowed, target)
    seen = windowed.layers[1]
    n = seen.view.sizes[2]
    token = next(t for t in range(6 * n, 7 * n) if seen.sides.keys.kind.ravel()[t] == "patch")
    row = seen.view.row(token % n)[6, 1]
    ready(page, f"{target.as_uri()}#session=1&layer=1&head=1&token={token}")
    assert abs(said(page, token, 6 * n + int(row.argmax()))[1] - float(row.max())) < 1e-6
    expect(page.locator(".map-window")).to_have_text("window 6 of 12")
    total = float(torch.tensor(list(shares(page).values())).sum())
    assert abs(total - 1) < 1e-5


# ------------------------------------------------------------------------------------------------------------- notebook


def in_a_notebook(page: Any, session: Session) -> Any:
    """What anywidget does in a notebook, without one: a model whose messages Python answers."""
    page.expose_function("askPython", lambda message: answer([session], message))
    page.goto("data:text/html,<!doctype html><meta charset=utf-8><body style='margin:0'><div id=cell></div>")
    page.add_script_tag(
        type="module",
        content=f"""{module().replace("export default", "const widget =")}
const hear = new Set();
const model = {{
  get: (name) => ({{ lang: "en", height: 780 }})[name],
  on: (_, listener) => hear.add(listener),
  off: (_, listener) => hear.delete(listener),
  send: async (message) => {{ const reply = await askPython(message); for (const listener of hear) listener(reply); }},
}};
widget.render({{ model, el: document.getElementById("cell") }});""",
    )
    expect(page.locator(".image-share").first).to_be_visible()
    return page


def test_styles_of_a_notebook_do_not_reach_the_page(fresh_page, session):
    """Those of JupyterLab for lists of definitions, tables and text, which laid the head's numbers over each other."""
    page = in_a_notebook(fresh_page, session)
    numbers = page.locator(".card .numbers")
    before = numbers.evaluate(
        "at => [...at.querySelectorAll('dt, dd')].map((one) => one.getBoundingClientRect().toJSON())"
    )
    page.add_style_tag(
        content="""
#cell dl dt { float: left; width: 20%; font-weight: bold; } #cell dl dd { float: left; width: 80%; margin-left: 20%; }
#cell table { table-layout: fixed; width: 300px; font-size: 40px; } #cell * { letter-spacing: 3px; line-height: 3; }
#cell { text-align: right; white-space: pre; font-size: 40px; text-transform: uppercase; }"""
    )
    after = numbers.evaluate(
        "at => [...at.querySelectorAll('dt, dd')].map((one) => one.getBoundingClientRect().toJSON())"
    )
    assert len(before) == 8
    assert after == before
    lines = [(name, value) for name, value in zip(after[::2], after[1::2], strict=True)]
    assert all(name["bottom"] <= value["top"] + 1 for name, value in lines), "a number stands below its name"
    assert page.locator(".card .sentence").evaluate("at => getComputedStyle(at).textTransform") == "none"


def test_keys_of_the_page_are_not_taken_for_those_of_the_notebook(fresh_page, session):
    page = in_a_notebook(fresh_page, session)
    host = page.locator("#cell > div")
    expect(host).to_have_attribute("data-lm-suppress-shortcuts", "true")
    page.locator("[data-role=search]").click()
    page.keyboard.type("entropy > 0")
    expect(page.locator("[data-role=search]")).to_have_value("entropy > 0")
    page.locator('.cell[aria-selected="true"]').focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".cell:focus")).to_have_count(1)


def test_notebook_shows_the_image_and_asks_python_for_rows(fresh_page, session):
    page = in_a_notebook(fresh_page, session)
    token, first = BEFORE + 11, session.patch_links[0][0]
    assert said(page, first.query, first.key)[1] == pytest.approx(first.weight, abs=1e-6)
    row = session.capture[first.layer].row(token)[0, first.head]
    page.mouse.move(*over(page, *middle(session, first.layer, token)))
    assert abs(said(page, token, int(row.argmax()))[1] - float(row.max())) < 1e-6
    assert (colour(page, *middle(session, 2, BEFORE)) < 250).any()
