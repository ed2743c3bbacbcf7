"""`flowfabric cancel`, `replay`, `priority`: change executions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _bulk, _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._options import Dsn, Id, Ids, Json, Yes, login_name
from flowfabric.errors import NotFound

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId


@filtered
def cancel(
    executions: Ids = None,
    *,
    wanted: Filter,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the execution.")
    ] = "cancelled by an operator",
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Cancel executions: the ones named, or all that match a filter and have not ended."""
    from flowfabric.values.state import State  # noqa: PLC0415

    if wanted:
        wanted = wanted.or_states([one for one in State if not one.is_terminal])

    async def what(engine: Engine, targets: Sequence[ExecutionId]) -> Sequence[Any]:
        return await engine.cancel_many(targets, reason)

    _bulk.change(executions, wanted, what, verb="cancel", participle="cancelled", yes=yes, json=json, dsn=dsn)


@filtered
def replay(
    executions: Ids = None,
    *,
    wanted: Filter,
    reason: Annotated[
        str | None,
        typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the attempt.", show_default=False),
    ] = None,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Run ended executions again: the ones named, or all that match a filter and failed or expired.

    With --state also completed, cancelled or skipped ones.
    """
    from flowfabric.values.state import State  # noqa: PLC0415

    if wanted:
        # Cancelled ones were cancelled on purpose.
        wanted = wanted.or_states([State.FAILED, State.EXPIRED])

    async def what(engine: Engine, targets: Sequence[ExecutionId]) -> Sequence[Any]:
        return await engine.replay_many(targets, reason=reason, requested_by=login_name())

    _bulk.change(executions, wanted, what, verb="replay", participle="replayed", yes=yes, json=json, dsn=dsn)


def priority(
    execution: Id,
    rank: Annotated[
        int,
        typer.Argument(metavar="PRIORITY", help="From 0 to 9000; workers claim higher ones first.", show_default=False),
    ],
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Change the priority of an execution that waits for a worker."""

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
