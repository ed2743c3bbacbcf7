"""Executions: submit them, list and read them, wait for them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from flowfabric.contracts import json_form
from flowfabric.engine.reads import Place
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.server import cursors, problems, visible
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit, tag_of
from flowfabric.server.namespace import check_flow, check_limits
from flowfabric.server.new_execution import SubmitExecution, learn_limits, new_execution
from flowfabric.server.operation import LARGE, Instant, Operation, Repeats, Scope, Within
from flowfabric.server.problems import Problem, ProblemDocument
from flowfabric.server.visible import DeliveredSignal, RecordedEvent, RecordedStep
from flowfabric.values.attempt import Attempt
from flowfabric.values.checks import MAX_BATCH
from flowfabric.values.event import EventCursor, EventFilter
from flowfabric.values.execution import Created, Duplicate, Execution, ExecutionInfo, NewExecution, Outcome
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.state import State
from flowfabric.values.step import StepCursor

LONGEST_WAIT = 60.0  # seconds
Item = TypeVar("Item")
_TIMED = 7  # the version of a UUID that begins with its time


class PageQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which page of a list."""

    cursor: str | None = None
    limit: Limit = 100


class ListExecutions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which executions: all filters must match; one given several times matches any of its values.

    `tag` is `key=value`. `stopped`: only those that changed code stopped. `order_by=ended` needs `state`, all of them
    failed, expired, cancelled or skipped.
    """

    namespace: str | None = None
    lane: list[str] | None = None
    kind: list[str] | None = None
    state: list[State] | None = None
    tag: str | None = None
    flow_id: FlowId | None = None
    parent_id: ExecutionId | None = None
    created_from: Instant | None = None
    created_before: Instant | None = None
    stopped: bool = False
    order_by: Literal["created", "ended"] = "created"
    cursor: str | None = None
    limit: Limit = 50


class ListSteps(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which steps: those of the current generation, or of every one."""

    all_generations: bool = False


class WaitOutcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to wait for the end, in seconds."""

    wait: Annotated[float, Meta(ge=0, le=LONGEST_WAIT)] = 0.0


class SubmitBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Up to 1,000 executions."""

    items: Annotated[list[SubmitExecution], Meta(max_length=MAX_BATCH)]


class CreatedItem(Struct, frozen=True, kw_only=True, tag_field="status", tag="created"):
    execution_id: ExecutionId
    public_state: State


class DuplicateItem(Struct, frozen=True, kw_only=True, tag_field="status", tag="duplicate"):
    """The key or the id was used before; `execution_id` is the existing execution."""

    execution_id: ExecutionId


class RefusedItem(Struct, frozen=True, kw_only=True, tag_field="status", tag="refused"):
    """Nothing was stored for this item, and why."""

    problem: ProblemDocument


class BatchSubmitted(Struct, frozen=True, kw_only=True):
    """One answer per item, in their order."""

    items: tuple[CreatedItem | DuplicateItem | RefusedItem, ...]


