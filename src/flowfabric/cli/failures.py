"""`flowfabric failures`: executions that did not succeed, and why."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Json, Wide
from flowfabric.cli._output import Column
from flowfabric.contracts import json_form
from flowfabric.values.state import UNSUCCESSFUL, State

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.values.execution import ExecutionInfo, Outcome
    from flowfabric.values.failure import Failures
    from flowfabric.values.ids import ExecutionId

_DEFAULT = [State.FAILED, State.EXPIRED]


@filtered
def failures(
    *,
    wanted: Filter,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary",
            "-S",
            help="Group by kind, state, error type and text, with counts; ids and numbers in a text count as equal.",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=1_000_000,
            help="Read at most this many. Default: 50, or 10000 with --summary.",
            show_default=False,
        ),
    ] = None,
    app: AppOption = None,
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List executions that failed or expired, the last to end first; use --state for cancelled or skipped ones.

    Those that changed code stopped have not failed; --stopped lists them with what changed.
    """
    chosen = wanted.or_states(_DEFAULT)
    if UNSUCCESSFUL.issuperset(chosen.arguments.get("states", ("",))):
        chosen = chosen.replace(order_by="ended")
    most = limit or (10_000 if summary else 50)
    codecs = None if app is None else load_app(app).codecs
    are_stopped = "stopped" in wanted.arguments

    async def work(engine: Engine) -> None:
        if summary and codecs is None and chosen.arguments.get("order_by") == "ended":
            with _output.busy("reading"):
                grouped = await _grouped(engine, chosen, most)
            _show(grouped, as_json=json, wide=wide)
            if not json:
                await _hint(engine, grouped.examined, wanted, is_more=not grouped.is_complete)
            return
        # Texts that codecs sealed, and executions that changed code stopped, are grouped here: the database cannot.
        with _output.busy("reading"):
            found, is_more = await _find(engine, chosen, most, codecs)
        if summary:
            _summarise(found, is_complete=not is_more, as_json=json, wide=wide, are_stopped=are_stopped)
        else:
            _list(found, is_complete=not is_more, as_json=json, wide=wide, are_stopped=are_stopped)
        if json:
            return
        if not are_stopped:
            await _hint(engine, len(found), wanted, is_more=is_more)
            return
        _tell(len(found), wanted, is_more=is_more)
        if found:
            from flowfabric.values.history import how_to_fit  # noqa: PLC0415

            _output.note(how_to_fit(*(why for _, why in found)))

    ask(dsn, work)


async def _hint(engine: Engine, count: int, wanted: Filter, *, is_more: bool) -> None:
    _tell(count, wanted, is_more=is_more)
    if stopped := await stopped_count(engine):
        _output.note(f"changed code stopped {stopped}: see `flowfabric failures --stopped`")


def _tell(count: int, wanted: Filter, *, is_more: bool) -> None:
    if not count:
        _output.note("no failures match" if wanted else "no execution failed or expired")
    elif is_more:
        _output.note(f"there is more: these are the last {count}; raise --limit to see older ones")


async def _grouped(engine: Engine, chosen: Filter, most: int) -> Failures:
    given = {name: value for name, value in chosen.arguments.items() if name not in ("order_by", "namespace")}
    if "namespace" in chosen.arguments:
        given["namespaces"] = [chosen.arguments["namespace"]]
    return await engine.list_failures(**given, most=min(most, 50_000), limit=1000)


def _show(found: Failures, *, as_json: bool, wide: bool) -> None:
    if as_json:
        _output.document(found)
        return
    if found.groups:
        _output.table(
            [
                Column("COUNT"), Column("KIND", cut=12), Column("STATE"), Column("LAST", drop=1),
                Column("FAILURE", cut=24), Column("EXAMPLE"),
            ],
            [
                (
                    one.count, one.execution_kind, one.public_state, one.last_ended_at,
                    ": ".join(filter(None, (one.error_type, one.message))), one.last_execution_id,
                )
                for one in found.groups
            ],
            wide=wide,
        )  # fmt: skip


async def stopped_count(engine: Engine) -> str:
    """How many executions changed code stopped, in words; empty if there is none."""
    page = await engine.find_executions(stopped=True, limit=1000)
    count = len(page.items)
    if not count:
        return ""
    return f"{count:,}{' or more' if page.next_cursor else ''} execution{'s' if count > 1 else ''}"


