"""Migrating: from nothing, again, from many processes at the same time, and after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import build
from flowfabric._postgres import database as database_module
from flowfabric._postgres import migrate as module
from flowfabric._postgres.build import THIS, Build, sql_files
from flowfabric._postgres.migrate import SCHEMA_VERSION, Migration, Step, current_version, migrate, steps
from flowfabric.engine.service import migrate_database, schema_version
from flowfabric.errors import ConnectionFailed, TransportError
from tests.conftest import new_database, new_plain_engine  # noqa: F401 - fixtures
from tests.integration.test_connection import a_role, as_user
from tests.support import in_database, started, submit, until_blocked

pytestmark = pytest.mark.both_servers

PATIENCE = 60.0
ALL_STEPS = tuple(step.label for step in steps())


@pytest.fixture
async def empty(server: str) -> AsyncIterator[str]:
    """The DSN of a database with nothing in it."""
    name = f"ff_empty_{os.getpid()}"
    admin = await asyncpg.connect(server)
    await admin.execute(f"create database {name}")
    yield in_database(server, name)
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()


@contextlib.asynccontextmanager
async def session(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def shape(sql: asyncpg.Connection[Any]) -> list[Any]:
    """Everything in the schema that a migration could have touched."""
    relations = await sql.fetch(
        "select c.relname, c.relkind::text, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull"
        " from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
        " where c.relnamespace = to_regnamespace('flowfabric') order by c.relname, a.attnum"
    )
    functions = await sql.fetch(
        "select p.oid::regprocedure::text, md5(p.prosrc), p.prosecdef, p.proacl::text from pg_proc p"
        " where p.pronamespace = to_regnamespace('flowfabric') order by 1"
    )
    return [tuple(row) for row in (*relations, *functions)]


def as_version(monkeypatch: pytest.MonkeyPatch, version: int, *, oldest: int) -> None:
    """The package as it would be with functions of another version."""
    made = Build(version, oldest, f"digest {version} {oldest}")
    for user in (build, module, database_module):
        monkeypatch.setattr(user, "THIS", made)


def with_step(monkeypatch: pytest.MonkeyPatch, *sql: str, name: str = "extra") -> None:
    """The package as it would be with more schema steps."""
    more = (*steps(), *(Step(SCHEMA_VERSION + i, name, text) for i, text in enumerate(sql, 1)))
    monkeypatch.setattr(module, "steps", lambda: more)
    monkeypatch.setattr(module, "SCHEMA_VERSION", len(more))


async def test_an_empty_database_gets_the_whole_schema(empty: str) -> None:
    assert await schema_version(empty) == 0
    assert await migrate_database(empty) == Migration(ALL_STEPS, SCHEMA_VERSION, THIS.version)
    assert await schema_version(empty) == SCHEMA_VERSION
    async with await ff.Engine.connect(empty) as engine:
        claimed = await started(engine)
        await engine.complete(claimed.handle)
        assert await engine.audit(events=True) == []


async def test_migrating_again_changes_nothing(database: str, sql: asyncpg.Connection[Any]) -> None:
    await migrate_database(database)
    before = await shape(sql)
    secret = await sql.fetch("select * from flowfabric.keystore")
    assert len(secret) == 1
    assert await migrate_database(database) == Migration((), SCHEMA_VERSION, THIS.version)
    assert await shape(sql) == before
    assert await sql.fetch("select * from flowfabric.keystore") == secret


async def test_a_current_database_can_be_left_as_it_is(database: str, empty: str, sql: asyncpg.Connection[Any]) -> None:
    assert (await migrate_database(empty, unless_current=True)).applied == ALL_STEPS
    await sql.execute("create function flowfabric.left_behind() returns int language sql as 'select 1'")
    before = await shape(sql)
    unchanged = Migration((), SCHEMA_VERSION, THIS.version, replaced=False)
    assert await migrate_database(database, unless_current=True) == unchanged
    assert await shape(sql) == before
    await sql.execute("update flowfabric.build set functions = 'another'")
    assert (await migrate_database(database, unless_current=True)).replaced
    assert await sql.fetchval("select to_regproc('flowfabric.left_behind')") is None


async def test_many_processes_may_migrate_at_the_same_time(empty: str) -> None:
    code = (
        "import asyncio, sys; from flowfabric.engine.service import migrate_database;"
        " print(len(asyncio.run(migrate_database(sys.argv[1])).applied))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, empty], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    here = await asyncio.gather(*(migrate_database(empty) for _ in range(5)))
    there = [await asyncio.to_thread(process.communicate, timeout=PATIENCE) for process in processes]
    applied = [len(done.applied) for done in here] + [int(out) for out, _ in there]
    assert sorted(applied) == [0] * 7 + [SCHEMA_VERSION]
    async with await ff.Engine.connect(empty) as engine:
        await submit(engine)
        assert await engine.audit() == []


async def test_a_database_in_use_can_be_migrated(plain_engine: ff.Engine, database: str) -> None:
    stop = asyncio.Event()

    async def work() -> int:
        count = 0
        while not stop.is_set():
            claimed = await started(plain_engine)
            await plain_engine.complete(claimed.handle)
            count += 1
        return count

    working = asyncio.create_task(work())
    for _ in range(3):
        await migrate_database(database)
    stop.set()
    assert await working > 0


async def test_a_failing_first_migration_leaves_nothing(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_step(monkeypatch, "create table flowfabric.half (); select 1 / 0")
    with pytest.raises(TransportError, match="division by zero"):
        await migrate_database(empty)
    async with session(empty) as sql:
        assert await sql.fetchval("select to_regnamespace('flowfabric')") is None
        assert await current_version(sql) == (0, None)
    monkeypatch.undo()
    assert (await migrate_database(empty)).applied == ALL_STEPS


async def test_a_failing_step_leaves_the_version_before_it_and_can_be_resumed(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await ff.Engine.connect(database) as engine:
        execution_id = await submit(engine)
        before = await shape(sql)
        with_step(monkeypatch, "create table flowfabric.half (); select 1 / 0")
        with pytest.raises(TransportError):
            await migrate_database(database)
        assert await shape(sql) == before
        assert await schema_version(database) == SCHEMA_VERSION

        with_step(monkeypatch, "create table flowfabric.whole ()")
        name = f"{SCHEMA_VERSION + 1:04d}_extra"
        assert await migrate_database(database) == Migration((name,), SCHEMA_VERSION + 1, THIS.version)
        assert await migrate_database(database) == Migration((), SCHEMA_VERSION + 1, THIS.version)
        assert await sql.fetchval("select to_regclass('flowfabric.whole') is not null")
        assert await engine.read_execution_state(execution_id) is ff.State.WAITING


async def test_a_killed_migration_leaves_nothing_and_blocks_no_other(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session(empty) as admin:
        with monkeypatch.context() as patched:
            with_step(patched, "select pg_sleep(600)")
            dying = asyncio.create_task(migrate_database(empty))
            async with asyncio.timeout(PATIENCE):
                while not await admin.fetchval(
                    "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity"
                    " where datname = current_database() and query = 'select pg_sleep(600)'"
                ):
                    await asyncio.sleep(0.01)
            with pytest.raises(TransportError) as lost:
                await dying
            assert lost.value.retryable
        assert await admin.fetchval("select to_regnamespace('flowfabric')") is None
        assert (await migrate_database(empty)).applied == ALL_STEPS


async def test_functions_are_replaced_on_every_run(database: str, sql: asyncpg.Connection[Any]) -> None:
    await migrate_database(database)
    before = await shape(sql)
    await sql.execute(
        "create or replace function flowfabric.server_time_ms() returns bigint language sql volatile security definer"
        " set search_path = flowfabric, pg_temp as 'select -1::bigint'"
    )
    await sql.execute("drop function flowfabric.ms(double precision) cascade")
    assert await shape(sql) != before
    await migrate_database(database)
    assert await shape(sql) == before


async def test_a_worker_role_keeps_its_rights_over_later_runs(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as role:
        await migrate_database(database, worker_roles=(role,))
        dsn = as_user(database, role)
        async with await ff.Engine.connect(dsn) as engine:
            await submit(engine)
        await sql.execute("drop function flowfabric.server_time_ms()")  # and with it the grant
        await migrate_database(database)
        async with await ff.Engine.connect(dsn) as engine:
            assert await engine.server_time_ms() > 0
        await migrate_database(database, worker_roles=(role,))
        assert await sql.fetch("select name, kind from flowfabric.granted_role") == [(role, "work")]
        await sql.execute("delete from flowfabric.granted_role")


async def test_for_a_role_that_does_not_exist_nothing_is_done(empty: str) -> None:
    with pytest.raises(ff.InvalidInput, match="there is no role 'no_such_role' on this server") as missing:
        await migrate_database(empty, worker_roles=("no_such_role",))
    assert missing.value.field == "--worker-role"
    assert await schema_version(empty) == 0


async def test_for_a_user_who_may_not_create_the_schema_the_error_says_so(empty: str) -> None:
    async with session(empty) as sql, a_role(sql) as role:
        with pytest.raises(ConnectionFailed) as refused:
            await migrate_database(as_user(empty, role))
    assert refused.value.kind == "missing_privileges"
    assert await schema_version(empty) == 0


async def test_an_owner_without_superuser_rights_can_migrate_and_work(empty: str) -> None:
    async with session(empty) as sql, a_role(sql) as role:
        name = await sql.fetchval("select current_database()")
        await sql.execute(f"grant create on database {name} to {role}")
        dsn = as_user(empty, role)
        await migrate_database(dsn)
        await migrate_database(dsn)
        async with await ff.Engine.connect(dsn) as engine:
            claimed = await started(engine)
            await engine.complete(claimed.handle)
            assert await engine.audit(events=True) == []


async def test_newer_functions_that_serve_this_package_are_left_alone(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("insert into flowfabric.schema_step (number, name) values (9999, 'from_the_future')")
    await sql.execute("update flowfabric.build set version = 9, functions = 'newer'")
    await sql.execute("create function flowfabric.newer() returns int language sql as 'select 1'")
    before = await shape(sql)
    assert await migrate_database(database) == Migration((), 9999, 9, replaced=False)
    assert await shape(sql) == before
    async with await ff.Engine.connect(database) as engine:
        assert await engine.audit() == [] and await submit(engine)

    assert await migrate_database(database, force=True) == Migration((), 9999, THIS.version)
    assert await sql.fetchval("select to_regproc('flowfabric.newer')") is not None, "calls that began end with it"
    await migrate_database(database)
    assert await sql.fetchval("select to_regproc('flowfabric.newer')") is None


async def test_newer_functions_that_do_not_serve_this_package_are_refused(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("update flowfabric.build set version = 9, oldest = 8, functions = 'newer'")
    before = await shape(sql)
    for call in (migrate_database, ff.Engine.connect):
        with pytest.raises(
            ConnectionFailed, match=r"upgrade the package.*version 9 and serve .* from version 8"
        ) as newer:
            await call(database)  # type: ignore[operator]
        assert newer.value.kind == "schema_newer"
    assert await shape(sql) == before


async def test_older_functions_are_refused_until_they_are_migrated(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_version(monkeypatch, 3, oldest=2)
    with pytest.raises(ConnectionFailed, match=r"run `flowfabric migrate`.*version 1, this package needs 3") as older:
        await ff.Engine.connect(database)
    assert older.value.kind == "schema_older"
    assert (await migrate_database(database)).functions == 3
    async with await ff.Engine.connect(database) as engine:
        await submit(engine)


async def test_functions_that_a_build_lacks_are_kept_while_processes_that_call_them_are_served(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the name of one that has settings.
    made = "create function flowfabric.complete({} {}) returns int language sql security definer as 'select 1'"

    async def left() -> set[str]:
        rows = await sql.fetch("select proargnames[1] as name from pg_proc where proname = 'complete' and pronargs = 1")
        return {row["name"] for row in rows}

    await sql.execute(made.format("only_one", "int"))
    async with a_role(sql) as worker:
        await migrate_database(database, worker_roles=(worker,))
        await sql.execute(made.format("only_one", "int"))
        await sql.execute(f"grant execute on function flowfabric.complete(int) to {worker}")
        as_version(monkeypatch, 2, oldest=1)
        await migrate_database(database)
        assert await sql.fetchval("select has_function_privilege($1, 'flowfabric.complete(int)', 'execute')", worker), (
            "processes of the version before call it"
        )
        await sql.execute("delete from flowfabric.granted_role")
    assert await left() == {"only_one"}
    await migrate_database(database)
    assert await left() == {"only_one"}, "the same build again"
    await sql.execute(made.format("only_two", "text"))
    as_version(monkeypatch, 3, oldest=2)
    await migrate_database(database)
    assert await left() == {"only_two"}
    as_version(monkeypatch, 4, oldest=4)
    await migrate_database(database)
    assert await left() == set()
    assert await sql.fetchval("select count(*) from flowfabric.kept_function") == 0


async def test_a_build_that_breaks_a_call_of_processes_it_serves_is_refused(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = "create or replace function flowfabric.server_time_ms() returns text language sql as $$select ''$$"
    files = [(path, changed if path.endswith("/server_time_ms.sql") else sql) for path, sql in sql_files("functions")]
    monkeypatch.setattr(module, "sql_files", lambda folder: files if folder == "functions" else sql_files(folder))
    before = await shape(sql)
    as_version(monkeypatch, 2, oldest=1)
    with pytest.raises(ValueError, match=r"server_time_ms\.sql replaces a function that processes of version 1 call"):
        await migrate_database(database)
    assert await shape(sql) == before
    as_version(monkeypatch, 2, oldest=2)
    await migrate_database(database)
    assert await sql.fetchval("select pg_get_function_result('flowfabric.server_time_ms()'::regprocedure)") == "text"


async def test_a_step_that_cannot_have_its_lock_lets_the_others_pass(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_step(monkeypatch, "alter table flowfabric.lane add column note text")
    monkeypatch.setattr(module, "_LOCK_TIMEOUT", "50ms")
    async with session(database) as reader, session(database) as other:
        async with reader.transaction():
            await reader.fetch("select * from flowfabric.lane")
            await reader.execute("set application_name = 'a long report'")
            with pytest.raises(ConnectionFailed, match=r"open transactions use its tables.*a long report") as locked:
                await migrate(sql, patience=0.2)
            assert locked.value.kind == "schema_locked" and locked.value.retryable
            waiting = asyncio.create_task(migrate(sql, patience=PATIENCE))
            for _ in range(5):  # a call that comes while it tries waits for one try at most
                await asyncio.wait_for(other.fetch("select * from flowfabric.lane"), PATIENCE)
                await asyncio.sleep(0.05)
            assert not waiting.done()
        assert (await waiting).applied == ("0002_extra",)


async def test_a_migration_that_waited_sees_the_other_in_every_isolation_level(empty: str) -> None:
    async with session(empty) as sql, session(empty) as first, session(empty) as second:
        await second.execute("set default_transaction_isolation = 'repeatable read'; set search_path = pg_catalog")
        async with first.transaction(isolation="read_committed"):
            assert (await migrate(first)).applied == ALL_STEPS
            late = asyncio.create_task(migrate(second))
            await until_blocked(sql)
        assert (await late).applied == ()


def test_the_steps_are_numbered_without_gaps() -> None:
    assert [step.number for step in steps()] == list(range(1, SCHEMA_VERSION + 1))
    assert not [step.name for step in steps() if "flowfabric.now()" in step.sql], "a step never calls our functions"


async def test_other_functions_of_the_same_version_are_reported_and_all_replaced(
    database: str, sql: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    await sql.execute("update flowfabric.build set functions = 'another'")
    await sql.execute("create function flowfabric.left_behind() returns int language sql as 'select 1'")
    async with await ff.Engine.connect(database):
        assert "differ from this package's; run `flowfabric migrate`" in caplog.text
    caplog.clear()
    await migrate_database(database)
    async with await ff.Engine.connect(database):
        assert not caplog.text
    assert await sql.fetchval("select to_regproc('flowfabric.left_behind')") is None


async def test_a_dropped_worker_role_is_skipped(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("insert into flowfabric.granted_role values ('gone_since', 'work')")
    await migrate_database(database)


async def test_new_steps_are_applied_once_and_in_order(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "create table flowfabric.steps_seen (n integer)", "insert into flowfabric.steps_seen values (2)"
    with monkeypatch.context() as patched:
        with_step(patched, first)
        assert await migrate_database(database) == Migration(("0002_extra",), 2, THIS.version)
    with monkeypatch.context() as patched:
        with_step(patched, first, second, "update flowfabric.steps_seen set n = n * 10 + 3")
        assert await migrate_database(database) == Migration(("0003_extra", "0004_extra"), 4, THIS.version)
        assert await migrate_database(database) == Migration((), 4, THIS.version)
    assert await sql.fetchval("select n from flowfabric.steps_seen") == 23
    assert await sql.fetchval("select steps from flowfabric.deployment_info()") == [
        *ALL_STEPS, "0002_extra", "0003_extra", "0004_extra",
    ]  # fmt: skip
    assert await migrate_database(database) == Migration((), 4, THIS.version)


async def test_for_a_database_with_other_steps_the_error_says_to_reset_or_dump(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute("delete from flowfabric.schema_step")
    await sql.execute(
        "insert into flowfabric.schema_step (number, name)"
        " values (1, 'executions'), (2, 'tasks'), (3, 'suspension'), (4, 'flows')"
    )
    before = await shape(sql)
    for call in (migrate_database, schema_version, ff.Engine.connect):
        with pytest.raises(ConnectionFailed, match=r"flowfabric db dump.*flowfabric db reset") as foreign:
            await call(database)  # type: ignore[operator]
        assert foreign.value.kind == "schema_foreign"
    assert await shape(sql) == before
    # As the functions of that version told it, to this one.
    await sql.execute("drop function flowfabric.deployment_info()")
    await sql.execute(
        "create function flowfabric.deployment_info() returns table"
        " (schema_version integer, functions text, flow_partitions integer, server_version integer)"
        " language sql as $$select 4, 'another', 256, 180000$$"
    )
    with pytest.raises(ConnectionFailed, match="run `flowfabric migrate`"):
        await ff.Engine.connect(database)
    for call in (migrate_database, schema_version):
        with pytest.raises(ConnectionFailed) as foreign:
            await call(database)  # type: ignore[operator]
        assert foreign.value.kind == "schema_foreign"
    # A step of the package that was renamed since is another step.
    await sql.execute("delete from flowfabric.schema_step where number > 1")
    await sql.execute("update flowfabric.schema_step set name = 'schema'; update flowfabric.build set functions = '-'")
    with_step(monkeypatch, "select 1")
    await migrate_database(database)
    monkeypatch.undo()
    with_step(monkeypatch, "select 1", name="renamed")
    with pytest.raises(ConnectionFailed, match=r"0002_extra.*0002_renamed"):
        await migrate_database(database)


async def test_settings_of_functions_are_applied_from_one_file(sql: asyncpg.Connection[Any]) -> None:
    found = {
        row["proname"]: (row["prosecdef"], set(row["proconfig"] or ()))
        for row in await sql.fetch(
            "select proname, prosecdef, proconfig from pg_proc where pronamespace = 'flowfabric'::regnamespace"
        )
    }
    path = "search_path=flowfabric, pg_temp"
    assert all((path in config) == is_definer for is_definer, config in found.values())
    joins = {"enable_hashjoin=off", "enable_mergejoin=off"}
    generic = {path, "plan_cache_mode=force_generic_plan", "enable_seqscan=off", "jit=off"}
    assert found["complete"] == (True, generic | joins)
    assert found["claim"] == (True, generic | joins | {"enable_bitmapscan=off", "enable_sort=off"})
    assert found["grow_flow"] == (True, generic | {"enable_mergejoin=off", "enable_bitmapscan=off"})
    assert found["trim_events"] == (False, {"lock_timeout=200ms"})
    assert found["end_executions"] == (False, set())


async def test_settings_for_a_function_that_does_not_exist_are_refused(sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("drop function flowfabric.trim_events(timestamptz)")
    with pytest.raises(asyncpg.RaiseError, match="does not exist: trim_events"):
        await sql.execute(build.settings_of_functions())
