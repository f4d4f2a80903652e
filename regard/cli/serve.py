"""`regard serve`: the explorer in a browser, for this machine alone.

It reads options, lets the first texts be read, opens a socket on loopback and prints its address; what is served is
`regard.explorer.server`'s.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import errno
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.captures import read_capture
from regard.cli.file_names import is_file
from regard.cli.files import read_one, require_reading
from regard.cli.look_image import is_picture
from regard.cli.models import bar
from regard.cli.options import Lang, known, options_in, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.explorer.jobs import ModelShelf
    from regard.session.session import Session

__all__ = ["add"]

LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}
OPENING_SECONDS = 60.0
"""After which a browser has opened the page: the file with its address is removed."""
FIRST = "The animal didn't cross the street because it was too tired."
"""What is looked at where nothing was given, by a model of texts."""
TAKES = "serve takes texts, files with a text, pictures, and captures that were saved, such as run.regard"


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'serve'
    """
    say = speaker(lang)

    @app.command(
        "serve",
        help=say(
            "The explorer in a browser: every head of a model that read a text or looked at a picture.\n\n"
            "WHAT is a text, a text file, '-' for standard input, a picture, or a capture (.regard); several are "
            "compared.\n\n"
            "It answers this machine alone, and only who has the token in the URL that it prints: a new one each time, "
            "or that of REGARD_TOKEN. Ctrl-C ends it. Needs pip install 'regard[explorer]'.",
            "브라우저에서 모델의 모든 헤드를 살펴봅니다.\n\n"
            "WHAT은 텍스트, 텍스트가 든 파일, '-'(표준 입력), 이미지, 캡처(.regard)입니다. "
            "여러 개면 서로 비교할 수 있습니다.\n\n"
            "이 컴퓨터에서만, 출력되는 URL의 토큰으로만 접속할 수 있습니다. 토큰은 실행할 때마다 새로 만들어지며, "
            "REGARD_TOKEN 환경 변수로 정할 수 있습니다. Ctrl-C로 끝냅니다. "
            "pip install 'regard[explorer]'가 필요합니다.",
        ),
    )
    def serve(
        what: Annotated[
            list[str] | None,
            typer.Argument(metavar="WHAT", help=say("Texts, pictures, captures.", "텍스트, 이미지, 캡처.")),
        ] = None,
        model: Annotated[
            list[str] | None,
            typer.Option(
                metavar="DIR|ID",
                help=say(
                    "Who reads; may be given again, the first reads. Default all-MiniLM-L6-v2.",
                    "읽을 모델(여러 번 가능, 첫째가 읽음). 기본은 all-MiniLM-L6-v2.",
                ),
            ),
        ] = None,
        ignore: Annotated[list[str] | None, options_in(lang).ignore] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut texts that are too long.", "너무 긴 텍스트는 자릅니다."))
        ] = False,
        port: Annotated[
            int, typer.Option(metavar="PORT", help=say("0 is one that is free.", "포트. 0이면 빈 포트를 고릅니다."))
        ] = 0,
        host: Annotated[
            str, typer.Option(metavar="HOST", help=say("127.0.0.1 or ::1.", "주소: 127.0.0.1 또는 ::1."))
        ] = "127.0.0.1",
        no_open: Annotated[
            bool, typer.Option("--no-open", help=say("Open no browser.", "브라우저를 열지 않습니다."))
        ] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the page.", "페이지 언어."))] = lang,
    ) -> None:
        spoken, token = known(lang), _token()
        listening = _listen(host, port)
        with listening:
            _need_server()
            from regard.explorer.jobs import ModelShelf

            models = ModelShelf(model or (), ignore=ignore or ())
            sessions = _sessions(what or (), models, truncate)
            _serve(listening, sessions, models, spoken, token=token, browser=not no_open)


def _token() -> str:
    """What whoever asks must have: that of REGARD_TOKEN, which other users cannot read, or a new one.

    Raises ValueError for one that is short, or that no address takes as it is.
    """
    token = os.environ.get("REGARD_TOKEN") or secrets.token_hex(16)
    if not re.fullmatch(r"[\w.~-]{16,128}", token, re.ASCII):
        raise ValueError(
            f"REGARD_TOKEN must be 16 to 128 letters, digits or any of _ - . ~, got {len(token)} characters"
        )
    return token


