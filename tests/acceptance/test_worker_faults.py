"""Worker processes are stopped, killed, cut off from their database; the tests compare their ledgers with the database.

Nothing is simulated but the network: real processes, a real server with fsync on, real signals, and a proxy that hangs.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import database as database_module
from flowfabric._postgres import listen
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from flowfabric.values.attempt import Claimed
from flowfabric.values.stream import NewFrame
from flowfabric.worker import second_thread
from flowfabric.worker import worker as worker_module
from tests import sampling
from tests.acceptance import worker_app
from tests.pooler import pooled
from tests.proxy import proxies
from tests.support import in_database, started

SCRIPT = Path(__file__).with_name("worker_app.py")
PATIENCE = 60.0

pytestmark = [pytest.mark.xdist_group("worker faults")]


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
    asyncio.run(migrate_database(running.dsn))
    yield place
    running.release()


@pytest.fixture
async def dsn(data_dir: Path) -> AsyncIterator[str]:
    """A database of its own on that server."""
    running = await asyncio.to_thread(embedded.start, data_dir)
    name = f"ff_{time.monotonic_ns()}"
    admin = await asyncpg.connect(in_database(running.dsn, "template1"))
    await admin.execute(f"create database {name} template {urlsplit(running.dsn).path[1:]}")
    # The copy of a sequence is not safe from a crash before that: the numbers its original has logged are not its own.
    await admin.execute("checkpoint")
    await admin.close()
    yield in_database(running.dsn, name)
    admin = await asyncpg.connect(in_database(running.dsn, "template1"))
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()
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
        await self.said(", lanes ")

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
        self.app = worker_app.app
        self.app.dsn = dsn

    def hire(self, dsn: str | None = None, env: dict[str, str] | None = None, **options: Any) -> Process:
        variables = {"DSN": dsn or self.dsn, "LEDGER": str(self.ledger_file), **(env or {})}
        process = Process(self.folder, len(self.processes), options, variables)
        self.processes.append(process)
        return process

    async def submit(self, task: str, *args: Any, **options: Any) -> ff.Run[Any]:
        return await (await self.app.client()).submit(task, *args, **options)

    def go(self) -> None:
        """Let the jobs end that wait for it."""
        Path(f"{self.ledger_file}.go").touch()

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


@pytest.fixture
async def site(dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(dsn, tmp_path)
    yield site
    await site.close()


# Stopping


@pytest.mark.parametrize("loop", sampling.seeds("uvloop", "asyncio"))
async def test_a_stopping_worker_finishes_what_it_can_and_gives_the_rest_back(site: Site, loop: str) -> None:
    # Nothing comes back by a lapsed lease here: it would take longer than the test.
    first = site.hire(env={"LOOP": loop}, grace=3, lease_ttl=600, concurrency=3)
    await first.ready()
    short, long, thread = [await site.submit(*call) for call in (("gated",), ("job", 3600), ("plain", 3600))]
    await site.begun(3)
    first.signal(signal.SIGTERM)
    await first.said("is stopping: 3 running")
    site.go()
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


@pytest.mark.parametrize("loop", sampling.seeds("uvloop", "asyncio"))
@pytest.mark.parametrize(("task", "number"), [("job", signal.SIGINT), ("blocks", signal.SIGTERM)])
async def test_a_second_signal_always_ends_the_process_immediately(
    site: Site, task: str, number: signal.Signals, loop: str
) -> None:
    worker = site.hire(env={"LOOP": loop}, grace=3600)
    await worker.ready()
    await site.submit(task, 3600)
    await site.begun(1)
    worker.signal(signal.SIGTERM)
    if task == "job":
        await worker.said("is stopping: 1 running")
    else:
        await asyncio.sleep(0.2)  # it can say nothing; two signals at once would count as one
    assert worker.process.poll() is None
    while worker.process.poll() is None:  # again where they did count as one
        worker.signal(number)
        await asyncio.sleep(0.1)
    assert await worker.ended() == 128 + number
    assert "exits immediately" in worker.words


@pytest.mark.parametrize("task", ["plain", "ignores", "hides", "endless"])
async def test_a_handler_that_does_not_listen_does_not_keep_the_process(site: Site, task: str) -> None:
    worker = site.hire(grace=0.2, lease_ttl=600)
    await worker.ready()
    run = await site.submit(task, *([3600] if task == "plain" else []))
    await site.begun(1)
    await worker.stop()
    assert await run.state() is ff.State.WAITING
    await site.audit()


# Output


async def test_readers_get_what_was_acknowledged_while_workers_are_killed(site: Site) -> None:
    """Each reader has, for each attempt, all numbers from 0 to the last acknowledged one or later, without a gap."""
    count = 100
    runs = [await site.submit("tells", count) for _ in range(sampling.examples(200, 30))]

    async def read(run: ff.Run[Any]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        last: str | None = None
        ended = False
        while not ended:
            ended = True
            async for item in run.stream(after=last):
                if isinstance(item, ff.Frame):
                    found.setdefault(item.attempt_index, []).append(int(item.text))
                last = item.cursor
                if random.random() < 0.02:  # the connection of a browser is lost
                    ended = False
                    break
        return found

    readers = [asyncio.create_task(read(run)) for run in runs]
    for _ in range(sampling.examples(4, 2)):
        workers = [site.hire(lease_ttl=1, concurrency=20, env={"HOLD": "1"}) for _ in range(2)]
        # 40 handlers run at once, and each has five acknowledged when it holds.
        least = len(site.ledger("acknowledged")) + random.randrange(1, min(2 * len(runs), 150))
        await until(lambda least=least: len(site.ledger("acknowledged")) > least, site.words)  # type: ignore[misc]
        for worker in workers:
            worker.signal(signal.SIGKILL)
            await worker.ended()
    site.hire(lease_ttl=10)
    async with asyncio.timeout(PATIENCE):
        seen = await asyncio.gather(*readers)
    told = [(line["execution"], line["attempt"], line["number"]) for line in site.ledger("acknowledged")]
    for run, found in zip(runs, seen, strict=True):
        for numbers in found.values():
            assert numbers == list(range(len(numbers)))
        assert max(map(len, found.values())) == count
        assert [one for one in told if one[0] == run.id and one[2] not in found.get(one[1], [])] == []
    assert {attempt for _, attempt, _ in told} > {0}, "no worker died while it emitted"
    await site.audit()


# Losing the database


@pytest.mark.parametrize("way", ["gone", "hangs"])
async def test_a_worker_stops_in_time_also_without_its_database(site: Site, way: str) -> None:
    async with proxies(site.dsn) as (dsn, (proxy,)):
        worker = site.hire(dsn=dsn, grace=0.5, lease_ttl=4)
        await worker.ready()
        runs = [await site.submit("gated"), await site.submit("job", 3600)]
        await site.begun(2)
        if way == "gone":
            await proxy.close()
        else:
            proxy.hang()
        site.go()
        await until(lambda: site.ledger("ended"))
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0, worker.words
        assert "could not be given back" in worker.words
        assert "the last results could not be reported" in worker.words
    second = site.hire(grace=0.1)
    assert await runs[0].result(PATIENCE) == 1  # again, by another worker, when the lease had lapsed
    await second.stop()


async def test_due_work_is_done_though_the_process_that_leads_the_duties_is_killed(site: Site) -> None:
    """Of two workers one leads. One of them is killed around each due time, at another moment of the leader's round."""
    chance = random.Random(3)
    workers = [site.hire(lease_ttl=2) for _ in range(2)]
    for worker in workers:
        await worker.ready()
    runs = []
    for _ in range(4):
        runs.append(await site.submit("job", 0, delay=0.3))
        await asyncio.sleep(chance.uniform(0.0, 0.6))
        workers[0].process.kill()
        await workers[0].ended()
        workers = [workers[1], site.hire(lease_ttl=2)]
        await workers[1].ready()
    for run in runs:
        await run.result(PATIENCE)
    for worker in workers:
        await worker.stop()
    await site.audit()


