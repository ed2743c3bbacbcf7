"""Bad arguments of the operations about creating, ending and changing executions."""

from __future__ import annotations

from datetime import timedelta

from flowfabric.values.attempt import Completion
from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge
from flowfabric.values.ids import mint_uuid
from tests.ids import home
from tests.sql.bad_input.table import (
    AUTHORITIES,
    BYTES,
    CAPABILITIES,
    IDS,
    INTS,
    KEYS,
    LANES,
    LISTS,
    LONG_TEXTS,
    MOMENTS,
    NODES,
    ONE_ID,
    PARTITIONS,
    POLICIES,
    POLICY_TEXTS,
    TAG_KEYS,
    TAGS,
    TEXTS,
    UNKNOWN,
    UUIDS,
    Case,
    as_authority,
    as_node,
    as_nodes,
    as_one,
    by_field,
    by_kind,
)

CASES = [
    Case(
        "create_execution",
        lambda world: {"execution_kind": "k"},
        execution_kind=by_field([None, *TEXTS]),
        lane_id=by_field([None, "", *LANES]),
        namespace=by_field(TEXTS),
        input_payload=by_field([None, *BYTES, bytes(MAX_PAYLOAD + 1)]),
        payload_encoding=by_field(TEXTS),
        priority=by_field([None, "5", 1.0, True, -(2**31) - 1, 2**31]),
        creator_identity=by_field(TEXTS),
        idempotency_key=by_field(KEYS),
        tags=by_field(TAGS),
        policy=by_kind("invalid_policy_json", POLICIES),
        delay_until=by_field([*MOMENTS, timedelta.min, timedelta.max]),
        execution_deadline_at=by_field([*MOMENTS, timedelta.min, timedelta.max]),
        execution_id=by_field(IDS[1:]),
        flow_id=by_field(UUIDS),
    ),
    Case("create_execution", lambda world: {"execution_kind": "k"}, policy=by_field(POLICY_TEXTS, "*")),
    Case(
        "create_execution",
        lambda world: {"execution_kind": "k"},
        policy=by_kind(
            "invalid_capabilities",
            [{"routing_requirements": {"required_capabilities": value}} for value in CAPABILITIES],
        ),
    ),
    Case(
        "create_many",
        lambda world: {"items": []},
        items=by_field([None, "x", 5, {"a": 1}, [NewExecution(execution_kind="k")] * 1001]),
    ),
    Case(
        "create_alike",
        lambda world: {"item": NewExecution(execution_kind="k"), "payloads": [b"1"]},
        item=by_field(
            [
                None,
                5,
                NewExecution(execution_kind="\0"),
                NewExecution(execution_kind=5),  # type: ignore[arg-type]
                NewExecution(execution_kind="k", lane_id="é"),
            ],
            "*",
        ),
        payloads=by_field([None, 5, "x", [5], ["text"], [b"1"] * 1001], "*"),
    ),
    Case(
        "complete",
        as_authority,
        authority=by_field(AUTHORITIES, "*"),
        result=by_field([*BYTES, bytes(MAX_PAYLOAD + 1)]),
        result_encoding=by_field(TEXTS),
    ),
    Case(
        "complete_many",
        lambda world: {"items": []},
        items=by_field(
            [None, 5, "x", [5], [None], lambda world: [Completion(world.held.handle, "text")]],  # type: ignore[arg-type]
            "*",
        ),
    ),
    Case(
        "fail",
        lambda world: {"authority": world.held.handle, "reason": "no"},
        authority=by_field(AUTHORITIES, "*"),
        failure_class=by_field([5, "nonsense", "\0", "Permanent", ["permanent"]]),
        retry_policy=by_kind(
            "invalid_policy_json",
            [
                5,
                "no json",
                "[]",
                [],
                {"max_retries": -1},
                {"max_retries": 2**32},
                {"backoff": 5},
            ],
        ),
    ),
    Case(
        "fail_many",
        lambda world: {"items": []},
        items=by_field([None, 5, "x", [5], lambda world: [world.held.handle]], "*"),
    ),
    Case(
        "cancel",
        lambda world: {"authority": world.held.handle, "reason": "no"},
        authority=by_field(AUTHORITIES, "*"),
        source=by_field([*TEXTS, "", "operator_override"]),
    ),
    Case("replay_execution", lambda world: {"execution_id": world.done}, **ONE_ID, requested_by=by_field(TEXTS)),
    Case(
        "change_priority",
        lambda world: {**as_one(world), "new_priority": 5},
        **ONE_ID,
        new_priority=by_field([None, "5", 1.0, True, -(2**31) - 1, 2**31]),
        lane_id=by_field([*LANES, "another"]),
    ),
    Case(
        "block_execution_for_admission",
        lambda world: {**as_one(world), "reason": "paused_by_operator"},
        **ONE_ID,
        reason=by_kind("invalid_blocking_reason", [None, 5, "", "nonsense", "\0", [], "waiting_for_worker"]),
        reason_detail=by_field([*LONG_TEXTS, "x" * 4097]),
    ),
    Case("block_route", as_one, **ONE_ID, reason_detail=by_field([*LONG_TEXTS, "x" * 4097])),
    Case(
        "unblock_execution",
        lambda world: {"execution_id": world.blocked},
        **ONE_ID,
        expected_blocking_reason=by_field([5, "", "nonsense", "\0", []]),
    ),
    Case(
        "scan_eligible_executions",
        lambda world: {"lane_id": "default"},
        lane_id=by_field([None, "", *LANES]),
        partition_key=by_field(PARTITIONS[1:]),
        limit=by_field(INTS),
    ),
    Case(
        "read_exec_core_fields",
        lambda world: {
            "partition_key": home(world.waiting),
            "execution_id": world.waiting,
            "names": [],
        },
        partition_key=by_field(PARTITIONS),
        execution_id=by_field(IDS),
        names=by_field([None, *LISTS, [5], ["\0"]]),
    ),
    Case("get_execution_tag", lambda world: {**as_one(world), "key": "a.b"}, **ONE_ID, key=by_field(TAG_KEYS)),
    Case(
        "set_execution_tag",
        lambda world: {**as_one(world), "key": "a.b", "value": "x"},
        **ONE_ID,
        key=by_field(TAG_KEYS),
        value=by_field([None, *LONG_TEXTS]),
    ),
    Case(
        "free_key",
        lambda world: {"execution_id": world.done, "idempotency_key": "k"},
        **ONE_ID,
        idempotency_key=by_field([None, *KEYS]),
        namespace=by_field(TEXTS),
        flow_id=by_field(UUIDS),
    ),
    # many at once, and forgetting
    Case(
        "cancel_many",
        lambda world: {"execution_ids": [world.waiting], "reason": "no"},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
    ),
    Case(
        "cancel_many",
        lambda world: {"execution_ids": [], "reason": "no"},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case(
        "replay_many",
        lambda world: {"execution_ids": [world.done]},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
        requested_by=by_field(TEXTS),
    ),
    Case(
        "replay_many",
        lambda world: {"execution_ids": []},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case("delete_execution", lambda world: {"execution_id": world.done}, **ONE_ID),
    Case("redact_execution", lambda world: {"execution_id": world.done}, **ONE_ID),
    Case(
        "submit_child_flow",
        lambda world: {
            **as_nodes(world),
            "authority": world.held.handle,
            "name": "f",
            "n": 0,
            "flow_id": mint_uuid(),
            "seed": mint_uuid(),
        },
        authority=by_field(AUTHORITIES, "*"),
        name=by_field([None, "", *TEXTS[:-2], "x" * 513]),
        n=by_field(INTS),
        nodes=by_field([*NODES, lambda world: [as_node("a", NewEdge(upstream=world.upstream))]]),
        flow_id=by_field([None, *UUIDS]),
        seed=by_field([None, *UUIDS]),
        flow_kind=by_field([None, *TEXTS]),
        namespace=by_field([None, *TEXTS]),
        tags=by_field(TAGS),
    ),
    Case(
        "list_children",
        lambda world: {"execution_ids": [world.done]},
        execution_ids=by_field([None, 5, [UNKNOWN] * 1001]),
        limit=by_field([*INTS, 0, 10_001]),
    ),
    Case(
        "list_children",
        lambda world: {"execution_ids": []},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case(
        "cancel_children",
        lambda world: {},
        of=by_field(UUIDS),
        limit=by_field([*INTS, 0, 10_001]),
        low_water=by_field(MOMENTS),
    ),
]
