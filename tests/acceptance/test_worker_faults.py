"""Worker processes are stopped, killed, starved of their database; their ledgers and the database tell what came of it.

Nothing is simulated but the network: real processes, a real server with fsync on, real signals, and a proxy that hangs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import embedded
from flowfabric.engine.service import migrate_database
from tests.support import in_database

SCRIPT = Path(__file__).with_name("worker_app.py")
PATIENCE = 60.0
SOCKET = ".s.PGSQL.5432"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("worker faults")]


async def until(condition: Callable[[], Any], words: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, words()
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server of our own, with everything that protects data switched on; it will be stopped hard."""
    place = tmp_path_factory.mktemp("worker-faults") / "data"
    running = embedded.start(place, settings={"shared_buffers": "64MB"})
    yield place
    running.release()


@pytest.fixture
async def dsn(data_dir: Path) -> AsyncIterator[str]:
    """A migrated database on that server."""
    running = await asyncio.to_thread(embedded.start, data_dir)
    name = f"ff_{os.getpid()}_{time.monotonic_ns()}"
    admin = await asyncpg.connect(running.dsn)
    await admin.execute(f"create database {name}")
    await admin.close()
    await migrate_database(in_database(running.dsn, name))
    yield in_database(running.dsn, name)
    running.release()


class Process:
    """A worker in a process of its own."""

    def __init__(self, folder: Path, number: int, options: dict[str, Any], env: dict[str, str]) -> None:
        self._errors = folder / f"worker-{number}.err"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), json.dumps(options)], stderr=errors, env={**os.environ, **env}
            )

    @property
    def words(self) -> str:
        return self._errors.read_text()

    async def said(self, text: str) -> None:
        await until(lambda: text in self.words or self.process.poll() is not None, lambda: self.words)
        assert text in self.words, self.words

    async def ready(self) -> None:
        await self.said("slots, lanes")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self, seconds: float = PATIENCE) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)

    async def stop(self) -> None:
        """Stop it as an operator would; it must end well."""
        self.signal(signal.SIGTERM)
        assert await self.ended() == 0, self.words


class Site:
    """An app, its database, and the worker processes on it."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.ledger_file = folder / "ledger.jsonl"
        self.processes: list[Process] = []
        self.app = ff.App(dsn, name="faults-client")
        for name in ("job", "plain", "stepped", "blocks", "endless", "ignores", "hides", "poison"):
            self.app.task(name=name)(_any_task(name))

    def hire(self, dsn: str | None = None, env: dict[str, str] | None = None, **options: Any) -> Process:
        variables = {"DSN": dsn or self.dsn, "LEDGER": str(self.ledger_file), **(env or {})}
        process = Process(self.folder, len(self.processes), options, variables)
        self.processes.append(process)
        return process

    async def submit(self, task: str, *args: Any, **options: Any) -> ff.Run[Any]:
        return await (await self.app.client()).submit(task, *args, **options)

    def ledger(self, what: str | None = None) -> list[dict[str, Any]]:
        if not self.ledger_file.exists():
            return []
        lines = [json.loads(line) for line in self.ledger_file.read_text().split("\n")[:-1]]
        return [line for line in lines if what is None or line["what"] == what]

    async def begun(self, count: int) -> None:
        await until(lambda: len(self.ledger("begun")) >= count, self.words)

    def words(self) -> str:
        return "\n".join(process.words[-3000:] for process in self.processes)

    async def audit(self) -> None:
        assert await (await self.app.client()).engine.audit(events=True) == []

    async def close(self) -> None:
        for process in self.processes:
            if process.process.poll() is None:
                process.process.kill()
            process.process.wait()
        await self.app.close()


def _any_task(name: str) -> Callable[..., Awaitable[Any]]:
    """Enough of a task to be submitted by name, as a program without the handlers' code would have it."""
    match name:
        case "job" | "plain" | "blocks":

            async def task(seconds: float = 0) -> Any: ...

        case "stepped":

            async def task(fails: bool) -> Any: ...  # type: ignore[misc]

        case _:

            async def task() -> Any: ...  # type: ignore[misc]

    task.__qualname__ = name
    return task


