"""Tasks that submit tasks and wait for them: once over crashes, without a worker, and with nothing lost in between."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.client import outcomes as watching
from flowfabric.errors import Conflict, Purged
from flowfabric.testing import Kit
from flowfabric.worker.durable import parking
from tests.support import end_sleeps

PATIENCE = 60.0
"""Seconds after which what should have happened counts as missing. Nothing waits this long when all is well."""
DAY = timedelta(days=1)
ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0)))


def worker(app: ff.App, **options: Any) -> ff.Worker:
    return ff.Worker(app, **{"grace": 5, "poll": 0.5, **options})


async def result(run: ff.Run[Any]) -> Any:
    return await asyncio.wait_for(run.result(), PATIENCE)


async def until_state(run: ff.Run[Any], state: ff.State) -> None:
    async with asyncio.timeout(PATIENCE):
        while await run.state() is not state:
            await asyncio.sleep(0.005)


async def children_of(app: ff.App, kind: str = "child") -> list[Any]:
    client = await app.client()
    return [item async for item in client.all(kind=kind)]


# ---- once


async def test_a_child_is_submitted_once_even_if_the_parent_crashes(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def child(n: int) -> int:
        return n * 2

    @kit_app.task
    async def parent(ctx: ff.Context) -> list[int]:
        runs = [await child.submit(n) for n in range(3)]
        await ctx.step("between", lambda: None)
        return [await run.result() for run in runs]

    report = await kit.crash_everywhere(parent)
    assert report.result == [0, 2, 4]
    engine = await kit.engine()
    found = await engine.find_executions(kinds=["child"])
    assert len(found.items) == 3 * report.runs


async def test_what_a_thread_of_the_handler_submits_is_remembered_and_a_child(kit: Kit, kit_app: ff.App) -> None:
    ran = []

    @kit_app.task
    async def child(n: int) -> int:
        ran.append(n)
        return n

    @kit_app.task
    def plain(ctx: ff.SyncContext) -> None:
        def grow(n: int) -> None:
            flow = kit_app.flow("twigs")
            flow.add(child, n)
            ctx.submit_flow(flow)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda n: ctx.submit(child, n), [1, 2]))
            list(threads.map(grow, [3]))
        ctx.wait_for("go")

    @kit_app.task
    async def inner(ctx: ff.Context) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(ctx.submit(child, 4), loop).result())
        await loop.run_in_executor(None, lambda: asyncio.run_coroutine_threadsafe(ctx.submit(child, 5), loop).result())
        await ctx.wait_for("go")

    kit.use(kit_app)
    for task, expected in ((plain, [1, 2, 3]), (inner, [4, 5])):
        run = await task.submit()
        await kit.run_all()
        await run.signal("go")
        await kit.run_until_ended(run)
        assert sorted(ran) == expected
        assert len(await run.children()) == len(expected)
        ran.clear()


async def test_a_thread_that_outlives_its_handler_submits_nothing(kit: Kit, kit_app: ff.App) -> None:
    ended = threading.Event()
    raised: list[BaseException] = []

    @kit_app.task
    async def child(n: int) -> int:
        return n

    @kit_app.task
    def parent(ctx: ff.SyncContext) -> None:
        def late() -> None:
            ended.wait(PATIENCE)
            try:
                ctx.submit(child, 1)
            except BaseException as error:
                raised.append(error)

        threads.append(threading.Thread(target=late))
        threads[0].start()

    threads: list[threading.Thread] = []
    kit.use(kit_app)
    async with kit.worker(kit_app):
        run = await parent.submit()
        await result(run)
        ended.set()
        await asyncio.to_thread(threads[0].join, PATIENCE)
    assert len(raised) == 1
    assert await children_of(kit_app) == []


async def test_a_handler_that_submits_with_its_own_client_is_warned_about(
    app: ff.App, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    def parent(ctx: ff.SyncContext) -> None:
        with ff.Client(app) as client:
            client.submit(child, 1)
            client.submit(child, 2)
            client.submit(child.options(idempotency_key="k"), 3)
        with ff.Client(ff.App(database)) as client:
            ctx.step("inside", lambda: client.submit(child, 4).id)

    async with ff.Worker(app):
        await result(await parent.submit())
    warned = [record.getMessage() for record in caplog.records if record.name == "flowfabric.client"]
    assert warned == [
        "the handler of parent submits child with a client of its own, which is not remembered when the handler is run"
        " again; use ctx.submit, or an idempotency key"
    ]


async def test_a_retry_of_the_parent_finds_its_children(app: ff.App, did: list[str]) -> None:
    @app.task
    async def child(n: int) -> int:
        did.append(f"child {n}")
        return n

    @app.task(retry=ONCE)
    async def parent(ctx: ff.Context) -> int:
        total = sum([await (await child.submit(n)).result() for n in range(2)])
        if ctx.retry_count == 0:
            raise ValueError("once more")
        return total

    async with worker(app):
        assert await result(await parent.submit()) == 1
    assert did == ["child 0", "child 1"]


async def test_a_replayed_success_submits_again_and_a_replayed_failure_does_not(app: ff.App) -> None:
    fails = [True]

    @app.task
    async def child() -> None:
        pass

    @app.task
    async def parent() -> str:
        await (await child.submit()).result()
        if fails[0]:
            raise ValueError("boom")
        return "done"

    async with worker(app):
        run = await parent.submit()
        with pytest.raises(ff.TaskFailed):
            await result(run)
        fails[0] = False
        await run.replay()
        assert await result(run) == "done"
        assert len(await children_of(app)) == 1
        await run.replay()
        await until_state(run, ff.State.COMPLETED)
        assert len(await children_of(app)) == 2


async def test_every_way_to_submit_inside_a_task_is_durable(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    @kit_app.task
    async def child(n: int) -> int:
        return n

    @kit_app.task
    async def parent(ctx: ff.Context) -> list[int]:
        client = await kit_app.client()
        runs = [
            await child.submit(1),
            await ctx.submit(child, 2),
            await client.submit(child, 3),
            await client.submit("child", 4),
            await child.options(priority=5).submit(5),
            *await child.submit_many([6, 7]),
        ]
        did.append("submitted")
        await ctx.sleep(DAY)
        return [await run.result() for run in runs]

    run = await parent.submit()
    assert await kit.run_until_ended(run) == [1, 2, 3, 4, 5, 6, 7]
    assert len(await children_of(kit_app)) == 7
    creators = {
        (await (await kit_app.client()).get(item.execution_id)).creator_identity for item in await children_of(kit_app)
    }
    assert len(did) > 1
    assert creators == {str(run.execution_id)}
    submitted = [step for step in await run.steps() if step.kind == "submit"]
    assert [(step.name, step.n) for step in submitted] == [("submit child", n) for n in range(7)]


async def test_whether_a_child_was_new_is_remembered_too(kit: Kit, kit_app: ff.App) -> None:
    said: list[list[bool]] = []

    @kit_app.task
    async def child() -> None:
        pass

    @kit_app.task
    async def parent(ctx: ff.Context) -> None:
        said.append([(await child.submit(idempotency_key=key)).is_new for key in ("a", "b", "a")])
        await ctx.sleep(DAY)

    await child.submit(idempotency_key="b")
    await kit.run_inline(parent)
    assert len(await children_of(kit_app)) == 2
    assert said == [[True, False, False]] * len(said) and len(said) > 1


async def test_a_wrong_argument_fails_in_the_parent_and_stores_nothing(app: ff.App) -> None:
    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent() -> str:
        try:
            await child.submit("five")  # type: ignore[arg-type]
        except ff.InvalidInput as error:
            return str(error)
        return ""

    async with worker(app):
        run = await parent.submit()
        assert "n" in await result(run)
        assert await children_of(app) == []
    assert await run.steps() == []


async def test_a_closed_lane_fails_in_the_parent_and_is_not_remembered(app: ff.App) -> None:
    @app.task(lane="side")
    async def child() -> int:
        return 5

    @app.task(retry=ONCE)
    async def parent(ctx: ff.Context) -> int:
        if ctx.retry_count:
            await (await app.client()).set_lane_state("side", "active")
        return await (await child.submit()).result()

    async with worker(app, lanes=["default", "side"]) as one:
        await one.engine.set_lane_state("side", "disabled")
        assert await result(await parent.submit()) == 5
        assert len(await children_of(app)) == 1


# ---- waiting


async def test_a_parent_holds_no_worker_while_it_waits(app: ff.App) -> None:
    """One slot for a chain of ten: were one of them to keep it, nothing would ever end."""

    @app.task
    async def chain(n: int) -> int:
        return 0 if n == 0 else 1 + await (await chain.submit(n - 1)).result()

    @app.task
    def plain_chain(ctx: ff.SyncContext, n: int) -> int:
        return 0 if n == 0 else 1 + ctx.submit(plain_chain, n - 1).result()

    async with worker(app, concurrency=1):
        assert await result(await chain.submit(10)) == 10
        assert await result(await plain_chain.submit(10)) == 10


@pytest.mark.parametrize("concurrency", [1, 10])
async def test_fifty_children_at_once(app: ff.App, did: list[str], concurrency: int) -> None:
    @app.task
    async def child(n: int) -> int:
        did.append("child")
        return n

    @app.task
    async def parent(ctx: ff.Context) -> int:
        async def one(n: int) -> int:
            return await (await child.submit(n)).result()

        return sum(await asyncio.gather(*(one(n) for n in range(50))))

    async with worker(app, concurrency=concurrency):
        assert await result(await parent.submit()) == sum(range(50))
    assert len(did) == 50


async def test_a_bounded_fan_out_parks_too(app: ff.App) -> None:
    """A semaphore of the handler's own does not keep the slot its children need."""

    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent() -> int:
        limit = asyncio.Semaphore(3)

        async def one(n: int) -> int:
            async with limit:
                return await (await child.submit(n)).result()

        return sum(await asyncio.gather(*(one(n) for n in range(9))))

    async with worker(app, concurrency=1):
        assert await result(await parent.submit()) == 36


