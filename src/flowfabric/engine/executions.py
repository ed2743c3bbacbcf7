"""Executions from their creation to their end: create, complete, fail, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from flowfabric._postgres import create_columns, rows, statements
from flowfabric._postgres.create_call import CreateCall
from flowfabric._postgres.create_columns import Columns
from flowfabric.engine.base import Operations
from flowfabric.engine.batch import Batch, Fences, is_override, raised, used
from flowfabric.engine.checks import check_batch, optional_bytes
from flowfabric.errors import FlowFabricError, InvalidInput, StateError, TransportError
from flowfabric.values.attempt import Cancelled, Completed, Completion, Failure, RetryScheduled, TerminalFailed
from flowfabric.values.checks import check_key, check_text, escape_text
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.failure import classify
from flowfabric.values.ids import ExecutionId, FlowId, mint_execution_id, parse_execution_id, parse_flow_id
from flowfabric.values.lease import Authority, Fence, Handle, Operator
from flowfabric.values.policies import PolicyInput
from flowfabric.values.policy_json import retry_policy_to_json

_MAX_FAILURE_BYTES = 256 * 1024


class Executions(Operations):
    """create, complete, fail, cancel."""

    def mint_id(
        self,
        *,
        flow_id: FlowId | None = None,
        parent_id: ExecutionId | None = None,
        namespace: str = "",
        idempotency_key: str | None = None,
    ) -> ExecutionId:
        """A new id to create an execution with, in the partition where the engine would put it.

        A member's id must be of its flow's partition, a child's of its parent's. Asks nothing of the database.
        """
        return mint_execution_id(
            namespace=check_text(namespace, "namespace"),
            idempotency_key=None if idempotency_key is None else check_key(idempotency_key),
            flow_id=None if flow_id is None else parse_flow_id(flow_id),
            parent_id=None if parent_id is None else parse_execution_id(parent_id, "parent_id"),
            count=self._database.flow_partitions,
        )

    async def create_execution(
        self,
        *,
        execution_kind: str,
        lane_id: str = "default",
        namespace: str = "",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: dict[str, str] | None = None,
        policy: PolicyInput = None,
        delay_until: datetime | timedelta | None = None,
        execution_deadline_at: datetime | timedelta | None = None,
        execution_id: ExecutionId | None = None,
        flow_id: FlowId | None = None,
        connection: asyncpg.Connection[Any] | None = None,
    ) -> Created | Duplicate:
        """Submit one execution; a known key or id returns `Duplicate` and changes nothing.

        With `connection`, an asyncpg connection in your transaction, the execution exists when you commit.
        """
        item = NewExecution(
            execution_kind=execution_kind,
            lane_id=lane_id,
            namespace=namespace,
            input_payload=input_payload,
            payload_encoding=payload_encoding,
            priority=priority,
            creator_identity=creator_identity,
            idempotency_key=idempotency_key,
            tags=tags,
            policy=policy,
            delay_until=delay_until,
            execution_deadline_at=execution_deadline_at,
            execution_id=execution_id,
            flow_id=flow_id,
        )
        answer = (await self.create_many([item], connection=connection))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def create_many(
        self, items: Sequence[NewExecution], *, connection: asyncpg.Connection[Any] | None = None
    ) -> list[Created | Duplicate | FlowFabricError]:
        """Submit up to 1,000 executions; one verdict per item; for a refused item it is the exception."""
        check_batch(items)
        call = CreateCall(items, self._database.flow_partitions)
        found: Sequence[asyncpg.Record] = ()
        standing: Sequence[asyncpg.Record] = ()
        repeated = False
        if connection is not None:
            if not call.is_empty:
                found = await connection.fetch(statements.CREATE_EXECUTIONS, *call.args)
            if call.doubts:
                standing = await connection.fetch(statements.STANDING_EXECUTIONS, *call.doubts)
        else:
            if not call.is_empty:
                found, repeated = await self._create(call.columns)
            if call.doubts:
                standing = await self._fetch(statements.STANDING_EXECUTIONS, *call.doubts, repeatable=True)
        return call.verdicts([tuple(row) for row in found], [tuple(row) for row in standing], repeated=repeated)

    @staticmethod
    def is_plain(item: NewExecution) -> bool:
        """Whether an item sets only lane, kind, payload, policy and creator, as `create_alike` requires."""
        return create_columns.is_plain(item)

    async def create_alike(self, item: NewExecution, payloads: Sequence[bytes]) -> list[ExecutionId]:
        """Submit up to 1,000 executions that differ in their payload alone; returns the id of each.

        For volume: nothing is built or checked per execution, so the item must be a plain one (see `is_plain`).
        """
        check_batch(payloads, "payloads")
        if not self.is_plain(item):
            raise InvalidInput("sets more than lane, kind, policy and creator", field="item", allowed="a plain item")
        columns = create_columns.alike_columns(item, payloads, self._database.flow_partitions)
        found, _ = await self._create(columns)
        if found[0]["code"] == "lane_closed":
            raise StateError("lane_closed", f"the lane {item.lane_id} accepts no new executions")
        return [ExecutionId(uuid) for uuid in columns.ids]

    async def _create(self, columns: Columns) -> tuple[list[asyncpg.Record], bool]:
        """Return the rows, and whether the call had to be repeated."""
        try:
            # One execution without other options, and not the first of its kind: the most common call.
            if (plain := columns.one_plain) and (found := await self._fetch(statements.CREATE_ONE, *plain)):
                return found, False
            return await self._fetch(statements.CREATE_EXECUTIONS, *columns.args), False
        except TransportError as error:
            if not error.retryable:
                raise
            # The response was lost. We chose the ids, so repeating the call creates nothing twice.
            columns.ids_given = True
            return await self._fetch(statements.CREATE_EXECUTIONS, *columns.args, repeatable=True), True

    async def complete(
        self, authority: Authority, result: bytes | None = None, *, result_encoding: str | None = None
    ) -> Completed:
        """Complete the execution. A repeated call with the same handle returns the first result and changes nothing."""
        if is_override(authority):
            return await self._complete_as_operator(authority, result, result_encoding)
        done = Completion(authority, result, result_encoding)  # type: ignore[arg-type]  # refused by the fences
        answer = (await self._complete([done]))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def _complete_as_operator(
        self, authority: Operator, result: bytes | None, result_encoding: str | None
    ) -> Completed:
        target = parse_execution_id(authority.execution_id)
        row = await self._row(
            statements.COMPLETE_AS_OPERATOR,
            *self._at(target),
            optional_bytes(result, "result"),
            None if result_encoding is None else check_text(result_encoding, "result_encoding"),
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Completed(target)

    async def complete_many(self, items: Sequence[Completion | Handle | Fence]) -> list[Completed | FlowFabricError]:
        """Complete up to 1,000 executions in one call; one verdict per item. A bare handle completes without result."""
        check_batch(items)
        return await self._complete(items)

    async def _complete(self, items: Sequence[Completion | Handle | Fence]) -> list[Completed | FlowFabricError]:
        batch = Batch(items, _completion_columns, self._database.flow_partitions)
        if batch.is_empty:
            return batch.verdicts([])
        fences, results, encodings = batch.ready
        found = await self._fetch(statements.COMPLETE, *fences.columns, results, encodings, repeatable=True)
        answers: list[Completed | FlowFabricError] = [
            Completed(ExecutionId(uuid)) if row["code"] in ("ok", "replayed") else raised(row, ExecutionId(uuid))
            for uuid, row in zip(fences.ids, rows.by_place(found, len(fences.ids)), strict=True)
        ]
        return batch.verdicts(answers)

    async def fail(
        self,
        authority: Authority,
        reason: str,
        *,
        failure_class: str | None = None,
        category: str | None = None,
        retry_policy: Any = None,
    ) -> RetryScheduled | TerminalFailed:
        """Report a failure; the retry policy decides whether another attempt follows.

        `retry_policy` replaces the frozen one for this failure. Text that cannot be stored is escaped, never refused.
        """
        item = Failure(
            authority=authority,  # type: ignore[arg-type]  # an operator: one item only
            reason=reason,
            failure_class=failure_class,
            category=category,
            retry_policy=retry_policy,
        )
        answer = (await (self._fail_as_operator(item) if is_override(authority) else self._fail([item])))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def fail_many(self, items: Sequence[Failure]) -> list[RetryScheduled | TerminalFailed | FlowFabricError]:
        """Report up to 1,000 failures in one call; one verdict per item."""
        check_batch(items)
        return await self._fail(items)

    async def _fail_as_operator(self, item: Failure) -> list[RetryScheduled | TerminalFailed | FlowFabricError]:
        fences, columns = _failure_columns([item], self._database.flow_partitions)
        found = await self._fetch(
            statements.FAIL_AS_OPERATOR, *self._at(fences.execution_id(0)), *(column[0] for column in columns)
        )
        return _failed(found, fences)

    async def _fail(self, items: Sequence[Failure]) -> list[RetryScheduled | TerminalFailed | FlowFabricError]:
        batch = Batch(items, _failure_columns, self._database.flow_partitions)
        if batch.is_empty:
            return batch.verdicts([])
        fences, columns = batch.ready
        found = await self._fetch(statements.FAIL, *fences.columns, *columns, repeatable=True)
        return batch.verdicts(_failed(found, fences))

    async def cancel(
        self,
        authority: Authority,
        reason: str,
        *,
        source: str | None = None,
        keep_children: bool = False,
        by: ExecutionId | None = None,
    ) -> Cancelled:
        """Cancel the execution. A `Handle` cancels as lease holder; `Operator` as its source; a `Fence` as `source`.

        Every source but `lease_holder` needs the role operate. Unfinished work that its handler submitted is
        cancelled with it by a duty (`has_children`), unless `keep_children`. `by` is the execution whose handler calls:
        a child of it is recorded as cancelled by `handler`, and stays cancelled when the parent is replayed.
        """
        text = escape_text(reason, _MAX_FAILURE_BYTES)
        holder = type(authority) is Handle
        if type(authority) is Operator and source is None:
            source = authority.source
        source = check_text("lease_holder" if source is None else source, "source")
        if not source:
            raise InvalidInput("empty", field="source", allowed="a non-empty text")
        if holder and source != "lease_holder":
            raise InvalidInput("a Handle cancels as lease_holder", field="source", allowed="a Fence or an Operator")
        fences = self._fences([authority])
        how: tuple[bool | str | UUID | None, ...]
        if source == "lease_holder" and type(authority) is not Operator:
            statement, how = statements.CANCEL, (holder, text, bool(keep_children))
        else:
            caller = None if by is None else parse_execution_id(by, "by")
            statement, how = statements.CANCEL_AS_OPERATOR, (source, text, bool(keep_children), caller)
        row = await self._row(statement, *fences.columns, *how, repeatable=True)
        if row["code"] not in ("ok", "replayed"):
            raise raised(row, fences.execution_id(0))
        return rows.cancelled(row, fences.execution_id(0))


def _failed(found: Sequence[asyncpg.Record], fences: Fences) -> list[RetryScheduled | TerminalFailed | FlowFabricError]:
    answers: list[RetryScheduled | TerminalFailed | FlowFabricError] = []
    for place, row in enumerate(rows.by_place(found, len(fences.ids))):
        execution_id = fences.execution_id(place)
        if row["code"] not in ("ok", "replayed"):
            answers.append(raised(row, execution_id))
        elif row["detail"].startswith("retry_scheduled"):
            following = row["lease_epoch"] if row["code"] == "ok" else None
            counts = map(int, row["detail"].split()[1:])
            answers.append(RetryScheduled(execution_id, row["at"], following, *counts))
        else:
            answers.append(TerminalFailed(execution_id))
    return answers


def _completion_columns(
    items: Sequence[Completion | Handle | Fence], count: int
) -> tuple[Fences, list[bytes | None] | None, list[str | None] | None]:
    given = [item if type(item) is Completion else Completion(item) for item in items]  # type: ignore[arg-type]
    return (
        Fences.of(given, count),
        used([optional_bytes(item.result, "result") for item in given]),
        used([None if i.result_encoding is None else check_text(i.result_encoding, "result_encoding") for i in given]),
    )


def _failure_columns(items: Sequence[Failure], count: int) -> tuple[Fences, tuple[list[Any], ...]]:
    for item in items:
        if not isinstance(item, Failure):
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="Failure")
    classified = [classify(item.category, item.failure_class) for item in items]
    return Fences.of(items, count), (
        [escape_text(item.reason, _MAX_FAILURE_BYTES) for item in items],
        [failure_class.value for failure_class, _ in classified],
        [escape_text(category, 256) for _, category in classified],
        [retry_policy_to_json(item.retry_policy) for item in items],
    )
