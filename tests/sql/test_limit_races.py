"""Claims, openings and releases of limits at the same time: no limit is passed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.quota import Admitted, RateExceeded
from tests.interleave import PATIENCE, Stage, waiting
from tests.sql.test_budgets import admin, make
from tests.sql.test_quotas import claim, many, occupancy, quota, state, unblock, under
from tests.sql.test_scheduler import consumed
from tests.support import WORKER, CheckedEngine, Clock, submit

interleaved = pytest.mark.asyncio(loop_scope="session")


@interleaved
async def test_an_exhausted_budget_that_is_locked_admits_nothing(stage: Stage) -> None:
    """The claim moved rows of one budget aside and does not wait for the second, which a report has locked."""
    await stage.empty()
    one, two = await stage.company(2)
    first, second = await make(one, {"t": 1}, name="a"), await make(one, {"t": 1}, name="b")
    for budget in (first, second):
        await admin(one, budget, t=1)
    await many(one, 40, policy=ExecutionPolicy(budget_ids=(first,)))  # more than a claim of one reads at once
    held = [await submit(one, policy=ExecutionPolicy(budget_ids=(second,))) for _ in range(3)]
    await two.begin()
    await admin(two, second, t=1)
    assert await one.claim(**WORKER) is None
    await two.commit()
    assert await one.claim(**WORKER) is None
    assert {(await state(one, each))[0] for each in held} == {ff.State.RATE_LIMITED}
    await stage.audit()


@interleaved
async def test_a_grant_that_expires_while_its_consumer_waits_keeps_no_slot(stage: Stage) -> None:
    """Another claim took the slot: consuming the grant all the same would pass the cap."""
    await stage.empty()
    one, two, lock = await stage.company(3)
    policy = await quota(one, max_concurrent=1)
    first, second = await many(one, 2, policy)
    grant = await one.claim_for_worker(**WORKER)
    await lock.begin()
    await lock.connection.execute("select from flowfabric.quota_head for update")
    other = await waiting(stage.watch, two, claim(two, limit=1), behind=lock)
    late = await waiting(stage.watch, one, consumed(one, grant))
    await stage.clock.advance(seconds=6)
    await lock.rollback()
    assert [each.execution_id for each in await asyncio.wait_for(other, PATIENCE)] == [second]
    refused = await asyncio.wait_for(late, PATIENCE)
    assert isinstance(refused, FlowFabricError)
    assert refused.kind == "claim_grant_expired"
    assert await occupancy(one, policy) == (1, 0)
    assert (await state(one, first))[0] == ff.State.WAITING
    await stage.audit()


@interleaved
@pytest.mark.parametrize("kind", ["quota", "budget"])
async def test_a_grant_is_valid_for_its_whole_time_however_long_the_call_waited(stage: Stage, kind: str) -> None:
    """The time begins when the call has its locks: otherwise it returns grants that have expired."""
    await stage.empty()
    one, lock = await stage.company(2)
    if kind == "quota":
        await many(one, 2, await quota(one, max_concurrent=2))
        await claim(one, limit=1)
    else:
        budget = await make(one, {"t": 1})
        await admin(one, budget, t=1)
        await many(one, 40, policy=ExecutionPolicy(budget_ids=(budget,)))  # more than a claim of one reads at once
        await submit(one)
    await lock.begin()
    await lock.connection.execute("select from flowfabric.quota_head for update")
    await lock.connection.execute("select from flowfabric.budget for update")
    late = await waiting(stage.watch, one, one.claim_for_worker(**WORKER), behind=lock)
    await stage.clock.advance(seconds=6)
    await lock.rollback()
    grant = await asyncio.wait_for(late, PATIENCE)
    assert isinstance(await consumed(one, grant), Claimed)
    await stage.audit()


@interleaved
async def test_a_claim_that_took_executions_waits_for_no_budget(stage: Stage) -> None:
    await stage.empty()
    one, lock = await stage.company(2)
    budget = await make(one, {"t": 1})
    await admin(one, budget, t=1)
    denied = await submit(one, policy=ExecutionPolicy(budget_ids=(budget,)))
    free = await submit(one, policy=ExecutionPolicy(budget_ids=(await make(one, {"t": 1}),)))
    await lock.begin()
    await lock.connection.execute("select from flowfabric.budget for update")
    assert [each.execution_id for each in await asyncio.wait_for(claim(one, limit=2), PATIENCE)] == [free]
    await lock.rollback()
    assert await claim(one) == []
    assert (await state(one, denied))[0] == ff.State.RATE_LIMITED
    await stage.audit()


@interleaved
async def test_a_claim_that_comes_near_a_cap_while_it_waits_takes_what_there_is(stage: Stage) -> None:
    """It wanted to share the policy with other claims, far from the cap; a batch took slots before it had the lock."""
    await stage.empty()
    one, two = await stage.company(2)
    far = int(await stage.watch.fetchval("select current_setting('max_connections')"))
    policy = await quota(one, max_concurrent=far + 5)
    made = await many(one, 12, policy)
    await one.begin()
    assert [each.execution_id for each in await claim(one, limit=10)] == made[:10]
    late = await waiting(stage.watch, two, claim(two, limit=1), behind=one)
    await one.commit()
    assert [each.execution_id for each in await asyncio.wait_for(late, PATIENCE)] == made[10:11]
    assert await occupancy(one, policy) == (11, 0)
    await stage.audit()


@interleaved
async def test_a_budget_that_was_found_exhausted_stays_so_when_the_claim_meets_others(stage: Stage) -> None:
    """More rows than a claim moves aside at once, and behind them a second budget, which is open."""
    await stage.empty()
    (one,) = await stage.company(1)
    shut, open_ = await make(one, {"t": 1}, name="shut"), await make(one, {"t": 1}, name="open")
    await admin(one, shut, t=1)
    for _ in range(5):
        await many(one, 221, policy=ExecutionPolicy(budget_ids=(shut,)), priority=2)
    free = await many(one, 300, policy=ExecutionPolicy(budget_ids=(open_,)), priority=1)
    found = await claim(one, limit=300)
    assert {each.execution_id for each in found} <= set(free)
    await stage.audit()


@interleaved
async def test_a_budget_that_opened_while_a_claim_waited_for_it_is_not_passed_over(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 1})
    await admin(one, budget, t=1)
    first = await submit(one, policy=ExecutionPolicy(budget_ids=(budget,)))
    await one.begin()
    await one.reset_budget(budget)
    task = await waiting(stage.watch, two, two.claim(**WORKER), behind=one)
    await one.commit()
    claimed = await asyncio.wait_for(task, PATIENCE)
    assert claimed is not None
    assert claimed.execution_id == first
    await stage.audit()


@interleaved
async def test_claims_that_meet_new_keys_do_not_lock_each_other_out(stage: Stage) -> None:
    await stage.empty()
    parties = await stage.company(8)
    chance = random.Random(1)
    policies = [await quota(parties[0], f"q{n}", key="tenant", max_concurrent=50) for n in range(8)]
    for turn in range(12):
        items = [
            NewExecution(
                execution_kind="k",
                policy=under(*chance.sample(policies, 4)),
                tags={"tenant": f"{turn} {chance.randrange(6)}"},
                priority=chance.randrange(9),
            )
            for _ in range(60)
        ]
        await parties[0].create_many(items)
        found = await asyncio.gather(*(claim(party, limit=8) for party in parties))
        await asyncio.gather(
            *(
                party.complete_many([one.handle for one in mine])
                for party, mine in zip(parties, found, strict=True)
                if mine
            )
        )
    await stage.audit()


@interleaved
async def test_an_execution_that_is_created_beside_the_claim_is_moved_aside_after_its_creation(stage: Stage) -> None:
    """The claim read the time before, and stops while it records the slot of the first."""
    await stage.empty()
    one, two, lock = await stage.company(3)
    policy = await quota(one, max_concurrent=1)
    (first,) = await many(one, 1, policy)
    await stage.watch.execute("""
        create function public.stop() returns trigger language plpgsql as $$
        begin perform pg_advisory_xact_lock(1); return new; end $$;
        create trigger stop before insert on flowfabric.quota_slot for each row execute function public.stop()""")
    try:
        await lock.begin()
        await lock.connection.execute("select pg_advisory_xact_lock(1)")
        task = await waiting(stage.watch, one, claim(one), behind=lock)
        (second,) = await many(two, 1, policy)
        await lock.commit()
        assert [each.execution_id for each in await asyncio.wait_for(task, PATIENCE)] == [first]
    finally:
        await stage.watch.execute("drop trigger stop on flowfabric.quota_slot; drop function public.stop")
    assert (await state(two, second))[0] == ff.State.RATE_LIMITED
    await stage.audit()


async def test_an_empty_value_of_a_key_is_a_value(engine: CheckedEngine) -> None:
    policy = await quota(engine, key="tenant", max_concurrent=1)
    first, second = await many(engine, 2, policy, tags={"tenant": ""})
    (held,) = await claim(engine)
    assert held.execution_id == first
    assert (await state(engine, second))[:2] == (ff.State.RATE_LIMITED, "waiting_for_quota")
    assert await unblock(engine) == 0
    await engine.complete(held.handle)
    assert [one.execution_id for one in await claim(engine)] == [second]


async def test_a_caller_with_a_shorter_window_does_not_empty_that_of_the_policy(
    engine: CheckedEngine, clock: Clock
) -> None:
    policy = await quota(engine, max_requests_per_window=2, window=timedelta(seconds=60))
    await many(engine, 3, policy)
    assert len(await claim(engine, limit=2)) == 2
    await clock.advance(seconds=10)
    outside = await submit(engine, lane_id="outside")
    limits: dict[str, Any] = {"rate_limit": 1, "concurrency_cap": 0, "window": timedelta(seconds=1)}
    assert isinstance(await engine.check_admission(policy, outside, **limits), Admitted)
    assert await claim(engine) == [], "the entries of the first are still inside the window of the policy"


async def test_a_shorter_window_takes_nothing_from_a_longer_one_of_any_caller(
    engine: CheckedEngine, clock: Clock
) -> None:
    """The longer one is a caller's beside the policy's, then the policy's beside a caller's; the reconciler passes."""
    hour, minute = timedelta(hours=1), timedelta(minutes=1)
    policy = await quota(engine, "short", max_requests_per_window=9, window=minute)
    asked: dict[str, Any] = {"rate_limit": 3, "window": hour}
    assert await engine.check_admission(policy, engine.mint_id(), **asked) == Admitted()
    await clock.advance(minutes=20)
    await many(engine, 1, policy)
    assert len(await claim(engine)) == 1, "an admission of the policy counts for the caller too"
    await clock.advance(minutes=20)
    assert (await engine.reconcile_quotas()).entries == 0
    for _ in range(2):  # a third caller, with a window between them
        assert isinstance(
            await engine.check_admission(policy, engine.mint_id(), rate_limit=9, window=30 * minute), Admitted
        )
    assert isinstance(await engine.check_admission(policy, engine.mint_id(), **asked), RateExceeded)
    await clock.advance(minutes=21)
    assert (await engine.reconcile_quotas()).entries == 1, "the first has left the longest window"
    assert isinstance(await engine.check_admission(policy, engine.mint_id(), **asked), RateExceeded)

    policy = await quota(engine, "long", max_requests_per_window=1, window=hour)
    _, second = await many(engine, 2, policy)
    assert len(await claim(engine)) == 1
    await clock.advance(minutes=20)
    shorter: dict[str, Any] = {"rate_limit": 1, "window": 30 * minute}
    assert isinstance(await engine.check_admission(policy, engine.mint_id(), **shorter), RateExceeded)
    await clock.advance(minutes=20)
    await engine.reconcile_quotas()
    await unblock(engine)
    assert await claim(engine) == []
    assert (await state(engine, second))[0] == ff.State.RATE_LIMITED


async def test_callers_see_all_of_their_window_whatever_others_ask_for(plain_engine: ff.Engine, clock: Clock) -> None:
    """One asks for an hour, and gives up, one for half an hour, both rarely, and one for a minute all the time."""
    minute = timedelta(minutes=1)
    policy = await quota(plain_engine, max_requests_per_window=1000, window=minute)

    async def ask(minutes: int, rate: int) -> bool:
        answer = await plain_engine.check_admission(
            policy, plain_engine.mint_id(), rate_limit=rate, window=minutes * minute
        )
        return isinstance(answer, Admitted)

    admitted: list[int] = []
    seen: list[str] = []
    for at in range(0, 1440, 5):
        for length, pause, until in ((60, 175, 720), (30, 85, 1440)):
            if at % pause == 0 and at < until:
                rate = sum(at - length < one for one in admitted)
                if await ask(length, rate or 1) and at > 0:
                    seen.append(f"the caller of {length} minutes sees less at {at}")
        assert await ask(1, 1000)
        admitted.append(at)
        await plain_engine.reconcile_quotas()
        await clock.advance(minutes=5)
    assert seen == []


async def test_a_window_that_no_caller_asks_for_any_more_is_forgotten(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    minute = timedelta(minutes=1)
    policy = await quota(engine, max_requests_per_window=1000, window=minute)

    async def ask(minutes: int) -> None:
        assert await engine.check_admission(policy, engine.mint_id(), window=minutes * minute) == Admitted()

    async def left() -> int:
        await engine.reconcile_quotas()
        return int(await sql.fetchval("select count(*) from flowfabric.quota_entry"))

    await ask(60)
    await clock.advance(minutes=59)
    await many(engine, 1, policy)
    await claim(engine)
    assert await left() == 2
    await clock.advance(minutes=182)  # four times as long as the window
    await many(engine, 1, policy)
    await claim(engine)
    await clock.advance(minutes=2)
    assert await left() == 0, "the minute of the policy is left"

    await ask(60)
    await engine.check_admission(policy, engine.mint_id(), dimension="other", window=60 * minute)
    await clock.advance(minutes=100)
    await ask(30)
    assert await left() == 1
    await clock.advance(minutes=59)
    assert await left() == 1, "an hour is not forgotten because others ask for less"
    await clock.advance(minutes=62)
    await ask(30)
    await clock.advance(minutes=20)
    assert await left() == 1
    await clock.advance(minutes=11)
    assert await left() == 0, "by now it is: half an hour is left"


async def test_a_dead_slot_of_another_key_does_not_hide_a_claim_from_the_cap(
    engine: CheckedEngine, clock: Clock
) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    for one in (first, second):
        await engine.check_admission(
            policy, one, dimension="other", window=timedelta(seconds=1), rate_limit=0, concurrency_cap=5
        )
    await clock.advance(seconds=2)
    assert [one.execution_id for one in await claim(engine)] == [first]
    assert await occupancy(engine, policy) == (1, 1)


async def test_a_long_value_of_a_key_is_a_value(engine: CheckedEngine) -> None:
    policy = await quota(engine, key="tenant", max_concurrent=1, max_requests_per_window=10)
    values = ["".join(chr(0x4E00 + (n * 7919 * k) % 20000) for n in range(4000)) for k in (1, 2)]
    first, second = [await many(engine, 2, policy, tags={"tenant": value}) for value in values]
    assert [one.execution_id for one in await claim(engine)] == [first[0], second[0]]
    assert (await state(engine, first[1]))[:2] == (ff.State.RATE_LIMITED, "waiting_for_quota")
