"""What the same work costs with bare SQL on a bare table: nothing is fenced, recorded, routed or retried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

import asyncpg

from benchmarks.harness import Sample, Sizes, check_all_done
from benchmarks.jobs import payload, uuid7
from benchmarks.server import Server
from benchmarks.stolen import Stolen

_BATCH = 100
_FILL_BATCH = 500

_TABLE = """
create table job (
    id         bigint generated always as identity primary key,
    status     text not null default 'queued',
    priority   int not null default 0,
    payload    bytea not null,
    created_at timestamptz not null default now()
);
create index job_queued on job (priority desc, id) where status = 'queued';
"""
_INSERT_MANY = "insert into job (payload) select unnest($1::bytea[])"
_INSERT_ONE = "insert into job (payload) values ($1) returning id"
_CLAIM = """
update job set status = 'active'
where id in (select id from job where status = 'queued'
             order by priority desc, id limit {} for update skip locked)
returning id, payload
"""
_CLAIM_MANY = _CLAIM.format(_BATCH)
_CLAIM_ONE = _CLAIM.format(1)
_COMPLETE_MANY = "update job set status = 'done' where id = any($1::bigint[])"
_COUNT_DONE = "select count(*) from job where status = 'done'"
_COMPLETE_ONE = "update job set status = 'done' where id = $1 returning id"

# The columns of our executions with a key on the id, nothing else: no check, no other index, full pages.
_EXECUTION = """
create table raw_execution (like flowfabric.execution including defaults);
alter table raw_execution add primary key (id);
"""
# The values a plain create stores.
_INSERT_EXECUTIONS = """
insert into raw_execution (partition, id, route, created_at, namespace, creator, payload, state,
                           blocking_reason, pending, priority, transitioned_at, mutated_at)
select 0, id, 1, now(), '', '', payload, 'waiting', 'waiting_for_worker', 'first', 0, now(), now()
from unnest($1::uuid[], $2::bytea[]) as given (id, payload)
"""
_SCHEMA = resources.files("flowfabric") / "_postgres" / "sql" / "schema"


class Floor:
    """The contestant: claim 100, complete 100, on as many connections as we use ourselves."""

    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._pool: list[asyncpg.Connection] = []
        self._jobs = 0

    async def prepare(self) -> None:
        self._pool = [await asyncpg.connect(self._dsn) for _ in range(self._sizes.connections)]
        await self._pool[0].execute(_TABLE)

    async def fill(self, jobs: int) -> None:
        body = payload(self._sizes.payload_bytes)
        for start in range(0, jobs, _FILL_BATCH):
            await self._pool[0].execute(_INSERT_MANY, [body] * min(_FILL_BATCH, jobs - start))
        self._jobs = jobs

    async def drain(self) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(self._work(connection) for connection in self._pool))
        seconds = time.perf_counter() - started
        check_all_done(await self._pool[0].fetchval(_COUNT_DONE), self._jobs)
        return seconds

    async def _work(self, connection: asyncpg.Connection) -> None:
        while jobs := await connection.fetch(_CLAIM_MANY):
            await connection.execute(_COMPLETE_MANY, [job["id"] for job in jobs])

    async def close(self) -> None:
        for connection in self._pool:
            await connection.close()


@dataclass(frozen=True)
class RawVerbs:
    """The three single verbs in a loop on one connection: insert, skip-locked update, update by id."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.create_one", "raw.claim_one", "raw.complete_one")

    async def run(self) -> Sample:
        calls = self.sizes.single_calls
        body = payload(self.sizes.payload_bytes)
        dsn = await self.server.create_database("bench_raw_verbs")
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(_TABLE)
            await self.server.settle()
            with Stolen() as stolen:
                marks = [time.perf_counter()]
                for _ in range(calls):
                    await connection.fetchval(_INSERT_ONE, body)
                marks.append(time.perf_counter())
                claimed = [await connection.fetchrow(_CLAIM_ONE) for _ in range(calls)]
                marks.append(time.perf_counter())
                for job in claimed:
                    assert job is not None
                    await connection.fetchval(_COMPLETE_ONE, job["id"])
                marks.append(time.perf_counter())
        finally:
            await connection.close()
            await self.server.drop_database("bench_raw_verbs")
        seconds = [after - before for before, after in pairwise(marks)]
        return Sample({name: calls / one for name, one in zip(self.series, seconds, strict=True)}, stolen.share)


@dataclass(frozen=True)
class RawCreateMany:
    """`insert ... select from unnest` of rows as wide as our executions: rows per second."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.create_many",)

    async def run(self) -> Sample:
        body = payload(self.sizes.payload_bytes)
        sizes = [min(_FILL_BATCH, self.sizes.jobs - start) for start in range(0, self.sizes.jobs, _FILL_BATCH)]
        batches = [([uuid7() for _ in range(size)], [body] * size) for size in sizes]
        dsn = await self.server.create_database("bench_raw_create")
        pool = [await asyncpg.connect(dsn) for _ in range(self.sizes.connections)]
        connection = pool[0]
        waiting = iter(batches)

        async def submit(connection: asyncpg.Connection) -> None:
            for ids, payloads in waiting:
                await connection.execute(_INSERT_EXECUTIONS, ids, payloads)

        try:
            await connection.execute("create schema flowfabric")
            for step in sorted(_SCHEMA.iterdir(), key=lambda file: file.name):
                await connection.execute(step.read_text())
            await connection.execute(_EXECUTION)
            await self.server.settle()
            with Stolen() as stolen:
                started = time.perf_counter()
                await asyncio.gather(*map(submit, pool))
                seconds = time.perf_counter() - started
        finally:
            for connection in pool:
                await connection.close()
            await self.server.drop_database("bench_raw_create")
        return Sample({"raw.create_many": self.sizes.jobs / seconds}, stolen.share)
