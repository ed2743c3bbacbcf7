"""pgqueuer: AsyncpgDriver, uvloop, batch_size 100, jobs enqueued in batches."""

from __future__ import annotations

import asyncio
import sys
import time

import asyncpg
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from benchmarks.harness import Sizes, check_all_done
from benchmarks.jobs import payload
from benchmarks.peers import drain_in_a_process

_BATCH = 100
_FILL_BATCH = 1_000
_COUNT_DONE = "select count(*) from pgqueuer_log where status = 'successful'"


class Pgqueuer:
    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._jobs = 0
        self._connection: asyncpg.Connection | None = None

    async def prepare(self) -> None:
        self._connection = await asyncpg.connect(self._dsn)
        await Queries(AsyncpgDriver(self._connection)).install()

    async def fill(self, jobs: int) -> None:
        assert self._connection is not None
        queries = Queries(AsyncpgDriver(self._connection))
        body = payload(self._sizes.payload_bytes)
        for start in range(0, jobs, _FILL_BATCH):
            size = min(_FILL_BATCH, jobs - start)
            await queries.enqueue(["noop"] * size, [body] * size, [0] * size)
        self._jobs = jobs

    async def drain(self) -> float:
        assert self._connection is not None
        seconds = await drain_in_a_process("benchmarks.peers.pgqueuer", self._dsn, self._jobs)
        check_all_done(await self._connection.fetchval(_COUNT_DONE), self._jobs)
        return seconds

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


async def _worker(dsn: str, jobs: int) -> float:
    watcher = await asyncpg.connect(dsn)
    manager = QueueManager(Queries(AsyncpgDriver(await asyncpg.connect(dsn))))
    ran = 0
    all_ran = asyncio.Event()

    @manager.entrypoint("noop")
    async def noop(job: Job) -> None:
        nonlocal ran
        ran += 1
        if ran == jobs:
            all_ran.set()

    started = time.perf_counter()
    running = asyncio.create_task(manager.run(batch_size=_BATCH))
    await all_ran.wait()
    # A finished job leaves the queue when its status is flushed.
    while await watcher.fetchval("select exists (select from pgqueuer)"):
        await asyncio.sleep(0.002)
    seconds = time.perf_counter() - started
    manager.shutdown.set()
    await running
    await watcher.close()
    return seconds


if __name__ == "__main__":
    print(uvloop.run(_worker(sys.argv[1], int(sys.argv[2]))))
