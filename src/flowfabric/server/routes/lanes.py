"""Lanes: list them, pause, drain, disable and open them."""

from __future__ import annotations

from msgspec import Struct

from flowfabric.errors import NotFound
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.server.versions import check_match, stale
from flowfabric.values.lane import Lane, LaneState, LaneStats


class ListLanes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 100
    cursor: str | None = None


class SetLaneState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: LaneState
    new: bool = False  # also for a lane to which nothing was submitted yet


class ListedLane(Struct, frozen=True, kw_only=True):
    """A lane. `stats` is None for keys that are limited to namespaces: they count executions of all of them."""

    lane_id: str
    state: LaneState
    stats: LaneStats | None = None


class LaneStateShown(Struct, frozen=True, kw_only=True):
    lane_id: str
    state: LaneState


class LaneStateSet(Struct, frozen=True, kw_only=True):
    lane_id: str
    before: LaneState
    state: LaneState


async def list_lanes(call: Call) -> Page:
    """List lanes by name, with how many executions wait and run in each, and how long the oldest has waited.

    A key that is limited to namespaces gets names and states only.
    """
    page = await call.engine.list_lanes(cursor=call.query.cursor, limit=call.query.limit)
    stats: dict[str, LaneStats] = {}
    if call.caller.namespaces is None and page.items:
        stats = {one.lane_id: one for one in await call.engine.lane_stats([lane.lane_id for lane in page.items])}
    items = [ListedLane(lane_id=one.lane_id, state=one.state, stats=stats.get(one.lane_id)) for one in page.items]
    return Page(items=items, next_cursor=page.next_cursor)


async def read_lane_state(call: Call) -> Answer:
    """Read the state of a lane."""
    found = await _lane(call)
    return Answer(body=LaneStateShown(lane_id=found.lane_id, state=found.state), etag=_etag(found.state))


async def set_lane_state(call: Call) -> Answer:
    """Pause, drain, disable or open a lane.

    A paused lane accepts submissions, and workers claim nothing; a draining one refuses submissions, and workers claim
    the rest; a disabled one does neither. An unknown lane is refused unless `new` is true. With `If-Match`, the `ETag`
    that the state was read with, nothing changes if the state is another one now.
    """
    lane, body = call.path["lane"], call.body
    expected: LaneState | None = None
    if call.if_match is not None or not body.new:
        found = await _lane(call)
        if check_match(call, _etag(found.state), _changed(found.state)):
            expected = found.state
    before = await call.engine.set_lane_state(lane, body.state, expected=expected)
    if expected is not None and before is not expected:
        raise stale(_changed(before))
    return Answer(body=LaneStateSet(lane_id=lane, before=before, state=body.state), etag=_etag(body.state))


async def _lane(call: Call) -> Lane:
    name, cursor = call.path["lane"], None
    while True:
        page = await call.engine.list_lanes(cursor=cursor, limit=1000)
        for one in page.items:
            if one.lane_id == name:
                return one
        cursor = page.next_cursor
        if cursor is None or cursor > name:  # in the order of bytes, which are ASCII
            raise NotFound("lane", name)


def _etag(state: LaneState) -> str:
    return f'"{state}"'


def _changed(state: LaneState) -> str:
    return f"the lane is {state} now"


OPERATIONS = (
    Operation(
        method="GET", path="/v1/lanes", handler=list_lanes, engine=("list_lanes", "lane_stats"), scope=Scope.READ,
        within=Within.NONE, query=ListLanes, answers={200: list[ListedLane]}, etag=True,
    ),
    Operation(
        method="GET", path="/v1/lanes/{lane}/state", handler=read_lane_state, scope=Scope.READ, within=Within.NONE,
        answers={200: LaneStateShown}, etag=True,
    ),
    Operation(
        method="PUT", path="/v1/lanes/{lane}/state", handler=set_lane_state, engine=("set_lane_state",),
        scope=Scope.OPERATE, within=Within.EVERY, body=SetLaneState, answers={200: LaneStateSet}, etag=True,
    ),
)  # fmt: skip
