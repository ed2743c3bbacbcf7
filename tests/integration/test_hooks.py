"""`on_failure` and `on_escalate`: a task that is submitted with the facts when an execution fails or is escalated."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import flowfabric as ff
from flowfabric.contracts.json_form import payload
from flowfabric.testing import Kit
from tests.integration.conftest import Ledger
from tests.integration.test_codecs import Sealed
from tests.support import WORKER

HOUR = timedelta(hours=1)
NOWHERE = "postgresql://nobody@nowhere/nothing"


class Watched:
    """An app with a task for each way to end, and one that is told."""

    def __init__(self, kit: Kit, **options: Any) -> None:
        self.app = app = ff.App(NOWHERE, **options)
        kit.use(app)
        self.kit = kit
        self.told: list[ff.Failure | ff.Escalation] = []

        @app.task(lane="alerts", priority=7, tags={"a": "b"}, retry=ff.RetryPolicy(max_retries=2))
        async def tell(ctx: ff.Context, what: ff.Failure | ff.Escalation) -> None:
            assert (ctx.lane_id, ctx.priority, ctx.tags) == ("alerts", 7, {"a": "b"})
            self.told.append(what)

        @app.task(on_failure=tell, retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0)), tags={"team": "x"})
        async def boom(words: str = "no good") -> int:
            raise ValueError(words)

        @app.task(on_failure=tell, on_escalate="tell")
        async def ask(ctx: ff.Context, behavior: Any = "escalate") -> Any:
            return (await ctx.wait_for("approval", timeout="2 days", on_timeout=behavior)).name

        @app.task(on_failure=tell)
        async def fine(n: int = 1) -> int:
            return n

        @app.task
        async def plain(words: str = "plainly wrong") -> int:
            raise ValueError(words)

        self.tell, self.boom, self.ask, self.fine, self.plain = tell, boom, ask, fine, plain

    async def end(self, run: Any) -> str:
        try:
            await self.kit.run_until_ended(run)
        except (ff.TaskFailed, ff.FlowFailed) as error:
            found = error.kind
        else:
            found = "completed"
        await self.kit.run_all()
        return found

    def facts(self) -> list[tuple[str, str]]:
        return [(type(one).__name__, one.kind) for one in self.told]


async def test_a_final_failure_submits_its_hook_once_with_the_facts_and_a_retry_does_not(kit: Kit) -> None:
    watched = Watched(kit)
    run = await watched.boom.submit("broken")
    assert await watched.end(run) == "failed"
    (told,) = watched.told
    assert isinstance(told, ff.Failure)
    assert (told.execution_id, told.kind, told.lane, told.state) == (
        run.execution_id, "boom", "default", ff.State.FAILED,
    )  # fmt: skip
    assert (told.message, told.error_type, told.category) == ("broken", "ValueError", "ValueError")
    assert (told.attempt, told.tags, told.flow_id) == (2, {"team": "x"}, None)
    assert "raise ValueError(words)" in str(told.traceback)
    # A replay that fails again is another final failure.
    await run.replay()
    assert await watched.end(run) == "failed"
    assert len(watched.told) == 2


async def test_an_expiry_submits_the_hook_and_success_cancel_and_skip_do_not(kit: Kit) -> None:
    watched = Watched(kit)
    assert await watched.end(await watched.fine.submit()) == "completed"
    cancelled = await watched.ask.submit()
    await cancelled.cancel("enough")
    assert await watched.end(cancelled) == "cancelled"
    flow = watched.app.flow("skip")
    flow.add(watched.fine, flow.add(watched.plain))
    assert await watched.end(await flow.submit()) == "failed"
    assert watched.told == []
    late = await watched.ask.options(deadline=HOUR).submit()
    assert await watched.end(late) == "expired"
    (told,) = watched.told
    assert isinstance(told, ff.Failure)
    assert (told.state, told.category, told.message) == (ff.State.EXPIRED, "timeout", "execution_deadline")
    assert await watched.end(await watched.ask.submit("fail")) == "failed"
    assert await watched.end(await watched.ask.submit("expire")) == "expired"
    assert await watched.end(await watched.ask.submit("cancel")) == "cancelled"
    assert len(watched.told) == 3


async def test_an_escalated_wait_submits_its_hook_with_the_facts_and_still_waits(kit: Kit) -> None:
    watched = Watched(kit)
    run = await watched.ask.submit()
    await kit.run_all()
    await kit.clock.advance(days=3)
    await kit.run_all()
    (told,) = watched.told
    assert isinstance(told, ff.Escalation)
    assert (told.execution_id, told.kind, told.waitpoints) == (run.execution_id, "ask", ("approval",))
    assert told.timeout_at - told.waiting_since >= timedelta(days=1)
    await run.approve(by="me")
    assert await kit.run_until_ended(run) == "approved"
    assert len(watched.told) == 1


@pytest.mark.parametrize("waits", ["alone", "beside another"])
async def test_an_escalation_submits_its_hook_once_whatever_arrives_after_it(kit: Kit, waits: str) -> None:
    watched = Watched(kit)

    @watched.app.task(on_escalate="tell")
    async def count(ctx: ff.Context) -> int:
        wait = ctx.wait_for("number", payload=int, timeout="2 days", on_timeout="escalate")
        if waits == "alone":
            return (await wait).payload
        other = ctx.wait_for("other", timeout="5 days", on_timeout="escalate")
        number, _ = await asyncio.gather(wait, other)
        return number.payload

    run = await count.submit()
    engine = await kit.engine()
    for replayed in range(2):
        await kit.run_all()
        await kit.clock.advance(days=3)
        await kit.run_all()
        assert len(watched.told) == 1 + replayed
        for _ in range(2):
            await engine.signal_execution(
                run.execution_id, "number", signal_name="go", source_type="raw", payload=b"bad"
            )
            await kit.run_all()
        assert len(watched.told) == 1 + replayed
        assert [one.blocking_reason for one in [await run.get()]] == ["paused_by_operator"]
        if not replayed:
            await run.cancel()
            await run.replay()
    await run.signal("number", payload=5)
    if waits == "beside another":
        await kit.run_all()
        assert len(watched.told) == 2
        await kit.clock.advance(days=4)
        await kit.run_all()
        assert len(watched.told) == 3, "the other one"
        await run.signal("other")
    assert await kit.run_until_ended(run) == 5


async def test_hooks_of_an_app_are_for_what_is_submitted_from_outside_and_never_for_hooks(kit: Kit) -> None:
    watched = Watched(kit, on_failure="tell")

    @watched.app.task
    async def parent(ctx: ff.Context) -> str:
        run = await watched.plain.submit("child")
        with pytest.raises(ff.TaskFailed):
            await run.result()
        flow = watched.app.flow("inner")
        flow.add(watched.plain, "member of a child")
        with pytest.raises(ff.FlowFailed):
            await (await flow.submit()).result()
        return "ok"

    @watched.app.task(on_failure="parent_tell")
    async def careless() -> None:
        raise ValueError("careless")

    @watched.app.task(name="parent_tell")
    async def failing_hook(failure: ff.Failure) -> None:
        raise ValueError("the hook failed")

    assert await watched.end(await parent.submit()) == "completed"
    flow = watched.app.flow("outer")
    flow.add(watched.plain, "member")
    flow.add(watched.boom, "member with a hook of its own")
    assert await watched.end(await flow.submit()) == "failed"
    assert await watched.end(await watched.plain.submit("outside")) == "failed"
    assert [one.message for one in watched.told if isinstance(one, ff.Failure)] == [
        "member with a hook of its own", "outside",
    ]  # fmt: skip
    assert await watched.end(await watched.plain.options(on_failure=None).submit()) == "failed"
    # The own hook of a task wins; a hook that fails runs no other.
    assert await watched.end(await careless.submit()) == "failed"
    assert len(watched.told) == 2


async def test_everywhere_means_children_and_members_too(kit: Kit) -> None:
    watched = Watched(kit, on_failure="tell", everywhere=True)

    @watched.app.task
    async def parent(ctx: ff.Context) -> None:
        with pytest.raises(ff.TaskFailed):
            await (await watched.plain.submit("child")).result()

    assert await watched.end(await parent.submit()) == "completed"
    flow = watched.app.flow("outer")
    flow.add(watched.plain, "member")
    assert await watched.end(await flow.submit()) == "failed"
    assert [one.message for one in watched.told if isinstance(one, ff.Failure)] == ["child", "member"]


async def test_every_way_to_submit_stores_the_hooks(kit: Kit) -> None:
    watched = Watched(kit, on_failure="tell")
    await watched.plain.submit_many(["one", "two"])
    await (await watched.app.client()).submit_many(watched.plain, [watched.plain.submission("three")])
    watched.app.schedule(watched.plain, "four", every="1 hour")
    await kit.run_all()
    await kit.clock.advance(hours=1)
    await kit.run_all()
    assert sorted(one.message for one in watched.told if isinstance(one, ff.Failure))[:4] == [
        "four", "one", "three", "two",
    ]  # fmt: skip


async def test_reasons_are_sealed_on_their_way_and_facts_of_no_hook_are_refused(kit: Kit) -> None:
    watched = Watched(kit, codecs=[Sealed()], accept_plain=False)
    assert await watched.end(await watched.boom.submit("a secret")) == "failed"
    (told,) = watched.told
    assert isinstance(told, ff.Failure)
    assert told.message == "a secret"
    client = await watched.app.client()
    for data in (b'{"words": "forged"}', b"[]", b'{"type": "failure"}'):
        made = await client.engine.create_execution(
            execution_kind="plain", input_payload=data, payload_encoding="facts"
        )
        run = client.run(made.execution_id)
        assert await watched.end(run) == "failed"
        reason = watched.app.codecs.open_text((await run.get()).failure_reason or "", made.execution_id)
        assert "these are not the facts of a hook" in reason


async def test_commands_show_the_facts_of_a_hook_with_and_without_the_apps_codecs(kit: Kit) -> None:
    watched = Watched(kit, codecs=[Sealed()], accept_plain=False)
    assert await watched.end(await watched.boom.submit()) == "failed"
    client = await watched.app.client()
    (hook,) = (await client.find(kind="tell")).items
    stored = await client.engine.read_execution_context(hook.execution_id)
    for codecs in (None, watched.app.codecs):
        shown = payload(stored.input_payload, stored.payload_encoding, codecs, hook.execution_id)
        assert (shown["kind"], shown["type"]) == ("boom", "failure")
        assert str(shown["reason"]).startswith("[sealed ")


async def test_a_closed_lane_holds_hooks_back_until_it_opens(kit: Kit, did: Ledger) -> None:
    watched = Watched(kit)
    client = await watched.app.client()
    await client.set_lane_state("alerts", "draining")
    assert await watched.end(await watched.boom.submit()) == "failed"
    assert watched.told == []
    await client.set_lane_state("alerts", "active")
    await kit.clock.advance(minutes=2)
    await kit.run_all()
    assert len(watched.told) == 1


async def test_several_leaders_submit_each_hook_once(database: str) -> None:
    app = ff.App(database)

    @app.task
    async def tell(failure: ff.Failure) -> None: ...

    @app.task(on_failure=tell)
    async def boom(n: int) -> None: ...

    async with app, await ff.Engine.connect(database) as one, await ff.Engine.connect(database) as two:
        await boom.submit_many(range(60))
        for claimed in await one.claim_many(limit=60, kinds=["boom"], **WORKER):
            await one.fail(claimed.handle, "gone")

        async def drain(engine: ff.Engine) -> int:
            done = 0
            while (found := await engine.submit_hooks(limit=7)).handled or found.more:
                done += found.handled
            return done

        assert sum(await asyncio.gather(*(drain(engine) for engine in (one, two, one)))) == 60
        assert len((await one.find_executions(kinds=["tell"], limit=100)).items) == 60
        assert await one.audit(events=True) == []


async def test_a_hook_has_no_hooks_whatever_its_policy_says(plain_engine: ff.Engine, database: str) -> None:
    inner = {"hooks": {"failure": {"kind": "second"}}}
    spec = {"kind": "first", "policy": inner}
    with pytest.raises(ff.FlowFabricError, match="a hook has no hooks"):
        await plain_engine.create_execution(execution_kind="boom", policy={"hooks": {"failure": spec}})
    made = await plain_engine.create_execution(
        execution_kind="boom", policy={"hooks": {"failure": {"kind": "first", "policy": {"max_replay_count": 3}}}}
    )
    await plain_engine._fetch(
        "update flowfabric.execution set policy = $1::text::json where id = $2",
        msgspec.json.encode({"hooks": {"failure": spec}}).decode(),
        made.execution_id,
    )
    for kind, hooks in (("boom", 1), ("first", 0)):
        (claimed,) = await plain_engine.claim_many(limit=1, kinds=[kind], **WORKER)
        await plain_engine.fail(claimed.handle, "gone")
        assert (await plain_engine.submit_hooks()).handled == hooks


def test_a_task_that_cannot_be_a_hook_is_refused_where_it_is_named() -> None:
    app = ff.App()

    @app.task
    async def nothing() -> None: ...

    @app.task
    async def number(n: int) -> None: ...

    @app.task
    async def two(failure: ff.Failure, n: int) -> None: ...

    @app.task
    async def right(failure: ff.Failure, n: int = 1) -> None: ...

    @app.task
    async def anything(facts: Any) -> None: ...

    @app.task(idempotency_key="k")
    async def once(failure: ff.Failure) -> None: ...

    for task in (nothing, number, two, once):
        with pytest.raises(ff.InvalidInput) as refused:
            app.task(name="x", on_failure=task)(lambda: None)
        assert refused.value.field == "on_failure"
    for wrong in (5, right.function, ["right"]):
        with pytest.raises(ff.InvalidInput) as refused:
            right.options(on_failure=wrong)  # type: ignore[arg-type]
        assert refused.value.field == "on_failure"
    with pytest.raises(ff.InvalidInput, match=r"there is no task 'rigth'; did you mean 'right'\?"):
        number.options(on_failure="rigth").submission(1).item()
    with pytest.raises(ff.InvalidInput) as refused:
        number.options(on_escalate=right).submission(1).item()
    assert refused.value.field == "on_escalate"
    with pytest.raises(ff.InvalidInput) as refused:
        ff.App(everywhere=1)  # type: ignore[arg-type]
    assert refused.value.field == "everywhere"
    for hook in (right, "right", anything):
        number.options(on_failure=hook).submission(1).item()
