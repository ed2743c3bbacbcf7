"""Server-sent events of a process: the event log and the streams of attempts, for any number of clients.

All clients of a process share one loop that reads the log and one that reads streams (`Engine.follow`, `Engine.tails`),
and the bytes of an event are written once for all clients that get it. A client that waits holds no database
connection. A client that is behind reads for itself, one page at a time, as fast as its connection takes them; one that
takes nothing for 30 seconds is cut off, and continues with the id of the last event it has.

The id of an event is a cursor: the header `Last-Event-ID` continues after it. An event with an id alone moves the
cursor past events that the filter left out. Beside the events there are `reset` (events after the cursor are gone, and
others follow), `end` (the stream is closed) and `bye` (this process stops).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from flowfabric.bridges import sse
from flowfabric.client.following import Follower
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.errors import CursorRefused, FlowFabricError, StreamDisconnected, Unavailable
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.stream import Frame, KeepAlive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.engine.followers import Subscription
    from flowfabric.server.opening import Opening
    from flowfabric.values.event import EventFilter, Family
    from flowfabric.values.ids import ExecutionId

log = logging.getLogger("flowfabric.sse")
COMMENT_SECONDS = 15.0
SEND_SECONDS = 30.0
CHECK_SECONDS = (
    2.0  # how often the API keys of clients are looked up again; a lookup is remembered for 2.5 s: 4.5 together
)
TICK_SECONDS = 1.0  # one timer for all clients: each of their own would cost more than the event
RETRY_MS = 1000  # after which a browser connects again
ABORT = "flowfabric.abort"  # the extension of a scope that ends the connection without waiting for the client
_COMMENT = b": keep-alive\n\n"
_KEPT_BYTES = 4 * 1024 * 1024
_END = "/end"
_LONG = timedelta(hours=1)  # readers of frames are woken for their comments, as those of events are
_T = TypeVar("_T")


class Waits(Protocol):
    """Something that waits, until it is woken."""

    def wake(self) -> None: ...

    def tick(self, now: float) -> None:
        """Another second has passed."""


class Clients:
    """The clients of a process that wait for something, and the bytes of the newest events, which all of them get."""

    def __init__(self, drain: asyncio.Event) -> None:
        self._drain = drain
        self._waiting: set[Waits] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._kept: dict[Hashable, bytes] = {}
        self._kept_bytes = 0
        self.following = 0  # clients of server-sent events, now
        self.cut_off = 0  # that took nothing for too long, so far
        self.on_change: Callable[[int], None] | None = None  # is called with 1 or -1, for metrics

    @property
    def is_draining(self) -> bool:
        """Whether the process stops: nothing may wait any more."""
        return self._drain.is_set()

    def count(self, by: int) -> None:
        """A client of server-sent events came or left."""
        self.following += by
        if self.on_change is not None:
            self.on_change(by)

    def join(self, one: Waits) -> None:
        """Wake it when the process stops."""
        self._waiting.add(one)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._until_drain(), name="flowfabric drain of clients")
        if self._guard is None and isinstance(one, Feed) and one.permit is not None:
            self._guard = asyncio.create_task(self._check_keys(), name="flowfabric keys of clients")

    def leave(self, one: Waits) -> None:
        """It no longer waits."""
        self._waiting.discard(one)
        if not self._waiting:
            for task in (self._watcher, self._guard):
                if task is not None:
                    task.cancel()
            self._watcher = self._guard = None

    async def _until_drain(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._drain.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._drain.wait()
            now = clock()
            for one in list(self._waiting):
                one.tick(now)
        for one in list(self._waiting):
            one.wake()

    async def _check_keys(self) -> None:
        """End the streams of API keys that no longer work."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            permitted: dict[Permit, list[Feed]] = {}
            for one in self._waiting:
                if isinstance(one, Feed) and one.permit is not None:
                    permitted.setdefault(one.permit, []).append(one)
            # One check for all clients of a key: a thousand checks would delay their events.
            for permit, feeds in permitted.items():
                with contextlib.suppress(FlowFabricError):  # without the database no event comes either
                    if not await permit.is_valid():
                        for one in feeds:
                            one.end()
                await asyncio.sleep(0)

    async def unless_draining(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Return what a long wait returns; None if the process stops meanwhile."""
        if self.is_draining:
            work.close()
            return None
        task = asyncio.ensure_future(work)
        waiting = _Cancelled(task)
        self.join(waiting)
        try:
            return await task
        except asyncio.CancelledError:
            if not waiting.is_woken:
                raise
            return None
        finally:
            self.leave(waiting)

    def known_bytes(self, key: Hashable) -> bytes | None:
        """Return the bytes of an event if a client has got it."""
        return self._kept.get(key)

    def bytes_of(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return the bytes of an event, as they were made for the first client that got it."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
            self._kept_bytes += len(found)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.pop(next(iter(self._kept))))
        return found


class _Cancelled:
    """A task that is cancelled when it is woken."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.is_woken = False

    def wake(self) -> None:
        self.is_woken = True
        self.task.cancel()

    def tick(self, now: float) -> None:
        pass


@dataclass(frozen=True)
class Permit:
    """The API key a client follows with; clients whose `shown` is equal have the same one."""

    shown: Hashable
    is_valid: Callable[[], Awaitable[bool]] = field(compare=False)


class Feed(AsyncIterator[bytes]):
    """What one client gets: pieces of the body, until the client leaves or nothing can follow."""

    is_followed = True  # it counts as a client of server-sent events

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.permit: Permit | None = None  # None: nothing that it shows needs a key
        self.is_ended = False
        self.task: asyncio.Task[Any] | None = None  # that serves it
        self._pieces: AsyncGenerator[bytes, None] | None = None
        self._sent_at = asyncio.get_running_loop().time()
        self.is_sending = False
        self._cut_off: Callable[[], None] | None = None

    def end(self) -> None:
        """End the response now."""
        if self.task is not None and not self.is_ended:
            self.is_ended = True
            self.task.cancel()

    async def __anext__(self) -> bytes:
        if self._pieces is None:
            self._pieces = self.pieces()
            self.clients.join(self)
            self.clients.count(int(self.is_followed))
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """End it; nothing is left behind."""
        if self._pieces is not None:
            self.clients.leave(self)
            self.clients.count(-int(self.is_followed))
            await self._pieces.aclose()
            self._pieces = None

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Write the events as they come."""
        raise NotImplementedError

    async def send_all(self, send: Send, cut_off: Callable[[], None]) -> None:
        """Send the pieces. A client that takes nothing for too long is cut off."""
        self._cut_off = cut_off
        clock = asyncio.get_running_loop().time
        async for piece in self:
            self.is_sending, self._sent_at = True, clock()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.is_sending = False

    def tick(self, now: float) -> None:
        """Write a comment after a silence, and cut off a client that takes nothing."""
        if self.is_sending:
            if now - self._sent_at >= SEND_SECONDS and self._cut_off is not None:
                self._cut_off()
        elif now - self._sent_at >= COMMENT_SECONDS:
            self._sent_at = now
            self.wake()

    def wake(self) -> None:
        """Let it see that the process stops."""
        raise NotImplementedError


class Lines(Feed):
    """Pieces of an answer that ends by itself."""

    is_followed = False

    def __init__(self, clients: Clients, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(clients)
        self._lines = lines

    def pieces(self) -> AsyncGenerator[bytes, None]:
        return self._lines

    def wake(self) -> None:
        """It does not wait."""


class LogFeed(Feed):
    """The events of the log after a cursor. `open` comes first: it raises what is wrong with the request."""

    _events: Subscription[Event]

    def __init__(
        self,
        clients: Clients,
        engine: Engine,
        form: Callable[[Event], str],
        *,
        form_name: Hashable,
        families: Sequence[Family] | None = None,
        after: EventCursor | None = None,
        chosen: EventFilter | None = None,
        heartbeats: bool = False,
    ) -> None:
        super().__init__(clients)
        self._engine = engine
        self._form = form
        self._form_name = form_name  # clients of one name get the same bytes
        self._families = families
        self._chosen = chosen
        self._heartbeats = heartbeats
        self._cursor = after
        self._first = b""

    async def open(self) -> Self:
        """Begin to follow. A cursor whose events are gone continues at the oldest, with the event `reset`."""
        try:
            self._events = await self._follow(self._cursor)
        except CursorRefused as error:
            self._first = await self._reset(error)
        else:
            # A client that is cut off before its first event continues here, too.
            self._cursor = self._events.cursor if self._cursor is None else self._cursor
            self._first = f"id: {self._cursor}\n\n".encode()
        return self

    async def _follow(self, after: EventCursor | None) -> Subscription[Event]:
        return await self._engine.follow(self._families, after=after, filter=self._chosen, heartbeats=self._heartbeats)

    async def _reset(self, error: CursorRefused) -> bytes:
        """Follow from where the log can be continued, and write the event that says so."""
        before = self._cursor
        if before is not None and error.kind == "cursor_ahead" and error.epoch == before.epoch:
            raise error  # no cursor that this log ever gave
        self._cursor = EventCursor(error.position, error.epoch)
        self._events = await self._follow(self._cursor)
        facts = {"code": error.kind, "after": None if before is None else str(before), "oldest": str(self._cursor)}
        return sse.write("reset", msgspec.json.encode(facts).decode(), str(self._cursor))

    def wake(self) -> None:
        self._events.wake()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"retry: %d\n%b" % (RETRY_MS, self._first)
            while not self.clients.is_draining:
                try:
                    found = await self._events.batch()
                except CursorRefused as error:
                    yield await self._reset(error)
                    continue
                except StreamDisconnected as error:
                    if not self.clients.is_draining:
                        log.warning("a response ends: %s", error)
                        return
                    break
                if found:
                    self._cursor = found[-1].cursor
                    yield b"".join(map(self._written, found))
                elif self._cursor != self._events.cursor:
                    self._cursor = self._events.cursor
                    yield f"id: {self._cursor}\n\n".encode()
                else:
                    yield _COMMENT
            yield sse.write("bye", "{}", str(self._events.cursor))
        finally:
            await self._events.aclose()

    def _written(self, event: Event) -> bytes:
        # With the time: a restored log has other events at the same positions.
        key = (self._form_name, event.cursor, event.occurred_at)
        return self.clients.bytes_of(key, lambda: sse.write(None, self._form(event), str(event.cursor)))


class StreamFeed(Feed):
    """The frames of one attempt after a cursor. `open` comes first: it raises what is wrong with the request."""

    def __init__(
        self,
        clients: Clients,
        engine: Engine,
        execution_id: ExecutionId,
        attempt: int,
        *,
        opening: Opening,
        after: str | None = None,
        live: bool = True,
        codecs: Codecs | None = None,
    ) -> None:
        super().__init__(clients)
        self._execution_id = execution_id
        self._codecs = codecs
        self._opening = opening
        self._has_ended = after is not None and after.endswith(_END)
        self._follower = Follower(
            execution_id,
            after=None if after is None else after.removesuffix(_END),
            attempt=attempt,
            live=live,
            keep_alive=_LONG,
        ).on(engine, None)

    async def open(self) -> bool:
        """Read the first page; False if the client has the `end` already."""
        await self._follower.open()
        return not (self._has_ended and self._follower.is_over)

    def wake(self) -> None:
        """Let it write a comment, or see that the process stops."""
        self._follower.wake()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        yield b"retry: %d\n\n" % RETRY_MS
        async with contextlib.aclosing(self._follower.items()) as items:
            try:
                async for item in items:
                    if self.clients.is_draining and isinstance(item, KeepAlive):
                        break
                    yield await self._written(item)
                    if self.clients.is_draining:
                        break
                else:
                    page = self._follower.page
                    facts = {"closed_at": page.closed_at, "closed_reason": page.closed_reason}
                    yield sse.write("end", msgspec.json.encode(facts).decode(), self._follower.cursor + _END)
                    return
            except Unavailable:
                pass  # the engine shuts down
        yield sse.write("bye", "{}", self._follower.cursor)

    async def _written(self, item: Any) -> bytes:
        if not isinstance(item, Frame):
            return sse.event(item)
        key = (self._execution_id, item.cursor)
        known = self.clients.known_bytes(key)
        if known is not None:
            return known
        written = await self._opening.run(
            0 if self._codecs is None else len(item.payload), lambda: sse.event(self._opened(item))
        )
        return self.clients.bytes_of(key, lambda: written)

    def _opened(self, frame: Frame) -> Frame:
        """A frame as its handler emitted it; as it is stored if the codecs cannot read it."""
        if self._codecs is None or frame.mode == "summary":
            return frame
        try:
            plain = self._codecs.open(frame.payload, frame.encoding, self._execution_id)
        except CannotDecode as error:
            log.warning("frame %s of execution %s: %s", frame.cursor, self._execution_id, error.problem)
            return frame
        return msgspec.structs.replace(frame, payload=plain, encoding=None)


async def serve(feed: Feed, scope: Scope, receive: Receive, send: Send) -> None:
    """Write the pieces of a feed as they come, in the task of the request, until the client leaves.

    The response has been started.
    """
    own = asyncio.current_task()
    assert own is not None
    feed.task = own
    has_left = is_stuck = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        own.cancel()

    def cut_off() -> None:
        nonlocal is_stuck
        is_stuck = True
        own.cancel()

    watcher = asyncio.create_task(watch(), name="flowfabric client of events")
    try:
        await feed.send_all(send, cut_off)
        watcher.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except asyncio.CancelledError:
        if not (has_left or is_stuck or feed.is_ended):
            raise
        own.uncancel()
        watcher.cancel()
        if is_stuck:
            feed.clients.cut_off += 1
            log.info("a client of a stream took nothing for %g seconds: it is cut off", SEND_SECONDS)
        if is_stuck or feed.is_sending:
            abort = scope.get("extensions", {}).get(ABORT)
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # the server notices
        elif not has_left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        watcher.cancel()
        await feed.aclose()
