"""The values that are wrong for each sort of argument, and the world that the cases of this folder speak of."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import msgspec

import flowfabric as ff
from flowfabric.values.budget import Reserved
from flowfabric.values.bulk import ExecutionFilter
from flowfabric.values.conditions import AllMet, Count, CountKind, on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import Edge
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.joins import AnyOf, Quorum
from flowfabric.values.kept_answer import AnswerKey
from flowfabric.values.lease import Fence, Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.step import NewStep
from flowfabric.values.wait import Fresh, ResumePolicy, Suspended, UsePending
from flowfabric.values.worker import OwnWorker, Serves
from tests.ids import home, id_in
from tests.support import WORKER, Clock, claim_one, started, submit, submit_member

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
KIND_MAPS: list[Any] = [
    {"a": value} for value in ([True], [2**31], [1, 1], [1.0], [None], 5, None, "1", Serves(versions=(0,)))
] + [{"a": Serves(digest=value)} for value in TEXTS]
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
    datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), datetime.min.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
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
        await engine.create_quota_policy(name="bad input")
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
        self.key_id = (await engine.create_api_key("standing", ["read"])).key_id
        self.bulk = await engine.create_bulk("cancel", ExecutionFilter(kinds=("nothing of it",)), actor="a")
        self.answer = AnswerKey(key_id="", operation="o", idempotency_key="k", holder=UUID(UUID_TEXT))
        await engine.begin_answer(self.answer, b"r")
        await engine.put_schedule("standing", kind="k", timing={"every_ms": 5}, next_at=DUE)
        self.waiting = await submit(engine, tags={"a.b": "c"})
        self.blocked = await submit(engine)
        await engine.block_execution_for_admission(self.blocked, "paused_by_operator")
        await self._flow(engine)
        made = await engine.create_budget(name="standing", dimensions=["t"], hard_limits=[1000], soft_limits=[0])
        self.budget = made.budget_id
        held = await engine.reserve_usage(self.held.handle, {"t": 5}, self.budget)
        assert isinstance(held, Reserved)
        self.reservation = held.reservation_id

    async def _flow(self, engine: ff.Engine) -> None:
        """A flow of two members with an edge that is staged and one that is applied, and what could become a member."""
        self.flow = a_flow_id()
        self.upstream = await submit_member(engine, self.flow, lane_id="flows")
        self.downstream = await submit_member(engine, self.flow, lane_id="flows")
        self.outside = await submit(engine, lane_id="flows", flow_id=self.flow)
        self.edge = mint_uuid()
        staged = await engine.stage_dependency_edge(self.flow, expected_graph_revision=2, **as_edge(self))
        applied = an_edge(self)
        self.applied = applied.edge_id
        self.revision = await engine.stage_and_apply_edges(
            self.flow, [applied], expected_graph_revision=staged.new_graph_revision
        )
        self.end = (await engine.read_events(family="completion", limit=1)).items[0]
        self.consumer = "known"
        await engine.register_consumer(self.consumer)

    async def nothing(self, *_: Any) -> None:
        """What a consumer does with events."""

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


def as_fence(world: World, **change: Any) -> Fence:
    handle = world.held.handle
    fields = {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }
    return Fence(**(fields | change))


def elsewhere(world: World) -> ff.ExecutionId:
    """An id of another partition than that of the flow."""
    return id_in((home(world.flow) + 1) % 256)


AUTHORITIES: list[Any] = [
    None, 5, "x", UNKNOWN, Operator("nonsense"),  # type: ignore[arg-type]
    lambda world: as_fence(world, execution_id="x"),
    lambda world: as_fence(world, lease_id="x"),
    lambda world: as_fence(world, lease_id=None),
    lambda world: as_fence(world, lease_epoch=-1),
    lambda world: as_fence(world, lease_epoch=2**63),
    lambda world: as_fence(world, lease_epoch="1"),
    lambda world: as_fence(world, attempt_id=5),
    lambda world: as_fence(world, attempt_index=2**31),
    lambda world: as_fence(world, attempt_index=True),
]  # fmt: skip


def as_step(authority: Any = None, **fields: Any) -> Callable[[World], Any]:
    """A batch of one step with something wrong in it."""

    def items(world: World) -> list[Any]:
        by = authority(world) if inspect.isfunction(authority) else authority
        return [(world.held.handle if fields else by, NewStep(**({"name": "s"} | fields)))]

    return items


def as_authority(world: World) -> dict[str, Any]:
    return {"authority": world.held.handle}


def as_grant(world: World) -> dict[str, Any]:
    return {"execution_id": world.waiting, **WORKER}


def consume(world: World) -> dict[str, Any]:
    return {"execution_id": world.waiting, **WORKER, "lease_id": mint_uuid(), "attempt_id": mint_uuid()}


def as_one(world: World) -> dict[str, Any]:
    return {"execution_id": world.waiting}


def suspending(world: World) -> dict[str, Any]:
    return {
        "authority": world.held.handle,
        "waitpoints": [Fresh(mint_uuid(), "k")],
        "resume_condition": on("k"),
        "timeout_at": DUE,
    }


def signalling(world: World) -> dict[str, Any]:
    return {
        "execution_id": world.suspended,
        "waitpoint_id": world.bound.waitpoint_id,
        "waitpoint_token": world.bound.waitpoint_token,
        "signal_name": "go",
        "source_type": "test",
    }


def approving(world: World) -> dict[str, Any]:
    return {
        "execution_id": world.suspended,
        "lane_id": "own",
        "waitpoint_id": world.bound.waitpoint_id,
        "signal_name": "approved",
        "idempotency_suffix": "1",
    }


def as_edge(world: World) -> dict[str, Any]:
    return {
        "edge_id": world.edge,
        "upstream_execution_id": world.upstream,
        "downstream_execution_id": world.downstream,
    }


def staging(world: World) -> dict[str, Any]:
    return {**as_flow(world), **as_edge(world), "edge_id": mint_uuid(), "expected_graph_revision": world.revision}


def resolving(world: World) -> dict[str, Any]:
    return {**as_flow(world), **as_edge(world), "edge_id": world.applied, "outcome": "success"}


def as_group(world: World) -> dict[str, Any]:
    return {"flow_id": world.flow, "downstream_execution_id": world.downstream}


def as_flow(world: World) -> dict[str, Any]:
    return {"flow_id": world.flow}


def a_flow_id() -> FlowId:
    """A new flow elsewhere than the fixed ids of the tables, which chance would otherwise make ids of its nodes."""
    assert home(UNKNOWN) != 7
    return FlowId(id_in(7))


def as_nodes(world: World) -> dict[str, Any]:
    return {**as_flow(world), "nodes": [as_node("a"), as_node("b", NewEdge(upstream="a"), policy=Quorum(1))]}


def as_node(name: Any, *after: Any, policy: Any = None, execution_policy: Any = None, **fields: Any) -> NewNode:
    given = {"execution_kind": "k", "lane_id": "flows", "policy": execution_policy} | fields
    execution = NewExecution(**given)
    node = NewNode(name=name, execution=execution, after=after)
    return node if policy is None else msgspec.structs.replace(node, policy=policy)


def an_edge(world: World, **change: Any) -> Edge:
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
    None, 5, "ab", b"ab", {}, {"a": 1}, [], [5], [None], ["a"], [as_node("a")] * 2, [as_node("")],
    *([as_node(value)] for value in (None, *TEXTS)),
    *([NewNode(name="a", execution=value)] for value in (None, 5, {"execution_kind": "k"})),
    *([NewNode(name="a", execution=NewExecution(execution_kind="k"), after=value)] for value in (None, 5, "b", {})),
    *([as_node("a", value)] for value in (None, 5, "b", UNKNOWN, as_node("b"))),
    *([as_node("a", NewEdge(upstream=value))] for value in (None, 5, "b", [], b"b", UNKNOWN)),
    *([as_node("a"), as_node("b", NewEdge(upstream="a", data_passing_ref=value))] for value in TEXTS),
    *([as_node("a"), as_node("b", NewEdge(upstream="a", edge_id=value))] for value in UUIDS),
    [as_node("a"), as_node("b", *[NewEdge(upstream="a", edge_id=UUID(UUID_TEXT))] * 2)],
    *([as_node("a"), as_node("b", NewEdge(upstream="a"), policy=value)] for value in (*JOINS[1:], Quorum(2))),
    [as_node("a", policy=AnyOf())], [as_node("a", policy=Quorum(1))],
    [as_node("a", idempotency_key="k")], [as_node("a", execution_id=UNKNOWN)], [as_node("a", execution_id=5)],
    [as_node("a", priority="5")], [as_node("a", lane_id="é")], [as_node("a", tags={"a": 5})],
    [as_node("a", input_payload="x")],
    [as_node("a", delay_until=NAIVE)], [as_node("a", execution_kind="\0")],
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
SIGNAL = {
    "signal_name": by_field([None, "", "__x", *TEXTS]),
    "source_type": by_field([None, "", "system", *TEXTS]),
    "source_identity": by_field([None, *TEXTS]),
    "signal_category": by_field([None, *TEXTS]),
    "signal_id": by_field(UUIDS),
    "payload": by_field(BYTES),
    "payload_encoding": by_field([None, *TEXTS]),
    "correlation_id": by_field([5, b"x", "\0", "\ud800", "x" * 513]),
    "idempotency_key": by_field([5, b"x", "\0", "\ud800", "x" * 1101]),
    "target_scope": by_field([None, 5, "", "flow", []]),
    "dedup_ttl": by_field([None, 5, timedelta(-1), timedelta.max]),
    "resume_delay": by_field([5, timedelta(-1), timedelta.max]),
    "max_signals_per_execution": by_field([*INTS[1:5], 2**32]),
    "signal_maxlen": by_field(INTS),
}
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
    "timeout_at": by_field([*MOMENTS, timedelta.max]),
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
