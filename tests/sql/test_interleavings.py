"""Every operation held at the lock while every other one arrives.

The first call is made inside an open transaction; the second starts meanwhile. It waits for the first or passes the
row by, whichever the operation is for; then the first is committed or rolled back, and the second must answer as if it
had come alone to what is left. The table of operations below is the whole specification of what that answer is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.ids import mint_uuid
from flowfabric.models import AlreadySatisfied, ReclaimGrant, Rejected
from tests.conftest import fresh_database
from tests.interleave import Party, Stage, parties, settled, waiting
from tests.support import OTHER, WORKER, claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = timedelta(seconds=30)
RETRY = ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(seconds=10)))


# Where an execution stands, seen by the worker of the setup. "A" is active under that worker's lease, "A'" under
# another one; "lapsed" is a lease whose time is over though nobody has marked it yet.
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
    handle: ff.Handle
    grant_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation as both sides of a race.

    `starts`: the setups it can act in; `acts`: where it acts, what it then answers and where it leads; `refuses`: what
    it answers anywhere else; `skips`: it passes locked rows by instead of waiting; `after`: how far the clock must move
    for it to have something to do.
    """

    name: str
    call: Callable[[Party, Case], Awaitable[Any]]
    starts: tuple[str, ...]
    acts: Mapping[str, tuple[str, str]]
    refuses: Mapping[str, str]
    skips: bool = False
    after: float = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


def everywhere(answer: str, **instead: tuple[str, tuple[str, ...]]) -> dict[str, str]:
    """One answer for all places, with exceptions."""
    answers = dict.fromkeys(PLACES, answer)
    for kind, places in instead.values():
        answers.update(dict.fromkeys(places, kind))
    return answers


def holders(**repeated: str) -> dict[str, str]:
    """How a holder's call is refused; `repeated` are the answers to a call that was made before."""
    answers = everywhere(
        "execution_not_active",
        lapsed=("lease_expired", (*LAPSED, "X", "X granted")),
        revoked=("lease_revoked", ("V",)),
        taken=("stale_lease", ("A'",)),
    )
    return answers | {place.replace("_", ":"): answer for place, answer in repeated.items()}


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
    return await party.cancel(ff.Operator(case.id), "no longer wanted")


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


async def _delay(party: Party, case: Case) -> Any:
    return await party.delay(case.handle, timedelta(seconds=5))


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
        # After a replay the attempt that completed still answers for itself.
        refuses=holders(T_completed="Completed") | {"W.p": "Completed"},
    ),
    Operation(
        name="fail",
        call=_fail,
        starts=("A",),
        acts=_to("RetryScheduled", "D.r", "A"),
        refuses=holders(T_failed="TerminalFailed") | {"D.r": "RetryScheduled"},
    ),
    Operation(
        name="fail for good",
        call=_fail_for_good,
        starts=("A",),
        acts=_to("TerminalFailed", "T:failed", "A"),
        refuses=holders(T_failed="TerminalFailed") | {"D.r": "RetryScheduled"},
    ),
    Operation(name="renew", call=_renew, starts=("A",), acts=_to("Renewed", "A", "A"), refuses=holders()),
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
        refuses=holders(T_cancelled="Cancelled"),
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
        refuses=holders(),
    ),
    Operation(name="delay", call=_delay, starts=("A",), acts=_to("Delayed", "D.i", "A"), refuses=holders()),
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
HOLDERS = ("complete", "fail", "fail for good", "renew", "give up", "release", "delay")


async def set_up(stage: Stage, engine: Party, start: str, *operations: Operation) -> Case:
    """An execution in the place named, with the times that the operations are about."""
    await stage.empty()
    fields: dict[str, Any] = {}
    for operation in operations:
        fields |= operation.fields
    await submit(
        engine,
        policy=ff.ExecutionPolicy(
            retry_policy=RETRY, timeout_policy=ff.TimeoutPolicy(attempt_timeout=fields.get("attempt_timeout"))
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
    """Where the execution stands as this connection sees it, and whether its deadline is over."""
    row = await connection.fetchrow(
        """select e.state, e.pending, e.lease_lost, e.lease_id, e.blocking_reason,
                  e.lease_expires_at <= t.now as lapsed, coalesce(e.deadline_at <= t.now, false) as overdue,
                  exists (select from flowfabric.claim_grant g where g.id = e.id and g.expires_at > t.now) as granted
           from flowfabric.execution e, (select flowfabric.now() as now) t where e.partition = $1 and e.id = $2""",
        case.id.partition,
        case.id.uuid,
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


def foretold(operation: Operation, place: str, overdue: bool) -> tuple[str, str]:
    """What an operation that finds the execution there answers, and where it then stands."""
    if operation.name == "claim" and overdue:
        return "none", place
    if place in operation.acts:
        return operation.acts[place]
    answer = operation.refuses[place]
    # The only thing a refused call changes: a lapsed lease that it meets is marked.
    return answer, "X" if operation.name in HOLDERS and place in LAPSED else place


def meetings(first: Operation, second: Operation) -> list[str]:
    """The setups in which both could act, or else one in which the first can."""
    return [start for start in first.starts if start in second.starts] or [first.starts[0]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(server: str) -> AsyncIterator[Stage]:
    async with fresh_database(server) as dsn:
        watch = await asyncpg.connect(dsn)
        yield Stage(dsn, watch)
        await watch.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(stage: Stage) -> AsyncIterator[list[Party]]:
    async with parties(stage.dsn, 2) as joined:
        yield joined


PAIRS = [pytest.param(a, b, id=f"{a.name} then {b.name}") for a in OPERATIONS for b in OPERATIONS]


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_second_call_answers_to_what_the_first_left(
    stage: Stage, pair: list[Party], first: Operation, second: Operation
) -> None:
    one, two = pair
    for start in meetings(first, second):
        for ending in ("commit", "rollback"):
            case = await set_up(stage, one, start, first, second)
            if first.after:
                await stage.clock.advance(seconds=first.after)
            before, overdue = await place_of(stage.watch, case)
            assert before in first.acts, "the setup must let the first operation act"
            answer, after = foretold(first, before, overdue)

            await one.begin()
            try:
                assert said(await settled(first.call(one, case))) == answer
                assert await place_of(one.connection, case) == (after, overdue)
                if second.after:
                    await stage.clock.advance(seconds=second.after)
                left = one.connection if ending == "commit" else stage.watch
                found = await place_of(left, case)
                if second.skips:
                    assert said(await settled(second.call(two, case))) == second.refuses["B"], "locked rows are skipped"
                    await one.end(ending)
                    last = await settled(second.call(two, case))
                else:
                    task = await waiting(stage.watch, two, one, second.call(two, case))
                    await one.end(ending)
                    last = await task
            finally:
                if one.connection.is_in_transaction():
                    await one.rollback()

            answer, after = foretold(second, *found)
            assert said(last) == answer, f"{ending} from {start}"
            assert (await place_of(stage.watch, case))[0] == after, f"{ending} from {start}"
            await stage.audit()
