"""Middleware without a database: the order of a chain, and the effects of each middleware of the package."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import io
import json
import logging
import pickle
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, get_args

import msgspec
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import flowfabric as ff
from flowfabric import middleware as mw
from flowfabric._taxonomy import TAXONOMY
from flowfabric.engine.siblings import SiblingPass
from flowfabric.engine.timers import Round
from flowfabric.errors import (
    Conflict,
    ConnectionFailed,
    Contention,
    ExecutionNotActive,
    Interrupted,
    Reject,
    RetryLater,
    TransportError,
    Unavailable,
    ValidationFailed,
)
from flowfabric.middleware import metrics, tracing
from flowfabric.middleware.base import LOCAL, OutcomeWord, chain_call, chain_claim, outcome_of, type_name
from flowfabric.middleware.limits import Bucket
from flowfabric.middleware.series import BUCKETS
from flowfabric.values.budget import HardBreach
from flowfabric.values.checks import check_tag_key
from flowfabric.values.graph import FlowSubmitted
from flowfabric.values.ids import BudgetId, FlowId, mint_execution_id
from flowfabric.values.lease import Renewed
from flowfabric.values.quota import RateExceeded
from flowfabric.values.words import GroupRepair
from tests.each import each

SECRET = "4111-1111"
CREATED = datetime(2030, 1, 1, tzinfo=UTC)
RENEWED = Renewed(expires_at=CREATED, lease_epoch=1)


class Options(msgspec.Struct, frozen=True):
    tags: dict[str, str] | None = None
    lane: str = "default"

    def replace(self, **changes: Any) -> Options:
        return msgspec.structs.replace(self, **changes)


class Submission(msgspec.Struct, frozen=True):
    kind: str = "send"
    args: tuple[Any, ...] = (SECRET,)
    kwargs: dict[str, Any] = {}
    options: Options = Options()

    def replace(self, **changes: Any) -> Submission:
        return msgspec.structs.replace(self, **changes)


class Run(msgspec.Struct, frozen=True):
    execution_id: ff.ExecutionId
    submission: mw.Submission
    is_new: bool = True


class Task(msgspec.Struct, frozen=True):
    execution_id: ff.ExecutionId
    tags: Mapping[str, str] = {}
    attempt_index: int = 0
    kind: str = "send"
    lane_id: str = "default"
    created_at: datetime = CREATED
    log: logging.Logger = logging.getLogger("test")
    is_resumed: bool = False
    is_parked: bool = False


def new_id() -> ff.ExecutionId:
    return mint_execution_id(namespace="", idempotency_key=None, flow_id=None, count=256)


async def store(submission: mw.Submission) -> Run:
    return Run(new_id(), submission, is_new=submission.kind != "known")


def raising(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def proceed() -> Any:
        raise error

    return proceed


def answering(value: Any) -> Callable[[], Awaitable[Any]]:
    async def proceed() -> Any:
        return value

    return proceed


class Time:
    """A clock that moves when told, and with every sleep."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        await asyncio.sleep(0)


# Chains


class Noted(mw.Middleware):
    def __init__(self, name: str, into: list[str]) -> None:
        self.name = name
        self.into = into

    def note(self, what: str) -> None:
        self.into.append(f"{self.name} {what}")


