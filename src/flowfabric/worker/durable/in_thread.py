"""Durable operations of a synchronous handler: the same coroutines, called from its thread.

`in_thread` runs a coroutine on the worker's loop while the handler's thread waits. Two things differ from an async
handler: the function of a step runs in the handler's own thread, and where the coroutine would wait without a worker,
`Interrupted` unwinds the handler (`Parking.wait` raises it).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from flowfabric.client import current
from flowfabric.errors import ExecutionNotActive, Interrupted, LeaseLost
from flowfabric.worker.runners.threads import settle

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running
    from flowfabric.worker.runners.threads import Threads

T = TypeVar("T")


class CallingThread:
    """The thread that waits for a coroutine, and runs functions for it meanwhile."""

    __slots__ = ("_calls", "handles_an_error", "raised")

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.handles_an_error = sys.exception() is not None
        self.raised: tuple[Exception, TracebackType | None] | None = None  # exception of the last function

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the thread. For the coroutine."""
        call = _Call(fn, args)
        self._calls.put(call)
        return await call.future

    def serve(self) -> None:
        """Run functions until the coroutine has ended."""
        while (call := self._calls.get()) is not None:
            try:
                value = call.fn(*call.args)
            except Exception as error:
                self.raised = error, error.__traceback__
                call.answer(None, error)
            else:
                call.answer(value, None)

    def end(self, _: concurrent.futures.Future[Any]) -> None:
        """The coroutine has ended."""
        self._calls.put(None)


class _Call:
    __slots__ = ("_loop", "args", "fn", "future")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def answer(self, value: Any, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(settle, self.future, value, error)


# Set in coroutines that a synchronous handler waits for.
# Where the functions of a synchronous handler's steps run: its own thread, or those of a `ctx.map`.
calling_thread: ContextVar[CallingThread | Threads | None] = ContextVar("flowfabric_calling_thread", default=None)


def in_thread(running: Running, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the worker's loop and wait for it in this thread, which is the handler's."""
    if running.is_cancelled or running.unwound_at is not None:
        work.close()
        time.sleep(running.refused())
        raise Interrupted(running.stop_reason)
    thread = CallingThread()
    running.tasks.has_threads |= not running.is_in_own_thread
    running.in_threads += 1
    context = copy_context()  # which the coroutine's task copies
    context.run(calling_thread.set, thread)
    context.run(current.enter, running)  # this may be a thread that the handler has started
    future = context.run(asyncio.run_coroutine_threadsafe, work, running.worker.loop)
    future.add_done_callback(thread.end)
    try:
        thread.serve()
        return future.result()
    except (asyncio.CancelledError, concurrent.futures.CancelledError, LeaseLost, ExecutionNotActive):
        if running.is_cancelled:
            raise Interrupted(running.stop_reason) from None
        raise
    except Exception as error:
        if thread.raised is not None and thread.raised[0] is error:
            error.__traceback__ = thread.raised[1]  # as the function raised it, without the frames of the loop
        raise
    except BaseException:
        future.cancel()  # the handler unwinds, so nothing awaits the coroutine
        raise
    finally:
        running.in_threads -= 1
        thread.raised = None
