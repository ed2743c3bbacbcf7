"""Names of tests: sentences; a number in one belongs to a list in the repository, and each of the list has its test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
_NUMBERED = re.compile(r"(?m)^\s*(?:async )?def (test_(?:[a-z]?\d+_(?:and_)?)+)\w+\(")


def test_numbers_in_names_are_those_of_the_scenarios() -> None:
    listed = re.findall(r"(?m)^\| (A\d+) \|", (TESTS / "sql" / "scenarios.md").read_text())
    names = "".join(name for file in TESTS.rglob("test_*.py") for name in _NUMBERED.findall(file.read_text()))
    assert set(re.findall(r"_([a-z]?\d+)", names)) == {one.lower() for one in listed}


def test_what_the_lists_of_scenarios_name_exists() -> None:
    text = (TESTS / "sql" / "scenarios.md").read_text()
    tests = "".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    rules = {file.stem for file in (TESTS.parent / "src/flowfabric/_postgres/sql/functions/audit").glob("*.sql")}
    for letter, most in (("D", 65), ("I", 24)):
        rows = re.findall(rf"(?m)^\| {letter}(\d+) \|.*`(\w+)`.*\|$", text)
        assert [int(number) for number, _ in rows] == list(range(1, most + 1)), "each names a rule or a test"
    for name in re.findall(r"`(\w+)`[,| ]", text):
        assert name in rules or re.search(rf"def {name}\(", tests), name
