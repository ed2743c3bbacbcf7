"""When a recurring schedule fires: a cron expression in a time zone, or an interval. Values and pure functions.

`Cron` and `Every` are checked when they are made, so that a stored one always has an answer. Storing schedules, and
seeing to it that a time fires once however many processes look, belongs to others, as does the clock.

Daylight saving. The times of a cron expression are read on the local clock of its zone, by one of two rules:

* An expression that names hours (`30 2 * * *`, `0 */2 * * *`, `*/15 2 * * *`) fires at the first moment when the local
  clock shows the time *or a later one*. In the hour that does not exist, 02:30 fires when the clock jumps, at 03:00;
  several times in that hour are one firing. In the hour that exists twice, 02:30 fires the first time only. Nothing is
  skipped, nothing is doubled.
* An expression for every hour (`0 * * * *`, `*/15 * * * *`) fires whenever the local clock shows a matching time: in
  both passes of the hour that exists twice, and with no gap longer or shorter than on other days.

An interval counts elapsed time and knows no zone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args
from zoneinfo import ZoneInfo, available_timezones

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Struct
from msgspec.structs import force_setattr

from flowfabric.errors import Corruption, InvalidInput
from flowfabric.policies import MAX_DURATION_MS

CatchUp: TypeAlias = Literal["skip", "one", "all"]

MIN_INTERVAL: Final = timedelta(seconds=1)
MAX_INTERVAL: Final = timedelta(milliseconds=MAX_DURATION_MS)
MAX_EXPRESSION: Final = 256
PUNCTUAL: Final = timedelta(minutes=1)
"""A time that is reached at most this late has not been missed, whatever came before it."""

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
# Any day will do, but always the same one: whether an expression is taken must not depend on when it is given.
_PROBE: Final = datetime(2000, 1, 1)
_SECOND: Final = timedelta(seconds=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_HALF_DAY: Final = timedelta(hours=12)


class Cron(Struct, frozen=True):
    """Fires when the clock of `timezone` shows a time that matches `expression`.

    Five fields (minute, hour, day of month, month, day of week) or a nickname such as `@daily`. Where both days are
    restricted, either is enough, unless one of them begins with `*`, as in other crons.
    """

    expression: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if not isinstance(self.expression, str):
            raise InvalidInput(f"not text: {_shown(self.expression)}", field="cron", allowed="a cron expression")
        force_setattr(self, "expression", _checked(self.expression))
        _zone(self.timezone)

    def next_after(self, moment: datetime) -> datetime | None:
        """The first fire time strictly after `moment`, in UTC; None when there is none before the year 10000."""
        moment = _utc(moment, "moment")
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


class Every(Struct, frozen=True):
    """Fires at `anchor` and every `interval` after it, never before it.

    Without an anchor the count begins on 1 January 1970, 00:00 UTC: an hourly interval fires on the hour, and a
    schedule that is stored again keeps its times. A part of a millisecond in the interval is rounded up.
    """

    interval: timedelta
    anchor: datetime | None = None

    def __post_init__(self) -> None:
        interval = self.interval
        if not isinstance(interval, timedelta):
            raise InvalidInput(f"not a timedelta: {_shown(interval)}", field="every", allowed="a timedelta")
        if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
            raise InvalidInput(
                f"an interval of {interval.total_seconds():g} seconds", field="every", allowed="1 second to a century"
            )
        force_setattr(self, "interval", -(-interval // _MILLISECOND) * _MILLISECOND)
        if self.anchor is not None:
            force_setattr(self, "anchor", _utc(self.anchor, "anchor"))

    def next_after(self, moment: datetime) -> datetime | None:
        """The first fire time strictly after `moment`, in UTC; None when there is none before the year 10000."""
        anchor = self.anchor or _EPOCH
        passed = (_utc(moment, "moment") - anchor) // self.interval
        try:
            return anchor + max(0, passed + 1) * self.interval
        except OverflowError:
            return None

    def to_builtins(self) -> dict[str, Any]:
        """The JSON form as an object; equal timings have equal forms."""
        form: dict[str, Any] = {"every_ms": self.interval // _MILLISECOND}
        if self.anchor is not None:
            form["anchor"] = self.anchor.isoformat()
        return form

    def to_json(self) -> str:
        return msgspec.json.encode(self.to_builtins()).decode()


Timing: TypeAlias = Cron | Every


class _CronForm(Struct, forbid_unknown_fields=True):
    cron: str
    timezone: str = "UTC"


class _EveryForm(Struct, forbid_unknown_fields=True):
    every_ms: int
    anchor: datetime | None = None


def from_json(stored: str | bytes | Mapping[str, Any]) -> Timing:
    """The timing that `to_json` or `to_builtins` wrote.

    Raises `Corruption` when it is none, and `InvalidInput` when it is one that cannot be used here: a time zone this
    machine does not know.
    """
    try:
        form = msgspec.json.decode(stored) if isinstance(stored, str | bytes) else stored
        if isinstance(form, Mapping) and "cron" in form:
            cron = msgspec.convert(form, _CronForm)
            return Cron(cron.cron, cron.timezone)
        every = msgspec.convert(form, _EveryForm)
        return Every(timedelta(milliseconds=every.every_ms), every.anchor)
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        raise Corruption(f"not a stored timing: {error}") from None


def parse_timing(
    cron: str | None = None,
    every: timedelta | float | None = None,
    timezone: str | None = None,
    *,
    anchor: datetime | None = None,
) -> Timing:
    """The timing that was asked for by `cron` (with `timezone`, else UTC) or by `every` (with `anchor`).

    A plain number is seconds. Exactly one of the two must be given, and nothing that belongs to the other.
    """
    if cron is not None and every is not None:
        raise InvalidInput("given together with a cron expression", field="every", allowed="one of cron and every")
    if cron is not None:
        if anchor is not None:
            raise InvalidInput("given with a cron expression", field="anchor", allowed="only together with every")
        return Cron(cron, "UTC" if timezone is None else timezone)
    if every is None:
        raise InvalidInput("neither a cron expression nor an interval", field="cron", allowed="one of cron and every")
    if timezone not in (None, "UTC"):
        raise InvalidInput(
            "an interval counts elapsed time and has no zone", field="timezone", allowed="only together with cron"
        )
    if not isinstance(every, timedelta):
        allowed = "a timedelta or a number of seconds, 1 second to a century"
        if isinstance(every, bool) or not isinstance(every, int | float):
            raise InvalidInput(f"not a duration: {_shown(every)}", field="every", allowed=allowed)
        try:
            every = timedelta(seconds=every)
        except (OverflowError, ValueError):
            raise InvalidInput(f"not a duration: {_shown(every)}", field="every", allowed=allowed) from None
    return Every(every, anchor)


def missed(
    timing: Timing,
    *,
    due_at: datetime,
    now: datetime,
    catch_up: CatchUp,
    limit: int = 1000,
    tolerance: timedelta = PUNCTUAL,
) -> tuple[list[datetime], datetime | None]:
    """The fire times to create now, oldest first, and the next time to store, when `due_at` was stored as the next.

    Due are `due_at` and every fire time after it that is not later than `now`. Nothing is due: nothing to create, and
    `due_at` stays. Otherwise the next time is later than `now` (None: never again), with one exception under `all`.

    * `all`: every due time. At most `limit` at once; then the next time is the first that was left out, which is due
      already.
    * `one`: the latest due time, however late. After an outage the work is made up for once, immediately.
    * `skip`: the latest due time, but only when it has not been missed: when it is the only one due (a worker is
      always a little late, and late by less than one interval is not a miss), or when it is at most `tolerance` old.
      After an outage over several times nothing is made up for; the schedule goes on with its next regular time.

    An hourly schedule that was down from 09:30 to 12:20 creates 10:00, 11:00 and 12:00 under `all`, 12:00 under
    `one`, and under `skip` nothing before 13:00.
    """
    if catch_up not in get_args(CatchUp):
        raise InvalidInput(f"got {_shown(catch_up)}", field="catch_up", allowed=", ".join(get_args(CatchUp)))
    if limit < 1:
        raise InvalidInput(f"got {limit}", field="limit", allowed="1 or more")
    due_at, now = _utc(due_at, "due_at"), _utc(now, "now")
    if due_at > now:
        return [], due_at
    if catch_up == "all":
        times = [due_at]
        following = timing.next_after(due_at)
        while following is not None and following <= now and len(times) < limit:
            times.append(following)
            following = timing.next_after(following)
        return times, following
    latest, following = _latest(timing, due_at, now)
    if catch_up == "one" or latest == due_at or now - latest <= tolerance:
        return [latest], following
    return [], following


def _latest(timing: Timing, due_at: datetime, now: datetime) -> tuple[datetime, datetime | None]:
    """The last time due by `now`, and the first after it.

    By halves: after a year's outage a schedule of every second would be walked for minutes.
    """
    low, high = due_at, now
    following = timing.next_after(low)
    while following is not None and following <= now:
        middle = low + (high - low) // 2
        found = timing.next_after(middle)
        if found is None or found > now:
            high = middle
        else:
            low, following = found, timing.next_after(found)
    return low, following


def _when_shown(fields: str, zone: tzinfo, moment: datetime) -> datetime:
    """The first moment later than `moment` at which the local clock shows a matching time."""
    shown = after = _local(moment, zone)
    match = _next_match(fields, after)
    while True:
        fires_at = moment + (match - shown)
        change = _first_change(zone, moment, fires_at)
        if change is None:
            return fires_at
        # The clock is moved before then, so the same question is asked of the clock after the change, whose first
        # second counts too.
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
    except StopIteration:  # every expression that was taken matches within decades, so the calendar ends here
        raise OverflowError("no match") from None


def _local(moment: datetime, zone: tzinfo) -> datetime:
    """What the clock of the zone shows, bare: in the hour that exists twice, twice the same."""
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
    """Every moment of a UTC year at which the zone's clock is moved. `zoneinfo` knows them but does not tell."""
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
    """The expression with single spaces, once it is known to be one that fires."""
    text = " ".join(expression.split())
    if len(text) > MAX_EXPRESSION:
        raise InvalidInput(f"{len(text)} characters", field="cron", allowed=f"at most {MAX_EXPRESSION}")
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            raise InvalidInput(f"no such nickname: {_shown(text)}", field="cron", allowed=", ".join(NICKNAMES))
        return text.lower()
    fields = text.split()
    names = ", ".join(name for name, _ in _FIELDS)
    if len(fields) != len(_FIELDS):
        raise InvalidInput(f"{len(fields)} fields in {_shown(text)}", field="cron", allowed=f"five fields: {names}")
    for place, (name, range_) in enumerate(_FIELDS):
        alone = ["*"] * len(_FIELDS)
        alone[place] = fields[place]
        try:
            CronSim(" ".join(alone), _PROBE)
        except CronSimError:
            raise InvalidInput(
                f"the {name} field is wrong: {_shown(fields[place])}", field="cron", allowed=f"{range_}; {_FORMS}"
            ) from None
    try:
        next(CronSim(text, _PROBE))
    except (CronSimError, StopIteration):
        raise InvalidInput(
            f"{_shown(text)} never fires: no such day is in these months", field="cron", allowed="days that exist"
        ) from None
    return text


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC  # needs no zone data
    if not isinstance(name, str):
        raise InvalidInput(f"not text: {_shown(name)}", field="timezone", allowed=_ZONES)
    # "localtime" is whatever the machine is set to, and machines differ.
    if name not in ("", "localtime", "posixrules", "Factory") and not name.startswith(("posix/", "right/")):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            pass
    raise InvalidInput(f"unknown time zone {_shown(name)}{_hint(name)}", field="timezone", allowed=_ZONES)


_ZONES: Final = "a name of the IANA time zone database such as Europe/Berlin, or UTC"


def _hint(name: str) -> str:
    known = available_timezones()
    if not known:
        return " (this machine has no time zone data: install the package tzdata)"
    lower = {zone.lower(): zone for zone in known}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=0.8)
    return f" (did you mean {lower[close[0]]}?)" if close else ""


def _utc(moment: object, field: str) -> datetime:
    """The moment in UTC. Before 1970 zones kept local mean time to the second; nothing recurring begins there."""
    if not isinstance(moment, datetime):
        raise InvalidInput(f"not a datetime: {_shown(moment)}", field=field, allowed="an aware datetime")
    if moment.utcoffset() is None:
        raise InvalidInput(f"has no time zone: {moment.isoformat()}", field=field, allowed="an aware datetime")
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        utc = None
    if utc is None or utc < _EPOCH:
        raise InvalidInput(f"out of range: {moment.isoformat()}", field=field, allowed="a time from 1970 to 9999")
    return utc


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
