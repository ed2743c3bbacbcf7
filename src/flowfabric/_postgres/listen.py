"""One listening connection per engine, shared by all waiters.

Notifications are hints: a waiter also polls, so a lost connection only costs time. The connection is opened for the
first waiter, reopened, with growing pauses, when it breaks, and closed a minute after the last waiter has left. It
listens to the channel of its own instance, on which no other process is woken, and to that of all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import asyncpg

from flowfabric._postgres.dsn import check_dsn, describe, next_host_first
from flowfabric._postgres.outage import outage_of
from flowfabric._waiting import first_of
from flowfabric.values.ids import mint_uuid

CHANNEL = "flowfabric"
_FRAMES = "frames"
_LINGER = 60.0  # seconds that the connection stays open without a waiter
_ASK_AFTER = 10.0  # seconds of silence before the connection is checked


class Listener:
    """Turns notifications of the channel into events, by topic."""

    def __init__(self, dsn: str) -> None:
        check_dsn(dsn)
        self._dsn = dsn
        self._outage = outage_of(dsn, describe(dsn))
        self.instance = mint_uuid()
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.connections = 0  # how many were opened so far
        self._streams: set[UUID] | None = set()

    @contextlib.contextmanager
    def topic(self, name: str) -> Iterator[asyncio.Event]:
        """Return an event that is set whenever the topic is notified; the waiter clears it."""
        waiter = asyncio.Event()
        self._waiters.setdefault(name, set()).add(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="flowfabric listener")
        try:
            yield waiter
        finally:
            self._waiters[name].discard(waiter)

    async def listening(self, timeout: float) -> None:
        """Wait until notifications arrive, but no longer than `timeout`."""
        await first_of(timeout, self._ready)

    def take_streams(self) -> set[UUID] | None:
        """Return which executions were told to have new frames since the last call; None: any may have."""
        told, self._streams = self._streams, set()
        return told

    def wake(self, topic: str | None = None) -> None:
        """Wake the waiters of a topic, or all."""
        if topic is None:
            self._streams = None
        for name, waiters in self._waiters.items():
            if topic is None or name == topic:
                for waiter in waiters:
                    waiter.set()

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
                try:
                    connection = await asyncpg.connect(
                        self._dsn, timeout=_ASK_AFTER, server_settings={"application_name": "flowfabric"}
                    )
                except Exception as error:
                    if isinstance(error, TimeoutError):
                        self._dsn = next_host_first(self._dsn)
                    if not isinstance(error, asyncpg.TooManyConnectionsError):
                        self._outage.lost(error)
                    raise
                self._outage.found()
                connection.add_termination_listener(lambda _, done=closed: done.set())
                await connection.add_listener(f"{CHANNEL}_{self.instance}", self._notified)
                await connection.add_listener(CHANNEL, self._notified)
                self._ready.set()
                self.connections += 1
                self.wake()  # notifications may have been missed without a connection
                pause = 0.2
                idle_since = None
                while not closed.is_set():
                    try:
                        await asyncio.wait_for(closed.wait(), _ASK_AFTER)
                    except TimeoutError:  # a hanging connection is silent too
                        now = asyncio.get_running_loop().time()
                        idle_since = None if any(self._waiters.values()) else idle_since or now
                        if idle_since is not None and now - idle_since >= _LINGER:
                            return
                        await connection.execute("select 1", timeout=_ASK_AFTER)
            except Exception:  # noqa: S110 - any error of a broken connection: open another one
                pass
            finally:
                self._ready.clear()
                if connection is not None:
                    connection.terminate()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _notified(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        topic = str(payload)
        if topic.startswith(_FRAMES):
            # The executions; none if they are too many to name.
            named = topic.split()[1:]
            self._streams = None if self._streams is None or not named else self._streams | set(map(UUID, named))
            topic = _FRAMES
        self.wake(topic)
