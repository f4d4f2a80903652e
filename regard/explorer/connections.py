"""The connections of the server: how many there are, and how long the head of a request may take to come.

uvicorn alone waits for the head of a request for ever.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.explorer.gate import RefusedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = ["Connection", "http_server"]

MOST_CONNECTIONS = 256
HEAD_SECONDS = 10.0
LINGER_SECONDS = 1.0


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
    """A connection that is closed where it is one too many, or where the head of a request does not come."""

    _deadline: asyncio.TimerHandle | None = None
    _received = False
    _too_many = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count it, and wait for the head of its first request."""
        super().connection_made(transport)
        self._too_many = len(self.connections) > MOST_CONNECTIONS
        if len(self.connections) > 2 * MOST_CONNECTIONS:  # not even told why
            transport.abort()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)

    def data_received(self, data: bytes) -> None:
        """Refuse it where it is one too many; else hand it on, and wait for what is missing of a head."""
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
        """Answer, and hang up once the client has: one that still sends would lose the answer to a reset."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        first = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}".encode()
        lines = [first, *(b": ".join(pair) for pair in refused.headers), b"", refused.body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
