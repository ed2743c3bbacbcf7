"""Code that changes while executions wait: each case is two real versions of one handler, run by two workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.history import Fit, History
from flowfabric.worker.dry_run import DryRuns, read_histories
from tests.each import each
from tests.integration.conftest import Ledger

PATIENCE = 60.0
Handler = Callable[[ff.Context], Awaitable[Any]]
STOPPED = "waiting_for_capable_worker"


async def _child(n: int) -> int:
    return n


class Deploys:
    """One execution of the task `job`, run by workers with one version of its code after the other."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.id: Any = None

    async def run(self, code: Any, *, signal: bool = False, fits: bool = False, **options: Any) -> str:
        """Let a worker with this code run until the execution waits, has ended or was stopped; return which.

        `signal` answers its wait first. `fits`: until it has ended.
        """
        app = self.app = ff.App(self.database)
        task = app.task(name="job", **options)(code)
        self.children = [app.task(name=name)(_child) for name in ("child", "other")]

        async with ff.Worker(app, grace=5, poll=0.1):
            if self.id is None:
                self.id = (await task.submit()).id
            client = await app.client()
            if signal:
                await client.signal(self.id, "ok")
            async with asyncio.timeout(PATIENCE):
                while True:
                    found = await client.engine.read_execution(self.id)
                    assert found is not None
                    if found.public_state.is_terminal:
                        break
                    waits = found.stored_blocking_reason == STOPPED or found.public_state is ff.State.SUSPENDED
                    if waits and not fits and (not signal or found.stored_blocking_reason == STOPPED):
                        break
                    await asyncio.sleep(0.005)
            self.info = found
            assert await client.engine.audit(events=True) == []
        outcome = await task.run(self.id).outcome() if found.public_state.is_terminal else None
        self.failure = None if outcome is None else outcome.failure_reason
        await app.close()
        return "stopped" if found.stored_blocking_reason == STOPPED else found.public_state.value


def mails(did: Ledger) -> Handler:
    """The handler of the first version."""

    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail", "sent"))
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


