"""Bad arguments of the operations about flows."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from flowfabric.engine.edges import EdgePlace
from flowfabric.values.event import EventCursor
from flowfabric.values.graph import NewEdge
from flowfabric.values.ids import mint_uuid
from flowfabric.values.joins import Quorum
from tests.sql.bad_input.table import (
    CURSORS,
    EDGE_FIELDS,
    FILTERS,
    GRACES,
    IDS,
    INTS,
    JOINS,
    KINDS_OF_EDGE,
    LISTS,
    LONG_TEXTS,
    MOMENTS,
    NODES,
    ONE_FLOW,
    ONE_ID,
    PARTITIONS,
    POLICIES,
    REVISIONS,
    TAG_KEYS,
    TAGS,
    TEXTS,
    UNKNOWN,
    UUID_TEXT,
    UUIDS,
    Case,
    a_flow_id,
    an_edge,
    as_edge,
    as_flow,
    as_group,
    as_node,
    as_nodes,
    by_field,
    by_kind,
    elsewhere,
    resolving,
    staging,
)

CASES = [
    # flows: graphs
    Case(
        "submit_flow",
        lambda world: {**as_nodes(world), "flow_id": a_flow_id()},
        nodes=by_field([*NODES, lambda world: [as_node("a", NewEdge(upstream=world.upstream))]]),
        flow_kind=by_field([None, *TEXTS]),
        namespace=by_field([None, *TEXTS]),
        flow_id=by_field(UUIDS),
        tags=by_field(TAGS),
    ),
    Case(
        "submit_flow",
        lambda world: {**as_nodes(world), "flow_id": a_flow_id()},
        nodes=by_kind("invalid_policy_json", [[as_node("a", execution_policy=value)] for value in POLICIES]),
    ),
    Case("extend_flow", as_nodes, **ONE_FLOW, nodes=by_field(NODES)),
    Case(
        "create_flow",
        lambda world: {},
        flow_id=by_field(UUIDS),
        flow_kind=by_field([None, *TEXTS]),
        namespace=by_field([None, *TEXTS]),
    ),
    Case(
        "add_execution_to_flow",
        lambda world: {**as_flow(world), "execution_id": world.outside},
        **ONE_FLOW,
        execution_id=by_field([*IDS, elsewhere]),
    ),
    Case(
        "add_executions_to_flow",
        lambda world: {**as_flow(world), "execution_ids": [world.outside]},
        **ONE_FLOW,
        execution_ids=by_field(
            [
                None,
                *LISTS,
                *([value] for value in IDS),
                lambda world: [elsewhere(world)],
                lambda world: [world.outside] * 1001,
            ]
        ),
    ),
    Case(
        "stage_dependency_edge",
        staging,
        **EDGE_FIELDS,
        expected_graph_revision=by_field(REVISIONS),
        data_passing_ref=by_field(TEXTS),
    ),
    Case("stage_dependency_edge", staging, dependency_kind=by_kind("invalid_dependency", KINDS_OF_EDGE)),
    Case(
        "stage_and_apply_edges",
        lambda world: {**as_flow(world), "edges": [an_edge(world)], "expected_graph_revision": world.revision},
        **ONE_FLOW,
        edges=by_field(
            [
                None,
                *LISTS,
                [],
                [5],
                [None],
                *(lambda w, v=value: [an_edge(w, edge_id=v)] for value in (None, *UUIDS)),
                *(lambda w, v=value: [an_edge(w, upstream=v)] for value in IDS),
                *(lambda w, v=value: [an_edge(w), an_edge(w, downstream=v)] for value in IDS),
                *(lambda w, v=value: [an_edge(w, data_passing_ref=v)] for value in TEXTS),
            ]
        ),
        expected_graph_revision=by_field(REVISIONS),
    ),
    Case(
        "stage_and_apply_edges",
        lambda world: {**as_flow(world), "edges": [an_edge(world)], "expected_graph_revision": world.revision},
        edges=by_kind(
            "invalid_dependency", [lambda w, v=value: [an_edge(w, dependency_kind=v)] for value in KINDS_OF_EDGE]
        ),
    ),
    Case(
        "apply_dependency_to_child",
        lambda world: {**as_flow(world), **as_edge(world)},
        **EDGE_FIELDS,
        graph_revision=by_field(REVISIONS),
        data_passing_ref=by_field(TEXTS),
    ),
    Case(
        "apply_dependency_to_child",
        lambda world: {**as_flow(world), **as_edge(world)},
        edge_id=by_kind("invalid_dependency", [mint_uuid()]),
        upstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.downstream]),
        downstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.upstream]),
        dependency_kind=by_kind("invalid_dependency", KINDS_OF_EDGE),
        data_passing_ref=by_kind("invalid_dependency", ["result"]),
    ),
    Case(
        "set_edge_group_policy",
        lambda world: {**as_flow(world), "downstream_execution_id": world.upstream, "policy": Quorum(2)},
        **ONE_FLOW,
        downstream_execution_id=by_field([*IDS, elsewhere]),
        policy=by_field(JOINS),
    ),
    Case(
        "set_edge_group_policy",
        lambda world: {**as_flow(world), "downstream_execution_id": world.outside, "policy": Quorum(2)},
        downstream_execution_id=by_field([lambda world: world.downstream], "policy"),
    ),
    # flows: reads and tags
    *(
        Case(name, as_flow, **ONE_FLOW)
        for name in (
            "describe_flow",
            "read_flow_graph",
            "flow_progress",
            "project_flow_summary",
            "read_flow_summary",
            "read_cancel_backlog",
            "delete_flow",
        )
    ),
    Case(
        "list_flow_members",
        as_flow,
        **ONE_FLOW,
        cursor=by_field(CURSORS),
        limit=by_field([0, "5", 1.0, True, -1, 2**31]),
    ),
    Case(
        "list_flows",
        lambda world: {"partition_key": 1},
        partition_key=by_field(PARTITIONS),
        cursor=by_field([*IDS[1:], UNKNOWN]),
        limit=by_field(INTS),
    ),
    Case(
        "find_flows",
        lambda world: {},
        namespace=by_field(TEXTS),
        flow_kind=by_field(TEXTS),
        cursor=by_field(
            [
                *CURSORS,
                f"2030-01-01T00:00:00/{UUID_TEXT}",
                f"0001-01-01T00:00:00+14:00/{UUID_TEXT}",
                f"9999-12-31T23:00:00-14:00/{UUID_TEXT}",
                f"2030-01-01T00:00:00+00:00/{UUID_TEXT.replace('-', '')}",
            ]
        ),
        limit=by_field(INTS),
    ),
    Case("list_edges", lambda world: {**as_flow(world), "outgoing": world.upstream}, outgoing=by_field(IDS[1:])),
    Case(
        "list_edges",
        lambda world: {**as_flow(world), "incoming": world.upstream},
        **ONE_FLOW,
        incoming=by_field(IDS[1:]),
    ),
    Case(
        "list_edges",
        lambda world: {**as_flow(world), "incoming": world.upstream},
        outgoing=by_field([UNKNOWN]),
        after=by_field(IDS[1:]),
        limit=by_field([0, *INTS[1:]]),
    ),
    Case(
        "describe_edge",
        lambda world: {**as_flow(world), "edge_id": world.edge},
        **ONE_FLOW,
        edge_id=by_field([None, *UUIDS]),
    ),
    *(
        Case(name, lambda world: {"execution_id": world.downstream}, **ONE_ID)
        for name in ("evaluate_flow_eligibility", "promote_blocked_to_eligible")
    ),
    Case(
        "set_flow_tag",
        lambda world: {**as_flow(world), "key": "a.b", "value": "x"},
        **ONE_FLOW,
        key=by_field(TAG_KEYS),
        value=by_field([None, *LONG_TEXTS]),
    ),
    Case(
        "set_flow_tags",
        lambda world: {**as_flow(world), "tags": {"a.b": "x"}},
        **ONE_FLOW,
        tags=by_field(
            [
                None,
                {},
                *TAGS,
                *({"a.b": "x", key: "x"} for key in TAG_KEYS),
                *({"a.b": "x", "a.c": value} for value in (None, *LONG_TEXTS)),
            ]
        ),
    ),
    Case("get_flow_tag", lambda world: {**as_flow(world), "key": "a.b"}, **ONE_FLOW, key=by_field(TAG_KEYS)),
    # flows: what moves them on
    Case("dispatch_completion", lambda world: {"event_id": 1}, event_id=by_field(REVISIONS)),
    Case("cascade_completion", lambda world: {"event": world.end}, event=by_field([None, 5, "x", {}, UNKNOWN])),
    Case(
        "cascade_completion",
        lambda world: {"event": world.end},
        event=by_field(
            [lambda w, v=value: msgspec.structs.replace(w.end, cursor=EventCursor(v)) for value in REVISIONS]
        ),
    ),
    Case(
        "dispatch_cascades",
        lambda world: {"stale": timedelta(0)},
        limit=by_field([*INTS, 0, 10_001]),
        edges=by_field([*INTS, 0, 10_001]),
        after=by_field(REVISIONS[1:]),
        low_water=by_field(MOMENTS),
        stale=by_field([5, "5", timedelta(-1), timedelta.max]),
        filter=by_field(FILTERS),
    ),
    Case(
        "resolve_dependency",
        resolving,
        **EDGE_FIELDS,
        outcome=by_field([None, 5, "", "completed", "Success", [], "\0"]),
    ),
    Case(
        "resolve_dependency",
        resolving,
        edge_id=by_kind("invalid_dependency", [mint_uuid(), lambda world: world.edge]),
        upstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.downstream]),
        downstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.upstream]),
    ),
    Case(
        "reconcile_edges",
        lambda world: {"after": EdgePlace(0, mint_uuid(), mint_uuid())},
        after=by_field(
            [
                5,
                "x",
                (0, mint_uuid(), mint_uuid()),
                *(EdgePlace(value, mint_uuid(), mint_uuid()) for value in (*INTS, 65_536)),
                *(EdgePlace(0, value, mint_uuid()) for value in (None, *UUIDS)),
                *(EdgePlace(0, mint_uuid(), value) for value in (None, *UUIDS)),
            ]
        ),
        limit=by_field([*INTS, 0, 10_001]),
        filter=by_field(FILTERS),
    ),
    Case(
        "cancel_siblings",
        as_group,
        **ONE_FLOW,
        downstream_execution_id=by_field([*IDS, elsewhere]),
        limit=by_field([*INTS, 0, 10_001]),
        low_water=by_field(MOMENTS),
    ),
    *(
        Case(name, as_group, **ONE_FLOW, downstream_execution_id=by_field([*IDS, elsewhere]))
        for name in ("drain_sibling_cancel_group", "reconcile_sibling_cancel_group")
    ),
    Case("list_sibling_cancels", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case(
        "cancel_flow",
        as_flow,
        **ONE_FLOW,
        policy=by_field([None, 5, "", "cancel_nothing", "Cancel_all", [], "\0"]),
        wait=by_field([None, 5, 1, "yes", timedelta(-1)]),
    ),
    Case(
        "cancel_flow",
        lambda world: {**as_flow(world), "wait": True},
        grace=by_kind("invalid_grace_ms", GRACES),
    ),
    Case(
        "cancel_flow_header",
        as_flow,
        **ONE_FLOW,
        cancellation_policy=by_field([None, 5, "", "cancel_nothing", "Cancel_all", [], "\0"]),
    ),
    Case("cancel_flow_header", as_flow, grace=by_kind("invalid_grace_ms", GRACES)),
    Case(
        "ack_cancel_member",
        lambda world: {**as_flow(world), "execution_id": world.upstream},
        **ONE_FLOW,
        execution_id=by_field(IDS),
    ),
    Case(
        "reconcile_cancellations",
        lambda world: {},
        limit=by_field([*INTS, 0, 10_001]),
        members=by_field([*INTS, 0, 10_001]),
        chunks=by_field([*INTS, 0, 10_001]),
        low_water=by_field(MOMENTS),
    ),
    Case("project_flow_summaries", lambda world: {}, limit=by_field([*INTS, 0, 1_000_001])),
]
