"""Submissions through the connection of any driver.

A bridge only knows how its driver runs a statement: `Driver`. Everything else is here, once. The partition count is
the database's to know: the statement takes the last bits of the ids and makes partitions of them itself, so that a
submission is one round trip and nothing about the database is remembered between calls. Only ids given for members of
a flow, which must be of the flow's partition, cost a second one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, NamedTuple, Protocol, Required, TypeAlias, TypedDict, TypeVar, Unpack
from uuid import UUID

from flowfabric._postgres import statements
from flowfabric._postgres.create_call import CreateCall
from flowfabric._postgres.grow_call import GrowCall
from flowfabric.engine.checks import check_batch
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.graph import FlowSubmitted, NewNode
from flowfabric.values.ids import PARTITION_VALUES, ExecutionId, FlowId, partition_of_id
from flowfabric.values.policies import PolicyInput
from flowfabric.values.spending import FoundLimit

Verdict: TypeAlias = Created | Duplicate | FlowFabricError
Rows: TypeAlias = Sequence[Sequence[Any]]
T = TypeVar("T")
_LIBRARIES = ("asyncpg", "psycopg", "sqlalchemy", "django")


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


class AsyncConnection(Protocol):
    """A connection, cursor or session of a driver that is awaited. Type checkers recognise it by its `close`."""

    def close(self) -> Awaitable[Any]: ...


class SyncConnection(Protocol):
    """The same of a driver that blocks."""

    def close(self) -> None: ...


class Driver(NamedTuple):
    """How one connection runs statements. `execute` of a driver that blocks never suspends: see `at_once`."""

    placeholder: str
    execute: Callable[[str, list[Any]], Awaitable[Rows]]
    blocks: bool


def blocking(placeholder: str, run: Callable[[str, list[Any]], Rows]) -> Driver:
    """The driver of a connection that blocks."""

    async def execute(statement: str, args: list[Any]) -> Rows:
        return run(statement, args)

    return Driver(placeholder, execute, blocks=True)


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    work.close()
    raise InvalidInput(
        "the `submit` of a middleware awaits something else than `proceed`",
        field="connection",
        allowed="an async connection, or middleware that does not wait",
    )


def driver_of(connection: Any) -> Driver:
    """The driver of a connection, cursor or session of any library with a bridge. A text is an alias of Django's."""
    roots = [each.__module__.partition(".")[0] for each in type(connection).__mro__]
    library = "django" if isinstance(connection, str) else next((one for one in roots if one in _LIBRARIES), None)
    if library is None:
        raise wrong(connection, "a connection, cursor or session of asyncpg, psycopg, SQLAlchemy or Django")
    found: Driver = import_module(f"flowfabric.bridges.{library}").driver(connection)
    return found


class StoredKind(NamedTuple):
    """The task that a duplicate is an execution of."""

    execution_kind: str


class Transaction:
    """The operations of the engine that submit, through the caller's connection and in the caller's transaction."""

    def __init__(self, driver: Driver) -> None:
        self._mark = driver.placeholder
        self._execute = driver.execute

    async def create_many(self, items: Sequence[NewExecution], *, wake: bool = True) -> list[Verdict]:
        """One verdict per item.

        `wake=False` notifies no process, as a transaction that is to be prepared (two-phase commit) must not; workers
        find the executions when they next poll, and duties their delays and deadlines.
        """
        check_batch(items)
        async with self._waking(wake):
            return await self._create_many(items)

    @asynccontextmanager
    async def _waking(self, wake: bool) -> AsyncIterator[None]:
        """With `wake=False` the statements in it notify no process."""
        if type(wake) is not bool:
            raise InvalidInput(f"got {wake!r}", field="wake", allowed="True or False")
        if not wake:
            await self._execute(statements.set_wake(self._mark), ["off"])
        yield
        if not wake:
            await self._execute(statements.set_wake(self._mark), ["on"])

    async def _create_many(self, items: Sequence[NewExecution]) -> list[Verdict]:
        partitions = None
        if any(isinstance(item, NewExecution) and item.execution_id is not None and item.flow_id for item in items):
            partitions = (await self._execute(statements.FLOW_PARTITIONS, []))[0][0]
        call = CreateCall(items, partitions)
        hashed = partitions is None
        made: Rows = ()
        standing: Rows = ()
        if not call.is_empty:
            made = await self._execute(statements.create_executions(self._mark, hashed=hashed), call.args)
        if call.doubts:
            standing = await self._execute(statements.standing_executions(self._mark, hashed=hashed), call.doubts)
        return call.verdicts(made, standing)

    async def read_execution_info(self, execution_id: ExecutionId) -> StoredKind | None:
        """The task of an execution; None for an unknown id."""
        found = await self._execute(statements.read_kind(self._mark), [[_bits(execution_id)], [execution_id]])
        return StoredKind(found[0][0]) if found else None

    async def find_limits(self, budgets: Sequence[str], quotas: Sequence[str]) -> list[FoundLimit]:
        """See `Engine.find_limits`."""
        found = await self._execute(statements.find_limits(self._mark), [list(budgets), list(quotas)])
        return [FoundLimit(what=what, name=name, id=one, key=key) for what, name, one, key in found]

    async def free_key(
        self, execution_id: ExecutionId, idempotency_key: str, *, namespace: str = "", flow_id: FlowId | None = None
    ) -> bool:
        """See `Engine.free_key`. The transaction must be READ COMMITTED."""
        args = [_bits(execution_id), execution_id, flow_id, namespace, idempotency_key]
        return bool((await self._execute(statements.free_key(self._mark), args))[0][0])

    async def submit_flow(
        self,
        nodes: Sequence[NewNode],
        *,
        flow_kind: str,
        namespace: str,
        flow_id: FlowId,
        tags: dict[str, str],
        wake: bool = True,
    ) -> FlowSubmitted:
        """See `Engine.submit_flow`, and `create_many` for `wake`. The last bits of all ids are those of the flow's."""
        call = GrowCall(flow_id, nodes, PARTITION_VALUES, is_new=True, kind=flow_kind, namespace=namespace, tags=tags)
        async with self._waking(wake):
            code, place = (await self._execute(statements.grow_flow(self._mark), call.args))[0]
        if code == "ok":
            return FlowSubmitted(flow_id=flow_id, nodes=call.nodes)
        if code != "exists":
            raise call.refusal(code, place)
        members = await self._execute(statements.read_nodes(self._mark), [flow_id])
        return FlowSubmitted(flow_id=flow_id, nodes={node: ExecutionId(uuid) for uuid, node in members}, existed=True)


def _bits(uuid: UUID) -> int:
    return partition_of_id(uuid, PARTITION_VALUES)


async def create_many(driver: Driver, items: Sequence[NewExecution], wake: bool) -> list[Verdict]:
    return await Transaction(driver).create_many(items, wake=wake)


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


def wrong(connection: object, allowed: str) -> InvalidInput:
    """The error for something that is no connection of the driver."""
    return InvalidInput(f"got {type(connection).__qualname__}", field="connection", allowed=allowed)
