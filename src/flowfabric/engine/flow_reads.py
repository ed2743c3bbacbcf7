"""Reading flows: headers, groups, members, lists, summaries."""

from __future__ import annotations

from datetime import datetime

import msgspec

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import FlowOperations, first_page
from flowfabric.engine.checks import check_int, check_limit, parse_time_cursor, time_cursor
from flowfabric.errors import NotFound
from flowfabric.values.checks import check_text
from flowfabric.values.flow import FlowGraph, FlowInfo, FlowNode, FlowSnapshot, FlowSummary
from flowfabric.values.ids import ExecutionId, FlowId, PartitionKey
from flowfabric.values.page import Page
from flowfabric.values.state import State


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a flow, and how it ended."""

    execution_id: ExecutionId
    name: str
    execution_kind: str
    state: State
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    failure_reason: str | None
    failure_category: str | None
    cancellation_reason: str | None
    result: bytes | None
    result_encoding: str | None


def member_cursor(member: Member) -> str:
    """Return the cursor after a member."""
    return time_cursor(member.created_at, member.execution_id)


class FlowReads(FlowOperations):
    """describe_flow, read_flow_graph, list_flow_members, flow_progress, list_flows, find_flows, summaries."""

    async def describe_flow(self, flow_id: FlowId) -> FlowSnapshot | None:
        """Return the header of a flow with its groups; None for an unknown flow."""
        flow = self._flow(flow_id)
        found = await self._fetch(statements.DESCRIBE_FLOW, *flow, repeatable=True)
        if not found:
            return None
        return rows.flow_snapshot(found[0], flow[0])

    async def read_flow_graph(self, flow_id: FlowId) -> FlowGraph | None:
        """Return a flow with its members and edges, for drawing; None for an unknown flow."""
        flow = self._flow(flow_id)
        snapshot = await self.describe_flow(FlowId(flow[1]))
        if snapshot is None:
            return None
        policies = {group.downstream_execution_id: group.policy for group in snapshot.edge_groups}
        nodes = tuple(
            FlowNode(
                execution_id=member.execution_id,
                name=member.name,
                execution_kind=member.execution_kind,
                state=member.state,
                created_at=member.created_at,
                started_at=member.started_at,
                completed_at=member.completed_at,
                failure_reason=member.failure_reason,
                cancellation_reason=member.cancellation_reason,
                policy=policies.get(member.execution_id),
            )
            for member in await self.list_flow_members(FlowId(flow[1]))
        )
        return FlowGraph(flow=snapshot, nodes=nodes, edges=tuple(await self._edges_of(flow)))

    async def list_flow_members(
        self, flow_id: FlowId, *, results: bool = False, cursor: str | None = None, limit: int | None = None
    ) -> list[Member]:
        """Return the members of a flow in creation order, with their results if asked; empty for an unknown flow.

        With a `limit` at most that many, after the member that `member_cursor` of the last one names.
        """
        _, uuid = self._flow(flow_id)
        at, after = parse_time_cursor(cursor)
        size = None if limit is None else check_int(limit, "limit", 1, 100_000)
        found = await self._fetch(statements.READ_MEMBERS, uuid, bool(results), at, after, size, repeatable=True)
        return [
            Member(
                execution_id=ExecutionId(row["id"]),
                name=row["node"] or "",
                execution_kind=row["kind"],
                state=State(row["state"]),
                created_at=row["created_at"],
                started_at=row["started_at"],
                completed_at=row["completed_at"],
                failure_reason=row["failure_reason"],
                failure_category=row["failure_category"],
                cancellation_reason=row["cancellation_reason"],
                result=row["result"],
                result_encoding=row["result_encoding"],
            )
            for row in found
        ]

    async def flow_progress(self, flow_id: FlowId) -> tuple[int, int, str]:
        """Return how many members a flow has, how many of them have not ended, and the state of its header."""
        flow = self._flow(flow_id)
        found = await self._fetch(statements.FLOW_PROGRESS, *flow, repeatable=True)
        if not found:
            raise NotFound("flow", flow[1])
        return found[0]["members"], found[0]["live"], found[0]["state"]

    async def list_flows(
        self, partition_key: int | str | PartitionKey, *, cursor: FlowId | None = None, limit: int = 100
    ) -> Page[FlowInfo, FlowId]:
        """Return the flows of one partition in the order of their ids."""
        return await self._partition_page(
            statements.LIST_FLOWS, partition_key, cursor, limit, rows.flow_info, lambda last: last.flow_id
        )

    async def find_flows(
        self,
        *,
        namespace: str | None = None,
        flow_kind: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[FlowInfo, str]:
        """Return flows of all partitions, newest first."""
        size = check_limit(limit, 1000)
        before, before_id = parse_time_cursor(cursor)
        chosen = [None if value is None else check_text(value, name)
                  for name, value in (("namespace", namespace), ("flow_kind", flow_kind))]  # fmt: skip
        if size == 0:
            return Page((), None)
        found = await self._fetch(
            statements.FIND_FLOWS,
            before,
            before_id,
            *chosen,
            size + 1,
            repeatable=True,
        )
        flows = [rows.flow_info(row) for row in found]
        return first_page(flows, size, lambda last: time_cursor(last.created_at, last.flow_id))

    async def project_flow_summary(self, flow_id: FlowId) -> bool:
        """Count the members of one flow now, and store the count; False if it has none or does not exist."""
        partition, uuid = self._flow(flow_id)
        row = await self._row(statements.PROJECT_FLOWS, [partition], [uuid], repeatable=True)
        return bool(row["n"])

    async def read_flow_summary(self, flow_id: FlowId, *, now: bool = False) -> FlowSummary | None:
        """Return the counts of a flow's members as last counted; None before that.

        `now`: count them for this call; None for a flow without members.
        """
        found = await self._fetch(statements.READ_SUMMARY, *self._flow(flow_id), bool(now), repeatable=True)
        if not found:
            return None
        return rows.flow_summary(found[0])

    async def project_flow_summaries(self, *, limit: int = 10_000) -> tuple[int, bool]:
        """Count again the flows that changed since; returns how many, and whether there are more."""
        row = await self._row(statements.PROJECT_TOUCHED, check_int(limit, "limit", 1, 1_000_000))
        return row["counted"], row["more"]
