"""Records as they are given and read: frozen, typed, without behaviour that needs a database.

Authorities say with what right a call is made: a `Handle` (the lease a claim gave), a bare `Fence` (its three
numbers), or `Operator` (an override that no lease protects).
"""

from __future__ import annotations

import hmac
import re
import struct
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from uuid import UUID

from msgspec import Struct, field

from flowfabric.errors import Conflict, Corruption
from flowfabric.ids import AttemptId, ExecutionId, FlowId, LeaseId
from flowfabric.policies import PolicyInput
from flowfabric.state import BlockingReason, State, StateVector, project


class HandleKind(StrEnum):
    """How the lease came about."""

    FRESH = "fresh"
    RESUMED = "resumed"
    SUSPENDED = "suspended"
    RECLAIMED = "reclaimed"


class AttemptType(StrEnum):
    """Why the attempt exists."""

    INITIAL = "initial"
    RETRY = "retry"
    RECLAIM = "reclaim"
    REPLAY = "replay"
    FALLBACK = "fallback"


class LaneState(StrEnum):
    """What a lane does with work."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    DISABLED = "disabled"


_FORMAT = 2
_LAYOUT = 1
_KINDS: dict[str, int] = {kind.value: number for number, kind in enumerate(HandleKind)}


class Handle(Struct, frozen=True, kw_only=True, gc=False):
    """The lease a worker holds on one execution. A value: keep it, copy it, send it; the engine never changes it."""

    partition: int
    uuid: UUID
    attempt_index: int
    attempt_id: UUID
    lease_id: UUID
    lease_epoch: int
    lease_ttl: timedelta
    lane_id: str
    worker_instance_id: str
    kind: HandleKind = HandleKind.FRESH

    @property
    def execution_id(self) -> ExecutionId:
        return ExecutionId.of(self.partition, self.uuid)

    @property
    def fence(self) -> Fence:
        return Fence(
            execution_id=self.execution_id,
            lease_id=LeaseId(self.lease_id),
            lease_epoch=self.lease_epoch,
            attempt_id=AttemptId(self.attempt_id),
            attempt_index=self.attempt_index,
        )

    def encode(self) -> bytes:
        """The handle as bytes, for another process of the same deployment."""
        parts = [struct.pack("<BBB", _FORMAT, _LAYOUT, _KINDS[self.kind])]
        for value in (
            self.execution_id,
            self.attempt_index,
            str(self.attempt_id),
            str(self.lease_id),
            self.lease_epoch,
            self.lease_ttl // timedelta(milliseconds=1),
            self.lane_id,
            self.worker_instance_id,
        ):
            if isinstance(value, int):
                parts.append(struct.pack("<Q", value))
            else:
                text = value.encode()
                parts.append(struct.pack("<I", len(text)) + text)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Handle:
        """The handle back from `encode`; `Corruption` whose detail begins with `handle_codec:` otherwise."""
        try:
            reader = _Reader(bytes(data))
            if reader.byte() != _FORMAT or reader.byte() != _LAYOUT:
                raise ValueError("unknown marker or version")
            kind = list(HandleKind)[reader.byte()]
            execution_id = ExecutionId.parse(reader.text())
            handle = cls(
                partition=execution_id.partition,
                uuid=execution_id.uuid,
                attempt_index=reader.number(2**31 - 1),
                attempt_id=UUID(reader.text()),
                lease_id=UUID(reader.text()),
                lease_epoch=reader.number(2**63 - 1),
                lease_ttl=timedelta(milliseconds=reader.number(10**13)),
                lane_id=reader.text(),
                worker_instance_id=reader.text(),
                kind=kind,
            )
            reader.end()
        except Corruption:
            raise
        except Exception as error:
            raise Corruption(f"handle_codec: {type(error).__name__}: {error}") from None
        return handle


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        if len(self._data) - self._at < size:
            raise ValueError("truncated")
        self._at += size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        return self._take(1)[0]

    def number(self, most: int) -> int:
        number = int(struct.unpack("<Q", self._take(8))[0])
        if number > most:
            raise ValueError(f"{number} is too large")
        return number

    def text(self) -> str:
        return self._take(int(struct.unpack("<I", self._take(4))[0])).decode()

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("trailing bytes")


class Fence(Struct, frozen=True, kw_only=True):
    """The three values that name one lease; all three are compared. The attempt index is compared if given."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int
    attempt_id: AttemptId
    attempt_index: int | None = None


