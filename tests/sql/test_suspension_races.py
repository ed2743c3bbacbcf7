"""The races of a suspension, each with the outcome that the contract guarantees in either order.

One call is held in an open transaction while the other arrives; then it commits or rolls back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import ValidationFailed
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import all_of, on
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.keystore import Rotated
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import (
    AlreadySatisfied,
    BoundWaitpoint,
    ExpiredSuspension,
    Fresh,
    NewWaitpoint,
    Resumed,
    Suspended,
    UsePending,
    WaitpointToken,
)
from tests.ids import home, id_in
from tests.interleave import PATIENCE, Party, Stage, settled, waiting
from tests.support import OTHER, WORKER, claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = timedelta(days=30)
MINUTE = timedelta(seconds=60)
SATISFIED = "resume_condition_satisfied"
BUFFERED = "buffered_for_pending_waitpoint"
BEHAVIORS = ("fail", "cancel", "expire", "auto_resume_with_timeout_signal", "escalate")
endings = pytest.mark.parametrize("ending", ["commit", "rollback"])


@pytest_asyncio.fixture(loop_scope="session")
async def parties(stage: Stage) -> AsyncIterator[list[Party]]:
    await stage.empty()
    yield await stage.company(3)
    await stage.audit()


class Point:
    """A waitpoint of an execution, and its token."""

    def __init__(self, execution_id: ExecutionId, waitpoint_id: UUID, token: WaitpointToken) -> None:
        self.execution_id = execution_id
        self.id = waitpoint_id
        self.token = token

    def signal(self, party: Party, name: str = "go", **fields: Any) -> Awaitable[Any]:
        given = {"waitpoint_token": self.token, "source_type": "webhook", **fields}
        return party.deliver_signal(self.execution_id, self.id, signal_name=name, **given)


async def held(engine: Party, *, lease_ttl: timedelta = LONG, **fields: Any) -> Claimed:
    await submit(engine, **fields)
    return await claim_one(engine, lease_ttl=lease_ttl)


async def pending(engine: Party, one: Claimed, expires_in: timedelta = MINUTE) -> Point:
    made = await engine.create_waitpoint(one.handle, "k", expires_in)
    assert isinstance(made, NewWaitpoint)
    return Point(one.execution_id, made.waitpoint_id, made.token)


def suspend(engine: Party, one: Claimed, point: Point | None = None, **fields: Any) -> Awaitable[Any]:
    binding = Fresh(mint_uuid(), "k") if point is None else UsePending(point.id)
    given = {"waitpoints": [binding], "resume_condition": on("k"), **fields}
    return engine.suspend(one.handle, **given)


async def suspended(stage: Stage, engine: Party, behavior: str = "fail", **fields: Any) -> tuple[Claimed, Point]:
    """An execution suspended for a minute."""
    one = await held(engine)
    due = await stage.clock.now() + MINUTE
    answer = await suspend(engine, one, timeout_at=due, timeout_behavior=behavior, **fields)
    assert isinstance(answer, Suspended)
    return one, Point(one.execution_id, answer.details.waitpoint_id, answer.details.waitpoint_token)


async def state(stage: Stage, one: Claimed) -> str:
    return str(await stage.watch.fetchval("select state from flowfabric.execution where id = $1", one.execution_id))


async def reason(stage: Stage, one: Claimed) -> str | None:
    """How the newest suspension of an execution ended."""
    found: str | None = await stage.watch.fetchval(
        "select close_reason from flowfabric.suspension where id = $1 order by number desc limit 1",
        one.execution_id,
    )
    return found


async def signals(stage: Stage) -> int:
    return int(await stage.watch.fetchval("select count(*) from flowfabric.signal"))


async def behind(stage: Stage, first: Party, second: Party, call: Awaitable[Any], ending: str) -> Any:
    """What a call answers that arrives while the first party has something under way, which then ends so."""
    task = await waiting(stage.watch, second, call, behind=first)
    await first.end(ending)
    return await task


def kind(answer: Any) -> str:
    return str(answer.kind) if isinstance(answer, ff.FlowFabricError) else type(answer).__name__


# Two satisfying signals


@endings
async def test_of_two_satisfying_signals_one_resumes_and_the_other_is_late(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    await one.begin()
    assert (await point.signal(one)).effect == SATISFIED
    answer = await behind(stage, one, two, point.signal(two), ending)
    if ending == "commit":
        assert kind(answer) == "waitpoint_closed"
    else:
        assert answer.effect == SATISFIED
    assert (await state(stage, claimed), await reason(stage, claimed)) == ("resumable", "resumed")
    assert await signals(stage) == 1


@endings
@pytest.mark.parametrize("by", ["signal_id", "idempotency_key", "approval"])
async def test_of_one_signal_sent_twice_concurrently_one_is_accepted(
    stage: Stage, parties: list[Party], by: str, ending: str
) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    fields: dict[str, Any] = {"signal_id": mint_uuid()} if by == "signal_id" else {"idempotency_key": "the one"}

    def send(party: Party) -> Awaitable[Any]:
        if by == "approval":
            return party.deliver_approval_signal(
                claimed.execution_id, "default", point.id, signal_name="go", idempotency_suffix="1"
            )
        return point.signal(party, **fields)

    await one.begin()
    first = await send(one)
    answer = await behind(stage, one, two, send(two), ending)
    if ending == "commit":
        assert answer == DuplicateSignal(first.signal_id)
    else:
        assert isinstance(answer, Accepted) and answer.effect == SATISFIED
    assert await signals(stage) == 1
    again = await one.claim(**OTHER)
    assert again is not None
    assert len(await one.observe_signals(again.handle)) == 1


# Signal and timeout


_AFTER = {"fail": "failed", "cancel": "cancelled", "expire": "expired", "escalate": "suspended"}


@endings
@pytest.mark.parametrize("by", ["duty", "hand"])
@pytest.mark.parametrize("behavior", BEHAVIORS)
async def test_a_timeout_behind_a_signal_is_late(
    stage: Stage, parties: list[Party], behavior: str, by: str, ending: str
) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one, behavior)
    await stage.clock.advance(seconds=61)
    await one.begin()
    assert (await point.signal(one)).effect == SATISFIED, "a time that has passed does not refuse by itself"
    if by == "duty":
        assert (await two.run_timers("suspension")).handled == 0
        await one.end(ending)
        answer = (await two.run_timers("suspension")).handled
        assert answer == (0 if ending == "commit" else 1)
    else:
        answer = await behind(stage, one, two, two.expire_suspension(claimed.execution_id), ending)
        late = AlreadySatisfied("not_suspended")
        assert answer == (late if ending == "commit" else ExpiredSuspension(claimed.execution_id, behavior))
    await stage.audit()
    expected = "resumable" if ending == "commit" else _AFTER.get(behavior, "resumable")
    assert await state(stage, claimed) == expected
    await stage.clock.advance(hours=1)
    assert (await two.run_timers("suspension")).handled == 0, "a closed suspension changes nothing any more"
    assert await state(stage, claimed) == expected


@endings
@pytest.mark.parametrize("by", ["duty", "hand"])
@pytest.mark.parametrize("behavior", BEHAVIORS)
async def test_a_signal_behind_a_timeout_is_late(
    stage: Stage, parties: list[Party], behavior: str, by: str, ending: str
) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one, behavior)
    await stage.clock.advance(seconds=61)
    await one.begin()
    if by == "duty":
        assert (await one.run_timers("suspension")).handled == 1
    else:
        assert isinstance(await one.expire_suspension(claimed.execution_id), ExpiredSuspension)
    answer = await behind(stage, one, two, point.signal(two), ending)
    if ending == "rollback" or behavior == "escalate":
        assert answer.effect == SATISFIED, "an escalated suspension is still open"
        assert await reason(stage, claimed) == "resumed"
    elif behavior == "auto_resume_with_timeout_signal":
        assert kind(answer) == "waitpoint_closed"
        again = await claim_one(one)
        (only,) = await one.observe_signals(again.handle)
        assert (only.source_type, only.signal_name) == ("system", "timeout")
    else:
        assert kind(answer) == "target_not_signalable"
        assert await state(stage, claimed) == _AFTER[behavior]
        assert await signals(stage) == 0


# Signal and operator


@endings
async def test_an_operator_behind_a_signal_is_late(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    await one.begin()
    await point.signal(one)
    answer = await behind(stage, one, two, two.resume_execution(claimed.execution_id, "operator"), ending)
    if ending == "commit":
        assert kind(answer) == "execution_not_suspended"
        assert await reason(stage, claimed) == "resumed"
    else:
        assert answer == Resumed(claimed.execution_id, ff.State.RESUMABLE)
        assert (await reason(stage, claimed), await signals(stage)) == ("operator_resumed", 0)


@endings
async def test_a_signal_behind_an_operator_is_late(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    await one.begin()
    await one.resume_execution(claimed.execution_id, "operator")
    answer = await behind(stage, one, two, point.signal(two), ending)
    if ending == "commit":
        assert kind(answer) == "waitpoint_closed"
        assert (await reason(stage, claimed), await signals(stage)) == ("operator_resumed", 0)
    else:
        assert answer.effect == SATISFIED
    again = await claim_one(one)
    assert len(await one.observe_signals(again.handle)) == (0 if ending == "commit" else 1)


# Signal and suspend


@endings
async def test_a_suspend_behind_a_signal_counts_it(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    await one.begin()
    sent = await point.signal(one, payload=b"42")
    assert sent.effect == BUFFERED
    answer = await behind(stage, one, two, suspend(two, claimed, point), ending)
    if ending == "commit":
        assert isinstance(answer, AlreadySatisfied)
        assert [(s.signal_id, s.payload) for s in await one.observe_signals(claimed.handle)] == [
            (sent.signal_id, b"42")
        ]
        await one.complete(claimed.handle)
    else:
        assert isinstance(answer, Suspended)
        assert (await point.signal(one)).effect == SATISFIED


@endings
async def test_a_signal_behind_a_suspend_is_evaluated(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    await one.begin()
    assert isinstance(await suspend(one, claimed, point), Suspended)
    answer = await behind(stage, one, two, point.signal(two), ending)
    assert answer.effect == (SATISFIED if ending == "commit" else BUFFERED)
    if ending == "commit":
        again = await claim_one(one)
        assert again.handle.attempt_id == claimed.handle.attempt_id
        assert [s.signal_id for s in await one.observe_signals(again.handle)] == [answer.signal_id]
    else:
        assert isinstance(await suspend(one, claimed, point), AlreadySatisfied)


@endings
async def test_concurrent_signals_on_two_waitpoints_are_both_counted(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, _ = parties
    claimed = await held(one)
    answer = await one.suspend(
        claimed.handle,
        waitpoints=[Fresh(mint_uuid(), "k"), Fresh(mint_uuid(), "l")],
        resume_condition=all_of("k", "l"),
    )
    assert isinstance(answer, Suspended)
    (other,) = answer.details.additional_waitpoints
    assert isinstance(other, BoundWaitpoint)
    k = Point(claimed.execution_id, answer.details.waitpoint_id, answer.details.waitpoint_token)
    second = Point(claimed.execution_id, other.waitpoint_id, other.waitpoint_token)
    await one.begin()
    assert (await k.signal(one)).effect == "appended_to_waitpoint"
    late = await behind(stage, one, two, second.signal(two), ending)
    assert late.effect == (SATISFIED if ending == "commit" else "appended_to_waitpoint")
    if ending == "rollback":
        assert (await k.signal(one)).effect == SATISFIED
    assert await state(stage, claimed) == "resumable"


# Signal and pending expiry


@endings
async def test_a_pending_expiry_behind_a_signal_leaves_it_recorded(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, _ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    await one.begin()
    assert (await point.signal(one)).effect == BUFFERED
    await stage.clock.advance(seconds=61)
    assert (await two.run_timers("waitpoint")).handled == 0, "what is locked is passed over"
    await one.end(ending)
    assert (await two.run_timers("waitpoint")).handled == 1
    assert await signals(stage) == (1 if ending == "commit" else 0)
    assert kind(await settled(point.signal(one))) == "waitpoint_closed"
    assert kind(await settled(suspend(one, claimed, point))) == "pending_waitpoint_expired"
    assert await state(stage, claimed) == "active"


@endings
@pytest.mark.parametrize("by", ["duty", "hand"])
async def test_a_signal_behind_a_pending_expiry_is_late(
    stage: Stage, parties: list[Party], by: str, ending: str
) -> None:
    one, two, _ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    await stage.clock.advance(seconds=61)
    await one.begin()
    if by == "duty":
        assert (await one.run_timers("waitpoint")).handled == 1
    else:
        assert kind(await one.expire_waitpoint(claimed.execution_id, point.id)) == "Closed"
    answer = await behind(stage, one, two, point.signal(two), ending)
    assert kind(answer) == "waitpoint_closed", "also when it is not marked yet"
    assert await signals(stage) == 0


# Suspend and lease expiry


@endings
async def test_a_lease_expiry_behind_a_suspend_finds_no_lease(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed = await held(one, lease_ttl=MINUTE)
    await one.begin()
    assert isinstance(await suspend(one, claimed), Suspended)
    await stage.clock.advance(seconds=61)
    assert (await two.run_timers("lease")).handled == 0, "what is locked is passed over"
    await one.end(ending)
    assert (await two.run_timers("lease")).handled == (0 if ending == "commit" else 1)
    assert await state(stage, claimed) == ("suspended" if ending == "commit" else "active")
    lost = await stage.watch.fetchval("select lease_lost from flowfabric.execution")
    assert lost == (None if ending == "commit" else "expired")


@endings
async def test_a_suspend_behind_a_lease_expiry_is_refused(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed = await held(one, lease_ttl=MINUTE)
    await stage.clock.advance(seconds=61)
    await one.begin()
    assert (await one.run_timers("lease")).handled == 1
    answer = await behind(stage, one, two, suspend(two, claimed), ending)
    assert kind(answer) == "lease_expired", "also when it is not marked yet"
    assert await stage.watch.fetchval("select count(*) from flowfabric.suspension") == 0


# Rotation and signing


_MINTS: dict[str, Callable[[Party, Claimed], Awaitable[Any]]] = {
    "create waitpoint": lambda party, one: party.create_waitpoint(one.handle, "k", LONG),
    "suspend": lambda party, one: suspend(party, one),
    "open wait": lambda party, one: party.open_wait(one.handle, "wait", 0, ["k"], None),
}


def _token(answer: Any) -> tuple[UUID, WaitpointToken]:
    match answer:
        case NewWaitpoint():
            return answer.waitpoint_id, answer.token
        case Suspended():
            return answer.details.waitpoint_id, answer.details.waitpoint_token
        case _:
            return answer.waitpoints[0].waitpoint_id, answer.waitpoints[0].waitpoint_token


@endings
@pytest.mark.parametrize("first", ["rotate", "mint"])
@pytest.mark.parametrize("mint", _MINTS)
async def test_a_token_made_during_a_rotation_is_good_for_the_grace(
    stage: Stage, parties: list[Party], mint: str, first: str, ending: str
) -> None:
    one, two, _ = parties
    claimed = await held(one)
    rotator, minter = (one, two) if first == "rotate" else (two, one)
    await one.begin()
    if first == "rotate":
        (entry,) = await rotator.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, grace=MINUTE)
        made = await asyncio.wait_for(_MINTS[mint](minter, claimed), PATIENCE)
    else:
        made = await _MINTS[mint](minter, claimed)
        (entry,) = await asyncio.wait_for(
            rotator.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, grace=MINUTE), PATIENCE
        )
    assert isinstance(entry.result, Rotated)
    await one.end(ending)
    waitpoint_id, token = _token(made)
    assert token.reveal().startswith("k1:"), "signed by the key that was current for it"
    if first == "mint" and ending == "rollback":
        return
    point = Point(claimed.execution_id, waitpoint_id, token)
    assert isinstance(await point.signal(two), Accepted)
    rotated = ending == "commit" or first == "mint"
    await stage.clock.advance(seconds=61)
    answer = await settled(point.signal(two))
    if rotated:
        assert isinstance(answer, ValidationFailed) and "token_expired" in str(answer)
    else:
        assert "token_expired" not in str(answer)


@endings
async def test_rotations_run_one_after_the_other(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    await one.begin()
    await one.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32)
    (entry,) = await behind(stage, one, two, two.rotate_waitpoint_hmac_secret_all("k3", "cd" * 32), ending)
    assert entry.result == Rotated("k2" if ending == "commit" else "k1", "k3", 0)
    kids = await one.list_waitpoint_hmac_kids()
    assert kids.current_kid == "k3"
    assert sorted(each.kid for each in kids.verifying) == (["k1", "k2"] if ending == "commit" else ["k1"])


# What does not wait


async def test_a_caller_without_a_token_waits_for_no_lock(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    await one.begin()
    await point.signal(one, "another", signal_maxlen=5)
    answer = await settled(point.signal(two, waitpoint_token="k1:" + "0" * 64))
    assert (kind(answer), two.connection.is_in_transaction()) == ("invalid_token", False)
    await one.commit()
    await settled(point.signal(two, waitpoint_token="k1:" + "0" * 64))
    assert await stage.watch.fetchval("select hmac_failed_at is not null from flowfabric.execution")
    assert await state(stage, claimed) == "resumable"


def _partition(one: Claimed) -> str:
    return home(one.execution_id)


_READS: dict[str, Callable[[Party, Claimed, Point], Awaitable[Any]]] = {
    "list_pending_waitpoints": lambda p, c, w: p.list_pending_waitpoints(c.execution_id),
    "read_waitpoint_token": lambda p, c, w: p.read_waitpoint_token(_partition(c), w.id),
    "list_suspended": lambda p, c, w: p.list_suspended(_partition(c)),
    "list_waits": lambda p, c, w: p.list_waits(),
    "read_suspension": lambda p, c, w: p.read_suspension(c.execution_id),
    "read_signals": lambda p, c, w: p.read_signals(c.execution_id),
    "observe_signals": lambda p, c, w: p.observe_signals(c.handle),
    "probe_waitpoint": lambda p, c, w: p.probe_waitpoint(c.execution_id, w.id, w.token),
}


@pytest.mark.parametrize("name", _READS)
async def test_a_read_waits_for_no_lock_and_sees_committed_rows(stage: Stage, parties: list[Party], name: str) -> None:
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    before = await _READS[name](two, claimed, point)
    await one.begin()
    await point.signal(one)
    assert await asyncio.wait_for(_READS[name](two, claimed, point), PATIENCE) == before
    await one.commit()
    assert await _READS[name](two, claimed, point) != before


# Deadlocks


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_suspends_on_the_same_fresh_ids_in_opposite_orders_do_not_deadlock(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    """The ids are the caller's: two executions of one partition may come with the same ones, by mistake."""
    one, two, holder = parties
    claimed = []
    for _ in range(3):
        await one.create_execution(execution_kind="test", execution_id=id_in(7))
        claimed.append(await claim_one(one, lease_ttl=LONG))
    ids = sorted((mint_uuid() for _ in range(3)), key=str)
    bindings = [Fresh(each, f"k{place}") for place, each in enumerate(ids)]

    def together(party: Party, of: Claimed, order: list[Fresh]) -> Awaitable[Any]:
        condition = all_of(*(each.waitpoint_key for each in order))
        return party.suspend(of.handle, waitpoints=order, resume_condition=condition)

    await holder.begin()
    await together(holder, claimed[2], [bindings[1]])
    first = await waiting(stage.watch, one, together(one, claimed[0], bindings))
    second = await waiting(stage.watch, two, together(two, claimed[1], bindings[::-1]))
    await holder.end(ending)
    answers = [kind(await first), kind(await second)]
    taken = "waitpoint_already_exists"
    assert sorted(answers) == ([taken, taken] if ending == "commit" else ["Suspended", taken])


