"""What the tests of the process pool run in processes. A module of its own: a child loads it, and not pytest."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from flowfabric.errors import NotFound

PATIENCE = 60.0


def write(path: str, text: str) -> None:
    """At once: a reader sees nothing or all of it."""
    Path(f"{path}.part").write_text(text)
    os.rename(f"{path}.part", path)


def wait_for(path: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)


def pid() -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def spin(started: str) -> NoReturn:
    write(started, str(os.getpid()))
    while True:
        pass


def spin_inside_c(started: str) -> object:
    write(started, str(os.getpid()))
    return re.match(r"(a+)+$", "a" * 64 + "b")  # for years, and never letting go of the interpreter's lock


def refuse_to_end(started: str) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            write(started, str(os.getpid()))
            while True:
                time.sleep(PATIENCE)
        except BaseException:
            continue


def start_a_program(started: str) -> None:
    program = subprocess.Popen(["sleep", "1000"])
    write(started, str(program.pid))
    program.wait()


def fork_and_exit(started: str, code: int) -> None:
    if os.fork() == 0:
        write(started, str(os.getpid()))
        time.sleep(PATIENCE)
        os._exit(0)
    wait_for(started)
    os._exit(code)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def crash() -> None:
    ctypes.string_at(0)


def hold(started: str, go: str) -> int:
    write(started, str(os.getpid()))
    wait_for(go)
    return os.getpid()


def terminate_a_program() -> int:
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    return program.wait()


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


class Picky(Exception):
    """Pickles, but cannot be made again from what was pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    def __reduce__(self) -> NoReturn:
        raise ValueError("no pickle")


def fail(with_: str) -> NoReturn:
    errors: dict[str, Callable[[], BaseException]] = {
        "value": lambda: ValueError("not good", 5),
        "ours": lambda: NotFound("lane", "blue"),
        "group": lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        "picky": lambda: Picky(1, 2),
        "locked": Locked,
        "mute": Mute,
        "local": lambda: type("Local", (Exception,), {})("made here"),
        "exit": lambda: SystemExit(3),
        "interrupt": lambda: KeyboardInterrupt("stop"),
        "cancelled": lambda: asyncio.CancelledError("stop"),
        "stop": lambda: StopIteration(5),
    }
    raise errors[with_]()


def fail_because() -> NoReturn:
    try:
        fail("value")
    except ValueError as error:
        error.add_note("a note of its own")
        raise LookupError("on top") from error


def unpicklable() -> object:
    return threading.Lock()


async def asynchronous() -> None:
    pass


class Task:
    """What a decorator makes of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self) -> NoReturn:
        raise AssertionError("the plain function is to be called")


@Task
def decorated(a: int) -> int:
    return a + 1


class Holder:
    @staticmethod
    def method(a: int) -> int:
        return a + 2

    number = 5
