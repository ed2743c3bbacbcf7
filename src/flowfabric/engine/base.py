"""The base classes of the operation groups: the database, the listener, and the partition of a flow."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric._postgres.database import Database
from flowfabric._postgres.listen import Listener
from flowfabric.engine.checks import parse_execution
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, StateError
from flowfabric.values.flow import EdgeSnapshot
from flowfabric.values.ids import ExecutionId, FlowId, crc16, mint_uuid, parse_uuid


class Operations:
    """The base of the operation groups. Not for users."""

    def __init__(self, database: Database, listener: Listener | None) -> None:
        self._database = database
        self._listener = listener
        self._instance = mint_uuid()
        self._background: list[Any] = []

    async def _fetch(self, sql: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        return await self._database.fetch(sql, args, repeatable=repeatable)

    async def _row(self, sql: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._database.fetch(sql, args, repeatable=repeatable))[0]


class FlowOperations(Operations):
    """The base of the groups of flow operations."""

    def _flow(self, flow_id: object) -> tuple[int, UUID]:
        """The partition of a flow, and its id."""
        uuid = parse_uuid(flow_id, "flow_id")
        return crc16(uuid.bytes) % self._database.flow_partitions, uuid

    def _member(self, flow: tuple[int, UUID], execution_id: object, field: str = "execution_id") -> ExecutionId:
        """Return an execution that can be a member of the flow: one in its partition."""
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
        """Return the error for a flow that cannot be changed."""
        if code == "flow_not_found":
            return NotFound("flow", flow[1])
        if code == "flow_already_terminal":
            return StateError(code, f"flow {flow[1]} cannot be changed any more")
        return None

    @staticmethod
    def _uuid(flow: tuple[int, UUID], execution_id: ExecutionId) -> UUID:
        """Return its uuid, or an unused uuid if it is in another partition and so cannot be a member."""
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
            statements.READ_EDGES,
            *flow,
            upstream,
            downstream,
            edge,
            repeatable=True,
        )
        return [rows.edge(row, flow[0], FlowId(flow[1])) for row in found]
