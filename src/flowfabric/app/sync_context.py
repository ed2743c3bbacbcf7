"""What a synchronous handler is given: who it is, and what it can do durably.

Generated from context.py by scripts/sync_context.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric.app.context import Facts, Scope, WaitpointFacts
from flowfabric.app.flow_builder import Flow
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
    """Given to a plain handler that has a parameter annotated with it. Use it from the handler's own thread.

    Where the handler has to wait without a worker, or to stop, `Interrupted` unwinds it: it is no `Exception`; let it
    pass.
    """

    __slots__ = ()

    def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function once, in this thread, and remember what it returned.

        It is known by this name and the count of its uses in this run. A finished step is never run again; one that a
        crash interrupted is. An exception is remembered for the rest of this run of the handler and forgotten when the
        task is retried. `step_with` gives a step its own retries. A step, a pause or a submission inside the function
        is part of it and not remembered by itself.
        """
        found: R = self._scope.in_thread(self._scope.step(name, fn, args, kwargs, None, None))
        return found

    def step_with(self, *, retry: RetryPolicy | None = None) -> SyncStepWith:
        """Steps that are retried in place."""
        Options(retry=retry).checked()
        return SyncStepWith(self._scope, retry)

    def sleep(self, pause: Duration) -> None:
        """Wait durably: the thread is free meanwhile, and the time counts from the first call, not from a restart."""
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
        `ff.from_sources`, `ff.count_signals`. One signal is given as a `Signal`, those of a condition as a list.
        `payload` is the type of their payloads. When the time is over: `default`, if there is one; else `NoSignal` is
        raised, or what `on_timeout` says happens to the execution: fail, cancel, expire, or escalate to an operator.
        """
        request = WaitRequest(
            what, name=name, payload=payload, timeout=timeout, default=default, on_timeout=on_timeout, reason=reason
        )
        return self._scope.in_thread(self._scope.wait_for(request))

    def waitpoint(self, key: str, *, name: str | None = None) -> SyncWaitpoint:
        """A place where a signal can arrive from now on, with the token that it needs: hand it out, then wait at it.

        It is the same in every later run, and nothing that arrives before the handler waits is lost.
        """
        opened = self._scope.in_thread(self._scope.waitpoint(WaitRequest(key, name=name)))
        return SyncWaitpoint(self._scope, key, name, opened)

    def now(self) -> datetime:
        """The database's time, the same in every later run."""
        return self._scope.in_thread(self._scope.now())

    def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Say how far the work is, for whoever looks at the execution."""
        self._scope.in_thread(self._scope.progress(percent, message))

    def heartbeat(self) -> None:
        """Renew the lease now; `LeaseLost` when it is gone. The worker renews by itself, so this is seldom needed."""
        self._scope.in_thread(self._scope.heartbeat())

    def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> Child[R]:
        """Submit another task, once, however often this handler is run again."""
        return Child(self._scope, self._scope.in_thread(self._scope.client.send(new_submission(task, args, kwargs))))

    def submit_flow(self, flow: Flow) -> ChildFlow:
        """Submit a flow, or the nodes added to this one's, once, however often this handler is run again."""
        return ChildFlow(self._scope, self._scope.in_thread(self._scope.client.submit_flow(flow)))


class SyncWaitpoint(WaitpointFacts):
    """A place where a signal can arrive, and the token that it needs."""

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
        found: Signal[Any] = self._scope.in_thread(self._scope.wait_for(request, self._opened))
        return found


class SyncStepWith:
    """`ctx.step` with retries of its own."""

    __slots__ = ("_retry", "_scope")

    def __init__(self, scope: Scope, retry: RetryPolicy | None) -> None:
        self._scope = scope
        self._retry = retry

    def __call__(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = self._scope.in_thread(self._scope.step(name, fn, args, kwargs, self._retry, None))
        return found


class Child(Generic[R]):
    """Another execution that a plain handler submitted."""

    __slots__ = ("_scope", "run")

    def __init__(self, scope: Scope, run: Run[R]) -> None:
        self._scope = scope
        self.run = run

    @property
    def execution_id(self) -> ExecutionId:
        return self.run.execution_id

    def result(self) -> R:
        """Its result, waiting without a worker; `TaskFailed` when it ended otherwise."""
        return self._scope.in_thread(self.run.result())


class ChildFlow:
    """A flow that a plain handler submitted."""

    __slots__ = ("_scope", "run")

    def __init__(self, scope: Scope, run: FlowRun) -> None:
        self._scope = scope
        self.run = run

    def result(self) -> dict[str, Any]:
        """The results of its nodes by name, waiting without a worker; `FlowFailed` when one of them failed."""
        return self._scope.in_thread(self.run.result())
