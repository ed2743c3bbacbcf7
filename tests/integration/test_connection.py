"""Connecting, its error messages, and calls during which the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import traceback
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import database as database_module
from flowfabric._postgres import dsn as dsn_module
from flowfabric._postgres.connections import Connections
from flowfabric._postgres.listen import Listener
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database, schema_version
from flowfabric.errors import ConnectionFailed, RetriesExhausted, TransportError
from flowfabric.values.stream import NewFrame
from tests.conftest import FAST
from tests.support import Clock, claim_one, in_database, started, submit, until_blocked

PATIENCE = 60.0
SECRET = "s3cr3t-Pw"
_names = itertools.count()


def as_user(dsn: str, user: str, password: str | None = None) -> str:
    """The same database for another user."""
    parts = urlsplit(dsn)
    who = user if password is None else f"{user}:{password}"
    return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc.rpartition('@')[2]}"))


@contextlib.asynccontextmanager
async def a_role(sql: asyncpg.Connection[Any], options: str = "login") -> AsyncIterator[str]:
    """A role that exists for the time of a test. Roles belong to the server, so their names are unique."""
    name = f"ff_role_{os.getpid()}_{next(_names)}"
    await sql.execute(f"create role {name} {options}")
    try:
        yield name
    finally:
        await sql.execute(f"drop owned by {name}; drop role {name}")


async def refused(dsn: str | None, **options: Any) -> ConnectionFailed:
    """The error a connection attempt ends with, after a look that it tells no secret."""
    try:
        engine = await ff.Engine.connect(dsn, **options)
    except ConnectionFailed as error:
        told = [str(error), repr(error), *traceback.format_exception(error)]
        assert not [text for text in told if SECRET in text]
        assert "\n" not in str(error)
        return error
    await engine.close()
    raise AssertionError("connected")


# What is wrong with the address, the user, the database, the schema.


async def test_an_unreachable_server_is_named_without_the_password() -> None:
    error = await refused(f"postgresql://someone:{SECRET}@127.0.0.1:1/shop?password={SECRET}")
    assert error.kind == "unreachable"
    assert error.retryable
    assert "127.0.0.1:1/shop" in str(error)
    assert "check host, port and that it is running" in str(error)


async def test_a_missing_socket_is_unreachable(tmp_path: Path) -> None:
    error = await refused(f"postgresql://someone:{SECRET}@/shop?host={tmp_path}")
    assert error.kind == "unreachable"


@pytest.mark.parametrize(
    "dsn",
    [
        f"host=127.0.0.1 password={SECRET}",
        f"mysql://someone:{SECRET}@127.0.0.1/shop",
        f"postgresql://someone:{SECRET}@127.0.0.1:port/shop",
        f"postgresql://someone:1/{SECRET}@127.0.0.1/shop",
        f"{SECRET}",
    ],
)
async def test_a_malformed_address_is_refused_without_repeating_it(dsn: str) -> None:
    error = await refused(dsn)
    assert error.kind == "bad_address"


# Passwords that were not percent-encoded, or stand where no password belongs: (address, secret).
NASTY = [
    *(
        (f"postgresql://u:{secret}@h/db", secret)
        for secret in (
            "Xq7#Zw9Kj4", "Xq7/Zw9Kj4", "Xq7?Zw9Kj4", "Xq7@Zw9Kj4", "Xq7@Zw9:Kj4Vb8", "Xq7@Zw9/Kj4Vb8", "Xq7[Zw9Kj4",
            "Xq7\u2100Zw9Kj4", "7007#Zw9Kj4", "7007/Zw9Kj4", "7007?Zw9Kj4", "7007?zwk=Kj4Vb8", "Xq7?zwk=Kj4Vb8",
            "Xq7:Zw9/Kj4Vb8", "Xq7/Zw9@Kj4?Vb8#Nf2", "#Xq7Zw9", "/Xq7Zw9", "?Xq7Zw9",
        )
    ),
    ("postgresql://Xq7/Zw9Kj4@h/db", "Xq7/Zw9Kj4"),
    ("postgresql://u:Xq7Zw9@h:Kj4Vb8/db", "Xq7Zw9@h:Kj4Vb8"),
    ("postgresql://u@h/db?password=Xq7#Zw9Kj4", "Xq7#Zw9Kj4"),
    ("postgresql://u@h/db?password=Xq7&Zw9Kj4", "Xq7&Zw9Kj4"),
    ("postgresql://u@h/db?sslpassword=Xq7#Zw9Kj4", "Xq7#Zw9Kj4"),
    ("mysql://u:Xq7Zw9Kj4@h/db", "Xq7Zw9Kj4"),
    ("Xq7Zw9Kj4://h/db", "Xq7Zw9Kj4"),
    ("Xq7Zw9Kj4", "Xq7Zw9Kj4"),
    ("password=Xq7Zw9Kj4 host=h", "Xq7Zw9Kj4"),
]  # fmt: skip


def leaked(secret: str, *texts: str) -> list[str]:
    """The parts of a secret, of three characters, that a text shows."""
    parts = {secret[place : place + 3] for place in range(len(secret) - 2)}
    return sorted(part for part in parts for text in texts if part.lower() in text.lower())


@pytest.mark.parametrize(("dsn", "secret"), NASTY)
async def test_no_part_of_an_unencoded_password_is_shown(
    dsn: str, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")

    async def listen(dsn: str) -> object:
        return Listener(dsn)

    for attempt in (ff.Engine.connect, migrate_database, schema_version, listen):
        with pytest.raises(ConnectionFailed) as caught:
            await attempt(dsn)
        error = caught.value
        assert "percent-encode the password" in str(error) or "not a URL" in str(error)
        told = [str(error), repr(error), repr(error.__dict__), *traceback.format_exception(error, limit=0)]
        assert not leaked(secret, *told, caplog.text)
        assert error.__cause__ is None and error.__context__ is None


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql:///db", "postgres://h", "POSTGRESQL://h/db", "postgresql://u:p%40%2F%3f%23@h:5432/db",
        "postgresql://u@/db?host=/tmp/x&port=5432", "postgresql://u:p@[::1]:5432/db", "postgresql://u@a:1,b,[::1]:2/db",
        "postgresql://u:p:q@h/db", "postgresql://%2Ftmp%2Fx/db", "postgresql://h:5432/db?user=me@corp&sslmode=require",
        "postgresql://u@h/db?options=-c%20geqo%3Doff&application_name=",
    ],
)  # fmt: skip
def test_an_address_that_is_clear_is_let_through(dsn: str) -> None:
    dsn_module.check_dsn(dsn)


@pytest.mark.parametrize("query", ["port=Xq7Zw9", "sslmode=Xq7Zw9", "target_session_attrs=Xq7Zw9"])
async def test_the_drivers_message_about_an_address_is_not_repeated(query: str) -> None:
    error = await refused(f"postgresql:///db?host=127.0.0.1&{query}")
    assert error.kind == "unreachable"
    assert "the address cannot be read" in str(error)
    assert not leaked("Xq7Zw9", str(error), repr(error))


of_one_process = pytest.mark.xdist_group("own server")  # which starts once


@pytest.fixture(scope="module")
def own_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server of this module alone, for what would disturb others: passwords, restarts."""
    place = tmp_path_factory.mktemp("own") / "data"
    running = embedded.start(place, settings=FAST)
    try:
        hba = place / "pgdata" / "pg_hba.conf"
        hba.write_text("local all locked scram-sha-256\nlocal all stranger reject\n" + hba.read_text())
        asyncio.run(_prepare(running.dsn))
        yield place
    finally:
        running.release()


