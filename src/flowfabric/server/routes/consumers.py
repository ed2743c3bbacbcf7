"""Durable consumers of the event log: how far each is."""

from __future__ import annotations

from flowfabric.server.call import Call, Page
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.values.consumer import ConsumerRecord


async def list_consumers(call: Call) -> Page:
    """List the durable consumers of the event log: their cursor, how many events follow, which process works."""
    return Page(items=await call.engine.list_consumers())


OPERATIONS = (
    Operation(
        method="GET", path="/v1/consumers", handler=list_consumers, engine=("list_consumers",), scope=Scope.READ,
        within=Within.EVERY, answers={200: list[ConsumerRecord]}, etag=True,
    ),
)  # fmt: skip
