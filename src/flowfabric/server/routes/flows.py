"""Flows: submit a whole graph in one call, read and draw it, let it grow, replay and cancel it."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Final, Literal
from uuid import UUID, uuid5

import msgspec
from msgspec import Meta, Struct

from flowfabric import drawing
from flowfabric.app.flow_builder import KEYS
from flowfabric.contracts import json_form
from flowfabric.engine.acting import Actor
from flowfabric.engine.flow_reads import Member, member_cursor
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, TimedOut, ValidationFailed
from flowfabric.server.answers import etag
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.graphs import FlowNode, Graph, Join, located
from flowfabric.server.members import Limit
from flowfabric.server.namespace import check_limits
from flowfabric.server.operation import LARGE, Operation, Repeats, Scope, Within
from flowfabric.server.problems import Problem
from flowfabric.server.visible import check_payloads, opened
from flowfabric.values.flow import (
    Added,
    AlreadyApplied,
    AlreadyMember,
    Applied,
    CancellationPolicy,
    CancellationScheduled,
    Edge,
    EdgeSnapshot,
    FlowCancelled,
    FlowExists,
    FlowGraph,
    FlowInfo,
    FlowSnapshot,
    FlowState,
    FlowSummary,
    PartiallyCancelled,
    Staged,
)
from flowfabric.values.flow import FlowNode as DrawnNode
from flowfabric.values.graph import FlowSubmitted, replayable
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid, parse_uuid
from flowfabric.values.state import State
from flowfabric.values.words import PolicySet

_PATH: Final = "/v1/flows/{flow_id}"
_ENDED: Final = (FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED)
_SET: Final[dict[PolicySet, Literal["set", "already_set"]]] = {
    PolicySet.SET: "set",
    PolicySet.ALREADY_SET: "already_set",
}
_CHUNK: Final = 500  # members replayed in one call
_LONGEST_WAIT: Final = 300
_DRAWINGS: Final = {
    "svg": ("image/svg+xml", drawing.to_svg),
    "mermaid": ("text/vnd.mermaid", drawing.to_mermaid),
    "dot": ("text/vnd.graphviz", drawing.to_dot),
}


class ListFlows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str | None = None
    kind: str | None = None
    limit: Limit = 50
    cursor: str | None = None


class SubmitFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graph: its nodes by name. Without nodes the flow is empty, and grows."""

    flow_kind: str = ""
    namespace: str | None = None
    flow_id: UUID | None = None
    tags: dict[str, str] | None = None
    nodes: dict[str, FlowNode] = {}


class ExtendFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: dict[str, FlowNode]


class DrawFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["json", "svg", "mermaid", "dot"] = "json"
    fold: bool = True  # draw many similar nodes as one box


class ListMembers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | None = None


