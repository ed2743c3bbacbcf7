"""The worker in this process against a real Postgres: claims, batches, heartbeats, interruptions, schedules.

What needs processes that are killed and servers that go away is in tests/acceptance/test_worker_faults.py.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import ConnectionFailed, ExecutionNotActive, TransportError
from flowfabric.middleware import Middleware
from flowfabric.values.execution import NewExecution
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.worker import second_thread
from flowfabric.worker.schedules import ScheduleDuty, declare, fire
from tests import sampling
from tests.interleave import Party, waiting
from tests.support import Clock

PATIENCE = 60.0
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


async def test_a_worker_for_some_tasks_leaves_the_others(app: ff.App) -> None:
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


async def test_a_worker_is_not_idle_while_its_last_result_lets_other_work_continue(app: ff.App) -> None:
    @app.task
    async def child() -> int:
        await asyncio.sleep(0.3)  # claims have found nothing for longer than a worker needs to count as idle
        return 1

    @app.task
    async def parent() -> int:
        return 1 + await (await child.submit()).result()

    run = await parent.submit()
    await asyncio.wait_for(ff.Worker(app, poll=600).run(until_idle=True), PATIENCE)
    assert await run.state() is ff.State.COMPLETED


async def test_a_handler_that_blocks_the_loop_for_several_lease_times_keeps_its_lease(app: ff.App) -> None:
    @app.task
    async def job() -> str:
        time.sleep(3)  # three lease times
        return "done"

    async with working(app, lease_ttl=1):
        for _ in range(3):  # a machine that stops the whole process for a second takes the lease away
            run = await job.submit()
            assert await run.result(PATIENCE) == "done"
            if len(await run.attempts()) == 1:
                return
    raise AssertionError("it has lost its lease each time")


async def test_a_heartbeat_without_a_response_is_sent_again_in_time(app: ff.App, calls: Calls) -> None:
    async def hang_once() -> None:
        if calls.counts["renew_many"] == 1:
            await asyncio.Event().wait()

    calls.before["renew_many"] = hang_once

    @app.task
    async def job() -> str:
        await until(lambda: calls.counts["renew_many"] > 2)
        return "done"

    run = await job.submit()
    async with working(app, lease_ttl=3):
        assert await run.result(PATIENCE) == "done"
    assert len(await run.attempts()) == 1


async def test_a_transaction_over_one_execution_costs_its_worker_no_other_lease(
    app: ff.App, sql: asyncpg.Connection[Any]
) -> None:
    """It holds the row for longer than the lease, as an operator's open session or an attacker would."""
    go = asyncio.Event()

    @app.task
    async def job() -> str:
        await go.wait()
        return "done"

    runs = await job.submit_many([()] * 4)
    async with working(app, lease_ttl=2, concurrency=4) as worker:
        await until(lambda: len(worker.handlers.held) == 4)
        held = dict(worker.handlers.held)
        async with sql.transaction():
            locked = await sql.fetchval("select id from flowfabric.execution order by id limit 1 for update")
            lost = [lease for lease, one in held.items() if one.claimed.execution_id == locked]
            await until(lambda: lost[0] not in worker.handlers.held)
            assert held[lost[0]].stop_reason == (
                "its lease expired, so another worker may take it over:"
                " another transaction has kept the execution locked"
            )
            # Every other lease was renewed meanwhile, and the worker knows of no loss.
            assert [lease for lease, one in held.items() if one.is_lost] == lost
            assert (
                await sql.fetchval(
                    "select count(*) from flowfabric.execution where lease_expires_at > now() - interval '0.2 s'"
                    " and lease_renewed_at > attempt_started_at and id <> $1",
                    locked,
                )
                == 3
            )
        go.set()
        assert [await run.result(PATIENCE) for run in runs] == ["done"] * 4
    assert sorted([len(await run.attempts()) for run in runs]) == [1, 1, 1, 2]


async def test_a_lease_whose_execution_was_locked_is_tried_again_soon(
    app: ff.App, sql: asyncpg.Connection[Any], calls: Calls
) -> None:
    go = asyncio.Event()

    @app.task
    async def job() -> None:
        await go.wait()

    run = await job.submit()
    async with working(app, lease_ttl=2) as worker:
        await until(lambda: len(worker.handlers.held) == 1)
        (one,) = worker.handlers.held.values()
        claimed_at = one.renewed_at
        async with sql.transaction():
            await sql.execute("select from flowfabric.execution for update")
            await until(lambda: calls.counts["renew_many"] + calls.counts["renew_and_heartbeat"] >= 4)
            assert one.renewed_at == claimed_at
        await until(lambda: one.renewed_at > claimed_at)
        assert not one.is_lost
        go.set()
        await run.result(PATIENCE)
    assert len(await run.attempts()) == 1


