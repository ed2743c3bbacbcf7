"""A role with only EXECUTE can do all the work of a worker and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric.engine.service import migrate_database, schema_version
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import ReclaimGrant
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.step import NewStep
from tests.ids import home
from tests.integration.test_connection import a_role, as_user
from tests.support import OTHER, RETRY, WORKER, Clock, claim_one, started, submit

PATIENCE = 60.0


@pytest.fixture
async def role(database: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[str]:
    async with a_role(sql) as name:
        await migrate_database(database, worker_roles=(name,))
        yield name


@pytest.fixture
async def worker(database: str, role: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[ff.Engine]:
    """An engine that connects as the worker role."""
    async with await ff.Engine.connect(as_user(database, role)) as engine:
        yield engine


@pytest.fixture
async def session(database: str, role: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A plain session of the worker role."""
    connection = await asyncpg.connect(as_user(database, role))
    yield connection
    await connection.close()


async def test_the_whole_life_of_an_execution_needs_no_more_than_execute(worker: ff.Engine, clock: Clock) -> None:
    await worker.prepare()
    execution_id = await submit(worker, policy=RETRY, tags={"a.b": "c"}, idempotency_key="k", namespace="n")
    await worker.change_priority(execution_id, 7)
    await worker.block_execution_for_admission(execution_id, "paused_by_operator")
    await worker.unblock_execution(execution_id)
    claimed = await claim_one(worker, max_wait=timedelta(seconds=5))
    await worker.renew(claimed.handle)
    await worker.progress(claimed.handle, percent=50, message="half")
    await worker.fail(claimed.handle, "boom")
    await clock.advance(seconds=11)
    assert (await worker.run_timers("delay")).handled == 1
    claimed = await claim_one(worker)
    await worker.release(claimed.handle)
    claimed = await claim_one(worker)
    await worker.delay(claimed.handle, timedelta(seconds=1))
    await clock.advance(seconds=2)
    assert await worker.promote_delayed(execution_id) == "promoted"
    claimed = await claim_one(worker)
    await worker.revoke_lease(execution_id)
    grant = await worker.issue_reclaim_grant(execution_id, **OTHER)
    assert isinstance(grant, ReclaimGrant)
    await worker.reclaim_execution(execution_id, **OTHER, lease_id=mint_uuid(), attempt_id=mint_uuid())
    await worker.cancel(Operator(execution_id), "enough")
    await worker.replay_execution(execution_id)
    claim_grant = await worker.issue_claim_grant(execution_id, **WORKER)
    assert await worker.verify_grant(execution_id, claim_grant.grant_key) == "ok"
    claimed = await worker.claim_execution(execution_id, **WORKER, lease_id=mint_uuid(), attempt_id=mint_uuid())
    await worker.complete(claimed.handle, b"done")
    assert await worker.get_execution_result(execution_id) == b"done"


async def test_every_read_and_list_needs_no_more_than_execute(worker: ff.Engine) -> None:
    claimed = await started(worker, namespace="n", tags={"a.b": "c"})
    execution_id = claimed.execution_id
    assert await worker.read_execution(execution_id)
    assert await worker.describe_execution(execution_id)
    assert await worker.read_execution_info(execution_id)
    assert (await worker.read_execution_context(execution_id)).execution_kind == "test"
    assert await worker.get_execution_tag(execution_id, "a.b") == "c"
    await worker.set_execution_tag(execution_id, "a.b", "d")
    assert len(await worker.list_attempts(execution_id)) == 1
    assert len((await worker.list_executions(home(execution_id))).items) == 1
    for filters in ({}, {"namespace": "n"}, {"tag": ("a.b", "d")}, {"states": ["active"]}, {"lane_ids": ["default"]}):
        assert len((await worker.find_executions(**filters)).items) == 1
    assert not (await worker.list_expired_leases()).items
    assert len((await worker.list_lanes()).items) == 1
    assert (await worker.lane_stats())[0].running == 1
    assert await worker.scan_eligible_executions("default") == []
    async with asyncio.timeout(PATIENCE):  # an event shows once every older transaction of the server has ended
        while len((await worker.read_events()).items) != 1:
            await asyncio.sleep(0.01)
    assert await worker.next_due() is not None
    assert await worker.set_lane_state("default", "paused") == "active"


async def test_the_worker_role_may_ask_whether_the_schema_is_current(
    database: str, role: str, sql: asyncpg.Connection[Any]
) -> None:
    assert await schema_version(as_user(database, role)) == SCHEMA_VERSION
    await sql.execute("insert into flowfabric.schema_step (number, name) values (9999, 'from the future')")
    assert await schema_version(as_user(database, role)) == 9999


