"""The text of `/metrics`: counts and times of one or all processes of the server, and gauges of the database.

The series of engine calls, claims and duties are those of `flowfabric.middleware.METRICS`; `SERVER_METRICS` are the
server's own. Several processes share files (the multiprocess mode of `prometheus_client`), so that every process
reports those of all. The gauges of the database are the same for all readers: one query, kept for a few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from flowfabric.errors import FlowFabricError
from flowfabric.middleware.series import BUCKETS, CANCEL_BACKLOG, METRICS, Metric
from flowfabric.server.metrics_files import METRICS_DIRECTORY
from flowfabric.values.gauges import Gauges

if TYPE_CHECKING:
    from flowfabric.engine import Engine

log = logging.getLogger("flowfabric.server")
MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"

_KEPT: Final = 5.0  # seconds

REQUESTS: Final = "flowfabric_http_requests_total"
REQUEST_SECONDS: Final = "flowfabric_http_request_seconds"
IN_FLIGHT: Final = "flowfabric_http_in_flight"
CONNECTIONS: Final = "flowfabric_http_connections"
REFUSED: Final = "flowfabric_http_refused_total"
SSE_CLIENTS: Final = "flowfabric_sse_clients"
SHUTDOWN_TIMEOUTS: Final = "flowfabric_shutdown_timeouts_total"
DATABASE_UP: Final = "flowfabric_database_up"
LANE_DEPTH: Final = "flowfabric_lane_depth"
LANE_OLDEST: Final = "flowfabric_lane_oldest_seconds"
STATES: Final = "flowfabric_stored_executions"
BLOCKED: Final = "flowfabric_blocked"
WORKERS: Final = "flowfabric_workers"
SLOTS: Final = "flowfabric_slots"
DENIED: Final = "flowfabric_claims_denied_total"
SERVER_METRICS: Final[Mapping[str, Metric]] = {
    REQUESTS: Metric("counter", ("method", "path", "status"), "Requests, by the template of their path."),
    REQUEST_SECONDS: Metric(
        "histogram", ("method", "path"), "How long requests took, until the end of their answer; streams are left out."
    ),
    IN_FLIGHT: Metric("gauge", (), "Requests that are being answered, open streams and waiting polls among them."),
    CONNECTIONS: Metric("gauge", (), "Open connections of clients."),
    REFUSED: Metric(
        "counter",
        ("reason",),
        "Requests refused for a limit: `rate`, `connections`, `timeout`, `slow_body`, `slow_head`, `large_head`.",
    ),
    SSE_CLIENTS: Metric("gauge", (), "Clients of server-sent events."),
    SHUTDOWN_TIMEOUTS: Metric("counter", (), "Shutdowns whose requests did not end within the grace."),
}
# Read from the database.
STORED_METRICS: Final[Mapping[str, Metric]] = {
    DATABASE_UP: Metric("gauge", (), "1 if the database answered the query of these gauges, else 0."),
    LANE_DEPTH: Metric("gauge", ("lane",), "Executions that wait for a worker; exact up to 10,000 per kind."),
    LANE_OLDEST: Metric("gauge", ("lane",), "Age of the oldest of them, in seconds; 0 without one."),
    STATES: Metric(
        "gauge",
        ("state",),
        "Stored executions in a state; exact up to 10,000. Completed ones are not counted: there may be millions.",
    ),
    BLOCKED: Metric(
        "gauge", ("reason",), "Executions that wait for something else than a worker, by what; exact up to 10,000."
    ),
    WORKERS: Metric("gauge", (), "Workers that are alive."),
    SLOTS: Metric("gauge", (), "How many executions they can run at the same time."),
    CANCEL_BACKLOG: Metric("gauge", (), "Cancelled flows with members left to cancel."),
    DENIED: Metric(
        "counter",
        ("reason", "dimension"),
        "Executions that claims of the whole deployment found under a closed limit, since the schema was created:"
        " `budget` with its dimension, `rate`, `concurrency`.",
    ),
}
_OWN: Final = {**{name: one for name, one in METRICS.items() if name not in STORED_METRICS}, **SERVER_METRICS}


class ServerMetrics:
    """The counts and times of this process; a sink for the middleware `Metrics`."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for every series, which no panel uses
        self._registry = CollectorRegistry()
        self._collectors = {name: _collector(name, metric, self._registry) for name, metric in _OWN.items()}
        self._children: dict[tuple[str, ...], Any] = {}

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        key = (name, *labels.values())
        found = self._children.get(key)
        if found is None:
            collector = self._collectors[name]
            found = self._children[key] = collector.labels(**labels) if labels else collector
        return found

    def count(self, name: str, labels: Mapping[str, str], by: int = 1) -> None:
        """Increase a counter."""
        self._child(name, labels).inc(by)

    def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        """Record a duration."""
        self._child(name, labels).observe(seconds)

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Record a current value; what the database knows better is left to it."""
        if name not in STORED_METRICS:
            self._child(name, labels).set(value)

    def change(self, name: str, by: int, labels: Mapping[str, str]) -> None:
        """Change a gauge by an amount."""
        self._child(name, labels).inc(by)

    def text(self, stored: Gauges | None) -> bytes:
        """All series as text. `stored`: the gauges of the database; None: it did not answer."""
        registry = CollectorRegistry()
        registry.register(_Stored(stored))
        shown: list[Collector] = [registry]
        if METRICS_DIRECTORY in os.environ:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        else:
            shown.append(self._registry)
        return b"".join(prometheus_client.generate_latest(one) for one in shown)


def _collector(name: str, metric: Metric, registry: CollectorRegistry) -> Any:
    match metric.type:
        case "counter":
            return prometheus_client.Counter(name, metric.text, metric.labels, registry=registry)
        case "histogram":
            return prometheus_client.Histogram(name, metric.text, metric.labels, registry=registry, buckets=BUCKETS)
        case "gauge":
            # Of several processes one leads; of everything else there is as much as in all of them.
            mode: Any = "livemax" if name in METRICS else "livesum"
            return prometheus_client.Gauge(name, metric.text, metric.labels, registry=registry, multiprocess_mode=mode)


class _Stored(Collector):
    def __init__(self, gauges: Gauges | None) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Family]:
        for name, metric in STORED_METRICS.items():
            make = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = make(name, metric.text, labels=metric.labels)
            for labels, value in self._values(name):
                family.add_metric(labels, value)
            yield family

    def _values(self, name: str) -> Iterable[tuple[list[str], float]]:
        found = self._gauges
        if found is None:
            return [([], 0.0)] if name == DATABASE_UP else []
        match name:
            case "flowfabric_database_up":
                return [([], 1.0)]
            case "flowfabric_lane_depth":
                return [([lane.lane_id], lane.depth) for lane in found.lanes]
            case "flowfabric_lane_oldest_seconds":
                return [([lane.lane_id], lane.oldest_age.total_seconds()) for lane in found.lanes]
            case "flowfabric_stored_executions":
                return [([state], count) for state, count in found.states.items()]
            case "flowfabric_blocked":
                return [([reason], count) for reason, count in found.blocked.items()]
            case "flowfabric_workers":
                return [([], found.workers)]
            case "flowfabric_slots":
                return [([], found.slots)]
            case "flowfabric_claims_denied_total":
                budgets = [(["budget", dimension], count) for dimension, count in sorted(found.denials.budgets.items())]
                return [
                    *budgets,
                    (["rate", ""], found.denials.rate),
                    (["concurrency", ""], found.denials.concurrency),
                ]
            case _:
                return [([], found.cancelling_flows)]


class StoredGauges:
    """The gauges of the database, read at most once in a few seconds however often they are asked for."""

    def __init__(self, engine: Engine, kept: float = _KEPT) -> None:
        self._engine = engine
        self._kept = kept
        self._reading = asyncio.Lock()
        self._at = float("-inf")
        self._found: Gauges | None = None

    async def read(self) -> Gauges | None:
        """The gauges; None if the database does not answer."""
        async with self._reading:
            if time.monotonic() - self._at >= self._kept:
                try:
                    self._found = await self._engine.read_gauges()
                except FlowFabricError as error:
                    if not self._engine.outage.covers(error):
                        log.warning("the gauges of /metrics could not be read: %s", error)
                    self._found = None
                self._at = time.monotonic()
            return self._found
