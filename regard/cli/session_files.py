"""A session written where the user says, as a capture and as a page, and what was written, printed.

It does not know what is shown of a session.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.language import Lang, speaker
from regard.cli.output_files import output_to
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.explorer.sessions import Session

__all__ = ["print_written", "write_session"]


def write_session(session: Session, html: Path | None, save: Path | None, lang: Lang) -> dict[str, str | None]:
    """Write the page and the capture where they were asked for; folders that are missing on the way are made.

    The pictures of the session are inside both.

    >>> from regard.explorer.sessions import Session
    >>> from regard.lens.capture import Capture
    >>> write_session(Session("toy", Capture(), ()), None, None, "en")
    {'html': None, 'saved': None}

    Raises OSError as `output_to`; else as `write_html` does.
    """
    if save is not None:
        with output_to(save):
            session.capture.save(save, photos=bool(session.pictures))
    if html is not None:
        from regard.explorer.exporting import write_html

        with output_to(html):
            write_html(session, html, lang=lang)
    return {"html": None if html is None else str(html), "saved": None if save is None else str(save)}


def print_written(written: dict[str, str | None], lang: Lang, out: Terminal) -> None:
    """Print which files were written.

    >>> print_written({"html": "page.html", "saved": None, "figure": None}, "en", Terminal())
    Page: page.html
    """
    say = speaker(lang)
    titles = {"html": say("Page", "페이지"), "saved": say("Capture", "캡처"), "figure": say("Figure", "그림")}
    for name, path in written.items():
        if path is not None:
            out.print(f"{titles[name]}: ", path)
