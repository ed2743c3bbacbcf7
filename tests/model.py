"""A model of executions in plain Python, as the contract describes them. The engine must agree after every step.

One `Model` is one deployment with a clock that only the test moves (milliseconds since the epoch). Every
operation returns what the engine should return, as a plain dict made by `said`, or raises `Refused` with the kind of
the error. The caller passes ids that only the engine can mint (of leases and attempts).

Nothing here knows tables, timers or locks: a timer is due when its time is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, cast
from uuid import UUID

from tests.conditions import Sent, closer, holds, match_detail, places, required_names

DAY = 86_400_000
Json = dict[str, Any]
Minted = Mapping[str, tuple[UUID, UUID]]
"""Per execution the lease id and the attempt id of the claim under way."""


class Refused(Exception):
    """An operation that was refused, by the kind of its error."""

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(kind, facts)
        self.kind = kind
        self.facts = facts


class _Recorded(Exception):
    """Not an error: a terminal call that is answered from history."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt


def said(answer: str, **facts: Any) -> Json:
    """What an operation answers: its name and its fields."""
    return {"answer": answer, **facts}


def refused(error: Refused) -> Json:
    """A refusal as an item of a batch's answer."""
    return {"refused": error.kind, **error.facts}


class Fence(NamedTuple):
    """The lease a caller shows."""

    execution_id: str
    lease_id: UUID
    lease_epoch: int
    attempt_id: UUID
    attempt_index: int | None = None


class Override(NamedTuple):
    """A caller that shows no lease."""

    execution_id: str
    source: str = "operator_override"


Authority = Fence | Override


class Worker(NamedTuple):
    """Who claims."""

    worker_id: str
    worker_instance_id: str
    capabilities: frozenset[str] = frozenset()
    kinds: frozenset[str] | None = None
    versions: tuple[int, ...] = ()  # of every kind
    digest: str | None = None


OPERATOR = Worker("operator", "operator")


class New(NamedTuple):
    """What is submitted; times are absolute, durations were added to the clock before."""

    execution_id: str
    uuid: UUID
    lane: str = "default"
    kind: str = "alpha"
    namespace: str = ""
    priority: int = 0
    key: str | None = None
    policy: Json | None = None
    delay_until: int | None = None
    deadline_at: int | None = None
    id_given: bool = False


@dataclass
class Lease:
    lease_id: UUID
    epoch: int
    worker_id: str
    worker_instance_id: str
    ttl: int
    acquired_at: int
    renewed_at: int
    expires_at: int


@dataclass
class Attempt:
    attempt_index: int
    attempt_id: UUID
    attempt_type: str
    started_at: int
    lease_id: UUID
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    attempt_lifecycle: str = "started"
    resumed_at: int | None = None
    suspended_at: int | None = None
    ended_at: int | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    retry_reason: str | None = None
    previous_attempt_index: int | None = None
    replay_reason: str | None = None
    replay_requested_by: str | None = None
    replayed_from_attempt_index: int | None = None
    reclaim_reason: str | None = None
    end_disposition: str | None = None
    retry_at: int | None = None

    def end(self, lifecycle: str, disposition: str, at: int) -> None:
        self.attempt_lifecycle, self.end_disposition, self.ended_at = lifecycle, disposition, at


@dataclass
class Grant:
    kind: str
    worker_id: str
    expires_at: int


@dataclass
class Waitpoint:
    waitpoint_id: UUID
    attempt_index: int
    waitpoint_key: str
    token_kid: str
    created_at: int
    expires_at: int | None
    outlives_attempt: bool = False
    state: str = "pending"
    suspension_id: UUID | None = None
    required_signal_names: list[str] = field(default_factory=list)
    activated_at: int | None = None
    signal_count: int = 0
    matched_signal_count: int = 0
    dropped_signal_count: int = 0
    refused_signal_count: int = 0
    is_escalated: bool = False
    last_signal_at: int | None = None
    satisfied_at: int | None = None
    closed_at: int | None = None
    close_reason: str | None = None

    def close(self, state: str, reason: str, at: int) -> None:
        self.state, self.close_reason, self.closed_at = state, reason, at


@dataclass
class Signal:
    signal_id: UUID | str
    waitpoint_id: UUID
    waitpoint_key: str
    suspension_id: UUID | None
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    accepted_at: int
    payload: bytes | None = None
    idempotency_key: str | None = None
    target_scope: str = "waitpoint"
    observed_effect: str = ""
    match_detail: str = ""
    is_dropped: bool = False

    @property
    def sent(self) -> Sent:
        return Sent(
            self.waitpoint_key, self.signal_name, cast("UUID", self.signal_id), self.source_type, self.source_identity
        )


@dataclass
class Suspension:
    """One suspension; `fence`, `key` and `replay_until` are for a repeated call."""

    suspension_id: UUID
    attempt_index: int
    attempt_id: UUID
    waitpoint_ids: list[UUID]
    waitpoint_keys: list[str]
    resume_condition: Any
    reason_code: str
    suspended_at: int
    timeout_at: int | None
    timeout_behavior: str | None
    fence: tuple[Any, ...]
    key: str | None
    replay_until: int
    resume_delay: int | None
    is_early: bool = False
    keeps_waitpoints: bool = False
    last_signal_at: int | None = None
    satisfied_at: int | None = None
    closed_at: int | None = None
    close_reason: str | None = None
    trigger_type: str | None = None
    closer_signal_id: UUID | str | None = None
    satisfier_signal_ids: list[UUID | str] = field(default_factory=list)


@dataclass
class Key:
    secret: str
    state: str = "current"
    expires_at: int | None = None


@dataclass
class Log:
    """The four families of events of one execution."""

    lease: list[tuple[Any, ...]] = field(default_factory=list)
    completion: list[tuple[Any, ...]] = field(default_factory=list)
    operator: list[tuple[Any, ...]] = field(default_factory=list)
    signal: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class Execution:
    """One execution. `place` is the letter of the transition table: W D C B, A X V, S, T."""

    new: New
    created_at: int
    priority: int
    place: str = "W"
    pending: str | None = "first"
    blocked_for: str | None = None
    resume_pending: bool = False
    version: int | None = None
    begins_anew: bool = True  # the next attempt is the first of its generation
    stopped: int = 0  # how often in a row changed code stopped it
    stop_epoch: int | None = None
    stop_digests: frozenset[str] = frozenset()
    is_for_others: bool = False  # only other code may claim it
    outcome: str = "none"
    retry_count: int = 0
    replay_count: int = 0
    lease_reclaim_count: int = 0
    epoch: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    lease: Lease | None = None
    lease_lost_at: int | None = None
    lease_revoke_reason: str | None = None
    grant: Grant | None = None
    delay_until: int | None = None
    deadline_at: int | None = None
    attempt_timeout_at: int | None = None
    attempt_timeout_left: int | None = None
    result: bytes | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    cancellation_reason: str | None = None
    cancelled_by: str | None = None
    replay_reason: str | None = None
    replay_requested_by: str | None = None
    progress_pct: int | None = None
    progress_message: str | None = None
    mismatch_at: int | None = None
    last_hmac_validation_failed_at: int | None = None
    waitpoints: dict[UUID, Waitpoint] = field(default_factory=dict)
    suspensions: list[Suspension] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    waits_for: set[str | UUID] = field(default_factory=set)
    started_at: int | None = None
    completed_at: int | None = None
    transitioned_at: int = 0
    mutated_at: int = 0

    @property
    def id(self) -> str:
        return self.new.execution_id

    @property
    def policy(self) -> Json | None:
        return self.new.policy

    @property
    def capabilities(self) -> frozenset[str]:
        return required_capabilities(self.new.policy)

    @property
    def required(self) -> tuple[Any, ...]:
        """Its route: what a worker must serve."""
        return self.new.lane, self.new.kind, self.capabilities, self.version

    @property
    def rank(self) -> tuple[int, int, int]:
        """Claim order: best priority, then oldest, then smallest id."""
        return -self.priority, self.created_at, self.new.uuid.int

    @property
    def is_active(self) -> bool:
        return self.place in "AXV"

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    @property
    def has_open_attempt(self) -> bool:
        return self.is_active or self.pending == "interrupted"

    @property
    def suspension(self) -> Suspension | None:
        """The open one."""
        return self.suspensions[-1] if self.place == "S" else None

    @property
    def suspension_timeout_at(self) -> int | None:
        return None if self.suspension is None else self.suspension.timeout_at

    @property
    def current_waitpoint(self) -> UUID | None:
        return None if self.suspension is None else self.suspension.waitpoint_ids[0]

    @property
    def pending_waitpoints(self) -> list[Waitpoint]:
        return [w for w in self.waitpoints.values() if w.state == "pending"]

    @property
    def current_attempt_id(self) -> UUID | None:
        return None if not self.attempts or self.pending == "retry" else self.attempt.attempt_id

    @property
    def reclaim_cap(self) -> int | None:
        return None if self.policy is None else self.policy.get("max_reclaim_count", 100)

    @property
    def retention(self) -> int:
        return ((self.policy or {}).get("stream_policy") or {}).get("retention_ttl_ms", DAY)

    @property
    def vector(self) -> tuple[str, ...]:
        """phase, ownership, eligibility, blocking reason, outcome, attempt state, public state."""
        if self.place == "T":
            attempt = "attempt_terminal" if self.attempts else "none"
            return "terminal", "unowned", "not_applicable", "none", self.outcome, attempt, _PUBLIC[self.outcome]
        if self.is_active:
            owner, reason, attempt = _OWNED[self.place]
            return "active", owner, "not_applicable", reason, "none", attempt, "active"
        if self.suspension is not None:
            reason = SUSPENDS[self.suspension.reason_code]
            return "suspended", "unowned", "not_applicable", reason, "none", "attempt_interrupted", "suspended"
        eligibility, reason, public = {
            "W": ("eligible_now", "waiting_for_worker", "resumable" if self.resume_pending else "waiting"),
            "D": (
                "not_eligible_until_time",
                "waiting_for_retry_backoff"
                if self.pending == "retry"
                else "waiting_for_resume_delay"
                if self.resume_pending
                else "waiting_for_delay",
                "delayed",
            ),
            "C": ("blocked_by_dependencies", "waiting_for_children", "waiting_children"),
            "B": (BLOCKS.get(self.blocked_for or "", ""), self.blocked_for or "", "waiting"),
        }[self.place]
        if eligibility in ("blocked_by_budget", "blocked_by_quota"):
            public = "rate_limited"
        return "runnable", "unowned", eligibility, reason, "none", _ATTEMPT_STATE[self.pending or ""], public

    @property
    def stops(self) -> int | None:
        is_stopped = self.blocked_for == "waiting_for_capable_worker" and self.stop_epoch == self.epoch
        return self.stopped if is_stopped else None

    @property
    def public_state(self) -> str:
        return self.vector[-1]


