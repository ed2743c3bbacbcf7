"""Every state and every operation: the database allows what the transition table says and refuses the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.attempt import Attempt, Claimed, Completed, Completion
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.legal import LEGAL, is_consistent, legal_row
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.transitions import TRANSITIONS, position
from tests import sampling
from tests.each import Rows, each
from tests.ids import id_in
from tests.sql.cases import (
    BLOCKING_REASONS,
    BY_NAME,
    COUNTERS,
    HOLDER_CALLS,
    NOT_HERE,
    OPERATIONS,
    OPERATOR_CALLS,
    Case,
    Operation,
    Picture,
    World,
    outcome,
    shorthand,
    target,
)
from tests.support import RETRY, STATES, Reached, claim_one, submit_member

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(autouse=True)
def unchecked(world: World) -> None:
    """The cases audit once, at their end."""
    world.engine.checking = False


AttemptEffect = Callable[[list[Attempt], list[Attempt], str], bool]


def _ends(lifecycle: str, reason: str | None = None) -> AttemptEffect:
    def check(before: list[Attempt], after: list[Attempt], at: str) -> bool:
        last = after[-1]
        return (
            after[:-1] == before[:-1]
            and (last.attempt_id, last.attempt_lifecycle) == (before[-1].attempt_id, lifecycle)
            and last.ended_at is not None
            and last.end_disposition is not None
            and (reason is None or last.failure_reason == reason)
        )

    return check


def _ends_if_open(lifecycle: str) -> AttemptEffect:
    def check(before: list[Attempt], after: list[Attempt], at: str) -> bool:
        is_open = at in ("A", "X", "V", "S") or at.endswith(".i")
        return _ends(lifecycle)(before, after, at) if is_open else after == before

    return check


def _is_the_same(lifecycle: str) -> AttemptEffect:
    def check(before: list[Attempt], after: list[Attempt], at: str) -> bool:
        same = (after[-1].attempt_index, after[-1].attempt_id) == (before[-1].attempt_index, before[-1].attempt_id)
        return after[:-1] == before[:-1] and same and after[-1].attempt_lifecycle == lifecycle

    return check


def _is_new(before: list[Attempt], after: list[Attempt], at: str) -> bool:
    kind = {".1": "initial", ".r": "retry", ".p": "replay"}[at[1:]]
    last = after[-1]
    return (
        after[:-1] == before
        and (last.attempt_index, last.attempt_type, last.attempt_lifecycle) == (len(before), kind, "started")
        and last.previous_attempt_index == (len(before) - 1 if before else None)
    )


def _is_reclaimed(before: list[Attempt], after: list[Attempt], at: str) -> bool:
    old, new = after[-2:]
    reason = {"X": "lease_expired_reclaimable", "V": "lease_revoked"}[at]
    return (
        after[:-2] == before[:-1]
        and (old.attempt_id, old.attempt_lifecycle) == (before[-1].attempt_id, "interrupted_reclaimed")
        and (old.end_disposition, old.reclaim_reason) == ("reclaimed", reason)
        and old.ended_at is not None
        and (new.attempt_index, new.attempt_type, new.attempt_lifecycle) == (len(before), "reclaim", "started")
        and new.previous_attempt_index == old.attempt_index
    )


def _ends_by_timeout(before: list[Attempt], after: list[Attempt], at: str) -> bool:
    reason = after[-1].failure_reason or ""
    lifecycle = "ended_cancelled" if reason == "suspension_timeout:cancel" else "ended_failure"
    return reason.startswith("suspension_timeout:") and _ends(lifecycle)(before, after, at)


def _is_untouched(before: list[Attempt], after: list[Attempt], at: str) -> bool:
    return after == before


# What the words in the table's column mean for the attempt records.
ATTEMPT_EFFECTS: dict[str, AttemptEffect] = {
    "": _is_untouched,
    "preserved": _is_untouched,
    "none created": _is_untouched,
    "interrupted, record still started": _is_the_same("started"),
    "new: initial/retry/replay, started": _is_new,
    "same, suspended -> started": _is_the_same("started"),
    "old interrupted_reclaimed; new reclaim, started": _is_reclaimed,
    "started -> suspended": _is_the_same("suspended"),
    "ended_success": _ends("ended_success"),
    "ended_failure": _ends("ended_failure"),
    "ended_failure (attempt_timeout)": _ends("ended_failure", "attempt_timeout"),
    "ended_failure (max_reclaims_exceeded)": _ends("ended_failure", "max_reclaims_exceeded"),
    "open attempt -> ended_failure": _ends_if_open("ended_failure"),
    "interrupted attempt -> ended_cancelled": _ends_if_open("ended_cancelled"),
    "ended_cancelled": _ends("ended_cancelled"),
    "stays suspended": _is_untouched,
    "ended_failure / ended_cancelled / ended_failure": _ends_by_timeout,
    "deleted": lambda before, after, at: after == [],
}
HANDLE_KINDS = {
    "W": "fresh", "W.i": "resumed", "W.s": "resumed", "B": "fresh", "B.changed": "resumed", "X": "reclaimed",
    "V": "reclaimed",
}  # fmt: skip


def sampled(operation: Operation) -> list[str]:
    """Every state that the operation leaves; of the others one per letter and refusal, another for each operation."""
    alike: dict[object, list[str]] = {}
    for state in operation.states:
        row = operation.row(state, _at(state))
        alike.setdefault((state[0], operation.refusal(state)) if row is None else state, []).append(state)
    turn = OPERATIONS.index(operation)
    return [
        state for states in alike.values() for state in (states if sampling.is_full() else [states[turn % len(states)]])
    ]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
async def test_a_state_and_an_operation_give_what_the_table_says(world: World, operation: Operation) -> None:
    rows = Rows()
    for state in sampled(operation):
        await world.wipe()
        world.engine.checking = False
        with rows.row(state):
            await _gives_what_the_table_says(world, operation, state)
    rows.tell()


async def _gives_what_the_table_says(world: World, operation: Operation, state: str) -> None:
    reached = await world.reach(state, **operation.creating)
    case = Case(world, reached)
    await operation.prepare(case)
    # As after a new tag: the audit finds a transition that leaves this time behind its own.
    await world.sql.execute("update flowfabric.execution set mutated_at = transitioned_at")
    before = await world.picture(case.id)
    row = operation.row(state, before.at)
    if row is None:
        assert await outcome(operation.call(case)) == operation.refusal(state)
        after = await world.picture(case.id)
        assert after == before
    else:
        answers: list[object] = []

        async def call() -> object:
            answers.append(await operation.call(case))
            return answers[0]

        assert await outcome(call()) == operation.answer
        after = await world.picture(case.id)
        assert after.at in target(row, before.at)
        assert sorted(shorthand(after.since(before))) == sorted(
            (row.events if operation.events is None else operation.events) + (row.if_leased if before.at == "A" else ())
        )
        assert ATTEMPT_EFFECTS[row.attempt](list(before.attempts), list(after.attempts), before.at)
        if after.record is not None:
            _counters_grew(before, after, row.counters)
            _times_moved(before, after)
            if isinstance(answers[0], Claimed):
                _handle_is_real(answers[0], after, HANDLE_KINDS.get(state, HANDLE_KINDS[state[0]]))
    if after.record is not None:
        assert is_consistent(after.record.state_vector, after.record.resume_pending)
    world.engine.checking = True
    await world.engine.check()


def _counters_grew(before: Picture, after: Picture, counters: tuple[str, ...]) -> None:
    for name in COUNTERS:
        assert after.counter(name) - before.counter(name) == (name in counters), name


def _times_moved(before: Picture, after: Picture) -> None:
    assert before.record is not None and after.record is not None
    transitioned = before.record.state_vector != after.record.state_vector
    assert (after.record.last_transition_at > before.record.last_transition_at) == transitioned
    assert (after.record.last_mutation_at > before.record.last_mutation_at) == bool(after.changed(before))


def _handle_is_real(claimed: Claimed, after: Picture, kind: str) -> None:
    assert after.record is not None
    lease, attempt = after.record.current_lease, after.record.current_attempt
    assert lease is not None and attempt is not None
    handle = claimed.handle
    assert handle.kind == kind
    assert (handle.lease_id, handle.lease_epoch) == (lease.lease_id, lease.lease_epoch)
    assert (handle.attempt_id, handle.attempt_index) == (attempt.attempt_id, attempt.attempt_index)
    assert claimed.lease_expires_at == lease.expires_at
    assert claimed.attempt_type == after.attempts[-1].attempt_type
    assert after.stored["ready"] == after.stored["claim_grant"] == []


def _at(state: str) -> str:
    """The position that a state of the cases has in the table."""
    if state[0] in "WDC":
        return state.replace(".s", ".i").replace(".w", ".i")
    if state[0] == "S":
        return "S"
    if state == "B.changed":
        return "B.i"
    return f"{state[0]}.1" if state[0] == "B" else state.replace("completed", "success")


async def test_every_row_of_the_table_that_can_be_reached_is_tried() -> None:
    tried = {
        row.number
        for operation in OPERATIONS
        for state in sampled(operation)
        for at in [_at(state)]
        if (row := operation.row(state, at)) is not None
    }
    assert tried == {row.number for row in TRANSITIONS} - NOT_HERE


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
async def test_an_unknown_execution_is_reported_in_the_words_of_the_operation(
    world: World, operation: Operation
) -> None:
    nobody = id_in(7)
    assert await outcome(operation.call(Case(world, Reached(nobody, None)))) == operation.missing
    assert await world.event_count() == 0


@pytest.mark.parametrize("state", STATES)
async def test_every_state_is_one_of_the_legal_combinations(world: World, state: str) -> None:
    record = await world.record((await world.reach(state)).id)
    vector = record.state_vector
    assert legal_row(vector) is not None
    assert is_consistent(vector, record.resume_pending)
    assert position(vector)[0] == state[0]
    assert (record.completed_at is not None) == (state[0] == "T")
    assert (record.current_lease is not None) == (state == "A")
    assert (record.lost_lease is not None) == (state in ("X", "V"))
    explained = state[0] in "DCBSXV"
    assert bool(record.blocking_detail) == explained


async def test_the_states_of_the_cases_meet_every_legal_combination(
    world: World,
) -> None:
    met = set()
    for state in STATES:
        row = legal_row((await world.record((await world.reach(state)).id)).state_vector)
        assert row is not None
        met.add(row.number)
        await world.wipe()
    assert met == {row.number for row in LEGAL}


@pytest.mark.parametrize(("delay", "at"), [(None, "W.1"), (timedelta(hours=1), "D.1"), (timedelta(0), "W.1")])
async def test_create_makes_a_waiting_execution_or_a_delayed_one(
    world: World, delay: timedelta | None, at: str
) -> None:
    created = await world.engine.create_execution(execution_kind="test", delay_until=delay)
    after = await world.picture(created.execution_id)
    assert after.at == at
    assert [after.counter(name) for name in COUNTERS] == [0] * len(COUNTERS)
    assert after.stored["event"] == []
    assert after.attempts == []


MARK = {"lease_lost", "lease_lost_at", "blocking_reason", "blocking_detail", "pending", "transitioned_at"}


@pytest.mark.parametrize("name", [*HOLDER_CALLS, *OPERATOR_CALLS])
async def test_a_call_that_meets_a_lapsed_lease_marks_it_and_changes_nothing_else(world: World, name: str) -> None:
    world.engine.checking = True
    case = Case(world, await world.reach("A"))
    await world.clock.advance(seconds=31)
    before = await world.picture(case.id)

    assert await outcome(BY_NAME[name].call(case)) == "lease_expired"
    marked = await world.picture(case.id)
    assert marked.at == "X"
    assert marked.changed(before) == MARK
    assert marked.attempts == before.attempts
    assert shorthand(marked.since(before)) == ["L:expired"]
    assert len(marked.stored["ready"]) == 1

    assert await outcome(BY_NAME[name].call(case)) == "lease_expired"
    assert await world.picture(case.id) == marked


@each(("reason", "state"), itertools.product(BLOCKING_REASONS, ["W.1", "W.r", "W.p", "W.i", "W.s"]))
async def test_a_block_keeps_the_pending_attempt_and_an_unblock_gives_it_back(
    world: World, reason: str, state: str
) -> None:
    await world.wipe()
    reached = await world.reach(state)
    before = await world.record(reached.id)
    await world.engine.block_execution_for_admission(reached.id, reason, reason_detail="because")
    blocked = await world.record(reached.id)
    vector = blocked.state_vector
    assert (vector.blocking_reason, vector.eligibility_state) == (reason, BLOCKING_REASONS[reason])
    assert vector.attempt_state == before.state_vector.attempt_state
    limited = reason in ("waiting_for_budget", "waiting_for_quota")
    assert blocked.public_state == (ff.State.RATE_LIMITED if limited else ff.State.WAITING)
    assert blocked.blocking_detail == "because"

    await world.engine.unblock_execution(reached.id, expected_blocking_reason=reason)
    assert (await world.record(reached.id)).state_vector == before.state_vector


@pytest.mark.parametrize("attempt", ["retry", "replay", "interrupted", "resumed"])
async def test_a_capable_worker_claims_what_waits_for_one_whatever_its_pending_attempt(
    world: World, attempt: str
) -> None:
    world.engine.checking = True
    reached = await world.reach({"retry": "W.r", "replay": "W.p", "interrupted": "W.i", "resumed": "W.s"}[attempt])
    before = await world.record(reached.id)
    await world.engine.block_route(reached.id)
    claimed = await world.engine.claim(worker_id="pool", worker_instance_id="pool-9")
    assert claimed is not None and claimed.execution_id == reached.id
    after = await world.record(reached.id)
    new = int(attempt in ("retry", "replay"))
    assert after.total_attempt_count == before.total_attempt_count + new
    assert claimed.handle.kind == ("fresh" if new else "resumed")
    assert await world.at(reached.id) == "A"


def _shape(rows: list[asyncpg.Record]) -> list[dict[str, object]]:
    """The rows without what differs between two executions: ids, and when something happened."""
    return [
        {
            name: type(value).__name__ if isinstance(value, (UUID, datetime)) else value
            for name, value in row.items()
            if name not in ("partition", "seq")
        }
        for row in rows
    ]


async def _started_again(world: World, policy: ExecutionPolicy) -> Claimed:
    """A member of a flow whose first attempt failed, and whose second one has a lease."""
    member = await submit_member(world.engine, FlowId(mint_uuid()), policy=policy, tags={"a.b": "c"})
    await world.engine.fail((await claim_one(world.engine)).handle, "boom", category="x")
    await world.clock.advance(seconds=11)
    assert await world.engine.promote_delayed(member) == "promoted"
    held = await claim_one(world.engine)
    await world.engine.progress(held.handle, percent=5)
    return held


async def test_an_execution_completed_alone_is_stored_like_those_completed_together(world: World) -> None:
    retention = StreamPolicy(retention_ttl=timedelta(hours=3))
    for policy in (RETRY, ExecutionPolicy(retry_policy=RETRY.retry_policy, stream_policy=retention)):
        held = [await _started_again(world, policy) for _ in range(3)]
        alone, *together = [Completion(one.handle, b"done", "text") for one in held]
        await world.engine.complete(alone.authority, alone.result, result_encoding=alone.result_encoding)
        assert all(isinstance(one, Completed) for one in await world.engine.complete_many(together))
        stored = []
        for one in held:
            found = [
                _shape(await world.sql.fetch(f"select * from flowfabric.{table} where id = $1", one.execution_id))
                for table in ("execution", "event", "pending_cascade")
            ]
            due = await world.sql.fetchval(
                "select min(t.due_at) - e.completed_at from flowfabric.timer t, flowfabric.execution e"
                " where t.kind = 'retention' and e.id = any (t.ids) and e.id = $1 group by e.completed_at",
                one.execution_id,
            )
            stored.append((found, due))
        assert stored[0] == stored[1] == stored[2]
        assert stored[0][1] == (timedelta(hours=3) if policy is not RETRY else timedelta(days=7))