@pytest.mark.parametrize("endings_of", [(a, b) for a in ("commit", "rollback") for b in ("commit", "rollback")])
@pytest.mark.parametrize("first", ["signal", "end"])
async def test_a_signal_and_the_end_of_a_child_wake_a_parent_once(
    stage: Stage, parties: list[Party], first: str, endings_of: tuple[str, str]
) -> None:
    """It is parked for both. Each holds the parent or finds it held; whatever commits, it continues."""
    one, two, three = parties
    await submit(one, lane_id="parents")
    parent = await claim_one(one, lane_id="parents", lease_ttl=LONG)
    child = await held(one)
    point = await pending(one, parent, LONG)
    assert (await one.park(parent.handle, ends_of=[child.execution_id], signals_on={point.id: 0})).parked
    await stage.audit()

    await two.begin()
    if first == "signal":
        await point.signal(two)
        await three.begin()
        await asyncio.wait_for(three.complete(child.handle), PATIENCE)
        await two.end(endings_of[0])
        await three.end(endings_of[1])
    else:
        await two.complete(child.handle)
        await three.begin()
        task = await waiting(stage.watch, three, point.signal(three), behind=two)
        await two.end(endings_of[0])
        assert (await task).effect == BUFFERED
        await three.end(endings_of[1])
    await stage.audit()
    await one.run_timers("parked")
    again = await one.claim(**OTHER, lane_id="parents")
    if "commit" in endings_of:
        assert again is not None and again.handle.attempt_id == parent.handle.attempt_id
        assert await one.claim(**OTHER, lane_id="parents") is None
    else:
        assert again is None
        await point.signal(one)
        assert await one.claim(**OTHER, lane_id="parents") is not None
    assert await stage.watch.fetchval("select count(*) from flowfabric.ready") == 0


