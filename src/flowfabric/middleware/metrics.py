"""Counts and times of submissions, executions, engine calls and duties, and where they go.

`METRICS` is every series with its labels. Labels are few and known beforehand: kinds, method names, outcomes; never an
id. A sink that fails is reported once and never fails the work it measures.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from msgspec import Struct

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
from flowfabric.values.attempt import AttemptType, Claimed
from flowfabric.values.budget import HardBreach
from flowfabric.values.grant import Granted, ReclaimGranted
from flowfabric.values.graph import FlowSubmitted
from flowfabric.values.held import Denial
from flowfabric.values.quota import ConcurrencyExceeded, RateExceeded
from flowfabric.values.words import GroupRepair

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

log = logging.getLogger("flowfabric.middleware")

# Seconds. A call takes a fraction of a millisecond, an execution may take hours.
BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)


class Metric(NamedTuple):
    """A metric: its type, labels and help text."""

    type: Literal["counter", "histogram", "gauge"]
    labels: tuple[str, ...]
    text: str


SUBMITTED: Final = "flowfabric_submitted_total"
EXECUTIONS: Final = "flowfabric_executions_total"
EXECUTION_SECONDS: Final = "flowfabric_execution_seconds"
QUEUE_SECONDS: Final = "flowfabric_queue_seconds"
END_TO_END_SECONDS: Final = "flowfabric_end_to_end_seconds"
ATTEMPTS: Final = "flowfabric_attempts_total"
RENEWALS: Final = "flowfabric_renewals_total"
CALL_SECONDS: Final = "flowfabric_call_seconds"
DUTY_SECONDS: Final = "flowfabric_duty_seconds"
DUTY_ITEMS: Final = "flowfabric_duty_items_total"
DUTY_FAILURES: Final = "flowfabric_duty_failures_total"
LEADS: Final = "flowfabric_leads"
JOINS: Final = "flowfabric_edge_group_policy_total"
SIBLINGS: Final = "flowfabric_sibling_cancel_dispatched_total"
SIBLING_FATES: Final = "flowfabric_sibling_cancel_disposition_total"
SIBLING_REPAIRS: Final = "flowfabric_sibling_cancel_reconcile_total"
CANCEL_BACKLOG: Final = "flowfabric_cancel_backlog_depth"
CLAIM_SECONDS: Final = "flowfabric_claim_seconds"
CLAIMS: Final = "flowfabric_claims_total"
BUDGET_DENIALS: Final = "flowfabric_budget_denials_total"
QUOTA_DENIALS: Final = "flowfabric_quota_denials_total"
TOKEN_FAILURES: Final = "flowfabric_token_failures_total"  # noqa: S105 - no secret
METRICS: Final[Mapping[str, Metric]] = {
    SUBMITTED: Metric("counter", ("kind",), "Executions submitted, without those that existed already."),
    EXECUTIONS: Metric("counter", ("kind", "outcome"), "Runs of a handler, by outcome."),
    EXECUTION_SECONDS: Metric("histogram", ("kind",), "How long a handler ran."),
    QUEUE_SECONDS: Metric(
        "histogram", ("kind",), "Time from creation to the first start, including a requested delay."
    ),
    END_TO_END_SECONDS: Metric(
        "histogram", ("lane",), "Time from creation to the end of a handler that succeeded, waits and retries included."
    ),
    ATTEMPTS: Metric("counter", ("lane", "outcome"), "Runs of a handler by lane and outcome, without those that park."),
    RENEWALS: Metric(
        "counter",
        ("outcome",),
        "Renewals of leases: `ok`, `lost` to another owner or to none, `locked` by another transaction for the moment, "
        "or `error`.",
    ),
    CALL_SECONDS: Metric(
        "histogram", ("method", "outcome"), "How long an engine call took, including waiting for a connection."
    ),
    CLAIM_SECONDS: Metric(
        "histogram",
        ("lane",),
        "How long a claim took, with or without work or an error; one of several lanes counts for each.",
    ),
    CLAIMS: Metric(
        "counter",
        ("lane", "result"),
        "Executions claimed (`granted`, or `reclaim` after a lost lease), and lanes of claims that got none of them"
        " (`no_work`) or failed (`error`).",
    ),
    BUDGET_DENIALS: Metric(
        "counter",
        ("dimension",),
        "Reports and reservations that did not fit under a hard limit, and executions that claims found under an"
        " exhausted budget, by dimension. Claims are counted by the process that leads the duties.",
    ),
    QUOTA_DENIALS: Metric(
        "counter",
        ("limit",),
        "Refused calls of `check_admission`, and executions that claims found under a full quota: by `rate` or"
        " `concurrency`. Claims are counted by the process that leads the duties.",
    ),
    DUTY_SECONDS: Metric(
        "histogram", ("duty", "outcome"), "How long a round of a duty took; its count is the number of rounds."
    ),
    DUTY_ITEMS: Metric("counter", ("duty",), "Items that rounds of a duty handled."),
    DUTY_FAILURES: Metric("counter", ("duty",), "Items that a round could not handle, and rounds that failed."),
    TOKEN_FAILURES: Metric(
        "counter",
        ("method",),
        "Tokens of waitpoints that did not verify: missing, wrong, or of an expired key.",
    ),
    LEADS: Metric("gauge", ("group",), "1 while this process leads the group of duties, 0 afterwards."),
    JOINS: Metric("counter", ("policy",), "Joins of flows that were submitted or grew."),
    SIBLINGS: Metric("counter", ("reason",), "Executions that a decided join no longer needed, by why."),
    SIBLING_FATES: Metric("counter", ("disposition",), "The same, by what became of each."),
    SIBLING_REPAIRS: Metric("counter", ("action",), "Looks at queued cancels that a dispatcher may have left behind."),
    CANCEL_BACKLOG: Metric("gauge", (), "Cancelled flows with members left to cancel, after the last round."),
}

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


class MetricsSink(Protocol):
    """Receives the measurements. It is called on the event loop, so it must not block."""

    def count(self, name: str, labels: Mapping[str, str], by: int = 1) -> None:
        """Increase a counter."""

    def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        """Record a duration."""

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Record a current value."""


