"""Helpers for tests of flows: graphs with named members, ways to end them, and duties that tests run themselves.

A `Flow` is one flow; each member has its own kind, so that a test can claim a specific one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

import flowfabric as ff
from flowfabric._duties.cascade import Cascade
from flowfabric._duties.child_cancel import ChildCancel
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric._duties.flow_summaries import FlowSummaries
from flowfabric._duties.sibling_cancel import SiblingCancel
from flowfabric.values.attempt import Claimed
from flowfabric.values.event import Event
from flowfabric.values.execution import Execution, NewExecution
from flowfabric.values.flow import Applied, Edge, EdgeGroup, FlowSnapshot, FlowSummary, GroupState, Staged
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.joins import AllOf, EdgeGroupPolicy
from flowfabric.values.lease import Operator
from tests.support import WORKER, claim_one, submit

LONG = timedelta(days=30)
PENDING, SATISFIED, IMPOSSIBLE = GroupState.PENDING, GroupState.SATISFIED, GroupState.IMPOSSIBLE

Graph: TypeAlias = Mapping[str, Sequence[str]]
Policies: TypeAlias = Mapping[str, EdgeGroupPolicy]


class Flow:
    """A flow, its members and edges by name: the edge from `a` to `b` is called `a>b`."""

    def __init__(self, engine: ff.Engine, flow_id: FlowId) -> None:
        self.engine = engine
        self.id = flow_id
        self.members: dict[str, ExecutionId] = {}
        self.edges: dict[str, UUID] = {}

    def __getitem__(self, name: str) -> ExecutionId:
        return self.members[name]

    # Growing

    async def member(self, name: str, **fields: Any) -> ExecutionId:
        """One more member, made and added."""
        made = await self.execution(name, **fields)
        await self.engine.add_execution_to_flow(self.id, made)
        return made

    async def execution(self, name: str, **fields: Any) -> ExecutionId:
        """An execution that may become a member."""
        made = await submit(self.engine, **{"execution_kind": self.kind(name), "flow_id": self.id, **fields})
        self.members[name] = made
        return made

    async def stage(self, upstream: str, downstream: str, ref: str | None = None, edge: str | None = None) -> Staged:
        """An edge that gates nothing yet."""
        edge_id = self.edges[edge or f"{upstream}>{downstream}"] = mint_uuid()
        return await self.engine.stage_dependency_edge(
            self.id,
            edge_id=edge_id,
            upstream_execution_id=self[upstream],
            downstream_execution_id=self[downstream],
            expected_graph_revision=await self.revision(),
            data_passing_ref=ref,
        )

    async def apply(self, upstream: str, downstream: str, ref: str | None = None, edge: str | None = None) -> Any:
        """Let a staged edge gate."""
        return await self.engine.apply_dependency_to_child(
            self.id,
            edge_id=self.edges[edge or f"{upstream}>{downstream}"],
            upstream_execution_id=self[upstream],
            downstream_execution_id=self[downstream],
            data_passing_ref=ref,
        )

    async def join(self, upstream: str, downstream: str, ref: str | None = None, edge: str | None = None) -> Applied:
        """Stage and apply."""
        await self.stage(upstream, downstream, ref, edge)
        applied = await self.apply(upstream, downstream, ref, edge)
        assert isinstance(applied, Applied)
        return applied

    # Working

    def kind(self, name: str) -> str:
        return f"{name}.{str(self.id)[-6:]}"

    async def claim(self, name: str) -> Claimed:
        claimed = await claim_one(self.engine, kinds=[self.kind(name)], lease_ttl=LONG)
        assert claimed.execution_id == self[name]
        return claimed

    async def claimable(self, name: str) -> bool:
        return self[name] in await self.engine.scan_eligible_executions("default")

    async def complete(self, *names: str, result: bytes | None = None) -> None:
        for name in names:
            await self.engine.complete((await self.claim(name)).handle, result)

    async def fail(self, *names: str) -> None:
        for name in names:
            await self.engine.fail((await self.claim(name)).handle, "boom", failure_class="permanent")

    async def cancel(self, *names: str, reason: str = "enough") -> None:
        for name in names:
            await self.engine.cancel(Operator(self[name]), reason)

    async def drain(self) -> None:
        """Let all duties of flows go idle."""
        await drain(self.engine)

    # Looking

    async def states(self, *names: str) -> dict[str, str]:
        found = {one.execution_id: str(one.state) for one in await self.engine.list_flow_members(self.id)}
        return {name: found[self[name]] for name in (names or self.members)}

    async def state(self, name: str) -> str:
        return (await self.states(name))[name]

    async def record(self, name: str) -> Execution:
        record = await self.engine.read_execution(self[name])
        assert record is not None
        return record

    async def vector(self, name: str) -> dict[str, str]:
        vector = (await self.record(name)).state_vector
        return {field: str(getattr(vector, field)) for field in vector.__struct_fields__}

    async def describe(self) -> FlowSnapshot:
        found = await self.engine.describe_flow(self.id)
        assert found is not None
        return found

    async def revision(self) -> int:
        return (await self.describe()).graph_revision

    async def group(self, name: str) -> EdgeGroup:
        groups = {one.downstream_execution_id: one for one in (await self.describe()).edge_groups}
        return groups[self[name]]

    async def counts(self, name: str) -> tuple[int, int, int, int]:
        """Succeeded, failed, skipped, and of how many."""
        group = await self.group(name)
        return group.satisfied_count, group.failed_count, group.skipped_count, group.total_deps

    async def summary(self) -> FlowSummary:
        assert await self.engine.project_flow_summary(self.id)
        found = await self.engine.read_flow_summary(self.id)
        assert found is not None
        return found

    async def ends(self, name: str) -> list[Event]:
        """The completion events of a member."""
        return [event for event in (await self.engine.list_events(self[name])).items if event.outcome is not None]

    async def outcomes(self, name: str) -> list[str | None]:
        return [event.outcome for event in await self.ends(name)]


async def drain(engine: ff.Engine) -> None:
    """Let all duties of flows go idle."""
    busy = 1
    while busy:
        busy = 0
        for duty in (Cascade, SiblingCancel, ChildCancel, FlowCancel):
            busy += await duty(engine).run_once()
    await FlowSummaries(engine).run_once()


async def empty_flow(engine: ff.Engine, *members: str, **fields: Any) -> Flow:
    """A flow with these members and no edges."""
    flow = Flow(engine, FlowId(mint_uuid()))
    await engine.create_flow(flow.id, flow_kind="test", namespace=fields.get("namespace", ""))
    for name in members:
        await flow.member(name, **fields)
    return flow


async def submitted(
    engine: ff.Engine, graph: Graph, policies: Policies | None = None, ref: str | None = None, **fields: Any
) -> Flow:
    """A graph in one call."""
    flow = Flow(engine, FlowId(mint_uuid()))
    edges = {(up, down): mint_uuid() for down, ups in graph.items() for up in ups}
    made = await engine.submit_flow(
        [
            NewNode(
                name=name,
                execution=NewExecution(**{"execution_kind": flow.kind(name), **fields}),
                after=[NewEdge(upstream=up, edge_id=edges[up, name], data_passing_ref=ref) for up in ups],
                policy=(policies or {}).get(name, AllOf()),
            )
            for name, ups in graph.items()
        ],
        flow_id=flow.id,
        flow_kind="test",
        namespace=fields.get("namespace", ""),
    )
    flow.members = dict(made.nodes)
    flow.edges = {f"{up}>{down}": edge for (up, down), edge in edges.items()}
    return flow


async def one_by_one(
    engine: ff.Engine, graph: Graph, policies: Policies | None = None, ref: str | None = None, **fields: Any
) -> Flow:
    """The same graph, member by member and edge by edge."""
    flow = await empty_flow(engine, *graph, **fields)
    for name, policy in (policies or {}).items():
        assert await engine.set_edge_group_policy(flow.id, flow[name], policy) == "Set"
    for down, ups in graph.items():
        for up in ups:
            await flow.join(up, down, ref)
    return flow


async def in_batches(
    engine: ff.Engine, graph: Graph, policies: Policies | None = None, ref: str | None = None, **fields: Any
) -> Flow:
    """The same graph in two calls, one for the members and one for the edges."""
    flow = await empty_flow(engine)
    for name in graph:
        await flow.execution(name, **fields)
    await engine.add_executions_to_flow(flow.id, list(flow.members.values()))
    for name, policy in (policies or {}).items():
        await engine.set_edge_group_policy(flow.id, flow[name], policy)
    flow.edges = {f"{up}>{down}": mint_uuid() for down, ups in graph.items() for up in ups}
    edges = [
        Edge(edge_id=flow.edges[f"{up}>{down}"], upstream=flow[up], downstream=flow[down], data_passing_ref=ref)
        for down, ups in graph.items()
        for up in ups
    ]
    if edges:
        await engine.stage_and_apply_edges(flow.id, edges, expected_graph_revision=len(graph))
    return flow


Build: TypeAlias = Callable[..., Awaitable[Flow]]
BUILDS: dict[str, Build] = {"submitted": submitted, "one by one": one_by_one, "in batches": in_batches}

DIAMOND: Graph = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}
CHAIN: Graph = {"a": (), "b": ("a",), "c": ("b",), "d": ("c",)}


def fan_in(count: int, target: str = "join") -> dict[str, Sequence[str]]:
    """So many upstreams u1, u2, ... of one member."""
    ups = [f"u{n}" for n in range(1, count + 1)]
    return {**dict.fromkeys(ups, ()), target: ups}


async def hold(engine: ff.Engine, count: int, **fields: Any) -> list[Claimed]:
    """Claim so many executions, whichever they are."""
    held: list[Claimed] = []
    while len(held) < count:
        found = await engine.claim_many(limit=min(1000, count - len(held)), **WORKER, **{"lease_ttl": LONG, **fields})
        assert found, f"{len(held)} of {count} could be claimed"
        held += found
    return held


async def stored(sql: asyncpg.Connection[Any]) -> list[tuple[str, str]]:
    """Everything in the database, to see that nothing changed."""
    tables = await sql.fetch(
        "select relname from pg_class where relnamespace = 'flowfabric'::regnamespace and relkind = 'r'"
        " and relname not in ('sleeper', 'route') order by relname"
    )
    statement = " union all ".join(
        f"select '{row['relname']}', to_jsonb(t)::text from flowfabric.{row['relname']} t" for row in tables
    )
    return sorted((table, row) for table, row in await sql.fetch(statement))
