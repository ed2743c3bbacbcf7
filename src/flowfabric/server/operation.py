"""One row of the table of operations: what a route is, who may call it, and what it takes and returns."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from flowfabric.values.api_key import Scope

if TYPE_CHECKING:
    from flowfabric.server.call import Call

__all__ = ["CONTROL", "LARGE", "MEDIUM", "Empty", "Operation", "Repeats", "Scope", "Within"]

ROUTES: Final = "flowfabric.server.routes"
PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")  # a parameter in the template of a path
KIB = 1024
LARGE = 1024 * KIB  # submissions
MEDIUM = 256 * KIB  # signals and callbacks
CONTROL = 64 * KIB  # everything else


class Within(StrEnum):
    """How the namespaces of a key limit an operation.

    A key with namespaces gets the answer for "unknown" wherever it names something of another namespace.
    """

    EXECUTION = "execution"  # the path names an execution, whose namespace must be one of the key's
    FLOW = "flow"  # the path names a flow, likewise
    GIVEN = "given"  # the request names a namespace; one of the key's, which is implied if it has only one
    ITEMS = "items"  # the handler checks each item of the request, and refuses it alone
    EVERY = "every"  # concerns all namespaces: only keys without namespaces
    NONE = "none"  # belongs to no namespace: every key


class Repeats(StrEnum):
    """What the header `Idempotency-Key` does."""

    SAFE = "safe"  # a GET, a PUT or a DELETE: repeating it changes nothing more; the header is ignored
    OWN = "own"  # it becomes the idempotency key of the operation itself (`Call.idempotency_key`)
    KEPT = "kept"  # the answer is stored for 24 hours and given again
    SECRET = "secret"  # the answer has a secret and is not stored: a repeat is refused  # noqa: S105 - no password
    FENCED = "fenced"  # the worker protocol: repeatable by its fence


Instant = Annotated[datetime, Meta(tz=True)]  # in a request: with a time zone

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class Empty(Struct, frozen=True, forbid_unknown_fields=True):
    """No members: of a query without parameters, or of a body that may be left out."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation. The docstring of its handler describes it in the reference and in the OpenAPI document."""

    method: Method
    path: str  # a template such as `/v1/executions/{execution_id}/cancel`
    handler: Callable[[Call], Awaitable[Any]]
    scope: Scope | None  # None: no key is needed
    within: Within
    engine: tuple[str, ...] = ()  # the operations of `Engine` that it puts behind HTTP
    query: type[Struct] = Empty
    # None: it takes no body. A record whose members all have defaults may be left out. `bytes`: any body, as it is.
    body: type[Struct] | type[bytes] | None = None
    answers: Mapping[int, Any] = field(default_factory=dict)  # by status: the type of the body; None: no body
    media: str = "application/json"  # of the answers: also application/octet-stream, text/event-stream, ...
    also: tuple[str, ...] = ()  # other media types that a client may ask for
    limit: int = CONTROL  # bytes of the body
    repeats: Repeats = Repeats.SAFE
    made: str | None = None  # the path of what it makes, with ids of the path and of the answer: the header `Location`
    etag: bool = False  # its record has an ETag: answers carry it, and requests other than GET heed `If-Match`
    no_store: bool = False
    by_owner: bool = False  # only the owner of the schema may do it: it runs on the owner's connection, if there is one
    streams: bool = False  # the answer has no end of its own: no time limit, no compression

    @cached_property
    def name(self) -> str:
        """Its name in the OpenAPI document, in logs and in the audit log: that of its handler."""
        return self.handler.__name__

    @cached_property
    def chapter(self) -> str:
        """The noun it belongs to: the module of its handler, or the package of several modules."""
        return self.handler.__module__.removeprefix(f"{ROUTES}.").partition(".")[0]

    @cached_property
    def heeds_if_match(self) -> bool:
        """Whether it changes only the version that `If-Match` names."""
        return self.etag and self.method != "GET"

    @cached_property
    def is_audited(self) -> bool:
        """Whether the audit log has a row for each call: a mutation that needs `operate`, `admin` or a link."""
        return self.method != "GET" and self.scope in (None, Scope.OPERATE, Scope.ADMIN)
