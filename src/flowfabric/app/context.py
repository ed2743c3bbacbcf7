"""The context of an async handler: facts about its execution, and durable operations.

The worker implements the methods (`client.current.Scope`); these classes are only the interface. The classes for
synchronous handlers are generated from them (`sync_context.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from datetime import datetime, timedelta
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload
from uuid import UUID

from flowfabric.app.flow_builder import Flow
from flowfabric.bridges.callbacks import link_to
from flowfabric.client.current import Scope
from flowfabric.client.submission import new_submission
from flowfabric.contracts.waits import RAISE, OnTimeout, Raise, Reason, WaitRequest
from flowfabric.errors import InvalidInput
from flowfabric.settings import ENVIRONMENT
from flowfabric.values.budget import OnLost, Reserved
from flowfabric.values.callback import callback_text
from flowfabric.values.conditions import AllMet, Condition, Count, OperatorOnly, Single, TimeoutOnly
from flowfabric.values.durations import Duration, duration
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lease import HandleKind
from flowfabric.values.options import Options
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.signal import Signal
from flowfabric.values.spending import Used, amounts_of
from flowfabric.values.stream import DurabilityMode, FrameKind
from flowfabric.values.wait import OpenWait, WaitpointToken

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # a type or any other annotation, such as a union

    from flowfabric.client.run import Run
    from flowfabric.client.submission import TypedTask

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")
D = TypeVar("D")


_Method = TypeVar("_Method", bound=Callable[..., Any])
_MANY = 32


def awaited(method: _Method) -> _Method:
    """Keep the coroutines of a method: the run fails if the handler returns without having awaited one."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = method(self, *args, **kwargs)
        calls = self._scope.calls
        if len(calls) >= _MANY:
            calls[:] = not_begun(calls)
        calls.append(made)
        return made

    return cast("_Method", call)


