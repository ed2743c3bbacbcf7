"""Executions that limits hold, and what limits are bound to."""

from __future__ import annotations

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric.values.binding import Bind, Binding
from flowfabric.values.held import Held
from flowfabric.values.ids import ExecutionId


@readable
def held(row: Row) -> Held:
    return Held(
        execution_id=ExecutionId(row["id"]),
        execution_kind=row["kind"],
        lane_id=row["lane"],
        namespace=row["namespace"],
        limit_id=row["limit_id"],
        key=row["limit_key"],
        rank=row["rank"],
        created_at=row["created_at"],
        blocked_at=row["blocked_at"],
        retry_at=row["retry_at"],
        needs={} if row["needs"] is None else json_of(row, "needs")["amounts"],
        detail=row["detail"],
    )


@readable
def binding(row: Row) -> Binding:
    return Binding(
        binding_id=row["id"],
        what=row["what"],
        limit_id=row["limit_id"],
        name=row["name"],
        bind=Bind(
            lane=row["lane"],
            kind=row["kind"],
            namespace=row["namespace"],
            tag=None if row["tag"] is None else (row["tag"], row["value"]),
            flow=row["flow_kind"],
        ),
        is_declared=row["is_declared"],
        created_at=row["created_at"],
    )
