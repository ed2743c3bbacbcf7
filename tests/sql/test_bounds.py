"""Bounded work: one bad item, one locked row or one backlog must not affect the rest."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import TimerRunner
from flowfabric._duties.lease_expiry import LeaseExpiry
from flowfabric._duties.retention import Retention
from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round
from flowfabric.values.attempt import Completed, Completion, Failure, TerminalFailed
from flowfabric.values.execution import NewExecution
from flowfabric.values.lease import Handle, Renewed
from flowfabric.values.page import ScannerFilter
from tests.ids import home
from tests.support import OTHER, WORKER, CheckedEngine, Clock, claim_one, started, submit

pytestmark = pytest.mark.both_servers


async def test_a_bad_item_of_a_batch_is_its_own_verdict(engine: CheckedEngine) -> None:
    first, second = await started(engine), await started(engine)
    answers = await engine.renew_many([first.handle, 5, second.handle])  # type: ignore[list-item]
    assert [type(answer) for answer in answers] == [Renewed, ff.InvalidInput, Renewed]
    done = await engine.complete_many([Completion(first.handle, "text"), Completion(first.handle, b"bytes")])  # type: ignore[arg-type]
    assert [type(answer) for answer in done] == [ff.InvalidInput, Completed]
    failed = await engine.fail_many(
        [
            Failure(authority=second.handle, reason="x", failure_class="unheard of"),
            Failure(authority=second.handle, reason="x", failure_class="permanent"),
        ]
    )
    assert isinstance(failed[0], ff.FlowFabricError)
    assert isinstance(failed[1], TerminalFailed)
    assert await engine.complete_many([]) == []


async def test_a_handle_without_a_time_to_live_cannot_renew(engine: CheckedEngine) -> None:
    held = await started(engine)
    for ttl in (timedelta(0), 30):
        forged = Handle(**{name: getattr(held.handle, name) for name in Handle.__struct_fields__} | {"lease_ttl": ttl})
        with pytest.raises(ff.InvalidInput, match="lease_ttl"):
            await engine.renew(forged)


async def test_a_round_takes_about_as_many_executions_as_it_may(plain_engine: ff.Engine, clock: Clock) -> None:
    for size in (300, 300, 300):
        later = NewExecution(execution_kind="test", delay_until=timedelta(seconds=5))
        await plain_engine.create_many([later] * size)
    await clock.advance(seconds=6)
    first = await plain_engine.run_timers("delay", limit=400)
    assert (first.handled, first.more) == (600, True), "timers are taken until they point at enough"
    rest = await plain_engine.run_timers("delay", limit=400)
    assert (rest.handled, rest.more) == (300, False)


async def test_the_backlog_of_one_kind_keeps_no_other_waiting(plain_engine: ff.Engine) -> None:
    turns: list[str] = []

    class Backlog(Retention):
        async def round(self) -> Round:
            turns.append("retention")
            return Round(handled=1000, more=turns.count("retention") < 3)

    class Punctual(LeaseExpiry):
        async def round(self) -> Round:
            turns.append("lease")
            return Round(handled=0, more=turns.count("lease") < 2)

    class BothDue(TimerRunner):
        async def _with_work(self) -> list[WokenDuty]:
            return list(self._duties)

    runner = BothDue(plain_engine, [Backlog(plain_engine), Punctual(plain_engine)])
    assert await runner.run_once() == 3000
    assert turns == ["retention", "lease", "retention", "lease", "retention"]


async def test_a_duty_with_a_filter_leaves_the_timers_of_others_alone(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    for _ in range(3):
        await submit(engine, namespace="theirs", delay_until=timedelta(seconds=1))
    ours = await submit(engine, namespace="ours", delay_until=timedelta(seconds=2))
    await clock.advance(seconds=3)
    before = await sql.fetch("select ctid from flowfabric.timer where ids[1] <> $1 order by ctid", ours)
    done = await engine.run_timers("delay", limit=1, filter=ScannerFilter(namespace="ours"))
    assert done.handled == 1
    assert await engine.read_execution_state(ours) == ff.State.WAITING
    assert await sql.fetch("select ctid from flowfabric.timer where ids[1] <> $1 order by ctid", ours) == before


async def test_a_claim_takes_executions_after_a_locked_one(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    head, behind = await submit(plain_engine, priority=5), await submit(plain_engine)
    async with sql.transaction():
        await sql.execute(
            "select 1 from flowfabric.execution where id = $1 for no key update", head
        )  # as a cancel does first
        assert (await claim_one(plain_engine)).execution_id == behind
    assert (await claim_one(plain_engine)).execution_id == head


async def test_submissions_with_an_old_snapshot_do_not_pile_up_floors(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    for _ in range(20):
        async with sql.transaction(isolation="repeatable_read"):
            await plain_engine.create_execution(execution_kind="test", connection=sql)
        await plain_engine.complete((await claim_one(plain_engine)).handle)
    route = await sql.fetchval("select id from flowfabric.route")
    await sql.execute(
        "select flowfabric.raise_floors(r.lane, array[r.id]) from flowfabric.route r where r.id = $1", route
    )
    assert await sql.fetchval("select count(*) from flowfabric.ready_floor") == 1
    await submit(plain_engine)
    await claim_one(plain_engine)


async def test_a_lane_with_many_kinds_gives_out_the_best_of_them(plain_engine: ff.Engine) -> None:
    for number in range(12):
        await submit(plain_engine, execution_kind=f"kind-{number}", priority=number % 7)
    order = [(await claim_one(plain_engine)).priority for _ in range(12)]
    assert order == sorted(order, reverse=True)
    assert await plain_engine.claim(**OTHER) is None


async def test_a_reader_whose_filter_matches_nothing_moves_on(engine: CheckedEngine) -> None:
    await started(engine, namespace="a")
    nothing = ScannerFilter(namespace="b")
    page = await engine.read_events(filter=nothing)
    assert page.items == []
    assert page.next_cursor is not None
    assert page.next_cursor.position > 0
    assert (await engine.read_events(after=page.next_cursor)).items == []
    await started(engine, namespace="b")
    assert len((await engine.read_events(after=page.next_cursor, filter=nothing)).items) == 1


async def test_events_of_one_execution_are_in_the_order_of_its_history(plain_engine: ff.Engine, database: str) -> None:
    """A call that waits for another on a shared execution writes after it, whichever started first."""
    one, two = await started(plain_engine), await started(plain_engine)
    first, second = sorted((one, two), key=lambda held: (held.handle.partition, held.handle.uuid.int))
    async with await ff.Engine.connect(database, max_size=1, notifications=False) as other:
        async with plain_engine._database.connection() as connection, connection.transaction():
            await connection.fetch(
                "select flowfabric.renew($1, $2, $3, $4, $5, $6, null, true)",
                *([getattr(second.handle, n)] for n in ("partition", "uuid", "lease_id", "lease_epoch", "attempt_id")),
                [second.handle.attempt_index],
            )
            waiting = asyncio.ensure_future(other.complete_many([first.handle, second.handle]))
            await asyncio.sleep(0.2)  # the call holds the first and waits for the second
            assert not waiting.done()
        assert all(isinstance(answer, Completed) for answer in await waiting)
    events = [e for e in (await plain_engine.read_events()).items if e.execution_id == second.execution_id]
    assert [event.lease_type for event in events] == ["acquired", "renewed", "revoked"]


async def test_only_a_reason_that_can_be_undone_blocks(sql: asyncpg.Connection[Any], engine: CheckedEngine) -> None:
    execution_id = await submit(engine)
    code = await sql.fetchval(
        "select code from flowfabric.block($1, $2, 'garbage', null)", home(execution_id), execution_id
    )
    assert code == "invalid_blocking_reason"


async def test_an_attempt_timeout_of_zero_is_none(engine: CheckedEngine) -> None:
    await submit(engine, policy={"timeout_policy": {"attempt_timeout_ms": 0}})
    assert (await claim_one(engine)).attempt_timeout_at is None


async def test_a_waiting_claim_is_not_announced_for_longer_than_it_sleeps(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    assert await plain_engine.claim(**WORKER, max_wait=timedelta(milliseconds=200)) is None
    waits = asyncio.ensure_future(plain_engine.claim(**WORKER, max_wait=timedelta(hours=1)))
    async with asyncio.timeout(30):
        while not await sql.fetchval("select count(*) from flowfabric.sleeper where until > clock_timestamp()"):
            await asyncio.sleep(0.01)
    longest = await sql.fetchval("select max(until - clock_timestamp()) from flowfabric.sleeper")
    assert longest < timedelta(seconds=5)
    await submit(plain_engine)
    assert await waits is not None
