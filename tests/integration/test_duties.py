"""The duties: what each does, when it runs, and what happens when something goes wrong in the middle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric import _duties
from flowfabric._duties import ALL, Audit, Duties, Duty, LeaseExpiry
from flowfabric._duties.attempt_timeout import AttemptTimeout
from flowfabric._duties.cascade import Cascade
from flowfabric._duties.delayed_promotion import DelayedPromotion
from flowfabric._duties.edge_repair import EdgeRepair
from flowfabric._duties.execution_deadline import ExecutionDeadline
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric._duties.flow_summaries import FlowSummaries
from flowfabric._duties.parked_promotion import ParkedPromotion
from flowfabric._duties.record_expiry import RecordExpiry
from flowfabric._duties.retention import Retention
from flowfabric._duties.sibling_cancel import SiblingCancel
from flowfabric._duties.sibling_repair import SiblingRepair
from flowfabric.engine.timers import Round, TimerKind
from flowfabric.errors import ExecutionNotActive
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.flow import FlowState
from flowfabric.values.graph import FlowSubmitted, NewEdge, NewNode
from flowfabric.values.joins import AnyOf
from flowfabric.values.lease import Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy, TimeoutPolicy
from tests.ids import home
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import OTHER, RETRY, WORKER, CheckedEngine, Clock, claim_one, started, submit, until_blocked

DAY = timedelta(days=1)
PATIENCE = 60.0


class Counting(ff.Engine):
    """An engine that counts its round trips and tells when one is made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.statements: list[str] = []
        self.rounds = 0
        self.asked = asyncio.Event()

    async def _fetch(self, sql: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        self.statements.append(sql)
        try:
            return await super()._fetch(sql, *args, repeatable=repeatable)
        finally:
            if "look_for_due" in sql:
                self.rounds += 1
            self.asked.set()

    async def _row(self, sql: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._fetch(sql, *args, repeatable=repeatable))[0]

    async def slept(self, rounds: int = 1) -> None:
        """Wait until the timer runner has finished so many more rounds and sleeps."""
        wanted = self.rounds + rounds
        async with asyncio.timeout(PATIENCE):
            while self.rounds < wanted:
                self.asked.clear()
                await self.asked.wait()

    async def rests(self, seconds: float) -> float:
        """Give a busy loop the time to show; returns how long that took."""
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time() - begun


@pytest_asyncio.fixture(loop_scope="session")
async def counting(database: str) -> AsyncIterator[Counting]:
    async with await Counting.connect(database) as engine:
        yield engine
        assert await engine.audit() == []


@pytest_asyncio.fixture(loop_scope="session")
async def other(database: str) -> AsyncIterator[ff.Engine]:
    """An engine of another process, as far as the database can tell."""
    async with await ff.Engine.connect(database) as engine:
        yield engine


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, logger="flowfabric.duties"):
        yield caplog


async def state(engine: ff.Engine, execution_id: ff.ExecutionId) -> ff.State | None:
    return await engine.read_execution_state(execution_id)


async def becomes(engine: ff.Engine, execution_id: ff.ExecutionId, wanted: ff.State | None) -> None:
    async with asyncio.timeout(PATIENCE):
        while await state(engine, execution_id) is not wanted:
            await asyncio.sleep(0.01)


# What one round of each duty does.


async def test_lease_expiry_gives_a_lapsed_lease_back_and_leaves_a_live_one(
    engine: CheckedEngine, clock: Clock
) -> None:
    lapsed = await started(engine, lease_ttl=timedelta(seconds=30))
    alive = await started(engine, lease_ttl=timedelta(minutes=5))
    duty = LeaseExpiry(engine)
    assert await duty.run_once() == 0

    await clock.advance(seconds=31)

    assert await duty.run_once() == 1
    assert await duty.run_once() == 0
    with pytest.raises(ff.LeaseLost) as lost:
        await engine.complete(lapsed.handle, b"late")
    assert lost.value.kind == "lease_expired"
    again = await claim_one(engine, **OTHER)
    assert (again.execution_id, again.attempt_type) == (lapsed.execution_id, "reclaim")
    await engine.complete(alive.handle, b"in time")


async def test_a_renewed_lease_is_checked_again_at_its_new_expiry(engine: CheckedEngine, clock: Clock) -> None:
    claimed = await started(engine, lease_ttl=timedelta(seconds=30))
    await clock.advance(seconds=20)
    await engine.renew(claimed.handle)
    await clock.advance(seconds=15)
    assert await LeaseExpiry(engine).run_once() == 0
    await clock.advance(seconds=16)
    assert await LeaseExpiry(engine).run_once() == 1


async def test_delayed_promotion_makes_work_claimable_at_its_time(engine: CheckedEngine, clock: Clock) -> None:
    soon = await submit(engine, delay_until=timedelta(seconds=10))
    late = await submit(engine, delay_until=timedelta(seconds=100))
    assert await DelayedPromotion(engine).run_once() == 0

    await clock.advance(seconds=11)

    assert await engine.claim(**WORKER) is None, "it is not promoted yet"
    assert await DelayedPromotion(engine).run_once() == 1
    assert (await claim_one(engine)).execution_id == soon
    assert await state(engine, late) is ff.State.DELAYED


