"""Reads and lists. They see committed state and block nobody."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from flowfabric._postgres import rows
from flowfabric.engine.calls import (
    Calls,
    check_int,
    check_limit,
    check_list,
    check_tag,
    moment,
    parse_execution,
    parse_partition,
)
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.attempt import Attempt
from flowfabric.values.checks import check_lane, check_tag_key, check_text
from flowfabric.values.execution import Execution, ExecutionContext, ExecutionInfo, ExecutionSnapshot, Result
from flowfabric.values.ids import ExecutionId, FlowId, PartitionKey, parse_uuid
from flowfabric.values.lease import ExpiredLease
from flowfabric.values.page import Page
from flowfabric.values.state import State

FIND_BUDGET = 20_000
_READ = "select * from flowfabric.read_execution($1, $2)"


class Place(Struct, frozen=True):
    """Where a list stopped. Stays valid when the execution it names is gone."""

    at: datetime
    id: UUID
    partition: int = 0

    def encode(self) -> str:
        """As text, for a URL or a command line."""
        return msgspec.json.encode([self.at, self.id, self.partition]).hex()

    @classmethod
    def decode(cls, text: str) -> Place:
        try:
            at, uuid, partition = msgspec.json.decode(bytes.fromhex(text), type=tuple[datetime, UUID, int])
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise InvalidInput("not a cursor of this list", field="cursor", allowed="next_cursor of a page") from error
        return cls(at, uuid, partition)


class Reads(Calls):
    """describe, read and list executions; tags."""

    async def read_execution(self, execution_id: ExecutionId) -> Execution | None:
        """Everything stored about an execution but payload and result."""
        found = await self._read(parse_execution(execution_id))
        return None if found is None else rows.execution(found)

    async def _read(self, target: ExecutionId) -> Any:
        found = await self._fetch(_READ, target.partition, target.uuid, repeatable=True)
        return found[0] if found else None

    async def describe_execution(self, execution_id: ExecutionId) -> ExecutionSnapshot | None:
        """State, latest attempt, lease and tags in one answer; None for an unknown id."""
        found = await self._read(parse_execution(execution_id))
        return None if found is None else rows.snapshot(found)

    async def read_execution_state(self, execution_id: ExecutionId) -> State | None:
        """Where it stands, in one word; None for an unknown id."""
        found = await self._read(parse_execution(execution_id))
        return None if found is None else State(found["state"])

    async def read_execution_info(self, execution_id: ExecutionId) -> ExecutionInfo | None:
        """What lists show of an execution; None for an unknown id."""
        found = await self._read(parse_execution(execution_id))
        return None if found is None else rows.info(found)

    async def get_execution_result(self, execution_id: ExecutionId) -> bytes | None:
        """The result's bytes; None unless the execution completed with one."""
        result = await self.read_result(execution_id)
        return None if result is None else result.payload

    async def read_result(self, execution_id: ExecutionId) -> Result | None:
        """The result with its encoding."""
        target = parse_execution(execution_id)
        found = await self._fetch(
            "select result, result_encoding from flowfabric.read_result($1, $2)",
            target.partition,
            target.uuid,
            repeatable=True,
        )
        return Result(found[0]["result"], found[0]["result_encoding"]) if found else None

    async def read_execution_context(self, execution_id: ExecutionId) -> ExecutionContext:
        """The input and what belongs to it; an unknown id is `InvalidInput`."""
        target = parse_execution(execution_id)
        found = await self._fetch(
            "select payload, payload_encoding, kind, tags from flowfabric.read_payload($1, $2)",
            target.partition,
            target.uuid,
            repeatable=True,
        )
        if not found:
            raise _unknown(target)
        row = found[0]
        return ExecutionContext(
            input_payload=row["payload"],
            payload_encoding=row["payload_encoding"],
            execution_kind=row["kind"],
            tags=rows.decode_json(row["tags"]) or {},
        )

    async def read_current_attempt_index(self, execution_id: ExecutionId) -> int:
        """The index of the latest attempt; 0 before the first claim."""
        target = parse_execution(execution_id)
        found = await self._read(target)
        if found is None:
            raise _unknown(target)
        return int(found["attempt_index"] or 0)

    async def read_total_attempt_count(self, execution_id: ExecutionId) -> int:
        """Attempts ever made; also the index of the next one."""
        target = parse_execution(execution_id)
        found = await self._read(target)
        if found is None:
            raise _unknown(target)
        return int(found["attempts"])

    async def read_exec_core_fields(
        self, partition_key: str | PartitionKey, execution_id: ExecutionId, names: Collection[str]
    ) -> dict[str, str | None]:
        """The named fields as text; an unknown name, or a missing execution, gives None."""
        target = parse_execution(execution_id)
        if parse_partition(partition_key, 65_536) != target.partition:
            raise InvalidInput(
                "not the partition of the execution",
                field="partition_key",
                allowed=f"{{fp:{target.partition}}}",
            )
        wanted = [check_text(name, "names") for name in check_list(names, "names")]
        if not wanted:
            return {}
        found = await self._read(target)
        if found is None:
            return dict.fromkeys(wanted)
        fields = _core_fields(rows.execution(found))
        return {name: fields.get(name) for name in wanted}

    async def resolve_execution_flow_id(self, execution_id: ExecutionId) -> FlowId | None:
        """The flow it belongs to; None for an unknown id or one without a flow."""
        found = await self._read(parse_execution(execution_id))
        return None if found is None else found["flow_id"]

    async def get_execution_namespace(self, execution_id: ExecutionId) -> str | None:
        """Its namespace, which may be empty; None for an unknown id."""
        found = await self._read(parse_execution(execution_id))
        return None if found is None else str(found["namespace"])

    async def get_execution_tag(self, execution_id: ExecutionId, key: str) -> str | None:
        """The value of one tag; None for an unknown id or an absent tag."""
        check_tag_key(key)
        found = await self._read(parse_execution(execution_id))
        tags = None if found is None else rows.decode_json(found["tags"])
        return None if tags is None else tags.get(key)

    async def set_execution_tag(self, execution_id: ExecutionId, key: str, value: str) -> None:
        """Set one tag. The key has a namespace and a dot: `billing.invoice`."""
        check_tag_key(key)
        check_text(value, "value", None)
        target = parse_execution(execution_id)
        row = await self._row(
            "select flowfabric.set_tag($1, $2, $3, $4) as found",
            target.partition,
            target.uuid,
            key,
            value,
            repeatable=True,
        )
        if not row["found"]:
            raise NotFound("execution", target)

    async def list_attempts(self, execution_id: ExecutionId) -> list[Attempt]:
        """Every attempt, oldest first; empty for an unknown execution or before the first claim."""
        target = parse_execution(execution_id)
        found = await self._fetch(
            "select * from flowfabric.list_attempts($1, $2)", target.partition, target.uuid, repeatable=True
        )
        return [rows.attempt(row) for row in found]

    async def list_executions(
        self, partition_key: str | PartitionKey, *, cursor: ExecutionId | None = None, limit: int = 50
    ) -> Page[ExecutionInfo, ExecutionId]:
        """The executions of one partition by id, up to 1,000 a page."""
        partition = parse_partition(partition_key, self._database.flow_partitions)
        after = None
        if cursor is not None:
            after = parse_execution(cursor, "cursor")
            if after.partition != partition:
                raise InvalidInput("of another partition", field="cursor", allowed=f"{{fp:{partition}}}:...")
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select * from flowfabric.list_partition($1, $2, $3)",
            partition,
            None if after is None else after.uuid,
            size + 1,
            repeatable=True,
        )
        items = [rows.info(row) for row in found[:size]]
        return Page(items, items[-1].execution_id if len(found) > size else None)

    async def find_executions(
        self,
        *,
        namespace: str | None = None,
        lane_ids: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        states: Collection[State | str] | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: FlowId | None = None,
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        cursor: Place | None = None,
        limit: int = 50,
    ) -> Page[ExecutionInfo, Place]:
        """Executions of all partitions, newest first, that match every filter given.

        A call looks at a bounded number of rows: with filters that hardly anything matches a page may hold fewer items
        than `limit`, or none, and still name a `next_cursor` to go on from.
        """
        size = check_limit(limit, 1000)
        args = (
            None if namespace is None else check_text(namespace, "namespace"),
            None if lane_ids is None else [check_lane(lane, "lane_ids") for lane in check_list(lane_ids, "lane_ids")],
            None if kinds is None else [check_text(kind, "kinds") for kind in check_list(kinds, "kinds")],
            None if states is None else [_state(state) for state in check_list(states, "states")],
            *check_tag(tag, "tag"),
            None if flow_id is None else parse_uuid(flow_id, "flow_id"),
            None if created_from is None else moment(created_from, "created_from"),
            None if created_before is None else moment(created_before, "created_before"),
            *_place(cursor, self._database.flow_partitions),
            size,
            FIND_BUDGET,
        )
        if size == 0:
            return Page(())
        marks = ", ".join(f"${n}" for n in range(1, 15))
        found = await self._fetch(f"select * from flowfabric.find({marks})", *args, repeatable=True)  # noqa: S608
        last = found[-1] if found and found[-1]["state"] is None else None
        return Page(
            [rows.info(row) for row in found if row["state"] is not None],
            None if last is None else Place(last["created_at"], last["id"], last["partition"]),
        )

    async def list_expired_leases(
        self,
        *,
        as_of: datetime | None = None,
        after: tuple[datetime, ExecutionId] | None = None,
        limit: int = 1000,
        namespace: str | None = None,
    ) -> Page[ExpiredLease, tuple[datetime, ExecutionId]]:
        """Active executions whose lease had lapsed at `as_of` (default: now), whether marked yet or not."""
        until = None if as_of is None else moment(as_of, "as_of")
        size = check_limit(limit, 10_000)
        place = None
        if after is not None:
            if not isinstance(after, tuple | list) or len(after) != 2:
                raise InvalidInput(
                    f"got {type(after).__name__}", field="after", allowed="a (expires_at, execution_id) pair"
                )
            place = (moment(after[0], "after"), parse_execution(after[1], "after", self._database.flow_partitions))
        wanted = None if namespace is None else check_text(namespace, "namespace")
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select * from flowfabric.list_expired_leases(coalesce($1, flowfabric.server_now()), $2, $3, $4, $5)",
            until,
            None if place is None else place[0],
            None if place is None else str(place[1]),
            size + 1,
            wanted,
            repeatable=True,
        )
        items = [
            ExpiredLease(
                execution_id=ExecutionId.of(row["partition"], row["id"]),
                lease_id=row["lease_id"],
                lease_epoch=row["epoch"],
                worker_instance_id=row["worker_instance_id"],
                expires_at=row["lease_expires_at"],
                attempt_index=row["attempt_index"],
            )
            for row in found[:size]
        ]
        return Page(items, (items[-1].expires_at, items[-1].execution_id) if len(found) > size else None)