async def test_children_in_a_group_and_one_after_another(app: ff.App) -> None:
    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent() -> list[int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task((await child.submit(n)).result()) for n in range(3)]
        return [*(task.result() for task in tasks), *[await (await child.submit(n)).result() for n in (3, 4)]]

    async with worker(app, concurrency=1):
        assert await result(await parent.submit()) == [0, 1, 2, 3, 4]


async def test_grandchildren(app: ff.App) -> None:
    @app.task
    async def leaf(n: int) -> int:
        return n

    @app.task
    async def branch(n: int) -> int:
        return sum(await asyncio.gather(*[run.result() for run in await leaf.submit_many([n, n])]))

    @app.task
    async def root() -> int:
        return sum(await asyncio.gather(*[run.result() for run in await branch.submit_many(range(5))]))

    async with worker(app, concurrency=2):
        assert await result(await root.submit()) == 20


async def test_the_first_of_two_is_enough(app: ff.App, did: list[str]) -> None:
    slow = asyncio.Event()

    @app.task
    async def child(n: int) -> int:
        if n:
            await slow.wait()
        return n

    @app.task
    async def race() -> int:
        tasks = [asyncio.create_task((await child.submit(n)).result()) for n in (1, 0)]
        finished, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        return finished.pop().result()

    async with worker(app):
        assert await result(await race.submit()) == 0
        slow.set()


