"""Every statement of Python against the functions of the database: each exists, takes these arguments, returns these
columns; and every function that a worker's role may call is called by a statement."""

from __future__ import annotations

import inspect
import re
from typing import Any

import asyncpg
import pytest

from flowfabric._postgres import rows, statements

FUNCTION = re.compile(r"flowfabric\.(\w+)\(")
COLUMN_LISTS = {"VERDICT", "CLAIMED", "EVENT"}
RENDERED = {
    name: render
    for name, render in vars(statements).items()
    if inspect.isfunction(render) and render.__module__ == statements.__name__ and not name.startswith("_")
}
CALLS = (
    {
        name: text
        for name, text in vars(statements).items()
        if name.isupper() and not name.startswith("_") and name not in COLUMN_LISTS
    }
    | {name: render("${}") for name, render in RENDERED.items()}
    | {
        "create_executions, hashed": statements.create_executions(hashed=True),
        "standing_executions, hashed": statements.standing_executions(hashed=True),
    }
)


async def test_every_statement_fits_the_functions_it_calls(sql: asyncpg.Connection[Any]) -> None:
    for name, text in CALLS.items():
        try:
            prepared = await sql.prepare(text)
        except asyncpg.PostgresError as error:
            pytest.fail(f"{name}: {error}")
        columns = [attribute.name for attribute in prepared.get_attributes()]
        assert len(columns) == len(set(columns)), name
        assert "*" not in text.split(" from ")[0], name


def test_a_statement_for_any_driver_is_rendered_with_its_marks() -> None:
    for name, render in RENDERED.items():
        marks = re.findall(r"\$\d+", render("${}"))
        assert marks == [f"${n}" for n in range(1, len(marks) + 1)], name
        assert render("%s") == re.sub(r"\$\d+", "%s", render("${}")), name


def test_events_are_read_by_position_in_the_order_of_their_columns() -> None:
    names = statements.EVENT.split(", ")
    row: dict[str, Any] = {name: f"the {name}" for name in names} | {"tags": '{"a": "b"}', "details": '{"c": 1}'}
    found = rows.event(row, 7)
    fields = {"id": "execution_id", "lane": "lane_id", "kind": "execution_kind"}
    for name in set(names) - {"seq", "partition", "tags", "details", "log_epoch"}:
        assert getattr(found, fields.get(name, name)) == f"the {name}"
    assert (found.cursor.position, found.cursor.epoch) == ("the seq", 7)
    assert (found.tags, found.details) == ({"a": "b"}, {"c": 1})


async def test_every_function_open_to_workers_is_called(sql: asyncpg.Connection[Any]) -> None:
    found = await sql.fetch(
        "select distinct proname::text as name from pg_proc"
        " where pronamespace = 'flowfabric'::regnamespace and prosecdef"
    )
    called = {function for text in CALLS.values() for function in FUNCTION.findall(text)}
    assert {row["name"] for row in found} <= called
