"""`flowfabric schedules`: show, pause, resume, run and delete schedules."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, no_such
from flowfabric.cli._options import Dsn, Json, Wide, Yes
from flowfabric.cli._output import Column
from flowfabric.cli._program import Group, confirm, default_of
from flowfabric.errors import NotFound
from flowfabric.values.page import everything

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowfabric.engine import Engine
    from flowfabric.values.schedule import Schedule

app = typer.Typer(cls=Group, help="Show schedules; pause, resume, delete or run them.", invoke_without_command=True)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The schedule.", autocompletion=_completion.schedules, show_default=False),
]


@app.command("list")
@default_of(app)
def list_(wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """List all schedules, with their next and last times."""

    async def work(engine: Engine) -> None:
        found = await _all(engine)
        if json:
            _output.document({"schedules": found})
        elif found:
            overlaps = any("overlap" in one.options for one in found)  # most schedules have none
            _output.table(
                [
                    Column("NAME", cut=14), Column("KIND", cut=8, drop=3), Column("TIMING", cut=34),
                    Column("CATCH UP", drop=5), *[Column("OVERLAP", drop=6)] * overlaps, Column("STATE"),
                    Column("NEXT"), Column("LAST", drop=2), Column("ID", drop=4),
                ],
                [
                    (
                        one.name, one.kind, timing(one.timing), one.catch_up,
                        *[one.options.get("overlap", "")] * overlaps, "paused" if one.paused else "active",
                        None if one.paused else one.next_at, one.last_at, one.last_execution_id,
                    )
                    for one in found
                ],
                wide=wide,
            )  # fmt: skip
        else:
            _output.note("there are no schedules")

    ask(dsn, work)


def timing(value: dict[str, Any]) -> str:
    """When it fires, as text."""
    words = []
    for name, item in value.items():
        if name.endswith("_ms") and isinstance(item, int):
            words.append(f"{name.removesuffix('_ms')} {_span(item)}")
        elif item is not None:
            words.append(str(item) if name == "timezone" else f"{name} {_output.when(_moment(item)) or item}")
    return ", ".join(words)


def _span(milliseconds: int) -> str:
    """A duration; whole seconds without a fraction."""
    seconds = milliseconds // 1000
    return f"{seconds} s" if seconds * 1000 == milliseconds and seconds < 60 else _output.seconds(milliseconds / 1000)


def _moment(item: object) -> datetime | None:
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(item) if isinstance(item, str) and "T" in item else None
    return None


@app.command()
def pause(name: Name, json: Json = False, dsn: Dsn = None) -> None:
    """Pause a schedule until it is resumed."""
    _change(name, lambda engine: engine.pause_schedule, "paused", json=json, dsn=dsn)


@app.command()
def resume(name: Name, json: Json = False, dsn: Dsn = None) -> None:
    """Resume a schedule. It catches up on missed times as its catch-up setting says."""
    _change(name, lambda engine: engine.resume_schedule, "active", json=json, dsn=dsn)


@app.command()
def run(name: Name, json: Json = False, dsn: Dsn = None) -> None:
    """Submit its task once, now. Its regular times do not change."""

    async def work(engine: Engine) -> None:
        from flowfabric.worker.schedules import run_now  # noqa: PLC0415

        try:
            made = await run_now(engine, name)
        except NotFound:
            raise await _unknown(engine, name) from None
        if json:
            _output.document({"name": name, "execution_id": made})
        else:
            _output.say(str(made))

    ask(dsn, work)


@app.command()
def delete(name: Name, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Delete a schedule. Executions it has created stay."""
    _change(name, lambda engine: engine.delete_schedule, "deleted", json=json, dsn=dsn, yes=yes, ask_first=True)


def _change(
    name: str,
    choose: Callable[[Engine], Callable[[str], Awaitable[None]]],
    state: str,
    *,
    json: bool,
    dsn: str | None,
    yes: bool = False,
    ask_first: bool = False,
) -> None:
    async def work(engine: Engine) -> None:
        await _existing(engine, name)
        if ask_first:
            confirm(f"delete schedule {_output.printable(name)}?", yes=yes)
        try:
            await choose(engine)(name)
        except NotFound:
            raise await _unknown(engine, name) from None
        if json:
            _output.document({"name": name, "state": state})
        else:
            _output.say(f"{_output.printable(name)} is {state}")

    ask(dsn, work)


async def _all(engine: Engine) -> list[Schedule]:
    return await everything(lambda after, size: engine.list_schedules(cursor=after, limit=size))


async def _existing(engine: Engine, name: str) -> Schedule:
    found = await engine.read_schedule(name)
    if found is None:
        raise await _unknown(engine, name)
    return found


async def _unknown(engine: Engine, name: str) -> NotFound:
    return no_such("schedule", name, [one.name for one in await _all(engine)])