async def test_attempt_timeout_retries_by_policy_and_then_expires(engine: CheckedEngine, clock: Clock) -> None:
    once = ExecutionPolicy(
        retry_policy=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0))),
        timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=5)),
    )
    execution_id = await submit(engine, policy=once)
    await claim_one(engine)
    duty = AttemptTimeout(engine)
    await clock.advance(seconds=6)
    assert await duty.run_once() == 1
    await clock.advance(seconds=1)
    await DelayedPromotion(engine).run_once()
    assert (await claim_one(engine)).attempt_type == "retry"
    await clock.advance(seconds=6)
    assert await duty.run_once() == 1
    assert await state(engine, execution_id) is ff.State.EXPIRED
    assert await duty.run_once() == 0


async def test_execution_deadline_ends_waiting_and_running_executions(engine: CheckedEngine, clock: Clock) -> None:
    running = await started(engine, execution_deadline_at=timedelta(seconds=10))
    waiting = await submit(engine, execution_deadline_at=timedelta(seconds=10))
    delayed = await submit(engine, execution_deadline_at=timedelta(seconds=10), delay_until=timedelta(hours=1))
    await clock.advance(seconds=11)
    assert await ExecutionDeadline(engine).run_once() == 3
    for execution_id in (running.execution_id, waiting, delayed):
        assert await state(engine, execution_id) is ff.State.EXPIRED
    with pytest.raises(ExecutionNotActive):
        await engine.complete(running.handle)


