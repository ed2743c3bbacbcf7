"""Random histories, played to the engine and to the model of the contract side by side.

Workers, senders of signals, operators, duties and the clock act on a few executions. After every step both sides must
have answered the same, and everything readable must be the same: state vectors, counters, leases, attempts, waitpoints,
suspensions, signals, events, what may be claimed and in which order. The database's own audit must find nothing.

The clock of this database stands still between steps, so that times are compared exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar, TypeVar
from uuid import NAMESPACE_OID, UUID, uuid5

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec import Struct

import flowfabric as ff
from flowfabric._postgres import rows, statements
from flowfabric.errors import Contention, StateError
from flowfabric.values.attempt import Claimed, Completion, Failure
from flowfabric.values.conditions import (
    OperatorOnly,
    TimeoutOnly,
    all_of,
    any_of,
    condition_to_json,
    count_signals,
    from_sources,
    on,
)
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.execution import Created, Duplicate, Execution, NewExecution
from flowfabric.values.grant import ClaimGrant
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Fence as EngineFence
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh, NewWaitpoint, ResumePolicy, Suspended, SuspensionDetails, UsePending
from flowfabric.values.worker import Serves
from tests import sampling
from tests.databases import fresh_database
from tests.ids import home, id_in
from tests.model import BLOCKS, OPERATOR, SUSPENDS, Fence, Model, New, Override, Refused, Worker, refused
from tests.support import WORKER, CheckedEngine, Clock, claim_one, started, submit

START = datetime(2030, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)
LANES = ("default", "side")
WORKERS = (
    Worker("pool", "pool-0", frozenset({"gpu", "cuda"})),
    Worker("pool", "pool-1"),
    Worker("pool", "pool-2", frozenset({"gpu"}), frozenset({"alpha", "beta"}), (2, 1), "new"),
    Worker("other", "other-1", frozenset({"gpu", "cuda"}), frozenset({"alpha"}), (1,), "old"),
)


def kinds_of(worker: Worker) -> Any:
    """What a worker of the model tells the engine that it serves."""
    if worker.kinds is None or worker.digest is None:
        return worker.kinds
    return {kind: Serves(versions=worker.versions, digest=worker.digest) for kind in worker.kinds}


SECRETS = ("ab" * 32, "cd" * 32)

_T = TypeVar("_T")


def ms(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - EPOCH) // MS


def moment(at: int) -> datetime:
    return EPOCH + at * MS


class World:
    """One database with a frozen clock, an engine on it, and a connection of the owner; shared by all histories."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.engine: ff.Engine
        self.sql: asyncpg.Connection[Any]

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    async def open(self, server: str) -> None:
        dsn = await self._stack.enter_async_context(fresh_database(server))
        # Compiling would take longer than all these small queries together.
        self.sql = await asyncpg.connect(dsn, server_settings={"jit": "off"})
        self._stack.push_async_callback(self.sql.close)
        await self.sql.execute(
            f"create or replace function flowfabric.now() returns timestamptz language sql volatile as"
            f" $$ select timestamptz '{START.isoformat()}' + shift from flowfabric.clock $$"
        )
        # No history is so long that events of this test would be dropped.
        await self.sql.execute("update flowfabric.deployment set event_retention = '3650 days'")
        self._tables = ", ".join(
            row["name"]
            for row in await self.sql.fetch(
                "select format('%I.%I', schemaname, tablename) as name from pg_tables where schemaname = 'flowfabric'"
                " and tablename not in ('schema_step', 'granted_role', 'deployment', 'clock', 'keystore', 'log_epoch')"
                " and tablename not like 'event\\_%'"
            )
        )
        self.engine = await self._stack.enter_async_context(
            await ff.Engine.connect(dsn, max_size=1, notifications=False)
        )

    async def reset(self) -> None:
        await self.sql.execute(f"truncate {self._tables} restart identity; update flowfabric.clock set shift = '0'")
        self.engine._services.clear()
        await self.sql.execute("select flowfabric.register_lanes($1)", list(LANES))
        await self.sql.execute("delete from flowfabric.keystore")
        await self.sql.execute("select flowfabric.seed_secret('k1', $1)", bytes.fromhex(SECRETS[0]))

    async def move_clock(self, by: int) -> None:
        await self.sql.execute("update flowfabric.clock set shift = shift + $1", by * MS)

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.close()


def spoken(answer: Any, like: Any = None) -> Any:
    """What the engine answered, in the words of the model; of a record, the facts that the model names."""
    match answer:
        case ff.FlowFabricError():
            facts = {
                "capability_mismatch": ["detail"], "execution_not_active": _NOT_ACTIVE, "not_found": ["entity"],
                "invalid_token": ["detail"], "invalid_input": ["problem"] if "problem" in (like or ()) else [],
            }.get(answer.kind, [])  # fmt: skip
            return refused(Refused(answer.kind, **{name: getattr(answer, name) for name in facts}))
        case Struct():
            named = [name for name in like or () if name != "answer"]
            return {"answer": type(answer).__name__} | {name: spoken(_fact(answer, name)) for name in named}
        case datetime():
            return ms(answer)
        case StrEnum():
            return answer.value
        case UUID():
            return str(answer)
        case list():
            likes = like if isinstance(like, list) and len(like) == len(answer) else [None] * len(answer)
            return [spoken(item, wanted) for item, wanted in zip(answer, likes, strict=True)]
        case _:
            return answer


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two values differ, one line each."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [line for key in keys for line in differences(found.get(key), expected.get(key), f"{where}.{key}")]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for place, pair in pairs for line in differences(*pair, f"{where}[{place}]")]
    # The model names executions by text, the engine by UUIDs.
    found, expected = (str(one) if isinstance(one, UUID) else one for one in (found, expected))
    return [] if found == expected else [f"{where}: engine {found!r}, model {expected!r}"]


def same(found: Any, expected: Any, what: str) -> None:
    assert not (lines := differences(found, expected, what)), "\n".join(lines)


def _fact(answer: Any, name: str) -> Any:
    """A field of a record, or of the handle in it; None where the record has no such field."""
    if name == "handle_kind":
        name = "kind"
    return (
        getattr(answer, name, None) if hasattr(answer, name) else getattr(getattr(answer, "handle", None), name, None)
    )


_NOT_ACTIVE = ["terminal_outcome", "lease_epoch", "lifecycle_phase", "attempt_id"]

# What is drawn

SECOND = 1000
priorities = st.sampled_from([0, 0, 5, 9, -3, 10_000])
retry_policies = st.sampled_from(
    [
        {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 10 * SECOND}},
        {"backoff": {"type": "exponential", "initial_delay_ms": 1500, "max_delay_ms": 5000, "multiplier": 3}},
        {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}, "retryable_categories": ["timeout", "network"]},
        {"max_retries": 0},
        {"backoff": {"type": "never heard of"}},
        {},
    ]
)
timeout_policies = st.sampled_from(
    [
        {"attempt_timeout_ms": 20 * SECOND},
        {"attempt_timeout_ms": 40 * SECOND, "execution_deadline_ms": 60 * SECOND},
        {"execution_deadline_ms": 20 * SECOND},
    ]
)


def seldom(*values: Any) -> st.SearchStrategy[Any]:
    """Mostly nothing."""
    return st.sampled_from([None] * 3 * len(values) + list(values))


def without_nones(drawn: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in drawn.items() if value is not None}


