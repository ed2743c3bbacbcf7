"""Submitting inside the caller's transaction, through every driver with a bridge."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar

import asyncpg
import django
import django.conf
import django.db
import psycopg
import pytest
import pytest_asyncio
import sqlalchemy as sa
from django.db import transaction as django_transaction
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import flowfabric as ff
from flowfabric._postgres.listen import CHANNEL
from flowfabric.bridges import asyncpg as bridge_asyncpg
from flowfabric.bridges import django as bridge_django
from flowfabric.bridges import psycopg as bridge_psycopg
from flowfabric.bridges import sqlalchemy as bridge_sqlalchemy
from flowfabric.bridges._submission import Fields
from flowfabric.engine.timers import TimerKind
from flowfabric.errors import StateError, ValidationFailed
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import mint_uuid, partition_of_key
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.ids import home, id_in
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import WORKER, CheckedEngine, Clock, submit


class Way:
    """One kind of connection, with a transaction open from `begin` to `commit` or `rollback`."""

    async def open(self, dsn: str) -> None: ...
    async def begin(self) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    async def close(self) -> None: ...
    async def savepoint(self, inside: Callable[[], Any]) -> None:
        """Run a step behind a savepoint and go back to it."""

    async def execute(self, statement: str) -> Any: ...
    async def create(self, **fields: Any) -> Any: ...
    async def many(self, items: list[Any]) -> Any: ...


class Asyncpg(Way):
    async def open(self, dsn: str) -> None:
        self.connection = await asyncpg.connect(dsn)

    async def begin(self) -> None:
        self.transaction = self.connection.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()

    async def rollback(self) -> None:
        await self.transaction.rollback()

    async def close(self) -> None:
        await self.connection.close()

    async def savepoint(self, inside: Callable[[], Any]) -> None:
        point = self.connection.transaction()
        await point.start()
        await inside()
        await point.rollback()

    async def execute(self, statement: str) -> Any:
        return await self.connection.fetchval(statement)

    async def create(self, **fields: Any) -> Any:
        return await bridge_asyncpg.create_execution(self.connection, **fields)

    async def many(self, items: list[Any]) -> Any:
        return await bridge_asyncpg.create_many(self.connection, items)


class EngineConnection(Asyncpg):
    """The engine itself, given a connection."""

    async def open(self, dsn: str) -> None:
        await super().open(dsn)
        self.engine = await ff.Engine.connect(dsn)

    async def close(self) -> None:
        await self.engine.close()
        await super().close()

    async def create(self, **fields: Any) -> Any:
        return await self.engine.create_execution(**fields, connection=self.connection)

    async def many(self, items: list[Any]) -> Any:
        return await self.engine.create_many(items, connection=self.connection)


class Psycopg(Way):
    cursor = False
    options: ClassVar[dict[str, Any]] = {}

    async def open(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True, **self.options)

    async def begin(self) -> None:
        self.connection.autocommit = False

    async def commit(self) -> None:
        self.connection.commit()
        self.connection.autocommit = True

    async def rollback(self) -> None:
        self.connection.rollback()
        self.connection.autocommit = True

    async def close(self) -> None:
        self.connection.close()

    async def savepoint(self, inside: Callable[[], Any]) -> None:
        with self.connection.transaction(force_rollback=True):
            await inside()

    async def execute(self, statement: str) -> Any:
        row = self.connection.execute(statement).fetchone()
        return next(iter(row.values() if isinstance(row, dict) else row))

    @property
    def target(self) -> Any:
        return self.connection.cursor() if self.cursor else self.connection

    async def create(self, **fields: Any) -> Any:
        return bridge_psycopg.create_execution(self.target, **fields)

    async def many(self, items: list[Any]) -> Any:
        return bridge_psycopg.create_many(self.target, items)


class PsycopgCursor(Psycopg):
    """With a row factory and a cursor class that the bridge must not depend on."""

    cursor = True
    options: ClassVar[dict[str, Any]] = {"row_factory": dict_row, "cursor_factory": psycopg.ClientCursor}


class PsycopgAsync(Way):
    cursor = False

    async def open(self, dsn: str) -> None:
        self.connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)

    async def begin(self) -> None:
        await self.connection.set_autocommit(False)

    async def commit(self) -> None:
        await self.connection.commit()
        await self.connection.set_autocommit(True)

    async def rollback(self) -> None:
        await self.connection.rollback()
        await self.connection.set_autocommit(True)

    async def close(self) -> None:
        await self.connection.close()

    async def savepoint(self, inside: Callable[[], Any]) -> None:
        async with self.connection.transaction(force_rollback=True):
            await inside()

    async def execute(self, statement: str) -> Any:
        row = await (await self.connection.execute(statement)).fetchone()
        assert row is not None
        return row[0]

    @property
    def target(self) -> Any:
        return self.connection.cursor() if self.cursor else self.connection

    async def create(self, **fields: Any) -> Any:
        return await bridge_psycopg.create_execution_async(self.target, **fields)

    async def many(self, items: list[Any]) -> Any:
        return await bridge_psycopg.create_many_async(self.target, items)


class PsycopgAsyncCursor(PsycopgAsync):
    cursor = True


class SqlAlchemy(Way):
    async def open(self, dsn: str) -> None:
        self.engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
        self.loose = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.connection: Any = self.loose

    async def begin(self) -> None:
        self.connection = self.engine.connect()
        self.connection.begin()

    async def commit(self) -> None:
        self.connection.commit()
        self.connection.close()
        self.connection = self.loose

    async def rollback(self) -> None:
        self.connection.rollback()
        self.connection.close()
        self.connection = self.loose

    async def close(self) -> None:
        self.loose.close()
        self.engine.dispose()

    async def savepoint(self, inside: Callable[[], Any]) -> None:
        point = self.connection.begin_nested()
        await inside()
        point.rollback()

    async def execute(self, statement: str) -> Any:
        return self.connection.execute(sa.text(statement)).scalar()

    async def create(self, **fields: Any) -> Any:
        return bridge_sqlalchemy.create_execution(self.connection, **fields)

    async def many(self, items: list[Any]) -> Any:
        return bridge_sqlalchemy.create_many(self.connection, items)


class SqlAlchemySession(SqlAlchemy):
    async def begin(self) -> None:
        self.connection = Session(self.engine)
        self.connection.begin()


class SqlAlchemyAsync(Way):
    def make(self, dsn: str) -> Any:
        return create_async_engine("postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(dsn))

    def connect(self) -> Any:
        return self.engine.connect()

    async def open(self, dsn: str) -> None:
        self.engine = self.make(dsn)
        self.loose = await self.engine.connect()
        await self.loose.execution_options(isolation_level="AUTOCOMMIT")
        self.connection = self.loose

    async def begin(self) -> None:
        self.connection = self.connect()
        if not isinstance(self.connection, AsyncSession):
            await self.connection
        await self.connection.begin()

    async def commit(self) -> None:
        await self.connection.commit()
        await self.connection.close()
        self.connection = self.loose

    async def rollback(self) -> None:
        await self.connection.rollback()
        await self.connection.close()
        self.connection = self.loose

    async def close(self) -> None:
        await self.loose.close()
        await self.engine.dispose()

    async def savepoint(self, inside: Callable[[], Any]) -> None:
        point = await self.connection.begin_nested()
        await inside()
        await point.rollback()

    async def execute(self, statement: str) -> Any:
        return (await self.connection.execute(sa.text(statement))).scalar()

    async def create(self, **fields: Any) -> Any:
        return await bridge_sqlalchemy.create_execution_async(self.connection, **fields)

    async def many(self, items: list[Any]) -> Any:
        return await bridge_sqlalchemy.create_many_async(self.connection, items)


class SqlAlchemyAsyncpg(SqlAlchemyAsync):
    def make(self, dsn: str) -> Any:
        return create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(dsn))


class SqlAlchemyAsyncSession(SqlAlchemyAsyncpg):
    def connect(self) -> Any:
        return AsyncSession(self.engine)


class Django(Way):
    """Django's connections belong to threads, and it refuses to block an event loop: one thread does it all."""

    async def open(self, dsn: str) -> None:
        self.thread = ThreadPoolExecutor(1)
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
        settings = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts["dbname"],
            "USER": parts.get("user", ""),
            "PASSWORD": parts.get("password", ""),
            "HOST": parts["host"],
            "PORT": str(parts.get("port", "")),
        }
        if not django.conf.settings.configured:
            django.conf.settings.configure(DATABASES={})
            django.setup()
        django.db.connections.settings = django.db.connections.configure_settings({"default": settings})

    async def _do(self, call: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, lambda: call(*args, **fields))

    async def begin(self) -> None:
        self.atomic = django_transaction.atomic()
        await self._do(self.atomic.__enter__)

    async def commit(self) -> None:
        await self._do(self.atomic.__exit__, None, None, None)

    async def rollback(self) -> None:
        await self._do(django_transaction.set_rollback, True)
        await self._do(self.atomic.__exit__, None, None, None)

    async def close(self) -> None:
        await self._do(lambda: django.db.connection.close())
        self.thread.shutdown()

    async def savepoint(self, inside: Callable[[], Any]) -> None:
        point = await self._do(django_transaction.savepoint)
        await inside()
        await self._do(django_transaction.savepoint_rollback, point)

    async def execute(self, statement: str) -> Any:
        def call() -> Any:
            with django.db.connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchone()[0]

        return await self._do(call)

    async def create(self, **fields: Any) -> Any:
        return await self._do(bridge_django.create_execution, **fields)

    async def many(self, items: list[Any]) -> Any:
        return await self._do(lambda: bridge_django.create_many(items, django.db.connection))


