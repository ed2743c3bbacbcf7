"""A worker that dies: how many handlers had ended whose results the database does not have. They are run again.

`unreported` is what a worker killed in the middle of a drain had not reported, the largest of several; `typical` is
their median. `blocked` comes near the most there can be: locks are held on running executions, so that a call with
hundreds of results hangs while the worker continues until it claims nothing more.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from benchmarks import tasks
from benchmarks.harness import Sample, Sizes
from benchmarks.processes import Board, WorkerProcess
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from benchmarks.workers import LOOK_SECONDS, Watcher, running_workers

_DONE = "select count(*) from flowfabric.execution where state = 'completed'"
_LOCK_ONE = "select id from flowfabric.execution where state = 'active' limit 1 for update skip locked"
_LOCK_LATEST = """
    select id from flowfabric.execution where state = 'active'
    order by attempt_started_at desc limit 200 for update skip locked
"""
_STILL_SECONDS = 1.0
_ENOUGH = 10_000  # so that the worker is in the middle of them
_SOME = 500  # results that wait: the worker has not stopped claiming yet


@dataclass(frozen=True)
class Crash:
    server: Server
    sizes: Sizes
    series: Sequence[str] = ("task.crash.unreported", "task.crash.typical", "task.crash.blocked")

    async def run(self) -> Sample:
        with Stolen() as stolen:
            killed = sorted([await self._killed() for _ in range(self.sizes.kills)])
            blocked = await self._killed(is_blocked=True)
        return Sample(
            dict(zip(self.series, (killed[-1], killed[len(killed) // 2], blocked), strict=True)), stolen.share
        )

    async def _killed(self, is_blocked: bool = False) -> int:
        dsn = await self.server.create_database("bench_task_crash")
        contestant = tasks.Tasks(dsn, self.sizes, tasks.noop)
        jobs = max(self.sizes.jobs, _ENOUGH)
        try:
            await contestant.prepare()
            async with (
                Watcher.on(dsn) as watcher,
                running_workers(contestant, dsn, 1, 1, jobs) as ([worker], board),
            ):
                await contestant.fill(jobs)
                worker.go()
                await _until(worker, board, random.randint(jobs // 10, jobs // 4))
                if is_blocked:
                    await _block(dsn, worker, board)
                else:
                    await worker.kill()
                ended = board.total()
                await watcher.alone()
                return ended - await watcher.ask(_DONE)
        finally:
            await self.server.drop_database("bench_task_crash")


async def _until(worker: WorkerProcess, board: Board, handlers: int) -> None:
    async with asyncio.timeout(60):
        while board.total() < handlers:
            worker.check()
            await asyncio.sleep(LOOK_SECONDS)


async def _block(dsn: str, worker: WorkerProcess, board: Board) -> None:
    """Lock one of those that run until results pile up, then some of the latest until the next call hangs; kill it."""
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        async with asyncio.timeout(60):
            await first.execute("begin")
            while await first.fetchval(_LOCK_ONE) is None:
                pass
            while board.total() - await first.fetchval(_DONE) < _SOME:
                pass
            await second.execute("begin")
            await second.fetch(_LOCK_LATEST)
            await first.execute("rollback")
            await _until_still(board)
        await worker.kill()
        # The server would continue with the call of the dead worker once the locks are gone.
        await first.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and backend_type = 'client backend' and cardinality(pg_blocking_pids(pid)) > 0"
        )
        await asyncio.sleep(0.2)
    finally:
        await first.close()
        await second.close()


async def _until_still(board: Board) -> None:
    ended, since = board.total(), time.monotonic()
    while time.monotonic() - since < _STILL_SECONDS:
        await asyncio.sleep(0.01)
        if board.total() != ended:
            ended, since = board.total(), time.monotonic()
