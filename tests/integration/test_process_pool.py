"""The process pool: real processes, really busy, really killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.worker.runners.process_pool import ChildDied, ChildTraceback, PoolClosed, ProcessPool, RemoteError
from flowfabric.worker.runners.process_pool import child as child_module
from tests.integration import pool_functions
from tests.integration.pool_functions import PATIENCE, write
from tests.until import until

HERE = pool_functions.__name__
SOURCES = str(Path(child_module.__file__).parents[4])


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the loop of the standard library and on uvloop."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**fixtures))

    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined] # pytest would take the test for a coroutine
    first = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *inspect.signature(test).parameters.values()])  # type: ignore[attr-defined]
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    on_each: Callable[..., Callable[..., None]] = pytest.mark.parametrize(
        "loop_factory", factories, ids=["asyncio", "uvloop"]
    )
    return on_each(run)


@contextlib.asynccontextmanager
async def a_pool(size: int = 1) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(size)
    try:
        yield pool
    finally:
        await pool.close()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one whose parent is gone stays until its new parent collects it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def written(path: Path) -> str:
    """What a function has written, once it has; the empty text before."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


async def pid_in(path: Path) -> int:
    return int(await until(lambda: written(path)))


# Running


@on_both_loops
async def test_a_function_runs_in_another_process_which_is_kept_for_the_next() -> None:
    async with a_pool(2) as pool:
        first = await pool.run(HERE, "pid", {})

        assert first != os.getpid()
        assert os.getpgid(first) == first
        assert [await pool.run(HERE, "pid", {}) for _ in range(3)] == [first] * 3
        assert await pool.run(HERE, "echo", {"value": {"a": (1, b"\0"), "b": None}}) == {"a": (1, b"\0"), "b": None}


async def test_no_process_is_started_before_it_is_needed() -> None:
    def children() -> set[str]:
        return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

    before = children()
    async with a_pool(3) as pool:
        assert children() == before
        started = await pool.run(HERE, "pid", {})
        assert children() - before == {str(started)}


@on_both_loops
async def test_functions_run_side_by_side_in_as_many_processes_as_the_pool_has(tmp_path: Path) -> None:
    async with a_pool(2) as pool:
        # Each waits until the other has started.
        meeting = [
            pool.run(HERE, "hold", {"started": str(tmp_path / mine), "go": str(tmp_path / other)})
            for mine, other in (("a", "b"), ("b", "a"))
        ]
        pids = set(await asyncio.gather(*meeting))
        assert len(pids) == 2
        assert set(await asyncio.gather(*(pool.run(HERE, "pid", {}) for _ in range(10)))) <= pids


@on_both_loops
async def test_the_event_loop_runs_on_while_a_process_is_busy_and_while_much_is_sent(tmp_path: Path) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with a_pool(2) as pool:
        counting = asyncio.create_task(count())
        spinning = asyncio.create_task(pool.run(HERE, "spin", {"started": str(tmp_path / "spin")}))
        await pid_in(tmp_path / "spin")
        much = os.urandom(1 << 20) * 40
        before = turns
        assert await pool.run(HERE, "echo", {"value": much}) == much
        assert turns > before + 100
        for task in (counting, spinning):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize(
    ("qualname", "kwargs", "expected"),
    [("decorated", {"a": 1}, 2), ("Holder.method", {"a": 1}, 3)],
)
async def test_a_function_is_found_by_its_name(qualname: str, kwargs: dict[str, Any], expected: int) -> None:
    async with a_pool() as pool:
        assert await pool.run(HERE, qualname, kwargs) == expected


