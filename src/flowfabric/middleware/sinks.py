"""Where measurements go: to totals in this process, or to a registry of `prometheus_client`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from msgspec import Struct

from flowfabric.middleware.series import BUCKETS, METRICS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


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
