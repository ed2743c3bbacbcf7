"""Durable steps: store the steps and children of a handler."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, get_args

import msgspec

from flowfabric._postgres import rows, statements
from flowfabric._postgres.create_call import CreateCall
from flowfabric.engine.base import Operations
from flowfabric.engine.batch import Batch, Fences, raised, used
from flowfabric.engine.checks import (
    ESCAPED_NUL,
    check_batch,
    check_duration,
    check_int,
    most_rows,
    optional_bytes,
)
from flowfabric.errors import Conflict, Corruption, FlowFabricError, InvalidInput, NotFound, StateError
from flowfabric.values.checks import check_text, moment
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId, mint_execution_id, parse_execution_id
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.step import NewStep, Step, StepCursor, StepKind


class Steps(Operations):
    """record_steps, read_steps, submit_child, fork_execution."""

    async def record_steps(
        self, items: Sequence[tuple[Handle | Fence, NewStep]]
    ) -> list[datetime | FlowFabricError | None]:
        """Store up to 1,000 steps of any executions in one call.

        One verdict per item: the time of a `now`, the end of a `sleep`, None for a step, or why it was refused. A step
        recorded as done never changes; a failed one is replaced by the next record. A `wait` is recorded by
        `open_wait`; here it says that the handler has read the signals that ended it.
        """
        check_batch(items)
        batch = Batch(items, _step_columns, self._database.flow_partitions)
        if batch.is_empty:
            return batch.verdicts([])
        fences, (*columns, places) = batch.ready
        found = await self._fetch(
            statements.RECORD_STEPS, *fences.columns, *columns, *_NO_CHILD, places, repeatable=True
        )
        answers: list[datetime | FlowFabricError | None] = [
            raised(row, fences.execution_id(place))
            if row["code"] != "ok"
            else None  # one row for all items: none asked for a time
            if row["ordinal"] == rows.FOR_ALL
            else row["at"]
            for place, row in enumerate(rows.by_place(found, len(fences.ids)))
        ]
        return batch.verdicts(answers)

    async def fork_execution(
        self,
        execution_id: ExecutionId,
        *,
        before_step: tuple[str, int] | None,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        creator_identity: str = "",
        new_id: ExecutionId | None = None,
    ) -> ExecutionId:
        """Create an execution with the steps that another one recorded before a step; it runs the rest.

        `before_step` is a name and how often it was used before; None copies every step. It has the lane, tags,
        priority and policy of the other one, and its payload unless one is given; no idempotency key, flow, parent or
        deadline. Results of children are remembered; submissions without a recorded result are made again, waits are
        asked again. The other one, ended or running, is not changed. `NotFound` if it does not exist, `InvalidInput` if
        the step was never recorded, `Conflict` if an execution has `new_id` already.
        """
        target = parse_execution_id(execution_id)
        name, n = (None, 0) if before_step is None else _checked_step(before_step)
        made = self._minted() if new_id is None else parse_execution_id(new_id, "new_id")
        if payload_encoding is not None and payload is None:
            raise InvalidInput("given without a payload", field="payload_encoding", allowed="together with payload")
        row = await self._row(
            statements.FORK_EXECUTION,
            *self._at(target),
            *self._at(made),
            name,
            n,
            optional_bytes(payload, "payload"),
            None if payload_encoding is None else check_text(payload_encoding, "payload_encoding"),
            check_text(creator_identity, "creator_identity"),
        )
        match row["code"]:
            case "created":
                return made
            case "step_not_found":
                raise InvalidInput(
                    f"{target} has not recorded {name}" + (f" #{n + 1}" if n else ""),
                    field="before_step",
                    allowed=row["detail"] or "None: nothing is recorded",
                    execution_id=target,
                )
            case "needs_payload":
                raise InvalidInput(
                    "its arguments are results of other nodes of its flow",
                    field="payload",
                    allowed="the arguments",
                    execution_id=target,
                )
            case "lane_closed":
                raise StateError("lane_closed", f"the lane {row['detail']} accepts no new executions")
            case "id_exists":
                raise Conflict("duplicate_submission", f"an execution {made} exists", existing=made, execution_id=made)
        raise NotFound("execution", target)

    def _minted(self) -> ExecutionId:
        return mint_execution_id(count=self._database.flow_partitions)

    async def read_steps(
        self,
        execution_ids: Sequence[ExecutionId],
        *,
        all_generations: bool = False,
        after: StepCursor | None = None,
        limit: int | None = None,
    ) -> list[Step]:
        """Return the steps of up to 1,000 executions, in the order they were recorded.

        With a `limit` at most that many, of one execution, after the cursor `after`, which `StepCursor.of` makes.
        """
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        if len(targets) > 1 and (after is not None or limit is not None):
            raise InvalidInput(f"{len(targets)} executions", field="execution_ids", allowed="one, with after or limit")
        found = await self._fetch(
            statements.READ_STEPS,
            *self._all_at(targets),
            bool(all_generations),
            *_after(after),
            most_rows(limit),
            repeatable=True,
        )
        return [rows.step(row) for row in found]

    async def submit_child(
        self,
        authority: Handle | Fence,
        name: str,
        n: int,
        item: NewExecution,
        *,
        detached: bool = False,
        refuse_known: bool = False,
    ) -> Created | Duplicate:
        """Create an execution and store it as a step of its parent, in one transaction.

        With a known idempotency key it returns and stores the existing execution; a name and number that are already
        stored return their execution. If the lease is lost, or the item cannot be created, nothing is stored.

        A created execution is a child: it lives in its parent's partition, is kept as long as the parent may need its
        result, and is cancelled with it; unless it is `detached`. With `refuse_known` a known key raises `Conflict`,
        and nothing is stored.
        """
        fences = self._fences([authority])
        home = None if detached else fences.partitions[0]
        call = CreateCall([item], self._database.flow_partitions, home=home)
        step = (step_name(name), check_int(n, "n", 0, 2**31 - 1))
        if call.refused:
            raise call.refused[0]
        # A stored child is not created again, so a call whose response was lost can be repeated.
        found = await self._fetch(
            statements.SUBMIT_CHILD,
            *call.args,
            *fences.first,
            *step,
            bool(detached),
            not refuse_known,
            repeatable=True,
        )
        if not found:
            return await self._submitted(fences, *step)
        answer = call.verdicts([tuple(row) for row in found])[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        if refuse_known and isinstance(answer, Duplicate):
            known = answer.execution_id
            detail = f"the idempotency key is in use: execution {known}"
            raise Conflict("duplicate_submission", detail, existing=known, execution_id=known)
        return answer

    async def _submitted(self, fences: Fences, name: str, n: int) -> Duplicate:
        """Return the child stored under a name; raises the holder's error if the lease is lost."""
        row = await self._row(statements.PROGRESS, *fences.first, None, None, repeatable=True)
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        for step in await self.read_steps([fences.execution_id(0)]):
            if (step.kind, step.name, step.n) == ("submit", name, n) and step.child_id is not None:
                return Duplicate(step.child_id)
        raise Corruption(f"no child is stored as {name!r} ({n})", execution_id=fences.execution_id(0))


