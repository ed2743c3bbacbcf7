"""Reading flows: headers, groups, edges, members, lists, tags, summaries."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from flowfabric._postgres import rows
from flowfabric.engine.calls import check_limit, moment, parse_execution, parse_partition
from flowfabric.engine.flows import FlowCalls
from flowfabric.errors import Corruption, InvalidInput, NotFound, RetriesExhausted, StateError
from flowfabric.values.checks import check_tag_key, check_text
from flowfabric.values.flow import (
    CancellationPolicy,
    EdgeGroup,
    EdgeSnapshot,
    FlowGraph,
    FlowInfo,
    FlowNode,
    FlowSnapshot,
    FlowState,
    FlowStatus,
    FlowSummary,
    GroupState,
)
from flowfabric.values.ids import ExecutionId, FlowId, PartitionKey, parse_uuid
from flowfabric.values.joins import AllOf, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.page import Page
from flowfabric.values.state import State

_MEMBERS = (
    "select partition, id, node, kind, state, created_at, started_at, completed_at, failure_reason, failure_category,"
    " cancellation_reason, result, result_encoding from flowfabric.read_members($1, $2)"
)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a flow with how it ended."""

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


class FlowReads(FlowCalls):
    """describe_flow, list_flows, edges, members, tags, eligibility, summaries."""

    async def describe_flow(self, flow_id: FlowId) -> FlowSnapshot | None:
        """The header of a flow with its groups; None for an unknown one."""
        flow = self._flow(flow_id)
        found = await self._fetch("select * from flowfabric.describe_flow($1, $2)", *flow, repeatable=True)
        if not found:
            return None
        row = found[0]
        groups = [] if row["downstreams"] is None else list(zip(*(row[name] for name in _GROUP), strict=True))
        return _snapshot(row, tuple(_group(flow[0], *group) for group in groups))

    async def read_flow_graph(self, flow_id: FlowId) -> FlowGraph | None:
        """A flow with its members and edges, for a picture; None for an unknown one."""
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

    async def list_flow_members(self, flow_id: FlowId, *, results: bool = False) -> list[Member]:
        """The members of a flow in the order they were made, with their results if asked; empty for an unknown one."""
        _, uuid = self._flow(flow_id)
        found = await self._fetch(_MEMBERS, uuid, bool(results), repeatable=True)
        return [
            Member(
                execution_id=ExecutionId.of(row["partition"], row["id"]),
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
        """How many members a flow has, how many of them have not ended, and the state of its header."""
        flow = self._flow(flow_id)
        found = await self._fetch(
            "select members, live, state from flowfabric.flow_progress($1, $2)", *flow, repeatable=True
        )
        if not found:
            raise NotFound("flow", flow[1])
        return found[0]["members"], found[0]["live"], found[0]["state"]

    async def list_flows(
        self, partition_key: str | PartitionKey, *, cursor: FlowId | None = None, limit: int = 100
    ) -> Page[FlowInfo, FlowId]:
        """The flows of one partition in the order of their ids."""
        size = check_limit(limit, 1000)
        partition = parse_partition(partition_key, self._database.flow_partitions)
        after = None if cursor is None else parse_uuid(cursor, "cursor")
        if size == 0:
            return Page((), None)
        found = await self._fetch(
            "select * from flowfabric.list_flows($1, $2, null, null, null, null, $3)",
            partition,
            after,
            size + 1,
            repeatable=True,
        )
        items = [_info(row) for row in found[:size]]
        return Page(items, items[-1].flow_id if len(found) > size else None)

    async def find_flows(
        self,
        *,
        namespace: str | None = None,
        flow_kind: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[FlowInfo, str]:
        """Flows of all partitions, newest first."""
        size = check_limit(limit, 1000)
        before, before_id = (None, None) if cursor is None else _parse_cursor(cursor)
        chosen = [None if value is None else check_text(value, name)
                  for name, value in (("namespace", namespace), ("flow_kind", flow_kind))]  # fmt: skip
        if size == 0:
            return Page((), None)
        found = await self._fetch(
            "select * from flowfabric.list_flows(null, null, $1, $2, $3, $4, $5)",
            before,
            before_id,
            *chosen,
            size + 1,
            repeatable=True,
        )
        items = [_info(row) for row in found[:size]]
        more = len(found) > size
        return Page(items, f"{items[-1].created_at.isoformat()}/{items[-1].flow_id}" if more else None)

    async def list_edges(
        self, flow_id: FlowId, *, outgoing: ExecutionId | None = None, incoming: ExecutionId | None = None
    ) -> list[EdgeSnapshot]:
        """The edges that leave `outgoing` or lead to `incoming`, by id; empty where there is no such thing."""
        flow = self._flow(flow_id)
        if (outgoing is None) == (incoming is None):
            raise InvalidInput("both or neither given", field="outgoing", allowed="one of outgoing and incoming")
        if outgoing is not None:
            return await self._edges_of(flow, upstream=self._uuid(flow, parse_execution(outgoing, "outgoing")))
        return await self._edges_of(flow, downstream=self._uuid(flow, parse_execution(incoming, "incoming")))

    async def describe_edge(self, flow_id: FlowId, edge_id: UUID) -> EdgeSnapshot | None:
        """One edge; None when it is not in this flow."""
        found = await self._edges_of(self._flow(flow_id), edge=parse_uuid(edge_id, "edge_id"))
        return found[0] if found else None

    async def evaluate_flow_eligibility(self, execution_id: ExecutionId) -> str:
        """What its dependencies say: eligible, blocked_by_dependencies, impossible, not_runnable or not_found."""
        target = parse_execution(execution_id)
        row = await self._row(
            "select flowfabric.flow_eligibility($1, $2) as status", target.partition, target.uuid, repeatable=True
        )
        return str(row["status"])

    async def set_flow_tag(self, flow_id: FlowId, key: str, value: str) -> None:
        """Set one tag. The key has a namespace and a dot: `billing.invoice`."""
        check_tag_key(key)
        await self.set_flow_tags(flow_id, {key: check_text(value, "value", None)})

    async def set_flow_tags(self, flow_id: FlowId, tags: dict[str, str]) -> int:
        """Set several tags, all or none; answers how many."""
        if not isinstance(tags, dict) or not tags:
            raise InvalidInput("no tags", field="tags", allowed="at least one")
        for key, value in tags.items():
            check_text(value, f"tags[{check_tag_key(key, 'tags key')!r}]", None)
        flow = self._flow(flow_id)
        row = await self._row(
            "select flowfabric.set_flow_tags($1, $2, $3) as found",
            *flow,
            msgspec.json.encode(tags).decode(),
            repeatable=True,
        )
        if not row["found"]:
            raise NotFound("flow", flow[1])
        return len(tags)

    async def get_flow_tag(self, flow_id: FlowId, key: str) -> str | None:
        """The value of one tag; None for an unknown flow or an absent tag."""
        check_tag_key(key)
        found = await self._fetch(
            "select tags from flowfabric.read_flow_tags($1, $2)", *self._flow(flow_id), repeatable=True
        )
        tags = rows.decode_json(found[0]["tags"]) if found else None
        return None if tags is None else tags.get(key)

    async def project_flow_summary(self, flow_id: FlowId) -> bool:
        """Count the members of one flow now; False when it has none, or does not exist."""
        partition, uuid = self._flow(flow_id)
        row = await self._row("select flowfabric.project_flows($1, $2) as n", [partition], [uuid], repeatable=True)
        return bool(row["n"])

    async def read_flow_summary(self, flow_id: FlowId) -> FlowSummary | None:
        """The members of a flow as last counted; None before that."""
        found = await self._fetch(
            "select * from flowfabric.read_summary($1, $2)", *self._flow(flow_id), repeatable=True
        )
        if not found:
            return None
        row = found[0]
        counts = {f"members_{name}": row[name] for name in _BUCKETS}
        total = sum(counts.values())
        return FlowSummary(
            flow_id=FlowId(row["flow_id"]),
            total_members=total,
            sampled_members=total,
            public_flow_state=FlowState(row["state"]),
            last_summary_update_at=row["updated_at"],
            **counts,
        )

    async def delete_flow(self, flow_id: FlowId) -> None:
        """Forget a flow whose members have all ended, with its members and everything they own, now."""
        flow = self._flow(flow_id)
        row = await self._row("select flowfabric.delete_flow($1, $2) as code", *flow)
        match row["code"]:
            case "ok":
                return
            case "flow_not_found":
                raise NotFound("flow", flow[1])
            case "busy":
                raise RetriesExhausted(f"flow {flow[1]} is in somebody's hands")
            case _:
                raise StateError(
                    "flow_not_terminal", f"flow {flow[1]} has members that have not ended, or ends to pass on"
                )


_GROUP = (
    "downstreams", "policies", "ks", "cancel_rests", "ns", "succeededs", "faileds", "skippeds", "states",
    "satisfied_ats",
)  # fmt: skip
_BUCKETS = (
    "completed", "failed", "cancelled", "expired", "skipped", "active", "suspended", "waiting", "delayed",
    "rate_limited", "waiting_children",
)  # fmt: skip


def _snapshot(row: asyncpg.Record, groups: tuple[EdgeGroup, ...]) -> FlowSnapshot:
    tags = rows.decode_json(row["tags"]) or {}
    try:
        policy = None if row["cancellation_policy"] is None else CancellationPolicy(row["cancellation_policy"])
    except ValueError:
        raise Corruption(f"flow {row['flow_id']}: cancellation_policy {row['cancellation_policy']!r}") from None
    return FlowSnapshot(
        flow_id=FlowId(row["flow_id"]),
        flow_kind=row["flow_kind"],
        namespace=row["namespace"],
        public_flow_state=row["state"],
        graph_revision=row["node_count"] + row["edge_count"],
        node_count=row["node_count"],
        edge_count=row["edge_count"],
        created_at=row["created_at"],
        last_mutation_at=row["last_mutation_at"],
        cancelled_at=row["cancelled_at"],
        cancel_reason=row["cancel_reason"],
        cancellation_policy=policy,
        tags={key: tags[key] for key in sorted(tags)},
        edge_groups=groups,
    )


def _group(
    partition: int,
    downstream: UUID,
    policy: str,
    k: int | None,
    cancel_rest: bool,
    n: int,
    succeeded: int,
    failed: int,
    skipped: int,
    state: str,
    satisfied_at: datetime | None,
) -> EdgeGroup:
    try:
        found, known = GroupState(state), _policy(policy, k, cancel_rest)
    except ValueError:
        raise Corruption(f"the edge group of {downstream}: {state!r}, {policy!r}") from None
    return EdgeGroup(
        downstream_execution_id=ExecutionId.of(partition, downstream),
        policy=known,
        total_deps=n,
        satisfied_count=succeeded,
        failed_count=failed,
        skipped_count=skipped,
        running_count=n - succeeded - failed - skipped,
        group_state=found,
        satisfied_at=satisfied_at,
    )


def _policy(kind: str, k: int | None, cancel_rest: bool) -> EdgeGroupPolicy:
    rest = OnSatisfied.CANCEL_REMAINING if cancel_rest else OnSatisfied.LET_RUN
    match kind:
        case "all_of":
            return AllOf()
        case "any_of":
            return AnyOf(rest)
        case "quorum" if k is not None:
            return Quorum(k, rest)
    raise ValueError


def _info(row: asyncpg.Record) -> FlowInfo:
    if row["state"] == "cancelled":
        status = FlowStatus.CANCELLED
    else:
        status = {
            "completed": FlowStatus.COMPLETED,
            "failed": FlowStatus.FAILED,
            "open": FlowStatus.ACTIVE,
            "running": FlowStatus.ACTIVE,
            "blocked": FlowStatus.ACTIVE,
            "cancelled": FlowStatus.ACTIVE,
        }.get(row["summary"] or row["state"], FlowStatus.UNKNOWN)
    return FlowInfo(
        flow_id=FlowId(row["flow_id"]),
        created_at=row["created_at"],
        status=status,
        flow_kind=row["flow_kind"],
        namespace=row["namespace"],
        node_count=row["node_count"],
    )


def _parse_cursor(value: object) -> tuple[datetime, UUID]:
    try:
        at, _, uuid = str(value).rpartition("/")
        return moment(datetime.fromisoformat(at), "cursor"), parse_uuid(uuid, "cursor")
    except (ValueError, InvalidInput):
        raise InvalidInput("cannot be read", field="cursor", allowed="the cursor an earlier page gave") from None
