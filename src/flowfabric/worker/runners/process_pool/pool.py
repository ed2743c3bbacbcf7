"""A pool of child processes for handlers that keep a CPU busy, whose work can really be stopped.

A function runs in one process at a time, found there by its module and name. Cancelling the caller kills the process,
and with it everything the function started in its process group; another is started when there is work for it. The
worker decides which tasks run here, and what an outcome means for the execution.

In the parent each process has one thread, which starts it, talks to it and reaps it, so that it never blocks an event
loop and needs none. The thread outlives its processes: on Linux a child asks to be killed when the thread that started
it ends, and a thread ends no later than the parent.

A child is a new interpreter, never a fork: it has no connection, thread or lock of the parent. It ignores SIGINT and
SIGTERM, because a terminal or a service manager sends them to every process while the parent decides how to stop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import signal
import threading
from collections import deque
from typing import Any, Final

from msgspec import Struct

from flowfabric.errors import InvalidInput, Unavailable
from flowfabric.worker.runners.process_pool.channel import dumps, loads
from flowfabric.worker.runners.process_pool.child import Child
from flowfabric.worker.runners.process_pool.errors import ChildDied, ChildFailure, PoolClosed, raised
from flowfabric.worker.runners.process_pool.main_module import MAIN_IN_CHILD, is_loading_main, main_setup

# Seconds that `close` waits for a killed process.
_REAP_SECONDS: Final = 5.0


class ProcessPool:
    """At most `size` processes, started when they are first needed and kept for the next function.

    `run` and `close` are called on an event loop; `kill` from any thread.
    """

    def __init__(self, size: int) -> None:
        if os.name != "posix":
            raise Unavailable("process pool", "it needs process groups, which this platform does not have")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(f"got {size!a}", field="size", allowed="1 or more")
        self.size = size
        self._lock = threading.Lock()  # guards the fields below, the jobs, and the process of each slot
        self._slots: list[_Slot] = []
        self._idle: list[_Slot] = []
        self._waiting: deque[_Job] = deque()
        self._is_closed = False

    async def run(self, module: str, qualname: str, kwargs: dict[str, Any]) -> Any:
        """Run a function in a free process and return its result; wait for a process if all are busy.

        Cancelling this call kills the process immediately. An exception of the function is raised here, in its own
        class if it pickles (else `RemoteError`), with the traceback of the process as its cause. Raises `ChildDied` if
        the process ends first, `PoolClosed` if the pool is closed first.
        """
        if is_loading_main():
            raise RuntimeError("a script that starts work must do so under `if __name__ == '__main__':`")
        if "<" in qualname:
            raise InvalidInput(
                f"{qualname!a} cannot be found by its name in another process",
                field="function",
                allowed="a function or static method of a module",
            )
        if module in ("__main__", MAIN_IN_CHILD) and main_setup() is None:
            raise InvalidInput(
                f"{qualname!a} is not defined in a file, so another process cannot load it",
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

    async def close(self) -> None:
        """Refuse new work, kill every process and wait until all have ended."""
        self.kill()
        ended = [asyncio.wrap_future(slot.ended) for slot in self._slots]
        if ended:
            await asyncio.wait(ended, timeout=_REAP_SECONDS)

    def kill(self) -> None:
        """Kill every process and refuse all work from now on. Does not wait; any thread may call it."""
        with self._lock:
            is_first = not self._is_closed
            self._is_closed = True
            refused = list(self._waiting)
            self._waiting.clear()
            for slot in self._slots:
                if is_first:
                    slot.inbox.put(None)
                if slot.child is not None:
                    slot.child.kill()
        for job in refused:
            job.resolve(_closed(job, "did not start"))

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._is_closed:
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
        """Give the caller the outcome, from any thread. A caller whose loop is closed no longer waits."""
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


def _closed(job: _Job, what: str) -> PoolClosed:
    return PoolClosed(f"the process pool is closed: {job.name} {what}")


class _Slot:
    """One thread of the parent, and its process, if that is alive."""

    def __init__(self, pool: ProcessPool, number: int) -> None:
        self.pool = pool
        self.inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.job: _Job | None = None
        self.child: Child | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon: a parent that exits without closing must not wait for a function.
        threading.Thread(target=self._main, name=f"flowfabric-process-{number}", daemon=True).start()

    def _main(self) -> None:
        self.ended.set_running_or_notify_cancel()  # callers that wait for it cannot cancel it
        try:
            while (job := self.inbox.get()) is not None:
                following: _Job | None = job
                while following is not None:
                    following = self._finish(following, self._do(following))
            if self.child is not None:
                self._bury(self.child)
        finally:
            self.ended.set_result(None)

    def _finish(self, job: _Job, outcome: _Returned | BaseException) -> _Job | None:
        """Take the next job or become free; then return the outcome, so that the caller finds the process free."""
        pool = self.pool
        with pool._lock:
            following = self.job = pool._waiting.popleft() if pool._waiting else None
            if following is None:
                # The next function goes to the most recently used slot that has a process.
                pool._idle.insert(len(pool._idle) if self.child is not None else 0, self)
        job.resolve(outcome)
        return following

    def _do(self, job: _Job) -> _Returned | BaseException:
        """Run one job and return its outcome. The slot can always run another job afterwards."""
        try:
            request = dumps((job.module, job.qualname, job.kwargs))
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
                return _closed(job, "was killed") if self.pool._is_closed else _died(job, exit_code)
            with self.pool._lock:
                self.job = None  # from here on a cancellation no longer reaches the process
            answer = loads(reply)
            if not isinstance(answer, ChildFailure):
                return _Returned(answer[0])
            return raised(answer)
        except Exception as error:  # no process could be started, or the result does not unpickle here
            return error

    def _living_child(self, job: _Job) -> Child | None:
        """Return the slot's process, started if there is none; None if it is no longer needed."""
        child = self.child
        if child is not None and not child.is_alive:
            self._bury(child)
            child = None
        with self.pool._lock:
            if job.is_cancelled or self.pool._is_closed:
                return None
        if child is None:
            child = Child()
            with self.pool._lock:
                self.child = child
                if job.is_cancelled or self.pool._is_closed:
                    child.kill()
        return child

    def _bury(self, child: Child) -> int:
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
