"""Budgets of one execution, made and purged with it; and the budgets that children and members inherit."""

from __future__ import annotations

from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, ValidationFailed
from flowfabric.values.budget import HardBreach, UsageOk
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import BudgetId, ExecutionId, FlowId, QuotaPolicyId, fit_partition, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, OwnBudget
from tests.each import each
from tests.ids import home
from tests.sql.test_budgets import make, status
from tests.support import WORKER, Clock, claim_one, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def budgets_of(engine: ff.Engine, execution_id: ExecutionId) -> set[Any]:
    found = await engine.read_execution(execution_id)
    assert found is not None
    return set(found.budget_ids)


async def test_an_execution_has_a_budget_of_its_own(engine: ff.Engine) -> None:
    shared = await make(engine, {"t": 100})
    policy = ExecutionPolicy(budget=OwnBudget(hard={"t": 10, "c": 5}, soft={"t": 8, "x": 1}), budget_ids=(shared,))
    execution_id = await submit(engine, policy=policy)
    own = BudgetId(execution_id)
    assert await budgets_of(engine, execution_id) == {own, shared}
    found = await status(engine, own)
    assert (found.hard_limits, found.soft_limits) == ({"t": 10, "c": 5, "x": 0}, {"t": 8, "c": 0, "x": 1})
    assert (found.owner_id, found.usage, found.enforcement_mode) == (execution_id, {}, "strict")
    held = await claim_one(engine)
    assert await engine.report_usage(held.handle, {"t": 7}) == UsageOk(remaining={"c": 5, "t": 3})
    denied = await engine.report_usage(held.handle, {"t": 4})
    assert isinstance(denied, HardBreach)
    assert denied.budget_id == own
    assert [one.budget_id for one in (await engine.list_budgets(owner_id=execution_id)).items] == [own]


async def test_it_is_changed_by_its_owner(engine: ff.Engine) -> None:
    other = await submit(engine, policy=ExecutionPolicy(budget_ids=(await make(engine, {"t": 100}),)))
    owner = await submit(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"t": 10})))
    changed = await engine.update_budget(owner_id=owner, raise_by={"t": 5})
    assert (changed.budget_id, changed.owner_id, changed.hard_limits) == (BudgetId(owner), owner, {"t": 15})
    for stranger in (other, ExecutionId(mint_uuid())):
        with pytest.raises(NotFound, match="was submitted without a budget of its own"):
            await engine.update_budget(owner_id=stranger, raise_by={"t": 5})
    with pytest.raises(InvalidInput):
        await engine.update_budget(raise_by={"t": 5})
    with pytest.raises(InvalidInput):
        await engine.update_budget(BudgetId(owner), owner_id=owner, raise_by={"t": 5})
    assert (await status(engine, BudgetId(owner))).hard_limits == {"t": 15}


async def test_each_of_many_has_its_own(engine: ff.Engine) -> None:
    own = ExecutionPolicy(budget=OwnBudget(hard={"t": 10}))
    made = await engine.create_many(
        [NewExecution(execution_kind="a", policy=own if number % 2 else None) for number in range(6)]
    )
    for number, one in enumerate(made):
        assert isinstance(one, Created)
        assert await budgets_of(engine, one.execution_id) == ({BudgetId(one.execution_id)} if number % 2 else set())
    assert len((await engine.list_budgets()).items) == 3


async def test_a_duplicate_has_no_second_budget(engine: ff.Engine) -> None:
    own = ExecutionPolicy(budget=OwnBudget(hard={"t": 10}))
    for _ in range(2):
        await engine.create_execution(execution_kind="a", policy=own, idempotency_key="k")
    assert len((await engine.list_budgets()).items) == 1


async def test_it_is_purged_with_its_execution(engine: ff.Engine, clock: Clock) -> None:
    execution_id = await submit(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"t": 10})))
    held = await claim_one(engine)
    await engine.report_usage(held.handle, {"t": 4})
    await engine.complete(held.handle, b"")
    await clock.advance(days=30)
    await engine.run_timers("retention")  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await status(engine, BudgetId(execution_id))