BLOCKS = {
    "waiting_for_budget": "blocked_by_budget",
    "waiting_for_quota": "blocked_by_quota",
    "waiting_for_capable_worker": "blocked_by_route",
    "paused_by_operator": "blocked_by_operator",
    "paused_by_policy": "blocked_by_lane_state",
}
SUSPENDS = {
    "waiting_for_signal": "waiting_for_signal",
    "step_boundary": "waiting_for_signal",
    "waiting_for_approval": "waiting_for_approval",
    "waiting_for_callback": "waiting_for_callback",
    "waiting_for_tool_result": "waiting_for_tool_result",
    "waiting_for_operator_review": "paused_by_operator",
    "manual_pause": "paused_by_operator",
    "paused_by_policy": "paused_by_policy",
    "paused_by_budget": "waiting_for_budget",
}
_PUBLIC = {"success": "completed", "failed": "failed", "cancelled": "cancelled", "expired": "expired"}
_OWNED = {
    "A": ("leased", "none", "running_attempt"),
    "X": ("lease_expired_reclaimable", "waiting_for_worker", "attempt_interrupted"),
    "V": ("lease_revoked", "waiting_for_worker", "attempt_interrupted"),
}
_ATTEMPT_STATE = {
    "first": "pending_first_attempt",
    "retry": "pending_retry_attempt",
    "replay": "pending_replay_attempt",
    "interrupted": "attempt_interrupted",
}
_FREE_SOURCES = ("operator_override", "flow_cascade", "system_timeout")


def required_capabilities(policy: Json | None) -> frozenset[str]:
    return frozenset(((policy or {}).get("routing_requirements") or {}).get("required_capabilities", ()))


def backoff(policy: Json, retry: int) -> int:
    """The delay before the retry numbered `retry`, the first being 0; without jitter."""
    rule = policy.get("backoff", {"type": "exponential"})
    match rule.get("type"):
        case "exponential":
            longest = rule.get("max_delay_ms", 60_000)
            try:
                wanted = rule.get("initial_delay_ms", 1000) * float(rule.get("multiplier", 2.0)) ** retry
            except OverflowError:
                wanted = math.inf
            return math.floor(min(wanted, longest))
        case "fixed":
            return int(rule.get("delay_ms", 1000))
        case _:
            return 1000


def retry_delay(policy: Json | None, retries: int, failure_class: str, category: str) -> int | None:
    """The retry decision: None when the failure is final, else how long the next attempt waits."""
    if failure_class in ("permanent", "cancelled") or policy is None:
        return None
    wanted = policy.get("retryable_categories", [])
    if (wanted and category not in wanted) or retries >= policy.get("max_retries", 3):
        return None
    return backoff(policy, retries)


def named_keys(condition: Any) -> set[str]:
    """The waitpoints that a condition speaks of."""
    match condition:
        case {"Single": {"waitpoint_key": key}}:
            return {key}
        case {"Composite": {"kind": "AllOf", "members": members}}:
            return set().union(*map(named_keys, members))
        case {"Composite": {"waitpoints": keys}}:
            return set(keys)
        case _:
            return set()


def home(execution_id: str) -> int:
    """The partition that the id says, of 256."""
    return int(execution_id[-4:], 16) % 256


