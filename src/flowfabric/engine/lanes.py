"""Lanes: named queues and what they do with work."""

from __future__ import annotations

from collections.abc import Collection

from flowfabric.engine.calls import Calls, check_limit, check_list
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_lane
from flowfabric.values.lane import Lane, LaneState, LaneStats
from flowfabric.values.page import Page


class Lanes(Calls):
    """list_lanes, set_lane_state, lane_stats."""

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 100) -> Page[Lane, str]:
        """All lanes by name."""
        size = check_limit(limit, 1000)
        after = None if cursor is None else check_lane(cursor, "cursor")
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select name, state, registered_at, registered_by from flowfabric.list_lanes($1, $2)",
            after,
            size + 1,
            repeatable=True,
        )
        items = [
            Lane(
                lane_id=row["name"],
                state=LaneState(row["state"]),
                registered_at=row["registered_at"],
                registered_by=row["registered_by"],
            )
            for row in found[:size]
        ]
        return Page(items, items[-1].lane_id if len(found) > size else None)

    async def set_lane_state(self, lane_id: str, state: LaneState | str) -> LaneState:
        """Pause, drain, disable or open a lane; answers the state before. An unknown lane is registered."""
        name = check_lane(lane_id)
        try:
            wanted = LaneState(state)
        except ValueError:
            raise InvalidInput(f"got {state!r}", field="state", allowed=", ".join(LaneState)) from None
        row = await self._row("select flowfabric.set_lane_state($1, $2) as before", name, wanted.value)
        return LaneState(row["before"])

    async def lane_stats(self, lane_ids: Collection[str] | None = None) -> list[LaneStats]:
        """What waits, since when, and what runs, per lane."""
        names = (
            None if lane_ids is None else [check_lane(lane, "lane_ids") for lane in check_list(lane_ids, "lane_ids")]
        )
        found = await self._fetch("select * from flowfabric.lane_stats($1)", names, repeatable=True)
        return [
            LaneStats(
                lane_id=row["name"],
                state=LaneState(row["state"]),
                depth=row["depth"],
                oldest_age=None if row["oldest_at"] is None else row["at"] - row["oldest_at"],
                delayed=row["delayed"],
                running=row["running"],
            )
            for row in found
        ]
