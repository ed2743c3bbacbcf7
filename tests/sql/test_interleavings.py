"""Every operation held at the lock while every other one arrives.

The first call is made inside an open transaction; the second starts meanwhile. It waits for the first or passes the
row by, whichever the operation is for; then the first is committed or rolled back, and the second must answer as if it
had come alone to what is left. The table of operations below is the whole specification of what that answer is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import FlowFabricError, Unavailable
from flowfabric.values.attempt import Claimed, Failure
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution, Rejected
from flowfabric.values.grant import ReclaimGrant
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements, TimeoutPolicy
from flowfabric.values.step import NewStep
from flowfabric.values.wait import AlreadySatisfied, Fresh, NewWaitpoint, Suspended
from tests import sampling
from tests.ids import home, id_in
from tests.interleave import Party, Stage, settled, waiting
from tests.support import OTHER, WORKER, claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE = timedelta(seconds=30)
RETRY = ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(seconds=10)))


# The state of an execution, seen by the worker of the setup. "A" is active under that worker's lease, "A'" under
# another one; "lapsed" is an expired lease that is not marked yet.
LIVE = ("A", "A'")
LAPSED = ("A lapsed", "A' lapsed")
LOST = ("X", "X granted", "V")
ACTIVE = (*LIVE, *LAPSED, *LOST)
WAITING = ("W.i", "W.r", "W.p")
DELAYED = ("D.i", "D.r")
ENDED = ("T:completed", "T:failed", "T:cancelled", "T:expired")
PLACES = (*ACTIVE, *WAITING, *DELAYED, "B", *ENDED)


@dataclass
class Case:
    """One execution, what the worker of the setup holds of it, and what the two calls need."""

    id: ff.ExecutionId
    handle: Handle
    grant_key: str | None = None
    displaced: bool = False


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation as both sides of a race.

    `starts`: the setups it can act in; `acts`: where it acts, what it then answers and where it leads; `refuses`: what
    it answers anywhere else; `repeats`: what a worker whose attempt ended there is answered instead; `skips`: it passes
    locked rows by instead of waiting; `after`: how far the clock must move for it to have something to do.
    """

    name: str
    call: Callable[[Party, Case], Awaitable[Any]]
    starts: tuple[str, ...]
    acts: Mapping[str, tuple[str, str]]
    refuses: Mapping[str, str]
    repeats: Mapping[str, str] = field(default_factory=dict)
    skips: bool = False
    after: float = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


def everywhere(answer: str, **instead: tuple[str, tuple[str, ...]]) -> dict[str, str]:
    """One answer for all places, with exceptions."""
    answers = dict.fromkeys(PLACES, answer)
    for kind, places in instead.values():
        answers.update(dict.fromkeys(places, kind))
    return answers


# How a holder's call is refused.
HOLDER = everywhere(
    "execution_not_active",
    lapsed=("lease_expired", (*LAPSED, "X", "X granted")),
    revoked=("lease_revoked", ("V",)),
    taken=("stale_lease", ("A'",)),
)


async def _claim(party: Party, case: Case) -> Any:
    return await party.claim(**OTHER, lease_ttl=LEASE)


async def _complete(party: Party, case: Case) -> Any:
    return await party.complete(case.handle, b"done")


async def _fail(party: Party, case: Case) -> Any:
    return await party.fail(case.handle, "boom")


async def _fail_for_good(party: Party, case: Case) -> Any:
    return await party.fail(case.handle, "boom", failure_class="permanent")


async def _renew(party: Party, case: Case) -> Any:
    return await party.renew(case.handle)


async def _cancel(party: Party, case: Case) -> Any:
    return await party.cancel(Operator(case.id), "no longer wanted")


async def _give_up(party: Party, case: Case) -> Any:
    return await party.cancel(case.handle, "cannot go on")


async def _revoke(party: Party, case: Case) -> Any:
    return await party.revoke_lease(case.id)


async def _reclaim(party: Party, case: Case) -> Any:
    return await party.reclaim_execution(
        case.id, **OTHER, lease_id=mint_uuid(), attempt_id=mint_uuid(), lease_ttl=LEASE, grant_key=case.grant_key
    )


async def _replay(party: Party, case: Case) -> Any:
    return await party.replay_execution(case.id)


async def _release(party: Party, case: Case) -> Any:
    return await party.release(case.handle)


async def _stop_changed(party: Party, case: Case) -> Any:
    return await party.stop_changed(case.handle, detail="recorded: a", digest="new")


