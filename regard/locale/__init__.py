"""User-visible text in other languages: JSON catalogues keyed by the English text, read by terminal and page alike."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib.resources import files
from typing import Literal, get_args

__all__ = ["Lang", "catalogue", "translate", "translate_error"]

Lang = Literal["en", "ko"]


@cache
def catalogue(lang: str, part: str = "") -> dict[str, str]:
    """English text → text in `lang`, except for errors; of one file only with `part`, its name. English has none."""
    return _messages(lang, lambda name: name == f"{part}.json" or not (part or name.startswith("errors_")))


def _messages(lang: str, wanted: Callable[[str], bool]) -> dict[str, str]:
    messages: dict[str, str] = {}
    if lang != "en":
        for file in (files(__name__) / lang).iterdir():
            if wanted(file.name):
                messages |= json.loads(file.read_text(encoding="utf-8"))
    return messages


def check_lang(lang: str) -> None:
    """Raise ValueError for a language other than "en" and "ko"."""
    if lang not in get_args(Lang):
        raise ValueError(f"lang must be 'en' or 'ko', got {lang!r}")


def translate(text: str, lang: str = "en", /, **values: object) -> str:
    """`text` in a language, with `values` filled into its {fields}.

    >>> translate("{count} heads", "en", count=3)
    '3 heads'

    Raises:
        KeyError: if the catalogue of `lang` lacks the text; tests/test_locale.py finds such texts.
    """
    message = text if lang == "en" else catalogue(lang)[text]
    return message.format(**values) if values else message


# -------------------------------------------------------------------------------------------------------------- errors

# A field, and a pair of particles such as 을/를: the value is followed by the one that fits its last sound.
FIELD = re.compile(r"\{(\d+)(?::([^{}]*))?\}")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"", re.DOTALL)
ITEM = r"(?:'[^']*'|\"[^\"]*\"|[^\s,]+)"
LIST = re.compile(rf"({ITEM}(?:, {ITEM})*),? (and|or) ({ITEM})")
JOINTS = ("\n", "; ", ": ")


def translate_error(message: str, lang: str = "en") -> str:
    """An error message in a language; unchanged where no template of the catalogue fits it.

    >>> translate_error("there is no file 'a.txt'", "ko")
    "'a.txt' 파일이 없습니다"

    Args:
        message: of an exception or a warning, as English code made it. A value in it that is a message itself, such as
            the reason of a failure, is translated as well.
        lang: en, or a language with a catalogue.
    """
    try:
        return message if lang == "en" else _translated(message, lang)[0]
    except RecursionError:  # a text of thousands of phrases
        return message


@lru_cache(maxsize=1024)
def _translated(text: str, lang: str) -> tuple[str, int]:
    """A text in a language, and how many of its characters were translated: the most that any template can."""
    best, most = text, 0
    if words := LIST.fullmatch(text):
        best = f"{words[1]}{', ' if words[2] == 'and' else ' 또는 '}{words[3]}"
    for parts, joint in _split(text):
        translated = [_translated(part, lang) for part in parts]
        if (known := sum(part[1] for part in translated)) > most:
            best, most = joint.join(part[0] for part in translated), known
    for pieces, translation in _templates(lang):
        values = _values(text, pieces)
        if values is not None:
            own = [(value, 0) if QUOTED.fullmatch(value) else _translated(value, lang) for value in values]
            if (known := sum(map(len, pieces)) + sum(value[1] for value in own)) > most:
                best, most = _filled(translation, [value[0] for value in own]), known
    return best, most


def _split(text: str) -> Iterator[tuple[list[str], str]]:
    """A text cut between messages that code has joined: everywhere, or before its last part."""
    for joint in JOINTS:
        parts = text.split(joint)
        if len(parts) > 1:
            yield parts, joint
        if 2 < len(parts) < 10:
            yield [joint.join(parts[:-1]), parts[-1]], joint


def _filled(translation: str, values: list[str]) -> str:
    return FIELD.sub(lambda field: values[int(field[1])] + particle(values[int(field[1])], field[2]), translation)


@cache
def _templates(lang: str) -> list[tuple[tuple[str, ...], str]]:
    """The text between the fields of each template, and its translation."""
    templates = _messages(lang, lambda name: name.startswith("errors_"))
    pairs = [(tuple(template.split("{}")), translation) for template, translation in templates.items()]
    return [pair for pair in pairs if re.search(r"[^\W\d_]", "".join(pair[0]))]  # "{}: {}" would fit anything


def _values(text: str, pieces: tuple[str, ...]) -> list[str] | None:
    """What stands between the pieces, each taken where it comes first; None if they do not make up the text."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return [] if text == first else None
    if not (text.startswith(first) and text.endswith(last)):
        return None
    values, at, end = [], len(first), len(text) - len(last)
    for piece in pieces[1:-1]:
        stop = text.find(piece, at, end)
        if stop < 0:
            return None
        values.append(text[at:stop])
        at = stop + len(piece)
    return [*values, text[at:end]] if at <= end else None


# ------------------------------------------------------------------------------------------------------------ particles

# As a Korean reads English: the letters L, M, N, R by name; the ends of words whose last syllable closes.
SPELT = re.compile(r"[A-Z]+|[^aeiouyAEIOUY]+")
CLOSED = re.compile(r"(?:l|le|m|n|ng|me|ne|type|ck|(?<![aeiou])[aeiou][kptc]|ook|oup)")
CLOSED_DIGITS, L_DIGITS = "013678", "178"


def particle(value: str, pair: str | None) -> str:
    """The form of a pair of particles after a value: 을 or 를.

    >>> [value + particle(value, "으로/로") for value in ("레이어 3", "'model'", "토큰", "(tokens)")]
    ['레이어 3으로', "'model'로", '토큰으로', '(tokens)로']
    """
    if not pair:
        return ""
    # Whether the value ends in a consonant as it is read, and whether that is ㄹ.
    value = re.sub(r"[^\w%]+$", "", value)
    last, word = value[-1:], re.search(r"[A-Za-z]*$", value)[0]  # type: ignore[index]
    if "가" <= last <= "힣":
        final = (ord(last) - ord("가")) % 28
        closed, is_l = final > 0, final == 8
    elif last.isdigit():
        closed, is_l = last in CLOSED_DIGITS, last in L_DIGITS
    elif SPELT.fullmatch(word):
        closed, is_l = last in "lmnrLMNR", last in "lrLR"
    else:
        closed, is_l = bool(re.search(rf"{CLOSED.pattern}$", word.lower())), bool(re.search(r"le?$", word.lower()))
    with_consonant, with_vowel = pair.split("/")[:: -1 if pair == "와/과" else 1]
    return with_consonant if closed and not (is_l and pair == "으로/로") else with_vowel
