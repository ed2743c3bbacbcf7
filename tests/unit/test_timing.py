"""When schedules fire: cron in time zones with daylight saving, intervals, and missed times after an outage."""

from __future__ import annotations

import pickle
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, get_args
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfabric.errors import Corruption, InvalidInput
from flowfabric.values import cron as module
from flowfabric.values.cron import NICKNAMES, Cron
from flowfabric.values.timing import MAX_INTERVAL, MIN_INTERVAL, CatchUp, Every, Timing, from_json, missed, parse_timing

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def times(timing: Timing, start: datetime, end: datetime) -> list[datetime]:
    """Every fire time later than `start` and not later than `end`, as a chain of next times."""
    found = []
    moment = timing.next_after(start)
    while moment is not None and moment <= end:
        found.append(moment)
        moment = timing.next_after(moment)
    return found


# Cron


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("*/15 * * * *", "2026-05-01T10:07:00Z", "2026-05-01T10:15:00Z"),
        ("*/15 * * * *", "2026-05-01T10:15:00Z", "2026-05-01T10:30:00Z"),
        ("*/15 * * * *", "2026-05-01T10:14:59.999999Z", "2026-05-01T10:15:00Z"),
        ("*/15 * * * *", "2026-05-01T10:15:00.000001Z", "2026-05-01T10:30:00Z"),
        ("0 9-17/4 * * *", "2026-05-01T09:00:00Z", "2026-05-01T13:00:00Z"),
        ("5,10 0 * * *", "2026-05-01T00:05:00Z", "2026-05-01T00:10:00Z"),
        ("0 0 1 1 *", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        ("0 0 29 2 *", "2024-02-29T00:00:00Z", "2028-02-29T00:00:00Z"),
        ("0 0 29 2 *", "2096-02-29T00:00:00Z", "2104-02-29T00:00:00Z"),
        ("0 0 L * *", "2026-02-01T00:00:00Z", "2026-02-28T00:00:00Z"),
        ("0 0 * * 7", "2026-05-01T00:00:00Z", "2026-05-03T00:00:00Z"),
        ("0 0 * * sun", "2026-05-01T00:00:00Z", "2026-05-03T00:00:00Z"),
        ("0 0 * jun MON-WED", "2026-05-01T00:00:00Z", "2026-06-01T00:00:00Z"),
        ("0 0 * * 5#2", "2026-05-01T00:00:00Z", "2026-05-08T00:00:00Z"),
        ("0 0 * * 5L", "2026-05-01T00:00:00Z", "2026-05-29T00:00:00Z"),
        ("0 0 13 * 5", "2026-05-02T00:00:00Z", "2026-05-08T00:00:00Z"),  # either day is enough
        ("0 0 13 * 5", "2026-05-08T00:00:00Z", "2026-05-13T00:00:00Z"),
        ("@hourly", "2026-05-01T10:07:00Z", "2026-05-01T11:00:00Z"),
        ("@daily", "2026-05-01T10:07:00Z", "2026-05-02T00:00:00Z"),
        ("@weekly", "2026-05-01T10:07:00Z", "2026-05-03T00:00:00Z"),
        ("@monthly", "2026-05-01T10:07:00Z", "2026-06-01T00:00:00Z"),
        ("@yearly", "2026-05-01T10:07:00Z", "2027-01-01T00:00:00Z"),
    ],
)
def test_a_cron_expression_fires_next_at(expression: str, after: str, expected: str) -> None:
    fires_at = Cron(expression).next_after(at(after))

    assert fires_at == at(expected)
    assert fires_at.tzinfo is UTC


def test_a_moment_in_another_zone_is_the_same_moment() -> None:
    moment = datetime(2026, 5, 1, 12, 7, tzinfo=timezone(timedelta(hours=2)))

    assert Cron("0 9 * * *", "Asia/Tokyo").next_after(moment) == at("2026-05-02T00:00:00Z")


