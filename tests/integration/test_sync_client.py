"""The client for programs without an event loop: the same as the async one, from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.client import SyncFlowRun, SyncRun
from flowfabric.client import client as client_module
from flowfabric.client.portal import Portal
from flowfabric.errors import ConnectionFailed, Purged, TransportError
from flowfabric.values.lane import LaneState

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0


@pytest.fixture
def app(database: str) -> ff.App:
    return ff.App(database)


@pytest.fixture
def publish(app: ff.App) -> ff.Task[..., str]:
    @app.task
    def publish(draft_id: int = 0) -> str:
        if draft_id < 0:
            raise ValueError("no such draft")
        return f"draft {draft_id}"

    return publish


@pytest.fixture
def client(app: ff.App) -> Iterator[ff.Client]:
    with ff.Client(app) as client:
        yield client


@pytest.fixture
def worker(app: ff.App, publish: ff.Task[..., str]) -> Iterator[None]:
    """A worker in a thread of its own."""
    loop = asyncio.new_event_loop()
    made: concurrent.futures.Future[ff.Worker] = concurrent.futures.Future()

    async def work() -> None:
        worker = ff.Worker(app)
        async with worker:
            made.set_result(worker)
            await stopped.wait()

    stopped = asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work())

    thread = threading.Thread(target=run)
    thread.start()
    made.result(PATIENCE)
    yield
    loop.call_soon_threadsafe(stopped.set)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# The same as the async client


def test_the_generated_file_is_what_would_be_generated() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/sync_client.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_sees_a_file_that_was_edited(tmp_path: Path) -> None:
    for part in ("scripts", "src/flowfabric/client"):
        (tmp_path / part).mkdir(parents=True)
        for file in (ROOT / part).glob("*.py"):
            (tmp_path / part / file.name).write_text(file.read_text())
    edited = tmp_path / "src/flowfabric/client/client.py"
    edited.write_text(edited.read_text().replace("async def lanes(self)", "async def lanes(self, name: str)"))
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts/sync_client.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is stale" in done.stderr


# What the sync client leaves out: what belongs to the inside, and what only async programs need.
ONLY_ASYNC = {"send", "create", "codecs", "result_type"}


def _public(cls: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers_static(cls) if not name.startswith("_")}


def _sync_words(text: str) -> str:
    text = re.sub(r"\bRun\[", "SyncRun[", text.replace("AsyncIterator[", "Iterator["))
    return re.sub(r"\b(FlowRun|StreamReader)\b", r"Sync\1", text)


@pytest.mark.parametrize(
    ("source", "twin"), [(ff.AsyncClient, ff.Client), (ff.Run, SyncRun), (ff.FlowRun, SyncFlowRun)]
)
def test_both_clients_have_the_same_methods_with_the_same_signatures(source: type, twin: type) -> None:
    ours, theirs = _public(source), _public(twin)
    assert ours.keys() - ONLY_ASYNC - theirs.keys() == set()
    assert theirs.keys() - ours.keys() <= {"run"}  # of a SyncRun: the async handle
    for name, member in ours.items():
        if name in ONLY_ASYNC or name in ("run", "flow") or not inspect.isfunction(member):
            continue
        signature, other = inspect.signature(member), inspect.signature(theirs[name])
        assert other.parameters == signature.parameters, name
        assert other.return_annotation == _sync_words(signature.return_annotation), name
        assert not inspect.iscoroutinefunction(theirs[name])
        if name != "close":
            assert inspect.getdoc(theirs[name]) == inspect.getdoc(member), name


# Everyday use


def test_work_is_submitted_and_waited_for(client: ff.Client, publish: ff.Task[..., str], worker: None) -> None:
    run = client.submit(publish, 7, priority=3, idempotency_key="k")
    assert run.result(PATIENCE) == "draft 7"
    assert (run.kind, run.is_new, run.state()) == ("publish", True, ff.State.COMPLETED)
    assert run.get().priority == 3
    assert len(run.attempts()) == 1
    assert run.steps() == []
    assert run.outcome().state is ff.State.COMPLETED
    again = client.submit("publish", 7, idempotency_key="k")
    assert (again == run, hash(again) == hash(run), again.is_new) == (True, True, False)
    assert repr(run) == f"SyncRun({run.id!r}, kind='publish')"
    runs = client.submit_many(publish, range(5), tags={"a": "b"})
    assert [one.result(PATIENCE) for one in runs] == [f"draft {n}" for n in range(5)]
    with pytest.raises(ff.TaskFailed, match="no such draft"):
        client.submit(publish, -1).result(PATIENCE)
    with pytest.raises(ff.InvalidInput, match="draft_id"):
        client.submit(publish, "x")
    with pytest.raises(ff.NotFound):
        client.submit("nothing")


def test_lists_and_changes(client: ff.Client, publish: ff.Task[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CHUNK", 10)
    runs = client.submit_many(publish, range(25))
    assert len(list(client.all())) == 25
    page = client.find(limit=10)
    assert len(page.items) == 10
    assert len(client.find(cursor=page.next_cursor).items) == 15
    every = client.all()
    assert next(every).execution_id in {run.execution_id for run in runs}
    every.close()
    client.change_priority(runs[0].id, 5)
    assert client.get(runs[0].id).priority == 5
    assert [lane.depth for lane in client.lanes()] == [25]
    said: list[int] = []
    assert client.cancel_all("too many", progress=said.append) == 25
    assert said == [10, 20, 25]
    said.clear()
    assert client.replay_all("again", states=["cancelled"], progress=said.append) == 25
    assert said == [10, 20, 25]
    assert list(client.failures().items) == []
    runs[0].cancel()
    client.redact(runs[0].id)
    client.delete(runs[0].id)
    with pytest.raises(Purged):
        runs[0].result()
    assert client.set_lane_state("default", "paused") is LaneState.ACTIVE
    assert client.schedules() == []
    with pytest.raises(ff.NotFound):
        client.pause_schedule("nothing")


def test_a_wait_that_takes_too_long_can_be_repeated(client: ff.Client, publish: ff.Task[..., str]) -> None:
    run = client.submit(publish, 7)
    for _ in range(2):
        with pytest.raises(ff.TimedOut):
            run.result(timeout=0.01)


def test_handles_are_rebuilt_from_ids_pickles_and_each_other(
    app: ff.App, client: ff.Client, publish: ff.Task[..., str], worker: None
) -> None:
    run = client.submit(publish, 7)
    pickled = pickle.loads(pickle.dumps(run))
    assert isinstance(pickled, ff.Run)
    with ff.Client(app) as other:
        for one in (run.id, run.execution_id, pickled, run, run.run):
            twin = other.run(one)
            assert twin == run
            assert twin.result(PATIENCE) == "draft 7"


# Threads, loops, interruptions


def test_many_threads_use_one_client(client: ff.Client, publish: ff.Task[..., str], worker: None) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda n: client.submit(publish, n), range(100)))
        results = list(pool.map(lambda run: run.result(PATIENCE), runs))
        pages = list(pool.map(lambda _: sum(1 for _ in client.all()), range(8)))
    assert results == [f"draft {n}" for n in range(100)]
    assert pages == [100] * 8


async def test_it_works_inside_a_running_loop(app: ff.App, publish: ff.Task[..., str], worker: None) -> None:
    with ff.Client(app) as client:
        assert client.submit(publish, 7).result(PATIENCE) == "draft 7"
    assert await (await publish.submit(8)).result(PATIENCE) == "draft 8"
    await app.close()


def test_it_works_inside_handlers_of_both_kinds(app: ff.App, publish: ff.Task[..., str], worker: None) -> None:
    """A plain submission, as from anywhere else: the handler's own context is what submits durably."""

    @app.task
    def in_a_thread(n: int) -> str:
        with ff.Client(app) as client:
            return client.submit(publish, n).result(PATIENCE)

    @app.task
    async def in_a_loop(n: int) -> str:
        def work() -> str:
            with ff.Client(app) as client:
                return client.submit(publish, n).result(PATIENCE)

        return await asyncio.to_thread(work)

    async def main() -> None:
        async with ff.Worker(app, tasks=["in_a_thread", "in_a_loop"]):
            runs = [await in_a_thread.submit(1), await in_a_loop.submit(2)]
            assert [await run.result(PATIENCE) for run in runs] == ["draft 1", "draft 2"]

    asyncio.run(main())


