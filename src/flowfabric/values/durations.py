"""Spans of time in every form a caller may give: a timedelta, seconds, a string like "1h 30m"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, TypeAlias

from flowfabric.errors import InvalidInput

Duration: TypeAlias = timedelta | int | float | str
"""A span of time; a number means seconds, a string is like "90s", "1h 30m" or "2 days"."""

_UNITS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 604_800),
}
_SPAN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*,?")
# A century. Longer spans are mistakes (a timestamp taken for a duration), and would overflow a timestamp.
MAX_DURATION_MS: Final = 36_525 * 86_400_000
# The last millisecond of the year 9999, the end of `datetime`'s range.
MAX_TIMESTAMP_MS: Final = 253_402_300_799_999
MILLISECOND: Final = timedelta(milliseconds=1)


def as_timedelta(value: object, field: str) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        value = _seconds_in(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except (OverflowError, ValueError):
            pass
    raise InvalidInput(
        f"not a duration: {value!a}", field=field, allowed='a timedelta, a number of seconds, or text like "2 days"'
    )


def _seconds_in(text: str) -> float | str:
    """Return the seconds a text means, or the text itself if it is no duration."""
    total, at = 0.0, 0
    lowered = text.strip().lower()
    while at < len(lowered):
        part = _SPAN.match(lowered, at)
        if part is None or part[2] not in _UNITS or (not part[2] and part[0] != lowered):
            return text  # a bare number must be alone
        total += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return total if lowered else text


def duration(value: Duration, field: str) -> timedelta:
    """Convert any form of a duration to a timedelta; `InvalidInput` names the field."""
    return as_timedelta(value, field)


def duration_words(span: timedelta) -> str:
    """Return a duration for people: two units at most."""
    seconds = span.total_seconds()
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{sign}{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{sign}{whole} s"


def counted(count: int, noun: str) -> str:
    """Return `1 lease` or `2 leases`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
