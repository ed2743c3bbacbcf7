"""A flow as it was read at one moment, for all commands about flows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from flowfabric.cli import _output
from flowfabric.cli._output import Column
from flowfabric.errors import NotFound
from flowfabric.values.flow import FlowGraph, FlowNode, FlowState, FlowSummary
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.ids import FlowId

MOST_FAILURES = 20  # for people: the first
MOST_OUTPUT = 10  # active nodes whose output is shown
LAST_FRAMES = 20  # of each; a line may be many tokens
_ENDED = (FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED)


class Frame(Struct, frozen=True, kw_only=True):
    """A flow at one moment. Without members it has no summary."""

    at: datetime
    graph: FlowGraph
    summary: FlowSummary | None
    output: tuple[tuple[str, str], ...] = ()  # active nodes, and the last line each has emitted

    @property
    def state(self) -> str:
        """The state its members give it, as the summary has it; that of its header if it has no members."""
        return self.graph.flow.public_flow_state if self.summary is None else self.summary.public_flow_state.value

    @property
    def is_ended(self) -> bool:
        return self.state in _ENDED


async def read_frame(engine: Engine, flow_id: FlowId, *, output: bool = False) -> Frame:
    # Read the nodes last: those that the summary counts as ended are then ended in the picture, too.
    summary = await engine.read_flow_summary(flow_id, now=True)
    graph = await engine.read_flow_graph(flow_id)
    if graph is None:
        raise NotFound("flow", flow_id)
    said = await _output_of(engine, graph) if output else ()
    return Frame(at=await now(engine), graph=graph, summary=summary, output=said)


async def _output_of(engine: Engine, graph: FlowGraph) -> tuple[tuple[str, str], ...]:
    active = {one.execution_id: one for one in graph.nodes if one.state is State.ACTIVE}
    names = {key: active[key].name or active[key].execution_kind for key in list(active)[:MOST_OUTPUT]}
    if not names:
        return ()
    frames = await engine.read_last_frames(list(names), count_limit=LAST_FRAMES)
    lines = {key: "".join(one.text for one in some if one.encoding is None) for key, some in frames.items()}
    return tuple((names[key], text.strip().rpartition("\n")[2]) for key, text in lines.items() if text.strip())


async def now(engine: Engine) -> datetime:
    return datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC)


def age(now: datetime, then: datetime) -> timedelta:
    return max(now - then, timedelta())


def failures(frame: Frame) -> tuple[str, list[Column], list[tuple[Any, ...]]]:
    """A title, headers and rows for the members that failed; without cancelled ones if the whole flow was cancelled."""
    is_cancelled = frame.graph.flow.cancelled_at is not None
    found = [one for one in frame.graph.nodes if _is_failure(one) and not (is_cancelled and _is_cancelled(one))]
    rest = len(found) - MOST_FAILURES
    title = f"Failures, the first {MOST_FAILURES} of {len(found):,}" if rest > 0 else "Failures"
    rows = [
        (
            one.name or one.execution_kind,
            one.state,
            one.execution_id,
            _output.failure_line(one.failure_reason or one.cancellation_reason),
        )
        for one in found[:MOST_FAILURES]
    ]
    return title, [Column("NODE", cut=14), Column("STATE"), Column("ID"), Column("FAILURE", folds=True)], rows


def _is_cancelled(node: FlowNode) -> bool:
    return node.state is State.CANCELLED


def _is_failure(node: FlowNode) -> bool:
    if _is_cancelled(node):
        return not (node.cancellation_reason or "").startswith("sibling_quorum_")
    return node.state in (State.FAILED, State.EXPIRED)


def named_flow(frame: Frame) -> str:
    flow = frame.graph.flow
    name = _output.printable(" ".join(flow.flow_kind.split()))
    count = len(frame.graph.nodes)
    parts = [*([name] if name else []), f"{count:,} node{'' if count == 1 else 's'}", frame.state]
    return f"flow {flow.flow_id} ({', '.join(parts)})"
