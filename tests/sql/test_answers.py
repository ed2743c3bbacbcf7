"""Answers in SQL: deliveries that ask for a check, signals that are set aside, waits that open again."""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

import pytest

import flowfabric as ff
from flowfabric.errors import Conflict, NotFound, ValidationFailed
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import Condition, named_keys, on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.signal import Accepted, DuplicateSignal, Unchecked
from flowfabric.values.wait import AlreadySatisfied, Fresh, OpenWait, Suspended, UsePending
from tests.ids import home, id_in
from tests.support import CheckedEngine, Clock, claim_one, started, submit

HOUR = timedelta(hours=1)
SCHEMA = '{"type": "object"}'


class Waiting:
    """A task's wait, named w."""

    def __init__(self, engine: ff.Engine, held: Claimed, condition: Condition, opened: OpenWait) -> None:
        self.engine = engine
        self.held = held
        self.condition = condition
        self.points = {one.waitpoint_key: one for one in opened.waitpoints}

    async def suspend(self, **options: Any) -> Suspended | AlreadySatisfied:
        ids = [one.waitpoint_id for one in self.points.values()]
        return await self.engine.suspend_on(self.held.handle, ids, self.condition, **options)

    async def send(self, key: str = "k", who: str = "", **fields: Any) -> UUID:
        sent = await self.engine.signal_execution(
            self.held.execution_id, key, signal_name="go", source_type="test", source_identity=who, **fields
        )
        assert isinstance(sent, Accepted)
        return sent.signal_id

    async def claim(self) -> None:
        self.held = await claim_one(self.engine)

    async def settle(self, **options: Any) -> str:
        found = await self.engine.settle_wait(
            self.held.handle, "w", 0, self.condition, payload_schema=SCHEMA, **options
        )
        return found.outcome

    async def refuse(self, *signals: UUID) -> None:
        await self.engine.refuse_signals(self.held.handle, "w", 0, dict.fromkeys(signals, "does not fit"))


async def wait(engine: CheckedEngine, condition: Condition | None = None, schema: str | None = SCHEMA) -> Waiting:
    held = await started(engine)
    chosen = on("k") if condition is None else condition
    return Waiting(engine, held, chosen, await engine.open_wait(held.handle, "w", 0, named_keys(chosen), None, schema))


@pytest.mark.parametrize("by_token", [True, False], ids=["by token", "by key"])
async def test_a_delivery_that_did_not_check_the_schema_records_nothing_and_gets_it(
    engine: CheckedEngine, by_token: bool
) -> None:
    async def ask(one: Waiting, checked: bytes = b"") -> Any:
        point, fields = one.points["k"], {"signal_name": "go", "source_type": "test"}
        if by_token:
            right = one.held.execution_id, point.waitpoint_id, point.waitpoint_token
            return await engine.try_deliver(*right, checked=checked, **fields)  # type: ignore[misc]
        return await engine.try_signal(one.held.execution_id, "k", checked=checked, **fields)  # type: ignore[misc]

    one = await wait(engine)
    await one.suspend()
    for checked in (b"", b"another", sha256(b"{}").digest()):
        assert await ask(one, checked) == Unchecked(SCHEMA)
    assert (await engine.read_signals(one.held.execution_id)).items == []
    assert isinstance(await ask(one, sha256(SCHEMA.encode()).digest()), Accepted)
    await one.claim()
    open_to_all = await wait(engine, schema=None)
    assert isinstance(await ask(open_to_all), Accepted)


async def test_a_wrong_token_learns_no_schema(engine: CheckedEngine) -> None:
    one = await wait(engine)
    with pytest.raises(ValidationFailed) as refused:
        await engine.try_deliver(
            one.held.execution_id, one.points["k"].waitpoint_id, f"k1:{'0' * 64}", signal_name="go", source_type="test"
        )
    assert refused.value.kind == "invalid_token"
    assert "object" not in str(refused.value)


async def test_refused_signals_leave_the_wait_open_with_the_others(engine: CheckedEngine) -> None:
    one = await wait(engine, ff.from_sources(2, "k"))
    await one.suspend(timeout_at=HOUR)
    good, bad = await one.send(who="a"), await one.send(who="b")
    await one.claim()
    assert await one.settle() == "resumed"
    for _ in range(2):  # a repeated call finds it done
        await one.refuse(bad)
    suspension = await engine.read_suspension(one.held.execution_id)
    assert suspension is not None
    assert (suspension.close_reason, suspension.satisfier_signal_ids, suspension.satisfied_at) == ("refused", (), None)
    assert await engine.observe_signals(one.held.handle) == []
    assert await one.settle() == "open"
    (point,) = (await engine.list_pending_waitpoints(one.held.execution_id)).items
    assert (point.waitpoint_id, point.state, point.expires_at) == (one.points["k"].waitpoint_id, "pending", None)
    token = await engine.read_waitpoint_token(one.held.execution_id, point.waitpoint_id)
    assert token == one.points["k"].waitpoint_token
    await one.suspend()
    await one.send(who="a")  # the same sender as the good one
    assert (await engine.read_execution(one.held.execution_id)).public_state == "suspended"  # type: ignore[union-attr]
    await one.send(who="b")  # the sender of the bad one may answer again
    await one.claim()
    assert await one.settle() == "resumed"
    signals = (await engine.read_signals(one.held.execution_id)).items
    assert [(signal.match_detail, signal.refused is None) for signal in signals] == [
        ("advanced", True), ("refused", False), ("duplicate_satisfier", True), ("advanced", True),
    ]  # fmt: skip
    assert signals[0].signal_id == good
    await engine.complete(one.held.handle)


