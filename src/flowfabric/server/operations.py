"""The table of operations: everything that `/v1` offers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from flowfabric.server.operation import Operation

_CHAPTERS: Final = (
    "executions", "control", "bulk", "waits", "links", "flows", "lanes", "schedules", "budgets", "quotas", "streams",
    "events", "consumers", "workers", "admin", "failures", "outside",
)  # fmt: skip


def _all() -> tuple[Operation, ...]:
    found: list[Operation] = []
    for chapter in _CHAPTERS:
        name = f"flowfabric.server.routes.{chapter}"
        if find_spec(name) is not None:
            found += import_module(name).OPERATIONS
    return tuple(found)


OPERATIONS: Final[tuple[Operation, ...]] = _all()
BY_NAME: Final[Mapping[str, Operation]] = {one.name: one for one in OPERATIONS}

# Operations of `Engine` that no route offers, and why.
NOT_BEHIND_HTTP: Final[Mapping[str, str]] = {}
