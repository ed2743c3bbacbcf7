"""Flows: whole graphs in one call, and their parts one by one: members, edges, the policies of joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from flowfabric._postgres import grow_call
from flowfabric._postgres.grow_call import GrowCall
from flowfabric.engine.calls import MAX_BATCH, Calls, check_int, parse_execution
from flowfabric.errors import (
    Conflict,
    Contention,
    FlowFabricError,
    InvalidInput,
    NotFound,
    StateError,
    TransportError,
    ValidationFailed,
)
from flowfabric.values.checks import check_tags, check_text
from flowfabric.values.flow import (
    Added,
    AlreadyApplied,
    AlreadyMember,
    Applied,
    Edge,
    EdgeSnapshot,
    FlowCreated,
    FlowExists,
    Staged,
)
from flowfabric.values.graph import FlowSubmitted, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, crc16, mint_uuid, parse_uuid
from flowfabric.values.joins import AllOf, EdgeGroupPolicy, OnSatisfied, Quorum, check_policy

_STAGE = "select code, place, revision from flowfabric.stage_edges($1, $2, $3, $4, $5, $6, $7, $8)"
_KIND = "success_only"


class FlowCalls(Calls):
    """What the groups of flow operations share."""

    def _flow(self, flow_id: object) -> tuple[int, UUID]:
        """The partition of a flow, and its id."""
        uuid = parse_uuid(flow_id, "flow_id")
        return crc16(uuid.bytes) % self._database.flow_partitions, uuid

    def _member(self, flow: tuple[int, UUID], execution_id: object, field: str = "execution_id") -> ExecutionId:
        """An execution that could be a member of the flow: one of its partition."""
        found = parse_execution(execution_id, field)
        if found.partition != flow[0]:
            raise InvalidInput(
                f"partition_mismatch: {found} is not in the partition of flow {flow[1]}",
                field=field,
                allowed=f"{{fp:{flow[0]}}}:... (create it with flow_id)",
            )
        return found

    @staticmethod
    def _closed(code: str, flow: tuple[int, UUID]) -> FlowFabricError | None:
        """The refusal that a flow as such is the reason for."""
        if code == "flow_not_found":
            return NotFound("flow", flow[1])
        if code == "flow_already_terminal":
            return StateError(code, f"flow {flow[1]} takes no changes any more")
        return None

    @staticmethod
    def _uuid(flow: tuple[int, UUID], execution_id: ExecutionId) -> UUID:
        """Its uuid, or that of no execution when it lies in another partition and so cannot be a member."""
        return execution_id.uuid if execution_id.partition == flow[0] else UUID(int=0)

    async def _edges_of(
        self,
        flow: tuple[int, UUID],
        *,
        upstream: UUID | None = None,
        downstream: UUID | None = None,
        edge: UUID | None = None,
    ) -> list[EdgeSnapshot]:
        found = await self._fetch(
            "select edge_id, upstream, downstream, data_passing_ref, applied_at, created_at"
            " from flowfabric.read_edges($1, $2, $3, $4, $5)",
            *flow,
            upstream,
            downstream,
            edge,
            repeatable=True,
        )
        partition, flow_id = flow[0], FlowId(flow[1])
        return [
            EdgeSnapshot(
                edge_id=row["edge_id"],
                flow_id=flow_id,
                upstream_execution_id=ExecutionId.of(partition, row["upstream"]),
                downstream_execution_id=ExecutionId.of(partition, row["downstream"]),
                data_passing_ref=row["data_passing_ref"],
                edge_state="pending" if row["applied_at"] is None else "applied",
                created_at=row["created_at"],
            )
            for row in found
        ]


class Flows(FlowCalls):
    """submit_flow, extend_flow, create_flow, add members, stage and apply edges, set policies."""

    async def submit_flow(
        self,
        nodes: Sequence[NewNode],
        *,
        flow_kind: str = "",
        namespace: str = "",
        flow_id: FlowId | None = None,
        tags: dict[str, str] | None = None,
        connection: asyncpg.Connection[Any] | None = None,
    ) -> FlowSubmitted:
        """Store a whole graph in one call: all of it, or nothing.

        A flow id that was used before answers `existed` and changes nothing. With `connection`, an asyncpg connection
        with a transaction of yours, the flow exists when you commit.
        """
        uuid = mint_uuid() if flow_id is None else parse_uuid(flow_id, "flow_id")
        call = GrowCall(
            uuid,
            nodes,
            self._database.flow_partitions,
            is_new=True,
            kind=check_text(flow_kind, "flow_kind"),
            namespace=check_text(namespace, "namespace"),
            tags=check_tags(tags),
        )
        if call.old:
            raise InvalidInput(
                f"{call.old[0]} is no node of a new flow", field="nodes", allowed="names of nodes of the same call"
            )
        return await self._grow(uuid, call, connection)

    async def extend_flow(
        self, flow_id: FlowId, nodes: Sequence[NewNode], *, connection: asyncpg.Connection[Any] | None = None
    ) -> FlowSubmitted:
        """Add nodes to a flow that is open: all of them, or none. They may come after members that exist."""
        uuid = parse_uuid(flow_id, "flow_id")
        call = GrowCall(uuid, nodes, self._database.flow_partitions, is_new=False)
        return await self._grow(uuid, call, connection)

    async def _grow(self, flow_id: UUID, call: GrowCall, connection: asyncpg.Connection[Any] | None) -> FlowSubmitted:
        repeated = False
        if connection is not None:
            row = (await connection.fetch(grow_call.SQL, *call.args))[0]
        else:
            try:
                row = await self._row(grow_call.SQL, *call.args)
            except TransportError as error:
                if not error.retryable:
                    raise
                # The answer was lost, the ids are ours: asking again makes nothing twice.
                repeated = True
                row = await self._row(grow_call.SQL, *call.args, repeatable=True)
        code, place = row["code"], row["place"]
        if code == "ok":
            return FlowSubmitted(flow_id=FlowId(flow_id), nodes=call.nodes)
        if code == "exists":
            standing = await self._standing(flow_id, call, connection)
            is_ours = repeated and standing == call.nodes
            return FlowSubmitted(flow_id=FlowId(flow_id), nodes=standing, existed=not is_ours)
        if closed := self._closed(code, self._flow(flow_id)):
            raise closed
        if code == "execution_not_in_flow":
            raise StateError(code, f"{call.old[place - 1]} is no member of flow {flow_id}")
        if code == "lane_closed":
            raise StateError(code, f"the lane of node {call.name(place)!r} takes no new executions")
        if code == "dependency_already_exists":
            edge_id = call.edges[place - 1]
            raise Conflict(code, f"edge {edge_id} is in the graph", existing=edge_id)
        raise Conflict(code, f"the execution of node {call.name(place)!r} exists outside flow {flow_id}")

    async def _standing(
        self, flow_id: UUID, call: GrowCall, connection: asyncpg.Connection[Any] | None
    ) -> dict[str, ExecutionId]:
        """The nodes that an earlier call made. An extension is known by the ids of its nodes."""
        if not call.is_new:
            return call.nodes
        members = "select partition, id, node from flowfabric.read_members($1, false) where node is not null"
        if connection is not None:
            found = await connection.fetch(members, flow_id)
        else:
            found = await self._fetch(members, flow_id, repeatable=True)
        return {row["node"]: ExecutionId.of(row["partition"], row["id"]) for row in found}

    async def create_flow(
        self, flow_id: FlowId | None = None, *, flow_kind: str = "", namespace: str = ""
    ) -> FlowCreated | FlowExists:
        """An empty flow. A known id answers `FlowExists`, and nothing is overwritten."""
        partition, uuid = self._flow(mint_uuid() if flow_id is None else flow_id)
        row = await self._row(
            "select flowfabric.create_flow($1, $2, $3, $4) as made",
            partition,
            uuid,
            check_text(flow_kind, "flow_kind"),
            check_text(namespace, "namespace"),
        )
        return FlowCreated(FlowId(uuid)) if row["made"] else FlowExists(FlowId(uuid))

    async def add_execution_to_flow(self, flow_id: FlowId, execution_id: ExecutionId) -> Added | AlreadyMember:
        """Make an execution a member, for good. Create it with `flow_id`, so that it lies in the flow's partition."""
        flow = self._flow(flow_id)
        target = self._member(flow, execution_id)
        row = await self._add(flow, [target], ["execution_id"])
        if row["code"] == "already_member":
            return AlreadyMember(target, row["members"])
        return Added(target, row["members"])

    async def add_executions_to_flow(self, flow_id: FlowId, execution_ids: Sequence[ExecutionId]) -> int:
        """Make up to 1,000 executions members, all or none; answers how many members the flow has now."""
        flow = self._flow(flow_id)
        if isinstance(execution_ids, str | bytes) or not isinstance(execution_ids, Sequence):
            raise InvalidInput(f"got {type(execution_ids).__name__}", field="execution_ids", allowed="a list")
        if len(execution_ids) > MAX_BATCH:
            raise InvalidInput(f"{len(execution_ids)} items", field="execution_ids", allowed=f"at most {MAX_BATCH}")
        fields = [f"execution_ids[{place}]" for place in range(len(execution_ids))]
        targets = [self._member(flow, one, field) for one, field in zip(execution_ids, fields, strict=True)]
        return int((await self._add(flow, targets, fields))["members"])

    async def _add(self, flow: tuple[int, UUID], targets: list[ExecutionId], fields: list[str]) -> asyncpg.Record:
        row = await self._row(
            "select code, place, other, members from flowfabric.add_to_flow($1, $2, $3)",
            *flow,
            [one.uuid for one in targets],
            repeatable=True,
        )
        code = row["code"]
        if closed := self._closed(code, flow):
            raise closed
        if code == "execution_not_found":
            raise NotFound("execution", targets[row["place"] - 1], detail=fields[row["place"] - 1])
        if code == "execution_already_in_flow":
            target = targets[row["place"] - 1]
            raise Conflict(
                code,
                f"already_member_of_different_flow:{row['other']} ({fields[row['place'] - 1]})",
                existing=row["other"],
                execution_id=target,
            )
        return row

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
        """Put an edge into the graph. It gates nothing until it is applied."""
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
        """Stage and apply edges, all or none, with one check for cycles; answers the revision now.

        A refusal names the first edge in the way by its place.
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
            _STAGE, *flow, *columns, check_int(revision, "expected_graph_revision", 0, 2**63 - 1), apply
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
            raise StateError(code, f"{named}{chosen.upstream} or {chosen.downstream} is no member of flow {flow[1]}")
        if code == "cycle_detected":
            raise Conflict(code, f"{named}{chosen.downstream} comes before {chosen.upstream} already")
        existing = await self._edges_of(flow, edge=parse_uuid(chosen.edge_id, "edge_id"))
        error = Conflict(code, f"{named}edge {chosen.edge_id} is in the graph", existing=chosen.edge_id)
        error.edge = existing[0] if existing else None
        raise error

    def _edge(self, flow: tuple[int, UUID], edge: Edge, where: str) -> tuple[UUID, UUID, UUID, str | None]:
        """An edge, checked: id, upstream, downstream, reference."""
        edge_id = parse_uuid(edge.edge_id, f"{where}edge_id")
        upstream = parse_execution(edge.upstream, f"{where}upstream_execution_id")
        downstream = parse_execution(edge.downstream, f"{where}downstream_execution_id")
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
        """Let a staged edge gate its downstream. An upstream that has ended counts at once."""
        flow = self._flow(flow_id)
        check_int(graph_revision, "graph_revision", 0, 2**63 - 1)
        edge_uuid = parse_uuid(edge_id, "edge_id")
        upstream = parse_execution(upstream_execution_id, "upstream_execution_id")
        downstream = parse_execution(downstream_execution_id, "downstream_execution_id")
        ref = None if data_passing_ref is None else check_text(data_passing_ref, "data_passing_ref") or None
        row = await self._row(
            "select code, unsatisfied, detail from flowfabric.apply_edge($1, $2, $3, $4, $5, $6, $7)",
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
                raise StateError(code, f"{downstream} is no member of flow {flow[1]}")
            case _:
                raise Conflict(code, f"{downstream} is a member of another flow", execution_id=downstream)

    async def set_edge_group_policy(
        self, flow_id: FlowId, downstream_execution_id: ExecutionId, policy: EdgeGroupPolicy
    ) -> str:
        """How the edges into an execution join, before the first of them is staged: `Set` or `AlreadySet`."""
        flow = self._flow(flow_id)
        checked = check_policy(policy)
        target = self._member(flow, downstream_execution_id, "downstream_execution_id")
        row = await self._row(
            "select flowfabric.set_group_policy($1, $2, $3, $4, $5, $6) as code",
            *flow,
            target.uuid,
            "all_of" if isinstance(checked, AllOf) else "quorum" if isinstance(checked, Quorum) else "any_of",
            None if isinstance(checked, AllOf) else checked.k if isinstance(checked, Quorum) else 1,
            not isinstance(checked, AllOf) and checked.on_satisfied is OnSatisfied.CANCEL_REMAINING,
        )
        code = row["code"]
        if closed := self._closed(code, flow):
            raise closed
        if code == "edge_group_policy_already_fixed":
            raise InvalidInput(
                f"{code}: dependencies already staged", field="policy", allowed="a policy before the first edge"
            )
        return "Set" if code == "set" else "AlreadySet"
