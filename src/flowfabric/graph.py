"""Flows as they are given and read: policies of joins, edges, groups, snapshots. Records without a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import Conflict, InvalidInput
from flowfabric.ids import ExecutionId, FlowId, check_text
from flowfabric.models import NewExecution
from flowfabric.state import State

MAX_QUORUM = 2**31 - 1


class OnSatisfied(StrEnum):
    """What happens to the upstreams that a decided join no longer needs."""

    CANCEL_REMAINING = "cancel_remaining"
    LET_RUN = "let_run"


class AllOf(Struct, frozen=True):
    """Every upstream has to succeed."""


class AnyOf(Struct, frozen=True):
    """One upstream has to succeed."""

    on_satisfied: OnSatisfied = OnSatisfied.CANCEL_REMAINING


class Quorum(Struct, frozen=True):
    """`k` upstreams have to succeed."""

    k: int
    on_satisfied: OnSatisfied = OnSatisfied.CANCEL_REMAINING


EdgeGroupPolicy: TypeAlias = AllOf | AnyOf | Quorum


class CancellationPolicy(StrEnum):
    """Which members `cancel_flow` cancels."""

    CANCEL_ALL = "cancel_all"
    CANCEL_PENDING = "cancel_pending"
    FLOW_ONLY = "flow_only"


class GroupState(StrEnum):
    """What an edge group has come to."""

    PENDING = "pending"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class FlowState(StrEnum):
    """The derived state of a flow, as its summary has it."""

    OPEN = "open"
    RUNNING = "running"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FlowStatus(StrEnum):
    """The status of a flow in a list."""

    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class Edge(Struct, frozen=True, kw_only=True):
    """A dependency as it is given: `downstream` waits for `upstream`."""

    edge_id: UUID
    upstream: ExecutionId
    downstream: ExecutionId
    data_passing_ref: str | None = None
    dependency_kind: str = "success_only"


class EdgeSnapshot(Struct, frozen=True, kw_only=True):
    """A stored dependency."""

    edge_id: UUID
    flow_id: FlowId
    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    dependency_kind: str = "success_only"
    satisfaction_condition: str = "all_required"
    data_passing_ref: str | None = None
    edge_state: str = "pending"
    created_at: datetime
    created_by: str = "engine"


class EdgeGroup(Struct, frozen=True, kw_only=True):
    """All applied edges into one execution, and what they have come to."""

    downstream_execution_id: ExecutionId
    policy: EdgeGroupPolicy
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: GroupState
    satisfied_at: datetime | None = None


class FlowSnapshot(Struct, frozen=True, kw_only=True):
    """A flow's header with its groups."""

    flow_id: FlowId
    flow_kind: str
    namespace: str
    public_flow_state: str
    graph_revision: int
    node_count: int
    edge_count: int
    created_at: datetime
    last_mutation_at: datetime
    cancelled_at: datetime | None = None
    cancel_reason: str | None = None
    cancellation_policy: CancellationPolicy | None = None
    tags: dict[str, str] = {}
    edge_groups: tuple[EdgeGroup, ...] = ()


class FlowSummary(Struct, frozen=True, kw_only=True):
    """How many members are in which state, as last counted."""

    flow_id: FlowId
    total_members: int
    sampled_members: int
    members_completed: int
    members_failed: int
    members_cancelled: int
    members_expired: int
    members_skipped: int
    members_active: int
    members_suspended: int
    members_waiting: int
    members_delayed: int
    members_rate_limited: int
    members_waiting_children: int
    public_flow_state: FlowState
    last_summary_update_at: datetime


class FlowInfo(Struct, frozen=True, kw_only=True):
    """A line of `list_flows`."""

    flow_id: FlowId
    created_at: datetime
    status: FlowStatus
    flow_kind: str = ""
    namespace: str = ""
    node_count: int = 0


class FlowNode(Struct, frozen=True, kw_only=True):
    """A member as a picture of the flow shows it. `name` is the node's name, empty for members added one by one."""

    execution_id: ExecutionId
    name: str
    execution_kind: str
    state: State
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    failure_reason: str | None = None
    cancellation_reason: str | None = None
    policy: EdgeGroupPolicy | None = None


