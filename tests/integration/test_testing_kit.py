"""The testing kit, tested with itself: runs, the clock, crashes and replays."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres.scratch import TEMPLATE
from flowfabric.errors import ConnectionFailed, TransportError
from flowfabric.middleware import Middleware
from flowfabric.testing import (
    CrashChangedResult,
    Kit,
    Nondeterministic,
    NotFinished,
    NotReached,
    Server,
)
from tests.integration.conftest import Ledger
from tests.wiped import WipedServer

DAY = timedelta(days=1)


@pytest.fixture
def app(kit_app: ff.App) -> ff.App:
    return kit_app


@pytest.fixture
def order(app: ff.App, did: Ledger) -> ff.Task[[int], int]:
    """Three steps, of which the middle one is used twice."""

    @app.task
    async def order(ctx: ff.Context, price: int) -> int:
        reserved = await ctx.step("reserve", did.entry("reserve", price))
        total = 0
        for _ in range(2):
            total += await ctx.step("charge", did.entry("charge", reserved))
        return total + await ctx.step("ship", did.entry("ship", 1))

    return order


# Running


async def test_a_task_is_run_inline_and_gives_its_result(kit: Kit, order: ff.Task[[int], int], did: Ledger) -> None:
    assert await kit.run_inline(order, 10) == 21
    assert did == ["reserve", "charge", "charge", "ship"]


async def test_a_task_that_fails_raises_what_result_raises(kit: Kit, app: ff.App) -> None:
    @app.task
    async def broken() -> None:
        raise LookupError("nothing here")

    with pytest.raises(ff.TaskFailed, match="nothing here") as caught:
        await kit.run_inline(broken)
    assert caught.value.error_type == "LookupError"


async def test_a_wrong_argument_fails_before_anything_is_stored(kit: Kit, order: ff.Task[[int], int]) -> None:
    with pytest.raises(ff.InvalidInput, match="price"):
        await kit.run_inline(order, "much")  # type: ignore[arg-type]
    assert (await (await kit.engine()).find_executions()).items == []


async def test_options_of_the_submission_go_along(kit: Kit, app: ff.App) -> None:
    @app.task
    async def job(ctx: ff.Context) -> tuple[int, str]:
        return ctx.priority, ctx.lane_id

    assert await kit.run_inline(job.options(priority=7, lane="fast")) == (7, "fast")


async def test_run_all_runs_everything_including_new_work(kit: Kit, app: ff.App) -> None:
    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent(n: int) -> int:
        runs = [await child.options(lane=f"lane-{n}").submit(i) for i in range(n)]
        return sum([await run.result() for run in runs])

    runs = await parent.submit_many([3, 4])
    await kit.run_all()
    assert [await run.state() for run in runs] == [ff.State.COMPLETED] * 2
    assert [await run.result() for run in runs] == [3, 6]


async def test_run_all_without_an_app_says_so(kit: Kit) -> None:
    with pytest.raises(ff.InvalidInput, match=r"kit\.use"):
        await kit.run_all()


async def test_tasks_of_several_apps_run_together(kit: Kit, app: ff.App) -> None:
    other = ff.App(name="other")
    kit.use(other)

    @other.task
    async def there(n: int) -> int:
        return n + 1

    @app.task
    async def here(n: int) -> int:
        return await (await there.submit(n)).result()

    assert await kit.run_inline(here, 1) == 2


async def test_executions_that_need_capabilities_get_them(kit: Kit, app: ff.App) -> None:
    @app.task(capabilities=["gpu"])
    async def render() -> str:
        return "done"

    assert await kit.run_inline(render) == "done"
    with pytest.raises(NotFinished, match="waiting"):
        await kit.run_inline(render.options(capabilities=["tape"]))
    kit.capabilities.add("tape")
    assert await kit.run_inline(render.options(capabilities=["tape"])) == "done"


async def test_executions_that_no_worker_can_run_are_reported(
    kit: Kit, app: ff.App, order: ff.Task[[int], int]
) -> None:
    run = await order.submit(1)
    del app.tasks["order"]
    with pytest.raises(NotFinished, match="no task of that name"):
        await kit.run_until_ended(run)


async def test_the_kit_does_one_thing_at_a_time(kit: Kit, app: ff.App, order: ff.Task[[int], int]) -> None:
    @app.task
    async def nested() -> None:
        with pytest.raises(ff.InvalidInput, match="already running"):
            await kit.run_inline(order, 1)

    await kit.run_inline(nested)
    async with kit.worker(app):
        with pytest.raises(ff.InvalidInput, match="already running"):
            await kit.run_all()
    one, other = await asyncio.gather(*(kit.run_inline(order, n) for n in (1, 2)), return_exceptions=True)
    assert one == 3
    assert isinstance(other, ff.InvalidInput)
    assert len((await (await kit.engine()).find_executions(kinds=["order"])).items) == 1


class Seen(Middleware):
    """What passes: submissions, handlers, calls."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    async def submit(self, submission: Any, proceed: Any) -> Any:
        self.counts["submit"] += 1
        return await proceed(submission)

    async def execute(self, task: Any, proceed: Any) -> Any:
        self.counts["execute"] += 1
        return await proceed()

    async def call(self, method: str, proceed: Any) -> Any:
        self.counts[method] += 1
        return await proceed()


