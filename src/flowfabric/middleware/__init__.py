"""Middleware: your code around submissions, handlers, engine calls and background duties.

Ships with tracing, metrics, logging, a rate limiter and a circuit breaker. A middleware sees only this process, so
correctness across processes must not depend on it.
"""

from __future__ import annotations

from flowfabric.middleware.base import (
    DutyHooks,
    Middleware,
    Run,
    Running,
    Submission,
    chain_execute,
    chain_submit,
    check_middlewares,
    overriding,
)
from flowfabric.middleware.layered import layer
from flowfabric.middleware.limits import CircuitBreaker, CircuitOpen, RateLimit, RateLimited
from flowfabric.middleware.logs import JsonFormatter, Logging
from flowfabric.middleware.metrics import Metrics
from flowfabric.middleware.series import METRICS
from flowfabric.middleware.sinks import MemorySink, MetricsSink, PrometheusSink, Snapshot, Timing
from flowfabric.middleware.tracing import Tracing
from flowfabric.values.options import Options

__all__ = [
    "METRICS",
    "CircuitBreaker",
    "CircuitOpen",
    "DutyHooks",
    "JsonFormatter",
    "Logging",
    "MemorySink",
    "Metrics",
    "MetricsSink",
    "Middleware",
    "Options",
    "PrometheusSink",
    "RateLimit",
    "RateLimited",
    "Run",
    "Running",
    "Snapshot",
    "Submission",
    "Timing",
    "Tracing",
    "chain_execute",
    "chain_submit",
    "check_middlewares",
    "layer",
    "overriding",
]