# Lost wake-ups


@pytest.mark.parametrize("by", ["signal", "approval", "duty", "hand", "late signal"])
async def test_an_execution_parked_for_signals_continues_when_one_arrives_or_none_can(
    stage: Stage, parties: list[Party], by: str
) -> None:
    one, *_ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    assert (await one.park(claimed.handle, signals_on={point.id: 0})).parked
    await stage.audit()
    assert await one.claim(**OTHER) is None
    if by in ("duty", "hand", "late signal"):
        await stage.clock.advance(seconds=61)
    match by:
        case "signal":
            await point.signal(one)
        case "approval":
            await one.deliver_approval_signal(
                claimed.execution_id, "default", point.id, signal_name="go", idempotency_suffix="1"
            )
        case "duty":
            assert (await one.run_timers("suspension")).handled == 1
        case "hand":
            await one.expire_suspension(claimed.execution_id)
        case "late signal":
            await point.signal(one)
    assert await stage.watch.fetchval("select count(*) from flowfabric.waiter") == 0
    again = await claim_one(one, **OTHER)
    assert (again.execution_id, again.handle.attempt_id) == (claimed.execution_id, claimed.handle.attempt_id)
    answer = await one.park(again.handle, signals_on={point.id: 0})
    assert (answer.parked, answer.because) == (False, "signal")


