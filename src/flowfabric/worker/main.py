"""A worker as the whole of a process: signals, and an end that nothing can hold up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AFTER_GRACE = 40.0  # seconds for giving back, reporting and closing, where each has its own limit
_AFTER_CLOSE = 2.0  # seconds for threads and tasks of handlers that do not listen


def run(worker: Worker) -> None:
    """Run until SIGTERM or SIGINT; a second signal ends the process at once, with exit code 128 + its number."""
    process = SignalledWorker(worker)
    # Not the loop's own signal handlers: these run also while a handler holds up the loop.
    before = {number: signal.signal(number, process.on_signal) for number in _SIGNALS}
    try:
        try:
            import uvloop  # noqa: PLC0415 - faster where it is installed
        except ImportError:
            asyncio.run(process.work())
        else:
            uvloop.run(process.work())
    finally:
        process.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalledWorker:
    """A worker that stops when the process gets a signal, and a process that ends when the worker does not stop."""

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
        """End the process when it has not ended by itself until then."""

        def leave() -> None:
            log.warning("the process did not exit in time; forcing exit")
            _flush()
            os._exit(code)

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def cancel(self) -> None:
        """It has ended by itself."""
        for timer in self._timers:
            timer.cancel()


def _exit_now(worker: Worker, code: int) -> None:
    def last_words() -> None:
        worker.handlers.kill_processes()
        log.warning("worker %s ends at once; its leases will lapse", worker.instance_id)
        _flush()

    # In a thread: whoever was interrupted by the signal may hold a lock that is needed.
    thread = threading.Thread(target=last_words, daemon=True)
    thread.start()
    thread.join(0.5)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
