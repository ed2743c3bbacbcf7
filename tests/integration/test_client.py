"""The async client on a real Postgres: keys, handles, waiting, lists, changes, and one client per event loop."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import uvloop

import flowfabric as ff
from flowfabric.client import bulk
from flowfabric.client import client as client_module
from flowfabric.client import outcomes as outcomes_module
from flowfabric.client.submission import Submission
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.errors import Conflict, ConnectionFailed, ExecutionNotActive, Purged, StateError, TransportError
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import mint_execution_id
from flowfabric.values.lane import LaneState
from tests.databases import fresh_database
from tests.support import Clock

PATIENCE = 60.0
WORKER = {"worker_id": "pool", "worker_instance_id": "pool-1"}


@pytest.fixture
async def app(database: str) -> AsyncIterator[ff.App]:
    app = ff.App(database)
    yield app
    await app.close()


@pytest.fixture
def publish(app: ff.App) -> ff.Task[..., str]:
    @app.task
    async def publish(draft_id: int = 0) -> str:
        if draft_id < 0:
            raise ValueError("no such draft")
        return f"draft {draft_id}"

    return publish


async def take(engine: ff.Engine) -> Claimed:
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    return claimed


async def end(engine: ff.Engine, how: str) -> None:
    """Claim the next execution and end it so."""
    if how in ("waiting", "delayed"):
        return
    handle = (await take(engine)).handle
    match how:
        case "completed":
            await engine.complete(handle, b'"done"')
        case "failed":
            await engine.fail(handle, "broken", failure_class="permanent")
        case "cancelled":
            await engine.cancel(handle, "no longer wanted")
        case "active":
            pass


async def count(sql: asyncpg.Connection[Any]) -> int:
    return int(await sql.fetchval("select count(*) from flowfabric.execution"))


# Keys

# How the existing execution ended, and whether a submission that replaces makes another.
STANDING = {"waiting": False, "active": False, "completed": False, "failed": True, "cancelled": True}


@pytest.mark.parametrize("state", STANDING)
async def test_a_known_key_does_what_on_duplicate_says(
    state: str, publish: ff.Task[..., str], plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    first = await publish.submit(1, idempotency_key="k")
    assert first.is_new
    await end(plain_engine, state)

    again = await publish.submit(1, idempotency_key="k")
    assert (again.id, again.is_new) == (first.id, False)

    with pytest.raises(Conflict) as refused:
        await publish.submit(1, idempotency_key="k", on_duplicate="raise")
    assert (refused.value.kind, refused.value.existing) == ("duplicate_submission", first.id)
    assert await count(sql) == 1

    replaced = await publish.submit(2, idempotency_key="k", on_duplicate="replace")
    assert replaced.is_new is STANDING[state]
    assert (replaced.id != first.id) is STANDING[state]
    assert await count(sql) == 1 + STANDING[state]
    last = await publish.submit(3, idempotency_key="k")
    assert (last.id, last.is_new) == (replaced.id, False)


async def test_of_many_concurrent_replacements_one_creates_an_execution(
    database: str, publish: ff.Task[..., str], plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    first = await publish.submit(1, idempotency_key="k")
    await end(plain_engine, "failed")
    other = ff.App(database, connections=10)
    tasks = [publish, other.task(publish.function)]
    runs = await asyncio.gather(
        *(tasks[n % 2].submit(n, idempotency_key="k", on_duplicate="replace") for n in range(60))
    )
    assert sum(run.is_new for run in runs) == 1
    assert len({run.id for run in runs}) == 1
    assert runs[0] != first
    assert await count(sql) == 2
    await other.close()


async def test_a_key_is_known_for_its_window_and_in_its_namespace(
    publish: ff.Task[..., str], clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    keyed = publish.options(idempotency_key="k", dedup_window="10 minutes")
    first = await keyed.submit(1)
    elsewhere = await keyed.submit(1, namespace="tenant")
    assert elsewhere.is_new
    await clock.advance(minutes=9)
    assert await keyed.submit(1) == first
    await clock.advance(minutes=2)
    later = await keyed.submit(1)
    assert later.is_new
    assert later != first
    assert await count(sql) == 3


async def test_a_batch_treats_known_keys_as_asked(
    publish: ff.Task[..., str], plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    failed = await publish.submit(1, idempotency_key="a")
    await end(plain_engine, "failed")
    standing = await publish.submit(1, idempotency_key="b")

    def batch(**options: Any) -> list[Submission]:
        return [publish.submission(n, idempotency_key=key, **options) for n, key in enumerate("abc")]

    with pytest.raises(Conflict):
        await publish.submit_many(batch(on_duplicate="raise"))
    runs = await publish.submit_many(batch(on_duplicate="replace"))
    assert [run.is_new for run in runs] == [True, False, False]
    assert runs[0] != failed
    assert runs[1] == standing
    assert await count(sql) == 4


@pytest.mark.parametrize("rule", ["return", "raise", "replace"])
async def test_a_key_that_another_task_has_used_is_not_taken_for_ones_own(
    rule: Any, app: ff.App, publish: ff.Task[..., str], plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    @app.task
    async def charge(draft_id: int) -> None: ...

    first = await publish.submit(1, idempotency_key="order-1")
    await end(plain_engine, "failed")
    with pytest.raises(Conflict, match="of publish") as refused:
        await charge.submit(1, idempotency_key="order-1", on_duplicate=rule)
    assert refused.value.existing == first.id
    with pytest.raises(Conflict, match="of publish") as refused:
        await charge.submit_many([charge.submission(1, idempotency_key="order-1", on_duplicate=rule)])
    assert refused.value.existing == first.id
    assert await count(sql) == 1
    assert (await charge.submit(1, idempotency_key="order-1", namespace="charges")).is_new


async def test_tasks_of_one_batch_do_not_share_a_key(app: ff.App, publish: ff.Task[..., str]) -> None:
    @app.task
    async def charge(draft_id: int) -> None: ...

    with pytest.raises(Conflict, match="of publish"):
        await publish.submit_many(
            [publish.submission(1, idempotency_key="a"), charge.submission(1, idempotency_key="a")]
        )


async def test_a_key_is_for_one_item_of_a_batch(publish: ff.Task[..., str], sql: asyncpg.Connection[Any]) -> None:
    for submit in (
        lambda: publish.submit_many([1, 2], idempotency_key="a"),
        lambda: publish.options(idempotency_key="a").submit_many([1, publish.submission(3), 2]),
    ):
        with pytest.raises(ff.InvalidInput, match=r"task\.submission") as refused:
            await submit()
        assert refused.value.field == "idempotency_key"
    assert await count(sql) == 0
    (run,) = await publish.submit_many([1], idempotency_key="a")
    assert await publish.submit(1, idempotency_key="a") == run


async def test_a_batch_that_failed_submits_nothing_more(
    app: ff.App, publish: ff.Task[..., str], sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_MOST", 1)
    client = await app.client()
    inner = client.engine.create_alike
    under_way = 0
    asked = 0

    async def create_alike(item: Any, payloads: Any) -> Any:
        nonlocal under_way, asked
        asked += 1
        if asked == 3:
            raise StateError("lane_closed")
        under_way += 1
        try:
            return await inner(item, payloads)
        finally:
            under_way -= 1

    monkeypatch.setattr(client.engine, "create_alike", create_alike)
    with pytest.raises(StateError, match="lane_closed"):
        await publish.submit_many(range(100))
    before = asked
    assert (under_way, before < 10) == (0, True)
    await client.lanes()  # a call to the database: a task that still submits would have continued
    assert asked == before
    assert await count(sql) < before


@pytest.mark.parametrize("rule", ["raise", "replace"])
async def test_inside_a_task_a_known_key_does_what_on_duplicate_says(
    rule: Any, app: ff.App, publish: ff.Task[..., str], sql: asyncpg.Connection[Any]
) -> None:
    runs = 0

    @app.task
    async def parent(ctx: ff.Context) -> str:
        nonlocal runs
        runs += 1
        child = await publish.submit(5, idempotency_key="k", on_duplicate=rule)
        fresh = await publish.submit(6, idempotency_key="fresh", on_duplicate=rule)
        return f"{await child.result()}, {await fresh.result()}"

    async with ff.Worker(app, concurrency=1):
        failed = await publish.submit(-1, idempotency_key="k")
        with pytest.raises(ff.TaskFailed):
            await failed.result(PATIENCE)
        run = await parent.submit()
        if rule == "raise":
            with pytest.raises(ff.TaskFailed, match="the idempotency key is in use"):
                await run.result(PATIENCE)
            assert await count(sql) == 2
        else:
            assert await run.result(PATIENCE) == "draft 5, draft 6"
            assert runs > 1  # it waited without a worker, and nothing was submitted again
            assert await count(sql) == 4


async def test_a_child_submitted_by_a_run_that_was_lost_is_not_a_known_key(
    app: ff.App, publish: ff.Task[..., str], plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child was made, the memory of it was not: the next run finds its own child, not another one."""
    tries = 0
    inner = ff.Engine.submit_child

    async def lost_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise TransportError("transport", "gone")
        return await inner(*args, **kwargs)

    monkeypatch.setattr(ff.Engine, "submit_child", lost_once)

    @app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0)))
    async def parent() -> str:
        return (await publish.submit(5, idempotency_key="k", on_duplicate="raise")).id

    async with ff.Worker(app):
        child = await (await parent.submit()).result(PATIENCE)
    assert tries == 2
    found = await plain_engine.find_executions(kinds=["publish"])
    assert [str(item.execution_id) for item in found.items] == [child]


