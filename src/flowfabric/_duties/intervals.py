"""How long duties sleep at most: set by an argument, else by the environment, else by each duty itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta

from flowfabric._duties.all import ALL
from flowfabric._duties.duty import Duty
from flowfabric.engine.checks import check_duration
from flowfabric.errors import InvalidInput
from flowfabric.settings import load_intervals
from flowfabric.values.durations import duration

log = logging.getLogger("flowfabric.duties")
_LEAST_MS = 100
_MOST = timedelta(days=1)
_OF_WORKERS = "schedules"  # a duty of processes that have an app


def intervals_of(given: Mapping[str, timedelta] | None, duties: Sequence[type[Duty]]) -> dict[str, timedelta]:
    """Return the intervals from the argument and the environment, by the name of the duty."""
    names = {duty.name for duty in (*ALL, *duties)} | {_OF_WORKERS}
    found = {}
    for name, text in load_intervals().items():
        variable = f"FLOWFABRIC_{name.upper()}_INTERVAL"
        if name not in names:  # it may be a duty of another program with the same environment
            log.warning("%s: this process has no duty called %s", variable, name)
            continue
        found[name] = _checked(duration(text, variable), variable)
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(
            f"got {type(given).__name__}", field="intervals", allowed="names of duties with their intervals"
        )
    for name, span in (given or {}).items():
        if name not in names:
            raise InvalidInput(f"no duty is called {name!r}", field="intervals", allowed=", ".join(sorted(names)))
        found[name] = _checked(span, f"intervals[{name!r}]")
    return found


def _checked(span: timedelta, field: str) -> timedelta:
    check_duration(span, field, least_ms=_LEAST_MS, most=_MOST)
    return span
