"""Server-sent events: the items of `run.stream()` as the bytes of a response that a browser follows.

The browser sends the id of the last event it saw as `Last-Event-ID` when it connects again, and `run.stream(after=...)`
continues there. A page closes its `EventSource` at the event `end`; otherwise the browser would connect again.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_never, overload

import msgspec

from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, TimedOut, Unavailable
from flowfabric.values.stream import RESERVED_TYPES, SUMMARY_DELTA, Frame, Gap, KeepAlive, NewAttempt, StreamItem

log = logging.getLogger("flowfabric.sse")
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(item: StreamItem, cursor: str | None = None) -> bytes:
    """Return one item as an event: its cursor as the id, its type as the event's name, its text as the data.

    Bytes that are not UTF-8 are sent in base64. A frame without a type has no name either: the page receives it as
    `message`. A change of the summary is the event `summary_delta`, a `NewAttempt` is `new_attempt`, a `Gap` is `gap`,
    a `KeepAlive` a comment. The data of an item of a flow is JSON: its node, and the text. `cursor` replaces the id.
    """
    match item:
        case Frame():
            try:
                data = item.payload.decode()
            except UnicodeDecodeError:
                data = base64.b64encode(item.payload).decode()
            name = _name(item)
            if item.node is not None:
                data = _json({"node": item.node, "text": data})
        case NewAttempt():
            name, data = "new_attempt", _json(_of_node(item, attempt=item.attempt_index, reason=item.reason))
        case Gap():
            name, data = "gap", _json(_of_node(item, missing=item.missing))
        case KeepAlive():
            return b": keep-alive\n\n"
        case _:
            assert_never(item)
    return write(name, data, item.cursor if cursor is None else cursor)


def end(state: str | None = None) -> bytes:
    """Return the last event: nothing follows. `state` is how the execution or flow ended."""
    return write("end", _json({} if state is None else {"state": state}))


def error_event(error: FlowFabricError) -> bytes:
    """Return the event for an error that ends the response. Only errors of the request show their text."""
    facts = {"kind": error.kind}
    if isinstance(error, InvalidInput | NotFound):
        facts["message"] = str(error)
    return write("error", _json(facts))


def _name(frame: Frame) -> str | None:
    if frame.mode == "summary":
        return SUMMARY_DELTA
    name = "".join(frame.type.splitlines())
    return None if name == frame.kind or name in RESERVED_TYPES else name


def _of_node(item: NewAttempt | Gap, **facts: Any) -> dict[str, Any]:
    return facts if item.node is None else {"node": item.node, **facts}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def write(name: str | None, data: str, cursor: str | None = None) -> bytes:
    """Write one event: its name, if it has one, its data, and the id after which the client continues."""
    lines = [f"data: {line}" for line in data.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    if name is not None:
        lines.insert(0, f"event: {name}")
    if cursor is not None:
        lines.insert(0, f"id: {cursor}")
    return "\n".join([*lines, "", ""]).encode()


@overload
def events(items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]: ...
@overload
def events(items: Iterator[StreamItem]) -> Iterator[bytes]: ...
def events(items: AsyncIterator[StreamItem] | Iterator[StreamItem]) -> AsyncIterator[bytes] | Iterator[bytes]:
    """Turn the items of a stream into the body of a response; async items for async frameworks.

    The last event, `end`, says how the execution or flow ended: `{"state": "completed"}`. An error that the next
    request would meet too, such as an unknown execution, is the event `error` before it; `open()` of the stream raises
    it before the response begins. After an outage or a `timeout` the body just ends, and the browser connects again.
    """
    if isinstance(items, AsyncIterator):
        return _async_events(items)
    if isinstance(items, Iterator):
        return _events(items)
    raise InvalidInput(f"got {type(items).__name__}", field="items", allowed="run.stream() or flow_run.stream()")


async def _async_events(items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]:
    reader: Any = items
    try:
        async for item in items:
            yield event(item, getattr(reader, "cursor", None))
        yield end(await reader.state() if hasattr(reader, "state") else None)
    except FlowFabricError as error:
        if (last := _last(error)) is not None:
            yield last
    finally:
        if hasattr(reader, "aclose"):  # the browser left
            await reader.aclose()


def _events(items: Iterator[StreamItem]) -> Iterator[bytes]:
    reader: Any = items
    try:
        for item in items:
            yield event(item, getattr(reader, "cursor", None))
        yield end(reader.state() if hasattr(reader, "state") else None)
    except FlowFabricError as error:
        if (last := _last(error)) is not None:
            yield last
    finally:
        if hasattr(reader, "close"):
            reader.close()


def _last(error: FlowFabricError) -> bytes | None:
    """Return the last events after an error; None if the browser should connect again."""
    if isinstance(error, TimedOut):
        return None
    if not isinstance(error, InvalidInput | NotFound):
        log.warning("a response ends: %s", error)
    return None if error.retryable or isinstance(error, Unavailable) else error_event(error) + end()
