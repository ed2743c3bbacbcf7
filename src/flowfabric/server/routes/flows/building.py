"""Build a flow step by step: members, edges, how edges join."""

from __future__ import annotations

from typing import Final, Literal
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server.call import Answer, Call
from flowfabric.values.flow import (
    Added,
    AlreadyApplied,
    Applied,
    Edge,
)
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.words import PolicySet

_SET: Final[dict[PolicySet, Literal["set", "already_set"]]] = {
    PolicySet.SET: "set",
    PolicySet.ALREADY_SET: "already_set",
}


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


class PolicyOfGroup(Struct, frozen=True, kw_only=True):
    status: Literal["set", "already_set"]


class EdgeApplied(Struct, frozen=True, kw_only=True):
    """The edge was staged and applied."""

    edge_id: UUID
    new_graph_revision: int


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