# Handles


async def test_a_handle_survives_pickling_and_copying(app: ff.App, publish: ff.Task[..., str]) -> None:
    namesake = ff.App("postgresql:///elsewhere").task(publish.function)
    run = await publish.submit(7, idempotency_key="k")
    known = await publish.submit(7, idempotency_key="k")
    for twin in (pickle.loads(pickle.dumps(run)), copy.copy(run), copy.deepcopy(run)):
        assert twin == run
        assert hash(twin) == hash(run)
        assert (twin.id, twin.kind, twin.is_new) == (run.id, "publish", True)
        assert await twin.state() is ff.State.WAITING
    assert pickle.loads(pickle.dumps(known)).is_new is False
    assert {run, known} == {run}
    assert run != run.id
    assert namesake.app.name == app.name  # and was not taken for it
    assert repr(run) == f"Run({run.id!r}, kind='publish')"


PROGRAM = """\
import asyncio, os, pickle, sys
import flowfabric as ff

app = ff.App(name={name!r})

@app.task
async def publish(draft_id: int = 0) -> str:
    return f"draft {{draft_id}}"

async def main():
    run = pickle.load(sys.stdin.buffer)
    try:
        print(await run.result(timeout=30))
    except ff.InvalidInput as error:
        client = await app.client()
        print("unbound:", error.allowed, "->", await client.run(run).result(timeout=30))

asyncio.run(main())
"""


