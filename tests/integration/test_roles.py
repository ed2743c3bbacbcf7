"""Four roles, each with the functions it needs and nothing else: the table, real calls, and attacks."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres import statements
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric._postgres.roles import Role, callers, functions_of
from flowfabric.engine.service import migrate_database, schema_version
from flowfabric.errors import NotAllowed
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import ReclaimGrant
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId, LeaseId, mint_uuid
from flowfabric.values.joins import AnyOf, OnSatisfied
from flowfabric.values.lease import Fence, Operator
from flowfabric.values.step import NewStep
from tests.conftest import new_database, new_plain_engine  # noqa: F401 - fixtures
from tests.ids import home
from tests.integration.test_connection import a_role, as_user
from tests.support import OTHER, RETRY, WORKER, Clock, claim_one, new_id, started, submit, submit_member

PATIENCE = 60.0

# Who may call what, written down once more: a changed line above a function must be changed here too.
EVERY_ROLE = """
    begin_epoch deployment_info server_now server_time_ms next_due list_kids
    read_executions read_result read_payload read_outcomes read_steps list_attempts list_events
    read_streams read_last_frames read_stream_summary
    list_pending_waitpoints read_suspension read_signals observe_signals
    describe_flow flow_progress flow_eligibility read_members read_edges read_summary read_flow_tags read_cancel_backlog
    find_unserved list_children read_budgets find_budgets list_budgets list_spend read_usage
    list_quota_policies list_quota_keys find_limits
"""
READ = """
    find find_ids list_partition list_flows list_lanes lane_stats list_waits list_suspended list_expired_leases
    list_failures
    read_events count_events seek_events list_held read_held count_held read_denials find_unreported
    read_gauges
"""
READ_AND_WORK = """
    read_started queued_siblings list_schedules list_workers list_worker_events list_versions list_uncovered list_leads
    list_bindings list_consumers sleep_for_events
"""
SUBMIT = """
    create_one create_executions standing_executions create_flow grow_flow free_key watch unwatch fork_execution
    deliver_signal probe_waitpoint
"""
WORK = """
    claim claim_lanes claim_for_worker claim_granted reclaim verify_grant sleep_for_work register_service register_lanes
    register_worker heartbeat_worker leave_registry sweep_workers trim_worker_events judge_all
    renew progress complete fail cancel delay release stop_changed wait_children suspend park
    open_wait settle_wait refuse_signals create_waitpoint close_waitpoint record_steps
    submit_child submit_child_flow cancel_children
    append_frames count_emitted
    create_budget use_budgets pause_for_budget reset_due_budgets collect_ended reconcile_budgets
    register_consumer take_consumer move_consumer fail_consumer leave_consumer
    take_lead leave_lead look_for_due run_timers sweep submit_hooks audit_sample repair_floors
    dispatch_cascades cascade_pending
    create_quota_policy check_admission release_admission unblock_limited count_denials reconcile_quotas
    cancel_siblings reconcile_siblings reconcile_edges cancel_members due_cancellations project_touched project_flows
    read_declared_limits note_declared_limits bind_limit
    put_schedule due_schedules next_schedule fire_schedule advance_schedule
    list_bulk run_bulk stop_bulk
"""
OPERATE = """
    complete_as_operator fail_as_operator cancel_as_operator delay_as_operator release_as_operator
    wait_children_as_operator claim_as_operator deliver_signal_as_operator
    replay delete_execution redact_execution change_priority block unblock set_tag revoke_lease
    issue_claim_grant issue_reclaim_grant scan_eligible
    read_waitpoint_token signal_by_key resume_execution expire_waitpoint expire_suspension run_one audit
    add_to_flow stage_edges apply_edge set_group_policy set_flow_tags resolve_dependency promote_blocked
    cancel_flow_header ack_cancel_member drain_siblings delete_flow
    unbind_limit
    set_lane_state set_schedule_paused delete_schedule mark_worker_dead set_consumer delete_consumer
    update_budget reset_budget release_budget report_usage_admin record_spend update_quota_policy
    create_api_key read_api_key list_api_keys revoke_api_key rotate_api_key note_api_key_use
    write_operator_audit list_operator_audit begin_answer finish_answer forget_answer in_namespaces create_bulk
