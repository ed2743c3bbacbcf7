"""Queues of the duties of flows: a blocked entry does not delay the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.middleware import MemorySink, Metrics
from flowfabric.middleware.layered import layer
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import FlowSubmitted, NewEdge, NewNode
from flowfabric.values.joins import AnyOf
from tests.support import Clock

pytestmark = pytest.mark.both_servers

WORKER = {"worker_id": "w", "worker_instance_id": "w-1"}


def race(*names: str) -> list[NewNode]:
    new = NewExecution(execution_kind="k")
    return [
        *(NewNode(name=name, execution=new) for name in names),
        NewNode(name="join", execution=new, after=[NewEdge(upstream=name) for name in names], policy=AnyOf()),
    ]


async def states(engine: ff.Engine, flow: FlowSubmitted) -> dict[str, str]:
    return {one.name: one.state.value for one in await engine.list_flow_members(flow.flow_id)}


async def refuse_to_end(sql: asyncpg.Connection[Any], execution_id: ff.ExecutionId) -> None:
    await sql.execute(
        """
        create function public.refuse() returns trigger language plpgsql as $$
        begin
            if new.id = tg_argv[0]::uuid and new.completed_at is not null then raise exception 'not this one'; end if;
            return new;
        end $$
        """
    )
    await sql.execute(
        "create trigger refuse before update on flowfabric.execution for each row execute function"
        f" public.refuse('{execution_id}')"
    )


async def test_a_sibling_that_cannot_be_cancelled_keeps_no_other_waiting(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    first = await plain_engine.submit_flow(race("a", "b", "c"))
    second = await plain_engine.submit_flow(race("a", "b", "c"))
    held = {one.execution_id: one.handle for one in await plain_engine.claim_many(limit=10, **WORKER)}
    for flow in (first, second):
        await plain_engine.complete(held[flow.nodes["a"]])
    await refuse_to_end(sql, first.nodes["b"])
    passes = [await plain_engine.cancel_siblings() for _ in range(4)]
    assert {one.action for one in passes} <= {"more", "drained", "busy"}
    assert sum(one.failed for one in passes) > 0
    assert "not this one" in {one.message for one in passes}
    assert await states(plain_engine, first) == {"a": "completed", "b": "active", "c": "cancelled", "join": "waiting"}
    assert await states(plain_engine, second) == {
        "a": "completed", "b": "cancelled", "c": "cancelled", "join": "waiting",
    }  # fmt: skip
    await sql.execute("drop trigger refuse on flowfabric.execution")
    assert (await plain_engine.cancel_siblings()).action == "drained"
    assert (await states(plain_engine, first))["b"] == "cancelled"


@pytest.mark.parametrize("skips", [True, False])
async def test_the_dispatcher_commits_synchronously_where_it_ends_something(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], skips: bool
) -> None:
    """An end that a reader has seen is durable. A resolved edge is found pending again after a crash."""
    new = NewExecution(execution_kind="k")
    chain = [NewNode(name="a", execution=new)]
    chain += [NewNode(name=name, execution=new, after=[NewEdge(upstream=up)]) for up, name in ("ab", "bc")]
    flow = await plain_engine.submit_flow(chain)
    (held,) = await plain_engine.claim_many(limit=1, **WORKER)
    if skips:
        await plain_engine.fail(held.handle, "no")  # skips b, and leaves c to the dispatcher
    else:
        async with sql.transaction():
            await sql.execute("select from flowfabric.edge_group for update")  # leaves b to it
            await plain_engine.complete(held.handle)
    async with sql.transaction():
        await sql.execute("set local synchronous_commit = on")
        resolved = await sql.fetchval(
            "select resolved from flowfabric.dispatch_cascades(100, 100, null, null, null, null, null, null, null)"
        )
        commits = await sql.fetchval("select current_setting('synchronous_commit')")
    assert (resolved, commits) == (1, "on" if skips else "off")
    assert await states(plain_engine, flow) == (
        {"a": "failed", "b": "skipped", "c": "skipped"}
        if skips
        else {"a": "completed", "b": "waiting", "c": "waiting_children"}
    )


async def test_siblings_that_still_run_are_not_forgotten(plain_engine: ff.Engine) -> None:
    flow = await plain_engine.submit_flow(race("a", "b", "c"))
    held = {one.execution_id: one.handle for one in await plain_engine.claim_many(limit=10, **WORKER)}
    await plain_engine.complete(held[flow.nodes["a"]])
    group = (flow.flow_id, flow.nodes["join"])
    assert await plain_engine.drain_sibling_cancel_group(*group) == "siblings_alive"
    assert await states(plain_engine, flow) == {"a": "completed", "b": "active", "c": "active", "join": "waiting"}
    assert (await plain_engine.cancel_siblings()).cancelled == 2
    assert await plain_engine.drain_sibling_cancel_group(*group) == "already_drained"
    assert await plain_engine.audit(events=True) == []


async def test_calls_about_flows_are_counted(plain_engine: ff.Engine, clock: Clock) -> None:
    meter = Metrics()
    engine = layer(plain_engine, [meter])
    flow = await engine.submit_flow(race("a", "b", "c"))
    held = {one.execution_id: one.handle for one in await engine.claim_many(limit=10, **WORKER)}
    await engine.complete(held[flow.nodes["a"]])
    assert await engine.reconcile_sibling_cancel_group(flow.flow_id, flow.nodes["join"]) == "no_op"
    await engine.complete(held[flow.nodes["b"]])
    await engine.cancel_siblings()
    flows = [await engine.submit_flow(race("a", "b")[:2]) for _ in range(2)]
    for one in flows:
        await engine.cancel_flow(one.flow_id, reason="x", wait=False)
    await clock.advance(minutes=5)
    assert isinstance(meter.sink, MemorySink)
    await engine.reconcile_cancellations(limit=1)
    assert meter.sink.snapshot().gauges == {"flowfabric_cancel_backlog_depth{}": 1.0}
    await engine.reconcile_cancellations()
    seen = meter.sink.snapshot()
    assert seen.gauges == {"flowfabric_cancel_backlog_depth{}": 0.0}
    assert seen.counts == {
        'flowfabric_claims_total{lane="default",result="granted"}': 3,
        'flowfabric_edge_group_policy_total{policy="any_of"}': 1,
        'flowfabric_sibling_cancel_dispatched_total{reason="sibling_quorum_satisfied"}': 2,
        'flowfabric_sibling_cancel_disposition_total{disposition="cancelled"}': 1,
        'flowfabric_sibling_cancel_disposition_total{disposition="already_terminal"}': 1,
        'flowfabric_sibling_cancel_reconcile_total{action="no_op"}': 1,
    }


async def test_locked_members_keep_no_other_waiting(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    new = NewExecution(execution_kind="k")
    flow = await plain_engine.submit_flow([NewNode(name=f"n{n}", execution=new) for n in range(6)])
    await plain_engine.cancel_flow_header(flow.flow_id, grace=timedelta())
    lowest = sorted(one for one in flow.nodes.values())[:2]
    async with sql.transaction():
        await sql.fetch("select 1 from flowfabric.execution where id = any ($1) for update", lowest)
        done = await plain_engine.reconcile_cancellations(members=2)
        assert (done.handled, done.failed, done.more) == (4, 0, False)
    assert (await plain_engine.reconcile_cancellations()).handled == 2
    assert await plain_engine.read_cancel_backlog(flow.flow_id) is None


async def test_edges_of_a_locked_group_are_no_progress(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    """Otherwise the dispatcher would continue at once, again and again, until the lock is released."""
    flow = await plain_engine.submit_flow(race("a", "b"))
    held = {one.execution_id: one.handle for one in await plain_engine.claim_many(limit=10, **WORKER)}
    async with sql.transaction():
        await sql.fetch("select 1 from flowfabric.edge_group for update")
        await plain_engine.complete(held[flow.nodes["a"]])
        done = await plain_engine.dispatch_cascades()
        assert (done.seen, done.finished, done.resolved, done.more) == (1, 0, 0, False)
    done = await plain_engine.dispatch_cascades()
    assert (done.seen, done.finished, done.resolved, done.more) == (1, 1, 1, True)
    assert (await states(plain_engine, flow))["join"] == "waiting"


async def test_an_end_is_finished_with_its_last_edge_although_the_limit_is_reached(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    flows = [await plain_engine.submit_flow(race("a", "b")) for _ in range(2)]
    held = {one.execution_id: one.handle for one in await plain_engine.claim_many(limit=10, **WORKER)}
    async with sql.transaction():
        await sql.fetch("select 1 from flowfabric.edge_group for update")
        for flow in flows:
            await plain_engine.complete(held[flow.nodes["a"]])
    for left in (2, 1):
        done = await plain_engine.dispatch_cascades(edges=1)
        assert (done.seen, done.finished, done.resolved) == (left, 1, 1)


async def test_flows_that_nothing_was_put_into_are_forgotten(plain_engine: ff.Engine, clock: Clock) -> None:
    empty = await plain_engine.create_flow()
    full = await plain_engine.submit_flow(
        [NewNode(name="a", execution=NewExecution(execution_kind="k", execution_deadline_at=timedelta(days=400)))]
    )
    await clock.advance(seconds=13 * 86_400)
    await plain_engine.sweep()
    assert await plain_engine.describe_flow(empty.flow_id) is not None
    await clock.advance(seconds=2 * 86_400)
    await plain_engine.sweep()
    assert await plain_engine.describe_flow(empty.flow_id) is None
    assert await plain_engine.describe_flow(full.flow_id) is not None