async def test_it_outlives_its_execution_while_a_child_may_spend(engine: ff.Engine, clock: Clock) -> None:
    parent = await started(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"t": 10})))
    budget = BudgetId(parent.execution_id)
    await engine.submit_child(parent.handle, "a", 0, NewExecution(execution_kind="a"))
    await engine.report_usage(parent.handle, {"t": 10})
    await engine.complete(parent.handle, b"")
    await clock.advance(days=30)
    await engine.run_timers("retention")  # type: ignore[arg-type]
    assert await engine.read_execution(parent.execution_id) is None
    assert (await engine.reconcile_budget_counters()).corrected == 0
    assert await engine.claim(**WORKER) is None, "the child is held back all the same"
    await engine.reset_budget(budget)
    await engine.complete((await claim_one(engine)).handle, b"")
    assert (await engine.reconcile_budget_counters()).corrected == 0
    assert (await status(engine, budget)).owner_id == parent.execution_id, "the child may be replayed"
    await clock.advance(days=30)
    await engine.run_timers("retention")  # type: ignore[arg-type]
    assert (await engine.reconcile_budget_counters()).corrected == 1
    with pytest.raises(NotFound):
        await status(engine, budget)


async def test_it_limits_what_a_purged_child_submitted_and_what_is_replayed(engine: ff.Engine, clock: Clock) -> None:
    parent = await started(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"t": 10})))
    budget = BudgetId(parent.execution_id)
    await engine.submit_child(parent.handle, "a", 0, NewExecution(execution_kind="a"))
    child = await claim_one(engine)
    # A quota of its own: another limit set than that of the child.
    apart = ExecutionPolicy(quota_policy_ids=(QuotaPolicyId(mint_uuid()),))
    await engine.submit_child(child.handle, "b", 0, NewExecution(execution_kind="a", policy=apart))
    for one in (parent, child):
        await engine.complete(one.handle, b"")
    for _ in range(2):  # the parent, which needs the child until then, and the child
        await clock.advance(days=30)
        await engine.run_timers("retention")  # type: ignore[arg-type]
    assert await engine.read_execution(child.execution_id) is None
    assert (await engine.reconcile_budget_counters()).corrected == 0
    last = await claim_one(engine)
    assert isinstance(await engine.report_usage(last.handle, {"t": 11}), HardBreach)
    assert await engine.report_usage(last.handle, {"t": 10}) == UsageOk(remaining={"t": 0})
    await engine.complete(last.handle, b"")
    await engine.reconcile_budget_counters()
    await engine.replay_execution(last.execution_id)
    assert await engine.claim(**WORKER) is None, "it is held back as before"
    assert [one.owner_id for one in (await engine.list_budgets()).items] == [parent.execution_id]
    await engine.cancel(Operator(last.execution_id), "enough")
    await clock.advance(days=30)
    await engine.run_timers("retention")  # type: ignore[arg-type]
    assert (await engine.reconcile_budget_counters()).corrected == 1
    with pytest.raises(NotFound):
        await status(engine, budget)


@each(
    "budget",
    [
        5, "x", [], {"hard": 5}, {"hard": {"t": -1}}, {"hard": {"t": 2**63}}, {"hard": {"t": 1.5}},
        {"hard": {"t": True}}, {"hard": {"": 1}}, {"hard": {"a\nb": 1}}, {"soft": {"t": "1"}},
        {"enforcement_mode": "none"}, {"hard": {f"d{n}": 1 for n in range(65)}},
    ],
)  # fmt: skip
async def test_a_bad_definition_is_refused_and_nothing_is_created(engine: ff.Engine, budget: Any) -> None:
    with pytest.raises(ValidationFailed):
        await engine.create_execution(execution_kind="a", policy={"budget": budget})
    assert not (await engine.list_budgets()).items


async def test_children_inherit_budgets_and_not_quotas(engine: ff.Engine) -> None:
    shared, theirs = await make(engine), await make(engine)
    quota = mint_uuid()
    parent = await started(
        engine,
        policy=ExecutionPolicy(
            budget=OwnBudget(hard={"t": 10}),
            budget_ids=(shared,),
            quota_policy_ids=(quota,),  # type: ignore[arg-type]
        ),
    )
    own = BudgetId(parent.execution_id)
    plain = await engine.submit_child(parent.handle, "a", 0, NewExecution(execution_kind="a"))
    assert await budgets_of(engine, plain.execution_id) == {own, shared}
    found = await engine.read_execution(plain.execution_id)
    assert found is not None
    assert found.quota_policy_ids == ()
    more = await engine.submit_child(
        parent.handle, "b", 0,
        NewExecution(execution_kind="a", policy=ExecutionPolicy(budget_ids=(theirs,), budget=OwnBudget(hard={"t": 1}))),
    )  # fmt: skip
    assert await budgets_of(engine, more.execution_id) == {own, shared, theirs, BudgetId(more.execution_id)}
    alone = await engine.submit_child(
        parent.handle, "c", 0,
        NewExecution(execution_kind="a", policy=ExecutionPolicy(inherit_budgets=False, budget_ids=(theirs,))),
    )  # fmt: skip
    assert await budgets_of(engine, alone.execution_id) == {theirs}
    detached = await engine.submit_child(parent.handle, "d", 0, NewExecution(execution_kind="a"), detached=True)
    assert await budgets_of(engine, detached.execution_id) == set()
    child = await claim_one(engine)
    await engine.report_usage(child.handle, {"t": 3})
    usage = await engine.read_usage(parent.execution_id)
    assert {(one.execution_id, one.parent_id, one.budget_id) for one in usage} == {
        (child.execution_id, parent.execution_id, own), (child.execution_id, parent.execution_id, shared),
    }  # fmt: skip


