"""`flowfabric cancel`, `replay`, `priority`: what an operator does to executions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _bulk, _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._options import (
    Dsn,
    Filter,
    Id,
    Ids,
    Json,
    Kinds,
    Lanes,
    Namespace,
    Since,
    States,
    Tag,
    Until,
    Yes,
    login_name,
)
from flowfabric.errors import NotFound

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId


def cancel(
    executions: Ids = None,
    state: States = None,
    lane: Lanes = None,
    kind: Kinds = None,
    namespace: Namespace = None,
    tag: Tag = None,
    since: Since = None,
    until: Until = None,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; stored with the execution.")
    ] = "cancelled by an operator",
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Cancel executions: those named, or all that match a filter and have not ended."""
    from flowfabric.values.state import State  # noqa: PLC0415

    wanted = Filter.of(state, lane, kind, namespace, tag, since, until)
    if wanted and not state:
        wanted = Filter({**wanted.arguments, "states": [one for one in State if not one.is_terminal]})

    async def what(engine: Engine, targets: Sequence[ExecutionId]) -> Sequence[Any]:
        return await engine.cancel_many(targets, reason)

    _bulk.change(executions, wanted, what, verb="cancel", participle="cancelled", yes=yes, json=json, dsn=dsn)


def replay(
    executions: Ids = None,
    state: States = None,
    lane: Lanes = None,
    kind: Kinds = None,
    namespace: Namespace = None,
    tag: Tag = None,
    since: Since = None,
    until: Until = None,
    reason: Annotated[
        str | None,
        typer.Option("--reason", "-r", metavar="TEXT", help="Why; stored with the attempt.", show_default=False),
    ] = None,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Run ended executions again: those named, or all that match a filter and failed or expired (others by --state)."""
    from flowfabric.values.state import State  # noqa: PLC0415

    wanted = Filter.of(state, lane, kind, namespace, tag, since, until)
    if wanted and not state:
        # What was cancelled was cancelled on purpose.
        wanted = Filter({**wanted.arguments, "states": [State.FAILED, State.EXPIRED]})

    async def what(engine: Engine, targets: Sequence[ExecutionId]) -> Sequence[Any]:
        return await engine.replay_many(targets, reason=reason, requested_by=login_name())

    _bulk.change(executions, wanted, what, verb="replay", participle="replayed", yes=yes, json=json, dsn=dsn)


def priority(
    execution: Id,
    rank: Annotated[
        int, typer.Argument(metavar="PRIORITY", help="From 0 to 9000; the higher is claimed first.", show_default=False)
    ],
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Give an execution that waits another priority."""

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        try:
            await engine.change_priority(target, rank)
        except NotFound:
            raise await missing(engine, target) from None
        found = await engine.read_execution(target)
        now = rank if found is None else found.priority
        if json:
            _output.document({"execution_id": target, "priority": now})
        else:
            _output.say(f"{target} has priority {now}")

    ask(dsn, work)
