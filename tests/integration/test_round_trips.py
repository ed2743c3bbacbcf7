"""An operation is one round trip once its statement is prepared: counted on the wire, between client and server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit
from uuid import UUID

import msgspec
import pytest

import flowfabric as ff
from flowfabric.client import AsyncClient
from flowfabric.client.limits import raise_owned
from flowfabric.engine.acting import Actor
from flowfabric.errors import StateError
from flowfabric.values.attempt import Failure
from flowfabric.values.binding import Bind
from flowfabric.values.budget import Report, Reserved, Usage
from flowfabric.values.bulk import ExecutionFilter
from flowfabric.values.conditions import on
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import Edge, EdgeSnapshot
from flowfabric.values.grant import ClaimGrant, ReclaimGrant
from flowfabric.values.graph import FlowSubmitted, NewEdge, NewNode
from flowfabric.values.ids import BudgetId, FlowId, QuotaPolicyId, ReservationId, mint_uuid
from flowfabric.values.joins import AnyOf, Quorum
from flowfabric.values.kept_answer import AnswerKey
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy, OwnBudget
from flowfabric.values.step import NewStep
from flowfabric.values.stream import START, NewFrame
from flowfabric.values.wait import Fresh, NewWaitpoint, Suspended
from flowfabric.values.worker import OwnWorker
from tests.ids import home
from tests.support import OTHER, STATES, WORKER, Clock, Reached, started, submit, submit_member

SOCKET = ".s.PGSQL.5432"


class Wire:
    """A proxy between client and server that counts what asks for an answer: Sync and simple Query messages."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_unix_connection(self._upstream)
        back = asyncio.create_task(self._copy(behind_reader, writer))
        try:
            await self._forward(reader, behind_writer)
        finally:
            behind_writer.close()
            await asyncio.gather(back, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            size = await reader.readexactly(4)  # the start-up message alone has no type
            writer.write(size + await reader.readexactly(struct.unpack("!i", size)[0] - 4))
            while True:
                head = await reader.readexactly(5)
                if head[:1] in (b"S", b"Q"):
                    self.asked += 1
                writer.write(head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    place = Path(tempfile.mkdtemp(prefix="ff-wire-", dir="/tmp"))
    yield place
    shutil.rmtree(place)


@pytest.fixture
async def wire(database: str, short_dir: Path) -> AsyncIterator[tuple[Wire, str]]:
    parts = urlsplit(database)
    (host,) = parse_qs(parts.query)["host"]
    wire = Wire(f"{host}/{SOCKET}")
    serving = await asyncio.start_unix_server(wire.serve, str(short_dir / SOCKET))
    yield wire, urlunsplit(parts._replace(query=f"host={quote(str(short_dir))}&port=5432"))
    serving.close()


Setup = Callable[[ff.Engine, Clock], Awaitable[Any]]
Call = Callable[[ff.Engine, Any], Awaitable[Any]]


async def nothing(_engine: ff.Engine, _clock: Clock) -> None:
    """No execution is needed."""


async def waiting(engine: ff.Engine, _clock: Clock) -> ff.ExecutionId:
    return await submit(engine)


async def parent(engine: ff.Engine, _clock: Clock) -> ff.ExecutionId:
    """A cancelled execution whose child is still to be cancelled."""
    held = await started(engine)
    await engine.submit_child(held.handle, "s", 0, new(1)[0])
    await engine.cancel(held.handle, "enough")
    return held.execution_id


async def two_active(engine: ff.Engine, _clock: Clock) -> list[Handle]:
    return [(await started(engine)).handle for _ in range(2)]


async def a_budget(engine: ff.Engine, _clock: Clock) -> tuple[Handle, BudgetId, ReservationId]:
    handle = (await started(engine)).handle
    made = await engine.create_budget(name="b", dimensions=["t"], hard_limits=[100], soft_limits=[0])
    held = await engine.reserve_usage(handle, {"t": 1}, made.budget_id)
    assert isinstance(held, Reserved)
    return handle, made.budget_id, held.reservation_id


def reported(handle: Handle, budget: BudgetId, _held: ReservationId) -> Report:
    return Report(authority=handle, usage=Usage(custom={"t": 1}), budgets=(budget,))


OWN = OwnWorker(worker_instance_id="pool-1", process=mint_uuid())


async def registered(engine: ff.Engine, _clock: Clock) -> None:
    await engine.register_worker("pool", "pool-1", lanes=["default"], liveness_ttl=timedelta(hours=1))


async def granted(engine: ff.Engine, _clock: Clock) -> ClaimGrant:
    return await engine.issue_claim_grant(await submit(engine), **WORKER)


async def capped(engine: ff.Engine, _clock: Clock) -> tuple[QuotaPolicyId, ff.ExecutionId]:
    """A policy whose only slot an execution holds, and another that waits for it."""
    policy = (await engine.create_quota_policy(name="q", max_concurrent=1)).quota_policy_id
    made = [await submit(engine, policy=ExecutionPolicy(quota_policy_id=policy), lane_id="capped") for _ in range(2)]
    await engine.claim_many("capped", **WORKER, limit=2)
    return policy, made[0]


async def resumable_grant(engine: ff.Engine, _clock: Clock) -> ClaimGrant:
    claimed = await started(engine)
    await engine.release(claimed.handle)
    return await engine.issue_claim_grant(claimed.execution_id, **WORKER)


async def reclaimable(engine: ff.Engine, _clock: Clock) -> ff.ExecutionId:
    claimed = await started(engine)
    await engine.revoke_lease(claimed.execution_id)
    return claimed.execution_id


async def reclaim_granted(engine: ff.Engine, clock: Clock) -> ReclaimGrant:
    grant = await engine.issue_reclaim_grant(await reclaimable(engine, clock), **OTHER)
    assert isinstance(grant, ReclaimGrant)
    return grant


async def pending(engine: ff.Engine, clock: Clock) -> tuple[Handle, NewWaitpoint]:
    handle = (await started(engine)).handle
    return handle, await engine.create_waitpoint(handle, "k", timedelta(days=1))


async def waiting_open(engine: ff.Engine, _clock: Clock) -> Handle:
    handle = (await started(engine)).handle
    await engine.open_wait(handle, "w", 0, ["k"], None)
    return handle


async def suspended(engine: ff.Engine, _clock: Clock) -> Suspended:
    answer = await engine.suspend((await started(engine)).handle, **bound(), timeout_at=FAR)
    assert isinstance(answer, Suspended)
    return answer


async def overdue(engine: ff.Engine, clock: Clock) -> ff.ExecutionId:
    at = (await started(engine)).handle
    await engine.suspend(at, **bound(), timeout_at=await clock.now() + timedelta(seconds=1))
    await clock.advance(seconds=2)
    return at.execution_id


def bound() -> dict[str, Any]:
    return {"waitpoints": [Fresh(mint_uuid(), "k")], "resume_condition": on("k")}


def signal(e: ff.Engine, at: Suspended) -> Awaitable[Any]:
    return e.deliver_signal(
        at.handle.execution_id,
        at.details.waitpoint_id,
        at.details.waitpoint_token,
        signal_name="go",
        source_type="test",
        payload=b"{}",
    )


def approve(e: ff.Engine, at: Suspended) -> Awaitable[Any]:
    return e.deliver_approval_signal(
        at.handle.execution_id, "default", at.details.waitpoint_id, signal_name="approved", idempotency_suffix="1"
    )


FAR = datetime(2100, 1, 1, tzinfo=UTC)
DUE = datetime(2020, 1, 1, tzinfo=UTC)
SCHEDULE: dict[str, Any] = {"kind": "test", "timing": {"every_ms": 5}, "next_at": DUE}


async def scheduled(engine: ff.Engine, _clock: Clock) -> None:
    with contextlib.suppress(ff.NotFound):
        await engine.delete_schedule("s")
    await engine.put_schedule("s", **SCHEDULE)


def node(name: str, *after: str, **fields: Any) -> NewNode:
    edges = [NewEdge(upstream=one) for one in after]
    return NewNode(name=name, execution=NewExecution(execution_kind="test"), after=edges, **fields)


async def chain(engine: ff.Engine, _clock: Clock) -> FlowSubmitted:
    return await engine.submit_flow([node("a"), node("b", "a"), node("c", "b")], tags={"a.b": "c"})


class Pair(NamedTuple):
    """A flow of two members, and an edge between them."""

    flow_id: FlowId
    upstream: ff.ExecutionId
    downstream: ff.ExecutionId
    edge_id: UUID

    @property
    def edge(self) -> dict[str, Any]:
        return {
            "edge_id": self.edge_id,
            "upstream_execution_id": self.upstream,
            "downstream_execution_id": self.downstream,
        }


async def two_members(engine: ff.Engine, _clock: Clock) -> Pair:
    flow = FlowId(mint_uuid())
    return Pair(flow, await submit_member(engine, flow), await submit_member(engine, flow), mint_uuid())


async def staged(engine: ff.Engine, clock: Clock) -> Pair:
    pair = await two_members(engine, clock)
    await engine.stage_dependency_edge(pair.flow_id, **pair.edge, expected_graph_revision=2)
    return pair


async def outside(engine: ff.Engine, clock: Clock) -> tuple[FlowId, ff.ExecutionId]:
    flow = FlowId(mint_uuid())
    await engine.create_flow(flow)
    return flow, await submit(engine, flow_id=flow)


async def applied(engine: ff.Engine, clock: Clock) -> EdgeSnapshot:
    made = await chain(engine, clock)
    return (await engine.list_edges(made.flow_id, outgoing=made.nodes["a"]))[0]


async def raced(engine: ff.Engine, _clock: Clock) -> tuple[FlowId, ff.ExecutionId]:
    """A join that is decided and owes its siblings a cancel."""
    made = await engine.submit_flow([node("a"), node("b"), node("c", "a", "b", policy=AnyOf())])
    won = await engine.issue_grant_and_claim(made.nodes["a"])
    await engine.complete(won.handle)
    return made.flow_id, made.nodes["c"]


async def skipped(engine: ff.Engine, clock: Clock) -> Event:
    """The end of a skipped member whose edges are still to be resolved."""
    made = await chain(engine, clock)
    await engine.cancel(Operator(made.nodes["a"]), "no")
    seen: EventCursor | None = None
    while True:
        page = await engine.read_events(family="completion", after=seen)
        for event in page.items:
            if event.execution_id == made.nodes["b"]:
                return event
        seen = page.next_cursor


async def ended(engine: ff.Engine, _clock: Clock) -> FlowId:
    made = await engine.submit_flow([node("a")])
    await engine.cancel(Operator(made.nodes["a"]), "no")
    return made.flow_id


async def owing(engine: ff.Engine, clock: Clock) -> tuple[FlowId, ff.ExecutionId]:
    made = await chain(engine, clock)
    await engine.cancel_flow_header(made.flow_id, grace=timedelta())
    return made.flow_id, made.nodes["a"]


async def to_acknowledge(engine: ff.Engine, clock: Clock) -> tuple[FlowId, ff.ExecutionId]:
    flow, member = await owing(engine, clock)
    await engine.cancel(Operator(member), "no")
    return flow, member


async def promoted(engine: ff.Engine, made: FlowSubmitted) -> None:
    with contextlib.suppress(StateError):  # only a defect leaves something to promote
        await engine.promote_blocked_to_eligible(made.nodes["b"])


def state(name: str) -> Setup:
    async def reach(engine: ff.Engine, clock: Clock) -> Reached:
        return await STATES[name](engine, clock)

    return reach


def new(count: int) -> list[NewExecution]:
    return [NewExecution(execution_kind="test", tags={"n.n": str(n)}, idempotency_key=None) for n in range(count)]


ids = {"lease_id": mint_uuid, "attempt_id": mint_uuid}


def fresh() -> dict[str, Any]:
    return {name: mint() for name, mint in ids.items()}


# Operation, what must be there before, the call.
async def consumer(engine: ff.Engine, clock: Clock) -> None:
    await engine.register_consumer("c")


async def followed(engine: ff.Engine, name: str) -> None:
    await (await getattr(engine, name)()).aclose()


async def ignored(*_: Any) -> None:
    """What a consumer does with events."""


NO_KIND = ExecutionFilter(kinds=("no such kind",))


def an_answer() -> AnswerKey:
    return AnswerKey(key_id="", operation="o", idempotency_key=str(mint_uuid()), holder=mint_uuid())


async def a_key(engine: ff.Engine, clock: Clock) -> Any:
    return await engine.create_api_key(f"key {mint_uuid()}", ["read"])


async def begun(engine: ff.Engine, clock: Clock) -> Any:
    key = an_answer()
    await engine.begin_answer(key, b"r")
    return key


async def a_job(engine: ff.Engine, clock: Clock) -> Any:
    return await engine.create_bulk("cancel", NO_KIND, actor="a")


OPERATIONS: dict[str, tuple[Setup, Call]] = {
    "create_execution": (nothing, lambda e, _: e.create_execution(execution_kind="test", delay_until=timedelta(1))),
    "create_many": (nothing, lambda e, _: e.create_many(new(50))),
    "claim": (waiting, lambda e, _: e.claim(**WORKER)),
    "claim_many": (waiting, lambda e, _: e.claim_many(**WORKER, limit=50)),
    "renew": (state("A"), lambda e, at: e.renew(at.handle)),
    "renew_many": (two_active, lambda e, handles: e.renew_many(handles)),
    "progress": (state("A"), lambda e, at: e.progress(at.handle, percent=1)),
    "complete": (state("A"), lambda e, at: e.complete(at.handle, b"x")),
    "complete_many": (two_active, lambda e, handles: e.complete_many(handles)),
    "fail": (state("A"), lambda e, at: e.fail(at.handle, "boom")),
    "fail_many": (
        two_active,
        lambda e, handles: e.fail_many([Failure(authority=handle, reason="boom") for handle in handles]),
    ),
    "delay": (state("A"), lambda e, at: e.delay(at.handle, timedelta(1))),
    "wait_children": (state("A"), lambda e, at: e.wait_children(at.handle)),
    "release": (state("A"), lambda e, at: e.release(at.handle)),
    "stop_changed": (state("A"), lambda e, at: e.stop_changed(at.handle, detail="a", digest="d")),
    "cancel": (state("W.1"), lambda e, at: e.cancel(Operator(at.id), "no")),
    "create_alike": (nothing, lambda e, _: e.create_alike(NewExecution(execution_kind="test"), [b"1", b"2"])),
    "claim_lanes": (waiting, lambda e, _: e.claim_lanes({"default": 1, "other": 1}, limit=2, **WORKER)),
    "sleep_for_work": (nothing, lambda e, _: e.sleep_for_work(["default"], timedelta(seconds=1))),
    "sleep_and_heartbeat": (
        nothing,
        lambda e, _: e.sleep_and_heartbeat(["default"], timedelta(seconds=1), worker=OWN),
    ),
    "renew_and_heartbeat": (two_active, lambda e, handles: e.renew_and_heartbeat(handles, worker=OWN)),
    "register_worker": (
        nothing,
        lambda e, _: e.register_worker("pool", "pool-1", lanes=["default"], liveness_ttl=timedelta(1)),
    ),
    "heartbeat_worker": (registered, lambda e, _: e.heartbeat_worker("pool-1")),
    "heartbeat_own": (registered, lambda e, _: e.heartbeat_own(OWN)),
    "leave_registry": (registered, lambda e, _: e.leave_registry("pool-1", reason="gone")),
    "mark_worker_dead": (registered, lambda e, _: e.mark_worker_dead("pool-1", reason="gone")),
    "list_workers": (registered, lambda e, _: e.list_workers("")),
    "list_all_workers": (registered, lambda e, _: e.list_all_workers()),
    "list_worker_events": (registered, lambda e, _: e.list_worker_events("pool-1")),
    "list_versions": (nothing, lambda e, _: e.list_versions()),
    "find_unserved": (waiting, lambda e, at: e.find_unserved([at])),
    "list_uncovered": (registered, lambda e, _: e.list_uncovered()),
    "judge_routes": (registered, lambda e, _: e.judge_routes()),
    "sweep_workers": (registered, lambda e, _: e.sweep_workers()),
    "trim_worker_events": (registered, lambda e, _: e.trim_worker_events()),
    "list_leaders": (nothing, lambda e, _: e.list_leaders()),
    "record_steps": (two_active, lambda e, handles: e.record_steps([(h, NewStep(name="s")) for h in handles])),
    "read_steps": (state("A"), lambda e, at: e.read_steps([at.id])),
    "find_limits": (a_budget, lambda e, at: e.find_limits(["b"], ["q"])),
    "list_held": (a_budget, lambda e, at: e.list_held(at[1])),
    "read_held": (state("A"), lambda e, at: e.read_held(at.id)),
    "count_held": (nothing, lambda e, _: e.count_held()),
    "count_denials": (nothing, lambda e, _: e.count_denials()),
    "read_denials": (nothing, lambda e, _: e.read_denials()),
    "find_unreported_budgets": (nothing, lambda e, _: e.find_unreported_budgets()),
    "read_declared_limits": (nothing, lambda e, _: e.read_declared_limits(["budget b"])),
    "note_declared_limits": (nothing, lambda e, _: e.note_declared_limits({"budget b": "1"})),
    "bind_limit": (a_budget, lambda e, at: e.bind_limit(at[1], Bind(kind="k"))),
    "unbind_limit": (a_budget, lambda e, at: e.unbind_limit(at[1], Bind(kind="k"))),
    "list_bindings": (nothing, lambda e, _: e.list_bindings()),
    "create_budget": (nothing, lambda e, _: e.create_budget(name="new")),
    "update_budget": (a_budget, lambda e, at: e.update_budget(at[1], raise_by={"t": 1})),
    "get_budget_status": (a_budget, lambda e, at: e.get_budget_status(at[1])),
    "read_budget_usage_and_limits": (a_budget, lambda e, at: e.read_budget_usage_and_limits(at[1])),
    "list_budgets": (a_budget, lambda e, at: e.list_budgets()),
    "find_budgets": (a_budget, lambda e, at: e.find_budgets(["b"])),
    "report_usage": (a_budget, lambda e, at: e.report_usage(at[0], {"t": 1}, at[1])),
    "report_usage_many": (a_budget, lambda e, at: e.report_usage_many([reported(*at)] * 3)),
    "use_budgets": (a_budget, lambda e, at: e.use_budgets([reported(*at)] * 3)),
    "report_usage_admin": (a_budget, lambda e, at: e.report_usage_admin(at[1], dimensions=["t"], deltas=[1])),
    "record_spend": (a_budget, lambda e, at: e.record_spend(at[1], at[0].execution_id, {"t": 1})),
    "release_budget": (a_budget, lambda e, at: e.release_budget(at[1], at[0].execution_id)),
    "list_spend": (a_budget, lambda e, at: e.list_spend(at[1])),
    "reset_budget": (a_budget, lambda e, at: e.reset_budget(at[1])),
    "reserve_usage": (a_budget, lambda e, at: e.reserve_usage(at[0], {"t": 1}, at[1])),
    "settle_usage": (a_budget, lambda e, at: e.settle_usage(at[0], at[2], {"t": 1})),
    "cancel_reservation": (a_budget, lambda e, at: e.cancel_reservation(at[0], at[2])),
    "pause_for_budget": (a_budget, lambda e, at: e.pause_for_budget(at[0], {"t": 200}, at[1])),
    "read_usage": (a_budget, lambda e, at: e.read_usage(at[0].execution_id)),
    "reset_due_budgets": (nothing, lambda e, _: e.reset_due_budgets()),
    "collect_reservations": (nothing, lambda e, _: e.collect_reservations()),
    "reconcile_budget_counters": (nothing, lambda e, _: e.reconcile_budget_counters()),
    "append_frame": (state("A"), lambda e, at: e.append_frame(at.handle, NewFrame(payload=b"x"))),
    "append_frames": (two_active, lambda e, handles: e.append_frames([(h, NewFrame(payload=b"x")) for h in handles])),
    "read_stream": (state("A"), lambda e, at: e.read_stream(at.id)),
    "read_streams": (state("A"), lambda e, at: e.read_streams([(at.id, None, START)])),
    "tail_stream": (state("A"), lambda e, at: e.tail_stream(at.id)),
    "read_last_frames": (state("A"), lambda e, at: e.read_last_frames([at.id])),
    "read_summary": (state("A"), lambda e, at: e.read_summary(at.id)),
    "count_emitted": (state("A"), lambda e, at: e.count_emitted(at.id, 0)),
    "read_started": (state("A"), lambda e, at: e.read_started([at.id])),
    "park": (two_active, lambda e, handles: e.park(handles[0], ends_of=[handles[1].execution_id])),
    "submit_child": (state("A"), lambda e, at: e.submit_child(at.handle, "s", 0, new(1)[0])),
    "submit_child_flow": (
        state("A"),
        lambda e, at: e.submit_child_flow(
            at.handle, "f", 0, [NewNode(name="a", execution=new(1)[0])], flow_id=FlowId(mint_uuid()), seed=mint_uuid()
        ),
    ),
    "list_children": (parent, lambda e, at: e.list_children(at)),
    "cancel_children": (parent, lambda e, at: e.cancel_children(at)),
    "watch": (waiting, lambda e, at: e.watch([at], timedelta(seconds=1))),
    "unwatch": (waiting, lambda e, at: e.unwatch([at])),
    "read_outcomes": (state("T:completed"), lambda e, at: e.read_outcomes([at.id])),
    "free_key": (state("T:failed"), lambda e, at: e.free_key(at.id, "k")),
    "cancel_many": (waiting, lambda e, at: e.cancel_many([at], "no")),
    "replay_many": (state("T:failed"), lambda e, at: e.replay_many([at.id])),
    "delete_execution": (state("T:failed"), lambda e, at: e.delete_execution(at.id)),
    "redact_execution": (state("T:failed"), lambda e, at: e.redact_execution(at.id)),
    "put_schedule": (nothing, lambda e, _: e.put_schedule("new", **SCHEDULE)),
    "list_schedules": (scheduled, lambda e, _: e.list_schedules()),
    "read_schedule": (scheduled, lambda e, _: e.read_schedule("s")),
    "schedule_as_due": (scheduled, lambda e, _: e.schedule_as_due("s")),
    "pause_schedule": (scheduled, lambda e, _: e.pause_schedule("s")),
    "resume_schedule": (scheduled, lambda e, _: e.resume_schedule("s")),
    "due_schedules": (scheduled, lambda e, _: e.due_schedules()),
    "until_next_schedule": (scheduled, lambda e, _: e.until_next_schedule()),
    "fire_schedule": (
        scheduled,
        lambda e, _: e.fire_schedule("s", DUE, next_at=None, fired_at=DUE, items=new(2)),
    ),
    "delete_schedule": (scheduled, lambda e, _: e.delete_schedule("s")),
    "list_events": (state("A"), lambda e, at: e.list_events(at.id)),
    "find_id": (state("A"), lambda e, at: e.find_id(str(at.id)[-8:])),
    "count_events": (state("A"), lambda e, _: e.count_events()),
    "claim_for_worker": (waiting, lambda e, _: e.claim_for_worker(**WORKER, namespace=None, max_grants=64)),
    "create_quota_policy": (nothing, lambda e, _: e.create_quota_policy(name="new", max_concurrent=1)),
    "update_quota_policy": (capped, lambda e, at: e.update_quota_policy(at[0], max_concurrent=2)),
    "read_quota_policy_limits": (capped, lambda e, at: e.read_quota_policy_limits(at[0])),
    "get_quota_policy": (capped, lambda e, at: e.get_quota_policy(at[0])),
    "list_quota_policies": (capped, lambda e, _: e.list_quota_policies()),
    "list_quota_keys": (capped, lambda e, at: e.list_quota_keys(at[0])),
    "check_admission": (capped, lambda e, at: e.check_admission(at[0], e.mint_id(), concurrency_cap=9)),
    "release_admission": (capped, lambda e, at: e.release_admission(*at)),
    "unblock_limited": (capped, lambda e, _: e.unblock_limited(after=(UUID(int=0), ""))),
    "reconcile_quotas": (capped, lambda e, _: e.reconcile_quotas()),
    "issue_claim_grant": (waiting, lambda e, at: e.issue_claim_grant(at, **WORKER)),
    "verify_grant": (granted, lambda e, grant: e.verify_grant(grant.execution_id, grant.grant_key)),
    "claim_execution": (granted, lambda e, grant: e.claim_execution(grant.execution_id, **WORKER, **fresh())),
    "claim_resumed_execution": (
        resumable_grant,
        lambda e, grant: e.claim_resumed_execution(grant.execution_id, **WORKER, lease_id=mint_uuid()),
    ),
    "claim_from_resume_grant": (resumable_grant, lambda e, grant: e.claim_from_resume_grant(grant, **WORKER)),
    "issue_grant_and_claim": (waiting, lambda e, at: e.issue_grant_and_claim(at)),
    "issue_reclaim_grant": (reclaimable, lambda e, at: e.issue_reclaim_grant(at, **OTHER)),
    "reclaim_execution": (
        reclaim_granted,
        lambda e, grant: e.reclaim_execution(grant.execution_id, **OTHER, **fresh()),
    ),
    "revoke_lease": (state("A"), lambda e, at: e.revoke_lease(at.id)),
    "replay_execution": (state("T:failed"), lambda e, at: e.replay_execution(at.id)),
    "change_priority": (waiting, lambda e, at: e.change_priority(at, 5)),
    "block_execution_for_admission": (waiting, lambda e, at: e.block_execution_for_admission(at, "waiting_for_quota")),
    "block_route": (waiting, lambda e, at: e.block_route(at)),
    "unblock_execution": (state("B.operator"), lambda e, at: e.unblock_execution(at.id)),
    "scan_eligible_executions": (waiting, lambda e, _: e.scan_eligible_executions("default")),
    "read_execution": (state("A"), lambda e, at: e.read_execution(at.id)),
    "read_executions": (state("A"), lambda e, at: e.read_executions([at.id])),
    "describe_execution": (state("A"), lambda e, at: e.describe_execution(at.id)),
    "read_execution_state": (waiting, lambda e, at: e.read_execution_state(at)),
    "read_execution_info": (waiting, lambda e, at: e.read_execution_info(at)),
    "get_execution_result": (state("T:completed"), lambda e, at: e.get_execution_result(at.id)),
    "read_result": (state("T:completed"), lambda e, at: e.read_result(at.id)),
    "read_execution_context": (waiting, lambda e, at: e.read_execution_context(at)),
    "read_current_attempt_index": (waiting, lambda e, at: e.read_current_attempt_index(at)),
    "read_total_attempt_count": (waiting, lambda e, at: e.read_total_attempt_count(at)),
    "read_exec_core_fields": (
        waiting,
        lambda e, at: e.read_exec_core_fields(home(at), at, ["lane_id"]),
    ),
    "resolve_execution_flow_id": (waiting, lambda e, at: e.resolve_execution_flow_id(at)),
    "get_execution_namespace": (waiting, lambda e, at: e.get_execution_namespace(at)),
    "get_execution_tag": (waiting, lambda e, at: e.get_execution_tag(at, "a.b")),
    "set_execution_tag": (waiting, lambda e, at: e.set_execution_tag(at, "a.b", "c")),
    "list_attempts": (state("A"), lambda e, at: e.list_attempts(at.id)),
    "list_executions": (waiting, lambda e, at: e.list_executions(home(at))),
    "find_executions": (waiting, lambda e, _: e.find_executions(lane_ids=["default"], states=["waiting"])),
    "list_expired_leases": (state("X"), lambda e, _: e.list_expired_leases()),
    "list_lanes": (waiting, lambda e, _: e.list_lanes()),
    "set_lane_state": (nothing, lambda e, _: e.set_lane_state("other", "paused")),
    "lane_stats": (waiting, lambda e, _: e.lane_stats()),
    "read_gauges": (waiting, lambda e, _: e.read_gauges()),
    "read_events": (state("A"), lambda e, _: e.read_events()),
    "seek_events": (state("A"), lambda e, _: e.seek_events(datetime.now(UTC))),
    "sleep_for_events": (nothing, lambda e, _: e.sleep_for_events(1.0, None)),
    **{
        name: (state("A"), lambda e, _, name=name: followed(e, name))
        for name in (
            "follow",
            "subscribe_completion",
            "subscribe_lease_history",
            "subscribe_signal_delivery",
            "subscribe_operator_events",
            "subscribe_worker_events",
        )
    },
    "register_consumer": (nothing, lambda e, _: e.register_consumer("c")),
    "consume": (consumer, lambda e, _: e.consume("c", ignored)),
    "fail_consumer": (consumer, lambda e, _: e.fail_consumer("c", "x")),
    "leave_consumer": (consumer, lambda e, _: e.leave_consumer("c")),
    "set_consumer": (consumer, lambda e, _: e.set_consumer("c", None)),
    "delete_consumer": (consumer, lambda e, _: e.delete_consumer("c")),
    "list_consumers": (consumer, lambda e, _: e.list_consumers()),
    "fork_execution": (waiting, lambda e, at: e.fork_execution(at, before_step=None)),
    "mark_lease_expired_if_due": (state("A"), lambda e, at: e.mark_lease_expired_if_due(at.id)),
    "promote_delayed": (state("D.1"), lambda e, at: e.promote_delayed(at.id)),
    "expire_execution": (state("A"), lambda e, at: e.expire_execution(at.id, "execution_deadline")),
    "run_timers": (state("X"), lambda e, _: e.run_timers("lease")),
    "trim_retention": (state("T:completed"), lambda e, _: e.trim_retention()),
    "sweep": (nothing, lambda e, _: e.sweep()),
    "submit_hooks": (nothing, lambda e, _: e.submit_hooks()),
    "next_due": (state("A"), lambda e, _: e.next_due()),
    "look_for_due": (nothing, lambda e, _: e.look_for_due({}, at_most=timedelta(seconds=1))),
    "take_lead": (nothing, lambda e, _: e.take_lead(["duties"], timedelta(seconds=1))),
    "leave_lead": (nothing, lambda e, _: e.leave_lead()),
    "audit": (waiting, lambda e, _: e.audit()),
    "audit_sample": (waiting, lambda e, at: e.audit_sample(home(at))),
    "repair_floors": (waiting, lambda e, at: e.repair_floors()),
    "create_waitpoint": (state("A"), lambda e, at: e.create_waitpoint(at.handle, "k", timedelta(1))),
    "close_waitpoint": (pending, lambda e, at: e.close_waitpoint(at[0], at[1].waitpoint_id)),
    "expire_waitpoint": (pending, lambda e, at: e.expire_waitpoint(at[0].execution_id, at[1].waitpoint_id)),
    "list_pending_waitpoints": (suspended, lambda e, at: e.list_pending_waitpoints(at.handle.execution_id)),
    "read_waitpoint_token": (
        suspended,
        lambda e, at: e.read_waitpoint_token(at.handle.partition, at.details.waitpoint_id),
    ),
    "probe_waitpoint": (
        suspended,
        lambda e, at: e.probe_waitpoint(at.handle.execution_id, at.details.waitpoint_id, at.details.waitpoint_token),
    ),
    "suspend": (state("A"), lambda e, at: e.suspend(at.handle, **bound())),
    "suspend_by_triple": (state("A"), lambda e, at: e.suspend_by_triple(at.handle.fence, **bound())),
    "suspend_on": (pending, lambda e, at: e.suspend_on(at[0], [at[1].waitpoint_id], on("k"))),
    "deliver_signal": (suspended, signal),
    "deliver_approval_signal": (suspended, approve),
    "signal_execution": (
        suspended,
        lambda e, at: e.signal_execution(at.handle.execution_id, "k", signal_name="go", source_type="test"),
    ),
    "try_deliver": (
        suspended,
        lambda e, at: e.try_deliver(
            at.handle.execution_id,
            at.details.waitpoint_id,
            at.details.waitpoint_token,
            signal_name="go",
            source_type="test",
        ),
    ),
    "try_signal": (
        suspended,
        lambda e, at: e.try_signal(at.handle.execution_id, "k", signal_name="go", source_type="test"),
    ),
    "refuse_signals": (waiting_open, lambda e, at: e.refuse_signals(at, "w", 0, {})),
    "observe_signals": (suspended, lambda e, at: e.observe_signals(at.handle)),
    "read_signals": (suspended, lambda e, at: e.read_signals(at.handle.execution_id)),
    "resume_execution": (suspended, lambda e, at: e.resume_execution(at.handle.execution_id)),
    "expire_suspension": (overdue, lambda e, at: e.expire_suspension(at)),
    "read_suspension": (suspended, lambda e, at: e.read_suspension(at.handle.execution_id)),
    "list_suspended": (suspended, lambda e, at: e.list_suspended(at.handle.partition)),
    "list_waits": (suspended, lambda e, _: e.list_waits()),
    "open_wait": (state("A"), lambda e, at: e.open_wait(at.handle, "w", 0, ["k"], None)),
    "settle_wait": (waiting_open, lambda e, at: e.settle_wait(at, "w", 0, on("k"))),
    "seed_waitpoint_hmac_secret": (nothing, lambda e, _: e.seed_waitpoint_hmac_secret("k1", "ab" * 32)),
    "rotate_waitpoint_hmac_secret_all": (nothing, lambda e, _: e.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32)),
    "list_waitpoint_hmac_kids": (nothing, lambda e, _: e.list_waitpoint_hmac_kids()),
    "submit_flow": (nothing, lambda e, _: e.submit_flow([node("a"), node("b", "a"), node("c", "a")])),
    "extend_flow": (
        chain,
        lambda e, at: e.extend_flow(
            at.flow_id,
            [NewNode(name="d", execution=new(1)[0], after=[NewEdge(upstream=at.nodes["a"])]), node("e", "d")],
        ),
    ),
    "create_flow": (nothing, lambda e, _: e.create_flow()),
    "add_execution_to_flow": (outside, lambda e, at: e.add_execution_to_flow(*at)),
    "add_executions_to_flow": (outside, lambda e, at: e.add_executions_to_flow(at[0], [at[1]])),
    "stage_dependency_edge": (
        two_members,
        lambda e, at: e.stage_dependency_edge(at.flow_id, **at.edge, expected_graph_revision=2),
    ),
    "stage_and_apply_edges": (
        two_members,
        lambda e, at: e.stage_and_apply_edges(
            at.flow_id,
            [Edge(edge_id=mint_uuid(), upstream=at.upstream, downstream=at.downstream) for _ in range(2)],
            expected_graph_revision=2,
        ),
    ),
    "apply_dependency_to_child": (staged, lambda e, at: e.apply_dependency_to_child(at.flow_id, **at.edge)),
    "set_edge_group_policy": (
        two_members,
        lambda e, at: e.set_edge_group_policy(at.flow_id, at.downstream, Quorum(2)),
    ),
    "describe_flow": (chain, lambda e, at: e.describe_flow(at.flow_id)),
    "read_flow_graph": (chain, lambda e, at: e.read_flow_graph(at.flow_id)),
    "list_flow_members": (chain, lambda e, at: e.list_flow_members(at.flow_id, results=True)),
    "flow_progress": (chain, lambda e, at: e.flow_progress(at.flow_id)),
    "list_flows": (chain, lambda e, at: e.list_flows(home(at.nodes["a"]))),
    "find_flows": (chain, lambda e, _: e.find_flows(namespace="", flow_kind="")),
    "list_edges": (chain, lambda e, at: e.list_edges(at.flow_id, incoming=at.nodes["b"])),
    "describe_edge": (applied, lambda e, at: e.describe_edge(at.flow_id, at.edge_id)),
    "evaluate_flow_eligibility": (chain, lambda e, at: e.evaluate_flow_eligibility(at.nodes["b"])),
    "set_flow_tag": (chain, lambda e, at: e.set_flow_tag(at.flow_id, "a.b", "d")),
    "set_flow_tags": (chain, lambda e, at: e.set_flow_tags(at.flow_id, {"a.b": "d", "a.c": "e"})),
    "get_flow_tag": (chain, lambda e, at: e.get_flow_tag(at.flow_id, "a.b")),
    "project_flow_summary": (chain, lambda e, at: e.project_flow_summary(at.flow_id)),
    "project_flow_summaries": (chain, lambda e, _: e.project_flow_summaries()),
    "read_flow_summary": (chain, lambda e, at: e.read_flow_summary(at.flow_id)),
    "delete_flow": (ended, lambda e, at: e.delete_flow(at)),
    "dispatch_completion": (skipped, lambda e, at: e.dispatch_completion(at.cursor.position)),
    "cascade_completion": (skipped, lambda e, at: e.cascade_completion(at)),
    "dispatch_cascades": (skipped, lambda e, _: e.dispatch_cascades()),
    "resolve_dependency": (
        applied,
        lambda e, at: e.resolve_dependency(
            at.flow_id,
            edge_id=at.edge_id,
            upstream_execution_id=at.upstream_execution_id,
            downstream_execution_id=at.downstream_execution_id,
            outcome="failed",
        ),
    ),
    "promote_blocked_to_eligible": (chain, promoted),
    "reconcile_edges": (chain, lambda e, _: e.reconcile_edges()),
    "cancel_siblings": (raced, lambda e, at: e.cancel_siblings(*at)),
    "drain_sibling_cancel_group": (raced, lambda e, at: e.drain_sibling_cancel_group(*at)),
    "reconcile_sibling_cancel_group": (raced, lambda e, at: e.reconcile_sibling_cancel_group(*at)),
    "list_sibling_cancels": (raced, lambda e, _: e.list_sibling_cancels()),
    "cancel_flow": (chain, lambda e, at: e.cancel_flow(at.flow_id)),
    "cancel_flow_header": (chain, lambda e, at: e.cancel_flow_header(at.flow_id, reason="no")),
    "ack_cancel_member": (to_acknowledge, lambda e, at: e.ack_cancel_member(*at)),
    "read_cancel_backlog": (owing, lambda e, at: e.read_cancel_backlog(at[0])),
    "reconcile_cancellations": (owing, lambda e, _: e.reconcile_cancellations()),
    "create_api_key": (nothing, lambda e, _: e.create_api_key(f"key {mint_uuid()}", ["read"])),
    "list_api_keys": (a_key, lambda e, _: e.list_api_keys()),
    "read_api_key": (a_key, lambda e, key: e.read_api_key(key.key_id)),
    "verify_api_key": (a_key, lambda e, key: e.verify_api_key(key.key.reveal())),
    "note_api_key_use": (a_key, lambda e, key: e.note_api_key_use(key.key_id)),
    "rotate_api_key": (a_key, lambda e, key: e.rotate_api_key(key.key_id)),
    "revoke_api_key": (a_key, lambda e, key: e.revoke_api_key(key.key_id)),
    "write_operator_audit": (nothing, lambda e, _: e.write_operator_audit(Actor(name="a", operation="o"))),
    "list_operator_audit": (nothing, lambda e, _: e.list_operator_audit()),
    "begin_answer": (nothing, lambda e, _: e.begin_answer(an_answer(), b"r")),
    "finish_answer": (begun, lambda e, key: e.finish_answer(key, status=200)),
    "forget_answer": (begun, lambda e, key: e.forget_answer(key)),
    "in_namespaces": (nothing, lambda e, _: e.in_namespaces(["n"], [mint_uuid()], [mint_uuid()])),
    "preview_bulk": (nothing, lambda e, _: e.preview_bulk("cancel", NO_KIND)),
    "create_bulk": (nothing, lambda e, _: e.create_bulk("cancel", NO_KIND, actor="a")),
    "read_bulk": (a_job, lambda e, job: e.read_bulk(job)),
    "list_running_bulk": (a_job, lambda e, _: e.list_running_bulk()),
    "run_bulk": (a_job, lambda e, job: e.run_bulk(job)),
    "stop_bulk": (a_job, lambda e, job: e.stop_bulk(job)),
    "list_failures": (nothing, lambda e, _: e.list_failures()),
    "prepare": (nothing, lambda e, _: e.prepare()),
    "ping": (nothing, lambda e, _: e.ping()),
    "server_time_ms": (nothing, lambda e, _: e.server_time_ms()),
}
# Three statements for a picture; and one for each flow whose members are cancelled, after the one that finds it.
# A consumer begins, takes its turn, reads, and commits.
MORE = {"read_flow_graph": 3, "reconcile_cancellations": 2, "consume": 4}
# What is not an operation on the database.
OTHERS = {"connect", "close", "shutdown_prepare"}


def test_no_operation_is_forgotten() -> None:
    methods = {
        name for name, _ in inspect.getmembers(ff.Engine, inspect.iscoroutinefunction) if not name.startswith("_")
    }
    assert methods == set(OPERATIONS) | OTHERS


async def test_every_operation_is_one_round_trip_once_it_is_prepared(
    wire: tuple[Wire, str], plain_engine: ff.Engine, clock: Clock
) -> None:
    counter, dsn = wire
    counted: dict[str, int] = {}
    async with await ff.Engine.connect(dsn, max_size=1, notifications=False) as engine:
        for name, (setup, call) in OPERATIONS.items():
            await call(engine, await setup(plain_engine, clock))
            there = await setup(plain_engine, clock)
            before = counter.asked
            await call(engine, there)
            counted[name] = counter.asked - before
            # Whatever is left must not be found by the next operation.
            await clock.advance(days=8)
            for kind in ("lease", "delay", "deadline", "parked", "waitpoint", "suspension", "retention"):
                await plain_engine.run_timers(kind, limit=1000)
            for left in (await plain_engine.list_waits(limit=1000)).items:
                await plain_engine.cancel(Operator(left.execution_id), "enough")
            for leftover in await plain_engine.claim_many(**WORKER, limit=1000):
                await plain_engine.complete(leftover.handle)
            while (await plain_engine.cancel_siblings()).action != "none":
                pass
            while (await plain_engine.reconcile_cancellations()).more:
                pass
            while (await plain_engine.dispatch_cascades()).more:
                pass
    assert {name: count for name, count in counted.items() if count != 1} == MORE


async def test_the_size_of_a_batch_does_not_change_the_number_of_round_trips(
    wire: tuple[Wire, str], plain_engine: ff.Engine
) -> None:
    counter, dsn = wire
    async with await ff.Engine.connect(dsn, max_size=1, notifications=False) as engine:
        for count in (1, 1, 1000):
            before = counter.asked
            await engine.create_many(new(count))
            claimed = await engine.claim_many(**WORKER, limit=1000)
            assert len(claimed) == count
            handles = [c.handle for c in claimed]
            await engine.renew_many(handles)
            await engine.complete_many(handles)
            asked = counter.asked - before
        assert asked == 4


async def test_a_clients_signal_and_decision_are_one_round_trip(
    wire: tuple[Wire, str], plain_engine: ff.Engine, clock: Clock
) -> None:
    counter, dsn = wire
    async with await ff.Engine.connect(dsn, max_size=1, notifications=False) as engine:
        client = AsyncClient(engine, ff.App())
        for counted in (False, True):
            for send in (client.signal, client.approve, client.reject):
                there = (await suspended(plain_engine, clock)).handle.execution_id
                before = counter.asked
                await send(there, "k")
                assert not counted or counter.asked - before == 1


async def test_raising_the_budget_of_a_run_is_one_round_trip(wire: tuple[Wire, str]) -> None:
    counter, dsn = wire
    async with await ff.Engine.connect(dsn, max_size=1, notifications=False) as engine:
        policy = ExecutionPolicy(budget=OwnBudget(hard={"t": 1}))
        owner = (await engine.create_execution(execution_kind="test", policy=policy)).execution_id
        await raise_owned(engine, owner, {"t": 1}, {})
        before = counter.asked
        assert (await raise_owned(engine, owner, {"t": 1}, {})).hard_limits == {"t": 3}
        assert counter.asked - before == 1


async def test_an_answer_with_a_schema_is_one_round_trip_once_the_schema_is_known(
    wire: tuple[Wire, str], plain_engine: ff.Engine, clock: Clock
) -> None:
    counter, dsn = wire
    schema = msgspec.json.encode({"type": "object", "title": f"{mint_uuid()}"}).decode()  # which no test has seen
    key = f"k {mint_uuid()}"

    async def waiting() -> ff.ExecutionId:
        for left in await plain_engine.claim_many(**WORKER, limit=10):
            await plain_engine.complete(left.handle)
        at = (await started(plain_engine)).handle
        opened = await plain_engine.open_wait(at, "w", 0, [key], None, schema)
        await plain_engine.suspend_on(at, [one.waitpoint_id for one in opened.waitpoints], on(key))
        return at.execution_id

    async with await ff.Engine.connect(dsn, max_size=1, notifications=False) as engine:
        client = AsyncClient(engine, ff.App())
        await client.signal((await suspended(plain_engine, clock)).handle.execution_id, "k")  # prepares the statement
        for expected in (2, 1, 1):
            there = await waiting()
            before = counter.asked
            await client.signal(there, key, payload={})
            assert counter.asked - before == expected
        there = await waiting()
        before = counter.asked
        with pytest.raises(ff.PayloadRefused):
            await client.signal(there, key, payload=5)
        assert counter.asked - before == 1


async def test_the_counter_counts(wire: tuple[Wire, str]) -> None:
    counter, dsn = wire
    async with await ff.Engine.connect(dsn, max_size=1, notifications=False) as engine:
        before = counter.asked
        for _ in range(3):
            await engine.ping()
        unprepared = counter.asked - before
        assert unprepared >= 3
        async with engine._database.connection() as connection, connection.transaction():
            await connection.execute("select 1")
        assert counter.asked - before == unprepared + 3