def restart(data_dir: Path) -> None:
    """Stop the server as `pg_ctl stop -m immediate` does, and start it again."""
    postmaster = int((data_dir / "pgdata" / "postmaster.pid").read_text().split("\n")[0])
    os.kill(postmaster, signal.SIGQUIT)
    deadline = time.monotonic() + PATIENCE
    while (data_dir / "pgdata" / "postmaster.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    embedded.start(data_dir).release()


async def test_readers_that_wait_get_everything_once_over_restarts_of_the_server(site: Site, data_dir: Path) -> None:
    engine = (await site.app.client()).engine
    held = [await started(engine, lease_ttl=timedelta(minutes=10)) for _ in range(sampling.examples(100, 30))]

    async def read(one: Claimed) -> list[str]:
        run: ff.Run[Any] = (await site.app.client()).run(one.execution_id)
        return [item.text async for item in run.stream() if isinstance(item, ff.Frame)]

    readers = [asyncio.create_task(read(one)) for one in held]
    for number in range(3):
        await until(lambda: engine.tails.count == len(held))
        frame = NewFrame(payload=b"%d" % number, mark=number + 1)
        await engine.append_frames([(one.handle, frame) for one in held])
        await asyncio.to_thread(restart, data_dir)
    for one in held:
        await engine.complete(one.handle, b"1")
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*readers) == [["0", "1", "2"]] * len(held)
    await site.audit()


