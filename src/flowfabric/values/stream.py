"""Streams: what an attempt emits while it works. Frames as they are submitted and read, cursors, summary documents."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import quoted

FrameKind: TypeAlias = Literal["stdout", "stderr", "event", "blob"]
DurabilityMode: TypeAlias = Literal["buffered", "durable"]
Visibility: TypeAlias = Literal["all", "exclude_best_effort"]

MAX_FRAME: Final = 65_536
MAX_FRAME_TYPE: Final = 128
MAX_PATCH_DEPTH: Final = 16
NULL_SENTINEL: Final = "__ff_null__"
"""In a summary patch: a value that is null in the document. A plain null deletes the key."""

SUMMARY_DELTA: Final = "summary_delta"
RESERVED_TYPES: Final = ("end", "error", "gap", "new_attempt", "open", SUMMARY_DELTA)
"""Words that mean something else among server-sent events; `ctx.emit` refuses them as types."""

_POSITION: Final = re.compile(r"[0-9]+(-[0-9]+)?")
_LAST: Final = 2**63 - 1
_CURSORS: Final = "<ms> or <ms>-<n>, the id of a frame"


class Durable(Struct, frozen=True):
    """The frame is kept: the newest 10,000 of an attempt, or what `stream_policy.retention_maxlen` says."""


class DurableSummary(Struct, frozen=True):
    """The payload is a JSON merge patch for the attempt's summary document. The last 64 patches stay as frames."""

    patch_kind: Literal["json-merge-patch"] = "json-merge-patch"


class BestEffortLive(Struct, frozen=True, kw_only=True):
    """The frame is for readers that follow now. It may vanish any time, and is invisible after twice the `ttl`.

    The others adjust how many frames are kept: about two times the `ttl` at the current rate.
    """

    ttl: timedelta
    maxlen_floor: int = 64
    maxlen_ceiling: int = 16_384
    ema_alpha: float = 0.2


FrameMode: TypeAlias = Durable | DurableSummary | BestEffortLive


class NewFrame(Struct, frozen=True, kw_only=True):
    """A frame to append. `encoding` names the codecs of the payload.

    Workers number the frames of an attempt (`mark`), so that a frame sent again is not stored again; `type_mark` counts
    those of its mode and type that a re-run of the handler leaves out.
    """

    payload: bytes
    kind: FrameKind = "event"
    frame_type: str = ""
    correlation_id: str | None = None
    seq: int | None = None
    mode: FrameMode = Durable()
    encoding: str | None = None
    mark: int | None = None
    type_mark: int | None = None


class Appended(Struct, frozen=True, kw_only=True):
    """The frame is stored. `frame_count` is how many the stream ever got.

    `summary_version` is set for a summary, `maxlen_applied` for a best-effort frame: how many of these are kept now.
    """

    stream_id: str
    frame_count: int
    summary_version: int | None = None
    maxlen_applied: int | None = None


class Frame(Struct, frozen=True, kw_only=True):
    """A frame as it is read. `id` is its position in the stream of its attempt, `type` its type or else its kind.

    `number` counts the durable frames of the stream up to this one; None if that is not known.
    """

    id: str
    at: datetime
    type: str
    kind: str
    mode: Literal["durable", "summary", "best_effort"]
    payload: bytes
    encoding: str | None = None
    correlation_id: str | None = None
    seq: int | None = None
    summary_version: int | None = None
    ttl: timedelta | None = None
    attempt_index: int = 0
    node: str | None = None
    number: int | None = None

    @property
    def text(self) -> str:
        """The payload as text; bytes that are not UTF-8 are shown as escapes."""
        return self.payload.decode(errors="backslashreplace")

    def json(self) -> Any:
        """Decode the payload as JSON; `InvalidInput` if it is none."""
        try:
            return msgspec.json.decode(self.payload)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"not JSON: {error}", field="payload", allowed="a frame of JSON") from None

    @property
    def cursor(self) -> str:
        """Where to continue after this frame: the `after` of `run.stream`."""
        return run_cursor(self.attempt_index, self.id, self.number)

    @property
    def fields(self) -> dict[str, str]:
        """The frame as a map of texts, in the order of its keys, with bytes in base64."""
        try:
            payload, encoding = self.payload.decode(), "utf8"
        except UnicodeDecodeError:
            payload, encoding = base64.b64encode(self.payload).decode(), "base64"
        found = {
            "correlation_id": self.correlation_id,
            "encoding": encoding,
            "frame_type": self.type,
            "mode": self.mode,
            "payload": payload,
            "seq": None if self.seq is None else str(self.seq),
            "source": "worker",
            "summary_version": None if self.summary_version is None else str(self.summary_version),
            "ts": self.id.partition("-")[0],
            "ttl_ms": None if self.ttl is None else str(self.ttl // timedelta(milliseconds=1)),
        }
        return {name: value for name, value in found.items() if value is not None}


class StreamPage(Struct, frozen=True, kw_only=True):
    """Frames of one stream, and its state, from one moment. `attempts` and `has_ended` are of the execution.

    If the stream is closed and the page is not full, the reader has everything. The first `dropped` durable frames are
    no longer kept: a reader that has seen fewer missed the others.
    """

    frames: tuple[Frame, ...]
    closed_at: datetime | None
    closed_reason: str | None
    frame_count: int
    dropped: int
    maxlen_applied_last: int | None
    attempt_index: int
    attempts: int
    has_ended: bool
    is_known: bool


class Summary(Struct, frozen=True, kw_only=True):
    """The summary document of an attempt. `version` counts the patches that made it."""

    document_json: bytes
    version: int
    first_applied_at: datetime
    last_updated_at: datetime
    attempt_index: int
    patch_kind: Literal["json-merge-patch"] = "json-merge-patch"

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.document_json)
        return found