async def test_a_function_that_cannot_run_is_an_error_and_the_process_continues() -> None:
    async with a_pool() as pool:
        first = await pool.run(HERE, "pid", {})
        for module, qualname, kwargs, error, text in (
            ("flowfabric.nothing", "pid", {}, ModuleNotFoundError, "flowfabric.nothing"),
            (HERE, "nothing", {}, AttributeError, "nothing"),
            (HERE, "Holder.number", {}, TypeError, "is not a function"),
            (HERE, "asynchronous", {}, TypeError, "is async"),
            (HERE, "echo", {"valu": 1}, TypeError, "valu"),
            (HERE, "echo", {"value": threading.Lock()}, TypeError, "the arguments of .*echo cannot be sent"),
            (HERE, "unpicklable", {}, TypeError, "the result of .*unpicklable cannot be sent"),
            (HERE, "outer.<locals>.inner", {}, InvalidInput, "cannot be found by its name"),
            (HERE, "<lambda>", {}, InvalidInput, "cannot be found by its name"),
        ):
            with pytest.raises(error, match=text):
                await pool.run(module, qualname, kwargs)
        assert await pool.run(HERE, "pid", {}) == first


# Errors


ERRORS: list[tuple[str, type[Exception], str]] = [
    ("value", ValueError, "('not good', 5)"),
    ("ours", NotFound, "not found: lane blue"),
    ("group", ExceptionGroup, "two (2 sub-exceptions)"),
    ("picky", RemoteError, f"{HERE}.Picky: 1 and 2"),
    ("locked", RemoteError, f"{HERE}.Locked: holds a lock"),
    ("mute", RemoteError, f"{HERE}.Mute: (its message cannot be read)"),
    ("local", RemoteError, f"{HERE}.Local: made here"),
    ("exit", RemoteError, "SystemExit: 3"),
    ("interrupt", RemoteError, "KeyboardInterrupt: stop"),
    ("cancelled", RemoteError, "asyncio.exceptions.CancelledError: stop"),
    ("stop", RemoteError, "StopIteration: 5"),
]


def child_traceback(error: BaseException) -> str:
    """The traceback in the child process."""
    assert isinstance(error.__cause__, ChildTraceback)
    return error.__cause__.text


@on_both_loops
async def test_an_error_of_the_function_is_raised_with_its_traceback_and_the_process_continues() -> None:
    async with a_pool() as pool:
        first = await pool.run(HERE, "pid", {})
        for which, error, message in ERRORS:
            with pytest.raises(Exception) as raised:
                await pool.run(HERE, "fail", {"with_": which})

            assert type(raised.value) is error
            assert str(raised.value) == message
            text = child_traceback(raised.value)
            assert "raise errors[with_]()" in text
            assert child_module.__file__ not in text
        assert await pool.run(HERE, "pid", {}) == first


async def test_the_traceback_shows_the_whole_chain() -> None:
    async with a_pool() as pool:
        with pytest.raises(LookupError) as raised:
            await pool.run(HERE, "fail_because", {})

    text = child_traceback(raised.value)
    for part in ("not good", "a note of its own", "The above exception was the direct cause", "on top"):
        assert part in text


@pytest.mark.parametrize(
    "error", [ChildDied("f", 3, None), ChildDied("f", None, "SIGKILL"), RemoteError("Local", "x"), PoolClosed("closed")]
)
def test_errors_of_the_pool_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


# Deaths


DEATHS: list[tuple[str, str, dict[str, Any], int | None, str | None]] = [
    ("os", "_exit", {"status": 3}, 3, None),
    ("os", "_exit", {"status": 0}, 0, None),
    ("os", "abort", {}, None, "SIGABRT"),
    (HERE, "kill_self", {"number": signal.SIGKILL}, None, "SIGKILL"),
    (HERE, "crash", {}, None, "SIGSEGV"),
]


@on_both_loops
async def test_the_death_of_a_process_is_an_error_and_the_pool_continues() -> None:
    async with a_pool() as pool:
        last = await pool.run(HERE, "pid", {})
        for module, qualname, kwargs, exit_code, by in DEATHS:
            with pytest.raises(ChildDied) as raised:
                await pool.run(module, qualname, kwargs)

            assert (raised.value.exit_code, raised.value.signal) == (exit_code, by)
            assert f"{module}.{qualname}" in str(raised.value)
            assert str(exit_code if by is None else by) in str(raised.value)
            assert is_gone(last)
            before, last = last, await pool.run(HERE, "pid", {})
            assert last != before