async def _prepare(dsn: str) -> None:
    await migrate_database(dsn)
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"create role locked login password '{SECRET}-right'")
    await connection.fetchval("select pg_reload_conf()")
    await connection.close()


@pytest.fixture
def own_server(own_dir: Path) -> Iterator[str]:
    running = embedded.start(own_dir)
    yield running.dsn
    running.release()


async def until_locked(dsn: str) -> None:
    """Wait until the server has read its new access rules."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await (await asyncpg.connect(as_user(dsn, "locked", "wrong"))).close()
            except asyncpg.InvalidPasswordError:
                return
            await asyncio.sleep(0.01)


@of_one_process
@pytest.mark.parametrize("user", ["locked", "stranger", "nobody-known"])
async def test_a_wrong_user_or_password_is_reported(own_server: str, user: str) -> None:
    await until_locked(own_server)
    error = await refused(as_user(own_server, user, SECRET))
    assert error.kind == "wrong_password"
    assert not error.retryable
    assert "refused the user name or password" in str(error)


async def test_a_missing_database_is_reported(server: str) -> None:
    error = await refused(as_user(in_database(server, "no_such_database"), "postgres", SECRET))
    assert error.kind == "database_missing"
    assert "no_such_database" in str(error)


async def test_a_server_that_is_too_old_is_reported(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "MINIMUM_SERVER", 990_000)
    error = await refused(as_user(database, "postgres", SECRET))
    assert error.kind == "server_too_old"
    assert "15 or newer" in str(error)


async def test_for_a_role_without_rights_the_error_says_what_is_missing(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with a_role(sql) as role:
        error = await refused(as_user(database, role, SECRET))
        assert error.kind == "missing_privileges"
        assert "schema flowfabric" in str(error)
        await sql.execute(f"grant usage on schema flowfabric to {role}")
        error = await refused(as_user(database, role, SECRET))
        assert error.kind == "missing_privileges"


async def test_for_a_database_without_the_schema_the_error_says_to_migrate(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("drop schema flowfabric cascade")
    error = await refused(as_user(database, "postgres", SECRET))
    assert error.kind == "schema_missing"
    assert "flowfabric migrate" in str(error)
    await sql.execute("create schema flowfabric")
    assert (await refused(database)).kind == "schema_missing"


async def test_for_an_older_schema_the_error_says_to_migrate(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "SCHEMA_VERSION", database_module.SCHEMA_VERSION + 1)
    error = await refused(as_user(database, "postgres", SECRET))
    assert error.kind == "schema_older"
    assert "flowfabric migrate" in str(error)
    monkeypatch.undo()
    await sql.execute("delete from flowfabric.schema_step")
    assert (await refused(database)).kind == "schema_older"


async def test_a_newer_schema_asks_for_a_newer_package(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("update flowfabric.build set version = 9999, oldest = 9998")
    error = await refused(as_user(database, "postgres", SECRET))
    assert error.kind == "schema_newer"
    assert "upgrade the package" in str(error)
    assert "9998" in str(error)


async def test_a_refused_connection_leaves_no_session_behind(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("update flowfabric.build set version = 9999, oldest = 9998")
    await refused(database, min_size=3)
    async with asyncio.timeout(PATIENCE):
        while await sessions(sql):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_size", {"max_size": 0}),
        ("max_size", {"min_size": 5, "max_size": 4}),
        ("min_size", {"min_size": -1}),
        ("command_timeout", {"command_timeout": timedelta(0)}),
        ("command_timeout", {"command_timeout": 5}),
        ("reconnect_for", {"reconnect_for": timedelta(seconds=-1)}),
    ],
)
async def test_impossible_options_are_refused_by_name(database: str, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ff.InvalidInput) as wrong:
        await ff.Engine.connect(database, **options)
    assert wrong.value.field == field


# Where the address comes from.


async def test_the_address_comes_from_the_environment(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFABRIC_DSN", database)
    async with await ff.Engine.connect() as engine:
        await engine.ping()
        assert engine.target.endswith(urlsplit(database).path)


async def test_an_address_given_in_code_wins_over_the_environment(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWFABRIC_DSN", "postgresql://someone@127.0.0.1:1/nowhere")
    async with await ff.Engine.connect(database) as engine:
        await engine.ping()


async def test_without_an_address_an_embedded_server_starts_and_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWFABRIC_DSN", raising=False)
    monkeypatch.setenv("FLOWFABRIC_DATA_DIR", str(tmp_path / "here"))
    async with await ff.Engine.connect() as engine:
        execution_id = await submit(engine)
        async with await ff.Engine.connect() as second:
            assert await second.read_execution_state(execution_id) is ff.State.WAITING
        assert await engine.audit() == []
    assert (tmp_path / "here" / "pgdata").is_dir()
    assert tmp_path / "here" not in embedded._process.held, "the last engine that is closed gives the server back"


# Calls and lost connections.


async def sessions(sql: asyncpg.Connection[Any]) -> int:
    return int(
        await sql.fetchval(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name = 'flowfabric'"
        )
    )


async def terminate(sql: asyncpg.Connection[Any], *, waiting: bool = False) -> None:
    """End the sessions of the engines; with `waiting`, only once one of them waits for a lock."""
    async with asyncio.timeout(PATIENCE):
        while not await sql.fetchval(
            "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity"
            " where datname = current_database() and application_name = 'flowfabric'"
            " and (not $1 or wait_event_type = 'Lock')",
            waiting,
        ):
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def held(database: str, execution_id: ff.ExecutionId) -> AsyncIterator[None]:
    """Another transaction holds the execution's lock."""
    holder = await asyncpg.connect(database)
    try:
        async with holder.transaction():
            await holder.execute("select from flowfabric.execution where id = $1 for update", execution_id)
            yield
    finally:
        await holder.close()


