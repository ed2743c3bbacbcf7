"""Waitpoints and suspensions: how they are made, what refuses them and in which order, how they are read and end."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

import flowfabric as ff
from flowfabric.errors import ExecutionNotActive
from flowfabric.values.conditions import (
    AllMet,
    Condition,
    OperatorOnly,
    TimeoutOnly,
    all_of,
    any_of,
    condition_to_json,
    count_signals,
    from_sources,
    on,
)
from flowfabric.values.lease import Fence, Handle, HandleKind, Operator
from flowfabric.values.policies import ExecutionPolicy, SuspensionPolicy, TimeoutPolicy
from flowfabric.values.wait import (
    AlreadySatisfied,
    Closed,
    Fresh,
    PendingWaitpoint,
    ResumePolicy,
    Suspended,
    UsePending,
)
from tests.each import Rows
from tests.ids import home, id_in
from tests.model import SUSPENDS
from tests.sql.cases import NOT_HELD, stranger
from tests.sql.cases import outcome as told
from tests.sql.suspending import (
    APPENDED,
    BUFFERED,
    HOUR,
    LONG,
    RESUMED,
    SATISFIED,
    SECOND,
    Point,
    SuspendingWorld,
    Waiting,
    bound,
    changed,
    short,
)
from tests.support import OTHER, STATES, WORKER, claim_one, new_id

pytestmark = pytest.mark.asyncio(loop_scope="session")
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)


async def code(call: Awaitable[Any]) -> str:
    """The code of a refusal: of bad input the word that its detail begins with, of others their kind."""
    try:
        return type(await call).__name__
    except ff.InvalidInput as error:
        assert error.detail.startswith(error.problem) or error.field, error
        return error.problem.split(" at ")[0]
    except ff.FlowFabricError as error:
        return error.kind


async def forget_the_key(world: SuspendingWorld) -> None:
    """No key signs any more; the old one still verifies."""
    await world.sql.execute("update flowfabric.keystore set state = 'verifying', expires_at = 'infinity'")


async def fill(world: SuspendingWorld, wait: Waiting, count: int) -> None:
    """So many more pending waitpoints."""
    await world.sql.execute(
        "insert into flowfabric.waitpoint (partition, waitpoint_id, id, attempt_index, waitpoint_key, token_kid, state,"
        " outlives_attempt, created_at, expires_at) select $1, gen_random_uuid(), $2, 0, 'k', 'k1', 'pending', false,"
        " flowfabric.now(), flowfabric.now() + interval '1 day' from generate_series(1, $3::int)",
        home(wait.id),
        wait.id,
        count,
    )


# ---- making waitpoints


async def test_a_waitpoint_is_made_without_touching_the_lease(world: SuspendingWorld) -> None:
    wait = await world.hold()
    before = await world.record(wait.id)
    made = await world.engine.create_waitpoint(wait.handle, "callback", 5 * MINUTE)
    assert await world.record(wait.id) == before
    row = await world.waitpoint(Waiting(wait.claimed, {"callback": Point(made.waitpoint_id, made.token)}))
    assert (row["state"], row["waitpoint_key"], row["attempt_index"]) == ("pending", "callback", 0)
    assert (row["token_kid"], row["required_signal_names"], row["suspension_id"]) == ("k1", [], None)
    assert row["expires_at"] == row["created_at"] + 5 * MINUTE == made.expires_at
    assert (row["activated_at"], row["closed_at"], row["close_reason"]) == (None, None, None)
    assert made.token.kid == "k1" and len(made.token.reveal()) == len("k1:") + 64
    await world.engine.complete(wait.handle)


async def test_two_waitpoints_of_one_key_are_two(world: SuspendingWorld) -> None:
    wait = await world.hold()
    one, two = [await world.engine.create_waitpoint(wait.handle, "k", HOUR) for _ in range(2)]
    assert one.waitpoint_id != two.waitpoint_id
    assert one.token != two.token
    assert len((await world.engine.list_pending_waitpoints(wait.id)).items) == 2


async def test_a_waitpoint_may_be_made_for_as_long_as_can_be_said(world: SuspendingWorld) -> None:
    wait = await world.hold()
    made = await world.engine.create_waitpoint(wait.handle, "k", timedelta.max)
    await world.clock.advance(days=9_999)
    assert (await world.engine.run_timers("waitpoint")).handled == 0
    (found,) = (await world.engine.list_pending_waitpoints(wait.id)).items
    assert (found.waitpoint_id, found.expires_at) == (made.waitpoint_id, None)


async def test_less_than_a_millisecond_is_time_enough(world: SuspendingWorld) -> None:
    wait = await world.hold()
    assert await world.engine.create_waitpoint(wait.handle, "k", timedelta(microseconds=1))


# Each refusal with all that would come after it; the lease comes first of all.
CREATE_REFUSALS = [
    ("lease_revoked", "revoked lapsed stale key time many unsigned"),
    ("lease_expired", "lapsed stale key time many unsigned"),
    ("stale_lease", "stale key time many unsigned"),
    ("waitpoint_key_empty", "key time many unsigned"),
    ("expires_in_not_positive", "time many unsigned"),
    ("too_many_pending_waitpoints", "many unsigned"),
    ("hmac_secret_not_initialized", "unsigned"),
]


@pytest.mark.parametrize(("first", "faults"), CREATE_REFUSALS)
async def test_a_refused_waitpoint_names_the_first_reason(world: SuspendingWorld, first: str, faults: str) -> None:
    wait = await world.pend(lease_ttl=30 * SECOND)
    handle = wait.handle
    if "many" in faults:
        await fill(world, wait, 999)
    if "unsigned" in faults:
        await forget_the_key(world)
    if "stale" in faults:
        handle = msgspec.structs.replace(handle, lease_epoch=handle.lease_epoch + 1)
    if "revoked" in faults:
        await world.engine.revoke_lease(wait.id)
    if "lapsed" in faults:
        await world.clock.advance(seconds=31)
    before = await world.stored()
    call = world.engine.create_waitpoint(
        handle, "" if "key" in faults else "k", -SECOND if "time" in faults else SECOND
    )
    assert await code(call) == first
    if first == "lease_expired":
        assert set(changed(before, await world.stored())) == {"execution", "event", "ready"}
    else:
        assert await world.stored() == before


async def test_a_thousand_pending_waitpoints_are_allowed_and_only_those_count_that_can_be_used(
    world: SuspendingWorld,
) -> None:
    wait = await world.pend()
    await fill(world, wait, 998)
    await world.pend("last", of=wait, expires_in=SECOND)
    assert await code(world.engine.create_waitpoint(wait.handle, "k", HOUR)) == "too_many_pending_waitpoints"
    await world.engine.close_waitpoint(wait.handle, wait.points["k"].id)
    assert await code(world.engine.create_waitpoint(wait.handle, "k", HOUR)) == "NewWaitpoint"
    assert await code(world.engine.create_waitpoint(wait.handle, "k", HOUR)) == "too_many_pending_waitpoints"
    await world.clock.advance(seconds=2)
    assert await code(world.engine.create_waitpoint(wait.handle, "k", HOUR)) == "NewWaitpoint"


@pytest.mark.parametrize("state", [state for state in STATES if state != "A"])
@pytest.mark.parametrize("operation", ["create", "close"])
async def test_only_the_holder_of_a_live_lease_makes_and_closes_waitpoints(
    world: SuspendingWorld, state: str, operation: str
) -> None:
    at = await world.reach(state)
    handle = at.handle if at.claimed is not None else stranger(at.id)
    before = await world.stored()
    if operation == "create":
        call: Awaitable[Any] = world.engine.create_waitpoint(handle, "", timedelta(0))
    else:
        call = world.engine.close_waitpoint(handle, new_id())
    assert await told(call) == NOT_HELD[max((p for p in NOT_HELD if state.startswith(p)), key=len)]
    assert await world.stored() == before


# ---- closing them


async def _pending(world: SuspendingWorld, wait: Waiting) -> UUID:
    return wait.points["k"].id


async def _closed(world: SuspendingWorld, wait: Waiting) -> UUID:
    await world.engine.close_waitpoint(wait.handle, wait.points["k"].id, "first")
    return wait.points["k"].id


async def _expired(world: SuspendingWorld, wait: Waiting) -> UUID:
    await world.clock.advance(hours=2)
    assert isinstance(await world.engine.expire_waitpoint(wait.id, wait.points["k"].id), Closed)
    return wait.points["k"].id


async def _active(world: SuspendingWorld, wait: Waiting) -> UUID:
    """Of a suspension that is open while the execution runs: cannot be, but would be refused."""
    await world.suspend_on_pending(wait)
    world.engine.checking = False
    await world.sql.execute(
        "update flowfabric.execution set state = 'active', pending = null, blocking_reason = null,"
        " blocking_detail = null, epoch = epoch - 1"
    )
    return wait.points["k"].id


async def _foreign(world: SuspendingWorld, wait: Waiting) -> UUID:
    other = await world.pend(execution_id=id_in(home(wait.id)))
    return other.point.id


async def _elsewhere(world: SuspendingWorld, wait: Waiting) -> UUID:
    other = await world.pend(execution_id=id_in((home(wait.id) + 1) % 256))
    return other.point.id


async def _unknown(world: SuspendingWorld, wait: Waiting) -> UUID:
    return new_id()


CLOSING = [
    (_pending, "Closed", "because"),
    (_closed, "Closed", "first"),
    (_expired, "Closed", "never_committed"),
    (_active, "waitpoint_not_pending", None),
    (_foreign, "invalid_waitpoint_for_execution", None),
    (_elsewhere, "invalid_waitpoint_for_execution", None),
    (_unknown, "not_found", None),
]


@pytest.mark.parametrize(("reach", "answer", "reason"), CLOSING, ids=lambda value: getattr(value, "__name__", value))
async def test_what_closing_a_waitpoint_returns(
    world: SuspendingWorld, reach: Callable[[SuspendingWorld, Waiting], Awaitable[UUID]], answer: str, reason: str
) -> None:
    wait = await world.pend()
    target = await reach(world, wait)
    before = await world.stored()
    call = world.engine.close_waitpoint(wait.handle, target, "because")
    if answer == "not_found":
        with pytest.raises(ff.NotFound) as missing:
            await call
        assert (missing.value.entity, missing.value.id) == ("waitpoint", str(target))
    else:
        assert await code(call) == answer
    if reach is _pending:
        (row,) = changed(before, await world.stored())["waitpoint"]
        assert (row["state"], row["close_reason"], row["suspension_id"]) == ("closed", "because", None)
        assert row["closed_at"] is not None
    else:
        assert await world.stored() == before
    if reason is not None:
        assert (await world.waitpoint(wait))["close_reason"] == reason


async def test_closing_says_why_when_nothing_is_said(world: SuspendingWorld) -> None:
    wait = await world.pend()
    assert await world.engine.close_waitpoint(wait.handle, wait.point.id) == Closed(wait.point.id)
    assert await world.closed(wait) == {"k": ("closed", "proactive_close")}


# ---- their time


@pytest.mark.both_servers
async def test_a_pending_waitpoint_expires_when_it_is_due_and_not_before(world: SuspendingWorld) -> None:
    wait = await world.pend(expires_in=MINUTE)
    await world.pend("later", of=wait, expires_in=HOUR)
    sent = await world.accept(wait, "k")
    assert await world.engine.next_due() == (await world.waitpoint(wait, "k"))["expires_at"]
    await world.clock.advance(seconds=59)
    assert (await world.engine.run_timers("waitpoint")).handled == 0
    assert await told(world.engine.expire_waitpoint(wait.id, wait.points["k"].id)) == "not_yet_due"
    await world.clock.advance(seconds=2)
    before = await world.stored()
    assert (await world.engine.run_timers("waitpoint")).handled == 1
    # Nothing but the waitpoint: not the execution, and not what it had received.
    (row,) = changed(before, await world.stored())["waitpoint"]
    assert set(changed(before, await world.stored())) == {"waitpoint", "-timer"}
    assert (row["state"], row["close_reason"], row["signal_count"]) == ("expired", "never_committed", 1)
    assert await world.closed(wait) == {"k": ("expired", "never_committed"), "later": ("pending", None)}
    (kept,) = (await world.engine.read_signals(wait.id)).items
    assert (kept.signal_id, kept.observed_effect) == (sent.signal_id, BUFFERED)
    assert await told(world.send(wait, "k")) == "waitpoint_closed"
    await world.clock.advance(hours=1)
    assert (await world.engine.run_timers("waitpoint")).handled == 1
    assert await world.closed(wait) == {"k": ("expired", "never_committed"), "later": ("expired", "never_committed")}


async def test_expiring_one_waitpoint_answers_why_it_did_nothing(world: SuspendingWorld) -> None:
    wait = await world.pend(expires_in=MINUTE)
    other = await world.pend(execution_id=id_in(home(wait.id)), expires_in=MINUTE)
    await world.clock.advance(seconds=61)
    before = await world.stored()
    assert await world.engine.expire_waitpoint(wait.id, new_id()) == AlreadySatisfied("not_found")
    assert await world.engine.expire_waitpoint(wait.id, other.point.id) == AlreadySatisfied("not_found")
    nobody = id_in(home(wait.id))
    assert await world.engine.expire_waitpoint(nobody, wait.point.id) == AlreadySatisfied("not_found")
    assert await world.stored() == before
    assert await world.engine.expire_waitpoint(wait.id, wait.point.id) == Closed(wait.point.id)
    assert await world.engine.expire_waitpoint(wait.id, wait.point.id) == AlreadySatisfied("not_pending")
    assert await world.closed(other) == {"k": ("pending", None)}


@pytest.mark.parametrize("timed", [False, True])
async def test_an_active_waitpoint_has_no_expiry_of_its_own(world: SuspendingWorld, timed: bool) -> None:
    wait = await world.pend(expires_in=MINUTE)
    at = await world.in_an_hour() if timed else None
    assert isinstance(await world.suspend_on_pending(wait, timeout_at=at, timeout_behavior="escalate"), Suspended)
    assert (await world.waitpoint(wait))["expires_at"] == at
    await world.clock.advance(hours=2)
    before = await world.stored()
    await world.engine.run_timers("waitpoint")
    assert await world.engine.expire_waitpoint(wait.id, wait.point.id) == AlreadySatisfied("not_pending")
    assert set(changed(before, await world.stored())) <= {"-timer"}
    assert await world.closed(wait) == {"k": ("active", None)}
    assert (await world.accept(wait)).effect == SATISFIED


# ---- reading waitpoints


async def test_the_list_of_waitpoints_shows_ten_fields_and_no_token(world: SuspendingWorld) -> None:
    wait = await world.pend("callback", expires_in=5 * MINUTE)
    assert PendingWaitpoint.__struct_fields__ == (
        "waitpoint_id", "waitpoint_key", "state", "required_signal_names", "created_at", "activated_at", "expires_at",
        "execution_id", "token_kid", "token_fingerprint",
    )  # fmt: skip
    (pending,) = (await world.engine.list_pending_waitpoints(wait.id)).items
    digest = wait.point.token.reveal().removeprefix("k1:")
    row = await world.waitpoint(wait)
    assert pending == PendingWaitpoint(
        waitpoint_id=wait.point.id,
        waitpoint_key="callback",
        state="pending",
        required_signal_names=(),
        created_at=row["created_at"],
        activated_at=None,
        expires_at=row["created_at"] + 5 * MINUTE,
        execution_id=wait.id,
        token_kid="k1",
        token_fingerprint=hashlib.sha256(digest.encode()).hexdigest()[:16],
    )
    assert digest not in repr(pending)
    at = await world.in_an_hour()
    await world.suspend_on_pending(wait, on("callback", "done"), timeout_at=at)
    (active,) = (await world.engine.list_pending_waitpoints(wait.id)).items
    suspension = await world.suspension(wait)
    assert active == msgspec.structs.replace(
        pending,
        state="active",
        required_signal_names=("done",),
        activated_at=suspension.suspended_at,
        expires_at=at,
    )


REQUIRED_NAMES = [
    (on("a"), {"a": ()}),
    (on("a", "x"), {"a": ("x",)}),
    (OperatorOnly(), {"a": ("__operator_only__",)}),
    (TimeoutOnly(), {"a": ("__timeout_only__",)}),
    (from_sources(2, "a", name="x"), {"a": ("x",)}),
    (any_of("a", "b"), {"a": (), "b": ()}),
    (all_of(on("a", "y"), on("b", "x"), on("a", "x"), on("a", "y")), {"a": ("y", "x"), "b": ("x",)}),
    (all_of(on("a", "x"), OperatorOnly(), on("b")), {"a": ("x", "__operator_only__"), "b": ("__operator_only__",)}),
    (all_of(all_of(on("b", "z")), count_signals(2, "a", "b", name="y"), "a"), {"a": ("y",), "b": ("z", "y")}),
]


@pytest.mark.parametrize(("condition", "names"), REQUIRED_NAMES, ids=lambda value: str(value)[:40])
async def test_a_waitpoint_names_the_signals_that_its_condition_wants(
    world: SuspendingWorld, condition: Condition, names: dict[str, tuple[str, ...]]
) -> None:
    wait = await world.suspend(condition, *names, timeout_at=await world.in_an_hour())
    listed = (await world.engine.list_pending_waitpoints(wait.id)).items
    assert {one.waitpoint_key: one.required_signal_names for one in listed} == names


async def test_waitpoints_are_listed_by_id_page_by_page(world: SuspendingWorld) -> None:
    wait = await world.hold()
    keys = [f"k{n}" for n in range(7)]
    for key in keys:
        await world.pend(key, of=wait)
    await world.pend("gone", of=wait)
    await world.engine.close_waitpoint(wait.handle, wait.points["gone"].id)
    await world.pend("over", of=wait, expires_in=SECOND)
    await world.clock.advance(seconds=2)
    ids = sorted(wait.points[key].id for key in keys)
    for size in (1, 2, 3, 6, 7, 8):
        pages, after = [], None
        while True:
            page = await world.engine.list_pending_waitpoints(wait.id, after=after, limit=size)
            pages.append([one.waitpoint_id for one in page.items])
            after = page.next_cursor
            if after is None:
                break
            assert after == pages[-1][-1]
        assert list(itertools.chain(*pages)) == ids
        assert [len(page) for page in pages] == [size] * (7 // size) + ([7 % size] if 7 % size else [])
    # The size is brought into its range, never refused.
    for limit, found in ((0, 1), (-5, 1), (5000, 7)):
        assert len((await world.engine.list_pending_waitpoints(wait.id, limit=limit)).items) == found
    assert (await world.engine.list_pending_waitpoints(wait.id, after=ids[-1])).items == []
    with pytest.raises(ff.NotFound) as unknown:
        await world.engine.list_pending_waitpoints(id_in(home(wait.id)))
    assert unknown.value.entity == "execution"


async def test_at_most_a_thousand_waitpoints_are_on_a_page_and_a_hundred_if_nothing_is_said(
    world: SuspendingWorld,
) -> None:
    wait = await world.pend()
    await fill(world, wait, 999)
    await world.sql.execute(
        "insert into flowfabric.waitpoint (partition, waitpoint_id, id, attempt_index, waitpoint_key, token_kid, state,"
        " outlives_attempt, created_at, expires_at) values ($1, $3, $2, 0, 'k', 'k1', 'pending', false,"
        " flowfabric.now(), flowfabric.now() + interval '1 day')",
        home(wait.id),
        wait.id,
        UUID(int=2**128 - 1),
    )
    page = await world.engine.list_pending_waitpoints(wait.id, limit=2000)
    assert (len(page.items), page.next_cursor) == (1000, page.items[-1].waitpoint_id)
    assert len((await world.engine.list_pending_waitpoints(wait.id)).items) == 100


async def test_the_token_of_a_waitpoint_can_be_read_while_it_can_be_signalled(world: SuspendingWorld) -> None:
    wait = await world.pend()
    key = home(wait.id)
    elsewhere = (home(wait.id) + 1) % 256

    async def read() -> Any:
        return await world.engine.read_waitpoint_token(key, wait.point.id)

    assert await read() == wait.point.token
    assert await world.engine.read_waitpoint_token(elsewhere, wait.point.id) is None
    assert await world.engine.read_waitpoint_token(key, new_id()) is None
    answer = await world.suspend_on_pending(wait)
    assert await read() == wait.point.token == answer.details.waitpoint_token
    await world.engine.resume_execution(wait.id)
    assert await read() is None
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.pend("k", of=wait, expires_in=MINUTE)
    assert await read() is not None
    await world.clock.advance(minutes=2)
    await world.engine.run_timers("waitpoint")
    assert await read() is None


# ---- what refuses a suspension, before anything is looked up

PAST = -timedelta(minutes=10, seconds=1)
ONE, TWO = new_id(), new_id()


@dataclass(frozen=True)
class Rule:
    """A call that breaks one rule and, where one can, all that come after it."""

    told: str
    waitpoints: list[Fresh | UsePending]
    condition: Any
    past: bool = True


RULES = [
    Rule("waitpoints_empty", [], AllMet(())),
    Rule("allof_empty_members", [Fresh(ONE, ""), Fresh(ONE, ""), UsePending(ONE)], AllMet(())),
    Rule("timeout_only_without_deadline", [Fresh(ONE, ""), Fresh(ONE, "")], TimeoutOnly(), past=False),
    Rule("waitpoint_key_empty", [Fresh(ONE, "k"), Fresh(ONE, ""), UsePending(ONE)], on("other")),
    Rule("duplicate_waitpoint_binding", [Fresh(ONE, "k"), Fresh(ONE, "l"), UsePending(TWO)], on("other")),
    Rule("duplicate_waitpoint_binding", [Fresh(ONE, "k"), Fresh(TWO, "k"), UsePending(new_id())], on("other")),
    Rule("duplicate_waitpoint_binding", [Fresh(ONE, "k"), UsePending(ONE)], on("other")),
    Rule("duplicate_waitpoint_binding", [UsePending(ONE), UsePending(ONE)], on("other")),
    Rule("use_pending_with_extras_unsupported", [Fresh(ONE, "k"), UsePending(TWO)], on("other")),
    Rule("use_pending_with_extras_unsupported", [UsePending(ONE), UsePending(TWO)], on("other")),
    Rule("waitpoint_key_mismatch", [Fresh(ONE, "k")], on("other")),
    Rule("referenced_waitpoint_key_missing_binding: m", [Fresh(ONE, "k"), Fresh(TWO, "l")], all_of("k", "m")),
    Rule("referenced_waitpoint_key_missing_binding: m", [Fresh(ONE, "k")], any_of("m", "k")),
    Rule("referenced_waitpoint_key_missing_binding: m", [Fresh(ONE, "k"), Fresh(TWO, "l")], on("m")),
    Rule("extra_binding_not_referenced_by_condition: l", [Fresh(ONE, "k"), Fresh(TWO, "l")], on("k")),
    Rule("extra_binding_not_referenced_by_condition: k", [Fresh(ONE, "k"), Fresh(TWO, "l")], OperatorOnly()),
    Rule("extra_binding_not_referenced_by_condition: l", [Fresh(ONE, "k"), Fresh(TWO, "l")], any_of("k")),
    Rule("timeout_at_in_past", [Fresh(ONE, "k")], on("k")),
    Rule("timeout_at_in_past", [UsePending(ONE)], on("k")),
    Rule("timeout_at_in_past", [Fresh(ONE, "k")], TimeoutOnly()),
]


@pytest.mark.parametrize("by", ["handle", "triple"])
@pytest.mark.parametrize("state", ["A", "S", "missing"])
async def test_the_first_broken_rule_is_reported_in_every_state(world: SuspendingWorld, by: str, state: str) -> None:
    world.engine.checking = False
    handle = stranger(id_in(5)) if state == "missing" else (await world.reach(state)).handle
    before = await world.stored()
    now = await world.clock.now()
    rows = Rows()
    for rule in RULES:
        with rows.row(rule):
            with pytest.raises(ff.InvalidInput) as refused:
                await _call(
                    world.engine,
                    by,
                    handle,
                    waitpoints=rule.waitpoints,
                    resume_condition=rule.condition,
                    timeout_at=now + PAST if rule.past else None,
                )
            assert refused.value.problem.split(" at ")[0] == rule.told
            assert rule.told in refused.value.detail
            assert await world.stored() == before
    rows.tell()


async def _call(engine: ff.Engine, by: str, handle: Handle, **args: Any) -> Suspended | AlreadySatisfied:
    if by == "handle":
        return await engine.suspend(handle, **args)
    return await engine.suspend_by_triple(handle.fence, **args)


async def test_ten_minutes_of_another_clock_are_tolerated(world: SuspendingWorld) -> None:
    wait = await world.suspend(timeout_at=await world.clock.now() - timedelta(minutes=9, seconds=30))
    assert await world.at(wait.id) == "S"
    assert (await world.engine.run_timers("suspension")).handled == 1
    assert await world.at(wait.id) == "T:failed"


@pytest.mark.parametrize(
    ("condition", "keys"), [(OperatorOnly(), ["k"]), (TimeoutOnly(), ["k"]), (all_of("a", OperatorOnly()), ["a"])]
)
async def test_a_sole_binding_need_not_be_in_the_condition(
    world: SuspendingWorld, condition: Condition, keys: list[str]
) -> None:
    wait = await world.suspend(condition, *keys, timeout_at=await world.in_an_hour())
    assert (await world.accept(wait)).effect == APPENDED
    assert await world.at(wait.id) == "S"


# ---- what refuses a suspension, step by step


@dataclass
class Scene:
    """A call about to be made: who makes it, on what, and how the refusal is named."""

    handle: Handle
    waitpoints: list[Fresh | UsePending]
    condition: Condition
    key: str | None = None


Build = Callable[[SuspendingWorld], Awaitable[Scene]]


async def _broken(world: SuspendingWorld, wait: Waiting, handle: Handle | None = None) -> Scene:
    """A waitpoint id that is used already, no key that signs, and a lease that is not the caller's."""
    used = wait.points["k"].id if "k" in wait.points else (await world.pend(of=wait)).points["k"].id
    await forget_the_key(world)
    stale = msgspec.structs.replace(wait.handle, lease_id=new_id())
    return Scene(handle or stale, [Fresh(used, "k")], on("k"))


