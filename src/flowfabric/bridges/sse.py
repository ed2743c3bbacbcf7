"""Server-sent events: the items of `run.stream()` as the bytes of a response that a browser follows.

The browser sends the id of the last event it saw as `Last-Event-ID` when it connects again, and `run.stream(after=...)`
continues there. A page closes its `EventSource` at the event `end`; otherwise the browser would connect again.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import assert_never, overload

import msgspec

from flowfabric.values.stream import Frame, KeepAlive, NewAttempt, StreamItem

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
END = b"event: end\ndata:\n\n"


def event(item: StreamItem) -> bytes:
    """Return one item as an event: its cursor as the id, its type as the event's name, its text as the data.

    Bytes that are not UTF-8 are sent in base64. A `NewAttempt` is the event `new_attempt`, a `KeepAlive` a comment.
    """
    match item:
        case Frame():
            try:
                data = item.payload.decode()
            except UnicodeDecodeError:
                data = base64.b64encode(item.payload).decode()
            name = "".join(item.type.splitlines())
        case NewAttempt():
            data, name = (
                msgspec.json.encode({"attempt": item.attempt_index, "reason": item.reason}).decode(),
                "new_attempt",
            )
        case KeepAlive():
            return b": keep-alive\n\n"
        case _:
            assert_never(item)
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join([f"id: {item.cursor}", f"event: {name}", *(f"data: {line}" for line in lines), "", ""]).encode()


@overload
def events(items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]: ...
@overload
def events(items: Iterator[StreamItem]) -> Iterator[bytes]: ...
def events(items: AsyncIterator[StreamItem] | Iterator[StreamItem]) -> AsyncIterator[bytes] | Iterator[bytes]:
    """Turn the items of a stream into the body of a response; async items for async frameworks."""
    return _async_events(items) if isinstance(items, AsyncIterator) else _events(items)


async def _async_events(items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            yield event(item)
        yield END
    finally:
        if isinstance(items, AsyncGenerator):  # the browser left
            await items.aclose()


def _events(items: Iterator[StreamItem]) -> Iterator[bytes]:
    try:
        for item in items:
            yield event(item)
        yield END
    finally:
        if isinstance(items, Generator):
            items.close()
