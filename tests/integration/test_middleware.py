"""Middleware around a real engine: everything still works, each operation is seen once, and contexts travel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import flowfabric as ff
from flowfabric import middleware as mw
from flowfabric._duties import Unblock
from flowfabric.errors import ExecutionNotActive, TransportError
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import HardBreach, Report, Reserved, Usage
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import Granted, ReclaimGranted
from flowfabric.values.held import Denials
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.quota import quota_policy_id_of
from tests.support import WORKER, CheckedEngine, Clock, claim_one, started, submit


class Seen(mw.Middleware):
    """Notes the calls and lets them pass."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        self.methods.append(method)
        return await proceed()

    def take(self) -> list[str]:
        taken, self.methods = self.methods, []
        return taken


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def layered(engine: CheckedEngine, seen: Seen) -> ff.Engine:
    return mw.layer(engine, [mw.Metrics(), mw.CircuitBreaker(), mw.RateLimit(1_000_000), seen])


async def test_an_execution_lives_its_whole_life_through_a_layered_engine(layered: ff.Engine, seen: Seen) -> None:
    assert isinstance(layered, CheckedEngine)
    execution_id = await submit(layered, tags={"team.owner": "a"})
    claimed = await claim_one(layered, lease_ttl=timedelta(seconds=30))
    assert claimed.execution_id == execution_id
    await layered.renew(claimed.handle)
    await layered.progress(claimed.handle, percent=50)
    await layered.complete(claimed.handle, b"done")
    assert await layered.get_execution_result(execution_id) == b"done"
    assert await layered.read_execution_state(execution_id) is ff.State.COMPLETED
    # Each calls a batch form or a shared helper inside, which is not seen again.
    assert seen.methods == [
        *("create_execution", "claim", "renew", "progress", "complete"),
        *("get_execution_result", "read_execution_state"),
    ]


async def test_batches_and_duties_pass_once_too(layered: ff.Engine, seen: Seen, clock: Clock) -> None:
    made = await layered.create_many([NewExecution(execution_kind="test") for _ in range(3)])
    assert len(made) == 3
    claimed = await layered.claim_many(limit=3, **WORKER)
    assert len(await layered.complete_many([each.handle for each in claimed])) == 3
    await clock.advance(days=400)
    assert await layered.trim_retention() == 3
    assert seen.methods == ["create_many", "claim_many", "complete_many", "trim_retention"]


