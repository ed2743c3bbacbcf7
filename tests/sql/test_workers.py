"""The registry of workers: registering, heartbeats, disappearing, lists, events, and what no worker serves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import Conflict, Contention, Unavailable, ValidationFailed
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lane import LaneState
from flowfabric.values.lease import Fence, Renewed
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from flowfabric.values.worker import Marked, NotRegistered, OwnWorker, Refreshed, Registered, WorkerRecord
from tests.support import WORKER, CheckedEngine, Clock, claim_one, new_id, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
TTL = timedelta(seconds=5)


async def register(engine: ff.Engine, instance: str = "a-1", **fields: Any) -> Registered | Refreshed:
    given = {"worker_id": "a", "lanes": ["default"], "liveness_ttl": TTL} | fields
    return await engine.register_worker(worker_instance_id=instance, **given)


async def alive(engine: ff.Engine, namespace: str = "") -> list[WorkerRecord]:
    return list((await engine.list_workers(namespace)).items)


async def names(engine: ff.Engine, namespace: str = "") -> list[str]:
    return [one.worker_instance_id for one in await alive(engine, namespace)]


async def events(engine: ff.Engine, instance: str = "a-1", namespace: str = "") -> list[str]:
    """Oldest first, without heartbeats."""
    page = await engine.list_worker_events(instance, namespace=namespace)
    return [one.event for one in reversed(page.items) if one.event != "heartbeat"]


# Registering


@pytest.mark.both_servers
async def test_a_worker_registers_and_is_listed_with_all_it_said(engine: CheckedEngine, clock: Clock) -> None:
    before = await clock.now()
    made = await register(
        engine,
        lanes=["slow", "default", "slow"],
        capabilities=["gpu", "cuda"],
        kinds={"b": [], "a": [2, 1]},
        slots=100,
        package_version="0.1.0",
        host="box",
        pid=77,
    )
    assert isinstance(made, Registered)
    (found,) = await alive(engine)
    assert (found.worker_id, found.worker_instance_id, found.namespace) == ("a", "a-1", "")
    assert found.lanes == ("default", "slow")
    assert found.capabilities == ("cuda", "gpu")
    assert found.kinds == {"a": (2, 1), "b": ()}
    assert (found.slots, found.package_version, found.host, found.pid) == (100, "0.1.0", "box", 77)
    assert found.liveness_ttl == TTL
    assert before <= found.registered_at == found.last_heartbeat_at <= await clock.now()
    assert found.expires_at == found.last_heartbeat_at + TTL == made.expires_at
    assert found.leads == ()


async def test_a_worker_without_kinds_serves_every_kind(engine: CheckedEngine) -> None:
    await register(engine)
    await register(engine, "a-2", kinds=[])
    await register(engine, "a-3", kinds=["y", "x"])
    assert [one.kinds for one in await alive(engine)] == [None, {}, {"x": (), "y": ()}]


async def test_registering_again_overwrites_all_but_the_time_of_the_first(engine: CheckedEngine, clock: Clock) -> None:
    assert isinstance(await register(engine), Registered)
    (first,) = await alive(engine)
    await clock.advance(seconds=3)
    again = await register(engine, capabilities=["gpu"], lanes=["other"], liveness_ttl=2 * TTL)
    assert isinstance(again, Refreshed)
    (second,) = await alive(engine)
    assert second.registered_at == first.registered_at
    assert second.last_heartbeat_at >= first.last_heartbeat_at + timedelta(seconds=3)
    assert (second.capabilities, second.lanes, second.liveness_ttl) == (("gpu",), ("other",), 2 * TTL)
    assert again.next_expiry == second.expires_at
    assert await events(engine) == ["registered", "registered"]
    page = await engine.list_worker_events("a-1")
    assert [one.reason for one in reversed(page.items)] == [None, "refreshed"]


async def test_a_live_instance_keeps_its_worker_id_and_a_lapsed_one_may_change_it(
    engine: CheckedEngine, clock: Clock
) -> None:
    await register(engine)
    before = await alive(engine)
    with pytest.raises(ff.InvalidInput, match="instance_id reassigned"):
        await register(engine, worker_id="b", lanes=["other"])
    assert await alive(engine) == before
    assert await events(engine) == ["registered"]
    await clock.advance(seconds=5)
    assert isinstance(await register(engine, worker_id="b"), Registered)
    assert [one.worker_id for one in await alive(engine)] == ["b"]
    assert await events(engine) == ["registered", "ttl_swept", "registered"]
    assert await engine.sweep_workers() == 0, "the registration that lapsed has disappeared once"


async def test_a_namespace_has_instances_of_its_own(engine: CheckedEngine) -> None:
    await register(engine, namespace="x")
    assert isinstance(await register(engine, namespace="y", worker_id="b"), Registered)
    assert await names(engine) == []
    assert [one.worker_id for one in await alive(engine, "y")] == ["b"]
    assert await engine.mark_worker_dead("a-1", namespace="x", reason="") == Marked()
    assert await names(engine, "y") == ["a-1"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lanes", []),
        ("lanes", ["é"]),
        ("lanes", "default"),
        ("liveness_ttl", timedelta(0)),
        ("capabilities", ["a,b"]),
        ("capabilities", [""]),
        ("worker_id", "a b"),
        ("kinds", [""]),
        ("kinds", {"a": "1"}),
        ("kinds", {"a": [0]}),
        ("kinds", {"a": [True]}),
    ],
)
async def test_a_malformed_registration_is_refused(engine: CheckedEngine, field: str, value: Any) -> None:
    with pytest.raises(ValidationFailed):
        await register(engine, **{field: value})
    assert await names(engine) == []


async def test_a_second_process_with_the_same_instance_is_refused_while_the_first_lives(
    plain_engine: ff.Engine, database: str, clock: Clock
) -> None:
    async with await ff.Engine.connect(database, notifications=False) as other:
        await register(plain_engine, exclusive=True)
        assert isinstance(await register(plain_engine, exclusive=True), Refreshed), "a repeated call is no second one"
        before = await alive(plain_engine)
        with pytest.raises(Conflict, match="another process is registered as a-1") as refused:
            await register(other, exclusive=True, lanes=["else"])
        assert refused.value.kind == "instance_in_use"
        assert await alive(plain_engine) == before
        await clock.advance(seconds=5)
        assert isinstance(await register(other, exclusive=True), Registered)
        with pytest.raises(Conflict):
            await register(plain_engine, exclusive=True)
        first, second = (OwnWorker(worker_instance_id="a-1", process=each._instance) for each in (plain_engine, other))
        assert await plain_engine.heartbeat_own(first) == NotRegistered()
        assert isinstance(await other.heartbeat_own(second), Refreshed)
        assert await plain_engine.leave_registry("a-1", reason="stopped") == NotRegistered()
        assert await other.leave_registry("a-1", reason="stopped") == Marked()


# Heartbeats


async def test_a_heartbeat_prolongs_the_life_by_the_stored_time(engine: CheckedEngine, clock: Clock) -> None:
    await register(engine)
    for _ in range(3):
        await clock.advance(seconds=4)
        before = await clock.now()
        answer = await engine.heartbeat_worker("a-1")
        assert isinstance(answer, Refreshed)
        assert before + TTL <= answer.next_expiry <= await clock.now() + TTL
        assert [one.expires_at for one in await alive(engine)] == [answer.next_expiry]


async def test_a_heartbeat_never_revives(engine: CheckedEngine, clock: Clock) -> None:
    assert await engine.heartbeat_worker("a-1") == NotRegistered()
    await register(engine)
    await clock.advance(seconds=5)
    assert await engine.heartbeat_worker("a-1") == NotRegistered()
    assert await names(engine) == []
    await clock.advance(seconds=-1)
    assert isinstance(await engine.heartbeat_worker("a-1"), Refreshed), "it had not disappeared"


async def test_a_clock_that_is_set_back_moves_no_heartbeat_back(engine: CheckedEngine, clock: Clock) -> None:
    await register(engine)
    (before,) = await alive(engine)
    await clock.advance(seconds=-3600)
    answer = await engine.heartbeat_worker("a-1")
    assert answer == Refreshed(before.expires_at)
    assert await alive(engine) == [before]
    assert isinstance(await register(engine), Refreshed)
    assert await alive(engine) == [before]


@pytest.mark.parametrize("logged", [False, True])
async def test_heartbeats_are_events_only_if_the_deployment_asks(engine: CheckedEngine, sql: SQL, logged: bool) -> None:
    await sql.execute("update flowfabric.deployment set event_heartbeats = $1", logged)
    await register(engine)
    await engine.heartbeat_worker("a-1")
    page = await engine.list_worker_events("a-1")
    assert [one.event for one in page.items] == ["heartbeat", "registered"][not logged :]


async def test_a_heartbeat_of_its_own_process_does_not_wait_for_a_lock(
    plain_engine: ff.Engine, sql: SQL, clock: Clock
) -> None:
    await register(plain_engine)
    own = OwnWorker(worker_instance_id="a-1", process=plain_engine._instance)
    async with sql.transaction():
        await sql.execute("select from flowfabric.registration for update")
        assert await plain_engine.heartbeat_own(own) is None
    assert isinstance(await plain_engine.heartbeat_own(own), Refreshed)
    assert await plain_engine.heartbeat_own(OwnWorker(worker_instance_id="a-1", process=mint_uuid())) == NotRegistered()
    await clock.advance(seconds=5)
    assert await plain_engine.heartbeat_own(own) == NotRegistered()


async def test_a_sleep_and_a_renewal_carry_a_heartbeat(plain_engine: ff.Engine, sql: SQL, clock: Clock) -> None:
    await register(plain_engine)
    own = OwnWorker(worker_instance_id="a-1", process=plain_engine._instance)
    await clock.advance(seconds=2)
    until, beat = await plain_engine.sleep_and_heartbeat(["default"], timedelta(seconds=9), worker=own)
    assert isinstance(beat, Refreshed)
    assert await sql.fetchval("select until from flowfabric.sleeper") == until
    assert [one.expires_at for one in await alive(plain_engine)] == [beat.next_expiry]
    await submit(plain_engine)
    held = await claim_one(plain_engine)
    await clock.advance(seconds=2)
    (renewed,), beat = await plain_engine.renew_and_heartbeat([held.handle], worker=own)
    assert not isinstance(renewed, ff.FlowFabricError)
    assert isinstance(beat, Refreshed)
    assert [one.expires_at for one in await alive(plain_engine)] == [beat.next_expiry]
    async with sql.transaction():
        await sql.execute("select from flowfabric.registration for update")
        (renewed,), beat = await plain_engine.renew_and_heartbeat([held.handle], worker=own)
        assert not isinstance(renewed, ff.FlowFabricError)
        assert beat is None
    await plain_engine.mark_worker_dead("a-1", reason="")
    (renewed,), beat = await plain_engine.renew_and_heartbeat([held.handle], worker=own)
    assert not isinstance(renewed, ff.FlowFabricError)
    assert beat == NotRegistered()
    assert (await plain_engine.renew_and_heartbeat([], worker=own)) == ([], None)


async def test_heartbeats_stay_on_their_page(plain_engine: ff.Engine, sql: SQL) -> None:
    await sql.execute("truncate flowfabric.registration")
    await sql.execute("update flowfabric.deployment set event_heartbeats = false")
    for n in range(200):
        await register(plain_engine, f"worker@host-{n}/{n}/0123456789ab", lanes=["default", "slow"], kinds=["k"])
    await sql.execute("select pg_stat_reset_single_table_counters('flowfabric.registration'::regclass)")
    for _ in range(5):
        for n in range(200):
            await plain_engine.heartbeat_worker(f"worker@host-{n}/{n}/0123456789ab")
    assert await sql.fetchval("select pg_relation_size('flowfabric.registration') / 8192") <= 25


# Disappearing


@pytest.mark.both_servers
async def test_a_worker_that_is_marked_dead_is_gone_and_keeps_its_leases(engine: CheckedEngine, sql: SQL) -> None:
    await register(engine, instance=WORKER["worker_instance_id"], worker_id=WORKER["worker_id"])
    await submit(engine)
    held = await claim_one(engine)
    before = await sql.fetch("select * from flowfabric.execution")
    assert await engine.mark_worker_dead(WORKER["worker_instance_id"], reason="gone fishing") == Marked()
    assert await names(engine) == []
    assert await engine.heartbeat_worker(WORKER["worker_instance_id"]) == NotRegistered()
    assert await engine.mark_worker_dead(WORKER["worker_instance_id"], reason="again") == NotRegistered()
    assert await sql.fetch("select * from flowfabric.execution") == before
    await engine.complete(held.handle)
    page = await engine.list_worker_events(WORKER["worker_instance_id"])
    assert [(one.event, one.reason) for one in page.items] == [("marked_dead", "gone fishing"), ("registered", None)]


@pytest.mark.parametrize("reason", ["x" * 257, "é" * 129, "a\nb", "\x7f", 5, None])
async def test_a_reason_has_a_length_and_no_control_characters(engine: CheckedEngine, reason: Any) -> None:
    await register(engine)
    with pytest.raises(ff.InvalidInput) as refused:
        await engine.mark_worker_dead("a-1", reason=reason)
    assert refused.value.detail.startswith("reason:")
    assert await names(engine) == ["a-1"]


async def test_a_lapsed_worker_is_absent_before_it_is_swept(engine: CheckedEngine, clock: Clock) -> None:
    await register(engine)
    await register(engine, "a-2", liveness_ttl=2 * TTL)
    await clock.advance(seconds=5)
    assert await names(engine) == ["a-2"]
    assert await engine.mark_worker_dead("a-1", reason="late") == NotRegistered()
    assert await engine.sweep_workers() == 1
    assert await engine.sweep_workers() == 0
    assert await events(engine) == ["registered", "ttl_swept"]
    assert await names(engine) == ["a-2"]
    assert isinstance(await register(engine), Registered)
    assert await events(engine) == ["registered", "ttl_swept", "registered"]


async def test_a_sweep_takes_as_many_as_it_may_and_passes_over_locked_ones(
    plain_engine: ff.Engine, sql: SQL, clock: Clock
) -> None:
    for n in range(5):
        await register(plain_engine, f"a-{n}")
    await clock.advance(seconds=5)
    async with sql.transaction():
        await sql.execute("select from flowfabric.registration where worker_instance_id = 'a-3' for update")
        assert [await plain_engine.sweep_workers(limit=3) for _ in range(3)] == [3, 1, 0]
    assert await plain_engine.sweep_workers() == 1
    assert await sql.fetchval("select count(*) from flowfabric.worker_event where event = 'ttl_swept'") == 5


async def test_events_of_one_moment_all_survive_and_are_trimmed_after_a_day(
    engine: CheckedEngine, clock: Clock, sql: SQL
) -> None:
    async with sql.transaction():
        for n in range(20):
            await sql.execute(
                "select flowfabric.register_worker('', $1, 'a', '{default}', null, null, null, '{}', 5000, null, null,"
                " null, null, null, false)",
                f"a-{n}",
            )
    assert await sql.fetchval("select count(*) from flowfabric.worker_event") == 20
    await clock.advance(hours=23)
    assert await engine.sweep_workers() == 20
    assert await engine.trim_worker_events() == 0
    await clock.advance(hours=1)
    assert await engine.trim_worker_events(limit=15) == 15
    assert await engine.trim_worker_events(limit=15) == 5
    assert {row["event"] for row in await sql.fetch("select event from flowfabric.worker_event")} == {"ttl_swept"}
    await sql.execute("update flowfabric.deployment set worker_event_retention = '1 hour'")
    await clock.advance(hours=1)
    assert await engine.trim_worker_events() == 20


# Lists


async def test_a_list_has_a_cursor_exactly_if_more_follow(engine: CheckedEngine, clock: Clock) -> None:
    for n in (3, 1, 2):
        await register(engine, f"a-{n}")
    await register(engine, "a-0", liveness_ttl=timedelta(seconds=1))
    await register(engine, "b-9", namespace="x")
    await clock.advance(seconds=1)
    page = await engine.list_workers("", limit=2)
    assert ([one.worker_instance_id for one in page.items], page.next_cursor) == (["a-1", "a-2"], "a-2")
    page = await engine.list_workers("", limit=2, after="a-2")
    assert ([one.worker_instance_id for one in page.items], page.next_cursor) == (["a-3"], None)
    page = await engine.list_workers("", limit=3)
    assert page.next_cursor is None
    assert list((await engine.list_workers("", limit=0)).items) == []
    everyone = await engine.list_all_workers(limit=3)
    assert everyone.next_cursor == ("", "a-3")
    rest = await engine.list_all_workers(after=everyone.next_cursor)
    assert [(one.namespace, one.worker_instance_id) for one in rest.items] == [("x", "b-9")]
    assert rest.next_cursor is None


async def test_a_list_without_a_namespace_is_unavailable(engine: CheckedEngine) -> None:
    with pytest.raises(Unavailable, match="list_all_workers"):
        await engine.list_workers()


async def test_a_list_shows_who_leads_the_duties(plain_engine: ff.Engine) -> None:
    await register(plain_engine)
    await register(plain_engine, "z-1", worker_id="z")
    assert await plain_engine.list_leaders() == []
    await plain_engine.take_lead(["duties"], timedelta(seconds=30))
    assert [one.leads for one in await alive(plain_engine)] == [("duties",), ("duties",)], "both are of this process"
    (leader,) = await plain_engine.list_leaders()
    assert (leader.name, leader.process, leader.worker_instance_id) == ("duties", plain_engine._instance, "a-1")
    assert timedelta(0) < leader.left <= timedelta(seconds=30)


async def test_renewals_that_do_not_wait_pass_over_what_is_locked(plain_engine: ff.Engine, sql: SQL) -> None:
    held = []
    for _ in range(4):
        await submit(plain_engine)
        held.append(await claim_one(plain_engine))
    handles = [one.handle for one in held]
    ids = {"lease_id": mint_uuid(), "lease_epoch": 1, "attempt_id": mint_uuid()}
    unknown, stale = Fence(execution_id=new_id(), **ids), Fence(execution_id=handles[3].execution_id, **ids)
    async with sql.transaction():
        await sql.execute("select from flowfabric.execution where id = $1 for no key update", handles[1].execution_id)
        asked = [*handles[:3], unknown, stale, handles[1], handles[0]]
        found = await plain_engine.renew_many(asked, waits=False)
        assert [getattr(one, "kind", "ok") for one in found] == [
            "ok", "execution_locked", "ok", "not_found", "stale_lease", "execution_locked", "ok",
        ]  # fmt: skip
        locked = found[1]
        assert isinstance(locked, Contention)
        assert locked.retryable
        own = OwnWorker(worker_instance_id="a-1", process=plain_engine._instance)
        found, _ = await plain_engine.renew_and_heartbeat(asked, worker=own)
        assert isinstance(found[1], Contention)
        assert await sql.fetchval("select count(*) from flowfabric.execution where lease_renewed_at is not null") == 2
    assert isinstance((await plain_engine.renew_many([handles[1]], waits=False))[0], Renewed)


# What no worker serves

SERVES: dict[str, Any] = {"lanes": ["mail", "other"], "kinds": ["send"], "capabilities": ["gpu", "cuda"]}


async def unserved(engine: ff.Engine, *targets: ff.ExecutionId) -> list[tuple[str, str, int]]:
    return [(one.lane_id, one.kind, one.live_workers) for one in await engine.find_unserved(targets)]


@pytest.mark.parametrize(
    ("change", "is_served"),
    [
        ({}, True),
        ({"kinds": None}, True),
        ({"namespace": "x"}, True),
        ({"namespace": "y"}, False),
        ({"lanes": ["other"]}, False),
        ({"kinds": ["receive"]}, False),
        ({"kinds": []}, False),
        ({"capabilities": ["cuda"]}, False),
    ],
)
async def test_a_worker_serves_what_it_registered_for(
    engine: CheckedEngine, change: dict[str, Any], is_served: bool
) -> None:
    target = await submit(engine, namespace="x", policy=_needs("gpu"), execution_kind="send", lane_id="mail")
    await register(engine, **SERVES | change)
    assert await unserved(engine, target) == ([] if is_served else [("mail", "send", 1)])


def _needs(*tokens: str) -> ExecutionPolicy:
    return ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=tokens))


async def test_two_workers_together_serve_nothing_that_neither_serves(engine: CheckedEngine) -> None:
    target = await submit(engine, execution_kind="send", lane_id="mail", policy=_needs("gpu", "cuda"))
    await register(engine, **SERVES | {"capabilities": ["gpu"]})
    await register(engine, "a-2", **SERVES | {"capabilities": ["cuda"]})
    assert await unserved(engine, target) == [("mail", "send", 2)]


async def test_a_lapsed_worker_serves_nothing(engine: CheckedEngine, clock: Clock) -> None:
    target = await submit(engine, execution_kind="send")
    await register(engine)
    assert await unserved(engine, target) == []
    await clock.advance(seconds=5)
    assert await unserved(engine, target) == [("default", "send", 0)]


async def test_a_process_that_waits_for_work_without_being_registered_serves_it(
    engine: CheckedEngine, sql: SQL
) -> None:
    target = await submit(engine, execution_kind="send")
    assert await unserved(engine, target) == [("default", "send", 0)]
    for kinds, is_served in (["receive"], False), (["send", "receive"], True), (None, True):
        until = await engine.sleep_for_work(["default"], timedelta(seconds=30), kinds=kinds)
        assert await unserved(engine, target) == ([] if is_served else [("default", "send", 0)]), kinds
        await sql.execute("update flowfabric.sleeper set until = $1", until - timedelta(hours=1))
        assert await unserved(engine, target) == [("default", "send", 0)], "its sleep has ended"


async def test_only_what_waits_for_a_worker_is_unserved(engine: CheckedEngine, clock: Clock) -> None:
    delayed = await submit(engine, delay_until=timedelta(hours=1))
    running = await submit(engine)
    held = await claim_one(engine)
    assert held.execution_id == running
    assert await unserved(engine, delayed, running) == []
    await clock.advance(minutes=30)
    await engine.mark_lease_expired_if_due(running)
    assert len(await unserved(engine, delayed, running)) == 1, "its worker is gone, and another is needed"


async def test_executions_of_one_route_are_reported_once_and_a_paused_lane_always(engine: CheckedEngine) -> None:
    many = [await submit(engine, execution_kind=kind) for kind in ("b", "a", "b")]
    assert await unserved(engine, *many) == [("default", "b", 0), ("default", "a", 0)]
    await register(engine)
    assert await unserved(engine, *many) == []
    await engine.set_lane_state("default", LaneState.PAUSED)
    assert [one.lane_state for one in await engine.find_unserved(many)] == [LaneState.PAUSED] * 2


# The audit


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        ("update flowfabric.registration set service = -1", "registration_facts"),
        ("update flowfabric.registration set lanes = '{b,a}'", "registration_facts"),
        ("update flowfabric.registration set lanes = '{}'", "registration_facts"),
        ("update flowfabric.registration set liveness_ttl = '0'", "registration_facts"),
        ("update flowfabric.registration set registered_at = heartbeat_at + interval '1 s'", "registration_facts"),
        ("delete from flowfabric.registration", "worker_history"),
        ("delete from flowfabric.worker_event where event = 'marked_dead'", "worker_history"),
        ("delete from flowfabric.worker_event where event = 'registered' and seq < 5", "worker_history"),
    ],
)
async def test_the_audit_finds_a_registry_that_does_not_add_up(
    plain_engine: ff.Engine, sql: SQL, damage: str, rule: str
) -> None:
    await sql.execute("truncate flowfabric.worker_event restart identity")
    await register(plain_engine)
    await register(plain_engine)
    await plain_engine.mark_worker_dead("a-1", reason="")
    await register(plain_engine)
    assert await plain_engine.audit(events=True) == []
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute(damage)
    found = await sql.fetch("select rule, detail from flowfabric.audit(null, true)")
    await transaction.rollback()
    assert {row["rule"] for row in found} == {rule}