class Everything(Noted):
    async def submit(self, submission: mw.Submission, proceed: Callable[[mw.Submission], Awaitable[mw.Run]]) -> mw.Run:
        self.note("submit")
        tags = {**(submission.options.tags or {}), f"by.{self.name}": "yes"}
        try:
            return await proceed(submission.replace(options=submission.options.replace(tags=tags)))
        finally:
            self.note("submitted")

    async def execute(self, task: mw.Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        self.note(f"execute {task.kind}")
        answer = await proceed()
        self.note("executed")
        return f"{self.name}({answer})"

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        self.note(method)
        answer = await proceed()
        self.note("called")
        return answer


async def test_the_first_middleware_is_the_outermost() -> None:
    noted: list[str] = []
    both = [Everything("a", noted), Everything("b", noted)]

    run = await mw.chain_submit(both, store)(Submission())
    assert isinstance(run, Run)
    assert run.submission.options.tags == {"by.a": "yes", "by.b": "yes"}
    assert noted == ["a submit", "b submit", "b submitted", "a submitted"]

    noted.clear()
    assert await mw.chain_execute(both, Task(new_id()), answering("x"))() == "a(b(x))"
    assert noted == ["a execute send", "b execute send", "b executed", "a executed"]

    noted.clear()
    assert await chain_call(both, "claim", answering("x"))() == "x"
    assert noted == ["a claim", "b claim", "b called", "a called"]


async def test_without_a_hook_the_chain_is_the_thing_itself() -> None:
    class Nothing(mw.Middleware):
        pass

    final = answering(1)
    for none in ([], (), [mw.Middleware()], [Nothing(), mw.Middleware()]):
        assert mw.chain_submit(none, store) is store
        assert mw.chain_execute(none, Task(new_id()), final) is final
        assert mw.overriding(none, "call") == []


@pytest.mark.parametrize("hook", ["submit", "execute", "call"])
async def test_a_middleware_is_left_out_of_the_hooks_it_does_not_override(hook: Any) -> None:
    class Whole(mw.Middleware):
        pass

    one = type("One", (mw.Middleware,), {hook: getattr(Everything, hook)})()
    assert mw.overriding([Whole(), one], hook) == [one]
    assert [h for h in ("submit", "execute", "call") if mw.overriding([one], h)] == [hook]
    derived = type("Derived", (type(one),), {})()
    assert mw.overriding([derived], hook) == [derived]


async def test_hooks_that_are_not_overridden_pass_everything_on() -> None:
    plain = mw.Middleware()
    run = await plain.submit(submission := Submission(), store)
    assert isinstance(run, Run)
    assert run.submission is submission
    assert await plain.execute(Task(new_id()), answering(3)) == 3
    assert await plain.call("ping", answering(4)) == 4


async def test_a_hook_may_refuse_or_try_again() -> None:
    tries = iter([ValueError("no"), ValueError("no"), None])
    ran: list[str] = []

    class Again(mw.Middleware):
        async def execute(self, task: mw.Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
            while True:
                try:
                    return await proceed()
                except ValueError:
                    continue

    class Refuse(mw.Middleware):
        async def execute(self, task: mw.Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
            raise PermissionError

    async def handler() -> str:
        ran.append("handler")
        if (error := next(tries)) is not None:
            raise error
        return "done"

    noted: list[str] = []
    assert await mw.chain_execute([Again(), Everything("in", noted)], Task(new_id()), handler)() == "in(done)"
    assert ran == ["handler"] * 3
    assert noted == ["in execute send"] * 3 + ["in executed"]

    with pytest.raises(PermissionError):
        await mw.chain_execute([Refuse()], Task(new_id()), handler)()
    assert ran == ["handler"] * 3


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        (mw.Middleware(), "got Middleware"),
        (5, "got int"),
        ([mw.Middleware(), print], "contains builtin_function_or_method"),
        ([mw.Metrics], "contains the class Metrics"),
        ("ab", "contains str"),
    ],
)
def test_a_list_of_middlewares_holds_nothing_else(given_: Any, problem: str) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        mw.check_middlewares(given_)
    assert (refused.value.field, refused.value.problem) == ("middleware", problem)
    with pytest.raises(ff.InvalidInput):
        mw.layer(ff.Engine(None, None), given_)  # type: ignore[arg-type]


def test_middlewares_may_come_from_anything_that_gives_them_in_order() -> None:
    two = [mw.Metrics(), mw.Logging()]
    assert mw.check_middlewares(each for each in two) == tuple(two)


# How a handler may end, whether it was parked then, and the word for it.
ENDS: list[tuple[BaseException | None, bool, str]] = [
    (None, False, "ok"),
    (None, True, "ok"),
    (ValueError(SECRET), False, "error"),
    (ValueError(SECRET), True, "error"),
    (ff.LeaseLost(), False, "error"),
    (Reject(SECRET), False, "error"),
    (TimeoutError(SECRET), False, "timeout"),
    (RetryLater(SECRET), False, "retry"),
    (asyncio.CancelledError(SECRET), False, "cancelled"),
    (asyncio.CancelledError(SECRET), True, "parked"),
    (Interrupted(SECRET), False, "cancelled"),
    (Interrupted(SECRET), True, "parked"),
    (KeyboardInterrupt(), False, "cancelled"),
]
ends = pytest.mark.parametrize(("error", "parked", "outcome"), ENDS)


@ends
def test_an_end_is_named_by_one_of_a_few_words(error: BaseException | None, parked: bool, outcome: str) -> None:
    assert outcome_of(error, Task(new_id(), is_parked=parked)) == outcome
    assert outcome_of(error) == ("cancelled" if outcome == "parked" else outcome)


def test_a_context_that_does_not_tell_was_cancelled_when_it_was_cancelled() -> None:
    class Silent(mw.Running):
        pass

    assert outcome_of(asyncio.CancelledError(), Silent()) == "cancelled"


def test_every_outcome_can_come_about() -> None:
    assert {outcome for *_, outcome in ENDS} == set(get_args(OutcomeWord))


# The layered engine


def operations(cls: type) -> dict[str, Callable[..., Any]]:
    """Every public async operation of an engine, found another way than the layers do."""
    found = {name: getattr(cls, name) for name in dir(cls) if name[0] != "_"}
    return {
        name: member
        for name, member in found.items()
        if inspect.iscoroutinefunction(member) and not inspect.ismethod(member)  # a class method is bound already
    }


OPERATIONS = operations(ff.Engine)


def spied() -> tuple[ff.Engine, list[tuple[Any, ...]]]:
    """An engine that notes what reaches it."""
    reached: list[tuple[Any, ...]] = []

    def spy(name: str) -> Callable[..., Any]:
        async def operation(self: ff.Engine, *args: Any, **kwargs: Any) -> Any:
            reached.append((self, name, args, kwargs))
            return f"answer of {name}"

        return operation

    cls = type("Spied", (ff.Engine,), {name: spy(name) for name in OPERATIONS})
    return cls(None, None), reached


def test_the_engine_has_operations_to_find() -> None:
    assert len(OPERATIONS) > 45
    assert {"create_execution", "claim_many", "complete", "read_events", "run_timers", "close", "ping"} <= set(
        OPERATIONS
    )


def test_nothing_that_is_awaited_hides_behind_an_ordinary_function() -> None:
    others = {
        name: str(inspect.signature(member).return_annotation)
        for name in dir(ff.Engine)
        if name[0] != "_" and name not in OPERATIONS and inspect.isfunction(member := getattr(ff.Engine, name))
    }
    assert others
    assert [name for name, returns in others.items() if returns.startswith(("Awaitable", "Coroutine"))] == []


@each("name", OPERATIONS)
async def test_every_operation_passes_the_hooks_with_its_arguments(name: str) -> None:
    engine, reached = spied()
    noted: list[str] = []
    layered = mw.layer(engine, [Everything("a", noted), mw.Middleware(), Everything("b", noted)])

    assert await getattr(layered, name)(1, two=2) == f"answer of {name}"

    assert reached == [(layered, name, (1,), {"two": 2})]
    assert vars(layered) is vars(engine)
    assert noted == [f"a {name}", f"b {name}", "b called", "a called"]


@each("name", OPERATIONS)
async def test_a_hook_can_keep_every_operation_from_the_engine(name: str) -> None:
    class Refuse(mw.Middleware):
        async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
            raise PermissionError(method)

    engine, reached = spied()
    with pytest.raises(PermissionError, match=f"^{name}$"):
        await getattr(mw.layer(engine, [Refuse()]), name)()
    assert reached == []


def test_a_layered_engine_is_an_engine_on_the_same_connections() -> None:
    engine, _ = spied()
    layered = mw.layer(engine, [Everything("a", [])])
    assert isinstance(layered, ff.Engine)
    assert isinstance(layered, type(engine))
    assert layered is not engine
    layered.attach("duty")
    assert engine._background == ["duty"]
    assert layered.backend_label() == "postgres"
    assert layered.capabilities() == engine.capabilities()


def test_signatures_and_words_of_operations_stay() -> None:
    layered = mw.layer(ff.Engine(None, None), [Everything("a", [])])  # type: ignore[arg-type]
    for name, member in OPERATIONS.items():
        wrapped = getattr(layered, name)
        assert inspect.signature(wrapped) == inspect.signature(member.__get__(layered))
        assert wrapped.__doc__ == member.__doc__
        assert inspect.iscoroutinefunction(wrapped)


def test_an_engine_without_call_hooks_is_not_layered() -> None:
    engine, _ = spied()
    assert mw.layer(engine, []) is engine
    assert mw.layer(engine, [mw.Logging(), mw.RateLimit(5, on="submit"), mw.Tracing(calls=False)]) is engine


async def test_a_copy_of_a_layered_engine_passes_the_hooks_and_uses_its_own_connections() -> None:
    engine, reached = spied()
    noted: list[str] = []
    bound = copy.copy(mw.layer(engine, [Everything("a", noted)]))
    bound._database = "of one transaction"  # type: ignore[assignment]
    await bound.ping()
    assert noted == ["a ping", "a called"]
    assert [one._database for one, *_ in reached] == ["of one transaction"]
    assert engine._database is None


async def test_layers_can_be_laid_on_layers() -> None:
    engine, reached = spied()
    noted: list[str] = []
    below = mw.layer(engine, [Everything("below", noted)])
    above = mw.layer(below, [Everything("above", noted)])
    await above.ping()
    assert noted == ["above ping", "below ping", "below called", "above called"]
    assert len(reached) == 1


async def test_connecting_through_a_layered_engine_gives_an_engine_without_layers() -> None:
    class Made(ff.Engine):
        @classmethod
        async def connect(cls, *args: Any, **options: Any) -> Any:
            return cls

    layered = mw.layer(Made(None, None), [Everything("a", [])])  # type: ignore[arg-type]
    assert await type(layered).connect() is Made
    assert await layered.connect() is Made


async def test_only_an_engine_can_be_layered() -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        mw.layer(object(), [])  # type: ignore[arg-type]
    assert refused.value.field == "engine"


# Tracing


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(spans))
    return made


