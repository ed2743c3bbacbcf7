"""The call that submits a whole graph, or adds nodes to one, as the arrays of `flowfabric.grow_flow`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from asyncpg.pgproto import pgproto

from flowfabric._postgres.create_columns import BadPolicy, Layout
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput, NotFound, StateError, ValidationFailed
from flowfabric.values.checks import check_text
from flowfabric.values.graph import NewNode, check_graph
from flowfabric.values.ids import ExecutionId, mint_many, parse_uuid, partition_of_id
from flowfabric.values.joins import AllOf, check_policy, policy_columns

MAX_NODES = 100_000


class GrowCall:
    """One call: `args` for the statement, and the executions it creates, by the names of their nodes."""

    def __init__(
        self,
        flow_id: UUID,
        nodes: Sequence[NewNode],
        partitions: int,
        *,
        is_new: bool,
        kind: str = "",
        namespace: str = "",
        tags: dict[str, str] | None = None,
    ) -> None:
        if isinstance(nodes, str | bytes) or not isinstance(nodes, Sequence):
            raise InvalidInput(f"got {type(nodes).__name__}", field="nodes", allowed="a list of NewNode")
        if not 1 <= len(nodes) <= MAX_NODES:
            raise InvalidInput(f"{len(nodes)} nodes", field="nodes", allowed=f"1 to {MAX_NODES}")
        check_graph(nodes)
        partition = partition_of_id(flow_id, partitions)
        layout = Layout(partitions)
        for place, node in enumerate(nodes):
            if node.execution.idempotency_key is not None:
                raise InvalidInput(
                    "given for a node",
                    field=f"nodes[{place}].execution.idempotency_key",
                    allowed="no key: the flow id makes the whole graph idempotent",
                )
            try:
                layout.add(msgspec.structs.replace(node.execution, flow_id=flow_id))
            except BadPolicy as bad:
                raise _named(bad.error, place) from bad.error
            except ValidationFailed as error:
                raise _named(error, place) from error
        ids = layout.ids
        if len(set(ids)) < len(ids):
            raise InvalidInput(
                "an execution id is given twice", field="nodes", allowed="an id of its own for each node"
            )
        self.flow_id = flow_id
        self.nodes = {node.name: ExecutionId(uuid) for node, uuid in zip(nodes, ids, strict=True)}
        self._names = [node.name for node in nodes]
        self._lanes = [node.execution.lane_id for node in nodes]
        self.old: list[ExecutionId] = []
        edges = self._edges(nodes, partition, partitions)
        self.edges: list[UUID] = edges[0]
        self.is_new = is_new
        laid = layout.columns()
        policies = laid.policies
        if policies is not None and len(set(policies)) == 1:
            policies = policies[:1]
        self.joins = dict(Counter(policy_columns(check_policy(node.policy))[0] for node in nodes if node.after))
        joins = [
            (n, *policy_columns(check_policy(node.policy)))
            for n, node in enumerate(nodes, 1)
            if not isinstance(node.policy, AllOf) and node.after
        ]
        self.args: list[Any] = [
            partition, flow_id, is_new, kind, namespace, None if not tags else msgspec.json.encode(tags).decode(),
            laid.lanes, laid.kinds, laid.capabilities, laid.routes, laid.ids, list(self._names),
            laid.namespaces, laid.creators, laid.payloads, laid.encodings, laid.priorities, laid.tags, policies,
            laid.budgets, laid.quotas, laid.delays_at, laid.delays_ms, laid.deadlines_at, laid.deadlines_ms,
            self.old, *edges,
            *([join[column] for join in joins] for column in range(4)),
        ]  # fmt: skip

    def _edges(self, nodes: Sequence[NewNode], partition: int, count: int) -> list[Any]:
        """The edges as columns: id, from, to, ref, passes; and how many lead to each node."""
        numbers = {node.name: n for n, node in enumerate(nodes, 1)}
        olds: dict[UUID, int] = {}
        given: list[UUID | None] = []
        froms: list[int] = []
        tos: list[int] = []
        refs: list[str | None] = []
        passes: list[bool] = []
        for n, node in enumerate(nodes, 1):
            for edge in node.after:
                if isinstance(edge.upstream, UUID):
                    if partition_of_id(edge.upstream, count) != partition:
                        raise InvalidInput(
                            f"{edge.upstream} is not in the flow's partition",
                            field=f"nodes[{n - 1}].after",
                            allowed="a member of the flow",
                        )
                    if edge.upstream not in olds:
                        self.old.append(edge.upstream)
                        olds[edge.upstream] = -len(self.old)
                    froms.append(olds[edge.upstream])
                else:
                    froms.append(numbers[edge.upstream])
                tos.append(n)
                ref = edge.data_passing_ref
                refs.append(check_text(ref, f"nodes[{n - 1}].after.data_passing_ref") if ref else None)
                passes.append(bool(edge.passes_result))
                given.append(
                    None if edge.edge_id is None else parse_uuid(edge.edge_id, f"nodes[{n - 1}].after.edge_id")
                )
        minted = map(pgproto.UUID, mint_many(given.count(None)))
        ids = [next(minted) if one is None else one for one in given]
        if len(set(ids)) < len(ids):
            raise InvalidInput("an edge id is given twice", field="nodes", allowed="a unique id for each edge")
        deps = [len(node.after) for node in nodes] if ids else None
        return [ids, froms, tos, refs if any(refs) else None, passes, deps]

    def refusal(self, code: str, place: int | None) -> FlowFabricError:
        """Return the error for a code, and an index, that the statement returned."""
        at = 0 if place is None else place - 1
        match code:
            case "flow_not_found":
                return NotFound("flow", self.flow_id)
            case "flow_already_terminal":
                return StateError(code, f"flow {self.flow_id} cannot be changed any more")
            case "execution_not_in_flow":
                return StateError(code, f"{self.old[at]} is not a member of flow {self.flow_id}")
            case "lane_closed":
                return StateError(
                    code, f"the lane {self._lanes[at]} of node {self._names[at]!r} accepts no new executions"
                )
            case "dependency_already_exists":
                edge_id = self.edges[at]
                return Conflict(code, f"edge {edge_id} is in the graph", existing=edge_id)
        return Conflict(code, f"the execution of node {self._names[at]!r} exists outside flow {self.flow_id}")


def _named(error: FlowFabricError, place: int) -> FlowFabricError:
    """Return the error of a node's execution, with the node's index."""
    where = f"nodes[{place}].execution"
    if isinstance(error, InvalidInput):
        field = where if error.field is None else f"{where}.{error.field}"
        return InvalidInput(error.problem, field=field, allowed=error.allowed)
    return ValidationFailed(error.kind, f"{where}: {error.detail}")