WAYS = [
    EngineConnection,
    Asyncpg,
    Psycopg,
    PsycopgCursor,
    PsycopgAsync,
    PsycopgAsyncCursor,
    SqlAlchemy,
    SqlAlchemySession,
    SqlAlchemyAsync,
    SqlAlchemyAsyncpg,
    SqlAlchemyAsyncSession,
    Django,
]


@pytest_asyncio.fixture(params=WAYS, ids=lambda way: way.__name__, loop_scope="session")
async def way(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Way]:
    made: Way = request.param()
    await made.open(database)
    yield made
    await made.close()


async def test_a_submission_exists_once_committed_and_a_rolled_back_one_never_did(
    way: Way, engine: CheckedEngine
) -> None:
    await way.begin()
    lost = await way.create(execution_kind="test", idempotency_key="lost")
    await way.rollback()
    assert await engine.read_execution_state(lost.execution_id) is None
    assert not (await engine.list_lanes()).items

    await way.begin()
    kept = await way.create(execution_kind="test", idempotency_key="kept")
    assert isinstance(kept, Created)
    assert kept.public_state is ff.State.WAITING
    assert await engine.read_execution_state(kept.execution_id) is None
    await way.commit()

    assert await engine.read_execution_state(kept.execution_id) is ff.State.WAITING
    again = await engine.create_execution(execution_kind="test", idempotency_key="lost")
    assert isinstance(again, Created)
    # Without a transaction it exists at once.
    loose = await way.create(execution_kind="test")
    assert await engine.read_execution_state(loose.execution_id) is ff.State.WAITING


