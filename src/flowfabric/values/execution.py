"""Executions as callers submit them, as the engine returns them and as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Struct, field

from flowfabric.values.attempt import CurrentAttempt
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lease import CurrentLease
from flowfabric.values.policies import PolicyInput
from flowfabric.values.state import State
from flowfabric.values.vector import BlockingReason, StateVector, project


class NewExecution(Struct, frozen=True, kw_only=True):
    """The argument of `create_execution` and `create_many`. Only the kind is required."""

    execution_kind: str
    lane_id: str = "default"
    namespace: str = ""
    input_payload: bytes = b""
    payload_encoding: str | None = None
    priority: int = 0
    creator_identity: str = ""
    idempotency_key: str | None = None
    tags: Mapping[str, str] | None = None
    policy: PolicyInput = None
    delay_until: datetime | timedelta | None = None
    execution_deadline_at: datetime | timedelta | None = None
    execution_id: ExecutionId | None = None
    flow_id: FlowId | None = None


class Created(Struct, frozen=True, gc=False):
    execution_id: ExecutionId
    public_state: State


class Duplicate(Struct, frozen=True):
    """The key or the id was used before; `execution_id` is the existing execution."""

    execution_id: ExecutionId


class Outcome(Struct, frozen=True, kw_only=True):
    """How an execution ended; `state` is None when it is not, or no longer, stored."""

    state: State | None
    result: bytes | None = None
    result_encoding: str | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    cancellation_reason: str | None = None


class Replayed(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State


class Changed(Struct, frozen=True):
    execution_id: ExecutionId


class Blocked(Struct, frozen=True):
    execution_id: ExecutionId
    reason: str


class Rejected(Struct, frozen=True):
    """The engine refused this execution; a scheduler's loop skips it and continues."""

    message: str


class Execution(Struct, frozen=True, kw_only=True):
    """Everything stored about an execution except its payload and result."""

    execution_id: ExecutionId
    namespace: str
    lane_id: str
    execution_kind: str
    creator_identity: str
    flow_id: FlowId | None
    node: str | None
    parent_id: ExecutionId | None
    idempotency_key: str | None
    payload_encoding: str | None
    tags: dict[str, str]
    policy: dict[str, Any] | None
    required_capabilities: tuple[str, ...]
    budget_ids: tuple[UUID, ...]
    quota_policy_ids: tuple[UUID, ...]
    priority: int
    public_state: State
    stored_blocking_reason: str | None = field(name="blocking_reason")  # in JSON the property of that name
    blocking_detail: str | None
    pending: str | None
    resume_pending: bool
    lease_lost: str | None
    total_attempt_count: int
    retry_count: int
    replay_count: int
    lease_reclaim_count: int
    current_lease_epoch: int
    current_attempt: CurrentAttempt | None
    current_attempt_index: int | None
    current_lease: CurrentLease | None
    lost_lease: CurrentLease | None
    lease_lost_at: datetime | None
    lease_revoke_reason: str | None
    delay_until: datetime | None
    deadline_at: datetime | None
    attempt_timeout_at: datetime | None
    attempt_timeout_remaining: timedelta | None
    has_result: bool
    result_encoding: str | None
    failure_reason: str | None
    failure_category: str | None
    cancellation_reason: str | None
    cancelled_by: str | None
    progress_pct: int | None
    progress_message: str | None
    progress_updated_at: datetime | None
    last_capability_mismatch_at: datetime | None
    last_hmac_validation_failed_at: datetime | None
    suspension_timeout_at: datetime | None
    current_waitpoint: UUID | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    last_transition_at: datetime
    last_mutation_at: datetime
    version: int | None = None  # of the worker that started the first attempt of its generation
    stops: int | None = None  # while stopped by changed code: how often in a row
    forked_from: ExecutionId | None = None  # the execution whose steps it began with
    forked_before: str | None = None  # the step of that one before which it began

    @property
    def state_vector(self) -> StateVector:
        """The seven dimensions, computed from the stored facts."""
        return project(
            self.public_state,
            self.stored_blocking_reason,
            self.pending,
            self.resume_pending,
            self.lease_lost,
            self.total_attempt_count,
        )

    @property
    def quota_policy_id(self) -> UUID | None:
        """Its quota policy; the first if it has several."""
        return self.quota_policy_ids[0] if self.quota_policy_ids else None

    @property
    def blocking_reason(self) -> BlockingReason | None:
        """Why it does not run now; None if nothing blocks it."""
        reason = self.state_vector.blocking_reason
        return None if reason is BlockingReason.NONE else reason


class ExecutionSnapshot(Struct, frozen=True, kw_only=True):
    """Returned by `describe_execution`, without the payload."""

    execution_id: ExecutionId
    flow_id: FlowId | None
    lane_id: str
    namespace: str
    public_state: State
    blocking_reason: BlockingReason | None
    blocking_detail: str | None
    current_attempt: CurrentAttempt | None
    current_lease: CurrentLease | None
    current_waitpoint: UUID | None
    created_at: datetime
    last_mutation_at: datetime
    total_attempt_count: int
    tags: dict[str, str]


class ExecutionInfo(Struct, frozen=True, kw_only=True):
    """Returned by `read_execution_info` and by every list.

    `node` is its name in its flow, `parent_id` the execution whose handler submitted it. `arguments` is how its
    arguments begin, as JSON; empty if a codec stored them. `version` is that of the worker that started its first
    attempt. `stops` is set while changed code has it stopped: how often in a row. `forked_from` is the execution whose
    steps it began with.
    """

    execution_id: ExecutionId
    namespace: str
    lane_id: str
    priority: int
    execution_kind: str
    state_vector: StateVector
    public_state: State
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    current_attempt_index: int
    flow_id: FlowId | None
    blocking_detail: str
    node: str = ""
    parent_id: ExecutionId | None = None
    arguments: str = ""
    version: int | None = None
    stops: int | None = None
    forked_from: ExecutionId | None = None


class ExecutionContext(Struct, frozen=True, kw_only=True):
    input_payload: bytes
    payload_encoding: str | None
    execution_kind: str
    tags: dict[str, str]


class Result(Struct, frozen=True):
    """A stored result: bytes, and the encoding its writer named."""

    payload: bytes
    encoding: str | None
