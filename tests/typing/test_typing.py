"""User code that must, and must not, type-check. The types are part of the public surface."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

pytestmark = pytest.mark.xdist_group("types")  # one run of mypy for all
ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
from datetime import datetime, timedelta
from typing import assert_type
from uuid import UUID

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.event import EventCursor
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.failure import FailureClass
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy


async def program(engine: ff.Engine, claimed: Claimed) -> None:
"""

APP = """\
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, assert_never, assert_type

import asyncpg
import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

import flowfabric as ff
from flowfabric.app.flow_nodes import Join
from flowfabric.client import SyncFlowRun, SyncRun
from flowfabric.middleware import Middleware
from flowfabric.values.conditions import AllMet, Count
from flowfabric.values.execution import ExecutionInfo

app = ff.App(lane="slow", retry=ff.RetryPolicy(max_retries=2))


class Http:
    pass


@app.task
async def publish(ctx: ff.Context, draft_id: int, title: str = "") -> str:
    return title


@app.task(priority=5, delay="2 days", tags={"team.owner": "a"})
def count(ctx: ff.SyncContext, words: list[str]) -> int:
    return len(words)


@app.task
def when(day: int, *, hour: int = 8) -> datetime:
    return datetime(2030, 1, day, hour)


@app.task(name="get", permanent=[ValueError])
async def fetch(url: str, http: ff.Data[Http] = ff.provided) -> bytes:
    return b""


async def load(url: str, times: int = 1) -> bytes:
    return b""


def parse(page: bytes) -> dict[str, int]:
    return {}


async def program(ctx: ff.Context, plain: ff.SyncContext, client: ff.AsyncClient, sync: ff.Client) -> None:
"""

