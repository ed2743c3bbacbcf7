"""A handle on one execution: wait for it, look at it, cancel it, run it again."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from uuid import UUID
from weakref import WeakValueDictionary

from flowfabric.client import current
from flowfabric.client.failure import result_of
from flowfabric.errors import InvalidInput, TimedOut
from flowfabric.values.attempt import Attempt
from flowfabric.values.durations import Duration, duration
from flowfabric.values.execution import Execution, Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.state import State
from flowfabric.values.step import Step
from flowfabric.values.wait import PendingWaitpoint

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient, Connector

R_co = TypeVar("R_co", covariant=True)
# Where a handle that was pickled finds its way back to a database: the apps of this process by key, the latest last.
connectors: WeakValueDictionary[str, Any] = WeakValueDictionary()


class Run(Generic[R_co]):
    """One execution of a task. Survives pickling; `client.run(id)` makes one from an id.

    `is_new` is False when it stood already: the idempotency key was known, or an earlier run of the same handler had
    submitted it.
    """

    __slots__ = ("_connector", "_id", "is_new", "kind")

    def __init__(
        self,
        execution_id: ExecutionId | tuple[int, UUID],
        *,
        kind: str | None,
        connector: Connector | None,
        is_new: bool = True,
    ) -> None:
        self._id = execution_id
        self.kind = kind
        self.is_new = is_new
        self._connector = connector

    @property
    def execution_id(self) -> ExecutionId:
        if type(self._id) is tuple:  # spelt out when it is asked for: of many submitted at once few are
            self._id = ExecutionId.of(*self._id)
        return cast("ExecutionId", self._id)

    @property
    def id(self) -> str:
        """The execution's id, as plain text: an argument or a result like any other."""
        return str(self.execution_id)

    def __repr__(self) -> str:
        return f"Run({self.id!r}, kind={self.kind!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.execution_id == self.execution_id

    def __hash__(self) -> int:
        return hash(self.execution_id)

    def __reduce__(self) -> tuple[Any, ...]:
        app = self._connector
        app_names = (None, None) if app is None else (app.key, app.name)
        return _revive, (self.id, self.kind, self.is_new, *app_names)

    async def _client(self) -> AsyncClient:
        return await self._app().client()

    def _app(self) -> Connector:
        if self._connector is None:
            raise InvalidInput(
                "this handle came from another process and it is not clear which app here it belongs to",
                field="run",
                allowed="client.run(run)",
            )
        return self._connector

    async def result(self, timeout: Duration | None = None) -> R_co:
        """The task's result. `TaskFailed` when it ended otherwise, `TimedOut` when it has not ended in time.

        Inside a task the wait is durable: it holds no worker, and is remembered.
        """
        outcome = await self.outcome(timeout)
        client = await self._client()
        if self.kind is None and outcome.result is not None:
            info = await client.engine.read_execution_info(self.execution_id)
            self.kind = None if info is None else info.execution_kind
        value: Any = result_of(self.execution_id, outcome, client.result_type(self.kind), client.codecs)
        return value  # type: ignore[no-any-return]  # as the task's annotation says, which is all there is to know

    async def outcome(self, timeout: Duration | None = None) -> Outcome:
        """How the execution ended, waiting until it has; never raises for how it ended."""
        span = None if timeout is None else duration(timeout, "timeout")
        if span is not None and span < timedelta(0):
            raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="no time or more")
        scope = current.scope_of(self._app())
        if scope is not None:
            return await scope.outcome_of(self.execution_id, span)
        seconds = None if span is None else span.total_seconds()
        client = await self._client()
        try:
            return await client.outcomes.wait(self.execution_id, seconds)
        except TimeoutError:
            raise TimedOut("result", round((seconds or 0) * 1000)) from None

    async def get(self) -> Execution:
        """Everything stored about it but payload and result; `NotFound` when it is not stored."""
        return await (await self._client()).get(self.execution_id)

    async def state(self) -> State:
        """Where it stands."""
        return (await self.get()).public_state

    async def steps(self) -> list[Step]:
        """What its handler is remembered to have done."""
        return await (await self._client()).engine.read_steps([self.execution_id], all_generations=True)

    async def attempts(self) -> list[Attempt]:
        """Every attempt at it, oldest first."""
        return await (await self._client()).engine.list_attempts(self.execution_id)

    async def cancel(self, reason: str = "cancelled by its submitter") -> None:
        """End it as cancelled, whatever it is doing. A handler that runs is stopped."""
        await (await self._client()).cancel(self.execution_id, reason)

    async def replay(self, reason: str | None = None) -> None:
        """Run it again from the top; finished steps are kept unless it had succeeded."""
        await (await self._client()).replay(self.execution_id, reason=reason)

    async def waits(self) -> list[PendingWaitpoint]:
        """The waitpoints at which it can be signalled now."""
        return await (await self._client()).waitpoints_of(self.execution_id)

    async def signal(
        self,
        key: str | None = None,
        name: str = "signal",
        payload: Any = None,
        *,
        source_type: str = "client",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Accepted | DuplicateSignal:
        """Send it a signal; `key` names the waitpoint where there are several."""
        return await (await self._client()).signal(
            self.execution_id,
            key,
            name,
            payload,
            source_type=source_type,
            source_identity=source_identity,
            idempotency_key=idempotency_key,
        )

    async def approve(self, key: str | None = None, *, by: str = "") -> Accepted | DuplicateSignal:
        """Send it the signal `approved` as an operator; `by` is whoever decided."""
        return await (await self._client()).approve(self.execution_id, key, by=by)

    async def reject(self, key: str | None = None, *, by: str = "") -> Accepted | DuplicateSignal:
        """Send it the signal `rejected` as an operator; `by` is whoever decided."""
        return await (await self._client()).reject(self.execution_id, key, by=by)

    async def resume(self, delay: Duration = 0) -> None:
        """Resume it whatever it waits for; its wait ends without a signal."""
        await (await self._client()).resume(self.execution_id, delay)


def _revive(execution_id: str, kind: str | None, is_new: bool, key: str | None, name: str | None) -> Run[Any]:
    app = None if key is None else connectors.get(key) or _find(name, kind)
    return Run(ExecutionId.parse(execution_id), kind=kind, connector=app, is_new=is_new)


def _find(name: str | None, kind: str | None) -> Connector | None:
    """In another process: the latest app of that name that knows the task; none if several databases come of it."""
    named: list[Connector] = [one for one in connectors.values() if one.name == name]
    knowing = [one for one in named if kind in one.tasks] or named
    return knowing[-1] if len({one.address for one in knowing}) == 1 else None
