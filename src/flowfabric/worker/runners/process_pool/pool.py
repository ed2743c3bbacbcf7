"""A pool of child processes for handlers that keep a CPU busy, whose work can really be stopped.

A function runs in one process at a time, found there by its module and name. Cancelling the caller kills the process,
and with it everything the function started in its process group; another is started when there is work for it. Which
tasks run here, and what an outcome means for the execution, belongs to the worker.

In the parent each process has one thread, which starts it, talks to it and reaps it, so that no event loop is ever
blocked and none is depended on. The thread outlives its processes: on Linux a child asks to be killed when the thread
that started it ends, and a thread ends no later than the parent.

A child is a new interpreter, never a fork: it has no connection, thread or lock of the parent. It ignores SIGINT and
SIGTERM, because a terminal or a service manager sends them to every process while the parent decides how to stop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import importlib
import inspect
import io
import json
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, Final, NoReturn

from msgspec import Struct

from flowfabric.errors import InvalidInput, Unavailable

# What a script is called in a child, as everywhere in Python: its `if __name__ == "__main__"` must not run again.
_MAIN_IN_CHILD: Final = "__mp_main__"
# Signals first: they may arrive any time. Not SIG_IGN, which programs that a function starts would inherit.
_BOOTSTRAP: Final = """
import json, signal, sys
for ignored in signal.SIGINT, signal.SIGTERM:
    signal.signal(ignored, lambda *_: None)
setup = json.load(sys.stdin)
sys.path[:] = setup["path"]
from flowfabric.worker.runners.process_pool.pool import serve
serve(setup)
"""
_LENGTH: Final = struct.Struct("!Q")
_CHUNK: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1
# How long a killed process may take to be gone before `close` stops waiting for it.
_REAP_SECONDS: Final = 5.0


class ChildDied(RuntimeError):
    """The process ended before the function did: killed, crashed, or left by `os._exit`.

    `signal` is the name of the signal that ended it, `exit_code` its exit code; one of the two is None.
    """

    def __init__(self, what: str, exit_code: int | None, signal: str | None) -> None:
        self.what = what
        self.exit_code = exit_code
        self.signal = signal
        how = f"ended with exit code {exit_code}" if signal is None else f"was killed by {signal}"
        hint = " (out of memory, perhaps)" if signal == "SIGKILL" else ""
        super().__init__(f"the process running {what} {how}{hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.exit_code, self.signal)


class PoolClosed(RuntimeError):
    """The pool was closed before the function ended, or before it began."""


class RemoteError(RuntimeError):
    """The function raised something that cannot be raised here as it is; `type_name` and `message` tell what."""

    def __init__(self, type_name: str, message: str) -> None:
        self.type_name = type_name
        self.message = message
        super().__init__(f"{type_name}: {message}" if message else type_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type_name, self.message)


class ChildTraceback(Exception):
    """The cause of an error that was raised in a process. Its text is the traceback there."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.text}"


def child_traceback(error: BaseException) -> str | None:
    """The traceback in the process that raised `error`; None for an error of this process."""
    return error.__cause__.text if isinstance(error.__cause__, ChildTraceback) else None