GOOD_TASKS = {
    "limits_are_declared_and_used": """
        app.budget("team", hard={"tokens": 100, "cost_micros": ff.usd("0.10")}, every="1 day", mode="warn")
        app.quota("api", concurrent=2, per_window=10, window="60s", key="tenant")
        run = await publish.options(budget=ff.Budget(tokens=5, soft={"tokens": 3}), budgets=["team"]).submit(1)
        assert_type((await run.usage()).total, dict[str, int])
        assert_type((await run.raise_budget(tokens=+5)).hard_limits, dict[str, int])
        async with ctx.spend(tokens=5) as spend:
            spend.settle(tokens=3)
        assert_type((await ctx.usage({"tokens": 1}, calls=1)).remaining, dict[str, int])
        app.flow("f", budget=ff.Budget(tokens=5))
    """,
    "a_submission_takes_the_arguments_and_gives_the_result": """
        run = await publish.submit(42, title="a")
        assert_type(run, ff.Run[str])
        assert_type(await run.result(timeout="5 minutes"), str)
        assert_type(await (await count.submit(["a"])).result(), int)
        assert_type(await (await when.submit(1, hour=9)).result(), datetime)
        assert_type(publish.run(run.id), ff.Run[str])
    """,
    "shared_data_is_not_asked_for": """
        assert_type(await fetch.submit("https://example.org"), ff.Run[bytes])
        app.provide(Http, Http())
        app.provide(Http, Http)
    """,
    "options_are_keywords_of_their_own_types": """
        changed = publish.options(
            idempotency_key="draft-42", delay="2 days", deadline=datetime(2030, 1, 1), tags={"a": "b"},
            on_duplicate="raise", capabilities={"gpu"}, retry=None, attempt_timeout=timedelta(seconds=5),
        )
        assert_type(await changed.submit(42), ff.Run[str])
        assert_type(await publish.submit_many([1, (2, "b")], priority=3), list[ff.Run[str]])
        assert_type(await publish.submit_many([publish.submission(1), changed.submission(2)]), list[ff.Run[str]])
    """,
    "steps_give_what_their_functions_give": """
        assert_type(await ctx.step("load", load, "url", times=2), bytes)
        assert_type(await ctx.step("parse", parse, b""), dict[str, int])
        assert_type(await ctx.step_with(timeout=5)("load", load, "url"), bytes)
        assert_type(await ctx.step_with(retry=ff.RetryPolicy())("parse", parse, b""), dict[str, int])
        assert_type(plain.step("parse", parse, b""), dict[str, int])
        assert_type(await ctx.step("load it", load, "url", was="load"), bytes)
        assert_type(await ctx.step("parse it", parse, b"", was="parse"), dict[str, int])
        assert_type(await ctx.step_with(was="load")("load it", load, "url"), bytes)
        assert_type(plain.step("parse it", parse, b"", was="parse"), dict[str, int])
        assert_type(plain.step_with(was="parse")("parse it", parse, b""), dict[str, int])
        assert_type(await ctx.patched("new"), bool)
        assert_type(plain.patched("new"), bool)
        assert_type(plain.step_with(retry=ff.RetryPolicy())("parse", parse, b""), dict[str, int])
        assert_type(await ctx.now(), datetime)
    """,
    "clients_give_the_results_of_the_tasks_they_submit": """
        assert_type(await client.submit(publish.options(idempotency_key="a"), 42, title="b"), ff.Run[str])
        assert_type(await client.submit("publish", 42), ff.Run[Any])
        assert_type(await client.submit_many(when, [1, 2]), list[ff.Run[datetime]])
        assert_type(sync.submit(publish, 42).result(), str)
        assert_type(sync.submit_many(count, [["a"]], priority=1), list[SyncRun[int]])
        assert_type(await ctx.submit(publish, 42), ff.Run[str])
        assert_type(plain.submit(publish, 42).result(), str)
    """,
    "a_task_and_a_flow_are_submitted_in_a_transaction_of_any_driver": """
        def of_psycopg(c: psycopg.Connection[Any], cursor: psycopg.Cursor[Any]) -> None:
            assert_type(publish.submit_in(c, 42, title="a"), ff.Run[str])
            assert_type(publish.submit_in(cursor, 42), ff.Run[str])
            assert_type(app.flow("f").submit_in(c, idempotency_key="a"), ff.FlowRun)
        async def of_psycopg_async(c: psycopg.AsyncConnection[Any], cursor: psycopg.AsyncCursor[Any]) -> None:
            assert_type(await publish.submit_in(c, 42), ff.Run[str])
            assert_type(await publish.submit_in(cursor, 42), ff.Run[str])
            assert_type(await app.flow("f").submit_in(c), ff.FlowRun)
        def of_sqlalchemy(c: sa.Connection, s: Session, scoped: scoped_session[Session]) -> None:
            assert_type(publish.submit_in(c, 42), ff.Run[str])
            assert_type(publish.submit_in(s, 42), ff.Run[str])
            assert_type(publish.submit_in(scoped, 42), ff.Run[str])
            assert_type(app.flow("f").submit_in(s), ff.FlowRun)
        async def of_sqlalchemy_async(c: AsyncConnection, s: AsyncSession) -> None:
            assert_type(await publish.submit_in(c, 42), ff.Run[str])
            assert_type(await publish.submit_in(s, 42), ff.Run[str])
            assert_type(await app.flow("f").submit_in(s), ff.FlowRun)
        assert_type(publish.options(priority=3).submit_in("default", 42), ff.Run[str])
        run: ff.Run[str] = await publish.submit_in(await asyncpg.connect(""), 42)
    """,
    "a_join_of_everything_that_ended_gives_outcomes": """
        flow = app.flow("night")
        assert_type(ff.all_settled(flow.add(publish, 1), [flow.add(count, [])]), Join)
        def told(outcomes: list[ff.Settled[int]]) -> None:
            for one in outcomes:
                match one:
                    case ff.Succeeded(value):
                        assert_type(value, int)
                    case ff.Failed(message) | ff.Expired(message):
                        assert_type(message, str)
                    case ff.Cancelled(reason):
                        assert_type(reason, str)
                    case ff.Skipped():
                        pass
                    case _:
                        assert_never(one)
        flow.add(app.task(told), ff.all_settled(flow.add(count, [])))
    """,
    "a_map_gives_what_its_function_gives": """
        assert_type(await ctx.map(load, ["a", "b"], limit=5), list[bytes])
        assert_type(await ctx.map(parse, [b"a"], name="x"), list[dict[str, int]])
        assert_type(plain.map(parse, [b"a"]), list[dict[str, int]])
    """,
    "hooks_are_tasks_or_their_names": """
        @app.task
        async def tell(failure: ff.Failure | ff.Escalation) -> None:
            assert_type(failure.execution_id, ff.ExecutionId)
        app.task(on_failure=tell, on_escalate="tell")
        publish.options(on_failure=None)
        ff.App(on_failure="tell", everywhere=True)
    """,
    "arguments_of_nodes_and_schedules_are_values_or_what_stands_for_them": """
        flow = app.flow("night")
        text, number = flow.add(publish, 1), flow.add(when, day=1, hour=2)
        flow.add(publish, 1, "title", name="a")
        flow.add(publish, 2, text, after=[number])
        flow.add(publish, 3, title="by name", priority=4)
        flow.add(fetch, ff.any_of(text))
        flow.add(publish, draft_id=7)
        flow.map(fetch, ["a", "b"])
        flow.map(fetch, [text])
        flow.map(publish, [(1, text), (2, "b")])
        flow.map(count, [[text, "a"], ["b"]])
        app.schedule(publish, 42, "title", cron="0 7 * * *")
        app.schedule(publish, 42, title="by name", every="1 hour", priority=2)
        app.schedule(publish, draft_id=42, every="1 hour")
    """,
    "lists_and_changes_take_filters": """
        async for item in client.all(kind="publish", states=["failed", ff.State.EXPIRED]):
            assert_type(item, ExecutionInfo)
        for each in sync.all(lane="slow"):
            assert_type(each, ExecutionInfo)
        assert_type(await client.cancel_all("why", tag=("a", "b"), progress=print), int)
        assert_type(sync.replay_all(namespace="tenant"), int)
        await client.failures(limit=5, created_from=datetime(2030, 1, 1))
    """,
    "a_flow_is_made_of_nodes_that_know_their_results": """
        flow = app.flow("night", namespace="shop", tags={"a": "b"})
        assert_type(flow, ff.Flow)
        first = flow.add(publish, 42, title="a", priority=3, name="first")
        assert_type(first, ff.Node[str])
        assert_type(flow.add(count, [first, "b"], after=[first]), ff.Node[int])
        assert_type(flow.map(when, [1, 2], hour=9, after=first), list[ff.Node[datetime]])
        assert_type(flow.map(when, [flow.add(count, [])], hour=9), list[ff.Node[datetime]])
        mixed: list[Any] = [1, (2,), first]
        assert_type(flow.map(when, mixed), list[ff.Node[datetime]])
        assert_type(flow.add(fetch, first), ff.Node[bytes])
        sub = flow.include(app.flow("inner"), after=first, name="inner")
        flow.add(when, sub["x"], after=sub)
        flow.add(when, 1, after=[sub, first])
        grown = ctx.flow()
        grown.add(count, [grown.here, grown.member("00000000-0000-0000-0000-000000000001")])
        more = plain.flow()
        more.add(count, [])
    """,
    "joins_of_nodes_and_conditions_of_waits": """
        flow = app.flow("night")
        a, b = flow.add(publish, 1), flow.add(count, [])
        assert_type(ff.all_of(a, b), Join)
        assert_type(ff.all_of([a, b], a), Join)
        assert_type(ff.all_of(node for node in (a, b)), Join)
        assert_type(ff.any_of(a, b, cancel_rest=True), Join)
        assert_type(ff.quorum(1, [a], b, cancel_rest=True), Join)
        flow.add(count, ff.quorum(1, a, b), after=ff.any_of(a, b))
        flow.map(count, [[]], after=ff.all_of(flow.include(app.flow("inner"))))
        assert_type(ff.all_of("a", ff.on("b")), AllMet)
        assert_type(ff.any_of("a", "b", n=2, name="x"), Count)
        await ctx.wait_for(ff.all_of("a", "b"))
        await ctx.wait_for(ff.any_of("a", "b"))
    """,
    "waits_give_payloads_of_the_type_that_is_asked_for": """
        assert_type(await ctx.wait_for("a", payload=Http), ff.Signal[Http])
        assert_type(await ctx.wait_for("a", payload=int, timeout=5, default=None), ff.Signal[int] | None)
        assert_type(await ctx.wait_for(ff.on("a", "b"), payload=int, on_timeout="fail"), ff.Signal[int])
        assert_type(await ctx.wait_for("a"), ff.Signal[Any])
        assert_type(await ctx.wait_for(ff.all_of("a", "b"), payload=int), list[ff.Signal[int]])
        assert_type(await ctx.wait_for(ff.from_sources(2, "a"), timeout=5, default=""), list[ff.Signal[Any]] | str)
        assert_type(plain.wait_for("a", payload=int), ff.Signal[int])
        assert_type((plain.wait_for("a", payload=int)).payload, int)
        assert_type(plain.wait_for(ff.count_signals(2, "a"), payload=str), list[ff.Signal[str]])
        point = await ctx.waitpoint("a")
        assert_type(await point.wait(payload=Http), ff.Signal[Http])
        assert_type(await point.wait(payload=Http, timeout=5, default=0), ff.Signal[Http] | int)
        assert_type(await point.wait(), ff.Signal[Any])
        assert_type(await (await ctx.waitpoint("a", payload=int)).wait(), ff.Signal[int])
        assert_type(plain.waitpoint("a", payload=int).wait(), ff.Signal[int])
        assert_type(plain.waitpoint("a").wait(payload=str), ff.Signal[str])
    """,
    "answers_may_be_missing_where_the_type_says_so": """
        signal = await ctx.wait_for("a", payload=Http | None)
        assert_type(signal.payload, Http | None)
        run = await publish.submit(42)
        await run.approve(by="ann", payload=Http())
        await run.reject(reason="no", payload={"a": 1})
        sync.approve(run.id, payload=5)
        try:
            await run.signal(payload=5)
        except ff.PayloadRefused as refused:
            assert_type((refused.field, refused.problem, refused.allowed), tuple[str, str, str])
    """,
    "handles_of_flows_give_results_and_handles_of_nodes": """
        flow = app.flow("night")
        node = flow.add(count, [])
        run = await flow.submit(idempotency_key="a")
        assert_type(run, ff.FlowRun)
        assert_type(await run.result("5 minutes"), dict[str, Any])
        assert_type(run[node], ff.Run[int])
        assert_type(await run[node].result(), int)
        assert_type(run["count"], ff.Run[Any])
        assert_type(await run.states(), dict[str, ff.State])
        assert_type(await run.replay(), list[str])
        assert_type(await client.submit_flow(flow), ff.FlowRun)
        assert_type(client.flow(run.id), ff.FlowRun)
        assert_type(sync.submit_flow(flow).result(5), dict[str, Any])
        assert_type(sync.flow(run)[node].result(), int)
        assert_type(sync.flow(run).refresh(), SyncFlowRun)
        assert_type(plain.submit_flow(flow).result(), dict[str, Any])
        try:
            await run.result()
        except ff.FlowFailed as error:
            assert_type(error.failures, dict[str, ff.TaskFailed])
            assert_type(error.skipped, tuple[str, ...])
    """,
    "a_middleware_overrides_what_it_needs": """
        class Mine(Middleware):
            async def execute(self, task: object, proceed: Callable[[], Awaitable[Any]]) -> Any:
                return await proceed()

        ff.App(middleware=[Mine()])
    """,
}

