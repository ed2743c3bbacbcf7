"""Every statement of Python against the functions of the database: each exists, takes these arguments, returns these
columns; and every function that a worker's role may call is called by a statement."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import pytest

from flowfabric._postgres import statements

FUNCTION = re.compile(r"flowfabric\.(\w+)\(")
COLUMN_LISTS = {"VERDICT", "CLAIMED"}
CALLS = {
    name: text
    for name, text in vars(statements).items()
    if name.isupper() and not name.startswith("_") and name not in COLUMN_LISTS
} | {
    "create_executions, hashed": statements.create_executions(hashed=True),
    "standing_executions, hashed": statements.standing_executions(hashed=True),
}


async def test_every_statement_fits_the_functions_it_calls(sql: asyncpg.Connection[Any]) -> None:
    for name, text in CALLS.items():
        try:
            prepared = await sql.prepare(text)
        except asyncpg.PostgresError as error:
            pytest.fail(f"{name}: {error}")
        columns = [attribute.name for attribute in prepared.get_attributes()]
        assert len(columns) == len(set(columns)), name
        assert "*" not in text.split(" from ")[0], name


async def test_every_function_open_to_workers_is_called(sql: asyncpg.Connection[Any]) -> None:
    found = await sql.fetch(
        "select distinct proname::text as name from pg_proc"
        " where pronamespace = 'flowfabric'::regnamespace and prosecdef"
    )
    called = {function for text in CALLS.values() for function in FUNCTION.findall(text)}
    assert {row["name"] for row in found} <= called