async def test_waiting_with_a_timeout_is_durable(app: ff.App) -> None:
    slow = asyncio.Event()

    @app.task
    async def child() -> str:
        await slow.wait()
        return "late"

    @app.task
    async def parent(ctx: ff.Context) -> list[str]:
        run = await child.submit()
        said = []
        try:
            await run.result(timeout=0.1)
        except ff.TimedOut:
            said.append("timed out")
        await ctx.step("give up waiting", slow.set)
        await ctx.sleep(0.03)
        return [*said, await run.result()]

    async with worker(app):
        assert await result(await parent.submit()) == ["timed out", "late"]


# ---- how children end


class Broke(Exception):
    pass


@pytest.mark.parametrize("plain", [False, True])
async def test_a_failed_child_raises_in_the_parent_and_is_remembered(
    kit: Kit, kit_app: ff.App, did: list[str], plain: bool
) -> None:
    @kit_app.task
    async def child() -> None:
        did.append("child")
        raise Broke("no money")

    said: list[tuple[Any, ...]] = []

    def note(error: ff.TaskFailed) -> str:
        said.append((error.kind, error.error_type, error.message, "Broke" in (error.traceback or "")))
        return error.message

    if plain:

        @kit_app.task
        def parent(ctx: ff.SyncContext) -> str:
            run = ctx.submit(child)
            try:
                run.result()
            except ff.TaskFailed as error:
                message = note(error)
                ctx.sleep(DAY)
                return message
            return ""
    else:

        @kit_app.task
        async def parent(ctx: ff.Context) -> str:
            run = await child.submit()
            try:
                await run.result()
            except ff.TaskFailed as error:
                message = note(error)
                await ctx.sleep(DAY)
                return message
            return ""

    assert await kit.run_inline(parent) == "no money"
    assert did == ["child"]
    assert said == [("failed", f"{__name__}.Broke", "no money", True)] * 2


