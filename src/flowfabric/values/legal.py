"""The fourteen combinations of the seven dimensions that can occur, as data that tests iterate over."""

from __future__ import annotations

from typing import Final, NamedTuple

from flowfabric.values.state import TERMINAL_STATES, State, TerminalOutcome
from flowfabric.values.vector import (
    ELIGIBILITY_OF,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    StateVector,
    derive_public_state,
)


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
    """Return the legal combination of this vector, or None."""
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
    """Whether the vector is legal and its public state is the one its other dimensions imply."""
    derived = derive_public_state(
        vector.lifecycle_phase, vector.eligibility_state, vector.terminal_outcome, resume_pending
    )
    return is_legal(vector) and vector.public_state is derived
