"""The outermost layer of the server: what applies to every request.

It finds out who calls through trusted proxies, gives the request an id, refuses it beyond the limits, limits its time,
and reports its end to the metrics, the access log and the trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import Any, Final

from flowfabric.server import access_log, dispatch
from flowfabric.server.compression import COMPRESSES
from flowfabric.server.dispatch import CALLER, OPERATION, REQUEST_ID, ASGIScope, Receive, Send
from flowfabric.server.headers import secured
from flowfabric.server.limits import DEADLINE, Limits
from flowfabric.server.problems import Problem
from flowfabric.server.proxies import TrustedProxies
from flowfabric.server.rates import address_group, retry_after
from flowfabric.server.sse import ABORT
from flowfabric.server.telemetry import Telemetry

log = logging.getLogger("flowfabric.server")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_LAST_WORDS: Final = 5.0  # seconds to send the refusal of a request that took too long
UNKNOWN: Final = "unknown"  # the route of a request that fits none
# Probes are answered whatever the limits say: a busy server is not a dead one.
_PROBES: Final = frozenset({"/livez", "/readyz", "/healthz"})
ASGIApp = Callable[[ASGIScope, Receive, Send], Any]


class Front:
    """Wraps the app. `is_draining` says whether the server stops: its connections close after their answers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        proxies: TrustedProxies | None = None,
        telemetry: Telemetry | None = None,
        is_draining: Callable[[], bool] = lambda: False,
        logs_access: bool = True,
        check: Callable[[list[tuple[bytes, bytes]]], Problem | None] | None = None,
    ) -> None:
        self._app = app
        self._limits = limits
        self._proxies = proxies or TrustedProxies()
        self._telemetry = telemetry
        self._is_draining = is_draining
        self._logs_access = logs_access
        self._check = check  # looks at the headers of every request that is not a probe

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
                return
            await self._app(scope, receive, send)
            return
        await _Request(self, scope, receive, send).run()


class _Request:
    """One request on its way through."""

    __slots__ = ("_asked", "_began", "_body_read", "_front", "_receive", "_scope", "_send", "_status")

    def __init__(self, front: Front, scope: ASGIScope, receive: Receive, send: Send) -> None:
        self._front = front
        self._scope = scope
        self._receive = receive
        self._send = send
        self._began = time.perf_counter()
        self._status = 0  # not answered yet
        self._asked = False  # whether the body is being read
        self._body_read = False

    async def run(self) -> None:
        front, scope = self._front, self._scope
        peer = scope.get("client") or ("", 0)
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        address, scope["scheme"] = front._proxies.resolve(peer[0], scope["scheme"], headers)
        scope["client"] = (address, peer[1])
        scope[COMPRESSES] = True
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        if _REQUEST_ID.fullmatch(given):
            scope[REQUEST_ID] = given.decode()
        telemetry = front._telemetry
        if telemetry is not None:
            telemetry.began()
        try:
            if telemetry is not None and telemetry.traces is not None and telemetry.traces.concern(headers):
                with telemetry.traces.request(scope["method"], headers) as span:
                    await self._answer(address)
                    span.ended(self.route, self._status)
            else:
                await self._answer(address)
        finally:
            self._ended(address)

    @property
    def route(self) -> str:
        operation = self._scope.get(OPERATION)
        return UNKNOWN if operation is None else operation.path

    async def _answer(self, address: str) -> None:
        scope = self._scope
        refusal = self._too_much(address)
        try:
            if refusal is not None:
                raise refusal
            async with asyncio.timeout(self._front._limits.request_timeout) as deadline:
                scope[DEADLINE] = deadline
                await self._front._app(scope, self._received, self._sent)
        except TimeoutError:
            await self._give_up()
        except asyncio.CancelledError:
            if not self._front._is_draining():
                raise
            await self._cut_off()
        except Problem as problem:
            await self._refuse(problem)
        except Exception as error:
            log.exception("request %s failed", dispatch.request_id(scope))
            await self._refuse(error, logged=True)

    def _too_much(self, address: str) -> Problem | None:
        """Refuse a request before anything looks at it."""
        names = [name for name, _ in self._scope["headers"]]
        if b"transfer-encoding" in names and b"content-length" in names:
            # A proxy in front may have read another end of the body, and the rest as a request of its own.
            detail = "the body has two lengths: Content-Length and Transfer-Encoding"
            return Problem(400, "bad_request", detail, headers={"Connection": "close"})
        if self._scope["path"] in _PROBES:
            return None
        if self._front._check is not None and (refusal := self._front._check(self._scope["headers"])) is not None:
            return refusal
        limits = self._front._limits
        if limits.is_full():
            return self._counted(
                "connections",
                Problem(
                    503,
                    "too_many_connections",
                    "the server has as many connections as it takes",
                    headers={"Connection": "close"},
                ),
            )
        if wait := limits.addresses.take(address_group(address)):
            return self._counted(
                "rate",
                Problem(
                    429,
                    "too_many_requests",
                    "this address sends more requests than the server takes",
                    headers={"Retry-After": retry_after(wait)},
                ),
            )
        return None

    async def _give_up(self) -> None:
        """Refuse a request that takes too long. A client that does not take its answer loses the connection."""
        if self._status == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await self._refuse(self._too_slow())
                    return
        abort = self._scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    while (await self._receive())["type"] != "http.disconnect":  # until then it would answer for us
                        pass

    async def _cut_off(self) -> None:
        """Refuse a request that did not finish within the grace."""
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        words = "the server stops, and the request did not finish in time"
        await self._refuse(Problem(503, "draining", words, headers={"Connection": "close"}))

    def _too_slow(self) -> Problem:
        if self._asked and not self._body_read:
            return self._counted(
                "slow_body",
                Problem(408, "slow_body", "the body did not arrive in time", headers={"Connection": "close"}),
            )
        return self._counted(
            "timeout", Problem(503, "request_timeout", "the request took longer than the server allows")
        )

    def _counted(self, reason: str, problem: Problem) -> Problem:
        if self._front._telemetry is not None:
            self._front._telemetry.refused(reason)
        return problem

    async def _refuse(self, error: Exception, *, logged: bool = False) -> None:
        if self._status:
            return  # half of an answer was sent: uvicorn closes the connection, which says that it is not whole
        if logged:
            error = Problem(500, "internal_error", "the server failed; its log has the reason under this request id")
        await dispatch.respond(self._scope, self._sent, dispatch.refused(error, self._scope))

    async def _received(self) -> Any:
        self._asked = True
        message = await self._receive()
        if not message.get("more_body", False):
            self._body_read = True
        return message

    async def _sent(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = secured(message.get("headers", ()), self._scope["scheme"])
            if self._front._is_draining() and not any(name == b"connection" for name, _ in headers):
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)

    def _ended(self, address: str) -> None:
        front, scope = self._front, self._scope
        seconds = time.perf_counter() - self._began
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        status = self._status or 499  # the client left before there was an answer
        route = self.route
        if front._telemetry is not None:
            operation = scope.get(OPERATION)
            streams = operation is not None and operation.streams
            front._telemetry.request(method, route, status, seconds, streams=streams)
        if front._logs_access:
            caller = scope.get(CALLER)
            access_log.write(
                method=method,
                route=route,
                status=status,
                seconds=seconds,
                key_id=None if caller is None else caller.key_id,
                address=address,
                request_id=dispatch.request_id(scope),
            )