async def test_a_process_killed_from_outside_is_reported_as_killed(tmp_path: Path) -> None:
    async with a_pool() as pool:
        running = asyncio.create_task(pool.run(HERE, "spin", {"started": str(tmp_path / "pid")}))
        os.kill(await pid_in(tmp_path / "pid"), signal.SIGKILL)

        with pytest.raises(ChildDied, match="was killed by SIGKILL"):
            await running


async def test_a_death_is_noticed_though_a_forked_process_holds_the_socket(tmp_path: Path) -> None:
    async with a_pool() as pool:
        with pytest.raises(ChildDied) as raised:
            await pool.run(HERE, "fork_and_exit", {"started": str(tmp_path / "pid"), "code": 7})

        assert raised.value.exit_code == 7
        forked = await pid_in(tmp_path / "pid")
        await until(lambda: is_gone(forked))


async def test_a_process_that_died_idle_is_replaced_before_the_next_function() -> None:
    async with a_pool() as pool:
        first = await pool.run(HERE, "pid", {})
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)

        assert await pool.run(HERE, "pid", {}) != first


# Cancellation


@pytest.mark.each_value
@pytest.mark.parametrize("qualname", ["spin", "spin_inside_c", "refuse_to_end", "start_a_program"])
@on_both_loops
async def test_cancelling_always_kills_the_running_process(tmp_path: Path, qualname: str) -> None:
    async with a_pool() as pool:
        first = await pool.run(HERE, "pid", {})
        running = asyncio.create_task(pool.run(HERE, qualname, {"started": str(tmp_path / "pid")}))
        busy = await pid_in(tmp_path / "pid")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        await until(lambda: is_gone(busy) and is_gone(first))
        assert await pool.run(HERE, "pid", {}) != first


