"""The way of one request.

It passes, in this order: route, API key, scope, rate, body limit, path and query and body as records, namespace,
repeated requests, and for operations in the audit log the transaction with its row. Only then its handler runs. Each of
these may refuse it; the answer is then a problem.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from flowfabric.engine.acting import Actor
from flowfabric.errors import FlowFabricError
from flowfabric.server import audit, cursors, idempotency, problems
from flowfabric.server.answers import Finished, Writer
from flowfabric.server.call import Answer, Call, Caller
from flowfabric.server.compression import COMPRESSES, VARIES, WORTH_IT, compressing, is_compressed
from flowfabric.server.limits import more_time
from flowfabric.server.located import located
from flowfabric.server.namespace import check_namespace, given_namespace
from flowfabric.server.operation import Operation, Repeats, Scope, Within
from flowfabric.server.problems import FieldError, Problem
from flowfabric.server.requests import Disconnected, Reader, read_body
from flowfabric.server.service import Service
from flowfabric.server.sse import Feed, Permit, serve

log = logging.getLogger("flowfabric.server")
ASGIScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
REQUEST_ID: Final = "flowfabric.request_id"  # in the scope: set by the first part that needs it
OPERATION: Final = "flowfabric.operation"
CALLER: Final = "flowfabric.caller"
_KEY_LIMIT: Final = 255
_EVENTS: Final = (b"content-type", b"text/event-stream")
_ONCE: Final = frozenset(
    (b"authorization", b"content-type", b"idempotency-key", b"if-match")
)  # a proxy may have heeded the other one


class Endpoint:
    """One operation as an ASGI application."""

    def __init__(self, operation: Operation, service: Service) -> None:
        self.operation = operation
        self._service = service
        self._reader = Reader(operation)
        self._writer = Writer(operation)
        # Its answer may come long after the key was looked up.
        self._waits = not {"wait", "block_seconds"}.isdisjoint(operation.query.__struct_fields__)
        self._has_cursor = "cursor" in operation.query.__struct_fields__

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send, values: Sequence[str]) -> None:
        """Answer one request; `values` are the parameters of its path."""
        scope[OPERATION] = self.operation
        try:
            finished = await self._answer(scope, receive, values)
        except Disconnected:
            return
        except Exception as error:
            finished = refused(error, scope)
        await respond(scope, send, finished, receive)

    async def _answer(self, scope: ASGIScope, receive: Receive, values: Sequence[str]) -> Finished:
        operation, service = self.operation, self._service
        headers = _headers(scope)
        client = scope.get("client")
        try:
            caller = await self._caller(headers, client[0] if client else "")
        except _MissingScope as refusal:
            scope[CALLER] = refusal.caller
            if operation.is_audited:
                service.admit(operation, refusal.caller)
                await audit.refuse(service, operation, refusal.caller, values, request_id(scope))
            raise
        scope[CALLER] = caller
        service.admit(operation, caller)
        reader = self._reader
        path = reader.path(values) if values else {}
        query = reader.query(scope["query_string"])
        if operation.streams:
            more_time(scope, None)
        elif (waits := getattr(query, "wait", None)) is not None:
            more_time(scope, float(waits))
        body, data = None, b""
        if operation.method != "GET":
            data = await read_body(receive, headers, operation, service.limit_of(operation))
            body = reader.body(data, headers.get(b"content-type"))
        call = Call(
            operation=operation,
            service=service,
            engine=service.engine,
            caller=caller,
            scope=scope,
            receive=receive,
            headers=headers,
            path=path,
            query=query,
            body=body,
            idempotency_key=_idempotency_key(headers, operation),
        )
        if (tag := headers.get(b"if-match")) is not None:
            call.if_match = tag.decode("latin-1")
        if operation.within is Within.GIVEN:
            if hasattr(query, "namespace"):
                call.namespace = given_namespace(caller, query.namespace)
            else:
                call.namespace = given_namespace(caller, getattr(body, "namespace", None), pointer="/namespace")
        if self._has_cursor and query.cursor is not None:
            call.query = replace(query, cursor=cursors.unseal(query.cursor, *self._writer.filters(call)))
        if operation.is_audited or _is_kept(call):
            return await self._in_transaction(call, data, scope)
        finished = await self._finished(call, await self._handle(call))
        if self._waits:
            await self._caller(headers, caller.address)
        if isinstance(finished.pieces, Feed) and operation.scope is not None:
            shown = (operation.name, caller, headers.get(b"authorization"))
            finished.pieces.permit = Permit(shown, lambda: self._is_still(caller, headers))
        return finished

    async def _is_still(self, caller: Caller, headers: dict[bytes, bytes]) -> bool:
        """Whether the API key of a request works as it did."""
        try:
            return await self._caller(headers, caller.address) == caller
        except Problem:
            return False

    async def _handle(self, call: Call) -> Any:
        if call.caller.namespaces is not None:
            await check_namespace(call)
        return await self.operation.handler(call)

    async def _finished(self, call: Call, result: Any) -> Finished:
        if isinstance(result, Answer) and result.then is not None:
            result = await result.then()
        return self._writer.write(call, result)

    async def _in_transaction(self, call: Call, data: bytes, scope: ASGIScope) -> Finished:
        result: Any = None

        async def work(actor: Actor) -> Finished:
            nonlocal result
            shown: Any = None
            try:
                shown = result = await self._handle(call)
            except Problem as problem:
                shown = problem.answer
                raise
            finally:
                if isinstance(shown, Answer) and shown.target is not None:
                    actor.target = shown.target
            return self._writer.write(call, result)

        if _is_kept(call):
            finished = await idempotency.once(call, data, request_id(scope), work, lambda error: refused(error, scope))
        else:
            finished = await audit.acting(call, request_id(scope), work)
        if isinstance(result, Answer) and result.then is not None:
            return await self._finished(call, result)
        return finished

    async def _caller(self, headers: dict[bytes, bytes], address: str) -> Caller:
        scope, keys = self.operation.scope, self._service.keys
        if scope is None:
            return Caller(name="", address=address)
        shown = headers.get(b"authorization", b"").decode("latin-1")
        kind, _, key = shown.partition(" ")
        caller = None
        if keys is not None:
            caller = await keys.caller(key.strip() if kind.lower() == "bearer" else "", address)
        if caller is None:
            raise Problem(
                401,
                "unauthenticated",
                "there is no valid API key; send it as `Authorization: Bearer ffk_...`",
                headers={"WWW-Authenticate": 'Bearer realm="flowfabric"'},
            )
        if scope not in caller.scopes and Scope.ADMIN not in caller.scopes:
            raise _MissingScope(caller, scope)
        return caller


class _MissingScope(Problem):
    """The API key is known, and lacks the scope."""

    def __init__(self, caller: Caller, scope: Scope) -> None:
        super().__init__(403, "forbidden", f"the API key lacks the scope {scope}")
        self.caller = caller


def _headers(scope: ASGIScope) -> dict[bytes, bytes]:
    given: list[tuple[bytes, bytes]] = scope["headers"]
    headers = dict(given)
    if len(headers) < len(given):
        names = [name for name, _ in given]
        for name in _ONCE:
            if names.count(name) > 1:
                raise Problem(400, "bad_request", f"the header {name.decode()} is given more than once")
    return headers


def _is_kept(call: Call) -> bool:
    """Whether the answer is kept for repeats."""
    return call.idempotency_key is not None and call.operation.repeats in (Repeats.KEPT, Repeats.SECRET)


def _idempotency_key(headers: dict[bytes, bytes], operation: Operation) -> str | None:
    shown = headers.get(b"idempotency-key")
    if shown is None or operation.repeats in (Repeats.SAFE, Repeats.FENCED):
        return None
    key = shown.decode("latin-1").strip()
    if not 0 < len(key) <= _KEY_LIMIT or not key.isprintable():
        raise Problem(
            422,
            "invalid_request",
            "Idempotency-Key: not a key",
            errors=[FieldError("not a key", parameter="Idempotency-Key", allowed=f"1 to {_KEY_LIMIT} characters")],
        )
    return key


def refused(error: Exception, scope: ASGIScope) -> Finished:
    """The answer for an error."""
    if isinstance(error, FlowFabricError):
        error = problems.problem_of(error)
        if (operation := scope.get(OPERATION)) is not None:  # None: a page beside the operations
            error = located(error, operation)
    elif not isinstance(error, Problem):
        log.error("request %s failed", request_id(scope), exc_info=error)
        error = problems.internal()
    shown = error.answer
    given = error.headers if shown is None else {**error.headers, **shown.headers}
    headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    headers.append((b"content-type", ((shown and shown.media) or problems.MEDIA).encode()))
    headers.append((b"cache-control", b"no-store"))
    if shown is not None:
        return Finished(error.status, headers, shown.body)
    body = problems.encode(error.document(request_id(scope), scope.get("root_path", "")))
    return Finished(error.status, headers, body)


def request_id(scope: ASGIScope) -> str:
    """The id of a request, made when it is first asked for."""
    found: str | None = scope.get(REQUEST_ID)
    if found is None:
        found = scope[REQUEST_ID] = os.urandom(16).hex()
    return found


async def respond(scope: ASGIScope, send: Send, finished: Finished, receive: Receive | None = None) -> None:
    """Send a response. One with pieces needs `receive`, to notice that its client left."""
    headers = finished.headers
    headers.append((b"x-request-id", request_id(scope).encode()))
    if finished.pieces is None and finished.status not in (204, 304):
        headers.append((b"content-length", str(len(finished.body)).encode()))
    if (finished.pieces is None and len(finished.body) < WORTH_IT) or _EVENTS in headers:
        await _send(scope, receive, send, finished)
        return
    if not is_compressed(scope):
        if scope.get(COMPRESSES, False):
            headers.append(VARIES)
        await _send(scope, receive, send, finished)
        return

    async def app(scope: ASGIScope, receive: Receive | None, send: Send) -> None:
        await _send(scope, receive, send, finished)

    await compressing(app, scope)(scope, receive, send)


async def _send(scope: ASGIScope, receive: Receive | None, send: Send, finished: Finished) -> None:
    await send({"type": "http.response.start", "status": finished.status, "headers": finished.headers})
    if scope["method"] == "HEAD":
        await send({"type": "http.response.body", "body": b""})
        return
    if isinstance(finished.pieces, Feed) and receive is not None:
        await serve(finished.pieces, scope, receive, send)
        return
    if finished.pieces is not None:
        async for piece in finished.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": finished.body})
