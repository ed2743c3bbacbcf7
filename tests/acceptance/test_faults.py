"""Workers, connections and the whole server are killed under load; the ledgers of the workers prove nothing was lost.

Nothing is simulated: real processes, a real server with fsync on, SIGKILL. The faults come by progress, not by time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import statements
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from flowfabric.errors import StreamDisconnected, TransportError
from flowfabric.values.event import EventCursor
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.ids import BudgetId
from flowfabric.values.policies import ExecutionPolicy
from tests.support import in_database

SCRIPT = Path(__file__).with_name("fault_worker.py")
PATIENCE = 150.0
FLAKY = ExecutionPolicy(retry_policy=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(milliseconds=50))))

pytestmark = [pytest.mark.xdist_group("faults")]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server of our own, with everything that protects data switched on; it will be killed."""
    place = tmp_path_factory.mktemp("faults") / "data"
    running = embedded.start(place, settings={"shared_buffers": "64MB"})
    yield place
    running.release()


class Fleet:
    """Worker processes, their ledgers, and the load they work on."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.stop_file = folder / "stop"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._names = iter(range(1_000_000))

    def hire(self) -> None:
        name = f"worker-{next(self._names)}"
        with open(self.folder / f"{name}.err", "wb") as errors:
            self.workers[name] = subprocess.Popen(
                [sys.executable, str(SCRIPT), self.dsn, str(self.folder / f"{name}.jsonl"), str(self.stop_file), name],
                stderr=errors,
            )

    async def kill_one(self, admin: asyncpg.Connection[Any]) -> None:
        """SIGKILL for a worker that holds leases at this moment."""
        while True:
            name, victim = random.choice(list(self.workers.items()))
            victim.send_signal(signal.SIGSTOP)
            if await admin.fetchval(
                "select exists (select from flowfabric.execution_view"
                " where state = 'active' and lease_lost is null and worker_instance_id = $1)",
                name,
            ):
                break
            victim.send_signal(signal.SIGCONT)
        victim.kill()
        victim.wait()
        del self.workers[name]

    def ledger(self) -> list[dict[str, Any]]:
        lines = []
        for path in sorted(self.folder.glob("*.jsonl")):
            # A worker killed in the middle of a write leaves half a line, which it never acted upon.
            lines += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return lines

    def stop(self) -> None:
        """Let the workers end by themselves: one that died of an error is a failure."""
        self.stop_file.touch()
        for worker in self.workers.values():
            worker.wait(timeout=60)
        assert [worker.returncode for worker in self.workers.values()] == [0] * len(self.workers), self.errors()

    def errors(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.err"))

    def end(self) -> None:
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            worker.wait()


Jobs = Callable[[ff.Engine], Awaitable[list[NewExecution]]]


def some_flaky(count: int) -> Jobs:
    """That many executions, a third of which fail once."""

    async def made(_: ff.Engine) -> list[NewExecution]:
        return [
            NewExecution(execution_kind="job", input_payload=b"flaky", policy=FLAKY)
            if number % 3 == 0
            else NewExecution(execution_kind="job")
            for number in range(count)
        ]

    return made


@contextlib.asynccontextmanager
async def load(
    data_dir: Path, folder: Path, name: str, jobs: Jobs, workers: int = 3
) -> AsyncIterator[tuple[Fleet, list[ff.ExecutionId]]]:
    """A database with executions in it, and workers at work."""
    base = embedded.start(data_dir)
    admin = await asyncpg.connect(base.dsn)
    await admin.execute(f"create database {name}")
    await admin.close()
    dsn = in_database(base.dsn, name)
    await migrate_database(dsn)
    fleet = Fleet(dsn, folder)
    try:
        async with await ff.Engine.connect(dsn) as engine:
            items = await jobs(engine)
            answers = await engine.create_many(items)
        ids = [answer.execution_id for answer in answers if isinstance(answer, Created)]
        assert len(ids) == len(items)
        for _ in range(workers):
            fleet.hire()
        yield fleet, ids
    finally:
        fleet.end()
        base.release()


async def until(condition: Callable[[], bool], fleet: Fleet) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, fleet.errors()
        dead = [worker.pid for worker in fleet.workers.values() if worker.poll() not in (None, 0)]
        assert not dead, fleet.errors()
        await asyncio.sleep(0.02)


async def progress(fleet: Fleet, more: int) -> None:
    """Wait until the workers have had `more` further effects."""
    wanted = len(fleet.ledger()) + more
    await until(lambda: len(fleet.ledger()) >= wanted, fleet)


async def all_ended(fleet: Fleet, ids: list[ff.ExecutionId]) -> None:
    deadline = time.monotonic() + PATIENCE
    async with await ff.Engine.connect(fleet.dsn) as engine:
        while True:
            page = await engine.find_executions(limit=1000)
            if sum(item.public_state.is_terminal for item in page.items) == len(ids):
                return
            assert time.monotonic() < deadline, fleet.errors()
            await asyncio.sleep(0.1)


async def prove(fleet: Fleet, ids: list[ff.ExecutionId]) -> collections.Counter[str]:
    """Compare what the workers wrote down with what the database says; gives the kinds of attempts there were."""
    ledger = fleet.ledger()
    effects: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    accepted: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in ledger:
        if line["what"] == "effect":
            effects[line["execution"]].append(line)
        elif line["what"] == "accepted":
            accepted[line["execution"]].append(line)
    kinds: collections.Counter[str] = collections.Counter()
    async with await ff.Engine.connect(fleet.dsn) as engine:
        assert await engine.audit(events=True) == []
        completions = collections.Counter(
            str(event.execution_id) for event in (await engine.read_events(family="completion", limit=10_000)).items
        )
        for execution_id in ids:
            name = str(execution_id)
            attempts = {str(attempt.attempt_id): attempt for attempt in await engine.list_attempts(execution_id)}
            result = await engine.get_execution_result(execution_id)

            # exactly one terminal outcome, reached by an attempt that had its effect
            assert await engine.read_execution_state(execution_id) is ff.State.COMPLETED
            assert completions[name] == 1
            assert result is not None
            assert attempts[result.decode()].end_disposition == "completed"
            assert result.decode() in {line["attempt"] for line in effects[name]}

            # no accepted answer was lost
            for line in accepted[name]:
                attempt = attempts[line["attempt"]]
                if line["answer"] == "completed":
                    assert result.decode() == line["attempt"]
                else:
                    assert attempt.end_disposition == "retry_scheduled"

            # an attempt acts at most once, and one beyond the first is explained by what ended the one before
            assert len(effects[name]) == len({line["attempt"] for line in effects[name]})
            ordered = sorted(attempts.values(), key=lambda attempt: attempt.attempt_index)
            for before, after in itertools.pairwise(ordered):
                kinds[after.attempt_type] += 1
                assert (after.attempt_type, before.end_disposition) in (
                    ("reclaim", "reclaimed"),
                    ("retry", "retry_scheduled"),
                )
            assert all(line["attempt"] in attempts for line in effects[name])
    return kinds


async def test_workers_killed_in_the_middle_of_their_jobs_lose_no_work(data_dir: Path, tmp_path: Path) -> None:
    async with load(data_dir, tmp_path, "ff_workers", some_flaky(300)) as (fleet, ids):
        admin = await asyncpg.connect(fleet.dsn)
        try:
            for _ in range(5):
                await progress(fleet, 40)
                await fleet.kill_one(admin)
                fleet.hire()
        finally:
            await admin.close()
        await all_ended(fleet, ids)
        fleet.stop()
        assert (await prove(fleet, ids))["reclaim"] > 0


async def test_backends_terminated_at_random_under_load_lose_no_work(data_dir: Path, tmp_path: Path) -> None:
    async with load(data_dir, tmp_path, "ff_backends", some_flaky(300)) as (fleet, ids):
        admin = await asyncpg.connect(fleet.dsn)
        ended = 0
        try:
            for _ in range(12):
                await progress(fleet, 30)
                ended += await admin.fetchval(
                    "select count(pg_terminate_backend(pid)) from"
                    " (select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
                    "  and application_name = 'flowfabric' order by random() limit 4) chosen"
                )
        finally:
            await admin.close()
        assert ended > 0
        await all_ended(fleet, ids)
        fleet.stop()
        await prove(fleet, ids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
async def test_a_server_killed_and_restarted_under_load_loses_no_work(data_dir: Path, tmp_path: Path) -> None:
    async with load(data_dir, tmp_path, "ff_server", some_flaky(300)) as (fleet, ids):
        for _ in range(2):
            await progress(fleet, 120)
            kill_server(data_dir)
            restarted = await asyncio.to_thread(embedded.start, data_dir)
            restarted.release()
        await all_ended(fleet, ids)
        fleet.stop()
        await prove(fleet, ids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
async def test_twenty_followers_see_every_end_while_connections_and_the_server_die(
    data_dir: Path, tmp_path: Path
) -> None:
    """Five of them keep the cursor of the last event and begin again with it, the others just continue."""
    seen: dict[int, list[Any]] = collections.defaultdict(list)

    async def follow(engine: ff.Engine, number: int, after: EventCursor) -> None:
        cursor = after
        while True:
            try:
                async with await engine.subscribe_completion(after=cursor) as events:
                    async for event in events:
                        seen[number].append((event.cursor, event.execution_id))
                        cursor = event.cursor
                        if number % 4 == 0 and len(seen[number]) % 7 == 0:
                            break
            except (StreamDisconnected, TransportError):
                continue

    async with (
        load(data_dir, tmp_path, "ff_followers", some_flaky(120)) as (fleet, ids),
        contextlib.AsyncExitStack() as stack,
    ):
        engines = [await stack.enter_async_context(await ff.Engine.connect(fleet.dsn, max_size=3)) for _ in range(2)]
        tasks = [asyncio.ensure_future(follow(engines[n % 2], n, EventCursor())) for n in range(20)]
        admin = await asyncpg.connect(fleet.dsn)
        for _ in range(4):
            await progress(fleet, 20)
            await admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid() and application_name = 'flowfabric'"
            )
        await admin.close()
        kill_server(data_dir)
        restarted = await asyncio.to_thread(embedded.start, data_dir)
        restarted.release()
        await all_ended(fleet, ids)
        fleet.stop()
        everything: list[Any] = []
        cursor: EventCursor | None = EventCursor()
        while True:
            page = await engines[0].read_events(family="completion", after=cursor, limit=1000)
            everything += [(one.cursor, one.execution_id) for one in page.items]
            if not page.items:
                break
            cursor = page.next_cursor
        assert {one for _, one in everything} >= set(ids)
        async with asyncio.timeout(PATIENCE):
            while any(len(seen[n]) < len(everything) for n in range(20)):
                await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(seen[n] == everything for n in range(20))


# Executions that run, by policy and key, in one snapshot.
_RUNNING = """
select k.id, k.key, p.max_concurrent as cap, count(*) as running
from flowfabric.execution e
join flowfabric.limit_set l on l.digest = e.limits
cross join lateral unnest(l.quota_ids, l.quota_keys) as k (id, key)
join flowfabric.quota_policy p on p.id = k.id
where e.state = 'active' group by 1, 2, 3
"""


class Caps:
    """Watches, in snapshots of the database, that no cap is passed; afterwards asks the ledgers of the workers."""

    def __init__(self) -> None:
        self.limits: dict[str, list[tuple[str, int]]] = {}  # of an execution: the names of what caps it, and the caps
        self.full = 0  # how often a cap was seen to be reached

    async def watch(self, dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        try:
            while True:
                for row in await connection.fetch(_RUNNING):
                    assert row["running"] <= row["cap"], dict(row)
                    self.full += row["running"] == row["cap"]
                await asyncio.sleep(0.01)
        finally:
            await connection.close()

    def prove(self, fleet: Fleet) -> None:
        """An attempt whose result was accepted held its slots until then: it ran under them from `since` to `at`."""
        ledger = fleet.ledger()
        accepted = {line["attempt"] for line in ledger if line["what"] == "accepted"}
        changes: dict[tuple[str, int], list[tuple[float, int]]] = collections.defaultdict(list)
        for line in ledger:
            if line["what"] == "effect" and line["attempt"] in accepted:
                for limit in self.limits[line["execution"]]:
                    changes[limit] += [(line["since"], 1), (line["at"], -1)]
        assert changes
        for (name, cap), found in changes.items():
            most = max(itertools.accumulate(change for _, change in sorted(found)))
            assert most <= cap, (name, most, cap)


async def nothing_is_held(fleet: Fleet) -> None:
    async with await ff.Engine.connect(fleet.dsn) as engine:
        for table in ("blocked", "quota_slot"):
            assert (await engine._fetch(f"select count(*) from flowfabric.{table}"))[0][0] == 0, table


async def test_eight_workers_under_fifty_keyed_policies_pass_no_cap_while_some_are_killed(
    data_dir: Path, tmp_path: Path
) -> None:
    chance = random.Random(20261118)
    caps = Caps()
    chosen: list[list[tuple[str, int]]] = []

    async def jobs(engine: ff.Engine) -> list[NewExecution]:
        policies = []
        for number in range(50):
            cap = chance.randint(1, 3)
            made = await engine.create_quota_policy(name=f"api {number}", key="tenant", max_concurrent=cap)
            policies.append((made.quota_policy_id, cap))
        items = []
        for number in range(260):
            # A few are wanted by many, so that their caps are reached.
            mine = [policies[min(int(chance.expovariate(0.15)), 49)] for _ in range(chance.randint(1, 2))]
            tenant = chance.choice("ab")
            chosen.append([(f"{policy} {tenant}", cap) for policy, cap in dict(mine).items()])
            flaky = number % 3 == 0
            policy = ExecutionPolicy(
                quota_policy_ids=tuple(dict(mine)), retry_policy=FLAKY.retry_policy if flaky else None
            )
            body = b"flaky" if flaky else b""
            items.append(NewExecution(execution_kind="job", input_payload=body, tags={"tenant": tenant}, policy=policy))
        return items

    async with load(data_dir, tmp_path, "ff_caps", jobs, workers=8) as (fleet, ids):
        caps.limits = {str(one): limits for one, limits in zip(ids, chosen, strict=True)}
        watching = asyncio.create_task(caps.watch(fleet.dsn))
        admin = await asyncpg.connect(fleet.dsn)
        try:
            for _ in range(3):
                await progress(fleet, 40)
                await fleet.kill_one(admin)
                fleet.hire()
        finally:
            await admin.close()
        await all_ended(fleet, ids)
        assert not watching.done(), watching.exception()
        watching.cancel()
        fleet.stop()
        assert (await prove(fleet, ids))["reclaim"] > 0
        assert caps.full > 0
        caps.prove(fleet)
        await nothing_is_held(fleet)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
async def test_a_server_killed_while_limits_open_lets_run_what_may_and_nothing_else(
    data_dir: Path, tmp_path: Path
) -> None:
    """A budget is raised and the server dies before the commit; it dies again in the midst of what a raise released."""
    caps = Caps()
    budget: BudgetId

    async def jobs(engine: ff.Engine) -> list[NewExecution]:
        nonlocal budget
        made = await engine.create_budget(name="team", dimensions=["tokens"], hard_limits=[1], soft_limits=[0])
        budget = made.budget_id
        await engine.report_usage_admin(budget, dimensions=["tokens"], deltas=[1])
        quota = (await engine.create_quota_policy(name="api", max_concurrent=2)).quota_policy_id
        held = ExecutionPolicy(budget_ids=(budget,), quota_policy_id=quota)
        free = ExecutionPolicy(quota_policy_id=quota)
        return [NewExecution(execution_kind="job", policy=held if n % 2 else free) for n in range(80)]

    async with load(data_dir, tmp_path, "ff_opening", jobs) as (fleet, ids):
        caps.limits = {str(one): [("api", 2)] for one in ids}
        held = {str(one) for one in ids[1::2]}
        await progress(fleet, 20)
        # The raise has made them claimable, in a transaction that never commits.
        raising = await asyncpg.connect(fleet.dsn)
        await raising.execute("begin")
        arguments = (None, None, None, None, ["tokens"], [1000], None, None, None, None, None, None)
        raised = await raising.fetchrow(statements.UPDATE_BUDGET, budget, *arguments)
        assert raised is not None
        assert raised["code"] == "ok"
        kill_server(data_dir)
        (await asyncio.to_thread(embedded.start, data_dir)).release()
        raising.terminate()
        async with await ff.Engine.connect(fleet.dsn) as engine:
            assert (await engine.get_budget_status(budget)).is_exhausted
            await until(lambda: len(done(fleet)) == 40, fleet)
            assert not done(fleet) & held
            await engine.update_budget(budget, raise_by={"tokens": 1000})
            await until(lambda: len(done(fleet)) >= 50, fleet)
        kill_server(data_dir)
        (await asyncio.to_thread(embedded.start, data_dir)).release()
        await all_ended(fleet, ids)
        fleet.stop()
        await prove(fleet, ids)
        caps.prove(fleet)
        await nothing_is_held(fleet)


def done(fleet: Fleet) -> set[str]:
    return {line["execution"] for line in fleet.ledger() if line["what"] == "accepted"}


def kill_server(data_dir: Path) -> None:
    """SIGKILL for the postmaster and everything it started, at once."""
    postmaster = int((data_dir / "pgdata" / "postmaster.pid").read_text().split("\n")[0])
    os.kill(postmaster, signal.SIGSTOP)  # so that it starts nothing while its children are looked for
    children = [
        int(place.name) for place in Path("/proc").iterdir() if place.name.isdigit() and _status(place)[1] == postmaster
    ]
    assert children
    for pid in (postmaster, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # A signal is only sent: until they are gone their socket still takes connections.
    while any(_status(Path(f"/proc/{pid}"))[0] not in ("Z", "X") for pid in (postmaster, *children)):
        time.sleep(0.01)


def _status(place: Path) -> tuple[str, int]:
    """The state of a process and its parent's id, as /proc tells them."""
    with contextlib.suppress(OSError):
        state, parent, *_ = (place / "stat").read_text().rsplit(")", 1)[1].split()
        return state, int(parent)
    return "X", 0
