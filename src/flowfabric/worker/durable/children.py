"""Tasks and flows that a handler submits and waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from flowfabric.client import creating, current
from flowfabric.client.current import ChildFlow
from flowfabric.client.failure import parse_failure
from flowfabric.client.limits import learn, may_have_limits
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission
from flowfabric.contracts.codecs import shown
from flowfabric.contracts.value_types import ValueType
from flowfabric.errors import Conflict, InvalidInput, TimedOut
from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.execution import Created, Duplicate, Outcome
from flowfabric.values.flow import FlowOutcome
from flowfabric.values.graph import FlowSubmitted, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid, parse_execution_id
from flowfabric.values.state import State
from flowfabric.values.step import NewStep
from flowfabric.worker.durable.memory import Memory, encode_error
from flowfabric.worker.durable.order import in_order
from flowfabric.worker.durable.parking import Gate
from flowfabric.worker.durable.steps import in_step
from flowfabric.worker.durable.waits import wake_time

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

_OUTCOME = ValueType.of(Outcome)
_FLOW_OUTCOME = ValueType.of(FlowOutcome)
_OF_FLOW = "result of flow "  # the database knows both names: functions/executions/needed_by.sql


T = TypeVar("T")


async def send(running: Running, submission: Submission) -> Run[Any]:
    """Submit as this handler, whatever thread or task calls."""
    current.enter(running)
    return await running.client.send(submission)


@in_order
async def submit_durably(
    running: Running,
    submission: Submission,
    around: Callable[[Callable[[Submission], Awaitable[Run[Any]]]], Callable[[Submission], Awaitable[Run[Any]]]],
) -> Run[Any]:
    """Submit only once, even if the handler is re-run; `around` is the middleware, for new submissions."""
    await running.check()
    name = f"submit {submission.kind}"
    _, _, use, known = await running.ask(name, "submit")
    if known is not None and known.child_id is not None:
        is_new = known.outcome != "known"
        return Run(known.child_id, kind=submission.kind, connector=running.worker.app, is_new=is_new)
    run = await around(lambda changed: _submit_child(running, name, use, changed))(submission)
    if running.worker.step_hook is not None:
        await running.worker.step_hook.after(running, name, use)
    return run


async def _submit_child(running: Running, name: str, use: int, submission: Submission) -> Run[Any]:
    parent, engine, options = running.claimed.execution_id, running.worker.engine, submission.options
    is_detached = options.detached is True
    if may_have_limits(submission):
        with running.calling():
            await learn(engine, [submission])
    item = submission.item(creator=str(parent), nested=True, parent_id=None if is_detached else parent)
    await running.mark_read()
    refuses = options.on_duplicate in ("raise", "replace") and bool(item.idempotency_key)
    while True:
        try:
            with running.leased(), running.calling():
                verdict = await engine.submit_child(
                    running.handle, name, use, item, detached=is_detached, refuse_known=refuses
                )
            break
        except Conflict as error:
            # Raises if the key may not be used again; else the existing execution is recorded.
            existing = Duplicate(parse_execution_id(error.existing))
            await creating.check_kind(engine, existing, item.execution_kind)
            refuses = await creating.is_free(engine, existing, item, options)
    is_new = isinstance(verdict, Created)
    return Run(verdict.execution_id, kind=submission.kind, connector=running.worker.app, is_new=is_new)


async def child_flow(running: Running, name: str) -> ChildFlow | None:
    """Return the flow that an earlier run submitted here, or how to submit it; None inside a step."""
    await running.check()
    if in_step.get():
        return None
    step = f"flow {name}"
    _, _, use, known = await running.ask(step, "submit")
    if known is not None and known.flow_id is not None and known.result is not None:
        return _ChildFlow(running, step, use, UUID(bytes=known.result), known.flow_id, known.outcome == "known")
    return _ChildFlow(running, step, use, mint_uuid())


class _ChildFlow:
    """A flow that the handler submits. Its ids are made from `seed`, which is recorded with it."""

    __slots__ = ("_running", "_step", "_use", "existed", "flow_id", "parent_id", "seed")

    def __init__(
        self, running: Running, step: str, use: int, seed: UUID, flow_id: FlowId | None = None, existed: bool = False
    ) -> None:
        self._running = running
        self._step = step
        self._use = use
        self.parent_id = running.claimed.execution_id
        self.seed = seed
        self.flow_id = flow_id
        self.existed = existed

    async def submit(
        self,
        flow_id: FlowId,
        nodes: Sequence[NewNode],
        *,
        name: str,
        namespace: str,
        tags: dict[str, str],
        detached: bool,
    ) -> FlowSubmitted | None:
        running = self._running
        hook = running.worker.step_hook
        if hook is not None:
            await hook.before(running, self._step, self._use)
        await running.mark_read()
        with running.leased(), running.calling():
            made = await running.worker.engine.submit_child_flow(
                running.handle,
                self._step,
                self._use,
                nodes,
                flow_id=flow_id,
                seed=self.seed,
                flow_kind=name,
                namespace=namespace,
                tags=tags,
                detached=detached,
            )
        if hook is not None:
            await hook.after(running, self._step, self._use)
        return made


@in_order
async def as_one_call(running: Running, work: Callable[[], Awaitable[T]]) -> T:
    """Submit a flow, with the calls that this takes."""
    return await work()


async def flow_seed(running: Running, name: str) -> UUID | None:
    """Return the seed for the ids of nodes added here, the same in every run; None inside a step."""
    await running.check()
    if in_step.get():
        return None
    step = f"flow {name}"
    _, _, use, known = await running.ask(step, "submit")
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
    name = f"{_OF_FLOW}{flow_id}"
    memory = await running.memory()
    _, _, use, known = await running.ask(name, "result")
    late = _flow_is_late(timeout)
    if known is not None and known.result is None:
        raise late
    if known is None and memory.earlier(name, "result", use) is None:
        await _live_no_more(running, name, use, live, timeout, late)


async def outcome_of_flow(
    running: Running,
    flow_id: FlowId,
    live: Callable[[], Awaitable[list[ExecutionId]]],
    read: Callable[[], Awaitable[FlowOutcome | None]],
    timeout: timedelta | None = None,
) -> FlowOutcome:
    """Wait until a flow has ended, and return how its members ended, as `read` returns it (None: not yet).

    Recorded like the outcome of a child: for good if every member that counts succeeded, else for this run.
    """
    await running.check()
    name = f"{_OF_FLOW}{flow_id}"
    memory = await running.memory()
    late = _flow_is_late(timeout)
    found: FlowOutcome | None
    use, found = await _known_end(running, name, _FLOW_OUTCOME, late)
    if found is not None:
        return found
    while found is None:
        await _live_no_more(running, name, use, live, timeout, late)
        with running.calling():
            found = await read()
    sealed, encoding = running.worker.codecs.seal(_FLOW_OUTCOME.encode(found) or b"", running.claimed.execution_id)
    if len(sealed) <= MAX_PAYLOAD:  # else it is read again; the flow is kept as long as it is not recorded
        error = None
        if found.failed:
            words = f"{', '.join(found.failed)[:200]}"
            error = msgspec.json.encode({"type": "FlowFailed", "message": words}).decode()
        await _record_end(
            running, NewStep(name=name, n=use, kind="result", result=sealed, encoding=encoding, error=error)
        )
        if error is None:
            memory.outcomes[name] = found
    return found


async def _known_end(running: Running, name: str, form: Any, late: TimedOut) -> tuple[int, Any]:
    """The number of this request for an end, and the end if a run has recorded or this one has read it."""
    memory = await running.memory()
    _, _, use, known = await running.ask(name, "result")
    if known is not None and known.result is None:
        raise late
    if (known := known or memory.earlier(name, "result", use)) is not None and known.result is not None:
        return use, _recall(running, form, known.result, known.encoding)
    return use, memory.outcomes.get(name)


def _flow_is_late(timeout: timedelta | None) -> TimedOut:
    return TimedOut("flow", round((timeout or timedelta()).total_seconds() * 1000))


async def _live_no_more(
    running: Running,
    name: str,
    use: int,
    live: Callable[[], Awaitable[list[ExecutionId]]],
    timeout: timedelta | None,
    late: TimedOut,
) -> None:
    until = None if timeout is None else await wake_time(running, timeout, f"timeout of {name}")
    while left := await _called(running, live()):
        _check_not_in(running, left)
        if until is not None and running.parking.is_due(until):
            await _record_late(running, name, use, late)
            raise late
        await running.parking.wait(Gate(until, left[-1]))


async def _called(running: Running, call: Awaitable[T]) -> T:
    with running.calling():
        return await call


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
    memory = await running.memory()
    late = TimedOut("result", round((timeout or timedelta()).total_seconds() * 1000))
    found: Outcome | None
    use, found = await _known_end(running, name, _OUTCOME, late)
    if found is not None:
        return found
    until = None if timeout is None else await wake_time(running, timeout, f"timeout of {name}")
    while (found := await _called(running, running.worker.reports.outcome(execution_id))) is None:
        if until is not None and running.parking.is_due(until):
            await _record_late(running, name, use, late)
            raise late
        await running.parking.wait(Gate(until, execution_id))
    if found.state is None:
        found = _in_flows(running, memory, execution_id) or found
    await _record_end(running, _ended(running, name, use, found))
    if found.state is State.COMPLETED:
        memory.outcomes[name] = found
    return found


def _in_flows(running: Running, memory: Memory, execution_id: ExecutionId) -> Outcome | None:
    """The outcome of a member of a flow that is deleted, from the recorded results of that flow."""
    for step in memory.successes("result"):
        if step.name.startswith(_OF_FLOW) and step.result is not None:
            flow: FlowOutcome = _recall(running, _FLOW_OUTCOME, step.result, step.encoding)
            for member in flow.members:
                if member.execution_id == execution_id:
                    return member.outcome
    return None


async def _record_late(running: Running, name: str, use: int, late: TimedOut) -> None:
    text, _ = encode_error(late, sealed=False)
    await _record_end(running, NewStep(name=name, n=use, kind="result", error=text))


async def _record_end(running: Running, step: NewStep) -> None:
    if (turn := await running.record_end(step)) is not None:
        await turn.come()
        await running.check()


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


def _recall(running: Running, kind: ValueType, result: bytes, encoding: str | None) -> Any:
    return kind.decode(running.worker.codecs.open(result, encoding, running.claimed.execution_id))