async def _suspended_handle(world: SuspendingWorld) -> Scene:
    handle = stranger(id_in(5))
    return Scene(msgspec.structs.replace(handle, kind=HandleKind.SUSPENDED), [Fresh(ONE, "k")], on("k"))


async def _no_execution(world: SuspendingWorld) -> Scene:
    return Scene(stranger(id_in(5)), [Fresh(ONE, "k")], on("k"), "key")


async def _is_suspended(world: SuspendingWorld) -> Scene:
    return await _broken(world, await world.suspend())


async def _is_ended(world: SuspendingWorld) -> Scene:
    wait = await world.pend()
    scene = await _broken(world, wait)
    await world.engine.complete(wait.handle)
    return scene


async def _is_delayed(world: SuspendingWorld) -> Scene:
    wait = await world.pend()
    scene = await _broken(world, wait)
    await world.engine.delay(wait.handle, HOUR)
    return scene


async def _is_resumed(world: SuspendingWorld) -> Scene:
    wait = await world.suspend()
    await world.engine.resume_execution(wait.id)
    return await _broken(world, wait)


async def _is_revoked(world: SuspendingWorld) -> Scene:
    wait = await world.pend(lease_ttl=30 * SECOND)
    scene = await _broken(world, wait)
    await world.engine.revoke_lease(wait.id)
    await world.clock.advance(seconds=31)
    return scene


