"""The event log for people: one execution's history, and counts."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.execution import NewExecution
from flowfabric.values.lease import Operator
from tests.ids import home, id_in
from tests.integration.test_connection import a_role, as_user
from tests.support import WORKER, Clock, claim_one, started, submit

pytestmark = pytest.mark.both_servers


async def whole_log(engine: ff.Engine) -> list[Event]:
    found: list[Event] = []
    cursor = EventCursor()
    while True:
        page = await engine.read_events(after=cursor, limit=1000)
        found += page.items
        if not page.items:
            return found
        assert page.next_cursor is not None
        cursor = page.next_cursor


async def test_the_history_of_one_is_what_the_log_says_of_it(database: str, clock: Clock) -> None:
    """Many others before, between and after, so that the place in the log has to be looked for."""
    async with await ff.Engine.connect(database) as engine:
        chosen: list[ff.ExecutionId] = []
        for _ in range(3):
            await engine.create_many([NewExecution(execution_kind="crowd") for _ in range(800)])
            claimed = await engine.claim_many(**WORKER, kinds=["crowd"], limit=800)
            await engine.complete_many([one.handle for one in claimed])
            await clock.advance(minutes=20)
            mine = await started(engine, execution_kind="mine")
            chosen.append(mine.execution_id)
            await engine.renew(mine.handle)
            await engine.fail(mine.handle, "boom", failure_class="permanent")
            await engine.replay_execution(mine.execution_id)
            again = await claim_one(engine)
            await clock.advance(minutes=20)
            await engine.cancel(Operator(again.execution_id), "enough")
        running = await started(engine)
        log = await whole_log(engine)
        for execution_id in [*chosen, running.execution_id]:
            expected = [event for event in log if event.execution_id == execution_id]
            assert expected
            assert list((await engine.list_events(execution_id)).items) == expected


async def test_an_execution_nothing_happened_to_has_no_events(engine: ff.Engine) -> None:
    execution_id = await submit(engine)
    assert (await engine.list_events(execution_id)).items == []
    assert (await engine.list_events(id_in((home(execution_id) + 1) % 256, execution_id))).items == []


async def test_events_are_counted_from_where_the_last_count_ended(engine: ff.Engine) -> None:
    start = await engine.count_events()
    assert (start.lease, start.completion, start.operator) == ({}, {}, {})
    one, two = await started(engine), await started(engine)
    await engine.renew(one.handle)
    await engine.complete(one.handle)
    await engine.fail(two.handle, "boom", failure_class="permanent")
    await engine.replay_execution(two.execution_id)
    counted = await engine.count_events(start.cursor)
    assert counted.completion == {"success": 1, "failed": 1}
    assert counted.operator == {"replayed": 1}
    assert (counted.lease["acquired"], counted.lease["renewed"]) == (2, 1)
    nothing = await engine.count_events(counted.cursor)
    assert (nothing.lease, nothing.completion, nothing.operator) == ({}, {}, {})
    assert nothing.cursor == counted.cursor


async def test_an_event_under_way_is_counted_when_it_is_there(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    one, two = await started(engine), await started(engine)
    cursor = (await engine.count_events()).cursor
    transaction = sql.transaction()
    await transaction.start()
    target = one.execution_id
    await sql.execute(
        "select flowfabric.cancel_as_operator(array[$1::integer], array[$2::uuid], array[null::uuid],"
        " array[null::bigint], array[null::uuid], array[null::integer], 'operator_override', 'slow', false)",
        home(target),
        target,
    )
    await engine.complete(two.handle)
    first = await engine.count_events(cursor)
    await transaction.commit()
    second = await engine.count_events(first.cursor)
    seen = [counts.completion.get(word, 0) for word in ("cancelled", "success") for counts in (first, second)]
    assert seen == [0, 1, 0, 1], "nothing is counted twice, and nothing is passed over"


async def test_a_role_that_reads_may_read(database: str, engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    from flowfabric.engine.service import migrate_database

    claimed = await started(engine)
    async with a_role(sql) as role:
        await migrate_database(database, read_roles=(role,))
        async with await ff.Engine.connect(as_user(database, role)) as reader:
            assert len((await reader.list_events(claimed.execution_id)).items) == 1
            assert (await reader.count_events(EventCursor())).lease == {"acquired": 1}
        await sql.execute("delete from flowfabric.granted_role")


@pytest.mark.parametrize("after", [1, "x", EventCursor(-1), EventCursor(2**63)])
async def test_a_bad_cursor_is_refused(engine: ff.Engine, after: Any) -> None:
    with pytest.raises(ff.InvalidInput, match="after"):
        await engine.count_events(after)