def _after(cursor: object) -> tuple[int | None, datetime | None, int]:
    if cursor is None:
        return None, None, 0
    if not isinstance(cursor, StepCursor):
        raise InvalidInput(f"got {type(cursor).__name__}", field="after", allowed="a StepCursor")
    return (
        check_int(cursor.generation, "after.generation", 0, 2**31 - 1),
        moment(cursor.recorded_at, "after.recorded_at", "an aware datetime"),
        check_int(cursor.n, "after.n", 0, 2**31 - 1),
    )


_KINDS = frozenset(get_args(StepKind)) - {"usage"}  # recorded by `use_budgets`

_MAX_NAME = 512

_NO_CHILD = (None, None, None)  # its partition, its id, its outcome: only `submit_child` records children

_MAX_ERROR = 256 * 1024


def step_name(value: object) -> str:
    name = check_text(value, "name", _MAX_NAME)
    if not name:
        raise InvalidInput("empty", field="name", allowed="a non-empty text")
    return name


def _step_columns(
    items: Sequence[tuple[Handle | Fence, NewStep]], count: int
) -> tuple[Fences, tuple[list[Any] | None, ...]]:
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], NewStep):
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="(Handle or Fence, NewStep)")
    steps = [step for _, step in items]
    for step in steps:
        if not isinstance(step.kind, str) or step.kind not in _KINDS:
            raise InvalidInput(f"got {step.kind!r}", field="kind", allowed=", ".join(sorted(_KINDS)))
        if (step.kind == "sleep" and step.place is None) != (step.pause is not None):
            raise InvalidInput(f"given for a {step.kind}", field="pause", allowed="a timedelta for a sleep, else None")
        if step.seconds is not None and (isinstance(step.seconds, bool) or not isinstance(step.seconds, float | int)):
            raise InvalidInput(f"got {type(step.seconds).__name__}", field="seconds", allowed="a number or None")
    return Fences([authority for authority, _ in items], count), (
        [step_name(step.name) for step in steps],
        [check_int(step.n, "n", 0, 2**31 - 1) for step in steps],
        [step.kind for step in steps] if any(step.kind != "step" for step in steps) else None,
        used([optional_bytes(step.result, "result") for step in steps]),
        used([None if step.encoding is None else check_text(step.encoding, "encoding") for step in steps]),
        used([None if step.error is None else _error(step.error) for step in steps]),
        [step.seconds for step in steps],
        used([None if s.pause is None else check_duration(s.pause, "pause", least_ms=0) for s in steps]),
        used([None if s.place is None else check_int(s.place, "place", 1, 2**31 - 1) for s in steps]),
    )


def _error(value: object) -> str:
    """Return the JSON object that describes the failure of a step, as the database can hold it."""
    text = check_text(value, "error", _MAX_ERROR)
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"not JSON: {error}", field="error", allowed="a JSON object as text") from None
    if not isinstance(found, dict) or ESCAPED_NUL.search(text):
        raise InvalidInput("not an object without NUL", field="error", allowed="a JSON object as text")
    return text


def _checked_step(step: object) -> tuple[str, int]:
    if not isinstance(step, tuple | list) or len(step) != 2 or not isinstance(step[0], str) or not step[0]:
        raise InvalidInput(f"got {step!r}", field="before_step", allowed="(name, how often it was used before)")
    return check_text(step[0], "before_step", None), check_int(step[1], "before_step", 0, 2**31 - 1)
