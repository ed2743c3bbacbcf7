"""Claims under budgets: exhausted ones hold executions back, and let them continue when they have room again."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import Unblock
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import BudgetId
from flowfabric.values.policies import ExecutionPolicy
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
    shut, reset = await budget(one, "shut", used=10), await budget(one, "reset", used=10)
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
    await Unblock(one).run_once()
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