async def test_all_duties_run_under_the_worker_role(
    worker: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    execution_id = await submit(worker, delay_until=timedelta(milliseconds=10))
    async with ff.Duties(worker), asyncio.timeout(PATIENCE):
        while await worker.read_execution_state(execution_id) is not ff.State.WAITING:
            await asyncio.sleep(0.01)
    await started(worker, idempotency_key="k", lease_ttl=timedelta(seconds=1))
    claimed = await claim_one(worker, lease_ttl=timedelta(seconds=1))
    await worker.complete(claimed.handle)
    await clock.advance(hours=80)
    assert (await worker.run_timers("lease")).handled == 1
    assert await worker.sweep() >= 2, "keys and whole segments of the log, which only their owner may truncate"
    assert await worker.trim_retention() == 1
    assert await worker.audit() == []


async def test_steps_children_and_waiting_need_no_more_than_execute(worker: ff.Engine, clock: Clock) -> None:
    parent = await started(worker, policy=RETRY)
    answers = await worker.record_steps(
        [
            (parent.handle, NewStep(name="s", result=b"1")),
            (parent.handle, NewStep(name="now", kind="now")),
            (parent.handle, NewStep(name="sleep", kind="sleep", pause=timedelta(seconds=5))),
        ]
    )
    assert answers[0] is None and not any(isinstance(answer, ff.FlowFabricError) for answer in answers)
    child = await worker.submit_child(parent.handle, "child", 0, NewExecution(execution_kind="child", lane_id="c"))
    assert len(await worker.read_steps([parent.execution_id])) == 4
    assert (await worker.park(parent.handle, ends_of=[child.execution_id])).parked
    await worker.watch([child.execution_id], timedelta(seconds=60))
    await worker.unwatch([child.execution_id])
    await worker.watch([child.execution_id], timedelta(seconds=60))
    (claimed,) = await worker.claim_lanes({"c": 1, "default": 1}, limit=2, **WORKER)
    await worker.complete(claimed.handle, b"2")
    assert (await worker.read_outcomes([child.execution_id]))[child.execution_id].result == b"2"
    assert (await claim_one(worker)).execution_id == parent.execution_id
    assert (await worker.run_timers("parked")).handled == 0
    (cancelled,) = await worker.cancel_many([parent.execution_id], "enough")
    assert not isinstance(cancelled, ff.FlowFabricError)
    (replayed,) = await worker.replay_many([parent.execution_id])
    assert not isinstance(replayed, ff.FlowFabricError)
    await worker.redact_execution(child.execution_id)
    assert await worker.free_key(child.execution_id, "k") is False
    await worker.delete_execution(child.execution_id)
    assert await worker.audit(events=True) == []


async def test_schedules_need_no_more_than_execute(worker: ff.Engine, clock: Clock) -> None:
    due_at = await clock.now()
    assert await worker.put_schedule("s", kind="k", timing={"every_ms": 1}, next_at=due_at) == "created"
    await worker.pause_schedule("s")
    await worker.resume_schedule("s")
    (due,) = await worker.due_schedules()
    assert await worker.until_next_schedule() is not None
    items = [NewExecution(execution_kind="k")]
    made = await worker.fire_schedule("s", due.due_at, next_at=None, fired_at=due.due_at, items=items)
    found = await worker.read_schedule("s")
    assert found is not None and made == [found.last_execution_id]
    assert len((await worker.list_schedules()).items) == 1
    assert await worker.schedule_as_due("s") is not None
    await worker.delete_schedule("s")


async def test_a_worker_runs_tasks_with_steps_and_children_as_that_role(database: str, role: str) -> None:
    app = ff.App(as_user(database, role))

    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent(ctx: ff.Context) -> int:
        one = await ctx.step("one", lambda: 1)
        await ctx.sleep(0.02)
        return int(one + await (await child.submit(2)).result())

    app.schedule(child, 5, name="often", every=3600)
    async with ff.Worker(app, poll=0.2), asyncio.timeout(PATIENCE):
        assert await (await parent.submit()).result() == 3
    await app.close()


async def test_no_table_or_view_can_be_touched(session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any]) -> None:
    names = await sql.fetch(
        "select c.relname, c.relkind, min(a.attname) from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relnamespace = 'flowfabric'::regnamespace and c.relkind in ('r', 'p', 'v') and a.attnum > 0"
        " and a.attidentity = ''"
        " group by 1, 2 order by 1"
    )
    assert len(names) > 20
    for relation, kind, column in names:
        for statement in (
            f"select {column} from flowfabric.{relation}",
            f"insert into flowfabric.{relation} default values",
            f"update flowfabric.{relation} set {column} = null",
            f"delete from flowfabric.{relation}",
            f"truncate flowfabric.{relation}",
        ):
            if kind == b"v" and not statement.startswith("select"):
                continue  # nobody can write to this view, and Postgres says so before it looks at rights
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await session.execute(statement)


