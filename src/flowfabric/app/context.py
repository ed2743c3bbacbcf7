"""The context of an async handler: facts about its execution, and durable operations.

The worker implements the methods (`client.current.Scope`); these classes are only the interface. The classes for
synchronous handlers are generated from them (`sync_context.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload
from uuid import UUID

from flowfabric.app.flow_builder import Flow
from flowfabric.client.current import Scope
from flowfabric.client.submission import new_submission
from flowfabric.contracts.waits import RAISE, OnTimeout, Raise, Reason, WaitRequest
from flowfabric.errors import InvalidInput
from flowfabric.values.callback import callback_text
from flowfabric.values.conditions import AllMet, Condition, Count, OperatorOnly, Single, TimeoutOnly
from flowfabric.values.durations import Duration, duration
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lease import HandleKind
from flowfabric.values.options import Options
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.signal import Signal
from flowfabric.values.wait import OpenWait, WaitpointToken

if TYPE_CHECKING:
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submittable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D")


class Facts:
    """Facts about the execution and this attempt."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @property
    def execution_id(self) -> ExecutionId:
        return self._scope.claimed.execution_id

    @property
    def flow_id(self) -> FlowId | None:
        """The flow that it is a node of."""
        return self._scope.claimed.flow_id

    def flow(self) -> Flow:
        """The flow that this execution is a node of, to add nodes to: `add` them, then `submit`.

        They may come after this node (`flow.here`) and after others (`flow.member(execution_id)`).
        """
        claimed = self._scope.claimed
        if claimed.flow_id is None:
            raise InvalidInput(
                f"{claimed.execution_kind} was not submitted in a flow", field="ctx.flow", allowed="app.flow(name)"
            )
        return Flow(self._scope.app, claimed.execution_kind, grows=claimed.flow_id, here=claimed.execution_id)

    @property
    def kind(self) -> str:
        """The task's name."""
        return self._scope.claimed.execution_kind

    @property
    def attempt_index(self) -> int:
        """0 for the first attempt."""
        return self._scope.claimed.handle.attempt_index

    @property
    def retry_count(self) -> int:
        """How often it failed and was retried."""
        return self._scope.claimed.retry_count

    @property
    def reclaim_count(self) -> int:
        """How often a worker died while running it."""
        return self._scope.claimed.reclaim_count

    @property
    def replay_count(self) -> int:
        """How often it was replayed after its end."""
        return self._scope.claimed.replay_count

    @property
    def lane_id(self) -> str:
        return self._scope.claimed.handle.lane_id

    @property
    def namespace(self) -> str:
        return self._scope.claimed.namespace

    @property
    def tags(self) -> Mapping[str, str]:
        return self._scope.claimed.tags

    @property
    def priority(self) -> int:
        return self._scope.claimed.priority

    @property
    def created_at(self) -> datetime:
        return self._scope.claimed.created_at

    @property
    def deadline_at(self) -> datetime | None:
        return self._scope.claimed.deadline_at

    @property
    def attempt_timeout_at(self) -> datetime | None:
        return self._scope.claimed.attempt_timeout_at

    @property
    def is_cancelled(self) -> bool:
        """Whether the handler should stop: it lost its lease, was cancelled, ran out of time, or the worker stops."""
        return self._scope.is_cancelled

    @property
    def is_parked(self) -> bool:
        """Whether the worker is stopping the handler because everything it waits for needs no worker."""
        return self._scope.is_parked or self._scope.unwound_at is not None

    @property
    def is_resumed(self) -> bool:
        """Whether this attempt started earlier and has waited or was given back since."""
        return self._scope.claimed.handle.kind is HandleKind.RESUMED

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds the execution to its records."""
        return self._scope.log

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.execution_id)!r}, kind={self.kind!r}, attempt={self.attempt_index})"


class Context(Facts):
    """The worker passes it to an async handler that has a parameter annotated with it."""

    __slots__ = ()

    @overload
    async def step(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and store its result, under this name and the number of its uses in this run.

        A finished step never runs again; a step that a crash interrupted does. An exception is kept for the rest of
        this run of the handler and forgotten when the task is retried. A synchronous function runs in a thread.
        `step_with` gives a step its own retries and timeout. A step, a sleep or a submission inside the function is
        part of it and not recorded separately.
        """
        return await self._scope.step(name, fn, args, kwargs, None, None)

    def step_with(self, *, retry: RetryPolicy | None = None, timeout: Duration | None = None) -> StepWith:
        """Steps with retries and a time limit of their own: `await ctx.step_with(timeout=5)("fetch", fetch, url)`."""
        Options(retry=retry).checked()
        if timeout is not None and duration(timeout, "timeout") <= timedelta(0):
            raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="a positive duration")
        return StepWith(self._scope, retry, timeout)

    async def sleep(self, pause: Duration) -> None:
        """Wait durably: the worker is free meanwhile, and the time counts from the first call, also after a restart."""
        await self._scope.sleep(pause)

    @overload
    async def wait_for(
        self,
        what: str | Single,
        *,
        payload: type[T],
        name: str | None = None,
        timeout: Duration | None = None,
        default: D | Raise = RAISE,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> Signal[T] | D: ...
    @overload
    async def wait_for(
        self,
        what: str | Single,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        default: D | Raise = RAISE,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> Signal[Any] | D: ...
    @overload
    async def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        payload: Any = Any,
        name: str | None = None,
        timeout: Duration | None = None,
        default: D | Raise = RAISE,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> list[Signal[Any]] | D: ...
    async def wait_for(
        self,
        what: Condition | str,
        *,
        payload: Any = Any,
        name: str | None = None,
        timeout: Duration | None = None,
        default: Any = RAISE,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> Any:
        """Wait for signals, for minutes or months, without holding a worker.

        `what` is the key of a waitpoint (one signal there is enough) or a condition: `ff.on`, `ff.all_of`, `ff.any_of`,
        `ff.from_sources`, `ff.count_signals`. A key returns one `Signal`, a condition a list of them. `payload` is the
        type of their payloads. When the timeout expires, the call returns `default` if it is given; otherwise it raises
        `NoSignal`, or the execution does what `on_timeout` says: fail, cancel, expire, or escalate to an operator.
        """
        request = WaitRequest(
            what, name=name, payload=payload, timeout=timeout, default=default, on_timeout=on_timeout, reason=reason
        )
        return await self._scope.wait_for(request)

    async def waitpoint(self, key: str, *, name: str | None = None) -> Waitpoint:
        """Open a waitpoint, which accepts signals from now on. Hand out its token, then wait at it.

        Every later run gets the same waitpoint, and signals that arrive before the handler waits are kept.
        """
        opened = await self._scope.waitpoint(WaitRequest(key, name=name))
        return Waitpoint(self._scope, key, name, opened)

    async def now(self) -> datetime:
        """The database's time, the same in every later run."""
        return await self._scope.now()

    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Report how far the work is; `flowfabric show` and other readers see it."""
        await self._scope.progress(percent, message)

    async def heartbeat(self) -> None:
        """Renew the lease now; raises `LeaseLost` if it was lost. Seldom needed: the worker renews it anyway."""
        await self._scope.heartbeat()

    async def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> Run[R]:
        """Submit another task, only once even if this handler is re-run. The same as `task.submit(...)`."""
        return await self._scope.client.send(new_submission(task, args, kwargs))


class WaitpointFacts:
    """A waitpoint, and the token that its signals need."""

    __slots__ = ("_name", "_opened", "_scope", "execution_id", "id", "key", "token")

    def __init__(self, scope: Scope, key: str, name: str | None, opened: OpenWait) -> None:
        self._scope = scope
        self._name = name
        self._opened = opened
        self.key = key
        self.execution_id = scope.claimed.execution_id
        self.id: UUID = opened.waitpoints[0].waitpoint_id
        self.token: WaitpointToken = opened.waitpoints[0].waitpoint_token

    @property
    def callback(self) -> str:
        """Execution, waitpoint and token as one string that is safe in a link. Give it only to the sender."""
        return callback_text(self.execution_id, self.id, self.token)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {str(self.id)!r}, token={self.token})"


class Waitpoint(WaitpointFacts):
    """A waitpoint that accepts signals, and the token that they need."""

    __slots__ = ()

    async def wait(
        self,
        *,
        payload: Any = Any,
        timeout: Duration | None = None,
        default: Any = RAISE,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "callback",
    ) -> Signal[Any]:
        """Wait for a signal here and return it. See `Context.wait_for`."""
        request = WaitRequest(
            self.key,
            name=self._name,
            payload=payload,
            timeout=timeout,
            default=default,
            on_timeout=on_timeout,
            reason=reason,
        )
        found: Signal[Any] = await self._scope.wait_for(request, self._opened)
        return found


class StepWith:
    """`ctx.step` with its own retries and timeout."""

    __slots__ = ("_retry", "_scope", "_timeout")

    def __init__(self, scope: Scope, retry: RetryPolicy | None, timeout: Duration | None) -> None:
        self._scope = scope
        self._retry = retry
        self._timeout = timeout

    @overload
    async def __call__(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def __call__(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def __call__(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await self._scope.step(name, fn, args, kwargs, self._retry, self._timeout)