@endings
async def test_a_signal_that_meets_a_parking(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    await one.begin()
    assert (await one.park(claimed.handle, signals_on={point.id: 0})).parked
    effect = (await behind(stage, one, two, point.signal(two), ending)).effect
    assert effect == (SATISFIED if ending == "commit" else BUFFERED)
    assert await state(stage, claimed) == ("resumable" if ending == "commit" else "active")
    if ending == "rollback":
        assert (await one.park(claimed.handle, signals_on={point.id: 0})).because == "signal"


@endings
async def test_a_parking_that_meets_a_signal(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    claimed = await held(one)
    point = await pending(one, claimed)
    await one.begin()
    await point.signal(one)
    answer = await behind(stage, one, two, two.park(claimed.handle, signals_on={point.id: 0}), ending)
    assert (answer.parked, answer.because) == ((False, "signal") if ending == "commit" else (True, None))
    if ending == "rollback":
        await point.signal(one)
        assert await state(stage, claimed) == "resumable"


async def _repeated(party: Party, claimed: Claimed, point: Point, signal_id: UUID) -> Any:
    return await point.signal(party, signal_id=signal_id)


async def _late(party: Party, claimed: Claimed, point: Point, signal_id: UUID) -> Any:
    return await settled(point.signal(party))


@pytest.mark.parametrize("call", [_repeated, _late], ids=["repeated", "late"])
async def test_a_claim_that_came_during_a_useless_signal_is_notified_again(
    stage: Stage, parties: list[Party], call: Any
) -> None:
    """A sender that tries again right after it woke the execution locks it for a moment, and a claim passes it by."""
    one, two, _ = parties
    claimed, point = await suspended(stage, one)
    signal_id = mint_uuid()
    await point.signal(one, signal_id=signal_id)
    heard: asyncio.Queue[str] = asyncio.Queue()
    ear = await asyncpg.connect(stage.dsn)
    await ear.add_listener(f"flowfabric_{two._instance}", lambda *message: heard.put_nowait(message[-1]))
    await two.sleep_for_work(["default"], timedelta(seconds=60))
    await one.begin()
    await call(one, claimed, point, signal_id)
    assert await two.claim(**WORKER) is None
    await one.commit()
    await stage.watch.execute("notify flowfabric, 'end'")
    assert await asyncio.wait_for(heard.get(), PATIENCE) == "work"
    assert (await claim_one(two)).execution_id == claimed.execution_id
    await ear.close()


# Repeating


@endings
async def test_a_suspend_repeated_while_the_first_is_under_way_is_one(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, _ = parties
    claimed = await held(one)
    await one.begin()
    first = await suspend(one, claimed, idempotency_key="once")
    again = await behind(stage, one, two, suspend(two, claimed, idempotency_key="once"), ending)
    assert isinstance(again, Suspended)
    assert (again == first) == (ending == "commit")
    assert await stage.watch.fetchval("select count(*) from flowfabric.suspension") == 1


@endings
async def test_a_suspend_without_a_key_behind_another_is_refused(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, _ = parties
    claimed = await held(one)
    await one.begin()
    await suspend(one, claimed)
    answer = await behind(stage, one, two, suspend(two, claimed), ending)
    assert kind(answer) == ("already_suspended" if ending == "commit" else "Suspended")
