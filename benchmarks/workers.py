"""The trials of whole workers, the same for us and for every peer: a timed drain and the wait for an idle worker.

A drain is timed from the moment the jobs may be taken by processes that are connected and ready until the
database has the last job as done. The wait is from the submitter's call to the first line of the handler, on
the one monotonic clock all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import asyncpg

from benchmarks.harness import Sample, check_all_done
from benchmarks.processes import Board, WorkerProcess, stop_all
from benchmarks.server import Server
from benchmarks.stolen import Stolen

_LONGEST_DRAIN_SECONDS = 300
_LOOK_SECONDS = 0.002


class WorkerContestant(Protocol):
    """A queue in an empty database of its own, whose workers are processes of their own."""

    program: str  # run as `python -m PROGRAM DSN BOARD SLOT ARGUMENTS...`; counts its handlers in its slot
    any_undone: str  # SQL: whether a job is not yet recorded as done; cheap, asked again and again at the end
    count_done: str  # SQL: how many are, asked once

    def arguments(self, jobs: int) -> Sequence[str]:
        """What else the program wants to know."""

    async def prepare(self) -> None:
        """Make the schema."""

    async def fill(self, jobs: int) -> None:
        """Submit that many jobs, on connections that are closed afterwards."""


class Submitter(Protocol):
    async def submit(self, number: int) -> None:
        """Submit one job whose handler writes the time into that slot of the board."""

    async def close(self) -> None: ...


class WakingContestant(WorkerContestant, Protocol):
    async def submitter(self) -> Submitter:
        """Connected."""


@dataclass(frozen=True)
class WorkersDrain:
    """Jobs per second, and what a job costs: processor time of the workers, log written, commits."""

    server: Server
    name: str  # the series, without the costs
    contestant: Callable[[str], WorkerContestant]
    jobs: int
    processes: int = 1

    @property
    def series(self) -> Sequence[str]:
        return (self.name, f"{self.name}.cpu", f"{self.name}.wal", f"{self.name}.commits")

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        dsn = await self.server.create_database(database)
        contestant = self.contestant(dsn)
        await contestant.prepare()
        try:
            async with _workers(contestant, dsn, self.processes, self.processes, self.jobs) as (workers, board):
                # Before the fill: a queue's rows are written and drained between two checkpoints, not across one.
                await self.server.settle()
                await contestant.fill(self.jobs)
                async with _Watcher.on(dsn) as watcher:
                    before = await watcher.counters()
                    if board.total():
                        raise RuntimeError(f"{contestant.program} took jobs before it was told to")
                    with Stolen() as stolen:
                        started = time.perf_counter()
                        for worker in workers:
                            worker.go()
                        await self._until_done(workers, board, watcher, contestant)
                        seconds = time.perf_counter() - started
                    cpu_seconds = await stop_all(workers)
                    check_all_done(await watcher.ask(contestant.count_done), self.jobs)
                    await watcher.alone()
                    after = await watcher.counters()
        finally:
            await self.server.drop_database(database)
        costs = (cpu_seconds * 1e6, after.wal_bytes - before.wal_bytes, after.commits - before.commits)
        figures = [self.jobs / seconds, *(cost / self.jobs for cost in costs)]
        return Sample(dict(zip(self.series, figures, strict=True)), stolen.share)

    async def _until_done(
        self, workers: Sequence[WorkerProcess], board: Board, watcher: _Watcher, contestant: WorkerContestant
    ) -> None:
        async with asyncio.timeout(_LONGEST_DRAIN_SECONDS):
            while board.total() < self.jobs or await watcher.ask(contestant.any_undone):
                for worker in workers:
                    worker.check()
                await asyncio.sleep(_LOOK_SECONDS)


@dataclass(frozen=True)
class IdleLatency:
    """Submit to handler start on an idle worker in another process: the median in milliseconds."""

    server: Server
    name: str
    contestant: Callable[[str], WakingContestant]
    samples: int

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        dsn = await self.server.create_database(database)
        contestant = self.contestant(dsn)
        await contestant.prepare()
        try:
            async with _workers(contestant, dsn, 1, self.samples, self.samples) as (workers, board):
                await self.server.settle()
                submitter = await contestant.submitter()
                try:
                    workers[0].go()
                    await asyncio.sleep(0.5)  # until it has looked for jobs and sleeps
                    with Stolen() as stolen:
                        called = await self._submit_all(submitter)
                        await self._until_started(workers[0], board)
                finally:
                    await submitter.close()
                await stop_all(workers)
        finally:
            await self.server.drop_database(database)
        # The first ones prepare statements on either side.
        waits = [(ran - at) / 1e6 for at, ran in zip(called, board.numbers(), strict=True)][self.samples // 10 :]
        return Sample({self.name: statistics.median(waits)}, stolen.share)

    async def _submit_all(self, submitter: Submitter) -> list[int]:
        called = []
        for number in range(self.samples):
            called.append(time.perf_counter_ns())
            await submitter.submit(number)
            await asyncio.sleep(random.uniform(0.005, 0.020))
        return called

    async def _until_started(self, worker: WorkerProcess, board: Board) -> None:
        async with asyncio.timeout(10):
            while not all(board.numbers()):
                worker.check()
                await asyncio.sleep(_LOOK_SECONDS)


@dataclass(frozen=True)
class SubmitMany:
    """Jobs per second that one process submits in batches, after one batch that is not counted."""

    server: Server
    name: str
    submitters: Callable[[str], Awaitable[Sequence[BatchSubmitter]]]  # makes the schema; one for each connection
    jobs: int
    batch: int = 1_000

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        submitters = await self.submitters(await self.server.create_database(database))
        batches = iter(range(0, self.jobs, self.batch))

        async def submit(submitter: BatchSubmitter) -> None:
            for start in batches:
                await submitter.submit(min(self.batch, self.jobs - start))

        try:
            for submitter in submitters:
                await submitter.submit(self.batch)
            await self.server.settle()
            with Stolen() as stolen:
                started = time.perf_counter()
                await asyncio.gather(*map(submit, submitters))
                seconds = time.perf_counter() - started
        finally:
            for submitter in submitters:
                await submitter.close()
            await self.server.drop_database(database)
        return Sample({self.name: self.jobs / seconds}, stolen.share)


class BatchSubmitter(Protocol):
    async def submit(self, jobs: int) -> None:
        """One call."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class _Counters:
    wal_bytes: int
    commits: int