NO_FIT = r"No overload variant of|Cannot infer value of type parameter|incompatible type"
BAD_TASKS = {
    "an_amount_that_is_no_integer": ("await ctx.usage(tokens=1.5)", r'incompatible type "float".*arg-type'),
    "a_budget_by_name_alone": ('publish.options(budget="team")', r'incompatible type "str".*arg-type'),
    "an_amount_that_is_text": ("ctx.spend(tokens='5')", r'incompatible type "str".*arg-type'),
    "an_unknown_word_at_the_limit": ('app.task(on_budget="stop")', r"on_budget|No overload variant"),
    "an_argument_of_another_type": (
        'await publish.submit("42")',
        r'incompatible type "str"; expected "int".*arg-type',
    ),
    "a_missing_argument": ("await publish.submit()", r'Missing positional argument "draft_id".*call-arg'),
    "an_argument_too_many": ('await publish.submit(1, "a", 2)', r"Too many arguments.*call-arg"),
    "an_argument_that_is_none": ("await when.submit(1, minute=5)", r'Unexpected keyword argument "minute".*call-arg'),
    "the_context_as_an_argument": ("await count.submit(plain)", r'incompatible type "SyncContext".*arg-type'),
    "a_result_of_another_type": (
        "number: int = await (await publish.submit(42)).result()",
        r'expression has type "str", variable has type "int".*assignment',
    ),
    "a_sync_result_of_another_type": (
        "number: int = sync.submit(publish, 42).result()",
        r'expression has type "str", variable has type "int".*assignment',
    ),
    "a_misspelt_option_of_a_task": (
        "publish.options(prioritty=5)",
        r'"prioritty" for "options".*did you mean "priority".*call-arg',
    ),
    "an_option_of_another_type": (
        'publish.options(priority="high")',
        r'incompatible type "str"; expected "int".*arg-type',
    ),
    "another_way_with_duplicates": (
        'publish.options(on_duplicate="ignore")',
        r"'return', 'raise', 'replace'.*arg-type",
    ),
    "a_misspelt_option_of_a_decorator": ('app.task(lanes="slow")', r'"lanes".*did you mean "lane".*call-overload'),
    "a_misspelt_option_of_an_app": ("ff.App(prioritty=5)", r'"prioritty" for "App".*did you mean "priority".*call-arg'),
    "a_misspelt_filter": ('await client.cancel_all("why", lanes="slow")', r'"lanes".*did you mean "lane".*call-arg'),
    "a_filter_of_another_type": ("client.all(kind=5)", r'incompatible type "int"; expected "str \| None".*arg-type'),
    "a_step_with_a_wrong_argument": (
        'await ctx.step("load", load, 5)',
        r'No overload variant of "step".*call-overload',
    ),
    "a_step_of_another_type": (
        'page: str = await ctx.step("load", load, "url")',
        r'No overload variant of "step".*call-overload',
    ),
    "an_async_step_in_a_plain_handler": (
        'plain.step("load", load, "url")',
        r"Coroutine.*must be used.*unused-coroutine",
    ),
    "a_node_of_another_type": (
        'node: ff.Node[int] = app.flow("f").add(publish, 1)',
        NO_FIT,
    ),
    "a_node_that_is_no_task": ('app.flow("f").add(load, "url")', NO_FIT),
    "an_argument_of_a_node_of_another_type": ('app.flow("f").add(publish, "42")', NO_FIT),
    "a_second_argument_of_another_type": ('app.flow("f").add(publish, 42, 43)', NO_FIT),
    "a_result_of_another_type_as_argument": (
        'flow = app.flow("f"); flow.add(fetch, flow.add(count, []))',
        NO_FIT,
    ),
    "an_argument_too_many_of_a_node": ('app.flow("f").add(count, [], 5)', NO_FIT),
    "an_item_of_another_type": ('app.flow("f").map(publish, ["a"])', NO_FIT),
    "an_argument_of_a_child_of_another_type": ('await ctx.submit(publish, "42")', r'incompatible type "str".*arg-type'),
    "an_argument_of_a_plain_child_of_another_type": (
        'plain.submit(publish, "42")',
        r'incompatible type "str".*arg-type',
    ),
    "an_argument_that_a_client_submits": ('await client.submit(publish, "42")', r'No overload variant of "submit"'),
    "an_argument_that_a_sync_client_submits": ('sync.submit(publish, "42")', r'No overload variant of "submit"'),
    "an_argument_that_a_schedule_submits": (
        'app.schedule(publish, "42", cron="@daily")',
        NO_FIT,
    ),
    "an_argument_of_another_type_in_a_transaction": (
        'publish.submit_in("default", "42")',
        r'No overload variant of "submit_in"',
    ),
    "a_submission_in_a_transaction_that_is_not_awaited": (
        "async def f(c: AsyncSession) -> None: publish.submit_in(c, 42)",
        r"must be used.*unused-coroutine",
    ),
    "an_item_of_a_map_of_another_type": ("await ctx.map(load, [5])", NO_FIT),
    "a_hook_that_is_no_task": ("publish.options(on_failure=5)", r'incompatible type "int".*arg-type'),
    "a_text_to_come_after": (
        'app.flow("f").add(publish, 1, after="publish")',
        r'"after".*incompatible type "str".*arg-type',
    ),
    "a_join_in_a_join": (
        'ff.all_of(ff.any_of(app.flow("f").add(publish, 1)))',
        r'No overload variant of "all_of".*"Join".*call-overload',
    ),
    "signals_among_nodes": (
        'ff.quorum(1, app.flow("f").add(publish, 1), "key")',
        r'incompatible type "str".*arg-type',
    ),
    "a_count_of_nodes_without_a_quorum": (
        'ff.any_of(app.flow("f").add(publish, 1), n=2)',
        r'No overload variant of "any_of".*call-overload',
    ),
    "a_node_of_a_run_of_another_type": (
        "flow = app.flow('f'); text: str = await (await flow.submit())[flow.add(count, [])].result()",
        r'variable has type "str".*assignment',
    ),
    "a_flow_that_is_not_awaited": ('app.flow("f").submit()', r"must be used.*unused-coroutine"),
    "a_result_that_is_not_awaited": ("(await publish.submit(42)).result()", r"must be used.*unused-coroutine"),
}

