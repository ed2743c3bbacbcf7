"""Recorded steps."""

from __future__ import annotations

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric.values.ids import ExecutionId
from flowfabric.values.step import Step


@readable
def step(row: Row) -> Step:
    """A recorded step."""
    return Step(
        execution_id=ExecutionId(row["id"]),
        generation=row["generation"],
        name=row["name"],
        n=row["n"],
        kind=row["kind"],
        run=row["run"],
        attempt_index=row["attempt_index"],
        result=row["result"],
        encoding=row["encoding"],
        error=json_of(row, "error"),
        at=row["at"],
        child_id=None if row["child_id"] is None else ExecutionId(row["child_id"]),
        seconds=row["seconds"],
        recorded_at=row["recorded_at"],
        waitpoint_ids=tuple(row["waitpoint_ids"] or ()),
        outcome=row["outcome"],
        is_stray=row["is_stray"],
        is_unread=row["is_unread"],
        flow_id=row["flow_id"],
        place=row["place"],
    )
