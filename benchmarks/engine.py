"""Our own side: the same jobs through `Engine`, with everything it records, fences, routes and retries."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import asyncpg
from rich.console import Console

import flowfabric as ff
from benchmarks.harness import Sample, Sizes, check_all_done
from benchmarks.held import held_transaction
from benchmarks.jobs import payload
from benchmarks.product import migrate_database
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from flowfabric.values.execution import Created, NewExecution

_BATCH = 100
_FILL_BATCH = 500
_BACKLOG = 5_000
_WORKER = {"worker_id": "bench", "worker_instance_id": "bench-1"}
_COUNT_DONE = "select count(*) from flowfabric.execution where state = 'completed' and creator = ''"

# A finished execution as the engine leaves it: one attempt, two events, a retention timer for every hundred.
STORED = """
with route as (select id from flowfabric.route limit 1),
     worker as (select flowfabric.number_worker('bench', 'bench-0', now()) as id),
     made as (
    insert into flowfabric.execution
        (partition, id, route, created_at, namespace, creator, payload, state, priority, attempts, epoch,
         attempt_index, attempt_id, attempt_started_at, disposition, lease_id, worker, lease_expires_at, completed_at,
         transitioned_at)
    select flowfabric.partition_of(n.id, 256), n.id, route.id, now() - interval '1 hour', '', 'stored', $2, 'completed',
           0, 1, 1,
           0, gen_random_uuid(), now(), 'completed', gen_random_uuid(), worker.id, now(), now(), now()
    from route, worker, (select gen_random_uuid() as id from generate_series(1, $1::int)) n
    returning partition, id, lease_id, attempt_id, worker
), logged as (
    insert into flowfabric.event
        (slot, occurred_at, partition, id, namespace, outcome, lease_type, lease_id, lease_epoch,
         attempt_id, attempt_index, worker, reason)
    select 0, now(), m.partition, m.id, '', k.outcome, k.type, m.lease_id, 1, m.attempt_id, 0, m.worker, null
    from made m cross join (values (null, 'acquired'), ('success', 'revoked')) k (outcome, type)
)
insert into flowfabric.timer (kind, due_at, partitions, ids)
select 'retention', now() + interval '1 day', array_agg(partition), array_agg(id)
from (select *, row_number() over () / 100 as batch from made) m group by batch
"""


class EngineQueue:
    """The contestant: claim up to 100, complete up to 100, on as many connections as the floor has."""

    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._engine: ff.Engine | None = None
        self._jobs = 0
        self.claims: list[float] = []  # seconds each claim took

    @property
    def engine(self) -> ff.Engine:
        assert self._engine is not None
        return self._engine

    async def prepare(self) -> None:
        await migrate_database(self._dsn)
        connections = self._sizes.connections
        self._engine = await ff.Engine.connect(self._dsn, min_size=connections, max_size=connections)

    async def fill(self, jobs: int) -> None:
        body = payload(self._sizes.payload_bytes)
        batches = iter([min(_FILL_BATCH, jobs - start) for start in range(0, jobs, _FILL_BATCH)])

        async def submit() -> None:
            for size in batches:
                item = NewExecution(execution_kind="noop", input_payload=body)
                for verdict in await self.engine.create_many([item] * size):
                    assert isinstance(verdict, Created)

        await asyncio.gather(*(submit() for _ in range(self._sizes.connections)))
        self._jobs += jobs

    async def drain(self) -> float:
        self.claims = []
        started = time.perf_counter()
        await asyncio.gather(*(self._work() for _ in range(self._sizes.connections)))
        seconds = time.perf_counter() - started
        check_all_done((await self.engine._fetch(_COUNT_DONE))[0][0], self._jobs)
        return seconds

    async def _work(self) -> None:
        while True:
            begun = time.perf_counter()
            claimed = await self.engine.claim_many(limit=_BATCH, **_WORKER)
            self.claims.append(time.perf_counter() - begun)
            if not claimed:
                return
            for verdict in await self.engine.complete_many([one.handle for one in claimed]):
                if isinstance(verdict, ff.FlowFabricError):
                    raise verdict

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


@dataclass(frozen=True)
class EngineCreateMany:
    """`create_many` in batches: executions per second."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("engine.create_many",)

    async def run(self) -> Sample:
        queue = EngineQueue(await self.server.create_database("bench_engine_create"), self.sizes)
        try:
            await queue.prepare()
            await queue.fill(_FILL_BATCH)  # the route exists and the statement is prepared
            await self.server.settle()
            with Stolen() as stolen:
                started = time.perf_counter()
                await queue.fill(self.sizes.jobs)
                seconds = time.perf_counter() - started
        finally:
            await queue.close()
            await self.server.drop_database("bench_engine_create")
        return Sample({"engine.create_many": self.sizes.jobs / seconds}, stolen.share)


