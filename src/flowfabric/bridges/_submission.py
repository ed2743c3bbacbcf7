"""A submission as a conversation without a connection: statements out, rows in, verdicts at the end.

A bridge only knows how its driver runs a statement. The partition count is the database's to know: the statement takes
the last bits of the ids and makes partitions of them itself, so that a submission is one round trip and nothing about
the database is remembered between calls. Only ids given for members of a flow, which must be of the flow's partition,
cost a second one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Required, TypeAlias, TypedDict, Unpack

from flowfabric._postgres.create_call import CreateCall
from flowfabric._postgres.statements import FLOW_PARTITIONS, create_executions, standing_executions
from flowfabric.engine.checks import check_batch
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.policies import PolicyInput

Verdict: TypeAlias = Created | Duplicate | FlowFabricError
Rows: TypeAlias = Sequence[Sequence[Any]]
Submission: TypeAlias = Generator[tuple[str, list[Any]], Rows, list[Verdict]]
_WAKE = "select set_config('flowfabric.wake', '{}', true)"


class Fields(TypedDict, total=False):
    """The fields of `NewExecution`, for signatures."""

    execution_kind: Required[str]
    lane_id: str
    namespace: str
    input_payload: bytes
    payload_encoding: str | None
    priority: int
    creator_identity: str
    idempotency_key: str | None
    tags: Mapping[str, str] | None
    policy: PolicyInput
    delay_until: datetime | timedelta | None
    execution_deadline_at: datetime | timedelta | None
    execution_id: ExecutionId | None
    flow_id: FlowId | None


def submission(items: Sequence[NewExecution], placeholder: str, *, wake: bool = True) -> Submission:
    """Yields statements with their arguments, takes their rows, returns one verdict per item.

    `wake=False` notifies no worker, as a transaction that is to be prepared (two-phase commit) must not; workers find
    the executions when they next poll.
    """
    check_batch(items)
    if type(wake) is not bool:
        raise InvalidInput(f"got {wake!r}", field="wake", allowed="True or False")
    if not wake:
        yield _WAKE.format("off"), []
    partitions = None
    if any(isinstance(item, NewExecution) and item.execution_id is not None and item.flow_id for item in items):
        partitions = (yield FLOW_PARTITIONS, [])[0][0]
    call = CreateCall(items, partitions)
    hashed = partitions is None
    made: Rows = ()
    standing: Rows = ()
    if not call.is_empty:
        made = yield create_executions(placeholder, hashed=hashed), call.args
    if call.doubts:
        standing = yield standing_executions(placeholder, hashed=hashed), call.doubts
    if not wake:
        yield _WAKE.format("on"), []
    return call.verdicts(made, standing)


def run(steps: Submission, execute: Callable[[str, list[Any]], Rows]) -> list[Verdict]:
    """Hold the conversation through a driver that blocks."""
    try:
        statement, args = next(steps)
        while True:
            statement, args = steps.send(execute(statement, args))
    except StopIteration as end:
        verdicts: list[Verdict] = end.value
        return verdicts


async def run_async(steps: Submission, execute: Callable[[str, list[Any]], Awaitable[Rows]]) -> list[Verdict]:
    """Hold the conversation through a driver that is awaited."""
    try:
        statement, args = next(steps)
        while True:
            statement, args = steps.send(await execute(statement, args))
    except StopIteration as end:
        verdicts: list[Verdict] = end.value
        return verdicts


def one(**fields: Unpack[Fields]) -> list[NewExecution]:
    """A batch of one."""
    return [NewExecution(**fields)]


def only(verdicts: list[Verdict]) -> Created | Duplicate:
    """The verdict of a batch of one; a refusal is raised."""
    if isinstance(verdicts[0], FlowFabricError):
        raise verdicts[0]
    return verdicts[0]


def missing(library: str, extra: str) -> ImportError:
    """The error for a bridge whose library is not installed."""
    return ImportError(
        f"flowfabric.bridges.{extra} needs {library}; install it with: pip install flowfabric[{extra}]", name=extra
    )