async def _is_marked(world: SuspendingWorld) -> Scene:
    wait = await world.pend(lease_ttl=30 * SECOND)
    scene = await _broken(world, wait)
    await world.clock.advance(seconds=31)
    await world.engine.mark_lease_expired_if_due(wait.id)
    return scene


async def _is_lapsed(world: SuspendingWorld) -> Scene:
    wait = await world.pend(lease_ttl=30 * SECOND)
    scene = await _broken(world, wait)
    await world.clock.advance(seconds=31)
    return scene


def _is_stale(**change: Any) -> Build:
    async def build(world: SuspendingWorld) -> Scene:
        wait = await world.pend()
        wrong = {name: value() for name, value in change.items()}
        return await _broken(world, wait, msgspec.structs.replace(wait.handle, **wrong))

    return build


async def _is_open(world: SuspendingWorld) -> Scene:
    """An open suspension of an execution that runs: cannot be, but would be refused."""
    wait = await world.suspend()
    world.engine.checking = False
    await world.sql.execute(
        "update flowfabric.execution set state = 'active', pending = null, blocking_reason = null,"
        " blocking_detail = null, epoch = epoch - 1"
    )
    return await _broken(world, wait, wait.handle)


def _is_used(how: Callable[[SuspendingWorld, Waiting], Awaitable[UUID]]) -> Build:
    async def build(world: SuspendingWorld) -> Scene:
        wait = await world.pend()
        target = await how(world, wait)
        await forget_the_key(world)
        return Scene(wait.handle, [Fresh(target, "k")], on("k"))

    return build


def _uses(how: Callable[[SuspendingWorld, Waiting], Awaitable[UUID]], key: str = "other") -> Build:
    """A pending waitpoint that is none, under a condition on another key."""

    async def build(world: SuspendingWorld) -> Scene:
        wait = await world.pend()
        target = await how(world, wait)
        return Scene(wait.handle, [UsePending(target)], on(key))

    return build


