"""The fleet as a whole: routes that no live worker covers, as claims, registrations and the duty see them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.grant import Granted, NoWork
from flowfabric.values.ids import ExecutionId
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.support import WORKER, CheckedEngine, claim_one, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
TTL = timedelta(seconds=30)


async def needing(engine: ff.Engine, *capabilities: str, **fields: Any) -> ExecutionId:
    """Submit one that requires capabilities."""
    policy = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=capabilities))
    return await submit(engine, policy=policy, **fields)


async def register(engine: ff.Engine, instance: str = "w-1", **fields: Any) -> None:
    given = {"worker_id": "w", "lanes": ["default"], "liveness_ttl": TTL} | fields
    await engine.register_worker(worker_instance_id=instance, **given)


async def seen(engine: ff.Engine, execution_id: ExecutionId) -> tuple[str, str, str]:
    """Its eligibility, blocking reason and public state, the same in records and in lists."""
    found = await engine.read_execution(execution_id)
    assert found is not None
    page = await engine.find_executions(states=[found.public_state])
    (listed,) = [one for one in page.items if one.execution_id == execution_id]
    assert listed.state_vector == found.state_vector
    assert listed.blocking_detail == (found.blocking_detail or "")
    vector = found.state_vector
    return vector.eligibility_state, vector.blocking_reason, vector.public_state


ELIGIBLE = ("eligible_now", "waiting_for_worker", "waiting")
BY_ROUTE = ("blocked_by_route", "waiting_for_capable_worker", "waiting")
BY_LANE = ("blocked_by_lane_state", "paused_by_policy", "waiting")


@pytest.mark.both_servers
async def test_a2_an_execution_that_another_live_worker_can_run_does_not_hide_later_ones_and_is_not_touched(
    engine: CheckedEngine,
) -> None:
    await register(engine, capabilities=["gpu"])
    head = await needing(engine, "gpu", priority=9)
    second = await submit(engine)
    assert (await claim_one(engine)).execution_id == second
    assert await engine.claim(**WORKER) is None, "and a claim that finds nothing"
    assert await seen(engine, head) == ELIGIBLE


@pytest.mark.both_servers
async def test_a3_an_execution_that_no_live_worker_can_run_is_blocked_by_its_route_and_still_waiting(
    engine: CheckedEngine,
) -> None:
    made = await needing(engine, "asr")
    assert await seen(engine, made) == ELIGIBLE
    assert await engine.claim_for_worker(**WORKER, capabilities=["llm"]) == NoWork()
    assert await seen(engine, made) == BY_ROUTE


@pytest.mark.both_servers
async def test_a4_a_worker_that_is_not_registered_gets_it_at_once(engine: CheckedEngine) -> None:
    made = await needing(engine, "asr")
    await engine.claim(**WORKER)
    assert await seen(engine, made) == BY_ROUTE
    granted = await engine.claim_for_worker(**WORKER, capabilities=["asr"])
    assert isinstance(granted, Granted)
    assert granted.grant.execution_id == made
    assert await seen(engine, made) == ELIGIBLE, "one that is granted is as good as claimed"


@pytest.mark.both_servers
async def test_a5_one_worker_must_have_all_that_is_required(engine: CheckedEngine) -> None:
    await register(engine, "g", capabilities=["gpu"])
    await register(engine, "c", capabilities=["cuda"])
    made = await needing(engine, "gpu", "cuda")
    assert await engine.judge_routes() == 1
    assert await engine.judge_routes() == 0
    assert await seen(engine, made) == BY_ROUTE
    await register(engine, "f", capabilities=["gpu", "cuda", "fp16"])
    assert await seen(engine, made) == ELIGIBLE
