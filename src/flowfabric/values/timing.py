"""When a recurring schedule fires: a cron expression or an interval, and which missed times it makes up for.

`Cron` and `Every` are checked when they are created, so a stored one always has a next time. This module neither stores
schedules nor reads a clock, nor makes a time fire only once. An interval counts elapsed time and has no time zone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from flowfabric.errors import Corruption, InvalidInput
from flowfabric.values.cron import Cron, in_utc, shown_text
from flowfabric.values.durations import MAX_DURATION_MS

CatchUp: TypeAlias = Literal["skip", "one", "all"]

MIN_INTERVAL: Final = timedelta(seconds=1)
MAX_INTERVAL: Final = timedelta(milliseconds=MAX_DURATION_MS)
PUNCTUAL: Final = timedelta(minutes=1)
"""A fire time that is at most this old is not missed, even if earlier ones were."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


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
            raise InvalidInput(f"not a timedelta: {shown_text(interval)}", field="every", allowed="a timedelta")
        if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
            raise InvalidInput(
                f"an interval of {interval.total_seconds():g} seconds", field="every", allowed="1 second to a century"
            )
        force_setattr(self, "interval", -(-interval // _MILLISECOND) * _MILLISECOND)
        if self.anchor is not None:
            force_setattr(self, "anchor", in_utc(self.anchor, "anchor"))

    def next_after(self, moment: datetime) -> datetime | None:
        """The first fire time strictly after `moment`, in UTC; None when there is none before the year 10000."""
        anchor = self.anchor or _EPOCH
        passed = (in_utc(moment, "moment") - anchor) // self.interval
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
    """Read a timing that `to_json` or `to_builtins` wrote.

    Raises `Corruption` for anything else, and `InvalidInput` for a time zone that this machine does not know.
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
    """Make a timing from `cron` (with `timezone`, else UTC) or from `every` (with `anchor`).

    A number means seconds. Exactly one of the two must be given, without the options of the other.
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
            raise InvalidInput(f"not a duration: {shown_text(every)}", field="every", allowed=allowed)
        try:
            every = timedelta(seconds=every)
        except (OverflowError, ValueError):
            raise InvalidInput(f"not a duration: {shown_text(every)}", field="every", allowed=allowed) from None
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
    """Return the fire times to create now, oldest first, and the next time to store; `due_at` is the stored next time.

    Due are `due_at` and every fire time after it up to `now`. If nothing is due, there is nothing to create and
    `due_at` stays. Otherwise the next time is later than `now` (None: never again), with one exception under `all`.

    * `all`: every due time. At most `limit` in one call; then the next time is the first that was left out, and already
      due.
    * `one`: the latest due time, however late. After an outage the schedule fires once, immediately.
    * `skip`: the latest due time, but only when it has not been missed: when it is the only one due (a worker is
      always a little late, and late by less than one interval is not a miss), or when it is at most `tolerance` old.
      After an outage over several times nothing is made up for; the schedule continues at its next regular time.

    An hourly schedule that was down from 09:30 to 12:20 creates 10:00, 11:00 and 12:00 under `all`, 12:00 under
    `one`, and under `skip` nothing before 13:00.
    """
    if catch_up not in get_args(CatchUp):
        raise InvalidInput(f"got {shown_text(catch_up)}", field="catch_up", allowed=", ".join(get_args(CatchUp)))
    if limit < 1:
        raise InvalidInput(f"got {limit}", field="limit", allowed="1 or more")
    due_at, now = in_utc(due_at, "due_at"), in_utc(now, "now")
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

    A binary search: stepping through a year of a one-second schedule would take minutes.
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