async def test_a_session_that_ends_while_an_engine_connects_is_replaced(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    holder = await asyncpg.connect(database)
    try:
        await holder.execute("begin; lock table flowfabric.deployment in access exclusive mode")
        connecting = asyncio.create_task(ff.Engine.connect(database))
        await terminate(sql, waiting=True)
        await until_blocked(sql, "deployment")  # the second one
        await holder.execute("rollback")
        async with await connecting as engine:
            assert await engine.audit() == []
    finally:
        await holder.close()


async def test_an_engine_reconnects_after_its_sessions_were_ended(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    await plain_engine.ping()
    for _ in range(3):
        await terminate(sql)
        assert await plain_engine.server_time_ms() > 0
        await submit(plain_engine)
        assert await plain_engine.claim(worker_id="w", worker_instance_id="w-1") is not None


async def test_a_call_that_may_be_repeated_survives_the_end_of_its_session(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    claimed = await started(plain_engine)
    async with held(database, claimed.execution_id):
        completing = asyncio.create_task(plain_engine.complete(claimed.handle, b"once"))
        await terminate(sql, waiting=True)
    await completing
    assert await plain_engine.get_execution_result(claimed.execution_id) == b"once"


async def test_a_create_whose_response_was_lost_creates_one_execution(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    holder = await asyncpg.connect(database)
    async with holder.transaction():
        await holder.execute("lock table flowfabric.execution in exclusive mode")
        creating = asyncio.create_task(submit(plain_engine, idempotency_key="k"))
        await terminate(sql, waiting=True)
    execution_id = await creating
    await holder.close()
    assert await sql.fetch("select id from flowfabric.execution") == [(execution_id,)]


async def test_for_a_call_that_may_not_be_repeated_the_outcome_is_unknown(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    execution_id = await submit(plain_engine)
    async with held(database, execution_id):
        changing = asyncio.create_task(plain_engine.change_priority(execution_id, 5))
        await terminate(sql, waiting=True)
        with pytest.raises(TransportError) as lost:
            await changing
    assert lost.value.kind == "transport"
    assert lost.value.retryable
    await plain_engine.change_priority(execution_id, 5)


@of_one_process
async def test_patience_with_a_lost_server_is_limited(own_dir: Path, own_server: str) -> None:
    async with await ff.Engine.connect(own_server, reconnect_for=timedelta(milliseconds=300)) as engine:
        await engine.ping()
        await asyncio.to_thread(embedded.stop, own_dir)
        with pytest.raises(TransportError) as lost:
            await engine.server_time_ms()
        assert lost.value.retryable
        with pytest.raises(TransportError):
            await engine.ping()
        (await asyncio.to_thread(embedded.start, own_dir, settings=FAST)).release()
        await engine.ping()


@of_one_process
async def test_an_engine_survives_a_restart_of_the_server(own_dir: Path, own_server: str) -> None:
    async with await ff.Engine.connect(own_server, reconnect_for=timedelta(seconds=PATIENCE)) as engine:
        claimed = await started(engine)
        await asyncio.to_thread(embedded.stop, own_dir)
        completing = asyncio.create_task(engine.complete(claimed.handle, b"kept"))
        await asyncio.sleep(0)
        (await asyncio.to_thread(embedded.start, own_dir, settings=FAST)).release()
        await completing
        assert await engine.get_execution_result(claimed.execution_id) == b"kept"
        waiting = asyncio.create_task(
            engine.claim(worker_id="w", worker_instance_id="w-1", max_wait=timedelta(seconds=PATIENCE))
        )
        execution_id = await submit(engine)
        found = await waiting
        assert found is not None
        assert found.execution_id == execution_id


@of_one_process
async def test_tails_survive_a_restart_of_the_server(own_dir: Path, own_server: str) -> None:
    async with await ff.Engine.connect(own_server, stream_ops=100) as engine:
        held = [await started(engine, lease_ttl=timedelta(hours=1)) for _ in range(10)]
        tails = [
            asyncio.create_task(engine.tail_stream(one.execution_id, 0, block=timedelta(seconds=30)))
            for one in held
            for _ in range(10)
        ]
        while engine.tails.count < 100:
            await asyncio.sleep(0)
        await asyncio.to_thread(embedded.stop, own_dir)
        (await asyncio.to_thread(embedded.start, own_dir, settings=FAST)).release()
        assert not any(tail.done() for tail in tails)
        async with await ff.Engine.connect(own_server) as writer:
            await writer.append_frames([(one.handle, NewFrame(payload=b"x")) for one in held])
        for page in await asyncio.gather(*tails):
            assert [frame.payload for frame in page.frames] == [b"x"]


async def test_a_statement_that_takes_too_long_is_given_up_and_not_repeated(database: str, clock: Clock) -> None:
    async with await ff.Engine.connect(
        database, command_timeout=timedelta(milliseconds=200), reconnect_for=timedelta(hours=1)
    ) as engine:
        claimed = await started(engine)
        async with held(database, claimed.execution_id), asyncio.timeout(PATIENCE):
            with pytest.raises(TransportError) as late:
                await engine.complete(claimed.handle)
            assert late.value.kind == "timeout"
            assert late.value.retryable
        await engine.complete(claimed.handle)


async def test_a_pool_opens_no_more_sessions_than_it_may(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with await ff.Engine.connect(database, min_size=0, max_size=2, notifications=False) as engine:
        claimed = await started(engine)
        async with held(database, claimed.execution_id):
            calls = [asyncio.create_task(engine.renew(claimed.handle)) for _ in range(10)]
            async with asyncio.timeout(PATIENCE):
                while not await sql.fetchval(
                    "select count(*) = 2 from pg_stat_activity"
                    " where datname = current_database() and wait_event_type = 'Lock'"
                ):
                    await asyncio.sleep(0.01)
            assert await sessions(sql) == 2
        await asyncio.gather(*calls)
        assert await sessions(sql) == 2


async def test_a_pool_opens_its_minimum_of_sessions_immediately(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with await ff.Engine.connect(database, min_size=3, notifications=False):
        assert await sessions(sql) == 3
    async with asyncio.timeout(PATIENCE):
        while await sessions(sql):
            await asyncio.sleep(0.01)


async def test_an_engine_works_without_prepared_statements(database: str) -> None:
    async with await ff.Engine.connect(database, max_size=1, prepared_statements=False) as engine:
        for _ in range(2):
            claimed = await started(engine, tags={"a.b": "c"})
            await engine.renew(claimed.handle)
            await engine.complete(claimed.handle, b"x")
        async with engine._database.connection() as connection:
            assert await connection.fetchval("select count(*) from pg_prepared_statements where name <> ''") == 0
        assert await engine.audit(events=True) == []


async def test_a_closed_engine_does_not_wait_for_a_connection(database: str) -> None:
    engine = await ff.Engine.connect(database, reconnect_for=timedelta(hours=1))
    await engine.close()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(TransportError):
            await engine.server_time_ms()


async def test_serialization_failures_stay_inside_the_engine(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute(
        """
        create sequence public.tries;
        create function public.conflict() returns trigger language plpgsql as $$
        begin
            if nextval('public.tries') % 3 <> 0 then
                raise exception 'conflict' using errcode = 'serialization_failure';
            end if;
            return new;
        end $$;
        create trigger conflict before update on flowfabric.execution for each row execute function public.conflict();
        """
    )
    claimed_id = await submit(plain_engine)
    claimed = await claim_one(plain_engine)
    assert claimed.execution_id == claimed_id
    await plain_engine.complete(claimed.handle, b"x")
    assert (await plain_engine.list_attempts(claimed_id))[0].attempt_index == 0
    assert len(await plain_engine.list_attempts(claimed_id)) == 1
    await sql.execute("drop trigger conflict on flowfabric.execution")


async def test_a_lasting_conflict_is_reported(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await submit(plain_engine)
    claimed = await claim_one(plain_engine)
    await sql.execute(
        """
        create function public.conflict() returns trigger language plpgsql as
        $$ begin raise exception 'conflict' using errcode = 'deadlock_detected'; end $$;
        create trigger conflict before update on flowfabric.execution for each row execute function public.conflict();
        """
    )
    with pytest.raises(RetriesExhausted):
        await plain_engine.complete(claimed.handle)
    await sql.execute("drop trigger conflict on flowfabric.execution")
    await plain_engine.complete(claimed.handle)


async def test_closing_an_engine_stops_its_duties(database: str) -> None:
    engine = await ff.Engine.connect(database)
    duties = ff.Duties(engine)
    await duties.__aenter__()
    await engine.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("duty ")]


async def test_a_data_directory_given_wins_over_the_environments_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWFABRIC_DSN", "postgresql://nobody@127.0.0.1:1/nothing")
    async with await ff.Engine.connect(data_dir=tmp_path / "data") as engine:
        await engine.ping()
    assert (tmp_path / "data").is_dir()


async def test_errors_of_a_pool_that_opens_lazily_are_ours(server: str) -> None:
    with pytest.raises(ConnectionFailed):
        await ff.Engine.connect(in_database(server, "no_such_database"), min_size=0)


async def test_a_stricter_default_isolation_is_not_inherited(database: str, sql: asyncpg.Connection[Any]) -> None:
    name = await sql.fetchval("select current_database()")
    await sql.execute(f"alter database {name} set default_transaction_isolation = 'serializable'")
    async with await ff.Engine.connect(database) as engine:
        row = await engine._row("select current_setting('transaction_isolation') as level")
        assert row["level"] == "read committed"


async def test_an_engine_that_is_closed_twice_waits_for_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by hand, and by `async with`."""
    monkeypatch.setattr(Connections.close, "__defaults__", (10_000.0,))
    async with asyncio.timeout(60), await ff.Engine.connect(database) as engine:
        await engine.close()