@pytest.mark.parametrize(
    ("expression", "day", "expected"),
    [
        # The hour from 02:00 does not exist in Berlin on 29 March: 01:59 is followed by 03:00.
        ("30 2 * * *", "2026-03-29", ["03:00+02:00"]),
        ("0,30 2 * * *", "2026-03-29", ["03:00+02:00"]),
        ("*/15 2 * * *", "2026-03-29", ["03:00+02:00"]),
        ("0 2,3 * * *", "2026-03-29", ["03:00+02:00"]),
        ("30 2,3 * * *", "2026-03-29", ["03:00+02:00", "03:30+02:00"]),
        ("0 1-4 * * *", "2026-03-29", ["01:00+01:00", "03:00+02:00", "04:00+02:00"]),
        # It exists twice on 25 October: 02:59+02:00 is followed by 02:00+01:00.
        ("30 2 * * *", "2026-10-25", ["02:30+02:00"]),
        ("*/30 2 * * *", "2026-10-25", ["02:00+02:00", "02:30+02:00"]),
        ("0 1-3 * * *", "2026-10-25", ["01:00+02:00", "02:00+02:00", "03:00+01:00"]),
    ],
)
def test_a_job_at_fixed_hours_is_neither_skipped_nor_doubled(expression: str, day: str, expected: list[str]) -> None:
    midnight = at(f"{day}T00:30:00+{'01' if day == '2026-03-29' else '02'}:00")

    assert times(Cron(expression, "Europe/Berlin"), midnight, midnight + 10 * HOUR) == [
        at(f"{day}T{time}") for time in expected
    ]


def test_in_the_second_pass_of_an_hour_no_time_of_the_first_pass_is_left() -> None:
    second_pass = at("2026-10-25T02:10:00+01:00")

    assert Cron("30 2 * * *", "Europe/Berlin").next_after(second_pass) == at("2026-10-26T02:30:00+01:00")
    assert Cron("30 * * * *", "Europe/Berlin").next_after(second_pass) == at("2026-10-25T02:30:00+01:00")


@pytest.mark.parametrize(
    ("expression", "apart"), [("0 * * * *", HOUR), ("*/15 * * * *", HOUR / 4), ("59 */1 * * *", HOUR)]
)
@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_a_job_for_every_hour_keeps_its_pace_when_the_clock_is_moved(
    expression: str, apart: timedelta, day: str
) -> None:
    midnight = at(f"{day}T00:00:00Z") - 3 * HOUR
    fired = times(Cron(expression, "Europe/Berlin"), midnight, midnight + DAY)

    assert len(fired) == DAY / apart
    assert {later - earlier for earlier, later in pairwise(fired)} == {apart}


def test_a_day_that_does_not_exist_fires_when_the_next_begins() -> None:
    # Samoa had no 30 December 2011.
    fired = times(Cron("0 9 * * *", "Pacific/Apia"), at("2011-12-30T00:00:00Z"), at("2012-01-01T00:00:00Z"))

    assert fired == [at("2011-12-31T00:00:00+14:00"), at("2011-12-31T09:00:00+14:00"), at("2012-01-01T09:00:00+14:00")]


# A change of the clock in each, at hours and by amounts as different as there are.
CHANGES = [
    ("Europe/Berlin", "2026-03-29T01:00:00Z"),
    ("Europe/Berlin", "2026-10-25T01:00:00Z"),
    ("Europe/Dublin", "2026-10-25T01:00:00Z"),
    ("America/New_York", "2026-03-08T07:00:00Z"),
    ("America/New_York", "2026-11-01T06:00:00Z"),
    ("America/Havana", "2026-03-08T05:00:00Z"),  # midnight does not exist
    ("America/Havana", "2026-11-01T05:00:00Z"),  # midnight exists twice
    ("America/Sao_Paulo", "2018-02-18T02:00:00Z"),  # the last hour of a day exists twice
    ("Africa/Cairo", "2026-04-23T22:00:00Z"),
    ("Australia/Lord_Howe", "2026-04-04T15:00:00Z"),  # by half an hour
    ("Australia/Lord_Howe", "2026-10-03T15:30:00Z"),
    ("Antarctica/Troll", "2026-03-29T01:00:00Z"),  # by two hours
    ("Antarctica/Troll", "2026-10-25T01:00:00Z"),
    ("Antarctica/Casey", "2020-10-03T16:01:00Z"),  # by three hours, at one minute past
    ("Asia/Kathmandu", "1985-12-31T18:30:00Z"),  # by a quarter of an hour
    ("Pacific/Apia", "2011-12-30T10:00:00Z"),  # by a day
    ("Asia/Kolkata", "2026-03-29T01:00:00Z"),  # never
    ("UTC", "2026-03-29T01:00:00Z"),
]


