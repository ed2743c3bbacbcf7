"""Bad arguments of the operations about timers, schedules, workers and the engine itself."""

from __future__ import annotations

from datetime import datetime, timedelta

from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.execution import NewExecution
from tests.sql.bad_input.table import (
    BYTES,
    CAPABILITIES,
    DUE,
    DURATIONS,
    FILTERS,
    IDS,
    INTS,
    KIND_MAPS,
    LANES,
    LISTS,
    MOMENTS,
    ONE_ID,
    OWN,
    OWN_WORKERS,
    TEXTS,
    UNKNOWN,
    WORKERS,
    Case,
    as_one,
    by_field,
    by_kind,
)
from tests.support import WORKER

CASES = [
    Case(
        "expire_execution",
        lambda world: {**as_one(world), "phase": "execution_deadline"},
        **ONE_ID,
        phase=by_field([None, 5, "", "deadline", []]),
    ),
    Case(
        "run_timers",
        lambda world: {"kind": "lease"},
        kind=by_field([None, 5, "", "leases", "\0", []]),
        limit=by_field([*INTS, 0, 10_001]),
        after=by_field([*MOMENTS, timedelta(1)]),
        filter=by_field(FILTERS),
        backoff=by_field([None, 5, "5", timedelta(-1), timedelta.max]),
    ),
    Case("trim_retention", lambda world: {}, limit=by_field([*INTS, 0]), filter=by_field(FILTERS)),
    Case("sweep", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case("submit_hooks", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case(
        "look_for_due",
        lambda world: {"after": {}, "at_most": timedelta(1)},
        at_most=by_field([None, 5, timedelta(-1), timedelta.max]),
        before=by_field([5, "x", datetime(2026, 1, 1)]),
    ),
    Case(
        "take_lead",
        lambda world: {"names": ["duties"], "for_": timedelta(seconds=1)},
        for_=by_field([None, *DURATIONS]),
        names=by_field([*LISTS, [5], ["\0"]]),
    ),
    # workers
    Case(
        "register_worker",
        lambda world: {**WORKER, "lanes": ["default"], "liveness_ttl": timedelta(1)},
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        lanes=by_field([None, [], *LISTS, *([lane] for lane in LANES)]),
        liveness_ttl=by_field([None, *DURATIONS]),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field(
            [5, "abc", b"abc", [5], [""], ["\0"], ["x" * 257], {"a": "1"}, {"a": [""]}, {"a": [0]}, {5: []}, *KIND_MAPS]
        ),
        namespace=by_field([None, *TEXTS]),
        slots=by_field(["5", 1.0, True, -1, 2**31]),
        package_version=by_field(TEXTS),
        host=by_field(TEXTS),
        pid=by_field(["5", 1.0, True, -1, 2**31]),
    ),
    Case(
        "heartbeat_worker",
        lambda world: {"worker_instance_id": "w-1"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
    ),
    Case("heartbeat_own", lambda world: {"worker": OWN}, worker=by_field(OWN_WORKERS)),
    Case(
        "leave_registry",
        lambda world: {"worker_instance_id": "w-1", "reason": "gone"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
        reason=by_field([None, *TEXTS, "a\nb", "\x7f", "\x85"]),
    ),
    Case(
        "mark_worker_dead",
        lambda world: {"worker_instance_id": "w-1", "reason": "gone"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
        reason=by_field([None, *TEXTS, "a\nb", "\x7f", "\x85"]),
    ),
    Case(
        "list_workers",
        lambda world: {"namespace": ""},
        namespace=by_field(TEXTS),
        after=by_field([one for one in WORKERS if one is not None]),
        limit=by_field(INTS),
    ),
    Case(
        "list_all_workers",
        lambda world: {},
        after=by_field([5, "x", ("",), ("", ""), ("\0", "a"), ("", "a b"), (None, "a")]),
        limit=by_field(INTS),
    ),
    Case(
        "list_worker_events",
        lambda world: {"worker_instance_id": "w-1"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
        before=by_field(["5", 1.0, True, -1, 2**63]),
        limit=by_field(INTS),
    ),
    Case(
        "find_unserved",
        lambda world: {"execution_ids": [world.waiting]},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
    ),
    Case(
        "find_unserved",
        lambda world: {"execution_ids": []},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case("list_versions", lambda world: {}),
    Case("judge_routes", lambda world: {}),
    Case("list_uncovered", lambda world: {}, limit=by_field(INTS)),
    Case("sweep_workers", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case("trim_worker_events", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    # schedules
    Case(
        "put_schedule",
        lambda world: {"name": "s", "kind": "k", "timing": {"every_ms": 5}, "next_at": None},
        name=by_field([None, "", *TEXTS]),
        kind=by_field([None, *TEXTS]),
        timing=by_field([None, 5, "x", [], {"a": object()}, {"a": "\0"}, {"a": "\ud800"}]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
        catch_up=by_field([None, 5, "", "none", "Skip", []]),
        payload=by_field([*BYTES, bytes(MAX_PAYLOAD + 1)]),
        payload_encoding=by_field(TEXTS),
        options=by_field([5, "x", [], {"a": object()}, {"a": "\0"}, {"\ud800": 1}]),
    ),
    Case("list_schedules", lambda world: {}, cursor=by_field(["", *TEXTS]), limit=by_field(INTS)),
    Case("read_schedule", lambda world: {"name": "s"}, name=by_field([None, "", *TEXTS])),
    Case("schedule_as_due", lambda world: {"name": "s"}, name=by_field([None, "", *TEXTS])),
    *(
        Case(name, lambda world: {"name": "standing"}, name=by_field([None, "", *TEXTS]))
        for name in ("pause_schedule", "delete_schedule")
    ),
    Case(
        "resume_schedule",
        lambda world: {"name": "standing"},
        name=by_field([None, "", *TEXTS]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case("due_schedules", lambda world: {}, limit=by_field(INTS)),
    Case(
        "fire_schedule",
        lambda world: {
            "name": "standing",
            "due_at": DUE,
            "next_at": None,
            "fired_at": DUE,
            "items": [NewExecution(execution_kind="k", lane_id="own")],
        },
        name=by_field([None, "", *TEXTS]),
        due_at=by_field([None, *MOMENTS, timedelta(1)]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
        fired_at=by_field([*MOMENTS, timedelta(1)]),
        items=by_field([None, 5, "x", {"a": 1}, [5], [NewExecution(execution_kind="\0")]], "*"),
    ),
    Case("shutdown_prepare", lambda world: {}, grace=by_field([None, 5, timedelta(-1), timedelta.max])),
]
