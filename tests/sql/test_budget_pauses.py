"""Executions that wait for a budget: denied by claims, or paused by their handler; and what lets them continue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

import flowfabric as ff
from flowfabric._duties import ALL
from flowfabric.errors import LeaseLost
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import HardBreach, PausedForBudget, Reserved, UsageOk
from flowfabric.values.ids import BudgetId, ExecutionId
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from tests.each import each
from tests.sql.test_budgets import DAY, admin, make, status
from tests.support import MINUTE, WORKER, Clock, claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")


def under(*budgets: BudgetId) -> ExecutionPolicy:
    return ExecutionPolicy(budget_ids=budgets)


async def begun(engine: ff.Engine, *budgets: BudgetId, **fields: Any) -> Claimed:
    await submit(engine, policy=under(*budgets), **fields)
    return await claim_one(engine)


async def state(engine: ff.Engine, execution_id: ExecutionId) -> tuple[str, str | None, str | None]:
    found = await engine.describe_execution(execution_id)
    assert found is not None
    return str(found.public_state), found.blocking_reason, found.blocking_detail


Opening = Callable[[ff.Engine, BudgetId], Awaitable[Any]]


async def _release(engine: ff.Engine, budget: BudgetId) -> None:
    await engine.release_budget(budget, SPENDER)


SPENDER = ExecutionId(UUID(int=7))
OPENINGS: dict[str, Opening] = {
    "reset": lambda engine, budget: engine.reset_budget(budget),
    "raise": lambda engine, budget: engine.update_budget(budget, raise_by={"t": 1}),
    "no limit": lambda engine, budget: engine.update_budget(budget, hard={"t": 0}),
    "warnings only": lambda engine, budget: engine.update_budget(budget, enforcement_mode="warn"),
    "release": _release,
}


@pytest.mark.parametrize("opening", OPENINGS)
async def test_an_exhausted_budget_holds_executions_until_it_opens(engine: ff.Engine, opening: str) -> None:
    budget = await make(engine, {"t": 10})
    await engine.record_spend(budget, SPENDER, {"t": 10})
    ids = [await submit(engine, policy=under(budget)) for _ in range(5)]
    free = await submit(engine)
    assert (await claim_one(engine)).execution_id == free
    assert await engine.claim(**WORKER) is None
    assert await state(engine, ids[0]) == ("rate_limited", "waiting_for_budget", f"budget {budget}: t 10/10")
    await OPENINGS[opening](engine, budget)
    assert [(await claim_one(engine)).execution_id for _ in ids] == ids  # the original order, without any duty


async def test_a36_a_budget_that_opens_is_not_hidden_by_one_that_does_not(engine: ff.Engine) -> None:
    shut, opened = await make(engine, {"t": 1}), await make(engine, {"t": 1})
    await admin(engine, shut, t=1)
    await admin(engine, opened, t=1)
    for _ in range(30):
        await submit(engine, policy=under(shut))
    last = await submit(engine, policy=under(opened))
    assert await engine.claim(**WORKER) is None
    await engine.reset_budget(opened)
    assert (await claim_one(engine)).execution_id == last
    assert await engine.claim(**WORKER) is None


async def test_warnings_hold_nothing_back(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10}, enforcement_mode="warn")
    await admin(engine, budget, t=20)
    assert await begun(engine, budget)


async def test_a_paused_execution_continues_when_there_is_room_for_its_needs(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await begun(engine, budget)
    await engine.report_usage(held.handle, {"t": 8})
    assert isinstance(await engine.reserve_usage(held.handle, {"t": 5}), HardBreach)
    assert await engine.pause_for_budget(held.handle, {"t": 5}) == PausedForBudget(held.execution_id, True)
    assert await state(engine, held.execution_id) == (
        "rate_limited", "waiting_for_budget", f"budget {budget}: t 8/10",
    )  # fmt: skip
    with pytest.raises(ff.FlowFabricError):
        await engine.report_usage(held.handle, {"t": 1}, budget)
    await engine.update_budget(budget, raise_by={"t": 2})  # just not enough
    assert await engine.claim(**WORKER) is None
    await engine.update_budget(budget, raise_by={"t": 1})
    again = await claim_one(engine)
    assert (again.execution_id, again.handle.attempt_index) == (held.execution_id, held.handle.attempt_index)
    assert again.handle.lease_epoch > held.handle.lease_epoch
    assert isinstance(await engine.reserve_usage(again.handle, {"t": 5}), Reserved)
    leases = (await engine.read_events(family="lease", limit=100)).items
    assert [(one.lease_type, one.reason) for one in leases if one.lease_type == "revoked"] == [
        ("revoked", "waiting_for_budget")
    ]


async def test_the_timeout_of_an_attempt_stands_still_while_it_is_paused(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 10})
    limit = TimeoutPolicy(attempt_timeout=timedelta(seconds=60))
    await submit(engine, policy=ExecutionPolicy(budget_ids=(budget,), timeout_policy=limit))
    held = await claim_one(engine)
    await clock.advance(seconds=20)
    assert (await engine.pause_for_budget(held.handle, {"t": 11})).paused
    await clock.advance(hours=1)
    await engine.update_budget(budget, raise_by={"t": 1})
    again = await claim_one(engine)
    assert again.attempt_timeout_at is not None
    assert round((again.attempt_timeout_at - await clock.now()).total_seconds()) == 40


async def test_a_pause_with_room_changes_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await begun(engine, budget)
    assert await engine.pause_for_budget(held.handle, {"t": 10}) == PausedForBudget(held.execution_id, False)
    assert isinstance(await engine.report_usage(held.handle, {"t": 10}), UsageOk)


@each("first", ["low", "high"])
async def test_a_pause_waits_for_every_budget(engine: ff.Engine, first: str) -> None:
    budgets = sorted([await make(engine, {"t": 10}), await make(engine, {"t": 10})])
    held = await begun(engine, *budgets)
    await engine.report_usage(held.handle, {"t": 10})
    await engine.pause_for_budget(held.handle, {"t": 5})
    one, two = budgets if first == "low" else reversed(budgets)
    await engine.reset_budget(one)
    assert await engine.claim(**WORKER) is None
    await engine.reset_budget(two)
    assert (await claim_one(engine)).execution_id == held.execution_id


async def test_a_pause_may_name_budgets_that_are_not_attached(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    await admin(engine, budget, t=9)
    held = await begun(engine)
    assert (await engine.pause_for_budget(held.handle, {"t": 2}, budget)).paused
    assert await engine.claim(**WORKER) is None
    await engine.reset_budget(budget)
    assert (await claim_one(engine)).execution_id == held.execution_id


async def test_a_pause_that_names_budgets_needs_room_in_these_alone(engine: ff.Engine) -> None:
    own, other = await make(engine, {"t": 10}), await make(engine, {"t": 100})
    await admin(engine, own, t=9)
    await admin(engine, other, t=99)
    held = await begun(engine, own)
    assert (await engine.pause_for_budget(held.handle, {"t": 5}, other)).paused
    await engine.reset_budget(other)
    assert (await claim_one(engine)).execution_id == held.execution_id


async def test_settlements_and_cancelled_reservations_let_a_paused_execution_continue(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    one, two = await begun(engine, budget), await begun(engine, budget)
    reserved = await engine.reserve_usage(one.handle, {"t": 9})
    assert isinstance(reserved, Reserved)
    assert (await engine.pause_for_budget(two.handle, {"t": 5})).paused
    await engine.settle_usage(one.handle, reserved.reservation_id, {"t": 4})
    two = await claim_one(engine)
    reserved = await engine.reserve_usage(one.handle, {"t": 6})
    assert isinstance(reserved, Reserved)
    assert (await engine.pause_for_budget(two.handle, {"t": 5})).paused
    await engine.cancel_reservation(one.handle, reserved.reservation_id)
    two = await claim_one(engine)
    await engine.reserve_usage(one.handle, {"t": 6})
    assert (await engine.pause_for_budget(two.handle, {"t": 5})).paused
    await engine.complete(one.handle, b"")
    assert (await claim_one(engine)).execution_id == two.execution_id


async def test_a_pause_gives_back_what_was_held(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await begun(engine, budget)
    await engine.reserve_usage(held.handle, {"t": 6})
    await engine.pause_for_budget(held.handle, {"t": 11})
    assert (await status(engine, budget)).held == {}


async def test_paused_executions_can_be_cancelled(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 1})
    held = await begun(engine, budget)
    await engine.pause_for_budget(held.handle, {"t": 2})
    await engine.cancel(Operator(held.execution_id), "no")
    await engine.update_budget(budget, raise_by={"t": 5})
    assert await engine.claim(**WORKER) is None


async def test_only_the_holder_pauses(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 1})
    held = await begun(engine, budget)
    await clock.advance(minutes=10)
    with pytest.raises(LeaseLost):
        await engine.pause_for_budget(held.handle, {"t": 2})


# ---- duties


async def test_periods_end_on_time_and_missed_ones_are_one_reset(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 1}, reset_interval=DAY)
    await admin(engine, budget, t=1)
    waiting = await submit(engine, policy=under(budget))
    assert await engine.claim(**WORKER) is None
    assert (await engine.reset_due_budgets()).handled == 0
    await clock.advance(days=1, hours=20)
    assert (await engine.look_for_due({"budget_reset": None}, at_most=MINUTE)).due == {"budget_reset"}
    assert (await engine.reset_due_budgets()).handled == 1
    assert (await engine.reset_due_budgets()).handled == 0
    found = await status(engine, budget)
    assert (found.reset_count, found.usage) == (1, {"t": 0})
    assert found.last_reset_at is not None
    assert found.next_reset_at == found.last_reset_at + DAY
    assert (await claim_one(engine)).execution_id == waiting


async def test_of_the_budgets_that_are_due_the_earliest_is_reset_first(engine: ff.Engine, clock: Clock) -> None:
    spans = (3, 1, 2)
    budgets = [await make(engine, {"t": 1}, reset_interval=days * DAY) for days in spans]
    await clock.advance(days=10)
    order = []
    for _ in spans:
        assert (await engine.reset_due_budgets(limit=1)).more
        done = {one for one in budgets if (await status(engine, one)).reset_count == 1}
        order += [days for days, one in zip(spans, budgets, strict=True) if one in done and days not in order]
    assert order == [1, 2, 3]


async def test_the_reconciler_reports_and_does_not_rewrite(engine: ff.Engine, clock: Clock) -> None:
    budget = BudgetId(UUID(int=5))
    await admin(engine, budget, t=20)
    await make(engine, {"t": 10}, budget_id=budget)
    for _ in range(3):
        await make(engine)
    pages = [await engine.reconcile_budget_counters(limit=2)]
    while pages[-1].next_id is not None:
        pages.append(await engine.reconcile_budget_counters(after=pages[-1].next_id, limit=2))
    assert [page.wrong for page in pages] == [1, 0, 0]
    assert pages[0].message == f"budget {budget}: t 20/10"
    assert (await status(engine, budget)).usage == {"t": 20}


async def test_the_duties_of_budgets_are_run() -> None:
    assert {"budget_reset", "budget_reconciler", "reservation_end"} <= {duty.name for duty in ALL}


# ---- events


async def told(engine: ff.Engine) -> list[tuple[str, Any, Any, Any]]:
    """The events about budgets: what happened, the dimension, its usage and its limit."""
    events = (await engine.read_events(limit=1000)).items
    return [
        (one.operator_type, one.details.get("dimension"), one.details.get("usage"), one.details.get("limit"))
        for one in events
        if one.operator_type is not None and one.details is not None and one.operator_type.startswith("budget_")
    ]


async def test_each_crossing_is_one_event(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10}, {"t": 5, "c": 1})
    for amount in (5, 1, 1, 3):  # at the soft limit, above it, again, at the hard limit
        await admin(engine, budget, t=amount)
    await admin(engine, budget, t=1)  # denied
    assert await told(engine) == [("budget_soft_limit_reached", "t", 6, 5), ("budget_exhausted", "t", 10, 10)]
    await engine.update_budget(budget, raise_by={"t": 2})
    await admin(engine, budget, t=2)
    await engine.reset_budget(budget)
    assert (await told(engine))[2:] == [
        ("budget_reopened", "t", 10, 12),
        ("budget_changed", None, None, None),
        ("budget_exhausted", "t", 12, 12),
        ("budget_reopened", "t", 0, 12),
        ("budget_reset", None, None, None),
    ]
    (event,) = [one for one in (await engine.read_events(limit=1000)).items if one.operator_type == "budget_reset"]
    assert event.details == {"budget_id": str(budget), "name": str(budget), "generation": 1}


async def test_a_hard_limit_that_only_warns_is_a_soft_limit_in_events(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10}, enforcement_mode="warn")
    await admin(engine, budget, t=11)
    assert await told(engine) == [("budget_soft_limit_reached", "t", 11, 10)]


async def test_an_amount_that_a_pause_gives_back_does_not_let_it_continue(engine: ff.Engine) -> None:
    budget, other = await make(engine, {"t": 10}), await make(engine, {"t": 10})
    held = await begun(engine, budget)
    assert isinstance(await engine.reserve_usage(held.handle, {"t": 6}), Reserved)
    assert isinstance(await engine.reserve_usage(held.handle, {"t": 9}, other), Reserved)
    assert isinstance(await engine.reserve_usage(held.handle, {"t": 6}), HardBreach)
    assert await engine.pause_for_budget(held.handle, {"t": 6}) == PausedForBudget(held.execution_id, True)
    assert (await status(engine, budget)).held == {}
    assert (await state(engine, held.execution_id))[0] == "rate_limited", "it needs 12: what it held, and 6 more"
    found = await engine.read_held(held.execution_id)
    assert found is not None
    assert found.needs == {"t": 12}
    await admin(engine, budget, t=1)
    await engine.update_budget(budget, raise_by={"t": 2})
    assert (await state(engine, held.execution_id))[0] == "rate_limited"
    await engine.update_budget(budget, raise_by={"t": 1})
    assert (await claim_one(engine)).execution_id == held.execution_id