async def _delay(party: Party, case: Case) -> Any:
    return await party.delay(case.handle, timedelta(seconds=5))


async def _park(party: Party, case: Case) -> Any:
    now = await party.connection.fetchval("select flowfabric.now()")
    return await party.park(case.handle, until=now + timedelta(seconds=5))


async def _record(party: Party, case: Case) -> Any:
    (answer,) = await party.record_steps([(case.handle, NewStep(name="s", result=b"1"))])
    return answer


async def _change_priority(party: Party, case: Case) -> Any:
    return await party.change_priority(case.id, 7000)


async def _block(party: Party, case: Case) -> Any:
    return await party.block_execution_for_admission(case.id, "paused_by_operator")


def _duty(kind: str) -> Callable[[Party, Case], Awaitable[Any]]:
    async def call(party: Party, case: Case) -> Any:
        return await party.run_timers(kind)

    return call


def said(answer: Any) -> str:
    """An answer as the word the tables use."""
    match answer:
        case FlowFabricError():
            return str(answer.kind)
        case None:
            return "none"
        case AlreadySatisfied():
            return answer.reason
        case Rejected():
            return answer.message
        case _ if hasattr(answer, "handled"):
            assert answer.failed == 0, answer
            return f"handled {answer.handled}"
        case _:
            return type(answer).__name__


