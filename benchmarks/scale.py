"""What grows and must not: claims and submissions beside an old snapshot, idle workers, wake-ups, kinds, bytes.

Many workers of these trials share one process, each with its own connections and its own listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import asyncpg

import flowfabric as ff
from benchmarks.engine import STORED, store
from benchmarks.harness import Sample, Sizes
from benchmarks.held import held_transaction
from benchmarks.jobs import payload
from benchmarks.product import migrate_database
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from flowfabric._duties import ALL, DelayedPromotion, TimerRunner
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.worker import OwnWorker, Refreshed
from flowfabric.worker.claims import Claims as WorkerClaims

_WORKER = {"worker_id": "bench", "worker_instance_id": "bench-1"}


@contextlib.asynccontextmanager
async def _database(server: Server, name: str) -> AsyncIterator[str]:
    dsn = await server.create_database(name)
    try:
        await migrate_database(dsn)
        yield dsn
    finally:
        await server.drop_database(name)


@contextlib.asynccontextmanager
async def _engine(
    server: Server, name: str, size: int, *, pinned: bool = False
) -> AsyncIterator[tuple[str, ff.Engine]]:
    async with (
        _database(server, name) as dsn,
        await ff.Engine.connect(dsn, max_size=size) as engine,
        held_transaction(dsn, pinned),
    ):
        yield dsn, engine


async def _finish(engine: ff.Engine, claimed: Sequence[Claimed]) -> None:
    if claimed:
        await engine.complete_many([one.handle for one in claimed])


def _side(pinned: bool) -> str:
    return "pinned" if pinned else "plain"


@dataclass(frozen=True)
class ClaimFromEmpty:
    """A queue that is kept empty: the median claim of one, in ms, of the last tenth of the jobs."""

    server: Server
    sizes: Sizes
    pinned: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"scale.claim_empty.{_side(self.pinned)}",)

    async def run(self) -> Sample:
        item = NewExecution(execution_kind="noop", input_payload=payload(self.sizes.payload_bytes))
        rounds = self.sizes.kept_empty // 50
        times: list[float] = []
        async with _engine(self.server, "bench_empty", 1, pinned=self.pinned) as (_, engine):
            with Stolen() as stolen:
                for n in range(rounds):
                    await engine.create_many([item] * 50)
                    claimed = await engine.claim_many(limit=50, **_WORKER)
                    await _finish(engine, claimed)
                    # A worker does this before it sleeps; then the next job.
                    await engine.claim_many(limit=50, **_WORKER)
                    if n >= rounds * 0.9:
                        await engine.create_many([item])
                        begun = time.perf_counter()
                        claimed = await engine.claim_many(limit=1, **_WORKER)
                        times.append(time.perf_counter() - begun)
                        await _finish(engine, claimed)
        return Sample({self.series[0]: statistics.median(times) * 1000}, stolen.share)


@dataclass(frozen=True)
class ClaimBesideSubmitters:
    """Eight submitters and a backlog that grows: the median claim of 50, in ms, of the last quarter of the time.

    The submitters never pause: beside slower ones the queue runs empty, and full claims are those after a stall.
    """

    server: Server
    sizes: Sizes
    pinned: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"scale.claim_busy.{_side(self.pinned)}",)

    async def run(self) -> Sample:
        item = NewExecution(execution_kind="noop", input_payload=payload(self.sizes.payload_bytes))
        times: list[float] = []
        async with _engine(self.server, "bench_busy", 9, pinned=self.pinned) as (_, engine):
            until = time.perf_counter() + self.sizes.held_seconds / 3
            late = until - self.sizes.held_seconds / 12

            async def submit() -> None:
                while time.perf_counter() < until:
                    await engine.create_many([item] * 10)

            async def work() -> None:
                while (begun := time.perf_counter()) < until:
                    claimed = await engine.claim_many(limit=50, **_WORKER)
                    assert len(claimed) == 50, "the backlog is gone"
                    if begun >= late:
                        times.append(time.perf_counter() - begun)
                    await _finish(engine, claimed)

            for _ in range(20):
                await engine.create_many([item] * 500)
            with Stolen() as stolen:
                await asyncio.gather(work(), *(submit() for _ in range(8)))
        return Sample({self.series[0]: statistics.median(times) * 1000}, stolen.share)


@dataclass(frozen=True)
class SubmitBesideSleepers:
    """Single submissions beside 20 workers that fall asleep again and again: the median, in ms, of the last quarter."""

    server: Server
    sizes: Sizes
    pinned: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"scale.submit.{_side(self.pinned)}",)

    async def run(self) -> Sample:
        item = NewExecution(execution_kind="noop", input_payload=payload(self.sizes.payload_bytes))
        times: list[float] = []
        async with (
            _database(self.server, "bench_sleepers") as dsn,
            await ff.Engine.connect(dsn, max_size=2) as engine,
            await ff.Engine.connect(dsn, max_size=20) as workers,
            held_transaction(dsn, self.pinned),
        ):
            until = time.perf_counter() + self.sizes.held_seconds / 3
            late = until - self.sizes.held_seconds / 12

            async def sleeper() -> None:
                while time.perf_counter() < until:
                    claimed = await workers.claim(**_WORKER, max_wait=timedelta(seconds=0.2))
                    if claimed is not None:
                        await workers.complete(claimed.handle)

            async def submit() -> None:
                while (begun := time.perf_counter()) < until:
                    await engine.create_many([item])
                    if begun >= late:
                        times.append(time.perf_counter() - begun)
                    await asyncio.sleep(0.01)

            with Stolen() as stolen:
                await asyncio.gather(submit(), *(sleeper() for _ in range(20)))
        return Sample({self.series[0]: statistics.median(times) * 1000}, stolen.share)


@dataclass(frozen=True)
class TimersRound:
    """A poll of the duties with nothing due, after thousands of timers have fired: the median, in ms."""

    server: Server
    sizes: Sizes
    pinned: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"scale.timers.{_side(self.pinned)}",)

    async def run(self) -> Sample:
        item = NewExecution(execution_kind="noop", delay_until=timedelta(milliseconds=1))
        async with _engine(self.server, "bench_timers", 2, pinned=self.pinned) as (dsn, engine):
            connection = await asyncpg.connect(dsn)
            duty = TimerRunner(engine, [DelayedPromotion(engine)])
            try:
                for _ in range(self.sizes.fired_timers):
                    await engine.create_many([item])
                await connection.execute("update flowfabric.clock set shift = interval '2 minutes'")
                with Stolen() as stolen:
                    await duty.run_once()
                    await duty.run_once()
                    times: list[float] = []
                    for _ in range(200):
                        begun = time.perf_counter()
                        await duty.run_once()
                        times.append(time.perf_counter() - begun)
            finally:
                await connection.close()
        return Sample({self.series[0]: statistics.median(times) * 1000}, stolen.share)


@dataclass(frozen=True)
class ManyKinds:
    """A claim of 50 and one without work, in ms, over 1 or 1,000 kinds or lanes, all of which had work before."""

    server: Server
    sizes: Sizes
    what: str  # kinds, lanes
    count: int

    @property
    def series(self) -> Sequence[str]:
        return tuple(f"scale.{self.what}{self.count}.{name}" for name in ("claim", "idle"))

    async def run(self) -> Sample:
        kinds = [f"kind-{n}" for n in range(self.count)] if self.what == "kinds" else ["kind-0"]
        lanes = [f"lane-{n}" for n in range(self.count)] if self.what == "lanes" else ["lane-0"]
        everywhere = [
            NewExecution(execution_kind=kind, lane_id=lane, input_payload=payload(200))
            for lane in lanes
            for kind in kinds
        ]
        async with _engine(self.server, "bench_kinds", 1) as (dsn, engine):

            async def claim() -> Sequence[Claimed]:
                if self.what == "lanes":
                    return await engine.claim_lanes(shares, limit=50, kinds=kinds, **_WORKER)
                return await engine.claim_many(lanes[0], limit=50, kinds=kinds, **_WORKER)

            shares = dict.fromkeys(lanes, 50 // self.count)  # of 50 among all of them: most are 0
            for at in range(0, len(everywhere), 50):
                await engine.create_many(everywhere[at : at + 50])
            while claimed := await claim():
                await _finish(engine, claimed)
            connection = await asyncpg.connect(dsn)
            await connection.execute("update flowfabric.clock set shift = interval '1 minute'")
            await connection.close()
            for _ in range(self.count // 2 + 50):  # routes without work are forgotten a few at a time
                await claim()
            claims: list[float] = []
            idle: list[float] = []
            with Stolen() as stolen:
                for _ in range(100):
                    begun = time.perf_counter()
                    await claim()
                    idle.append(time.perf_counter() - begun)
                    await engine.create_many([everywhere[-1]] * 50)
                    begun = time.perf_counter()
                    claimed = await claim()
                    claims.append(time.perf_counter() - begun)
                    await _finish(engine, claimed)
        medians = (statistics.median(claims) * 1000, statistics.median(idle) * 1000)
        return Sample(dict(zip(self.series, medians, strict=True)), stolen.share)


def _app(dsn: str, lane: str = "default") -> tuple[ff.App, ff.Task[[], float]]:
    app = ff.App(dsn, name=f"bench-{lane}")

    @app.task(lane=lane)
    async def noop() -> float:
        return time.time()

    return app, noop


async def _transactions(connection: asyncpg.Connection) -> int:
    await connection.execute("select pg_stat_clear_snapshot()")
    found = await connection.fetchval(
        "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
    )
    return int(found)


@dataclass(frozen=True)
class IdleWorkers:
    """Workers without work beside the one that leads the duties: transactions per second and connections of each."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("scale.idle.tx", "scale.idle.connections")

    async def run(self) -> Sample:
        count, seconds = 10, 20
        async with _database(self.server, "bench_idle") as dsn, contextlib.AsyncExitStack() as stack:
            connection = await asyncpg.connect(dsn)
            stack.push_async_callback(connection.close)
            for _ in range(2):  # one leads the duties, another the cascades
                await stack.enter_async_context(ff.Worker(_app(dsn)[0]))
            await asyncio.sleep(65)  # what they opened at first is given back
            figures = []
            for added in (0, count):
                for _ in range(added):
                    await stack.enter_async_context(ff.Worker(_app(dsn)[0]))
                await asyncio.sleep(15)
                before = await _transactions(connection)
                with Stolen() as stolen:
                    await asyncio.sleep(seconds)
                held = await connection.fetchval(
                    "select count(*) from pg_stat_activity where datname = current_database()"
                )
                figures.append(((await _transactions(connection) - before) / seconds, held))
        (tx0, held0), (tx, held) = figures
        values = ((tx - tx0) / count, (held - held0) / count)
        return Sample(dict(zip(self.series, values, strict=True)), stolen.share)


