"""The explorer's page in a real browser: what it shows, word by word and digit by digit, and what it must never do."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from browsing import BEARER, PATIENCE, PLAYWRIGHT, opened, ready, serving, until
from page_parts import LONG, large_session, long_session
from torch import Tensor

from regard.explorer.export import write_html
from regard.explorer.jobs import ModelShelf
from regard.session.default_models import default_model
from regard.session.session import Session, look_at

expect = pytest.importorskip("playwright.sync_api", reason=PLAYWRIGHT).expect
SENTENCE = "The animal didn't cross the street because it was too tired."
OTHER = "The animal didn't cross the street because it was too wide."
LAYER, HEAD, IT, ANIMAL = 3, 1, 10, 2


# ------------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def session(models: ModelShelf) -> Session:
    with models.using(models.find(None), lambda done, total: None) as model:
        return look_at(SENTENCE, model)


@pytest.fixture(scope="module")
def site(session: Session) -> Iterator[str]:
    """A server whose only session nobody adds to."""
    with serving([session]) as address:
        yield address


@pytest.fixture(scope="module")
def theirs(session: Session) -> list[Tensor]:
    """What transformers' eager attention gives for the sentence: (H, N, N) of each layer."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(default_model(), attn_implementation="eager").eval()
    read = AutoTokenizer.from_pretrained(default_model())(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        return [layer[0] for layer in model(**read, output_attentions=True).attentions]


@pytest.fixture(scope="module")
def long() -> tuple[Session, Tensor, Tensor]:
    return long_session()


@pytest.fixture(scope="module")
def long_site(long: tuple[Session, Tensor, Tensor]) -> Iterator[str]:
    with serving([long[0]]) as address:
        yield address


# -------------------------------------------------------------------------------------------------------------- reading


def chosen(page: Any, layer: int, head: int) -> None:
    """Wait until the atlas and the drawer tell of a head."""
    expect(page.locator(f'.cell[data-layer="{layer}"][data-head="{head}"]')).to_have_attribute("aria-selected", "true")
    expect(page.locator(".card h2")).to_contain_text(f"layer {layer}, head {head}")


def said(page: Any, query: int, key: int | None = None, side: str = "first") -> tuple[str, float]:
    """What the text pane reads out for a query, once it does: the weight in its digits, and as a number."""
    which = f'[data-query="{query}"]' + ("" if key is None else f'[data-key="{key}"]')
    found = page.locator(f"[data-side={side}] .said-weight{which}")
    expect(found).to_be_visible()
    return found.inner_text(), float(found.get_attribute("data-weight"))


def number(shown: str) -> float:
    """A number as the page writes it."""
    return float(shown.replace("−", "-"))


def last_digit(shown: str) -> float:
    """Half of what the last digit of a number counts: how far rounding may move it."""
    whole, _, power = shown.replace("−", "-").partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(whole.partition(".")[2]))