class ProcessPool:
    """At most `size` processes, started when they are first needed and kept for the next function.

    `initializer` runs in every process before its first function; it must be importable there, like the functions
    themselves. `run` and `close` are called on an event loop; `kill` from any thread.
    """

    def __init__(self, size: int, *, initializer: Callable[[], None] | None = None) -> None:
        if os.name != "posix":
            raise Unavailable("process pool", "it needs process groups, which this system does not have")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(f"got {size!a}", field="size", allowed="1 or more")
        try:
            self._initializer = _dumps(initializer)
        except Exception as error:
            raise InvalidInput(
                f"cannot be sent to a process: {error}", field="initializer", allowed="a function of a module"
            ) from None
        self.size = size
        self._lock = threading.Lock()  # guards what follows, the jobs, and which process a slot has
        self._slots: list[_Slot] = []
        self._idle: list[_Slot] = []
        self._waiting: deque[_Job] = deque()
        self._closed = False
        self._killed = False

    async def run(self, module: str, qualname: str, kwargs: dict[str, Any]) -> Any:
        """Run a function in a free process and answer what it answers; wait for a process when all are busy.

        Cancelling this call kills the process at once. An exception of the function is raised here, in its own class
        where it pickles (else `RemoteError`), with the traceback of the process as its cause. `ChildDied` when the
        process ends first, `PoolClosed` when the pool is closed first.
        """
        if is_loading_main():
            raise RuntimeError("a script that starts work must do so under `if __name__ == '__main__':`")
        if "<" in qualname:
            raise InvalidInput(
                f"{qualname!a} cannot be found by its name in another process",
                field="function",
                allowed="a function or static method of a module",
            )
        if module in ("__main__", _MAIN_IN_CHILD) and _main_setup() is None:
            raise InvalidInput(
                f"{qualname!a} was defined in no file, so another process cannot load it",
                field="function",
                allowed="a function of a module or script",
            )
        loop = asyncio.get_running_loop()
        job = _Job(module, qualname, kwargs, loop, loop.create_future())
        self._submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    async def close(self, grace: float = 0) -> None:
        """Take no more work, let what runs end within `grace` seconds, then kill what is left.

        What waits for a process is refused at once. With a grace the processes end by themselves, running their exit
        handlers; without one they are killed.
        """
        self._stop(kill=grace <= 0)
        ended = [asyncio.wrap_future(slot.ended) for slot in self._slots]
        if not ended:
            return
        try:
            if grace > 0:
                await asyncio.wait(ended, timeout=grace)
        finally:
            self.kill()
        await asyncio.wait(ended, timeout=_REAP_SECONDS)

    def kill(self) -> None:
        """Kill every process and refuse all work, now and from here on. Does not wait; may be called by any thread."""
        self._stop(kill=True)

    def _stop(self, *, kill: bool) -> None:
        with self._lock:
            first = not self._closed
            self._closed = True
            self._killed = self._killed or kill
            refused = list(self._waiting)
            self._waiting.clear()
            for slot in self._slots:
                if first:
                    slot.inbox.put(None)
                if kill and slot.child is not None:
                    slot.child.kill()
        for job in refused:
            job.resolve(_closed(job, "did not start"))

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise _closed(job, "was not accepted")
            if self._idle:
                slot = self._idle.pop()
            elif len(self._slots) < self.size:
                slot = _Slot(self, len(self._slots))
                self._slots.append(slot)
            else:
                self._waiting.append(job)
                return
            slot.job = job
            slot.inbox.put(job)

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.is_cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
            for slot in self._slots:
                if slot.job is job and slot.child is not None:
                    slot.child.kill()


