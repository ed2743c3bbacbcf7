"""When a cron expression fires in its time zone.

It follows the local clock of the zone. Where that clock is moved, one of two rules applies (decision 16):

* An expression that names hours (`30 2 * * *`, `0 */2 * * *`, `*/15 2 * * *`) fires at the first moment when the local
  clock shows the time *or a later one*. In the hour that does not exist, 02:30 fires when the clock jumps, at 03:00;
  several times in that hour fire once. In the hour that exists twice, 02:30 fires the first time only. Nothing is
  skipped, nothing is doubled.
* An expression for every hour (`0 * * * *`, `*/15 * * * *`) fires whenever the local clock shows a matching time: in
  both passes of the hour that exists twice, and with no gap longer or shorter than on other days.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final
from zoneinfo import ZoneInfo, available_timezones

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Struct
from msgspec.structs import force_setattr

from flowfabric.errors import InvalidInput

MAX_EXPRESSION: Final = 256
NICKNAMES: Final[Mapping[str, str]] = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_FIELDS: Final = (
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day of month", "1 to 31, L for the last day, LW for the last weekday"),
    ("month", "1 to 12 or JAN to DEC"),
    ("day of week", "0 to 7 (0 and 7 are Sunday) or SUN to SAT, 5L for the last Friday, 5#2 for the second"),
)
_FORMS: Final = "also *, a-b, a,b and steps such as */5"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# An arbitrary but fixed day: whether an expression is accepted must not depend on today's date.
_PROBE: Final = datetime(2000, 1, 1)
_SECOND: Final = timedelta(seconds=1)
_HALF_DAY: Final = timedelta(hours=12)


class Cron(Struct, frozen=True):
    """Fires when the clock of `timezone` shows a time that matches `expression`.

    Five fields (minute, hour, day of month, month, day of week) or a nickname such as `@daily`. If both day
    fields are restricted, matching either one is enough, unless one of them begins with `*`, as in other crons.
    """

    expression: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if not isinstance(self.expression, str):
            raise InvalidInput(f"not text: {shown_text(self.expression)}", field="cron", allowed="a cron expression")
        force_setattr(self, "expression", _checked(self.expression))
        _zone(self.timezone)

    def next_after(self, moment: datetime) -> datetime | None:
        """The first fire time strictly after `moment`, in UTC; None when there is none before the year 10000."""
        moment = in_utc(moment, "moment")
        zone = _zone(self.timezone)
        fields = NICKNAMES.get(self.expression, self.expression)
        try:
            if zone is UTC or _is_for_every_hour(fields):
                return _when_shown(fields, zone, moment)
            return _when_reached(fields, zone, moment)
        except OverflowError:
            return None

    def to_builtins(self) -> dict[str, Any]:
        """The JSON form as an object; equal timings have equal forms."""
        return {"cron": self.expression, "timezone": self.timezone}

    def to_json(self) -> str:
        return msgspec.json.encode(self.to_builtins()).decode()


def _when_shown(fields: str, zone: tzinfo, moment: datetime) -> datetime:
    """The first moment later than `moment` at which the local clock shows a matching time."""
    shown = after = _local(moment, zone)
    match = _next_match(fields, after)
    while True:
        fires_at = moment + (match - shown)
        change = _first_change(zone, moment, fires_at)
        if change is None:
            return fires_at
        # The clock is moved before then, so search again from the change on, including its first second.
        moment, shown = change, _local(change, zone)
        earlier, after = after, shown - _SECOND
        if not earlier <= after < match:
            match = _next_match(fields, after)


def _when_reached(fields: str, zone: tzinfo, moment: datetime) -> datetime:
    """The first moment later than `moment` at which the local clock reaches a matching time for the first time."""
    match = _local(moment, zone)
    while True:
        match = _next_match(fields, match)
        fires_at = match.replace(tzinfo=zone).astimezone(UTC)
        if _local(fires_at, zone) != match:
            # The local clock jumps over it. The two readings of such a time lie on either side of the jump.
            before = match.replace(tzinfo=zone, fold=1).astimezone(UTC)
            fires_at = _first_change(zone, before, fires_at) or fires_at
        if fires_at > moment:
            return fires_at


def _next_match(fields: str, after: datetime) -> datetime:
    try:
        return next(CronSim(fields, after))
    except StopIteration:  # accepted expressions match within decades, so this is the end of the calendar
        raise OverflowError("no match") from None


def _local(moment: datetime, zone: tzinfo) -> datetime:
    """Return the naive local time of the zone; the hour that exists twice gives the same times twice."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def _first_change(zone: tzinfo, after: datetime, until: datetime) -> datetime | None:
    """The first moment later than `after` and not later than `until` at which the zone's clock is moved."""
    if zone is UTC:
        return None
    for year in range(after.year, until.year + 1):
        for change in _changes(zone, year):
            if after < change <= until:
                return change
    return None