"""
OWNER = {"seed_secret", "rotate_secret"}
MAY = {
    Role.READ: {*EVERY_ROLE.split(), *READ.split(), *READ_AND_WORK.split()},
    Role.SUBMIT: {*EVERY_ROLE.split(), *SUBMIT.split()},
    Role.WORK: {*EVERY_ROLE.split(), *READ_AND_WORK.split(), *SUBMIT.split(), *WORK.split()},
}
MAY[Role.OPERATE] = {*MAY[Role.READ], *MAY[Role.WORK], *OPERATE.split()}
EVERYTHING = MAY[Role.OPERATE] | OWNER
KINDS = pytest.mark.parametrize("kind", list(Role))


@contextlib.asynccontextmanager
async def granted(database: str, sql: asyncpg.Connection[Any], *kinds: Role) -> AsyncIterator[str]:
    """A database user with these roles."""
    async with a_role(sql) as name:
        await migrate_database(database, **{_ARGUMENTS[kind]: (name,) for kind in kinds})
        try:
            yield name
        finally:
            await sql.execute("delete from flowfabric.granted_role where name = $1", name)


_ARGUMENTS = {
    Role.READ: "read_roles",
    Role.SUBMIT: "submit_roles",
    Role.WORK: "worker_roles",
    Role.OPERATE: "operate_roles",
}


@pytest.fixture
async def user(database: str, sql: asyncpg.Connection[Any], kind: Role) -> AsyncIterator[str]:
    async with granted(database, sql, kind) as name:
        yield name


@pytest.fixture
async def session(database: str, user: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(as_user(database, user))
    yield connection
    await connection.close()


async def engine_of(database: str, sql: asyncpg.Connection[Any], *kinds: Role) -> AsyncIterator[ff.Engine]:
    async with granted(database, sql, *kinds) as name, await ff.Engine.connect(as_user(database, name)) as engine:
        yield engine


@pytest.fixture
async def reader(database: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[ff.Engine]:
    async for engine in engine_of(database, sql, Role.READ):
        yield engine


@pytest.fixture
async def submitter(database: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[ff.Engine]:
    async for engine in engine_of(database, sql, Role.SUBMIT):
        yield engine


@pytest.fixture
async def worker(database: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[ff.Engine]:
    async for engine in engine_of(database, sql, Role.WORK):
        yield engine


@pytest.fixture
async def operator(database: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[ff.Engine]:
    async for engine in engine_of(database, sql, Role.OPERATE):
        yield engine


# The table -----------------------------------------------------------------------------------------------------------


def test_the_headers_of_the_functions_say_what_the_table_says() -> None:
    assert {name for name, roles in callers().items() if not roles} == OWNER
    for kind in Role:
        assert set(functions_of([kind])) == MAY[kind]
    assert set(callers()) == EVERYTHING


def test_operate_may_do_everything_and_work_what_submit_may() -> None:
    for name, roles in callers().items():
        assert not roles or Role.OPERATE in roles, name
        assert Role.SUBMIT not in roles or Role.WORK in roles, name


@KINDS
async def test_the_database_grants_exactly_the_table(user: str, kind: Role, sql: asyncpg.Connection[Any]) -> None:
    rows = await sql.fetch(
        "select p.proname::text as name, p.prosecdef, has_function_privilege($1, p.oid, 'execute') as may,"
        " coalesce(p.proconfig::text, '') as config from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace",
        user,
    )
    assert {row["name"] for row in rows if row["may"]} == MAY[kind]
    assert {row["name"] for row in rows if row["prosecdef"]} == EVERYTHING
    for row in rows:
        if row["prosecdef"]:
            assert "search_path=flowfabric, pg_temp" in row["config"], row["name"]


async def calls(sql: asyncpg.Connection[Any]) -> dict[str, str]:
    """A call of every function of the schema, public or not, with nulls for arguments."""
    rows = await sql.fetch(
        "select p.proname::text as name, coalesce((select"
        " string_agg('(select null::' || format_type(t.type, null) || ')', ', ' order by t.place)"
        " from unnest(p.proargtypes::oid[]) with ordinality as t (type, place)), '') as arguments"
        " from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace"
    )
    return {row["name"]: f"select flowfabric.{row['name']}({row['arguments']})" for row in rows}


@KINDS
async def test_every_other_function_is_refused_when_it_is_called(
    session: asyncpg.Connection[Any], kind: Role, sql: asyncpg.Connection[Any]
) -> None:
    for name, call in (await calls(sql)).items():
        if name not in MAY[kind]:
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match=rf"function {name}$"):
                await session.fetch(call)


@KINDS
async def test_the_error_in_python_names_the_function_and_the_role_that_may(
    database: str, user: str, kind: Role
) -> None:
    async with await ff.Engine.connect(as_user(database, user)) as engine:
        for name, text in vars(statements).items():
            if (
                not name.isupper()
                or not isinstance(text, str)
                or " from flowfabric." not in text.replace("select flowfabric.", " from flowfabric.")
            ):
                continue
            called = re.findall(r"flowfabric\.(\w+)\(", text)
            refused = [function for function in called if function not in MAY[kind]]
            if not refused:
                continue
            arguments = [None] * max((int(n) for n in re.findall(r"\$(\d+)", text)), default=0)
            with pytest.raises(NotAllowed) as error:
                await engine._fetch(text, *arguments)
            assert error.value.function in refused
            roles = [role for role in Role if role in callers()[error.value.function]]
            assert error.value.roles == tuple(roles)
            assert f"`{error.value.function}`" in str(error.value)
            assert (roles[0].option if roles else "owner of the schema only") in str(error.value)
            assert (error.value.http_status, error.value.retryable) == (403, False)


async def test_the_words_of_the_error(database: str, submitter: ff.Engine) -> None:
    execution_id = await submit(submitter)
    with pytest.raises(NotAllowed) as error:
        await submitter.cancel(Operator(execution_id), "enough")
    assert str(error.value) == (
        "`cancel_as_operator` needs the role operate; run `flowfabric migrate --operate-role NAME` as the owner of the"
        " schema"
    )
    with pytest.raises(NotAllowed, match="`claim` needs the role work or operate; run `flowfabric migrate --worker-"):
        await submitter.claim_many(limit=1, **WORKER)
    with pytest.raises(NotAllowed, match="`rotate_secret` is for the owner of the schema only"):
        await submitter.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, timedelta(0))


# No rights beyond ----------------------------------------------------------------------------------------------------


@KINDS
async def test_no_table_or_view_can_be_touched(
    session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any], kind: Role
) -> None:
    await touch_everything(session, sql)


async def touch_everything(session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any]) -> None:
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
                continue  # no role can write to this view, and Postgres says so before it looks at rights
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await session.execute(statement)
    for statement in (
        "create table flowfabric.mine ()",
        "create function flowfabric.now() returns timestamptz language sql as 'select null::timestamptz'",
        "create or replace function flowfabric.server_now() returns timestamptz language sql as 'select null'",
        "create type flowfabric.mine as (a integer)",
        "alter function flowfabric.now() reset all",
        "drop function flowfabric.server_now()",
        "alter table flowfabric.clock add mine integer",
        "create trigger mine before update on flowfabric.clock execute function pg_catalog.tsvector_update_trigger()",
        "select nextval('flowfabric.event_number')",
    ):
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedTableError)):
            await session.execute(statement)


@KINDS
async def test_the_catalogue_knows_of_no_right_beyond_execute(
    user: str, sql: asyncpg.Connection[Any], kind: Role
) -> None:
    relations = await sql.fetch(
        "select c.relname from pg_class c where c.relnamespace = 'flowfabric'::regnamespace"
        " and c.relkind in ('r', 'p', 'v') and (has_table_privilege($1, c.oid,"
        " 'select, insert, update, delete, truncate, references, trigger')"
        " or has_any_column_privilege($1, c.oid, 'select, insert, update, references'))",
        user,
    )
    sequences = await sql.fetch(
        "select c.relname from pg_class c where c.relnamespace = 'flowfabric'::regnamespace "
        " and case when c.relkind = 'S' then has_sequence_privilege($1, c.oid, 'usage, select, update') end",
        user,
    )
    assert (relations, sequences) == ([], [])
    assert not await sql.fetchval("select has_schema_privilege($1, 'flowfabric', 'create')", user)


@KINDS
async def test_the_clock_cannot_be_moved_nor_imitated(
    database: str, user: str, session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any], kind: Role
) -> None:
    before = await sql.fetchval("select flowfabric.server_time_ms()")
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


@KINDS
async def test_every_role_may_ask_whether_the_schema_is_current(
    database: str, user: str, sql: asyncpg.Connection[Any], kind: Role
) -> None:
    assert await schema_version(as_user(database, user)) == SCHEMA_VERSION
    await sql.execute("insert into flowfabric.schema_step (number, name) values (9999, 'from the future')")
    assert await schema_version(as_user(database, user)) == 9999


# Granting ------------------------------------------------------------------------------------------------------------


async def open_to(sql: asyncpg.Connection[Any], user: str) -> set[str]:
    rows = await sql.fetch(
        "select p.proname::text as name from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace"
        " and has_function_privilege($1, p.oid, 'execute')",
        user,
    )
    return {row["name"] for row in rows}


async def test_a_second_option_adds_a_role_and_later_runs_keep_both(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with a_role(sql) as user:
        await migrate_database(database, read_roles=(user,))
        await migrate_database(database, submit_roles=(user, user))
        await migrate_database(database)
        assert await open_to(sql, user) == MAY[Role.READ] | MAY[Role.SUBMIT]
        await sql.execute("update flowfabric.build set functions = 'of another build'")
        await migrate_database(database)
        assert await open_to(sql, user) == MAY[Role.READ] | MAY[Role.SUBMIT]
        await sql.execute("delete from flowfabric.granted_role where name = $1 and kind = 'submit'", user)
        await migrate_database(database)
        assert await open_to(sql, user) == MAY[Role.READ], "a role that was taken away is revoked"
        await sql.execute("delete from flowfabric.granted_role where name = $1", user)
        await migrate_database(database)
        assert await open_to(sql, user) == set()


async def test_rights_that_others_gave_are_revoked(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as stranger, granted(database, sql, Role.READ) as user:
        await sql.execute(f"grant execute on all functions in schema flowfabric to {stranger}, {user}, public")
        await sql.execute(f"alter default privileges in schema flowfabric grant execute on functions to {stranger}")
        await sql.execute("update flowfabric.build set functions = 'of another build'")
        await migrate_database(database)
        assert await open_to(sql, stranger) == set()
        assert await open_to(sql, user) == MAY[Role.READ]
        await sql.execute(f"alter default privileges in schema flowfabric revoke execute on functions from {stranger}")


async def test_a_name_that_needs_quotes_is_granted_to(database: str, sql: asyncpg.Connection[Any]) -> None:
    name = 'Ann "the; drop schema flowfabric cascade; --" Lee'
    quoted = '"' + name.replace('"', '""') + '"'
    await sql.execute(f"create role {quoted}")
    try:
        await migrate_database(database, read_roles=(name,))
        assert await open_to(sql, name) == MAY[Role.READ]
        await sql.execute("delete from flowfabric.granted_role")
    finally:
        await sql.execute(f"drop owned by {quoted}; drop role {quoted}")


async def test_a_member_of_a_granted_group_has_the_role(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with granted(database, sql, Role.SUBMIT) as group, a_role(sql, f"login in role {group}") as member:
        engine = await ff.Engine.connect(as_user(database, member))
        await submit(engine)
        with pytest.raises(NotAllowed):
            await engine.find_executions()
        await engine.close()


# Each role at its work -----------------------------------------------------------------------------------------------


async def test_an_operator_leads_an_execution_through_its_whole_life(operator: ff.Engine, clock: Clock) -> None:
    await operator.prepare()
    execution_id = await submit(operator, policy=RETRY, tags={"a.b": "c"}, idempotency_key="k", namespace="n")
    await operator.change_priority(execution_id, 7)
    await operator.block_execution_for_admission(execution_id, "paused_by_operator")
    await operator.unblock_execution(execution_id)
    claimed = await claim_one(operator, max_wait=timedelta(seconds=5))
    await operator.renew(claimed.handle)
    await operator.fail(Operator(execution_id), "boom")
    await clock.advance(seconds=11)
    assert (await operator.run_timers("delay")).handled == 1
    await claim_one(operator)
    await operator.release(Operator(execution_id))
    await claim_one(operator)
    await operator.delay(Operator(execution_id), timedelta(seconds=1))
    await clock.advance(seconds=2)
    assert await operator.promote_delayed(execution_id) == "promoted"
    await claim_one(operator)
    await operator.revoke_lease(execution_id)
    grant = await operator.issue_reclaim_grant(execution_id, **OTHER)
    assert isinstance(grant, ReclaimGrant)
    await operator.reclaim_execution(execution_id, **OTHER, lease_id=mint_uuid(), attempt_id=mint_uuid())
    await operator.cancel(Operator(execution_id), "enough")
    await operator.replay_execution(execution_id)
    claim_grant = await operator.issue_claim_grant(execution_id, **WORKER)
    assert await operator.verify_grant(execution_id, claim_grant.grant_key) == "ok"
    await operator.claim_execution(execution_id, **WORKER, lease_id=mint_uuid(), attempt_id=mint_uuid())
    await operator.complete(Operator(execution_id), b"done")
    assert await operator.get_execution_result(execution_id) == b"done"
    await operator.redact_execution(execution_id)
    await operator.delete_execution(execution_id)
    assert await operator.set_lane_state("default", "paused") == "active"
    assert await operator.audit(events=True) == []


async def test_a_reader_reads_every_record_and_list(engine: ff.Engine, reader: ff.Engine) -> None:
    claimed = await started(engine, namespace="n", tags={"a.b": "c"})
    execution_id = claimed.execution_id
    assert await reader.read_execution(execution_id)
    assert await reader.describe_execution(execution_id)
    assert await reader.read_execution_info(execution_id)
    assert (await reader.read_execution_context(execution_id)).execution_kind == "test"
    assert await reader.get_execution_tag(execution_id, "a.b") == "c"
    assert len(await reader.list_attempts(execution_id)) == 1
    assert len((await reader.list_executions(home(execution_id))).items) == 1
    for filters in ({}, {"namespace": "n"}, {"tag": ("a.b", "c")}, {"states": ["active"]}, {"lane_ids": ["default"]}):
        assert len((await reader.find_executions(**filters)).items) == 1
    assert not (await reader.list_expired_leases()).items
    assert len((await reader.list_lanes()).items) == 1
    assert (await reader.lane_stats())[0].running == 1
    async with asyncio.timeout(PATIENCE):  # an event shows once every older transaction of the server has ended
        while len((await reader.read_events()).items) != 1:
            await asyncio.sleep(0.01)
    assert (await reader.list_events(execution_id)).items
    assert await reader.next_due() is not None
    for forbidden in (
        submit(reader),
        reader.claim_many(limit=1, **WORKER),
        reader.scan_eligible_executions("default"),
        reader.set_execution_tag(execution_id, "a.b", "d"),
        reader.complete(claimed.handle),
        reader.watch([execution_id], timedelta(seconds=1)),
    ):
        with pytest.raises(NotAllowed):
            await forbidden


async def test_a_submitter_submits_and_reads_what_it_has_the_id_of(
    database: str, engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async with granted(database, sql, Role.SUBMIT) as user:
        app = ff.App(as_user(database, user))

        @app.task
        async def double(n: int) -> int:
            return 2 * n

        async with app:
            run = await double.submit(21)
            again = await double.options(idempotency_key="k").submit(1)
            assert not (await double.options(idempotency_key="k").submit(1)).is_new and again.is_new
            waiting = asyncio.create_task(run.result())
            assert await run.state() is ff.State.WAITING
            claimed = await engine.claim_many(limit=1, **WORKER)
            assert [one.execution_id for one in claimed] == [run.execution_id]
            await engine.complete(claimed[0].handle, b"42", result_encoding="json")
            async with asyncio.timeout(PATIENCE):
                assert await waiting == 42
            assert (await run.get()).public_state is ff.State.COMPLETED
            assert len(await run.attempts()) == 1
            client = await app.client()
            for forbidden in (run.cancel(), run.replay(), run.signal(), client.find(), client.lanes()):
                with pytest.raises(NotAllowed):
                    await forbidden


async def test_all_duties_run_under_the_role_work(
    worker: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("update flowfabric.deployment set retention = '24 hours'")
    execution_id = await submit(worker, delay_until=timedelta(milliseconds=10))
    async with ff.Duties(worker), asyncio.timeout(PATIENCE):
        while await worker.read_execution_state(execution_id) is not ff.State.WAITING:
            await asyncio.sleep(0.01)
    await started(worker, idempotency_key="k", lease_ttl=timedelta(seconds=1))
    claimed = await claim_one(worker, lease_ttl=timedelta(seconds=1))
    await worker.complete(claimed.handle)
    await clock.advance(hours=80)
    assert (await worker.run_timers("lease")).handled == 1
    assert (await worker.sweep()).total >= 2, "keys and whole segments of the log, which only their owner may truncate"
    assert await worker.trim_retention() == 1
    assert await worker.audit_sample(home(execution_id)) == []


async def test_steps_children_and_waiting_need_only_the_role_work(
    engine: ff.Engine, worker: ff.Engine, clock: Clock
) -> None:
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
    again = await claim_one(worker)
    assert again.execution_id == parent.execution_id
    assert (await worker.run_timers("parked")).handled == 0
    waitpoint = await worker.create_waitpoint(again.handle, "k", timedelta(minutes=1))
    sent = await worker.deliver_signal(
        parent.execution_id, waitpoint.waitpoint_id, waitpoint.token, signal_name="go", source_type="test"
    )
    assert sent.signal_id
    await worker.cancel(again.handle, "enough")
    assert await worker.free_key(child.execution_id, "k") is True
    assert await engine.audit(events=True) == []


async def test_a_worker_stores_and_fires_the_schedules_of_its_app(worker: ff.Engine, clock: Clock) -> None:
    due_at = await clock.now()
    assert await worker.put_schedule("s", kind="k", timing={"every_ms": 1}, next_at=due_at) == "created"
    (due,) = await worker.due_schedules()
    assert await worker.until_next_schedule() is not None
    items = [NewExecution(execution_kind="k")]
    made = await worker.fire_schedule("s", due.due_at, next_at=None, fired_at=due.due_at, items=items)
    found = await worker.read_schedule("s")
    assert found is not None and made == [found.last_execution_id]
    assert await worker.schedule_as_due("s") is not None
    for forbidden in (worker.pause_schedule("s"), worker.resume_schedule("s"), worker.delete_schedule("s")):
        with pytest.raises(NotAllowed):
            await forbidden


async def test_a_worker_runs_tasks_with_steps_children_and_flows_as_that_role(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with granted(database, sql, Role.WORK) as user:
        app = ff.App(as_user(database, user))

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
            flow = app.flow("two")
            flow.add(child, flow.add(child, 4))
            assert await (await flow.submit()).result()
        await app.close()


async def test_a_worker_without_the_role_says_which_one_it_lacks(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with granted(database, sql, Role.SUBMIT) as user:
        app = ff.App(as_user(database, user))

        @app.task
        async def nothing() -> None: ...

        with pytest.raises(NotAllowed, match="`register_worker` needs the role work or operate"):
            await ff.Worker(app, poll=0.05).start()
        await app.close()


# Attacks -------------------------------------------------------------------------------------------------------------


async def test_a_user_who_may_only_connect_can_do_nothing(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as stranger:
        assert await open_to(sql, stranger) == set()
        assert not await sql.fetchval("select has_schema_privilege($1, 'flowfabric', 'usage')", stranger)
        session = await asyncpg.connect(as_user(database, stranger))
        try:
            for call in (await calls(sql)).values():
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await session.fetch(call)
            await touch_everything(session, sql)
            assert await session.fetchval("select count(*) from pg_stats where schemaname = 'flowfabric'") == 0
        finally:
            await session.close()


async def test_notifications_hold_no_secret(database: str, engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    """Everybody who can connect can listen, to any channel whose name is known."""
    heard: list[str] = []
    async with a_role(sql) as stranger:
        session = await asyncpg.connect(as_user(database, stranger))
        for channel in ("flowfabric", f"flowfabric_{engine._instance}"):
            await session.add_listener(channel, lambda *told: heard.append(str(told[3])))
        claimed = await started(engine, input_payload=b"secret", tags={"a.b": "secret"})
        await engine.watch([claimed.execution_id], timedelta(minutes=1))
        waitpoint = await engine.create_waitpoint(claimed.handle, "secret", timedelta(minutes=1))
        await engine.sleep_for_work(["default"], timedelta(minutes=1))
        await submit(engine)
        await engine.complete(Operator(claimed.execution_id), b"secret")
        async with asyncio.timeout(PATIENCE):
            while not {"work", "ended", f"lost {WORKER['worker_instance_id']}"} <= set(heard):
                await asyncio.sleep(0.01)
        await session.close()
    told = "\n".join(heard)
    secrets = ["secret", str(claimed.execution_id), str(claimed.handle.lease_id), str(waitpoint.token)]
    assert [one for one in secrets if one in told] == []
    assert set(heard) <= {"work", "timer", "ended", f"lost {WORKER['worker_instance_id']}"}


async def test_a_worker_cannot_touch_what_another_holds(engine: ff.Engine, worker: ff.Engine, clock: Clock) -> None:
    held = await started(engine, policy=RETRY, lease_ttl=timedelta(minutes=5))
    waiting = await submit(engine)
    target = held.execution_id
    waitpoint = await engine.create_waitpoint(held.handle, "k", timedelta(minutes=5))
    before = await engine.read_execution(target)
    him = Operator(target)
    attempts: list[Callable[[], Awaitable[Any]]] = [
        lambda: worker.complete(him),
        lambda: worker.fail(him, "no"),
        lambda: worker.delay(him, timedelta(seconds=1)),
        lambda: worker.release(him),
        lambda: worker.wait_children(him),
        lambda: worker.cancel(him, "no"),
        lambda: worker.cancel(Operator(waiting, "billing"), "no"),
        lambda: worker.cancel(Operator(waiting, "flow_cascade"), "no"),
        lambda: worker.cancel(Operator(waiting, "system_timeout"), "no"),
        lambda: worker.cancel_many([waiting], "no"),
        lambda: worker.revoke_lease(target),
        lambda: worker.issue_claim_grant(waiting, **WORKER),
        lambda: worker.issue_reclaim_grant(target, **WORKER),
        lambda: worker.issue_grant_and_claim(waiting),
        lambda: worker.scan_eligible_executions("default"),
        lambda: worker.read_waitpoint_token(target, waitpoint.waitpoint_id),
        lambda: worker.signal_execution(target, "k", signal_name="go", source_type="me"),
        lambda: worker.deliver_approval_signal(
            target, "default", waitpoint.waitpoint_id, signal_name="go", idempotency_suffix="1"
        ),
        lambda: worker.resume_execution(target),
        lambda: worker.expire_waitpoint(target, waitpoint.waitpoint_id),
        lambda: worker.expire_suspension(target),
        lambda: worker.change_priority(waiting, 9),
        lambda: worker.block_execution_for_admission(waiting, "paused_by_operator"),
        lambda: worker.unblock_execution(waiting),
        lambda: worker.set_execution_tag(waiting, "a.b", "c"),
        lambda: worker.set_lane_state("default", "disabled"),
        lambda: worker.replay_execution(target),
        lambda: worker.delete_execution(target),
        lambda: worker.redact_execution(target),
        lambda: worker.find_executions(),
        lambda: worker.read_events(),
    ]
    for attempt in attempts:
        with pytest.raises(NotAllowed):
            await attempt()
    assert await engine.read_execution(target) == before


@pytest.mark.parametrize("kinds", [(Role.WORK,), (Role.READ, Role.SUBMIT, Role.WORK)], ids=["work", "all but operate"])
async def test_no_answer_gives_away_the_fence_of_another_holder(
    database: str, engine: ff.Engine, sql: asyncpg.Connection[Any], kinds: tuple[Role, ...]
) -> None:
    """Lease, epoch and attempt are the right to report. Refusals tell the last two; the first stays secret."""
    held = await started(engine, lease_ttl=timedelta(minutes=5))
    lease = held.handle.lease_id
    async with granted(database, sql, *kinds) as user:
        session = await asyncpg.connect(as_user(database, user))
        seen: list[str] = []
        for name, call in (await calls(sql)).items():
            if name not in functions_of(kinds):
                continue
            types = re.findall(r"null::([\w. \[\]]+)\)", call)
            given = {"integer": held.handle.partition, "uuid": held.handle.uuid}
            for offer in ({}, given):
                values = [f"'{offer[one]}'::{one}" if one in offer else f"null::{one}" for one in types]
                with contextlib.suppress(asyncpg.PostgresError):
                    found = await session.fetch(f"select * from flowfabric.{name}({', '.join(values)})")
                    seen.append(f"{name}: {found}")
        for call, arguments in (
            (f"find({'null, ' * 12}10, 1000, null, false, false)", ()),
            ("list_partition($1, null, 10)", (held.handle.partition,)),
            (
                "read_events(array[63], array[null], array[null], array[null], array[null::uuid],"
                " array[null::uuid], array[null], 0, 0, 100, 1000)",
                (),
            ),
            ("list_events($1, $2, null, null, 100, 1000)", (held.handle.partition, held.handle.uuid)),
            ("list_expired_leases('infinity', null, null, 10, null)", ()),
            ("list_attempts($1, $2, -1, null)", (held.handle.partition, held.handle.uuid)),
            ("read_executions($1, $2)", ([held.handle.partition], [held.handle.uuid])),
            (
                "complete(array[$1::int], array[$2::uuid], array[$3::uuid], array[1], array[$3::uuid], array[0],"
                " array[null::bytea], array[null::text])",
                (held.handle.partition, held.handle.uuid, new_id()),
            ),
        ):
            with contextlib.suppress(asyncpg.InsufficientPrivilegeError):
                found = await session.fetch(f"select * from flowfabric.{call}", *arguments)
                assert found, call
                seen.append(f"{call}: {found}")
        await session.close()
    assert [one for one in seen if str(lease) in one or lease.hex in one] == []
    assert any(str(held.handle.attempt_id) in one for one in seen)
    assert lease.hex[:16] != held.handle.attempt_id.hex[:16], "the id of an attempt must not give the lease away"
    # With it, the call would succeed.
    await engine.complete(
        Fence(
            execution_id=held.execution_id,
            lease_id=LeaseId(lease),
            lease_epoch=held.handle.lease_epoch,
            attempt_id=held.handle.attempt_id,
        )
    )


@pytest.mark.parametrize("kind", [Role.WORK])
async def test_nulls_are_no_authority(
    engine: ff.Engine, session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any], kind: Role
) -> None:
    """A comparison with null is neither true nor false; no check may take that for a yes."""
    held = await started(engine, lease_ttl=timedelta(minutes=5))
    waitpoint = await engine.create_waitpoint(held.handle, "k", timedelta(minutes=5))
    granted_to_another = await submit(engine)
    await engine.issue_claim_grant(granted_to_another, **OTHER)
    before = await sql.fetch("select * from flowfabric.execution order by id")
    at = (held.handle.partition, held.handle.uuid)
    nothing = "array[null::uuid], array[null::bigint], array[null::uuid], array[null::int]"
    for call, code in (
        ("complete(array[$1::int], array[$2::uuid], {n}, null, null)", "invalid_input"),
        ("fail(array[$1::int], array[$2::uuid], {n}, null, null, null, null)", "invalid_input"),
        ("cancel(array[$1::int], array[$2::uuid], {n}, null, 'x', false)", "invalid_input"),
        ("cancel(array[$1::int], array[$2::uuid], {n}, true, 'x', false)", "invalid_input"),
        ("release($1, $2, null, null, null, null)", "invalid_input"),
        ("delay($1, $2, null, null, null, null, now(), null)", "invalid_input"),
        ("wait_children($1, $2, null, null, null, null)", "invalid_input"),
        ("progress($1, $2, null, null, null, null, null, null)", "invalid_input"),
    ):
        found = await session.fetchrow(f"select code from flowfabric.{call.format(n=nothing)}", *at)
        assert found is not None
        assert found["code"] == code, call
    found = await session.fetchrow(
        "select code from flowfabric.deliver_signal($1, $2, $3, null, $4, 'go', 'x', 'x', 'x', null, null, null, null,"
        " 'waitpoint', null, null, null, null, null)",
        *at,
        waitpoint.waitpoint_id,
        new_id(),
    )
    assert found is not None and found["code"] == "invalid_token"
    with contextlib.suppress(asyncpg.PostgresError):
        found = await session.fetchrow(
            "select code from flowfabric.claim_granted(null, $1, $2, null, null, null, $3, $3, 1000, null, null, null,"
            " null)",
            home(granted_to_another),
            granted_to_another,
            new_id(),
        )
        assert found is not None and found["code"] != "ok"
    await sql.execute("update flowfabric.execution set hmac_failed_at = null")
    assert await sql.fetch("select * from flowfabric.execution order by id") == before


async def test_only_an_operator_sees_the_ids_of_leases(
    engine: ff.Engine, reader: ff.Engine, operator: ff.Engine
) -> None:
    held = await started(engine, lease_ttl=timedelta(minutes=5))
    for one, expected in ((reader, None), (operator, held.handle.lease_id)):
        found = await one.read_execution(held.execution_id)
        assert found is not None and found.current_lease is not None
        assert found.current_lease.lease_id == expected
        assert [attempt.lease_id for attempt in await one.list_attempts(held.execution_id)] == [expected]
        assert [event.lease_id for event in (await one.list_events(held.execution_id)).items] == [expected]
        leases = (await one.list_expired_leases(as_of=datetime(2999, 1, 1, tzinfo=UTC))).items
        assert [lease.lease_id for lease in leases] == [expected]


async def test_a_join_cannot_cancel_members_that_exist(
    engine: ff.Engine, worker: ff.Engine, submitter: ff.Engine, operator: ff.Engine
) -> None:
    """Otherwise a new node that needs only one of them would cancel the others."""
    made = await engine.submit_flow([NewNode(name=n, execution=NewExecution(execution_kind="k")) for n in ("a", "b")])

    def joined(rest: OnSatisfied) -> NewNode:
        after = [NewEdge(upstream=one) for one in made.nodes.values()]
        return NewNode(name="c", execution=NewExecution(execution_kind="k"), after=after, policy=AnyOf(rest))

    for one in (worker, submitter):
        with pytest.raises(NotAllowed, match="`cancel_as_operator` needs the role operate"):
            await one.extend_flow(made.flow_id, [joined(OnSatisfied.CANCEL_REMAINING)])
        await one.extend_flow(made.flow_id, [joined(OnSatisfied.LET_RUN)])
    await operator.extend_flow(made.flow_id, [joined(OnSatisfied.CANCEL_REMAINING)])
    for one in (worker, submitter):
        with pytest.raises(NotAllowed):
            await one.cancel_flow(made.flow_id)


async def test_a_schedule_fires_only_when_it_is_due(engine: ff.Engine, worker: ff.Engine, clock: Clock) -> None:
    at = await clock.now() + timedelta(hours=1)
    await engine.put_schedule("s", kind="k", timing={"every_ms": 1}, next_at=at)
    items = [NewExecution(execution_kind="k")]
    assert await worker.fire_schedule("s", at, next_at=None, fired_at=at, items=items) is None
    assert await worker.fire_schedule("s", at, next_at=None, fired_at=at, items=[]) is None
    await clock.advance(hours=1)
    assert await worker.fire_schedule("s", at, next_at=None, fired_at=at, items=items)


async def test_no_process_leads_for_longer_than_a_minute(worker: ff.Engine) -> None:
    await worker.take_lead(["duties"], timedelta(days=1000))
    found = await worker.take_lead(["duties"], timedelta(days=1000))
    assert found["duties"].left <= timedelta(minutes=1)


@pytest.mark.parametrize("kind", [Role.READ])
async def test_the_advisory_locks_of_a_reader_hold_up_no_call(
    engine: ff.Engine, session: asyncpg.Connection[Any], kind: Role
) -> None:
    """Everybody can take advisory locks; only those of users who may write announce events."""
    await session.execute("select pg_advisory_lock_shared((7083::bigint << 48) | 0)")
    await started(engine)
    async with asyncio.timeout(PATIENCE):
        while not (await engine.read_events()).items:
            await asyncio.sleep(0.01)


async def test_the_advisory_locks_of_a_stranger_delay_neither_keys_nor_summaries_nor_migrations(
    database: str, engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async with a_role(sql) as name:
        stranger = await asyncpg.connect(as_user(database, name))
        # The numbers under which the functions once took such locks.
        await stranger.execute(
            "select pg_advisory_lock(7083, 2), pg_advisory_lock(708304, 0), pg_advisory_lock(708300)"
        )
        await submit_member(engine, FlowId(mint_uuid()))
        async with asyncio.timeout(PATIENCE):
            await engine.rotate_waitpoint_hmac_secret_all("k9", "ab" * 32)
            assert (await engine.project_flow_summaries())[0] == 1
            await migrate_database(database)
        await stranger.close()


async def test_the_locks_of_a_member_that_takes_the_role_on_are_counted(
    database: str, engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async with granted(database, sql, Role.SUBMIT) as group, a_role(sql, f"login noinherit in role {group}") as member:
        session = await asyncpg.connect(as_user(database, member))
        await session.execute(f"set role {group}")
        await session.execute("begin; select pg_advisory_xact_lock_shared((7083::bigint << 48) | 0)")
        await started(engine)
        assert (await engine.read_events()).items == []
        await session.close()
        async with asyncio.timeout(PATIENCE):
            while not (await engine.read_events()).items:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [Role.OPERATE])
async def test_no_function_gives_a_signing_key_away(
    operator: ff.Engine, session: asyncpg.Connection[Any], sql: asyncpg.Connection[Any], kind: Role
) -> None:
    keys = await sql.fetchrow("select inner_key, outer_key from flowfabric.keystore")
    assert keys is not None
    grant = await operator.issue_claim_grant(await submit(operator), **WORKER)
    for key in keys:
        assert key.hex() not in grant.grant_key
    bodies = await sql.fetch(
        "select p.proname from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace and p.prosecdef"
        " and pg_get_function_result(p.oid) ~ 'keystore'"
    )
    assert bodies == []
    for statement in ("select * from flowfabric.keystore", "select flowfabric.hmac('a', 'b', 'c')"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await session.fetch(statement)


async def test_a_submitter_cannot_cancel_through_positions_and_partitions(
    database: str, sql: asyncpg.Connection[Any], plain_engine: ff.Engine
) -> None:
    async with a_role(sql) as user:
        await migrate_database(database, submit_roles=(user,))
        connection = await asyncpg.connect(as_user(database, user))
        try:
            member = "'{00000000-0000-0000-0000-000000000001}'"
            for old, start in ((member.replace("'{", "'[0:0]={"), "'{-1}'"), (member, "'{0}'")):
                statement = await _grow_call(sql, p_id=member, p_old=old, p_from=start, p_to="'{1}'")
                with pytest.raises(asyncpg.InvalidParameterValueError, match="begin with one"):
                    await connection.execute(statement)
            one = await submit(plain_engine, idempotency_key="k")
            for partition in range(5):
                freed = await connection.fetchval(
                    "select flowfabric.free_key($1, $2, null, '', 'k')", partition if partition != home(one) else 9, one
                )
                assert freed is False, "the execution lives, wherever the caller says it is"
            async with connection.transaction():
                assert await connection.fetchval(
                    "select flowfabric.free_key($1, $2, null, '', 'another')", home(one), one
                )
                claimed = await asyncio.wait_for(plain_engine.claim(**WORKER), PATIENCE)
                assert claimed is not None, "a key that is not its own locks nothing"
        finally:
            await connection.close()
            await sql.execute("delete from flowfabric.granted_role")


async def _grow_call(sql: asyncpg.Connection[Any], **given: str) -> str:
    """Call grow_flow; arguments that are not given are null."""
    names = await sql.fetchval("select proargnames[1:pronargs] from pg_proc where proname = 'grow_flow'")
    return f"select flowfabric.grow_flow({', '.join(given.get(name, 'null') for name in names)})"


async def test_only_an_operator_sees_which_process_leads(
    database: str, sql: asyncpg.Connection[Any], plain_engine: ff.Engine
) -> None:
    await plain_engine.take_lead(["duties"], timedelta(seconds=30))
    async with a_role(sql) as worker, a_role(sql) as operator:
        await migrate_database(database, worker_roles=(worker,), operate_roles=(operator,))
        for user, process in ((worker, None), (operator, plain_engine._instance)):
            async with await ff.Engine.connect(as_user(database, user)) as engine:
                assert [leader.process for leader in await engine.list_leaders()] == [process]
        await sql.execute("delete from flowfabric.granted_role")
