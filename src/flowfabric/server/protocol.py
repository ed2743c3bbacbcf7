"""uvicorn's HTTP protocol with the limits that it does not have.

A connection must send the head of a request in time and within a size, and what cannot be read as HTTP is refused as a
problem. Everything after the head is limited by the app.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import h11

from flowfabric.server import problems
from flowfabric.server.metrics import CONNECTIONS, REFUSED, ServerMetrics
from flowfabric.server.problems import Problem
from flowfabric.server.sse import ABORT, SEND_SECONDS

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Base
else:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:  # without the extra `fast`
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base

HEAD_BYTES: Final = 64 * 1024
HEAD_SECONDS: Final = 10.0
# Connections accepted beyond the cap, to refuse them with a reason and to answer probes.
RESERVE: Final = 64
_UNREAD_BYTES: Final = 1024 * 1024  # of a body that is dropped; a longer one ends the connection
_HEAD: Final = b"HTTP/1."


def protocol_class(
    metrics: ServerMetrics,
    *,
    most: int,
    head_bytes: int = HEAD_BYTES,
    head_seconds: float = HEAD_SECONDS,
    unread_seconds: float = SEND_SECONDS,
    base: type[Base] = Base,
) -> type[asyncio.Protocol]:
    """The protocol of a server that takes `most` connections."""

    class Protocol(base):  # type: ignore[valid-type, misc]  # either of uvicorn's two
        _head = 0  # bytes of a head that is not complete
        _is_body = False  # what httptools reads is the body of a request
        _unread = 0  # bytes of a body that arrived after its request was answered
        _timer: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            inner: Any = self.app  # type: ignore[has-type]

            async def app(scope: Any, receive: Any, send: Any) -> None:
                scope.setdefault("extensions", {})[ABORT] = self._abort
                await inner(scope, receive, send)

            self.app = app

        def _abort(self) -> None:
            self.transport.abort()

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_Joined(transport, self.loop))
            metrics.change(CONNECTIONS, 1, {})
            if len(self.connections) > most + RESERVE:
                self._refuse(
                    503, "too_many_connections", "the server has as many connections as it takes", "connections"
                )
                return
            self._timer = self.loop.call_later(head_seconds, self._is_late)

        def connection_lost(self, exc: Exception | None) -> None:
            metrics.change(CONNECTIONS, -1, {})
            self._head_complete()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            was_body = self._reads_body()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._head_complete()
                return
            if was_body or self._reads_body():
                self._rest_of_body(len(data))
                return
            self._head += len(data)
            if self._head > head_bytes:
                self._refuse(431, "head_too_large", f"the head is longer than {head_bytes} bytes", "large_head")
            elif self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(head_seconds, self._is_late)

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self._is_body = True

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._is_body = False

        def _reads_body(self) -> bool:
            """Whether a part of the body of a request has not arrived yet."""
            connection = getattr(self, "conn", None)
            return self._is_body if connection is None else connection.their_state is h11.SEND_BODY

        def _rest_of_body(self, size: int) -> None:
            """Drop the rest of a body whose request was answered without it. The next request may follow."""
            self._unread += size
            if not self._reads_body():
                self._head_complete()
            elif self._unread > _UNREAD_BYTES:
                self.transport.close()
            elif self._timer is None:
                self._timer = self.loop.call_later(head_seconds, self._is_late)

        def on_response_complete(self) -> None:
            self.transport.flush()
            super().on_response_complete()
            self._watch_reader(self.transport.get_write_buffer_size())

        def _watch_reader(self, unread: int) -> None:
            """Cut off a client that takes nothing of an answer: closing would wait for it forever."""
            if unread:
                self.loop.call_later(unread_seconds, self._look_again, unread)

        def _look_again(self, before: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if unread >= before:
                self.transport.abort()
            else:
                self._watch_reader(unread)

        def _unsupported_upgrade_warning(self) -> None:
            """Say nothing: a client may offer other protocols, and gets its answer in this one."""

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "bad_request", msg.rstrip("."), None)

        def _is_late(self) -> None:
            self._timer = None
            if self._head:  # else the rest of a body that was answered already, or nothing
                self._refuse(408, "slow_head", "the head of the request did not arrive in time", "slow_head")
            else:
                self.transport.close()

        def _head_complete(self) -> None:
            self._head = self._unread = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, status: int, code: str, detail: str, reason: str | None) -> None:
            self._head_complete()
            if reason is not None:
                metrics.count(REFUSED, {"reason": reason})
            if not self.transport.is_closing():
                self.transport.write(raw_problem(Problem(status, code, detail)))
                self.transport.close()

    return Protocol


class _Joined:
    """A transport that sends the head of an answer together with the first part of its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if self._held:
            self._held.append(data)
            self.flush()
        elif data.startswith(_HEAD):
            self._loop.call_soon(self.flush)  # a body may not follow for a while
            self._held.append(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        if self._held:
            data, self._held = self._held, []
            if not self._transport.is_closing():  # its client may have left since it was written
                self._transport.writelines(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def raw_problem(problem: Problem) -> bytes:
    """A whole response for a request that no app can answer."""
    body = problems.encode(problem.document(""))
    headers = {
        "content-type": problems.MEDIA,
        "content-length": str(len(body)),
        "cache-control": "no-store",
        "connection": "close",
        **problem.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n{head}\r\n".encode() + body
