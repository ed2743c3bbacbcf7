"""The one stored state: twelve words, the outcome of each terminal one, and the facts stored beside it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """The state of an execution. The database column holds exactly these words."""

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
        return STATE_OF[self]


class Pending(StrEnum):
    """Which attempt comes next while none is running. `INTERRUPTED` continues the one that exists."""

    FIRST = "first"
    RETRY = "retry"
    REPLAY = "replay"
    INTERRUPTED = "interrupted"


class LeaseLostReason(StrEnum):
    """How an active execution lost its lease."""

    EXPIRED = "expired"
    REVOKED = "revoked"


STATE_OF: Final[dict[TerminalOutcome, State]] = {
    TerminalOutcome.SUCCESS: State.COMPLETED,
    TerminalOutcome.FAILED: State.FAILED,
    TerminalOutcome.CANCELLED: State.CANCELLED,
    TerminalOutcome.EXPIRED: State.EXPIRED,
    TerminalOutcome.SKIPPED: State.SKIPPED,
}
UNSUCCESSFUL: Final = frozenset((State.FAILED, State.CANCELLED, State.EXPIRED, State.SKIPPED))
"""Ends other than success."""
_OUTCOME_OF: Final[dict[State, TerminalOutcome]] = {state: outcome for outcome, state in STATE_OF.items()}

TERMINAL_STATES: Final = frozenset(_OUTCOME_OF)
