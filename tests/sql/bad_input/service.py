"""Bad arguments of the operations about timers, schedules, workers and the engine itself."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.execution import NewExecution
from flowfabric.values.page import ScannerFilter
from flowfabric.values.quota import QuotaPlace, quota_policy_id_of
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
    UUIDS,
    WORKERS,
    Case,
    World,
    as_one,
    by_field,
    by_kind,
)
from tests.support import WORKER

NUMBERS: list[Any] = [None, "5", 1.0, True, -1, 10**9 + 1, 2**63]
WINDOWS: list[Any] = [
    5, "5", timedelta(-1), timedelta(days=367), timedelta.max, timedelta(milliseconds=1500)
]  # fmt: skip


def one_policy(world: World) -> dict[str, Any]:
    return {"quota_policy_id": quota_policy_id_of("bad input")}


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
    Case(
        "create_quota_policy",
        lambda world: {"name": "q"},
        quota_policy_id=by_field(UUIDS),
        name=by_field(["a\n", None, "", *TEXTS]),
        key=by_field(["", *TEXTS]),
        window=by_field([*WINDOWS, None]),
        max_requests_per_window=by_field(NUMBERS),
        max_concurrent=by_field(NUMBERS),
        jitter=by_field([*WINDOWS[:-1], None]),
    ),
    Case(
        "update_quota_policy",
        lambda world: {"quota_policy_id": quota_policy_id_of("bad input")},
        quota_policy_id=by_field([None, *UUIDS]),
        window=by_field(WINDOWS),
        max_requests_per_window=by_field(NUMBERS[1:]),
        max_concurrent=by_field(NUMBERS[1:]),
        jitter=by_field(WINDOWS[:-1]),
        updated_at=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case("read_quota_policy_limits", one_policy, quota_policy_id=by_field(["x", 5, "\0"])),
    Case("get_quota_policy", one_policy, quota_policy_id=by_field(["x", 5, "\0"])),
    Case("get_quota_policy", lambda world: {"name": "q"}, name=by_field(["", *TEXTS])),
    Case(
        "list_quota_policies",
        lambda world: {},
        name_prefix=by_field(TEXTS),
        cursor=by_field(UUIDS),
        limit=by_field(INTS),
    ),
    Case(
        "list_quota_keys",
        one_policy,
        quota_policy_id=by_field([None, *UUIDS]),
        cursor=by_field([5, b"x", "\0", "\ud800"]),
        limit=by_field(INTS),
    ),
    Case(
        "check_admission",
        lambda world: {**one_policy(world), **as_one(world)},
        **ONE_ID,
        quota_policy_id=by_field([None, *UUIDS]),
        dimension=by_field([None, *TEXTS]),
        window=by_field([*WINDOWS, None]),
        rate_limit=by_field(NUMBERS),
        concurrency_cap=by_field(NUMBERS),
        jitter=by_field([*WINDOWS[:-1], None]),
    ),
    Case(
        "release_admission",
        lambda world: {**one_policy(world), **as_one(world)},
        **ONE_ID,
        quota_policy_id=by_field([None, *UUIDS]),
    ),
    Case(
        "unblock_limited",
        lambda world: {},
        limit=by_field([*INTS, 0, 1001]),
        after=by_field([5, "x", (), ("x", ""), (UUID(int=1), 5), (UUID(int=1), "\0"), (UUID(int=1), "", "")]),
        low_water=by_field(MOMENTS),
        filter=by_field(FILTERS),
    ),
    Case(
        "unblock_limited",
        lambda world: {"filter": ScannerFilter(namespace="a"), "after": (UUID(int=0), "")},
        after=by_field([None], "filter"),
    ),
    Case(
        "reconcile_quotas",
        lambda world: {},
        limit=by_field([*INTS, 0, 1001]),
        after=by_field(
            [
                5,
                "x",
                (UUID(int=1), "", None),
                *(QuotaPlace(value, "") for value in (None, *UUIDS)),
                *(QuotaPlace(UUID(int=1), value) for value in (5, "\0")),
                *(QuotaPlace(UUID(int=1), "", value) for value in ("", -1, 2**63)),
            ]
        ),
    ),
    Case("submit_hooks", lambda world: {}, limit=by_field([*INTS, 0, 10_001]), low_water=by_field(MOMENTS)),
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
        expected=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case(
        "list_schedules",
        lambda world: {},
        namespace=by_field(TEXTS),
        cursor=by_field(["", *TEXTS]),
        limit=by_field(INTS),
    ),
    Case("read_schedule", lambda world: {"name": "s"}, name=by_field([None, "", *TEXTS])),
    Case("schedule_as_due", lambda world: {"name": "s"}, name=by_field([None, "", *TEXTS])),
    *(
        Case(
            name,
            lambda world: {"name": "standing"},
            name=by_field([None, "", *TEXTS]),
            expected=by_field([*MOMENTS, timedelta(1)]),
        )
        for name in ("pause_schedule", "delete_schedule")
    ),
    Case(
        "resume_schedule",
        lambda world: {"name": "standing"},
        name=by_field([None, "", *TEXTS]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
        expected=by_field([*MOMENTS, timedelta(1)]),
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
