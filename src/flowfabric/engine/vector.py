"""The state vector and single fields of executions, as ports from FlowFabric in Rust read them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from flowfabric._postgres import rows
from flowfabric.engine.checks import check_list, parse_partition
from flowfabric.engine.reads import Reads, unknown_execution
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_tag_key, check_text
from flowfabric.values.execution import Execution, ExecutionSnapshot
from flowfabric.values.ids import ExecutionId, FlowId, PartitionKey, parse_execution_id
from flowfabric.values.state import State


class Vector(Reads):
    """describe_execution, read_exec_core_fields, and reads of one field each."""

    async def describe_execution(self, execution_id: ExecutionId) -> ExecutionSnapshot | None:
        """State, latest attempt, lease and tags in one record; None for an unknown id."""
        found = await self._read(parse_execution_id(execution_id))
        return None if found is None else rows.snapshot(found)

    async def read_execution_state(self, execution_id: ExecutionId) -> State | None:
        """Return its state, one word; None for an unknown id."""
        found = await self._read(parse_execution_id(execution_id))
        return None if found is None else State(found["state"])

    async def read_current_attempt_index(self, execution_id: ExecutionId) -> int:
        """The index of the latest attempt; 0 before the first claim."""
        target = parse_execution_id(execution_id)
        found = await self._read(target)
        if found is None:
            raise unknown_execution(target)
        return int(found["attempt_index"] or 0)

    async def read_total_attempt_count(self, execution_id: ExecutionId) -> int:
        """Attempts ever made; also the index of the next one."""
        target = parse_execution_id(execution_id)
        found = await self._read(target)
        if found is None:
            raise unknown_execution(target)
        return int(found["attempts"])

    async def read_exec_core_fields(
        self, partition_key: int | str | PartitionKey, execution_id: ExecutionId, names: Collection[str]
    ) -> dict[str, str | None]:
        """The named fields as text; an unknown name, or a missing execution, gives None."""
        target = parse_execution_id(execution_id)
        home = self._home(target)
        if parse_partition(partition_key, 65_536) != home:
            raise InvalidInput("not the partition of the execution", field="partition_key", allowed=str(home))
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
        found = await self._read(parse_execution_id(execution_id))
        return None if found is None else found["flow_id"]

    async def get_execution_namespace(self, execution_id: ExecutionId) -> str | None:
        """Its namespace, which may be empty; None for an unknown id."""
        found = await self._read(parse_execution_id(execution_id))
        return None if found is None else str(found["namespace"])

    async def get_execution_tag(self, execution_id: ExecutionId, key: str) -> str | None:
        """Return the value of one tag; None for an unknown id or an absent tag."""
        check_tag_key(key)
        found = await self._read(parse_execution_id(execution_id))
        tags = None if found is None else rows.decode_json(found["tags"])
        return None if tags is None else tags.get(key)


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
