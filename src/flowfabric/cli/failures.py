"""`flowfabric failures`: executions that did not succeed, and why."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._options import Dsn, Json
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.execution import ExecutionInfo, Outcome

_DEFAULT = [State.FAILED, State.EXPIRED]


@filtered
def failures(
    *,
    wanted: Filter,
    summary: Annotated[
        bool, typer.Option("--summary", "-S", help="Group by kind, state and failure, with counts.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=1_000_000,
            help="Read at most this many, newest first. Default: 50, or 10000 with --summary.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List executions that failed or expired, newest first; use --state for cancelled or skipped ones."""
    chosen = wanted.or_states(_DEFAULT)
    most = limit or (10_000 if summary else 50)

    async def work(engine: Engine) -> None:
        with _output.busy("reading"):
            found, is_more = await _find(engine, chosen, most)
        if summary:
            _summarise(found, is_complete=not is_more, as_json=json)
        else:
            _list(found, is_complete=not is_more, as_json=json)
        if json:
            return
        if not found:
            _output.note("no failures match" if wanted else "no execution failed or expired")
        elif is_more:
            _output.note(f"there is more: these are the newest {len(found)}; raise --limit to see older ones")

    ask(dsn, work)


async def _find(engine: Engine, wanted: Filter, most: int) -> tuple[list[tuple[ExecutionInfo, str]], bool]:
    found: list[tuple[ExecutionInfo, str]] = []
    async for page in wanted.pages(engine, size=min(most, 500)):
        if page.items:
            outcomes = await engine.read_outcomes([one.execution_id for one in page.items])
            found += [(one, _why(outcomes.get(one.execution_id))) for one in page.items]
        if len(found) >= most:
            return found[:most], len(found) > most or page.next_cursor is not None
    return found, False


def _why(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return _output.failure_line(outcome.failure_reason or outcome.cancellation_reason)


def _list(found: list[tuple[ExecutionInfo, str]], *, is_complete: bool, as_json: bool) -> None:
    if as_json:
        items = [{**_output.to_json(one), "failure": why} for one, why in found]
        _output.document({"items": items, "is_complete": is_complete})
        return
    if found:
        _output.table(
            ["ID", "STATE", "KIND", "LANE", "ENDED", "ATTEMPTS", "FAILURE"],
            [
                (
                    one.execution_id, one.public_state, one.execution_kind, one.lane_id, one.completed_at,
                    one.current_attempt_index + 1 if one.started_at else 0, why,
                )
                for one, why in found
            ],
        )  # fmt: skip


def _summarise(found: list[tuple[ExecutionInfo, str]], *, is_complete: bool, as_json: bool) -> None:
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one, why in found:
        key = (one.execution_kind, one.public_state.value, why)
        group = groups.setdefault(
            key,
            {
                "execution_kind": key[0],
                "public_state": key[1],
                "failure": why,
                "count": 0,
                "last_ended_at": None,
                "example": one.execution_id,
            },
        )
        group["count"] += 1
        ended, last = one.completed_at, group["last_ended_at"]
        if isinstance(ended, datetime) and (last is None or ended > last):
            group["last_ended_at"] = ended
            group["example"] = one.execution_id
    ordered = sorted(groups.values(), key=lambda group: -group["count"])
    if as_json:
        _output.document({"groups": ordered, "examined": len(found), "is_complete": is_complete})
        return
    if ordered:
        _output.table(
            ["COUNT", "KIND", "STATE", "LAST", "FAILURE", "EXAMPLE"],
            [
                (
                    group["count"], group["execution_kind"], group["public_state"], group["last_ended_at"],
                    group["failure"], group["example"],
                )
                for group in ordered
            ],

        )  # fmt: skip
