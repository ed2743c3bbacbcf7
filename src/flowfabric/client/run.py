"""A handle on one execution: wait for it, read it, cancel it, run it again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from flowfabric.client import current
from flowfabric.client.failure import result_of
from flowfabric.client.following import Follower, StreamReader
from flowfabric.client.limits import owned_budget, raise_owned
from flowfabric.errors import InvalidInput, TimedOut
from flowfabric.values.attempt import Attempt
from flowfabric.values.budget import BudgetStatus
from flowfabric.values.child import Child
from flowfabric.values.durations import Duration, duration
from flowfabric.values.execution import Execution, Outcome
from flowfabric.values.ids import ExecutionId, parse_execution_id
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.spending import RunUsage
from flowfabric.values.state import State
from flowfabric.values.step import Step
from flowfabric.values.stream import Summary
from flowfabric.values.wait import PendingWaitpoint

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.connector import Connector

R_co = TypeVar("R_co", covariant=True)
# The apps of this process by key, newest last: where an unpickled handle finds its database.
connectors: WeakValueDictionary[str, Any] = WeakValueDictionary()


class Run(Generic[R_co]):
    """One execution of a task. It can be pickled; `client.run(id)` makes one from an id.

    `is_new` is False if it existed already: the idempotency key was in use, or an earlier run of the same handler had
    submitted it.
    """

    __slots__ = ("_connector", "execution_id", "is_new", "kind")

    def __init__(
        self,
        execution_id: ExecutionId,
        *,
        kind: str | None,
        connector: Connector | None,
        is_new: bool = True,
    ) -> None:
        self.execution_id = execution_id
        self.kind = kind
        self.is_new = is_new
        self._connector = connector

    @property
    def id(self) -> str:
        """The execution's id as plain text, which can be an argument or a result."""
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
        return known_app(self._connector, "client.run(run)")

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the task's result. `TaskFailed` if it did not succeed, `TimedOut` if it did not end in time.

        Inside a task the wait is durable: it holds no worker, and its outcome is recorded.
        """
        outcome = await self.outcome(timeout)
        client = await self._client()
        if self.kind is None and outcome.result is not None:
            info = await client.engine.read_execution_info(self.execution_id)
            self.kind = None if info is None else info.execution_kind
        value: Any = result_of(self.execution_id, outcome, client.result_type(self.kind), client.codecs)
        return value  # type: ignore[no-any-return]  # of the type that the task's annotation declares

    async def outcome(self, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution ends and return how; does not raise for a failure."""
        span = span_of(timeout)
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
        """Read everything about it except payload and result; `NotFound` if it does not exist."""
        return await (await self._client()).get(self.execution_id)

    async def state(self) -> State:
        """Its current state."""
        return (await self.get()).public_state

    async def steps(self) -> list[Step]:
        """The recorded steps of its handler."""
        return await (await self._client()).engine.read_steps([self.execution_id], all_generations=True)

    async def attempts(self) -> list[Attempt]:
        """All its attempts, oldest first."""
        return await (await self._client()).engine.list_attempts(self.execution_id)

    def stream(
        self,
        *,
        after: str | None = None,
        attempt: int | None = None,
        live: bool = True,
        keep_alive: Duration | None = None,
        timeout: Duration | None = None,
    ) -> StreamReader:
        """Follow what its handler emits, from the beginning or from after the `cursor` of an item.

        Yields each `Frame` that was emitted, a `NewAttempt` where a retry or another worker begins again, and a `Gap`
        where frames are no longer kept. It ends when the execution has ended and everything was read. `attempt`
        follows one attempt only, counted from 0; `live=False` leaves out best-effort frames; `keep_alive` yields a
        `KeepAlive` after that much silence. `TimedOut` after `timeout`.
        """
        follower = Follower(
            self.execution_id, after=after, attempt=attempt, live=live, keep_alive=keep_alive, timeout=timeout
        )

        async def begin() -> Follower:
            client = await self._client()
            return follower.on(client.engine, client.codecs)

        return StreamReader(begin)

    async def summary(self, *, attempt: int | None = None) -> Summary | None:
        """The document its handler made with `ctx.summarize`, of the latest attempt; None if there is none."""
        return await (await self._client()).engine.read_summary(self.execution_id, attempt)

    async def usage(self) -> RunUsage:
        """Return what it and all that it submitted used and hold: in all, by budget and by execution."""
        return await (await self._client()).usage(self.execution_id)

    async def budget(self) -> BudgetStatus | None:
        """Its own budget (`ff.Budget`) with what is used and held of it; None if it was submitted without."""
        return await owned_budget((await self._client()).engine, self.execution_id)

    async def raise_budget(self, amounts: Mapping[str, int] | None = None, /, **dimensions: int) -> BudgetStatus:
        """Add to its own budget, or take away with a negative amount; what waits for it continues if there is room."""
        return await raise_owned((await self._client()).engine, self.execution_id, amounts, dimensions)

    async def parent(self) -> Run[Any] | None:
        """The execution whose handler submitted it; None if none did, or it was detached."""
        found = await (await self._client()).get(self.execution_id)
        return None if found.parent_id is None else Run(found.parent_id, kind=None, connector=self._app())

    async def children(self) -> list[Child]:
        """The tasks and flows that its handler submitted, in the order of creation, up to 10,000."""
        return await (await self._client()).engine.list_children(self.execution_id, limit=10_000)

    async def cancel(self, reason: str = "cancelled by its submitter", *, keep_children: bool = False) -> None:
        """Cancel it, whatever it is doing. A running handler is stopped; what it submitted is cancelled too."""
        await (await self._client()).cancel(self.execution_id, reason, keep_children=keep_children)

    async def replay(self, reason: str | None = None) -> None:
        """Run it again from the top; finished steps are kept unless it had succeeded."""
        await (await self._client()).replay(self.execution_id, reason=reason)

    async def fork(
        self, *, before: str | tuple[str, int] | None = None, payload: Mapping[str, Any] | None = None
    ) -> Run[R_co]:
        """Start a new execution that has the steps recorded before one, and runs the rest. See `client.fork`."""
        made = await (await self._client()).fork(self.execution_id, before=before, payload=payload)
        return Run(made.execution_id, kind=self.kind, connector=self._app())

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
        """Send it a signal; `key` names the waitpoint if it has several.

        `PayloadRefused` if the payload does not fit the type that the task waits for.
        """
        return await (await self._client()).signal(
            self.execution_id,
            key,
            name,
            payload,
            source_type=source_type,
            source_identity=source_identity,
            idempotency_key=idempotency_key,
        )

    async def approve(self, key: str | None = None, *, by: str = "", payload: Any = None) -> Accepted | DuplicateSignal:
        """Send it the signal `approved` as an operator; `by` names who decided. See `signal`."""
        return await (await self._client()).approve(self.execution_id, key, by=by, payload=payload)

    async def reject(
        self, key: str | None = None, *, by: str = "", payload: Any = None, reason: str | None = None
    ) -> Accepted | DuplicateSignal:
        """Send it the signal `rejected` as an operator; `by` names who decided. See `signal`.

        `reason` is the field `reason` of the payload.
        """
        return await (await self._client()).reject(self.execution_id, key, by=by, payload=payload, reason=reason)

    async def resume(self, delay: Duration = 0) -> None:
        """Resume it without a signal, whatever it waits for."""
        await (await self._client()).resume(self.execution_id, delay)


def known_app(connector: Connector | None, instead: str) -> Connector:
    """The app of a handle; a handle from another process may have none, and `instead` makes one that has."""
    if connector is None:
        raise InvalidInput(
            "this handle was unpickled, and it is not clear which app of this process it belongs to",
            field="run",
            allowed=instead,
        )
    return connector


def span_of(timeout: Duration | None) -> timedelta | None:
    """How long a call may wait; None: without a limit."""
    span = None if timeout is None else duration(timeout, "timeout")
    if span is not None and span < timedelta(0):
        raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="zero or more")
    return span


def _revive(execution_id: str, kind: str | None, is_new: bool, key: str | None, name: str | None) -> Run[Any]:
    app = None if key is None else connectors.get(key) or _find(name, kind)
    return Run(parse_execution_id(execution_id), kind=kind, connector=app, is_new=is_new)


def _find(name: str | None, kind: str | None) -> Connector | None:
    """In another process: the newest app of that name that has the task; None if candidates use several databases."""
    named: list[Connector] = [one for one in connectors.values() if one.name == name]
    knowing = [one for one in named if kind in one.tasks] or named
    return knowing[-1] if len({one.address for one in knowing}) == 1 else None