def idle_workers(count: int) -> Callable[[str], contextlib.AbstractAsyncContextManager[None]]:
    """This many workers of another lane, in this process."""

    @contextlib.asynccontextmanager
    async def beside(dsn: str) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(ff.Worker(_app(dsn, "another")[0], concurrency=10))
            await asyncio.sleep(5 if count else 0)
            yield

    return beside


def registered_workers(count: int) -> Callable[[str], contextlib.AbstractAsyncContextManager[None]]:
    """This many registered workers of another lane, each with a heartbeat every 20 s, as those of default workers."""

    @contextlib.asynccontextmanager
    async def beside(dsn: str) -> AsyncIterator[None]:
        async with await ff.Engine.connect(dsn, max_size=4, notifications=False) as engine:
            names = [f"bench@host-{n}/{n}/0123456789ab" for n in range(count)]
            for name in names:
                await engine.register_worker(
                    "bench", name, lanes=["another"], kinds=["noop"], liveness_ttl=timedelta(seconds=60), slots=100
                )
            beating = asyncio.create_task(_beat(engine, names)) if names else None
            try:
                yield
            finally:
                if beating is not None:
                    beating.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await beating  # raises what ended it before
            alive = len((await engine.list_workers("", limit=10_000)).items)
            if alive < count:
                raise RuntimeError(f"{alive} of {count} workers are alive")

    return beside


