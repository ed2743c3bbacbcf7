"""One execution while its handler runs here: its lease, its steps, its waits, and how it comes to an end.

Steps, sleeps and results of other executions pass through here. When all that the handler waits for needs no worker,
the execution is parked: the lease is given back, the handler is stopped, and it is run again from the top later, with
what it did answered from memory. Parking never raises inside the handler's tasks: their futures just stay pending
until the handler as a whole is stopped.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from flowfabric.client.client import new_submission
from flowfabric.client.failure import result_of
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable
from flowfabric.contracts import CannotDecode, ValueType
from flowfabric.errors import (
    Conflict,
    ExecutionNotActive,
    FlowFabricError,
    Interrupted,
    InvalidInput,
    LeaseLost,
    Reject,
    RetryLater,
    StepsChanged,
    TimedOut,
)
from flowfabric.ids import ExecutionId
from flowfabric.models import Claimed, Created, Handle, HandleKind, NewStep, Outcome, Step
from flowfabric.policies import Duration, Exponential, RetryPolicy, duration
from flowfabric.worker import tree
from flowfabric.worker.memory import Memory, encode_error, remembered_error
from flowfabric.worker.threads import Interruptible

if TYPE_CHECKING:
    from flowfabric.app import Task
    from flowfabric.worker.worker import Worker

R = TypeVar("R")
log = logging.getLogger("flowfabric.task")
_LOOK_AGAIN = 0.1  # seconds until parking is tried again


class Running:
    """One held execution. Lives on the worker's loop; a few methods are for the threads of plain handlers."""

    __slots__ = (
        "_log",
        "_memory",
        "_memory_loading",
        "_next_look",
        "_parking",
        "_waits",
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

    def __init__(self, worker: Worker, claimed: Claimed, task: Task[Any, Any], claimed_at: float) -> None:
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
        self.wants_park: tuple[datetime | None, ExecutionId | None] | None = None  # of a plain handler
        self._memory: Memory | None = None
        self._memory_loading: asyncio.Future[Memory] | None = None
        self._waits: dict[asyncio.Future[Any], tuple[datetime | None, ExecutionId | None, asyncio.Future[Any]]] = {}
        self._parking: asyncio.Task[None] | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

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
        """About what the database's clock says: its time at the claim and what has passed here since."""
        at_claim = self.claimed.lease_expires_at - self.handle.lease_ttl
        return at_claim + timedelta(seconds=time.monotonic() - self.claimed_at)

    # Memory

    async def memory(self) -> Memory:
        if self._memory is not None:
            return self._memory
        if self._memory_loading is None:
            self._memory_loading = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._memory_loading)

    async def _load(self) -> Memory:
        claimed = self.claimed
        run = claimed.retry_count + claimed.replay_count
        if self.handle.kind is HandleKind.FRESH and run == 0:
            self._memory = Memory()  # nothing can be known of a first attempt
        else:
            self._memory = Memory(await self.worker.reports.load_steps(claimed.execution_id), run)
        return self._memory

    def _check(self) -> None:
        if self.is_stopping:
            raise asyncio.CancelledError(self.stop_reason)
        if self.is_lost:
            raise LeaseLost("stale_lease", self.stop_reason, execution_id=self.claimed.execution_id)

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
        timeout: Duration | None,
    ) -> Any:
        self._check()
        memory = self._memory or await self.memory()
        n, known = memory.next(name, "step")
        returned = ValueType.returned_by(fn)
        if known is not None:
            return self._recall(known, returned)
        seconds = None if timeout is None else duration(timeout, "timeout").total_seconds()
        begun = time.perf_counter()
        tries = 0
        while True:
            try:
                if seconds is None:
                    value = await self._call(fn, args, kwargs)
                else:
                    async with asyncio.timeout(seconds):
                        value = await self._call(fn, args, kwargs)
                break
            except (RetryLater, Reject):
                raise  # about the task, not about the step
            except Exception as error:
                if isinstance(error, LeaseLost | ExecutionNotActive) and self.is_lost:
                    raise
                tries += 1
                if retry is not None and _may_retry(retry, tries, error):
                    await asyncio.sleep(_backoff(retry, tries - 1))
                    continue
                await self._record(
                    NewStep(name=name, n=n, error=encode_error(error), seconds=time.perf_counter() - begun)
                )
                raise
        encoded = returned.encode(value, field=f"result of step {name!r}")
        sealed, encoding = (None, None) if encoded is None else self.worker.codecs.seal(encoded)
        await self._record(
            NewStep(name=name, n=n, result=sealed, encoding=encoding, seconds=time.perf_counter() - begun)
        )
        if self.worker.step_hook is not None:
            await self.worker.step_hook(self, name, n)
        return returned.decode(encoded)

    async def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(fn):
            return await fn(*args, **kwargs)
        target = getattr(fn, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
        if inspect.iscoroutinefunction(target):
            return await fn(*args, **kwargs)
        value = await self.worker.threads.run(fn, *args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def _recall(self, known: Step, returned: ValueType) -> Any:
        if known.error is not None:
            raise remembered_error(known)
        if known.result is None:
            return returned.decode(None)
        try:
            return returned.decode(self.worker.codecs.open(known.result, known.encoding))
        except CannotDecode as error:
            raise StepsChanged(
                f"the result of step {known.name!r} (use {known.n}) no longer fits its function: {error.problem}",
                execution_id=self.claimed.execution_id,
            ) from error

    async def _record(self, step: NewStep) -> datetime | None:
        """Remember a step; the calls of concurrent executions go together."""
        self._check()
        answer = await self.worker.record(self.handle, step)
        if isinstance(answer, FlowFabricError):
            if isinstance(answer, LeaseLost | ExecutionNotActive):
                self.worker.lost(self, answer)
            raise answer
        return answer

    async def now(self) -> datetime:
        self._check()
        n, known = (await self.memory()).next("now", "now")
        at = known.at if known is not None else await self._record(NewStep(name="now", n=n, kind="now"))
        assert at is not None
        return at

    async def progress(self, percent: int | None, message: str | None) -> None:
        self._check()
        try:
            await self.worker.engine.progress(self.handle, percent=percent, message=message)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise

    async def heartbeat(self) -> None:
        self._check()
        asked = time.monotonic()
        try:
            await self.worker.engine.renew(self.handle)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.lost(self, error)
            raise
        self.renewed_at = asked

    # Other executions

    async def submit(self, task: Submittable[R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run[R]:
        return await self.worker.client.send(new_submission(task, args, kwargs))

    async def submit_durably(
        self,
        submission: Submission,
        around: Callable[[Callable[[Submission], Awaitable[Run[Any]]]], Callable[[Submission], Awaitable[Run[Any]]]],
    ) -> Run[Any]:
        self._check()
        name = f"submit {submission.kind}"
        n, known = (await self.memory()).next(name, "submit")
        if known is not None and known.child_id is not None:
            return Run(known.child_id, kind=submission.kind, connector=self.worker.app, is_new=False)
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

    async def outcome_of(self, execution_id: ExecutionId, timeout: timedelta | None = None) -> Outcome:
        """How another execution ended; remembered, so that a later run gets the same answer, also that it was late."""
        self._check()
        name = f"result {execution_id}"
        n, known = (await self.memory()).next(name, "step")
        late = TimedOut("result", round((timeout or timedelta()).total_seconds() * 1000))
        if known is not None and known.error is not None:
            raise late
        if known is not None and known.result is not None:
            return _OUTCOME.decode(self.worker.codecs.open(known.result, known.encoding))  # type: ignore[no-any-return]
        until = None if timeout is None else await self._wake_time(timeout, f"timeout of {name}")
        found = (await self.worker.engine.read_outcomes([execution_id])).get(execution_id)
        if found is None and (until is None or until > self.database_now()):
            await self._wait(self.worker.client.outcomes.future(execution_id), until, execution_id)
            found = (await self.worker.engine.read_outcomes([execution_id])).get(execution_id)
        if found is None:
            await self._record(NewStep(name=name, n=n, error=encode_error(late)))
            raise late
        sealed, encoding = self.worker.codecs.seal(_OUTCOME.encode(found) or b"")
        await self._record(NewStep(name=name, n=n, result=sealed, encoding=encoding))
        return found

    async def sleep(self, pause: Duration) -> None:
        self._check()
        until = await self._wake_time(pause)
        if until > self.database_now():
            await self._wait(asyncio.get_running_loop().create_future(), until, None)

    async def _wake_time(self, pause: Duration, name: str = "sleep") -> datetime:
        span = duration(pause, "pause")
        if span < timedelta(0):
            raise InvalidInput(f"got {pause!r}", field="pause", allowed="no time or more")
        n, known = (await self.memory()).next(name, "sleep")
        if known is not None:
            until = known.at
        else:
            until = await self._record(NewStep(name=name, n=n, kind="sleep", pause=span))
        assert until is not None
        return until

    # Parking

    async def _wait(
        self, future: asyncio.Future[Any], until: datetime | None, execution_id: ExecutionId | None
    ) -> None:
        """Wait for a future or a time: for something, that is, that needs no worker."""
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[Any] = loop.create_future()

        def pass_on(_: object = None) -> None:
            # While the lease is being given back nothing may move; what came meanwhile is passed on afterwards.
            if self._parking is None and not self.is_parked and not gate.done():
                gate.set_result(None)

        future.add_done_callback(pass_on)
        self._waits[gate] = (until, execution_id, future)
        left = None if until is None else max((until - self.database_now()).total_seconds(), 0)
        timer = None if left is None else loop.call_later(left, pass_on)
        try:
            loop.call_soon(self.consider_parking)
            await gate
        finally:
            if timer is not None:
                timer.cancel()
            self._waits.pop(gate, None)
            future.remove_done_callback(pass_on)
            if not future.done():
                future.cancel()

    def consider_parking(self) -> None:
        """Park, if every task of the handler waits for something that needs no worker."""
        if not self._waits or self._parking is not None or self.is_cancelled or self.is_parked:
            return
        loop = asyncio.get_running_loop()
        if tree.all_wait(self.tasks, self._waits):
            self._parking = asyncio.Task(self._park(), loop=loop)
        elif self._next_look is None:
            # Something else goes on; nobody says when it ends.
            self._next_look = loop.call_later(_LOOK_AGAIN, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        self.consider_parking()

    async def _park(self) -> None:
        waits = list(self._waits.values())
        times = [until for until, _, _ in waits if until is not None]
        ends = {execution_id for _, execution_id, _ in waits if execution_id is not None}
        try:
            parked = await self.worker.park(self, min(times) if times else None, list(ends)[:1000])
        finally:
            self._parking = None
        if parked:
            return
        # Nothing to wait for after all: whoever may go on, does.
        outcomes = await self.worker.engine.read_outcomes(list(ends)) if ends else {}
        now = self.database_now()
        for gate, (until, execution_id, future) in list(self._waits.items()):
            over = future.done() or execution_id in outcomes or (until is not None and until <= now)
            if over and not gate.done():
                gate.set_result(None)
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_AGAIN, self._look_again)

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
        if self.is_cancelled or self.wants_park is not None:
            raise Interrupted(self.stop_reason)

    def step_in_thread(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
    ) -> Any:
        async def begin() -> tuple[int, Step | None]:
            return (await self.memory()).next(name, "step")

        n, known = self.in_thread(begin())
        returned = ValueType.returned_by(fn)
        if known is not None:
            return self._recall(known, returned)
        begun = time.perf_counter()
        tries = 0
        while True:
            try:
                value = fn(*args, **kwargs)
                break
            except (RetryLater, Reject):
                raise
            except Exception as error:
                tries += 1
                if retry is not None and _may_retry(retry, tries, error):
                    time.sleep(_backoff(retry, tries - 1))
                    continue
                failed = NewStep(name=name, n=n, error=encode_error(error), seconds=time.perf_counter() - begun)
                self.in_thread(self._record(failed))
                raise
        encoded = returned.encode(value, field=f"result of step {name!r}")
        sealed, encoding = (None, None) if encoded is None else self.worker.codecs.seal(encoded)
        done = NewStep(name=name, n=n, result=sealed, encoding=encoding, seconds=time.perf_counter() - begun)
        self.in_thread(self._record(done))
        if self.worker.step_hook is not None:
            self.in_thread(self.worker.step_hook(self, name, n))
        return returned.decode(encoded)

    def sleep_in_thread(self, pause: Duration) -> None:
        until: datetime = self.in_thread(self._wake_time(pause))
        if until > self.database_now():
            self.wants_park = (until, None)
            raise Interrupted("sleeps")

    def result_in_thread(self, run: Run[Any]) -> Any:
        async def look() -> Outcome | None:
            memory = await self.memory()
            name = f"result {run.execution_id}"
            n, known = memory.next(name, "step")
            if known is not None and known.result is not None:
                opened = self.worker.codecs.open(known.result, known.encoding)
                return _OUTCOME.decode(opened)  # type: ignore[no-any-return]
            found = (await self.worker.engine.read_outcomes([run.execution_id])).get(run.execution_id)
            if found is not None:
                sealed, encoding = self.worker.codecs.seal(_OUTCOME.encode(found) or b"")
                await self._record(NewStep(name=name, n=n, result=sealed, encoding=encoding))
            return found

        outcome = self.in_thread(look())
        if outcome is None:
            self.wants_park = (None, run.execution_id)
            raise Interrupted("waits for another execution")
        client = self.worker.client
        return result_of(run.execution_id, outcome, client.result_type(run.kind), client.codecs)

    # The end

    def stop(self, reason: str) -> None:
        """Stop the handler: its tasks are cancelled, a plain one is unwound at its next line."""
        self.is_stopping = True
        self.stop_reason = reason
        if self.asyncio_task is not None:
            self.asyncio_task.cancel(reason)
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
        self._memory = None
        self._memory_loading = None
        self._memory = Memory(
            await self.worker.reports.load_steps(self.claimed.execution_id),
            self.claimed.retry_count + self.claimed.replay_count,
        )

    def steps_left_out(self) -> StepsChanged | None:
        """The error for a handler that ended without steps it had done before."""
        if self._memory is None or self.task.steps == "lenient":
            return None
        names = self._memory.not_reached()
        if not names:
            return None
        return StepsChanged(
            f"an earlier run did {', '.join(map(repr, names))} and this one ended without:"
            " the code was changed while the execution was under way",
            execution_id=self.claimed.execution_id,
        )


_OUTCOME = ValueType.of(Outcome)


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