@lru_cache(maxsize=1024)
def _changes(zone: tzinfo, year: int) -> tuple[datetime, ...]:
    """Every moment of a UTC year at which the zone's clock is moved. `zoneinfo` does not expose them."""
    found = []
    before = datetime(year, 1, 1, tzinfo=UTC) - _SECOND
    end = datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)
    while before < end:
        # No zone moves its clock twice within half a day.
        after = before + min(_HALF_DAY, end - before)
        offset = before.astimezone(zone).utcoffset()
        if after.astimezone(zone).utcoffset() != offset:
            low, high = before, after
            while high - low > _SECOND:
                middle = low + (high - low) // _SECOND // 2 * _SECOND
                if middle.astimezone(zone).utcoffset() == offset:
                    low = middle
                else:
                    high = middle
            found.append(high)
        before = after
    return tuple(found)


@lru_cache(maxsize=1024)
def _is_for_every_hour(fields: str) -> bool:
    return len(CronSim(fields, _PROBE).hours) == 24


@lru_cache(maxsize=1024)
def _checked(expression: str) -> str:
    """Return the expression with single spaces, or raise if it is invalid or never fires."""
    text = " ".join(expression.split())
    if len(text) > MAX_EXPRESSION:
        raise InvalidInput(f"{len(text)} characters", field="cron", allowed=f"at most {MAX_EXPRESSION}")
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            raise InvalidInput(f"no such nickname: {shown_text(text)}", field="cron", allowed=", ".join(NICKNAMES))
        return text.lower()
    fields = text.split()
    names = ", ".join(name for name, _ in _FIELDS)
    if len(fields) != len(_FIELDS):
        raise InvalidInput(f"{len(fields)} fields in {shown_text(text)}", field="cron", allowed=f"five fields: {names}")
    for place, (name, range_) in enumerate(_FIELDS):
        alone = ["*"] * len(_FIELDS)
        alone[place] = fields[place]
        try:
            CronSim(" ".join(alone), _PROBE)
        except CronSimError:
            raise InvalidInput(
                f"the {name} field is wrong: {shown_text(fields[place])}", field="cron", allowed=f"{range_}; {_FORMS}"
            ) from None
    try:
        next(CronSim(text, _PROBE))
    except (CronSimError, StopIteration):
        raise InvalidInput(
            f"{shown_text(text)} never fires: no such day is in these months", field="cron", allowed="days that exist"
        ) from None
    return text


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC  # needs no zone data
    if not isinstance(name, str):
        raise InvalidInput(f"not text: {shown_text(name)}", field="timezone", allowed=_ZONES)
    # "localtime" depends on the machine.
    if name not in ("", "localtime", "posixrules", "Factory") and not name.startswith(("posix/", "right/")):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            pass
    raise InvalidInput(f"unknown time zone {shown_text(name)}{_hint(name)}", field="timezone", allowed=_ZONES)


_ZONES: Final = "a name of the IANA time zone database such as Europe/Berlin, or UTC"


def _hint(name: str) -> str:
    known = available_timezones()
    if not known:
        return " (this machine has no time zone data: install the package tzdata)"
    lower = {zone.lower(): zone for zone in known}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=0.8)
    return f" (did you mean {lower[close[0]]}?)" if close else ""


def in_utc(moment: object, field: str) -> datetime:
    """The moment in UTC. Times before 1970 are refused: zones then had offsets with seconds."""
    if not isinstance(moment, datetime):
        raise InvalidInput(f"not a datetime: {shown_text(moment)}", field=field, allowed="an aware datetime")
    if moment.utcoffset() is None:
        raise InvalidInput(f"has no time zone: {moment.isoformat()}", field=field, allowed="an aware datetime")
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        utc = None
    if utc is None or utc < _EPOCH:
        raise InvalidInput(f"out of range: {moment.isoformat()}", field=field, allowed="a time from 1970 to 9999")
    return utc


def shown_text(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