class Model:
    """A deployment: executions, keys, lanes and the clock."""

    def __init__(self, now: int, lanes: Collection[str] = (), kid: str = "k1", secret: str = "") -> None:
        self.now = now
        self.executions: dict[str, Execution] = {}
        self.kids: dict[str, Key] = {kid: Key(secret)}
        self.keys: dict[tuple[str, str], tuple[str, int]] = {}
        self.lanes = dict.fromkeys(lanes, "active")
        self.logs: dict[str, Log] = {}
        self._spare = count(1)
        self.uncovered: dict[tuple[Any, ...], int] = {}  # routes, and since when

    # Shared procedures

    def _get(self, execution_id: str) -> Execution:
        found = self.executions.get(execution_id)
        if found is None:
            raise Refused("not_found", entity="execution")
        return found

    def _moved(self, e: Execution) -> None:
        e.transitioned_at = e.mutated_at = self.now

    def _not_active(self, e: Execution) -> Refused:
        return Refused(
            "execution_not_active",
            terminal_outcome=e.outcome,
            lease_epoch=str(e.epoch),
            lifecycle_phase=e.vector[0],
            attempt_id=str(e.current_attempt_id or ""),
        )

    def _lease_event(self, e: Execution, kind: str, reason: str | None, by: str | None = None) -> None:
        assert e.lease is not None
        self.logs[e.id].lease.append(
            (
                kind,
                e.lease.lease_id,
                e.lease.epoch - (kind == "reclaimed"),
                e.attempt.attempt_id,
                e.attempt.attempt_index,
                e.lease.worker_id,
                e.lease.worker_instance_id,
                reason,
                by,
                self.now,
            )
        )

    def _recorded(self, e: Execution, who: Fence, call: str) -> Attempt | None:
        wanted = {"fail": ("retry_scheduled", "terminal_failed"), "complete": ("completed",), "cancel": ("cancelled",)}
        for a in e.attempts:
            if (a.lease_id, a.lease_epoch, a.attempt_id) == who[1:4] and who.attempt_index in (None, a.attempt_index):
                return a if a.end_disposition in wanted[call] else None
        return None

    def _holds(self, who: Authority) -> bool:
        e = self.executions.get(who.execution_id)
        if e is None or e.place != "A" or e.lease is None or e.lease.expires_at <= self.now:
            return False
        if isinstance(who, Override):
            return who.source == "operator_override"
        return (e.lease.lease_id, e.lease.epoch, e.attempt.attempt_id) == who[1:4] and who.attempt_index in (
            None,
            e.attempt.attempt_index,
        )

    def _check(self, who: Authority, call: str | None = None, *, fence_only: bool = False) -> Execution:
        """The lease check, in its order. `call` names the calls that are answered again from history."""
        e = self._get(who.execution_id)
        if isinstance(who, Override):
            if fence_only or who.source != "operator_override":
                raise Refused("invalid_input")
        elif call is not None and (attempt := self._recorded(e, who, call)) is not None:
            raise _Recorded(attempt)
        if not e.is_active:
            raise self._not_active(e)
        self._check_lease(e)
        if not self._holds(who):
            raise Refused("stale_lease")
        return e

    def _check_lease(self, e: Execution) -> None:
        assert e.lease is not None
        if e.place == "V":
            raise Refused("lease_revoked")
        if e.place == "X" or e.lease.expires_at <= self.now:
            self._expire_lease(e)
            raise Refused("lease_expired")

    def _expire_lease(self, e: Execution) -> None:
        if e.place == "A":
            e.place, e.lease_lost_at = "X", self.now
            self._lease_event(e, "expired", "lease_expired")
            self._moved(e)

    def _end(
        self,
        e: Execution,
        outcome: str,
        lifecycle: str,
        disposition: str,
        lease_reason: str,
        revoked_by: str = "backend",
        *,
        failure: str | None = None,
        category: str | None = None,
        lease_event: bool = False,
        is_timeout: bool = False,
    ) -> None:
        """Go terminal: the only way there."""
        if e.place == "A" or lease_event:
            self._lease_event(e, "revoked", lease_reason, revoked_by)
        if e.has_open_attempt:
            e.attempt.end(lifecycle, disposition, self.now)
            e.attempt.failure_reason, e.attempt.failure_category = failure, category
        if (failure is not None and (outcome != "cancelled" or is_timeout)) or outcome == "success":
            e.failure_reason, e.failure_category = failure, category
        self._end_waits(e, f"expired:{failure}" if outcome == "expired" else outcome)
        e.place, e.outcome, e.pending, e.blocked_for, e.grant = "T", outcome, None, None, None
        e.resume_pending = False
        e.waits_for.clear()
        e.delay_until = e.attempt_timeout_at = e.attempt_timeout_left = None
        e.completed_at, e.is_for_others = self.now, False
        self.logs[e.id].completion.append((outcome, self.now))
        self._moved(e)
        for parent in self.executions.values():
            if e.id in parent.waits_for:
                self._promote(parent)

    def _end_capped(self, e: Execution) -> None:
        self._end(
            e,
            "failed",
            "ended_failure",
            "terminal_failed",
            "max_reclaims_exceeded",
            "reconciler",
            failure="max_reclaims_exceeded",
            category="infra_crash",
            lease_event=True,
        )

    def _retry(
        self, e: Execution, delay: int, failure: str, category: str, lease_reason: str, revoked_by: str = "backend"
    ) -> None:
        if e.place == "A":
            self._lease_event(e, "revoked", lease_reason, revoked_by)
        e.attempt.end("ended_failure", "retry_scheduled", self.now)
        e.attempt.failure_reason, e.attempt.failure_category = failure, category
        e.failure_reason, e.failure_category = failure, category
        e.attempt.retry_at = e.delay_until = self.now + delay
        e.place, e.pending, e.grant = "D", "retry", None
        e.retry_count += 1
        e.attempt_timeout_at = e.attempt_timeout_left = None
        self._end_waits(e, None)
        self._moved(e)

    def _start(
        self,
        e: Execution,
        worker: Worker,
        ttl: int,
        lease_id: UUID,
        attempt_id: UUID,
        *,
        timeout: int | None = None,
        deadline_at: int | None = None,
        version: int | None = None,
    ) -> Json:
        """A new lease: on a new attempt, or on the one that was interrupted."""
        if e.begins_anew:
            e.version, e.begins_anew = version, False
        e.is_for_others = False
        lost, resumed = e.place in "XV", e.pending == "interrupted"
        owner = e.vector[1]
        e.epoch += 1
        e.lease = Lease(
            lease_id, e.epoch, worker.worker_id, worker.worker_instance_id, ttl, self.now, self.now, self.now + ttl
        )
        armed = (e.policy or {}).get("timeout_policy", {}).get("attempt_timeout_ms")
        if resumed:
            e.attempt.attempt_lifecycle, e.attempt.resumed_at, e.attempt.suspended_at = "started", self.now, None
            e.attempt.lease_id, e.attempt.lease_epoch = lease_id, e.epoch
            e.attempt.worker_id, e.attempt.worker_instance_id = worker[:2]
            armed = e.attempt_timeout_left
        else:
            before = e.attempt if e.attempts else None
            if lost:
                e.attempt.end("interrupted_reclaimed", "reclaimed", self.now)
                e.attempt.reclaim_reason = owner
                e.lease_reclaim_count += 1
            self._end_waits(e, None)
            for w in e.pending_waitpoints:
                w.attempt_index = len(e.attempts)
            replay = e.pending == "replay"
            e.attempts.append(
                Attempt(
                    len(e.attempts),
                    attempt_id,
                    "reclaim" if lost else {"first": "initial"}.get(e.pending or "", e.pending or ""),
                    self.now,
                    lease_id,
                    e.epoch,
                    *worker[:2],
                    previous_attempt_index=None if before is None else before.attempt_index,
                    retry_reason=before.failure_reason if before is not None and e.pending == "retry" else None,
                    replay_reason=e.replay_reason if replay else None,
                    replay_requested_by=e.replay_requested_by if replay else None,
                    replayed_from_attempt_index=before.attempt_index if before is not None and replay else None,
                )
            )
        armed = timeout or armed
        e.attempt_timeout_at = None if armed is None else self.now + armed
        e.deadline_at = e.deadline_at if deadline_at is None else deadline_at
        e.place, e.pending, e.blocked_for, e.grant = "A", None, None, None
        e.delay_until = e.attempt_timeout_left = e.lease_lost_at = e.lease_revoke_reason = None
        e.replay_reason = e.replay_requested_by = None
        e.resume_pending = False
        e.started_at = self.now if e.started_at is None else e.started_at
        self._lease_event(e, "reclaimed" if lost else "acquired", "claim_resumed" if resumed else None)
        self._moved(e)
        return self._claimed(e, "reclaimed" if lost else "resumed" if resumed else "fresh")

    def _claimed(self, e: Execution, handle_kind: str) -> Json:
        assert e.lease is not None
        return said(
            "Claimed",
            execution_id=e.id,
            handle_kind=handle_kind,
            lane_id=e.new.lane,
            execution_kind=e.new.kind,
            namespace=e.new.namespace,
            attempt_index=e.attempt.attempt_index,
            attempt_id=e.attempt.attempt_id,
            attempt_type=e.attempt.attempt_type,
            lease_id=e.lease.lease_id,
            lease_epoch=e.lease.epoch,
            worker_instance_id=e.lease.worker_instance_id,
            lease_expires_at=e.lease.expires_at,
            priority=e.priority,
            created_at=e.created_at,
            deadline_at=e.deadline_at,
            attempt_timeout_at=e.attempt_timeout_at,
            retry_count=e.retry_count,
            reclaim_count=e.lease_reclaim_count,
            replay_count=e.replay_count,
        )

    def _mint(self, minted: Minted, execution_id: str) -> tuple[UUID, UUID]:
        """What the engine minted; something that cannot agree when the engine did not claim this one."""
        nothing = UUID(int=next(self._spare))
        return minted.get(execution_id, (nothing, nothing))

    def _has_grant(self, e: Execution) -> bool:
        return e.grant is not None and e.grant.expires_at > self.now

    # Submitting

    def create(self, new: New) -> Json:
        key = None if new.key is None else (new.namespace, new.key)
        if key is not None and key in self.keys and self.keys[key][1] > self.now:
            return said("Duplicate", execution_id=self.keys[key][0])
        if new.id_given and new.execution_id in self.executions:
            return said("Duplicate", execution_id=new.execution_id)
        if self.lanes.get(new.lane, "active") in ("draining", "disabled"):
            raise Refused("lane_closed")
        policy = new.policy or {}
        self.lanes.setdefault(new.lane, "active")
        delay, deadline = new.delay_until, new.deadline_at
        if delay is None:
            delay = policy.get("delay_until")
        if deadline is None and "execution_deadline_ms" in policy.get("timeout_policy", {}):
            deadline = self.now + policy["timeout_policy"]["execution_deadline_ms"]
        e = Execution(
            new, self.now, min(max(new.priority, 0), 9000), deadline_at=deadline, transitioned_at=self.now,
            mutated_at=self.now,
        )  # fmt: skip
        if delay is not None and delay > self.now:
            e.place, e.delay_until = "D", delay
        if key is not None:
            self.keys[key] = (new.execution_id, self.now + policy.get("dedup_window_ms", DAY))
        self.executions[e.id] = e
        self.logs[e.id] = Log()
        return said("Created", execution_id=e.id, public_state=e.public_state)

    def create_many(self, items: Sequence[New]) -> list[Json]:
        return [self._tried(lambda item=item: self.create(item)) for item in items]

    def _tried(self, call: Callable[[], Json]) -> Json:
        try:
            return call()
        except Refused as error:
            return refused(error)

    # Claiming

    def claimable(self, lane: str, worker: Worker) -> list[Execution]:
        """What this worker may take, best first; those at their reclaim cap included."""
        if self.lanes.get(lane) not in ("active", "draining"):
            return []
        return sorted(
            (
                e
                for e in self.executions.values()
                if e.new.lane == lane
                and (e.place in "WXV" or e.blocked_for == "waiting_for_capable_worker")
                and self._serves(worker, e)
                and e.capabilities <= worker.capabilities
                and not self._has_grant(e)
                and (e.deadline_at is None or e.deadline_at > self.now)
            ),
            key=lambda e: e.rank,
        )

    def _serves(self, worker: Worker, e: Execution) -> bool:
        if e.is_for_others and (worker.digest is None or worker.digest in e.stop_digests):
            return False
        if worker.kinds is None:
            return True
        return e.new.kind in worker.kinds and (e.version is None or e.version in worker.versions)

    def is_capped(self, e: Execution, default: int | None = None) -> bool:
        cap = e.reclaim_cap
        if cap is None:
            cap = 1000 if default is None else default
        return e.lease_reclaim_count >= cap

    def claim_wakes(self, lane: str, worker: Worker) -> bool:
        """Whether a claim may end an awaited execution: the same call may then claim the woken one."""
        ends = {e.id for e in self.claimable(lane, worker) if e.place in "XV" and self.is_capped(e)}
        return any(ends & e.waits_for for e in self.executions.values())

    def eligible(self, lane: str) -> list[str]:
        """What a scheduler sees: everything that waits for a worker and that the fleet covers, in claim order."""
        found = [
            e
            for e in self.executions.values()
            if e.new.lane == lane and e.place == "W" and e.required not in self.uncovered
        ]
        return [e.id for e in sorted(found, key=lambda e: e.rank)]

    def claim(self, lane: str, worker: Worker, ttl: int, limit: int, minted: Minted) -> list[Json]:
        taken: list[Json] = []
        for e in self.claimable(lane, worker):
            if len(taken) == limit:
                break
            if e.place in "XV" and self.is_capped(e):
                self._end_capped(e)
            else:
                version = worker.versions[0] if worker.versions else None
                taken.append(self._start(e, worker, ttl, *self._mint(minted, e.id), version=version))
        if not taken and self.lanes.get(lane) in ("active", "draining"):
            self._judge(lane, worker)
        return taken

    # The fleet: no worker is registered, so that none covers a route with a requirement

    def _judge(self, lane: str, worker: Worker) -> None:
        """A claim found nothing: judge ten routes with work that this worker cannot serve."""
        ready = [
            e
            for e in sorted(self.executions.values(), key=lambda e: e.rank)
            if e.new.lane == lane
            and (e.place in "WXV" or e.blocked_for == "waiting_for_capable_worker")
            and not e.is_for_others
            and (e.capabilities or e.version is not None)
            and not (e.capabilities <= worker.capabilities and self._serves(worker, e))
            and e.required not in self.uncovered
        ]
        for required in list(dict.fromkeys(e.required for e in ready))[:10]:
            self.uncovered[required] = self.now

    def held_by(self, e: Execution) -> tuple[str, int | None] | None:
        """Why readers see that an execution, which waits for a worker, gets none, and since when."""
        if e.place != "W" or self._has_grant(e):
            return None
        if self.lanes[e.new.lane] in ("paused", "disabled"):
            return "paused_by_policy", None
        if e.required in self.uncovered:
            return "waiting_for_capable_worker", self.uncovered[e.required]
        return None

    def _is_uncovered(self, e: Execution) -> bool:
        return e.place == "W" and e.required in self.uncovered and not self._has_grant(e)

    def issue_claim_grant(self, execution_id: str, worker: Worker, ttl: int) -> Json:
        e = self._get(execution_id)
        if e.place != "W" or self._is_uncovered(e):
            raise Refused("execution_not_eligible")
        return self._issue(e, "claim", worker, ttl)

    def _issue(self, e: Execution, kind: str, worker: Worker, ttl: int) -> Json:
        if self._has_grant(e):
            raise Refused("grant_already_exists")
        if missing := sorted(e.capabilities - worker.capabilities):
            e.mismatch_at = e.mutated_at = self.now
            raise Refused("capability_mismatch", detail=",".join(missing))
        e.grant = Grant(kind, worker.worker_id, self.now + ttl)
        return said(f"{kind.capitalize()}Grant", execution_id=e.id, expires_at=e.grant.expires_at)

    def claim_granted(
        self,
        call: str,
        execution_id: str,
        worker: Worker,
        ttl: int,
        lease_id: UUID | None,
        attempt_id: UUID | None,
        minted: Minted,
        *,
        timeout: int | None = None,
        deadline_at: int | None = None,
    ) -> Json:
        """claim_execution (`fresh`), claim_resumed_execution (`resumed`) and issue_grant_and_claim (`operator`)."""
        e = self._get(execution_id)
        by_operator = call == "operator"
        if (
            lease_id is not None
            and e.place == "A"
            and e.lease is not None
            and e.lease.expires_at > self.now
            and e.lease.lease_id == lease_id
            and attempt_id in (None, e.attempt.attempt_id)
        ):
            return self._claimed(e, "fresh" if e.attempt.resumed_at is None else "resumed")
        unfit = Refused("execution_not_eligible" if by_operator else "execution_not_leaseable")
        if e.place not in "WDB":
            raise unfit
        if by_operator and self._has_grant(e):
            raise Refused("grant_already_exists")
        if e.place != "W":
            raise unfit
        if call == "fresh" and e.pending == "interrupted":
            raise Refused("use_claim_resumed_execution")
        if call == "resumed" and e.pending != "interrupted":
            raise Refused("not_a_resumed_execution")
        if not by_operator:
            if e.grant is None or e.grant.kind != "claim" or e.grant.worker_id != worker.worker_id:
                raise Refused("invalid_claim_grant")
            if e.grant.expires_at <= self.now:
                e.grant = None
                raise Refused("claim_grant_expired")
        mint = self._mint(minted, e.id)
        return self._start(
            e, worker, ttl, lease_id or mint[0], attempt_id or mint[1], timeout=timeout, deadline_at=deadline_at
        )

    def issue_reclaim_grant(self, execution_id: str, worker: Worker, ttl: int, cap: int | None) -> Json:
        e = self._get(execution_id)
        if e.place == "A" and e.lease is not None and e.lease.expires_at <= self.now:
            self._expire_lease(e)
        if e.place not in "XV":
            return said("NotReclaimable", execution_id=e.id)
        try:
            if not self._has_grant(e) and e.capabilities <= worker.capabilities and self.is_capped(e, cap):
                self._end_capped(e)
                return said("ReclaimCapExceeded", execution_id=e.id, reclaim_count=e.lease_reclaim_count)
            return self._issue(e, "reclaim", worker, ttl)
        except Refused as error:
            if error.kind != "capability_mismatch":
                raise
            return said("NotReclaimable", execution_id=e.id)

    def reclaim(
        self, execution_id: str, worker: Worker, ttl: int, lease_id: UUID, attempt_id: UUID, cap: int | None
    ) -> Json:
        e = self._get(execution_id)
        if e.grant is None or e.grant.kind != "reclaim" or not self._has_grant(e):
            return said("GrantNotFound", execution_id=e.id)
        if e.grant.worker_id != worker.worker_id:
            raise Refused("invalid_input")
        # A live reclaim grant exists only while the lease is lost: every way out of there deletes it.
        assert e.place in "XV"
        if self.is_capped(e, cap):
            self._end_capped(e)
            return said("ReclaimCapExceeded", execution_id=e.id, reclaim_count=e.lease_reclaim_count)
        return self._start(e, worker, ttl, lease_id, attempt_id)

    # What a lease holder does

    def renew_many(self, items: Sequence[Authority], ttls: Sequence[int | None]) -> list[Json]:
        def effect(place: int, e: Execution) -> None:
            assert e.lease is not None
            e.lease.ttl = ttls[place] or e.lease.ttl
            e.lease.renewed_at, e.lease.expires_at = self.now, self.now + e.lease.ttl
            e.mutated_at = self.now
            self._lease_event(e, "renewed", None)

        def answer(e: Execution) -> Json:
            assert e.lease is not None
            return said("Renewed", expires_at=e.lease.expires_at, lease_epoch=e.epoch)

        return self._batch(items, None, effect, answer, fence_only=True)

    def complete_many(
        self, items: Sequence[Authority], results: Sequence[bytes | None], *, fence_only: bool = True
    ) -> list[Json]:
        def effect(place: int, e: Execution) -> None:
            self._end(e, "success", "ended_success", "completed", "completed")
            e.result = results[place]

        def answer(e: Execution) -> Json:
            return said("Completed", execution_id=e.id, public_state="completed")

        return self._batch(items, "complete", effect, answer, fence_only=fence_only)

    def fail_many(
        self,
        items: Sequence[Authority],
        failures: Sequence[tuple[str, str, str, Json | None]],
        *,
        fence_only: bool = True,
    ) -> list[Json]:
        """Each failure is its reason, class, category and the retry policy that replaces the frozen one."""

        def effect(place: int, e: Execution) -> None:
            reason, failure_class, category, instead = failures[place]
            policy = instead if instead is not None else (e.policy or {}).get("retry_policy")
            delay = retry_delay(policy, e.retry_count, failure_class, category)
            if delay is None:
                self._end(
                    e, "failed", "ended_failure", "terminal_failed", "failed_terminal", failure=reason,
                    category=category,
                )  # fmt: skip
            else:
                self._retry(e, delay, reason, category, "failed_retry_scheduled")

        def answer(e: Execution) -> Json:
            if e.place == "T":
                return said("TerminalFailed", execution_id=e.id)
            return said(
                "RetryScheduled", execution_id=e.id, delay_until=e.delay_until, next_attempt_index=len(e.attempts)
            )

        if not fence_only and isinstance(items[0], Override) and items[0].source == "operator_override":
            e = self.executions.get(items[0].execution_id)
            if e is not None and e.stops is not None:
                reason, _, category, _ = failures[0]
                self._end(e, "failed", "ended_failure", "terminal_failed", "", failure=reason, category=category)
                return [answer(e)]
        return self._batch(items, "fail", effect, answer, fence_only=fence_only)

    def _batch(
        self,
        items: Sequence[Authority],
        call: str | None,
        effect: Callable[[int, Execution], None],
        answer: Callable[[Execution], Json],
        *,
        fence_only: bool = False,
    ) -> list[Json]:
        """Items that hold a lease have their effect, once each; then the others are refused, one after the other."""
        holding = [self._holds(who) and not (fence_only and isinstance(who, Override)) for who in items]
        answers: list[Json | None] = [None] * len(items)
        done: dict[str, Json] = {}
        for place, who in enumerate(items):
            if not holding[place]:
                continue
            if who.execution_id not in done:
                e = self.executions[who.execution_id]
                effect(place, e)
                done[e.id] = answers[place] = answer(e)
            elif call != "fail":
                answers[place] = done[who.execution_id]
        for place, who in enumerate(items):
            if answers[place] is None:
                answers[place] = self._refusal(who, call, fence_only=fence_only)
        return [a for a in answers if a is not None]

    def _refusal(self, who: Authority, call: str | None, *, fence_only: bool) -> Json:
        try:
            self._check(who, call, fence_only=fence_only)
        except Refused as error:
            return refused(error)
        except _Recorded as again:
            return self._again(who.execution_id, again.attempt)
        raise AssertionError("an item that holds the lease was not served")

    def _again(self, execution_id: str, attempt: Attempt) -> Json:
        match attempt.end_disposition:
            case "completed":
                return said("Completed", execution_id=execution_id, public_state="completed")
            case "cancelled":
                return said("Cancelled", execution_id=execution_id, public_state="cancelled")
            case "retry_scheduled":
                return said(
                    "RetryScheduled", execution_id=execution_id, delay_until=attempt.retry_at, next_attempt_index=None
                )
            case _:
                return said("TerminalFailed", execution_id=execution_id)

    def progress(self, who: Authority, percent: int | None, message: str | None) -> None:
        e = self._check(who, fence_only=True)
        e.progress_pct = e.progress_pct if percent is None else percent
        e.progress_message = e.progress_message if message is None else message
        e.mutated_at = self.now

    def pause(self, call: str, who: Authority, delay_until: int | None = None) -> Json:
        """delay, wait_children (no dependency is ever open here) and release; park, unless it suspends."""
        e = self._check(who)
        reason = {
            "delay": "worker_delay", "park": "worker_park", "wait_children": "waiting_children",
            "release": "worker_release", "stop_changed": "steps_changed",
        }[call]  # fmt: skip
        self._lease_event(e, "revoked", reason, "backend")
        e.attempt.attempt_lifecycle, e.attempt.suspended_at = "suspended", self.now
        if e.attempt_timeout_at is not None:
            e.attempt_timeout_left, e.attempt_timeout_at = max(e.attempt_timeout_at - self.now, 1), None
        e.place, e.pending, e.delay_until = "D" if call in ("delay", "park") else "W", "interrupted", delay_until
        self._moved(e)
        name = {"delay": "Delayed", "park": "Parked", "wait_children": "Moved", "release": "Released"}.get(call, "")
        return said(name, execution_id=e.id, public_state=e.public_state)

    def stop_changed(self, who: Authority, digest: str) -> Json:
        e = self._check(who, fence_only=True)
        self.pause("stop_changed", who)
        is_next = e.stop_epoch == e.epoch - 1
        e.stopped = e.stopped + 1 if is_next else 1
        e.stop_digests = e.stop_digests | {digest} if is_next else frozenset({digest})
        e.stop_epoch, e.is_for_others = e.epoch, True
        e.place, e.blocked_for = "B", "waiting_for_capable_worker"
        e.delay_until = self.now + 60_000 * min(60, 2 ** (e.stopped - 1))
        return said("Stopped", execution_id=e.id, public_state="waiting", opens_at=e.delay_until)

    def park(
        self,
        who: Authority,
        until: int | None,
        ends_of: Collection[str],
        signals_on: Mapping[UUID, int],
        suspension_id: UUID,
    ) -> Json:
        """waiting_children for the end of others, else delayed for a time, else suspended."""
        e = self.executions.get(who.execution_id)
        found = [self.executions.get(child) for child in ends_of]
        known = {} if e is None else e.waitpoints
        because = None
        if any(child is None or child.place == "T" for child in found):
            because = "ended"
        elif any(self._is_over(known.get(one), seen) for one, seen in signals_on.items()):
            because = "signal"
        elif until is not None and until <= self.now:
            because = "due"
        e = self._check(who, fence_only=True)
        if because is None and (ends_of or until is not None):
            self.pause("park", who, until)
            e.place = "C" if ends_of else "D"
            e.waits_for = {*ends_of, *signals_on}
        elif because is None:
            self._suspend_waits(e, cast("Fence", who), list(signals_on), suspension_id)
        return said("Parked", execution_id=e.id, parked=because is None, because=because)

    def _suspend_waits(self, e: Execution, who: Fence, ids: list[UUID], suspension_id: UUID) -> None:
        """The next signal on any of them resumes it, and the end of the time of one."""
        waitpoints = [e.waitpoints[one] for one in ids]
        timeout_at, behavior = None, "auto_resume_with_timeout_signal"
        policy = (e.policy or {}).get("suspension_policy") or {}
        if "default_timeout_ms" in policy:
            timeout_at, behavior = self.now + policy["default_timeout_ms"], policy.get("timeout_behavior", "fail")
        expires = min((w.expires_at for w in waitpoints if w.expires_at is not None), default=None)
        if expires is not None and (timeout_at is None or expires < timeout_at):
            timeout_at, behavior = expires, "auto_resume_with_timeout_signal"
        keys = [w.waitpoint_key for w in waitpoints]
        condition = {
            "Composite": {"kind": "Count", "n": 1, "count_kind": "DistinctSignals", "waitpoints": sorted(set(keys))}
        }
        s = Suspension(
            suspension_id, e.attempt.attempt_index, e.attempt.attempt_id, ids, keys, condition, "waiting_for_signal",
            self.now, timeout_at, behavior, who[1:4], None, 0, None, keeps_waitpoints=True,
        )  # fmt: skip
        e.suspensions.append(s)
        for w in waitpoints:
            w.state, w.suspension_id, w.activated_at = "active", suspension_id, self.now
        self._give_up(e)

    def _is_over(self, w: Waitpoint | None, seen: int) -> bool:
        return w is None or w.state != "pending" or w.signal_count > seen

    def _promote(self, e: Execution) -> None:
        e.place, e.delay_until = "W", None
        e.waits_for.clear()
        self._moved(e)

    def cancel(self, who: Authority, reason: str, source: str, *, by_handle: bool) -> Json:
        e = self._get(who.execution_id)
        fence = who if isinstance(who, Fence) else None
        if fence is not None and (attempt := self._recorded(e, fence, "cancel")) is not None:
            return self._again(e.id, attempt)
        if by_handle:
            self._check(who)
        elif e.place == "T":
            if e.outcome != "cancelled":
                raise self._not_active(e)
            return said("Cancelled", execution_id=e.id, public_state="cancelled")
        elif source not in _FREE_SOURCES:
            if e.is_active:
                if fence is None:
                    raise Refused("invalid_input")
                self._check(fence)
            elif source == "lease_holder":
                raise self._not_active(e)
        by = "operator" if source == "operator_override" else "backend"
        self._end(e, "cancelled", "ended_cancelled", "cancelled", "cancelled", by, failure=f"cancelled: {reason}")
        e.cancellation_reason, e.cancelled_by = reason, source
        return said("Cancelled", execution_id=e.id, public_state="cancelled")

    # What operators and schedulers do

    def revoke(self, execution_id: str, reason: str, lease_id: UUID | None, instance: str | None) -> Json:
        e = self._get(execution_id)
        if not e.is_active or e.lease is None:
            return said("AlreadySatisfied", reason="no_active_lease")
        if e.place != "A":
            return said("AlreadySatisfied", reason="already_revoked" if e.place == "V" else "already_expired")
        if instance is not None and instance != e.lease.worker_instance_id:
            return said("AlreadySatisfied", reason="different_worker_instance_id")
        if lease_id is not None and lease_id != e.lease.lease_id:
            return said("AlreadySatisfied", reason="lease_id_mismatch")
        e.place, e.lease_lost_at, e.lease_revoke_reason = "V", self.now, reason
        self._lease_event(e, "revoked", reason, "operator")
        self._moved(e)
        return said("Revoked", execution_id=e.id, lease_id=e.lease.lease_id, lease_epoch=e.epoch)

    def replay(self, execution_id: str, reason: str | None, requested_by: str | None) -> Json:
        e = self._get(execution_id)
        if e.place != "T":
            raise Refused("execution_not_terminal")
        if e.replay_count >= (e.policy or {}).get("max_replay_count", 10):
            raise Refused("max_replays_exhausted")
        if e.outcome == "success":
            e.version, e.begins_anew = None, True
        e.stop_epoch = None
        e.place, e.pending, e.outcome = "W", "replay", "none"
        e.replay_count += 1
        e.completed_at = e.result = e.failure_reason = e.failure_category = e.deadline_at = None
        e.cancellation_reason = e.cancelled_by = e.progress_pct = e.progress_message = None
        e.replay_reason, e.replay_requested_by = reason, requested_by
        self.logs[e.id].operator.append(("replayed", {"branch": "normal"}, self.now))
        self._moved(e)
        return said("Replayed", execution_id=e.id, public_state="waiting")

    def change_priority(self, execution_id: str, priority: int) -> Json:
        e = self._get(execution_id)
        if e.place != "W" or self._is_uncovered(e):
            raise Refused("execution_not_eligible")
        new = min(max(priority, 0), 9000)
        details = {"old_priority": e.priority, "new_priority": new}
        self.logs[e.id].operator.append(("priority_changed", details, self.now))
        e.priority, e.mutated_at = new, self.now
        return said("Changed", execution_id=e.id)

    def block(self, execution_id: str, reason: str) -> Json:
        e = self.executions.get(execution_id)
        if e is None:
            return said("Rejected", message="execution_not_found")
        if e.place == "T":
            return said("Rejected", message="execution_not_active")
        if e.place != "W" or self._has_grant(e) or self._is_uncovered(e):
            return said("Rejected", message="execution_not_eligible")
        e.place, e.blocked_for, e.grant = "B", reason, None
        if reason == "waiting_for_capable_worker":
            e.mismatch_at = self.now
        self._moved(e)
        return said("Blocked", execution_id=e.id, reason=reason)

    def unblock(self, execution_id: str, expected: str | None) -> Json:
        e = self._get(execution_id)
        if self._is_uncovered(e) and expected in (None, "waiting_for_capable_worker"):
            del self.uncovered[e.required]
            return said("Changed", execution_id=e.id)
        if e.place != "B" or expected not in (None, e.blocked_for):
            raise Refused("execution_not_eligible")
        if e.is_for_others:
            e.is_for_others, e.delay_until = False, None
        e.place, e.blocked_for = "W", None
        self._moved(e)
        return said("Changed", execution_id=e.id)

    def set_lane_state(self, lane: str, state: str) -> str:
        before = self.lanes.get(lane, "active")
        self.lanes[lane] = state
        return before

    # When a time is due

    def due_at(self, kind: str, e: Execution) -> int | None:
        """When this kind of timer is due for an execution; None when it is not about it."""
        match kind:
            case "lease":
                return e.lease.expires_at if e.place == "A" and e.lease is not None else None
            case "attempt":
                return e.attempt_timeout_at if e.is_active else None
            case "deadline":
                return e.deadline_at if e.place != "T" else None
            case "delay":
                return e.delay_until if e.place in "DC" or e.is_for_others else None
            case "suspension":
                return e.suspension_timeout_at
            case "waitpoint":
                return min((w.expires_at for w in e.pending_waitpoints if w.expires_at is not None), default=None)
            case _:
                return None if e.completed_at is None else e.completed_at + e.retention

    def is_due(self, kind: str, e: Execution) -> bool:
        at = self.due_at(kind, e)
        return at is not None and at <= self.now

    def _act(self, kind: str, e: Execution) -> str:
        match kind:
            case "lease":
                self._expire_lease(e)
            case "attempt":
                reason = "expired:attempt_timeout"
                delay = retry_delay((e.policy or {}).get("retry_policy"), e.retry_count, "timeout", "timeout")
                if delay is not None:
                    self._retry(e, delay, "attempt_timeout", "timeout", reason, "reconciler")
                    return "retry_scheduled"
                self._end(
                    e, "expired", "ended_failure", "expired", reason, "reconciler", failure="attempt_timeout",
                    category="timeout",
                )  # fmt: skip
            case "deadline":
                self._end(
                    e, "expired", "ended_failure", "expired", "expired:execution_deadline", "reconciler",
                    failure="execution_deadline", category="timeout",
                )  # fmt: skip
            case "delay" if e.is_for_others:
                e.is_for_others, e.delay_until, e.mutated_at = False, None, self.now
            case "delay":
                self._promote(e)
                return "promoted"
            case "suspension":
                self._time_out(e)
            case "waitpoint":
                self._expire_waitpoints(e)
            case _:
                del self.executions[e.id]
        return "expired"

    def run_timers(self, kind: str) -> int:
        due = [e for e in self.executions.values() if self.is_due(kind, e)]
        for e in due:
            self._act(kind, e)
        return len(due)

    def mark_lease_expired(self, execution_id: str) -> Json:
        e = self.executions.get(execution_id)
        if e is None:
            return said("AlreadySatisfied", reason="execution_not_found")
        if not e.is_active:
            return said("AlreadySatisfied", reason="not_active")
        if e.place != "A":
            return said("AlreadySatisfied", reason="already_revoked" if e.place == "V" else "already_expired")
        if not self.is_due("lease", e):
            return said("AlreadySatisfied", reason="not_yet_expired")
        self._expire_lease(e)
        return said("MarkedExpired", execution_id=e.id)

    def promote(self, execution_id: str) -> str:
        e = self.executions.get(execution_id)
        if e is None:
            return "not_found"
        if e.place in "AXVST":
            return "not_runnable"
        if e.delay_until is None or e.is_for_others:
            return "not_delayed"
        return self._act("delay", e) if self.is_due("delay", e) else "not_yet_due"

    def expire(self, execution_id: str, phase: str) -> str:
        kind = {"attempt_timeout": "attempt", "execution_deadline": "deadline"}[phase]
        e = self.executions.get(execution_id)
        if e is None:
            return "not_found"
        if e.place == "T":
            return "already_terminal"
        return self._act(kind, e) if self.is_due(kind, e) else "not_yet_due"

    def sweep(self) -> None:
        """Delete expired keys and grants; only the name of a refusal may change."""
        self._purge_kids()
        self.keys = {key: record for key, record in self.keys.items() if record[1] > self.now}
        for e in self.executions.values():
            if not self._has_grant(e):
                e.grant = None

    # Waitpoints

    def _find(self, waitpoint_id: UUID) -> tuple[Execution, Waitpoint] | None:
        """A waitpoint, and whose it is."""
        for e in self.executions.values():
            if waitpoint_id in e.waitpoints:
                return e, e.waitpoints[waitpoint_id]
        return None

    def _current_kid(self) -> str:
        return next(kid for kid, key in self.kids.items() if key.state == "current")

    def _end_waits(self, e: Execution, reason: str | None) -> None:
        """The attempt is over: with a reason the execution too, else another attempt follows."""
        if reason is not None and e.suspension is not None:
            self._close_suspension(e, reason)
        for w in e.pending_waitpoints:
            if reason is not None or not w.outlives_attempt:
                w.close("closed", "attempt_ended", self.now)

    def _expire_waitpoints(self, e: Execution) -> None:
        """Expire all due waitpoints; executions parked for a signal there continue, because none will arrive."""
        for w in e.pending_waitpoints:
            if w.expires_at is not None and w.expires_at <= self.now:
                w.close("expired", "never_committed", self.now)
                if w.waitpoint_id in e.waits_for:
                    self._promote(e)

    def create_waitpoint(
        self, who: Authority, waitpoint_id: UUID, key: str, expires_in: int, *, outlives_attempt: bool
    ) -> Json:
        e = self._check(who, fence_only=True)
        if expires_in <= 0:
            raise Refused("invalid_input", problem="expires_in_not_positive")
        made = Waitpoint(
            waitpoint_id, e.attempt.attempt_index, key, self._current_kid(), self.now, self.now + expires_in,
            outlives_attempt,
        )  # fmt: skip
        e.waitpoints[waitpoint_id] = made
        return said("NewWaitpoint", waitpoint_id=waitpoint_id, expires_at=made.expires_at)

    def close_waitpoint(self, who: Authority, waitpoint_id: UUID, reason: str) -> Json:
        e = self._check(who, fence_only=True)
        found = self._find(waitpoint_id)
        if found is None:
            raise Refused("not_found", entity="waitpoint")
        owner, w = found
        if owner is not e:
            raise Refused("invalid_waitpoint_for_execution")
        if w.state == "active":
            raise Refused("waitpoint_not_pending")
        if w.state == "pending":
            w.close("closed", reason, self.now)
        return said("Closed", waitpoint_id=waitpoint_id)

    def expire_waitpoint(self, execution_id: str, waitpoint_id: UUID) -> Json:
        e = self.executions.get(execution_id)
        w = None if e is None else e.waitpoints.get(waitpoint_id)
        if e is None or w is None:
            return said("AlreadySatisfied", reason="not_found")
        if w.state != "pending":
            return said("AlreadySatisfied", reason="not_pending")
        if w.expires_at is None or w.expires_at > self.now:
            return said("AlreadySatisfied", reason="not_yet_due")
        self._expire_waitpoints(e)
        return said("Closed", waitpoint_id=waitpoint_id)

    def signalable(self, e: Execution) -> list[Waitpoint]:
        """What a list shows: what can be signalled."""
        return [
            w
            for w in sorted(e.waitpoints.values(), key=lambda w: w.waitpoint_id.int)
            if w.state == "active" or (w.state == "pending" and (w.expires_at or 0) > self.now)
        ]

    # Suspending and resuming

    def suspend(
        self,
        who: Authority,
        suspension_id: UUID,
        bindings: Sequence[tuple[UUID, str | None]],
        condition: Any,
        *,
        by_triple: bool,
        reason: str,
        timeout_at: int | None,
        behavior: str,
        delay: int | None,
        key: str | None,
    ) -> Json:
        """A binding is an id with its key, or without one when it is pending already."""
        if isinstance(who, Override):
            raise Refused("invalid_input")
        if timeout_at is not None and timeout_at + 600_000 < self.now:
            raise Refused("invalid_input", problem="timeout_at_in_past")
        e = self._get(who.execution_id)
        before = next((s for s in reversed(e.suspensions) if key and s.key == key), None)
        if before is not None and before.replay_until > self.now and before.fence == who[1:4]:
            return self._suspended(e, before)
        if e.place == "S" and not by_triple:
            raise Refused("already_suspended")
        self._check(who, fence_only=True)
        if any(key is not None and self._find(one) is not None for one, key in bindings):
            raise Refused("waitpoint_already_exists")
        pending = [self._usable(e, one) for one, key in bindings if key is None]
        keys = [e.waitpoints[one].waitpoint_key if key is None else key for one, key in bindings]
        if pending and named_keys(condition) not in (set(), set(keys)):
            raise Refused("invalid_input", problem="waitpoint_key_mismatch")

        arrived = [s for s in e.signals if s.waitpoint_id in {w.waitpoint_id for w in pending}]
        sent = [g.sent for g in arrived]
        last = closer(condition, sent)
        policy = (e.policy or {}).get("suspension_policy") or {}
        if last is None and timeout_at is None and "default_timeout_ms" in policy:
            timeout_at, behavior = self.now + policy["default_timeout_ms"], policy.get("timeout_behavior", "fail")
        s = Suspension(
            suspension_id, e.attempt.attempt_index, e.attempt.attempt_id, [one for one, _ in bindings], keys,
            condition, reason, self.now, timeout_at, behavior, who[1:4], key,
            self.now + min(7 * DAY, 7 * DAY if timeout_at is None else max(timeout_at - self.now, 0) + 60_000),
            delay, is_early=last is not None, last_signal_at=max((g.accepted_at for g in arrived), default=None),
        )  # fmt: skip
        e.suspensions.append(s)
        for one, fresh in bindings:
            if fresh is not None:
                kid = self._current_kid()
                e.waitpoints[one] = Waitpoint(one, e.attempt.attempt_index, fresh, kid, self.now, None)
            w = e.waitpoints[one]
            w.matched_signal_count = 0
            w.state, w.suspension_id, w.activated_at, w.expires_at = "active", suspension_id, self.now, timeout_at
            w.required_signal_names = required_names(condition, w.waitpoint_key)
        for place, g in enumerate(arrived, 1):
            g.suspension_id = suspension_id
            g.observed_effect = "resume_condition_satisfied" if place == last else "appended_to_waitpoint"
            g.match_detail = match_detail(condition, sent[: place - 1], g.sent)
            if last is not None and place > last and g.match_detail == "advanced":
                g.match_detail = "duplicate_satisfier"  # it was satisfied by then
            e.waitpoints[g.waitpoint_id].matched_signal_count += g.match_detail == "advanced"
        if last is not None:
            contributed = [arrived[place - 1] for place in sorted(places(condition, sent[:last]))]
            self._close_suspension(e, "resumed", arrived[last - 1], contributed)
            return self._suspended(e, s)
        self._give_up(e)
        return self._suspended(e, s)

    def _give_up(self, e: Execution) -> None:
        """The lease of an execution that becomes suspended."""
        self._lease_event(e, "revoked", "suspend", "backend")
        e.attempt.attempt_lifecycle, e.attempt.suspended_at = "suspended", self.now
        if e.attempt_timeout_at is not None:
            e.attempt_timeout_left, e.attempt_timeout_at = max(e.attempt_timeout_at - self.now, 1), None
        e.epoch += 1
        e.attempt.lease_epoch = e.epoch  # so that no older fence matches the attempt when it ends
        e.place, e.pending = "S", "interrupted"
        self._moved(e)

    def _usable(self, e: Execution, waitpoint_id: UUID) -> Waitpoint:
        found = self._find(waitpoint_id)
        if found is None:
            raise Refused("not_found", entity="waitpoint")
        owner, w = found
        if owner is not e or w.attempt_index != e.attempt.attempt_index:
            raise Refused("invalid_waitpoint_for_execution")
        if w.state == "expired" or (w.state == "pending" and (w.expires_at or 0) <= self.now):
            self._expire_waitpoints(e)
            raise Refused("pending_waitpoint_expired")
        if w.state != "pending":
            raise Refused("waitpoint_not_pending")
        return w

    def _suspended(self, e: Execution, s: Suspension) -> Json:
        answer = said(
            "AlreadySatisfied" if s.is_early else "Suspended",
            suspension_id=s.suspension_id,
            waitpoint_ids=s.waitpoint_ids,
            waitpoint_keys=s.waitpoint_keys,
        )
        if not s.is_early:
            answer["handle"] = ("suspended", s.attempt_index, *s.fence)
        return answer

    def _close_suspension(
        self,
        e: Execution,
        reason: str,
        closer: Signal | None = None,
        contributed: Sequence[Signal] = (),
        trigger: str | None = None,
    ) -> None:
        s = e.suspensions[-1]
        s.closed_at, s.close_reason, s.trigger_type = self.now, reason, trigger
        s.closer_signal_id = None if closer is None else closer.signal_id
        s.satisfier_signal_ids = [g.signal_id for g in contributed]
        s.satisfied_at = self.now if reason == "resumed" else None
        if s.keeps_waitpoints and reason in ("resumed", "timed_out_auto_resume"):
            for one in s.waitpoint_ids:
                w = e.waitpoints[one]
                w.state, w.suspension_id, w.activated_at, w.required_signal_names = "pending", None, None, []
            self._expire_waitpoints(e)
            return
        for one in s.waitpoint_ids:
            e.waitpoints[one].close("closed", reason, self.now)
            e.waitpoints[one].satisfied_at = s.satisfied_at

    def _resume(self, e: Execution, delay: int) -> None:
        e.place, e.resume_pending = "D" if delay > 0 else "W", True
        e.delay_until = self.now + delay if delay > 0 else None
        self._moved(e)

    def resume_execution(self, execution_id: str, trigger: str, delay: int) -> Json:
        e = self._get(execution_id)
        if e.place != "S":
            raise Refused("execution_not_suspended")
        self._close_suspension(e, "operator_resumed", trigger=trigger)
        self._resume(e, delay)
        details = {
            "trigger_type": trigger,
            "suspension_id": str(e.suspensions[-1].suspension_id),
            "resume_delay_ms": delay,
        }
        self.logs[e.id].operator.append(("resumed", details, self.now))
        return said("Resumed", execution_id=e.id, public_state=e.public_state)

    def expire_suspension(self, execution_id: str) -> Json:
        e = self.executions.get(execution_id)
        if e is None:
            return said("AlreadySatisfied", reason="not_found")
        if e.suspension is None:
            return said("AlreadySatisfied", reason="not_suspended")
        if not self.is_due("suspension", e):
            return said("AlreadySatisfied", reason="not_yet_due")
        behavior = e.suspension.timeout_behavior
        self._time_out(e)
        return said("ExpiredSuspension", execution_id=e.id, behavior_applied=behavior)

    def _time_out(self, e: Execution) -> None:
        s = e.suspensions[-1]
        behavior = s.timeout_behavior
        if behavior == "escalate":
            details = {
                "reason_code": s.reason_code,
                "suspension_id": str(s.suspension_id),
                "timeout_at": s.timeout_at,
            }
            self.logs[e.id].operator.append(("suspension_escalated", details, self.now))
            s.reason_code, s.timeout_at, s.timeout_behavior = "waiting_for_operator_review", None, None
            for one in s.waitpoint_ids:
                e.waitpoints[one].is_escalated = True
                if not s.keeps_waitpoints:
                    e.waitpoints[one].expires_at = None
            self._moved(e)
        elif behavior == "auto_resume_with_timeout_signal" and s.keeps_waitpoints:
            self._close_suspension(e, "timed_out_auto_resume")
            self._resume(e, 0)
        elif behavior == "auto_resume_with_timeout_signal":
            told = Signal(
                f"timeout {s.suspension_id}", s.waitpoint_ids[0], s.waitpoint_keys[0], s.suspension_id, "timeout",
                "system", "system", "suspension_timeout", self.now, target_scope="execution",
                observed_effect="resume_condition_satisfied", match_detail="not_evaluated",
            )  # fmt: skip
            e.signals.append(told)
            self._close_suspension(e, "timed_out_auto_resume", told, [told])
            self._resume(e, 0)
        else:
            outcome, lifecycle, disposition = {
                "fail": ("failed", "ended_failure", "terminal_failed"),
                "cancel": ("cancelled", "ended_cancelled", "cancelled"),
                "expire": ("expired", "ended_failure", "expired"),
            }[behavior or "fail"]
            reason = f"suspension_timeout:{behavior}"
            self._close_suspension(e, f"timed_out_{behavior}")
            e.place = "D"  # suspended no more, and not ended yet
            self._end(
                e, outcome, lifecycle, disposition, "suspension_timeout", failure=reason, category="timeout",
                is_timeout=True,
            )  # fmt: skip
            if behavior == "cancel":
                e.cancellation_reason, e.cancelled_by = reason, "system_timeout"

    # Signals

    def deliver(
        self,
        execution_id: str,
        waitpoint_id: UUID,
        signal_id: UUID,
        name: str,
        source: tuple[str, str],
        *,
        token: str | None,
        lane: str | None = None,
        category: str = "external",
        scope: str = "waitpoint",
        payload: bytes | None = None,
        key: str | None = None,
        dedup: int = DAY,
        delay: int | None = None,
        most: int | None = None,
        maxlen: int = 1000,
    ) -> Json:
        """`token` is what the caller shows: genuine, wrong or missing; None when an operator names the lane."""
        if token is not None:
            self._check_token(execution_id, waitpoint_id, token)
        e = self._get(execution_id)
        if lane is not None and lane != e.new.lane:
            raise Refused("invalid_input")
        w = e.waitpoints.get(waitpoint_id)
        if w is None:
            raise Refused("not_found", entity="waitpoint")
        same = [g for g in e.signals if g.signal_id == signal_id] or [
            g
            for g in reversed(e.signals)
            if g.waitpoint_id == waitpoint_id and key and g.idempotency_key == key and g.accepted_at + dedup > self.now
        ]
        log = self.logs[e.id].signal
        if same:
            log.append(("deduped", same[0].signal_id, waitpoint_id, source[1], self.now))
            return said("DuplicateSignal", existing_signal_id=same[0].signal_id)
        if e.place == "T":
            raise Refused("target_not_signalable")
        if w.state == "pending" and (w.expires_at or 0) <= self.now:
            self._expire_waitpoints(e)
        if w.state in ("closed", "expired"):
            raise Refused("waitpoint_closed")
        if most is None:
            most = (e.policy or {}).get("max_signals_per_execution", 10_000)
        if most and len(e.signals) >= most:
            raise Refused("signal_limit_exceeded")
        new = Signal(
            signal_id, waitpoint_id, w.waitpoint_key, w.suspension_id, name, category, *source, self.now, payload, key,
            scope, "buffered_for_pending_waitpoint", "not_evaluated",
        )  # fmt: skip
        e.signals.append(new)
        w.signal_count += 1
        w.last_signal_at = self.now
        if w.state == "pending":
            if waitpoint_id in e.waits_for:
                self._promote(e)
        else:
            self._evaluate(e, w, new, delay, maxlen)
        log.append((new.observed_effect, signal_id, waitpoint_id, source[1], self.now))
        return said("Accepted", signal_id=signal_id, effect=new.observed_effect, match_detail=new.match_detail)

    def _evaluate(self, e: Execution, w: Waitpoint, new: Signal, delay: int | None, maxlen: int) -> None:
        s = e.suspensions[-1]
        arrived = [g for g in e.signals if g.waitpoint_id in s.waitpoint_ids and not g.is_dropped]
        sent = [g.sent for g in arrived]
        if s.keeps_waitpoints:
            arrived, sent = [new], [new.sent]
        new.match_detail = match_detail(s.resume_condition, sent[:-1], new.sent)
        new.observed_effect = "appended_to_waitpoint"
        w.matched_signal_count += new.match_detail == "advanced"
        s.last_signal_at = self.now
        if holds(s.resume_condition, sent):
            new.observed_effect = "resume_condition_satisfied"
            contributed = [arrived[place - 1] for place in sorted(places(s.resume_condition, sent))]
            self._close_suspension(e, "resumed", new, contributed, "signal")
            self._resume(e, (s.resume_delay or 0) if delay is None else delay)
            return
        spare = [g for g in arrived if g.waitpoint_id == w.waitpoint_id and g.match_detail != "advanced"]
        for g in spare[: max(len(spare) - maxlen, 0)]:
            g.is_dropped = True
            w.dropped_signal_count += 1

    def observe(self, execution_id: str, attempt_index: int) -> list[UUID | str]:
        e = self.executions.get(execution_id)
        own = [] if e is None else [s for s in e.suspensions if s.attempt_index == attempt_index]
        return own[-1].satisfier_signal_ids if own else []

    # Keys

    def _check_token(self, execution_id: str, waitpoint_id: UUID, token: str) -> None:
        e = self.executions.get(execution_id)
        problem: str | None = None
        if token == "missing":
            problem = "missing_token"
        elif token != "genuine" or e is None or waitpoint_id not in e.waitpoints:
            problem = "invalid_token"
        else:
            key = self.kids[e.waitpoints[waitpoint_id].token_kid]
            if key.state == "retired":
                problem = "invalid_token"
            elif key.expires_at is not None and key.expires_at < self.now:
                problem = "token_expired"
        if problem is not None:
            if e is not None and (e.last_hmac_validation_failed_at or 0) <= self.now - 1000:
                e.last_hmac_validation_failed_at = self.now
            raise Refused("invalid_token", detail=problem)

    def _purge_kids(self) -> int:
        over = [key for key in self.kids.values() if key.expires_at is not None and key.expires_at < self.now]
        for key in over:
            key.state, key.expires_at = "retired", None
        return len(over)

    def rotate(self, kid: str, secret: str, grace: int) -> Json:
        known = self.kids.get(kid)
        if known is not None:
            if known.state != "current" or known.secret != secret:
                raise Refused("rotation_conflict")
            return said("RotationNoop", kid=kid)
        before = self._current_kid()
        self.kids[before].state, self.kids[before].expires_at = "verifying", self.now + grace
        self.kids[kid] = Key(secret)
        return said("Rotated", previous_kid=before, new_kid=kid, gc_count=self._purge_kids())

    def verifying(self) -> list[tuple[str, int]]:
        found = [(key.expires_at, kid) for kid, key in self.kids.items() if key.expires_at is not None]
        return [(kid, at) for at, kid in sorted(found) if at >= self.now]
