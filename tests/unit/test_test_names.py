"""Names of tests: sentences; those that lists in the repository name exist, and each of the list has its test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
_TEST = re.compile(r"(?m)^\s*(?:async )?def (test_\w+)\(")
_NUMBERED = re.compile(r"(?m)^\s*(?:async )?def (test_(?:[a-z]?\d+_(?:and_)?)+)\w+\(")


def test_numbers_in_names_are_those_of_the_scenarios() -> None:
    listed = re.findall(r"(?m)^\| (A\d+) \|", (TESTS / "sql" / "scenarios.md").read_text())
    names = "".join(name for file in TESTS.rglob("test_*.py") for name in _NUMBERED.findall(file.read_text()))
    assert set(re.findall(r"_([a-z]?\d+)", names)) == {one.lower() for one in listed}


def test_every_rule_and_mistake_of_streams_and_events_names_tests_that_exist() -> None:
    listed = re.findall(r"(?m)^\| ([JE]\d+) \| .+ \| (.+) \|$", (TESTS / "sql" / "streams_and_events.md").read_text())
    assert [number for number, _ in listed] == [*(f"J{n}" for n in range(1, 16)), *(f"E{n}" for n in range(1, 28))]
    names = {name for file in TESTS.rglob("test_*.py") for name in _TEST.findall(file.read_text())}
    for number, tests in listed:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, number
        assert set(named) <= names, number


def test_the_list_of_what_the_reference_lacks_is_whole_and_names_tests_that_exist() -> None:
    text = (TESTS / "server" / "lacks.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \|.*\|.*\|$", text)
    assert rows == [str(n) for n in range(1, 38)]
    for place in re.findall(r"`(\w+/test_\w+\.py(?:::\w+)?)`", text):
        file, _, name = place.partition("::")
        assert (f"def {name}(" if name else "def test_") in (TESTS / file).read_text(), place


def test_what_the_lists_of_scenarios_name_exists() -> None:
    text = (TESTS / "sql" / "scenarios.md").read_text()
    tests = "".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    rules = {file.stem for file in (TESTS.parent / "src/flowfabric/_postgres/sql/functions/audit").glob("*.sql")}
    for letter, most in (("D", 65), ("I", 24)):
        rows = re.findall(rf"(?m)^\| {letter}(\d+) \|.*`(\w+)`.*\|$", text)
        assert [int(number) for number, _ in rows] == list(range(1, most + 1)), "each names a rule or a test"
    for name in re.findall(r"`(\w+)`[,| ]", text):
        assert name in rules or re.search(rf"def {name}\(", tests), name
