"""What stands before the server: only this machine's own pages come in, and no body that is too large.

A web page elsewhere can make a browser send requests to this machine. Such a request says so: its Host is not ours
(a name that was made to point here), or its Origin is not, or its browser says that it comes from another site.

It does not know what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOOPBACK", "Gate"]

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, nothing frames the page, nothing is kept."""


class _TooLargeError(Exception):
    """A body grew over its limit while it came."""


class Gate:
    """ASGI middleware.

    port: the server's own, which Host and Origin must name; 80 may be left out.
    limits: path → bytes of a body; a path that is not there takes none beyond `small`.
    """

    def __init__(self, app: ASGIApp, port: int, limits: Mapping[str, int], small: int = 4096) -> None:
        self.app, self.limits, self.small = app, limits, small
        self.hosts = {f"{host}:{port}" for host in LOOPBACK} | (set(LOOPBACK) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = _joined(scope["headers"])
        most = self.limits.get(scope["path"], self.small)
        problem = self._foreign(headers, scope["path"]) or _too_large(headers, most)
        if problem is not None:
            await _refuse(send, *problem)
            return
        await self._let_in(scope, receive, send, most)

    def _foreign(self, headers: Mapping[str, str], path: str) -> tuple[int, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host.lower() not in self.hosts:
            return 421, f"this server answers to {' or '.join(sorted(self.hosts))}, not to {host[:80]!r}"
        if origin is not None and origin.lower().removeprefix("http://") not in self.hosts:
            return 403, f"a page of {origin[:80]!r} may not ask: only the page that this server gave out"
        if headers.get("sec-fetch-site") == "cross-site" and path.startswith("/api/"):
            return 403, "a page of another site may not ask: only the page that this server gave out"
        return None

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, most: int) -> None:
        """Count the body while it comes; where it grows over its limit, whatever the app would answer is replaced."""
        came, refused = 0, False

        async def counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > most:
                raise _TooLargeError
            return message

        async def refuse_once() -> None:
            nonlocal refused
            if not refused:
                refused = True
                await _refuse(send, 413, f"the body is larger than {most:,} bytes, the most that is taken here")

        async def guarded(message: Message) -> None:
            if came > most:
                await refuse_once()
                return
            await send(_with_headers(message) if message["type"] == "http.response.start" else message)

        try:
            await self.app(scope, counted, guarded)
        except _TooLargeError:  # a route that reads the body itself
            await refuse_once()


def _joined(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name; one that came twice as both with a comma between, which is nobody's Host or Origin."""
    found: dict[str, str] = {}
    for name, value in ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in pairs):
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _with_headers(message: Message) -> Message:
    own = {name for name, _ in message["headers"]}
    more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
    return {**message, "headers": [*message["headers"], *more]}


def _too_large(headers: Mapping[str, str], most: int) -> tuple[int, str] | None:
    said = headers.get("content-length", "0")
    if not said.isascii() or not said.isdigit():
        return 400, f"content-length must be a number, got {said[:40]!r}"
    if int(said[:20]) > most:
        return 413, f"the body has {said[:20]} bytes, and at most {most:,} are taken here"
    return None


async def _refuse(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}, ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | HEADERS
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
