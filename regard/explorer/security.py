"""Limits on who may connect and how large and slow a request may be."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from secrets import compare_digest
from typing import TYPE_CHECKING
from urllib.parse import parse_qs
from uuid import uuid4

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.locale import Lang, translate_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("regard.explorer")  # without a handler of its own, Python writes it to stderr
START = r"(?:/(?!/)|[A-Za-z]:[\\/]|\\\\)"
QUOTED = re.compile(rf"""(?P<quote>['"`])(?P<path>{START}[^'"`\n]*)(?P=quote)""")
BARE = re.compile(rf"""(?<![^\s'"`(\[=:,<]){START}[^\s'"`()\[\],;<>]+""")


def without_folders(words: str) -> str:
    """A message with each absolute path cut to its last part.

    >>> without_folders("cannot read '/home/me/my models/config.json': see /etc/motd, https://a.org/b and ../c")
    "cannot read 'config.json': see motd, https://a.org/b and ../c"
    """

    def last(path: str) -> str:
        return re.split(r"[\\/]", path.rstrip("\\/"))[-1]

    words = QUOTED.sub(lambda match: match["quote"] + last(match["path"]) + match["quote"], words)
    return BARE.sub(lambda match: last(match[0]), words)


def report(error: BaseException) -> str:
    """Log the traceback of an unexpected error to stderr, and return a message for the user that names it."""
    name = uuid4().hex[:8]
    LOG.error("error %s of the explorer:", name, exc_info=error)
    return f"{type(error).__name__}, error {name}: see the terminal of `regard serve`"


LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MOST_HEAD = 64 << 10  # a question of 4,096 characters in the address takes most of it
MOST_IN_FLIGHT = 128 << 20  # bytes of all bodies that are being received or answered
MOST_CONNECTIONS = 256
HEAD_SECONDS = 10.0
LINGER_SECONDS = 1.0
BODY_SECONDS, BODY_RATE = 10.0, 64 << 10  # a body may take so long, and a second more for each so many bytes of it
# Nothing is loaded from elsewhere, nothing inline runs, nothing frames the page, nothing is cached.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
NO_TOKEN = "the token of this server is missing or old: open the URL that `regard serve` shows in its terminal"
NO_TOKEN_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>regard</title></head>
<body>
<h1>regard</h1>
<p>Open the URL that <code>regard serve</code> shows in its terminal: it holds the token (<code>?token=…</code>) that
this page needs, a new one each time the server starts.</p>
<p lang="ko">터미널에 표시된 <code>regard serve</code>의 URL로 접속하세요. 이 페이지에 필요한 토큰이
그 주소에 들어 있으며(<code>?token=…</code>), 토큰은 서버를 시작할 때마다 바뀝니다.</p>
</body></html>
"""


def error_language(scope: Scope) -> Lang:
    """The language of an error, by the Accept-Language of the request; the page names its own there."""
    accepted = next((value for name, value in scope["headers"] if name.lower() == b"accept-language"), b"")
    return "ko" if accepted.strip().lower().startswith(b"ko") else "en"


class RefusedError(Exception):
    """A request that is answered with an error before a route sees it, or instead of the route's answer."""

    def __init__(self, status: int, words: str, *, page: str | None = None, **headers: str) -> None:
        super().__init__(words)
        self.status, self.words, self.page = status, words, page
        self.more = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self, lang: Lang = "en") -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body."""
        kind = "application/json" if self.page is None else "text/html; charset=utf-8"
        text = json.dumps({"error": translate_error(self.words, lang)}, ensure_ascii=False)
        body = (text if self.page is None else self.page).encode()
        sent = {"content-type": kind, "content-length": str(len(body)), "connection": "close"}
        return [(name.encode(), value.encode()) for name, value in (sent | HEADERS | self.more).items()], body

    async def answer(self, send: Send, lang: Lang) -> None:
        """Send it as a response of ASGI."""
        headers, body = self.response(lang)
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Gate:
    """ASGI middleware that checks Host, Origin, token and the size and speed of bodies.

    port: which Host and Origin must name; 80 may be left out.  limits: path → largest body in bytes; else 4,096.
    token: which a request must carry: as `Authorization: Bearer …`, as `/?token=…`, which sets a cookie, or as that.
    """

    def __init__(self, app: ASGIApp, port: int, token: str, limits: Mapping[str, int]) -> None:
        self.app, self.token, self.limits = app, token.encode(), limits
        self.hosts = {f"{host}:{port}" for host in LOOPBACK} | (set(LOOPBACK) if port == 80 else set())
        self.cookie = f"regard-{port}"  # a browser keeps one jar for all ports of a host
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[str, str] = {}  # one that came twice is joined with a comma, which matches no Host or Origin
        for key, value in scope["headers"]:
            name, text = key.decode("latin-1").lower(), value.decode("latin-1")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        most = self.limits.get(scope["path"], 4096)
        query = scope["query_string"].decode("latin-1") if scope["path"] == "/" else ""  # elsewhere token is a position
        in_address = parse_qs(query).get("token", [])
        try:
            length = self._check(scope, headers, in_address, most)
        except RefusedError as refused:
            await refused.answer(send, error_language(scope))
            return
        more = dict(HEADERS)
        if self._is_token(in_address) and scope["method"] == "GET":
            more["set-cookie"] = f"{self.cookie}={self.token.decode()}; Path=/; HttpOnly; SameSite=Strict"
        await self._let_in(scope, receive, send, most, length, more)

    def _check(self, scope: Scope, headers: Mapping[str, str], in_address: list[str], most: int) -> int:
        """The bytes that the body says it has, 0 where it does not say; raises RefusedError for a bad request."""
        # 1. What no browser sends and uvicorn would accept.
        texts = [scope["raw_path"], scope["query_string"], *headers, *headers.values()]
        size = sum(map(len, texts))
        if size > MOST_HEAD:
            raise RefusedError(431, f"the head of the request has {size:,} bytes, and at most {MOST_HEAD:,} are taken")
        if scope["http_version"] not in ("1.0", "1.1"):
            raise RefusedError(400, f"this server speaks HTTP/1.1, not HTTP/{scope['http_version']}")
        if "websocket" in headers.get("upgrade", "").lower():
            raise RefusedError(400, "this server speaks HTTP/1.1, and no WebSocket")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise RefusedError(400, "a request has a Content-Length or a Transfer-Encoding, not both")
        # 2. Who asks: DNS rebinding names another Host, a foreign page another Origin.
        host, origin = headers.get("host", ""), headers.get("origin")
        if host.lower() not in self.hosts:
            raise RefusedError(421, f"this server answers to {' or '.join(sorted(self.hosts))}, not to {host[:80]!r}")
        if origin is not None and origin.lower().removeprefix("http://") not in self.hosts:
            raise RefusedError(403, f"a page of {origin[:80]!r} may not ask: only the page that this server gave out")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            raise RefusedError(403, "a page of another site may not ask: only the page that this server gave out")
        # 3. The token. The page recognises a missing one by www-authenticate.
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        cookies = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
        tokens = [*in_address, *(value for name, _, value in cookies if name == self.cookie)]
        if not self._is_token([*tokens, bearer.strip()] if kind.lower() == "bearer" else tokens):
            page = NO_TOKEN_PAGE if "text/html" in headers.get("accept", "") else None
            raise RefusedError(403, NO_TOKEN, page=page, www_authenticate="Bearer")
        # 4. The size of the body.
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 20:
            raise RefusedError(400, f"content-length must be a number, got {length[:40]!r}")
        if int(length) > most:
            raise RefusedError(413, f"the body has {length} bytes, and at most {most:,} are taken here")
        if self.in_flight + int(length) > MOST_IN_FLIGHT:
            raise _busy()
        return int(length)

    def _is_token(self, values: Iterable[str]) -> bool:
        return any(compare_digest(value.encode(errors="replace"), self.token) for value in values)

    async def _let_in(
        self, scope: Scope, receive: Receive, send: Send, most: int, length: int, headers: Mapping[str, str]
    ) -> None:
        """Count and time the body while it arrives. A refusal replaces the app's answer."""
        came, held, waited, more_body, started = 0, length, 0.0, True, False
        refused: RefusedError | None = None
        clock = asyncio.get_running_loop()
        self.in_flight += held

        async def received() -> Message:
            nonlocal came, held, waited, more_body, refused
            if not more_body:  # who listens now waits for the client to leave
                return await receive()
            start = clock.time()
            try:
                async with asyncio.timeout(max(0.0, BODY_SECONDS + came / BODY_RATE - waited)):
                    message = await receive()
            except TimeoutError:
                waited += clock.time() - start
                refused = RefusedError(408, f"the body came too slowly: {came:,} bytes in {waited:.0f} s")
                raise refused from None
            waited += clock.time() - start
            came, more_body = came + len(message.get("body", b"")), message.get("more_body", False)
            self.in_flight, held = self.in_flight + max(0, came - held), max(held, came)
            if came > most:
                refused = RefusedError(413, f"the body is larger than {most:,} bytes, the most that is taken here")
            elif self.in_flight > MOST_IN_FLIGHT:
                refused = _busy()
            if refused is not None:
                raise refused
            return message

        async def guarded(message: Message) -> None:
            nonlocal started
            if refused is None:
                started = True
                if message["type"] == "http.response.start":
                    own = {name for name, _ in message["headers"]}
                    ours = [(name.encode(), value.encode()) for name, value in headers.items()]
                    added = [pair for pair in ours if pair[0] not in own]
                    message = {**message, "headers": [*message["headers"], *added]}
                await send(message)

        try:
            await self.app(scope, received, guarded)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            if started:
                raise
            refused = refused or RefusedError(500, f"the server failed: {report(error)}")
        finally:
            self.in_flight -= held
        if refused is not None and not started:
            await refused.answer(send, error_language(scope))