class ListEdges(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    incoming: ExecutionId | None = None
    outgoing: ExecutionId | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | None = None


class AddMember(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: ExecutionId


class StageEdge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edge. `apply`: it blocks its downstream at once, without a call of `edges/apply`."""

    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    expected_graph_revision: int
    edge_id: UUID | None = None
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None
    apply: bool = False


class ApplyEdge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    edge_id: UUID
    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    graph_revision: int = 0
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None


class ReplayFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str | None = None


class CancelFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cancellation_policy: CancellationPolicy = CancellationPolicy.CANCEL_ALL
    reason: str = "cancelled over HTTP"


class WaitForCancel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wait: Annotated[float, Meta(ge=0, le=_LONGEST_WAIT)] = 0  # seconds


class SubmittedFlow(Struct, frozen=True, kw_only=True):
    """The executions by the names of their nodes. `exists`: id or idempotency key were used before; nothing changed."""

    status: Literal["created", "exists"]
    flow_id: FlowId
    nodes: dict[str, ExecutionId]


class FlowRead(Struct, frozen=True, kw_only=True):
    """A flow. `public_flow_state` is counted now; `summary` is None if it has no members."""

    flow: FlowSnapshot
    public_flow_state: str
    summary: FlowSummary | None


class FlowDrawn(Struct, frozen=True, kw_only=True):
    flow: FlowSnapshot
    public_flow_state: str
    summary: FlowSummary | None
    nodes: tuple[DrawnNode, ...]
    edges: tuple[EdgeSnapshot, ...]


class ListedMember(Struct, frozen=True, kw_only=True):
    """A member of a flow, without its result."""

    execution_id: ExecutionId
    name: str
    execution_kind: str
    state: State
    created_at: Any
    started_at: Any
    completed_at: Any
    failure_reason: str | None
    failure_category: str | None
    cancellation_reason: str | None


class MemberFailure(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    public_state: State
    failure_reason: str | None
    failure_category: str | None
    cancellation_reason: str | None


class FlowResults(Struct, frozen=True, kw_only=True):
    """The results of the nodes that completed, the failures of others, and the names of those that were skipped."""

    flow_id: FlowId
    public_flow_state: str
    is_ended: bool
    results: dict[str, Any]
    failures: dict[str, MemberFailure]
    skipped: list[str]


class PolicyOfGroup(Struct, frozen=True, kw_only=True):
    status: Literal["set", "already_set"]


class EdgeApplied(Struct, frozen=True, kw_only=True):
    """The edge was staged and applied."""

    edge_id: UUID
    new_graph_revision: int


class ReplayedNode(Struct, frozen=True, kw_only=True):
    node: str
    execution_id: ExecutionId


class RefusedNode(Struct, frozen=True, kw_only=True):
    node: str
    execution_id: ExecutionId
    problem: str


class FlowReplayed(Struct, frozen=True, kw_only=True):
    flow_id: FlowId
    replayed: list[ReplayedNode]
    refused: list[RefusedNode]


async def list_flows(call: Call) -> Page:
    """List flows, newest first."""
    page = await call.engine.find_flows(
        namespace=call.namespace, flow_kind=call.query.kind, cursor=call.query.cursor, limit=call.query.limit
    )
    return Page(items=page.items, next_cursor=page.next_cursor)


async def submit_flow(call: Call) -> Answer:
    """Submit a whole graph in one call: all of it is stored, or nothing.

    201: it was created; 200: its id or its `Idempotency-Key` was used before, and nothing changed. `nodes` has the
    executions by the names of their nodes. Without nodes the flow is empty: add members or extend it.
    """
    body: SubmitFlow = call.body
    namespace = call.namespace or ""
    key = call.idempotency_key
    if key is not None and body.flow_id is not None:
        raise InvalidInput("given with an Idempotency-Key", field="flow_id", allowed="one of them")
    if key is not None:
        flow_id = FlowId(uuid5(KEYS, f"{namespace}\0{body.flow_kind}\0{key}"))
    else:
        flow_id = FlowId(mint_uuid() if body.flow_id is None else body.flow_id)
    await check_limits(call, [one.policy for one in body.nodes.values()])
    if body.nodes:
        graph = Graph(call, flow_id, body.nodes, namespace=namespace)
        try:
            made = await call.engine.submit_flow(
                graph.nodes(), flow_kind=body.flow_kind, namespace=namespace, flow_id=flow_id, tags=body.tags
            )
        except ValidationFailed as error:
            raise located(error, names=list(body.nodes)) from None
    else:
        actor = Actor(name=call.caller.name, operation=call.operation.name, is_audited=False)
        async with call.engine.acting(actor) as engine:  # the flow with its tags, or nothing
            empty = await engine.create_flow(flow_id, flow_kind=body.flow_kind, namespace=namespace)
            existed = isinstance(empty, FlowExists)
            if not existed and body.tags:
                try:
                    await engine.set_flow_tags(flow_id, body.tags)
                except FlowFabricError:
                    engine.roll_back()
                    raise
        nodes = await _nodes(call, flow_id) if existed else {}
        made = FlowSubmitted(flow_id=flow_id, nodes=nodes, existed=existed)
    if made.existed:
        await _check_existing(call, flow_id, namespace, made, keyed=key is not None)
    return _submitted(made)


async def _check_existing(call: Call, flow_id: FlowId, namespace: str, made: FlowSubmitted, *, keyed: bool) -> None:
    """Refuse a flow of another namespace, which the caller may not see, and a key that was used for another graph."""
    stored = await call.engine.describe_flow(flow_id)
    if call.caller.namespaces is not None and (stored is None or stored.namespace != namespace):
        raise NotFound("flow", flow_id)
    if keyed and not set(call.body.nodes) <= set(made.nodes):
        raise Problem(
            422, "idempotency_key_reused", f"the Idempotency-Key was used for flow {flow_id}, which has other nodes"
        )


async def extend_flow(call: Call) -> Answer:
    """Add nodes to a flow that is open: all of them, or none.

    They may come after members that exist, by name or id. With an `Idempotency-Key` a repeated request adds nothing.
    """
    flow_id, body = call.path["flow_id"], call.body
    stored = await _existing(call)
    await check_limits(call, [one.policy for one in body.nodes.values()])
    seed = None if call.idempotency_key is None else uuid5(flow_id, call.idempotency_key)
    members = await _nodes(call, flow_id) if _names_others(body.nodes) else {}
    members = {**{str(one): one for one in members.values()}, **members}
    graph = Graph(call, flow_id, body.nodes, namespace=stored.namespace, members=members, seed=seed)
    try:
        made = await call.engine.extend_flow(flow_id, graph.nodes())
    except ValidationFailed as error:
        raise located(error, names=list(body.nodes)) from None
    return _submitted(made)


def _submitted(made: FlowSubmitted) -> Answer:
    return Answer(
        body=SubmittedFlow(status="exists" if made.existed else "created", flow_id=made.flow_id, nodes=made.nodes),
        status=200 if made.existed else 201,
        headers={"Location": f"/v1/flows/{made.flow_id}"},
    )


def _names_others(nodes: dict[str, FlowNode]) -> bool:
    """Whether a node comes after something that is not a node of the request."""
    for node in nodes.values():
        wanted = [one for given in (node.arguments_from or {}).values() for one in _listed(given)]
        if any(one not in nodes for one in [*(node.after or ()), *wanted]):
            return True
    return False


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


async def _nodes(call: Call, flow_id: FlowId) -> dict[str, ExecutionId]:
    return {named(one): one.execution_id for one in await call.engine.list_flow_members(flow_id)}


def named(member: Member | DrawnNode) -> str:
    """The name of a member; members that were added one by one have the name of their task."""
    return member.name or member.execution_kind


async def get_flow(call: Call) -> Answer:
    """Read a flow: its header, how its edges join, and how many members are in which state."""
    snapshot = await _existing(call)
    summary = await call.engine.read_flow_summary(snapshot.flow_id, now=True)
    return _tagged(FlowRead(flow=snapshot, public_flow_state=_state(snapshot, summary), summary=summary))


async def draw_flow(call: Call) -> Answer:
    """Read a flow with its nodes and edges, or draw it as SVG, Mermaid or Graphviz."""
    summary = await call.engine.read_flow_summary(call.path["flow_id"], now=True)
    graph = await call.engine.read_flow_graph(call.path["flow_id"])
    if graph is None:
        raise NotFound("flow", call.path["flow_id"])
    graph = _readable(call, graph)
    if call.query.format != "json":
        media, draw = _DRAWINGS[call.query.format]
        text = draw(graph, fold=drawing.FOLD if call.query.fold else None)
        return Answer(body=text.encode(), media=media, headers={"Content-Security-Policy": _NO_SCRIPTS})
    return _tagged(
        FlowDrawn(
            flow=graph.flow,
            public_flow_state=_state(graph.flow, summary),
            summary=summary,
            nodes=graph.nodes,
            edges=graph.edges,
        )
    )


def _tagged(read: FlowRead | FlowDrawn) -> Answer:
    """The answer with a tag that does not change because the members were counted again."""
    still = read
    if read.summary is not None:
        counts = msgspec.structs.replace(read.summary, last_summary_update_at=read.flow.created_at)
        still = msgspec.structs.replace(read, summary=counts)
    return Answer(body=read, etag=etag(json_form.encode(still)))


_NO_SCRIPTS: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def _readable(call: Call, graph: FlowGraph) -> FlowGraph:
    nodes = tuple(
        msgspec.structs.replace(one, failure_reason=_reason(call, one.failure_reason, one.execution_id))
        for one in graph.nodes
    )
    return msgspec.structs.replace(graph, nodes=nodes)


def _reason(call: Call, text: str | None, execution_id: ExecutionId) -> str | None:
    """A failure as its handler reported it; nothing for a key that hides payloads: it may quote them."""
    return None if call.caller.hides_payloads else opened(text, call.service.codecs, execution_id)


async def list_flow_members(call: Call) -> Page:
    """List the members of a flow in creation order."""
    flow_id, query = call.path["flow_id"], call.query
    await _existing(call)
    found = await call.engine.list_flow_members(flow_id, cursor=query.cursor, limit=query.limit + 1)
    members = found[: query.limit]
    items = [
        ListedMember(
            **{name: getattr(one, name) for name in ListedMember.__struct_fields__ if name != "failure_reason"},
            failure_reason=_reason(call, one.failure_reason, one.execution_id),
        )
        for one in members
    ]
    return Page(items=items, next_cursor=member_cursor(members[-1]) if len(found) > query.limit else None)


async def list_edges(call: Call) -> Page:
    """List the edges of a flow by id: all, those into `incoming`, or those from `outgoing`."""
    flow_id, query = call.path["flow_id"], call.query
    if query.incoming is not None and query.outgoing is not None:
        raise InvalidInput("given with incoming", field="outgoing", allowed="one of them")
    await _existing(call)
    if query.incoming is None and query.outgoing is None:
        graph = await call.engine.read_flow_graph(flow_id)
        found = [] if graph is None else list(graph.edges)
    else:
        found = await call.engine.list_edges(flow_id, incoming=query.incoming, outgoing=query.outgoing)
    after = None if query.cursor is None else parse_uuid(query.cursor, "cursor")
    rest = [one for one in found if after is None or one.edge_id.bytes > after.bytes]
    items = rest[: query.limit]
    return Page(items=items, next_cursor=str(items[-1].edge_id) if len(rest) > query.limit else None)


async def read_flow_results(call: Call) -> FlowResults:
    """Read the results of the nodes that completed, and why others failed. Ask again until `is_ended`."""
    check_payloads(call)
    snapshot = await _existing(call)
    summary = await call.engine.read_flow_summary(snapshot.flow_id, now=True)
    members = await call.engine.list_flow_members(snapshot.flow_id, results=True)
    state = _state(snapshot, summary)
    codecs = call.service.codecs
    return FlowResults(
        flow_id=snapshot.flow_id,
        public_flow_state=state,
        is_ended=state in _ENDED,
        results={
            named(one): json_form.payload_or_problem(one.result, one.result_encoding, codecs, one.execution_id)
            for one in members
            if one.state is State.COMPLETED
        },
        failures={
            named(one): MemberFailure(
                execution_id=one.execution_id,
                public_state=one.state,
                failure_reason=_reason(call, one.failure_reason, one.execution_id),
                failure_category=one.failure_category,
                cancellation_reason=one.cancellation_reason,
            )
            for one in members
            if one.state in (State.FAILED, State.EXPIRED, State.CANCELLED)
        },
        skipped=[named(one) for one in members if one.state is State.SKIPPED],
    )


def _state(flow: FlowSnapshot, summary: FlowSummary | None) -> str:
    return flow.public_flow_state if summary is None else summary.public_flow_state.value


async def _existing(call: Call) -> FlowSnapshot:
    found = await call.engine.describe_flow(call.path["flow_id"])
    if found is None:
        raise NotFound("flow", call.path["flow_id"])
    return found


async def add_flow_member(call: Call) -> Answer:
    """Make an execution a member of a flow, for good. Submit it with `flow_id`: members are in the flow's partition."""
    target = call.body.execution_id
    await _check_visible(call, target)
    made = await call.engine.add_execution_to_flow(call.path["flow_id"], target)
    return Answer(body=made, status=201 if isinstance(made, Added) else 200)


async def _check_visible(call: Call, execution_id: ExecutionId) -> None:
    """Refuse an execution of another namespace as an unknown one."""
    allowed = call.caller.namespaces
    if allowed is not None:
        found = await call.engine.read_execution_info(execution_id)
        if found is None or found.namespace not in allowed:
            raise NotFound("execution", execution_id, detail="execution_id")


async def stage_edge(call: Call) -> Answer:
    """Add an edge to the graph. It blocks nothing until it is applied."""
    flow_id, body = call.path["flow_id"], call.body
    edge_id = mint_uuid() if body.edge_id is None else body.edge_id
    if not body.apply:
        made = await call.engine.stage_dependency_edge(
            flow_id,
            edge_id=edge_id,
            upstream_execution_id=body.upstream_execution_id,
            downstream_execution_id=body.downstream_execution_id,
            expected_graph_revision=body.expected_graph_revision,
            dependency_kind=body.dependency_kind,
            data_passing_ref=body.data_passing_ref,
        )
        return Answer(body=made, status=201)
    edge = Edge(
        edge_id=edge_id,
        upstream=body.upstream_execution_id,
        downstream=body.downstream_execution_id,
        data_passing_ref=body.data_passing_ref,
        dependency_kind=body.dependency_kind,
    )
    revision = await call.engine.stage_and_apply_edges(
        flow_id, [edge], expected_graph_revision=body.expected_graph_revision
    )
    return Answer(body=EdgeApplied(edge_id=edge_id, new_graph_revision=revision), status=201)


async def apply_edge(call: Call) -> Applied | AlreadyApplied:
    """Let a staged edge block its downstream. An upstream that has ended counts immediately."""
    body = call.body
    return await call.engine.apply_dependency_to_child(
        call.path["flow_id"],
        edge_id=body.edge_id,
        upstream_execution_id=body.upstream_execution_id,
        downstream_execution_id=body.downstream_execution_id,
        graph_revision=body.graph_revision,
        dependency_kind=body.dependency_kind,
        data_passing_ref=body.data_passing_ref,
    )


async def set_edge_group_policy(call: Call) -> PolicyOfGroup:
    """Set how the edges into an execution join, before the first one is staged."""
    try:
        policy = call.body.policy("")
    except InvalidInput as error:
        raise InvalidInput(error.problem, field=(error.field or "").lstrip("."), allowed=error.allowed) from None
    done = await call.engine.set_edge_group_policy(call.path["flow_id"], call.path["downstream_execution_id"], policy)
    return PolicyOfGroup(status=_SET[done])


async def replay_flow(call: Call) -> FlowReplayed:
    """Run failed nodes again, and the nodes skipped because of them. Nodes that lost a race stay as they are."""
    graph = await call.engine.read_flow_graph(call.path["flow_id"])
    if graph is None:
        raise NotFound("flow", call.path["flow_id"])
    chosen = replayable(graph)
    replayed: list[ReplayedNode] = []
    refused: list[RefusedNode] = []
    for place in range(0, len(chosen), _CHUNK):
        part = chosen[place : place + _CHUNK]
        verdicts = await call.engine.replay_many(
            [one.execution_id for one in part], reason=call.body.reason, requested_by=call.caller.name
        )
        for one, verdict in zip(part, verdicts, strict=True):
            if isinstance(verdict, FlowFabricError):
                refused.append(RefusedNode(node=named(one), execution_id=one.execution_id, problem=str(verdict)))
            else:
                replayed.append(ReplayedNode(node=named(one), execution_id=one.execution_id))
    return FlowReplayed(flow_id=graph.flow.flow_id, replayed=replayed, refused=refused)


async def cancel_flow(call: Call) -> Any:
    """Close a flow and cancel its members: all, those that do not run (`cancel_pending`), or none (`flow_only`).

    The members are cancelled in the background. With `wait` the request returns when they are, or with 504 after so
    many seconds: the flow is closed then, too, and the rest is cancelled in the background. A flow that was closed
    before keeps its policy.
    """
    flow_id, wait = call.path["flow_id"], call.query.wait
    done = await call.engine.cancel_flow(
        flow_id, policy=call.body.cancellation_policy, reason=call.body.reason, requester=call.caller.name
    )
    if not wait:
        return done

    async def finish() -> Any:
        try:
            return await call.service.engine.cancel_flow(flow_id, wait=timedelta(seconds=wait))
        except TimedOut:
            raise Problem(
                504,
                "timeout",
                f"the members are not cancelled after {wait:g} s; the flow is closed, and the rest follows",
                kind="timed_out",
                family="timed_out",
            ) from None

    return Answer(body=done, then=finish)


async def delete_flow(call: Call) -> None:
    """Delete a flow whose members have all ended, with its members and everything they own, now."""
    await call.engine.delete_flow(call.path["flow_id"])


_CANCELLED: Final = FlowCancelled | CancellationScheduled | PartiallyCancelled
OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/flows",
        handler=list_flows,
        engine=("find_flows", "list_flows"),
        scope=Scope.READ,
        within=Within.GIVEN,
        query=ListFlows,
        answers={200: list[FlowInfo]},
        etag=True,
    ),
    Operation(
        method="POST",
        path="/v1/flows",
        handler=submit_flow,
        engine=("submit_flow", "create_flow", "set_flow_tags"),
        scope=Scope.SUBMIT,
        within=Within.GIVEN,
        body=SubmitFlow,
        answers={201: SubmittedFlow, 200: SubmittedFlow},
        limit=LARGE,
        repeats=Repeats.OWN,
    ),
    Operation(
        method="GET",
        path=_PATH,
        handler=get_flow,
        engine=("describe_flow", "read_flow_summary"),
        scope=Scope.READ,
        within=Within.FLOW,
        answers={200: FlowRead},
        etag=True,
    ),
    Operation(
        method="GET",
        path=f"{_PATH}/graph",
        handler=draw_flow,
        engine=("read_flow_graph",),
        scope=Scope.READ,
        within=Within.FLOW,
        query=DrawFlow,
        answers={200: FlowDrawn},
        also=tuple(media for media, _ in _DRAWINGS.values()),
        etag=True,
    ),
    Operation(
        method="GET",
        path=f"{_PATH}/members",
        handler=list_flow_members,
        engine=("list_flow_members",),
        scope=Scope.READ,
        within=Within.FLOW,
        query=ListMembers,
        answers={200: list[ListedMember]},
        etag=True,
    ),
    Operation(
        method="GET",
        path=f"{_PATH}/edges",
        handler=list_edges,
        engine=("list_edges",),
        scope=Scope.READ,
        within=Within.FLOW,
        query=ListEdges,
        answers={200: list[EdgeSnapshot]},
        etag=True,
    ),
    Operation(
        method="GET",
        path=f"{_PATH}/results",
        handler=read_flow_results,
        engine=("flow_progress",),
        scope=Scope.READ,
        within=Within.FLOW,
        answers={200: FlowResults},
        etag=True,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/members",
        handler=add_flow_member,
        engine=("add_execution_to_flow",),
        scope=Scope.SUBMIT,
        within=Within.FLOW,
        body=AddMember,
        answers={201: Added, 200: AlreadyMember},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/edges",
        handler=stage_edge,
        engine=("stage_dependency_edge", "stage_and_apply_edges"),
        scope=Scope.SUBMIT,
        within=Within.FLOW,
        body=StageEdge,
        answers={201: Staged | EdgeApplied},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/edges/apply",
        handler=apply_edge,
        engine=("apply_dependency_to_child",),
        scope=Scope.SUBMIT,
        within=Within.FLOW,
        body=ApplyEdge,
        answers={200: Applied | AlreadyApplied},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/edge-groups/{{downstream_execution_id}}",
        handler=set_edge_group_policy,
        engine=("set_edge_group_policy",),
        scope=Scope.SUBMIT,
        within=Within.FLOW,
        body=Join,
        answers={200: PolicyOfGroup},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/extend",
        handler=extend_flow,
        engine=("extend_flow",),
        scope=Scope.SUBMIT,
        within=Within.FLOW,
        body=ExtendFlow,
        answers={201: SubmittedFlow, 200: SubmittedFlow},
        limit=LARGE,
        repeats=Repeats.OWN,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/replay",
        handler=replay_flow,
        engine=("replay_many",),
        scope=Scope.OPERATE,
        within=Within.FLOW,
        body=ReplayFlow,
        answers={200: FlowReplayed},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST",
        path=f"{_PATH}/cancel",
        handler=cancel_flow,
        engine=("cancel_flow", "cancel_flow_header"),
        scope=Scope.OPERATE,
        within=Within.FLOW,
        query=WaitForCancel,
        body=CancelFlow,
        answers={200: _CANCELLED},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="DELETE",
        path=_PATH,
        handler=delete_flow,
        engine=("delete_flow",),
        scope=Scope.OPERATE,
        within=Within.FLOW,
        answers={204: None},
    ),
)
