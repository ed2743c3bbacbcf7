"""Waiting for the end of another execution: whichever call comes first, and whatever ends it, the waiter wakes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import ExecutionNotActive
from flowfabric.values.attempt import Claimed, Failure
from flowfabric.values.execution import NewExecution
from flowfabric.values.lease import HandleKind, Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.step import Parked
from tests import sampling
from tests.ids import home, id_in
from tests.interleave import PATIENCE, Party, Stage, settled, waiting
from tests.support import OTHER, WORKER, claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
PARENTS, CHILDREN = {"lane_id": "parents"}, {"lane_id": "children"}
LONG = timedelta(days=30)
ENDINGS = ("commit", "rollback")


async def parent(engine: ff.Engine, **fields: Any) -> Claimed:
    await submit(engine, **PARENTS, **fields)
    return await claim_one(engine, **PARENTS, lease_ttl=LONG)


async def child(engine: ff.Engine, *, lease_ttl: timedelta = LONG, **fields: Any) -> Claimed:
    await submit(engine, **CHILDREN, **fields)
    return await claim_one(engine, **CHILDREN, lease_ttl=lease_ttl)


async def park(engine: ff.Engine, one: Claimed, *others: Claimed, **until: Any) -> Parked:
    return await engine.park(one.handle, ends_of=[other.execution_id for other in others], **until)


async def state(stage: Stage, one: Claimed) -> str:
    return str(
        await stage.watch.fetchval(
            "select state from flowfabric.execution where partition = $1 and id = $2",
            home(one.execution_id),
            one.execution_id,
        )
    )


async def waits(stage: Stage) -> int:
    return int(await stage.watch.fetchval("select count(*) from flowfabric.waiter"))


async def late(stage: Stage) -> int:
    """How many a timer will wake."""
    found = await stage.watch.fetchval("select sum(cardinality(ids)) from flowfabric.timer where kind = 'parked'")
    return int(found or 0)


# ---- what may end an execution


@dataclass(frozen=True, kw_only=True)
class End:
    """One way for an execution to end. `skips`: it passes locked rows by and answers that it did nothing."""

    name: str
    call: Callable[[Party, Claimed], Awaitable[Any]]
    state: str
    skips: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    lease_ttl: timedelta = LONG
    after: float = 0
    marked: bool = False


def _timers(kind: str) -> Callable[[Party, Claimed], Awaitable[Any]]:
    async def call(party: Party, one: Claimed) -> Any:
        return (await party.run_timers(kind)).handled

    return call


async def _capped(party: Party, one: Claimed) -> Any:
    """A claim ends what lost its lease too often, and finds nothing else."""
    assert await party.claim(**{**OTHER, **CHILDREN}) is None
    return None


async def _cancel_many(party: Party, one: Claimed) -> Any:
    return await party.cancel_many([one.execution_id], "enough")


ENDS = [
    End(name="complete", call=lambda p, c: p.complete(c.handle, b"1"), state="completed"),
    End(name="complete by an operator", call=lambda p, c: p.complete(Operator(c.execution_id)), state="completed"),
    End(name="fail", call=lambda p, c: p.fail(c.handle, "boom"), state="failed"),
    End(name="cancel", call=lambda p, c: p.cancel(Operator(c.execution_id), "enough"), state="cancelled"),
    End(name="give up", call=lambda p, c: p.cancel(c.handle, "enough"), state="cancelled"),
    End(name="cancel many", call=_cancel_many, state="cancelled"),
    End(
        name="deadline",
        call=_timers("deadline"),
        state="expired",
        skips=True,
        fields={"execution_deadline_at": timedelta(seconds=60)},
        after=61,
    ),
    End(
        name="attempt timeout",
        call=_timers("attempt"),
        state="expired",
        skips=True,
        fields={
            "policy": ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=60))),
        },
        after=61,
    ),
    End(
        name="reclaim cap",
        call=_capped,
        state="failed",
        skips=True,
        fields={"policy": ExecutionPolicy(max_reclaim_count=0)},
        lease_ttl=timedelta(seconds=60),
        after=61,
        marked=True,
    ),
]
EVERY_END = pytest.mark.parametrize("end", ENDS, ids=lambda end: end.name)


async def family(stage: Stage, engine: Party, end: End) -> tuple[Claimed, Claimed]:
    """A parent and a child, both running, the child about to end."""
    father = await parent(engine)
    son = await child(engine, lease_ttl=end.lease_ttl, **end.fields)
    if end.after:
        await stage.clock.advance(seconds=end.after)
    if end.marked:
        await engine.mark_lease_expired_if_due(son.execution_id)
    return father, son


async def goes_on(stage: Stage, engine: ff.Engine, one: Claimed) -> None:
    """The parent may be claimed and continues the attempt it began."""
    assert await state(stage, one) == "waiting"
    again = await claim_one(engine, **PARENTS)
    assert (again.execution_id, again.handle.attempt_id) == (one.execution_id, one.handle.attempt_id)
    assert again.handle.kind is HandleKind.RESUMED
    assert await waits(stage) == 0
    await stage.audit()


@EVERY_END
async def test_the_end_of_the_other_wakes_the_waiter(stage: Stage, parties: list[Party], end: End) -> None:
    one, *_ = parties
    father, son = await family(stage, one, end)
    assert await park(one, father, son) == Parked(father.execution_id, True)
    await stage.audit()
    assert await one.claim(**{**WORKER, **PARENTS}) is None
    await end.call(one, son)
    assert await state(stage, son) == end.state
    await goes_on(stage, one, father)


@EVERY_END
async def test_parking_for_what_has_ended_keeps_the_lease(stage: Stage, parties: list[Party], end: End) -> None:
    one, *_ = parties
    father, son = await family(stage, one, end)
    await end.call(one, son)
    assert await park(one, father, son) == Parked(father.execution_id, False, "ended")
    assert await waits(stage) == 0
    await one.complete(father.handle)
    await stage.audit()


@EVERY_END
@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_end_that_meets_a_parking(stage: Stage, parties: list[Party], end: End, ending: str) -> None:
    one, two, _ = parties
    father, son = await family(stage, one, end)
    await one.begin()
    assert (await park(one, father, son)).parked
    if end.skips:
        assert not await settled(end.call(two, son)), "what is locked is passed over"
        await one.end(ending)
        await end.call(two, son)
    else:
        task = await waiting(stage.watch, two, end.call(two, son), behind=one)
        await one.end(ending)
        assert not isinstance(await task, ff.FlowFabricError)
    assert await state(stage, son) == end.state
    if ending == "commit":
        await goes_on(stage, one, father)
    else:
        assert await state(stage, father) == "active"
        assert not (await park(one, father, son)).parked
        await stage.audit()


@EVERY_END
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_parking_that_meets_an_end(stage: Stage, parties: list[Party], end: End, ending: str) -> None:
    one, two, _ = parties
    father, son = await family(stage, one, end)
    await two.begin()
    await end.call(two, son)
    task = await waiting(stage.watch, one, park(one, father, son), behind=two)
    await two.end(ending)
    answer = await task
    if ending == "commit":
        assert answer == Parked(father.execution_id, False, "ended")
        assert await state(stage, father) == "active"
        await stage.audit()
    else:
        assert answer == Parked(father.execution_id, True)
        await end.call(two, son)
        await goes_on(stage, one, father)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ENDINGS, repeat=2)))
async def test_two_children_that_end_at_once(stage: Stage, parties: list[Party], first: str, second: str) -> None:
    one, two, three = parties
    father = await parent(one)
    sons = [await child(one), await child(one)]
    await park(one, father, *sons)
    await two.begin()
    await two.complete(sons[0].handle)
    await three.begin()
    await asyncio.wait_for(three.complete(sons[1].handle), PATIENCE)
    await two.end(first)
    await three.end(second)
    await stage.audit()
    ended = [first, second].count("commit")
    if first == "rollback" and second == "commit":
        assert await state(stage, father) == "waiting_children"
        assert await late(stage) == 1, "the second found it locked by the first"
    assert (await one.run_timers("parked")).handled == int(first == "rollback" and second == "commit")
    if ended:
        await goes_on(stage, one, father)
    else:
        assert (await state(stage, father), await waits(stage)) == ("waiting_children", 2)


async def _tag(party: Party, one: Claimed) -> None:
    await party.set_execution_tag(one.execution_id, "a.b", "c")


async def _stop(party: Party, one: Claimed) -> None:
    await party.cancel(Operator(one.execution_id), "enough")


async def _late_renewal(party: Party, one: Claimed) -> None:
    """A heartbeat of the lease that was given back: refused, but it locks the row."""
    (refused,) = await party.renew_many([one.handle])
    assert isinstance(refused, ExecutionNotActive)


async def _deadline(party: Party, one: Claimed) -> None:
    assert (await party.run_timers("deadline")).handled == 1


async def _due(party: Party, one: Claimed) -> None:
    assert (await party.run_timers("delay")).handled == 1


HOLDERS = {
    "a tag": (_tag, "waiting_children"),
    "a late heartbeat": (_late_renewal, "waiting_children"),
    "a cancel": (_stop, "cancelled"),
    "its deadline": (_deadline, "expired"),
    "its time": (_due, "waiting"),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_locked_parent_is_woken_by_a_timer(
    stage: Stage, parties: list[Party], holder: str, ending: str
) -> None:
    one, two, three = parties
    father = await parent(one, execution_deadline_at=timedelta(hours=1))
    son = await child(one)
    await park(one, father, son, until=await stage.clock.now() + timedelta(minutes=5))
    await stage.clock.advance(**({"hours": 2} if holder == "its deadline" else {"minutes": 6}))
    await two.begin()
    call, then = HOLDERS[holder]
    await call(two, father)
    # The end of the child waits for no lock.
    await asyncio.wait_for(three.complete(son.handle), PATIENCE)
    assert await state(stage, father) == "waiting_children"
    assert await late(stage) == 1
    assert (await one.run_timers("parked")).handled == 0, "still held"
    assert await late(stage) == 1
    await two.end(ending)
    await stage.audit()
    stands = then if ending == "commit" else "waiting_children"
    assert await state(stage, father) == stands
    assert (await one.run_timers("parked")).handled == int(stands == "waiting_children")
    assert await late(stage) == 0
    if stands in ("waiting_children", "waiting") and holder != "its deadline":  # a claim passes over what is overdue
        await goes_on(stage, one, father)
    elif stands == "waiting_children":
        assert await state(stage, father) == "waiting"
    await stage.audit()


@pytest.mark.parametrize("ending", ENDINGS)
async def test_cancelling_a_parent_while_its_child_ends(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    father, son = await parent(one), await child(one)
    await park(one, father, son)
    await two.begin()
    await two.complete(son.handle)
    task = await waiting(stage.watch, one, one.cancel(Operator(father.execution_id), "enough"), behind=two)
    await two.end(ending)
    await task
    assert await state(stage, father) == "cancelled"
    if ending == "rollback":
        await two.complete(son.handle)
    await stage.audit()


@pytest.mark.parametrize("first", ["parents", "children"])
async def test_ends_that_are_waited_for_and_wait_themselves_do_not_deadlock(
    stage: Stage, parties: list[Party], first: str
) -> None:
    one, two, three = parties
    fathers = [await parent(one), await parent(one)]
    sons = [await child(one), await child(one)]
    for father, son in zip(fathers, sons, strict=True):
        await park(one, father, son)
    await two.begin()
    await three.begin()
    for party, own in ((two, fathers[0]), (three, fathers[1])):
        await party.set_execution_tag(own.execution_id, "a.b", "c")
    theirs = {two: [fathers[0], sons[1]], three: [fathers[1], sons[0]]}
    # In the second round each meets a waiter row that the other is removing.
    for place in (0, 1) if first == "parents" else (1, 0):
        for party, targets in theirs.items():
            await asyncio.wait_for(party.cancel(Operator(targets[place].execution_id), "enough"), PATIENCE)
    await two.commit()
    await three.commit()
    await one.run_timers("parked")
    assert [await state(stage, each) for each in (*fathers, *sons)] == ["cancelled"] * 4
    assert await waits(stage) == 0
    await stage.audit()


async def test_a_parking_and_a_batch_over_the_same_rows_lock_in_one_order(stage: Stage, parties: list[Party]) -> None:
    one, two, holder = parties
    for call in (
        lambda p, handles: p.renew_many(handles),
        lambda p, handles: p.complete_many(handles),
        lambda p, handles: p.cancel_many([h.execution_id for h in handles], "enough"),
    ):
        for own in (0, 4):  # the parent is the first or the last of them in the order of locks
            await stage.empty()
            for _ in range(5):
                await submit(one, **PARENTS)
            claimed = await one.claim_many(**WORKER, **PARENTS, limit=5, lease_ttl=LONG)
            claimed.sort(key=lambda c: (c.handle.partition, c.handle.uuid))
            father = claimed[own]
            others = [c for c in claimed if c is not father]
            await holder.begin()
            await holder.set_execution_tag(claimed[2].execution_id, "a.b", "c")
            begun = await waiting(stage.watch, one, park(one, father, *others[::-1]), behind=holder)
            later = await waiting(stage.watch, two, call(two, [c.handle for c in claimed[::-1]]))
            await holder.commit()
            assert (await begun).parked
            assert len(await later) == 5
            await one.run_timers("parked")
            await stage.audit()


# ---- one by one


async def test_an_unknown_execution_counts_as_ended(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father = await parent(one)
    answer = await one.park(father.handle, ends_of=[id_in(3)])
    assert answer == Parked(father.execution_id, False, "ended")


@pytest.mark.both_servers
async def test_a_purged_execution_counts_as_ended(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father, son = await parent(one), await child(one)
    await one.complete(son.handle)
    await one.delete_execution(son.execution_id)
    assert (await park(one, father, son)).because == "ended"


async def test_one_of_many_is_enough(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father = await parent(one)
    sons = [await child(one) for _ in range(20)]
    await park(one, father, *sons)
    assert await waits(stage) == 20
    await one.complete(sons[7].handle)
    await goes_on(stage, one, father)
    await one.complete_many([son.handle for son in sons if son is not sons[7]])
    await stage.audit()


async def test_a_time_or_an_end_whichever_comes_first(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    for first in ("time", "end"):
        await stage.empty()
        father, son = await parent(one), await child(one)
        until = await stage.clock.now() + timedelta(seconds=10)
        assert (await park(one, father, son, until=until)).parked
        assert await one.promote_delayed(father.execution_id) == "not_yet_due"
        if first == "time":
            await stage.clock.advance(seconds=11)
            assert (await one.run_timers("delay")).handled == 1
        else:
            await one.complete(son.handle)
        await goes_on(stage, one, father)
        if first == "end":
            await stage.clock.advance(seconds=11)
            assert (await one.run_timers("delay")).handled == 0


async def test_a_time_that_is_due_keeps_the_lease(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father, son = await parent(one), await child(one)
    assert await park(one, father, son, until=await stage.clock.now()) == Parked(father.execution_id, False, "due")
    await one.complete(father.handle)


async def test_a_wait_that_ended_does_not_cut_a_later_one_short(stage: Stage, parties: list[Party]) -> None:
    """Woken by one of two, it fails and waits for its retry: the end of the other is none of its business any more."""
    one, *_ = parties
    policy = ExecutionPolicy(retry_policy=ff.RetryPolicy(backoff=ff.Fixed(timedelta(hours=1))))
    father = await parent(one, policy=policy)
    sons = [await child(one), await child(one)]
    await park(one, father, *sons)
    await one.complete(sons[0].handle)
    again = await claim_one(one, **PARENTS)
    await one.fail(again.handle, "boom")
    await one.complete(sons[1].handle)
    assert await state(stage, father) == "delayed"
    assert await one.promote_delayed(father.execution_id) == "not_yet_due"
    # The same for a delay of its own choosing.
    await stage.clock.advance(hours=2)
    await one.promote_delayed(father.execution_id)
    again = await claim_one(one, **PARENTS)
    third = await child(one)
    await park(one, again, third, until=await stage.clock.now() + timedelta(seconds=1))
    await stage.clock.advance(seconds=2)
    await one.promote_delayed(father.execution_id)
    again = await claim_one(one, **PARENTS)
    await one.delay(again.handle, timedelta(hours=1))
    await one.complete(third.handle)
    assert await state(stage, father) == "delayed"
    await stage.audit()


async def test_parking_again_waits_for_the_new_ones_only(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father = await parent(one)
    sons = [await child(one) for _ in range(3)]
    await park(one, father, sons[0], sons[1])
    await one.complete(sons[0].handle)
    again = await claim_one(one, **PARENTS)
    await one.park(again.handle, ends_of=[sons[2].execution_id])
    await one.complete(sons[1].handle)
    assert (await state(stage, father), await waits(stage)) == ("waiting_children", 1)
    await one.complete(sons[2].handle)
    await goes_on(stage, one, father)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_parked_parent_may_end_itself(stage: Stage, parties: list[Party], how: str) -> None:
    one, *_ = parties
    father = await parent(one, execution_deadline_at=timedelta(minutes=1))
    son = await child(one)
    await park(one, father, son)
    if how == "cancel":
        await one.cancel(Operator(father.execution_id), "enough")
    else:
        await stage.clock.advance(minutes=2)
        assert (await one.run_timers("deadline")).handled == 1
    assert await waits(stage) == 0
    await stage.audit()
    await one.complete(son.handle)
    assert await state(stage, father) == ("cancelled" if how == "cancel" else "expired")
    await stage.audit()


async def test_a_child_that_is_replayed_can_be_waited_for_again(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father, son = await parent(one), await child(one)
    await park(one, father, son)
    await one.complete(son.handle)
    await one.replay_execution(son.execution_id)
    again = await claim_one(one, **PARENTS)
    assert (await park(one, again, son)).parked, "it has not ended, for now"
    second = await claim_one(one, **CHILDREN)
    await one.complete(second.handle)
    await goes_on(stage, one, father)


async def test_a_chain_of_parents_is_woken_link_by_link(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    chain = [await parent(one) for _ in range(5)]
    for waiter, awaited in itertools.pairwise(chain):
        await park(one, waiter, awaited)
    await one.complete(chain[-1].handle)
    for link in reversed(chain[:-1]):
        woken = await claim_one(one, **PARENTS)
        assert woken.execution_id == link.execution_id
        await one.complete(woken.handle)
    await stage.audit()


async def test_parking_twice_with_one_lease_is_refused_and_changes_nothing(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father = await parent(one)
    sons = [await child(one), await child(one)]
    await park(one, father, sons[0])
    with pytest.raises(ExecutionNotActive):
        await park(one, father, sons[1])
    with pytest.raises(ExecutionNotActive):
        await park(one, father, until=await stage.clock.now())
    assert await waits(stage) == 1
    await one.complete(sons[1].handle)
    assert await state(stage, father) == "waiting_children"
    await one.complete(sons[0].handle)
    await goes_on(stage, one, father)


async def test_a_thousand_that_wait_for_one(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    son = await child(one)
    await one.create_many([NewExecution(execution_kind="test", lane_id="parents") for _ in range(1000)])
    fathers = await one.claim_many(**WORKER, **PARENTS, limit=1000, lease_ttl=LONG)
    for father in fathers:
        assert (await park(one, father, son)).parked
    assert await waits(stage) == 1000
    await one.complete(son.handle)
    assert await waits(stage) == 0
    woken = await one.claim_many(**WORKER, **PARENTS, limit=1000)
    assert {c.execution_id for c in woken} == {c.execution_id for c in fathers}
    await stage.audit()


async def test_the_attempt_timeout_stands_still_while_parked(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    policy = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=60)))
    father, son = await parent(one, policy=policy), await child(one)
    await stage.clock.advance(seconds=20)
    await park(one, father, son)
    await stage.clock.advance(hours=5)
    assert (await one.run_timers("attempt")).handled == 0
    await one.complete(son.handle)
    again = await claim_one(one, **PARENTS)
    assert again.attempt_timeout_at is not None
    left = again.attempt_timeout_at - await stage.clock.now()
    assert timedelta(seconds=30) < left <= timedelta(seconds=40)


async def test_an_execution_parked_for_another_is_listed_and_counted_as_waiting_for_children(
    stage: Stage, parties: list[Party]
) -> None:
    one, *_ = parties
    father, son = await parent(one), await child(one)
    await park(one, father, son)
    for filters in ({}, {"lane_ids": ["parents"]}, {"kinds": ["test"]}):
        found = await one.find_executions(states=["waiting_children"], **filters)  # type: ignore[arg-type]
        assert [item.execution_id for item in found.items] == [father.execution_id], filters
    stats = {each.lane_id: each for each in await one.lane_stats()}
    assert (stats["parents"].waiting_children, stats["children"].waiting_children) == (1, 0)
    assert stats["parents"].delayed == 0


async def test_a_claim_that_came_while_the_child_was_locked_is_notified_again(
    stage: Stage, parties: list[Party]
) -> None:
    """Parking locks the child for a moment; a worker that looks just then must not sleep on it."""
    one, two, _ = parties
    father = await parent(one)
    waiting_child = await submit(one, **CHILDREN)
    heard: asyncio.Queue[str] = asyncio.Queue()
    ear = await asyncpg.connect(stage.dsn)
    await ear.add_listener(f"flowfabric_{two._instance}", lambda *message: heard.put_nowait(message[-1]))
    await two.sleep_for_work([CHILDREN["lane_id"]], timedelta(seconds=60))
    await one.begin()
    await one.park(father.handle, ends_of=[waiting_child])
    assert await two.claim(**WORKER, **CHILDREN) is None
    await one.commit()
    assert await asyncio.wait_for(heard.get(), PATIENCE) == "work"
    assert (await claim_one(two, **CHILDREN)).execution_id == waiting_child
    await ear.close()


async def test_the_audit_sees_who_would_sleep_for_ever(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    father, son = await parent(one), await child(one)
    await park(one, father, son)
    rows = await stage.watch.fetch("delete from flowfabric.waiter returning *")
    assert [v.rule for v in await one.audit()] == ["waits_for_nothing"]
    await one.complete(son.handle)
    await stage.watch.executemany("insert into flowfabric.waiter values ($1, $2, $3, $4)", [tuple(r) for r in rows])
    assert sorted(v.rule for v in await one.audit()) == ["waiter_missed", "waits_for_nothing"]
    await stage.watch.execute(
        "insert into flowfabric.timer values ('parked', now(), array[$1::int], array[$2::uuid])",
        home(father.execution_id),
        father.execution_id,
    )
    await stage.audit()
    assert (await one.run_timers("parked")).handled == 1
    await goes_on(stage, one, father)


# ---- watching


async def listen(stage: Stage, parties: list[Party]) -> tuple[asyncpg.Connection[Any], list[str]]:
    """What is said to all, and what is said to each party, with its name."""
    heard: list[str] = []
    ear = await asyncpg.connect(stage.dsn)
    await ear.add_listener("flowfabric", lambda *message: heard.append(message[-1]))
    for party in parties:
        name = party._instance
        await ear.add_listener(f"flowfabric_{name}", lambda *message, name=name: heard.append(f"{message[-1]} {name}"))
    return ear, heard


async def hears(stage: Stage, heard: list[str], *expected: str) -> None:
    """Everything that was notified before now, which a last word of our own proves."""
    await stage.watch.execute("select pg_notify('flowfabric', 'the end')")
    async with asyncio.timeout(PATIENCE):
        while "the end" not in heard:
            await asyncio.sleep(0.001)
    assert sorted(word for word in heard if word.startswith("ended ")) == sorted(expected)
    heard.clear()


@EVERY_END
async def test_the_end_of_a_watched_execution_notifies_each_process_once(
    stage: Stage, parties: list[Party], end: End
) -> None:
    one, two, _ = parties
    _, son = await family(stage, one, end)
    ear, heard = await listen(stage, parties)
    for party in (one, two, two):
        await party.watch([son.execution_id], timedelta(seconds=60))
    await end.call(one, son)
    await hears(stage, heard, f"ended {one._instance}", f"ended {two._instance}")
    assert await stage.watch.fetchval("select count(*) from flowfabric.watch") == 0
    await ear.close()


async def test_a_batch_of_ends_is_one_notification(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    sons = [await child(one) for _ in range(10)]
    ear, heard = await listen(stage, parties)
    await one.watch([son.execution_id for son in sons], timedelta(seconds=60))
    await one.complete_many([son.handle for son in sons[:8]])
    await hears(stage, heard, f"ended {one._instance}")
    await one.unwatch([sons[8].execution_id])
    await one.complete(sons[8].handle)
    await hears(stage, heard)
    await stage.watch.execute("update flowfabric.watch set until = clock_timestamp()")
    await one.complete(sons[9].handle)
    await hears(stage, heard)
    assert await stage.watch.fetchval("select count(*) from flowfabric.watch") == 0
    await ear.close()


@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_end_does_not_wait_for_a_watcher_nor_a_watcher_forever(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, three = parties
    sons = sorted([await child(one) for _ in range(2)], key=lambda c: (c.handle.partition, c.handle.uuid))
    ids = [son.execution_id for son in sons]
    await two.watch(ids, timedelta(seconds=60))
    ear, heard = await listen(stage, parties)
    # The watcher renews its rows while one of the two has just ended and the other does.
    await one.begin()
    await one.complete(sons[1].handle)
    task = await waiting(stage.watch, two, two.watch(ids, timedelta(seconds=90)), behind=one)
    await asyncio.wait_for(three.complete(sons[0].handle), PATIENCE)
    await one.end(ending)
    await task
    told = [f"ended {two._instance}"] * (2 if ending == "commit" else 1)
    await hears(stage, heard, *told)
    await ear.close()
    await stage.audit()


async def test_expired_watches_are_swept(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    son = await child(one)
    await one.watch([son.execution_id], timedelta(seconds=60))
    await one.sweep()
    assert await stage.watch.fetchval("select count(*) from flowfabric.watch") == 1
    await stage.watch.execute("update flowfabric.watch set until = clock_timestamp() - interval '2 minutes'")
    assert (await one.sweep()).total >= 1
    assert await stage.watch.fetchval("select count(*) from flowfabric.watch") == 0


async def test_outcomes_cover_only_ended_executions(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    sons = [await child(one) for _ in range(4)]
    nobody = id_in(3)
    await one.complete(sons[0].handle, b"1", result_encoding="e")
    await one.fail(sons[1].handle, "boom", category="ValueError")
    await one.cancel(sons[2].handle, "enough")
    ids = [son.execution_id for son in sons]
    found = await one.read_outcomes([ids[3], nobody, ids[2], ids[1], ids[0], ids[0]])
    assert {execution_id: (o.state, o.result, o.failure_reason) for execution_id, o in found.items()} == {
        ids[0]: (ff.State.COMPLETED, b"1", None),
        ids[1]: (ff.State.FAILED, None, "boom"),
        ids[2]: (ff.State.CANCELLED, None, None),
        nobody: (None, None, None),
    }
    assert (found[ids[0]].result_encoding, found[ids[1]].failure_category) == ("e", "ValueError")
    assert found[ids[2]].cancellation_reason == "enough"


# ---- plans


async def pages(sql: asyncpg.Connection[Any], statement: str, *args: Any) -> int:
    """How many pages a statement looks at, with everything the functions in it do; what it does is undone."""
    transaction = sql.transaction()
    await transaction.start()
    try:
        (plan,) = json.loads(await sql.fetchval(f"explain (analyze, buffers, format json) {statement}", *args))
    finally:
        await transaction.rollback()
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


_MANY = """
insert into flowfabric.waiter
select i % 256, gen_random_uuid(), i % 256, gen_random_uuid() from generate_series(1, 20000) i;
insert into flowfabric.watch
select i % 256, gen_random_uuid(), 'ended', gen_random_uuid(), clock_timestamp() + interval '1 hour'
from generate_series(1, 20000) i;
"""


@pytest.mark.both_servers
@pytest.mark.parametrize("crowd", ["alive", "dead"])
async def test_an_end_costs_the_same_however_many_wait_for_others(
    stage: Stage, parties: list[Party], crowd: str
) -> None:
    """Also when an old snapshot keeps the rows of waits long over from being cleaned up."""
    one, *_ = parties
    son = await child(one)
    complete = (
        "select * from flowfabric.complete(array[$1::int], array[$2::uuid], array[$3::uuid], array[$4::bigint],"
        " array[$5::uuid], array[0], null, null)"
    )
    handle = son.handle
    args = (handle.partition, handle.uuid, handle.lease_id, handle.lease_epoch, handle.attempt_id)
    alone = [await pages(stage.watch, complete, *args) for _ in range(2)][-1]
    old = await asyncpg.connect(stage.dsn)
    await old.execute("begin isolation level repeatable read")
    await old.fetchval("select count(*) from flowfabric.lane")
    await stage.watch.execute(_MANY)
    if crowd == "dead":
        await stage.watch.execute("delete from flowfabric.waiter; delete from flowfabric.watch")
    crowded = [await pages(stage.watch, complete, *args) for _ in range(2)][-1]
    await old.close()
    await stage.watch.execute("truncate flowfabric.waiter, flowfabric.watch")
    assert crowded <= alone + 20, (alone, crowded)


# ---- all at once


@pytest.mark.both_servers
@pytest.mark.parametrize("seed", sampling.seeds(*range(3)))
async def test_no_wake_up_is_lost_among_many(stage: Stage, parties: list[Party], seed: int) -> None:
    """Parents park for children that end in every way, while others tag, cancel, renew and run the duties."""
    chance = random.Random(seed)
    await stage.empty()
    crew = [await Party.join(stage.dsn) for _ in range(6)]
    one = parties[0]
    fathers, sons = 24, 60
    await one.create_many([NewExecution(execution_kind="test", lane_id="parents") for _ in range(fathers)])
    await one.create_many([NewExecution(execution_kind="test", lane_id="children") for _ in range(sons)])
    held = await one.claim_many(**WORKER, **PARENTS, limit=1000, lease_ttl=LONG)
    born = await one.claim_many(**WORKER, **CHILDREN, limit=1000, lease_ttl=LONG)
    alive = {c.execution_id: c for c in born}
    ended: set[ff.ExecutionId] = set()
    finished: set[ff.ExecutionId] = set()
    needs = {c.execution_id: set(chance.sample(sorted(alive), 4)) for c in held}
    queue = list(held)

    async def be_a_parent(party: Party) -> None:
        """Park until all that is needed has ended, as a handler would that is run again from the top."""
        while len(finished) < fathers:
            if queue:
                mine = queue.pop()
            else:
                claimed = await party.claim(**WORKER, **PARENTS, lease_ttl=LONG)
                if claimed is None:
                    await asyncio.sleep(0)
                    continue
                mine = claimed
            while True:
                known = await party.read_outcomes(sorted(needs[mine.execution_id]))
                left = needs[mine.execution_id] - known.keys()
                if not left:
                    await party.complete(mine.handle)
                    finished.add(mine.execution_id)
                    break
                if (await party.park(mine.handle, ends_of=sorted(left))).parked:
                    break

    async def be_a_child(party: Party) -> None:
        while alive:
            batch = [alive.pop(one) for one in chance.sample(sorted(alive), min(len(alive), chance.randint(1, 3)))]
            match chance.randrange(4):
                case 0:
                    await party.complete_many([c.handle for c in batch])
                case 1:
                    await party.fail_many([Failure(authority=c.handle, reason="boom") for c in batch])
                case 2:
                    await party.cancel_many([c.execution_id for c in batch], "enough")
                case _:
                    # Undone and done again: what was woken by it must not have continued.
                    await party.begin()
                    await party.complete_many([c.handle for c in batch])
                    await party.rollback()
                    await party.complete_many([c.handle for c in batch])
            ended.update(c.execution_id for c in batch)

    async def be_in_the_way(party: Party) -> None:
        """Hold rows of parents while children end; run the duty that makes up for it."""
        while len(finished) < fathers:
            target = chance.choice(held).execution_id
            await party.begin()
            await party.set_execution_tag(target, "a.b", str(chance.random()))
            await asyncio.sleep(0.001)
            await party.end(chance.choice(ENDINGS))
            await party.run_timers("parked")

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            be_a_parent(crew[0]), be_a_parent(crew[1]), be_a_child(crew[2]), be_a_child(crew[3]),
            be_in_the_way(crew[4]), be_in_the_way(crew[5]),
        )  # fmt: skip
    assert len(ended) == sons and len(finished) == fathers
    assert await waits(stage) == 0
    await stage.audit()
    for party in crew:
        party.connection.terminate()