def finished(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


async def submitted(tracer: mw.Tracing, submission: Submission | None = None) -> Run:
    run = await mw.chain_submit([tracer], store)(submission or Submission())
    assert isinstance(run, Run)
    return run


def tags_of(run: Run) -> dict[str, str]:
    return dict(run.submission.options.tags or {})


async def test_the_run_of_a_handler_joins_the_trace_of_its_submission(
    spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    tracer = mw.Tracing(tracer_provider=provider)
    with provider.get_tracer("user").start_as_current_span("request"):
        run = await submitted(tracer)
    task = Task(run.execution_id, tags_of(run), attempt_index=2)
    await mw.chain_execute([tracer], task, lambda: chain_call([tracer], "progress", answering(None))())()

    found = finished(spans)
    request, submit = found["request"], found["flowfabric.submit send"]
    execute, call = found["flowfabric.execute send"], found["flowfabric.call progress"]
    assert len({span.context.trace_id for span in found.values() if span.context}) == 1
    assert submit.parent == request.context
    assert execute.parent is not None
    assert submit.context is not None
    assert execute.parent.span_id == submit.context.span_id
    assert execute.parent.is_remote
    assert call.parent == execute.context
    assert [s.kind for s in (submit, execute, call)] == [SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT]
    assert execute.attributes == {
        "flowfabric.kind": "send",
        "flowfabric.execution_id": str(run.execution_id),
        "flowfabric.attempt": 3,
        "flowfabric.lane": "default",
        "flowfabric.outcome": "ok",
    }
    assert submit.attributes is not None
    assert submit.attributes["flowfabric.execution_id"] == str(run.execution_id)
    assert call.attributes == {"flowfabric.method": "progress", "flowfabric.outcome": "ok"}
    assert {span.status.status_code for span in found.values()} == {StatusCode.UNSET}


async def test_a_link_points_to_the_submission_from_a_trace_of_its_own(
    spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    tracer = mw.Tracing(tracer_provider=provider, link=True)
    run = await submitted(tracer)
    await mw.chain_execute([tracer], Task(run.execution_id, tags_of(run)), answering(1))()
    submit, execute = finished(spans)["flowfabric.submit send"], finished(spans)["flowfabric.execute send"]
    assert execute.parent is None
    assert submit.context is not None
    assert execute.context is not None
    assert execute.context.trace_id != submit.context.trace_id
    assert [link.context.span_id for link in execute.links] == [submit.context.span_id]


async def test_the_context_travels_in_tags_that_may_be_used_as_such(provider: TracerProvider) -> None:
    state = trace.TraceState([("vendor", "x1")])
    parent = trace.SpanContext(5, 6, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=state)
    with trace.use_span(trace.NonRecordingSpan(parent)):
        run = await submitted(mw.Tracing(tracer_provider=provider), Submission(options=Options({"own": "1"}, "slow")))
    tags = tags_of(run)
    assert set(tags) == {"own", "trace.parent", "trace.state"}
    assert tags["trace.parent"].startswith(f"00-{5:032x}-")
    assert tags["trace.state"] == "vendor=x1"
    assert run.submission.options == Options(tags, "slow")
    assert all(check_tag_key(tag) for tag in tracing.TAGS.values())


async def test_a_context_that_was_handed_on_in_tags_is_replaced_as_a_whole(provider: TracerProvider) -> None:
    old = {"trace.parent": f"00-{7:032x}-{8:016x}-01", "trace.state": "vendor=old", "own": "1"}
    tags = tags_of(await submitted(mw.Tracing(tracer_provider=provider), Submission(options=Options(old))))
    assert set(tags) == {"trace.parent", "own"}
    assert tags["trace.parent"] != old["trace.parent"]


async def test_without_a_configured_library_nothing_is_added() -> None:
    tracer = mw.Tracing(tracer_provider=trace.NoOpTracerProvider())
    run = await submitted(tracer, submission := Submission())
    assert run.submission is submission
    assert await mw.chain_execute([tracer], Task(run.execution_id), answering(1))() == 1


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"trace.parent": ""},
        {"trace.parent": "nonsense"},
        {"trace.parent": f"00-{0:032x}-{0:016x}-01"},
        {"trace.state": "a=b"},
    ],
)
@pytest.mark.parametrize("link", [False, True])
async def test_a_context_that_cannot_be_read_is_as_good_as_none(
    spans: InMemorySpanExporter, provider: TracerProvider, tags: dict[str, str], link: bool
) -> None:
    tracer = mw.Tracing(tracer_provider=provider, link=link)
    with provider.get_tracer("user").start_as_current_span("worker"):
        assert await mw.chain_execute([tracer], Task(new_id(), tags), answering(1))() == 1
    execute = finished(spans)["flowfabric.execute send"]
    assert execute.parent == finished(spans)["worker"].context
    assert not execute.links


