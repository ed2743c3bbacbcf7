"""Streams: append frames, read and tail them, read summary documents."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, get_args

import msgspec

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.batch import Batch, Fences, raised, used
from flowfabric.engine.checks import ESCAPED_NUL, check_batch, check_duration, check_int, check_word
from flowfabric.engine.tails import Tails, Waiter
from flowfabric.errors import FlowFabricError, InvalidInput, ValidationFailed
from flowfabric.values.checks import check_text, quoted
from flowfabric.values.ids import ExecutionId, parse_execution_id
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.stream import (
    END,
    MAX_FRAME,
    MAX_FRAME_TYPE,
    MAX_PATCH_DEPTH,
    Appended,
    BestEffortLive,
    Durable,
    DurableSummary,
    Frame,
    FrameKind,
    NewFrame,
    Position,
    StreamPage,
    Summary,
    Visibility,
    parse_bound,
    parse_position,
)

MAX_COUNT = 10_000
MAX_BLOCK = timedelta(seconds=30)
_MAX_NESTING = 64


class Streams(Operations):
    """append_frame, append_frames, read_stream, tail_stream, read_streams, read_last_frames, read_summary."""

    @property
    def tails(self) -> Tails:
        """Waits for frames of any number of streams at once; not limited by the permits of `tail_stream`."""
        return self._tails

    async def append_frame(self, authority: Handle | Fence, frame: NewFrame) -> Appended | None:
        """Append one frame to the stream of the attempt that the authority holds. None if its `mark` is known.

        Not idempotent without a `mark`: after a lost connection a repetition may store the frame twice.
        """
        (answer,) = await self.append_frames([(authority, frame)])
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def append_frames(
        self, items: Sequence[tuple[Handle | Fence, NewFrame]]
    ) -> list[Appended | FlowFabricError | None]:
        """Append up to 1,000 frames to any streams in one call; one verdict per item. See `append_frame`."""
        check_batch(items)
        batch = Batch(items, _frame_columns, self._database.flow_partitions)
        if batch.is_empty:
            return batch.verdicts([])
        fences, holders, columns, is_marked = batch.ready
        found = await self._fetch(statements.APPEND_FRAMES, *fences.columns, holders, *columns, repeatable=is_marked)
        answers: list[Appended | FlowFabricError | None] = [
            rows.appended(row) if row["code"] in ("ok", "known") else raised(row, fences.execution_id(holder - 1))
            for holder, row in zip(holders, rows.by_place(found, len(holders)), strict=True)
        ]
        return batch.verdicts(answers)

    async def read_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int = 0,
        from_cursor: str = "start",
        to_cursor: str = "end",
        count_limit: int = 100,
        visibility: Visibility = "all",
    ) -> StreamPage:
        """Return up to `count_limit` frames between two cursors, both included, without waiting.

        A cursor is `start`, `end`, `<ms>-<n>` (the id of a frame) or `<ms>`. An unknown execution or attempt is an
        empty, open stream.
        """
        span = parse_bound(from_cursor, "from_cursor"), parse_bound(to_cursor, "to_cursor", upper=True)
        asked = _asked(execution_id, attempt_index, count_limit, visibility)
        with self._stream_ops.one():
            return await self._read_one(asked, *span)

    async def tail_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int = 0,
        after: str = "0-0",
        block: timedelta = timedelta(0),
        count_limit: int = 50,
        visibility: Visibility = "all",
    ) -> StreamPage:
        """Return frames above `after`, waiting up to `block` (at most 30 s) for the first, or until the stream closes.

        A waiting call holds no connection.
        """
        begin = parse_position(after, "after").following
        span = check_duration(block, "block", least_ms=0, most=MAX_BLOCK) / 1000
        asked = _asked(execution_id, attempt_index, count_limit, visibility)
        with self._stream_ops.one():
            begun = time.monotonic()
            page = await self._read_one(asked, begin, END)
            left = begun + span - time.monotonic()
            if _has_news(page) or left <= 0:
                return page
            execution_id, attempt, limit, live = asked
            waiter = Waiter(execution_id, attempt, begin, limit, live, _has_news)
            return await self._tails.wait(waiter, left) or page

    async def _read_one(self, asked: tuple[ExecutionId, int, int, bool], begin: Position, end: Position) -> StreamPage:
        execution_id, attempt, limit, live = asked
        (page,) = await self._read_streams([(execution_id, attempt, begin, end)], limit, live)
        return page

    async def read_streams(
        self,
        items: Sequence[tuple[ExecutionId, int | None, Position]],
        *,
        count_limit: int = 100,
        visibility: Visibility = "all",
    ) -> list[StreamPage]:
        """Read up to 1,000 streams in one call, each from a position on. An attempt of None is the latest."""
        check_batch(items)
        asked = []
        for item in items:
            if not isinstance(item, tuple) or len(item) != 3 or not isinstance(item[2], Position):
                raise InvalidInput(f"got {item!r}", field="items", allowed="(execution id, attempt or None, Position)")
            attempt = None if item[1] is None else check_int(item[1], "attempt_index", 0, 2**31 - 1)
            asked.append((parse_execution_id(item[0]), attempt, item[2], END))
        if not asked:
            return []
        return await self._read_streams(asked, *_wanted(count_limit, visibility))

    async def _read_streams(
        self, items: Sequence[tuple[ExecutionId, int | None, Position, Position]], limit: int, live: bool
    ) -> list[StreamPage]:
        found = await self._fetch(
            statements.READ_STREAMS,
            *self._all_at([item[0] for item in items]),
            [item[1] for item in items],
            [item[2].ms for item in items],
            [item[2].n for item in items],
            [item[3].ms for item in items],
            [item[3].n for item in items],
            limit,
            live,
            repeatable=True,
        )
        return rows.stream_pages(found, len(items))

    async def read_summary(self, execution_id: ExecutionId, attempt_index: int | None = None) -> Summary | None:
        """Return the summary document of an attempt, by default of the latest; None if it has none."""
        attempt = None if attempt_index is None else check_int(attempt_index, "attempt_index", 0, 2**31 - 1)
        target = parse_execution_id(execution_id)
        found = await self._fetch(statements.READ_STREAM_SUMMARY, *self._at(target), attempt, repeatable=True)
        return rows.stream_summary(found[0]) if found else None

    async def read_last_frames(
        self, execution_ids: Sequence[ExecutionId], *, count_limit: int = 5
    ) -> dict[ExecutionId, list[Frame]]:
        """Return the newest durable frames of the latest attempts of up to 1,000 executions, in order."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        limit = check_int(count_limit, "count_limit", 1, MAX_COUNT)
        found = await self._fetch(statements.READ_LAST_FRAMES, *self._all_at(targets), limit, repeatable=True)
        frames: dict[ExecutionId, list[Frame]] = {}
        for row in found:
            frames.setdefault(targets[row["ordinal"] - 1], []).append(rows.frame(row, row["attempt_index"]))
        return frames

    async def count_emitted(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> tuple[int, dict[tuple[str, str], int]]:
        """Return the last mark of an attempt's stream, and the last type mark of each mode and type."""
        target = parse_execution_id(execution_id)
        attempt = check_int(attempt_index, "attempt_index", 0, 2**31 - 1)
        found = await self._fetch(statements.COUNT_EMITTED, *self._at(target), attempt, repeatable=True)
        counts = {(row["mode"], row["frame_type"]): row["type_marks"] for row in found if row["type_marks"] is not None}
        return max((row["marks"] for row in found), default=0), counts


def _has_news(page: StreamPage) -> bool:
    return bool(page.frames) or page.closed_at is not None


_KINDS = frozenset(get_args(FrameKind))
_VISIBILITIES = frozenset(get_args(Visibility))
_MODES = {Durable: None, DurableSummary: "summary", BestEffortLive: "best_effort"}


def _wanted(count_limit: object, visibility: object) -> tuple[int, bool]:
    """Return how many frames of a stream, and whether best-effort ones are among them."""
    limit = check_int(count_limit, "count_limit", 1, MAX_COUNT)
    return limit, check_word(visibility, _VISIBILITIES, "visibility") == "all"


def _asked(
    execution_id: object, attempt_index: object, count_limit: object, visibility: object
) -> tuple[ExecutionId, int, int, bool]:
    attempt = check_int(attempt_index, "attempt_index", 0, 2**31 - 1)
    return parse_execution_id(execution_id), attempt, *_wanted(count_limit, visibility)


def _frame_columns(
    items: Sequence[tuple[Handle | Fence, NewFrame]], count: int
) -> tuple[Fences, list[int], tuple[list[Any] | None, ...], bool]:
    """Return the fences of the holders, the number of the holder of each frame, and the other columns."""
    numbers: dict[int, int] = {}
    holders: list[int] = []
    authorities: list[Handle | Fence] = []
    frames: list[NewFrame] = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], NewFrame):
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="(Handle or Fence, NewFrame)")
        number = numbers.get(id(item[0]))
        if number is None:
            authorities.append(item[0])
            number = numbers[id(item[0])] = len(authorities)
        holders.append(number)
        frames.append(check_frame(item[1]))
    lives = [frame.mode if isinstance(frame.mode, BestEffortLive) else None for frame in frames]
    has_lives = any(live is not None for live in lives)
    return (
        Fences(authorities, count),
        holders,
        (
            [frame.payload for frame in frames],
            used([_MODES[type(frame.mode)] for frame in frames]),
            used([None if frame.kind == "event" else frame.kind for frame in frames]),
            used([frame.frame_type or None for frame in frames]),
            used([frame.encoding for frame in frames]),
            used([frame.correlation_id for frame in frames]),
            used([frame.seq for frame in frames]),
            used([frame.mark for frame in frames]),
            used([frame.type_mark for frame in frames]),
            [None if live is None else live.ttl // timedelta(milliseconds=1) for live in lives] if has_lives else None,
            [None if live is None else live.maxlen_floor for live in lives] if has_lives else None,
            [None if live is None else live.maxlen_ceiling for live in lives] if has_lives else None,
            [None if live is None else live.ema_alpha for live in lives] if has_lives else None,
        ),
        all(frame.mark is not None for frame in frames),
    )


def check_frame(frame: NewFrame) -> NewFrame:
    """Check a frame before it is sent. Raises `InvalidInput`, or `ValidationFailed` for one that is too large."""
    if not isinstance(frame.payload, bytes):
        raise InvalidInput(f"got {type(frame.payload).__name__}", field="payload", allowed="bytes")
    if len(frame.payload) > MAX_FRAME:
        raise ValidationFailed(
            "retention_limit_exceeded", f"the payload is {len(frame.payload)} bytes long; allowed: {MAX_FRAME}"
        )
    check_word(frame.kind, _KINDS, "kind")
    check_text(frame.frame_type, "frame_type", MAX_FRAME_TYPE)
    if frame.correlation_id is not None:
        check_text(frame.correlation_id, "correlation_id")
    if frame.encoding is not None:
        check_text(frame.encoding, "encoding")
    if frame.seq is not None:
        check_int(frame.seq, "seq", -(2**63), 2**63 - 1)
    for field in ("mark", "type_mark"):
        if getattr(frame, field) is not None:
            check_int(getattr(frame, field), field, 1, 2**31 - 1)
    match frame.mode:
        case Durable():
            pass
        case DurableSummary():
            if frame.mode.patch_kind != "json-merge-patch":
                raise InvalidInput(f"got {frame.mode.patch_kind!r}", field="patch_kind", allowed="json-merge-patch")
            check_patch(frame.payload)
        case BestEffortLive():
            check_duration(frame.mode.ttl, "ttl", least_ms=0)
            check_int(frame.mode.maxlen_floor, "maxlen_floor", -(2**31), 2**31 - 1)
            check_int(frame.mode.maxlen_ceiling, "maxlen_ceiling", -(2**31), 2**31 - 1)
            _check_number(frame.mode.ema_alpha, "ema_alpha")
        case _:
            raise InvalidInput(
                f"got {type(frame.mode).__name__}", field="mode", allowed="Durable, DurableSummary or BestEffortLive"
            )
    return frame


def _check_number(value: object, field: str) -> None:
    """Check that the database can hold a number; one out of range is replaced there."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            float(value)
            return
    raise InvalidInput(f"got {quoted(value)}", field=field, allowed="a number")


def check_patch(payload: bytes) -> None:
    """Check that bytes are a JSON merge patch that the database can hold and merge."""
    try:
        patch = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error}", field="patch", allowed="a JSON object") from None
    if not isinstance(patch, dict):
        raise InvalidInput(f"got a JSON {type(patch).__name__}", field="patch", allowed="a JSON object")
    if ESCAPED_NUL.search(payload.decode()):
        raise InvalidInput("contains NUL", field="patch", allowed="text without NUL")
    open_values: list[tuple[Any, int, int]] = [(patch, 0, 0)]
    while open_values:
        value, objects, depth = open_values.pop()
        if objects > MAX_PATCH_DEPTH or depth > _MAX_NESTING:
            raise InvalidInput(
                "patch_depth_exceeded", field="patch", allowed=f"objects nested at most {MAX_PATCH_DEPTH} deep"
            )
        inner = value.values() if isinstance(value, dict) else value
        open_values += [
            (one, objects + isinstance(one, dict), depth + 1) for one in inner if isinstance(one, dict | list)
        ]
