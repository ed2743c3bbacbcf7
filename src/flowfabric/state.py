"""Where an execution stands: the one stored state, what it means, and how it may change.

Stored are one of twelve words and a few facts the word does not imply. Everything else the outside world asks
about (phase, owner, eligibility, reason, outcome, attempt) is projected from them by `project`, here and
nowhere else. `LEGAL` and `TRANSITIONS` are the specification as data: tests iterate over them, the database
functions obey them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from flowfabric.errors import Corruption


class State(StrEnum):
    """Where an execution stands. The database column holds exactly these words."""

    WAITING = "waiting"
    DELAYED = "delayed"
    RATE_LIMITED = "rate_limited"
    WAITING_CHILDREN = "waiting_children"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    RESUMABLE = "resumable"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"

    @property
    def is_terminal(self) -> bool:
        return self in _OUTCOME_OF

    @property
    def outcome(self) -> TerminalOutcome:
        return _OUTCOME_OF.get(self, TerminalOutcome.NONE)


class LifecyclePhase(StrEnum):
    SUBMITTED = "submitted"  # never stored; part of the vocabulary only
    RUNNABLE = "runnable"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


class OwnershipState(StrEnum):
    UNOWNED = "unowned"
    LEASED = "leased"
    LEASE_EXPIRED_RECLAIMABLE = "lease_expired_reclaimable"
    LEASE_REVOKED = "lease_revoked"


class EligibilityState(StrEnum):
    ELIGIBLE_NOW = "eligible_now"
    NOT_ELIGIBLE_UNTIL_TIME = "not_eligible_until_time"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    BLOCKED_BY_BUDGET = "blocked_by_budget"
    BLOCKED_BY_QUOTA = "blocked_by_quota"
    BLOCKED_BY_ROUTE = "blocked_by_route"
    BLOCKED_BY_LANE_STATE = "blocked_by_lane_state"
    BLOCKED_BY_OPERATOR = "blocked_by_operator"
    NOT_APPLICABLE = "not_applicable"


class BlockingReason(StrEnum):
    NONE = "none"
    WAITING_FOR_WORKER = "waiting_for_worker"
    WAITING_FOR_RETRY_BACKOFF = "waiting_for_retry_backoff"
    WAITING_FOR_RESUME_DELAY = "waiting_for_resume_delay"
    WAITING_FOR_DELAY = "waiting_for_delay"
    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_CHILDREN = "waiting_for_children"
    WAITING_FOR_BUDGET = "waiting_for_budget"
    WAITING_FOR_QUOTA = "waiting_for_quota"
    WAITING_FOR_CAPABLE_WORKER = "waiting_for_capable_worker"
    WAITING_FOR_LOCALITY_MATCH = "waiting_for_locality_match"
    PAUSED_BY_OPERATOR = "paused_by_operator"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_FLOW_CANCEL = "paused_by_flow_cancel"


class TerminalOutcome(StrEnum):
    NONE = "none"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"

    @property
    def state(self) -> State:
        """The terminal state of this outcome; `NONE` has no state and raises ValueError."""
        if self is TerminalOutcome.NONE:
            raise ValueError("no state has the outcome 'none'")
        return _STATE_OF[self]


class AttemptState(StrEnum):
    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


# The seventh dimension is the stored word itself.
PublicState = State


class Pending(StrEnum):
    """Which attempt comes next while none is running. `INTERRUPTED` continues the one that exists."""

    FIRST = "first"
    RETRY = "retry"
    REPLAY = "replay"
    INTERRUPTED = "interrupted"


class LeaseLostReason(StrEnum):
    """How the lease of an active execution went away."""

    EXPIRED = "expired"
    REVOKED = "revoked"


_STATE_OF: Final[dict[TerminalOutcome, State]] = {
    TerminalOutcome.SUCCESS: State.COMPLETED,
    TerminalOutcome.FAILED: State.FAILED,
    TerminalOutcome.CANCELLED: State.CANCELLED,
    TerminalOutcome.EXPIRED: State.EXPIRED,
    TerminalOutcome.SKIPPED: State.SKIPPED,
}
_OUTCOME_OF: Final[dict[State, TerminalOutcome]] = {state: outcome for outcome, state in _STATE_OF.items()}

TERMINAL_STATES: Final = frozenset(_OUTCOME_OF)

_ATTEMPT_OF: Final[dict[Pending, AttemptState]] = {
    Pending.FIRST: AttemptState.PENDING_FIRST_ATTEMPT,
    Pending.RETRY: AttemptState.PENDING_RETRY_ATTEMPT,
    Pending.REPLAY: AttemptState.PENDING_REPLAY_ATTEMPT,
    Pending.INTERRUPTED: AttemptState.ATTEMPT_INTERRUPTED,
}

# What a reason means for a runnable execution. Reasons that only suspend are absent.
ELIGIBILITY_OF: Final[dict[BlockingReason, EligibilityState]] = {
    BlockingReason.WAITING_FOR_WORKER: EligibilityState.ELIGIBLE_NOW,
    BlockingReason.WAITING_FOR_DELAY: EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    BlockingReason.WAITING_FOR_RETRY_BACKOFF: EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    BlockingReason.WAITING_FOR_RESUME_DELAY: EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    BlockingReason.WAITING_FOR_CHILDREN: EligibilityState.BLOCKED_BY_DEPENDENCIES,
    BlockingReason.WAITING_FOR_BUDGET: EligibilityState.BLOCKED_BY_BUDGET,
    BlockingReason.WAITING_FOR_QUOTA: EligibilityState.BLOCKED_BY_QUOTA,
    BlockingReason.WAITING_FOR_CAPABLE_WORKER: EligibilityState.BLOCKED_BY_ROUTE,
    BlockingReason.WAITING_FOR_LOCALITY_MATCH: EligibilityState.BLOCKED_BY_ROUTE,
    BlockingReason.PAUSED_BY_POLICY: EligibilityState.BLOCKED_BY_LANE_STATE,
    BlockingReason.PAUSED_BY_OPERATOR: EligibilityState.BLOCKED_BY_OPERATOR,
    BlockingReason.PAUSED_BY_FLOW_CANCEL: EligibilityState.BLOCKED_BY_OPERATOR,
}


class StateVector(Struct, frozen=True, kw_only=True):
    """The seven dimensions of one execution at one moment."""

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    terminal_outcome: TerminalOutcome
    attempt_state: AttemptState
    public_state: State


def derive_public_state(
    lifecycle_phase: LifecyclePhase,
    eligibility_state: EligibilityState,
    terminal_outcome: TerminalOutcome,
    resume_pending: bool,
) -> State:
    """The public word the other dimensions imply; corrupt ones too, which `is_legal` then reports."""
    match lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            return _STATE_OF.get(terminal_outcome, State.FAILED)
        case LifecyclePhase.SUSPENDED:
            return State.SUSPENDED
        case LifecyclePhase.ACTIVE:
            return State.ACTIVE
        case LifecyclePhase.SUBMITTED:
            return State.WAITING
        case LifecyclePhase.RUNNABLE:
            pass
    match eligibility_state:
        case EligibilityState.ELIGIBLE_NOW:
            return State.RESUMABLE if resume_pending else State.WAITING
        case EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
            return State.DELAYED
        case EligibilityState.BLOCKED_BY_DEPENDENCIES:
            return State.WAITING_CHILDREN
        case EligibilityState.BLOCKED_BY_BUDGET | EligibilityState.BLOCKED_BY_QUOTA:
            return State.RATE_LIMITED
        case _:
            return State.WAITING


_Word = TypeVar("_Word", bound=StrEnum)


def _known(kind: type[_Word], word: str, column: str) -> _Word:
    try:
        return kind(word)
    except ValueError:
        raise Corruption(f"{column} holds {word!r}, which is not a {kind.__name__}") from None


def project(
    state: str,
    reason: str | None,
    pending: str | None,
    resume_pending: bool,
    lease_lost: str | None,
    attempts: int,
) -> StateVector:
    """The seven dimensions from the stored facts. Raises `Corruption` for a word that is not ours.

    `reason` may be None where the state implies it. `public_state` is the stored word, not a derived one, so
    facts that contradict it give a vector that `is_legal` refuses (and `resume_pending` is compared by
    `is_consistent`) instead of being hidden.
    """
    return _project(state, reason, pending, resume_pending, lease_lost, attempts > 0)


@lru_cache(maxsize=1024)
def _project(
    state: str,
    reason: str | None,
    pending: str | None,
    resume_pending: bool,
    lease_lost: str | None,
    has_attempt: bool,
) -> StateVector:
    word = _known(State, state, "state")
    why = None if reason is None else _known(BlockingReason, reason, "blocking_reason")
    following = None if pending is None else _known(Pending, pending, "pending")
    lost = None if lease_lost is None else _known(LeaseLostReason, lease_lost, "lease_lost")

    phase = LifecyclePhase.RUNNABLE
    ownership = OwnershipState.UNOWNED
    eligibility = EligibilityState.NOT_APPLICABLE
    attempt = AttemptState.NONE if following is None else _ATTEMPT_OF[following]

    if word.is_terminal:
        phase = LifecyclePhase.TERMINAL
        attempt = AttemptState.ATTEMPT_TERMINAL if has_attempt else AttemptState.NONE
        why = why or BlockingReason.NONE
    elif word is State.ACTIVE:
        phase = LifecyclePhase.ACTIVE
        match lost:
            case None:
                ownership, attempt = OwnershipState.LEASED, AttemptState.RUNNING_ATTEMPT
                why = why or BlockingReason.NONE
            case LeaseLostReason.EXPIRED:
                ownership, attempt = (
                    OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
                    AttemptState.ATTEMPT_INTERRUPTED,
                )
                why = why or BlockingReason.WAITING_FOR_WORKER
            case LeaseLostReason.REVOKED:
                ownership, attempt = OwnershipState.LEASE_REVOKED, AttemptState.ATTEMPT_INTERRUPTED
                why = why or BlockingReason.WAITING_FOR_WORKER
    elif word is State.SUSPENDED:
        phase = LifecyclePhase.SUSPENDED
        attempt = AttemptState.ATTEMPT_INTERRUPTED
        why = why or BlockingReason.NONE
    else:
        why = why or _implied_reason(word, following, resume_pending)
        eligibility = ELIGIBILITY_OF.get(why, EligibilityState.NOT_APPLICABLE)

    return StateVector(
        lifecycle_phase=phase,
        ownership_state=ownership,
        eligibility_state=eligibility,
        blocking_reason=why,
        terminal_outcome=word.outcome,
        attempt_state=attempt,
        public_state=word,
    )


def _implied_reason(word: State, pending: Pending | None, resume_pending: bool) -> BlockingReason:
    match word:
        case State.DELAYED if pending is Pending.RETRY:
            return BlockingReason.WAITING_FOR_RETRY_BACKOFF
        case State.DELAYED if resume_pending:
            return BlockingReason.WAITING_FOR_RESUME_DELAY
        case State.DELAYED:
            return BlockingReason.WAITING_FOR_DELAY
        case State.WAITING_CHILDREN:
            return BlockingReason.WAITING_FOR_CHILDREN
        case State.RATE_LIMITED:
            return BlockingReason.NONE  # budget or quota: not implied, so its absence is a fault
        case _:
            return BlockingReason.WAITING_FOR_WORKER


class LegalRow(NamedTuple):
    """One legal combination: for each dimension the values it may take."""

    number: int
    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: frozenset[EligibilityState]
    blocking_reason: frozenset[BlockingReason]
    terminal_outcome: frozenset[TerminalOutcome]
    attempt_state: frozenset[AttemptState]
    public_state: frozenset[State]

    def allows(self, vector: StateVector) -> bool:
        return (
            vector.lifecycle_phase is self.lifecycle_phase
            and vector.ownership_state is self.ownership_state
            and vector.eligibility_state in self.eligibility_state
            and vector.blocking_reason in self.blocking_reason
            and vector.terminal_outcome in self.terminal_outcome
            and vector.attempt_state in self.attempt_state
            and vector.public_state in self.public_state
        )


def _runnable(
    number: int,
    eligibility: str,
    reasons: str,
    public: str,
    attempts: str = "pending_first_attempt pending_retry_attempt pending_replay_attempt attempt_interrupted",
) -> LegalRow:
    return LegalRow(
        number,
        LifecyclePhase.RUNNABLE,
        OwnershipState.UNOWNED,
        frozenset(map(EligibilityState, eligibility.split())),
        frozenset(map(BlockingReason, reasons.split())),
        frozenset({TerminalOutcome.NONE}),
        frozenset(map(AttemptState, attempts.split())),
        frozenset(map(State, public.split())),
    )


def _not_runnable(
    number: int, phase: LifecyclePhase, ownership: OwnershipState, reasons: str, attempt: AttemptState
) -> LegalRow:
    return LegalRow(
        number,
        phase,
        ownership,
        frozenset({EligibilityState.NOT_APPLICABLE}),
        frozenset(map(BlockingReason, reasons.split())),
        frozenset({TerminalOutcome.NONE}),
        frozenset({attempt}),
        frozenset({State(phase.value)}),
    )


LEGAL: Final[tuple[LegalRow, ...]] = (
    _runnable(1, "eligible_now", "waiting_for_worker", "waiting resumable"),
    _runnable(
        2,
        "not_eligible_until_time",
        "waiting_for_delay",
        "delayed",
        "pending_first_attempt attempt_interrupted",
    ),
    _runnable(3, "not_eligible_until_time", "waiting_for_retry_backoff", "delayed", "pending_retry_attempt"),
    _runnable(4, "not_eligible_until_time", "waiting_for_resume_delay", "delayed", "attempt_interrupted"),
    _runnable(
        5,
        "blocked_by_dependencies",
        "waiting_for_children",
        "waiting_children",
        "pending_first_attempt pending_replay_attempt attempt_interrupted",
    ),
    _runnable(6, "blocked_by_budget blocked_by_quota", "waiting_for_budget waiting_for_quota", "rate_limited"),
    _runnable(7, "blocked_by_route", "waiting_for_capable_worker waiting_for_locality_match", "waiting"),
    _runnable(8, "blocked_by_lane_state", "paused_by_policy", "waiting"),
    _runnable(9, "blocked_by_operator", "paused_by_operator paused_by_flow_cancel", "waiting"),
    _not_runnable(10, LifecyclePhase.ACTIVE, OwnershipState.LEASED, "none", AttemptState.RUNNING_ATTEMPT),
    _not_runnable(
        11,
        LifecyclePhase.ACTIVE,
        OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
        "waiting_for_worker",
        AttemptState.ATTEMPT_INTERRUPTED,
    ),
    _not_runnable(
        12,
        LifecyclePhase.ACTIVE,
        OwnershipState.LEASE_REVOKED,
        "waiting_for_worker",
        AttemptState.ATTEMPT_INTERRUPTED,
    ),
    _not_runnable(
        13,
        LifecyclePhase.SUSPENDED,
        OwnershipState.UNOWNED,
        "waiting_for_signal waiting_for_approval waiting_for_callback waiting_for_tool_result"
        " waiting_for_budget paused_by_operator paused_by_policy",
        AttemptState.ATTEMPT_INTERRUPTED,
    ),
    LegalRow(
        14,
        LifecyclePhase.TERMINAL,
        OwnershipState.UNOWNED,
        frozenset({EligibilityState.NOT_APPLICABLE}),
        frozenset({BlockingReason.NONE}),
        frozenset(TerminalOutcome) - {TerminalOutcome.NONE},
        frozenset({AttemptState.ATTEMPT_TERMINAL, AttemptState.NONE}),
        TERMINAL_STATES,
    ),
)


def legal_row(vector: StateVector) -> LegalRow | None:
    """The legal combination this vector is, or None."""
    for row in LEGAL:
        if row.allows(vector):
            if vector.lifecycle_phase is LifecyclePhase.TERMINAL:
                return row if vector.terminal_outcome.state is vector.public_state else None
            if row.number == 6 and ELIGIBILITY_OF[vector.blocking_reason] is not vector.eligibility_state:
                return None
            return row
    return None


def is_legal(vector: StateVector) -> bool:
    """Whether the vector is one of the fourteen legal combinations."""
    return legal_row(vector) is not None


def is_consistent(vector: StateVector, resume_pending: bool) -> bool:
    """Whether the vector is legal and its public word is the one its other dimensions imply."""
    derived = derive_public_state(
        vector.lifecycle_phase, vector.eligibility_state, vector.terminal_outcome, resume_pending
    )
    return is_legal(vector) and vector.public_state is derived


# The letters of the transition table, and the legal combinations each stands for.
POSITIONS: Final[dict[str, tuple[int, ...]]] = {
    "W": (1,),
    "D": (2, 3, 4),
    "C": (5,),
    "B": (6, 7, 8, 9),
    "A": (10,),
    "X": (11,),
    "V": (12,),
    "S": (13,),
    "T": (14,),
}
_LETTER_OF: Final = {number: letter for letter, numbers in POSITIONS.items() for number in numbers}
_SUFFIX_OF: Final = {
    AttemptState.PENDING_FIRST_ATTEMPT: ".1",
    AttemptState.PENDING_RETRY_ATTEMPT: ".r",
    AttemptState.PENDING_REPLAY_ATTEMPT: ".p",
    AttemptState.ATTEMPT_INTERRUPTED: ".i",
}


def position(vector: StateVector) -> str:
    """The vector in the shorthand of the transition table: `W.1`, `D.r`, `C.i`, `A`, `S`, `T:failed`.

    Raises `Corruption` for an illegal vector.
    """
    row = legal_row(vector)
    if row is None:
        raise Corruption(f"illegal state vector: {vector}")
    letter = _LETTER_OF[row.number]
    if letter == "T":
        return f"T:{vector.terminal_outcome}"
    return letter + _SUFFIX_OF[vector.attempt_state] if letter in "WDCB" else letter


def matches(pattern: str, at: str) -> bool:
    """Whether a position satisfies a pattern of the table: `W` takes every `W.x`, `T` every outcome."""
    return pattern in (at, at[0])


class Transition(NamedTuple):
    """One row of the transition table.

    `sources` and `targets` are patterns over positions: `W` any suffix, `W.1` exactly that one. `-` is no
    record: before create, or after retention. `=` as a target is "unchanged". A target letter without a
    suffix keeps the suffix of the source. `counters` grow by one each. Events are `L:` lease, `K:` completion
    (bare `K`: with the outcome of the target), `O:` operator, `G:` signal; `if_leased` are written only when
    a live lease is taken away.
    """

    number: int
    sources: tuple[str, ...]
    operations: tuple[str, ...]
    guard: str
    targets: tuple[str, ...]
    attempt: str
    counters: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    if_leased: tuple[str, ...] = ()


TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition(1, ("-",), ("create_execution",), "delay_until > now", ("D.1",), ""),
    Transition(2, ("-",), ("create_execution",), "otherwise", ("W.1",), ""),
    Transition(3, ("W", "D", "C", "B"), ("apply_dependency",), "edge unsatisfied", ("C",), "preserved"),
    Transition(4, ("C",), ("dependencies_satisfied",), "", ("W",), "preserved"),
    Transition(
        5,
        ("W", "D", "C", "B", "A", "X", "V", "S"),
        ("dependencies_impossible",),
        "",
        ("T:skipped",),
        "open attempt -> ended_cancelled (dependency_impossible)",
        events=("K:skipped",),
        if_leased=("L:revoked",),
    ),
    Transition(6, ("W",), ("block_execution_for_admission",), "known reason", ("B",), "preserved"),
    Transition(7, ("B",), ("unblock_execution",), "reason matches", ("W",), "preserved"),
    Transition(8, ("D",), ("promote_delayed",), "due", ("W",), "preserved"),
    Transition(9, ("W",), ("issue_claim_grant",), "no live grant, capabilities match", ("=",), ""),
    # Of the blocked ones only those blocked by route, and only by `claim`.
    Transition(
        10,
        ("W.1", "W.r", "W.p", "B.1", "B.r", "B.p"),
        ("claim", "claim_execution", "issue_grant_and_claim"),
        "fresh claim",
        ("A",),
        "new: initial/retry/replay, started",
        counters=("total_attempt_count", "current_lease_epoch"),
        events=("L:acquired",),
    ),
    Transition(
        11,
        ("W.i",),
        ("claim", "claim_resumed_execution", "claim_from_resume_grant", "issue_grant_and_claim"),
        "resume claim",
        ("A",),
        "same, suspended -> started",
        counters=("current_lease_epoch",),
        events=("L:acquired",),
    ),
    Transition(12, ("W",), ("change_priority",), "", ("=",), "", events=("O:priority_changed",)),
    Transition(13, ("A",), ("renew",), "lease check", ("=",), "", events=("L:renewed",)),
    Transition(14, ("A",), ("progress", "append_frame", "report_usage"), "lease check", ("=",), ""),
    Transition(
        15,
        ("A",),
        ("complete",),
        "lease check",
        ("T:success",),
        "ended_success",
        events=("L:revoked", "K:success"),
    ),
    Transition(
        16,
        ("A",),
        ("fail",),
        "lease check, retry decided",
        ("D.r",),
        "ended_failure",
        counters=("retry_count",),
        events=("L:revoked",),
    ),
    Transition(
        17,
        ("A",),
        ("fail",),
        "lease check, no retry",
        ("T:failed",),
        "ended_failure",
        events=("L:revoked", "K:failed"),
    ),
    Transition(18, ("A",), ("delay",), "lease check", ("D.i",), "started -> suspended", events=("L:revoked",)),
    Transition(
        19,
        ("A",),
        ("wait_children",),
        "lease check",
        ("C.i", "W.i"),
        "started -> suspended",
        events=("L:revoked",),
    ),
    # The epoch grows, so that every older fence is stale at once.
    Transition(
        20,
        ("A",),
        ("suspend",),
        "lease check",
        ("S",),
        "started -> suspended",
        counters=("current_lease_epoch",),
        events=("L:revoked",),
    ),
    Transition(
        21,
        ("S",),
        ("condition_met", "operator_resume", "auto_resume"),
        "resume delay 0",
        ("W.i",),
        "stays suspended",
        events=("G",),
    ),
    Transition(
        22,
        ("S",),
        ("condition_met", "operator_resume", "auto_resume"),
        "resume delay > 0",
        ("D.i",),
        "stays suspended",
        events=("G",),
    ),
    Transition(
        23,
        ("S",),
        ("suspension_timeout",),
        "behaviour fail / cancel / expire",
        ("T:failed", "T:cancelled", "T:expired"),
        "ended_failure / ended_cancelled / ended_failure",
        events=("K",),
    ),
    Transition(24, ("S",), ("suspension_timeout",), "behaviour escalate", ("S",), ""),
    Transition(
        25,
        ("A",),
        ("mark_lease_expired_if_due", "lease_check"),
        "lease_expires_at <= now",
        ("X",),
        "interrupted, record still started",
        events=("L:expired",),
    ),
    Transition(
        26,
        ("A",),
        ("revoke_lease",),
        "lease matches",
        ("V",),
        "interrupted, record still started",
        events=("L:revoked",),
    ),
    Transition(27, ("X", "V"), ("issue_reclaim_grant",), "cap not reached, capabilities match", ("=",), ""),
    Transition(
        28,
        ("X", "V"),
        ("reclaim_execution", "claim"),
        "count < cap",
        ("A",),
        "old interrupted_reclaimed; new reclaim, started",
        counters=("total_attempt_count", "lease_reclaim_count", "current_lease_epoch"),
        events=("L:reclaimed",),
    ),
    Transition(
        29,
        ("X", "V"),
        ("reclaim_execution", "claim", "issue_reclaim_grant"),
        "count >= cap",
        ("T:failed",),
        "ended_failure (max_reclaims_exceeded)",
        events=("L:revoked", "K:failed"),
    ),
    Transition(
        30,
        ("A", "X", "V"),
        ("expire_attempt_timeout",),
        "timer due, retry decided",
        ("D.r",),
        "ended_failure (attempt_timeout)",
        counters=("retry_count",),
        if_leased=("L:revoked",),
    ),
    Transition(
        31,
        ("A", "X", "V"),
        ("expire_attempt_timeout",),
        "timer due, no retry",
        ("T:expired",),
        "ended_failure",
        events=("K:expired",),
        if_leased=("L:revoked",),
    ),
    Transition(
        32,
        ("W", "D", "C", "B", "A", "X", "V", "S"),
        ("expire_execution_deadline",),
        "due",
        ("T:expired",),
        "open attempt -> ended_failure",
        events=("K:expired",),
        if_leased=("L:revoked",),
    ),
    Transition(
        33,
        ("W", "D", "C", "B"),
        ("cancel_execution",),
        "source allowed",
        ("T:cancelled",),
        "interrupted attempt -> ended_cancelled",
        events=("K:cancelled",),
    ),
    # By handle from A only; the handle of a lost lease no longer passes the lease check.
    Transition(
        34,
        ("A", "X", "V"),
        ("cancel", "cancel_execution"),
        "source and fence allowed",
        ("T:cancelled",),
        "ended_cancelled",
        events=("K:cancelled",),
        if_leased=("L:revoked",),
    ),
    Transition(
        35,
        ("S",),
        ("cancel_execution",),
        "source allowed",
        ("T:cancelled",),
        "ended_cancelled",
        events=("K:cancelled",),
    ),
    Transition(
        36,
        ("T",),
        ("replay_execution",),
        "count < max",
        ("W.p", "C.p"),
        "none created",
        counters=("replay_count",),
        events=("O:replayed",),
    ),
    Transition(37, ("T",), ("holder_operation",), "error or the recorded outcome", ("=",), ""),
    Transition(38, ("T",), ("trim_retention",), "due", ("-",), "deleted"),
    # A worker gives work back while draining: the attempt goes on elsewhere.
    Transition(39, ("A",), ("release",), "lease check", ("W.i",), "started -> suspended", events=("L:revoked",)),
)