async def _foreign_and_closed(world: SuspendingWorld, wait: Waiting) -> UUID:
    other = await world.pend(execution_id=id_in(home(wait.id)))
    return await _closed(world, other)


async def _of_an_earlier_attempt(world: SuspendingWorld, wait: Waiting) -> UUID:
    target = wait.point.id
    await world.engine.revoke_lease(wait.id)
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    return target


async def _closed_and_past_its_time(world: SuspendingWorld, wait: Waiting) -> UUID:
    await _closed(world, wait)
    await world.clock.advance(hours=2)
    return wait.point.id


async def _past_its_time(world: SuspendingWorld, wait: Waiting) -> UUID:
    await world.clock.advance(hours=2)
    return wait.point.id


async def _used_up(world: SuspendingWorld, wait: Waiting) -> UUID:
    """Closed by the suspension that used it."""
    await world.suspend_on_pending(wait)
    await world.engine.resume_execution(wait.id)
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    return wait.point.id


async def _unsigned(world: SuspendingWorld) -> Scene:
    wait = await world.hold()
    await forget_the_key(world)
    return Scene(wait.handle, [Fresh(new_id(), "k")], on("k"))


STEPS: list[tuple[Build, str, str]] = [
    # who builds it, what suspend is told, what suspend_by_triple is told
    (_suspended_handle, "already_suspended", "not_found"),
    (_no_execution, "not_found", "not_found"),
    (_is_suspended, "already_suspended", "execution_not_active"),
    (_is_ended, "execution_not_active", "execution_not_active"),
    (_is_delayed, "execution_not_active", "execution_not_active"),
    (_is_resumed, "execution_not_active", "execution_not_active"),
    (_is_revoked, "lease_revoked", "lease_revoked"),
    (_is_marked, "lease_expired", "lease_expired"),
    (_is_lapsed, "lease_expired", "lease_expired"),
    (_is_stale(lease_id=new_id), "stale_lease", "stale_lease"),
    (_is_stale(attempt_id=new_id), "stale_lease", "stale_lease"),
    (_is_stale(lease_epoch=lambda: 7), "stale_lease", "stale_lease"),
    (_is_stale(attempt_index=lambda: 7), "stale_lease", "stale_lease"),
    (_is_open, "already_suspended", "already_suspended"),
    (_is_used(_pending), "waitpoint_already_exists", "waitpoint_already_exists"),
    (_is_used(_closed), "waitpoint_already_exists", "waitpoint_already_exists"),
    (_is_used(_expired), "waitpoint_already_exists", "waitpoint_already_exists"),
    (_is_used(_foreign), "waitpoint_already_exists", "waitpoint_already_exists"),
    (_is_used(_used_up), "waitpoint_already_exists", "waitpoint_already_exists"),
    (_uses(_unknown), "not_found", "not_found"),
    (_uses(_elsewhere), "invalid_waitpoint_for_execution", "invalid_waitpoint_for_execution"),
    (_uses(_foreign), "invalid_waitpoint_for_execution", "invalid_waitpoint_for_execution"),
    (_uses(_foreign_and_closed), "invalid_waitpoint_for_execution", "invalid_waitpoint_for_execution"),
    (_uses(_of_an_earlier_attempt), "invalid_waitpoint_for_execution", "invalid_waitpoint_for_execution"),
    (_uses(_closed_and_past_its_time), "waitpoint_not_pending", "waitpoint_not_pending"),
    (_uses(_used_up), "waitpoint_not_pending", "waitpoint_not_pending"),
    (_uses(_past_its_time), "pending_waitpoint_expired", "pending_waitpoint_expired"),
    (_uses(_expired), "pending_waitpoint_expired", "pending_waitpoint_expired"),
    (_uses(_pending), "waitpoint_key_mismatch", "waitpoint_key_mismatch"),
    (_unsigned, "hmac_secret_not_initialized", "hmac_secret_not_initialized"),
]


def _step_name(value: object) -> str:
    return getattr(value, "__qualname__", str(value)).replace(".<locals>.build", "").strip("_")


@pytest.mark.parametrize("by", ["handle", "triple"])
@pytest.mark.parametrize(("build", "suspend", "triple"), STEPS, ids=_step_name)
async def test_the_first_check_that_fails_is_reported_and_nothing_is_changed(
    world: SuspendingWorld, build: Build, suspend: str, triple: str, by: str
) -> None:
    scene = await build(world)
    before = await world.stored()
    call = _call(
        world.engine,
        by,
        scene.handle,
        waitpoints=scene.waitpoints,
        resume_condition=scene.condition,
        idempotency_key=scene.key,
    )
    if (expected := suspend if by == "handle" else triple) == "not_found":
        with pytest.raises(ff.NotFound) as missing:
            await call
        assert missing.value.entity == ("waitpoint" if isinstance(scene.waitpoints[0], UsePending) else "execution")
    else:
        assert await code(call) == expected
    # All that a refusal may leave behind: the mark of a lapsed lease, and a waitpoint past its time.
    allowed: dict[Build, set[str]] = {_is_lapsed: {"execution", "event", "ready"}}
    left = changed(before, await world.stored())
    if expected == "pending_waitpoint_expired" and left:
        assert set(left) == {"waitpoint"}
        assert [row["state"] for row in left["waitpoint"]] == ["expired"]
    else:
        assert set(left) == allowed.get(build, set())


async def test_a_pending_waitpoint_past_its_time_is_marked_when_it_is_met(world: SuspendingWorld) -> None:
    wait = await world.pend(expires_in=MINUTE)
    await world.clock.advance(seconds=61)
    assert await told(world.suspend_on_pending(wait)) == "pending_waitpoint_expired"
    assert await world.closed(wait) == {"k": ("expired", "never_committed")}
    # The lease is still held, and another waitpoint may be made.
    await world.pend(of=wait)
    assert isinstance(await world.suspend_on_pending(wait), Suspended)


