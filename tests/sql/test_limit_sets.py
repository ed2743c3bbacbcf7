"""Limit sets: the budgets and quota policies of an execution as one number, and the routes of limited executions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg
import pytest

from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import FlowId, fit_partition, mint_uuid
from flowfabric.values.policies import ExecutionPolicy
from tests.ids import home
from tests.support import WORKER, CheckedEngine, started, submit

pytestmark = pytest.mark.both_servers

ONE, TWO, THREE = (UUID(int=n) for n in (1, 2, 3))


async def _sets(sql: asyncpg.Connection[Any]) -> list[tuple[Any, ...]]:
    return [
        tuple(row)
        for row in await sql.fetch(
            "select budget_ids, quota_ids, quota_keys from flowfabric.limit_set order by 1, 2, 3"
        )
    ]


async def test_the_order_and_repetition_of_limits_make_no_other_set(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    first = await submit(engine, policy={"budget_ids": [str(TWO), str(ONE)], "quota_policy_id": str(THREE)})
    await submit(engine, policy={"budget_ids": [str(ONE), str(TWO), str(ONE)], "quota_policy_ids": [str(THREE)]})
    assert await _sets(sql) == [([ONE, TWO], [THREE], ["default"])]
    record = await engine.read_execution(first)
    assert record is not None
    assert (record.budget_ids, record.quota_policy_ids, record.quota_policy_id) == ((ONE, TWO), (THREE,), THREE)


async def test_an_execution_without_limits_has_neither_a_set_nor_a_limited_route(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    plain = await submit(engine, policy={"budget_ids": [], "quota_policy_ids": []})
    record = await engine.read_execution(plain)
    assert record is not None
    assert (record.budget_ids, record.quota_policy_ids, record.quota_policy_id) == ((), (), None)
    assert await _sets(sql) == []
    assert await sql.fetchval("select bool_or(limited) from flowfabric.route") is False


async def test_many_sets_share_one_second_route(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    items = [
        NewExecution(execution_kind="k", policy=ExecutionPolicy(budget_ids=(mint_uuid(),) if n % 2 else ()))  # type: ignore[arg-type]
        for n in range(40)
    ]
    made = await engine.create_many(items)
    assert len(made) == 40
    assert len(await _sets(sql)) == 20
    found = await sql.fetch("select limited, count(*) from flowfabric.route where kind = 'k' group by 1 order by 1")
    assert [tuple(row) for row in found] == [(False, 1), (True, 1)]
    claimed = await engine.claim_many(**WORKER, limit=100)
    assert [one.execution_id for one in claimed] == [one.execution_id for one in made]


async def test_members_of_flows_and_children_have_limits_too(engine: CheckedEngine) -> None:
    policy = ExecutionPolicy(quota_policy_ids=(ONE, TWO))  # type: ignore[arg-type]
    parent = await started(engine)
    seed = mint_uuid()
    flow_id = FlowId(fit_partition(seed, home(parent.execution_id), 256))
    item = NewExecution(execution_kind="member", policy=policy)
    await engine.submit_child_flow(
        parent.handle,
        "f",
        0,
        [NewNode(name="a", execution=item), NewNode(name="b", execution=NewExecution(execution_kind="b"))],
        flow_id=flow_id,
        seed=seed,
        flow_kind="f",
    )
    await engine.submit_child(parent.handle, "c", 0, item)
    claimed = await engine.claim_many(**WORKER, limit=10)
    records = [await engine.read_execution(one.execution_id) for one in claimed]
    assert sorted(record.quota_policy_ids for record in records if record) == [(), (ONE, TWO), (ONE, TWO)]


async def test_a_set_that_is_about_to_be_removed_is_stored_again(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    await submit(engine, policy={"budget_ids": [str(ONE)]})
    await sql.execute("update flowfabric.limit_set set unused_since = flowfabric.now()")
    await submit(engine, policy={"budget_ids": [str(ONE)]})
    assert await _sets(sql) == [([ONE], [], []), ([ONE], [], [])]
    for one in await engine.claim_many(**WORKER, limit=10):
        record = await engine.read_execution(one.execution_id)
        assert record is not None
        assert record.budget_ids == (ONE,)
