"""Results that upstreams pass to downstreams: fixed when the group is decided, the same for every attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import StateError
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import FlowSubmitted, NewEdge, NewNode
from flowfabric.values.joins import AnyOf, OnSatisfied
from flowfabric.values.lease import Operator
from tests.ids import home
from tests.support import CheckedEngine, Clock, until_blocked

pytestmark = pytest.mark.both_servers

WORKER = {"worker_id": "w", "worker_instance_id": "w-1"}


def node(name: str, *after: str, **fields: Any) -> NewNode:
    return NewNode(
        name=name,
        execution=NewExecution(execution_kind="k", input_payload=name.encode()),
        after=[NewEdge(upstream=one, passes_result=True) for one in after],
        **fields,
    )


async def claimed(engine: ff.Engine) -> dict[str, Any]:
    """What can be claimed now, by the names of the nodes."""
    return {one.input_payload.decode(): one for one in await engine.claim_many(limit=100, **WORKER)}


def results(flow: FlowSubmitted, one: Any) -> dict[str, bytes | None]:
    names = {execution_id: name for name, execution_id in flow.nodes.items()}
    return {names[upstream]: passed.result for upstream, passed in one.inputs.items()}


async def test_an_upstream_that_was_stamped_later_and_counted_earlier_is_passed(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    # The end of a2 reads the clock first and comes to the group last.
    flow = await engine.submit_flow([node("a1"), node("a2"), node("b", "a1", "a2")])
    held = await claimed(engine)
    await sql.execute(
        """
        create function public.wait_here() returns trigger language plpgsql as $$
        begin
            if new.id = tg_argv[0]::uuid then perform pg_advisory_xact_lock(4711); end if;
            return new;
        end $$;
        """
    )
    await sql.execute(
        "create trigger wait_here before insert on flowfabric.event for each row execute function"
        f" public.wait_here('{flow.nodes['a2']}')"
    )
    async with sql.transaction():
        await sql.execute("select pg_advisory_xact_lock(4711)")
        late = asyncio.create_task(engine.complete(held["a2"].handle, result=b"2"))
        await until_blocked(sql)
        await engine.complete(held["a1"].handle, result=b"1")
    await late
    while (await engine.dispatch_cascades()).seen:
        pass
    assert results(flow, (await claimed(engine))["b"]) == {"a1": b"1", "a2": b"2"}


async def test_a_success_after_the_decision_is_not_passed_to_any_attempt(engine: CheckedEngine, clock: Clock) -> None:
    any_of = AnyOf(OnSatisfied.LET_RUN)
    flow = await engine.submit_flow([node("a1"), node("a2"), node("b", "a1", "a2", policy=any_of)])
    held = await claimed(engine)
    await engine.complete(held["a1"].handle, result=b"1")
    first = (await claimed(engine))["b"]
    assert results(flow, first) == {"a1": b"1"}
    await engine.complete(held["a2"].handle, result=b"2")
    await engine.release(first.handle)
    assert results(flow, (await claimed(engine))["b"]) == {"a1": b"1"}


async def test_passed_results_are_kept_while_the_upstream_is_replayed(engine: CheckedEngine) -> None:
    flow = await engine.submit_flow([node("a"), node("b", "a")])
    await engine.complete((await claimed(engine))["a"].handle, result=b"1")
    await engine.replay_execution(flow.nodes["a"])
    held = await claimed(engine)
    assert results(flow, held["b"]) == {"a": b"1"}
    await engine.complete(held["a"].handle, result=b"2")
    await engine.release(held["b"].handle)
    again = (await claimed(engine))["b"]
    assert results(flow, again) == {"a": b"1"}  # as the attempt was given it
    await engine.complete(again.handle)
    await engine.replay_execution(flow.nodes["b"])
    assert results(flow, (await claimed(engine))["b"]) == {"a": b"2"}  # a new run: the newest there is


async def test_an_upstream_is_redacted_once_no_node_needs_it_and_leaves_nothing_behind(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    flow = await engine.submit_flow([node("a"), node("b", "a")])
    await engine.complete((await claimed(engine))["a"].handle, result=b"secret")
    await engine.replay_execution(flow.nodes["a"])
    held = await claimed(engine)
    await engine.complete(held["a"].handle, result=b"secret")
    with pytest.raises(StateError, match=f"execution_needed: needed by {flow.nodes['b']}"):
        await engine.redact_execution(flow.nodes["a"])
    assert results(flow, held["b"]) == {"a": b"secret"}
    await engine.complete(held["b"].handle)
    await engine.redact_execution(flow.nodes["a"])
    assert await sql.fetchval("select kept_result from flowfabric.edge") == b""


async def test_plain_claims_do_not_read_passed_results(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    await engine.create_many([NewExecution(execution_kind="k")] * 20)
    flow = await engine.submit_flow([node("a"), node("b", "a")])
    await sql.execute("set track_functions = 'pl'")

    async def calls_of_a_claim() -> int | None:
        async with sql.transaction():
            await sql.fetch(
                "select * from flowfabric.claim('default', null, '{}', 'w', 'w-1', 30000, 100,"
                " null, null, null, false, null, false)"
            )
            found: int | None = await sql.fetchval(
                "select pg_stat_get_xact_function_calls('flowfabric.inputs_of'::regproc)"
            )
            return found

    assert not await calls_of_a_claim()
    await engine.complete(Operator(flow.nodes["a"]), result=b"1")
    assert await calls_of_a_claim() == 1


@pytest.mark.parametrize(
    "reason", ["paused_by_operator", "paused_by_policy", "waiting_for_budget", "waiting_for_quota"]
)
async def test_an_execution_stays_held_back_when_its_dependencies_are_satisfied(
    engine: CheckedEngine, reason: str
) -> None:
    made = await engine.create_flow()
    upstream, downstream = [
        (await engine.create_execution(execution_kind="k", flow_id=made.flow_id)).execution_id for _ in range(2)
    ]
    await engine.add_executions_to_flow(made.flow_id, [upstream, downstream])
    await engine.block_execution_for_admission(downstream, reason)
    edge = {"edge_id": upstream, "upstream_execution_id": upstream, "downstream_execution_id": downstream}
    await engine.stage_dependency_edge(made.flow_id, expected_graph_revision=2, **edge)
    await engine.apply_dependency_to_child(made.flow_id, **edge)
    info = await engine.read_execution_info(downstream)
    assert info is not None
    assert info.public_state is ff.State.WAITING_CHILDREN
    [held] = await engine.claim_many(limit=10, **WORKER)
    await engine.complete(held.handle)
    assert await engine.claim_many(limit=10, **WORKER) == []
    found = await engine.read_execution(downstream)
    assert found is not None
    assert str(found.blocking_reason) == reason
    await engine.unblock_execution(downstream, expected_blocking_reason=reason)
    assert len(await engine.claim_many(limit=10, **WORKER)) == 1


async def test_a_pause_may_be_lifted_while_dependencies_are_waited_for(engine: CheckedEngine) -> None:
    flow = await engine.submit_flow([node("a")])
    late = await engine.create_execution(execution_kind="k", input_payload=b"late", flow_id=flow.flow_id)
    await engine.add_execution_to_flow(flow.flow_id, late.execution_id)
    await engine.block_execution_for_admission(late.execution_id, "paused_by_operator")
    edge = {
        "edge_id": late.execution_id,
        "upstream_execution_id": flow.nodes["a"],
        "downstream_execution_id": late.execution_id,
    }
    await engine.stage_dependency_edge(flow.flow_id, expected_graph_revision=2, **edge)
    await engine.apply_dependency_to_child(flow.flow_id, **edge)
    await engine.unblock_execution(late.execution_id)
    await engine.complete((await claimed(engine))["a"].handle)
    assert "late" in await claimed(engine)


async def test_reading_a_flow_takes_time_in_proportion_to_its_size(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    nodes = [node("n0"), *(node(f"n{n}", f"n{n - 1}") for n in range(1, 2000))]
    flow = await engine.submit_flow(nodes)
    plan = await sql.fetchval(
        "select prosrc from pg_proc where proname = 'describe_flow' and pronamespace = 'flowfabric'::regnamespace"
    )
    body = plan.replace("p_partition", str(home(flow.nodes["n0"]))).replace("p_flow", f"'{flow.flow_id}'::uuid")
    explained = "\n".join(row[0] for row in await sql.fetch(f"explain (analyze, timing off, costs off) {body}"))
    assert "Rows Removed by Join Filter" not in explained
    found = await engine.describe_flow(flow.flow_id)
    assert found is not None
    assert len(found.edge_groups) == 1999