class Timing(Struct, frozen=True, kw_only=True):
    """All observations of one series. `buckets` counts those that took at most that many seconds."""

    count: int
    seconds: float
    longest: float
    buckets: dict[float, int]


class Snapshot(Struct, frozen=True, kw_only=True):
    """The totals of a `MemorySink`, by series: `flowfabric_executions_total{kind="send",outcome="ok"}`."""

    counts: dict[str, int]
    timings: dict[str, Timing]
    gauges: dict[str, float] = {}


class _Times:
    __slots__ = ("buckets", "longest", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.longest = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)


class MemorySink:
    """Keeps totals in this process; its size depends only on the number of series."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self._times: dict[tuple[str, tuple[tuple[str, str], ...]], _Times] = {}
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def count(self, name: str, labels: Mapping[str, str], by: int = 1) -> None:
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + by

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._gauges[name, tuple(sorted(labels.items()))] = value

    def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            times = self._times.get(key)
            if times is None:
                times = self._times[key] = _Times()
            times.seconds += seconds
            times.longest = max(times.longest, seconds)
            times.buckets[bisect_left(BUCKETS, seconds)] += 1

    def snapshot(self) -> Snapshot:
        """The totals so far."""
        with self._lock:
            return Snapshot(
                counts={_series(*key): value for key, value in self._counts.items()},
                timings={
                    _series(*key): Timing(
                        count=sum(times.buckets),
                        seconds=times.seconds,
                        longest=times.longest,
                        buckets=dict(zip(BUCKETS, accumulate(times.buckets), strict=False)),
                    )
                    for key, times in self._times.items()
                },
                gauges={_series(*key): value for key, value in self._gauges.items()},
            )

    def prometheus_text(self) -> str:
        """The totals so far in Prometheus' text format, for a program that serves them."""
        with self._lock:
            counts = {**self._counts, **self._gauges}
            times = {key: (list(accumulate(one.buckets)), one.seconds) for key, one in self._times.items()}
        lines: list[str] = []
        for name, metric in METRICS.items():
            found: list[str] = []
            for (of, labels), value in sorted(counts.items()):
                if of == name:
                    found.append(f"{_series(of, labels)} {value}")
            for (of, labels), (buckets, seconds) in sorted(times.items()):
                if of != name:
                    continue
                for bound, count in zip((*map(str, BUCKETS), "+Inf"), buckets, strict=True):
                    found.append(f"{_series(f'{of}_bucket', (*labels, ('le', bound)))} {count}")
                found += [
                    f"{_series(f'{of}_sum', labels)} {seconds}",
                    f"{_series(f'{of}_count', labels)} {buckets[-1]}",
                ]
            if found:
                lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.type}", *found]
        return "".join(f"{line}\n" for line in lines)


def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    pairs = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in labels)
    return f"{name}{{{pairs}}}"


_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

# Several apps of one process may share a registry, which accepts every name once.
_registered: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()
_registering = threading.Lock()


class PrometheusSink:
    """Reports to a registry of `prometheus_client`, by default the global one. Serving it is up to the program."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client  # noqa: PLC0415 - only programs that use it load it

        chosen = prometheus_client.REGISTRY if registry is None else registry
        with _registering:
            collectors = _registered.get(chosen)
            if collectors is None:
                collectors = {name: _collector(prometheus_client, name, chosen) for name in METRICS}
                _registered[chosen] = collectors
        self._collectors = collectors

    def count(self, name: str, labels: Mapping[str, str], by: int = 1) -> None:
        counter: Counter = self._collectors[name]
        counter.labels(**labels).inc(by)

    def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        histogram: Histogram = self._collectors[name]
        histogram.labels(**labels).observe(seconds)

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        gauge: Gauge = self._collectors[name]
        (gauge.labels(**labels) if labels else gauge).set(value)


def _collector(library: Any, name: str, registry: CollectorRegistry) -> Any:
    metric = METRICS[name]
    match metric.type:
        case "counter":
            return library.Counter(name, metric.text, metric.labels, registry=registry)
        case "histogram":
            return library.Histogram(name, metric.text, metric.labels, registry=registry, buckets=BUCKETS)
        case "gauge":
            return library.Gauge(name, metric.text, metric.labels, registry=registry)


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