GOOD = {
    "a_claim_may_find_nothing": """
        found = await engine.claim(worker_id="pool", worker_instance_id="pool-1")
        assert_type(found, Claimed | None)
        if found is not None:
            await engine.complete(found.handle, b"done")
    """,
    "create_answers_created_or_duplicate": """
        answer = await engine.create_execution(execution_kind="report", delay_until=timedelta(minutes=5))
        match answer:
            case Created(execution_id, state):
                assert_type(state, ff.State)
            case Duplicate(execution_id):
                pass
        assert_type(answer.execution_id, ff.ExecutionId)
    """,
    "a_batch_answers_one_verdict_per_item": """
        for verdict in await engine.create_many([NewExecution(execution_kind="report")]):
            if isinstance(verdict, ff.FlowFabricError):
                raise verdict
            assert_type(verdict, Created | Duplicate)
    """,
    "holders_and_operators_end_an_execution": """
        await engine.complete(claimed.handle, b"done", result_encoding="text")
        await engine.complete(claimed.handle.fence)
        await engine.fail(Operator(claimed.execution_id), "gone", failure_class=FailureClass.PERMANENT)
    """,
    "policies_take_seconds_or_timedeltas": """
        ExecutionPolicy(
            retry_policy=ff.RetryPolicy(max_retries=5, backoff=ff.Exponential(initial=1, maximum=timedelta(minutes=1))),
            timeout_policy=TimeoutPolicy(attempt_timeout=30),
        )
    """,
    "events_are_followed_with_their_own_cursor": """
        page = await engine.read_events(family="lease", after=EventCursor())
        assert_type(page.next_cursor, EventCursor | None)
        assert_type(page.items[0].occurred_at, datetime)
    """,
    "connecting_gives_the_class_it_was_asked_of": """
        class Mine(ff.Engine):
            pass

        async with await Mine.connect() as mine, ff.Duties(mine):
            assert_type(mine, Mine)
    """,
    "a_lost_lease_says_which": """
        try:
            await engine.renew(claimed.handle)
        except ff.LeaseLost as lost:
            assert_type(lost.kind, str)
            assert_type(lost.execution_id, UUID | None)
    """,
}

