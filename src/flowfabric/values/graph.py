"""A graph to submit, the check that it is a valid graph, and which of its members can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import Conflict, InvalidInput
from flowfabric.values.checks import check_text
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import FlowGraph, FlowNode, GroupState
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, Quorum, check_policy
from flowfabric.values.state import State


class NewEdge(Struct, frozen=True, kw_only=True):
    """The upstream of a new node: a node of the same call by name, or an execution that is already a member.

    `passes_result` gives the upstream's result to the worker beside the input; with `data_passing_ref` (any text) it
    replaces the input.
    """

    upstream: str | ExecutionId
    data_passing_ref: str | None = None
    passes_result: bool = False
    edge_id: UUID | None = None


class NewNode(Struct, frozen=True, kw_only=True):
    """One execution of a graph, its upstreams and how they join. It gets the flow and partition of the graph."""

    name: str
    execution: NewExecution
    after: Sequence[NewEdge] = ()
    policy: EdgeGroupPolicy = AllOf()


class FlowSubmitted(Struct, frozen=True, kw_only=True):
    """A flow that was submitted or grew: the executions by the names of their nodes.

    `existed`: an earlier call used this flow id, or these executions, and this call changed nothing. `joins`: how many
    joins of each policy this call made.
    """

    flow_id: FlowId
    nodes: dict[str, ExecutionId]
    existed: bool = False
    joins: dict[str, int] = {}


def check_graph(nodes: Sequence[NewNode]) -> list[int]:
    """Raise for an invalid graph, naming the node; return the indexes of the nodes, upstreams first."""
    places: dict[str, int] = {}
    for place, node in enumerate(nodes):
        if not isinstance(node, NewNode):
            raise InvalidInput(f"got {type(node).__name__}", field=f"nodes[{place}]", allowed="a NewNode")
        if not isinstance(node.execution, NewExecution):
            raise InvalidInput(
                f"got {type(node.execution).__name__}", field=f"nodes[{place}].execution", allowed="a NewExecution"
            )
        if isinstance(node.after, str | bytes) or not isinstance(node.after, Sequence):
            raise InvalidInput(f"got {type(node.after).__name__}", field=f"nodes[{place}].after", allowed="a list")
        name = check_text(node.name, f"nodes[{place}].name")
        if not name:
            raise InvalidInput("is empty", field=f"nodes[{place}].name", allowed="1 to 256 bytes")
        if name in places:
            raise InvalidInput(f"{name!r} is used twice", field=f"nodes[{place}].name", allowed="a unique name")
        places[name] = place
    downstreams: list[list[int]] = [[] for _ in nodes]
    waits = [0] * len(nodes)
    for place, node in enumerate(nodes):
        policy = check_policy(node.policy, f"nodes[{place}].policy")
        for edge in node.after:
            if not isinstance(edge, NewEdge):
                raise InvalidInput(f"got {type(edge).__name__}", field=f"nodes[{place}].after", allowed="NewEdge")
            if isinstance(edge.upstream, UUID):
                continue
            upstream = places.get(edge.upstream) if isinstance(edge.upstream, str) else None
            if upstream is None:
                raise InvalidInput(
                    f"{node.name!r} comes after {edge.upstream!r}, which is not a node of this graph",
                    field=f"nodes[{place}].after",
                    allowed="names of nodes of the same call, or execution ids of members",
                )
            if upstream == place:
                raise Conflict("self_referencing_edge", f"node {node.name!r} comes after itself")
            downstreams[upstream].append(place)
            waits[place] += 1
        wanted = policy.k if isinstance(policy, Quorum) else 1 if isinstance(policy, AnyOf) else 0
        if wanted > len(node.after):
            raise InvalidInput(
                f"{node.name!r} wants {wanted} of {len(node.after)} upstreams",
                field=f"nodes[{place}].policy",
                allowed=f"at most {len(node.after)}" if node.after else "a policy only where there are upstreams",
            )
    order = [place for place, count in enumerate(waits) if count == 0]
    for place in order:
        for downstream in downstreams[place]:
            waits[downstream] -= 1
            if waits[downstream] == 0:
                order.append(downstream)
    if len(order) < len(nodes):
        raise Conflict("cycle_detected", " -> ".join(_cycle(nodes, places, waits)))
    return order


def _cycle(nodes: Sequence[NewNode], places: dict[str, int], waits: list[int]) -> list[str]:
    """Return the names along one cycle, from upstream to downstream, with the first repeated at the end."""
    # Every waiting node has a waiting upstream, so walking upwards meets some node twice.
    place = next(place for place, count in enumerate(waits) if count)
    seen: dict[int, int] = {}
    way: list[int] = []
    while place not in seen:
        seen[place] = len(way)
        way.append(place)
        place = next(
            places[edge.upstream]
            for edge in nodes[place].after
            if not isinstance(edge.upstream, UUID) and waits[places[edge.upstream]]
        )
    return [nodes[place].name for place in [place, *reversed(way[seen[place] :])]]


# Replay


RACE_LOST = "sibling_quorum_satisfied"
_UNSUCCESSFUL = (State.FAILED, State.CANCELLED, State.EXPIRED, State.SKIPPED)


def replayable(graph: FlowGraph) -> list[FlowNode]:
    """Return the members that failed and those skipped because of them: all of these run when replayed.

    Members that lost a race, and those skipped because of that, are left out: nothing would release them.
    """
    upstreams: dict[ExecutionId, list[ExecutionId]] = {node.execution_id: [] for node in graph.nodes}
    downstreams: dict[ExecutionId, list[ExecutionId]] = {node.execution_id: [] for node in graph.nodes}
    for edge in graph.edges:
        one, other = edge.upstream_execution_id, edge.downstream_execution_id
        if edge.edge_state == "applied" and one in downstreams and other in upstreams:
            upstreams[other].append(one)
            downstreams[one].append(other)
    released = {
        group.downstream_execution_id for group in graph.flow.edge_groups if group.group_state is GroupState.SATISFIED
    }
    nodes = {node.execution_id: node for node in graph.nodes}
    missing = {one: len(found) for one, found in upstreams.items()}
    order = [one for one, count in missing.items() if not count]
    chosen: set[ExecutionId] = set()
    succeeding: set[ExecutionId] = set()  # have succeeded, or may
    for one in order:
        node = nodes[one]
        if node.state not in _UNSUCCESSFUL:
            succeeding.add(one)
        elif node.cancellation_reason != RACE_LOST:
            count = sum(up in succeeding for up in upstreams[one])
            match node.policy:
                case AnyOf():
                    wanted = 1
                case Quorum(k):
                    wanted = k
                case AllSettled():
                    wanted = 0
                case _:
                    wanted = len(upstreams[one])
            if one in released or not upstreams[one] or count >= wanted:
                chosen.add(one)
                succeeding.add(one)
        for down in downstreams[one]:
            missing[down] -= 1
            if not missing[down]:
                order.append(down)
    return [node for node in graph.nodes if node.execution_id in chosen]
