"""The context of a synchronous handler: facts about its execution, and durable operations.

Generated from context.py by scripts/sync_context.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric.app.context import Facts, WaitpointFacts
from flowfabric.app.flow_builder import Flow
from flowfabric.client.current import Scope
from flowfabric.client.submission import new_submission
from flowfabric.contracts.waits import RAISE, OnTimeout, Raise, Reason, WaitRequest
from flowfabric.values.conditions import AllMet, Condition, Count, OperatorOnly, Single, TimeoutOnly
from flowfabric.values.durations import Duration
from flowfabric.values.ids import ExecutionId
from flowfabric.values.options import Options
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.signal import Signal

if TYPE_CHECKING:
    from flowfabric.client.flow_run import FlowRun
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submittable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D")


class SyncContext(Facts):
    """The worker passes it to a synchronous handler with a parameter of this type. Use it only in the handler's thread.

    When the handler has to wait without a worker, or to stop, `Interrupted` unwinds it. It is not an `Exception`; do
    not catch it.
    """

    __slots__ = ()

    def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function once, in this thread, and store its result.

        It is identified by this name and the number of its uses in this run. A finished step never runs again; a step
        that a crash interrupted does. An exception is kept for the rest of this run of the handler and forgotten when
        the task is retried. `step_with` gives a step its own retries. A step, a sleep or a submission inside the
        function is part of it and not recorded separately.
        """
        found: R = self._scope.in_thread(self._scope.step(name, fn, args, kwargs, None, None))
        return found

    def step_with(self, *, retry: RetryPolicy | None = None) -> SyncStepWith:
        """Steps that are retried in place."""
        Options(retry=retry).checked()
        return SyncStepWith(self._scope, retry)

    def sleep(self, pause: Duration) -> None:
        """Wait durably: the thread is free meanwhile. The time counts from the first call, also after a restart."""
        self._scope.in_thread(self._scope.sleep(pause))

    @overload
    def wait_for(
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
    def wait_for(
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
    def wait_for(
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

    def wait_for(
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
        return self._scope.in_thread(self._scope.wait_for(request))

    def waitpoint(self, key: str, *, name: str | None = None) -> SyncWaitpoint:
        """Open a waitpoint, which accepts signals from now on. Hand out its token, then wait at it.

        Every later run gets the same waitpoint, and signals that arrive before the handler waits are kept.
        """
        opened = self._scope.in_thread(self._scope.waitpoint(WaitRequest(key, name=name)))
        return SyncWaitpoint(self._scope, key, name, opened)

    def now(self) -> datetime:
        """The database's time, the same in every later run."""
        return self._scope.in_thread(self._scope.now())

    def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Report how far the work is; `flowfabric show` and other readers see it."""
        self._scope.in_thread(self._scope.progress(percent, message))

    def heartbeat(self) -> None:
        """Renew the lease now; raises `LeaseLost` if it was lost. Seldom needed: the worker renews it anyway."""
        self._scope.in_thread(self._scope.heartbeat())

    def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> Child[R]:
        """Submit another task, only once even if this handler is re-run."""
        return Child(self._scope, self._scope.in_thread(self._scope.client.send(new_submission(task, args, kwargs))))

    def submit_flow(self, flow: Flow) -> ChildFlow:
        """Submit a flow, or the nodes added to this one's, only once even if this handler is re-run."""
        return ChildFlow(self._scope, self._scope.in_thread(self._scope.client.submit_flow(flow)))


class SyncWaitpoint(WaitpointFacts):
    """A waitpoint that accepts signals, and the token that they need."""

    __slots__ = ()

    def wait(
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
        found: Signal[Any] = self._scope.in_thread(self._scope.wait_for(request, self._opened))
        return found


class SyncStepWith:
    """`ctx.step` with its own retries."""

    __slots__ = ("_retry", "_scope")

    def __init__(self, scope: Scope, retry: RetryPolicy | None) -> None:
        self._scope = scope
        self._retry = retry

    def __call__(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = self._scope.in_thread(self._scope.step(name, fn, args, kwargs, self._retry, None))
        return found


class Child(Generic[R]):
    """Another execution that a synchronous handler submitted."""

    __slots__ = ("_scope", "run")

    def __init__(self, scope: Scope, run: Run[R]) -> None:
        self._scope = scope
        self.run = run

    @property
    def execution_id(self) -> ExecutionId:
        return self.run.execution_id

    def result(self) -> R:
        """Wait for its result without a worker; raises `TaskFailed` if it has none."""
        return self._scope.in_thread(self.run.result())


class ChildFlow:
    """A flow that a synchronous handler submitted."""

    __slots__ = ("_scope", "run")

    def __init__(self, scope: Scope, run: FlowRun) -> None:
        self._scope = scope
        self.run = run

    def result(self) -> dict[str, Any]:
        """Wait for the results of its nodes by name, without a worker; raises `FlowFailed` if one of them failed."""
        return self._scope.in_thread(self.run.result())
