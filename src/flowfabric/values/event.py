"""The event log as it is read."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct, field

from flowfabric.values.ids import AttemptId, ExecutionId, FlowId, LeaseId


class EventCursor(Struct, frozen=True):
    """A position in the event log; the default is its beginning."""

    position: int = 0


class Event(Struct, frozen=True, kw_only=True):
    """One transition. A row that ends a leased execution belongs to both the lease and the completion family."""

    cursor: EventCursor
    occurred_at: datetime
    execution_id: ExecutionId | None
    flow_id: FlowId | None
    namespace: str | None
    tags: dict[str, str] = field(default_factory=dict)
    lease_type: str | None = None
    outcome: str | None = None
    operator_type: str | None = None
    signal_effect: str | None = None
    lease_id: LeaseId | None = None
    lease_epoch: int | None = None
    attempt_id: AttemptId | None = None
    attempt_index: int | None = None
    worker_id: str | None = None
    worker_instance_id: str | None = None
    reason: str | None = None
    revoked_by: str | None = None
    details: dict[str, Any] | None = None


class EventCounts(Struct, frozen=True, kw_only=True):
    """How many events of each family and type there were up to `cursor`, where the next count continues."""

    cursor: EventCursor
    lease: dict[str, int]
    completion: dict[str, int]
    operator: dict[str, int]
    signal: dict[str, int]
