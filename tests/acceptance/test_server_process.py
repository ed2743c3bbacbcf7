"""`flowfabric server` as real processes: signals, kills, a database that restarts, replicas behind a network that cuts.

Clients submit with idempotency keys and try again whatever fails, a worker runs what they submit, and followers read
what ends as server-sent events. At the end every submission that was acknowledged is stored under the id that its
client was told, every key exactly once, and nothing else; every execution ran once in each of its attempts, and every
follower saw every end once, in the order of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import pytest

import flowfabric as ff
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from flowfabric.values.state import State
from tests import sampling
from tests.proxy import Proxy
from tests.server.following import parse

PATIENCE = 60.0
OPEN = [state for state in State if not state.is_terminal]
SERVING = re.compile(r"serving (http://\S+), process (\d+)")
pytestmark = [pytest.mark.xdist_group("server process")]


async def until(condition: Callable[[], Any], words: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, words()
        await asyncio.sleep(0.02)


class Server:
    """A server as a process, or several."""

    def __init__(self, folder: Path, number: int, dsn: str, *options: str, **environment: str) -> None:
        self._output = folder / f"server-{number}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLOWFABRIC_")}
        arguments = ["--listen=127.0.0.1:0", "--auth=none", "--no-duties", *options]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flowfabric.cli", "server", *arguments],
                cwd=folder,
                env={**inherited, "FLOWFABRIC_DSN": dsn, "NO_COLOR": "1", **environment},
                stdout=output,
                stderr=output,
            )

    @property
    def words(self) -> str:
        return self._output.read_text()

    @property
    def serving(self) -> list[tuple[str, int]]:
        """The address and the number of every process that has begun to serve."""
        return [(url, int(pid)) for url, pid in SERVING.findall(self.words)]

    async def ready(self, processes: int = 1) -> str:
        """Wait for so many processes; returns the address."""
        await until(lambda: len(self.serving) >= processes or self.process.poll() is not None, lambda: self.words)
        assert self.process.poll() is None, self.words
        return self.serving[0][0]

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE)

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert await self.ended() == 0, self.words


class Ledger:
    """Clients that submit, and what they were told."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}
        self.keys: list[str] = []
        self.failures = 0
        self.statuses: set[int] = set()

    async def submit(self, urls: Callable[[], str], *, over: Callable[[], bool]) -> None:
        """Submit one after the other until it is over; each until it is acknowledged."""
        client = httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=4))
        async with client:
            while not over():
                key = f"key-{len(self.keys)}"
                self.keys.append(key)
                await self._one(client, urls, key)

    async def _one(self, client: httpx.AsyncClient, urls: Callable[[], str], key: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, f"{key} was never acknowledged; {sorted(self.statuses)}"
            try:
                answer = await client.post(
                    f"{urls()}/v1/executions", json={"execution_kind": "job"}, headers={"Idempotency-Key": key}
                )
            except httpx.HTTPError:
                self.failures += 1
                await asyncio.sleep(0.01)
                continue
            self.statuses.add(answer.status_code)
            if answer.status_code in (200, 201):
                self.told[key] = answer.json()["execution_id"]
                return
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.status_code == 503, answer.text  # the database is away, or the server stops
            self.failures += 1
            await asyncio.sleep(0.01)

    async def check(self, dsn: str) -> None:
        """Compare with the database."""
        async with await ff.Engine.connect(dsn) as engine:
            stored: set[str] = set()
            cursor: Any = None
            while True:
                page = await engine.find_executions(limit=1000, cursor=cursor)
                stored |= {str(one.execution_id) for one in page.items}
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert len(self.told) == len(self.keys)
            assert set(self.told.values()) == stored
            assert len(stored) == len(self.keys)
            assert await engine.audit(events=True) == []


class Follower:
    """A client of server-sent events that continues with its last id, wherever it is led, when it loses a server."""

    def __init__(self, urls: Callable[[], str]) -> None:
        self._urls = urls
        self.last_id: str | None = None
        self.seen: list[str] = []
        self.losses = 0

    async def run(self) -> None:
        while True:
            headers = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
            try:
                async with (
                    httpx.AsyncClient(timeout=PATIENCE) as client,
                    client.stream("GET", f"{self._urls()}/v1/events?family=completion", headers=headers) as answer,
                ):
                    assert answer.status_code in (200, 503), answer.status_code
                    text = ""
                    async for piece in answer.aiter_text():
                        text += piece if answer.status_code == 200 else ""
                        while "\n\n" in text:
                            block, _, text = text.partition("\n\n")
                            self._take(block)
            except httpx.HTTPError:
                pass
            self.losses += 1
            await asyncio.sleep(0.01)

    def _take(self, block: str) -> None:
        event = parse(block)
        assert event.name != "reset"
        if event.data is not None and event.name is None:
            self.seen.append(event.json["execution_id"])
        if event.id is not None:
            self.last_id = event.id


@contextlib.asynccontextmanager
async def watched(dsn: str, urls: Callable[[], str], count: int = 3) -> AsyncIterator[None]:
    """A worker for what is submitted, and followers of the servers; at the end everything ran, and was seen, once."""
    app = ff.App(dsn=dsn)
    ran: list[tuple[str, int]] = []

    @app.task
    async def job(context: ff.Context) -> None:
        ran.append((str(context.execution_id), context.attempt_index))

    followers = [Follower(urls) for _ in range(count)]
    following = [asyncio.create_task(one.run()) for one in followers]
    ended: list[str] = []

    def all_follow(least: Callable[[Follower], Any]) -> bool:
        for task in following:
            if task.done():
                task.result()
        return all(least(one) for one in followers)

    try:
        await until(lambda: all_follow(lambda one: one.last_id))
        async with app, ff.Worker(app):
            yield
            engine = (await app.client()).engine
            deadline = time.monotonic() + PATIENCE
            while (await engine.find_executions(kinds=["job"], states=OPEN, limit=1)).items:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            cursor = None
            while (page := await engine.read_events(family="completion", after=cursor, limit=1000)).items:
                ended += [str(one.execution_id) for one in page.items]
                cursor = page.next_cursor
            await until(
                lambda: all_follow(lambda one: len(one.seen) >= len(ended)),
                lambda: f"of {len(ended)} ends followers saw {[len(one.seen) for one in followers]}",
            )
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    assert len(set(ran)) == len(ran)  # again only in another attempt: after a lost lease
    assert sorted(ended) == sorted({execution_id for execution_id, _ in ran})
    for one in followers:
        assert one.seen == ended


class Site:
    """A database, and the servers in front of it."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.servers: list[Server] = []

    def start(self, *options: str, dsn: str | None = None, **environment: str) -> Server:
        server = Server(self.folder, len(self.servers), dsn or self.dsn, *options, **environment)
        self.servers.append(server)
        return server

    def close(self) -> None:
        for server in self.servers:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()


@pytest.fixture
def site(database: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(database, tmp_path)
    yield site
    site.close()


@contextlib.asynccontextmanager
async def load(ledger: Ledger, urls: Callable[[], str], clients: int = 6) -> AsyncIterator[None]:
    """Clients that submit while the block runs."""
    is_over = False
    tasks = [asyncio.create_task(ledger.submit(urls, over=lambda: is_over)) for _ in range(clients)]
    try:
        yield
        is_over = True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stopping_server_answers_what_waits_finishes_what_runs_and_exits_with_0(site: Site) -> None:
    first, second = site.start("--grace=20s"), site.start()
    addresses = [await first.ready(), await second.ready()]
    ledger = Ledger()
    async with httpx.AsyncClient(base_url=addresses[0], timeout=PATIENCE) as client:
        made = await client.post("/v1/executions", json={"execution_kind": "waits"}, headers={"Idempotency-Key": "w"})
        ledger.keys.append("w")
        ledger.told["w"] = made.json()["execution_id"]
        polls = [
            asyncio.create_task(client.get(f"/v1/executions/{ledger.told['w']}/outcome?wait=50")) for _ in range(20)
        ]
        followers = [asyncio.create_task(_follow(addresses[0])) for _ in range(10)]
        # A request whose body is still on its way.
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(addresses[0]).port)
        body = b'{"execution_kind": "late"}'
        writer.write(
            b"POST /v1/executions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Idempotency-Key: late\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body[:5])
        )
        turn = iter(range(1_000_000))

        def urls() -> str:
            return addresses[next(turn) % len(addresses)]

        async with watched(site.dsn, urls), load(ledger, urls):
            await until(lambda: len(ledger.told) > 30)
            await _in_flight(addresses[0], 32)  # polls, followers, the late one and the one that asks
            assert re.search(r"flowfabric_sse_clients 1\d\.0", (await client.get("/metrics")).text)
            del addresses[0]
            first.process.send_signal(signal.SIGTERM)
            stopping = time.monotonic()
            for told in await asyncio.gather(*followers):
                assert "event: bye" in told[-200:]
            for poll in await asyncio.gather(*polls):
                assert (poll.status_code, poll.json()["is_ended"]) == (200, False), poll.text  # answered, not cut off
            await until(lambda: "the server stops" in first.words)
            with pytest.raises(OSError):  # the door is closed
                while time.monotonic() < stopping + PATIENCE:
                    _, other = await asyncio.open_connection("127.0.0.1", urlsplit(first.serving[0][0]).port)
                    other.close()
                    await asyncio.sleep(0.02)
            assert first.process.poll() is None  # the request that came before has the grace
            writer.write(body[5:])
            async with asyncio.timeout(PATIENCE):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 201")
            assert b"connection: close" in answer
            ledger.keys.append("late")
            ledger.told["late"] = json.loads(answer.partition(b"\r\n\r\n")[2])["execution_id"]
            writer.close()
            assert await first.ended() == 0, first.words
    await second.stop()
    await ledger.check(site.dsn)
    for server in site.servers:
        assert "Traceback" not in server.words


async def _in_flight(url: str, least: int) -> None:
    """Wait until the server answers so many requests, the one that asks for it among them."""
    async with asyncio.timeout(PATIENCE), httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        while True:
            found = re.search(r"flowfabric_http_in_flight (\d+)", (await client.get("/metrics")).text)
            if found is not None and int(found[1]) >= least:
                return
            await asyncio.sleep(0.02)


async def _follow(url: str) -> str:
    """Everything that a client of server-sent events is told until the server ends the answer."""
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("GET", f"{url}/v1/events?family=completion") as answer,
    ):
        assert answer.status_code == 200
        return "".join([piece async for piece in answer.aiter_text()])


async def test_a_second_signal_exits_at_once(site: Site) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        server = site.start("--grace=60s", "--json")
        url = urlsplit(await server.ready())
        _, writer = await asyncio.open_connection("127.0.0.1", url.port)
        writer.write(b"POST /v1/executions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        await _in_flight(url.geturl(), 2)
        server.process.send_signal(number)
        await until(lambda server=server: "the server stops" in server.words)  # type: ignore[misc]
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert await server.ended() == 128 + number
        writer.close()
        lines = [json.loads(line) for line in server.words.splitlines()]
        access = [one for one in lines if one.get("route") == "/metrics"]
        assert access
        for one in access:
            assert (one["method"], one["status"], one["key_id"], one["address"]) == ("GET", 200, None, "127.0.0.1")
            assert one["request_id"] and one["seconds"] > 0


async def test_requests_that_do_not_finish_within_the_grace_are_cut_off(site: Site) -> None:
    # The standard variables of OpenTelemetry say where its spans go.
    server = site.start("--grace=0.2s", OTEL_TRACES_EXPORTER="console")
    url = urlsplit(await server.ready())
    reader, writer = await asyncio.open_connection("127.0.0.1", url.port)
    writer.write(b"POST /v1/executions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await _in_flight(url.geturl(), 2)
    await server.stop()
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "draining"
    assert "Traceback" not in server.words
    writer.close()
    assert '"name": "GET /metrics"' in server.words
    assert '"service.name": "flowfabric-server"' in server.words


async def test_one_of_two_processes_is_killed_and_nothing_is_lost(site: Site) -> None:
    server = site.start("--processes=2")
    url = await server.ready(processes=2)
    ledger = Ledger()
    async with watched(site.dsn, lambda: url), load(ledger, lambda: url):
        for round_ in range(1, sampling.examples(6, 2) + 1):
            told = len(ledger.told)
            await until(lambda told=told: len(ledger.told) > told + 30)  # type: ignore[misc]
            os.kill(server.serving[-1][1], signal.SIGKILL)
            await server.ready(processes=2 + round_)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        counts = []
        for _ in range(6):  # whichever process answers: it answers for all, the killed one too
            text = (await client.get("/metrics", headers={"Connection": "close"})).text
            found = re.findall(
                r'^flowfabric_http_requests_total{.*path="/v1/executions",status="201"} (\d+)', text, re.M
            )
            counts.append(sum(map(int, found)))
    assert counts == [counts[0]] * 6
    assert counts[0] >= len(ledger.told) - ledger.failures
    pids = [pid for _, pid in server.serving]
    await server.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    await ledger.check(site.dsn)


async def test_processes_end_when_the_one_that_started_them_is_killed(site: Site) -> None:
    server = site.start("--processes=2")
    await server.ready(processes=2)
    server.process.kill()
    await server.ended()
    await until(lambda: server.words.count("the server has stopped") == 2, lambda: server.words)


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[tuple[Site, Path]]:
    """A site with a database server of its own, which can be restarted."""
    place = tmp_path / "data"
    running = embedded.start(place, settings={"shared_buffers": "64MB"})
    with ThreadPoolExecutor(1) as thread:  # because the tests have an event loop
        thread.submit(asyncio.run, migrate_database(running.dsn)).result()
    site = Site(running.dsn, tmp_path)
    yield site, place
    site.close()
    running.release()


async def test_a_restart_of_the_database_loses_nothing(own_site: tuple[Site, Path]) -> None:
    site, data_dir = own_site
    server = site.start()
    url = await server.ready()
    ledger = Ledger()
    async with (
        watched(site.dsn, lambda: url),
        load(ledger, lambda: url),
        httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
    ):
        for _ in range(sampling.examples(4, 1)):
            told = len(ledger.told)
            await until(lambda told=told: len(ledger.told) > told + 30)  # type: ignore[misc]
            await asyncio.to_thread(restart, data_dir)
            while (await client.get("/readyz")).status_code != 200:
                assert (await client.get("/livez")).status_code == 200
                await asyncio.sleep(0.02)
    await server.stop()
    await ledger.check(site.dsn)


def restart(data_dir: Path) -> None:
    """Stop the database server as `pg_ctl stop -m immediate` does, and start it again."""
    postmaster = int((data_dir / "pgdata" / "postmaster.pid").read_text().split("\n")[0])
    os.kill(postmaster, signal.SIGQUIT)
    deadline = time.monotonic() + PATIENCE
    while (data_dir / "pgdata" / "postmaster.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    embedded.start(data_dir).release()


class Balancer(Proxy):
    """Leads connections to one of several servers, and cuts them all off."""

    def __init__(self, ports: list[int]) -> None:
        super().__init__("")
        self._ports = ports

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", random.choice(self._ports))


async def test_replicas_behind_a_network_that_cuts_lose_nothing(site: Site) -> None:
    replicas = [site.start(), site.start()]
    ports = [urlsplit(await one.ready()).port for one in replicas]
    balancer = Balancer([port for port in ports if port is not None])
    await balancer.open()
    ledger = Ledger()

    def url() -> str:
        return f"http://127.0.0.1:{balancer.port}"

    try:
        async with watched(site.dsn, url), load(ledger, url):
            for _ in range(sampling.examples(20, 4)):
                told = len(ledger.told)
                await until(lambda told=told: len(ledger.told) > told + 10)  # type: ignore[misc]
                await balancer.close()
                await balancer.open()
    finally:
        await balancer.close()
    assert ledger.failures
    for one in replicas:
        await one.stop()
    await ledger.check(site.dsn)


REFUSED: list[tuple[list[str], str]] = [
    (["--listen=0.0.0.0:0"], "--auth none"),
    (["--listen=192.0.2.1:80", "--auth=keys"], "--listen"),
]


async def test_a_server_that_cannot_start_says_why_in_one_line(site: Site) -> None:
    started = [(site.start(*options), word) for options, word in REFUSED]
    for server, word in started:
        assert await server.ended() == 2
        (line,) = server.words.strip().split("\n")
        assert line.startswith("flowfabric: ")
        assert word in line
    away = site.start("--processes=2", dsn="postgresql://127.0.0.1:1/nothing")
    assert await away.ended() != 0
    assert "Traceback" not in away.words


async def test_a_public_address_needs_a_key_and_a_user_who_is_not_the_owner(
    site: Site, sql: asyncpg.Connection[Any]
) -> None:
    public = ["--listen=0.0.0.0:0", "--auth=keys"]
    without_key = site.start(*public)
    assert await without_key.ended() == 2
    assert "flowfabric api-keys create" in without_key.words
    async with await ff.Engine.connect(site.dsn) as engine:
        key = str((await engine.create_api_key("monitor", ["read"])).key.reveal())
    as_owner = site.start(*public)
    assert await as_owner.ended() == 2
    assert "--operate-role" in as_owner.words
    await sql.execute("drop role if exists ff_http; create role ff_http login")
    await migrate_database(site.dsn, operate_roles=["ff_http"])
    parts = urlsplit(site.dsn)
    server = site.start(*public, dsn=urlunsplit(parts._replace(netloc="ff_http@")))
    url = (await server.ready()).replace("0.0.0.0", "127.0.0.1")
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/v1/executions")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        client.headers["Authorization"] = f"Bearer {key}"
        assert (await client.get("/v1/executions")).status_code == 200
        assert "flowfabric_database_up 1.0" in (await client.get("/metrics")).text
    await server.stop()
    assert key not in server.words
    await sql.execute("drop owned by ff_http; drop role ff_http")