async def _beat(engine: ff.Engine, names: Sequence[str]) -> None:
    """Send the heartbeats of all of them, evenly spread."""
    own = [OwnWorker(worker_instance_id=name, process=engine.instance) for name in names]
    begun = time.perf_counter()
    for n in itertools.count():
        await asyncio.sleep(max(0.0, begun + n * 20 / len(own) - time.perf_counter()))
        if not isinstance(await engine.heartbeat_own(own[n % len(own)]), Refreshed):
            raise RuntimeError("a heartbeat was refused")


@dataclass(frozen=True)
class Wake:
    """One submission beside sleeping workers: claims it causes, and ms from the submission to its handler."""

    server: Server
    sizes: Sizes
    sleepers: int
    held: bool = False  # another submission is held open in a caller's transaction

    @property
    def series(self) -> Sequence[str]:
        name = f"scale.wake{self.sleepers}{'_held' if self.held else ''}"
        return (f"{name}.claims", f"{name}.ms")

    async def run(self) -> Sample:
        latencies: list[float] = []
        claims: list[float] = []
        async with _database(self.server, "bench_wake") as dsn, contextlib.AsyncExitStack() as stack:
            connection = await asyncpg.connect(dsn)
            stack.push_async_callback(connection.close)
            counted = _Counted()
            app, noop = _app(dsn)
            stack.push_async_callback(app.close)
            for _ in range(self.sleepers):
                await stack.enter_async_context(counted.worker(_app(dsn)[0]))
            await (await noop.submit()).result()  # the first of a kind registers it
            await asyncio.sleep(12)  # asleep for longer
            if self.held:
                caller = await asyncpg.connect(dsn)
                stack.push_async_callback(caller.close)
                await caller.execute("begin")
                await (await app.client()).engine.create_execution(execution_kind="noop", connection=caller)
            with Stolen() as stolen:
                for _ in range(30):
                    counted.claims = 0
                    begun = time.time()
                    started = await (await noop.submit()).result()
                    latencies.append((started - begun) * 1000)
                    claims.append(counted.claims)
                    await asyncio.sleep(0.4)
        values = (statistics.median(claims), statistics.median(latencies))
        return Sample(dict(zip(self.series, values, strict=True)), stolen.share)


