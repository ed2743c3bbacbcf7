"""What `make bench` shows: each metric compares two series and may have a target.

A series is a figure that some trial measures again in every repetition (`floor.drain`, in jobs per second).
A metric is the median of our series over the median of the other one; without another one, the median itself.
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
    theirs: str | None
    unit: str
    target: Target | None = None


def _at_least(value: float) -> Target:
    return Target("at least", value)


def _at_most(value: float) -> Target:
    return Target("at most", value)


_PEERS = ("pgqueuer", "awa")


def _beside(name: str, ours: str, word: str, theirs: str, unit: str, **targets: Target) -> list[Metric]:
    """The same figure beside every peer: `NAME.WORD_pgqueuer` and so on."""
    return [Metric(f"{name}.{word}_{p}", ours, theirs.format(p), unit, targets.get(p)) for p in _PEERS]


METRICS = (
    Metric("engine.drain.of_floor", "engine.drain", "floor.drain", "jobs/s", _at_least(0.35)),
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
    Metric("task.drain1.of_raw", "task.drain1", "raw.drain1", "jobs/s"),
    *_beside("task.drain1", "task.drain1", "of", "{}.drain1", "jobs/s", pgqueuer=_at_least(1.2)),
    *_beside("task.drain2", "task.drain2", "of", "{}.drain2", "jobs/s", pgqueuer=_at_least(1.2)),
    *_beside("task.cpu", "task.drain1.cpu", "over", "{}.drain1.cpu", "µs of worker CPU/job"),
    *_beside("task.commits", "task.drain1.commits", "over", "{}.drain1.commits", "commits/job"),
    *_beside("task.wal", "task.drain1.wal", "over", "{}.drain1.wal", "bytes of WAL/job, fill + drain"),
    *_beside("task.dead", "task.drain1.dead", "over", "{}.drain1.dead", "dead rows/job"),
    *_beside("task.stored", "task.drain1.stored", "over", "{}.drain1.stored", "bytes stored/job"),
    Metric("task.steps.of_absurd", "task.steps", "absurd.steps", "runs/s", _at_least(8.0)),
    Metric("task.steps.of_absurd_threads", "task.steps", "absurd.steps_threads", "runs/s"),
    Metric("task.steps.of_dbos", "task.steps", "dbos.steps", "runs/s", _at_least(20.0)),
    Metric("task.steps.of_raw_shared", "task.steps", "raw.steps_shared", "runs/s", _at_least(0.4)),
    Metric("task.steps.of_raw_alone", "task.steps", "raw.steps_alone", "runs/s"),
    Metric("task.latency.over_raw", "task.latency", "raw.latency", "ms", _at_most(2.0)),
    *_beside("task.latency", "task.latency", "over", "{}.latency", "ms"),
    Metric("task.latency_p99.over_raw", "task.latency.p99", "raw.latency.p99", "ms"),
    *_beside("task.latency_p99", "task.latency.p99", "over", "{}.latency.p99", "ms"),
    Metric("task.submit_one.of_raw", "task.submit_one", "raw.submit_one", "jobs/s"),
    *_beside("task.submit_one", "task.submit_one", "of", "{}.submit_one", "jobs/s", pgqueuer=_at_least(1.0)),
    *_beside("task.submit_many", "task.submit_many", "of", "{}.submit_many", "jobs/s", pgqueuer=_at_least(1.3)),
    Metric("task.crash.unreported", "task.crash.unreported", None, "results lost, largest of several kills"),
    Metric("task.crash.typical", "task.crash.typical", None, "results lost, median of several kills"),
    Metric("task.crash.blocked", "task.crash.blocked", None, "results lost, reports blocked"),
    Metric("stream.append_many.of_raw", "stream.append_many", "raw.append_many", "frames/s", _at_least(0.4)),
    Metric("stream.append_one.of_raw", "stream.append_one", "raw.append_one", "calls/s", _at_least(0.5)),
    Metric("stream.append.full_of_empty", "stream.append_full", "stream.append_empty", "frames/s", _at_least(0.9)),
    Metric("stream.append.pinned_of_plain", "stream.append_pinned", "stream.append_empty", "frames/s", _at_least(0.8)),
    Metric("stream.task.of_dbos", "stream.task", "dbos.stream", "handlers/s", _at_least(20)),
    Metric("stream.tails500.of_none", "stream.drain_tails500", "stream.drain_tails0", "jobs/s", _at_least(0.95)),
    Metric("stream.tail.over_raw", "stream.tail", "raw.tail", "ms", _at_most(2.5)),
    Metric("stream.wal", "stream.wal", None, "bytes/frame"),
    Metric("stream.live.wal_of_durable", "stream.wal_live", "stream.wal", "bytes/frame", _at_most(0.2)),
    Metric("stream.summary.wal_of_rewrite", "stream.wal_delta", "stream.wal_rewrite", "bytes/delta", _at_most(0.15)),
    Metric("events.drain.followed_of_alone", "events.drain_followed", "events.drain_alone", "jobs/s", _at_least(0.85)),
    Metric("events.drain.firehose_of_alone", "events.drain_firehose", "events.drain_alone", "jobs/s", _at_least(0.5)),
    Metric("events.follow.of_raw", "events.follow", "raw.follow", "events/s", _at_least(0.4)),
    Metric("events.latency.over_raw", "events.latency", "raw.event_latency", "ms (p50)", _at_most(3.0)),
    Metric("events.follow.sparse_over_all", "events.follow.sparse_time", "events.follow.all_time", "s", _at_most(1.0)),
    Metric("http.submit16.of_floor", "http.submit16", "floor.http.submit16", "submissions/s", _at_least(0.9)),
    Metric("http.submit64.of_floor", "http.submit64", "floor.http.submit64", "submissions/s", _at_least(1.8)),
    Metric("http.submit1.over_floor", "http.submit1", "floor.http.submit1", "ms (p50)", _at_most(1.6)),
    Metric("http.submit_many.of_engine", "http.submit_many", "engine.http_submit_many", "rows/s", _at_least(0.5)),
    Metric("http.get.of_floor", "http.get", "floor.http.get", "records/s", _at_least(0.5)),
    Metric("http.sse1000.p99_over_bare", "http.sse1000.p99", "floor.sse1000.p99", "ms (p99)", _at_most(2.0)),
    Metric("http.sse1000.kib_per_client", "http.sse1000.kib", None, "KiB", _at_most(64.0)),
    *(
        Metric(f"limits.drain.{one}_of_plain", f"limits.drain_{one}", "limits.drain_plain", "jobs/s", _at_least(least))
        for one, least in (("budget", 0.8), ("quota", 0.45), ("spread", 0.35))
    ),
    *(
        Metric(f"limits.wal.{one}", f"limits.drain_{one}.wal", "limits.drain_plain.wal", "bytes/job, fill + drain")
        for one in ("budget", "quota", "spread")
    ),
    *(
        Metric(f"limits.commits.{one}", f"limits.drain_{one}.commits", "limits.drain_plain.commits", "commits/job")
        for one in ("budget", "quota", "spread")
    ),
    Metric("limits.claim_one.hot_of_plain", "limits.claim_hot", "limits.claim_plain", "claims/s", _at_least(0.3)),
    Metric("limits.claim_one.near_cap_of_plain", "limits.claim_near", "limits.claim_plain", "claims/s"),
    Metric("limits.drain.blocked_of_none", "limits.drain_held", "limits.drain_none", "jobs/s", _at_least(0.9)),
    Metric("limits.drain.mixed_pinned_of_plain", "limits.mixed_pinned", "limits.mixed_plain", "jobs/s", _at_least(0.6)),
    Metric("limits.aside.over_job", "limits.aside", "limits.aside_job", "µs", _at_most(1.0)),
    Metric("limits.overshoot", "limits.overshoot", None, "above a cap or hard limit", _at_most(0.0)),
    Metric("quota.handoff.over_latency", "quota.handoff", "quota.latency", "ms (p50)", _at_most(2.5)),
    Metric("quota.rate.of_allowed", "quota.rate", None, "starts/allowed starts", _at_least(0.95)),
    Metric("quota.rate.fullest_window", "quota.rate.fullest", None, "starts/allowed starts", _at_most(1.0)),
    Metric("budget.report.of_hot_row", "budget.report", "raw.hot_row", "reports/s", _at_least(0.5)),
    Metric("budget.report_many.of_single", "budget.report_many", "budget.report", "reports/s", _at_least(15.0)),
    Metric("budget.report.pinned_of_plain", "budget.report_pinned", "budget.report", "reports/s", _at_least(0.7)),
    Metric("budget.task.of_steps", "budget.task", "budget.steps", "runs/s", _at_least(0.7)),
    Metric("budget.resume.over_commit", "budget.resume", "raw.commit", "ms (p50)", _at_most(12.0)),
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
    Metric("flow.linear10.per_second", "flow.linear10.flows", None, "flows/s", _at_least(400.0)),
    Metric("flow.linear10.of_plain", "flow.linear10", "flow.plain10", "nodes/s", _at_least(0.4)),
    Metric("flow.fan1000.over_plain", "flow.fan1000.us", "flow.plain1000.us", "µs/node", _at_most(2.5)),
    Metric("flow.submit10k.over_raw", "flow.submit10k", "raw.submit10k", "ms", _at_most(4.0)),
    Metric("flow.cancel1000.ms", "flow.cancel1000", "reference.cancel1000", "ms (p99)", _at_most(1.0)),
    Metric("flow.cost10k_over_100", "flow.nodes10k.us", "flow.nodes100.us", "µs/node", _at_most(1.3)),
    Metric(
        "scale.claim.empty_pinned_over_plain",
        "scale.claim_empty.pinned",
        "scale.claim_empty.plain",
        "ms (p50)",
        _at_most(1.5),
    ),
    Metric(
        "scale.claim.busy_pinned_over_plain",
        "scale.claim_busy.pinned",
        "scale.claim_busy.plain",
        "ms (p50)",
        _at_most(1.5),
    ),
    Metric("scale.submit.pinned_over_plain", "scale.submit.pinned", "scale.submit.plain", "ms (p50)", _at_most(1.5)),
    Metric("scale.timers.pinned_over_plain", "scale.timers.pinned", "scale.timers.plain", "ms (p50)", _at_most(1.5)),
    Metric(
        "scale.audit.million_over_thousand", "scale.duties.million", "scale.duties.thousand", "ms/min", _at_most(1.5)
    ),
    Metric("scale.idle.tx_per_worker", "scale.idle.tx", None, "transactions/s", _at_most(2.0)),
    Metric("scale.idle.connections", "scale.idle.connections", None, "connections", _at_most(3.0)),
    Metric("scale.wake.claims", "scale.wake200.claims", None, "claims", _at_most(2.0)),
    Metric("scale.wake200.over_1", "scale.wake200.ms", "scale.wake1.ms", "ms (p50)", _at_most(2.0)),
    Metric("scale.wake.open_transaction", "scale.wake1_held.ms", "scale.wake1.ms", "ms (p50)", _at_most(1.5)),
    *(
        Metric(
            f"scale.{verb}.{what}1000_over_1",
            f"scale.{what}1000.{verb}",
            f"scale.{what}1.{verb}",
            "ms (p50)",
            _at_most(2.0),
        )
        for what in ("kinds", "lanes")
        for verb in ("claim", "idle")
    ),
    Metric("scale.wal.per_job", "task.drain1.wal", None, "bytes, fill + drain", _at_most(1900.0)),
    Metric("scale.wal.stored_per_job", "task.drain1.stored_without_events", None, "bytes", _at_most(800.0)),
    Metric("scale.idle200.of_none", "task.drain_beside200", "task.drain_beside0", "jobs/s", _at_least(0.9)),
    Metric("registry.workers1000.of_none", "registry.drain1000", "registry.drain0", "jobs/s", _at_least(0.95)),
    Metric("scale.suspended.all_duties_of_none", "wait.drain_suspended", "wait.drain_empty", "jobs/s", _at_least(0.9)),
    Metric("scale.drain2.of_drain1", "task.drain2", "task.drain1", "jobs/s", _at_least(1.0)),
    Metric("scale.cpu2.over_cpu1", "task.drain2.all_cpu", "task.drain1.all_cpu", "µs of CPU/job", _at_most(1.1)),
    *_beside("scale.cpu2", "task.drain2.all_cpu", "over", "{}.drain2.all_cpu", "µs of CPU/job"),
    Metric("scale.steps2.of_steps1", "task.steps2", "task.steps", "runs/s", _at_least(1.0)),
    Metric("scale.steps_cpu2.over_cpu1", "task.steps2.all_cpu", "task.steps.all_cpu", "µs of CPU/run", _at_most(1.1)),
    Metric("scale.sustained.p99_over_p50", "task.sustained.p99", "task.sustained.p50", "ms", _at_most(5.0)),
    *_beside("scale.sustained.p50", "task.sustained.p50", "over", "{}.sustained.p50", "ms"),
    *_beside("scale.sustained.p99", "task.sustained.p99", "over", "{}.sustained.p99", "ms"),
    *_beside("scale.sustained.max", "task.sustained.max", "over", "{}.sustained.max", "ms"),
    *_beside("scale.sustained.stored", "task.sustained.megabytes", "over", "{}.sustained.megabytes", "MB at the end"),
    Metric("held.p50.over_plain", "task.held.late_p50", "task.unheld.late_p50", "ms, last quarter"),
    Metric("held.p99.over_plain", "task.held.late_p99", "task.unheld.late_p99", "ms, last quarter"),
    *_beside("held.p50", "task.held.late_p50", "over", "{}.held.late_p50", "ms, last quarter"),
    *_beside("held.p99", "task.held.late_p99", "over", "{}.held.late_p99", "ms, last quarter"),
    *_beside("held.max", "task.held.max", "over", "{}.held.max", "ms"),
)

# What must be known to read the figures, by prefix.
NOTES = {
    "engine.drain": "engine.*: a loop that claims and completes, no worker. pinned: the last quarter of minutes of load"
    " beside a held transaction.",
    "task.": "task.*: whole default worker processes, all duties on.",
    "task.dead": "task.dead: rows of fill and drain that are left for a vacuum.",
    "task.stored": "task.stored: growth of all tables and indexes from before the fill to after the drain and a vacuum;"
    " awa deletes finished jobs within seconds, pgqueuer keeps a log of them, flowfabric all of them.",
    "task.crash": "task.crash.*: handlers that had ended, and whose results were lost, when a worker was killed.",
    "wait.claim": "wait.claim.*: a default worker started on a full queue, all duties on, the audit's round included.",
    "limits.drain": "limits.*: the loop of engine.*. quota: one open budget and one policy of 1,000 slots. spread: for"
    " every four jobs a budget, and a key with cap 4. mixed: the last quarter of minutes of load.",
    "limits.claim_one": "limits.claim_one: hot: a cap of 10,000; near_cap: of 500, 400 of them in use at the end.",
    "http.": "http.*: one process of `flowfabric server` with its defaults and API keys, beside one of Starlette on"
    " uvicorn with as many connections; both without a log of requests.",
    "quota.": "quota.*, budget.task, budget.resume: whole default worker processes, all duties on.",
    "flow.": "flow.*: the dispatcher that resolves edges commits asynchronously (synchronous_commit off in its own"
    " transactions). A crash of the server can undo the last 0.6 s of it; that is found pending and done again."
    " Completions of nodes commit synchronously.",
    "scale.cpu2": "scale.cpu2, scale.steps_cpu2: processor time of workers and server together.",
    "scale.idle200": "scale.idle200: 200 idle workers of another lane in one process, each with its own connections.",
    "registry.": "registry.*: a default worker drains beside 1,000 registered workers of another lane, each with a"
    " heartbeat every 20 s.",
    "scale.sustained": "scale.sustained.*: calls at fixed moments from 4 connections, one worker process each.",
    "held.": "held.*: the same load beside a REPEATABLE READ transaction with an id, open from before the first job.",
}
