"""One listening connection per process, shared by everybody who waits for a wake-up.

Notifications are hints: a waiter also polls, so a lost connection costs time and nothing else. It is opened when the
first waiter comes and reopened, with growing pauses, when it breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import asyncpg

CHANNEL = "flowfabric"


class Listener:
    """Turns notifications of the channel into events of the loop, by topic."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @contextlib.contextmanager
    def topic(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the topic is notified; the waiter clears it."""
        event = asyncio.Event()
        self._waiters.setdefault(name, set()).add(event)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="flowfabric listener")
        try:
            yield event
        finally:
            self._waiters[name].discard(event)

    async def listening(self, timeout: float) -> None:
        """Wait until notifications arrive, but no longer than `timeout`."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._ready.wait(), timeout)

    def wake(self, topic: str | None = None) -> None:
        """Wake the waiters of a topic in this process, or all."""
        for name, events in self._waiters.items():
            if topic is None or name == topic:
                for event in events:
                    event.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        pause = 0.2
        while True:
            connection: asyncpg.Connection[Any] | None = None
            closed = asyncio.Event()
            try:
                connection = await asyncpg.connect(
                    self._dsn, timeout=10, server_settings={"application_name": "flowfabric"}
                )
                connection.add_termination_listener(lambda _, done=closed: done.set())
                await connection.add_listener(CHANNEL, self._notified)
                self._ready.set()
                self.wake()  # whatever was announced while nobody listened
                pause = 0.2
                await closed.wait()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
                pass
            finally:
                self._ready.clear()
                if connection is not None:
                    connection.terminate()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _notified(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self.wake(str(payload))