def field(low: int, high: int) -> st.SearchStrategy[tuple[str, set[int]]]:
    """One field of an expression, as text and as the numbers it means."""
    number = st.integers(low, high)
    single = number.map(lambda n: (str(n), {n}))
    listed = st.sets(number, min_size=1, max_size=4).map(lambda chosen: (",".join(map(str, chosen)), chosen))
    spans = st.tuples(number, number).map(sorted)
    ranged = spans.map(lambda span: (f"{span[0]}-{span[1]}", set(range(span[0], span[1] + 1))))
    stepped = st.integers(1, 30).map(lambda step: (f"*/{step}", set(range(low, high + 1, step))))
    return st.one_of(st.just(("*", set(range(low, high + 1)))), single, listed, ranged, stepped)


def by_the_minute(
    zone: ZoneInfo, minutes: set[int], hours: set[int], weekdays: set[int], start: datetime, end: datetime
) -> list[datetime]:
    """The fire times later than `start`, found by looking at the local clock every minute."""

    def matches(shown: datetime) -> bool:
        return shown.minute in minutes and shown.hour in hours and shown.isoweekday() % 7 in weekdays

    def shown_at(moment: datetime) -> datetime:
        return moment.astimezone(zone).replace(tzinfo=None, fold=0)

    def between(low: datetime, high: datetime) -> Iterator[datetime]:
        while low < high:
            low += MINUTE
            yield low

    fired = []
    reached = shown_at(start)
    for moment in between(start, end):
        shown = shown_at(moment)
        candidates = [shown] if len(hours) == 24 else between(reached, shown)
        if any(map(matches, candidates)):
            fired.append(moment)
        reached = max(reached, shown)
    return fired


@settings(deadline=None)
@given(
    change=st.sampled_from(CHANGES),
    minute=field(0, 59),
    hour=field(0, 23),
    weekday=field(0, 6),
    moments=st.lists(st.timedeltas(-4 * HOUR, 4 * HOUR), max_size=10),
)
def test_fire_times_around_a_change_of_the_clock_are_those_seen_by_watching_it(
    change: tuple[str, str],
    minute: tuple[str, set[int]],
    hour: tuple[str, set[int]],
    weekday: tuple[str, set[int]],
    moments: list[timedelta],
) -> None:
    zone, moved_at = change
    start, end = at(moved_at) - 30 * HOUR, at(moved_at) + 30 * HOUR
    cron = Cron(f"{minute[0]} {hour[0]} * * {weekday[0]}", zone)
    expected = by_the_minute(ZoneInfo(zone), minute[1], hour[1], weekday[1], start, end)

    assert times(cron, start, end) == expected
    for moment in (at(moved_at) + offset for offset in moments):
        found = cron.next_after(moment)
        assert found is not None
        assert found > moment
        assert (found if found <= end else None) == next((time for time in expected if time > moment), None)


@pytest.mark.parametrize(
    ("zone", "moved_at"), [change for change in CHANGES if change[0] not in ("UTC", "Asia/Kolkata")]
)
def test_the_clock_is_moved_where_the_cases_above_say(zone: str, moved_at: str) -> None:
    moment = at(moved_at)
    before, after = (t.astimezone(ZoneInfo(zone)).utcoffset() for t in (moment - timedelta(seconds=1), moment))

    assert before != after


