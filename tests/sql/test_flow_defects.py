"""Mistakes that engines have made with flows, each as the behaviour that rules it out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric import _duties
from flowfabric._duties.cascade import Cascade
from flowfabric._duties.edge_repair import EdgeRepair
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric._duties.flow_summaries import FlowSummaries
from flowfabric._duties.sibling_cancel import SiblingCancel
from flowfabric._duties.sibling_repair import SiblingRepair
from flowfabric.engine.edges import EdgePlace
from flowfabric.errors import Conflict, Contention, StateError, ValidationFailed
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import Applied, CancellationPolicy, CancellationScheduled, FlowCancelled, FlowStatus, NoOp
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.joins import AnyOf, OnSatisfied, Quorum
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh
from tests.ids import home, id_in
from tests.sql.cases import outcome
from tests.sql.flowing import (
    CHAIN,
    PENDING,
    SATISFIED,
    drain,
    empty_flow,
    fan_in,
    hold,
    stored,
    submitted,
)
from tests.support import RETRY, WORKER, CheckedEngine, Clock

LET_RUN = OnSatisfied.LET_RUN
PAIR = {"a": (), "b": ("a",)}
TRIPLE = {"a": (), "b": ("a",), "c": ("b",)}


async def fan_out(engine: ff.Engine, count: int, **fields: Any) -> FlowId:
    """One root and so many behind it, which has ended."""
    root = NewNode(name="root", execution=NewExecution(execution_kind="root", **fields))
    leaves = [
        NewNode(name=f"n{n}", execution=NewExecution(execution_kind="leaf"), after=[NewEdge(upstream="root")])
        for n in range(count)
    ]
    made = await engine.submit_flow([root, *leaves])
    (held,) = await hold(engine, 1, kinds=["root"])
    await engine.complete(held.handle)
    return made.flow_id


# Cascade and exactly-once


async def test_an_edge_that_was_resolved_meanwhile_is_not_counted_again(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    """Two cascades read the same open edge; the second gets the lock of the group after the first has committed."""
    flow = await submitted(plain_engine, {"a": (), "b": (), "c": ("a", "b")})
    counts = "select succeeded, failed, state from flowfabric.edge_group where n > 0"
    attempt = sql.transaction()
    await attempt.start()
    for end in ("success", "failed"):
        await sql.execute(
            "select flowfabric.resolve_edges(array_agg(d.partition), array_agg(d.flow_id), array_agg(d.edge_id),"
            " array_agg(d.downstream), array_agg($1::text), array_agg(1::bigint), flowfabric.now())"
            " from flowfabric.edge d where d.upstream = $2",
            end,
            flow["a"],
        )
        assert tuple(await sql.fetchrow(counts) or ()) == (1, 0, "pending")
    await attempt.rollback()  # a has not ended


async def test_an_event_is_done_only_with_its_last_hop(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    """A chunk commits its work and where to continue; the event stays until nothing is left of it."""
    await fan_out(plain_engine, 1100)
    waiting = "select count(*) from flowfabric.execution where state = 'waiting'"
    seen = [(await sql.fetchval(waiting), await sql.fetchval("select count(*) from flowfabric.pending_cascade"))]
    for _ in range(2):
        await plain_engine.dispatch_cascades()
        seen.append(
            (await sql.fetchval(waiting), await sql.fetchval("select count(*) from flowfabric.pending_cascade"))
        )
    assert seen == [(500, 1), (1000, 1), (1100, 0)]


async def test_a_hop_that_fails_leaves_its_event_and_no_other(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    flows = [await submitted(plain_engine, CHAIN) for _ in range(3)]
    for flow in flows:
        await flow.fail("a")
    await sql.execute(
        "create function public.refuse() returns trigger language plpgsql as $$ begin raise 'tired'; end $$;"
        "create trigger refuse before update on flowfabric.execution for each row"
        f" when (old.id = '{flows[1]['c']}') execute function refuse()"
    )
    done = await plain_engine.dispatch_cascades()
    assert (done.seen, done.finished, done.failed) == (3, 2, 1)
    assert "tired" in (done.message or "")
    assert [await flow.state("c") for flow in flows] == ["skipped", "waiting_children", "skipped"]
    await sql.execute("drop trigger refuse on flowfabric.execution")
    await drain(plain_engine)
    assert await flows[1].state("d") == "skipped"


async def test_a_resolved_edge_is_not_counted_again(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    """The event is put back as if it had never been dispatched."""
    flow = await submitted(engine, fan_in(2), {"join": AnyOf(LET_RUN)})
    await flow.complete("u1")
    (event,) = await flow.ends("u1")
    await sql.execute(
        "insert into flowfabric.pending_cascade (seq, partition, id, flow_id, run, outcome, enqueued_at)"
        " values ($1, $2, $3, $4, 0, 'success', now())",
        event.cursor.position, home(flow["u1"]), flow["u1"], flow.id,
    )  # fmt: skip
    before = await flow.describe()
    assert await engine.dispatch_completion(event.cursor.position) != NoOp()
    assert await flow.describe() == before
    assert await flow.counts("join") == (1, 0, 0, 2)


async def test_an_applied_edge_blocks_its_downstream(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    assert await flow.claimable("b")
    await flow.join("a", "b")
    assert not await flow.claimable("b")
    assert [one.execution_id for one in await engine.claim_many(limit=5, **WORKER)] == [flow["a"]]


async def test_a_staged_edge_is_left_alone_until_it_is_applied(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.join("b", "c")
    await flow.stage("a", "c")
    await flow.complete("a")
    await drain(engine)
    assert await flow.counts("c") == (0, 0, 0, 1), "of b, which runs"
    await flow.apply("a", "c")
    assert await flow.counts("c") == (1, 0, 0, 2)
    await flow.complete("b")
    assert await flow.state("c") == "waiting"


async def test_an_upstream_that_ended_counts_when_the_edge_is_applied(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    await flow.complete("a")
    assert await flow.join("a", "b") == Applied(0)
    assert (await flow.group("b")).group_state == SATISFIED
    assert (await engine.dispatch_cascades()).seen == 0


async def test_a_straggler_does_not_release_again(engine: CheckedEngine) -> None:
    flow = await submitted(engine, fan_in(3), {"join": AnyOf(LET_RUN)})
    await flow.complete("u1")
    held = await flow.claim("join")
    before = await flow.record("join")
    await flow.complete("u2")
    await flow.fail("u3")
    assert await flow.record("join") == before
    assert before.public_state == "active"
    assert (await flow.group("join")).group_state == SATISFIED, "the description knows"
    await engine.complete(held.handle)


@pytest.mark.parametrize("way", ["worker", "operator", "flow", "sibling"])
async def test_every_cancel_is_an_event_that_cascades(engine: CheckedEngine, way: str) -> None:
    flow = await submitted(engine, {"won": (), "a": (), "race": ("won", "a"), "b": ("a",)}, {"race": AnyOf()})
    match way:
        case "worker":
            await engine.cancel((await flow.claim("a")).handle, "no")
        case "operator":
            await flow.cancel("a")
        case "flow":
            await engine.cancel_flow(flow.id, wait=True)
        case "sibling":
            await flow.complete("won")
    await drain(engine)
    assert await flow.outcomes("a") == ["cancelled"]
    assert (await flow.group("b")).group_state == "impossible"
    assert await flow.state("b") == ("cancelled" if way == "flow" else "skipped")


async def test_events_carry_namespace_and_tags(engine: CheckedEngine) -> None:
    flow = await submitted(engine, CHAIN, namespace="team", tags={"app.instance": "one"})
    await flow.fail("a")
    await drain(engine)
    for name in CHAIN:
        (event,) = await flow.ends(name)
        assert (event.namespace, event.tags, event.flow_id) == ("team", {"app.instance": "one"}, flow.id)
    other = await submitted(engine, CHAIN, namespace="team", tags={"app.instance": "two"})
    await other.fail("a")
    for tag, scanned in ((("app.instance", "one"), 0), (("app.other", "two"), 0), (("app.instance", "two"), 1)):
        assert (await engine.dispatch_cascades(filter=ScannerFilter(instance_tag=tag))).seen == scanned


async def test_an_event_is_found_by_its_number(engine: CheckedEngine) -> None:
    """Twice ended within one moment; each delivery means its own end."""
    flow = await submitted(engine, PAIR)
    await flow.fail("a")
    await engine.replay_execution(flow["a"])
    await engine.replay_execution(flow["b"])
    await flow.complete("a")
    first, second = await flow.ends("a")
    assert (first.outcome, second.outcome) == ("failed", "success")
    for event in (first, second, first):
        assert await engine.dispatch_completion(event.cursor.position) == NoOp()
    assert await flow.counts("b") == (1, 0, 0, 1)
    assert await flow.state("b") == "waiting"


async def test_the_outcome_of_the_event_counts_not_the_live_one(engine: CheckedEngine) -> None:
    """The upstream is replayed before its skip was dispatched."""
    flow = await submitted(engine, TRIPLE)
    await flow.fail("a")
    assert await flow.states("b", "c") == {"b": "skipped", "c": "waiting_children"}
    await engine.replay_execution(flow["b"])
    assert await flow.state("b") == "waiting_children"
    await drain(engine)
    assert await flow.counts("c") == (0, 0, 1, 1)
    assert await flow.state("c") == "skipped"


async def test_depth_is_not_limited_and_no_flow_starves(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    graph = {f"n{n}": (f"n{n - 1}",) if n else () for n in range(120)}
    flow = await submitted(plain_engine, graph)
    await flow.fail("n0")
    await Cascade(plain_engine).run_once()
    assert set((await flow.states()).values()) == {"failed", "skipped"}
    # The reconciler goes through all groups, not again and again through the first.
    blocked = [await submitted(plain_engine, PAIR) for _ in range(7)]
    lost = blocked[-1]
    await lost.complete("a")
    await sql.execute("select flowfabric.block_members($1, $2, '{x}', flowfabric.now())", [home(lost["b"])],
                      [lost["b"]])  # fmt: skip
    after: EdgePlace | None = None
    mended = 0
    for _ in range(200):
        done, after = await plain_engine.reconcile_edges(after, limit=3)
        mended += done.reconciled
        if after is None:
            break
    assert after is None
    assert mended == 1
    assert await lost.state("b") == "waiting"


async def test_every_transition_writes_every_word(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.join("a", "b")
    await flow.join("b", "c")
    seen = [(await flow.vector("b"))["public_state"]]
    await flow.complete("a")
    seen.append((await flow.vector("b"))["public_state"])
    held = await flow.claim("b")
    seen.append((await flow.vector("b"))["public_state"])
    await engine.wait_children(held.handle)
    await flow.cancel("b")
    vector = await flow.vector("b")
    seen.append(vector["public_state"])
    assert seen == ["waiting_children", "waiting", "active", "cancelled"]
    assert (vector["lifecycle_phase"], vector["terminal_outcome"]) == ("terminal", "cancelled")
    assert (await engine.replay_execution(flow["b"])).public_state == "waiting"


@pytest.mark.parametrize("state", ["active", "suspended"])
async def test_a_skip_leaves_nothing_behind(engine: CheckedEngine, sql: asyncpg.Connection[Any], state: str) -> None:
    flow = await empty_flow(engine, "a", "b")
    held = await flow.claim("b")
    await flow.join("a", "b")
    if state == "suspended":
        await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    await flow.fail("a")
    (attempt,) = await engine.list_attempts(flow["b"])
    assert (attempt.attempt_lifecycle, attempt.failure_reason) == ("ended_cancelled", "dependency_impossible")
    record = await flow.record("b")
    assert (record.current_lease, record.current_waitpoint) == (None, None)
    open_ones = "select count(*) from flowfabric.suspension where closed_at is null"
    assert await sql.fetchval(open_ones) == 0
    with pytest.raises(ff.FlowFabricError):
        await engine.complete(held.handle)


# Policies and graph


async def test_cycles_are_found_and_large_graphs_are_not_taken_for_one(plain_engine: ff.Engine) -> None:
    nodes = [
        NewNode(
            name=f"n{n}",
            execution=NewExecution(execution_kind="n"),
            after=[NewEdge(upstream=f"n{m}") for m in {n - 1, n // 2} if 0 <= m < n],
        )
        for n in range(1500)
    ]
    made = await plain_engine.submit_flow(nodes)
    first, last = made.nodes["n0"], made.nodes["n1499"]
    revision = (await plain_engine.describe_flow(made.flow_id)).graph_revision  # type: ignore[union-attr]
    for upstream, downstream, answer in ((last, first, "cycle_detected"), (first, last, "Staged")):
        edge = plain_engine.stage_dependency_edge(
            made.flow_id,
            edge_id=mint_uuid(),
            upstream_execution_id=upstream,
            downstream_execution_id=downstream,
            expected_graph_revision=revision,
        )
        assert await outcome(edge) == answer


@pytest.mark.parametrize("end", ["success", "failed"])
async def test_a_quorum_with_too_few_edges_is_not_impossible(engine: CheckedEngine, end: str) -> None:
    flow = await empty_flow(engine, "u1", "u2", "join")
    await engine.set_edge_group_policy(flow.id, flow["join"], Quorum(2))
    await flow.join("u1", "join")
    await (flow.complete("u1") if end == "success" else flow.fail("u1"))
    assert (await flow.group("join")).group_state == PENDING
    assert await flow.state("join") == "waiting_children"
    await flow.join("u2", "join")
    assert await flow.state("join") == ("waiting_children" if end == "success" else "skipped")
    await drain(engine)
    assert await flow.state("u2") == ("waiting" if end == "success" else "cancelled")


async def test_a_decided_race_is_never_blocked_again(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "u1", "u2", "join")
    await engine.set_edge_group_policy(flow.id, flow["join"], AnyOf())
    await flow.join("u1", "join")
    await flow.complete("u1")
    await flow.join("u2", "join")
    assert await flow.claimable("join")
    await drain(engine)
    assert await flow.state("u2") == "cancelled"
    assert await flow.claimable("join")


async def test_losers_of_an_impossible_race_are_cancelled_too(engine: CheckedEngine) -> None:
    flow = await submitted(engine, fan_in(3), {"join": Quorum(3)})
    running = await flow.claim("u2")
    await flow.fail("u1")
    await drain(engine)
    record = await flow.record("u2")
    assert (record.public_state, record.cancellation_reason) == ("cancelled", "sibling_quorum_impossible")
    for call in (engine.renew(running.handle), engine.complete(running.handle, b"late")):
        with pytest.raises(ff.FlowFabricError):
            await call
    assert await flow.state("u2") == "cancelled"


async def test_no_sibling_is_dropped_for_a_cap(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    graph = fan_in(1100)
    ups = [NewNode(name=up, execution=NewExecution(execution_kind="up")) for up in graph["join"]]
    join = NewNode(
        name="join",
        execution=NewExecution(execution_kind="join"),
        after=[NewEdge(upstream=up) for up in graph["join"]],
        policy=AnyOf(),
    )
    await plain_engine.submit_flow([*ups, join])
    (held,) = await hold(plain_engine, 1)
    await plain_engine.complete(held.handle)
    chunks = [await plain_engine.cancel_siblings() for _ in range(4)]
    assert [(one.action, one.cancelled) for one in chunks] == [
        ("more", 500), ("more", 500), ("drained", 99), ("none", 0),
    ]  # fmt: skip
    assert await sql.fetchval("select count(*) from flowfabric.execution where state = 'cancelled'") == 1099


async def test_a_policy_is_compared_as_a_whole_and_fixed_by_a_staged_edge(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    policies = [Quorum(2), Quorum(3), Quorum(3, LET_RUN), Quorum(3, LET_RUN)]
    answers = [await engine.set_edge_group_policy(flow.id, flow["b"], one) for one in policies]
    assert answers == ["Set", "Set", "Set", "AlreadySet"]
    await flow.stage("a", "b")
    with pytest.raises(ff.InvalidInput, match="edge_group_policy_already_fixed"):
        await engine.set_edge_group_policy(flow.id, flow["b"], policies[-1])


async def test_skipped_is_not_failed_and_eligibility_knows_the_policy(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {**TRIPLE, **fan_in(2)}, {"join": Quorum(1, LET_RUN)})
    await flow.fail("a")
    await drain(engine)
    assert await flow.counts("c") == (0, 0, 1, 1)
    assert await engine.evaluate_flow_eligibility(flow["join"]) == "blocked_by_dependencies"
    await flow.complete("u1")
    assert await engine.evaluate_flow_eligibility(flow["join"]) == "eligible"
    other = await empty_flow(engine, "a", "b")
    await other.stage("a", "b")
    assert (await other.group("b")).group_state == PENDING, "staged only"


async def test_a_reference_passes_the_result(engine: CheckedEngine) -> None:
    flow = await submitted(engine, PAIR, ref="result", input_payload=b"own")
    await flow.complete("a", result=b"X")
    assert (await flow.claim("b")).input_payload == b"X"


async def test_each_refusal_has_its_class(engine: CheckedEngine) -> None:
    flow, closed = await empty_flow(engine, "a", "b"), await empty_flow(engine, "a", "b")
    await engine.cancel_flow(closed.id, policy="flow_only")
    elsewhere = id_in((home(flow["a"]) + 1) % 256)
    flow.members["stranger"] = id_in(home(flow["a"]))
    refusals: list[tuple[Any, type[ff.FlowFabricError], int]] = [
        (flow.stage("a", "a"), Conflict, 409),
        (engine.add_execution_to_flow(FlowId(mint_uuid()), flow["a"]), ff.FlowFabricError, 400),
        (closed.stage("a", "b"), StateError, 409),
        (flow.stage("a", "stranger"), StateError, 409),
        (engine.add_execution_to_flow(flow.id, elsewhere), ff.InvalidInput, 400),
        (engine.add_execution_to_flow(flow.id, flow["stranger"]), ff.NotFound, 404),
        (engine.cancel_flow(FlowId(mint_uuid())), ff.NotFound, 404),
    ]
    for call, family, status in refusals:
        with pytest.raises(family) as refused:
            await call
        if family is not ff.FlowFabricError:
            assert refused.value.http_status == status
    with pytest.raises(Contention) as stale:
        await engine.stage_dependency_edge(
            flow.id,
            edge_id=mint_uuid(),
            upstream_execution_id=flow["a"],
            downstream_execution_id=flow["b"],
            expected_graph_revision=9,
        )
    assert (stale.value.kind, stale.value.retryable) == ("stale_graph_revision", True)


async def test_applying_is_checked_against_the_staged_edge(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.stage("a", "b", "ref")
    flow.edges |= {"c>b": flow.edges["a>b"], "a>c": flow.edges["a>b"], "b>c": mint_uuid()}
    for upstream, downstream, ref in (("c", "b", "ref"), ("a", "c", "ref"), ("a", "b", None), ("b", "c", "ref")):
        with pytest.raises(ValidationFailed, match="invalid_dependency"):
            await flow.apply(upstream, downstream, ref)
    with pytest.raises(ValidationFailed, match="invalid_dependency"):
        await engine.stage_dependency_edge(
            flow.id,
            edge_id=mint_uuid(),
            upstream_execution_id=flow["b"],
            downstream_execution_id=flow["c"],
            expected_graph_revision=4,
            dependency_kind="always",
        )
    assert await flow.apply("a", "b", "ref") == Applied(1)


async def test_the_clock_is_the_databases(engine: CheckedEngine, clock: Clock) -> None:
    await clock.advance(days=40)
    flow = await submitted(engine, PAIR)
    await flow.complete("a")
    found, now = await flow.describe(), await clock.now()
    edge = (await engine.list_edges(flow.id, incoming=flow["b"]))[0]
    times = [found.created_at, found.last_mutation_at, edge.created_at, (await flow.group("b")).satisfied_at]
    assert all(at is not None and timedelta() <= now - at < timedelta(minutes=5) for at in times)


async def test_a_delay_survives_block_and_release(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a")
    await flow.member("b", delay_until=timedelta(hours=1))
    due = (await flow.record("b")).delay_until
    await flow.join("a", "b")
    await flow.complete("a")
    record = await flow.record("b")
    assert (record.public_state, record.delay_until) == ("delayed", due)
    assert not await flow.claimable("b")


async def test_an_applied_edge_says_so(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    seen = []
    for step in (flow.stage, flow.apply):
        await step("a", "b")
        seen.append((await engine.list_edges(flow.id, incoming=flow["b"]))[0].edge_state)
    assert seen == ["pending", "applied"]


# Waiting parents


@pytest.mark.parametrize("children", [0, 2], ids=["no children", "children that ended"])
async def test_a_parent_with_nothing_to_wait_for_continues(engine: CheckedEngine, children: int) -> None:
    flow = await empty_flow(engine, "p", *(f"c{n}" for n in range(children)))
    held = await flow.claim("p")
    for n in range(children):
        await flow.join(f"c{n}", "p")
        await flow.complete(f"c{n}")
    await engine.wait_children(held.handle)
    assert (await flow.claim("p")).handle.attempt_index == held.handle.attempt_index


# Flow state


async def test_the_list_shows_how_a_flow_ended(engine: CheckedEngine) -> None:
    flows = {"completed": await submitted(engine, {"a": ()}), "failed": await submitted(engine, {"a": ()})}
    await flows["completed"].complete("a")
    await flows["failed"].fail("a")
    await FlowSummaries(engine).run_once()
    for state, flow in flows.items():
        page = await engine.list_flows(home(flow["a"]))
        assert next(one.status for one in page.items if one.flow_id == flow.id) == FlowStatus(state)
        assert (await flow.describe()).public_flow_state == "open", "the header stays open for more"
        await flow.member("more")


async def test_all_loops_run_and_members_are_counted_exactly(plain_engine: ff.Engine) -> None:
    wanted = {Cascade, SiblingCancel, FlowCancel, SiblingRepair, EdgeRepair, FlowSummaries}
    assert wanted <= set(_duties.ALL)
    graph: dict[str, tuple[str, ...]] = {f"n{n}": () for n in range(130)}
    flow = await submitted(plain_engine, graph)
    await flow.claim("n7")
    await FlowSummaries(plain_engine).run_once()
    found = await plain_engine.read_flow_summary(flow.id)
    assert found is not None
    assert (found.total_members, found.members_active, found.members_waiting) == (130, 1, 129)
    assert found.public_flow_state == "running"


async def test_race_losers_do_not_fail_a_flow_and_cancelled_flows_are_cancelled(engine: CheckedEngine) -> None:
    race = await submitted(engine, fan_in(2), {"join": AnyOf()})
    await race.complete("u1")
    await drain(engine)
    await race.complete("join")
    cancelled = await submitted(engine, PAIR)
    await engine.cancel_flow(cancelled.id, wait=True)
    assert [(await flow.summary()).public_flow_state for flow in (race, cancelled)] == ["completed", "cancelled"]


async def test_tags_are_described_and_move_the_header(engine: CheckedEngine, clock: Clock) -> None:
    flow = await empty_flow(engine)
    before = await flow.describe()
    await clock.advance(seconds=5)
    await engine.set_flow_tag(flow.id, "app.owner", "me")
    after = await flow.describe()
    assert after.tags == {"app.owner": "me"}
    assert after.last_mutation_at >= before.last_mutation_at + timedelta(seconds=5)


# Cancelling a flow


@pytest.mark.parametrize("policy", CancellationPolicy)
async def test_ended_members_are_untouched_and_waiting_ones_are_cancelled(
    engine: CheckedEngine, policy: CancellationPolicy
) -> None:
    flow = await submitted(engine, {"ok": (), "bad": (), "behind": ("bad",), "waiting": ()})
    await flow.complete("ok", result=b"kept")
    await flow.fail("bad")
    before = {name: await flow.record(name) for name in ("ok", "bad", "behind")}
    await engine.cancel_flow(flow.id, policy=policy, wait=True)
    await drain(engine)
    assert {name: await flow.record(name) for name in before} == before
    assert [await flow.outcomes(name) for name in before] == [["success"], ["failed"], ["skipped"]]
    assert await flow.state("waiting") == ("waiting" if policy == "flow_only" else "cancelled")


async def test_the_header_spares_running_members_and_makes_no_empty_backlog(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"active": ()})
    held = await flow.claim("active")
    await engine.cancel_flow_header(flow.id, cancellation_policy="cancel_pending")
    assert await engine.read_cancel_backlog(flow.id) is None
    await engine.complete(held.handle)
    assert await flow.state("active") == "completed"
    empty = await empty_flow(engine)
    await engine.cancel_flow_header(empty.id)
    assert await engine.read_cancel_backlog(empty.id) is None
    whole = await submitted(engine, {"active": ()})
    held = await whole.claim("active")
    await engine.cancel_flow(whole.id, wait=True)
    with pytest.raises(ff.FlowFabricError):
        await engine.complete(held.handle)
    assert await whole.state("active") == "cancelled"


async def test_a_missing_flow_is_missing_and_a_closed_one_keeps_what_it_has(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    with pytest.raises(ff.NotFound, match="flow"):
        await engine.cancel_flow(FlowId(mint_uuid()), wait=True)
    flow = await submitted(engine, {"a": ()})
    await engine.cancel_flow(flow.id, policy="flow_only", reason="first")
    before = await stored(sql)
    again = await engine.cancel_flow(flow.id, policy="cancel_all", reason="second", wait=True)
    assert isinstance(again, FlowCancelled)
    assert again.cancellation_policy == CancellationPolicy.FLOW_ONLY
    assert await stored(sql) == before
    assert await flow.state("a") == "waiting"


async def test_an_unknown_policy_is_refused(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await submitted(engine, {"a": ()})
    before = await stored(sql)
    bad: list[Any] = ["cancel_only_flow", "everything", "", None, 5]
    for policy in bad:
        with pytest.raises(ff.InvalidInput, match="cancel_all, cancel_pending, flow_only"):
            await engine.cancel_flow(flow.id, policy=policy)
        with pytest.raises(ff.InvalidInput, match="cancel_all, cancel_pending, flow_only"):
            await engine.cancel_flow_header(flow.id, cancellation_policy=policy)
    assert await stored(sql) == before
    await engine.cancel_flow(flow.id, policy="cancel_flow_only")
    assert (await flow.describe()).cancellation_policy == CancellationPolicy.FLOW_ONLY


async def test_waiting_means_for_the_members(engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]) -> None:
    flow = await submitted(engine, {"a": (), "b": ()})
    await sql.execute(
        "create function public.dawdle() returns trigger language plpgsql as $$"
        " begin perform pg_sleep(1); return new; end $$;"
        "create trigger dawdle before update on flowfabric.execution for each row"
        " when (new.state = 'cancelled') execute function dawdle()"
    )
    with pytest.raises(ff.TimedOut):
        await engine.cancel_flow(flow.id, wait=timedelta(milliseconds=300))
    assert (await flow.describe()).public_flow_state == "cancelled"
    assert await flow.states() == {"a": "waiting", "b": "waiting"}
    await sql.execute("drop trigger dawdle on flowfabric.execution")
    await clock.advance(seconds=31)
    await drain(engine)
    assert await flow.states() == {"a": "cancelled", "b": "cancelled"}
    other = await submitted(engine, {"a": (), "b": ()})
    assert isinstance(await engine.cancel_flow(other.id), CancellationScheduled)
    assert await other.states() == {"a": "waiting", "b": "waiting"}
    third = await submitted(engine, {"a": (), "b": ()})
    assert isinstance(await engine.cancel_flow(third.id, wait=True), FlowCancelled)
    assert await third.states() == {"a": "cancelled", "b": "cancelled"}


async def test_a_member_that_already_ended_is_no_failure(engine: CheckedEngine) -> None:
    """The first in the list has ended: the others are cancelled all the same."""
    flow = await submitted(engine, fan_in(4), {"join": AnyOf()})
    held = await flow.claim("u2")
    await flow.complete("u1")
    await engine.complete(held.handle)
    done = await engine.cancel_siblings()
    assert (done.action, done.cancelled, done.already_terminal) == ("drained", 2, 1)
    assert await flow.states("u2", "u3", "u4") == {"u2": "completed", "u3": "cancelled", "u4": "cancelled"}
    other = await submitted(engine, {"a": (), "b": ()})
    held = await other.claim("a")
    await engine.cancel_flow_header(other.id, grace=timedelta())
    await engine.complete(held.handle)
    assert await FlowCancel(engine).run_once() == 2, "both are acknowledged"
    assert await other.states() == {"a": "completed", "b": "cancelled"}
    assert await engine.read_cancel_backlog(other.id) is None


async def test_cancelling_leaves_the_queue_of_siblings_alone(engine: CheckedEngine) -> None:
    flow = await submitted(engine, fan_in(3), {"join": Quorum(3, LET_RUN)})
    await engine.cancel_flow(flow.id, policy="cancel_pending", wait=True)
    assert await engine.list_sibling_cancels() == []
    assert set((await flow.states()).values()) == {"cancelled"}


@pytest.mark.parametrize("way", ["waiting", "release", "retry", "delay", "resume", "wait_children"])
async def test_no_target_is_claimed_behind_the_header(engine: CheckedEngine, clock: Clock, way: str) -> None:
    flow = await empty_flow(engine, "up")
    await flow.member("a", policy=RETRY)
    held = None if way == "waiting" else await flow.claim("a")
    if held is not None and way == "resume":
        await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    if way == "wait_children":
        await flow.join("up", "a")
    await engine.cancel_flow_header(flow.id)
    assert held is not None or way == "waiting"
    match way:
        case "release":
            await engine.release(held.handle)  # type: ignore[union-attr]
        case "retry":
            await engine.fail(held.handle, "boom")  # type: ignore[union-attr]
        case "delay":
            await engine.delay(held.handle, timedelta(seconds=5))  # type: ignore[union-attr]
        case "resume":
            await engine.resume_execution(flow["a"], "operator")
        case "wait_children":
            await engine.wait_children(held.handle)  # type: ignore[union-attr]
    await clock.advance(seconds=20)
    await engine.run_timers("delay")
    vector = await flow.vector("a")
    assert (vector["eligibility_state"], vector["blocking_reason"]) == ("blocked_by_operator", "paused_by_flow_cancel")
    assert await engine.claim_many(limit=10, **WORKER) == []
    await clock.advance(seconds=11)
    await drain(engine)
    assert await flow.state("a") == "cancelled"


# Replay


async def test_a_skipped_member_is_recognised(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"a": (), "x": (), "b": ("a", "x")})
    await flow.fail("a")
    await flow.cancel("x")
    assert (await engine.replay_execution(flow["b"])).public_state == "waiting_children"
    assert not await flow.claimable("b")
    for name in "ax":
        await engine.replay_execution(flow[name])
    await flow.complete("a")
    assert await flow.state("b") == "waiting_children", "one of two"
    await flow.complete("x")
    assert await flow.state("b") == "waiting"


async def test_replay_resets_the_group(engine: CheckedEngine) -> None:
    flow = await submitted(engine, fan_in(3), {"join": Quorum(2, LET_RUN)})
    await flow.fail("u1", "u2", "u3")
    await engine.replay_execution(flow["join"])
    assert await flow.counts("join") == (0, 0, 0, 3)
    assert (await flow.group("join")).group_state == PENDING
    for name in ("u1", "u2"):
        await engine.replay_execution(flow[name])
        await flow.complete(name)
    assert await flow.state("join") == "waiting"


async def test_an_old_failure_is_forgiven_and_a_later_success_counts(engine: CheckedEngine) -> None:
    flow = await submitted(engine, PAIR)
    await flow.fail("a")
    await engine.replay_execution(flow["b"])
    assert await EdgeRepair(engine).run_once() == 0
    await drain(engine)
    assert await flow.state("b") == "waiting_children"
    other = await submitted(engine, PAIR)
    await other.fail("a")
    await engine.replay_execution(other["a"])
    await other.complete("a")
    assert (await engine.replay_execution(other["b"])).public_state == "waiting"


async def test_the_limit_holds_and_dependencies_are_not_jumped(engine: CheckedEngine) -> None:
    flow = await submitted(engine, PAIR, policy=ExecutionPolicy(max_replay_count=1))
    await flow.cancel("b")
    assert (await engine.replay_execution(flow["b"])).public_state == "waiting_children"
    assert (await engine.list_events(flow["b"])).items[-1].details == {
        "branch": "skipped_flow_member",
        "groups_reset": 1,
    }
    await flow.cancel("b")
    with pytest.raises(StateError, match="max_replays_exhausted"):
        await engine.replay_execution(flow["b"])
