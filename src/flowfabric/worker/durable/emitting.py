"""The output of a handler: frames are buffered, and go to the database with the worker's next call.

They keep their order and are stored before the result, a failure or a pause of their handler. A handler that is faster
than the database waits. A handler that runs again after a wait emits the same frames again: those of each type are
counted, and as many as its attempt has already are left out. Frames emitted inside a step are stored every time the
step runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.engine.streams import check_frame
from flowfabric.errors import ExecutionNotActive, FlowFabricError, InvalidInput, LeaseLost, NotFound
from flowfabric.values.checks import escape_text
from flowfabric.values.durations import Duration, duration
from flowfabric.values.lease import HandleKind
from flowfabric.values.stream import (
    MAX_FRAME,
    RESERVED_TYPES,
    Appended,
    BestEffortLive,
    DurabilityMode,
    Durable,
    DurableSummary,
    FrameKind,
    FrameMode,
    NewFrame,
)
from flowfabric.worker.durable.order import in_order
from flowfabric.worker.durable.steps import in_step

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

MAX_FRAMES = 1000
MAX_BYTES = 1 << 20
_TTL = timedelta(seconds=10)
_ENCODER = msgspec.json.Encoder()


class Emission:
    """A frame on its way to the database. `stored` is set if the handler waits for the commit."""

    __slots__ = ("frame", "is_log", "running", "stored")

    def __init__(
        self,
        running: Running,
        frame: NewFrame,
        stored: asyncio.Future[None] | None = None,
        *,
        is_log: bool = False,
    ) -> None:
        self.running = running
        self.frame = frame
        self.stored = stored
        self.is_log = is_log


class Emitting:
    """The frames of one execution that are not stored yet, and the numbers of those that are."""

    __slots__ = (
        "_bytes",
        "_changed",
        "_dropped",
        "_error",
        "_known",
        "_mark",
        "_pending",
        "_running",
        "_sent",
        "_used",
    )

    def __init__(self, running: Running) -> None:
        self._running = running
        self._pending = 0
        self._sent = 0
        self._bytes = 0
        self._changed = asyncio.Event()
        self._dropped = 0  # log lines since the buffer is full
        self._error: FlowFabricError | None = None
        self._mark = 0
        self._used: Counter[tuple[str, str]] = Counter()
        self._known: dict[tuple[str, str], int] | None = None  # what the attempt has by mode and type; None: not read

    async def emit(self, frame: NewFrame, *, waits: bool) -> None:
        """Send a frame with the next call, unless an earlier run of the handler has."""
        running = self._running
        if self._known is None:
            await self._read_known()
        assert self._known is not None
        type_mark: int | None = None
        mark: int | None = None
        if not isinstance(frame.mode, BestEffortLive):
            if not in_step.get():
                key = ("summary" if isinstance(frame.mode, DurableSummary) else "durable", frame.frame_type)
                self._used[key] += 1
                type_mark = self._used[key]
                if type_mark <= self._known.get(key, 0):
                    return
            self._mark += 1
            mark = self._mark
        numbered = msgspec.structs.replace(frame, mark=mark, type_mark=type_mark)
        stored = running.loop.create_future() if waits else None
        self.put(Emission(running, numbered, stored))
        if stored is not None:
            await stored
        while self._pending >= MAX_FRAMES or self._bytes >= MAX_BYTES:
            self._changed.clear()
            await self._changed.wait()
            await running.check()
        self._raise()

    def put(self, emission: Emission) -> None:
        """Send a frame with the next call, whatever waits before it."""
        self._pending += 1
        self._sent += 1
        self._bytes += len(emission.frame.payload)
        self._running.worker.reports.emit(emission)

    def put_line(self, line: str, type: str, kind: FrameKind) -> None:  # noqa: A002 - as in the frame
        """Send a line of a log, if the buffer has room and the lease is held. A re-run of the handler repeats it."""
        if self._running.handle.lease_id not in self._running.worker.held:
            return
        if self._pending >= MAX_FRAMES or self._bytes >= MAX_BYTES:
            self._dropped += 1
            return
        self._put_dropped(type, kind)
        self._put_text(line, type, kind)

    def _put_dropped(self, type: str = "log", kind: FrameKind = "stderr") -> None:  # noqa: A002 - as in the frame
        """Say how many lines were dropped here."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._put_text(f"[{dropped} lines were dropped]", type, kind)

    def _put_text(self, line: str, type: str, kind: FrameKind) -> None:  # noqa: A002 - as in the frame
        running = self._running
        most = MAX_FRAME if running.worker.codecs.is_plain else MAX_FRAME // 2
        text = escape_text(line, most - 1) + "\n"
        frame = new_frame(running, text, type=type, kind=kind, correlation_id=None, mode=Durable())
        if self._known is not None or self._is_first_run:
            self._mark += 1
            frame = msgspec.structs.replace(frame, mark=self._mark)
        self.put(Emission(running, frame, is_log=True))

    @property
    def _is_first_run(self) -> bool:
        """Whether the attempt has no frames yet that an earlier run emitted."""
        return self._running.handle.kind is not HandleKind.RESUMED

    async def _read_known(self) -> None:
        running = self._running
        if self._is_first_run:
            self._known = {}
            return
        handle = running.handle
        mark, known = await running.worker.engine.count_emitted(handle.execution_id, handle.attempt_index)
        if self._known is None:  # by a concurrent task of the handler
            self._mark, self._known = mark, known

    def answered(self, emission: Emission, verdict: Appended | FlowFabricError | None) -> None:
        """A frame was stored, or refused."""
        self._pending -= 1
        self._bytes -= len(emission.frame.payload)
        if isinstance(verdict, FlowFabricError):
            if isinstance(verdict, LeaseLost | ExecutionNotActive | NotFound) or verdict.kind == "stream_closed":
                self._running.worker.handlers.lost(self._running, verdict)
            if not emission.is_log:
                self._error = self._error or verdict
        stored = emission.stored
        if stored is not None and not stored.done():
            stored.set_result(None)
        self._changed.set()

    async def flushed(self) -> None:
        """Wait until every frame so far is stored; raises the error of the first that was refused."""
        await self.settled()
        self._raise()

    async def settled(self) -> None:
        """Wait until every frame so far is stored or refused; a task that the handler left behind may emit more."""
        if self._running.handle.lease_id in self._running.worker.held:
            self._put_dropped()
        sent = self._sent
        while self._sent - self._pending < sent:
            self._changed.clear()
            await self._changed.wait()

    def restart(self) -> None:
        """The handler runs again from the top."""
        if self._known is not None:
            known = self._known
            self._known = {key: max(known.get(key, 0), self._used[key]) for key in {*known, *self._used}}
        self._used.clear()

    def _raise(self) -> None:
        if self._error is not None and not self._running.is_cancelled:
            error, self._error = self._error, None
            raise error


