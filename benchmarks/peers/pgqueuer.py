"""pgqueuer: AsyncpgDriver, uvloop, batch_size 100, jobs enqueued in batches of 1,000."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from benchmarks.harness import Sizes
from benchmarks.jobs import payload
from benchmarks.processes import Board, Starter

_BATCH = 100
_FILL_BATCH = 1_000


class Pgqueuer:
    program = "benchmarks.peers.pgqueuer"
    # A finished job leaves the queue for the log when its status is flushed.
    any_undone = "select exists (select from pgqueuer)::int"
    count_done = "select count(*) from pgqueuer_log where status = 'successful'"

    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes

    def arguments(self, jobs: int) -> Sequence[str]:
        return ()

    async def prepare(self) -> None:
        connection = await asyncpg.connect(self._dsn)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def fill(self, jobs: int) -> None:
        [submitter] = await self.submitters(1)
        for start in range(0, jobs, _FILL_BATCH):
            await submitter.submit_many(min(_FILL_BATCH, jobs - start))
        await submitter.close()

    async def submitters(self, count: int) -> Sequence[_Submitter]:
        body = payload(self._sizes.payload_bytes)
        return [_Submitter(await asyncpg.connect(self._dsn), body) for _ in range(count)]


class _Submitter:
    def __init__(self, connection: asyncpg.Connection, body: bytes) -> None:
        self._connection = connection
        self._queries = Queries(AsyncpgDriver(connection))
        self._body = body

    async def submit_one(self) -> None:
        await self._queries.enqueue("noop", self._body)

    async def submit_many(self, jobs: int) -> None:
        await self._queries.enqueue(["noop"] * jobs, [self._body] * jobs, [0] * jobs)

    async def stamp(self, numbers: Sequence[int]) -> None:
        bodies: list[bytes | None] = [b"%d %s" % (number, self._body) for number in numbers]
        if len(bodies) == 1:
            await self._queries.enqueue("stamp", bodies[0])
        else:
            await self._queries.enqueue(["stamp"] * len(bodies), bodies, [0] * len(bodies))

    async def close(self) -> None:
        await self._connection.close()


@dataclass
class _Held(QueueManager):
    """A worker that is connected and waits for the signal before it listens and takes its first jobs."""

    starter: Starter = field(kw_only=True)
    began: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    async def verify_structure(self) -> None:
        await super().verify_structure()
        await self.starter.go()
        self.began.set()


async def _process(starter: Starter, dsn: str, board: Board, slot: int) -> None:
    connection = await asyncpg.connect(dsn)
    manager = _Held(Queries(AsyncpgDriver(connection)), starter=starter)
    ran = 0

    @manager.entrypoint("noop")
    async def noop(job: Job) -> None:
        nonlocal ran
        ran += 1
        board[slot] = ran

    @manager.entrypoint("stamp")
    async def stamp(job: Job) -> None:
        board[int((job.payload or b"0").split(b" ", 1)[0])] = time.perf_counter_ns()

    running = asyncio.create_task(manager.run(batch_size=_BATCH))
    await manager.began.wait()
    await starter.stopped()
    manager.shutdown.set()
    await running
    await connection.close()


if __name__ == "__main__":
    _starter = Starter()
    uvloop.run(_process(_starter, sys.argv[1], Board(Path(sys.argv[2])), int(sys.argv[3])))
    _starter.finish()