async def test_an_execution_that_is_not_active_is_refused_with_all_four_facts(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    with pytest.raises(ExecutionNotActive) as refused:
        await _call(world.engine, "triple", wait.handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k"))
    error = refused.value
    assert (error.terminal_outcome, error.lifecycle_phase) == ("none", "suspended")
    assert (error.lease_epoch, error.attempt_id) == ("2", str(wait.handle.attempt_id))


async def test_a_pending_waitpoint_is_used_without_a_key_that_signs(world: SuspendingWorld) -> None:
    wait = await world.pend()
    await forget_the_key(world)
    answer = await world.suspend_on_pending(wait)
    assert isinstance(answer, Suspended)
    assert answer.details.waitpoint_token == wait.point.token


async def test_every_part_of_a_triple_is_compared_and_the_rest_is_taken_from_what_is_stored(
    world: SuspendingWorld,
) -> None:
    wait = await world.hold(lane_id="default", lease_ttl=90 * SECOND)
    fence = msgspec.structs.replace(wait.handle.fence, attempt_index=None)
    answer = await world.engine.suspend_by_triple(fence, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k"))
    assert isinstance(answer, Suspended)
    assert answer.handle == msgspec.structs.replace(wait.handle, kind=HandleKind.SUSPENDED)
    assert answer.handle.lease_ttl == 90 * SECOND


# ---- what suspending does

SUSPENDED = {
    "lifecycle_phase": "suspended", "ownership_state": "unowned", "eligibility_state": "not_applicable",
    "terminal_outcome": "none", "attempt_state": "attempt_interrupted", "public_state": "suspended",
}  # fmt: skip


@pytest.mark.parametrize(("reason", "blocks"), SUSPENDS.items())
async def test_suspending_gives_the_lease_back_and_says_why(world: SuspendingWorld, reason: str, blocks: str) -> None:
    wait = await world.suspend(all_of("a", "b"), reason_code=reason)
    assert await world.vector(wait) == {**SUSPENDED, "blocking_reason": blocks}
    record = await world.record(wait.id)
    assert record.blocking_detail is not None
    assert str(wait.points["a"].id) in record.blocking_detail and reason in record.blocking_detail
    assert record.current_waitpoint == wait.points["a"].id == wait.details.waitpoint_id
    assert (record.current_lease, record.lost_lease, record.resume_pending) == (None, None, False)
    described = await world.engine.describe_execution(wait.id)
    assert described is not None and described.current_waitpoint == wait.points["a"].id
    # It is not one of those that an operator blocked before they ran.
    assert await told(world.engine.unblock_execution(wait.id)) == "execution_not_eligible"


async def test_suspending_interrupts_the_attempt_and_raises_the_epoch(world: SuspendingWorld) -> None:
    wait = await world.hold()
    (before,) = await world.engine.list_attempts(wait.id)
    await world.clock.advance(seconds=5)
    await world.suspend(of=wait)
    suspension = await world.suspension(wait)
    (after,) = await world.engine.list_attempts(wait.id)
    assert after == msgspec.structs.replace(
        before, attempt_lifecycle="suspended", suspended_at=suspension.suspended_at, lease_epoch=2
    )
    record = await world.record(wait.id)
    assert (record.current_lease_epoch, record.total_attempt_count) == (wait.handle.lease_epoch + 1, 1)
    assert record.last_transition_at == suspension.suspended_at
    *_, event = await world.events(wait)
    assert short([event]) == ["L:revoked"]
    assert (event.reason, event.revoked_by) == ("suspend", "backend")
    assert (event.lease_id, event.lease_epoch) == (wait.handle.lease_id, wait.handle.lease_epoch)
    assert (event.attempt_id, event.worker_instance_id) == (wait.handle.attempt_id, "pool-1")


async def test_every_waitpoint_of_a_suspension_is_active_and_its_own(world: SuspendingWorld) -> None:
    at = await world.in_an_hour()
    wait = await world.suspend(all_of("a", on("b", "x"), "c"), timeout_at=at)
    suspension = await world.suspension(wait)
    for key, point in wait.points.items():
        row = await world.waitpoint(wait, key)
        assert (row["state"], row["suspension_id"], row["attempt_index"]) == ("active", wait.details.suspension_id, 0)
        assert row["activated_at"] == row["created_at"] == suspension.suspended_at
        assert (row["expires_at"], row["waitpoint_key"]) == (at, key)
        assert row["required_signal_names"] == (["x"] if key == "b" else [])
        assert point.token.kid == "k1"
    assert suspension.waitpoint_keys == ("a", "b", "c")
    assert suspension.waitpoint_ids == tuple(point.id for point in wait.points.values())
    assert len({point.token for point in wait.points.values()}) == 3


async def test_a_suspension_is_kept_as_it_was_asked_for(world: SuspendingWorld) -> None:
    condition = all_of(on("a", "x"), from_sources(2, "a", "b"))
    at = await world.in_an_hour()
    suspension_id = new_id()
    wait = await world.suspend(
        condition,
        suspension_id=suspension_id,
        reason_code="waiting_for_tool_result",
        requested_by="policy",
        timeout_at=at,
        timeout_behavior="expire",
        continuation_metadata_pointer="s3://bucket/key",
        resume_policy=ResumePolicy(resume_delay=3 * SECOND, consume_matched_signals=False),
    )
    found = await world.suspension(wait)
    assert (found.suspension_id, found.execution_id, found.attempt_index) == (suspension_id, wait.id, 0)
    assert (found.reason_code, found.requested_by) == ("waiting_for_tool_result", "policy")
    assert (found.timeout_at, found.timeout_behavior) == (at, "expire")
    assert found.continuation_metadata_pointer == "s3://bucket/key"
    assert found.resume_condition == condition_to_json(condition)
    assert found.resume_policy == {
        "resume_target": "runnable", "resume_delay_ms": 3000, "consume_matched_signals": False,
        "retain_signal_buffer_until_closed": False, "close_waitpoint_on_resume": True,
    }  # fmt: skip
    assert (found.closed_at, found.close_reason, found.trigger_type) == (None, None, None)
    assert (found.last_signal_at, found.satisfied_at) == (None, None)
    assert (found.closer_signal_id, found.satisfier_signal_ids) == (None, ())
    assert await world.engine.read_suspension((await world.hold()).id) is None


async def test_arguments_left_out_have_defaults(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    found = await world.suspension(wait)
    assert (found.reason_code, found.requested_by) == ("waiting_for_signal", "worker")
    assert (found.timeout_at, found.timeout_behavior) == (None, "fail")
    assert found.continuation_metadata_pointer is None
    assert found.resume_policy == {
        "resume_target": "runnable", "resume_delay_ms": None, "consume_matched_signals": True,
        "retain_signal_buffer_until_closed": False, "close_waitpoint_on_resume": True,
    }  # fmt: skip


POLICY = ExecutionPolicy(suspension_policy=SuspensionPolicy(default_timeout=HOUR, timeout_behavior="cancel"))


@pytest.mark.parametrize("given", [None, timedelta(minutes=5)])
async def test_the_policy_speaks_where_the_call_is_silent(world: SuspendingWorld, given: timedelta | None) -> None:
    at = None if given is None else await world.clock.now() + given
    wait = await world.suspend(creating={"policy": POLICY}, timeout_at=at, timeout_behavior="expire")
    found = await world.suspension(wait)
    expected = (found.suspended_at + HOUR, "cancel") if given is None else (at, "expire")
    assert (found.timeout_at, found.timeout_behavior) == expected
    assert (await world.waitpoint(wait))["expires_at"] == (await world.record(wait.id)).suspension_timeout_at
    assert (await world.record(wait.id)).suspension_timeout_at == found.timeout_at


async def test_the_policy_is_no_deadline_for_who_waits_for_one(world: SuspendingWorld) -> None:
    wait = await world.hold(policy=POLICY)
    assert await code(world.suspend(TimeoutOnly(), "k", of=wait)) == "timeout_only_without_deadline"


async def test_the_time_of_the_attempt_stands_still_while_it_is_suspended(world: SuspendingWorld) -> None:
    timed = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=HOUR))
    wait = await world.hold(policy=timed)
    started = (await world.record(wait.id)).started_at
    await world.clock.advance(minutes=20)
    await world.suspend(of=wait)
    suspended = await world.record(wait.id)
    assert suspended.attempt_timeout_at is None
    assert suspended.attempt_timeout_remaining == started + HOUR - suspended.last_transition_at
    await world.clock.advance(hours=5)
    await world.engine.run_timers("attempt")
    assert await world.engine.expire_execution(wait.id, "attempt_timeout") == "not_yet_due"
    assert await world.at(wait.id) == "S"
    await world.engine.resume_execution(wait.id)
    again = await world.reclaim_resumed(wait)
    record = await world.record(wait.id)
    assert record.current_lease is not None
    assert record.attempt_timeout_at == again.attempt_timeout_at
    assert again.attempt_timeout_at == record.current_lease.acquired_at + (suspended.attempt_timeout_remaining or DAY)
    await world.clock.advance(minutes=39)
    assert (await world.engine.run_timers("attempt")).handled == 0
    await world.clock.advance(minutes=2)
    assert (await world.engine.run_timers("attempt")).handled == 1
    assert await world.at(wait.id) in ("D.r", "T:expired")


@pytest.mark.parametrize("given", [timedelta(minutes=7), timedelta(0)])
async def test_who_claims_again_may_say_how_much_time_the_attempt_has_left(
    world: SuspendingWorld, given: timedelta
) -> None:
    timed = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=HOUR))
    wait = await world.suspend(creating={"policy": timed})
    left = (await world.record(wait.id)).attempt_timeout_remaining
    await world.engine.resume_execution(wait.id)
    again = await world.reclaim_resumed(wait, remaining_attempt_timeout=given)
    lease = (await world.record(wait.id)).current_lease
    assert lease is not None and again.attempt_timeout_at == lease.acquired_at + (given or left or DAY)


async def test_the_deadline_of_the_execution_keeps_running(world: SuspendingWorld) -> None:
    wait = await world.suspend(creating={"execution_deadline_at": HOUR})
    deadline = (await world.record(wait.id)).deadline_at
    await world.clock.advance(minutes=59)
    assert await world.engine.next_due() == deadline
    await world.clock.advance(minutes=2)
    assert (await world.engine.run_timers("deadline")).handled == 1
    assert await world.at(wait.id) == "T:expired"
    assert await world.closed(wait) == {"k": ("closed", "expired:execution_deadline")}


async def test_the_answer_names_every_waitpoint_and_gives_a_handle_in_return(world: SuspendingWorld) -> None:
    wait = await world.hold()
    ids = [new_id() for _ in range(3)]
    suspension_id = new_id()
    answer = await world.engine.suspend(
        wait.handle,
        waitpoints=[Fresh(one, key) for one, key in zip(ids, ("db", "cache", "flags"), strict=True)],
        resume_condition=all_of("flags", "db", "cache"),
        suspension_id=suspension_id,
    )
    assert isinstance(answer, Suspended)
    details = answer.details
    assert (details.suspension_id, details.waitpoint_id, details.waitpoint_key) == (suspension_id, ids[0], "db")
    assert [(one.waitpoint_id, one.waitpoint_key) for one in details.additional_waitpoints] == [
        (ids[1], "cache"),
        (ids[2], "flags"),
    ]
    key = home(wait.id)
    tokens = [details.waitpoint_token, *(one.waitpoint_token for one in details.additional_waitpoints)]
    assert tokens == [await world.engine.read_waitpoint_token(key, one) for one in ids]
    assert answer.handle == msgspec.structs.replace(wait.handle, kind=HandleKind.SUSPENDED)
    for token in tokens:
        assert token.reveal() not in repr(answer) and token.reveal()[3:] not in repr(answer)


HOLDER_CALLS: dict[str, Callable[[ff.Engine, Handle], Awaitable[Any]]] = {
    "renew": lambda e, h: e.renew(h),
    "progress": lambda e, h: e.progress(h, percent=1),
    "complete": lambda e, h: e.complete(h, b"1"),
    "fail": lambda e, h: e.fail(h, "boom"),
    "cancel": lambda e, h: e.cancel(h, "enough"),
    "delay": lambda e, h: e.delay(h, HOUR),
    "release": lambda e, h: e.release(h),
    "wait_children": lambda e, h: e.wait_children(h),
    "create_waitpoint": lambda e, h: e.create_waitpoint(h, "k", HOUR),
    "close_waitpoint": lambda e, h: e.close_waitpoint(h, new_id()),
    "open_wait": lambda e, h: e.open_wait(h, "w", 0, ["k"], None),
    "settle_wait": lambda e, h: e.settle_wait(h, "w", 0, on("k")),
    "refuse_signals": lambda e, h: e.refuse_signals(h, "w", 0, {}),
    "suspend_on": lambda e, h: e.suspend_on(h, [new_id()], on("k")),
}


@pytest.mark.parametrize("name", HOLDER_CALLS)
async def test_a_suspended_handle_is_good_for_observing_and_nothing_else(world: SuspendingWorld, name: str) -> None:
    wait = await world.suspend()
    assert wait.suspended is not None
    before = await world.stored()
    # The handle that it replaces is as dead: its fence was spent.
    assert await told(HOLDER_CALLS[name](world.engine, wait.suspended.handle)) == "stale_lease"
    assert await told(HOLDER_CALLS[name](world.engine, wait.handle)) in ("execution_not_active", "already_suspended")
    assert await world.stored() == before
    sent = await world.accept(wait, payload=b"\0\xff")
    for handle in (wait.suspended.handle, Handle.decode(wait.suspended.handle.encode())):
        (seen,) = await world.engine.observe_signals(handle)
        assert (seen.signal_id, seen.payload) == (sent.signal_id, b"\0\xff")
    again = await world.reclaim_resumed(wait)
    assert await told(HOLDER_CALLS[name](world.engine, wait.suspended.handle)) == "stale_lease"
    assert await told(HOLDER_CALLS[name](world.engine, wait.handle)) == "stale_lease"
    await world.engine.complete(again.handle)


# ---- satisfied before it suspends