async def test_a_retried_parent_checks_a_failed_child_again(app: ff.App, did: list[str]) -> None:
    """A child that was replayed meanwhile counts; its earlier failure is not final."""
    repaired = asyncio.Event()

    @app.task
    async def child() -> str:
        did.append("child")
        if not repaired.is_set():
            raise Broke("no money")
        return "paid"

    @app.task
    async def parent() -> str:
        return await (await child.submit()).result()

    async with worker(app):
        run = await parent.submit()
        with pytest.raises(ff.TaskFailed):
            await result(run)
        repaired.set()
        (item,) = await children_of(app)
        again = child.run(item.execution_id)
        await again.replay()
        assert await result(again) == "paid"
        await run.replay()
        assert await result(run) == "paid"
    assert did == ["child", "child"]


async def test_a_cancelled_child_raises_in_the_parent(app: ff.App) -> None:
    @app.task
    async def child() -> None:
        await asyncio.Event().wait()

    @app.task
    async def parent() -> str:
        try:
            await (await child.submit()).result()
        except ff.TaskFailed as error:
            return f"{error.kind}: {error.message}"
        return ""

    async with worker(app):
        run = await parent.submit()
        await until_state(run, ff.State.WAITING_CHILDREN)
        (item,) = await children_of(app)
        await child.run(item.execution_id).cancel("not needed")
        assert await result(run) == "cancelled: not needed"


async def test_the_recorded_result_of_a_child_outlives_it(app: ff.App, database: str) -> None:
    ready = asyncio.Event()

    @app.task
    async def child() -> int:
        return 5

    @app.task
    async def parent(ctx: ff.Context) -> int:
        run = await child.submit()
        value = await run.result()
        ready.set()
        await ctx.sleep(0.3)
        return value + await run.result()

    @app.task
    async def too_late(ctx: ff.Context) -> str:
        run = await child.submit(detached=True)
        await ctx.sleep(3600)
        try:
            await run.result()
        except Purged as error:
            return error.kind
        return ""

    async with worker(app) as one:
        run = await parent.submit()
        await asyncio.wait_for(ready.wait(), PATIENCE)
        (item,) = await children_of(app)
        await one.engine.delete_execution(item.execution_id)
        assert await result(run) == 10
        late = await too_late.submit()
        await until_state(late, ff.State.DELAYED)
        async with asyncio.timeout(PATIENCE):
            while not (found := await children_of(app)) or found[0].public_state is not ff.State.COMPLETED:
                await asyncio.sleep(0.005)
        await one.engine.delete_execution(found[0].execution_id)
        await end_sleeps(database)
        assert await result(late) == "purged"


async def test_cancelling_a_parent_cancels_its_children(app: ff.App) -> None:
    over = asyncio.Event()
    stopped = asyncio.Event()

    @app.task
    async def grandchild() -> int:
        try:
            await over.wait()
        finally:
            stopped.set()
        return 5

    @app.task
    async def child() -> int:
        return await (await grandchild.submit()).result()

    @app.task
    async def parent() -> int:
        flow = app.flow("below")
        flow.add(child)
        return (await (await flow.submit()).result())["child"]

    async with worker(app):
        run = await parent.submit()
        async with asyncio.timeout(PATIENCE):
            while not (below := await children_of(app, "grandchild")) or below[0].public_state is not ff.State.ACTIVE:
                await asyncio.sleep(0.005)
        await run.cancel("enough")
        await asyncio.wait_for(stopped.wait(), PATIENCE)
        await until_state(grandchild.run(str(below[0].execution_id)), ff.State.CANCELLED)
        (member,) = await children_of(app)
        await until_state(child.run(str(member.execution_id)), ff.State.CANCELLED)
        found = await (await app.client()).get(below[0].execution_id)
        assert (found.cancelled_by, found.parent_id) == ("parent", member.execution_id)
        assert await run.state() is ff.State.CANCELLED