async def test_a_vendor_state_that_cannot_be_read_does_not_lose_the_trace(
    spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    tags = {"trace.parent": f"00-{7:032x}-{8:016x}-01", "trace.state": "=,\0"}
    await mw.chain_execute([mw.Tracing(tracer_provider=provider)], Task(new_id(), tags), answering(1))()
    parent = finished(spans)["flowfabric.execute send"].parent
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (7, 8)


@pytest.mark.parametrize(("error", "parked", "outcome"), [end for end in ENDS if end[0] is not None])
async def test_a_span_names_the_class_of_an_error_and_not_its_text(
    spans: InMemorySpanExporter, provider: TracerProvider, error: BaseException, parked: bool, outcome: str
) -> None:
    tracer = mw.Tracing(tracer_provider=provider)

    async def refuse(submission: mw.Submission) -> mw.Run:
        raise error

    for step in (
        lambda: mw.chain_execute([tracer], Task(new_id(), is_parked=parked), raising(error))(),
        lambda: mw.chain_submit([tracer], refuse)(Submission()),
        lambda: chain_call([tracer], "ping", raising(error))(),
    ):
        with pytest.raises(type(error)) as caught:
            await step()
        assert caught.value is error
    assert len(finished(spans)) == 3
    bad = outcome in ("error", "timeout")
    for span in finished(spans).values():
        assert span.attributes is not None
        is_handler = span.name == "flowfabric.execute send"
        assert span.attributes["flowfabric.outcome"] == (outcome if is_handler else outcome_of(error))
        assert span.status.status_code is (StatusCode.ERROR if bad else StatusCode.UNSET)
        assert span.attributes.get("error.type") == (type_name(error) if bad else None)
        assert [dict(event.attributes or {}) for event in span.events] == (
            [{"exception.type": type_name(error)}] if bad else []
        )
        assert span.attributes.get("flowfabric.error.kind") == getattr(error, "kind", None)
        assert SECRET not in span.to_json()


async def test_tracing_can_leave_engine_calls_out(provider: TracerProvider) -> None:
    assert mw.overriding([mw.Tracing(tracer_provider=provider)], "call")
    quiet = mw.Tracing(tracer_provider=provider, calls=False)
    assert not mw.overriding([quiet], "call")
    assert mw.overriding([quiet], "submit")
    assert mw.overriding([quiet], "execute")


@pytest.mark.parametrize(
    ("make", "module", "library", "extra"),
    [
        (mw.Tracing, "opentelemetry", "opentelemetry-api", "otel"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], module: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{make.__name__} needs {library}; .*flowfabric\[{extra}\]"):
        make()


# Metrics

FAMILIES = {row.family for row in TAXONOMY}
CATEGORIES = {"not_found", "validation", "contention", "conflict", "state", "transport", "unavailable"}


@each(
    ("method", "outcome", "counted"),
    [
        ("deliver_signal", ValidationFailed("invalid_token", "invalid_token"), 1),
        ("try_deliver", ValidationFailed("invalid_token", "token_expired"), 1),
        ("deliver_signal", ValidationFailed("payload_too_large"), 0),
        ("probe_waitpoint", "mismatch", 1),
        ("probe_waitpoint", "ok", 0),
        ("probe_waitpoint", "unknown", 0),
    ],
)
def test_tokens_that_do_not_verify_are_counted(method: str, outcome: Any, counted: int) -> None:
    sink = mw.MemorySink()

    async def operation() -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def called() -> None:
        with contextlib.suppress(ValidationFailed):
            await chain_call([mw.Metrics(sink)], method, operation)()

    asyncio.run(called())
    series = f'flowfabric_token_failures_total{{method="{method}"}}'
    assert sink.snapshot().counts.get(series, 0) == counted


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (None, "ok"),
        (ff.NotFound("execution"), "not_found"),
        (ff.InvalidInput("x"), "validation"),
        (mw.RateLimited("ping", 1, 1), "contention"),
        (ExecutionNotActive(), "contention"),
        (Conflict("cycle_detected"), "conflict"),
        (ff.LeaseLost(), "state"),
        (ConnectionFailed(), "transport"),
        (mw.CircuitOpen("ping", 1), "transport"),
        (Unavailable("x"), "unavailable"),
        (ff.TimedOut("x", 1), "unknown"),
        (ValueError(), "unknown"),
        (TimeoutError(), "unknown"),
        (RetryLater(), "unknown"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_an_engine_call_is_timed_by_method_and_category(error: BaseException | None, word: str) -> None:
    time = Time()
    sink = mw.MemorySink()
    meter = mw.Metrics(sink, clock=time)

    async def operation() -> None:
        time.now += 0.25
        if error is not None:
            raise error

    try:
        await chain_call([meter], "claim", operation)()
    except BaseException as caught:
        assert caught is error
    else:
        assert error is None
    seen = sink.snapshot()
    assert seen.counts == {}
    assert list(seen.timings) == [f'flowfabric_call_seconds{{method="claim",outcome="{word}"}}']
    assert seen.timings.popitem()[1].seconds == 0.25


def test_every_category_is_a_family_of_errors() -> None:
    assert CATEGORIES < FAMILIES
    assert metrics._CATEGORIES == CATEGORIES


@ends
async def test_a_run_is_counted_by_kind_and_outcome(error: BaseException | None, parked: bool, outcome: str) -> None:
    time = Time()
    sink = mw.MemorySink()
    meter = mw.Metrics(sink, clock=time, now=lambda: CREATED + timedelta(seconds=3))

    async def handler() -> None:
        time.now += 2
        if error is not None:
            raise error

    try:
        await mw.chain_execute([meter], Task(new_id(), is_parked=parked), handler)()
    except BaseException as caught:
        assert caught is error
    seen = sink.snapshot()
    lane = Task(new_id()).lane_id
    by_lane = {} if outcome == "parked" else {f'flowfabric_attempts_total{{lane="{lane}",outcome="{outcome}"}}': 1}
    assert seen.counts == {f'flowfabric_executions_total{{kind="send",outcome="{outcome}"}}': 1, **by_lane}
    whole = {f'flowfabric_end_to_end_seconds{{lane="{lane}"}}': 3.0} if outcome == "ok" else {}
    assert {series: timing.seconds for series, timing in seen.timings.items()} == {
        'flowfabric_execution_seconds{kind="send"}': 2.0,
        'flowfabric_queue_seconds{kind="send"}': 3.0,
        **whole,
    }


LOCKED = Contention("execution_locked", "another transaction has it")


@each(
    "answer",
    [[RENEWED, ff.LeaseLost(), ExecutionNotActive(), LOCKED, Unavailable("x")], ([RENEWED], None), RENEWED],
)
async def test_renewals_are_counted_by_what_became_of_the_lease(answer: Any) -> None:
    sink = mw.MemorySink()
    method = {list: "renew_many", tuple: "renew_and_heartbeat"}.get(type(answer), "renew")
    assert await chain_call([mw.Metrics(sink)], method, answering(answer))() is answer
    many = isinstance(answer, list)
    expected = {"ok": 1, "lost": 2, "locked": 1, "error": 1} if many else {"ok": 1}
    assert sink.snapshot().counts == {
        f'flowfabric_renewals_total{{outcome="{outcome}"}}': n for outcome, n in expected.items()
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.0),  # the worker's clock is behind
        ({"created_at": CREATED - timedelta(seconds=9)}, 8.0),
        ({"attempt_index": 1}, None),
        ({"is_resumed": True}, None),
    ],
)
async def test_the_time_in_the_queue_ends_with_the_first_start(fields: dict[str, Any], expected: float | None) -> None:
    sink = mw.MemorySink()
    meter = mw.Metrics(sink, now=lambda: CREATED - timedelta(seconds=1))
    await mw.chain_execute([meter], Task(new_id(), **fields), answering(None))()
    timing = sink.snapshot().timings.get('flowfabric_queue_seconds{kind="send"}')
    assert (None if timing is None else timing.seconds) == expected


async def test_only_what_was_accepted_and_is_new_counts_as_submitted() -> None:
    meter = mw.Metrics()

    async def refuse(submission: mw.Submission) -> mw.Run:
        raise ff.InvalidInput("no")

    await mw.chain_submit([meter], store)(Submission())
    await mw.chain_submit([meter], store)(Submission("other"))
    await mw.chain_submit([meter], store)(Submission("known"))
    with pytest.raises(ff.InvalidInput):
        await mw.chain_submit([meter], refuse)(Submission())
    assert isinstance(meter.sink, mw.MemorySink)
    assert meter.sink.snapshot().counts == {
        'flowfabric_submitted_total{kind="send"}': 1,
        'flowfabric_submitted_total{kind="other"}': 1,
    }


@given(st.lists(st.floats(0, 10_000), min_size=1, max_size=30))
def test_a_timing_holds_what_was_observed(seconds: list[float]) -> None:
    sink = mw.MemorySink()
    for one in seconds:
        sink.observe("t", one, {"kind": "a"})
    timing = sink.snapshot().timings['t{kind="a"}']
    assert timing.count == len(seconds)
    assert timing.longest == max(seconds)
    assert timing.seconds == pytest.approx(sum(seconds))
    assert timing.buckets == {bound: sum(each <= bound for each in seconds) for bound in BUCKETS}


def test_series_are_one_whatever_the_order_of_labels_and_escaped_where_needed() -> None:
    sink = mw.MemorySink()
    sink.count("c", {"kind": 'a"\n\\', "outcome": "ok"})
    sink.count("c", {"outcome": "ok", "kind": 'a"\n\\'})
    assert sink.snapshot().counts == {r'c{kind="a\"\n\\",outcome="ok"}': 2}


def test_a_memory_sink_counts_right_from_many_threads() -> None:
    sink = mw.MemorySink()

    def work() -> None:
        for _ in range(2000):
            sink.count("c", {})
            sink.observe("t", 1, {})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sink.snapshot()
    assert (seen.counts["c{}"], seen.timings["t{}"].count) == (8000, 8000)


async def used(meter: mw.Metrics) -> None:
    """Make every series appear."""
    await mw.chain_submit([meter], store)(Submission())
    await mw.chain_execute([meter], Task(new_id()), answering(1))()
    await chain_call([meter], "ping", answering(1))()
    await chain_call([meter], "renew_many", answering([RENEWED]))()
    await chain_call([meter], "probe_waitpoint", answering("mismatch"))()
    for answer in (
        FlowSubmitted(flow_id=FlowId(new_id()), nodes={}, joins={"quorum": 2}),
        SiblingPass(action="more", reason="sibling_quorum_satisfied", cancelled=1),
        GroupRepair.NO_OP,
        Round(handled=1, backlog=1),
        HardBreach(budget_id=BudgetId(new_id()), dimension="tokens", current_usage=1, hard_limit=1),
        RateExceeded(timedelta(seconds=1)),
    ):
        await chain_call([meter], "flows", answering(answer))()
    await chain_claim([meter], ["default"], answering([]))()
    hooks = mw.DutyHooks([meter])
    await hooks.round("lease_expiry", answering(Round(handled=3, failed=2)))
    for group in ("duties", "cascades"):
        hooks.leads(group, True)
    hooks.leads("duties", False)


async def test_a_round_that_raises_is_a_failure_and_one_that_is_cancelled_is_none() -> None:
    sink = mw.MemorySink()
    hooks = mw.DutyHooks([mw.Middleware(), mw.Metrics(sink)])
    for error in (Unavailable("x"), OSError("x"), asyncio.CancelledError()):

        async def fail(error: BaseException = error) -> Round:
            raise error

        with pytest.raises(type(error)):
            await hooks.round("audit", fail)
    await hooks.round("audit", answering(Round(handled=0)))
    seen = sink.snapshot()
    assert seen.counts == {'flowfabric_duty_failures_total{duty="audit"}': 2}
    assert {series.split("outcome=")[1]: one.count for series, one in seen.timings.items()} == {
        '"unavailable"}': 1,
        '"unknown"}': 1,
        '"cancelled"}': 1,
        '"ok"}': 1,
    }


async def test_a_claim_that_raises_is_an_error_of_its_lanes_and_one_that_is_cancelled_is_none() -> None:
    sink = mw.MemorySink()
    for error in (Unavailable("x"), OSError("x"), asyncio.CancelledError()):

        async def fail(error: BaseException = error) -> Any:
            raise error

        with pytest.raises(type(error)):
            await chain_claim([mw.Metrics(sink)], ["a", "b"], fail)()
    seen = sink.snapshot()
    assert seen.counts == {f'flowfabric_claims_total{{lane="{lane}",result="error"}}': 2 for lane in "ab"}
    assert {series: one.count for series, one in seen.timings.items()} == {
        f'flowfabric_claim_seconds{{lane="{lane}"}}': 3 for lane in "ab"
    }


def test_a_hook_for_leads_that_fails_is_reported_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(mw.Middleware):
        def leads(self, group: str, is_ours: bool) -> None:
            raise OSError("disk")

    meter = mw.Metrics()
    mw.DutyHooks([Broken(), meter]).leads("duties", True)
    assert "Broken.leads failed" in caplog.text
    assert isinstance(meter.sink, mw.MemorySink)
    assert meter.sink.snapshot().gauges == {'flowfabric_leads{group="duties"}': 1.0}


async def test_the_table_of_metrics_names_every_series_and_its_labels() -> None:
    seen: dict[str, tuple[str, set[str]]] = {}

    class Sink:
        def count(self, name: str, labels: Mapping[str, str], by: int = 1) -> None:
            assert by > 0
            seen[name] = "counter", set(labels)

        def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
            assert value in (0, 1)
            seen[name] = "gauge", set(labels)

        def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
            assert seconds >= 0
            seen[name] = "histogram", set(labels)

    await used(mw.Metrics(Sink()))
    assert seen == {name: (metric.type, set(metric.labels)) for name, metric in mw.METRICS.items()}
    assert all(name.startswith("flowfabric_") for name in mw.METRICS)


async def test_prometheus_shows_every_series_with_buckets_below_a_millisecond() -> None:
    registry = prometheus_client.CollectorRegistry()
    await used(mw.Metrics(mw.PrometheusSink(registry)))
    await used(mw.Metrics(mw.PrometheusSink(registry)))  # a second app of the same process
    text = prometheus_client.generate_latest(registry).decode()
    for line in (
        'flowfabric_submitted_total{kind="send"} 2.0',
        'flowfabric_executions_total{kind="send",outcome="ok"} 2.0',
        'flowfabric_execution_seconds_count{kind="send"} 2.0',
        'flowfabric_queue_seconds_count{kind="send"} 2.0',
        'flowfabric_call_seconds_count{method="ping",outcome="ok"} 2.0',
        'flowfabric_duty_seconds_count{duty="lease_expiry",outcome="ok"} 2.0',
        'flowfabric_duty_items_total{duty="lease_expiry"} 6.0',
        'flowfabric_duty_failures_total{duty="lease_expiry"} 4.0',
        'flowfabric_leads{group="duties"} 0.0',
        'flowfabric_leads{group="cascades"} 1.0',
        'flowfabric_edge_group_policy_total{policy="quorum"} 4.0',
        'flowfabric_sibling_cancel_dispatched_total{reason="sibling_quorum_satisfied"} 2.0',
        'flowfabric_sibling_cancel_disposition_total{disposition="cancelled"} 2.0',
        'flowfabric_sibling_cancel_reconcile_total{action="no_op"} 2.0',
        "flowfabric_cancel_backlog_depth 1.0",
    ):
        assert line in text.splitlines()
    assert 'flowfabric_call_seconds_bucket{le="0.0001",method="ping",outcome="ok"}' in text
    assert sum(bound < 0.001 for bound in BUCKETS) >= 3
    assert list(BUCKETS) == sorted(set(BUCKETS))


async def test_a_sink_that_fails_is_reported_once_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def count(self, name: str, labels: Mapping[str, str], by: int = 1) -> None:
            raise OSError("disk")

        observe = gauge = None  # not even callable

    meter = mw.Metrics(Broken())  # type: ignore[arg-type]
    await used(meter)
    with pytest.raises(ff.LeaseLost):
        await mw.chain_execute([meter], Task(new_id()), raising(ff.LeaseLost()))()
    assert [record.getMessage() for record in caplog.records] == ["Broken failed; its measurements are lost"]


# Logging


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.Logger("test.tasks", logging.DEBUG)
    made.propagate = False
    yield made


def as_json(logger: logging.Logger) -> Callable[[], list[dict[str, Any]]]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(mw.JsonFormatter())
    logger.addHandler(handler)
    return lambda: [json.loads(line) for line in written.getvalue().splitlines()]


@ends
async def test_a_run_is_logged_at_its_start_and_its_end(
    logger: logging.Logger, error: BaseException | None, parked: bool, outcome: str
) -> None:
    lines = as_json(logger)
    time = Time()
    task = Task(new_id(), attempt_index=3, lane_id="slow", is_parked=parked)

    async def handler() -> str:
        time.now += 1.5
        if error is not None:
            raise error
        return SECRET

    try:
        await mw.chain_execute([mw.Logging(logger, clock=time)], task, handler)()
    except BaseException as caught:
        assert caught is error
    start, end = lines()
    about = {"execution_id": str(task.execution_id), "attempt": 4, "kind": "send", "lane": "slow"}
    assert about.items() <= start.items()
    assert (start["level"], start["message"]) == ("INFO", f"started 'send', execution {task.execution_id}, attempt 4")
    assert about.items() <= end.items()
    assert (end["seconds"], end["outcome"]) == (1.5, outcome)
    bad = error is not None and outcome in ("error", "timeout")
    assert end["level"] == ("ERROR" if bad else "INFO")
    assert end.get("error") == (type_name(error) if bad and error else None)
    assert end["message"].startswith("failed 'send'" if bad else "ended 'send'")
    assert SECRET not in json.dumps(lines())


async def test_a_submission_is_logged_without_its_arguments(logger: logging.Logger) -> None:
    lines = as_json(logger)

    async def refuse(submission: mw.Submission) -> mw.Run:
        raise ff.InvalidInput(SECRET)

    run = await mw.chain_submit([mw.Logging(logger)], store)(Submission())
    await mw.chain_submit([mw.Logging(logger)], store)(Submission("known"))
    with pytest.raises(ff.InvalidInput):
        await mw.chain_submit([mw.Logging(logger)], refuse)(Submission("two\nlines"))
    good, known, bad = lines()
    assert known["message"].startswith("'known' was submitted before as ")
    assert (good["level"], good["execution_id"], good["kind"]) == ("DEBUG", str(run.execution_id), "send")
    assert (bad["level"], bad["error"], bad["kind"]) == ("ERROR", "flowfabric.errors.InvalidInput", "two\nlines")
    assert "\n" not in bad["message"]
    assert SECRET not in json.dumps(lines())


async def test_the_level_of_ordinary_lines_can_be_chosen(logger: logging.Logger) -> None:
    lines = as_json(logger)
    await mw.chain_execute([mw.Logging(logger, level=logging.DEBUG)], Task(new_id()), answering(1))()
    assert [line["level"] for line in lines()] == ["DEBUG", "DEBUG"]


async def test_every_line_inside_a_handler_says_which_execution_it_belongs_to(logger: logging.Logger) -> None:
    other = logging.Logger("somebody.elses")
    lines = as_json(other)
    quiet = mw.Logging(logger)
    first, second = Task(new_id()), Task(new_id(), kind="other")
    both = asyncio.Barrier(2)

    async def handler() -> None:
        await both.wait()
        other.warning("hello")
        await asyncio.to_thread(other.warning, "from a thread")

    await asyncio.gather(*(mw.chain_execute([quiet], task, handler)() for task in (first, second)))
    other.warning("outside", extra={"kind": "mine"})
    *inside, outside = lines()
    assert sorted((line["execution_id"], line["kind"]) for line in inside) == sorted(
        [(str(first.execution_id), "send"), (str(second.execution_id), "other")] * 2
    )
    assert "execution_id" not in outside
    assert outside["kind"] == "mine"


async def test_a_handler_that_is_thrown_away_is_logged_all_the_same(logger: logging.Logger) -> None:
    lines = as_json(logger)
    left = mw.chain_execute([mw.Logging(logger)], Task(new_id()), asyncio.Event().wait)()
    assert inspect.iscoroutine(left)
    await asyncio.create_task(_one_step(left))
    left.close()  # in another context than the one it began in
    assert [line.get("outcome") for line in lines()] == [None, "cancelled"]


async def _one_step(coroutine: Any) -> None:
    coroutine.send(None)


def record(message: str = "m", **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": message, "created": 1893456000.25, **fields})


def test_a_line_of_json_has_time_level_logger_message_and_fields() -> None:
    assert json.loads(mw.JsonFormatter().format(record("%s is %d", args=("x", 5), seconds=0.5, outcome=None))) == {
        "time": "2030-01-01T00:00:00.250+00:00",
        "level": "INFO",
        "logger": "n",
        "message": "x is 5",
        "seconds": 0.5,
        "outcome": None,
    }


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a\nb", "a\nb"),
        (True, True),
        (ff.State.ACTIVE, "active"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({1: 2}, "{1: 2}"),
        (b"\xff", r"b'\xff'"),
        ("\ud800", "\ud800"),
    ],
)
def test_any_field_can_be_written(value: object, written: object) -> None:
    line = mw.JsonFormatter().format(record(field=value, level="not mine", time="not mine"))
    assert "\n" not in line
    read = json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert read["field"] == written
    assert read["level"] == "INFO"
    assert read["time"].startswith("2030")


def test_a_field_that_cannot_even_be_text_does_no_harm() -> None:
    assert "Hostile" in json.loads(mw.JsonFormatter().format(record(field=Hostile())))["field"]


def test_a_logged_exception_is_in_the_line(logger: logging.Logger) -> None:
    lines = as_json(logger)
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("oh", stack_info=True)
    (line,) = lines()
    assert line["exception"].endswith("ValueError: bad")
    assert "test_a_logged_exception_is_in_the_line" in line["stack"]


# Rate limits

GAPS = st.lists(st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 3), st.integers(0, 5)), max_size=120)
RATES = st.one_of(st.integers(1, 30), st.floats(1, 30))


