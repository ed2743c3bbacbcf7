"""Attempts: one as it is claimed, how it ends, and as history keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from msgspec import Struct

from flowfabric.values.ids import AttemptId, ExecutionId, FlowId, LeaseId
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.state import State
from flowfabric.values.stream import DurabilityMode


class AttemptType(StrEnum):
    """Why the attempt exists."""

    INITIAL = "initial"
    RETRY = "retry"
    RECLAIM = "reclaim"
    REPLAY = "replay"


class Passed(Struct, frozen=True, gc=False):
    """The state and the result of an upstream, as the execution after it receives them.

    An `AllSettled` join also receives upstreams that did not succeed: `result` is then the reason, `encoding` the
    category of the failure.
    """

    state: State
    result: bytes | None
    encoding: str | None


class Claimed(Struct, frozen=True, kw_only=True, gc=False):
    """A lease, and all that the worker needs to run the execution. `has_steps`: a fork already has recorded steps."""

    handle: Handle
    lease_expires_at: datetime
    attempt_type: AttemptType
    execution_kind: str
    namespace: str
    flow_id: FlowId | None
    priority: int
    created_at: datetime
    input_payload: bytes
    payload_encoding: str | None
    tags: dict[str, str]
    deadline_at: datetime | None
    attempt_timeout_at: datetime | None
    retry_count: int
    reclaim_count: int
    replay_count: int
    inputs: Mapping[UUID, Passed] | None = None
    durability_mode: DurabilityMode = "buffered"
    has_steps: bool = False

    @property
    def execution_id(self) -> ExecutionId:
        return self.handle.execution_id


class Started(Struct, frozen=True, gc=False):
    """An execution as a worker would receive it, and the version in which it began; None if it has none."""

    claimed: Claimed
    version: int | None


class Completion(Struct, frozen=True):
    """One item of `complete_many`."""

    authority: Handle | Fence
    result: bytes | None = None
    result_encoding: str | None = None


class Failure(Struct, frozen=True, kw_only=True):
    """One item of `fail_many`."""

    authority: Handle | Fence
    reason: str
    failure_class: str | None = None
    category: str | None = None
    retry_policy: Any = None


class Completed(Struct, frozen=True, gc=False):
    execution_id: ExecutionId
    public_state: State = State.COMPLETED


class RetryScheduled(Struct, frozen=True):
    """Another attempt will be made, not before `delay_until`: the retry `retry_number` of at most `max_retries`.

    The numbers are None if the failure was reported before.
    """

    execution_id: ExecutionId
    delay_until: datetime
    next_attempt_index: int | None = None
    retry_number: int | None = None
    max_retries: int | None = None


class TerminalFailed(Struct, frozen=True):
    execution_id: ExecutionId


class Delayed(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State = State.DELAYED


class Moved(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State


class Cancelled(Struct, frozen=True):
    """`has_children`: what it submitted is still to be cancelled, which duties do.

    `was_cancelled`: it was cancelled before this call, which changed nothing.
    """

    execution_id: ExecutionId
    public_state: State = State.CANCELLED
    has_children: bool = False
    was_cancelled: bool = False


class Attempt(Struct, frozen=True, kw_only=True):
    """One attempt, as stored in the history. `lease_id` is None unless the database user has the role operate."""

    attempt_index: int
    attempt_id: AttemptId
    attempt_type: AttemptType
    attempt_lifecycle: str
    started_at: datetime
    resumed_at: datetime | None
    suspended_at: datetime | None
    ended_at: datetime | None
    lease_id: LeaseId | None
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    failure_reason: str | None
    failure_category: str | None
    policy_snapshot: dict[str, Any] | None
    retry_reason: str | None
    previous_attempt_index: int | None
    replay_reason: str | None
    replay_requested_by: str | None
    replayed_from_attempt_index: int | None
    reclaim_reason: str | None
    end_disposition: str | None
    retry_at: datetime | None


class CurrentAttempt(Struct, frozen=True):
    attempt_id: AttemptId
    attempt_index: int
