"""What an async handler is given: who it is, and what it can do durably.

The work behind the methods is the worker's (`Scope`); these classes are only the surface. Those for synchronous
handlers are generated from them (`sync_context.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from flowfabric.app.flow_builder import Flow, Host
from flowfabric.client.submission import new_submission
from flowfabric.contracts.waits import RAISE, OnTimeout, Raise, Reason, WaitRequest
from flowfabric.errors import InvalidInput
from flowfabric.values.attempt import Claimed
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
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submittable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D")


class Scope(Protocol):
    """The running handler, as its context sees it."""

    claimed: Claimed
    is_parked: bool

    @property
    def unwound_at(self) -> object:
        """Where a synchronous handler waits, from then on until it has ended."""

    @property
    def is_cancelled(self) -> bool: ...
    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]: ...
    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
        timeout: Duration | None,
    ) -> Any: ...
    async def sleep(self, pause: Duration) -> None: ...
    async def now(self) -> datetime: ...
    async def progress(self, percent: int | None, message: str | None) -> None: ...
    async def heartbeat(self) -> None: ...
    @property
    def client(self) -> AsyncClient: ...
    @property
    def host(self) -> Host: ...
    async def waitpoint(self, request: WaitRequest) -> OpenWait: ...
    async def wait_for(self, request: WaitRequest, opened: OpenWait | None = None) -> Any: ...
    def in_thread(self, work: Coroutine[Any, Any, T]) -> T: ...


class Facts:
    """What is known about the execution and this attempt at it."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @property
    def execution_id(self) -> ExecutionId:
        return self._scope.claimed.execution_id

    @property
    def flow_id(self) -> FlowId | None:
        """The flow it is a node of."""
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
        return Flow(self._scope.host, claimed.execution_kind, grows=claimed.flow_id, here=claimed.execution_id)

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
        """How often a worker was lost with it."""
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
        """Whether the handler is being stopped because all it waits for needs no worker."""
        return self._scope.is_parked or self._scope.unwound_at is not None

    @property
    def is_resumed(self) -> bool:
        """Whether this attempt was begun before, and waited or was given back since."""
        return self._scope.claimed.handle.kind is HandleKind.RESUMED

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry the execution."""
        return self._scope.log

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.execution_id)!r}, kind={self.kind!r}, attempt={self.attempt_index})"


class Context(Facts):
    """Given to an async handler that has a parameter annotated with it."""

    __slots__ = ()

    @overload
    async def step(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and remember what it returned, under this name and the count of its uses in this run.

        A finished step is never run again; one that a crash interrupted is. An exception is remembered for the rest of
        this run of the handler and forgotten when the task is retried. A plain function runs in a thread. `step_with`
        gives a step its own retries and timeout. A step, a pause or a submission inside the function is part of it and
        not remembered by itself.
        """
        return await self._scope.step(name, fn, args, kwargs, None, None)

    def step_with(self, *, retry: RetryPolicy | None = None, timeout: Duration | None = None) -> StepWith:
        """Steps with retries and a time limit of their own: `await ctx.step_with(timeout=5)("fetch", fetch, url)`."""
        Options(retry=retry).checked()
        if timeout is not None and duration(timeout, "timeout") <= timedelta(0):
            raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="more than no time")
        return StepWith(self._scope, retry, timeout)

    async def sleep(self, pause: Duration) -> None:
        """Wait durably: the worker is free meanwhile, and the time counts from the first call, not from a restart."""
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
        `ff.from_sources`, `ff.count_signals`. One signal is given as a `Signal`, those of a condition as a list.
        `payload` is the type of their payloads. When the time is over: `default`, if there is one; else `NoSignal` is
        raised, or what `on_timeout` says happens to the execution: fail, cancel, expire, or escalate to an operator.
        """
        request = WaitRequest(
            what, name=name, payload=payload, timeout=timeout, default=default, on_timeout=on_timeout, reason=reason
        )
        return await self._scope.wait_for(request)

    async def waitpoint(self, key: str, *, name: str | None = None) -> Waitpoint:
        """A place where a signal can arrive from now on, with the token that it needs: hand it out, then wait at it.

        It is the same in every later run, and nothing that arrives before the handler waits is lost.
        """
        opened = await self._scope.waitpoint(WaitRequest(key, name=name))
        return Waitpoint(self._scope, key, name, opened)

    async def now(self) -> datetime:
        """The database's time, the same in every later run."""
        return await self._scope.now()

    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Say how far the work is, for whoever looks at the execution."""
        await self._scope.progress(percent, message)

    async def heartbeat(self) -> None:
        """Renew the lease now; `LeaseLost` when it is gone. The worker renews by itself, so this is seldom needed."""
        await self._scope.heartbeat()

    async def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> Run[R]:
        """Submit another task, once, however often this handler is run again. The same as `task.submit(...)`."""
        return await self._scope.client.send(new_submission(task, args, kwargs))


class WaitpointFacts:
    """Where it is, and the token that a signal needs there."""

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
        """Execution, waitpoint and token as one text that is safe in a link: for whoever shall signal, only."""
        return callback_text(self.execution_id, self.id, self.token)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {str(self.id)!r}, token={self.token})"


class Waitpoint(WaitpointFacts):
    """A place where a signal can arrive, and the token that it needs."""

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
        """The signal that arrives here. See `Context.wait_for`."""
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
    """`ctx.step` with retries and a timeout of its own."""

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