def _busy() -> RefusedError:
    return RefusedError(
        503, f"other requests are sending {MOST_IN_FLIGHT >> 20} MiB already: try again in a moment", retry_after="2"
    )


def http_server(app: ASGIApp) -> uvicorn.Server:
    """uvicorn for the explorer; `.run(sockets=[…])` serves until Ctrl-C, which it passes on."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="error",  # its warnings are about requests that were refused
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )


class Connection(H11Protocol):
    """A connection that is closed if there are too many, or if the head of a request does not arrive."""

    _deadline: asyncio.TimerHandle | None = None
    _received = False
    _too_many = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count it, and wait for the head of its first request."""
        super().connection_made(transport)
        self._too_many = len(self.connections) > MOST_CONNECTIONS
        if len(self.connections) > 2 * MOST_CONNECTIONS:  # too many to answer each
            transport.abort()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)

    def data_received(self, data: bytes) -> None:
        """Refuse a connection beyond the limit; else pass the data on, and wait for the rest of a head."""
        self._received = True
        if self._refused:
            return
        if self._too_many:
            words = f"there are {MOST_CONNECTIONS} connections already: close other tabs of the page, or try again"
            self._refuse(RefusedError(503, words, retry_after="2"))
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the head is there
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for what is no HTTP, also while a route still works on the request before it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        self._refuse(RefusedError(400, "this is no request of HTTP/1.1, or its head is larger than 64 KiB"))

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._received:
            self._refuse(RefusedError(408, f"the head of the request did not come within {HEAD_SECONDS:.0f} s"))
        else:
            self.transport.close()

    def _refuse(self, refused: RefusedError) -> None:
        """Answer, and close once the client has: closing earlier would reset the connection and lose the answer."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        first = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}".encode()
        headers, body = refused.response()
        lines = [first, *(b": ".join(pair) for pair in headers), b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