# The code, and what the type checker must say about it.
BAD = {
    "an_unchecked_claim": (
        """
        found = await engine.claim(worker_id="pool", worker_instance_id="pool-1")
        await engine.complete(found.handle)
        """,
        r'has no attribute "handle".*union-attr',
    ),
    "a_kind_is_required": ("await engine.create_execution()", r'Missing named argument "execution_kind".*call-arg'),
    "a_misspelt_option": (
        'await engine.create_execution(execution_kind="report", delay=5)',
        r'Unexpected keyword argument "delay".*call-arg',
    ),
    "text_as_payload": (
        'await engine.create_execution(execution_kind="report", input_payload="text")',
        r'incompatible type "str"; expected "bytes".*arg-type',
    ),
    "an_id_in_place_of_an_authority": (
        "await engine.complete(claimed.execution_id)",
        r'incompatible type "ExecutionId".*arg-type',
    ),
    "an_operator_who_renews": (
        "await engine.renew(Operator(claimed.execution_id))",
        r'incompatible type "Operator".*arg-type',
    ),
    "a_bare_uuid_in_place_of_an_id": (
        "await engine.read_execution(UUID(int=0))",
        r'incompatible type "UUID"; expected "ExecutionId".*arg-type',
    ),
    "a_changed_record": ("claimed.handle.lease_epoch = 7", r'"lease_epoch".*read-only.*misc'),
    "a_cursor_of_another_list": (
        "await engine.read_events(after=(await engine.find_executions()).next_cursor)",
        r"incompatible type \"Place \| None\".*arg-type",
    ),
}


