"""User-visible text in other languages: JSON catalogues keyed by the English text, read by terminal and page alike."""

import json
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

from regard.locale.errors import translate_error

__all__ = ["Lang", "catalogue", "translate", "translate_error"]

Lang = Literal["en", "ko"]


@cache
def catalogue(lang: str, part: str = "") -> dict[str, str]:
    """English text → text in `lang`, except for errors; of one file only with `part`, its name. English has none."""
    messages: dict[str, str] = {}
    if lang != "en":
        for file in (files(__name__) / lang).iterdir():
            if file.name == f"{part}.json" or not (part or file.name.startswith("errors_")):
                messages |= json.loads(file.read_text(encoding="utf-8"))
    return messages


def check_lang(lang: Lang) -> None:
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