def test_an_interrupted_wait_is_given_up_and_the_client_continues(
    client: ff.Client, publish: ff.Task[..., str]
) -> None:
    run = client.submit(publish, 7)
    waiting = client._client.outcomes._waiting

    def interrupt() -> None:
        until(lambda: waiting)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run.result()
    until(lambda: not waiting)  # the coroutine behind it was cancelled
    assert run.state() is ff.State.WAITING


def test_closing_ends_waits_in_other_threads_and_closing_again_does_nothing(
    app: ff.App, publish: ff.Task[..., str]
) -> None:
    client = ff.Client(app)
    run = client.submit(publish, 7)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(run.result) for _ in range(3)]
        every = client.all()
        assert next(every)
        until(lambda: sum(map(len, client._client.outcomes._waiting.values())) == 3)
        client.close()
        for one in waiting:
            with pytest.raises(TransportError, match="closed"):
                one.result(PATIENCE)
    client.close()
    every.close()
    for use in (lambda: client.submit(publish, 7), run.result, client.lanes, lambda: list(client.all())):
        with pytest.raises(TransportError, match="the client is closed"):
            use()
    assert not client._portal._thread.is_alive()
    gc.collect()  # nothing that was never awaited is left behind: that would be a warning, and an error here


def test_a_client_that_cannot_connect_leaves_nothing_behind() -> None:
    before = threading.active_count()
    app = ff.App("postgresql://nobody:secretword@127.0.0.1:1/nothing")
    with pytest.raises(ConnectionFailed) as failed:
        ff.Client(app)
    assert "secretword" not in str(failed.value)
    until(lambda: threading.active_count() == before)


