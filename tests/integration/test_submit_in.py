"""`task.submit_in` and `flow.submit_in`: typed submissions inside the caller's transaction, through every driver."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import psycopg
import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import flowfabric as ff
from flowfabric.errors import Conflict
from flowfabric.middleware import Middleware
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.lease import Operator
from tests.integration.test_bridges import WAYS, Django, EngineConnection, Way
from tests.integration.test_codecs import Sealed
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import CheckedEngine


class Signing(Middleware):
    """Adds a tag to every submission, and notes what it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def submit(self, submission: Any, proceed: Callable[[Any], Awaitable[Any]]) -> Any:
        self.seen.append(submission.kind)
        tags = {**(submission.options.tags or {}), "by": "me"}
        return await proceed(submission.replace(options=submission.options.replace(tags=tags)))


def an_app(database: str, **options: Any) -> ff.App:
    app = ff.App(database, **options)

    @app.task(
        lane="slow", priority=7, tags={"a": "b"}, retention="3 days", retry=ff.RetryPolicy(max_retries=4), name="ship"
    )
    async def ship(item: str, count: int = 1) -> str:
        return f"{count} {item}"

    @app.task(name="bill")
    async def bill(shipped: str) -> str:
        return shipped

    return app


async def send(way: Way, made: Any, *args: Any, **kwargs: Any) -> Any:
    """Submit a task or a flow through the connection of a way."""
    if isinstance(way, Django):
        return await way._do(made.submit_in, "default", *args, **kwargs)
    answer = made.submit_in(getattr(way, "target", None) or way.connection, *args, **kwargs)  # type: ignore[attr-defined]
    return await answer if inspect.isawaitable(answer) else answer


@pytest_asyncio.fixture(
    params=[one for one in WAYS if one is not EngineConnection], ids=lambda one: one.__name__, loop_scope="session"
)
async def way(request: pytest.FixtureRequest, database: str) -> Any:
    made: Way = request.param()
    await made.open(database)
    yield made
    await made.close()


async def test_a_task_and_a_flow_commit_and_roll_back_with_the_callers_rows(
    way: Way, database: str, engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    signing = Signing()
    app = an_app(database, middleware=[signing])
    ship = app.tasks["ship"]

    def graph() -> ff.Flow:
        flow = app.flow("order", tags={"shop": "x"})
        flow.add(app.tasks["bill"], flow.add(ship, "lamp", priority=3))
        return flow

    await way.begin()
    lost = [await send(way, ship, "lamp"), await send(way, graph(), idempotency_key="lost")]
    await way.rollback()
    assert await engine.read_execution_state(lost[0].execution_id) is None
    assert await engine.describe_flow(lost[1].flow_id) is None

    await way.begin()
    run = await send(way, ship, "lamp", count=2)
    flow = await send(way, graph(), idempotency_key="kept")
    again = await send(way, graph(), idempotency_key="kept")
    assert await engine.read_execution_state(run.execution_id) is None
    await way.commit()
    assert (run.is_new, flow.is_new, again.is_new, again.nodes) == (True, True, False, flow.nodes)
    assert signing.seen == ["ship", "ship", "bill", "ship", *["ship", "bill"] * 2]

    # Stored as the app itself stores it, options and all.
    async with app:
        ours = await ship.submit("lamp", count=2)
        ours_in_flow = await graph().submit(idempotency_key="kept")
    assert ours_in_flow.nodes == flow.nodes
    rows = []
    for one in (run, ours):
        row = dict(await sql.fetchrow("select * from flowfabric.execution where id = $1", one.execution_id))
        rows.append({name: row[name] for name in row if not name.endswith(("_at", "id", "partition"))})
    assert rows[0] == rows[1]
    stored = await engine.read_execution(run.execution_id)
    assert stored is not None
    assert (stored.lane_id, stored.priority, stored.tags) == ("slow", 7, {"a": "b", "by": "me"})
    assert await engine.audit(events=True) == []

    # And it runs.
    worker = ff.Worker(app, lanes=["slow", "default"])
    async with app, worker:
        assert await run.result(30) == "2 lamp"
        assert await flow.result(30) == {"ship": "1 lamp", "bill": "1 lamp"}


async def test_a_known_key_does_as_the_option_says_and_leaves_the_transaction_usable(
    way: Way, database: str, engine: CheckedEngine
) -> None:
    app = an_app(database)
    ship, bill = app.tasks["ship"], app.tasks["bill"]
    first = await send(way, ship, "lamp", idempotency_key="order-1")
    await way.begin()
    second = await send(way, ship, "lamp", idempotency_key="order-1")
    assert (second.execution_id, second.is_new) == (first.execution_id, False)
    for task, options in ((bill, {}), (ship, {"on_duplicate": "raise"})):
        with pytest.raises(Conflict, match="in use"):
            await send(way, task, "lamp", idempotency_key="order-1", **options)
    with pytest.raises(ff.InvalidInput) as refused:
        await send(way, ship, 5)
    assert refused.value.field == "item"
    standing = await send(way, ship, "lamp", idempotency_key="order-1", on_duplicate="replace")
    assert standing.execution_id == first.execution_id
    await way.commit()
    await engine.cancel(Operator(first.execution_id), "sold out")
    await way.begin()
    replaced = await send(way, ship, "lamp", idempotency_key="order-1", on_duplicate="replace")
    await way.commit()
    assert replaced.is_new
    assert await engine.read_execution_state(replaced.execution_id) is ff.State.WAITING


async def test_arguments_are_sealed_for_their_execution_whatever_the_number_of_partitions(
    database: str, sql: asyncpg.Connection[Any], plain_engine: ff.Engine
) -> None:
    await sql.execute("update flowfabric.deployment set flow_partitions = 7")
    app = an_app(database, codecs=[Sealed()], accept_plain=False)
    async with sql.transaction():
        run = await app.tasks["ship"].submit_in(sql, "lamp")
        keyed = await app.tasks["ship"].submit_in(sql, "lamp", idempotency_key="k")
        flow = app.flow("order")
        flow.add(app.tasks["bill"], flow.add(app.tasks["ship"], "chair"))
        whole = await flow.submit_in(sql)
    async with app, ff.Worker(app, lanes=["slow", "default"]):
        assert await run.result(30) == await keyed.result(30) == "1 lamp"
        assert (await whole.result(30))["bill"] == "1 chair"
        assert await (await app.client()).engine.audit(events=True) == []


async def test_a_connection_that_blocks_returns_a_handle_at_once_with_or_without_a_running_loop(database: str) -> None:
    app = an_app(database)
    with psycopg.connect(database) as connection:
        assert isinstance(app.tasks["ship"].submit_in(connection, "lamp"), ff.Run)
        in_thread = await asyncio.to_thread(app.tasks["ship"].submit_in, connection, "lamp")
        assert isinstance(in_thread, ff.Run)
    connection.close()


async def test_scoped_sessions_are_sessions(database: str, engine: CheckedEngine) -> None:
    app = an_app(database)
    bound = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database))
    session = scoped_session(sessionmaker(bound))
    run = app.tasks["ship"].submit_in(session, "lamp")
    session.commit()
    session.remove()
    bound.dispose()
    assert await engine.read_execution_state(run.execution_id) is ff.State.WAITING