def asked(address: str, *paths: str) -> Iterator[tuple[float, bytes]]:
    """Seconds and bytes of the answers to these questions, over one connection."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)
    try:
        for path in paths:
            start = time.perf_counter()
            connection.request("GET", f"/api/session/1/{path}", headers=BEARER)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            yield time.perf_counter() - start, body
    finally:
        connection.close()


# ----------------------------------------------------------------------------------------------------- the first moment


def test_page_shows_every_head_the_words_and_what_it_looks_at(page, site):
    ready(page, site)
    assert page.locator(".cell").count() == 6 * 12
    assert page.locator(".text-piece").all_inner_texts()[IT] == "it"
    assert said(page, IT, ANIMAL)[0] == "0.6768"
    expect(page.locator(".foot")).to_contain_text("not why the model answers")


def test_page_fits_the_window(page, site):
    for width, height in ((1280, 800), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        ready(page, site)
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert size == [width, height]


def test_typed_sentence_is_read_with_its_progress_and_shown(page, models):
    now = {"state": "loading"}

    def told(route: Any) -> None:  # a text of this size is read before anybody could see how
        line = {"progress": "", "session": None, "error": None}
        route.fulfill(json={**now, **line}) if now else route.continue_()

    with serving([], models) as address:
        page.goto(address)
        page.route("**/api/job/*", told)
        page.locator("[data-role=text]").fill("A cat sat on the mat.")
        page.locator("[data-role=start]").click()
        expect(page.locator(".progress")).to_contain_text("Loading the model")
        now["state"] = "reading"
        expect(page.locator(".progress")).to_contain_text("Reading the text")
        now.clear()
        expect(page.locator(".text-piece")).to_have_text(["[CLS]", "a", "cat", "sat", "on", "the", "mat", ".", "[SEP]"])


def test_text_that_is_being_typed_stays_when_the_models_come(page, models):
    held: list[Any] = []
    with serving([], models) as address:
        page.route("**/api/models", lambda route: held.append(route))
        page.goto(address)
        page.locator("[data-role=text]").click()
        page.keyboard.type("half a ")
        until(page, lambda: bool(held))
        held[0].fulfill(json={"models": [{"id": "demo", "name": "a model that came late", "default": True}]})
        expect(page.locator("[data-role=model]")).to_contain_text("a model that came late")
        page.keyboard.type("sentence")
        expect(page.locator("[data-role=text]")).to_have_value("half a sentence")


def test_reading_can_be_cancelled(page, models):
    deleted: list[str] = []

    def never(route: Any) -> None:
        if route.request.method == "DELETE":
            deleted.append(route.request.url)
            return route.continue_()
        return route.fulfill(json={"state": "loading", "progress": "", "session": None, "error": None})

    with serving([], models) as address:
        page.goto(address)
        page.route("**/api/job/*", never)
        page.locator("[data-example=coreference]").click()
        with page.expect_response(lambda response: response.request.method == "DELETE"):
            page.locator("[data-role=cancel]").click()
        expect(page.locator(".progress")).to_have_text("Cancelled.")
        expect(page.locator("[data-role=start]")).to_be_enabled()
    assert len(deleted) == 1


def test_html_in_a_text_is_text(page, models):
    trap = "<img src=x onerror='window.hurt=1'><script>window.hurt=2</script> & <b>bold</b>"
    with serving([], models) as address:
        page.goto(address)
        page.locator("[data-role=text]").fill(trap)
        page.locator("[data-role=start]").click()
        expect(page.locator(".text-piece").nth(1)).to_have_text("<")
        assert trap[:30] in page.locator("[data-role=session]").inner_text()
        assert page.evaluate("[window.hurt, document.querySelectorAll('#regard img, #regard b.bold').length]") == [
            None,
            0,
        ]


# ---------------------------------------------------------------------------------------------------- heads and weights


def test_head_is_chosen_by_click_and_by_keys(page, site):
    ready(page, site)
    page.locator('.cell[data-layer="5"][data-head="10"]').click()
    chosen(page, 5, 10)
    page.keyboard.press("ArrowRight")
    chosen(page, 5, 11)
    page.keyboard.press("ArrowRight")  # there is no head 12
    page.keyboard.press("ArrowUp")
    chosen(page, 4, 11)


def test_words_are_walked_by_keys(page, site):
    ready(page, site)
    said(page, IT)
    page.keyboard.press("j")
    said(page, IT + 1)
    page.keyboard.press("k")
    page.keyboard.press("k")
    said(page, IT - 1)


@pytest.mark.parametrize(("layer", "head", "query"), [(3, 1, 10), (0, 2, 6), (5, 11, 13)])
def test_weights_of_a_word_are_those_of_transformers(page, site, theirs, layer, head, query):
    ready(page, f"{site}/#session=1&layer={layer}&head={head}")
    page.locator(f'.text-piece[data-index="{query}"]').hover()
    shown, _ = said(page, query)
    row = theirs[layer][head, query]
    assert abs(float(shown) - float(row.max())) <= 5e-5 + 1e-6
    page.locator(f'.text-piece[data-index="{query}"]').click()  # held: now other words are keys
    for key in (1, 8, 15):
        page.locator(f'.text-piece[data-index="{key}"]').hover()
        shown, exact = said(page, query, key)
        assert abs(number(shown) - float(row[key])) <= last_digit(shown) + 1e-6, (key, shown)
        assert abs(exact - float(row[key])) <= 1e-5
    pieces = page.locator(".text-piece")
    weights = torch.tensor(pieces.evaluate_all("pieces => pieces.map((piece) => Number(piece.dataset.weight))"))
    torch.testing.assert_close(weights, row, rtol=0, atol=1e-5)


def test_steps_lead_from_the_dot_product_to_the_weight_in_the_digits_that_are_shown(page, site):
    ready(page, site)
    page.locator(".steps [data-focus=all]").click()
    lines = page.locator(".steps tbody tr")
    expect(lines).to_have_count(16)
    rows = [[cell.split("\n")[-1] for cell in line.locator("td").all_inner_texts()] for line in lines.all()]
    lse = float(re.search(r"e\^\(score − ([\d.]+)\)", page.locator(".steps .explained").inner_text())[1])
    for dot, scaled, weight in rows:
        slack = last_digit(dot) / math.sqrt(32) + last_digit(scaled)
        assert abs(number(dot) / math.sqrt(32) - number(scaled)) <= slack + 1e-9
        about = math.exp(number(scaled) - lse)
        assert abs(about - number(weight)) <= 1.2 * about * (last_digit(scaled) + 0.005) + last_digit(weight)
    weights = [weight for _, _, weight in rows]
    assert abs(sum(map(number, weights)) - 1) <= sum(map(last_digit, weights))
    assert weights == sorted(weights, key=number, reverse=True)


def test_steps_show_the_pair_that_is_chosen(page, site):
    ready(page, site)
    expect(page.locator(".steps .sum")).to_contain_text("q·k = 21.7; divided: 3.83; weight 0.68")
    page.locator('.steps tr[data-key="8"]').click()
    expect(page.locator(".steps .pair h3").first).to_contain_text("“street”")
    dot = page.locator('.steps tr[data-key="8"] td').first.inner_text()
    expect(page.locator(".steps .sum")).to_contain_text(f"q·k = {dot};")


def test_search_dims_what_does_not_fit_and_says_what_is_wrong(page, site, session):
    ready(page, site)
    page.keyboard.press("/")
    page.keyboard.type("induction > 0.1")
    scores = torch.stack([numbers.patterns["induction"] for numbers in session.numbers])
    fits = int((scores > 0.1).sum())
    assert 0 < fits < 72
    expect(page.locator(".found")).to_have_text(f"{fits} of 72 heads")
    assert page.locator(".cell:not(.dim)").count() == fits
    page.locator("[data-role=search]").fill("inductoin > 0.1")
    expect(page.locator(".found.error")).to_contain_text("“inductoin” is no measure. There are: entropy")
    page.locator("[data-role=search]").fill("entropy >")
    expect(page.locator(".found.error")).to_contain_text("A number must come after")
    assert page.locator("[data-role=search]").get_attribute("aria-invalid") == "true"


def test_heads_are_sorted_by_the_chosen_measure(page, site, session):
    ready(page, site)
    page.locator("[data-role=measure]").select_option("induction")
    page.locator("[data-choice=view] [data-value=list]").click()
    scores = torch.stack([numbers.patterns["induction"] for numbers in session.numbers])
    layer, head = divmod(int(scores.argmax()), 12)
    expect(page.locator(".atlas-line .place").first).to_have_text(f"L{layer} H{head}")


# ------------------------------------------------------------------------------------------------------- long documents


def test_map_of_16384_tokens_zooms_down_to_exact_cells(page, long, long_site):
    _, q, k = long
    ready(page, f"{long_site}/#session=1&layer=0&head=0")
    expect(page.locator(".map-how")).to_have_text("pooled")
    canvas = page.locator(".map-canvas")
    box = canvas.bounding_box()
    canvas.hover(position={"x": 0.55 * box["width"], "y": 0.7 * box["height"]})
    for _ in range(40):
        page.mouse.wheel(0, -240)
        if "region=" in page.url and page.locator(".map-how").get_attribute("data-how") == "exact":
            break
        page.wait_for_timeout(60)
    expect(page.locator(".map-how")).to_have_text("exact")
    expect(page.locator(".map-loading")).to_have_count(0)
    canvas.hover(position={"x": 0.55 * box["width"] + 1, "y": 0.7 * box["height"]})
    expect(page.locator(".tip-how")).to_have_text("exact")
    query, key = (int(page.locator(f".tip-{side} .tip-place").inner_text()) for side in ("query", "key"))
    shown = page.locator(".tip-weight b").inner_text()
    row = (q[0, query].double() @ k[0, : query + 1].double().mT / 4).softmax(-1)
    expected = float(row[key]) if key <= query else 0.0
    assert abs(number(shown) - expected) <= last_digit(shown) + 1e-4 * expected


def test_part_of_the_map_that_is_chosen_is_the_part_of_the_text_that_is_shown(page, long_site):
    ready(page, f"{long_site}/#session=1&layer=0&head=1&region=9000-9040x9000-9040")
    expect(page.locator(".map-how")).to_have_text("exact")
    canvas = page.locator(".map-canvas")
    box = canvas.bounding_box()
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.4 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.6 * box["height"], steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.wait_for_url(re.compile("window="))
    first = int(re.search(r"window=(\d+)-", page.url)[1])
    assert 9000 < first < 9040
    expect(page.locator(".text-piece").first).to_have_attribute("data-index", str(first))


def test_address_that_names_a_token_shows_it_among_16384(page, long_site):
    for head in (0, 1):  # anew, and then by the address alone
        ready(page, f"{long_site}/#session=1&layer=0&head={head}&token=12345")
        expect(page.locator('.text-piece[data-index="12345"].query')).to_be_in_viewport()
        expect(page.locator(".text-place")).to_have_text("words 12045–12644 of 16384")


ROWS = [f"row?layer=0&head=1&token={(k * 7919) % LONG}&start=8000&stop=8600" for k in range(1, 21)]


def test_token_of_16384_is_answered_with_a_few_kilobytes(long_site):
    assert max(len(body) for _, body in asked(long_site, *ROWS)) < 64_000


WATCH = """
const look = () => document.querySelectorAll(".cell").length === 512 && document.querySelector(".map-how")
  && document.querySelector(".text-piece")
  ? (document.documentElement.dataset.drawn = performance.now()) : requestAnimationFrame(look);
