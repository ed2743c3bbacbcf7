"""`flowfabric flow cancel`: close a flow and cancel its nodes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._options import Dsn, Json, Yes
from flowfabric.cli._program import NO, TIMEOUT, confirm, exit_with, tell
from flowfabric.cli.flow._frame import named_flow, read_frame
from flowfabric.cli.flow._options import Id
from flowfabric.errors import TimedOut
from flowfabric.values.flow import CancellationPolicy, CancellationScheduled, PartiallyCancelled

if TYPE_CHECKING:
    from flowfabric.engine import Engine


def cancel(
    flow: Id,
    policy: Annotated[
        CancellationPolicy,
        typer.Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="cancel_all cancels every node that has not ended, cancel_pending those that have not started,"
            " flow_only none: it only closes the flow, so that no more nodes can be added.",
        ),
    ] = CancellationPolicy.CANCEL_ALL,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the flow and its nodes.")
    ] = "cancelled by an operator",
    waits: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Cancel the nodes now, or leave that to a worker."),
    ] = True,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Close a flow and cancel its nodes. Cancelling it again cancels nodes that were replayed since."""

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        before = await read_frame(engine, flow_id)
        header = before.graph.flow
        is_new = header.cancelled_at is None
        live = sum(not one.state.is_terminal for one in before.graph.nodes)
        if is_new or live:
            confirm(f"cancel {named_flow(before)}? {live:,} of its nodes have not ended.", yes=yes)
        try:
            done = await engine.cancel_flow(flow_id, policy=policy, reason=reason, wait=waits)
        except TimedOut as error:
            tell(error)
            _output.note(f"{flow_id} is closed; a worker cancels the rest of its nodes in the background")
            return TIMEOUT
        scheduled = done.member_count if isinstance(done, CancellationScheduled) else 0
        failed = done.failed_member_execution_ids if isinstance(done, PartiallyCancelled) else ()
        after = await read_frame(engine, flow_id)
        if json:
            _output.document(
                {
                    "flow_id": flow_id,
                    "is_new": is_new,
                    "cancellation_policy": done.cancellation_policy,
                    "cancel_reason": after.graph.flow.cancel_reason,
                    "public_flow_state": after.state,
                    "summary": after.summary,
                    "scheduled": scheduled,
                    "failed_member_execution_ids": failed,
                }
            )
        else:
            counts = Counter(one.state.value for one in after.graph.nodes)
            words = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items())) or "no nodes"
            how = "cancelled" if is_new else f"was cancelled before ({done.cancellation_policy})"
            _output.say(f"{flow_id} {how}: {words}")
            if scheduled:
                _output.note(f"a worker cancels {scheduled:,} nodes in the background")
            for one in failed:
                _output.note(f"{one} could not be cancelled yet; a worker tries again in the background")
        return NO if failed else 0

    exit_with(ask(dsn, work))
