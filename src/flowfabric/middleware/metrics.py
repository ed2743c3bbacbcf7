"""Counts and times of submissions, executions, engine calls and duties.

A sink that fails is reported once and never fails the work it measures.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from flowfabric.engine.siblings import SiblingPass
from flowfabric.engine.timers import Round
from flowfabric.errors import Contention, ExecutionNotActive, FlowFabricError, LeaseLost
from flowfabric.middleware.base import (
    Middleware,
    OutcomeWord,
    Run,
    Running,
    Submission,
    is_resumed,
    outcome_of,
)
from flowfabric.middleware.series import (
    ATTEMPTS,
    BUDGET_DENIALS,
    CALL_SECONDS,
    CANCEL_BACKLOG,
    CLAIM_SECONDS,
    CLAIMS,
    DUTY_FAILURES,
    DUTY_ITEMS,
    DUTY_SECONDS,
    END_TO_END_SECONDS,
    EXECUTION_SECONDS,
    EXECUTIONS,
    JOINS,
    LEADS,
    QUEUE_SECONDS,
    QUOTA_DENIALS,
    RENEWALS,
    SIBLING_FATES,
    SIBLING_REPAIRS,
    SIBLINGS,
    SUBMITTED,
    TOKEN_FAILURES,
)
from flowfabric.middleware.sinks import MemorySink, MetricsSink
from flowfabric.values.attempt import AttemptType, Claimed
from flowfabric.values.budget import HardBreach
from flowfabric.values.grant import Granted, ReclaimGranted
from flowfabric.values.graph import FlowSubmitted
from flowfabric.values.held import Denial
from flowfabric.values.quota import ConcurrencyExceeded, RateExceeded
from flowfabric.values.words import GroupRepair

log = logging.getLogger("flowfabric.middleware")
_DENIALS: Final = frozenset({HardBreach, Denial, RateExceeded, ConcurrencyExceeded})
_RENEWING: Final = frozenset({"renew", "renew_many", "renew_and_heartbeat"})
_CATEGORIES: Final = frozenset(
    {"not_found", "validation", "contention", "conflict", "state", "transport", "unavailable"}
)


def category(error: BaseException | None) -> str:
    """The outcome of an engine call: `ok`, the family of its error, `cancelled`, or `unknown`."""
    if isinstance(error, FlowFabricError) and error.family in _CATEGORIES:
        return error.family
    outcome = outcome_of(error)
    return outcome if outcome in ("ok", "cancelled") else "unknown"


def _results(answer: object, lanes: Sequence[str]) -> collections.Counter[tuple[str, str]]:
    """What a claim of these lanes returned, by lane and result."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for one in answer if isinstance(answer, list) else (answer,):
        match one:
            case Claimed():
                is_reclaim = one.attempt_type is AttemptType.RECLAIM
                found[one.handle.lane_id, "reclaim" if is_reclaim else "granted"] += 1
            case Granted():
                found[lanes[0], "granted"] += 1  # a claim of one lane
            case ReclaimGranted():
                found[lanes[0], "reclaim"] += 1
    served = {lane for lane, _ in found}
    found.update((lane, "no_work") for lane in lanes if lane not in served)
    return found


