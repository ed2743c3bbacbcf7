"""Who is measured with which settings: printed above every run, and the text of benchmarks/README.md."""

from __future__ import annotations

import inspect
from importlib import metadata

import flowfabric as ff

_PEERS = {
    "raw": "asyncpg on a bare table, SKIP LOCKED: claim 100, complete 100, 2 connections; what every queue has to pay",
    "pgqueuer": "AsyncpgDriver, uvloop, batch_size 100, enqueue of 1,000",
    "awa-pg": "queue storage, COPY enqueue, 1,024 workers, claims of 1,024, one completion shard, no deadlines, uvloop",
    "procrastinate": "pool 20, concurrency 10, uvloop, batch_defer of 500",
    "absurd-sdk": "sync worker, batch 100",
    "dbos": "worker_concurrency 200, polling 0.1 s, pool 4, 8 threads",
}
_SHOWN = ("concurrency", "connections", "lease_ttl", "poll", "ack", "duties")


def settings_of() -> dict[str, str]:
    """By name with version. Ours are read from the worker itself, so that they cannot differ from what it does."""
    defaults = inspect.signature(ff.Worker).parameters
    ours = ", ".join(f"{name} {_text(defaults[name].default)}" for name in _SHOWN if name in defaults)
    found = {f"flowfabric {ff.__version__}": f"default worker ({ours}), uvloop as its command line uses it"}
    for name, settings in _PEERS.items():
        found[name if name == "raw" else f"{name} {version(name)}"] = settings
    return found


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _text(default: object) -> str:
    return f"{default.total_seconds():g} s" if hasattr(default, "total_seconds") else str(default)