async def test_a_lost_lease_whose_execution_was_locked_when_the_worker_looked_is_noticed(
    app: ff.App, database: str, sql: asyncpg.Connection[Any], calls: Calls
) -> None:
    """The promotion of a retry locks the execution just after the notification that its lease was lost."""
    stopped = asyncio.Event()

    @app.task
    async def job(ctx: ff.Context) -> str:
        if ctx.reclaim_count:
            return "second"
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    def looks() -> int:
        return calls.counts["renew_many"] + calls.counts["renew_and_heartbeat"]

    locked = threading.Event()

    async def hold() -> None:
        await asyncio.to_thread(locked.wait)

    run = await job.submit()
    locking = await Party.join(database)
    async with working(app, lease_ttl=3600, concurrency=1) as worker:
        await until(lambda: len(worker.handlers.held) == 1 and looks() > 0)
        calls.before = {"renew_many": hold, "renew_and_heartbeat": hold}
        await (await app.client()).engine.revoke_lease(run.execution_id, reason="a test")
        await locking.begin()
        await locking.connection.execute("select from flowfabric.execution for update")
        locked.set()
        seen = looks()
        await until(lambda: looks() >= seen + 2)  # one look finds it locked
        assert not stopped.is_set()
        await locking.commit()
        assert await run.result(PATIENCE) == "second"
        assert stopped.is_set()
    await locking.close()


async def test_an_earlier_run_that_lingers_does_not_disturb_the_lease_of_the_next(app: ff.App) -> None:
    again = asyncio.Event()

    @app.task
    async def job(ctx: ff.Context) -> str:
        if not ctx.is_resumed:
            try:
                await ctx.sleep(0.1)
            except asyncio.CancelledError:  # it is parked
                await again.wait()
            return "first"
        again.set()
        await asyncio.sleep(2.5)  # some lease times
        return "second"

    async with working(app, lease_ttl=1):
        for _ in range(3):  # a machine that stops the whole process for a second takes the lease away
            again.clear()
            run = await job.submit()
            assert await run.result(PATIENCE) == "second"
            if len(await run.attempts()) == 1:
                return
    raise AssertionError("it has lost its lease each time")


Take = Callable[[ff.App, "ff.Run[Any]", Clock], Awaitable[None]]


async def revoke(app: ff.App, run: ff.Run[Any], _clock: Clock) -> None:
    await (await app.client()).engine.revoke_lease(run.execution_id, reason="a test")


async def cancel(_app: ff.App, run: ff.Run[Any], _clock: Clock) -> None:
    await run.cancel()


async def pass_time(_app: ff.App, _run: ff.Run[Any], clock: Clock) -> None:
    await clock.advance(minutes=20)


# How an execution is taken from its handler, the options of its task, and how it ends.
TAKEN: dict[str, tuple[Take, dict[str, Any], ff.State]] = {
    "revoked": (revoke, {}, ff.State.COMPLETED),
    "cancelled": (cancel, {}, ff.State.CANCELLED),
    "attempt timed out": (pass_time, {"attempt_timeout": 600}, ff.State.EXPIRED),
    "attempt timed out, retried": (
        pass_time,
        {"attempt_timeout": 600, "retry": ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(milliseconds=1)))},
        ff.State.COMPLETED,
    ),
    "deadline passed": (pass_time, {"deadline": 600}, ff.State.EXPIRED),
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("way", TAKEN)
async def test_a_handler_learns_immediately_that_its_lease_is_lost(
    app: ff.App, clock: Clock, way: str, kind: str
) -> None:
    take, options, end = TAKEN[way]
    begun = threading.Event()
    seen: list[Any] = []

    if kind == "async":

        @app.task(**options)
        async def job(ctx: ff.Context) -> str:
            if ctx.attempt_index > 0:
                return "second"
            begun.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                seen.append(ctx.is_cancelled)
                for write in (ctx.progress(1), ctx.step("late", asyncio.sleep, 0), ctx.heartbeat(), ctx.now()):
                    try:
                        await write
                    except (asyncio.CancelledError, ff.FlowFabricError):
                        seen.append("refused")
            return "late"
    else:

        @app.task(name="job", **options)
        def plain(ctx: ff.SyncContext) -> str:
            if ctx.attempt_index > 0:
                return "second"
            begun.set()
            try:
                while True:
                    time.sleep(0.001)
            except ff.Interrupted:
                seen.append(ctx.is_cancelled)
                for write in (
                    lambda: ctx.progress(1),
                    lambda: ctx.step("late", time.sleep, 0),
                    ctx.heartbeat,
                    ctx.now,
                ):
                    try:
                        write()
                    except (ff.Interrupted, ff.FlowFabricError):
                        seen.append("refused")
            return "late"

    @app.task
    async def other() -> str:
        return "other"

    # With such a lease a heartbeat would find out after a quarter of an hour or more.
    async with working(app, concurrency=1, lease_ttl=3600):
        run = await app.tasks["job"].submit()
        await until(begun.is_set)
        await take(app, run, clock)
        outcome = await run.outcome(PATIENCE)
        assert await (await other.submit()).result(PATIENCE) == "other"  # in the only slot
    assert outcome.state is end
    assert outcome.result in (None, b'"second"')
    await until(lambda: len(seen) == 5)  # the worker does not wait for a thread that was interrupted
    assert seen == [True, "refused", "refused", "refused", "refused"]
    assert [step.name for step in await run.steps()] == []