class _Job:
    """One call of `run`."""

    def __init__(
        self,
        module: str,
        qualname: str,
        kwargs: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        self.module = module
        self.qualname = qualname
        self.kwargs = kwargs
        self.loop = loop
        self.future = future
        self.is_cancelled = False

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"

    def resolve(self, outcome: _Returned | BaseException) -> None:
        """Give the caller the outcome, from any thread. One whose loop is closed does not wait for it any more."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: _Returned | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(outcome, _Returned):
            self.future.set_result(outcome.value)
        else:
            self.future.set_exception(outcome)


class _Returned(Struct, frozen=True):
    value: Any


class _Failure(Struct, frozen=True):
    """What a function raised: for people, and pickled where that is possible."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None
    is_of_initializer: bool


def _closed(job: _Job, what: str) -> PoolClosed:
    return PoolClosed(f"the process pool is closed: {job.name} {what}")


class _Slot:
    """One thread of the parent, and the process it has started last, if that lives."""

    def __init__(self, pool: ProcessPool, number: int) -> None:
        self.pool = pool
        self.inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.job: _Job | None = None
        self.child: _Child | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon, because a parent that exits without closing must not wait for a function.
        threading.Thread(target=self._main, name=f"flowfabric-process-{number}", daemon=True).start()

    def _main(self) -> None:
        self.ended.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it
        try:
            while (job := self.inbox.get()) is not None:
                following: _Job | None = job
                while following is not None:
                    following = self._finish(following, self._do(following))
            if self.child is not None:
                self.child.leave()
                self._bury(self.child)
        finally:
            self.ended.set_result(None)

    def _finish(self, job: _Job, outcome: _Returned | BaseException) -> _Job | None:
        """Take what waits, else be free; then hand out the outcome, so that who gets it finds the process free."""
        pool = self.pool
        with pool._lock:
            following = self.job = pool._waiting.popleft() if pool._waiting else None
            if following is None:
                # The next function goes to the slot that was last used and has a process.
                pool._idle.insert(len(pool._idle) if self.child is not None else 0, self)
        job.resolve(outcome)
        return following

    def _do(self, job: _Job) -> _Returned | BaseException:
        """Run one job to its outcome. Whatever happens, the slot can do the next one."""
        try:
            request = _dumps((job.module, job.qualname, job.kwargs))
        except Exception as error:
            return TypeError(f"the arguments of {job.name} cannot be sent to a process: {error}")
        try:
            child = self._living_child(job)
            if child is None:
                return _closed(job, "did not start")
            try:
                child.channel.send(request)
                reply = child.channel.receive()
            except BaseException as error:
                exit_code = self._bury(child)  # half a message may have been read
                if not isinstance(error, EOFError | OSError):
                    raise
                return _closed(job, "was killed") if self.pool._killed else _died(job, exit_code)
            with self.pool._lock:
                self.job = None  # from here on a cancellation no longer reaches the process
            answer = _loads(reply)
            if not isinstance(answer, _Failure):
                return _Returned(answer[0])
            if answer.is_of_initializer:
                self._bury(child)
            return _raised(answer)
        except Exception as error:  # no process could be started, or the result does not unpickle here
            return error

    def _living_child(self, job: _Job) -> _Child | None:
        """The slot's process, started where there is none; None when it is not needed any more."""
        child = self.child
        if child is not None and not child.is_alive:
            self._bury(child)
            child = None
        with self.pool._lock:
            if job.is_cancelled or self.pool._killed:
                return None
        if child is None:
            child = _Child(self.pool._initializer)
            with self.pool._lock:
                self.child = child
                if job.is_cancelled or self.pool._killed:
                    child.kill()
        return child

    def _bury(self, child: _Child) -> int:
        with self.pool._lock:
            self.child = None
        return child.bury()


def _died(job: _Job, exit_code: int) -> ChildDied:
    if exit_code >= 0:
        return ChildDied(job.name, exit_code, None)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return ChildDied(job.name, None, name)


def _raised(failure: _Failure) -> Exception:
    error: Exception = RemoteError(failure.type_name, failure.message)
    if failure.pickled is not None:
        with contextlib.suppress(Exception):  # its class may not exist here, or refuse to be made
            unpickled = _loads(failure.pickled)
            if isinstance(unpickled, Exception):
                error = unpickled
    error.__cause__ = ChildTraceback(failure.traceback)
    return error


class _Child:
    """One process: how to reach it, and its end."""

    def __init__(self, initializer: bytes) -> None:
        ours, theirs = socket.socketpair()
        try:
            setup = {
                "fd": theirs.fileno(),
                "parent": os.getpid(),
                "path": [entry or os.getcwd() for entry in sys.path],
                "argv": sys.argv,
                "main": _main_setup(),
            }
            # Its own process group: what a terminal sends to ours passes it by, and one signal ends all it started.
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
        self.channel = _Channel(ours, self._pidfd)
        assert self._process.stdin is not None
        # One that dies this early is found out when the first function is sent.
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(json.dumps(setup).encode())
        with contextlib.suppress(EOFError, OSError):
            self.channel.send(initializer)

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self.channel.is_open

    def kill(self) -> None:
        """End the process and its group. Only once, and never after `bury`: the number may belong to another then."""
        if not self._is_killed:
            self._is_killed = True
            # PermissionError is what macOS answers for a group whose processes have all ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Ask the process to end by itself and wait until it has, or is killed."""
        with contextlib.suppress(EOFError, OSError):
            self.channel.end()
            self.channel.receive()

    def bury(self) -> int:
        """Wait for the end of a process that has ended or is no longer wanted; answers its exit code."""
        # Killed in any case: what it started may still run, and one that has ended keeps its own exit code.
        self.kill()
        exit_code = self._process.wait()
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        return exit_code


class _Channel:
    """Messages over a socket, until the other side closes it or is dead.

    A process that the other side forked may hold the socket open after its death; the `pidfd` tells.
    """

    def __init__(self, sock: socket.socket, pidfd: int | None = None) -> None:
        self._socket = sock
        self._pidfd = pidfd
        sock.setblocking(False)

    def send(self, message: bytes) -> None:
        for part in (_LENGTH.pack(len(message)), message):
            rest = memoryview(part)
            while rest:
                self._wait(select.POLLOUT)
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._socket.send(rest[:_CHUNK]) :]

    def receive(self) -> bytes:
        """The next message. Raises EOFError, or an OSError, when there will be none."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        read = bytearray()
        while len(read) < length:
            self._wait(select.POLLIN)
            with contextlib.suppress(BlockingIOError):
                part = self._socket.recv(min(length - len(read), _CHUNK))
                if not part:
                    raise EOFError
                read += part
        return bytes(read)

    def _wait(self, event: int) -> None:
        poll = self._poll(event)
        # What was written before a death is still read.
        if not any(fd == self._socket.fileno() for fd, _ in poll.poll()):
            raise EOFError

    def _poll(self, event: int) -> select.poll:
        poll = select.poll()
        poll.register(self._socket, event)
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        return poll

    @property
    def is_open(self) -> bool:
        """Whether the other side is there. For a side that expects no message now."""
        return not self._poll(select.POLLIN).poll(0)

    def wait_for_end(self) -> None:
        """Return when the other side has closed the socket or has died, whatever else it sends."""
        poll = self._poll(0)
        while not poll.poll():
            pass

    def end(self) -> None:
        """Send no more."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def _interpreter_flags() -> list[str]:
    """The options this interpreter was started with, as the standard library hands them to its own children."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # no public form
    return flags


def _main_setup() -> dict[str, str] | None:
    """Where a child finds the script this process runs; None for a session without a file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    return {"path": os.path.abspath(path), "package": getattr(main, "__package__", None) or ""}