class _Counted:
    """Workers whose claims are counted, without those of workers that were not woken."""

    def __init__(self) -> None:
        self.claims = 0

    def worker(self, app: ff.App) -> ff.Worker:
        counted = self

        class Claims(WorkerClaims):
            async def claim(self, limit: int) -> list[Claimed]:
                begun = time.monotonic()
                found: list[Claimed] = await super().claim(limit)
                # Not the polls that come by themselves: those of workers that were woken.
                if found or begun - self.polled_at < 0.5:
                    counted.claims += 1
                self.polled_at = begun
                return found

            polled_at = 0.0

        worker = ff.Worker(app, concurrency=10)
        worker._claims_class = Claims
        return worker


# A tenth as many budgets and keys of a quota as executions, each key with an admission in its window; a ledger with an
# entry for every execution. $1: how many budgets.
_LIMITS = (
    """
with made as (
    insert into flowfabric.budget (id, name, mode, dimensions, hard, soft, created_at, updated_at)
    select gen_random_uuid(), 'budget ' || n, 'strict', '{t}', '{1000000000}', '{0}', now(), now()
    from generate_series(1, $1::int) n
    returning id, dimensions, hard, soft
)
insert into flowfabric.budget_head
    (budget_id, seq, at, breaches, soft_breaches, generation, is_strict, dimensions, used, held, overrun, hard, soft)
select m.id, 1, now(), 0, 0, 0, true, m.dimensions, '{100000000}', '{0}', '{0}', m.hard, m.soft from made m
""",
    """
insert into flowfabric.budget_spend (budget_id, execution_id, generation, dimension, amount, recorded_at, is_known)
select b.id, e.id, 0, 't', 1, now(), true
from (select id from flowfabric.budget order by id limit least($1::int, 1)) b, flowfabric.execution e
where e.creator = 'stored'
""",
    """
with policy as (
    insert into flowfabric.quota_policy
        (id, name, key, window_seconds, max_requests, max_concurrent, jitter_ms, created_at, updated_at)
    values (gen_random_uuid(), 'keyed', 't', 86400, 1000000, 0, 0, now(), now())
    returning id
), heads as (
    insert into flowfabric.quota_head (policy_id, key)
    select p.id, 'key ' || n from policy p, generate_series(1, $1::int) n
    returning policy_id, key
)
insert into flowfabric.quota_entry (policy_id, key, id, partition, admitted_at)
select h.policy_id, h.key, gen_random_uuid(), 0, now() from heads h
""",
)