def check_windows(times: list[float], rate: float) -> None:
    """No window holds more than a full bucket and what came in meanwhile."""
    for first, begin in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= rate + rate * (times[last] - begin) + 1e-6


@given(RATES, GAPS)
def test_no_window_exceeds_the_rate_and_no_token_is_withheld(rate: float, gaps: list[float]) -> None:
    time = Time()
    bucket = Bucket(rate, time)
    taken: list[float] = []
    tokens, before = Fraction(rate), Fraction(time.now)
    for gap in gaps:
        time.now += gap
        tokens = min(Fraction(rate), tokens + (Fraction(time.now) - before) * Fraction(rate))
        before = Fraction(time.now)
        missing = bucket.take()
        if abs(tokens - 1) > 1e-6:  # else rounding decides
            assert (missing == 0) == (tokens > 1)
        if missing:
            assert missing == pytest.approx(float((1 - tokens) / Fraction(rate)), abs=1e-6)
        else:
            tokens -= 1
            taken.append(time.now)
    check_windows(taken, rate)


@pytest.mark.parametrize("idle", [1, 10, 1e6])
@pytest.mark.parametrize("rate", [1, 2.5, 7, 1000])
def test_after_an_idle_time_there_is_one_full_bucket_and_no_more(rate: float, idle: float) -> None:
    time = Time()
    bucket = Bucket(rate, time)
    for _ in range(3):
        assert [bucket.take() for _ in range(int(rate))] == [0.0] * int(rate)
        assert bucket.take() > 0
        time.now += idle


