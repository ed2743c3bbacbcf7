"""The worker in this process against a real Postgres: claims, batches, heartbeats, interruptions, schedules.

What needs processes that are killed and servers that go away is in tests/acceptance/test_worker_faults.py.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.middleware import Middleware

PATIENCE = 30.0
"""Seconds after which what should have happened counts as missing. Nothing waits this long when all is well."""


async def until(condition: Callable[[], Any], what: str = "waited in vain") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def until_true(question: Callable[[], Awaitable[Any]], what: str = "waited in vain") -> None:
    deadline = time.monotonic() + PATIENCE
    while not await question():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


class Calls(Middleware):
    """Counts the engine's calls, and may hold or break them."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        self.counts[method] += 1
        if (wait := self.before.get(method)) is not None:
            await wait()
        return await proceed()


class Busy:
    """How many run at the same time, and how many ever did."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.all = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.all += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def app(database: str, calls: Calls) -> AsyncIterator[ff.App]:
    app = ff.App(database, middleware=[calls])
    yield app
    await app.close()


@contextlib.asynccontextmanager
async def working(app: ff.App, **options: Any) -> AsyncIterator[ff.Worker]:
    worker = ff.Worker(app, **{"grace": 5, **options})
    async with worker:
        yield worker


async def active(sql: asyncpg.Connection[Any]) -> int:
    return int(await sql.fetchval("select count(*) from flowfabric.execution where state = 'active'"))


# Slots


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_as_many_handlers_run_as_there_are_slots_and_no_more_are_claimed(
    app: ff.App, sql: asyncpg.Connection[Any], kind: str
) -> None:
    busy = Busy()
    go = threading.Event()

    if kind == "async":

        @app.task
        async def job(n: int) -> int:
            with busy:
                while not go.is_set():
                    await asyncio.sleep(0.005)
            return n
    else:

        @app.task(name="job")
        def plain(n: int) -> int:
            with busy:
                go.wait(PATIENCE)
            return n

    runs = await app.tasks["job"].submit_many(range(20))
    async with working(app, concurrency=5):
        await until(lambda: busy.now == 5)
        assert await active(sql) == 5
        go.set()
        assert [await run.result(PATIENCE) for run in runs] == list(range(20))
    assert (busy.most, busy.all) == (5, 20)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 10])
async def test_lanes_are_served_by_their_weights_while_all_have_work(app: ff.App, slots: int) -> None:
    served: list[str] = []

    @app.task
    async def job(ctx: ff.Context) -> None:
        served.append(ctx.lane_id)
        await asyncio.sleep(0)

    await job.options(lane="small").submit_many([()] * 60)
    await job.options(lane="large").submit_many([()] * 60)
    await ff.Worker(app, lanes={"small": 1, "large": 3}, concurrency=slots).run(until_idle=True)
    counts = collections.Counter(served[:40])
    assert abs(counts["large"] - 30) <= 3, served[:40]
    assert len(served) == 120


async def test_a_lane_without_work_leaves_its_slots_to_the_others(app: ff.App) -> None:
    busy = Busy()
    go = asyncio.Event()

    @app.task(lane="small")
    async def job() -> None:
        with busy:
            await go.wait()

    await job.submit_many([()] * 8)
    async with working(app, lanes={"small": 1, "large": 3, "other": 5}, concurrency=8):
        await until(lambda: busy.now == 8)
        go.set()


async def test_two_apps_on_one_lane_do_not_take_each_others_work(database: str) -> None:
    ran: list[str] = []
    apps = [ff.App(database, name=name) for name in ("one", "two")]
    for app in apps:

        @app.task(name=f"job-{app.name}")
        async def job(ctx: ff.Context) -> None:
            ran.append(ctx.kind)

    runs = [await app.tasks[f"job-{app.name}"].submit() for app in apps]
    await ff.Worker(apps[1]).run(until_idle=True)
    assert ran == ["job-two"]
    assert await runs[0].state() is ff.State.WAITING
    await ff.Worker(apps[0]).run(until_idle=True)
    assert ran == ["job-two", "job-one"]
    for app in apps:
        await app.close()


async def test_a_worker_told_to_run_some_tasks_leaves_the_others(app: ff.App) -> None:
    @app.task
    async def one() -> int:
        return 1

    @app.task
    async def two() -> int:
        return 2

    runs = [await one.submit(), await two.submit()]
    await ff.Worker(app, tasks=["two"]).run(until_idle=True)
    assert [await run.state() for run in runs] == [ff.State.WAITING, ff.State.COMPLETED]
    with pytest.raises(ff.InvalidInput, match="three"):
        ff.Worker(app, tasks=["three"])


async def test_only_a_worker_with_the_capabilities_takes_an_execution(app: ff.App) -> None:
    @app.task(capabilities=["gpu", "pdf"])
    async def job() -> str:
        return "done"

    run = await job.submit()
    await ff.Worker(app, capabilities=["gpu"]).run(until_idle=True)
    assert await run.state() is ff.State.WAITING
    await ff.Worker(app, capabilities=["pdf", "gpu", "more"]).run(until_idle=True)
    assert await run.result() == "done"


# Batches


async def test_finished_work_goes_back_in_few_calls_and_alone_when_idle(app: ff.App, calls: Calls) -> None:
    gate = asyncio.Event()
    under_way = asyncio.Event()

    @app.task
    async def job() -> None:
        pass

    async def hold() -> None:
        under_way.set()
        await gate.wait()

    calls.before["complete_many"] = hold
    async with working(app, concurrency=300) as worker:
        first = await job.submit()
        await asyncio.wait_for(under_way.wait(), PATIENCE)
        assert calls.counts["complete_many"] == 1
        rest = await job.submit_many([()] * 200)
        await until(lambda: not worker._running and len(worker.held) == 201)
        gate.set()
        for run in (first, *rest):
            await run.result(PATIENCE)
    assert calls.counts["complete_many"] == 2


async def test_acknowledging_each_alone_is_one_call_per_execution(app: ff.App, calls: Calls) -> None:
    @app.task
    async def job(fails: bool) -> None:
        if fails:
            raise ValueError("no")

    await job.submit_many([False] * 30 + [True] * 10)
    await ff.Worker(app, ack="each").run(until_idle=True)
    assert (calls.counts["complete_many"], calls.counts["fail_many"]) == (30, 10)


async def test_a_result_that_cannot_be_stored_takes_no_other_with_it(
    app: ff.App, sql: asyncpg.Connection[Any], calls: Calls
) -> None:
    # The database refuses one of the results, as a full disk or a broken index would: in the middle of the call.
    await sql.execute(
        "alter table flowfabric.execution add constraint poison check (result is distinct from '\"bad\"')"
    )

    @app.task
    async def job(what: str) -> str:
        return what

    async def hold() -> None:
        await until(lambda: len(worker.held) == 21 and not worker._running)

    worker = ff.Worker(app, concurrency=50)
    calls.before["complete_many"] = hold
    runs = await job.submit_many(["good"] * 10 + ["bad"] + ["good"] * 10)
    await worker.run(until_idle=True)
    states = collections.Counter([await run.state() for run in runs])
    assert states == {ff.State.COMPLETED: 20, ff.State.FAILED: 1}
    with pytest.raises(ff.TaskFailed, match="poison"):
        await runs[10].result()


# Heartbeats and interruptions


async def test_a_handler_that_blocks_the_loop_for_several_lease_times_keeps_its_lease(app: ff.App) -> None:
    @app.task
    async def job() -> str:
        time.sleep(1.5)  # three and a half lease times
        return "done"

    run = await job.submit()
    async with working(app, lease_ttl=0.4):
        assert await run.result(PATIENCE) == "done"
    assert len(await run.attempts()) == 1
