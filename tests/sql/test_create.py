"""create_execution: what is refused in which order, what is a duplicate, and what is stored."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid1, uuid4

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres.create_call import CreateCall
from flowfabric.errors import StateError, ValidationFailed
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import FlowId, fit_partition, mint_uuid, partition_of_key
from flowfabric.values.lane import LaneState
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from tests.ids import home, id_in
from tests.support import WORKER, CheckedEngine, Clock, claim_one, submit, submit_member

pytestmark = pytest.mark.both_servers

FLOW = FlowId(UUID("11111111-1111-1111-1111-111111111111"))
DAY = timedelta(days=1)


def _key_home(namespace: str, key: str) -> int:
    return partition_of_key(namespace, key, 256)


async def _lanes(engine: ff.Engine) -> list[str]:
    return [lane.lane_id for lane in (await engine.list_lanes()).items]


async def test_a_new_execution_waits_for_its_first_attempt(engine: CheckedEngine, clock: Clock) -> None:
    before = await clock.now()
    created = await engine.create_execution(execution_kind="k")
    after = await clock.now()
    assert created == Created(created.execution_id, ff.State.WAITING)
    full = await engine.read_execution(created.execution_id)
    assert full is not None
    assert before < full.created_at < after
    assert full.created_at == full.last_transition_at == full.last_mutation_at
    assert (full.namespace, full.lane_id, full.execution_kind, full.creator_identity) == ("", "default", "k", "")
    assert (full.flow_id, full.idempotency_key, full.policy, full.tags) == (None, None, None, {})
    assert (full.priority, full.delay_until, full.deadline_at) == (0, None, None)
    assert (full.total_attempt_count, full.retry_count, full.replay_count, full.lease_reclaim_count) == (0, 0, 0, 0)
    assert (full.current_lease_epoch, full.current_attempt, full.current_attempt_index) == (0, None, None)
    assert (full.started_at, full.completed_at) == (None, None)
    vector = full.state_vector
    assert (vector.lifecycle_phase, vector.ownership_state) == ("runnable", "unowned")
    assert (vector.eligibility_state, vector.blocking_reason) == ("eligible_now", "waiting_for_worker")
    assert vector.attempt_state == "pending_first_attempt"
    assert (await engine.read_events()).items == []


async def test_everything_submitted_is_stored_as_it_came(engine: CheckedEngine) -> None:
    budgets = sorted([str(mint_uuid()), str(mint_uuid())])
    quota = str(mint_uuid())
    policy = {
        "priority": 3,
        "retry_policy": {"max_retries": 2},
        "budget_ids": budgets,
        "quota_policy_id": quota,
        "routing_requirements": {"required_capabilities": ["gpu", "arm", "gpu"], "isolation_level": "vm"},
        "made.up": {"kept": [1, None]},
        "fallback_policy": None,
    }
    tags = {"No Rule": "ü\n", "a.b": "", "": "empty key"}
    target = await submit(
        engine,
        execution_kind="kind ü",
        lane_id="~ lane",
        namespace="n\x01 ",
        input_payload=bytes(range(256)),
        payload_encoding="raw",
        creator_identity="me",
        tags=tags,
        policy=json.dumps(policy),
    )
    full = await engine.read_execution(target)
    assert full is not None
    assert (full.namespace, full.lane_id, full.execution_kind) == ("n\x01 ", "~ lane", "kind ü")
    assert (full.creator_identity, full.payload_encoding, full.tags) == ("me", "raw", tags)
    assert full.required_capabilities == ("arm", "gpu")
    assert full.budget_ids == tuple(map(UUID, budgets))
    assert full.quota_policy_id == UUID(quota)
    assert full.priority == 0
    del policy["fallback_policy"]
    assert full.policy == policy
    assert (await engine.read_execution_context(target)).input_payload == bytes(range(256))
    assert await engine.claim("~ lane", worker_id="w", worker_instance_id="w") is None
    claimed = await claim_one(engine, lane_id="~ lane", capabilities=["gpu", "arm", "x"])
    assert claimed.execution_id == target


@pytest.mark.parametrize(
    ("given", "stored"), [(-(2**31), 0), (-1, 0), (0, 0), (9000, 9000), (9001, 9000), (2**31 - 1, 9000)]
)
async def test_a_priority_is_clamped(engine: CheckedEngine, given: int, stored: int) -> None:
    full = await engine.read_execution(await submit(engine, priority=given))
    assert full is not None
    assert full.priority == stored


async def test_only_a_delay_into_the_future_delays(engine: CheckedEngine, clock: Clock) -> None:
    now = await clock.now()
    at_once: list[Any] = [now - DAY, now, timedelta(0), -DAY, datetime(1, 1, 2, tzinfo=UTC)]
    for given in at_once:
        created = await engine.create_execution(execution_kind="k", delay_until=given)
        assert created.public_state is ff.State.WAITING  # type: ignore[union-attr]
        full = await engine.read_execution(created.execution_id)
        assert full is not None
        assert (full.delay_until, full.blocking_detail) == (None, None)
    later = now + DAY
    created = await engine.create_execution(execution_kind="k", delay_until=later)
    assert created.public_state is ff.State.DELAYED  # type: ignore[union-attr]
    full = await engine.read_execution(created.execution_id)
    assert full is not None
    assert full.delay_until == later
    assert full.blocking_detail == later.astimezone(UTC).strftime("delayed until %Y-%m-%dT%H:%M:%S.") + (
        f"{later.microsecond // 1000:03d}Z"
    )
    assert full.state_vector.blocking_reason == "waiting_for_delay"
    relative = await engine.read_execution(await submit(engine, delay_until=DAY))
    assert relative is not None
    assert relative.delay_until == relative.created_at + DAY


async def test_a_delay_in_the_policy_counts_when_no_other_is_given(engine: CheckedEngine, clock: Clock) -> None:
    later = (await clock.now() + DAY).replace(microsecond=0)
    policy = ExecutionPolicy(delay_until=later)
    full = await engine.read_execution(await submit(engine, policy=policy))
    assert full is not None
    assert (full.public_state, full.delay_until) == (ff.State.DELAYED, later)
    own = await engine.read_execution(await submit(engine, policy=policy, delay_until=timedelta(0)))
    assert own is not None
    assert own.public_state is ff.State.WAITING


async def test_a_deadline_comes_from_the_argument_or_the_policy_and_may_be_past(
    engine: CheckedEngine, clock: Clock
) -> None:
    past = await clock.now() - DAY
    policy = ExecutionPolicy(timeout_policy=TimeoutPolicy(execution_deadline=60))
    full = await engine.read_execution(await submit(engine, policy=policy))
    assert full is not None
    assert full.deadline_at == full.created_at + timedelta(seconds=60)
    target = await submit(engine, policy=policy, execution_deadline_at=past)
    full = await engine.read_execution(target)
    assert full is not None
    assert (full.deadline_at, full.public_state) == (past, ff.State.WAITING)
    relative = await engine.read_execution(await submit(engine, execution_deadline_at=DAY))
    assert relative is not None
    assert relative.deadline_at == relative.created_at + DAY
    round_ = await engine.run_timers("deadline")
    assert round_.handled == 1
    assert await engine.read_execution_state(target) is ff.State.EXPIRED


# ---- duplicates


async def test_a_known_key_returns_the_existing_execution_and_changes_nothing(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    first = await submit(engine, idempotency_key="k", namespace="n")
    before = await _digest(sql)
    again = await engine.create_execution(
        execution_kind="other",
        lane_id="a new lane",
        idempotency_key="k",
        namespace="n",
        priority=5,
        tags={"a.b": "c"},
        delay_until=DAY,
        execution_deadline_at=DAY,
    )
    assert again == Duplicate(first)
    assert await _digest(sql) == before
    assert isinstance(await engine.create_execution(execution_kind="k", idempotency_key="k"), Created)
    assert isinstance(
        await engine.create_execution(execution_kind="k", idempotency_key="k", namespace="n\0"[:1] + "m"), Created
    )


async def test_a_key_outlives_the_end_and_the_purge_of_its_execution(engine: CheckedEngine, clock: Clock) -> None:
    policy = ExecutionPolicy(dedup_window=timedelta(days=9))
    first = await submit(engine, idempotency_key="k", policy=policy)
    await engine.cancel(Operator(first), "no")
    await clock.advance(days=8)
    assert await engine.trim_retention() == 1
    assert await engine.create_execution(execution_kind="k", idempotency_key="k") == Duplicate(first)


async def test_an_empty_key_is_no_key(engine: CheckedEngine) -> None:
    made = [await submit(engine, idempotency_key="") for _ in range(2)]
    assert len(set(made)) == 2
    full = await engine.read_execution(made[0])
    assert full is not None
    assert full.idempotency_key is None


@pytest.mark.parametrize(
    ("policy", "window"),
    [(None, DAY), (ExecutionPolicy(), DAY), (ExecutionPolicy(dedup_window=60), timedelta(seconds=60))],
)
async def test_a_key_matches_within_its_window_and_not_after(
    engine: CheckedEngine, clock: Clock, policy: Any, window: timedelta
) -> None:
    first = await submit(engine, idempotency_key="k", policy=policy)
    await clock.advance(seconds=window.total_seconds() - 5)
    assert await engine.create_execution(execution_kind="k", idempotency_key="k") == Duplicate(first)
    await clock.advance(seconds=5)
    second = await engine.create_execution(execution_kind="k", idempotency_key="k", policy=policy)
    assert isinstance(second, Created)
    assert second.execution_id != first
    assert await engine.create_execution(execution_kind="k", idempotency_key="k") == Duplicate(second.execution_id)


async def test_a_window_of_zero_records_the_key_and_never_matches(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    never = ExecutionPolicy(dedup_window=0)
    item = NewExecution(execution_kind="k", idempotency_key="k", policy=never)
    made = [await submit(engine, idempotency_key="k", policy=never) for _ in range(2)]
    made += [answer.execution_id for answer in await engine.create_many([item, item])]  # type: ignore[union-attr]
    assert len(set(made)) == 4
    assert await sql.fetchval("select id from flowfabric.idempotency where key = 'k'") == made[-1]
    full = await engine.read_execution(made[0])
    assert full is not None
    assert full.idempotency_key == "k"


async def test_within_a_batch_the_first_key_with_a_window_wins(engine: CheckedEngine) -> None:
    never = ExecutionPolicy(dedup_window=0)
    plain = NewExecution(execution_kind="k", idempotency_key="k")
    zero = NewExecution(execution_kind="k", idempotency_key="k", policy=never)
    answers = await engine.create_many([zero, plain, plain, zero])
    assert [type(answer) for answer in answers] == [Created, Created, Duplicate, Duplicate]
    existing = answers[1].execution_id  # type: ignore[union-attr]
    assert answers[2:] == [Duplicate(existing)] * 2  # type: ignore[arg-type]
    assert await engine.create_execution(execution_kind="k", idempotency_key="k") == Duplicate(existing)


async def test_a_known_id_is_a_duplicate_and_changes_nothing(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    first = await submit(engine, execution_id=id_in(7), tags={"a.b": "c"})
    before = await _digest(sql)
    again = await engine.create_execution(
        execution_kind="k", lane_id="new lane", execution_id=first, delay_until=DAY, tags={"x.y": "z"}
    )
    assert again == Duplicate(first)
    assert await _digest(sql) == before


async def test_a_known_id_under_a_new_key_does_not_take_the_key(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    first = await submit(engine, execution_id=id_in(_key_home("", "k")))
    before = await _digest(sql)
    again = await engine.create_execution(execution_kind="k", execution_id=first, idempotency_key="k")
    assert again == Duplicate(first)
    assert await _digest(sql) == before
    assert isinstance(await engine.create_execution(execution_kind="k", idempotency_key="k"), Created)


async def test_the_key_is_looked_up_before_the_id(engine: CheckedEngine) -> None:
    home = _key_home("", "k")
    known = await submit(engine, execution_id=id_in(home))
    keyed = await submit(engine, idempotency_key="k")
    assert await engine.create_execution(execution_kind="k", execution_id=known, idempotency_key="k") == Duplicate(
        keyed
    )


async def test_of_many_submitters_with_one_key_or_one_id_exactly_one_creates(plain_engine: ff.Engine) -> None:
    given = id_in(3)
    for fields in ({"idempotency_key": "k"}, {"execution_id": given}):
        answers = await asyncio.gather(
            *(plain_engine.create_execution(execution_kind="k", **fields) for _ in range(20))  # type: ignore[arg-type]
        )
        created = [answer for answer in answers if isinstance(answer, Created)]
        assert len(created) == 1
        assert {answer.execution_id for answer in answers} == {created[0].execution_id}


async def test_ids_that_differ_in_their_last_bits_alone_are_different_executions(engine: CheckedEngine) -> None:
    uuid = mint_uuid()
    ids = [id_in(partition, uuid) for partition in (1, 2, 3)]
    items = [NewExecution(execution_kind="k", execution_id=one, tags={"a.b": "c"}) for one in ids]
    assert await engine.create_many(items) == [Created(one, ff.State.WAITING) for one in ids]
    await engine.change_priority(ids[1], 5)
    await engine.cancel(Operator(ids[2]), "no")
    assert [(await claim_one(engine)).execution_id for _ in range(2)] == [ids[1], ids[0]]


# ---- partitions


async def test_the_partition_follows_the_flow_then_the_key_then_the_id(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    assert home(await submit(engine, flow_id=FLOW)) == home(FLOW) == 0x11
    assert home(await submit(engine, flow_id=FLOW, idempotency_key="k")) == 0x11
    assert home(await submit(engine, namespace="n", idempotency_key="k")) == _key_home("n", "k")
    await submit(engine)
    for given in (id_in(255), UUID(int=7), uuid4(), UUID(int=2**128 - 1)):
        assert await submit(engine, execution_id=ff.ExecutionId(given)) == given
    stored = await sql.fetch("select partition, id from flowfabric.execution")
    assert len(stored) == 8
    assert [row["partition"] for row in stored] == [home(row["id"]) for row in stored]


async def test_executions_of_one_call_share_a_partition(engine: CheckedEngine) -> None:
    made = await engine.create_many([NewExecution(execution_kind="k")] * 20)
    assert len({home(one.execution_id) for one in made}) == 1  # type: ignore[union-attr,arg-type]
    assert len({home(one) for one in await engine.create_alike(NewExecution(execution_kind="k"), [b"x"] * 20)}) == 1


async def test_a_child_lives_with_its_parent(engine: CheckedEngine) -> None:
    await submit(engine)
    parent = await claim_one(engine)
    plain = await engine.submit_child(parent.handle, "a", 0, NewExecution(execution_kind="c"))
    full = await engine.submit_child(parent.handle, "b", 0, NewExecution(execution_kind="c", priority=3))
    keyed = await engine.submit_child(parent.handle, "c", 0, NewExecution(execution_kind="c", idempotency_key="k"))
    assert home(plain.execution_id) == home(full.execution_id) == home(parent.execution_id) == home(keyed.execution_id)


@pytest.mark.parametrize("version", ["v1", "v4", "v7", "nil"])
async def test_an_id_of_any_version_may_lie_apart_from_its_key(engine: CheckedEngine, version: str) -> None:
    uuid = {"v1": uuid1, "v4": uuid4, "v7": mint_uuid, "nil": lambda: UUID(int=0)}[version]()
    given = ff.ExecutionId(fit_partition(uuid, (_key_home("n", "k") + 1) % 256, 256))
    fields: dict[str, Any] = {"execution_kind": "k", "namespace": "n", "idempotency_key": "k"}
    assert await submit(engine, execution_id=given, **fields) == given
    assert await engine.create_execution(**fields) == Duplicate(given)
    assert await engine.create_execution(execution_id=ff.ExecutionId(uuid4()), **fields) == Duplicate(given)
    bad = NewExecution(**fields, policy={"retry_policy": []})
    assert await engine.create_many([bad]) == [Duplicate(given)]
    parent = await _holder(engine)
    child = await engine.submit_child(parent.handle, "a", 0, NewExecution(**fields))
    assert child == Duplicate(given)
    (step,) = await engine.read_steps([parent.execution_id])
    assert step.child_id == given


async def _holder(engine: ff.Engine) -> Claimed:
    await submit(engine, lane_id="holder")
    return await claim_one(engine, lane_id="holder")


async def test_a_key_apart_from_its_id_is_swept_when_it_has_expired(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    given = id_in((_key_home("", "k") + 1) % 256)
    await submit(engine, execution_id=given, idempotency_key="k")
    await engine.cancel(Operator(given), "no")
    await engine.delete_execution(given)
    assert await engine.create_execution(execution_kind="k", idempotency_key="k") == Duplicate(given)
    await clock.advance(days=1, seconds=1)
    await engine.sweep()
    assert await sql.fetchval("select count(*) from flowfabric.idempotency") == 0
    assert isinstance(await engine.create_execution(execution_kind="k", idempotency_key="k"), Created)


async def test_an_id_is_minted_where_it_must_live(engine: CheckedEngine) -> None:
    assert home(engine.mint_id(flow_id=FLOW)) == 0x11
    assert home(engine.mint_id(namespace="n", idempotency_key="k")) == _key_home("n", "k")
    member = engine.mint_id(flow_id=FLOW, namespace="n", idempotency_key="k")
    assert await submit(engine, execution_id=member, flow_id=FLOW, idempotency_key="k") == member
    assert await submit(engine, execution_id=engine.mint_id()) is not None


async def test_a_flow_id_alone_makes_no_member(engine: CheckedEngine) -> None:
    await engine.create_flow(FLOW)
    alone = await submit(engine, flow_id=FLOW)
    member = await submit_member(engine, FLOW)
    assert await engine.resolve_execution_flow_id(alone) is None
    assert await engine.resolve_execution_flow_id(member) == FLOW
    assert [one.execution_id for one in await engine.list_flow_members(FLOW)] == [member]


async def test_a_key_is_scoped_to_its_flow(engine: CheckedEngine) -> None:
    member = await submit(engine, flow_id=FLOW, idempotency_key="k")
    assert await engine.create_execution(execution_kind="k", flow_id=FLOW, idempotency_key="k") == Duplicate(member)
    others = [
        await submit(engine, idempotency_key="k"),
        await submit(engine, flow_id=FlowId(mint_uuid()), idempotency_key="k"),
    ]
    assert len({member, *others}) == 3


async def test_an_id_in_another_partition_than_its_flow_is_refused(engine: CheckedEngine) -> None:
    for fields in ({}, {"idempotency_key": "k"}):
        with pytest.raises(ff.InvalidInput, match="mint_id") as refused:
            await engine.create_execution(execution_kind="k", execution_id=id_in(7), flow_id=FLOW, **fields)  # type: ignore[arg-type]
        assert refused.value.field == "execution_id"
    right = id_in(home(FLOW))
    assert await submit(engine, execution_id=right, flow_id=FLOW, idempotency_key="k") == right


async def test_the_form_of_the_reference_is_read_wherever_an_id_is_taken(engine: CheckedEngine) -> None:
    uuid = uuid4()
    form: Any = f"{{fp:{(home(uuid) + 1) % 256}}}:{uuid}"  # its number is not what counts
    made = await engine.create_execution(execution_kind="k", execution_id=form)
    assert made == Created(ff.ExecutionId(uuid), ff.State.WAITING)
    assert (await engine.read_execution(form)).execution_id == uuid  # type: ignore[union-attr]
    assert [one.id for one in await engine.find_id(form)] == [uuid]
    await engine.cancel(Operator(form), "no")
    flow_form: Any = f"{{fp:1}}:{FLOW}"
    await engine.create_flow(flow_form)
    assert (await engine.describe_flow(flow_form)).flow_id == FLOW  # type: ignore[union-attr]
    assert home(await submit(engine, flow_id=flow_form)) == home(FLOW)


# ---- the order of checks


async def test_the_first_problem_is_reported(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    known = await submit(engine, idempotency_key="k")
    for state in ("draining", "disabled"):
        await engine.set_lane_state("closed", state)
        bad_policy: dict[str, Any] = {"execution_kind": "k", "policy": {"max_replay_count": "many"}}
        bad_capability = {
            "execution_kind": "k",
            "policy": {"routing_requirements": {"required_capabilities": ["a,b"]}},
        }
        before = await _digest(sql)
        # 1 syntax before everything
        with pytest.raises(ff.InvalidInput) as syntax:
            await engine.create_execution(**bad_policy, lane_id="", idempotency_key="k")
        assert syntax.value.field == "lane_id"
        # 2 and 3 duplicates before lane and policy
        for fields in ({"idempotency_key": "k"}, {"execution_id": known}):
            for bad in (bad_policy, bad_capability):
                assert await engine.create_execution(**bad, lane_id="closed", **fields) == Duplicate(known)
        # 4 lane before policy
        for bad in (bad_policy, bad_capability, {"execution_kind": "k"}):
            with pytest.raises(StateError) as closed:
                await engine.create_execution(**bad, lane_id="closed", idempotency_key="new")
            assert closed.value.kind == "lane_closed"
        # 5 policy and capabilities
        for bad, kind in ((bad_policy, "invalid_policy_json"), (bad_capability, "invalid_capabilities")):
            with pytest.raises(ValidationFailed) as policy:
                await engine.create_execution(**bad, lane_id="unknown", idempotency_key="new")
            assert policy.value.kind == kind
        assert await _digest(sql) == before


async def test_a_refused_submission_does_not_keep_its_key(engine: CheckedEngine) -> None:
    await engine.set_lane_state("l", "disabled")
    with pytest.raises(StateError):
        await engine.create_execution(execution_kind="k", lane_id="l", idempotency_key="k")
    await engine.set_lane_state("l", "active")
    assert isinstance(await engine.create_execution(execution_kind="k", lane_id="l", idempotency_key="k"), Created)


async def test_a_paused_lane_takes_submissions(engine: CheckedEngine) -> None:
    await engine.set_lane_state("l", "paused")
    target = await submit(engine, lane_id="l")
    assert await engine.read_execution_state(target) is ff.State.WAITING


# ---- lanes


async def test_a_lane_is_registered_with_its_first_execution_and_not_by_a_duplicate(engine: CheckedEngine) -> None:
    await submit(engine, lane_id="first", idempotency_key="k")
    lane = (await engine.list_lanes()).items[0]
    assert (lane.lane_id, lane.state, lane.registered_by) == ("first", LaneState.ACTIVE, "create_execution")
    await engine.create_execution(execution_kind="k", lane_id="second", idempotency_key="k")
    assert await _lanes(engine) == ["first"]
    # Nor by a duplicate in a batch that creates something elsewhere.
    answers = await engine.create_many(
        [
            NewExecution(execution_kind="k", lane_id="third", idempotency_key="k"),
            NewExecution(execution_kind="k", lane_id="fourth"),
            NewExecution(execution_kind="k", lane_id="fifth", policy="bad"),
        ]
    )
    assert [type(answer) for answer in answers] == [Duplicate, Created, ValidationFailed]
    assert await _lanes(engine) == ["first", "fourth"]


async def test_a_lane_registered_in_a_transaction_that_rolls_back_is_not_there(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    transaction = sql.transaction()
    await transaction.start()
    await engine.create_execution(execution_kind="k", lane_id="l", connection=sql)
    assert await sql.fetchval("select name from flowfabric.lane") == "l"
    await transaction.rollback()
    assert await _lanes(engine) == []


# ---- batches


async def test_a_batch_succeeds_in_part_and_returns_verdicts_in_order(engine: CheckedEngine) -> None:
    known = await submit(engine, idempotency_key="known")
    await engine.set_lane_state("closed", "disabled")
    given = id_in(4)
    item = NewExecution
    answers: list[Any] = await engine.create_many(
        [
            item(execution_kind="a"),
            item(execution_kind="a", idempotency_key="known"),
            item(execution_kind="a", lane_id="closed"),
            item(execution_kind="a", execution_id=given, delay_until=DAY),
            item(execution_kind="a", execution_id=given),
            item(execution_kind="\0"),
            "nonsense",  # type: ignore[list-item]
            item(execution_kind="a", policy="bad"),
            item(execution_kind="a", idempotency_key="twice", tags={"a.b": "c"}),
            item(execution_kind="a", idempotency_key="twice", tags={"x.y": "z"}),
            item(execution_kind="b", lane_id="other", execution_deadline_at=DAY),
        ]
    )
    kinds = [answer.kind if isinstance(answer, ff.FlowFabricError) else type(answer).__name__ for answer in answers]
    assert kinds == [
        "Created", "Duplicate", "lane_closed", "Created", "Duplicate", "invalid_input", "invalid_input",
        "invalid_policy_json", "Created", "Duplicate", "Created",
    ]  # fmt: skip
    assert answers[1] == Duplicate(known)
    assert answers[3] == Created(given, ff.State.DELAYED)
    assert answers[4] == Duplicate(given)
    assert answers[9].execution_id == answers[8].execution_id
    snapshot = await engine.describe_execution(answers[8].execution_id)
    assert snapshot is not None
    assert snapshot.tags == {"a.b": "c"}
    assert len((await engine.find_executions()).items) == 5


async def test_a_batch_holds_up_to_a_thousand(plain_engine: ff.Engine) -> None:
    item = NewExecution(execution_kind="a")
    with pytest.raises(ff.InvalidInput) as refused:
        await plain_engine.create_many([item] * 1001)
    assert refused.value.field == "items"
    assert await plain_engine.create_many([]) == []
    answers = await plain_engine.create_many([item] * 1000)
    assert len({answer.execution_id for answer in answers if isinstance(answer, Created)}) == 1000


async def test_items_of_one_batch_are_claimed_in_order_of_priority(engine: CheckedEngine) -> None:
    answers = await engine.create_many(
        [NewExecution(execution_kind=kind, priority=p) for kind, p in (("a", 1), ("b", 3), ("a", 2))]
    )
    order = [(await claim_one(engine)).execution_id for _ in range(3)]
    assert order == [answers[place].execution_id for place in (1, 2, 0)]  # type: ignore[union-attr]


async def _digest(sql: asyncpg.Connection[Any]) -> dict[str, Any]:
    """What every table holds, but for the sleepers that come and go."""
    names = [
        row["relname"]
        for row in await sql.fetch(
            "select relname from pg_class where relnamespace = 'flowfabric'::regnamespace and relkind = 'r'"
            " and relname <> 'sleeper' order by relname"
        )
    ]
    return {
        name: await sql.fetchval(f"select md5(string_agg(t::text, '|' order by t::text)) from flowfabric.{name} t")
        for name in names
    }


@pytest.mark.parametrize(
    "policy",
    [
        5,
        {"timeout_policy": "x"},
        {"timeout_policy": {"attempt_timeout_ms": "x"}},
        {"timeout_policy": {"attempt_timeout_ms": "5 6"}},
        {"timeout_policy": {"attempt_timeout_ms": ""}},
        {"timeout_policy": {"attempt_timeout_ms": 1.5}},
        {"timeout_policy": {"attempt_timeout_ms": 10**18}},
        {"timeout_policy": {"attempt_timeout_ms": -1}},
        {"max_reclaim_count": "many"},
        {"max_replay_count": [1]},
        {"stream_policy": {"retention_ttl_ms": "9 days"}},
        {"suspension_policy": {"default_timeout_ms": True}},
        {"max_signals_per_execution": "x"},
        {"max_signals_per_execution": 10**30},
        {"retry_policy": "abc"},
        {"retry_policy": {"max_retries": {}}},
        {"retry_policy": {"retryable_categories": 5}},
        {"retry_policy": {"retryable_categories": None}},
        {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": "soon"}}},
        {"retry_policy": {"backoff": {"type": "exponential", "max_delay_ms": 10**300}}},
        {"retry_policy": {"backoff": {"type": "exponential", "multiplier": "e"}}},
        {"retry_policy": {"backoff": {"type": "exponential", "jitter": "perhaps"}}},
    ],
    ids=str,
)
async def test_a_policy_that_would_stop_others_is_refused_by_the_database(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], policy: Any
) -> None:
    """A user who may submit can call the functions without the checks of the engine."""
    await engine.create_execution(execution_kind="test")
    one = engine.mint_id()
    with pytest.raises(asyncpg.InvalidParameterValueError, match="of the policy is not"):
        await sql.execute(
            "select flowfabric.create_one('default', 'test', '', $1, $2, '', $3, null)",
            home(one),
            one,
            json.dumps(policy),
        )
    assert len(await engine.claim_many(**WORKER, limit=10)) == 1


@pytest.mark.parametrize("creators", [["ann"], ["ann"] * 3, ["ann", "", "bob"], ["", "", "bob"], ["", ""]])
async def test_each_execution_has_the_creator_of_its_item(engine: CheckedEngine, creators: list[str]) -> None:
    """The first call of a kind takes the long way through the database, the second the short one."""
    items = [NewExecution(execution_kind="new", creator_identity=one) for one in creators]
    for _ in range(2):
        made = [one.execution_id for one in await engine.create_many(items) if isinstance(one, Created)]
        stored = [await engine.read_execution(one) for one in made]
        assert [one and one.creator_identity for one in stored] == creators
    alike = await engine.create_alike(items[0], [b"1", b"2"])
    assert [one and one.creator_identity for one in [await engine.read_execution(one) for one in alike]] == (
        [creators[0]] * 2
    )


def test_a_creator_is_no_reason_to_leave_the_short_way() -> None:
    by_ann = NewExecution(execution_kind="test", creator_identity="ann")
    one = CreateCall([by_ann], 256).columns.one_plain
    assert one is not None
    assert one[-1] == "ann"
    assert CreateCall([by_ann] * 3, 256).columns.creators == ["ann"]
    assert CreateCall([by_ann, NewExecution(execution_kind="test")], 256).columns.creators == ["ann", ""]
    assert CreateCall([NewExecution(execution_kind="test")], 256).columns.creators is None


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_at": "20000-01-01"},
        {"delay_until": "4000-01-01 BC"},
        {"delay_until": "infinity"},
        {"delay_ms": -(10**17)},
        {"deadline_ms": 10**17},
        {"tags": '{"a": [[[[]]]]}'},
        {"tags": '{"a": 5}'},
        {"tags": "[]"},
        {"tags": '"x"'},
    ],
    ids=str,
)
async def test_what_not_every_reader_can_hold_is_refused_by_the_database(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], options: dict[str, Any]
) -> None:
    kinds = {"tags": "text", "delay_until": "timestamptz", "delay_ms": "bigint", "deadline_at": "timestamptz"}
    ((name, value),) = options.items()
    columns = ["tags", "policy", "limits", "delay_until", "delay_ms", "deadline_at", "deadline_ms"]
    given = dict.fromkeys(columns, "null") | {
        name: f"array['{value}']::{kinds.get(name, 'bigint')}[]"
        if isinstance(value, str)
        else f"array[{value}]::bigint[]"
    }
    one = engine.mint_id()
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"is not|are not"):
        await sql.execute(
            "select flowfabric.insert_executions(array[1], null, null, array[$1::int], array[$2::uuid], null, null,"
            " array[''::bytea], null, null, null, null,"
            f" {', '.join(given[column] for column in columns)}, now(), null, null, null)",
            home(one),
            one,
        )
