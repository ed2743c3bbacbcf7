"""The trials of whole workers, the same for us and for every peer: drains, the wait for an idle worker, submissions.

A drain is timed from the moment the jobs may be taken by processes that are connected and ready until the
database has the last job as done. The wait is from the submitter's call to the first line of the handler, on
the one monotonic clock all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import asyncpg

from benchmarks.harness import Sample, check_all_done
from benchmarks.processes import Board, WorkerProcess, stop_all
from benchmarks.server import Server
from benchmarks.stolen import Stolen

_LONGEST_DRAIN_SECONDS = 300
LOOK_SECONDS = 0.002


class WorkerContestant(Protocol):
    """A queue in an empty database of its own, whose workers are processes of their own."""

    program: str  # run as `python -m PROGRAM DSN BOARD SLOT ARGUMENTS...`; counts its handlers in its slot

    @property
    def any_undone(self) -> str:
        """SQL: whether a job is not yet recorded as done. Cheap, asked again and again at the end."""

    @property
    def count_done(self) -> str:
        """SQL: how many are. Asked once."""

    def arguments(self, jobs: int) -> Sequence[str]:
        """What else the program wants to know."""

    async def prepare(self) -> None:
        """Make the schema."""

    async def fill(self, jobs: int) -> None:
        """Submit that many jobs, on connections that are closed afterwards."""


class Submitter(Protocol):
    """One connection of a process that submits. `submit_*` submit jobs that do nothing."""

    async def submit_one(self) -> None:
        """Submit a job the way the library offers for one."""

    async def submit_many(self, jobs: int) -> None:
        """Submit jobs in one call, the way the library offers for many."""

    async def stamp(self, numbers: Sequence[int]) -> None:
        """Submit, in one call, jobs whose handlers write the time into those slots of the board."""

    async def close(self) -> None: ...


class SubmittingContestant(WorkerContestant, Protocol):
    async def submitters(self, count: int) -> Sequence[Submitter]:
        """Connected, on that many connections."""


@dataclass(frozen=True)
class WorkersDrain:
    """Jobs per second, and what a job costs: processor time, log written, commits, dead rows, bytes.

    `cpu` is the processor time of the workers, `all_cpu` that of workers and server together.
    The log and the dead rows are those of fill and drain together, the commits those of the drain. The bytes are what
    the tables have grown by when a vacuum has given back what it can.
    """

    server: Server
    name: str  # the series, without the costs
    contestant: Callable[[str], WorkerContestant]
    jobs: int
    processes: int = 1
    beside: Callable[[str], AbstractAsyncContextManager[None]] | None = None  # what else uses the database

    @property
    def series(self) -> Sequence[str]:
        costs = ("cpu", "all_cpu", "commits", "wal", "dead", "stored", "stored_without_events")
        return (self.name, *(f"{self.name}.{cost}" for cost in costs))

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        dsn = await self.server.create_database(database)
        try:
            return await self._run(dsn)
        finally:
            await self.server.drop_database(database)

    async def _run(self, dsn: str) -> Sample:
        contestant = self.contestant(dsn)
        await contestant.prepare()
        async with (
            contextlib.nullcontext() if self.beside is None else self.beside(dsn),
            Watcher.on(dsn) as watcher,
            running_workers(contestant, dsn, self.processes, self.processes, self.jobs) as (workers, board),
        ):
            # Before the fill: a queue's rows are written and drained between two checkpoints, not across one. The first
            # reader of a page of the catalogs writes an image of it, to mark the rows of the setup as visible: with a
            # thousand functions more than 2 MB, once per database. The vacuum marks them.
            await watcher.vacuum()
            await self.server.settle()
            empty = await watcher.counters()
            await contestant.fill(self.jobs)
            before = await watcher.counters()
            if board.total():
                raise RuntimeError(f"{contestant.program} took jobs before it was told to")
            seconds, stolen = await drained(workers, board, watcher, contestant, self.jobs)
            cpu_seconds = await stop_all(workers)
            check_all_done(await watcher.ask(contestant.count_done), self.jobs)
            if self.beside is None:
                await watcher.alone()
            after = await watcher.counters()
            await watcher.vacuum()
            end = await watcher.counters()
            stored = end.stored_bytes - empty.stored_bytes
            events = end.event_bytes - empty.event_bytes
        costs = (
            cpu_seconds * 1e6,
            (cpu_seconds + after.processor_seconds - before.processor_seconds) * 1e6,
            after.commits - before.commits,
            after.wal_bytes - empty.wal_bytes,
            after.dead_rows - empty.dead_rows,
            stored,
            stored - events,
        )
        figures = [self.jobs / seconds, *(cost / self.jobs for cost in costs)]
        return Sample(dict(zip(self.series, figures, strict=True)), stolen)


async def drained(
    workers: Sequence[WorkerProcess], board: Board, watcher: Watcher, contestant: WorkerContestant, jobs: int
) -> tuple[float, float]:
    """Let the workers go and return when all jobs are done: the seconds it took, and the stolen share."""
    with Stolen() as stolen:
        started = time.perf_counter()
        for worker in workers:
            worker.go()
        async with asyncio.timeout(_LONGEST_DRAIN_SECONDS):
            while board.total() < jobs or await watcher.ask(contestant.any_undone):
                for worker in workers:
                    worker.check()
                await asyncio.sleep(LOOK_SECONDS)
        seconds = time.perf_counter() - started
    return seconds, stolen.share


@dataclass(frozen=True)
class IdleLatency:
    """Submit to handler start on an idle worker in another process, in milliseconds: the median and the 99th of 100."""

    server: Server
    name: str
    contestant: Callable[[str], SubmittingContestant]
    samples: int

    @property
    def series(self) -> Sequence[str]:
        return (self.name, f"{self.name}.p99")

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        dsn = await self.server.create_database(database)
        contestant = self.contestant(dsn)
        await contestant.prepare()
        try:
            async with running_workers(contestant, dsn, 1, self.samples, self.samples) as (workers, board):
                await self.server.settle()
                [submitter] = await contestant.submitters(1)
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
        return Sample({self.name: statistics.median(waits), f"{self.name}.p99": percentile(waits, 99)}, stolen.share)

    async def _submit_all(self, submitter: Submitter) -> list[int]:
        called = []
        for number in range(self.samples):
            called.append(time.perf_counter_ns())
            await submitter.stamp([number])
            await asyncio.sleep(random.uniform(0.005, 0.020))
        return called

    async def _until_started(self, worker: WorkerProcess, board: Board) -> None:
        async with asyncio.timeout(10):
            while not all(board.numbers()):
                worker.check()
                await asyncio.sleep(LOOK_SECONDS)


def percentile(figures: Sequence[float], percent: float) -> float:
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass(frozen=True)
class SubmitMany:
    """Jobs per second that one process submits in batches, after one batch that is not counted. No worker runs."""

    server: Server
    name: str
    contestant: Callable[[str], SubmittingContestant]
    jobs: int
    connections: int
    batch: int = 1_000

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        batches = iter(range(0, self.jobs, self.batch))

        async def submit(submitter: Submitter) -> None:
            for start in batches:
                await submitter.submit_many(min(self.batch, self.jobs - start))

        async with _submitters(self.server, database, self.contestant, self.connections) as submitters:
            for submitter in submitters:
                await submitter.submit_many(self.batch)
            await self.server.settle()
            with Stolen() as stolen:
                started = time.perf_counter()
                await asyncio.gather(*map(submit, submitters))
                seconds = time.perf_counter() - started
        return Sample({self.name: self.jobs / seconds}, stolen.share)


@dataclass(frozen=True)
class SubmitOne:
    """Jobs per second that one process submits one after the other, each in a call of its own. No worker runs."""

    server: Server
    name: str
    contestant: Callable[[str], SubmittingContestant]
    jobs: int

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        database = f"bench_{self.name.replace('.', '_')}"
        async with _submitters(self.server, database, self.contestant, 1) as [submitter]:
            for _ in range(50):
                await submitter.submit_one()
            await self.server.settle()
            with Stolen() as stolen:
                started = time.perf_counter()
                for _ in range(self.jobs):
                    await submitter.submit_one()
                seconds = time.perf_counter() - started
        return Sample({self.name: self.jobs / seconds}, stolen.share)


@contextlib.asynccontextmanager
async def _submitters(
    server: Server, database: str, contestant: Callable[[str], SubmittingContestant], count: int
) -> AsyncIterator[Sequence[Submitter]]:
    submitters: Sequence[Submitter] = ()
    made = contestant(await server.create_database(database))
    try:
        await made.prepare()
        submitters = await made.submitters(count)
        yield submitters
    finally:
        for submitter in submitters:
            await submitter.close()
        await server.drop_database(database)


@dataclass(frozen=True)
class _Counters:
    wal_bytes: int
    commits: int
    dead_rows: int
    stored_bytes: int
    event_bytes: int  # those of our event log among them
    processor_seconds: float  # of the server; 0 if it is on another machine


class Watcher:
    """A connection that looks on. Its own commits are not counted."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._asked = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def on(cls, dsn: str) -> AsyncIterator[Watcher]:
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
        async with asyncio.timeout(30):
            while await self.ask(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and backend_type = 'client backend' and pid <> pg_backend_pid()"
            ):
                await asyncio.sleep(0.02)

    async def vacuum(self) -> None:
        """Give back what can be given back."""
        self._asked += 1
        await self._connection.execute("vacuum", timeout=120)

    async def counters(self) -> _Counters:
        """Dead rows are those left for a vacuum; what a page's next reader has cleared away by itself is not."""
        await self.ask("select pg_stat_force_next_flush() is null")
        row = await self._connection.fetchrow(
            "select pg_current_wal_lsn() - '0/0'::pg_lsn as wal_bytes,"
            " (select xact_commit from pg_stat_database where datname = current_database()) as commits,"
            " (select coalesce(sum(n_dead_tup), 0) from pg_stat_user_tables) as dead_rows,"
            " (select coalesce(sum(pg_total_relation_size(relid)), 0) from pg_stat_user_tables) as stored_bytes,"
            " (select coalesce(sum(pg_total_relation_size(relid)), 0) from pg_stat_user_tables"
            "  where schemaname = 'flowfabric' and relname ~ '^event(_|$)') as event_bytes"
        )
        counters = _Counters(
            int(row["wal_bytes"]),
            row["commits"] - self._asked,
            int(row["dead_rows"]),
            int(row["stored_bytes"]),
            int(row["event_bytes"]),
            server_seconds(self._connection.get_server_pid()),
        )
        self._asked += 1
        return counters


def server_seconds(backend: int) -> float:
    """The processor time that a server has used so far, all its processes together, given the process id of one."""
    try:
        parent = _times(backend)[0]
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return sum(_times(parent)[1:]) + sum(sum(_times(int(child))[1:3]) for child in children)
    except OSError:
        return 0.0


def _times(process: int) -> tuple[int, float, float, float, float]:
    """The parent of a process and its seconds: user, system, and those of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    user, system, user_of_ended, system_of_ended = (int(field) / ticks for field in fields[11:15])
    return int(fields[1]), user, system, user_of_ended, system_of_ended


@contextlib.asynccontextmanager
async def running_workers(
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
