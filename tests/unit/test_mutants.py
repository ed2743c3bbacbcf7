"""`scripts/mutants.py` changes functions that decide something, and runs tests that exist."""

from __future__ import annotations

from scripts.mutants import GROUPS, ROOT, TESTS, mutants_of

# They only list the rules.
LISTS = {"audit/audit", "audit/audit_by_key"}
LISTED = [(group, file) for group, files in GROUPS.items() for file in files.split() if file not in LISTS]


def test_every_listed_function_has_lines_to_change() -> None:
    assert [file for group, file in LISTED if not list(mutants_of(group, file))] == []


def test_every_chapter_has_its_tests() -> None:
    assert {file.partition("/")[0] for _, file in LISTED} <= set(TESTS)
    assert [one for names in TESTS.values() for one in names.split()
            if not (ROOT / f"tests/sql/test_{one}.py").exists()] == []  # fmt: skip