async def test_only_signals_of_the_wait_can_be_refused_and_nothing_changes_otherwise(engine: CheckedEngine) -> None:
    one = await wait(engine)
    other = await engine.open_wait(one.held.handle, "other", 0, ["l"], None)
    assert len(other.waitpoints) == 1
    here, there = await one.send("k"), await one.send("l")
    assert await one.settle() == "resumed"
    for signals in ([there], [here, there], [mint_uuid()]):
        with pytest.raises(ff.InvalidInput, match="signal_not_of_this_wait"):
            await one.refuse(*signals)
    with pytest.raises(NotFound):
        await engine.refuse_signals(one.held.handle, "unknown", 0, {here: "x"})
    assert await one.settle() == "resumed"
    assert all(signal.refused is None for signal in (await engine.read_signals(one.held.execution_id)).items)


async def test_a_refused_key_may_be_used_again_and_a_refused_id_may_not(engine: CheckedEngine) -> None:
    one = await wait(engine)
    bad = await one.send(idempotency_key="mine")
    assert await one.settle() == "resumed"
    await one.refuse(bad)
    again = await one.send(idempotency_key="mine")
    assert again != bad
    repeated = await engine.signal_execution(
        one.held.execution_id, "k", signal_name="go", source_type="test", signal_id=bad
    )
    assert repeated == DuplicateSignal(bad, "does not fit")


async def test_the_signal_of_a_timeout_does_not_answer_the_wait_that_a_replay_opens_again(
    engine: CheckedEngine, clock: Clock
) -> None:
    one = await wait(engine)
    await one.suspend(timeout_at=HOUR, timeout_behavior="auto_resume_with_timeout_signal")
    await clock.advance(hours=2)
    await engine.run_timers("suspension")
    await one.claim()
    assert await one.settle() == "timed_out"
    await engine.fail(one.held.handle, "nobody", category="wait_timed_out")
    await engine.replay_execution(one.held.execution_id)
    await one.claim()
    opened = await engine.open_wait(one.held.handle, "w", 0, ["k"], None, SCHEMA)
    assert [one.waitpoint_id for one in opened.waitpoints] == [point.waitpoint_id for point in one.points.values()]
    assert await one.settle() == "open"
    await one.suspend()
    await one.send()
    await one.claim()
    assert await one.settle() == "resumed"


async def test_a_wait_with_other_keys_gets_new_waitpoints_after_a_replay(engine: CheckedEngine) -> None:
    one = await wait(engine)
    await engine.cancel(Operator(one.held.execution_id), "enough")
    await engine.replay_execution(one.held.execution_id)
    await one.claim()
    opened = await engine.open_wait(one.held.handle, "w", 0, ["other"], None)
    assert [point.waitpoint_key for point in opened.waitpoints] == ["other"]
    assert opened.waitpoints[0].waitpoint_id not in {point.waitpoint_id for point in one.points.values()}


# ---- ids of waitpoints, timeouts


async def test_the_id_of_a_waitpoint_is_used_once_in_all_partitions(engine: CheckedEngine) -> None:
    first, second = [await submit(engine, execution_id=id_in(partition)) for partition in (3, 4)]
    assert home(first) != home(second)
    held = {one.execution_id: one.handle for one in [await claim_one(engine), await claim_one(engine)]}
    waitpoint = mint_uuid()
    await engine.suspend(held[first], waitpoints=[Fresh(waitpoint, "k")], resume_condition=on("k"))
    with pytest.raises(Conflict) as refused:
        await engine.suspend(held[second], waitpoints=[Fresh(waitpoint, "k")], resume_condition=on("k"))
    assert refused.value.kind == "waitpoint_already_exists"


async def test_a_pending_waitpoint_of_another_partition_is_that_of_another_execution(engine: CheckedEngine) -> None:
    first, second = [await submit(engine, execution_id=id_in(partition)) for partition in (3, 4)]
    held = {one.execution_id: one.handle for one in [await claim_one(engine), await claim_one(engine)]}
    made = await engine.create_waitpoint(held[first], "k", HOUR)
    with pytest.raises(ValidationFailed) as refused:
        await engine.suspend(held[second], waitpoints=[UsePending(made.waitpoint_id)], resume_condition=on("k"))
    assert refused.value.kind == "invalid_waitpoint_for_execution"


async def test_a_suspension_times_out_at_a_time_or_after_a_duration(engine: CheckedEngine, clock: Clock) -> None:
    for timeout in (HOUR, await clock.now() + HOUR):
        held = await started(engine)
        await engine.suspend(
            held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"), timeout_at=timeout
        )
        suspension = await engine.read_suspension(held.execution_id)
        assert suspension is not None
        assert suspension.timeout_at is not None
        assert abs(suspension.timeout_at - (await clock.now() + HOUR)) < timedelta(seconds=30)
    for wrong in (timedelta(-1), 5):
        held = await started(engine)
        with pytest.raises(ff.InvalidInput, match="timeout_at"):
            await engine.suspend(
                held.handle,
                waitpoints=[Fresh(mint_uuid(), "k")],
                resume_condition=on("k"),
                timeout_at=wrong,  # type: ignore[arg-type]
            )