class Operator(Struct, frozen=True):
    """An operator's override: no lease is shown. `source` says on whose behalf, for cancel."""

    execution_id: ExecutionId
    source: str = "operator_override"


Authority: TypeAlias = Handle | Fence | Operator


class NewExecution(Struct, frozen=True, kw_only=True):
    """What `create_execution` and `create_many` take. Only the kind is required."""

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
    """The key or the id was known already; `execution_id` is the execution that stands."""

    execution_id: ExecutionId


class Passed(Struct, frozen=True, gc=False):
    """How an upstream stands, and its result, as given to the execution that comes after it."""

    state: State
    result: bytes | None
    encoding: str | None


class Claimed(Struct, frozen=True, kw_only=True, gc=False):
    """A lease, and what is needed to do the work."""

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

    @property
    def execution_id(self) -> ExecutionId:
        return self.handle.execution_id


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


StepKind: TypeAlias = Literal["step", "now", "sleep", "submit", "result", "wait"]


class NewStep(Struct, frozen=True, kw_only=True, gc=False):
    """One thing a handler did, to be remembered: `n` counts how often it used the name before in this run."""

    name: str
    n: int = 0
    kind: StepKind = "step"
    result: bytes | None = None
    encoding: str | None = None
    error: str | None = None
    seconds: float | None = None
    pause: timedelta | None = None


class Step(Struct, frozen=True, kw_only=True):
    """A step as it is remembered. `at` is the time of a `now`, the end of a `sleep`, the deadline of a `wait`.

    `error` is set when it failed; `result` then holds what else its exception carried. `outcome` is how a `wait` ended
    (None while it is open), and `known` for a `submit` that found its execution existing.
    """

    execution_id: ExecutionId
    generation: int
    name: str
    n: int
    kind: StepKind
    run: int
    attempt_index: int
    result: bytes | None
    encoding: str | None
    error: dict[str, Any] | None
    at: datetime | None
    child_id: ExecutionId | None
    seconds: float | None
    recorded_at: datetime
    waitpoint_ids: tuple[UUID, ...] = ()
    outcome: str | None = None


class Parked(Struct, frozen=True):
    """`parked` is False when there is nothing to wait for, `because` of `ended`, `due` or `signal`; the lease stays."""

    execution_id: ExecutionId
    parked: bool
    because: str | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    """How an execution ended; `state` is None when it is not stored (any more)."""

    state: State | None
    result: bytes | None = None
    result_encoding: str | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    cancellation_reason: str | None = None


class Schedule(Struct, frozen=True, kw_only=True):
    """Recurring work as it is stored."""

    name: str
    kind: str
    timing: dict[str, Any]
    catch_up: str
    options: dict[str, Any]
    paused: bool
    next_at: datetime | None
    last_at: datetime | None
    last_execution_id: ExecutionId | None
    created_at: datetime
    updated_at: datetime
    payload: bytes
    payload_encoding: str | None = None


class DueSchedule(Struct, frozen=True, kw_only=True):
    """A schedule that should have fired, with the database's time."""

    name: str
    kind: str
    timing: dict[str, Any]
    catch_up: str
    payload: bytes
    payload_encoding: str | None
    options: dict[str, Any]
    due_at: datetime
    now: datetime


class Renewed(Struct, frozen=True, gc=False):
    expires_at: datetime
    lease_epoch: int


class Completed(Struct, frozen=True, gc=False):
    execution_id: ExecutionId
    public_state: State = State.COMPLETED


class RetryScheduled(Struct, frozen=True):
    """Another attempt will be made, not before `delay_until`."""

    execution_id: ExecutionId
    delay_until: datetime
    next_attempt_index: int | None = None


class TerminalFailed(Struct, frozen=True):
    execution_id: ExecutionId