@dataclass(frozen=True)
class EngineVerbs:
    """The three single calls in a loop on one connection."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("engine.create_one", "engine.claim_one", "engine.complete_one")

    async def run(self) -> Sample:
        calls = self.sizes.single_calls
        body = payload(self.sizes.payload_bytes)
        dsn = await self.server.create_database("bench_engine_verbs")
        await migrate_database(dsn)
        async with await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
            await self.server.settle()
            with Stolen() as stolen:
                marks = [time.perf_counter()]
                for _ in range(calls):
                    await engine.create_execution(execution_kind="noop", input_payload=body)
                marks.append(time.perf_counter())
                claimed = [await engine.claim(**_WORKER) for _ in range(calls)]
                marks.append(time.perf_counter())
                for one in claimed:
                    assert one is not None
                    await engine.complete(one.handle)
                marks.append(time.perf_counter())
        await self.server.drop_database("bench_engine_verbs")
        seconds = [after - before for before, after in pairwise(marks)]
        return Sample({name: calls / one for name, one in zip(self.series, seconds, strict=True)}, stolen.share)


@dataclass
class DrainWithStored:
    """A drain beside `stored` finished executions; the database is kept over the repetitions."""

    server: Server
    sizes: Sizes
    stored: int
    name: str
    _queue: EngineQueue | None = field(default=None, init=False)

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        queue = self._queue or await self._prepare()
        await self.server.settle()
        await queue.fill(self.sizes.jobs)
        with Stolen() as stolen:
            seconds = await queue.drain()
        return Sample({self.name: self.sizes.jobs / seconds}, stolen.share)

    async def _prepare(self) -> EngineQueue:
        dsn = await self.server.create_database(self._database)
        queue = EngineQueue(dsn, self.sizes)
        await queue.prepare()
        await queue.fill(_BATCH)
        await queue.drain()
        await store(dsn, STORED, self.stored, self.sizes)
        self._queue = queue
        return queue

    @property
    def _database(self) -> str:
        return f"bench_{self.name.replace('.', '_')}"

    async def close(self) -> None:
        if self._queue is not None:
            await self._queue.close()
        await self.server.drop_database(self._database)


async def store(dsn: str, filler: str, count: int, sizes: Sizes) -> None:
    """Put that many executions into the tables with the statement `filler`."""
    connection = await asyncpg.connect(dsn)
    try:
        body = payload(sizes.payload_bytes)
        for start in range(0, count, 50_000):
            await connection.execute(filler, min(50_000, count - start), body, timeout=300)
        await connection.execute("vacuum analyze", timeout=600)
    finally:
        await connection.close()


@dataclass(frozen=True)
class FlowPinned:
    """Jobs submitted and run for minutes at full speed, plain or beside a transaction held from before the first.

    One connection keeps a backlog, the others claim and complete. The last quarter of the time counts.
    """

    server: Server
    sizes: Sizes
    pinned: bool
    console: Console

    @property
    def series(self) -> Sequence[str]:
        kind = "pinned" if self.pinned else "plain"
        return (f"engine.drain_{kind}", f"engine.claim_p99_{kind}")

    async def run(self) -> Sample:
        database = f"bench_engine_{'pinned' if self.pinned else 'plain'}"
        dsn = await self.server.create_database(database)
        queue = EngineQueue(dsn, replace(self.sizes, connections=self.sizes.connections + 1))
        try:
            await queue.prepare()
            await self.server.settle()
            async with held_transaction(dsn, self.pinned):
                with Stolen() as stolen:
                    rate, p99 = await self._flow(queue)
                if self.pinned:
                    await self._tell(dsn)
        finally:
            await queue.close()
            await self.server.drop_database(database)
        return Sample(dict(zip(self.series, (rate, p99 * 1000), strict=True)), stolen.share)

    async def _flow(self, queue: EngineQueue) -> tuple[float, float]:
        began = time.perf_counter()
        until = began + self.sizes.held_seconds
        late = until - self.sizes.held_seconds / 4
        submitted = done = done_late = 0
        claims: list[float] = []
        item = NewExecution(execution_kind="noop", input_payload=payload(self.sizes.payload_bytes))

        async def submit() -> None:
            nonlocal submitted
            while time.perf_counter() < until:
                if submitted - done >= _BACKLOG:
                    await asyncio.sleep(0.002)
                    continue
                await queue.engine.create_many([item] * _FILL_BATCH)
                submitted += _FILL_BATCH

        async def work() -> None:
            nonlocal done, done_late
            while (begun := time.perf_counter()) < until:
                claimed = await queue.engine.claim_many(limit=_BATCH, **_WORKER)
                if begun >= late:
                    claims.append(time.perf_counter() - begun)
                if not claimed:
                    await asyncio.sleep(0.001)
                    continue
                for verdict in await queue.engine.complete_many([one.handle for one in claimed]):
                    if isinstance(verdict, ff.FlowFabricError):
                        raise verdict
                done += len(claimed)
                if begun >= late:
                    done_late += len(claimed)

        await asyncio.gather(submit(), *(work() for _ in range(self.sizes.connections)))
        self.console.print(f"{done:,} jobs in {time.perf_counter() - began:.0f} s", highlight=False)
        return done_late / (time.perf_counter() - late), statistics.quantiles(claims, n=100)[98]

    async def _tell(self, dsn: str) -> None:
        """Dead rows, and how the claim's scan gets past them."""
        connection = await asyncpg.connect(dsn)
        try:
            dead = await connection.fetch(
                "select relname, n_dead_tup from pg_stat_user_tables where n_dead_tup > 0 order by 2 desc limit 3"
            )
            self.console.print(
                "dead rows:", ", ".join(f"{r['relname']} {r['n_dead_tup']:,}" for r in dead), highlight=False
            )
            await connection.execute("set enable_seqscan = off; set enable_bitmapscan = off; set enable_sort = off")
            plan = await connection.fetch(
                "explain (analyze, buffers, costs off) select r.id from flowfabric.ready r,"
                " lateral (select f.* from flowfabric.ready_floor f order by f.rank, f.created_at, f.id limit 1) f"
                " where r.route = f.route and (r.rank, r.created_at, r.id) >= (f.rank, f.created_at, f.id)"
                " order by r.rank, r.created_at, r.id limit 100"
            )
            for line in plan:
                self.console.print(f"  {line[0]}", highlight=False)
        finally:
            await connection.close()