@in_order
async def emit(
    running: Running,
    data: Any,
    *,
    type: str,  # noqa: A002 - the word of the context
    kind: FrameKind | None,
    live: bool,
    ttl: Duration | None,
    correlation_id: str | None,
    durability_mode: DurabilityMode | None,
) -> None:
    """Emit text, bytes or a JSON value."""
    await _check(running)
    waits = _waits(running, durability_mode)
    if type in RESERVED_TYPES:
        raise InvalidInput(
            f"{type!r} has a meaning of its own among server-sent events",
            field="type",
            allowed=f"any other word than {', '.join(RESERVED_TYPES)}",
        )
    if not isinstance(live, bool):
        raise InvalidInput(f"got {live!r}", field="live", allowed="True or False")
    if live and durability_mode is not None:
        raise InvalidInput(
            "best-effort output is not stored durably", field="durability_mode", allowed="None with live=True"
        )
    if ttl is not None and not live:
        raise InvalidInput("is for best-effort output", field="ttl", allowed="None without live=True")
    mode: FrameMode = BestEffortLive(ttl=duration(_TTL if ttl is None else ttl, "ttl")) if live else Durable()
    frame = new_frame(running, data, type=type, kind=kind, correlation_id=correlation_id, mode=mode)
    await running.emitting.emit(frame, waits=waits)


