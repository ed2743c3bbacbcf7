"""The event log: follow it, or read it page by page."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct, structs

from flowfabric.contracts.json_form import to_json
from flowfabric.errors import InvalidInput
from flowfabric.server.call import Call, EventStream, Page
from flowfabric.server.members import Limit
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.server.sse import LogFeed
from flowfabric.values.event import Event, EventCursor, EventFilter, Family
from flowfabric.values.ids import AttemptId, ExecutionId, FlowId


class FollowEvents(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events: all filters must match; `family` may be repeated. `tag` is `key=value`.

    `after` is a cursor: that of an event, or `0` for the oldest event that is kept; without one only new events.
    """

    family: list[Family] | None = None
    namespace: str | None = None
    tag: str | None = None
    flow: FlowId | None = None
    execution: ExecutionId | None = None
    kind: str | None = None
    heartbeats: bool = False
    after: str | None = None


class PageEvents(FollowEvents, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As for following; without `after` or `cursor` from the oldest event that is kept."""

    cursor: str | None = None
    limit: Limit = 100


class LoggedEvent(Struct, frozen=True, kw_only=True):
    """One event. The end of a leased execution belongs to the families `lease` and `completion`.

    One of `lease_type`, `outcome`, `operator_type`, `signal_effect` and `worker_type` is set for each family.
    """

    cursor: str
    families: tuple[Family, ...]
    occurred_at: datetime
    execution_id: ExecutionId | None
    flow_id: FlowId | None
    namespace: str | None
    tags: dict[str, str]
    lane_id: str | None
    execution_kind: str | None
    parent_id: ExecutionId | None
    attempt_id: AttemptId | None
    attempt_index: int | None
    lease_type: str | None
    outcome: str | None
    operator_type: str | None
    signal_effect: str | None
    worker_type: str | None
    lease_epoch: int | None
    worker_id: str | None
    worker_instance_id: str | None
    reason: str | None
    revoked_by: str | None
    details: dict[str, Any] | None


_SAME = tuple(one.name for one in structs.fields(LoggedEvent) if one.name not in ("cursor", "families"))


def logged(event: Event) -> LoggedEvent:
    """An event as HTTP shows it: without the id of the lease, with which its reader could act as the holder."""
    return LoggedEvent(
        cursor=str(event.cursor), families=event.families, **{name: getattr(event, name) for name in _SAME}
    )


def written(event: Event) -> str:
    """The data of an event of the log among server-sent events."""
    return msgspec.json.encode(to_json(logged(event))).decode()


async def follow_events(call: Call) -> EventStream:
    """Follow the event log as server-sent events.

    The id of each event is its cursor, and `Last-Event-ID` continues after it without loss or repetition; an event with
    an id alone moves the cursor past events that do not match. `reset`: events after the cursor are no longer kept, and
    its data has the cursor at which the log continues. `bye`: the server stops; connect again. A comment comes every 15
    seconds. The data of every other event is one event of the log.
    """
    asked: FollowEvents = call.query
    after = call.request.headers.get("last-event-id") or asked.after
    feed = LogFeed(
        call.service.clients,
        call.service.engine,
        written,
        families=asked.family,
        after=None if after is None else _cursor(after),
        chosen=_filter(asked, call.namespace),
        heartbeats=asked.heartbeats,
    )
    return EventStream(pieces=await feed.open())


async def page_events(call: Call) -> Page:
    """Read the event log page by page, oldest first.

    `next_cursor` is always set, and continues, also later: a page without items is the end of the log for now, or
    50,000 events that do not match.
    """
    asked: PageEvents = call.query
    after = asked.cursor or asked.after
    page = await call.engine.read_events(
        family=asked.family,
        after=None if after is None else _cursor(after),
        limit=asked.limit,
        filter=_filter(asked, call.namespace),
    )
    items = [logged(one) for one in page.items if asked.heartbeats or one.worker_type != "heartbeat"]
    return Page(items=items, next_cursor=str(page.next_cursor))


def _filter(asked: FollowEvents, namespace: str | None) -> EventFilter:
    tag = None
    if asked.tag is not None:
        key, equals, value = asked.tag.partition("=")
        if not equals or not key:
            raise InvalidInput(f"got {asked.tag!r}", field="tag", allowed="key=value")
        tag = (key, value)
    return EventFilter(
        namespace=namespace,
        instance_tag=tag,
        flow_id=asked.flow,
        execution_id=asked.execution,
        kind=asked.kind,
    )


def _cursor(text: str) -> EventCursor:
    try:
        return EventCursor.parse(text)
    except InvalidInput as error:
        raise InvalidInput(error.problem, field="after", allowed=error.allowed) from None


OPERATIONS = (
    Operation(
        method="GET", path="/v1/events", handler=follow_events,
        engine=(
            "follow", "subscribe_completion", "subscribe_lease_history", "subscribe_signal_delivery",
            "subscribe_operator_events", "subscribe_worker_events",
        ),
        scope=Scope.READ, within=Within.GIVEN, query=FollowEvents, answers={200: LoggedEvent},
        media="text/event-stream", streams=True, no_store=True,
    ),
    Operation(
        method="GET", path="/v1/events/page", handler=page_events, engine=("read_events",), scope=Scope.READ,
        within=Within.GIVEN, query=PageEvents, answers={200: list[LoggedEvent]}, etag=True,
    ),
)  # fmt: skip
