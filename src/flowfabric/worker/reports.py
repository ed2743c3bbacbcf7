"""Batched calls of executions: results, failures, frames, and steps to record or read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.errors import ExecutionNotActive, FlowFabricError, InvalidInput, LeaseLost, NotFound
from flowfabric.values.attempt import Completed, Completion, Failure
from flowfabric.values.budget import UsageAnswer, UsageCall
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Handle
from flowfabric.values.step import NewStep, Step
from flowfabric.values.stream import Appended
from flowfabric.worker import told
from flowfabric.worker.batching import Batcher

if TYPE_CHECKING:
    from flowfabric.worker.durable.emitting import Emission
    from flowfabric.worker.durable.running import Running
    from flowfabric.worker.worker import Worker

_GONE = (LeaseLost, ExecutionNotActive, NotFound)


class Reports:
    """The calls that many executions share. `each`: one call for every result and failure."""

    def __init__(self, worker: Worker, *, each: bool, lines: int) -> None:
        self._worker = worker
        self._engine = worker.engine
        limit, lines = (1, lines) if each else (1000, 1)
        is_reported = worker.engine.outage.covers
        self._completions: Batcher[tuple[Running, Completion], Completed] = Batcher(
            "completions",
            self._complete,
            self._completed,
            weigh=lambda item: len(item[1].result or b""),
            limit=limit,
            lines=lines,
            is_reported=is_reported,
        )
        self._failures: Batcher[tuple[Running, Failure], Any] = Batcher(
            "failures",
            self._fail,
            self._failed,
            weigh=lambda item: len(item[1].reason),
            limit=limit,
            is_reported=is_reported,
        )
        self._records: Batcher[_Record, datetime | None] = Batcher(
            "steps",
            self._record_steps,
            _answer,
            weigh=lambda item: len(item.step.result or b""),
            is_reported=is_reported,
        )
        self._reads: Batcher[_Read, list[Step]] = Batcher(
            "step reads", self._read_steps, _answer, weigh=lambda _: 1 << 16, is_reported=is_reported
        )
        self._outcomes: Batcher[_Read, Outcome | None] = Batcher(
            "outcomes", self._read_outcomes, _answer, weigh=lambda _: 1 << 12, is_reported=is_reported
        )
        self._frames: Batcher[Emission, Appended | None] = Batcher(
            "frames",
            self._append,
            _emitted,
            weigh=lambda item: len(item.frame.payload) + 100,
            is_reported=is_reported,
        )
        self._uses: Batcher[_Use, UsageAnswer] = Batcher(
            "usage", self._use_budgets, _answer, weigh=lambda _: 1 << 9, is_reported=is_reported
        )

    @property
    def pending(self) -> int:
        """How many results wait to be reported."""
        return self._completions.pending

    async def flushed(self, timeout: float | None = None) -> bool:
        """Wait until all results and failures are reported; False if that takes too long."""
        until = None if timeout is None else time.monotonic() + timeout
        for batcher in (self._completions, self._failures):  # in this order: a result may become a failure
            if not await batcher.flushed(None if until is None else max(until - time.monotonic(), 0.001)):
                return False
        return True

    def close(self) -> None:
        """Give up on results that could not be reported."""
        for batcher in (
            self._frames,
            self._completions,
            self._failures,
            self._records,
            self._reads,
            self._outcomes,
            self._uses,
        ):
            batcher.close()

    # Results and failures

    def complete(self, running: Running, result: bytes | None, encoding: str | None) -> None:
        self._completions.put((running, Completion(running.handle, result, encoding)))

    async def _complete(self, items: Sequence[tuple[Running, Completion]]) -> Sequence[Completed | FlowFabricError]:
        return await self._engine.complete_many([completion for _, completion in items])

    def _completed(self, item: tuple[Running, Completion], verdict: Completed | FlowFabricError) -> None:
        running, _ = item
        if not isinstance(verdict, FlowFabricError):
            told.succeeded(running)
        elif isinstance(verdict, _GONE):
            told.stopped(running, verdict, "its result is not stored")
        elif verdict.retryable:
            told.say(logging.WARNING, running, "its result could not be stored, so it will run again: %s", verdict)
        else:
            # The result cannot be stored, so the attempt failed.
            reason = f"the result cannot be stored: {verdict}"
            never = isinstance(verdict, InvalidInput)
            failure_class = "permanent" if never else "transient"
            self.fail(
                running,
                Failure(authority=running.handle, reason=reason, failure_class=failure_class, category="bad_result"),
            )
            return
        self._worker.handlers.let_go(running)
        if not self._completions.pending:
            self._worker.slot_free.set()

    def fail(self, running: Running, failure: Failure) -> None:
        self._failures.put((running, failure))

    async def _fail(self, items: Sequence[tuple[Running, Failure]]) -> Sequence[Any]:
        return await self._engine.fail_many([failure for _, failure in items])

    def _failed(self, item: tuple[Running, Failure], verdict: Any) -> None:
        running, failure = item
        is_refused = isinstance(verdict, FlowFabricError) and not isinstance(verdict, _GONE) and not verdict.retryable
        if is_refused and failure.retry_policy is not None:
            # Reporting must not fail: without the requested retry, the failure is accepted.
            told.say(logging.WARNING, running, "the retry it asks for is not possible: %s", verdict)
            self.fail(running, msgspec.structs.replace(failure, retry_policy=None))
            return
        self._worker.handlers.let_go(running)
        if isinstance(verdict, _GONE):
            told.stopped(running, verdict, "its failure is not stored")
        elif isinstance(verdict, FlowFabricError):
            told.say(logging.WARNING, running, "its failure could not be stored, so it will run again: %s", verdict)
        else:
            told.failed(running, failure, verdict)

    # Frames

    def emit(self, emission: Emission) -> None:
        """Append a frame, with those of other handlers."""
        self._frames.put(emission)

    async def _append(self, items: Sequence[Emission]) -> Sequence[Appended | FlowFabricError | None]:
        return await self._engine.append_frames([(item.running.handle, item.frame) for item in items])

    # Steps

    def record(self, handle: Handle, step: NewStep) -> asyncio.Future[datetime | FlowFabricError | None]:
        """Record a step, after all that were given here before."""
        item = _Record(handle, step, self._worker.loop.create_future())
        self._records.put(item)
        return item.answer

    async def _record_steps(self, items: Sequence[_Record]) -> Sequence[datetime | FlowFabricError | None]:
        return await self._engine.record_steps([(item.handle, item.step) for item in items])

    # Budgets

    async def use(self, call: UsageCall) -> UsageAnswer | FlowFabricError:
        """Report, reserve, settle or give back, with the calls of other handlers."""
        item = _Use(call, self._worker.loop.create_future())
        self._uses.put(item)
        answer: UsageAnswer | FlowFabricError = await item.answer
        return answer

    async def _use_budgets(self, items: Sequence[_Use]) -> Sequence[UsageAnswer | FlowFabricError]:
        return await self._engine.use_budgets([item.call for item in items])

    # Reads

    async def load_steps(self, execution_id: ExecutionId) -> list[Step]:
        """Return the recorded steps of an execution."""
        item = _Read(execution_id, self._worker.loop.create_future())
        self._reads.put(item)
        found: list[Step] | FlowFabricError = await item.answer
        if isinstance(found, FlowFabricError):
            raise found
        return found

    async def _read_steps(self, items: Sequence[_Read]) -> Sequence[list[Step] | FlowFabricError]:
        found: dict[ExecutionId, list[Step]] = {item.execution_id: [] for item in items}
        for step in await self._engine.read_steps(list(found)):
            found[step.execution_id].append(step)
        return [found[item.execution_id] for item in items]

    async def outcome(self, execution_id: ExecutionId) -> Outcome | None:
        """Return how another execution ended; None if it has not."""
        item = _Read(execution_id, self._worker.loop.create_future())
        self._outcomes.put(item)
        found: Outcome | FlowFabricError | None = await item.answer
        if isinstance(found, FlowFabricError):
            raise found
        return found

    async def _read_outcomes(self, items: Sequence[_Read]) -> Sequence[Outcome | FlowFabricError | None]:
        found = await self._engine.read_outcomes(list({item.execution_id: None for item in items}))
        return [found.get(item.execution_id) for item in items]


class _Record:
    __slots__ = ("answer", "handle", "step")

    def __init__(self, handle: Handle, step: NewStep, answer: asyncio.Future[Any]) -> None:
        self.handle = handle
        self.step = step
        self.answer = answer


class _Read:
    __slots__ = ("answer", "execution_id")

    def __init__(self, execution_id: ExecutionId, answer: asyncio.Future[Any]) -> None:
        self.execution_id = execution_id
        self.answer = answer


class _Use:
    __slots__ = ("answer", "call")

    def __init__(self, call: UsageCall, answer: asyncio.Future[Any]) -> None:
        self.call = call
        self.answer = answer


def _answer(item: _Record | _Read | _Use, verdict: Any) -> None:
    if not item.answer.done():
        item.answer.set_result(verdict)


def _emitted(item: Emission, verdict: Appended | FlowFabricError | None) -> None:
    item.running.emitting.answered(item, verdict)
