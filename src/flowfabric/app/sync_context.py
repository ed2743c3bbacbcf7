"""The context of a synchronous handler: facts about its execution, and durable operations.

Generated from context.py by scripts/sync_context.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric.app.context import Facts, SpendFacts, WaitpointFacts
from flowfabric.app.flow_builder import Flow
from flowfabric.client.current import Scope
from flowfabric.client.submission import new_submission
from flowfabric.contracts.waits import RAISE, OnTimeout, Raise, Reason, WaitRequest
from flowfabric.values.budget import OnLost
from flowfabric.values.conditions import AllMet, Condition, Count, OperatorOnly, Single, TimeoutOnly
from flowfabric.values.durations import Duration
from flowfabric.values.ids import ExecutionId
from flowfabric.values.options import Options
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.signal import Signal
from flowfabric.values.spending import Used, amounts_of
from flowfabric.values.stream import DurabilityMode, FrameKind

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from flowfabric.client.flow_run import FlowRun
    from flowfabric.client.run import Run
    from flowfabric.client.submission import TypedTask

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")
D = TypeVar("D")


class SyncContext(Facts):
    """The worker passes it to a synchronous handler with a parameter of this type. Use it only in the handler's thread.

    When the handler has to wait without a worker, or to stop, `Interrupted` unwinds it. It is not an `Exception`; do
    not catch it.
    """

    __slots__ = ()

    @overload
    def step(self, name: str, fn: Callable[..., R], /, *args: Any, was: str, **kwargs: Any) -> R: ...

    @overload
    def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once, in this thread, and store its result.

        It is identified by this name and the number of its uses in this run. A finished step never runs again; a step
        that a crash interrupted does. An exception is kept, and raised again when the handler re-runs, until the task
        is retried. `step_with` gives a step its own retries. A step, a sleep or a submission inside the
        function is part of it and not recorded separately. `was` is an earlier name of the step: executions that
        recorded it under that name continue.
        """
        was = kwargs.pop("was", None)
        return self._scope.in_thread(self._scope.step(name, fn, args, kwargs, None, None, was))

    def step_with(self, *, retry: RetryPolicy | None = None, was: str | None = None) -> SyncStepWith:
        """Steps that are retried in place; `was` is an earlier name of the step, as for `step`."""
        Options(retry=retry).checked()
        return SyncStepWith(self._scope, retry, was)

    def map(self, fn: Callable[[T], R], items: Iterable[T], /, *, limit: int = 10, name: str | None = None) -> list[R]:
        """Call a function for each item, at most `limit` at a time, and return the results in the order of the items.

        Each call is a step, named after the function (or `name`) and the index of the item, so that finished ones are
        never run again. The first error cancels the rest and is raised; what was recorded stays. Synchronous functions
        run in threads.
        """
        found: list[R] = self._scope.in_thread(self._scope.map_steps(fn, items, limit, name))
        return found

    def sleep(self, pause: Duration) -> None:
        """Wait durably: the thread is free meanwhile. The time counts from the first call, also after a restart."""
        self._scope.in_thread(self._scope.sleep(pause))

    @overload
    def wait_for(
        self,
        what: str | Single,
        *,
        payload: TypeForm[T],
        name: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> Signal[T]: ...

    @overload
    def wait_for(
        self,
        what: str | Single,
        *,
        payload: TypeForm[T],
        name: str | None = None,
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "signal",
    ) -> Signal[T] | D: ...

    @overload
    def wait_for(
        self,
        what: str | Single,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> Signal[Any]: ...

    @overload
    def wait_for(
        self,
        what: str | Single,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "signal",
    ) -> Signal[Any] | D: ...

    @overload
    def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        payload: TypeForm[T],
        name: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> list[Signal[T]]: ...

    @overload
    def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        payload: TypeForm[T],
        name: str | None = None,
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "signal",
    ) -> list[Signal[T]] | D: ...

    @overload
    def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> list[Signal[Any]]: ...

    @overload
    def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        default: D,
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

    @overload
    def waitpoint(self, key: str, *, payload: TypeForm[T], name: str | None = None) -> SyncWaitpoint[T]: ...

    @overload
    def waitpoint(self, key: str, *, name: str | None = None) -> SyncWaitpoint[Any]: ...

    def waitpoint(self, key: str, *, payload: Any = Any, name: str | None = None) -> SyncWaitpoint[Any]:
        """Open a waitpoint, which accepts signals from now on. Hand out its token, then wait at it.

        Every later run gets the same waitpoint, and signals that arrive before the handler waits are kept. `payload` is
        the type of their payloads: senders are checked from now on, and not only when the handler waits.
        """
        opened = self._scope.in_thread(self._scope.waitpoint(WaitRequest(key, name=name, payload=payload)))
        return SyncWaitpoint(self._scope, key, name, opened, payload)

    def patched(self, name: str) -> bool:
        """Whether to take a new branch of the code: the same in every run of this execution.

        False only if this execution recorded steps, children or waits that come after this call: it began with the old
        code, and must repeat it. When no execution of the old code is left, remove the call and the old branch.
        """
        return self._scope.in_thread(self._scope.patched(name))

    def now(self) -> datetime:
        """The database's time, the same in every later run."""
        return self._scope.in_thread(self._scope.now())

    def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Report how far the work is; `flowfabric show` and other readers see it."""
        self._scope.in_thread(self._scope.progress(percent, message))

    def emit(
        self,
        data: Any,
        *,
        type: str = "",
        live: bool = False,
        ttl: Duration | None = None,
        kind: FrameKind | None = None,
        correlation_id: str | None = None,
        durability_mode: DurabilityMode | None = None,
    ) -> None:
        """Emit text, bytes or JSON to the output stream, which `run.stream()` and `flowfabric tail` follow.

        It returns at once while the buffer has room (1,000 frames, 1 MiB): the worker stores frames with its next call,
        in their order, and before the result. `durability_mode="durable"` waits until it is stored; the default is
        that of the execution's `stream_policy`, which is "buffered" unless it was set. `live=True` is for those who
        follow now: cheaper, readable for twice the `ttl` (10 seconds) at most, and lost with the database server. A
        handler that runs again after a wait does not repeat what it emitted, except inside steps and with `live`.
        `type` is a word of your own, but for `end`, `error`, `gap`, `new_attempt`, `open` and `summary_delta`.
        """
        self._scope.in_thread(
            self._scope.emit(
                data,
                type=type,
                kind=kind,
                live=live,
                ttl=ttl,
                correlation_id=correlation_id,
                durability_mode=durability_mode,
            )
        )

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Emit a line of text, as `print` would write it."""
        self._scope.in_thread(
            self._scope.emit(
                sep.join(map(str, values)) + end,
                type="",
                kind="stdout",
                live=False,
                ttl=None,
                correlation_id=None,
                durability_mode=None,
            )
        )

    def summarize(
        self, patch: Mapping[str, Any], *, plain: bool = False, durability_mode: DurabilityMode | None = None
    ) -> None:
        """Merge a JSON object into the summary document of this attempt, which `run.summary()` reads.

        Objects are merged, None deletes a key, and anything else replaces what was there; `ff.NULL` stores a null. A
        patch has at most 65,536 bytes, the document 1 MiB. Each attempt begins with an empty document. The database
        merges, so an app with codecs must say that the summary may be stored as plain JSON: `plain=True`.
        """
        self._scope.in_thread(self._scope.summarize(patch, plain=plain, durability_mode=durability_mode))

    def usage(
        self,
        amounts: Mapping[str, int] | None = None,
        /,
        *,
        budgets: Collection[str] | None = None,
        name: str = "usage",
        **dimensions: int,
    ) -> Used:
        """Count what was used, in all budgets of the execution or in those named, and return what is left.

        Outside of a step it is counted once, even if the handler is re-run; inside a step each time the step runs. An
        amount that does not fit under a hard limit is not counted, and the task's `on_budget` says what happens. A
        dimension that is named like a keyword of this method goes into the mapping.
        """
        return self._scope.in_thread(self._scope.report_usage(amounts_of(amounts, dimensions, "usage"), budgets, name))

    def spend(
        self,
        amounts: Mapping[str, int] | None = None,
        /,
        *,
        budgets: Collection[str] | None = None,
        on_lost: OnLost = "charge",
        name: str = "spend",
        **dimensions: int,
    ) -> SyncSpend:
        """Hold amounts before they are used: `with ctx.spend(tokens=8_000) as spend:`, then `spend.settle(...)`.

        As `Context.spend`.
        """
        return SyncSpend(self._scope, amounts_of(amounts, dimensions, "spend"), budgets, on_lost, name)

    def heartbeat(self) -> None:
        """Renew the lease now; raises `LeaseLost` if it was lost. Seldom needed: the worker renews it anyway."""
        self._scope.in_thread(self._scope.heartbeat())

    def submit(self, task: TypedTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]:
        """Submit another task, only once even if this handler is re-run."""
        return Child(self._scope, self._scope.in_thread(self._scope.send(new_submission(task, args, kwargs))))

    def submit_flow(self, flow: Flow) -> ChildFlow:
        """Submit a flow, or the nodes added to this one's, only once even if this handler is re-run."""
        return ChildFlow(self._scope, self._scope.in_thread(self._scope.client.submit_flow(flow)))


class SyncWaitpoint(WaitpointFacts, Generic[T]):
    """A waitpoint that accepts signals, and the token that they need."""

    __slots__ = ()

    @overload
    def wait(
        self,
        *,
        payload: TypeForm[U],
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "callback",
    ) -> Signal[U]: ...

    @overload
    def wait(
        self, *, payload: TypeForm[U], timeout: Duration | None = None, default: D, reason: Reason = "callback"
    ) -> Signal[U] | D: ...

    @overload
    def wait(
        self, *, timeout: Duration | None = None, on_timeout: OnTimeout = "raise", reason: Reason = "callback"
    ) -> Signal[T]: ...

    @overload
    def wait(self, *, timeout: Duration | None = None, default: D, reason: Reason = "callback") -> Signal[T] | D: ...

    def wait(
        self,
        *,
        payload: Any = RAISE,
        timeout: Duration | None = None,
        default: Any = RAISE,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "callback",
    ) -> Any:
        """Wait for a signal here and return it. See `Context.wait_for`."""
        request = WaitRequest(
            self.key,
            name=self._name,
            payload=self._payload if isinstance(payload, Raise) else payload,
            timeout=timeout,
            default=default,
            on_timeout=on_timeout,
            reason=reason,
        )
        return self._scope.in_thread(self._scope.wait_for(request, self._opened))


class SyncSpend(SpendFacts):
    """Amounts that are held while a block runs: `ctx.spend`."""

    __slots__ = ()

    def __enter__(self) -> SyncSpend:
        self._held = self._scope.in_thread(
            self._scope.reserve_usage(self._amounts, self._budgets, self._name, self._on_lost)
        )
        self._settled, self._is_open = (None, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = self._held
        self._is_open = False
        is_stopped = self._scope.is_cancelled or self._scope.is_parked or self._scope.unwound_at is not None
        if held is None or is_stopped:
            return
        if self.is_settled:
            self.used = Used(remaining=held.remaining, is_recorded=True)
        elif not held.amounts:
            self.used = None if self._settled is None else Used(remaining={})
        elif self._settled is not None:
            self.used = self._scope.in_thread(self._scope.settle_usage(held.reservation_id, self._settled))
        else:
            self._scope.in_thread(self._scope.cancel_reservation(held.reservation_id))


class SyncStepWith:
    """`ctx.step` with its own retries, or an earlier name."""

    __slots__ = ("_retry", "_scope", "_was")

    def __init__(self, scope: Scope, retry: RetryPolicy | None, was: str | None) -> None:
        self._scope = scope
        self._retry = retry
        self._was = was

    def __call__(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = self._scope.in_thread(self._scope.step(name, fn, args, kwargs, self._retry, None, self._was))
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

    @property
    def id(self) -> str:
        return self.run.id

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
