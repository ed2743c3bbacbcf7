"""What must not grow: routes without work, floors, workers, reads of the log, samples of the audit, wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from itertools import pairwise, permutations
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import BudgetReconciler, Duties, EdgeRepair, QuotaReconciler, Unblock
from flowfabric._duties.audit import Audit
from flowfabric._duties.lead import CASCADES, DUTIES, Leadership
from flowfabric._duties.paged import PagedDuty
from flowfabric.engine.service import migrate_database
from flowfabric.errors import CursorRefused, TransportError
from flowfabric.values.event import EventCursor
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.policies import ExecutionPolicy
from tests.databases import fresh_database
from tests.integration.test_connection import a_role, as_user
from tests.sql.plans import CountingEngine
from tests.support import OTHER, WORKER, Clock, claim_one, started, submit

# Floors


async def test_a_route_without_work_is_forgotten_and_found_again(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    kinds = [f"kind-{n}" for n in range(30)]
    await plain_engine.create_many([NewExecution(execution_kind=kind) for kind in kinds])
    assert await sql.fetchval("select count(*) from flowfabric.ready_floor") == 30
    await plain_engine.complete_many([one.handle for one in await plain_engine.claim_many(**WORKER, limit=30)])
    await clock.advance(seconds=10)
    async with asyncio.timeout(30):
        while await sql.fetchval("select count(*) from flowfabric.ready_floor"):
            assert await plain_engine.claim_many(**WORKER, limit=30) == []
    await submit(plain_engine, execution_kind="kind-7")
    assert (await claim_one(plain_engine)).execution_kind == "kind-7"


async def test_the_best_of_many_kinds_come_first(plain_engine: ff.Engine) -> None:
    items = [NewExecution(execution_kind=f"kind-{n % 20}", priority=n % 7) for n in range(100)]
    await plain_engine.create_many(items)
    found = [one.priority for _ in range(5) for one in await plain_engine.claim_many(**WORKER, limit=20)]
    assert found == sorted((n % 7 for n in range(100)), reverse=True)


async def test_a_place_of_31_bits_is_never_above_its_position(sql: asyncpg.Connection[Any]) -> None:
    wrong = await sql.fetch(
        "select r.rank, c.at from generate_series(0, 9000, 300) as r (rank),"
        " unnest(array[now(), now() - interval '0.05 s', now() - interval '99 days', now() - interval '200 days'])"
        "     as c (at),"
        " lateral (select flowfabric.ready_place(r.rank, c.at, now())::bigint as place) p"
        " where p.place not between 0 and 2147483647 or flowfabric.place_rank(p.place) > r.rank"
        "    or flowfabric.place_time(p.place, now()) > c.at"
        "    or (c.at > now() - interval '100 days'"
        "        and flowfabric.place_time(p.place, now()) < c.at - interval '0.2 s')"
    )
    assert wrong == []


async def test_locks_of_a_role_that_may_only_connect_block_no_call(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    await submit(plain_engine)
    route = await sql.fetchval("select id from flowfabric.route")
    role = f"stranger_{database.rsplit('/', 1)[-1].split('?')[0]}"
    await sql.execute(f'create role "{role}" login')
    stranger = await asyncpg.connect(as_user(database, role))
    try:
        for key in (-1, 0):
            await stranger.execute(
                "select pg_advisory_lock(flowfabric_lock, $1) from (select 1174405120 + $2::int as flowfabric_lock) x",
                key,
                route,
            )
        # As writers of the log do, with every number of the near past and future.
        await stranger.execute("select pg_advisory_lock((7083::bigint << 48) | n) from generate_series(0, 400) n")
        for _ in range(3):
            await submit(plain_engine)
        assert await plain_engine.audit() == []
        async with sql.transaction():
            await sql.fetch(
                "select id from flowfabric.claim('default', null, '{}', 'w', 'w-1', 30000, 1,"
                " null, null, null, false, null, false)"
            )
            assert (await plain_engine.read_events()).items == [], "a writer without a number of its own is waited for"
        assert len(await plain_engine.claim_many(**WORKER, limit=10)) == 3
        assert len((await plain_engine.read_events()).items) == 4, "strangers are not waited for"
    finally:
        await stranger.close()
        await sql.execute(f'drop role "{role}"')


@pytest.mark.parametrize("way", ["takes a role", "is dropped"])
async def test_a_session_that_reached_the_schema_by_a_role_is_waited_for(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock, way: str
) -> None:
    await submit(plain_engine)
    await submit(plain_engine, lane_id="early")
    async with a_role(sql, "nologin") as group, a_role(sql, "login noinherit") as login:
        await migrate_database(database, worker_roles=(group,))
        await sql.execute(f"grant {group} to {login}")
        submitter = await asyncpg.connect(as_user(database, login))
        try:
            await submitter.execute(f"set role {group}")
            transaction = submitter.transaction()
            await transaction.start()
            await plain_engine.create_execution(execution_kind="test", connection=submitter)
            [taken] = await plain_engine.claim_many(**WORKER, limit=10)
            await plain_engine.complete(taken.handle)
            seen = (await plain_engine.count_events()).cursor
            await submitter.fetch(
                "select id from flowfabric.claim('early', null, '{}', 'w', 'w-1', 30000, 1,"
                " null, null, null, false, null, false)"
            )
            await submit(plain_engine, lane_id="late")
            assert await plain_engine.claim("late", **WORKER)
            if way == "is dropped":
                await sql.execute(f"drop role {login}")
            await clock.advance(seconds=10)
            await sql.execute("select flowfabric.raise_floors(r.lane, array[r.id]) from flowfabric.route r")
            assert (await plain_engine.read_events(after=seen)).items == [], "it may still write an earlier one"
            await transaction.commit()
            assert await plain_engine.audit() == []
            assert len(await plain_engine.claim_many(**WORKER, limit=10)) == 1
            assert len((await plain_engine.read_events(after=seen)).items) == 3
        finally:
            await submitter.close()
            await sql.execute("delete from flowfabric.granted_role")
            with contextlib.suppress(asyncpg.DuplicateObjectError):
                await sql.execute(f"create role {login}")  # for the end of the block


async def test_executions_that_no_claim_finds_are_found_again(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [f"kind-{n}" for n in range(5)]
    await plain_engine.create_many([NewExecution(execution_kind=kind) for kind in kinds for _ in range(2)])
    assert await plain_engine.repair_floors() == []
    await sql.execute("delete from flowfabric.ready_floor where route in (select min(id) from flowfabric.route)")
    await sql.execute(
        "update flowfabric.ready_floor set created_at = created_at + interval '1 day'"
        " where route in (select max(id) from flowfabric.route)"
    )
    assert {violation.rule for violation in await plain_engine.audit()} == {"ready_below_floor"}
    assert len(await plain_engine.claim_many(**WORKER, limit=100)) == 6
    assert await Audit(plain_engine).run_once() == 2
    assert caplog.text.count("repaired") == 2
    assert await plain_engine.audit() == []
    assert len(await plain_engine.claim_many(**WORKER, limit=100)) == 4
    assert await plain_engine.repair_floors() == []


# Workers


async def test_a_worker_keeps_its_number_for_a_day(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    for hours, numbers in ((0, 1), (23, 1), (2, 2)):
        await clock.advance(hours=hours)
        await started(plain_engine)
        assert await sql.fetchval("select count(*) from flowfabric.worker") == numbers
    await submit(plain_engine)
    await claim_one(plain_engine, **OTHER)
    assert await sql.fetchval("select count(*) from flowfabric.worker") == 3


async def test_a_number_is_forgotten_when_no_execution_and_no_event_has_it(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    async def workers() -> int:
        await plain_engine.sweep()
        return int(await sql.fetchval("select count(*) from flowfabric.worker"))

    await sql.execute("update flowfabric.deployment set retention = '24 hours'")
    claimed = await started(plain_engine, lease_ttl=timedelta(days=30))
    await clock.advance(days=5)
    assert await workers() == 1, "an execution has it"
    await plain_engine.complete(claimed.handle)
    await clock.advance(hours=30)
    await plain_engine.run_timers("retention")
    assert await plain_engine.read_execution(claimed.execution_id) is None
    assert await workers() == 1, "the event of its end has it"
    found = [event.worker_id for event in (await plain_engine.read_events(after=EventCursor())).items]
    assert found == [WORKER["worker_id"]]
    await clock.advance(days=3)
    await workers()  # empties the log
    await clock.advance(days=2)
    assert await workers() == 0


# Events


async def test_renewals_are_events_only_if_the_deployment_asks(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    for asked in (False, True):
        await sql.execute("update flowfabric.deployment set event_heartbeats = $1", asked)
        claimed = await started(plain_engine)
        await plain_engine.renew(claimed.handle)
        events = (await plain_engine.list_events(claimed.execution_id)).items
        assert [event.lease_type for event in events] == (["acquired", "renewed"] if asked else ["acquired"])


async def test_one_read_looks_at_a_bounded_part_of_the_log(
    plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.events.MOST_LOOKED_AT", 10)
    ids = [(await started(plain_engine)).execution_id for _ in range(35)]
    pages, cursor, seen = 0, EventCursor(), 0
    while seen < 35:
        page = await plain_engine.read_events(after=cursor, limit=100)
        assert len(page.items) <= 10
        seen += len(page.items)
        pages += 1
        assert page.next_cursor is not None
        cursor = page.next_cursor
    assert pages == 4
    empty = await plain_engine.read_events(family="completion", after=EventCursor(), limit=100)
    assert (empty.items, empty.next_cursor.position > 0) == ([], True)  # type: ignore[union-attr]
    found, after, places = [], None, [0]
    while True:
        part = await plain_engine.list_events(ids[-1], after=after)
        found += part.items
        after = part.next_cursor
        if after is None:
            break
        places.append(after.position)
    assert [event.execution_id for event in found] == [ids[-1]]
    assert len(places) >= 4
    assert all(upto - past <= 10 for past, upto in pairwise(places)), places


async def test_a_cursor_after_which_events_are_missing_is_refused(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    for _ in range(5):
        await plain_engine.complete((await started(plain_engine)).handle)
    last = (await plain_engine.read_events()).next_cursor
    assert last is not None
    with pytest.raises(CursorRefused) as ahead:
        await plain_engine.read_events(after=EventCursor(last.position + 1000))
    assert (ahead.value.kind, ahead.value.position) == ("cursor_ahead", last.position)

    await clock.advance(hours=75)
    await plain_engine.sweep()
    floor = await sql.fetchval("select event_floor from flowfabric.deployment")
    assert floor == last.position
    with pytest.raises(CursorRefused) as expired:
        await plain_engine.read_events(after=EventCursor(1))
    assert (expired.value.kind, expired.value.position) == ("cursor_expired", floor)
    assert (await plain_engine.read_events(after=EventCursor())).items == [], "the beginning is always allowed"
    assert (await plain_engine.read_events(after=EventCursor(floor))).items == []
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_the_log_cannot_be_read_on_a_standby(database: str, sql: asyncpg.Connection[Any]) -> None:
    # A function of the same name in front of the server's, as a standby would answer.
    await sql.execute("create function flowfabric.pg_is_in_recovery() returns boolean language sql as 'select true'")
    source = await sql.fetchval("select pg_get_functiondef('flowfabric.log_state'::regproc)")
    try:
        await sql.execute(source.replace("pg_is_in_recovery()", "flowfabric.pg_is_in_recovery()"))
        async with await ff.Engine.connect(database, reconnect_for=timedelta(milliseconds=1)) as engine:
            with pytest.raises(TransportError, match="standby"):
                await engine.read_events()
    finally:
        await sql.execute(source)
        await sql.execute("drop function flowfabric.pg_is_in_recovery()")


# The audit


async def test_the_audit_of_the_log_grows_with_what_is_stored_and_not_with_its_square(server: str) -> None:
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine:
        handled = []
        for n in (100, 300):
            await engine.create_many([NewExecution(execution_kind="k")] * n)
            for one in await engine.claim_many(limit=n, **WORKER):
                await engine.complete(one.handle)
            async with engine.undone():
                await engine.count()
                assert await engine.audit(events=True) == []
            handled.append(engine.handled)
        assert handled[1] < 5 * handled[0], handled  # four times as many are stored


async def test_a_sample_of_the_audit_finds_a_damage(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await plain_engine.create_many([NewExecution(execution_kind="test")] * 50)
    partition = await sql.fetchval("select partition from flowfabric.execution limit 1")
    assert await plain_engine.audit_sample(partition, limit=100) == []
    await sql.execute("update flowfabric.execution set completed_at = created_at")
    found = {violation.rule for _ in range(20) for violation in await plain_engine.audit_sample(partition, limit=100)}
    assert "completed_at" in found
    await sql.execute("update flowfabric.execution set completed_at = null")


async def test_the_rules_that_both_audits_share_are_planned_by_the_caller(sql: asyncpg.Connection[Any]) -> None:
    anywhere = "0, 1, flowfabric.zero_uuid(), flowfabric.zero_uuid(), now()"
    plan = await sql.fetch(f"explain (costs off) select * from flowfabric.audit_by_key({anywhere})")
    lines = [str(row[0]) for row in plan]
    assert any("execution_pkey" in line for line in lines)
    assert not any("Function Scan on audit_by_key" in line for line in lines)


async def test_a_sample_of_the_audit_reads_as_much_however_much_is_stored(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    reads: list[int] = []
    item = NewExecution(execution_kind="test")
    for size in (5, 20):
        for _ in range(size):
            await plain_engine.create_many([item] * 500)
        await sql.execute("analyze")
        partition = await sql.fetchval(
            "select partition from flowfabric.execution group by 1 order by count(*) desc, 1 limit 1"
        )
        await sql.execute("select pg_stat_force_next_flush()")
        await sql.execute("select * from flowfabric.audit_sample($1, 20)", partition)
        async with sql.transaction():
            before = await sql.fetchval(_READ)
            await sql.fetch("select * from flowfabric.audit_sample($1, 20)", partition)
            await sql.execute("select pg_stat_clear_snapshot()")
            reads.append(await sql.fetchval(_READ) - before)
    assert reads[1] <= reads[0] * 3 + 200, reads


async def _store_more(engine: CountingEngine, first: int, count: int) -> None:
    """Budgets and a ledger, keys of a quota with a slot and an execution that waits for it, members of a flow."""
    policy = (await engine.create_quota_policy(name=f"keyed {first}", key="t", max_concurrent=1)).quota_policy_id
    limited = ExecutionPolicy(quota_policy_id=policy)
    for _ in range(2):
        await engine.create_many(
            [NewExecution(execution_kind="limited", policy=limited, tags={"t": str(n)}) for n in range(count)]
        )
    for _ in range(2):
        await engine.claim_many(limit=count, kinds=["limited"], lease_ttl=timedelta(days=1), **WORKER)
    for n in range(count):
        await engine.create_budget(name=f"budget {first + n}", dimensions=["t"], hard_limits=[10**9], soft_limits=[0])
    await engine.connection.execute(
        "insert into flowfabric.budget_spend select b.id, e.id, 0, 't', 1, flowfabric.now(), true"
        " from (select id from flowfabric.budget order by id limit 1) b, flowfabric.execution e on conflict do nothing"
    )
    new = NewExecution(execution_kind="member")
    after = [NewEdge(upstream="first")]
    members = [NewNode(name=f"n{n}", execution=new, after=after) for n in range(count)]
    await engine.submit_flow([NewNode(name="first", execution=new), *members])
    await engine.connection.execute("analyze")


@pytest.mark.parametrize("kind", [BudgetReconciler, EdgeRepair, QuotaReconciler, Unblock])
async def test_a_round_of_a_led_duty_reads_as_much_however_much_is_stored(
    server: str, kind: type[PagedDuty[Any]]
) -> None:
    handled: list[int] = []
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine:
        for first, count in ((0, 100), (100, 400)):
            await _store_more(engine, first, count)
            duty = kind(engine)
            duty.batch, duty.place = 50, None  # one page that finds nothing
            if kind is Unblock:
                duty.allowance = 0.0  # it has to be in time
            async with engine.undone():
                await duty.run_once()
                await engine.count()
                assert await duty.run_once() == 0
            handled.append(engine.handled)
    assert 50 < handled[1] < handled[0] * 1.2 + 100, handled


async def test_a_page_of_edge_groups_ends_early_when_they_have_many_edges(plain_engine: ff.Engine) -> None:
    new = NewExecution(execution_kind="k")
    ups = [f"u{n}" for n in range(15)]
    joins = [NewNode(name=f"j{n}", execution=new, after=[NewEdge(upstream=up) for up in ups]) for n in range(5)]
    await plain_engine.submit_flow([*(NewNode(name=up, execution=new) for up in ups), *joins])
    pages: dict[int, list[int]] = {2: [], 4: []}
    for limit, scanned in pages.items():
        done, after = await plain_engine.reconcile_edges(None, limit=limit)
        scanned.append(done.scanned)
        while after is not None:
            done, after = await plain_engine.reconcile_edges(after, limit=limit)
            scanned.append(done.scanned)
    assert pages == {2: [2, 2, 1], 4: [3, 2]}, "no group begins after 40 edges of a page of 4 groups"


_READ = (
    "select coalesce(sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid)), 0)::bigint"
    " from pg_class c where c.relnamespace = 'flowfabric'::regnamespace"
)


# Lanes


async def test_an_idle_claim_visits_no_lane_and_another_those_with_work(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    """A worker that serves a thousand lanes, all of which had work before."""
    lanes = [f"lane-{n}" for n in range(1000)]
    for at in range(0, 1000, 50):
        await plain_engine.create_many([NewExecution(execution_kind="k", lane_id=lane) for lane in lanes[at : at + 50]])
        claimed = await plain_engine.claim_lanes(dict.fromkeys(lanes, 0), limit=50, **WORKER)
        await plain_engine.complete_many([one.handle for one in claimed])
    await clock.advance(minutes=1)
    async with asyncio.timeout(60):
        while await sql.fetchval("select count(*) from flowfabric.ready_floor"):
            assert await plain_engine.claim_lanes(dict.fromkeys(lanes, 1), limit=50, **WORKER) == []
    await submit(plain_engine, lane_id="of another worker")
    assert await _visits(sql, lanes, 0) == ([], {})
    with_work = [lanes[n] for n in (700, 3, 999)]
    ids = {lane: await submit(plain_engine, lane_id=lane) for lane in with_work}
    found, calls = await _visits(sql, lanes, 1)
    assert found == [ids[lane] for lane in sorted(with_work, key=lanes.index)]
    assert calls == {"claim": 6}  # of each its share, and what is left


async def _visits(sql: asyncpg.Connection[Any], lanes: list[str], share: int) -> tuple[list[Any], dict[str, int]]:
    """Claim from these lanes; returns what was found, and how often the functions that ask one lane were called."""
    async with sql.transaction():
        await sql.execute("set local track_functions = 'all'")
        found = await sql.fetch(
            "select id from flowfabric.claim_lanes($1, $2, null, '{}', 'w', 'w-1', 30000, 10,"
            " null, null, null, false, null)",
            lanes,
            [share] * len(lanes),
        )
        calls = await sql.fetch(
            "select f.proname::text as name, pg_stat_get_xact_function_calls(f.oid) as n from pg_proc f"
            " where f.pronamespace = 'flowfabric'::regnamespace and f.proname in ('claim', 'judge_for_claim')"
        )
    return [row["id"] for row in found], {row["name"]: row["n"] for row in calls if row["n"]}


# Wake-ups


async def _asleep(sql: asyncpg.Connection[Any], count: int) -> None:
    async with asyncio.timeout(30):
        while (
            await sql.fetchval("select count(*) from flowfabric.sleeper where lane <> '' and until > clock_timestamp()")
            < count
        ):
            await asyncio.sleep(0.01)


async def test_a_submission_wakes_as_many_as_it_has_work_for_and_only_who_serves_it(
    database: str, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    heard: list[str] = []
    engines = [await ff.Engine.connect(database, max_size=1) for _ in range(6)]
    serves = ["a", "a", "a", "b", "b", "b"]
    try:
        for engine, kind in zip(engines, serves, strict=True):
            await sql.add_listener(f"flowfabric_{engine._instance}", lambda *args, kind=kind: heard.append(kind))
            await engine.sleep_for_work(["default"], timedelta(seconds=30), kinds=[kind], slots=5)
        await submit(plain_engine, execution_kind="b")
        await sql.execute("select 1")
        assert heard == ["b"]
        await plain_engine.create_many([NewExecution(execution_kind="a")] * 2)
        await sql.execute("select 1")
        assert sorted(heard) == ["a", "a", "b"]
        await submit(plain_engine, execution_kind="a", lane_id="elsewhere")
        await submit(plain_engine, execution_kind="c")
        await sql.execute("select 1")
        assert len(heard) == 3, "no worker serves these"
    finally:
        for engine in engines:
            await engine.close()


async def test_who_was_woken_and_leaves_work_behind_wakes_the_next(
    database: str, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as one, await ff.Engine.connect(database) as two:
        claims = [
            asyncio.ensure_future(engine.claim(**WORKER, max_wait=timedelta(seconds=20))) for engine in (one, two)
        ]
        await _asleep(sql, 2)
        begun = asyncio.get_running_loop().time()
        async with sql.transaction():  # both at once: each submission alone would choose
            await sql.execute("set local flowfabric.wake = off")
            for _ in range(2):
                await plain_engine.create_execution(execution_kind="test", connection=sql)
            await sql.execute("set local flowfabric.wake = on")
            await sql.execute("select flowfabric.wake_route(id, 1) from flowfabric.route")
        found = await asyncio.gather(*claims)
        assert all(found)
        assert asyncio.get_running_loop().time() - begun < 20
        assert await sql.fetchval("select count(*) from flowfabric.sleeper where until > clock_timestamp()") == 0


def _is_possible(order: tuple[str, ...]) -> bool:
    return order.index("submit") < order.index("commit") and order.index("announce") < order.index("look")


async def test_work_whose_chosen_worker_died_is_found_by_the_next_poll(
    database: str, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as dead:
        await dead.sleep_for_work(["default"], timedelta(seconds=60), slots=100)
    heard: list[str] = []
    async with await ff.Engine.connect(database) as alive:
        waiting = asyncio.ensure_future(alive.claim(**WORKER, max_wait=timedelta(seconds=40)))
        await _asleep(sql, 2)
        for engine, name in ((dead, "dead"), (alive, "alive")):
            await sql.add_listener(f"flowfabric_{engine._instance}", lambda *args, name=name: heard.append(name))
        begun = asyncio.get_running_loop().time()
        target = await submit(plain_engine)
        found = await waiting
        took = asyncio.get_running_loop().time() - begun
    assert found is not None
    assert (found.execution_id, set(heard)) == (target, {"dead"})
    assert took < 10, "the poll of each second found it, not the last look"


@pytest.mark.parametrize(
    "order", [one for one in permutations(["submit", "commit", "announce", "look"]) if _is_possible(one)], ids="-".join
)
async def test_a_submission_beside_a_worker_that_falls_asleep_is_found_or_wakes_it(
    database: str, sql: asyncpg.Connection[Any], order: tuple[str, ...]
) -> None:
    """Or the next poll finds it: the submission looked for workers before there was one, and was committed too late."""
    heard: list[str] = []
    submitter = await asyncpg.connect(database)
    async with await ff.Engine.connect(database) as worker:
        await sql.add_listener(f"flowfabric_{worker._instance}", lambda *args: heard.append(args[-1]))
        looked = None
        for step in order:
            if step == "submit":
                await submitter.execute("begin")
                target = await submit(worker, connection=submitter)
            elif step == "commit":
                await submitter.execute("commit")
            elif step == "announce":
                await worker.sleep_for_work(["default"], timedelta(seconds=60))
            else:
                looked = await worker.claim(**WORKER)
        await sql.execute("select 1")
        if order.index("commit") < order.index("look"):
            assert looked is not None
        else:
            assert looked is None
            assert heard == (["work"] if order.index("announce") < order.index("submit") else [])
            looked = await worker.claim(**WORKER)
        assert looked is not None
        assert looked.execution_id == target
    await submitter.close()


@pytest.mark.parametrize("lanes", [["a"], ["a", "b"]])
async def test_a_worker_that_leaves_work_behind_does_not_wake_itself(
    database: str, sql: asyncpg.Connection[Any], lanes: list[str]
) -> None:
    heard: list[str] = []
    async with await ff.Engine.connect(database) as one, await ff.Engine.connect(database) as two:
        for engine, name in ((one, "itself"), (two, "the next")):
            await sql.add_listener(f"flowfabric_{engine._instance}", lambda *args, name=name: heard.append(name))
        for _ in range(10):
            for _ in range(2):
                await submit(one, lane_id="a")
            until = {
                engine: await engine.sleep_for_work(lanes, timedelta(seconds=30), slots=1) for engine in (one, two)
            }
            if len(lanes) == 1:
                found = await one.claim_many("a", limit=1, asleep=until[one], **WORKER)
            else:
                found = await one.claim_lanes({"a": 1, "b": 0}, limit=1, asleep=until[one], **WORKER)
            assert len(found) == 1
            await two.claim_many("a", limit=1, asleep=until[two], **OTHER)
            await sql.execute("delete from flowfabric.sleeper")
    await sql.execute("select 1")
    assert heard == ["the next"] * 10


# The lead


async def test_one_process_leads_the_duties_and_another_takes_over(database: str) -> None:
    async with await ff.Engine.connect(database) as one, await ff.Engine.connect(database) as two:
        first, second = Duties(one), Duties(two)
        async with asyncio.timeout(30):
            await first.__aenter__()
            while not first.leads:
                await asyncio.sleep(0.01)
            async with second:
                await asyncio.sleep(0.3)
                assert (first.leads, second.leads) == (True, False)
                await first.stop()
                while not second.leads:
                    await asyncio.sleep(0.01)


async def test_a_process_that_takes_over_the_duties_leaves_the_cascades_to_another(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as helping, await ff.Engine.connect(database) as other:
        minute = timedelta(minutes=1)
        assert (await plain_engine.take_lead([DUTIES], minute))[DUTIES].is_ours
        helper, next_one = Leadership(helping), Leadership(other)
        await helper._look()
        assert _leads(helper) == {CASCADES}
        await sql.execute("update flowfabric.lead set until = clock_timestamp() where name = $1", DUTIES)  # it died
        await helper._look()
        assert _leads(helper) == {DUTIES}
        await asyncio.sleep(0.005)
        await next_one._look()
        assert _leads(next_one) == {CASCADES}
        await helper._look()
        assert _leads(helper) == {DUTIES}


def _leads(one: Leadership) -> set[str]:
    return {name for name, event in one.leads.items() if event.is_set()}


async def test_a_leader_that_dies_is_replaced_when_its_lease_ends(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    second = timedelta(seconds=1)
    async with await ff.Engine.connect(database) as other:
        assert (await plain_engine.take_lead([DUTIES], second))[DUTIES].is_ours
        answer = await other.take_lead([DUTIES, CASCADES], second)
        assert (answer[DUTIES].is_ours, answer[CASCADES].is_ours) == (False, True)
        assert timedelta(0) < answer[DUTIES].left <= timedelta(seconds=1)
        await sql.execute(
            "update flowfabric.lead set until = clock_timestamp() - interval '1 ms' where name = $1", DUTIES
        )
        assert (await other.take_lead([DUTIES], second))[DUTIES].is_ours
        assert not (await plain_engine.take_lead([DUTIES], second))[DUTIES].is_ours
        await other.leave_lead()
        assert (await plain_engine.take_lead([DUTIES], second))[DUTIES].is_ours


async def test_a_clock_that_was_set_back_does_not_postpone_the_takeover(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    """The lease that its leader no longer renews lasts until a time that is far away now."""
    async with await ff.Engine.connect(database) as other:
        follower = Leadership(other)
        assert (await plain_engine.take_lead([DUTIES, CASCADES], timedelta(minutes=1)))[DUTIES].is_ours
        assert await follower._look() <= 3.5, "it looks again soon"
        assert _leads(follower) == set()
        await sql.execute("update flowfabric.lead set until = until + interval '1 hour'")
        await follower._look()
        assert _leads(follower) == {DUTIES}


async def test_a_timer_set_in_the_past_or_by_a_slow_transaction_is_found(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    kinds = dict.fromkeys(_kinds("delay"))
    await plain_engine.create_execution(execution_kind="test", delay_until=timedelta(seconds=5), connection=None)
    await clock.advance(seconds=200)
    found = await plain_engine.look_for_due(kinds, at_most=timedelta(seconds=1))
    assert "delay" in found.due
    (low,) = found.low_water.values()
    due_at = await sql.fetchval("select due_at from flowfabric.timer where kind = 'delay'")
    assert low is not None
    assert low < due_at, "a mark is never above a timer that is left"
    await plain_engine.run_timers("delay")
    after = await plain_engine.look_for_due(dict.fromkeys(kinds, low), at_most=timedelta(seconds=1))
    assert "delay" not in after.due
    # A deadline that has passed long ago is not set before the mark.
    await submit(
        plain_engine, delay_until=timedelta(hours=1), execution_deadline_at=await clock.now() - timedelta(days=1)
    )
    (mark,) = after.low_water.values()
    late = await plain_engine.look_for_due(dict.fromkeys(_kinds("deadline"), mark), at_most=timedelta(seconds=1))
    assert "deadline" in late.due
    await plain_engine.run_timers("deadline")


def _kinds(*names: str) -> list[Any]:
    from flowfabric.engine.timers import TimerKind

    return [TimerKind(name) for name in names]
