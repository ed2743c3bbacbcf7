"""What a task says while it works reaches every reader: handlers that emit, readers that follow, tails that wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.bridges import sse
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.engine import tails
from flowfabric.errors import ResourceExhausted, Unavailable, ValidationFailed
from flowfabric.values.attempt import Claimed
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.stream import BestEffortLive, Frame, Gap, KeepAlive, NewAttempt, NewFrame
from flowfabric.worker.durable.emitting import MAX_FRAMES
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import end_sleeps, started, submit
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATIENCE = 60.0
LIVE = BestEffortLive(ttl=timedelta(seconds=30))


@pytest_asyncio.fixture(loop_scope="session")
async def app(database: str) -> AsyncIterator[ff.App]:
    made = ff.App(database, name="streams")
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def working(app: ff.App, **options: Any) -> AsyncIterator[ff.Worker]:
    async with ff.Worker(app, poll=0.05, **options) as worker:
        yield worker


async def read(run: ff.Run[Any], **options: Any) -> list[Any]:
    """Everything of a run: texts of frames, and where attempts change."""
    async with asyncio.timeout(PATIENCE):
        return [item.text if isinstance(item, Frame) else item async for item in run.stream(**options)]


async def announced(sql: asyncpg.Connection[Any], count: int) -> None:
    """Wait until readers wait for the frames of so many executions, and the database knows it."""
    async with asyncio.timeout(PATIENCE):
        while await sql.fetchval("select count(*) from flowfabric.watch where topic = 'frames'") != count:
            await asyncio.sleep(0.005)


async def listens(engine: ff.Engine, execution_id: ff.ExecutionId) -> None:
    """Wait until notifications reach the engine, and none of its readers waits."""
    await engine.tail_stream(execution_id, 0, block=timedelta(milliseconds=50))
    assert engine._listener is not None
    await engine._listener.listening(PATIENCE)
    await until(lambda: engine.tails._task is None or engine.tails._task.done())


# ---- handlers


async def test_a_reader_gets_what_a_handler_emits_in_order(app: ff.App) -> None:
    @app.task
    async def answer(ctx: ff.Context, n: int) -> int:
        for token in range(n):
            await ctx.emit(f"{token} ", type="delta")
        await ctx.emit({"tokens": n}, type="usage")
        await ctx.emit(b"\xff\0")
        return n

    async with working(app):
        run = await answer.submit(500)
        items = [item async for item in run.stream()]
        assert await run.result() == 500
    assert "".join(item.text for item in items[:500]) == "".join(f"{n} " for n in range(500))
    assert [(item.type, item.kind) for item in items[499:]] == [
        ("delta", "stdout"),
        ("usage", "event"),
        ("blob", "blob"),
    ]
    assert items[500].json() == {"tokens": 500}
    assert items[501].payload == b"\xff\0"
    # Resumed anywhere, nothing is missing and nothing comes twice.
    for place in (0, 250, 501):
        rest = [item async for item in run.stream(after=items[place].cursor)]
        assert rest == items[place + 1 :]


async def test_everything_is_stored_before_the_result(app: ff.App) -> None:
    @app.task
    async def quick(ctx: ff.Context) -> None:
        for n in range(20):
            await ctx.emit(str(n))

    async with working(app) as worker:
        runs = await quick.submit_many([()] * 50)
        for run in runs:
            await run.result()
            page = await worker.engine.read_stream(run.execution_id)
            assert [frame.text for frame in page.frames] == [str(n) for n in range(20)]
            assert page.closed_reason == "attempt_success"


async def test_handlers_share_round_trips(app: ff.App, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    append = ff.Engine.append_frames

    async def counted(engine: ff.Engine, items: Any) -> Any:
        calls.append(len(items))
        return await append(engine, items)

    monkeypatch.setattr(ff.Engine, "append_frames", counted)

    @app.task
    async def talk(ctx: ff.Context) -> None:
        for n in range(50):
            await ctx.emit(str(n))
            await asyncio.sleep(0)

    async with working(app):
        runs = await talk.submit_many([()] * 100)
        for run in runs:
            await run.result()
    assert sum(calls) == 5000
    assert len(calls) < 500


async def test_a_failure_and_its_retry_are_two_streams_that_one_reader_follows(app: ff.App) -> None:
    @app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0.01)))
    async def flaky(ctx: ff.Context) -> None:
        await ctx.emit(f"attempt {ctx.attempt_index}")
        if ctx.attempt_index == 0:
            raise ValueError("boom")

    async with working(app):
        run = await flaky.submit()
        found = await read(run)
        assert found == ["attempt 0", NewAttempt(attempt_index=1, reason="attempt_failure"), "attempt 1"]
        assert await read(run, attempt=0) == ["attempt 0"]
        assert await read(run, after="1/0-0") == ["attempt 1"]


async def test_a_handler_that_waits_does_not_repeat_itself(app: ff.App, database: str) -> None:
    runs = []

    @app.task
    async def patient(ctx: ff.Context) -> None:
        runs.append(1)
        await ctx.emit("before", type="a")
        await ctx.summarize({"n": 1})
        await ctx.step("inside", inside, ctx)
        await ctx.emit("before too", type="b")
        await ctx.sleep(3600)
        await ctx.emit("after", type="a")
        await ctx.summarize({"n": 2})

    async def inside(ctx: ff.Context) -> None:
        await ctx.emit("in the step", type="a")

    async with working(app):
        run = await patient.submit()
        while await run.state() is not ff.State.DELAYED:
            await asyncio.sleep(0.005)
        await end_sleeps(database)
        assert await read(run) == ["before", '{"n":1}', "in the step", "before too", "after", '{"n":2}']
        await run.result()
        summary = await run.summary()
        assert summary is not None and (summary.document, summary.version) == ({"n": 2}, 2)
    assert len(runs) == 2


async def test_a_worker_that_stops_leaves_the_attempt_and_its_step_begins_again(app: ff.App) -> None:
    runs = 0

    @app.task
    async def answer(ctx: ff.Context) -> str:
        async def ask_model() -> str:
            nonlocal runs
            runs += 1
            await ctx.emit({"step": "model"}, type="begin")
            await ctx.emit(f"token of run {runs}", type="delta", durability_mode="durable")
            if runs == 1:
                reached.set()
                await asyncio.Event().wait()
            return f"run {runs}"

        await ctx.emit(f"outside of steps {runs}")
        return await ctx.step("model", ask_model)

    reached = asyncio.Event()
    async with working(app, grace=0.01):
        run = await answer.submit()
        await asyncio.wait_for(reached.wait(), PATIENCE)
    async with working(app):
        begin = '{"step":"model"}'
        found = await read(run)
        assert found == ["outside of steps 0", begin, "token of run 1", begin, "token of run 2"]
        assert await run.result() == "run 2"


async def test_a_synchronous_handler_emits_too(app: ff.App) -> None:
    @app.task
    def plain(ctx: ff.SyncContext) -> None:
        ctx.print("one", 1)
        ctx.emit("two", type="x", durability_mode="durable")
        ctx.sleep(0.1)
        ctx.emit("three")
        ctx.summarize({"done": True, "left": ff.NULL})

    async with working(app):
        run = await plain.submit()
        assert (await read(run))[:3] == ["one 1\n", "two", "three"]
        summary = await run.summary()
        assert summary is not None and summary.document == {"done": True, "left": None}


async def test_durable_waits_for_the_commit_and_buffered_does_not(app: ff.App, engine: ff.Engine) -> None:
    """By the argument, and without one by the policy of the execution."""
    seen: dict[str, list[int]] = {}

    @app.task
    async def careful(ctx: ff.Context, policy: str) -> None:
        counts = seen.setdefault(policy, [])
        for mode in ("durable", None, "buffered"):
            # Nothing gives way to the call that stores the frame, except a wait for it.
            await ctx.emit("x", durability_mode=mode)  # type: ignore[arg-type]
            counts.append(ctx._scope.emitting._pending)  # type: ignore[attr-defined]

    async with working(app):
        for mode in ("buffered", "durable"):
            policy = ExecutionPolicy(stream_policy=StreamPolicy(durability_mode=mode))  # type: ignore[arg-type]
            made = await submit(
                engine, execution_kind=careful.name, policy=policy, input_payload=b'{"policy":"%s"}' % mode.encode()
            )
            run: ff.Run[Any] = (await app.client()).run(made)
            await run.result()
            assert await read(run) == ["x"] * 3
    assert seen == {"buffered": [0, 1, 2], "durable": [0, 0, 1]}


async def test_emit_presses_back(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    emitted = 0

    @app.task
    async def flood(ctx: ff.Context) -> None:
        nonlocal emitted
        for _ in range(3000):
            await ctx.emit("x")
            emitted += 1

    async with working(app):
        run = await flood.submit()
        await until(lambda: emitted > 0)
        async with sql.transaction():
            # Appends wait for the lock on the execution.
            await sql.execute("select from flowfabric.execution where id = $1 for update", run.execution_id)
            stored = await sql.fetchval("select max(frames) from flowfabric.frame") or 0
            full = stored + MAX_FRAMES - 1  # and one that waits
            await until(lambda: emitted >= full)
            for _ in range(100):
                await asyncio.sleep(0)
            assert emitted == full
        assert len(await read(run)) == 3000


async def test_a_lost_lease_ends_emitting(app: ff.App) -> None:
    going: list[str] = []

    @app.task
    async def endless(ctx: ff.Context) -> None:
        going.append("begun")
        try:
            while True:
                await ctx.emit("x", durability_mode="durable")
        finally:
            going.append("stopped")

    async with working(app):
        run = await endless.submit()
        await until(lambda: "begun" in going)
        await run.cancel()
        await until(lambda: "stopped" in going)
        found = await read(run)
        assert set(found) <= {"x"}


async def test_a_refused_document_fails_the_attempt(app: ff.App) -> None:
    @app.task
    async def large(ctx: ff.Context) -> None:
        for n in range(30):
            await ctx.summarize({f"k{n}": "x" * 60_000})

    async with working(app):
        run = await large.submit()
        with pytest.raises(
            ff.TaskFailed, match=r"retention_limit_exceeded: .* document would have .* allowed: 1048576"
        ):
            await run.result()


async def test_bad_emissions_are_refused_where_they_are_made(app: ff.App) -> None:
    found: list[Any] = []

    @app.task
    async def wrong(ctx: ff.Context) -> None:
        for data, options in (
            ("\ud800", {}),
            (object(), {}),
            ("x", {"type": "x" * 129}),
            ("x", {"type": "\0"}),
            ("x", {"live": True, "ttl": -1}),
            ("x", {"kind": "other"}),
            ("x", {"kind": []}),
            ("x", {"live": "yes"}),
            ("x", {"durability_mode": "sometimes"}),
            ("x", {"live": True, "durability_mode": "durable"}),
            ("x", {"ttl": 5}),
            ({"x": [float("nan")]}, {}),
            ("x", {"type": "end"}),
            ("x", {"type": "new_attempt"}),
        ):
            with pytest.raises(ff.InvalidInput) as caught:
                await ctx.emit(data, **options)  # type: ignore[arg-type]
            found.append(caught.value.field)
        with pytest.raises(ValidationFailed) as large:
            await ctx.emit(b"x" * 65_537)
        found.append(large.value.kind)
        for patch in ([], 5, None, {"a": "\0"}, {"a": object()}, {"a": float("nan")}, {"a": {"b": [float("inf")]}}):
            with pytest.raises(ff.InvalidInput):
                await ctx.summarize(patch)  # type: ignore[arg-type]

    async with working(app):
        run = await wrong.submit()
        await run.result()
        assert await read(run) == []
    assert found == [
        "data",
        "data",
        "frame_type",
        "frame_type",
        "ttl",
        "kind",
        "kind",
        "live",
        "durability_mode",
        "durability_mode",
        "ttl",
        "data",
        "type",
        "type",
        "retention_limit_exceeded",
    ]


class Reverse:
    """A codec that turns bytes around."""

    name = "reverse"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    decode = encode


async def test_frames_pass_the_codecs_and_summaries_cannot(database: str) -> None:
    app = ff.App(database, name="sealed", codecs=[Reverse()])

    @app.task
    async def secret(ctx: ff.Context) -> None:
        await ctx.emit("hello")
        with pytest.raises(ff.InvalidInput) as caught:
            await ctx.summarize({"a": 1})
        assert caught.value.field == "plain"
        await ctx.summarize({"a": 1}, plain=True)

    async with working(app) as worker:
        run = await secret.submit()
        await run.result()
        assert await read(run) == ["hello", '{"a":1}']
        stored = await worker.engine.read_stream(run.execution_id)
        assert (stored.frames[0].payload, stored.frames[0].encoding) == (b"olleh", "json+reverse")
    await app.close()


async def test_a_reader_gets_past_a_frame_that_it_cannot_decode(app: ff.App, engine: ff.Engine) -> None:
    held = await started(engine)
    for payload, encoding in ((b"first", None), (b"secret", "json+unknown"), (b"last", None)):
        await engine.append_frame(held.handle, NewFrame(payload=payload, encoding=encoding))
    await engine.complete(held.handle, b"1")
    run: ff.Run[Any] = (await app.client()).run(held.execution_id)
    with pytest.raises(CannotDecode) as caught:
        await read(run)
    assert "secret" not in str(caught.value)
    assert caught.value.cursor is not None
    assert await read(run, after=caught.value.cursor) == ["last"]


async def test_what_a_task_logs_becomes_frames(app: ff.App) -> None:
    log = logging.getLogger("some.module")
    handler = ff.EmitHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(handler)

    @app.task
    async def talkative(ctx: ff.Context) -> None:
        log.warning("careful")
        await asyncio.to_thread(log.error, "from a thread")

    try:
        log.warning("outside")
        async with working(app):
            run = await talkative.submit()
            frames = [item async for item in run.stream()]
    finally:
        log.removeHandler(handler)
    assert [(f.text, f.type) for f in frames] == [("WARNING careful\n", "log"), ("ERROR from a thread\n", "log")]


@contextlib.contextmanager
def emitting_logs() -> Iterator[logging.Logger]:
    """A logger whose lines become frames."""
    log, handler = logging.getLogger("some.module"), ff.EmitHandler()
    log.addHandler(handler)
    log.propagate = False  # a report of the test could not hold every line
    try:
        yield log
    finally:
        log.propagate = True
        log.removeHandler(handler)


async def test_log_lines_of_steps_and_last_lines_become_frames(app: ff.App) -> None:
    @app.task
    async def of_async(ctx: ff.Context) -> None:
        async def quick() -> None:
            log.warning("async step")

        await ctx.step("quick", quick)
        await ctx.step("thread", log.warning, "sync step")
        await asyncio.to_thread(log.warning, "thread")
        log.warning("last")

    @app.task
    def of_sync(ctx: ff.SyncContext) -> None:
        ctx.step("thread", log.warning, "step")
        log.warning("last")

    @app.task
    def without_context() -> None:
        log.warning("last")

    @app.task
    async def failing() -> None:
        log.warning("the reason")
        raise ValueError("boom")

    @app.task
    async def waiting(ctx: ff.Context) -> None:
        await ctx.sleep(0.1)
        await ctx.step("thread", log.warning, "step")
        log.warning("last")

    with emitting_logs() as log:
        async with working(app):
            found = {task.name: await read(await task.submit()) for task in
                     (of_async, of_sync, without_context, failing, waiting)}  # fmt: skip
    assert list(found.values()) == [
        ["async step\n", "sync step\n", "thread\n", "last\n"],
        ["step\n", "last\n"],
        ["last\n"],
        ["the reason\n"],
        ["step\n", "last\n"],
    ]


async def test_log_lines_keep_their_place_among_emissions(app: ff.App) -> None:
    @app.task
    async def both(ctx: ff.Context) -> None:
        for n in range(4):
            log.warning("log %d", n)
            await ctx.emit(f"emit {n}\n")

    @app.task
    def both_sync(ctx: ff.SyncContext) -> None:
        for n in range(4):
            log.warning("log %d", n)
            ctx.emit(f"emit {n}\n")

    with emitting_logs() as log:
        async with working(app):
            for task in (both, both_sync):
                assert await read(await task.submit()) == [
                    f"{word} {n}\n" for n in range(4) for word in ("log", "emit")
                ]


async def test_log_lines_beyond_the_buffer_are_counted(app: ff.App) -> None:
    @app.task
    async def loud() -> None:
        for n in range(MAX_FRAMES + 50):
            log.warning("%d", n)

    with emitting_logs() as log:
        async with working(app):
            frames = await read(await loud.submit())
    assert frames == [*(f"{n}\n" for n in range(MAX_FRAMES)), "[50 lines were dropped]\n"]


async def test_no_log_line_is_too_long_or_no_text(app: ff.App) -> None:
    @app.task
    async def talkative(ctx: ff.Context) -> None:
        log.warning("x" * 100_000)
        log.warning("lone \ud800")

    with emitting_logs() as log:
        async with working(app):
            frames = await read(await talkative.submit())
    assert frames == ["x" * 65_535 + "\n", "lone \\ud800\n"]


async def test_a_task_that_a_handler_left_behind_does_not_keep_it_from_ending(app: ff.App) -> None:
    @app.task
    async def careless(ctx: ff.Context) -> None:
        async def chatter() -> None:
            while True:
                await ctx.emit("still here")
                await asyncio.sleep(0)

        left.append(asyncio.create_task(chatter()))
        await ctx.emit("first")

    left: list[asyncio.Task[None]] = []
    async with working(app):
        run = await careless.submit()
        await run.result(timeout=PATIENCE)
        assert (await read(run))[0] == "first"


async def test_emitting_after_the_end_is_refused(app: ff.App) -> None:
    kept: list[ff.Context] = []

    @app.task
    async def leaky(ctx: ff.Context) -> None:
        kept.append(ctx)

    async with working(app) as worker:
        run = await leaky.submit()
        await run.result()
        await until(lambda: not worker.held)
        for call in (kept[0].emit("late"), kept[0].summarize({"late": True})):
            with pytest.raises(ff.LeaseLost, match="ended"):
                await call
        assert await read(run) == []


# ---- followers


async def emitted(engine: ff.Engine, count: int, cap: int) -> Claimed:
    """An execution that emitted so many texts, of which so many are kept."""
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=cap)))
    for n in range(count):
        await engine.append_frame(held.handle, NewFrame(payload=b"%d" % n))
    return held


async def test_a_reader_learns_what_is_no_longer_kept(app: ff.App, engine: ff.Engine) -> None:
    held = await emitted(engine, 4, 10)
    run: ff.Run[Any] = (await app.client()).run(held.execution_id)
    reader, seen = run.stream(), []
    async with asyncio.timeout(PATIENCE):
        for _ in range(4):
            seen.append(await anext(reader))
        for n in range(4, 25):
            await engine.append_frame(held.handle, NewFrame(payload=b"%d" % n))
        await engine.complete(held.handle, None)
        kept = [str(n) for n in range(15, 25)]
        # In one that follows, in one that begins, and in one that resumes; a page says it too.
        rest = [item.text if isinstance(item, Frame) else item async for item in reader]
        assert [*gaps(rest)] == [11, *kept]
        assert [*gaps(await read(run))] == [15, *kept]
        for place in range(4):
            assert [*gaps(await read(run, after=seen[place].cursor))] == [14 - place, *kept]
        # A cursor without a number: whether something is missing cannot be known.
        bare = seen[2].cursor.rpartition("/")[0]
        assert [*gaps(await read(run, after=bare))] == [None, *kept]
        first = [item async for item in run.stream(after=seen[3].cursor)]
        assert isinstance(first[0], Gap)
        assert [*gaps(await read(run, after=first[0].cursor))] == kept
        assert [*gaps(await read(run, after=first[1].cursor))] == kept[1:]
        bare = first[1].cursor.rpartition("/")[0]
        assert [*gaps(await read(run, after=bare))] == kept[1:]
    page = await engine.read_stream(held.execution_id)
    assert (page.dropped, page.frames[0].number) == (15, 16)


def gaps(items: list[Any]) -> Iterator[Any]:
    for item in items:
        yield item.missing if isinstance(item, Gap) else item


async def test_a_reader_is_opened_before_its_first_item(app: ff.App, engine: ff.Engine) -> None:
    client = await app.client()
    held = await emitted(engine, 2, 10)
    await engine.fail(held.handle, "boom", failure_class="permanent")
    unknown: ff.Run[Any] = client.run("0b0e8400-e29b-41d4-a716-446655440000")
    run: ff.Run[Any] = client.run(held.execution_id)
    with pytest.raises(ff.NotFound):
        await unknown.stream().open()
    with pytest.raises(ff.InvalidInput):
        await run.stream(after="7/1-1").open()
    body = b"".join([part async for part in sse.events(unknown.stream())])
    assert body.startswith(b'event: error\ndata: {"kind":"not_found"') and body.endswith(sse.end())
    reader = await run.stream().open()
    assert [item.text async for item in reader] == ["0", "1"]  # type: ignore[union-attr]
    assert await reader.state() == "failed"
    body = b"".join([part async for part in sse.events(run.stream())])
    assert body.endswith(sse.end("failed"))
    closed = run.stream()
    await closed.aclose()
    assert [item async for item in closed] == []


async def test_a_reader_waits_for_frames_and_wakes_within_milliseconds(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as writer:
        app = ff.App(database, name="reader")
        held = await started(writer)
        run: ff.Run[Any] = (await app.client()).run(held.execution_id)
        latencies: list[float] = []

        async def follow() -> None:
            async for item in run.stream():
                assert isinstance(item, Frame)
                latencies.append(time.perf_counter() - float(item.text))

        task = asyncio.create_task(follow())
        for n in range(20):
            await announced(sql, 1)
            await writer.append_frame(held.handle, NewFrame(payload=repr(time.perf_counter()).encode()))
            await until(lambda: len(latencies) > n)  # noqa: B023 - awaited here
        await writer.complete(held.handle, None)
        await asyncio.wait_for(task, PATIENCE)
        assert sorted(latencies)[5] < 0.5, "a poll takes longer"
        await app.close()


@pytest.mark.parametrize("notifications", [True, False])
async def test_frames_and_ends_arrive_with_and_without_notifications(database: str, notifications: bool) -> None:
    async with await ff.Engine.connect(database) as writer:
        app = ff.App(database, name="reader", notifications=notifications)
        held = [await started(writer) for _ in range(10)]
        client = await app.client()
        tasks = [asyncio.create_task(read(client.run(one.execution_id))) for one in held]
        for n in range(5):
            await until(lambda: client.engine.tails.count == 10)
            await writer.append_frames([(one.handle, NewFrame(payload=b"%d" % n)) for one in held])
        await writer.complete_many([one.handle for one in held])
        assert await asyncio.gather(*tasks) == [[str(n) for n in range(5)]] * 10
        assert client.engine.tails.count == 0
        await app.close()


async def test_options_of_following(app: ff.App, engine: ff.Engine) -> None:
    held = await started(engine)
    run: ff.Run[Any] = (await app.client()).run(held.execution_id)
    await engine.append_frame(held.handle, NewFrame(payload=b"durable"))
    await engine.append_frame(held.handle, NewFrame(payload=b"live", mode=LIVE))
    seen: list[Any] = []
    with pytest.raises(ff.TimedOut):
        async for item in run.stream(timeout=1.5, live=False):
            seen.append(item)
    assert [item.text for item in seen] == ["durable"]
    async for item in run.stream(keep_alive=0.05):
        seen.append(item)
        if isinstance(item, KeepAlive):
            break
    assert seen[-1].cursor == seen[-2].cursor
    for bad in ({"after": "x"}, {"after": "1-1"}, {"after": []}, {"attempt": -1}, {"keep_alive": 0}, {"timeout": -1},
                {"live": 5}, {"live": 1}):  # fmt: skip
        with pytest.raises(ff.InvalidInput) as caught:
            run.stream(**bad)  # type: ignore[arg-type]  # before a response of a server begins
        assert caught.value.field == next(iter(bad))
    with pytest.raises(ff.InvalidInput) as caught:
        async for _ in run.stream(after="1/0-0"):  # there is no second attempt
            pass
    assert caught.value.field == "after"
    with pytest.raises(ff.NotFound):
        async for _ in (await app.client()).run("0b0e8400-e29b-41d4-a716-446655440000").stream():
            pass


@pytest.mark.parametrize("options", [{}, {"keep_alive": 0.05}, {"timeout": 60}, {"keep_alive": 60, "timeout": 60}])
async def test_a_reader_ends_with_its_engine(
    database: str, engine: ff.Engine, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    held = await started(engine)
    reading = ff.App(database, name="reading")
    client = await reading.client()
    task = asyncio.create_task(read(client.run(held.execution_id), **options))
    await until(lambda: client.engine.tails.count == 1)
    await reading.close()
    with pytest.raises(Unavailable):
        await task
    assert caplog.messages == []


async def test_readers_at_the_same_position_share_a_page(
    app: ff.App, engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read_streams = ff.Engine._read_streams

    async def counted(engine: ff.Engine, items: Any, *options: Any) -> Any:
        asked.append(len(items))
        return await read_streams(engine, items, *options)

    held = await started(engine)
    client = await app.client()
    tasks = [asyncio.create_task(read(client.run(held.execution_id))) for _ in range(50)]
    await until(lambda: client.engine.tails.count == 50)
    monkeypatch.setattr(ff.Engine, "_read_streams", counted)
    await engine.append_frame(held.handle, NewFrame(payload=b"x" * 60_000))
    await engine.complete(held.handle, b"1")
    assert await asyncio.gather(*tasks) == [["x" * 60_000]] * 50
    assert max(asked) <= 2  # positions: before and after the frame


async def test_a_run_that_was_never_claimed_ends_its_stream(app: ff.App, engine: ff.Engine) -> None:
    execution_id = await submit(engine)
    run: ff.Run[Any] = (await app.client()).run(execution_id)
    client = await app.client()
    task = asyncio.create_task(read(run))
    await until(lambda: client.engine.tails.count == 1)
    await run.cancel()
    assert await task == []


async def test_a_thousand_readers_that_come_and_go_leave_nothing(
    app: ff.App, engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    held = [await started(engine) for _ in range(5)]
    client = await app.client()
    tails, connections = client.engine.tails, "select count(*) from pg_stat_activity where datname = current_database()"
    before = 0, 0
    for number in range(6):
        readers = [asyncio.create_task(read(client.run(one.execution_id))) for one in held for _ in range(40)]
        await until(lambda: tails.count == 200)
        await announced(sql, 5)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        assert tails.count == 0
        await announced(sql, 0)
        await until(lambda: tails._task is not None and tails._task.done())
        assert (tails._waiting, tails._new, tails._left) == ({}, set(), {})
        if number == 0:
            before = await sql.fetchval(connections), len(asyncio.all_tasks())
    assert await sql.fetchval(connections) <= before[0]
    assert len(asyncio.all_tasks()) <= before[1]


async def test_a_flow_is_followed_as_a_whole(app: ff.App) -> None:
    @app.task
    async def node(ctx: ff.Context, name: str) -> str:
        for n in range(3):
            await ctx.emit(f"{name}{n}")
        return name

    flow = app.flow("two")
    first = flow.add(node, "a", name="first")
    flow.add(node, "b", name="second", after=[first])
    async with working(app):
        run = await flow.submit()
        async with asyncio.timeout(PATIENCE):
            items = [item async for item in run.stream()]
    assert [(item.node, item.text) for item in items if isinstance(item, Frame)] == [
        *(("first", f"a{n}") for n in range(3)),
        *(("second", f"b{n}") for n in range(3)),
    ]


async def test_a_flow_is_continued_after_one_cursor(app: ff.App) -> None:
    @app.task
    async def node(ctx: ff.Context, name: str) -> None:
        for n in range(3):
            await ctx.emit(f"{name}{n}", type="delta")

    flow = app.flow("two")
    for name in ("a", "b"):
        flow.add(node, name, name=name)
    async with working(app):
        run = await flow.submit()
        await run.wait(PATIENCE)
    reader, texts, cursors = run.stream(), [], []
    async for item in reader:
        assert isinstance(item, Frame)
        texts.append(item.text)
        cursors.append(reader.cursor)
    assert sorted(texts) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for place, cursor in enumerate(cursors):
        rest = [item.text async for item in run.stream(after=cursor)]  # type: ignore[union-attr]
        assert sorted([*texts[: place + 1], *rest]) == sorted(texts)
    body = b"".join([part async for part in sse.events(run.stream(after=cursors[-2]))])
    assert body == (
        f'id: {cursors[-1]}\nevent: delta\ndata: {{"node":"{texts[-1][0]}","text":"{texts[-1]}"}}\n\n'.encode()
        + sse.end("completed")
    )
    with pytest.raises(ff.InvalidInput, match="no node") as caught:
        await run.stream(after={"nope": "0/0-0"}).open()
    assert caught.value.field == "after"


async def test_a_silent_flow_is_kept_alive_as_a_whole(app: ff.App) -> None:
    release = asyncio.Event()

    @app.task
    async def silent() -> None:
        await release.wait()

    flow = app.flow("silent")
    for number in range(20):
        flow.add(silent, name=f"{number}")
    async with working(app):
        run = await flow.submit()
        asyncio.get_running_loop().call_later(0.3, release.set)
        kept: list[Any] = []
        async for item in run.stream(keep_alive=0.1):
            kept.append(item)
            if release.is_set():
                break
        assert {type(item) for item in kept} == {KeepAlive}
        assert len(kept) < 10  # one for all 20 nodes, not one for each


async def test_bad_options_of_following_a_flow_are_named(app: ff.App) -> None:
    @app.task
    async def node(ctx: ff.Context) -> None:
        await ctx.emit("x")

    flow = app.flow("one")
    flow.add(node, name="a")
    async with working(app):
        run = await flow.submit()
        for bad in ({"after": "x"}, {"after": [1]}, {"after": {"a": "x"}}, {"live": 5}, {"keep_alive": 0},
                    {"timeout": -1}):  # fmt: skip
            with pytest.raises(ff.InvalidInput) as caught:
                run.stream(**bad)  # type: ignore[arg-type]
            assert caught.value.field == next(iter(bad))
        (frame,) = [item async for item in run.stream()]
        assert [item async for item in run.stream(after={"a": frame.cursor})] == []


async def test_following_a_flow_has_a_time_limit(app: ff.App) -> None:
    @app.task
    async def node() -> None:
        pass

    flow = app.flow("one")
    flow.add(node, name="only")
    run = await flow.submit()
    with pytest.raises(ff.TimedOut):
        async for _ in run.stream(timeout=0.05):
            pass
    with pytest.raises(ff.InvalidInput):
        async for _ in run.stream(timeout=-1):
            pass


async def test_the_sync_client_follows_too(database: str) -> None:
    body = await asyncio.to_thread(follow_in_a_thread, database)
    assert body.startswith(b"id: 0/")
    assert body.endswith(sse.end("completed"))


def follow_in_a_thread(database: str) -> bytes:
    app = ff.App(database, name="sync")

    @app.task
    async def say(ctx: ff.Context) -> None:
        await ctx.emit("a")
        await ctx.summarize({"b": 1})

    with ff.Client(app) as client:
        run = client.submit(say)

        async def work() -> None:
            async with ff.Worker(app) as worker:
                await worker.idle()

        asyncio.run(work())
        assert [item.text for item in run.stream()] == ["a", '{"b":1}']  # type: ignore[union-attr]
        summary = run.summary()
        assert summary is not None and summary.document == {"b": 1}
        return b"".join(sse.events(run.stream()))


# ---- tails


async def test_waiting_tails_hold_no_connection(database: str, sql: asyncpg.Connection[Any]) -> None:
    """The first acceptance test: 4 connections, 8 tails on one stream; an append reaches all of them."""
    async with await ff.Engine.connect(database, max_size=4) as engine:
        held = await started(engine)
        tails = [
            asyncio.create_task(engine.tail_stream(held.execution_id, 0, block=timedelta(seconds=30))) for _ in range(8)
        ]
        await until(lambda: engine.tails.count == 8)
        await announced(sql, 1)
        async with asyncio.timeout(PATIENCE):
            stored = await engine.append_frame(held.handle, NewFrame(payload=b"x"))
            pages = await asyncio.gather(*tails)
        assert stored is not None
        assert [[frame.id for frame in page.frames] for page in pages] == [[stored.stream_id]] * 8


async def test_a_parked_tail_delays_nothing_elsewhere(database: str) -> None:
    """The second acceptance test."""
    async with await ff.Engine.connect(database, max_size=1) as engine:
        one, other = await started(engine), await started(engine)
        tail = asyncio.create_task(engine.tail_stream(one.execution_id, 0, block=timedelta(seconds=30)))
        await until(lambda: engine.tails.count == 1)
        async with asyncio.timeout(PATIENCE):
            await engine.append_frame(other.handle, NewFrame(payload=b"x"))
        assert not tail.done()
        tail.cancel()
        begun = time.monotonic()
        page = await engine.tail_stream(one.execution_id, 0, block=timedelta(milliseconds=200))
        assert (page.frames, page.closed_at) == ((), None)
        assert time.monotonic() - begun > 0.19


async def test_a_close_wakes_tails(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_FIRST_POLL", 1000.0)
    async with await ff.Engine.connect(database) as engine:
        await listens(engine, (await started(engine)).execution_id)
        await announced(sql, 0)
        ends: list[Callable[[Any], Any]] = [
            lambda held: engine.complete(held.handle, None),
            lambda held: engine.fail(held.handle, "boom", failure_class="permanent"),
            lambda held: engine.cancel(held.handle, "no"),
            lambda held: engine.revoke_lease(held.execution_id),
        ]
        for end in ends:
            held = await started(engine)
            tail = asyncio.create_task(engine.tail_stream(held.execution_id, 0, block=timedelta(seconds=30)))
            await announced(sql, 1)
            await end(held)
            page = await asyncio.wait_for(tail, PATIENCE)
            assert page.closed_reason is not None
            await announced(sql, 0)


async def test_filtered_frames_do_not_end_a_wait(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with await ff.Engine.connect(database) as engine:
        held = await started(engine)
        tail = asyncio.create_task(
            engine.tail_stream(held.execution_id, 0, block=timedelta(seconds=30), visibility="exclude_best_effort")
        )
        for _ in range(5):
            await announced(sql, 1)  # again after each
            await engine.append_frame(held.handle, NewFrame(payload=b"live", mode=LIVE))
        assert not tail.done()
        await engine.append_frame(held.handle, NewFrame(payload=b"durable"))
        page = await asyncio.wait_for(tail, PATIENCE)
        assert [frame.payload for frame in page.frames] == [b"durable"]


async def test_permits_are_refused_beyond_the_limit_and_at_shutdown(database: str) -> None:
    async with await ff.Engine.connect(database, stream_ops=2) as engine:
        held = await started(engine)
        tails = [
            asyncio.create_task(engine.tail_stream(held.execution_id, 0, block=timedelta(seconds=30))) for _ in range(2)
        ]
        await until(lambda: engine.tails.count == 2)
        with pytest.raises(ResourceExhausted) as caught:
            await engine.read_stream(held.execution_id)
        assert (caught.value.pool, caught.value.max, caught.value.retry_after_ms) == ("stream_ops", 2, 50)
        tails[0].cancel()
        await asyncio.gather(tails[0], return_exceptions=True)
        await engine.read_stream(held.execution_id)
        assert await engine.read_summary(held.execution_id) is None  # takes no permit
        await engine.shutdown_prepare()
        page = await asyncio.wait_for(tails[1], 20)  # before its time is over
        assert (page.frames, page.closed_at) == ((), None)
        with pytest.raises(Unavailable):
            await engine.tail_stream(held.execution_id)


@pytest.mark.parametrize("what", ["append", "close"])
@pytest.mark.parametrize("moment", ["before it is announced", "after it is announced"])
async def test_a_tail_that_is_about_to_wait_misses_nothing(
    database: str, engine: ff.Engine, monkeypatch: pytest.MonkeyPatch, what: str, moment: str
) -> None:
    """Without polls: it announces that it waits, then reads."""
    monkeypatch.setattr(tails, "_FIRST_POLL", 1000.0)
    held = await started(engine)
    async with await ff.Engine.connect(database) as reader:
        announce, is_done = reader.watch, False

        async def happens() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                if what == "append":
                    await engine.append_frame(held.handle, NewFrame(payload=b"x"))
                else:
                    await engine.complete(held.handle, b"1")

        async def watch(*args: Any, **options: Any) -> None:
            if moment.startswith("before"):
                await happens()
            await announce(*args, **options)
            await happens()

        await listens(reader, held.execution_id)
        monkeypatch.setattr(reader, "watch", watch)
        async with asyncio.timeout(PATIENCE):
            page = await reader.tail_stream(held.execution_id, 0, block=timedelta(seconds=30))
    assert is_done
    assert (len(page.frames), page.closed_reason) == ((1, None) if what == "append" else (0, "attempt_success"))


@pytest.mark.parametrize("lost", ["listening", "all"])
async def test_tails_survive_the_loss_of_connections(database: str, sql: asyncpg.Connection[Any], lost: str) -> None:
    async with await ff.Engine.connect(database, stream_ops=100, max_size=4) as engine:
        held = [await started(engine) for _ in range(10)]
        tails = [
            asyncio.create_task(engine.tail_stream(one.execution_id, 0, block=timedelta(seconds=30)))
            for one in held
            for _ in range(10)
        ]
        await until(lambda: engine.tails.count == 100)
        for _ in range(5):
            await sql.execute(
                "select pg_terminate_backend(a.pid, 5000) from pg_stat_activity a where a.datname = current_database()"
                " and a.application_name = 'flowfabric' and (a.query ilike 'listen%' or $1)",
                lost == "all",
            )
        assert not any(tail.done() for tail in tails)
        async with await ff.Engine.connect(database) as writer:
            await writer.append_frames([(one.handle, NewFrame(payload=b"x")) for one in held])
        for page in await asyncio.wait_for(asyncio.gather(*tails), PATIENCE):
            assert [frame.payload for frame in page.frames] == [b"x"]
