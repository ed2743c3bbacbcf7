"""Bulk jobs: cancel or replay everything that matches a filter."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from msgspec import Struct

from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.state import State


class BulkOperation(StrEnum):
    CANCEL = "cancel"
    REPLAY = "replay"


class BulkState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


class ExecutionFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which executions: those that match every field that is set, as in `find_executions`."""

    namespace: str | None = None
    lane_ids: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    states: tuple[State, ...] | None = None
    tag: tuple[str, str] | None = None
    flow_id: FlowId | None = None
    parent_id: ExecutionId | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None


class BulkRefusal(Struct, frozen=True):
    """An execution that a bulk job could not change, and the kind of the refusal."""

    execution_id: ExecutionId
    code: str


class BulkPreview(Struct, frozen=True, kw_only=True):
    """A preview of a bulk job: how many executions match, exactly up to 10,000, and the newest of them."""

    count: int
    is_exact: bool
    sample: tuple[ExecutionId, ...]


class BulkJob(Struct, frozen=True, kw_only=True):
    """A bulk job and how far it is. `unchanged` had been cancelled before; `refusals` are the first 20 refused."""

    bulk_id: UUID
    operation: BulkOperation
    state: BulkState
    filter: ExecutionFilter
    reason: str | None
    actor: str
    key_id: str | None
    created_at: datetime
    ended_at: datetime | None
    changed: int
    unchanged: int
    refused: int
    refusals: tuple[BulkRefusal, ...]
    failure: str | None = None
