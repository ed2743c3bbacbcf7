"""Reads everything that `flowfabric show` shows."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from msgspec import Struct

from flowfabric.cli import _output, _waiting
from flowfabric.cli._database import missing, resolve
from flowfabric.errors import NotFound
from flowfabric.values.flow import GroupState
from flowfabric.values.ids import BudgetId, ExecutionId, FlowId, QuotaPolicyId
from flowfabric.values.joins import EdgeGroupPolicy
from flowfabric.values.spending import RunUsage, usage_of
from flowfabric.values.state import State
from flowfabric.values.stream import END

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.values.attempt import Attempt
    from flowfabric.values.budget import BudgetStatus
    from flowfabric.values.child import Child
    from flowfabric.values.event import Event, EventCursor
    from flowfabric.values.execution import Execution, ExecutionContext, Result
    from flowfabric.values.held import Held
    from flowfabric.values.signal import RecordedSignal
    from flowfabric.values.step import Step
    from flowfabric.values.stream import Frame, Summary
    from flowfabric.values.wait import PendingWaitpoint, Suspension
    from flowfabric.values.worker import Unserved

_BEFORE = 100  # executions that wait for the same limit, whose position is shown
_FRAMES = 5
_SIGNALS = 100  # how many of the newest people get to see
_EVENT_PAGES = 20  # of 1,000 events each
_CHILDREN = 1000
_HOOKS = 20  # executions among which the one of a hook is looked for
_SUBMITTED_WITHIN = timedelta(minutes=1)


class Upstream(Struct, frozen=True):
    """A member that another one depends on, and that has not completed."""

    execution_id: ExecutionId
    node: str
    state: State


class Membership(Struct, frozen=True, kw_only=True):
    """An execution's node in its flow. `waits_for` is empty once it waits for no other member."""

    flow_id: FlowId
    name: str
    node: str
    policy: EdgeGroupPolicy | None
    dependencies: int
    waits_for: tuple[Upstream, ...]


class FailureHook(Struct, frozen=True, kw_only=True):
    """The task of `on_failure`, and its execution if that is found: it is submitted a moment later, and may be gone."""

    task: str
    execution_id: ExecutionId | None


class HeldBy(Struct, frozen=True, kw_only=True):
    """The limit that holds it back, and what would release it, in words."""

    what: str
    name: str
    key: str
    since: datetime | None
    retry_at: datetime | None
    needs: dict[str, int]
    until: str


class LimitsOf(Struct, frozen=True, kw_only=True):
    """The names of its budgets and quotas, and what it and its children used."""

    budgets: tuple[str, ...]
    quotas: tuple[str, ...]
    usage: RunUsage


@dataclass(frozen=True)
class Seen:
    """Everything that was read about the execution; parts that were not asked for are None."""

    execution: Execution
    membership: Membership | None
    children: list[Child]
    attempts: list[Attempt]
    steps: list[Step]
    suspension: Suspension | None
    waitpoints: list[PendingWaitpoint]
    signals: deque[RecordedSignal]
    frame_count: int  # of the latest attempt
    frames: list[Frame]  # its last ones
    summary: Summary | None
    context: ExecutionContext | None
    result: Result | None
    payloads: bool
    codecs: Codecs | None
    unserved: Unserved | None
    hook: FailureHook | None
    held: HeldBy | None = None
    limits: LimitsOf | None = None
    wide: bool = False


async def read(
    engine: Engine,
    execution: str,
    *,
    payloads: bool,
    all_signals: bool,
    codecs: Codecs | None,
    wide: bool = False,
) -> Seen:
    """Read an execution with its history; payloads only if asked for."""
    target = await resolve(engine, execution)
    found = await engine.read_execution(target)
    if found is None:
        raise await missing(engine, target)
    return Seen(
        execution=found,
        membership=await _membership(engine, found),
        children=await engine.list_children(target, limit=_CHILDREN),
        attempts=await engine.list_attempts(target),
        steps=await engine.read_steps([target], all_generations=True),
        suspension=await engine.read_suspension(target),
        waitpoints=await _waiting.client_of(engine).waitpoints_of(target),
        signals=await _signals(engine, target, None if all_signals else _SIGNALS),
        frame_count=(await engine.read_streams([(target, None, END)], count_limit=1))[0].frame_count,
        frames=(await engine.read_last_frames([target], count_limit=_FRAMES)).get(target, []),
        summary=await engine.read_summary(target),
        context=await engine.read_execution_context(target) if payloads else None,
        result=await engine.read_result(target) if payloads else None,
        payloads=payloads,
        codecs=codecs,
        unserved=await _unserved(engine, target),
        hook=await _hook(engine, found),
        held=await _held(engine, found),
        limits=await _limits(engine, found),
        wide=wide,
    )


async def _held(engine: Engine, found: Execution) -> HeldBy | None:
    """Which limit holds it back, if one does."""
    held = await engine.read_held(found.execution_id) if found.public_state is State.RATE_LIMITED else None
    if held is None:
        return None
    quota = await engine.get_quota_policy(QuotaPolicyId(held.limit_id))
    if quota is not None:
        title = quota.name or str(quota.quota_policy_id)
        of_key = f" of {quota.key} {held.key}" if quota.key else ""
        before = await _before(engine, held, held.key)
        if held.retry_at is not None:
            until = "room in the window of its rate"
        else:
            until = f"the end of one of the {quota.limits.active_concurrency_cap} that run{of_key}"
        until += f", or `flowfabric quotas set {shlex.quote(title)}`"
        what, key = "quota", held.key if quota.key else ""
    else:
        budget = await engine.get_budget_status(BudgetId(held.limit_id))
        title, what, key = budget.name, "budget", ""
        until = _until(budget, held.needs)
        before = await _before(engine, held, None)
    if before:
        others = f"{before} other{'s' if before > 1 else ''}" if before < _BEFORE else f"at least {before} others"
        until += f", after {others} that it lets continue first"
    return HeldBy(
        what=what, name=title, key=key, since=held.blocked_at, retry_at=held.retry_at, needs=held.needs, until=until
    )