class FlowGraph(Struct, frozen=True, kw_only=True):
    """A flow with its members and edges: what is drawn."""

    flow: FlowSnapshot
    nodes: tuple[FlowNode, ...]
    edges: tuple[EdgeSnapshot, ...]


# What the operations answer.


class FlowCreated(Struct, frozen=True):
    flow_id: FlowId


class FlowExists(Struct, frozen=True):
    """The id was used before, and nothing was overwritten."""

    flow_id: FlowId


class Added(Struct, frozen=True):
    execution_id: ExecutionId
    new_node_count: int


class AlreadyMember(Struct, frozen=True):
    execution_id: ExecutionId
    node_count: int


class Staged(Struct, frozen=True):
    edge_id: UUID
    new_graph_revision: int


class Applied(Struct, frozen=True):
    """`unsatisfied_count`: applied edges into the downstream that are still to be satisfied."""

    unsatisfied_count: int


class AlreadyApplied(Struct, frozen=True):
    """The edge was applied before."""


class CascadeOutcome(Struct, frozen=True):
    resolved: int
    cascaded_children: int = 0
    synchronous: bool = False


class Advanced(Struct, frozen=True):
    """An event was dispatched; so many edges were resolved by this call."""

    resolved: int


class NoOp(Struct, frozen=True):
    """The event had been dispatched before."""


class FlowCancelHeader(Struct, frozen=True, kw_only=True):
    """The flow is cancelled; its members are owed a cancel each."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]
    target_count: int


class FlowAlreadyTerminal(Struct, frozen=True, kw_only=True):
    """The flow was closed before, as it says here."""

    stored_cancellation_policy: CancellationPolicy | None
    stored_cancel_reason: str | None
    member_execution_ids: tuple[ExecutionId, ...]


class FlowCancelled(Struct, frozen=True, kw_only=True):
    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]


class CancellationScheduled(Struct, frozen=True, kw_only=True):
    """The members will be cancelled in the background."""

    cancellation_policy: CancellationPolicy
    member_count: int
    member_execution_ids: tuple[ExecutionId, ...]


class PartiallyCancelled(Struct, frozen=True, kw_only=True):
    """Some members could not be cancelled yet; the reconciler tries again."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]
    failed_member_execution_ids: tuple[ExecutionId, ...]


def policy_from_json(value: Mapping[str, Any], field: str = "policy") -> EdgeGroupPolicy:
    """A policy from its wire form: `{"kind": "all_of"}` and so on."""
    kind = value.get("kind")
    rest = value.get("on_satisfied", OnSatisfied.CANCEL_REMAINING)
    match kind:
        case "all_of":
            return AllOf()
        case "any_of":
            return check_policy(AnyOf(rest), field)
        case "quorum":
            return check_policy(Quorum(value.get("k"), rest), field)  # type: ignore[arg-type]
    raise InvalidInput(f"got kind {kind!r}", field=field, allowed="all_of, any_of, quorum")


def policy_to_json(policy: EdgeGroupPolicy) -> dict[str, Any]:
    """The wire form of a policy."""
    match policy:
        case AllOf():
            return {"kind": "all_of"}
        case AnyOf(on_satisfied):
            return {"kind": "any_of", "on_satisfied": str(on_satisfied)}
        case Quorum(k, on_satisfied):
            return {"kind": "quorum", "k": k, "on_satisfied": str(on_satisfied)}


def check_policy(value: object, field: str = "policy") -> EdgeGroupPolicy:
    """The policy, if it can be one."""
    if isinstance(value, Mapping):
        return policy_from_json(value, field)
    if type(value) not in (AllOf, AnyOf, Quorum):
        raise InvalidInput(
            f"got {type(value).__name__}",
            field=field,
            allowed="AllOf(), AnyOf(on_satisfied) or Quorum(k, on_satisfied)",
        )
    if isinstance(value, AllOf):
        return value
    assert isinstance(value, AnyOf | Quorum)
    try:
        rest = OnSatisfied(value.on_satisfied)
    except ValueError:
        raise InvalidInput(
            f"got {value.on_satisfied!r}", field=f"{field}.on_satisfied", allowed=", ".join(OnSatisfied)
        ) from None
    if isinstance(value, AnyOf):
        return AnyOf(rest)
    if type(value.k) is not int or not 1 <= value.k <= MAX_QUORUM:
        raise InvalidInput(f"got {value.k!r}", field=f"{field}.k", allowed=f"an integer from 1 to {MAX_QUORUM}")
    return Quorum(value.k, rest)