# Pickles. The script of the parent has two names, one in each process.


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", _MAIN_IN_CHILD):
            _load_main()
            module = "__main__"
        return super().find_class(module, name)


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _loads(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


# The child's side.

_main_in_child: dict[str, str] | None = None  # the script, until it is loaded
_loading_main = False


def serve(setup: dict[str, Any]) -> NoReturn:
    """The life of a child: one function after the other, until the parent closes the socket."""
    global _main_in_child  # noqa: PLW0603 - one child, one script
    # The first descriptor is closed by nobody: the parent sees the end of the socket when all else has ended too.
    os.set_inheritable(setup["fd"], False)
    channel = _Channel(socket.socket(fileno=os.dup(setup["fd"])))
    die_with_parent(setup["parent"], channel)
    sys.argv[:] = setup["argv"]
    _main_in_child = setup["main"]

    refusal: bytes | None = None
    with contextlib.suppress(EOFError, OSError):
        initializer = channel.receive()
        try:
            if (function := _loads(initializer)) is not None:
                function()
        except BaseException as error:
            error.add_note("raised by the initializer of the process")
            refusal = _dumps(_failure(error, is_of_initializer=True))
        while True:
            request = channel.receive()
            channel.send(refusal or _answer(request))
    sys.exit(0)


def die_with_parent(parent: int, channel: _Channel) -> None:
    """See to it that this process does not outlive its parent, even when killing is all that can stop it.

    Where the kernel does not offer that, a thread waits for the parent's end; code that never lets go of the
    interpreter's lock holds it up.
    """
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
        if os.getppid() != parent:  # it was gone before the kernel was asked
            os._exit(1)
        return
    threading.Thread(target=watch_parent, args=(channel,), name="flowfabric-parent", daemon=True).start()


def watch_parent(channel: _Channel) -> None:
    channel.wait_for_end()
    os._exit(1)


def _answer(request: bytes) -> bytes:
    try:
        module, qualname, kwargs = _loads(request)
        result = _find(module, qualname)(**kwargs)
        try:
            answer = _dumps((result,))
        except Exception as error:
            raise TypeError(f"the result of {module}.{qualname} cannot be sent to the parent: {error}") from None
    except BaseException as error:
        answer = _dumps(_failure(error))
    for stream in (sys.stdout, sys.stderr):
        # A process that is killed later writes nothing more.
        with contextlib.suppress(Exception):
            stream.flush()
    return answer


def _find(module: str, qualname: str) -> Callable[..., Any]:
    if module in ("__main__", _MAIN_IN_CHILD):
        _load_main()
        module = "__main__"
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    function = getattr(found, "function", found)
    if not callable(function):
        raise TypeError(f"{module}.{qualname} is not a function")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{module}.{qualname} is async; a process runs plain functions")
    return function  # type: ignore[no-any-return] # whatever can be called


def _load_main() -> None:
    """Load the parent's script in a child, when something in it is asked for."""
    global _main_in_child, _loading_main  # noqa: PLW0603 - one child, one script
    main, _main_in_child = _main_in_child, None
    if main is None:
        return
    loader = SourceFileLoader(_MAIN_IN_CHILD, main["path"])
    spec = spec_from_file_location(_MAIN_IN_CHILD, main["path"], loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    module.__package__ = main["package"]
    before = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[_MAIN_IN_CHILD] = module
    _loading_main = True
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules["__main__"] = before
        del sys.modules[_MAIN_IN_CHILD]
        _main_in_child = main
        raise
    finally:
        _loading_main = False


def is_loading_main() -> bool:
    """Whether this is a child that is loading the parent's script, where nothing must be started."""
    return _loading_main


def _failure(error: BaseException, *, is_of_initializer: bool = False) -> _Failure:
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # without our own frame
    cls = type(error)
    pickled = None
    # Only what is an ordinary error may be raised in the parent: SystemExit there would end the worker, and
    # StopIteration cannot leave a coroutine.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        with contextlib.suppress(Exception):
            candidate = _dumps(error)
            if type(_loads(candidate)) is cls:
                pickled = candidate
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    return _Failure(
        cls.__qualname__ if cls.__module__ in ("builtins", _MAIN_IN_CHILD) else f"{cls.__module__}.{cls.__qualname__}",
        message,
        "".join(traceback.format_exception(error)),
        pickled,
        is_of_initializer,
    )