async def _before(engine: Engine, held: Held, key: str | None) -> int:
    """How many executions the same limit releases before this one; at most `_BEFORE` are counted."""
    first = (await engine.list_held(held.limit_id, key=key, limit=_BEFORE)).items
    return next((place for place, one in enumerate(first) if one.execution_id == held.execution_id), len(first))


def _until(budget: BudgetStatus, needs: Mapping[str, int]) -> str:
    """What would let an execution continue that a budget holds: the least raise, and a reset if it makes room."""
    raises: list[str] = []
    resets = True
    for dimension, limit in budget.hard_limits.items():
        needed = needs.get(dimension, 0)
        used = budget.usage.get(dimension, 0)
        missing = max(used + budget.held.get(dimension, 0) + needed - limit if needed else 0, used + 1 - limit)
        if limit and missing > 0:
            raises.append(f"{dimension}={missing}")
            resets = resets and needed <= limit
    text = " ".join(["`flowfabric budgets raise", shlex.quote(budget.name), *raises]) + "`"
    if resets:
        text += ", or a reset" + (f" at {_output.when(budget.next_reset_at)}" if budget.next_reset_at else "")
    return text


async def _limits(engine: Engine, found: Execution) -> LimitsOf | None:
    """The limits that it has."""
    used = usage_of(await engine.read_usage(found.execution_id))
    if not found.budget_ids and not found.quota_policy_ids and not used.by_budget:
        return None
    budgets: list[str] = []
    for one in found.budget_ids:
        try:
            budgets.append((await engine.get_budget_status(BudgetId(one))).name)
        except NotFound:  # it was never created: it limits nothing
            budgets.append(f"{one} (not created)")
    quotas: list[str] = []
    for each in found.quota_policy_ids:
        policy = await engine.get_quota_policy(QuotaPolicyId(each))
        quotas.append(f"{each} (not created)" if policy is None else policy.name or str(each))
    return LimitsOf(budgets=tuple(budgets), quotas=tuple(quotas), usage=used)


async def _hook(engine: Engine, found: Execution) -> FailureHook | None:
    """The task that was submitted because it failed."""
    if found.public_state not in (State.FAILED, State.EXPIRED) or found.completed_at is None:
        return None
    spec = ((found.policy or {}).get("hooks") or {}).get("failure")
    if not isinstance(spec, dict):
        return None
    kind, ended = str(spec.get("kind")), found.completed_at
    page = await engine.find_executions(
        kinds=[kind], created_from=ended, created_before=ended + _SUBMITTED_WITHIN, limit=_HOOKS
    )
    for one in reversed(page.items):
        hook = await engine.read_execution(one.execution_id)
        if hook is not None and hook.creator_identity == f"hook of {found.execution_id}":
            return FailureHook(task=kind, execution_id=one.execution_id)
    return FailureHook(task=kind, execution_id=None)


async def _unserved(engine: Engine, target: ExecutionId) -> Unserved | None:
    """Why no worker claims it, if no worker can."""
    found = await engine.find_unserved([target])
    return found[0] if found else None


async def events_of(engine: Engine, target: ExecutionId) -> list[Event]:
    events: list[Event] = []
    after: EventCursor | None = None
    for _ in range(_EVENT_PAGES):
        page = await engine.list_events(target, after=after)
        events += page.items
        after = page.next_cursor
        if after is None:
            break
    return events


async def _membership(engine: Engine, found: Execution) -> Membership | None:
    """Its flow and node, and the nodes it still waits for."""
    flow = None if found.flow_id is None else await engine.describe_flow(found.flow_id)
    if flow is None:
        return None
    members = {one.execution_id: one for one in await engine.list_flow_members(flow.flow_id)}
    group = next((one for one in flow.edge_groups if one.downstream_execution_id == found.execution_id), None)
    waits_for: list[Upstream] = []
    if group is not None and group.group_state is GroupState.PENDING and not found.public_state.is_terminal:
        edges = await engine.list_edges(flow.flow_id, incoming=found.execution_id)
        above = {edge.upstream_execution_id for edge in edges if edge.edge_state == "applied"}
        waits_for += [
            Upstream(one, member.name, member.state)
            for one, member in members.items()
            if one in above and member.state is not State.COMPLETED
        ]
    own = members.get(found.execution_id)
    return Membership(
        flow_id=flow.flow_id,
        name=flow.flow_kind,
        node="" if own is None else own.name,
        policy=None if group is None else group.policy,
        dependencies=0 if group is None else group.total_deps,
        waits_for=tuple(waits_for),
    )


async def _signals(engine: Engine, target: ExecutionId, most: int | None) -> deque[RecordedSignal]:
    found: deque[RecordedSignal] = deque(maxlen=most)
    after: int | None = 0
    while after is not None:
        page = await engine.read_signals(target, after=after, limit=1000)
        found.extend(page.items)
        after = page.next_cursor
    return found
