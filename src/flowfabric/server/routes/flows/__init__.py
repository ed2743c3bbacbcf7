"""Flows: submit a whole graph in one call, read and draw it, let it grow, replay and cancel it."""

from __future__ import annotations

from typing import Final

from flowfabric.server.graphs import Join
from flowfabric.server.operation import LARGE, Operation, Repeats, Scope, Within
from flowfabric.server.routes.flows.building import (
    AddMember,
    ApplyEdge,
    EdgeApplied,
    PolicyOfGroup,
    StageEdge,
    add_flow_member,
    apply_edge,
    set_edge_group_policy,
    stage_edge,
)
from flowfabric.server.routes.flows.changing import (
    CancelFlow,
    FlowReplayed,
    ReplayFlow,
    WaitForCancel,
    cancel_flow,
    delete_flow,
    replay_flow,
)
from flowfabric.server.routes.flows.reading import (
    DRAWINGS,
    DrawFlow,
    FlowDrawn,
    FlowRead,
    FlowResults,
    ListEdges,
    ListedMember,
    ListFlows,
    ListMembers,
    draw_flow,
    get_flow,
    list_edges,
    list_flow_members,
    list_flows,
    read_flow_results,
)
from flowfabric.server.routes.flows.submitting import ExtendFlow, SubmitFlow, SubmittedFlow, extend_flow, submit_flow
from flowfabric.values.flow import (
    Added,
    AlreadyApplied,
    AlreadyMember,
    Applied,
    CancellationScheduled,
    EdgeSnapshot,
    FlowCancelled,
    FlowInfo,
    PartiallyCancelled,
    Staged,
)

_PATH: Final = "/v1/flows/{flow_id}"
_CANCELLED: Final = FlowCancelled | CancellationScheduled | PartiallyCancelled

OPERATIONS = (
    Operation(
        method="GET", path="/v1/flows", handler=list_flows, engine=("find_flows", "list_flows"), scope=Scope.READ,
        within=Within.GIVEN, query=ListFlows, answers={200: list[FlowInfo]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/flows", handler=submit_flow, engine=("submit_flow", "create_flow", "set_flow_tags"),
        scope=Scope.SUBMIT, within=Within.GIVEN, body=SubmitFlow, answers={201: SubmittedFlow, 200: SubmittedFlow},
        limit=LARGE, repeats=Repeats.OWN, made=_PATH,
    ),
    Operation(
        method="GET", path=_PATH, handler=get_flow, engine=("describe_flow", "read_flow_summary"), scope=Scope.READ,
        within=Within.FLOW, answers={200: FlowRead}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_PATH}/graph", handler=draw_flow, engine=("read_flow_graph",), scope=Scope.READ,
        within=Within.FLOW, query=DrawFlow, answers={200: FlowDrawn},
        also=tuple(media for media, _ in DRAWINGS.values()), etag=True,
    ),
    Operation(
        method="GET", path=f"{_PATH}/members", handler=list_flow_members, engine=("list_flow_members",),
        scope=Scope.READ, within=Within.FLOW, query=ListMembers, answers={200: list[ListedMember]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_PATH}/edges", handler=list_edges, engine=("list_edges",), scope=Scope.READ,
        within=Within.FLOW, query=ListEdges, answers={200: list[EdgeSnapshot]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_PATH}/results", handler=read_flow_results, engine=("flow_progress",), scope=Scope.READ,
        within=Within.FLOW, answers={200: FlowResults}, etag=True,
    ),
    Operation(
        method="POST", path=f"{_PATH}/members", handler=add_flow_member, engine=("add_execution_to_flow",),
        scope=Scope.SUBMIT, within=Within.FLOW, body=AddMember, answers={201: Added, 200: AlreadyMember},
        repeats=Repeats.KEPT, made="/v1/executions/{execution_id}",
    ),
    Operation(
        method="POST", path=f"{_PATH}/edges", handler=stage_edge,
        engine=("stage_dependency_edge", "stage_and_apply_edges"), scope=Scope.SUBMIT, within=Within.FLOW,
        body=StageEdge, answers={201: Staged | EdgeApplied}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_PATH}/edges/apply", handler=apply_edge, engine=("apply_dependency_to_child",),
        scope=Scope.SUBMIT, within=Within.FLOW, body=ApplyEdge, answers={200: Applied | AlreadyApplied},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_PATH}/edge-groups/{{downstream_execution_id}}", handler=set_edge_group_policy,
        engine=("set_edge_group_policy",), scope=Scope.SUBMIT, within=Within.FLOW, body=Join,
        answers={200: PolicyOfGroup}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_PATH}/extend", handler=extend_flow, engine=("extend_flow",), scope=Scope.SUBMIT,
        within=Within.FLOW, body=ExtendFlow, answers={201: SubmittedFlow, 200: SubmittedFlow}, limit=LARGE,
        repeats=Repeats.KEPT, made=_PATH,
    ),
    Operation(
        method="POST", path=f"{_PATH}/replay", handler=replay_flow, engine=("replay_many",), scope=Scope.OPERATE,
        within=Within.FLOW, body=ReplayFlow, answers={200: FlowReplayed}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_PATH}/cancel", handler=cancel_flow, engine=("cancel_flow", "cancel_flow_header"),
        scope=Scope.OPERATE, within=Within.FLOW, query=WaitForCancel, body=CancelFlow, answers={200: _CANCELLED},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="DELETE", path=_PATH, handler=delete_flow, engine=("delete_flow",), scope=Scope.OPERATE,
        within=Within.FLOW, answers={204: None},
    ),
)  # fmt: skip
