"""Following what an execution emits, from attempt to attempt, and what the nodes of a flow emit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import timedelta

import msgspec

from flowfabric.client.current import background
from flowfabric.contracts.codecs import Codecs
from flowfabric.engine import Engine
from flowfabric.engine.checks import check_int
from flowfabric.engine.tails import Waiter
from flowfabric.errors import InvalidInput, NotFound, TimedOut, Unavailable
from flowfabric.values.durations import Duration, duration
from flowfabric.values.ids import ExecutionId
from flowfabric.values.stream import (
    START,
    Frame,
    KeepAlive,
    NewAttempt,
    Position,
    StreamItem,
    StreamPage,
    parse_position,
    parse_run_cursor,
)

_PAGE = 256
_QUEUE = 1024  # items of a flow that wait for their reader
_NEW_NODES = 1.0  # seconds until a flow is asked for new nodes


class Follower:
    """Follows one execution: its frames in order, and where one attempt ends and the next begins."""

    _engine: Engine
    _codecs: Codecs | None

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
        self._cursor = f"{self._index}/0-0"
        if after not in (None, ""):
            index, position = parse_run_cursor(after)
            if attempt is not None and index != attempt:
                raise InvalidInput(f"is of attempt {index}", field="after", allowed=f"a cursor of attempt {attempt}")
            self._index, self._begin, self._cursor = index, position.following, f"{index}/{position.ms}-{position.n}"
        if not isinstance(live, bool):
            raise InvalidInput(f"got {live!r}", field="live", allowed="True or False")
        self._live = live
        self._keep_alive = wait_seconds(keep_alive, "keep_alive")
        self._timeout = wait_seconds(timeout, "timeout", least=timedelta(0))
        self._node = node

    async def items(self, engine: Engine, codecs: Codecs | None) -> AsyncGenerator[StreamItem, None]:
        """Yield the items until the execution has ended and everything was read.

        Without `codecs` payloads stay as they are stored.
        """
        self._engine, self._codecs = engine, codecs
        until = None if self._timeout is None else time.monotonic() + self._timeout
        page = await self._read()
        if not page.is_known:
            raise NotFound("execution", self._execution_id)
        if self._index >= max(page.attempts, 1) and not self._stays:
            raise InvalidInput(
                f"is of attempt {self._index}", field="after", allowed=f"the cursor of an item of {self._execution_id}"
            )
        while True:
            for frame in page.frames:
                opened = self._opened(frame)
                self._begin, self._cursor = parse_position(frame.id, "id").following, opened.cursor
                yield opened
            if len(page.frames) == _PAGE:
                page = await self._read()
            elif page.closed_at is not None and page.attempts > self._index + 1 and not self._stays:
                self._index, self._begin = self._index + 1, START
                change = NewAttempt(attempt_index=self._index, reason=page.closed_reason, node=self._node)
                self._cursor = change.cursor
                yield change
                page = await self._read()
            elif self._is_over(page):
                return
            else:
                found = None
                while found is None:
                    found = await self._news(page, until)
                    if found is None:
                        yield KeepAlive(cursor=self._cursor)
                page = found

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
        found = await self._engine.tails.wait(waiter, min(spans, default=None))
        if found is None and self._engine.tails.is_closing:
            raise Unavailable("stream", "the engine shuts down")
        if found is None and (self._keep_alive is None or (left is not None and left <= self._keep_alive)):
            raise TimedOut("stream", round((self._timeout or 0) * 1000))
        return found

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
            payload = self._codecs.open(frame.payload, frame.encoding, self._execution_id)
            if payload is not frame.payload:
                frame = msgspec.structs.replace(frame, payload=payload, encoding=None)
        return frame if self._node is None else msgspec.structs.replace(frame, node=self._node)


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