@pytest.mark.parametrize(("name", "said"), [("app", "draft 7"), ("other", "unbound: client.run(run) -> draft 7")])
async def test_a_handle_goes_to_another_process(
    name: str, said: str, app: ff.App, publish: ff.Task[..., str], database: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(name=name))
    run = await publish.submit(7)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", program,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"FLOWFABRIC_DSN": database},
    )  # fmt: skip
    talking = asyncio.create_task(process.communicate(pickle.dumps(run)))
    async with ff.Worker(app):
        out, error = await asyncio.wait_for(talking, PATIENCE)
    assert (out.decode().strip(), error.decode()) == (said, "")


def from_elsewhere(run: ff.Run[Any]) -> ff.Run[Any]:
    """The handle as if another process, whose apps have other keys, had pickled it."""
    revive, (execution_id, kind, is_new, _, name) = run.__reduce__()
    found: ff.Run[Any] = revive(execution_id, kind, is_new, "another", name)
    return found


async def test_a_handle_from_another_process_finds_its_app_among_several(database: str, server: str) -> None:
    async with fresh_database(server) as elsewhere:
        here, there = ff.App(database, name="several"), ff.App(elsewhere, name="several")

        async def one() -> None: ...

        async def two() -> None: ...

        async def both() -> None: ...

        task_one, task_two = here.task(one), there.task(two)
        here.task(both)
        in_both = there.task(both)
        for task in (task_one, task_two):
            run = from_elsewhere(await task.submit())
            assert (await run.get()).execution_kind == task.name
        unclear = from_elsewhere(await in_both.submit())
        for use in (unclear.result, unclear.get, unclear.state, unclear.steps, unclear.attempts, unclear.cancel):
            with pytest.raises(ff.InvalidInput, match="which app") as refused:
                await use()
            assert refused.value.field == "run"
        assert await (await there.client()).run(unclear).state() is ff.State.WAITING
        # An app that was loaded again is the same app.
        again = ff.App(database, name="several")
        again.task(one)
        assert await from_elsewhere(await task_one.submit()).state() is ff.State.WAITING
        for app in (here, there, again):
            await app.close()


async def test_a_handle_is_rebuilt_from_an_id(app: ff.App, publish: ff.Task[..., str]) -> None:
    run = await publish.submit(7)
    client = await app.client()
    async with ff.Worker(app):
        for twin in (client.run(run.id), client.run(run), publish.run(run.id), client.run(run.execution_id)):
            assert twin == run
            assert await twin.result(PATIENCE) == "draft 7"
    for bad in ("", "nonsense", "{fp:1}:nonsense", 5, None):
        with pytest.raises(ff.InvalidInput) as refused:
            client.run(bad)  # type: ignore[arg-type]
        assert refused.value.field == "execution_id"


# Waiting


