"""A worker that registers while another call judges what the fleet covers: in no order is a wrong verdict left.

One party makes its call in a transaction that stays open; the other call waits or passes; then the first commits or
rolls back.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.interleave import Party, Stage, settled, waiting
from tests.support import WORKER, submit

GPU = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))


async def register(party: ff.Engine, instance: str = "w-1", **fields: Any) -> Any:
    given = {"lanes": ["default"], "liveness_ttl": timedelta(seconds=30), "capabilities": ["gpu"], **fields}
    return await party.register_worker("w", instance, **given)


async def is_blocked(engine: ff.Engine, execution_id: ff.ExecutionId) -> bool:
    found = await engine.read_execution(execution_id)
    assert found is not None
    return found.state_vector.eligibility_state == "blocked_by_route"


JUDGES: dict[str, Any] = {
    "claim": lambda party: party.claim(**WORKER),
    "claim_for_worker": lambda party: party.claim_for_worker(**WORKER),
    "duty": lambda party: party.judge_routes(),
    "mark dead": lambda party: party.mark_worker_dead("w-0", reason="gone"),
    "less than before": lambda party: register(party, "w-0", capabilities=[]),
}


async def prepare(stage: Stage, party: Party) -> ff.ExecutionId:
    await stage.empty()
    await register(party, "w-0")
    made = await submit(party, policy=GPU)
    await stage.clock.advance(seconds=10)
    return made


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("judge", JUDGES)
async def test_a_call_that_judges_while_a_worker_registers_makes_no_verdict_and_does_not_wait(
    stage: Stage, judge: str, ending: str
) -> None:
    first, second = await stage.company(2)
    made = await prepare(stage, first)
    if judge in ("claim", "claim_for_worker", "duty"):
        await stage.clock.advance(seconds=30)  # w-0 lapses
    await first.begin()
    await register(first)
    await settled(JUDGES[judge](second))
    assert not await is_blocked(second, made)
    await first.end(ending)
    await stage.audit()
    assert not await is_blocked(second, made)
    await second.judge_routes()
    assert await is_blocked(second, made) == (ending == "rollback")
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("judge", JUDGES)
async def test_a_worker_that_registers_while_a_verdict_is_made_waits_and_lifts_it(
    stage: Stage, judge: str, ending: str
) -> None:
    first, second = await stage.company(2)
    made = await prepare(stage, first)
    if judge in ("claim", "claim_for_worker", "duty"):
        await stage.clock.advance(seconds=30)
    await first.begin()
    await settled(JUDGES[judge](first))
    assert await is_blocked(first, made)
    registering = await waiting(stage.watch, second, register(second), behind=first)
    await first.end(ending)
    await registering
    await stage.audit()
    assert not await is_blocked(second, made)


async def test_workers_register_at_the_same_time_and_lift_the_same_verdict(stage: Stage) -> None:
    first, second, third = await stage.company(3)
    await stage.empty()
    made = await submit(first, policy=GPU, namespace="x")
    await first.judge_routes()
    assert await is_blocked(first, made)
    await first.begin()
    await register(first, namespace="x")
    assert not await is_blocked(first, made)
    other = await waiting(stage.watch, second, register(second, "w-2", namespace="y"), behind=first)
    last = await waiting(stage.watch, third, register(third, "w-3"))
    await first.commit()
    await other
    await last
    await stage.audit()
    assert await first.list_uncovered() == []


async def test_two_calls_that_judge_do_not_wait_for_each_other(stage: Stage) -> None:
    first, second = await stage.company(2)
    await stage.empty()
    made = await submit(first, policy=GPU)
    await first.begin()
    assert await first.judge_routes() == 1
    assert await settled(second.claim(**WORKER)) is None
    assert await settled(second.judge_routes()) == 0
    await first.rollback()
    assert not await is_blocked(second, made)
    assert await second.judge_routes() == 1
    await stage.audit()


async def test_an_unblock_beside_a_registration_lifts_the_verdict_once(stage: Stage) -> None:
    first, second = await stage.company(2)
    await stage.empty()
    made = await submit(first, policy=GPU)
    await first.judge_routes()
    await first.begin()
    await first.unblock_execution(made, expected_blocking_reason="waiting_for_capable_worker")
    registering = await waiting(stage.watch, second, register(second), behind=first)
    await first.commit()
    await registering
    assert not await is_blocked(first, made)
    await stage.audit()
