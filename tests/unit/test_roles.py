"""The lines that say who may call a function."""

from __future__ import annotations

import pytest

from flowfabric._postgres.roles import Role, callers, declared, not_allowed
from tests.unit.test_sql_files import FILES, body, functions

HEADER = "-- f: does\n--\n{}create or replace function flowfabric.f(p integer) returns text\nlanguage sql {}as $$ $$;\n"


def test_every_public_function_says_in_its_header_which_roles_may_call_it() -> None:
    public = {
        name
        for sql in FILES.values()
        for name in functions(sql)
        if "security definer" in body(sql, name).partition("$$")[0]
    }
    assert set(callers()) == public


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-- Roles    owner\n", frozenset()),
        ("-- Roles    operate\n", {Role.OPERATE}),
        ("-- Roles    read, work, operate\n", {Role.READ, Role.WORK, Role.OPERATE}),
    ],
)
def test_a_line_is_read(line: str, expected: set[Role]) -> None:
    assert declared(HEADER.format(line, "security definer ")) == {"f": expected}


@pytest.mark.parametrize(
    "line", ["", "-- Roles    nobody\n", "-- Roles    work operate\n", "-- Roles    owner, work\n"]
)
def test_a_public_function_without_a_good_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        declared(HEADER.format(line, "security definer "))


def test_a_private_function_needs_no_line() -> None:
    assert declared(HEADER.format("", "")) == {}


def test_the_error_names_the_function_in_any_language_of_the_server() -> None:
    call = "select code from flowfabric.replay($1, $2, $3, $4)"
    for message in ("permission denied for function replay", "keine Berechtigung für Funktion replay"):
        error = not_allowed(message, call)
        assert error is not None
        assert (error.function, error.roles, error.option) == ("replay", ("operate",), "--operate-role")
    assert not_allowed("permission denied for schema flowfabric", call) is None
    assert not_allowed("permission denied for table execution", call) is None


def test_a_function_may_name_another_one_that_the_user_would_need() -> None:
    error = not_allowed("permission denied for function cancel_as_operator: why", "select flowfabric.grow_flow($1)")
    assert error is not None
    assert error.function == "cancel_as_operator"
