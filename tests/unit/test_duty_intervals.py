"""How long duties sleep at most: an argument wins over the environment, and both are checked."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, cast

import pytest

from flowfabric._duties import Duties, Duty
from flowfabric._duties.intervals import intervals_of
from flowfabric._duties.runner import TimerRunner
from flowfabric.errors import InvalidInput
from flowfabric.worker.schedules import ScheduleDuty
from tests.each import each

SECOND = timedelta(seconds=1)


def loops(**given: Any) -> dict[str, timedelta]:
    """The loops of a process with all duties, each with its interval, without that of the cascades."""
    made = Duties(cast("Any", None), **given)._loops
    return {loop.name: loop.interval for loop, group in made if group == "duties"}


def test_without_a_word_about_it_each_duty_has_its_own_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loops()
    assert before["unblock"] == 5 * SECOND
    assert before["timer_runner"] == TimerRunner.interval
    monkeypatch.setenv("FLOWFABRIC_UNBLOCK_INTERVAL", " ")
    assert loops() == before


def test_the_environment_sets_an_interval_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFABRIC_UNBLOCK_INTERVAL", "2 min")
    monkeypatch.setenv("FLOWFABRIC_SCHEDULES_INTERVAL", "3")
    monkeypatch.setenv("FLOWFABRIC_RETENTION_INTERVAL", "500ms")
    assert intervals_of(None, ()) == {
        "unblock": 120 * SECOND,
        "schedules": 3 * SECOND,
        "retention": 0.5 * SECOND,
    }
    found = loops(intervals={"unblock": 7 * SECOND})
    assert found["unblock"] == 7 * SECOND
    assert Duties(cast("Any", None), [ScheduleDuty])._loops[0][0].interval == 3 * SECOND


def test_duties_that_are_woken_share_the_shortest_interval() -> None:
    assert loops(intervals={"lease_expiry": 0.2 * SECOND})["timer_runner"] == 0.2 * SECOND
    assert loops(intervals={"lease_expiry": 60 * SECOND})["timer_runner"] == TimerRunner.interval
    (runner,) = [
        loop
        for loop, group in Duties(cast("Any", None), intervals={"cascade": 9 * SECOND})._loops
        if group == "cascades"
    ]
    assert runner.interval == 9 * SECOND


def test_a_duty_of_a_program_has_a_name_too() -> None:
    class Mine(Duty):
        async def run_once(self) -> int:
            return 0

    assert Duties(cast("Any", None), [Mine], intervals={"mine": SECOND})._loops[0][0].interval == SECOND
    with pytest.raises(InvalidInput, match="no duty is called 'mine'"):
        Duties(cast("Any", None), intervals={"mine": SECOND})


@each("given", [5, "unblock", {"lease_expire": SECOND}, {5: SECOND}, {None: SECOND}, [("unblock", SECOND)],
                {"unblock": 5}, {"unblock": "5s"}, {"unblock": None}, {"unblock": 0.0999 * SECOND},
                {"unblock": timedelta(days=1, seconds=1)}, {"unblock": -SECOND}])  # fmt: skip
def test_an_argument_that_says_no_interval_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        intervals_of(given, ())
    assert "intervals" in str(refused.value)
    if isinstance(given, dict) and "unblock" not in given:
        assert "lease_expiry" in str(refused.value), "it names those that there are"


@each(
    ("name", "text"),
    [("UNBLOCK", text) for text in ("soon", "0", "0.05s", "2 days", "-1", "1e3", "nan")],
)
def test_an_environment_that_says_no_interval_is_refused_by_its_name(name: str, text: str) -> None:
    variable = f"FLOWFABRIC_{name}_INTERVAL"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, text)
        with pytest.raises(InvalidInput, match=variable):
            intervals_of(None, ())


@each("name", ["LEASE_EXPIRE", "MY_DUTY", "TIMER_RUNNER", "SYNC_2"])
def test_an_interval_in_the_environment_of_a_duty_that_does_not_run_here_is_only_mentioned(name: str) -> None:
    """The environment may be that of several programs, one of which has the duty."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("flowfabric.duties")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"FLOWFABRIC_{name}_INTERVAL", "5s")
            assert intervals_of(None, ()) == {}
    finally:
        log.removeHandler(handler)
    (record,) = records
    assert record.levelno == logging.WARNING
    assert f"FLOWFABRIC_{name}_INTERVAL" in record.getMessage()


def test_a_name_of_a_duty_may_have_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sync2(Duty):
        name = "sync_2"

    monkeypatch.setenv("FLOWFABRIC_SYNC_2_INTERVAL", "5s")
    assert intervals_of(None, [Sync2]) == {"sync_2": 5 * SECOND}