async def _find(
    engine: Engine, wanted: Filter, most: int, codecs: Codecs | None
) -> tuple[list[tuple[ExecutionInfo, str]], bool]:
    found: list[tuple[ExecutionInfo, str]] = []
    async for page in wanted.pages(engine, size=min(most, 500)):
        if page.items:
            outcomes = await engine.read_outcomes([one.execution_id for one in page.items])
            found += [
                (one, _why(outcomes.get(one.execution_id), codecs, one.execution_id) or _stopped(one, codecs))
                for one in page.items
            ]
        if len(found) >= most:
            return found[:most], len(found) > most or page.next_cursor is not None
    return found, False


def _why(outcome: Outcome | None, codecs: Codecs | None, execution_id: ExecutionId) -> str:
    if outcome is None:
        return ""
    text = outcome.failure_reason or outcome.cancellation_reason
    return _output.failure_line(_output.opened(text, codecs, execution_id))


def _stopped(one: ExecutionInfo, codecs: Codecs | None) -> str:
    if one.completed_at:
        return ""
    return _output.failure_line(_output.opened(one.blocking_detail, codecs, one.execution_id))


def _list(
    found: list[tuple[ExecutionInfo, str]], *, is_complete: bool, as_json: bool, wide: bool, are_stopped: bool
) -> None:
    if as_json:
        items = [{**json_form.to_json(one), "failure": why} for one, why in found]
        _output.document({"items": items, "is_complete": is_complete})
        return
    if found and are_stopped:
        _output.table(
            [Column("ID"), Column("KIND", cut=12), Column("LANE", cut=7, drop=1), Column("WHY", folds=True)],
            [(one.execution_id, one.execution_kind, one.lane_id, why) for one, why in found],
            wide=wide,
        )
    elif found:
        _output.table(
            [
                Column("ID"), Column("STATE"), Column("KIND", cut=12), Column("LANE", cut=7, drop=3),
                Column("ENDED", drop=1), Column("ATTEMPTS", drop=2), Column("FAILURE", cut=28),
            ],
            [
                (
                    one.execution_id, one.public_state, one.execution_kind, one.lane_id, one.completed_at,
                    one.current_attempt_index + 1 if one.started_at else 0,
                    why if wide else _output.without_module(why),
                )
                for one, why in found
            ],
            wide=wide,
        )  # fmt: skip


def _summarise(
    found: list[tuple[ExecutionInfo, str]], *, is_complete: bool, as_json: bool, wide: bool, are_stopped: bool
) -> None:
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one, why in found:
        key = (one.execution_kind, one.public_state.value, why)
        group = groups.setdefault(
            key,
            {
                "execution_kind": key[0],
                "public_state": key[1],
                "error_type": None,
                "message": why,
                "count": 0,
                "last_ended_at": None,
                "last_execution_id": one.execution_id,
                "last_text": why,
            },
        )
        group["count"] += 1
        ended, last = one.completed_at, group["last_ended_at"]
        if isinstance(ended, datetime) and (last is None or ended > last):
            group["last_ended_at"] = ended
            group["last_execution_id"] = one.execution_id
    ordered = sorted(groups.values(), key=lambda group: -group["count"])
    if as_json:
        _output.document({"groups": ordered, "examined": len(found), "is_complete": is_complete})
        return
    if ordered and are_stopped:
        _output.table(
            [Column("COUNT"), Column("KIND", cut=12), Column("WHY", folds=True), Column("EXAMPLE")],
            [
                (group["count"], group["execution_kind"], group["message"], group["last_execution_id"])
                for group in ordered
            ],
            wide=wide,
        )
    elif ordered:
        _output.table(
            [
                Column("COUNT"), Column("KIND", cut=12), Column("STATE"), Column("LAST", drop=1),
                Column("FAILURE", cut=24), Column("EXAMPLE"),
            ],
            [
                (
                    group["count"], group["execution_kind"], group["public_state"], group["last_ended_at"],
                    group["message"], group["last_execution_id"],
                )
                for group in ordered
            ],
            wide=wide,
        )  # fmt: skip
