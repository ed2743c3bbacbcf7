"""Following the event log: one loop per engine reads the end of the log for all subscriptions together.

A subscription that is behind reads for itself, page by page; once it has reached the end of the log it joins the loop,
and then holds no connection and no task. One that does not keep up leaves the loop again when its queue is full, and
delays only itself.

While there are events the loop polls. When there were none for a while it announces that it sleeps, reads once more,
and waits for a notification, or for the next poll: notifications may get lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import Context
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from weakref import WeakSet

from flowfabric._waiting import first_of
from flowfabric.engine.events import Choice, LogPage, bits_of
from flowfabric.errors import CursorRefused, FlowFabricError, StreamDisconnected, TransportError
from flowfabric.values.event import Checkpoint, Event, EventCursor

if TYPE_CHECKING:
    from flowfabric.engine import Engine

log = logging.getLogger("flowfabric.events")
QUEUE = 1024  # events that wait for the program that follows
PAGE = 1000  # events that a subscription reads for itself; with 256, reading the stored log takes a quarter longer
_SHARED_PAGE = 1024  # that the loop reads for all
_CHOICES = 8  # filters that one read evaluates; beyond that it reads every event of their families
_AWAKE = 0.03  # seconds between two polls while there are events
_LINGER = 0.2  # seconds without events until the loop sleeps
_POLL = 5.0
_BUSY_POLL = 1.0
_ANNOUNCED_FOR = 60.0
_FIRST_PAUSE = 0.2
_LAST_PAUSE = 5.0
_GIVE_UP = 30.0
_ANSWER = 15.0  # seconds for a read; a connection that hangs is given up
_LEAVE = 0.5  # seconds for a read whose subscriptions are gone
CHECKPOINT_SECONDS = 30.0
CHECKPOINT_EVENTS = 10_000
T_co = TypeVar("T_co", covariant=True)


class Subscription(Generic[T_co]):
    """Events from a cursor on, in the order of the log, without an end: iterate with `async for`.

    `cursor` is where to continue: everything that matches up to it has been yielded. `StreamDisconnected` has the same
    cursor: the database cannot be reached for 30 seconds, or the engine was closed. Close with `aclose`, or use it with
    `async with`.
    """

    def __init__(
        self,
        followers: Followers,
        choice: Choice,
        after: EventCursor,
        make: Callable[[Event], T_co],
        *,
        checkpoints: bool = False,
    ) -> None:
        self.choice = choice
        self._followers = followers
        self._make = make
        self._checkpoints = checkpoints
        self._buffer: deque[Event] = deque()
        self._read = after  # everything that matches up to here was yielded, or is in the buffer
        self._yielded = after
        self._told = after.position, time.monotonic()  # the last item: where, and when
        self._news = asyncio.Event()
        self._why: str | None = None  # it was disconnected
        self._is_closed = False
        self._is_woken = False
        self.is_attached = False
        self.reading: asyncio.Timeout | None = None  # the read that runs for it
        followers.open.add(self)

    @property
    def cursor(self) -> EventCursor:
        """Everything that matches up to here has been yielded: subscribe with it to continue."""
        return self._yielded if self._buffer else self._read

    @property
    def position(self) -> EventCursor:
        """How far it has read."""
        return self._read

    @property
    def waiting(self) -> int:
        """How many events were read and not yet yielded."""
        return len(self._buffer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co | Checkpoint:
        while True:
            if self._buffer:
                event = self._buffer.popleft()
                self._yielded = event.cursor
                if self._checkpoints:
                    self._told = event.cursor.position, time.monotonic()
                return self._make(event)
            if self._is_closed:
                raise StopAsyncIteration
            if self._why is not None:
                self._end()
                raise StreamDisconnected(self._why, cursor=self.cursor)
            left = self._until_checkpoint()
            if left is not None and left <= 0:
                self._told = self._read.position, time.monotonic()
                return Checkpoint(self._read)
            if self.is_attached:
                self._news.clear()
                # Without a time limit no timer is needed, and no task.
                if left is None:
                    await self._news.wait()
                else:
                    await first_of(left, self._news)
            else:
                await self._fill()

    async def batch(self) -> list[T_co]:
        """Return the events that are there, or wait for the next ones; none after `wake`.

        Meanwhile `cursor` moves past events that do not match.
        """
        self._is_woken = False
        while not self._buffer:
            if self._why is not None:
                self._end()
                raise StreamDisconnected(self._why, cursor=self.cursor)
            if self._is_closed or self._is_woken:
                return []
            if self.is_attached:
                self._news.clear()
                await self._news.wait()
            else:
                await self._fill()
        found = [self._make(event) for event in self._buffer]
        self._buffer.clear()
        self._yielded = self._read
        return found

    def wake(self) -> None:
        """Let a `batch` that waits return."""
        self._is_woken = True
        self._news.set()

    def _until_checkpoint(self) -> float | None:
        """Seconds until the next checkpoint; 0 if one is due, None if none will be before more is read."""
        if not self._checkpoints:
            return None
        position, at = self._told
        passed = self._read.position - position
        left = at + CHECKPOINT_SECONDS - time.monotonic()
        if passed >= CHECKPOINT_EVENTS or (passed > 0 and left <= 0):
            return 0
        return left if left > 0 else None

    async def _fill(self) -> None:
        """Read a page for itself; at the end of the log, join the others."""
        if self._followers.is_closing:
            self.disconnect("the engine shuts down")
            return
        before = self._read
        try:
            page = await self._followers.read_alone(self)
        except TransportError as error:
            self.disconnect(str(error))
            return
        except FlowFabricError:
            self._end()
            raise
        if page is None or self._is_closed or self._read != before:
            return  # closed meanwhile, or another task iterates too
        self._buffer.extend(page.events)
        self._read = page.cursor
        if page.at_end and not self._followers.attach(self) and not self._buffer:
            await asyncio.sleep(0.01)

    async def rest(self, seconds: float) -> bool:
        """Sleep before it reads again; False: it was closed or disconnected."""
        self._news.clear()
        if not self._is_closed and self._why is None:
            await first_of(seconds, self._news)
        return not self._is_closed and self._why is None

    async def first_page(self) -> None:
        """Read the first page now: a cursor that is refused, or a database that is away, is the caller's error."""
        try:
            page = await self._followers.read_once(self, True)
        except BaseException:
            self._end()
            raise
        self._buffer.extend(page.events)
        self._read = page.cursor
        if page.at_end:
            self._followers.attach(self)

    def take(self, events: Sequence[Event], cursor: EventCursor) -> bool:
        """Receive its part of what the loop read up to `cursor`; False: the queue is full, it reads on for itself."""
        after = self._read.position
        for event in events:
            if event.cursor.position > after:
                if len(self._buffer) >= QUEUE:
                    self._news.set()
                    return False
                self._buffer.append(event)
                self._read = event.cursor
        if cursor.position >= self._read.position:
            self._read = cursor
        if self._buffer or self._until_checkpoint() == 0:
            self._news.set()
        return True

    def left(self) -> None:
        """The loop no longer reads for it."""
        self.is_attached = False
        self._news.set()

    def disconnect(self, why: str) -> None:
        """End it with `StreamDisconnected`, after the events that it has already."""
        if not self._is_closed and self._why is None:
            self._why = why
            self._news.set()
            _hurry(self.reading)

    def _end(self) -> None:
        self._is_closed = True
        _hurry(self.reading)
        self._followers.detach(self)
        self._followers.open.discard(self)

    async def aclose(self) -> None:
        """End it; nothing is left behind."""
        self._read = self.cursor  # events in the buffer are not yielded any more
        self._end()
        self._buffer.clear()
        self._news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Followers:
    """Reads the end of the log for all subscriptions of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.open: WeakSet[Subscription[Any]] = WeakSet()
        self.is_closing = False
        self.reads = 0  # of the end of the log, so far
        self._attached: WeakSet[Subscription[Any]] = WeakSet()
        self._cursor = EventCursor()
        self._changed = asyncio.Event()
        self.reading: asyncio.Timeout | None = None  # the read of the loop
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # loops that only remove their announcement

    @property
    def count(self) -> int:
        """How many subscriptions the loop reads for."""
        return len(self._attached)

    def attach(self, one: Subscription[Any]) -> bool:
        """Read for a subscription that is at the end of the log; False: it is behind, and must read on for itself."""
        if self.is_closing:
            return False
        if self._task is None:
            self._cursor = one.position
            # Of the process, not of the task that happens to be the first to follow.
            loop = asyncio.get_running_loop()
            self._task = asyncio.Task(self._run(), loop=loop, name="flowfabric events", context=Context())
        elif one.position.position < self._cursor.position or one.position.epoch != self._cursor.epoch:
            self._changed.set()
            return False
        self._attached.add(one)
        one.is_attached = True
        return True

    def detach(self, one: Subscription[Any]) -> None:
        """Stop reading for a subscription."""
        self._attached.discard(one)
        one.left()
        self._changed.set()
        if not self._attached:
            _hurry(self.reading)

    async def read_once(self, one: Subscription[Any], repeatable: bool) -> LogPage:
        """Read a page for one subscription. `repeatable`: wait for a database that is away."""
        return await self._page(one, (one.choice,), one.position, PAGE, repeatable)

    async def _page(
        self,
        reader: Subscription[Any] | Followers,
        choices: Sequence[Choice],
        after: EventCursor,
        limit: int,
        repeatable: bool,
    ) -> LogPage:
        try:
            async with asyncio.timeout(None if repeatable else _ANSWER) as reader.reading:
                return await self._engine._read_log(choices, after, limit, repeatable)
        except TimeoutError:
            raise TransportError("timeout", "no response in time") from None
        finally:
            reader.reading = None

    async def read_alone(self, one: Subscription[Any]) -> LogPage | None:
        """Read a page for one subscription, again and again while the database is away; None: it was closed."""
        since = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self.read_once(one, False)
            except TransportError:
                if self.is_closing or time.monotonic() + pause - since > _GIVE_UP:
                    raise
            if not await one.rest(pause):
                return None
            pause = min(pause * 2, _LAST_PAUSE)

    async def _run(self) -> None:
        asleep: datetime | None = None  # until when it is announced
        try:
            with self._engine.event_wakeups() as notified:
                may_sleep = notified is not None
                moved_at = announced_at = time.monotonic()
                failing_since: float | None = None
                pause = _AWAKE
                while self._attached:
                    self._changed.clear()
                    if notified is not None:
                        notified.clear()
                    before, begun = self._cursor, time.monotonic()
                    try:
                        page = await self._read()
                        failing_since = None
                        if page is None:
                            continue
                        now = time.monotonic()
                        if self._cursor != before:
                            moved_at, pause = now, _AWAKE
                            if asleep is not None:
                                asleep = await self._engine.sleep_for_events(None, asleep)
                        if not page.at_end:
                            continue
                        is_quiet = now - moved_at >= _LINGER and not page.is_busy
                        if is_quiet and may_sleep and (asleep is None or now - announced_at > _ANNOUNCED_FOR / 2):
                            # Announce first, then read: what is written after the read brings a notification.
                            asleep = await self._engine.sleep_for_events(_ANNOUNCED_FOR, asleep)
                            announced_at = now
                            if asleep is None:
                                may_sleep = False  # it may not announce itself: it polls
                            continue
                    except TransportError as error:
                        now = time.monotonic()
                        if failing_since is None:
                            failing_since, pause = begun, _FIRST_PAUSE
                        if now + pause - failing_since > _GIVE_UP:
                            self._disconnect_all(str(error))
                            return
                        asleep = None
                        await first_of(pause, self._changed)
                        pause = min(pause * 2, _LAST_PAUSE)
                        continue
                    if is_quiet and may_sleep:
                        await first_of(_POLL, notified, self._changed)
                        continue
                    await first_of(pause, self._changed)
                    most = _BUSY_POLL if page.is_busy else _POLL
                    pause = min(pause * 2, most if now - moved_at >= _LINGER else _LINGER / 2)
        except Exception as error:
            log.exception("following the event log failed")
            self._disconnect_all(f"{type(error).__name__}: {error}")
        finally:
            # From here on nothing is read: a subscription that comes now needs another loop.
            self._attached.clear()
            ended, self._task = self._task, None
            if asleep is not None and not self.is_closing and ended is not None:
                self._ending.add(ended)
                ended.add_done_callback(self._ending.discard)
                with contextlib.suppress(FlowFabricError):
                    await self._engine.sleep_for_events(None, asleep)

    async def _read(self) -> LogPage | None:
        """Read the next events and hand them out; None if the subscriptions must read for themselves."""
        members = list(self._attached)
        if not members:
            return None
        self.reads += 1
        try:
            page = await self._page(self, _together(members), self._cursor, _SHARED_PAGE, False)
        except TransportError:
            raise
        except FlowFabricError as error:
            # Each tries its own cursor, and raises what is wrong with it.
            if not isinstance(error, CursorRefused):
                log.warning("following events: %s", error)
            for one in list(self._attached):
                self.detach(one)
            return None
        before, self._cursor = self._cursor, page.cursor
        is_other_log = page.cursor.epoch != before.epoch
        batch = _Batch(page.events)
        for one in members:
            if one not in self._attached:
                continue
            # One that has read further may have read what another server has lost: it checks its own cursor.
            if (is_other_log and one.position.position > before.position) or not one.take(
                batch.of(one.choice), page.cursor
            ):
                self.detach(one)
        # A subscription that came during the read was not asked for.
        for one in self._attached.difference(members):
            if one.position.position < page.cursor.position or one.position.epoch != page.cursor.epoch:
                self.detach(one)
        return page

    def _disconnect_all(self, why: str) -> None:
        for one in list(self._attached):
            one.disconnect(why)
            self.detach(one)

    async def close(self) -> None:
        """End every subscription with `StreamDisconnected`, and stop."""
        self.is_closing = True
        for one in list(self.open):
            one.disconnect("the engine shuts down")
        for task in (*self._ending, *(() if self._task is None else (self._task,))):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _hurry(reading: asyncio.Timeout | None) -> None:
    """Give up a read that nothing waits for any more, unless it ends in a moment."""
    if reading is not None and not reading.expired():
        soon = asyncio.get_running_loop().time() + _LEAVE
        reading.reschedule(min(soon, reading.when() or soon))


def _together(members: Sequence[Subscription[Any]]) -> list[Choice]:
    """The choices of many subscriptions for one read."""
    choices = list(dict.fromkeys(one.choice for one in members))
    if len(choices) <= _CHOICES:
        return choices
    families = 0
    for one in choices:
        families |= one.families
    return [Choice(families)]


class _Batch:
    """The events of one read, and which of them each choice takes.

    A thousand followers have a thousand choices, so an event is not compared with each of them: the followers of one
    execution, for example, look only at the events of theirs.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = [(event, bits_of(event)) for event in events]
        self._indexes: dict[Hashable, dict[Hashable, list[tuple[Event, int]]]] = {}
        self._taken: dict[Choice, list[Event]] = {}

    def of(self, choice: Choice) -> list[Event]:
        """The events that a choice takes."""
        found = self._taken.get(choice)
        if found is None:
            found = [event for event, families in self._among(choice) if choice.takes(event, families)]
            self._taken[choice] = found
        return found

    def _among(self, choice: Choice) -> Sequence[tuple[Event, int]]:
        """Events among which those of a choice are."""
        if not self._events:
            return ()
        if choice.execution_id is not None:
            return self._with("execution_id", choice.execution_id, lambda event: event.execution_id)
        if choice.flow_id is not None:
            return self._with("flow_id", choice.flow_id, lambda event: event.flow_id)
        if choice.namespace is not None:
            return self._with("namespace", choice.namespace, lambda event: event.namespace)
        key = choice.tag_key
        if key is not None:
            return self._with(("tag", key), choice.tag_value, lambda event: event.tags.get(key))
        return self._events

    def _with(self, name: Hashable, value: Hashable, of: Callable[[Event], Hashable]) -> Sequence[tuple[Event, int]]:
        index = self._indexes.get(name)
        if index is None:
            index = self._indexes[name] = {}
            for one in self._events:
                index.setdefault(of(one[0]), []).append(one)
        return index.get(value, ())
