"""Lanes."""

from __future__ import annotations

from flowfabric._postgres.rows.values import Row, one_of, readable
from flowfabric.values.lane import Lane, LaneState, LaneStats


@readable
def lane(row: Row) -> Lane:
    return Lane(
        lane_id=row["name"],
        state=one_of(LaneState, row, "state"),
        registered_at=row["registered_at"],
        registered_by=row["registered_by"],
    )


@readable
def lane_stats(row: Row) -> LaneStats:
    """How many executions wait in a lane and run from it."""
    return LaneStats(
        lane_id=row["name"],
        state=one_of(LaneState, row, "state"),
        depth=row["depth"],
        oldest_age=None if row["oldest_at"] is None else row["at"] - row["oldest_at"],
        delayed=row["delayed"],
        waiting_children=row["waiting_children"],
        running=row["running"],
    )
