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
