"""Bad arguments of the operations about streams."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flowfabric.values.stream import START, NewFrame
from tests.sql.bad_input.table import AUTHORITIES, IDS, INTS, UNKNOWN, Case, by_field

FRAME_CURSORS: list[Any] = [
    None, 5, b"1", "", "-", "+", "-1", "+1", " 1", "1 ", "1\n", "1-", "1-1-1", "\u0661", "1.0", str(2**64), "\0",
    "\ud800",
]  # fmt: skip

CASES = [
    Case(
        "append_frames",
        lambda world: {"items": [(world.held.handle, NewFrame(payload=b"x"))]},
        items=by_field([None, 5, "x", {"a": 1}, [5], [None], [(1, 2, 3)], lambda world: [world.held.handle]]),
    ),
    Case(
        "append_frame",
        lambda world: {"authority": world.held.handle, "frame": NewFrame(payload=b"x")},
        authority=by_field(AUTHORITIES, "*"),
        frame=by_field([None, 5, b"x", NewFrame(payload="x")], "*"),  # type: ignore[arg-type]
    ),
    *(
        Case(
            name,
            lambda world: {"execution_id": world.waiting},
            execution_id=by_field(IDS),
            attempt_index=by_field(INTS),
            count_limit=by_field([*INTS, 0, 10_001]),
            visibility=by_field([None, 5, "", "All", "none", "\0"]),
            **cursors,
        )
        for name, cursors in {
            "read_stream": {"from_cursor": by_field(FRAME_CURSORS), "to_cursor": by_field(FRAME_CURSORS)},
            "tail_stream": {
                "after": by_field([*FRAME_CURSORS, "start", "end"]),
                "block": by_field([5, "5", timedelta(-1), timedelta(seconds=30, milliseconds=1)]),
            },
        }.items()
    ),
    Case(
        "read_streams",
        lambda world: {"items": [(world.waiting, None, START)]},
        items=by_field([None, 5, "x", [5], [(UNKNOWN, 0)], [(UNKNOWN, 0, "start")], [(UNKNOWN, None, START)] * 1001]),
        count_limit=by_field([*INTS, 0, 10_001]),
        visibility=by_field([None, 5, "", "All"]),
    ),
    Case(
        "read_last_frames",
        lambda world: {"execution_ids": [world.waiting]},
        execution_ids=by_field([None, 5, "x", {"a"}, [UNKNOWN] * 1001]),
        count_limit=by_field([*INTS, 0, 10_001]),
    ),
    Case(
        "read_summary",
        lambda world: {"execution_id": world.waiting},
        execution_id=by_field(IDS),
        attempt_index=by_field(INTS[1:]),
    ),
    Case(
        "count_emitted",
        lambda world: {"execution_id": world.waiting, "attempt_index": 0},
        execution_id=by_field(IDS),
        attempt_index=by_field(INTS),
    ),
]
