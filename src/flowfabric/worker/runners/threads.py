"""Threads for synchronous functions: started when needed, reused, and never blocking the exit of the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from flowfabric.errors import Interrupted

_IDLE = 30.0  # seconds


class Threads:
    """Runs functions in daemon threads, at most `limit` at a time. The standard pool would wait for them at exit.

    A function whose caller was cancelled does not count: it cannot be stopped, and must not block others.
    """

    def __init__(self, limit: int, *, idle: float = _IDLE) -> None:
        self._limit = limit
        self._patience = idle
        self._mutex = threading.Lock()
        self._work: deque[_Job] = deque()
        self._ready = threading.Condition(self._mutex)
        self._idle = 0
        self._count = 0
        self.abandoned = 0

    async def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in a thread. Cancelling the wait does not stop it once it has started."""
        job = _Job(asyncio.get_running_loop(), fn, args, kwargs)
        with self._mutex:
            self._work.append(job)
            if self._idle >= len(self._work):
                self._ready.notify()
            else:
                self._start_thread()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._leave(job)
            raise

    def _start_thread(self) -> None:
        if self._count < self._limit:
            self._count += 1
            threading.Thread(target=self._serve, name="flowfabric handler", daemon=True).start()

    def _leave(self, job: _Job) -> None:
        with self._mutex:
            if job.is_done:
                return
            if not job.has_begun:
                self._work.remove(job)
                return
            job.is_abandoned = True
            self.abandoned += 1
            self._count -= 1
            if self._work:
                self._start_thread()

    def _serve(self) -> None:
        while True:
            with self._mutex:
                self._idle += 1
                if not self._work:
                    self._ready.wait(self._patience)
                self._idle -= 1
                if not self._work:
                    self._count -= 1
                    return
                job = self._work.popleft()
                job.has_begun = True
            job.run()
            with self._mutex:
                job.is_done = True
                if job.is_abandoned:
                    self.abandoned -= 1
                    return  # another thread replaced it
            del job  # an idle thread keeps nothing alive


class _Job:
    __slots__ = ("args", "context", "fn", "future", "has_begun", "is_abandoned", "is_done", "kwargs", "loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.loop = loop
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.context = contextvars.copy_context()
        self.future: asyncio.Future[Any] = loop.create_future()
        self.has_begun = self.is_done = self.is_abandoned = False

    def run(self) -> None:
        value, error = None, None
        try:
            value = self.context.run(self.fn, *self.args, **self.kwargs)
        except BaseException as raised:  # any exception goes to the caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended; no caller waits
            self.loop.call_soon_threadsafe(settle, self.future, value, error)


def settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Give a future the result of a function, unless it was cancelled meanwhile."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future cannot carry it
        future.set_exception(RuntimeError("the function raised StopIteration"))
    else:
        future.set_exception(error)


class Interruptible:
    """A call that another thread can make raise `Interrupted` at its next line: once, and only while it lasts."""

    __slots__ = ("_lock", "_thread", "_was_told")

    def __init__(self) -> None:
        # Reentrant: the exception may arrive between taking the lock and the return of that call.
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._was_told = False

    def __call__(self, fn: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        self._thread = threading.get_ident()
        try:
            return fn(**kwargs)
        finally:
            self._leave()

    @property
    def is_here(self) -> bool:
        """Whether the call runs in the current thread."""
        return self._thread == threading.get_ident()

    def _leave(self) -> None:
        """Take back an exception that has not arrived: it must not reach the next function of this thread."""
        while self._thread is not None:
            with contextlib.suppress(Interrupted), self._lock:
                raise_in(threading.get_ident(), None)
                self._thread = None

    def interrupt(self) -> None:
        """Raise `Interrupted` in the call. No effect if it has not started, has ended, or was interrupted before."""
        if self._was_told or not self._lock.acquire(timeout=1.0):
            return
        try:
            if self._thread is not None and self._thread != threading.get_ident() and not self._was_told:
                self._was_told = True
                raise_in(self._thread, Interrupted)
        finally:
            self._lock.release()


def raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next line of Python; None takes back one that has not arrived."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), None if error is None else ctypes.py_object(error)
    )