# What a second version of `mails` may do: (code, recorded and missing, asked for instead), or None for what continues.
def _renamed(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("send mail", did.entry("send mail"))
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _removed(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _inserted_before_the_wait(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await ctx.step("log", did.entry("log"))
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _inserted_after_the_wait(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await ctx.wait_for("ok")
        await ctx.step("log", did.entry("log"))
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _moved(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await ctx.step("pay", did.entry("pay"))
        await ctx.wait_for("ok")
        return "done"

    return job


def _another_type(did: Ledger) -> Handler:
    def count() -> int:
        did.append("count")
        return 1

    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", count)
        await ctx.wait_for("ok")
        return "done"

    return job


def _another_wait(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await ctx.wait_for("approved")
        return "done"

    return job


def _more_waitpoints(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await ctx.wait_for(ff.all_of("ok", "sure"), name="ok")
        return "done"

    return job


def _a_sleep_before_the_wait(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await ctx.sleep(timedelta(days=1))
        await ctx.wait_for("ok")
        return "done"

    return job


def _under_a_timeout(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        async with asyncio.timeout(60):
            await ctx.step("send mail", did.entry("send mail"))
        await ctx.wait_for("ok")
        return "done"

    return job


def _in_a_branch(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.wait_for("ok"))
            group.create_task(ctx.step("send mail", did.entry("send mail")))
        return "done"

    return job


def _that_catches_everything(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        try:
            await ctx.step("send mail", did.entry("send mail"))
        except Exception:
            did.append("caught")
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


CHANGES: dict[str, tuple[Callable[[Ledger], Handler], str]] = {
    "renamed": (_renamed, "recorded and not asked for: step 'mail', wait 'ok'; asked for instead: step 'send mail'"),
    "removed": (_removed, "recorded and not asked for: step 'mail'; asked for instead: step 'pay'"),
    "inserted": (_inserted_before_the_wait, "recorded and not asked for: wait 'ok'; asked for instead: step 'log'"),
    "moved": (_moved, "recorded and not asked for: wait 'ok'; asked for instead: step 'pay'"),
    "type": (_another_type, "the recorded result of step 'mail' does not fit its function"),
    "wait": (_another_wait, "recorded and not asked for: wait 'ok'; asked for instead: wait 'approved'"),
    "waitpoints": (_more_waitpoints, "recorded: wait 'ok' at 1 waitpoints; asked for instead: at 2"),
    "sleep": (_a_sleep_before_the_wait, "recorded and not asked for: wait 'ok'; asked for instead: sleep 'sleep'"),
    "timeout": (_under_a_timeout, "recorded and not asked for: step 'mail', wait 'ok'; asked for instead: step 'send"),
    "branch": (_in_a_branch, "recorded and not asked for: step 'mail'; asked for instead: step 'send mail'"),
    "catches": (_that_catches_everything, "recorded and not asked for: step 'mail', wait 'ok'; asked for"),
}


@each("case", CHANGES)
async def test_a_changed_handler_stops_before_its_first_new_effect(database: str, case: str) -> None:
    deploys, did = Deploys(database), Ledger()
    change, words = CHANGES[case]
    assert await deploys.run(mails(did)) == "suspended"
    assert await deploys.run(change(did), signal=True) == "stopped"
    assert did == ["mail"]
    assert words in (deploys.info.blocking_detail or "")
    # The old code is put back: it continues where it was, at once, in the same attempt.
    assert await deploys.run(mails(did), fits=True) == "completed"
    assert did == ["mail", "pay"]
    assert deploys.info.total_attempt_count == 1


async def test_the_log_names_the_task_and_says_how_to_make_its_code_fit(
    database: str, did: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    deploys = Deploys(database)
    assert await deploys.run(mails(did)) == "suspended"
    assert await deploys.run(_renamed(did), signal=True) == "stopped"
    (line,) = [one for one in caplog.records if "waits for code that fits" in one.message]
    assert line.message == (
        f"job {deploys.id}: waits for code that fits: recorded and not asked for: step 'mail', wait 'ok';"
        " asked for instead: step 'send mail'. How: if step 'mail' is now 'send mail',"
        " write ctx.step('send mail', ..., was='mail');"
        ' for other changes use ctx.patched, or put the old code back (guide "Change code")'
    )
    assert (line.kind, line.levelname) == ("job", "WARNING")  # type: ignore[attr-defined]


def _plain_mails(did: Ledger) -> Any:
    def job(ctx: ff.SyncContext) -> str:
        ctx.step("mail", did.entry("mail", "sent"))
        ctx.wait_for("ok")
        ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _plain_renamed(did: Ledger) -> Any:
    def job(ctx: ff.SyncContext) -> str:
        try:
            ctx.step("send mail", did.entry("send mail"))
        except Exception:
            did.append("caught")
        ctx.wait_for("ok")
        return "done"

    return job


async def test_a_changed_synchronous_handler_stops_too(database: str, did: Ledger) -> None:
    deploys = Deploys(database)
    assert await deploys.run(_plain_mails(did)) == "suspended"
    assert await deploys.run(_plain_renamed(did), signal=True) == "stopped"
    assert did == ["mail"]
    assert await deploys.run(_plain_mails(did), fits=True) == "completed"
    assert did == ["mail", "pay"]


# ---- changes on purpose


def _with_its_old_name(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.step("send mail", did.entry("send mail"), was="mail")
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _patched(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        if await ctx.patched("letters"):
            await ctx.step("letter", did.entry("letter"))
        else:
            await ctx.step("mail", did.entry("mail"))
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


def _patched_in_a_branch(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        async def approve() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            await ctx.wait_for("ok")

        async with asyncio.TaskGroup() as group:
            group.create_task(approve())
            if await ctx.patched("letters"):
                await ctx.step("letter", did.entry("letter"))
            else:
                await ctx.step("mail", did.entry("mail"))
        await ctx.step("pay", did.entry("pay"))
        return "done"

    return job


MEANT: dict[str, tuple[Callable[[Ledger], Handler], dict[str, Any], list[str]]] = {
    "inserted after the wait": (_inserted_after_the_wait, {}, ["mail", "log", "pay"]),
    "old name": (_with_its_old_name, {}, ["mail", "pay"]),
    "patched": (_patched, {}, ["mail", "pay"]),
    "patched in a branch": (_patched_in_a_branch, {}, ["mail", "pay"]),
    "lenient": (_renamed, {"steps": "lenient"}, ["mail", "send mail", "pay"]),
}


@each("case", MEANT)
async def test_a_change_that_is_meant_continues(database: str, case: str) -> None:
    deploys, did = Deploys(database), Ledger()
    change, options, effects = MEANT[case]
    assert await deploys.run(mails(did), **options) == "suspended"
    assert await deploys.run(change(did), signal=True, **options) == "completed"
    assert did == effects


async def test_a_new_execution_takes_the_new_branch_and_keeps_to_it(database: str, did: Ledger) -> None:
    deploys = Deploys(database)
    assert await deploys.run(_patched(did)) == "suspended"
    assert await deploys.run(_patched(did), signal=True) == "completed"
    assert did == ["letter", "pay"]


async def test_a_patch_that_is_no_longer_asked_for_is_no_change(database: str, did: Ledger) -> None:
    deploys = Deploys(database)
    assert await deploys.run(_patched(did)) == "suspended"

    async def job(ctx: ff.Context) -> str:
        await ctx.step("letter", did.entry("letter"))
        await ctx.wait_for("ok")
        await ctx.step("pay", did.entry("pay"))
        return "done"

    assert await deploys.run(job, signal=True) == "completed"
    assert did == ["letter", "pay"]


# ---- unchanged code never stops


def _saga(did: Ledger) -> Handler:
    tries = iter(range(10))

    async def charge() -> str:
        did.append("charge")
        if next(tries) == 0:
            raise ConnectionError("later")
        return "charged"

    async def job(ctx: ff.Context) -> str:
        await ctx.step("reserve", did.entry("reserve"))
        try:
            await ctx.step("charge", charge)
        except ConnectionError:
            await ctx.step("apologise", did.entry("apologise"))
            raise
        await ctx.wait_for("ok")
        await ctx.step("ship", did.entry("ship"))
        return "done"

    return job


def _gather(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        async def left() -> None:
            await ctx.step("l1", did.entry("l1"))
            await ctx.wait_for("ok")
            await ctx.step("l2", did.entry("l2"))

        async def right() -> None:
            await asyncio.sleep(0)
            await ctx.step("r1", did.entry("r1"))
            await ctx.step("r2", did.entry("r2"))

        await asyncio.gather(left(), right())
        return "done"

    return job


def _race(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        async def slow() -> None:
            await asyncio.sleep(0)
            await ctx.step("s1", did.entry("s1"))
            await asyncio.Event().wait()

        async def fast() -> None:
            await asyncio.sleep(0.05)
            await ctx.step("f1", did.entry("f1"))

        racing = [asyncio.create_task(slow()), asyncio.create_task(fast())]
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        for one in racing:
            one.cancel()
        await ctx.wait_for("ok")
        await ctx.step("end", did.entry("end"))
        return "done"

    return job


def _queue(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        queue: asyncio.Queue[int | None] = asyncio.Queue()

        async def produce() -> None:
            for n in range(3):
                await queue.put(await ctx.step("make", did.entry(f"make {n}", n)))
            await queue.put(None)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            while (item := await queue.get()) is not None:
                await ctx.step("use", did.entry(f"use {item}"))
        await ctx.wait_for("ok")
        await ctx.step("end", did.entry("end"))
        return "done"

    return job


def _loop(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        for n in range(4):
            await ctx.step("item", did.entry(f"item {n}"))
            if n == 2:
                await ctx.wait_for("ok")
        return "done"

    return job


def _output(did: Ledger) -> Handler:
    async def job(ctx: ff.Context) -> str:
        await ctx.print("begun")
        await ctx.step("say", did.entry("say"))
        await ctx.emit({"n": 1}, durability_mode="durable")
        await ctx.summarize({"said": True})
        await ctx.wait_for("ok")
        await ctx.emit(b"over", live=True)
        await ctx.step("end", did.entry("end"))
        return "done"

    return job


ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0)))
SAME: dict[str, tuple[Callable[[Ledger], Handler], set[str]]] = {
    "saga": (_saga, {"reserve", "charge", "apologise", "ship"}),
    "gather": (_gather, {"l1", "l2", "r1", "r2"}),
    "race": (_race, {"s1", "f1", "end"}),
    "queue": (_queue, {"make 0", "make 1", "make 2", "use 0", "use 1", "use 2", "end"}),
    "loop": (_loop, {"item 0", "item 1", "item 2", "item 3"}),
    "output": (_output, {"say", "end"}),
}


@each("case", SAME)
async def test_unchanged_code_is_never_stopped(database: str, case: str) -> None:
    deploys, did = Deploys(database), Ledger()
    make, effects = SAME[case]
    code = make(did)
    assert await deploys.run(code, retry=ONCE) == "suspended"
    # Once more from the top before the signal: another worker takes it over and parks it again.
    assert await deploys.run(code, retry=ONCE, signal=True) == "completed", deploys.info.blocking_detail
    assert set(did) == effects
    assert len(did) == len(effects) + (case == "saga")


# ---- children and flows


def _submits(deploys: Deploys, did: Ledger, child: int, flow: str) -> Handler:
    async def job(ctx: ff.Context) -> str:
        number = await (await deploys.children[child].submit(1)).result()
        graph = deploys.app.flow(flow)
        graph.add(deploys.children[0], 2, name="only")
        results = await (await graph.submit()).result()
        await ctx.wait_for("ok")
        await ctx.step("end", did.entry(f"{number} {results['only']}"))
        return "done"

    return job


@each(
    ("child", "flow", "words"),
    [
        (1, "kids", "recorded and not asked for: submit child, flow kids, wait 'ok'; asked for instead: submit other"),
        (0, "sons", "recorded and not asked for: flow kids, wait 'ok'; asked for instead: flow sons"),
    ],
)
async def test_another_child_or_flow_stops(database: str, child: int, flow: str, words: str) -> None:
    deploys, did = Deploys(database), Ledger()
    assert await deploys.run(_submits(deploys, did, 0, "kids")) == "suspended"
    fit = await _fit(_submits(deploys, did, child, flow), await _history(deploys), deploys=deploys)
    assert (fit.verdict, fit.why) == ("stops", words)
    assert await deploys.run(_submits(deploys, did, child, flow), signal=True) == "stopped"
    assert deploys.info.blocking_detail == words
    assert await deploys.run(_submits(deploys, did, 0, "kids"), fits=True) == "completed"
    assert did == ["1 2"]


# ---- a run that diverged to its end


async def test_the_old_code_continues_after_a_run_that_ended_without_recorded_steps(database: str, did: Ledger) -> None:
    deploys = Deploys(database)
    assert await deploys.run(mails(did)) == "suspended"

    async def job(ctx: ff.Context) -> str:
        await ctx.wait_for("ok")  # and nothing new: only the end shows that a step is missing
        return "done"

    assert await deploys.run(job, signal=True) == "failed"
    assert "an earlier run recorded step 'mail' and this one ended without" in (deploys.failure or "")
    async with await ff.Engine.connect(database, notifications=False) as engine:
        await engine.replay_execution(deploys.id)
    assert await deploys.run(mails(did), fits=True) == "completed"
    assert did == ["mail", "pay"]


# ---- the dry run


async def _history(deploys: Deploys) -> History:
    async with await ff.Engine.connect(deploys.database, notifications=False) as engine:
        (found,) = await read_histories(engine, [deploys.id])
        return found


async def _fit(code: Any, history: History, *, deploys: Deploys | None = None, **options: Any) -> Fit:
    app = ff.App("postgresql://nobody@nowhere/nothing")
    app.task(name="job", **options)(code)
    if deploys is not None:
        deploys.app = app
        deploys.children = [app.task(name=name)(_child) for name in ("child", "other")]
    async with DryRuns(app) as runs:
        return await runs.check(history)


@each("case", CHANGES)
async def test_a_dry_run_finds_every_change_without_an_effect(database: str, case: str) -> None:
    deploys, did = Deploys(database), Ledger()
    change, words = CHANGES[case]
    assert await deploys.run(mails(did)) == "suspended"
    history = History.decode((await _history(deploys)).encode())
    fit = await _fit(change(did), history)
    assert fit.verdict == "stops"
    # The dry run knows no answer to the wait, and so not what the handler would ask for after it.
    assert words.partition(";")[0] in (fit.why or "")
    assert did == ["mail"]


@each("case", [*MEANT, *SAME])
async def test_a_dry_run_finds_nothing_else(database: str, case: str) -> None:
    deploys, did = Deploys(database), Ledger()
    if case in MEANT:
        change, options, _ = MEANT[case]
        first, second = mails(did), change(did)
    else:
        options = {"retry": ONCE}
        first = second = SAME[case][0](did)
    assert await deploys.run(first, **options) == "suspended"
    before = list(did)
    fit = await _fit(second, await _history(deploys), **options)
    assert (fit.verdict, fit.why) == ("continues", None)
    assert did == before


async def test_a_dry_run_of_a_flow_that_existed_continues(database: str, did: Ledger) -> None:
    deploys = Deploys(database)

    async def job(ctx: ff.Context) -> str:
        graph = deploys.app.flow("kids")
        graph.add(deploys.children[0], 2, name="only")
        for _ in range(2):
            await (await graph.submit(idempotency_key="kids")).result()
        await ctx.wait_for("ok")
        return "done"

    assert await deploys.run(job) == "suspended"
    fit = await _fit(job, await _history(deploys), deploys=deploys)
    assert (fit.verdict, fit.why) == ("continues", None)


async def test_a_dry_run_of_branches_that_share_a_name_continues(database: str) -> None:
    deploys = Deploys(database)

    async def job(ctx: ff.Context) -> str:
        async def one(value: str) -> None:
            if value == "second":
                await ctx.progress(1)
            if await ctx.step("shared", str, value) == value:
                await ctx.step(f"after {value}", str, value)

        await asyncio.gather(*map(one, ("first", "second", "third")))
        await ctx.wait_for("ok")
        return "done"

    assert await deploys.run(job) == "suspended"
    fit = await _fit(job, await _history(deploys))
    assert (fit.verdict, fit.why) == ("continues", None)


async def test_a_dry_run_of_a_handler_that_mails_a_callback_link_continues(database: str, did: Ledger) -> None:
    deploys = Deploys(database)

    async def job(ctx: ff.Context) -> str:
        waitpoint = await ctx.waitpoint("ok")
        link = f"https://example.com/answer?c={waitpoint.callback}"
        await ctx.step("mail", lambda: did.append(link))
        await waitpoint.wait()
        return "done"

    assert await deploys.run(job) == "suspended"
    fit = await _fit(job, await _history(deploys))
    assert (fit.verdict, fit.why) == ("continues", None)


async def test_a_dry_run_does_not_say_what_depends_on_the_database(database: str, did: Ledger) -> None:
    deploys = Deploys(database)

    async def job(ctx: ff.Context) -> str:
        await ctx.step("mail", did.entry("mail"))
        await (await deploys.app.client()).find()
        await ctx.wait_for("ok")
        return "done"

    assert await deploys.run(job) == "suspended"
    fit = await _fit(job, await _history(deploys), deploys=deploys)
    assert fit.verdict == "unknown"
    assert "the handler itself reads or writes the database there, with " in (fit.why or "")