async def test_a_timeout_kills_too(tmp_path: Path) -> None:
    limit = asyncio.timeout(None)

    async def run_limited(pool: ProcessPool) -> None:
        async with limit:
            await pool.run(HERE, "spin", {"started": str(tmp_path / "pid")})

    async with a_pool() as pool:
        running = asyncio.create_task(run_limited(pool))
        busy = await pid_in(tmp_path / "pid")
        limit.reschedule(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            await running

        await until(lambda: is_gone(busy))


@on_both_loops
async def test_one_cancelled_while_it_waits_for_a_process_never_runs_and_kills_nothing(tmp_path: Path) -> None:
    async with a_pool() as pool:
        holding = asyncio.create_task(
            pool.run(HERE, "hold", {"started": str(tmp_path / "pid"), "go": str(tmp_path / "go")})
        )
        busy = await pid_in(tmp_path / "pid")
        queued = asyncio.create_task(pool.run(HERE, "write", {"path": str(tmp_path / "ran"), "text": "x"}))
        behind = asyncio.create_task(pool.run(HERE, "pid", {}))
        await asyncio.sleep(0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        write(str(tmp_path / "go"), "")

        assert await holding == busy
        assert await behind == busy
        assert not (tmp_path / "ran").exists()


@on_both_loops
async def test_a_pool_survives_cancellations_at_any_moment() -> None:
    async with a_pool(2) as pool:
        for turns in range(16):
            running = [asyncio.create_task(pool.run(HERE, "echo", {"value": n})) for n in range(4)]
            # From before the first process is there to after the last answer.
            await asyncio.sleep(turns * turns * 0.0025)
            running[turns % 4].cancel()
            outcomes = await asyncio.gather(*running, return_exceptions=True)

            for n, outcome in enumerate(outcomes):
                assert outcome == n or (n == turns % 4 and isinstance(outcome, asyncio.CancelledError))
        assert {await pool.run(HERE, "echo", {"value": n}) for n in range(4)} == set(range(4))


# Closing


@on_both_loops
async def test_closing_kills_running_and_refuses_waiting_jobs(tmp_path: Path) -> None:
    pool = ProcessPool(1)
    running = asyncio.create_task(pool.run(HERE, "spin", {"started": str(tmp_path / "pid")}))
    busy = await pid_in(tmp_path / "pid")
    waiting = asyncio.create_task(pool.run(HERE, "pid", {}))
    await asyncio.sleep(0)
    await pool.close()

    assert is_gone(busy)
    with pytest.raises(PoolClosed, match="was killed"):
        await running
    with pytest.raises(PoolClosed, match="did not start"):
        await waiting
    with pytest.raises(PoolClosed, match="was not accepted"):
        await pool.run(HERE, "pid", {})
    await pool.close()


async def test_closing_that_is_cancelled_kills(tmp_path: Path) -> None:
    pool = ProcessPool(1)
    running = asyncio.create_task(pool.run(HERE, "spin", {"started": str(tmp_path / "pid")}))
    busy = await pid_in(tmp_path / "pid")
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    with pytest.raises(PoolClosed):
        await running
    await until(lambda: is_gone(busy))


@on_both_loops
async def test_killing_from_another_thread_ends_everything(tmp_path: Path) -> None:
    pool = ProcessPool(2)
    idle = await pool.run(HERE, "pid", {})
    running = [asyncio.create_task(pool.run(HERE, "spin", {"started": str(tmp_path / f"{n}")})) for n in range(2)]
    pids = {idle} | {await pid_in(tmp_path / f"{n}") for n in range(2)}
    thread = threading.Thread(target=pool.kill)
    thread.start()
    for task in running:
        with pytest.raises(PoolClosed):
            await task
    thread.join()

    await until(lambda: all(map(is_gone, pids)))
    with pytest.raises(PoolClosed):
        await pool.run(HERE, "pid", {})


MOMENTS = (0.0, 0.002, 0.01, 0.05, 0.1)
"""Between asking for a process and having one."""


async def test_killing_while_processes_start_leaves_none_behind(tmp_path: Path) -> None:
    for moment in MOMENTS:
        pool = ProcessPool(2)
        spinning = (pool.run(HERE, "spin", {"started": str(tmp_path / f"{moment}-{n}")}) for n in range(3))
        running = [asyncio.create_task(one) for one in spinning]
        await asyncio.sleep(moment)
        pool.kill()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, PoolClosed)
        await pool.close()
        assert all(slot.child is None for slot in pool._slots)


async def test_cancelling_while_a_process_starts_frees_its_place(tmp_path: Path) -> None:
    for moment in MOMENTS:
        async with a_pool() as pool:
            running = asyncio.create_task(pool.run(HERE, "spin", {"started": str(tmp_path / f"{moment}")}))
            await asyncio.sleep(moment)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await pool.run("os", "getpid", {})


# The life of a child


async def test_a_child_leaves_the_signals_of_a_terminal_and_a_service_manager_to_the_parent(tmp_path: Path) -> None:
    async with a_pool() as pool:
        running = asyncio.create_task(
            pool.run(HERE, "hold", {"started": str(tmp_path / "pid"), "go": str(tmp_path / "go")})
        )
        busy = await pid_in(tmp_path / "pid")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(busy, number)
        write(str(tmp_path / "go"), "")

        assert await running == busy
        # What it starts does not inherit that.
        assert await pool.run(HERE, "terminate_a_program", {}) == -signal.SIGTERM


async def test_a_child_has_no_open_file_of_the_parent(tmp_path: Path) -> None:
    with open(tmp_path / "ours", "w") as file, contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        for fd in (file.fileno(), listening.fileno()):
            os.set_inheritable(fd, True)
        async with a_pool() as pool:
            names = await pool.run(HERE, "open_files", {})

    assert not any("ours" in name for name in names)
    assert len({name for name in names if name.startswith("socket:")}) == 1


@pytest.mark.parametrize("size", [0, -1, True, "2"])
def test_a_bad_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        ProcessPool(size)

    assert refused.value.field == "size"


# Whole programs

PROGRAM = """
import asyncio, dataclasses, os, re, sys
from pathlib import Path
from flowfabric.worker.runners.process_pool import ProcessPool

@dataclasses.dataclass
class Point:
    x: int

def move(point: Point) -> Point:
    assert type(point) is Point
    return Point(point.x + 1)

def spin(path: str) -> None:
    Path(path + ".part").write_text(str(os.getpid()))
    os.rename(path + ".part", path)
    re.match("(a+)+$", "a" * 64 + "b")

async def main() -> None:
    pool = ProcessPool(1)
"""
GUARD = "\nif __name__ == '__main__':\n    asyncio.run(main())\n"
MOVE = '    print(await pool.run("__main__", "move", {"point": Point(1)}) == Point(2))\n    await pool.close()\n'


@contextlib.contextmanager
def program(*args: str, folder: Path, stdin: str | None = None) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(
        [sys.executable, *args],
        cwd=folder,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def output(*args: str, folder: Path, stdin: str | None = None) -> str:
    with program(*args, folder=folder, stdin=stdin) as running:
        return running.communicate(stdin, timeout=PATIENCE)[0]


def test_a_function_of_the_script_itself_runs_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM + MOVE + GUARD)

    assert output("script.py", folder=tmp_path) == "True\n"


def test_a_function_of_a_module_run_as_a_script_runs_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "other.py").write_text("")
    (tmp_path / "pack" / "script.py").write_text("from . import other\n" + PROGRAM + MOVE + GUARD)

    assert output("-m", "pack.script", folder=tmp_path) == "True\n"


