"""Reads and lists. They see committed state and block no other call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from msgspec import Struct

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import (
    check_batch,
    check_int,
    check_limit,
    check_list,
    check_tag,
    check_word,
    most_rows,
    read_cursor,
    time_cursor,
)
from flowfabric.errors import InvalidInput
from flowfabric.values.attempt import Attempt, Started
from flowfabric.values.checks import check_lane, check_text, moment
from flowfabric.values.execution import Execution, ExecutionContext, ExecutionInfo, Result
from flowfabric.values.found import FoundId, What
from flowfabric.values.ids import (
    ExecutionId,
    FlowId,
    PartitionKey,
    id_digits,
    parse_execution_id,
    parse_flow_id,
    parse_uuid,
)
from flowfabric.values.page import Page
from flowfabric.values.state import UNSUCCESSFUL, State

FIND_BUDGET = 20_000
_ORDERS = frozenset(("created", "ended"))


class Place(Struct, frozen=True):
    """The cursor of a list. It stays valid if the execution it names is deleted."""

    at: datetime
    id: UUID
    partition: int = 0

    def encode(self) -> str:
        """Return the cursor as text, for a URL or a command line."""
        return time_cursor(self.at, self.id, self.partition)

    @classmethod
    def decode(cls, text: str) -> Place:
        return cls(*read_cursor(text))


class Reads(Operations):
    """read and list executions, their results and attempts."""

    async def read_execution(self, execution_id: ExecutionId) -> Execution | None:
        """Everything stored about an execution but payload and result."""
        found = await self._read(parse_execution_id(execution_id))
        return None if found is None else rows.execution(found)

    async def _read(self, target: ExecutionId) -> Any:
        found = await self._fetch(statements.READ_EXECUTIONS, *self._all_at([target]), repeatable=True)
        return found[0] if found else None

    async def read_executions(self, execution_ids: Sequence[ExecutionId]) -> list[Execution | None]:
        """The same of up to 1,000 executions, in their order; None for an unknown id."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        found = await self._fetch(statements.READ_EXECUTIONS, *self._all_at(targets), repeatable=True)
        by_id = {row["id"]: row for row in found}
        return [None if (row := by_id.get(one)) is None else rows.execution(row) for one in targets]

    async def read_execution_info(self, execution_id: ExecutionId) -> ExecutionInfo | None:
        """Return what lists show of an execution; None for an unknown id."""
        found = await self._read(parse_execution_id(execution_id))
        return None if found is None else rows.info(found)

    async def get_execution_result(self, execution_id: ExecutionId) -> bytes | None:
        """Return the result's bytes; None unless the execution completed with one."""
        result = await self.read_result(execution_id)
        return None if result is None else result.payload

    async def read_result(self, execution_id: ExecutionId) -> Result | None:
        """The result with its encoding."""
        target = parse_execution_id(execution_id)
        found = await self._fetch(
            statements.READ_RESULT,
            *self._at(target),
            repeatable=True,
        )
        return Result(found[0]["result"], found[0]["result_encoding"]) if found else None

    async def read_execution_context(self, execution_id: ExecutionId) -> ExecutionContext:
        """The input and what belongs to it; an unknown id is `InvalidInput`."""
        target = parse_execution_id(execution_id)
        found = await self._fetch(
            statements.READ_PAYLOAD,
            *self._at(target),
            repeatable=True,
        )
        if not found:
            raise unknown_execution(target)
        return rows.context(found[0])

    async def read_started(self, execution_ids: Sequence[ExecutionId]) -> list[Started]:
        """Return up to 1,000 executions as a worker would receive them, without claiming them; their leases are void.

        Executions that wait for their first worker, have ended or do not exist are left out.
        """
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        found = await self._fetch(statements.READ_STARTED, *self._all_at(targets), repeatable=True)
        return [rows.started(row) for row in found]

    async def list_attempts(
        self, execution_id: ExecutionId, *, after: int | None = None, limit: int | None = None
    ) -> list[Attempt]:
        """Every attempt, oldest first; empty for an unknown execution or before the first claim.

        With a `limit` at most that many, after the attempt with the index `after`.
        """
        target = parse_execution_id(execution_id)
        found = await self._fetch(
            statements.LIST_ATTEMPTS,
            *self._at(target),
            -1 if after is None else check_int(after, "after", 0, 2**31 - 1),
            most_rows(limit),
            repeatable=True,
        )
        return [rows.attempt(row) for row in found]

    async def list_executions(
        self, partition_key: int | str | PartitionKey, *, cursor: ExecutionId | None = None, limit: int = 50
    ) -> Page[ExecutionInfo, ExecutionId]:
        """Return the executions of one partition by id, up to 1,000 per page."""
        return await self._partition_page(
            statements.LIST_PARTITION, partition_key, cursor, limit, rows.info, lambda last: last.execution_id
        )

    async def find_executions(
        self,
        *,
        namespace: str | None = None,
        lane_ids: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        states: Collection[State | str] | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: FlowId | None = None,
        parent_id: ExecutionId | None = None,
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        stopped: bool = False,
        order_by: Literal["created", "ended"] = "created",
        cursor: Place | None = None,
        limit: int = 50,
    ) -> Page[ExecutionInfo, Place]:
        """Return executions of all partitions that match every filter given, newest first.

        `stopped`: only those that changed code stopped, which wait for code that fits. `order_by="ended"` has those
        first that ended last; it needs `states`, all of them failed, expired, cancelled or skipped. A cursor is for
        lists in the same order.

        A call reads a bounded number of rows: with filters that match few executions, a page may have fewer items than
        `limit`, or none, and still a `next_cursor` to continue from.
        """
        size = check_limit(limit, 1000)
        wanted = None if states is None else [_state(state) for state in check_list(states, "states")]
        by_end = check_word(order_by, _ORDERS, "order_by") == "ended"
        if by_end and (wanted is None or stopped or not UNSUCCESSFUL.issuperset(wanted)):
            raise InvalidInput(
                "got 'ended'",
                field="order_by",
                allowed="created, or ended with states failed, expired, cancelled, skipped",
            )
        args = (
            None if namespace is None else check_text(namespace, "namespace"),
            None if lane_ids is None else [check_lane(lane, "lane_ids") for lane in check_list(lane_ids, "lane_ids")],
            None if kinds is None else [check_text(kind, "kinds") for kind in check_list(kinds, "kinds")],
            wanted,
            *check_tag(tag, "tag"),
            None if flow_id is None else parse_flow_id(flow_id),
            None if created_from is None else moment(created_from, "created_from"),
            None if created_before is None else moment(created_before, "created_before"),
            *_place(cursor, self._database.flow_partitions),
            size,
            FIND_BUDGET,
            None if parent_id is None else parse_execution_id(parent_id, "parent_id"),
            bool(stopped),
            by_end,
        )
        if size == 0:
            return Page(())
        found = await self._fetch(statements.FIND, *args, repeatable=True)
        last = found[-1] if found and found[-1]["state"] is None else None
        return Page(
            [rows.info(row) for row in found if row["state"] is not None],
            None if last is None else Place(last["created_at"], last["id"], last["partition"]),
        )

    async def find_id(self, text: str, *, what: What | None = None, limit: int = 10) -> list[FoundId]:
        """Executions and flows whose id ends or begins with at least 6 hex digits, newest first.

        The end of an id names its partition, so that only the keys of that partition are read.
        """
        digits = id_digits(text)
        low, high = (UUID(digits.ljust(32, fill)) for fill in "0f")
        if what not in (None, "execution", "flow"):
            raise InvalidInput(f"got {what!r}", field="what", allowed="execution, flow or None")
        found = await self._fetch(
            statements.FIND_IDS,
            digits,
            int(digits[-4:], 16) % self._database.flow_partitions,
            low,
            high,
            None if what is None else what == "flow",
            check_limit(limit, 100),
            repeatable=True,
        )
        return [rows.found_id(row) for row in found]


def unknown_execution(target: ExecutionId) -> InvalidInput:
    return InvalidInput(f"no such execution: {target}", field="execution_id", execution_id=target)


def _place(value: object, partitions: int) -> tuple[datetime, UUID, int] | tuple[None, None, None]:
    if value is None:
        return None, None, None
    if not isinstance(value, Place):
        raise InvalidInput(f"got {type(value).__name__}", field="cursor", allowed="next_cursor of a page")
    return (
        moment(value.at, "cursor"),
        parse_uuid(value.id, "cursor"),
        check_int(value.partition, "cursor", 0, partitions - 1),
    )


def _state(value: object) -> str:
    try:
        return State(str(value)).value
    except ValueError:
        raise InvalidInput(f"got {value!r}", field="states", allowed=", ".join(State)) from None