EARLY: list[tuple[Condition, list[dict[str, Any]], list[int] | None]] = [
    # condition, signals that are there already, which of them satisfied it (the last one is the closer)
    (on("k"), [{}], [0]),
    (on("k"), [{}, {}, {}], [0]),
    (on("k", "yes"), [{"signal_name": "no"}, {"signal_name": "yes"}, {"signal_name": "yes"}], [1]),
    (on("k", "yes"), [{"signal_name": "no"}], None),
    (on("k"), [], None),
    (OperatorOnly(), [{}], None),
    (count_signals(2, "k"), [{}], None),
    (count_signals(2, "k"), [{}, {}, {}], [0, 1]),
    (
        from_sources(2, "k"),
        [{"source_identity": "a"}, {"source_identity": "a"}, {"source_identity": "b"}, {"source_identity": "c"}],
        [0, 2],
    ),
    (all_of(on("k", "a"), on("k", "b")), [{"signal_name": "b"}, {"signal_name": "x"}, {"signal_name": "a"}], [0, 2]),
    (all_of(on("k", "a"), OperatorOnly()), [{"signal_name": "a"}], None),
    (any_of("k", name="x"), [{"signal_name": "y"}, {"signal_name": "x"}], [1]),
]


@pytest.mark.parametrize(("condition", "sent", "satisfiers"), EARLY, ids=lambda value: str(value)[:50])
async def test_signals_that_arrived_before_may_be_enough(
    world: SuspendingWorld, condition: Condition, sent: list[dict[str, Any]], satisfiers: list[int] | None
) -> None:
    wait = await world.pend()
    signals = [await world.accept(wait, payload=str(n).encode(), **fields) for n, fields in enumerate(sent)]
    assert {one.effect for one in signals} <= {BUFFERED}
    before = await world.record(wait.id)
    events = await world.events(wait)
    answer = await world.suspend_on_pending(
        wait, condition, resume_policy=ResumePolicy(resume_delay=HOUR), reason_code="waiting_for_callback"
    )
    found = await world.suspension(wait)
    effects = [one.observed_effect for one in (await world.engine.read_signals(wait.id)).items]
    suspensions = {one.suspension_id for one in (await world.engine.read_signals(wait.id)).items}
    assert suspensions <= {found.suspension_id}
    if satisfiers is None:
        assert isinstance(answer, Suspended)
        assert await world.at(wait.id) == "S"
        assert effects == [APPENDED] * len(sent)
        assert (found.closed_at, found.satisfier_signal_ids) == (None, ())
        assert await world.closed(wait) == {"k": ("active", None)}
        return
    assert isinstance(answer, AlreadySatisfied)
    assert answer.details is not None
    assert answer.details.waitpoint_id == wait.point.id
    assert (answer.details.waitpoint_key, answer.details.waitpoint_token) == ("k", wait.point.token)
    assert answer.details.additional_waitpoints == ()
    # Neither lease nor phase nor attempt knows of it.
    assert await world.record(wait.id) == before
    assert await world.events(wait) == events
    assert await world.closed(wait) == {"k": ("closed", "resumed")}
    assert found.suspension_id == answer.details.suspension_id
    assert (found.close_reason, found.reason_code) == ("resumed", "waiting_for_callback")
    assert found.suspended_at == found.closed_at == found.satisfied_at
    assert found.satisfier_signal_ids == tuple(signals[n].signal_id for n in satisfiers)
    assert found.closer_signal_id == signals[satisfiers[-1]].signal_id
    assert effects == [SATISFIED if n == satisfiers[-1] else APPENDED for n in range(len(sent))]
    seen = await world.engine.observe_signals(wait.handle)
    assert [(one.signal_id, one.payload) for one in seen] == [
        (signals[n].signal_id, str(n).encode()) for n in satisfiers
    ]
    # It is over: a late signal is refused, nothing times out, and the worker continues.
    assert await told(world.send(wait)) == "waitpoint_closed"
    await world.engine.renew(wait.handle)
    await world.engine.complete(wait.handle)


async def test_signals_that_were_not_enough_before_still_count(world: SuspendingWorld) -> None:
    wait = await world.pend()
    first = await world.accept(wait, source_identity="a")
    assert isinstance(await world.suspend_on_pending(wait, from_sources(2, "k")), Suspended)
    last = await world.accept(wait, source_identity="b")
    assert last.effect == SATISFIED
    assert (await world.suspension(wait)).satisfier_signal_ids == (first.signal_id, last.signal_id)


async def test_a_suspension_that_never_opened_blocks_nothing(world: SuspendingWorld) -> None:
    wait = await world.pend()
    sent = await world.accept(wait)
    answer = await world.suspend_on_pending(wait, timeout_at=await world.in_an_hour())
    assert isinstance(answer, AlreadySatisfied)
    page = await world.engine.list_suspended(home(wait.id))
    assert page.items == []
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 0
    assert [one.signal_id for one in await world.engine.observe_signals(wait.handle)] == [sent.signal_id]
    await world.suspend(on("b"), of=wait)
    assert await world.engine.observe_signals(wait.handle) == []


# ---- the same call once more


async def _repeat(world: SuspendingWorld, handle: Handle, by: str = "handle", **args: Any) -> Any:
    given = {"waitpoints": [Fresh(new_id(), "z")], "resume_condition": on("z"), "idempotency_key": "key", **args}
    return await _call(world.engine, by, handle, **given)


