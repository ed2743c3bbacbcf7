"""Parents and children in the database: the relation, what is kept, what is cancelled, what a replay makes anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric._duties.child_cancel import ChildCancel
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric.errors import Conflict, InvalidInput, StateError
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import Duplicate, NewExecution
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import FlowId, fit_partition, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.step import NewStep
from tests.ids import home, id_in
from tests.interleave import Party, Stage, waiting
from tests.sql.cases import World
from tests.support import claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = timedelta(days=300)
SHORT = ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(seconds=2)))


async def parent_of(engine: ff.Engine, **fields: Any) -> Claimed:
    await submit(engine, **{"execution_kind": "parent", "lane_id": "parents", **fields})
    return await claim_one(engine, lane_id="parents", lease_ttl=LONG)


async def child_of(
    engine: ff.Engine, parent: Claimed, n: int = 0, *, detached: bool = False, **fields: Any
) -> ff.ExecutionId:
    item = NewExecution(**{"execution_kind": "child", "lane_id": "children", "policy": SHORT, **fields})
    return (await engine.submit_child(parent.handle, "submit child", n, item, detached=detached)).execution_id


async def flow_of(
    engine: ff.Engine, parent: Claimed, n: int = 0, *, nodes: Sequence[str] = ("a", "b"), **options: Any
) -> FlowId:
    seed = mint_uuid()
    flow_id = options.pop("flow_id", FlowId(fit_partition(seed, home(parent.execution_id), 256)))
    made = await engine.submit_child_flow(
        parent.handle,
        "flow f",
        n,
        [
            NewNode(name=name, execution=NewExecution(execution_kind=name, lane_id="members", policy=SHORT))
            for name in nodes
        ],
        flow_id=flow_id,
        seed=seed,
        flow_kind="f",
        **options,
    )
    assert made is not None
    return flow_id


async def end(engine: ff.Engine, lane: str, count: int = 1, result: bytes = b"1") -> None:
    for _ in range(count):
        held = await claim_one(engine, lane_id=lane, lease_ttl=LONG)
        await engine.complete(held.handle, result)


async def remember(engine: ff.Engine, parent: Claimed, name: str, **fields: Any) -> None:
    (answer,) = await engine.record_steps([(parent.handle, NewStep(name=name, kind="result", **fields))])
    assert answer is None


async def settle(engine: ff.Engine) -> None:
    """Let the duties that cancel children and members go idle."""
    while await ChildCancel(engine).run_once() + await FlowCancel(engine).run_once():
        pass


async def state(engine: ff.Engine, execution_id: ff.ExecutionId) -> str | None:
    found = await engine.read_execution(execution_id)
    return None if found is None else found.public_state.value


# ---- the relation


async def test_a_child_knows_its_parent_and_a_submission_from_outside_has_none(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    found = await world.record(child)
    assert (found.parent_id, found.creator_identity) == (held.execution_id, "")
    assert (await world.record(held.execution_id)).parent_id is None
    info = await world.engine.read_execution_info(child)
    assert info is not None
    assert info.parent_id == held.execution_id
    await end(world.engine, "children")
    (event,) = [one for one in (await world.engine.list_events(child)).items if one.outcome]
    assert event.parent_id == held.execution_id
    (own,) = (await world.engine.list_events(held.execution_id)).items
    assert own.parent_id is None


async def test_a_known_key_and_a_detached_submission_make_no_child(world: World) -> None:
    standing = await submit(world.engine, lane_id="children", execution_kind="child", idempotency_key="k")
    held = await parent_of(world.engine)
    assert await child_of(world.engine, held, idempotency_key="k") == standing
    loose = await child_of(world.engine, held, 1, detached=True)
    flow = await flow_of(world.engine, held, detached=True)
    assert (await world.record(standing)).parent_id is None
    assert (await world.record(loose)).parent_id is None
    assert await world.engine.list_children(held.execution_id) == []
    steps = await world.engine.read_steps([held.execution_id])
    assert [(one.child_id, one.flow_id, one.outcome) for one in steps] == [
        (standing, None, "known"),
        (loose, None, None),
        (None, flow, None),
    ]
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await settle(world.engine)
    assert [await state(world.engine, one) for one in (standing, loose)] == ["waiting", "waiting"]
    assert [member.state for member in await world.engine.list_flow_members(flow)] == ["waiting", "waiting"]


async def test_children_live_in_the_partition_of_their_parent(world: World) -> None:
    held = await parent_of(world.engine)
    there = home(held.execution_id)
    keyed = await child_of(world.engine, held, 1, idempotency_key="k", namespace="n")
    given = await child_of(world.engine, held, 2, execution_id=world.engine.mint_id(parent_id=held.execution_id))
    assert [home(one) for one in (await child_of(world.engine, held), keyed, given)] == [there] * 3
    assert await world.engine.create_execution(execution_kind="child", idempotency_key="k", namespace="n") == Duplicate(
        keyed
    )
    before = await world.picture(held.execution_id)
    with pytest.raises(InvalidInput, match="partition of its parent") as caught:
        await child_of(world.engine, held, 3, execution_id=id_in((there + 1) % 256))
    assert caught.value.field == "execution_id"
    assert await world.picture(held.execution_id) == before


async def test_a_known_key_can_be_refused_and_nothing_is_stored(world: World) -> None:
    standing = await submit(world.engine, lane_id="children", execution_kind="child", idempotency_key="k")
    held = await parent_of(world.engine)
    item = NewExecution(execution_kind="child", idempotency_key="k")
    before = await world.picture(held.execution_id)
    with pytest.raises(Conflict) as caught:
        await world.engine.submit_child(held.handle, "child", 0, item, refuse_known=True)
    assert caught.value.existing == str(standing)
    assert await world.picture(held.execution_id) == before


async def test_a_flow_and_its_step_are_stored_together_and_once(world: World) -> None:
    held = await parent_of(world.engine)
    flow = await flow_of(world.engine, held)
    (step,) = await world.engine.read_steps([held.execution_id])
    assert (step.kind, step.name, step.flow_id, step.child_id) == ("submit", "flow f", flow, None)
    assert step.result is not None
    again = await world.engine.submit_child_flow(
        held.handle,
        "flow f",
        0,
        [NewNode(name="x", execution=NewExecution(execution_kind="x"))],
        flow_id=FlowId(mint_uuid()),
        seed=mint_uuid(),
    )
    assert again is None
    assert await world.sql.fetchval("select count(*) from flowfabric.flow") == 1
    await world.engine.cancel(Operator(held.execution_id), "enough")
    with pytest.raises(ff.FlowFabricError):
        await flow_of(world.engine, held, 1)
    assert await world.sql.fetchval("select count(*) from flowfabric.flow") == 1


async def test_children_are_listed_in_order_and_as_a_tree(world: World) -> None:
    top = await parent_of(world.engine)
    first = await child_of(world.engine, top)
    flow = await flow_of(world.engine, top)
    middle = await claim_one(world.engine, lane_id="children", lease_ttl=LONG)
    assert middle.execution_id == first
    below = await child_of(world.engine, middle, lane_id="below")
    member = await claim_one(world.engine, lane_id="members", lease_ttl=LONG)
    deepest = await child_of(world.engine, member, lane_id="below")
    direct = await world.engine.list_children(top.execution_id)
    assert [(one.kind, one.id, one.name, one.parent_id) for one in direct] == [
        ("execution", first, "child", top.execution_id),
        ("flow", flow, "f", top.execution_id),
    ]
    tree = await world.engine.list_children([top.execution_id], deep=True)
    assert [(one.depth, one.kind, one.name, one.node, one.parent_id) for one in tree] == [
        (1, "execution", "child", None, top.execution_id),
        (1, "flow", "f", None, top.execution_id),
        (2, "execution", "child", None, first),
        (2, "execution", "a", "a", flow),
        (2, "execution", "b", "b", flow),
        (3, "execution", "child", None, member.execution_id),
    ]
    assert {one.id for one in tree} >= {below, deepest}
    assert len(await world.engine.list_children([top.execution_id], deep=True, limit=3)) == 3
    found = await world.engine.find_executions(parent_id=top.execution_id)
    assert [one.execution_id for one in found.items] == [first]
    nothing = await world.engine.find_executions(parent_id=top.execution_id, states=["completed"])
    assert nothing.items == []


async def test_lists_have_the_node_and_the_beginning_of_the_arguments(world: World) -> None:
    held = await parent_of(world.engine, input_payload=b'{"n": 1}')
    await flow_of(world.engine, held, nodes=["a"])
    await submit(world.engine, lane_id="sealed", input_payload=b"\x00secret", payload_encoding="json+aes")
    await submit(world.engine, lane_id="long", input_payload=b'{"text": "' + b"x" * 500 + b'"}')
    found = {one.lane_id: one for one in (await world.engine.find_executions()).items}
    assert (found["parents"].node, found["parents"].arguments) == ("", '{"n": 1}')
    assert found["members"].node == "a"
    assert found["sealed"].arguments == ""
    assert found["long"].arguments.startswith('{"text": "xxx')
    assert len(found["long"].arguments) == 120


# ---- what is kept


async def _recorded(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await remember(world.engine, held, f"result {child}", result=b"1")


async def _failure_recorded(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await remember(world.engine, held, f"result {child}", result=b"1", error='{"type": "failed"}')


async def _another_recorded(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await remember(world.engine, held, f"result {uuid4()}", result=b"1")


async def _nothing(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    pass


async def _failed(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await world.engine.fail(held.handle, "boom", failure_class="permanent")


async def _completed(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await world.engine.complete(held.handle, b"1")


async def _cancelled(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await world.engine.cancel(Operator(held.execution_id), "enough")


async def _deleted(world: World, held: Claimed, child: ff.ExecutionId) -> None:
    await world.engine.complete(held.handle, b"1")
    await world.engine.delete_execution(held.execution_id)


KEPT = {
    _nothing: True,
    _recorded: False,
    _failure_recorded: True,
    _another_recorded: True,
    _failed: True,
    _completed: True,
    _cancelled: True,
    _deleted: False,
}


@pytest.mark.parametrize("then", KEPT)
async def test_a_child_is_kept_until_its_result_is_recorded_or_its_parent_is_gone(world: World, then: Any) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    loose = await child_of(world.engine, held, 1, detached=True, lane_id="loose")
    await end(world.engine, "children")
    await end(world.engine, "loose")
    await then(world, held, child)
    await world.clock.advance(seconds=1)
    await world.engine.trim_retention()
    assert await state(world.engine, child) == await state(world.engine, loose) == "completed"  # the border
    await world.clock.advance(seconds=2)
    await world.engine.trim_retention()
    assert await state(world.engine, loose) is None
    assert (await state(world.engine, child) is not None) is KEPT[then]
    if await state(world.engine, held.execution_id) == "active":
        await remember(world.engine, held, f"result {child}", n=1, result=b"1")
        await world.clock.advance(days=1)
        await world.engine.trim_retention()
        assert await state(world.engine, child) is None


@pytest.mark.parametrize("then", KEPT)
async def test_a_flow_is_kept_until_its_results_are_recorded_or_its_parent_is_gone(world: World, then: Any) -> None:
    held = await parent_of(world.engine)
    flow = await flow_of(world.engine, held)
    await end(world.engine, "members", 2)
    await then(world, held, f"of flow {flow}")
    await world.clock.advance(days=1)
    await world.engine.trim_retention()
    assert bool(await world.engine.list_flow_members(flow)) is KEPT[then]
    assert (await world.engine.describe_flow(flow) is not None) is KEPT[then]


async def test_everything_is_deleted_in_the_end(world: World) -> None:
    """The parent by its own retention, then its children, flows and grandchildren, each once nothing needs it."""
    held = await parent_of(world.engine)
    await child_of(world.engine, held)
    middle = await claim_one(world.engine, lane_id="children", lease_ttl=LONG)
    await child_of(world.engine, middle, lane_id="below")
    await flow_of(world.engine, middle)
    await end(world.engine, "below")
    await end(world.engine, "members", 2)
    await world.engine.complete(middle.handle, b"1")
    await world.clock.advance(days=90)
    await world.engine.trim_retention()
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 5
    await world.engine.complete(held.handle, b"1")
    for _ in range(12):
        await world.clock.advance(days=1)
        await world.engine.trim_retention()
    for table in ("execution", "flow", "step", "child_cancel"):
        assert await world.sql.fetchval(f"select count(*) from flowfabric.{table}") == 0, table


async def test_delete_of_a_needed_child_names_the_execution_that_needs_it(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    flow = await flow_of(world.engine, held)
    await end(world.engine, "children")
    await end(world.engine, "members", 2)
    calls: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("execution_needed", lambda: world.engine.delete_execution(child)),
        ("flow_needed", lambda: world.engine.delete_flow(flow)),
    ]
    for kind, call in calls:
        with pytest.raises(StateError, match=f"{held.execution_id} .active.") as caught:
            await call()
        assert caught.value.kind == kind
    await remember(world.engine, held, f"result {child}", result=b"1")
    await remember(world.engine, held, f"result of flow {flow}", result=b"1")
    for _, call in calls:
        await call()
    assert await state(world.engine, child) is None
    assert await world.engine.describe_flow(flow) is None


async def test_redacting_a_needed_child_names_the_execution_that_needs_it(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    flow = await flow_of(world.engine, held)
    await end(world.engine, "children")
    await end(world.engine, "members", 2)
    member = (await world.engine.list_flow_members(flow))[0].execution_id
    for one in (child, member):
        before = await world.picture(one)
        with pytest.raises(StateError, match=f"{held.execution_id} .active.") as caught:
            await world.engine.redact_execution(one)
        assert caught.value.kind == "execution_needed"
        assert await world.picture(one) == before
    await remember(world.engine, held, f"result {child}", result=b"1")
    await remember(world.engine, held, f"result of flow {flow}", result=b"1")
    for one in (child, member):
        await world.engine.redact_execution(one)
        assert (await world.engine.read_outcomes([one]))[one].result_encoding == "redacted"


@pytest.mark.parametrize("how", ["completed", "failed", "failed and redacted"])
async def test_a_parent_that_cannot_read_again_needs_no_child(world: World, how: str) -> None:
    held = await parent_of(world.engine)
    kept = [await child_of(world.engine, held), await child_of(world.engine, held, 1)]
    await end(world.engine, "children", 2)
    await ENDS[how.partition(" ")[0]](world, held)
    if how == "failed and redacted":
        await world.engine.redact_execution(held.execution_id)
    for call, child in zip((world.engine.redact_execution, world.engine.delete_execution), kept, strict=True):
        if how == "failed":
            with pytest.raises(StateError, match="execution_needed"):
                await call(child)
        else:
            await call(child)


async def test_the_children_of_a_completed_parent_can_be_deleted(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    await end(world.engine, "children")
    await world.engine.complete(held.handle, b"1")
    await world.engine.delete_execution(child)
    assert await state(world.engine, child) is None


# ---- what is cancelled


async def _expire(world: World, held: Claimed) -> None:
    await world.clock.advance(hours=2)
    await world.engine.run_timers("deadline")


ENDS: dict[str, Callable[[World, Claimed], Awaitable[Any]]] = {
    "cancelled": lambda w, held: w.engine.cancel(Operator(held.execution_id), "enough"),
    "cancelled by its handler": lambda w, held: w.engine.cancel(held.handle, "enough"),
    "expired": _expire,
    "completed": lambda w, held: w.engine.complete(held.handle, b"1"),
    "failed": lambda w, held: w.engine.fail(held.handle, "boom", failure_class="permanent"),
    "cancelled alone": lambda w, held: w.engine.cancel(Operator(held.execution_id), "enough", keep_children=True),
}


@pytest.mark.parametrize("how", ENDS)
async def test_only_a_cancelled_or_expired_parent_takes_its_children_with_it(world: World, how: str) -> None:
    deadline = timedelta(hours=1) if how == "expired" else None
    held = await parent_of(world.engine, execution_deadline_at=deadline)
    waits = await child_of(world.engine, held)
    await child_of(world.engine, held, 1, lane_id="running")
    runs = await claim_one(world.engine, lane_id="running", lease_ttl=LONG)
    done = await child_of(world.engine, held, 2, lane_id="done")
    await end(world.engine, "done")
    flow = await flow_of(world.engine, held)
    below = await child_of(world.engine, runs, lane_id="below")
    await ENDS[how](world, held)
    await settle(world.engine)
    word = how.split()[0]
    takes = word in ("cancelled", "expired") and how != "cancelled alone"
    assert await state(world.engine, done) == "completed"
    for one in (waits, runs.execution_id, below):
        found = await world.record(one)
        assert (found.public_state.value == "cancelled") is takes
        if takes:
            of = runs.execution_id if one == below else held.execution_id
            end_of = "cancelled" if one == below else word
            assert (found.cancelled_by, found.cancellation_reason) == ("parent", f"parent {of} was {end_of}")
    header = await world.engine.describe_flow(flow)
    assert header is not None
    assert header.public_flow_state == ("cancelled" if takes else "open")
    members = {member.state.value for member in await world.engine.list_flow_members(flow)}
    assert members == {"cancelled" if takes else "waiting"}
    if takes:
        assert header.cancel_reason == f"parent {held.execution_id} was {word}"
    assert await world.sql.fetchval("select count(*) from flowfabric.child_cancel") == 0


async def test_a_skipped_parent_has_no_children_to_cancel_and_a_cancelled_flow_takes_those_of_its_members(
    world: World,
) -> None:
    flow = FlowId(mint_uuid())
    await world.engine.submit_flow(
        [NewNode(name="m", execution=NewExecution(execution_kind="m", lane_id="parents"))], flow_id=flow
    )
    member = await claim_one(world.engine, lane_id="parents", lease_ttl=LONG)
    child = await child_of(world.engine, member)
    await world.engine.cancel_flow(flow, wait=True)
    await settle(world.engine)
    assert await state(world.engine, child) == "cancelled"


async def test_a_thousand_children_are_cancelled_in_chunks_and_none_is_forgotten(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    held = await parent_of(plain_engine)
    for n in range(1000):
        await child_of(plain_engine, held, n)
    assert (await plain_engine.cancel(Operator(held.execution_id), "enough")).has_children
    chunks = []
    while (done := await plain_engine.cancel_children(held.execution_id, limit=300)).parent_id is not None:
        chunks.append(done.cancelled)
    assert sum(chunks) == 1000
    assert max(chunks) == 300
    assert await sql.fetchval("select count(*) from flowfabric.execution where completed_at is null") == 0
    assert await plain_engine.audit(events=False) == []


async def test_a_locked_child_is_cancelled_later(world: World, stage: Stage) -> None:
    world.engine.checking = False
    held = await parent_of(world.engine)
    children = [await child_of(world.engine, held, n) for n in range(3)]
    await world.engine.cancel(Operator(held.execution_id), "enough")
    other = await asyncpg.connect(world.dsn)
    try:
        async with other.transaction():
            await other.execute("select from flowfabric.execution where id = $1 for update", children[1])
            assert (await world.engine.cancel_children()).cancelled == 2
            assert (await world.engine.cancel_children()).cancelled == 0
        done = [(await world.engine.cancel_children()).cancelled for _ in range(2)]
        assert sum(done) == 1
    finally:
        await other.close()
    assert {await state(world.engine, one) for one in children} == {"cancelled"}
    assert await world.sql.fetchval("select count(*) from flowfabric.child_cancel") == 0


# ---- replay


async def test_a_replay_keeps_finished_children_and_makes_cancelled_ones_anew(world: World) -> None:
    held = await parent_of(world.engine)
    done = await child_of(world.engine, held)
    await end(world.engine, "children")
    open_one = await child_of(world.engine, held, 1, idempotency_key="k")
    flow = await flow_of(world.engine, held)
    known = await submit(world.engine, lane_id="other", execution_kind="child", idempotency_key="other")
    assert await child_of(world.engine, held, 2, idempotency_key="other") == known
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await settle(world.engine)
    await world.engine.cancel(Operator(known), "enough")
    await world.engine.replay_execution(held.execution_id)
    again = await claim_one(world.engine, lane_id="parents", lease_ttl=LONG)
    assert [one.child_id for one in await world.engine.read_steps([held.execution_id])] == [done, known]
    assert await child_of(world.engine, again) == done
    renewed = await child_of(world.engine, again, 1, idempotency_key="k")
    assert renewed not in (open_one, done)
    assert await state(world.engine, renewed) == "waiting"
    assert await flow_of(world.engine, again) != flow


async def test_a_replay_keeps_children_that_were_not_cancelled_yet(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await world.engine.replay_execution(held.execution_id)
    await settle(world.engine)
    again = await claim_one(world.engine, lane_id="parents", lease_ttl=LONG)
    assert await child_of(world.engine, again) == child
    assert await state(world.engine, child) == "waiting"


async def test_a_parent_cancelled_alone_and_replayed_can_be_cancelled_with_them(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    await world.engine.cancel(Operator(held.execution_id), "enough", keep_children=True)
    await settle(world.engine)
    assert await state(world.engine, child) == "waiting"
    await world.engine.replay_execution(held.execution_id)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await settle(world.engine)
    assert await state(world.engine, child) == "cancelled"


async def _cancelled_flow(world: World, held: Claimed) -> FlowId:
    """A flow that is cancelled with its parent; both of its members wait."""
    flow = await flow_of(world.engine, held)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await settle(world.engine)
    return flow


async def _members(engine: ff.Engine, flow: FlowId) -> list[str]:
    return [member.state.value for member in await engine.list_flow_members(flow)]


async def _finished_and_closed(world: World, held: Claimed) -> FlowId:
    flow = await flow_of(world.engine, held)
    await end(world.engine, "members", 2)
    await world.engine.cancel_flow(flow, wait=True)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    return flow


async def _finished_after_the_mark(world: World, held: Claimed) -> FlowId:
    """Its last member completes between the header, which marks it, and its own cancellation."""
    flow = await flow_of(world.engine, held, nodes=["a"])
    running = await claim_one(world.engine, lane_id="members", lease_ttl=LONG)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await ChildCancel(world.engine).run_once()
    await world.engine.complete(running.handle, b"1")
    return flow


async def _revived_and_finished(world: World, held: Claimed) -> FlowId:
    flow = await _cancelled_flow(world, held)
    for member in await world.engine.list_flow_members(flow):
        await world.engine.replay_execution(member.execution_id)
    await end(world.engine, "members", 2)
    return flow


async def _recorded_then_cancelled(world: World, held: Claimed) -> FlowId:
    """Its results are recorded; then a member is replayed, and cancelled with the flow."""
    flow = await flow_of(world.engine, held)
    await end(world.engine, "members", 2)
    await remember(world.engine, held, f"result of flow {flow}", result=b"1")
    await world.engine.replay_execution((await world.engine.list_flow_members(flow))[0].execution_id)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    return flow


async def _lost_a_race(world: World, held: Claimed) -> FlowId:
    flow = await flow_of(world.engine, held)
    await end(world.engine, "members", 1)
    (live,) = [m for m in await world.engine.list_flow_members(flow) if m.state.value == "waiting"]
    await world.engine.cancel(Operator(live.execution_id), "sibling_quorum_satisfied")
    await world.engine.cancel_flow(flow, wait=True)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    return flow


FINISHED = [
    _finished_and_closed,
    _finished_after_the_mark,
    _revived_and_finished,
    _recorded_then_cancelled,
    _lost_a_race,
]


@pytest.mark.parametrize("how", FINISHED)
async def test_a_replay_keeps_a_flow_whose_members_finished_whatever_its_header_says(world: World, how: Any) -> None:
    held = await parent_of(world.engine)
    flow = await how(world, held)
    await settle(world.engine)
    await world.engine.replay_execution(held.execution_id)
    steps = await world.engine.read_steps([held.execution_id])
    assert [one.flow_id for one in steps if one.kind == "submit"] == [flow]
    assert {one.is_stray for one in steps} == {False}


async def test_a_recorded_result_of_a_child_is_kept_even_if_the_child_was_cancelled_later(world: World) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    await end(world.engine, "children")
    await remember(world.engine, held, f"result {child}", result=b"1")
    await world.engine.replay_execution(child)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await settle(world.engine)
    assert await state(world.engine, child) == "cancelled"
    await world.engine.replay_execution(held.execution_id)
    assert [one.kind for one in await world.engine.read_steps([held.execution_id])] == ["submit", "result"]


async def test_a_replay_finishes_the_cancellation_of_flows_that_it_makes_anew(world: World) -> None:
    """Nothing of the old flow may complete beside the new one."""
    held = await parent_of(world.engine)
    flow = await flow_of(world.engine, held)
    running = await claim_one(world.engine, lane_id="members", lease_ttl=LONG)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await ChildCancel(world.engine).run_once()
    assert sorted(await _members(world.engine, flow)) == ["active", "waiting"]
    await world.engine.replay_execution(held.execution_id)
    assert await _members(world.engine, flow) == ["cancelled", "cancelled"]
    assert await world.engine.read_steps([held.execution_id]) == []
    with pytest.raises(ff.FlowFabricError):
        await world.engine.complete(running.handle, b"1")


async def test_a_flow_that_ended_is_not_closed_when_its_parent_is_cancelled(stage: Stage, parties: list[Party]) -> None:
    one, two = parties
    held = await parent_of(one)
    flow = await flow_of(one, held, nodes=["a"])
    running = await claim_one(one, lane_id="members", lease_ttl=LONG)
    await two.cancel(Operator(held.execution_id), "enough")
    await two.cancel_children()
    await one.begin()
    await one.complete(running.handle, b"1")
    cancel = await waiting(stage.watch, two, two.cancel_children(), behind=one)
    await one.commit()
    assert (await cancel).cancelled == 0
    await settle(two)
    header = await two.describe_flow(flow)
    assert header is not None
    assert header.public_flow_state == "open"
    await stage.audit()


@pytest.mark.parametrize("by", ["handler", "another handler", "operator"])
async def test_a_replay_leaves_alone_what_the_handler_cancelled_itself(world: World, by: str) -> None:
    held = await parent_of(world.engine)
    child = await child_of(world.engine, held)
    flow = await flow_of(world.engine, held)
    caller = {"handler": held.execution_id, "another handler": child, "operator": None}[by]
    await world.engine.cancel(Operator(child), "lost", by=caller)
    await world.engine.cancel_flow(flow, reason="lost", wait=True, requester=str(caller or ""))
    expected = "handler" if by == "handler" else "operator_override"
    assert (await world.record(child)).cancelled_by == expected
    for member in await world.engine.list_flow_members(flow):
        assert (await world.record(member.execution_id)).cancelled_by == expected
    await world.engine.fail(held.handle, "boom", failure_class="permanent")
    await world.engine.replay_execution(held.execution_id)
    kept = [one.child_id or one.flow_id for one in await world.engine.read_steps([held.execution_id])]
    assert kept == ([child, flow] if by == "handler" else [])


# ---- flows that were closed before


async def _closed_only(world: World, held: Claimed) -> FlowId:
    flow = await flow_of(world.engine, held)
    await world.engine.cancel_flow(flow, policy="flow_only")
    return flow


async def _running_spared(world: World, held: Claimed) -> FlowId:
    flow = await flow_of(world.engine, held)
    await claim_one(world.engine, lane_id="members", lease_ttl=LONG)
    await world.engine.cancel_flow(flow, policy="cancel_pending", wait=True)
    return flow


async def _revived(world: World, held: Claimed) -> FlowId:
    flow = await flow_of(world.engine, held)
    await world.engine.cancel_flow(flow, wait=True)
    for member in await world.engine.list_flow_members(flow):
        await world.engine.replay_execution(member.execution_id)
    return flow


@pytest.mark.parametrize("how", [_closed_only, _running_spared, _revived])
async def test_a_cancelled_parent_takes_the_live_members_of_a_closed_flow_with_it(world: World, how: Any) -> None:
    held = await parent_of(world.engine)
    flow = await how(world, held)
    assert {"waiting", "active"} & set(await _members(world.engine, flow))
    await world.engine.cancel(Operator(held.execution_id), "enough")
    await settle(world.engine)
    assert await _members(world.engine, flow) == ["cancelled", "cancelled"]
    assert await world.sql.fetchval("select count(*) from flowfabric.child_cancel") == 0
    await world.engine.replay_execution(held.execution_id)
    assert await world.engine.read_steps([held.execution_id]) == []


async def test_members_of_a_closed_flow_are_cancelled_in_chunks_and_locked_ones_later(world: World) -> None:
    world.engine.checking = False
    held = await parent_of(world.engine)
    flow = await flow_of(world.engine, held, nodes=list("abcde"))
    await world.engine.cancel_flow(flow, policy="flow_only")
    await world.engine.cancel(Operator(held.execution_id), "enough")
    first = min(member.execution_id for member in await world.engine.list_flow_members(flow))
    other = await asyncpg.connect(world.dsn)
    try:
        async with other.transaction():
            await other.execute("select from flowfabric.execution where id = $1 for update", first)
            done = [await world.engine.cancel_children(limit=2) for _ in range(8)]
            assert max(one.cancelled for one in done) == 2
            assert sum(one.cancelled for one in done) == 4
        await settle(world.engine)
    finally:
        await other.close()
    assert await _members(world.engine, flow) == ["cancelled"] * 5
    assert await world.sql.fetchval("select count(*) from flowfabric.child_cancel") == 0
    assert await world.engine.audit() == []


@pytest.mark.parametrize("how", ["flow_only", "revived"])
async def test_the_audit_finds_live_members_of_closed_flows_whose_parent_was_cancelled(world: World, how: str) -> None:
    held = await parent_of(world.engine)
    await (_closed_only if how == "flow_only" else _revived)(world, held)
    await world.clock.advance(minutes=5)
    await world.engine.cancel(Operator(held.execution_id), "enough")
    assert await world.engine.audit() == []
    world.engine.checking = False
    await world.sql.execute("delete from flowfabric.child_cancel")
    assert {one.rule for one in await world.engine.audit()} == {"child_forgotten"}
    await world.wipe()


async def test_a_child_that_is_replayed_after_its_parent_was_cancelled_is_no_fault(world: World) -> None:
    held = await parent_of(world.engine)
    flow = await _cancelled_flow(world, held)
    await world.clock.advance(minutes=5)
    for member in await world.engine.list_flow_members(flow):
        await world.engine.replay_execution(member.execution_id)
    assert await world.engine.audit() == []


# ---- the audit

DAMAGE = {
    "child_partition": "update flowfabric.execution set parent_id = id where kind_is_child",
    "child_forgotten": "delete from flowfabric.child_cancel",
    "child_row": "update flowfabric.execution set keeps_children = true where lane_is_parents",
}


@pytest.mark.parametrize("rule", DAMAGE)
@pytest.mark.parametrize("what", ["task", "flow"])
async def test_the_audit_finds_damaged_relations(world: World, rule: str, what: str) -> None:
    held = await parent_of(world.engine)
    await (child_of(world.engine, held) if what == "task" else flow_of(world.engine, held))
    await world.engine.cancel(Operator(held.execution_id), "enough")
    world.engine.checking = False
    await world.sql.execute(
        DAMAGE[rule].replace("kind_is_child", "parent_id is not null").replace("lane_is_parents", "state = 'cancelled'")
    )
    expected = {rule} if what == "task" or rule != "child_partition" else set()
    found = {one.rule for one in await world.engine.audit()}
    assert found >= expected
    assert found <= {rule, "child_forgotten"}
    await world.wipe()


# ---- concurrent calls


@pytest_asyncio.fixture(loop_scope="session")
async def parties(stage: Stage) -> list[Party]:
    await stage.empty()
    return await stage.company(2)


Submits = Callable[[ff.Engine, Claimed], Awaitable[Any]]
SUBMITS: dict[str, Submits] = {"task": child_of, "flow": flow_of}


@pytest.mark.parametrize("what", SUBMITS)
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_child_submitted_while_its_parent_is_cancelled_is_cancelled_too_or_refused(
    stage: Stage, parties: list[Party], what: str, ending: str
) -> None:
    one, two = parties
    held = await parent_of(one)
    await one.begin()
    await SUBMITS[what](one, held)
    cancel = await waiting(stage.watch, two, two.cancel(Operator(held.execution_id), "enough"), behind=one)
    await one.end(ending)
    assert (await cancel).has_children is (ending == "commit")
    await settle(two)
    assert await stage.watch.fetchval("select count(*) from flowfabric.execution where completed_at is null") == 0
    await stage.audit()


@pytest.mark.parametrize("what", SUBMITS)
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_child_submitted_after_a_cancel_that_is_not_committed_waits_for_it(
    stage: Stage, parties: list[Party], what: str, ending: str
) -> None:
    one, two = parties
    held = await parent_of(one)
    await one.begin()
    await one.cancel(Operator(held.execution_id), "enough")
    submits = await waiting(stage.watch, two, SUBMITS[what](two, held), behind=one)
    await one.end(ending)
    answer = await submits
    made = await stage.watch.fetchval("select count(*) from flowfabric.execution where completed_at is null")
    if ending == "commit":
        assert isinstance(answer, ff.FlowFabricError)
        assert made == 0
    else:
        assert not isinstance(answer, ff.FlowFabricError)
        assert made == (2 if what == "task" else 3)
    await stage.audit()


async def test_a_child_that_ends_while_its_parent_is_cancelled_keeps_its_end(
    stage: Stage, parties: list[Party]
) -> None:
    one, two = parties
    held = await parent_of(one)
    child = await child_of(one, held)
    running = await claim_one(one, lane_id="children", lease_ttl=LONG)
    await one.begin()
    await one.complete(running.handle, b"1")
    await two.cancel(Operator(held.execution_id), "enough")
    assert (await two.cancel_children()).cancelled == 0  # passed over
    await one.commit()
    await settle(two)
    assert await state(two, child) == "completed"
    assert await stage.watch.fetchval("select count(*) from flowfabric.child_cancel") == 0
    await stage.audit()


async def test_a_child_that_is_cancelled_with_its_parent_refuses_a_result_that_comes_meanwhile(
    stage: Stage, parties: list[Party]
) -> None:
    one, two = parties
    held = await parent_of(one)
    child = await child_of(one, held)
    running = await claim_one(one, lane_id="children", lease_ttl=LONG)
    await one.cancel(Operator(held.execution_id), "enough")
    await one.begin()
    assert (await one.cancel_children()).cancelled == 1
    late = await waiting(stage.watch, two, two.complete(running.handle, b"1"), behind=one)
    await one.commit()
    assert isinstance(await late, ff.FlowFabricError)
    await settle(two)
    assert await state(two, child) == "cancelled"
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_child_is_not_purged_beside_a_result_that_is_being_recorded(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two = parties
    held = await parent_of(one)
    child = await child_of(one, held)
    await end(one, "children")
    await stage.clock.advance(seconds=3)
    await one.begin()
    await remember(one, held, f"result {child}", result=b"1")
    await two.run_timers("retention")
    assert await state(two, child) == "completed"  # not recorded as far as other transactions see
    await one.end(ending)
    await stage.clock.advance(days=1)
    await two.run_timers("retention")
    assert await state(two, child) == (None if ending == "commit" else "completed")
    await stage.audit()


@pytest.mark.parametrize("what", SUBMITS)
async def test_a_replay_beside_the_cancellation_of_children_leaves_one_of_both(
    stage: Stage, parties: list[Party], what: str
) -> None:
    one, two = parties
    held = await parent_of(one)
    await SUBMITS[what](one, held)
    await one.cancel(Operator(held.execution_id), "enough")
    if what == "flow":
        await one.cancel_children()  # no executions
    await one.begin()
    assert (await one.cancel_children()).cancelled == 1
    replay = await waiting(stage.watch, two, two.replay_execution(held.execution_id), behind=one)
    await one.commit()
    assert not isinstance(await replay, ff.FlowFabricError)
    await settle(two)
    steps = await two.read_steps([held.execution_id])
    assert steps == []  # it was cancelled, and is made anew
    assert await stage.watch.fetchval("select count(*) from flowfabric.child_cancel") == 0
    await stage.audit()


async def test_a_submission_for_an_execution_of_another_partition_is_refused(world: World) -> None:
    held = await parent_of(world.engine)
    world.engine.checking = False
    other = (home(held.execution_id) + 1) % 256
    with pytest.raises(asyncpg.InvalidParameterValueError, match="partition of its parent"):
        await world.sql.execute(
            "select flowfabric.submit_child(array['l'], array['k'], array[''], null, array[$1::int], array[$2::uuid],"
            " true, null, null, array[''::bytea], null, null, null, null, null, null, null, null, null, null, null,"
            " null, null, $3, $4, null, null, null, null, 's', 0, false, true)",
            other,
            UUID(str(id_in(other))),
            home(held.execution_id),
            held.execution_id,
        )
