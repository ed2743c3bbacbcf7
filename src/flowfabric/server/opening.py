"""Stored payloads are opened beside the event loop: a long one, or a slow codec, keeps no other client waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

# Of all payloads that one answer shows: up to this many bytes, opening takes less time than handing it to a thread.
SMALL: Final = 4096
THREADS: Final = 2  # answers opened at the same time: what is opened is in memory
_Result = TypeVar("_Result")


class Opening:
    """Threads that call the codecs, and read what these return."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="flowfabric opening")

    async def run(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns, which opens `size` bytes as they are stored."""
        if size <= SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Open nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