class Metrics(Middleware):
    """Measures submissions, executions, engine calls and duties; `sink` receives it all, by default a `MemorySink`."""

    def __init__(
        self,
        sink: MetricsSink | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.sink: MetricsSink = MemorySink() if sink is None else sink
        self._clock = clock
        self._now = now
        self._complained = False

    async def submit(self, submission: Submission, proceed: Callable[[Submission], Awaitable[Run]]) -> Run:
        run = await proceed(submission)
        if run.is_new:
            self._count(SUBMITTED, kind=submission.kind)
        return run

    async def execute(self, task: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        kind = task.kind
        # Later runs waited for something else, such as a retry's backoff or a signal.
        if task.attempt_index == 0 and not is_resumed(task):
            # The clocks of two machines: the difference may be negative.
            self._observe(QUEUE_SECONDS, max((self._now() - task.created_at).total_seconds(), 0.0), kind=kind)
        outcome: OutcomeWord = "ok"
        begun = self._clock()
        try:
            return await proceed()
        except BaseException as error:
            outcome = outcome_of(error, task)
            raise
        finally:
            self._observe(EXECUTION_SECONDS, self._clock() - begun, kind=kind)
            self._count(EXECUTIONS, kind=kind, outcome=outcome)
            if outcome != "parked":
                self._count(ATTEMPTS, lane=task.lane_id, outcome=outcome)
            if outcome == "ok":
                whole = max((self._now() - task.created_at).total_seconds(), 0.0)
                self._observe(END_TO_END_SECONDS, whole, lane=task.lane_id)

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        outcome = "ok"
        begun = self._clock()
        try:
            answer = await proceed()
        except BaseException as error:
            outcome = category(error)
            if isinstance(error, FlowFabricError) and error.kind == "invalid_token":
                self._count(TOKEN_FAILURES, method=method)
            raise
        else:
            self._count_flows(answer)
            self._count_denials(answer)
            if method in _RENEWING:
                self._count_renewals(answer[0] if isinstance(answer, tuple) else answer)
            if method == "probe_waitpoint" and answer == "mismatch":  # the early check of a callback
                self._count(TOKEN_FAILURES, method=method)
            return answer
        finally:
            self._observe(CALL_SECONDS, self._clock() - begun, method=method, outcome=outcome)

    def _count_renewals(self, answer: object) -> None:
        found: collections.Counter[str] = collections.Counter()
        for one in answer if isinstance(answer, list) else (answer,):
            match one:
                case LeaseLost() | ExecutionNotActive():
                    found["lost"] += 1
                case Contention(kind="execution_locked"):  # the worker tries again soon
                    found["locked"] += 1
                case FlowFabricError():
                    found["error"] += 1
                case _:
                    found["ok"] += 1
        for outcome, n in found.items():
            self._add(RENEWALS, n, outcome=outcome)

    def _count_flows(self, answer: object) -> None:
        """Count what the result of a call says about flows."""
        match answer:
            case FlowSubmitted():
                for policy, n in answer.joins.items():
                    self._add(JOINS, n, policy=policy)
            case SiblingPass():
                fates = {
                    "cancelled": answer.cancelled,
                    "already_terminal": answer.already_terminal,
                    "not_found": answer.not_found,
                    "failed": answer.failed,
                }
                self._add(SIBLINGS, sum(fates.values()), reason=answer.reason or "unknown")
                for fate, n in fates.items():
                    self._add(SIBLING_FATES, n, disposition=fate)
            case GroupRepair():
                self._add(SIBLING_REPAIRS, 1, action=answer.value)
            case Round(backlog=int() as depth):
                self._gauge(CANCEL_BACKLOG, depth)

    def _count_denials(self, answer: object) -> None:
        """Count what the result of a call says about limits. An overrun of a settlement is no denial."""
        for one in answer if isinstance(answer, list) else (answer,):
            if type(one) not in _DENIALS:
                continue
            match one:
                case HardBreach(overrun=0):
                    self._count(BUDGET_DENIALS, dimension=one.dimension)
                case Denial(reason="budget"):
                    self._add(BUDGET_DENIALS, one.count, dimension=one.dimension)
                case Denial():
                    self._add(QUOTA_DENIALS, one.count, limit=one.reason)
                case RateExceeded():
                    self._count(QUOTA_DENIALS, limit="rate")
                case ConcurrencyExceeded():
                    self._count(QUOTA_DENIALS, limit="concurrency")

    async def claim(self, lanes: Sequence[str], proceed: Callable[[], Awaitable[Any]]) -> Any:
        begun = self._clock()
        results: collections.Counter[tuple[str, str]] = collections.Counter((lane, "error") for lane in lanes)
        try:
            answer = await proceed()
        except asyncio.CancelledError:
            results.clear()
            raise
        else:
            results = _results(answer, lanes)
            return answer
        finally:
            for lane in lanes:
                self._observe(CLAIM_SECONDS, self._clock() - begun, lane=lane)
            for (lane, result), n in results.items():
                self._add(CLAIMS, n, lane=lane, result=result)

    async def duty(self, name: str, proceed: Callable[[], Awaitable[Round]]) -> Round:
        outcome = "ok"
        begun = self._clock()
        try:
            done = await proceed()
        except BaseException as error:
            outcome = category(error)
            if outcome != "cancelled":
                self._add(DUTY_FAILURES, 1, duty=name)
            raise
        else:
            self._add(DUTY_ITEMS, done.handled, duty=name)
            self._add(DUTY_FAILURES, done.failed, duty=name)
            return done
        finally:
            self._observe(DUTY_SECONDS, self._clock() - begun, duty=name, outcome=outcome)

    def leads(self, group: str, is_ours: bool) -> None:
        self._gauge(LEADS, float(is_ours), group=group)

    def _gauge(self, name: str, value: float, **labels: str) -> None:
        try:
            self.sink.gauge(name, value, labels)
        except Exception:
            self._complain()

    def _add(self, name: str, by: int, **labels: str) -> None:
        if by:
            try:
                self.sink.count(name, labels, by)
            except Exception:
                self._complain()

    def _count(self, name: str, **labels: str) -> None:
        try:
            self.sink.count(name, labels)
        except Exception:
            self._complain()

    def _observe(self, name: str, seconds: float, **labels: str) -> None:
        try:
            self.sink.observe(name, seconds, labels)
        except Exception:
            self._complain()

    def _complain(self) -> None:
        if not self._complained:
            self._complained = True
            log.exception("%s failed; its measurements are lost", type(self.sink).__name__)
