"""Bad arguments of the operations about claims, leases, grants, steps and lanes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import ClaimGrant
from flowfabric.values.ids import mint_uuid
from flowfabric.values.step import NewStep
from tests.sql.bad_input.table import (
    AUTHORITIES,
    BYTES,
    CAPABILITIES,
    CLAIM_FIELDS,
    DURATIONS,
    GRANT_FIELDS,
    IDS,
    INTS,
    LANES,
    LISTS,
    LONG_TEXTS,
    MOMENTS,
    NAIVE,
    ONE_ID,
    OWN,
    OWN_WORKERS,
    POLICIES,
    TEXTS,
    UNKNOWN,
    UUIDS,
    WORKERS,
    Case,
    as_authority,
    as_grant,
    as_one,
    as_step,
    by_field,
    by_kind,
    consume,
)
from tests.support import WORKER

CASES = [
    Case(
        "claim",
        lambda world: dict(WORKER),
        lane_id=by_field([None, "", *LANES]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        namespace=by_field(["", *TEXTS]),
        lease_ttl=by_field([None, *DURATIONS]),
        max_wait=by_field([5, timedelta(-1), timedelta.max]),
    ),
    Case("claim_many", lambda world: {"limit": 1, **WORKER}, limit=by_field([*INTS, 0, 1001])),
    Case("renew", as_authority, authority=by_field(AUTHORITIES, "*"), lease_ttl=by_field(DURATIONS)),
    Case("renew_many", lambda world: {"authorities": []}, authorities=by_field([None, 5, "x", [5]], "*")),
    Case(
        "progress",
        as_authority,
        authority=by_field(AUTHORITIES, "*"),
        percent=by_field([*INTS[1:], 101, 2**31]),
        message=by_field([*LONG_TEXTS, "x" * (64 * 1024 + 1)]),
    ),
    Case(
        "delay",
        lambda world: {"authority": world.held.handle, "delay_until": timedelta(1)},
        authority=by_field(AUTHORITIES, "*"),
        delay_until=by_field([None, *MOMENTS, timedelta.min, timedelta.max]),
    ),
    Case("wait_children", as_authority, authority=by_field(AUTHORITIES, "*")),
    Case("release", as_authority, authority=by_field(AUTHORITIES, "*")),
    Case(
        "stop_changed",
        lambda world: {"authority": world.held.handle, "detail": "a is gone", "digest": "d"},
        authority=by_field(AUTHORITIES, "*"),
        digest=by_field([None, "", *TEXTS]),
    ),
    Case(
        "claim_for_worker",
        lambda world: dict(WORKER),
        lane_id=by_field([None, "", *LANES]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field([5, "abc", b"abc", [5], [""], ["\0"], ["x" * 257], {"a": [0]}]),
        namespace=by_field(["", *TEXTS]),
        grant_ttl=by_field([None, *DURATIONS, timedelta(milliseconds=60_001)]),
        max_grants=by_field([*INTS[1:], 0, 65]),
    ),
    Case("issue_claim_grant", as_grant, **GRANT_FIELDS),
    Case(
        "issue_reclaim_grant",
        lambda world: {"execution_id": world.expired.execution_id, **WORKER},
        **GRANT_FIELDS,
        max_reclaim_count=by_field([*INTS[1:5], 2**32]),
    ),
    Case(
        "verify_grant",
        lambda world: {**as_one(world), "grant_key": "x"},
        **ONE_ID,
        grant_key=by_field([None, *LONG_TEXTS, "x" * 4097]),
    ),
    Case(
        "claim_execution",
        consume,
        **CLAIM_FIELDS,
        attempt_id=by_field(UUIDS),
        expected_attempt_index=by_field([*INTS[:5], 2**32]),
        attempt_policy=by_kind("invalid_policy_json", POLICIES),
        attempt_timeout=by_field([5, "5", timedelta(-1), timedelta.max]),
        execution_deadline_at=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case(
        "claim_resumed_execution",
        lambda world: {"execution_id": world.waiting, **WORKER, "lease_id": mint_uuid()},
        **CLAIM_FIELDS,
        current_attempt_index=by_field([*INTS[:5], 2**32]),
        remaining_attempt_timeout=by_field([5, timedelta(-1), timedelta.max], "attempt_timeout"),
    ),
    Case(
        "claim_from_resume_grant",
        lambda world: {
            "grant": ClaimGrant(execution_id=world.waiting, grant_key="x", expires_at=datetime.now(UTC)),
            **WORKER,
        },
        grant=by_field([None, 5, "x", UNKNOWN]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        lease_ttl=by_field(DURATIONS),
    ),
    Case(
        "issue_grant_and_claim",
        as_one,
        **ONE_ID,
        lane_id=by_field(LANES),
        lease_duration=by_field(DURATIONS),
    ),
    Case(
        "reclaim_execution",
        lambda world: {**consume(world), "execution_id": world.expired.execution_id},
        **CLAIM_FIELDS,
        attempt_id=by_field(UUIDS),
        attempt_policy=by_kind("invalid_policy_json", POLICIES),
        max_reclaim_count=by_field([*INTS[1:5], 2**32]),
    ),
    Case(
        "revoke_lease",
        lambda world: {"execution_id": world.held.execution_id},
        **ONE_ID,
        expected_lease_id=by_field(UUIDS),
        worker_instance_id=by_field(WORKERS[2:]),
    ),
    Case(
        "list_expired_leases",
        lambda world: {},
        as_of=by_field([*MOMENTS, timedelta(1)]),
        after=by_field(
            [
                5,
                "x",
                (),
                (datetime.now(UTC),),
                (NAIVE, UNKNOWN),
                (datetime.now(UTC), "x"),
                ("x", UNKNOWN),
            ]
        ),
        limit=by_field(INTS),
        namespace=by_field(TEXTS),
    ),
    Case("list_lanes", lambda world: {}, cursor=by_field(["", *LANES]), limit=by_field(INTS)),
    Case(
        "set_lane_state",
        lambda world: {"lane_id": "default", "state": "paused"},
        lane_id=by_field([None, "", *LANES]),
        state=by_field([None, 5, "", "open", "\0", []]),
        expected=by_field([5, "", "open", "\0", []]),
    ),
    Case("read_gauges", lambda world: {}, most=by_field([*INTS, 0])),
    Case("lane_stats", lambda world: {}, lane_ids=by_field([*LISTS, [""], [5], ["\0"]])),
    # steps, parking, waiting for the end of others
    Case(
        "record_steps",
        lambda world: {"items": [(world.held.handle, NewStep(name="s", result=b"1"))]},
        items=by_field([None, 5, "x", {"a": 1}, [5], [None], [(1, 2, 3)], lambda world: [world.held.handle]]),
    ),
    Case(
        "record_steps",
        lambda world: {"items": []},
        items=by_field([as_step(authority=value) for value in AUTHORITIES], "*"),
    ),
    *(
        Case(
            "record_steps", lambda world: {"items": []}, items=by_field([as_step(**{field: v}) for v in values], field)
        )
        for field, values in {
            "name": [None, "", *TEXTS[:-2], "x" * 513, "é" * 257],
            "n": [*INTS, 2**31],
            "kind": [None, 5, "", "steps", "Step", [], "\0"],
            "result": [*BYTES, bytes(MAX_PAYLOAD + 1)],
            "encoding": TEXTS,
            "error": [*LONG_TEXTS, "", "no json", "[]", "5", '{"a": "\\u0000"}', '{"a": ', '"x"', f'"{"x" * 2**18}"'],
            "seconds": ["1", True, []],
            "pause": [5, "5", timedelta(-1), timedelta.max, timedelta(1)],
            "place": [0, 2**31, "5", True],
        }.items()
    ),
    Case(
        "record_steps",
        lambda world: {"items": []},
        items=by_field([as_step(kind="sleep", pause=value) for value in (None, 5, "5", timedelta(-1))], "pause"),
    ),
    *(
        Case(
            name,
            lambda world: {"execution_ids": [world.waiting]},
            execution_ids=by_field([None, 5, "x", {"a"}, [UNKNOWN] * 1001]),
        )
        for name in ("read_steps", "read_started", "read_executions", "read_outcomes", "unwatch")
    ),
    *(
        Case(
            name,
            lambda world: {"execution_ids": []},
            execution_ids=by_field([[value] for value in IDS], "execution_id"),
        )
        for name in ("read_steps", "read_started", "read_executions", "read_outcomes", "unwatch")
    ),
    Case(
        "read_steps",
        lambda world: {"execution_ids": [world.waiting]},
        limit=by_field([0, *INTS[1:]]),
        after=by_field([5, "", (0, None, 0)]),
    ),
    Case("read_steps", lambda world: {"execution_ids": [world.waiting] * 2}, limit=by_field([5], "execution_ids")),
    Case(
        "submit_child",
        lambda world: {
            "authority": world.held.handle,
            "name": "s",
            "n": 0,
            "item": NewExecution(execution_kind="child", lane_id="own"),
        },
        authority=by_field(AUTHORITIES, "*"),
        name=by_field([None, "", *TEXTS[:-2], "x" * 513]),
        n=by_field(INTS),
        item=by_field(
            [
                None,
                5,
                "x",
                NewExecution(execution_kind="\0"),
                NewExecution(execution_kind="k", lane_id="é"),
                NewExecution(execution_kind="k", priority="5"),  # type: ignore[arg-type]
                NewExecution(execution_kind="k", tags={"a": 5}),  # type: ignore[dict-item]
                NewExecution(execution_kind="k", execution_id="x"),
            ],
            "*",
        ),
    ),
    Case(
        "submit_child",
        lambda world: {
            "authority": world.held.handle,
            "name": "s",
            "n": 0,
            "item": NewExecution(execution_kind="child", lane_id="own"),
        },
        item=by_kind("invalid_policy_json", [NewExecution(execution_kind="k", policy=value) for value in POLICIES]),
    ),
    Case(
        "claim_lanes",
        lambda world: {"shares": {"default": 1}, "limit": 1, **WORKER},
        shares=by_field([{}, None, 5, "x", ["default"], {"": 1}, {"é": 1}, {5: 1}, *({"l": v} for v in (*INTS, 1001))]),
        limit=by_field([*INTS, 0, 1001]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        namespace=by_field(["", *TEXTS]),
        lease_ttl=by_field([None, *DURATIONS]),
        max_wait=by_field([5, timedelta(-1), timedelta.max]),
    ),
    Case(
        "sleep_for_work",
        lambda world: {"lanes": ["default"], "at_most": timedelta(1)},
        lanes=by_field([None, 5, "x", [""], ["é"], [5]]),
        at_most=by_field([None, *DURATIONS]),
        slots=by_field([*INTS, 0, 100_001]),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        before=by_field([5, "x", datetime(2026, 1, 1)]),
    ),
    Case(
        "sleep_and_heartbeat",
        lambda world: {"lanes": ["default"], "at_most": timedelta(1), "worker": OWN},
        lanes=by_field([None, 5, "x", [""], ["é"], [5]]),
        at_most=by_field([None, *DURATIONS]),
        slots=by_field([*INTS, 0, 100_001]),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        before=by_field([5, "x", datetime(2026, 1, 1)]),
        worker=by_field(OWN_WORKERS),
    ),
    Case(
        "renew_and_heartbeat",
        lambda world: {"authorities": [], "worker": OWN},
        authorities=by_field([None, 5, "x", b"x"]),
        worker=by_field(OWN_WORKERS),
    ),
]