@in_order
async def summarize(running: Running, patch: Any, *, plain: bool, durability_mode: DurabilityMode | None) -> None:
    """Merge a JSON object into the attempt's summary document."""
    await _check(running)
    if not running.worker.codecs.is_plain and plain is not True:
        raise InvalidInput(
            "the database merges summaries and cannot read what the app's codecs write",
            field="plain",
            allowed="True, to store this summary as plain JSON",
        )
    waits = _waits(running, durability_mode)
    if _has_nan(patch):
        # As JSON it would be a null, which deletes the key.
        raise InvalidInput("contains NaN or an infinite number", field="patch", allowed="finite numbers")
    frame = NewFrame(payload=_json(patch, "patch"), mode=DurableSummary())
    await running.emitting.emit(check_frame(frame), waits=waits)


async def _check(running: Running) -> None:
    """Refuse calls of a handler that was asked to stop, or has ended."""
    await running.check()
    if running.handle.lease_id not in running.worker.held:
        raise LeaseLost(detail="the handler has ended", execution_id=running.claimed.execution_id)


def _waits(running: Running, durability_mode: DurabilityMode | None) -> bool:
    """Whether to wait for the commit: as the call says, otherwise the execution's policy."""
    if durability_mode not in (None, "buffered", "durable"):
        raise InvalidInput(f"got {durability_mode!r}", field="durability_mode", allowed="buffered, durable")
    return (durability_mode or running.claimed.durability_mode) == "durable"


def emit_soon(running: Running, line: str, type: str, kind: FrameKind) -> None:  # noqa: A002 - as in the frame
    """Emit a line from any thread without waiting; it is dropped while the buffer is full. For logs.

    What a frame cannot hold is escaped, or cut off.
    """
    try:
        is_here = asyncio.get_running_loop() is running.loop
    except RuntimeError:
        is_here = False
    if is_here:  # in its place among other emissions, and before the handler ends
        _put_line(running, line, type, kind)
    else:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            running.loop.call_soon_threadsafe(_put_line, running, line, type, kind)


def _put_line(running: Running, line: str, type: str, kind: FrameKind) -> None:  # noqa: A002 - as in the frame
    running.emitting.put_line(line, type, kind)


def new_frame(
    running: Running,
    data: Any,
    *,
    type: str,  # noqa: A002 - the word of the context
    kind: FrameKind | None,
    correlation_id: str | None,
    mode: FrameMode,
) -> NewFrame:
    """Return the frame for what a handler emits, as it is stored."""
    if isinstance(data, str):
        payload, own_kind = _text(data), "stdout"
    elif isinstance(data, bytes | bytearray | memoryview):
        payload, own_kind = bytes(data), "blob"
    else:
        if _has_nan(data):
            raise InvalidInput("contains NaN or an infinite number", field="data", allowed="finite numbers")
        payload, own_kind = _json(data, "data"), "event"
    codecs, encoding = running.worker.codecs, None
    if not codecs.is_plain:
        payload, encoding = codecs.seal(payload, running.claimed.execution_id)
    return check_frame(
        NewFrame(
            payload=payload,
            kind=own_kind if kind is None else kind,  # type: ignore[arg-type]  # one of the words
            frame_type=type,
            correlation_id=correlation_id,
            mode=mode,
            encoding=encoding,
        )
    )


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("contains a lone surrogate", field="data", allowed="valid Unicode text") from None


def _json(value: Any, field: str) -> bytes:
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"cannot be written as JSON: {error}", field=field, allowed="text, bytes or JSON") from None


def _has_nan(value: Any) -> bool:
    """Whether it contains a number that JSON cannot hold."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_nan, value))