requestAnimationFrame(look);
"""


def first_moment(browser: Any, address: str) -> tuple[int, float, float]:
    """Bytes of all answers; milliseconds until the first paint, and until heads, the map and the words are there."""
    with opened(browser) as page:
        page.add_init_script(WATCH)
        answers: list[Any] = []
        page.on("response", lambda answer: answers.append(answer))
        page.goto(address)
        expect(page.locator("html[data-drawn]")).to_be_attached()
        received = sum(len(answer.body()) for answer in answers if answer.url.startswith("http"))
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return received, painted, float(page.locator("html").get_attribute("data-drawn"))


def test_131072_tokens_of_512_heads_are_painted_from_5_megabytes(browser):
    with serving([large_session()]) as address:
        received, painted, drawn = first_moment(browser, address)
    assert received <= 5_000_000
    assert 0 < painted <= drawn


# ------------------------------------------------------------------------------------------ comparing, words, addresses


def test_two_texts_are_compared_side_by_side(page, models, session):
    with serving([session], models) as address:
        ready(page, address)
        said(page, IT, ANIMAL)
        page.locator("[data-role=new]").click()
        page.locator("dialog [data-role=text]").fill(OTHER)
        page.keyboard.press("Control+Enter")
        expect(page.locator(".text-piece").nth(13)).to_have_text("wide")
        page.locator("[data-role=session]").select_option("1")
        expect(page.locator(".text-piece").nth(13)).to_have_text("tired")
        page.locator(f'.cell[data-layer="{LAYER}"][data-head="{HEAD}"]').click()
        page.keyboard.press("c")
        for side, last in (("first", "tired"), ("second", "wide")):
            expect(page.locator(f"[data-side={side}] .text-piece").nth(13)).to_have_text(last)
        for side in ("first", "second"):
            page.locator(f'[data-side={side}] .text-piece[data-index="{IT}"]').hover()
        ours, others = (said(page, IT, ANIMAL, side)[1] for side in ("first", "second"))
        with models.using(models.find(None), lambda done, total: None) as model:
            expected = look_at(OTHER, model).capture[LAYER].row(IT)[0, HEAD, ANIMAL]
        assert abs(others - float(expected)) < 1e-6
        assert ours - others > 0.3, "what is wide is the street"
        page.locator("[data-role=difference]").check()
        expect(page.locator("[data-side=second] .legend")).to_contain_text("−")
        page.keyboard.press("c")
        expect(page.locator("[data-side=second]")).to_have_count(0)


def test_language_and_theme_are_switched(page, site):
    ready(page, site)
    light = page.locator("#regard").evaluate("at => getComputedStyle(at).backgroundColor")
    page.locator("[data-choice=lang] [data-value=ko]").click()
    expect(page.locator("html")).to_have_attribute("lang", "ko")
    expect(page.locator(".map-how")).to_have_text("정확값")
    expect(page.locator(".card .sentence")).to_contain_text("헤드")
    page.locator("[data-choice=theme] [data-value=dark]").click()
    expect(page.locator("#regard")).to_have_attribute("data-theme", "dark")
    dark = page.locator("#regard").evaluate("at => getComputedStyle(at).backgroundColor")
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (light, dark)]
    assert brightness[0] > 600
    assert brightness[1] < 200


def test_system_that_is_dark_and_korean_gets_a_dark_korean_page(browser, site):
    with opened(browser, locale="ko-KR", color_scheme="dark") as page:
        ready(page, site)
        expect(page.locator("html")).to_have_attribute("lang", "ko")
        expect(page.locator("#regard")).to_have_attribute("data-theme", "dark")


def test_language_of_the_browser_counts_until_another_is_chosen(browser, site):
    with opened(browser, locale="ko-KR") as page:
        ready(page, f"{site}/#layer=2&head=7")
        page.locator('.cell[data-layer="3"][data-head="1"]').click()
        page.wait_for_url(re.compile("layer=3"))
        assert "lang" not in page.url, "who gets this address reads it in their own language"
        page.locator("[data-choice=lang] [data-value=en]").click()
        page.wait_for_url(re.compile("lang=en"))
        page.reload()
        expect(page.locator("html")).to_have_attribute("lang", "en")


def test_no_english_word_is_left_in_the_korean_page(page, site):
    ready(page, f"{site}/#lang=ko")
    words = page.evaluate("""[...document.querySelectorAll("button, h2, h3, option, label, .about, .foot, .note")]
      .filter((at) => !at.closest(".text-words, .links, .text-links, .steps tbody") && at.offsetParent !== null)
      .map((at) => at.innerText.trim()).filter((said) => /[a-z]{4,}/.test(said) && !/[\\uac00-\\ud7a3]/.test(said))""")
    assert words == []


def test_address_restores_everything_that_was_chosen(browser, site):
    with opened(browser) as page:
        ready(page, site)
        page.locator('.cell[data-layer="2"][data-head="7"]').click()
        page.locator('.text-piece[data-index="6"]').hover()
        said(page, 6)
        page.locator("[data-role=measure]").select_option("effective")
        page.locator("[data-role=search]").fill("entropy < 1")
        page.locator("[data-choice=scale] [data-value=log]").click()
        page.locator(".map-sink input").uncheck()
        page.locator("[data-choice=theme] [data-value=dark]").click()
        page.locator("[data-choice=lang] [data-value=ko]").click()
        found = page.locator(".found").inner_text()
        page.wait_for_url(re.compile("lang=ko"))
        address = page.url
    with opened(browser) as page:
        ready(page, address)
        expect(page.locator('.cell[data-layer="2"][data-head="7"]')).to_have_attribute("aria-selected", "true")
        said(page, 6)
        expect(page.locator("[data-role=measure]")).to_have_value("effective")
        expect(page.locator(".found")).to_have_text(found)
        expect(page.locator("[data-choice=scale] [aria-checked=true]")).to_have_attribute("data-value", "log")
        assert not page.locator(".map-sink input").is_checked()
        expect(page.locator("#regard")).to_have_attribute("data-theme", "dark")
        expect(page.locator("html")).to_have_attribute("lang", "ko")
        page.wait_for_timeout(300)
        assert page.url == address


def test_address_that_is_nonsense_is_ignored(page, site):
    ready(
        page,
        f"{site}/#session=99&layer=77&head=-3&token=1e9&region=5-1xq&scale=loud&lang=xx&theme=&window=9-2&with.session=8",
    )
    expect(page.locator(".cell[aria-selected=true]")).to_have_count(1)
    expect(page.locator("[data-side=second]")).to_have_count(0)


# ---------------------------------------------------------------------------------------------------------- one's hands


def test_keys_alone_reach_every_pane(page, site):
    ready(page, site)
    parts = [
        ".cell",
        "[data-role=search]",
        ".map-canvas",
        ".text-piece",
        ".steps button",
        ".card button",
        ".top button",
    ]
    reached: set[str] = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached |= set(page.evaluate("(parts) => parts.filter((at) => document.activeElement.matches(at))", parts))
    assert reached == set(parts)


def test_everything_that_can_be_used_has_a_name(page, site):
    ready(page, site)
    page.locator("[data-role=new]").click()
    usable = "button, select, textarea, input, canvas, [tabindex='0']"
    nameless = page.evaluate(
        """(usable) => [...document.querySelectorAll(usable)]
      .filter((at) => !(at.getAttribute("aria-label") || at.textContent.trim() || at.labels?.length || at.title))
      .map((at) => at.outerHTML.slice(0, 120))""",
        usable,
    )
    assert nameless == []


CONTRAST = """(names) => names.flatMap((name) => [...document.querySelectorAll(name)].slice(0, 20)).map((at) => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let under = at;
  const clear = (at) => (parts(getComputedStyle(at).backgroundColor)[3] ?? 1) === 0;
  while (under.parentElement && clear(under)) under = under.parentElement;
  const [a, b] = [getComputedStyle(at).color, getComputedStyle(under).backgroundColor].map(light);
  return [at.className || at.tagName, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}).filter(([, ratio]) => ratio < 4.5)"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_their_paper(page, site, theme):
    """WCAG AA: 4.5 to 1, for what is read, on the colour that is really under it."""
    ready(page, f"{site}/#theme={theme}")
    said(page, IT)
    names = "h2 h3 p dt dd td th button:not(:disabled) label caption .text-piece .facts small"
    assert page.evaluate(CONTRAST, names.split()) == []


