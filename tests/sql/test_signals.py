"""Signals: which are accepted, the order of refusals, their effects, and everything else that ends a suspension."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import ValidationFailed
from flowfabric.values.conditions import (
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    TimeoutOnly,
    all_of,
    any_of,
    count_signals,
    from_sources,
    on,
)
from flowfabric.values.event import Event
from flowfabric.values.keystore import AlreadySeeded
from flowfabric.values.lease import HandleKind, Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import AlreadySatisfied, Fresh, ResumePolicy, Suspended
from tests.ids import home, id_in
from tests.interleave import Party, waiting
from tests.sql.cases import outcome
from tests.sql.suspending import (
    APPENDED,
    BUFFERED,
    ENDS,
    HOUR,
    LONG,
    RESUMED,
    SATISFIED,
    SECOND,
    SuspendingWorld,
    Then,
    Waiting,
    cancel,
    changed,
    complete,
    delay,
    ended,
    fail_for_good,
    forged,
    nothing,
    numbered,
    pass_deadline,
    release,
    resume,
    short,
)
from tests.support import WORKER, claim_one, new_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(10))
LIMIT = 65_536


def text_of(events: list[Event]) -> str:
    return json.dumps([str(event) for event in events])


# ---- the order of the steps


@dataclass(frozen=True)
class Step:
    """One step of a delivery: the arguments that fail it, and what is then told."""

    told: str
    breaks: dict[str, Any] = field(default_factory=dict)
    closes: bool = False


FIRST = new_id()
STEPS = {
    "shape": Step("invalid_input", {"signal_name": ""}),
    "token": Step("invalid_token", {"waitpoint_token": "k1:" + "0" * 64}),
    "duplicate": Step("DuplicateSignal", {"signal_id": FIRST}),
    "liveness": Step("waitpoint_closed", closes=True),
    "payload": Step("payload_too_large", {"payload": bytes(LIMIT + 1)}),
    "limit": Step("signal_limit_exceeded", {"max_signals_per_execution": 1}),
    "nothing": Step("Accepted"),
}


@pytest.mark.parametrize("place", range(len(STEPS)), ids=list(STEPS))
async def test_the_first_failed_check_is_reported(world: SuspendingWorld, place: int) -> None:
    """Step number `place` is violated together with all later ones."""
    wait = await world.suspend(on("k", "go"))
    await world.accept(wait, signal_id=FIRST, signal_name="noise")
    broken = list(STEPS.values())[place:]
    if any(step.closes for step in broken):
        await world.engine.resume_execution(wait.id)
    fields = {name: value for step in reversed(broken) for name, value in step.breaks.items()}
    before = await world.stored()
    assert await outcome(world.send(wait, **fields)) == broken[0].told
    after = changed(before, await world.stored())
    match broken[0].told:
        case "Accepted":
            assert "signal" in after
        case "DuplicateSignal":
            assert set(after) == {"event"}
            assert [row["signal_effect"] for row in after["event"]] == ["deduped"]
        case "invalid_token":
            assert set(after) == {"execution"}
            assert after["execution"][0]["hmac_failed_at"] is not None
        case _:
            assert after == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"signal_name": ""},
        {"signal_name": "__go"},
        {"signal_name": "__operator_only__"},
        {"signal_name": "x" * 257},
        {"signal_name": "é" * 129},
        {"signal_name": "a\0b"},
        {"signal_name": None},
        {"source_type": ""},
        {"source_type": "system"},
        {"source_type": "x" * 257},
        {"target_scope": "flow"},
        {"signal_id": "not a uuid"},
        {"payload": "text"},
        {"payload": 7},
        {"dedup_ttl": -SECOND},
        {"resume_delay": -SECOND},
        {"max_signals_per_execution": -1},
        {"signal_maxlen": -1},
        {"waitpoint_token": None},
    ],
    ids=str,
)
async def test_a_shape_that_is_wrong_is_refused_before_anything_is_looked_at(
    world: SuspendingWorld, fields: dict[str, Any]
) -> None:
    wait = await world.suspend()
    before = await world.stored()
    fields = {"waitpoint_token": forged(wait.point.token), **fields}
    assert await outcome(world.send(wait, **fields)) == "invalid_input"
    assert await world.stored() == before


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "_go", " go ", "Go"])
async def test_a_name_is_compared_byte_for_byte(world: SuspendingWorld, name: str) -> None:
    wait = await world.suspend(on("k", name))
    for other in (name.swapcase(), name.strip(), name + " ", "go"):
        if other != name and len(other.encode()) <= 256:
            assert (await world.accept(wait, signal_name=other)).match_detail == "matcher_failed"
    assert (await world.accept(wait, signal_name=name)).effect == SATISFIED


async def test_a_caller_without_a_token_cannot_lock_an_execution(world: SuspendingWorld, callers: list[Party]) -> None:
    """The token is checked without a lock: a bad one is refused while another transaction holds the row."""
    one, two = callers
    wait = await world.suspend()
    await one.begin()
    await world.send(wait, by=one)
    answer = await asyncio.wait_for(outcome(world.send(wait, by=two, waitpoint_token=forged(wait.point.token))), 30)
    assert answer == "invalid_token"
    task = await waiting(world.sql, two, world.send(wait, by=two), behind=one)
    await one.rollback()
    assert isinstance(await task, Accepted)
    assert (await world.record(wait.id)).last_hmac_validation_failed_at is None, "the row could not be had"


# ---- duplicates


@pytest.mark.parametrize("then", ENDS)
@pytest.mark.parametrize("same", ["signal_id", "idempotency_key"])
async def test_a_repeated_signal_always_gets_the_same_result(world: SuspendingWorld, same: str, then: str) -> None:
    wait = await world.suspend(on("k", "done"), timeout_at=await world.clock.now() + 300 * SECOND)
    repeated: dict[str, Any] = {same: new_id() if same == "signal_id" else "hook-1"}
    first = await world.accept(wait, **repeated)
    await ENDS[then](world, wait)
    before = await world.stored()
    for _ in range(2):
        # Whatever else it says: size, limit and name do not matter any more.
        answer = await world.send(
            wait, **repeated, signal_name="done", payload=bytes(LIMIT + 1), max_signals_per_execution=1
        )
        assert answer == DuplicateSignal(first.signal_id)
    after = changed(before, await world.stored())
    assert set(after) == {"event"}
    assert [(row["signal_effect"], row["details"]["signal_id"]) for row in after["event"]] == [
        ("deduped", str(first.signal_id))
    ] * 2


async def test_the_signal_that_resumed_can_be_repeated(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    first = await world.accept(wait, idempotency_key="hook-1")
    assert first.effect == SATISFIED
    assert await world.send(wait, idempotency_key="hook-1") == DuplicateSignal(first.signal_id)
    assert await outcome(world.send(wait)) == "waitpoint_closed"


async def test_a_signal_id_is_one_per_execution_and_a_key_one_per_waitpoint(world: SuspendingWorld) -> None:
    wait = await world.suspend(all_of("a", "b"))
    other = await world.suspend(on("k", "never"))
    first = await world.accept(wait, "a", signal_id=new_id(), idempotency_key="key")
    assert await world.send(wait, "b", signal_id=first.signal_id) == DuplicateSignal(first.signal_id)
    elsewhere = await world.accept(other, signal_id=first.signal_id, idempotency_key="key")
    assert elsewhere.effect == APPENDED
    assert (await world.accept(wait, "b", idempotency_key="key")).effect == SATISFIED


# By the waitpoint's key, without a token


def by_key(world: SuspendingWorld, wait: Waiting, key: str | None = None, **fields: Any) -> Any:
    return world.engine.signal_execution(wait.id, key, **{"signal_name": "go", "source_type": "client", **fields})


async def test_a_client_signals_the_open_waitpoint_by_its_key(world: SuspendingWorld) -> None:
    wait = await world.suspend(all_of("a", "b"))
    assert (await by_key(world, wait, "a", payload=b"1")).effect == APPENDED
    assert (await by_key(world, wait, "b")).effect == SATISFIED
    received = (await world.engine.read_signals(wait.id)).items
    assert [(one.waitpoint_key, one.payload, one.target_scope) for one in received] == [
        ("a", b"1", "waitpoint"),
        ("b", None, "waitpoint"),
    ]


async def test_without_a_key_one_waitpoint_must_be_open(world: SuspendingWorld) -> None:
    wait = await world.suspend(all_of("a", "b"))
    with pytest.raises(ff.InvalidInput, match="the execution waits at 2 waitpoints") as refused:
        await by_key(world, wait)
    assert (refused.value.field, refused.value.allowed) == ("key", "a, b")
    alone = await world.suspend()
    assert (await by_key(world, alone)).effect == SATISFIED


async def test_a_key_that_is_not_open_is_not_found(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    with pytest.raises(ff.NotFound, match=r"waitpoint other \(open: k\)"):
        await by_key(world, wait, "other")
    await by_key(world, wait)
    with pytest.raises(ff.NotFound, match=r"waitpoint k \(answered already, or not open now: try again later; no "):
        await by_key(world, wait, "k", idempotency_key="unseen")
    with pytest.raises(ff.NotFound, match=r"waitpoint other \(no waitpoint is open\)"):
        await by_key(world, wait, "other")
    await world.engine.cancel(Operator(wait.id), "enough")
    with pytest.raises(ff.NotFound, match=r"waitpoint k \(no waitpoint is open\)"):
        await by_key(world, wait, "k")
    with pytest.raises(ff.NotFound, match="execution"):
        await world.engine.signal_execution(id_in(home(wait.id)), "k", signal_name="go", source_type="client")


@pytest.mark.parametrize("key", ["k", None])
async def test_the_same_idempotency_key_is_found_at_the_closed_waitpoint(
    world: SuspendingWorld, key: str | None
) -> None:
    wait = await world.suspend()
    first = await by_key(world, wait, key, idempotency_key="hook")
    assert await by_key(world, wait, key, idempotency_key="hook") == DuplicateSignal(first.signal_id)
    await world.engine.cancel(Operator(wait.id), "enough")
    assert await by_key(world, wait, key, idempotency_key="hook") == DuplicateSignal(first.signal_id)
    await world.clock.advance(days=2)
    assert await outcome(by_key(world, wait, key, idempotency_key="hook")) == "target_not_signalable"


async def test_of_two_waitpoints_with_one_key_the_newer_is_signalled(world: SuspendingWorld) -> None:
    wait = await world.pend("k")
    await world.clock.advance(seconds=1)
    await world.pend("k", of=wait)
    assert (await by_key(world, wait, "k")).effect == BUFFERED
    (signal,) = (await world.engine.read_signals(wait.id)).items
    assert signal.waitpoint_id == wait.point.id


async def test_the_key_needs_the_token_of_its_waitpoint(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    first = await world.accept(wait, signal_id=new_id(), idempotency_key="key")
    for same in ({"signal_id": first.signal_id}, {"idempotency_key": "key"}):
        fields = {**same, "waitpoint_token": forged(wait.point.token)}
        assert await outcome(world.send(wait, **fields)) == "invalid_token"


@pytest.mark.parametrize("key", [None, ""])
async def test_no_key_matches_no_key(world: SuspendingWorld, key: str | None) -> None:
    wait = await world.suspend(count_signals(2, "k"))
    assert (await world.accept(wait, idempotency_key=key)).effect == APPENDED
    assert (await world.accept(wait, idempotency_key=key)).effect == SATISFIED


async def test_a_key_is_remembered_as_long_as_the_request_says(world: SuspendingWorld) -> None:
    wait = await world.suspend(on("k", "never"))
    first = await world.accept(wait, idempotency_key="key", signal_id=new_id())
    await world.clock.advance(seconds=60)
    assert await world.send(wait, idempotency_key="key") == DuplicateSignal(first.signal_id)
    assert await world.send(wait, idempotency_key="key", dedup_ttl=HOUR) == DuplicateSignal(first.signal_id)
    second = await world.accept(wait, idempotency_key="key", dedup_ttl=30 * SECOND)
    assert await world.send(wait, idempotency_key="key") == DuplicateSignal(second.signal_id)
    await world.clock.advance(days=1, seconds=-30)
    assert await world.send(wait, idempotency_key="key") == DuplicateSignal(second.signal_id)
    await world.clock.advance(seconds=31)
    third = await world.accept(wait, idempotency_key="key")
    assert third.signal_id not in (first.signal_id, second.signal_id)
    # The id is kept forever.
    assert await world.send(wait, signal_id=first.signal_id, dedup_ttl=timedelta(0)) == DuplicateSignal(first.signal_id)


async def test_without_a_lifetime_keys_mean_nothing(world: SuspendingWorld) -> None:
    wait = await world.suspend(count_signals(2, "k"))
    off = {"idempotency_key": "key", "dedup_ttl": timedelta(0)}
    assert (await world.accept(wait, **off)).effect == APPENDED
    assert (await world.accept(wait, **off)).effect == SATISFIED


async def test_duplicates_do_not_count_against_the_limit(world: SuspendingWorld) -> None:
    wait = await world.suspend(on("k", "never"))
    two = {"max_signals_per_execution": 2}
    await world.accept(wait, idempotency_key="key", **two)
    for _ in range(3):
        assert isinstance(await world.send(wait, idempotency_key="key", **two), DuplicateSignal)
    await world.accept(wait, **two)
    assert await outcome(world.send(wait, **two)) == "signal_limit_exceeded"
    assert (await world.waitpoint(wait))["signal_count"] == 2


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("same", ["signal_id", "idempotency_key"])
async def test_of_two_requests_with_one_key_the_second_waits_for_the_first(
    world: SuspendingWorld, callers: list[Party], same: str, ending: str
) -> None:
    one, two = callers
    wait = await world.suspend(count_signals(2, "k"))
    repeated: dict[str, Any] = {same: new_id() if same == "signal_id" else "hook-1"}
    await one.begin()
    first = await world.accept(wait, by=one, **repeated)
    task = await waiting(world.sql, two, world.send(wait, by=two, **repeated), behind=one)
    await one.end(ending)
    answer = await task
    if ending == "commit":
        assert answer == DuplicateSignal(first.signal_id)
    else:
        assert isinstance(answer, Accepted)
    assert len((await world.engine.read_signals(wait.id)).items) == 1
    assert (await world.suspension(wait)).closed_at is None


async def test_of_many_requests_with_one_key_exactly_one_is_accepted(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    async with await ff.Engine.connect(world.dsn, notifications=False) as engine:
        answers = await asyncio.gather(*(world.send(wait, by=engine, idempotency_key="key") for _ in range(8)))
    (accepted,) = [answer for answer in answers if isinstance(answer, Accepted)]
    assert accepted.effect == SATISFIED
    assert answers.count(DuplicateSignal(accepted.signal_id)) == 7


# ---- who can be signalled


async def _close(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.close_waitpoint(wait.handle, wait.point.id)


async def _let_expire(world: SuspendingWorld, wait: Waiting) -> None:
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("waitpoint")).handled == 1


async def _too_late(world: SuspendingWorld, wait: Waiting) -> None:
    await world.clock.advance(hours=2)


async def _revoke(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.revoke_lease(wait.id)


async def _suspend_on_another(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.suspend(
        wait.handle,
        waitpoints=[Fresh(new_id(), "other")],
        resume_condition=on("other"),
        reason_code="waiting_for_signal",
    )


async def _use(world: SuspendingWorld, wait: Waiting) -> None:
    assert isinstance(await world.suspend_on_pending(wait, on("k", "never")), Suspended)


async def _use_overdue(world: SuspendingWorld, wait: Waiting) -> None:
    at = await world.clock.now() + SECOND
    assert isinstance(await world.suspend_on_pending(wait, on("k", "never"), timeout_at=at), Suspended)
    await world.clock.advance(hours=2)


async def _resume_used(world: SuspendingWorld, wait: Waiting) -> None:
    await _use(world, wait)
    await resume(world, wait)


async def _suspend_again(world: SuspendingWorld, wait: Waiting) -> None:
    await _resume_used(world, wait)
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await _suspend_on_another(world, wait)


async def _cancel_used(world: SuspendingWorld, wait: Waiting) -> None:
    await _use(world, wait)
    await cancel(world, wait)


async def _complete_closed(world: SuspendingWorld, wait: Waiting) -> None:
    await _close(world, wait)
    await complete(world, wait)


# From an execution with a pending waitpoint: the call, the state it leaves, and the result of a signal.
LIVENESS: list[tuple[str, Then, tuple[str, str], str]] = [
    ("ended, never used", complete, ("terminal", "closed"), "target_not_signalable"),
    ("failed", fail_for_good, ("terminal", "closed"), "target_not_signalable"),
    ("cancelled while waiting", _cancel_used, ("terminal", "closed"), "target_not_signalable"),
    ("ended, closed before", _complete_closed, ("terminal", "closed"), "target_not_signalable"),
    ("overdue as a whole", pass_deadline, ("terminal", "closed"), "target_not_signalable"),
    ("closed by its maker", _close, ("active", "closed"), "waitpoint_closed"),
    ("expired", _let_expire, ("active", "expired"), "waitpoint_closed"),
    ("past its time, unnoticed", _too_late, ("active", "pending"), "waitpoint_closed"),
    ("resumed", _resume_used, ("runnable", "closed"), "waitpoint_closed"),
    ("suspended elsewhere", _suspend_again, ("suspended", "closed"), "waitpoint_closed"),
    ("active, pending", nothing, ("active", "pending"), BUFFERED),
    ("lease lost, pending", _revoke, ("active", "pending"), BUFFERED),
    ("suspended, pending", _suspend_on_another, ("suspended", "pending"), BUFFERED),
    ("given back, pending", release, ("runnable", "pending"), BUFFERED),
    ("delayed, pending", delay, ("runnable", "pending"), BUFFERED),
    ("suspended, active", _use, ("suspended", "active"), APPENDED),
    ("past its timeout, not yet expired", _use_overdue, ("suspended", "active"), APPENDED),
]


@pytest.mark.parametrize(("then", "stands", "told"), [row[1:] for row in LIVENESS], ids=[row[0] for row in LIVENESS])
async def test_the_result_of_an_authentic_signal(
    world: SuspendingWorld, then: Then, stands: tuple[str, str], told: str
) -> None:
    wait = await world.pend(execution_deadline_at=timedelta(days=1))
    await then(world, wait)
    assert ((await world.vector(wait))["lifecycle_phase"], (await world.waitpoint(wait))["state"]) == stands
    before, events = await world.stored(), await world.events(wait)
    if told in (BUFFERED, APPENDED):
        assert (await world.accept(wait)).effect == told
        assert short(await world.events(wait)) == [*short(events), f"S:{told}"]
        return
    assert await outcome(world.send(wait)) == told
    after = changed(before, await world.stored())
    if stands == ("active", "pending"):
        assert [row["state"] for row in after.pop("waitpoint")] == ["expired"]
        assert (await world.closed(wait)) == {"k": ("expired", "never_committed")}
    assert after == {}, "refused signals leave no trace"


@pytest.mark.parametrize(
    ("damage", "told", "words"),
    [
        (
            "update flowfabric.waitpoint set suspension_id = gen_random_uuid()",
            "waitpoint_closed",
            "not open",
        ),
        (
            "update flowfabric.execution set state = 'waiting', blocking_reason = 'waiting_for_worker'",
            "target_not_signalable",
            "not suspended",
        ),
    ],
    ids=["another suspension", "not suspended"],
)
async def test_an_active_waitpoint_that_should_not_be_is_refused_and_reported(
    world: SuspendingWorld, callers: list[Party], damage: str, told: str, words: str
) -> None:
    wait = await world.suspend()
    world.engine.checking = False
    await world.sql.execute(damage)
    heard: list[str] = []
    callers[0].connection.add_log_listener(lambda _, message: heard.append(str(message)))
    before = await world.stored()
    assert await outcome(world.send(wait, by=callers[0])) == told
    assert await world.stored() == before
    await asyncio.sleep(0)
    assert len(heard) == 1 and words in heard[0]
    assert wait.point.token.reveal() not in heard[0]


# ---- effects


Sent = tuple[tuple[str, str, tuple[str, str]], str, str]
A, B = ("approver", "alice"), ("approver", "bob")
EFFECTS: list[tuple[str, Condition, list[Sent]]] = [
    (
        "one of any name",
        on("k"),
        [(("k", "x", A), SATISFIED, "advanced")],
    ),
    (
        "one by name",
        on("k", "x"),
        [
            (("k", "y", A), APPENDED, "matcher_failed"),
            (("k", "X", A), APPENDED, "matcher_failed"),
            (("k", "x", A), SATISFIED, "advanced"),
        ],
    ),
    (
        "all of two",
        all_of("a", on("b", "x")),
        [
            (("a", "x", A), APPENDED, "advanced"),
            (("a", "x", A), APPENDED, "duplicate_satisfier"),
            (("b", "y", A), APPENDED, "matcher_failed"),
            (("b", "x", A), SATISFIED, "advanced"),
        ],
    ),
    (
        "one signal for two members",
        all_of(on("k"), on("k", "a")),
        [(("k", "a", A), SATISFIED, "advanced")],
    ),
    (
        "one signal may advance one member only",
        all_of(on("k"), on("k", "a")),
        [
            (("k", "b", A), APPENDED, "advanced"),
            (("k", "c", A), APPENDED, "duplicate_satisfier"),
            (("k", "a", A), SATISFIED, "advanced"),
        ],
    ),
    (
        "two sources",
        from_sources(2, "k", name="x"),
        [
            (("k", "x", A), APPENDED, "advanced"),
            (("k", "x", A), APPENDED, "duplicate_satisfier"),
            (("k", "y", B), APPENDED, "matcher_failed"),
            (("k", "x", B), SATISFIED, "advanced"),
        ],
    ),
    (
        "sources are pairs",
        from_sources(3, "k"),
        [
            (("k", "x", ("a:b", "c")), APPENDED, "advanced"),
            (("k", "x", ("a", "b:c")), APPENDED, "advanced"),
            (("k", "x", ("a", "")), SATISFIED, "advanced"),
        ],
    ),
    (
        "nobody twice is one source",
        from_sources(2, "k"),
        [
            (("k", "x", ("a", "")), APPENDED, "advanced"),
            (("k", "x", ("a", "")), APPENDED, "duplicate_satisfier"),
        ],
    ),
    (
        "two signals",
        count_signals(2, "k"),
        [(("k", "x", A), APPENDED, "advanced"), (("k", "x", A), SATISFIED, "advanced")],
    ),
    (
        "two waitpoints",
        any_of("a", "b", "c", n=2),
        [
            (("a", "x", A), APPENDED, "advanced"),
            (("a", "y", B), APPENDED, "duplicate_satisfier"),
            (("c", "x", A), SATISFIED, "advanced"),
        ],
    ),
    (
        "counts do not share",
        all_of(from_sources(1, "a"), from_sources(1, "b")),
        [(("a", "x", A), APPENDED, "advanced"), (("b", "x", A), SATISFIED, "advanced")],
    ),
    ("for an operator", OperatorOnly(), [(("k", "x", A), APPENDED, "not_in_condition")]),
    ("for its time", TimeoutOnly(), [(("k", "x", A), APPENDED, "not_in_condition")]),
    (
        "signals and an operator",
        all_of("k", OperatorOnly()),
        [(("k", "x", A), APPENDED, "advanced"), (("k", "x", A), APPENDED, "duplicate_satisfier")],
    ),
]


@pytest.mark.parametrize(("condition", "sent"), [row[1:] for row in EFFECTS], ids=[row[0] for row in EFFECTS])
async def test_the_effect_of_each_signal(world: SuspendingWorld, condition: Condition, sent: list[Sent]) -> None:
    keys = () if not isinstance(condition, OperatorOnly | TimeoutOnly) else ("k",)
    wait = await world.suspend(condition, *keys, timeout_at=await world.in_an_hour())
    for (key, name, (kind, identity)), effect, detail in sent:
        answer = await world.accept(wait, key, signal_name=name, source_type=kind, source_identity=identity)
        assert (answer.effect, answer.match_detail) == (effect, detail)
    recorded = (await world.engine.read_signals(wait.id)).items
    assert [(one.observed_effect, one.match_detail) for one in recorded] == [(e, d) for _, e, d in sent]
    assert [one.ordinal for one in recorded] == list(range(1, len(sent) + 1))
    suspension = await world.suspension(wait)
    assert {one.suspension_id for one in recorded} == {suspension.suspension_id}
    assert suspension.last_signal_at == recorded[-1].accepted_at
    for key in wait.points:
        row = await world.waitpoint(wait, key)
        mine = [one for one in recorded if one.waitpoint_key == key]
        assert (row["signal_count"], row["matched_signal_count"], row["last_signal_at"]) == (
            len(mine),
            sum(one.match_detail == "advanced" for one in mine),
            mine[-1].accepted_at if mine else None,
        )
    advanced = [one.signal_id for one in recorded if one.match_detail == "advanced"]
    if sent[-1][1] == SATISFIED:
        assert suspension.closed_at == suspension.satisfied_at == recorded[-1].accepted_at
        assert (suspension.close_reason, suspension.closer_signal_id) == ("resumed", recorded[-1].signal_id)
        assert list(suspension.satisfier_signal_ids) == advanced
        assert set((await world.closed(wait)).values()) == {("closed", "resumed")}
        assert [one.signal_id for one in await world.engine.observe_signals(wait.handle)] == advanced
    else:
        assert (suspension.closed_at, suspension.satisfied_at) == (None, None)
        assert await world.engine.observe_signals(wait.handle) == []


# A pending waitpoint is bound alone.
ALONE = [row for row in EFFECTS if {key for (key, _, _), _, _ in row[2]} == {"k"}]


@pytest.mark.parametrize(("condition", "sent"), [row[1:] for row in ALONE], ids=[row[0] for row in ALONE])
async def test_buffered_signals_count_as_if_they_arrived_later(
    world: SuspendingWorld, condition: Condition, sent: list[Sent]
) -> None:
    """The same signals, all of them before the execution suspends."""
    wait = await world.pend("k")
    for (_, name, (kind, identity)), _, _ in sent:
        answer = await world.accept(wait, signal_name=name, source_type=kind, source_identity=identity)
        assert (answer.effect, answer.match_detail) == (BUFFERED, "not_evaluated")
    buffered = (await world.engine.read_signals(wait.id)).items
    assert {one.suspension_id for one in buffered} == {None}
    answer = await world.suspend_on_pending(wait, condition, timeout_at=await world.in_an_hour())
    assert isinstance(answer, AlreadySatisfied if sent[-1][1] == SATISFIED else Suspended)
    recorded = (await world.engine.read_signals(wait.id)).items
    assert [(one.observed_effect, one.match_detail) for one in recorded] == [(e, d) for _, e, d in sent]
    assert {one.suspension_id for one in recorded} == {(await world.suspension(wait)).suspension_id}


async def test_a_signal_is_stored_unchanged(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    sent_at = await world.clock.now() - timedelta(days=3)
    said = {
        "signal_id": new_id(), "signal_name": "go", "signal_category": "callback", "source_type": "webhook",
        "source_identity": "Zoë", "correlation_id": "c-1", "payload": b"{}", "payload_encoding": "application/x-thing",
        "target_scope": "execution", "created_at": sent_at,
    }  # fmt: skip
    before = await world.clock.now()
    await world.accept(wait, **said)
    (kept,) = (await world.engine.read_signals(wait.id)).items
    assert {name: getattr(kept, name) for name in said} == said
    assert (kept.waitpoint_id, kept.waitpoint_key) == (wait.point.id, "k")
    assert before <= kept.accepted_at <= await world.clock.now(), "the engine's own clock"


async def test_missing_fields_of_a_signal_have_defaults(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    await world.accept(wait)
    (kept,) = (await world.engine.read_signals(wait.id)).items
    assert (kept.payload, kept.payload_encoding, kept.correlation_id, kept.target_scope, kept.source_identity) == (
        None,
        "json",
        "",
        "waitpoint",
        "",
    )
    assert kept.created_at == kept.accepted_at


# ---- the resumed execution


LATER = {
    **RESUMED,
    "eligibility_state": "not_eligible_until_time",
    "blocking_reason": "waiting_for_resume_delay",
    "public_state": "delayed",
}


@pytest.mark.parametrize(
    ("request_delay", "policy_delay", "delay"),
    [(None, None, 0), (None, 0, 0), (None, 7, 7), (0, 7, 0), (5, 7, 5), (5, None, 5)],
)
async def test_a_resumed_execution_waits_as_long_as_the_request_or_else_the_policy_says(
    world: SuspendingWorld, request_delay: int | None, policy_delay: int | None, delay: int
) -> None:
    policy = ResumePolicy(resume_delay=None if policy_delay is None else policy_delay * SECOND)
    wait = await world.suspend(resume_policy=policy, timeout_at=await world.in_an_hour())
    given = {} if request_delay is None else {"resume_delay": request_delay * SECOND}
    assert (await world.accept(wait, **given)).effect == SATISFIED
    record = await world.record(wait.id)
    assert record.resume_pending
    assert (record.current_waitpoint, record.suspension_timeout_at) == (None, None)
    assert record.current_attempt is not None and record.current_attempt.attempt_id == wait.handle.attempt_id
    if delay:
        assert await world.vector(wait) == LATER
        assert record.delay_until == record.last_transition_at + delay * SECOND
        assert await world.engine.claim(**WORKER) is None
        await world.clock.advance(seconds=delay - 2)
        assert (await world.engine.run_timers("delay")).handled == 0
        await world.clock.advance(seconds=2)
        assert (await world.engine.run_timers("delay")).handled == 1
        record = await world.record(wait.id)
    assert await world.vector(wait) == RESUMED
    assert record.resume_pending and record.delay_until is None
    again = await claim_one(world.engine)
    assert (again.execution_id, again.handle.attempt_id) == (wait.id, wait.handle.attempt_id)
    assert (again.handle.kind, again.handle.lease_epoch) == (HandleKind.RESUMED, wait.handle.lease_epoch + 2)


async def _by_signal(world: SuspendingWorld, wait: Waiting, delay: timedelta) -> None:
    await world.accept(wait, resume_delay=delay)


async def _by_operator(world: SuspendingWorld, wait: Waiting, delay: timedelta) -> None:
    await world.engine.resume_execution(wait.id, "operator", delay)


async def _by_timeout(world: SuspendingWorld, wait: Waiting, delay: timedelta) -> None:
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 1


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize("path", [_by_signal, _by_operator, _by_timeout])
async def test_every_way_of_resuming_leads_to_the_same_state(world: SuspendingWorld, path: Any, delay: int) -> None:
    wait = await world.suspend(
        timeout_at=await world.in_an_hour(),
        timeout_behavior="auto_resume_with_timeout_signal",
        resume_policy=ResumePolicy(resume_delay=9 * SECOND),
    )
    events = short(await world.events(wait))
    await path(world, wait, delay * SECOND)
    # A timeout resumes at once, whatever the policy says; an operator says it himself.
    assert await world.vector(wait) == (LATER if delay and path is not _by_timeout else RESUMED)
    added = short(await world.events(wait))[len(events) :]
    assert added == {_by_signal: [f"S:{SATISFIED}"], _by_operator: ["O:resumed"], _by_timeout: []}[path]
    record = await world.record(wait.id)
    assert record.resume_pending and record.current_waitpoint is None and record.suspension_timeout_at is None
    (attempt,) = await world.engine.list_attempts(wait.id)
    assert (attempt.attempt_id, attempt.ended_at) == (wait.handle.attempt_id, None)


# ---- how much is kept


@pytest.mark.both_servers
async def test_the_oldest_signals_that_lead_nowhere_are_dropped(world: SuspendingWorld) -> None:
    wait = await world.suspend(all_of(from_sources(2, "a", name="yes"), on("b")))
    few = {"signal_maxlen": 2}
    ids = {}
    for number, (key, name, who) in enumerate(
        [
            ("a", "no", "alice"),
            ("a", "yes", "alice"),  # a satisfier
            ("a", "yes", "alice"),
            ("b", "any", "alice"),  # a satisfier, of the other waitpoint
            ("a", "no", "bob"),
            ("a", "no", "carol"),
            ("b", "any", "bob"),
        ],
        start=1,
    ):
        answer = await world.accept(
            wait,
            key,
            signal_name=name,
            source_identity=who,
            payload=b"%d" % number,
            idempotency_key=f"s{number}",
            **few,
        )
        ids[number] = answer.signal_id
    # 1 and then 3 had to go; 2 and 4 are satisfiers, and the other waitpoint counts for itself.
    assert numbered((await world.engine.read_signals(wait.id)).items) == [2, 4, 5, 6, 7]
    row = await world.waitpoint(wait, "a")
    assert (row["signal_count"], row["matched_signal_count"], row["dropped_signal_count"]) == (5, 1, 2)
    gone = await world.sql.fetch("select * from flowfabric.signal where is_dropped order by ordinal")
    assert [(one["ordinal"], one["payload"], one["source_identity"]) for one in gone] == [(1, None, ""), (3, None, "")]
    # What was dropped is still known,
    for number in (1, 3, 5):
        assert await world.send(wait, "a", signal_id=ids[number], **few) == DuplicateSignal(ids[number])
        assert await world.send(wait, "a", idempotency_key=f"s{number}", **few) == DuplicateSignal(ids[number])
    # counts for the limit,
    assert await outcome(world.send(wait, "a", max_signals_per_execution=7)) == "signal_limit_exceeded"
    # and progress is not lost.
    closer = await world.accept(wait, "a", signal_name="yes", source_identity="bob", payload=b"8", **few)
    assert closer.effect == SATISFIED
    observed = await world.engine.observe_signals(wait.handle)
    assert [(one.signal_id, one.payload) for one in observed] == [
        (ids[2], b"2"),
        (ids[4], b"4"),
        (closer.signal_id, b"8"),
    ]


async def test_with_nothing_kept_only_satisfiers_stay(world: SuspendingWorld) -> None:
    wait = await world.suspend(count_signals(2, "k", name="yes"))
    none = {"signal_maxlen": 0}
    first = await world.accept(wait, signal_name="yes", **none)
    dropped = await world.accept(wait, signal_name="no", **none)
    assert (dropped.effect, dropped.match_detail) == (APPENDED, "matcher_failed")
    assert numbered((await world.engine.read_signals(wait.id)).items) == [1]
    assert await world.send(wait, signal_id=dropped.signal_id) == DuplicateSignal(dropped.signal_id)
    second = await world.accept(wait, signal_name="yes", **none)
    assert [one.signal_id for one in await world.engine.observe_signals(wait.handle)] == [
        first.signal_id,
        second.signal_id,
    ]


async def test_buffered_signals_are_not_dropped_before_a_condition_exists(world: SuspendingWorld) -> None:
    wait = await world.pend()
    sent = [await world.accept(wait, signal_name=name, signal_maxlen=1) for name in ("yes", "no", "no", "no")]
    answer = await world.suspend_on_pending(wait, count_signals(2, "k", name="yes"))
    assert isinstance(answer, Suspended)
    closer = await world.accept(wait, signal_name="yes", signal_maxlen=1)
    assert [one.signal_id for one in await world.engine.observe_signals(wait.handle)] == [
        sent[0].signal_id,
        closer.signal_id,
    ]


@pytest.mark.parametrize("kept", [None, 1000])
async def test_a_thousand_are_kept_when_nothing_is_said(world: SuspendingWorld, kept: int | None) -> None:
    wait = await world.suspend(on("k", "never"))
    world.engine.checking = False
    await fill(world, wait, 1000)
    given = {} if kept is None else {"signal_maxlen": kept}
    await world.accept(wait, **given)
    left = await world.sql.fetchrow(
        "select count(*) filter (where not is_dropped) as kept, min(ordinal) filter (where not is_dropped) as first"
        " from flowfabric.signal"
    )
    assert tuple(left) == (1000, 2)


async def fill(world: SuspendingWorld, wait: Waiting, count: int) -> None:
    """So many signals that match nothing, as if they had been delivered."""
    await world.sql.execute(
        """insert into flowfabric.signal
               (partition, id, ordinal, signal_id, waitpoint_id, waitpoint_key, suspension_id, signal_name,
                signal_category, source_type, source_identity, correlation_id, payload_encoding, target_scope,
                created_at, accepted_at, observed_effect, match_detail)
           select $1, $2, n, gen_random_uuid(), $3, $4, $5, 'noise', 'x', 'x', '', '', 'json', 'waitpoint',
                  flowfabric.now(), flowfabric.now(), 'appended_to_waitpoint', 'matcher_failed'
           from generate_series(1, $6::integer) n""",
        home(wait.id),
        wait.id,
        wait.point.id,
        wait.key,
        wait.details.suspension_id,
        count,
    )
    await world.sql.execute("update flowfabric.waitpoint set signal_count = $1", count)


# ---- payloads


PAYLOADS: dict[str, bytes | None] = {
    "none": None,
    "empty": b"",
    "every byte": bytes(range(256)),
    "not UTF-8": b"\xff\xfe\x80\xc3(",
    "NUL": b"\0\0\0",
    "a backslash": b"\\x41\\000",
    "as much as is allowed": bytes(range(256)) * (LIMIT // 256),
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("buffered", [False, True])
async def test_a_payload_comes_back_bit_by_bit(world: SuspendingWorld, payload: str, buffered: bool) -> None:
    data = PAYLOADS[payload]
    if buffered:
        wait = await world.pend()
        await world.accept(wait, payload=data)
        assert isinstance(await world.suspend_on_pending(wait), AlreadySatisfied)
        handle = wait.handle
    else:
        wait = await world.suspend()
        await world.accept(wait, payload=data)
        handle = (await world.reclaim_resumed(wait)).handle
    for one in (*await world.engine.observe_signals(handle), *(await world.engine.read_signals(wait.id)).items):
        assert one.payload == data and type(one.payload) is type(data)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_one_byte_too_many_is_refused(world: SuspendingWorld, kind: Callable[[bytes], Any]) -> None:
    wait = await world.suspend()
    before = await world.stored()
    with pytest.raises(ValidationFailed) as caught:
        await world.send(wait, payload=kind(bytes(LIMIT + 1)))
    assert caught.value.kind == "payload_too_large"
    assert await world.stored() == before
    assert (await world.accept(wait, payload=kind(bytes(LIMIT)))).effect == SATISFIED


# ---- how many


@pytest.mark.parametrize(
    ("policy", "argument", "allowed"),
    [(2, None, 2), (2, 3, 3), (3, 1, 1), (None, 2, 2), (2, 0, None), (0, None, None), (0, 2, 2)],
    ids=lambda value: str(value),
)
async def test_the_limit_of_signals_per_execution(
    world: SuspendingWorld, policy: int | None, argument: int | None, allowed: int | None
) -> None:
    creating = {} if policy is None else {"policy": ExecutionPolicy(max_signals_per_execution=policy)}
    given = {} if argument is None else {"max_signals_per_execution": argument}
    wait = await world.suspend(on("k", "never"), creating=creating)
    for _ in range(allowed or 5):
        await world.accept(wait, **given)
    assert await outcome(world.send(wait, **given)) == ("Accepted" if allowed is None else "signal_limit_exceeded")
    assert len((await world.engine.read_signals(wait.id)).items) == (allowed or 6)
    # An operator is bound by the same limit.
    answer = await outcome(world.approve(wait, **given))
    assert answer == ("Accepted" if allowed is None else "signal_limit_exceeded")


async def test_the_limit_is_for_the_life_of_the_execution(world: SuspendingWorld) -> None:
    wait = await world.pend(policy=ExecutionPolicy(max_signals_per_execution=3))
    await world.accept(wait)
    await world.pend("j", of=wait)
    assert (await world.accept(wait, "j")).effect == BUFFERED
    assert isinstance(await world.suspend_on_pending(wait), AlreadySatisfied)
    wait.points = {"j": wait.points["j"]}
    assert isinstance(await world.suspend_on_pending(wait, count_signals(2, "j")), Suspended)
    assert (await world.accept(wait, "j")).effect == SATISFIED
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.suspend(of=wait)
    assert await outcome(world.send(wait)) == "signal_limit_exceeded"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, ExecutionPolicy()])
async def test_ten_thousand_are_allowed_when_nothing_is_said(
    request: pytest.FixtureRequest, world: SuspendingWorld, policy: ExecutionPolicy | None
) -> None:
    if request.node.callspec.params["server"] != "wheel":
        pytest.skip("once is enough")
    wait = await world.suspend(on("k", "never"), creating={"policy": policy})
    world.engine.checking = False
    await fill(world, wait, 9_999)
    await world.accept(wait)
    assert await outcome(world.send(wait)) == "signal_limit_exceeded"
    await world.accept(wait, max_signals_per_execution=0)


# ---- approvals


async def test_an_operators_decision_is_a_signal_without_a_token(world: SuspendingWorld) -> None:
    wait = await world.suspend(on("k", "approved"), resume_policy=ResumePolicy(resume_delay=9 * SECOND))
    answer = await world.approve(wait, "1", source_identity="alice")
    assert isinstance(answer, Accepted)
    assert (answer.effect, answer.match_detail) == (SATISFIED, "advanced")
    (kept,) = (await world.engine.read_signals(wait.id)).items
    assert (kept.signal_id, kept.signal_name, kept.signal_category) == (answer.signal_id, "approved", "approval")
    assert (kept.source_type, kept.source_identity) == ("operator", "alice")
    assert (kept.payload, kept.correlation_id, kept.target_scope) == (None, "", "execution")
    assert await world.sql.fetchval("select idempotency_key from flowfabric.signal") == "approval:approved:1"
    # The request has no delay of its own, so the policy's holds.
    assert (await world.record(wait.id)).public_state == "delayed"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("execution", "not_found execution"),
        ("execution lane waitpoint", "not_found execution"),
        ("lane", "lane_mismatch"),
        ("lane waitpoint", "lane_mismatch"),
        ("waitpoint", "not_found waitpoint"),
        ("foreign", "not_found waitpoint"),
        ("name", "invalid_input"),
        ("name execution", "invalid_input"),
    ],
)
async def test_an_operators_mistakes_are_reported_in_order(world: SuspendingWorld, wrong: str, told: str) -> None:
    wait, other = await world.suspend(), await world.suspend()
    given: dict[str, Any] = {}
    for what in wrong.split():
        match what:
            case "execution":
                given["execution_id"] = id_in(home(wait.id))
            case "lane":
                given["lane_id"] = "elsewhere"
            case "waitpoint":
                given["waitpoint_id"] = new_id()
            case "foreign":
                given["waitpoint_id"] = other.point.id
            case "name":
                given["signal_name"] = "__approved"
    before = await world.stored()
    with pytest.raises(ff.FlowFabricError) as caught:
        await world.approve(wait, **given)
    assert await world.stored() == before
    error = caught.value
    match told.split():
        case ["not_found", entity]:
            assert isinstance(error, ff.NotFound) and error.entity == entity
        case ["lane_mismatch"]:
            assert isinstance(error, ff.InvalidInput) and error.detail.startswith("lane_mismatch:")
        case _:
            assert error.kind == told


async def test_a_key_that_signs_nothing_any_more_does_not_stop_an_operator(world: SuspendingWorld) -> None:
    wait = await world.suspend(count_signals(2, "k"))
    await world.engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, timedelta(0))
    await world.clock.advance(seconds=1)
    assert await outcome(world.send(wait)) == "invalid_token"
    assert isinstance(await world.approve(wait, "1"), Accepted)
    await world.engine.rotate_waitpoint_hmac_secret_all("k3", "cd" * 32, timedelta(0))
    assert await world.sql.fetchval("select state from flowfabric.keystore where kid = 'k1'") == "retired"
    assert await outcome(world.send(wait)) == "invalid_token"
    answer = await world.approve(wait, "2")
    assert isinstance(answer, Accepted) and answer.effect == SATISFIED


async def test_approvals_are_distinguished_by_name_and_suffix(world: SuspendingWorld) -> None:
    wait = await world.suspend(count_signals(3, "k"))
    first = await world.approve(wait, "1")
    assert isinstance(first, Accepted)
    assert await world.approve(wait, "1") == DuplicateSignal(first.signal_id)
    assert await world.approve(wait, "1", source_identity="bob") == DuplicateSignal(first.signal_id)
    rejected = await world.approve(wait, "1", signal_name="rejected")
    assert isinstance(rejected, Accepted) and rejected.signal_id != first.signal_id
    again = await world.approve(wait, "1", signal_dedup_ttl=timedelta(0))
    assert isinstance(again, Accepted) and again.effect == SATISFIED
    # The retry of what is over is still answered.
    assert await world.approve(wait, "1", signal_name="rejected") == DuplicateSignal(rejected.signal_id)
    assert await outcome(world.approve(wait, "2")) == "waitpoint_closed"


async def test_an_approval_can_be_given_before_it_is_waited_for(world: SuspendingWorld) -> None:
    wait = await world.pend()
    answer = await world.approve(wait)
    assert isinstance(answer, Accepted) and answer.effect == BUFFERED
    assert isinstance(await world.suspend_on_pending(wait, on("k", "approved")), AlreadySatisfied)
    await world.engine.complete(wait.handle)
    assert await outcome(world.approve(wait, "2")) == "target_not_signalable"


async def test_an_approval_keeps_as_many_signals_as_it_says(world: SuspendingWorld) -> None:
    wait = await world.suspend(on("k", "never"))
    for number in range(4):
        await world.approve(wait, str(number), maxlen=2)
    assert numbered((await world.engine.read_signals(wait.id)).items) == [3, 4]


# ---- the signal events


async def test_one_event_for_each_accepted_signal_and_none_for_refused_ones(world: SuspendingWorld) -> None:
    wait = await world.pend()
    start = (await world.engine.read_events()).next_cursor
    said = {"payload": b"a secret payload", "correlation_id": "c-17", "source_identity": "alice"}
    buffered = await world.accept(wait, idempotency_key="key-one", **said)
    await world.suspend_on_pending(wait, count_signals(3, "k"))
    appended = await world.accept(wait, **said)
    duplicate = await world.send(wait, idempotency_key="key-one", **said)
    assert duplicate == DuplicateSignal(buffered.signal_id)
    for refused in ({"waitpoint_token": ""}, {"waitpoint_token": forged(wait.point.token)}, {"signal_name": ""}):
        assert await outcome(world.send(wait, **{**said, **refused})) in ("invalid_token", "invalid_input")
    assert await outcome(world.send(wait, **{**said, "payload": bytes(LIMIT + 1)})) == "payload_too_large"
    assert await outcome(world.send(wait, max_signals_per_execution=1)) == "signal_limit_exceeded"
    satisfied = await world.accept(wait)
    assert await outcome(world.send(wait, **said)) == "waitpoint_closed"
    page = await world.engine.read_events(family="signal", after=start)
    assert [(e.signal_effect, (e.details or {})["signal_id"]) for e in page.items] == [
        (BUFFERED, str(buffered.signal_id)),
        (APPENDED, str(appended.signal_id)),
        ("deduped", str(buffered.signal_id)),
        (SATISFIED, str(satisfied.signal_id)),
    ]
    for event in page.items:
        assert event.execution_id == wait.id
        assert (event.details or {})["waitpoint_id"] == str(wait.point.id)
        assert (event.lease_type, event.outcome, event.operator_type) == (None, None, None)
    assert [(e.details or {})["source_identity"] for e in page.items] == ["alice", "alice", "alice", None]
    everything = text_of(await world.events(wait))
    for hidden in (wait.point.token.reveal().split(":")[1], "a secret payload", "c-17", "key-one"):
        assert hidden not in everything
    counts = await world.engine.count_events(start)
    assert counts.signal == {BUFFERED: 1, APPENDED: 1, "deduped": 1, SATISFIED: 1}


# ---- from end to end


SECRET = "ab" * 32
APPROVALS = Count(2, CountKind.DISTINCT_SOURCES, ("approval",), matcher=on("x", "deploy_approval").matcher)


async def deploying(world: SuspendingWorld, condition: Condition = APPROVALS) -> Waiting:
    """Steps 1 to 3 of an approval by two people."""
    assert isinstance(await world.engine.seed_waitpoint_hmac_secret("k1", SECRET), AlreadySeeded)
    wait = await world.hold(execution_kind="deploy")
    await world.engine.progress(wait.handle, percent=50)
    await world.suspend(
        condition,
        of=wait,
        reason_code="waiting_for_approval",
        timeout_at=await world.in_an_hour(),
        timeout_behavior="fail",
    )
    assert await world.engine.claim(**WORKER) is None
    return wait


async def test_two_reviewers_approve(world: SuspendingWorld) -> None:
    wait = await deploying(world)
    (listed,) = (await world.engine.list_pending_waitpoints(wait.id)).items
    assert (listed.state, listed.required_signal_names, listed.token_kid) == ("active", ("deploy_approval",), "k1")
    digest = wait.point.token.reveal()[3:]
    assert listed.token_fingerprint == hashlib.sha256(digest.encode()).hexdigest()[:16]
    assert listed.token_fingerprint not in digest, "no part of the token is shown"
    assert wait.point.token.reveal() not in str(listed)
    by = {"signal_name": "deploy_approval"}
    alice = await world.approve(wait, "alice-1", source_identity="alice", **by)
    assert isinstance(alice, Accepted) and alice.effect == APPENDED
    assert await world.approve(wait, "alice-1", source_identity="alice", **by) == DuplicateSignal(alice.signal_id)
    again = await world.approve(wait, "alice-2", source_identity="alice", **by)
    assert isinstance(again, Accepted)
    assert (again.effect, again.match_detail) == (APPENDED, "duplicate_satisfier")
    bob = await world.approve(wait, "bob-1", source_identity="bob", **by)
    assert isinstance(bob, Accepted) and bob.effect == SATISFIED
    assert await world.closed(wait) == {"approval": ("closed", "resumed")}
    assert (await world.suspension(wait)).close_reason == "resumed"
    assert await world.vector(wait) == RESUMED
    assert (await world.record(wait.id)).suspension_timeout_at is None
    again_held = await world.reclaim_resumed(wait)
    assert again_held.handle.attempt_id == wait.handle.attempt_id
    assert again_held.handle.lease_epoch > wait.handle.lease_epoch
    observed = await world.engine.observe_signals(again_held.handle)
    assert [one.signal_id for one in observed] == [alice.signal_id, bob.signal_id]
    await world.engine.complete(again_held.handle, b"deployed")
    assert short(await world.events(wait))[-2:] == ["L:revoked", "K:success"]
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 0
    assert await world.vector(wait) == ended("success") | {"public_state": "completed"}


@pytest.mark.parametrize(
    ("condition", "effect", "detail"),
    [
        (on("approval"), SATISFIED, "advanced"),
        (count_signals(1, "approval"), SATISFIED, "advanced"),
        (on("approval", "approved"), APPENDED, "matcher_failed"),
    ],
    ids=["any name", "no matcher", "by name"],
)
async def test_a_rejection_wakes_only_waits_for_any_name(
    world: SuspendingWorld, condition: Condition, effect: str, detail: str
) -> None:
    wait = await deploying(world, condition)
    answer = await world.approve(wait, signal_name="rejected")
    assert isinstance(answer, Accepted)
    assert (answer.effect, answer.match_detail) == (effect, detail)
    seen = [one.signal_name for one in await world.engine.observe_signals(wait.handle)]
    assert seen == (["rejected"] if effect == SATISFIED else [])


async def test_a_wait_without_a_signal_times_out(world: SuspendingWorld) -> None:
    wait = await deploying(world)
    await world.clock.advance(hours=1)
    assert (await world.engine.run_timers("suspension")).handled == 1
    assert await world.vector(wait) == ended("failed")
    assert await outcome(world.approve(wait)) == "target_not_signalable"


async def test_a_callback_that_was_prepared_before(world: SuspendingWorld) -> None:
    wait = await world.pend("callback", expires_in=timedelta(milliseconds=300_000))
    assert await world.closed(wait) == {"callback": ("pending", None)}
    await world.engine.renew(wait.handle)
    answer = await world.suspend_on_pending(wait, reason_code="waiting_for_callback")
    assert isinstance(answer, Suspended)
    assert answer.details.waitpoint_token == wait.point.token
    await world.clock.advance(minutes=10)
    await world.engine.run_timers("waitpoint")
    assert await world.closed(wait) == {"callback": ("active", None)}, "its expiry no longer applies"
    bad, before = forged(wait.point.token), await world.stored()
    assert await world.engine.probe_waitpoint(wait.id, wait.point.id, bad) == "mismatch"
    assert set(changed(before, await world.stored())) == {"execution"}, "that someone tried"
    await world.clock.advance(seconds=1)
    before = await world.stored()
    assert await outcome(world.send(wait, waitpoint_token=bad)) == "invalid_token"
    assert set(changed(before, await world.stored())) == {"execution"}
    assert await world.engine.probe_waitpoint(wait.id, wait.point.id, wait.point.token) == "ok"
    genuine = await world.accept(wait, payload=b'{"ok": true}', idempotency_key="hook-1")
    assert genuine.effect == SATISFIED
    assert await world.send(wait, idempotency_key="hook-1") == DuplicateSignal(genuine.signal_id)
    assert await world.send(wait, signal_id=genuine.signal_id) == DuplicateSignal(genuine.signal_id)
    assert await world.engine.probe_waitpoint(wait.id, wait.point.id, wait.point.token) == "closed"
    assert await world.engine.probe_waitpoint(wait.id, wait.point.id, bad) == "unknown"
    assert await outcome(world.send(wait)) == "waitpoint_closed"
    held = await world.reclaim_resumed(wait)
    (seen,) = await world.engine.observe_signals(held.handle)
    assert seen.payload == b'{"ok": true}'
    await world.engine.complete(held.handle)


async def test_the_callback_wins_the_race(world: SuspendingWorld) -> None:
    wait = await world.pend("callback")
    assert (await world.accept(wait, payload=b"fast")).effect == BUFFERED
    events, epoch = short(await world.events(wait)), (await world.record(wait.id)).current_lease_epoch
    answer = await world.suspend_on_pending(wait)
    assert isinstance(answer, AlreadySatisfied) and answer.details is not None
    assert answer.details.waitpoint_id == wait.point.id
    assert short(await world.events(wait)) == events
    assert (await world.record(wait.id)).current_lease_epoch == epoch
    assert [one.payload for one in await world.engine.observe_signals(wait.handle)] == [b"fast"]
    await world.engine.renew(wait.handle)
    await world.engine.complete(wait.handle)


async def test_the_prepared_callback_expires_before_it_is_used(world: SuspendingWorld) -> None:
    wait = await world.pend("callback", expires_in=SECOND)
    await world.accept(wait)
    await world.clock.advance(seconds=2)
    assert await outcome(world.suspend_on_pending(wait)) == "pending_waitpoint_expired"
    assert await world.closed(wait) == {"callback": ("expired", "never_committed")}
    await world.engine.renew(wait.handle)
    await world.pend("callback", of=wait)
    assert isinstance(await world.suspend_on_pending(wait), Suspended)


async def test_signals_of_several_subsystems(world: SuspendingWorld) -> None:
    keys = ["db", "cache", "flags"]
    wait = await world.suspend(all_of(*keys))
    assert list(wait.points) == keys
    assert [one.waitpoint_key for one in wait.details.additional_waitpoints] == ["cache", "flags"]
    for key in keys:
        for other in keys:
            if other != key:
                fields = {"waitpoint_token": wait.points[other].token}
                assert await outcome(world.send(wait, key, **fields)) == "invalid_token"
    assert (await world.accept(wait, "flags")).effect == APPENDED
    assert (await world.accept(wait, "db")).effect == APPENDED
    assert {state for state, _ in (await world.closed(wait)).values()} == {"active"}
    assert (await world.accept(wait, "cache")).effect == SATISFIED
    rows = [await world.waitpoint(wait, key) for key in keys]
    assert {(row["state"], row["close_reason"]) for row in rows} == {("closed", "resumed")}
    assert {row["closed_at"] for row in rows} == {(await world.suspension(wait)).closed_at}
    held = await world.reclaim_resumed(wait)
    observed = await world.engine.observe_signals(held.handle)
    assert [one.waitpoint_key for one in observed] == ["flags", "db", "cache"]