class _Watcher:
    """A connection that looks on. Its own commits are not counted."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._asked = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def on(cls, dsn: str) -> AsyncIterator[_Watcher]:
        connection = await asyncpg.connect(dsn)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def ask(self, sql: str) -> int:
        self._asked += 1
        return int(await self._connection.fetchval(sql))

    async def alone(self) -> None:
        """Return when the workers' connections are gone: a connection that ends hands in its statistics."""
        async with asyncio.timeout(10):
            while await self.ask(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and backend_type = 'client backend' and pid <> pg_backend_pid()"
            ):
                await asyncio.sleep(0.02)

    async def counters(self) -> _Counters:
        await self.ask("select pg_stat_force_next_flush() is null")
        row = await self._connection.fetchrow(
            "select pg_current_wal_lsn() - '0/0'::pg_lsn as wal_bytes,"
            " (select xact_commit from pg_stat_database where datname = current_database()) as commits"
        )
        counters = _Counters(int(row["wal_bytes"]), row["commits"] - self._asked)
        self._asked += 1
        return counters


@contextlib.asynccontextmanager
async def _workers(
    contestant: WorkerContestant, dsn: str, processes: int, slots: int, jobs: int
) -> AsyncIterator[tuple[list[WorkerProcess], Board]]:
    """The processes, ready; and their board."""
    workers: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory(prefix="flowfabric-bench-") as directory:
        path = Board.create(Path(directory), slots)
        board = Board(path)
        try:
            for slot in range(processes):
                given = (dsn, str(path), str(slot), *contestant.arguments(jobs))
                workers.append(await WorkerProcess.start(contestant.program, *given))
            yield workers, board
        finally:
            for worker in workers:
                await worker.kill()
