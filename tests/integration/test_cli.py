"""The command line, as a user meets it: output, exit codes, no tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres.migrate import SCHEMA_VERSION
from tests.integration.test_connection import SECRET, a_role, as_user
from tests.support import submit


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed program, in an environment without settings of ours but the ones given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLOWFABRIC_")}
    done = subprocess.run(
        [Path(sys.executable).with_name("flowfabric"), *arguments],
        env={**clean, "COLUMNS": "200", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def failed(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a failure says, without secrets."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowfabric: ")
    assert SECRET not in line
    return line


def test_the_version_is_shown() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"flowfabric {ff.__version__}\n")


def test_without_a_command_the_help_is_shown() -> None:
    assert "migrate" in run().stdout
    assert "--worker-role" in run("migrate", "--help").stdout


async def test_an_empty_database_is_told_apart_and_migrated(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("drop schema flowfabric cascade")
    check = run("migrate", "--dsn", database, "--check")
    assert check.returncode == 1
    assert check.stdout == "the flowfabric schema is not installed; run `flowfabric migrate`\n"
    assert not await sql.fetchval("select to_regnamespace('flowfabric') is not null"), "a check changes nothing"

    done = run("migrate", "--dsn", database)
    assert done.returncode == 0, done
    assert f"version {SCHEMA_VERSION}" in done.stdout
    assert "0001_" in done.stdout

    check = run("migrate", "--check", FLOWFABRIC_DSN=database)
    assert (check.returncode, check.stdout) == (0, f"the schema is version {SCHEMA_VERSION}, which is current\n")
    again = run("migrate", FLOWFABRIC_DSN=database)
    assert again.returncode == 0
    assert "no new steps" in again.stdout


async def test_an_older_schema_is_told_the_command_to_run(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("delete from flowfabric.schema_step")
    await sql.execute("insert into flowfabric.schema_step (number, name) values (-1, 'from the past')")
    done = run("migrate", "--check", "--dsn", database)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert "older than this package; run `flowfabric migrate`" in line


async def test_a_newer_schema_is_told_to_upgrade_the_package(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("insert into flowfabric.schema_step (number, name) values (9999, 'from the future')")
    done = run("migrate", "--check", "--dsn", database)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert "newer than this package; upgrade the package" in line
    assert "9999" in line
    assert "upgrade the package" in failed(run("migrate", "--dsn", database))


async def test_worker_roles_are_named_on_the_command_line(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as one, a_role(sql) as two:
        done = run("migrate", "--dsn", database, "--worker-role", one, "--worker-role", two)
        assert done.returncode == 0, done
        for role in (one, two):
            async with await ff.Engine.connect(as_user(database, role)) as engine:
                await submit(engine)
        await sql.execute("delete from flowfabric.worker_role")
    assert "create the role first" in failed(run("migrate", "--dsn", database, "--worker-role", "no_such_role"))


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_an_unreachable_database_is_one_line(options: tuple[str, ...]) -> None:
    line = failed(run("migrate", "--dsn", f"postgresql://someone:{SECRET}@127.0.0.1:1/shop", *options))
    assert "cannot be reached" in line
    assert "127.0.0.1:1/shop" in line


async def test_a_user_without_rights_is_one_line(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as role:
        assert "lacks privileges" in failed(run("migrate", "--dsn", as_user(database, role, SECRET)))
        assert "lacks privileges" in failed(run("migrate", "--check", "--dsn", as_user(database, role, SECRET)))


def test_without_an_address_the_embedded_server_is_migrated(tmp_path: Path) -> None:
    place = str(tmp_path / "data")
    check = run("migrate", "--check", FLOWFABRIC_DATA_DIR=place)
    assert check.returncode == 1
    assert "not installed" in check.stdout
    assert run("migrate", FLOWFABRIC_DATA_DIR=place).returncode == 0
    assert run("migrate", "--check", FLOWFABRIC_DATA_DIR=place).returncode == 0


def test_an_embedded_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert str(in_the_way) in failed(run("migrate", FLOWFABRIC_DATA_DIR=str(in_the_way)))


def test_an_unknown_option_is_refused() -> None:
    done = run("migrate", "--downgrade")
    assert done.returncode == 2
    assert "--downgrade" in done.stderr