async def test_a_restart_of_the_server_costs_neither_a_busy_nor_an_idle_worker_anything(
    site: Site, data_dir: Path
) -> None:
    # Polling does not help here: it would take longer than the test.
    worker = site.hire(poll=600, lease_ttl=20)
    await worker.ready()
    busy = [await site.submit(task, 4) for task in ("job", "plain")]
    await site.begun(2)
    await asyncio.to_thread(restart, data_dir)
    assert [await run.result(PATIENCE) for run in busy] == [0, 0]
    await asyncio.to_thread(restart, data_dir)
    for _ in range(3):
        # The second attempt, if the restart came between a claim and its answer.
        assert await (await site.submit("job")).result(PATIENCE) in (0, 1)
    assert len(site.ledger("begun")) == 5
    assert worker.process.poll() is None
    await worker.stop()
    await site.audit()


async def test_a_worker_survives_repeated_termination_of_its_backends(site: Site) -> None:
    workers = [site.hire(concurrency=10, lease_ttl=5, env={"LOOP": loop}) for loop in ("uvloop", "asyncio")]
    for worker in workers:
        await worker.ready()
    runs = await (await site.app.client()).submit_many("stepped", [number % 3 == 0 for number in range(120)])
    admin = await asyncpg.connect(site.dsn)
    ended = 0
    try:
        while len(site.ledger("step 2")) < 100:
            lines = len(site.ledger())
            await until(lambda lines=lines: len(site.ledger()) >= lines + 10, site.words)  # type: ignore[misc]
            ended += await admin.fetchval(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and application_name = 'flowfabric'"
            )
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
        worker = site.hire(dsn=dsn, concurrency=4, lease_ttl=15, env={"PATIENCE": "1"})
        await worker.ready()
        busy = await site.submit("job", 3)
        await site.begun(1)
        if way == "gone":
            await first.close()
        else:
            first.hang()
        await second.open()
        assert await busy.result(PATIENCE) == 0
        assert await (await site.submit("job")).result(PATIENCE) in (0, 1)
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
    await worker.said("is away: it is read-only; trying again until it is back")
    await until(lambda: site.ledger("ended"))
    await admin.execute("set default_transaction_read_only = off")
    await new_sessions_are("off")
    assert await busy.result(PATIENCE) == 0
    await admin.close()
    await worker.stop()


