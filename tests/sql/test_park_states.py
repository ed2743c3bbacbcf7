"""What a parked execution is follows from what it waits for: state, reason, words, timers. Each of it wakes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from flowfabric.errors import StateError
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.lease import HandleKind, Operator
from flowfabric.values.wait import BoundWaitpoint
from tests.ids import home
from tests.interleave import Party, Stage
from tests.sql.flowing import Flow, empty_flow
from tests.support import claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
PARENTS, CHILDREN = {"lane_id": "parents"}, {"lane_id": "children"}
LONG = timedelta(days=30)
SHORT = r"[0-9a-f]{8}"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest_asyncio.fixture(loop_scope="session")
async def parties(stage: Stage) -> list[Party]:
    await stage.empty()
    return await stage.company(2)


@dataclass
class Family:
    """A running parent, with the children, waits and the time that it may wait for."""

    stage: Stage
    engine: Party
    parent: Claimed
    children: list[Claimed] = field(default_factory=list)
    waits: dict[str, BoundWaitpoint] = field(default_factory=dict)
    until: datetime | None = None

    async def child(self) -> Claimed:
        await submit(self.engine, **CHILDREN)
        made = await claim_one(self.engine, **CHILDREN, lease_ttl=LONG)
        self.children.append(made)
        return made

    async def wait(self, key: str) -> BoundWaitpoint:
        opened = await self.engine.open_wait(self.parent.handle, key, 0, [key], None)
        (self.waits[key],) = opened.waitpoints
        return self.waits[key]

    async def park(self, **more: Any) -> Any:
        return await self.engine.park(
            self.parent.handle,
            until=self.until,
            ends_of=[child.execution_id for child in self.children],
            signals_on={one.waitpoint_id: 0 for one in self.waits.values()},
            **more,
        )

    async def signal(self, key: str, name: str = "go") -> Any:
        at = self.waits[key]
        return await self.engine.deliver_signal(
            self.parent.execution_id, at.waitpoint_id, at.waitpoint_token, signal_name=name, source_type="user",
            source_identity="u",
        )  # fmt: skip

    async def row(self) -> asyncpg.Record:
        found = await self.stage.watch.fetchrow(
            "select state, blocking_reason, blocking_detail, pending, is_parked, delay_until, resume_pending"
            " from flowfabric.execution where partition = $1 and id = $2",
            home(self.parent.execution_id), self.parent.execution_id,
        )  # fmt: skip
        assert found is not None
        return found

    async def timers(self) -> set[str]:
        """The kinds of timers that point at the parent, without those of leases."""
        found = await self.stage.watch.fetch(
            "select distinct kind from flowfabric.timer where $1 = any (ids) and kind <> 'lease'",
            self.parent.execution_id,
        )
        return {row["kind"] for row in found}

    async def waiters(self) -> int:
        return int(await self.stage.watch.fetchval("select count(*) from flowfabric.waiter"))

    async def settle(self, again: Claimed, key: str, **more: Any) -> str:
        return (await self.engine.settle_wait(again.handle, key, 0, on(key), **more)).outcome

    async def goes_on(self) -> Claimed:
        again = await claim_one(self.engine, **PARENTS, lease_ttl=LONG)
        assert (again.execution_id, again.handle.attempt_id) == (
            self.parent.execution_id,
            self.parent.handle.attempt_id,
        )
        assert again.handle.kind is HandleKind.RESUMED
        assert await self.waiters() == 0 and not (await self.row())["is_parked"]
        await self.stage.audit()
        return again


async def family(stage: Stage, engine: Party, what: str, **creating: Any) -> Family:
    """A parent with what the words name: `child`, `children`, `flow`, `time`, and any others as keys of waits."""
    await submit(engine, **PARENTS, **creating)
    made = Family(stage, engine, await claim_one(engine, **PARENTS, lease_ttl=LONG))
    for word in what.split():
        match word:
            case "child":
                await made.child()
            case "children":
                for _ in range(3):
                    await made.child()
            case "flow":
                flow = await empty_flow(engine, "m")
                made.children.append(await flow.claim("m"))
            case "time":
                made.until = await stage.clock.now() + timedelta(minutes=5)
            case key:
                await made.wait(key)
    return made


@dataclass(frozen=True)
class Expected:
    what: str
    state: str
    reason: str
    detail: str
    timers: frozenset[str] = frozenset()
    waiters: int = 0


def expect(what: str, state: str, reason: str, detail: str, timers: str = "", waiters: int = 0) -> Expected:
    return Expected(what, state, reason, detail, frozenset(timers.split()), waiters)


TABLE = [
    expect("child", "waiting_children", "waiting_for_children", f"waits for child {SHORT}", waiters=1),
    expect("children", "waiting_children", "waiting_for_children", "waits for 3 child executions", waiters=3),
    expect("flow", "waiting_children", "waiting_for_children", f"waits for flow {SHORT}", waiters=1),
    expect(
        "child flow", "waiting_children", "waiting_for_children", f"waits for child {SHORT} and for flow {SHORT}",
        waiters=2,
    ),
    expect(
        "child time", "waiting_children", "waiting_for_children", f"waits for child {SHORT} and until {TIME}",
        "delay", 1,
    ),
    expect(
        "child approval", "waiting_children", "waiting_for_children",
        f"waits for child {SHORT} and for signal approval", waiters=2,
    ),
    expect(
        "children approval payment time", "waiting_children", "waiting_for_children",
        f"waits for 3 child executions and for signals approval, payment and until {TIME}", "delay", 5,
    ),
    expect("time", "delayed", "waiting_for_delay", f"waits until {TIME}", "delay"),
    expect(
        "time approval", "delayed", "waiting_for_delay", f"waits for signal approval and until {TIME}", "delay", 1
    ),
    expect("approval", "suspended", "waiting_for_signal", "waits for signal approval"),
    expect("approval payment", "suspended", "waiting_for_signal", "waits for signals approval, payment"),
]  # fmt: skip


@pytest.mark.parametrize("expected", TABLE, ids=lambda one: one.what)
async def test_the_state_follows_from_what_it_waits_for(stage: Stage, parties: list[Party], expected: Expected) -> None:
    one, _ = parties
    made = await family(stage, one, expected.what)
    assert (await made.park()).parked
    row = await made.row()
    assert (row["state"], row["blocking_reason"], row["pending"]) == (expected.state, expected.reason, "interrupted")
    assert re.fullmatch(expected.detail, row["blocking_detail"])
    assert (await made.timers(), await made.waiters()) == (expected.timers, expected.waiters)
    assert row["is_parked"] == (expected.state != "suspended")
    assert row["delay_until"] == made.until
    await stage.audit()
    found = await one.read_execution(made.parent.execution_id)
    assert found is not None and found.public_state == expected.state
    listed = await one.list_suspended(one_partition(made))
    assert [each.execution_id for each in listed.items] == (
        [made.parent.execution_id] if expected.state == "suspended" else []
    )


def one_partition(made: Family) -> str:
    return f"{{fp:{home(made.parent.execution_id)}}}"


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (expected.what, cause)
        for expected in TABLE
        for cause, words in {
            "end": ("child", "children", "flow"), "time": ("time",), "signal": ("approval",), "second": ("payment",)
        }.items()
        if any(word in expected.what.split() for word in words)
    ],
)  # fmt: skip
async def test_the_first_event_wakes_it(stage: Stage, parties: list[Party], what: str, cause: str) -> None:
    one, _ = parties
    made = await family(stage, one, what)
    await made.park()
    match cause:
        case "end":
            await one.complete(made.children[-1].handle)
        case "time":
            await stage.clock.advance(minutes=4)
            assert await one.promote_delayed(made.parent.execution_id) == "not_yet_due"
            await stage.clock.advance(minutes=2)
            assert (await one.run_timers("delay")).handled == 1
        case "signal" | "second":
            await made.signal("approval" if cause == "signal" else "payment")
    row = await made.row()
    assert (row["state"], row["blocking_reason"]) in [
        ("waiting", "waiting_for_worker"),
        ("resumable", "waiting_for_worker"),
    ]
    again = await made.goes_on()
    # What it still waits for is open: it parks again, and what came is seen by the wait it was for.
    for key in made.waits:
        came = (cause, key) in [("signal", "approval"), ("second", "payment")]
        assert await made.settle(again, key) == ("resumed" if came else "open")
    await stage.audit()


async def test_a_waitpoint_of_a_gather_outlives_the_suspension(stage: Stage, parties: list[Party]) -> None:
    """One of two waits is satisfied: the other keeps its waitpoint, its token and the signals it has."""
    one, _ = parties
    made = await family(stage, one, "approval payment")
    await made.park()
    assert (await made.signal("approval")).effect == "resume_condition_satisfied"
    again = await made.goes_on()
    assert [await made.settle(again, key) for key in ("approval", "payment")] == ["resumed", "open"]
    assert (await made.signal("payment")).effect == "buffered_for_pending_waitpoint"
    assert await made.settle(again, "payment") == "resumed"
    await one.complete(again.handle)
    await stage.audit()


async def test_a_gather_that_parks_again_waits_for_new_signals_only(stage: Stage, parties: list[Party]) -> None:
    one, _ = parties
    made = await family(stage, one, "approval payment")
    points = [at.waitpoint_id for at in made.waits.values()]
    wants = {points[0]: on("approval", "yes"), points[1]: on("payment")}
    await made.park(conditions=wants, reason_code="waiting_for_approval")
    listed = {each.waitpoint_key: each for each in (await one.list_waits()).items}
    assert [listed[key].required_signal_names for key in ("approval", "payment")] == [("yes",), ()]
    assert {each.reason for each in listed.values()} == {"waiting_for_approval"}
    await made.signal("approval", "no")
    again = await made.goes_on()
    settled = await one.settle_wait(again.handle, "approval", 0, wants[points[0]])
    assert (settled.outcome, settled.seen) == ("open", (1,))
    late = await one.park(again.handle, signals_on=dict.fromkeys(points, 0), conditions=wants)
    assert (late.parked, late.because) == (False, "signal")
    assert (await one.park(again.handle, signals_on={points[0]: 1, points[1]: 0}, conditions=wants)).parked
    await stage.audit()
    assert (await made.row())["state"] == "suspended"
    await made.signal("approval", "yes")
    again = await made.goes_on()
    assert (await one.settle_wait(again.handle, "approval", 0, wants[points[0]])).outcome == "resumed"
    await stage.audit()


async def test_an_operator_resumes_a_gather(stage: Stage, parties: list[Party]) -> None:
    """It ends every wait: the handler would only wait again otherwise."""
    one, _ = parties
    made = await family(stage, one, "approval payment")
    await made.park()
    await one.resume_execution(made.parent.execution_id, "operator")
    again = await made.goes_on()
    assert [await made.settle(again, key) for key in ("approval", "payment")] == ["operator_resumed"] * 2
    with pytest.raises(StateError):
        await made.signal("payment")
    await stage.audit()


@pytest.mark.parametrize(
    ("behavior", "state"),
    [("auto_resume_with_timeout_signal", "resumable"), ("fail", "failed"), ("cancel", "cancelled"),
     ("expire", "expired"), ("escalate", "suspended")],
)  # fmt: skip
@pytest.mark.parametrize("by", ["duty", "hand"])
async def test_the_timeout_of_a_gather(stage: Stage, parties: list[Party], behavior: Any, state: str, by: str) -> None:
    one, _ = parties
    made = await family(stage, one, "approval payment")
    deadline = await stage.clock.now() + timedelta(minutes=1)
    await made.park(timeout_at=deadline, timeout_behavior=behavior)
    assert await made.timers() == {"suspension"}
    await stage.audit()
    await stage.clock.advance(minutes=2)
    if by == "duty":
        assert (await one.run_timers("suspension")).handled == 1
    else:
        await one.expire_suspension(made.parent.execution_id)
    assert (await made.row())["state"] == state
    await stage.audit()
    if state == "resumable":
        again = await made.goes_on()
        assert await made.settle(again, "approval", deadline=deadline) == "timed_out"
        assert await made.settle(again, "payment") == "open", "the time of the other is not over, and no signal came"
        assert await one.observe_signals(again.handle) == []
    elif state == "suspended":
        await made.signal("payment")
        await made.goes_on()
    await stage.audit()


async def test_a_deadline_beside_others_is_a_time(stage: Stage, parties: list[Party]) -> None:
    one, _ = parties
    for what, behavior, state, kinds in (
        ("child approval", "fail", "waiting_children", {"delay"}),
        ("child approval", "escalate", "waiting_children", set()),
        ("time approval", "auto_resume_with_timeout_signal", "delayed", {"delay"}),
    ):
        await stage.empty()
        made = await family(stage, one, what)
        deadline = await stage.clock.now() + timedelta(minutes=1)
        await made.park(timeout_at=deadline, timeout_behavior=behavior)
        row = await made.row()
        assert (row["state"], await made.timers()) == (state, kinds)
        assert row["delay_until"] == (deadline if kinds else None)
        await stage.audit()


async def test_a_deadline_that_is_over(stage: Stage, parties: list[Party]) -> None:
    """The handler settles it, unless the engine ends the execution then."""
    one, _ = parties
    made = await family(stage, one, "approval payment")
    late = await stage.clock.now() - timedelta(seconds=1)
    answer = await made.park(timeout_at=late, timeout_behavior="auto_resume_with_timeout_signal")
    assert (answer.parked, answer.because) == (False, "due")
    assert (await made.park(timeout_at=late, timeout_behavior="fail")).parked
    assert (await one.run_timers("suspension")).handled == 1
    assert (await made.row())["state"] == "failed"
    await stage.audit()


@pytest.mark.parametrize("what", ["child", "time", "child time", "time approval", "approval payment"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_parked_execution_may_end(stage: Stage, parties: list[Party], what: str, how: str) -> None:
    one, _ = parties
    made = await family(stage, one, what, execution_deadline_at=timedelta(minutes=1))
    await made.park()
    if how == "cancel":
        await one.cancel(Operator(made.parent.execution_id), "enough")
    else:
        await stage.clock.advance(minutes=2)
        assert (await one.run_timers("deadline")).handled == 1
    assert ((await made.row())["state"], await made.waiters()) == ("cancelled" if how == "cancel" else "expired", 0)
    await stage.audit()
    await stage.clock.advance(hours=1)
    assert (await one.run_timers("delay")).handled == 0


async def test_a_parked_execution_survives_a_replay_of_its_child(stage: Stage, parties: list[Party]) -> None:
    one, _ = parties
    made = await family(stage, one, "child")
    await one.complete(made.children[0].handle)
    await one.replay_execution(made.children[0].execution_id)
    assert (await made.park()).parked
    await stage.audit()
    await one.complete((await claim_one(one, **CHILDREN)).handle)
    await made.goes_on()


# Flows


async def member_parent(stage: Stage, engine: Party, what: str) -> tuple[Flow, Family]:
    """As `family`, but the parent is a member of a flow, beside another member, `up`."""
    flow = await empty_flow(engine, "up")
    await flow.member("parent", **PARENTS)
    made = Family(stage, engine, await claim_one(engine, **PARENTS, lease_ttl=LONG))
    for word in what.split():
        if word == "child":
            await made.child()
        elif word == "time":
            made.until = await stage.clock.now() + timedelta(minutes=5)
        else:
            await made.wait(word)
    return flow, made


@pytest.mark.parametrize(
    ("what", "state"),
    [("child", "cancelled"), ("time", "cancelled"), ("child time", "cancelled"), ("a b", "suspended")],
)
async def test_cancelling_what_is_pending_in_a_flow(stage: Stage, parties: list[Party], what: str, state: str) -> None:
    """A parked member is pending, a suspended one is not."""
    one, _ = parties
    flow, made = await member_parent(stage, one, what)
    await made.park()
    await stage.audit()
    await one.cancel_flow(flow.id, policy="cancel_pending", reason="enough")
    await flow.drain()
    row = await made.row()
    assert row["state"] == state and not row["is_parked"]
    assert await made.waiters() == 0
    await stage.audit()


async def test_a_parked_member_is_not_released_by_the_reconciler(stage: Stage, parties: list[Party]) -> None:
    one, _ = parties
    flow, made = await member_parent(stage, one, "child")
    await flow.join("up", "parent")
    await flow.complete("up")
    await flow.drain()
    assert (await made.park()).parked
    assert (await one.reconcile_edges())[0].reconciled == 0
    row = await made.row()
    assert (row["state"], row["is_parked"]) == ("waiting_children", True)
    await stage.audit()
    await one.complete(made.children[0].handle)
    await made.goes_on()


async def test_a_parked_member_that_gets_a_dependency_waits_for_that(stage: Stage, parties: list[Party]) -> None:
    """Its children are forgotten; once it is released it parks for them again."""
    one, _ = parties
    flow, made = await member_parent(stage, one, "child")
    await made.park()
    await flow.join("up", "parent")
    row = await made.row()
    assert (row["state"], row["is_parked"], await made.waiters()) == ("waiting_children", False, 0)
    await stage.audit()
    await one.complete(made.children[0].handle)
    assert (await made.row())["state"] == "waiting_children"
    await flow.complete("up")
    await flow.drain()
    await made.goes_on()


async def test_parking_with_an_open_dependency_waits_for_that(stage: Stage, parties: list[Party]) -> None:
    one, _ = parties
    flow, made = await member_parent(stage, one, "child time")
    await flow.join("up", "parent")
    await made.park()
    row = await made.row()
    assert (row["state"], row["is_parked"], await made.waiters()) == ("waiting_children", False, 0)
    await stage.audit()
    await flow.complete("up")
    await flow.drain()
    await stage.audit()


# Audit


_SET = "update flowfabric.execution set "


@pytest.mark.parametrize(
    ("what", "damage", "rules"),
    [
        ("time", _SET + "delay_until = null where is_parked", {"state_facts"}),
        ("time", _SET + "delay_until = 'infinity' where is_parked", {"state_facts", "timer_delay", "times_finite"}),
        ("child", "delete from flowfabric.waiter", {"waits_for_nothing"}),
        ("child time", "delete from flowfabric.waiter", {"waits_for_nothing"}),
        ("child", _SET + "is_parked = false where is_parked", {"held_back"}),
        ("child", _SET + "pending = 'retry' where is_parked", {"state_facts", "attempt_open", "retries_counted"}),
        ("child time", "delete from flowfabric.timer where kind = 'delay'", {"timer_delay"}),
        ("approval payment", "delete from flowfabric.suspension", {"suspension_open", "waitpoint_state"}),
        ("approval payment", _SET + "is_parked = true where state = 'suspended'", {"state_facts"}),
        ("approval payment", "update flowfabric.waitpoint set state = 'pending', suspension_id = null",
         {"suspension_waitpoints"}),
    ],
)  # fmt: skip
async def test_the_audit_sees_what_contradicts_itself(
    stage: Stage, parties: list[Party], what: str, damage: str, rules: set[str]
) -> None:
    one, _ = parties
    made = await family(stage, one, what)
    await made.park()
    await stage.watch.execute(damage)
    found = {violation.rule for violation in await one.audit()}
    assert found & rules == found and found, (found, rules)


async def test_no_execution_is_delayed_until_the_end_of_time(stage: Stage, parties: list[Party]) -> None:
    one, _ = parties
    for expected in TABLE:
        await stage.empty()
        await (await family(stage, one, expected.what)).park()
        far = "select count(*) from flowfabric.execution where delay_until >= flowfabric.far_date()"
        assert await stage.watch.fetchval(far) == 0, expected.what