async def test_wrong_input_is_reported_immediately(
    app: ff.App, publish: ff.Task[..., str], sql: asyncpg.Connection[Any]
) -> None:
    client = await app.client()
    run = await publish.submit(1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: run.result(timeout=-1), "timeout"),
        (lambda: run.outcome(timeout=-0.001), "timeout"),
        (lambda: client.submit_many(publish, 5), "arguments"),  # type: ignore[call-overload]
        (lambda: publish.submit_many(None), "arguments"),  # type: ignore[arg-type]
        (lambda: client.cancel_all("x", bogus=1), "bogus"),  # type: ignore[call-arg]
        (lambda: client.replay_all("x", state="failed"), "state"),  # type: ignore[call-arg]
        (lambda: client.failures(bogus=1), "bogus"),  # type: ignore[call-arg]
        (lambda: anext(client.all(bogus=1)), "bogus"),  # type: ignore[call-arg]
    ]
    for call, field in cases:
        with pytest.raises(ff.InvalidInput) as refused:
            await call()
        assert refused.value.field == field
    assert await run.state() is ff.State.WAITING
    assert await count(sql) == 1


async def test_steps_with_wrong_limits_are_refused_before_they_run(app: ff.App) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"retry": 5}, "retry"),
        ({"retry": {"max_retries": 1}}, "retry"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
    ]

    @app.task
    async def in_loop(ctx: ff.Context) -> list[str | None]:
        fields = []
        for keywords, _ in bad:
            with pytest.raises(ff.InvalidInput) as refused:
                ctx.step_with(**keywords)
            fields.append(refused.value.field)
        return fields

    @app.task
    def in_thread(ctx: ff.SyncContext) -> str | None:
        with pytest.raises(ff.InvalidInput) as refused:
            ctx.step_with(retry=5)  # type: ignore[arg-type]
        return refused.value.field

    async with ff.Worker(app):
        assert await (await in_loop.submit()).result(PATIENCE) == [field for _, field in bad]
        assert await (await in_thread.submit()).result(PATIENCE) == "retry"


async def test_a_wait_that_takes_too_long_can_be_repeated(app: ff.App, publish: ff.Task[..., str]) -> None:
    run = await publish.submit(7)
    for timeout in (0, 0.01, "10 ms", timedelta(milliseconds=10)):
        with pytest.raises(ff.TimedOut) as late:
            await run.result(timeout)
        assert late.value.elapsed_ms == (0 if timeout == 0 else 10)
    with pytest.raises(ff.InvalidInput, match="not a duration"):
        await run.result("soon")
    async with ff.Worker(app):
        assert await run.result(PATIENCE) == "draft 7"
    assert await run.result(0) == "draft 7"  # what is there is found, however short the time
    assert await run.result(0) == "draft 7"


async def test_a_failure_carries_type_message_category_and_traceback(app: ff.App) -> None:
    class Broken(Exception):
        pass

    @app.task
    async def inner() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise Broken("second: with colon") from error

    @app.task
    def rejected() -> None:
        raise ff.Reject("not wanted")

    @app.task(permanent=[ZeroDivisionError], retry=ff.RetryPolicy(max_retries=5))
    def divide() -> float:
        return 1 / 0

    async with ff.Worker(app):
        with pytest.raises(ff.TaskFailed) as failed:
            await (await inner.submit()).result(PATIENCE)
        failure = failed.value
        assert (failure.kind, failure.category, failure.message) == ("failed", "Broken", "second: with colon")
        assert failure.error_type is not None
        assert failure.error_type.endswith("Broken")
        assert failure.traceback is not None
        assert failure.traceback.index("KeyError: 'first'") < failure.traceback.index(
            'raise Broken("second: with colon")'
        )
        assert "flowfabric/worker" not in failure.traceback
        assert pickle.loads(pickle.dumps(failure)).traceback == failure.traceback

        with pytest.raises(ff.TaskFailed) as failed:
            await (await rejected.submit()).result(PATIENCE)
        failure = failed.value
        assert (failure.message, failure.category, failure.error_type) == ("not wanted", "rejected", None)

        run = await divide.submit()
        with pytest.raises(ff.TaskFailed, match="division by zero"):
            await run.result(PATIENCE)
        assert len(await run.attempts()) == 1
        assert (await run.outcome()).state is ff.State.FAILED