async def _resumed(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.resume_execution(wait.id)


async def _running_elsewhere(world: SuspendingWorld, wait: Waiting) -> None:
    await _resumed(world, wait)
    await claim_one(world.engine, **OTHER, lease_ttl=7 * MINUTE)


async def _over(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.cancel(Operator(wait.id), "enough")


async def _signalled(world: SuspendingWorld, wait: Waiting) -> None:
    await world.accept(wait)


async def _nothing(world: SuspendingWorld, wait: Waiting) -> None:
    pass


@pytest.mark.parametrize("then", [_nothing, _resumed, _running_elsewhere, _signalled, _over])
@pytest.mark.parametrize("by", ["handle", "triple"])
async def test_a_repeated_suspend_gets_the_first_answer_whatever_happened_since(
    world: SuspendingWorld, then: Callable[[SuspendingWorld, Waiting], Awaitable[None]], by: str
) -> None:
    wait = await world.hold()
    first = await _call(
        world.engine,
        by,
        wait.handle,
        waitpoints=[Fresh(new_id(), "k"), Fresh(new_id(), "l")],
        resume_condition=any_of("k", "l"),
        idempotency_key="key",
    )
    await then(world, bound(wait, first))
    before = await world.stored()
    # Other arguments do not make it another call, nor ids that are used already.
    used = UUID(str(wait.points["k"].id))
    for args in ({}, {"waitpoints": [Fresh(used, "z")]}, {"reason_code": "manual_pause", "timeout_behavior": "cancel"}):
        again = await _repeat(world, wait.handle, by, **args)
        assert isinstance(again, Suspended) and isinstance(first, Suspended)
        assert again.details == first.details
        if by == "handle" or then is not _running_elsewhere:
            assert again.handle == first.handle
    assert await world.stored() == before


async def test_a_repeated_early_answer_is_the_same_too(world: SuspendingWorld) -> None:
    wait = await world.pend()
    await world.accept(wait)
    first = await world.suspend_on_pending(wait, idempotency_key="key")
    assert isinstance(first, AlreadySatisfied)
    before = await world.stored()
    for by in ("handle", "triple"):
        assert await _repeat(world, wait.handle, by) == first
    assert await world.stored() == before
    await world.engine.renew(wait.handle)


@pytest.mark.parametrize("key", [None, "", "another"])
async def test_without_the_same_key_a_repeated_suspend_is_another(world: SuspendingWorld, key: str | None) -> None:
    wait = await world.suspend(idempotency_key="" if key is None else key if key == "" else "key")
    before = await world.stored()
    assert await told(_repeat(world, wait.handle, idempotency_key=key)) == "already_suspended"
    assert await told(_repeat(world, wait.handle, "triple", idempotency_key=key)) == "execution_not_active"
    assert await world.stored() == before


async def test_a_key_belongs_to_its_execution(world: SuspendingWorld) -> None:
    one = await world.suspend(idempotency_key="key")
    two = await world.hold(execution_id=id_in(home(one.id)))
    answer = await _repeat(world, two.handle)
    assert isinstance(answer, Suspended)
    assert answer.details.suspension_id != one.details.suspension_id
    assert answer.details.waitpoint_key == "z"


@pytest.mark.parametrize("part", ["lease_id", "lease_epoch", "attempt_id"])
async def test_a_key_alone_opens_nothing(world: SuspendingWorld, part: str) -> None:
    """The answer holds tokens: who does not show the whole fence of the first call does not get it."""
    wait = await world.suspend(idempotency_key="key")
    value: Any = wait.handle.lease_epoch + 1 if part == "lease_epoch" else new_id()
    other = msgspec.structs.replace(wait.handle, **{part: value})
    before = await world.stored()
    assert await told(_repeat(world, other)) == "already_suspended"
    assert await told(_repeat(world, other, "triple")) == "execution_not_active"
    assert await world.stored() == before


async def test_the_next_lease_may_use_the_key_again_and_replaces_what_it_stood_for(world: SuspendingWorld) -> None:
    wait = await world.suspend(idempotency_key="key")
    first, old = wait.suspended, wait.handle
    await world.engine.resume_execution(wait.id)
    wait.claimed = await world.reclaim_resumed(wait)
    assert await _repeat(world, old) == first
    # A call of the next lease that is refused replaces nothing.
    assert await code(_repeat(world, wait.handle, waitpoints=[UsePending(new_id())])) == "not_found"
    assert await _repeat(world, old) == first
    second = await _repeat(world, wait.handle)
    assert isinstance(second, Suspended)
    assert second.details.waitpoint_key == "z"
    assert await _repeat(world, wait.handle) == second
    assert await told(_repeat(world, old)) == "already_suspended"


LIFETIMES: list[tuple[timedelta | None, timedelta]] = [
    (None, timedelta(days=7)),
    (HOUR, HOUR + MINUTE),
    (timedelta(days=30), timedelta(days=7)),
    (timedelta(days=7) - MINUTE, timedelta(days=7)),
    (-5 * MINUTE, MINUTE),
    (timedelta(0), MINUTE),
]


@pytest.mark.parametrize(("timeout", "lifetime"), LIFETIMES)
async def test_an_answer_is_kept_for_as_long_as_the_suspension_and_a_minute_and_a_week_at_most(
    world: SuspendingWorld, timeout: timedelta | None, lifetime: timedelta
) -> None:
    at = None if timeout is None else await world.clock.now() + timeout
    wait = await world.suspend(idempotency_key="key", timeout_at=at)
    await world.clock.advance(seconds=lifetime.total_seconds() - 20)
    assert await _repeat(world, wait.handle) == wait.suspended
    await world.clock.advance(seconds=40)
    assert await told(_repeat(world, wait.handle)) == "already_suspended"


async def test_the_policys_time_is_the_lifetime_of_an_answer_as_well(world: SuspendingWorld) -> None:
    wait = await world.suspend(idempotency_key="key", creating={"policy": POLICY})
    await world.clock.advance(minutes=60, seconds=40)
    assert await _repeat(world, wait.handle) == wait.suspended
    await world.clock.advance(seconds=40)
    assert await told(_repeat(world, wait.handle)) == "already_suspended"


# ---- lists


async def test_suspended_executions_are_listed_by_the_time_of_their_suspension(world: SuspendingWorld) -> None:
    partition, elsewhere = 17, 18
    key = partition
    waits = []
    for n in range(6):
        at = await world.in_an_hour() if n % 2 else None
        waits.append(
            await world.suspend(
                creating={"execution_id": id_in(partition)},
                timeout_at=at,
                reason_code="waiting_for_approval" if n % 2 else "manual_pause",
            )
        )
        await world.clock.advance(seconds=1)
    await world.suspend(creating={"execution_id": id_in(elsewhere)})
    await world.hold(execution_id=id_in(partition))
    listed = (await world.engine.list_suspended(key)).items
    assert [one.execution_id for one in listed] == [wait.id for wait in waits]
    for one, wait in zip(listed, waits, strict=True):
        found = await world.suspension(wait)
        assert (one.suspended_at, one.reason, one.timeout_at) == (
            found.suspended_at, found.reason_code, found.timeout_at,
        )  # fmt: skip
    # Resumed, signalled and ended ones are not there any more.
    await world.engine.resume_execution(waits[0].id)
    await world.accept(waits[2])
    await world.engine.cancel(Operator(waits[4].id), "enough")
    assert [one.execution_id for one in (await world.engine.list_suspended(key)).items] == [
        waits[n].id for n in (1, 3, 5)
    ]
    page = await world.engine.list_suspended(key, limit=0)
    assert (list(page.items), page.next_cursor) == ([], None)


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_cursor_survives_the_row_it_points_at_and_skips_no_other(world: SuspendingWorld, at_once: bool) -> None:
    key = 17
    waits = [await world.suspend(creating={"execution_id": id_in(17)}) for _ in range(7)]
    if at_once:
        # One instant for all: the id decides.
        await world.sql.execute("update flowfabric.suspension set suspended_at = '2026-01-01'")
        waits.sort(key=lambda wait: wait.id)
    by_id = {wait.id: wait for wait in waits}
    seen: list[ff.ExecutionId] = []
    cursor: str | None = None
    while True:
        page = await world.engine.list_suspended(key, cursor=cursor, limit=2)
        seen += [one.execution_id for one in page.items]
        for one in page.items:
            await world.engine.resume_execution(by_id[one.execution_id].id)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [wait.id for wait in waits]


async def test_open_waitpoints_of_all_partitions_are_listed_the_longest_waiting_first(world: SuspendingWorld) -> None:
    waits = []
    for n in range(6):
        lane = "a" if n < 2 else "default"
        waits.append(
            await world.suspend(
                all_of("x", "y") if n == 3 else on("x", "go"),
                creating={"namespace": "n" if n % 2 else "", "lane_id": lane},
                reason_code="waiting_for_approval",
            )
        )
        await world.clock.advance(seconds=1)
    pending = await world.pend("p", expires_in=MINUTE)
    await world.accept(pending)
    expected = [(wait.id, key) for wait in waits for key in sorted(wait.points, key=lambda k, w=wait: w.points[k].id)]
    expected.append((pending.id, "p"))

    async def listed(**filters: Any) -> list[tuple[ff.ExecutionId, str]]:
        page = await world.engine.list_waits(**filters)
        assert page.next_cursor is None
        return [(one.execution_id, one.waitpoint_key) for one in page.items]

    assert await listed() == expected
    assert await listed(lane_id="a") == expected[:2]
    assert await listed(namespace="n") == [pair for n in (1, 3, 5) for pair in expected if pair[0] == waits[n].id]
    assert await listed(waitpoint_key="y") == [(waits[3].id, "y")]
    assert await listed(lane_id="a", namespace="n") == [(waits[1].id, "x")]
    assert await listed(limit=0) == []
    for size in (1, 3, 8):
        seen, cursor = [], None
        while True:
            page = await world.engine.list_waits(cursor=cursor, limit=size)
            seen += [(one.execution_id, one.waitpoint_key) for one in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert seen == expected
    first, *_, last = (await world.engine.list_waits()).items
    assert (first.state, first.reason, first.required_signal_names) == ("active", "waiting_for_approval", ("go",))
    assert (first.lane_id, first.namespace, first.execution_kind) == ("a", "", "test")
    assert (first.timeout_at, first.timeout_behavior, first.signal_count) == (None, "fail", 0)
    assert (last.state, last.reason, last.signal_count) == ("pending", None, 1)
    assert last.timeout_at == (await world.waitpoint(pending))["expires_at"]
    # What cannot be signalled any more is not there.
    await world.engine.resume_execution(waits[0].id)
    await world.clock.advance(minutes=2)
    assert await listed() == [pair for pair in expected if pair[0] not in (waits[0].id, pending.id)]


# ---- resuming


@pytest.mark.parametrize("condition", [on("k"), OperatorOnly(), TimeoutOnly(), all_of("a", "b")])
@pytest.mark.parametrize("trigger", ["signal", "operator", "auto_resume"])
async def test_an_operator_resumes_whatever_the_condition_says(
    world: SuspendingWorld, condition: Condition, trigger: Any
) -> None:
    keys = ["k"] if isinstance(condition, OperatorOnly | TimeoutOnly) else []
    wait = await world.suspend(condition, *keys, timeout_at=await world.in_an_hour())
    if isinstance(condition, AllMet):
        await world.accept(wait, "a")
    answer = await world.engine.resume_execution(wait.id, trigger)
    assert (answer.execution_id, answer.public_state) == (wait.id, "resumable")
    assert await world.vector(wait) == RESUMED
    record = await world.record(wait.id)
    assert (record.resume_pending, record.current_waitpoint, record.suspension_timeout_at) == (True, None, None)
    assert (record.blocking_detail or "") == ""
    assert set((await world.closed(wait)).values()) == {("closed", "operator_resumed")}
    found = await world.suspension(wait)
    assert (found.close_reason, found.trigger_type, found.satisfied_at) == ("operator_resumed", trigger, None)
    assert (found.closer_signal_id, found.satisfier_signal_ids) == (None, ())
    *_, event = await world.events(wait)
    assert short([event]) == ["O:resumed"]
    assert event.details == {
        "trigger_type": trigger,
        "suspension_id": str(found.suspension_id),
        "resume_delay_ms": 0,
    }
    # Twice is once, and its deadline no longer applies.
    before = await world.stored()
    assert await told(world.engine.resume_execution(wait.id, trigger)) == "execution_not_suspended"
    assert await world.stored() == before
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 0
    assert await world.vector(wait) == RESUMED
    # What had arrived is still recorded, but satisfied nothing.
    claimed = await world.reclaim_resumed(wait)
    assert await world.engine.observe_signals(claimed.handle) == []
    assert len((await world.engine.read_signals(wait.id)).items) == isinstance(condition, AllMet)


async def test_a_resumption_may_wait(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    answer = await world.engine.resume_execution(wait.id, "operator", MINUTE)
    assert answer.public_state == "delayed"
    assert await world.vector(wait) == {
        **RESUMED,
        "eligibility_state": "not_eligible_until_time",
        "blocking_reason": "waiting_for_resume_delay",
        "public_state": "delayed",
    }
    found = await world.suspension(wait)
    record = await world.record(wait.id)
    assert found.closed_at is not None
    assert (record.delay_until, record.resume_pending) == (found.closed_at + MINUTE, True)
    assert await told(world.engine.claim(**WORKER)) == "none"
    assert await told(world.engine.resume_execution(wait.id)) == "execution_not_suspended"
    await world.clock.advance(seconds=59)
    assert (await world.engine.run_timers("delay")).handled == 0
    await world.clock.advance(seconds=2)
    assert (await world.engine.run_timers("delay")).handled == 1
    assert await world.vector(wait) == RESUMED
    assert (await world.record(wait.id)).delay_until is None
    assert (await claim_one(world.engine)).handle.kind is HandleKind.RESUMED


async def test_signals_resume_without_a_lease_or_completion_event(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    before = short(await world.events(wait))
    await world.accept(wait)
    assert short(await world.events(wait)) == [*before, f"S:{SATISFIED}"]


# ---- claiming what was resumed


async def test_the_attempt_continues_under_another_lease(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    await world.accept(wait)
    before = await world.record(wait.id)
    (attempt,) = await world.engine.list_attempts(wait.id)
    await world.clock.advance(seconds=5)
    lease_id = new_id()
    await world.engine.issue_claim_grant(wait.id, **OTHER)
    claimed = await world.engine.claim_resumed_execution(
        wait.id, **OTHER, lease_id=lease_id, lease_ttl=MINUTE, current_attempt_index=9
    )
    handle = claimed.handle
    assert (handle.kind, handle.lease_id, handle.attempt_id) == ("resumed", lease_id, wait.handle.attempt_id)
    assert (handle.attempt_index, handle.lease_epoch) == (0, before.current_lease_epoch + 1)
    assert handle.lease_epoch > wait.handle.lease_epoch
    after = await world.record(wait.id)
    assert after.current_lease is not None
    assert claimed.lease_expires_at == after.current_lease.expires_at == after.current_lease.acquired_at + MINUTE
    assert (after.resume_pending, after.total_attempt_count) == (False, 1)
    assert await world.at(wait.id) == "A"
    (again,) = await world.engine.list_attempts(wait.id)
    assert (again.attempt_lifecycle, again.started_at) == ("started", attempt.started_at)
    assert again.resumed_at == after.current_lease.acquired_at
    *_, event = await world.events(wait)
    assert (short([event]), event.reason) == (["L:acquired"], "claim_resumed")
    assert (event.lease_epoch, event.attempt_id) == (handle.lease_epoch, handle.attempt_id)
    # The first to come is the only one.
    assert await told(world.engine.claim_resumed_execution(wait.id, **WORKER, lease_id=new_id())) == (
        "execution_not_leaseable"
    )


async def test_a_resumed_execution_is_claimed_by_the_grant_of_its_worker_alone(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    args = {"lease_id": new_id()}
    assert await told(world.engine.issue_claim_grant(wait.id, **WORKER)) == "execution_not_eligible"
    assert await told(world.engine.claim_resumed_execution(wait.id, **WORKER, **args)) == "execution_not_leaseable"
    await world.engine.resume_execution(wait.id)
    before = await world.stored()
    assert await told(world.engine.claim_resumed_execution(wait.id, **WORKER, **args)) == "invalid_claim_grant"
    assert await world.stored() == before
    await world.engine.issue_claim_grant(wait.id, **WORKER)
    fresh = {**args, "attempt_id": new_id()}
    assert await told(world.engine.claim_execution(wait.id, **WORKER, **fresh)) == "use_claim_resumed_execution"
    stolen = {"worker_id": "another", "worker_instance_id": "another-1", **args}
    assert await told(world.engine.claim_resumed_execution(wait.id, **stolen)) == "invalid_claim_grant"
    await world.clock.advance(seconds=6)
    assert await told(world.engine.claim_resumed_execution(wait.id, **WORKER, **args)) == "claim_grant_expired"
    assert await world.vector(wait) == RESUMED
    grant = await world.engine.issue_claim_grant(wait.id, **WORKER)
    claimed = await world.engine.claim_from_resume_grant(grant, **WORKER)
    assert claimed is not None
    assert (claimed.handle.kind, claimed.handle.attempt_id) == ("resumed", wait.handle.attempt_id)


@pytest.mark.parametrize("then", ["cancelled", "claimed", "suspended again"])
async def test_a_grant_for_what_cannot_be_resumed_any_more_gives_nothing(world: SuspendingWorld, then: str) -> None:
    wait = await world.suspend()
    await world.engine.resume_execution(wait.id)
    grant = await world.engine.issue_claim_grant(wait.id, **WORKER)
    if then == "cancelled":
        await world.engine.cancel(Operator(wait.id), "enough")
    else:
        wait.claimed = await world.engine.claim_resumed_execution(wait.id, **WORKER, lease_id=new_id(), lease_ttl=LONG)
        if then == "suspended again":
            await world.suspend(of=wait)
    before = await world.stored()
    assert await world.engine.claim_from_resume_grant(grant, **WORKER) is None
    assert await world.stored() == before


async def test_a_plain_claim_takes_a_resumed_execution_as_well(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    assert await world.engine.claim(**WORKER) is None
    await world.engine.resume_execution(wait.id)
    claimed = await claim_one(world.engine)
    assert (claimed.execution_id, claimed.handle.kind) == (wait.id, "resumed")
    assert claimed.handle.attempt_id == wait.handle.attempt_id


async def test_an_attempt_may_suspend_as_often_as_it_likes(world: SuspendingWorld) -> None:
    wait = await world.hold()
    epochs = [wait.handle.lease_epoch]
    for n in range(4):
        await world.suspend(of=wait)
        assert (await world.suspension(wait)).waitpoint_ids == (wait.point.id,)
        sent = await world.accept(wait, payload=str(n).encode())
        wait.claimed = await world.reclaim_resumed(wait)
        assert [one.signal_id for one in await world.engine.observe_signals(wait.handle)] == [sent.signal_id]
        epochs.append(wait.handle.lease_epoch)
    assert epochs == [1, 3, 5, 7, 9]
    assert (await world.record(wait.id)).total_attempt_count == 1
    await world.engine.complete(wait.handle)


# ---- what is seen afterwards


async def _by_signals(world: SuspendingWorld, wait: Waiting) -> list[UUID]:
    await world.accept(wait, signal_name="other", source_identity="a")
    first = await world.accept(wait, signal_name="yes", source_identity="a")
    await world.accept(wait, signal_name="yes", source_identity="a")
    last = await world.accept(wait, signal_name="yes", source_identity="b")
    assert await told(world.send(wait, signal_name="yes", source_identity="c")) == "waitpoint_closed"
    return [first.signal_id, last.signal_id]


async def _still_open(world: SuspendingWorld, wait: Waiting) -> list[UUID]:
    await world.accept(wait, signal_name="yes", source_identity="a")
    return []


async def _by_operator(world: SuspendingWorld, wait: Waiting) -> list[UUID]:
    await _still_open(world, wait)
    await world.engine.resume_execution(wait.id)
    return []


async def _by_cancel(world: SuspendingWorld, wait: Waiting) -> list[UUID]:
    await _still_open(world, wait)
    await world.engine.cancel(Operator(wait.id), "enough")
    return []


async def _by_timeout(world: SuspendingWorld, wait: Waiting) -> list[UUID]:
    await _still_open(world, wait)
    await world.clock.advance(hours=2)
    await world.engine.expire_suspension(wait.id)
    return []


async def _by_auto_resume(world: SuspendingWorld, wait: Waiting) -> list[UUID]:
    await _by_timeout(world, wait)
    (_, own) = (await world.engine.read_signals(wait.id)).items
    assert (own.signal_name, own.source_type, own.source_identity) == ("timeout", "system", "suspension_timeout")
    return [own.signal_id]


SEEN = [
    (_by_signals, "fail"), (_still_open, "fail"), (_by_operator, "fail"), (_by_cancel, "fail"), (_by_timeout, "fail"),
    (_by_timeout, "cancel"), (_by_timeout, "expire"), (_by_timeout, "escalate"),
    (_by_auto_resume, "auto_resume_with_timeout_signal"),
]  # fmt: skip


@pytest.mark.parametrize(("end", "behavior"), SEEN, ids=lambda value: getattr(value, "__name__", value))
async def test_only_what_ended_the_newest_suspension_is_seen(
    world: SuspendingWorld, end: Callable[[SuspendingWorld, Waiting], Awaitable[list[UUID]]], behavior: str
) -> None:
    wait = await world.suspend(
        from_sources(2, "k", name="yes"), timeout_at=await world.in_an_hour(), timeout_behavior=behavior
    )
    assert wait.suspended is not None
    expected = await end(world, wait)

    async def seen(handle: Handle | Fence) -> list[UUID]:
        return [one.signal_id for one in await world.engine.observe_signals(handle)]

    before = await world.stored()
    assert await seen(wait.suspended.handle) == await seen(wait.handle) == await seen(wait.handle.fence) == expected
    # Another attempt saw nothing.
    other = msgspec.structs.replace(wait.suspended.handle, attempt_index=1)
    assert await seen(other) == []
    assert await world.stored() == before
    if await world.at(wait.id) == "W.i":
        again = await world.reclaim_resumed(wait)
        assert await seen(again.handle) == expected
        await world.engine.release(again.handle)
        again = await claim_one(world.engine)
        assert await seen(again.handle) == expected
        wait.claimed = again
        await world.suspend(of=wait)
        assert await seen(again.handle) == []


async def test_before_anything_was_suspended_nothing_is_seen(world: SuspendingWorld) -> None:
    wait = await world.pend()
    await world.accept(wait)
    assert await world.engine.observe_signals(wait.handle) == []
    assert await world.engine.observe_signals(stranger(id_in(5))) == []


async def test_a_signal_is_seen_with_all_that_it_said(world: SuspendingWorld) -> None:
    wait = await world.suspend(on("k", "done"))
    sent = await world.accept(
        wait,
        signal_name="done",
        signal_category="callback",
        source_type="tool",
        source_identity="t-1",
        correlation_id="c-1",
        payload=bytes(range(256)),
        payload_encoding="raw",
    )
    assert wait.suspended is not None
    (seen,) = await world.engine.observe_signals(wait.suspended.handle)
    (stored,) = (await world.engine.read_signals(wait.id)).items
    assert (seen.signal_id, seen.signal_name, seen.signal_category) == (sent.signal_id, "done", "callback")
    assert (seen.source_type, seen.source_identity, seen.correlation_id) == ("tool", "t-1", "c-1")
    assert (seen.payload, seen.payload_encoding, seen.waitpoint_key) == (bytes(range(256)), "raw", "k")
    assert seen.accepted_at == stored.accepted_at


@pytest.mark.both_servers
async def test_a_retry_does_not_see_what_the_attempt_before_it_waited_for(world: SuspendingWorld) -> None:
    retry = ExecutionPolicy(retry_policy=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(seconds=10))))
    wait = await world.suspend(creating={"policy": retry})
    await world.accept(wait)
    claimed = await world.reclaim_resumed(wait)
    await world.engine.fail(claimed.handle, "boom")
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(wait.id)
    again = await claim_one(world.engine)
    assert again.handle.attempt_index == 1
    assert await world.engine.observe_signals(again.handle) == []
    assert len(await world.engine.observe_signals(claimed.handle)) == 1