async def _store_limits_and_flows(dsn: str, engine: ff.Engine, stored: int) -> None:
    """What duties pass over besides finished executions: limits, and flows whose members wait for one another."""
    count, size = stored // 10, 1000
    connection = await asyncpg.connect(dsn)
    try:
        for statement in _LIMITS:
            await connection.execute(statement, count, timeout=300)
        for start in range(0, count, size):
            after = [NewEdge(upstream="first")]
            members = [
                NewNode(name=f"n{n}", execution=NewExecution(execution_kind="noop"), after=after)
                for n in range(min(size, count - start))
            ]
            first = NewNode(name="first", execution=NewExecution(execution_kind="noop"))
            await engine.submit_flow([first, *members[: size - 1]])
        await connection.execute("vacuum analyze", timeout=600)
    finally:
        await connection.close()


@dataclass
class DutiesBesideStored:
    """Server time of a minute of all duties, in ms, beside this many stored executions, their limits and flows.

    The database is kept over the repetitions.
    """

    server: Server
    sizes: Sizes
    stored: int
    name: str
    _dsn: str | None = field(default=None, init=False)

    @property
    def series(self) -> Sequence[str]:
        return (f"scale.duties.{self.name}",)

    async def run(self) -> Sample:
        dsn = self._dsn or await self._prepare()
        await self.server.settle()
        async with await ff.Engine.connect(dsn) as engine:
            total = 0.0
            with Stolen() as stolen:
                for kind in ALL:
                    duty = kind(engine)
                    await duty.run_once()  # plans are made
                    rounds = max(1, round(60 / duty.interval.total_seconds()))
                    sampled = min(rounds, 5)
                    begun = time.perf_counter()
                    for _ in range(sampled):
                        await duty.run_once()
                    total += (time.perf_counter() - begun) * rounds / sampled
        return Sample({self.series[0]: total * 1000}, stolen.share)

    async def _prepare(self) -> str:
        dsn = await self.server.create_database(self._database)
        await migrate_database(dsn)
        async with await ff.Engine.connect(dsn) as engine:
            await engine.create_many([NewExecution(execution_kind="noop")])
            await store(dsn, STORED, self.stored, self.sizes)
            await _store_limits_and_flows(dsn, engine, self.stored)
        self._dsn = dsn
        return dsn

    @property
    def _database(self) -> str:
        return f"bench_duties_{self.name}"

    async def close(self) -> None:
        await self.server.drop_database(self._database)
