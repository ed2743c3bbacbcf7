"""Flows: submit a whole graph in one call, add members, set tags, delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from flowfabric._postgres import rows, statements
from flowfabric._postgres.grow_call import GrowCall
from flowfabric.engine.base import FlowOperations
from flowfabric.errors import Conflict, InvalidInput, NotFound, RetriesExhausted, StateError, TransportError
from flowfabric.values.checks import MAX_BATCH, check_tag_key, check_tags, check_text
from flowfabric.values.flow import Added, AlreadyMember, FlowCreated, FlowExists
from flowfabric.values.graph import FlowSubmitted, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid, parse_flow_id


class Flows(FlowOperations):
    """submit_flow, extend_flow, create_flow, add members, tags, delete_flow."""

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

        A flow id that was used before returns `existed` and changes nothing. With `connection`, an asyncpg connection
        in your transaction, the flow exists when you commit.
        """
        uuid = mint_uuid() if flow_id is None else parse_flow_id(flow_id)
        return await self._grow(uuid, self._new_flow(uuid, nodes, flow_kind, namespace, tags), connection)

    def _new_flow(
        self, flow_id: UUID, nodes: Sequence[NewNode], kind: str, namespace: str, tags: dict[str, str] | None
    ) -> GrowCall:
        call = GrowCall(
            flow_id,
            nodes,
            self._database.flow_partitions,
            is_new=True,
            kind=check_text(kind, "flow_kind"),
            namespace=check_text(namespace, "namespace"),
            tags=check_tags(tags),
        )
        if call.old:
            raise InvalidInput(
                f"{call.old[0]} is not a node of this new flow",
                field="nodes",
                allowed="names of nodes of the same call",
            )
        return call

    async def extend_flow(
        self, flow_id: FlowId, nodes: Sequence[NewNode], *, connection: asyncpg.Connection[Any] | None = None
    ) -> FlowSubmitted:
        """Add nodes to a flow that is open: all of them, or none. They may come after members that exist."""
        uuid = parse_flow_id(flow_id)
        call = GrowCall(uuid, nodes, self._database.flow_partitions, is_new=False)
        return await self._grow(uuid, call, connection)

    async def _grow(self, flow_id: UUID, call: GrowCall, connection: asyncpg.Connection[Any] | None) -> FlowSubmitted:
        repeated = False
        if connection is not None:
            row = (await connection.fetch(statements.GROW_FLOW, *call.args))[0]
        else:
            try:
                row = await self._row(statements.GROW_FLOW, *call.args)
            except TransportError as error:
                if not error.retryable:
                    raise
                # The response was lost. We chose the ids, so repeating the call creates nothing twice.
                repeated = True
                row = await self._row(statements.GROW_FLOW, *call.args, repeatable=True)
        return await self._grown(flow_id, call, row, repeated=repeated, connection=connection)

    async def _grown(
        self,
        flow_id: UUID,
        call: GrowCall,
        row: asyncpg.Record,
        *,
        repeated: bool,
        connection: asyncpg.Connection[Any] | None,
    ) -> FlowSubmitted:
        code, place = row["code"], row["place"]
        if code == "ok":
            return FlowSubmitted(flow_id=FlowId(flow_id), nodes=call.nodes, joins=call.joins)
        if code == "exists":
            standing = await self._standing(flow_id, call, connection)
            is_ours = repeated and standing == call.nodes
            return FlowSubmitted(flow_id=FlowId(flow_id), nodes=standing, existed=not is_ours)
        raise call.refusal(code, place)

    async def _standing(
        self, flow_id: UUID, call: GrowCall, connection: asyncpg.Connection[Any] | None
    ) -> dict[str, ExecutionId]:
        """Return the nodes that an earlier call created. The ids of its nodes identify an extension."""
        if not call.is_new:
            return call.nodes
        members = statements.READ_NODES
        if connection is not None:
            found = await connection.fetch(members, flow_id)
        else:
            found = await self._fetch(members, flow_id, repeatable=True)
        return {row["node"]: ExecutionId(row["id"]) for row in found}

    async def create_flow(
        self, flow_id: FlowId | None = None, *, flow_kind: str = "", namespace: str = ""
    ) -> FlowCreated | FlowExists:
        """Create an empty flow. A known id returns `FlowExists` and changes nothing."""
        partition, uuid = self._flow(mint_uuid() if flow_id is None else flow_id)
        row = await self._row(
            statements.CREATE_FLOW,
            partition,
            uuid,
            check_text(flow_kind, "flow_kind"),
            check_text(namespace, "namespace"),
        )
        return FlowCreated(FlowId(uuid)) if row["made"] else FlowExists(FlowId(uuid))

    async def add_execution_to_flow(self, flow_id: FlowId, execution_id: ExecutionId) -> Added | AlreadyMember:
        """Make an execution a member permanently. Create it with `flow_id`, so that it is in the flow's partition."""
        flow = self._flow(flow_id)
        target = self._member(flow, execution_id)
        row = await self._add(flow, [target], ["execution_id"])
        if row["code"] == "already_member":
            return AlreadyMember(target, row["members"])
        return Added(target, row["members"])

    async def add_executions_to_flow(self, flow_id: FlowId, execution_ids: Sequence[ExecutionId]) -> int:
        """Make up to 1,000 executions members, all or none; returns how many members the flow has now."""
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
            statements.ADD_TO_FLOW,
            *flow,
            targets,
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

    async def set_flow_tag(self, flow_id: FlowId, key: str, value: str) -> None:
        """Set one tag. The key has a namespace and a dot: `billing.invoice`."""
        check_tag_key(key)
        await self.set_flow_tags(flow_id, {key: check_text(value, "value", None)})

    async def set_flow_tags(self, flow_id: FlowId, tags: dict[str, str]) -> int:
        """Set several tags, all or none; returns how many."""
        if not isinstance(tags, dict) or not tags:
            raise InvalidInput("no tags", field="tags", allowed="at least one")
        for key, value in tags.items():
            check_text(value, f"tags[{check_tag_key(key, 'tags key')!r}]", None)
        flow = self._flow(flow_id)
        row = await self._row(
            statements.SET_FLOW_TAGS,
            *flow,
            msgspec.json.encode(tags).decode(),
            repeatable=True,
        )
        if not row["found"]:
            raise NotFound("flow", flow[1])
        return len(tags)

    async def get_flow_tag(self, flow_id: FlowId, key: str) -> str | None:
        """Return the value of one tag; None for an unknown flow or an absent tag."""
        check_tag_key(key)
        found = await self._fetch(statements.READ_FLOW_TAGS, *self._flow(flow_id), repeatable=True)
        tags = rows.decode_json(found[0]["tags"]) if found else None
        return None if tags is None else tags.get(key)

    async def delete_flow(self, flow_id: FlowId) -> None:
        """Delete a flow whose members have all ended, with its members and everything they own, now."""
        flow = self._flow(flow_id)
        row = await self._row(statements.DELETE_FLOW, *flow)
        match row["code"]:
            case str(code) if code.startswith("flow_needed"):
                raise StateError("flow_needed", f"flow {flow[1]} is needed by{code.removeprefix('flow_needed')}")
            case "ok":
                return
            case "flow_not_found":
                raise NotFound("flow", flow[1])
            case "busy":
                raise RetriesExhausted(f"flow {flow[1]} is locked by another transaction")
            case _:
                raise StateError(
                    "flow_not_terminal", f"flow {flow[1]} has members that have not ended, or cascades still to run"
                )