async def test_results_are_those_of_the_wrapped_engine(
    layered: ff.Engine, engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    execution_id = await submit(engine)
    assert await layered.read_execution(execution_id) == await engine.read_execution(execution_id)
    assert await layered.list_lanes() == await engine.list_lanes()
    assert layered.flow_partitions == engine.flow_partitions
    assert layered.target == engine.target
    async with sql.transaction():
        inside = await layered.create_execution(execution_kind="test", connection=sql)
        assert await engine.read_execution(inside.execution_id) is None
    assert await engine.read_execution(inside.execution_id) is not None


async def test_a_waiting_claim_is_woken_through_the_layers(layered: ff.Engine, engine: CheckedEngine) -> None:
    waiting = asyncio.create_task(layered.claim(**WORKER, max_wait=timedelta(seconds=60)))  # type: ignore[arg-type]
    execution_id = await submit(engine)
    claimed = await waiting
    assert claimed is not None
    assert claimed.execution_id == execution_id


async def test_refusals_come_through_and_are_counted_by_category(engine: CheckedEngine) -> None:
    meter = mw.Metrics()
    layered = mw.layer(engine, [meter])
    claimed = await started(layered)
    await layered.complete(claimed.handle)
    with pytest.raises(ExecutionNotActive):
        await layered.fail(claimed.handle, "late")
    with pytest.raises(ff.InvalidInput):
        await layered.read_execution("nonsense")  # type: ignore[arg-type]
    assert isinstance(meter.sink, mw.MemorySink)
    timings = meter.sink.snapshot().timings
    assert timings.pop('flowfabric_claim_seconds{lane="default"}').count == 1
    assert {series: timing.count for series, timing in timings.items()} == {
        f'flowfabric_call_seconds{{method="{method}",outcome="{outcome}"}}': 1
        for method, outcome in {
            "create_execution": "ok",
            "claim": "ok",
            "complete": "ok",
            "fail": "contention",
            "read_execution": "validation",
        }.items()
    }


async def test_claims_are_counted_by_lane_and_result(engine: CheckedEngine, clock: Clock) -> None:
    meter = mw.Metrics()
    layered = mw.layer(engine, [meter])
    for lane in ("a", "a", "b"):
        await engine.create_execution(execution_kind="k", lane_id=lane)
    assert (
        len(await layered.claim_lanes({"a": 1, "b": 1, "c": 1}, limit=3, lease_ttl=timedelta(seconds=1), **WORKER)) == 3
    )
    await clock.advance(seconds=10)
    await engine.run_timers("lease")
    assert await layered.claim("a", **WORKER) is not None
    assert isinstance(await layered.claim_for_worker("a", **WORKER), ReclaimGranted)
    assert len(await layered.claim_for_worker("b", max_grants=2, **WORKER)) == 1
    assert await layered.claim_many(lane_id="c", limit=2, **WORKER) == []
    with pytest.raises(ff.InvalidInput):
        await layered.claim("a", worker_id="", worker_instance_id="w-1")
    await engine.create_execution(execution_kind="k", lane_id="c")
    assert isinstance(await layered.claim_for_worker("c", **WORKER), Granted)
    assert isinstance(meter.sink, mw.MemorySink)
    found = meter.sink.snapshot()
    assert {name: n for name, n in found.counts.items() if "_claims_" in name} == {
        f'flowfabric_claims_total{{lane="{lane}",result="{result}"}}': n
        for lane, result, n in [
            ("a", "granted", 2),
            ("b", "granted", 1),
            ("c", "granted", 1),
            ("a", "reclaim", 2),
            ("b", "reclaim", 1),
            ("c", "no_work", 2),
            ("a", "error", 1),
        ]
    }
    assert {name: timing.count for name, timing in found.timings.items() if "_claim_" in name} == {
        f'flowfabric_claim_seconds{{lane="{lane}"}}': n for lane, n in [("a", 4), ("b", 2), ("c", 3)]
    }


async def test_denials_are_counted_by_dimension_and_by_kind_of_quota(engine: CheckedEngine) -> None:
    meter = mw.Metrics()
    layered = mw.layer(engine, [meter])
    claimed = await started(engine)
    made = await engine.create_budget(
        name="team", dimensions=["cents", "tokens"], hard_limits=[5, 10], soft_limits=[0, 0]
    )
    await layered.report_usage(claimed.handle, {"tokens": 10}, made.budget_id)
    await layered.report_usage(claimed.handle, {"tokens": 1}, made.budget_id)
    await layered.reserve_usage(claimed.handle, {"cents": 6}, made.budget_id)
    over = Report(authority=claimed.handle, usage=Usage(custom={"tokens": 1}), budgets=(made.budget_id,))
    await layered.report_usage_many([over, over])
    held = await engine.reserve_usage(claimed.handle, {"cents": 5}, made.budget_id)
    assert isinstance(held, Reserved)
    settled = await layered.settle_usage(claimed.handle, held.reservation_id, {"cents": 7})
    assert isinstance(settled, HardBreach)  # an overrun, not a denial
    for limit in ("rate_limit", "concurrency_cap"):
        for _ in range(2):
            other = await submit(engine)
            await layered.check_admission(quota_policy_id_of(limit), other, **{limit: 1})
    assert isinstance(meter.sink, mw.MemorySink)
    assert {name: n for name, n in meter.sink.snapshot().counts.items() if "denials" in name} == {
        'flowfabric_budget_denials_total{dimension="tokens"}': 3,
        'flowfabric_budget_denials_total{dimension="cents"}': 1,
        'flowfabric_quota_denials_total{limit="rate"}': 1,
        'flowfabric_quota_denials_total{limit="concurrency"}': 1,
    }


async def test_what_claims_are_denied_is_counted_once_and_logged(
    engine: CheckedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever door they use; the process that runs the duty counts for all."""
    meter = mw.Metrics()
    layered = mw.layer(engine, [meter])
    budget = (await engine.create_budget(name="b", dimensions=["cents"], hard_limits=[1], soft_limits=[0])).budget_id
    await engine.report_usage_admin(budget, dimensions=["cents"], deltas=[1])
    rate = (await engine.create_quota_policy(name="rate", max_requests_per_window=1)).quota_policy_id
    cap = (await engine.create_quota_policy(name="cap", max_concurrent=1)).quota_policy_id
    for lane, policy in (
        ("budget", ExecutionPolicy(budget_ids=(budget,))),
        ("rate", ExecutionPolicy(quota_policy_id=rate)),
        ("cap", ExecutionPolicy(quota_policy_id=cap)),
        ("free", ExecutionPolicy()),
    ):
        await engine.create_many([NewExecution(execution_kind="k", lane_id=lane, policy=policy)] * 3)
    assert await engine.read_denials() == Denials(budgets={}, rate=0, concurrency=0)
    await layered.claim_many("free", limit=10, **WORKER)
    await layered.claim_many("budget", limit=10, **WORKER)
    await layered.claim_lanes({"rate": 5, "free": 5}, limit=10, **WORKER)
    await layered.claim_for_worker("cap", **WORKER)
    await layered.claim_for_worker("cap", **WORKER)
    expected = Denials(budgets={"cents": 3}, rate=2, concurrency=2)
    assert await engine.read_denials() == expected  # before the duty counts them, and after
    with caplog.at_level("DEBUG", "flowfabric.duties"):
        await Unblock(layered).run_once()
        await Unblock(layered).run_once()
    assert await engine.read_denials() == expected
    assert isinstance(meter.sink, mw.MemorySink)
    assert {name: n for name, n in meter.sink.snapshot().counts.items() if "denials" in name} == {
        'flowfabric_budget_denials_total{dimension="cents"}': 3,
        'flowfabric_quota_denials_total{limit="rate"}': 2,
        'flowfabric_quota_denials_total{limit="concurrency"}': 2,
    }
    lines = [record.getMessage() for record in caplog.records if "aside" in record.getMessage()]
    assert [line.split(" at ")[0] for line in lines] == [
        f"a claim of lane '{lane}' moved {n} executions aside" for lane, n in (("budget", 3), ("rate", 2), ("cap", 2))
    ]
    assert "without cents" in lines[0]


async def test_duties_of_a_layered_engine_run_through_it_and_end_with_it(database: str, seen: Seen) -> None:
    engine = await ff.Engine.connect(database)
    async with mw.layer(engine, [seen]) as layered:
        duties = await ff.Duties(layered).__aenter__()
        async with asyncio.timeout(30):
            while "look_for_due" not in seen.methods:
                await asyncio.sleep(0.01)
        assert engine._background == [duties]
    assert engine._background == []
    assert all(task.done() for task in duties._tasks)
    assert seen.methods.count("close") == 1
    with pytest.raises(TransportError):
        await engine.ping()


async def test_closing_the_engine_below_closes_the_layered_one(database: str, seen: Seen) -> None:
    engine = await ff.Engine.connect(database)
    layered = mw.layer(engine, [seen])
    await layered.ping()
    await engine.close()
    with pytest.raises(TransportError):
        await layered.ping()
    assert seen.methods == ["ping", "ping"]


# Traces


class Options(msgspec.Struct, frozen=True):
    tags: Mapping[str, str] | None = None

    def replace(self, **changes: Any) -> Options:
        return msgspec.structs.replace(self, **changes)


class Submission(msgspec.Struct, frozen=True):
    kind: str
    options: Options
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def replace(self, **changes: Any) -> Submission:
        return msgspec.structs.replace(self, **changes)


class Run(msgspec.Struct, frozen=True):
    execution_id: ff.ExecutionId
    is_new: bool = True


class Task:
    """A claimed execution as middleware sees it."""

    def __init__(self, claimed: Claimed) -> None:
        self.execution_id = claimed.execution_id
        self.attempt_index = claimed.handle.attempt_index
        self.kind = claimed.execution_kind
        self.lane_id = claimed.handle.lane_id
        self.tags: Mapping[str, str] = claimed.tags
        self.created_at: datetime = claimed.created_at
        self.log = logging.getLogger("test")
        self.is_resumed = False
        self.is_parked = False


async def test_the_trace_of_a_submission_continues_in_the_worker(engine: CheckedEngine) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing, meter = mw.Tracing(tracer_provider=provider), mw.Metrics()
    submitter = mw.layer(engine, [tracing])

    async def send(submission: Submission) -> Run:
        tags = dict(submission.options.tags or {})
        return Run(await submit(submitter, execution_kind=submission.kind, tags=tags))

    run = await mw.chain_submit([tracing, meter], send)(Submission("send", Options({"team.owner": "a"})))

    worker = mw.layer(engine, [mw.Tracing(tracer_provider=provider)])
    claimed = await claim_one(engine)
    assert claimed.execution_id == run.execution_id
    assert claimed.tags["team.owner"] == "a"
    assert await engine.get_execution_tag(run.execution_id, "trace.parent") == claimed.tags["trace.parent"]

    async def handler() -> str:
        await worker.progress(claimed.handle, percent=10)
        return "done"

    assert await mw.chain_execute([mw.Tracing(tracer_provider=provider), meter], Task(claimed), handler)() == "done"
    found = {span.name: span for span in spans.get_finished_spans()}
    below = {name: found[name].parent.span_id if (found[name].parent) else None for name in found}
    ids = {name: found[name].context.span_id for name in found}
    assert below == {
        "flowfabric.submit send": None,
        "flowfabric.call create_execution": ids["flowfabric.submit send"],
        "flowfabric.execute send": ids["flowfabric.submit send"],
        "flowfabric.call progress": ids["flowfabric.execute send"],
    }
    assert len({span.context.trace_id for span in found.values()}) == 1
    assert isinstance(meter.sink, mw.MemorySink)
    measured = meter.sink.snapshot()
    assert measured.counts == {
        'flowfabric_submitted_total{kind="send"}': 1,
        'flowfabric_executions_total{kind="send",outcome="ok"}': 1,
        'flowfabric_attempts_total{lane="default",outcome="ok"}': 1,
    }
    queued = measured.timings['flowfabric_queue_seconds{kind="send"}']
    assert queued.count == 1
    assert 0 <= queued.seconds < 180


# A database that does not answer


async def test_a_circuit_opens_on_a_dead_database_and_closes_when_it_is_back(
    database: str, switch: Callable[[bool], Awaitable[None]], seen: Seen
) -> None:
    now = 0.0
    breaker = mw.CircuitBreaker(clock=lambda: now)
    engine = await ff.Engine.connect(database, reconnect_for=timedelta(0), notifications=False)
    async with mw.layer(engine, [breaker, seen]) as layered:
        await layered.ping()
        await switch(False)
        for _ in range(5):
            with pytest.raises(TransportError) as failed:
                await layered.ping()
            assert not isinstance(failed.value, mw.CircuitOpen)
        for _ in range(3):
            with pytest.raises(mw.CircuitOpen):
                await layered.server_time_ms()
        assert seen.take() == ["ping"] * 6  # what was refused did not get further
        now = 30.0
        with pytest.raises(TransportError):
            await layered.ping()
        with pytest.raises(mw.CircuitOpen):
            await layered.ping()
        await switch(True)
        with pytest.raises(mw.CircuitOpen):
            await layered.ping()
        now = 60.0
        assert await layered.server_time_ms() > 0
        assert breaker.state == "closed"
        await switch(False)
        for _ in range(5):
            with pytest.raises(TransportError):
                await layered.ping()
    # Leaving the block closed the engine, open circuit or not.
    assert breaker.state == "open"
    assert seen.methods[-1] == "close"
    assert engine._database._pool.is_closing


async def test_a_limit_holds_engine_calls_back_and_lets_them_through_again(engine: CheckedEngine, seen: Seen) -> None:
    now = 0.0
    layered = mw.layer(engine, [mw.RateLimit({"write": 2}, key=_class, clock=lambda: now), seen])
    first = await submit(layered)
    await submit(layered)
    with pytest.raises(mw.RateLimited):
        await submit(layered)
    assert await layered.read_execution(first) is not None
    assert seen.take() == ["create_execution", "create_execution", "read_execution"]
    now = 0.5
    await submit(layered)
    with pytest.raises(mw.RateLimited):
        await submit(layered)
    assert len(await engine.claim_many(limit=10, **WORKER)) == 3


def _class(method: str) -> str:
    return "write" if method.startswith("create") else "read"
