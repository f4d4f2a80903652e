"""Which language the command line speaks: English, or Korean where the locale or `--lang` says so.

Both versions of a sentence stand side by side where it is used: `say("queries", "쿼리")`. This file does not know any
sentence, and errors are in English only, as the library's are.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

__all__ = ["Lang", "Say", "known", "preferred", "speaker"]

Lang = Literal["en", "ko"]
Say = Callable[[str, str], str]
"""say(english, korean) gives the one that is spoken."""


def known(lang: str) -> Lang:
    """A language that is spoken here.

    >>> known("ko")
    'ko'

    Raises ValueError with the languages there are.
    """
    for name in get_args(Lang):
        if name == lang:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"--lang must be {' or '.join(get_args(Lang))}, got {lang!r}")


def speaker(lang: Lang) -> Say:
    """The function that chooses between two versions of a sentence.

    >>> speaker("ko")("queries", "쿼리")
    '쿼리'
    """
    return lambda english, korean: korean if lang == "ko" else english


def preferred(arguments: Sequence[str], environment: Mapping[str, str]) -> Lang:
    """The language of `--lang` where it is given, otherwise that of the locale. Help needs it before options are read.

    >>> preferred(["mask", "causal"], {"LANG": "ko_KR.UTF-8"}), preferred(["--lang", "en"], {"LANG": "ko_KR.UTF-8"})
    ('ko', 'en')

    arguments: as typed.  environment: LC_ALL, LC_MESSAGES or LANG names the locale, the first that is set; LANGUAGE
    lists what is liked better, between colons, and is not read where the locale is C, as GNU gettext has it.
    """
    pairs = pairwise(["", *arguments])  # each argument after the one before it
    asked = [this.removeprefix("--lang=") for before, this in pairs if before == "--lang" or this.startswith("--lang=")]
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    own = _language(locale)
    liked = (
        [] if own in ("", "c", "posix") else [_language(name) for name in environment.get("LANGUAGE", "").split(":")]
    )
    spoken = [name for name in (liked if any(liked) else [own]) if name in get_args(Lang)]
    return "ko" if [*asked[-1:], *spoken, "en"][0] == "ko" else "en"


def _language(locale: str) -> str:
    """The language of a locale, without country, encoding and variant.

    >>> _language("ko_KR.UTF-8"), _language("kok_IN"), _language("C.UTF-8")
    ('ko', 'kok', 'c')
    """
    return re.split("[_.@]", locale)[0].lower()
