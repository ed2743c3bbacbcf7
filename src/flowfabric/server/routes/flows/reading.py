"""Read flows, list them and draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from flowfabric import drawing
from flowfabric.contracts import json_form
from flowfabric.engine.flow_reads import Member, member_cursor
from flowfabric.errors import NotFound
from flowfabric.server.answers import etag
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit
from flowfabric.server.visible import check_payloads, open_each, opened, size_of
from flowfabric.values.flow import (
    EdgeSnapshot,
    FlowGraph,
    FlowSnapshot,
    FlowState,
    FlowSummary,
)
from flowfabric.values.flow import FlowNode as DrawnNode
from flowfabric.values.ids import ExecutionId, FlowId, parse_uuid
from flowfabric.values.state import State

DRAWINGS: Final = {
    "svg": ("image/svg+xml", drawing.to_svg),
    "mermaid": ("text/vnd.mermaid", drawing.to_mermaid),
    "dot": ("text/vnd.graphviz", drawing.to_dot),
}
_NO_SCRIPTS: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_ENDED: Final = (FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED)


class ListFlows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str | None = None
    kind: str | None = None
    limit: Limit = 50
    cursor: str | None = None


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


async def list_flows(call: Call) -> Page:
    """List flows, newest first."""
    page = await call.engine.find_flows(
        namespace=call.namespace, flow_kind=call.query.kind, cursor=call.query.cursor, limit=call.query.limit
    )
    return Page(items=page.items, next_cursor=page.next_cursor)


async def get_flow(call: Call) -> Answer:
    """Read a flow: its header, how its edges join, and how many members are in which state."""
    snapshot = await existing(call)
    summary = await call.engine.read_flow_summary(snapshot.flow_id, now=True)
    return _tagged(FlowRead(flow=snapshot, public_flow_state=_state(snapshot, summary), summary=summary))


async def draw_flow(call: Call) -> Answer:
    """Read a flow with its nodes and edges, or draw it as SVG, Mermaid or Graphviz."""
    summary = await call.engine.read_flow_summary(call.path["flow_id"], now=True)
    graph = await call.engine.read_flow_graph(call.path["flow_id"])
    if graph is None:
        raise NotFound("flow", call.path["flow_id"])
    graph = await _readable(call, graph)
    if call.query.format != "json":
        media, draw = DRAWINGS[call.query.format]
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


async def _readable(call: Call, graph: FlowGraph) -> FlowGraph:
    nodes = await open_each(
        call,
        graph.nodes,
        lambda one: msgspec.structs.replace(one, failure_reason=_reason(call, one.failure_reason, one.execution_id)),
        lambda one: size_of(one.failure_reason),
    )
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _reason(call: Call, text: str | None, execution_id: ExecutionId) -> str | None:
    """A failure as its handler reported it; nothing for a key that hides payloads: it may quote them."""
    return None if call.caller.hides_payloads else opened(text, call.service.codecs, execution_id)


async def list_flow_members(call: Call) -> Page:
    """List the members of a flow in creation order."""
    flow_id, query = call.path["flow_id"], call.query
    await existing(call)
    found = await call.engine.list_flow_members(flow_id, cursor=query.cursor, limit=query.limit + 1)
    members = found[: query.limit]
    items = await open_each(call, members, lambda one: _listed(call, one), lambda one: size_of(one.failure_reason))
    return Page(items=items, next_cursor=member_cursor(members[-1]) if len(found) > query.limit else None)


def _listed(call: Call, one: Member) -> ListedMember:
    return ListedMember(
        **{name: getattr(one, name) for name in ListedMember.__struct_fields__ if name != "failure_reason"},
        failure_reason=_reason(call, one.failure_reason, one.execution_id),
    )


async def list_edges(call: Call) -> Page:
    """List the edges of a flow by id: all, those into `incoming`, or those from `outgoing`."""
    flow_id, query = call.path["flow_id"], call.query
    await existing(call)
    found = await call.engine.list_edges(
        flow_id,
        incoming=query.incoming,
        outgoing=query.outgoing,
        after=None if query.cursor is None else parse_uuid(query.cursor, "cursor"),
        limit=query.limit + 1,
    )
    items = found[: query.limit]
    return Page(items=items, next_cursor=str(items[-1].edge_id) if len(found) > query.limit else None)


async def read_flow_results(call: Call) -> FlowResults:
    """Read the results of the nodes that completed, and why others failed. Ask again until `is_ended`."""
    check_payloads(call)
    snapshot = await existing(call)
    summary = await call.engine.read_flow_summary(snapshot.flow_id, now=True)
    members = await call.engine.list_flow_members(snapshot.flow_id, results=True)
    state = _state(snapshot, summary)
    size = size_of(*(one.result for one in members), *(one.failure_reason for one in members))
    return await call.service.opening.run(size, lambda: _results(call, snapshot.flow_id, members, state))


def _results(call: Call, flow_id: FlowId, members: Sequence[Member], state: str) -> FlowResults:
    codecs = call.service.codecs
    return FlowResults(
        flow_id=flow_id,
        public_flow_state=state,
        is_ended=state in _ENDED,
        results={
            named(one): json_form.payload_or_problem(
                one.result, one.result_encoding, codecs, one.execution_id, raw=True
            )
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


async def existing(call: Call) -> FlowSnapshot:
    found = await call.engine.describe_flow(call.path["flow_id"])
    if found is None:
        raise NotFound("flow", call.path["flow_id"])
    return found


def named(member: Member | DrawnNode) -> str:
    """The name of a member; members that were added one by one have the name of their task."""
    return member.name or member.execution_kind