# -------------------------------------------------------------------------------------------------------- exported page


def test_exported_page_shows_the_same_weights_from_a_file(page, session, theirs, tmp_path):
    target = tmp_path / "보기 animal.html"
    write_html(session, target)
    ready(page, target.as_uri())
    assert said(page, IT, ANIMAL)[0] == "0.6768"
    assert page.locator("[data-role=new]").count() == 0
    page.locator('.cell[data-layer="5"][data-head="4"]').click()
    chosen(page, 5, 4)
    page.locator('.text-piece[data-index="6"]').hover()
    shown, exact = said(page, 6)
    assert abs(float(shown) - float(theirs[5][4, 6].max())) <= 5e-5 + 1e-6
    assert abs(exact - float(theirs[5][4, 6].max())) < 1e-5
    expect(page.locator(".said-how")).to_have_text("exact")


# --------------------------------------------------------------------------------------------------- the tests' own eye


@pytest.mark.parametrize(
    ("script", "event"),
    [
        ("console.warn(1)", "console"),
        ("console.error(1)", "console"),
        ("nothing.x", "pageerror"),
        ("fetch('http://regard.invalid/')", "request"),
    ],
)
def test_troubles_of_a_page_are_seen(browser, script, event):
    def troubled() -> None:
        with opened(browser) as page:
            page.goto("data:text/html,<p>")
            with page.expect_event(event):
                page.add_script_tag(content=f"setTimeout(() => {{ {script} }})")

    with pytest.raises(AssertionError) as raised:
        troubled()
    assert str(raised.traceback[-1].path).endswith("browsing.py")
