"""The stored state, its projection, and the tables."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import Corruption
from flowfabric.values.legal import LEGAL, LegalRow, is_consistent, is_legal, legal_row
from flowfabric.values.state import TERMINAL_STATES, LeaseLostReason, Pending, State, TerminalOutcome
from flowfabric.values.transitions import POSITIONS, TRANSITIONS, Transition, matches, position
from flowfabric.values.vector import (
    ELIGIBILITY_OF,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    StateVector,
    derive_public_state,
    project,
)
from tests.each import each

RUNNABLE = {State.WAITING, State.DELAYED, State.RATE_LIMITED, State.WAITING_CHILDREN, State.RESUMABLE}
TERMINAL = {
    State.COMPLETED: TerminalOutcome.SUCCESS,
    State.FAILED: TerminalOutcome.FAILED,
    State.CANCELLED: TerminalOutcome.CANCELLED,
    State.EXPIRED: TerminalOutcome.EXPIRED,
    State.SKIPPED: TerminalOutcome.SKIPPED,
}

# (state, reason, pending, resume_pending, lease_lost, attempts), the row and the position they give
LEGAL_FACTS = [
    (("waiting", None, "first", False, None, 0), 1, "W.1"),
    (("waiting", "waiting_for_worker", "retry", False, None, 1), 1, "W.r"),
    (("waiting", None, "replay", False, None, 1), 1, "W.p"),
    (("waiting", None, "interrupted", False, None, 1), 1, "W.i"),
    (("resumable", None, "interrupted", True, None, 1), 1, "W.i"),
    (("delayed", None, "first", False, None, 0), 2, "D.1"),
    (("delayed", None, "interrupted", False, None, 1), 2, "D.i"),
    (("delayed", None, "retry", False, None, 1), 3, "D.r"),
    (("delayed", "waiting_for_retry_backoff", "retry", False, None, 1), 3, "D.r"),
    (("delayed", None, "interrupted", True, None, 1), 4, "D.i"),
    (("delayed", "waiting_for_resume_delay", "interrupted", True, None, 1), 4, "D.i"),
    (("waiting_children", None, "first", False, None, 0), 5, "C.1"),
    (("waiting_children", None, "replay", False, None, 0), 5, "C.p"),
    (("waiting_children", None, "interrupted", False, None, 1), 5, "C.i"),
    (("rate_limited", "waiting_for_budget", "first", False, None, 0), 6, "B.1"),
    (("rate_limited", "waiting_for_quota", "retry", False, None, 1), 6, "B.r"),
    (("waiting", "waiting_for_capable_worker", "first", False, None, 0), 7, "B.1"),
    (("waiting", "waiting_for_locality_match", "interrupted", True, None, 1), 7, "B.i"),
    (("waiting", "paused_by_policy", "replay", False, None, 1), 8, "B.p"),
    (("waiting", "paused_by_operator", "first", False, None, 0), 9, "B.1"),
    (("waiting", "paused_by_flow_cancel", "first", False, None, 0), 9, "B.1"),
    (("active", None, None, False, None, 1), 10, "A"),
    (("active", None, None, False, "expired", 1), 11, "X"),
    (("active", None, None, False, "revoked", 1), 12, "V"),
    *(
        (("suspended", reason, "interrupted", False, None, 1), 13, "S")
        for reason in (
            "waiting_for_signal",
            "waiting_for_approval",
            "waiting_for_callback",
            "waiting_for_tool_result",
            "waiting_for_budget",
            "paused_by_operator",
            "paused_by_policy",
        )
    ),
    *(((state.value, None, None, False, None, 1), 14, f"T:{o}") for state, o in TERMINAL.items()),
    (("cancelled", None, None, False, None, 0), 14, "T:cancelled"),
]


@each(("facts", "number", "at"), LEGAL_FACTS)
def test_stored_facts_project_to_their_legal_row(
    facts: tuple[str, str | None, str | None, bool, str | None, int], number: int, at: str
) -> None:
    vector = project(*facts)
    row = legal_row(vector)
    assert row is not None
    assert row.number == number
    assert position(vector) == at
    assert is_consistent(vector, resume_pending=facts[3])


def test_every_legal_row_is_reached_from_stored_facts() -> None:
    assert {number for _, number, _ in LEGAL_FACTS} == set(range(1, 15)) == {row.number for row in LEGAL}


@each(
    ("facts", "expected"),
    [
        (
            ("delayed", None, "retry", False, None, 2),
            ("runnable unowned not_eligible_until_time waiting_for_retry_backoff none pending_retry_attempt delayed"),
        ),
        (
            ("active", None, None, False, None, 1),
            "active leased not_applicable none none running_attempt active",
        ),
        (
            ("active", None, None, False, "expired", 1),
            ("active lease_expired_reclaimable not_applicable waiting_for_worker none attempt_interrupted active"),
        ),
        (
            ("active", None, None, False, "revoked", 1),
            "active lease_revoked not_applicable waiting_for_worker none attempt_interrupted active",
        ),
        (
            ("completed", None, None, False, None, 1),
            "terminal unowned not_applicable none success attempt_terminal completed",
        ),
        (
            ("skipped", None, None, False, None, 0),
            "terminal unowned not_applicable none skipped none skipped",
        ),
    ],
)
def test_the_projection_fills_all_seven_dimensions(
    facts: tuple[str, str | None, str | None, bool, str | None, int], expected: str
) -> None:
    assert " ".join(msgspec.structs.astuple(project(*facts))) == expected


@each(
    "facts",
    [
        ("waiting", None, None, False, None, 0),
        ("waiting", "waiting_for_signal", "first", False, None, 0),
        ("waiting", "waiting_for_budget", "first", False, None, 0),
        ("delayed", "waiting_for_delay", "retry", False, None, 1),
        ("delayed", "waiting_for_children", "first", False, None, 0),
        ("waiting_children", None, "retry", False, None, 1),
        ("rate_limited", None, "first", False, None, 0),
        ("rate_limited", "paused_by_operator", "first", False, None, 0),
        ("suspended", None, "interrupted", False, None, 1),
        ("suspended", "waiting_for_children", "interrupted", False, None, 1),
        ("active", "waiting_for_worker", None, False, None, 1),
        ("completed", "waiting_for_worker", None, False, None, 1),
    ],
)
def test_contradictory_facts_are_reported_and_not_hidden(
    facts: tuple[str, str | None, str | None, bool, str | None, int],
) -> None:
    vector = project(*facts)
    assert not is_legal(vector)
    with pytest.raises(Corruption):
        position(vector)


@each(
    ("facts", "resume_pending"),
    [
        (("waiting", None, "interrupted", True, None, 1), True),
        (("resumable", None, "interrupted", False, None, 1), False),
    ],
)
def test_the_resume_flag_decides_between_waiting_and_resumable(
    facts: tuple[str, str | None, str | None, bool, str | None, int], resume_pending: bool
) -> None:
    vector = project(*facts)
    assert is_legal(vector)
    assert not is_consistent(vector, resume_pending)
    assert is_consistent(vector, not resume_pending)


@each(
    "facts",
    [
        ("running", None, None, False, None, 0),
        ("waiting", "claimed", "first", False, None, 0),
        ("waiting", None, "initial", False, None, 0),
        ("active", None, None, False, "released", 1),
        ("", None, None, False, None, 0),
    ],
)
def test_a_word_that_is_not_ours_is_corruption(
    facts: tuple[str, str | None, str | None, bool, str | None, int],
) -> None:
    with pytest.raises(Corruption, match="which is not a"):
        project(*facts)


@given(
    st.sampled_from(State),
    st.none() | st.sampled_from(BlockingReason),
    st.none() | st.sampled_from(Pending),
    st.booleans(),
    st.none() | st.sampled_from(LeaseLostReason),
    st.integers(0, 3),
)
def test_the_projection_answers_for_any_known_words_and_survives_json(
    state: State,
    reason: BlockingReason | None,
    pending: Pending | None,
    resume: bool,
    lost: LeaseLostReason | None,
    attempts: int,
) -> None:
    vector = project(state, reason, pending, resume, lost, attempts)
    assert vector.public_state is state
    assert msgspec.json.decode(msgspec.json.encode(vector), type=StateVector) == vector
    # A legal vector sits in exactly one row.
    assert sum(row.allows(vector) for row in LEGAL) <= 1
    if is_legal(vector) and state not in (State.WAITING, State.RESUMABLE):
        assert is_consistent(vector, resume)


@each(
    ("phase", "eligibility", "outcome", "resume", "public"),
    [
        *(("terminal", "not_applicable", o.value, False, s.value) for s, o in TERMINAL.items()),
        ("terminal", "not_applicable", "none", False, "failed"),
        *(("suspended", e.value, "none", False, "suspended") for e in EligibilityState),
        *(("active", e.value, "none", True, "active") for e in EligibilityState),
        *(("submitted", e.value, "none", False, "waiting") for e in EligibilityState),
        ("runnable", "eligible_now", "none", True, "resumable"),
        ("runnable", "eligible_now", "none", False, "waiting"),
        ("runnable", "not_eligible_until_time", "none", False, "delayed"),
        ("runnable", "not_eligible_until_time", "none", True, "delayed"),
        ("runnable", "blocked_by_dependencies", "none", False, "waiting_children"),
        ("runnable", "blocked_by_budget", "none", False, "rate_limited"),
        ("runnable", "blocked_by_quota", "none", False, "rate_limited"),
        ("runnable", "blocked_by_route", "none", True, "waiting"),
        ("runnable", "blocked_by_lane_state", "none", False, "waiting"),
        ("runnable", "blocked_by_operator", "none", False, "waiting"),
        ("runnable", "not_applicable", "none", False, "waiting"),
    ],
)
def test_the_public_word_is_derived(phase: str, eligibility: str, outcome: str, resume: bool, public: str) -> None:
    derived = derive_public_state(
        LifecyclePhase(phase), EligibilityState(eligibility), TerminalOutcome(outcome), resume
    )
    assert derived is State(public)


def vectors_of(row: LegalRow) -> list[StateVector]:
    return [
        StateVector(
            lifecycle_phase=row.lifecycle_phase,
            ownership_state=row.ownership_state,
            eligibility_state=eligibility,
            blocking_reason=reason,
            terminal_outcome=outcome,
            attempt_state=attempt,
            public_state=public,
        )
        for eligibility, reason, outcome, attempt, public in product(
            row.eligibility_state,
            row.blocking_reason,
            row.terminal_outcome,
            row.attempt_state,
            row.public_state,
        )
    ]


@each("row", LEGAL)
def test_a_legal_vector_has_a_position_and_belongs_to_one_row(row: LegalRow) -> None:
    legal = [vector for vector in vectors_of(row) if is_legal(vector)]
    assert legal
    for vector in legal:
        assert legal_row(vector) is row
        assert row.number in POSITIONS[position(vector)[0]]


def test_budget_and_quota_are_not_mixed_up() -> None:
    vector = project("rate_limited", "waiting_for_budget", "first", False, None, 0)
    mixed = msgspec.structs.replace(vector, eligibility_state=EligibilityState.BLOCKED_BY_QUOTA)
    assert is_legal(vector)
    assert not is_legal(mixed)


def test_a_terminal_word_and_its_outcome_agree() -> None:
    vector = project("completed", None, None, False, None, 1)
    assert not is_legal(msgspec.structs.replace(vector, public_state=State.FAILED))
    assert not is_legal(msgspec.structs.replace(vector, ownership_state=OwnershipState.LEASED))


@each("state", State)
def test_a_state_is_terminal_exactly_when_it_has_an_outcome(state: State) -> None:
    assert state.is_terminal is (state in TERMINAL)
    assert (state in TERMINAL_STATES) is state.is_terminal
    assert state.outcome is TERMINAL.get(state, TerminalOutcome.NONE)
    if state.is_terminal:
        assert state.outcome.state is state


def test_no_outcome_has_no_state() -> None:
    with pytest.raises(ValueError, match="none"):
        _ = TerminalOutcome.NONE.state


def test_the_vocabulary_has_its_size() -> None:
    sizes = [
        len(words)
        for words in (
            LifecyclePhase,
            OwnershipState,
            EligibilityState,
            BlockingReason,
            TerminalOutcome,
            AttemptState,
            State,
        )
    ]
    assert sizes == [5, 4, 9, 17, 6, 7, 12]
    assert len(LEGAL) == 14
    assert set(State) == RUNNABLE | {State.ACTIVE, State.SUSPENDED} | set(TERMINAL)
    assert set(ELIGIBILITY_OF.values()) == set(EligibilityState) - {EligibilityState.NOT_APPLICABLE}


def every_position() -> set[str]:
    return {position(vector) for row in LEGAL for vector in vectors_of(row) if is_legal(vector)}


@each("row", TRANSITIONS)
def test_a_transition_names_known_positions(row: Transition) -> None:
    known = every_position()
    for pattern in (*row.sources, *row.targets):
        assert pattern in ("-", "=") or any(matches(pattern, at) for at in known), pattern


@each("row", TRANSITIONS)
def test_a_terminal_transition_writes_exactly_one_completion(row: Transition) -> None:
    completions = [event for event in row.events if event.startswith("K")]
    ends = [target for target in row.targets if target.startswith("T:")]
    if not ends:
        assert completions == []
    elif len(ends) == 1:
        assert completions == [f"K:{ends[0].removeprefix('T:')}"]
    else:
        assert completions == ["K"]


@each("row", TRANSITIONS)
def test_only_replay_and_retention_leave_a_terminal_state(row: Transition) -> None:
    if any(source.startswith("T") for source in row.sources):
        assert row.targets == ("=",) or row.operations[0] in ("replay_execution", "trim_retention")


@each("row", TRANSITIONS)
def test_the_epoch_grows_exactly_when_a_lease_is_acquired_or_given_up_by_suspend(row: Transition) -> None:
    acquires = any(event in ("L:acquired", "L:reclaimed") for event in row.events)
    assert ("current_lease_epoch" in row.counters) is (acquires or (row.targets == ("S",) and row.sources == ("A",)))
    assert acquires is (row.targets == ("A",))


@each("row", TRANSITIONS)
def test_taking_a_live_lease_away_is_always_told(row: Transition) -> None:
    if "A" in row.sources and row.targets not in (("=",), ("A",)):
        assert {"L:revoked", "L:expired"} & {*row.events, *row.if_leased}


def test_the_rows_are_numbered_without_gaps() -> None:
    assert [row.number for row in TRANSITIONS] == list(range(1, len(TRANSITIONS) + 1))


def test_every_position_can_be_entered_and_left() -> None:
    inner = every_position()
    for at in inner:
        letter = at[0]
        assert any(matches(s, at) for row in TRANSITIONS for s in row.sources), at
        assert any(target in (at, letter) for row in TRANSITIONS for target in row.targets), at


@given(st.sampled_from(sorted(POSITIONS)), st.sampled_from(["", ".1", ".r", ".p", ".i"]))
def test_a_bare_letter_matches_every_suffix(letter: str, suffix: str) -> None:
    assert matches(letter, letter + suffix)
    assert matches(letter + suffix, letter + suffix)
    assert not matches(letter + ".1", letter + ".r")
