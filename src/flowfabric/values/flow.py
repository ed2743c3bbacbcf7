"""Flows as they are read, and the results of the operations on them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from msgspec import Struct

from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import EdgeGroupPolicy
from flowfabric.values.state import State


class CancellationPolicy(StrEnum):
    """Which members `cancel_flow` cancels."""

    CANCEL_ALL = "cancel_all"
    CANCEL_PENDING = "cancel_pending"
    FLOW_ONLY = "flow_only"


class GroupState(StrEnum):
    """Whether the join of an edge group is decided, and how."""

    PENDING = "pending"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class FlowState(StrEnum):
    """The derived state of a flow, as stored in its summary."""

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


class MemberOutcome(Struct, frozen=True, kw_only=True):
    """How a member of a flow ended."""

    name: str
    execution_id: ExecutionId
    execution_kind: str
    outcome: Outcome


class FlowOutcome(Struct, frozen=True, kw_only=True):
    """How a flow ended: its members, those among them that failed by name, and why it was cancelled, if it was."""

    members: tuple[MemberOutcome, ...]
    failed: tuple[str, ...] = ()
    is_cancelled: bool = False
    reason: str | None = None


class Edge(Struct, frozen=True, kw_only=True):
    """A new dependency: `downstream` waits for `upstream`."""

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
    """All applied edges into one execution, and the state of their join."""

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
    """A flow's header with its groups. `parent_id` is the execution whose handler submitted it."""

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
    parent_id: ExecutionId | None = None


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
    """A line of `list_flows`.

    `state` is that of the last count of its members, in the words of its summary; None with the status `unknown`.
    """

    flow_id: FlowId
    created_at: datetime
    status: FlowStatus
    state: FlowState | None = FlowState.OPEN
    flow_kind: str = ""
    namespace: str = ""
    node_count: int = 0


class FlowNode(Struct, frozen=True, kw_only=True):
    """A member as a drawing of the flow shows it. `name` is the node's name, empty for members added one by one."""

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
    """A flow with its members and edges, for drawing."""

    flow: FlowSnapshot
    nodes: tuple[FlowNode, ...]
    edges: tuple[EdgeSnapshot, ...]


# Results of the operations.


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
    """`unsatisfied_count`: applied edges into the downstream that are not satisfied yet."""

    unsatisfied_count: int


class AlreadyApplied(Struct, frozen=True):
    """The edge was applied before."""


class CascadeOutcome(Struct, frozen=True):
    resolved: int
    cascaded_children: int = 0
    synchronous: bool = False


class Advanced(Struct, frozen=True):
    """The call dispatched an event and resolved this many edges."""

    resolved: int


class NoOp(Struct, frozen=True):
    """The event was dispatched before."""


class FlowCancelHeader(Struct, frozen=True, kw_only=True):
    """The flow is cancelled; each of its members still has to be cancelled."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]
    target_count: int


class FlowAlreadyTerminal(Struct, frozen=True, kw_only=True):
    """The flow was closed before; the fields say how. `target_count`: replayed members that are cancelled again."""

    stored_cancellation_policy: CancellationPolicy | None
    stored_cancel_reason: str | None
    member_execution_ids: tuple[ExecutionId, ...]
    target_count: int = 0


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