async def test_leases_that_no_worker_reclaims_do_not_hide_those_that_lapse_later(
    plain_engine: ff.Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a full batch end the round."""
    monkeypatch.setattr(LeaseExpiry, "batch", 3)
    duty = LeaseExpiry(plain_engine)

    async def lapse(count: int) -> set[str]:
        held = [(await started(plain_engine)).execution_id for _ in range(count)]
        await clock.advance(minutes=1)
        assert await duty.run_once() == count
        records = [await plain_engine.read_execution(one) for one in held]
        return {one.state_vector.ownership_state for one in records if one is not None}

    for count in (10, 1):
        assert await lapse(count) == {"lease_expired_reclaimable"}
    assert await duty.run_once() == 0


async def test_a_full_batch_does_not_end_the_round(
    plain_engine: ff.Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DelayedPromotion, "batch", 3)
    for _ in range(10):
        await submit(plain_engine, delay_until=timedelta(seconds=1))
    await clock.advance(seconds=2)
    assert await DelayedPromotion(plain_engine).run_once() == 10


# Flows.


def node(name: str, *after: str, **fields: Any) -> NewNode:
    edges = [NewEdge(upstream=one) for one in after]
    return NewNode(name=name, execution=NewExecution(execution_kind="test"), after=edges, **fields)


async def chain(engine: ff.Engine) -> FlowSubmitted:
    return await engine.submit_flow([node("a"), node("b", "a"), node("c", "b"), node("d", "c")])


async def race(engine: ff.Engine) -> FlowSubmitted:
    """A join that one upstream has decided; the two others are still to be cancelled."""
    made = await engine.submit_flow([node("a"), node("b"), node("c"), node("d", "a", "b", "c", policy=AnyOf())])
    won = await engine.issue_grant_and_claim(made.nodes["a"])
    await engine.complete(won.handle)
    return made


async def states(engine: ff.Engine, made: FlowSubmitted) -> dict[str, str]:
    return {member.name: str(member.state) for member in await engine.list_flow_members(made.flow_id)}


async def test_the_cascade_continues_after_skipped_members(engine: CheckedEngine) -> None:
    made = await chain(engine)
    await engine.cancel(Operator(made.nodes["a"]), "no")
    assert await states(engine, made) == {
        "a": "cancelled", "b": "skipped", "c": "waiting_children", "d": "waiting_children",
    }  # fmt: skip
    assert await Cascade(engine).run_once() > 0
    assert await states(engine, made) == {"a": "cancelled", "b": "skipped", "c": "skipped", "d": "skipped"}
    assert await Cascade(engine).run_once() == 0


async def test_the_sibling_cancel_cancels_losers_of_a_race(engine: CheckedEngine) -> None:
    made = await race(engine)
    assert await SiblingCancel(engine).run_once() == 2
    assert await states(engine, made) == {"a": "completed", "b": "cancelled", "c": "cancelled", "d": "waiting"}
    assert await engine.list_sibling_cancels() == []
    assert await SiblingCancel(engine).run_once() == 0


async def test_the_sibling_repair_removes_only_stale_entries(engine: CheckedEngine) -> None:
    made = await race(engine)
    assert await SiblingRepair(engine).run_once() == 0
    assert len(await engine.list_sibling_cancels()) == 1
    await engine.cancel_many([made.nodes["b"], made.nodes["c"]], "by hand")
    assert await SiblingRepair(engine).run_once() == 1
    assert await engine.list_sibling_cancels() == []


async def test_the_flow_cancel_waits_for_the_grace_and_cancels_the_rest(engine: CheckedEngine, clock: Clock) -> None:
    made = await chain(engine)
    await engine.cancel_flow_header(made.flow_id, reason="enough", grace=timedelta(seconds=30))
    assert await FlowCancel(engine).run_once() == 0
    await clock.advance(seconds=31)
    assert await FlowCancel(engine).run_once() == 4
    assert set((await states(engine, made)).values()) == {"cancelled"}
    assert await engine.read_cancel_backlog(made.flow_id) is None
    assert await FlowCancel(engine).run_once() == 0


async def test_the_edge_repair_finds_nothing_unless_something_was_forgotten(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], reports: pytest.LogCaptureFixture
) -> None:
    made = await chain(plain_engine)
    await plain_engine.cancel(Operator(made.nodes["a"]), "no")
    duty = EdgeRepair(plain_engine)
    duty.place = None  # a process begins anywhere
    assert await duty.run_once() == 0
    await sql.execute("delete from flowfabric.pending_cascade")
    assert await duty.run_once() > 0
    assert "missed" in reports.text
    await Cascade(plain_engine).run_once()
    assert await states(plain_engine, made) == {"a": "cancelled", "b": "skipped", "c": "skipped", "d": "skipped"}


async def test_flow_summaries_count_only_changed_flows(engine: CheckedEngine) -> None:
    made, other = await chain(engine), await chain(engine)
    duty = FlowSummaries(engine)
    assert await duty.run_once() == 2
    assert await duty.run_once() == 0
    await engine.cancel(Operator(made.nodes["d"]), "no")
    assert await duty.run_once() == 1
    summary = await engine.read_flow_summary(made.flow_id)
    assert summary is not None
    assert (summary.members_cancelled, summary.members_waiting, summary.members_waiting_children) == (1, 1, 2)
    assert summary.public_flow_state is FlowState.BLOCKED
    untouched = await engine.read_flow_summary(other.flow_id)
    assert untouched is not None
    assert untouched.members_cancelled == 0


# Retention.


async def done(engine: ff.Engine, **fields: Any) -> ff.ExecutionId:
    claimed = await started(engine, **fields)
    await engine.complete(claimed.handle, b"result")
    return claimed.execution_id


async def test_retention_forgets_ended_executions_and_everything_they_own(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    gone = await done(engine, tags={"team.name": "a"}, namespace="n", policy=RETRY)
    retried = await started(engine, policy=RETRY, tags={"team.name": "b"})
    await engine.fail(retried.handle, "boom")
    await clock.advance(seconds=11)
    await engine.promote_delayed(retried.execution_id)
    again = await claim_one(engine)
    await engine.fail(again.handle, "boom", failure_class="permanent")
    open_one = await submit(engine, tags={"team.name": "c"})
    duty = Retention(engine)
    assert await duty.run_once() == 0

    await clock.advance(days=7, seconds=1)
    assert await duty.run_once() == 1
    assert await state(engine, retried.execution_id) is ff.State.FAILED, "what failed is kept for two weeks"
    await clock.advance(days=7)

    assert await duty.run_once() == 1
    for execution_id in (gone, retried.execution_id):
        assert await engine.read_execution(execution_id) is None
        assert await engine.get_execution_result(execution_id) is None
        assert await engine.list_attempts(execution_id) == []
        for table in (
            "execution",
            "ready",
            "attempt",
            "tag",
            "unsuccessful",
            "blocked",
            "claim_grant",
            "step",
            "waiter",
        ):
            query = f"select count(*) from flowfabric.{table} where id = $1"
            assert await sql.fetchval(query, execution_id) == 0, table
        # events live out their own time
        assert await sql.fetchval("select count(*) from flowfabric.event where id = $1", execution_id) > 0
    assert await state(engine, open_one) is ff.State.WAITING
    assert await engine.get_execution_tag(open_one, "team.name") == "c"


async def test_retention_is_a_matter_of_each_execution(engine: CheckedEngine, clock: Clock) -> None:
    short = await done(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(minutes=1))))
    usual = await done(engine)
    long = await done(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(days=14))))
    expected = [
        (timedelta(minutes=2), {short}),
        (timedelta(days=7), {short, usual}),
        (timedelta(days=5), {short, usual}),
        (timedelta(days=2), {short, usual, long}),
    ]
    for step, gone in expected:
        await clock.advance(seconds=step.total_seconds())
        await engine.trim_retention()
        for execution_id in (short, usual, long):
            assert (await state(engine, execution_id) is None) == (execution_id in gone)


async def test_a_replay_postpones_retention_to_the_new_end(engine: CheckedEngine, clock: Clock) -> None:
    execution_id = await done(engine)
    await clock.advance(days=6)
    await engine.replay_execution(execution_id)
    await clock.advance(days=2)
    assert await Retention(engine).run_once() == 0
    again = await claim_one(engine)
    assert again.execution_id == execution_id
    await engine.complete(again.handle, b"second")
    await clock.advance(days=6)
    assert await Retention(engine).run_once() == 0
    assert await engine.get_execution_result(execution_id) == b"second"
    await clock.advance(days=2)
    assert await Retention(engine).run_once() == 1


async def test_an_idempotency_record_outlives_its_execution(engine: CheckedEngine, clock: Clock) -> None:
    policy = ExecutionPolicy(
        stream_policy=StreamPolicy(retention_ttl=timedelta(minutes=1)), dedup_window=timedelta(hours=2)
    )
    execution_id = await done(engine, idempotency_key="k", policy=policy)
    await clock.advance(minutes=2)
    assert await Retention(engine).run_once() == 1
    await RecordExpiry(engine).run_once()

    again = await engine.create_execution(execution_kind="test", idempotency_key="k", policy=policy)

    assert again == Duplicate(execution_id)
    await clock.advance(hours=2)
    assert await RecordExpiry(engine).run_once() == 1
    assert isinstance(await engine.create_execution(execution_kind="test", idempotency_key="k"), Created)


# RecordExpiry.


async def test_sweep_removes_only_expired_keys_and_grants(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    short = ExecutionPolicy(dedup_window=timedelta(minutes=1))
    lapsed = await submit(engine, idempotency_key="short", policy=short)
    await submit(engine, idempotency_key="long")
    await engine.issue_claim_grant(lapsed, **WORKER, grant_ttl=timedelta(seconds=5))
    assert await RecordExpiry(engine).run_once() == 0
    await clock.advance(minutes=2)
    await engine.issue_claim_grant(lapsed, **OTHER, grant_ttl=timedelta(seconds=60))
    assert await RecordExpiry(engine).run_once() == 1
    assert await sql.fetch("select key from flowfabric.idempotency") == [("long",)]
    assert await sql.fetchval("select worker_instance_id from flowfabric.claim_grant") == "pool-2"
    await clock.advance(minutes=2)
    assert await RecordExpiry(engine).run_once() == 1
    assert await sql.fetchval("select count(*) from flowfabric.claim_grant") == 0


async def test_the_parts_of_the_sweep_are_counted_under_their_own_names(plain_engine: ff.Engine, clock: Clock) -> None:
    seen: dict[str, list[int]] = {}

    class Seen:
        async def round(self, name: str, proceed: Callable[[], Awaitable[Round]]) -> Round:
            done = await proceed()
            seen.setdefault(name, []).append(done.handled)
            return done

        def leads(self, group: str, is_ours: bool) -> None:
            raise AssertionError(group, is_ours)

    duty = RecordExpiry(plain_engine)
    duty.watcher = Seen()
    duty.batch = 2
    short = ExecutionPolicy(dedup_window=timedelta(minutes=1))
    made = [await submit(plain_engine, idempotency_key=str(n), policy=short) for n in range(3)]
    for one in made:
        await plain_engine.issue_claim_grant(one, **WORKER, grant_ttl=timedelta(seconds=5))
    budget = (await plain_engine.create_budget(name="b", dimensions=["t"], hard_limits=[9], soft_limits=[0])).budget_id
    for key in ("a", "b"):
        await plain_engine.report_usage_admin(budget, dimensions=["t"], deltas=[1], dedup_key=key)
    await clock.advance(hours=25)
    assert await duty.run_once() == 8
    assert await duty.run_once() == 0
    assert seen == {"grant_sweeper": [3, 0], "usage_dedup_sweeper": [2, 0]}


async def test_sweep_continues_while_its_batch_is_full(plain_engine: ff.Engine, clock: Clock) -> None:
    short = ExecutionPolicy(dedup_window=timedelta(seconds=1))
    await plain_engine.create_many(
        [NewExecution(execution_kind="test", idempotency_key=str(n), policy=short) for n in range(25)]
    )
    await clock.advance(seconds=2)
    duty = RecordExpiry(plain_engine)
    duty.batch = 10
    assert await duty.run_once() == 25


async def test_sweep_empties_event_segments_past_their_retention_and_keeps_the_young(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    count = "select count(*) from flowfabric.event"
    policy = ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(days=30)))
    await done(plain_engine, policy=policy)
    old = await sql.fetchval(count)
    assert old > 0
    await clock.advance(hours=47)
    assert await RecordExpiry(plain_engine).run_once() == 0
    young = await done(plain_engine, policy=policy)
    assert await sql.fetchval(count) == 2 * old

    await clock.advance(hours=14)

    assert await RecordExpiry(plain_engine).run_once() == 1
    left = await sql.fetch("select distinct id from flowfabric.event")
    assert left == [(young,)]
    assert await RecordExpiry(plain_engine).run_once() == 0

    # Eight segments: after four days the ring is back where it was, and writes into an empty segment.
    await clock.advance(hours=48)
    await RecordExpiry(plain_engine).run_once()
    last = await done(plain_engine, policy=policy)
    assert await sql.fetch("select distinct id from flowfabric.event") == [(last,)]
    await sql.execute("delete from flowfabric.execution where id <> $1", last)
    await sql.execute("delete from flowfabric.timer")
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.event")


async def test_a_long_reader_of_the_log_makes_the_sweep_wait_for_its_next_round(
    plain_engine: ff.Engine, database: str, clock: Clock
) -> None:
    policy = ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(days=30)))
    await done(plain_engine, policy=policy)
    await clock.advance(hours=70)
    reader = await asyncpg.connect(database)
    try:
        async with reader.transaction():
            await reader.fetch("select count(*) from flowfabric.event")
            assert await RecordExpiry(plain_engine).run_once() == 0
        assert await RecordExpiry(plain_engine).run_once() == 1
        await reader.execute("delete from flowfabric.execution; delete from flowfabric.timer")
    finally:
        await reader.close()


# Audit.


async def test_the_audit_duty_reports_violations_and_repairs_nothing(
    database: str, sql: asyncpg.Connection[Any], reports: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await ff.Engine.connect(database) as engine:
        execution_id = await submit(engine)
        monkeypatch.setattr("random.randrange", lambda _: home(execution_id))
        assert await Audit(engine).run_once() == 0
        await sql.execute("delete from flowfabric.ready")

        assert await Audit(engine).run_once() == 1

        assert await sql.fetchval("select count(*) from flowfabric.ready") == 0
        (report,) = reports.records
        assert report.levelno == logging.ERROR
        assert str(execution_id) in report.getMessage()
        assert "ready_row" in report.getMessage()
        monkeypatch.setattr("random.randrange", lambda _: (home(execution_id) + 1) % 256)
        assert await Audit(engine).run_once() == 0, "one partition at a time"


# When they run.


async def test_an_idle_runner_rests_until_its_interval(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_duties.TimerRunner, "interval", timedelta(hours=1))
    async with Duties(counting):
        await counting.slept()
        before = len(counting.statements)
        # Work that needs no timer soon: leases of half a minute, ends, retentions of a day.
        for _ in range(5):
            claimed = await started(counting)
            await counting.complete(claimed.handle)
        mine = len(counting.statements)
        took = await counting.rests(0.3)
        assert len(counting.statements) - mine <= 12 + 10 * took, counting.statements[mine:]
        assert mine - before >= 15


async def test_a_due_timer_fires_by_itself_without_polling_for_it(
    counting: Counting, other: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_duties.TimerRunner, "interval", timedelta(hours=1))
    execution_id = await submit(counting, delay_until=timedelta(milliseconds=400))
    async with Duties(counting, [DelayedPromotion, LeaseExpiry]):
        await becomes(other, execution_id, ff.State.WAITING)
        # At the start, when the listener begins to listen, at the time, and once more after that.
        assert counting.rounds <= 4


async def test_an_earlier_timer_set_elsewhere_wakes_the_sleeping_runner(
    counting: Counting, other: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_duties.TimerRunner, "interval", timedelta(hours=1))
    await submit(counting, delay_until=timedelta(minutes=30))
    async with Duties(counting):
        await counting.slept()
        await counting._listener.listening(PATIENCE)  # type: ignore[union-attr]
        await counting.slept()  # the listener wakes everybody once when it begins to listen
        execution_id = await submit(other, delay_until=timedelta(milliseconds=200))
        await becomes(other, execution_id, ff.State.WAITING)


async def test_a_later_timer_set_elsewhere_lets_the_runner_sleep(
    counting: Counting, other: ff.Engine, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_duties.TimerRunner, "interval", timedelta(minutes=10))
    heard: list[object] = []
    async with Duties(counting):
        await counting.slept()
        await counting._listener.listening(PATIENCE)  # type: ignore[union-attr]
        await counting.slept()
        await sql.add_listener("flowfabric", lambda *args: heard.append(args[-1]))
        await sql.add_listener(f"flowfabric_{counting._instance}", lambda *args: heard.append(args[-1]))
        await submit(other, delay_until=timedelta(minutes=20))
        await sql.execute("notify flowfabric, 'end'")
        async with asyncio.timeout(PATIENCE):
            while "end" not in heard:
                await asyncio.sleep(0.01)
    assert heard == ["end"]


async def test_without_notifications_the_interval_is_the_backstop(database: str) -> None:
    async with await ff.Engine.connect(database, notifications=False) as engine, Duties(engine, [DelayedPromotion]):
        await asyncio.sleep(0)
        execution_id = await submit(engine, delay_until=timedelta(milliseconds=100))
        await becomes(engine, execution_id, ff.State.WAITING)


async def test_all_duties_together_keep_an_idle_system_quiet(counting: Counting) -> None:
    async with Duties(counting):
        await counting.slept(2)
        begun = asyncio.get_running_loop().time()
        statements = len(counting.statements)
        await counting.slept(3)
        took = asyncio.get_running_loop().time() - begun
        # One statement per round for all duties that are woken, a round per interval, and three to keep the lead.
        assert len(counting.statements) - statements <= 3 + 3 + 6 + 3 * took
        assert took >= 2 * 0.75


# Several at once, and crashes.


async def test_duties_in_several_processes_have_the_same_result_as_in_one(
    database: str, plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    for _ in range(40):
        await submit(plain_engine, delay_until=timedelta(seconds=1))
        await submit(plain_engine, execution_deadline_at=timedelta(seconds=1), delay_until=timedelta(hours=1))
    taken = []
    for _ in range(40):
        taken.append(await started(plain_engine, lease_ttl=timedelta(seconds=1)))
    await clock.advance(seconds=2)

    others = [await ff.Engine.connect(database, max_size=4) for _ in range(4)]
    try:
        rounds = [duty(engine).run_once() for engine in others for duty in ALL if duty is not Audit]
        handled = sum(await asyncio.gather(*rounds))
        for duty in ALL:  # what one skipped because another held it
            handled += await duty(plain_engine).run_once()
    finally:
        for engine in others:
            await engine.close()

    assert handled == 120
    kinds = await sql.fetch("select lease_type, outcome, count(*) from flowfabric.event group by 1, 2 order by 1, 2")
    assert {(row[0], row[1]): row[2] for row in kinds} == {
        ("acquired", None): 40,
        ("expired", None): 40,
        (None, "expired"): 40,
    }
    assert len(taken) == 40


async def test_a_round_that_dies_in_the_middle_leaves_everything_to_the_next(
    engine: CheckedEngine, database: str, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    ids = [await submit(engine, delay_until=timedelta(seconds=1)) for _ in range(5)]
    await clock.advance(seconds=2)
    dying = await asyncpg.connect(database)
    transaction = dying.transaction()
    await transaction.start()
    row = await dying.fetchrow("select * from flowfabric.run_timers('delay', 20, null, null, null, null, 30000)")
    assert row is not None
    assert row["handled"] == 5
    assert await DelayedPromotion(engine).run_once() == 0, "another transaction has locked them"

    await sql.execute("select pg_terminate_backend($1, 10000)", dying.get_server_pid())

    assert [await state(engine, i) for i in ids] == [ff.State.DELAYED] * 5
    assert await DelayedPromotion(engine).run_once() == 5
    assert [await state(engine, i) for i in ids] == [ff.State.WAITING] * 5
    dying.terminate()


async def test_locked_executions_do_not_keep_a_round_from_ending(
    engine: CheckedEngine, database: str, clock: Clock
) -> None:
    locked = [await submit(engine, delay_until=timedelta(seconds=1)) for _ in range(6)]
    free = await submit(engine, delay_until=timedelta(seconds=1.5))
    await clock.advance(seconds=2)
    holder = await asyncpg.connect(database)
    duty = DelayedPromotion(engine)
    duty.batch = 2
    try:
        async with holder.transaction():
            await holder.execute("select from flowfabric.execution where id = any ($1) for update", locked)
            async with asyncio.timeout(PATIENCE):
                assert await duty.run_once() == 1
            assert await state(engine, free) is ff.State.WAITING
        assert await duty.run_once() == 6
    finally:
        await holder.close()


async def test_due_but_locked_executions_do_not_make_the_runner_busy(
    counting: Counting, database: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_duties.TimerRunner, "interval", timedelta(hours=1))
    execution_id = await submit(counting, delay_until=timedelta(seconds=1))
    await clock.advance(seconds=2)
    holder = await asyncpg.connect(database)
    async with holder.transaction():
        await holder.execute("select from flowfabric.execution where id = $1 for update", execution_id)
        async with Duties(counting, [DelayedPromotion]):
            await counting.slept()
            before = len(counting.statements)
            took = await counting.rests(0.5)
            # A round when the listener begins to listen, and the lead.
            assert len(counting.statements) - before <= 5 + 5 * took
    await holder.close()


async def test_a_round_is_never_dated_before_what_it_acted_on(
    plain_engine: ff.Engine, database: str, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    past = await clock.now() - timedelta(hours=1)
    holder = await asyncpg.connect(database)
    async with holder.transaction():
        await holder.execute("lock table flowfabric.timer in access exclusive mode")
        passing = asyncio.create_task(ExecutionDeadline(plain_engine).run_once())
        await until_blocked(sql)
        execution_id = await submit(plain_engine, execution_deadline_at=past, connection=holder)
    assert await passing == 1
    await holder.close()
    execution = await plain_engine.read_execution(execution_id)
    assert execution is not None
    assert execution.completed_at is not None
    assert execution.created_at <= execution.completed_at


# Bad items.

POISON = """
create function public.refuse() returns trigger language plpgsql as $$
begin
    if new.namespace = 'poison' then raise exception 'this one is poison'; end if;
    return new;
end $$;
create trigger refuse before update on flowfabric.execution for each row execute function public.refuse();
"""


async def test_a_poisoned_item_is_put_off_and_reported_while_the_rest_is_handled(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any], reports: pytest.LogCaptureFixture
) -> None:
    good = [await submit(plain_engine, delay_until=timedelta(seconds=1)) for _ in range(3)]
    bad = await submit(plain_engine, delay_until=timedelta(seconds=1), namespace="poison")
    good += [await submit(plain_engine, delay_until=timedelta(seconds=1)) for _ in range(3)]
    await sql.execute(POISON)
    await clock.advance(seconds=2)
    duty = DelayedPromotion(plain_engine)

    assert await duty.run_once() == 6

    assert [await state(plain_engine, i) for i in good] == [ff.State.WAITING] * 6
    assert await state(plain_engine, bad) is ff.State.DELAYED
    (report,) = [record for record in reports.records if record.levelno == logging.WARNING]
    assert "delayed_promotion" in report.getMessage()
    assert "this one is poison" in report.getMessage()
    # It does not come back at once ...
    assert await duty.run_once() == 0
    assert len([record for record in reports.records if record.levelno == logging.WARNING]) == 1
    # ... but it comes back, and when the cause is gone it is handled.
    await sql.execute("drop trigger refuse on flowfabric.execution")
    await clock.advance(seconds=31)
    assert await duty.run_once() == 1
    assert await state(plain_engine, bad) is ff.State.WAITING


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("lease", {}),
        ("attempt", {"policy": ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=1)))}),
        ("deadline", {"execution_deadline_at": timedelta(seconds=1)}),
    ],
)
async def test_every_kind_of_round_survives_a_poisoned_item(
    database: str, clock: Clock, sql: asyncpg.Connection[Any], kind: str, fields: dict[str, Any]
) -> None:
    async with await ff.Engine.connect(database) as engine:
        for namespace in ("", "poison", ""):
            await started(engine, lease_ttl=timedelta(seconds=1), namespace=namespace, **fields)
        await sql.execute(POISON)
        await clock.advance(seconds=2)
        done = await engine.run_timers(kind)
        assert (done.handled, done.failed, done.message) == (2, 1, "this one is poison")
        assert (await engine.run_timers(kind)).failed == 0
        await clock.advance(seconds=31)
        assert (await engine.run_timers(kind)).failed == 1


async def test_a_poisoned_retention_item_survives_until_it_can_go(
    database: str, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as engine:
        ids = [await done(engine, namespace=namespace) for namespace in ("", "poison", "")]
        await sql.execute(
            "create table public.keep (partition integer, id uuid,"
            " foreign key (partition, id) references flowfabric.execution)"
        )
        await sql.execute("insert into public.keep values ($1, $2)", home(ids[1]), ids[1])
        await clock.advance(days=8)
        round_ = await engine.run_timers(TimerKind.RETENTION)
        assert (round_.handled, round_.failed) == (2, 1)
        assert [await state(engine, i) for i in ids] == [None, ff.State.COMPLETED, None]
        assert len(await engine.list_attempts(ids[1])) == 1, "nothing of it went"
        await sql.execute("drop table public.keep")
        await clock.advance(seconds=31)
        assert (await engine.run_timers(TimerKind.RETENTION)).handled == 1


async def test_a_duty_that_fails_as_a_whole_does_not_stop_the_others(
    database: str, sql: asyncpg.Connection[Any], reports: pytest.LogCaptureFixture
) -> None:
    async with await Counting.connect(database) as engine:
        await sql.execute(
            "create function public.down() returns trigger language plpgsql as $$"
            " begin if old.kind = 'lease' then raise exception 'out of order'; end if; return old; end $$"
        )
        await sql.execute("create trigger down before delete on flowfabric.timer for each row execute function down()")
        await started(engine, lease_ttl=timedelta(milliseconds=1))
        execution_id = await submit(engine, delay_until=timedelta(milliseconds=1))
        async with Duties(engine):
            await becomes(engine, execution_id, ff.State.WAITING)
            async with asyncio.timeout(PATIENCE):
                while not any("out of order" in record.getMessage() for record in reports.records):
                    await asyncio.sleep(0.01)


async def test_a_duty_with_a_bug_is_reported_and_restarted(
    plain_engine: ff.Engine, reports: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = asyncio.Event()

    class Broken(Duty):
        name = "broken"
        rounds = 0

        async def run_once(self) -> int:
            Broken.rounds += 1
            if Broken.rounds == 2:
                ran.set()
            raise RuntimeError("a bug")

    monkeypatch.setattr("flowfabric._duties.duty._RESTART_AFTER", 0.01)
    async with Duties(plain_engine, [Broken]):
        await asyncio.wait_for(ran.wait(), PATIENCE)
    assert any(record.exc_info and "broken" in record.getMessage() for record in reports.records)


async def test_duties_outlive_the_loss_of_every_connection(
    counting: Counting, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Duties(counting):
        await counting.slept()
        await sql.fetch(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        execution_id = await submit(counting, delay_until=timedelta(milliseconds=1))
        await becomes(counting, execution_id, ff.State.WAITING)


# The filter.


@pytest.mark.parametrize(
    ("wanted", "matching"),
    [
        (ScannerFilter(namespace="ours"), {"namespace": "ours"}),
        (ScannerFilter(instance_tag=("app.name", "ours")), {"tags": {"app.name": "ours"}}),
        (
            ScannerFilter(namespace="ours", instance_tag=("app.name", "ours")),
            {"namespace": "ours", "tags": {"app.name": "ours"}},
        ),
        (ScannerFilter(), {}),
    ],
)
async def test_a_filtered_duty_handles_only_matches_even_if_others_are_older(
    engine: CheckedEngine, clock: Clock, wanted: ScannerFilter, matching: dict[str, Any]
) -> None:
    strangers = [
        await submit(engine, delay_until=timedelta(seconds=1), **fields)
        for fields in (
            {"namespace": "theirs"},
            {"tags": {"app.name": "theirs"}},
            {"namespace": "theirs", "tags": {"app.name": "ours"}},
            {"namespace": "ours", "tags": {"app.other": "ours"}},
        )
        if wanted != ScannerFilter(namespace="ours") or fields.get("namespace") != "ours"
        if wanted != ScannerFilter(instance_tag=("app.name", "ours")) or fields.get("tags") != {"app.name": "ours"}
        if wanted != ScannerFilter()
    ]
    ours = await submit(engine, delay_until=timedelta(seconds=5), **matching)
    await clock.advance(seconds=6)
    duty = DelayedPromotion(engine, filter=wanted)
    duty.batch = 1

    assert await duty.run_once() == 1

    assert await state(engine, ours) is ff.State.WAITING
    assert [await state(engine, i) for i in strangers] == [ff.State.DELAYED] * len(strangers)
    # Nothing of the others' was lost: a duty without a filter finds it.
    assert await DelayedPromotion(engine).run_once() == len(strangers)


async def test_the_filter_holds_for_every_timer_duty(engine: CheckedEngine, clock: Clock) -> None:
    ours, theirs = ScannerFilter(namespace="ours"), ScannerFilter(namespace="theirs")
    policy = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=100)))
    claimed = await started(engine, namespace="ours", policy=policy, execution_deadline_at=timedelta(seconds=200))
    await clock.advance(seconds=31)
    for duty, later in ((LeaseExpiry, 100), (AttemptTimeout, 15 * 86_400), (Retention, 1)):
        assert await duty(engine, filter=theirs).run_once() == 0
        assert await duty(engine, filter=ours).run_once() == 1
        await clock.advance(seconds=later)
    assert await state(engine, claimed.execution_id) is None
    late = await submit(engine, namespace="ours", execution_deadline_at=timedelta(seconds=1))
    await clock.advance(seconds=2)
    assert await ExecutionDeadline(engine, filter=theirs).run_once() == 0
    assert await ExecutionDeadline(engine, filter=ours).run_once() == 1
    assert await state(engine, late) is ff.State.EXPIRED


async def test_an_execution_that_was_locked_while_parked_is_woken(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    """The call that ends the child cannot lock the parent; the duty wakes it once it is unlocked."""
    parent = await started(engine, namespace="ours")
    await submit(engine, lane_id="children")
    child = await claim_one(engine, lane_id="children")
    await engine.park(parent.handle, ends_of=[child.execution_id])
    async with sql.transaction():
        await sql.execute("select from flowfabric.execution where id = $1 for update", parent.execution_id)
        await engine.complete(child.handle)
        assert await ParkedPromotion(engine).run_once() == 0
    assert await ParkedPromotion(engine, filter=ScannerFilter(namespace="theirs")).run_once() == 0
    assert await state(engine, parent.execution_id) is ff.State.WAITING_CHILDREN
    assert await ParkedPromotion(engine).run_once() == 1
    assert await state(engine, parent.execution_id) is ff.State.WAITING
    assert await ParkedPromotion(engine).run_once() == 0


async def test_the_due_timers_of_others_do_not_make_a_filtered_runner_busy(
    counting: Counting, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_duties.TimerRunner, "interval", timedelta(hours=1))
    await submit(counting, delay_until=timedelta(seconds=1), namespace="theirs")
    await clock.advance(seconds=2)
    async with Duties(counting, [DelayedPromotion], filter=ScannerFilter(namespace="ours")):
        await counting.slept()
        before = len(counting.statements)
        took = await counting.rests(0.5)
        assert len(counting.statements) - before <= 4 + 5 * took  # a round when the listener begins to listen


# Shutdown.


async def test_shutdown_prepare_lets_a_round_finish(plain_engine: ff.Engine) -> None:
    begun, go_on, finished = asyncio.Event(), asyncio.Event(), []

    class Slow(Duty):
        name = "slow"

        async def run_once(self) -> int:
            begun.set()
            await go_on.wait()
            finished.append(True)
            return 1

    async with Duties(plain_engine, [Slow]):
        await begun.wait()
        stopping = asyncio.create_task(plain_engine.shutdown_prepare(timedelta(seconds=30)))
        await asyncio.sleep(0)
        go_on.set()
        await stopping
    assert finished == [True]


async def test_shutdown_prepare_gives_up_on_a_round_that_does_not_end(plain_engine: ff.Engine) -> None:
    begun, cut = asyncio.Event(), asyncio.Event()

    class Stuck(Duty):
        name = "stuck"

        async def run_once(self) -> int:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cut.set()
            return 0

    async with Duties(plain_engine, [Stuck, RecordExpiry]):
        await begun.wait()
        with pytest.raises(ff.TimedOut) as late:
            await plain_engine.shutdown_prepare(timedelta(milliseconds=50))
    assert late.value.op == "shutdown_prepare"
    assert late.value.elapsed_ms >= 50
    assert cut.is_set()
    await plain_engine.ping()
    await plain_engine.shutdown_prepare(timedelta(0)), "nothing is left to stop"


async def test_a_long_round_checks_whether_to_stop_between_its_batches(
    plain_engine: ff.Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DelayedPromotion, "batch", 1)
    ids = [await submit(plain_engine, delay_until=timedelta(seconds=1)) for _ in range(20)]
    await clock.advance(seconds=2)
    duties = Duties(plain_engine, [DelayedPromotion])
    original = plain_engine.run_timers

    async def one_batch(*args: Any, **fields: Any) -> Any:
        answer = await original(*args, **fields)
        duties._stopping.set()
        return answer

    monkeypatch.setattr(plain_engine, "run_timers", one_batch)
    async with duties:
        await asyncio.wait(duties._tasks, timeout=PATIENCE)
    states = [await state(plain_engine, i) for i in ids]
    assert (states.count(ff.State.WAITING), states.count(ff.State.DELAYED)) == (1, 19)


async def test_duties_can_be_started_again_after_they_were_stopped(plain_engine: ff.Engine) -> None:
    duties = Duties(plain_engine, [DelayedPromotion])
    for _ in range(2):
        async with duties:
            execution_id = await submit(plain_engine, delay_until=timedelta(milliseconds=1))
            await becomes(plain_engine, execution_id, ff.State.WAITING)


async def test_no_duty_of_the_contract_is_missing() -> None:
    names = {duty.name: duty.interval.total_seconds() for duty in ALL}
    assert names == {
        "lease_expiry": 1.5,
        "delayed_promotion": 0.75,
        "parked_promotion": 0.75,
        "attempt_timeout": 2,
        "execution_deadline": 5,
        "suspension_timeout": 2,
        "waitpoint_expiry": 5,
        "limit_opening": 1,
        "cascade": 1,
        "sibling_cancel": 1,
        "child_cancel": 1,
        "flow_cancel": 15,
        "hook_submission": 1,
        "unblock": 5,
        "quota_reconciler": 30,
        "bulk_work": 1,
        "retention": 60,
        "sibling_repair": 10,
        "edge_repair": 15,
        "flow_summaries": 15,
        "record_expiry": 30,
        "worker_registry_ttl_sweep": 30,
        "registry_event_trimmer": 60,
        "budget_reset": 15,
        "reservation_end": 1,
        "budget_reconciler": 30,
        "audit": 45,
    }