@pytest.fixture
async def site(dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(dsn, tmp_path)
    yield site
    await site.close()


# Stopping


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_a_worker_that_is_told_to_stop_finishes_what_it_can_and_gives_the_rest_back(
    site: Site, loop: str
) -> None:
    # Nothing comes back by a lapsed lease here: it would take longer than the test.
    first = site.hire(env={"LOOP": loop}, grace=1, lease_ttl=600, concurrency=3)
    await first.ready()
    short, long, thread = [await site.submit(*call) for call in (("job", 0.5), ("job", 3600), ("plain", 3600))]
    await site.begun(3)
    first.signal(signal.SIGTERM)
    await first.said("stops: 3 running")
    late = await site.submit("job", 0)
    assert await first.ended() == 0, first.words
    assert [line["execution"] for line in site.ledger("ended")] == [short.id]
    assert {str(await run.state()) for run in (long, thread, late)} == {"waiting"}

    second = site.hire(grace=0.1, lease_ttl=600)
    assert await short.result(PATIENCE) == 0
    assert await long.result(PATIENCE) == 0  # the same attempt, resumed
    assert await late.result(PATIENCE) == 0
    await second.stop()
    for run in (long, thread):
        assert [attempt.attempt_index for attempt in await run.attempts()] == [0]
    await site.audit()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(("task", "number"), [("job", signal.SIGINT), ("blocks", signal.SIGTERM)])
async def test_a_second_signal_ends_the_process_at_once_whatever_it_does(
    site: Site, task: str, number: signal.Signals, loop: str
) -> None:
    worker = site.hire(env={"LOOP": loop}, grace=3600)
    await worker.ready()
    await site.submit(task, 3600)
    await site.begun(1)
    worker.signal(signal.SIGTERM)
    if task == "job":
        await worker.said("stops: 1 running")
    else:
        await asyncio.sleep(0.2)  # it can say nothing; two signals at once would count as one
    assert worker.process.poll() is None
    worker.signal(number)
    assert await worker.ended() == 128 + number
    assert "ends at once" in worker.words


@pytest.mark.parametrize("task", ["plain", "ignores", "hides", "endless"])
async def test_a_handler_that_does_not_listen_does_not_keep_the_process(site: Site, task: str) -> None:
    worker = site.hire(grace=0.2, lease_ttl=600)
    await worker.ready()
    run = await site.submit(task, *([3600] if task == "plain" else []))
    await site.begun(1)
    await worker.stop()
    assert await run.state() is ff.State.WAITING
    await site.audit()


# Losing the database


class Proxy:
    """Stands between workers and the server: forwards, hangs without closing, or is gone."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Gone: who is connected is cut off, who comes is refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def hang(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flows.clear()

    def flow(self) -> None:
        """What was held back passes."""
        self._flows.set()

    def flow_anew(self) -> None:
        """Who comes now is served; who was there before is never answered."""
        self._flows = asyncio.Event()
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        flows = self._flows
        writers = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                await flows.wait()
                behind_reader, behind_writer = await asyncio.open_unix_connection(self._upstream)
                writers.append(behind_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._copy(reader, behind_writer, flows))
                    both.create_task(self._copy(behind_reader, writer, flows))
            finally:
                for one in writers:
                    one.transport.abort()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await flows.wait()
                writer.write(data)
        await flows.wait()
        writer.close()


@contextlib.asynccontextmanager
async def proxies(dsn: str, count: int = 1) -> AsyncIterator[tuple[str, list[Proxy]]]:
    """A DSN that leads through as many proxies as alternatives."""
    parts = urlsplit(dsn)
    (host,) = parse_qs(parts.query)["host"]
    made = [Proxy(f"{host}/{SOCKET}") for _ in range(count)]
    for proxy in made:
        await proxy.open()
    hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in made)
    try:
        yield urlunsplit(parts._replace(netloc=f"{parts.username}@{hosts}", query="")), made
    finally:
        for proxy in made:
            await proxy.close()


@pytest.mark.parametrize("way", ["gone", "hangs"])
async def test_a_worker_stops_in_time_also_without_its_database(site: Site, way: str) -> None:
    async with proxies(site.dsn) as (dsn, (proxy,)):
        worker = site.hire(dsn=dsn, grace=0.5, lease_ttl=1)
        await worker.ready()
        runs = [await site.submit("job", seconds) for seconds in (0.3, 3600)]
        await site.begun(2)
        if way == "gone":
            await proxy.close()
        else:
            proxy.hang()
        await until(lambda: site.ledger("ended"))
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0, worker.words
        assert "could not be given back" in worker.words
        assert "the database did not take the last results" in worker.words
    second = site.hire()
    assert await runs[0].result(PATIENCE) == 1  # again, by another worker, when the lease had lapsed
    await second.stop()


def restart(data_dir: Path) -> None:
    """Stop the server as `pg_ctl stop -m immediate` does, and start it again."""
    postmaster = int((data_dir / "pgdata" / "postmaster.pid").read_text().split("\n")[0])
    os.kill(postmaster, signal.SIGQUIT)
    deadline = time.monotonic() + PATIENCE
    while (data_dir / "pgdata" / "postmaster.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    embedded.start(data_dir).release()


async def test_a_restart_of_the_server_costs_neither_a_busy_nor_an_idle_worker_anything(
    site: Site, data_dir: Path
) -> None:
    # Polling helps nobody here: it would take longer than the test.
    worker = site.hire(poll=600)
    await worker.ready()
    busy = [await site.submit(task, 4) for task in ("job", "plain")]
    await site.begun(2)
    await asyncio.to_thread(restart, data_dir)
    assert [await run.result(PATIENCE) for run in busy] == [0, 0]
    await asyncio.to_thread(restart, data_dir)
    for _ in range(3):
        idle = await site.submit("job")
        assert await idle.result(PATIENCE) == 0
    assert len(site.ledger("begun")) == 5
    assert worker.process.poll() is None
    await worker.stop()
    await site.audit()


async def test_a_worker_whose_backends_are_terminated_again_and_again_goes_on(site: Site) -> None:
    workers = [site.hire(concurrency=10, env={"LOOP": loop}) for loop in ("uvloop", "asyncio")]
    for worker in workers:
        await worker.ready()
    runs = [await site.submit("stepped", number % 3 == 0) for number in range(60)]
    admin = await asyncpg.connect(site.dsn)
    ended = 0
    try:
        while len(site.ledger("step 2")) < 50:
            ended += await admin.fetchval(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and application_name = 'flowfabric'"
            )
            await asyncio.sleep(0.1)
    finally:
        await admin.close()
    assert ended > 10
    for run in runs:
        assert await run.result(PATIENCE) == [0, 1, 2, 0]
    for worker in workers:
        assert worker.process.poll() is None
        await worker.stop()
    await site.audit()


@pytest.mark.parametrize("way", ["gone", "hangs"])
async def test_a_worker_finds_the_server_at_its_other_address(site: Site, way: str) -> None:
    async with proxies(site.dsn, 2) as (dsn, (first, second)):
        await second.close()
        worker = site.hire(dsn=dsn, concurrency=4, lease_ttl=60, env={"PATIENCE": "1"})
        await worker.ready()
        busy = await site.submit("job", 3)
        await site.begun(1)
        if way == "gone":
            await first.close()
        else:
            first.hang()
        await second.open()
        assert await busy.result(PATIENCE) == 0
        assert await (await site.submit("job")).result(PATIENCE) == 0
        await worker.stop()


async def test_a_worker_whose_server_became_a_standby_waits_for_the_new_one(site: Site) -> None:
    worker = site.hire()
    await worker.ready()
    busy = await site.submit("job", 1)
    await site.begun(1)
    admin = await asyncpg.connect(site.dsn)
    name = await admin.fetchval("select current_database()")

    async def new_sessions_are(setting: str) -> None:
        await admin.execute(f"alter database {name} set default_transaction_read_only = {setting}")

    await new_sessions_are("on")
    await admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid() and application_name = 'flowfabric'"
    )
    await worker.said("read-only transaction")
    await until(lambda: site.ledger("ended"))
    await admin.execute("set default_transaction_read_only = off")
    await new_sessions_are("off")
    assert await busy.result(PATIENCE) == 0
    await admin.close()
    await worker.stop()
