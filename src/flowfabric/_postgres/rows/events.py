"""Events."""

from __future__ import annotations

from typing import Any

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.ids import ExecutionId


@readable
def event(row: Row, epoch: int) -> Event:
    # By position, in the order of `statements.EVENT`. Followers of the stored log read many: by name an event takes a
    # quarter longer.
    (
        seq, occurred_at, _, id_, flow_id, namespace, tags, lease_type, outcome, operator_type, signal_effect,
        worker_type, lease_id, lease_epoch, attempt_id, attempt_index, worker_id, worker_instance_id, reason,
        revoked_by, details, parent_id, lane, kind, actor, *_,
    ) = row.values()  # fmt: skip
    return Event(
        cursor=EventCursor(seq, epoch),
        occurred_at=occurred_at,
        execution_id=None if id_ is None else ExecutionId(id_),
        flow_id=flow_id,
        namespace=namespace,
        tags={} if tags is None else _object(row, "tags") or {},
        lease_type=lease_type,
        outcome="failed" if outcome == "failure" else outcome,
        operator_type=operator_type,
        signal_effect=signal_effect,
        worker_type=worker_type,
        lease_id=lease_id,
        lease_epoch=lease_epoch,
        attempt_id=attempt_id,
        attempt_index=attempt_index,
        worker_id=worker_id,
        worker_instance_id=worker_instance_id,
        reason=reason,
        revoked_by=revoked_by,
        details=None if details is None else _object(row, "details"),
        parent_id=None if parent_id is None else ExecutionId(parent_id),
        lane_id=lane,
        execution_kind=kind,
        actor=actor,
    )


def _object(row: Row, field: str) -> dict[str, Any] | None:
    found = json_of(row, field)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"event {row['seq']}: {field} is not an object")
    return found