@given(
    zone=st.sampled_from(sorted({zone for zone, _ in CHANGES})),
    expression=st.sampled_from(
        ["0 0 29 2 *", "* * 29 2 *", "17 3 * 2 MON#5", "30 2 L * *", "59 23 31 12 *", "@monthly"]
    ),
    moment=st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
)
def test_times_years_apart_match_the_local_calendar(zone: str, expression: str, moment: datetime) -> None:
    cron = Cron(expression, zone)
    found = cron.next_after(moment)

    assert found is not None
    assert found > moment
    # Nothing was passed over: from just before, the same answer.
    assert cron.next_after(found - timedelta(microseconds=1)) == found
    assert cron.next_after(moment + (found - moment) / 2) == found


def test_there_is_no_next_time_at_the_end_of_the_calendar() -> None:
    end = datetime.max.replace(tzinfo=UTC)

    for cron in (Cron("0 0 * * *"), Cron("0 * * * *", "America/New_York"), Cron("0 2 * * *", "Asia/Tokyo")):
        assert cron.next_after(end) is None
        assert cron.next_after(end - 3 * DAY) is not None
    assert Every(HOUR).next_after(end) is None


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day of month"),
        ("* * 32 * *", "day of month"),
        ("* * * 13 *", "month"),
        ("* * * fob *", "month"),
        ("* * * * 8", "day of week"),
        ("* * * * fri-mon", "day of week"),
        ("*/0 * * * *", "minute"),
        ("5-1 * * * *", "minute"),
        ("1,,2 * * * *", "minute"),
        ("-1 * * * *", "minute"),
        ("? * * * *", "minute"),
        ("\u00b2 * * * *", "minute"),
        ("* * * *", "five fields"),
        ("0 * * * * *", "five fields"),
        ("", "five fields"),
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 4,6 *", "never fires"),
        ("0 0 */31 * MON#2", "never fires"),
        ("@reboot", "@daily"),
        ("9" * 300 + " * * * *", "at most 256"),
        (None, "not text"),
        ([], "not text"),
    ],
)
def test_a_bad_expression_is_refused_and_the_bad_field_named(expression: Any, named: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Cron(expression)

    assert refused.value.field == "cron"
    assert refused.value.allowed
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("Europe/Berln", "did you mean Europe/Berlin?"),
        ("Mars/Olympus", ""),
        ("America", ""),
        ("../UTC", ""),
        ("/etc/localtime", ""),
        ("localtime", ""),
        ("a\0b", ""),
        ("\ud800", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_an_unknown_zone_is_refused(zone: Any, hint: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Cron("0 0 * * *", zone)

    assert refused.value.field == "timezone"
    assert hint in refused.value.problem


def test_without_zone_data_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> ZoneInfo:
        raise zoneinfo.ZoneInfoNotFoundError

    monkeypatch.setattr(module, "ZoneInfo", nothing)
    monkeypatch.setattr(module, "available_timezones", set)

    with pytest.raises(InvalidInput, match="install the package tzdata"):
        Cron("0 0 * * *", "Europe/Berlin")
    assert Cron("0 0 * * *", "UTC").next_after(at("2026-05-01T10:00:00Z")) == at("2026-05-02T00:00:00Z")


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), datetime(1969, 12, 31, tzinfo=UTC), None, "2026-01-01"])
@pytest.mark.parametrize("timing", [Cron("@daily"), Every(HOUR)], ids=["cron", "every"])
def test_a_moment_without_a_zone_or_out_of_range_is_refused(timing: Timing, moment: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        timing.next_after(moment)

    assert refused.value.field == "moment"


# Every


@given(
    interval=st.timedeltas(MIN_INTERVAL, MAX_INTERVAL),
    anchor=st.none() | st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    moment=st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
)
def test_an_interval_fires_on_its_grid_from_the_anchor_on(
    interval: timedelta, anchor: datetime | None, moment: datetime
) -> None:
    every = Every(interval, anchor)
    start = anchor or datetime(1970, 1, 1, tzinfo=UTC)
    found = every.next_after(moment)

    assert interval <= every.interval < interval + timedelta(milliseconds=1)
    assert found is not None
    assert found > moment
    assert found >= start
    assert (found - start) % every.interval == timedelta(0)
    assert found == start or found - moment <= every.interval


def test_an_interval_without_an_anchor_fires_on_the_round_hour() -> None:
    assert Every(HOUR).next_after(at("2026-05-01T10:07:00Z")) == at("2026-05-01T11:00:00Z")
    assert Every(DAY).next_after(at("2026-05-01T10:07:00Z")) == at("2026-05-02T00:00:00Z")


@pytest.mark.parametrize(
    "interval",
    [timedelta(0), timedelta(seconds=-5), timedelta(milliseconds=999), MAX_INTERVAL + MINUTE, timedelta.max, 5, None],
)
def test_an_interval_out_of_bounds_is_refused(interval: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        Every(interval)

    assert refused.value.field == "every"


def test_an_anchor_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        Every(HOUR, datetime(2026, 1, 1))

    assert refused.value.field == "anchor"


# What was asked for


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"cron": " 0  9 * * * "}, Cron("0 9 * * *")),
        ({"cron": "@Daily", "timezone": "Europe/Berlin"}, Cron("@daily", "Europe/Berlin")),
        ({"every": 90}, Every(timedelta(seconds=90))),
        ({"every": 1.5}, Every(timedelta(seconds=1.5))),
        ({"every": HOUR, "timezone": "UTC"}, Every(HOUR)),
        ({"every": HOUR, "anchor": at("2026-05-01T10:07:00Z")}, Every(HOUR, at("2026-05-01T10:07:00Z"))),
    ],
)
def test_a_timing_is_made_from_its_arguments(asked: dict[str, Any], expected: Timing) -> None:
    assert parse_timing(**asked) == expected


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ({}, "cron"),
        ({"timezone": "Europe/Berlin"}, "cron"),
        ({"cron": "@daily", "every": 60}, "every"),
        ({"cron": "@daily", "anchor": at("2026-05-01T10:07:00Z")}, "anchor"),
        ({"cron": "@daily", "timezone": "Nowhere"}, "timezone"),
        ({"cron": "@daily", "timezone": ""}, "timezone"),
        ({"cron": ""}, "cron"),
        ({"every": HOUR, "timezone": "Europe/Berlin"}, "timezone"),
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"every": "1 hour"}, "every"),
        ({"every": float("nan")}, "every"),
        ({"every": float("inf")}, "every"),
        ({"every": 10**400}, "every"),
    ],
)
def test_an_invalid_timing_is_refused(asked: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_timing(**asked)

    assert refused.value.field == wrong


# The stored form

TIMINGS: list[Timing] = [
    Cron("0 9 * * *"),
    Cron("30 2 * * *", "Europe/Berlin"),
    Cron("*/7 * * * *", "America/New_York"),
    Cron("*/15 2 * * 0", "Australia/Lord_Howe"),
    *(Cron(nickname, "Africa/Cairo") for nickname in NICKNAMES),
    Every(timedelta(seconds=1)),
    Every(timedelta(seconds=1.001), at("2026-05-01T10:07:00.123456Z")),
    Every(timedelta(hours=7), at("2026-10-25T00:30:00Z")),
    Every(MAX_INTERVAL),
]


@pytest.mark.parametrize("timing", TIMINGS, ids=repr)
def test_a_timing_survives_storing_and_pickling(timing: Timing) -> None:
    assert from_json(timing.to_json()) == timing
    assert from_json(timing.to_json().encode()) == timing
    assert from_json(msgspec.json.decode(timing.to_json())) == timing
    assert msgspec.json.decode(timing.to_json()) == timing.to_builtins()
    assert pickle.loads(pickle.dumps(timing)) == timing


def test_the_stored_form_is_plain_json() -> None:
    assert Cron("0 9 * * *", "Asia/Tokyo").to_builtins() == {"cron": "0 9 * * *", "timezone": "Asia/Tokyo"}
    assert Every(HOUR).to_builtins() == {"every_ms": 3_600_000}
    assert Every(HOUR, at("2026-05-01T10:00:00Z")).to_builtins()["anchor"] == "2026-05-01T10:00:00+00:00"


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "null",
        "[]",
        "{}",
        "7",
        '{"cron": 5}',
        '{"cron": "@daily", "every_ms": 5000}',
        '{"every_ms": "5000"}',
        '{"every_ms": true}',
        '{"every_ms": 1e400}',
        '{"every_ms": 9223372036854775807}',
        '{"every_ms": 5000, "anchor": "soon"}',
        '"\ud800"',
        {"every_ms": 5000, "more": 1},
    ],
)
def test_an_invalid_stored_timing_is_corruption(stored: Any) -> None:
    with pytest.raises(Corruption):
        from_json(stored)


