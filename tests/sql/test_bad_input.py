"""Bad input: every argument of every operation, out of range, of the wrong type, too long, in the wrong characters.

The engine refuses it by name before it changes the database, and never with a transport error.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.engine.edges import EdgePlace
from flowfabric.engine.reads import Place
from flowfabric.engine.signals import SignalFields
from flowfabric.errors import Contention, StateError, ValidationFailed
from flowfabric.values.attempt import Completion, Failure
from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.conditions import AllMet, Count, CountKind, TimeoutOnly, on
from flowfabric.values.event import EventCursor
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.flow import Edge, NoOp
from flowfabric.values.grant import ClaimGrant
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.joins import AnyOf, Quorum
from flowfabric.values.lease import Fence, Handle, Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.step import NewStep
from flowfabric.values.wait import Fresh, ResumePolicy, Suspended, UsePending
from flowfabric.values.worker import OwnWorker
from tests import sampling
from tests.ids import home, id_in
from tests.support import WORKER, Clock, Wipe, claim_one, started, submit, submit_member

UUID_TEXT = "0b0e8400-e29b-41d4-a716-446655440000"
UNKNOWN = ff.ExecutionId(UUID(UUID_TEXT))
NAIVE = datetime(2030, 1, 1)
DUE = datetime(2050, 1, 1, tzinfo=UTC)
DIGEST_FUNCTION = """
create or replace function pg_temp.digest() returns text language plpgsql as $$
declare
    v_name text;
    v_one text;
    v_all text := '';
begin
    for v_name in select relname from pg_class where relnamespace = 'flowfabric'::regnamespace and relkind = 'r'
                  and relname <> 'sleeper' order by relname loop
        execute format('select md5(string_agg(t::text, ''|'' order by t::text)) from flowfabric.%I t', v_name)
        into v_one;
        v_all := concat_ws(' ', v_all, v_name, v_one);
    end loop;
    return v_all;
