"""`flowfabric consumers`: durable consumers of the event log, how far behind they are; move or delete one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask
from flowfabric.cli._options import Dsn, Json, Wide, Yes, parse_moment
from flowfabric.cli._output import Column
from flowfabric.cli._program import Group, confirm, default_of
from flowfabric.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.consumer import ConsumerRecord

app = typer.Typer(
    cls=Group, help="Show durable consumers of the event log; move or delete one.", invoke_without_command=True
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the consumer.", show_default=False)]


@app.command("list")
@default_of(app)
def list_(wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """List the consumers: their cursor, how many events follow, for how long they wait, which process works."""

    async def work(engine: Engine) -> None:
        found = await engine.list_consumers()
        if json:
            _output.document({"consumers": found})
            return
        if not found:
            _output.note("there is no consumer; `ff.Consumer(name)` makes one")
            return
        now = datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC)
        _output.table(
            ["NAME", "TAKES", "CURSOR", "LAG", "BEHIND", "HANDLED", "WORKS", Column("FAILURE")],
            [
                (
                    one.name,
                    " ".join((*one.families, *(f"{key}={value}" for key, value in one.filter.items()))),
                    one.cursor,
                    one.lag,
                    _behind(one, now),
                    one.handled,
                    "none" if one.instance is None else f"{one.host}:{one.pid}",
                    _output.first_line(one.failure),
                )
                for one in found
            ],
            wide=wide,
        )
        for one in found:
            if one.is_expired:
                _output.note(
                    f"{_output.printable(one.name)}: events after its cursor were removed;"
                    f" `flowfabric consumers set {_output.printable(one.name)} --to start` continues with the oldest"
                )

    ask(dsn, work)


@app.command("set")
def set_(
    name: Name,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="A cursor, `start` (the oldest event), `end`, or a time or an age (2h): before the events since then.",
            show_default=False,
        ),
    ],
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Move a consumer: it acts again on events that follow, and never on those it skips."""

    async def work(engine: Engine) -> None:
        from flowfabric.values.event import EventCursor  # noqa: PLC0415

        if to == "start":
            cursor: EventCursor | None = await engine.seek_events(datetime(1970, 1, 2, tzinfo=UTC))
        elif to == "end":
            cursor = None
        else:
            try:
                cursor = EventCursor.parse(to)
            except InvalidInput:
                try:
                    moment = parse_moment(to, "--to")
                except InvalidInput as error:
                    allowed = f"a cursor, start, end, {error.allowed}"
                    raise InvalidInput(error.problem, field="--to", allowed=allowed) from None
                cursor = await engine.seek_events(moment)
        confirm(f"move {_output.printable(name)} to {to}?", yes=yes)
        await engine.set_consumer(name, cursor)
        found = next(one for one in await engine.list_consumers() if one.name == name)
        if json:
            _output.document({"name": name, "cursor": str(found.cursor), "lag": found.lag})
        else:
            _output.say(f"{_output.printable(name)} is at {found.cursor}; {found.lag:,} events follow")

    ask(dsn, work)


@app.command()
def delete(name: Name, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Delete a consumer and its cursor; if it runs again it starts over."""

    async def work(engine: Engine) -> None:
        if name not in {one.name for one in await engine.list_consumers()}:
            raise NotFound("consumer", name)
        confirm(f"delete {_output.printable(name)} and its cursor?", yes=yes)
        await engine.delete_consumer(name)
        if json:
            _output.document({"name": name, "deleted": True})
        else:
            _output.say(f"deleted {_output.printable(name)}")

    ask(dsn, work)


def _behind(one: ConsumerRecord, now: datetime) -> str:
    if one.is_expired:
        return "expired"
    return "" if one.behind_since is None else _output.duration(max(now - one.behind_since, now - now))