class Delayed(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State = State.DELAYED


class Moved(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State


class Released(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State = State.WAITING


class Cancelled(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State = State.CANCELLED


class Revoked(Struct, frozen=True):
    """The lease just revoked."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int


_TOKEN = re.compile(r"([!-9;-~]{1,64}):([0-9a-fA-F]+)")


class WaitpointToken:
    """The right to signal one waitpoint. It prints redacted; `reveal` gives the text to hand out."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The token itself: for the message that takes it to whoever shall signal, and for nothing else."""
        return self._text

    @property
    def kid(self) -> str:
        """Which key signed it."""
        return self._text.partition(":")[0]

    def __str__(self) -> str:
        found = _TOKEN.fullmatch(self._text)
        return f"{found[1]}:<REDACTED:len={len(found[2])}>" if found else "<REDACTED:malformed>"

    def __repr__(self) -> str:
        return f"WaitpointToken({self})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return hmac.compare_digest(*(text.encode(errors="surrogatepass") for text in (self._text, other._text)))

    def __hash__(self) -> int:
        return hash(self._text)


ReasonCode: TypeAlias = Literal[
    "waiting_for_signal",
    "step_boundary",
    "waiting_for_approval",
    "waiting_for_callback",
    "waiting_for_tool_result",
    "waiting_for_operator_review",
    "manual_pause",
    "paused_by_policy",
    "paused_by_budget",
]
RequestedBy: TypeAlias = Literal["worker", "operator", "policy", "system_timeout_policy"]
TimeoutBehavior: TypeAlias = Literal["fail", "cancel", "expire", "auto_resume_with_timeout_signal", "escalate"]
TriggerType: TypeAlias = Literal["signal", "operator", "auto_resume"]


class NewWaitpoint(Struct, frozen=True):
    """A pending waitpoint, and the token that its signals must show."""

    waitpoint_id: UUID
    token: WaitpointToken
    expires_at: datetime


class Fresh(Struct, frozen=True):
    """A binding that `suspend` makes: a waitpoint that exists from then on."""

    waitpoint_id: UUID
    waitpoint_key: str


class UsePending(Struct, frozen=True):
    """A binding to a waitpoint that `create_waitpoint` made; its key and token stay."""

    waitpoint_id: UUID


class BoundWaitpoint(Struct, frozen=True):
    waitpoint_id: UUID
    waitpoint_key: str
    waitpoint_token: WaitpointToken


class SuspensionDetails(Struct, frozen=True, kw_only=True):
    """What was suspended on; the first binding is the primary."""

    suspension_id: UUID
    waitpoint_id: UUID
    waitpoint_key: str
    waitpoint_token: WaitpointToken
    additional_waitpoints: tuple[BoundWaitpoint, ...] = ()


class Suspended(Struct, frozen=True):
    """The lease is gone; `handle` is good for `observe_signals` alone."""

    details: SuspensionDetails
    handle: Handle


class AlreadySatisfied(Struct, frozen=True):
    """Nothing had to be done, and why; of a suspend, `details` says on what, and the lease is kept."""

    reason: str
    details: SuspensionDetails | None = None


class ResumePolicy(Struct, frozen=True, kw_only=True):
    """What happens when signals satisfy the condition. Only the delay has an effect in this version."""

    resume_target: str = "runnable"
    resume_delay: timedelta | None = None
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    close_waitpoint_on_resume: bool = True


class Closed(Struct, frozen=True):
    """The waitpoint is closed, by this call or before."""

    waitpoint_id: UUID


class PendingWaitpoint(Struct, frozen=True, kw_only=True):
    """A waitpoint that can be signalled. The token is not part of it."""

    waitpoint_id: UUID
    waitpoint_key: str
    state: str
    required_signal_names: tuple[str, ...]
    created_at: datetime
    activated_at: datetime | None
    expires_at: datetime | None
    execution_id: ExecutionId
    token_kid: str
    token_fingerprint: str


class SuspendedExecution(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    suspended_at: datetime
    reason: str
    timeout_at: datetime | None


class Wait(Struct, frozen=True, kw_only=True):
    """A waitpoint that somebody waits at, as `list_waits` shows it. `reason` is None while it is pending."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    waitpoint_id: UUID
    waitpoint_key: str
    state: str
    reason: str | None
    since: datetime
    timeout_at: datetime | None
    timeout_behavior: str | None
    required_signal_names: tuple[str, ...]
    signal_count: int


class Suspension(Struct, frozen=True, kw_only=True):
    """One suspension, open while `closed_at` is None."""

    suspension_id: UUID
    execution_id: ExecutionId
    attempt_index: int
    waitpoint_ids: tuple[UUID, ...]
    waitpoint_keys: tuple[str, ...]
    reason_code: str
    requested_by: str
    continuation_metadata_pointer: str | None
    resume_condition: Any
    resume_policy: dict[str, Any]
    suspended_at: datetime
    timeout_at: datetime | None
    timeout_behavior: str | None
    last_signal_at: datetime | None
    satisfied_at: datetime | None
    closed_at: datetime | None
    close_reason: str | None
    trigger_type: str | None
    closer_signal_id: UUID | None
    satisfier_signal_ids: tuple[UUID, ...]


class ReceivedSignal(Struct, frozen=True, kw_only=True):
    """A signal that was accepted."""

    signal_id: UUID
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: datetime
    payload: bytes | None
    payload_encoding: str
    waitpoint_key: str


class RecordedSignal(ReceivedSignal, frozen=True, kw_only=True):
    """A signal with what it did, as `read_signals` lists it."""

    ordinal: int
    waitpoint_id: UUID
    suspension_id: UUID | None
    target_scope: str
    created_at: datetime
    observed_effect: str
    match_detail: str


class Accepted(Struct, frozen=True):
    """The signal is recorded. `effect` says whether it resumed the execution."""

    signal_id: UUID
    effect: str
    match_detail: str


class DuplicateSignal(Struct, frozen=True):
    """The same signal was accepted before; nothing changed."""

    existing_signal_id: UUID


class Resumed(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State


class ExpiredSuspension(Struct, frozen=True):
    """The suspension's time was over; `behavior_applied` is what followed."""

    execution_id: ExecutionId
    behavior_applied: str


class Seeded(Struct, frozen=True):
    kid: str


class AlreadySeeded(Struct, frozen=True):
    kid: str
    same_secret: bool


class Rotated(Struct, frozen=True):
    previous_kid: str | None
    new_kid: str
    gc_count: int


class RotationNoop(Struct, frozen=True):
    kid: str


class Rotation(Struct, frozen=True):
    """The outcome of a rotation; the keystore is one, so there is one entry, of partition 0."""

    partition: int
    result: Rotated | RotationNoop | Conflict


class VerifyingKid(Struct, frozen=True):
    kid: str
    expires_at: datetime


class WaitpointKids(Struct, frozen=True):
    """Which keys sign and verify tokens."""

    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


class OpenWait(Struct, frozen=True, kw_only=True):
    """The waitpoints of a task's wait, remembered; `deadline` is when its time is over.

    `use` is how often the handler used the wait's name before in this run.
    """

    use: int
    waitpoints: tuple[BoundWaitpoint, ...]
    deadline: datetime | None


class WaitResult(Struct, frozen=True, kw_only=True):
    """How a task's wait stands: open, resumed, timed_out, operator_resumed or given_up. `seen` counts signals."""

    outcome: str
    result: bytes | None
    seen: tuple[int, ...]


class Replayed(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State


class Changed(Struct, frozen=True):
    execution_id: ExecutionId


class Blocked(Struct, frozen=True):
    execution_id: ExecutionId
    reason: str


class Rejected(Struct, frozen=True):
    """A logical refusal that a scheduler's loop simply passes over."""

    message: str


class ClaimGrant(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    partition_key: str
    grant_key: str
    expires_at: datetime

    def __repr__(self) -> str:
        return f"{type(self).__name__}(execution_id={self.execution_id!r}, expires_at={self.expires_at!r})"


class ResumeGrant(ClaimGrant, frozen=True, kw_only=True):
    lane_id: str


class ReclaimGrant(ClaimGrant, frozen=True, kw_only=True):
    lane_id: str


class NotReclaimable(Struct, frozen=True):
    execution_id: ExecutionId
    detail: str


class ReclaimCapExceeded(Struct, frozen=True):
    """The lease was lost once too often: the execution has failed."""

    execution_id: ExecutionId
    reclaim_count: int


class GrantNotFound(Struct, frozen=True):
    execution_id: ExecutionId


class Attempt(Struct, frozen=True, kw_only=True):
    """One attempt, as history keeps it."""

    attempt_index: int
    attempt_id: AttemptId
    attempt_type: AttemptType
    attempt_lifecycle: str
    started_at: datetime
    resumed_at: datetime | None
    suspended_at: datetime | None
    ended_at: datetime | None
    lease_id: LeaseId
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


class CurrentLease(Struct, frozen=True, kw_only=True):
    lease_id: LeaseId
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    acquired_at: datetime
    expires_at: datetime
    renewal_deadline: datetime
    attempt_index: int
    last_heartbeat_at: datetime


class Execution(Struct, frozen=True, kw_only=True):
    """Everything stored about an execution but its payload and result."""

    execution_id: ExecutionId
    namespace: str
    lane_id: str
    execution_kind: str
    creator_identity: str
    flow_id: FlowId | None
    idempotency_key: str | None
    payload_encoding: str | None
    tags: dict[str, str]
    policy: dict[str, Any] | None
    required_capabilities: tuple[str, ...]
    budget_ids: tuple[UUID, ...]
    quota_policy_id: UUID | None
    priority: int
    public_state: State
    stored_blocking_reason: str | None
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

    @property
    def state_vector(self) -> StateVector:
        """The seven dimensions, projected from the stored facts."""
        return project(
            self.public_state,
            self.stored_blocking_reason,
            self.pending,
            self.resume_pending,
            self.lease_lost,
            self.total_attempt_count,
        )

    @property
    def blocking_reason(self) -> BlockingReason | None:
        """Why it does not run now; None when nothing is in the way."""
        reason = self.state_vector.blocking_reason
        return None if reason is BlockingReason.NONE else reason


class ExecutionSnapshot(Struct, frozen=True, kw_only=True):
    """What `describe_execution` answers. The payload is not part of it."""

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
    """What `read_execution_info` answers, and every list."""

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


class ExecutionContext(Struct, frozen=True, kw_only=True):
    input_payload: bytes
    payload_encoding: str | None
    execution_kind: str
    tags: dict[str, str]


class Result(Struct, frozen=True):
    """A result as it was stored: bytes, and the encoding its writer named."""

    payload: bytes
    encoding: str | None


_Item = TypeVar("_Item")
_Cursor = TypeVar("_Cursor")


class Page(Struct, Generic[_Item, _Cursor], frozen=True):
    """One page of a list. `next_cursor` is set iff the list may go on behind it."""

    items: Sequence[_Item]
    next_cursor: _Cursor | None = None


class Lane(Struct, frozen=True, kw_only=True):
    lane_id: str
    state: LaneState
    registered_at: datetime
    registered_by: str


class LaneStats(Struct, frozen=True, kw_only=True):
    """How a lane stands: `depth` may be claimed now, `oldest_age` since when the oldest of them exists."""

    lane_id: str
    state: LaneState
    depth: int
    oldest_age: timedelta | None
    delayed: int
    running: int


class ExpiredLease(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int
    worker_instance_id: str
    expires_at: datetime
    attempt_index: int


class EventCursor(Struct, frozen=True):
    """A place in the event log; the default is its beginning."""

    position: int = 0


class Event(Struct, frozen=True, kw_only=True):
    """One transition. A row that ends a leased execution belongs to the lease and the completion family at once."""

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
    """How many events of each family and sort there were, up to `cursor`, from where the next count goes on."""

    cursor: EventCursor
    lease: dict[str, int]
    completion: dict[str, int]
    operator: dict[str, int]
    signal: dict[str, int]


class ScannerFilter(Struct, frozen=True, kw_only=True):
    """Restricts duties and readers: every part that is set must match exactly."""

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None


class Prepared(Struct, frozen=True):
    """What `prepare` did: nothing, or a description of it."""

    applied: str | None = None
