"""Lanes: named queues, which can be paused, drained or disabled."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import check_int, check_limit, check_list
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_lane
from flowfabric.values.gauges import Gauges, LaneGauge
from flowfabric.values.held import Denials
from flowfabric.values.lane import Lane, LaneState, LaneStats
from flowfabric.values.page import Page

# Ends with success are not among them: nothing counts them without reading them all.
_COUNTED = (
    *("waiting", "delayed", "rate_limited", "waiting_children", "active", "suspended"),
    *("failed", "cancelled", "expired", "skipped"),
)


class Lanes(Operations):
    """list_lanes, set_lane_state, lane_stats, read_gauges."""

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 100) -> Page[Lane, str]:
        """Return all lanes by name."""
        size = check_limit(limit, 1000)
        after = None if cursor is None else check_lane(cursor, "cursor")
        if size == 0:
            return Page(())
        found = await self._fetch(
            statements.LIST_LANES,
            after,
            size + 1,
            repeatable=True,
        )
        return first_page([rows.lane(row) for row in found], size, lambda last: last.lane_id)

    async def set_lane_state(
        self, lane_id: str, state: LaneState | str, *, expected: LaneState | str | None = None
    ) -> LaneState:
        """Pause, drain, disable or open a lane; returns the previous state. An unknown lane is registered.

        With `expected` nothing changes if the previous state is another one.
        """
        name, wanted = check_lane(lane_id), _state(state, "state")
        only = None if expected is None else _state(expected, "expected").value
        row = await self._row(statements.SET_LANE_STATE, name, wanted.value, only)
        return LaneState(row["before"])

    async def lane_stats(self, lane_ids: Collection[str] | None = None) -> list[LaneStats]:
        """Return per lane how many executions wait, for how long, and how many run."""
        names = (
            None if lane_ids is None else [check_lane(lane, "lane_ids") for lane in check_list(lane_ids, "lane_ids")]
        )
        found = await self._fetch(statements.LANE_STATS, names, repeatable=True)
        return [rows.lane_stats(row) for row in found]

    async def read_gauges(self, *, most: int = 10_000) -> Gauges:
        """Return the numbers of the whole deployment for a monitor; counts are exact up to `most`.

        Its cost is bounded whatever is stored: about that of reading `most` rows per kind of number.
        """
        check_int(most, "most", 1, 1_000_000)
        found = await self._fetch(statements.READ_GAUGES, most, repeatable=True)
        numbers: dict[str, dict[str, int]] = {"state": {}, "blocked": {}, "denied_budget": {}, "denied_quota": {}}
        lanes: list[LaneGauge] = []
        for row in found:
            if row["what"] == "lane":
                age = timedelta(0) if row["oldest_at"] is None else max(row["at"] - row["oldest_at"], timedelta(0))
                lanes.append(LaneGauge(lane_id=row["name"], depth=row["value"], oldest_age=age))
            else:
                numbers.setdefault(row["what"], {})[row["name"]] = row["value"]
        blocked = numbers["blocked"]
        states = dict.fromkeys(_COUNTED, 0) | numbers["state"]
        states["waiting"] = sum(lane.depth for lane in lanes)
        states["rate_limited"] = sum(blocked.get(reason, 0) for reason in ("waiting_for_budget", "waiting_for_quota"))
        return Gauges(
            at=found[0]["at"],
            lanes=tuple(sorted(lanes, key=lambda lane: lane.lane_id)),
            states=states,
            blocked=blocked,
            workers=numbers["workers"][""],
            slots=numbers["slots"][""],
            cancelling_flows=numbers["cancelling"][""],
            denials=Denials(
                budgets=numbers["denied_budget"],
                rate=numbers["denied_quota"].get("rate", 0),
                concurrency=numbers["denied_quota"].get("concurrency", 0),
            ),
        )


def _state(value: object, field: str) -> LaneState:
    try:
        return LaneState(value)  # type: ignore[arg-type]  # checked by the enum
    except ValueError:
        raise InvalidInput(f"got {value!r}", field=field, allowed=", ".join(LaneState)) from None
