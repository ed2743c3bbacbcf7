"""Single edges: stage, apply, resolve and repair them, for schedulers and ports from FlowFabric in Rust."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric.engine.base import FlowOperations
from flowfabric.engine.checks import check_filter, check_int, most_rows
from flowfabric.errors import Conflict, Contention, InvalidInput, NotFound, StateError, ValidationFailed
from flowfabric.values.checks import check_text
from flowfabric.values.flow import AlreadyApplied, Applied, Edge, EdgeSnapshot, Staged
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id, parse_uuid
from flowfabric.values.joins import EdgeGroupPolicy, check_policy, policy_columns
from flowfabric.values.page import ScannerFilter
from flowfabric.values.words import Eligibility, PolicySet, Resolution

_KIND = "success_only"
_OUTCOMES = ("success", "failed", "cancelled", "expired", "skipped")


class EdgePass(Struct, frozen=True, kw_only=True):
    """A pass over edge groups: how many were scanned, and how many of them the cascade had missed."""

    scanned: int
    reconciled: int
    more: bool = False


class EdgePlace(Struct, frozen=True):
    """The cursor of a pass over the edge groups."""

    partition: int
    flow_id: UUID
    downstream: UUID


class Edges(FlowOperations):
    """stage, apply, describe and list edges, set policies, resolve_dependency, reconcile_edges."""

    async def stage_dependency_edge(
        self,
        flow_id: FlowId,
        *,
        edge_id: UUID,
        upstream_execution_id: ExecutionId,
        downstream_execution_id: ExecutionId,
        expected_graph_revision: int,
        dependency_kind: str = _KIND,
        data_passing_ref: str | None = None,
    ) -> Staged:
        """Add an edge to the graph. It blocks nothing until it is applied."""
        edge = Edge(
            edge_id=edge_id,
            upstream=upstream_execution_id,
            downstream=downstream_execution_id,
            dependency_kind=dependency_kind,
            data_passing_ref=data_passing_ref,
        )
        revision = await self._stage(flow_id, [edge], expected_graph_revision, apply=False)
        return Staged(parse_uuid(edge_id, "edge_id"), revision)

    async def stage_and_apply_edges(
        self, flow_id: FlowId, edges: Sequence[Edge], *, expected_graph_revision: int
    ) -> int:
        """Stage and apply edges, all or none, with one check for cycles; returns the new revision.

        A refusal names the index of the first refused edge.
        """
        if isinstance(edges, str | bytes) or not isinstance(edges, Sequence) or not edges:
            raise InvalidInput("no edges", field="edges", allowed="a list of at least one Edge")
        return await self._stage(flow_id, edges, expected_graph_revision, apply=True)

    async def _stage(self, flow_id: FlowId, edges: Sequence[Edge], revision: int, *, apply: bool) -> int:
        flow = self._flow(flow_id)
        columns: tuple[list[Any], ...] = ([], [], [], [])
        for place, edge in enumerate(edges):
            where = f"edges[{place}]." if apply else ""
            if not isinstance(edge, Edge):
                raise InvalidInput(f"got {type(edge).__name__}", field=f"edges[{place}]", allowed="an Edge")
            checked = self._edge(flow, edge, where)
            for column, value in zip(columns, checked, strict=True):
                column.append(value)
        row = await self._row(
            statements.STAGE_EDGES, *flow, *columns, check_int(revision, "expected_graph_revision", 0, 2**63 - 1), apply
        )
        code, place = row["code"], row["place"]
        if code == "ok":
            return int(row["revision"])
        if closed := self._closed(code, flow):
            raise closed
        if code == "stale_graph_revision":
            raise Contention(code, f"the graph is at revision {row['revision']}")
        chosen = edges[place - 1]
        named = f"edges[{place - 1}]: " if apply else ""
        if code == "execution_not_in_flow":
            raise StateError(code, f"{named}{chosen.upstream} or {chosen.downstream} is not a member of flow {flow[1]}")
        if code == "cycle_detected":
            raise Conflict(code, f"{named}{chosen.downstream} already comes before {chosen.upstream}")
        existing = await self._edges_of(flow, edge=parse_uuid(chosen.edge_id, "edge_id"))
        error = Conflict(code, f"{named}edge {chosen.edge_id} is in the graph", existing=chosen.edge_id)
        error.edge = existing[0] if existing else None
        raise error

    def _edge(self, flow: tuple[int, UUID], edge: Edge, where: str) -> tuple[UUID, UUID, UUID, str | None]:
        """Check an edge and return its id, upstream, downstream and reference."""
        edge_id = parse_uuid(edge.edge_id, f"{where}edge_id")
        upstream = parse_execution_id(edge.upstream, f"{where}upstream_execution_id")
        downstream = parse_execution_id(edge.downstream, f"{where}downstream_execution_id")
        if upstream == downstream:
            raise Conflict("self_referencing_edge", f"{where}{upstream} cannot wait for itself")
        if edge.dependency_kind != _KIND:
            raise ValidationFailed(
                "invalid_dependency", f"{where}dependency_kind: got {edge.dependency_kind!r}, allowed: {_KIND}"
            )
        ref = edge.data_passing_ref
        ref = None if ref is None else check_text(ref, f"{where}data_passing_ref") or None
        return edge_id, self._uuid(flow, upstream), self._uuid(flow, downstream), ref

    async def apply_dependency_to_child(
        self,
        flow_id: FlowId,
        *,
        edge_id: UUID,
        upstream_execution_id: ExecutionId,
        downstream_execution_id: ExecutionId,
        graph_revision: int = 0,
        dependency_kind: str = _KIND,
        data_passing_ref: str | None = None,
    ) -> Applied | AlreadyApplied:
        """Let a staged edge block its downstream. An upstream that has ended counts immediately."""
        flow = self._flow(flow_id)
        check_int(graph_revision, "graph_revision", 0, 2**63 - 1)
        edge_uuid = parse_uuid(edge_id, "edge_id")
        upstream = parse_execution_id(upstream_execution_id, "upstream_execution_id")
        downstream = parse_execution_id(downstream_execution_id, "downstream_execution_id")
        ref = None if data_passing_ref is None else check_text(data_passing_ref, "data_passing_ref") or None
        row = await self._row(
            statements.APPLY_EDGE,
            *flow,
            edge_uuid,
            self._uuid(flow, upstream),
            self._uuid(flow, downstream),
            dependency_kind == _KIND,
            ref,
        )
        code = row["code"]
        if code == "ok":
            return Applied(row["unsatisfied"])
        if code == "already_applied":
            return AlreadyApplied()
        if closed := self._closed(code, flow):
            raise closed
        match code:
            case "edge_not_found":
                raise ValidationFailed("invalid_dependency", f"edge_not_found: {edge_uuid} in flow {flow[1]}")
            case "edge_differs":
                raise ValidationFailed(
                    "invalid_dependency", f"{row['detail']}: differs from the staged edge {edge_uuid}"
                )
            case "execution_not_found":
                raise NotFound("execution", downstream)
            case "execution_not_in_flow":
                raise StateError(code, f"{downstream} is not a member of flow {flow[1]}")
            case _:
                raise Conflict(code, f"{downstream} is a member of another flow", execution_id=downstream)

    async def set_edge_group_policy(
        self, flow_id: FlowId, downstream_execution_id: ExecutionId, policy: EdgeGroupPolicy
    ) -> PolicySet:
        """Set how the edges into an execution join, before the first one is staged."""
        flow = self._flow(flow_id)
        checked = check_policy(policy)
        target = self._member(flow, downstream_execution_id, "downstream_execution_id")
        row = await self._row(
            statements.SET_GROUP_POLICY,
            *flow,
            target,
            *policy_columns(checked),
        )
        code = row["code"]
        if closed := self._closed(code, flow):
            raise closed
        if code == "edge_group_policy_already_fixed":
            raise InvalidInput(
                f"{code}: dependencies already staged", field="policy", allowed="a policy before the first edge"
            )
        return PolicySet.SET if code == "set" else PolicySet.ALREADY_SET

    async def list_edges(
        self,
        flow_id: FlowId,
        *,
        outgoing: ExecutionId | None = None,
        incoming: ExecutionId | None = None,
        after: UUID | None = None,
        limit: int | None = None,
    ) -> list[EdgeSnapshot]:
        """Return the edges of a flow by id: all, those from `outgoing`, or those into `incoming`.

        Empty for an unknown execution. With a `limit` at most that many, after the edge with the id `after`.
        """
        flow = self._flow(flow_id)
        if outgoing is not None and incoming is not None:
            raise InvalidInput("given with incoming", field="outgoing", allowed="one of them")
        return await self._edges_of(
            flow,
            upstream=None if outgoing is None else self._uuid(flow, parse_execution_id(outgoing, "outgoing")),
            downstream=None if incoming is None else self._uuid(flow, parse_execution_id(incoming, "incoming")),
            after=None if after is None else parse_uuid(after, "after"),
            limit=most_rows(limit),
        )

    async def describe_edge(self, flow_id: FlowId, edge_id: UUID) -> EdgeSnapshot | None:
        """Return one edge; None if it is not in this flow."""
        found = await self._edges_of(self._flow(flow_id), edge=parse_uuid(edge_id, "edge_id"))
        return found[0] if found else None

    async def evaluate_flow_eligibility(self, execution_id: ExecutionId) -> Eligibility:
        """Whether its dependencies let it be claimed."""
        target = parse_execution_id(execution_id)
        row = await self._row(statements.FLOW_ELIGIBILITY, *self._at(target), repeatable=True)
        return Eligibility(row["status"])

    async def resolve_dependency(
        self,
        flow_id: FlowId,
        *,
        edge_id: UUID,
        upstream_execution_id: ExecutionId,
        downstream_execution_id: ExecutionId,
        outcome: str,
    ) -> Resolution:
        """Resolve one edge as if its upstream had this outcome."""
        flow = self._flow(flow_id)
        if outcome not in _OUTCOMES:
            raise InvalidInput(f"got {outcome!r}", field="outcome", allowed=", ".join(_OUTCOMES))
        upstream = parse_execution_id(upstream_execution_id, "upstream_execution_id")
        downstream = parse_execution_id(downstream_execution_id, "downstream_execution_id")
        edge = parse_uuid(edge_id, "edge_id")
        row = await self._row(
            statements.RESOLVE_DEPENDENCY,
            *flow,
            edge,
            upstream,
            downstream,
            outcome,
        )
        match row["code"]:
            case "edge_not_found":
                raise ValidationFailed("invalid_dependency", f"edge_not_found: {edge} between these in flow {flow[1]}")
            case "not_applied":
                raise ValidationFailed("invalid_dependency", f"edge {edge} is staged and not applied")
            case "satisfied":
                return Resolution.SATISFIED
            case "impossible":
                return Resolution.IMPOSSIBLE
            case _:
                return Resolution.ALREADY_RESOLVED

    async def promote_blocked_to_eligible(self, execution_id: ExecutionId) -> None:
        """Release an execution that is blocked though its dependencies are satisfied. A repair."""
        target = parse_execution_id(execution_id)
        row = await self._row(statements.PROMOTE_BLOCKED, *self._at(target))
        match row["code"]:
            case "ok":
                return
            case "not_found":
                raise NotFound("execution", target)
            case code:
                raise StateError(code, execution_id=target)

    async def reconcile_edges(
        self,
        after: EdgePlace | None = None,
        *,
        limit: int = 500,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> tuple[EdgePass, EdgePlace | None]:
        """Scan edge groups for cascades that were missed, and run them; returns the cursor to continue from."""
        row = await self._row(
            statements.RECONCILE_EDGES,
            *((None, None, None) if after is None else _check_place(after)),
            check_int(limit, "limit", 1, 10_000),
            *check_filter(filter),
        )
        place = None if row["flow_id"] is None else EdgePlace(row["partition"], row["flow_id"], row["downstream"])
        return EdgePass(scanned=row["scanned"], reconciled=row["reconciled"], more=place is not None), place


def _check_place(value: object) -> tuple[int, UUID, UUID]:
    if not isinstance(value, EdgePlace):
        raise InvalidInput(f"got {type(value).__name__}", field="after", allowed="the cursor an earlier pass returned")
    partition = check_int(value.partition, "after.partition", 0, 65_535)
    return partition, parse_uuid(value.flow_id, "after.flow_id"), parse_uuid(value.downstream, "after.downstream")