async def test_a_lease_that_lapsed_stops_the_handler_at_the_next_heartbeat(app: ff.App, clock: Clock) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: ff.Context) -> int:
        if ctx.reclaim_count:
            return ctx.reclaim_count
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    async with working(app, lease_ttl=3):
        run = await job.submit()
        await asyncio.wait_for(begun.wait(), PATIENCE)
        await clock.advance(seconds=4)
        await asyncio.wait_for(stopped.wait(), PATIENCE)
        assert await run.result(PATIENCE) == 1


async def test_a_thread_that_hears_nothing_keeps_neither_the_slot_nor_the_end_of_the_worker(app: ff.App) -> None:
    begun, go = threading.Event(), threading.Event()
    ended: list[str] = []

    @app.task
    def deaf() -> None:
        begun.set()
        try:
            go.wait(PATIENCE)  # nothing reaches a thread that waits like this
        finally:
            ended.append("deaf")

    @app.task
    def other() -> str:
        return "other"

    try:
        async with working(app, concurrency=1, grace=0.2):
            run = await deaf.submit()
            await until(begun.is_set)
            await run.cancel()
            assert await (await other.submit()).result(PATIENCE) == "other"
            begun.clear()
            again = await deaf.submit()
            await until(begun.is_set)
        assert ended == []
        assert await again.state() is ff.State.WAITING
        assert [attempt.attempt_index for attempt in await again.attempts()] == [0]
    finally:
        go.set()
    await until(lambda: len(ended) == 2)


async def test_synchronous_handlers_run_concurrently_and_the_loop_continues(app: ff.App) -> None:
    together = threading.Barrier(4)

    @app.task
    def plain() -> None:
        together.wait(PATIENCE)

    @app.task
    async def on_the_loop() -> None:
        await asyncio.to_thread(together.wait, PATIENCE)

    async with working(app, concurrency=4):
        runs = [*await plain.submit_many([()] * 3), await on_the_loop.submit()]
        for run in runs:
            await run.result(PATIENCE)


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_handler_that_never_yields_is_interrupted_after_the_grace(
    app: ff.App, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    options: Any = {"attempt_timeout": 0.3}
    if kind == "async":

        @app.task(**options)
        async def job() -> None:
            while True:
                pass
    else:

        @app.task(name="job", **options)
        def plain() -> None:
            while True:
                pass

    @app.task
    async def other() -> str:
        return "other"

    async with working(app, concurrency=1):
        run = await app.tasks["job"].submit()
        assert (await run.outcome(PATIENCE)).state is ff.State.EXPIRED
        assert await (await other.submit()).result(PATIENCE) == "other"


async def test_a_handler_that_holds_up_the_loop_is_named_with_the_line_it_is_at(
    app: ff.App, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_thread, "_STALLED_AFTER", 0.2)

    @app.task
    async def rude() -> None:
        time.sleep(1.5)

    async with working(app):
        run = await rude.submit()
        await run.result(PATIENCE)
        await until(lambda: "the event loop runs again" in caplog.text)
    assert f"execution {run.id} has blocked the worker's event loop" in caplog.text
    assert "time.sleep(1.5)" in caplog.text


async def test_sys_exit_in_a_handler_fails_the_execution_and_not_the_worker(app: ff.App) -> None:
    @app.task
    async def leave() -> None:
        sys.exit(3)

    @app.task
    def leave_plainly() -> None:
        raise KeyboardInterrupt

    async with working(app):
        for task, words in ((leave, "SystemExit"), (leave_plainly, "KeyboardInterrupt")):
            with pytest.raises(ff.TaskFailed, match=words):
                await (await task.submit()).result(PATIENCE)


# Processes


def square(n: int) -> int:
    return n * n


def vanish() -> None:
    os._exit(7)


def tell_and_stay(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_process_tasks_return_die_alone_and_are_killed_when_taken_away(app: ff.App, tmp_path: Path) -> None:
    squares = app.task(pool="process")(square)
    vanishes = app.task(pool="process")(vanish)
    stays = app.task(pool="process")(tell_and_stay)
    async with working(app, processes=1, grace=0.1):
        assert [await run.result(PATIENCE) for run in await squares.submit_many(range(5))] == [0, 1, 4, 9, 16]

        died = await vanishes.submit(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0)))
        with pytest.raises(ff.TaskFailed, match="exit code 7"):
            await died.result(PATIENCE)
        attempts = await died.attempts()
        assert len(attempts) == 2
        assert (await died.get()).failure_category == "child_died"
        assert await (await squares.submit(3)).result(PATIENCE) == 9

        for number, take in enumerate((revoke, cancel)):
            place = tmp_path / str(number)
            taken = await stays.submit(str(place), max_reclaims=0)
            await until(lambda place=place: place.exists() and place.read_text())  # type: ignore[misc]
            await take(app, taken, None)  # type: ignore[arg-type]
            await until(lambda place=place: not is_alive(int(place.read_text())))  # type: ignore[misc]
            assert (await taken.outcome(PATIENCE)).state in (ff.State.FAILED, ff.State.CANCELLED)
        assert await (await squares.submit(4)).result(PATIENCE) == 16

        last = tmp_path / "last"
        stopped = await stays.submit(str(last))
        await until(lambda: last.exists() and last.read_text())
    assert not is_alive(int(last.read_text()))
    assert await stopped.state() is ff.State.WAITING


