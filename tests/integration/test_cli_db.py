"""`flowfabric db` and `doctor`: addresses without secrets, a prompt, copies, and the life of the embedded server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import diagnosis
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric.cli._database import split_password
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from tests.conftest import new_database, new_plain_engine  # noqa: F401 - fixtures
from tests.databases import fresh_database
from tests.integration.test_cli import PATIENCE, PROGRAM, call, failed, here, run
from tests.integration.test_connection import NASTY, SECRET, a_role, as_user, leaked
from tests.support import Clock, started, submit, system_programs


@pytest.mark.parametrize(
    ("dsn", "bare", "password"),
    [
        ("postgresql://u:p@h:5/d", "postgresql://u@h:5/d", "p"),
        ("postgresql://u:p%40%3a@h/d?sslmode=require", "postgresql://u@h/d?sslmode=require", "p@:"),
        ("postgresql://u@h/d?password=p%20q&sslmode=require", "postgresql://u@h/d?sslmode=require", "p q"),
        ("postgres://u@/d?host=/tmp/x&port=5", "postgres://u@/d?host=/tmp/x&port=5", None),
        ("postgresql:///d?host=/tmp/x", "postgresql:///d?host=/tmp/x", None),
        ("postgresql:///d?password=p", "postgresql:///d", "p"),
        ("postgresql://u:@h/d", "postgresql://u@h/d", ""),
        ("postgresql://u@h/d?sslpassword=s&sslkey=k", "postgresql://u@h/d?sslkey=k", None),
        ("postgresql://u:p@h/d?PassWord=q&ssl%70assword=s", "postgresql://u@h/d", "p"),
    ],
)
def test_a_password_is_taken_out_of_an_address(dsn: str, bare: str, password: str | None) -> None:
    assert split_password(dsn) == (bare, password)


async def test_the_address_is_shown_without_its_password(database: str) -> None:
    with_password = as_user(database, "postgres", SECRET)
    for arguments in ([], ["--json"]):
        said = await call("db", "url", *arguments, dsn=with_password)
        assert SECRET not in said.out + said.err
        assert "postgres@" in said.out
    assert (await call("db", "url", "--show-password", dsn=with_password)).out.strip() == with_password


@pytest.mark.parametrize(("dsn", "secret"), NASTY)
async def test_no_command_tells_a_part_of_a_password_that_was_not_encoded(
    dsn: str, secret: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("DEBUG")
    handed: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *given: handed.append(given))
    monkeypatch.setattr(subprocess, "run", lambda *given, **_: handed.append(given))
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **_: handed.append(given))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.sql").write_text("")
    for arguments in (
        ["ls"], ["migrate"], ["migrate", "--check"], ["doctor"], ["doctor", "--json"], ["db", "url"],
        ["db", "url", "--json"], ["db", "psql"], ["db", "dump"], ["db", "load", "some.sql"], ["dev", "some:app"],
    ):  # fmt: skip
        said = await call(*arguments, dsn=dsn, code=2)
        assert not leaked(secret, said.out, said.err, caplog.text), arguments
        assert "percent-encode the password" in said.out + said.err or "not a URL" in said.out + said.err
    assert handed == []


async def test_a_passphrase_is_neither_shown_nor_put_into_the_process_list(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *given: handed.append(given))
    dsn = f"postgresql://u@h/d?sslpassword={SECRET}"
    assert (await call("db", "url", dsn=dsn)).out == "postgresql://u@h/d\n"
    assert "sslpassword" in (await call("db", "psql", dsn=dsn, code=2)).err
    assert handed == []


async def test_psql_gets_the_password_by_the_environment(tmp_path: Path, database: str) -> None:
    (tmp_path / "postgres").touch(0o755)
    (tmp_path / "initdb").touch(0o755)
    spy = tmp_path / "psql"
    spy.write_text('#!/bin/sh\necho "arguments: $*"\necho "password: $PGPASSWORD"\n')
    spy.chmod(0o755)
    address = as_user(database, "postgres", SECRET)
    done = run("db", "psql", "--dsn", address, "--", "-c", "select 1", FLOWFABRIC_PG_BIN=str(tmp_path))
    words, password = done.stdout.splitlines()
    assert SECRET not in words
    assert words.endswith("-c select 1")
    assert password == f"password: {SECRET}"


async def test_psql_is_run_on_the_database(database: str) -> None:
    done = run("db", "psql", "--dsn", database, "--", "-tAc", "select current_database()")
    assert (done.returncode, done.stdout.strip()) == (0, urlsplit(database).path.strip("/"))
    done = run("db", "psql", "--dsn", database, "--", "-c", "select nonsense")
    assert done.returncode == 1


async def test_a_dump_is_loaded_elsewhere(engine: ff.Engine, database: str, server: str, tmp_path: Path) -> None:
    claimed = await started(engine, input_payload=b'{"n": 1}')
    await engine.complete(claimed.handle, b'"done"')
    waiting = await submit(engine)
    file = tmp_path / "all.sql"
    assert (await call("db", "dump", "-o", str(file), dsn=database)).out == ""
    answer = (await call("db", "dump", "-o", str(file), "--json", dsn=database)).json
    assert answer == {"file": str(file), "bytes": file.stat().st_size}
    assert [path.name for path in tmp_path.iterdir()] == ["all.sql"]
    async with fresh_database(server) as other:
        assert "already has the flowfabric schema" in (await call("db", "load", str(file), dsn=other, code=2)).err
        connection = await asyncpg.connect(other)
        await connection.execute("drop schema flowfabric cascade")
        await connection.close()
        assert (await call("db", "load", str(file), "--json", dsn=other)).json == {"schema_version": SCHEMA_VERSION}
        async with await ff.Engine.connect(other) as copy:
            assert await copy.get_execution_result(claimed.execution_id) == b'"done"'
            assert await copy.read_execution_state(waiting) is ff.State.WAITING
            assert await copy.audit(events=True) == []


async def test_a_dump_that_fails_leaves_nothing(database: str, tmp_path: Path) -> None:
    file = tmp_path / "all.sql"
    file.write_text("an earlier one")
    done = await here("db", "dump", "-o", str(file), "--dsn", f"{database.split('?')[0]}_gone?{database.split('?')[1]}")
    assert done.returncode == 2
    assert "pg_dump failed" in done.stderr
    assert file.read_text() == "an earlier one"
    assert list(tmp_path.iterdir()) == [file]
    assert "no directory" in failed(await here("db", "dump", "-o", str(tmp_path / "no" / "x"), "--dsn", database))
    assert "no file" in failed(await here("db", "load", str(tmp_path / "none.sql"), "--dsn", database))


async def test_a_dump_that_does_not_load_changes_nothing(server: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.sql"
    file.write_text("create table stays (); select nonsense;")
    async with fresh_database(server) as dsn:
        connection = await asyncpg.connect(dsn)
        await connection.execute("drop schema flowfabric cascade")
        said = await call("db", "load", str(file), dsn=dsn, code=1)
        assert "psql failed" in said.err
        assert await connection.fetchval("select to_regclass('stays')") is None
        await connection.close()


# The embedded server


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A data directory of its own, whose server is stopped at the end."""
    data = tmp_path / "data"
    yield data
    embedded.stop(data)


