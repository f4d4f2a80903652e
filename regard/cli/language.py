"""Which language the command line speaks: English, or Korean where the locale or `--lang` says so.

Both versions of a sentence stand side by side where it is used: `say("queries", "쿼리")`. This file does not know any
sentence, and errors are in English only, as the library's are.
"""

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

    arguments: as typed.  environment: LC_ALL, LC_MESSAGES and LANG are read, in this order, as gettext does.
    """
    asked = [value for option, value in pairwise(arguments) if option == "--lang"]
    asked += [argument.removeprefix("--lang=") for argument in arguments if argument.startswith("--lang=")]
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    choice = asked[-1] if asked else locale[:2].lower()
    return "ko" if choice == "ko" else "en"
