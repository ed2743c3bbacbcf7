"""Claims under budgets: exhausted ones hold executions back, and let them continue when they have room again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import Unblock
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import Reserved
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import BudgetId
from flowfabric.values.policies import ExecutionPolicy
from tests.each import Rows, each
from tests.interleave import PATIENCE, Party, Stage, waiting
from tests.support import WORKER, Clock

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.both_servers]


async def budget(engine: ff.Engine, name: str = "b", hard: int = 10, used: int = 0) -> BudgetId:
    made = (await engine.create_budget(name=name, dimensions=["tokens"], hard_limits=[hard], soft_limits=[0])).budget_id
    if used:
        await engine.report_usage_admin(made, dimensions=["tokens"], deltas=[used])
    return made


async def many(engine: ff.Engine, number: int, *budgets: BudgetId, **fields: Any) -> list[ff.ExecutionId]:
    items = [NewExecution(execution_kind="k", policy=ExecutionPolicy(budget_ids=budgets), **fields)] * number
    return [made.execution_id for made in await engine.create_many(items)]


async def claim(engine: ff.Engine, limit: int = 100) -> list[Claimed]:
    return await engine.claim_many(**WORKER, limit=limit)


async def states(engine: ff.Engine, ids: list[ff.ExecutionId]) -> set[tuple[str, str | None, str | None]]:
    records = [await engine.read_execution(one) for one in ids]
    return {(one.public_state, one.stored_blocking_reason, one.blocking_detail) for one in records if one}


async def test_a9_a10_exhausted_work_does_not_hide_what_is_behind_it_and_a_reset_lets_it_continue(
    stage: Stage, parties: list[Party]
) -> None:
    one, *_ = parties
    shared = await budget(one, used=10)
    five = await many(one, 5, shared)
    (sixth,) = await many(one, 1)
    assert [each.execution_id for each in await claim(one, 1)] == [sixth]
    await stage.audit()
    assert await claim(one) == []
    detail = f"budget {shared}: tokens 10/10"
    assert await states(one, five) == {(ff.State.RATE_LIMITED, "waiting_for_budget", detail)}
    await one.reset_budget(shared)
    await stage.audit()
    assert [each.execution_id for each in await claim(one)] == five
    await stage.audit()


async def test_a_budget_just_below_its_limit_admits(stage: Stage, parties: list[Party]) -> None:
    one, *_ = parties
    made = await many(one, 2, await budget(one, used=9))
    assert [each.execution_id for each in await claim(one)] == made
    await stage.audit()


async def test_a11_a_budget_that_cannot_be_read_stops_the_claim(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    made = await many(one, 1, await budget(one, used=10))
    await one.begin()
    await one.connection.execute("alter table flowfabric.budget_head rename to budget_head_elsewhere")
    with pytest.raises(asyncpg.PostgresError):
        await claim(one)
    await one.rollback()
    assert await states(two, made) == {(ff.State.WAITING, "waiting_for_worker", None)}
    assert await stage.watch.fetchval("select count(*) from flowfabric.quota_slot") == 0


REFUSING = """
create function public.refuse() returns trigger language plpgsql as $$ begin raise exception 'the disk is full'; end $$;
create trigger refuse before insert on flowfabric.{} for each row execute function public.refuse()"""
BROKEN = {
    "budgets": "alter table flowfabric.budget_head rename to elsewhere",
    "quota policies": "alter table flowfabric.quota_policy rename to elsewhere",
    "the clock": "alter table flowfabric.clock rename to elsewhere",
    "new slots": REFUSING.format("quota_slot"),
    "new entries of windows": REFUSING.format("quota_entry"),
}


@each("what", BROKEN)
@each("way", ["claim", "claim_for_worker"])
async def test_a_damaged_budget_that_stops_the_claim(stage: Stage, what: str, way: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    quota = (await one.create_quota_policy(name="q", max_requests_per_window=5, max_concurrent=5)).quota_policy_id
    policy = ExecutionPolicy(budget_ids=(await budget(one),), quota_policy_ids=(quota,))
    made = [(await one.create_many([NewExecution(execution_kind="k", policy=policy)]))[0].execution_id]
    await one.begin()
    await one.connection.execute(BROKEN[what])
    with pytest.raises(asyncpg.PostgresError):
        await (claim(one) if way == "claim" else one.claim_for_worker(**WORKER))
    await one.rollback()
    assert await states(two, made) == {(ff.State.WAITING, "waiting_for_worker", None)}
    for table in ("quota_slot", "quota_entry", "claim_grant"):
        assert await stage.watch.fetchval(f"select count(*) from flowfabric.{table}") == 0
    await stage.audit()


DAMAGES = {
    "no numbers": "delete from flowfabric.budget_head",
    "a negative limit": "update flowfabric.budget_head set hard = '{-1}'",
    "a limit too few": "update flowfabric.budget_head set hard = '{}'",
    "a limit too many": "update flowfabric.budget_head set hard = '{1,2}'",
    "a limit that is null": "update flowfabric.budget_head set hard = '{null}'",
    "a negative soft limit": "update flowfabric.budget_head set soft = '{-1}'",
    "a negative usage": "update flowfabric.budget_head set used = '{-1}'",
    "a usage too few": "update flowfabric.budget_head set used = '{}'",
    "a negative amount held": "update flowfabric.budget_head set held = '{-1}'",
}
CHECKS = "constraint budget_head_has_numbers, drop constraint budget_head_positive"


async def test_damaged_numbers_of_a_budget_admit_nothing_and_the_table_refuses_them(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    damaged, sound = await budget(engine, "damaged", used=1), await budget(engine, "sound", used=1)
    made = await many(engine, 1, damaged)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "claim": lambda: claim(engine),
        "claim_for_worker": lambda: engine.claim_for_worker(**WORKER),
        "report": lambda: engine.report_usage_admin(damaged, dimensions=["tokens"], deltas=[1]),
        "spend": lambda: engine.record_spend(damaged, made[0], {"tokens": 1}),
    }
    await sql.execute("create table public.saved as table flowfabric.budget_head")
    for damage in list(DAMAGES.values())[1:]:
        with pytest.raises(asyncpg.CheckViolationError):
            await sql.execute(damage)
    await sql.execute(f"alter table flowfabric.budget_head drop {CHECKS}")
    cases = Rows()
    for what, damage in DAMAGES.items():
        await sql.execute(f"{damage} where budget_id = $1", damaged)
        with cases.row(what):
            for name, call in calls.items():
                with pytest.raises(ff.FlowFabricError) as refused:
                    await call()
                assert (refused.value.kind, str(damaged) in str(refused.value)) == ("corruption", True), name
            assert await states(engine, made) == {(ff.State.WAITING, "waiting_for_worker", None)}
            assert (await engine.get_budget_status(damaged)).name == "damaged", "who repairs it reads it first"
            # Nothing of another budget is in the way.
            others = await many(engine, 1, sound, lane_id="other")
            assert [one.execution_id for one in await engine.claim_many("other", **WORKER, limit=9)] == others
            await engine.report_usage_admin(sound, dimensions=["tokens"], deltas=[1])
            assert {one.name for one in (await engine.list_budgets()).items} == {"damaged", "sound"}
            assert (await engine.reconcile_budget_counters()).wrong == 1
        await sql.execute("delete from flowfabric.budget_head; insert into flowfabric.budget_head table public.saved")
    await sql.execute("drop table public.saved")
    cases.tell()
    assert [one.execution_id for one in await claim(engine)] == made


async def test_a_damaged_budget_stops_no_other_work(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    """Not in its lane, however much waits under it, and not in others; a reset makes it sound again."""
    engine = plain_engine
    damaged, sound = await budget(engine, "damaged", used=1), await budget(engine, "sound", used=1)
    under = [one for _ in range(3) for one in await many(engine, 800, damaged, priority=5)]
    free = await many(engine, 1, priority=5)
    under += await many(engine, 40, damaged, priority=5)
    for _ in range(600):  # each with limits of its own, of which a claim reads a few
        under += await many(engine, 1, damaged, BudgetId(engine.mint_id()), priority=5)
    behind = [*free, *await many(engine, 3), *await many(engine, 2, sound)]
    other = await many(engine, 2, lane_id="other")
    await sql.execute("delete from flowfabric.budget_head where budget_id = $1", damaged)
    assert [one.execution_id for one in await claim(engine, 1)] == behind[:1]
    assert [one.execution_id for one in await claim(engine)] == behind[1:]
    lanes = {"default": 5, "other": 5}
    assert [one.execution_id for one in await engine.claim_lanes(lanes, **WORKER, limit=10)] == other
    for call in (claim(engine), engine.claim_lanes(lanes, **WORKER, limit=10), engine.claim_for_worker(**WORKER)):
        with pytest.raises(ff.FlowFabricError) as refused:
            await call
        assert (refused.value.kind, str(damaged) in str(refused.value)) == ("corruption", True)
    assert await states(engine, under[:3]) == {(ff.State.WAITING, "waiting_for_worker", None)}
    with pytest.raises(ff.FlowFabricError, match="reset_budget repairs it"):
        await engine.update_budget(damaged, hard={"tokens": 20})
    await engine.reset_budget(damaged)
    assert (await engine.get_budget_status(damaged)).hard_limits == {"tokens": 10}
    assert [one.execution_id for one in await claim(engine, 3)] == under[:3]
    assert await Unblock(engine).run_once() == 0


async def test_the_reset_of_a_damaged_budget_keeps_what_is_held(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    damaged = await budget(engine, "damaged", used=1)
    running = []
    await many(engine, 2, damaged)
    for one in await claim(engine):
        assert isinstance(await engine.reserve_usage(one.handle, {"tokens": 2, "other": 1}), Reserved)
        running.append(one)
    (waiting,) = await many(engine, 1, damaged)
    await engine.report_usage_admin(damaged, dimensions=["tokens"], deltas=[99])
    await sql.execute("alter table flowfabric.budget_head drop " + CHECKS)
    await sql.execute("update flowfabric.budget_head set used = '{}'")
    await engine.reset_budget(damaged)
    found = await engine.get_budget_status(damaged)
    assert (found.usage.get("tokens", 0), found.held, found.generation) == (0, {"tokens": 4, "other": 2}, 1)
    assert found.breach_count == 1, "counters of breaches never decrease"
    assert [one.execution_id for one in await claim(engine)] == [waiting]
    for one in running:
        await engine.complete(one.handle)
    assert (await engine.get_budget_status(damaged)).held == {}


async def test_a_budget_without_numbers_that_was_never_created_limits_nothing(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    unknown = BudgetId(plain_engine.mint_id())
    made = await many(plain_engine, 1, unknown)
    await plain_engine.report_usage_admin(unknown, dimensions=["tokens"], deltas=[1])
    await sql.execute("delete from flowfabric.budget_head")
    assert [each.execution_id for each in await claim(plain_engine)] == made


async def test_a_lost_lease_is_taken_over_under_an_exhausted_budget(engine: ff.Engine, clock: Clock) -> None:
    shut = await budget(engine)
    first = await many(engine, 1, shut)
    (held,) = await claim(engine, 1)
    second = await many(engine, 1, shut, priority=9)
    await engine.report_usage(held.handle, {"tokens": 10})
    await clock.advance(minutes=10)
    await engine.mark_lease_expired_if_due(held.execution_id)
    assert [(one.execution_id, one.attempt_type) for one in await claim(engine)] == [(first[0], "reclaim")]
    assert {state for state, _, _ in await states(engine, second)} == {ff.State.RATE_LIMITED}


async def test_a36_rows_that_stay_held_do_not_hide_those_whose_budget_was_reset(
    stage: Stage, parties: list[Party]
) -> None:
    one, two, _ = parties
    shut, reset = sorted([await budget(one, name, used=10) for name in ("a", "b")])
    await many(one, 250, shut)
    (last,) = await many(one, 1, reset)
    assert await claim(one) == []
    # The call that resets it finds the execution locked, and what it leaves for the duty is lost.
    await two.begin()
    await two.connection.execute("select from flowfabric.execution where id = $1 for no key update", last)
    await one.reset_budget(reset)
    await two.commit()
    await stage.watch.execute("delete from flowfabric.limit_due")
    assert await claim(one) == []
    duty = Unblock(one)
    duty.batch, duty.allowance = 1, 0.0  # a page is one limit: that of the 250 comes first
    assert await duty.run_once() == 0
    assert await claim(one) == []
    assert await duty.run_once() == 1, "the next round does not read the same page"
    assert [each.execution_id for each in await claim(one)] == [last]
    await stage.audit()


async def test_many_runs_with_budgets_of_their_own_are_moved_aside_under_the_one_that_is_exhausted(
    stage: Stage, parties: list[Party]
) -> None:
    one, *_ = parties
    team = await budget(one, "team", used=10)
    own = [await budget(one, f"own {n}") for n in range(20)]
    held = [(await many(one, 1, team, each))[0] for each in own]
    (free,) = await many(one, 1, own[0])
    assert [each.execution_id for each in await claim(one, 1)] == [free]
    assert await states(one, held) == {(ff.State.RATE_LIMITED, "waiting_for_budget", f"budget {team}: tokens 10/10")}
    await stage.audit()
    await one.update_budget(team, hard={"tokens": 11})
    assert {each.execution_id for each in await claim(one)} == set(held)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_reset_waits_for_the_claim_that_denies(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    shared = await budget(one, used=10)
    made = await many(one, 2, shared)
    await one.begin()
    assert await claim(one) == []
    task = await waiting(stage.watch, two, two.reset_budget(shared), behind=one)
    await one.end(ending)
    await asyncio.wait_for(task, PATIENCE)
    assert [each.execution_id for each in await claim(two)] == made
    await stage.audit()


async def test_a_claim_that_denies_waits_for_the_reset_and_looks_again(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    shared = await budget(one, used=10)
    made = await many(one, 2, shared)
    await one.begin()
    await one.reset_budget(shared)
    task = await waiting(stage.watch, two, claim(two), behind=one)
    await one.commit()
    first = await asyncio.wait_for(task, PATIENCE)
    await stage.audit()
    assert {each.execution_id for each in [*first, *await claim(two)]} == set(made)


async def test_a_locked_exhausted_budget_denies_in_a_second_lane_too(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    first, second = await budget(one, "first", used=10), await budget(one, "second", used=10)
    await many(one, 1, first, lane_id="a")
    (held,) = await many(one, 1, second, lane_id="b")
    await two.begin()
    await two.connection.execute("select from flowfabric.budget where id = $1 for update", second)
    claimed = await asyncio.wait_for(one.claim_lanes({"a": 5, "b": 5}, **WORKER, limit=10), PATIENCE)
    assert claimed == []
    await two.commit()
    assert await states(one, [held]) == {(ff.State.WAITING, "waiting_for_worker", None)}
    assert await claim(one, 10) == []
