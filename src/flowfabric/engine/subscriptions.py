"""Subscriptions: follow the event log from any cursor on, restricted to families and by a filter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.events import Choice, check_cursor, choice_of
from flowfabric.engine.followers import Followers, Subscription
from flowfabric.errors import InvalidInput, NotAllowed
from flowfabric.values.event import (
    CompletionEvent,
    Event,
    EventCursor,
    Family,
    LeaseEvent,
    OperatorEvent,
    RegistryEvent,
    SignalEvent,
    completion_event,
    lease_event,
    operator_event,
    registry_event,
    signal_event,
)
from flowfabric.values.page import ScannerFilter

if TYPE_CHECKING:
    from flowfabric.engine import Engine

Start = EventCursor | bytes | str | None
_T = TypeVar("_T")


class Subscriptions(Operations):
    """follow, subscribe_completion, subscribe_lease_history, subscribe_signal_delivery and so on."""

    @property
    def followers(self) -> Followers:
        """The loop that reads the end of the log for all subscriptions of this engine."""
        if self._followers is None:
            self._followers = Followers(cast("Engine", self))
        found: Followers = self._followers
        return found

    async def follow(
        self,
        families: Sequence[Family] | None = None,
        *,
        after: Start = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
        heartbeats: bool = False,
        checkpoints: bool = False,
    ) -> Subscription[Event]:
        """Follow the events of several families, or of all, in the order of the log.

        `after` is a cursor as `EventCursor`, bytes or text; None: the events committed after this call returns,
        and `EventCursor()` from the oldest event that is kept. An empty cursor is refused. Every event has its own
        `cursor`: store it after acting on the event, and subscribe with it again. `filter` is an `EventFilter`.
        `heartbeats` includes those of workers. With `checkpoints` a `Checkpoint` is yielded every 30 seconds, or after
        10,000 events that did not match.
        Raises `CursorRefused` if events after the cursor are missing.
        """
        return await self._follow(choice_of(families, filter, heartbeats=heartbeats), after, _same, checkpoints)

    async def subscribe_completion(
        self,
        *,
        after: Start = None,
        filter: ScannerFilter | None = None,  # noqa: A002
        checkpoints: bool = False,
    ) -> Subscription[CompletionEvent]:
        """Follow the ends of executions: one event for each. See `follow`."""
        return await self._follow(choice_of(("completion",), filter), after, completion_event, checkpoints)

    async def subscribe_lease_history(
        self,
        *,
        after: Start = None,
        filter: ScannerFilter | None = None,  # noqa: A002
        checkpoints: bool = False,
    ) -> Subscription[LeaseEvent]:
        """Follow who holds which execution. Renewals are stored only if the deployment asks for them. See `follow`."""
        return await self._follow(choice_of(("lease",), filter), after, lease_event, checkpoints)

    async def subscribe_signal_delivery(
        self,
        *,
        after: Start = None,
        filter: ScannerFilter | None = None,  # noqa: A002
        checkpoints: bool = False,
    ) -> Subscription[SignalEvent]:
        """Follow what signals did: one event for each accepted or repeated signal. See `follow`."""
        return await self._follow(choice_of(("signal",), filter), after, signal_event, checkpoints)

    async def subscribe_operator_events(
        self,
        *,
        after: Start = None,
        filter: ScannerFilter | None = None,  # noqa: A002
        checkpoints: bool = False,
    ) -> Subscription[OperatorEvent]:
        """Follow what operators change: priorities, replays, cancelled flows, resumed waits. See `follow`."""
        return await self._follow(choice_of(("operator",), filter), after, operator_event, checkpoints)

    async def subscribe_worker_events(
        self,
        *,
        after: Start = None,
        filter: ScannerFilter | None = None,  # noqa: A002
        heartbeats: bool = False,
        checkpoints: bool = False,
    ) -> Subscription[RegistryEvent]:
        """Follow workers that come and go; heartbeats if the deployment stores them, and you ask. See `follow`."""
        chosen = choice_of(("worker",), filter, heartbeats=heartbeats)
        return await self._follow(chosen, after, registry_event, checkpoints)

    async def _follow(
        self, chosen: Choice, after: Start, make: Callable[[Event], _T], checkpoints: bool
    ) -> Subscription[_T]:
        if checkpoints not in (True, False):
            raise InvalidInput(f"got {checkpoints!r}", field="checkpoints", allowed="True or False")
        start = start_of(after)
        if start is not None:
            found = Subscription(self.followers, chosen, start, make, checkpoints=checkpoints)
            await found.first_page()
            return found
        end = await cast("Engine", self).count_events()
        found = Subscription(self.followers, chosen, end.cursor, make, checkpoints=checkpoints)
        self.followers.attach(found)
        return found

    async def sleep_for_events(self, seconds: float | None, before: datetime | None) -> datetime | None:
        """Announce that this process waits for events; None: it is awake. For the loop behind subscriptions.

        Returns until when, or None if it may not announce itself.
        """
        ms = None if seconds is None else round(seconds * 1000)
        try:
            row = await self._row(statements.SLEEP_FOR_EVENTS, self._instance, ms, before)
        except NotAllowed:
            return None
        found: datetime | None = row["until"]
        return found

    @contextlib.contextmanager
    def event_wakeups(self) -> Iterator[asyncio.Event | None]:
        """Return an event that is set when there are events for this process; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic("events") as told:
            yield told


def start_of(after: Start) -> EventCursor | None:
    """Read a cursor in any of its forms; None: from now on."""
    if after is None:
        return None
    if isinstance(after, bytes | bytearray | memoryview):
        return EventCursor.decode(bytes(after))
    if isinstance(after, str):
        return EventCursor.parse(after)
    if not isinstance(after, EventCursor):
        raise InvalidInput(
            f"got {type(after).__name__}", field="after", allowed="an EventCursor, its bytes or its text"
        )
    check_cursor(after)
    return after


def _same(event: Any) -> Any:
    return event