policies = st.none() | st.fixed_dictionaries(
    {
        "retry_policy": st.none() | retry_policies,
        "timeout_policy": st.none() | timeout_policies,
        "max_reclaim_count": st.sampled_from([None, 0, 1, 2]),
        "max_replay_count": st.sampled_from([None, None, 1, 2]),
        "routing_requirements": seldom(
            *({"required_capabilities": c} for c in (["gpu"], ["gpu"], ["cuda", "gpu"], ["nobody"], []))
        ),
        "dedup_window_ms": seldom(0, 60 * SECOND),
        "stream_policy": seldom({"retention_ttl_ms": 60 * SECOND}),
        "delay_until": seldom((START - EPOCH) // MS + 10 * SECOND),
        "suspension_policy": seldom(
            {"default_timeout_ms": 20 * SECOND},
            {"default_timeout_ms": 10 * SECOND, "timeout_behavior": "auto_resume_with_timeout_signal"},
        ),
        "max_signals_per_execution": seldom(0, 4),
    },
).map(without_nones)
submissions = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["alpha", "alpha", "beta"]),
        "priority": priorities,
        "policy": policies,
        "lane": seldom("side"),
        "namespace": seldom("ns"),
        "key": seldom("a", "b"),
        "delay": seldom(0, 10 * SECOND, -SECOND),
        "deadline": seldom(60 * SECOND, 20 * SECOND, 0, -SECOND),
        "again": seldom(0, 5, 6, 7, 8, 9),
    },
).map(without_nones)
picks = st.integers(0, 9)
workers = st.sampled_from(WORKERS)
ttls = st.sampled_from([30 * SECOND, 10 * SECOND])
grant_ttls = st.sampled_from([5 * SECOND, 60 * SECOND])
reasons = st.sampled_from(["tired", "boom"])
sources = st.sampled_from(["operator_override", "lease_holder", "flow_cascade", "system_timeout", "my scheduler"])
# The authority of a call: the current lease, an older one, a forged one, an operator's.
rights = st.tuples(
    st.sampled_from(["live", "live", "live", "fence", "old", "old", "forged", "operator", "source"]), picks
)
waiters = st.tuples(st.sampled_from(["live"] * 9 + ["fence", "fence", "old", "forged", "operator"]), picks)
failures = st.fixed_dictionaries(
    {"reason": reasons},
    optional={
        "failure_class": st.sampled_from(["transient", "permanent", "infra_crash", "timeout", "cancelled"]),
        "category": st.sampled_from(["network", "timeout", "permanent"]),
        "retry_policy": retry_policies,
    },
)
times = st.sampled_from(
    [1, SECOND, 5 * SECOND, 10 * SECOND, 20 * SECOND, 30 * SECOND, 60 * SECOND, 3600 * SECOND, 86_400 * SECOND]
)
optional_caps = st.none() | st.integers(0, 2)
# What is waited for; its keys become fresh waitpoints, in this order.
conditions = st.sampled_from(
    [
        (["a"], on("a")),
        (["a"], on("a", "go")),
        (["a"], from_sources(2, "a")),
        (["a"], count_signals(2, "a", name="go")),
        (["a"], all_of(on("a"), on("a", "go"))),
        (["b", "a"], all_of("a", "b")),
        (["a", "b", "c"], all_of("a", "b", "c")),
        (["a", "b"], any_of("a", "b")),
        (["c", "b", "a"], any_of("a", "b", "c", n=2)),
        (["a", "b"], from_sources(2, "a", "b", name="go")),
        (["a", "b", "c"], from_sources(3, "a", "b", "c")),
        (["a", "b"], all_of(on("a", "go"), from_sources(2, "b"))),
        (["a", "b", "c"], all_of(any_of("a", "b"), all_of(count_signals(2, "b", "c"), on("c", "go")))),
        (["a"], OperatorOnly()),
        (["a"], TimeoutOnly()),
        (["a"], all_of("a", OperatorOnly())),
    ]
)
# The same for a waitpoint that is pending already.
conditions_on = st.sampled_from(
    [
        on,
        on,
        lambda key: on(key, "go"),
        lambda key: from_sources(2, key),
        lambda key: count_signals(2, key),
        lambda key: any_of(key),
        lambda key: all_of(on(key), count_signals(2, key, name="go")),
        lambda key: OperatorOnly(),
        lambda key: on("another"),
    ]
)
waits = st.fixed_dictionaries(
    {
        "reason_code": st.sampled_from(["waiting_for_signal"] * 6 + sorted(SUSPENDS)),
        "timeout": st.sampled_from(
            [None] * 6 + [10 * SECOND, 20 * SECOND, 60 * SECOND] * 3 + [0, -SECOND, -601 * SECOND]
        ),
        "behavior": st.sampled_from(["fail", "cancel", "expire", "escalate", "auto_resume_with_timeout_signal"]),
        "delay": seldom(0, 10 * SECOND),
        "key": seldom("once"),
    }
)
waitpoint_keys = st.sampled_from(["a", "b"])
signals = st.fixed_dictionaries(
    {
        "signal_name": st.sampled_from(["go", "go", "stop"]),
        "source": st.sampled_from([("user", "ann"), ("user", "bob"), ("user", ""), ("bot", "ann")]),
        "payload": st.sampled_from([None, b"", b"\x00\xff"]),
        "key": seldom("once", "twice"),
        "dedup": st.sampled_from([86_400 * SECOND, 86_400 * SECOND, 5 * SECOND, 0]),
        "delay": seldom(0, 10 * SECOND),
        "most": seldom(2, 0),
        "maxlen": st.sampled_from([1000, 1, 0]),
    }
)


def _with_arguments(one: tuple[str, st.SearchStrategy[dict[str, Any]]]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(one[0]), one[1])


_STEPS: dict[str, list[tuple[str, st.SearchStrategy[dict[str, Any]]]]] = {}
_Step = TypeVar("_Step", bound=Callable[..., None])


def step(group: str, *, weight: int = 1, **arguments: st.SearchStrategy[Any]) -> Callable[[_Step], _Step]:
    """One kind of call; `weight` is how often it is made among the others of its group."""

    def register(method: _Step) -> _Step:
        _STEPS.setdefault(group, []).extend([(method.__name__, st.fixed_dictionaries(arguments))] * weight)
        return method

    return register