# Stopping


async def test_a_worker_that_stops_lets_handlers_end_and_gives_the_rest_back_for_the_same_attempt(app: ff.App) -> None:
    begun: list[str] = []
    ended: list[str] = []

    @app.task
    async def job(ctx: ff.Context, seconds: float) -> str:
        begun.append(str(ctx.execution_id))
        if ctx.is_resumed:
            return "resumed"
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(str(ctx.execution_id))
        return "first"

    worker = ff.Worker(app, grace=0.5, concurrency=2)
    await worker.start()
    short, long, waits = [await job.submit(seconds) for seconds in (0.2, 3600, 0)]
    await until(lambda: len(begun) == 2)
    worker.stop()
    await worker.close()
    assert sorted(begun) == sorted(ended) == sorted([short.id, long.id])
    assert await short.result() == "first"
    assert await waits.state() is ff.State.WAITING
    assert await long.state() is ff.State.WAITING
    async with working(app):
        assert await long.result(PATIENCE) == "resumed"
        assert await waits.result(PATIENCE) == "first"
    assert [attempt.attempt_index for attempt in await long.attempts()] == [0]


async def test_executions_claimed_after_the_stop_are_given_back_unstarted(app: ff.App, calls: Calls) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    @app.task
    async def job(ctx: ff.Context) -> None:
        begun.append(ctx.execution_id)

    async def hold() -> None:
        asked.set()
        await go.wait()

    run = await job.submit()
    calls.before["claim_many"] = hold
    worker = ff.Worker(app)
    await worker.start()
    await asyncio.wait_for(asked.wait(), PATIENCE)
    worker.stop()
    closing = asyncio.ensure_future(worker.close())
    go.set()
    await closing
    assert begun == []
    assert await run.state() is ff.State.WAITING
    assert calls.counts["release"] == 1


