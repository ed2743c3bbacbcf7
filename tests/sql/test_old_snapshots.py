"""A call that must see the present refuses a transaction whose snapshot is older; submissions are right with any."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from tests.support import WORKER, submit

# They write, and need not see what was committed after their snapshot: a hint, a row of their own, or a submission.
_ANY_SNAPSHOT: str = """
    create_executions create_one create_flow grow_flow register_lanes register_service sleep_for_work
    sleep_for_events look_for_due leave_lead watch unwatch put_schedule delete_schedule set_schedule_paused
    advance_schedule audit_sample begin_epoch repair_floors
    create_api_key create_bulk finish_answer forget_answer note_api_key_use write_operator_audit
"""
# They read the present, and only read.
_READS: str = """
    server_now server_time_ms lane_stats due_schedules next_schedule due_cancellations standing_executions
    list_pending_waitpoints verify_grant list_workers find_unserved list_versions list_leads list_consumers read_summary
    read_gauges
"""


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_every_call_that_must_see_the_present_refuses_an_old_snapshot(
    sql: asyncpg.Connection[Any], isolation: str
) -> None:
    functions = await sql.fetch(
        "select p.proname as name, array(select case when t.typcategory = 'A' then '''{}''' else 'null' end"
        " from unnest(p.proargtypes[0:p.pronargs - 1]) with ordinality a (oid, n) join pg_type t on t.oid = a.oid"
        " order by a.n) as given from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace"
        " and p.prosecdef and p.provolatile = 'v' order by 1"
    )
    checked, missed = [], []
    for name, given in functions:
        if name in f"{_ANY_SNAPSHOT} {_READS}".split():
            continue
        async with sql.transaction():
            await sql.execute(f"set transaction isolation level {isolation}")
            try:
                await sql.fetch(f"select flowfabric.{name}({', '.join(given)})")
                missed.append(name)
            except asyncpg.PostgresError as error:
                if "READ COMMITTED" not in str(error):
                    missed.append(f"{name}: {error}")
            await sql.execute("rollback; begin")
        checked.append(name)
    assert missed == []
    assert {"claim", "complete", "fail", "cancel", "suspend", "deliver_signal", "run_timers", "replay"} <= set(checked)


async def test_submissions_under_an_old_snapshot_are_claimed_and_leave_few_floors(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    await submit(plain_engine)
    connection = await asyncpg.connect(database)
    await connection.execute("set default_transaction_isolation = 'repeatable read'")
    for _ in range(30):
        await plain_engine.create_execution(execution_kind="test", connection=connection)
    await connection.close()
    assert await plain_engine.audit() == []
    assert len(await plain_engine.claim_many(**WORKER, limit=30)) == 30
    await sql.execute("select flowfabric.raise_floors(r.lane, array[r.id]) from flowfabric.route r")
    assert await sql.fetchval("select count(*) from flowfabric.ready_floor") == 1
    assert await plain_engine.audit() == []
    assert len(await plain_engine.claim_many(**WORKER, limit=30)) == 1
