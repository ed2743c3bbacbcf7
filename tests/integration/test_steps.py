"""Durable steps, sleeps and parking inside tasks: real workers, real crashes, every construct of asyncio."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import flowfabric as ff
from flowfabric.testing import Kit
from flowfabric.worker.durable import parking
from tests.integration.conftest import Ledger
from tests.support import end_sleeps
from tests.until import until

PATIENCE = 60.0
"""Seconds after which what should have happened counts as missing. Nothing waits this long when all is well."""
LONG = timedelta(hours=1)
SHORT = timedelta(milliseconds=30)
ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0)))


def worker(app: ff.App, **options: Any) -> ff.Worker:
    return ff.Worker(app, **{"grace": 5, "poll": 0.2, **options})


async def result(run: ff.Run[Any]) -> Any:
    return await asyncio.wait_for(run.result(), PATIENCE)


async def until_parked(run: ff.Run[Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while await run.state() is not ff.State.DELAYED:
            await asyncio.sleep(0.005)


# ---- once


async def test_a_step_runs_once_even_if_the_worker_dies(kit: Kit, kit_app: ff.App, did: Ledger) -> None:
    @kit_app.task
    async def order(ctx: ff.Context) -> list[int]:
        return [await ctx.step("a", did.entry("a", 1)), await ctx.step("b", did.coroutine("b", 2))]

    with kit.crash_after("a"), kit.crash_after("b"):
        assert await kit.run_inline(order) == [1, 2]
    assert did == ["a", "b"]
    did.clear()
    with kit.crash_before("b"):
        assert await kit.run_inline(order) == [1, 2]
    assert did == ["a", "b", "b"], "interrupted before it was remembered, it is done again"


async def test_steps_under_gather_and_groups_are_distinguished(kit: Kit, kit_app: ff.App, did: Ledger) -> None:
    @kit_app.task
    async def fan(ctx: ff.Context) -> dict[str, list[int]]:
        same = await asyncio.gather(*(ctx.step("same", did.coroutine(f"same {n}", n)) for n in range(5)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ctx.step(f"t{n}", did.entry(f"t{n}", n))) for n in range(3)]
        await ctx.sleep(LONG)

        async def pair(n: int) -> int:
            first = await ctx.step("pair", did.coroutine(f"pair {n}", n))
            return int(first + await ctx.step(f"second {n}", did.entry(f"second {n}", 10)))

        nested = await asyncio.gather(*(pair(n) for n in range(2)))
        return {"same": same, "tasks": [t.result() for t in tasks], "nested": nested}

    expected = {"same": [0, 1, 2, 3, 4], "tasks": [0, 1, 2], "nested": [10, 11]}
    assert await kit.run_inline(fan) == expected
    assert max(collections.Counter(did).values()) == 1
    report = await kit.crash_everywhere(fan)
    assert report.result == expected


async def test_a_plain_function_runs_in_a_thread_and_a_lambda_may_give_a_coroutine(app: ff.App, did: Ledger) -> None:
    import threading

    async def fetch(n: int) -> int:
        return n

    class Callable_:
        async def __call__(self, n: int) -> int:
            return n + 1

    @app.task
    async def mixed(ctx: ff.Context) -> list[Any]:
        return [
            await ctx.step("where", lambda: threading.current_thread() is threading.main_thread()),
            await ctx.step("lambda", lambda: fetch(3)),
            await ctx.step("partial", functools.partial(fetch, 4)),
            await ctx.step("object", Callable_(), 4),
            await ctx.step("keywords", lambda **kw: sorted(kw), a=1, name=2),
        ]

    async with worker(app):
        found = await result(await mixed.submit())
    assert found == [False, 3, 4, 5, ["a", "name"]]


async def test_results_are_typed_by_the_functions_annotation(kit: Kit, kit_app: ff.App) -> None:
    class Point(msgspec.Struct):
        x: int
        at: datetime

    async def locate() -> Point:
        return Point(1, datetime(2030, 1, 1, tzinfo=UTC))

    kinds: list[type] = []

    @kit_app.task
    async def typed(ctx: ff.Context) -> int:
        point = await ctx.step("locate", locate)
        kinds.append(type(point))
        await ctx.sleep(LONG)
        return point.x

    assert await kit.run_inline(typed) == 1
    assert kinds == [Point, Point]


async def test_inside_a_step_nothing_else_is_remembered(kit: Kit, kit_app: ff.App, did: Ledger) -> None:
    """A step within a step is part of it, and so is a submission, a time, a pause, and waiting for a result."""

    @kit_app.task
    async def child(n: int) -> int:
        return n * 2

    @kit_app.task
    async def outer(ctx: ff.Context) -> int:
        async def work() -> int:
            inner = await ctx.step("inner", did.entry("inner", 1))
            assert (await ctx.now()).tzinfo is not None
            await ctx.sleep(0.001)
            run = await child.submit(20)
            assert await ctx.submit(child, 1) != run
            return int(inner + await run.result())

        value = await ctx.step("work", work)
        await ctx.sleep(LONG)
        return value

    run = await outer.submit()
    assert await kit.run_until_ended(run) == 41
    assert did == ["inner"]
    assert [(s.kind, s.name) for s in await run.steps()] == [("step", "work"), ("sleep", "sleep")]


async def test_step_names_never_collide_with_records_of_the_context(app: ff.App, did: Ledger) -> None:
    names = ["sleep", "now", "submit child", "result", " ", "émile", "x" * 256, "a\nb", "{}%s", "'; drop table"]

    @app.task
    async def child() -> int:
        return 7

    @app.task
    async def named(ctx: ff.Context) -> list[str]:
        await asyncio.gather(ctx.sleep(SHORT), ctx.now(), *(ctx.step(name, did.entry(name, name)) for name in names))
        run = await child.submit()
        return [await ctx.step(name, did.entry(name, name)) for name in names] + [str(await run.result())]

    async with worker(app):
        assert await result(await named.submit()) == [*names, "7"]
    assert collections.Counter(did) == dict.fromkeys(names, 2)


@pytest.mark.parametrize(
    ("name", "problem"), [("", "empty"), ("a\0b", "NUL"), ("x" * 257, "257 bytes"), (5, "not text"), (None, "not text")]
)
async def test_a_name_that_cannot_be_one_fails_clearly(app: ff.App, did: Ledger, name: Any, problem: str) -> None:
    @app.task
    async def bad(ctx: ff.Context) -> None:
        await ctx.step(name, did.entry("ran"))

    @app.task
    def bad_plain(ctx: ff.SyncContext) -> None:
        ctx.step(name, did.entry("ran"))

    async with worker(app):
        for task in (bad, bad_plain):
            with pytest.raises(ff.TaskFailed) as caught:
                await result(await task.submit())  # type: ignore[attr-defined]
            assert caught.value.error_type == "flowfabric.errors.InvalidInput"
            assert "name" in caught.value.message and problem in caught.value.message
    assert did == []


async def test_a_step_without_a_function_fails_clearly(app: ff.App) -> None:
    async def fetch() -> int:
        return 1

    @app.task
    async def mistaken(ctx: ff.Context) -> None:
        await ctx.step("fetch", fetch())  # type: ignore[arg-type]

    @app.task
    def mixed_up(ctx: ff.SyncContext) -> None:
        ctx.step("fetch", fetch)

    async with worker(app):
        with pytest.raises(ff.TaskFailed, match="step 'fetch' was given a coroutine; allowed: a function"):
            await result(await mistaken.submit())
        with pytest.raises(ff.TaskFailed, match="'fetch' is async; allowed: a synchronous function"):
            await result(await mixed_up.submit())


@pytest.mark.parametrize("plain", [False, True])
async def test_a_result_that_is_not_json_names_its_step_and_is_remembered(
    kit: Kit, kit_app: ff.App, did: Ledger, plain: bool
) -> None:
    if plain:

        @kit_app.task
        def bad(ctx: ff.SyncContext) -> str:
            try:
                ctx.step("connect", did.entry("connect", object()))
            except ff.InvalidInput as error:
                ctx.sleep(LONG)
                return str(error)
            return ""
    else:

        @kit_app.task
        async def bad(ctx: ff.Context) -> str:
            try:
                await ctx.step("connect", did.entry("connect", object()))
            except ff.InvalidInput as error:
                await ctx.sleep(LONG)
                return str(error)
            return ""

    assert "result of step 'connect'" in await kit.run_inline(bad)
    assert did == ["connect"], "it was done, though what it gave cannot be kept"


# ---- failures


class Declined(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"declined: {code}")
        self.code = code


@pytest.mark.parametrize("plain", [False, True])
async def test_a_failure_is_remembered_within_the_run(kit: Kit, kit_app: ff.App, did: Ledger, plain: bool) -> None:
    seen: list[Any] = []

    if plain:

        @kit_app.task
        def pay(ctx: ff.SyncContext) -> str:
            try:
                ctx.step("charge", did.entry("charge", Declined(402)))
            except Declined as error:
                seen.append((error.code, str(error)))
                ctx.sleep(LONG)
                return ctx.step("apologise", did.entry("apologise", "sorry"))
            return "paid"
    else:

        @kit_app.task
        async def pay(ctx: ff.Context) -> str:
            try:
                await ctx.step("charge", did.coroutine("charge", Declined(402)))
            except Declined as error:
                seen.append((error.code, str(error)))
                await ctx.sleep(LONG)
                return await ctx.step("apologise", did.entry("apologise", "sorry"))
            return "paid"

    run = await pay.submit()
    assert await kit.run_until_ended(run) == "sorry"
    assert did == ["charge", "apologise"]
    assert seen == [(402, "declined: 402")] * 2
    steps = {step.name: step for step in await run.steps()}
    assert steps["charge"].error is not None
    assert steps["charge"].error["message"] == "declined: 402"


async def test_a_failure_is_forgotten_when_the_task_is_retried(app: ff.App, did: Ledger) -> None:
    @app.task(retry=ONCE)
    async def flaky(ctx: ff.Context) -> int:
        kept = await ctx.step("kept", did.entry("kept", 1))
        return int(
            kept + await ctx.step("flaky", did.entry("flaky", ValueError("boom") if ctx.retry_count == 0 else 2))
        )

    async with worker(app):
        run = await flaky.submit()
        assert await result(run) == 3
    assert did == ["kept", "flaky", "flaky"]
    steps = {step.name: step for step in await run.steps()}
    assert (steps["flaky"].error, steps["flaky"].run, steps["kept"].run) == (None, 1, 0)


async def test_another_way_after_a_failure_is_no_change_of_code(app: ff.App, did: Ledger) -> None:
    """The first run failed at a step and did something else instead; the second does not need that."""

    @app.task(retry=ONCE)
    async def detour(ctx: ff.Context) -> str:
        try:
            await ctx.step("road", did.entry("road", ValueError() if ctx.retry_count == 0 else None))
        except ValueError:
            await ctx.step("detour", did.entry("detour"))
            raise RuntimeError("not this time") from None
        return "there"

    async with worker(app):
        assert await result(await detour.submit()) == "there"
    assert did == ["road", "detour", "road"]


async def test_a_step_may_ask_for_the_whole_task_to_be_retried_or_rejected(app: ff.App, did: Ledger) -> None:
    @app.task
    async def asks(ctx: ff.Context, how: str) -> str:
        async def ask() -> str:
            did.append(how)
            if how == "later" and ctx.retry_count == 0:
                raise ff.RetryLater("busy", after=0)
            if how == "never":
                raise ff.Reject("not for us")
            return "ok"

        return await ctx.step("ask", ask)

    async with worker(app):
        assert await result(await asks.submit("later")) == "ok"
        with pytest.raises(ff.TaskFailed, match="not for us") as caught:
            await result(await asks.submit("never"))
        assert caught.value.category == "rejected"
    assert did == ["later", "later", "never"]


async def test_a_step_has_retries_and_a_timeout_of_its_own(app: ff.App, did: Ledger) -> None:
    fast = ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(timedelta(milliseconds=1)))
    picky = ff.RetryPolicy(max_retries=5, backoff=ff.Fixed(timedelta(0)), retryable_categories=("KeyError",))

    def failing(name: str, times: int, error: Exception = ValueError("again")) -> Callable[[], str]:  # noqa: B008
        def do() -> str:
            did.append(name)
            if did.count(name) <= times:
                raise error
            return name

        return do

    async def slow(first: bool) -> str:
        did.append("slow")
        await asyncio.sleep(1000 if did.count("slow") == 1 else 0)
        return "slow"

    @app.task
    async def patient(ctx: ff.Context) -> list[str]:
        said = [await ctx.step_with(retry=fast)("twice", failing("twice", 2))]
        for name, policy, times in (("thrice", fast, 3), ("wrong", picky, 1)):
            try:
                await ctx.step_with(retry=policy)(name, failing(name, times))
            except ValueError as error:
                said.append(f"{name} {error}")
        said.append(await ctx.step_with(retry=picky)("right", failing("right", 4, KeyError("k"))))
        try:
            await ctx.step_with(timeout=0.01)("late", asyncio.sleep, 1000)
        except TimeoutError:
            said.append("late")
        said.append(await ctx.step_with(timeout=0.5, retry=fast)("slow", slow, True))
        await ctx.sleep(SHORT)
        return said

    @app.task
    def patient_plain(ctx: ff.SyncContext) -> str:
        return ctx.step_with(retry=fast)("plain", failing("plain", 2))

    async with worker(app):
        assert await result(await patient.submit()) == [
            "twice", "thrice again", "wrong again", "right", "late", "slow",
        ]  # fmt: skip
        assert await result(await patient_plain.submit()) == "plain"
    assert collections.Counter(did) == {"twice": 3, "thrice": 3, "wrong": 1, "right": 5, "slow": 2, "plain": 3}


# ---- time


async def test_now_is_the_databases_time_and_stays_the_same(kit: Kit, kit_app: ff.App) -> None:
    seen: list[list[datetime]] = []

    @kit_app.task
    async def clocked(ctx: ff.Context) -> bool:
        seen.append([await ctx.now(), await ctx.now()])
        await ctx.sleep(LONG)
        last = await ctx.now()
        return seen[0] == seen[1] and last >= seen[0][0] + LONG

    @kit_app.task
    def clocked_plain(ctx: ff.SyncContext) -> bool:
        first = ctx.now()
        ctx.sleep(LONG)
        return ctx.now() - first >= LONG

    run = await clocked.submit()
    assert await kit.run_until_ended(run) is True
    assert await kit.run_inline(clocked_plain) is True
    (first, second), _ = seen
    assert first < second
    assert [(s.kind, s.n, s.at) for s in await run.steps()][:2] == [("now", 0, first), ("now", 1, second)]


async def test_a_sleep_frees_the_slot(app: ff.App, did: Ledger) -> None:
    @app.task
    async def sleeper(ctx: ff.Context, n: int) -> int:
        await ctx.sleep(LONG)
        return n

    @app.task
    def plain_sleeper(ctx: ff.SyncContext, n: int) -> int:
        ctx.sleep(LONG)
        return n

    @app.task
    async def other() -> str:
        return "ran"

    async with worker(app, concurrency=1) as one:
        runs = [await task.submit(n) for n in range(5) for task in (sleeper, plain_sleeper)]
        for run in runs:
            await until_parked(run)
        assert await result(await other.submit()) == "ran"
        await until(lambda: not one._running and not one.held)
        await end_sleeps(app.dsn)
        assert sorted([await result(run) for run in runs]) == sorted([*range(5), *range(5)])


async def test_a_sleep_counts_from_its_first_call_on_any_worker(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def naps(ctx: ff.Context) -> float:
        began = await ctx.now()
        await ctx.sleep(timedelta(hours=1))
        await ctx.sleep("30 minutes")
        return (await ctx.now() - began).total_seconds()

    with kit.crash_after("sleep"), kit.crash_after("sleep", n=1):
        assert 5400 <= await kit.run_inline(naps) < 5460


async def test_the_longest_of_several_sleeps_decides(app: ff.App, did: Ledger) -> None:
    @app.task
    async def several(ctx: ff.Context) -> list[str]:
        async def nap(seconds: float) -> str:
            await ctx.sleep(seconds)
            return await ctx.step(f"after {seconds}", did.entry(f"after {seconds}", str(seconds)))

        return list(await asyncio.gather(nap(0.09), nap(0.03), nap(0.06), nap(0)))

    async with worker(app):
        assert await result(await several.submit()) == ["0.09", "0.03", "0.06", "0"]
    assert sorted(did) == ["after 0", "after 0.03", "after 0.06", "after 0.09"]


@pytest.mark.parametrize("pause", [-1, "soon", None, timedelta(seconds=-1), float("nan")])
async def test_an_invalid_pause_fails_clearly(app: ff.App, pause: Any) -> None:
    @app.task
    async def bad(ctx: ff.Context) -> None:
        await ctx.sleep(pause)

    @app.task
    def bad_plain(ctx: ff.SyncContext) -> None:
        ctx.sleep(pause)

    async with worker(app):
        for task in (bad, bad_plain):
            with pytest.raises(ff.TaskFailed, match="pause"):
                await result(await task.submit())  # type: ignore[attr-defined]


# ---- parking under whatever asyncio offers


async def plainly(ctx: ff.Context, did: Ledger) -> Any:
    await ctx.sleep(SHORT)
    return "done"


async def beside_work(ctx: ff.Context, did: Ledger) -> Any:
    """A sleep beside ordinary work: the handler stays until the work is over, and then leaves."""

    async def work() -> str:
        did.append("work")
        await asyncio.sleep(0.05)
        return await ctx.step("work", did.entry("step", "done"))

    _, said = await asyncio.gather(ctx.sleep(0.15), work())
    return said


async def in_a_group(ctx: ff.Context, did: Ledger) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.sleep(SHORT))
        task = group.create_task(ctx.step("step", did.entry("step", "done")))
        await ctx.sleep(SHORT)
    return task.result()


async def with_wait(ctx: ff.Context, did: Ledger) -> Any:
    tasks = [asyncio.create_task(ctx.sleep(SHORT)), asyncio.create_task(ctx.sleep(LONG))]
    finished, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert (finished, left) == ({tasks[0]}, {tasks[1]})
    tasks[1].cancel()
    return "done"


async def as_they_complete(ctx: ff.Context, did: Ledger) -> Any:
    async def nap(n: int) -> int:
        await ctx.sleep(0.03 * n)
        return n

    found = [await one for one in asyncio.as_completed([nap(2), nap(1), nap(0)])]
    return "done" if sorted(found) == [0, 1, 2] else str(found)


async def with_a_timeout_that_strikes(ctx: ff.Context, did: Ledger) -> Any:
    try:
        async with asyncio.timeout(0.05):
            await ctx.sleep(LONG)
    except TimeoutError:
        return "done"


async def with_a_timeout_that_does_not(ctx: ff.Context, did: Ledger) -> Any:
    return await asyncio.wait_for(plainly(ctx, did), 60)


async def shielded(ctx: ff.Context, did: Ledger) -> Any:
    await asyncio.shield(ctx.sleep(SHORT))
    return "done"


async def limited(ctx: ff.Context, did: Ledger) -> Any:
    limit = asyncio.Semaphore(2)

    async def nap(n: int) -> None:
        async with limit:
            await ctx.sleep(SHORT)
            await ctx.step(f"step {n}", did.entry(f"step {n}"))

    await asyncio.gather(*(nap(n) for n in range(5)))
    return "done"


async def with_a_task_awaited_later(ctx: ff.Context, did: Ledger) -> Any:
    task = asyncio.create_task(plainly(ctx, did))
    await ctx.step("meanwhile", did.entry("meanwhile"))
    return await task


async def that_catches_everything(ctx: ff.Context, did: Ledger) -> Any:
    for n in range(3):
        try:
            await ctx.sleep(SHORT)
        except Exception as error:
            did.append(f"caught {error!r}")
        await ctx.step(f"step {n}", did.entry(f"step {n}"))
    return "done"


SHAPES = [
    plainly, beside_work, in_a_group, with_wait, as_they_complete, with_a_timeout_that_strikes,
    with_a_timeout_that_does_not, shielded, limited, with_a_task_awaited_later, that_catches_everything,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_every_kind_of_wait_ends(app: ff.App, did: Ledger, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_MAX_CHECK", 0.05)

    @app.task
    async def waiting(ctx: ff.Context) -> str:
        found: str = await shape(ctx, did)
        return found

    async with worker(app) as one:
        run = await waiting.submit()
        assert await result(run) == "done"
        await until(lambda: not one._running)
    again = {name: count for name, count in collections.Counter(did).items() if count > 1 and name != "work"}
    assert again == {}, "no step is done twice, no exception is raised inside"


async def test_work_beside_a_sleep_keeps_the_worker_only_as_long_as_it_lasts(
    app: ff.App, did: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "_MAX_CHECK", 0.05)
    over = asyncio.Event()

    @app.task
    async def both(ctx: ff.Context) -> None:
        async def work() -> None:
            did.append("work")
            await over.wait()

        await asyncio.gather(ctx.sleep(LONG), work())

    async with worker(app) as one:
        run = await both.submit()
        await until(lambda: did)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert len(one._running) == 1, "it works, and stays"
        over.set()
        await until_parked(run)
        await until(lambda: not one._running)


async def test_finally_and_managers_run_when_the_handler_is_parked(kit: Kit, kit_app: ff.App, did: Ledger) -> None:
    @contextlib.asynccontextmanager
    async def manager(name: str) -> AsyncIterator[None]:
        did.append(f"enter {name}")
        try:
            yield
        finally:
            await asyncio.sleep(0)
            did.append(f"leave {name}")

    @kit_app.task
    async def tidy(ctx: ff.Context) -> bool:
        async with manager("outer"):
            try:
                await asyncio.gather(ctx.sleep(LONG), inner(ctx))
            finally:
                did.append(f"finally {ctx.is_parked}")
        return True

    async def inner(ctx: ff.Context) -> None:
        async with manager("inner"):
            await ctx.sleep(LONG)

    assert await kit.run_inline(tidy) is True
    assert collections.Counter(did) == {
        "enter outer": 2, "enter inner": 2, "leave inner": 2, "leave outer": 2,
        "finally True": 1, "finally False": 1,
    }  # fmt: skip


async def test_a_plain_handler_unwinds_when_it_is_parked(kit: Kit, kit_app: ff.App, did: Ledger) -> None:
    @kit_app.task
    def tidy(ctx: ff.SyncContext) -> bool:
        try:
            try:
                ctx.sleep(LONG)
            except Exception:
                did.append("swallowed")
        finally:
            did.append(f"finally {ctx.is_parked}")
        return True

    @kit_app.task
    def clumsy(ctx: ff.SyncContext) -> bool:
        """Whatever it makes of being unwound, it waits."""
        try:
            ctx.sleep(LONG)
        except BaseException:
            raise ValueError("what was that") from None
        return True

    @kit_app.task
    def stubborn(ctx: ff.SyncContext) -> int:
        for n in range(6):
            try:
                ctx.sleep(LONG)
            except BaseException:
                did.append("again")
                if n == 5:
                    return -1
        return 7

    assert await kit.run_inline(tidy) is True
    assert await kit.run_inline(clumsy) is True
    assert await kit.run_inline(stubborn) == 7
    assert (did.count("finally True"), did.count("finally False"), did.count("swallowed")) == (1, 1, 0)


async def test_a_handler_that_ignores_the_stop_blocks_no_other(app: ff.App, did: Ledger) -> None:
    """It catches every cancellation and asks on and on; the loop stays free, and nothing it asks for is done."""
    calm = asyncio.Event()

    @app.task
    async def stubborn(ctx: ff.Context) -> str:
        refused = 0
        while True:
            try:
                await ctx.sleep(LONG)
            except BaseException:
                refused += 1
                if calm.is_set():
                    return "at last"
                with contextlib.suppress(BaseException):
                    await ctx.step("never", did.entry("never"))

    @app.task
    async def other() -> str:
        return "ran"

    async with worker(app) as one:
        run = await stubborn.submit()
        await until_parked(run)
        for _ in range(20):
            assert await result(await other.submit()) == "ran"
        calm.set()
        await until(lambda: not one._running)
    assert did == []
    assert await run.state() is ff.State.DELAYED


async def test_parking_survives_the_end_of_the_worker(app: ff.App, database: str, did: Ledger) -> None:
    @app.task
    async def patient(ctx: ff.Context) -> int:
        one = await ctx.step("one", did.entry("one", 1))
        await ctx.sleep(LONG)
        return int(one + await ctx.step("two", did.entry("two", 2)))

    async with worker(app):
        run = await patient.submit()
        await until_parked(run)
    await end_sleeps(database)
    async with worker(app):
        assert await result(run) == 3
    assert did == ["one", "two"]


async def test_a_drain_gives_back_executions_that_cannot_be_parked(app: ff.App, did: Ledger) -> None:
    started = asyncio.Event()

    @app.task
    async def busy(ctx: ff.Context) -> int:
        await ctx.step("one", did.entry("one", 1))
        started.set()
        if did.count("again") == 0:
            did.append("again")
            await asyncio.gather(ctx.sleep(LONG), asyncio.sleep(1000))
        return 5

    async with worker(app, grace=0.05):
        run = await busy.submit()
        await asyncio.wait_for(started.wait(), PATIENCE)
    assert await run.state() is ff.State.WAITING
    async with worker(app):
        assert await result(run) == 5
    assert did == ["one", "again"]


async def test_cancelling_a_parked_task_ends_it(app: ff.App, did: Ledger) -> None:
    @app.task
    async def sleeper(ctx: ff.Context) -> None:
        await ctx.sleep(LONG)

    async with worker(app):
        run = await sleeper.submit()
        await until_parked(run)
        await run.cancel("enough")
        with pytest.raises(ff.TaskFailed) as caught:
            await result(run)
    assert (caught.value.kind, caught.value.message) == ("cancelled", "enough")


async def test_a_deadline_passes_over_a_sleep(app: ff.App) -> None:
    @app.task(deadline=0.3)
    async def sleeper(ctx: ff.Context) -> None:
        await ctx.sleep(LONG)

    async with worker(app):
        with pytest.raises(ff.TaskFailed) as caught:
            await result(await sleeper.submit())
    assert (caught.value.kind, caught.value.message) == ("expired", "execution_deadline")


async def test_a_thousand_sleeps_in_one_handler_are_one_parking(app: ff.App) -> None:
    parked: list[int] = []

    @app.task
    async def many(ctx: ff.Context) -> int:
        parked.append(1)
        naps = await asyncio.gather(*(ctx.sleep(0.5) for _ in range(1000)))
        return len(naps)

    async with worker(app):
        run = await many.submit()
        assert await result(run) == 1000
        attempts = await run.attempts()
    assert len(attempts) == 1
    assert len(parked) <= 4, "each parking runs the handler once more"


async def test_no_time_at_all_is_no_reason_to_leave(app: ff.App, did: Ledger) -> None:
    @app.task
    async def hasty(ctx: ff.Context) -> int:
        did.append("begun")
        for _ in range(20):
            await ctx.sleep(0)
        return 1

    @app.task
    def hasty_plain(ctx: ff.SyncContext) -> int:
        did.append("begun")
        ctx.sleep(0)
        return 1

    async with worker(app):
        assert await result(await hasty.submit()) == 1
        assert await result(await hasty_plain.submit()) == 1
    assert did == ["begun"] * 2


# ---- the lease


async def test_a_lost_lease_stops_the_handler_and_refuses_its_steps(app: ff.App, did: Ledger) -> None:
    gone, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def slow(ctx: ff.Context) -> int:
        if did:
            return 5
        did.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            did.append(f"cancelled {ctx.is_cancelled}")
            with pytest.raises(asyncio.CancelledError):
                await ctx.step("late", did.entry("late"))
            gone.set()
            raise
        finally:
            release.set()
        return 0

    async with worker(app, lease_ttl=1) as one:
        run = await slow.submit()
        await until(lambda: did)
        await one.engine.revoke_lease(run.execution_id)
        await asyncio.wait_for(gone.wait(), PATIENCE)
        assert await result(run) == 5
    assert did == ["begun", "cancelled True"]
    assert await run.steps() == []


async def test_steps_of_many_executions_share_calls(app: ff.App) -> None:
    counts: collections.Counter[str] = collections.Counter()

    @app.task
    async def five(ctx: ff.Context) -> int:
        return sum([await ctx.step(f"s{n}", asyncio.sleep, 0, n) for n in range(5)])

    async with worker(app, concurrency=100) as one:
        record = one.engine.record_steps

        async def counted(items: Any) -> Any:
            counts["calls"] += 1
            counts["steps"] += len(items)
            return await record(items)

        one.engine.record_steps = counted  # type: ignore[method-assign]
        runs = await five.submit_many([()] * 100)
        assert [await result(run) for run in runs] == [10] * 100
    assert counts["steps"] == 500
    assert counts["calls"] < 100


# ---- forgotten awaits


@pytest.mark.parametrize("what", ["step", "sleep", "wait_for", "submit", "step_with"])
async def test_a_durable_call_without_await_fails_the_run_and_is_named(kit: Kit, kit_app: ff.App, what: str) -> None:
    @kit_app.task
    async def other() -> None: ...

    @kit_app.task(retry=ONCE)
    async def job(ctx: ff.Context) -> None:
        await ctx.step("first", int)
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: ctx.step("pay", int),
            "sleep": lambda: ctx.sleep(5),
            "wait_for": lambda: ctx.wait_for("pay"),
            "submit": lambda: ctx.submit(other),
            "step_with": lambda: ctx.step_with(timeout=5)("pay", int),
        }
        calls[what]()

    with pytest.raises(ff.TaskFailed, match=r"called and never awaited") as failed:
        await kit.run_inline(job)
    assert f"ctx.{what}(" in failed.value.message
    assert "'pay'" in failed.value.message or what in ("sleep", "submit")
    assert failed.value.category == "not_awaited"


async def test_calls_that_are_awaited_later_or_left_to_tasks_are_not_forgotten(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def job(ctx: ff.Context) -> int:
        later = [ctx.step(str(place), int) for place in range(50)]
        left = asyncio.create_task(ctx.sleep(LONG))
        given_up = asyncio.create_task(ctx.wait_for("never"))
        given_up.cancel()
        total = sum(await asyncio.gather(*later))
        assert not left.done()
        return total

    assert await kit.run_inline(job) == 0
