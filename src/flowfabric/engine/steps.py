"""Durable steps, and waiting for other executions without holding a lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, get_args
from uuid import UUID

import msgspec

from flowfabric._postgres import create_call, rows
from flowfabric._postgres.create_call import CreateCall
from flowfabric.engine.calls import (
    ESCAPED_NUL,
    Batch,
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
from flowfabric.errors import Corruption, FlowFabricError, InvalidInput
from flowfabric.values.checks import check_text, check_worker
from flowfabric.values.execution import Created, Duplicate, NewExecution, Outcome
from flowfabric.values.ids import ExecutionId, parse_uuid
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.state import State
from flowfabric.values.step import NewStep, Parked, Step, StepKind

_RECORD = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at from flowfabric.record_steps("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)"
)
_PARK = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.park($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
)
_PROGRESS = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.progress($1, $2, $3, $4, $5, $6, $7, $8)"
)
_OUTCOMES = (
    "select ordinal, state, result, result_encoding, failure_reason, failure_category, cancellation_reason"
    " from flowfabric.read_outcomes($1, $2)"
)
# The lease and the memory are looked at first, then the execution is made, then it is remembered: each part waits for
# the row of the part before it, and all are one transaction.
_CREATE = create_call.create_sql().split(" from ", 1)[1]
_SUBMIT = (
    "select c.ordinal, c.code, c.partition, c.id, c.state"  # noqa: S608 - placeholders only
    " from flowfabric.may_submit($24, $25, $26, $27, $28, $29, $30, $31) h"
    f" cross join lateral {_CREATE.replace('$7::boolean', '($7::boolean and h.may)')} c"
    " left join lateral flowfabric.record_steps("
    "case when c.code = 'lane_closed' then '{}' else array[$24] end,"
    " case when c.code = 'lane_closed' then '{}' else array[$25] end, array[$26], array[$27], array[$28], array[$29],"
    " array[$30], array[$31], array['submit'], null,"
    " array[case when c.code = 'duplicate' then 'known' end], null, null, null,"
    " array[case when c.ordinal = 0 then ($5::integer[])[1] else c.partition end],"
    " array[case when c.ordinal = 0 then ($6::uuid[])[1] else c.id end]) s on true"
)


class Steps(Calls):
    """record_steps, read_steps, park, submit_child, watch, unwatch, read_outcomes, free_key."""

    async def record_steps(
        self, items: Sequence[tuple[Handle | Fence, NewStep]]
    ) -> list[datetime | FlowFabricError | None]:
        """Remember up to 1,000 steps of any executions in one call.

        One verdict per item: the time of a `now`, the end of a `sleep`, None for a step, or why it was refused. What is
        recorded as done stays as it was; a failure is replaced by what comes after it.
        """
        check_batch(items)
        batch = Batch(items, _checked_steps)
        if batch.is_empty:
            return batch.verdicts([])
        fences, columns = batch.ready
        found = await self._fetch(_RECORD, *fences.columns, *columns, None, None, repeatable=True)
        count = len(fences.ids)
        answers: list[datetime | FlowFabricError | None] = [None] * count
        if not (len(found) == 1 and found[0]["ordinal"] == 0):
            answers = [
                row["at"] if row["code"] == "ok" else raised(row, fences.execution_id(place))
                for place, row in enumerate(by_place(found, count))
            ]
        return batch.verdicts(answers)

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
        self,
        authority: Handle | Fence,
        *,
        until: datetime | None = None,
        ends_of: Sequence[ExecutionId] = (),
        signals_on: Mapping[UUID, int] | None = None,
    ) -> Parked:
        """Give the lease back until a time, or until one of some executions ends; the same attempt continues then.

        `signals_on` names pending waitpoints of this execution, with how many signals are known on each: the next one
        on any of them wakes it too. When there is nothing to wait for, because the time has come, one of them has ended
        or a signal has arrived, the lease is kept.
        """
        check_batch(ends_of, "ends_of")
        waitpoints = dict(signals_on or {})
        check_batch(list(waitpoints), "signals_on")
        if until is None and not ends_of and not waitpoints:
            raise InvalidInput("nothing to wait for", field="until", allowed="a time, or executions in `ends_of`")
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
            [parse_uuid(waitpoint, "signals_on") for waitpoint in waitpoints],
            [check_int(seen, "signals_on", 0, 2**31 - 1) for seen in waitpoints.values()],
        )
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        return Parked(fences.execution_id(0), row["detail"] is None, row["detail"])

    async def submit_child(
        self, authority: Handle | Fence, name: str, n: int, item: NewExecution
    ) -> Created | Duplicate:
        """Create an execution and remember it as a step of the one that is held, in one transaction.

        A known idempotency key gives the execution that stands, and that is remembered; a name and number that are
        remembered already give what they stand for. When the lease does not hold, or the item cannot be created,
        nothing is stored.
        """
        call = CreateCall([item], self._database.flow_partitions)
        fences = Fences([authority])
        step = (_step_name(name), check_int(n, "n", 0, 2**31 - 1))
        if call.refused:
            raise call.refused[0]
        # What is remembered already is not made again, so a call whose answer was lost can be repeated.
        found = await self._fetch(_SUBMIT, *call.args, *fences.first, *step, repeatable=True)
        if not found:
            return await self._submitted(fences, *step)
        answer = call.verdicts([tuple(row) for row in found])[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def _submitted(self, fences: Fences, name: str, n: int) -> Duplicate:
        """What is remembered under a name; raises what a holder's call is told when the lease does not hold."""
        row = await self._row(_PROGRESS, *fences.first, None, None, repeatable=True)
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        for step in await self.read_steps([fences.execution_id(0)]):
            if (step.kind, step.name, step.n) == ("submit", name, n) and step.child_id is not None:
                return Duplicate(step.child_id)
        raise Corruption(f"no child is remembered as {name!r} ({n})", execution_id=fences.execution_id(0))

    async def watch(self, execution_ids: Sequence[ExecutionId], within: timedelta) -> None:
        """Ask for a notification (`ended_wakeups`) when one of up to 1,000 executions ends within a time.

        A hint, not a promise: look at them once more after this call, and now and then.
        """
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution(one) for one in execution_ids]
        await self._fetch(
            "select flowfabric.watch($1, $2, $3, $4)",
            self._instance,
            check_duration(within, "within"),
            [target.partition for target in targets],
            [target.uuid for target in targets],
            repeatable=True,
        )

    async def unwatch(self, execution_ids: Sequence[ExecutionId]) -> None:
        """Take back what `watch` asked for."""
        check_batch(execution_ids, "execution_ids")
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
        with self._listener.topic(f"lost {check_worker(worker_instance_id, 'worker_instance_id')}") as lost:
            yield lost

    async def free_key(self, execution_id: ExecutionId) -> bool:
        """Let the idempotency key of an execution that ended without success be used again; False when it has not."""
        target = parse_execution(execution_id)
        row = await self._row(
            "select flowfabric.free_key($1, $2) as freed", target.partition, target.uuid, repeatable=True
        )
        return bool(row["freed"])

    async def read_outcomes(self, execution_ids: Sequence[ExecutionId]) -> dict[ExecutionId, Outcome]:
        """How up to 1,000 executions ended; those that have not are absent, and one that is not stored has no state."""
        check_batch(execution_ids, "execution_ids")
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