def test_a_stored_zone_that_is_unknown_here_is_named() -> None:
    with pytest.raises(InvalidInput) as refused:
        from_json('{"cron": "@daily", "timezone": "Mars/Olympus"}')

    assert refused.value.field == "timezone"


# Catching up


@pytest.mark.parametrize(
    ("due", "now", "catch_up", "created", "following"),
    [
        # In time, a little late, and late by almost an interval: each policy fires it.
        *(
            ("10:00:00", now, policy, ["10:00"], "11:00")
            for policy in get_args(CatchUp)
            for now in ("10:00:00", "10:00:01", "10:59:59")
        ),
        # Down from 09:30 to 12:20.
        ("10:00:00", "12:20:00", "all", ["10:00", "11:00", "12:00"], "13:00"),
        ("10:00:00", "12:20:00", "one", ["12:00"], "13:00"),
        ("10:00:00", "12:20:00", "skip", [], "13:00"),
        # Back just when a regular time is reached: that one is not missed.
        ("10:00:00", "12:00:00", "skip", ["12:00"], "13:00"),
        ("10:00:00", "12:01:00", "skip", ["12:00"], "13:00"),
        ("10:00:00", "12:01:01", "skip", [], "13:00"),
        # Not due.
        *(("11:00:00", "10:59:59", policy, [], "11:00") for policy in get_args(CatchUp)),
        # A stored time that is not on the grid is due like any other.
        ("10:30:00", "10:45:00", "skip", ["10:30"], "11:00"),
        ("10:30:00", "11:15:00", "all", ["10:30", "11:00"], "12:00"),
    ],
)
@pytest.mark.parametrize("timing", [Cron("0 * * * *", "Europe/Berlin"), Every(HOUR)], ids=["cron", "every"])
def test_an_hourly_schedule_catches_up(
    timing: Timing, due: str, now: str, catch_up: CatchUp, created: list[str], following: str
) -> None:
    day = "2026-05-01T"

    assert missed(timing, due_at=at(f"{day}{due}Z"), now=at(f"{day}{now}Z"), catch_up=catch_up) == (
        [at(f"{day}{time}:00Z") for time in created],
        at(f"{day}{following}:00Z"),
    )


