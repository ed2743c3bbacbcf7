"""Events."""

from __future__ import annotations

from typing import Any

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.ids import ExecutionId


@readable
def event(row: Row, epoch: int) -> Event:
    return Event(
        cursor=EventCursor(row["seq"], epoch),
        occurred_at=row["occurred_at"],
        execution_id=None if row["id"] is None else ExecutionId(row["id"]),
        flow_id=row["flow_id"],
        namespace=row["namespace"],
        tags=_object(row, "tags") or {},
        lease_type=row["lease_type"],
        outcome="failed" if row["outcome"] == "failure" else row["outcome"],
        operator_type=row["operator_type"],
        signal_effect=row["signal_effect"],
        worker_type=row["worker_type"],
        lease_id=row["lease_id"],
        lease_epoch=row["lease_epoch"],
        attempt_id=row["attempt_id"],
        attempt_index=row["attempt_index"],
        worker_id=row["worker_id"],
        worker_instance_id=row["worker_instance_id"],
        reason=row["reason"],
        revoked_by=row["revoked_by"],
        details=_object(row, "details"),
        parent_id=None if row["parent_id"] is None else ExecutionId(row["parent_id"]),
        lane_id=row["lane"],
        execution_kind=row["kind"],
        actor=row["actor"],
    )


def _object(row: Row, field: str) -> dict[str, Any] | None:
    found = json_of(row, field)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"event {row['seq']}: {field} is not an object")
    return found
