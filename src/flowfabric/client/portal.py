"""An event loop in a background thread, for programs that have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar, cast

from flowfabric.errors import InvalidInput, TransportError

T = TypeVar("T")


class Portal:
    """Runs coroutines on its own loop while the calling thread waits. Any number of threads may call."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="flowfabric client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # On exit the runner cancels the remaining tasks and closes what the loop holds, including the app's client.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stopped.wait())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine; returns its result or raises its exception. An interrupt cancels it."""
        call = _Call(work)
        try:
            self._check_thread()
            with self._mutex:
                if self._is_closed:
                    raise _closed()
                self._loop.call_soon_threadsafe(call.begin)
            return call.ended.result()
        except CancelledError:
            if self._is_closed:
                raise _closed() from None
            raise
        except BaseException:
            if not call.ended.done():
                self._give_up(call)
            raise

    def _give_up(self, call: _Call[T]) -> None:
        try:
            self._loop.call_soon_threadsafe(call.give_up)
        except RuntimeError:  # the loop is closed, so that nothing runs there any more
            call.give_up()

    def _check_thread(self) -> None:
        if self._pid != os.getpid():
            raise InvalidInput(
                "was opened in another process, before a fork", field="client", allowed="a client of this process"
            )
        if threading.current_thread() is self._thread:
            raise InvalidInput(
                "is used inside one of its own calls, which would wait for itself",
                field="client",
                allowed="another client, or the same one afterwards",
            )

    def iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield the items of an async generator."""

        async def following() -> list[T]:
            async for item in items:
                return [item]
            return []

        try:
            while found := self.call(following()):
                yield found[0]
        finally:
            if not self._is_closed:
                self.call(cast("AsyncGenerator[T, None]", items).aclose())

    def close(self) -> None:
        """Cancel running calls, then stop the loop. Closing again changes nothing."""
        self._check_thread()
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)


class _Call(Generic[T]):
    """A coroutine on its way to the loop.

    An interrupt reaches the caller at any moment, also while it hands the coroutine over. Only the loop knows whether
    it began: it runs `begin` and `give_up` in the order in which they came.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._tell)

    def give_up(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()

    def _tell(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.cancel()
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


def _closed() -> TransportError:
    return TransportError("transport", "the client is closed")
