"""Metrics and traces of the requests that the server answers."""

from __future__ import annotations

from flowfabric.server.metrics import IN_FLIGHT, REFUSED, REQUEST_SECONDS, REQUESTS, ServerMetrics
from flowfabric.server.tracing import RequestTraces


class Telemetry:
    """Counts requests; `traces` is None without OpenTelemetry."""

    def __init__(self, metrics: ServerMetrics, traces: RequestTraces | None = None) -> None:
        self.metrics = metrics
        self.traces = traces

    def began(self) -> None:
        """A request arrived."""
        self.metrics.change(IN_FLIGHT, 1, {})

    def request(self, method: str, route: str, status: int, seconds: float, *, streams: bool = False) -> None:
        """It was answered."""
        self.metrics.change(IN_FLIGHT, -1, {})
        self.metrics.count(REQUESTS, {"method": method, "path": route, "status": str(status)})
        if not streams:
            self.metrics.observe(REQUEST_SECONDS, seconds, {"method": method, "path": route})

    def refused(self, reason: str) -> None:
        """It was refused for a limit."""
        self.metrics.count(REFUSED, {"reason": reason})