def test_a_call_from_inside_a_call_is_refused_and_does_not_hang(client: ff.Client, publish: ff.Task[..., str]) -> None:
    client.submit_many(publish, range(3))
    with pytest.raises(ff.InvalidInput, match="inside one of its own calls"):
        client.cancel_all("x", progress=lambda _: client.lanes())
    with pytest.raises(ff.InvalidInput, match="inside one of its own calls"):
        client.replay_all(states=["cancelled"], progress=lambda _: client.close())
    assert client.lanes()


def test_an_error_in_progress_stops_the_rest(
    client: ff.Client, publish: ff.Task[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CHUNK", 2)
    client.submit_many(publish, range(5))

    def stop(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.cancel_all("x", progress=stop)
    assert len(client.find(states=["waiting"]).items) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork_the_child_gets_an_error_and_the_parent_continues(
    app: ff.App, publish: ff.Task[..., str], database: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """\
import os, sys
import flowfabric as ff

app = ff.App()

@app.task
def publish(draft_id: int) -> str: ...

client = ff.Client(app)
run = client.submit(publish, 1)
child = os.fork()
if child == 0:
    try:
        run.state()
    except ff.InvalidInput as error:
        print(error.problem, flush=True)
    with ff.Client(app) as own:
        print(own.run(run).state(), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("parent", run.state())
client.close()
"""
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        env={"FLOWFABRIC_DSN": database}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["was opened in another process, before a fork", "waiting", "parent waiting"]


@pytest.mark.parametrize("ending", ["", "client.close()", "raise SystemExit(0)", "del client, run"])
def test_a_program_exits_immediately_and_silently(ending: str, database: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""\
import flowfabric as ff

app = ff.App()

@app.task
def publish(draft_id: int) -> str: ...

client = ff.Client(app)
run = client.submit(publish, 1)
print(run.state())
{ending}
"""
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", program],
        env={"FLOWFABRIC_DSN": database}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("waiting\n", "")


def test_a_portal_returns_and_raises_and_iterates() -> None:
    portal = Portal()
    ended: list[str] = []

    async def answer(value: int) -> int:
        await asyncio.sleep(0)
        if value < 0:
            raise LookupError(value)
        return value

    async def numbers() -> Any:
        try:
            for n in range(3):
                yield n
        finally:
            ended.append("closed")

    assert portal.call(answer(5)) == 5
    with pytest.raises(LookupError):
        portal.call(answer(-1))
    assert list(portal.iterate(numbers())) == [0, 1, 2]
    some = portal.iterate(numbers())
    assert next(some) == 0
    some.close()  # type: ignore[attr-defined]
    assert ended == ["closed", "closed"]
    with contextlib.closing(portal):
        pass
    work = answer(5)
    with pytest.raises(TransportError):
        portal.call(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_a_coroutine_is_handed_over_ends_it(is_begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with contextlib.closing(Portal()) as portal:
        hand_over = portal._loop.call_soon_threadsafe

        def interrupted(callback: Callable[[], None], *args: Any) -> None:
            monkeypatch.undo()
            if is_begun:
                hand_over(callback, *args)
                assert begun.wait(PATIENCE)
            raise KeyboardInterrupt

        monkeypatch.setattr(portal._loop, "call_soon_threadsafe", interrupted)
        waiting = work()
        with pytest.raises(KeyboardInterrupt):
            portal.call(waiting)
        until(lambda: inspect.getcoroutinestate(waiting) == inspect.CORO_CLOSED)
        assert cancelled.is_set() is begun.is_set() is is_begun
        assert portal.call(asyncio.sleep(0, "more")) == "more"