ALL_GOOD = {**GOOD, **GOOD_TASKS}
ALL_BAD = {**BAD, **BAD_TASKS}


def _program(name: str) -> str:
    body = ALL_GOOD[name] if name in ALL_GOOD else ALL_BAD[name][0]
    head = APP if name in GOOD_TASKS or name in BAD_TASKS else HEAD
    return head + indent(dedent(body).strip() + "\n", "    ")


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says about each program; all of them in one run, because most of a run is the package."""
    folder = tmp_path_factory.mktemp("programs")
    programs = [*ALL_GOOD, *ALL_BAD]
    for name in programs:
        (folder / f"{name}.py").write_text(_program(name))
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = True\npretty = False\n[mypy-asyncpg.*]\nignore_missing_imports = True\n"
    )
    checked = ROOT / ".mypy_cache"  # what `make types` knows of the package; mypy uses what has not changed since
    if checked.is_dir():
        shutil.copytree(checked, folder / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(folder / "cache"), "."],
        cwd=folder,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, str] = dict.fromkeys(programs, "")
    for line in done.stdout.splitlines():
        match = re.match(r"(\w+)\.py:(\d+): error: (.*)", line)
        if match is not None and match[1] in found:
            found[match[1]] += match[3] + "\n"
        else:
            assert match is None, f"an error outside the programs: {line}"
    return found


@pytest.mark.parametrize("name", ALL_GOOD)
def test_good_code_type_checks(name: str, messages: dict[str, str]) -> None:
    assert messages[name] == ""


@pytest.mark.parametrize("name", ALL_BAD)
def test_bad_code_is_found(name: str, messages: dict[str, str]) -> None:
    assert re.search(ALL_BAD[name][1], messages[name]), messages[name] or "nothing was found"
    assert messages[name].count("\n") == 1, "one mistake, one message"
