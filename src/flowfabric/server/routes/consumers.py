"""Durable consumers of the event log: how far each is."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Struct, structs

from flowfabric.server.call import Call, Page
from flowfabric.server.operation import Operation, Scope, Within


class Consumer(Struct, frozen=True, kw_only=True):
    """A durable consumer, and how far behind it is.

    `cursor` is the last event it has passed, and `lag` how many events follow, of all families. `behind_since` is the
    time of the next one. `is_expired`: events after `cursor` were removed, and it stops until an operator moves it.
    `instance`, `host` and `pid` are of the process that works; none if none does.
    """

    name: str
    families: tuple[str, ...]
    filter: dict[str, Any]
    cursor: str
    lag: int
    behind_since: datetime | None
    is_expired: bool
    handled: int
    created_at: datetime
    moved_at: datetime | None
    failures: int
    failure: str | None
    instance: UUID | None
    host: str | None
    pid: int | None
    retention: timedelta


async def list_consumers(call: Call) -> Page:
    """List the durable consumers of the event log: their cursor, how many events follow, which process works."""
    found = await call.engine.list_consumers()
    return Page(items=[Consumer(**{**structs.asdict(one), "cursor": str(one.cursor)}) for one in found])


OPERATIONS = (
    Operation(
        method="GET", path="/v1/consumers", handler=list_consumers, engine=("list_consumers",), scope=Scope.READ,
        within=Within.EVERY, answers={200: list[Consumer]}, etag=True,
    ),
)  # fmt: skip
