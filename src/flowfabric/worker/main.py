"""A worker that owns its process: signals, and an exit that nothing can block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AFTER_GRACE = 40.0  # seconds for giving back, reporting and closing, each with its own limit
_AFTER_CLOSE = 2.0  # seconds for threads and tasks of handlers that ignore the stop


def run(worker: Worker) -> None:
    """Run until SIGTERM or SIGINT; a second signal exits immediately, with exit code 128 + its number."""
    process = SignalledWorker(worker)
    # Not the loop's own signal handlers: these also run while a handler blocks the loop.
    before = {number: signal.signal(number, process.on_signal) for number in _SIGNALS}
    runs: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    # Outside of the block that runs the worker: a failure of a handler must not seem to follow from this one.
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - faster if installed

        runs = uvloop.run
    try:
        runs(process.work())
    finally:
        process.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalledWorker:
    """Stops the worker on a signal, and forces the process to exit if the worker does not stop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._received: int | None = None
        self._timers: list[threading.Timer] = []

    async def work(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._received is not None:
            self._loop.call_soon(self._worker.stop)
        await self._worker.run()
        if self._received is not None:
            self._exit_after(_AFTER_CLOSE, 0)

    def on_signal(self, number: int, _frame: Any) -> None:
        if self._received is not None:
            _exit_now(self._worker, 128 + number)
        self._received = number
        self._worker.handlers.must_end()
        self._exit_after(self._worker.grace + _AFTER_GRACE, 128 + number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._worker.stop)

    def _exit_after(self, seconds: float, code: int) -> None:
        """Force the process to exit if it has not exited by then."""

        def leave() -> None:
            log.warning("the process did not exit in time; forcing exit")
            _flush()
            os._exit(code)

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def cancel(self) -> None:
        """The process exits normally."""
        for timer in self._timers:
            timer.cancel()


def _exit_now(worker: Worker, code: int) -> None:
    def last_words() -> None:
        worker.handlers.kill_processes()
        log.warning("worker %s exits immediately; its leases will expire", worker.instance_id)
        _flush()

    # In a thread: the code that the signal interrupted may hold a lock that is needed.
    thread = threading.Thread(target=last_words, daemon=True)
    thread.start()
    thread.join(0.5)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
