"""One execution while its handler runs here: its lease, its steps, its waits, and how it comes to an end.

Steps, sleeps and results of other executions pass through here. When all that the handler waits for needs no worker,
the execution is parked (`parking.py`): the lease is given back, the handler is stopped, and it is run again from the
top later, with what it did answered from memory. Parking never raises inside the handler's tasks: their futures just
stay pending until the handler as a whole is stopped.

Inside the function of a step nothing else is remembered: the step is. What a handler could do durably is done plainly
there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from flowfabric.client import current
from flowfabric.client.client import new_submission
from flowfabric.client.failure import parse_failure, result_of
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.contracts.value_types import ValueType
from flowfabric.contracts.waits import Raise, WaitRequest
from flowfabric.engine.calls import MAX_PAYLOAD
from flowfabric.errors import (
    Conflict,
    ExecutionNotActive,
    FlowFabricError,
    Interrupted,
    InvalidInput,
    LeaseLost,
    NoSignal,
    Reject,
    RetryLater,
    StepsChanged,
    TimedOut,
)
from flowfabric.values.attempt import Claimed
from flowfabric.values.durations import Duration, duration
from flowfabric.values.execution import Created, Outcome
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.lease import Handle, HandleKind
from flowfabric.values.policies import Exponential, RetryPolicy
from flowfabric.values.state import State
from flowfabric.values.step import NewStep, Step
from flowfabric.values.wait import OpenWait
from flowfabric.worker.memory import Memory, check_name, encode_error, remembered_error
from flowfabric.worker.parking import Parking, SignalWait, Wait
from flowfabric.worker.threads import Interruptible

if TYPE_CHECKING:
    from flowfabric.app.flow_builder import Flow, Host
    from flowfabric.app.task import Task
    from flowfabric.worker.runtime import Runtime

R = TypeVar("R")
log = logging.getLogger("flowfabric.task")
_in_step: ContextVar[bool] = ContextVar("flowfabric_in_step", default=False)
_REFUSALS = 3  # calls of a stopped handler that are refused at once
_LAST_WAIT = 1.0
HANDLER_ENDED = "the handler has ended"


class Opened:
    """The waitpoints that a handler asked for, before it waits at them."""

    __slots__ = ("is_over", "known", "n", "opened", "request")

    def __init__(self, request: WaitRequest, n: int, known: Step | None, opened: OpenWait) -> None:
        self.is_over = False  # it was waited at, and no signal came
        self.request = request
        self.n = n
        self.known = known
        self.opened = opened


class Running:
    """One held execution. Lives on the worker's loop; a few methods are for the threads of plain handlers."""

    __slots__ = (
        "_lag",
        "_log",
        "_memory",
        "_memory_loading",
        "_parking",
        "_refused",
        "asyncio_task",
        "call",
        "claimed",
        "claimed_at",
        "handle",
        "is_lost",
        "is_parked",
        "is_stopping",
        "renewed_at",
        "stop_reason",
        "task",
        "tasks",
        "wants_park",
        "worker",
    )

    def __init__(self, worker: Runtime, claimed: Claimed, task: Task[Any, Any], claimed_at: float) -> None:
        self.worker = worker
        self.claimed = claimed
        self.handle: Handle = claimed.handle
        self.task = task
        self.claimed_at = claimed_at  # time.monotonic() when the claim was asked for
        self.renewed_at = claimed_at
        self.asyncio_task: asyncio.Task[Any] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.call: Interruptible | None = None  # of a plain handler
        self.is_lost = False
        self.is_stopping = False
        self.is_parked = False
        self.stop_reason = ""
        self._parking: Parking | None = None
        # Of a plain handler: what it waits for, once it is being unwound.
        self.wants_park: Any = None
        self._lag = time.monotonic() - claimed_at
        self._memory: Memory | None = None
        self._memory_loading: asyncio.Future[None] | None = None
        self._refused = 0
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def parking(self) -> Parking:
        """What the handler waits for. Made when it first waits: most never do."""
        if self._parking is None:
            self._parking = Parking(self)
        return self._parking

    # What the context shows

    @property
    def is_cancelled(self) -> bool:
        return self.is_lost or self.is_stopping

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        if self._log is None:
            self._log = logging.LoggerAdapter(
                log,
                {
                    "execution_id": str(self.claimed.execution_id),
                    "attempt": self.handle.attempt_index,
                    "kind": self.claimed.execution_kind,
                    "lane": self.handle.lane_id,
                },
            )
        return self._log

    def database_now(self) -> datetime:
        """About what the database's clock says, never ahead of it: its time at the claim and what has passed since."""
        at_claim = self.claimed.lease_expires_at - self.handle.lease_ttl
        return at_claim + timedelta(seconds=time.monotonic() - self.claimed_at - self._lag)

    # Memory

    @property
    def is_first(self) -> bool:
        """Whether nothing can be known of this execution from before."""
        claimed = self.claimed
        return self.handle.kind is HandleKind.FRESH and claimed.retry_count == 0 == claimed.replay_count

    async def memory(self) -> Memory:
        if self._memory is None:
            if self.is_first:
                self._memory = Memory()
                return self._memory
            if self._memory_loading is None or self._memory_loading.done():
                self._memory_loading = asyncio.ensure_future(self._load())
            await asyncio.shield(self._memory_loading)
        assert self._memory is not None
        return self._memory

    async def _load(self) -> None:
        claimed = self.claimed
        steps = await self.worker.reports.load_steps(claimed.execution_id)
        self._memory = Memory(steps, claimed.retry_count + claimed.replay_count)

    async def _check(self) -> None:
        """Refuse what a handler asks for that was told to stop."""
        if not self.is_cancelled:
            return
        self._refused += 1
        if self._refused > _REFUSALS:
            # One that will not hear of it, and asks again and again, must not hold the loop up.
            await asyncio.sleep(min(0.001 * 2 ** min(self._refused, 20), _LAST_WAIT))
        raise asyncio.CancelledError(self.stop_reason)

    # Steps

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
        timeout: Duration | None,
    ) -> Any:
        await self._check()
        check_name(name)
        returned = _returned(name, fn)
        seconds = None if timeout is None else duration(timeout, "timeout").total_seconds()
        if _in_step.get():
            return await self._try(fn, args, kwargs, retry, seconds)
        n, known = (self._memory or await self.memory()).next(name, "step")
        if known is not None:
            return self._recall(known, returned)
        begun = time.perf_counter()
        try:
            with _inside_step():
                value = await self._try(fn, args, kwargs, retry, seconds)
            encoded, done = self._done(name, n, value, returned, begun)
        except (RetryLater, Reject):
            raise  # about the task, not about the step
        except Exception as error:
            await self._record(self._failed(name, n, error, begun))
            raise
        await self._record(done)
        if self.worker.step_hook is not None:
            await self.worker.step_hook(self, name, n)
        return returned.decode(encoded)

    async def _try(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
        seconds: float | None,
    ) -> Any:
        tries = 0
        while True:
            try:
                if seconds is None:
                    return await self._call(fn, args, kwargs)
                async with asyncio.timeout(seconds):
                    return await self._call(fn, args, kwargs)
            except (RetryLater, Reject):
                raise
            except Exception as error:
                tries += 1
                if retry is None or self.is_cancelled or not _may_retry(retry, tries, error):
                    raise
            await asyncio.sleep(_backoff(retry, tries - 1))

    async def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(fn):
            return await fn(*args, **kwargs)
        target = getattr(fn, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
        if inspect.iscoroutinefunction(target):
            return await fn(*args, **kwargs)
        value = await self.worker.threads.run(fn, *args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def _done(self, name: str, n: int, value: Any, returned: ValueType, begun: float) -> tuple[bytes | None, NewStep]:
        """The result of a step, as it is read back and as it is stored."""
        what = f"result of step {name!r}"
        encoded = returned.encode(value, field=what)
        sealed, encoding = (None, None) if encoded is None else self.worker.codecs.seal(encoded)
        if sealed is not None and len(sealed) > MAX_PAYLOAD:
            raise InvalidInput(f"{len(sealed)} bytes", field=what, allowed=f"at most {MAX_PAYLOAD} bytes")
        took = time.perf_counter() - begun
        return encoded, NewStep(name=name, n=n, result=sealed, encoding=encoding, seconds=took)

    def _failed(self, name: str, n: int, error: Exception, begun: float) -> NewStep:
        text, details = encode_error(error, sealed=not self.worker.codecs.is_plain)
        sealed, encoding = (None, None) if details is None else self.worker.codecs.seal(details)
        took = time.perf_counter() - begun
        return NewStep(name=name, n=n, error=text, result=sealed, encoding=encoding, seconds=took)

    def _recall(self, known: Step, returned: ValueType) -> Any:
        if known.error is not None:
            try:
                details = None if known.result is None else self.worker.codecs.open(known.result, known.encoding)
            except CannotDecode:
                details = None
            raise remembered_error(known, details)
        try:
            return returned.decode(
                None if known.result is None else self.worker.codecs.open(known.result, known.encoding)
            )
        except CannotDecode as error:
            raise StepsChanged(
                f"the result of step {known.name!r} (use {known.n}) no longer fits its function: {error.problem}",
                execution_id=self.claimed.execution_id,
            ) from error

    async def _record(self, step: NewStep) -> datetime | None:
        """Remember a step; the calls of concurrent executions go together."""
        await self._check()
        answer = await self.worker.record(self.handle, step)
        if isinstance(answer, FlowFabricError):
            if isinstance(answer, LeaseLost | ExecutionNotActive):
                self.worker.lost(self, answer)
            raise answer
        return answer

    async def now(self) -> datetime:
        await self._check()
        if _in_step.get():
            return self.database_now()
        n, known = (await self.memory()).next("now", "now")
        at = known.at if known is not None else await self._record(NewStep(name="now", n=n, kind="now"))
        assert at is not None
        return at

    async def progress(self, percent: int | None, message: str | None) -> None:
        await self._check()
        try:
            await self.worker.engine.progress(self.handle, percent=percent, message=message)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise

    async def heartbeat(self) -> None:
        await self._check()
        asked = time.monotonic()
        try:
            await self.worker.engine.renew(self.handle)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise
        self.renewed_at = asked

    async def sleep(self, pause: Duration) -> None:
        await self._check()
        span = _pause(pause)
        if _in_step.get():
            await asyncio.sleep(span.total_seconds())
            return
        until = await self._wake_time(span)
        if span:
            while not self.parking.is_over(until):
                await self.parking.wait(Wait(until))

    async def _wake_time(self, span: timedelta, name: str = "sleep") -> datetime:
        n, known = (await self.memory()).next(name, "sleep")
        if known is not None:
            until = known.at
        else:
            until = await self._record(NewStep(name=name, n=n, kind="sleep", pause=span))
        assert until is not None
        return until

    # Signals

    async def waitpoint(self, request: WaitRequest) -> Opened:
        """The waitpoints of a wait, with their tokens; the wait comes later."""
        n, known = await self._next_wait(request)
        opened = await self._open_wait(request, n, known)
        return Opened(request, n, known, opened)

    async def wait_for(self, request: WaitRequest, opened: Opened | None = None) -> Any:
        """The signals that a wait is for, as the handler is given them."""
        await self._check()
        if opened is None:
            n, known = await self._next_wait(request)
        else:
            n, known = opened.n, opened.known
        try:
            outcome, result = await self._end_of_wait(request, n, known, opened)
        except asyncio.CancelledError as error:
            # A wait that the handler cancels is over, and so it is in every later run, whatever arrives meanwhile.
            if not self.is_cancelled and not self.is_parked and error.args != (HANDLER_ENDED,):
                await self._settle(SignalWait(request, n, (), None, ()), give_up=True)
            raise
        while outcome == "given_up":
            await self.parking.wait(Wait(None))  # nothing ends it: it was given up in favour of something else
            await self._check()
        return self._outcome_of_wait(request, outcome, result, opened)

    async def _end_of_wait(
        self, request: WaitRequest, n: int, known: Step | None, opened: Opened | None
    ) -> tuple[str, bytes | None]:
        state = await self._settled(request, n, known, opened)
        again = False
        while isinstance(state, SignalWait):
            if self._is_out_of_time(state):
                await self.worker.rest(self, [Wait(None, None, state)])
            else:
                await self.parking.wait(Wait(state.until, None, state), again=again)
            await self._check()
            state = await self._settle(state)
            again = True
        return state

    def _is_out_of_time(self, wait: SignalWait) -> bool:
        """Whether the execution is to be left to the engine, which ends it as the wait says, whatever else goes on."""
        return wait.ends_execution and wait.deadline is not None and self.parking.is_over(wait.deadline)

    async def _next_wait(self, request: WaitRequest) -> tuple[int, Step | None]:
        await self._check()
        if _in_step.get():
            raise InvalidInput("inside a step", field="wait_for", allowed="in the handler itself")
        n, known = (await self.memory()).next(request.name, "wait")
        if known is not None and len(known.waitpoint_ids) != len(request.keys):
            raise StepsChanged(
                f"an earlier run waited for {request.name!r} at {len(known.waitpoint_ids)} waitpoints,"
                f" this one at {len(request.keys)}",
                execution_id=self.claimed.execution_id,
            )
        return n, known

    async def _open_wait(self, request: WaitRequest, n: int, known: Step | None) -> OpenWait:
        try:
            opened = await self.worker.engine.open_wait(self.handle, request.name, n, request.keys, request.timeout)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise
        if known is None and self.worker.step_hook is not None:
            await self.worker.step_hook(self, request.name, n)
        return opened

    async def _settled(
        self, request: WaitRequest, n: int, known: Step | None, opened: Opened | None
    ) -> SignalWait | tuple[str, bytes | None]:
        """What came of a wait, or the wait, if it has to go on."""
        if known is not None and known.encoding is not None:
            return known.encoding, known.result
        if known is None and opened is None:
            made = await self._open_wait(request, n, known)
            ids = [one.waitpoint_id for one in made.waitpoints]
            return SignalWait(request, n, ids, made.deadline, [0] * len(ids))
        if opened is not None:
            ids = [one.waitpoint_id for one in opened.opened.waitpoints]
            deadline = None
            if request.timeout is not None:
                deadline = await self._wake_time(request.timeout, f"timeout of wait {request.name} {n}")
        else:
            assert known is not None
            ids, deadline = list(known.waitpoint_ids), known.at
        return await self._settle(SignalWait(request, n, ids, deadline, [0] * len(ids)))

    async def _settle(self, wait: SignalWait, *, give_up: bool = False) -> SignalWait | tuple[str, bytes | None]:
        request = wait.request
        try:
            state = await self.worker.engine.settle_wait(
                self.handle,
                request.name,
                wait.n,
                request.condition,
                reason_code=request.reason,
                deadline=None if wait.ends_execution else wait.until,
                give_up=give_up,
            )
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise
        except InvalidInput as error:
            raise StepsChanged(
                f"an earlier run waited for {request.name!r} at other waitpoints than {', '.join(request.keys)}",
                execution_id=self.claimed.execution_id,
            ) from error
        if state.outcome != "open":
            return state.outcome, state.result
        wait.seen = state.seen
        return wait

    def _outcome_of_wait(
        self, request: WaitRequest, outcome: str, result: bytes | None, opened: Opened | None = None
    ) -> Any:
        if opened is not None:
            if opened.is_over:
                raise InvalidInput("its time was over before", field="wait", allowed="a new waitpoint")
            opened.is_over = outcome != "resumed"
        if outcome == "resumed":
            signals = request.signals(result, self.worker.codecs)
            return signals[-1] if request.is_single else signals
        if not isinstance(request.default, Raise):
            return request.default
        kind = "wait_timed_out" if outcome == "timed_out" else "wait_overridden"
        raise NoSignal(kind, request.name, execution_id=self.claimed.execution_id)

    def wait_in_thread(self, request: WaitRequest, opened: Opened | None = None) -> Any:
        """The same for a plain handler, which is unwound while it waits."""

        async def by_now() -> SignalWait | tuple[str, bytes | None]:
            if opened is None:
                n, known = await self._next_wait(request)
            else:
                n, known = opened.n, opened.known
            return await self._settled(request, n, known, opened)

        state = self.in_thread(by_now())
        if isinstance(state, SignalWait):
            self.wants_park = Wait(None if self._is_out_of_time(state) else state.until, None, state)
            raise Interrupted("waits for signals")
        outcome, result = state
        return self._outcome_of_wait(request, outcome, result, opened)

    # Other executions

    async def submit(self, task: Submittable[R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run[R]:
        return await self.worker.client.send(new_submission(task, args, kwargs))

    @property
    def host(self) -> Host:
        return self.worker.app

    async def submit_flow(self, flow: Flow) -> FlowRun:
        return await self.worker.client.submit_flow(flow)

    def flow_result_in_thread(self, run: FlowRun) -> dict[str, Any]:
        """The results of a flow for a plain handler, which is unwound while it waits."""
        if not _in_step.get() and (live := self.in_thread(run.live())):
            self._check_not_in(live)
            self.wants_park = Wait(None, live[-1])
            raise Interrupted("waits for a flow")
        found: dict[str, Any] = self.in_thread(run.result())
        return found

    async def submit_durably(
        self,
        submission: Submission,
        around: Callable[[Callable[[Submission], Awaitable[Run[Any]]]], Callable[[Submission], Awaitable[Run[Any]]]],
    ) -> Run[Any]:
        await self._check()
        name = f"submit {submission.kind}"
        n, known = (await self.memory()).next(name, "submit")
        if known is not None and known.child_id is not None:
            is_new = known.encoding != "known"
            return Run(known.child_id, kind=submission.kind, connector=self.worker.app, is_new=is_new)
        run = await around(lambda changed: self._submit_child(name, n, changed))(submission)
        if self.worker.step_hook is not None:
            await self.worker.step_hook(self, name, n)
        return run

    async def _submit_child(self, name: str, n: int, submission: Submission) -> Run[Any]:
        parent = str(self.claimed.execution_id)
        item = submission.item(creator=parent)
        engine, made = self.worker.engine, None
        if submission.options.on_duplicate in ("raise", "replace") and item.idempotency_key:
            # The key is settled first and then remembered, which finds it known: as made here, if an earlier run
            # came no further than that.
            try:
                made = await self.worker.client.create(item, submission.options)
            except Conflict as error:
                standing = await engine.read_execution(ExecutionId(error.existing or ""))
                if standing is None or standing.creator_identity != parent:
                    raise
        try:
            verdict = await engine.submit_child(self.handle, name, n, item)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise
        is_new = isinstance(made or verdict, Created)
        return Run(verdict.execution_id, kind=submission.kind, connector=self.worker.app, is_new=is_new)

    async def flow_seed(self, name: str) -> UUID | None:
        """What the ids of a flow submitted here come from, the same in every run of the handler; None inside a step."""
        await self._check()
        if _in_step.get():
            return None
        step = f"flow {name}"
        n, known = (await self.memory()).next(step, "submit")
        if known is not None and known.result is not None:
            return UUID(bytes=known.result)
        seed = mint_uuid()
        await self._record(NewStep(name=step, n=n, kind="submit", result=seed.bytes))
        return seed

    async def end_of_flow(
        self, flow_id: FlowId, live: Callable[[], Awaitable[list[ExecutionId]]], timeout: timedelta | None = None
    ) -> None:
        """Wait until none of a flow's members is `live`. That it took too long is remembered for this run."""
        await self._check()
        name = f"result of flow {flow_id}"
        n, known = (await self.memory()).next(name, "result")
        late = TimedOut("flow", round((timeout or timedelta()).total_seconds() * 1000))
        if known is not None:
            raise late
        until = None if timeout is None else await self._wake_time(timeout, f"timeout of {name}")
        while left := await live():
            self._check_not_in(left)
            if until is not None and self.parking.is_over(until):
                text, _ = encode_error(late, sealed=False)
                await self._record(NewStep(name=name, n=n, kind="result", error=text))
                raise late
            await self.parking.wait(Wait(until, left[-1]))

    def _check_not_in(self, members: Sequence[ExecutionId]) -> None:
        if self.claimed.execution_id in members:
            raise InvalidInput(
                "a node cannot wait for the end of its own flow", field="run", allowed="another flow, or single nodes"
            )

    async def outcome_of(self, execution_id: ExecutionId, timeout: timedelta | None = None) -> Outcome:
        """How another execution ended.

        A success is remembered for good. That it failed, or was late, is remembered for this run of the handler: a
        retry looks again.
        """
        await self._check()
        name = self._name_of_result(execution_id)
        n, known = (await self.memory()).next(name, "result")
        late = TimedOut("result", round((timeout or timedelta()).total_seconds() * 1000))
        if known is not None:
            if known.result is None:
                raise late
            return self._recall_outcome(known.result, known.encoding)
        until = None if timeout is None else await self._wake_time(timeout, f"timeout of {name}")
        while (found := await self.worker.reports.outcome(execution_id)) is None:
            if until is not None and self.parking.is_over(until):
                text, _ = encode_error(late, sealed=False)
                await self._record(NewStep(name=name, n=n, kind="result", error=text))
                raise late
            await self.parking.wait(Wait(until, execution_id))
        await self._record(self._ended(name, n, found))
        return found

    def _name_of_result(self, execution_id: ExecutionId) -> str:
        if execution_id == self.claimed.execution_id:
            raise InvalidInput("an execution cannot wait for its own end", field="run", allowed="another execution")
        return f"result {execution_id}"

    def _ended(self, name: str, n: int, found: Outcome) -> NewStep:
        sealed, encoding = self.worker.codecs.seal(_OUTCOME.encode(found) or b"")
        error = None
        if found.state is not State.COMPLETED:
            how = "purged" if found.state is None else found.state.value
            kind, message, _ = parse_failure(found.failure_reason)
            error = msgspec.json.encode({"type": kind or how, "message": message[:200] or how}).decode()
        return NewStep(name=name, n=n, kind="result", result=sealed, encoding=encoding, error=error)

    def _recall_outcome(self, result: bytes, encoding: str | None) -> Outcome:
        found: Outcome = _OUTCOME.decode(self.worker.codecs.open(result, encoding))
        return found

    # Threads of plain handlers

    def in_thread(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the worker's loop and wait for it in this thread."""
        try:
            self._check_thread()
        except Interrupted:
            work.close()
            raise
        try:
            return asyncio.run_coroutine_threadsafe(work, self.worker.loop).result()
        except (asyncio.CancelledError, concurrent.futures.CancelledError, LeaseLost, ExecutionNotActive):
            if self.is_cancelled:
                raise Interrupted(self.stop_reason) from None
            raise

    def _check_thread(self) -> None:
        if not self.is_cancelled and self.wants_park is None:
            return
        self._refused += 1
        if self._refused > _REFUSALS:
            time.sleep(min(0.001 * 2 ** min(self._refused, 20), _LAST_WAIT))
        raise Interrupted(self.stop_reason)

    def step_in_thread(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
    ) -> Any:
        self._check_thread()
        check_name(name)
        returned = _returned(name, fn)
        if inspect.iscoroutinefunction(fn):
            raise InvalidInput(f"{name!r} is async", field="fn", allowed="a plain function, in a plain handler")
        if _in_step.get():
            return _try_here(fn, args, kwargs, retry)

        async def begin() -> tuple[int, Step | None]:
            return (await self.memory()).next(name, "step")

        n, known = self.in_thread(begin())
        if known is not None:
            return self._recall(known, returned)
        begun = time.perf_counter()
        try:
            with _inside_step():
                value = _try_here(fn, args, kwargs, retry)
            encoded, done = self._done(name, n, value, returned, begun)
        except (RetryLater, Reject):
            raise
        except Exception as error:
            self.in_thread(self._record(self._failed(name, n, error, begun)))
            raise
        self.in_thread(self._record(done))
        if self.worker.step_hook is not None:
            self.in_thread(self.worker.step_hook(self, name, n))
        return returned.decode(encoded)

    def sleep_in_thread(self, pause: Duration) -> None:
        span = _pause(pause)
        if _in_step.get():
            time.sleep(span.total_seconds())
            return
        until: datetime = self.in_thread(self._wake_time(span))
        if span and not self.parking.is_over(until):
            self.wants_park = Wait(until)
            raise Interrupted("sleeps")

    def result_in_thread(self, run: Run[Any]) -> Any:
        if _in_step.get():
            return self.in_thread(run.result())
        outcome = self.in_thread(self._outcome_by_now(run.execution_id))
        if outcome is None:
            self.wants_park = Wait(None, run.execution_id)
            raise Interrupted("waits for another execution")
        client = self.worker.client
        return result_of(run.execution_id, outcome, client.result_type(run.kind), client.codecs)

    async def _outcome_by_now(self, execution_id: ExecutionId) -> Outcome | None:
        name = self._name_of_result(execution_id)
        n, known = (await self.memory()).next(name, "result")
        if known is not None and known.result is not None:
            return self._recall_outcome(known.result, known.encoding)
        found = await self.worker.reports.outcome(execution_id)
        if found is not None:
            await self._record(self._ended(name, n, found))
        return found

    # The end

    def stop(self, reason: str) -> None:
        """Stop the handler: its tasks are cancelled, a plain one is unwound at its next line."""
        self.is_stopping = True
        self.stop_reason = reason
        for task in list(self.tasks):
            task.cancel(reason)
        self.interrupt_thread()

    def interrupt_thread(self) -> None:
        """Raise `Interrupted` in the handler's thread, if it runs in one."""
        if self.call is not None:
            self.call.interrupt()

    async def forget(self) -> None:
        """Begin the handler anew: what is remembered is read again."""
        self.wants_park = None
        self._refused = 0
        await self._load()

    async def left_out(self) -> list[tuple[str, int]]:
        """What an earlier run of the handler did and this one has not asked for, by name and use."""
        return (await self.memory()).not_reached() if self.task.steps == "strict" else []

    async def steps_changed(self) -> StepsChanged | None:
        """The error for a handler that ended without steps it had done before."""
        gone = [name for name, n in await self.left_out() if n == 0]
        if not gone:
            return None
        return StepsChanged(
            f"an earlier run did {', '.join(map(repr, gone))} and this one ended without:"
            " the code was changed while the execution was under way",
            execution_id=self.claimed.execution_id,
        )


_OUTCOME = ValueType.of(Outcome)


@contextlib.contextmanager
def _inside_step() -> Iterator[None]:
    """What is called here is part of the step: nothing of it is remembered by itself."""
    inside, scope = _in_step.set(True), current.running.set(None)
    try:
        yield
    finally:
        _in_step.reset(inside)
        current.running.reset(scope)


def _returned(name: str, fn: Callable[..., Any]) -> ValueType:
    if not callable(fn):
        if inspect.iscoroutine(fn):
            fn.close()
        raise InvalidInput(
            f"step {name!r} was given a {type(fn).__name__}",
            field="fn",
            allowed="a function, and its arguments after it",
        )
    return ValueType.returned_by(fn)


def _pause(pause: Duration) -> timedelta:
    span = duration(pause, "pause")
    if span < timedelta(0):
        raise InvalidInput(f"got {pause!r}", field="pause", allowed="no time or more")
    return span


def _try_here(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], retry: RetryPolicy | None
) -> Any:
    """Call a plain function, again where its policy says so."""
    tries = 0
    while True:
        try:
            return fn(*args, **kwargs)
        except (RetryLater, Reject):
            raise
        except Exception as error:
            tries += 1
            if retry is None or not _may_retry(retry, tries, error):
                raise
        time.sleep(_backoff(retry, tries - 1))


def _may_retry(policy: RetryPolicy, tries: int, error: Exception) -> bool:
    categories = policy.retryable_categories
    return tries <= policy.max_retries and (not categories or type(error).__name__ in categories)


def _backoff(policy: RetryPolicy, retries: int) -> float:
    """Seconds before the next try of a step."""
    backoff = policy.backoff
    if isinstance(backoff, Exponential):
        most = duration(backoff.maximum, "maximum").total_seconds()
        try:
            pause = min(duration(backoff.initial, "initial").total_seconds() * backoff.multiplier**retries, most)
        except OverflowError:
            pause = most
        return pause * random.uniform(0.5, 1) if backoff.jitter else pause  # noqa: S311 - no secret
    return duration(backoff.delay, "delay").total_seconds()
