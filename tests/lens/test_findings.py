"""The doctor's sentences: the same in both languages, and all of them can be said."""

import re
from string import Formatter

import pytest

from regard.lens.doctor.report import EXAMPLE, SEVERITIES, WHY, Finding, WORDS_findings


def asked_for(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def test_both_languages_have_the_same_sentences():
    assert list(WORDS_findings["en"]) == list(WORDS_findings["ko"])
    assert list(SEVERITIES["en"]) == list(SEVERITIES["ko"])
    assert list(WHY["en"]) == list(WHY["ko"])
    assert set(EXAMPLE) == set(WORDS_findings)


@pytest.mark.parametrize("code", WORDS_findings["en"])
def test_both_languages_tell_the_same_values(code):
    for english, korean in zip(WORDS_findings["en"][code], WORDS_findings["ko"][code], strict=True):
        assert asked_for(english) == asked_for(korean)
        assert english != korean or english == "{why}"  # which has sentences of its own


@pytest.mark.parametrize("code", WORDS_findings["ko"])
def test_one_korean_term_stands_for_one_thing(code):
    assert not re.search(
        "층|창|교차|전역|같은 말", " ".join(WORDS_findings["ko"][code])
    )  # 레이어, 윈도, 크로스, 글로벌, 가중치


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("code", WORDS_findings["en"])
def test_every_finding_can_be_said(code, lang):
    names = set().union(*map(asked_for, WORDS_findings["en"][code]))
    given = dict.fromkeys(names, 41) | ({"why": "overflow"} if "why" in names else {})
    given |= {"example": (2, 3, 5)} if "example" in names else {}
    finding = Finding("note", code, ("a.0", "a.1"), tuple(given.items()))
    said = finding.text(lang) + finding.advice(lang)
    assert "{" not in said
    assert all("41" in said for name in names - {"why", "example"})
    assert ("example" in names) == (EXAMPLE[lang].format(2, 3, 5) in said)


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
