"""What whole tasks cost with bare SQL: a drain, waking an idle worker, and five steps whose results are kept.

Nothing is fenced, retried or recorded beyond the rows themselves. A worker process is given the name of the work:
`drain` (claim a hundred, complete a hundred), `wake`, `shared` (the steps of a hundred jobs share their commits) or
`alone` (a commit for every claim, step and completion, on four connections).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import asyncpg
import uvloop

from benchmarks.harness import Sizes
from benchmarks.jobs import STEPS, payload
from benchmarks.processes import Board, Starter

Way = Literal["drain", "wake", "shared", "alone"]

_BATCH = 100
_SHARED_CONNECTIONS = 2
_ALONE_CONNECTIONS = 4
_CHANNEL = "raw_job"

_TABLES = """
create table raw_job (
    id      bigint generated always as identity primary key,
    status  text not null default 'queued',
    payload bytea not null
);
create index raw_job_queued on raw_job (id) where status = 'queued';
create index raw_job_undone on raw_job (id) where status <> 'done';
create table raw_step (job bigint, name text, result bytea, primary key (job, name));
"""
_INSERT = "insert into raw_job (payload) values ($1)"
_INSERT_MANY = "insert into raw_job (payload) select unnest($1::bytea[])"
_INSERT_AND_WAKE = f"""
with made as (insert into raw_job (payload) values ($1) returning id) select pg_notify('{_CHANNEL}', '') from made
"""
_CLAIM = """
update raw_job set status = 'active'
where id in (select id from raw_job where status = 'queued' order by id limit $1 for update skip locked)
returning id, payload
"""
_KEEP_STEPS = "insert into raw_step (job, name, result) select unnest($1::bigint[]), $2, $3"
_COMPLETE = "update raw_job set status = 'done' where id = any($1::bigint[])"


class RawTasks:
    program = "benchmarks.raw_tasks"
    any_undone = "select exists (select from raw_job where status <> 'done')::int"

    def __init__(self, dsn: str, sizes: Sizes, way: Way) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._way = way

    @property
    def count_done(self) -> str:
        if self._way == "drain":
            return "select count(*) from raw_job where status = 'done'"
        return """
            select count(*) from raw_job j
            where status = 'done' and (select count(*) from raw_step s where s.job = j.id) = 5
        """

    def arguments(self, jobs: int) -> Sequence[str]:
        return (self._way,)

    async def prepare(self) -> None:
        connection = await asyncpg.connect(self._dsn)
        await connection.execute(_TABLES)
        await connection.close()

    async def fill(self, jobs: int) -> None:
        connection = await asyncpg.connect(self._dsn)
        await connection.execute(_INSERT_MANY, [payload(self._sizes.payload_bytes)] * jobs)
        await connection.close()

    async def submitters(self, count: int) -> Sequence[_Submitter]:
        body = payload(self._sizes.payload_bytes)
        return [_Submitter(await asyncpg.connect(self._dsn), body) for _ in range(count)]


class _Submitter:
    def __init__(self, connection: asyncpg.Connection, body: bytes) -> None:
        self._connection = connection
        self._body = body

    async def submit_one(self) -> None:
        await self._connection.execute(_INSERT, self._body)

    async def submit_many(self, jobs: int) -> None:
        await self._connection.execute(_INSERT_MANY, [self._body] * jobs)

    async def stamp(self, numbers: Sequence[int]) -> None:
        [number] = numbers
        await self._connection.execute(_INSERT_AND_WAKE, b"%d %s" % (number, self._body))

    async def close(self) -> None:
        await self._connection.close()


async def _process(starter: Starter, dsn: str, board: Board, slot: int, way: str) -> None:
    connections = {"wake": 1, "alone": _ALONE_CONNECTIONS}.get(way, _SHARED_CONNECTIONS)
    pool = [await asyncpg.connect(dsn) for _ in range(connections)]
    ran = 0

    async def wake(connection: asyncpg.Connection) -> None:
        woken = asyncio.Event()
        await connection.add_listener(_CHANNEL, lambda *_: woken.set())
        while True:
            while jobs := await connection.fetch(_CLAIM, 1):
                board[int(jobs[0]["payload"].split(b" ", 1)[0])] = time.perf_counter_ns()
                await connection.execute(_COMPLETE, [jobs[0]["id"]])
            await woken.wait()
            woken.clear()

    async def steps(connection: asyncpg.Connection) -> None:
        nonlocal ran
        while jobs := await connection.fetch(_CLAIM, 1 if way == "alone" else _BATCH):
            ids = [job["id"] for job in jobs]
            for name in () if way == "drain" else STEPS:
                await connection.execute(_KEEP_STEPS, ids, name, b"null")
            ran += len(ids)
            board[slot] = ran
            await connection.execute(_COMPLETE, ids)

    await starter.go()
    work = [asyncio.create_task((wake if way == "wake" else steps)(connection)) for connection in pool]
    await starter.stopped()
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for connection in pool:
        await connection.close()


if __name__ == "__main__":
    _starter = Starter()
    uvloop.run(_process(_starter, sys.argv[1], Board(Path(sys.argv[2])), int(sys.argv[3]), sys.argv[4]))
    _starter.finish()
