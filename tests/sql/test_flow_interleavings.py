"""Every pair of calls on one flow, with the second started before the first commits.

Both serial orders are run as well, and they are the specification: two concurrent calls, once the duties are idle,
return and leave what one of the orders does (the first one, if the second waited), or, when the first was
rolled back, what the second leaves alone. The repair must find nothing to do, ever.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import Applied, Edge, FlowCancelHeader
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import mint_uuid
from flowfabric.values.joins import AnyOf, OnSatisfied, Quorum
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh, Suspended
from tests import sampling
from tests.flow_rules import check_settled, settle_flows
from tests.ids import home, id_in
from tests.interleave import PATIENCE, Party, Stage, settled, waiting
from tests.sql.flowing import LONG, Flow, submitted
from tests.support import WORKER

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = ExecutionPolicy(retry_policy=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(hours=1))))
LET_RUN = OnSatisfied.LET_RUN
REF = "result"


@pytest_asyncio.fixture(loop_scope="session")
async def parties(stage: Stage) -> list[Party]:
    return await stage.company(3)


# A scene is one flow, the leases of those of its members that run, and the ids that more than one call uses.


class Scene:
    def __init__(self, stage: Stage, parties: list[Party], flow: Flow) -> None:
        self.stage = stage
        self.parties = parties
        self.flow = flow
        self.handles: dict[str, Handle] = {}
        self.edges: dict[str, UUID] = {}
        self.waitpoints: dict[str, Any] = {}
        self.loose: dict[str, ff.ExecutionId] = {}
        self.revision = 0
        self.added = mint_uuid()

    def edge(self, name: str) -> UUID:
        return self.edges.setdefault(name, mint_uuid())

    async def hold(self, *names: str, lease_ttl: timedelta = LONG) -> None:
        for name in names:
            claimed = await self.parties[0].claim(**WORKER, kinds=[self.flow.kind(name)], lease_ttl=lease_ttl)
            assert claimed is not None and claimed.execution_id == self.flow[name]
            self.handles[name] = claimed.handle

    async def finish(self, *names: str) -> None:
        await self.hold(*names)
        for name in names:
            await self.parties[0].complete(self.handles[name], name.encode())

    async def fail(self, *names: str) -> None:
        await self.hold(*names)
        for name in names:
            await self.parties[0].fail(self.handles[name], "boom", failure_class="permanent")

    async def suspend(self, name: str) -> None:
        await self.hold(name)
        made = await self.parties[0].suspend(
            self.handles[name], waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k")
        )
        assert isinstance(made, Suspended)
        self.waitpoints[name] = made.details

    async def stage_edge(self, name: str) -> None:
        up, down = name.split(">")
        staged = await self.parties[0].stage_dependency_edge(
            self.flow.id,
            edge_id=self.edge(name),
            upstream_execution_id=self.flow[up],
            downstream_execution_id=self.flow[down],
            expected_graph_revision=await self.flow.revision(),
        )
        self.revision = staged.new_graph_revision

    async def unseen(self, name: str, *downstreams: str, act: Act | None = None) -> None:
        """End a member while the groups of its downstreams are locked: the rest stays pending."""
        holder = self.parties[2]
        await holder.begin()
        await holder.connection.execute(
            "select from flowfabric.edge_group where downstream = any($1) for update",
            [self.flow[down] for down in downstreams],
        )
        if name not in self.handles:
            await self.hold(name)
        await (act or complete(name)).call(self, self.parties[0])
        await holder.rollback()
        left = await self.stage.watch.fetch("select id from flowfabric.pending_cascade")
        assert self.flow[name] in [row["id"] for row in left]


@dataclass(frozen=True)
class Act:
    """One call. `skips`: it skips locked rows, so it is made again, `later` seconds after the other has ended."""

    name: str
    call: Callable[[Scene, Party], Awaitable[Any]]
    skips: bool = False
    later: float = 0

    @property
    def verb(self) -> str:
        """Its name without those of nodes and edges, which have no more than two letters in a row."""
        return " ".join(re.findall("[a-z_]{3,}", self.name))


Build: TypeAlias = Callable[[Stage, list[Party]], Awaitable[Scene]]


# What is done


def complete(name: str) -> Act:
    return Act(f"complete {name}", lambda s, p: p.complete(s.handles[name], name.encode()))


def fail(name: str) -> Act:
    return Act(f"fail {name}", lambda s, p: p.fail(s.handles[name], "boom", failure_class="permanent"))


def retry(name: str) -> Act:
    return Act(f"retry {name}", lambda s, p: p.fail(s.handles[name], "boom"))


def release(name: str) -> Act:
    return Act(f"release {name}", lambda s, p: p.release(s.handles[name]))


def renew(name: str) -> Act:
    return Act(f"renew {name}", lambda s, p: p.renew(s.handles[name]))


def delay(name: str) -> Act:
    return Act(f"delay {name}", lambda s, p: p.delay(s.handles[name], timedelta(hours=1)))


def wait_children(name: str) -> Act:
    return Act(f"wait_children {name}", lambda s, p: p.wait_children(s.handles[name]))


def cancel(name: str) -> Act:
    return Act(f"cancel {name}", lambda s, p: p.cancel(Operator(s.flow[name]), "enough"))


def replay(name: str) -> Act:
    return Act(f"replay {name}", lambda s, p: p.replay_execution(s.flow[name]))


def claim(name: str) -> Act:
    async def call(scene: Scene, party: Party) -> Any:
        return await party.claim(**WORKER, kinds=[scene.flow.kind(name)], lease_ttl=LONG)

    return Act(f"claim {name}", call, skips=True)


def resume(name: str) -> Act:
    return Act(f"resume {name}", lambda s, p: p.resume_execution(s.flow[name], "operator"))


def resume_later(name: str) -> Act:
    return Act(f"resume {name} later", lambda s, p: p.resume_execution(s.flow[name], "operator", timedelta(hours=1)))


def signal(name: str) -> Act:
    async def call(scene: Scene, party: Party) -> Any:
        at = scene.waitpoints[name]
        return await party.deliver_signal(
            scene.flow[name], at.waitpoint_id, at.waitpoint_token, signal_name="go", source_type="webhook"
        )

    return Act(f"signal {name}", call)


def apply(edge: str) -> Act:
    async def call(scene: Scene, party: Party) -> Any:
        up, down = edge.split(">")
        return await party.apply_dependency_to_child(
            scene.flow.id,
            edge_id=scene.edge(edge),
            upstream_execution_id=scene.flow[up],
            downstream_execution_id=scene.flow[down],
        )

    return Act(f"apply {edge}", call)


def stage_edge(edge: str) -> Act:
    async def call(scene: Scene, party: Party) -> Any:
        up, down = edge.split(">")
        return await party.stage_dependency_edge(
            scene.flow.id,
            edge_id=scene.edge(edge),
            upstream_execution_id=scene.flow[up],
            downstream_execution_id=scene.flow[down],
            expected_graph_revision=scene.revision,
        )

    return Act(f"stage {edge}", call)


def batch(*edges: str) -> Act:
    """Stage and apply."""

    async def call(scene: Scene, party: Party) -> Any:
        ends = [edge.split(">") for edge in edges]
        return await party.stage_and_apply_edges(
            scene.flow.id,
            [
                Edge(edge_id=scene.edge(edge), upstream=scene.flow[up], downstream=scene.flow[down])
                for edge, (up, down) in zip(edges, ends, strict=True)
            ],
            expected_graph_revision=scene.revision,
        )

    return Act(f"batch {' '.join(edges)}", call)


def add(name: str) -> Act:
    return Act(f"add {name}", lambda s, p: p.add_execution_to_flow(s.flow.id, s.loose.get(name) or s.flow[name]))


def policy(name: str) -> Act:
    return Act(f"policy of {name}", lambda s, p: p.set_edge_group_policy(s.flow.id, s.flow[name], AnyOf()))


def extend(*after: str, ref: str | None = REF) -> Act:
    async def call(scene: Scene, party: Party) -> Any:
        new = NewExecution(
            execution_kind=scene.flow.kind("x"),
            execution_id=id_in(home(scene.flow[after[0]]), scene.added),
        )
        edges = [NewEdge(upstream=scene.flow[up], edge_id=scene.edge(f"{up}>x"), data_passing_ref=ref) for up in after]
        return await party.extend_flow(scene.flow.id, [NewNode(name="x", execution=new, after=edges)])

    return Act(f"extend after {' '.join(after)}", call)


def header(chosen: str = "cancel_all") -> Act:
    return Act(
        f"header {chosen}",
        lambda s, p: p.cancel_flow_header(s.flow.id, reason="over", cancellation_policy=chosen),
    )


def ack(name: str) -> Act:
    return Act(f"ack {name}", lambda s, p: p.ack_cancel_member(s.flow.id, s.flow[name]))


def duty(kind: str) -> Act:
    return Act(f"{kind} duty", lambda s, p: p.run_timers(kind), skips=True, later=61)


def drain_siblings(name: str) -> Act:
    return Act(f"drain siblings of {name}", lambda s, p: p.drain_sibling_cancel_group(s.flow.id, s.flow[name]))


def mend_siblings(name: str) -> Act:
    return Act(
        f"reconcile siblings of {name}",
        lambda s, p: p.reconcile_sibling_cancel_group(s.flow.id, s.flow[name]),
        skips=True,
    )


def promote(name: str) -> Act:
    return Act(f"promote {name}", lambda s, p: p.promote_blocked_to_eligible(s.flow[name]))


def resolve(edge: str, outcome: str) -> Act:
    async def call(scene: Scene, party: Party) -> Any:
        up, down = edge.split(">")
        return await party.resolve_dependency(
            scene.flow.id,
            edge_id=scene.flow.edges[edge],
            upstream_execution_id=scene.flow[up],
            downstream_execution_id=scene.flow[down],
            outcome=outcome,
        )

    return Act(f"resolve {edge} {outcome}", call)


async def _reconcile_edges(scene: Scene, party: Party) -> None:
    repaired, _ = await party.reconcile_edges()
    assert repaired.reconciled == 0


DISPATCH = Act("dispatch", lambda s, p: p.dispatch_cascades(), skips=True)
DISPATCH_ONE = Act("dispatch one", lambda s, p: p.dispatch_cascades(limit=1, edges=1), skips=True)
SIBLINGS = Act("cancel siblings", lambda s, p: p.cancel_siblings(), skips=True)
MEMBERS = Act("cancel members", lambda s, p: p.reconcile_cancellations(), skips=True)
PROJECT = Act("project", lambda s, p: p.project_flow_summary(s.flow.id), skips=True)
PROJECT_TOUCHED = Act("project touched", lambda s, p: p.project_flow_summaries(), skips=True)
DELETE = Act("delete flow", lambda s, p: p.delete_flow(s.flow.id))
REPAIR = Act("reconcile edges", _reconcile_edges, skips=True)


# Where it is done


async def open_scene(stage: Stage, parties: list[Party], graph: Mapping[str, Sequence[str]], **given: Any) -> Scene:
    """A flow whose members may be tried again; none is claimed by chance, because each has a kind of its own."""
    await stage.empty()
    flow = await submitted(
        parties[0], graph, given.pop("policies", None), given.pop("ref", None), policy=RETRY, **given
    )
    scene = Scene(stage, parties, flow)
    scene.revision = await flow.revision()
    return scene


async def staged(stage: Stage, parties: list[Party]) -> Scene:
    """u runs, d could be claimed; the edge between them gates nothing yet, nor does one from v, which waits."""
    scene = await open_scene(stage, parties, {"u": (), "v": (), "d": (), "e": ()})
    await scene.hold("u")
    for edge in ("u>d", "v>d", "u>e"):
        await scene.stage_edge(edge)
    return scene


async def staged_after_failure(stage: Stage, parties: list[Party]) -> Scene:
    scene = await open_scene(stage, parties, {"u": (), "d": ()})
    await scene.stage_edge("u>d")
    await scene.fail("u")
    return scene


async def staged_after_success(stage: Stage, parties: list[Party]) -> Scene:
    scene = await open_scene(stage, parties, {"u": (), "d": ()})
    await scene.stage_edge("u>d")
    await scene.finish("u")
    return scene


async def staged_into_running(stage: Stage, parties: list[Party]) -> Scene:
    """Both run."""
    scene = await staged(stage, parties)
    await scene.hold("d")
    return scene


async def staged_into_suspended(stage: Stage, parties: list[Party]) -> Scene:
    scene = await staged(stage, parties)
    await scene.suspend("d")
    return scene


async def bare(stage: Stage, parties: list[Party]) -> Scene:
    """Members without edges."""
    scene = await open_scene(stage, parties, {"a": (), "b": (), "c": ()})
    scene.loose["l"] = await _loose(scene)
    return scene


async def _loose(scene: Scene) -> ff.ExecutionId:
    """An execution that could be added."""
    made = await scene.parties[0].create_execution(execution_kind="loose", flow_id=scene.flow.id)
    return made.execution_id


async def satisfied(stage: Stage, parties: list[Party]) -> Scene:
    """d was released by u1, and has not begun; an edge from u2, which runs, is staged."""
    scene = await open_scene(stage, parties, {"u1": (), "u2": (), "d": ("u1",)})
    await scene.stage_edge("u2>d")
    await scene.finish("u1")
    await scene.hold("u2")
    return scene


async def parent(stage: Stage, parties: list[Party]) -> Scene:
    """p runs and has two children, one of which is through."""
    scene = await open_scene(stage, parties, {"p": (), "c1": (), "c2": ()})
    await scene.hold("p", "c2")
    await scene.finish("c1")
    await parties[0].stage_and_apply_edges(
        scene.flow.id,
        [Edge(edge_id=scene.edge(f"{c}>p"), upstream=scene.flow[c], downstream=scene.flow["p"]) for c in ("c1", "c2")],
        expected_graph_revision=scene.revision,
    )
    return scene


async def parent_alone(stage: Stage, parties: list[Party]) -> Scene:
    """p runs; the edge from its child is staged."""
    scene = await open_scene(stage, parties, {"p": (), "c": ()})
    await scene.stage_edge("c>p")
    await scene.hold("p", "c")
    return scene


def fan_in(chosen: Any = None, *, ref: str | None = None) -> Build:
    async def build(stage: Stage, parties: list[Party]) -> Scene:
        """Three upstreams of d run; e waits for d."""
        graph = {"u1": (), "u2": (), "u3": (), "d": ("u1", "u2", "u3"), "e": ("d",)}
        policies = {} if chosen is None else {"d": chosen}
        scene = await open_scene(stage, parties, graph, policies=policies, ref=ref)
        await scene.hold("u1", "u2", "u3")
        return scene

    return build


def undispatched(chosen: Any = None, *, first: str = "complete", ref: str | None = None) -> Build:
    async def build(stage: Stage, parties: list[Party]) -> Scene:
        """u1 and u2 have ended, and their cascade is pending; u3 runs."""
        scene = await fan_in(chosen, ref=ref)(stage, parties)
        await scene.unseen("u1", "d", act=complete("u1") if first == "complete" else fail("u1"))
        await scene.unseen("u2", "d")
        return scene

    return build


async def two_undispatched(stage: Stage, parties: list[Party]) -> Scene:
    """u has ended for d1, d2 and d3, its cascade is pending; d2 also waits for v, which runs, and f for all of them."""
    graph = {"u": (), "v": (), "d1": ("u",), "d2": ("u", "v"), "d3": ("u",), "f": ("d1", "d2", "d3")}
    scene = await open_scene(stage, parties, graph)
    await scene.hold("v")
    await scene.unseen("u", "d1", "d2", "d3")
    return scene


async def undispatched_to_running(stage: Stage, parties: list[Party]) -> Scene:
    """p runs, and does not know yet that its child has failed."""
    scene = await parent(stage, parties)
    await scene.unseen("c2", "p", act=fail("c2"))
    return scene


async def chain(stage: Stage, parties: list[Party]) -> Scene:
    """b was skipped after a failed; c and d are still to be."""
    scene = await open_scene(stage, parties, {"a": (), "b": ("a",), "c": ("b",), "d": ("c",), "v": ()})
    await scene.stage_edge("v>c")
    await scene.hold("v")
    await scene.fail("a")
    return scene


async def race_over(stage: Stage, parties: list[Party]) -> Scene:
    """u1 has won; u2 runs, u3 waits for a retry, and both are to be cancelled. u4 runs, and its edge will be late."""
    graph: dict[str, Sequence[str]] = {"u1": (), "u2": (), "u3": (), "u4": (), "d": ("u1", "u2", "u3"), "o": ("u2",)}
    scene = await open_scene(stage, parties, graph, policies={"d": AnyOf()})
    await scene.stage_edge("u4>d")
    await scene.hold("u2", "u3", "u4")
    await retry("u3").call(scene, parties[0])
    await scene.finish("u1")
    return scene


async def race_lost(stage: Stage, parties: list[Party]) -> Scene:
    """Of three, two were wanted, and two have failed: d is skipped, u3 runs and is to be cancelled."""
    graph = {"u1": (), "u2": (), "u3": (), "d": ("u1", "u2", "u3"), "e": ("d",)}
    scene = await open_scene(stage, parties, graph, policies={"d": Quorum(2)})
    await scene.hold("u3")
    await scene.fail("u1", "u2")
    return scene


async def race_over_and_done(stage: Stage, parties: list[Party]) -> Scene:
    """As race_over, but u2 has ended by itself."""
    scene = await race_over(stage, parties)
    await complete("u2").call(scene, parties[0])
    return scene


async def two_races(stage: Stage, parties: list[Party]) -> Scene:
    """Two joins decided, with siblings in common."""
    graph = {"u1": (), "u2": (), "u3": (), "d": ("u1", "u2", "u3"), "e": ("u1", "u2", "u3")}
    scene = await open_scene(stage, parties, graph, policies={"d": AnyOf(), "e": AnyOf()})
    await scene.hold("u2")
    await scene.finish("u1")
    return scene


async def everything(stage: Stage, parties: list[Party]) -> Scene:
    """A member in every place, each ready for the call that is about to be made."""
    graph = {"w": (), "a": (), "s": (), "b": ("a",), "t": (), "x1": (), "z": (), "l": ()}
    scene = await open_scene(stage, parties, graph)
    await scene.stage_edge("x1>w")
    await scene.hold("l", lease_ttl=timedelta(seconds=5))
    await scene.hold("a", "z")
    await parties[0].delay(scene.handles["z"], timedelta(seconds=5))
    await scene.suspend("s")
    await scene.finish("t")
    scene.loose["n"] = await _loose(scene)
    await stage.clock.advance(seconds=6)
    return scene


def cancelled(chosen: str = "cancel_all") -> Build:
    async def build(stage: Stage, parties: list[Party]) -> Scene:
        """The same after the header, when its grace has passed."""
        scene = await everything(stage, parties)
        made = await header(chosen).call(scene, parties[0])
        assert isinstance(made, FlowCancelHeader)
        await stage.clock.advance(seconds=31)
        return scene

    return build


async def finished_while_owed(stage: Stage, parties: list[Party]) -> Scene:
    """a was owed a cancel when it ended by itself; it may be replayed."""
    scene = await cancelled()(stage, parties)
    await complete("a").call(scene, parties[0])
    return scene


async def last_two(stage: Stage, parties: list[Party]) -> Scene:
    """Two members are owed a cancel, and both have ended."""
    scene = await open_scene(stage, parties, {"a": (), "b": ()})
    await scene.hold("a", "b")
    await header().call(scene, parties[0])
    for name in ("a", "b"):
        await complete(name).call(scene, parties[0])
    return scene


async def over(stage: Stage, parties: list[Party]) -> Scene:
    """Everything has ended long ago; d was skipped."""
    scene = await open_scene(stage, parties, {"a": (), "b": (), "d": ("a", "b")})
    scene.loose["n"] = await _loose(scene)
    await cancel_loose(scene)
    await scene.finish("b")
    await scene.fail("a")
    await settle_flows(parties[0], stage.clock)
    await stage.clock.advance(days=15)
    return scene


async def cancel_loose(scene: Scene) -> None:
    await scene.parties[0].cancel(Operator(scene.loose["n"]), "unused")


async def skipped(stage: Stage, parties: list[Party]) -> Scene:
    """d was skipped after u failed; v, its other upstream, runs; an edge from w is staged."""
    scene = await open_scene(stage, parties, {"u": (), "v": (), "w": (), "d": ("u", "v"), "e": ("d",)}, ref=REF)
    await scene.stage_edge("w>d")
    await scene.hold("v", "w")
    await scene.fail("u")
    return scene


async def skipped_then_tried(stage: Stage, parties: list[Party]) -> Scene:
    """The same, but u was replayed and runs again."""
    scene = await skipped(stage, parties)
    await replay("u").call(scene, parties[0])
    await scene.hold("u")
    return scene


async def unapplied(stage: Stage, parties: list[Party]) -> Scene:
    """d has been cancelled without ever having had a dependency; the first is about to be applied."""
    scene = await staged(stage, parties)
    await cancel("d").call(scene, parties[0])
    return scene


async def unapplied_failure(stage: Stage, parties: list[Party]) -> Scene:
    """The same, but u has failed."""
    scene = await staged_after_failure(stage, parties)
    await cancel("d").call(scene, parties[0])
    return scene


# What meets


@dataclass(frozen=True, eq=False)
class Meeting:
    """Calls that meet in a scene: each of the left with each of the right, in both orders."""

    where: str
    build: Build
    left: Sequence[Act]
    right: Sequence[Act]
    known: dict[Any, Any] = field(default_factory=dict)

    def pairs(self) -> list[list[Case]]:
        """Of each two the cases: both orders, and the first of them undone where it is one of the left."""
        found: dict[frozenset[Act], dict[Case, None]] = {}
        for one, other in itertools.product(self.left, self.right):
            for first, second in ((one, other), (other, one)):
                cases = found.setdefault(frozenset((one, other)), {})
                cases[Case(self, first, second, "commit")] = None
                if first in self.left:
                    cases[Case(self, first, second, "rollback")] = None
        return [list(cases) for cases in found.values()]


@dataclass(frozen=True)
class Case:
    """Two calls: the second arrives while the transaction of the first is open, which then ends this way."""

    meeting: Meeting
    first: Act
    second: Act
    ending: str


MEETINGS = [
    Meeting(
        "staged", staged, [apply("u>d")],
        [complete("u"), fail("u"), cancel("u"), retry("u"), claim("d"), cancel("d"), header(), header("flow_only"),
         stage_edge("v>e"), batch("v>e"), extend("u")],
    ),
    Meeting("two applies", staged, [apply("u>d")], [apply("u>d"), apply("v>d"), apply("u>e")]),
    Meeting("apply after a failure", staged_after_failure, [apply("u>d")], [replay("u"), claim("d"), header()]),
    Meeting("apply after a success", staged_after_success, [apply("u>d")], [replay("u"), claim("d"), cancel("d")]),
    Meeting(
        "apply to a running one", staged_into_running, [apply("u>d")],
        [wait_children("d"), complete("d"), release("d"), retry("d"), delay("d")],
    ),
    Meeting(
        "apply to a suspended one", staged_into_suspended, [apply("u>d")], [resume("d"), resume_later("d"), signal("d")]
    ),
    Meeting("apply to a cancelled one", unapplied, [apply("u>d")], [replay("d"), complete("u")]),
    Meeting("apply a failure to a cancelled one", unapplied_failure, [apply("u>d")], [replay("d"), replay("u")]),
    Meeting("apply opens again", satisfied, [apply("u2>d")], [claim("d"), complete("u2"), fail("u2"), header()]),
    Meeting(
        "same revision", bare, [stage_edge("a>b"), batch("a>b", "b>c")],
        [stage_edge("a>b"), stage_edge("b>a"), add("l"), extend("a"), policy("b")],
    ),
    Meeting("two members", bare, [add("l")], [add("l"), extend("a"), header()]),
    Meeting("two policies", bare, [policy("b")], [policy("b"), header()]),
    Meeting(
        "parent", parent, [wait_children("p")],
        [complete("c2"), fail("c2"), cancel("c2"), cancel("p"), header(), complete("p")],
    ),
    Meeting("parent without a child yet", parent_alone, [wait_children("p")], [apply("c>p"), complete("c")]),
    Meeting("fan-in", fan_in(ref=REF), [complete("u1"), fail("u2")], [complete("u3"), cancel("d"), header(), REPAIR]),
    Meeting("first of three", fan_in(AnyOf(), ref=REF), [complete("u1"), fail("u2")], [complete("u2"), complete("u3")]),
    Meeting("two of three", fan_in(Quorum(2), ref=REF), [complete("u1")], [complete("u2"), fail("u3")]),
    Meeting("two of three, the others run on", fan_in(Quorum(2, LET_RUN)), [fail("u1")], [fail("u2"), complete("u3")]),
    Meeting(
        "undispatched", undispatched(), [DISPATCH],
        [DISPATCH, DISPATCH_ONE, complete("u3"), cancel("d"), replay("u1"), header(), REPAIR],
    ),
    Meeting("undispatched, in chunks", undispatched(), [DISPATCH_ONE], [DISPATCH_ONE, complete("u3"), replay("u1")]),
    Meeting(
        "undispatched, one a failure", undispatched(first="fail"), [DISPATCH],
        [DISPATCH, complete("u3"), cancel("d"), replay("u1"), header(), header("cancel_pending")],
    ),
    Meeting(
        "undispatched race", undispatched(AnyOf()), [DISPATCH],
        [DISPATCH_ONE, complete("u3"), SIBLINGS, resolve("u3>d", "success")],
    ),
    Meeting(
        "undispatched to many", two_undispatched, [DISPATCH_ONE],
        [DISPATCH_ONE, complete("v"), cancel("d1"), extend("d2"), replay("u")],
    ),
    Meeting(
        "undispatched to a running one", undispatched_to_running, [DISPATCH],
        [complete("p"), renew("p"), release("p"), wait_children("p"), cancel("p"), retry("p"), header()],
    ),
    Meeting(
        "skips behind skips", chain, [DISPATCH],
        [DISPATCH, cancel("c"), cancel("d"), apply("v>c"), replay("b"), header(), extend("c"), REPAIR],
    ),
    Meeting("decision and late apply", race_over, [apply("u4>d")], [SIBLINGS, complete("u4"), claim("d")]),
    Meeting(
        "race over", race_over, [SIBLINGS],
        [complete("u2"), fail("u2"), retry("u2"), renew("u2"), release("u2"), cancel("u3"), SIBLINGS,
         mend_siblings("d"), header(), claim("d")],
    ),
    Meeting("race over, one replayed", race_over_and_done, [SIBLINGS], [replay("u2"), mend_siblings("d")]),
    Meeting("race lost", race_lost, [SIBLINGS], [replay("d"), replay("u1"), complete("u3"), DISPATCH]),
    Meeting("two races", two_races, [SIBLINGS], [SIBLINGS, complete("u2"), DISPATCH]),
    Meeting(
        "cancel the flow", everything, [header()],
        [claim("w"), complete("a"), fail("a"), retry("a"), release("a"), delay("a"), duty("lease"), duty("delay"),
         signal("s"), resume("s"), resume_later("s"), apply("x1>w"), add("n"), stage_edge("a>w"), extend("a"),
         replay("t"), header(), cancel("b"), PROJECT],
    ),
    Meeting(
        "cancel what does not run", everything, [header("cancel_pending")],
        [claim("w"), complete("a"), retry("a"), release("a"), duty("lease"), resume("s"), duty("delay"), replay("t")],
    ),
    Meeting(
        "cancel members", cancelled(), [MEMBERS],
        [complete("a"), retry("a"), release("a"), delay("a"), wait_children("a"), duty("lease"), signal("s"),
         resume("s"), resume_later("s"), claim("w"), replay("t"), MEMBERS, header(), PROJECT_TOUCHED],
    ),
    Meeting("owed and finished", finished_while_owed, [replay("a")], [MEMBERS, ack("a"), DISPATCH]),
    Meeting("last two", last_two, [ack("a")], [ack("a"), ack("b"), MEMBERS]),
    Meeting(
        "forget", over, [duty("retention")],
        [extend("b"), replay("d"), replay("b"), add("n"), stage_edge("a>b"), DELETE, header(), PROJECT],
    ),
    Meeting("delete", over, [DELETE], [extend("b"), replay("d"), DELETE, PROJECT]),
    Meeting(
        "replay", skipped, [replay("d")],
        [replay("u"), replay("d"), apply("w>d"), complete("v"), fail("v"), DISPATCH, header(), REPAIR, promote("d")],
    ),
    Meeting("replay both", skipped_then_tried, [replay("d")], [complete("u"), fail("u"), DISPATCH, replay("e")]),
    Meeting("extend", staged, [extend("u")], [complete("u"), fail("u"), cancel("u"), header(), extend("u"), add("d")]),
    Meeting("extend after a failure", staged_after_failure, [extend("u")], [replay("u")]),
    Meeting("count", fan_in(), [PROJECT, PROJECT_TOUCHED], [complete("u1"), PROJECT_TOUCHED]),
]  # fmt: skip


def sampled() -> list[Case]:
    """One case of every two calls that meet, in rotation, and more until each call was first, second and undone."""
    pairs = [cases for meeting in MEETINGS for cases in meeting.pairs()]
    chosen = dict.fromkeys(sampling.rotate(pairs))
    seen = {sight for case in chosen for sight in sights(case)}
    for case in itertools.chain.from_iterable(pairs):
        if not sights(case) <= seen:
            chosen[case] = None
            seen |= sights(case)
    return list(chosen)


def sights(case: Case) -> set[tuple[str, str]]:
    if case.ending == "rollback":
        return {(case.first.verb, "undone")}
    return {(case.first.verb, "first"), (case.second.verb, "second")}


CASES = sampled()


# What is left

_PICTURE = """
select jsonb_build_object(
    'executions', (select jsonb_agg(jsonb_build_array(
        e.id, coalesce(e.node, r.kind), e.flow_id is not null, e.state, e.blocking_reason, e.pending, e.resume_pending,
        e.lease_lost, e.replays, e.attempts, e.retries, e.disposition, e.cancellation_reason, e.failure_reason,
        e.delay_until is not null, e.has_inputs,
        (select count(*) from flowfabric.ready x where x.partition = e.partition and x.id = e.id),
        (select convert_from(i.payload, 'utf8') from flowfabric.injected_input i
         where i.partition = e.partition and i.id = e.id),
        (select jsonb_agg(jsonb_build_array(
             v.outcome, v.lease_type, v.operator_type, v.signal_effect, v.reason) order by v.seq)
         from flowfabric.event v where v.partition = e.partition and v.id = e.id)))
        from flowfabric.execution e join flowfabric.route r on r.id = e.route),
    'edges', (select jsonb_agg(jsonb_build_array(d.upstream, d.downstream, d.applied_at is not null, d.outcome))
        from flowfabric.edge d),
    'groups', (select jsonb_agg(jsonb_build_array(
        g.downstream, g.policy, g.k, g.n, g.succeeded, g.failed, g.skipped, g.state, g.cancel_siblings_reason))
        from flowfabric.edge_group g),
    'flows', (select jsonb_agg(jsonb_build_array(
        f.state, f.node_count, f.edge_count, f.cancel_reason, f.cancellation_policy)) from flowfabric.flow f),
    'summaries', (select jsonb_agg(s.state) from flowfabric.flow_summary s))
