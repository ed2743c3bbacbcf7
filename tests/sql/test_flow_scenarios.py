"""The acceptance scenarios of flows.

The tests run the duties themselves: `drain` runs all of them until they are idle. Counters are written succeeded,
failed, skipped, n.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric._duties.cascade import Cascade
from flowfabric._duties.edge_repair import EdgeRepair
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric._duties.sibling_repair import SiblingRepair
from flowfabric.engine.edges import EdgePlace
from flowfabric.errors import Conflict, Contention, StateError
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import (
    Added,
    Advanced,
    AlreadyMember,
    Applied,
    CancellationPolicy,
    CancellationScheduled,
    Edge,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowCancelled,
    NoOp,
    PartiallyCancelled,
)
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.joins import AllOf, AnyOf, OnSatisfied, Quorum
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.ids import home, id_in
from tests.sql.cases import outcome
from tests.sql.flowing import (
    BUILDS,
    CHAIN,
    DIAMOND,
    IMPOSSIBLE,
    LONG,
    PENDING,
    SATISFIED,
    Build,
    Flow,
    drain,
    empty_flow,
    fan_in,
    hold,
    stored,
    submitted,
)
from tests.support import WORKER, CheckedEngine, Clock, submit

HOUR = timedelta(hours=1)
LET_RUN = OnSatisfied.LET_RUN
WON, LOST = "sibling_quorum_satisfied", "sibling_quorum_impossible"

every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


async def reasons(flow: Flow, *names: str) -> set[tuple[str, str | None, str | None]]:
    records = [await flow.record(name) for name in names]
    return {(str(one.public_state), one.cancellation_reason, one.cancelled_by) for one in records}


async def suspend(flow: Flow, name: str) -> None:
    held = await flow.claim(name)
    await flow.engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))


@pytest_asyncio.fixture(loop_scope="session")
async def large(database: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[ff.Engine]:
    """An engine for much; audited at the end, without the log."""
    async with await ff.Engine.connect(database, notifications=False) as engine:
        yield engine
        await sql.execute("analyze")
        assert await engine.audit() == []


# Diamonds and chains


@every_build
async def test_all_but_the_first_node_of_a_diamond_wait_before_work_begins(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, DIAMOND)
    assert await flow.states() == {
        "a": "waiting", "b": "waiting_children", "c": "waiting_children", "d": "waiting_children",
    }  # fmt: skip
    assert [(await flow.group(name)).total_deps for name in "bcd"] == [1, 1, 2]


@every_build
async def test_the_end_of_the_first_node_releases_both_branches(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, DIAMOND)
    await flow.complete("a")
    await flow.drain()
    assert await flow.states("b", "c", "d") == {"b": "waiting", "c": "waiting", "d": "waiting_children"}


@every_build
async def test_a_join_waits_while_one_of_its_two_has_not_ended(
    engine: CheckedEngine, clock: Clock, build: Build
) -> None:
    flow = await build(engine, DIAMOND)
    await flow.complete("a", "c")
    await flow.drain()
    await clock.advance(seconds=1)
    await flow.drain()
    assert await flow.state("d") == "waiting_children"
    group = await flow.group("d")
    assert (group.satisfied_count, group.running_count, group.group_state) == (1, 1, PENDING)


@every_build
async def test_a_join_runs_when_both_have_ended(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, DIAMOND)
    await flow.complete("a", "c", "b")
    await flow.drain()
    assert await flow.state("d") == "waiting"
    await flow.complete("d")
    assert await flow.state("d") == "completed"
    assert (await flow.summary()).public_flow_state == "completed"
    assert (await flow.describe()).public_flow_state == "open"


@every_build
async def test_a_join_is_skipped_when_one_branch_fails_and_the_other_runs_on(
    engine: CheckedEngine, build: Build
) -> None:
    flow = await build(engine, DIAMOND)
    await flow.complete("a")
    held = await flow.claim("c")
    await flow.fail("b")
    assert await flow.states("c", "d") == {"c": "active", "d": "skipped"}
    await engine.complete(held.handle, b"whole")
    await flow.drain()
    assert await flow.states() == {"a": "completed", "b": "failed", "c": "completed", "d": "skipped"}
    assert await engine.get_execution_result(flow["c"]) == b"whole"
    assert (await flow.summary()).public_flow_state == "failed"


@every_build
async def test_a_chain_is_skipped(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, CHAIN)
    await flow.fail("a")
    await Cascade(engine).run_once()
    assert await flow.states("b", "c", "d") == {"b": "skipped", "c": "skipped", "d": "skipped"}
    assert [await flow.outcomes(name) for name in "bcd"] == [["skipped"]] * 3
    assert (await flow.record("d")).total_attempt_count == 0
    assert (await engine.dispatch_cascades()).seen == 0


@every_build
async def test_an_event_is_delivered_twice(engine: CheckedEngine, sql: asyncpg.Connection[Any], build: Build) -> None:
    flow = await build(engine, {"a": (), "b": ("a",)})
    await flow.fail("a")
    (event,) = await flow.ends("a")
    await engine.dispatch_completion(event.cursor.position)
    before = await stored(sql)
    assert await engine.dispatch_completion(event.cursor.position) == NoOp()
    assert (await engine.cascade_completion(event)).resolved == 0
    assert await stored(sql) == before
    assert await flow.state("b") == "skipped"
    assert await flow.counts("b") == (0, 1, 0, 1)


# Races


@every_build
async def test_the_first_of_three_wins(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, fan_in(3), {"join": AnyOf()})
    running = await flow.claim("u2")
    await flow.complete("u1")
    assert await flow.state("join") == "waiting"
    assert (await flow.group("join")).group_state == SATISFIED
    assert await flow.counts("join") == (1, 0, 0, 3)
    released = (await flow.record("join")).last_transition_at
    await flow.drain()
    assert await reasons(flow, "u2", "u3") == {("cancelled", WON, "operator_override")}
    with pytest.raises(ff.FlowFabricError):
        await engine.complete(running.handle)
    assert await engine.list_sibling_cancels() == []
    assert await flow.counts("join") == (1, 2, 0, 3)
    assert (await flow.group("join")).group_state == SATISFIED
    assert (await flow.record("join")).last_transition_at == released
    await flow.complete("join")
    assert (await flow.summary()).public_flow_state == "completed"


@every_build
async def test_the_others_run_on(engine: CheckedEngine, clock: Clock, build: Build) -> None:
    flow = await build(engine, fan_in(3), {"join": AnyOf(LET_RUN)})
    await flow.complete("u1")
    satisfied_at = (await flow.group("join")).satisfied_at
    record = await flow.record("join")
    assert record.public_state == "waiting"
    await clock.advance(seconds=3)
    await flow.drain()
    assert await flow.states("u2", "u3") == {"u2": "waiting", "u3": "waiting"}
    await flow.complete("u2")
    await flow.fail("u3")
    await flow.drain()
    assert await flow.counts("join") == (2, 1, 0, 3)
    assert (await flow.group("join")).satisfied_at == satisfied_at
    assert await flow.record("join") == record


@every_build
async def test_a_quorum_is_reached(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, fan_in(5), {"join": Quorum(3)})
    await flow.complete("u1", "u2")
    await flow.drain()
    assert await flow.state("join") == "waiting_children"
    assert (await flow.group("join")).group_state == PENDING
    await flow.complete("u3")
    assert await flow.state("join") == "waiting"
    await flow.drain()
    assert await reasons(flow, "u4", "u5") == {("cancelled", WON, "operator_override")}


@every_build
async def test_a_quorum_cannot_be_reached(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, fan_in(5), {"join": Quorum(3)})
    await flow.fail("u1", "u2")
    await flow.drain()
    assert await flow.state("join") == "waiting_children"
    await flow.fail("u3")
    assert await flow.state("join") == "skipped"
    assert await flow.outcomes("join") == ["skipped"]
    await flow.drain()
    assert await reasons(flow, "u4", "u5") == {("cancelled", LOST, "operator_override")}


@every_build
async def test_the_survivors_of_a_lost_quorum_run_on(engine: CheckedEngine, build: Build) -> None:
    flow = await build(engine, fan_in(5), {"join": Quorum(3, LET_RUN)})
    await flow.fail("u1", "u2", "u3")
    await flow.drain()
    assert await flow.states("u4", "u5", "join") == {"u4": "waiting", "u5": "waiting", "join": "skipped"}
    await flow.complete("u4", "u5")
    assert await flow.counts("join") == (2, 3, 0, 5)


@every_build
async def test_a_skip_continues_under_every_policy(engine: CheckedEngine, build: Build) -> None:
    graph = {**fan_in(3, "mid"), "tail": ("mid",)}
    flow = await build(engine, graph, {"mid": Quorum(3, LET_RUN)})
    await flow.fail("u2")
    await flow.drain()
    assert await flow.states("mid", "tail") == {"mid": "skipped", "tail": "skipped"}
    assert await flow.states("u1", "u3") == {"u1": "waiting", "u3": "waiting"}


@every_build
async def test_any_of_waits_for_the_last(engine: CheckedEngine, build: Build) -> None:
    graph = {"root": (), "u1": (), "u2": ("root",), "u3": (), "join": ("u1", "u2", "u3")}
    flow = await build(engine, graph, {"join": AnyOf()})
    await flow.fail("u1")
    await flow.drain()
    assert await flow.state("join") == "waiting_children"
    await flow.fail("root")
    await flow.drain()
    assert await flow.states("u2", "join") == {"u2": "skipped", "join": "waiting_children"}
    await flow.cancel("u3")
    await flow.drain()
    assert await flow.state("join") == "skipped"
    assert await flow.counts("join") == (0, 2, 1, 3)


async def race(engine: ff.Engine, count: int, kind: str) -> FlowId:
    """So many upstreams of one kind, the first success decides."""
    ups = [NewNode(name=f"u{n}", execution=NewExecution(execution_kind=kind)) for n in range(count)]
    join = NewNode(
        name="join",
        execution=NewExecution(execution_kind="join"),
        after=[NewEdge(upstream=one.name) for one in ups],
        policy=Quorum(1),
    )
    return (await engine.submit_flow([*ups, join])).flow_id


@pytest.mark.parametrize("count", [50, 1500])
async def test_all_losers_of_a_large_race_are_cancelled(plain_engine: ff.Engine, count: int) -> None:
    flow_id = await race(plain_engine, count, "runner")
    running = await hold(plain_engine, 20)
    await plain_engine.complete(running[0].handle)
    await drain(plain_engine)
    members = await plain_engine.list_flow_members(flow_id)
    found = [(str(one.state), one.cancellation_reason) for one in members if one.name != "join"]
    assert sorted(found, key=str) == [("cancelled", WON)] * (count - 1) + [("completed", None)]
    assert await plain_engine.list_sibling_cancels() == []
    assert [str(one.state) for one in members if one.name == "join"] == ["waiting"]


async def test_two_dispatchers_at_eight_groups(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    flows = [await race(plain_engine, 12, f"runner-{n}") for n in range(8)]
    first = [(await hold(plain_engine, 1, kinds=[f"runner-{n}"]))[0].handle for n in range(8)]
    await plain_engine.complete_many(list(first))
    assert len(await plain_engine.list_sibling_cancels()) == 8
    async with await ff.Engine.connect(database, notifications=False) as other:
        await asyncio.gather(*(drain(one) for one in (plain_engine, other, plain_engine, other)))
    await drain(plain_engine)
    assert await plain_engine.list_sibling_cancels() == []
    for flow_id in flows:
        states = [str(one.state) for one in await plain_engine.list_flow_members(flow_id)]
        assert sorted(states) == ["cancelled"] * 11 + ["completed", "waiting"]
    events = await sql.fetch("select id, count(*) as n from flowfabric.event where outcome = 'cancelled' group by id")
    assert [row["n"] for row in events] == [1] * 88


async def test_a_dispatcher_dies_before_or_after_the_cancels(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    """Dies before: the entry is as the decision left it. Dies after: all siblings have ended, the entry is there."""
    before = await submitted(engine, fan_in(3), {"join": AnyOf()})
    await before.claim("u2")
    await before.complete("u1")
    (entry,) = await engine.list_sibling_cancels()
    assert set(entry.siblings) == {before["u2"], before["u3"]}
    rows = await stored(sql)
    assert await engine.reconcile_sibling_cancel_group(before.id, before["join"]) == "no_op"
    assert await SiblingRepair(engine).run_once() == 0
    assert await stored(sql) == rows
    await drain(engine)
    assert await reasons(before, "u2", "u3") == {("cancelled", WON, "operator_override")}
    assert await engine.list_sibling_cancels() == []

    after = await submitted(engine, fan_in(3), {"join": AnyOf()})
    await after.complete("u1")
    await after.cancel("u2", "u3")
    assert len(await engine.list_sibling_cancels()) == 1
    assert await engine.reconcile_sibling_cancel_group(after.id, after["join"]) == "completed_drain"
    assert await engine.list_sibling_cancels() == []
    assert await engine.reconcile_sibling_cancel_group(after.id, after["join"]) == "no_op"
    assert await engine.drain_sibling_cancel_group(after.id, after["join"]) == "already_drained"
    reason = "select cancel_siblings_reason from flowfabric.edge_group where downstream = $1"
    assert await sql.fetchval(reason, after["join"]) == WON
    assert (await after.group("join")).satisfied_at is not None


# The outbox


async def test_the_process_dies_after_the_first_chunk(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    root = NewNode(name="root", execution=NewExecution(execution_kind="root"))
    leaves = [
        NewNode(name=f"n{n}", execution=NewExecution(execution_kind="leaf"), after=[NewEdge(upstream="root")])
        for n in range(1200)
    ]
    flow = await plain_engine.submit_flow([root, *leaves])
    (held,) = await hold(plain_engine, 1)
    await plain_engine.complete(held.handle)
    count = "select count(*) from flowfabric.execution where state = $1"
    assert await sql.fetchval(count, "waiting") == 500
    (pending,) = await sql.fetch("select seq from flowfabric.pending_cascade")
    first = await sql.fetch("select id, transitioned_at from flowfabric.execution where state = 'waiting'")
    claimed = await hold(plain_engine, 100)
    assert await plain_engine.dispatch_completion(pending["seq"]) == Advanced(700)
    assert await plain_engine.dispatch_completion(pending["seq"]) == NoOp()
    assert await sql.fetchval(count, "waiting") == 1100
    assert await sql.fetchval(count, "active") == 100
    again = {row["id"]: row["transitioned_at"] for row in await sql.fetch("select * from flowfabric.execution")}
    busy = {one.execution_id for one in claimed}
    assert all(again[row["id"]] == row["transitioned_at"] for row in first if row["id"] not in busy)
    assert await sql.fetchval("select count(*) from flowfabric.ready") == 1100
    assert (await plain_engine.flow_progress(flow.flow_id))[:2] == (1201, 1200)


async def test_one_sweep_drains_a_chain(engine: CheckedEngine) -> None:
    flow = await submitted(engine, CHAIN)
    await flow.fail("a")
    swept = 0
    while (sweep := await engine.dispatch_cascades(limit=1000, stale=timedelta())).seen:
        swept += sweep.finished
    assert await flow.states("b", "c", "d") == {"b": "skipped", "c": "skipped", "d": "skipped"}
    assert swept == 2, "b and c had downstreams"
    assert (await engine.dispatch_cascades(stale=timedelta())).seen == 0
    good = await submitted(engine, CHAIN)
    for name, following in zip("abc", "bcd", strict=True):
        await good.complete(name)
        await engine.dispatch_cascades(stale=timedelta())
        assert await good.state(following) == "waiting"


async def test_a_sweeper_keeps_to_its_tenant(engine: CheckedEngine, clock: Clock) -> None:
    flows = {name: await submitted(engine, CHAIN, namespace=name, tags={"app.i": name}) for name in ("a", "b", "c")}
    for flow in flows.values():
        await flow.fail("a")
    assert (await engine.dispatch_cascades(stale=timedelta(seconds=1))).seen == 0, "nothing is stale yet"
    await clock.advance(seconds=2)
    while (await engine.dispatch_cascades(filter=ScannerFilter(namespace="a"), stale=timedelta())).seen:
        pass
    assert {name: await flow.state("d") for name, flow in flows.items()} == {
        "a": "skipped", "b": "waiting_children", "c": "waiting_children",
    }  # fmt: skip
    tag = ScannerFilter(instance_tag=("app.i", "b"))
    while (await engine.dispatch_cascades(filter=tag, stale=timedelta())).seen:
        pass
    assert [await flows[name].state("d") for name in "bc"] == ["skipped", "waiting_children"]
    await drain(engine)


# Edges and ends in any order


@pytest.mark.parametrize(("end", "state", "decided"), [("ok", "waiting", SATISFIED), ("bad", "skipped", IMPOSSIBLE)])
async def test_the_upstream_ended_before_the_edge(engine: CheckedEngine, end: str, state: str, decided: str) -> None:
    flow = await empty_flow(engine, "a", "b")
    await (flow.complete("a") if end == "ok" else flow.fail("a"))
    assert await flow.join("a", "b") == Applied(0)
    assert await flow.state("b") == state
    assert (await flow.group("b")).group_state == decided


async def test_losers_that_come_late(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "u1", "u2", "u3", "join")
    await engine.set_edge_group_policy(flow.id, flow["join"], AnyOf())
    await flow.join("u1", "join")
    await flow.complete("u1")
    await flow.drain()
    for late in ("u2", "u3"):
        await flow.join(late, "join")
        assert await flow.state("join") == "waiting"
    await flow.drain()
    assert await reasons(flow, "u2", "u3") == {("cancelled", WON, "operator_override")}
    assert await flow.state("join") == "waiting"


async def test_a_quorum_with_too_few_edges_waits(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "u1", "u2", "u3", "join")
    await engine.set_edge_group_policy(flow.id, flow["join"], Quorum(3))
    for name in ("u1", "u2"):
        await flow.join(name, "join")
        await flow.complete(name)
        await flow.drain()
    assert (await flow.group("join")).group_state == PENDING
    assert await flow.state("join") == "waiting_children"
    await flow.join("u3", "join")
    assert await flow.state("join") == "waiting_children"
    await flow.complete("u3")
    assert await flow.state("join") == "waiting"


@pytest.mark.both_servers
@pytest.mark.parametrize(
    ("ref", "result", "cancelled", "expected"),
    [("result", b"X", False, b"X"), (None, b"X", False, b"own"), ("result", None, False, b"own"),
     ("result", b"X", True, b"own")],
    ids=["passed", "no reference", "no result", "downstream cancelled"],
)  # fmt: skip
async def test_a_result_is_passed(
    engine: CheckedEngine, ref: str | None, result: bytes | None, cancelled: bool, expected: bytes
) -> None:
    flow = await submitted(engine, {"a": (), "b": ("a",)}, ref=ref, input_payload=b"own")
    if cancelled:
        await flow.cancel("b")
    await flow.complete("a", result=result)
    await flow.drain()
    assert await flow.state("b") == ("cancelled" if cancelled else "waiting")
    assert (await engine.read_execution_context(flow["b"])).input_payload == expected


async def test_two_callers_with_one_revision(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b", "c")

    async def stage(upstream: str) -> str:
        return await outcome(
            engine.stage_dependency_edge(
                flow.id,
                edge_id=mint_uuid(),
                upstream_execution_id=flow[upstream],
                downstream_execution_id=flow["c"],
                expected_graph_revision=3,
            )
        )

    assert sorted(await asyncio.gather(stage("a"), stage("b"))) == ["Staged", "stale_graph_revision"]
    found = await flow.describe()
    assert (found.node_count, found.edge_count, found.graph_revision) == (3, 1, 4)


@pytest.mark.both_servers
async def test_edges_that_are_refused(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.stage("a", "b")
    await flow.stage("b", "c")
    known = dict(flow.edges)
    await flow.execution("stranger")
    before = await stored(sql)
    for upstream, downstream, kind in [
        ("c", "a", "cycle_detected"), ("a", "a", "self_referencing_edge"), ("a", "stranger", "execution_not_in_flow"),
        ("stranger", "a", "execution_not_in_flow"),
    ]:  # fmt: skip
        assert await outcome(flow.stage(upstream, downstream)) == kind
        assert await stored(sql) == before
    with pytest.raises(Conflict, match="dependency_already_exists") as refused:
        await engine.stage_dependency_edge(
            flow.id,
            edge_id=known["a>b"],
            upstream_execution_id=flow["a"],
            downstream_execution_id=flow["c"],
            expected_graph_revision=5,
        )
    assert refused.value.edge == await engine.describe_edge(flow.id, known["a>b"])
    assert await stored(sql) == before


async def chain(engine: ff.Engine, count: int, **fields: Any) -> tuple[FlowId, list[ExecutionId]]:
    nodes = [
        NewNode(
            name=f"n{n}",
            execution=NewExecution(**{"execution_kind": "link", **fields}),
            after=[NewEdge(upstream=f"n{n - 1}")] if n else [],
        )
        for n in range(count)
    ]
    made = await engine.submit_flow(nodes)
    return made.flow_id, list(made.nodes.values())


async def test_a_cycle_of_thousands(plain_engine: ff.Engine) -> None:
    count = sampling.examples(5000, of_a_sample=1000)
    flow_id, members = await chain(plain_engine, count)
    revision = 2 * count

    async def stage(upstream: ExecutionId, downstream: ExecutionId, revision: int) -> str:
        return await outcome(
            plain_engine.stage_dependency_edge(
                flow_id,
                edge_id=mint_uuid(),
                upstream_execution_id=upstream,
                downstream_execution_id=downstream,
                expected_graph_revision=revision,
            )
        )

    assert await stage(members[0], members[-1], revision - 1) == "Staged"
    assert await stage(members[-1], members[0], revision) == "cycle_detected"
    closing = [Edge(edge_id=mint_uuid(), upstream=members[-1], downstream=members[0])]
    more = [Edge(edge_id=mint_uuid(), upstream=members[1], downstream=members[-1])]
    with pytest.raises(Conflict, match=r"edges\[1\]"):
        await plain_engine.stage_and_apply_edges(flow_id, more + closing, expected_graph_revision=revision)
    assert await plain_engine.stage_and_apply_edges(flow_id, more, expected_graph_revision=revision) == revision + 1


async def test_a_policy_is_fixed_by_the_first_edge(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "x", "y")
    await flow.stage("a", "x")
    for policy in (Quorum(2), AnyOf(), AllOf()):
        with pytest.raises(ff.InvalidInput, match="already_fixed"):
            await engine.set_edge_group_policy(flow.id, flow["x"], policy)
    for name in ("x", "y"):
        with pytest.raises(ff.InvalidInput, match="k"):
            await engine.set_edge_group_policy(flow.id, flow[name], Quorum(0))
    answers = [await engine.set_edge_group_policy(flow.id, flow["y"], Quorum(k)) for k in (2, 2, 3)]
    assert answers == ["Set", "AlreadySet", "Set"]


async def test_who_may_be_added_to_a_flow(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a")
    partition = home(flow["a"])
    other = FlowId(id_in(partition))
    before = await stored(sql)
    with pytest.raises(ff.NotFound, match="flow"):
        await engine.add_execution_to_flow(other, flow["a"])
    with pytest.raises(ff.NotFound, match="execution"):
        await engine.add_execution_to_flow(flow.id, id_in(partition))
    with pytest.raises(ff.InvalidInput, match="partition_mismatch"):
        await engine.add_execution_to_flow(flow.id, id_in((partition + 1) % 256))
    assert await stored(sql) == before
    await engine.create_flow(other)
    before = await stored(sql)
    with pytest.raises(Conflict, match=str(flow.id)):
        await engine.add_execution_to_flow(other, flow["a"])
    assert await engine.add_execution_to_flow(flow.id, flow["a"]) == AlreadyMember(flow["a"], 1)
    assert await stored(sql) == before
    await flow.execution("b")
    assert await engine.add_execution_to_flow(flow.id, flow["b"]) == Added(flow["b"], 2)


# Parents that wait


async def family(engine: ff.Engine) -> tuple[Flow, Handle]:
    """A parent that runs, with two children it depends on."""
    flow = await empty_flow(engine, "p", "c1", "c2")
    held = await flow.claim("p")
    await flow.join("c1", "p")
    await flow.join("c2", "p")
    assert await flow.state("p") == "active"
    return flow, held.handle


async def test_a_parent_waits_for_its_children(engine: CheckedEngine) -> None:
    flow, handle = await family(engine)
    assert (await engine.wait_children(handle)).public_state == "waiting_children"
    vector = await flow.vector("p")
    assert vector == {
        "lifecycle_phase": "runnable", "ownership_state": "unowned", "eligibility_state": "blocked_by_dependencies",
        "blocking_reason": "waiting_for_children", "terminal_outcome": "none", "attempt_state": "attempt_interrupted",
        "public_state": "waiting_children",
    }  # fmt: skip
    assert (await flow.record("p")).blocking_detail == "waiting for child executions to complete"
    (attempt,) = await engine.list_attempts(flow["p"])
    assert attempt.attempt_lifecycle == "suspended"
    last = (await engine.list_events(flow["p"])).items[-1]
    assert (last.lease_type, last.reason) == ("revoked", "waiting_children")
    await flow.complete("c1")
    assert await flow.state("p") == "waiting_children"
    await flow.complete("c2")
    vector = await flow.vector("p")
    assert (vector["public_state"], vector["attempt_state"]) == ("waiting", "attempt_interrupted")
    await engine.issue_claim_grant(flow["p"], **WORKER)
    ids = {"lease_id": mint_uuid(), "attempt_id": mint_uuid()}
    with pytest.raises(Contention, match="use_claim_resumed_execution"):
        await engine.claim_execution(flow["p"], **WORKER, **ids, lease_ttl=LONG)
    again = await engine.claim_resumed_execution(flow["p"], **WORKER, lease_id=mint_uuid(), lease_ttl=LONG)
    assert again.handle.attempt_index == handle.attempt_index
    assert again.handle.attempt_id == handle.attempt_id
    assert again.handle.lease_epoch > handle.lease_epoch
    assert len(await engine.list_attempts(flow["p"])) == 1
    await engine.complete(again.handle)


async def test_the_children_were_quicker(engine: CheckedEngine) -> None:
    flow, handle = await family(engine)
    await flow.complete("c1", "c2")
    assert (await engine.wait_children(handle)).public_state == "waiting"
    vector = await flow.vector("p")
    assert (vector["public_state"], vector["attempt_state"]) == ("waiting", "attempt_interrupted")
    again = await flow.claim("p")
    assert again.handle.attempt_index == handle.attempt_index
    # Another round: more children while it runs, and it waits again.
    await flow.member("c3")
    await flow.join("c3", "p")
    assert (await engine.wait_children(again.handle)).public_state == "waiting_children"
    await flow.complete("c3")
    await flow.complete("p")
    alone = await submit(engine, execution_kind="alone")
    held = (await hold(engine, 1))[0]
    assert held.execution_id == alone
    assert (await engine.wait_children(held.handle)).public_state == "waiting", "nothing to wait for"


@pytest.mark.parametrize("parked", [True, False], ids=["parked", "running"])
async def test_a_child_fails(engine: CheckedEngine, parked: bool) -> None:
    flow, handle = await family(engine)
    if parked:
        await engine.wait_children(handle)
    await flow.fail("c1")
    await flow.drain()
    assert await flow.state("p") == "skipped"
    (attempt,) = await engine.list_attempts(flow["p"])
    assert (attempt.attempt_lifecycle, attempt.failure_reason) == ("ended_cancelled", "dependency_impossible")
    assert (await flow.vector("p"))["attempt_state"] == "attempt_terminal"
    for call in (engine.renew(handle), engine.complete(handle), engine.wait_children(handle)):
        with pytest.raises(ff.FlowFabricError):
            await call


# Cancelling a flow


async def test_cancel_all_cancels_every_member_that_has_not_ended(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    flow = await submitted(engine, {"waiting": (), "active": (), "done": ()})
    await flow.complete("done", result=b"kept")
    held = await flow.claim("active")
    done = await flow.record("done")
    answer = await engine.cancel_flow(flow.id, reason="stop", wait=True)
    assert isinstance(answer, FlowCancelled)
    assert set(answer.member_execution_ids) == set(flow.members.values())
    assert await reasons(flow, "waiting", "active") == {("cancelled", "stop", "operator_override")}
    assert await flow.record("done") == done
    assert await engine.get_execution_result(flow["done"]) == b"kept"
    with pytest.raises(ff.FlowFabricError):
        await engine.complete(held.handle)
    before = await stored(sql)
    again = await engine.cancel_flow(flow.id, policy="flow_only", reason="other", wait=True)
    assert isinstance(again, FlowCancelled)
    assert again.cancellation_policy == CancellationPolicy.CANCEL_ALL
    header = await engine.cancel_flow_header(flow.id, cancellation_policy="cancel_pending", reason="third")
    assert isinstance(header, FlowAlreadyTerminal)
    assert (header.stored_cancellation_policy, header.stored_cancel_reason) == ("cancel_all", "stop")
    assert await stored(sql) == before
    events = await sql.fetch(
        "select details, reason from flowfabric.event where operator_type = 'flow_cancel_requested'"
    )
    assert len(events) == 1
    assert (await flow.summary()).public_flow_state == "cancelled"


@pytest.mark.parametrize("waits", [True, False])
async def test_members_that_were_replayed_since_are_cancelled_again(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], waits: bool
) -> None:
    flow = await submitted(engine, {"a": (), "b": (), "done": ()})
    await flow.complete("done")
    await engine.cancel_flow(flow.id, reason="stop", wait=True)
    await engine.replay_execution(flow["a"])
    await engine.replay_execution(flow["b"])
    held = await flow.claim("a")
    answer = await engine.cancel_flow(flow.id, policy="flow_only", reason="stop again", wait=waits)
    assert isinstance(answer, FlowCancelled if waits else CancellationScheduled)
    assert answer.cancellation_policy == CancellationPolicy.CANCEL_ALL
    if isinstance(answer, CancellationScheduled):
        assert answer.member_count == 2
        await engine.reconcile_cancellations()
    assert await reasons(flow, "a", "b") == {("cancelled", "stop again", "operator_override")}
    assert await flow.state("done") == "completed"
    with pytest.raises(ff.FlowFabricError):
        await engine.complete(held.handle)
    header = await engine.describe_flow(flow.id)
    assert header is not None
    assert (header.public_flow_state, header.cancel_reason) == ("cancelled", "stop")
    before = await stored(sql)
    assert isinstance(await engine.cancel_flow(flow.id, wait=waits), FlowCancelled)
    assert await stored(sql) == before


@pytest.mark.parametrize(("policy", "after"), [("flow_only", "waiting"), ("cancel_pending", "cancelled")])
async def test_cancelling_again_does_as_the_first_policy_says(engine: CheckedEngine, policy: str, after: str) -> None:
    flow = await submitted(engine, {"spared": (), "a": (), "b": ()})
    await flow.claim("spared")
    await flow.complete("a")
    await engine.cancel_flow(flow.id, policy=policy, wait=True)
    await engine.replay_execution(flow["a"])
    await engine.cancel_flow(flow.id, policy="cancel_all", wait=True)
    assert await flow.state("spared") == "active"
    assert await flow.state("a") == after


async def test_cancel_pending_spares_started_members(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "waiting", "up", "blocked", "active", "suspended", "retried")
    await flow.member("delayed", delay_until=HOUR)
    await flow.join("up", "blocked")
    running = await flow.claim("active")
    retried = await flow.claim("retried")
    await flow.claim("up")
    await suspend(flow, "suspended")
    answer = await engine.cancel_flow(flow.id, policy="cancel_pending", wait=True)
    assert isinstance(answer, FlowCancelled)
    assert await reasons(flow, "waiting", "blocked", "delayed") == {
        ("cancelled", "flow_cancelled", "operator_override")
    }
    assert await flow.states("active", "suspended", "up") == {
        "active": "active", "suspended": "suspended", "up": "active",
    }  # fmt: skip
    assert (await flow.describe()).public_flow_state == "cancelled"
    assert await engine.read_cancel_backlog(flow.id) is None
    await engine.complete(running.handle)
    await engine.resume_execution(flow["suspended"], "operator")
    await flow.complete("suspended")
    await engine.release(retried.handle)
    await flow.complete("retried")
    await flow.drain()
    assert await flow.states("active", "suspended", "retried") == {
        "active": "completed", "suspended": "completed", "retried": "completed",
    }  # fmt: skip


async def test_cancel_flow_only_closes_the_flow_and_cancels_no_member(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"a": (), "b": ("a",), "c": ()})
    await flow.execution("late")
    answer = await engine.cancel_flow(flow.id, policy="cancel_flow_only")
    assert answer == FlowCancelled(
        cancellation_policy=CancellationPolicy.FLOW_ONLY, member_execution_ids=tuple(
            one.execution_id for one in await engine.list_flow_members(flow.id)
        ),
    )  # fmt: skip
    assert await engine.read_cancel_backlog(flow.id) is None
    await flow.complete("a")
    assert await flow.states("b", "c") == {"b": "waiting", "c": "waiting"}
    refusals = [
        await outcome(engine.add_execution_to_flow(flow.id, flow["late"])),
        await outcome(engine.add_executions_to_flow(flow.id, [flow["late"]])),
        await outcome(flow.stage("a", "c")),
        await outcome(engine.stage_and_apply_edges(
            flow.id, [Edge(edge_id=mint_uuid(), upstream=flow["a"], downstream=flow["c"])], expected_graph_revision=4)),
        await outcome(flow.apply("a", "b")) if "a>b" in flow.edges else "flow_already_terminal",
        await outcome(engine.set_edge_group_policy(flow.id, flow["c"], AnyOf())),
        await outcome(engine.extend_flow(
            flow.id, [NewNode(name="x", execution=NewExecution(execution_kind="x"))])),
    ]  # fmt: skip
    assert set(refusals) == {"flow_already_terminal"}
    await flow.complete("b", "c")
    assert (await flow.summary()).public_flow_state == "cancelled"


FAULT = """
create function public.refuse() returns trigger language plpgsql as $$
begin if new.state = 'cancelled' then raise exception 'the disk is tired'; end if; return new; end $$;
create trigger refuse before update on flowfabric.execution for each row when (old.id = '{}') execute function refuse();
"""


async def test_a_member_cannot_be_cancelled_yet(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    flow = await submitted(engine, {"first": (), "second": ()})
    await sql.execute(FAULT.format(flow["second"]))
    answer = await engine.cancel_flow(flow.id, reason="stop", wait=True)
    assert isinstance(answer, PartiallyCancelled)
    assert answer.failed_member_execution_ids == (flow["second"],)
    assert await flow.states() == {"first": "cancelled", "second": "waiting"}
    assert (await flow.describe()).public_flow_state == "cancelled"
    backlog = await engine.read_cancel_backlog(flow.id)
    assert backlog is not None
    assert (backlog.members, backlog.reason) == ((flow["second"],), "stop")
    await sql.execute("drop trigger refuse on flowfabric.execution")
    assert (await engine.reconcile_cancellations()).handled == 0, "the caller has its grace"
    await clock.advance(seconds=31)
    assert await FlowCancel(engine).run_once() == 1
    assert await reasons(flow, "second") == {("cancelled", "stop", "operator_override")}
    assert await engine.read_cancel_backlog(flow.id) is None


async def test_the_process_dies_behind_the_header(large: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]) -> None:
    """Ten thousand members, some blocked, some claimed before."""
    nodes = [
        NewNode(
            name=f"n{n}",
            execution=NewExecution(execution_kind="member"),
            after=[NewEdge(upstream=f"n{n - 1}")] if n % 4 == 3 else [],
        )
        for n in range(10_000)
    ]
    flow_id = (await large.submit_flow(nodes)).flow_id
    held = await hold(large, 100)
    header = await large.cancel_flow_header(flow_id, reason="stop")
    assert isinstance(header, FlowCancelHeader)
    assert (header.target_count, len(header.member_execution_ids)) == (10_000, 10_000)
    assert await large.claim_many(limit=1000, **WORKER) == []
    await large.release(held[0].handle)
    assert await large.claim_many(limit=1000, **WORKER) == [], "what comes back is frozen too"
    assert await FlowCancel(large).run_once() == 0
    await clock.advance(seconds=46)
    assert await FlowCancel(large).run_once() == 10_000
    found = await sql.fetch("select state, cancellation_reason, count(*) as n from flowfabric.execution group by 1, 2")
    assert [tuple(row) for row in found] == [("cancelled", "stop", 10_000)]
    assert await large.read_cancel_backlog(flow_id) is None
    assert await sql.fetchval("select count(*) from flowfabric.event where outcome = 'cancelled'") == 10_000


async def test_an_empty_flow_is_cancelled_immediately(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine)
    await flow.execution("late")
    answer = await engine.cancel_flow(flow.id, wait=timedelta(milliseconds=500))  # else it raises TimedOut
    assert answer == FlowCancelled(cancellation_policy=CancellationPolicy.CANCEL_ALL, member_execution_ids=())
    assert await engine.read_cancel_backlog(flow.id) is None
    with pytest.raises(StateError, match="flow_already_terminal"):
        await engine.add_execution_to_flow(flow.id, flow["late"])
    for call in (engine.cancel_flow(FlowId(mint_uuid())), engine.cancel_flow_header(FlowId(mint_uuid()))):
        with pytest.raises(ff.NotFound, match="flow"):
            await call


async def test_an_acknowledged_member_leaves_the_backlog_and_the_last_ends_it(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    flow = await submitted(engine, {"a": (), "b": ()})
    await engine.cancel_flow_header(flow.id)
    unknown = id_in(home(flow["a"]))
    before = await stored(sql)
    await engine.ack_cancel_member(flow.id, unknown)
    await engine.ack_cancel_member(FlowId(mint_uuid()), flow["a"])
    assert await stored(sql) == before
    for name in "ab":
        await engine.cancel(Operator(flow[name]), "stop")
    await engine.ack_cancel_member(flow.id, flow["a"])
    await engine.ack_cancel_member(flow.id, flow["a"])
    backlog = await engine.read_cancel_backlog(flow.id)
    assert backlog is not None
    assert backlog.members == (flow["b"],)
    other = await submitted(engine, {"a": (), "b": ()})
    await engine.cancel_flow_header(other.id)
    for name in "ab":
        await engine.cancel(Operator(other[name]), "stop")
    await engine.ack_cancel_member(flow.id, flow["b"])
    await asyncio.gather(*(engine.ack_cancel_member(other.id, other[name]) for name in "ab"))
    for one in (flow, other):
        assert await engine.read_cancel_backlog(one.id) is None
    assert await sql.fetchval("select count(*) from flowfabric.cancel_backlog") == 0


# Replay


async def reconcile(engine: ff.Engine) -> int:
    """A whole pass of the state reconciler."""
    after: EdgePlace | None = None
    mended = 0
    while True:
        done, after = await engine.reconcile_edges(after, limit=2)
        mended += done.reconciled
        if after is None:
            return mended


async def lost_chain(engine: ff.Engine) -> Flow:
    flow = await submitted(engine, {"a": (), "b": ("a",), "c": ("b",)})
    await flow.fail("a")
    await flow.drain()
    assert await flow.states("b", "c") == {"b": "skipped", "c": "skipped"}
    return flow


@pytest.mark.both_servers
async def test_replay_from_the_bottom(engine: CheckedEngine) -> None:
    flow = await lost_chain(engine)
    for name in "cb":
        answer = await engine.replay_execution(flow[name])
        assert answer.public_state == "waiting_children"
        assert (await flow.record(name)).blocking_detail == "1 dep(s) unsatisfied after replay"
        event = (await engine.list_events(flow[name])).items[-1]
        assert (event.operator_type, event.details) == (
            "replayed", {"branch": "skipped_flow_member", "groups_reset": 1},
        )  # fmt: skip
    assert (await engine.replay_execution(flow["a"])).public_state == "waiting"
    assert (await engine.list_events(flow["a"])).items[-1].details == {"branch": "normal"}
    assert await reconcile(engine) == 0
    await flow.drain()
    assert await EdgeRepair(engine).run_once() == 0
    assert await flow.states() == {"a": "waiting", "b": "waiting_children", "c": "waiting_children"}
    await flow.complete("a")
    assert await flow.states("b", "c") == {"b": "waiting", "c": "waiting_children"}
    await flow.complete("b")
    await flow.complete("c")
    assert await flow.outcomes("c") == ["skipped", "success"]


async def test_replay_from_the_top(engine: CheckedEngine) -> None:
    flow = await lost_chain(engine)
    await engine.replay_execution(flow["a"])
    await flow.complete("a")
    await flow.drain()
    assert await flow.states("b", "c") == {"b": "skipped", "c": "skipped"}, "nothing is revived by itself"
    assert (await engine.replay_execution(flow["b"])).public_state == "waiting"
    assert await flow.counts("b") == (1, 0, 0, 1)
    assert await flow.claimable("b")


async def test_replay_behind_a_quorum(engine: CheckedEngine) -> None:
    flow = await submitted(engine, fan_in(3), {"join": Quorum(2)})
    await flow.complete("u1")
    await flow.fail("u2", "u3")
    await flow.drain()
    assert await flow.state("join") == "skipped"
    assert (await engine.replay_execution(flow["join"])).public_state == "waiting_children"
    assert await flow.counts("join") == (1, 0, 0, 3)
    await engine.replay_execution(flow["u3"])
    await flow.complete("u3")
    await flow.drain()
    assert await flow.counts("join") == (2, 0, 0, 3)
    assert (await flow.group("join")).group_state == SATISFIED
    assert await flow.state("join") == "waiting"


async def test_replays_are_limited(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"a": ()})
    held = await flow.claim("a")
    with pytest.raises(StateError, match="execution_not_terminal"):
        await engine.replay_execution(flow["a"])
    await engine.complete(held.handle)
    for _ in range(10):
        await engine.replay_execution(flow["a"])
        await flow.complete("a")
    with pytest.raises(StateError, match="max_replays_exhausted"):
        await engine.replay_execution(flow["a"])


async def test_replay_of_a_member_cancelled_while_it_waited(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"a": (), "b": ("a",)})
    await flow.cancel("b")
    assert (await engine.replay_execution(flow["b"])).public_state == "waiting_children"
    assert (await engine.list_events(flow["b"])).items[-1].details == {
        "branch": "skipped_flow_member",
        "groups_reset": 1,
    }
    assert not await flow.claimable("b")
    await flow.complete("a")
    assert await flow.claimable("b")
    await flow.complete("b")


# Summaries


async def test_the_fields_of_a_summary(engine: CheckedEngine) -> None:
    running = await submitted(engine, {"a": (), "b": ("a",)})
    await running.claim("a")
    suspended = await submitted(engine, {"a": ()})
    await suspend(suspended, "a")
    waiting = await submitted(engine, {"a": (), "b": ()})
    blocked = await submitted(engine, {"a": (), "b": ("a",)})
    losers = await submitted(engine, fan_in(3), {"join": AnyOf()})
    await losers.complete("u1")
    await losers.drain()
    await losers.complete("join")
    stopped = await submitted(engine, {"a": ()})
    await stopped.cancel("a")
    found = [
        (await flow.summary()).public_flow_state for flow in (running, suspended, waiting, blocked, losers, stopped)
    ]
    assert found == ["running", "blocked", "open", "blocked", "completed", "failed"]


# Size


def layered(width: int, depth: int) -> list[NewNode]:
    """Layers that follow each other; each member comes after two of the layer before."""
    return [
        NewNode(
            name=f"{layer}.{n}",
            execution=NewExecution(execution_kind="node"),
            after=[NewEdge(upstream=f"{layer - 1}.{m % width}") for m in (n, n + 1)] if layer else [],
        )
        for layer in range(depth)
        for n in range(width)
    ]


def diamond(width: int) -> list[NewNode]:
    new = NewExecution(execution_kind="node")
    middle = [NewNode(name=f"n{n}", execution=new, after=[NewEdge(upstream="first")]) for n in range(width)]
    last = NewNode(name="last", execution=new, after=[NewEdge(upstream=one.name) for one in middle])
    return [NewNode(name="first", execution=new), *middle, last]


async def work_off(engine: ff.Engine) -> int:
    """Complete what can be claimed until nothing is left."""
    done = 0
    while True:
        held = await engine.claim_many(limit=1000, **WORKER)
        if not held:
            if not await Cascade(engine).run_once():
                return done
            continue
        await engine.complete_many([one.handle for one in held])
        done += len(held)


@pytest.mark.parametrize("shape", ["diamond", "layers"])
async def test_wide_graphs_end(large: ff.Engine, sql: asyncpg.Connection[Any], shape: str) -> None:
    nodes = diamond(1000) if shape == "diamond" else layered(100 if sampling.is_full() else 20, 100)
    flow = await large.submit_flow(nodes)
    assert await work_off(large) == len(nodes)
    assert (await large.flow_progress(flow.flow_id))[1] == 0
    assert await sql.fetchval("select count(*) from flowfabric.edge_group where state <> 'satisfied'") == 0
    assert await sql.fetchval("select count(*) from flowfabric.pending_cascade") == 0
    assert await sql.fetchval("select count(*) from flowfabric.event where outcome = 'success'") == len(nodes)


async def test_a_failure_above_wide_graphs(large: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await large.submit_flow(diamond(1000))
    (held,) = await hold(large, 1)
    await large.fail(held.handle, "boom", failure_class="permanent")
    await drain(large)
    found = await sql.fetch("select state, count(*) as n from flowfabric.execution group by 1 order by 1")
    assert [tuple(row) for row in found] == [("failed", 1), ("skipped", 1001)]
    assert await sql.fetchval("select count(*) from flowfabric.event where outcome = 'skipped'") == 1001


async def test_a_long_chain_is_skipped(large: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    """One hop a call, whatever the length; only `--full` takes the whole length, on one server."""
    is_long = sampling.is_full() and await sql.fetchval("show server_version_num") >= "180000"
    size = 10_000 if is_long else 1_000
    flow_id, _ = await chain(large, size)
    (held,) = await hold(large, 1)
    await large.fail(held.handle, "boom", failure_class="permanent")
    hops = 0
    while (await large.dispatch_cascades()).resolved:
        hops += 1
    assert hops == size - 2  # the first was made by the failure itself
    counted = "select state, count(*) as n from flowfabric.execution where flow_id = $1 group by 1 order by 1"
    assert [tuple(row) for row in await sql.fetch(counted, flow_id)] == [("failed", 1), ("skipped", size - 1)]
    assert (await large.flow_progress(flow_id))[1] == 0


async def test_scheduled_cancellations_say_how_many(engine: CheckedEngine) -> None:
    """What `cancel_flow` answers without waiting, and where a wait ends too early."""
    flow = await submitted(engine, {"a": (), "b": (), "c": ()})
    await flow.complete("a")
    answer = await engine.cancel_flow(flow.id, reason="stop")
    assert isinstance(answer, CancellationScheduled)
    assert (answer.member_count, len(answer.member_execution_ids)) == (2, 3)
    assert await flow.states("b", "c") == {"b": "waiting", "c": "waiting"}
    assert not await flow.claimable("b")
    await flow.drain()
    assert await reasons(flow, "b", "c") == {("cancelled", "stop", "operator_override")}
    late = await submitted(engine, {"a": ()})
    with pytest.raises(ff.TimedOut, match="cancel_flow"):
        await engine.cancel_flow(late.id, wait=timedelta())
    assert (await late.describe()).public_flow_state == "cancelled"