async def test_cancelled_expired_purged_and_redacted_are_different_errors(
    app: ff.App, publish: ff.Task[..., str], plain_engine: ff.Engine, clock: Clock
) -> None:
    client = await app.client()

    run = await publish.submit(1)
    await run.cancel("not needed")
    await run.cancel("again")
    with pytest.raises(ff.TaskFailed, match="cancelled: not needed") as failed:
        await run.result()
    assert (failed.value.kind, failed.value.execution_id) == ("cancelled", run.execution_id)
    assert not isinstance(failed.value, Purged)

    late = await publish.submit(1, deadline=5)
    await clock.advance(seconds=6)
    await plain_engine.expire_execution(late.execution_id, "execution_deadline")
    with pytest.raises(ff.TaskFailed) as failed:
        await late.result()
    assert failed.value.kind == "expired"

    done = await publish.submit(1)
    await end(plain_engine, "completed")
    assert await done.result() == "done"
    await client.redact(done.id)
    with pytest.raises(CannotDecode, match="redacted"):
        await done.result()
    await client.delete(done.id)
    with pytest.raises(Purged, match="purged"):
        await done.result()
    with pytest.raises(ff.NotFound):
        await done.get()
    with pytest.raises(Purged):
        never = mint_execution_id(namespace="", idempotency_key=None, flow_id=None, count=16)
        await client.run(never).result()


async def test_thousands_wait_with_few_calls(database: str) -> None:
    calls: list[str] = []

    class Calls(ff.Engine):
        async def read_outcomes(self, execution_ids: Any) -> Any:
            calls.append("read")
            return await super().read_outcomes(execution_ids)

    app = ff.App(database)

    @app.task
    async def nothing(n: int) -> int:
        return n

    async with app, await Calls.connect(database) as engine:
        outcomes = outcomes_module.Outcomes(engine)
        runs = await nothing.submit_many(range(2000))
        waiting = [outcomes.future(run.execution_id) for run in runs for _ in range(2)]
        async with ff.Worker(app):
            ended = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)
        assert {outcome.state for outcome in ended} == {ff.State.COMPLETED}
        assert len(calls) < 200
        await outcomes.close()


async def test_waiters_receive_an_error_when_the_client_is_closed(app: ff.App, publish: ff.Task[..., str]) -> None:
    run = await publish.submit(1)
    waiting = asyncio.create_task(run.result())
    client = await app.client()
    while not client.outcomes._waiting:
        await asyncio.sleep(0)
    await app.close()
    with pytest.raises(TransportError, match="closed"):
        await waiting
    assert await run.state() is ff.State.WAITING  # connects again
    with pytest.raises(TransportError, match="closed"):
        await client.get(run.id)


# Lists


@pytest.fixture
async def client(app: ff.App) -> ff.AsyncClient:
    return await app.client()


async def test_lists_by_every_filter(
    app: ff.App, client: ff.AsyncClient, publish: ff.Task[..., str], plain_engine: ff.Engine, clock: Clock
) -> None:
    @app.task
    async def other() -> None: ...

    runs = {
        "failed": await publish.submit(1),
        "plain": await publish.submit(1),
        "lane": await publish.submit(1, lane="slow"),
        "kind": await other.submit(),
        "namespace": await publish.submit(1, namespace="tenant"),
        "tag": await publish.submit(1, tags={"team.owner": "a"}),
        "delayed": await publish.submit(1, delay=60),
    }
    await end(plain_engine, "failed")
    await clock.advance(hours=1)
    hour_later = await clock.now()
    runs["late"] = await publish.submit(1)

    async def named(**filters: Any) -> set[str]:
        page = await client.find(**filters)
        assert page.next_cursor is None
        every = [item async for item in client.all(**filters)]
        assert [item.execution_id for item in every] == [item.execution_id for item in page.items]
        by_id = {run.execution_id: name for name, run in runs.items()}
        return {by_id[item.execution_id] for item in page.items}

    assert await named() == set(runs)
    assert await named(lane="slow") == {"lane"}
    assert await named(kind="other") == {"kind"}
    assert await named(namespace="tenant") == {"namespace"}
    assert await named(tag=("team.owner", "a")) == {"tag"}
    assert await named(states=["failed"]) == {"failed"}
    assert await named(states=[ff.State.FAILED, "delayed"]) == {"failed", "delayed"}
    assert await named(states=[]) == set()
    assert await named(created_from=hour_later) == {"late"}
    assert await named(created_before=hour_later) == set(runs) - {"late"}
    assert await named(kind="publish", lane="default", states=["waiting"], created_before=hour_later) == {
        "plain", "namespace", "tag",
    }  # fmt: skip
    failures = await client.failures(kind="publish")
    assert [item.execution_id for item in failures.items] == [runs["failed"].execution_id]
    assert list((await client.failures(kind="other")).items) == []
    with pytest.raises(TypeError, match="lanes"):
        await client.find(lanes="slow")  # type: ignore[call-arg]
    with pytest.raises(ff.InvalidInput, match="states"):
        await client.find(states=["broken"])