async def test_a_parent_and_its_children_are_found_from_each_other(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def child(n: int) -> int:
        return n

    @kit_app.task
    async def parent() -> list[Any]:
        runs = [await child.submit(1), await child.submit(2, detached=True)]
        flow = kit_app.flow("pair")
        flow.map(child, [3, 4])
        loose = kit_app.flow("loose")
        loose.add(child, 5)
        found = [await run.result() for run in runs]
        found += (await (await flow.submit()).result()).values()
        return found + list((await (await loose.submit(detached=True)).result()).values())

    kit.use(kit_app)
    run = await parent.submit()
    assert await run.parent() is None
    assert await kit.run_until_ended(run) == [1, 2, 3, 4, 5]
    children = await run.children()
    assert [(one.kind, one.name) for one in children] == [("execution", "child"), ("flow", "pair")]
    assert children[0].state == "completed"
    client = await kit_app.client()
    above = await client.run(str(children[0].id)).parent()
    assert above == run
    listed = [one async for one in client.all(parent=run.id)]
    assert [one.execution_id for one in listed] == [children[0].id]
    assert [one.arguments for one in listed] == ['{"n":1}']


@pytest.mark.parametrize("rule", ["raise", "replace"])
async def test_a_child_with_a_key_that_may_not_be_known_is_a_child(kit: Kit, kit_app: ff.App, rule: Any) -> None:
    @kit_app.task
    async def child() -> int:
        return 1

    @kit_app.task
    async def parent(ctx: ff.Context) -> list[Any]:
        run = await child.submit(idempotency_key="k", on_duplicate=rule)
        await run.result()
        found: list[Any] = [run.is_new]
        try:
            found.append((await child.submit(idempotency_key="k", on_duplicate=rule)).is_new)
        except Conflict as error:
            found.append(error.kind)
        return found

    kit.use(kit_app)
    with kit.crash_after("submit child", n=0):
        run = await parent.submit()
        assert await kit.run_until_ended(run) == [True, "duplicate_submission" if rule == "raise" else False]
    (only,) = await run.children()
    assert only.name == "child"


# ---- what a living execution needs is kept


async def test_a_flow_is_not_run_again_when_its_retention_ends_while_the_task_waits(
    kit: Kit, kit_app: ff.App, did: list[str]
) -> None:
    numbers = iter(range(1, 100))

    @kit_app.task(retention="2s")
    async def child(n: int) -> int:
        did.append(f"child {n}")
        return next(numbers)

    @kit_app.task(steps="lenient")
    async def asks(ctx: ff.Context, n: int) -> int:
        flow = kit_app.flow("kids")
        flow.map(child, range(n))
        results = await (await flow.submit()).result()
        await ctx.step(f"mail: please approve {sum(results.values())}", str, 1)
        await ctx.wait_for("approval", timeout="30 days")
        return sum(results.values())

    @kit_app.task(steps="lenient")
    async def sleeps(ctx: ff.Context, n: int) -> list[int]:
        flow = kit_app.flow("kids")
        nodes = flow.map(child, range(n))
        run = await flow.submit()
        await ctx.sleep("10 days")
        results = await run.result()
        await ctx.sleep("10 days")
        again = await run.result()
        assert again == results
        await ctx.sleep("10 days")
        await run.wait()
        return [*results.values(), await run[nodes[0]].result()]

    kit.use(kit_app)
    run = await asks.submit(3)
    await kit.run_all()
    for _ in range(3):
        await kit.clock.advance(days=1)
        await kit.run_all()
    assert (await (await kit_app.client()).flows()).items == []  # recorded, and purged
    await run.approve("approval")
    assert await kit.run_until_ended(run) == 6
    *both, first = await kit.run_inline(sleeps, 2)
    assert (sorted(both), first) == ([4, 5], both[0])
    assert sorted(did) == ["child 0", "child 0", "child 1", "child 1", "child 2"]


async def test_a_child_is_kept_until_the_parent_has_its_result(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task(retention="2s")
    async def child(n: int) -> int:
        return n

    @kit_app.task
    async def parent(ctx: ff.Context) -> int:
        run = await child.submit(7)
        await ctx.sleep("10 days")
        first = await run.result()
        await ctx.sleep("10 days")
        return first + await run.result()

    assert await kit.run_inline(parent) == 14
    await kit.clock.advance(days=1)
    await kit.run_all()
    assert (await (await kit.engine()).find_executions(kinds=["child"])).items == []


async def test_a_failed_flow_is_checked_again_by_a_retry(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    @kit_app.task(retention="2s")
    async def child() -> int:
        did.append("child")
        raise ValueError("boom")

    @kit_app.task(retry=ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(DAY)))
    async def parent(ctx: ff.Context) -> str:
        flow = kit_app.flow("kids")
        flow.add(child)
        run = await flow.submit()
        try:
            await run.result()
        except ff.FlowFailed as error:
            names = ", ".join(error.failures)
        if ctx.retry_count < 2:
            raise RuntimeError(names)
        return names

    assert await kit.run_inline(parent) == "child"
    assert did == ["child"]


async def test_a_replayed_parent_keeps_finished_children_and_submits_cancelled_ones_again(
    kit: Kit, kit_app: ff.App, did: list[str]
) -> None:
    @kit_app.task
    async def child(n: int) -> int:
        did.append(f"child {n}")
        return n

    @kit_app.task
    async def parent(ctx: ff.Context) -> list[int]:
        done = await (await child.submit(1)).result()
        late = await child.submit(2, delay="1 day")
        flow = kit_app.flow("late")
        flow.add(child, 3, delay="1 day")
        run = await flow.submit()
        return [done, await late.result(), *(await run.result()).values()]

    kit.use(kit_app)
    run = await parent.submit()
    await kit.run_all()
    await run.cancel("not now")
    await kit.run_all()
    assert {one.state for one in await run.children()} == {"completed", "cancelled"}
    await run.replay()
    assert await kit.run_until_ended(run) == [1, 2, 3]
    assert did == ["child 1", "child 2", "child 3"]


async def test_a_replayed_parent_takes_steps_that_it_took_beside_a_cancelled_child(
    kit: Kit, kit_app: ff.App, did: list[str]
) -> None:
    @kit_app.task
    async def child() -> int:
        return 1

    @kit_app.task
    async def parent(ctx: ff.Context) -> int:
        late = await child.submit(delay="1 day")
        await ctx.step("mail", did.append, "mail")
        return await late.result()

    kit.use(kit_app)
    run = await parent.submit()
    await kit.run_all()
    await run.cancel("not now")
    await kit.run_all()
    await run.replay()
    assert await kit.run_until_ended(run) == 1
    assert did == ["mail"]


async def test_a_replayed_parent_does_not_run_a_flow_again_that_finished(
    kit: Kit, kit_app: ff.App, did: list[str]
) -> None:
    @kit_app.task
    async def pay(ctx: ff.Context, n: int) -> int:
        await ctx.sleep(DAY)
        await ctx.step("pay", did.append, f"paid {n}")
        return n

    @kit_app.task
    async def parent(ctx: ff.Context) -> int:
        flow = kit_app.flow("payments")
        flow.map(pay, [1, 2])
        return sum((await (await flow.submit()).result()).values())

    kit.use(kit_app)
    client = await kit_app.client()
    run = await parent.submit()
    await kit.run_all()
    await run.cancel("by mistake")
    await kit.run_all()
    (child,) = await run.children()
    flow = client.flow(str(child.id))
    for reason in ("once", "twice"):
        assert len(await flow.replay()) == 2
        await kit.run_all()
        if reason == "once":
            await flow.cancel(reason)
            assert set((await flow.states()).values()) == {ff.State.CANCELLED}
    await kit.clock.advance(days=2)
    await kit.run_all()
    assert sorted(did) == ["paid 1", "paid 2"]
    await run.replay()
    assert await kit.run_until_ended(run) == 3
    assert sorted(did) == ["paid 1", "paid 2"]
    assert [one.id for one in await run.children()] == [child.id]


@pytest.mark.parametrize("in_step", [True, False])
async def test_what_a_handler_cancelled_itself_stays_cancelled_when_it_is_replayed(
    kit: Kit, kit_app: ff.App, did: list[str], in_step: bool
) -> None:
    fails = [True]

    @kit_app.task
    async def slow(ctx: ff.Context, name: str) -> None:
        did.append(name)
        await ctx.sleep(DAY)

    @kit_app.task
    async def hedge(ctx: ff.Context) -> str:
        loser = await slow.submit("task")
        flow = kit_app.flow("flow")
        flow.add(slow, "node")
        lost = await flow.submit()
        await ctx.sleep("1 hour")

        async def cancel() -> None:
            await loser.cancel("lost")
            await lost.cancel("lost")

        await (ctx.step("cancel", cancel) if in_step else cancel())
        if fails[0]:
            raise ValueError("later")
        return "won"

    kit.use(kit_app)
    run = await hedge.submit()
    with pytest.raises(ff.TaskFailed):
        await kit.run_until_ended(run)
    assert {one.state for one in await run.children()} == {"cancelled"}
    fails[0] = False
    before = list(did)
    await run.replay()
    assert await kit.run_until_ended(run) == "won"
    assert len(await run.children()) == 2
    assert did == before


async def test_the_kit_deletes_what_its_retention_ends(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def quick() -> int:
        return 1

    @kit_app.task
    async def fails() -> int:
        raise ValueError("boom")

    kit.use(kit_app)
    done, failed = await quick.submit(), await fails.submit()
    await kit.run_all()
    engine = await kit.engine()
    for days, left in [(6, (True, True)), (2, (False, True)), (5, (False, True)), (2, (False, False))]:
        await kit.clock.advance(days=days)
        await kit.run_all()
        found = [await engine.read_execution(run.execution_id) is not None for run in (done, failed)]
        assert tuple(found) == left, days


async def test_a_task_can_wait_for_an_execution_it_did_not_submit(app: ff.App) -> None:
    @app.task
    async def job() -> int:
        return 5

    @app.task
    async def waiter(execution_id: str) -> int:
        return int(await (await app.client()).run(execution_id, kind="job").result()) + 1

    async with worker(app, concurrency=1):
        run = await job.options(delay=0.2).submit()
        assert await result(await waiter.submit(run.id)) == 6


async def test_a_task_cannot_wait_for_itself(app: ff.App) -> None:
    @app.task
    async def navel(ctx: ff.Context) -> Any:
        return await (await app.client()).run(ctx.execution_id).result()

    async with worker(app):
        with pytest.raises(ff.TaskFailed, match="own end"):
            await result(await navel.submit())


# ---- parking at the very moment


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_child_that_ends_just_as_the_parent_is_parked(
    app: ff.App, did: list[str], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held right before, or right after, the call that gives the lease back, until the child has ended."""

    @app.task
    async def child(n: int) -> int:
        did.append("child")
        return n

    @app.task
    async def parent() -> int:
        return sum(await asyncio.gather(*[run.result() for run in await child.submit_many(range(3))]))

    async with worker(app, concurrency=10) as one:
        park = one.engine.park

        async def held(*args: Any, **options: Any) -> Any:
            if moment == "after":
                answer = await park(*args, **options)
            async with asyncio.timeout(PATIENCE):
                while len(did) < 3:
                    await asyncio.sleep(0.002)
            return await park(*args, **options) if moment == "before" else answer

        monkeypatch.setattr(one.engine, "park", held)
        assert await result(await parent.submit()) == 3


async def test_many_parents_and_children_under_pressure(app: ff.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, few slots, children that end at any time: all of them end, and none is left waiting."""
    monkeypatch.setattr(parking, "_MAX_CHECK", 0.05)

    @app.task(retry=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(milliseconds=20))))
    async def child(ctx: ff.Context, n: int) -> int:
        await asyncio.sleep((n * 7 % 5) / 500)
        if n % 11 == 0 and ctx.retry_count == 0:
            raise ValueError("once")
        return n

    @app.task
    async def parent(ctx: ff.Context, first: int) -> int:
        if first % 3 == 0:
            await ctx.sleep(0.01)
        runs = await child.submit_many(range(first, first + 6))
        if first % 2:
            return sum([await run.result() for run in runs])
        return sum(await asyncio.gather(*[run.result() for run in runs]))

    second = ff.App(app.dsn, name="second")
    for task in (child, parent):
        second.tasks[task.name] = task  # type: ignore[assignment]
    async with worker(app, concurrency=4), worker(app, concurrency=3, worker_id="other"):
        runs = await parent.submit_many(range(40))
        for first, run in enumerate(runs):
            assert await result(run) == sum(range(first, first + 6))
    assert len(await children_of(app)) == 240


# ---- clients that wait


def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that come by themselves come too late to help."""
    monkeypatch.setattr(watching, "_FIRST_POLL", 3 * PATIENCE)
    monkeypatch.setattr(watching, "_MAX_POLL", 3 * PATIENCE)


async def test_a_waiting_client_is_notified(app: ff.App, monkeypatch: pytest.MonkeyPatch) -> None:
    far_away(monkeypatch)

    @app.task
    async def job(n: int) -> int:
        if n < 0:
            raise ValueError("below")
        return n

    submitter = ff.App(app.dsn, name="submitter")
    remote = submitter.task(name="job")(job.function)
    run, bad = await remote.submit(5), await remote.submit(-1)
    waits = [asyncio.create_task(result(one)) for one in (run, bad)]
    client = await submitter.client()
    async with asyncio.timeout(PATIENCE):
        while await client.engine._fetch("select count(*) as n from flowfabric.watch") != [(2,)]:
            await asyncio.sleep(0.005)
    async with worker(app):
        assert await waits[0] == 5
        with pytest.raises(ff.TaskFailed, match="below") as caught:
            await waits[1]
    assert caught.value.error_type == "ValueError" and "Traceback" in (caught.value.traceback or "")
    await submitter.close()


async def test_a_notification_that_is_lost_is_made_up_for(app: ff.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_MAX_POLL", 0.1)

    @app.task
    async def job() -> int:
        return 5

    run = await job.submit()
    waiting = asyncio.create_task(result(run))
    client = await app.client()
    async with asyncio.timeout(PATIENCE):
        while not await client.engine._fetch("delete from flowfabric.watch returning 1"):
            await asyncio.sleep(0.002)
    async with await ff.Engine.connect(app.dsn, notifications=False) as engine:
        claimed = await engine.claim(worker_id="w", worker_instance_id="w")
        assert claimed is not None
        await engine.complete(claimed.handle, b"5")
    assert await waiting == 5


async def test_thousands_that_wait_are_few_calls_and_one_listener(app: ff.App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def job(n: int) -> int:
        return n

    runs = await job.submit_many(range(2500))
    client = await app.client()
    counts: collections.Counter[str] = collections.Counter()

    def counted(name: str) -> Callable[..., Awaitable[Any]]:
        real = getattr(client.engine, name)

        async def call(ids: Any, *args: Any) -> Any:
            counts[name] += 1
            counts[f"{name} one"] += len(ids) == 1
            return await real(ids, *args)

        return call

    for name in ("read_outcomes", "watch"):
        monkeypatch.setattr(client.engine, name, counted(name))
    futures = [client.outcomes.future(run.execution_id) for run in runs]
    async with worker(app, concurrency=500):
        found = await asyncio.wait_for(asyncio.gather(*futures), PATIENCE)
    assert [outcome.result for outcome in found] == [str(n).encode() for n in range(2500)]
    assert counts["read_outcomes"] < 250 and counts["watch"] < 50
    listening = await client.engine._fetch(
        "select count(*) as n from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
    )
    assert listening[0]["n"] <= 1


async def test_a_timeout_leaves_nothing_behind(app: ff.App) -> None:
    @app.task
    async def job() -> None:
        pass

    run = await job.submit()
    for _ in range(3):
        with pytest.raises(ff.TimedOut):
            await run.result(timeout=0.05)
    client = await app.client()
    assert client.outcomes._waiting == {} and client.outcomes._new == set()
    async with asyncio.timeout(PATIENCE):
        while await client.engine._fetch("select from flowfabric.watch"):
            await asyncio.sleep(0.01)
    assert client.outcomes._task is not None
    await asyncio.wait_for(client.outcomes._task, PATIENCE)


async def test_a_result_after_a_purge_says_so(app: ff.App) -> None:
    @app.task
    async def job() -> int:
        return 5

    async with worker(app) as one:
        run = await job.submit()
        assert await result(run) == 5
        await one.engine.delete_execution(run.execution_id)
    with pytest.raises(Purged) as caught:
        await result(run)
    assert caught.value.execution_id == run.execution_id
