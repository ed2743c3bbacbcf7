"""Operators' calls on executions, without a lease."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import check_batch, check_filled, check_int
from flowfabric.errors import Contention, FlowFabricError, NotFound
from flowfabric.values.attempt import Cancelled
from flowfabric.values.checks import check_lane, check_tag_key, check_text, escape_text, moment
from flowfabric.values.execution import Changed, Replayed
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id, parse_flow_id
from flowfabric.values.state import State


class Control(Operations):
    """replay, cancel_many, delete, redact, change_priority, free_key, set_execution_tag."""

    async def cancel_many(
        self, execution_ids: Sequence[ExecutionId], reason: str, *, keep_children: bool = False
    ) -> list[Cancelled | FlowFabricError]:
        """Cancel up to 1,000 executions as an operator in one call; one verdict per execution. See `cancel`."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        nothing: list[None] = [None] * len(targets)
        found = await self._fetch(
            statements.CANCEL_AS_OPERATOR,
            *self._all_at(targets),
            nothing,
            nothing,
            nothing,
            nothing,
            "operator_override",
            escape_text(reason, 4096),
            bool(keep_children),
            None,
            repeatable=True,
        )
        return [
            rows.cancelled(row, target) if row["code"] == "ok" else raised(row, target)
            for target, row in zip(targets, rows.by_place(found, len(targets)), strict=True)
        ]

    async def replay_execution(
        self, execution_id: ExecutionId, *, reason: str | None = None, requested_by: str | None = None
    ) -> Replayed:
        """Run an ended execution again as a new attempt; every earlier attempt stays as it is."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.REPLAY,
            *self._all_at([target]),
            None if reason is None else escape_text(reason, 4096),
            None if requested_by is None else check_text(requested_by, "requested_by"),
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Replayed(target, State(row["state"]))

    async def replay_many(
        self, execution_ids: Sequence[ExecutionId], *, reason: str | None = None, requested_by: str | None = None
    ) -> list[Replayed | FlowFabricError]:
        """Replay up to 1,000 ended executions in one call; one verdict per execution."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        found = await self._fetch(
            statements.REPLAY,
            *self._all_at(targets),
            None if reason is None else escape_text(reason, 4096),
            None if requested_by is None else check_text(requested_by, "requested_by"),
        )
        return [
            Replayed(target, State(row["state"])) if row["code"] == "ok" else raised(row, target)
            for target, row in zip(targets, rows.by_place(found, len(targets)), strict=True)
        ]

    async def delete_execution(self, execution_id: ExecutionId) -> None:
        """Delete an ended execution and everything it owns, now. Its events stay until their own retention ends."""
        await self._erase(statements.DELETE_EXECUTION, execution_id)

    async def redact_execution(self, execution_id: ExecutionId) -> None:
        """Remove the user's data from an ended execution (payload, result, texts, tags, key); its history stays.

        It cannot be replayed any more. Refused (`execution_needed`) while its parent, the parent of its flow or an
        unfinished node of its flow needs its result.
        """
        await self._erase(statements.REDACT_EXECUTION, execution_id)

    async def _erase(self, statement: str, execution_id: ExecutionId) -> None:
        target = parse_execution_id(execution_id)
        row = await self._row(statement, *self._at(target))
        if row["code"] != "ok":
            raise raised(row, target)

    async def change_priority(
        self,
        execution_id: ExecutionId,
        new_priority: int,
        *,
        lane_id: str | None = None,
        last_mutation_at: datetime | None = None,
    ) -> Changed:
        """Change the priority of a claimable execution; the value is clamped to 0..9000.

        With `last_mutation_at`, that of the execution as it was read, nothing changes if the execution has changed
        since: `Contention` (`stale_definition`).
        """
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.CHANGE_PRIORITY,
            *self._at(target),
            check_int(new_priority, "new_priority", -(2**31), 2**31 - 1),
            None if not lane_id else check_lane(lane_id),
            None if last_mutation_at is None else moment(last_mutation_at, "last_mutation_at"),
        )
        if row["code"] == "stale":
            detail = f"execution {target} was changed after {last_mutation_at}"
            raise Contention("stale_definition", detail, execution_id=target)
        if row["code"] != "ok":
            raise raised(row, target)
        return Changed(target)

    async def free_key(
        self, execution_id: ExecutionId, idempotency_key: str, *, namespace: str = "", flow_id: FlowId | None = None
    ) -> bool:
        """Let the idempotency key of an execution that ended without success be used again; False when it has not.

        `flow_id` is the flow that the execution was created in, to which its key belongs.
        """
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.FREE_KEY,
            *self._at(target),
            None if flow_id is None else parse_flow_id(flow_id),
            check_text(namespace, "namespace"),
            check_filled(idempotency_key, "idempotency_key", 512),
            repeatable=True,
        )
        return bool(row["freed"])

    async def set_execution_tag(self, execution_id: ExecutionId, key: str, value: str) -> None:
        """Set one tag. The key has a namespace and a dot: `billing.invoice`."""
        check_tag_key(key)
        check_text(value, "value", None)
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.SET_TAG,
            *self._at(target),
            key,
            value,
            repeatable=True,
        )
        if not row["found"]:
            raise NotFound("execution", target)
