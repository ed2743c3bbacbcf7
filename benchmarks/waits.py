"""Waiting for signals: what it takes to wake an execution, what a signal costs, what a million sleepers cost others.

The raw side of all of it is a commit of one row.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg

import flowfabric as ff
from benchmarks import tasks
from benchmarks.engine import store
from benchmarks.harness import Sample, Sizes, check_all_done
from benchmarks.processes import Board, WorkerProcess, stop_all
from benchmarks.product import Fresh, NewWaitpoint, Suspended, UsePending, migrate_database, mint_uuid, partition_of_id
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from benchmarks.workers import Watcher, drained, running_workers
from flowfabric.values.execution import NewExecution
from flowfabric.values.lease import Handle

_CONNECTIONS = 8
_WORKER = {"worker_id": "bench", "worker_instance_id": "bench-1"}
_FAR = timedelta(days=1)
_RAW = "create table raw_row (id bigint generated always as identity primary key, payload bytea not null)"
_COMMIT = "insert into raw_row (payload) values ($1)"

# A suspended execution as the engine leaves it, with a timeout that is to come: one timer for every hundred.
_SUSPENDED = """
with route as (select id from flowfabric.route limit 1),
     worker as (select flowfabric.number_worker('bench', 'bench-0', now()) as id),
     made as (
    insert into flowfabric.execution
        (partition, id, route, created_at, namespace, creator, payload, state, blocking_reason, blocking_detail,
         pending, priority, attempts, epoch, attempt_index, attempt_id, attempt_started_at, attempt_suspended_at,
         lease_id, worker, lease_expires_at, has_waitpoints, suspension_timeout_at,
         transitioned_at)
    select flowfabric.partition_of(n.id, 256), n.id, route.id, now() - interval '1 hour', '', 'stored', $2, 'suspended',
           'waiting_for_approval', 'waitpoint', 'interrupted', 0, 1, 2, 0, gen_random_uuid(), now(), now(),
           gen_random_uuid(), worker.id, now(), true, now() + interval '1 day', now()
    from route, worker, (select gen_random_uuid() as id from generate_series(1, $1::int)) n
    returning partition, id, attempt_id, lease_id
), bound as (
    select m.*, gen_random_uuid() as waitpoint_id, gen_random_uuid() as suspension_id from made m
), waitpoints as (
    insert into flowfabric.waitpoint
        (partition, waitpoint_id, id, attempt_index, suspension_id, waitpoint_key, token_kid, state, outlives_attempt,
         created_at, activated_at, expires_at)
    select b.partition, b.waitpoint_id, b.id, 0, b.suspension_id, 'approval', 'k1', 'active', false, now(), now(),
           now() + interval '1 day'
    from bound b
), suspensions as (
    insert into flowfabric.suspension
        (partition, id, number, suspension_id, attempt_index, attempt_id, lease_id, lease_epoch, waitpoint_ids,
         waitpoint_keys, reason_code, requested_by, resume_condition, resume_policy, suspended_at, timeout_at,
         timeout_behavior, is_early)
    select b.partition, b.id, 1, b.suspension_id, 0, b.attempt_id, b.lease_id, 1, array[b.waitpoint_id],
           array['approval'], 'waiting_for_approval', 'worker',
           '{"Single": {"waitpoint_key": "approval", "matcher": "Wildcard"}}', '{}', now(), now() + interval '1 day',
           'fail', false
    from bound b
)
insert into flowfabric.timer (kind, due_at, partitions, ids)
select 'suspension', now() + interval '1 day', array_agg(partition), array_agg(id)
from (select *, row_number() over () / 100 as batch from bound) m group by batch
"""


class _NewTasks(tasks.Tasks):
    """Reads only the jobs of one repetition, by an index: many others are stored beside them."""

    async def only_new(self, watcher: Watcher) -> None:
        now = await watcher.ask("select (extract(epoch from clock_timestamp()) * 1e6)::bigint")
        self.any_undone = (
            "select exists (select from flowfabric.execution where route = any (select id from flowfabric.route)"
            f" and created_at >= to_timestamp({now} / 1e6) - interval '1 ms' and state <> 'completed')::int"
        )


@dataclass
class DrainBesideSuspended:
    """A drain by a default worker, with all duties, beside that many suspended executions.

    The worker is started when the queue is full, so the first round of every duty falls into the drain: the audit,
    which looks at one partition every 45 s, with all of them. The database is kept over the repetitions.
    """

    server: Server
    sizes: Sizes
    stored: int
    name: str
    _tasks: _NewTasks | None = field(default=None, init=False)
    _drained: int = field(default=0, init=False)

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        dsn = self.server.database_dsn(self._database)
        contestant = self._tasks or await self._prepare()
        jobs = self.sizes.jobs
        await self.server.settle()
        async with Watcher.on(dsn) as watcher:
            await contestant.only_new(watcher)
            await contestant.fill(jobs)
        async with (
            Watcher.on(dsn) as watcher,
            running_workers(contestant, dsn, 1, 1, jobs) as (workers, board),
        ):
            seconds, stolen = await drained(workers, board, watcher, contestant, jobs)
            await stop_all(workers)
            self._drained += jobs
            check_all_done(await watcher.ask(contestant.count_done), self._drained)
        return Sample({self.name: jobs / seconds}, stolen)

    async def _prepare(self) -> _NewTasks:
        dsn = await self.server.create_database(self._database)
        contestant = _NewTasks(dsn, self.sizes, tasks.noop)
        await contestant.prepare()
        await contestant.fill(1)
        self._drained = 1
        async with (
            Watcher.on(dsn) as watcher,
            running_workers(contestant, dsn, 1, 1, 1) as (workers, board),
        ):
            await drained(workers, board, watcher, contestant, 1)
            await stop_all(workers)
        await store(dsn, _SUSPENDED, self.stored, self.sizes)
        self._tasks = contestant
        return contestant

    @property
    def _database(self) -> str:
        return f"bench_{self.name.replace('.', '_')}"

    async def close(self) -> None:
        await self.server.drop_database(self._database)


@dataclass(frozen=True)
class Resume:
    """Suspend, signal, resumed handler: the call that suspends, and from the signal to the handler in a worker
    process. Medians in milliseconds, added; calls come a few milliseconds apart."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("wait.resume", "wait.resume.suspend", "wait.resume.signal")

    async def run(self) -> Sample:
        database = "bench_wait_resume"
        dsn = await self.server.create_database(database)
        await migrate_database(dsn)
        samples = self.sizes.waits
        try:
            with tempfile.TemporaryDirectory(prefix="flowfabric-bench-") as directory:
                path = Board.create(Path(directory), samples)
                board = Board(path)
                worker = await WorkerProcess.start("benchmarks.tasks", dsn, str(path), "0")
                try:
                    async with await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
                        with Stolen() as stolen:
                            suspends = await self._suspends(engine, samples)
                            signals = await self._signals(dsn, worker, board, samples)
                    await stop_all([worker])
                finally:
                    await worker.kill()
        finally:
            await self.server.drop_database(database)
        suspend, signal = statistics.median(suspends), statistics.median(signals)
        return Sample(dict(zip(self.series, (suspend + signal, suspend, signal), strict=True)), stolen.share)

    async def _suspends(self, engine: ff.Engine, samples: int) -> list[float]:
        took = []
        for _ in range(samples):
            await engine.create_execution(execution_kind="held", lane_id="held")
            claimed = await engine.claim("held", **_WORKER)
            assert claimed is not None
            waitpoint = await engine.create_waitpoint(claimed.handle, "go", _FAR)
            await _apart()
            begun = time.perf_counter()
            answer = await _suspend(engine, claimed.handle, waitpoint)
            took.append((time.perf_counter() - begun) * 1000)
            assert isinstance(answer, Suspended)
        return took[samples // 10 :]

    async def _signals(self, dsn: str, worker: WorkerProcess, board: Board, samples: int) -> list[float]:
        app = tasks.connected(dsn)
        try:
            runs = await tasks.waits.submit_many(list(range(samples)))
            worker.go()
            client = await app.client()
            waiting = {}
            async with asyncio.timeout(60):
                while len(waiting) < samples:
                    worker.check()
                    page = await client.waits(key="go", limit=1000)
                    waiting = {
                        one.execution_id: one for one in page.items if one.state == "active" and one.lane_id != "held"
                    }
                    await asyncio.sleep(0.05)
            tokens = [
                await client.engine.read_waitpoint_token(
                    partition_of_id(run.execution_id, 256), waiting[run.execution_id].waitpoint_id
                )
                for run in runs
            ]
            sent = []
            for run, token in zip(runs, tokens, strict=True):
                assert token is not None
                await _apart()
                sent.append(time.perf_counter_ns())
                await client.engine.deliver_signal(
                    run.execution_id,
                    waiting[run.execution_id].waitpoint_id,
                    token,
                    signal_name="go",
                    source_type="bench",
                )
            async with asyncio.timeout(30):
                while not all(board.numbers()):
                    worker.check()
                    await asyncio.sleep(0.01)
        finally:
            await app.close()
        return [(ran - at) / 1e6 for at, ran in zip(sent, board.numbers(), strict=True)][samples // 10 :]


@dataclass(frozen=True)
class RawCommit:
    """One row, committed, a few milliseconds apart: the median in milliseconds."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.commit",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_raw_commit")
        connection = await asyncpg.connect(dsn)
        took = []
        try:
            await connection.execute(_RAW)
            with Stolen() as stolen:
                for _ in range(self.sizes.waits):
                    await _apart()
                    begun = time.perf_counter()
                    await connection.execute(_COMMIT, b"x" * 200)
                    took.append((time.perf_counter() - begun) * 1000)
        finally:
            await connection.close()
            await self.server.drop_database("bench_raw_commit")
        return Sample({"raw.commit": statistics.median(took[len(took) // 10 :])}, stolen.share)


@dataclass(frozen=True)
class Signals:
    """Signals a second on eight connections, each resuming an execution of its own."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("wait.signal",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_wait_signal")
        await migrate_database(dsn)
        try:
            async with await ff.Engine.connect(dsn, min_size=_CONNECTIONS, max_size=_CONNECTIONS) as engine:
                suspended = await self._suspended(engine, self.sizes.single_calls)
                await self.server.settle()

                async def deliver(one: Suspended) -> None:
                    await engine.deliver_signal(
                        one.handle.execution_id,
                        one.details.waitpoint_id,
                        one.details.waitpoint_token,
                        signal_name="go",
                        source_type="bench",
                        payload=b'"' + b"x" * 198 + b'"',
                    )

                with Stolen() as stolen:
                    seconds = await _on_eight([lambda one=one: deliver(one) for one in suspended])  # type: ignore[misc]
        finally:
            await self.server.drop_database("bench_wait_signal")
        return Sample({"wait.signal": len(suspended) / seconds}, stolen.share)

    async def _suspended(self, engine: ff.Engine, count: int) -> list[Suspended]:
        found: list[Suspended] = []

        async def suspend(handle: Handle) -> None:
            answer = await _suspend(engine, handle, None)
            assert isinstance(answer, Suspended)
            found.append(answer)

        for start in range(0, count, 500):
            size = min(500, count - start)
            await engine.create_many([NewExecution(execution_kind="held")] * size)
            claimed = await engine.claim_many(limit=size, **_WORKER)
            await _on_eight([lambda handle=one.handle: suspend(handle) for one in claimed])  # type: ignore[misc]
        return found


@dataclass(frozen=True)
class RawCommits:
    """Rows a second on eight connections, each in a commit of its own."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.commits",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_raw_commits")
        pool = await asyncpg.create_pool(dsn, min_size=_CONNECTIONS, max_size=_CONNECTIONS)
        try:
            await pool.execute(_RAW)
            await self.server.settle()
            calls = [lambda: pool.execute(_COMMIT, b"x" * 200)] * self.sizes.single_calls
            with Stolen() as stolen:
                seconds = await _on_eight(calls)
        finally:
            await pool.close()
            await self.server.drop_database("bench_raw_commits")
        return Sample({"raw.commits": self.sizes.single_calls / seconds}, stolen.share)


async def _on_eight(calls: Sequence[Callable[[], Awaitable[object]]]) -> float:
    """Make the calls, eight at a time; returns the seconds it took."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
    return time.perf_counter() - started


async def _suspend(engine: ff.Engine, handle: Handle, waitpoint: NewWaitpoint | None) -> object:
    binding = Fresh(mint_uuid(), "go") if waitpoint is None else UsePending(waitpoint.waitpoint_id)
    until = datetime.now(UTC) + _FAR
    return await engine.suspend(handle, waitpoints=[binding], resume_condition=ff.on("go"), timeout_at=until)


async def _apart() -> None:
    await asyncio.sleep(random.uniform(0.005, 0.020))
