"""The event log: what followers cost a drain, how fast one reads the log, and how soon an idle one has an event."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

import flowfabric as ff
from benchmarks.harness import Sample, Sizes
from benchmarks.product import migrate_database
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from flowfabric.values.event import EventCursor, EventFilter

_FILL = """
with routes as (
    insert into flowfabric.lane (name, registered_at, registered_by) values ('default', now(), 'bench')
), made as (
    insert into flowfabric.route (lane, kind, capabilities, digest)
    values ('default', 'common', '{}', md5('')), ('default', 'rare', '{}', md5('')) returning id, kind
)
insert into flowfabric.event
    (slot, route, occurred_at, partition, id, namespace, outcome, lease_type, lease_id, lease_epoch, attempt_id,
     attempt_index, reason, revoked_by)
select flowfabric.event_slot(now()), m.id, now(), 1, gen_random_uuid(), '', 'success', 'revoked', gen_random_uuid(), 1,
       gen_random_uuid(), 0, 'completed', 'backend'
from generate_series(1, $1::integer) n
join made m on m.kind = case when n % 10000 = 0 then 'rare' else 'common' end
"""
_WRITE = """
with log as materialized (select flowfabric.open_log(now()) as slot)
insert into flowfabric.event (slot, occurred_at, partition, id, namespace, outcome)
select slot, now(), 1, gen_random_uuid(), '', 'success' from log
"""
_PAGE = 256
_IDLE = 0.35  # seconds after which a follower sleeps


def follower(mode: str) -> Callable[[str], contextlib.AbstractAsyncContextManager[None]]:
    """A process beside a drain: four followers with filters, or one of everything."""

    @contextlib.asynccontextmanager
    async def beside(dsn: str) -> AsyncIterator[None]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.follow_events",
            dsn,
            mode,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError("the follower did not start")
            begun = time.monotonic()
            yield
            await asyncio.sleep(0.5)  # it reads the rest
            seconds = time.monotonic() - begun
            process.stdin.close()
            seen, told, reads = map(int, (await process.stdout.readline()).split())
            sys.stderr.write(
                f"{mode}: {seen:,} events, {reads / seconds:.0f} reads/s, {told / seconds:.1f} notifications/s\n"
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    return beside


@dataclass(frozen=True)
class Follow:
    """Events a second through a stored log: all of them, bare pages of the same rows, and with a sparse filter."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("events.follow", "raw.follow", "events.follow.all_time", "events.follow.sparse_time")

    async def run(self) -> Sample:
        count = self.sizes.stored
        dsn = await self.server.create_database("bench_events_follow")
        await migrate_database(dsn)
        sql = await asyncpg.connect(dsn)
        try:
            await sql.execute(_FILL.replace("$1::integer", str(count)))
            await sql.execute("vacuum analyze")
            await self.server.settle()
            with Stolen() as stolen:
                raw = await self._raw(sql, count)
                async with await ff.Engine.connect(dsn, min_size=1, max_size=1, notifications=False) as engine:
                    every = await self._ours(engine, count, None)
                    sparse = await self._ours(engine, count // 10_000, EventFilter(kind="rare"))
        finally:
            await sql.close()
            await self.server.drop_database("bench_events_follow")
        return Sample(
            {
                "events.follow": count / every,
                "raw.follow": count / raw,
                "events.follow.all_time": every,
                "events.follow.sparse_time": sparse,
            },
            stolen.share,
        )

    async def _ours(self, engine: ff.Engine, count: int, chosen: EventFilter | None) -> float:
        begun = time.perf_counter()
        async with await engine.follow(after=EventCursor(), filter=chosen) as events:
            for _ in range(count):
                await anext(events)
        return time.perf_counter() - begun

    async def _raw(self, sql: asyncpg.Connection[Any], count: int) -> float:
        page = await sql.prepare("select * from flowfabric.event where seq > $1 order by seq limit $2")
        begun = time.perf_counter()
        after = seen = 0
        while seen < count:
            found = await page.fetch(after, _PAGE)
            seen += len(found)
            after = found[-1]["seq"]
        return time.perf_counter() - begun


@dataclass(frozen=True)
class Latency:
    """From a commit to the event at a follower that sleeps, and the same with a bare notification."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("events.latency", "raw.event_latency")

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_events_latency")
        await migrate_database(dsn)
        rounds = min(self.sizes.waits, 60)
        try:
            with Stolen() as stolen:
                ours = await self._ours(dsn, rounds)
                raw = await self._raw(dsn, rounds)
        finally:
            await self.server.drop_database("bench_events_latency")
        return Sample({"events.latency": ours, "raw.event_latency": raw}, stolen.share)

    async def _ours(self, dsn: str, rounds: int) -> float:
        took: list[float] = []
        writer = await asyncpg.connect(dsn)
        write = await writer.prepare(_WRITE)
        async with await ff.Engine.connect(dsn, min_size=2) as engine, await engine.subscribe_completion() as events:
            for _ in range(rounds):
                await asyncio.sleep(_IDLE)
                waiting = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                begun = time.perf_counter()
                await write.fetch()
                await asyncio.wait_for(waiting, 10)
                took.append((time.perf_counter() - begun) * 1000)
        await writer.close()
        return statistics.median(took[len(took) // 10 :])

    async def _raw(self, dsn: str, rounds: int) -> float:
        writer, listener, reader = [await asyncpg.connect(dsn) for _ in range(3)]
        took: list[float] = []
        told = asyncio.Event()
        await writer.execute(
            "create table raw_event (n bigint generated always as identity primary key, at timestamptz)"
        )
        await listener.add_listener("raw_event", lambda *_: told.set())
        insert = await writer.prepare(
            "with made as (insert into raw_event (at) values (now())) select pg_notify('raw_event', '')"
        )
        page = await reader.prepare("select n, at from raw_event where n > $1 order by n limit 256")
        last = 0
        for _ in range(rounds):
            await asyncio.sleep(_IDLE)
            told.clear()
            begun = time.perf_counter()
            await insert.fetch()
            await asyncio.wait_for(told.wait(), 10)
            found = await page.fetch(last)
            took.append((time.perf_counter() - begun) * 1000)
            last = found[-1]["n"]
        for connection in (writer, listener, reader):
            await connection.close()
        return statistics.median(took[len(took) // 10 :])
