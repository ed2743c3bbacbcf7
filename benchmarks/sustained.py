"""Work that comes at a steady pace for minutes: how long a job waits from its submission to its handler.

A submitter makes a call of `batch` jobs at fixed moments, whether or not the earlier ones have been run, so a queue
that cannot follow shows it. `late` figures are those of the last quarter of the time, where what piles up is highest.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness import Sample, Sizes
from benchmarks.held import held_transaction
from benchmarks.processes import Board, WorkerProcess, stop_all
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from benchmarks.workers import Submitter, SubmittingContestant, Watcher, percentile, running_workers

_SUBMITTERS = 4
_WARM_UP_SECONDS = 1
_FIGURES = ("p50", "p99", "max", "late_p50", "late_p99", "per_second", "megabytes", "dead")


@dataclass(frozen=True)
class Sustained:
    """One worker process under load; waits in milliseconds, what was submitted a second, what is stored at the end."""

    server: Server
    name: str
    contestant: Callable[[str], SubmittingContestant]
    sizes: Sizes
    seconds: int
    held: bool = False

    @property
    def series(self) -> Sequence[str]:
        return [f"{self.name}.{figure}" for figure in _FIGURES]

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        dsn = await self.server.create_database(database)
        try:
            return await self._run(dsn)
        finally:
            await self.server.drop_database(database)

    async def _run(self, dsn: str) -> Sample:
        jobs = self.seconds * self.sizes.sustained_per_second
        contestant = self.contestant(dsn)
        await contestant.prepare()
        async with (
            Watcher.on(dsn) as watcher,
            running_workers(contestant, dsn, 1, jobs, jobs) as ([worker], board),
        ):
            await self.server.settle()
            before = await watcher.counters()
            submitters = await contestant.submitters(_SUBMITTERS)
            try:
                async with held_transaction(dsn, self.held):
                    worker.go()
                    await asyncio.sleep(0.5)
                    with Stolen() as stolen:
                        began = time.perf_counter()
                        called = await self._submit_all(submitters, worker, jobs)
                        seconds = time.perf_counter() - began
                        waits = await self._waits(worker, board, called)
            finally:
                for submitter in submitters:
                    await submitter.close()
            if all(board.numbers()):
                await stop_all([worker])
            else:
                await worker.kill()  # its backlog would keep it
            await watcher.alone()
            after = await watcher.counters()
        warm = waits[_WARM_UP_SECONDS * self.sizes.sustained_per_second :]
        late = waits[-len(waits) // 4 :]
        figures = (
            statistics.median(warm),
            percentile(warm, 99),
            max(warm),
            statistics.median(late),
            percentile(late, 99),
            jobs / seconds,
            (after.stored_bytes - before.stored_bytes) / 1e6,
            float(after.dead_rows - before.dead_rows),
        )
        return Sample(dict(zip(self.series, figures, strict=True)), stolen.share)

    async def _submit_all(self, submitters: Sequence[Submitter], worker: WorkerProcess, jobs: int) -> list[int]:
        """Call at the moments of the plan, on whichever connection is free. Returns when each job was submitted."""
        batch = self.sizes.sustained_batch
        called = [0] * jobs
        starts = iter(range(0, jobs, batch))
        began = time.perf_counter()

        async def submit(submitter: Submitter) -> None:
            for start in starts:
                due = began + start / self.sizes.sustained_per_second
                if (early := due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                worker.check()
                numbers = range(start, min(start + batch, jobs))
                now = time.perf_counter_ns()
                for number in numbers:
                    called[number] = now
                await submitter.stamp(numbers)

        async with asyncio.timeout(3 * self.seconds + 60), asyncio.TaskGroup() as group:
            for submitter in submitters:
                group.create_task(submit(submitter))
        return called

    async def _waits(self, worker: WorkerProcess, board: Board, called: Sequence[int]) -> list[float]:
        """In milliseconds. A queue gets as long again to drain; a job that has not begun by then counts with it."""
        until = time.monotonic() + self.seconds
        while not all(board.numbers()) and time.monotonic() < until:
            worker.check()
            await asyncio.sleep(0.05)
        now = time.perf_counter_ns()
        return [((ran or now) - at) / 1e6 for at, ran in zip(called, board.numbers(), strict=True)]