def test_for_a_script_without_a_guard_the_error_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM + MOVE + "\nasyncio.run(main())\n")

    assert "must do so under `if __name__ == '__main__':`" in output("script.py", folder=tmp_path)


def test_a_script_is_not_loaded_for_functions_of_other_modules(tmp_path: Path) -> None:
    script = (
        PROGRAM
        + '    print(await pool.run("os", "getpid", {}) > 0)\n    await pool.close()\n'
        + "\nasyncio.run(main())\n"
    )
    (tmp_path / "script.py").write_text(script)

    assert output("script.py", folder=tmp_path) == "True\n"


def test_a_function_that_is_in_no_file_is_refused(tmp_path: Path) -> None:
    told = output("-", folder=tmp_path, stdin=PROGRAM + MOVE + GUARD)

    assert "InvalidInput" in told
    assert "'move' is not defined in a file" in told


@pytest.mark.parametrize("end", ["killed", "exits"])
async def test_a_busy_child_does_not_outlive_its_parent(tmp_path: Path, end: str) -> None:
    spinning = (
        f'    running = asyncio.ensure_future(pool.run("__main__", "spin", {{"path": {str(tmp_path / "pid")!r}}}))\n'
    )
    leaving = (
        f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n        await asyncio.sleep(0.01)\n    sys.exit(5)\n"
    )
    (tmp_path / "script.py").write_text(PROGRAM + spinning + leaving + GUARD)
    with program("script.py", folder=tmp_path) as running:
        busy = await pid_in(tmp_path / "pid")
        if end == "killed":
            running.kill()
        else:
            write(str(tmp_path / "go"), "")
        code = await asyncio.to_thread(running.wait, PATIENCE)

        assert code == (-signal.SIGKILL if end == "killed" else 5)
        await until(lambda: is_gone(busy))


def test_where_the_kernel_does_not_end_a_child_a_thread_does() -> None:
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys, threading; from flowfabric.worker.runners.process_pool import channel, child;"
        " sys.platform = 'other'; line = channel.Channel(socket.socket(fileno=int(sys.argv[1])));"
        " child.die_with_parent(0, line); print('watching', flush=True)\n"
        "while True: pass"
    )
    with contextlib.closing(ours):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        assert child.stdout is not None
        assert child.stdout.readline() == "watching\n"
        # Neither a message nor the end of them is the parent's end.
        ours.send(b"x")
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.2)
    with child:
        assert child.wait(PATIENCE) == 1