@pytest.mark.parametrize(
    "options",
    [{"notifications": False, "prepared_statements": False}, {"middleware": [Seen()]}],
    ids=["poll only", "middleware"],
)
async def test_the_app_is_used_as_it_is_set_up(kit: Kit, did: Ledger, options: dict[str, Any]) -> None:
    app = ff.App(**options)

    @app.task
    async def job(ctx: ff.Context) -> int:
        return sum([await ctx.step("one", did.entry("one", 1)) for _ in range(2)])

    with kit.crash_after("one"):
        assert await kit.run_inline(job) == 2
    with kit.replay_always():
        assert await kit.run_inline(job) == 2
    assert did == ["one"] * 4
    for seen in options.get("middleware", ()):
        assert seen.counts["submit"] == 2
        assert seen.counts["execute"] == 2 + 4  # twice for the crash; once, after each step and after the end
        assert seen.counts["complete_many"] == 2


async def test_running_handlers_are_not_cancelled_when_the_awaited_one_ends(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    async def slow(ctx: ff.Context) -> None:
        did.append("begun")
        await asyncio.sleep(0.1)
        did.append("done")

    @app.task
    async def quick() -> None:
        await slow.submit()
        while not did:
            await asyncio.sleep(0.001)

    await kit.run_inline(quick)
    assert did == ["begun", "done"]


# Apps and databases


async def test_an_app_is_as_it_was_when_the_kit_is_closed(flowfabric_dsn: str) -> None:
    app = ff.App("postgresql://nobody@nowhere/nothing")

    @app.task
    async def job() -> str:
        return "done"

    async with Kit(flowfabric_dsn) as kit:
        assert await kit.run_inline(job) == "done"
        assert await asyncio.to_thread(kit.wait, kit.run_inline(job)) == "done"
        assert app.dsn == flowfabric_dsn
    assert app.dsn == "postgresql://nobody@nowhere/nothing"
    with pytest.raises(ConnectionFailed):
        await job.submit()


async def test_nothing_stays_connected_when_the_kit_is_closed(flowfabric_server: WipedServer, did: Ledger) -> None:
    app = ff.App()

    @app.task
    async def job(ctx: ff.Context) -> None:
        await ctx.step("one", did.entry("one"))

    with flowfabric_server.fresh() as dsn:
        async with Kit(dsn) as kit:
            with kit.crash_after("one"):
                await kit.run_inline(job)
            await asyncio.to_thread(kit.wait, job.submit())
        connection = await asyncpg.connect(dsn)
        async with asyncio.timeout(30):  # a backend takes a moment to go
            while await connection.fetchval(
                "select exists (select from pg_stat_activity"
                " where application_name = 'flowfabric' and datname = current_database())"
            ):
                await asyncio.sleep(0.01)
        await connection.close()


@pytest.mark.parametrize("turn", [1, 2])
async def test_every_test_has_a_database_of_its_own(kit: Kit, order: ff.Task[[int], int], turn: int) -> None:
    await order.submit(turn)
    assert len((await (await kit.engine()).find_executions()).items) == 1


def test_a_plain_test_waits_for_the_kit(kit: Kit, order: ff.Task[[int], int], did: Ledger) -> None:
    assert kit.wait(kit.run_inline(order, 1)) == 3
    run = kit.wait(order.submit(2))
    kit.wait(kit.clock.advance(days=1))
    kit.wait(kit.run_all())
    assert kit.wait(run.result()) == 5


def test_a_plain_test_may_use_the_plain_client(kit: Kit, app: ff.App, order: ff.Task[[int], int]) -> None:
    with ff.Client(app) as client:
        run = client.submit(order, 2)
        kit.wait(kit.run_all())
        assert run.result() == 5


def test_every_run_of_a_plain_test_may_have_a_loop_of_its_own(kit: Kit, order: ff.Task[[int], int]) -> None:
    assert [asyncio.run(kit.run_inline(order, n)) for n in (1, 2)] == [3, 5]


async def test_a_server_of_ones_own_gives_databases_and_keeps_the_template(
    flowfabric_dsn: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.getbasetemp() / "must not be made"
    server = await asyncio.to_thread(Server, place, flowfabric_dsn)
    with server, server.database() as one, server.database() as two:
        assert one != two
        async with await ff.Engine.connect(one) as engine:
            assert await engine.audit() == []
    assert not place.exists()
    admin = await asyncpg.connect(flowfabric_dsn)
    left = {row["datname"] for row in await admin.fetch("select datname from pg_database")}
    await admin.close()
    assert TEMPLATE in left
    assert not {one.rpartition("/")[2].partition("?")[0], two.rpartition("/")[2].partition("?")[0]} & left


async def test_a_server_that_is_not_there_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        await asyncio.to_thread(Server, tmp_path, "postgresql://nobody:secret@127.0.0.1:1/nothing")


# Time


@pytest.fixture
def reminder(app: ff.App, did: Ledger) -> ff.Task[[], str]:
    @app.task
    async def reminder(ctx: ff.Context) -> str:
        began = await ctx.now()
        await ctx.sleep(2 * DAY)
        await ctx.step("send", did.entry("sent"))
        return str((await ctx.now() - began).days)

    return reminder


async def test_a_sleeping_task_sleeps_until_the_clock_is_moved(
    kit: Kit, reminder: ff.Task[[], str], did: Ledger
) -> None:
    run = await reminder.submit()
    await kit.run_all()
    assert (await run.state(), did) == (ff.State.DELAYED, [])
    await kit.clock.advance(days=1, hours=23)
    await kit.run_all()
    assert (await run.state(), did) == (ff.State.DELAYED, [])
    await kit.clock.advance(hours=1)
    await kit.run_all()
    assert (await run.result(), did) == ("2", ["sent"])


async def test_run_inline_passes_over_sleeps(kit: Kit, reminder: ff.Task[[], str], did: Ledger) -> None:
    before = await kit.clock.now()
    assert await kit.run_inline(reminder) == "2"
    assert did == ["sent"]
    assert 2 * DAY <= await kit.clock.now() - before < 3 * DAY


async def test_run_inline_passes_over_retries_and_delays(kit: Kit, app: ff.App) -> None:
    tries = itertools.count()

    @app.task(retry=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(3600)), delay=DAY)
    async def flaky() -> int:
        if (turn := next(tries)) < 3:
            raise ConnectionError("not now")
        return turn

    before = await kit.clock.now()
    assert await kit.run_inline(flaky) == 3
    assert DAY + timedelta(hours=3) <= await kit.clock.now() - before < 2 * DAY


async def test_a_plain_handler_sleeps_as_well(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    def plain(ctx: ff.SyncContext) -> int:
        ctx.step("before", did.entry("before"))
        ctx.sleep(DAY)
        return ctx.step("after", did.entry("after", 1))

    assert await kit.run_inline(plain) == 1
    assert did == ["before", "after"]


async def test_a_deadline_that_passes_ends_what_waits(kit: Kit, app: ff.App) -> None:
    @app.task(deadline=DAY)
    async def late(ctx: ff.Context) -> None:
        await ctx.sleep(2 * DAY)

    with pytest.raises(ff.TaskFailed) as caught:
        await kit.run_inline(late)
    assert caught.value.kind == "expired"


async def test_schedules_fire_when_the_clock_says_so(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    async def report() -> None:
        did.append("report")

    app.schedule(report, cron="0 8 * * *")
    await kit.run_all()
    assert did == []
    for days in (1, 2):
        await kit.clock.advance(days=1)
        await kit.run_all()
        assert did == ["report"] * days


async def test_the_clock_goes_to_a_time_and_to_what_is_due_next(kit: Kit, reminder: ff.Task[[], str]) -> None:
    assert await kit.clock.advance_to_next() is None
    run = await reminder.submit()
    await kit.run_all()
    target = await kit.clock.now() + DAY
    await kit.clock.advance_to(target)
    assert target <= await kit.clock.now() < target + timedelta(minutes=1)
    moved = await kit.clock.advance_to_next()
    assert moved is not None
    assert timedelta(hours=23) < moved < DAY
    await kit.run_all()
    assert await run.result() == "2"


@pytest.mark.parametrize(
    ("move", "field"),
    [
        (lambda clock: clock.advance(days=-1), "by"),
        (lambda clock: clock.advance_to(datetime(2020, 1, 1)), "time"),
        (lambda clock: clock.advance_to(datetime.fromisoformat("2020-01-01T00:00:00+00:00")), "by"),
    ],
)
async def test_the_clock_never_goes_back(kit: Kit, move: Callable[[Any], Any], field: str) -> None:
    before = await kit.clock.now()
    with pytest.raises(ff.InvalidInput) as caught:
        await move(kit.clock)
    assert caught.value.field == field
    assert before <= await kit.clock.now() < before + timedelta(minutes=1)


async def test_a_handler_keeps_its_lease_when_the_clock_moves_and_its_sleeps_are_over_in_time(
    kit: Kit, app: ff.App
) -> None:
    attempts: list[int] = []

    @app.task
    async def job(ctx: ff.Context) -> int:
        attempts.append(ctx.attempt_index)
        sleeping = asyncio.create_task(ctx.sleep(DAY))
        while not sleeping.done():  # busy: it cannot be parked, and has to notice by itself
            await asyncio.sleep(0.005)
        return (await ctx.now() - ctx.created_at).days

    run = await job.submit()
    async with kit.worker(app):
        async with asyncio.timeout(30):
            while not await run.steps():
                await asyncio.sleep(0.005)
        await kit.clock.advance(days=3)
        assert await run.result(30) == 3
    assert attempts == [0]


async def test_an_attempt_timeout_ends_a_handler_that_hangs(kit: Kit, app: ff.App) -> None:
    begun = asyncio.Event()

    @app.task(attempt_timeout=3600)
    async def hangs() -> None:
        begun.set()
        await asyncio.Event().wait()

    run = await hangs.submit()
    async with kit.worker(app):
        await begun.wait()
        await kit.clock.advance(hours=2)
        with pytest.raises(ff.TaskFailed):
            await run.result(30)


# Crashes


@pytest.mark.parametrize("step", ["reserve", "charge", "ship"])
async def test_a_step_that_was_recorded_before_a_crash_is_not_done_again(
    kit: Kit, order: ff.Task[[int], int], did: Ledger, step: str
) -> None:
    run = await order.submit(10)
    with kit.crash_after(step) as crash:
        assert await kit.run_until_ended(run) == 21
    assert crash.happened == 1
    assert did == ["reserve", "charge", "charge", "ship"]
    ended = [attempt.end_disposition for attempt in await run.attempts()]
    assert ended == ["reclaimed", "completed"]


async def test_a_step_whose_record_a_crash_prevented_is_done_again(
    kit: Kit, order: ff.Task[[int], int], did: Ledger
) -> None:
    with kit.crash_before("charge", n=1):
        assert await kit.run_inline(order, 10) == 21
    assert did == ["reserve", "charge", "charge", "charge", "ship"]


async def test_a_worker_may_die_again_and_again(kit: Kit, order: ff.Task[[int], int], did: Ledger) -> None:
    with kit.crash_after("charge", times=2), kit.crash_before("ship", times=2):
        assert await kit.run_inline(order, 10) == 21
    assert did == ["reserve", "charge", "charge", "ship", "ship", "ship"]


async def test_a_handler_that_takes_every_worker_down_is_given_up(
    kit: Kit, order: ff.Task[[int], int], did: Ledger
) -> None:
    with pytest.raises(ff.TaskFailed), kit.crash_before("reserve", times=6):
        await kit.run_inline(order, 10)
    assert did == ["reserve"] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "refund"}, "'refund' happened 0 of 1 times; the recorded steps: 'reserve', 'charge', 'ship'"),
        ({"step": "ship", "times": 2}, "'ship' happened 1 of 2 times"),
        ({"step": "charge", "n": 5}, r"'charge' \(use 5\) happened 0 of 1 times"),
    ],
)
async def test_a_crash_that_did_not_happen_fails_the_test(
    kit: Kit, order: ff.Task[[int], int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotReached, match=message), kit.crash_after(**options):
        await kit.run_inline(order, 10)


async def test_the_error_of_the_test_is_not_hidden_by_a_crash_that_did_not_happen(kit: Kit) -> None:
    with pytest.raises(LookupError), kit.crash_after("never"):
        raise LookupError


@pytest.mark.parametrize(("bad", "field"), [({"step": ""}, "step"), ({"step": "x", "times": 0}, "times")])
def test_a_crash_must_be_aimed_at_something(kit: Kit, bad: dict[str, Any], field: str) -> None:
    with pytest.raises(ff.InvalidInput) as caught, kit.crash_before(**bad):
        pass
    assert caught.value.field == field


async def test_a_crash_may_be_meant_for_one_of_several_tasks(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    async def child(ctx: ff.Context) -> int:
        return await ctx.step("work", did.entry("child", 1))

    @app.task
    async def parent(ctx: ff.Context) -> int:
        mine = await ctx.step("work", did.entry("parent", 1))
        return mine + await (await child.submit()).result()

    with kit.crash_before("work", task=child):
        assert await kit.run_inline(parent) == 2
    assert did == ["parent", "child", "child"]


@pytest.mark.parametrize("step", ["now", "sleep", "submit child", "result", "timeout of result"])
async def test_a_crash_at_what_is_recorded_beside_steps_loses_nothing(
    kit: Kit, app: ff.App, did: Ledger, step: str
) -> None:
    @app.task
    async def child() -> None:
        did.append("child")

    @app.task
    async def parent(ctx: ff.Context) -> bool:
        began = await ctx.now()
        await ctx.sleep(DAY)
        await (await child.submit()).result(DAY)
        return began + DAY <= await ctx.now() < began + 2 * DAY

    with kit.crash_after(step):
        assert await kit.run_inline(parent)
    assert len((await (await kit.engine()).find_executions(kinds=["child"])).items) == 1


async def test_a_plain_handler_is_cut_off_by_a_crash_too(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    def plain(ctx: ff.SyncContext) -> int:
        one = ctx.step("one", did.entry("one", 1))
        did.append("between")
        two = ctx.step("two", did.entry("two", 2))
        did.append("end")
        return one + two

    with kit.crash_after("one"), kit.crash_before("two"):
        assert await kit.run_inline(plain) == 3
    assert did == ["one", "between", "two", "between", "two", "end"]


async def test_a_crash_takes_down_everything_the_worker_held(kit: Kit, app: ff.App, did: Ledger) -> None:
    started = asyncio.Event()

    @app.task
    async def bystander(ctx: ff.Context) -> int:
        did.append("bystander")
        started.set()
        if ctx.reclaim_count == 0:
            await asyncio.Event().wait()
        return ctx.reclaim_count

    @app.task
    async def victim(ctx: ff.Context) -> int:
        await started.wait()
        await ctx.step("fatal", did.entry("fatal"))
        return ctx.reclaim_count

    runs = [await bystander.submit(), await victim.submit()]
    with kit.crash_after("fatal"):
        await kit.run_all()
    assert [await run.result() for run in runs] == [1, 1]
    assert did == ["bystander", "fatal", "bystander"]


async def test_a_crash_writes_nothing_more(kit: Kit, app: ff.App, did: Ledger) -> None:
    """A handler that does not take its end as one has no say any more."""

    @app.task
    async def stubborn(ctx: ff.Context) -> int:
        try:
            await ctx.step("first", did.entry("first"))
        except asyncio.CancelledError:
            client = await app.client()
            for attempt in (
                ctx.progress(50),
                ctx.step("second", did.entry("second")),
                client.engine.create_execution(execution_kind="ghost"),
            ):
                with pytest.raises((asyncio.CancelledError, TransportError)):
                    await attempt
            did.append("cut")
            return -1
        return ctx.reclaim_count

    run = await stubborn.submit()
    with kit.crash_after("first"):
        assert await kit.run_until_ended(run) == 1
    assert did == ["first", "cut"]
    assert [step.name for step in await run.steps()] == ["first"]
    assert (await (await kit.engine()).find_executions(kinds=["ghost"])).items == []


class LateAnswers(Middleware):
    """Holds back the result of a claim until the test releases it."""

    def __init__(self) -> None:
        self.wanted: str | None = None
        self.came = asyncio.Event()
        self.go: asyncio.Event | None = None

    async def call(self, method: str, proceed: Callable[[], Any]) -> Any:
        answer = await proceed()
        if method.startswith("claim") and any(one.execution_kind == self.wanted for one in answer):
            self.came.set()
            assert self.go is not None
            await self.go.wait()
        return answer


async def test_executions_claimed_in_a_lost_response_are_taken_over(kit: Kit, did: Ledger) -> None:
    late = LateAnswers()
    app = ff.App(middleware=[late])
    kit.use(app)

    @app.task
    async def bystander(ctx: ff.Context) -> int:
        return ctx.reclaim_count

    @app.task
    async def victim(ctx: ff.Context) -> int:
        if ctx.reclaim_count == 0:
            did.append("begun")
            await late.came.wait()
        await ctx.step("fatal", did.entry("fatal"))
        return ctx.reclaim_count

    runs = [await victim.submit()]
    with kit.crash_after("fatal"):
        async with kit.worker(app) as worker, asyncio.timeout(30):
            while not did:
                await asyncio.sleep(0.005)
            late.wanted, late.go = "bystander", worker.dead
            runs.append(await bystander.submit())
            await worker.dead.wait()
    await kit.run_all()
    assert [await run.result(30) for run in runs] == [1, 1]


async def test_a_worker_beside_the_test_can_die_too(kit: Kit, app: ff.App, did: Ledger, order: Any) -> None:
    run = await order.submit(10)
    with kit.crash_after("charge"):
        async with kit.worker(app) as worker:
            async with asyncio.timeout(30):
                await worker.dead.wait()
        assert await run.state() is ff.State.ACTIVE
    assert did == ["reserve", "charge"]
    await kit.run_all()
    assert (await run.result(), did) == (21, ["reserve", "charge", "charge", "ship"])


async def test_a_task_is_crashed_after_every_step(kit: Kit, order: ff.Task[[int], int], did: Ledger) -> None:
    report = await kit.crash_everywhere(order, 10)
    assert report.result == 21
    assert [str(crash.point) for crash in report.crashes] == [
        "step 'reserve' of order",
        "step 'charge' of order",
        "step 'charge' of order (use 1)",
        "step 'ship' of order",
    ]
    assert {crash.result for crash in report.crashes} == {21}
    assert did == ["reserve", "charge", "charge", "ship"] * report.runs


async def test_crashes_reach_into_children_sleeps_and_concurrent_steps(kit: Kit, app: ff.App) -> None:
    done: list[str] = []

    def entry(name: str) -> Callable[[], str]:
        def do() -> str:
            done.append(name)
            return name

        return do

    @app.task
    async def child(ctx: ff.Context, n: int) -> str:
        return await ctx.step(f"child {n}", entry(f"child {n}"))

    @app.task
    async def parent(ctx: ff.Context) -> list[str]:
        await ctx.sleep(DAY)
        first = await asyncio.gather(*(ctx.step(name, entry(name)) for name in ("a", "b")))
        runs = [await child.submit(n) for n in range(2)]
        return [*first, *[await run.result() for run in runs]]

    report = await kit.crash_everywhere(parent)
    assert report.result == ["a", "b", "child 0", "child 1"]
    points = sorted((crash.point.step, crash.point.n) for crash in report.crashes)
    assert points == sorted(
        (name, n)
        for name, uses in {
            "sleep": 1,
            "a": 1,
            "b": 1,
            "submit child": 2,
            "result": 2,
            "child 0": 1,
            "child 1": 1,
        }.items()
        for n in range(uses)
    )
    # A step beside the one a worker died after was under way: it may have been done twice, the others may not.
    counts = {name: done.count(name) - report.runs for name in ("a", "b", "child 0", "child 1")}
    assert all(0 <= more <= 1 for more in counts.values()), counts


async def test_a_result_that_a_crash_changes_is_found(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    async def forgetful(ctx: ff.Context) -> int:
        seen = [0]

        async def note() -> None:
            seen.append(1)  # kept beside what is remembered

        await ctx.step("note", note)
        await ctx.step("other", did.entry("other"))
        return sum(seen)

    with pytest.raises(CrashChangedResult, match=r"after step 'note' of forgetful the result was 0, without it 1"):
        await kit.crash_everywhere(forgetful)


async def test_a_task_that_a_crash_makes_fail_is_found(kit: Kit, app: ff.App) -> None:
    opened: set[str] = set()

    @app.task
    async def unprepared(ctx: ff.Context) -> None:
        handle = str(ctx.attempt_index)
        await ctx.step("open", opened.add, handle)
        if handle not in opened:
            raise LookupError("it is not open")

    with pytest.raises(CrashChangedResult, match=r"after step 'open' of unprepared the task failed: .* it is not open"):
        await kit.crash_everywhere(unprepared)


async def test_every_run_with_a_crash_must_be_a_new_one(kit: Kit, order: ff.Task[[int], int]) -> None:
    with pytest.raises(ff.InvalidInput, match="idempotency_key"):
        await kit.crash_everywhere(order.options(idempotency_key="one"), 10)


# Forced replay


async def test_a_handler_is_run_again_after_every_step_and_does_none_twice(kit: Kit, app: ff.App, did: Ledger) -> None:
    runs = itertools.count()

    @app.task
    async def job(ctx: ff.Context) -> int:
        next(runs)
        total = 0
        for name in ("one", "two", "three"):
            total += await ctx.step(name, did.entry(name, 1))
        return total

    with kit.replay_always():
        assert await kit.run_inline(job) == 3
    assert did == ["one", "two", "three"]
    assert next(runs) == 5  # once, after each step, and after the end
    assert await kit.run_inline(job) == 3
    assert next(runs) == 7  # outside the block it runs as usual


async def test_synchronous_handlers_children_sleeps_and_failures_survive_replays(
    kit: Kit, app: ff.App, did: Ledger
) -> None:
    @app.task
    def plain(ctx: ff.SyncContext, n: int) -> int:
        ctx.sleep(DAY)
        return n * ctx.step("plain", did.entry("plain", 2))

    async def fail() -> None:
        did.append("fail")
        raise LookupError("gone")

    @app.task
    async def parent(ctx: ff.Context) -> list[Any]:
        runs = [await plain.submit(n) for n in (1, 2)]
        results: list[Any] = [await run.result() for run in runs]
        try:
            await ctx.step("fail", fail)
        except LookupError as error:
            results.append(str(error))
        return results

    with kit.replay_always():
        assert await kit.run_inline(parent) == [2, 4, "gone"]
    assert sorted(did) == ["fail", "plain", "plain"]


async def test_concurrent_steps_are_finished_before_a_replay(kit: Kit, app: ff.App, did: Ledger) -> None:
    async def slow(name: str, turns: int) -> str:
        did.append(name)
        for _ in range(turns):
            await asyncio.sleep(0.002)
        return name

    @app.task
    async def job(ctx: ff.Context) -> list[str]:
        gathered = await asyncio.gather(*(ctx.step(f"g{n}", slow, f"g{n}", n * 5) for n in range(3)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ctx.step(f"t{n}", slow, f"t{n}", n * 5)) for n in range(3)]
        return [*gathered, *(task.result() for task in tasks)]

    with kit.replay_always():
        names = await kit.run_inline(job)
    assert names == ["g0", "g1", "g2", "t0", "t1", "t2"]
    assert sorted(did) == names


async def test_a_handler_that_never_rests_is_run_again_all_the_same(kit: Kit, app: ff.App) -> None:
    @app.task
    async def job(ctx: ff.Context) -> str:
        told = asyncio.Event()

        async def worker() -> None:
            await ctx.step("work", lambda: None)
            told.set()

        task = asyncio.create_task(worker())
        await told.wait()
        await task
        return "done"

    with kit.replay_always():
        assert await kit.run_inline(job) == "done"


def _another_branch(app: ff.App) -> ff.Task[[], Any]:
    turns = itertools.count()

    @app.task
    async def branches(ctx: ff.Context) -> None:
        await ctx.step("heads" if next(turns) == 0 else "tails", lambda: None)

    return branches


def _fewer_uses(app: ff.App) -> ff.Task[[], Any]:
    turns = itertools.count(5, -1)

    @app.task
    async def shrinks(ctx: ff.Context) -> None:
        for _ in range(next(turns)):
            await ctx.step("again", lambda: None)

    return shrinks


def _another_result(app: ff.App) -> ff.Task[[], Any]:
    turns = itertools.count()

    @app.task
    async def drifts(ctx: ff.Context) -> int:
        await ctx.step("one", lambda: None)
        return next(turns)

    return drifts


def _another_end(app: ff.App) -> ff.Task[[], Any]:
    turns = itertools.count()

    @app.task
    def fickle() -> None:
        if next(turns):
            raise LookupError

    return fickle


def _one_more_step(app: ff.App) -> ff.Task[[], Any]:
    turns = itertools.count()

    @app.task
    async def grows(ctx: ff.Context) -> None:
        if next(turns):
            with pytest.raises(Exception, match="new"):  # a handler that hides it hides nothing
                await ctx.step("new", lambda: None)

    return grows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_another_branch, "branches, .* not asked for: step 'heads'; asked for instead: step 'tails'"),
        (_fewer_uses, r"shrinks, .* ends without step 'again' \(use 2\), which it took before"),
        (_another_result, "drifts, .* returned 1 where it returned 0 before"),
        (_another_end, "fickle, .* raised LookupError where it returned None before"),
        (_one_more_step, "grows, .* takes step 'new', which it did not take before"),
    ],
)
async def test_a_handler_that_does_otherwise_when_it_is_run_again_is_found(
    kit: Kit, app: ff.App, make: Callable[[ff.App], ff.Task[[], Any]], message: str
) -> None:
    task = make(app)
    with pytest.raises(Nondeterministic, match=message), kit.replay_always():
        await kit.run_inline(task)


async def test_a_failing_task_fails_the_same_under_replay(kit: Kit, app: ff.App) -> None:
    @app.task(retry=ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(60)))
    async def broken(ctx: ff.Context) -> None:
        await ctx.step("one", lambda: None)
        raise LookupError(f"try {ctx.retry_count}")

    with pytest.raises(ff.TaskFailed, match="try 2"), kit.replay_always():
        await kit.run_inline(broken)