@pytest.mark.parametrize("way", ["flows again", "flows for new connections only"])
async def test_a_worker_survives_a_network_that_hangs(
    site: Site, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In this process, so that its patience can be shortened."""
    for name, seconds in (("_CONNECT_TIMEOUT", 0.5), ("_ASK_AFTER", 0.5)):
        monkeypatch.setattr(database_module if name == "_CONNECT_TIMEOUT" else listen, name, seconds)
    for module in (worker_module, second_thread):
        monkeypatch.setattr(module, "_PATIENCE", timedelta(seconds=1))
    begun, go = asyncio.Event(), asyncio.Event()
    ran: list[int] = []
    async with proxies(site.dsn) as (dsn, (proxy,)):
        app = ff.App(dsn, name="hanging")

        @app.task(lane="hanging")
        async def report(ctx: ff.Context, number: int) -> int:
            ran.append(number)
            begun.set()
            await go.wait()
            return await ctx.step("answer", asyncio.sleep, 0, number)

        client = await site.app.client()
        # A claim that was carried out although its answer was lost comes back when its lease lapses.
        async with ff.Worker(app, lanes=["hanging"], lease_ttl=10, poll=600, grace=1):
            runs = [await client.submit(report, 0)]
            await asyncio.wait_for(begun.wait(), PATIENCE)
            proxy.hang()
            go.set()  # a step, a result and a claim are under way, and never answered
            runs.append(await client.submit(report, 1))
            away = "is away: no response in time; trying again until it is back"
            await until(lambda: away in caplog.text)
            if way == "flows again":
                proxy.flow()
            else:
                proxy.flow_anew()
            assert [await run.result(PATIENCE) for run in runs] == [0, 1]
            for number in (2, 3):  # woken by the listener's new connection
                assert await (await client.submit(report, number)).result(PATIENCE) == number
        await app.close()
    assert sorted(ran) == [0, 1, 2, 3]


# Crashes


async def test_a_job_that_kills_its_worker_is_given_up_after_five_reclaims(site: Site) -> None:
    run = await site.submit("poison")
    other = await site.submit("job")
    codes: list[int] = []
    while len(codes) < 6:
        process = site.hire(lease_ttl=1, concurrency=1)
        codes.append(await process.ended())
    site.hire(lease_ttl=1, concurrency=1)
    assert codes == [-signal.SIGKILL, 9] * 3
    outcome = await run.outcome(PATIENCE)
    assert (outcome.state, outcome.failure_reason) == (ff.State.FAILED, "max_reclaims_exceeded")
    assert [line["attempt"] for line in site.ledger("begun") if line["execution"] == run.id] == list(range(6))
    assert await other.result(PATIENCE) == 0
    await site.processes[-1].stop()
    await site.audit()


async def test_workers_killed_at_random_lose_nothing_and_end_everything_once(site: Site) -> None:
    rng = random.Random(3)
    client = await site.app.client()
    runs = await client.submit_many("stepped", [number % 3 == 0 for number in range(120)])
    runs += await client.submit_many("plain", [0.01] * 60)
    crew = [site.hire(concurrency=8, lease_ttl=2) for _ in range(3)]
    for _ in range(6):
        done = len(site.ledger("ended"))
        await until(lambda done=done: len(site.ledger("ended")) >= done + 15, site.words)
        victim = crew.pop(rng.randrange(len(crew)))
        victim.process.kill()
        crew.append(site.hire(concurrency=8, lease_ttl=2))
    for run in runs:
        await run.outcome(PATIENCE)
    for process in crew:
        await process.ready()
        await process.stop()

    engine = client.engine
    effects: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in site.ledger():
        effects[line["execution"]].append(line)
    ends = collections.Counter(
        str(event.execution_id) for event in (await engine.read_events(family="completion", limit=10_000)).items
    )
    everything = [item async for item in client.all()]
    assert len(everything) == 120 + 60 + 120  # the children are there once
    reclaims = 0
    for item in everything:
        name = str(item.execution_id)
        assert item.public_state is ff.State.COMPLETED
        assert ends[name] == 1
        attempts = await engine.list_attempts(item.execution_id)
        reclaims += sum(attempt.attempt_type == "reclaim" for attempt in attempts)
        assert sum(attempt.end_disposition == "completed" for attempt in attempts) == 1
        assert all(line["attempt"] < len(attempts) for line in effects[name] if "attempt" in line)
        assert any(line["what"] == "ended" for line in effects[name])
    for run in runs[:120]:
        assert await run.result() == [0, 1, 2, 0]
        steps = {step.name: step for step in await run.steps() if step.name.startswith("step")}
        assert set(steps) == {"step 0", "step 1", "step 2"}
        for name, step in steps.items():
            did = [line["attempt"] for line in effects[run.id] if line["what"] == name]
            # What was remembered was done by the attempt it is remembered of, and by none after that.
            assert did[-1] == step.attempt_index
            assert did == sorted(did)
    assert reclaims > 0
    await site.audit()


# Behind a proxy that lends a connection for one transaction


@pytest.fixture
def pgbouncer(dsn: str) -> Iterator[str]:
    with pooled(dsn) as found:
        yield found


async def test_workers_work_behind_a_transaction_pooling_proxy(site: Site, pgbouncer: str) -> None:
    env = {"APP": json.dumps({"notifications": False, "prepared_statements": False})}
    workers = [site.hire(dsn=pgbouncer, env=env, poll=0.1, concurrency=10) for _ in range(2)]
    for one in workers:
        await one.ready()
    client = await site.app.client()
    runs = await client.submit_many("stepped", [number % 3 == 0 for number in range(60)])
    for run in runs:
        assert await run.result(PATIENCE) == [0, 1, 2, 0]
    reader = ff.App(pgbouncer, name="reader", notifications=False, prepared_statements=False)
    talking = [await site.submit("tells", 30) for _ in range(5)]
    async with asyncio.timeout(PATIENCE):
        for run in talking:
            items = [item async for item in (await reader.client()).run(run.id).stream()]
            assert [item.text for item in items if isinstance(item, ff.Frame)] == [str(n) for n in range(30)]
    await reader.close()
    for one in workers:
        await one.stop()
        warnings = [line for line in one.words.splitlines() if " WARNING " in line]
        assert [line for line in warnings if not line.endswith("ValueError: flaky")] == [], "only of the retries"
    await site.audit()


# The registry


@pytest.mark.parametrize("victims", sampling.seeds("both", "a follower", "the leader"))
async def test_killed_workers_disappear_from_the_registry_once(site: Site, victims: str) -> None:
    """Of three workers one leads the duties, among them the sweep; those that live must not be forgotten."""
    workers = [site.hire(lease_ttl=3, env={"SWEEP_SECONDS": "0.5"}) for _ in range(3)]
    for worker in workers:
        await worker.ready()
    engine = (await site.app.client()).engine
    by_pid = {worker.process.pid: worker for worker in workers}

    async def names() -> dict[int, str]:
        return {one.pid or 0: one.worker_instance_id for one in (await engine.list_workers("")).items}

    registered = await names()
    assert registered.keys() == by_pid.keys()
    leader = await _leader(engine, registered)
    follower = next(pid for pid in by_pid if pid != leader)
    killed = {"a follower": [follower], "the leader": [leader], "both": [leader, follower]}[victims]
    for pid in killed:
        by_pid[pid].process.kill()
    async with asyncio.timeout(PATIENCE):
        while (await names()).keys() & set(killed):
            await asyncio.sleep(0.05)
        for pid in killed:
            while (await engine.list_worker_events(registered[pid])).items[0].event != "ttl_swept":
                await asyncio.sleep(0.05)
    living = by_pid.keys() - set(killed)
    assert (await names()).keys() == living
    assert await _leader(engine, await names()) in living
    run = await site.submit("job", 0)
    assert await run.result(PATIENCE) == 0
    for pid in living:
        await by_pid[pid].stop()
    assert await names() == {}
    for pid, instance in registered.items():
        told = [one.event for one in (await engine.list_worker_events(instance)).items]
        assert told == ["ttl_swept" if pid in killed else "marked_dead", "registered"]
    await site.audit()


async def _leader(engine: ff.Engine, names: dict[int, str]) -> int:
    """The process that leads the duties, once one does."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for one in await engine.list_leaders():
                for pid, instance in names.items():
                    if one.name == "duties" and one.worker_instance_id == instance:
                        return pid
            await asyncio.sleep(0.05)
