"""Tasks that wait for signals: alone and beside other tasks, over timeouts, crashes, retries and changed code.

Most run in the testing kit, whose worker, database and duties are the real ones and whose clock moves by itself.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import json
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.bridges.callbacks import MAX_BODY, receive
from flowfabric.errors import StateError, StepsChanged, ValidationFailed
from flowfabric.testing import Kit, Nondeterministic, NotFinished
from flowfabric.values.conditions import Condition, OperatorOnly, TimeoutOnly
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import WaitpointToken
from tests.ids import home, id_in
from tests.integration.conftest import Ledger
from tests.until import until

PATIENCE = 60.0
"""Seconds after which what should have happened counts as missing. Nothing waits this long when all is well."""
HOUR = timedelta(hours=1)
ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0)))
SATISFIED = "resume_condition_satisfied"
Body = Callable[[Any], Generator[Any, Any, Any]]


@pytest.fixture
def app(kit_app: ff.App) -> ff.App:
    return kit_app


def task(app: ff.App, body: Body, *, plain: bool = False, name: str = "job", **options: Any) -> ff.Task[[], Any]:
    """A task whose handler is a generator of what it awaits; `plain`: the same as a plain handler."""

    @app.task(name=name, **options)
    async def handler(ctx: ff.Context) -> Any:
        steps = body(ctx)
        try:
            wanted = next(steps)
            while True:
                try:
                    found = await wanted
                except Exception as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(found)
        except StopIteration as end:
            return end.value

    if not plain:
        return handler
    del app.tasks[name]

    @app.task(name=name, **options)
    def plain_handler(ctx: ff.SyncContext) -> Any:
        steps = body(ctx)
        try:
            found = next(steps)
            while True:
                found = steps.send(found)
        except StopIteration as end:
            return end.value

    return plain_handler


BOTH = pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])


async def states(run: ff.Run[Any]) -> tuple[str, list[tuple[str, str]]]:
    """Its state, and its open waitpoints by key and state."""
    waits = await run.waits()
    return str(await run.state()), sorted((one.waitpoint_key, one.state) for one in waits)


async def beside_a_sleep(ctx: ff.Context, wait: Awaitable[Any]) -> Any:
    """Wait for it while something else is waited for too, so that the execution is parked and not suspended."""
    waiting, sleeping = asyncio.ensure_future(wait), asyncio.ensure_future(ctx.sleep(timedelta(days=300)))
    await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
    sleeping.cancel()
    return await waiting


# ---- one signal


@BOTH
async def test_a_task_waits_for_a_signal_without_a_worker_and_continues_with_it(
    kit: Kit, app: ff.App, did: Ledger, plain: bool
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        yield ctx.step("before", did.entry("before"))
        signal = yield ctx.wait_for("approval", reason="approval")
        yield ctx.step("after", did.entry("after"))
        did.append(f"resumed {ctx.is_resumed}")
        return [signal.name, signal.key, signal.payload, signal.source_type, signal.source_identity, signal.category]

    run = await task(app, body, plain=plain).submit()
    await kit.run_all()
    assert await states(run) == ("suspended", [("approval", "active")])
    assert (await run.get()).blocking_reason == "waiting_for_approval"
    sent = await run.signal("approval", "granted", {"limit": 5}, source_type="mail", source_identity="ann")
    assert isinstance(sent, Accepted)
    assert sent.effect == SATISFIED
    assert await kit.run_until_ended(run) == ["granted", "approval", {"limit": 5}, "mail", "ann", "external"]
    assert did == ["before", "after", "resumed True"]
    assert [attempt.attempt_index for attempt in await run.attempts()] == [0]
    assert [(step.kind, step.name, step.n) for step in await run.steps()] == [
        ("step", "before", 0), ("wait", "approval", 0), ("step", "after", 0),
    ]  # fmt: skip
    assert await run.waits() == []


@BOTH
async def test_an_approval_carries_who_decided(kit: Kit, app: ff.App, plain: bool) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        signal = yield ctx.wait_for("approval")
        return [signal.name, signal.source_type, signal.source_identity, signal.category, signal.payload]

    job = task(app, body, plain=plain)
    runs = [await job.submit() for _ in range(2)]
    await kit.run_all()
    await runs[0].approve(by="ann")
    await runs[1].reject("approval", by="bob")
    assert await kit.run_until_ended(runs[0]) == ["approved", "operator", "ann", "approval", None]
    assert await kit.run_until_ended(runs[1]) == ["rejected", "operator", "bob", "approval", None]


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
async def test_a_signal_with_another_name_wakes_nothing(kit: Kit, app: ff.App, company: bool) -> None:
    @app.task
    async def job(ctx: ff.Context) -> str:
        wait = ctx.wait_for(ff.on("door", "open"))
        signal = await (beside_a_sleep(ctx, wait) if company else wait)
        return f"{signal.name} {signal.payload}"

    run = await job.submit()
    await kit.run_all()
    for payload in range(3):
        await run.signal("door", "knock", payload)
        await kit.run_all()
    assert await states(run) == (("delayed", [("door", "pending")]) if company else ("suspended", [("door", "active")]))
    await run.signal("door", "open", 3)
    assert await kit.run_until_ended(run) == "open 3"


async def test_a_key_may_be_left_out_where_there_is_one_and_is_asked_for_where_there_are_more(
    kit: Kit, app: ff.App
) -> None:
    run = await task(app, lambda ctx: (yield ctx.wait_for(ff.any_of("left", "right")))).submit()
    with pytest.raises(ff.NotFound):
        await run.signal()
    await kit.run_all()
    with pytest.raises(ff.InvalidInput, match="2 waitpoints; allowed: left, right"):
        await run.signal()
    with pytest.raises(ff.NotFound, match="left"):
        await run.signal("lefft")
    await run.signal("left")
    with pytest.raises(ff.NotFound):
        await run.signal("left")


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "waitpoint_key_empty"),
    (5, {}, "what: got int"),
    ("x" * 257, {}, "257 bytes"),
    ("a\0b", {}, "NUL"),
    (ff.any_of("a", n=2), {}, "count_exceeds_waitpoint_set"),
    (ff.all_of(), {}, "allof_empty_members"),
    (TimeoutOnly(), {}, "timeout_only_without_deadline"),
    ("k", {"timeout": 0}, "timeout: got 0"),
    ("k", {"timeout": -1}, "timeout"),
    ("k", {"on_timeout": "explode"}, "on_timeout: got 'explode'"),
    ("k", {"reason": "boredom"}, "reason: got 'boredom'"),
    ("k", {"timeout": 1, "on_timeout": "fail", "default": 1}, "only one of them"),
    ("k", {"name": "x" * 257}, "name: "),
    ("k", {"payload": asyncio.Event}, "Event has no JSON form"),
]


@BOTH
async def test_a_wait_that_cannot_be_one_fails_clearly(kit: Kit, app: ff.App, plain: bool) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        said = []
        for what, options, _ in WRONG:
            try:
                yield ctx.wait_for(what, **options)
            except ff.InvalidInput as error:
                said.append(str(error))
        return said

    run = await task(app, body, plain=plain).submit()
    for said, (_, _, words) in zip(await kit.run_until_ended(run), WRONG, strict=True):
        assert words in said
    assert await run.steps() == []


@BOTH
async def test_inside_a_step_nothing_is_waited_for(kit: Kit, app: ff.App, plain: bool) -> None:
    if plain:

        @app.task
        def job(ctx: ff.SyncContext) -> list[str]:
            def waits(call: Callable[[str], Any]) -> str:
                with pytest.raises(ff.InvalidInput, match="inside a step") as caught:
                    call("key")
                return str(caught.value)

            return [ctx.step("a", lambda: waits(ctx.wait_for)), ctx.step("b", lambda: waits(ctx.waitpoint))]
    else:

        @app.task
        async def job(ctx: ff.Context) -> list[str]:
            async def waits(call: Callable[[str], Awaitable[Any]]) -> str:
                with pytest.raises(ff.InvalidInput, match="inside a step") as caught:
                    await call("key")
                return str(caught.value)

            return [await ctx.step("a", waits, ctx.wait_for), await ctx.step("b", waits, ctx.waitpoint)]

    assert len(await kit.run_inline(job)) == 2


async def test_keys_of_every_sort_can_be_waited_for(kit: Kit, app: ff.App) -> None:
    """Also so many, and so long, that their names together are no name."""
    keys = [f"{number} é{'ü' * 100} '; drop table" for number in range(6)] + [" ", "a b", "{}%s", "timeout", "operator"]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        signals = yield ctx.wait_for(ff.all_of(*keys))
        return [signal.key for signal in signals]

    run = await task(app, body).submit()
    await kit.run_all()
    for key in keys:
        await run.signal(key)
    assert await kit.run_until_ended(run) == keys


# ---- conditions

Sent = tuple[str, str, str]  # key, name, who
CONDITIONS: dict[str, tuple[Condition | str, list[Sent], list[str]]] = {
    "one": ("a", [("a", "1", "")], ["1"]),
    "of a name": (ff.on("a", "go"), [("a", "no", ""), ("a", "go", "")], ["go"]),
    "all of": (ff.all_of("a", "b"), [("a", "1", ""), ("a", "2", ""), ("b", "3", "")], ["1", "3"]),
    "all of, the other way round": (ff.all_of("a", "b"), [("b", "1", ""), ("a", "2", "")], ["1", "2"]),
    "any of": (ff.any_of("a", "b", "c"), [("c", "1", "")], ["1"]),
    "any two of": (ff.any_of("a", "b", "c", n=2), [("b", "1", ""), ("b", "2", ""), ("c", "3", "")], ["1", "3"]),
    "any two of a name": (
        ff.any_of("a", "b", n=2, name="yes"), [("a", "yes", ""), ("b", "no", ""), ("b", "yes", "")], ["yes", "yes"],
    ),
    "from two senders": (
        ff.from_sources(2, "a"), [("a", "1", "ann"), ("a", "2", "ann"), ("a", "3", "bob")], ["1", "3"],
    ),
    "from two senders of a name": (
        ff.from_sources(2, "a", name="yes"), [("a", "yes", "ann"), ("a", "no", "bob"), ("a", "yes", "cy")], ["yes"] * 2,
    ),
    "three signals": (
        ff.count_signals(3, "a", "b"), [("a", "1", "ann"), ("a", "2", "ann"), ("b", "3", "")], ["1", "2", "3"],
    ),
    "nested": (
        ff.all_of("boss", ff.all_of(ff.from_sources(2, "team"), ff.any_of("x", "y"))),
        [("team", "1", "ann"), ("y", "2", ""), ("team", "3", "ann"), ("boss", "4", ""), ("team", "5", "bob")],
        ["1", "2", "4", "5"],
    ),
    "two names at one key": (
        ff.all_of(ff.on("a", "begin"), ff.on("a", "end")),
        [("a", "end", ""), ("a", "other", ""), ("a", "begin", "")],
        ["end", "begin"],
    ),
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
@pytest.mark.parametrize("case", CONDITIONS)
async def test_a_condition_holds_with_its_last_signal_and_gives_those_that_counted(
    kit: Kit, app: ff.App, did: Ledger, case: str, company: bool
) -> None:
    condition, sent, expected = CONDITIONS[case]

    @app.task
    async def job(ctx: ff.Context) -> list[str]:
        did.append("run")
        wait: Any = ctx.wait_for(condition)
        found = await (beside_a_sleep(ctx, wait) if company else wait)
        assert isinstance(found, ff.Signal if len(expected) == 1 and not isinstance(found, list) else list)
        return [signal.name for signal in (found if isinstance(found, list) else [found])]

    run = await job.submit()
    await kit.run_all()
    for key, name, who in sent:
        assert not (await run.state()).is_terminal
        await run.signal(key, name, source_identity=who)
        await kit.run_all()
    assert await run.state() is ff.State.COMPLETED
    assert await run.result() == expected
    if not company:
        assert did == ["run", "run"], "signals that are not enough wake nothing"


@BOTH
async def test_signals_that_arrived_earlier_satisfy_a_wait_immediately(kit: Kit, app: ff.App, plain: bool) -> None:
    """Of a worker that died with its waitpoints open: the next finds everything there."""

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        signals = yield ctx.wait_for(ff.all_of("a", ff.from_sources(2, "b")), name="all")
        return [signal.name for signal in signals]

    run = await task(app, body, plain=plain).submit()
    with kit.crash_after("all"):
        async with kit.worker(app) as worker:
            await asyncio.wait_for(worker.dead.wait(), PATIENCE)
        assert [one.state for one in await run.waits()] == ["pending", "pending"]
        for key, name, who in [("b", "1", "x"), ("a", "2", ""), ("b", "3", "x"), ("b", "4", "y"), ("b", "5", "z")]:
            await run.signal(key, name, source_identity=who)
        assert await kit.run_until_ended(run) == ["1", "2", "4"]
    assert [attempt.attempt_index for attempt in await run.attempts()] == [0, 1]


@pytest.mark.parametrize("condition", [OperatorOnly(), TimeoutOnly(), ff.all_of("a", OperatorOnly())])
async def test_where_no_signal_counts_only_time_and_operators_do(kit: Kit, app: ff.App, condition: Condition) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return (yield ctx.wait_for(condition, timeout=HOUR, default="over"))

    job = task(app, body)
    assert await kit.run_inline(job) == "over"
    run = await job.submit()
    await kit.run_all()
    (place,) = await run.waits()
    await run.signal(place.waitpoint_key, "x")
    await kit.run_all()
    assert await run.state() is ff.State.SUSPENDED
    await run.resume()
    assert await kit.run_until_ended(run) == "over"


# ---- payloads


@dataclasses.dataclass
class Point:
    x: int
    at: datetime


class Money(msgspec.Struct):
    amount: int
    currency: str = "EUR"


class Order(pydantic.BaseModel):
    item: str
    count: int = 1


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
PAYLOADS: list[tuple[Any, Any, Any]] = [
    (Point, Point(1, NOON), Point(1, NOON)),
    (Point, {"x": 1, "at": "2030-01-01T12:00:00Z"}, Point(1, NOON)),
    (Money, Money(5), Money(5)),
    (Money, {"amount": 5, "currency": "CHF"}, Money(5, "CHF")),
    (Order, Order(item="pen"), Order(item="pen")),
    (list[Money], [Money(1), Money(2)], [Money(1), Money(2)]),
    (int, 2**60, 2**60),
    (datetime, NOON, NOON),
    (UUID, UUID(int=7), UUID(int=7)),
    (Any, {"a": [1, None, "é\u2028"]}, {"a": [1, None, "é\u2028"]}),
    (Money | None, None, None),
]


async def test_a_payload_is_given_in_the_type_that_is_asked_for(kit: Kit, app: ff.App) -> None:
    got: list[Any] = []

    @app.task
    async def job(ctx: ff.Context) -> None:
        waits = [ctx.wait_for(str(number), payload=wanted) for number, (wanted, _, _) in enumerate(PAYLOADS)]
        got[:] = [signal.payload for signal in await asyncio.gather(*waits)]

    run = await job.submit()
    await kit.run_all()
    for number, (_, sent, _) in enumerate(PAYLOADS):
        await run.signal(str(number), payload=sent)
    await kit.run_until_ended(run)
    expected = [expected for _, _, expected in PAYLOADS]
    assert got == expected
    assert [type(one) for one in got] == [type(one) for one in expected]


@pytest.mark.parametrize(
    ("wanted", "body_", "words", "plain", "first"),
    [
        (Money, b'{"amount": "hunter2"}', "Money", False, False),
        (Money, b'{"amount": "hunter2"}', "Money", True, True),
        (Order, b'{"hunter2": 1}', "Order", False, True),
        (int, b'"hunter2"', "int", True, False),
        (Point, b"hunter2", "Point", False, False),
        (Any, b'{"hunter2"', "any", False, False),
    ],
)
async def test_a_payload_that_does_not_fit_is_set_aside_and_not_shown(
    kit: Kit, app: ff.App, plain: bool, wanted: Any, body_: bytes, words: str, first: bool
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        if first:
            place = yield ctx.waitpoint("k")
            yield place.wait(payload=wanted)
        else:
            yield ctx.wait_for("k", payload=wanted)

    run = await task(app, body, plain=plain, retry=ONCE).submit()
    await kit.run_all()
    engine = await kit.engine()
    (place,) = await run.waits()
    token = await engine.read_waitpoint_token(home(run.execution_id), place.waitpoint_id)
    assert token is not None
    await engine.deliver_signal(
        run.execution_id, place.waitpoint_id, token, signal_name="go", source_type="test", payload=body_
    )
    await kit.run_all()
    assert await run.waits() == [msgspec.structs.replace(place, activated_at=(await run.waits())[0].activated_at)]
    (signal,) = (await engine.read_signals(run.execution_id)).items
    assert words.lower() in str(signal.refused).lower()
    assert "hunter2" not in str(signal.refused)
    assert len(await run.attempts()) == 1


class Reversed:
    """A codec that hides text well enough to see where it is not applied."""

    name = "reversed"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]


async def test_a_payload_passes_the_apps_codecs_and_plain_json_comes_from_outside(kit: Kit) -> None:
    app = ff.App(codecs=[Reversed()])
    kit.use(app)

    links: list[str] = []

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        places = [(yield ctx.waitpoint("web")), (yield ctx.waitpoint("elsewhere"))]
        links[:] = [place.callback for place in places]
        signals = [(yield ctx.wait_for("in"))]
        for place in places:
            signals.append((yield place.wait(payload=Money)))
        return [signals[0].payload, *(signal.payload.amount for signal in signals[1:])]

    run = await task(app, body).submit()
    await kit.run_all()
    await run.signal("in", payload={"iban": "CH93"})
    engine = await kit.engine()
    assert (await (await app.client()).receive(links[0], b'{"amount": 3}')).status == 202
    assert (await receive(engine, links[1], b'{"amount": 4}')).status == 202
    assert await kit.run_until_ended(run) == [{"iban": "CH93"}, 3, 4]
    stored = (await engine.read_signals(run.execution_id)).items
    assert [(one.payload_encoding, one.payload) for one in stored] == [
        ("json+reversed", b'{"iban":"CH93"}'[::-1]),
        ("json+reversed", b'{"amount": 3}'[::-1]),
        ("json", b'{"amount": 4}'),
    ]
    for step in await run.steps():
        assert b"iban" not in (step.result or b"")


async def test_a_payload_that_is_not_json_or_too_large_is_refused_where_it_is_sent(kit: Kit, app: ff.App) -> None:
    run = await task(app, lambda ctx: (yield ctx.wait_for("k"))).submit()
    await kit.run_all()
    with pytest.raises(ff.InvalidInput, match="payload"):
        await run.signal("k", payload=object())
    with pytest.raises(ValidationFailed) as caught:
        await run.signal("k", payload="x" * 65_536)
    assert caught.value.kind == "payload_too_large"
    assert (await (await kit.engine()).read_signals(run.execution_id)).items == []


# ---- waitpoints first


@BOTH
async def test_a_waitpoint_is_handed_out_and_the_same_in_every_run(
    kit: Kit, app: ff.App, did: Ledger, plain: bool
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("paid")
        did.append(place.callback)
        assert place.token.reveal() not in repr(place)
        yield ctx.sleep(HOUR)
        signal = yield place.wait(payload=Money)
        did.append(place.callback)
        return signal.payload.amount

    run = await task(app, body, plain=plain).submit()
    with kit.crash_after("paid"), kit.crash_after("sleep"), pytest.raises(NotFinished, match="suspended"):
        await kit.run_until_ended(run)
    client = await app.client()
    assert await states(run) == ("suspended", [("paid", "active")])
    received = await client.receive(did[0], b'{"amount": 12}')
    assert (received.status, received.outcome) == (200, "resumed")
    assert await kit.run_until_ended(run) == 12
    assert len(set(did)) == 1
    assert did[0] not in json.dumps([dict(attempt) for attempt in await _stored(kit)], default=str)


async def _stored(kit: Kit) -> list[asyncpg.Record]:
    return await (await kit.engine())._fetch("select * from flowfabric.event")


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["before the wait", "while it waits", "while it waits for something else"])
@BOTH
async def test_a_signal_is_never_lost_at_any_point(kit: Kit, app: ff.App, plain: bool, when: str) -> None:
    client = await app.client()
    links: list[str] = []
    answers: list[tuple[int, str]] = []

    async def call(link: str) -> None:
        received = await client.receive(link, b"1", idempotency_key="once")
        answers.append((received.status, received.outcome))

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("callback")
        links.append(place.callback)
        if when == "before the wait":
            if plain:
                yield ctx.step("call", functools.partial(_here, loop, call(place.callback)))
            else:
                yield ctx.step("call", call, place.callback)
        elif when == "while it waits for something else":
            yield ctx.sleep(HOUR)
        return (yield place.wait()).payload

    loop = asyncio.get_running_loop()
    run = await task(app, body, plain=plain).submit()
    if when != "before the wait":
        await kit.run_all()
        await call(links[0])
    assert await kit.run_until_ended(run) == 1
    assert answers == [(200, "resumed") if when == "while it waits" else (202, "accepted")]
    if when == "before the wait":
        assert len(links) == 1, "it never had to stop"
    again = await client.receive(links[0], b"1", idempotency_key="once")
    assert (again.status, again.outcome, again.signal_id is not None) == (200, "duplicate", True)
    assert (await client.receive(links[0], b"1")).status == 404


def _here(loop: asyncio.AbstractEventLoop, work: Any) -> None:
    asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)


@BOTH
async def test_a_waitpoint_may_be_waited_at_twice_and_gives_the_same_signal(kit: Kit, app: ff.App, plain: bool) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("k")
        first = yield place.wait(timeout=HOUR)
        second = yield place.wait(timeout=HOUR)
        yield ctx.sleep(HOUR)
        assert first == second
        return str((yield place.wait(timeout=HOUR)).signal_id)

    run = await task(app, body, plain=plain).submit()
    await kit.run_all()
    sent = await run.signal("k")
    assert await kit.run_until_ended(run) == str(sent.signal_id)  # type: ignore[union-attr]


async def test_several_waitpoints_of_one_key_are_distinguished_by_their_links(kit: Kit, app: ff.App) -> None:
    links: list[str] = []

    @app.task
    async def job(ctx: ff.Context) -> list[Any]:
        places = [await ctx.waitpoint("reply", name=f"to {who}") for who in ("ann", "bob")]
        links[:] = [place.callback for place in places]
        return [signal.payload for signal in await asyncio.gather(*(place.wait() for place in places))]

    run = await job.submit()
    await kit.run_all()
    client = await app.client()
    assert (await client.receive(links[1], b'"from bob"')).status == 200
    await kit.run_all()
    assert (await client.receive(links[1], b'"once more"')).status == 409
    assert (await client.receive(links[0], b'"from ann"')).status == 200
    assert await kit.run_until_ended(run) == ["from ann", "from bob"]


# ---- time


# Every way to wait; a plain handler waits for one thing at a time.
WAYS = pytest.mark.parametrize(
    ("plain", "first", "company"),
    [
        pytest.param(False, False, False, id="alone"),
        pytest.param(False, False, True, id="in company"),
        pytest.param(False, True, True, id="in company, waitpoint first"),
        pytest.param(True, False, False, id="plain"),
        pytest.param(True, True, False, id="plain, waitpoint first"),
    ],
)


@pytest.mark.each_value
@pytest.mark.parametrize("default", [False, True], ids=["raise", "default"])
@WAYS
async def test_a_timeout_raises_an_error_or_returns_the_default(
    kit: Kit, app: ff.App, did: Ledger, plain: bool, default: bool, company: bool, first: bool
) -> None:
    options: dict[str, Any] = {"timeout": HOUR, **({"default": None} if default else {})}

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        begun = yield ctx.now()
        try:
            found = (yield ctx.waitpoint("k")).wait(**options) if first else ctx.wait_for("k", **options)
            answer = yield (beside_a_sleep(ctx, found) if company else found)
        except ff.NoSignal as error:
            answer = [error.kind, error.name]
        yield ctx.step("after", did.entry("after"))
        yield ctx.sleep(HOUR)
        waited = (yield ctx.now()) - begun
        return [answer, 2 <= waited / HOUR < 2.1]

    job = task(app, body, plain=plain)
    expected = [None if default else ["wait_timed_out", "k"], True]
    assert await kit.run_inline(job) == expected
    assert did == ["after"]
    if not default:
        report = await kit.crash_everywhere(job)
        assert report.result == expected


async def test_a_time_limit_counts_from_the_first_run_and_from_the_wait_not_from_its_waitpoint(
    kit: Kit, app: ff.App
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        begun = yield ctx.now()
        place = yield ctx.waitpoint("k")
        yield ctx.sleep(5 * HOUR)
        yield place.wait(timeout=HOUR, default=None)
        first = (yield ctx.now()) - begun
        yield ctx.wait_for("other", timeout=HOUR, default=None)
        return [round(first / HOUR, 1), round(((yield ctx.now()) - begun) / HOUR, 1)]

    run = await task(app, body).submit()
    with kit.crash_after("other"):
        assert await kit.run_until_ended(run) == [6.0, 7.0]


@pytest.mark.parametrize("what", ["let it pass", "retried"])
async def test_a_handler_that_lets_it_pass_fails_and_is_not_retried(kit: Kit, app: ff.App, what: str) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        yield ctx.wait_for("approval", timeout=HOUR)

    run = await task(app, body, **({"retry": ONCE} if what == "retried" else {})).submit()
    with pytest.raises(ff.TaskFailed, match="no signal for 'approval': it timed out") as caught:
        await kit.run_until_ended(run)
    assert (caught.value.category, len(await run.attempts())) == ("wait_timed_out", 1)


ENDS = {"fail": ff.State.FAILED, "cancel": ff.State.CANCELLED, "expire": ff.State.EXPIRED}


@pytest.mark.each_value
@pytest.mark.parametrize("on_timeout", ENDS)
@WAYS
async def test_the_engine_ends_an_execution_whose_wait_times_out(
    kit: Kit, app: ff.App, did: Ledger, plain: bool, first: bool, company: bool, on_timeout: str
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        try:
            if first:
                found = (yield ctx.waitpoint("k")).wait(timeout=HOUR, on_timeout=on_timeout)
            else:
                found = ctx.wait_for("k", timeout=HOUR, on_timeout=on_timeout)
            yield (beside_a_sleep(ctx, found) if company else found)
        except Exception as error:
            did.append(f"raised {error}")
        did.append("went on")

    run = await task(app, body, plain=plain, retry=ONCE).submit()
    with pytest.raises(ff.TaskFailed):
        await kit.run_until_ended(run)
    found = await run.get()
    assert found.public_state is ENDS[on_timeout]
    assert f"suspension_timeout:{on_timeout}" in (found.failure_reason or found.cancellation_reason or "")
    assert did == [], "the handler does not learn of it"
    assert (len(await run.attempts()), await run.waits()) == (1, [])


@pytest.mark.each_value
@pytest.mark.parametrize("on_timeout", [*ENDS, "escalate", "raise"])
@BOTH
async def test_a_time_that_was_over_before_it_could_wait_ends_the_wait_all_the_same(
    kit: Kit, app: ff.App, plain: bool, on_timeout: Any
) -> None:
    """The worker was lost right after the waitpoint was opened, and no worker ran for a day."""

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return (yield ctx.wait_for("k", timeout=HOUR, on_timeout=on_timeout)).name

    run = await task(app, body, plain=plain).submit()
    with kit.crash_after("k"):
        async with kit.worker(app) as worker:
            await asyncio.wait_for(worker.dead.wait(), PATIENCE)
    await kit.clock.advance(days=1)
    await kit.run_all()
    found = await run.get()
    if on_timeout == "escalate":
        assert (found.public_state, found.blocking_reason) == (ff.State.SUSPENDED, "paused_by_operator")
        await run.signal("k", "late")
        assert await kit.run_until_ended(run) == "late"
    else:
        assert found.public_state is ENDS.get(on_timeout, ff.State.FAILED)
        expected = "it timed out" if on_timeout == "raise" else f"suspension_timeout:{on_timeout}"
        assert expected in (found.failure_reason or found.cancellation_reason or "")


@BOTH
async def test_an_escalated_wait_continues_and_accepts_signals(kit: Kit, app: ff.App, plain: bool) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return (yield ctx.wait_for("k", timeout=HOUR, on_timeout="escalate")).name

    run = await task(app, body, plain=plain).submit()
    with pytest.raises(NotFinished, match="missed its deadline"):
        await kit.run_until_ended(run)
    found = await run.get()
    assert (found.public_state, found.blocking_reason) == (ff.State.SUSPENDED, "paused_by_operator")
    await run.approve(by="boss")
    assert await kit.run_until_ended(run) == "approved"


async def test_a_wait_that_is_left_over_after_its_deadline_escalates_when_it_is_alone(kit: Kit, app: ff.App) -> None:
    """Beside a longer sleep the timeout wakes nothing; a deadline that has passed then is no reason not to wait."""

    @app.task
    async def job(ctx: ff.Context) -> str:
        signal, _ = await asyncio.gather(ctx.wait_for("k", timeout=HOUR, on_timeout="escalate"), ctx.sleep(5 * HOUR))
        return signal.name

    run = await job.submit()
    with pytest.raises(NotFinished, match="missed its deadline"):
        await kit.run_until_ended(run)
    await run.signal("k", "late")
    assert await kit.run_until_ended(run) == "late"


@BOTH
async def test_a_signal_that_came_in_time_counts_though_it_is_looked_at_late(
    kit: Kit, app: ff.App, plain: bool
) -> None:
    run = await task(app, lambda ctx: _name_of((yield ctx.wait_for("k", timeout=HOUR))), plain=plain).submit()
    with kit.crash_after("k"):
        async with kit.worker(app) as worker:
            await asyncio.wait_for(worker.dead.wait(), PATIENCE)
    await run.signal("k", "in time")
    await kit.clock.advance(days=1)
    assert await kit.run_until_ended(run) == "in time"


def _name_of(signal: ff.Signal[Any]) -> str:
    return signal.name


# ---- operators


@pytest.mark.each_value
@pytest.mark.parametrize("default", [False, True], ids=["raise", "default"])
@pytest.mark.parametrize("first", [False, True], ids=["wait_for", "waitpoint"])
@BOTH
async def test_an_operator_ends_a_wait_without_a_signal(
    kit: Kit, app: ff.App, plain: bool, default: bool, first: bool
) -> None:
    options: dict[str, Any] = {"default": "none"} if default else {}

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        try:
            found = yield ((yield ctx.waitpoint("k")).wait(**options) if first else ctx.wait_for("k", **options))
        except ff.NoSignal as error:
            found = f"{error.kind}: {error}"
        yield ctx.sleep(HOUR)
        return found

    run = await task(app, body, plain=plain).submit()
    await kit.run_all()
    await run.resume(delay=HOUR)
    assert await run.state() is ff.State.DELAYED
    found = await kit.run_until_ended(run)
    assert found == "none" if default else "an operator resumed" in found and "wait_overridden" in found
    with pytest.raises(StateError):
        await run.resume()


async def test_an_override_that_is_let_pass_fails_for_good_and_a_replay_waits_again(kit: Kit, app: ff.App) -> None:
    run = await task(app, lambda ctx: (yield ctx.wait_for("k")), retry=ONCE).submit()
    await kit.run_all()
    await run.resume()
    with pytest.raises(ff.TaskFailed, match="an operator resumed the execution") as caught:
        await kit.run_until_ended(run)
    assert caught.value.category == "wait_overridden"
    await run.replay()
    await kit.run_all()
    assert await states(run) == ("suspended", [("k", "active")])


# ---- several things at once


async def test_waits_under_gather_end_one_after_the_other(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    async def job(ctx: ff.Context) -> list[str]:
        async def one(key: str) -> str:
            signal = await ctx.wait_for(key)
            return await ctx.step(f"got {key}", did.entry(key, f"{key} {signal.payload}"))

        return await asyncio.gather(*(one(key) for key in "abc"))

    run = await job.submit()
    await kit.run_all()
    assert await states(run) == ("suspended", [(key, "active") for key in "abc"])
    await run.signal("b", payload=1)
    await kit.run_all()
    assert await states(run) == ("suspended", [("a", "active"), ("c", "active")])
    await run.signal("c", payload=2)
    await kit.run_all()
    assert await states(run) == ("suspended", [("a", "active")]), "the last one is waited for alone"
    await run.signal(payload=3)
    assert await kit.run_until_ended(run) == ["a 3", "b 1", "c 2"]
    assert did == ["b", "c", "a"]


async def test_an_operator_resumes_waits_under_gather(kit: Kit, app: ff.App) -> None:
    @app.task
    async def job(ctx: ff.Context) -> list[Any]:
        waits = (ctx.wait_for("a", default="nobody"), ctx.wait_for("b"))
        return [str(one) for one in await asyncio.gather(*waits, return_exceptions=True)]

    run = await job.submit()
    await kit.run_all()
    found = await run.get()
    assert (found.public_state, found.blocking_detail) == (ff.State.SUSPENDED, "waits for signals a, b")
    await run.resume()
    first, second = await kit.run_until_ended(run)
    assert first == "nobody" and "an operator resumed" in second


@pytest.mark.parametrize("on_timeout", ["raise", "fail", "cancel", "expire", "escalate"])
async def test_a_timeout_under_gather(kit: Kit, app: ff.App, on_timeout: Any) -> None:
    """The suspension has it: no run is needed where it ends the execution, and an operator is told of an escalation."""

    @app.task
    async def job(ctx: ff.Context) -> list[Any]:
        waits = (ctx.wait_for("a", timeout=HOUR, on_timeout=on_timeout), ctx.wait_for("b"))
        return [getattr(one, "payload", None) for one in await asyncio.gather(*waits, return_exceptions=True)]

    run = await job.submit()
    await kit.run_all()
    assert await states(run) == ("suspended", [("a", "active"), ("b", "active")])
    client = await app.client()
    suspension = await client.engine.read_suspension(run.execution_id)
    assert suspension is not None and suspension.timeout_at is not None
    await kit.clock.advance(hours=1, seconds=1)
    await kit.run_all()
    if on_timeout in ("raise", "escalate"):
        left = ["b"] if on_timeout == "raise" else ["a", "b"]
        assert await states(run) == ("suspended", [(key, "active") for key in left])
        if on_timeout == "escalate":
            assert (await run.get()).blocking_reason == "paused_by_operator"
            await run.signal("a", payload=1)
        await run.signal("b", payload=2)
        assert await kit.run_until_ended(run) == [None if on_timeout == "raise" else 1, 2]
    else:
        ends = {"fail": ff.State.FAILED, "cancel": ff.State.CANCELLED, "expire": ff.State.EXPIRED}
        assert await run.state() is ends[on_timeout]


async def test_what_a_handler_waits_for_is_its_state(kit: Kit, app: ff.App) -> None:
    @app.task
    async def child(ctx: ff.Context) -> None:
        await ctx.wait_for("go")

    @app.task
    async def parent(ctx: ff.Context, what: list[str]) -> None:
        waits: list[Any] = []
        for one in what:
            match one:
                case "children":
                    waits += [(await child.submit()).result() for _ in range(2)]
                case "time":
                    waits.append(ctx.sleep(HOUR))
                case key:
                    waits.append(ctx.wait_for(key))
        await asyncio.gather(*waits)

    for what, state, detail in (
        (["children"], "waiting_children", "waits for 2 child executions"),
        (["children", "time"], "waiting_children", "waits for 2 child executions and until "),
        (["children", "a"], "waiting_children", "waits for 2 child executions and for signal a"),
        (["time"], "delayed", "waits until "),
        (["time", "a", "b"], "delayed", "waits for signals a, b and until "),
        (["a", "b"], "suspended", "waits for signals a, b"),
    ):
        run = await parent.submit(what)
        await kit.run_all()
        found = await run.get()
        assert found.public_state == state and (found.blocking_detail or "").startswith(detail), what
        assert (found.delay_until is not None) == ("time" in what)
        await run.cancel()


async def test_waits_in_a_group_end_together_when_one_has_no_time_left(kit: Kit, app: ff.App, did: Ledger) -> None:
    @app.task
    async def job(ctx: ff.Context) -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ctx.wait_for("a"))
                group.create_task(ctx.wait_for("b", timeout=HOUR))
        except* ff.NoSignal:
            await ctx.step("after", did.entry("after"))
        return (await ctx.wait_for("c", timeout=HOUR, default=None)) is None and "over"

    assert await kit.run_inline(job) == "over"
    assert did == ["after"]


@pytest.mark.parametrize("winner", ["signal", "sleep"])
async def test_a_wait_beside_a_sleep_and_the_first_of_them_wins(kit: Kit, app: ff.App, winner: str) -> None:
    @app.task
    async def job(ctx: ff.Context) -> list[str]:
        wait, sleep = asyncio.create_task(ctx.wait_for("k")), asyncio.create_task(ctx.sleep(HOUR))
        done, left = await asyncio.wait({wait, sleep}, return_when=asyncio.FIRST_COMPLETED)
        # Remembered: when both are over, a later run could not tell which was first.
        found = await ctx.step(
            "first", lambda: [name for name, one in (("signal", wait), ("sleep", sleep)) if one in done]
        )
        for one in left:
            one.cancel()
        await ctx.sleep(HOUR)
        return found

    run = await job.submit()
    await kit.run_all()
    assert await states(run) == ("delayed", [("k", "pending")])
    if winner == "signal":
        await run.signal()
    assert await kit.run_until_ended(run) == [winner]


async def test_a_wait_that_is_given_up_does_not_take_the_signals_of_the_next(kit: Kit, app: ff.App) -> None:
    @app.task
    async def job(ctx: ff.Context) -> list[Any]:
        heard: list[Any] = []
        while len(heard) < 3:
            wait, pause = asyncio.create_task(ctx.wait_for("cmd")), asyncio.create_task(ctx.sleep(HOUR))
            done, left = await asyncio.wait({wait, pause}, return_when=asyncio.FIRST_COMPLETED)
            heard.append(wait.result().payload if wait in done else None)
            for one in left:
                one.cancel()
        return heard

    run = await job.submit()
    await kit.run_all()
    await kit.clock.advance(hours=1, seconds=1)
    await kit.run_all()
    await run.signal("cmd", payload="go")
    assert await kit.run_until_ended(run) == [None, "go", None]


@pytest.mark.parametrize("first", ["signal", "child"])
async def test_a_wait_beside_the_result_of_a_child(kit: Kit, app: ff.App, first: str) -> None:
    @app.task
    async def child(ctx: ff.Context) -> int:
        return int((await ctx.wait_for("child")).payload)

    @app.task
    async def parent(ctx: ff.Context) -> list[Any]:
        run = await child.submit()
        number, signal = await asyncio.gather(run.result(), ctx.wait_for("parent"))
        return [number, signal.payload]

    run = await parent.submit()
    await kit.run_all()
    (inner,) = [step.child_id for step in await run.steps() if step.kind == "submit"]
    client = await app.client()
    calls = [lambda: client.signal(str(inner), payload=1), lambda: run.signal(payload=2)]
    for call in calls if first == "child" else reversed(calls):
        assert await run.state() in (ff.State.WAITING_CHILDREN, ff.State.SUSPENDED)
        await call()
        await kit.run_all()
    assert await run.result() == [1, 2]


async def test_the_parent_of_a_task_that_waits_gets_its_result(kit: Kit, app: ff.App) -> None:
    child = task(app, lambda ctx: (yield ctx.wait_for("k", timeout=HOUR, default=None)), name="child")

    @app.task
    async def parent() -> Any:
        return await (await child.submit()).result()

    assert await kit.run_inline(parent) is None


# ---- again and again


@BOTH
async def test_waits_under_one_key_are_numbered(kit: Kit, app: ff.App, did: Ledger, plain: bool) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        said = []
        while (signal := (yield ctx.wait_for("chat"))).name != "bye":
            said.append((yield ctx.step("answer", did.entry(signal.payload, signal.payload))))
        return said

    run = await task(app, body, plain=plain).submit()
    for word in ("one", "two", "three"):
        await kit.run_all()
        await run.signal("chat", payload=word)
    await kit.run_all()
    await run.signal("chat", "bye")
    assert await kit.run_until_ended(run) == ["one", "two", "three"]
    assert did == ["one", "two", "three"]
    assert [step.n for step in await run.steps() if step.kind == "wait"] == [0, 1, 2, 3]


async def test_a_second_signal_to_a_wait_that_ended_is_refused_and_not_kept_for_the_next(kit: Kit, app: ff.App) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        first = yield ctx.wait_for("k")
        second = yield ctx.wait_for("k")
        return [first.payload, second.payload]

    run = await task(app, body).submit()
    await kit.run_all()
    (place,) = await run.waits()
    engine = await kit.engine()
    token = await engine.read_waitpoint_token(home(run.execution_id), place.waitpoint_id)
    assert token is not None
    await run.signal(payload=1)
    with pytest.raises(StateError) as caught:
        await engine.deliver_signal(
            run.execution_id, place.waitpoint_id, token, signal_name="x", source_type="test", payload=b"9"
        )
    assert caught.value.kind == "waitpoint_closed"
    await kit.run_all()
    await run.signal(payload=2)
    assert await kit.run_until_ended(run) == [1, 2]


# ---- crashes, retries, replays


@pytest.mark.each_value
@pytest.mark.parametrize("first", [False, True], ids=["wait_for", "waitpoint"])
@BOTH
async def test_a_crash_anywhere_changes_nothing(kit: Kit, app: ff.App, plain: bool, first: bool) -> None:
    """A child signals its parent, so that everything happens by itself."""

    @app.task
    async def teller(parent: str) -> None:
        await (await app.client()).signal(parent, "approval", "granted", 5, idempotency_key="once")

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        before = yield ctx.step("before", lambda: 1)
        if first:
            place = yield ctx.waitpoint("approval")
            yield ctx.submit(teller, str(ctx.execution_id))
            signal = yield place.wait(timeout=HOUR)
        else:
            yield ctx.submit(teller.options(delay=1), str(ctx.execution_id))
            signal = yield ctx.wait_for("approval", timeout=HOUR)
        after = yield ctx.step("after", lambda: 2)
        return [before, signal.payload, after]

    report = await kit.crash_everywhere(task(app, body, plain=plain))
    assert report.result == [1, 5, 2]
    points = [crash.point.step for crash in report.crashes]
    assert {"before", "approval", "submit teller", "after"} <= set(points)


async def test_a_crash_anywhere_changes_nothing_in_company(kit: Kit, app: ff.App) -> None:
    @app.task
    async def teller(parent: str, key: str) -> None:
        await (await app.client()).signal(parent, key, payload=key, idempotency_key="once")

    @app.task
    async def job(ctx: ff.Context) -> list[Any]:
        for number, key in enumerate("ab"):
            await teller.options(delay=60 * (number + 1)).submit(str(ctx.execution_id), key)
        found = await asyncio.gather(
            ctx.wait_for("a"), ctx.wait_for("b"), ctx.wait_for("c", timeout=HOUR, default=None), ctx.sleep(10)
        )
        return [one and one.payload for one in found]

    report = await kit.crash_everywhere(job)
    assert report.result == ["a", "b", None, None]
    assert {"a", "b", "c"} <= {crash.point.step for crash in report.crashes}


@BOTH
async def test_a_handler_that_is_replayed_all_the_time_waits_as_it_did(kit: Kit, app: ff.App, plain: bool) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("a")
        yield ctx.step("between", lambda: None)
        first = yield place.wait()
        second = yield ctx.wait_for("b", timeout=HOUR, default=None)
        return [first.payload, second]

    run = await task(app, body, plain=plain).submit()
    with kit.replay_always():
        await kit.run_all()
        await run.signal("a", payload=1)
        assert await kit.run_until_ended(run) == [1, None]


async def test_a_handler_that_waits_for_something_new_when_it_is_replayed_is_found(kit: Kit, app: ff.App) -> None:
    ended: list[str] = []

    @app.task
    async def fickle(ctx: ff.Context) -> None:
        await ctx.wait_for("other" if ended else "key", timeout=1, default=None)
        ended.append("ended")

    with kit.replay_always(), pytest.raises(Nondeterministic, match="'other'"):
        await kit.run_inline(fickle)


@pytest.mark.parametrize("company", [False, True], ids=["open", "with a signal"])
async def test_a_retry_keeps_the_waitpoint_and_the_token_that_was_handed_out(
    kit: Kit, app: ff.App, did: Ledger, company: bool
) -> None:
    client = await app.client()

    @app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(HOUR)))
    async def job(ctx: ff.Context) -> Any:
        place = await ctx.waitpoint("k")
        did.append(place.callback)
        if ctx.retry_count == 0:
            if company:
                assert (await client.receive(place.callback, b"1")).status == 202
            raise ValueError("once more")
        return (await place.wait()).payload

    run = await job.submit()
    await kit.run_all()
    assert await states(run) == ("delayed", [("k", "pending")])
    if not company:
        received = await client.receive(did[0], b"1")
        assert (received.status, received.outcome) == (202, "accepted")
    assert await kit.run_until_ended(run) == 1
    assert len(did) == 2
    assert len(set(did)) == 1


async def test_a_retry_keeps_the_outcomes_of_earlier_waits(kit: Kit, app: ff.App) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        given = yield ctx.wait_for("given")
        late = yield ctx.wait_for("late", timeout=HOUR, default="none")
        if ctx.retry_count == 0:
            raise ValueError("once more")
        return [given.payload, late]

    run = await task(app, body, retry=ONCE).submit()
    await kit.run_all()
    await run.signal(payload=1)
    assert await kit.run_until_ended(run) == [1, "none"]
    assert len(await run.attempts()) == 2


async def test_a_wait_beside_something_that_fails_is_still_open_in_the_retry(kit: Kit, app: ff.App) -> None:
    @app.task(retry=ONCE)
    async def job(ctx: ff.Context) -> Any:
        async def flaky() -> None:
            await ctx.sleep(HOUR)
            if ctx.retry_count == 0:
                raise ValueError("once more")

        signal, _ = await asyncio.gather(ctx.wait_for("k"), flaky())
        return signal.payload

    run = await job.submit()
    await kit.run_all()
    (before,) = await run.waits()
    await kit.clock.advance(2 * HOUR)
    await kit.run_all()
    (after,) = await run.waits()
    assert (after.waitpoint_id, after.state) == (before.waitpoint_id, "active")
    await run.signal(payload=7)
    assert await kit.run_until_ended(run) == 7


async def test_a_replayed_success_waits_again(kit: Kit, app: ff.App, did: Ledger) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("k")
        did.append(place.callback)
        return (yield place.wait()).payload

    run = await task(app, body).submit()
    client = await app.client()
    for payload in (1, 2):
        await kit.run_all()
        await run.signal(payload=payload)
        assert await kit.run_until_ended(run) == payload
        await run.replay()
    await kit.run_all()
    assert await states(run) == ("suspended", [("k", "active")])
    assert len(set(did)) == 3
    assert (await client.receive(did[0])).status == 409


ENDINGS: dict[str, dict[str, Any]] = {
    "timed out": {"timeout": HOUR},
    "failed": {"timeout": HOUR, "on_timeout": "fail"},
    "expired": {"timeout": HOUR, "on_timeout": "expire"},
    "cancelled": {},
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("plain", "first"), [(False, False), (False, True), (True, True)], ids=["wait_for", "waitpoint", "plain waitpoint"]
)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_replay_after_a_missing_signal_waits_again_and_keeps_the_steps(
    kit: Kit, app: ff.App, did: Ledger, plain: bool, ending: str, first: bool
) -> None:
    options = ENDINGS[ending]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        yield ctx.step("before", did.entry("before"))
        early = yield ctx.wait_for("early")
        late = yield ((yield ctx.waitpoint("k")).wait(**options) if first else ctx.wait_for("k", **options))
        return [early.payload, late.payload]

    run = await task(app, body, plain=plain).submit()
    await kit.run_all()
    await run.signal(payload=1)
    for _ in range(2):
        await kit.run_all()
        if ending == "cancelled":
            await run.cancel()
        with pytest.raises(ff.TaskFailed):
            await kit.run_until_ended(run)
        assert await run.waits() == []
        await run.replay()
    await kit.run_all()
    assert await states(run) == ("suspended", [("k", "active")])
    await run.signal(payload=2)
    assert await kit.run_until_ended(run) == [1, 2]
    assert did == ["before"]


async def test_a_replay_takes_a_default_that_was_taken_as_it_was(kit: Kit, app: ff.App, did: Ledger) -> None:
    """Only what ended it is asked for again: it timed out, and continued."""

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        answer = yield ctx.wait_for("k", timeout=HOUR, default="none")
        yield ctx.step("after", did.entry(answer))
        if ctx.replay_count == 0:
            raise ValueError("broken")
        return answer

    run = await task(app, body).submit()
    with pytest.raises(ff.TaskFailed, match="broken"):
        await kit.run_until_ended(run)
    await run.replay()
    await kit.run_all()
    assert await run.result() == "none"
    assert did == ["none"]


# ---- changed code


CHANGES: dict[str, tuple[Condition | str, Condition | str, str]] = {
    "more keys": ("a", ff.all_of("a", "b"), "at 1 waitpoints; asked for instead: at 2"),
    "fewer keys": (ff.all_of("a", "b"), "a", "at 2 waitpoints; asked for instead: at 1"),
    "other keys": ("a", "b", "at other waitpoints; asked for instead: at b"),
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("plain", "company"), [(False, False), (False, True), (True, False)], ids=["alone", "in company", "plain"]
)
@pytest.mark.parametrize("change", CHANGES)
async def test_changed_code_that_waits_for_something_else_is_reported(
    kit: Kit, app: ff.App, plain: bool, change: str, company: bool
) -> None:
    before, after, words = CHANGES[change]
    condition = [before]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        wait = ctx.wait_for(condition[0], name="approval")
        yield (beside_a_sleep(ctx, wait) if company else wait)

    run = await task(app, body, plain=plain, retry=ONCE).submit()
    with kit.crash_after("approval"):
        async with kit.worker(app) as worker:
            await asyncio.wait_for(worker.dead.wait(), PATIENCE)
    condition[0] = after
    with pytest.raises(StepsChanged, match=words):
        await kit.run_until_ended(run)


async def test_changed_code_may_ask_for_another_condition_at_the_same_keys(kit: Kit, app: ff.App) -> None:
    condition: list[Any] = [ff.all_of("a", "b")]

    @app.task
    async def job(ctx: ff.Context) -> list[str]:
        return [one.key for one in await beside_a_sleep(ctx, ctx.wait_for(condition[0]))]

    run = await job.submit()
    await kit.run_all()
    condition[0] = ff.any_of("a", "b")
    await run.signal("b")
    assert await kit.run_until_ended(run) == ["b"]


# ---- beside work that continues


async def test_a_signal_is_noticed_while_another_branch_runs_and_polls_become_rarer(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ff.App(database)
    looks: list[int] = []
    settle = ff.Engine.settle_wait

    async def counted(self: ff.Engine, *args: Any, **options: Any) -> Any:
        looks.append(1)
        return await settle(self, *args, **options)

    monkeypatch.setattr(ff.Engine, "settle_wait", counted)
    signalled = asyncio.Event()

    @app.task
    async def job(ctx: ff.Context) -> Any:
        async def busy() -> None:
            await signalled.wait()

        async def listen() -> Any:
            signal = await ctx.wait_for("k")
            signalled.set()  # only this ends the other: the handler is never parked
            return signal.payload

        answer, _ = await asyncio.gather(listen(), ctx.step("busy", busy))
        return answer

    async with ff.Worker(app, poll=0.5, grace=5):
        run = await job.submit()
        await until(lambda: _some(looks, 4))
        begun, counted_from = asyncio.get_running_loop().time(), len(looks)
        await asyncio.sleep(1)
        seconds = asyncio.get_running_loop().time() - begun
        assert len(looks) - counted_from <= 3 + seconds / 0.3
        await run.signal("k", payload=1)
        assert await asyncio.wait_for(run.result(), PATIENCE) == 1
    await app.close()


async def _some(found: list[int], count: int) -> bool:
    return len(found) >= count


async def test_real_workers_and_duties_do_all_of_it(database: str, did: Ledger) -> None:
    """Many executions, two workers, signals that race with the waits: each is taken once."""
    app = ff.App(database)

    @app.task
    async def job(ctx: ff.Context, number: int) -> list[Any]:
        place = await ctx.waitpoint("first")
        await ctx.step("tell", did.entry(f"{number} {place.callback}"))
        first = await place.wait()
        rest = await asyncio.gather(*(ctx.wait_for(key) for key in "ab"), ctx.wait_for("c", timeout=0.2, default=None))
        return [number, first.payload, *(one and one.payload for one in rest)]

    @app.task
    def plain(ctx: ff.SyncContext, number: int) -> list[Any]:
        got = [ctx.wait_for("a").payload, ctx.wait_for("b").payload]
        return [number, *got, ctx.wait_for("c", timeout=0.2, default=None)]

    async def tell(run: ff.Run[Any], key: str, payload: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await run.signal(key, payload=payload)
                except (ff.NotFound, StateError):
                    await asyncio.sleep(0.01)
                else:
                    return

    async with ff.Worker(app, grace=5), ff.Worker(app, grace=5):
        runs = [await job.submit(number) for number in range(10)]
        plains = [await plain.submit(number) for number in range(10)]
        await until(lambda: _some(did, len(runs)))  # type: ignore[arg-type]
        client = await app.client()
        links = dict(entry.split() for entry in did)
        answers = await asyncio.gather(*(client.receive(link, b'"called"') for link in links.values()))
        assert {one.status for one in answers} <= {200, 202}
        await asyncio.gather(*(tell(run, key, key) for run in [*runs, *plains] for key in "ba"))
        async with asyncio.timeout(PATIENCE):
            assert [await run.result() for run in runs] == [[n, "called", "a", "b", None] for n in range(10)]
            assert [await run.result() for run in plains] == [[n, "a", "b", None] for n in range(10)]
        assert await client.engine.audit(events=True) == []
    assert collections.Counter(entry.split()[0] for entry in did) == {str(n): 1 for n in range(10)}
    await app.close()


# ---- links and callbacks

KIDS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=64)


@given(st.integers(0, 65_535), st.uuids(), st.uuids(), KIDS, st.binary(min_size=32, max_size=32))
def test_a_link_holds_what_it_was_made_of(
    partition: int, execution: UUID, waitpoint: UUID, kid: str, digest: bytes
) -> None:
    execution_id = id_in(partition, execution)
    text = ff.callback_text(execution_id, waitpoint, WaitpointToken(f"{kid}:{digest.hex()}"))
    assert text.replace("-", "").replace("_", "").isalnum()
    parsed = ff.parse_callback(text)
    assert (parsed.execution_id, parsed.waitpoint_id) == (execution_id, waitpoint)
    assert parsed.token.reveal() == f"{kid}:{digest.hex()}"
    assert digest.hex() not in repr(parsed)


GOOD = ff.callback_text(id_in(3, UUID(int=1)), UUID(int=2), "kid-1:" + "ab" * 32)


@given(
    st.one_of(
        st.text(max_size=220),
        st.text("abcXYZ019-_=+/ :", min_size=85, max_size=205),
        st.binary(min_size=60, max_size=150).map(lambda data: __import__("base64").urlsafe_b64encode(data).decode()),
        st.integers(),
        st.none(),
        st.binary(max_size=100),
    )
)
@example(GOOD + "=")
@example(GOOD[:-1])
@example(GOOD + "A")
@example(" " + GOOD)
@example(GOOD.swapcase())
@example("\ud800" * 100)
def test_an_invalid_link_is_refused_and_a_valid_one_reads_back_the_same(text: Any) -> None:
    try:
        parsed = ff.parse_callback(text)
    except ff.InvalidInput:
        return
    assert ff.callback_text(parsed.execution_id, parsed.waitpoint_id, parsed.token) == text


@pytest.mark.parametrize("token", ["", "kid", "kid:xyz", "kid:" + "ab" * 31 + "a", "é:" + "ab" * 32])
def test_a_text_that_is_no_token_makes_no_link(token: str) -> None:
    with pytest.raises(ff.InvalidInput, match="token"):
        ff.callback_text(id_in(1), uuid4(), token)


def ascii_id(value: object) -> str:
    return ascii(value)[:25]


class Called:
    """An execution that waits for a callback, and the link for it."""

    def __init__(self, run: ff.Run[Any], link: str) -> None:
        self.run = run
        self.link = link

    @property
    def forged(self) -> str:
        """The same waitpoint with another token."""
        parsed = ff.parse_callback(self.link)
        kid, _, digest = parsed.token.reveal().partition(":")
        wrong = f"{kid}:{digest[:-1]}{'0' if digest[-1] != '0' else '1'}"
        return ff.callback_text(parsed.execution_id, parsed.waitpoint_id, wrong)

    @property
    def elsewhere(self) -> str:
        """Its token at a waitpoint that there is not."""
        parsed = ff.parse_callback(self.link)
        return ff.callback_text(parsed.execution_id, uuid4(), parsed.token)


@pytest.fixture
async def called(kit: Kit, app: ff.App) -> Called:
    links: list[str] = []

    @app.task
    async def called(ctx: ff.Context) -> Any:
        place = await ctx.waitpoint("callback")
        links.append(place.callback)
        # With a time beside them it is parked, and a signal is recorded for the handler to look at.
        both = await asyncio.gather(place.wait(), ctx.wait_for("end"), ctx.sleep(HOUR))
        return both[0].payload

    run = await called.submit()
    await kit.run_all()
    return Called(run, links[0])


BODIES: list[tuple[str, bytes, int, str]] = [
    ("link", b'{"paid": true}', 202, "accepted"),
    ("link", b"", 202, "accepted"),
    ("link", b"x" * (MAX_BODY + 1), 413, "too_large"),
    ("link", b'"' + b"x" * 65_536 + b'"', 413, "payload_too_large"),
    ("link", b"{not json", 400, "not_json"),
    ("link", b"\xff\xfe", 400, "not_json"),
    ("link", b"[" * 100_000, 400, "not_json"),
    ("forged", b"1", 401, "unauthorized"),
    ("elsewhere", b"1", 404, "unknown"),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("which", "body", "status", "outcome"), BODIES, ids=ascii_id)
@pytest.mark.parametrize("key", [None, "once"], ids=["", "with a key"])
async def test_a_callback_is_answered_with_a_status(
    app: ff.App, called: Called, which: str, body: bytes, status: int, outcome: str, key: str | None
) -> None:
    client = await app.client()
    received = await client.receive(getattr(called, which), body, idempotency_key=key)
    found = await called.run.get()
    # A key may be of a callback that was accepted before: the delivery decides, and records a token that is wrong.
    is_recorded = which == "forged" or (which == "elsewhere" and key is not None)
    assert (found.last_hmac_validation_failed_at is not None) == is_recorded
    if which == "forged" and key is None:
        assert found.public_state is ff.State.DELAYED
    assert (received.status, received.outcome) == (status, outcome)
    assert received.body["outcome"] == outcome
    assert ("signal_id" in received.body) == (status == 202)
    token = ff.parse_callback(called.link).token.reveal()
    assert token not in str(received) + str(received.body)
    stored = (await client.engine.read_signals(called.run.execution_id)).items
    assert [one.payload for one in stored] == ([body or None] if status == 202 else [])


@pytest.mark.parametrize("link", ["", "nonsense", "A" * 100, GOOD, "\ud800", GOOD + "\0", "../" * 40], ids=ascii_id)
async def test_a_callback_to_nowhere_is_unknown(app: ff.App, link: str) -> None:
    client = await app.client()
    assert await client.receive(link, b"1") == await client.receive(link, b"1", idempotency_key="k")
    assert (await client.receive(link, b"1")).status == 404
    assert await client.look(link) is None


@pytest.mark.parametrize(
    "options", [{"name": ""}, {"name": "__timeout"}, {"name": "x" * 257}, {"source_type": "system"},
                {"source_identity": "a\0b"}, {"idempotency_key": "x" * 1101}, {"idempotency_key": "\ud800"}],
    ids=ascii_id,
)  # fmt: skip
async def test_an_invalid_signal_is_a_bad_request(app: ff.App, called: Called, options: Any) -> None:
    received = await (await app.client()).receive(called.link, b"1", **options)
    assert (received.status, received.outcome, received.field) == (400, "invalid_input", next(iter(options)))
    assert received.body["problem"] == received.problem
    assert received.body["allowed"] == received.allowed


async def test_a_callback_that_is_repeated_is_taken_once_also_after_the_end(
    kit: Kit, app: ff.App, called: Called
) -> None:
    client = await app.client()
    first = await client.receive(called.link, b"1", idempotency_key="a")
    again = await client.receive(called.link, b"2", idempotency_key="a")
    assert (first.status, again.status, again.outcome, again.signal_id) == (202, 200, "duplicate", first.signal_id)
    await kit.run_all()
    closed = await client.receive(called.link, b"1", idempotency_key="a")
    assert (closed.status, closed.outcome, closed.signal_id) == (200, "duplicate", first.signal_id)
    assert (await client.receive(called.link, b"1", idempotency_key="b")).status == 409
    assert (await client.receive(called.link, b"1")).status == 409
    assert (await client.receive(called.forged, b"1", idempotency_key="a")).status == 404
    await called.run.signal("end")
    assert await kit.run_until_ended(called.run) == 1
    ended = await client.receive(called.link, b"1", idempotency_key="a")
    assert (ended.status, ended.signal_id) == (200, first.signal_id)
    assert (await client.receive(called.link, b"1", idempotency_key="c")).status == 404


async def test_a_callback_that_loses_a_race_with_the_end_is_a_conflict(
    app: ff.App, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await app.client()
    probe = client.engine.probe_waitpoint

    async def slow(*args: Any) -> str:
        answer = await probe(*args)
        await called.run.cancel()
        return answer

    monkeypatch.setattr(client.engine, "probe_waitpoint", slow)
    received = await client.receive(called.link, b"1")
    assert (received.status, received.outcome, received.body) == (
        409, "target_not_signalable", {"outcome": "target_not_signalable"},
    )  # fmt: skip


async def test_a_link_can_be_looked_at_before_it_is_used(kit: Kit, app: ff.App, called: Called) -> None:
    client = await app.client()
    found = await client.look(called.link)
    assert found is not None
    assert (found.execution_id, found.waitpoint_key, found.state) == (called.run.execution_id, "callback", "pending")
    assert await client.look(called.forged) is None
    assert await client.look(called.elsewhere) is None
    await client.receive(called.link, b"1")
    await kit.run_all()
    assert await client.look(called.link) is None


# ---- clients


async def test_open_waits_are_listed_over_all_executions_and_by_key(kit: Kit, app: ff.App) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return (yield ctx.wait_for(ff.all_of("left", "right"), timeout=HOUR, reason="callback"))

    runs = [await task(app, body).submit() for _ in range(3)]
    await kit.run_all()
    client = await app.client()
    page = await client.waits(key="left", limit=2)
    found = [*page.items, *(await client.waits(key="left", limit=2, cursor=page.next_cursor)).items]
    assert {one.execution_id for one in found} == {run.execution_id for run in runs}
    assert {(one.waitpoint_key, one.reason, one.state) for one in found} == {("left", "waiting_for_callback", "active")}
    assert len((await client.waits()).items) == 6
    assert (await client.waits(lane="elsewhere")).items == []


async def test_the_same_approval_twice_counts_once_and_two_people_twice(kit: Kit, app: ff.App) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        signals = yield ctx.wait_for(ff.from_sources(2, "approval", name="approved"), reason="approval")
        return [signal.source_identity for signal in signals]

    run = await task(app, body).submit()
    await kit.run_all()
    first = await run.approve(by="ann")
    again = await run.approve(by="ann")
    assert isinstance(again, DuplicateSignal)
    assert again.existing_signal_id == first.signal_id  # type: ignore[union-attr]
    assert isinstance(await run.reject(by="bob"), Accepted)
    await kit.run_all()
    assert await run.state() is ff.State.SUSPENDED
    await run.approve(by="bob")
    assert await kit.run_until_ended(run) == ["ann", "bob"]


async def test_the_plain_client_does_the_same(database: str) -> None:
    app = ff.App(database)

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("a")
        yield ctx.step("link", lambda: place.callback)
        one = yield place.wait()
        two = yield ctx.wait_for("b")
        three = yield ctx.wait_for("c")
        try:
            yield ctx.wait_for("d")
        except ff.NoSignal as error:
            return [one.payload, two.name, three.name, error.kind]

    job = task(app, body, plain=True)

    def use() -> Any:
        def waiting(key: str) -> None:
            import time

            until = time.monotonic() + PATIENCE
            while [(one.waitpoint_key, one.state) for one in run.waits()] != [(key, "active")]:
                assert time.monotonic() < until
                time.sleep(0.01)

        with ff.Client(app) as client:
            run = client.submit(job)
            waiting("a")
            (link,) = [msgspec.json.decode(step.result or b"") for step in run.steps() if step.kind == "step"]
            looked = client.look(link)
            assert looked is not None
            assert looked.waitpoint_key == "a"
            assert client.receive("x" * 100).status == 404
            assert [one.waitpoint_key for one in client.waits().items] == ["a"]
            assert client.receive(link, b'{"n": 1}', idempotency_key="k").outcome == "resumed"
            assert client.receive(link, b'{"n": 1}', idempotency_key="k").outcome == "duplicate"
            waiting("b")
            run.approve(by="ann")
            waiting("c")
            assert [one.waitpoint_key for one in client.waitpoints_of(run.id)] == ["c"]
            client.signal(run.id, "c", "third")
            waiting("d")
            client.resume(run.id)
            return run.result(timeout=PATIENCE)

    async with ff.Worker(app, grace=5):
        assert await asyncio.to_thread(use) == [{"n": 1}, "approved", "third", "wait_overridden"]
    await app.close()
