"""Answers to waits: refused to the sender if they do not fit, set aside by the worker if they were not checked before.

A raw answer goes through the engine, which checks nothing, as SQL and other languages do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.errors import LeaseLost, NoSignal, PayloadRefused, StepsChanged
from flowfabric.testing import Kit
from flowfabric.values.conditions import Condition
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.worker.dry_run import DryRuns, read_histories
from tests.integration.conftest import Ledger
from tests.integration.test_waits import BOTH, HOUR, beside_a_sleep, states, task
from tests.sampling import examples


class Decision(msgspec.Struct):
    ok: bool
    comment: str = ""


GOOD, BAD = {"ok": True}, {"ok": "yes"}


@pytest.fixture
def app(kit_app: ff.App) -> ff.App:
    return kit_app


async def raw(
    kit: Kit, run: ff.Run[Any], payload: Any, key: str = "k", *, name: str = "go", who: str = "", **fields: Any
) -> Accepted | DuplicateSignal:
    """Send an answer that is not checked."""
    data = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return await (await kit.engine()).signal_execution(
        run.execution_id, key, signal_name=name, source_type="raw", source_identity=who, payload=data, **fields
    )


async def recorded(kit: Kit, run: ff.Run[Any]) -> list[tuple[str, bool]]:
    """The effect of each signal, and whether it was set aside."""
    found = (await (await kit.engine()).read_signals(run.execution_id)).items
    return [(one.observed_effect, one.refused is not None) for one in found]


def approval(app: ff.App, plain: bool = False, **wait: Any) -> ff.Task[[], Any]:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return (yield ctx.wait_for("k", payload=Decision, **wait)).payload.comment

    return task(app, body, plain=plain)


# ---- the sender is refused


@BOTH
async def test_an_answer_that_does_not_fit_is_refused_to_its_sender_and_the_wait_stays_open(
    kit: Kit, app: ff.App, plain: bool
) -> None:
    run = await approval(app, plain).submit()
    await kit.run_all()
    client = await app.client()
    (place,) = await run.waits()
    token = await (await kit.engine()).read_waitpoint_token(run.execution_id, place.waitpoint_id)
    assert token is not None
    link = ff.callback_text(run.execution_id, place.waitpoint_id, token)
    senders: dict[str, Callable[[], Any]] = {
        "signal": lambda: run.signal(payload=BAD),
        "signal with a key": lambda: client.signal(run.id, "k", payload=BAD),
        "approve": lambda: run.approve(by="ann"),
        "approve with a payload": lambda: run.approve(by="ann", payload=BAD),
        "reject": lambda: client.reject(run.id, by="ann", reason="too expensive"),
    }
    for _ in range(2):  # also once the schema is known here
        for name, send in senders.items():
            with pytest.raises(PayloadRefused) as refused:
                await send()
            assert refused.value.http_status == 422
            assert refused.value.execution_id == run.execution_id
            field = "payload" if name == "approve" else "payload.ok"
            assert (refused.value.field, name) == (field, name)
            assert refused.value.allowed in ("true or false", "an object")
        received = await client.receive(link, b'{"ok": 5}')
        assert (received.status, received.body) == (
            422,
            {
                "outcome": "payload_refused",
                "field": "payload.ok",
                "problem": "got an integer",
                "allowed": "true or false",
            },
        )
        assert (await client.receive(link)).status == 422
    assert await recorded(kit, run) == []
    assert await states(run) == ("suspended", [("k", "active")])
    assert (await client.receive(link, b'{"ok": true, "comment": "fine"}')).outcome == "resumed"
    assert await kit.run_until_ended(run) == "fine"


async def test_a_payload_may_be_missing_where_the_type_says_so(kit: Kit, app: ff.App) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        answer = yield ctx.wait_for("k", payload=Decision | None)
        return [answer.name, answer.payload and answer.payload.comment]

    job = task(app, body)
    for send, expected in (
        (lambda run: run.approve(by="ann"), ["approved", None]),
        (lambda run: run.approve(by="ann", payload=Decision(ok=True, comment="c")), ["approved", "c"]),
        (lambda run: run.reject(payload={"ok": False, "comment": "d"}), ["rejected", "d"]),
    ):
        run = await job.submit()
        await kit.run_all()
        await send(run)
        assert await kit.run_until_ended(run) == expected


async def test_a_reason_is_a_field_of_the_payload(kit: Kit, app: ff.App) -> None:
    run = await task(app, lambda ctx: (yield ctx.wait_for("k", payload=dict[str, Any])).payload).submit()
    await kit.run_all()
    for payload in ([1], 5, {"reason": "other"}):
        with pytest.raises(ff.InvalidInput, match="reason"):
            await run.reject(payload=payload, reason="late")
    await run.reject(payload={"by": 7}, reason="late")
    assert await kit.run_until_ended(run) == {"by": 7, "reason": "late"}


async def test_a_waitpoint_that_is_handed_out_first_checks_from_the_beginning(kit: Kit, app: ff.App) -> None:
    links: list[str] = []

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        typed = yield ctx.waitpoint("typed", payload=Decision)
        untyped = yield ctx.waitpoint("untyped")
        links[:] = [typed.callback, untyped.callback]
        yield ctx.wait_for("pause")
        first = yield typed.wait()
        second = yield untyped.wait(payload=Decision)
        return [first.payload.comment, second.payload.comment]

    run = await task(app, body).submit()
    await kit.run_all()
    client = await app.client()
    assert [(await client.receive(link, b"5")).status for link in links] == [422, 202]
    assert [(await client.receive(link, b'{"ok": true, "comment": "c"}')).status for link in links] == [202, 202]
    await run.signal("pause")
    assert await kit.run_until_ended(run) == ["c", "c"]
    assert [refused for _, refused in await recorded(kit, run)] == [True, False, False, False]


async def test_a_wait_whose_type_changed_checks_with_the_new_one(kit: Kit, app: ff.App) -> None:
    wanted: list[Any] = [int]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        first = asyncio.ensure_future(ctx.wait_for("k", payload=wanted[0]))
        second = asyncio.ensure_future(ctx.wait_for("other"))
        yield asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        return (yield first).payload

    run = await task(app, body).submit()
    for kind, bad in ((int, "x"), (str, 1)):
        wanted[0] = kind
        await kit.run_all()
        with pytest.raises(PayloadRefused):
            await run.signal("k", payload=bad)
        await raw(kit, run, [])  # wakes the handler, whose code has changed
    await kit.run_all()
    await run.signal("k", payload="y")
    assert await kit.run_until_ended(run) == "y"


# ---- the worker sets aside

CONDITIONS: dict[str, tuple[Condition | str, list[tuple[str, Any, str]], list[str]]] = {
    # what it waits for, answers (key, payload, sender), and whose answers it gets in the end
    "one": ("k", [("k", BAD, "a"), ("k", GOOD, "a")], ["a"]),
    "a name": (ff.on("k", "go"), [("k", BAD, "a"), ("k", BAD, "b"), ("k", GOOD, "c")], ["c"]),
    "two senders": (
        ff.from_sources(2, "k"),
        [("k", BAD, "a"), ("k", GOOD, "b"), ("k", BAD, "c"), ("k", GOOD, "b"), ("k", GOOD, "a")],
        ["b", "a"],
    ),
    "three signals": (
        ff.count_signals(3, "k"),
        [("k", GOOD, "a"), ("k", BAD, "a"), ("k", GOOD, "b"), ("k", BAD, "b"), ("k", BAD, "c"), ("k", GOOD, "d")],
        ["a", "b", "d"],
    ),
    "all": (
        ff.all_of("k", "l", ff.from_sources(2, "m")),
        [("k", BAD, "a"), ("l", GOOD, "b"), ("m", GOOD, "c"), ("m", BAD, "d"), ("m", GOOD, "d"), ("k", GOOD, "a")],
        ["b", "c", "d", "a"],
    ),
    "any": (ff.any_of("k", "l"), [("k", BAD, "a"), ("l", BAD, "b"), ("k", GOOD, "a")], ["a"]),
    "two of three": (ff.any_of("k", "l", "m", n=2), [("k", BAD, "a"), ("l", GOOD, "b"), ("k", GOOD, "c")], ["b", "c"]),
}


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["alone", "plain", "parked", "in company"])
@pytest.mark.parametrize("waited_for", CONDITIONS)
async def test_a_raw_answer_that_does_not_fit_is_set_aside_and_the_wait_continues(
    kit: Kit, app: ff.App, how: str, waited_for: str
) -> None:
    condition, answers, expected = CONDITIONS[waited_for]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        wait = ctx.wait_for(condition, payload=Decision, name="w")
        if how == "parked":
            wait = beside_a_sleep(ctx, wait)
        elif how == "in company":
            wait = in_company(ctx, wait)
        found = yield wait
        return [one.source_identity for one in (found if isinstance(found, list) else [found])]

    async def in_company(ctx: ff.Context, wait: Any) -> Any:
        other = asyncio.ensure_future(ctx.wait_for("never"))
        (done, *_), _ = await asyncio.wait({asyncio.ensure_future(wait), other}, return_when=asyncio.FIRST_COMPLETED)
        other.cancel()
        return done.result()

    run = await task(app, body, plain=how == "plain").submit()
    await kit.run_all()
    before = {(one.waitpoint_key, one.waitpoint_id, one.token_fingerprint) for one in await run.waits()}
    for place, (key, payload, who) in enumerate(answers):
        assert isinstance(await raw(kit, run, payload, key, who=who), Accepted)
        if place < len(answers) - 1:
            await kit.run_all()
            assert not (await run.state()).is_terminal
            assert {(one.waitpoint_key, one.waitpoint_id, one.token_fingerprint) for one in await run.waits()} == before
    assert await kit.run_until_ended(run) == expected
    assert len(await run.attempts()) == 1
    set_aside = [
        who for (_, payload, who), (_, refused) in zip(answers, await recorded(kit, run), strict=True) if refused
    ]
    assert set(set_aside) <= {who for _, payload, who in answers if payload is BAD}


async def test_a_signal_that_was_set_aside_is_shown_everywhere(
    kit: Kit, app: ff.App, caplog: pytest.LogCaptureFixture
) -> None:
    run = await approval(app).submit()
    await kit.run_all()
    with caplog.at_level(logging.WARNING, "flowfabric.worker"):
        await raw(kit, run, {"ok": "hunter2"}, who="ann")
        await kit.run_all()
    assert "set aside" in caplog.text
    assert "hunter2" not in caplog.text
    engine = await kit.engine()
    (signal,) = (await engine.read_signals(run.execution_id)).items
    assert (signal.observed_effect, signal.match_detail) == ("refused", "refused")
    assert "expected `bool`, got `str` at .ok" in str(signal.refused)
    (wait,) = (await engine.list_waits()).items
    assert (wait.signal_count, wait.refused_signal_count, wait.state) == (1, 1, "active")
    effects = [one.signal_effect for one in (await engine.list_events(run.execution_id)).items if one.signal_effect]
    assert effects == ["resume_condition_satisfied", "refused"]
    assert await states(run) == ("suspended", [("k", "active")])
    await raw(kit, run, GOOD, who="ann")
    assert await kit.run_until_ended(run) == ""


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 5000, b'{"ok": true, "ok": "x"}', b"null"], ids=repr)
async def test_odd_bytes_are_set_aside_as_well(kit: Kit, app: ff.App, payload: bytes) -> None:
    run = await approval(app).submit()
    await kit.run_all()
    await raw(kit, run, payload)
    await kit.run_all()
    assert await states(run) == ("suspended", [("k", "active")])
    await run.signal(payload=GOOD)
    assert await kit.run_until_ended(run) == ""


async def test_an_answer_of_another_encoding_is_set_aside(kit: Kit, app: ff.App) -> None:
    run = await approval(app).submit()
    for encoding in ("cbor", "json+unknown"):
        await kit.run_all()
        await raw(kit, run, GOOD, payload_encoding=encoding)
    await kit.run_all()
    assert await recorded(kit, run) == [("refused", True)] * 2
    await raw(kit, run, GOOD)
    assert await kit.run_until_ended(run) == ""


async def test_the_same_person_may_approve_again_after_a_bad_approval(kit: Kit, app: ff.App) -> None:
    """The key of a decision does not make the second one a repetition of the one that was set aside."""
    run = await approval(app).submit()
    await kit.run_all()
    engine = await kit.engine()
    keys = {"idempotency_key": "approval:approved:ann", "name": "approved", "who": "ann"}
    first = await raw(kit, run, BAD, **keys)
    again = await raw(kit, run, BAD, **keys)
    assert isinstance(first, Accepted)
    assert again == DuplicateSignal(first.signal_id)
    await kit.run_all()
    assert isinstance(await run.approve(by="ann", payload=GOOD), Accepted)
    assert isinstance(await run.approve(by="ann", payload=GOOD), DuplicateSignal)
    assert await kit.run_until_ended(run) == ""
    assert len((await engine.read_signals(run.execution_id)).items) == 2


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({"timeout": HOUR, "default": "nobody"}, "nobody"),
        ({"timeout": HOUR}, "NoSignal"),
        ({"timeout": HOUR, "on_timeout": "fail"}, "suspension_timeout:fail"),
        ({"timeout": HOUR, "on_timeout": "cancel"}, "cancelled"),
        ({"timeout": HOUR, "on_timeout": "expire"}, "expired"),
    ],
    ids=["default", "raise", "fail", "cancel", "expire"],
)
@BOTH
async def test_a_wait_whose_time_passed_while_a_bad_answer_lay_there_has_timed_out(
    kit: Kit, app: ff.App, plain: bool, options: dict[str, Any], ending: str
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return (yield ctx.wait_for("k", payload=Decision, **options))

    run = await task(app, body, plain=plain).submit()
    await kit.run_all()
    await raw(kit, run, BAD)
    await kit.clock.advance(hours=2)
    if ending == "nobody":
        assert await kit.run_until_ended(run) == "nobody"
    else:
        with pytest.raises(ff.TaskFailed) as failed:
            await kit.run_until_ended(run)
        assert ending in f"{failed.value} {failed.value.kind}"
    assert await recorded(kit, run) == [("refused", True)]


async def test_an_escalated_wait_takes_a_good_answer_after_a_bad_one(kit: Kit, app: ff.App) -> None:
    run = await approval(app, timeout=HOUR, on_timeout="escalate").submit()
    await kit.run_all()
    await kit.clock.advance(hours=2)
    await kit.run_all()
    await raw(kit, run, BAD)
    await kit.run_all()
    await run.signal(payload=GOOD)
    assert await kit.run_until_ended(run) == ""


# ---- crashes, retries, replays


@pytest.mark.each_value
@BOTH
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_worker_that_dies_while_it_sets_an_answer_aside_changes_nothing(
    kit: Kit, app: ff.App, monkeypatch: pytest.MonkeyPatch, plain: bool, when: str
) -> None:
    refuse, died = ff.Engine.refuse_signals, []

    async def dies(self: ff.Engine, authority: Any, *args: Any) -> None:
        if not died:
            if when == "after":
                await refuse(self, authority, *args)
            died.append(True)
            await self.revoke_lease(authority.execution_id)
            raise LeaseLost("lease_revoked")
        await refuse(self, authority, *args)

    run = await approval(app, plain).submit()
    await kit.run_all()
    await raw(kit, run, BAD)
    monkeypatch.setattr(ff.Engine, "refuse_signals", dies)
    await kit.run_all()
    assert died
    assert await recorded(kit, run) == [("refused", True)]
    assert await states(run) == ("suspended", [("k", "active")])
    await run.signal(payload=GOOD)
    assert await kit.run_until_ended(run) == ""


async def test_an_execution_that_ended_on_a_bad_answer_asks_again_when_it_is_replayed(kit: Kit, app: ff.App) -> None:
    run = await approval(app).submit()
    await kit.run_all()
    await raw(kit, run, BAD)
    await run.cancel()  # before a worker saw it
    await run.replay()
    await kit.run_all()
    assert await recorded(kit, run) == [("refused", True)]
    assert await states(run) == ("suspended", [("k", "active")])
    await run.signal(payload=GOOD)
    assert await kit.run_until_ended(run) == ""


async def test_an_answer_that_was_used_is_not_asked_for_again_when_the_type_changes(
    kit: Kit, app: ff.App, did: Ledger
) -> None:
    wanted: list[Any] = [int]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        answer = yield ctx.wait_for("k", payload=wanted[0])
        yield ctx.step("pay", did.entry("paid"))
        yield ctx.wait_for("later")
        return answer.payload

    run = await task(app, body).submit()
    await kit.run_all()
    await run.signal(payload=5)
    await kit.run_all()
    wanted[0] = str
    await run.signal("later")
    with pytest.raises(StepsChanged, match="the recorded answer of wait 'k' does not fit"):
        await kit.run_until_ended(run)
    assert await run.state() == "waiting", "for code that fits"
    wanted[0] = int
    assert await kit.run_until_ended(run) == 5
    assert did == ["paid"]


@pytest.mark.each_value
@pytest.mark.parametrize("then", ["a sleep", "a wait", "a child", "a flow"])
async def test_an_answer_was_used_whatever_was_recorded_after_it(kit: Kit, app: ff.App, then: str) -> None:
    wanted: list[Any] = [int]
    other = task(app, lambda ctx: (yield ctx.now()), name="other")

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        answer = yield ctx.wait_for("k", payload=wanted[0])
        if then == "a sleep":
            yield ctx.sleep("1 day")
        elif then == "a wait":
            yield ctx.wait_for("later", timeout="1 day", default=None)
        elif then == "a child":
            yield other.submit()
        else:
            flow = app.flow("f")
            flow.add(other)
            yield flow.submit()
        if ctx.attempt_index == 0 and then not in ("a sleep", "a wait"):
            raise ff.RetryLater(after=HOUR)
        return answer.payload

    run = await task(app, body, retry=ff.RetryPolicy(max_retries=3)).submit()
    await kit.run_all()
    await run.signal(payload=5)
    await kit.run_all()
    wanted[0] = Decision
    await kit.clock.advance(days=2)
    with pytest.raises(StepsChanged, match="the recorded answer of wait 'k' does not fit"):
        await kit.run_all()
    assert not any(refused for _, refused in await recorded(kit, run))
    wanted[0] = int
    await kit.clock.advance(days=1)
    assert await kit.run_until_ended(run) == 5


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
async def test_what_another_branch_records_says_nothing_about_an_answer(
    kit: Kit, app: ff.App, monkeypatch: pytest.MonkeyPatch, did: Ledger, is_read: bool
) -> None:
    """The worker dies after the answer is recorded, while the other branch continues."""
    wanted: list[Any] = [Decision]
    held, recorded_after, refuse = asyncio.Event(), asyncio.Event(), ff.Engine.refuse_signals

    async def dies(self: ff.Engine, authority: Any, *args: Any) -> None:
        held.set()
        if len(did) == 1:
            await recorded_after.wait()
            await self.revoke_lease(authority.execution_id)
            raise LeaseLost("lease_revoked")
        await refuse(self, authority, *args)

    async def other(ctx: ff.Context) -> None:
        await ctx.step("before", did.entry("before"))
        if not is_read:
            await held.wait()
        await ctx.step("after", did.entry("after"))
        recorded_after.set()

    @app.task
    async def job(ctx: ff.Context) -> str:
        place = await ctx.waitpoint("k", payload=wanted[0])
        engine = await kit.engine()
        if not did:
            await engine.signal_execution(
                ctx.execution_id,
                "k",
                signal_name="go",
                source_type="raw",
                payload=b'{"ok": true}' if is_read else b"bad",
            )
        await ctx.step("first", lambda: None)

        async def one() -> str:
            answer = await place.wait()
            if is_read:
                await ctx.wait_for("next")
            return answer.payload.comment

        answer, _ = await asyncio.gather(one(), other(ctx))
        return answer

    monkeypatch.setattr(ff.Engine, "refuse_signals", dies)
    run = await job.submit()
    await kit.run_all()
    if is_read:
        wanted[0] = int
        await run.signal("next")
        with pytest.raises(StepsChanged, match="the recorded answer of wait 'k' does not fit"):
            await kit.run_all()
        wanted[0] = Decision
    else:
        assert await recorded(kit, run) == [("refused", True)]
        await run.signal("k", payload=GOOD)
    assert await kit.run_until_ended(run) == ""
    assert did == ["before", "after"]


# ---- links after cancel and replay


@pytest.mark.each_value
@BOTH
@pytest.mark.parametrize("ending", ["cancelled", "timed out", "failed"])
async def test_a_link_that_was_mailed_is_good_again_after_a_replay(
    kit: Kit, app: ff.App, did: Ledger, plain: bool, ending: str
) -> None:
    options = {"cancelled": {}, "timed out": {"timeout": HOUR}, "failed": {"timeout": HOUR, "on_timeout": "fail"}}

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("k", payload=Decision)
        yield ctx.step("mail", did.entry(place.callback))
        return (yield place.wait(**options[ending])).payload.comment

    run = await task(app, body, plain=plain).submit()
    client = await app.client()
    for _ in range(2):
        await kit.run_all()
        if ending == "cancelled":
            await run.cancel()
        with pytest.raises(ff.TaskFailed):
            await kit.run_until_ended(run)
        assert (await client.receive(did[0], b'{"ok": true}')).status == 404
        await run.replay()
    await kit.run_all()
    assert (await client.receive(did[0], b'{"ok": 1}')).status == 422
    assert (await client.receive(did[0][:-1] + "A", b'{"ok": true}')).status in (401, 404)
    assert (await client.receive(did[0], b'{"ok": true, "comment": "late"}')).status == 200
    assert await kit.run_until_ended(run) == "late"
    assert len(did) == 1
    assert (await client.receive(did[0], b'{"ok": true}')).status == 404


@pytest.mark.each_value
@BOTH
async def test_a_replay_may_take_the_branch_of_the_answer_after_that_of_the_timeout(
    kit: Kit, app: ff.App, did: Ledger, plain: bool
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        yield ctx.step("ask", did.entry("asked"))
        try:
            yield ctx.wait_for("k", timeout=HOUR)
        except NoSignal:
            yield ctx.step("tell", did.entry("too late"))
            raise
        yield ctx.step("pay", did.entry("paid"))

    run = await task(app, body, plain=plain).submit()
    with pytest.raises(ff.TaskFailed):
        await kit.run_until_ended(run)
    await run.replay()
    await kit.run_all()
    await run.signal("k")
    await kit.run_until_ended(run)
    assert did == ["asked", "too late", "paid"]


async def test_changed_code_is_stopped_after_a_replay_too(kit: Kit, app: ff.App, did: Ledger) -> None:
    names = ["mail"]

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("k")
        yield ctx.step(names[0], did.entry("mailed"))
        yield place.wait()

    run = await task(app, body).submit()
    await kit.run_all()
    await run.cancel()
    await run.replay()
    (history,) = await read_histories(await kit.engine(), [run.execution_id])
    async with DryRuns(app) as runs:
        assert (await runs.check(history)).verdict == "continues"
        names[0] = "send mail"
        assert (await runs.check(history)).verdict == "stops"
    with pytest.raises(StepsChanged, match="not asked for: step 'mail'; asked for instead: step 'send mail'"):
        await kit.run_all()
    assert did == ["mailed"]


async def test_a_link_whose_key_is_gone_stays_dead_after_a_replay_and_the_new_one_is_good(
    kit: Kit, app: ff.App, did: Ledger
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("k")
        did.append(place.callback)
        return (yield place.wait()).payload

    run = await task(app, body).submit()
    await kit.run_all()
    await run.cancel()
    engine = await kit.engine()
    await engine.rotate_waitpoint_hmac_secret_all("after-the-leak", "ab" * 32, timedelta(0))
    await kit.clock.advance(seconds=1)
    await run.replay()
    await kit.run_all()
    client = await app.client()
    assert (await client.receive(did[0], b"1")).status == 401
    (place,) = await run.waits()
    assert place.token_kid == "after-the-leak"
    assert (await client.receive(did[-1], b"2")).status == 200
    assert await kit.run_until_ended(run) == 2


async def test_answers_that_were_given_before_the_cancel_count_after_the_replay(kit: Kit, app: ff.App) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        return [one.source_identity for one in (yield ctx.wait_for(ff.from_sources(2, "k")))]

    run = await task(app, body).submit()
    await kit.run_all()
    await run.approve(by="ann")
    await run.cancel()
    await run.replay()
    await kit.run_all()
    assert isinstance(await run.approve(by="ann"), DuplicateSignal)
    await run.approve(by="bob")
    assert await kit.run_until_ended(run) == ["ann", "bob"]


async def test_a_link_that_is_not_open_now_says_so_and_not_that_it_is_unknown(
    kit: Kit, app: ff.App, did: Ledger
) -> None:
    def body(ctx: Any) -> Generator[Any, Any, Any]:
        place = yield ctx.waitpoint("k", payload=Decision)
        did[:] = [place.callback]
        return (yield place.wait()).payload.comment

    run = await task(app, body).submit()
    await kit.run_all()
    client = await app.client()

    async def is_told_to_wait() -> None:
        received = await client.receive(did[0], b'{"ok": true}')
        assert (received.status, received.body) == (
            409,
            {"outcome": "waitpoint_closed", "problem": "answered already, or not open now: try again later"},
        )
        assert (await client.receive(did[0][:-1] + "A", b'{"ok": true}')).status in (401, 404)
        with pytest.raises(ff.NotFound, match="answered already, or not open now: try again later"):
            await run.signal("k", payload=GOOD)

    await raw(kit, run, BAD)
    await is_told_to_wait()
    await kit.run_all()
    await run.cancel()
    assert (await client.receive(did[0], b'{"ok": true}')).status == 404
    await run.replay()
    await is_told_to_wait()
    await kit.run_all()
    assert (await client.receive(did[0], b'{"ok": true}')).status == 200
    await is_told_to_wait()
    assert await kit.run_until_ended(run) == ""


# ---- histories

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["good", "bad", "checked bad"]), st.sampled_from(["ann", "bob", "cid"])),
        st.tuples(st.sampled_from(["run", "run", "cancel and replay"]), st.just("")),
    ),
    max_size=12,
)


@settings(
    max_examples=examples(150, 8),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
@given(actions=ACTIONS, kind=st.sampled_from(["sources", "signals"]), wants=st.integers(1, 3), parked=st.booleans())
async def test_histories_with_answers_of_all_kinds_end_with_the_good_ones(
    kit: Kit, app: ff.App, actions: list[tuple[str, str]], kind: str, wants: int, parked: bool
) -> None:
    """The model: the good answers in the order of their arrival, of each sender the first where senders count."""
    condition = (ff.from_sources if kind == "sources" else ff.count_signals)(wants, "k")

    def body(ctx: Any) -> Generator[Any, Any, Any]:
        wait = ctx.wait_for(condition, payload=Decision)
        found = yield (beside_a_sleep(ctx, wait) if parked else wait)
        return [one.source_identity for one in found]

    app.tasks.pop("job", None)
    run = await task(app, body, retry=ff.RetryPolicy(max_retries=50)).submit()
    await kit.run_all()
    model: list[str] = []

    def is_over() -> bool:
        return len(set(model)) >= wants if kind == "sources" else len(model) >= wants

    counted: list[tuple[str, str]] = []  # what the database counts: bad answers too, until a worker looks at them

    async def look() -> None:
        """A worker looks if the condition holds with what is counted, and at once where the wait is parked."""
        nonlocal counted
        await kit.run_all()
        enough = len({who for _, who in counted}) if kind == "sources" else len(counted)
        if parked or enough >= wants:
            counted = [one for one in counted if one[0] == "good"]

    for what, who in [*actions, *(("good", who) for who in "xyz")]:
        if what in ("good", "bad"):
            if is_over():
                break
            try:
                sent = await raw(kit, run, GOOD if what == "good" else BAD, who=who)
            except (ff.NotFound, ff.FlowFabricError):
                # The condition held with a bad answer, and no worker has looked yet: the waitpoint is closed.
                assert "bad" in {one for one, _ in counted}, (actions, kind, wants, parked)
                await look()
                sent = await raw(kit, run, GOOD if what == "good" else BAD, who=who)
            assert isinstance(sent, Accepted)
            counted.append((what, who))
            if what == "good":
                model.append(who)
        elif what == "checked bad" and not is_over():
            with pytest.raises((PayloadRefused, ff.NotFound)):
                await run.signal("k", payload=BAD, source_identity=who)
        elif what == "cancel and replay":
            if is_over():
                break
            await run.cancel()
            await run.replay()
            await kit.run_all()
            counted = [one for one in counted if one[0] == "good"]  # looked at when the wait begins again
        elif what == "run":
            await look()
    if not is_over():
        await kit.run_all()
        assert not (await run.state()).is_terminal
        return
    expected = list(dict.fromkeys(model)) if kind == "sources" else model
    assert await kit.run_until_ended(run) == expected[:wants]