def test_a_schedule_of_every_second_does_not_starve_under_skip() -> None:
    due_at = at("2026-05-01T10:00:00Z")
    now = due_at + timedelta(seconds=2.5)

    created, following = missed(Every(MIN_INTERVAL), due_at=due_at, now=now, catch_up="skip")

    assert created == [due_at + timedelta(seconds=2)]
    assert following == due_at + timedelta(seconds=3)


def test_the_tolerance_can_be_given() -> None:
    due_at, now = at("2026-05-01T10:00:00Z"), at("2026-05-01T12:20:00Z")

    assert missed(Every(HOUR), due_at=due_at, now=now, catch_up="skip", tolerance=20 * MINUTE)[0] == [now - 20 * MINUTE]
    assert missed(Every(HOUR), due_at=due_at, now=now, catch_up="skip", tolerance=19 * MINUTE)[0] == []


@pytest.mark.parametrize("timing", [Cron("* * * * *", "Europe/Berlin"), Every(MIN_INTERVAL)], ids=["cron", "every"])
def test_the_latest_time_after_years_is_found_without_walking_there(
    timing: Timing, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    next_after: Any = type(timing).next_after

    def counted(self: Any, moment: datetime) -> datetime | None:
        nonlocal asked
        asked += 1
        found: datetime | None = next_after(self, moment)
        return found

    monkeypatch.setattr(type(timing), "next_after", counted)
    now = at("2026-05-01T10:00:00.5Z")
    created, following = missed(timing, due_at=at("2006-05-01T10:00:00Z"), now=now, catch_up="one")

    assert created == [at("2026-05-01T10:00:00Z")]
    assert following == next_after(timing, now)
    assert asked < 200


outages = st.one_of(
    st.timedeltas(timedelta(0), timedelta(seconds=90)), st.timedeltas(timedelta(0), DAY), st.just(timedelta(0))
)


@given(
    timing=st.sampled_from(TIMINGS),
    start=st.datetimes(datetime(2026, 10, 24), datetime(2026, 10, 26), timezones=st.just(UTC)),
    outage=outages,
    catch_up=st.sampled_from(get_args(CatchUp)),
    limit=st.integers(1, 20),
)
def test_nothing_is_created_twice_or_out_of_order_and_the_next_time_follows(
    timing: Timing, start: datetime, outage: timedelta, catch_up: CatchUp, limit: int
) -> None:
    due_at = timing.next_after(start)
    assert due_at is not None
    now = due_at + outage
    due = [due_at]
    while len(due) <= limit and (following := timing.next_after(due[-1])) is not None and following <= now:
        due.append(following)

    created, next_at = missed(timing, due_at=due_at, now=now, catch_up=catch_up, limit=limit)

    if catch_up == "all":
        assert created == due[:limit]
        if len(due) > limit:
            assert next_at == due[limit]
            return
    else:
        assert len(created) <= 1
        assert created or catch_up == "skip"
        assert missed(timing, due_at=due_at, now=now, catch_up="one")[0][-1:] == created or not created
        for time in created:
            assert due_at <= time <= now
            assert timing.next_after(time) == next_at
    assert next_at == timing.next_after(now)


@given(
    timing=st.sampled_from(TIMINGS),
    start=st.datetimes(datetime(2026, 10, 24), datetime(2026, 10, 26), timezones=st.just(UTC)),
    outage=st.timedeltas(timedelta(0), 4 * HOUR),
    limit=st.integers(1, 50),
)
@settings(deadline=None)
def test_all_reaches_the_present_in_as_many_calls_as_it_needs(
    timing: Timing, start: datetime, outage: timedelta, limit: int
) -> None:
    first = timing.next_after(start)
    assert first is not None
    now = first + min(outage, 300 * (timing.interval if isinstance(timing, Every) else MINUTE))
    made: list[datetime] = []
    due_at: datetime | None = first
    while due_at is not None and due_at <= now:
        created, due_at = missed(timing, due_at=due_at, now=now, catch_up="all", limit=limit)
        assert 0 < len(created) <= limit
        made += created

    assert made == times(timing, start, now)


@pytest.mark.parametrize(
    ("wrong", "changes"),
    [
        ("catch_up", {"catch_up": "some"}),
        ("limit", {"limit": 0}),
        ("due_at", {"due_at": datetime(2026, 1, 1)}),
        ("now", {"now": datetime(2026, 1, 1)}),
    ],
)
def test_bad_arguments_of_catching_up_are_refused(wrong: str, changes: dict[str, Any]) -> None:
    good = {"due_at": at("2026-05-01T10:00:00Z"), "now": at("2026-05-01T10:00:00Z"), "catch_up": "one"}

    with pytest.raises(InvalidInput) as refused:
        missed(Every(HOUR), **{**good, **changes})

    assert refused.value.field == wrong
