"""The explorer in a notebook: `show(session)` is the page of `regard serve`, which asks this Python for its answers.

    >>> from regard.explorer import look_at
    >>> show(look_at("The animal didn't cross the street because it was too tired."))         # doctest: +SKIP

A session at the end of a cell shows itself: up to 288 tokens as the exported page, which stays in the notebook's file
and needs no widgets, so that VS Code, nbconvert and readers without Python show it too; a longer one as `show` does.

The page requests rows and tiles one by one, when they are looked at, so that a capture of 100,000 tokens opens at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from html import escape
from typing import Any

from regard.explorer import answers
from regard.explorer.export import SHORT, bundle, catalogues, html, modules, styles
from regard.lens.capture import Capture
from regard.locale import Lang, check_lang
from regard.session.effects import swap_word
from regard.session.session import Session, session_of

HEIGHT = 820  # pixels
INSTALL = "pip install 'regard[notebook]'"
# question → function, and the names of its arguments
QUESTIONS: dict[str, tuple[Callable[..., Mapping[str, Any] | Session], tuple[str, ...]]] = {
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
    "swap": (swap_word, ("token", "word")),  # a new session, of which the answer is the number
    "changes": (answers.changes, ("other",)),
    "predictions": (answers.predictions, ("without",)),
    "effects": (answers.effects, ("token", "key")),
    "measure": (answers.measure, ("token", "key", "layer", "head")),
    "page": (lambda session, lang, view: {"html": html(session, lang, view)}, ("lang", "view")),
}


def show(what: Session | Capture, *, lang: Lang = "en", height: int = HEIGHT) -> Any:
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
    sessions = [what if isinstance(what, Session) else session_of(what)]
    check_lang(lang)
    widget = _widget()(lang=lang, height=height)
    widget.on_msg(lambda sender, content, buffers: sender.send(answer(sessions, content)))
    return widget


def display(session: Session) -> dict[str, Any]:
    """What a notebook shows of a session, by MIME type: the exported page in a frame, or the widget if it is long.

    Both together would not do: nbconvert takes the widget then, and loads it from the web without its Python.
    """
    plain = {"text/plain": repr(session)}
    if len(session.tokens) > SHORT:
        with suppress(ImportError):
            return {**show(session)._repr_mimebundle_()[0], **plain}
    return {"text/html": framed(html(session), HEIGHT), **plain}


def framed(page: str, height: int) -> str:
    """A page as a frame inside another one: neither reaches the other's styles, scripts or storage."""
    style = f"display:block;width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{escape(page)}"></iframe>'


def answer(sessions: list[Session], message: object) -> dict[str, Any]:
    """The reply to one message of the page: {"id", "answer"}, or {"id", "error"} with a message.

    sessions: those of the widget, counted from 1; a word that is swapped adds one.
    message: {"id", "session", "ask": question, "given": {name: value}} with exactly the question's arguments.
    """
    number = message.get("id") if isinstance(message, dict) else None
    try:
        if not isinstance(message, dict) or not isinstance(message.get("given"), dict):
            raise TypeError(f'a message is {{"id", "session", "ask", "given": {{…}}}}, got {message!r}')
        question, arguments = message.get("ask"), dict(message["given"])
        if not isinstance(question, str) or question not in QUESTIONS:
            raise ValueError(f"{question!r} is not a question; there are {', '.join(QUESTIONS)}")
        function, names = QUESTIONS[question]
        if set(arguments) != set(names):
            raise ValueError(
                f"{question} takes {', '.join(names) or 'nothing'}; got {', '.join(arguments) or 'nothing'}"
            )
        for name in {"rows", "cols"} & set(names):
            if not isinstance(arguments[name], list) or [type(end) for end in arguments[name]] != [int, int]:
                raise TypeError(f"{name} must be [first, end], got {arguments[name]!r}")
        if "other" in arguments:
            arguments["other"] = _numbered(sessions, arguments["other"])
        result = function(_numbered(sessions, message.get("session")), *(arguments[name] for name in names))
        if isinstance(result, Session):
            sessions.append(result)
            result = {"session": str(len(sessions))}
        return {"id": number, "answer": result}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        return {"id": number, "error": str(error.args[0]) if isinstance(error, KeyError) else str(error)}


def _numbered(sessions: list[Session], number: object) -> Session:
    names = [str(n + 1) for n in range(len(sessions))]
    if number not in names:
        raise LookupError(f"there is no session {number!r}; there are {', '.join(names)}")
    return sessions[names.index(str(number))]


@cache
def module() -> str:
    """The page and its styles as one ES module for notebooks, whose default export is {render}."""
    script, name = bundle(modules(), "shell/notebook.js")
    arguments = f"{json.dumps(styles())}, {json.dumps(catalogues(), ensure_ascii=False)}"
    return f"{script}\nexport default {{ render: (place) => {name}.default.render(place, {arguments}) }};"


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
        height = traitlets.Int(HEIGHT).tag(sync=True)

    return Explorer
