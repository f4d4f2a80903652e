"""The explorer in a notebook: `show(session)` is the page of `regard serve`, which asks this Python for its answers.

    >>> from regard.session.session import look_at
    >>> show(look_at("The animal didn't cross the street because it was too tired."))         # doctest: +SKIP

The page requests rows and tiles one by one, when they are looked at, so that a capture of 100,000 tokens opens at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from regard.explorer import answers
from regard.explorer.answers import checked_language
from regard.explorer.export import bundle, catalogues, html, modules, styles
from regard.lens.capture import Capture
from regard.locale import Lang
from regard.session.session import Session, session_of

INSTALL = "pip install 'regard[notebook]'"
# question → function, and the names of its arguments
QUESTIONS: dict[str, tuple[Callable[..., Mapping[str, Any]], tuple[str, ...]]] = {
    "overview": (answers.overview, ()),
    "tokens": (answers.tokens, ("start", "stop")),
    "head": (answers.head, ("layer", "head", "lang")),
    "ranked": (answers.ranked, ("count",)),
    "thumbnails": (answers.thumbnails, ()),
    "rows_of_token": (answers.rows_of_token, ("token", "layer", "width")),
    "link_in_heads": (answers.link_in_heads, ("token", "key", "layer")),
    "row": (answers.row, ("layer", "head", "token", "start", "stop")),
    "tile": (answers.tile, ("layer", "head", "rows", "cols", "size")),
    "steps": (answers.steps, ("layer", "head", "token", "key")),
    "image": (answers.image, ("number",)),
    "swap": (answers.swap, ("token", "word")),
    "predictions": (answers.predictions, ("without",)),
    "effects": (answers.effects, ("token", "key")),
    "measure": (answers.measure, ("token", "key", "layer", "head")),
    "page": (lambda session, lang, view: {"html": html(session, lang, view)}, ("lang", "view")),
}


def show(what: Session | Capture, *, lang: Lang = "en", height: int = 820) -> Any:
    """A notebook widget of a session or a capture.

    >>> show("a text")
    Traceback (most recent call last):
        ...
    TypeError: show takes a session (regard.session.session.look_at) or a capture (regard.watch), got str: 'a text'

    Args:
        what: a session or a capture.
        lang: the page's first language, "en" or "ko".
        height: in pixels, at least 200.

    Returns:
        An anywidget.

    Raises:
        TypeError: for anything else.
        ValueError: for an unknown language or a smaller height.
        ImportError: without anywidget.
    """
    if not isinstance(what, (Session, Capture)):
        raise TypeError(
            "show takes a session (regard.session.session.look_at) or a capture (regard.watch), "
            f"got {type(what).__name__}: {what!r}"
        )
    if height < 200:
        raise ValueError(f"height must be at least 200 pixels, got {height}")
    session = what if isinstance(what, Session) else session_of(what)
    widget = _widget()(lang=checked_language(lang), height=height)
    widget.on_msg(lambda sender, content, buffers: sender.send(answer(session, content)))
    return widget


def answer(session: Session, message: object) -> dict[str, Any]:
    """The reply to one message of the page: {"id", "answer"}, or {"id", "error"} with a message.

    message: {"id", "ask": question, "given": {name: value}} with exactly the question's arguments.
    """
    number = message.get("id") if isinstance(message, dict) else None
    try:
        if not isinstance(message, dict) or not isinstance(message.get("given"), dict):
            raise TypeError(f'a message is {{"id", "ask", "given": {{…}}}}, got {message!r}')
        question, given = message.get("ask"), message["given"]
        if not isinstance(question, str) or question not in QUESTIONS:
            raise ValueError(f"{question!r} is not a question; there are {', '.join(QUESTIONS)}")
        function, names = QUESTIONS[question]
        if set(given) != set(names):
            raise ValueError(f"{question} takes {', '.join(names) or 'nothing'}; got {', '.join(given) or 'nothing'}")
        for name in {"rows", "cols"} & set(names):
            if not isinstance(given[name], list) or [type(end) for end in given[name]] != [int, int]:
                raise TypeError(f"{name} must be [first, end], got {given[name]!r}")
        return {"id": number, "answer": function(session, *(given[name] for name in names))}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        return {"id": number, "error": str(error.args[0]) if isinstance(error, KeyError) else str(error)}


@cache
def module() -> str:
    """The page and its styles as one ES module for notebooks, whose default export is {render}."""
    script, name = bundle(modules(), "shell/notebook.js")
    given = f"{json.dumps(styles())}, {json.dumps(catalogues(), ensure_ascii=False)}"
    return f"{script}\nexport default {{ render: (place) => {name}.default.render(place, {given}) }};"


@cache
def _widget() -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError(f"a widget needs anywidget: {INSTALL}") from error

    class Explorer(anywidget.AnyWidget):
        """Shows a session. lang: the page's first language.  height: in pixels."""

        _esm = module()
        lang = traitlets.Unicode("en").tag(sync=True)
        height = traitlets.Int(820).tag(sync=True)

    return Explorer
