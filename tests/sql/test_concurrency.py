"""Invariants under many concurrent callers: real connections, a few hundred executions, no forced order.

Where an order matters it is forced by an open transaction, never by time. Every test ends with an audit of everything.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import Contention, FlowFabricError, RetriesExhausted
from flowfabric.values.attempt import Claimed
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements, StreamPolicy, TimeoutPolicy
from tests.databases import fresh_database
from tests.ids import id_in
from tests.interleave import Party, waiting
from tests.support import MINUTE, OTHER, WORKER, Clock, claim_one, submit

CALLERS = 8


@pytest_asyncio.fixture(loop_scope="session")
async def crowd(database: str) -> AsyncIterator[list[ff.Engine]]:
    """Engines as separate processes would have them, each with a connection of its own."""
    async with _engines(database, CALLERS) as engines:
        yield engines
        assert await engines[0].audit(events=True) == []


@asynccontextmanager
async def _engines(dsn: str, count: int, **options: bool) -> AsyncIterator[list[ff.Engine]]:
    engines = [await ff.Engine.connect(dsn, max_size=1, notifications=False, **options) for _ in range(count)]
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def party(database: str) -> AsyncIterator[Party]:
    joined = await Party.join(database)
    yield joined
    joined.connection.terminate()


def worker(number: int) -> dict[str, str]:
    return {"worker_id": "pool", "worker_instance_id": f"pool-{number}"}


# Claims


async def test_of_many_workers_one_gets_the_execution(crowd: list[ff.Engine]) -> None:
    for _ in range(20):
        target = await submit(crowd[0])
        answers = await asyncio.gather(*(engine.claim(**worker(n)) for n, engine in enumerate(crowd)))
        winners = [claimed for claimed in answers if claimed is not None]
        assert [claimed.execution_id for claimed in winners] == [target]
        assert await crowd[0].read_total_attempt_count(target) == 1
        await crowd[0].complete(winners[0].handle)


@pytest.mark.parametrize("limit", [1, 7])
async def test_every_execution_of_every_partition_is_claimed_once(crowd: list[ff.Engine], limit: int) -> None:
    everywhere = [id_in(partition) for partition in range(256)]
    await crowd[0].create_many([NewExecution(execution_kind="test", execution_id=each) for each in everywhere])

    async def work(number: int, engine: ff.Engine) -> list[Claimed]:
        taken: list[Claimed] = []
        while found := await engine.claim_many(**worker(number), limit=limit):
            taken += found
        return taken

    taken = list(chain(*await asyncio.gather(*(work(n, engine) for n, engine in enumerate(crowd)))))
    assert sorted(claimed.execution_id for claimed in taken) == sorted(everywhere)
    assert {claimed.handle.lease_epoch for claimed in taken} == {1}


async def test_no_epoch_is_given_out_twice_while_leases_come_and_go(crowd: list[ff.Engine], clock: Clock) -> None:
    """Workers that complete, fail, give back or forget; duties beside them; in the end everything has completed."""
    retries = ff.RetryPolicy(max_retries=1000, backoff=ff.Fixed(timedelta(milliseconds=0)))
    policy = ExecutionPolicy(retry_policy=retries, max_reclaim_count=1000)
    count = 120
    await crowd[0].create_many([NewExecution(execution_kind="test", policy=policy) for _ in range(count)])
    leases: list[tuple[ff.ExecutionId, int]] = []
    completed: list[ff.ExecutionId] = []

    async def work(number: int, engine: ff.Engine) -> None:
        chance = random.Random(number)
        while len(completed) < count:
            claimed = await engine.claim(**worker(number), lease_ttl=MINUTE)
            if claimed is None:
                await asyncio.sleep(0.001)
                continue
            leases.append((claimed.execution_id, claimed.handle.lease_epoch))
            match chance.randrange(6):
                case 0:
                    await engine.fail(claimed.handle, "boom")
                case 1:
                    await engine.release(claimed.handle)
                case 2:
                    await engine.delay(claimed.handle, timedelta(milliseconds=0))
                case 3:
                    await engine.revoke_lease(claimed.execution_id)
                case _:
                    await engine.complete(claimed.handle)
                    completed.append(claimed.execution_id)

    async def promote(engine: ff.Engine) -> None:
        while len(completed) < count:
            await engine.run_timers("delay", limit=10)
            await engine.run_timers("lease", limit=10)

    *workers, first, second = crowd
    await asyncio.gather(
        *(work(n, engine) for n, engine in enumerate(workers)),
        promote(first),
        promote(second),
    )
    assert max(Counter(leases).values()) == 1
    assert len(completed) == len(set(completed)) == count
    by_execution: dict[ff.ExecutionId, list[int]] = {}
    for execution_id, epoch in leases:
        by_execution.setdefault(execution_id, []).append(epoch)
    for epochs in by_execution.values():
        assert sorted(epochs) == list(range(1, len(epochs) + 1))


async def test_sequential_claims_follow_priority_across_partitions_and_routes(plain_engine: ff.Engine) -> None:
    chance = random.Random(7)
    needs = [
        None,
        ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=["gpu"])),
        ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=["gpu", "eu"])),
    ]
    made: list[tuple[int, int]] = []  # how urgent, which came first
    numbers: dict[ff.ExecutionId, int] = {}
    for number in range(60):
        priority = chance.choice([0, 1, 5, 9000])
        target = await submit(
            plain_engine,
            execution_id=id_in(chance.randrange(256)),
            execution_kind=chance.choice(["mail", "report"]),
            policy=chance.choice(needs),
            priority=priority,
        )
        numbers[target] = number
        made.append((-priority, number))

    expected = [number for _, number in sorted(made)]
    claimed = [await claim_one(plain_engine, capabilities=["gpu", "eu"]) for _ in range(20)]
    assert [numbers[each.execution_id] for each in claimed] == expected[:20]
    batch = await plain_engine.claim_many(**WORKER, capabilities=["gpu", "eu"], limit=25)
    assert [numbers[each.execution_id] for each in batch] == expected[20:45]


async def test_executions_no_worker_can_run_do_not_block_the_rest(plain_engine: ff.Engine) -> None:
    gpu = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=["gpu"]))
    hard = [await submit(plain_engine, policy=gpu, priority=100) for _ in range(30)]
    easy = [await submit(plain_engine) for _ in range(5)]

    assert [(await claim_one(plain_engine)).execution_id for _ in easy] == easy
    assert await plain_engine.claim(**WORKER) is None
    assert (await claim_one(plain_engine, capabilities=["gpu"])).execution_id == hard[0]


async def test_locked_executions_do_not_block_the_rest(plain_engine: ff.Engine, party: Party) -> None:
    first, second = await submit(plain_engine), await submit(plain_engine)
    await party.begin()
    await party.connection.execute("select from flowfabric.execution where id = $1 for update", first)
    assert (await claim_one(plain_engine)).execution_id == second
    assert await plain_engine.claim(**WORKER) is None
    await party.rollback()
    assert (await claim_one(plain_engine)).execution_id == first


async def test_a_claim_is_not_dated_before_what_it_takes(
    plain_engine: ff.Engine, party: Party, sql: asyncpg.Connection[Any], clock: Clock, database: str
) -> None:
    """The claim has read its clock, then is held up; what it finds afterwards was given back meanwhile."""
    await submit(plain_engine)
    held = await claim_one(plain_engine)
    claimer = await Party.join(database)
    await party.begin()
    await party.connection.execute("lock table flowfabric.lane in access exclusive mode")
    task = await waiting(sql, claimer, claimer.claim(**OTHER), behind=party)
    await clock.advance(seconds=1)
    await plain_engine.release(held.handle)
    given_back = await clock.now()
    await party.commit()
    claimed = await task
    assert claimed.execution_id == held.execution_id
    events = (await plain_engine.read_events(family="lease")).items
    assert [event.lease_type for event in events] == ["acquired", "revoked", "acquired"]
    assert events[1].occurred_at <= given_back <= events[2].occurred_at
    claimer.connection.terminate()


# Creation


async def test_of_many_creators_with_one_key_one_creates(crowd: list[ff.Engine]) -> None:
    for number in range(20):
        answers = await asyncio.gather(
            *(engine.create_execution(execution_kind="test", idempotency_key=f"k{number}") for engine in crowd)
        )
        assert Counter(type(answer) for answer in answers) == {Created: 1, Duplicate: CALLERS - 1}
        assert len({answer.execution_id for answer in answers}) == 1
    assert len(await _all_ids(crowd[0])) == 20


async def test_of_many_creators_with_one_id_one_creates(crowd: list[ff.Engine]) -> None:
    for number in range(20):
        target = id_in(number)
        answers = await asyncio.gather(
            *(engine.create_execution(execution_kind="test", execution_id=target) for engine in crowd)
        )
        assert Counter(type(answer) for answer in answers) == {Created: 1, Duplicate: CALLERS - 1}
        assert {answer.execution_id for answer in answers} == {target}


async def test_batches_that_share_keys_and_ids_create_each_once(crowd: list[ff.Engine]) -> None:
    ids = [id_in(number) for number in range(40)]
    names = [*(f"key-{number}" for number in range(40)), *ids]

    def item(name: str | ff.ExecutionId) -> NewExecution:
        if isinstance(name, UUID):
            return NewExecution(execution_kind="test", execution_id=name)
        return NewExecution(execution_kind="test", idempotency_key=name)

    async def create(number: int, engine: ff.Engine) -> list[tuple[Any, Any]]:
        mine = random.Random(number).sample(names, 60)
        return list(zip(mine, await engine.create_many([item(name) for name in mine]), strict=True))

    answers = list(chain(*await asyncio.gather(*(create(n, engine) for n, engine in enumerate(crowd)))))
    assert {type(answer) for _, answer in answers} <= {Created, Duplicate}
    asked = {name for name, _ in answers}
    created = Counter(name for name, answer in answers if isinstance(answer, Created))
    assert created == dict.fromkeys(asked, 1)
    for name in asked:
        assert len({answer.execution_id for each, answer in answers if each == name}) == 1
    assert len(await _all_ids(crowd[0])) == len(asked)


async def test_a_creator_that_gives_up_leaves_the_key_to_the_next(
    plain_engine: ff.Engine, party: Party, sql: asyncpg.Connection[Any], database: str
) -> None:
    other = await Party.join(database)
    await party.begin()
    lost = await submit(party, idempotency_key="once")
    task = await waiting(sql, other, submit(other, idempotency_key="once"), behind=party)
    await party.rollback()
    made = await task
    assert made != lost
    assert await _all_ids(plain_engine) == {made}
    other.connection.terminate()


async def test_a_key_without_window_never_matches_however_long_the_call_waited(
    plain_engine: ff.Engine, party: Party, sql: asyncpg.Connection[Any], database: str
) -> None:
    other = await Party.join(database)
    never = ExecutionPolicy(dedup_window=timedelta(0))
    # Keys are taken in their order: the one that is held comes before the one that is contested.
    items = [NewExecution(execution_kind="test", idempotency_key=key, policy=never) for key in ("a", "b")]
    await submit(plain_engine)
    await party.begin()
    await party.create_many(items[:1])
    task = await waiting(sql, other, other.create_many(items), behind=party)
    await plain_engine.create_many(items[1:])
    await party.rollback()
    assert [type(answer) for answer in await task] == [Created, Created]
    other.connection.terminate()


async def _all_ids(engine: ff.Engine) -> set[ff.ExecutionId]:
    page = await engine.find_executions(limit=1000)
    return {info.execution_id for info in page.items}


# Duties


async def _due_work(engine: ff.Engine, clock: Clock, count: int) -> None:
    """Executions of which each has exactly one thing due, so that what happens does not depend on the order."""
    timeout = TimeoutPolicy(attempt_timeout=timedelta(seconds=10))
    retry = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(hours=1)))
    soon = StreamPolicy(retention_ttl=timedelta(seconds=10))
    many = range(count)

    async def active(kind: str, lease_ttl: timedelta, **fields: Any) -> list[Claimed]:
        await engine.create_many([NewExecution(execution_kind=kind, **fields) for _ in many])
        return await engine.claim_many(**WORKER, kinds=[kind], limit=count, lease_ttl=lease_ttl)

    lapsing = await active("lapses", timedelta(seconds=10))
    # Cut shorter, each lease is watched by two timers, which two runners may take at the same time.
    await engine.renew_many([claimed.handle for claimed in lapsing], lease_ttl=timedelta(seconds=5))
    await active("times out", timedelta(hours=1), policy=ExecutionPolicy(timeout_policy=timeout))
    await active("is retried", timedelta(hours=1), policy=ExecutionPolicy(timeout_policy=timeout, retry_policy=retry))
    ended = await active("is forgotten", timedelta(hours=1), policy=ExecutionPolicy(stream_policy=soon))
    await engine.complete_many([claimed.handle for claimed in ended])
    in_time = timedelta(seconds=10)
    await engine.create_many(
        [NewExecution(execution_kind="is late", execution_deadline_at=in_time) for _ in many]
        + [NewExecution(execution_kind="is promoted", delay_until=in_time) for _ in many]
    )
    await clock.advance(seconds=11)


async def _run_duties(engine: ff.Engine, seed: int, limit: int) -> None:
    """All duties in some order, again and again, until a whole turn finds nothing to do."""
    kinds = ["lease", "attempt", "deadline", "delay", "retention"]
    random.Random(seed).shuffle(kinds)
    idle = 0
    while idle < 3:
        rounds = [await engine.run_timers(kind, limit=limit) for kind in kinds]
        assert not any(each.failed for each in rounds), rounds
        idle = 0 if any(each.handled or each.more for each in rounds) else idle + 1


async def _outcome(connection: asyncpg.Connection[Any]) -> tuple[dict[Any, int], dict[Any, int]]:
    """How many executions ended up how, and how many events of each sort were written."""
    states = await connection.fetch(
        "select r.kind, e.state, e.lease_lost, e.failure_reason, e.attempts, e.retries, count(*) as n"
        " from flowfabric.execution e join flowfabric.route r on r.id = e.route group by 1, 2, 3, 4, 5, 6"
    )
    events = await connection.fetch(
        "select lease_type, outcome, operator_type, reason, revoked_by, count(*) as n from flowfabric.event"
        " group by 1, 2, 3, 4, 5"
    )
    return {tuple(row)[:-1]: row["n"] for row in states}, {tuple(row)[:-1]: row["n"] for row in events}


async def test_many_duty_runners_have_the_same_result_as_one(server: str) -> None:
    outcomes = []
    for runners in (1, 4):
        async with fresh_database(server) as dsn, _engines(dsn, runners) as engines:
            connection = await asyncpg.connect(dsn)
            await _due_work(engines[0], Clock(connection), 30)
            # Timers of many executions each: a small limit makes the runners meet at the same ones.
            await asyncio.gather(*(_run_duties(engine, seed, limit=2) for seed, engine in enumerate(engines)))
            outcomes.append(await _outcome(connection))
            assert await engines[0].audit() == []
            await connection.close()
    assert outcomes[0] == outcomes[1]
    states, _ = outcomes[0]
    assert sum(states.values()) == 5 * 30, "every group but the forgotten one is still there"


# The event log


async def _drain(engine: ff.Engine, seen: list[Event], family: str | None = None) -> None:
    """Follow the log from where `seen` ends to where it ends now, a few events at a time."""
    cursor = seen[-1].cursor if seen else EventCursor()
    while True:
        page = await engine.read_events(after=cursor, limit=3, family=family)
        if not page.items:
            return
        seen += page.items
        assert page.next_cursor is not None
        assert page.next_cursor.position >= page.items[-1].cursor.position
        cursor = page.next_cursor


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_an_event_that_commits_late_is_not_missed(plain_engine: ff.Engine, party: Party, ending: str) -> None:
    early, late = await submit(plain_engine), await submit(plain_engine)
    seen: list[Event] = []
    await party.begin()
    assert (await claim_one(party)).execution_id == early
    assert (await claim_one(plain_engine)).execution_id == late
    await _drain(plain_engine, seen)
    assert seen == [], "what is older may still come"
    await party.end(ending)
    await _drain(plain_engine, seen)
    assert [event.execution_id for event in seen] == ([early, late] if ending == "commit" else [late])


async def test_a_reader_sees_every_event_once_in_one_order_while_writers_commit_late(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    writers = [await Party.join(database) for _ in range(4)]
    await plain_engine.create_many([NewExecution(execution_kind="test") for _ in range(120)])
    done = 0

    async def write(number: int, party: Party) -> None:
        nonlocal done
        chance = random.Random(number)
        try:
            for _ in range(15):
                await party.begin()
                for _ in range(chance.randrange(1, 4)):
                    claimed = await party.claim(**worker(number))
                    if claimed is None:
                        continue
                    await party.connection.execute("savepoint before")
                    await party.renew(claimed.handle)
                    if chance.random() < 0.3:
                        await party.connection.execute("rollback to savepoint before")
                    if chance.random() < 0.5:
                        await party.complete(claimed.handle)
                    await asyncio.sleep(0)
                await party.end("rollback" if chance.random() < 0.3 else "commit")
        finally:
            done += 1

    async def read(family: str | None) -> list[Event]:
        seen: list[Event] = []
        while done < len(writers):
            await _drain(plain_engine, seen, family)
        await _drain(plain_engine, seen, family)
        return seen

    everything, completions, *_ = await asyncio.gather(
        read(None), read("completion"), *(write(n, party) for n, party in enumerate(writers))
    )
    stored = await sql.fetch("select seq, outcome from flowfabric.event order by seq")
    assert [e.cursor.position for e in everything] == [row["seq"] for row in stored]
    assert [e.cursor.position for e in completions] == [row["seq"] for row in stored if row["outcome"] is not None]
    assert len(completions) > 10
    for party in writers:
        party.connection.terminate()


# Serialization failures


class Counting:
    """A pool that counts how often the database refused to serialize; one that `refuses` does so itself."""

    def __init__(self, engine: ff.Engine, *, refuses: bool = False) -> None:
        self._pool = engine._database._pool
        self._refuses = refuses
        self.refusals = 0
        engine._database._pool = self  # type: ignore[assignment]

    async def fetch(self, statement: str, args: Any) -> Any:
        try:
            if self._refuses:
                raise asyncpg.SerializationError("could not serialize access due to concurrent update")
            return await self._pool.fetch(statement, args)
        except asyncpg.SerializationError:
            self.refusals += 1
            raise

    def give_back(self, engine: ff.Engine) -> None:
        engine._database._pool = self._pool

    async def close(self) -> None:
        await self._pool.close()


isolations = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])


@asynccontextmanager
async def _isolated(sql: asyncpg.Connection[Any], dsn: str, isolation: str, count: int) -> AsyncIterator[Any]:
    """Engines as behind a proxy, where a session keeps no setting, in a database whose default is stricter."""
    name = await sql.fetchval("select current_database()")
    await sql.execute(f"alter database {name} set default_transaction_isolation = '{isolation}'")
    async with _engines(dsn, count, prepared_statements=False) as engines:
        yield engines


@isolations
async def test_a_stricter_default_of_the_database_refuses_no_call_behind_a_pooler(
    sql: asyncpg.Connection[Any], database: str, party: Party, isolation: str
) -> None:
    """The call waits for a writer and sees what that one committed: each call asks for READ COMMITTED."""
    async with _isolated(sql, database, isolation, 1) as (engine,):
        counting = Counting(engine)
        await submit(engine)
        claimed = await claim_one(engine)
        await party.begin()
        await party.renew(claimed.handle)
        task = asyncio.ensure_future(engine.complete(claimed.handle, b"done"))
        async with asyncio.timeout(60):
            while not await sql.fetchval(
                "select exists (select from pg_stat_activity where $1 = any (pg_blocking_pids(pid)))", party.pid
            ):
                await asyncio.sleep(0.001)
        await party.commit()
        await task
        assert counting.refusals == 0
        assert await engine.get_execution_result(claimed.execution_id) == b"done"
        outcomes = await sql.fetch("select outcome from flowfabric.event where outcome is not null")
        assert [row["outcome"] for row in outcomes] == ["success"]
        assert await engine.audit(events=True) == []
        assert len((await engine.read_events()).items) == 3


@isolations
async def test_many_calls_at_once_are_never_reported_as_a_lost_lease_whatever_the_default_isolation(
    sql: asyncpg.Connection[Any], database: str, isolation: str
) -> None:
    count = 40
    async with _isolated(sql, database, isolation, 6) as engines:
        counters = [Counting(engine) for engine in engines]
        for _ in range(count):
            await submit(engines[0])
        left = count
        refused: list[FlowFabricError] = []

        async def insist(call: Any) -> Any:
            """Repeat what was given up after three refusals, as the error says one may."""
            while True:
                try:
                    return await call()
                except RetriesExhausted:
                    await asyncio.sleep(0.001)

        async def work(number: int, engine: ff.Engine) -> None:
            nonlocal left
            while left:
                claimed = await insist(partial(engine.claim, **worker(number)))
                if claimed is None:
                    await asyncio.sleep(0.001)
                    continue
                other = engines[(number + 1) % len(engines)]
                answers = await asyncio.gather(
                    insist(partial(engine.renew, claimed.handle)),
                    insist(partial(other.complete, claimed.handle, b"done")),
                    return_exceptions=True,
                )
                for answer in answers:
                    if isinstance(answer, FlowFabricError):
                        refused.append(answer)
                    else:
                        assert not isinstance(answer, BaseException), answer
                assert not isinstance(answers[1], BaseException)
                left -= 1

        await asyncio.gather(*(work(n, engine) for n, engine in enumerate(engines)))
        assert {error.kind for error in refused} <= {"execution_not_active"}, "a renewal may come too late"
        assert sum(counter.refusals for counter in counters) == 0
        assert await sql.fetchval("select count(*) from flowfabric.event where outcome = 'success'") == count
        assert await engines[0].audit(events=True) == []


async def test_three_refusals_in_a_row_are_said_to_be_that(plain_engine: ff.Engine) -> None:
    await submit(plain_engine)
    claimed = await claim_one(plain_engine)
    pool = Counting(plain_engine, refuses=True)
    try:
        with pytest.raises(Contention) as refusal:
            await plain_engine.complete(claimed.handle)
    finally:
        pool.give_back(plain_engine)
    assert (refusal.value.kind, pool.refusals) == ("retry_exhausted", 3)
    await plain_engine.complete(claimed.handle)


# Clocks


@pytest.mark.parametrize("shift", [-86_400.0, 86_400.0])
async def test_the_clock_of_a_worker_decides_nothing(
    plain_engine: ff.Engine, clock: Clock, monkeypatch: Any, shift: float
) -> None:
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(shift * 1e9))
    hour = timedelta(hours=1)
    begun = await clock.now()
    for name in ("a", "b"):
        await plain_engine.register_worker(name, name, lanes=["default"], liveness_ttl=hour)
    assert [one.worker_instance_id for one in (await plain_engine.list_workers("")).items] == ["a", "b"]
    first = await submit(plain_engine, execution_deadline_at=2 * hour)
    delayed = await submit(plain_engine, delay_until=hour)
    held = await claim_one(plain_engine, lease_ttl=hour)
    renewed = await plain_engine.renew(held.handle)
    granted = await submit(plain_engine)
    grant = await plain_engine.issue_claim_grant(granted, **OTHER, grant_ttl=MINUTE)
    ended = await clock.now()
    stored = await plain_engine.describe_execution(delayed)

    assert held.execution_id == first
    assert begun + 2 * hour <= held.deadline_at <= ended + 2 * hour
    assert begun + hour <= held.lease_expires_at <= renewed.expires_at <= ended + hour
    assert begun + MINUTE - timedelta(milliseconds=1) <= grant.expires_at <= ended + MINUTE
    assert stored is not None
    assert begun <= stored.created_at <= ended

    assert await plain_engine.claim(**WORKER) is None, "delayed and granted"
    assert (await plain_engine.run_timers("delay")).handled == 0
    await clock.advance(seconds=3000)
    await plain_engine.heartbeat_worker("a")
    await clock.advance(seconds=601)
    assert [one.worker_instance_id for one in (await plain_engine.list_workers("")).items] == ["a"]
    assert (await plain_engine.run_timers("delay")).handled == 1
    assert (await plain_engine.run_timers("lease")).handled == 1
    assert {(await claim_one(plain_engine)).execution_id for _ in range(3)} == {first, delayed, granted}