# A whole graph, as it is submitted.


class NewEdge(Struct, frozen=True, kw_only=True):
    """What a new node comes after: a node of the same call by name, or an execution that is a member already.

    `passes_result` gives the upstream's result to the worker beside the input; `data_passing_ref` (any text) puts it in
    the input's place.
    """

    upstream: str | ExecutionId
    data_passing_ref: str | None = None
    passes_result: bool = False
    edge_id: UUID | None = None


class NewNode(Struct, frozen=True, kw_only=True):
    """One execution of a graph, what it comes after and how that joins. Its flow and partition are the graph's."""

    name: str
    execution: NewExecution
    after: Sequence[NewEdge] = ()
    policy: EdgeGroupPolicy = AllOf()


class FlowSubmitted(Struct, frozen=True, kw_only=True):
    """A flow as it was submitted or grew: the executions by the names of their nodes.

    `existed`: a call with this flow id, or these executions, had been made before, and nothing was changed.
    """

    flow_id: FlowId
    nodes: dict[str, ExecutionId]
    existed: bool = False


def check_graph(nodes: Sequence[NewNode]) -> list[int]:
    """Refuse what cannot be a graph, naming the node; answers the places of the nodes, upstreams first."""
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
            raise InvalidInput(f"{name!r} is used twice", field=f"nodes[{place}].name", allowed="a name of its own")
        places[name] = place
    downstreams: list[list[int]] = [[] for _ in nodes]
    waits = [0] * len(nodes)
    for place, node in enumerate(nodes):
        policy = check_policy(node.policy, f"nodes[{place}].policy")
        for edge in node.after:
            if not isinstance(edge, NewEdge):
                raise InvalidInput(f"got {type(edge).__name__}", field=f"nodes[{place}].after", allowed="NewEdge")
            if isinstance(edge.upstream, ExecutionId):
                ExecutionId.parse(edge.upstream, f"nodes[{place}].after")
                continue
            upstream = places.get(edge.upstream) if isinstance(edge.upstream, str) else None
            if upstream is None:
                raise InvalidInput(
                    f"{node.name!r} comes after {edge.upstream!r}, which is no node of this graph",
                    field=f"nodes[{place}].after",
                    allowed="names of nodes of the same call, or execution ids of members",
                )
            if upstream == place:
                raise Conflict("self_referencing_edge", f"node {node.name!r} comes after itself")
            downstreams[upstream].append(place)
            waits[place] += 1
        wanted = policy.k if isinstance(policy, Quorum) else 0 if isinstance(policy, AllOf) else 1
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
    """The names along one cycle, from upstream to downstream, the first again at the end."""
    # Everything that still waits has an upstream that still waits: going up long enough meets a node twice.
    place = next(place for place, count in enumerate(waits) if count)
    seen: dict[int, int] = {}
    way: list[int] = []
    while place not in seen:
        seen[place] = len(way)
        way.append(place)
        place = next(
            places[edge.upstream]
            for edge in nodes[place].after
            if not isinstance(edge.upstream, ExecutionId) and waits[places[edge.upstream]]
        )
    return [nodes[place].name for place in [place, *reversed(way[seen[place] :])]]


# What can be run again.


RACE_LOST = "sibling_quorum_satisfied"
_UNSUCCESSFUL = (State.FAILED, State.CANCELLED, State.EXPIRED, State.SKIPPED)


def replayable(graph: FlowGraph) -> list[FlowNode]:
    """What did not succeed and what was skipped because of it: the members that run if all of them are replayed.

    Neither who lost a race that somebody else won, nor who was skipped because of that: nothing would release them.
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
