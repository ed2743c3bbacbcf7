"""Limits: what budgets and quotas cost the work under them, and the work beside them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import asyncpg

import flowfabric as ff
from benchmarks import tasks
from benchmarks.harness import Sample, Sizes, check_all_done
from benchmarks.held import held_transaction
from benchmarks.jobs import payload
from benchmarks.processes import Board, WorkerProcess, stop_all
from benchmarks.product import (
    BudgetCreated,
    ExecutionPolicy,
    HardBreach,
    Report,
    Usage,
    UsageOk,
    migrate_database,
    quota_policy_id_of,
)
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from benchmarks.workers import LOOK_SECONDS, Watcher
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.ids import BudgetId
from flowfabric.values.lease import Handle

_BATCH = 100
_FILL_BATCH = 500
_BACKLOG = 5_000
_CONNECTIONS = 8
_CLAIMS = 400  # of a round of single claims
_PLENTY = 10**15
_WORKER = {"worker_id": "bench", "worker_instance_id": "bench-1"}
_HOUR = timedelta(hours=1)
_DONE = "select count(*) from flowfabric.execution where state = 'completed'"
_DEAD = "select relname, n_dead_tup from pg_stat_user_tables where n_dead_tup > 0 order by 2 desc limit 3"

_BUDGETS = """
select c.id from generate_series(1, $1::integer) n
cross join lateral flowfabric.create_budget(
    gen_random_uuid(), 'team ' || n, '', '', 'strict', '', '', 0, array['tokens'], array[$2::bigint], array[0::bigint],
    null, null) c
"""

Under = Literal["plain", "budget", "quota", "spread"]


@contextlib.asynccontextmanager
async def _database(server: Server, name: str, connections: int) -> AsyncIterator[tuple[ff.Engine, str]]:
    """A new database and an engine with that many connections."""
    database = f"bench_{name.replace('.', '_')}"
    dsn = await server.create_database(database)
    await migrate_database(dsn)
    try:
        async with await ff.Engine.connect(dsn, min_size=connections, max_size=connections) as engine:
            yield engine, dsn
    finally:
        await server.drop_database(database)


async def _budget(engine: ff.Engine, name: str, tokens: int = _PLENTY) -> BudgetId:
    made = await engine.create_budget(name=name, dimensions=["tokens"], hard_limits=[tokens], soft_limits=[0])
    assert isinstance(made, BudgetCreated)
    return made.budget_id


async def _exhausted(engine: ff.Engine, name: str) -> BudgetId:
    found = await _budget(engine, name, 1)
    await engine.report_usage_admin(found, dimensions=["tokens"], deltas=[1])
    return found


async def _fill(engine: ff.Engine, items: Sequence[NewExecution], connections: int) -> None:
    batches = iter([items[start : start + _FILL_BATCH] for start in range(0, len(items), _FILL_BATCH)])

    async def submit() -> None:
        for batch in batches:
            for verdict in await engine.create_many(batch):
                assert isinstance(verdict, Created), verdict

    await asyncio.gather(*(submit() for _ in range(connections)))


async def _drain(engine: ff.Engine, jobs: int, connections: int) -> float:
    """Claim and complete in batches until this many are done. Returns the seconds it took."""
    done = 0
    deadline = time.monotonic() + 600

    async def work() -> None:
        nonlocal done
        while done < jobs:
            claimed = await engine.claim_many(limit=_BATCH, **_WORKER)
            if not claimed:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{done:,} of {jobs:,} jobs were done")
                await asyncio.sleep(0.001)
                continue
            await _complete(engine, [one.handle for one in claimed])
            done += len(claimed)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(connections)))
    return time.perf_counter() - started


async def _complete(engine: ff.Engine, handles: Sequence[Handle]) -> None:
    for verdict in await engine.complete_many(handles):
        if isinstance(verdict, ff.FlowFabricError):
            raise verdict


async def _on_eight(calls: Sequence[Callable[[], Awaitable[object]]]) -> float:
    """Make the calls, eight at a time; returns the seconds it took."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
    return time.perf_counter() - started