async def passed(limit: mw.RateLimit, *methods: str) -> list[str]:
    through = []
    for method in methods:
        try:
            through.append(await chain_call([limit], method, answering(method))())
        except mw.RateLimited:
            through.append("-")
    return through


LIMITS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("one bucket for all", {"per_second": 2}, ["a", "b", "a"], ["a", "b", "-"]),
    ("below one is one", {"per_second": 0.01}, ["a", "a"], ["a", "-"]),
    ("zero and less is one", {"per_second": -5}, ["a", "a"], ["a", "-"]),
    ("a bucket for each key", {"per_second": 1, "key": str}, ["a", "b", "a", "b"], ["a", "b", "-", "-"]),
    ("no key, no limit", {"per_second": 1, "key": lambda _: None}, ["a", "a"], ["a", "a"]),
    ("rates by method", {"per_second": {"a": 1, "b": 2}}, ["a", "a", "b", "b", "b"], ["a", "-", "b", "b", "-"]),
    ("the rest is free", {"per_second": {"a": 1}}, ["a", "b", "b", "a"], ["a", "b", "b", "-"]),
    ("the rest shares", {"per_second": {"a": 1}, "default": 2}, ["b", "c", "d", "a"], ["b", "c", "-", "a"]),
    (
        "methods by class",
        {"per_second": {"read": 1}, "key": lambda method: "read" if method.startswith("read_") else "write"},
        ["read_a", "read_b", "complete", "complete"],
        ["read_a", "-", "complete", "complete"],
    ),
    ("nothing named", {"per_second": {}}, ["a", "a"], ["a", "a"]),
]


