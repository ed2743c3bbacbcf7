"""The HTTP server beside Starlette routes on a bare table: submissions, reads, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

import flowfabric as ff
from benchmarks import http_floor
from benchmarks.harness import Sample, Sizes
from benchmarks.http_client import Follower, ask_all, follow
from benchmarks.jobs import payload
from benchmarks.product import NewExecution, migrate_database, mint_uuid
from benchmarks.server import Server
from benchmarks.stolen import Stolen

CONNECTIONS = 10  # to the database, of every server
FOLLOWERS = 1_000
_BATCH = 500
_IDLE = 0.5  # seconds between two events: followers sleep by then
_WRITE = """
insert into flowfabric.event (slot, occurred_at, partition, id, namespace, outcome)
values (flowfabric.open_log(now()), now(), 1, gen_random_uuid(), '', 'success')
"""


@dataclass
class Served:
    """A server process: its port, and the header that its requests need."""

    port: int
    process: asyncio.subprocess.Process
    header: str = ""

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: bench"]
        if self.header:
            lines.append(self.header)
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    @property
    def kib(self) -> float:
        """Its resident memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return float(line.split()[1])
        raise RuntimeError("the system does not tell")


@contextlib.asynccontextmanager
async def _serving(*arguments: str) -> AsyncIterator[Served]:
    """Start a server, and stop it at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    said = b""
    reading: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(60):
            while b"serving http://127.0.0.1:" not in said:
                if not (said := await process.stdout.readline()):
                    raise RuntimeError(f"{arguments[0]} did not start")
        reading = asyncio.ensure_future(process.stdout.read())
        yield Served(int(said.partition(b"127.0.0.1:")[2].split(b",")[0].split()[0]), process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading


@contextlib.asynccontextmanager
async def ours(server: Server, name: str) -> AsyncIterator[tuple[Served, str]]:
    """`flowfabric server` with its defaults and API keys, in a database of its own."""
    dsn = await server.create_database(name)
    await migrate_database(dsn)
    async with await ff.Engine.connect(dsn) as engine:
        key = (await engine.create_api_key("bench", ["admin"])).key.reveal()
    try:
        async with _serving(
            "flowfabric.cli", "server", "--dsn", dsn, "--listen", "127.0.0.1:0", "--connections", str(CONNECTIONS),
            "--no-access-log",
        ) as served:  # fmt: skip
            served.header = f"authorization: Bearer {key}"
            yield served, dsn
    finally:
        await server.drop_database(name)


@contextlib.asynccontextmanager
async def floor(server: Server, name: str, event: bytes = b"") -> AsyncIterator[tuple[Served, str]]:
    """The bare routes, in a database of their own."""
    dsn = await server.create_database(name)
    connection = await asyncpg.connect(dsn)
    await connection.execute(http_floor.TABLE)
    await connection.close()
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(event)
            file.flush()
            async with _serving("benchmarks.http_floor", dsn, str(CONNECTIONS), file.name) as served:
                yield served, dsn
    finally:
        await server.drop_database(name)


def _submissions(served: Served, path: str, count: int, sizes: Sizes) -> list[bytes]:
    data = payload(sizes.payload_bytes).hex()[: sizes.payload_bytes]
    return [served.request("POST", path, _encode({"execution_kind": "noop", "arguments": {"data": data}}))] * count


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Submit:
    """Submissions a second of this many keep-alive clients."""

    server: Server
    sizes: Sizes
    clients: int
    is_ours: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"{'http' if self.is_ours else 'floor.http'}.submit{self.clients}",)

    async def run(self) -> Sample:
        count = self.sizes.jobs // 2
        path, table = ("/v1/executions", "flowfabric.execution") if self.is_ours else ("/jobs", "job")
        begin = ours if self.is_ours else floor
        async with begin(self.server, "bench_http_submit") as (served, dsn):
            requests = _submissions(served, path, count, self.sizes)
            await ask_all(served.port, requests[:500], self.clients)
            await self.server.settle()
            with Stolen() as stolen:
                seconds, _ = await ask_all(served.port, requests, self.clients)
            stored = await _value(dsn, f"select count(*) from {table}")
            if stored != count + len(requests[:500]):
                raise RuntimeError(f"{stored:,} of {count:,} submissions were stored")
        return Sample({self.series[0]: count / seconds}, stolen.share)


@dataclass(frozen=True)
class SubmitOne:
    """The median of one client that submits one after the other, in milliseconds."""

    server: Server
    sizes: Sizes
    is_ours: bool

    @property
    def series(self) -> Sequence[str]:
        return (f"{'http' if self.is_ours else 'floor.http'}.submit1",)

    async def run(self) -> Sample:
        begin, path = (ours, "/v1/executions") if self.is_ours else (floor, "/jobs")
        async with begin(self.server, "bench_http_submit1") as (served, _):
            requests = _submissions(served, path, self.sizes.single_calls, self.sizes)
            await ask_all(served.port, requests[:200], 1)
            await self.server.settle()
            with Stolen() as stolen:
                _, took = await ask_all(served.port, requests, 1)
        return Sample({self.series[0]: statistics.median(took) * 1000}, stolen.share)


@dataclass(frozen=True)
class SubmitMany:
    """Rows a second in batches of 500 on two connections: over HTTP, and through the engine."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("http.submit_many", "engine.http_submit_many")

    async def run(self) -> Sample:
        batches = max(self.sizes.jobs // _BATCH, 4)
        data = payload(self.sizes.payload_bytes).hex()[: self.sizes.payload_bytes]
        items = [{"execution_kind": "noop", "arguments": {"data": data}}] * _BATCH
        async with ours(self.server, "bench_http_many") as (served, dsn):
            requests = [served.request("POST", "/v1/executions/batch", _encode({"items": items}))] * batches
            await ask_all(served.port, requests[:4], 2)
            await self.server.settle()
            with Stolen() as stolen:
                seconds, _ = await ask_all(served.port, requests, 2)
            over_http = batches * _BATCH / seconds
            await self.server.settle()
            async with await ff.Engine.connect(dsn, min_size=2, max_size=2) as engine:
                batch = [
                    NewExecution(execution_kind="noop", input_payload=_encode({"data": data})) for _ in range(_BATCH)
                ]

                async def create(count: int) -> None:
                    for _ in range(count):
                        await engine.create_many(batch)

                await asyncio.gather(create(2), create(2))
                begun = time.perf_counter()
                await asyncio.gather(create(batches // 2), create(batches - batches // 2))
                directly = batches * _BATCH / (time.perf_counter() - begun)
        return Sample({"http.submit_many": over_http, "engine.http_submit_many": directly}, stolen.share)


@dataclass(frozen=True)
class Get:
    """Records a second that 16 clients read by id."""

    server: Server
    sizes: Sizes
    is_ours: bool

    @property
    def series(self) -> Sequence[str]:
        return ("http.get" if self.is_ours else "floor.http.get",)

    async def run(self) -> Sample:
        count = self.sizes.jobs // 2
        data = payload(self.sizes.payload_bytes)
        begin = ours if self.is_ours else floor
        async with begin(self.server, "bench_http_get") as (served, dsn):
            if self.is_ours:
                async with await ff.Engine.connect(dsn) as engine:
                    made = await engine.create_many(
                        [NewExecution(execution_kind="noop", input_payload=data) for _ in range(1000)]
                    )
                paths = [f"/v1/executions/{one.execution_id}" for one in made]  # type: ignore[union-attr]
            else:
                ids = [mint_uuid() for _ in range(1000)]
                connection = await asyncpg.connect(dsn)
                await connection.execute(
                    "insert into job (id, kind, payload) select id, 'noop', $2 from unnest($1::uuid[]) id", ids, data
                )
                await connection.close()
                paths = [f"/jobs/{one}" for one in ids]
            requests = [served.request("GET", path) for path in paths]
            every = (requests * (count // len(requests) + 1))[:count]
            await ask_all(served.port, every[:500], 16)
            with Stolen() as stolen:
                seconds, _ = await ask_all(served.port, every, 16)
        return Sample({self.series[0]: count / seconds}, stolen.share)


@dataclass(frozen=True)
class Events:
    """1,000 clients of one process: from a commit to its receipt (p99), and memory for each client."""

    server: Server
    sizes: Sizes
    series: Sequence[str] = ("http.sse1000.p99", "http.sse1000.kib", "floor.sse1000.p99")

    async def run(self) -> Sample:
        rounds = max(min(self.sizes.waits // 10, 40), 8)
        with Stolen() as stolen:
            async with ours(self.server, "bench_http_events") as (served, dsn):
                request = served.request("GET", "/v1/events?family=completion")
                first = await follow(served.port, request, 20)
                await self._rounds(dsn, _WRITE, first, 3)
                before = served.kib
                clients = first + await follow(served.port, request, FOLLOWERS - len(first))
                p99 = await self._rounds(dsn, _WRITE, clients, rounds)
                kib = (served.kib - before) / (FOLLOWERS - len(first))
                event = clients[0].last_event
                _close(clients)
            async with floor(self.server, "bench_http_bare", event) as (served, dsn):
                clients = await follow(served.port, served.request("GET", "/events"), FOLLOWERS)
                notify = (
                    "with made as (insert into job (id, kind, payload) values (gen_random_uuid(), 'noop', ''))"
                    f" select pg_notify('{http_floor.CHANNEL}', '')"
                )
                bare = await self._rounds(dsn, notify, clients, rounds)
                if clients[0].last_event != event:
                    raise RuntimeError("the broadcast has other bytes")
                _close(clients)
        figures = {"http.sse1000.p99": p99, "http.sse1000.kib": kib, "floor.sse1000.p99": bare}
        return Sample(figures, stolen.share)

    async def _rounds(self, dsn: str, write: str, clients: Sequence[Follower], rounds: int) -> float:
        """Write events one after the other; returns the 99th percentile of all receipts, in milliseconds."""
        connection: asyncpg.Connection[Any] = await asyncpg.connect(dsn)
        statement = await connection.prepare(write)
        took: list[float] = []
        for number in range(rounds + 1):
            await asyncio.sleep(_IDLE)
            begun = time.perf_counter()
            await statement.fetch()
            async with asyncio.timeout(30):
                while any(not one.received_at for one in clients):
                    await asyncio.sleep(0.01)
            if number:  # the first wakes everything up
                took += [(one.received_at[0] - begun) * 1000 for one in clients]
            for one in clients:
                one.received_at.clear()
        await connection.close()
        return statistics.quantiles(took, n=100)[98]


def _close(clients: Sequence[Follower]) -> None:
    for one in clients:
        one.transport.abort()


async def _value(dsn: str, query: str) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()
