"""Flows: what edges cost a worker, what storing a graph costs, what cancelling one takes.

The other side of a drain is the same tasks without edges; of a submission, an insert of the same rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg

import flowfabric as ff
from benchmarks import tasks
from benchmarks.harness import Sample, Sizes
from benchmarks.product import FlowCancelled, NewEdge, NewNode, migrate_database, mint_many, mint_uuid, partition_of_id
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from benchmarks.workers import WorkersDrain
from flowfabric.values.execution import NewExecution

_WORKER = {"worker_id": "bench", "worker_instance_id": "bench-1"}
_REFERENCE_CANCEL_MS = 186.04
Edges = Callable[[int], Sequence[int]]  # of a node's number: the numbers of those it comes after


def chain(_: int) -> Edges:
    return lambda n: [n - 1] if n else []


def fan(nodes: int) -> Edges:
    """One, all but two beside each other, one."""
    return lambda n: [] if n == 0 else range(1, nodes - 1) if n == nodes - 1 else [0]


def layers(width: int) -> Callable[[int], Edges]:
    """Layers of this many nodes, each after the node above it and that one's neighbour."""

    def of(_: int) -> Edges:
        def after(n: int) -> Sequence[int]:
            if n < width:
                return []
            before = n - width
            neighbour = before + 1 if (before + 1) % width else before + 1 - width
            return [before, neighbour]

        return after

    return of


def graph(nodes: int, after: Edges, payload: bytes) -> list[NewNode]:
    item = tasks.noop.submission("").item()
    execution = NewExecution(execution_kind=item.execution_kind, input_payload=payload, policy=item.policy)
    return [
        NewNode(name=f"n{n}", execution=execution, after=[NewEdge(upstream=f"n{up}") for up in after(n)])
        for n in range(nodes)
    ]