_KINDS = frozenset(get_args(StepKind))
_MAX_NAME = 512
_MAX_ERROR = 256 * 1024


def _step_name(value: object) -> str:
    name = check_text(value, "name", _MAX_NAME)
    if not name:
        raise InvalidInput("empty", field="name", allowed="a non-empty text")
    return name


def _checked_steps(items: Sequence[tuple[Handle | Fence, NewStep]]) -> tuple[Fences, tuple[list[Any] | None, ...]]:
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], NewStep):
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="(Handle or Fence, NewStep)")
    steps = [step for _, step in items]
    for step in steps:
        if not isinstance(step.kind, str) or step.kind not in _KINDS or step.kind == "wait":
            raise InvalidInput(f"got {step.kind!r}", field="kind", allowed=", ".join(sorted(_KINDS - {"wait"})))
        if (step.kind == "sleep") != (step.pause is not None):
            raise InvalidInput(f"of a {step.kind}", field="pause", allowed="a timedelta for a sleep, else None")
        if step.seconds is not None and (isinstance(step.seconds, bool) or not isinstance(step.seconds, float | int)):
            raise InvalidInput(f"got {type(step.seconds).__name__}", field="seconds", allowed="a number or None")
    return Fences([authority for authority, _ in items]), (
        [_step_name(step.name) for step in steps],
        [check_int(step.n, "n", 0, 2**31 - 1) for step in steps],
        [step.kind for step in steps] if any(step.kind != "step" for step in steps) else None,
        _column([optional_bytes(step.result, "result") for step in steps]),
        _column([None if step.encoding is None else check_text(step.encoding, "encoding") for step in steps]),
        _column([None if step.error is None else _error(step.error) for step in steps]),
        [step.seconds for step in steps],
        _column([None if s.pause is None else check_duration(s.pause, "pause", least_ms=0) for s in steps]),
    )


def _error(value: object) -> str:
    """The JSON object that says how a step failed, as the database can hold it."""
    text = check_text(value, "error", _MAX_ERROR)
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"not JSON: {error}", field="error", allowed="a JSON object as text") from None
    if not isinstance(found, dict) or ESCAPED_NUL.search(text):
        raise InvalidInput("not an object without NUL", field="error", allowed="a JSON object as text")
    return text


def _column(values: list[Any]) -> list[Any] | None:
    """The values, or None where no item has one."""
    return values if any(value is not None for value in values) else None
