"""Durable consumers of the event log: how far each is."""

from __future__ import annotations

from msgspec import Struct

from flowfabric.server.call import Call, Page
from flowfabric.server.members import Limit
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.values.consumer import ConsumerRecord


class ListConsumers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 100
    cursor: str | None = None


async def list_consumers(call: Call) -> Page:
    """List the durable consumers of the event log: their cursor, how many events follow, which process works."""
    query: ListConsumers = call.query
    found = await call.engine.list_consumers(after=query.cursor, limit=query.limit + 1)
    items = found[: query.limit]
    return Page(items=items, next_cursor=items[-1].name if len(found) > query.limit else None)


OPERATIONS = (
    Operation(
        method="GET", path="/v1/consumers", handler=list_consumers, engine=("list_consumers",), scope=Scope.READ,
        within=Within.EVERY, query=ListConsumers, answers={200: list[ConsumerRecord]}, etag=True,
    ),
)  # fmt: skip
