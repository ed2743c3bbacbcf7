"""Handlers that are run again: recorded results return in their order, so that unchanged code takes the same steps.

And what a changed handler may hide behind: waits beside it, threads, old names, patches.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.testing import Kit
from tests.each import each
from tests.integration.conftest import Ledger
from tests.integration.test_changed_code import Deploys

SECONDS = (0.03, 0.02, 0.01)  # the last one is done first
Body = Callable[[ff.Context], Awaitable[Any]]


async def _fetch(number: int) -> int:
    await asyncio.sleep(SECONDS[number])
    return number


async def _as_completed(ctx: ff.Context) -> None:
    fetches = [asyncio.create_task(ctx.step(f"fetch {n}", _fetch, n)) for n in range(3)]
    for done in asyncio.as_completed(fetches):
        number = await done
        await ctx.step(f"store {number}", str, number)


async def _lock(ctx: ff.Context) -> None:
    lock = asyncio.Lock()

    async def one(number: int) -> None:
        await ctx.step(f"fetch {number}", _fetch, number)
        async with lock:
            await ctx.step(f"store {number}", _fetch, number)

    await asyncio.gather(*(one(number) for number in range(3)))


async def _semaphore(ctx: ff.Context) -> None:
    lock = asyncio.Semaphore(1)

    async def one(number: int) -> None:
        await ctx.step(f"fetch {number}", _fetch, number)
        async with lock:
            await ctx.step(f"store {number}", _fetch, number)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(one(number))


async def _queue(ctx: ff.Context) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def one(number: int) -> None:
        await queue.put(await ctx.step(f"fetch {number}", _fetch, number))

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(one(number))
        for _ in range(3):
            number = await queue.get()
            await ctx.step(f"store {number}", str, number)


async def _one_name(ctx: ff.Context) -> None:
    """Which use of the name is whose depends on the order in which the branches come to it."""

    async def one(number: int) -> None:
        await ctx.step(f"fetch {number}", _fetch, number)
        await ctx.step(f"check {number}", _fetch, (number + 1) % 3)
        for n in range(2):
            assert await ctx.step("store", str, 10 * number + n) == str(10 * number + n)

    await asyncio.gather(*(one(number) for number in range(3)))


async def _timeout(ctx: ff.Context) -> None:
    try:
        async with asyncio.timeout(0.02):
            await ctx.step("slow", asyncio.sleep, 60)
    except TimeoutError:
        await ctx.step("fallback", str, 1)
    await ctx.step("end", str, 2)


@each("body", [_as_completed, _lock, _semaphore, _queue, _one_name, _timeout])
async def test_branches_that_meet_take_their_steps_in_the_same_order_again(kit: Kit, body: Body) -> None:
    app = ff.App("postgresql://nobody@nowhere/nothing")

    @app.task(name=body.__name__)
    async def job(ctx: ff.Context) -> str:
        await body(ctx)
        await ctx.step("after", str, 3)
        return "done"

    report = await kit.crash_everywhere(job)
    assert report.result == "done"
    if body is not _timeout:  # a step that was cut off starts again in every run
        with kit.replay_always():
            assert await kit.run_inline(job) == "done"


async def test_a_retry_after_an_error_of_the_handler_itself_may_take_other_steps(kit: Kit, kit_app: ff.App) -> None:
    tries: list[int] = []

    @kit_app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0))))
    async def job(ctx: ff.Context) -> str:
        await ctx.step("reserve", str, 1)
        try:
            tries.append(1)
            if len(tries) == 1:
                raise ConnectionError("no step has failed")
            await ctx.step("charge", str, 2)
        except ConnectionError:
            await ctx.step("release", str, 3)
            raise
        return "done"

    @kit_app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0))))
    def plain(ctx: ff.SyncContext) -> str:
        ctx.step("reserve", str, 1)
        try:
            tries.append(1)
            if len(tries) == 1:
                raise ConnectionError("no step has failed")
            ctx.step("charge", str, 2)
        finally:
            if len(tries) == 1:
                ctx.step("release", str, 3)
        return "done"

    assert await kit.run_inline(job) == "done"
    tries.clear()
    assert await kit.run_inline(plain) == "done"


async def test_threads_of_a_synchronous_handler_take_their_steps_in_any_order(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    def job(ctx: ff.SyncContext) -> str:
        first = threading.Event()

        def one(number: int) -> None:
            if number == 0 and not first.is_set():
                first.wait(0.02)
            ctx.step(f"part {number}", str, number)
            first.set()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(one, range(2)))
        ctx.step("end", str, 2)
        return "done"

    assert (await kit.crash_everywhere(job)).result == "done"


# ---- what a changed handler may hide behind


def _beside(did: Ledger, name: str, beside: Callable[[ff.Context], Awaitable[Any]]) -> Body:
    async def job(ctx: ff.Context) -> str:
        other = asyncio.create_task(beside(ctx))  # type: ignore[arg-type]  # a coroutine
        await ctx.step(name, did.entry(name))
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        other.cancel()
        return "done"

    return job


async def _an_open_wait(ctx: ff.Context) -> None:
    await ctx.wait_for("stop order")


async def _a_wait_with_a_timeout(ctx: ff.Context) -> None:
    await ctx.wait_for("stop order", timeout=timedelta(days=1))


async def _a_waitpoint(ctx: ff.Context) -> None:
    await (await ctx.waitpoint("stop order")).wait()


@each("beside", [_an_open_wait, _a_wait_with_a_timeout, _a_waitpoint])
async def test_a_changed_handler_stops_though_another_branch_asks_the_database(database: str, beside: Any) -> None:
    deploys, did = Deploys(database), Ledger()
    first, changed = _beside(did, "mail", beside), _beside(did, "send mail", beside)
    await deploys.run(first)
    assert await deploys.run(changed, signal=True) == "stopped"
    assert did == ["mail"]
    assert await deploys.run(first, fits=True) == "completed"
    assert did == ["mail", "pay"]


def _mapping(did: Ledger, name: str, count: int) -> Any:
    def job(ctx: ff.SyncContext) -> str:
        ctx.map(did.append, [f"{name} {n}" for n in range(count)], name=name, limit=2)
        ctx.wait_for("ok")
        ctx.step("end", did.entry("end"))
        return "done"

    return job


@each(("name", "count"), [("mails", 2), ("mail", 3)])
async def test_a_changed_map_of_a_synchronous_handler_stops(database: str, name: str, count: int) -> None:
    deploys, did = Deploys(database), Ledger()
    assert await deploys.run(_mapping(did, "mail", 2)) == "suspended"
    assert await deploys.run(_mapping(did, name, count), signal=True) == "stopped"
    assert sorted(did) == ["mail 0", "mail 1"]
    assert await deploys.run(_mapping(did, "mail", 2), fits=True) == "completed"
    assert sorted(did) == ["end", "mail 0", "mail 1"]


async def test_an_old_name_that_another_step_has_is_refused(kit: Kit, kit_app: ff.App, did: Ledger) -> None:
    @kit_app.task
    async def job(ctx: ff.Context) -> None:
        await asyncio.gather(
            ctx.step("refund card", did.entry("card"), was="refund"), ctx.step("refund", did.entry("cash"))
        )

    with pytest.raises(ff.TaskFailed, match="'refund' is also the name of another step of this handler"):
        await kit.run_inline(job)


def _approved(did: Ledger, mail: bool, approval: bool) -> Body:
    async def job(ctx: ff.Context) -> str:
        if mail:
            await ctx.step("mail", did.entry("mail"))
        if approval:
            await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


async def test_a_wait_that_ended_during_a_diverged_run_is_still_compared(database: str, did: Ledger) -> None:
    deploys = Deploys(database)
    assert await deploys.run(_approved(did, True, True)) == "suspended"
    assert await deploys.run(_approved(did, False, True), signal=True) == "stopped"
    async with await ff.Engine.connect(database, notifications=False) as engine:
        await engine.unblock_execution(deploys.id)
    assert await deploys.run(_approved(did, True, False)) == "stopped"
    assert "wait 'ok'" in (deploys.info.blocking_detail or "")
    async with await ff.Engine.connect(database, notifications=False) as engine:
        await engine.unblock_execution(deploys.id)
    assert await deploys.run(_approved(did, True, True), fits=True) == "completed"
    assert did == ["mail", "pay"]


async def test_the_branch_that_a_diverged_run_took_at_a_patch_is_forgotten(database: str, did: Ledger) -> None:
    deploys = Deploys(database)

    def code(mail: str) -> Body:
        async def job(ctx: ff.Context) -> str:
            await ctx.step(mail, did.entry(mail))
            await ctx.wait_for("ok")
            if await ctx.patched("tax"):
                await ctx.step("tax", did.entry("tax"))
            return "done"

        return job

    async def job(ctx: ff.Context) -> str:
        assert not await ctx.patched("tax")
        await ctx.step("letter", did.entry("letter"))
        return "done"

    assert await deploys.run(code("mail")) == "suspended"
    assert await deploys.run(job, signal=True) == "stopped"
    assert await deploys.run(code("mail"), fits=True) == "completed"
    assert did == ["mail", "tax"]


async def test_a_new_execution_takes_the_new_branch_though_another_branch_is_slow(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def job(ctx: ff.Context) -> bool:
        async def slow() -> None:
            await asyncio.to_thread(threading.Event().wait, 0.05)
            await ctx.step("report", str, 1)

        async with asyncio.TaskGroup() as group:
            group.create_task(slow())
            await ctx.step("first", str, 1)
            await asyncio.sleep(0.1)
            return await ctx.patched("tax")

    with kit.crash_after("report"):
        assert await kit.run_inline(job) is True
