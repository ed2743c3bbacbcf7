"""The event log: follow it, or read it page by page."""

from __future__ import annotations

from msgspec import Struct

from flowfabric.contracts import json_form
from flowfabric.errors import InvalidInput
from flowfabric.server.call import Call, EventStream, Page
from flowfabric.server.members import Limit
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.server.sse import LogFeed
from flowfabric.server.visible import RecordedEvent, event_for, sees_leases
from flowfabric.values.event import EventCursor, EventFilter, Family
from flowfabric.values.ids import ExecutionId, FlowId


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


async def follow_events(call: Call) -> EventStream:
    """Follow the event log as server-sent events.

    The id of each event is its cursor, and `Last-Event-ID` continues after it without loss or repetition; an event with
    an id alone moves the cursor past events that do not match. `reset`: events after the cursor are no longer kept, and
    its data has the cursor at which the log continues. `bye`: the server stops; connect again. A comment comes every 15
    seconds. The data of every other event is one event of the log, in the form that `page_events` lists; its `outcome`
    is set when the execution has ended.
    """
    asked: FollowEvents = call.query
    caller = call.caller
    after = call.request.headers.get("last-event-id") or asked.after
    feed = LogFeed(
        call.service.clients,
        call.service.engine,
        lambda event: json_form.encode(event_for(caller, event)).decode(),
        form_name=sees_leases(caller),
        families=asked.family,
        after=None if after is None else _cursor(after),
        chosen=_filter(asked, call.namespace),
        heartbeats=asked.heartbeats,
    )
    return EventStream(pieces=await feed.open())


async def page_events(call: Call) -> Page:
    """Read the event log page by page, oldest first.

    `next_cursor` is always set and continues the list, now or later: a page without items is the end of the log for
    now, or 50,000 events that do not match.
    """
    asked: PageEvents = call.query
    after, name = (asked.after, "after") if asked.cursor is None else (asked.cursor, "cursor")
    page = await call.engine.read_events(
        family=asked.family,
        after=None if after is None else _cursor(after, name),
        limit=asked.limit,
        filter=_filter(asked, call.namespace),
    )
    items = [event_for(call.caller, one) for one in page.items if asked.heartbeats or one.worker_type != "heartbeat"]
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


def _cursor(text: str, name: str = "after") -> EventCursor:
    try:
        return EventCursor.parse(text)
    except InvalidInput as error:
        raise InvalidInput(error.problem, field=name, allowed=error.allowed) from None


OPERATIONS = (
    Operation(
        method="GET", path="/v1/events", handler=follow_events,
        engine=(
            "follow", "subscribe_completion", "subscribe_lease_history", "subscribe_signal_delivery",
            "subscribe_operator_events", "subscribe_worker_events",
        ),
        scope=Scope.READ, within=Within.GIVEN, query=FollowEvents, answers={200: RecordedEvent},
        media="text/event-stream", streams=True, no_store=True,
    ),
    Operation(
        method="GET", path="/v1/events/page", handler=page_events, engine=("read_events",), scope=Scope.READ,
        within=Within.GIVEN, query=PageEvents, answers={200: list[RecordedEvent]}, etag=True,
    ),
)  # fmt: skip
