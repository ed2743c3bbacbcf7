"""Bad input: every argument of every operation, out of range, of the wrong type, too long, in the wrong characters.

The engine refuses it by name before it changes the database, and never with a transport error.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.engine.reads import Place
from flowfabric.engine.signals import SignalFields
from flowfabric.errors import Contention, StateError, ValidationFailed
from flowfabric.values.attempt import Failure
from flowfabric.values.conditions import on
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.flow import Edge, NoOp
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.joins import Quorum
from flowfabric.values.lease import Fence, Handle, Operator
from flowfabric.values.step import NewStep
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.ids import id_in
from tests.sql.bad_input import budgets, executions, flows, leases, reads, server, service, streams, waits
from tests.sql.bad_input.table import DIGEST, DIGEST_FUNCTION, DUE, UNKNOWN, UUID_TEXT, Case, World, as_node
from tests.support import WORKER, Clock, Wipe, started, submit, submit_member

CASES = [
    *budgets.CASES,
    *executions.CASES,
    *flows.CASES,
    *leases.CASES,
    *reads.CASES,
    *server.CASES,
    *streams.CASES,
    *waits.CASES,
    *service.CASES,
]

NO_ARGUMENTS = {
    "close",
    "leave_lead",
    "list_leaders",
    "prepare",
    "ping",
    "read_denials",
    "server_time_ms",
    "next_due",
    "timer_wakeups",
    "work_wakeups",
    "take_told",
    "until_next_schedule",
    "backend_label",
    "capabilities",
    "list_waitpoint_hmac_kids",
}
NOT_CALLED = {
    "connect",
    "attach",
    "detach",
    "lost_wakeups",
    "wakeups",
    "is_plain",
    "mint_id",
    "event_wakeups",
    "sleep_for_events",
    "acting",
    "roll_back",
}


def _attempts(world: World) -> Iterator[tuple[Case, str, Any, Any]]:
    for case in CASES:
        for argument, (expected, values) in case.bad.items():
            for value in values:
                yield case, argument, expected, value(world) if callable(value) and inspect.isfunction(value) else value


def _is_large(value: Any) -> bool:
    """Whether there are many bytes anywhere in it: shown, they would take gigabytes."""
    if isinstance(value, bytes):
        return len(value) > 99
    if isinstance(value, list | tuple):
        return any(map(_is_large, value))
    if isinstance(value, msgspec.Struct):
        return any(_is_large(getattr(value, name)) for name in value.__struct_fields__)
    return dataclasses.is_dataclass(value) and any(map(_is_large, vars(value).values()))


async def test_every_bad_argument_is_refused_by_name_and_changes_nothing(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    world = World()
    await world.build(plain_engine, clock)
    await sql.execute(DIGEST_FUNCTION)
    before = await sql.fetchval(DIGEST)
    wrong: list[str] = []
    count = 0
    last = None
    for case, argument, expected, value in _attempts(world):
        count += 1
        if last is not None and (last != (case, argument) or sampling.is_full()):
            before = await _unchanged(sql, before, last, wrong)
        last = (case, argument)
        shown = "too much" if _is_large(value) else ascii(value)[:60]
        what = f"{case.name}({argument}={shown})"
        try:
            answer = await getattr(plain_engine, case.name)(**(case.good(world) | {argument: value}))
            if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], ff.FlowFabricError):
                raise answer[0]  # a bad item of a batch is its own verdict
        except ValidationFailed as error:
            if isinstance(expected, dict):
                if error.kind != expected["kind"]:
                    wrong.append(f"{what}: {error!r}")
            elif not isinstance(error, ff.InvalidInput):
                wrong.append(f"{what}: {error!r}")
            elif expected != "*" and not (error.field or "").startswith(expected or argument):
                wrong.append(f"{what}: names {error.field}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{what}: answered {answer!r}"[:200])
    assert last is not None
    await _unchanged(sql, before, last, wrong)
    assert not wrong, "\n".join(wrong)
    assert count > 4500


async def _unchanged(sql: asyncpg.Connection[Any], before: str, last: tuple[Case, str], wrong: list[str]) -> str:
    """What is stored after all bad values of an argument; with `--full`, after each of them."""
    after: str = await sql.fetchval(DIGEST)
    if after != before:
        wrong.append(f"{last[0].name}({last[1]}=...): changed something")
    return after


@pytest.mark.both_servers
async def test_the_arguments_taken_as_good_are_good(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    """Or the refusals above would prove nothing: every operation answers, or refuses for the state alone."""
    wipe = await Wipe.of(sql)
    await sql.execute(DIGEST_FUNCTION)
    world, before = World(), None
    for case in CASES:
        if before is None or await sql.fetchval(DIGEST) != before:  # each begins with the same
            await wipe()
            world = World()
            await world.build(plain_engine, clock)
            before = await sql.fetchval(DIGEST)
        try:
            await getattr(plain_engine, case.name)(**case.good(world))
        except ValidationFailed as error:
            raise AssertionError(f"{case.name}: {error!r}") from error
        except (Contention, StateError):
            pass


def test_every_operation_of_the_engine_is_in_the_table() -> None:
    operations = {
        name
        for name, value in inspect.getmembers(ff.Engine)
        if not name.startswith("_") and callable(value) and not isinstance(value, property)
    }
    assert operations - NO_ARGUMENTS - NOT_CALLED - {case.name for case in CASES} == set()
    for case in CASES:
        of = "suspend" if case.name == "suspend_by_triple" else case.name  # takes the same
        arguments = set(inspect.signature(getattr(ff.Engine, of)).parameters)
        if case.name in ("signal_execution", "try_signal", "try_deliver"):
            arguments |= set(SignalFields.__annotations__)
        assert set(case.bad) <= arguments, case.name


# ---- ids that are well formed and name nothing

NOT_FOUND: dict[str, dict[str, Any]] = {
    "issue_claim_grant": dict(WORKER),
    "issue_reclaim_grant": dict(WORKER),
    "claim_execution": {**WORKER, "lease_id": mint_uuid(), "attempt_id": mint_uuid()},
    "claim_resumed_execution": {**WORKER, "lease_id": mint_uuid()},
    "reclaim_execution": {**WORKER, "lease_id": mint_uuid(), "attempt_id": mint_uuid()},
    "issue_grant_and_claim": {},
    "revoke_lease": {},
    "replay_execution": {},
    "change_priority": {"new_priority": 5},
    "unblock_execution": {},
    "set_execution_tag": {"key": "a.b", "value": "c"},
    "resume_execution": {},
    "list_pending_waitpoints": {},
    "deliver_approval_signal": {
        "lane_id": "own",
        "waitpoint_id": mint_uuid(),
        "signal_name": "approved",
        "idempotency_suffix": "1",
    },
}
# A grant is taken in at these, so that a partition which does not exist cannot be ours.


async def test_an_unknown_execution_is_not_found_and_nothing_changes(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    await sql.execute(DIGEST_FUNCTION)
    before = await sql.fetchval(DIGEST)
    for name, fields in NOT_FOUND.items():
        with pytest.raises(ff.NotFound) as unknown:
            await getattr(engine, name)(UNKNOWN, **fields)
        assert (unknown.value.entity, unknown.value.id) == ("execution", UUID_TEXT), name
        assert unknown.value.execution_id == UNKNOWN, name
    fence = Fence(execution_id=UNKNOWN, lease_id=mint_uuid(), lease_epoch=1, attempt_id=mint_uuid())  # type: ignore[arg-type]
    for authority in (fence, Operator(UNKNOWN)):
        for call in (
            lambda a=authority: engine.complete(a),
            lambda a=authority: engine.fail(a, "no"),
            lambda a=authority: engine.cancel(a, "no"),
            lambda a=authority: engine.delay(a, timedelta(1)),
            lambda a=authority: engine.wait_children(a),
            lambda a=authority: engine.release(a),
        ):
            with pytest.raises(ff.NotFound):
                await call()
    for call in (lambda: engine.renew(fence), lambda: engine.progress(fence, percent=1)):
        with pytest.raises(ff.NotFound):
            await call()
    for call in (
        lambda: engine.park(fence, ends_of=[id_in(4)]),
        lambda: engine.submit_child(fence, "s", 0, NewExecution(execution_kind="k")),
        lambda: engine.create_waitpoint(fence, "k", timedelta(1)),
        lambda: engine.close_waitpoint(fence, mint_uuid()),
        lambda: engine.suspend_by_triple(fence, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k")),
        lambda: engine.open_wait(fence, "w", 0, ["k"], None),
        lambda: engine.settle_wait(fence, "w", 0, on("k")),
        lambda: engine.delete_execution(UNKNOWN),
        lambda: engine.redact_execution(UNKNOWN),
        lambda: engine.pause_schedule("unknown"),
        lambda: engine.resume_schedule("unknown"),
        lambda: engine.delete_schedule("unknown"),
    ):
        with pytest.raises(ff.NotFound):
            await call()
    assert await engine.fire_schedule("unknown", DUE, next_at=None, fired_at=None, items=[]) is None
    assert await engine.read_schedule("unknown") is await engine.schedule_as_due("unknown") is None
    assert await engine.read_steps([UNKNOWN]) == []
    assert await engine.read_suspension(UNKNOWN) is None
    assert (await engine.read_signals(UNKNOWN)).items == []
    assert (await engine.expire_suspension(UNKNOWN)).reason == "not_found"  # type: ignore[union-attr]
    assert (await engine.expire_waitpoint(UNKNOWN, mint_uuid())).reason == "not_found"  # type: ignore[union-attr]
    assert await engine.probe_waitpoint(UNKNOWN, mint_uuid(), f"k1:{'0' * 64}") == "unknown"
    assert await engine.read_waitpoint_token(3, mint_uuid()) is None
    assert (await engine.read_outcomes([UNKNOWN]))[UNKNOWN].state is None
    for batch in (
        engine.renew_many([fence]),
        engine.complete_many([fence]),
        engine.record_steps([(fence, NewStep(name="s"))]),
        engine.cancel_many([UNKNOWN], "no"),
        engine.replay_many([UNKNOWN]),
    ):
        (verdict,) = await batch
        assert isinstance(verdict, ff.NotFound)
    (failed,) = await engine.fail_many([Failure(authority=fence, reason="no")])
    assert isinstance(failed, ff.NotFound)
    assert (await engine.block_execution_for_admission(UNKNOWN, "paused_by_operator")).message == "execution_not_found"  # type: ignore[union-attr]
    assert (await engine.mark_lease_expired_if_due(UNKNOWN)).reason == "execution_not_found"  # type: ignore[union-attr]
    assert await engine.promote_delayed(UNKNOWN) == "not_found"
    assert await engine.expire_execution(UNKNOWN, "execution_deadline") == "not_found"
    assert await engine.verify_grant(UNKNOWN, "x") == "malformed"
    assert await engine.evaluate_flow_eligibility(UNKNOWN) == "not_found"
    assert await sql.fetchval(DIGEST) == before


async def test_an_unknown_flow_is_not_found_and_nothing_changes(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    flow = FlowId(UUID(UUID_TEXT))
    one, other = [await submit(engine, flow_id=flow) for _ in range(2)]
    edge: dict[str, Any] = {"edge_id": mint_uuid(), "upstream_execution_id": one, "downstream_execution_id": other}
    await sql.execute(DIGEST_FUNCTION)
    before = await sql.fetchval(DIGEST)
    for call in (
        lambda: engine.extend_flow(flow, [as_node("a")]),
        lambda: engine.add_execution_to_flow(flow, one),
        lambda: engine.add_executions_to_flow(flow, [one, other]),
        lambda: engine.stage_dependency_edge(flow, **edge, expected_graph_revision=2),
        lambda: engine.stage_and_apply_edges(
            flow, [Edge(edge_id=mint_uuid(), upstream=one, downstream=other)], expected_graph_revision=2
        ),
        lambda: engine.apply_dependency_to_child(flow, **edge),
        lambda: engine.set_edge_group_policy(flow, other, Quorum(1)),
        lambda: engine.flow_progress(flow),
        lambda: engine.set_flow_tag(flow, "a.b", "x"),
        lambda: engine.set_flow_tags(flow, {"a.b": "x", "a.c": "y"}),
        lambda: engine.cancel_flow(flow),
        lambda: engine.cancel_flow(flow, wait=True),
        lambda: engine.cancel_flow_header(flow),
        lambda: engine.delete_flow(flow),
    ):
        with pytest.raises(ff.NotFound) as unknown:
            await call()
        assert (unknown.value.entity, unknown.value.id) == ("flow", str(flow))
    with pytest.raises(ValidationFailed) as refused:
        await engine.resolve_dependency(flow, **edge, outcome="success")
    assert refused.value.kind == "invalid_dependency"
    with pytest.raises(ff.NotFound):
        await engine.promote_blocked_to_eligible(UNKNOWN)
    for read in (
        engine.describe_flow(flow),
        engine.read_flow_graph(flow),
        engine.describe_edge(flow, mint_uuid()),
        engine.get_flow_tag(flow, "a.b"),
        engine.read_flow_summary(flow),
        engine.read_cancel_backlog(flow),
        engine.ack_cancel_member(flow, one),
    ):
        assert await read is None
    assert await engine.list_flow_members(flow) == await engine.list_edges(flow, outgoing=one) == []
    assert not await engine.project_flow_summary(flow)
    assert isinstance(await engine.dispatch_completion(2**63 - 1), NoOp)
    assert (await engine.cancel_siblings(flow, other)).action == "none"
    assert await engine.drain_sibling_cancel_group(flow, other) == "drained_sans_group"
    assert await engine.reconcile_sibling_cancel_group(flow, other) == "no_op"
    assert await sql.fetchval(DIGEST) == before


async def test_an_impossible_handle_is_refused_immediately(plain_engine: ff.Engine) -> None:
    held = await started(plain_engine)
    fields = {name: getattr(held.handle, name) for name in held.handle.__struct_fields__}
    for change in (
        {"partition": "x"}, {"uuid": "x"}, {"lease_epoch": 2**63}, {"attempt_index": 2**40}, {"lease_id": 5},
        {"attempt_id": b"x"}, {"lease_epoch": "1"},
    ):  # fmt: skip
        forged = Handle(**(fields | change))
        for call in (
            lambda h=forged: plain_engine.renew(h),
            lambda h=forged: plain_engine.complete(h),
            lambda h=forged: plain_engine.fail(h, "no"),
            lambda h=forged: plain_engine.release(h),
        ):
            with pytest.raises(ValidationFailed):
                await call()
    await plain_engine.complete(held.handle)


async def test_the_longest_grace_can_be_read(plain_engine: ff.Engine) -> None:
    flow = FlowId(mint_uuid())
    await submit_member(plain_engine, flow)
    await plain_engine.cancel_flow_header(flow, grace=timedelta(milliseconds=2**53 - 1))
    backlog = await plain_engine.read_cancel_backlog(flow)
    assert backlog is not None
    assert 2300 < backlog.grace_until.year <= 9999


# ---- text that must never be refused


class _Broken:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "text",
    ["", "\0", "a\0b", "\ud800", "x" * 300_000, "é" * 200_000, None, 5, b"\xff", ValueError("\0"), _Broken()],
    ids=lambda value: ascii(value)[:12] if not isinstance(value, _Broken) else "broken",
)  # fmt: skip
async def test_the_text_of_a_failure_is_escaped_and_never_refused(plain_engine: ff.Engine, text: Any) -> None:
    engine = plain_engine
    held = [await started(engine) for _ in range(3)]
    await engine.fail(held[0].handle, text, category=text)
    (verdict,) = await engine.fail_many([Failure(authority=held[1].handle, reason=text, category=text)])
    assert not isinstance(verdict, ff.FlowFabricError)
    await engine.cancel(held[2].handle, text)
    for claimed in held[:2]:
        full = await engine.read_execution(claimed.execution_id)
        assert full is not None
        assert full.failure_reason is not None
        assert len(full.failure_reason.encode()) <= 256 * 1024
        assert full.failure_category
        assert len(full.failure_category.encode()) <= 256
    cancelled = await engine.read_execution(held[2].execution_id)
    assert cancelled is not None
    assert cancelled.cancellation_reason is not None
    if text == "a\0b":
        assert cancelled.cancellation_reason == "a\\x00b"
    flow = FlowId(mint_uuid())
    member = await submit_member(engine, flow)
    await engine.cancel_flow_header(flow, reason=text, requester=text, grace=timedelta())
    backlog = await engine.read_cancel_backlog(flow)
    assert backlog is not None
    assert len(backlog.requester.encode()) <= 256
    await engine.reconcile_cancellations()
    assert (await engine.read_execution(member)).cancellation_reason == (backlog.reason or "flow_cancelled")  # type: ignore[union-attr]
    revoked = await started(engine)
    await engine.revoke_lease(revoked.execution_id, reason=text)
    await engine.cancel(Operator(revoked.execution_id), "done")
    await engine.replay_execution(revoked.execution_id, reason=text)


# ---- fuzz

ANYTHING = st.text(st.characters(codec=None, categories=None), max_size=40) | st.text(max_size=300)
FUZZ = settings(
    max_examples=sampling.examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@FUZZ
@given(kind=ANYTHING, namespace=ANYTHING, creator=ANYTHING, key=ANYTHING, tag=ANYTHING, value=ANYTHING, lane=ANYTHING)
async def test_any_text_is_stored_as_it_is_or_refused(
    plain_engine: ff.Engine, kind: str, namespace: str, creator: str, key: str, tag: str, value: str, lane: str
) -> None:
    fields: dict[str, Any] = {
        "execution_kind": kind, "namespace": namespace, "creator_identity": creator, "tags": {tag: value},
        "idempotency_key": key, "payload_encoding": value, "lane_id": lane,
    }  # fmt: skip
    for dropped in ({}, {"lane_id": "default"}):
        try:
            answer = await plain_engine.create_execution(**(fields | dropped))
        except ff.InvalidInput as error:
            assert error.field
            continue
        full = await plain_engine.read_execution(answer.execution_id)
        assert full is not None
        if isinstance(answer, Created):
            assert (full.execution_kind, full.namespace, full.creator_identity) == (kind, namespace, creator)
            assert (full.tags, full.idempotency_key or "") == ({tag: value}, key)
            found = await plain_engine.find_executions(tag=(tag, value), namespace=namespace, kinds=[kind])
            assert answer.execution_id in [item.execution_id for item in found.items]


@FUZZ
@given(text=ANYTHING | st.from_regex(r"\{fp:[0-9]{0,6}\}:[0-9a-fA-F-]{30,40}"), number=st.integers())
async def test_any_text_as_an_id_finds_nothing_or_is_refused(plain_engine: ff.Engine, text: str, number: int) -> None:
    for value in (text, f"{{fp:{number}}}:{UUID_TEXT}"):
        try:
            assert await plain_engine.read_execution(value) is None  # type: ignore[arg-type]
        except ff.InvalidInput as error:
            assert error.field == "execution_id"
        try:
            await plain_engine.list_executions(value)
        except ff.InvalidInput as error:
            assert error.field == "partition_key"
        with pytest.raises(ff.InvalidInput):
            Place.decode(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANYTHING,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANYTHING, inner, max_size=3),
    max_leaves=8,
)
KNOWN = st.sampled_from(
    ["priority", "delay_until", "retry_policy", "timeout_policy", "max_reclaim_count", "budget_ids", "dedup_window_ms",
     "routing_requirements", "stream_policy", "quota_policy_id", "max_replay_count", "fallback_policy"]
)  # fmt: skip


@pytest.mark.both_servers
@FUZZ
@given(policy=st.dictionaries(KNOWN | ANYTHING, JSON, max_size=3) | JSON | ANYTHING)
async def test_any_policy_is_kept_or_refused(plain_engine: ff.Engine, policy: Any) -> None:
    try:
        answer = await plain_engine.create_execution(execution_kind="k", policy=policy)
    except ValidationFailed:
        return
    full = await plain_engine.read_execution(answer.execution_id)
    assert full is not None
    assert (full.policy is None) == (policy is None)


@FUZZ
@given(
    moment=st.datetimes(timezones=st.timezones() | st.just(UTC)),
    span=st.timedeltas(),
    priority=st.integers(-(2**33), 2**33),
    flow=st.uuids(),
)
async def test_any_time_is_kept_or_refused(
    plain_engine: ff.Engine, moment: datetime, span: timedelta, priority: int, flow: UUID
) -> None:
    for at in (moment, span):
        try:
            answer = await plain_engine.create_execution(
                execution_kind="k", delay_until=at, execution_deadline_at=at, priority=priority, flow_id=FlowId(flow)
            )
        except ff.InvalidInput as error:
            assert error.field in ("delay_until", "execution_deadline_at", "priority")
            continue
        full = await plain_engine.read_execution(answer.execution_id)
        assert full is not None
        assert full.deadline_at == (at if isinstance(at, datetime) else full.created_at + at // _MS * _MS)


_MS = timedelta(milliseconds=1)
