"""The duties of budgets and quotas: a damaged one stops none of the others, and what is known is not repeated."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import BudgetReconciler, BudgetReset, LimitOpening, Unblock
from flowfabric.values.budget import Reserved
from flowfabric.values.ids import BudgetId, QuotaPolicyId
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.sql.plans import CountingEngine
from tests.sql.test_budgets import admin, make
from tests.sql.test_quotas import claim, many, quota, state
from tests.support import WORKER, CheckedEngine, Clock, started

SQL: TypeAlias = "asyncpg.Connection[Any]"
DAY = timedelta(days=1)
ONE = {"max_requests_per_window": 1}
FIRST, SECOND, THIRD = (BudgetId(UUID(int=n)) for n in (1, 2, 3))


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in log.records if one.levelno >= logging.WARNING]


async def resets(engine: ff.Engine) -> list[int]:
    return [(await engine.get_budget_status(one)).reset_count for one in (FIRST, SECOND, THIRD)]


async def test_a_budget_that_cannot_be_reset_is_put_off_and_reported(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (FIRST, SECOND, THIRD):
        await make(plain_engine, {"t": 1}, budget_id=one, reset_interval=DAY)
    await sql.execute("update flowfabric.budget set reset_interval = '300000 years' where id = $1", FIRST)
    await clock.advance(days=1)
    duty = BudgetReset(plain_engine)
    assert await duty.run_once() == 2
    assert await resets(plain_engine) == [0, 1, 1]
    (warning,) = warnings(caplog)
    assert warning.startswith(f"budget_reset: 1 postponed, the last because: budget {FIRST}: ")
    assert await duty.run_once() == 0
    assert len(warnings(caplog)) == 1, "it does not come back at once"
    await sql.execute("update flowfabric.budget set reset_interval = '1 day' where id = $1", FIRST)
    await clock.advance(seconds=31)
    assert await duty.run_once() == 1
    assert await resets(plain_engine) == [1, 1, 1]


@pytest.mark.parametrize("duty_of", [LimitOpening, Unblock])
async def test_a_damaged_quota_policy_holds_no_other_back(
    plain_engine: ff.Engine,
    sql: SQL,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    duty_of: type[LimitOpening | Unblock],
) -> None:
    made = []
    for n in (1, 2, 3):
        policy = await quota(
            plain_engine, f"p{n}", quota_policy_id=QuotaPolicyId(UUID(int=n)), max_requests_per_window=1
        )
        made += await many(plain_engine, 2, policy)
    assert len(await claim(plain_engine)) == 3
    await sql.execute("update flowfabric.quota_policy set max_concurrent = -1 where id = $1", UUID(int=1))
    await clock.advance(seconds=61)
    duty = duty_of(plain_engine)
    assert await duty.run_once() == 2
    assert [(await state(plain_engine, one))[0] for one in made[1::2]] == ["rate_limited", "waiting", "waiting"]
    (warning,) = warnings(caplog)
    assert f"limit {UUID(int=1)}: " in warning
    await sql.execute("update flowfabric.quota_policy set max_concurrent = 0")
    await clock.advance(seconds=31)
    assert await duty.run_once() == 1


async def test_limits_that_are_due_more_than_once_are_all_looked_at(plain_engine: ff.Engine, sql: SQL) -> None:
    """A full page is followed by the next, however often it names one limit."""
    await sql.execute(
        "insert into flowfabric.limit_due (due_at, limit_id, key) select flowfabric.now(), $1, 'k'"
        " from generate_series(1, 250)",
        UUID(int=1),
    )
    await LimitOpening(plain_engine).run_once()
    assert await sql.fetchval("select count(*) from flowfabric.limit_due") == 0


async def test_a_damaged_budget_holds_no_reservation_of_another_back(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (FIRST, SECOND):
        await make(plain_engine, {"t": 10}, budget_id=one)
        held = await started(plain_engine, policy=ExecutionPolicy(budget_ids=(one,)))
        assert isinstance(await plain_engine.reserve_usage(held.handle, {"t": 4}), Reserved)
    rename = "update flowfabric.budget_head set dimensions = array[$2] where budget_id = $1"
    await sql.execute(rename, FIRST, "other")
    await clock.advance(minutes=10)
    duty = BudgetReconciler(plain_engine)
    assert await duty.run_once() == 1
    assert (await plain_engine.get_budget_status(SECOND)).usage == {"t": 4}
    (warning,) = warnings(caplog)
    assert warning.startswith(f"budget_reconciler: 1 postponed, the last because: budget {FIRST}: ")
    await sql.execute(rename, FIRST, "t")
    assert await duty.run_once() == 1
    assert (await plain_engine.get_budget_status(FIRST)).usage == {"t": 4}


async def test_a_limit_below_what_is_used_is_reported_once(
    plain_engine: ff.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (FIRST, SECOND):
        await make(plain_engine, {"t": 10}, budget_id=one)
        await admin(plain_engine, one, t=10)
    duty = BudgetReconciler(plain_engine)
    await duty.run_once()
    assert warnings(caplog) == []
    await plain_engine.update_budget(FIRST, hard={"t": 5})
    await duty.run_once()
    await duty.run_once()
    assert len(warnings(caplog)) == 1
    await plain_engine.update_budget(SECOND, hard={"t": 5})
    await duty.run_once()
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("why", ["paused", "uncovered", "unserved"])
async def test_executions_that_no_claim_takes_do_not_keep_the_room_from_others(engine: CheckedEngine, why: str) -> None:
    """A slot is handed to the first that a worker can take; those before it do not wait for it either."""
    policy = await quota(engine, max_concurrent=1)
    (running,) = await many(engine, 1, policy, priority=9)
    routing = RoutingRequirements(required_capabilities=frozenset({"gpu"}) if why == "uncovered" else frozenset())
    aside = ExecutionPolicy(quota_policy_ids=(policy,), routing_requirements=routing)
    first = await many(engine, 130, policy=aside, priority=5, lane_id="side")
    behind = await many(engine, 2, policy)
    held = await claim(engine)
    assert [one.execution_id for one in held] == [running]
    assert await claim(engine, lane_id="side", capabilities=["gpu"]) == []
    assert {(await state(engine, one))[0] for one in (first[0], first[-1], *behind)} == {"rate_limited"}
    if why == "paused":
        await engine.set_lane_state("side", "paused")
    elif why == "unserved":
        await engine.register_worker(**WORKER, lanes=["default"], liveness_ttl=DAY)
    else:
        await many(engine, 1, policy=aside, lane_id="side")  # a verdict is made on a route with work
        await engine.judge_routes()
    await engine.complete(held[0].handle, b"")
    await (Unblock if why == "unserved" else LimitOpening)(engine).run_once()
    await LimitOpening(engine).run_once()
    (taken,) = await claim(engine)
    assert taken.execution_id == behind[0]
    assert (await state(engine, behind[1]))[0] == "rate_limited"
    await engine.set_lane_state("side", "active")
    await engine.complete(taken.handle, b"")
    await LimitOpening(engine).run_once()
    found = await claim(engine, lane_id="side", capabilities=["gpu"]) or await claim(engine)
    assert len(found) == 1


async def test_an_end_beside_a_paused_lane_reads_what_it_promotes_and_no_more(
    plain_engine: ff.Engine, database: str
) -> None:
    """A hundred executions wait behind the one that gets the slot, none of them in the paused lane."""
    policy = await quota(plain_engine, max_concurrent=1)
    await many(plain_engine, 120, policy)
    (held,) = await claim(plain_engine)
    read = []
    async with CountingEngine.open(database) as counting:
        for _ in range(2):
            async with counting.undone():
                await counting.count()
                await counting.complete(held.handle, b"")
                read.append(counting.handled)
            await plain_engine.set_lane_state("elsewhere", "paused")
    assert read[1] <= read[0] + 80, read