def _to(answer: str, place: str, *starts: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(starts, (answer, place))


OPERATIONS = [
    Operation(
        name="claim",
        call=_claim,
        skips=True,
        starts=("W.i", "X"),
        acts=_to("Claimed", "A'", *WAITING, "X", "V"),
        refuses=everywhere("none"),
    ),
    Operation(
        name="complete",
        call=_complete,
        starts=("A",),
        acts=_to("Completed", "T:completed", "A"),
        refuses=HOLDER,
        # After a replay the attempt that completed still answers for itself.
        repeats={"T:completed": "Completed", "W.p": "Completed"},
    ),
    Operation(
        name="fail",
        call=_fail,
        starts=("A",),
        acts=_to("RetryScheduled", "D.r", "A"),
        refuses=HOLDER,
        repeats={"T:failed": "TerminalFailed", "D.r": "RetryScheduled"},
    ),
    Operation(
        name="fail for good",
        call=_fail_for_good,
        starts=("A",),
        acts=_to("TerminalFailed", "T:failed", "A"),
        refuses=HOLDER,
        repeats={"T:failed": "TerminalFailed", "D.r": "RetryScheduled"},
    ),
    Operation(name="renew", call=_renew, starts=("A",), acts=_to("Renewed", "A", "A"), refuses=HOLDER),
    Operation(
        name="lease expiry",
        call=_duty("lease"),
        skips=True,
        after=31,
        starts=("A",),
        acts=_to("handled 1", "X", *LAPSED),
        refuses=everywhere("handled 0"),
    ),
    Operation(
        name="cancel",
        call=_cancel,
        starts=("A", "W.i", "D.i", "X", "X granted"),
        acts=_to("Cancelled", "T:cancelled", *ACTIVE, *WAITING, *DELAYED, "B"),
        refuses=everywhere("execution_not_active") | {"T:cancelled": "Cancelled"},
    ),
    Operation(
        name="give up",
        call=_give_up,
        starts=("A",),
        acts=_to("Cancelled", "T:cancelled", "A"),
        refuses=HOLDER,
        repeats={"T:cancelled": "Cancelled"},
    ),
    Operation(
        name="revoke",
        call=_revoke,
        starts=("A",),
        acts=_to("Revoked", "V", *LIVE, *LAPSED),
        refuses=everywhere(
            "no_active_lease",
            revoked=("already_revoked", ("V",)),
            expired=("already_expired", ("X", "X granted")),
        ),
    ),
    Operation(
        name="reclaim",
        call=_reclaim,
        starts=("X granted",),
        acts=_to("Claimed", "A'", "X granted"),
        refuses=everywhere("GrantNotFound"),
    ),
    Operation(
        name="replay",
        call=_replay,
        starts=("T:completed",),
        acts=_to("Replayed", "W.p", *ENDED),
        refuses=everywhere("execution_not_terminal"),
    ),
    Operation(
        name="attempt timeout",
        call=_duty("attempt"),
        skips=True,
        after=11,
        fields={"attempt_timeout": timedelta(seconds=10)},
        starts=("A", "X", "X granted"),
        acts=_to("handled 1", "D.r", *ACTIVE),
        refuses=everywhere("handled 0"),
    ),
    Operation(
        name="deadline",
        call=_duty("deadline"),
        skips=True,
        after=41,
        fields={"deadline": timedelta(seconds=40)},
        starts=("A", "W.i", "D.i", "X", "X granted"),
        acts=_to("handled 1", "T:expired", *ACTIVE, "W.i", "W.r", *DELAYED, "B"),
        refuses=everywhere("handled 0"),
    ),
    Operation(
        name="release",
        call=_release,
        starts=("A",),
        acts=_to("Released", "W.i", "A"),
        refuses=HOLDER,
    ),
    Operation(name="stop changed", call=_stop_changed, starts=("A",), acts=_to("Stopped", "B", "A"), refuses=HOLDER),
    Operation(name="delay", call=_delay, starts=("A",), acts=_to("Delayed", "D.i", "A"), refuses=HOLDER),
    Operation(name="park", call=_park, starts=("A",), acts=_to("Parked", "D.i", "A"), refuses=HOLDER),
    Operation(name="record", call=_record, starts=("A",), acts=_to("none", "A", "A"), refuses=HOLDER),
    Operation(
        name="promote",
        call=_duty("delay"),
        skips=True,
        after=11,
        starts=("D.i",),
        acts=_to("handled 1", "W.i", "D.i") | _to("handled 1", "W.r", "D.r"),
        refuses=everywhere("handled 0"),
    ),
    Operation(
        name="change priority",
        call=_change_priority,
        starts=("W.i",),
        acts={place: ("Changed", place) for place in WAITING},
        refuses=everywhere("execution_not_eligible"),
    ),
    Operation(
        name="block",
        call=_block,
        starts=("W.i",),
        acts=_to("Blocked", "B", *WAITING),
        refuses=everywhere("execution_not_eligible", ended=("execution_not_active", ENDED)),
    ),
]
BY_NAME = {operation.name: operation for operation in OPERATIONS}
HOLDERS = [operation.name for operation in OPERATIONS if operation.refuses is HOLDER]


async def set_up(stage: Stage, engine: Party, start: str, *operations: Operation) -> Case:
    """An execution in the place named, with the times that the operations are about."""
    await stage.empty()
    fields: dict[str, Any] = {}
    for operation in operations:
        fields |= operation.fields
    await submit(
        engine,
        policy=ExecutionPolicy(
            retry_policy=RETRY, timeout_policy=TimeoutPolicy(attempt_timeout=fields.get("attempt_timeout"))
        ),
        execution_deadline_at=fields.get("deadline"),
    )
    claimed = await claim_one(engine, lease_ttl=LEASE)
    case = Case(claimed.execution_id, claimed.handle)
    match start:
        case "W.i":
            await engine.release(case.handle)
        case "D.i":
            await engine.delay(case.handle, timedelta(seconds=5))
        case "A' lapsed":
            await engine.release(case.handle)
            await claim_one(engine, **OTHER, lease_ttl=LEASE)
            case.displaced = True
            await stage.clock.advance(seconds=31)
        case "X" | "X granted":
            await stage.clock.advance(seconds=31)
            await engine.mark_lease_expired_if_due(case.id)
            if start == "X granted":
                grant = await engine.issue_reclaim_grant(case.id, **WORKER, grant_ttl=timedelta(seconds=60))
                assert isinstance(grant, ReclaimGrant)
                case.grant_key = grant.grant_key
        case "T:completed":
            await engine.complete(case.handle, b"done")
    return case


async def place_of(connection: asyncpg.Connection[Any], case: Case) -> tuple[str, bool]:
    """The state of the execution as this connection sees it, and whether its deadline has passed."""
    row = await connection.fetchrow(
        """select e.state, e.pending, e.lease_lost, e.lease_id, e.blocking_reason,
                  e.lease_expires_at <= t.now as lapsed, coalesce(e.deadline_at <= t.now, false) as overdue,
                  exists (select from flowfabric.claim_grant g where g.id = e.id and g.expires_at > t.now) as granted
           from flowfabric.execution e, (select flowfabric.now() as now) t where e.partition = $1 and e.id = $2""",
        home(case.id),
        case.id,
    )
    match row["state"]:
        case "active" if row["lease_lost"] == "revoked":
            place = "V"
        case "active" if row["lease_lost"] == "expired":
            place = "X granted" if row["granted"] else "X"
        case "active":
            place = "A" if row["lease_id"] == case.handle.lease_id else "A'"
            place += " lapsed" if row["lapsed"] else ""
        case "waiting" if row["blocking_reason"] != "waiting_for_worker":
            place = "B"
        case "waiting" | "delayed":
            place = f"{row['state'][0].upper()}.{ {'interrupted': 'i', 'retry': 'r', 'replay': 'p'}[row['pending']] }"
        case ended:
            place = f"T:{ended}"
    return place, row["overdue"]


def foretold(operation: Operation, case: Case, place: str, overdue: bool) -> tuple[str, str]:
    """What an operation returns that finds the execution there, and its state afterwards."""
    if operation.name == "claim" and overdue:
        return "none", place
    if place in operation.acts:
        return operation.acts[place]
    if place in operation.repeats and not case.displaced:
        return operation.repeats[place], place
    # The only thing a refused call changes: a lapsed lease that it meets is marked.
    return operation.refuses[place], "X" if operation.refuses is HOLDER and place in LAPSED else place


def meetings(first: Operation, second: Operation) -> list[str]:
    """The setups in which both could act, or else one in which the first can."""
    return [start for start in first.starts if start in second.starts] or [first.starts[0]]


@pytest_asyncio.fixture(loop_scope="session")
async def pair(stage: Stage) -> list[Party]:
    return await stage.company(2)


PAIRS = sampling.pairs(
    [(a.name, b.name, pytest.param(a, b, id=f"{a.name} then {b.name}")) for a in OPERATIONS for b in OPERATIONS],
    100,
)


async def meet(stage: Stage, pair: list[Party], first: Operation, second: Operation, start: str, ending: str) -> None:
    """The first call is made and held open, the second arrives, the first ends; everything is as the tables say."""
    one, two = pair
    case = await set_up(stage, one, start, first, second)
    if first.after:
        await stage.clock.advance(seconds=first.after)
    before, overdue = await place_of(stage.watch, case)
    assert before in first.acts, "the setup must let the first operation act"
    answer, after = foretold(first, case, before, overdue)

    await one.begin()
    assert said(await settled(first.call(one, case))) == answer
    assert await place_of(one.connection, case) == (after, overdue)
    if second.after:
        await stage.clock.advance(seconds=second.after)
    left = await place_of(one.connection if ending == "commit" else stage.watch, case)
    if second.skips:
        assert said(await settled(second.call(two, case))) == second.refuses["B"], "locked rows are skipped"
        await one.end(ending)
        last = await settled(second.call(two, case))
    else:
        task = await waiting(stage.watch, two, second.call(two, case), behind=one)
        await one.end(ending)
        last = await task

    answer, after = foretold(second, case, *left)
    assert said(last) == answer, f"{ending} from {start}"
    assert (await place_of(stage.watch, case))[0] == after, f"{ending} from {start}"
    await stage.audit()


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_second_call_sees_the_result_of_the_first(
    stage: Stage, pair: list[Party], first: Operation, second: Operation
) -> None:
    for start in meetings(first, second):
        for ending in ("commit", "rollback"):
            await meet(stage, pair, first, second, start, ending)


@pytest.mark.parametrize("second", HOLDERS)
@pytest.mark.parametrize("first", ["cancel", "revoke", "lease expiry", "attempt timeout", "deadline"])
async def test_a_displaced_worker_marks_a_lapsed_lease_only_under_the_lock(
    stage: Stage, pair: list[Party], first: str, second: str
) -> None:
    """Its own lease is gone, the one that replaced it has lapsed: the call marks that, unless others were quicker."""
    for ending in ("commit", "rollback"):
        await meet(stage, pair, BY_NAME[first], BY_NAME[second], "A' lapsed", ending)


# Batches that name the same executions in opposite orders.


def _fences(handles: list[Handle]) -> tuple[list[Any], ...]:
    return (
        [h.partition for h in handles],
        [h.uuid for h in handles],
        [h.lease_id for h in handles],
        [h.lease_epoch for h in handles],
        [h.attempt_id for h in handles],
        [h.attempt_index for h in handles],
    )


async def _complete_all(party: Party, handles: list[Handle]) -> list[str]:
    return [said(answer) for answer in await party.complete_many(handles)]


async def _fail_all(party: Party, handles: list[Handle]) -> list[str]:
    failures = [Failure(authority=handle, reason="boom", failure_class="permanent") for handle in handles]
    return [said(answer) for answer in await party.fail_many(failures)]


async def _renew_all(party: Party, handles: list[Handle]) -> list[str]:
    return [said(answer) for answer in await party.renew_many(handles)]


async def _record_all(party: Party, handles: list[Handle]) -> list[str]:
    return [said(answer) for answer in await party.record_steps([(h, NewStep(name="s")) for h in handles])]


async def _cancel_all(party: Party, handles: list[Handle]) -> list[str]:
    partitions, ids, *_ = _fences(handles)
    nothing = [None] * len(ids)
    found = await party.connection.fetch(
        "select code from flowfabric.cancel_as_operator($1, $2, $3, $4, $3, $5, 'operator_override', 'enough', false)"
        " order by ordinal",
        partitions,
        ids,
        nothing,
        nothing,
        nothing,
    )
    return ["Cancelled" if row["code"] == "ok" else row["code"] for row in found]


async def _replay_all(party: Party, handles: list[Handle]) -> list[str]:
    partitions, ids, *_ = _fences(handles)
    found = await party.connection.fetch(
        "select code from flowfabric.replay($1, $2, null, null) order by ordinal", partitions, ids
    )
    return ["Replayed" if row["code"] == "ok" else row["code"] for row in found]


BATCHES = {
    "complete": (_complete_all, "Completed"),
    "fail": (_fail_all, "TerminalFailed"),
    "renew": (_renew_all, "Renewed"),
    "record": (_record_all, "none"),
    "cancel": (_cancel_all, "Cancelled"),
    "replay": (_replay_all, "Replayed"),
}


@pytest_asyncio.fixture(loop_scope="session")
async def three(stage: Stage) -> list[Party]:
    return await stage.company(3)


@pytest.mark.parametrize(
    ("first", "second"),
    [(a, b) for a in BATCHES for b in BATCHES if (a == "replay") == (b == "replay")],
)
async def test_batches_in_opposite_orders_do_not_deadlock(
    stage: Stage, three: list[Party], first: str, second: str
) -> None:
    one, two, holder = three
    await stage.empty()
    for _ in range(5):
        await submit(one)
    claimed = await one.claim_many(**WORKER, limit=5)
    handles = sorted((c.handle for c in claimed), key=lambda h: (h.partition, h.uuid))
    if first == "replay":
        await one.complete_many(handles)

    # With the one in the middle taken, each batch that locks in the order given would hold its own half by now.
    await holder.begin()
    await holder.connection.execute(
        "select from flowfabric.execution where partition = $1 and id = $2 for no key update",
        handles[2].partition,
        handles[2].uuid,
    )
    begun = await waiting(stage.watch, one, BATCHES[first][0](one, handles))
    later = await waiting(stage.watch, two, BATCHES[second][0](two, handles[::-1]))
    await holder.rollback()

    assert await begun == [BATCHES[first][1]] * 5
    answers = await later
    assert len(set(answers)) == 1, "all of a batch or nothing"
    match first, second:
        case "renew" | "record", _:
            assert answers[0] == BATCHES[second][1]
        case "replay", _:
            assert answers[0] == "execution_not_terminal"
        case _:
            assert answers[0] == (BATCHES[second][1] if first == second else "execution_not_active")
    await stage.audit()


def _by_id(number: int, ids: list[ff.ExecutionId]) -> NewExecution:
    return NewExecution(execution_kind="test", execution_id=ids[number])


def _by_key(number: int, ids: list[ff.ExecutionId]) -> NewExecution:
    return NewExecution(execution_kind="test", idempotency_key=f"key-{number}")


def _by_kind(number: int, ids: list[ff.ExecutionId]) -> NewExecution:
    return NewExecution(execution_kind=f"kind-{ids[0]}-{number}")


def _by_lane(number: int, ids: list[ff.ExecutionId]) -> NewExecution:
    return NewExecution(execution_kind="test", lane_id=f"{ids[0]}-{number}")


def _by_capability(number: int, ids: list[ff.ExecutionId]) -> NewExecution:
    needs = RoutingRequirements(required_capabilities=[f"{ids[0]}-{number}"])
    return NewExecution(execution_kind="test", policy=ExecutionPolicy(routing_requirements=needs))


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize(
    ("item", "shared"),
    [(_by_id, True), (_by_key, True), (_by_kind, False), (_by_lane, False), (_by_capability, False)],
    ids=["ids", "keys", "new kinds", "new lanes", "new capabilities"],
)
async def test_creating_the_same_in_opposite_orders_does_not_deadlock(
    stage: Stage, three: list[Party], item: Callable[..., NewExecution], shared: bool, ending: str
) -> None:
    one, two, holder = three
    await stage.empty()
    ids = sorted((id_in(n) for n in range(5)), key=lambda e: (home(e), e))
    items = [item(number, ids) for number in range(5)]

    await holder.begin()
    await holder.create_many([items[2]])
    begun = await waiting(stage.watch, one, one.create_many(items))
    later = await waiting(stage.watch, two, two.create_many(items[::-1]))
    await holder.end(ending)

    answers = (await begun, (await later)[::-1])
    if shared:
        expected = {"Created", "Duplicate"}
        for number, (mine, yours) in enumerate(zip(*answers, strict=True)):
            taken = number == 2 and ending == "commit"
            assert {said(mine), said(yours)} == ({"Duplicate"} if taken else expected), number
            assert mine.execution_id == yours.execution_id
    else:
        assert {said(answer) for answer in (*answers[0], *answers[1])} == {"Created"}
    stored = await stage.watch.fetchval("select count(*) from flowfabric.execution")
    assert stored == (5 if shared else 10 + (ending == "commit"))
    await stage.audit()


async def _grant(party: Party, case: Case) -> Any:
    return await party.issue_claim_grant(case.id, **WORKER)


BEHIND_A_CLAIM = {
    "cancel": (_cancel, "Cancelled", 0, {}),
    "change priority": (_change_priority, "Changed", 0, {}),
    "block": (_block, "Blocked", 0, {}),
    "grant": (_grant, "ClaimGrant", 0, {}),
    "deadline": (_duty("deadline"), "handled 1", 41, {"execution_deadline_at": timedelta(seconds=40)}),
}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("name", BEHIND_A_CLAIM)
async def test_a_claim_that_passed_by_holds_nothing_that_the_other_needs(
    stage: Stage, pair: list[Party], name: str, ending: str
) -> None:
    """The other has the execution and the claim skips it: neither waits for the other, also not at the ready row."""
    one, two = pair
    call, expected, seconds, fields = BEHIND_A_CLAIM[name]
    await stage.empty()
    case = Case(await submit(one, **fields), None)  # type: ignore[arg-type]
    await two.begin()
    await two.connection.execute(
        "select from flowfabric.execution where partition = $1 and id = $2 for no key update",
        home(case.id),
        case.id,
    )
    await one.begin()
    assert await one.claim(**OTHER) is None
    await stage.clock.advance(seconds=seconds)
    assert said(await call(two, case)) == expected
    assert await one.claim(**OTHER) is None
    await one.end(ending)
    await two.commit()
    await stage.audit()


# The floor of a route: where claims begin to look. Whatever becomes ready must never end up below it.


@dataclass(frozen=True)
class Entry:
    """A way in which an execution becomes ready at a place the floor has already passed.

    `arrange` makes it, not ready there yet; after the clock has moved by `after`, `enter` makes it so.
    """

    name: str
    arrange: Callable[[Party], Awaitable[Any]]
    enter: Callable[[Party, Any], Awaitable[Any]]
    after: float = 0


async def _nothing(party: Party) -> None:
    return None


async def _held_5(party: Party) -> Claimed:
    await submit(party, priority=5, execution_kind="above")
    return await claim_one(party, kinds=["above"], lease_ttl=LEASE)


async def _ended_5(party: Party) -> Claimed:
    held = await _held_5(party)
    await party.complete(held.handle)
    return held


async def _delayed_5(party: Party) -> ff.ExecutionId:
    return await submit(party, priority=5, execution_kind="above", delay_until=timedelta(seconds=5))


async def _blocked_5(party: Party) -> ff.ExecutionId:
    target = await submit(party, priority=5, execution_kind="above")
    await party.block_execution_for_admission(target, "paused_by_operator")
    return target


async def _low(party: Party) -> ff.ExecutionId:
    return await submit(party, priority=0, execution_kind="above")


async def _suspended_5(party: Party) -> Suspended:
    held = await _held_5(party)
    now = await party.connection.fetchval("select flowfabric.now()")
    answer = await party.suspend(
        held.handle,
        waitpoints=[Fresh(mint_uuid(), "k")],
        resume_condition=on("k"),
        timeout_at=now + timedelta(seconds=5),
        timeout_behavior="auto_resume_with_timeout_signal",
    )
    assert isinstance(answer, Suspended)
    return answer


async def _stopped_5(party: Party) -> Claimed:
    held = await _held_5(party)
    await party.stop_changed(held.handle, detail="recorded: a", digest="new")
    return held


async def _parked_5(party: Party) -> tuple[ff.ExecutionId, NewWaitpoint]:
    held = await _held_5(party)
    made = await party.create_waitpoint(held.handle, "k", timedelta(seconds=5))
    assert (await party.park(held.handle, signals_on={made.waitpoint_id: 0})).parked
    return held.execution_id, made


async def _signal_suspended(party: Party, at: Suspended) -> Any:
    details = at.details
    return await party.deliver_signal(
        at.handle.execution_id, details.waitpoint_id, details.waitpoint_token, signal_name="go", source_type="webhook"
    )


async def _signal_parked(party: Party, at: tuple[ff.ExecutionId, NewWaitpoint]) -> Any:
    target, made = at
    return await party.deliver_signal(target, made.waitpoint_id, made.token, signal_name="go", source_type="webhook")


ENTRIES = [
    Entry("create", _nothing, lambda party, _: submit(party, priority=5, execution_kind="above")),
    Entry("change priority", _low, lambda party, target: party.change_priority(target, 5)),
    Entry("replay", _ended_5, lambda party, held: party.replay_execution(held.execution_id)),
    Entry("promote", _delayed_5, lambda party, _: party.run_timers("delay"), after=6),
    Entry("unblock", _blocked_5, lambda party, target: party.unblock_execution(target)),
    Entry("release", _held_5, lambda party, held: party.release(held.handle)),
    Entry("opening", _stopped_5, lambda party, _: party.run_timers("delay"), after=61),
    Entry("unblock stopped", _stopped_5, lambda party, held: party.unblock_execution(held.execution_id)),
    Entry("revoke", _held_5, lambda party, held: party.revoke_lease(held.execution_id)),
    Entry("lease expiry", _held_5, lambda party, _: party.run_timers("lease"), after=31),
    Entry("signal", _suspended_5, _signal_suspended),
    Entry("signal to a parked one", _parked_5, _signal_parked),
    Entry("resume", _suspended_5, lambda party, at: party.resume_execution(at.handle.execution_id)),
    Entry("suspension timeout", _suspended_5, lambda party, _: party.run_timers("suspension"), after=6),
    Entry("pending expiry", _parked_5, lambda party, _: party.run_timers("suspension"), after=6),
    Entry("late complete", _held_5, lambda party, held: settled(party.complete(held.handle)), after=31),
]
entries = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
endings = pytest.mark.parametrize("ending", ["commit", "rollback"])


class Floor:
    """A route whose floor is at priority 10 and would rise to priority 1: what was there has ended."""

    def __init__(self, stage: Stage, engine: Party) -> None:
        self.stage = stage
        self.engine = engine

    async def arrange(self, entry: Entry) -> Any:
        await self.stage.empty()
        await submit(self.engine, priority=10, execution_kind="above")
        await submit(self.engine, priority=1, execution_kind="above")
        self.route = await self.stage.watch.fetchval("select id from flowfabric.route where kind = 'above'")
        await self.engine.raise_floor(self.route)
        assert await self.rank() == 8990
        first = await claim_one(self.engine, kinds=["above"])
        assert first.priority == 10
        await self.engine.complete(first.handle)
        arranged = await entry.arrange(self.engine)
        assert await self.rank() == 8990
        await self.stage.clock.advance(seconds=entry.after)
        return arranged

    async def rank(self, connection: asyncpg.Connection[Any] | None = None) -> int:
        found: int = await (connection or self.stage.watch).fetchval(
            "select min(rank) from flowfabric.ready_floor where route = $1", self.route
        )
        return found

    async def first_claim(self) -> int:
        """The priority of what the next claim finds, after everything else was checked."""
        await self.stage.audit()
        return (await claim_one(self.engine, kinds=["above"])).priority


@endings
@entries
async def test_the_floor_is_not_raised_while_something_enters_below(
    stage: Stage, three: list[Party], entry: Entry, ending: str
) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    arranged = await floor.arrange(entry)

    await one.begin()
    await entry.enter(one, arranged)
    await two.raise_floor(floor.route)
    assert await floor.rank() == 8990, "given up at once: another call enters"
    await one.end(ending)
    await two.raise_floor(floor.route)
    assert await floor.rank() == (8995 if ending == "commit" else 8999)

    assert await floor.first_claim() == (5 if ending == "commit" else 1)


@endings
@entries
async def test_an_insert_during_a_raise_does_not_wait_and_has_a_floor_of_its_own(
    stage: Stage, three: list[Party], entry: Entry, ending: str
) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    arranged = await floor.arrange(entry)

    await two.begin()
    await two.raise_floor(floor.route)
    assert await floor.rank(two.connection) == 8999
    await entry.enter(one, arranged)
    await two.end(ending)
    assert await floor.rank() == (8995 if ending == "commit" else 8990)

    assert await floor.first_claim() == 5


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@entries
async def test_with_an_old_snapshot_a_submission_lowers_the_floor_and_all_else_is_refused(
    stage: Stage, three: list[Party], entry: Entry, isolation: str
) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    arranged = await floor.arrange(entry)

    await one.begin(isolation)
    assert await floor.rank(one.connection) == 8990
    await two.raise_floor(floor.route)
    assert await floor.rank() == 8999
    if entry.name != "create":
        # It might miss what the lock protects.
        with pytest.raises((asyncpg.PostgresError, Unavailable), match="READ COMMITTED"):
            await entry.enter(one, arranged)
        await one.rollback()
        return
    await entry.enter(one, arranged)
    await one.commit()
    assert await floor.rank() == 8995

    assert await floor.first_claim() == 5


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@entries
async def test_an_old_snapshot_does_not_raise_the_floor_over_rows_it_cannot_see(
    stage: Stage, three: list[Party], entry: Entry, isolation: str
) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    arranged = await floor.arrange(entry)

    await two.begin(isolation)
    await floor.rank(two.connection)
    await entry.enter(one, arranged)
    await two.raise_floor(floor.route)
    await two.commit()

    assert await floor.first_claim() == 5


@entries
async def test_an_undone_savepoint_leaves_floor_and_lock_as_they_were(
    stage: Stage, three: list[Party], entry: Entry
) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    arranged = await floor.arrange(entry)

    await one.begin()
    await one.connection.execute("savepoint before")
    await entry.enter(one, arranged)
    await one.connection.execute("rollback to savepoint before")
    await two.raise_floor(floor.route)
    assert await floor.rank() == 8999, "no call enters any more"
    await entry.enter(one, arranged)
    await one.commit()
    assert await floor.rank() == 8995

    assert await floor.first_claim() == 5


async def test_a_long_transaction_with_urgent_work_keeps_its_place(stage: Stage, three: list[Party]) -> None:
    submitter, worker, engine = three
    floor = Floor(stage, engine)
    await floor.arrange(ENTRIES[0])
    for _ in range(5):
        await submit(engine, priority=4, execution_kind="above")

    await submitter.begin()
    urgent = await submit(submitter, priority=9000, execution_kind="above")
    for _ in range(5):
        claimed = await claim_one(worker, kinds=["above"])
        await worker.raise_floor(floor.route)
        await worker.complete(claimed.handle)
        assert await floor.rank() == 8990
    await submitter.commit()

    assert (await claim_one(worker, kinds=["above"])).execution_id == urgent
    await worker.raise_floor(floor.route)
    assert await floor.rank() == 8999
    await stage.audit()


@endings
async def test_rows_of_an_open_claim_stay_above_the_floor(stage: Stage, three: list[Party], ending: str) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    await floor.arrange(ENTRIES[0])
    await submit(engine, priority=5, execution_kind="above")

    await one.begin()
    assert (await claim_one(one, kinds=["above"])).priority == 5
    await two.raise_floor(floor.route)
    assert await floor.rank() == 8995
    await one.end(ending)

    assert await floor.first_claim() == (1 if ending == "commit" else 5)


@endings
async def test_a_claim_that_raised_the_floor_undoes_both_or_neither(
    stage: Stage, three: list[Party], ending: str
) -> None:
    one, two, engine = three
    floor = Floor(stage, engine)
    await floor.arrange(ENTRIES[0])
    await submit(engine, priority=5, execution_kind="above")

    await one.begin()
    assert (await claim_one(one, kinds=["above"])).priority == 5
    await one.raise_floor(floor.route)
    assert await floor.rank(one.connection) == 8999
    await submit(two, priority=7, execution_kind="above")
    assert (await claim_one(one, kinds=["above"])).priority == 7, "no claim waits for the raise"
    assert (await claim_one(one, kinds=["above"])).priority == 1
    await one.end(ending)

    if ending == "rollback":
        assert [await floor.first_claim() for _ in range(3)] == [7, 5, 1]
    await stage.audit()
    assert await engine.claim(**{**WORKER, "kinds": ["above"]}) is None
