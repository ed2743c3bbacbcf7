"""Streams: what attempts emit while they work, and the summary documents they keep."""

from __future__ import annotations

import base64
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from flowfabric.contracts.codecs import CannotDecode
from flowfabric.contracts.json_form import to_json
from flowfabric.errors import NotFound
from flowfabric.server.call import Answer, Call, EventStream
from flowfabric.server.limits import more_time
from flowfabric.server.members import Limit, named, span
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.server.sse import StreamFeed
from flowfabric.server.visible import check_payloads, open_each, size_of
from flowfabric.values.stream import Frame, StreamPage, Visibility


class ReadStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """Both ends are included: `start`, `end`, the id of a frame, or its milliseconds."""

    from_: str = "start"
    to: str = "end"
    limit: Limit = 100
    visibility: Visibility = "all"


class TailStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frames after the id `after`; `block_seconds` is how long to wait for the first, at most 30."""

    after: str = "0-0"
    block_seconds: Annotated[float, Meta(ge=0, le=30)] = 0
    limit: Limit = 50
    visibility: Visibility = "all"


class FollowStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after` is the id of an event of this stream, where to continue."""

    after: str | None = None
    visibility: Visibility = "all"


class ShownFrame(Struct, frozen=True, kw_only=True):
    """A frame. `payload` is text, or an object with `base64`, and with `encoding` if the app's codecs wrote it."""

    id: str
    at: datetime
    type: str
    kind: str
    mode: Literal["durable", "summary", "best_effort"]
    payload: Any
    correlation_id: str | None
    seq: int | None
    summary_version: int | None
    ttl: timedelta | None
    number: int | None


class Frames(Struct, frozen=True, kw_only=True):
    """Frames of one attempt. If `closed_at` is set and the page is not full, the reader has everything.

    `frame_count` is how many frames the stream ever got; the first `dropped` durable ones are no longer kept.
    """

    frames: tuple[ShownFrame, ...]
    closed_at: datetime | None
    closed_reason: str | None
    frame_count: int
    dropped: int


class SummaryDocument(Struct, frozen=True, kw_only=True):
    """The summary document of an attempt; `version` counts the patches that made it."""

    attempt_index: int
    version: int
    document: dict[str, Any]
    first_applied_at: datetime
    last_updated_at: datetime


async def read_stream(call: Call) -> Frames:
    """Read frames of an attempt between two ids, without waiting."""
    asked: ReadStream = call.query
    check_payloads(call)
    with named(from_cursor="from", to_cursor="to"):
        page = await call.engine.read_stream(
            call.path["execution_id"], call.path["attempt"], asked.from_, asked.to, asked.limit, asked.visibility
        )
    return await _shown(call, page)


async def tail_stream(call: Call) -> Frames:
    """Wait for frames of an attempt after an id: a long poll.

    It returns as soon as there is a frame, the stream is closed, the time has passed, or the server stops.
    """
    asked: TailStream = call.query
    check_payloads(call)
    block = span(asked.block_seconds, "block_seconds")
    more_time(call.scope, asked.block_seconds)

    async def tail(block: timedelta) -> StreamPage:
        with named(block="block_seconds"):
            return await call.engine.tail_stream(
                call.path["execution_id"], call.path["attempt"], asked.after, block, asked.limit, asked.visibility
            )

    page = await call.service.clients.unless_draining(tail(block))
    return await _shown(call, page if page is not None else await tail(timedelta(0)))


async def follow_stream(call: Call) -> Answer:
    """Follow the frames of an attempt as server-sent events.

    The data of an event is the text of a frame (base64 if it is not text), and its name the frame's `type`. Frames that
    the task emitted without a type have no name; `EventSource` receives them as `message`. A change of the summary is
    `summary_delta`. Without `Last-Event-ID` or `after` the first frame that is kept comes first. The id of an event is
    not the id of its frame: only this operation takes it. `gap`: frames are missing here, because newer ones displaced
    them. `end`: the stream is closed, and another connection with the id of this event gets 204. `bye`: the server
    stops; connect again. A comment comes every 15 seconds.
    """
    asked: FollowStream = call.query
    check_payloads(call)
    feed = StreamFeed(
        call.service.clients,
        call.service.engine,
        call.path["execution_id"],
        call.path["attempt"],
        after=call.request.headers.get("last-event-id") or asked.after,
        live=asked.visibility == "all",
        codecs=call.service.codecs,
        opening=call.service.opening,
    )
    if not await feed.open():
        return Answer(status=204)
    return Answer(body=EventStream(pieces=feed))


async def read_summary(call: Call) -> SummaryDocument:
    """Read the summary document of an attempt. Not found if the attempt keeps none."""
    check_payloads(call)
    found = await call.engine.read_summary(call.path["execution_id"], call.path["attempt"])
    if found is None:
        raise NotFound("summary", call.path["execution_id"])
    return SummaryDocument(
        attempt_index=found.attempt_index,
        version=found.version,
        document=found.document,
        first_applied_at=found.first_applied_at,
        last_updated_at=found.last_updated_at,
    )


async def _shown(call: Call, page: StreamPage) -> Frames:
    if not page.is_known:
        raise NotFound("execution", call.path["execution_id"])
    return Frames(
        frames=tuple(
            await open_each(call, page.frames, lambda one: _frame(call, one), lambda one: size_of(one.payload))
        ),
        closed_at=page.closed_at,
        closed_reason=page.closed_reason,
        frame_count=page.frame_count,
        dropped=page.dropped,
    )


def _frame(call: Call, frame: Frame) -> ShownFrame:
    return ShownFrame(
        id=frame.id,
        at=frame.at,
        type=frame.type,
        kind=frame.kind,
        mode=frame.mode,
        payload=_payload(call, frame),
        correlation_id=frame.correlation_id,
        seq=frame.seq,
        summary_version=frame.summary_version,
        ttl=frame.ttl,
        number=frame.number,
    )


def _payload(call: Call, frame: Frame) -> Any:
    data, encoding = frame.payload, frame.encoding
    codecs = call.service.codecs
    if codecs is not None and frame.mode != "summary":
        try:
            data, encoding = codecs.open(data, encoding, call.path["execution_id"]), None
        except CannotDecode as error:
            return {"base64": base64.b64encode(data).decode(), "encoding": encoding, "problem": error.problem}
    if encoding is not None:
        return {"base64": base64.b64encode(data).decode(), "encoding": encoding}
    return to_json(data)


OPERATIONS = (
    Operation(
        method="GET", path="/v1/executions/{execution_id}/attempts/{attempt}/stream", handler=read_stream,
        engine=("read_stream", "read_streams", "read_last_frames"), scope=Scope.READ, within=Within.EXECUTION,
        query=ReadStream, answers={200: Frames}, etag=True,
    ),
    Operation(
        method="GET", path="/v1/executions/{execution_id}/attempts/{attempt}/stream/tail", handler=tail_stream,
        engine=("tail_stream",), scope=Scope.READ, within=Within.EXECUTION, query=TailStream, answers={200: Frames},
        no_store=True,
    ),
    Operation(
        method="GET", path="/v1/executions/{execution_id}/attempts/{attempt}/stream/events", handler=follow_stream,
        scope=Scope.READ, within=Within.EXECUTION, query=FollowStream, answers={200: str, 204: None},
        media="text/event-stream", streams=True, no_store=True,
    ),
    Operation(
        method="GET", path="/v1/executions/{execution_id}/attempts/{attempt}/summary", handler=read_summary,
        engine=("read_summary",), scope=Scope.READ, within=Within.EXECUTION, answers={200: SummaryDocument}, etag=True,
    ),
)  # fmt: skip
