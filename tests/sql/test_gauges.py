"""The numbers of a deployment for a monitor: what is counted, and that counting stops."""

from __future__ import annotations

from datetime import timedelta

from flowfabric.values.conditions import on
from flowfabric.values.held import Denials
from flowfabric.values.ids import BudgetId, mint_uuid
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh
from tests.support import CheckedEngine, Clock, claim_one, started, submit


async def test_an_empty_deployment_has_only_zeros(engine: CheckedEngine) -> None:
    found = await engine.read_gauges()
    assert found.lanes == ()
    assert set(found.states.values()) == {0}
    assert (found.blocked, found.workers, found.slots, found.cancelling_flows) == ({}, 0, 0, 0)
    assert found.denials == Denials(budgets={}, rate=0, concurrency=0)


async def test_waiting_running_and_failed_executions_are_counted(engine: CheckedEngine, clock: Clock) -> None:
    suspended = await started(engine)
    await engine.suspend(suspended.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    failed = await started(engine)
    await engine.fail(failed.handle, "boom", failure_class="permanent")
    running = await started(engine)
    await engine.renew(running.handle)
    await submit(engine)
    await clock.advance(seconds=100)
    await submit(engine, execution_kind="other")
    blocked = await submit(engine)
    await engine.block_execution_for_admission(blocked, "paused_by_operator")
    await submit(engine, lane_id="b", delay_until=timedelta(hours=1))
    await engine.register_worker("pool", "pool-1", lanes=["default"], liveness_ttl=timedelta(hours=1), slots=7)
    found = await engine.read_gauges()
    b, default = found.lanes
    assert (b.lane_id, b.depth, b.oldest_age) == ("b", 0, timedelta(0))
    assert (default.lane_id, default.depth) == ("default", 2)
    assert default.oldest_age >= timedelta(seconds=100)
    assert {state: count for state, count in found.states.items() if count} == {
        "waiting": 2,
        "delayed": 1,
        "active": 1,
        "suspended": 1,
        "failed": 1,
    }
    assert found.blocked == {"paused_by_operator": 1}
    assert (found.workers, found.slots) == (1, 7)
    await clock.advance(hours=2)
    assert (await engine.read_gauges()).workers == 0


async def test_a_lost_lease_waits_and_does_not_run(engine: CheckedEngine, clock: Clock) -> None:
    claimed = await started(engine, lease_ttl=timedelta(seconds=5))
    await clock.advance(seconds=6)
    await engine.mark_lease_expired_if_due(claimed.execution_id)
    states = (await engine.read_gauges()).states
    assert (states["active"], states["waiting"]) == (0, 1)
    await claim_one(engine)
    states = (await engine.read_gauges()).states
    assert (states["active"], states["waiting"]) == (1, 0)


async def test_counting_stops_at_the_limit(engine: CheckedEngine) -> None:
    for kind in ("a", "b"):
        for _ in range(4):
            await submit(engine, execution_kind=kind)
    (lane,) = (await engine.read_gauges(most=3)).lanes
    assert lane.depth == 6  # three of each kind
    (lane,) = (await engine.read_gauges()).lanes
    assert lane.depth == 8


async def test_what_limits_denied_to_claims_is_counted(engine: CheckedEngine) -> None:
    budget = BudgetId(mint_uuid())
    await engine.create_budget(budget, dimensions=["t"], hard_limits=[1], soft_limits=[0])
    await engine.report_usage_admin(budget, dimensions=["t"], deltas=[1])
    cap = await engine.create_quota_policy(name="cap", max_concurrent=1)
    rate = await engine.create_quota_policy(name="rate", max_requests_per_window=1)
    for _ in range(2):
        await submit(engine, policy=ExecutionPolicy(budget_ids=(budget,)))
        await submit(engine, policy=ExecutionPolicy(quota_policy_id=cap.quota_policy_id))
        await submit(engine, policy=ExecutionPolicy(quota_policy_id=rate.quota_policy_id))
    assert len(await engine.claim_many(worker_id="w", worker_instance_id="w-1", limit=10)) == 2
    await engine.count_denials()
    found = (await engine.read_gauges()).denials
    assert found == Denials(budgets={"t": 2}, rate=1, concurrency=1) == await engine.read_denials()
