"""Cursors of streams and the texts of frames: pure functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flowfabric.bridges import sse
from flowfabric.engine.streams import check_frame, check_patch
from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.values.stream import (
    END,
    START,
    BestEffortLive,
    DurableSummary,
    Frame,
    KeepAlive,
    NewAttempt,
    NewFrame,
    Position,
    frame_time,
    parse_bound,
    parse_position,
    parse_run_cursor,
)
from tests.each import each

LAST = 2**63 - 1


@each(
    ("text", "lower", "upper"),
    [
        ("start", START, Position(-1, 0)),
        ("end", END, END),
        ("0-0", Position(0, 0), Position(0, 0)),
        ("17", Position(17, 0), Position(17, LAST)),
        ("17-3", Position(17, 3), Position(17, 3)),
        ("0017-03", Position(17, 3), Position(17, 3)),
        (f"{2**64 - 1}-{2**64 - 1}", END, END),
    ],
)
def test_a_cursor_is_a_bound_of_a_range(text: str, lower: Position, upper: Position) -> None:
    assert (parse_bound(text, "from"), parse_bound(text, "to", upper=True)) == (lower, upper)


NO_POSITIONS: list[Any] = [
    "", "-", "+", "start", "end", " 1", "1 ", "1\n", "-1", "+1", "1-", "-1-1", "1--1", "1-+1", "1-1-1", "1.0", "0x1",
    "a", "1_0", "\u0661", "1-\u0661", "\0", "\ud800", str(2**64), f"1-{2**64}", "9" * 60, None, 5, b"1", [], 1.5,
]  # fmt: skip


@each("text", NO_POSITIONS)
def test_anything_else_is_no_position(text: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_position(text, "after")
    assert caught.value.field == "after"


@each("text", [*NO_POSITIONS, "1-1", "/1-1", "1/", "-1/1-1", "\u0661/1-1", f"{2**31}/1", "1/start", "1/1/1"])
def test_a_cursor_of_a_run_names_the_attempt(text: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_run_cursor(text)


def test_a_cursor_of_a_run_is_read() -> None:
    assert parse_run_cursor("3/17-4") == (3, Position(17, 4))


@each(
    ("position", "following"),
    [
        (Position(1, 2), Position(1, 3)),
        (Position(1, LAST), Position(2, 0)),
        (END, END),
    ],
)
def test_the_lowest_place_above_a_position(position: Position, following: Position) -> None:
    assert position.following == following


def test_the_id_of_a_frame_says_its_time() -> None:
    assert frame_time(1_700_000_000_123) == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)


def test_a_frame_is_a_map_of_texts_in_the_order_of_its_keys() -> None:
    frame = Frame(
        id="17-3", at=frame_time(17), type="delta", kind="event", mode="best_effort", payload=b"hi", correlation_id="c",
        seq=5, ttl=timedelta(seconds=5), attempt_index=2,
    )  # fmt: skip
    assert list(frame.fields.items()) == [
        ("correlation_id", "c"), ("encoding", "utf8"), ("frame_type", "delta"), ("mode", "best_effort"),
        ("payload", "hi"), ("seq", "5"), ("source", "worker"), ("ts", "17"), ("ttl_ms", "5000"),
    ]  # fmt: skip
    assert frame.cursor == "2/17-3"


def test_bytes_that_are_no_text_are_base64_in_the_map_only() -> None:
    frame = Frame(id="1-0", at=frame_time(1), type="blob", kind="blob", mode="durable", payload=b"\xff\x00")
    assert (frame.fields["payload"], frame.fields["encoding"]) == ("/wA=", "base64")
    assert frame.payload == b"\xff\x00"


def nested(depth: int) -> bytes:
    """An object in which objects are nested so deep; the root has depth 0."""
    return b'{"a":' * depth + b"{}" + b"}" * depth


@each("patch", [b"{}", b'{"a":[[[1]]]}', nested(16), b'{"a":' + b"[" * 60 + b"]" * 60 + b"}"])
def test_an_object_is_a_patch(patch: bytes) -> None:
    check_patch(patch)


@each(
    "patch",
    [
        b"", b"[]", b"5", b'"a"', b"null", b"true", b"{", b"{} {}", b"\xff", b'{"a":"\\u0000"}', b'{"\\u0000":1}',
        nested(17), b'{"a":[' + nested(16) + b"]}", b'{"a":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
)  # fmt: skip
def test_anything_else_is_no_patch(patch: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_patch(patch)
    assert caught.value.field == "patch"


def test_a_frame_of_65536_bytes_is_accepted_and_one_more_is_not() -> None:
    check_frame(NewFrame(payload=bytes(65_536)))
    with pytest.raises(ValidationFailed) as caught:
        check_frame(NewFrame(payload=bytes(65_537)))
    assert caught.value.kind == "retention_limit_exceeded"


@each(
    ("fields", "field"),
    [
        ({"payload": "text"}, "payload"),
        ({"kind": "log"}, "kind"),
        ({"kind": []}, "kind"),
        ({"frame_type": "x" * 129}, "frame_type"),
        ({"frame_type": "\0"}, "frame_type"),
        ({"frame_type": "\ud800"}, "frame_type"),
        ({"correlation_id": "x" * 257}, "correlation_id"),
        ({"seq": "5"}, "seq"),
        ({"seq": 2**63}, "seq"),
        ({"mark": 0}, "mark"),
        ({"mode": "durable"}, "mode"),
        ({"mode": BestEffortLive(ttl=timedelta(seconds=-1))}, "ttl"),
        ({"mode": BestEffortLive(ttl=5)}, "ttl"),  # type: ignore[arg-type]
        ({"mode": BestEffortLive(ttl=timedelta(1), maxlen_floor="a")}, "maxlen_floor"),  # type: ignore[arg-type]
        ({"mode": BestEffortLive(ttl=timedelta(1), maxlen_ceiling=1.5)}, "maxlen_ceiling"),  # type: ignore[arg-type]
        ({"mode": BestEffortLive(ttl=timedelta(1), ema_alpha="a")}, "ema_alpha"),  # type: ignore[arg-type]
        ({"mode": BestEffortLive(ttl=timedelta(1), ema_alpha=10**400)}, "ema_alpha"),
        ({"payload": b"[]", "mode": DurableSummary()}, "patch"),
        ({"payload": b"{}", "mode": DurableSummary(patch_kind="other")}, "patch_kind"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_field_of_a_frame_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_frame(NewFrame(**{"payload": b"", **fields}))
    assert caught.value.field == field


def test_items_are_server_sent_events() -> None:
    frame = Frame(id="5-1", at=None, type="delta\nx", kind="event", mode="durable", payload=b"a\r\nb\rc\n")  # type: ignore[arg-type]
    assert sse.event(frame) == b"id: 0/5-1\nevent: deltax\ndata: a\ndata: b\ndata: c\ndata: \n\n"
    assert sse.event(NewAttempt(attempt_index=2, reason="reclaimed")) == (
        b'id: 2/0-0\nevent: new_attempt\ndata: {"attempt":2,"reason":"reclaimed"}\n\n'
    )
    assert sse.event(KeepAlive(cursor="0/1-0")) == b": keep-alive\n\n"
