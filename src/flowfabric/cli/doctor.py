"""`flowfabric doctor`: check this machine and the database, with advice for every problem."""

from __future__ import annotations

import asyncio
import platform
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import address, embedded, is_embedded
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._output import Column
from flowfabric.cli._program import CANNOT, NO, exit_with
from flowfabric.errors import ConnectionFailed, FlowFabricError
from flowfabric.values.durations import counted
from flowfabric.values.ids import BudgetId

if TYPE_CHECKING:
    from flowfabric._postgres.diagnosis import Finding

_EXAMINED = 500  # executions that wait for a worker: the newest
_HOLDING = 100  # budgets that hold executions back


def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as problems.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Check connection, versions, privileges, settings, clock and dead rows. Exits with 1 if it finds a problem."""
    found: list[Finding] = []
    code = 0
    try:
        _examine(dsn, found)
    except ConnectionFailed as error:
        from flowfabric._postgres.diagnosis import Finding  # noqa: PLC0415

        found.append(Finding("connection", "problem", " ".join(str(error).split()), _advice(error)))
        code = CANNOT
    if not code and any(one.verdict == "problem" or (strict and one.verdict == "warning") for one in found):
        code = NO
    if json:
        _output.document({"findings": found, "is_fit": code == 0})
    else:
        width = _output.terminal_width()
        if width is None:
            rows = [(one.check, one.verdict, one.detail, one.advice) for one in found]
            _output.table(["CHECK", "VERDICT", "FOUND", "WHAT TO DO"], rows)
        else:
            # Advice has to be read whole: it continues the column before it.
            cells = [
                (one.check, one.verdict, f"{one.detail}. {one.advice}" if one.advice else one.detail) for one in found
            ]
            _output.table(["CHECK", "VERDICT", Column("FOUND, AND WHAT TO DO", folds=True)], cells)
    exit_with(code)


def _examine(dsn: str | None, found: list[Finding]) -> None:
    import flowfabric  # noqa: PLC0415
    from flowfabric._postgres.diagnosis import Finding, examine  # noqa: PLC0415
    from flowfabric.engine.service import migrate_database  # noqa: PLC0415

    found.append(Finding("package", "ok", f"flowfabric {flowfabric.__version__}, Python {platform.python_version()}"))
    if is_embedded(dsn):
        data, programs = embedded().majors()
        words = f"programs of PostgreSQL {programs}, " + (f"data of PostgreSQL {data}" if data else "no data yet")
        found.append(Finding("embedded server", "ok", words))

    async def asked(chosen: str) -> None:
        if is_embedded(dsn):
            # As every command that uses it does.
            await migrate_database(chosen, unless_current=True)
        # One by one, to show the findings so far if the connection breaks.
        async for finding in examine(chosen):
            found.append(finding)  # noqa: PERF401

    with address(dsn) as chosen:
        asyncio.run(asked(chosen))
        if all(one.verdict != "problem" for one in found if one.check in ("connection", "schema", "privileges")):
            found.extend(asyncio.run(_unserved(chosen)))
            found.extend(asyncio.run(_limits(chosen)))


async def _limits(dsn: str) -> list[Finding]:
    """Limits that hold executions they can never admit, and budgets to which no execution reports usage."""
    from flowfabric._postgres.diagnosis import Finding  # noqa: PLC0415
    from flowfabric.engine import Engine  # noqa: PLC0415

    try:
        async with await Engine.connect(dsn, max_size=2, notifications=False, prepared_statements=False) as engine:
            budgets = [one for one in (await engine.list_budgets(limit=1000)).items if one.owner_id is None]
            counts = await engine.count_held()
            never = []
            holding = {each.limit_id: each for each in counts if each.what == "budget"}
            for one in list(holding.values())[:_HOLDING]:
                status = await engine.get_budget_status(BudgetId(one.limit_id))
                for held in (await engine.list_held(one.limit_id, limit=100)).items:
                    too_much = [
                        name for name, amount in held.needs.items() if 0 < status.hard_limits.get(name, 0) < amount
                    ]
                    if too_much:
                        never.append((one.name, held, too_much[0]))
            unused = await engine.find_unreported_budgets(limit=100)
    except FlowFabricError as error:
        return [Finding("limits", "ok", f"not checked: {error}")]
    found = []
    first = {name: (name, held, dimension) for name, held, dimension in reversed(never)}
    for name, held, dimension in list(reversed(first.values()))[:5]:
        number = sum(each[0] == name for each in never)
        found.append(
            Finding(
                "limits",
                "warning",
                f"{counted(number, 'execution')} {'needs' if number == 1 else 'need'} more than the whole budget {name}"
                f" has: {held.execution_id} needs {held.needs[dimension]:,} {dimension}",
                f"`flowfabric budgets raise {shlex.quote(name)} {dimension}={held.needs[dimension]}`, or cancel",
            )
        )
    exhausted = [one for one in budgets if one.is_exhausted and one.next_reset_at is None]
    waiting = {each.limit_id for each in counts}
    found += [
        Finding(
            "limits",
            "warning",
            f"budget {each.name} is exhausted, is never reset, and holds executions back",
            f"`flowfabric budgets raise {shlex.quote(each.name)} {each.exhausted_by}=...` or `reset` releases them",
        )
        for each in exhausted
        if each.budget_id in waiting
    ]
    if unused:
        names = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        found.append(
            Finding(
                "budgets",
                "warning",
                f"executions have ended under these budgets, and none ever reported usage: {names}",
                "report with ctx.usage or ctx.spend, or remove the budgets from the tasks",
            )
        )
    return found or [Finding("limits", "ok", "no execution waits for a limit that can never admit it")]


async def _unserved(dsn: str) -> list[Finding]:
    """Lanes that hand out no work although some waits there, and tasks that no live worker runs."""
    from flowfabric._postgres.diagnosis import Finding  # noqa: PLC0415
    from flowfabric.engine import Engine  # noqa: PLC0415
    from flowfabric.values.lane import LaneState  # noqa: PLC0415
    from flowfabric.values.state import State  # noqa: PLC0415
    from flowfabric.values.worker import needing  # noqa: PLC0415

    closed = (LaneState.PAUSED, LaneState.DISABLED)
    try:
        async with await Engine.connect(dsn, max_size=2, notifications=False, prepared_statements=False) as engine:
            lanes = [one for one in await engine.lane_stats() if one.state in closed]
            waiting = await engine.find_executions(states=[State.WAITING, State.RESUMABLE], limit=_EXAMINED)
            unserved = await engine.find_unserved([one.execution_id for one in waiting.items])
            uncovered = [one for one in await engine.list_uncovered() if one.version is None]
    except FlowFabricError as error:
        return [Finding("lanes", "ok", f"not checked: {error}")]
    found = [
        Finding(
            "lanes",
            "warning" if one.depth else "ok",
            f"{one.lane_id} is {one.state}, {counted(one.depth, 'execution')} waiting",
            f"`flowfabric lanes resume {one.lane_id}` lets workers claim again" if one.depth else "",
        )
        for one in lanes
    ] or [Finding("lanes", "ok", "none is paused or disabled")]
    open_lanes = [one for one in unserved if one.lane_state not in closed]
    # Workers serve the task of the others, with code or a version that may not run them: see "changed code".
    kinds = {
        (one.kind, one.lane_id, one.capabilities) for one in open_lanes if not one.is_stopped and one.version is None
    }
    shut = {one.lane_id for one in lanes}
    # Beside the newest executions: routes whose requirement no live worker covers.
    kinds |= {(one.kind, one.lane_id, one.capabilities) for one in uncovered if one.lane_id not in shut}
    names = ", ".join(f"{kind} in lane {lane}{needing(needs)}" for kind, lane, needs in sorted(kinds)[:5])
    more = f" and {len(kinds) - 5} more" if len(kinds) > 5 else ""
    if kinds:
        advice = "run `flowfabric worker module:app` with an app that has these tasks"
        if any(needs for _, _, needs in kinds):
            advice += ", and with --capability for each that is required"
        found.append(Finding("tasks", "warning", f"no live worker serves {names}{more}", advice))
    elif open_lanes:
        found.append(Finding("tasks", "ok", "only changed code or a version keeps tasks waiting: see changed code"))
    else:
        found.append(Finding("tasks", "ok", "a live worker serves each task that waits"))
    return found


def _advice(error: ConnectionFailed) -> str:
    return {
        "unreachable": "check host, port and firewall in the DSN, and that the server runs",
        "bad_address": "correct the DSN",
        "wrong_password": "check user and password in the DSN",
        "database_missing": "create the database, or name another in the DSN",
    }.get(error.kind, "")
