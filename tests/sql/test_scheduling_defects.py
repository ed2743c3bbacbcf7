"""What other engines got wrong with claims, where no test of a rule shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.grant import Granted, NoWork
from flowfabric.values.ids import ExecutionId
from flowfabric.values.policies import ExecutionPolicy
from tests.each import each
from tests.interleave import Stage, settled
from tests.sql.test_budgets import make
from tests.support import OTHER, WORKER, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

Way = Callable[..., Awaitable[Any]]
WAYS: dict[str, Way] = {
    "claim": lambda engine, **who: engine.claim(**who),
    "claim_many": lambda engine, **who: engine.claim_many(**who, limit=20),
    "claim_many of a namespace": lambda engine, **who: engine.claim_many(**who, limit=20, namespace="n"),
    "claim_lanes": lambda engine, **who: engine.claim_lanes({"default": 20}, **who, limit=20),
    "claim_for_worker": lambda engine, **who: engine.claim_for_worker(**who),
    "claim_for_worker, many": lambda engine, **who: engine.claim_for_worker(**who, max_grants=20),
}


async def taken(way: str, engine: ff.Engine, **who: str) -> list[ExecutionId]:
    found = await WAYS[way](engine, **who)
    if found is None or isinstance(found, NoWork):
        return []
    return [
        one.grant.execution_id if isinstance(one, Granted) else one.execution_id
        for one in (found if isinstance(found, list) else [found])
    ]


@each("way", WAYS)
async def test_a_claim_locks_what_it_takes_and_nothing_else(stage: Stage, way: str) -> None:
    first, second = await stage.company(2)
    await stage.empty()
    made = [await submit(first, namespace="n") for _ in range(10)]
    await first.begin()
    (one,) = [claimed.execution_id for claimed in await first.claim_many(**OTHER, limit=1)]
    others = await settled(taken(way, second, **WORKER))
    await first.commit()
    assert one == made[0]
    assert others == (made[1:2] if way in ("claim", "claim_for_worker") else made[1:])
    await stage.audit()


@each("way", WAYS)
async def test_no_way_to_claim_passes_over_a_limit(engine: ff.Engine, way: str) -> None:
    budget = await make(engine, {"a": 100, "b": 10})
    await engine.report_usage_admin(budget, dimensions=["b"], deltas=[10])
    quota = (await engine.create_quota_policy(name=way, max_concurrent=1)).quota_policy_id
    capped = ExecutionPolicy(quota_policy_ids=(quota,))
    await started(engine, policy=capped)
    for policy in (capped, ExecutionPolicy(budget_ids=(budget,))):
        await submit(engine, policy=policy, namespace="n", priority=9)
    free = await submit(engine, namespace="n")
    assert await taken(way, engine, **WORKER) == [free], "what is denied does not hide what is behind it"
    assert await taken(way, engine, **WORKER) == []