"""


async def picture(stage: Stage) -> Any:
    """Everything that is stored, with names for ids and without times."""
    found = json.loads(await stage.watch.fetchval(_PICTURE))
    names = {row[0]: row[1].partition(".")[0] for row in found["executions"] or ()}
    for rows in (found["executions"], found["edges"], found["groups"]):
        for row in rows or ():
            row[:2] = [names.get(one, one) for one in row[:2]]
    for what in ("executions", "edges", "groups"):
        found[what] = sorted(json.dumps(row) for row in found[what] or ())
    return found


def said(act: Act, answer: Any) -> str:
    """An answer in a word or two. What a duty did is seen in what it left."""
    if isinstance(answer, FlowFabricError):
        return str(answer.kind)
    if act.skips:
        return ""
    match answer:
        case Applied():
            return f"applied, {answer.unsatisfied_count} open"
        case FlowCancelHeader():
            return f"cancelled, {answer.target_count} owed"
        case str() | int():
            return str(answer)
        case _:
            return f"{type(answer).__name__} {getattr(answer, 'public_state', '')}".strip()


async def repeated(call: Callable[[], Awaitable[Any]]) -> Any:
    """As the pool does it: what could not be serialized is asked again."""
    for _ in range(2):
        try:
            return await settled(call())
        except asyncpg.SerializationError:
            await asyncio.sleep(0.005)
    return await settled(call())


async def left(stage: Stage, party: Party) -> Any:
    """What is stored when the duties are done."""
    await settle_flows(party, stage.clock)
    return await picture(stage)


async def in_order(stage: Stage, parties: list[Party], meeting: Meeting, *acts: Act) -> Any:
    """What calls return one after the other, and what they leave. Kept, because several tests need it."""
    key = (stage.dsn, *(act.name for act in acts))
    if key not in meeting.known:
        scene = await meeting.build(stage, parties)
        answers = [said(act, await repeated(lambda act=act: act.call(scene, parties[0]))) for act in acts]  # type: ignore[misc]
        meeting.known[key] = answers, await left(stage, parties[0])
    return meeting.known[key]


async def at_once(stage: Stage, parties: list[Party], meeting: Meeting, first: Act, second: Act, ending: str) -> Any:
    """The same with the second arriving while the first is under way; and whether the second waited for it."""
    scene = await meeting.build(stage, parties)
    one, two, _ = parties
    await one.begin()
    answer = await settled(first.call(scene, one))
    task = asyncio.ensure_future(repeated(lambda: second.call(scene, two)))
    waited = await waits(stage, one, two, task)
    await one.end(ending)
    answers = [said(first, answer), said(second, await task)]
    if second.skips:
        await stage.clock.advance(seconds=second.later)
        answers[1] = said(second, await repeated(lambda: second.call(scene, two)))
    await stage.audit()
    after = await left(stage, one)
    await check_settled(one, stage.watch)
    if ending == "commit":
        await stage.audit()
    return waited, answers if ending == "commit" else answers[1:], after


async def waits(stage: Stage, one: Party, two: Party, task: asyncio.Task[Any]) -> bool:
    """Whether a call waits for the first one, or ends without."""
    async with asyncio.timeout(PATIENCE):
        while not task.done():
            if one.pid in await stage.watch.fetchval("select pg_blocking_pids($1)", two.pid):
                return True
            await asyncio.sleep(0.0005)
    return False


@pytest.mark.parametrize("meeting", MEETINGS, ids=lambda meeting: meeting.where)
async def test_concurrent_flow_calls_match_one_serial_order(
    stage: Stage, parties: list[Party], meeting: Meeting
) -> None:
    for case in CASES:
        if case.meeting is not meeting:
            continue
        first, second = case.first, case.second
        names = f"{first.name}, then {second.name}"
        try:
            waited, answers, after = await at_once(stage, parties, meeting, first, second, case.ending)
            if case.ending == "rollback":
                assert (answers, after) == await in_order(stage, parties, meeting, second), f"{names}, which was undone"
                continue
            orders = [await in_order(stage, parties, meeting, first, second)]
            if not waited:
                behind, left = await in_order(stage, parties, meeting, second, first)
                orders.append((behind[::-1], left))
            if (answers, after) not in orders:
                assert (answers, after) == orders[0], names
        except BaseException as error:
            error.add_note(names)
            raise


async def test_a_completion_that_finds_the_group_taken_leaves_the_rest_to_be_done(
    stage: Stage, parties: list[Party]
) -> None:
    one, two, _ = parties
    scene = await fan_in()(stage, parties)
    await one.begin()
    await complete("u1").call(scene, one)
    await asyncio.wait_for(complete("u2").call(scene, two), PATIENCE)  # does not wait
    left_over = await stage.watch.fetch("select id, outcome from flowfabric.pending_cascade")
    assert [tuple(row) for row in left_over] == [(scene.flow["u2"], "success")]
    await one.commit()
    assert await scene.flow.counts("d") == (1, 0, 0, 3)
    swept = await two.dispatch_cascades()
    assert (swept.finished, swept.resolved) == (1, 1)
    assert await scene.flow.counts("d") == (2, 0, 0, 3)
    await stage.audit()


@pytest.mark.parametrize("call", ["complete", "fail", "cancel"])
async def test_an_end_waits_for_no_group_and_no_downstream(stage: Stage, parties: list[Party], call: str) -> None:
    one, two, _ = parties
    for table, column in (("edge_group", "downstream"), ("execution", "id")):
        scene = await fan_in()(stage, parties)
        await one.begin()
        await one.connection.execute(f"select from flowfabric.{table} where {column} = $1 for update", scene.flow["d"])
        act = {"complete": complete, "fail": fail, "cancel": cancel}[call]("u1")
        await asyncio.wait_for(act.call(scene, two), PATIENCE)
        assert (await two.dispatch_cascades()).finished == 0
        await one.rollback()
        await settle_flows(two, stage.clock)
        await check_settled(two, stage.watch)
        assert await scene.flow.counts("d") == ((1, 0, 0, 3) if call == "complete" else (0, 1, 0, 3))


async def test_a_late_loser_and_a_drain_do_not_deadlock(stage: Stage, parties: list[Party]) -> None:
    one, two, holder = parties
    scene = await race_over(stage, parties)
    await holder.begin()
    await renew("u4").call(scene, holder)
    # It has the group, and waits for the upstream before it adds to what the group owes.
    late = await waiting(stage.watch, one, apply("u4>d").call(scene, one), behind=holder)
    drained = await waiting(stage.watch, two, drain_siblings("d").call(scene, two), behind=one)
    await holder.commit()
    assert isinstance(await late, Applied)
    assert await drained == "siblings_alive"
    assert await stage.watch.fetchval("select count(*) from flowfabric.sibling_cancel") == 1


async def test_members_of_a_cancelled_flow_that_come_back_are_never_claimable(
    stage: Stage, parties: list[Party]
) -> None:
    one = parties[0]
    scene = await cancelled()(stage, parties)
    for act in (release("a"), resume("s"), duty("lease"), duty("delay")):
        await act.call(scene, one)
        await stage.audit()
    await stage.clock.advance(days=31)
    await one.run_timers("lease")
    assert await one.claim_many(**WORKER, limit=100, kinds=[scene.flow.kind(name) for name in scene.flow.members]) == []


@pytest.mark.both_servers
@pytest.mark.parametrize("first", ["header", "dispatch"])
async def test_a_member_marked_to_be_cancelled_is_not_skipped(stage: Stage, parties: list[Party], first: str) -> None:
    one, two, _ = parties
    scene = await undispatched(first="fail")(stage, parties)
    acts = [header(), DISPATCH] if first == "header" else [DISPATCH, header()]
    await one.begin()
    await acts[0].call(scene, one)
    task = asyncio.ensure_future(settled(acts[1].call(scene, two)))
    waited = await waits(stage, one, two, task)
    await one.commit()
    await task
    await two.dispatch_cascades()
    assert waited == (first == "dispatch")
    # Skipped before the flow was cancelled; afterwards no member is.
    expected = {"header": "waiting", "dispatch": "skipped"}[first]
    assert await scene.flow.state("d") == expected
    assert (await scene.flow.group("d")).group_state == "impossible"
    await settle_flows(two, stage.clock)
    await check_settled(two, stage.watch)
    assert await scene.flow.outcomes("d") == [{"header": "cancelled", "dispatch": "skipped"}[first]]
    assert await scene.flow.outcomes("e") == ["cancelled"]
    await stage.audit()
