"""Following what an execution emits, from attempt to attempt, and what the nodes of a flow emit."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from typing import Final, Protocol, Self

import msgspec

from flowfabric.client.current import background
from flowfabric.client.portal import Portal
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.engine import Engine
from flowfabric.engine.checks import check_int
from flowfabric.engine.tails import Waiter
from flowfabric.errors import InvalidInput, NotFound, TimedOut, Unavailable
from flowfabric.values.checks import quoted
from flowfabric.values.durations import Duration, duration
from flowfabric.values.ids import ExecutionId
from flowfabric.values.stream import (
    START,
    Frame,
    Gap,
    KeepAlive,
    NewAttempt,
    Position,
    StreamItem,
    StreamPage,
    parse_position,
    parse_run_cursor,
    run_cursor,
)

_PAGE = 256
_QUEUE = 1024  # items of a flow that wait for their reader
_NEW_NODES = 1.0  # seconds until a flow is asked for new nodes
_FLOW_CURSOR: Final = "flow:"
_MAX_CURSORS: Final = 1 << 22  # bytes


class Following(Protocol):
    """What a reader reads: one execution, or the nodes of a flow."""

    @property
    def cursor(self) -> str: ...

    async def open(self) -> None:
        """Check that it exists and has the position to continue at."""

    def items(self) -> AsyncGenerator[StreamItem, None]: ...

    async def state(self) -> str:
        """Its state now."""
        ...


class StreamReader(AsyncIterator[StreamItem]):
    """The items of `run.stream()` or `flow_run.stream()`, for one `async for`.

    An unknown execution or flow, or a position that it does not have, is an error of the first item; `open` raises it
    before, for example to answer a request with another status. `cursor` is the position after the last item, for
    `after=`.
    """

    def __init__(self, begin: Callable[[], Awaitable[Following]]) -> None:
        self._begin = begin
        self._following: Following | None = None
        self._items: AsyncGenerator[StreamItem, None] | None = None
        self._is_closed = False

    async def open(self) -> Self:
        """Check that there is something to follow; raises `NotFound` or `InvalidInput`. Returns the reader."""
        if self._following is None:
            following = await self._begin()
            await following.open()
            self._following, self._items = following, following.items()
        return self

    @property
    def cursor(self) -> str | None:
        """The position after the last item; None before the first."""
        return None if self._following is None else self._following.cursor

    async def state(self) -> str:
        """The state of the execution or flow now: how it ended, after the last item."""
        await self.open()
        assert self._following is not None
        return await self._following.state()

    async def __anext__(self) -> StreamItem:
        if self._is_closed:
            raise StopAsyncIteration
        await self.open()
        assert self._items is not None
        return await anext(self._items)

    async def aclose(self) -> None:
        """Stop following."""
        self._is_closed = True
        if self._items is not None:
            await self._items.aclose()


class SyncStreamReader(Iterator[StreamItem]):
    """The items of `run.stream()` or `flow_run.stream()` of the sync client. See `StreamReader`."""

    def __init__(self, portal: Portal, reader: StreamReader) -> None:
        self._portal = portal
        self._reader = reader
        self._items = portal.iterate(reader)

    def open(self) -> Self:
        """Check that there is something to follow; raises `NotFound` or `InvalidInput`. Returns the reader."""
        self._portal.call(self._reader.open())
        return self

    @property
    def cursor(self) -> str | None:
        """The position after the last item; None before the first."""
        return self._reader.cursor

    def state(self) -> str:
        """The state of the execution or flow now: how it ended, after the last item."""
        return self._portal.call(self._reader.state())

    def __next__(self) -> StreamItem:
        return next(self._items)

    def close(self) -> None:
        """Stop following."""
        self._items.close()


class Follower:
    """Follows one execution: its frames in order, and where one attempt ends and the next begins."""

    _engine: Engine
    _codecs: Codecs | None
    _page: StreamPage

    def __init__(
        self,
        execution_id: ExecutionId,
        *,
        after: str | None = None,
        attempt: int | None = None,
        live: bool = True,
        keep_alive: Duration | None = None,
        timeout: Duration | None = None,
        node: str | None = None,
    ) -> None:
        """Check the options; raises `InvalidInput`."""
        self._execution_id = execution_id
        self._stays = attempt is not None
        self._index = 0 if attempt is None else check_int(attempt, "attempt", 0, 2**31 - 1)
        self._begin: Position = START
        self._number: int | None = 0  # of durable frames up to here
        self._position = "0-0"
        if after not in (None, ""):
            index, position, self._number = parse_run_cursor(after)
            if attempt is not None and index != attempt:
                raise InvalidInput(f"is of attempt {index}", field="after", allowed=f"a cursor of attempt {attempt}")
            self._index, self._begin, self._position = index, position.following, f"{position.ms}-{position.n}"
            if position == START:
                self._number = 0
        if not isinstance(live, bool):
            raise InvalidInput(f"got {live!r}", field="live", allowed="True or False")
        self._live = live
        self._keep_alive = wait_seconds(keep_alive, "keep_alive")
        self._timeout = wait_seconds(timeout, "timeout", least=timedelta(0))
        self._node = node
        self._waiter: Waiter | None = None

    def on(self, engine: Engine, codecs: Codecs | None) -> Self:
        """Use this engine. Without `codecs` payloads stay as they are stored."""
        self._engine, self._codecs = engine, codecs
        return self

    @property
    def page(self) -> StreamPage:
        """The page that was read last."""
        return self._page

    @property
    def is_over(self) -> bool:
        """Whether the page that was read last is empty, and no frame will follow."""
        return not self._page.frames and self._is_over(self._page)

    @property
    def cursor(self) -> str:
        """The position after the last item."""
        return run_cursor(self._index, self._position, self._number)

    async def open(self) -> None:
        """Read the first page; raises `NotFound`, or `InvalidInput` for a cursor that the execution cannot have."""
        self._page = page = await self._read()
        if not page.is_known:
            raise NotFound("execution", self._execution_id)
        if self._index >= max(page.attempts, 1) and not self._stays:
            raise InvalidInput(
                f"is of attempt {self._index}", field="after", allowed=f"the cursor of an item of {self._execution_id}"
            )

    async def state(self) -> str:
        """The state of the execution now."""
        found = await self._engine.read_execution_state(self._execution_id)
        if found is None:
            raise NotFound("execution", self._execution_id)
        return found.value

    async def items(self) -> AsyncGenerator[StreamItem, None]:
        """Yield the items until the execution has ended and everything was read. `open` comes first."""
        until = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            page = self._page
            if (gap := self._gap(page)) is not None:
                yield gap
            for frame in page.frames:
                number = self._number if frame.number is None else frame.number
                opened = self._opened(msgspec.structs.replace(frame, number=number) if frame.number is None else frame)
                self._begin = parse_position(frame.id, "id").following
                self._position, self._number = frame.id, number
                yield opened
            if len(page.frames) == _PAGE:
                self._page = await self._read()
            elif page.closed_at is not None and page.attempts > self._index + 1 and not self._stays:
                self._index, self._begin, self._position, self._number = self._index + 1, START, "0-0", 0
                yield NewAttempt(attempt_index=self._index, reason=page.closed_reason, node=self._node)
                self._page = await self._read()
            elif self._is_over(page):
                return
            else:
                found = None
                while found is None:
                    found = await self._news(page, until)
                    if found is None:
                        yield KeepAlive(cursor=self.cursor)
                self._page = found

    def _gap(self, page: StreamPage) -> Gap | None:
        """Return the item for frames that are no longer kept, if some come after the position."""
        missing: int | None = None
        if self._number is not None:
            if page.dropped <= self._number:
                return None
            missing = page.dropped - self._number
        elif not page.dropped or all(frame.number != page.dropped + 1 for frame in page.frames[:1]):
            return None  # the page does not begin with the oldest frame that is kept
        self._number = page.dropped
        return Gap(cursor=self.cursor, missing=missing, node=self._node)

    def _is_over(self, page: StreamPage) -> bool:
        return page.has_ended or not page.is_known or (self._stays and page.closed_at is not None)

    async def _read(self) -> StreamPage:
        (page,) = await self._engine.read_streams(
            [(self._execution_id, self._index, self._begin)],
            count_limit=_PAGE,
            visibility="all" if self._live else "exclude_best_effort",
        )
        return page

    async def _news(self, page: StreamPage, until: float | None) -> StreamPage | None:
        """Wait for a page that says more than this one; None if it is time to say that nothing happened."""
        waiter = Waiter(self._execution_id, self._index, self._begin, _PAGE, self._live, self._is_news(page))
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise TimedOut("stream", round((self._timeout or 0) * 1000))
        spans = [span for span in (left, self._keep_alive) if span is not None]
        self._waiter = waiter
        found = await self._engine.tails.wait(waiter, min(spans, default=None))
        if found is None and self._engine.tails.is_closing:
            raise Unavailable("stream", "the engine shuts down")
        if found is None and (self._keep_alive is None or (left is not None and left <= self._keep_alive)):
            raise TimedOut("stream", round((self._timeout or 0) * 1000))
        return found

    def wake(self) -> None:
        """Let a reader that waits have a `KeepAlive` now, if it has them at all."""
        if self._waiter is not None and self._waiter.future is not None and not self._waiter.future.done():
            self._waiter.future.set_result(None)

    def _is_news(self, page: StreamPage) -> Callable[[StreamPage], bool]:
        was_closed, index = page.closed_at is not None, self._index
        return lambda new: (
            bool(new.frames)
            or new.has_ended
            or not new.is_known
            or (new.closed_at is not None and (not was_closed or new.attempts > index + 1))
        )

    def _opened(self, frame: Frame) -> Frame:
        """Return a frame as its handler emitted it."""
        if self._codecs is not None and frame.mode != "summary":
            try:
                payload = self._codecs.open(frame.payload, frame.encoding, self._execution_id)
            except CannotDecode as error:
                error.cursor = frame.cursor
                raise
            if payload is not frame.payload:
                frame = msgspec.structs.replace(frame, payload=payload, encoding=None)
        return frame if self._node is None else msgspec.structs.replace(frame, node=self._node)


class FlowFollower:
    """Follows the nodes of a flow, also nodes that are added meanwhile."""

    def __init__(
        self,
        nodes: Callable[[], Awaitable[Mapping[str, ExecutionId]]],
        follower: Callable[[str, ExecutionId, str | None], Follower],
        known: Mapping[str, str],
        keep_alive: float | None,
        state: Callable[[], Awaitable[str]],
    ) -> None:
        """Follow each node with what `follower` returns for it and its cursor; `known` has those of earlier readers."""
        self._nodes = nodes
        self._follower = follower
        self._cursors = dict(known)
        self._keep_alive = keep_alive
        self._state = state
        self._first: Mapping[str, ExecutionId] | None = None

    @property
    def cursor(self) -> str:
        """The positions of all nodes that had items."""
        return write_cursors(self._cursors)

    async def open(self) -> None:
        """Read the nodes; raises `NotFound`, or `InvalidInput` for cursors of nodes that do not exist."""
        self._first = await self._nodes()
        unknown = [name for name in self._cursors if name not in self._first]
        if unknown:
            raise InvalidInput(f"there is no node {quoted(unknown[0])}", field="after", allowed="nodes of this flow")

    async def state(self) -> str:
        """The state of the flow now."""
        return await self._state()

    async def items(self) -> AsyncGenerator[StreamItem, None]:
        """Yield the items of all nodes as they come."""

        async def nodes() -> Mapping[str, ExecutionId]:
            first, self._first = self._first, None
            return await self._nodes() if first is None else first

        def items_of(name: str, execution_id: ExecutionId) -> AsyncGenerator[StreamItem, None]:
            return _opened_items(self._follower(name, execution_id, self._cursors.get(name)))

        async with contextlib.aclosing(follow_nodes(nodes, items_of, self._keep_alive)) as items:
            async for item in items:
                if isinstance(item, KeepAlive):
                    yield KeepAlive(cursor=self.cursor)
                    continue
                if item.node is not None:
                    self._cursors[item.node] = item.cursor
                yield item


async def _opened_items(follower: Follower) -> AsyncGenerator[StreamItem, None]:
    await follower.open()
    async with contextlib.aclosing(follower.items()) as items:
        async for item in items:
            yield item


def write_cursors(cursors: Mapping[str, str]) -> str:
    """Write the cursors of nodes as one text."""
    return _FLOW_CURSOR + urlsafe_b64encode(zlib.compress(msgspec.json.encode(cursors))).decode()


def read_cursors(value: object) -> dict[str, str]:
    """Return the cursors of nodes by name, from such a text or a mapping; raises `InvalidInput`."""
    allowed = "the cursor of a reader of this flow, or a cursor for each node, by name"
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        try:
            if not value.startswith(_FLOW_CURSOR):
                raise ValueError
            unpacked = zlib.decompressobj()
            found = unpacked.decompress(urlsafe_b64decode(value.removeprefix(_FLOW_CURSOR)), _MAX_CURSORS)
            if not unpacked.eof:
                raise ValueError
            value = msgspec.json.decode(found, type=dict[str, str])
        except (ValueError, zlib.error, msgspec.MsgspecError):
            raise InvalidInput(f"got {quoted(value)}", field="after", allowed=allowed) from None
    if not isinstance(value, Mapping):
        raise InvalidInput(f"got {type(value).__name__}", field="after", allowed=allowed)
    for cursor in value.values():
        parse_run_cursor(cursor)
    return dict(value)


async def follow_nodes(
    nodes: Callable[[], Awaitable[Mapping[str, ExecutionId]]],
    follower: Callable[[str, ExecutionId], AsyncGenerator[StreamItem, None]],
    keep_alive: float | None,
) -> AsyncGenerator[StreamItem, None]:
    """Yield the items of all nodes of a flow as they come, also of nodes that are added meanwhile.

    `follower` returns the items of a node.
    """
    queue: asyncio.Queue[StreamItem | asyncio.Task[None]] = asyncio.Queue(_QUEUE)
    following: dict[ExecutionId, asyncio.Task[None]] = {}
    open_nodes = 0
    cursor = "0/0-0"
    quiet_since = time.monotonic()
    try:
        while True:
            found = await nodes()
            new = [(name, one) for name, one in found.items() if one not in following]
            if not new and not open_nodes:
                return
            for name, execution_id in new:
                following[execution_id] = background(_pump(follower(name, execution_id), queue), "flowfabric node")
            open_nodes += len(new)
            again_at = time.monotonic() + _NEW_NODES
            while open_nodes:
                quiet_until = again_at if keep_alive is None else quiet_since + keep_alive
                try:
                    if queue.empty():
                        async with asyncio.timeout(max(min(again_at, quiet_until) - time.monotonic(), 0)):
                            item = await queue.get()
                    else:
                        item = queue.get_nowait()
                except TimeoutError:
                    if keep_alive is not None and time.monotonic() >= quiet_until:
                        quiet_since = time.monotonic()
                        yield KeepAlive(cursor=cursor)
                    if time.monotonic() >= again_at:
                        break
                    continue
                if isinstance(item, asyncio.Task):
                    open_nodes -= 1
                    await item  # raises what ended it
                    continue
                cursor = item.cursor
                yield item
                quiet_since = time.monotonic()
                if quiet_since >= again_at:
                    break
    finally:
        for task in following.values():
            task.cancel()
        await asyncio.gather(*following.values(), return_exceptions=True)


async def _pump(items: AsyncGenerator[StreamItem, None], queue: asyncio.Queue[StreamItem | asyncio.Task[None]]) -> None:
    """Put the items of a node into the queue, and this task itself when it ends."""
    this = asyncio.current_task()
    assert this is not None
    try:
        async with contextlib.aclosing(items):
            async for item in items:
                await queue.put(item)
    except Exception:
        await queue.put(this)
        raise
    await queue.put(this)


def wait_seconds(span: Duration | None, field: str, least: timedelta = timedelta(milliseconds=1)) -> float | None:
    """Return a duration in seconds; raises `InvalidInput` for one that is too short."""
    if span is None:
        return None
    found = duration(span, field)
    if found < least:
        raise InvalidInput(f"got {span!r}", field=field, allowed="a positive duration")
    return found.total_seconds()