async def test_the_catalogue_knows_of_no_right_beyond_execute(
    role: str, session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any]
) -> None:
    relations = await sql.fetch(
        "select c.relname from pg_class c where c.relnamespace = 'flowfabric'::regnamespace"
        " and c.relkind in ('r', 'p', 'v') and (has_table_privilege($1, c.oid,"
        " 'select, insert, update, delete, truncate, references, trigger')"
        " or has_any_column_privilege($1, c.oid, 'select, insert, update, references'))",
        role,
    )
    sequences = await sql.fetch(
        "select c.relname from pg_class c where c.relnamespace = 'flowfabric'::regnamespace "
        " and case when c.relkind = 'S' then has_sequence_privilege($1, c.oid, 'usage, select, update') end",
        role,
    )
    assert (relations, sequences) == ([], [])
    assert not await sql.fetchval("select has_schema_privilege($1, 'flowfabric', 'create')", role)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await session.execute("create table flowfabric.mine ()")


async def test_only_the_operations_can_be_called_not_what_is_behind_them(
    role: str, session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any]
) -> None:
    rows = await sql.fetch(
        "select p.proname, p.prosecdef, has_function_privilege($1, p.oid, 'execute') as may,"
        " coalesce(p.proconfig::text, '') as config from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace",
        role,
    )
    keys_of_the_owner = {"seed_secret", "rotate_secret"}
    operations = {row["proname"] for row in rows if row["prosecdef"]}
    assert {row["proname"] for row in rows if row["may"]} == operations - keys_of_the_owner
    for row in rows:
        if row["prosecdef"]:
            assert "search_path=flowfabric, pg_temp" in row["config"], row["proname"]
    closed = {row["proname"] for row in rows if not row["may"]}
    assert closed >= {
        "now", "hmac", "hmac_block", "seed_keystore", "lock_holders", "end_executions", "start_attempts", "take_ready",
        "purge", "act", "mark_expired", "set_timers", "due_executions", "raise_floors", "make_ready", "trim_events",
        "sign_token", "token_digest", "check_token", "close_suspension", "resume", *keys_of_the_owner,
    }  # fmt: skip
    for call in ("flowfabric.seed_keystore()", "flowfabric.purge('{1}', '{}', now())", "flowfabric.now()"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await session.execute(f"select {call}")


async def test_the_public_has_no_rights_at_all(database: str, role: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as stranger:
        count = await sql.fetchval(
            "select count(*) from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace"
            " and has_function_privilege($1, p.oid, 'execute')",
            stranger,
        )
        assert count == 0
        assert not await sql.fetchval("select has_schema_privilege($1, 'flowfabric', 'usage')", stranger)


async def test_no_callable_function_gives_a_signing_key_away(
    worker: ff.Engine, session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any]
) -> None:
    keys = await sql.fetchrow("select inner_key, outer_key from flowfabric.keystore")
    assert keys is not None
    execution_id = await submit(worker)
    grant = await worker.issue_claim_grant(execution_id, **WORKER)
    for key in keys:
        assert key.hex() not in grant.grant_key
    bodies = await sql.fetch(
        "select p.proname from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace and p.prosecdef"
        " and pg_get_function_result(p.oid) ~ 'keystore'"
    )
    assert bodies == []
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await session.fetch("select * from flowfabric.keystore")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await session.fetch("select flowfabric.hmac('a', 'b', 'c')")


async def test_the_clock_cannot_be_moved_nor_imitated(worker: ff.Engine, session: asyncpg.Connection[Any]) -> None:
    before = await worker.server_time_ms()
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await session.execute("update flowfabric.clock set shift = interval '1 year'")
    # Temporary objects of the same names are not what the functions see.
    await session.execute("create temp table clock (one boolean, shift interval)")
    await session.execute("insert into clock values (true, interval '10 years')")
    await session.execute("create temp table deployment (one boolean, flow_partitions integer)")
    await session.execute(
        "create function pg_temp.now() returns timestamptz language sql as 'select timestamptz ''2000-01-01'''"
    )
    await session.execute("set search_path = pg_temp, flowfabric")
    after = await session.fetchval("select flowfabric.server_time_ms()")
    assert before <= after < before + 3_600_000
    assert await session.fetchval("select flow_partitions from flowfabric.deployment_info()") == 256
