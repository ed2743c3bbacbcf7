"""Bad arguments of the operations about reads, lists, events and the audit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from flowfabric.engine.reads import Place
from flowfabric.values.event import EventCursor
from tests.sql.bad_input.table import (
    DURATIONS,
    FILTERS,
    IDS,
    INTS,
    LISTS,
    MOMENTS,
    NAIVE,
    ONE_ID,
    PARTITIONS,
    TEXTS,
    UNKNOWN,
    UUID_TEXT,
    UUIDS,
    Case,
    as_one,
    by_field,
)

CASES = [
    *(
        Case(name, as_one, **ONE_ID)
        for name in (
            "read_execution",
            "describe_execution",
            "read_execution_state",
            "read_execution_info",
            "get_execution_result",
            "read_result",
            "read_execution_context",
            "read_current_attempt_index",
            "read_total_attempt_count",
            "resolve_execution_flow_id",
            "get_execution_namespace",
            "list_attempts",
            "mark_lease_expired_if_due",
            "promote_delayed",
        )
    ),
    Case(
        "list_attempts",
        lambda world: {"execution_id": world.waiting},
        after=by_field(INTS[1:]),
        limit=by_field([0, *INTS[1:]]),
    ),
    Case("list_consumers", lambda world: {}, after=by_field(TEXTS), limit=by_field([0, *INTS[1:]])),
    Case(
        "list_executions",
        lambda world: {"partition_key": 1},
        partition_key=by_field(PARTITIONS),
        cursor=by_field([*IDS[1:], UNKNOWN]),
        limit=by_field(INTS),
    ),
    Case(
        "find_executions",
        lambda world: {},
        namespace=by_field(TEXTS),
        lane_ids=by_field([*LISTS, [""], ["é"], [None]]),
        kinds=by_field([*LISTS, ["\0"], [5]]),
        states=by_field([*LISTS, ["nonsense"], [None], ["running"]]),
        tag=by_field([5, "ab", ("a",), ("a", "b", "c"), ("\0", "b"), ("a", "\ud800"), (1, 2), {"a": "b"}]),
        flow_id=by_field(UUIDS),
        parent_id=by_field(UUIDS),
        created_from=by_field([*MOMENTS, timedelta(1)]),
        created_before=by_field([*MOMENTS, timedelta(1)]),
        order_by=by_field(["", "other", 5, None, [], "ended"]),
        cursor=by_field(
            [
                5,
                "x",
                UNKNOWN,
                Place(NAIVE, UUID(UUID_TEXT)),
                Place(datetime.now(UTC), "x"),  # type: ignore[arg-type]
                Place(datetime.now(UTC), UUID(UUID_TEXT), 256),
                Place("x", UUID(UUID_TEXT)),
            ]  # type: ignore[arg-type]
        ),
        limit=by_field(INTS),
    ),
    Case(
        "read_events",
        lambda world: {},
        family=by_field([5, "", "leases", "\0", []]),
        after=by_field(
            [
                5,
                "x",
                (0, 0),
                EventCursor(-1),
                EventCursor(2**63),
                EventCursor("0"),
                EventCursor(None),
                EventCursor(1, -1),
                EventCursor(1, 2**32),
                EventCursor(1, "0"),
            ]  # type: ignore[arg-type]
        ),
        limit=by_field(INTS),
        filter=by_field(FILTERS),
    ),
    Case(
        "follow",
        lambda world: {},
        families=by_field([5, "", "lease", [], ["leases"], [None]]),
        filter=by_field(FILTERS),
        checkpoints=by_field([None, "x", 5]),
    ),
    *(
        Case(name, lambda world: {}, after=by_field([5, EventCursor(-1), EventCursor(2**63), EventCursor(1, -1)]))
        for name in (
            "subscribe_completion",
            "subscribe_lease_history",
            "subscribe_signal_delivery",
            "subscribe_operator_events",
            "subscribe_worker_events",
        )
    ),
    Case("seek_events", lambda world: {"at": datetime.now(UTC)}, at=by_field([None, *MOMENTS, timedelta(1)])),
    Case(
        "register_consumer",
        lambda world: {"name": "c"},
        name=by_field([None, 5, "", "\0", "x" * 300]),
        families=by_field([5, "", "lease", [], ["leases"]]),
        filter=by_field(FILTERS),
        start=by_field([5, "x", EventCursor(-1)], "after"),
    ),
    Case(
        "consume",
        lambda world: {"name": world.consumer, "handle": world.nothing},
        name=by_field([None, 5, "", "\0"]),
        limit=by_field([*INTS, 0, 10_001]),
        held_for=by_field([None, *DURATIONS, timedelta(hours=1)]),
    ),
    *(
        Case(name, lambda world: {"name": world.consumer}, name=by_field([None, 5, "", "\0"]))
        for name in ("leave_consumer", "delete_consumer")
    ),
    Case("fail_consumer", lambda world: {"name": world.consumer, "failure": "x"}, name=by_field([None, 5, "", "\0"])),
    Case(
        "set_consumer",
        lambda world: {"name": world.consumer, "cursor": EventCursor()},
        name=by_field([None, 5, "", "\0"]),
        cursor=by_field([5, "x", EventCursor(-1)], "after"),
    ),
    Case(
        "fork_execution",
        lambda world: {"execution_id": world.done, "before_step": None},
        before_step=by_field(["a", 5, ("",), ("", 0), ("a", -1), ("a", "0"), ("\0", 0)]),
        payload=by_field([5, "x"]),
        creator_identity=by_field([None, 5, "\0", "x" * 300]),
        new_id=by_field(["x", 5]),
        **ONE_ID,
    ),
    Case("audit", lambda world: {}, partition=by_field([-1, 65_536, "5", 1.0, True])),
    Case(
        "audit_sample",
        lambda world: {"partition": 1},
        partition=by_field([None, -1, 65_536, "5", True]),
        limit=by_field([*INTS, 0, 10_001]),
    ),
    Case("repair_floors", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case(
        "watch",
        lambda world: {"execution_ids": [world.done], "within": timedelta(seconds=1)},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
        within=by_field([None, *DURATIONS]),
    ),
    Case(
        "find_id",
        lambda world: {"text": UUID_TEXT},
        text=by_field([None, 5, "", "12345", "1234567x", UUID_TEXT + "0", "{fp:1}:123456", "\0", "\ud800"], "id"),
        what=by_field([5, "step", ""]),
        limit=by_field(INTS),
    ),
    Case(
        "list_events",
        lambda world: {"execution_id": world.done},
        after=by_field([5, "x", (0, 0), EventCursor(-1), EventCursor(2**63), EventCursor(1, -1)]),
        limit=by_field(INTS),
        **ONE_ID,
    ),
    Case(
        "count_events",
        lambda world: {},
        after=by_field([5, "x", (0, 0), EventCursor(-1), EventCursor(2**63), EventCursor(1, -1)]),
    ),
]
