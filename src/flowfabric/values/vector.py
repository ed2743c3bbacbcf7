"""The state in seven dimensions (phase, owner, eligibility, reason, outcome, attempt, word), as a port expects it.

None of them is stored: only `project` computes them, from the stored state and the few facts beside it.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeVar

from msgspec import Struct

from flowfabric.errors import Corruption
from flowfabric.values.state import STATE_OF, LeaseLostReason, Pending, State, TerminalOutcome


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


class AttemptState(StrEnum):
    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


_ATTEMPT_OF: Final[dict[Pending, AttemptState]] = {
    Pending.FIRST: AttemptState.PENDING_FIRST_ATTEMPT,
    Pending.RETRY: AttemptState.PENDING_RETRY_ATTEMPT,
    Pending.REPLAY: AttemptState.PENDING_REPLAY_ATTEMPT,
    Pending.INTERRUPTED: AttemptState.ATTEMPT_INTERRUPTED,
}

# The eligibility of a runnable execution with this reason. Reasons that only suspend are absent.
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
    """Return the public state that the other dimensions imply, also for corrupt ones, which `is_legal` reports."""
    match lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            return STATE_OF.get(terminal_outcome, State.FAILED)
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
    """Compute the seven dimensions from the stored facts. Raises `Corruption` for an unknown word.

    `reason` may be None where the state implies it. `public_state` is the stored word, not a derived one, so
    facts that contradict it are not hidden: `is_legal` refuses the vector (and `is_consistent` compares
    `resume_pending`).
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