class Graphs(tasks.Tasks):
    """The no-op task as nodes of flows of the same shape."""

    def __init__(self, dsn: str, sizes: Sizes, nodes: int, shape: Callable[[int], Edges]) -> None:
        super().__init__(dsn, sizes, tasks.noop)
        self._nodes = nodes
        self._shape = shape

    async def fill(self, jobs: int) -> None:
        async with tasks.connected(self._dsn) as app:
            engine = (await app.client()).engine
            payload = b'{"body":"' + tasks.body_of(self._sizes).encode() + b'"}'
            nodes = graph(self._nodes, self._shape(self._nodes), payload)
            for _ in range(jobs // self._nodes):
                await engine.submit_flow(nodes, flow_kind="bench")


def drain(
    server: Server, name: str, sizes: Sizes, nodes: int, shape: Callable[[int], Edges], flows: int
) -> WorkersDrain:
    return WorkersDrain(server, name, lambda dsn: Graphs(dsn, sizes, nodes, shape), nodes * flows)


@dataclass(frozen=True)
class PerNode:
    """A drain as microseconds per job instead of jobs per second."""

    inner: WorkersDrain

    @property
    def series(self) -> Sequence[str]:
        return (f"{self.inner.name}.us",)

    async def run(self) -> Sample:
        sample = await self.inner.run()
        return Sample({self.series[0]: 1e6 / sample.figures[self.inner.name]}, sample.stolen)


@dataclass(frozen=True)
class FlowsPerSecond:
    """A drain of flows of ten nodes: nodes and flows a second."""

    inner: WorkersDrain

    @property
    def series(self) -> Sequence[str]:
        return (self.inner.name, f"{self.inner.name}.flows")

    async def run(self) -> Sample:
        sample = await self.inner.run()
        rate = sample.figures[self.inner.name]
        return Sample(dict(zip(self.series, (rate, rate / 10), strict=True)), sample.stolen)


@dataclass(frozen=True)
class SubmitGraph:
    """One call with a graph of ten thousand nodes: milliseconds, the median of a few in the same database."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("flow.submit10k",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_flow_submit")
        await migrate_database(dsn)
        took = []
        try:
            async with await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
                nodes = graph(self.sizes.graph_nodes, layers(100)(0), b"x" * self.sizes.payload_bytes)
                with Stolen() as stolen:
                    for _ in range(4):
                        await self.server.settle()
                        begun = time.perf_counter()
                        await engine.submit_flow(nodes, flow_kind="bench")
                        took.append((time.perf_counter() - begun) * 1000)
        finally:
            await self.server.drop_database("bench_flow_submit")
        return Sample({self.series[0]: statistics.median(took[1:])}, stolen.share)


_RAW = """
with made as (
    insert into flowfabric.execution
        (partition, id, route, created_at, namespace, creator, flow_id, payload, state, blocking_reason,
         blocking_detail, pending, priority, transitioned_at, mutated_at, node)
    select $1, u.id, $2, now(), '', '', $3, u.payload, u.state,
           case u.state when 'waiting' then 'waiting_for_worker' else 'waiting_for_children' end,
           case u.state when 'waiting' then null else '2 dep(s) unresolved' end, 'first', 0, now(), now(), u.node
    from unnest($4::uuid[], $5::bytea[], $6::text[], $7::text[]) as u (id, payload, state, node)
), ready as (
    insert into flowfabric.ready (route, rank, created_at, id, partition)
    select $2, 9000, now(), u.id, $1 from unnest($4::uuid[], $6::text[]) as u (id, state) where u.state = 'waiting'
), edges as (
    insert into flowfabric.edge (partition, flow_id, edge_id, upstream, downstream, created_at, applied_at)
    select $1, $3, u.id, u.up, u.down, now(), now() from unnest($8::uuid[], $9::uuid[], $10::uuid[]) as u (id, up, down)
), groups as (
    insert into flowfabric.edge_group (partition, flow_id, downstream, n)
    select $1, $3, u.id, 2 from unnest($4::uuid[], $6::text[]) as u (id, state) where u.state <> 'waiting'
)
insert into flowfabric.flow
    (partition, flow_id, flow_kind, namespace, node_count, edge_count, created_at, last_mutation_at)
values ($1, $3, 'bench', '', cardinality($4::uuid[]), cardinality($8::uuid[]), now(), now())
"""


@dataclass(frozen=True)
class RawGraph:
    """The same rows in the same tables with one plain statement."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.submit10k",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_raw_graph")
        await migrate_database(dsn)
        took = []
        connection = await asyncpg.connect(dsn)
        try:
            async with await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
                await engine.create_execution(execution_kind="noop")
            route = await connection.fetchval("select id from flowfabric.route")
            count = self.sizes.graph_nodes
            after = layers(100)(0)
            with Stolen() as stolen:
                for _ in range(4):
                    await self.server.settle()
                    begun = time.perf_counter()
                    await connection.execute(_RAW, *self._rows(route, count, after))
                    took.append((time.perf_counter() - begun) * 1000)
        finally:
            await connection.close()
            await self.server.drop_database("bench_raw_graph")
        return Sample({self.series[0]: statistics.median(took[1:])}, stolen.share)

    def _rows(self, route: int, count: int, after: Edges) -> list[Any]:
        flow: UUID = mint_uuid()
        home = partition_of_id(flow, 256)
        ids = [UUID(bytes=one) for one in mint_many(count, home, 256)]
        edges = [(mint_uuid(), ids[up], ids[n]) for n in range(count) for up in after(n)]
        return [
            home, route, flow, ids, [b"x" * self.sizes.payload_bytes] * count,
            ["waiting_children" if after(n) else "waiting" for n in range(count)], [f"n{n}" for n in range(count)],
            *map(list, zip(*edges, strict=True)),
        ]  # fmt: skip


@dataclass(frozen=True)
class CancelFlow:
    """Cancel a flow of a thousand running members and wait for it: the slowest of many, in milliseconds."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("flow.cancel1000", "reference.cancel1000")

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_flow_cancel")
        await migrate_database(dsn)
        took = []
        try:
            async with await ff.Engine.connect(dsn, min_size=1, max_size=2) as engine:
                nodes = graph(1000, lambda _: [], b"x" * self.sizes.payload_bytes)
                with Stolen() as stolen:
                    for _ in range(self.sizes.cancels):
                        made = await engine.submit_flow(nodes)
                        claimed = await engine.claim_many(limit=1000, **_WORKER)
                        if len(claimed) != 1000:
                            raise RuntimeError(f"claimed {len(claimed)} of 1000")
                        begun = time.perf_counter()
                        answer = await engine.cancel_flow(made.flow_id, reason="bench", wait=True)
                        took.append((time.perf_counter() - begun) * 1000)
                        if not isinstance(answer, FlowCancelled):
                            raise RuntimeError(f"answered {answer!r}")
        finally:
            await self.server.drop_database("bench_flow_cancel")
        took.sort()
        p99 = took[min(len(took) - 1, int(len(took) * 0.99))]
        return Sample(dict(zip(self.series, (p99, _REFERENCE_CANCEL_MS), strict=True)), stolen.share)