class ExecutionState(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    public_state: State


class ExecutionInput(Struct, frozen=True, kw_only=True):
    """The input of an execution: a JSON value (the arguments of a task by name), or base64."""

    execution_id: ExecutionId
    execution_kind: str
    input: Any
    payload_encoding: str | None


class ExecutionOutcome(Struct, frozen=True, kw_only=True):
    """How an execution ended; `is_ended` is false if it has not, and then nothing else is known."""

    execution_id: ExecutionId
    public_state: State
    is_ended: bool
    result: Any = None
    result_encoding: str | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    cancellation_reason: str | None = None


async def list_executions(call: Call) -> Page:
    """List executions that match every filter, newest first.

    A page reads a bounded number of rows: with filters that match few, it may have fewer items than `limit`, or none,
    and still a `next_cursor`.
    """
    query: ListExecutions = call.query
    found = await call.engine.find_executions(
        **_filters(query, call.namespace),
        cursor=None if query.cursor is None else Place.decode(query.cursor),
        limit=query.limit,
    )
    rest = found.next_cursor
    return Page(items=visible.infos_for(call, found.items), next_cursor=None if rest is None else rest.encode())


def _filters(query: ListExecutions, namespace: str | None) -> Mapping[str, Any]:
    return {
        "namespace": namespace,
        "lane_ids": query.lane,
        "kinds": query.kind,
        "states": query.state,
        "tag": tag_of(query.tag),
        "flow_id": query.flow_id,
        "parent_id": query.parent_id,
        "created_from": query.created_from,
        "created_before": query.created_before,
        "stopped": query.stopped,
        "order_by": query.order_by,
    }


async def submit_execution(call: Call) -> Answer:
    """Submit one execution.

    `arguments` are those of the task, an object by the names of its parameters; `input` replaces them by bytes. 201: it
    was created. 200: its idempotency key or its id was used before; `execution_id` is then the existing execution, and
    nothing changed. The header `Idempotency-Key` is the same as the member `idempotency_key`.
    """
    await learn_limits(call, [call.body.execution_kind])
    item = new_execution(call, call.body)
    await check_flow(call, item.flow_id)
    await check_limits(call, [call.body.policy])
    made = await call.service.submissions.ask(item)
    await _check_known(call, item, made)
    return Answer(body=made, status=201 if type(made) is Created else 200)


async def _check_known(call: Call, item: NewExecution, made: Created | Duplicate) -> None:
    """Do not tell a key of some namespaces that an id is used in another one."""
    if type(made) is Duplicate and item.execution_id is not None and call.caller.namespaces is not None:
        found = await call.engine.read_execution_info(made.execution_id)
        if found is None or found.namespace not in call.caller.namespaces:
            raise Problem(409, "duplicate_submission", "the id cannot be used", family="conflict")


async def submit_batch(call: Call) -> BatchSubmitted:
    """Submit up to 1,000 executions.

    Every item has its own answer, in their order: `created`, `duplicate`, or `refused` with its problem. A refused item
    does not affect the others. A key of one namespace need not name it; one of several has to, in every item.
    """
    given: list[SubmitExecution] = call.body.items
    answers: list[CreatedItem | DuplicateItem | RefusedItem | None] = [None] * len(given)
    items: list[NewExecution] = []
    places: list[int] = []
    is_limited = call.caller.namespaces is not None
    await learn_limits(call, [one.execution_kind for one in given])
    for place, one in enumerate(given):
        try:
            item = new_execution(call, one, in_batch=True)
            if is_limited:
                await check_flow(call, item.flow_id)
                await check_limits(call, [one.policy])
            items.append(item)
            places.append(place)
        except (FlowFabricError, Problem) as error:
            answers[place] = _refused(call, error, place)
    made = await call.engine.create_many(items) if items else []
    for place, item, verdict in zip(places, items, made, strict=True):
        if isinstance(verdict, FlowFabricError):
            answers[place] = _refused(call, verdict, place)
            continue
        if isinstance(verdict, Created):
            answers[place] = CreatedItem(execution_id=verdict.execution_id, public_state=verdict.public_state)
            continue
        try:
            await _check_known(call, item, verdict)
            answers[place] = DuplicateItem(execution_id=verdict.execution_id)
        except Problem as error:
            answers[place] = _refused(call, error, place)
    return BatchSubmitted(items=tuple(one for one in answers if one is not None))


def _refused(call: Call, error: FlowFabricError | Problem, place: int) -> RefusedItem:
    problem = error if isinstance(error, Problem) else problems.problem_of(error)
    return RefusedItem(problem=problem.within(f"/items/{place}").document("", call.scope.get("root_path", "")))


async def get_execution(call: Call) -> Execution:
    """Read everything stored about an execution but its input and its result."""
    found = await call.service.reads.ask(call.path["execution_id"])
    if found is None:
        raise _unknown(call)
    return await visible.open_execution(call, found)


async def get_execution_state(call: Call) -> ExecutionState:
    """Read the state of an execution."""
    found = await call.engine.read_execution_state(call.path["execution_id"])
    if found is None:
        raise _unknown(call)
    return ExecutionState(execution_id=call.path["execution_id"], public_state=found)


async def get_execution_input(call: Call) -> ExecutionInput:
    """Read what an execution was submitted with."""
    visible.check_payloads(call)
    target: ExecutionId = call.path["execution_id"]
    try:
        found = await call.engine.read_execution_context(target)
    except InvalidInput:
        raise _unknown(call) from None
    stored, encoding = found.input_payload, found.payload_encoding
    return ExecutionInput(
        execution_id=target,
        execution_kind=found.execution_kind,
        input=await call.service.opening.run(
            len(stored), lambda: json_form.payload_or_problem(stored, encoding, call.service.codecs, target, raw=True)
        ),
        payload_encoding=found.payload_encoding,
    )


async def get_execution_result(call: Call) -> Answer:
    """Read the result of a completed execution: its bytes, as the task stored them.

    The header `X-Result-Encoding` names their encoding if they are not plain JSON. 404: there is no such execution, or
    it has not ended. 409: it ended without a result. 410: the result is no longer stored.
    """
    visible.check_payloads(call)
    target: ExecutionId = call.path["execution_id"]
    outcome = (await call.engine.read_outcomes([target])).get(target)
    if outcome is None:
        raise NotFound("result", detail=f"execution {target} has not ended")
    if outcome.state is None:
        raise await _gone(call)
    if outcome.result_encoding == "redacted":
        raise Problem(410, "purged", f"the data of execution {target} was removed", family="task")
    if outcome.state is not State.COMPLETED:
        raise Problem(409, "task_failed", f"execution {target} {outcome.state}", kind=str(outcome.state), family="task")
    data, encoding, codecs = outcome.result or b"", outcome.result_encoding, call.service.codecs
    if codecs is not None:
        stored, named = data, encoding
        data, encoding = await call.service.opening.run(len(stored), lambda: codecs.open(stored, named, target)), None
    return Answer(body=data, headers={"X-Result-Encoding": encoding} if encoding else {})


async def list_attempts(call: Call) -> Page:
    """List the attempts of an execution, oldest first."""
    target: ExecutionId = call.path["execution_id"]
    query: PageQuery = call.query
    found = await call.engine.list_attempts(
        target, after=None if query.cursor is None else cursors.number(query.cursor), limit=query.limit + 1
    )
    attempts = found[: query.limit] or await _none(call)
    return Page(
        items=await visible.open_each(
            call,
            attempts,
            lambda one: visible.attempt_for(call, one, target),
            lambda one: visible.size_of(one.failure_reason),
        ),
        next_cursor=str(attempts[-1].attempt_index) if len(found) > query.limit else None,
    )


async def list_steps(call: Call) -> Page:
    """List the steps that the handler of an execution recorded, in that order."""
    query: ListSteps = call.query
    after = None if query.cursor is None else StepCursor.decode(query.cursor)
    found = await call.engine.read_steps(
        [call.path["execution_id"]], all_generations=query.all_generations, after=after, limit=query.limit + 1
    )
    steps = found[: query.limit] or await _none(call)
    rest = StepCursor.of(steps, after).encode() if len(found) > query.limit else None
    items = await visible.open_each(
        call, steps, lambda one: visible.step_for(call, one), lambda one: visible.size_of(one.result)
    )
    return Page(items=items, next_cursor=rest)


async def list_execution_events(call: Call) -> Page:
    """List the events of an execution, oldest first."""
    query: PageQuery = call.query
    after = None if query.cursor is None else EventCursor.parse(query.cursor)
    found = await call.engine.list_events(call.path["execution_id"], after=after, limit=query.limit)
    items = [visible.event_for(call.caller, one) for one in found.items or await _none(call)]
    return Page(items=items, next_cursor=None if found.next_cursor is None else str(found.next_cursor))


async def list_signals(call: Call) -> Page:
    """List the signals that an execution received, oldest first."""
    query: PageQuery = call.query
    target: ExecutionId = call.path["execution_id"]
    found = await call.engine.read_signals(
        target, after=0 if query.cursor is None else cursors.number(query.cursor), limit=query.limit
    )
    items = await visible.open_each(
        call,
        found.items or await _none(call),
        lambda one: visible.signal_for(call, one, target),
        lambda one: visible.size_of(one.payload),
    )
    return Page(items=items, next_cursor=None if found.next_cursor is None else str(found.next_cursor))


async def get_outcome(call: Call) -> ExecutionOutcome:
    """Wait until an execution ends, and read how.

    Returns as soon as it has ended, or after `wait` seconds with `is_ended` false: ask again then. A waiting request
    holds no connection to the database.
    """
    target: ExecutionId = call.path["execution_id"]
    found = await call.service.outcome(target, call.query.wait)
    if found is None:
        state = await call.engine.read_execution_state(target)
        if state is None:
            raise _unknown(call)
        return ExecutionOutcome(execution_id=target, public_state=state, is_ended=False)
    if found.state is None:
        raise await _gone(call)
    state = found.state
    return await call.service.opening.run(
        visible.size_of(found.result, found.failure_reason), lambda: _outcome(call, target, found, state)
    )


def _outcome(call: Call, target: ExecutionId, found: Outcome, state: State) -> ExecutionOutcome:
    codecs, hides = call.service.codecs, call.caller.hides_payloads
    result = (
        None if hides else json_form.payload_or_problem(found.result, found.result_encoding, codecs, target, raw=True)
    )
    return ExecutionOutcome(
        execution_id=target,
        public_state=state,
        is_ended=True,
        result=result,
        result_encoding=found.result_encoding,
        failure_reason=None if hides else visible.opened(found.failure_reason, codecs, target),
        failure_category=found.failure_category,
        cancellation_reason=found.cancellation_reason,
    )


def _unknown(call: Call) -> Problem:
    return problems.not_found("execution", call.path["execution_id"])


async def _none(call: Call) -> list[Any]:
    """No items: refused if that is because there is no such execution."""
    if await call.engine.read_execution_state(call.path["execution_id"]) is None:
        raise _unknown(call)
    return []


async def _gone(call: Call) -> Problem:
    """The refusal for an execution that is not stored: 410 if the event log remembers it."""
    target: ExecutionId = call.path["execution_id"]
    if target.version == _TIMED:  # minted by an engine: its events are found by its time
        minted = datetime.fromtimestamp((target.int >> 80) / 1000, UTC)
        start = await call.engine.seek_events(minted)
        if (await call.engine.read_events(after=start, limit=1, filter=EventFilter(execution_id=target))).items:
            return Problem(410, "purged", f"execution {target} is no longer stored", family="task")
    return _unknown(call)


_ID = "/v1/executions/{execution_id}"

OPERATIONS = (
    Operation(
        method="GET", path="/v1/executions", handler=list_executions, engine=("find_executions",), scope=Scope.READ,
        within=Within.GIVEN, query=ListExecutions, answers={200: list[ExecutionInfo]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/executions", handler=submit_execution,
        engine=("create_execution", "create_many", "create_alike", "is_plain", "mint_id"), scope=Scope.SUBMIT,
        within=Within.GIVEN, body=SubmitExecution, answers={201: Created, 200: Duplicate}, limit=LARGE,
        repeats=Repeats.OWN, made=_ID,
    ),
    Operation(
        method="POST", path="/v1/executions/batch", handler=submit_batch, engine=("create_many",), scope=Scope.SUBMIT,
        within=Within.ITEMS, body=SubmitBatch, answers={200: BatchSubmitted}, limit=LARGE, repeats=Repeats.KEPT,
    ),
    Operation(
        method="GET", path=_ID, handler=get_execution,
        engine=("read_execution", "describe_execution", "read_execution_info"), scope=Scope.READ,
        within=Within.EXECUTION, answers={200: Execution}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/state", handler=get_execution_state, engine=("read_execution_state",),
        scope=Scope.READ, within=Within.EXECUTION, answers={200: ExecutionState}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/input", handler=get_execution_input, engine=("read_execution_context",),
        scope=Scope.READ, within=Within.EXECUTION, answers={200: ExecutionInput}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/result", handler=get_execution_result,
        engine=("read_result", "get_execution_result"), scope=Scope.READ,
        within=Within.EXECUTION, answers={200: bytes}, media="application/octet-stream", etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/attempts", handler=list_attempts, engine=("list_attempts",), scope=Scope.READ,
        within=Within.EXECUTION, query=PageQuery, answers={200: list[Attempt]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/steps", handler=list_steps, engine=("read_steps",), scope=Scope.READ,
        within=Within.EXECUTION, query=ListSteps, answers={200: list[RecordedStep]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/events", handler=list_execution_events, engine=("list_events",), scope=Scope.READ,
        within=Within.EXECUTION, query=PageQuery, answers={200: list[RecordedEvent]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/signals", handler=list_signals, engine=("read_signals",), scope=Scope.READ,
        within=Within.EXECUTION, query=PageQuery, answers={200: list[DeliveredSignal]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_ID}/outcome", handler=get_outcome,
        engine=("read_outcomes", "watch", "unwatch", "wakeups"), scope=Scope.READ,
        within=Within.EXECUTION, query=WaitOutcome, answers={200: ExecutionOutcome},
    ),
)  # fmt: skip
