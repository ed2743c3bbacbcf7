"""Failures in groups."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from flowfabric.server.call import Call
from flowfabric.server.members import Limit, tag_of
from flowfabric.server.namespace import given_namespace
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.values.failure import Failures
from flowfabric.values.state import State


class ListFailures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failures: all filters must match. `most`: how many executions to look at, the last to end first."""

    namespace: str | None = None
    lane: list[str] | None = None
    kind: list[str] | None = None
    state: list[State] | None = None
    tag: str | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None
    most: int = 10_000
    limit: Limit = 100


async def list_failures(call: Call) -> Failures:
    """Group executions that failed or expired by kind, error type and text.

    Ids, addresses and numbers in a text count as equal. `state` may also ask for cancelled and skipped ones.
    """
    query: ListFailures = call.query
    namespaces = call.caller.namespaces
    if query.namespace is not None:
        namespaces = (given_namespace(call.caller, query.namespace) or "",)
    found = await call.engine.list_failures(
        namespaces=namespaces,
        lane_ids=query.lane,
        kinds=query.kind,
        states=query.state or (State.FAILED, State.EXPIRED),
        tag=tag_of(query.tag),
        created_from=query.created_from,
        created_before=query.created_before,
        most=query.most,
        limit=query.limit,
    )
    if call.caller.hides_payloads:
        found = replace(found, groups=tuple(replace(one, message="", last_text="") for one in found.groups))
    return found


OPERATIONS = (
    Operation(
        method="GET", path="/v1/failures", handler=list_failures, engine=("list_failures",), scope=Scope.READ,
        within=Within.ITEMS, query=ListFailures, answers={200: Failures}, etag=True,
    ),
)  # fmt: skip
