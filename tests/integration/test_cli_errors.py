"""Errors of the command line, as whole lines: what is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import StateError
from flowfabric.values.lease import Operator
from tests.databases import fresh_database
from tests.integration.test_cli import call, run_here
from tests.integration.test_connection import a_role, as_user
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import started, submit

NEW = "--new if nothing was submitted to it yet"
SHOP = """
import flowfabric as ff

app = ff.App()


@app.task
async def pay(order: dict[str, int], note: str = "") -> int:
    return 1
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "operator_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return


# Commands that need no database, and the one line that each says.
WITHOUT_A_DATABASE: list[tuple[tuple[str, ...], str]] = [
    (("ls", "--dsn", "mysql://x"), "the address of the database is wrong: not a URL such as postgresql://user@host/database"),
    (("ls", "--dsn", "foo"), "the address of the database is wrong: not a URL such as postgresql://user@host/database"),
    (
        ("submit", "operator_shop:app", "pay", "{"),
        "order: '{' is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1));"
        " allowed: dict[str, int]",
    ),
    (
        ("dev", "operator_shop:app", "--lane", "default=x"),
        "--lane: got 'default=x'; allowed: LANE, or LANE=WEIGHT with a number up to 100",
    ),
]  # fmt: skip


@pytest.mark.usefixtures("shop")
async def test_errors_without_a_database_say_what_is_wrong() -> None:
    for arguments, line in WITHOUT_A_DATABASE:
        said = await call(*arguments, code=2)
        assert said.err == f"flowfabric: {line}\n", arguments
        assert said.out == ""


async def test_errors_about_executions_are_sentences(engine: ff.Engine, database: str) -> None:
    done = await started(engine)
    await engine.complete(done.handle, b"1")
    cancelled = await submit(engine)
    await engine.cancel(Operator(cancelled), "no")
    waiting = await submit(engine)
    one = done.execution_id
    for arguments, code, line in (
        (("show", "nope"), 2, "ID: got 'nope'; allowed: a UUID, or at least 6 hex digits of its end or its beginning"),
        (("cancel", one), 1, f"{one}: it has ended already (completed)"),
        (("replay", waiting), 1, f"{waiting}: it has not ended yet"),
        (("priority", one, "5"), 1, f"{one}: it does not wait for a worker"),
        (("replay", one), 2, "cannot ask without a terminal; confirm with --yes"),
        (("lanes", "pause", "mial"), 1, f"not found: lane mial (there are default; {NEW})"),
    ):  # fmt: skip
        said = await call(*arguments, dsn=database, code=code)
        assert said.err.splitlines()[-1] == f"flowfabric: {line}", arguments
    said = await call("cancel", one, cancelled, dsn=database, code=1)
    assert said.out == "0 cancelled\n"
    assert said.err == "1 was cancelled before\n1 refused: it has ended already (completed)\n"


async def test_replay_asks_before_it_runs_again_what_succeeded(engine: ff.Engine, database: str) -> None:
    done = await started(engine)
    await engine.complete(done.handle, b"1")
    one = done.execution_id
    said = await call("replay", one, dsn=database, answer="n\n", code=1)
    assert said.err.startswith("it has completed already: run again what succeeded? [y/N] ")
    assert await engine.read_execution_state(one) is ff.State.COMPLETED
    other = await started(engine)
    await engine.fail(other.handle, "no", failure_class="permanent")
    said = await call("replay", one, other.execution_id, dsn=database, answer="n\n", code=1)
    assert said.err.startswith("1 of 2 have completed already: run again what succeeded? [y/N] ")
    assert (await call("replay", other.execution_id, dsn=database)).out == "1 replayed\n"
    assert (await call("replay", one, "--yes", dsn=database)).out == "1 replayed\n"


async def test_a_lane_is_paused_before_its_first_submission(engine: ff.Engine, database: str) -> None:
    await call("lanes", "pause", "mail", dsn=database, code=1)
    assert (await call("lanes", "pause", "mail", "--new", dsn=database)).out == "mail is paused\n"
    await submit(engine, lane_id="mail")
    (lane,) = await engine.lane_stats(["mail"])
    assert (lane.state, lane.depth) == ("paused", 1)


async def test_a_closed_lane_is_named(engine: ff.Engine, database: str) -> None:
    await call("lanes", "disable", "mail", "--new", dsn=database)
    with pytest.raises(StateError, match="lane_closed: the lane mail accepts no new executions"):
        await submit(engine, lane_id="mail")


async def test_migrate_names_a_role_that_does_not_exist_and_what_it_granted(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    said = await call("migrate", "--worker-role", "app_workerr", dsn=database, code=2)
    assert said.err == (
        "flowfabric: --worker-role: there is no role 'app_workerr' on this server; allowed: one that exists:"
        " `create role NAME login` makes it\n"
    )
    async with a_role(sql) as role:
        said = await call("migrate", "--submit-role", role, "--read-role", role, dsn=database)
        assert said.out.splitlines()[1:] == [f"{role} may read", f"{role} may submit"]
        said = await call("migrate", dsn=as_user(database, role), code=2)
        owner = await sql.fetchval("select current_user")
        assert f"the schema belongs to {owner} and you are {role}; migrate as {owner}" in said.err


async def test_a_server_without_plpgsql_is_called_unfit(server: str) -> None:
    async with fresh_database(server) as dsn:
        connection = await asyncpg.connect(dsn)
        await connection.execute("drop schema flowfabric cascade; drop extension plpgsql cascade")
        await connection.close()
        said = await call("migrate", dsn=dsn, code=2)
    assert "the database server lacks a part of PostgreSQL that flowfabric needs" in said.err
    assert 'language "plpgsql" does not exist' in said.err


def test_the_help_cuts_no_sentence() -> None:
    for arguments in ((), ("flow",), ("lanes", "--help"), ("db",), ("keys", "--help"), ("workers", "--help")):
        said = run_here(*arguments, COLUMNS="80")
        assert "..." not in re.sub(r"\]\.\.\.", "", said.stdout), said.stdout
    top = " ".join(run_here("--help", COLUMNS="80").stdout.split())
    assert (
        "show Show one execution: state, what it waits for, attempts, steps, signals, failure, result and timeline."
        in top
    )