def _unknown(target: ExecutionId) -> InvalidInput:
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


def _core_fields(e: Execution) -> dict[str, str | None]:
    vector = e.state_vector
    lease = e.current_lease or e.lost_lease
    fields: dict[str, Any] = {
        "lane_id": e.lane_id,
        "lifecycle_phase": vector.lifecycle_phase,
        "ownership_state": vector.ownership_state,
        "eligibility_state": vector.eligibility_state,
        "blocking_reason": vector.blocking_reason,
        "terminal_outcome": vector.terminal_outcome,
        "attempt_state": vector.attempt_state,
        "public_state": vector.public_state,
        "blocking_detail": e.blocking_detail or "",
        "cancellation_reason": e.cancellation_reason,
        "cancelled_by": e.cancelled_by,
        "attempt_index": e.current_attempt_index,
        "total_attempt_count": e.total_attempt_count,
        "flow_id": e.flow_id,
        "priority": e.priority,
        "created_at_ms": _ms(e.created_at),
        "terminal_at_ms": _ms(e.completed_at),
        "deadline_at_ms": _ms(e.deadline_at),
        "delay_until": _ms(e.delay_until),
        "required_capabilities": ",".join(e.required_capabilities),
        "current_waitpoint_id": e.current_waitpoint,
        "current_worker_instance_id": None if lease is None else lease.worker_instance_id,
        "budget_ids": ",".join(map(str, e.budget_ids)),
        "quota_policy_id": e.quota_policy_id,
    }
    fields["cancel_reason"] = fields["cancellation_reason"]
    fields["current_attempt_index"] = fields["attempt_index"]
    fields["completed_at"] = fields["terminal_at_ms"]
    return {name: None if value is None else str(value) for name, value in fields.items()}


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)