@dataclass(frozen=True)
class Drain:
    """Jobs a second in batches of 100; the log of fill and drain and the commits of the drain, per job.

    `budget`: one that is open. `quota`: a policy of 1,000 slots beside it. `spread`: for every four jobs a budget and a
    key with cap 4.
    """

    server: Server
    sizes: Sizes
    under: Under

    @property
    def series(self) -> Sequence[str]:
        name = f"limits.drain_{self.under}"
        return (name, f"{name}.wal", f"{name}.commits")

    async def run(self) -> Sample:
        jobs, connections = self.sizes.jobs, self.sizes.connections
        async with _database(self.server, self.series[0], connections) as (engine, dsn), Watcher.on(dsn) as watcher:
            items = await self._items(engine)
            # The routes exist and the statements are prepared.
            await _fill(engine, items[:_BATCH], connections)
            await _drain(engine, _BATCH, connections)
            await self.server.settle()
            before = await watcher.counters()
            await _fill(engine, items, connections)
            filled = await watcher.counters()
            with Stolen() as stolen:
                seconds = await _drain(engine, jobs, connections)
            check_all_done(await watcher.ask(_DONE), jobs + _BATCH)
            await engine.close()
            await watcher.alone()
            after = await watcher.counters()
        figures = (
            jobs / seconds,
            (after.wal_bytes - before.wal_bytes) / jobs,
            (after.commits - filled.commits) / jobs,
        )
        return Sample(dict(zip(self.series, figures, strict=True)), stolen.share)

    async def _items(self, engine: ff.Engine) -> list[NewExecution]:
        body = payload(self.sizes.payload_bytes)
        count = self.sizes.jobs // 4 if self.under == "spread" else 1
        budgets = [] if self.under == "plain" else [row["id"] for row in await engine._fetch(_BUDGETS, count, _PLENTY)]
        quotas: dict[str, Any] = {}
        if self.under in ("quota", "spread"):
            cap, key = (1_000, None) if self.under == "quota" else (4, "tenant")
            await engine.create_quota_policy(name="api", key=key, max_concurrent=cap)
            quotas = {"quota_policy_id": quota_policy_id_of("api")}
        policies: list[ExecutionPolicy | None] = [ExecutionPolicy(budget_ids=(one,), **quotas) for one in budgets]
        return [
            NewExecution(
                execution_kind="noop",
                input_payload=body,
                policy=policies[n % count] if policies else None,
                tags={"tenant": f"tenant {n % count}"} if self.under == "spread" else None,
            )
            for n in range(self.sizes.jobs)
        ]


