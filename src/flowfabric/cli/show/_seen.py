"""Reads everything that `flowfabric show` shows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from flowfabric.cli import _waiting
from flowfabric.cli._database import missing, resolve
from flowfabric.values.flow import GroupState
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import EdgeGroupPolicy
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.values.attempt import Attempt
    from flowfabric.values.event import Event, EventCursor
    from flowfabric.values.execution import Execution, ExecutionContext, Result
    from flowfabric.values.signal import RecordedSignal
    from flowfabric.values.step import Step
    from flowfabric.values.wait import PendingWaitpoint, Suspension

_SIGNALS = 100  # how many of the newest people get to see
_EVENT_PAGES = 20  # of 1,000 events each


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


@dataclass(frozen=True)
class Seen:
    """Everything that was read about the execution; parts that were not asked for are None."""

    execution: Execution
    membership: Membership | None
    attempts: list[Attempt]
    steps: list[Step]
    suspension: Suspension | None
    waitpoints: list[PendingWaitpoint]
    signals: deque[RecordedSignal]
    events: list[Event] | None
    context: ExecutionContext | None
    result: Result | None
    payloads: bool
    codecs: Codecs | None


async def read(
    engine: Engine, execution: str, *, payloads: bool, timeline: bool, all_signals: bool, codecs: Codecs | None
) -> Seen:
    """Read an execution with its history; payloads and timeline only if asked for."""
    target = await resolve(engine, execution)
    found = await engine.read_execution(target)
    if found is None:
        raise await missing(engine, target)
    return Seen(
        execution=found,
        membership=await _membership(engine, found),
        attempts=await engine.list_attempts(target),
        steps=await engine.read_steps([target], all_generations=True),
        suspension=await engine.read_suspension(target),
        waitpoints=await _waiting.client_of(engine).waitpoints_of(target),
        signals=await _signals(engine, target, None if all_signals else _SIGNALS),
        events=await _events(engine, target) if timeline else None,
        context=await engine.read_execution_context(target) if payloads else None,
        result=await engine.read_result(target) if payloads else None,
        payloads=payloads,
        codecs=codecs,
    )


async def _events(engine: Engine, target: ExecutionId) -> list[Event]:
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
