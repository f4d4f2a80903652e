"""The explorer in a notebook: `show(session)` is the page of `regard serve`, which asks this Python for its answers.

    >>> from regard.session.session import look_at
    >>> show(look_at("The animal didn't cross the street because it was too tired."))         # doctest: +SKIP

Rows and tiles are asked for one by one, when they are looked at, so that a capture of 100,000 tokens opens at once.

It does not know what the page draws. It imports anywidget only inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from regard.explorer import answers
from regard.explorer.export import bundle, modules, styles
from regard.lens.capture import Capture
from regard.session.head_weights import spoken
from regard.session.session import Session, session_of
from regard.stages import Lang

__all__ = ["answer", "module", "show"]

INSTALL = "pip install 'regard[notebook]'"
ENTRY = "notebook.js"
# what may be asked → who answers, and by which names it is asked
QUESTIONS: dict[str, tuple[Callable[..., Mapping[str, Any]], tuple[str, ...]]] = {
    "overview": (answers.overview, ()),
    "tokens": (answers.tokens, ("start", "stop")),
    "head": (answers.head, ("layer", "head", "lang")),
    "row": (answers.row, ("layer", "head", "token", "start", "stop")),
    "tile": (answers.tile, ("layer", "head", "rows", "cols", "size")),
    "steps": (answers.steps, ("layer", "head", "token", "key")),
    "picture": (answers.image, ("number",)),
}


def show(what: Session | Capture, *, lang: Lang = "en", height: int = 820) -> Any:
    """A widget that shows a session, or a capture, in a notebook.

    >>> show("a text")
    Traceback (most recent call last):
        ...
    TypeError: show takes a session (regard.session.session.look_at) or a capture (regard.watch), got str: 'a text'

    lang: what the page speaks at first, "en" or "ko".  height: of the widget, in pixels.
    Raises TypeError for what is neither, ImportError without anywidget, ValueError for a language that is not spoken
    here or a height below 200.
    """
    if not isinstance(what, (Session, Capture)):
        raise TypeError(
            "show takes a session (regard.session.session.look_at) or a capture (regard.watch), "
            f"got {type(what).__name__}: {what!r}"
        )
    if height < 200:
        raise ValueError(f"height must be at least 200 pixels, got {height}")
    session = what if isinstance(what, Session) else session_of(what)
    widget = _widget()(lang=spoken(lang), height=height)
    widget.on_msg(lambda asked, content, buffers: asked.send(answer(session, content)))
    return widget


def answer(session: Session, message: object) -> dict[str, Any]:
    """The reply to one message of the page: {"id", "answer"}, or {"id", "error"} with what is wrong.

    >>> from regard.lens.capture import Capture
    >>> toy = Session("toy", Capture(), ("a", "b", "c"))
    >>> answer(toy, {"id": 7, "ask": "tokens", "given": {"start": 1, "stop": 3}})
    {'id': 7, 'answer': {'start': 1, 'labels': ['b', 'c']}}
    >>> answer(toy, {"id": 8, "ask": "weather", "given": {}})["error"]
    "'weather' cannot be asked; there are overview, tokens, head, row, tile, steps, picture"

    message: {"id", "ask": what, "given": {name: value}}, all names that the question has and no others.
    """
    number = message.get("id") if isinstance(message, dict) else None
    try:
        return {"id": number, "answer": _answered(session, message)}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:  # of KeyError, the words are its argument
        return {"id": number, "error": str(error.args[0]) if isinstance(error, KeyError) else str(error)}


def _answered(session: Session, message: object) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("given"), dict):
        raise TypeError(f'a message is {{"id", "ask", "given": {{…}}}}, got {message!r}')
    asked, given = message.get("ask"), message["given"]
    if not isinstance(asked, str) or asked not in QUESTIONS:
        raise ValueError(f"{asked!r} cannot be asked; there are {', '.join(QUESTIONS)}")
    reply, names = QUESTIONS[asked]
    if set(given) != set(names):
        raise ValueError(f"{asked} is asked with {', '.join(names) or 'nothing'}; got {', '.join(given) or 'nothing'}")
    return reply(session, *(_span(n, given[n]) if n in ("rows", "cols") else given[n] for n in names))


def _span(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list) or [type(end) for end in value] != [int, int]:
        raise TypeError(f"{name} must be [first, end], got {value!r}")
    return tuple(value)


@cache
def module() -> str:
    """The page and its styles as one ES module for notebooks, whose default export is {render}.

    >>> module().splitlines()[-1].startswith("export default { render:")
    True
    """
    script, name = bundle(modules(), ENTRY)
    return f"{script}\nexport default {{ render: (place) => {name}.default.render(place, {json.dumps(styles())}) }};"


@cache
def _widget() -> Any:
    """The class of the widget. Raises ImportError, naming the command that brings anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError(f"a widget needs anywidget: {INSTALL}") from error

    class Explorer(anywidget.AnyWidget):
        """Shows a session. lang: what the page speaks at first.  height: in pixels."""

        _esm = module()
        lang = traitlets.Unicode("en").tag(sync=True)
        height = traitlets.Int(820).tag(sync=True)

    return Explorer