async def test_a_handler_that_ignores_cancellation_does_not_keep_the_worker(
    app: ff.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flowfabric.worker.worker._STOP_GRACE", 0.1)
    begun, go = asyncio.Event(), asyncio.Event()

    @app.task
    async def deaf() -> str:
        begun.set()
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return "late"

    async with working(app, grace=0):
        run = await deaf.submit()
        await asyncio.wait_for(begun.wait(), PATIENCE)
    assert await run.state() is ff.State.WAITING
    assert "1 handler and 0 threads ignored the stop request" in caplog.text
    go.set()
    await asyncio.sleep(0.05)
    assert await run.state() is ff.State.WAITING


async def test_a_worker_that_cannot_start_leaves_nothing_open(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    @app.task
    async def job() -> None: ...

    def broken() -> int:
        raise ValueError("cannot be made")

    app.provide(int, broken)

    @app.task
    async def needs(n: ff.Data[int]) -> None: ...

    await app.close()
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="cannot be made"):
        await ff.Worker(app).run()

    async def is_left() -> bool:
        return bool(
            await sql.fetchval(
                "select count(*) = 0 from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and application_name = 'flowfabric'"
            )
        )

    await until_true(is_left)
    assert [thread for thread in set(threading.enumerate()) - before if "flowfabric" in thread.name] == []


async def test_a_worker_without_a_database_says_so_and_leaves_nothing_behind() -> None:
    app = ff.App("postgresql://nobody@127.0.0.1:1/nowhere")
    before = set(threading.enumerate())
    with pytest.raises(ConnectionFailed, match="cannot be reached"):
        await ff.Worker(app).run()
    assert [thread for thread in set(threading.enumerate()) - before if "flowfabric" in thread.name] == []


# Waking up


async def test_an_idle_worker_is_woken_by_a_submission(app: ff.App, calls: Calls) -> None:
    @app.task
    async def job(n: int) -> int:
        return n

    async with working(app, poll=600, duties=False) as worker:
        for number in range(3):
            await worker.idle()
            asked = calls.counts["claim_many"]
            assert await (await job.submit(number)).result(PATIENCE) == number
            assert calls.counts["claim_many"] - asked <= 4  # woken, not asking all the time


async def test_what_was_submitted_before_a_worker_announced_its_sleep_and_committed_after_is_found(
    app: ff.App, database: str, sql: asyncpg.Connection[Any]
) -> None:
    @app.task
    async def job() -> str:
        return "done"

    client = await app.client()
    transaction = sql.transaction()
    await transaction.start()
    submission = {"lane_id": "default", "execution_kind": job.name, "input_payload": b"{}"}
    made = await client.engine.create_execution(**submission, connection=sql)  # no worker sleeps yet
    watching = await asyncpg.connect(database)
    async with working(app, poll=600, duties=False):
        while not await watching.fetchval("select count(*) from flowfabric.sleeper where lane <> ''"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # for the look after the announcement
        await transaction.commit()
        assert await client.run(made.execution_id, kind=job.name).result(PATIENCE) == "done"
    await watching.close()


@pytest.mark.parametrize("notifications", [True, False])
async def test_a_worker_in_front_of_a_long_denied_backlog_asks_again_until_it_finds_work(
    database: str, sql: asyncpg.Connection[Any], notifications: bool
) -> None:
    """Each claim moves a thousand aside and takes nothing, until the one behind them."""
    app = ff.App(database, notifications=notifications)

    @app.task
    async def job() -> str:
        return "done"

    client = await app.client()
    engine = client.engine
    spent = (await engine.create_budget(name="spent", dimensions=["t"], hard_limits=[1], soft_limits=[0])).budget_id
    await engine.report_usage_admin(spent, dimensions=["t"], deltas=[1])
    denied = [NewExecution(execution_kind=job.name, policy=ExecutionPolicy(budget_ids=(spent,)))] * 1000
    for _ in range(7):
        await engine.create_many(denied)
    run = await job.submit()
    # A call ends after 200 ms, however fast the server is.
    await sql.execute("""
        create function public.slow() returns trigger language plpgsql as $$
        begin perform pg_sleep(0.21); return null; end $$;
        create trigger slow after insert on flowfabric.blocked for each statement execute function public.slow()""")
    async with working(app, poll=600, duties=False):
        assert await run.result(PATIENCE) == "done"
    assert await sql.fetchval("select count(*) from flowfabric.blocked") == 7000
    await app.close()


async def test_a_worker_in_front_of_a_damaged_budget_sleeps_and_is_woken_by_other_work(
    app: ff.App, sql: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def job() -> str:
        return "done"

    engine = (await app.client()).engine
    damaged = (await engine.create_budget(name="d", dimensions=["t"], hard_limits=[1], soft_limits=[0])).budget_id
    stuck = await job.options(budgets=["d"]).submit()
    await sql.execute("delete from flowfabric.budget_head")
    sleeping = "select count(*) from flowfabric.sleeper where lane <> ''"
    async with working(app, poll=600, duties=False):
        for _ in range(3):
            await until_true(lambda: sql.fetchval(sleeping))
            assert await (await job.submit()).result(PATIENCE) == "done"
        await engine.reset_budget(damaged)
        assert await stuck.result(PATIENCE) == "done"
    assert sum(f"budget {damaged}" in one.getMessage() for one in caplog.records) == 1, "reported once"


async def test_a_listener_whose_driver_is_confused_listens_again(app: ff.App, monkeypatch: pytest.MonkeyPatch) -> None:
    real, confused = asyncpg.Connection.add_listener, 2

    async def add_listener(*args: Any) -> None:
        nonlocal confused
        if confused:
            confused -= 1
            # As the driver does when the backend has ended and the connection does not know it yet.
            raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
        await real(*args)

    monkeypatch.setattr(asyncpg.Connection, "add_listener", add_listener)

    @app.task
    async def job() -> str:
        return "done"

    async with working(app, poll=600) as worker:
        await until(lambda: worker.engine.listener is not None and worker.engine.listener.connections)
        await worker.idle()
        assert await (await job.submit()).result(PATIENCE) == "done"
    assert confused == 0


async def test_a_worker_without_notifications_polls(database: str, sql: asyncpg.Connection[Any]) -> None:
    app = ff.App(database, notifications=False, prepared_statements=False)

    @app.task
    async def child(n: int) -> int:
        return n + 1

    @app.task
    async def job(n: int) -> int:
        return await (await child.submit(n)).result() * 2

    async with app, working(app, poll=0.05) as worker:
        await worker.idle()
        assert await (await job.submit(20)).result(PATIENCE) == 42
        listening = "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
        assert await sql.fetchval(listening) == 0


# Trouble


async def test_a_claim_that_fails_is_made_again_with_growing_pauses_and_words(
    app: ff.App, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def job() -> str:
        return "done"

    errors: list[Exception] = [TransportError("server_busy", "full"), KeyError("odd"), TransportError("other", "?")]

    async def fail() -> None:
        if errors:
            raise errors.pop(0)

    calls.before["claim_many"] = fail
    run = await job.submit()
    with caplog.at_level("INFO", "flowfabric.worker"):
        async with working(app):
            assert await run.result(PATIENCE) == "done"
    said = [record.getMessage() for record in caplog.records if "claim" in record.getMessage()]
    assert len(said) == 4
    assert said[0].startswith("a claim failed: server_busy: full; retrying in 0.")
    assert said[-1] == "claims work again"


async def test_results_the_database_refuses_for_a_moment_are_reported_later(
    app: ff.App, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def job(ctx: ff.Context, fails: bool) -> str:
        await ctx.step("step", asyncio.sleep, 0)
        if fails:
            raise ff.Reject("no")
        return "done"

    left = {"complete_many": 2, "fail_many": 2, "record_steps": 2}
    for method in left:

        async def fail(method: str = method) -> None:
            if left[method]:
                left[method] -= 1
                raise TransportError("transport", f"{method} is lost")

        calls.before[method] = fail
    async with working(app):
        good, bad = await job.submit(False), await job.submit(True)
        assert await good.result(PATIENCE) == "done"
        with pytest.raises(ff.TaskFailed, match="no"):
            await bad.result(PATIENCE)
    assert set(left.values()) == {0}
    assert len(await good.attempts()) == len(await bad.attempts()) == 1


async def test_a_handler_that_found_no_database_is_run_again_although_it_has_no_retries(
    app: ff.App, calls: Calls
) -> None:
    trouble = [TransportError("timeout", "hangs")]

    async def fail() -> None:
        if trouble:
            raise trouble.pop()

    calls.before["progress"] = fail

    @app.task
    async def job(ctx: ff.Context) -> int:
        await ctx.progress(50)
        return ctx.retry_count

    async with working(app):
        assert await (await job.submit()).result(PATIENCE) == 1
    assert not trouble


async def test_a_handler_that_asks_for_a_retry_gets_it_also_when_the_database_is_away_for_a_moment(
    app: ff.App, calls: Calls
) -> None:
    trouble = [TransportError("transport", "gone")]

    async def fail() -> None:
        if trouble:
            raise trouble.pop()

    calls.before["read_execution"] = fail

    @app.task
    async def job(ctx: ff.Context) -> int:
        if ctx.retry_count == 0:
            raise ff.RetryLater(after=0.01)
        return ctx.retry_count

    async with working(app):
        assert await (await job.submit()).result(PATIENCE) == 1
    assert not trouble


class Flaky(Middleware):
    """Loses calls and responses until the test stops it.

    Of every method the first call and the second answer are lost, so that each loss is met whatever the timing; the
    others at random.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._calls: collections.Counter[str] = collections.Counter()
        self.lost: collections.Counter[str] = collections.Counter()
        self.is_calm = False

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        if not self.is_calm:
            self._calls[method] += 1
        count = self._calls[method]
        if not self.is_calm and (count == 1 or self._random.random() < 0.1):
            self.lost[method] += 1
            raise TransportError("transport", f"{method}: the call was lost")
        answer = await proceed()
        if not self.is_calm and (count == 2 or self._random.random() < 0.1):
            self.lost[method] += 1
            raise TransportError("transport", f"{method}: the answer was lost")
        return answer


@pytest.mark.parametrize("seed", sampling.seeds(1, 2))
async def test_randomly_lost_calls_and_responses_change_nothing(
    database: str, plain_engine: ff.Engine, seed: int
) -> None:
    rng = random.Random(seed)
    flaky = Flaky(seed)
    app = ff.App(database, middleware=[flaky])

    @app.task
    async def child(n: int) -> int:
        return n

    async def act(n: int) -> int:
        await asyncio.sleep(rng.random() * 0.01)
        return n

    @app.task(retry=ff.RetryPolicy(max_retries=50, backoff=ff.Fixed(0.01)), max_reclaims=50)
    async def parent(ctx: ff.Context, n: int) -> int:
        first = await ctx.step("first", act, n)
        if n % 5 == 0 and ctx.retry_count == 0:
            raise ValueError("flaky")
        second = await (await child.submit(n)).result()
        await ctx.sleep(0.01)
        return first + second

    @app.task
    def plain(ctx: ff.SyncContext, n: int) -> int:
        return ctx.step("only", int, n)

    # Submitted by a client that does not lose anything.
    quiet = ff.App(database, name="quiet")
    for task in (parent, plain, child):
        quiet.tasks[task.name] = task
    client = await quiet.client()
    workers = [ff.Worker(app, concurrency=10, lease_ttl=1, poll=0.1) for _ in range(2)]
    flaky.is_calm = True
    for worker in workers:
        await worker.start()
    flaky.is_calm = False
    runs = [*await client.submit_many("parent", range(60)), *await client.submit_many("plain", range(60))]
    for n, run in enumerate(runs):
        assert await run.result(PATIENCE) == (2 * n if n < 60 else n - 60)
    flaky.is_calm = True
    for worker in workers:
        await worker.close()
        assert not worker.held
        assert not worker._running
    ended = collections.Counter(
        str(event.execution_id) for event in (await client.engine.read_events(family="completion", limit=10_000)).items
    )
    everything = [item async for item in client.all()]
    assert len(everything) == 60 + 60 + 60
    assert {ended[str(item.execution_id)] for item in everything} == {1}
    assert {"claim_many", "complete_many", "fail_many", "record_steps", "park", "submit_child"} <= flaky.lost.keys()
    await quiet.close()
    await app.close()


async def test_executions_taken_away_at_random_leave_nothing_behind_in_the_worker(
    app: ff.App, plain_engine: ff.Engine, sql: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(11)
    interrupted: list[str] = []

    @app.task
    async def on_the_loop(ctx: ff.Context, seconds: float) -> str:
        try:
            await ctx.step("wait", asyncio.sleep, seconds)
        except asyncio.CancelledError:
            interrupted.append("loop")
            raise
        return "done"

    @app.task
    def in_a_thread(ctx: ff.SyncContext, seconds: float) -> str:
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                time.sleep(0.001)
                ctx.step("tick", int) if rng.random() < 0.1 else None
        except ff.Interrupted:
            interrupted.append("thread")
            raise
        return "done"

    runs = [
        *await on_the_loop.submit_many([rng.random() * 0.1 for _ in range(150)]),
        *await in_a_thread.submit_many([rng.random() * 0.1 for _ in range(150)]),
    ]
    rng.shuffle(runs)
    taken: collections.Counter[str] = collections.Counter()
    async with working(app, concurrency=20, lease_ttl=600) as worker:
        by_id = {run.execution_id: run for run in runs}
        while await sql.fetchval("select exists (select from flowfabric.execution where completed_at is null)"):
            found = await sql.fetch("select id from flowfabric.execution where state = 'active' and lease_lost is null")
            for row in rng.sample(found, min(len(found), 3)):
                run = by_id[row["id"]]
                if rng.random() < 0.5:
                    with contextlib.suppress(ExecutionNotActive):  # it was quicker
                        await run.cancel()
                        taken["cancelled"] += 1
                else:
                    await plain_engine.revoke_lease(run.execution_id, reason="a test")
                    taken["revoked"] += 1
            await asyncio.sleep(0.01)
        await until(lambda: not worker.held and not worker._running)
    states = collections.Counter([str(await run.state()) for run in runs])
    assert set(states) <= {"completed", "cancelled", "failed"}  # failed: the lease was lost once too often
    assert set(interrupted) == {"loop", "thread"}
    assert min(taken["cancelled"], taken["revoked"]) > 10
    assert "the runtime failed" not in caplog.text


# Schedules


async def times_of(sql: asyncpg.Connection[Any], name: str = "job") -> list[datetime]:
    """The times for which a schedule has created executions."""
    found = await sql.fetch(
        "select (tags ->> 'schedule.time')::timestamptz as at from flowfabric.execution"
        " where tags ->> 'schedule.name' = $1 order by 1",
        name,
    )
    return [row["at"] for row in found]


async def set_clock(clock: Clock, to: datetime) -> None:
    await clock.advance(seconds=(to - await clock.now()).total_seconds())


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2031-{text}:00+00:00")


@pytest.fixture
async def timed(app: ff.App, clock: Clock) -> tuple[ff.App, ScheduleDuty]:
    """An app with a task, and the duty that a worker would run."""

    @app.task
    async def job() -> None: ...

    await set_clock(clock, at("06-01T09:30"))
    return app, ScheduleDuty((await app.client()).engine)


async def declared(app: ff.App, **timing: Any) -> None:
    app.declared.clear()
    app.schedule(app.tasks["job"], **timing)
    await declare((await app.client()).engine, app)


@pytest.mark.parametrize(
    ("catch_up", "made"),
    [
        ("skip", []),
        ("one", [at("06-01T12:00")]),
        ("all", [at("06-01T10:00"), at("06-01T11:00"), at("06-01T12:00")]),
    ],
)
async def test_missed_times_are_made_up_for_as_catch_up_says(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock, catch_up: str, made: list[datetime]
) -> None:
    app, duty = timed
    await declared(app, cron="0 * * * *", catch_up=catch_up)
    assert await duty.run_once() == 0
    await set_clock(clock, at("06-01T12:20"))
    assert await duty.run_once() == len(made)
    assert await duty.run_once() == 0
    assert await times_of(sql) == made
    await set_clock(clock, at("06-01T13:00"))
    await duty.run_once()
    assert await times_of(sql) == [*made, at("06-01T13:00")]


async def test_a_backlog_larger_than_one_call_takes_is_worked_off_in_order(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    app, duty = timed
    await declared(app, every=60, catch_up="all")
    await set_clock(clock, at("06-02T09:30"))
    rounds = [await duty.run_once() for _ in range(3)]
    assert rounds == [1000, 440, 0]
    times = await times_of(sql)
    assert times == [at("06-01T09:31") + timedelta(minutes=n) for n in range(1440)]


async def test_a_schedule_follows_the_clock_of_its_zone_over_the_change_to_summer_time(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    app, duty = timed
    await set_clock(clock, at("03-28T12:00"))
    await declared(app, cron="30 2 * * *", timezone="Europe/Berlin")
    # In the night to 30 March 2031 the clock jumps from 02:00 to 03:00: 02:30 is made up for at the jump, 01:00 UTC.
    for day, hour in (("29", "01:30"), ("30", "01:00"), ("31", "00:30")):
        await set_clock(clock, at(f"03-{day}T{hour}"))
        assert await duty.run_once() == 1
        assert (await times_of(sql))[-1] == at(f"03-{day}T{hour}")


async def test_a_paused_schedule_does_not_fire_until_it_is_resumed(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    app, duty = timed
    client = await app.client()
    await declared(app, cron="0 * * * *", catch_up="one")
    await client.pause_schedule("job")
    await declared(app, cron="0 * * * *", catch_up="one")  # another worker starts
    await set_clock(clock, at("06-01T12:20"))
    assert await duty.run_once() == 0
    assert await client.engine.until_next_schedule() is None
    await client.resume_schedule("job")
    assert await duty.run_once() == 1
    assert await times_of(sql) == [at("06-01T12:00")]


async def test_a_changed_timing_is_taken_over_and_an_unchanged_one_keeps_its_times(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    app, duty = timed
    await declared(app, cron="0 * * * *", catch_up="all")
    await set_clock(clock, at("06-01T11:20"))
    await declared(app, cron="0 * * * *", catch_up="all")
    assert await duty.run_once() == 2
    await declared(app, cron="30 * * * *", catch_up="all")
    await set_clock(clock, at("06-01T12:10"))
    assert await duty.run_once() == 1
    assert await times_of(sql) == [at("06-01T10:00"), at("06-01T11:00"), at("06-01T11:30")]


@pytest.mark.parametrize("what", ["delete_schedule", "pause_schedule", "fired"])
async def test_changes_between_reading_and_firing_are_respected(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock, what: str
) -> None:
    app, _ = timed
    engine = (await app.client()).engine
    await declared(app, cron="0 * * * *")
    await set_clock(clock, at("06-01T10:00"))
    (due,) = await engine.due_schedules()
    if what == "fired":
        assert await fire(engine, due) == 1
    else:
        await getattr(engine, what)("job")
    assert await fire(engine, due) == 0
    assert len(await times_of(sql)) == (1 if what == "fired" else 0)
    if what == "delete_schedule":
        assert await engine.read_schedule("job") is None
        with pytest.raises(ff.NotFound):
            await engine.delete_schedule("job")


@pytest.mark.parametrize(("ending", "theirs"), [("commit", 0), ("rollback", 1)])
async def test_of_two_workers_that_fire_at_the_same_moment_one_does(
    timed: tuple[ff.App, ScheduleDuty],
    database: str,
    sql: asyncpg.Connection[Any],
    clock: Clock,
    ending: str,
    theirs: int,
) -> None:
    app, _ = timed
    await declared(app, cron="0 * * * *")
    await set_clock(clock, at("06-01T10:00"))
    first, second = [await Party.join(database) for _ in range(2)]
    try:
        dues = [(await party.due_schedules())[0] for party in (first, second)]
        await first.begin()
        assert await fire(first, dues[0]) == 1
        behind = await waiting(sql, second, fire(second, dues[1]), behind=first)
        await first.end(ending)
        assert await behind == theirs
    finally:
        await first.close()
        await second.close()
    assert await times_of(sql) == [at("06-01T10:00")]
    schedule = await (await app.client()).engine.read_schedule("job")
    assert schedule is not None
    assert schedule.next_at == at("06-01T11:00")


async def test_a_schedule_that_cannot_fire_does_not_hold_up_the_others(
    timed: tuple[ff.App, ScheduleDuty], sql: asyncpg.Connection[Any], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    app, duty = timed
    await declared(app, name="good", cron="0 * * * *")
    for name in ("a bad one", "bad too", "closed"):
        await declared(app, name=name, cron="0 * * * *")
    await sql.execute(
        'update flowfabric.schedule set timing = \'{"cron": "0 * * * *", "timezone": "Mars"}\''
        " where name = 'a bad one'"
    )
    await sql.execute("update flowfabric.schedule set options = '[]' where name = 'bad too'")
    await sql.execute("update flowfabric.schedule set options = '{\"lane_id\": \"shut\"}' where name = 'closed'")
    await (await app.client()).set_lane_state("shut", "disabled")
    await set_clock(clock, at("06-01T10:00"))
    assert await duty.run_once() == 1
    assert await times_of(sql, "good") == [at("06-01T10:00")]
    await duty.run_once()
    for name in ("a bad one", "bad too", "closed"):
        assert caplog.text.count(f"schedule {name}:") == 1
    assert await duty.until_next() == 1.0  # what fails is looked at again, but not all the time


async def test_workers_fire_a_declared_schedule_once_per_time_and_run_it(
    app: ff.App, sql: asyncpg.Connection[Any]
) -> None:
    ran: list[str] = []

    @app.task
    async def tick(ctx: ff.Context, word: str) -> None:
        ran.append(ctx.tags["schedule.time"])

    app.schedule(tick, "again", every=1, catch_up="all")
    async with working(app), working(app), working(app):
        await until(lambda: len(ran) >= 3)
    times = await times_of(sql, "tick")
    assert len(times) == len(set(times)) >= 3
    assert times == [times[0] + timedelta(seconds=n) for n in range(len(times))]
    assert len(ran) == len(set(ran))


async def test_a_worker_leaves_the_loop_as_it_found_it(app: ff.App) -> None:
    loop = asyncio.get_running_loop()

    def mine(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(mine)  # type: ignore[arg-type]
    try:
        async with ff.Worker(app):
            assert loop.get_task_factory() is not mine
            async with ff.Worker(app):
                pass
            assert loop.get_task_factory() is not mine, "the first one still needs its own"
        assert loop.get_task_factory() is mine
    finally:
        loop.set_task_factory(None)


async def test_connections_that_are_not_needed_are_given_back(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric._postgres.connections._UNUSED", 0.1)
    async with await ff.Engine.connect(database, max_size=6, notifications=False) as engine:
        await asyncio.gather(*(engine.ping() for _ in range(6)))
        pool = engine._database._pool
        async with asyncio.timeout(PATIENCE):
            while len(pool._open) > 1:
                await asyncio.sleep(0.05)
                await engine.ping()
        await asyncio.gather(*(engine.ping() for _ in range(6)))