def _listen(host: str, port: int) -> socket.socket:
    """A socket on loopback. Raises ValueError for another host or no port, OSError where the port is taken."""
    if host not in LOOPBACK:
        raise ValueError(
            f"--host must be {', '.join(LOOPBACK)}, got {host!r}: the explorer answers this machine alone; from "
            "elsewhere, ssh -L PORT:127.0.0.1:PORT brings it to you"
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be 0 to 65535, got {port}")
    # asyncio sends at once (TCP_NODELAY) only where the protocol is named; else each answer waits 40 ms
    found = socket.socket(LOOPBACK[host], socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1" if host == "localhost" else host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        why = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise OSError(f"port {port} of {host} {why}; choose another with --port, or 0 for one that is free") from None
    return found


def _need_server() -> None:
    """Raise ImportError before anything is read where the libraries are missing."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(f"serve needs fastapi and uvicorn ({error}): pip install 'regard[explorer]'") from None


def _sessions(what: Sequence[str], models: "ModelShelf", truncate: bool) -> "list[Session]":
    """What was given, read or opened; without anything, a sentence, if there is a model that reads texts alone."""
    from regard.explorer.jobs import MOST_SESSIONS

    if list(what).count("-") > 1:
        raise ValueError("'-' is standard input, which can be read once")
    if len(what) > MOST_SESSIONS:
        raise ValueError(f"{len(what)} texts, pictures and captures are too many: at most {MOST_SESSIONS} are kept")
    if not what and models.offered and not models.sees(models.offered[0]):
        what = [FIRST]
    return [_open(Path(one)) if one.lower().endswith(".regard") else _read(one, models, truncate) for one in what]


def _open(path: Path) -> "Session":
    from regard.session.session import session_of

    return session_of(read_capture(path), path.name)


def _read(what: str, models: "ModelShelf", truncate: bool) -> "Session":
    from regard.session.image_session import look_at_image
    from regard.session.session import look_at

    found = is_file(what, TAKES)
    if is_picture(what):
        with bar(models.find(None).name) as tick, models.using(models.find(None), tick) as model:
            return look_at_image(what, model)
    text = read_one(None, Path(what)) if found else read_one(what, None)
    with bar(models.find(None).name) as tick, models.using(models.find(None), tick) as model:
        require_reading(model, text, f"regard serve photo.jpg --model {models.find(None).where}")
        return look_at(text, model, truncate=truncate)


def _serve(
    listening: socket.socket,
    sessions: "Sequence[Session]",
    models: "ModelShelf",
    lang: Lang,
    *,
    token: str,
    browser: bool,
) -> None:
    """Serve until Ctrl-C, which uvicorn passes on once everything has ended."""
    from regard.explorer.security import http_server
    from regard.explorer.server import app

    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/?token={token}" + ("#lang=ko" if lang == "ko" else "")
    server = http_server(app(sessions, models, port=port, token=token))
    # Not broken by us, so that it can be clicked and copied in a narrow terminal.
    Terminal().write((address, "bold"), speaker(lang)("   Ctrl-C ends it\n", "   끝내려면 Ctrl-C\n"))
    with _browsing(address) if browser else nullcontext():
        server.run(sockets=[listening])


@contextmanager
def _browsing(address: str) -> Iterator[None]:
    """Open an address in the browser by way of a file, which this user alone may read.

    The command line of a browser, with the address on it, could be read by every user of the machine. The file lies in
    the home directory because browsers in a sandbox (snap) do not see /tmp.
    """
    import webbrowser

    home = Path.home()
    number, name = tempfile.mkstemp(".html", "regard-", home if os.access(home, os.W_OK) else None)  # mode 0600
    with open(number, "w", encoding="utf-8") as file:
        link = escape(address)
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={link}"><a href="{link}">regard</a>')
    forget = threading.Timer(OPENING_SECONDS, Path(name).unlink, kwargs={"missing_ok": True})
    forget.daemon = True
    forget.start()
    # some browsers of terminals run until they are closed
    threading.Thread(target=webbrowser.open, args=(Path(name).as_uri(),), daemon=True).start()
    try:
        yield
    finally:
        forget.cancel()
        Path(name).unlink(missing_ok=True)