end;
$$
"""
DIGEST = "select pg_temp.digest()"

# What is wrong with a value of each sort.
IDS: list[Any] = [
    None, 5, "", "nonsense", UUID_TEXT.replace("-", ""), UUID_TEXT + "\n", UUID_TEXT.encode(), "{fp:1}", "{fp:1}:zz",
    *(f"{{fp:{number}}}:{UUID_TEXT}" for number in ("65536", "01", "-1", "\u0661")), f"{{b:1}}:{UUID_TEXT}",
    f"{{fp:1}}:{UUID_TEXT}\n", f"{{fp:1}}:{UUID_TEXT.replace('-', '')}", f"{{fp:1}}:\0{UUID_TEXT}",
    f"{{fp:1}}:\ud800{UUID_TEXT}", f"{{fp:1}}:{UUID_TEXT}".encode(),
]  # fmt: skip
TEXTS: list[Any] = [5, b"x", ["x"], "\0", "a\0b", "\ud800", "x" * 257, "é" * 129]
LONG_TEXTS: list[Any] = [5, b"x", "\0", "\udfff"]
KEYS: list[Any] = [5, b"x", "\0", "\ud800", "x" * 513, "é" * 257]
LANES: list[Any] = [5, b"x", "x" * 65, "é", "\x1f", "\x7f", "a\nb", "\0", "\ud800", "\u200b"]
WORKERS: list[Any] = [
    "", None, 5, b"w", "a b", "a\tb", "\n", "a|b", "\x7f", "\x85", "a\u2003b", "\0", "\ud800", "x" * 257, "é" * 129,
]  # fmt: skip
OWN = OwnWorker(worker_instance_id="w-1", process=UUID(UUID_TEXT))
OWN_WORKERS: list[Any] = [
    None, 5, "w-1", ("w-1", UUID_TEXT),
    *(OwnWorker(worker_instance_id=value, process=UUID(UUID_TEXT)) for value in WORKERS),
    *(OwnWorker(worker_instance_id="w-1", process=UUID(UUID_TEXT), namespace=value) for value in (None, *TEXTS)),
    *(OwnWorker(worker_instance_id="w-1", process=value) for value in (None, "x", 5)),
]  # fmt: skip
INTS: list[Any] = [None, "5", 1.0, True, -1, 2**31]
DURATIONS: list[Any] = [5, "5", 1.5, timedelta(0), timedelta(microseconds=999), timedelta(-1), timedelta.max]
MOMENTS: list[Any] = [
    5, "2030-01-01", NAIVE, date(2030, 1, 1), datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
]  # fmt: skip
UUIDS: list[Any] = [5, "x", "\0", UUID_TEXT + "\n", UUID_TEXT.replace("-", ""), b"x", UUID_TEXT.encode()]
BYTES: list[Any] = ["text", 5, [1, 2], {"a": 1}]
LISTS: list[Any] = ["abc", 5, b"abc", {"a": 1}]
CURSORS: list[Any] = [5, b"x", "", "x", "\0", "\ud800", "eCB4", "MjAzMC0wMS0wMSB4", "MjAzMC0wMS0wMVQwMDowMDowMCB4"]
KIDS: list[Any] = [None, 5, "", "a:b", "a b", "a\n", "é", "\0", "\ud800", "x" * 65]
SECRETS: list[Any] = [None, 5, b"ab" * 32, "", "ab" * 31, "ab" * 33, "zz" * 32, " " + "ab" * 31 + "a", "ab" * 32 + "\n"]
PARTITIONS: list[Any] = [
    None,
    -1,
    256,
    1.0,
    True,
    "",
    "7",
    "{fp:256}",
    "{fp:01}",
    "{b:1}",
    "{q:1}",
    "{fp:x}",
    "{fp}",
    "\0",
]
CAPABILITIES: list[Any] = [
    "gpu", 5, b"gpu", [""], ["a,b"], ["a b"], ["\0"], ["\x7f"], ["\ud800"], ["\u2003"], [5],
    [f"c{n}" for n in range(257)], ["x" * 4097],
]  # fmt: skip
POLICIES: list[Any] = [
    5, "no json", "[]", "null", b"\xff", [], {"max_replay_count": -1}, {"max_replay_count": 2**32},
    {"max_reclaim_count": "5"}, {"retry_policy": []}, {"retry_policy": {"max_retries": 1.5}},
    {"timeout_policy": {"attempt_timeout_ms": 10**20}}, {"delay_until": 10**18}, {"dedup_window_ms": -1},
    {"priority": True}, {"unknown": object()}, {"retry_policy": {"backoff": 5}},
    ExecutionPolicy(max_replay_count=-1),
]  # fmt: skip
POLICY_TEXTS: list[Any] = [
    {"budget_ids": ["x"]}, {"quota_policy_id": "x"}, {"unknown": "\0"}, {"unknown": ["\ud800"]}, {"\0": 1},
    ExecutionPolicy(delay_until=NAIVE), {"routing_requirements": {"isolation_level": "\0"}},
]  # fmt: skip
FILTERS: list[Any] = [
    5, "n", ("a", "b"), ScannerFilter(namespace="\0"), ScannerFilter(namespace=5),  # type: ignore[arg-type]
    ScannerFilter(namespace="x" * 257), ScannerFilter(instance_tag=("a",)),  # type: ignore[arg-type]
    ScannerFilter(instance_tag="ab"), ScannerFilter(instance_tag=("\0", "x")),  # type: ignore[arg-type]
    ScannerFilter(instance_tag=("x", "\ud800")), ScannerFilter(instance_tag=(1, 2)),  # type: ignore[arg-type]
]  # fmt: skip
TAG_KEYS: list[Any] = [None, 5, "", "nodot", "A.b", "a.B", "a.", ".b", "a..b", "a.b\n", "ä.b", "\0.b", "a." + "b" * 255]
TAGS: list[Any] = [
    5,
    "ab",
    [("a", "b")],
    {"a": 5},
    {5: "a"},
    {"a\0": "b"},
    {"a": "\0"},
    {"\ud800": "a"},
    {"a": "\ud800"},
]


class World:
    """One execution in each of the states that calls need, and the leases on them."""

    async def build(self, engine: ff.Engine, clock: Clock) -> None:
        self.expired = await started(engine, lease_ttl=timedelta(seconds=1))
        await clock.advance(seconds=2)
        await engine.mark_lease_expired_if_due(self.expired.execution_id)
        await engine.set_lane_state("default", "paused")
        self.done = (await self._claimed(engine)).execution_id
        await engine.complete(Operator(self.done), b"done")
        await self._suspend(engine)
        self.held = await self._claimed(engine)
        self.pending = await engine.create_waitpoint(self.held.handle, "k", timedelta(days=1))
        await engine.open_wait(self.held.handle, "w", 0, ["k"], None)
        await engine.put_schedule("standing", kind="k", timing={"every_ms": 5}, next_at=DUE)
        self.waiting = await submit(engine, tags={"a.b": "c"})
        self.blocked = await submit(engine)
        await engine.block_execution_for_admission(self.blocked, "paused_by_operator")
        await self._flow(engine)

    async def _flow(self, engine: ff.Engine) -> None:
        """A flow of two members with an edge that is staged and one that is applied, and what could become a member."""
        self.flow = FlowId(mint_uuid())
        self.upstream = await submit_member(engine, self.flow, lane_id="flows")
        self.downstream = await submit_member(engine, self.flow, lane_id="flows")
        self.outside = await submit(engine, lane_id="flows", flow_id=self.flow)
        self.edge = mint_uuid()
        staged = await engine.stage_dependency_edge(self.flow, expected_graph_revision=2, **_edge(self))
        applied = _an_edge(self)
        self.applied = applied.edge_id
        self.revision = await engine.stage_and_apply_edges(
            self.flow, [applied], expected_graph_revision=staged.new_graph_revision
        )
        self.end = (await engine.read_events(family="completion", limit=1)).items[0]

    async def _suspend(self, engine: ff.Engine) -> None:
        suspended = await engine.suspend(
            (await self._claimed(engine)).handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k")
        )
        assert isinstance(suspended, Suspended)
        self.suspended, self.bound = suspended.handle.execution_id, suspended.details

    async def _claimed(self, engine: ff.Engine) -> Any:
        await submit(engine, lane_id="own")
        return await claim_one(engine, lane_id="own", lease_ttl=timedelta(days=1))


class Case:
    """One operation: arguments that are fine, and for each argument what is not."""

    def __init__(self, name: str, good: Callable[[World], dict[str, Any]], /, **bad: tuple[Any, list[Any]]) -> None:
        self.name = name
        self.good = good
        self.bad = bad


def by_field(values: list[Any], field: str | None = None) -> tuple[Any, list[Any]]:
    return field or "", values


def by_kind(kind: str, values: list[Any]) -> tuple[Any, list[Any]]:
    return {"kind": kind}, values


def _fence(world: World, **change: Any) -> Fence:
    handle = world.held.handle
    fields = {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }
    return Fence(**(fields | change))


def _elsewhere(world: World) -> ff.ExecutionId:
    """An id of another partition than that of the flow."""
    return id_in((home(world.flow) + 1) % 256)


AUTHORITIES: list[Any] = [
    None, 5, "x", UNKNOWN, Operator("nonsense"),  # type: ignore[arg-type]
    lambda world: _fence(world, execution_id="x"),
    lambda world: _fence(world, lease_id="x"),
    lambda world: _fence(world, lease_id=None),
    lambda world: _fence(world, lease_epoch=-1),
    lambda world: _fence(world, lease_epoch=2**63),
    lambda world: _fence(world, lease_epoch="1"),
    lambda world: _fence(world, attempt_id=5),
    lambda world: _fence(world, attempt_index=2**31),
    lambda world: _fence(world, attempt_index=True),
]  # fmt: skip


def _step(authority: Any = None, **fields: Any) -> Callable[[World], Any]:
    """A batch of one step with something wrong in it."""

    def items(world: World) -> list[Any]:
        by = authority(world) if inspect.isfunction(authority) else authority
        return [(world.held.handle if fields else by, NewStep(**({"name": "s"} | fields)))]

    return items


def _authority(world: World) -> dict[str, Any]:
    return {"authority": world.held.handle}


def _grant(world: World) -> dict[str, Any]:
    return {"execution_id": world.waiting, **WORKER}


def _consume(world: World) -> dict[str, Any]:
    return {"execution_id": world.waiting, **WORKER, "lease_id": mint_uuid(), "attempt_id": mint_uuid()}


def _one(world: World) -> dict[str, Any]:
    return {"execution_id": world.waiting}


def _suspending(world: World) -> dict[str, Any]:
    return {
        "authority": world.held.handle,
        "waitpoints": [Fresh(mint_uuid(), "k")],
        "resume_condition": on("k"),
        "timeout_at": DUE,
    }


def _signalling(world: World) -> dict[str, Any]:
    return {
        "execution_id": world.suspended,
        "waitpoint_id": world.bound.waitpoint_id,
        "waitpoint_token": world.bound.waitpoint_token,
        "signal_name": "go",
        "source_type": "test",
    }


def _approving(world: World) -> dict[str, Any]:
    return {
        "execution_id": world.suspended,
        "lane_id": "own",
        "waitpoint_id": world.bound.waitpoint_id,
        "signal_name": "approved",
        "idempotency_suffix": "1",
    }


def _edge(world: World) -> dict[str, Any]:
    return {
        "edge_id": world.edge,
        "upstream_execution_id": world.upstream,
        "downstream_execution_id": world.downstream,
    }


def _staging(world: World) -> dict[str, Any]:
    return {**_flow(world), **_edge(world), "edge_id": mint_uuid(), "expected_graph_revision": world.revision}


def _resolving(world: World) -> dict[str, Any]:
    return {**_flow(world), **_edge(world), "edge_id": world.applied, "outcome": "success"}


def _group(world: World) -> dict[str, Any]:
    return {"flow_id": world.flow, "downstream_execution_id": world.downstream}


def _flow(world: World) -> dict[str, Any]:
    return {"flow_id": world.flow}


def _nodes(world: World) -> dict[str, Any]:
    return {**_flow(world), "nodes": [_node("a"), _node("b", NewEdge(upstream="a"), policy=Quorum(1))]}


def _node(name: Any, *after: Any, policy: Any = None, execution_policy: Any = None, **fields: Any) -> NewNode:
    given = {"execution_kind": "k", "lane_id": "flows", "policy": execution_policy} | fields
    execution = NewExecution(**given)
    node = NewNode(name=name, execution=execution, after=after)
    return node if policy is None else msgspec.structs.replace(node, policy=policy)


def _an_edge(world: World, **change: Any) -> Edge:
    return Edge(**({"edge_id": mint_uuid(), "upstream": world.upstream, "downstream": world.downstream} | change))


ONE_ID = {"execution_id": by_field(IDS)}
ONE_FLOW = {"flow_id": by_field([None, *UUIDS])}
JOINS: list[Any] = [
    None, 5, "all_of", [], {}, {"kind": "every"}, {"kind": ["all_of"]}, {"kind": "quorum"},
    {"kind": "quorum", "k": "1"},
    {"kind": "any_of", "on_satisfied": "stop"}, {"kind": "any_of", "on_satisfied": None}, AllMet((on("k"),)),
    AnyOf("stop"), AnyOf(None), AnyOf([]), Quorum(0), Quorum(-1), Quorum(2**31), Quorum(True), Quorum("1"),  # type: ignore[arg-type]
    Quorum(1.0), Quorum(None), Quorum(1, "stop"),  # type: ignore[arg-type]
]  # fmt: skip
NODES: list[Any] = [
    None, 5, "ab", b"ab", {}, {"a": 1}, [], [5], [None], ["a"], [_node("a")] * 2, [_node("")],
    *([_node(value)] for value in (None, *TEXTS)),
    *([NewNode(name="a", execution=value)] for value in (None, 5, {"execution_kind": "k"})),
    *([NewNode(name="a", execution=NewExecution(execution_kind="k"), after=value)] for value in (None, 5, "b", {})),
    *([_node("a", value)] for value in (None, 5, "b", UNKNOWN, _node("b"))),
    *([_node("a", NewEdge(upstream=value))] for value in (None, 5, "b", [], b"b", UNKNOWN)),
    *([_node("a"), _node("b", NewEdge(upstream="a", data_passing_ref=value))] for value in TEXTS),
    *([_node("a"), _node("b", NewEdge(upstream="a", edge_id=value))] for value in UUIDS),
    [_node("a"), _node("b", *[NewEdge(upstream="a", edge_id=UUID(UUID_TEXT))] * 2)],
    *([_node("a"), _node("b", NewEdge(upstream="a"), policy=value)] for value in (*JOINS[1:], Quorum(2))),
    [_node("a", policy=AnyOf())], [_node("a", policy=Quorum(1))],
    [_node("a", idempotency_key="k")], [_node("a", execution_id=UNKNOWN)], [_node("a", execution_id=5)],
    [_node("a", priority="5")], [_node("a", lane_id="é")], [_node("a", tags={"a": 5})], [_node("a", input_payload="x")],
    [_node("a", delay_until=NAIVE)], [_node("a", execution_kind="\0")],
]  # fmt: skip
EDGE_FIELDS = {
    **ONE_FLOW,
    "edge_id": by_field([None, *UUIDS]),
    "upstream_execution_id": by_field(IDS),
    "downstream_execution_id": by_field(IDS),
}
KINDS_OF_EDGE: list[Any] = [None, 5, "", "always", "Success_only", [], "\0"]
REVISIONS: list[Any] = [*INTS[:5], 2**63]
GRACES: list[Any] = [None, 5, "5", timedelta(-1), timedelta(microseconds=-1), timedelta.max]
ONE_WAITPOINT = {"waitpoint_id": by_field([None, *UUIDS])}
CONDITIONS: list[Any] = [
    None, 5, b"x", [], "x", "operatoronly", {}, {"Single": 5}, {"Single": {"waitpoint_key": "k"}},
    {"Single": {"waitpoint_key": 5, "matcher": "Wildcard"}}, {"Single": {"waitpoint_key": "k", "matcher": "wildcard"}},
    {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}, "more": 1}, {"Composite": {"kind": "AnyOf"}},
    on(""), on("\0"), on("\ud800"), on("x" * 257), on(5), on("k", ""), on("k", "__x"), on("k", "\0"),  # type: ignore[arg-type]
    AllMet(()), AllMet((None,)), AllMet("k"), Count(0, CountKind.DISTINCT_SIGNALS, ("k",)),  # type: ignore[arg-type]
    Count(True, CountKind.DISTINCT_SIGNALS, ("k",)), Count(1, "DistinctSignals", ("k",)),  # type: ignore[arg-type]
    Count(2**31, CountKind.DISTINCT_SIGNALS, ("k",)), Count(1, CountKind.DISTINCT_SIGNALS, ()),
]  # fmt: skip
SUSPEND_FIELDS = {
    "waitpoints": by_field([None, 5, "x", b"x", {}, [5], [None], [("x", "k")]]),
    "resume_condition": by_field(CONDITIONS),
    "suspension_id": by_field(UUIDS),
    "resume_policy": by_field([5, "x", {}, ResumePolicy(resume_target="waiting")]),
    "reason_code": by_field([None, 5, "", "nonsense", "Waiting_for_signal", [], "\0"]),
    "requested_by": by_field([None, 5, "", "nobody", [], "\0"]),
    "timeout_at": by_field([*MOMENTS, timedelta(1)]),
    "timeout_behavior": by_field([None, 5, "", "explode", [], "\0"]),
    "continuation_metadata_pointer": by_field([*LONG_TEXTS, "x" * 65_537]),
    "idempotency_key": by_field(KEYS),
}  # fmt: skip
SUSPEND_FIELDS_TOO = {
    "waitpoints": by_field(
        [
            *([Fresh(value, "k")] for value in (None, *UUIDS)),
            *([UsePending(value)] for value in (None, *UUIDS)),
            *([Fresh(mint_uuid(), value)] for value in (None, *TEXTS)),
        ],
        "waitpoint",
    ),
    "resume_policy": by_field(
        [ResumePolicy(resume_delay=value) for value in (5, timedelta(-1), timedelta.max)],  # type: ignore[arg-type]
        "resume_delay",
    ),
    "timeout_at": by_field([datetime(2020, 1, 1, tzinfo=UTC)], "*"),
}
# What the contract has a code for: the detail begins with it instead of the argument's name.
SUSPEND_CODES = {
    "waitpoints": by_field(
        [
            [],
            [Fresh(mint_uuid(), "")],
            [Fresh(UUID(UUID_TEXT), "k"), Fresh(UUID(UUID_TEXT), "l")],
            [Fresh(mint_uuid(), "other")],
        ],
        "*",
    ),
}
GRANT_FIELDS = {
    **ONE_ID,
    "lane_id": by_field(LANES),
    "worker_id": by_field(WORKERS),
    "worker_instance_id": by_field(WORKERS),
    "worker_capabilities": by_kind("invalid_capabilities", CAPABILITIES),
    "grant_ttl": by_field([*DURATIONS, timedelta(seconds=61)]),
    "capability_hash": by_field(TEXTS),
    "route_snapshot_json": by_field([*LONG_TEXTS, "x" * (64 * 1024 + 1)]),
    "admission_summary": by_field([*LONG_TEXTS, "x" * (64 * 1024 + 1)]),
}
CLAIM_FIELDS = {
    **ONE_ID,
    "lane_id": by_field(LANES),
    "worker_id": by_field(WORKERS),
    "worker_instance_id": by_field(WORKERS),
    "lease_id": by_field(UUIDS),
    "lease_ttl": by_field(DURATIONS),
    "grant_key": by_field([*LONG_TEXTS, "x" * 4097]),
}
CASES = [
    Case(
        "create_execution",
        lambda world: {"execution_kind": "k"},
        execution_kind=by_field([None, *TEXTS]),
        lane_id=by_field([None, "", *LANES]),
        namespace=by_field(TEXTS),
        input_payload=by_field([None, *BYTES, bytes(MAX_PAYLOAD + 1)]),
        payload_encoding=by_field(TEXTS),
        priority=by_field([None, "5", 1.0, True, -(2**31) - 1, 2**31]),
        creator_identity=by_field(TEXTS),
        idempotency_key=by_field(KEYS),
        tags=by_field(TAGS),
        policy=by_kind("invalid_policy_json", POLICIES),
        delay_until=by_field([*MOMENTS, timedelta(-1), timedelta.max]),
        execution_deadline_at=by_field([*MOMENTS, timedelta(-1), timedelta.max]),
        execution_id=by_field(IDS[1:]),
        flow_id=by_field(UUIDS),
    ),
    Case("create_execution", lambda world: {"execution_kind": "k"}, policy=by_field(POLICY_TEXTS, "*")),
    Case(
        "create_execution",
        lambda world: {"execution_kind": "k"},
        policy=by_kind(
            "invalid_capabilities",
            [{"routing_requirements": {"required_capabilities": value}} for value in CAPABILITIES],
        ),
    ),
    Case(
        "create_many",
        lambda world: {"items": []},
        items=by_field([None, "x", 5, {"a": 1}, [NewExecution(execution_kind="k")] * 1001]),
    ),
    Case(
        "create_alike",
        lambda world: {"item": NewExecution(execution_kind="k"), "payloads": [b"1"]},
        item=by_field(
            [
                None,
                5,
                NewExecution(execution_kind="\0"),
                NewExecution(execution_kind=5),  # type: ignore[arg-type]
                NewExecution(execution_kind="k", lane_id="é"),
            ],
            "*",
        ),
        payloads=by_field([None, 5, "x", [5], ["text"], [b"1"] * 1001], "*"),
    ),
    Case(
        "claim",
        lambda world: dict(WORKER),
        lane_id=by_field([None, "", *LANES]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        lease_ttl=by_field([None, *DURATIONS]),
        max_wait=by_field([5, timedelta(-1), timedelta.max]),
    ),
    Case("claim_many", lambda world: {"limit": 1, **WORKER}, limit=by_field([*INTS, 0, 1001])),
    Case("renew", _authority, authority=by_field(AUTHORITIES, "*"), lease_ttl=by_field(DURATIONS)),
    Case("renew_many", lambda world: {"authorities": []}, authorities=by_field([None, 5, "x", [5]], "*")),
    Case(
        "progress",
        _authority,
        authority=by_field(AUTHORITIES, "*"),
        percent=by_field([*INTS[1:], 101, 2**31]),
        message=by_field([*LONG_TEXTS, "x" * (64 * 1024 + 1)]),
    ),
    Case(
        "complete",
        _authority,
        authority=by_field(AUTHORITIES, "*"),
        result=by_field([*BYTES, bytes(MAX_PAYLOAD + 1)]),
        result_encoding=by_field(TEXTS),
    ),
    Case(
        "complete_many",
        lambda world: {"items": []},
        items=by_field(
            [None, 5, "x", [5], [None], lambda world: [Completion(world.held.handle, "text")]],  # type: ignore[arg-type]
            "*",
        ),
    ),
    Case(
        "fail",
        lambda world: {"authority": world.held.handle, "reason": "no"},
        authority=by_field(AUTHORITIES, "*"),
        failure_class=by_field([5, "nonsense", "\0", "Permanent", ["permanent"]]),
        retry_policy=by_kind(
            "invalid_policy_json",
            [
                5,
                "no json",
                "[]",
                [],
                {"max_retries": -1},
                {"max_retries": 2**32},
                {"backoff": 5},
                ff.RetryPolicy(max_retries=-1),
            ],
        ),
    ),
    Case(
        "fail_many",
        lambda world: {"items": []},
        items=by_field([None, 5, "x", [5], lambda world: [world.held.handle]], "*"),
    ),
    Case(
        "delay",
        lambda world: {"authority": world.held.handle, "delay_until": timedelta(1)},
        authority=by_field(AUTHORITIES, "*"),
        delay_until=by_field([None, *MOMENTS, timedelta(-1), timedelta.max]),
    ),
    Case("wait_children", _authority, authority=by_field(AUTHORITIES, "*")),
    Case("release", _authority, authority=by_field(AUTHORITIES, "*")),
    Case(
        "cancel",
        lambda world: {"authority": world.held.handle, "reason": "no"},
        authority=by_field(AUTHORITIES, "*"),
        source=by_field([*TEXTS, "", "operator_override"]),
    ),
    Case("issue_claim_grant", _grant, **GRANT_FIELDS),
    Case(
        "issue_reclaim_grant",
        lambda world: {"execution_id": world.expired.execution_id, **WORKER},
        **GRANT_FIELDS,
        max_reclaim_count=by_field([*INTS[1:5], 2**32]),
    ),
    Case(
        "verify_grant",
        lambda world: {**_one(world), "grant_key": "x"},
        **ONE_ID,
        grant_key=by_field([None, *LONG_TEXTS, "x" * 4097]),
    ),
    Case(
        "claim_execution",
        _consume,
        **CLAIM_FIELDS,
        attempt_id=by_field(UUIDS),
        expected_attempt_index=by_field([*INTS[:5], 2**32]),
        attempt_policy=by_kind("invalid_policy_json", POLICIES),
        attempt_timeout=by_field([5, "5", timedelta(-1), timedelta.max]),
        execution_deadline_at=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case(
        "claim_resumed_execution",
        lambda world: {"execution_id": world.waiting, **WORKER, "lease_id": mint_uuid()},
        **CLAIM_FIELDS,
        current_attempt_index=by_field([*INTS[:5], 2**32]),
        remaining_attempt_timeout=by_field([5, timedelta(-1), timedelta.max], "attempt_timeout"),
    ),
    Case(
        "claim_from_resume_grant",
        lambda world: {
            "grant": ClaimGrant(execution_id=world.waiting, grant_key="x", expires_at=datetime.now(UTC)),
            **WORKER,
        },
        grant=by_field([None, 5, "x", UNKNOWN]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        lease_ttl=by_field(DURATIONS),
    ),
    Case(
        "issue_grant_and_claim",
        _one,
        **ONE_ID,
        lane_id=by_field(LANES),
        lease_duration=by_field(DURATIONS),
    ),
    Case(
        "reclaim_execution",
        lambda world: {**_consume(world), "execution_id": world.expired.execution_id},
        **CLAIM_FIELDS,
        attempt_id=by_field(UUIDS),
        attempt_policy=by_kind("invalid_policy_json", POLICIES),
        max_reclaim_count=by_field([*INTS[1:5], 2**32]),
    ),
    Case(
        "revoke_lease",
        lambda world: {"execution_id": world.held.execution_id},
        **ONE_ID,
        expected_lease_id=by_field(UUIDS),
        worker_instance_id=by_field(WORKERS[2:]),
    ),
    Case("replay_execution", lambda world: {"execution_id": world.done}, **ONE_ID, requested_by=by_field(TEXTS)),
    Case(
        "change_priority",
        lambda world: {**_one(world), "new_priority": 5},
        **ONE_ID,
        new_priority=by_field([None, "5", 1.0, True, -(2**31) - 1, 2**31]),
        lane_id=by_field([*LANES, "another"]),
    ),
    Case(
        "block_execution_for_admission",
        lambda world: {**_one(world), "reason": "paused_by_operator"},
        **ONE_ID,
        reason=by_kind("invalid_blocking_reason", [None, 5, "", "nonsense", "\0", [], "waiting_for_worker"]),
        reason_detail=by_field([*LONG_TEXTS, "x" * 4097]),
    ),
    Case("block_route", _one, **ONE_ID, reason_detail=by_field([*LONG_TEXTS, "x" * 4097])),
    Case(
        "unblock_execution",
        lambda world: {"execution_id": world.blocked},
        **ONE_ID,
        expected_blocking_reason=by_field([5, "", "nonsense", "\0", []]),
    ),
    Case(
        "scan_eligible_executions",
        lambda world: {"lane_id": "default"},
        lane_id=by_field([None, "", *LANES]),
        partition_key=by_field(PARTITIONS[1:]),
        limit=by_field(INTS),
    ),
    *(
        Case(name, _one, **ONE_ID)
        for name in (
            "read_execution",
            "describe_execution",
            "read_execution_state",
            "read_execution_info",
            "get_execution_result",
            "read_result",
            "read_execution_context",
            "read_current_attempt_index",
            "read_total_attempt_count",
            "resolve_execution_flow_id",
            "get_execution_namespace",
            "list_attempts",
            "mark_lease_expired_if_due",
            "promote_delayed",
        )
    ),
    Case(
        "read_exec_core_fields",
        lambda world: {
            "partition_key": home(world.waiting),
            "execution_id": world.waiting,
            "names": [],
        },
        partition_key=by_field(PARTITIONS),
        execution_id=by_field(IDS),
        names=by_field([None, *LISTS, [5], ["\0"]]),
    ),
    Case("get_execution_tag", lambda world: {**_one(world), "key": "a.b"}, **ONE_ID, key=by_field(TAG_KEYS)),
    Case(
        "set_execution_tag",
        lambda world: {**_one(world), "key": "a.b", "value": "x"},
        **ONE_ID,
        key=by_field(TAG_KEYS),
        value=by_field([None, *LONG_TEXTS]),
    ),
    Case(
        "list_executions",
        lambda world: {"partition_key": 1},
        partition_key=by_field(PARTITIONS),
        cursor=by_field([*IDS[1:], UNKNOWN]),
        limit=by_field(INTS),
    ),
    Case(
        "find_executions",
        lambda world: {},
        namespace=by_field(TEXTS),
        lane_ids=by_field([*LISTS, [""], ["é"], [None]]),
        kinds=by_field([*LISTS, ["\0"], [5]]),
        states=by_field([*LISTS, ["nonsense"], [None], ["running"]]),
        tag=by_field([5, "ab", ("a",), ("a", "b", "c"), ("\0", "b"), ("a", "\ud800"), (1, 2), {"a": "b"}]),
        flow_id=by_field(UUIDS),
        created_from=by_field([*MOMENTS, timedelta(1)]),
        created_before=by_field([*MOMENTS, timedelta(1)]),
        cursor=by_field(
            [
                5,
                "x",
                UNKNOWN,
                Place(NAIVE, UUID(UUID_TEXT)),
                Place(datetime.now(UTC), "x"),  # type: ignore[arg-type]
                Place(datetime.now(UTC), UUID(UUID_TEXT), 256),
                Place("x", UUID(UUID_TEXT)),
            ]  # type: ignore[arg-type]
        ),
        limit=by_field(INTS),
    ),
    Case(
        "list_expired_leases",
        lambda world: {},
        as_of=by_field([*MOMENTS, timedelta(1)]),
        after=by_field(
            [
                5,
                "x",
                (),
                (datetime.now(UTC),),
                (NAIVE, UNKNOWN),
                (datetime.now(UTC), "x"),
                ("x", UNKNOWN),
            ]
        ),
        limit=by_field(INTS),
        namespace=by_field(TEXTS),
    ),
    Case("list_lanes", lambda world: {}, cursor=by_field(["", *LANES]), limit=by_field(INTS)),
    Case(
        "set_lane_state",
        lambda world: {"lane_id": "default", "state": "paused"},
        lane_id=by_field([None, "", *LANES]),
        state=by_field([None, 5, "", "open", "\0", []]),
    ),
    Case("lane_stats", lambda world: {}, lane_ids=by_field([*LISTS, [""], [5], ["\0"]])),
    Case(
        "read_events",
        lambda world: {},
        family=by_field([5, "", "leases", "\0", []]),
        after=by_field(
            [
                5,
                "x",
                (0, 0),
                EventCursor(-1),
                EventCursor(2**63),
                EventCursor("0"),
                EventCursor(None),
                EventCursor(1, -1),
                EventCursor(1, 2**32),
                EventCursor(1, "0"),
            ]  # type: ignore[arg-type]
        ),
        limit=by_field(INTS),
        filter=by_field(FILTERS),
    ),
    Case(
        "expire_execution",
        lambda world: {**_one(world), "phase": "execution_deadline"},
        **ONE_ID,
        phase=by_field([None, 5, "", "deadline", []]),
    ),
    Case(
        "run_timers",
        lambda world: {"kind": "lease"},
        kind=by_field([None, 5, "", "leases", "\0", []]),
        limit=by_field([*INTS, 0, 10_001]),
        after=by_field([*MOMENTS, timedelta(1)]),
        filter=by_field(FILTERS),
        backoff=by_field([None, 5, "5", timedelta(-1), timedelta.max]),
    ),
    Case("trim_retention", lambda world: {}, limit=by_field([*INTS, 0]), filter=by_field(FILTERS)),
    Case("sweep", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case("audit", lambda world: {}, partition=by_field([-1, 65_536, "5", 1.0, True])),
    Case(
        "audit_sample",
        lambda world: {"partition": 1},
        partition=by_field([None, -1, 65_536, "5", True]),
        limit=by_field([*INTS, 0, 10_001]),
    ),
    Case("repair_floors", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case(
        "look_for_due",
        lambda world: {"after": {}, "at_most": timedelta(1)},
        at_most=by_field([None, 5, timedelta(-1), timedelta.max]),
        before=by_field([5, "x", datetime(2026, 1, 1)]),
    ),
    Case(
        "take_lead",
        lambda world: {"names": ["duties"], "for_": timedelta(seconds=1)},
        for_=by_field([None, *DURATIONS]),
        names=by_field([*LISTS, [5], ["\0"]]),
    ),
    # steps, parking, waiting for the end of others
    Case(
        "record_steps",
        lambda world: {"items": [(world.held.handle, NewStep(name="s", result=b"1"))]},
        items=by_field([None, 5, "x", {"a": 1}, [5], [None], [(1, 2, 3)], lambda world: [world.held.handle]]),
    ),
    Case(
        "record_steps",
        lambda world: {"items": []},
        items=by_field([_step(authority=value) for value in AUTHORITIES], "*"),
    ),
    *(
        Case("record_steps", lambda world: {"items": []}, items=by_field([_step(**{field: v}) for v in values], field))
        for field, values in {
            "name": [None, "", *TEXTS[:-2], "x" * 513, "é" * 257],
            "n": [*INTS, 2**31],
            "kind": [None, 5, "", "steps", "Step", [], "\0"],
            "result": [*BYTES, bytes(MAX_PAYLOAD + 1)],
            "encoding": TEXTS,
            "error": [*LONG_TEXTS, "", "no json", "[]", "5", '{"a": "\\u0000"}', '{"a": ', '"x"', f'"{"x" * 2**18}"'],
            "seconds": ["1", True, []],
            "pause": [5, "5", timedelta(-1), timedelta.max, timedelta(1)],
        }.items()
    ),
    Case(
        "record_steps",
        lambda world: {"items": []},
        items=by_field([_step(kind="sleep", pause=value) for value in (None, 5, "5", timedelta(-1))], "pause"),
    ),
    *(
        Case(
            name,
            lambda world: {"execution_ids": [world.waiting]},
            execution_ids=by_field([None, 5, "x", {"a"}, [UNKNOWN] * 1001]),
        )
        for name in ("read_steps", "read_outcomes", "unwatch")
    ),
    *(
        Case(
            name,
            lambda world: {"execution_ids": []},
            execution_ids=by_field([[value] for value in IDS], "execution_id"),
        )
        for name in ("read_steps", "read_outcomes", "unwatch")
    ),
    Case(
        "park",
        lambda world: {"authority": world.held.handle, "until": datetime(2050, 1, 1, tzinfo=UTC)},
        authority=by_field(AUTHORITIES, "*"),
        until=by_field([*MOMENTS, timedelta(1), None]),
        ends_of=by_field([5, "x", *([value] for value in IDS), [UNKNOWN] * 1001, lambda w: [w.held.execution_id]]),
    ),
    Case(
        "submit_child",
        lambda world: {
            "authority": world.held.handle,
            "name": "s",
            "n": 0,
            "item": NewExecution(execution_kind="child", lane_id="own"),
        },
        authority=by_field(AUTHORITIES, "*"),
        name=by_field([None, "", *TEXTS[:-2], "x" * 513]),
        n=by_field(INTS),
        item=by_field(
            [
                None,
                5,
                "x",
                NewExecution(execution_kind="\0"),
                NewExecution(execution_kind="k", lane_id="é"),
                NewExecution(execution_kind="k", priority="5"),  # type: ignore[arg-type]
                NewExecution(execution_kind="k", tags={"a": 5}),  # type: ignore[dict-item]
                NewExecution(execution_kind="k", execution_id="x"),
            ],
            "*",
        ),
    ),
    Case(
        "submit_child",
        lambda world: {
            "authority": world.held.handle,
            "name": "s",
            "n": 0,
            "item": NewExecution(execution_kind="child", lane_id="own"),
        },
        item=by_kind("invalid_policy_json", [NewExecution(execution_kind="k", policy=value) for value in POLICIES]),
    ),
    Case(
        "watch",
        lambda world: {"execution_ids": [world.done], "within": timedelta(seconds=1)},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
        within=by_field([None, *DURATIONS]),
    ),
    Case(
        "free_key",
        lambda world: {"execution_id": world.done, "idempotency_key": "k"},
        **ONE_ID,
        idempotency_key=by_field([None, *KEYS]),
        namespace=by_field(TEXTS),
        flow_id=by_field(UUIDS),
    ),
    Case(
        "find_id",
        lambda world: {"text": UUID_TEXT},
        text=by_field([None, 5, "", "12345", "1234567x", UUID_TEXT + "0", "{fp:1}:123456", "\0", "\ud800"], "id"),
        what=by_field([5, "step", ""]),
        limit=by_field(INTS),
    ),
    Case(
        "claim_lanes",
        lambda world: {"shares": {"default": 1}, "limit": 1, **WORKER},
        shares=by_field([{}, None, 5, "x", ["default"], {"": 1}, {"é": 1}, {5: 1}, *({"l": v} for v in (*INTS, 1001))]),
        limit=by_field([*INTS, 0, 1001]),
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        lease_ttl=by_field([None, *DURATIONS]),
        max_wait=by_field([5, timedelta(-1), timedelta.max]),
    ),
    Case(
        "sleep_for_work",
        lambda world: {"lanes": ["default"], "at_most": timedelta(1)},
        lanes=by_field([None, 5, "x", [""], ["é"], [5]]),
        at_most=by_field([None, *DURATIONS]),
        slots=by_field([*INTS, 0, 100_001]),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        before=by_field([5, "x", datetime(2026, 1, 1)]),
    ),
    Case(
        "sleep_and_heartbeat",
        lambda world: {"lanes": ["default"], "at_most": timedelta(1), "worker": OWN},
        lanes=by_field([None, 5, "x", [""], ["é"], [5]]),
        at_most=by_field([None, *DURATIONS]),
        slots=by_field([*INTS, 0, 100_001]),
        kinds=by_field([*LISTS, [5], ["\0"], ["x" * 257]]),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        before=by_field([5, "x", datetime(2026, 1, 1)]),
        worker=by_field(OWN_WORKERS),
    ),
    # workers
    Case(
        "register_worker",
        lambda world: {**WORKER, "lanes": ["default"], "liveness_ttl": timedelta(1)},
        worker_id=by_field(WORKERS),
        worker_instance_id=by_field(WORKERS),
        lanes=by_field([None, [], *LISTS, *([lane] for lane in LANES)]),
        liveness_ttl=by_field([None, *DURATIONS]),
        capabilities=by_kind("invalid_capabilities", CAPABILITIES),
        kinds=by_field(
            [5, "abc", b"abc", [5], [""], ["\0"], ["x" * 257], {"a": "1"}, {"a": [""]}, {"a": [5]}, {5: []}]
        ),
        namespace=by_field([None, *TEXTS]),
        slots=by_field(["5", 1.0, True, -1, 2**31]),
        package_version=by_field(TEXTS),
        host=by_field(TEXTS),
        pid=by_field(["5", 1.0, True, -1, 2**31]),
    ),
    Case(
        "heartbeat_worker",
        lambda world: {"worker_instance_id": "w-1"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
    ),
    Case("heartbeat_own", lambda world: {"worker": OWN}, worker=by_field(OWN_WORKERS)),
    Case(
        "renew_and_heartbeat",
        lambda world: {"authorities": [], "worker": OWN},
        authorities=by_field([None, 5, "x", b"x"]),
        worker=by_field(OWN_WORKERS),
    ),
    Case(
        "leave_registry",
        lambda world: {"worker_instance_id": "w-1", "reason": "gone"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
        reason=by_field([None, *TEXTS, "a\nb", "\x7f", "\x85"]),
    ),
    Case(
        "mark_worker_dead",
        lambda world: {"worker_instance_id": "w-1", "reason": "gone"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
        reason=by_field([None, *TEXTS, "a\nb", "\x7f", "\x85"]),
    ),
    Case(
        "list_workers",
        lambda world: {"namespace": ""},
        namespace=by_field(TEXTS),
        after=by_field([one for one in WORKERS if one is not None]),
        limit=by_field(INTS),
    ),
    Case(
        "list_all_workers",
        lambda world: {},
        after=by_field([5, "x", ("",), ("", ""), ("\0", "a"), ("", "a b"), (None, "a")]),
        limit=by_field(INTS),
    ),
    Case(
        "list_worker_events",
        lambda world: {"worker_instance_id": "w-1"},
        worker_instance_id=by_field(WORKERS),
        namespace=by_field([None, *TEXTS]),
        before=by_field(["5", 1.0, True, -1, 2**63]),
        limit=by_field(INTS),
    ),
    Case(
        "find_unserved",
        lambda world: {"execution_ids": [world.waiting]},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
    ),
    Case(
        "find_unserved",
        lambda world: {"execution_ids": []},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case("sweep_workers", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case("trim_worker_events", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    # many at once, and forgetting
    Case(
        "cancel_many",
        lambda world: {"execution_ids": [world.waiting], "reason": "no"},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
    ),
    Case(
        "cancel_many",
        lambda world: {"execution_ids": [], "reason": "no"},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case(
        "replay_many",
        lambda world: {"execution_ids": [world.done]},
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
        requested_by=by_field(TEXTS),
    ),
    Case(
        "replay_many",
        lambda world: {"execution_ids": []},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
    ),
    Case("delete_execution", lambda world: {"execution_id": world.done}, **ONE_ID),
    Case("redact_execution", lambda world: {"execution_id": world.done}, **ONE_ID),
    # schedules
    Case(
        "put_schedule",
        lambda world: {"name": "s", "kind": "k", "timing": {"every_ms": 5}, "next_at": None},
        name=by_field([None, "", *TEXTS]),
        kind=by_field([None, *TEXTS]),
        timing=by_field([None, 5, "x", [], {"a": object()}, {"a": "\0"}, {"a": "\ud800"}]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
        catch_up=by_field([None, 5, "", "none", "Skip", []]),
        payload=by_field([*BYTES, bytes(MAX_PAYLOAD + 1)]),
        payload_encoding=by_field(TEXTS),
        options=by_field([5, "x", [], {"a": object()}, {"a": "\0"}, {"\ud800": 1}]),
    ),
    Case("list_schedules", lambda world: {}, cursor=by_field(["", *TEXTS]), limit=by_field(INTS)),
    Case("read_schedule", lambda world: {"name": "s"}, name=by_field([None, "", *TEXTS])),
    Case("schedule_as_due", lambda world: {"name": "s"}, name=by_field([None, "", *TEXTS])),
    *(
        Case(name, lambda world: {"name": "standing"}, name=by_field([None, "", *TEXTS]))
        for name in ("pause_schedule", "delete_schedule")
    ),
    Case(
        "resume_schedule",
        lambda world: {"name": "standing"},
        name=by_field([None, "", *TEXTS]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case("due_schedules", lambda world: {}, limit=by_field(INTS)),
    Case(
        "fire_schedule",
        lambda world: {
            "name": "standing",
            "due_at": DUE,
            "next_at": None,
            "fired_at": DUE,
            "items": [NewExecution(execution_kind="k", lane_id="own")],
        },
        name=by_field([None, "", *TEXTS]),
        due_at=by_field([None, *MOMENTS, timedelta(1)]),
        next_at=by_field([*MOMENTS, timedelta(1)]),
        fired_at=by_field([*MOMENTS, timedelta(1)]),
        items=by_field([None, 5, "x", {"a": 1}, [5], [NewExecution(execution_kind="\0")]], "*"),
    ),
    # waitpoints, suspensions and signals
    Case(
        "create_waitpoint",
        lambda world: {**_authority(world), "waitpoint_key": "k", "expires_in": timedelta(1)},
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id)], "*"),
        waitpoint_key=by_field([None, *TEXTS]),
        expires_in=by_field([None, 5, "5"]),
    ),
    Case(
        "create_waitpoint",
        lambda world: {**_authority(world), "waitpoint_key": "k", "expires_in": timedelta(1)},
        waitpoint_key=by_field([""], "*"),
        expires_in=by_field([timedelta(0), timedelta(-1), timedelta.min], "*"),
    ),
    Case(
        "close_waitpoint",
        lambda world: {**_authority(world), "waitpoint_id": world.pending.waitpoint_id},
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id)], "*"),
        **ONE_WAITPOINT,
        reason=by_field([None, "", *TEXTS]),
    ),
    Case(
        "expire_waitpoint",
        lambda world: {"execution_id": world.held.execution_id, "waitpoint_id": world.pending.waitpoint_id},
        **ONE_ID,
        **ONE_WAITPOINT,
    ),
    Case(
        "list_pending_waitpoints",
        lambda world: {"execution_id": world.suspended},
        **ONE_ID,
        after=by_field(UUIDS),
        limit=by_field([None, "5", 1.0, True, 2**31]),
    ),
    Case(
        "read_waitpoint_token",
        lambda world: {
            "partition_key": home(world.suspended),
            "waitpoint_id": world.bound.waitpoint_id,
        },
        partition_key=by_field(PARTITIONS),
        **ONE_WAITPOINT,
    ),
    Case(
        "probe_waitpoint",
        lambda world: {name: _signalling(world)[name] for name in ("execution_id", "waitpoint_id", "waitpoint_token")},
        **ONE_ID,
        **ONE_WAITPOINT,
        waitpoint_token=by_field([None, 5, b"x"]),
    ),
    Case(
        "suspend",
        _suspending,
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id)], "*"),
        **SUSPEND_FIELDS,
    ),
    Case("suspend", _suspending, **SUSPEND_FIELDS_TOO),
    Case("suspend", _suspending, **SUSPEND_CODES),
    Case(
        "suspend_by_triple",
        lambda world: {**_suspending(world), "authority": _fence(world)},
        authority=by_field([*AUTHORITIES, lambda world: world.held.handle], "*"),
        **SUSPEND_FIELDS,
    ),
    Case(
        "suspend_on",
        lambda world: {
            "authority": world.held.handle,
            "waitpoints": [world.pending.waitpoint_id],
            "resume_condition": on("k"),
        },
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id)], "*"),
        waitpoints=by_field([None, 5, "x", [], *([value] for value in (None, *UUIDS))]),
        resume_condition=by_field([*CONDITIONS, TimeoutOnly()]),
        reason_code=by_field([None, 5, "", "nonsense", []]),
        timeout_at=by_field([*MOMENTS, timedelta(1)]),
        timeout_behavior=by_field([None, 5, "", "explode", []]),
    ),
    Case(
        "deliver_signal",
        _signalling,
        **ONE_ID,
        **ONE_WAITPOINT,
        waitpoint_token=by_field([None, 5, b"x"]),
        signal_name=by_field([None, "", "__x", *TEXTS]),
        source_type=by_field([None, "", "system", *TEXTS]),
        source_identity=by_field([None, *TEXTS]),
        signal_category=by_field([None, *TEXTS]),
        signal_id=by_field(UUIDS),
        payload=by_field(BYTES),
        payload_encoding=by_field([None, *TEXTS]),
        correlation_id=by_field([5, b"x", "\0", "\ud800", "x" * 513]),
        idempotency_key=by_field([5, b"x", "\0", "\ud800", "x" * 1101]),
        target_scope=by_field([None, 5, "", "flow", []]),
        created_at=by_field([*MOMENTS, timedelta(1)]),
        dedup_ttl=by_field([None, 5, timedelta(-1), timedelta.max]),
        resume_delay=by_field([5, timedelta(-1), timedelta.max]),
        max_signals_per_execution=by_field([*INTS[1:5], 2**32]),
        signal_maxlen=by_field(INTS),
    ),
    Case("deliver_signal", _signalling, payload=by_kind("payload_too_large", [bytes(65_537)])),
    Case(
        "signal_execution",
        lambda world: {"execution_id": world.suspended, "signal_name": "go", "source_type": "test"},
        **ONE_ID,
        waitpoint_key=by_field([5, b"x", "\0", "\ud800"], "key"),
        signal_name=by_field([None, "", "__x", *TEXTS]),
        source_type=by_field([None, "", "system", *TEXTS]),
        source_identity=by_field([None, *TEXTS]),
        signal_category=by_field([None, *TEXTS]),
        signal_id=by_field(UUIDS),
        payload=by_field(BYTES),
        payload_encoding=by_field([None, *TEXTS]),
        correlation_id=by_field([5, b"x", "\0", "\ud800", "x" * 513]),
        idempotency_key=by_field([5, b"x", "\0", "\ud800", "x" * 1101]),
        target_scope=by_field([None, 5, "", "flow", []]),
        dedup_ttl=by_field([None, 5, timedelta(-1), timedelta.max]),
        resume_delay=by_field([5, timedelta(-1), timedelta.max]),
        max_signals_per_execution=by_field([*INTS[1:5], 2**32]),
        signal_maxlen=by_field(INTS),
    ),
    Case(
        "signal_execution",
        lambda world: {"execution_id": world.suspended, "signal_name": "go", "source_type": "test"},
        payload=by_kind("payload_too_large", [bytes(65_537)]),
    ),
    Case(
        "deliver_approval_signal",
        _approving,
        **ONE_ID,
        lane_id=by_field([None, "", *LANES]),
        **ONE_WAITPOINT,
        signal_name=by_field([None, "", "__x", *TEXTS]),
        idempotency_suffix=by_field([None, *TEXTS]),
        signal_dedup_ttl=by_field([None, 5, timedelta(-1), timedelta.max], "dedup_ttl"),
        source_identity=by_field([None, *TEXTS]),
        maxlen=by_field(INTS, "signal_maxlen"),
        max_signals_per_execution=by_field([*INTS[1:5], 2**32]),
    ),
    Case("deliver_approval_signal", _approving, lane_id=by_field(["elsewhere"], "*")),
    Case(
        "observe_signals",
        _authority,
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id), _fence], "*"),
    ),
    Case(
        "read_signals",
        lambda world: {"execution_id": world.suspended},
        **ONE_ID,
        after=by_field(INTS),
        limit=by_field(INTS),
    ),
    Case(
        "resume_execution",
        lambda world: {"execution_id": world.suspended},
        **ONE_ID,
        trigger_type=by_field([None, 5, "", "timeout", []]),
        resume_delay=by_field([None, 5, timedelta(-1), timedelta.max]),
    ),
    *(
        Case(name, lambda world: {"execution_id": world.suspended}, **ONE_ID)
        for name in ("expire_suspension", "read_suspension")
    ),
    Case(
        "list_suspended",
        lambda world: {"partition_key": 1},
        partition_key=by_field(PARTITIONS),
        cursor=by_field(CURSORS),
        limit=by_field(INTS),
    ),
    Case(
        "list_waits",
        lambda world: {},
        lane_id=by_field(["", *LANES]),
        namespace=by_field(TEXTS),
        waitpoint_key=by_field(TEXTS),
        cursor=by_field(CURSORS),
        limit=by_field(INTS),
    ),
    Case(
        "open_wait",
        lambda world: {**_authority(world), "name": "w", "n": 0, "keys": ["k"], "within": timedelta(1)},
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id)], "*"),
        name=by_field([None, "", *TEXTS[:-2], "x" * 513]),
        n=by_field(INTS),
        keys=by_field([None, 5, "k", [], [5], [""], ["\0"], ["x" * 257]]),
        within=by_field([5, "5"]),
    ),
    Case(
        "settle_wait",
        lambda world: {**_authority(world), "name": "w", "n": 0, "condition": on("k")},
        authority=by_field([*AUTHORITIES, lambda world: Operator(world.held.execution_id)], "*"),
        name=by_field([None, "", *TEXTS[:-2], "x" * 513]),
        n=by_field(INTS),
        condition=by_field(CONDITIONS, "resume_condition"),
        reason_code=by_field([None, 5, "", "nonsense", []]),
        deadline=by_field([*MOMENTS, timedelta(1)]),
    ),
    Case(
        "seed_waitpoint_hmac_secret",
        lambda world: {"kid": "k1", "secret_hex": "ab" * 32},
        kid=by_kind("invalid_kid", KIDS),
        secret_hex=by_kind("invalid_secret_hex", SECRETS),
    ),
    Case(
        "rotate_waitpoint_hmac_secret_all",
        lambda world: {"new_kid": "k2", "new_secret_hex": "ab" * 32},
        new_kid=by_kind("invalid_kid", KIDS),
        new_secret_hex=by_kind("invalid_secret_hex", SECRETS),
        grace=by_kind("invalid_grace_ms", [None, 5, "5", timedelta(-1), timedelta(microseconds=-1)]),
    ),
    Case(
        "list_events",
        lambda world: {"execution_id": world.done},
        after=by_field([5, "x", (0, 0), EventCursor(-1), EventCursor(2**63), EventCursor(1, -1)]),
        limit=by_field(INTS),
        **ONE_ID,
    ),
    Case(
        "count_events",
        lambda world: {},
        after=by_field([5, "x", (0, 0), EventCursor(-1), EventCursor(2**63), EventCursor(1, -1)]),
    ),
    Case("shutdown_prepare", lambda world: {}, grace=by_field([None, 5, timedelta(-1), timedelta.max])),
    # flows: graphs
    Case(
        "submit_flow",
        lambda world: {**_nodes(world), "flow_id": mint_uuid()},
        nodes=by_field([*NODES, lambda world: [_node("a", NewEdge(upstream=world.upstream))]]),
        flow_kind=by_field([None, *TEXTS]),
        namespace=by_field([None, *TEXTS]),
        flow_id=by_field(UUIDS),
        tags=by_field(TAGS),
    ),
    Case(
        "submit_flow",
        lambda world: {**_nodes(world), "flow_id": mint_uuid()},
        nodes=by_kind("invalid_policy_json", [[_node("a", execution_policy=value)] for value in POLICIES]),
    ),
    Case("extend_flow", _nodes, **ONE_FLOW, nodes=by_field(NODES)),
    Case(
        "create_flow",
        lambda world: {},
        flow_id=by_field(UUIDS),
        flow_kind=by_field([None, *TEXTS]),
        namespace=by_field([None, *TEXTS]),
    ),
    Case(
        "add_execution_to_flow",
        lambda world: {**_flow(world), "execution_id": world.outside},
        **ONE_FLOW,
        execution_id=by_field([*IDS, _elsewhere]),
    ),
    Case(
        "add_executions_to_flow",
        lambda world: {**_flow(world), "execution_ids": [world.outside]},
        **ONE_FLOW,
        execution_ids=by_field(
            [
                None,
                *LISTS,
                *([value] for value in IDS),
                lambda world: [_elsewhere(world)],
                lambda world: [world.outside] * 1001,
            ]
        ),
    ),
    Case(
        "stage_dependency_edge",
        _staging,
        **EDGE_FIELDS,
        expected_graph_revision=by_field(REVISIONS),
        data_passing_ref=by_field(TEXTS),
    ),
    Case("stage_dependency_edge", _staging, dependency_kind=by_kind("invalid_dependency", KINDS_OF_EDGE)),
    Case(
        "stage_and_apply_edges",
        lambda world: {**_flow(world), "edges": [_an_edge(world)], "expected_graph_revision": world.revision},
        **ONE_FLOW,
        edges=by_field(
            [
                None,
                *LISTS,
                [],
                [5],
                [None],
                *(lambda w, v=value: [_an_edge(w, edge_id=v)] for value in (None, *UUIDS)),
                *(lambda w, v=value: [_an_edge(w, upstream=v)] for value in IDS),
                *(lambda w, v=value: [_an_edge(w), _an_edge(w, downstream=v)] for value in IDS),
                *(lambda w, v=value: [_an_edge(w, data_passing_ref=v)] for value in TEXTS),
            ]
        ),
        expected_graph_revision=by_field(REVISIONS),
    ),
    Case(
        "stage_and_apply_edges",
        lambda world: {**_flow(world), "edges": [_an_edge(world)], "expected_graph_revision": world.revision},
        edges=by_kind(
            "invalid_dependency", [lambda w, v=value: [_an_edge(w, dependency_kind=v)] for value in KINDS_OF_EDGE]
        ),
    ),
    Case(
        "apply_dependency_to_child",
        lambda world: {**_flow(world), **_edge(world)},
        **EDGE_FIELDS,
        graph_revision=by_field(REVISIONS),
        data_passing_ref=by_field(TEXTS),
    ),
    Case(
        "apply_dependency_to_child",
        lambda world: {**_flow(world), **_edge(world)},
        edge_id=by_kind("invalid_dependency", [mint_uuid()]),
        upstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.downstream]),
        downstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.upstream]),
        dependency_kind=by_kind("invalid_dependency", KINDS_OF_EDGE),
        data_passing_ref=by_kind("invalid_dependency", ["result"]),
    ),
    Case(
        "set_edge_group_policy",
        lambda world: {**_flow(world), "downstream_execution_id": world.upstream, "policy": Quorum(2)},
        **ONE_FLOW,
        downstream_execution_id=by_field([*IDS, _elsewhere]),
        policy=by_field(JOINS),
    ),
    Case(
        "set_edge_group_policy",
        lambda world: {**_flow(world), "downstream_execution_id": world.outside, "policy": Quorum(2)},
        downstream_execution_id=by_field([lambda world: world.downstream], "policy"),
    ),
    # flows: reads and tags
    *(
        Case(name, _flow, **ONE_FLOW)
        for name in (
            "describe_flow",
            "read_flow_graph",
            "list_flow_members",
            "flow_progress",
            "project_flow_summary",
            "read_flow_summary",
            "read_cancel_backlog",
            "delete_flow",
        )
    ),
    Case(
        "list_flows",
        lambda world: {"partition_key": 1},
        partition_key=by_field(PARTITIONS),
        cursor=by_field(UUIDS),
        limit=by_field(INTS),
    ),
    Case(
        "find_flows",
        lambda world: {},
        namespace=by_field(TEXTS),
        flow_kind=by_field(TEXTS),
        cursor=by_field(
            [
                *CURSORS,
                f"2030-01-01T00:00:00/{UUID_TEXT}",
                f"0001-01-01T00:00:00+14:00/{UUID_TEXT}",
                f"9999-12-31T23:00:00-14:00/{UUID_TEXT}",
                f"2030-01-01T00:00:00+00:00/{UUID_TEXT.replace('-', '')}",
            ]
        ),
        limit=by_field(INTS),
    ),
    Case("list_edges", lambda world: {**_flow(world), "outgoing": world.upstream}, outgoing=by_field(IDS)),
    Case(
        "list_edges",
        lambda world: {**_flow(world), "incoming": world.upstream},
        **ONE_FLOW,
        incoming=by_field(IDS[1:]),
    ),
    Case(
        "list_edges",
        lambda world: {**_flow(world), "incoming": world.upstream},
        outgoing=by_field([UNKNOWN]),
        incoming=by_field([None], "outgoing"),
    ),
    Case(
        "describe_edge",
        lambda world: {**_flow(world), "edge_id": world.edge},
        **ONE_FLOW,
        edge_id=by_field([None, *UUIDS]),
    ),
    *(
        Case(name, lambda world: {"execution_id": world.downstream}, **ONE_ID)
        for name in ("evaluate_flow_eligibility", "promote_blocked_to_eligible")
    ),
    Case(
        "set_flow_tag",
        lambda world: {**_flow(world), "key": "a.b", "value": "x"},
        **ONE_FLOW,
        key=by_field(TAG_KEYS),
        value=by_field([None, *LONG_TEXTS]),
    ),
    Case(
        "set_flow_tags",
        lambda world: {**_flow(world), "tags": {"a.b": "x"}},
        **ONE_FLOW,
        tags=by_field(
            [
                None,
                {},
                *TAGS,
                *({"a.b": "x", key: "x"} for key in TAG_KEYS),
                *({"a.b": "x", "a.c": value} for value in (None, *LONG_TEXTS)),
            ]
        ),
    ),
    Case("get_flow_tag", lambda world: {**_flow(world), "key": "a.b"}, **ONE_FLOW, key=by_field(TAG_KEYS)),
    # flows: what moves them on
    Case("dispatch_completion", lambda world: {"event_id": 1}, event_id=by_field(REVISIONS)),
    Case("cascade_completion", lambda world: {"event": world.end}, event=by_field([None, 5, "x", {}, UNKNOWN])),
    Case(
        "cascade_completion",
        lambda world: {"event": world.end},
        event=by_field(
            [lambda w, v=value: msgspec.structs.replace(w.end, cursor=EventCursor(v)) for value in REVISIONS]
        ),
    ),
    Case(
        "dispatch_cascades",
        lambda world: {"stale": timedelta(0)},
        limit=by_field([*INTS, 0, 10_001]),
        edges=by_field([*INTS, 0, 10_001]),
        after=by_field(REVISIONS[1:]),
        stale=by_field([5, "5", timedelta(-1), timedelta.max]),
        filter=by_field(FILTERS),
    ),
    Case(
        "resolve_dependency",
        _resolving,
        **EDGE_FIELDS,
        outcome=by_field([None, 5, "", "completed", "Success", [], "\0"]),
    ),
    Case(
        "resolve_dependency",
        _resolving,
        edge_id=by_kind("invalid_dependency", [mint_uuid(), lambda world: world.edge]),
        upstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.downstream]),
        downstream_execution_id=by_kind("invalid_dependency", [UNKNOWN, lambda world: world.upstream]),
    ),
    Case(
        "reconcile_edges",
        lambda world: {"after": EdgePlace(0, mint_uuid(), mint_uuid())},
        after=by_field(
            [
                5,
                "x",
                (0, mint_uuid(), mint_uuid()),
                *(EdgePlace(value, mint_uuid(), mint_uuid()) for value in (*INTS, 65_536)),
                *(EdgePlace(0, value, mint_uuid()) for value in (None, *UUIDS)),
                *(EdgePlace(0, mint_uuid(), value) for value in (None, *UUIDS)),
            ]
        ),
        limit=by_field([*INTS, 0, 10_001]),
        filter=by_field(FILTERS),
    ),
    Case(
        "cancel_siblings",
        _group,
        **ONE_FLOW,
        downstream_execution_id=by_field([*IDS, _elsewhere]),
        limit=by_field([*INTS, 0, 10_001]),
    ),
    *(
        Case(name, _group, **ONE_FLOW, downstream_execution_id=by_field([*IDS, _elsewhere]))
        for name in ("drain_sibling_cancel_group", "reconcile_sibling_cancel_group")
    ),
    Case("list_sibling_cancels", lambda world: {}, limit=by_field([*INTS, 0, 10_001])),
    Case(
        "cancel_flow",
        _flow,
        **ONE_FLOW,
        policy=by_field([None, 5, "", "cancel_nothing", "Cancel_all", [], "\0"]),
        wait=by_field([None, 5, 1, "yes", timedelta(-1)]),
    ),
    Case(
        "cancel_flow",
        lambda world: {**_flow(world), "wait": True},
        grace=by_kind("invalid_grace_ms", GRACES),
    ),
    Case(
        "cancel_flow_header",
        _flow,
        **ONE_FLOW,
        cancellation_policy=by_field([None, 5, "", "cancel_nothing", "Cancel_all", [], "\0"]),
    ),
    Case("cancel_flow_header", _flow, grace=by_kind("invalid_grace_ms", GRACES)),
    Case(
        "ack_cancel_member",
        lambda world: {**_flow(world), "execution_id": world.upstream},
        **ONE_FLOW,
        execution_id=by_field(IDS),
    ),
    Case(
        "reconcile_cancellations",
        lambda world: {},
        limit=by_field([*INTS, 0, 10_001]),
        members=by_field([*INTS, 0, 10_001]),
        chunks=by_field([*INTS, 0, 10_001]),
    ),
    Case("project_flow_summaries", lambda world: {}, limit=by_field([*INTS, 0, 1_000_001])),
]
NO_ARGUMENTS = {
    "close",
    "leave_lead",
    "list_leaders",
    "prepare",
    "ping",
    "server_time_ms",
    "next_due",
    "timer_wakeups",
    "work_wakeups",
    "ended_wakeups",
    "until_next_schedule",
    "backend_label",
    "capabilities",
    "list_waitpoint_hmac_kids",
}
NOT_CALLED = {"connect", "attach", "detach", "lost_wakeups", "is_plain", "mint_id"}


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
        if case.name == "signal_execution":
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
        lambda: engine.extend_flow(flow, [_node("a")]),
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
    assert backlog.grace_until.year == 9999


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
    suppress_health_check=[HealthCheck.function_scoped_fixture],
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
