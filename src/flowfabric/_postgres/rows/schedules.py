"""Stored and due schedules."""

from __future__ import annotations

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric.values.ids import ExecutionId
from flowfabric.values.schedule import DueSchedule, Schedule


@readable
def schedule(row: Row) -> Schedule:
    """A stored schedule."""
    return Schedule(
        name=row["name"],
        kind=row["kind"],
        timing=json_of(row, "timing"),
        catch_up=row["catch_up"],
        options=json_of(row, "options"),
        paused=row["paused"],
        next_at=row["next_at"],
        last_at=row["last_at"],
        last_execution_id=None if row["last_id"] is None else ExecutionId(row["last_id"]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        payload=row["payload"],
        payload_encoding=row["payload_encoding"],
    )


@readable
def due_schedule(row: Row) -> DueSchedule:
    """A due schedule."""
    return DueSchedule(
        name=row["name"],
        kind=row["kind"],
        timing=json_of(row, "timing"),
        catch_up=row["catch_up"],
        payload=row["payload"],
        payload_encoding=row["payload_encoding"],
        options=json_of(row, "options"),
        due_at=row["next_at"],
        now=row["now"],
        live_id=row.get("live_id"),
    )