async def test_everything_is_paged_through(
    client: ff.AsyncClient, publish: ff.Task[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CHUNK", 7)
    runs = await publish.submit_many(range(50))
    found = [item.execution_id async for item in client.all()]
    assert len(found) == 50
    assert set(found) == {run.execution_id for run in runs}
    page = await client.find(limit=20)
    rest = await client.find(limit=40, cursor=page.next_cursor)
    assert [item.execution_id for item in (*page.items, *rest.items)] == found


# Changes to many


async def test_all_that_match_are_cancelled_chunk_by_chunk(
    app: ff.App, client: ff.AsyncClient, publish: ff.Task[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CHUNK", 10)
    runs = await publish.submit_many(range(35), tags={"batch": "one"})
    others = await publish.submit_many(range(5))
    later = await publish.submit(1, tags={"batch": "one"}, delay=60)
    assert await client.cancel_all("never", states=[]) == 0
    said: list[int] = []
    assert await client.cancel_all("too many", tag=("batch", "one"), progress=said.append) == 36
    assert said == [10, 20, 30, 36]
    assert {await run.state() for run in [*runs, later]} == {ff.State.CANCELLED}
    assert (await runs[0].get()).cancellation_reason == "too many"
    assert {await run.state() for run in others} == {ff.State.WAITING}
    assert await client.cancel_all("too many", tag=("batch", "one"), progress=said.append) == 0
    assert said == [10, 20, 30, 36]
    with pytest.raises(ff.InvalidInput, match="did you mean 'tag'"):
        await client.cancel_all("x", tags={"batch": "one"})  # type: ignore[call-arg]
    assert {await run.state() for run in others} == {ff.State.WAITING}


async def test_all_that_failed_are_replayed_chunk_by_chunk(
    app: ff.App, client: ff.AsyncClient, publish: ff.Task[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CHUNK", 10)
    drafts = {"exist": False}

    @app.task(max_replays=1)
    async def look(n: int) -> int:
        if not drafts["exist"]:
            raise LookupError
        return n

    runs = await look.submit_many(range(25))
    async with ff.Worker(app) as worker:
        await worker.idle()
        said: list[int] = []
        assert len((await client.failures(limit=100)).items) == 25
        assert await client.replay_all("again", kind="look", progress=said.append) == 25
        assert said == [10, 20, 25]
        for run in runs:
            with pytest.raises(ff.TaskFailed, match="LookupError"):
                await run.result(PATIENCE)
        # Once was all they may be replayed: that is told by the count alone.
        drafts["exist"] = True
        assert await client.replay_all() == 0
    assert {await run.state() for run in runs} == {ff.State.FAILED}


async def test_single_executions_are_changed(
    client: ff.AsyncClient, publish: ff.Task[..., str], plain_engine: ff.Engine
) -> None:
    run = await publish.submit(7)
    await client.change_priority(run.id, 5)
    assert (await client.get(run.id)).priority == 5
    await plain_engine.block_route(run.execution_id)
    await client.unblock(run.id)
    assert (await client.get(run.id)).stored_blocking_reason == "waiting_for_worker"
    with pytest.raises(ExecutionNotActive):
        await client.fail(run.id)
    with pytest.raises(StateError):
        await client.replay(run.id)
    with pytest.raises(StateError):
        await client.delete(run.id)
    await client.cancel(run.id)
    await client.cancel(run.id)
    assert (await client.get(run.id)).cancellation_reason == "cancelled by a client"
    await run.replay("once more")
    assert await run.state() is ff.State.WAITING
    await end(plain_engine, "completed")
    assert len(await run.attempts()) == 1
    await client.redact(run.id)
    assert (await client.get(run.id)).public_state is ff.State.COMPLETED
    await client.delete(run.id)
    for gone in (client.get, client.delete, client.redact, client.replay, client.cancel):
        with pytest.raises(ff.NotFound):
            await gone(run.id)
    for bad in (client.get, client.delete, client.redact, client.replay, client.cancel):
        with pytest.raises(ff.InvalidInput):
            await bad("nonsense")


async def test_lanes_are_shown_and_paused(client: ff.AsyncClient, publish: ff.Task[..., str]) -> None:
    await publish.submit_many(
        range(3),
    )
    (lane,) = await client.lanes()
    assert (lane.lane_id, lane.depth, lane.state) == ("default", 3, LaneState.ACTIVE)
    assert await client.set_lane_state("default", "draining") is LaneState.ACTIVE
    with pytest.raises(StateError, match="lane"):
        await publish.submit(1)
    with pytest.raises(StateError, match="lane"):
        await publish.submit_many([1, 2])
    with pytest.raises(ff.InvalidInput, match="draining"):
        await client.set_lane_state("default", "shut")


async def test_schedules_are_shown_and_changed(app: ff.App, client: ff.AsyncClient, publish: ff.Task[..., str]) -> None:
    app.schedule(publish, 5, name="hourly", every="1h", priority=3)
    app.schedule(publish, name="daily", cron="0 8 * * *", timezone="Europe/Berlin")
    async with ff.Worker(app):
        pass
    daily, hourly = await client.schedules()
    assert (daily.name, hourly.name, hourly.options["priority"]) == ("daily", "hourly", 3)
    await client.pause_schedule("hourly")
    assert [one.paused for one in await client.schedules()] == [False, True]
    await client.resume_schedule("hourly")
    assert [one.paused for one in await client.schedules()] == [False, False]
    await client.delete_schedule("hourly")
    assert [one.name for one in await client.schedules()] == ["daily"]
    for change in (client.pause_schedule, client.resume_schedule, client.delete_schedule):
        with pytest.raises(ff.NotFound):
            await change("hourly")


async def test_a_task_is_submitted_by_name(app: ff.App, client: ff.AsyncClient, publish: ff.Task[..., str]) -> None:
    run = await client.submit("publish", 7, priority=3)
    assert (run.kind, (await run.get()).priority) == ("publish", 3)
    assert len(await client.submit_many("publish", [1, 2])) == 2
    with pytest.raises(ff.NotFound, match="did you mean 'publish'"):
        await client.submit("publsh", 7)
    with pytest.raises(ff.NotFound):
        await client.submit_many("xyzzy", [1])


# One client per event loop


def _connected(app: ff.App) -> int:
    return len(app._clients)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_every_loop_has_its_client_and_closes_it(
    run_loop: Callable[[Any], Any], database: str, sql_count: Callable[[], int]
) -> None:
    app = ff.App(database)

    @app.task
    async def publish(draft_id: int) -> str:
        return f"draft {draft_id}"

    async def once(n: int) -> str:
        run = await publish.submit(n)
        first, second = await asyncio.gather(app.client(), app.client())
        assert first is second is await app.client()
        async with ff.Worker(app):
            return await run.result(PATIENCE)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            assert run_loop(once(n)) == f"draft {n}"
            assert _connected(app) == 0
            gc.collect()
    assert sql_count() == 0


@pytest.fixture
def sql_count(server: str, database: str) -> Callable[[], int]:
    """How many connections our client has to the test's database."""

    async def ask() -> int:
        connection = await asyncpg.connect(server)
        try:
            name = database.rpartition("/")[2].partition("?")[0]
            deadline = time.monotonic() + PATIENCE
            while True:
                found = await connection.fetchval(
                    "select count(*) from pg_stat_activity where datname = $1 and application_name = 'flowfabric'", name
                )
                if found == 0 or time.monotonic() > deadline:
                    return int(found)
                await asyncio.sleep(0.02)
        finally:
            await connection.close()

    def count() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(ask())))
        thread.start()
        thread.join()
        return found[0]

    return count


def test_threads_with_loops_of_their_own_share_an_app(database: str, sql_count: Callable[[], int]) -> None:
    app = ff.App(database, connections=2)

    @app.task
    async def publish(draft_id: int) -> str:
        return f"draft {draft_id}"

    results: list[str] = []
    together = threading.Barrier(4)

    def run(n: int) -> None:
        async def main() -> None:
            together.wait(PATIENCE)
            runs = await asyncio.gather(*(publish.submit(n) for _ in range(10)))
            together.wait(PATIENCE)
            results.extend([await run.result(PATIENCE) for run in runs])

        asyncio.run(main())

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()

    async def work() -> None:
        async with ff.Worker(app):
            while any(thread.is_alive() for thread in threads):
                await asyncio.sleep(0.01)

    asyncio.run(work())
    assert sorted(results) == sorted(f"draft {n}" for n in range(4) for _ in range(10))
    assert _connected(app) == 0
    assert sql_count() == 0


def test_a_collected_app_is_closed_with_its_loop(database: str, sql_count: Callable[[], int]) -> None:
    async def submit() -> None:
        app = ff.App(database)

        @app.task
        async def publish() -> None: ...

        await publish.submit()

    async def main() -> None:
        for _ in range(3):
            await submit()
            gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()
    assert sql_count() == 0


async def test_a_block_connects_and_closes_and_later_use_connects_again(database: str) -> None:
    app = ff.App(database)

    @app.task
    async def publish() -> None: ...

    async with app as entered:
        assert entered is app
        first = await app.client()
        run = await publish.submit()
    await app.close()  # nothing is left to be closed
    assert await run.state() is ff.State.WAITING
    second = await app.client()
    assert second is not first
    await asyncio.gather(app.close(), app.close())
    assert _connected(app) == 0


async def test_an_unreachable_database_is_reported_and_tried_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ff.App("postgresql://nobody:secretword@127.0.0.1:1/nothing")

    @app.task
    async def publish() -> None: ...

    with pytest.raises(ConnectionFailed) as failed:
        await publish.submit()
    assert "secretword" not in str(failed.value) + repr(app)
    app.dsn = database
    assert (await publish.submit()).is_new
    await app.close()


async def test_a_cancelled_connect_does_not_stop_the_others(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = ff.App(database)
    opening = asyncio.Event()
    inner = app.open_engine

    async def slow(**settings: Any) -> ff.Engine:
        opening.set()
        await asyncio.sleep(0.01)
        return await inner(**settings)

    monkeypatch.setattr(app, "open_engine", slow)
    first, second = asyncio.create_task(app.client()), asyncio.create_task(app.client())
    await opening.wait()
    first.cancel()
    assert (await second).engine is not None
    with pytest.raises(asyncio.CancelledError):
        await first
    await app.close()


async def test_a_handler_uses_the_client_of_its_worker(app: ff.App, publish: ff.Task[..., str]) -> None:
    @app.task
    async def look() -> bool:
        client = await app.client()
        assert await client.find(limit=1)
        return client is worker.client

    worker = ff.Worker(app)
    async with worker:
        assert await (await look.submit()).result(PATIENCE) is True
        assert await app.client() is worker.client
    assert await app.client() is not worker.client


async def test_workers_of_one_loop_take_their_clients_with_them(app: ff.App) -> None:
    first, second = ff.Worker(app), ff.Worker(app)
    async with first:
        async with second:
            assert await app.client() is second.client
        assert await app.client() is first.client
        await second.start()
    assert await app.client() is second.client
    await second.close()
    assert await app.client() not in (first.client, second.client)


class Turned:
    """A codec that both ways turns the bytes round."""

    name = "turned"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    decode = encode


async def test_a_task_of_another_app_on_the_same_database_is_submitted_once(database: str) -> None:
    here, there = ff.App(database), ff.App(database, codecs=[Turned()])
    runs = 0

    @there.task
    async def child(n: int) -> timedelta:
        return timedelta(seconds=n)

    @here.task
    async def parent(ctx: ff.Context) -> str:
        nonlocal runs
        runs += 1
        run = await child.submit(5)
        await ctx.sleep(0.2)
        return f"{run.id} {(await run.result()).total_seconds()}"

    async with ff.Worker(here, concurrency=1, tasks=["parent"]):
        run = await parent.submit()
        while len((await (await here.client()).find(kind="child")).items) == 0:
            await asyncio.sleep(0.01)
        async with ff.Worker(there, tasks=["child"]):
            said, seconds = (await run.result(PATIENCE)).split()
        found = await (await here.client()).find(kind="child")
    assert [str(item.execution_id) for item in found.items] == [said]
    assert seconds == "5.0"
    assert runs > 1
    await here.close()
    await there.close()


async def test_a_task_of_an_app_with_another_database_is_submitted_there(database: str, server: str) -> None:
    async with fresh_database(server) as elsewhere:
        here, there = ff.App(database), ff.App(elsewhere)

        @there.task
        async def remote(n: int) -> int:
            return n + 1

        @here.task
        async def parent(n: int) -> int:
            run = await remote.submit(n)
            return await run.result(PATIENCE)

        async with ff.Worker(here), ff.Worker(there):
            assert await (await parent.submit(5)).result(PATIENCE) == 6
            found = await (await there.client()).find()
        assert [item.execution_kind for item in found.items] == ["remote"]
        await here.close()
        await there.close()


def test_several_apps_share_an_embedded_server(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            import flowfabric as ff

            apps = [ff.App(name=f"app{n}", data_dir=sys.argv[1]) for n in range(3)]
            tasks = []
            for app in apps:
                @app.task
                async def publish(n: int) -> str:
                    return f"draft {n}"
                tasks.append(publish)

            async def main():
                async with ff.Worker(apps[0]):
                    runs = await asyncio.gather(*(task.submit(n) for n, task in enumerate(tasks)))
                    print(*[await run.result(timeout=30) for run in runs], sep=", ")

            asyncio.run(main())
            with ff.Client(apps[1]) as client:
                print(len(client.find().items))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", program, tmp_path / "data"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.splitlines(), done.stderr) == (["draft 0, draft 1, draft 2", "3"], "")