@pytest.mark.parametrize(("options", "asked", "answered"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
async def test_calls_are_limited_by_key(options: dict[str, Any], asked: list[str], answered: list[str]) -> None:
    time = Time()
    limit = mw.RateLimit(**options, clock=time)
    assert await passed(limit, *asked) == answered
    time.now += 1
    assert await passed(limit, *asked) == answered


async def test_submissions_are_limited_by_what_they_are() -> None:
    time = Time()
    by_kind = mw.chain_submit([mw.RateLimit({"send": 1}, on="submit", clock=time)], store)
    await by_kind(Submission())
    await by_kind(Submission("other"))
    await by_kind(Submission("other"))
    with pytest.raises(mw.RateLimited):
        await by_kind(Submission())

    def tenant(submission: mw.Submission) -> str | None:
        return (submission.options.tags or {}).get("tenant")

    by_tenant = mw.chain_submit([mw.RateLimit(1, on="submit", key=tenant, clock=time)], store)
    for name in ("a", "b"):
        await by_tenant(Submission(options=Options({"tenant": name})))
    for _ in range(3):
        await by_tenant(Submission())
    with pytest.raises(mw.RateLimited) as refused:
        await by_tenant(Submission(options=Options({"tenant": "a"})))
    assert refused.value.key == "a"
    time.now += 1
    await by_tenant(Submission(options=Options({"tenant": "a"})))


def test_a_limit_is_on_calls_or_on_submissions() -> None:
    for on, hook, other in (("call", "call", "submit"), ("submit", "submit", "call")):
        limit: mw.RateLimit = mw.RateLimit(1, on=on)  # type: ignore[call-overload]
        assert mw.overriding([limit], hook) == [limit]  # type: ignore[arg-type]
        assert mw.overriding([limit], other) == []  # type: ignore[arg-type]


async def test_over_the_limit_is_an_error_that_says_when_to_come_back() -> None:
    time = Time()
    limit = mw.RateLimit(4, key=lambda _: SECRET, clock=time)
    assert await passed(limit, *"aaaa") == list("aaaa")
    with pytest.raises(Contention) as refused:
        await chain_call([limit], "claim", raising(AssertionError("was asked")))()
    error = refused.value
    assert isinstance(error, mw.RateLimited)
    assert not isinstance(error, ValidationFailed)
    assert (error.retryable, error.http_status) == (True, 429)
    assert (error.kind, error.per_second, error.key) == ("rate_limit_exceeded", 4.0, SECRET)
    assert error.retry_after == timedelta(seconds=0.25)
    assert str(error) == "rate_limit_exceeded: claim is over the limit of 4 per second"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.retry_after) == (mw.RateLimited, str(error), error.retry_after)


async def test_reports_of_held_work_wait_and_renewals_pass() -> None:
    """By the engine's own signatures, so that an operation that is added later is thought of."""
    holding = {
        name
        for name, member in inspect.getmembers(ff.Engine, inspect.iscoroutinefunction)
        if not name.startswith("_")
        and any(
            word in str(parameter.annotation)
            for parameter in inspect.signature(member).parameters.values()
            for word in ("Handle", "Authority", "Failure")
            if "Handler" not in str(parameter.annotation)
        )
    } - {"cancel"}  # operators cancel too
    assert {"complete", "complete_many", "fail_many", "record_steps", "park", "submit_child", "release"} <= holding
    for method in sorted({*holding, "read_steps", "count_emitted"}):
        time = Time()
        limit = mw.RateLimit(1, clock=time, sleep=time.sleep)
        assert await passed(limit, "a", method, method) == ["a", method, method]
        assert time.now == pytest.approx(Time().now + (0 if method.startswith("renew") else 2)), method
        assert await passed(limit, "a") == ["-"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"per_second": "5"}, "per_second"),
        ({"per_second": True}, "per_second"),
        ({"per_second": None}, "per_second"),
        ({"per_second": float("nan")}, "per_second"),
        ({"per_second": float("inf"), "key": str}, "per_second"),
        ({"per_second": {"a": "5"}}, "per_second['a']"),
        ({"per_second": {"a": 5}, "default": "5"}, "default"),
        ({"per_second": 5, "default": 5}, "default"),
        ({"per_second": 5, "on": "execute"}, "on"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        mw.RateLimit(**options)
    assert refused.value.field == field


@given(st.integers(1, 9), st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_waiters_pass_in_order_at_the_rate_and_a_cancelled_one_costs_no_token(
    rate: int, waiting: int, gone: set[int]
) -> None:
    async def scenario() -> None:
        time = Time()
        limit = mw.RateLimit(rate, wait=True, clock=time, sleep=time.sleep)
        times: list[float] = []
        order: list[int] = []

        async def one(number: int) -> None:
            async def note() -> None:
                times.append(time.now)
                order.append(number)

            await chain_call([limit], "claim", note)()

        tasks = [asyncio.create_task(one(number)) for number in range(waiting)]
        await asyncio.sleep(0)
        cancelled = [number for number in gone if number < waiting and tasks[number].cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == sorted(order)
        assert set(order) == set(range(waiting)) - set(cancelled)
        check_windows(times, rate)
        if order:
            # One who is cancelled while it is first has slept already: that alone may pass.
            needed = max(len(order) - rate, 0) / rate
            assert times[-1] - 1000 <= needed + 1 / rate + 1e-6

    asyncio.run(scenario())


def test_a_limit_serves_one_event_loop_after_another() -> None:
    time = Time()
    limit = mw.RateLimit(5, wait=True, clock=time, sleep=time.sleep)

    async def many() -> list[int]:
        return await asyncio.gather(*(chain_call([limit], "claim", answering(1))() for _ in range(12)))

    # Those who wait stand in a queue, and a queue belongs to its loop.
    assert [asyncio.run(many()) for _ in range(2)] == [[1] * 12] * 2


def test_a_bucket_gives_no_token_twice_to_threads() -> None:
    bucket = Bucket(500, Time())
    taken: list[float] = []

    def work() -> None:
        taken.extend(each for each in (bucket.take() for _ in range(400)) if not each)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 500


async def test_keys_at_rest_are_forgotten_and_busy_ones_are_not() -> None:
    time = Time()
    limit = mw.RateLimit(1, key=str, clock=time)
    for number in range(1024):
        await passed(limit, f"old{number}")
    time.now += 1
    assert await passed(limit, "busy") == ["busy"]
    for number in range(5000):
        await passed(limit, f"new{number}")
        if number % 100 == 99:
            time.now += 0.01
            assert await passed(limit, "busy") == ["-"]
            assert len(limit._buckets) < 6 * 1024
    time.now += 1
    for number in range(20_000):
        time.now += 1
        await passed(limit, f"next{number}")
    assert len(limit._buckets) <= 2 * 6 * 1024


async def test_a_bucket_with_waiters_is_not_idle() -> None:
    time = Time()
    bucket = Bucket(1, time)
    assert bucket.is_idle
    slept = asyncio.Event()

    async def sleep(seconds: float) -> None:
        time.now += seconds
        await slept.wait()

    await bucket.wait(sleep)
    assert not bucket.is_idle
    waiting = asyncio.create_task(bucket.wait(sleep))
    await asyncio.sleep(0)
    # The token is there, and it is his.
    assert not bucket.is_idle
    slept.set()
    await waiting
    time.now += 1
    assert bucket.is_idle


# The circuit breaker

GOOD, OTHER, BAD = "ok", "other", "bad"


async def ask(breaker: mw.CircuitBreaker, result: str) -> str:
    """What becomes of a call that would end so: its end, or `refused`."""
    reached = False

    async def proceed() -> None:
        nonlocal reached
        reached = True
        if result == BAD:
            raise TransportError("timeout")
        if result == OTHER:
            raise ff.LeaseLost()

    try:
        await chain_call([breaker], "claim", proceed)()
    except mw.CircuitOpen:
        assert not reached
        return "refused"
    except (TransportError, ff.LeaseLost):
        pass
    assert reached
    return result


# What happens, as words: how a call would end, or the seconds that pass; then what becomes of each call.
FIVE = "bad bad bad bad bad"
FOUR = "bad bad bad bad"
CIRCUITS = {
    "five errors open it": (f"{FIVE} ok", f"{FIVE} refused"),
    "four do not": (f"{FOUR} ok", f"{FOUR} ok"),
    "a success in between starts over": (f"{FOUR} ok {FOUR} ok", f"{FOUR} ok {FOUR} ok"),
    "so does an answer that refuses": (f"{FOUR} other {FOUR} ok", f"{FOUR} other {FOUR} ok"),
    "other errors never open it": ("other " * 50, "other " * 50),
    "it stays open for its time": (f"{FIVE} 29.9 ok", f"{FIVE} refused"),
    "then one success closes it": (f"{FIVE} 30 ok ok", f"{FIVE} ok ok"),
    "an answer that refuses closes it": (f"{FIVE} 30 other ok", f"{FIVE} other ok"),
    "another error opens it again": (f"{FIVE} 30 bad ok 29 ok 1 ok", f"{FIVE} bad refused refused ok"),
    "closed again it takes five again": (f"{FIVE} 30 ok {FOUR} ok {FIVE} ok", f"{FIVE} ok {FOUR} ok {FIVE} refused"),
}


@pytest.mark.parametrize(("steps", "expected"), CIRCUITS.values(), ids=CIRCUITS)
async def test_a_circuit_opens_and_closes(steps: str, expected: str) -> None:
    time = Time()
    breaker = mw.CircuitBreaker(clock=time)
    ends = []
    for step in steps.split():
        if step in (GOOD, OTHER, BAD):
            ends.append(await ask(breaker, step))
        else:
            time.now += float(step)
    assert ends == expected.split()


@given(
    st.integers(1, 6),
    st.lists(st.one_of(st.sampled_from([GOOD, OTHER, BAD, BAD, BAD]), st.sampled_from([1.0, 10.0, 29.0, 30.0]))),
)
def test_a_circuit_follows_its_rules(failures: int, steps: list[Any]) -> None:
    async def scenario() -> None:
        time = Time()
        breaker = mw.CircuitBreaker(failures=failures, clock=time)
        in_a_row, opened_at = 0, None
        for step in steps:
            if not isinstance(step, str):
                time.now += step
                continue
            end = await ask(breaker, step)
            if opened_at is not None and time.now < opened_at + 30:
                assert end == "refused"
                continue
            assert end == step
            in_a_row = in_a_row + 1 if step == BAD else 0
            if step == BAD and (opened_at is not None or in_a_row >= failures):
                opened_at, in_a_row = time.now, 0
            elif step != BAD:
                opened_at = None
            assert breaker.state == ("closed" if opened_at is None else "open")

    asyncio.run(scenario())


class Held:
    """A call under way that ends when told."""

    def __init__(self, breaker: mw.CircuitBreaker) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def proceed() -> None:
            await self.end

        async def run() -> str:
            try:
                await chain_call([breaker], "claim", proceed)()
            except mw.CircuitOpen:
                return "refused"
            except TransportError:
                return BAD
            return GOOD

        self.task = asyncio.create_task(run())

    async def ended(self, error: Exception | None = None) -> str:
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)
        return await self.task


async def opened(time: Time) -> mw.CircuitBreaker:
    breaker = mw.CircuitBreaker(clock=time)
    for _ in range(5):
        await ask(breaker, BAD)
    return breaker


async def test_exactly_one_call_is_tried_while_others_are_refused() -> None:
    time = Time()
    breaker = await opened(time)
    time.now += 30
    calls = [Held(breaker) for _ in range(10)]
    await asyncio.sleep(0)
    assert breaker.state == "trial"
    assert [call.task.done() for call in calls] == [False] + [True] * 9
    assert [await call.task for call in calls[1:]] == ["refused"] * 9
    time.now += 1000
    assert await ask(breaker, GOOD) == "refused"
    assert await calls[0].ended() == GOOD
    assert breaker.state == "closed"
    assert await ask(breaker, GOOD) == GOOD


@pytest.mark.parametrize("late", [None, TransportError("timeout"), ff.LeaseLost()])
async def test_a_call_from_before_has_no_say_in_an_open_circuit(late: Exception | None) -> None:
    time = Time()
    breaker = mw.CircuitBreaker(clock=time)
    old, older = Held(breaker), Held(breaker)
    await asyncio.sleep(0)
    for _ in range(5):
        await ask(breaker, BAD)
    time.now += 20
    await asyncio.gather(old.ended(late), return_exceptions=True)
    assert breaker.state == "open"
    time.now += 10
    trial = Held(breaker)
    await asyncio.sleep(0)
    await asyncio.gather(older.ended(late), return_exceptions=True)
    assert breaker.state == "trial"
    assert await trial.ended() == GOOD
    assert breaker.state == "closed"


async def test_a_cancelled_trial_leaves_the_trial_to_the_next_call() -> None:
    time = Time()
    breaker = await opened(time)
    time.now += 30
    trial = Held(breaker)
    await asyncio.sleep(0)
    trial.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial.task
    assert breaker.state == "open"
    assert await ask(breaker, GOOD) == GOOD
    assert breaker.state == "closed"


async def test_a_cancelled_call_neither_counts_nor_starts_over() -> None:
    breaker = mw.CircuitBreaker()
    for end in [BAD] * 4:
        await ask(breaker, end)
    with pytest.raises(asyncio.CancelledError):
        await chain_call([breaker], "claim", raising(asyncio.CancelledError()))()
    assert breaker.state == "closed"
    await ask(breaker, BAD)
    assert breaker.state == "open"


async def test_an_open_circuit_raises_our_transport_error() -> None:
    time = Time()
    breaker = await opened(time)
    time.now += 12
    with pytest.raises(TransportError) as refused:
        await chain_call([breaker], "claim", raising(AssertionError("was asked")))()
    error = refused.value
    assert isinstance(error, mw.CircuitOpen)
    assert (error.source, error.method, error.retry_after) == ("flowfabric.middleware", "claim", timedelta(seconds=18))
    assert str(error) == "transport: circuit open, claim was not sent (flowfabric.middleware)"
    assert error.retryable
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.source, copy.method) == (mw.CircuitOpen, error.source, "claim")


@pytest.mark.parametrize("method", sorted(LOCAL))
async def test_closing_is_never_refused_and_says_nothing_about_the_database(method: str) -> None:
    assert method in OPERATIONS
    time = Time()
    breaker = await opened(time)
    limit = mw.RateLimit(1, clock=time)
    assert await passed(limit, "claim", "claim") == ["claim", "-"]
    time.now += 30 - 0.5
    assert await chain_call([breaker, limit], method, answering("closed"))() == "closed"
    assert breaker.state == "open"
    assert await passed(limit, "claim", "claim") == ["claim", "-"]
    fresh = mw.CircuitBreaker()
    for _ in range(9):
        with pytest.raises(TransportError):
            await chain_call([fresh], method, raising(TransportError()))()
    assert fresh.state == "closed"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"failures": 0}, "failures"),
        ({"failures": True}, "failures"),
        ({"failures": 2.0}, "failures"),
        ({"open_for": 30}, "open_for"),
        ({"open_for": timedelta(0)}, "open_for"),
    ],
)
def test_a_breaker_that_makes_no_sense_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        mw.CircuitBreaker(**options)
    assert refused.value.field == field
