"""One child process: how the parent starts, kills and reaps it, and the loop that runs in it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from flowfabric.worker.runners.process_pool.channel import Channel, dumps, loads
from flowfabric.worker.runners.process_pool.errors import ChildFailure
from flowfabric.worker.runners.process_pool.main_module import MAIN_IN_CHILD, expect_main, load_main, main_setup

# Signals first: they may arrive at any time. Not SIG_IGN, which programs started by a function would inherit.
_BOOTSTRAP: Final = """
import json, signal, sys
for ignored in signal.SIGINT, signal.SIGTERM:
    signal.signal(ignored, lambda *_: None)
setup = json.load(sys.stdin)
sys.path[:] = setup["path"]
from flowfabric.worker.runners.process_pool.child import serve
serve(setup)
"""
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A child process, seen from the parent."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            setup = {
                "fd": theirs.fileno(),
                "parent": os.getpid(),
                "path": [entry or os.getcwd() for entry in sys.path],
                "argv": sys.argv,
                "main": main_setup(),
            }
            # Its own process group: signals from a terminal do not reach it, and one signal kills all it started.
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", _BOOTSTRAP],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._is_killed = False
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._process.pid)
        self.channel = Channel(ours, self._pidfd)
        assert self._process.stdin is not None
        # A child that dies this early is noticed when the first function is sent.
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(json.dumps(setup).encode())

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self.channel.is_open

    def kill(self) -> None:
        """End the process and its group. Only once, and never after `bury`: the pid may be reused then."""
        if not self._is_killed:
            self._is_killed = True
            # macOS raises PermissionError for a group whose processes have all ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> int:
        """Kill a process that has ended or is no longer wanted, and reap it; returns its exit code."""
        # Killed in any case: its own children may still run, and an ended process keeps its exit code.
        self.kill()
        exit_code = self._process.wait()
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        return exit_code


def _interpreter_flags() -> list[str]:
    """Return the options of this interpreter, as the standard library passes them to its own children."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # no public form
    return flags


# The child's side


def serve(setup: dict[str, Any]) -> NoReturn:
    """The main loop of a child: run one function after another, until the parent closes the socket."""
    # The first descriptor is never closed: the parent sees the socket's end when everything else has ended.
    os.set_inheritable(setup["fd"], False)
    channel = Channel(socket.socket(fileno=os.dup(setup["fd"])))
    die_with_parent(setup["parent"], channel)
    sys.argv[:] = setup["argv"]
    expect_main(setup["main"])

    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.send(_answer(channel.receive()))
    sys.exit(0)


def die_with_parent(parent: int, channel: Channel) -> None:
    """Make this process die with its parent, even if only a kill can stop it.

    If the kernel does not offer that, a thread waits for the parent's end; code that never releases the interpreter's
    lock blocks it.
    """
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
        return
    threading.Thread(target=watch_parent, args=(channel,), name="flowfabric-parent", daemon=True).start()


def watch_parent(channel: Channel) -> None:
    channel.wait_for_end()
    os._exit(1)


def _answer(request: bytes) -> bytes:
    try:
        module, qualname, kwargs = loads(request)
        result = _find(module, qualname)(**kwargs)
        try:
            answer = dumps((result,))
        except Exception as error:
            raise TypeError(f"the result of {module}.{qualname} cannot be sent to the parent: {error}") from None
    except BaseException as error:
        answer = dumps(_failure(error))
    for stream in (sys.stdout, sys.stderr):
        # Flushed now: a process that is killed later writes nothing more.
        with contextlib.suppress(Exception):
            stream.flush()
    return answer


def _find(module: str, qualname: str) -> Callable[..., Any]:
    if module in ("__main__", MAIN_IN_CHILD):
        load_main()
        module = "__main__"
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    function = getattr(found, "function", found)
    if not callable(function):
        raise TypeError(f"{module}.{qualname} is not a function")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{module}.{qualname} is async; a process runs synchronous functions")
    return function  # type: ignore[no-any-return] # any callable


def _failure(error: BaseException) -> ChildFailure:
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # without our own frame
    cls = type(error)
    pickled = None
    # Only an ordinary error may be raised in the parent: SystemExit would end the worker there, and StopIteration
    # cannot leave a coroutine.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        with contextlib.suppress(Exception):
            candidate = dumps(error)
            if type(loads(candidate)) is cls:
                pickled = candidate
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    return ChildFailure(
        cls.__qualname__ if cls.__module__ in ("builtins", MAIN_IN_CHILD) else f"{cls.__module__}.{cls.__qualname__}",
        message,
        "".join(traceback.format_exception(error)),
        pickled,
    )