def not_begun(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Coroutine[Any, Any, Any]]:
    """Return the coroutines that nothing has awaited."""
    return [one for one in calls if inspect.getcoroutinestate(one) == inspect.CORO_CREATED]


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
    async def step(self, name: str, fn: Callable[..., Awaitable[R]], /, *args: Any, was: str, **kwargs: Any) -> R: ...
    @overload
    async def step(self, name: str, fn: Callable[..., R], /, *args: Any, was: str, **kwargs: Any) -> R: ...
    @overload
    async def step(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @awaited
    async def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and store its result, under this name and the number of its uses in this run.

        A finished step never runs again; a step that a crash interrupted does. An exception is kept, and raised again
        when the handler re-runs, until the task is retried. A synchronous function runs in a thread.
        `step_with` gives a step its own retries and timeout. A step, a sleep or a submission inside the function is
        part of it and not recorded separately. `was` is an earlier name of the step: executions that recorded it under
        that name continue. (To pass an argument `was` to the function, use `step_with()`.)
        """
        was = kwargs.pop("was", None)
        return await self._scope.step(name, fn, args, kwargs, None, None, was)

    def step_with(
        self, *, retry: RetryPolicy | None = None, timeout: Duration | None = None, was: str | None = None
    ) -> StepWith:
        """Steps with options: `await ctx.step_with(timeout=5)("fetch", fetch, url)`.

        `retry` and `timeout` are the step's own; `was` is an earlier name of it, as for `step`.
        """
        Options(retry=retry).checked()
        if timeout is not None and duration(timeout, "timeout") <= timedelta(0):
            raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="a positive duration")
        return StepWith(self._scope, retry, timeout, was)

    @overload
    async def map(
        self, fn: Callable[[T], Awaitable[R]], items: Iterable[T], /, *, limit: int = 10, name: str | None = None
    ) -> list[R]: ...
    @overload
    async def map(
        self, fn: Callable[[T], R], items: Iterable[T], /, *, limit: int = 10, name: str | None = None
    ) -> list[R]: ...
    @awaited
    async def map(
        self, fn: Callable[[Any], Any], items: Iterable[Any], /, *, limit: int = 10, name: str | None = None
    ) -> Any:
        """Call a function for each item, at most `limit` at a time, and return the results in the order of the items.

        Each call is a step, named after the function (or `name`) and the index of the item, so that finished ones are
        never run again. The first error cancels the rest and is raised; what was recorded stays. Synchronous functions
        run in threads.
        """
        return await self._scope.map_steps(fn, items, limit, name)

    @awaited
    async def sleep(self, pause: Duration) -> None:
        """Wait durably: the worker is free meanwhile, and the time counts from the first call, also after a restart."""
        await self._scope.sleep(pause)

    @overload
    async def wait_for(
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
    async def wait_for(
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
    async def wait_for(
        self,
        what: str | Single,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> Signal[Any]: ...
    @overload
    async def wait_for(
        self,
        what: str | Single,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "signal",
    ) -> Signal[Any] | D: ...
    @overload
    async def wait_for(
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
    async def wait_for(
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
    async def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "signal",
    ) -> list[Signal[Any]]: ...
    @overload
    async def wait_for(
        self,
        what: AllMet | Count | OperatorOnly | TimeoutOnly,
        *,
        name: str | None = None,
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "signal",
    ) -> list[Signal[Any]] | D: ...
    @awaited
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

    @overload
    async def waitpoint(self, key: str, *, payload: TypeForm[T], name: str | None = None) -> Waitpoint[T]: ...
    @overload
    async def waitpoint(self, key: str, *, name: str | None = None) -> Waitpoint[Any]: ...
    async def waitpoint(self, key: str, *, payload: Any = Any, name: str | None = None) -> Waitpoint[Any]:
        """Open a waitpoint, which accepts signals from now on. Hand out its token, then wait at it.

        Every later run gets the same waitpoint, and signals that arrive before the handler waits are kept. `payload` is
        the type of their payloads: senders are checked from now on, and not only when the handler waits.
        """
        opened = await self._scope.waitpoint(WaitRequest(key, name=name, payload=payload))
        return Waitpoint(self._scope, key, name, opened, payload)

    async def patched(self, name: str) -> bool:
        """Whether to take a new branch of the code: the same in every run of this execution.

        False only if this execution recorded steps, children or waits that come after this call: it began with the old
        code, and must repeat it. When no execution of the old code is left, remove the call and the old branch.
        """
        return await self._scope.patched(name)

    async def now(self) -> datetime:
        """The database's time, the same in every later run."""
        return await self._scope.now()

    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Report how far the work is; `flowfabric show` and other readers see it."""
        await self._scope.progress(percent, message)

    async def emit(
        self,
        data: Any,
        *,
        type: str = "",  # noqa: A002 - as in the frame
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
        await self._scope.emit(
            data,
            type=type,
            kind=kind,
            live=live,
            ttl=ttl,
            correlation_id=correlation_id,
            durability_mode=durability_mode,
        )

    async def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Emit a line of text, as `print` would write it."""
        await self._scope.emit(
            sep.join(map(str, values)) + end,
            type="",
            kind="stdout",
            live=False,
            ttl=None,
            correlation_id=None,
            durability_mode=None,
        )

    async def summarize(
        self, patch: Mapping[str, Any], *, plain: bool = False, durability_mode: DurabilityMode | None = None
    ) -> None:
        """Merge a JSON object into the summary document of this attempt, which `run.summary()` reads.

        Objects are merged, None deletes a key, and anything else replaces what was there; `ff.NULL` stores a null. A
        patch has at most 65,536 bytes, the document 1 MiB. Each attempt begins with an empty document. The database
        merges, so an app with codecs must say that the summary may be stored as plain JSON: `plain=True`.
        """
        await self._scope.summarize(patch, plain=plain, durability_mode=durability_mode)

    @awaited
    async def usage(
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
        return await self._scope.report_usage(amounts_of(amounts, dimensions, "usage"), budgets, name)

    def spend(
        self,
        amounts: Mapping[str, int] | None = None,
        /,
        *,
        budgets: Collection[str] | None = None,
        on_lost: OnLost = "charge",
        name: str = "spend",
        **dimensions: int,
    ) -> Spend:
        """Hold amounts before they are used: `async with ctx.spend(tokens=8_000) as spend:`, then `spend.settle(...)`.

        The block begins once the amounts are held; if they do not fit, the task's `on_budget` says what happens. At the
        end of the block the settled amounts are counted in their place, also if it ends with an exception; without
        `settle` everything is given back. If the worker dies inside the block, the held amounts are counted, since the
        call may have been made, unless `on_lost` is "release"; the next run finds them, and its settlement replaces
        them. Outside of a step it is held and counted once, even if the handler is re-run. An execution without a
        budget holds and counts nothing.
        """
        return Spend(self._scope, amounts_of(amounts, dimensions, "spend"), budgets, on_lost, name)

    async def heartbeat(self) -> None:
        """Renew the lease now; raises `LeaseLost` if it was lost. Seldom needed: the worker renews it anyway."""
        await self._scope.heartbeat()

    @awaited
    async def submit(self, task: TypedTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Submit another task, only once even if this handler is re-run. The same as `task.submit(...)`."""
        return await self._scope.send(new_submission(task, args, kwargs))


class WaitpointFacts:
    """A waitpoint, and the token that its signals need."""

    __slots__ = ("_name", "_opened", "_payload", "_scope", "execution_id", "id", "key", "token")

    def __init__(self, scope: Scope, key: str, name: str | None, opened: OpenWait, payload: Any) -> None:
        self._scope = scope
        self._name = name
        self._opened = opened
        self._payload = payload
        self.key = key
        self.execution_id = scope.claimed.execution_id
        self.id: UUID = opened.waitpoints[0].waitpoint_id
        self.token: WaitpointToken = opened.waitpoints[0].waitpoint_token

    @property
    def callback(self) -> str:
        """Execution, waitpoint and token as one string that is safe in a link. Give it only to the sender."""
        return callback_text(self.execution_id, self.id, self.token)

    @property
    def link(self) -> str:
        """A link to `flowfabric server`, which shows what is asked and takes the answer. Give it only to the sender.

        The worker has to know the server's public address, as `FLOWFABRIC_PUBLIC_URL`.
        """
        found = link_to(self.callback)
        if found is None:
            raise InvalidInput(
                "the worker does not know where people reach the server",
                field=ENVIRONMENT["public_url"],
                allowed="the public address of `flowfabric server`, such as https://flows.example",
            )
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {str(self.id)!r}, token={self.token})"


class Waitpoint(WaitpointFacts, Generic[T]):
    """A waitpoint that accepts signals, and the token that they need."""

    __slots__ = ()

    @overload
    async def wait(
        self,
        *,
        payload: TypeForm[U],
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "callback",
    ) -> Signal[U]: ...
    @overload
    async def wait(
        self,
        *,
        payload: TypeForm[U],
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "callback",
    ) -> Signal[U] | D: ...
    @overload
    async def wait(
        self,
        *,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "raise",
        reason: Reason = "callback",
    ) -> Signal[T]: ...
    @overload
    async def wait(
        self,
        *,
        timeout: Duration | None = None,
        default: D,
        reason: Reason = "callback",
    ) -> Signal[T] | D: ...
    @awaited
    async def wait(
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
        return await self._scope.wait_for(request, self._opened)


class SpendFacts:
    """Amounts that are held while a block runs."""

    __slots__ = ("_amounts", "_budgets", "_held", "_is_open", "_name", "_on_lost", "_scope", "_settled", "used")

    def __init__(
        self, scope: Scope, amounts: dict[str, int], budgets: Collection[str] | None, on_lost: OnLost, name: str
    ) -> None:
        self._scope = scope
        self._amounts = amounts
        self._budgets = budgets
        self._on_lost: OnLost = on_lost
        self._name = name
        self._held: Reserved | None = None
        self._is_open = False
        self._settled: dict[str, int] | None = None
        self.used: Used | None = None  # after the block, if it settled

    @property
    def held(self) -> dict[str, int]:
        """The amounts that are held: none if the execution has no budget."""
        return self._amounts if self._held is None else self._held.amounts

    @property
    def is_settled(self) -> bool:
        """Whether an earlier run of the handler settled it: the block runs again, and nothing is counted again."""
        return self._held is not None and self._held.state == "settled"

    def settle(self, amounts: Mapping[str, int] | None = None, /, **dimensions: int) -> None:
        """Say what was really used; it is counted at the end of the block. The last call decides.

        Outside of the block it is refused: nothing would count it.
        """
        if not self._is_open:
            raise InvalidInput("outside of its block", field="settle", allowed="inside `with ctx.spend(...)`")
        self._settled = amounts_of(amounts, dimensions, "settle")

    def __repr__(self) -> str:
        amounts = ", ".join(f"{name}={amount}" for name, amount in self.held.items())
        return f"{type(self).__name__}({amounts})"


class Spend(SpendFacts):
    """Amounts that are held while a block runs: `ctx.spend`."""

    __slots__ = ()

    async def __aenter__(self) -> Spend:
        self._held = await self._scope.reserve_usage(self._amounts, self._budgets, self._name, self._on_lost)
        self._settled, self._is_open = None, True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = self._held
        self._is_open = False
        # A handler that is stopped leaves its reservation to the engine: with the lease it is given back or charged.
        is_stopped = self._scope.is_cancelled or self._scope.is_parked or self._scope.unwound_at is not None
        if held is None or is_stopped:
            return
        if self.is_settled:
            self.used = Used(remaining=held.remaining, is_recorded=True)
        elif not held.amounts:  # the execution has no budget
            self.used = None if self._settled is None else Used(remaining={})
        elif self._settled is not None:
            self.used = await self._scope.settle_usage(held.reservation_id, self._settled)
        else:
            await self._scope.cancel_reservation(held.reservation_id)


class StepWith:
    """`ctx.step` with its own retries and timeout, or an earlier name."""

    __slots__ = ("_retry", "_scope", "_timeout", "_was")

    def __init__(self, scope: Scope, retry: RetryPolicy | None, timeout: Duration | None, was: str | None) -> None:
        self._scope = scope
        self._retry = retry
        self._timeout = timeout
        self._was = was

    @overload
    async def __call__(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def __call__(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @awaited
    async def __call__(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await self._scope.step(name, fn, args, kwargs, self._retry, self._timeout, self._was)
