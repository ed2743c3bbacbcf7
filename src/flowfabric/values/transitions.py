"""The transition table: which operation moves an execution between which states.

It is the specification as data: tests iterate over it, the database functions follow it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from flowfabric.errors import Corruption
from flowfabric.values.legal import legal_row
from flowfabric.values.vector import AttemptState, StateVector

# The letters of the transition table, and the legal combinations each covers.
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
    """Return the vector in the shorthand of the transition table: `W.1`, `D.r`, `C.i`, `A`, `S`, `T:failed`.

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
    """Whether a position satisfies a pattern of the table: `W` matches every `W.x`, `T` every outcome."""
    return pattern in (at, at[0])


class Transition(NamedTuple):
    """One row of the transition table.

    `sources` and `targets` are patterns over positions: `W` any suffix, `W.1` exactly that one. `-` is no
    record: before create, or after retention. `=` as a target means unchanged. A target letter without a
    suffix keeps the suffix of the source. `counters` grow by one each. Events are `L:` lease, `K:` completion
    (bare `K`: with the outcome of the target), `O:` operator, `G:` signal; `if_leased` are written only when
    a live lease is revoked.
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
    # Of the blocked ones only those blocked by route, and only by `claim`; likewise below.
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
        ("W.i", "B.i"),
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
    Transition(18, ("A",), ("delay", "park"), "lease check", ("D.i",), "started -> suspended", events=("L:revoked",)),
    Transition(
        19,
        ("A",),
        ("wait_children", "park"),
        "lease check",
        ("C.i", "W.i"),
        "started -> suspended",
        events=("L:revoked",),
    ),
    # The epoch grows, so that every older fence is stale immediately.
    Transition(
        20,
        ("A",),
        ("suspend", "park"),
        "lease check",
        ("S",),
        "started -> suspended",
        counters=("current_lease_epoch",),
        events=("L:revoked",),
    ),
    # The event depends on the operation: that of the signal, O:resumed of the operator, none of a timeout.
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
    Transition(
        24,
        ("S",),
        ("suspension_timeout",),
        "behaviour escalate",
        ("S",),
        "",
        events=("O:suspension_escalated",),
    ),
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
    # A draining worker gives work back: the attempt continues on another worker.
    Transition(39, ("A",), ("release",), "lease check", ("W.i",), "started -> suspended", events=("L:revoked",)),
    # The first of the things that a parked execution waits for.
    Transition(40, ("C.i", "D.i"), ("end_of_other", "signal", "time_due"), "parked", ("W.i",), "stays suspended"),
    # Its code has changed: blocked by route, until a worker with code that fits claims it. An operator may fail it.
    Transition(41, ("A",), ("stop_changed",), "lease check", ("B.i",), "started -> suspended", events=("L:revoked",)),
    Transition(
        42,
        ("B.i",),
        ("fail",),
        "by an operator, stopped by changed code",
        ("T:failed",),
        "ended_failure",
        events=("K:failed",),
    ),
    # A running execution would use more than a budget allows: it waits until every budget has room for its needs.
    Transition(
        43, ("A",), ("pause_for_budget",), "lease check", ("B.i",), "started -> suspended", events=("L:revoked",)
    ),
)
