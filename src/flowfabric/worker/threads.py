"""Threads for plain functions: made when needed, kept for reuse, never in the way of the process's end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_IDLE = 30.0  # seconds


class Threads:
    """Runs functions in daemon threads, at most `limit` at a time. The standard pool would wait for them at exit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mutex = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition(self._mutex)
        self._idle = 0
        self._count = 0

    async def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in a thread. Cancelling the wait does not stop the function."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def answer(value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            elif isinstance(error, StopIteration):  # a future cannot carry it
                future.set_exception(RuntimeError("the function raised StopIteration"))
            else:
                future.set_exception(error)

        def work() -> None:
            value, error = None, None
            try:
                value = context.run(fn, *args, **kwargs)
            except BaseException as raised:  # all of it belongs to whoever waits
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
                loop.call_soon_threadsafe(answer, value, error)

        with self._mutex:
            self._work.append(work)
            if self._idle >= len(self._work):
                self._ready.notify()
            elif self._count < self._limit:
                self._count += 1
                threading.Thread(target=self._serve, name="flowfabric handler", daemon=True).start()
        return await future

    def _serve(self) -> None:
        while True:
            with self._mutex:
                self._idle += 1
                try:
                    if not self._work:
                        self._ready.wait(_IDLE)
                    if not self._work:
                        self._count -= 1
                        return
                    work = self._work.popleft()
                finally:
                    self._idle -= 1
            with contextlib.suppress(BaseException):  # an interruption that came a moment too late
                work()