async def test_an_object_that_is_no_connection_is_refused_by_name(database: str) -> None:
    app = an_app(database)
    ship = app.tasks["ship"]
    lite = sa.create_engine("sqlite://")
    async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool:
        for other in (None, 5, pool, lite, lite.connect(), Session(lite), object()):
            with pytest.raises(ff.InvalidInput) as refused:
                ship.submit_in(other, "lamp")  # type: ignore[call-overload]
            assert refused.value.field == "connection"
    lite.dispose()


async def test_a_middleware_that_waits_needs_an_async_connection(database: str, sql: asyncpg.Connection[Any]) -> None:
    class Asking(Middleware):
        async def submit(self, submission: Any, proceed: Callable[[Any], Awaitable[Any]]) -> Any:
            await asyncio.sleep(0)
            return await proceed(submission)

    ship = an_app(database, middleware=[Asking()]).tasks["ship"]
    with psycopg.connect(database) as connection:
        with pytest.raises(ff.InvalidInput, match="awaits something else") as refused:
            ship.submit_in(connection, "lamp")
        assert refused.value.field == "connection"
    connection.close()
    assert await sql.fetchval("select count(*) from flowfabric.execution") == 0
    assert (await ship.submit_in(sql, "lamp")).is_new


async def test_a_flow_that_grows_is_not_added_to_in_another_transaction(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    app = an_app(database)
    grown = ff.Flow(app, "order", grows=FlowId(mint_uuid()))
    with pytest.raises(ff.InvalidInput, match="run again"):
        grown.submit_in(sql)


async def test_items_of_tasks_are_submitted_by_the_thousand_through_a_bridge(database: str) -> None:
    from flowfabric.bridges.psycopg import create_many

    app = an_app(database)
    with psycopg.connect(database) as connection:
        made = create_many(connection, [app.tasks["ship"].submission(f"lamp {n}").item() for n in range(1000)])
        assert {type(one).__name__ for one in made} == {"Created"}
    connection.close()


def test_synchronous_sqlalchemy_needs_no_greenlet(database: str) -> None:
    """The asyncio extension of SQLAlchemy may not be there at all."""
    program = (
        "import sys\n"
        "for name in ('greenlet', 'sqlalchemy.ext.asyncio'): sys.modules[name] = None\n"
        "import psycopg, sqlalchemy as sa\nfrom sqlalchemy.orm import Session\nimport flowfabric as ff\n"
        "app = ff.App(sys.argv[1])\n"
        "@app.task\ndef ship(item: str) -> str: return item\n"
        "engine = sa.create_engine('postgresql+psycopg://', creator=lambda: psycopg.connect(sys.argv[1]))\n"
        "with Session(engine) as session, session.begin():\n    print(ship.submit_in(session, 'lamp').is_new)\n"
        "try: ship.submit_in(engine, 'lamp')\nexcept ff.InvalidInput as error: print('greenlet' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, database], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")


async def test_submissions_take_any_isolation_and_replacing_a_key_says_that_it_needs_read_committed(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    app = an_app(database)
    for isolation in ("repeatable_read", "serializable"):
        async with sql.transaction(isolation=isolation):
            assert (await app.tasks["ship"].submit_in(sql, "lamp", idempotency_key=isolation)).is_new
        async with sql.transaction(isolation=isolation):
            again = await app.tasks["ship"].submit_in(sql, "lamp", idempotency_key=isolation)
            assert not again.is_new
            with pytest.raises(asyncpg.PostgresError, match=r"(?i)read committed"):
                async with sql.transaction():
                    await app.tasks["ship"].submit_in(sql, "lamp", idempotency_key=isolation, on_duplicate="replace")
