"""Reads and lists: what each returns for known and unknown ids, and how pages continue."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.engine.reads import Place
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.flow import FlowStatus
from flowfabric.values.ids import FlowId, PartitionKey, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.page import Page
from flowfabric.values.vector import BlockingReason
from tests.databases import fresh_database
from tests.ids import home, id_in
from tests.support import STATES, WORKER, CheckedEngine, Clock, claim_one, started, submit, submit_member

MISSING = id_in(3, UUID("0b0e8400-e29b-41d4-a716-446655440000"))
FLOW = FlowId(UUID("11111111-1111-1111-1111-111111111111"))
CORE_FIELDS = [
    "lane_id", "lifecycle_phase", "ownership_state", "eligibility_state", "blocking_reason", "terminal_outcome",
    "attempt_state", "public_state", "blocking_detail", "cancellation_reason", "cancel_reason", "cancelled_by",
    "attempt_index", "current_attempt_index", "total_attempt_count", "flow_id", "priority", "created_at_ms",
    "terminal_at_ms", "completed_at", "deadline_at_ms", "delay_until", "required_capabilities",
    "current_waitpoint_id", "current_worker_instance_id", "budget_ids", "quota_policy_id",
]  # fmt: skip


# ---- reads


async def test_a_read_of_an_unknown_execution_finds_nothing_or_says_that_the_id_is_bad(engine: CheckedEngine) -> None:
    finds_nothing: list[Callable[[ff.ExecutionId], Awaitable[Any]]] = [
        engine.read_execution,
        engine.describe_execution,
        engine.read_execution_state,
        engine.read_execution_info,
        engine.get_execution_result,
        engine.read_result,
        engine.resolve_execution_flow_id,
        engine.get_execution_namespace,
        lambda target: engine.get_execution_tag(target, "a.b"),
    ]
    for read in finds_nothing:
        assert await read(MISSING) is None
    assert await engine.list_attempts(MISSING) == []
    assert await engine.read_exec_core_fields(3, MISSING, CORE_FIELDS) == dict.fromkeys(CORE_FIELDS)
    for refuses in (
        engine.read_execution_context,
        engine.read_current_attempt_index,
        engine.read_total_attempt_count,
    ):
        with pytest.raises(ff.InvalidInput) as refused:
            await refuses(MISSING)
        assert refused.value.field == "execution_id"
    with pytest.raises(ff.NotFound) as unknown:
        await engine.set_execution_tag(MISSING, "a.b", "c")
    assert (unknown.value.entity, unknown.value.id) == ("execution", str(MISSING))


async def test_describe_and_info_show_a_running_execution(engine: CheckedEngine, clock: Clock) -> None:
    await submit_member(
        engine, FLOW, execution_kind="k", lane_id="l", namespace="n", priority=7, tags={"a.b": "c", "plain": ""}
    )
    claimed = await claim_one(engine, lane_id="l")
    target = claimed.execution_id
    snapshot = await engine.describe_execution(target)
    assert snapshot is not None
    assert (snapshot.execution_id, snapshot.flow_id, snapshot.lane_id) == (target, FLOW, "l")
    assert (snapshot.namespace, snapshot.public_state, snapshot.blocking_reason) == ("n", ff.State.ACTIVE, None)
    assert (snapshot.total_attempt_count, snapshot.tags) == (1, {"a.b": "c", "plain": ""})
    assert snapshot.current_waitpoint is None
    assert snapshot.current_attempt is not None
    assert (snapshot.current_attempt.attempt_id, snapshot.current_attempt.attempt_index) == (
        claimed.handle.attempt_id,
        0,
    )
    lease = snapshot.current_lease
    assert lease is not None
    assert (lease.lease_id, lease.lease_epoch, lease.worker_instance_id) == (claimed.handle.lease_id, 1, "pool-1")
    assert (lease.expires_at, lease.attempt_index) == (claimed.lease_expires_at, 0)
    assert lease.last_heartbeat_at == lease.acquired_at
    info = await engine.read_execution_info(target)
    assert info is not None
    assert (info.execution_id, info.namespace, info.lane_id, info.priority) == (target, "n", "l", 7)
    assert (info.execution_kind, info.public_state, info.flow_id) == ("k", ff.State.ACTIVE, FLOW)
    assert (info.current_attempt_index, info.blocking_detail, info.completed_at) == (0, "", None)
    assert info.started_at == lease.acquired_at
    assert info.created_at == snapshot.created_at
    assert await engine.resolve_execution_flow_id(target) == FLOW
    assert await engine.get_execution_namespace(target) == "n"


async def test_a_lease_is_shown_only_while_it_is_held(engine: CheckedEngine, clock: Clock) -> None:
    for name, shown in {"A": True, "X": False, "V": False, "D.i": False, "T:completed": False}.items():
        at = await STATES[name](engine, clock)
        snapshot = await engine.describe_execution(at.id)
        assert snapshot is not None
        assert (snapshot.current_lease is not None) is shown, name
        full = await engine.read_execution(at.id)
        assert full is not None
        assert (full.lost_lease is not None) is (name in "XV"), name
        # Nothing may be left that the next round's claim could take instead.
        if name not in ("T:completed",):
            await engine.cancel(Operator(at.id), "done")


async def test_every_read_agrees_on_every_state(engine: CheckedEngine, clock: Clock) -> None:
    for name in STATES:
        await _reads_agree(engine, clock, name)


async def _reads_agree(engine: CheckedEngine, clock: Clock, name: str) -> None:
    at = await STATES[name](engine, clock)
    full = await engine.read_execution(at.id)
    snapshot = await engine.describe_execution(at.id)
    info = await engine.read_execution_info(at.id)
    fields = await engine.read_exec_core_fields(PartitionKey("fp", home(at.id)), at.id, CORE_FIELDS)
    assert full is not None
    assert snapshot is not None
    assert info is not None
    vector = full.state_vector
    assert await engine.read_execution_state(at.id) == full.public_state == snapshot.public_state == info.public_state
    assert info.state_vector == vector
    dimensions = (
        "lifecycle_phase", "ownership_state", "eligibility_state", "blocking_reason", "terminal_outcome",
        "attempt_state", "public_state",
    )  # fmt: skip
    for dimension in dimensions:
        assert fields[dimension] == getattr(vector, dimension), dimension
    assert snapshot.blocking_reason == (
        None if vector.blocking_reason is BlockingReason.NONE else vector.blocking_reason
    )
    assert fields["blocking_detail"] == info.blocking_detail == (snapshot.blocking_detail or "")
    assert snapshot.total_attempt_count == await engine.read_total_attempt_count(at.id)
    assert fields["total_attempt_count"] == str(snapshot.total_attempt_count)
    assert len(await engine.list_attempts(at.id)) == snapshot.total_attempt_count
    assert info.current_attempt_index == await engine.read_current_attempt_index(at.id)
    assert fields["attempt_index"] == (None if full.total_attempt_count == 0 else str(info.current_attempt_index))
    assert info.completed_at == full.completed_at
    assert (await engine.get_execution_result(at.id)) == (b"done" if name == "T:completed" else None)
    # The failed attempt of a scheduled retry is no longer current.
    assert (snapshot.current_attempt is None) is (full.total_attempt_count == 0 or name in ("D.r", "W.r"))
    if not full.public_state.is_terminal:
        await engine.cancel(Operator(at.id), "out of the way of the next")


async def test_core_fields_are_text_under_every_name_and_alias(engine: CheckedEngine, clock: Clock) -> None:
    budgets = sorted(str(mint_uuid()) for _ in range(2))
    quota = str(mint_uuid())
    target = await submit_member(
        engine,
        FLOW,
        lane_id="l",
        priority=12,
        delay_until=timedelta(hours=1),
        execution_deadline_at=datetime(2100, 1, 1, tzinfo=UTC),
        policy={
            "routing_requirements": {"required_capabilities": ["gpu", "arm"]},
            "budget_ids": budgets,
            "quota_policy_id": quota,
        },
    )
    await engine.cancel(Operator(target), "enough")
    full = await engine.read_execution(target)
    assert full is not None
    assert full.completed_at is not None
    fields = await engine.read_exec_core_fields(home(FLOW), target, CORE_FIELDS)
    assert list(fields) == CORE_FIELDS
    assert fields == {
        "lane_id": "l", "lifecycle_phase": "terminal", "ownership_state": "unowned",
        "eligibility_state": "not_applicable", "blocking_reason": "none", "terminal_outcome": "cancelled",
        "attempt_state": "none", "public_state": "cancelled", "blocking_detail": "", "cancellation_reason": "enough",
        "cancel_reason": "enough", "cancelled_by": "operator_override", "attempt_index": None,
        "current_attempt_index": None, "total_attempt_count": "0", "flow_id": str(FLOW), "priority": "12",
        "created_at_ms": _ms(full.created_at), "terminal_at_ms": _ms(full.completed_at),
        "completed_at": _ms(full.completed_at), "deadline_at_ms": "4102444800000", "delay_until": None,
        "required_capabilities": "arm,gpu", "current_waitpoint_id": None, "current_worker_instance_id": None,
        "budget_ids": ",".join(budgets), "quota_policy_id": quota,
    }  # fmt: skip
    claimed = await started(engine)
    running = await engine.read_exec_core_fields(
        home(claimed.execution_id), claimed.execution_id, ["current_worker_instance_id", "nonsense"]
    )
    assert running == {"current_worker_instance_id": "pool-1", "nonsense": None}


def _ms(moment: datetime) -> str:
    return str((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1))


async def test_core_fields_are_read_by_partition_and_name_only_what_was_asked(engine: CheckedEngine) -> None:
    target = await submit(engine, idempotency_key="k")
    place = home(target)
    assert await engine.read_exec_core_fields(place, target, []) == {}
    assert await engine.read_exec_core_fields(f"{{fp:{place}}}", target, ["priority"]) == {"priority": "0"}
    for wrong in ((place + 1) % 256, f"{{b:{place}}}", "nonsense"):
        with pytest.raises(ff.InvalidInput) as refused:
            await engine.read_exec_core_fields(wrong, target, ["priority"])
        assert refused.value.field == "partition_key"


async def test_a_result_is_there_only_when_completed_with_one(engine: CheckedEngine) -> None:
    claimed = await started(engine)
    assert await engine.get_execution_result(claimed.execution_id) is None
    await engine.complete(claimed.handle, b"", result_encoding="raw")
    assert await engine.get_execution_result(claimed.execution_id) == b""
    result = await engine.read_result(claimed.execution_id)
    assert result is not None
    assert (result.payload, result.encoding) == (b"", "raw")
    await engine.replay_execution(claimed.execution_id)
    assert await engine.get_execution_result(claimed.execution_id) is None
    claimed = await claim_one(engine)
    await engine.complete(claimed.handle)
    assert await engine.read_result(claimed.execution_id) is None


async def test_the_context_is_the_input_byte_for_byte(engine: CheckedEngine) -> None:
    payload = bytes(range(256))
    target = await submit(
        engine, input_payload=payload, payload_encoding="raw", execution_kind="k", tags={"no dot": "ü"}
    )
    context = await engine.read_execution_context(target)
    assert context.input_payload == payload
    assert (context.payload_encoding, context.execution_kind, context.tags) == ("raw", "k", {"no dot": "ü"})


async def test_tags_are_set_read_and_replaced_one_by_one(engine: CheckedEngine) -> None:
    target = await submit(engine, tags={"no dot": "kept", "a.b": "old"})
    await engine.set_execution_tag(target, "a.b", "new")
    await engine.set_execution_tag(target, "a.b", "new")
    await engine.set_execution_tag(target, "c.d.e", "")
    assert await engine.get_execution_tag(target, "a.b") == "new"
    assert await engine.get_execution_tag(target, "c.d.e") == ""
    assert await engine.get_execution_tag(target, "x.y") is None
    snapshot = await engine.describe_execution(target)
    assert snapshot is not None
    assert snapshot.tags == {"no dot": "kept", "a.b": "new", "c.d.e": ""}
    assert snapshot.last_mutation_at > snapshot.created_at
    assert await _ids(engine.find_executions(tag=("a.b", "old"))) == []
    assert await _ids(engine.find_executions(tag=("a.b", "new"))) == [target]


async def test_tags_whose_names_and_values_run_together_are_not_mixed_up(engine: CheckedEngine) -> None:
    pairs = {"a\x1fb": "c", "a": "b\x1fc", "ab": "c", "1:a": "", "1": ":a"}
    target = await submit(engine, tags=pairs)
    for pair in pairs.items():
        assert await _ids(engine.find_executions(tag=pair)) == [target]
    assert await _ids(engine.find_executions(tag=("a", "bc"))) == []
    long = "k" * 300
    other = await submit(engine, tags={long: "v"})
    assert await _ids(engine.find_executions(tag=(long, "v"))) == [other]


# ---- pages


async def _ids(page: Awaitable[Page[Any, Any]]) -> list[ff.ExecutionId]:
    return [item.execution_id for item in (await page).items]


async def _walk(read: Callable[[Any], Awaitable[Page[Any, Any]]]) -> list[list[Any]]:
    pages: list[list[Any]] = []
    cursor = None
    while True:
        page = await read(cursor)
        pages.append(list(page.items))
        if page.next_cursor is None:
            return pages
        assert page.next_cursor != cursor
        cursor = page.next_cursor


async def test_a_partition_is_listed_by_id_and_a_cursor_is_set_only_if_more_follows(engine: CheckedEngine) -> None:
    uuids = [UUID(int=0), *(mint_uuid() for _ in range(4)), UUID(int=2**128 - 1)]
    ids = [id_in(9, uuid) for uuid in uuids]
    await engine.create_many(
        [NewExecution(execution_kind="k", execution_id=one) for one in (*ids[::-1], id_in(8, uuids[0]))]
    )
    for size in range(1, 8):
        pages = await _walk(lambda after, n=size: engine.list_executions(9, cursor=after, limit=n))
        assert [item.execution_id for page in pages for item in page] == ids
        assert all(len(page) == size for page in pages[:-1])
        assert pages[-1]
    assert await engine.list_executions(9, limit=0) == Page(())
    assert await engine.list_executions(10) == Page([], None)
    assert len((await engine.list_executions(PartitionKey("fp", 9), limit=2**31 - 1)).items) == 6


async def test_a_cursor_excludes_its_own_row_and_shows_rows_inserted_after_it(engine: CheckedEngine) -> None:
    async def make(number: int) -> ff.ExecutionId:
        return await submit(engine, execution_id=at(number))

    def at(number: int) -> ff.ExecutionId:
        return ff.ExecutionId(UUID(int=(number << 16) + 1))

    await make(10), await make(20), await make(30)
    page = await engine.list_executions(1, limit=2)
    assert page.next_cursor == at(20)
    await make(15), await make(25)
    rest = await engine.list_executions(1, cursor=page.next_cursor)
    assert [item.execution_id for item in rest.items] == [at(25), at(30)]
    # The execution that the cursor names may be gone, or never have been.
    gone = await engine.list_executions(1, cursor=at(26))
    assert [item.execution_id for item in gone.items] == [at(30)]


# ---- parts of ids


async def test_an_id_is_found_by_its_end_or_its_beginning(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    one, two = (ff.ExecutionId(UUID(f"abcdef0{n}-0000-7000-8000-00{n}09f3c01a2")) for n in (1, 2))
    flow = FlowId(UUID("abcdef03-0000-7000-8000-0000aaaa01a2"))
    for target in (one, two):
        await submit(engine, execution_id=target, execution_kind="mail")
    await engine.create_flow(flow, flow_kind="report")
    await submit(engine, execution_id=ff.ExecutionId(UUID(f"{one.hex[:-4]}01a3")))  # of another partition

    async def find(text: str, **fields: Any) -> set[UUID]:
        return {found.id for found in await engine.find_id(text, **fields)}

    assert await find("9f3c01a2") == {one, two}
    assert await find("10-9f3C01a2".replace("-", "")) == {one}
    assert await find("aaaa01a2") == {flow}
    assert await find("abcdef0") == {one, two, flow, UUID(f"{one.hex[:-4]}01a3")}
    assert await find("abcdef02-0000-7") == {two}
    assert await find(str(one)) == await find(one.hex) == {one}
    assert await find("abcdef0", what="flow") == {flow}
    assert await find("abcdef02", what="flow") == set()
    assert len(await find("abcdef0", limit=2)) == 2
    assert await find("123456") == await find(str(mint_uuid())) == set()
    (found,) = await engine.find_id("aaaa01a2")
    assert (found.what, found.kind, found.state) == ("flow", "report", FlowStatus.ACTIVE)
    (found,) = await engine.find_id(str(two))
    assert (found.what, found.kind, found.state) == ("execution", "mail", ff.State.WAITING)


async def test_one_partition_is_read_for_an_end_and_no_table_for_a_beginning(sql: asyncpg.Connection[Any]) -> None:
    for call in (
        "select * from flowfabric.find_by_end(7, '9f3c01a2', 11)",
        "select * from flowfabric.find_by_beginning(0, 255, '00000000-0000-0000-0000-000000000000',"
        " '00000000-ffff-ffff-ffff-ffffffffffff', 11)",
    ):
        # What the statistics of earlier tests may lead to: a bitmap of the same keys repeats their condition.
        for other in ("bitmapscan", "indexscan"):
            async with sql.transaction():
                await sql.execute(f"set local enable_seqscan = off; set local enable_{other} = off")
                lines = [row[0] for row in await sql.fetch(f"explain (costs off) {call}")]
            plan = "\n".join(lines)
            assert "Seq Scan" not in plan, plan
            assert "execution_pkey" in plan, plan
            assert "flow_pkey" in plan or "flow_by_time" in plan, plan
            assert sum("Index Cond" in line for line in lines) == 2, plan


async def test_expired_leases_with_one_deadline_are_paged_without_repeat_or_gap(
    engine: CheckedEngine, clock: Clock
) -> None:
    for _ in range(3):
        await submit(engine, namespace="n")
    held = await engine.claim_many(**WORKER, limit=3, lease_ttl=timedelta(seconds=5))
    assert (await engine.list_expired_leases()).items == []
    await clock.advance(seconds=5)
    await engine.mark_lease_expired_if_due(held[1].execution_id)
    first = await engine.list_expired_leases(limit=2)
    second = await engine.list_expired_leases(limit=2, after=first.next_cursor)
    assert (len(first.items), len(second.items)) == (2, 1)
    assert second.next_cursor is None
    seen = [*first.items, *second.items]
    assert len({lease.expires_at for lease in seen}) == 1
    assert [lease.execution_id for lease in seen] == sorted(claimed.execution_id for claimed in held)
    by_id = {claimed.execution_id: claimed.handle for claimed in held}
    for lease in seen:
        handle = by_id[lease.execution_id]
        assert (lease.lease_id, lease.lease_epoch, lease.worker_instance_id, lease.attempt_index) == (
            handle.lease_id,
            1,
            "pool-1",
            0,
        )
    exact = await engine.list_expired_leases(limit=3)
    assert (len(exact.items), exact.next_cursor) == (3, None)
    assert await engine.list_expired_leases(limit=0) == Page(())


async def test_expired_leases_are_those_lapsed_at_a_time_and_not_revoked(engine: CheckedEngine, clock: Clock) -> None:
    long = await started(engine, lease_ttl=timedelta(hours=2), namespace="other")
    revoked = await started(engine, lease_ttl=timedelta(seconds=5))
    ended = await started(engine, lease_ttl=timedelta(seconds=5))
    first = await started(engine, lease_ttl=timedelta(seconds=5))
    second = await started(engine, lease_ttl=timedelta(seconds=6), namespace="n")
    await engine.revoke_lease(revoked.execution_id)
    await engine.complete(ended.handle)
    await clock.advance(seconds=10)
    assert await _ids(engine.list_expired_leases()) == [first.execution_id, second.execution_id]
    assert await _ids(engine.list_expired_leases(namespace="n")) == [second.execution_id]
    assert await _ids(engine.list_expired_leases(namespace="other")) == []
    assert await _ids(engine.list_expired_leases(as_of=first.lease_expires_at)) == [first.execution_id]
    early = first.lease_expires_at - timedelta(microseconds=1)
    assert await _ids(engine.list_expired_leases(as_of=early)) == []
    late = await clock.now() + timedelta(hours=3)
    assert await _ids(engine.list_expired_leases(as_of=late)) == [
        first.execution_id,
        second.execution_id,
        long.execution_id,
    ]


# ---- find_executions


async def _random_world(engine: ff.Engine, rng: random.Random) -> None:
    """A few hundred executions in every state that can be reached, many of them created at one instant."""
    flows = [FLOW, FlowId(UUID(int=5))]
    shared = mint_uuid()
    for _ in range(6):
        batch = []
        for number in range(50):
            flow = rng.choice([None, None, None, *flows])
            twin = number < 4 and flow is None
            batch.append(
                NewExecution(
                    execution_kind=rng.choice("abc"),
                    lane_id=rng.choice(["l1", "l2", "l3"]),
                    namespace=rng.choice(["", "", "n", "m"]),
                    priority=rng.choice([0, 0, 5, 9000]),
                    tags=rng.choice([None, {"t.a": "1"}, {"t.a": "2", "t.b": "1"}]),
                    delay_until=rng.choice([None] * 5 + [timedelta(hours=1)]),
                    execution_deadline_at=rng.choice([None] * 5 + [timedelta(seconds=1)]),
                    flow_id=flow,
                    # Neighbours in several partitions, at the same instant.
                    execution_id=id_in(number, shared) if twin else None,
                )
            )
        shared = mint_uuid()
        answers = [(item.flow_id, answer) for item, answer in zip(batch, await engine.create_many(batch), strict=True)]
        made = [answer.execution_id for _, answer in answers if isinstance(answer, Created)]
        for flow in flows:
            await engine.create_flow(flow)
            await engine.add_executions_to_flow(
                flow, [a.execution_id for of, a in answers if of == flow and isinstance(a, Created)]
            )
        for target in rng.sample(made, 10):
            await engine.block_execution_for_admission(
                target,
                rng.choice(
                    ["waiting_for_budget", "waiting_for_quota", "waiting_for_capable_worker", "paused_by_operator"]
                ),
            )
        held = [
            claimed
            for lane in ("l1", "l2")
            for claimed in await engine.claim_many(lane, limit=9, **WORKER, lease_ttl=timedelta(minutes=5))
        ]
        for claimed in held:
            match rng.randrange(8):
                case 0 | 1:
                    await engine.complete(claimed.handle)
                case 2:
                    await engine.fail(claimed.handle, "no")
                case 3:
                    await engine.cancel(claimed.handle, "no")
                case 4:
                    await engine.revoke_lease(claimed.execution_id)
                case 5:
                    await engine.delay(claimed.handle, timedelta(hours=1))
                case 6:
                    await engine.release(claimed.handle)
                case _:
                    pass


async def test_every_combination_of_filters_finds_what_a_search_by_hand_finds(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    engine = plain_engine
    rng = random.Random(7)
    await _random_world(engine, rng)
    await clock.advance(seconds=2)
    while (await engine.run_timers("deadline", limit=1000)).handled:
        pass
    rows = await sql.fetch(
        "select partition, id, created_at, namespace, lane, kind, state, flow_id, tags from flowfabric.execution_view"
    )
    world = sorted(
        (dict(row) | {"tags": json.loads(row["tags"] or "{}")} for row in rows),
        key=lambda row: (row["created_at"], row["id"], row["partition"]),
        reverse=True,
    )
    assert {row["state"] for row in world} >= {
        "waiting", "delayed", "rate_limited", "active", "completed", "failed", "cancelled", "expired",
    }  # fmt: skip
    times = sorted({row["created_at"] for row in world})
    choices: dict[str, list[Any]] = {
        "namespace": [None, None, "", "n", "none"],
        "lane_ids": [None, None, ["l1"], ["l2", "l3"], []],
        "kinds": [None, None, ["a"], {"b", "c"}],
        "states": [
            None, None, *([state] for state in ff.State), ["waiting", "failed"], ["active", "delayed"],
            ["completed", "rate_limited"], [],
        ],
        "tag": [None, None, None, ("t.a", "1"), ("t.b", "1"), ("t.b", "2")],
        "flow_id": [None, None, None, FLOW],
        "created_from": [None, None, times[2], times[2] + timedelta(microseconds=1)],
        "created_before": [None, None, times[-1], times[4] + timedelta(microseconds=1)],
    }  # fmt: skip

    def matches(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
        return (
            wanted["namespace"] in (None, row["namespace"])
            and (wanted["lane_ids"] is None or row["lane"] in wanted["lane_ids"])
            and (wanted["kinds"] is None or row["kind"] in wanted["kinds"])
            and (wanted["states"] is None or row["state"] in wanted["states"])
            and (wanted["tag"] is None or row["tags"].get(wanted["tag"][0]) == wanted["tag"][1])
            and wanted["flow_id"] in (None, row["flow_id"])
            and (wanted["created_from"] is None or row["created_at"] >= wanted["created_from"])
            and (wanted["created_before"] is None or row["created_at"] < wanted["created_before"])
        )

    singles = [
        {name: value} for name, values in choices.items() for value in values if value is not None
    ]  # each filter alone, then random combinations
    combined = [{name: rng.choice(values) for name, values in choices.items()} for _ in range(120)]
    for asked in [{}, *singles, *combined]:
        wanted = dict.fromkeys(choices) | asked
        expected = [ff.ExecutionId(row["id"]) for row in world if matches(row, wanted)]
        sizes = {rng.choice([1000, 50, 7]), max(len(expected), 1), max(len(expected) - 1, 1)}
        if len(expected) < 40:
            sizes.add(1)  # so that a page ends between executions that differ in their partition only
        for size in sizes:
            pages = await _walk(lambda after, w=asked, n=size: engine.find_executions(**w, cursor=after, limit=n))
            assert [item.execution_id for page in pages for item in page] == expected, (asked, size)
            assert all(len(page) == size for page in pages[:-1]), (asked, size)
            assert pages[-1] or not expected, (asked, size)


async def test_a_page_may_end_between_executions_that_differ_in_the_last_bits_of_their_ids_only(
    engine: CheckedEngine,
) -> None:
    uuid = mint_uuid()
    ids = [id_in(partition, uuid) for partition in (5, 4, 3)]
    await engine.create_many(
        [NewExecution(execution_kind="k", namespace="n", tags={"a.b": "c"}, execution_id=one) for one in ids]
    )
    sources: list[dict[str, Any]] = [{}, {"namespace": "n"}, {"tag": ("a.b", "c")}, {"states": ["waiting"]}]
    for wanted in sources:
        pages = await _walk(lambda after, w=wanted: engine.find_executions(**w, cursor=after, limit=1))
        assert [[item.execution_id for item in page] for page in pages] == [[one] for one in ids], wanted
    for one in ids:
        await engine.cancel(Operator(one), "no")
    pages = await _walk(lambda after: engine.find_executions(states=["cancelled"], cursor=after, limit=1))
    assert [[item.execution_id for item in page] for page in pages] == [[one] for one in ids]


async def test_found_executions_are_what_read_execution_info_says(engine: CheckedEngine, clock: Clock) -> None:
    ids = [(await STATES[name](engine, clock)).id for name in ("T:failed", "A", "D.1", "B.operator")]
    page = await engine.find_executions()
    assert [item.execution_id for item in page.items] == ids[::-1]
    for item in page.items:
        assert item == await engine.read_execution_info(item.execution_id)
    assert await engine.find_executions(limit=0) == Page(())


async def test_a_search_continues_where_it_stopped_despite_inserts_and_deletes(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    ids = [await submit(engine, namespace="n", tags={"a.b": "c"}, priority=p) for p in range(10)][::-1]
    for wanted in ({}, {"namespace": "n"}, {"tag": ("a.b", "c")}, {"states": ["waiting"]}):
        page = await engine.find_executions(**wanted, limit=4)  # type: ignore[arg-type]
        assert [item.execution_id for item in page.items] == ids[:4]
        await submit(engine, namespace="n", tags={"a.b": "c"}, execution_deadline_at=timedelta(0))  # newer: not seen
        rest = await engine.find_executions(**wanted, cursor=page.next_cursor, limit=100)  # type: ignore[arg-type]
        assert [item.execution_id for item in rest.items] == ids[4:]
        await engine.run_timers("deadline")
        while (await engine.find_executions(states=["expired"])).items:
            await clock.advance(days=2)
            await engine.trim_retention()
    # The place of the cursor may be purged: it carries its position itself.
    page = await engine.find_executions(namespace="n", limit=4)
    for gone in ids[3:5]:
        await engine.cancel(Operator(gone), "gone")
    await clock.advance(days=8)
    assert await engine.trim_retention() == 2
    rest = await engine.find_executions(namespace="n", cursor=page.next_cursor)
    assert [item.execution_id for item in rest.items] == ids[5:]


async def test_a_place_survives_as_text(engine: CheckedEngine) -> None:
    ids = [await submit(engine) for _ in range(3)]
    page = await engine.find_executions(limit=2)
    assert page.next_cursor is not None
    again = Place.decode(page.next_cursor.encode())
    assert again == page.next_cursor
    assert await _ids(engine.find_executions(cursor=again)) == [ids[0]]


async def test_unsuccessful_ends_are_listed_by_when_they_ended(engine: ff.Engine, clock: Clock) -> None:
    made, ended = [], []
    for number in range(12):
        made.append(await submit(engine, execution_kind="odd" if number % 2 else "even"))
        await clock.advance(seconds=1)
    middle = (await engine.read_execution(made[6])).created_at  # type: ignore[union-attr]
    for number in (5, 0, 11, 3, 8, 1, 2, 4, 6, 7, 9, 10):
        await engine.cancel(Operator(made[number]), "no")
        ended.append(made[number])
        if number % 3:  # several end at the same time
            await clock.advance(seconds=1)
    newest: list[ff.ExecutionId] = []
    cursor = None
    while True:
        page = await engine.find_executions(states=["cancelled", "failed"], order_by="ended", limit=5, cursor=cursor)
        newest += [one.execution_id for one in page.items]
        times = [one.completed_at for one in page.items]
        assert times == sorted(times, reverse=True)  # type: ignore[type-var]
        if (cursor := page.next_cursor) is None:
            break
    assert sorted(newest) == sorted(ended)
    assert newest[0] == ended[-1] and newest != await _ids(engine.find_executions(states=["cancelled"]))
    # The other filters are about the executions, not about their ends.
    assert set(await _ids(engine.find_executions(states=["cancelled"], order_by="ended", kinds=["odd"]))) == set(
        made[1::2]
    )
    for option, found in (("created_from", made[6:]), ("created_before", made[:6])):
        wanted = engine.find_executions(states=["cancelled"], order_by="ended", **{option: middle})  # type: ignore[arg-type]
        assert set(await _ids(wanted)) == set(found)
    # Replayed, it is no longer in the list; ended again, it is the first.
    await engine.replay_execution(ended[0])
    assert ended[0] not in await _ids(engine.find_executions(states=["cancelled"], order_by="ended"))
    await engine.cancel(Operator(ended[0]), "no")
    assert (await _ids(engine.find_executions(states=["cancelled"], order_by="ended")))[0] == ended[0]


async def test_more_ends_than_a_call_reads_at_once_are_in_their_order(engine: ff.Engine, clock: Clock) -> None:
    made = [await submit(engine) for _ in range(80)]
    for some in (made[20:], made[:20]):
        await clock.advance(seconds=1)
        await engine.cancel_many(some, "no")
    found: list[ff.ExecutionId] = []
    cursor = None
    while cursor is not None or not found:
        page = await engine.find_executions(states=["cancelled"], order_by="ended", limit=7, cursor=cursor)
        found += [one.execution_id for one in page.items]
        cursor = page.next_cursor
    assert (set(found[:20]), set(found[20:]), len(found)) == (set(made[:20]), set(made[20:]), 80)


MILLION = """
insert into flowfabric.lane (name, registered_at, registered_by) values ('l', now(), 'test');
insert into flowfabric.route (lane, kind, digest) values ('l', 'common', md5('')), ('l', 'rare', md5(''));
insert into flowfabric.execution
    (partition, id, route, created_at, namespace, creator, flow_id, payload, state, blocking_reason, pending, priority,
     tags, transitioned_at, mutated_at, completed_at)
