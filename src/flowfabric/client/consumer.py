"""A durable consumer of the event log: it acts on each event once, in its own database, whatever dies in between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowfabric._secrets import redact
from flowfabric._waiting import first_of
from flowfabric.client.client import AsyncClient
from flowfabric.engine import Engine
from flowfabric.engine.checks import check_int
from flowfabric.engine.consumers import Consumed
from flowfabric.engine.events import choice_of
from flowfabric.engine.subscriptions import Start, start_of
from flowfabric.errors import FlowFabricError, InvalidInput, StreamDisconnected, TransportError
from flowfabric.values.event import (
    Event,
    EventCursor,
    Family,
    completion_event,
    lease_event,
    operator_event,
    registry_event,
    signal_event,
)
from flowfabric.values.page import ScannerFilter

if TYPE_CHECKING:
    from flowfabric.client.connector import Connector

log = logging.getLogger("flowfabric.consumers")
Handler = Callable[[Any, Sequence[Any]], Awaitable[None]]
_TYPES: dict[str, Callable[[Event], Any]] = {
    "completion": completion_event,
    "lease": lease_event,
    "signal": signal_event,
    "operator": operator_event,
    "worker": registry_event,
}
_POLL = 5.0  # seconds between two tries of a process that waits for its turn, and to stay the one that works
_BUSY = 1.0  # seconds until the next try while another process's function runs
_FIRST_PAUSE = 0.2
_LAST_PAUSE = 60.0


class Consumer:
    """Hands events to a function, with its cursor in the database: `ff.Consumer("invoices", family="completion")`.

    The function gets a connection and a list of events. Everything that it does with this connection, and the move of
    the cursor, is one transaction: effects in the same database happen once for each event. Effects elsewhere happen at
    least once.

    Several processes may run one consumer; one of them works at a time, and another takes over when it ends. A function
    that raises is called again with the same events, after a pause, and then with one event at a time.

    `start` is where a new consumer begins: None: now, `EventCursor()`: at the oldest event that is kept. `filter` is an
    `EventFilter`. A consumer that exists and takes other events is refused, unless `redefine`.
    """

    def __init__(
        self,
        name: str,
        *,
        family: Family | None = None,
        families: Sequence[Family] | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
        start: Start = None,
        batch: int = 100,
        heartbeats: bool = False,
        redefine: bool = False,
    ) -> None:
        if family is not None and families is not None:
            raise InvalidInput("both were given", field="family", allowed="family, or families")
        self.name = name
        self._families = (family,) if family is not None else families
        self._filter = filter
        self._start = start_of(start)
        self._batch = check_int(batch, "batch", 1, 10_000)
        self._heartbeats = heartbeats
        self._redefine = redefine
        self._make = _TYPES.get(family) if isinstance(family, str) else None

    def __repr__(self) -> str:
        return f"Consumer({self.name!r})"

    async def run(
        self, source: Engine | AsyncClient | Connector, handle: Handler, *, stop: asyncio.Event | None = None
    ) -> None:
        """Act on events until `stop` is set or the task is cancelled.

        `CursorRefused` if events after its cursor are missing: an operator decides where it continues
        (`flowfabric consumers set`). `StreamDisconnected` when the engine shuts down.
        """
        engine = await _engine_of(source)
        cursor = await self.register(engine)
        stopping = asyncio.Event() if stop is None else stop
        size, pause = self._batch, _FIRST_PAUSE
        raised: Exception | None = None

        async def act(connection: Any, events: Sequence[Any]) -> None:
            nonlocal raised
            try:
                await handle(connection, events)
            except Exception as error:
                raised = error
                raise

        try:
            while not stopping.is_set():
                if engine.followers.is_closing:
                    raise StreamDisconnected("the engine shuts down", cursor=cursor)
                raised = None
                try:
                    done = await self._consume(engine, act, size)
                    if done.handled or size == self._batch:
                        # Past the event that failed, the batches are whole again.
                        size, pause = self._batch, _FIRST_PAUSE
                    cursor = done.cursor
                    await self._wait(engine, done, stopping)
                except TransportError as error:
                    if error is raised:
                        size, pause = await self._failed(engine, error, pause, stopping)
                        continue
                    log.warning("consumer %s: %s", self.name, error)
                    await first_of(pause, stopping)
                    pause = min(pause * 2, _POLL)
                except Exception as error:
                    # An error of ours that the function did not raise is about the consumer: again does not help.
                    if isinstance(error, FlowFabricError) and error is not raised:
                        raise
                    size, pause = await self._failed(engine, error, pause, stopping)
        finally:
            with contextlib.suppress(FlowFabricError):
                await asyncio.shield(engine.leave_consumer(self.name))

    async def run_once(self, source: Engine | AsyncClient | Connector, handle: Handler) -> int:
        """Act on the events that there are now; returns how many. None of them if another process works."""
        engine = await _engine_of(source)
        await self.register(engine)
        handled = 0
        try:
            while True:
                done = await self._consume(engine, handle, self._batch)
                handled += done.handled
                if done.at_end:
                    return handled
        finally:
            with contextlib.suppress(FlowFabricError):
                await asyncio.shield(engine.leave_consumer(self.name))

    async def _consume(self, engine: Engine, handle: Handler, size: int) -> Consumed:
        takes = choice_of(self._families, self._filter, heartbeats=self._heartbeats)
        return await engine.consume(self.name, handle, make=self._make, limit=size, takes=takes)

    async def register(self, source: Engine | AsyncClient | Connector) -> EventCursor:
        """Create it if it does not exist: it gets the events from now on, or from `start`. Returns its cursor."""
        engine = await _engine_of(source)
        return await engine.register_consumer(
            self.name,
            families=self._families,
            filter=self._filter,
            start=self._start,
            heartbeats=self._heartbeats,
            redefine=self._redefine,
        )

    async def _failed(
        self, engine: Engine, error: Exception, pause: float, stopping: asyncio.Event
    ) -> tuple[int, float]:
        log.warning("consumer %s: its function failed, again in %.1f s", self.name, pause, exc_info=error)
        with contextlib.suppress(FlowFabricError):
            await engine.fail_consumer(self.name, redact(f"{type(error).__name__}: {error}"))
        await first_of(pause, stopping)
        return 1, min(pause * 2, _LAST_PAUSE)

    async def _wait(self, engine: Engine, done: Consumed, stopping: asyncio.Event) -> None:
        """Wait until there may be something to do."""
        if done.code == "busy":
            await first_of(_BUSY, stopping)
        elif done.code == "held":
            await first_of(min(max(done.left.total_seconds(), 0.05), _POLL), stopping)
        elif done.at_end:
            # No connection is held meanwhile. The shared reader of the engine says when there are events.
            events = await engine.follow(
                self._families, after=done.cursor, filter=self._filter, heartbeats=self._heartbeats
            )
            async with events:
                waits = {asyncio.ensure_future(anext(events)), asyncio.ensure_future(stopping.wait())}
                try:
                    await asyncio.wait(waits, timeout=_POLL, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in waits:
                        one.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)


async def _engine_of(source: Engine | AsyncClient | Connector) -> Engine:
    if isinstance(source, Engine):
        return source
    if isinstance(source, AsyncClient):
        return source.engine
    return (await source.client()).engine
