"""The base classes of the operation groups: the database, the listener, the partition of a flow; and pages of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric._postgres.database import Database
from flowfabric._postgres.listen import Listener
from flowfabric.engine.batch import Fences
from flowfabric.engine.checks import check_limit, parse_partition
from flowfabric.engine.tails import StreamPermits, Tails
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, StateError
from flowfabric.values.flow import EdgeSnapshot
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid, parse_execution_id, parse_flow_id, partition_of_id
from flowfabric.values.lease import Authority
from flowfabric.values.page import Page

if TYPE_CHECKING:
    from flowfabric.engine import Engine

_Item = TypeVar("_Item")
_Cursor = TypeVar("_Cursor")


class Operations:
    """The base of the operation groups. Not for users."""

    def __init__(self, database: Database, listener: Listener | None) -> None:
        self._database = database
        self._listener = listener
        self._instance = mint_uuid() if listener is None else listener.instance
        self._services: dict[tuple[Any, ...], int] = {}  # the numbers of what workers of this engine serve
        self._background: list[Any] = []
        self._stream_ops = StreamPermits()
        self._followers: Any = None  # of the event log, made by the first subscription
        self._tails = Tails(cast("Engine", self))

    async def _fetch(self, sql: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        return await self._database.fetch(sql, args, repeatable=repeatable)

    async def _row(self, sql: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._database.fetch(sql, args, repeatable=repeatable))[0]

    def _home(self, uuid: UUID) -> int:
        """The partition that an id says."""
        return partition_of_id(uuid, self._database.flow_partitions)

    def _at(self, uuid: UUID) -> tuple[int, UUID]:
        """Where an execution or flow is stored: its partition and its id."""
        return self._home(uuid), uuid

    def _all_at(self, ids: Sequence[ExecutionId]) -> tuple[list[int], Sequence[ExecutionId]]:
        """The same of many, as columns."""
        return [self._home(one) for one in ids], ids

    async def _partition_page(
        self,
        sql: str,
        partition_key: object,
        cursor: object,
        limit: int,
        item: Callable[[asyncpg.Record], _Item],
        id_of: Callable[[_Item], _Cursor],
    ) -> Page[_Item, _Cursor]:
        """Return a page of the executions or flows of one partition, by id."""
        size = check_limit(limit, 1000)
        partition = parse_partition(partition_key, self._database.flow_partitions)
        after = None if cursor is None else parse_execution_id(cursor, "cursor")
        if after is not None and self._home(after) != partition:
            allowed = "next_cursor of a page of this partition"
            raise InvalidInput("of another partition", field="cursor", allowed=allowed)
        if size == 0:
            return Page(())
        found = await self._fetch(sql, partition, after, size + 1, repeatable=True)
        return first_page([item(row) for row in found], size, id_of)

    def _fences(self, authorities: Sequence[Authority]) -> Fences:
        return Fences(authorities, self._database.flow_partitions)


class FlowOperations(Operations):
    """The base of the groups of flow operations."""

    def _flow(self, flow_id: object) -> tuple[int, UUID]:
        """The partition of a flow, and its id."""
        return self._at(parse_flow_id(flow_id))

    def _member(self, flow: tuple[int, UUID], execution_id: object, field: str = "execution_id") -> ExecutionId:
        """An execution that could be a member of the flow: one of its partition."""
        found = parse_execution_id(execution_id, field)
        if self._home(found) != flow[0]:
            raise InvalidInput(
                f"partition_mismatch: {found} is not in the partition of flow {flow[1]}",
                field=field,
                allowed="an execution created with flow_id",
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

    def _uuid(self, flow: tuple[int, UUID], execution_id: ExecutionId) -> UUID:
        """The id; one that no execution has if it lies in another partition and cannot be a member."""
        return execution_id if self._home(execution_id) == flow[0] else UUID(int=0)

    async def _edges_of(
        self,
        flow: tuple[int, UUID],
        *,
        upstream: UUID | None = None,
        downstream: UUID | None = None,
        edge: UUID | None = None,
        after: UUID | None = None,
        limit: int | None = None,
    ) -> list[EdgeSnapshot]:
        found = await self._fetch(
            statements.READ_EDGES,
            *flow,
            upstream,
            downstream,
            edge,
            after,
            limit,
            repeatable=True,
        )
        return [rows.edge(row, FlowId(flow[1])) for row in found]


def first_page(items: Sequence[_Item], size: int, cursor: Callable[[_Item], _Cursor]) -> Page[_Item, _Cursor]:
    """Return the first `size` items, and the cursor of the last of them if there are more."""
    shown = items[:size]
    return Page(shown, cursor(shown[-1]) if len(items) > size else None)