def test_the_embedded_server_is_kept_up_stopped_and_reset(place: Path) -> None:
    settings = {"FLOWFABRIC_DATA_DIR": str(place)}
    assert run("db", "stop", **settings).stdout == "the embedded server is not running\n"
    assert "there is no data" in run("db", "reset", "--yes", **settings).stdout
    keeping = subprocess.Popen(
        [PROGRAM, "db", "run"],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert keeping.stdout is not None
    url = keeping.stdout.readline().strip()
    assert run("db", "url", **settings).stdout.strip() == url
    assert run("db", "psql", "--", "-tAc", "select 1", **settings).stdout.strip() == "1"
    asyncio.run(migrate_database(url))
    assert json.loads(run("lanes", "--json", **settings).stdout) == {"lanes": [], "held": []}
    keeping.send_signal(signal.SIGTERM)
    assert keeping.wait(PATIENCE) == 0
    keeping.stdout.close()

    refused = run("db", "reset", **settings)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert (place / "pgdata").exists()
    kept = json.loads(run("db", "reset", "--keep", "--yes", "--json", **settings).stdout)
    assert Path(kept["moved_to"]).joinpath("PG_VERSION").exists()
    assert not (place / "pgdata").exists()
    assert run("migrate", "--check", **settings).returncode == 1, "the next use begins with nothing"
    assert run("db", "reset", "--yes", **settings).stdout == "deleted\n"
    assert sorted(path.name for path in place.glob("pgdata*")) == [Path(kept["moved_to"]).name]


async def test_a_server_of_yours_is_neither_stopped_nor_deleted(database: str, tmp_path: Path) -> None:
    for verb in ("reset", "stop", "run"):
        options = ["--yes"] if verb == "reset" else []
        assert "works only on the embedded one" in failed(await here("db", verb, *options, "--dsn", database))
        assert "FLOWFABRIC_DSN" in failed(await here("db", verb, *options, FLOWFABRIC_DSN=database))


def test_for_data_of_another_major_version_the_error_says_how_to_continue(place: Path) -> None:
    embedded.start(place).release()
    embedded.stop(place)
    (place / "pgdata" / "PG_VERSION").write_text("13\n")
    for command in (["ls"], ["db", "url"], ["migrate"]):
        line = failed(run(*command, FLOWFABRIC_DATA_DIR=str(place)))
        for words in (
            "belongs to PostgreSQL 13",
            f"the installed server is PostgreSQL {embedded.majors()[1]}",
            "FLOWFABRIC_PG_BIN=",
            "flowfabric db dump -o",
            "flowfabric db reset --keep",
            "flowfabric db load",
        ):
            assert words in line
    done = run("doctor", FLOWFABRIC_DATA_DIR=str(place))
    assert done.returncode == 2
    assert "data of PostgreSQL 13" in done.stdout


@pytest.mark.skipif(system_programs() is None, reason="needs a second major version of Postgres")
def test_data_move_to_another_major_version_as_the_message_says(place: Path, tmp_path: Path) -> None:
    old = {"FLOWFABRIC_DATA_DIR": str(place), "FLOWFABRIC_PG_BIN": str(system_programs())}
    new = {"FLOWFABRIC_DATA_DIR": str(place)}
    assert run("migrate", **old).returncode == 0
    done = run("db", "psql", "--", "-qc", "create table mine as select 42 as n", **old)
    assert done.returncode == 0, done
    assert run("db", "stop", **new).returncode == 0
    assert "belongs to PostgreSQL" in failed(run("ls", **new))

    file = tmp_path / "flowfabric.sql"
    assert run("db", "dump", "-o", str(file), **old).returncode == 0
    assert run("db", "reset", "--keep", "--yes", **new).returncode == 0
    done = run("db", "load", str(file), **new)
    assert done.returncode == 0, done
    assert run("db", "psql", "--", "-tAc", "select n from mine", **new).stdout.strip() == "42"
    assert run("migrate", "--check", **new).returncode == 0


# doctor


@pytest.fixture
async def findings(database: str) -> Any:
    async def examine(code: int, *arguments: str, dsn: str = database) -> dict[str, tuple[str, str]]:
        answer = (await call("doctor", "--json", *arguments, dsn=dsn, code=code)).json
        assert answer["is_fit"] == (code == 0)
        return {one["check"]: (one["verdict"], f"{one['detail']} {one['advice']}") for one in answer["findings"]}

    return examine


async def test_doctor_finds_the_server_of_the_tests_unsafe(findings: Any) -> None:
    found = await findings(1)
    assert found["durability"][0] == "problem", "the tests run without fsync"
    others = {check: verdict for check, (verdict, _) in found.items() if check != "durability"}
    assert set(others.values()) == {"ok"}, found
    assert set(others) >= {"connection", "server", "schema", "privileges", "clock", "dead rows", "old transactions"}


async def test_doctor_is_readable(database: str) -> None:
    said = (await call("doctor", dsn=database, code=1)).out
    assert said.splitlines()[0].split() == ["CHECK", "VERDICT", "FOUND", "WHAT", "TO", "DO"]
    assert "\x1b" not in said


async def test_doctor_sees_a_missing_and_an_old_schema(findings: Any, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("update flowfabric.build set functions = 'others'")
    verdict, words = (await findings(1))["schema"]
    assert verdict == "warning" and "run `flowfabric migrate`" in words
    await sql.execute("update flowfabric.build set version = 9")
    assert (await findings(1))["schema"][0] == "ok"
    await sql.execute("update flowfabric.build set oldest = 8")
    assert "upgrade the package" in (await findings(1))["schema"][1]
    await sql.execute("update flowfabric.build set version = 0, oldest = 0")
    assert "flowfabric migrate" in (await findings(1))["schema"][1]
    await sql.execute("drop schema flowfabric cascade")
    found = await findings(1)
    assert found["schema"] == ("problem", "not installed run `flowfabric migrate`")


async def test_doctor_sees_what_a_role_may_not_do(findings: Any, database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as role:
        dsn = as_user(database, role)
        found = await findings(1, dsn=dsn)
        assert found["privileges"][0] == "problem"
        assert f"`--operate-role` {role}" in found["privileges"][1]
        await sql.execute(f"grant usage on schema flowfabric to {role}")
        found = await findings(1, dsn=dsn)
        assert found["privileges"][0] == "problem"
        assert f"{role} has none of the roles read, submit, work, operate" in found["privileges"][1]
        await migrate_database(database, read_roles=(role,))
        found = await findings(1, dsn=dsn)
        assert found["privileges"] == ("ok", f"{role} has the role read; not submit, work, operate ")
        await migrate_database(database, worker_roles=(role,))
        found = await findings(1, dsn=dsn)
        assert found["privileges"] == ("ok", f"{role} has the roles read, submit, work; not operate ")
        await migrate_database(database, operate_roles=(role,))
        found = await findings(1, dsn=dsn)
        assert found["privileges"] == ("ok", f"{role} has the roles read, submit, work, operate ")
        assert found["schema"][0] == "ok"
        assert "pg_read_all_stats" in found["old transactions"][1]
        await sql.execute("delete from flowfabric.granted_role")


async def test_doctor_sees_a_moved_clock_and_late_timers(findings: Any, engine: ff.Engine, clock: Clock) -> None:
    await started(engine)
    await clock.advance(minutes=10)
    found = await findings(1)
    assert found["clock"][0] == "warning"
    assert found["duties"][0] == "warning"
    assert "run a worker" in found["duties"][1]


async def test_doctor_sees_dead_rows(findings: Any, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("alter table flowfabric.ready set (autovacuum_enabled = off)")
    await sql.execute(
        "insert into flowfabric.ready (route, rank, created_at, id, partition)"
        " select 1, 0, now(), gen_random_uuid(), 0 from generate_series(1, 30000)"
    )
    await sql.execute("delete from flowfabric.ready")
    await sql.execute("select pg_stat_force_next_flush()")
    async with asyncio.timeout(PATIENCE):
        while (found := (await findings(1))["dead rows"])[0] == "ok":
            await asyncio.sleep(0.1)
    assert "ready 30,000 (live 0)" in found[1]


@pytest.fixture
async def old_transaction(sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A transaction that is old by the measure of this test, and the pid of its session."""
    monkeypatch.setattr(diagnosis, "_OLD_TRANSACTION", timedelta(0))
    transaction = sql.transaction(isolation="repeatable_read")
    await transaction.start()
    yield await sql.fetchval("select pg_backend_pid() from pg_class limit 1")
    await transaction.rollback()


async def test_doctor_names_transactions_that_block_vacuum(findings: Any, old_transaction: int) -> None:
    verdict, words = (await findings(1))["old transactions"]
    assert verdict == "warning"
    assert f"pid {old_transaction} " in words
    assert "idle in transaction" in words


@pytest.mark.parametrize(
    ("threshold", "value", "check", "words"),
    [
        ("_BLOATED_BYTES", -1, "bloat", "reindex table concurrently flowfabric.ready"),
        ("_CLOCK_OFF", -timedelta(days=1), "clock", "NTP"),
        ("_WRAPAROUND", -1, "autovacuum", "vacuum (freeze)"),
        ("MINIMUM_SERVER", 999_999, "server", "15 or newer"),
        ("_MANY_DEAD", -1, "dead rows", "vacuum"),
    ],
)
async def test_doctor_says_what_to_do(
    findings: Any,
    engine: ff.Engine,
    monkeypatch: pytest.MonkeyPatch,
    threshold: str,
    value: Any,
    check: str,
    words: str,
) -> None:
    await started(engine)
    monkeypatch.setattr(diagnosis, threshold, value)
    async with asyncio.timeout(PATIENCE):
        while (found := (await findings(1))[check])[0] == "ok":
            await asyncio.sleep(0.1)  # statistics come late
    assert words in found[1]


async def test_doctor_says_why_there_is_no_connection() -> None:
    said = await call("doctor", dsn=f"postgresql://u:{SECRET}@127.0.0.1:1/shop", code=2)
    assert "cannot be reached" in said.out
    assert SECRET not in said.out + said.err


async def test_warnings_count_only_when_asked(findings: Any, engine: ff.Engine, clock: Clock) -> None:
    await started(engine)
    await clock.advance(minutes=10)
    safe = tuple(check for check in diagnosis.CHECKS if check.__name__ != "_durability")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis, "CHECKS", safe)
        assert (await findings(0))["duties"][0] == "warning"
        await findings(1, "--strict")


def test_doctor_checks_the_embedded_server_too(place: Path) -> None:
    done = run("doctor", FLOWFABRIC_DATA_DIR=str(place))
    assert done.returncode == 0, done
    assert f"programs of PostgreSQL {embedded.majors()[1]}" in done.stdout
    assert "fsync on" in done.stdout
