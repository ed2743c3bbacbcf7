"""Cursors of streams and the texts of frames: pure functions."""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flowfabric.bridges import sse
from flowfabric.client.following import read_cursors, write_cursors
from flowfabric.engine.streams import check_frame, check_patch
from flowfabric.errors import InvalidInput, NotFound, TimedOut, TransportError, Unavailable, ValidationFailed
from flowfabric.values.stream import (
    END,
    START,
    BestEffortLive,
    DurableSummary,
    Frame,
    Gap,
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


@each(
    "text",
    [
        *NO_POSITIONS,
        "1-1",
        "/1-1",
        "1/",
        "-1/1-1",
        "\u0661/1-1",
        f"{2**31}/1",
        "1/start",
        "1/1/1/1",
        "1/1/x",
        f"1/1/{2**31}",
        "1/1/",
    ],
)
def test_a_cursor_of_a_run_names_the_attempt(text: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_run_cursor(text)


def test_a_cursor_of_a_run_is_read() -> None:
    assert parse_run_cursor("3/17-4") == (3, Position(17, 4), None)
    assert parse_run_cursor("3/17-4/12") == (3, Position(17, 4), 12)


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


def frame_of(type: str, **fields: Any) -> Frame:  # noqa: A002 - the word of the frame
    given = {"id": "5-1", "at": None, "kind": "event", "mode": "durable", "payload": b"x", **fields}
    return Frame(type=type, **given)


@each(
    ("item", "expected"),
    [
        (frame_of("delta\nx", payload=b"a\r\nb\rc\n"), "id: 0/5-1|event: deltax|data: a|data: b|data: c|data: ||"),
        (frame_of("delta", number=7), "id: 0/5-1/7|event: delta|data: x||"),
        (frame_of("stdout", kind="stdout"), "id: 0/5-1|data: x||"),
        (frame_of("end"), "id: 0/5-1|data: x||"),
        (frame_of("event", mode="summary"), "id: 0/5-1|event: summary_delta|data: x||"),
        (frame_of("delta", node="a"), 'id: 0/5-1|event: delta|data: {"node":"a","text":"x"}||'),
        (NewAttempt(attempt_index=2, reason="reclaimed"),
         'id: 2/0-0|event: new_attempt|data: {"attempt":2,"reason":"reclaimed"}||'),
        (NewAttempt(attempt_index=2, reason="reclaimed", node="a"),
         'id: 2/0-0|event: new_attempt|data: {"node":"a","attempt":2,"reason":"reclaimed"}||'),
        (Gap(cursor="0/1-0/5", missing=3), 'id: 0/1-0/5|event: gap|data: {"missing":3}||'),
        (KeepAlive(cursor="0/1-0"), ": keep-alive||"),
    ],
)  # fmt: skip
def test_items_are_server_sent_events(item: Any, expected: str) -> None:
    assert sse.event(item).decode().replace("\n", "|") == expected


def test_the_end_says_how_the_execution_ended() -> None:
    assert sse.end("failed") == b'event: end\ndata: {"state":"failed"}\n\n'
    assert sse.end() == b"event: end\ndata: {}\n\n"


def test_anything_but_items_is_refused_at_the_call() -> None:
    with pytest.raises(InvalidInput, match=r"run\.stream"):
        sse.events(object())  # type: ignore[call-overload]


@each(
    ("error", "body"),
    [
        (NotFound("execution", "x"), b"event: error"),
        (InvalidInput("got 'x'", field="after"), b"event: error"),
        (Unavailable("stream", "the engine shuts down"), b""),
        (TimedOut("stream", 5), b""),
        (TransportError("transport", "the connection was lost"), b""),
    ],
)
def test_a_response_ends_with_an_error_that_would_come_again(error: Exception, body: bytes) -> None:
    def failing() -> Iterator[Any]:
        yield frame_of("delta")
        raise error

    first, *rest = sse.events(failing())
    assert first.startswith(b"id: 0/5-1\nevent: delta")
    assert b"".join(rest).startswith(body)
    assert b"".join(rest).endswith(sse.end() if body else b"")


@each("cursors", [{}, {"a": "0/1-0/1"}, {f"node {n}": f"0/17000{n}-0/{n}" for n in range(300)}])
def test_the_cursors_of_nodes_are_one_text(cursors: dict[str, str]) -> None:
    text = write_cursors(cursors)
    assert read_cursors(text) == cursors
    assert read_cursors(cursors) == cursors


@each(
    "text", ["x", "flow:", "flow:x", "flow:////", "0/1-0", 5, ["a"], {"a": "x"}, {"a": 5}, write_cursors({"a": "x"}),
             "flow:" + urlsafe_b64encode(zlib.compress(b"[1]")).decode(),
             "flow:" + urlsafe_b64encode(zlib.compress(b"x" * (1 << 23))).decode(), "flow:\u0661"]
)  # fmt: skip
def test_anything_else_is_no_cursor_of_a_flow(text: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_cursors(text)
    assert caught.value.field == "after"
