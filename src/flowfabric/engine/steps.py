"""Durable steps, and waiting for other executions without holding a lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from flowfabric._postgres import create_call, rows
from flowfabric._postgres.create_call import CreateCall
from flowfabric.engine.calls import (
    Calls,
    Fences,
    by_place,
    check_batch,
    check_duration,
    check_int,
    moment,
    optional_bytes,
    parse_execution,
    raised,
)
from flowfabric.errors import FlowFabricError, InvalidInput, LeaseLost
from flowfabric.ids import ExecutionId, check_text
from flowfabric.models import Created, Duplicate, Fence, Handle, NewExecution, NewStep, Outcome, Parked, Step
from flowfabric.state import State

_RECORD = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at from flowfabric.record_steps("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)"
)
_PARK = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.park($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
_OUTCOMES = (
    "select ordinal, state, result, result_encoding, failure_reason, failure_category, cancellation_reason"
    " from flowfabric.read_outcomes($1, $2)"
)
# The lease is checked first, then the execution is made, then it is remembered: each part waits for the row of the
# part before it, and all are one transaction.
_CREATE = create_call.create_sql().split(" from ", 1)[1]
_SUBMIT = (
    "select c.ordinal, c.code, c.partition, c.id, c.state"  # noqa: S608 - placeholders only
    " from flowfabric.holds_lease($24, $25, $26, $27, $28, $29) h"
    f" cross join lateral {_CREATE.replace('$7::boolean', '($7::boolean and h.holds)')} c"
    " left join lateral flowfabric.record_steps("
    "case when c.code = 'lane_closed' then '{}' else array[$24] end,"
    " case when c.code = 'lane_closed' then '{}' else array[$25] end, array[$26], array[$27], array[$28], array[$29],"
    " array[$30::text], array[$31::integer], array['submit'], null, null, null, null, null,"
    " array[case when c.ordinal = 0 then ($5::integer[])[1] else c.partition end],"
    " array[case when c.ordinal = 0 then ($6::uuid[])[1] else c.id end]) s on true"
)


class Steps(Calls):
    """record_steps, read_steps, park, submit_child, watch, read_outcomes."""

    async def record_steps(
        self, items: Sequence[tuple[Handle | Fence, NewStep]]
    ) -> list[datetime | FlowFabricError | None]:
        """Remember up to 1,000 steps of any executions in one call.

        One verdict per item: the time of a `now`, the end of a `sleep`, None for a step, or why it was refused. What is
        recorded as done stays as it was.
        """
        check_batch(items)
        fences = Fences([authority for authority, _ in items])
        steps = [step for _, step in items]
        found = await self._fetch(
            _RECORD,
            *fences.columns,
            [check_text(step.name, "name") for step in steps],
            [check_int(step.n, "n", 0, 2**31 - 1) for step in steps],
            [step.kind for step in steps] if any(step.kind != "step" for step in steps) else None,
            [optional_bytes(step.result, "result") for step in steps],
            _column([step.encoding for step in steps]),
            _column([step.error for step in steps]),
            [step.seconds for step in steps],
            _column([None if s.pause is None else check_duration(s.pause, "pause", least_ms=0) for s in steps]),
            None,
            None,
            repeatable=True,
        )
        if len(found) == 1 and found[0]["ordinal"] == 0:
            return [None] * len(items)
        return [
            row["at"] if row["code"] == "ok" else raised(row, fences.execution_id(place))
            for place, row in enumerate(by_place(found, len(items)))
        ]

    async def read_steps(self, execution_ids: Sequence[ExecutionId], *, all_generations: bool = False) -> list[Step]:
        """What is remembered of up to 1,000 executions, in the order it was recorded."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution(one) for one in execution_ids]
        found = await self._fetch(
            "select * from flowfabric.read_steps($1, $2, $3)",
            [target.partition for target in targets],
            [target.uuid for target in targets],
            bool(all_generations),
            repeatable=True,
        )
        return [rows.step(row) for row in found]

    async def park(
        self, authority: Handle | Fence, *, until: datetime | None = None, ends_of: Sequence[ExecutionId] = ()
    ) -> Parked:
        """Give the lease back until a time, or until one of some executions ends; the same attempt continues then.

        When there is nothing to wait for, because the time has come or one of them has ended, the lease is kept.
        """
        if until is None and not ends_of:
            raise InvalidInput("nothing to wait for", field="until", allowed="a time, or executions in `ends_of`")
        if len(ends_of) > 1000:
            raise InvalidInput(f"{len(ends_of)} executions", field="ends_of", allowed="at most 1000")
        fences = Fences([authority])
        targets = [parse_execution(one, "ends_of") for one in ends_of]
        if fences.execution_id(0) in targets:
            raise InvalidInput("an execution cannot wait for its own end", field="ends_of")
        row = await self._row(
            _PARK,
            *fences.first,
            None if until is None else moment(until, "until"),
            [target.partition for target in targets],
            [target.uuid for target in targets],
        )
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        return Parked(fences.execution_id(0), row["detail"] is None, row["detail"])

    async def submit_child(
        self, authority: Handle | Fence, name: str, n: int, item: NewExecution
    ) -> Created | Duplicate:
        """Create an execution and remember it as a step of the one that is held, in one transaction.

        `LeaseLost` when the lease does not hold; nothing is created then.
        """
        call = CreateCall([item], self._database.flow_partitions)
        if call.is_empty:
            verdict = call.verdicts([])[0]
            if isinstance(verdict, FlowFabricError):
                raise verdict
            return verdict
        fences = Fences([authority])
        found = await self._fetch(
            _SUBMIT, *call.args, *fences.first, check_text(name, "name"), check_int(n, "n", 0, 2**31 - 1)
        )
        if not found:
            raise LeaseLost("stale_lease", "the lease no longer holds", execution_id=fences.execution_id(0))
        answer = call.verdicts([tuple(row) for row in found])[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def watch(self, execution_ids: Sequence[ExecutionId], within_ms: int) -> None:
        """Ask for a notification (`ended` topic of this process) when one of these ends; a hint, not a promise."""
        targets = [parse_execution(one) for one in execution_ids]
        await self._fetch(
            "select flowfabric.watch($1, $2, $3, $4)",
            self._instance,
            within_ms,
            [target.partition for target in targets],
            [target.uuid for target in targets],
            repeatable=True,
        )

    async def unwatch(self, execution_ids: Sequence[ExecutionId]) -> None:
        """Take back what `watch` asked for."""
        targets = [parse_execution(one) for one in execution_ids]
        await self._fetch(
            "select flowfabric.unwatch($1, $2, $3)",
            self._instance,
            [target.partition for target in targets],
            [target.uuid for target in targets],
            repeatable=True,
        )

    @contextlib.contextmanager
    def ended_wakeups(self) -> Iterator[asyncio.Event | None]:
        """An event that is set when something this process watches ended; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic(f"ended {self._instance}") as told:
            yield told

    @contextlib.contextmanager
    def lost_wakeups(self, worker_instance_id: str) -> Iterator[asyncio.Event | None]:
        """An event that is set when somebody took leases of a worker away; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic(f"lost {worker_instance_id}") as lost:
            yield lost

    async def free_key(self, execution_id: ExecutionId) -> bool:
        """Let the idempotency key of an execution that ended without success be used again; False when it has not."""
        target = parse_execution(execution_id)
        row = await self._row(
            "select flowfabric.free_key($1, $2) as freed", target.partition, target.uuid, repeatable=True
        )
        return bool(row["freed"])

    async def read_outcomes(self, execution_ids: Sequence[ExecutionId]) -> dict[ExecutionId, Outcome]:
        """How executions ended; those that have not are absent, and one that is not stored has no state."""
        targets = [parse_execution(one) for one in execution_ids]
        found = await self._fetch(
            _OUTCOMES, [target.partition for target in targets], [target.uuid for target in targets], repeatable=True
        )
        return {
            targets[row["ordinal"] - 1]: Outcome(
                state=None if row["state"] is None else State(row["state"]),
                result=row["result"],
                result_encoding=row["result_encoding"],
                failure_reason=row["failure_reason"],
                failure_category=row["failure_category"],
                cancellation_reason=row["cancellation_reason"],
            )
            for row in found
        }


def _column(values: list[Any]) -> list[Any] | None:
    return values if any(value is not None for value in values) else None


class StepError(Struct, frozen=True):
    """How a step failed, as it is stored."""

    type: str
    message: str
    module: str = ""
    args: list[Any] | None = None

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()
