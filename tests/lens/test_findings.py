"""The doctor's sentences: the same in both languages, and all of them can be said."""

import re
from string import Formatter

import pytest

from regard.lens.doctor import FINDINGS, TERMS, WHY, Finding
from regard.lens.patterns import CALLED, KEYS, MEANING
from regard.locale import catalogue, translate

TEXTS = [text for texts in FINDINGS.values() for text in texts if text] + list(WHY.values()) + list(TERMS.values())


def asked_for(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


@pytest.mark.parametrize("english", TEXTS)
def test_both_languages_tell_the_same_values(english):
    korean = catalogue("ko")[english]
    assert asked_for(english) == asked_for(korean)
    assert english != korean


def test_patterns_are_named_in_both_languages():
    for names in (CALLED, KEYS, MEANING):
        assert list(names["en"]) == list(names["ko"])


@pytest.mark.parametrize("code", FINDINGS)
def test_one_korean_term_stands_for_one_thing(code):
    korean = " ".join(translate(text, "ko") for text in FINDINGS[code] if text)
    assert not re.search("층|창|교차|전역|같은 말", korean)  # 레이어, 윈도, 크로스, 글로벌, 가중치


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("code", FINDINGS)
def test_every_finding_can_be_said(code, lang):
    text, advice = FINDINGS[code]
    names = asked_for(text) | asked_for(advice)
    given = dict.fromkeys(names, 41) | ({"why": "overflow"} if not advice else {})
    given |= {"example": (2, 3, 5)} if "example" in names else {}
    finding = Finding("note", code, ("a.0", "a.1"), tuple(given.items()))
    said = finding.text(lang) + finding.advice(lang)
    assert "{" not in said
    assert all("41" in said for name in names - {"example"})
    example = {"en": "batch row 2, head 3, query 5", "ko": "배치 2행, 헤드 3, 쿼리 5"}[lang]
    assert ("example" in names) == (example in said)


def test_finding_reads_as_one_line():
    finding = Finding("warning", "causal twice", ("a.0", "a.1"))
    assert str(finding).startswith("warning: a.0–1: the future is hidden twice")
    assert (finding.path, finding.where) == ("a.0", "a.0–1")


def test_braces_in_what_is_told_stay():
    assert Finding("note", "decoder sees ahead", ("a",), (("mask", "{odd}"),)).text().endswith("mask: {odd}")


@pytest.mark.parametrize("say", [Finding.text, Finding.advice])
def test_unknown_language_is_refused(say):
    with pytest.raises(ValueError, match=r"lang.*'en'.*'ko'.*'fr'"):
        say(Finding("note", "causal twice", ("a",)), "fr")
