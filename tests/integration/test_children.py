"""Tasks that submit tasks and wait for them: once over crashes, without a worker, and with nothing lost in between."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.client import outcomes as watching
from flowfabric.errors import Purged
from flowfabric.testing import Kit
from flowfabric.worker.durable import parking

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


async def test_the_recorded_result_of_a_child_outlives_it(app: ff.App) -> None:
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
        run = await child.submit()
        await ctx.sleep(0.3)
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
        with pytest.raises(ff.TaskFailed, match="was purged"):
            # A second look is a second thing to remember, and finds nothing any more.
            await result(run)
        late = await too_late.submit()
        await until_state(late, ff.State.DELAYED)
        async with asyncio.timeout(PATIENCE):
            while not (found := await children_of(app)) or found[0].public_state is not ff.State.COMPLETED:
                await asyncio.sleep(0.005)
        await one.engine.delete_execution(found[0].execution_id)
        assert await result(late) == "purged"


async def test_cancelling_a_parent_leaves_its_children(app: ff.App) -> None:
    over = asyncio.Event()

    @app.task
    async def child() -> int:
        await over.wait()
        return 5

    @app.task
    async def parent() -> int:
        return await (await child.submit()).result()

    async with worker(app):
        run = await parent.submit()
        await until_state(run, ff.State.WAITING_CHILDREN)
        await run.cancel("enough")
        (item,) = await children_of(app)
        over.set()
        assert await result(child.run(item.execution_id)) == 5
        assert await run.state() is ff.State.CANCELLED


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
