"""Tasks and flows that a handler submits and waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from flowfabric.client.failure import parse_failure
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission
from flowfabric.contracts.codecs import shown
from flowfabric.contracts.value_types import ValueType
from flowfabric.errors import (
    Conflict,
    ExecutionNotActive,
    InvalidInput,
    LeaseLost,
    TimedOut,
)
from flowfabric.values.execution import Created, Outcome
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid, parse_execution_id
from flowfabric.values.state import State
from flowfabric.values.step import NewStep
from flowfabric.worker.durable.memory import encode_error
from flowfabric.worker.durable.parking import Gate
from flowfabric.worker.durable.steps import in_step
from flowfabric.worker.durable.waits import wake_time

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

_OUTCOME = ValueType.of(Outcome)


async def submit_durably(
    running: Running,
    submission: Submission,
    around: Callable[[Callable[[Submission], Awaitable[Run[Any]]]], Callable[[Submission], Awaitable[Run[Any]]]],
) -> Run[Any]:
    """Submit only once, even if the handler is re-run; `around` is the middleware, for new submissions."""
    await running.check()
    name = f"submit {submission.kind}"
    use, known = (await running.memory()).next(name, "submit")
    if known is not None and known.child_id is not None:
        is_new = known.outcome != "known"
        return Run(known.child_id, kind=submission.kind, connector=running.worker.app, is_new=is_new)
    run = await around(lambda changed: _submit_child(running, name, use, changed))(submission)
    if running.worker.step_hook is not None:
        await running.worker.step_hook.after(running, name, use)
    return run


async def _submit_child(running: Running, name: str, use: int, submission: Submission) -> Run[Any]:
    parent = str(running.claimed.execution_id)
    item = submission.item(running.worker.engine, creator=parent)
    engine, made = running.worker.engine, None
    if submission.options.on_duplicate in ("raise", "replace") and item.idempotency_key:
        # Submit with the key first, then record the step, which finds the key known. If an earlier run got
        # only this far, the execution still counts as created here.
        try:
            made = await running.worker.client.create(item, submission.options)
        except Conflict as error:
            standing = await engine.read_execution(parse_execution_id(error.existing))
            if standing is None or standing.creator_identity != parent:
                raise
    try:
        verdict = await engine.submit_child(running.handle, name, use, item)
    except (LeaseLost, ExecutionNotActive) as error:
        running.worker.handlers.lost(running, error)
        raise
    is_new = isinstance(made or verdict, Created)
    return Run(verdict.execution_id, kind=submission.kind, connector=running.worker.app, is_new=is_new)


async def flow_seed(running: Running, name: str) -> UUID | None:
    """Return the seed for the ids of a flow submitted here, the same in every run; None inside a step."""
    await running.check()
    if in_step.get():
        return None
    step = f"flow {name}"
    use, known = (await running.memory()).next(step, "submit")
    if known is not None and known.result is not None:
        return UUID(bytes=known.result)
    seed = mint_uuid()
    await running.record(NewStep(name=step, n=use, kind="submit", result=seed.bytes))
    return seed


async def end_of_flow(
    running: Running,
    flow_id: FlowId,
    live: Callable[[], Awaitable[list[ExecutionId]]],
    timeout: timedelta | None = None,
) -> None:
    """Wait until none of a flow's members is `live`. A timeout is recorded for this run."""
    await running.check()
    name = f"result of flow {flow_id}"
    use, known = (await running.memory()).next(name, "result")
    late = TimedOut("flow", round((timeout or timedelta()).total_seconds() * 1000))
    if known is not None:
        raise late
    until = None if timeout is None else await wake_time(running, timeout, f"timeout of {name}")
    while left := await live():
        _check_not_in(running, left)
        if until is not None and running.parking.is_due(until):
            await _record_late(running, name, use, late)
            raise late
        await running.parking.wait(Gate(until, left[-1]))


def _check_not_in(running: Running, members: Sequence[ExecutionId]) -> None:
    if running.claimed.execution_id in members:
        raise InvalidInput(
            "a node cannot wait for the end of its own flow", field="run", allowed="another flow, or single nodes"
        )


async def outcome_of(running: Running, execution_id: ExecutionId, timeout: timedelta | None = None) -> Outcome:
    """Wait for another execution and return how it ended.

    A success is recorded permanently. A failure or a timeout is recorded for this run of the handler: a retry checks
    again.
    """
    await running.check()
    name = _name_of_result(running, execution_id)
    use, known = (await running.memory()).next(name, "result")
    late = TimedOut("result", round((timeout or timedelta()).total_seconds() * 1000))
    if known is not None:
        if known.result is None:
            raise late
        return _recall_outcome(running, known.result, known.encoding)
    until = None if timeout is None else await wake_time(running, timeout, f"timeout of {name}")
    while (found := await running.worker.reports.outcome(execution_id)) is None:
        if until is not None and running.parking.is_due(until):
            await _record_late(running, name, use, late)
            raise late
        await running.parking.wait(Gate(until, execution_id))
    await running.record(_ended(running, name, use, found))
    return found


async def _record_late(running: Running, name: str, use: int, late: TimedOut) -> None:
    text, _ = encode_error(late, sealed=False)
    await running.record(NewStep(name=name, n=use, kind="result", error=text))


def _name_of_result(running: Running, execution_id: ExecutionId) -> str:
    if execution_id == running.claimed.execution_id:
        raise InvalidInput("an execution cannot wait for its own end", field="run", allowed="another execution")
    return f"result {execution_id}"


def _ended(running: Running, name: str, use: int, found: Outcome) -> NewStep:
    sealed, encoding = running.worker.codecs.seal(_OUTCOME.encode(found) or b"", running.claimed.execution_id)
    error = None
    if found.state is not State.COMPLETED:
        how = "purged" if found.state is None else found.state.value
        kind, message, _ = parse_failure(shown(found.failure_reason or ""))
        error = msgspec.json.encode({"type": kind or how, "message": message[:200] or how}).decode()
    return NewStep(name=name, n=use, kind="result", result=sealed, encoding=encoding, error=error)


def _recall_outcome(running: Running, result: bytes, encoding: str | None) -> Outcome:
    found: Outcome = _OUTCOME.decode(running.worker.codecs.open(result, encoding, running.claimed.execution_id))
    return found
