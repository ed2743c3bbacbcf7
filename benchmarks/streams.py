"""Streams: what an append costs beside a bare insert of the same rows, and how soon a reader has what was emitted."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg

import flowfabric as ff
from benchmarks.harness import Sample, Sizes
from benchmarks.product import Waiter, migrate_database, mint_uuid
from benchmarks.server import Server
from benchmarks.stolen import Stolen
from flowfabric.values.execution import NewExecution
from flowfabric.values.lease import Handle
from flowfabric.values.stream import START, BestEffortLive, DurableSummary, FrameMode, NewFrame, StreamPage

_WORKER = {"worker_id": "bench", "worker_instance_id": "bench-1"}
_STREAMS = 500
_PAYLOAD = b"x" * 60
_HOUR = timedelta(hours=1)
_RAW = """
create table raw_frame (
    id uuid not null, attempt_index integer not null, ms bigint not null, n integer not null, kind text not null,
    frame_type text not null, payload bytea not null, primary key (id, attempt_index, ms, n))
"""
_RAW_INSERT = (
    "insert into raw_frame select u.id, 0, $3, $4, 'event', 'delta', u.payload from unnest($1::uuid[], $2::bytea[])"
    " as u (id, payload)"
)


@contextlib.asynccontextmanager
async def _held(server: Server, name: str, count: int) -> AsyncIterator[tuple[ff.Engine, list[Handle], str]]:
    """An engine on one connection, and that many leases."""
    database = f"bench_{name.replace('.', '_')}"
    dsn = await server.create_database(database)
    await migrate_database(dsn)
    try:
        async with await ff.Engine.connect(dsn, min_size=1, max_size=1, notifications=False) as engine:
            handles: list[Handle] = []
            for start in range(0, count, _STREAMS):
                size = min(_STREAMS, count - start)
                await engine.create_many([NewExecution(execution_kind="held")] * size)
                claimed = await engine.claim_many(limit=size, lease_ttl=_HOUR, **_WORKER)
                handles += [one.handle for one in claimed]
            await server.settle()
            yield engine, handles, dsn
    finally:
        await server.drop_database(database)


@dataclass(frozen=True)
class AppendMany:
    """Frames a second over 500 streams, in calls of 500; `stored` frames are in each stream before."""

    server: Server
    sizes: Sizes
    name: str
    stored: int = 0
    pinned: bool = False

    @property
    def series(self) -> Sequence[str]:
        return (self.name,)

    async def run(self) -> Sample:
        calls = max(self.sizes.jobs // _STREAMS, 5)
        async with _held(self.server, self.name, _STREAMS) as (engine, handles, dsn):
            for handle in handles if self.stored else ():
                for start in range(0, self.stored, 1000):
                    frames = [NewFrame(payload=_PAYLOAD, frame_type="delta")] * min(1000, self.stored - start)
                    await engine.append_frames([(handle, frame) for frame in frames])
            await self.server.settle()
            items = [(handle, NewFrame(payload=_PAYLOAD, frame_type="delta")) for handle in handles]
            async with _pin(dsn, self.pinned):
                await engine.append_frames(items)
                with Stolen() as stolen:
                    begun = time.perf_counter()
                    for _ in range(calls):
                        await engine.append_frames(items)
                    seconds = time.perf_counter() - begun
        return Sample({self.name: calls * _STREAMS / seconds}, stolen.share)


@contextlib.asynccontextmanager
async def _pin(dsn: str, wanted: bool) -> AsyncIterator[None]:
    """Hold a transaction open, with a transaction id and one SELECT done."""
    if not wanted:
        yield
        return
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("begin isolation level repeatable read")
        await connection.fetch("select pg_current_xact_id(), count(*) from flowfabric.execution")
        yield
    finally:
        await connection.close()


@dataclass(frozen=True)
class RawMany:
    """The same rows in a bare table."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.append_many",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_raw_append_many")
        connection = await asyncpg.connect(dsn)
        calls = max(self.sizes.jobs // _STREAMS, 5)
        try:
            await connection.execute(_RAW)
            ids = [
                row[0]
                for row in await connection.fetch(f"select gen_random_uuid() from generate_series(1, {_STREAMS})")
            ]
            payloads = [_PAYLOAD] * _STREAMS
            await self.server.settle()
            await connection.execute(_RAW_INSERT, ids, payloads, 0, 0)
            with Stolen() as stolen:
                begun = time.perf_counter()
                for n in range(calls):
                    await connection.execute(_RAW_INSERT, ids, payloads, 1, n)
                seconds = time.perf_counter() - begun
        finally:
            await connection.close()
            await self.server.drop_database("bench_raw_append_many")
        return Sample({"raw.append_many": calls * _STREAMS / seconds}, stolen.share)


@dataclass(frozen=True)
class AppendOne:
    """Single appends a second, one after the other."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("stream.append_one",)

    async def run(self) -> Sample:
        async with _held(self.server, "stream.append_one", 1) as (engine, handles, _):
            frame = NewFrame(payload=_PAYLOAD, frame_type="delta")
            for _ in range(20):
                await engine.append_frame(handles[0], frame)
            with Stolen() as stolen:
                begun = time.perf_counter()
                for _ in range(self.sizes.single_calls):
                    await engine.append_frame(handles[0], frame)
                seconds = time.perf_counter() - begun
        return Sample({"stream.append_one": self.sizes.single_calls / seconds}, stolen.share)


@dataclass(frozen=True)
class RawOne:
    """One row, committed, one after the other."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("raw.append_one",)

    async def run(self) -> Sample:
        dsn = await self.server.create_database("bench_raw_append_one")
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(_RAW)
            ids = [await connection.fetchval("select gen_random_uuid()")]
            await self.server.settle()
            with Stolen() as stolen:
                begun = time.perf_counter()
                for n in range(self.sizes.single_calls):
                    await connection.execute(_RAW_INSERT, ids, [_PAYLOAD], 1, n)
                seconds = time.perf_counter() - begun
        finally:
            await connection.close()
            await self.server.drop_database("bench_raw_append_one")
        return Sample({"raw.append_one": self.sizes.single_calls / seconds}, stolen.share)


@dataclass(frozen=True)
class Wal:
    """Bytes of WAL a frame: durable and best effort, 5 of each of 100 streams in a call; deltas of a 20 kB document."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("stream.wal", "stream.wal_live", "stream.wal_delta", "stream.wal_rewrite")

    async def run(self) -> Sample:
        async with _held(self.server, "stream.wal", 100) as (engine, handles, dsn):
            sql = await asyncpg.connect(dsn)
            try:
                with Stolen() as stolen:
                    durable = await self._frames(engine, sql, handles, None)
                    live = await self._frames(engine, sql, handles, BestEffortLive(ttl=timedelta(seconds=10)))
                    delta = await self._deltas(engine, sql, handles[0])
                    rewrite = await self._rewrites(sql)
            finally:
                await sql.close()
        return Sample(dict(zip(self.series, (durable, live, delta, rewrite), strict=True)), stolen.share)

    async def _frames(
        self, engine: ff.Engine, sql: asyncpg.Connection[Any], handles: list[Handle], mode: FrameMode | None
    ) -> float:
        fields: dict[str, Any] = {} if mode is None else {"mode": mode}
        items = [(one, NewFrame(payload=_PAYLOAD, frame_type="delta", **fields)) for one in handles for _ in range(5)]
        await engine.append_frames(items)
        calls = 40
        before = await _lsn(sql)
        for _ in range(calls):
            await engine.append_frames(items)
        return (await _lsn(sql) - before) / (calls * len(items))

    async def _deltas(self, engine: ff.Engine, sql: asyncpg.Connection[Any], handle: Handle) -> float:
        document = b"{" + b",".join(b'"key %d": "%s"' % (n, b"v" * 80) for n in range(200)) + b"}"
        await engine.append_frame(handle, NewFrame(payload=document, mode=DurableSummary()))
        count = 640
        before = await _lsn(sql)
        for n in range(count):
            patch = b'{"key %d": "changed %d"}' % (n % 200, n)
            await engine.append_frame(handle, NewFrame(payload=patch, mode=DurableSummary()))
        return (await _lsn(sql) - before) / count

    async def _rewrites(self, sql: asyncpg.Connection[Any]) -> float:
        await sql.execute("create table raw_document (id integer primary key, document jsonb not null)")
        await sql.execute(
            "insert into raw_document select 1, jsonb_object_agg('key ' || n, md5(n::text) || md5((n * 7)::text) || n)"
            " from generate_series(1, 280) n"
        )
        count = 640
        before = await _lsn(sql)
        for n in range(count):
            await sql.execute(
                "update raw_document set document = document || jsonb_build_object('key ' || $1::int, 'changed')"
                " where id = 1",
                n % 200,
            )
        return (await _lsn(sql) - before) / count


async def _lsn(sql: asyncpg.Connection[Any]) -> float:
    return float(await sql.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


def waiting_tails(count: int) -> Callable[[str], contextlib.AbstractAsyncContextManager[None]]:
    """This many tails of one process that wait. Of executions that do not exist: a drain waits for those that do."""

    @contextlib.asynccontextmanager
    async def beside(dsn: str) -> AsyncIterator[None]:
        async with await ff.Engine.connect(dsn, max_size=4) as engine:
            waits = [
                asyncio.create_task(engine.tails.wait(Waiter(ff.ExecutionId(one), 0, START, 50, True, _never), None))
                for one in (mint_uuid() for _ in range(count))
            ]
            try:
                yield
                if engine.tails.count != count:
                    raise RuntimeError(f"{engine.tails.count} of {count} tails wait")
            finally:
                for wait in waits:
                    wait.cancel()

    return beside


def _never(_: StreamPage) -> bool:
    return False


@dataclass(frozen=True)
class Tail:
    """From an append to the item at a reader with connections of its own, and the same with a bare notification."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("stream.tail", "raw.tail")

    async def run(self) -> Sample:
        async with _held(self.server, "stream.tail", 1) as (engine, handles, dsn):
            with Stolen() as stolen:
                ours = await self._ours(engine, handles[0], dsn)
                raw = await self._raw(dsn)
        return Sample({"stream.tail": ours, "raw.tail": raw}, stolen.share)

    async def _ours(self, engine: ff.Engine, handle: Handle, dsn: str) -> float:
        app = ff.App(dsn, name="bench reader")
        took: list[float] = []
        arrived = asyncio.Event()
        run: ff.Run[Any] = (await app.client()).run(handle.execution_id)

        async def follow() -> None:
            async for item in run.stream():
                if isinstance(item, ff.Frame):
                    took.append((time.perf_counter() - float(item.text)) * 1000)
                    arrived.set()

        reader = asyncio.create_task(follow())
        try:
            for _ in range(self.sizes.waits):
                await asyncio.sleep(0.02)
                arrived.clear()
                await engine.append_frame(handle, NewFrame(payload=repr(time.perf_counter()).encode()))
                await asyncio.wait_for(arrived.wait(), 10)
        finally:
            reader.cancel()
            await app.close()
        return statistics.median(took[len(took) // 10 :])

    async def _raw(self, dsn: str) -> float:
        writer, listener, reader = [await asyncpg.connect(dsn) for _ in range(3)]
        took: list[float] = []
        told = asyncio.Event()
        try:
            await writer.execute(
                "create table raw_tail (n bigint generated always as identity primary key, payload bytea)"
            )
            await listener.add_listener("raw_tail", lambda *_: told.set())
            insert = "with made as (insert into raw_tail (payload) values ($1)) select pg_notify('raw_tail', '')"
            last = 0
            for _ in range(self.sizes.waits):
                await asyncio.sleep(0.02)
                told.clear()
                begun = time.perf_counter()
                await writer.execute(insert, _PAYLOAD)
                await asyncio.wait_for(told.wait(), 10)
                found = await reader.fetch("select n, payload from raw_tail where n > $1 order by n limit 256", last)
                took.append((time.perf_counter() - begun) * 1000)
                last = found[-1]["n"]
        finally:
            for connection in (writer, listener, reader):
                await connection.close()
        return statistics.median(took[len(took) // 10 :])