class Histories(RuleBasedStateMachine):
    """The engine and the model, step by step."""

    world: ClassVar[World]
    barred: ClassVar[set[str]] = set()  # which workers had to leave a stopped execution to others

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.run
        self.engine = self.world.engine
        self.run(self.world.reset())
        self.model = Model((START - EPOCH) // MS, LANES, secret=SECRETS[0])
        self.ids: list[ff.ExecutionId] = []
        self.handles: list[Handle] = []
        self.grants: list[tuple[Worker, ClaimGrant]] = []
        self.keys: dict[ff.ExecutionId, tuple[str, str | None]] = {}
        self.suspended: list[Handle] = []  # handles of suspensions
        self.tokens: dict[UUID, tuple[ff.ExecutionId, str]] = {}
        self.sent: list[UUID] = []
        self.made = 0
        self.timeouts: dict[UUID, str] = {}  # what the model calls the signals that the engine sends itself
        self.about_waits = False
        self.born = 0
        self.probe = 0
        self.disagreed = False
        # Programs that follow the log, stop and continue: where each is, and what it has seen.
        self.cursors = [EventCursor(), EventCursor()]
        self.seen: list[list[EventCursor]] = [[], []]

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Make a call: mostly one that the state allows, now and then any."""
        states = list(self.model.executions.values())
        worth = {"submit": 1 if len(states) < 8 else 0, "take": 1, "hold": 1, "signal": 0, "operate": 1, "time": 1}
        if any(e.place in "WXV" for e in states):
            worth["take"] = 3
        if any(e.place == "A" for e in states):
            worth |= {"hold": 1, "wait": 8} if self.about_waits else {"hold": 6, "wait": 2}
        if any(e.place in "XVTB" for e in states):
            worth["operate"] = 1 if self.about_waits else 2
        if any(e.place in "ADS" for e in states):
            worth["time"] = 2
        if any(self.model.signalable(e) for e in states):
            worth["signal"] = 9 if self.about_waits else 3
        elif self.tokens:
            worth["signal"] = 1
        groups = [group for group, times in worth.items() for _ in range(times)]
        group = data.draw(st.sampled_from(groups), label="who")
        name, arguments = data.draw(st.sampled_from(_STEPS[group]).flatmap(_with_arguments), label="does")
        getattr(self, name)(**arguments)

    # Playing one step on both sides

    def ask(self, call: Awaitable[Any]) -> Any:
        """The engine's answer, refusals included, as a value."""

        async def asked() -> Any:
            try:
                return await call
            except ff.FlowFabricError as error:
                return error

        answer = self.run(asked())
        for claimed in answer if isinstance(answer, list) else [answer]:
            if isinstance(claimed, Claimed):
                self.handles.append(claimed.handle)
        return answer

    def agree(self, answer: Any, expect: Callable[[], Any]) -> None:
        """The model's answer to the same call, which must be the same."""
        try:
            expected = expect()
        except Refused as error:
            expected = refused(error)
        heard = spoken(answer, expected)
        note(f"  -> {heard}" + (f" ({answer})" if isinstance(answer, ff.FlowFabricError) else ""))
        self.disagreed = True
        same(heard, expected, "answer")
        self.disagreed = False

    @staticmethod
    def minted(answer: Any) -> dict[str, tuple[UUID, UUID]]:
        items = answer if isinstance(answer, list) else [answer]
        return {str(c.execution_id): (c.handle.lease_id, c.handle.attempt_id) for c in items if isinstance(c, Claimed)}

    def target(self, pick: int) -> ff.ExecutionId:
        """One of the executions, the last ones first; now and then one that does not exist."""
        return self.ids[-1 - pick % len(self.ids)] if self.ids else id_in(1, UUID(int=1))

    def right(self, drawn: tuple[str, int]) -> tuple[Any, Fence | Override]:
        """An authority for the engine and for the model."""
        how, pick = drawn
        if how in ("operator", "source") or not self.handles:
            source = "operator_override" if how != "source" else "system_timeout"
            target = self.target(pick)
            return Operator(target, source), Override(str(target), source)
        pool = self.handles
        if how in ("live", "fence"):
            leases = {
                e.lease.lease_id for e in self.model.executions.values() if e.place == "A" and e.lease is not None
            }
            pool = [h for h in self.handles if h.lease_id in leases] or pool
        handle = pool[-1 - pick % len(pool)]
        fence = handle.fence
        if how == "forged":
            changes: list[dict[str, Any]] = [
                {"lease_id": UUID(int=7)}, {"lease_epoch": 99}, {"attempt_id": UUID(int=7)}, {"attempt_index": 99},
            ]  # fmt: skip
            fields = {name: getattr(fence, name) for name in fence.__struct_fields__}
            fence = EngineFence(**{**fields, **changes[pick % 4]})
        elif how == "fence":
            fence = EngineFence(
                execution_id=fence.execution_id, lease_id=fence.lease_id, lease_epoch=fence.lease_epoch,
                attempt_id=fence.attempt_id,
            )  # fmt: skip
        shown = Fence(str(fence.execution_id), fence.lease_id, fence.lease_epoch, fence.attempt_id, fence.attempt_index)
        return (handle if how in ("live", "old") else fence), shown

    def mint(self) -> UUID:
        """An id of the caller's making, the same whenever the history is played again."""
        self.made += 1
        return uuid5(NAMESPACE_OID, f"made {self.made}")

    def waitpoint(self, pick: int, *, of: ff.ExecutionId | None = None) -> tuple[ff.ExecutionId, UUID]:
        """One of the waitpoints, mostly one that can be signalled; of one execution if told."""
        known = [
            (e.id, w.waitpoint_id)
            for e in self.model.executions.values()
            if of is None or e.id == str(of)
            for w in (self.model.signalable(e) if pick < 8 else e.waitpoints.values())
        ]
        if not known:
            known = [(str(execution_id), one) for one, (execution_id, _) in self.tokens.items()][-3:]
        if not known:
            return self.target(pick), UUID(int=9)
        execution_id, waitpoint_id = known[-1 - pick % len(known)]
        return ff.ExecutionId(UUID(execution_id)), waitpoint_id

    # Submitting

    def _new(self, drawn: dict[str, Any], named: bool) -> tuple[NewExecution, New]:
        """One submission. With `named` it brings its own id, which is the same whenever the history is played again."""
        key, namespace = drawn.get("key"), drawn.get("namespace", "")
        self.born += 1
        uuid = uuid5(NAMESPACE_OID, str(self.born))
        execution_id = ff.ExecutionId(uuid)  # which may lie apart from its key
        again = drawn.get("again")
        if again is not None and again > 4 and self.ids:
            known = self.target(again)
            # The id of one that was purged is not used again: the log still tells of the first.
            if str(known) in self.model.executions and (key is None or self.keys.get(known) == (namespace, key)):
                execution_id = known
        given = named or again is not None
        delay, deadline = drawn.get("delay"), drawn.get("deadline")
        now = self.model.now
        item = NewExecution(
            execution_kind=drawn.get("kind", "alpha"),
            lane_id=drawn.get("lane", "default"),
            namespace=namespace,
            priority=drawn.get("priority", 0),
            idempotency_key=key,
            policy=drawn.get("policy"),
            delay_until=self._when(delay),
            execution_deadline_at=self._when(deadline),
            execution_id=execution_id if given else None,
        )
        new = New(
            execution_id=str(execution_id),
            uuid=execution_id,
            id_given=given,
            lane=item.lane_id,
            kind=item.execution_kind,
            namespace=namespace,
            priority=item.priority,
            key=key,
            policy=drawn.get("policy"),
            delay_until=None if delay is None else now + delay,
            deadline_at=None if deadline is None else now + deadline,
        )
        return item, new

    def _when(self, by: int | None) -> datetime | timedelta | None:
        """A moment as a caller gives it: what is past as a time, what comes as a duration."""
        return None if by is None else by * MS if by >= 0 else moment(self.model.now + by)

    def _submit(self, drawn: list[dict[str, Any]]) -> None:
        items = [self._new(one, named=len(drawn) > 1) for one in drawn]
        answer = self.ask(self.engine.create_many([item for item, _ in items]))
        made = [a.execution_id if isinstance(a, Created) else None for a in answer]
        for execution_id, (_, new) in zip(made, items, strict=True):
            if execution_id is not None:
                self.ids.append(execution_id)
                self.keys[execution_id] = (new.namespace, new.key)
        expected = [
            new if new.id_given or born is None else new._replace(execution_id=str(born), uuid=born)
            for (_, new), born in zip(items, made, strict=True)
        ]
        self.agree(answer, lambda: self.model.create_many(expected))

    @initialize(drawn=st.lists(submissions, min_size=3, max_size=5), about_waits=st.booleans())
    def begin(self, drawn: list[dict[str, Any]], about_waits: bool) -> None:
        """Some executions. Half of the histories are about suspensions and signals: they are leased already."""
        self._submit(drawn)
        self.about_waits = about_waits
        if about_waits:
            for lane in LANES:
                self.claim(lane, WORKERS[0], 60 * SECOND, 5)

    @step("submit", drawn=submissions)
    def create(self, drawn: dict[str, Any]) -> None:
        # Its id may be the engine's, so nothing else is made in this millisecond: ids decide between equals.
        self.pass_time(1)
        self._submit([drawn])
        self.pass_time(1)

    @step("submit", drawn=st.lists(submissions, min_size=2, max_size=4))
    def create_many(self, drawn: list[dict[str, Any]]) -> None:
        self._submit(drawn)

    # Claiming

    @step(
        "take", weight=2, lane=st.sampled_from(LANES), worker=workers, ttl=ttls, limit=st.sampled_from([1, 1, 1, 2, 5])
    )
    def claim(self, lane: str, worker: Worker, ttl: int, limit: int) -> None:
        if self.model.claim_wakes(lane, worker):
            return
        who = {"worker_id": worker.worker_id, "worker_instance_id": worker.worker_instance_id}
        answer = self.ask(
            self.engine.claim_many(
                lane, limit=limit, capabilities=worker.capabilities, kinds=kinds_of(worker), lease_ttl=ttl * MS, **who
            )
        )
        self.agree(answer, lambda: self.model.claim(lane, worker, ttl, limit, self.minted(answer)))

    @step("take", weight=4, worker=workers)
    def claim_anything(self, worker: Worker) -> None:
        self.claim("default", worker, 30 * SECOND, 5)

    @step("take", weight=2, pick=picks, worker=workers, ttl=grant_ttls)
    def issue_claim_grant(self, pick: int, worker: Worker, ttl: int) -> None:
        target = self.target(pick)
        answer = self.ask(
            self.engine.issue_claim_grant(
                target,
                worker_id=worker.worker_id,
                worker_instance_id=worker.worker_instance_id,
                worker_capabilities=worker.capabilities,
                grant_ttl=ttl * MS,
            )
        )
        if isinstance(answer, ClaimGrant):
            self.grants.append((worker, answer))
        self.agree(answer, lambda: self.model.issue_claim_grant(str(target), worker, ttl))

    def _granted(self, pick: int, worker: Worker) -> tuple[ff.ExecutionId, Worker]:
        """What to claim by grant: mostly something granted, mostly by the worker it was granted to."""
        if not self.grants or pick == 9:
            return self.target(pick), worker
        holder, grant = self.grants[-1 - pick % len(self.grants)]
        return grant.execution_id, worker if pick == 8 else holder

    @step(
        "take",
        weight=2,
        pick=picks,
        worker=workers,
        ttl=ttls,
        timeout=st.sampled_from([None, 20 * SECOND]),
        deadline=st.sampled_from([None, 60 * SECOND]),
    )
    def claim_execution(self, pick: int, worker: Worker, ttl: int, timeout: int | None, deadline: int | None) -> None:
        target, worker = self._granted(pick, worker)
        state = self.model.executions.get(str(target))
        call = "resumed" if state is not None and state.pending == "interrupted" and pick != 7 else "fresh"
        if self.handles and pick == 6:  # an answer was lost: the same ids again
            last = self.handles[-1]
            target, lease_id, attempt_id = last.execution_id, last.lease_id, last.attempt_id
            worker = next(w for w in (*WORKERS, OPERATOR) if w.worker_instance_id == last.worker_instance_id)
        else:
            lease_id, attempt_id = mint_uuid(), mint_uuid()
        self._claim_granted(call, target, worker, ttl, lease_id, attempt_id, timeout, deadline)

    def _claim_granted(
        self,
        call: str,
        target: ff.ExecutionId,
        worker: Worker,
        ttl: int,
        lease_id: UUID,
        attempt_id: UUID,
        timeout: int | None,
        deadline: int | None,
    ) -> None:
        who = {"worker_id": worker.worker_id, "worker_instance_id": worker.worker_instance_id}
        wait = None if timeout is None else timeout * MS
        until = None if deadline is None or call == "resumed" else self.model.now + deadline
        if call == "fresh":
            answer = self.ask(
                self.engine.claim_execution(
                    target,
                    lease_id=lease_id,
                    attempt_id=attempt_id,
                    lease_ttl=ttl * MS,
                    attempt_timeout=wait,
                    execution_deadline_at=None if until is None else moment(until),
                    **who,
                )
            )
        else:
            answer = self.ask(
                self.engine.claim_resumed_execution(
                    target, lease_id=lease_id, lease_ttl=ttl * MS, remaining_attempt_timeout=wait, **who
                )
            )
        self.agree(
            answer,
            lambda: self.model.claim_granted(
                call,
                str(target),
                worker,
                ttl,
                lease_id,
                attempt_id if call == "fresh" else None,
                self.minted(answer),
                timeout=timeout,
                deadline_at=until,
            ),
        )

    @step("take", pick=picks, ttl=ttls)
    def issue_grant_and_claim(self, pick: int, ttl: int) -> None:
        target = self.target(pick)
        answer = self.ask(self.engine.issue_grant_and_claim(target, lease_duration=ttl * MS))
        self.agree(
            answer,
            lambda: self.model.claim_granted("operator", str(target), OPERATOR, ttl, None, None, self.minted(answer)),
        )

    @step("take", weight=2, pick=picks, worker=workers, ttl=grant_ttls, cap=optional_caps)
    def issue_reclaim_grant(self, pick: int, worker: Worker, ttl: int, cap: int | None) -> None:
        lost = [e.id for e in self.model.executions.values() if e.place in "XV"]
        target = ff.ExecutionId(UUID(lost[pick % len(lost)])) if lost and pick < 7 else self.target(pick)
        answer = self.ask(
            self.engine.issue_reclaim_grant(
                target,
                worker_id=worker.worker_id,
                worker_instance_id=worker.worker_instance_id,
                worker_capabilities=worker.capabilities,
                grant_ttl=ttl * MS,
                max_reclaim_count=cap,
            )
        )
        if isinstance(answer, ClaimGrant):
            self.grants.append((worker, answer))
        self.agree(answer, lambda: self.model.issue_reclaim_grant(str(target), worker, ttl, cap))

    @step("take", weight=2, pick=picks, worker=workers, ttl=ttls, cap=optional_caps)
    def reclaim_execution(self, pick: int, worker: Worker, ttl: int, cap: int | None) -> None:
        target, worker = self._granted(pick, worker)
        lease_id, attempt_id = mint_uuid(), mint_uuid()
        answer = self.ask(
            self.engine.reclaim_execution(
                target,
                worker_id=worker.worker_id,
                worker_instance_id=worker.worker_instance_id,
                lease_id=lease_id,
                attempt_id=attempt_id,
                lease_ttl=ttl * MS,
                max_reclaim_count=cap,
            )
        )
        self.agree(answer, lambda: self.model.reclaim(str(target), worker, ttl, lease_id, attempt_id, cap))

    # Holding a lease

    @step("hold", drawn=rights, ttl=st.sampled_from([None, None, 5 * SECOND, 60 * SECOND]))
    def renew(self, drawn: tuple[str, int], ttl: int | None) -> None:
        self.renew_many([drawn], ttl)

    @step("hold", drawn=st.lists(rights, min_size=2, max_size=4), ttl=st.sampled_from([None, None, 5 * SECOND]))
    def renew_many(self, drawn: list[tuple[str, int]], ttl: int | None) -> None:
        shown = [self.right(one) for one in drawn]
        answer = self.ask(
            self.engine.renew_many([theirs for theirs, _ in shown], lease_ttl=None if ttl is None else ttl * MS)
        )
        own = [h.lease_ttl // MS if isinstance(h, Handle) else None for h, _ in shown]
        self.agree(answer, lambda: self.model.renew_many([ours for _, ours in shown], [ttl or mine for mine in own]))

    @step("hold", drawn=rights, percent=st.sampled_from([None, 0, 50]), message=st.sampled_from([None, "half way"]))
    def progress(self, drawn: tuple[str, int], percent: int | None, message: str | None) -> None:
        theirs, ours = self.right(drawn)
        answer = self.ask(self.engine.progress(theirs, percent=percent, message=message))
        self.agree(answer, lambda: self.model.progress(ours, percent, message))

    @step("hold", drawn=rights, result=st.sampled_from([None, b"", b"one"]))
    def complete(self, drawn: tuple[str, int], result: bytes | None) -> None:
        theirs, ours = self.right(drawn)
        answer = self.ask(self.engine.complete(theirs, result))
        self.agree([answer], lambda: self.model.complete_many([ours], [result], fence_only=False))

    @step("hold", drawn=st.lists(rights, min_size=2, max_size=4))
    def complete_many(self, drawn: list[tuple[str, int]]) -> None:
        shown = [self.right(one) for one in drawn]
        results = [str(place).encode() for place in range(len(shown))]
        answer = self.ask(
            self.engine.complete_many([Completion(shown[n][0], result) for n, result in enumerate(results)])
        )
        self.agree(answer, lambda: self.model.complete_many([ours for _, ours in shown], results))

    @staticmethod
    def _failure(drawn: dict[str, Any]) -> tuple[str, str, str, Any]:
        """Reason, class and category as the contract completes them."""
        category, kind = drawn.get("category"), drawn.get("failure_class")
        kind = kind or (category if category in ("timeout", "permanent") else "transient")
        return drawn["reason"], kind, category or kind, drawn.get("retry_policy")

    @step("hold", weight=3, drawn=rights, failure=failures)
    def fail(self, drawn: tuple[str, int], failure: dict[str, Any]) -> None:
        theirs, ours = self.right(drawn)
        given = dict(failure)
        answer = self.ask(self.engine.fail(theirs, given.pop("reason"), **given))
        self.agree([answer], lambda: self.model.fail_many([ours], [self._failure(failure)], fence_only=False))

    @step("hold", drawn=st.lists(st.tuples(rights, failures), min_size=2, max_size=4))
    def fail_many(self, drawn: list[tuple[tuple[str, int], dict[str, Any]]]) -> None:
        shown = [self.right(one) for one, _ in drawn]
        answer = self.ask(
            self.engine.fail_many(
                [Failure(authority=theirs, **failure) for (theirs, _), (_, failure) in zip(shown, drawn, strict=True)]
            )
        )
        self.agree(
            answer,
            lambda: self.model.fail_many([ours for _, ours in shown], [self._failure(one) for _, one in drawn]),
        )

    @step("hold", drawn=rights, by=st.sampled_from([10 * SECOND, 0, -SECOND, 60 * SECOND]))
    def delay(self, drawn: tuple[str, int], by: int) -> None:
        theirs, ours = self.right(drawn)
        until = self.model.now + by
        answer = self.ask(self.engine.delay(theirs, self._when(by)))
        self.agree(answer, lambda: self.model.pause("delay", ours, until))

    @step("hold", drawn=rights)
    def wait_children(self, drawn: tuple[str, int]) -> None:
        theirs, ours = self.right(drawn)
        answer = self.ask(self.engine.wait_children(theirs))
        self.agree(answer, lambda: self.model.pause("wait_children", ours))

    @step("hold", drawn=rights)
    def release(self, drawn: tuple[str, int]) -> None:
        theirs, ours = self.right(drawn)
        answer = self.ask(self.engine.release(theirs))
        self.agree(answer, lambda: self.model.pause("release", ours))

    @step("hold", weight=5, drawn=waiters, digest=st.sampled_from(["new", "new", "old", "third"]))
    def stop_changed(self, drawn: tuple[str, int], digest: str) -> None:
        theirs, ours = self.right(drawn)
        answer = self.ask(self.engine.stop_changed(theirs, detail="recorded: a", digest=digest))
        self.agree(answer, lambda: self.model.stop_changed(ours, digest))

    @step("hold", drawn=rights, reason=reasons, source=sources)
    def cancel(self, drawn: tuple[str, int], reason: str, source: str) -> None:
        theirs, ours = self.right(drawn)
        holder = isinstance(theirs, Handle)
        if holder:
            source = "lease_holder"
        answer = self.ask(self.engine.cancel(theirs, reason, source=source))
        self.agree(answer, lambda: self.model.cancel(ours, reason, source, by_handle=holder))

    @step(
        "wait",
        weight=2,
        drawn=waiters,
        until=st.sampled_from([None, None, None, 0, 10 * SECOND]),
        ends_of=st.lists(picks, max_size=2),
        seen=st.sampled_from([None, 0, 0, 1]),
    )
    def park(self, drawn: tuple[str, int], until: int | None, ends_of: list[int], seen: int | None) -> None:
        theirs, ours = self.right(drawn)
        children = list(dict.fromkeys(self.target(pick) for pick in ends_of))
        children = [child for child in children if str(child) != ours.execution_id]
        signals_on = {}
        e = self.model.executions.get(ours.execution_id)
        if seen is not None and e is not None and e.place == "A" and not e.pending_waitpoints:
            self.create_waitpoint(drawn, "a", 10 * SECOND, False)
        if seen is not None and e is not None and e.waitpoints:
            best = e.pending_waitpoints or list(e.waitpoints.values())
            signals_on[best[drawn[1] % len(best)].waitpoint_id] = seen
        if until is None and not children and not signals_on:
            until = 10 * SECOND
        suspension_id = self.mint()
        at = None if until is None else self.model.now + until
        answer = self.ask(
            self.engine.park(
                theirs,
                until=None if at is None else moment(at),
                ends_of=children,
                signals_on=signals_on,
                suspension_id=suspension_id,
            )
        )
        self.agree(
            answer, lambda: self.model.park(ours, at, [str(child) for child in children], signals_on, suspension_id)
        )

    # Waitpoints and suspensions, by who holds the lease

    @step(
        "wait",
        weight=2,
        drawn=waiters,
        key=waitpoint_keys,
        expires_in=st.sampled_from([60 * SECOND, 60 * SECOND, 10 * SECOND, 0]),
        outlives=st.booleans(),
    )
    def create_waitpoint(self, drawn: tuple[str, int], key: str, expires_in: int, outlives: bool) -> None:
        theirs, ours = self.right(drawn)
        answer = self.ask(self.engine.create_waitpoint(theirs, key, expires_in * MS, outlives_attempt=outlives))
        waitpoint_id = UUID(int=8)
        if isinstance(answer, NewWaitpoint):
            waitpoint_id = answer.waitpoint_id
            self.tokens[waitpoint_id] = (ff.ExecutionId(UUID(ours.execution_id)), answer.token.reveal())
        self.agree(
            answer,
            lambda: self.model.create_waitpoint(ours, waitpoint_id, key, expires_in, outlives_attempt=outlives),
        )

    @step("wait", drawn=waiters, pick=picks)
    def close_waitpoint(self, drawn: tuple[str, int], pick: int) -> None:
        theirs, ours = self.right(drawn)
        own = None if pick == 9 else ff.ExecutionId(UUID(ours.execution_id))
        waitpoint_id = self.waitpoint(pick, of=own)[1]
        answer = self.ask(self.engine.close_waitpoint(theirs, waitpoint_id, "no use"))
        self.agree(answer, lambda: self.model.close_waitpoint(ours, waitpoint_id, "no use"))

    @step("wait", weight=5, drawn=waiters, condition=conditions, wait=waits, reuse=seldom(0, 1))
    def suspend(self, drawn: tuple[str, int], condition: Any, wait: dict[str, Any], reuse: int | None) -> None:
        theirs, ours = self.right(drawn)
        keys, wanted = condition
        bindings: list[Fresh | UsePending] = [Fresh(self.mint(), key) for key in keys]
        e = self.model.executions.get(ours.execution_id)
        if reuse is not None and e is not None and e.waitpoints:  # an id that is known already
            bindings[reuse % len(keys)] = Fresh([*e.waitpoints][-1], keys[reuse % len(keys)])
        self._suspend(theirs, ours, bindings, wanted, wait)

    @step("wait", weight=3, drawn=waiters, pick=picks, condition=conditions_on, wait=waits)
    def suspend_on_pending(self, drawn: tuple[str, int], pick: int, condition: Any, wait: dict[str, Any]) -> None:
        theirs, ours = self.right(drawn)
        owner, waitpoint_id = self.waitpoint(pick, of=None if pick == 9 else ff.ExecutionId(UUID(ours.execution_id)))
        if drawn[0] == "live" and pick < 8:
            # Who has made a waitpoint, best one that was signalled already; who has none makes one.
            able = [
                (h, w)
                for h in self.handles
                if (e := self.model.executions.get(str(h.execution_id))) is not None
                and e.place == "A"
                and e.lease is not None
                and e.lease.lease_id == h.lease_id
                for w in e.pending_waitpoints
            ]
            if not able:
                self.create_waitpoint(drawn, "a", 60 * SECOND, False)
                return
            able.sort(key=lambda one: one[1].signal_count)
            theirs, made = able[-1 - pick // 3 % len(able)]
            owner, waitpoint_id = theirs.execution_id, made.waitpoint_id
            fence = theirs.fence
            ours = Fence(str(owner), fence.lease_id, fence.lease_epoch, fence.attempt_id, fence.attempt_index)
        e = self.model.executions.get(str(owner))
        known = None if e is None else e.waitpoints.get(waitpoint_id)
        key = "a" if known is None else known.waitpoint_key
        self._suspend(theirs, ours, [UsePending(waitpoint_id)], condition(key), wait)

    @step(
        "wait",
        weight=2,
        pick=picks,
        key=waitpoint_keys,
        outlives=st.booleans(),
        arriving=st.lists(signals, min_size=1, max_size=3),
        condition=conditions_on,
        wait=waits,
    )
    def be_answered_first(
        self, pick: int, key: str, outlives: bool, arriving: list[Any], condition: Any, wait: dict[str, Any]
    ) -> None:
        """What is waited for arrives before it is waited for."""
        self.create_waitpoint(("live", pick), key, 60 * SECOND, outlives)
        target = ff.ExecutionId(UUID(self.right(("live", pick))[1].execution_id))
        e = self.model.executions.get(str(target))
        if e is not None and e.place == "A" and e.pending_waitpoints:
            waitpoint_id = e.pending_waitpoints[-1].waitpoint_id
            for drawn in arriving:
                self._deliver(target, waitpoint_id, self.tokens[waitpoint_id][1], "genuine", None, drawn)
            self.suspend_on_pending(("live", pick), 0, condition, wait)

    def _suspend(
        self, theirs: Any, ours: Fence | Override, bindings: list[Fresh | UsePending], wanted: Any, wait: dict[str, Any]
    ) -> None:
        suspension_id, timeout, delay = self.mint(), wait["timeout"], wait["delay"]
        if isinstance(wanted, TimeoutOnly) and timeout is None:
            timeout = 10 * SECOND
        timeout_at = None if timeout is None else self.model.now + timeout
        call = self.engine.suspend_by_triple if isinstance(theirs, EngineFence) else self.engine.suspend
        answer = self.ask(
            call(
                theirs,
                waitpoints=bindings,
                resume_condition=wanted,
                suspension_id=suspension_id,
                resume_policy=None if delay is None else ResumePolicy(resume_delay=delay * MS),
                reason_code=wait["reason_code"],
                timeout_at=None if timeout_at is None else moment(timeout_at),
                timeout_behavior=wait["behavior"],
                idempotency_key=wait["key"],
            )
        )
        self.agree(
            self._told(answer),
            lambda: self.model.suspend(
                ours,
                suspension_id,
                [(one.waitpoint_id, one.waitpoint_key if isinstance(one, Fresh) else None) for one in bindings],
                condition_to_json(wanted),
                by_triple=isinstance(theirs, EngineFence),
                reason=wait["reason_code"],
                timeout_at=timeout_at,
                behavior=wait["behavior"],
                delay=delay,
                key=wait["key"],
            ),
        )
        if isinstance(getattr(answer, "details", None), SuspensionDetails):
            self._learn(ff.ExecutionId(UUID(ours.execution_id)), answer.details)
        if isinstance(answer, Suspended):
            self.suspended.append(answer.handle)

    @staticmethod
    def _told(answer: Any) -> Any:
        """What a suspend answered, in the words of the model."""
        if not isinstance(getattr(answer, "details", None), SuspensionDetails):
            return answer
        details = answer.details
        told = {
            "answer": type(answer).__name__,
            "suspension_id": details.suspension_id,
            "waitpoint_ids": [details.waitpoint_id, *(one.waitpoint_id for one in details.additional_waitpoints)],
            "waitpoint_keys": [details.waitpoint_key, *(one.waitpoint_key for one in details.additional_waitpoints)],
        }
        if isinstance(answer, Suspended):
            handle = answer.handle
            told["handle"] = (
                handle.kind.value, handle.attempt_index, handle.lease_id, handle.lease_epoch, handle.attempt_id,
            )  # fmt: skip
        return told

    def _learn(self, execution_id: ff.ExecutionId, details: SuspensionDetails) -> None:
        """Remember the tokens; one that is known must be the same, unless its key is erased."""
        given = [(details.waitpoint_id, details.waitpoint_token)]
        given += [(one.waitpoint_id, one.waitpoint_token) for one in details.additional_waitpoints]
        for waitpoint_id, token in given:
            waitpoint = self.model.executions[str(execution_id)].waitpoints[waitpoint_id]
            text = token.reveal()
            if waitpoint_id in self.tokens:
                is_erased = self.model.kids[waitpoint.token_kid].state == "retired"
                assert text == ("" if is_erased else self.tokens[waitpoint_id][1])
            else:
                assert token.kid == waitpoint.token_kid
                self.tokens[waitpoint_id] = (execution_id, text)

    @step("wait", pick=picks, call=st.sampled_from(["renew", "complete", "create_waitpoint", "park", "suspend"]))
    def use_a_suspended_handle(self, pick: int, call: str) -> None:
        if not self.suspended:
            return
        handle = self.suspended[-1 - pick % len(self.suspended)]
        arguments: dict[str, dict[str, Any]] = {
            "create_waitpoint": {"waitpoint_key": "a", "expires_in": SECOND * MS},
            "park": {"until": moment(self.model.now)},
            "suspend": {"waitpoints": [Fresh(self.mint(), "a")], "resume_condition": on("a")},
        }
        answer = self.ask(getattr(self.engine, call)(handle, **arguments.get(call, {})))
        kind = "already_suspended" if call == "suspend" else "stale_lease"
        self.agree(answer, lambda: refused(Refused(kind)))

    # Signalling

    @step(
        "signal",
        weight=6,
        pick=picks,
        shown=st.sampled_from(["own"] * 12 + ["another's", "changed", "none", "nonsense"]),
        again=seldom(0, 1),
        drawn=signals,
    )
    def deliver_signal(self, pick: int, shown: str, again: int | None, drawn: dict[str, Any]) -> None:
        target, waitpoint_id = self.waitpoint(pick)
        own = self.tokens[waitpoint_id][1] if waitpoint_id in self.tokens else "k1:" + "0" * 64
        others = [text for one, (_, text) in self.tokens.items() if one != waitpoint_id] or ["k1:" + "1" * 64]
        token = {
            "own": own,
            "another's": others[pick % len(others)],
            "changed": own[:-1] + ("1" if own.endswith("0") else "0"),
            "none": "",
            "nonsense": "k1",
        }[shown]
        how = {"own": "genuine", "none": "missing"}.get(shown, "wrong")
        if pick == 7 and self.ids and self.target(0) != target:
            target, how = self.target(0), "missing" if shown == "none" else "wrong"
        self._deliver(target, waitpoint_id, token, how, again, drawn)

    def _deliver(
        self,
        target: ff.ExecutionId,
        waitpoint_id: UUID,
        token: str,
        how: str,
        again: int | None,
        drawn: dict[str, Any],
    ) -> None:
        """`how` is what the token is: genuine, wrong or missing."""
        signal_id = self.sent[-1 - again % len(self.sent)] if again is not None and self.sent else self.mint()
        self.sent.append(signal_id)
        name, source, payload, key = drawn["signal_name"], drawn["source"], drawn["payload"], drawn["key"]
        dedup, delay, most, maxlen = drawn["dedup"], drawn["delay"], drawn["most"], drawn["maxlen"]
        answer = self.ask(
            self.engine.deliver_signal(
                target,
                waitpoint_id,
                token,
                signal_id=signal_id,
                signal_name=name,
                source_type=source[0],
                source_identity=source[1],
                payload=payload,
                idempotency_key=key,
                dedup_ttl=dedup * MS,
                resume_delay=None if delay is None else delay * MS,
                max_signals_per_execution=most,
                signal_maxlen=maxlen,
            )
        )
        self.agree(
            answer,
            lambda: self.model.deliver(
                str(target), waitpoint_id, signal_id, name, source, token=how, payload=payload, key=key, dedup=dedup,
                delay=delay, most=most, maxlen=maxlen,
            ),
        )  # fmt: skip

    @step(
        "signal",
        weight=2,
        pick=picks,
        name=st.sampled_from(["go", "stop"]),
        suffix=st.sampled_from(["1", "2"]),
        who=st.sampled_from(["ann", "bob", ""]),
        lane=seldom("side", "default"),
    )
    def deliver_approval_signal(self, pick: int, name: str, suffix: str, who: str, lane: str | None) -> None:
        target, waitpoint_id = self.waitpoint(pick)
        e = self.model.executions.get(str(target))
        lane = lane or ("default" if e is None else e.new.lane)
        answer = self.ask(
            self.engine.deliver_approval_signal(
                target, lane, waitpoint_id, signal_name=name, idempotency_suffix=suffix, source_identity=who
            )
        )
        minted = getattr(answer, "signal_id", UUID(int=5))
        self.agree(
            answer,
            lambda: self.model.deliver(
                str(target), waitpoint_id, minted, name, ("operator", who), token=None, lane=lane,
                category="approval", scope="execution", key=f"approval:{name}:{suffix}",
            ),
        )  # fmt: skip

    @step(
        "signal",
        weight=2,
        pick=picks,
        trigger=st.sampled_from(["signal", "operator", "auto_resume"]),
        delay=st.sampled_from([0, 0, 10 * SECOND]),
    )
    def resume_execution(self, pick: int, trigger: Any, delay: int) -> None:
        held = [e.id for e in self.model.executions.values() if e.place == "S"]
        target = ff.ExecutionId(UUID(held[pick % len(held)])) if held and pick < 8 else self.target(pick)
        answer = self.ask(self.engine.resume_execution(target, trigger, delay * MS))
        self.agree(answer, lambda: self.model.resume_execution(str(target), trigger, delay))

    @step("signal", weight=2, pick=picks)
    def observe_signals(self, pick: int) -> None:
        pool = self.handles + self.suspended
        if not pool:
            return
        handle = pool[-1 - pick % len(pool)]
        answer = self.ask(self.engine.observe_signals(handle))
        heard = [self.timeouts.get(one.signal_id, one.signal_id) for one in answer]
        self.agree(heard, lambda: self.model.observe(str(handle.execution_id), handle.attempt_index))

    @step(
        "signal",
        kid=st.sampled_from(["k1", "k2", "k3", "k4"]),
        secret=st.sampled_from(SECRETS),
        grace=st.sampled_from([0, 5 * SECOND, 20 * SECOND]),
    )
    def rotate(self, kid: str, secret: str, grace: int) -> None:
        answer = self.ask(self.engine.rotate_waitpoint_hmac_secret_all(kid, secret, grace * MS))
        self.agree(answer[0].result, lambda: self.model.rotate(kid, secret, grace))
        kids = self.ask(self.engine.list_waitpoint_hmac_kids())
        same([(one.kid, ms(one.expires_at)) for one in kids.verifying], self.model.verifying(), "verifying")

    @step("signal", pick=picks)
    def read_waits(self, pick: int) -> None:
        """The lists that people and tools read."""
        target, waitpoint_id = self.waitpoint(pick)
        e = self.model.executions.get(str(target))
        listed = self.ask(self.engine.list_pending_waitpoints(target))
        if e is None:
            assert isinstance(listed, ff.NotFound)
        else:
            found = [(w.waitpoint_id, w.state, list(w.required_signal_names), w.token_kid) for w in listed.items]
            wanted = self.model.signalable(e)
            same(
                found,
                [(w.waitpoint_id, w.state, w.required_signal_names, w.token_kid) for w in wanted],
                "pending waitpoints",
            )
            token = self.ask(self.engine.read_waitpoint_token(home(target), waitpoint_id))
            own = next((w for w in wanted if w.waitpoint_id == waitpoint_id), None)
            is_known = own is not None and self.model.kids[own.token_kid].state != "retired"
            same(None if token is None else token.reveal(), self.tokens[waitpoint_id][1] if is_known else None, "token")
        states = self.model.executions.values()
        page = self.ask(self.engine.list_suspended(home(target)))
        same(
            [(ms(one.suspended_at), str(one.execution_id), one.reason, ms(one.timeout_at)) for one in page.items],
            sorted(
                (s.suspended_at, e.id, s.reason_code, s.timeout_at)
                for e in states
                if (s := e.suspension) is not None and home(UUID(e.id)) == home(target)
            ),
            "suspended",
        )
        page = self.ask(self.engine.list_waits())
        same(
            [(ms(one.since), one.waitpoint_id, one.state, one.signal_count) for one in page.items],
            sorted(
                (w.created_at, w.waitpoint_id, w.state, w.signal_count)
                for e in states
                for w in self.model.signalable(e)
            ),
            "waits",
        )

    # Operating

    @step(
        "operate",
        weight=2,
        pick=picks,
        lease=st.sampled_from(["any", "any", "own", "other"]),
        instance=st.sampled_from([None, None, "pool-1"]),
    )
    def revoke_lease(self, pick: int, lease: str, instance: str | None) -> None:
        active = [e.id for e in self.model.executions.values() if e.place == "A"]
        target = ff.ExecutionId(UUID(active[pick % len(active)])) if active and pick < 8 else self.target(pick)
        state = self.model.executions.get(str(target))
        expected = UUID(int=7) if lease == "other" else None
        if lease == "own" and state is not None and state.lease is not None:
            expected = state.lease.lease_id
        answer = self.ask(
            self.engine.revoke_lease(target, reason="why not", expected_lease_id=expected, worker_instance_id=instance)
        )
        self.agree(answer, lambda: self.model.revoke(str(target), "why not", expected, instance))

    @step("operate", weight=3, pick=picks, reason=st.sampled_from([None, "again"]), by=st.sampled_from([None, "me"]))
    def replay_execution(self, pick: int, reason: str | None, by: str | None) -> None:
        ended = [e.id for e in self.model.executions.values() if e.place == "T"]
        target = ff.ExecutionId(UUID(ended[pick % len(ended)])) if ended and pick < 8 else self.target(pick)
        answer = self.ask(self.engine.replay_execution(target, reason=reason, requested_by=by))
        self.agree(answer, lambda: self.model.replay(str(target), reason, by))

    @step("operate", pick=picks, priority=priorities)
    def change_priority(self, pick: int, priority: int) -> None:
        target = self.target(pick)
        answer = self.ask(self.engine.change_priority(target, priority))
        self.agree(answer, lambda: self.model.change_priority(str(target), priority))

    @step("operate", pick=picks, reason=st.sampled_from(sorted(BLOCKS)))
    def block(self, pick: int, reason: str) -> None:
        target = self.target(pick)
        answer = self.ask(self.engine.block_execution_for_admission(target, reason))
        self.agree(answer, lambda: self.model.block(str(target), reason))

    @step("operate", pick=picks, expected=st.sampled_from([None, "its own", "its own", *sorted(BLOCKS)]))
    def unblock(self, pick: int, expected: str | None) -> None:
        held = [e.id for e in self.model.executions.values() if e.place == "B"]
        target = ff.ExecutionId(UUID(held[pick % len(held)])) if held and pick < 8 else self.target(pick)
        if expected == "its own":
            state = self.model.executions.get(str(target))
            expected = None if state is None else state.blocked_for
        answer = self.ask(self.engine.unblock_execution(target, expected_blocking_reason=expected))
        self.agree(answer, lambda: self.model.unblock(str(target), expected))

    @step(
        "operate",
        lane=st.sampled_from(LANES),
        state=st.sampled_from(["active", "active", "paused", "draining", "disabled"]),
    )
    def set_lane_state(self, lane: str, state: str) -> None:
        answer = self.ask(self.engine.set_lane_state(lane, state))
        self.agree(answer, lambda: self.model.set_lane_state(lane, state))

    # Time and duties

    @step("time", by=times)
    def pass_time(self, by: int) -> None:
        self.run(self.world.move_clock(by))
        self.model.now += by

    @step(
        "time",
        weight=6,
        nth=st.sampled_from([0, 0, 1, 2]),
        late=st.sampled_from([0, 0, 1, 5 * SECOND]),
        run=st.booleans(),
    )
    def reach_the_next_timer(self, nth: int, late: int, run: bool) -> None:
        coming = [
            (at, kind)
            for e in self.model.executions.values()
            for kind in ("lease", "attempt", "deadline", "delay", "suspension", "waitpoint")
            if (at := self.model.due_at(kind, e)) is not None and at > self.model.now
        ]
        if coming:
            at, kind = sorted(coming)[nth % len(coming)]
            self.pass_time(at + late - self.model.now)
            if run:
                self.run_timers(kind)

    @step(
        "time",
        weight=4,
        kind=st.sampled_from(
            ["lease", "attempt", "deadline", "delay", "delay", "suspension", "suspension", "waitpoint", "retention"]
        ),
    )
    def run_timers(self, kind: str) -> None:
        answer = self.ask(self.engine.run_timers(kind, limit=1000))
        assert not isinstance(answer, ff.FlowFabricError), answer
        assert (answer.failed, answer.more) == (0, False), answer
        # Of waitpoints the timers are counted, not what they found.
        self.agree(0 if kind == "waitpoint" else answer.handled, lambda: self._handled(kind))

    def _handled(self, kind: str) -> int:
        handled = self.model.run_timers(kind)
        return 0 if kind == "waitpoint" else handled

    @step("time", weight=4, pick=picks, late=st.sampled_from([0, 0, 1, -1]), how=st.sampled_from(["duty", "one", "no"]))
    def pass_the_deadline_of_a_wait(self, pick: int, late: int, how: str) -> None:
        """The time of one suspension or pending waitpoint comes, whatever else comes before."""
        coming = [
            (at, kind, e)
            for e in self.model.executions.values()
            for kind in ("suspension", "waitpoint")
            if (at := self.model.due_at(kind, e)) is not None
        ]
        if not coming:
            return
        at, kind, e = coming[-1 - pick % len(coming)]
        self.pass_time(max(at + late - self.model.now, 0))
        if how == "duty":
            self.run_timers(kind)
        elif how == "one" and kind == "suspension":
            self._expire_suspension(ff.ExecutionId(UUID(e.id)))
        elif how == "one":
            self._expire_waitpoint(ff.ExecutionId(UUID(e.id)), e.pending_waitpoints[0].waitpoint_id)

    @step("time", pick=picks)
    def expire_suspension(self, pick: int) -> None:
        held = [e.id for e in self.model.executions.values() if e.place == "S"]
        target = ff.ExecutionId(UUID(held[pick % len(held)])) if held and pick < 8 else self.target(pick)
        self._expire_suspension(target)

    def _expire_suspension(self, target: ff.ExecutionId) -> None:
        answer = self.ask(self.engine.expire_suspension(target))
        self.agree(answer, lambda: self.model.expire_suspension(str(target)))

    @step("time", pick=picks)
    def expire_waitpoint(self, pick: int) -> None:
        known = [(e.id, w.waitpoint_id) for e in self.model.executions.values() for w in e.pending_waitpoints]
        target, waitpoint_id = self.waitpoint(pick)
        if known and pick < 8:
            target, waitpoint_id = ff.ExecutionId(UUID(known[pick % len(known)][0])), known[pick % len(known)][1]
        self._expire_waitpoint(target, waitpoint_id)

    def _expire_waitpoint(self, target: ff.ExecutionId, waitpoint_id: UUID) -> None:
        answer = self.ask(self.engine.expire_waitpoint(target, waitpoint_id))
        self.agree(answer, lambda: self.model.expire_waitpoint(str(target), waitpoint_id))

    @step("time", pick=picks)
    def mark_lease_expired(self, pick: int) -> None:
        target = self.target(pick)
        answer = self.ask(self.engine.mark_lease_expired_if_due(target))
        self.agree(answer, lambda: self.model.mark_lease_expired(str(target)))

    @step("time", pick=picks)
    def promote_delayed(self, pick: int) -> None:
        target = self.target(pick)
        answer = self.ask(self.engine.promote_delayed(target))
        self.agree(answer, lambda: self.model.promote(str(target)))

    @step("time", pick=picks, phase=st.sampled_from(["attempt_timeout", "execution_deadline"]))
    def expire_execution(self, pick: int, phase: str) -> None:
        target = self.target(pick)
        answer = self.ask(self.engine.expire_execution(target, phase))
        self.agree(answer, lambda: self.model.expire(str(target), phase))

    @step("time")
    def sweep(self) -> None:
        self.ask(self.engine.sweep())
        self.model.sweep()

    @step("time", who=st.integers(0, 1), count=st.integers(1, 5))
    def follow(self, who: int, count: int) -> None:
        """A program begins with the cursor it has stored, acts on some events, and stops."""
        self.run(self._follow(who, count))

    async def _follow(self, who: int, count: int) -> None:
        families: Any = (None, ("completion", "signal"))[who]
        async with await self.engine.follow(families, after=self.cursors[who], heartbeats=True) as events:
            for _ in range(min(count, events.waiting)):
                event = await anext(events)
                assert isinstance(event, Event)
                self.seen[who].append(event.cursor)
                self.cursors[who] = event.cursor

    # What must be the same after every step

    @invariant()
    def everything_is_the_same(self) -> None:
        self.disagreed = True
        self.run(self._compare())
        self.disagreed = False

    async def _compare(self) -> None:
        sql, model = self.world.sql, self.model
        same(await self.engine.audit(events=True), [], "audit")
        executions = await sql.fetch(
            "select v.*, r.result from flowfabric.execution e"
            " cross join lateral flowfabric.read_executions(array[e.partition], array[e.id]) v"
            " left join lateral flowfabric.read_result(e.partition, e.id) r on true"
        )
        stored = {}
        for row in executions:
            seen = rows.execution(row)
            stored[str(seen.execution_id)] = {**view(seen), "result": row["result"]}
        same(stored, {e.id: expected_view(e, model.held_by(e)) for e in model.executions.values()}, "execution")

        attempts: dict[str, list[dict[str, Any]]] = {e: [] for e in model.executions}
        for row in await sql.fetch(
            "select e.partition as home, e.id as of, a.* from flowfabric.execution e"
            " cross join lateral flowfabric.list_attempts(e.partition, e.id, -1, null) a order by a.attempt_index"
        ):
            attempt = rows.attempt(row)
            attempts[str(row["of"])].append(
                {
                    name: spoken(getattr(attempt, name))
                    for name in attempt.__struct_fields__
                    if name != "policy_snapshot"
                }
            )
        same(attempts, {e.id: [vars(a) for a in e.attempts] for e in model.executions.values()}, "attempts")

        await self._compare_waits()

        logs: dict[str, dict[str, list[tuple[Any, ...]]]] = {
            e: {"lease": [], "completion": [], "operator": [], "signal": []} for e in model.logs
        }
        for row in await sql.fetch(
            f"select {statements.EVENT} from (select e.*, w.worker_id, w.worker_instance_id, r.lane, r.kind,"
            " null as log_epoch from flowfabric.event e left join flowfabric.worker w on w.id = e.worker"
            " left join flowfabric.route r on r.id = e.route) e order by seq"
        ):
            sort_event(logs, row)
        same(logs, {e: vars(log) for e, log in model.logs.items()}, "events")

        for lane in LANES:
            same(spoken(await self.engine.scan_eligible_executions(lane)), model.eligible(lane), "eligible")
        # What a worker would get, found out by claiming it all and taking it back.
        self.probe += 1
        worker = WORKERS[self.probe % 4]
        lane = LANES[self.probe // 4 % 2]
        transaction = sql.transaction()
        await transaction.start()
        try:
            taken = await sql.fetch(
                "select partition, id from flowfabric.claim($1, ($2::text[])::text, $3, 'probe', 'probe', 1000, 1000,"
                " null, null, case when $5::text[] is not null then flowfabric.register_service($2, $4, $5, $3) end,"
                " true, null, false)",
                lane,
                *_columns(worker),
            )
        finally:
            await transaction.rollback()
        found = [str(row["id"]) for row in taken]
        wanted = [e.id for e in model.claimable(lane, worker) if not (e.place in "XV" and model.is_capped(e))]
        if not model.claim_wakes(lane, worker):
            same(found, wanted, "claimable")
            open_to_all = worker._replace(digest="no other has it")
            if len(model.claimable(lane, open_to_all)) > len(model.claimable(lane, worker)):
                self.barred.add(worker.worker_instance_id)

    async def _compare_waits(self) -> None:
        """Waitpoints, suspensions and signals as they are stored."""
        sql, executions = self.world.sql, self.model.executions
        signals: dict[str, list[dict[str, Any]]] = {e: [] for e in executions}
        for row in await sql.fetch("select * from flowfabric.signal order by ordinal"):
            if row["source_type"] == "system":
                self.timeouts[row["signal_id"]] = f"timeout {row['suspension_id']}"
            found = {name: spoken(row[name]) for name in _SIGNAL if name in _IDENTITY or not row["is_dropped"]}
            found["signal_id"] = self._name(row["signal_id"])
            signals[owner(row)].append(found)
        same(
            signals,
            {
                e.id: [
                    {name: getattr(g, name) for name in _SIGNAL if name in _IDENTITY or not g.is_dropped}
                    for g in e.signals
                ]
                for e in executions.values()
            },
            "signals",
        )
        waitpoints: dict[str, dict[UUID, dict[str, Any]]] = {e: {} for e in executions}
        for row in await sql.fetch("select * from flowfabric.waitpoint"):
            waitpoints[owner(row)][row["waitpoint_id"]] = {
                name: spoken(row[name]) for name in dict(row) if name not in _NOT_OF_A_WAITPOINT
            }
        same(
            waitpoints,
            {e.id: {one: vars(w) for one, w in e.waitpoints.items()} for e in executions.values()},
            "waitpoints",
        )
        suspensions: dict[str, list[dict[str, Any]]] = {e: [] for e in executions}
        for row in await sql.fetch("select * from flowfabric.suspension order by number"):
            found = {name: spoken(row[name]) for name in _SUSPENSION}
            found["resume_condition"] = rows.decode_json(row["resume_condition"])
            found["closer_signal_id"] = self._name(row["closer_signal_id"])
            found["satisfier_signal_ids"] = [self._name(one) for one in row["satisfier_signal_ids"] or ()]
            suspensions[owner(row)].append(found)
        same(
            suspensions,
            {
                e.id: [{name: getattr(s, name) for name in _SUSPENSION} for s in e.suspensions]
                for e in executions.values()
            },
            "suspensions",
        )

    def _name(self, signal_id: UUID | None) -> UUID | str | None:
        return None if signal_id is None else self.timeouts.get(signal_id, signal_id)

    def teardown(self) -> None:
        """The log as readers get it holds the same events."""
        if not self.disagreed:  # else there is something better to report
            self.run(self._compare_log())

    async def _compare_log(self) -> None:
        for family in ("lease", "completion", "operator", "signal"):
            expected = {e: len(getattr(log, family)) for e, log in self.model.logs.items()}
            for _ in range(500):
                # Events show once every transaction that may write earlier ones has ended.
                found = await self.engine.read_events(family=family, limit=10_000)
                if len(found.items) >= sum(expected.values()):
                    break
                await asyncio.sleep(0.02)
            counted = dict.fromkeys(expected, 0)
            for event in found.items:
                counted[str(event.execution_id)] += 1
            same(counted, expected, f"{family} events")
        for who, families in enumerate((None, ("completion", "signal"))):
            await self._follow(who, 10_000)
            found = await self.engine.read_events(family=families, limit=10_000)
            same(self.seen[who], [event.cursor for event in found.items][: len(self.seen[who])], "followed events")
            assert len(self.seen[who]) >= min(len(found.items), 256)


def sort_event(logs: dict[str, dict[str, list[tuple[Any, ...]]]], row: asyncpg.Record) -> None:
    """Put one stored event into the families it belongs to."""
    event = rows.event(row, 0)
    at = ms(event.occurred_at)
    log = logs[str(event.execution_id)]
    if event.lease_type is not None:
        log["lease"].append(
            (
                event.lease_type,
                event.lease_id,
                event.lease_epoch,
                event.attempt_id,
                event.attempt_index,
                event.worker_id,
                event.worker_instance_id,
                event.reason,
                event.revoked_by,
                at,
            )
        )
    if event.outcome is not None:
        log["completion"].append((event.outcome, at))
    if event.operator_type is not None:
        details = dict(event.details or {})
        if "timeout_at" in details:
            details["timeout_at"] = ms(datetime.fromisoformat(details["timeout_at"]))
        log["operator"].append((event.operator_type, details, at))
    if event.signal_effect is not None:
        told = event.details or {}
        log["signal"].append(
            (
                event.signal_effect,
                UUID(told["signal_id"]),
                UUID(told["waitpoint_id"]),
                told.get("source_identity") or "",
                at,
            )
        )


def owner(row: asyncpg.Record) -> str:
    """Whose a stored row is."""
    return str(row["id"])


_IDENTITY = ("signal_id", "waitpoint_id", "is_dropped")
_SIGNAL = (
    *_IDENTITY,
    "waitpoint_key",
    "suspension_id",
    "signal_name",
    "signal_category",
    "source_type",
    "source_identity",
    "accepted_at",
    "payload",
    "idempotency_key",
    "target_scope",
    "observed_effect",
    "match_detail",
)
# Where it is stored, and what the audit checks: how far it was counted and emptied.
_NOT_OF_A_WAITPOINT = ("partition", "id", "dropped_upto", "counted_by")
_SUSPENSION = (
    "suspension_id",
    "attempt_index",
    "attempt_id",
    "waitpoint_ids",
    "waitpoint_keys",
    "resume_condition",
    "reason_code",
    "suspended_at",
    "timeout_at",
    "timeout_behavior",
    "is_early",
    "last_signal_at",
    "satisfied_at",
    "closed_at",
    "close_reason",
    "trigger_type",
    "closer_signal_id",
    "satisfier_signal_ids",
)

_SAME = [
    "version",
    "stops",
    "priority",
    "retry_count",
    "replay_count",
    "lease_reclaim_count",
    "delay_until",
    "deadline_at",
    "attempt_timeout_at",
    "failure_reason",
    "failure_category",
    "cancellation_reason",
    "cancelled_by",
    "progress_pct",
    "progress_message",
    "created_at",
    "started_at",
    "completed_at",
    "lease_lost_at",
    "lease_revoke_reason",
    "suspension_timeout_at",
    "current_waitpoint",
    "last_hmac_validation_failed_at",
]


def _columns(worker: Worker) -> tuple[Any, ...]:
    """Kinds, capabilities, versions and digests, as the database takes them."""
    capabilities = list(worker.capabilities)
    if worker.digest is None or worker.kinds is None:
        return (None if worker.kinds is None else list(worker.kinds)), capabilities, None, None
    pairs = [(kind, version) for kind in worker.kinds for version in worker.versions]
    return [kind for kind, _ in pairs], capabilities, [version for _, version in pairs], [worker.digest] * len(pairs)


def view(seen: Execution) -> dict[str, Any]:
    """What the engine tells about an execution."""
    vector = seen.state_vector
    lease = seen.current_lease or seen.lost_lease
    left = seen.attempt_timeout_remaining
    return {name: spoken(getattr(seen, name)) for name in _SAME} | {
        "vector": tuple(str(getattr(vector, name)) for name in vector.__struct_fields__),
        "has_detail": bool(seen.blocking_detail),
        "total_attempt_count": seen.total_attempt_count,
        "current_attempt_index": seen.current_attempt_index,
        "current_attempt_id": None if seen.current_attempt is None else seen.current_attempt.attempt_id,
        "epoch": seen.current_lease_epoch,
        "is_leased": seen.current_lease is not None,
        "lease": None
        if lease is None
        else (
            lease.lease_id,
            lease.lease_epoch,
            lease.worker_id,
            lease.worker_instance_id,
            ms(lease.acquired_at),
            ms(lease.last_heartbeat_at),
            ms(lease.expires_at),
        ),
        "attempt_timeout_left": None if left is None else left // MS,
        "mismatch_at": ms(seen.last_capability_mismatch_at),
        "transitioned_at": ms(seen.last_transition_at),
        "mutated_at": ms(seen.last_mutation_at),
    }


def expected_view(e: Any, held_by: tuple[str, int | None] | None) -> dict[str, Any]:
    """The same from the model; `held_by` is what readers see although it is not stored."""
    shown = expected_facts(e)
    if held_by is not None:
        reason, since = held_by
        phase, owner, _, _, outcome, attempt, _ = e.vector
        shown["vector"] = (phase, owner, BLOCKS[reason], reason, outcome, attempt, "waiting")
        shown["has_detail"] = True
        shown["mismatch_at"] = max((at for at in (e.mismatch_at, since) if at is not None), default=None)
    return shown


def expected_facts(e: Any) -> dict[str, Any]:
    """What is stored."""
    lease = e.lease if e.is_active else None
    return {name: getattr(e, name) for name in _SAME} | {
        "vector": e.vector,
        "has_detail": e.place in "DCBXVS",
        "total_attempt_count": len(e.attempts),
        "current_attempt_index": len(e.attempts) - 1 if e.attempts else None,
        "current_attempt_id": e.current_attempt_id,
        "epoch": e.epoch,
        "is_leased": e.place == "A",
        "lease": None
        if lease is None
        else (
            lease.lease_id,
            lease.epoch,
            lease.worker_id,
            lease.worker_instance_id,
            lease.acquired_at,
            lease.renewed_at,
            lease.expires_at,
        ),
        "attempt_timeout_left": e.attempt_timeout_left,
        "mismatch_at": e.mismatch_at,
        "transitioned_at": e.transitioned_at,
        "mutated_at": e.mutated_at,
        "result": e.result,
        "lease_lost_at": e.lease_lost_at if e.is_active else None,
        "lease_revoke_reason": e.lease_revoke_reason if e.is_active else None,
    }


SETTINGS = settings(
    max_examples=sampling.examples(60, 12),
    stateful_step_count=45,
    deadline=None,  # a step is a dozen round trips on a shared machine
    derandomize=True,  # every run plays the same histories; raise max_examples and set this to False to hunt
    print_blob=True,
    database=None,
    # To shrink a history of 45 steps takes longer than a run; a hunt adds Phase.shrink.
    phases=[Phase.generate],
    # Starting over costs a truncate, and a history is long on purpose.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@pytest.fixture
def world(server: str) -> Any:
    world = World()
    world.run(world.open(server))
    yield world
    world.close()


def test_the_engine_does_what_the_contract_says_in_every_history(world: World) -> None:
    machine = type("Histories", (Histories,), {"world": world})
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert {"pool-1", "pool-2"} & Histories.barred


# What random histories seldom meet, as fixed ones.


@pytest.mark.both_servers
async def test_an_end_at_the_reclaim_cap_does_not_let_a_lower_rank_pass(engine: CheckedEngine) -> None:
    capped = await submit(engine, execution_kind="a", priority=9, policy=ExecutionPolicy(max_reclaim_count=0))
    await claim_one(engine)
    await engine.revoke_lease(capped)
    low = await submit(engine, execution_kind="a", priority=1)
    high = await submit(engine, execution_kind="b", priority=5)

    assert (await claim_one(engine)).execution_id == high
    assert await engine.read_execution_state(capped) == "failed"
    assert await engine.read_execution_state(low) == "waiting"


@pytest.mark.parametrize("how", ["cancelled and replayed", "timed out and retried"])
async def test_a_lapsed_lease_may_be_over_before_it_is_taken_back(
    engine: CheckedEngine, clock: Clock, how: str
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 20 * SECOND}, "retry_policy": {"backoff": {"type": "fixed"}}}
    first = await started(engine, lease_ttl=timedelta(seconds=10), policy=policy)
    await clock.advance(seconds=30)
    await engine.run_timers("lease")

    if how == "cancelled and replayed":
        await engine.cancel(Operator(first.execution_id), "enough")
        await engine.replay_execution(first.execution_id)
    else:
        assert await engine.expire_execution(first.execution_id, "attempt_timeout") == "retry_scheduled"
        await clock.advance(seconds=2)
        await engine.run_timers("delay")

    assert (await claim_one(engine)).handle.lease_epoch == 2


@pytest.mark.parametrize("source", ["lease_holder", "my scheduler"])
async def test_a_repeated_cancel_by_the_lease_returns_the_same_later(engine: CheckedEngine, source: str) -> None:
    fence = (await started(engine)).handle.fence
    await engine.cancel(fence, "first", source=source)
    await engine.replay_execution(fence.execution_id)

    await engine.cancel(fence, "again", source=source)
    assert await engine.read_execution_state(fence.execution_id) == "waiting"
    later = (await claim_one(engine)).handle
    await engine.cancel(fence, "again", source=source)
    assert await engine.read_execution_state(fence.execution_id) == "active"
    await engine.complete(later)
    await engine.cancel(fence, "again", source=source)
    assert await engine.read_execution_state(fence.execution_id) == "completed"


async def test_a_lapsed_grant_is_gone_once_the_execution_was_claimed(engine: CheckedEngine, clock: Clock) -> None:
    execution_id = await submit(engine)
    await engine.issue_claim_grant(execution_id, **WORKER)
    await clock.advance(seconds=6)
    await engine.release((await claim_one(engine)).handle)

    with pytest.raises(Contention, match="invalid_claim_grant"):
        await engine.claim_resumed_execution(execution_id, lease_id=mint_uuid(), **WORKER)


async def test_a_lapsed_grant_is_gone_once_the_execution_was_blocked(engine: CheckedEngine, clock: Clock) -> None:
    execution_id = await submit(engine)
    await engine.issue_claim_grant(execution_id, **WORKER)
    await clock.advance(seconds=6)
    await engine.block_route(execution_id)
    await engine.unblock_execution(execution_id)

    with pytest.raises(Contention, match="invalid_claim_grant"):
        await engine.claim_execution(execution_id, lease_id=mint_uuid(), attempt_id=mint_uuid(), **WORKER)


async def test_an_item_that_is_not_created_does_not_block_later_ones(engine: CheckedEngine) -> None:
    await engine.set_lane_state("closed", "draining")
    known = await submit(engine, idempotency_key="known")
    given = id_in(home(known))
    refused_first, made, duplicate = await engine.create_many(
        [
            NewExecution(execution_kind="test", lane_id="closed", idempotency_key="key"),
            NewExecution(execution_kind="test", idempotency_key="key"),
            NewExecution(execution_kind="test", idempotency_key="key"),
        ]
    )
    twice, same_id = await engine.create_many(
        [
            NewExecution(execution_kind="test", idempotency_key="known", execution_id=given),
            NewExecution(execution_kind="test", execution_id=given),
        ]
    )

    assert isinstance(refused_first, StateError)
    assert isinstance(made, Created)
    assert duplicate == Duplicate(made.execution_id)
    assert twice == Duplicate(known)
    assert same_id == Created(given, ff.State.WAITING)


async def test_a_duplicate_by_id_does_not_revive_the_window_of_its_key(engine: CheckedEngine) -> None:
    first = await submit(engine, idempotency_key="key", policy=ExecutionPolicy(dedup_window=0))

    again = await engine.create_execution(execution_kind="test", idempotency_key="key", execution_id=first)
    other = await engine.create_execution(execution_kind="test", idempotency_key="key")

    assert again == Duplicate(first)
    assert isinstance(other, Created)


@pytest.mark.parametrize("call", ["complete", "fail", "delay", "wait_children", "release"])
async def test_only_an_operators_own_override_needs_no_fence(engine: CheckedEngine, call: str) -> None:
    execution_id = (await started(engine)).execution_id
    arguments = {"fail": ["boom"], "delay": [timedelta(seconds=1)]}.get(call, [])

    with pytest.raises(ff.InvalidInput, match="fence_required"):
        await getattr(engine, call)(Operator(execution_id, "system_timeout"), *arguments)
    await getattr(engine, call)(Operator(execution_id), *arguments)