async def test_going_back_to_a_savepoint_takes_back_only_what_came_after_it(way: Way, engine: CheckedEngine) -> None:
    made = []
    await way.begin()
    made.append(await way.create(execution_kind="test"))

    async def inside() -> None:
        made.append(await way.create(execution_kind="test"))

    await way.savepoint(inside)
    made.append(await way.create(execution_kind="test"))
    await way.commit()
    states = [await engine.read_execution_state(answer.execution_id) for answer in made]
    assert states == [ff.State.WAITING, None, ff.State.WAITING]


async def test_every_field_arrives_as_the_engine_itself_would_store_it(
    way: Way, engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    budget = "0b0e8400-e29b-41d4-a716-446655440000"
    fields: dict[str, Any] = {
        "execution_kind": "größe",
        "lane_id": "a lane",
        "namespace": "näme \u2028 {},\"\\'%s $1",
        "input_payload": bytes(range(256)),
        "payload_encoding": "raw",
        "priority": 99_999,
        "creator_identity": "me",
        "tags": {"no dot": "{,}", "team.owner": "\U0001f98a \\ \" ' %", "\x1fa": ""},
        "policy": ExecutionPolicy(
            retry_policy=ff.RetryPolicy(max_retries=7),
            routing_requirements=RoutingRequirements(required_capabilities=("b", "a")),
            budget_ids=(budget,),
            dedup_window=timedelta(minutes=5),
        ),
        "delay_until": timedelta(hours=1),
        "execution_deadline_at": datetime(2100, 1, 2, tzinfo=UTC),
    }
    theirs = await way.create(**fields, idempotency_key="k1")
    ours = await engine.create_execution(**fields, idempotency_key="k2")
    assert theirs.public_state is ff.State.DELAYED
    rows = [
        dict(await sql.fetchrow("select * from flowfabric.execution where id = $1", made.execution_id))
        for made in (theirs, ours)
    ]
    gap = rows[1]["created_at"] - rows[0]["created_at"]
    for row in rows:
        for name in ("partition", "id", "idempotency_key", "created_at", "transitioned_at", "mutated_at"):
            del row[name]
        del row["blocking_detail"]
    assert rows[1].pop("delay_until") - rows[0].pop("delay_until") == gap
    assert rows[0] == rows[1]
    assert rows[0]["payload"] == bytes(range(256))
    assert rows[0]["deadline_at"] == datetime(2100, 1, 2, tzinfo=UTC)


async def test_a_key_known_through_one_driver_is_a_duplicate_through_every_other(
    way: Way, engine: CheckedEngine
) -> None:
    theirs = await way.create(execution_kind="test", namespace="n", idempotency_key="key")
    assert await engine.create_execution(execution_kind="test", namespace="n", idempotency_key="key") == Duplicate(
        theirs.execution_id
    )
    ours = await submit(engine, idempotency_key="other")
    await way.begin()
    assert await way.create(execution_kind="test", idempotency_key="other") == Duplicate(ours)
    assert await way.create(execution_kind="test", execution_id=ours) == Duplicate(ours)
    assert isinstance(await way.create(execution_kind="test"), Created)
    await way.commit()


async def test_bad_input_raises_the_same_error_and_leaves_the_transaction_usable(
    way: Way, engine: CheckedEngine
) -> None:
    await way.begin()
    made = await way.create(execution_kind="test")
    bad: list[dict[str, Any]] = [
        {"lane_id": ""},
        {"namespace": "\0"},
        {"execution_kind": "\ud800"},
        {"idempotency_key": "k" * 513},
        {"input_payload": "text"},
        {"policy": {"max_replay_count": -1}},
        {"delay_until": datetime(2030, 1, 1)},
        {"execution_id": "0b0e8400"},
        {"execution_id": id_in(3), "flow_id": "11111111-1111-1111-1111-111111111111"},
    ]
    for fields in bad:
        whole = {"execution_kind": "test", **fields}
        with pytest.raises(ValidationFailed) as theirs:
            await way.create(**whole)
        with pytest.raises(ValidationFailed) as ours:
            await engine.create_execution(**whole)
        assert type(theirs.value) is type(ours.value)
        assert str(theirs.value) == str(ours.value)
    with pytest.raises(ff.InvalidInput) as refused:
        await way.many([NewExecution(execution_kind="test")] * 1001)
    assert refused.value.field == "items"
    with pytest.raises(ff.InvalidInput):
        await way.many("items")  # type: ignore[arg-type]
    assert await way.execute("select 1") == 1
    await way.commit()
    assert await engine.read_execution_state(made.execution_id) is ff.State.WAITING


async def test_a_batch_returns_one_verdict_per_item_in_order(way: Way, engine: CheckedEngine) -> None:
    await engine.set_lane_state("closed", "draining")
    known = await submit(engine, idempotency_key="known")
    given = id_in(7, known)
    item = NewExecution
    await way.begin()
    answers = await way.many(
        [
            item(execution_kind="a"),
            item(execution_kind="a", lane_id="closed"),
            item(execution_kind="a", idempotency_key="known"),
            item(execution_kind="a", idempotency_key="known", policy="no json"),
            item(execution_kind="a", policy="no json"),
            item(execution_kind="a", priority=1.5),  # type: ignore[arg-type]
            item(execution_kind="a", execution_id=given),
            item(execution_kind="a", idempotency_key="new"),
            item(execution_kind="a", idempotency_key="new"),
        ]
    )
    await way.commit()
    first, closed, same, same_before_policy, policy, priority, chosen, new, twin = answers
    assert isinstance(first, Created)
    assert closed.kind == "lane_closed"
    assert same == Duplicate(known)
    assert same_before_policy == Duplicate(known)
    assert policy.kind == "invalid_policy_json"
    assert priority.field == "priority"
    assert chosen == Created(given, ff.State.WAITING)
    assert twin == Duplicate(new.execution_id)
    assert await way.many([]) == []
    # A refusal by the database's verdict leaves the transaction usable, and takes nothing.
    await way.begin()
    with pytest.raises(StateError) as refused:
        await way.create(execution_kind="test", lane_id="closed", idempotency_key="k")
    assert refused.value.kind == "lane_closed"
    assert isinstance(await way.create(execution_kind="test"), Created)
    await way.commit()
    await engine.set_lane_state("closed", "active")
    assert isinstance(await way.create(execution_kind="test", lane_id="closed", idempotency_key="k"), Created)


async def test_a_committed_submission_wakes_a_sleeping_worker_and_a_rolled_back_one_does_not(
    way: Way, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    await sql.add_listener(f"{CHANNEL}_{plain_engine._instance}", lambda *said: heard.put_nowait(said[3]))
    waiting = asyncio.create_task(plain_engine.claim(**WORKER, max_wait=timedelta(seconds=60)))
    while not await sql.fetchval("select count(*) from flowfabric.sleeper where lane <> ''"):
        await asyncio.sleep(0.005)

    await way.begin()
    await way.create(execution_kind="test")
    await way.rollback()
    await sql.fetchval("select 1")
    assert heard.empty()
    await way.begin()
    made = await way.create(execution_kind="test")
    await way.commit()

    await asyncio.wait_for(heard.get(), 30)
    claimed = await asyncio.wait_for(waiting, 30)
    assert claimed is not None
    assert claimed.execution_id == made.execution_id


async def test_the_partition_is_the_engines_whatever_the_count_is(way: Way, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("update flowfabric.deployment set flow_partitions = 7")
    flow = "11111111-1111-1111-1111-111111111111"
    made = [
        await way.create(execution_kind="test", idempotency_key="k"),
        await way.create(execution_kind="test", flow_id=flow),
        await way.create(execution_kind="test"),
    ]
    if isinstance(way, EngineConnection):
        return  # it has read the count before
    assert home(made[0].execution_id, 7) == partition_of_key("", "k", 7)
    assert home(made[1].execution_id, 7) == 0x1111 % 7
    stored = await sql.fetch("select partition, id from flowfabric.execution")
    assert {row["partition"]: row["id"] for row in stored} == {home(row["id"], 7): row["id"] for row in stored}


async def test_a_pooled_connection_submits_too(database: str, engine: CheckedEngine) -> None:
    async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        made = await bridge_asyncpg.create_execution(connection, execution_kind="test")
    assert await engine.read_execution_state(made.execution_id) is ff.State.WAITING


async def test_a_cursor_keeps_the_result_it_holds(database: str) -> None:
    with psycopg.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("select 41 union all select 42 order by 1")
        bridge_psycopg.create_execution(cursor, execution_kind="test")
        assert cursor.fetchall() == [(41,), (42,)]
    connection.close()


async def test_a_connection_of_another_kind_is_named_in_the_error(database: str) -> None:
    item = [NewExecution(execution_kind="test")]
    lite = sa.create_engine("sqlite://")
    with lite.connect() as other, psycopg.connect(database) as connection:
        for call in (
            lambda: bridge_psycopg.create_many(other, item),  # type: ignore[arg-type]
            lambda: bridge_sqlalchemy.create_many(other, item),
            lambda: bridge_sqlalchemy.create_many(connection, item),  # type: ignore[arg-type]
            lambda: bridge_django.create_many(item, connection),
        ):
            with pytest.raises(ff.InvalidInput) as refused:
                call()
            assert refused.value.field == "connection"
        with pytest.raises(ff.InvalidInput):
            await bridge_psycopg.create_many_async(connection, item)  # type: ignore[arg-type]
        with pytest.raises(ff.InvalidInput):
            await bridge_sqlalchemy.create_many_async(other, item)  # type: ignore[arg-type]
    lite.dispose()


def test_the_fields_of_the_bridges_are_those_of_the_engine() -> None:
    assert set(Fields.__annotations__) == set(NewExecution.__struct_fields__)


@pytest.mark.parametrize(
    ("library", "bridge"), [("psycopg", "psycopg"), ("sqlalchemy", "sqlalchemy"), ("django", "django")]
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(library: str, bridge: str) -> None:
    program = f"import sys; sys.modules[{library!r}] = None; import flowfabric.bridges.{bridge}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert f"pip install flowfabric[{bridge}]" in answer.stderr.splitlines()[-1]


def test_the_engine_needs_none_of_the_libraries() -> None:
    program = (
        "import sys\nfor name in ('psycopg', 'sqlalchemy', 'django'): sys.modules[name] = None\n"
        "import flowfabric, flowfabric.bridges, flowfabric.bridges.asyncpg"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_a_transaction_that_is_to_be_prepared_notifies_no_process(
    database: str, sql: asyncpg.Connection[Any], plain_engine: ff.Engine
) -> None:
    from flowfabric.bridges import asyncpg as bridge

    heard: list[object] = []
    async with await ff.Engine.connect(database) as sleeping:
        await sql.add_listener(f"flowfabric_{sleeping._instance}", lambda *args: heard.append(args[-1]))
        await sleeping.sleep_for_work(["default"], timedelta(seconds=60))
        async with plain_engine._database.connection() as connection:
            for wake in (False, True):
                async with connection.transaction():
                    await bridge.create_execution(connection, execution_kind="test", wake=wake)
                await sql.execute("select 1")
                assert heard == (["work"] if wake else [])


@asynccontextmanager
async def prepared(
    database: str, sql: asyncpg.Connection[Any], submit: Callable[..., Awaitable[Any]]
) -> AsyncIterator[Any]:
    """Submit in a transaction that is prepared, which needs `wake=False`; it is committed after the block."""
    gid = str(mint_uuid())  # the server has other tests, too
    connection = await asyncpg.connect(database)
    try:
        await connection.execute("begin")
        await submit(connection)
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="NOTIFY"):
            await connection.execute(f"prepare transaction '{gid}'")
        await connection.execute("begin")
        made = await submit(connection, wake=False)
        await connection.execute(f"prepare transaction '{gid}'")
    finally:
        await connection.close()
    try:
        yield made
    finally:
        await sql.execute(f"commit prepared '{gid}'")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"delay_until": timedelta(seconds=5)},
        {"execution_deadline_at": timedelta(hours=1)},
        {"delay_until": timedelta(seconds=5), "execution_deadline_at": timedelta(hours=1)},
    ],
    ids=["plain", "delay", "deadline", "both"],
)
async def test_a_submission_beside_processes_that_sleep_is_prepared_and_runs_when_it_is_committed(
    database: str, sql: asyncpg.Connection[Any], plain_engine: ff.Engine, clock: Clock, fields: dict[str, Any]
) -> None:
    async with await ff.Engine.connect(database) as sleeping:
        await sleeping.sleep_for_work(["default"], timedelta(seconds=60))
        asleep = await sleeping.look_for_due(dict.fromkeys(TimerKind), at_most=timedelta(hours=2))
        assert asleep.announced is not None
        submit = partial(bridge_asyncpg.create_execution, execution_kind="test", **fields)
        async with prepared(database, sql, submit) as made:
            assert await plain_engine.claim(**WORKER) is None
        if "delay_until" in fields:
            assert await plain_engine.claim(**WORKER) is None
            await clock.advance(seconds=6)
            assert "delay" in (await sleeping.look_for_due(dict.fromkeys(TimerKind), at_most=timedelta(1))).due
            await plain_engine.run_timers("delay")
        claimed = await plain_engine.claim(**WORKER)
        assert claimed is not None
        assert claimed.execution_id == made.execution_id
        await plain_engine.complete(claimed.handle)


@pytest.mark.parametrize("wake", [None, 0, "no"])
async def test_a_wake_that_is_no_truth_value_is_refused_by_name(sql: asyncpg.Connection[Any], wake: Any) -> None:
    with pytest.raises(ff.InvalidInput, match="wake") as refused:
        await bridge_asyncpg.create_execution(sql, execution_kind="test", wake=wake)
    assert refused.value.field == "wake"
    assert await sql.fetchval("select count(*) from flowfabric.execution") == 0


async def test_a_flow_beside_a_worker_that_sleeps_is_prepared_and_runs_when_it_is_committed(
    database: str, sql: asyncpg.Connection[Any], plain_engine: ff.Engine
) -> None:
    app = ff.App(database)

    @app.task
    def pack() -> None: ...

    flow = app.flow("parcel")
    flow.add(pack)
    async with await ff.Engine.connect(database) as sleeping:
        await sleeping.sleep_for_work(["default"], timedelta(seconds=60))
        with pytest.raises(ff.InvalidInput, match="wake"):
            await flow.submit_in(sql, wake="no")  # type: ignore[call-overload]
        async with prepared(database, sql, flow.submit_in) as run:
            assert await plain_engine.claim(**WORKER) is None
        claimed = await plain_engine.claim(**WORKER)
        assert claimed is not None
        assert str(claimed.flow_id) == run.id


async def test_a_submission_without_a_wake_up_whose_connection_is_closed_leaves_no_coroutine_behind(
    database: str,
) -> None:
    connection = await asyncpg.connect(database)
    await connection.close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(asyncpg.InterfaceError):
            await bridge_asyncpg.create_execution(connection, execution_kind="test", wake=False)
        gc.collect()
    assert [str(one.message) for one in told if issubclass(one.category, RuntimeWarning)] == []
