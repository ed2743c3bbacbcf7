"""Flows, operation by operation: every refusal in its order, every result, and the stored rows."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.engine.flow_reads import member_cursor
from flowfabric.errors import Conflict, Contention, Corruption, StateError, ValidationFailed
from flowfabric.values.attempt import Completion
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import (
    Added,
    AlreadyApplied,
    AlreadyMember,
    Applied,
    CancellationScheduled,
    Edge,
    FlowCancelled,
    FlowCreated,
    FlowExists,
    FlowState,
    FlowStatus,
    Staged,
)
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.joins import AllOf, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.wait import Fresh
from tests.ids import home, id_in
from tests.interleave import Party
from tests.sql.cases import outcome
from tests.sql.flowing import (
    BUILDS,
    CHAIN,
    DIAMOND,
    IMPOSSIBLE,
    PENDING,
    SATISFIED,
    Build,
    Flow,
    empty_flow,
    fan_in,
    hold,
    one_by_one,
    stored,
    submitted,
)
from tests.support import RETRY, CheckedEngine, Clock, submit, submit_member

HOUR = timedelta(hours=1)
LET_RUN = OnSatisfied.LET_RUN
BLOCKED = {
    "lifecycle_phase": "runnable", "ownership_state": "unowned", "eligibility_state": "blocked_by_dependencies",
    "blocking_reason": "waiting_for_children", "terminal_outcome": "none", "attempt_state": "pending_first_attempt",
    "public_state": "waiting_children",
}  # fmt: skip
RELEASED = BLOCKED | {
    "eligibility_state": "eligible_now", "blocking_reason": "waiting_for_worker", "public_state": "waiting",
}  # fmt: skip


def unknown_flow(partition: int) -> FlowId:
    """The id of no flow, in this partition."""
    return FlowId(id_in(partition))


# Refusals: a call that breaks several rules is refused for the first of them, and nothing is changed.

Words = dict[str, Any]


class Scene:
    """An open flow and a closed one, each a > b > c with d apart; b > c is staged only. And strangers."""

    def __init__(self, engine: ff.Engine) -> None:
        self.engine = engine
        self.flows: dict[str, Flow] = {}
        self.taken: dict[str, ExecutionId] = {}

    async def build(self) -> None:
        for name in ("open", "closed"):
            flow = await empty_flow(self.engine, "a", "b", "c", "d")
            await flow.join("a", "b", "ref")
            await flow.stage("b", "c", "ref")
            stranger = await flow.execution("stranger")
            taken = id_in(home(stranger))
            other = Flow(self.engine, unknown_flow(home(taken)))
            await self.engine.create_flow(other.id)
            await other.member("taken", execution_id=taken)
            self.flows[name], self.taken[name] = flow, taken
        await self.engine.cancel_flow(self.flows["closed"].id, policy="flow_only")

    def flow(self, words: Words) -> tuple[FlowId, Flow]:
        """The flow that is meant, and the one whose members are."""
        if words["flow"] == "missing":
            members = self.flows["open"]
            return unknown_flow(home(members["a"])), members
        return self.flows[words["flow"]].id, self.flows[words["flow"]]

    def execution(self, words: Words, name: str) -> ExecutionId:
        _, flow = self.flow(words)
        match name:
            case "unknown":
                return id_in(home(flow["a"]))
            case "elsewhere":
                return id_in((home(flow["a"]) + 1) % 256)
            case "taken":
                return self.taken["closed" if words["flow"] == "closed" else "open"]
            case _:
                return flow[name]

    def edge(self, words: Words) -> UUID:
        return self.flow(words)[1].edges.get(words["edge"]) or mint_uuid()

    async def add(self, words: Words) -> Any:
        return await self.engine.add_execution_to_flow(self.flow(words)[0], self.execution(words, words["execution"]))

    async def stage(self, words: Words) -> Any:
        flow_id, flow = self.flow(words)
        upstream = self.execution(words, words["upstream"])
        downstream = upstream if words["downstream"] == "itself" else self.execution(words, words["downstream"])
        return await self.engine.stage_dependency_edge(
            flow_id,
            edge_id=self.edge(words),
            upstream_execution_id=upstream,
            downstream_execution_id=downstream,
            expected_graph_revision=(await flow.revision()) + words["ahead"],
            dependency_kind=words["kind"],
        )

    async def apply(self, words: Words) -> Any:
        return await self.engine.apply_dependency_to_child(
            self.flow(words)[0],
            edge_id=self.edge(words),
            upstream_execution_id=self.execution(words, words["upstream"]),
            downstream_execution_id=self.execution(words, words["downstream"]),
            dependency_kind=words["kind"],
            data_passing_ref=words["ref"],
        )

    async def policy(self, words: Words) -> Any:
        return await self.engine.set_edge_group_policy(
            self.flow(words)[0], self.execution(words, words["downstream"]), words["policy"]
        )


Rule = tuple[str, Words, type[ff.FlowFabricError], str]
MISSING: Rule = ("the flow is missing", {"flow": "missing"}, ff.NotFound, "not found: flow")
CLOSED: Rule = ("the flow is closed", {"flow": "closed"}, StateError, "flow_already_terminal")

# Per operation: a call that is fine, and the rules in the order in which they are checked, each with the words that
# break it.
OPERATIONS: dict[str, tuple[Callable[[Scene, Words], Awaitable[Any]], Words, list[Rule]]] = {
    "add_execution_to_flow": (
        Scene.add,
        {"flow": "open", "execution": "stranger"},
        [
            ("another partition", {"execution": "elsewhere"}, ff.InvalidInput, "partition_mismatch"),
            MISSING,
            CLOSED,
            ("no such execution", {"execution": "unknown"}, ff.NotFound, "not found: execution"),
            ("member of another flow", {"execution": "taken"}, Conflict, "already_member_of_different_flow:"),
        ],
    ),
    "stage_dependency_edge": (
        Scene.stage,
        {"flow": "open", "edge": "new", "upstream": "c", "downstream": "d", "ahead": 0, "kind": "success_only"},
        [
            ("a self edge", {"downstream": "itself"}, Conflict, "self_referencing_edge"),
            ("an unknown kind", {"kind": "always"}, ValidationFailed, "invalid_dependency"),
            MISSING,
            CLOSED,
            ("a stale revision", {"ahead": 1}, Contention, "stale_graph_revision"),
            ("no member", {"upstream": "stranger"}, StateError, "execution_not_in_flow"),
            ("a cycle", {"downstream": "a"}, Conflict, "cycle_detected"),
            ("a known edge id", {"edge": "a>b"}, Conflict, "dependency_already_exists"),
        ],
    ),
    "apply_dependency_to_child": (
        Scene.apply,
        {"flow": "open", "edge": "b>c", "upstream": "b", "downstream": "c", "kind": "success_only", "ref": "ref"},
        [
            MISSING,
            CLOSED,
            ("no such edge", {"edge": "new"}, ValidationFailed, "invalid_dependency: edge_not_found"),
            ("another upstream", {"upstream": "a"}, ValidationFailed, "invalid_dependency: upstream_execution_id"),
            ("another downstream", {"downstream": "d"}, ValidationFailed, "invalid_dependency: downstream_exec"),
            ("another kind", {"kind": "always"}, ValidationFailed, "invalid_dependency: dependency_kind"),
            ("another reference", {"ref": "other"}, ValidationFailed, "invalid_dependency: data_passing_ref"),
        ],
    ),
    "set_edge_group_policy": (
        Scene.policy,
        {"flow": "open", "downstream": "d", "policy": AnyOf()},
        [
            MISSING,
            CLOSED,
            ("an edge is staged", {"downstream": "c"}, ff.InvalidInput, "edge_group_policy_already_fixed"),
        ],
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_call_is_refused_for_the_first_rule_it_breaks_and_changes_nothing(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], operation: str
) -> None:
    scene = Scene(plain_engine)
    await scene.build()
    call, fine, rules = OPERATIONS[operation]
    before = await stored(sql)
    for place, (name, broken, family, words) in enumerate(rules):
        for also in rules[place:]:
            with pytest.raises(family) as refused:
                await call(scene, fine | also[1] | broken)
            assert words in str(refused.value), f"{name}, and {also[0]}"
        assert await stored(sql) == before, name
    await call(scene, fine)
    assert await stored(sql) != before


async def test_a_refusal_for_another_flow_or_edge_says_which_is_there(engine: CheckedEngine) -> None:
    scene = Scene(engine)
    await scene.build()
    with pytest.raises(Conflict) as taken:
        await scene.add({"flow": "open", "execution": "taken"})
    assert taken.value.kind == "execution_already_in_flow"
    assert taken.value.existing in str(taken.value)
    flow = scene.flows["open"]
    with pytest.raises(Conflict) as known:
        await scene.stage(OPERATIONS["stage_dependency_edge"][1] | {"edge": "a>b"})
    assert known.value.edge == await engine.describe_edge(flow.id, flow.edges["a>b"])
    assert known.value.edge.data_passing_ref == "ref"


async def test_a_policy_that_cannot_be_is_refused(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a")
    before = await stored(sql)
    bad: list[Any] = [
        {"kind": "most_of"}, {"kind": "quorum"}, {"kind": "quorum", "k": 1, "on_satisfied": "later"}, {}, None,
        AnyOf("later"), *(Quorum(k) for k in (0, -1, 2**31, True, "2", 1.5, None)),
    ]  # fmt: skip
    for policy in bad:
        with pytest.raises(ff.InvalidInput, match="policy"):
            await engine.set_edge_group_policy(flow.id, flow["a"], policy)
    assert await stored(sql) == before


async def test_an_edge_whose_downstream_is_gone_or_was_moved_is_not_applied(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    """Cannot happen through the operations: membership is for good."""
    flow = await empty_flow(plain_engine, "a", "b")
    await flow.stage("a", "b")
    move = "update flowfabric.execution set flow_id = $2 where id = $1"
    for other, kind in ((None, "execution_not_in_flow"), (mint_uuid(), "execution_already_in_flow")):
        await sql.execute(move, flow["b"], other)
        assert await outcome(flow.apply("a", "b")) == kind
    await sql.execute(move, flow["b"], flow.id)
    await sql.execute("update flowfabric.execution set id = $2 where id = $1", flow["b"], gone := mint_uuid())
    with pytest.raises(ff.NotFound, match="execution"):
        await flow.apply("a", "b")
    await sql.execute("update flowfabric.execution set id = $2 where id = $1", gone, flow["b"])
    assert await flow.apply("a", "b") == Applied(1)


# Building (2.1 to 2.4)


async def test_a_flow_is_made_once_and_never_overwritten(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow_id = FlowId(mint_uuid())
    assert await engine.create_flow(flow_id, flow_kind="k", namespace="n") == FlowCreated(flow_id)
    made = await engine.describe_flow(flow_id)
    assert made is not None
    assert (made.flow_kind, made.namespace, made.public_flow_state) == ("k", "n", "open")
    assert (made.graph_revision, made.node_count, made.edge_count, made.tags) == (0, 0, 0, {})
    assert made.created_at == made.last_mutation_at
    before = await stored(sql)
    assert await engine.create_flow(flow_id, flow_kind="other", namespace="other") == FlowExists(flow_id)
    await engine.cancel_flow(flow_id)
    assert await engine.create_flow(flow_id) == FlowExists(flow_id)
    assert before != await stored(sql)
    again = await engine.describe_flow(flow_id)
    assert again is not None
    assert (again.flow_kind, again.public_flow_state) == ("k", "cancelled")
    other = await engine.create_flow()
    assert isinstance(other, FlowCreated)
    assert other.flow_id != flow_id


async def test_members_are_added_once(engine: CheckedEngine, sql: asyncpg.Connection[Any], clock: Clock) -> None:
    flow = await empty_flow(engine)
    one, two = await flow.execution("one"), await flow.execution("two")
    assert await engine.resolve_execution_flow_id(one) is None
    await clock.advance(seconds=1)
    assert await engine.add_execution_to_flow(flow.id, one) == Added(one, 1)
    assert await engine.resolve_execution_flow_id(one) == flow.id
    assert await engine.add_execution_to_flow(flow.id, two) == Added(two, 2)
    found = await flow.describe()
    assert (found.node_count, found.edge_count, found.graph_revision) == (2, 0, 2)
    assert found.last_mutation_at >= found.created_at + timedelta(seconds=1)
    before = await stored(sql)
    assert await engine.add_execution_to_flow(flow.id, one) == AlreadyMember(one, 2)
    assert await stored(sql) == before


@pytest.mark.parametrize("state", ["waiting", "delayed", "active", "suspended", "completed", "failed", "cancelled"])
async def test_an_execution_in_any_state_may_be_added_and_stays_in_it(engine: CheckedEngine, state: str) -> None:
    flow = await empty_flow(engine)
    await flow.execution("one", delay_until=HOUR if state == "delayed" else None)
    match state:
        case "active":
            await flow.claim("one")
        case "suspended":
            held = await flow.claim("one")
            await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
        case "completed":
            await flow.complete("one")
        case "failed":
            await flow.fail("one")
        case "cancelled":
            await flow.cancel("one")
    before = await flow.vector("one")
    claimable = await flow.claimable("one")
    assert await engine.add_execution_to_flow(flow.id, flow["one"]) == Added(flow["one"], 1)
    assert await flow.vector("one") == before
    assert before["public_state"] == state
    assert await flow.claimable("one") == claimable == (state == "waiting")


async def test_concurrent_adds_all_count(plain_engine: ff.Engine) -> None:
    flow = await empty_flow(plain_engine)
    made = [await flow.execution(f"m{n}") for n in range(20)]
    answers = await asyncio.gather(*(plain_engine.add_execution_to_flow(flow.id, one) for one in made))
    assert sorted(one.new_node_count for one in answers if isinstance(one, Added)) == list(range(1, 21))
    assert (await flow.describe()).node_count == await flow.revision() == 20


async def test_a_staged_edge_is_in_the_graph_and_gates_nothing(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    flow = await empty_flow(engine, "a", "b")
    before = await sql.fetch("select * from flowfabric.execution order by id")
    await clock.advance(seconds=1)
    assert await flow.stage("a", "b", "ref") == Staged(flow.edges["a>b"], 3)
    found = await flow.describe()
    assert (found.node_count, found.edge_count, found.graph_revision) == (2, 1, 3)
    assert found.last_mutation_at == await sql.fetchval("select created_at from flowfabric.edge")
    assert await sql.fetch("select * from flowfabric.execution order by id") == before
    group = await flow.group("b")
    assert (group.policy, group.total_deps, group.running_count, group.group_state) == (AllOf(), 0, 0, PENDING)
    edge = await engine.describe_edge(flow.id, flow.edges["a>b"])
    assert edge is not None
    assert (edge.upstream_execution_id, edge.downstream_execution_id) == (flow["a"], flow["b"])
    assert (edge.dependency_kind, edge.satisfaction_condition) == ("success_only", "all_required")
    assert (edge.data_passing_ref, edge.edge_state, edge.created_by) == ("ref", "pending", "engine")
    assert await flow.claimable("b")
    assert await engine.evaluate_flow_eligibility(flow["b"]) == "eligible"
    assert await flow.apply("a", "b", "ref") == Applied(1)
    again = await engine.describe_edge(flow.id, flow.edges["a>b"])
    assert again is not None
    assert again.edge_state == "applied"
    assert await flow.revision() == 3, "applying does not change the graph"


async def test_an_edge_is_applied_once(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a", "b")
    assert await flow.join("a", "b") == Applied(1)
    before = await stored(sql)
    assert await flow.apply("a", "b") == AlreadyApplied()
    assert await stored(sql) == before


async def test_an_empty_reference_is_none(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    await flow.stage("a", "b", "")
    edge = await engine.describe_edge(flow.id, flow.edges["a>b"])
    assert edge is not None
    assert edge.data_passing_ref is None
    assert await flow.apply("a", "b", None) == Applied(1)


async def test_parallel_edges_count_each(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    assert await flow.join("a", "b", edge="first") == Applied(1)
    assert await flow.join("a", "b", edge="second") == Applied(2)
    assert (await flow.group("b")).total_deps == 2
    await flow.complete("a")
    assert await flow.counts("b") == (2, 0, 0, 2)
    assert await flow.state("b") == "waiting"


async def test_of_many_callers_with_one_revision_one_stages(plain_engine: ff.Engine) -> None:
    flow = await empty_flow(plain_engine, *"abcdefgh")

    async def stage(upstream: str) -> str:
        return await outcome(
            plain_engine.stage_dependency_edge(
                flow.id,
                edge_id=mint_uuid(),
                upstream_execution_id=flow[upstream],
                downstream_execution_id=flow["h"],
                expected_graph_revision=8,
            )
        )

    answers = await asyncio.gather(*(stage(upstream) for upstream in "abcdefg"))
    assert sorted(answers) == ["Staged"] + ["stale_graph_revision"] * 6
    assert ((await flow.describe()).edge_count, await flow.revision()) == (1, 9)


async def test_a_cycle_is_found_over_staged_and_applied_edges(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, *"abcd")
    await flow.join("a", "b")
    await flow.stage("b", "c")
    await flow.join("c", "d")
    for upstream, downstream in (("b", "a"), ("c", "a"), ("d", "a"), ("d", "b"), ("c", "b")):
        with pytest.raises(Conflict, match="cycle_detected"):
            await flow.stage(upstream, downstream)
    assert await flow.revision() == 7
    assert await flow.stage("a", "d") == Staged(flow.edges["a>d"], 8)


# What applying does to the downstream (2.5)


async def test_a_runnable_downstream_is_blocked(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    assert await flow.join("a", "c") == Applied(1)
    assert await flow.vector("c") == BLOCKED
    assert (await flow.record("c")).blocking_detail == f"1 dep(s) unresolved incl {flow.edges['a>c']}"
    assert not await flow.claimable("c")
    assert await flow.join("b", "c") == Applied(2)
    assert (await flow.record("c")).blocking_detail == f"2 dep(s) unresolved incl {flow.edges['b>c']}"
    await flow.complete("a", "b")
    assert await flow.vector("c") == RELEASED
    assert (await flow.record("c")).blocking_detail is None
    assert await flow.claimable("c")


async def _run(flow: Flow) -> None:
    await flow.claim("c")


async def _suspend(flow: Flow) -> None:
    held = await flow.claim("c")
    await flow.engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))


async def _end(flow: Flow) -> None:
    await flow.complete("c")


async def _lose(flow: Flow) -> None:
    """Another worker may take it over."""
    held = await flow.claim("c")
    await flow.engine.revoke_lease(held.execution_id)


@pytest.mark.parametrize(
    ("prepare", "state"), [(_run, "active"), (_lose, "active"), (_suspend, "suspended"), (_end, "completed")]
)
@pytest.mark.parametrize("reopened", [False, True], ids=["first edge", "satisfied before"])
async def test_a_downstream_that_runs_waits_or_has_ended_is_left_alone(
    engine: CheckedEngine, prepare: Callable[[Flow], Awaitable[None]], state: str, reopened: bool
) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    if reopened:
        await flow.complete("a")
        assert await flow.join("a", "c") == Applied(0)
        assert (await flow.group("c")).satisfied_at is not None
    await prepare(flow)
    before = await flow.record("c")
    assert await flow.join("b", "c") == Applied(1)
    assert await flow.record("c") == before
    assert before.public_state == state
    group = await flow.group("c")
    assert (group.group_state, group.satisfied_at, group.total_deps) == (PENDING, None, 1 + reopened)
    await flow.complete("b")
    assert (await flow.group("c")).group_state == SATISFIED
    assert await flow.record("c") == before


async def test_a_satisfied_all_of_opens_again_while_its_downstream_has_not_begun(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.complete("a")
    await flow.join("a", "c")
    assert await flow.vector("c") == RELEASED
    await flow.join("b", "c")
    assert await flow.vector("c") == BLOCKED
    group = await flow.group("c")
    assert (group.group_state, group.satisfied_at) == (PENDING, None)
    await flow.complete("b")
    assert await flow.vector("c") == RELEASED


@pytest.mark.parametrize("policy", [AnyOf(), AnyOf(LET_RUN), Quorum(1), Quorum(1, LET_RUN)], ids=repr)
async def test_a_decided_race_stays_decided_when_edges_are_applied_later(
    engine: CheckedEngine, policy: EdgeGroupPolicy
) -> None:
    flow = await empty_flow(engine, "a", "b", "done", "c")
    await engine.set_edge_group_policy(flow.id, flow["c"], policy)
    await flow.complete("a", "done")
    await flow.join("a", "c")
    first = await flow.group("c")
    assert first.group_state == SATISFIED
    assert await flow.join("b", "c") == Applied(1)
    assert await flow.join("done", "c") == Applied(1)
    assert await flow.vector("c") == RELEASED
    group = await flow.group("c")
    assert (group.group_state, group.satisfied_at, group.total_deps) == (SATISFIED, first.satisfied_at, 3)
    await flow.drain()
    cancels = not isinstance(policy, AllOf) and policy.on_satisfied is OnSatisfied.CANCEL_REMAINING
    assert await flow.state("b") == ("cancelled" if cancels else "waiting")
    assert await flow.state("c") == "waiting"


async def test_an_edge_into_an_impossible_group_is_only_recorded(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.fail("a")
    await flow.join("a", "c")
    assert await flow.state("c") == "skipped"
    assert await flow.join("b", "c") == Applied(1)
    await flow.complete("b")
    assert await flow.counts("c") == (1, 1, 0, 2)
    assert (await flow.group("c")).group_state == IMPOSSIBLE
    assert await flow.outcomes("c") == ["skipped"]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
async def test_an_expired_delay_blocks_nothing(engine: CheckedEngine, clock: Clock, build: Build) -> None:
    flow = await build(engine, {"a": (), "b": ("a",)}, delay_until=HOUR)
    assert await flow.states() == {"a": "delayed", "b": "waiting_children"}
    assert (await flow.record("b")).delay_until is not None
    await clock.advance(minutes=61)
    await engine.run_timers("delay")
    await flow.complete("a")
    assert await flow.vector("b") == RELEASED
    assert (await flow.record("b")).delay_until is None


async def test_a_released_member_waits_for_the_rest_of_its_delay(engine: CheckedEngine, clock: Clock) -> None:
    flow = await empty_flow(engine, "a")
    await flow.member("b", delay_until=HOUR)
    due = (await flow.record("b")).delay_until
    await flow.join("a", "b")
    assert await flow.vector("b") == BLOCKED
    await flow.complete("a")
    assert await flow.vector("b") == RELEASED | {
        "eligibility_state": "not_eligible_until_time", "blocking_reason": "waiting_for_delay",
        "public_state": "delayed",
    }  # fmt: skip
    assert (await flow.record("b")).delay_until == due
    assert not await flow.claimable("b")
    await clock.advance(minutes=61)
    await engine.run_timers("delay")
    await flow.complete("b")


async def test_the_delay_of_a_blocked_member_passes_without_letting_it_go(engine: CheckedEngine, clock: Clock) -> None:
    flow = await empty_flow(engine, "a")
    await flow.member("b", delay_until=HOUR)
    await flow.join("a", "b")
    await clock.advance(minutes=61)
    await engine.run_timers("delay")
    assert await flow.vector("b") == BLOCKED
    await flow.complete("a")
    assert await flow.vector("b") == RELEASED


@pytest.mark.parametrize("way", ["retry", "release", "delay", "resume"])
async def test_an_execution_that_becomes_runnable_with_an_open_dependency_is_blocked(
    engine: CheckedEngine, clock: Clock, way: str
) -> None:
    """The edge came while it ran; its next start waits for it."""
    flow = await empty_flow(engine, "a")
    await flow.member("b", policy=RETRY)
    held = await flow.claim("b")
    await flow.join("a", "b")
    match way:
        case "retry":
            await engine.fail(held.handle, "boom")
        case "release":
            await engine.release(held.handle)
        case "delay":
            await engine.delay(held.handle, timedelta(seconds=10))
        case "resume":
            await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
            await engine.resume_execution(flow["b"], "operator")
    await clock.advance(seconds=11)
    await engine.run_timers("delay")
    vector = await flow.vector("b")
    assert (vector["eligibility_state"], vector["public_state"]) == ("blocked_by_dependencies", "waiting_children")
    assert not await flow.claimable("b")
    await flow.complete("a")
    again = await flow.claim("b")
    assert (again.handle.attempt_index == held.handle.attempt_index) == (way != "retry")
    await engine.complete(again.handle)


# Data passing (2.6)

PASSING: dict[str, tuple[EdgeGroupPolicy, list[tuple[str, str, bytes | None]], bytes]] = {
    # policy; per upstream: reference, end, result; what the downstream finds as its input
    "one edge": (AllOf(), [("ref", "success", b"X")], b"X"),
    "no reference": (AllOf(), [("", "success", b"X")], b"own"),
    "no result": (AllOf(), [("ref", "success", None)], b"own"),
    "an empty result": (AllOf(), [("ref", "success", b"")], b""),
    "the last of all": (AllOf(), [("ref", "success", b"X"), ("ref", "success", b"Y")], b"Y"),
    "the last that passes": (AllOf(), [("ref", "success", b"X"), ("", "success", b"Y")], b"X"),
    "the last that has one": (AllOf(), [("ref", "success", b"X"), ("ref", "success", None)], b"X"),
    "the first of any": (AnyOf(LET_RUN), [("ref", "success", b"X"), ("ref", "success", b"Y")], b"X"),
    "the first of any, without": (AnyOf(LET_RUN), [("", "success", b"X"), ("ref", "success", b"Y")], b"own"),
    "the first success of any": (AnyOf(LET_RUN), [("ref", "failed", None), ("ref", "success", b"Y")], b"Y"),
    "the second of two": (
        Quorum(2, LET_RUN), [("ref", "success", b"X"), ("ref", "success", b"Y"), ("ref", "success", b"Z")], b"Y",
    ),
}  # fmt: skip


async def _passing(engine: ff.Engine, case: str) -> tuple[Flow, bytes]:
    policy, upstreams, expected = PASSING[case]
    names = [f"u{n}" for n in range(1, len(upstreams) + 1)]
    flow = await empty_flow(engine, *names)
    await flow.member("down", input_payload=b"own")
    await engine.set_edge_group_policy(flow.id, flow["down"], policy)
    for name, (ref, _, _) in zip(names, upstreams, strict=True):
        await flow.stage(name, "down", ref)
    return flow, expected


async def _end_upstreams(flow: Flow, case: str) -> None:
    for n, (_, end, result) in enumerate(PASSING[case][1], 1):
        if end == "success":
            await flow.complete(f"u{n}", result=result)
        else:
            await flow.fail(f"u{n}")


@pytest.mark.each_value
@pytest.mark.parametrize("applied", ["before", "after"])
@pytest.mark.parametrize("case", PASSING)
async def test_a_result_becomes_the_input_downstream(engine: CheckedEngine, case: str, applied: str) -> None:
    """Whether the edges are applied before the upstreams end, or after it one by one."""
    if (case, applied) == ("the first success of any", "after"):
        pytest.skip("any of one upstream that failed is impossible")
    flow, expected = await _passing(engine, case)
    names = [name for name in flow.members if name != "down"]
    if applied == "after":
        await _end_upstreams(flow, case)
    for name, (ref, _, _) in zip(names, PASSING[case][1], strict=True):
        await flow.apply(name, "down", ref)
    if applied == "before":
        await _end_upstreams(flow, case)
    assert (await engine.read_execution_context(flow["down"])).input_payload == expected
    assert (await flow.claim("down")).input_payload == expected


async def test_results_of_one_batch_count_in_the_order_of_their_events(plain_engine: ff.Engine) -> None:
    for policy, place in ((AllOf(), 2), (Quorum(2, LET_RUN), 1)):
        flow = await submitted(plain_engine, fan_in(3), {"join": policy}, ref="ref")
        held = [await flow.claim(f"u{n}") for n in (2, 3, 1)]
        await plain_engine.complete_many([Completion(one.handle, bytes([n])) for n, one in enumerate(held)])
        ends = {one: (await flow.ends(one))[0].cursor.position for one in ("u1", "u2", "u3")}
        order = sorted(ends, key=ends.__getitem__)
        results = {"u2": b"\0", "u3": b"\1", "u1": b"\2"}
        assert (await flow.claim("join")).input_payload == results[order[place]]


async def test_a_result_is_not_passed_to_an_ended_execution(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    flow = await empty_flow(engine, "a")
    await flow.member("b", input_payload=b"own")
    await flow.join("a", "b", "ref")
    await flow.cancel("b")
    await flow.complete("a", result=b"X")
    assert (await engine.read_execution_context(flow["b"])).input_payload == b"own"
    assert await sql.fetchval("select count(*) from flowfabric.injected_input") == 0
    assert await flow.counts("b") == (1, 0, 0, 1)


async def test_results_can_be_read_beside_the_input(engine: CheckedEngine) -> None:
    """What a member passes is seen by the claim; the input stays what it was."""
    made = await engine.submit_flow(
        [
            NewNode(name="a", execution=NewExecution(execution_kind="a")),
            NewNode(name="b", execution=NewExecution(execution_kind="b")),
            NewNode(
                name="c",
                execution=NewExecution(execution_kind="c", input_payload=b"own"),
                after=[NewEdge(upstream="a", passes_result=True), NewEdge(upstream="b")],
            ),
        ]
    )
    flow = Flow(engine, made.flow_id)
    flow.members = made.nodes
    for held in await hold(engine, 2):
        await engine.complete(held.handle, held.execution_kind.encode())
    (claimed,) = await hold(engine, 1)
    assert claimed.input_payload == b"own"
    assert claimed.inputs is not None
    assert {uuid: one.result for uuid, one in claimed.inputs.items()} == {made.nodes["a"]: b"a"}


# Policies and their decisions (3)


async def test_a_policy_is_set_until_the_first_edge_is_staged(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a", "b")
    target = flow["b"]
    for policy, answer in [
        (Quorum(2), "Set"), (Quorum(2), "AlreadySet"), (Quorum(3), "Set"), (Quorum(3, LET_RUN), "Set"),
        ({"kind": "quorum", "k": 3, "on_satisfied": "let_run"}, "AlreadySet"), (AllOf(), "Set"),
        (AllOf(), "AlreadySet"),
        (AnyOf(), "Set"), ({"kind": "any_of"}, "AlreadySet"), (AnyOf(LET_RUN), "Set"), (Quorum(2**31 - 1), "Set"),
        (AnyOf(LET_RUN), "Set"),
    ]:  # fmt: skip
        assert await engine.set_edge_group_policy(flow.id, target, policy) == answer, policy  # type: ignore[arg-type]
    await flow.stage("a", "b")
    assert (await flow.group("b")).policy == AnyOf(LET_RUN)
    with pytest.raises(ff.InvalidInput, match="edge_group_policy_already_fixed: dependencies already staged"):
        await engine.set_edge_group_policy(flow.id, target, AnyOf(LET_RUN))


async def test_a_policy_may_be_set_before_its_execution_is_a_member(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, "a")
    later = id_in(home(flow["a"]))
    assert await engine.set_edge_group_policy(flow.id, later, AnyOf()) == "Set"
    assert (await flow.describe()).edge_groups == (), "a group is shown once an edge is staged"
    await flow.member("b", execution_id=later)
    await flow.stage("a", "b")
    assert (await flow.group("b")).policy == AnyOf()


def _decision(policy: str, k: int, n: int, succeeded: int, lost: int) -> str:
    """The table of the contract, for a group that is still pending."""
    if policy == "all_of":
        return "impossible" if lost else "satisfied" if n >= 1 and succeeded == n else "pending"
    if succeeded >= k:
        return "satisfied"
    return "impossible" if n >= k and lost > n - k else "pending"


@pytest.mark.both_servers
async def test_decisions_follow_the_table(sql: asyncpg.Connection[Any]) -> None:
    rows = [
        (policy, k, n, succeeded, lost)
        for policy, ks in (("all_of", [None]), ("any_of", [1]), ("quorum", [1, 2, 3, 5]))
        for k in ks
        for n in range(6)
        for succeeded in range(n + 1)
        for lost in range(n + 1 - succeeded)
    ]
    decide = await sql.prepare("select flowfabric.decide($1, $2, $3, $4, $5, $6)")
    for row in rows:
        policy, k, n, succeeded, lost = row
        wanted = _decision(policy, k or 0, n, succeeded, lost)
        assert await decide.fetchval(*row, "pending") == wanted, row
        assert await decide.fetchval(*row, "impossible") == "impossible", row
        again = wanted if policy == "all_of" else "satisfied"
        assert await decide.fetchval(*row, "satisfied") == again, row


ENDS = {"success": "succeeded", "failed": "failed", "cancelled": "failed", "expired": "failed", "skipped": "skipped"}


@pytest.mark.each_value
@pytest.mark.parametrize("policy", [AllOf(), AnyOf(LET_RUN), Quorum(2, LET_RUN)], ids=["all_of", "any_of", "quorum"])
@pytest.mark.parametrize("end", ENDS)
async def test_every_end_falls_into_its_bucket(
    engine: CheckedEngine, clock: Clock, policy: EdgeGroupPolicy, end: str
) -> None:
    flow = await empty_flow(engine, "root", "v")
    await flow.member("u", execution_deadline_at=HOUR)
    await flow.member("down")
    await engine.set_edge_group_policy(flow.id, flow["down"], policy)
    await flow.join("root", "u")
    await flow.join("u", "down")
    await flow.join("v", "down")
    match end:
        case "success":
            await flow.complete("root", "u")
        case "failed":
            await flow.complete("root")
            await flow.fail("u")
        case "cancelled":
            await flow.cancel("u")
        case "expired":
            await clock.advance(minutes=61)
            assert await engine.expire_execution(flow["u"], "execution_deadline") == "expired"
        case "skipped":
            await flow.fail("root")
            await flow.drain()
    group = await flow.group("down")
    counts = {"succeeded": group.satisfied_count, "failed": group.failed_count, "skipped": group.skipped_count}
    assert counts == {name: int(name == ENDS[end]) for name in counts}
    assert (group.total_deps, group.running_count) == (2, 1)
    lost = end != "success"
    wanted = _decision(
        "all_of" if isinstance(policy, AllOf) else "quorum", getattr(policy, "k", 1), 2, int(not lost), int(lost)
    )
    assert group.group_state == wanted
    assert (await engine.describe_edge(flow.id, flow.edges["u>down"])) is not None


SKIPPED = {
    "lifecycle_phase": "terminal", "ownership_state": "unowned", "eligibility_state": "not_applicable",
    "blocking_reason": "none", "terminal_outcome": "skipped", "public_state": "skipped",
}  # fmt: skip


@pytest.mark.parametrize("state", ["waiting", "delayed", "active", "suspended", "parked"])
async def test_an_impossible_group_skips_unfinished_executions(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], state: str
) -> None:
    flow = await empty_flow(engine, "a")
    await flow.member("b", delay_until=HOUR if state == "delayed" else None)
    held = await flow.claim("b") if state in ("active", "suspended", "parked") else None
    await flow.join("a", "b")
    if state == "suspended":
        assert held is not None
        await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    elif state == "parked":
        assert held is not None
        await engine.wait_children(held.handle)
    await flow.fail("a")
    record, vector = await flow.record("b"), await flow.vector("b")
    assert vector == SKIPPED | {"attempt_state": "none" if held is None else "attempt_terminal"}
    assert record.completed_at is not None
    assert (record.blocking_detail, record.delay_until) == (None, None)
    assert await flow.outcomes("b") == ["skipped"]
    assert (await flow.group("b")).group_state == IMPOSSIBLE
    assert await sql.fetchval("select count(*) from flowfabric.ready where id = $1", flow["b"]) == 0
    if held is None:
        assert await engine.list_attempts(flow["b"]) == []
        return
    (attempt,) = await engine.list_attempts(flow["b"])
    assert (attempt.attempt_lifecycle, attempt.failure_reason) == ("ended_cancelled", "dependency_impossible")
    for call in (engine.renew(held.handle), engine.complete(held.handle), engine.fail(held.handle, "x")):
        with pytest.raises(ff.FlowFabricError):
            await call
    if state == "suspended":
        assert await sql.fetchval("select count(*) from flowfabric.waitpoint where state <> 'closed'") == 0
    if state == "active":
        last = (await engine.list_events(flow["b"])).items[-1]
        assert (last.lease_type, last.reason) == ("revoked", "dependency_impossible")


@pytest.mark.parametrize("state", ["active", "suspended", "delayed", "completed"])
async def test_a_satisfied_group_releases_only_blocked_executions(
    engine: CheckedEngine, clock: Clock, state: str
) -> None:
    flow = await empty_flow(engine, "a", "b")
    held = await flow.claim("b")
    await flow.join("a", "b")
    match state:
        case "suspended":
            await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
        case "completed":
            await engine.complete(held.handle)
        case "delayed":
            await engine.delay(held.handle, HOUR)
    before = await flow.record("b")
    await flow.complete("a")
    after = await flow.record("b")
    assert after.public_state == state
    if state != "delayed":
        assert after == before


async def test_eligibility_follows_the_table(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, *"abcdefg")
    alone = id_in(1)
    assert await engine.evaluate_flow_eligibility(alone) == "not_found"
    assert await engine.evaluate_flow_eligibility(await submit(engine)) == "eligible"
    await flow.claim("c")
    assert await engine.evaluate_flow_eligibility(flow["c"]) == "not_runnable"
    await flow.complete("d")
    assert await engine.evaluate_flow_eligibility(flow["d"]) == "not_runnable"
    assert await engine.evaluate_flow_eligibility(flow["a"]) == "eligible"
    await flow.join("a", "b")
    assert await engine.evaluate_flow_eligibility(flow["b"]) == "blocked_by_dependencies"
    await flow.complete("a")
    assert await engine.evaluate_flow_eligibility(flow["b"]) == "eligible"
    await engine.set_edge_group_policy(flow.id, flow["g"], AnyOf(LET_RUN))
    await flow.join("e", "g")
    await flow.join("f", "g")
    await flow.complete("e")
    assert await engine.evaluate_flow_eligibility(flow["g"]) == "eligible", "one of two is enough"


async def test_eligibility_of_a_member_owed_a_cancel_may_be_impossible(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"a": (), "b": ("a",)})
    held = await flow.claim("a")
    await engine.cancel_flow_header(flow.id)
    await engine.fail(held.handle, "x", failure_class="permanent")
    assert await engine.evaluate_flow_eligibility(flow["b"]) == "impossible"
    assert await flow.state("b") == "waiting", "frozen, to be cancelled"


async def test_a_single_edge_can_be_resolved_by_hand(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a", "b", "c")
    await flow.stage("a", "c")

    async def resolve(upstream: str, end: str, edge: str | None = None, downstream: str = "c") -> str:
        return await engine.resolve_dependency(
            flow.id,
            edge_id=flow.edges[edge or f"{upstream}>c"],
            upstream_execution_id=flow[upstream],
            downstream_execution_id=flow[downstream],
            outcome=end,
        )

    before = await stored(sql)
    with pytest.raises(ValidationFailed, match="staged and not applied"):
        await resolve("a", "success")
    with pytest.raises(ValidationFailed, match="edge_not_found"):
        await resolve("b", "success", "a>c")
    with pytest.raises(ff.InvalidInput, match="outcome"):
        await resolve("a", "perhaps")
    assert await stored(sql) == before
    await flow.apply("a", "c")
    await flow.join("b", "c")
    assert await resolve("a", "success") == "Satisfied"
    assert await resolve("a", "failed") == "AlreadyResolved"
    assert await resolve("b", "expired") == "Impossible"
    assert await flow.counts("c") == (1, 1, 0, 2)
    assert await flow.state("c") == "skipped"


async def test_promoting_by_hand_repairs_only_what_is_wrong(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    flow = await submitted(plain_engine, {"a": (), "b": ("a",), "c": (), "d": ()})

    async def promote(name: str) -> str:
        return await outcome(plain_engine.promote_blocked_to_eligible(flow[name]))

    assert await promote("a") == "not_blocked_by_deps"
    assert await promote("b") == "deps_not_satisfied"
    await flow.complete("c")
    assert await promote("c") == "terminal"
    await flow.claim("d")
    assert await promote("d") == "not_runnable"
    with pytest.raises(ff.NotFound, match="execution"):
        await plain_engine.promote_blocked_to_eligible(id_in(1))
    await flow.complete("a")
    await sql.execute("select flowfabric.block_members($1, $2, '{x}', flowfabric.now())", [home(flow["b"])],
                      [flow["b"]])  # fmt: skip
    assert await flow.state("b") == "waiting_children"
    assert await promote("b") == "none"
    assert await flow.vector("b") == RELEASED


# Batch forms (10.3)


async def test_members_are_added_all_or_none(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine)
    made = [await flow.execution(f"m{n}") for n in range(4)]
    elsewhere = Flow(engine, unknown_flow(home(made[0])))
    await engine.create_flow(elsewhere.id)
    taken = await elsewhere.member("taken")
    unknown = id_in(home(made[0]))
    before = await stored(sql)
    for items, kind, words in [
        ([*made, unknown, unknown], "not_found", "execution_ids[4]"),
        ([*made, taken, unknown], "execution_already_in_flow", "execution_ids[4]"),
        ([made[0], unknown, taken], "not_found", "execution_ids[1]"),
        ([*made, id_in((home(unknown) + 1) % 256)], "invalid_input", "execution_ids[4]"),
        ([*made, "nonsense"], "invalid_input", "execution_ids[4]"),
        ("text", "invalid_input", "execution_ids"),
        (made * 300, "invalid_input", "1200 items"),
    ]:
        with pytest.raises(ff.FlowFabricError) as refused:
            await engine.add_executions_to_flow(flow.id, items)  # type: ignore[arg-type]
        assert (refused.value.kind, words in str(refused.value)) == (kind, True), refused.value
        assert await stored(sql) == before
    assert await engine.add_executions_to_flow(flow.id, [*made, made[0]]) == 4
    assert await flow.revision() == 4
    before = await stored(sql)
    assert await engine.add_executions_to_flow(flow.id, made[:2]) == 4
    assert await stored(sql) == before


async def test_edges_are_staged_and_applied_all_or_none(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, *"abcde")
    await flow.join("a", "b")
    await flow.execution("stranger")

    def edge(upstream: str, downstream: str, **fields: Any) -> Edge:
        return Edge(**{"edge_id": mint_uuid(), "upstream": flow[upstream], "downstream": flow[downstream], **fields})

    fine = [edge("b", "c"), edge("c", "d")]
    twice = edge("a", "e")
    before = await stored(sql)
    for edges, kind, place in [
        ([*fine, edge("d", "d"), edge("e", "e")], "self_referencing_edge", 2),
        ([*fine, edge("d", "e", dependency_kind="always")], "invalid_dependency", 2),
        ([*fine, edge("stranger", "e"), edge("e", "stranger")], "execution_not_in_flow", 2),
        ([*fine, edge("a", "e"), edge("d", "a"), edge("c", "a")], "cycle_detected", 3),
        ([edge("a", "e"), edge("e", "c"), edge("c", "e")], "cycle_detected", 2),
        ([*fine, edge("a", "e", edge_id=flow.edges["a>b"])], "dependency_already_exists", 2),
        ([twice, *fine, twice], "dependency_already_exists", 3),
        ([*fine, "nonsense"], "invalid_input", 2),
    ]:
        with pytest.raises(ff.FlowFabricError) as refused:
            await engine.stage_and_apply_edges(flow.id, edges, expected_graph_revision=6)  # type: ignore[arg-type]
        assert (refused.value.kind, f"edges[{place}]" in str(refused.value)) == (kind, True), refused.value
        assert await stored(sql) == before, kind
    with pytest.raises(Contention, match="stale_graph_revision"):
        await engine.stage_and_apply_edges(flow.id, fine, expected_graph_revision=5)
    with pytest.raises(ff.InvalidInput, match="edges"):
        await engine.stage_and_apply_edges(flow.id, [], expected_graph_revision=6)
    assert await stored(sql) == before
    assert await engine.stage_and_apply_edges(flow.id, fine, expected_graph_revision=6) == 8
    assert await flow.states("a", "b", "c", "d", "e") == {
        "a": "waiting", "b": "waiting_children", "c": "waiting_children", "d": "waiting_children", "e": "waiting",
    }  # fmt: skip
    assert {one.edge_state for one in await engine.list_edges(flow.id, outgoing=flow["c"])} == {"applied"}


async def test_a_batch_counts_upstreams_that_have_ended(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine, *"abcdef")
    await flow.complete("a", "b")
    await flow.fail("c")
    edges = [
        Edge(edge_id=mint_uuid(), upstream=flow[up], downstream=flow[down])
        for up, down in (("a", "d"), ("b", "d"), ("a", "e"), ("c", "e"), ("d", "f"))
    ]
    await engine.stage_and_apply_edges(flow.id, edges, expected_graph_revision=6)
    assert await flow.states("d", "e", "f") == {"d": "waiting", "e": "skipped", "f": "waiting_children"}


# A whole graph in one call


def node(
    name: str, *after: str | ExecutionId | NewEdge, policy: EdgeGroupPolicy | None = None, **fields: Any
) -> NewNode:
    return NewNode(
        name=name,
        execution=NewExecution(**{"execution_kind": f"kind-{name}", **fields}),
        after=[one if isinstance(one, NewEdge) else NewEdge(upstream=one) for one in after],
        policy=AllOf() if policy is None else policy,
    )


BAD_GRAPHS: dict[str, tuple[Any, type[ff.FlowFabricError], str]] = {
    "no nodes": ([], ff.InvalidInput, "0 nodes"),
    "no list": ("nodes", ff.InvalidInput, "a list of NewNode"),
    "no node": ([node("a"), "b"], ff.InvalidInput, "nodes[1]"),
    "no edge": ([NewNode(name="a", execution=NewExecution(execution_kind="k"), after=["b"])], ff.InvalidInput,
                "nodes[0].after"),
    "no name": ([node("")], ff.InvalidInput, "nodes[0].name"),
    "a name twice": ([node("a"), node("b"), node("a")], ff.InvalidInput, "nodes[2].name: 'a' is used twice"),
    "an unknown node": ([node("a"), node("b", "a", "x")], ff.InvalidInput, "'b' comes after 'x', which is not a node"),
    "a self edge": ([node("a"), node("b", "a", "b")], Conflict, "self_referencing_edge: node 'b'"),
    "a cycle of two": ([node("a", "b"), node("b", "a")], Conflict, "cycle_detected: "),
    "a quorum of too few": ([node("a"), node("b", "a", policy=Quorum(2))], ff.InvalidInput, "'b' wants 2 of 1"),
    "any of none": ([node("a", policy=AnyOf())], ff.InvalidInput, "'a' wants 1 of 0"),
    "a bad k": ([node("a"), node("b", "a", policy=Quorum(0))], ff.InvalidInput, "nodes[1].policy.k"),
    "an idempotency key": ([node("a", idempotency_key="k")], ff.InvalidInput, "nodes[0].execution.idempotency_key"),
    "a member of another flow": ([node("a", id_in(3, UUID(int=7)))], ff.InvalidInput, "nodes"),
    "an edge id twice": ([node("a"), node("b", *[NewEdge(upstream="a", edge_id=UUID(int=9))] * 2)], ff.InvalidInput,
                         "an edge id is given twice"),
    "a bad kind": ([node("a", execution_kind="a\0")], ff.InvalidInput, "execution_kind"),
}  # fmt: skip


async def test_an_invalid_graph_is_refused_by_name(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    before = await stored(sql)
    for case, (nodes, family, words) in BAD_GRAPHS.items():
        with pytest.raises(family) as refused:
            await engine.submit_flow(nodes)
        assert words in str(refused.value), case
    assert await stored(sql) == before


async def test_a_cycle_is_named_with_its_path(engine: CheckedEngine) -> None:
    nodes = [node("start"), node("a", "start", "d"), node("b", "a"), node("c", "b"), node("d", "c"), node("end", "d")]
    with pytest.raises(Conflict) as refused:
        await engine.submit_flow(nodes)
    way = refused.value.detail.split(" -> ")
    assert way[0] == way[-1]
    assert sorted(way[1:]) == ["a", "b", "c", "d"]
    after = {one.name: [edge.upstream for edge in one.after] for one in nodes}
    assert all(up in after[down] for up, down in itertools.pairwise(way))


async def test_a_graph_is_stored_as_it_was_given(engine: CheckedEngine, clock: Clock) -> None:
    flow_id = FlowId(mint_uuid())
    edge_id = mint_uuid()
    made = await engine.submit_flow(
        [
            node("late", "first", delay_until=HOUR),
            node("first", priority=7, tags={"app.part": "one"}, input_payload=b"in", namespace="team"),
            node("second", delay_until=HOUR),
            node("race", "first", NewEdge(upstream="second", edge_id=edge_id, data_passing_ref="r"), policy=Quorum(1)),
        ],
        flow_id=flow_id,
        flow_kind="etl",
        namespace="team",
        tags={"app.owner": "me"},
    )
    assert (made.flow_id, list(made.nodes), made.existed) == (flow_id, ["late", "first", "second", "race"], False)
    flow = Flow(engine, flow_id)
    flow.members = made.nodes
    assert await flow.states() == {
        "late": "waiting_children", "first": "waiting", "second": "delayed", "race": "waiting_children",
    }  # fmt: skip
    found = await flow.describe()
    assert (found.flow_kind, found.namespace, found.tags) == ("etl", "team", {"app.owner": "me"})
    assert (found.node_count, found.edge_count, found.graph_revision) == (4, 3, 7)
    assert {one.downstream_execution_id: one.policy for one in found.edge_groups} == {
        flow["late"]: AllOf(), flow["race"]: Quorum(1),
    }  # fmt: skip
    record = await flow.record("first")
    assert (record.priority, record.tags, record.namespace, record.flow_id) == (7, {"app.part": "one"}, "team", flow_id)
    edge = await engine.describe_edge(flow_id, edge_id)
    assert edge is not None
    assert (edge.upstream_execution_id, edge.data_passing_ref) == (flow["second"], "r")
    assert [one.name for one in await engine.list_flow_members(flow_id)] == [
        name for name, _ in sorted(made.nodes.items(), key=lambda one: one[1])
    ]
    (held,) = await hold(engine, 1)
    assert (held.execution_id, held.input_payload, held.flow_id) == (flow["first"], b"in", flow_id)
    await engine.complete(held.handle)
    assert await flow.states("late", "race") == {"late": "delayed", "race": "waiting"}
    await flow.drain()
    assert await flow.state("second") == "cancelled"
    await clock.advance(minutes=61)
    await engine.run_timers("delay")
    assert await flow.state("late") == "waiting"


async def test_members_of_higher_priority_are_claimed_first(engine: CheckedEngine) -> None:
    await engine.submit_flow([node("low"), node("high", priority=9), node("middle", priority=5)])
    assert [one.execution_kind for one in await hold(engine, 3)] == ["kind-high", "kind-middle", "kind-low"]


async def test_a_flow_id_is_used_once(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow_id = FlowId(mint_uuid())
    made = await engine.submit_flow([node("a"), node("b", "a")], flow_id=flow_id)
    before = await stored(sql)
    again = await engine.submit_flow([node("a"), node("b", "a")], flow_id=flow_id)
    assert again.existed
    assert again.nodes == made.nodes, "the stored nodes are returned, not those of this call"
    assert await stored(sql) == before
    await engine.cancel_flow(flow_id)
    assert (await engine.submit_flow([node("a")], flow_id=flow_id)).existed


async def test_a_closed_lane_refuses_the_whole_graph(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    await engine.submit_flow([node("x", lane_id="other"), node("y")])
    await engine.set_lane_state("other", "disabled")
    flow_id = FlowId(mint_uuid())
    before = await stored(sql)
    with pytest.raises(StateError, match="lane_closed: the lane other of node 'b'"):
        await engine.submit_flow([node("a"), node("b", "a", lane_id="other")], flow_id=flow_id)
    assert await engine.describe_flow(flow_id) is None
    assert await stored(sql) == before
    await engine.set_lane_state("other", "active")
    assert not (await engine.submit_flow([node("a"), node("b", "a", lane_id="other")], flow_id=flow_id)).existed


async def test_an_execution_that_exists_is_no_new_node(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine, "a")
    outside = await flow.execution("outside")
    new = unknown_flow(home(outside))
    before = await stored(sql)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: engine.submit_flow([node("n"), node("m", "n", execution_id=outside)], flow_id=new),
        lambda: engine.extend_flow(flow.id, [node("n"), node("m", "n", execution_id=outside)]),
    ]
    for call in calls:
        with pytest.raises(Conflict, match="node 'm'"):
            await call()
        assert await stored(sql) == before


async def test_an_edge_id_that_exists_is_no_new_edge(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await submitted(engine, {"a": (), "b": ("a",)})
    before = await stored(sql)
    with pytest.raises(Conflict, match="dependency_already_exists"):
        await engine.extend_flow(flow.id, [node("c", NewEdge(upstream=flow["b"], edge_id=flow.edges["a>b"]))])
    assert await stored(sql) == before


UPSTREAM_ENDS: dict[str, tuple[EdgeGroupPolicy, str, str]] = {
    # policy; the state of the old upstream; then that of the new member (its other upstream has not ended)
    "all_of, running": (AllOf(), "active", "waiting_children"),
    "all_of, succeeded": (AllOf(), "completed", "waiting_children"),
    "all_of, failed": (AllOf(), "failed", "skipped"),
    "any_of, running": (AnyOf(LET_RUN), "active", "waiting_children"),
    "any_of, succeeded": (AnyOf(LET_RUN), "completed", "waiting"),
    "any_of, failed": (AnyOf(LET_RUN), "failed", "waiting_children"),
    "quorum, failed": (Quorum(2, LET_RUN), "failed", "skipped"),
    "race, succeeded": (AnyOf(), "completed", "waiting"),
}


@pytest.mark.parametrize("case", UPSTREAM_ENDS)
async def test_a_flow_grows_behind_members_that_run_or_have_ended(engine: CheckedEngine, case: str) -> None:
    policy, state, expected = UPSTREAM_ENDS[case]
    flow = await submitted(engine, {"a": ()})
    match state:
        case "active":
            await flow.claim("a")
        case "completed":
            await flow.complete("a", result=b"X")
        case "failed":
            await flow.fail("a")
    old = NewEdge(upstream=flow["a"], data_passing_ref="r")
    made = await engine.extend_flow(
        flow.id, [node("b"), node("c", old, "b", policy=policy), node("only", old), node("tail", "c")]
    )
    assert (made.flow_id, set(made.nodes), made.existed) == (flow.id, {"b", "c", "only", "tail"}, False)
    flow.members |= made.nodes
    await flow.drain()
    assert await flow.state("c") == expected
    only = {"active": "waiting_children", "completed": "waiting", "failed": "skipped"}[state]
    assert await flow.state("only") == only
    assert await flow.state("tail") == ("skipped" if expected == "skipped" else "waiting_children")
    assert await flow.state("b") == ("cancelled" if case.startswith("race") else "waiting")
    if only == "waiting":
        assert (await engine.read_execution_context(flow["only"])).input_payload == b"X"
    assert ((await flow.describe()).node_count, await flow.revision()) == (5, 9)


async def test_growing_is_refused_as_a_whole(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow, closed = await submitted(engine, {"a": ()}), await submitted(engine, {"a": ()})
    await engine.cancel_flow(closed.id, policy="flow_only")
    stranger = await flow.execution("stranger")
    unknown = id_in(home(flow["a"]))
    before = await stored(sql)
    for flow_id, nodes, kind in [
        (unknown_flow(5), [node("b")], "not_found"),
        (closed.id, [node("b", closed["a"])], "flow_already_terminal"),
        (flow.id, [node("b", flow["a"]), node("c", stranger)], "execution_not_in_flow"),
        (flow.id, [node("b", unknown)], "execution_not_in_flow"),
        (flow.id, [node("b", id_in((home(unknown) + 1) % 256))], "invalid_input"),
        (flow.id, [node("b", "c"), node("c", "b")], "cycle_detected"),
        (flow.id, [], "invalid_input"),
    ]:
        assert await outcome(engine.extend_flow(flow_id, nodes)) == kind
        assert await stored(sql) == before, kind


async def test_a_graph_may_be_part_of_the_callers_transaction(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    transaction = sql.transaction()
    await transaction.start()
    made = await engine.submit_flow([node("a"), node("b", "a")], connection=sql)
    assert await engine.describe_flow(made.flow_id) is None
    await transaction.rollback()
    assert await engine.describe_flow(made.flow_id) is None
    async with sql.transaction():
        made = await engine.submit_flow([node("a"), node("b", "a")], connection=sql)
        grown = await engine.extend_flow(made.flow_id, [node("c", made.nodes["b"])], connection=sql)
    assert {one.name for one in await engine.list_flow_members(made.flow_id)} == {"a", "b", "c"}
    assert list(grown.nodes) == ["c"]


# How much is asked of the database


async def _calls(party: Party, call: Awaitable[Any]) -> dict[str, int]:
    """The functions that a call runs in the database, and how often."""
    await party.begin()
    await party.connection.execute("set local track_functions = 'pl'")
    await call
    rows = await party.connection.fetch(
        "select funcname, calls from pg_stat_xact_user_functions where schemaname = 'flowfabric'"
    )
    await party.commit()
    return {row["funcname"]: row["calls"] for row in rows}


class Statements(ff.Engine):
    """Counts what is asked."""

    asked: list[str]

    async def _fetch(self, statement: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        self.asked = [*getattr(self, "asked", []), statement]
        return await super()._fetch(statement, *args, repeatable=repeatable)

    async def _row(self, statement: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._fetch(statement, *args, repeatable=repeatable))[0]


async def test_every_operation_is_one_statement_for_any_size(database: str) -> None:
    async with await Statements.connect(database, notifications=False) as engine:
        for size in (3, 60):
            nodes = [node("root", execution_kind="root")]
            nodes += [node(f"n{n}", "root", execution_kind="n") for n in range(size)]
            nodes += [node("join", *(f"n{n}" for n in range(size)), execution_kind="join")]
            engine.asked = []
            made = await engine.submit_flow(nodes)
            await engine.extend_flow(made.flow_id, [node(f"x{n}", made.nodes["join"]) for n in range(size)])
            await engine.describe_flow(made.flow_id)
            await engine.list_edges(made.flow_id, outgoing=made.nodes["root"])
            await engine.list_flow_members(made.flow_id)
            await engine.project_flow_summary(made.flow_id)
            (root,) = await engine.claim_many(limit=1, kinds=["root"], worker_id="w", worker_instance_id="w")
            await engine.complete(root.handle)
            held = await engine.claim_many(limit=size, kinds=["n"], worker_id="w", worker_instance_id="w")
            assert len(held) == size
            await engine.complete_many([one.handle for one in held])
            await engine.cancel_flow_header(made.flow_id)
            await engine.reconcile_cancellations()
            assert len(engine.asked) == 12


async def test_the_number_of_statements_does_not_grow_with_the_graph(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    seen: dict[int, list[dict[str, int]]] = {}
    for size in (5, 200):
        party = await Party.join(database)
        engine = party
        nodes = [node("root", execution_kind=f"root{size}")]
        nodes += [node(f"n{n}", "root", execution_kind=f"n{size}") for n in range(size)]
        nodes += [node("join", *(f"n{n}" for n in range(size)), execution_kind="join")]
        nodes += [node(f"race{n}", execution_kind=f"race{size}") for n in range(size)]
        nodes += [node("won", *(f"race{n}" for n in range(size)), policy=AnyOf(), execution_kind="won")]
        made = await engine.submit_flow(nodes)
        (root,) = await hold(engine, 1, kinds=[f"root{size}"])
        calls = [await _calls(party, engine.complete(root.handle))]
        held = await hold(engine, size, kinds=[f"n{size}"])
        calls.append(await _calls(party, engine.complete_many([one.handle for one in held])))
        (first,) = await hold(engine, 1, kinds=[f"race{size}"])
        calls.append(await _calls(party, engine.complete(first.handle)))
        calls.append(await _calls(party, engine.cancel_siblings()))
        calls.append(await _calls(party, engine.cancel_flow_header(made.flow_id)))
        seen[size] = calls
        await party.close()
    for small, large in zip(seen[5], seen[200], strict=True):
        assert small
        assert small == large


# Reads (7)


async def test_the_description_shows_every_group_by_id(engine: CheckedEngine) -> None:
    assert await engine.describe_flow(FlowId(mint_uuid())) is None
    flow = await one_by_one(engine, DIAMOND, {"d": Quorum(1, LET_RUN)})
    await flow.member("e")
    await flow.stage("d", "e")
    await flow.complete("a")
    await flow.complete("b")
    found = await flow.describe()
    assert [one.downstream_execution_id for one in found.edge_groups] == sorted(
        (flow[name] for name in "bcde"), key=lambda one: one
    )
    group = await flow.group("d")
    assert (group.policy, group.total_deps, group.group_state) == (Quorum(1, LET_RUN), 2, SATISFIED)
    assert (group.satisfied_count, group.failed_count, group.skipped_count, group.running_count) == (1, 0, 0, 1)
    staged = await flow.group("e")
    assert (staged.total_deps, staged.running_count, staged.group_state) == (0, 0, PENDING)


@pytest.mark.parametrize(
    "damage",
    ["update flowfabric.edge_group set state = 'odd'", "update flowfabric.edge_group set policy = 'odd'",
     "update flowfabric.flow set cancellation_policy = 'odd'"],
)  # fmt: skip
async def test_stored_data_that_cannot_be_read_is_reported(
    database: str, sql: asyncpg.Connection[Any], damage: str
) -> None:
    async with await ff.Engine.connect(database, notifications=False) as engine:
        flow = await submitted(engine, {"a": (), "b": ("a",)})
        await sql.execute(damage)
        with pytest.raises(Corruption):
            await engine.describe_flow(flow.id)


async def test_edges_are_listed_by_side(engine: CheckedEngine) -> None:
    flow = await one_by_one(engine, DIAMOND)
    other = await submitted(engine, {"a": (), "b": ("a",)})

    async def listed(**side: ExecutionId) -> list[UUID]:
        return [one.edge_id for one in await engine.list_edges(flow.id, **side)]

    assert await listed(outgoing=flow["a"]) == sorted([flow.edges["a>b"], flow.edges["a>c"]])
    assert await listed(incoming=flow["d"]) == sorted([flow.edges["b>d"], flow.edges["c>d"]])
    assert await listed(incoming=flow["a"]) == await listed(outgoing=flow["d"]) == []
    assert await listed(outgoing=other["a"]) == [], "an edge of another flow"
    assert await listed(outgoing=await submit(engine)) == []
    assert await engine.list_edges(FlowId(mint_uuid()), incoming=flow["d"]) == []
    assert await engine.describe_edge(other.id, flow.edges["a>b"]) is None
    assert await engine.describe_edge(flow.id, mint_uuid()) is None
    with pytest.raises(ff.InvalidInput, match="outgoing"):
        await engine.list_edges(flow.id, outgoing=flow["a"], incoming=flow["a"])


async def test_edges_are_listed_page_by_page(engine: CheckedEngine) -> None:
    flow = await one_by_one(engine, DIAMOND)
    every = sorted(flow.edges.values())
    assert [one.edge_id for one in await engine.list_edges(flow.id)] == every
    for size in (1, 3, 4, 5):
        seen: list[UUID] = []
        while page := await engine.list_edges(flow.id, after=seen[-1] if seen else None, limit=size):
            assert len(page) <= size
            seen += [one.edge_id for one in page]
        assert seen == every
    first, second = await engine.list_edges(flow.id, outgoing=flow["a"])
    assert await engine.list_edges(flow.id, outgoing=flow["a"], limit=1) == [first]
    assert await engine.list_edges(flow.id, outgoing=flow["a"], after=first.edge_id) == [second]
    (first, second) = await engine.list_edges(flow.id, incoming=flow["d"])
    assert await engine.list_edges(flow.id, incoming=flow["d"], after=first.edge_id, limit=9) == [second]
    assert await engine.list_edges(FlowId(mint_uuid())) == []


async def test_a_flow_belongs_to_its_members_alone(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {"a": ()})
    assert await engine.resolve_execution_flow_id(flow["a"]) == flow.id
    assert await engine.resolve_execution_flow_id(await submit(engine)) is None
    assert await engine.resolve_execution_flow_id(id_in(0)) is None


async def test_flows_are_listed_page_by_page(engine: CheckedEngine) -> None:
    made = sorted(unknown_flow(7) for _ in range(5))
    for one in made:
        await engine.create_flow(one)
    await engine.create_flow(unknown_flow(8))
    first = await engine.list_flows(7, limit=2)
    assert [one.flow_id for one in first.items] == made[:2]
    assert first.next_cursor == made[1]
    second = await engine.list_flows(7, cursor=first.next_cursor, limit=3)
    assert [one.flow_id for one in second.items] == made[2:]
    assert second.next_cursor is None
    nothing = await engine.list_flows(7, limit=0)
    assert (list(nothing.items), nothing.next_cursor) == ([], None)
    assert list((await engine.list_flows(7, cursor=made[-1])).items) == []
    with pytest.raises(ff.InvalidInput, match="of another partition"):
        await engine.list_flows(8, cursor=made[0])


async def test_the_status_in_a_list_comes_from_header_and_summary(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    flow = await submitted(engine, {"a": ()})

    async def line() -> tuple[FlowStatus, FlowState | None]:
        page = await engine.list_flows(home(flow["a"]))
        return next((one.status, one.state) for one in page.items if one.flow_id == flow.id)

    assert await line() == ("active", "open"), "before it was ever counted"
    for state, wanted in [
        ("open", "active"), ("running", "active"), ("blocked", "active"), ("completed", "completed"),
        ("failed", "failed"), ("odd", "unknown"),
    ]:  # fmt: skip
        await flow.summary()
        await sql.execute("update flowfabric.flow_summary set state = $1", state)
        assert await line() == (wanted, None if wanted == "unknown" else state)
    await engine.cancel_flow(flow.id, policy="flow_only")
    assert await line() == ("cancelled", "cancelled")


async def test_the_newest_flows_are_found_first(engine: CheckedEngine) -> None:
    made = [(await engine.create_flow(flow_kind="k" if n % 2 else "j", namespace="team")).flow_id for n in range(5)]
    await engine.create_flow(namespace="others")
    first = await engine.find_flows(namespace="team", limit=3)
    assert [one.flow_id for one in first.items] == made[:1:-1]
    rest = await engine.find_flows(namespace="team", cursor=first.next_cursor, limit=3)
    assert ([one.flow_id for one in rest.items], rest.next_cursor) == (made[1::-1], None)
    assert [one.flow_id for one in (await engine.find_flows(flow_kind="k")).items] == [made[3], made[1]]
    with pytest.raises(ff.InvalidInput, match="cursor"):
        await engine.find_flows(cursor="nonsense")


# Tags (7.6)


async def test_tags_are_set_read_and_shown(engine: CheckedEngine, clock: Clock) -> None:
    flow = await empty_flow(engine)
    before = await flow.describe()
    await clock.advance(seconds=1)
    await engine.set_flow_tag(flow.id, "b.x", "1")
    after = await flow.describe()
    assert after.last_mutation_at >= before.last_mutation_at + timedelta(seconds=1)
    assert after.graph_revision == before.graph_revision
    assert await engine.set_flow_tags(flow.id, {"b.x": "2", "a.y": ""}) == 2
    found = await flow.describe()
    assert list(found.tags.items()) == [("a.y", ""), ("b.x", "2")]
    assert await engine.get_flow_tag(flow.id, "b.x") == "2"
    assert await engine.get_flow_tag(flow.id, "a.y") == ""
    assert await engine.get_flow_tag(flow.id, "b.z") is None
    assert await engine.get_flow_tag(FlowId(mint_uuid()), "b.x") is None
    await engine.cancel_flow(flow.id)
    await engine.set_flow_tag(flow.id, "b.x", "3")
    assert await engine.get_flow_tag(flow.id, "b.x") == "3"


async def test_a_bad_tag_key_is_refused_before_anything_is_asked(engine: CheckedEngine) -> None:
    unknown = FlowId(mint_uuid())
    bad: list[Any] = ["plain", "A.b", "1a.b", "a.", ".a", "a.B", "a-b.c", "a..", "", "a.b ", 5, None]
    for key in bad:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda key=key: engine.set_flow_tag(unknown, key, "v"),
            lambda key=key: engine.set_flow_tags(unknown, {"a.b": "v", key: "v"}),
            lambda key=key: engine.get_flow_tag(unknown, key),
        ]
        for call in calls:
            with pytest.raises(ValidationFailed, match=re.escape(repr(key))):
                await call()


async def test_tags_of_no_flow_and_empty_sets_are_refused(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    flow = await empty_flow(engine)
    before = await stored(sql)
    with pytest.raises(ff.NotFound, match="flow"):
        await engine.set_flow_tag(FlowId(mint_uuid()), "a.b", "v")
    with pytest.raises(ff.InvalidInput, match="tags"):
        await engine.set_flow_tags(flow.id, {})
    for tags in ({"a.b": "v", "bad": "v"}, {"a.b": "v", "a.c": 5}, {"a.b": "\0"}):
        with pytest.raises(ValidationFailed):
            await engine.set_flow_tags(flow.id, tags)  # type: ignore[arg-type]
    assert await stored(sql) == before


# Summaries (7.2)


async def test_a_flow_without_members_or_header_is_not_counted(engine: CheckedEngine) -> None:
    flow = await empty_flow(engine)
    assert not await engine.project_flow_summary(flow.id)
    assert not await engine.project_flow_summary(FlowId(mint_uuid()))
    assert await engine.read_flow_summary(flow.id) is None


async def test_a_flow_that_another_transaction_has_locked_delays_no_other_summary(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    flows = [FlowId(mint_uuid()) for _ in range(3)]
    for flow in flows:
        await submit_member(plain_engine, flow)
    async with sql.transaction():
        await sql.execute("select from flowfabric.flow where flow_id = $1 for no key update", flows[0])
        async with asyncio.timeout(60):
            assert await plain_engine.project_flow_summaries() == (2, False)
            assert await plain_engine.project_flow_summaries() == (0, False)
        assert await plain_engine.read_flow_summary(flows[0]) is None
        now = await plain_engine.read_flow_summary(flows[0], now=True)
        assert now is not None and now.members_waiting == 1
        assert await plain_engine.read_flow_summary(flows[0]) is None, "it stores nothing"
    assert await plain_engine.project_flow_summaries() == (1, False)
    assert await plain_engine.read_flow_summary(FlowId(mint_uuid()), now=True) is None


async def test_the_summary_counts_every_state(engine: CheckedEngine, clock: Clock) -> None:
    flow = await empty_flow(
        engine, "waiting", "active", "suspended", "resumable", "limited", "completed", "failed", "cancelled", "up", "on"
    )
    await flow.member("delayed", delay_until=HOUR)
    await flow.member("expired", execution_deadline_at=timedelta(seconds=5))
    await flow.member("skipped")
    await flow.claim("active")
    for name in ("suspended", "resumable"):
        held = await flow.claim(name)
        await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    await engine.resume_execution(flow["resumable"], "operator")
    await engine.block_execution_for_admission(flow["limited"], "waiting_for_quota")
    await flow.complete("completed")
    await flow.fail("failed")
    await flow.cancel("cancelled")
    await flow.join("up", "on")
    await flow.join("failed", "skipped")
    await clock.advance(seconds=6)
    await engine.expire_execution(flow["expired"], "execution_deadline")
    found = await flow.summary()
    assert (found.total_members, found.sampled_members) == (13, 13)
    names = [name for name in found.__struct_fields__ if name.startswith("members_")]
    assert {name: getattr(found, name) for name in names} == {
        "members_completed": 1, "members_failed": 1, "members_cancelled": 1, "members_expired": 1,
        "members_skipped": 1, "members_active": 1, "members_suspended": 1, "members_waiting": 3, "members_delayed": 1,
        "members_rate_limited": 1, "members_waiting_children": 1,
    }  # fmt: skip
    assert found.public_flow_state == "running"


async def test_only_flows_that_changed_are_counted_again(engine: CheckedEngine) -> None:
    flow, other = await submitted(engine, CHAIN), await submitted(engine, CHAIN)
    assert await engine.project_flow_summaries() == (2, False)
    assert await engine.project_flow_summaries() == (0, False)
    await flow.complete("a")
    assert await engine.project_flow_summaries() == (1, False)
    assert (await engine.read_flow_summary(flow.id)).members_completed == 1  # type: ignore[union-attr]
    await flow.cancel("b")
    await flow.drain()
    assert (await engine.read_flow_summary(flow.id)).members_skipped == 2  # type: ignore[union-attr]
    assert await engine.project_flow_summaries() == (0, False)
    await engine.cancel_flow(other.id, policy="flow_only")
    assert await engine.project_flow_summaries() == (1, False)


@pytest.mark.parametrize("step", ["claim", "suspend", "resume", "delay", "release", "block", "replay", "add"])
async def test_every_change_of_a_bucket_marks_the_flow(engine: CheckedEngine, step: str) -> None:
    flow = await submitted(engine, {"a": (), "b": ()})
    held = await flow.claim("a") if step not in ("claim", "block", "add") else None
    if held is not None and step in ("resume", "suspend"):
        suspended = engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
        if step == "resume":
            await suspended
    if held is not None and step == "replay":
        await engine.complete(held.handle)
    await engine.project_flow_summaries()
    match step:
        case "claim":
            await flow.claim("a")
        case "suspend":
            await suspended
        case "resume":
            await engine.resume_execution(flow["a"], "operator")
        case "delay":
            assert held is not None
            await engine.delay(held.handle, HOUR)
        case "release":
            assert held is not None
            await engine.release(held.handle)
        case "block":
            await engine.block_execution_for_admission(flow["a"], "waiting_for_quota")
        case "replay":
            await engine.replay_execution(flow["a"])
        case "add":
            await flow.member("c")
    await engine.project_flow_summaries()
    counted = await engine.read_flow_summary(flow.id)
    assert counted is not None
    fresh = await flow.summary()
    assert {n: getattr(counted, n) for n in counted.__struct_fields__ if n != "last_summary_update_at"} == {
        n: getattr(fresh, n) for n in fresh.__struct_fields__ if n != "last_summary_update_at"
    }


async def test_members_come_in_pages_in_creation_order(engine: CheckedEngine) -> None:
    flow = await submitted(engine, {name: [] for name in "abcdefg"})
    expected = [one.execution_id for one in await engine.list_flow_members(flow.id)]
    seen: list[ExecutionId] = []
    cursor: str | None = None
    while page := await engine.list_flow_members(flow.id, cursor=cursor, limit=3):
        seen += [one.execution_id for one in page]
        cursor = member_cursor(page[-1])
    assert seen == expected
    assert len(expected) == 7


async def test_a_cancel_that_waits_cancels_what_an_earlier_one_left_to_the_duties(engine: CheckedEngine) -> None:
    flow = await submitted(engine, CHAIN)
    scheduled = await engine.cancel_flow(flow.id, reason="first")
    assert isinstance(scheduled, CancellationScheduled)
    done = await engine.cancel_flow(flow.id, policy="flow_only", wait=True)
    assert isinstance(done, FlowCancelled)
    assert done.cancellation_policy == "cancel_all"
    assert {one.state for one in await engine.list_flow_members(flow.id)} == {"cancelled"}
    assert await engine.read_cancel_backlog(flow.id) is None
    assert isinstance(await engine.cancel_flow(flow.id, wait=True), FlowCancelled)
