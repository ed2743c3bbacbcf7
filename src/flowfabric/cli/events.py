"""`flowfabric events`: read and follow the event log."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output, _waiting
from flowfabric.cli._database import ask, resolve, resolve_flow
from flowfabric.cli._options import Dsn, Json, Namespace, parse_moment, parse_pair
from flowfabric.contracts import json_form
from flowfabric.errors import InvalidInput, StreamDisconnected

if TYPE_CHECKING:
    from datetime import datetime

    from flowfabric.engine import Engine
    from flowfabric.values.event import Event, EventCursor, EventFilter

_SINCE = timedelta(minutes=15)
_OPTIONS = {  # by the argument that the library names
    "cursor": "--after",
    "families": "--family",
    "filter.namespace": "--namespace",
    "filter.instance_tag": "--tag",
    "filter.kind": "--kind",
}


def events(
    family: Annotated[
        list[str] | None,
        typer.Option(
            "--family",
            "-f",
            metavar="NAME",
            help="Only this family: lease, completion, operator, signal or worker.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new events, until interrupted.")] = False,
    after: Annotated[
        str | None,
        typer.Option(
            "--after", metavar="CURSOR", help="Continue after this cursor of --json; 0: all.", show_default=False
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Events at or after this time, or this long ago (90s, 15m). Default: 15m; with --follow: now.",
            show_default=False,
        ),
    ] = None,
    namespace: Namespace = None,
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="KEY=VALUE", help="Only with this tag.", show_default=False)
    ] = None,
    flow: Annotated[
        str | None, typer.Option("--flow", metavar="ID", help="Only of this flow.", show_default=False)
    ] = None,
    execution: Annotated[
        str | None, typer.Option("--execution", metavar="ID", help="Only of this execution.", show_default=False)
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", "-k", metavar="TASK", help="Only of this task.", show_default=False)
    ] = None,
    heartbeats: Annotated[bool, typer.Option("--heartbeats", help="Include heartbeats of workers.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Print events of the log, oldest first: ends, leases, signals, what operators did, workers."""
    if after is not None and since is not None:
        raise InvalidInput("both are given", field="--after", allowed="--after or --since")
    begin = None if since is None else parse_moment(since, "--since")

    async def work(engine: Engine) -> None:
        from datetime import UTC, datetime  # noqa: PLC0415

        from flowfabric.engine.events import choice_of  # noqa: PLC0415
        from flowfabric.values.event import Checkpoint, EventCursor, EventFilter  # noqa: PLC0415

        chosen = EventFilter(
            namespace=namespace,
            instance_tag=None if tag is None else parse_pair(tag, "--tag"),
            flow_id=None if flow is None else await resolve_flow(engine, flow, "--flow"),
            execution_id=None if execution is None else await resolve(engine, execution, "--execution"),
            kind=kind,
        )
        try:
            choice_of(family, chosen)
            start: EventCursor | None = None if after is None else EventCursor.parse(after)
        except InvalidInput as error:
            option = _OPTIONS.get(error.field or "", error.field)
            raise InvalidInput(error.problem, field=option, allowed=error.allowed) from None
        first: datetime | None = begin
        if start is None and not (follow and begin is None):
            if first is None:
                first = datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC) - _SINCE
            start = await engine.seek_events(first)
        page = _Page(as_json=json, first=first, heartbeats=heartbeats)
        if not follow:
            assert start is not None
            await _print_stored(engine, family, chosen, start, page)
            return
        async with await engine.follow(family, after=start, filter=chosen, heartbeats=heartbeats) as subscription:  # type: ignore[arg-type]  # checked there
            try:
                async for item in subscription:
                    if not isinstance(item, Checkpoint):
                        page.show(item)
            except (asyncio.CancelledError, StreamDisconnected):
                page.end(subscription.cursor)
                raise

    ask(dsn, work)


async def _print_stored(
    engine: Engine, families: list[str] | None, chosen: EventFilter, start: EventCursor, page: _Page
) -> None:
    """Print what is in the log now."""
    end = (await engine.count_events()).cursor
    cursor = start
    while True:  # once at least: a wrong cursor is refused
        found = await engine.read_events(family=families, after=cursor, filter=chosen)
        for event in found.items:
            page.show(event)
        is_done = found.next_cursor is None or found.next_cursor == cursor or found.next_cursor.position >= end.position
        cursor = found.next_cursor or cursor
        if is_done:
            break
    page.end(cursor)


class _Page:
    """Prints events as lines, for people or for programs."""

    def __init__(self, *, as_json: bool, first: datetime | None, heartbeats: bool) -> None:
        self._as_json = as_json
        self._first = first
        self._heartbeats = heartbeats
        self._count = 0

    def show(self, event: Event) -> None:
        if self._first is not None and event.occurred_at < self._first:
            return
        if event.worker_type == "heartbeat" and not self._heartbeats:
            return
        self._count += 1
        if self._as_json:
            _output.line({**json_form.to_json(event), "cursor": str(event.cursor), "families": list(event.families)})
        else:
            _output.say("  ".join(part for part in _parts(event) if part))
        sys.stdout.flush()

    def end(self, cursor: EventCursor) -> None:
        if not self._as_json:
            _output.note(f"{self._count:,} event{'' if self._count == 1 else 's'}; continue with --after {cursor}")


def _parts(event: Event) -> list[str]:
    """One event in one line: when, what, of what, and why."""
    words = [word for word in (event.outcome, event.operator_type) if word]
    if event.signal_effect:
        words.append("signal")
    if event.worker_type:
        words.append(f"worker {event.worker_type}")
    if not words and event.lease_type:
        words = [f"lease {event.lease_type}"]
    subject: Any = event.execution_id or event.flow_id or event.worker_instance_id or _limit_of(event)
    reason = event.reason if event.outcome is None else None
    if event.signal_effect:
        reason = _waiting.effect(event.signal_effect)
    who = (
        event.worker_instance_id
        if event.worker_type is None and event.lease_type in ("acquired", "reclaimed")
        else None
    )
    return [
        _output.when(event.occurred_at),
        f"{' '.join(words):<21}",
        str(subject),
        _output.printable(event.execution_kind or ""),
        _output.printable(who or ""),
        _output.first_line(reason),
        f"namespace {_output.printable(event.namespace)}" if event.namespace else "",
    ]


def _limit_of(event: Event) -> str:
    """The name of the budget or quota that an event is about."""
    details = event.details or {}
    return _output.printable(
        str(details.get("name") or details.get("budget_id") or details.get("quota_policy_id") or "")
    )