async def test_members_of_a_submitted_flow_inherit_budgets(engine: ff.Engine) -> None:
    shared, theirs = await make(engine), await make(engine)
    parent = await started(engine, policy=ExecutionPolicy(budget_ids=(shared,)))
    flow_id = FlowId(fit_partition(mint_uuid(), home(parent.execution_id), 256))
    nodes = [
        NewNode(name="a", execution=NewExecution(execution_kind="a")),
        NewNode(name="b", execution=NewExecution(execution_kind="b", policy=ExecutionPolicy(budget_ids=(theirs,)))),
        NewNode(name="c", execution=NewExecution(execution_kind="c", policy=ExecutionPolicy(inherit_budgets=False))),
    ]
    await engine.submit_child_flow(parent.handle, "f", 0, nodes, flow_id=flow_id, seed=mint_uuid())
    members = await engine.list_flow_members(flow_id)
    found = {one.name: await budgets_of(engine, one.execution_id) for one in members}
    assert found == {"a": {shared}, "b": {shared, theirs}, "c": set()}


async def test_a_flow_may_own_a_budget(engine: ff.Engine, clock: Clock) -> None:
    flow_id = FlowId(mint_uuid())
    budget = await make(engine, {"t": 5}, budget_id=BudgetId(flow_id), owner_id=ExecutionId(flow_id))
    await engine.create_flow(flow_id)
    member = await submit(engine, flow_id=flow_id, policy=ExecutionPolicy(budget_ids=(budget,)))
    await engine.add_execution_to_flow(flow_id, member)
    held = await claim_one(engine)
    await engine.report_usage(held.handle, {"t": 4})
    await engine.complete(held.handle, b"")
    await engine.delete_flow(flow_id)
    with pytest.raises(NotFound):
        await status(engine, budget)


async def test_a_flow_and_its_budget_are_created_in_one_call_or_not_at_all(engine: ff.Engine) -> None:
    flow_id = FlowId(mint_uuid())
    own = BudgetId(flow_id)
    first = ExecutionPolicy(flow_budget=OwnBudget(hard={"t": 5}))
    nodes = [
        NewNode(name="a", execution=NewExecution(execution_kind="a", policy=first)),
        NewNode(name="b", execution=NewExecution(execution_kind="b", lane_id="closed")),
    ]
    await submit(engine, lane_id="closed")
    await engine.set_lane_state("closed", "disabled")
    with pytest.raises(FlowFabricError):
        await engine.submit_flow(nodes, flow_id=flow_id)
    assert not (await engine.list_budgets()).items, "the flow was refused"
    await engine.set_lane_state("closed", "active")
    await engine.submit_flow(nodes, flow_id=flow_id)
    await engine.submit_flow(nodes, flow_id=flow_id)
    assert [(one.budget_id, one.owner_id) for one in (await engine.list_budgets()).items] == [(own, flow_id)]
    await engine.extend_flow(flow_id, [NewNode(name="c", execution=NewExecution(execution_kind="c"))])
    members = await engine.list_flow_members(flow_id)
    assert {one.name: await budgets_of(engine, one.execution_id) for one in members} == {key: {own} for key in "abc"}


async def test_an_owner_that_is_no_id_is_refused(engine: ff.Engine) -> None:
    owners: list[Any] = ["x", 5, "", "{fp:1}:x"]
    for owner in owners:
        with pytest.raises(InvalidInput) as refused:
            await engine.update_budget(owner_id=owner, hard={"t": 1})
        assert refused.value.field == "owner_id", owner