@dataclass(frozen=True)
class ClaimOne:
    """Single claims a second on 8 connections, under one policy or none.

    They are completed after each round of 400, off the clock.
    """

    server: Server
    sizes: Sizes
    name: str
    cap: int | None = None

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        rounds = max(self.sizes.single_calls // _CLAIMS, 2)
        async with _database(self.server, self.name, _CONNECTIONS) as (engine, _):
            policy = None
            if self.cap is not None:
                await engine.create_quota_policy(name="api", max_concurrent=self.cap)
                policy = ExecutionPolicy(quota_policy_id=quota_policy_id_of("api"))
            item = NewExecution(execution_kind="noop", input_payload=payload(self.sizes.payload_bytes), policy=policy)
            await _fill(engine, [item] * (_CLAIMS * (rounds + 1)), _CONNECTIONS)
            await self.server.settle()
            await self._claim_all(engine)
            with Stolen() as stolen:
                seconds = sum([await self._claim_all(engine) for _ in range(rounds)])
        return Sample({self.name: rounds * _CLAIMS / seconds}, stolen.share)

    async def _claim_all(self, engine: ff.Engine) -> float:
        handles: list[Handle] = []

        async def claim() -> None:
            claimed = await engine.claim(**_WORKER)
            if claimed is None:
                raise RuntimeError("a claim found nothing")
            handles.append(claimed.handle)

        seconds = await _on_eight([claim] * _CLAIMS)
        for start in range(0, _CLAIMS, _BATCH):
            await _complete(engine, handles[start : start + _BATCH])
        return seconds


@dataclass
class DrainBeside:
    """A drain of unlimited work beside executions that an exhausted budget holds; the database is kept."""

    server: Server
    sizes: Sizes
    held: int
    name: str
    _engine: ff.Engine | None = field(default=None, init=False)
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack, init=False)

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        jobs, connections = self.sizes.jobs, self.sizes.connections
        engine = self._engine or await self._prepare()
        await self.server.settle()
        item = NewExecution(execution_kind="noop", input_payload=payload(self.sizes.payload_bytes))
        await _fill(engine, [item] * jobs, connections)
        with Stolen() as stolen:
            seconds = await _drain(engine, jobs, connections)
        found = (await engine._fetch("select count(*) from flowfabric.blocked"))[0][0]
        if found != self.held:
            raise RuntimeError(f"{found:,} of {self.held:,} executions are held")
        return Sample({self.name: jobs / seconds}, stolen.share)

    async def _prepare(self) -> ff.Engine:
        connections = self.sizes.connections
        engine, dsn = await self._stack.enter_async_context(_database(self.server, self.name, connections))
        policy = ExecutionPolicy(budget_ids=(await _exhausted(engine, "spent"),))
        body = payload(self.sizes.payload_bytes)
        item = NewExecution(execution_kind="noop", input_payload=body, policy=policy)
        await _fill(engine, [item] * self.held, connections)
        while (await engine._fetch("select count(*) from flowfabric.blocked"))[0][0] < self.held:
            if await engine.claim_many(limit=_BATCH, **_WORKER):
                raise RuntimeError("an exhausted budget let an execution run")
        await _vacuum(dsn)
        self._engine = engine
        return engine

    async def close(self) -> None:
        await self._stack.aclose()