select n % 256, ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid,
       (select id from flowfabric.route where kind = case when rare then 'rare' else 'common' end),
       at, case when rare then 'rare' else 'common' end, '',
       case when rare then '00000000-0000-0000-0000-000000000001'::uuid end, '\\x', state,
       case when state = 'waiting' then 'waiting_for_worker' end, case when state = 'waiting' then 'first' end,
       n % 3, case when rare then '{"t.a": "rare"}'::jsonb else '{"t.a": "common"}' end, at, at,
       case when state <> 'waiting' then at end
from (select n, n between 10 and 14 as rare, timestamptz '2026-01-01' + n * interval '1 second' as at,
             case when n between 20 and 24 then 'failed' when n % 2 = 0 then 'completed' else 'waiting' end as state
      from generate_series(1, 1000000) n) g;
insert into flowfabric.ready (route, rank, created_at, id, partition)
select route, 9000 - priority, created_at, id, partition from flowfabric.execution where state = 'waiting';
insert into flowfabric.unsuccessful (state, created_at, ended_at, id, partition)
select state, created_at, completed_at, id, partition from flowfabric.execution where state = 'failed';
insert into flowfabric.tag (digest, created_at, id, partition)
select flowfabric.tag_digest('t.a', tags ->> 't.a'), created_at, id, partition from flowfabric.execution
where namespace = 'rare' or id > '00000000-0000-7000-8000-0000000d0000';
update flowfabric.execution set state = 'active', blocking_reason = null, pending = null where id between
    '00000000-0000-7000-8000-000000000020' and '00000000-0000-7000-8000-000000000023';
