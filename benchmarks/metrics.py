"""What `make bench` shows: each metric compares two series and may have a target.

A series is a figure that some trial measures again in every repetition (`floor.drain`, in jobs per second).
A metric is the median of our series over the median of the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    bound: Literal["at least", "at most"]
    value: float

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.value if self.bound == "at least" else ratio <= self.value


@dataclass(frozen=True)
class Metric:
    name: str
    ours: str
    theirs: str
    unit: str
    target: Target | None = None


def _at_least(value: float) -> Target:
    return Target("at least", value)


def _at_most(value: float) -> Target:
    return Target("at most", value)


METRICS = (
    Metric("engine.drain.of_floor", "engine.drain", "floor.drain", "jobs/s", _at_least(0.35)),
    Metric("engine.drain.of_pgqueuer", "engine.drain", "pgqueuer.drain", "jobs/s", _at_least(1.3)),
    Metric("engine.drain.of_procrastinate", "engine.drain", "procrastinate.drain", "jobs/s"),
    Metric("engine.create_many.of_raw", "engine.create_many", "raw.create_many", "rows/s", _at_least(0.5)),
    Metric("engine.create_one.of_raw", "engine.create_one", "raw.create_one", "calls/s", _at_least(0.5)),
    Metric("engine.claim_one.of_raw", "engine.claim_one", "raw.claim_one", "calls/s", _at_least(0.4)),
    Metric("engine.complete_one.of_raw", "engine.complete_one", "raw.complete_one", "calls/s", _at_least(0.5)),
    Metric("engine.drain.full_of_empty", "engine.drain_full", "engine.drain_empty", "jobs/s", _at_least(0.8)),
    Metric("engine.drain.pinned_of_plain", "engine.drain_pinned", "engine.drain_plain", "jobs/s", _at_least(0.7)),
    Metric(
        "engine.claim_p99.pinned_over_plain",
        "engine.claim_p99_pinned",
        "engine.claim_p99_plain",
        "ms",
        _at_most(3.0),
    ),
    Metric("task.drain1.of_pgqueuer", "task.drain1", "pgqueuer.drain1", "jobs/s", _at_least(1.2)),
    Metric("task.drain2.of_pgqueuer", "task.drain2", "pgqueuer.drain2", "jobs/s", _at_least(1.2)),
    Metric("task.drain1.cpu_of_pgqueuer", "task.drain1.cpu", "pgqueuer.drain1.cpu", "µs of worker CPU/job"),
    Metric("task.drain1.wal_of_pgqueuer", "task.drain1.wal", "pgqueuer.drain1.wal", "bytes of WAL/job"),
    Metric("task.drain1.commits_of_pgqueuer", "task.drain1.commits", "pgqueuer.drain1.commits", "commits/job"),
    Metric("task.steps.of_absurd", "task.steps", "absurd.steps", "runs/s", _at_least(8.0)),
    Metric("task.steps.of_absurd_threads", "task.steps", "absurd.steps_threads", "runs/s"),
    Metric("task.steps.of_dbos", "task.steps", "dbos.steps", "runs/s", _at_least(20.0)),
    Metric("task.steps.of_raw_shared", "task.steps", "raw.steps_shared", "runs/s"),
    Metric("task.steps.of_raw_alone", "task.steps", "raw.steps_alone", "runs/s"),
    Metric("task.latency.over_raw", "task.latency", "raw.latency", "ms", _at_most(2.0)),
    Metric("task.latency.over_pgqueuer", "task.latency", "pgqueuer.latency", "ms"),
    Metric("task.submit_many.of_pgqueuer", "task.submit_many", "pgqueuer.submit_many", "jobs/s", _at_least(1.3)),
    Metric("wait.resume.over_commit", "wait.resume", "raw.commit", "ms", _at_most(12.0)),
    Metric("wait.resume.suspend_over_commit", "wait.resume.suspend", "raw.commit", "ms"),
    Metric("wait.resume.signal_over_commit", "wait.resume.signal", "raw.commit", "ms"),
    Metric("wait.signal.of_commit", "wait.signal", "raw.commits", "signals/s", _at_least(0.4)),
    Metric(
        "wait.claim.million_suspended_of_none",
        "wait.drain_suspended",
        "wait.drain_empty",
        "jobs/s",
        _at_least(0.9),
    ),
    Metric("flow.linear10.per_second", "flow.linear10.flows", "one", "flows/s", _at_least(400.0)),
    Metric("flow.linear10.of_plain", "flow.linear10", "flow.plain10", "nodes/s", _at_least(0.4)),
    Metric("flow.fan1000.over_plain", "flow.fan1000.us", "flow.plain1000.us", "µs/node", _at_most(2.5)),
    Metric("flow.submit10k.over_raw", "flow.submit10k", "raw.submit10k", "ms", _at_most(4.0)),
    Metric("flow.cancel1000.ms", "flow.cancel1000", "reference.cancel1000", "ms (p99)", _at_most(1.0)),
    Metric("flow.cost10k_over_100", "flow.nodes10k.us", "flow.nodes100.us", "µs/node", _at_most(1.3)),
)