async def _vacuum(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("vacuum analyze", timeout=600)
    finally:
        await connection.close()


@dataclass(frozen=True)
class MixedPinned:
    """Half of the work under a cap of one batch, at full speed for minutes, plain or beside a held transaction.

    One connection keeps a backlog, the others claim and complete. The last quarter of the time counts.
    """

    server: Server
    sizes: Sizes
    pinned: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"limits.mixed_{'pinned' if self.pinned else 'plain'}",)

    async def run(self) -> Sample:
        connections = self.sizes.connections + 1
        async with _database(self.server, self.series[0], connections) as (engine, dsn):
            await engine.create_quota_policy(name="api", max_concurrent=_BATCH)
            await self.server.settle()
            async with held_transaction(dsn, self.pinned):
                with Stolen() as stolen:
                    rate = await self._flow(engine)
                if self.pinned:
                    dead = ", ".join(f"{row['relname']} {row['n_dead_tup']:,}" for row in await engine._fetch(_DEAD))
                    print(f"dead rows: {dead}")
        return Sample({self.series[0]: rate}, stolen.share)

    async def _flow(self, engine: ff.Engine) -> float:
        until = time.perf_counter() + self.sizes.held_seconds
        late = until - self.sizes.held_seconds / 4
        submitted = done = done_late = 0
        body = payload(self.sizes.payload_bytes)
        policy = ExecutionPolicy(quota_policy_id=quota_policy_id_of("api"))
        pair = [
            NewExecution(execution_kind="noop", input_payload=body),
            NewExecution(execution_kind="noop", input_payload=body, policy=policy),
        ]

        async def submit() -> None:
            nonlocal submitted
            while time.perf_counter() < until:
                if submitted - done >= _BACKLOG:
                    await asyncio.sleep(0.002)
                    continue
                await engine.create_many(pair * (_FILL_BATCH // 2))
                submitted += _FILL_BATCH

        async def work() -> None:
            nonlocal done, done_late
            while (begun := time.perf_counter()) < until:
                claimed = await engine.claim_many(limit=_BATCH, **_WORKER)
                if not claimed:
                    await asyncio.sleep(0.001)
                    continue
                await _complete(engine, [one.handle for one in claimed])
                done += len(claimed)
                if begun >= late:
                    done_late += len(claimed)

        await asyncio.gather(submit(), *(work() for _ in range(self.sizes.connections)))
        return done_late / (time.perf_counter() - late)


@dataclass(frozen=True)
class Aside:
    """Runs with a budget each under one exhausted budget, in front of jobs that may run.

    What one that is moved aside adds to the drain, and what a job costs without them, in microseconds.
    """

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("limits.aside", "limits.aside_job")

    async def run(self) -> Sample:
        jobs, connections = self.sizes.jobs, self.sizes.connections
        denied = jobs * 5 // 2
        body = payload(self.sizes.payload_bytes)
        async with _database(self.server, "limits.aside", connections) as (engine, dsn):
            opened = ExecutionPolicy(budget_ids=(await _budget(engine, "open"),))
            spent = await _exhausted(engine, "spent")
            own = {"budget": {"hard": {"tokens": 1000}}, "budget_ids": [str(spent)]}
            allowed = NewExecution(execution_kind="noop", input_payload=body, policy=opened)
            held = NewExecution(execution_kind="noop", input_payload=body, policy=own)
            await _fill(engine, [allowed] * _BATCH, connections)
            await _drain(engine, _BATCH, connections)
            await self.server.settle()
            await _fill(engine, [allowed] * jobs, connections)
            with Stolen() as stolen:
                alone = await _drain(engine, jobs, connections)
            await _fill(engine, [held] * denied, connections)
            await _fill(engine, [allowed] * jobs, connections)
            await self.server.settle()
            await _vacuum(dsn)
            behind = await _drain(engine, jobs, connections)
            found = (await engine._fetch("select count(*) from flowfabric.blocked"))[0][0]
            # Claims skip rows that another one is just moving: the last may pass some of them.
            if found < denied // 2:
                raise RuntimeError(f"{found:,} of {denied:,} executions were moved aside")
        figures = ((behind - alone) / found * 1e6, alone / jobs * 1e6)
        return Sample(dict(zip(self.series, figures, strict=True)), stolen.share)


@dataclass(frozen=True)
class Overshoot:
    """By how much a cap or a hard limit was passed at any moment.

    8 connections claim under a cap of 5 for each of 10 keys, and report to one budget beyond its end.
    """

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("limits.overshoot",)

    async def run(self) -> Sample:
        async with _database(self.server, "limits.overshoot", _CONNECTIONS) as (engine, _):
            with Stolen() as stolen:
                over = await self._cap(engine) + await self._budget(engine)
        return Sample({self.series[0]: float(over)}, stolen.share)

    async def _cap(self, engine: ff.Engine) -> int:
        cap, jobs = 5, self.sizes.single_calls
        await engine.create_quota_policy(name="api", key="tenant", max_concurrent=cap)
        policy = ExecutionPolicy(quota_policy_id=quota_policy_id_of("api"))
        items = [NewExecution(execution_kind="noop", policy=policy, tags={"tenant": f"{n % 10}"}) for n in range(jobs)]
        await _fill(engine, items, _CONNECTIONS)
        running: collections.Counter[str] = collections.Counter()
        worst = done = 0

        async def work() -> None:
            nonlocal worst, done
            while done < jobs:
                claimed = await engine.claim_many(limit=8, **_WORKER)
                if not claimed:
                    await asyncio.sleep(0.001)
                    continue
                tenants = [one.tags["tenant"] for one in claimed]
                # From here to the call that ends them they run for sure.
                running.update(tenants)
                worst = max(worst, *running.values())
                await asyncio.sleep(0.001)
                running.subtract(tenants)
                await _complete(engine, [one.handle for one in claimed])
                done += len(claimed)

        async with asyncio.timeout(120), ff.Duties(engine):
            await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
        return max(worst - cap, 0)

    async def _budget(self, engine: ff.Engine) -> int:
        calls = self.sizes.single_calls
        hard = calls * 7 // 2
        budget = await _budget(engine, "team", hard)
        await engine.create_many([NewExecution(execution_kind="held")] * _CONNECTIONS)
        claimed = await engine.claim_many(limit=_CONNECTIONS, lease_ttl=_HOUR, **_WORKER)
        handles = itertools.cycle([one.handle for one in claimed])
        counted = 0

        async def report() -> None:
            nonlocal counted
            answer = await engine.report_usage(next(handles), {"tokens": 7}, budget)
            counted += 0 if isinstance(answer, HardBreach) else 7

        await _on_eight([report] * calls)
        used = (await engine.get_budget_status(budget)).usage["tokens"]
        if used != counted:
            raise RuntimeError(f"{used} are used, the answers say {counted}")
        return max(used - hard, 0)


@dataclass(frozen=True)
class Reports:
    """Reports a second on one budget, 8 connections, one or a hundred in a call; the second half counts."""

    server: Server
    sizes: Sizes
    name: str
    size: int = 1
    pinned: bool = False

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        calls = self.sizes.single_calls if self.size == 1 else max(self.sizes.single_calls // 10, _CONNECTIONS * 4)
        async with _database(self.server, self.name, _CONNECTIONS) as (engine, dsn):
            budget = await _budget(engine, "team")
            count = _CONNECTIONS * self.size
            await engine.create_many([NewExecution(execution_kind="held")] * count)
            claimed = await engine.claim_many(limit=count, lease_ttl=_HOUR, **_WORKER)
            usage = Usage(custom={"tokens": 1})
            each = [
                [Report(authority=one.handle, usage=usage, budgets=(budget,)) for one in claimed[n::_CONNECTIONS]]
                for n in range(_CONNECTIONS)
            ]
            turns = itertools.cycle(each)

            async def report() -> None:
                items = next(turns)
                if self.size == 1:
                    answers: Sequence[object] = [await engine.report_usage(items[0].authority, usage, budget)]
                else:
                    answers = await engine.report_usage_many(items)
                for answer in answers:
                    assert isinstance(answer, UsageOk), answer

            await self.server.settle()
            async with held_transaction(dsn, self.pinned):
                await _on_eight([report] * calls)
                with Stolen() as stolen:
                    seconds = await _on_eight([report] * calls)
            used = (await engine.get_budget_status(budget)).usage["tokens"]
            check_all_done(used, 2 * calls * self.size)
        return Sample({self.name: calls * self.size / seconds}, stolen.share)


@dataclass(frozen=True)
class HotRow:
    """A raw counter updated in place, 8 connections; the second half counts."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.hot_row",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_raw_hot_row")
        pool = await asyncpg.create_pool(dsn, min_size=_CONNECTIONS, max_size=_CONNECTIONS)
        try:
            await pool.execute("create table raw_counter (id integer primary key, n bigint not null)")
            await pool.execute("insert into raw_counter values (1, 0)")
            await self.server.settle()
            calls = [lambda: pool.execute("update raw_counter set n = n + $1 where id = 1", 1)]
            await _on_eight(calls * self.sizes.single_calls)
            with Stolen() as stolen:
                seconds = await _on_eight(calls * self.sizes.single_calls)
        finally:
            await pool.close()
            await self.server.drop_database("bench_raw_hot_row")
        return Sample({"raw.hot_row": self.sizes.single_calls / seconds}, stolen.share)


@contextlib.asynccontextmanager
async def _worker(server: Server, name: str, slots: int) -> AsyncIterator[tuple[ff.AsyncClient, WorkerProcess, Board]]:
    """A default worker process, ready, on a new database; and a client."""
    database = f"bench_{name.replace('.', '_')}"
    dsn = await server.create_database(database)
    await migrate_database(dsn)
    try:
        with tempfile.TemporaryDirectory(prefix="flowfabric-bench-") as directory:
            path = Board.create(Path(directory), slots)
            worker = await WorkerProcess.start("benchmarks.tasks", dsn, str(path), "0")
            app = tasks.connected(dsn)
            try:
                yield await app.client(), worker, Board(path)
                await stop_all([worker])
            finally:
                await app.close()
                await worker.kill()
    finally:
        await server.drop_database(database)


async def _until(condition: Callable[[], Awaitable[bool]], worker: WorkerProcess, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            worker.check()
            await asyncio.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class Handoff:
    """Cap 1: from the end of a handler to the start of the next, the median in milliseconds."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("quota.handoff",)

    async def run(self) -> Sample:
        count = self.sizes.waits
        async with _worker(self.server, "quota.handoff", 2 * count) as (client, worker, board):
            await client.create_quota("one", concurrent=1)
            await tasks.relay.options(quotas=["one"]).submit_many(list(range(count)))
            await self.server.settle()
            worker.go()

            async def ended() -> bool:
                return all(board.numbers())

            with Stolen() as stolen:
                await _until(ended, worker, 120)
            numbers = board.numbers()
        times = sorted(zip(numbers[::2], numbers[1::2], strict=True))
        gaps = [(later[0] - earlier[1]) / 1e6 for earlier, later in itertools.pairwise(times)]
        if min(gaps) < 0:
            raise RuntimeError("two handlers ran at the same time under a cap of 1")
        return Sample({"quota.handoff": statistics.median(gaps[count // 10 :])}, stolen.share)


@dataclass(frozen=True)
class Rate:
    """Starts of handlers over what a window of a second allows, with a backlog; and the same of the fullest window."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("quota.rate", "quota.rate.fullest")

    async def run(self) -> Sample:
        seconds, allowed = min(self.sizes.held_seconds, 30), 100
        count = (seconds + 5) * allowed
        async with _worker(self.server, "quota.rate", count) as (client, worker, board):
            await client.create_quota("paced", per_window=allowed, window=1)
            work = tasks.stamp.options(quotas=["paced"])
            for start in range(0, count, 1000):
                await work.submit_many([(n, "") for n in range(start, min(start + 1000, count))])
            worker.go()

            async def begun() -> bool:
                return any(board.numbers())

            with Stolen() as stolen:
                await _until(begun, worker)
                await asyncio.sleep(seconds + 0.5)
            worker.check()
            stamps = sorted(filter(None, board.numbers()))
            found = await client.engine._fetch(
                "select attempt_started_at as at from flowfabric.execution where attempt_started_at is not null"
                " order by 1"
            )
        started = sum(one < stamps[0] + seconds * 10**9 for one in stamps)
        moments = [row["at"] for row in found]
        window = timedelta(seconds=1)
        last, fullest = 0, 0
        for number, moment in enumerate(moments):
            while moments[last] <= moment - window:
                last += 1
            fullest = max(fullest, number - last + 1)
        figures = (started / (seconds * allowed), fullest / allowed)
        return Sample(dict(zip(self.series, figures, strict=True)), stolen.share)


@dataclass(frozen=True)
class ResumePaused:
    """From the raise of a run's budget to its paused handler in a worker process, the median in milliseconds."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("budget.resume",)

    async def run(self) -> Sample:
        count = self.sizes.waits
        async with _worker(self.server, "budget.resume", count) as (client, worker, board):
            runs = await tasks.spends.options(budget=ff.Budget(tokens=1)).submit_many(list(range(count)))
            worker.go()

            async def paused() -> bool:
                found = await client.engine._fetch("select count(*) from flowfabric.blocked where needs is not null")
                return int(found[0][0]) == count

            await _until(paused, worker)
            raised = []
            with Stolen() as stolen:
                for number, run in enumerate(runs):
                    await asyncio.sleep(0.01)
                    raised.append(time.perf_counter_ns())
                    await run.raise_budget(tokens=1)

                    async def resumed(number: int = number) -> bool:
                        return board[number] != 0

                    await _until(resumed, worker, 10)
            took = [(ran - at) / 1e6 for at, ran in zip(raised, board.numbers(), strict=True)]
        return Sample({"budget.resume": statistics.median(took[count // 10 :])}, stolen.share)


class Usages(tasks.Tasks):
    """Runs that report three times to one budget."""

    async def prepare(self) -> None:
        await super().prepare()
        async with tasks.connected(self._dsn) as app:
            await (await app.client()).create_budget("team", hard={"tokens": _PLENTY})


def three_usages(sizes: Sizes) -> Callable[[str], tasks.Tasks]:
    return lambda dsn: Usages(dsn, sizes, tasks.usages.options(budgets=["team"]))


def three_steps(sizes: Sizes) -> Callable[[str], tasks.Tasks]:
    return lambda dsn: tasks.Tasks(dsn, sizes, tasks.three_steps)