delete from flowfabric.ready where id between
    '00000000-0000-7000-8000-000000000020' and '00000000-0000-7000-8000-000000000023';
insert into flowfabric.timer (kind, due_at, partitions, ids)
select 'lease', now() + interval '1 hour', array_agg(partition), array_agg(id) from flowfabric.execution
where id between '00000000-0000-7000-8000-000000000020' and '00000000-0000-7000-8000-000000000023';
analyze flowfabric.execution, flowfabric.ready, flowfabric.tag, flowfabric.unsuccessful, flowfabric.timer
"""
READ_SO_FAR = """
select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint as rows,
       sum(seq_scan) filter (where relname in ('execution', 'ready', 'tag'))::bigint as scans
from pg_stat_xact_user_tables where schemaname = 'flowfabric'
"""
FLOW_OF_RARE = FlowId(UUID(int=1))
START = datetime(2026, 1, 1, tzinfo=UTC)
# Per search: how many it must find on its first page, and how many rows it may look at for that.
SEARCHES: dict[str, tuple[dict[str, Any], int, int]] = {
    "nothing": ({}, 50, 1000),
    "rare kind": ({"kinds": ["rare"]}, 5, 100),
    "common kind": ({"kinds": ["common"]}, 50, 1000),
    "lane": ({"lane_ids": ["l"]}, 50, 1000),
    "unknown lane": ({"lane_ids": ["none"]}, 0, 10),
    "rare namespace": ({"namespace": "rare"}, 5, 100),
    "common namespace": ({"namespace": "common"}, 50, 1000),
    "rare tag": ({"tag": ("t.a", "rare")}, 5, 100),
    "common tag": ({"tag": ("t.a", "common")}, 50, 1000),
    "unknown tag": ({"tag": ("t.a", "none")}, 0, 10),
    "flow": ({"flow_id": FLOW_OF_RARE}, 5, 100),
    "rare ended state": ({"states": ["failed"]}, 5, 100),
    "rare running state": ({"states": ["active"]}, 4, 100),
    "absent states": ({"states": ["delayed", "rate_limited", "cancelled", "expired"]}, 0, 100),
    "common waiting": ({"states": ["waiting"]}, 50, 2000),
    "common completed": ({"states": ["completed"]}, 50, 2000),
    "oldest hour": ({"created_before": START + timedelta(seconds=11)}, 10, 1000),
    "newest second": ({"created_from": START + timedelta(seconds=1_000_000)}, 1, 100),
    "middle": (
        {
            "created_from": START + timedelta(seconds=5 * 10**5),
            "created_before": START + timedelta(seconds=5 * 10**5 + 9),
        },
        9,
        200,
    ),
    "rare in rare": ({"namespace": "rare", "states": ["waiting"], "kinds": ["rare"]}, 2, 2000),
    "nothing matches both": ({"namespace": "common", "kinds": ["rare"]}, 0, 61_000),
}


@pytest.mark.slow
async def test_a_search_among_a_million_executions_reads_few_of_them(
    request: pytest.FixtureRequest, server: str
) -> None:
    if request.node.callspec.params["server"] != "wheel":
        pytest.skip("once is enough")
    # In a database of its own: a million deleted rows would slow down every test that uses the same one afterwards.
    async with fresh_database(server) as dsn, await ff.Engine.connect(dsn) as engine:
        sql = await asyncpg.connect(dsn)
        await sql.execute("set synchronous_commit = off; set maintenance_work_mem = '256MB'")
        for statement in MILLION.split(";\n"):
            await sql.execute(statement)
        engine._fetch = lambda statement, *args, repeatable=False: sql.fetch(statement, *args)  # type: ignore[method-assign]

        async def cost(read: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
            async with sql.transaction():
                before = await sql.fetchrow(READ_SO_FAR)
                page = await read()
                after = await sql.fetchrow(READ_SO_FAR)
            assert after["scans"] == before["scans"]
            return page, after["rows"] - before["rows"]

        for name, (filters, expected, bound) in SEARCHES.items():
            page, rows = await cost(lambda f=filters: engine.find_executions(**f, limit=50))
            assert len(page.items) == expected, name
            assert rows <= bound, (name, rows)
            if expected < 50 and name != "nothing matches both":
                assert page.next_cursor is None, name
        # A page deep in the list costs what the first one does.
        deep = Place(START + timedelta(seconds=999), UUID(int=0), 0)
        page, rows = await cost(lambda: engine.find_executions(namespace="common", cursor=deep, limit=50))
        assert (len(page.items), rows <= 1000) == (50, True)
        # The end of an id reads the keys of its partition, a beginning one range of each partition.
        end, rows = await cost(lambda: engine.find_id("0000080007"))
        assert [one.id for one in end] == [UUID("00000000-0000-7000-8000-000000080007")]
        assert rows <= 5000
        _, rows = await cost(lambda: engine.find_id("ffffff", limit=10))  # may be either
        assert rows <= 5300
        middle = id_in(7, UUID("00000000-0000-7000-8000-000000080000"))
        page, rows = await cost(lambda: engine.list_executions(7, cursor=middle, limit=50))
        assert (len(page.items), rows <= 1000) == (50, True)
        await sql.close()
