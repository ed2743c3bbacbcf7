"""One request on its way through an operation: what its handler gets, and what it may return."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from flowfabric.engine import Engine
from flowfabric.server.operation import Operation

if TYPE_CHECKING:
    from flowfabric.server.service import Service


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who calls: an API key, or a link (`name` is then what the audit log calls it)."""

    name: str
    key_id: str | None = None
    scopes: frozenset[str] = frozenset()
    namespaces: tuple[str, ...] | None = None  # None: all
    hides_payloads: bool = False
    address: str = ""


@dataclass(kw_only=True)
class Call:
    """A request whose path, query, body, key, scope and namespace have been checked.

    `engine` acts for the caller. In an audited operation it is bound to one transaction, in which the row of the audit
    log is written and whose operator events carry the caller's name: use it, not `service.engine`, for every mutation.
    """

    operation: Operation
    service: Service  # shared by all requests of the process: batching, followers, limits, settings
    engine: Engine
    caller: Caller
    scope: MutableMapping[str, Any]  # ASGI's, as is `receive`
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
    headers: Mapping[bytes, bytes]  # of the request
    path: Mapping[str, Any]  # UUIDs as UUID, numbers as int, the rest as text
    query: Any  # the record `operation.query`
    body: Any  # the record `operation.body`
    idempotency_key: str | None = None
    namespace: str | None = None  # with `Within.GIVEN`: the one that holds; None: all of them
    if_match: str | None = None

    @cached_property
    def request(self) -> Request:
        """The request as Starlette shows it."""
        return Request(self.scope, self.receive)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The return value of a handler for which a bare value (status 200, or the operation's only one) is not enough."""

    body: Any = None  # one of our records or plain JSON; bytes with a `media` of their own
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media: str | None = None
    etag: str | None = None  # of `body` by default
    target: str | None = None  # what the audit log names as the target; the path's ids by default
    # Work after the commit, when the connection has been given back, such as waiting; it returns the answer. The
    # answer that is kept for repeats is the one from before this work.
    then: Callable[[], Awaitable[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A list: `items` and the cursor of the next page, which the app turns into `next_cursor` and a `Link` header."""

    items: Any
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class EventStream:
    """Server-sent events, or lines of JSON: pieces of the body, written as they come."""

    pieces: AsyncIterator[bytes]
    media: str = "text/event-stream"
