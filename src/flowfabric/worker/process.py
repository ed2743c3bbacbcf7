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
    try:
        import uvloop  # noqa: PLC0415 - faster where it is installed
    except ImportError:
        asyncio.run(_main(worker))
    else:
        uvloop.run(_main(worker))


async def _main(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def signalled(number: int, _frame: Any) -> None:
        received.append(number)
        if len(received) == 1:
            worker.must_end()
            loop.call_soon_threadsafe(worker.stop)
            _exit_later(worker.grace + _AFTER_GRACE, 128 + number)
        else:
            _exit_now(worker, 128 + number)

    # Not the loop's own signal handlers: these run also while a handler holds up the loop.
    for number in _SIGNALS:
        signal.signal(number, signalled)
    try:
        await worker.run()
    finally:
        if received:
            _exit_later(_AFTER_CLOSE, 0)


def _exit_later(seconds: float, code: int) -> None:
    """End the process when it has not ended by itself until then."""

    def leave() -> None:
        log.warning("the process does not end by itself: it is ended")
        _flush()
        os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _exit_now(worker: Worker, code: int) -> None:
    def last_words() -> None:
        worker.kill_processes()
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