class NewAttempt(Struct, frozen=True, kw_only=True):
    """In `run.stream()`: what follows was emitted by another attempt; `reason` is why the one before closed."""

    attempt_index: int
    reason: str | None
    node: str | None = None

    @property
    def cursor(self) -> str:
        return f"{self.attempt_index}/0-0"


class Gap(Struct, frozen=True, kw_only=True):
    """In `run.stream()`: frames are missing here, because newer ones displaced them before they were read.

    `missing` is how many; None if that is not known, and there may be none.
    """

    cursor: str
    missing: int | None
    node: str | None = None


class KeepAlive(Struct, frozen=True, kw_only=True):
    """In `run.stream(keep_alive=...)`: nothing was emitted for a while."""

    cursor: str


StreamItem: TypeAlias = Frame | NewAttempt | Gap | KeepAlive


class Position(Struct, frozen=True, order=True):
    """A position between the frames of a stream."""

    ms: int
    n: int

    @property
    def following(self) -> Position:
        """The lowest position above it."""
        if self.n < _LAST:
            return Position(self.ms, self.n + 1)
        return Position(self.ms + 1, 0) if self.ms < _LAST else END


START: Final = Position(0, 0)
END: Final = Position(_LAST, _LAST)
_NOWHERE: Final = Position(-1, 0)


def frame_time(ms: int) -> datetime:
    """Return the time that the first part of an id says."""
    return datetime.fromtimestamp(ms // 1000, UTC) + timedelta(milliseconds=ms % 1000)


def parse_position(value: object, field: str, *, upper: bool = False) -> Position:
    """Read `<ms>` or `<ms>-<n>`. A bare `<ms>` is its first frame, or all of them as an upper bound."""
    if not isinstance(value, str) or not _POSITION.fullmatch(value) or len(value) > 41:
        raise InvalidInput(f"got {quoted(value)}", field=field, allowed=_CURSORS)
    ms, has_n, n = value.partition("-")
    numbers = int(ms), int(n) if has_n else (_LAST if upper else 0)
    if max(numbers) >= 2**64:
        raise InvalidInput(f"got {quoted(value)}", field=field, allowed="numbers of at most 64 bits")
    return Position(min(numbers[0], _LAST), min(numbers[1], _LAST))


def parse_bound(value: object, field: str, *, upper: bool = False) -> Position:
    """Read one end of a range: `start`, `end`, or a position."""
    if value == "start":
        return _NOWHERE if upper else START
    if value == "end":
        return END
    return parse_position(value, field, upper=upper)


def run_cursor(attempt_index: int, position: str, number: int | None) -> str:
    """Write the cursor of `run.stream`: a position of an attempt, and the number of durable frames up to it."""
    return f"{attempt_index}/{position}" if number is None else f"{attempt_index}/{position}/{number}"


def parse_run_cursor(value: object, field: str = "after") -> tuple[int, Position, int | None]:
    """Read `<attempt>/<ms>-<n>` or `<attempt>/<ms>-<n>/<number>`, the cursor of `run.stream`."""
    parts = value.split("/") if isinstance(value, str) else []
    attempt, number = (parts[0], parts[2] if len(parts) == 3 else None) if len(parts) in (2, 3) else ("", None)
    if not _is_int(attempt) or not (number is None or _is_int(number)):
        raise InvalidInput(
            f"got {quoted(value)}", field=field, allowed="<attempt>/<ms>-<n>/<number>, the cursor of an item"
        )
    return int(attempt), parse_position(parts[1], field), None if number is None else int(number)


def _is_int(text: str) -> bool:
    """Whether it is a number of 31 bits."""
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31
