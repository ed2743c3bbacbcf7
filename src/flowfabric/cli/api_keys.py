"""`flowfabric api-keys`: create, list, rotate and revoke the keys with which programs call the server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask
from flowfabric.cli._options import Dsn, Json, Wide, Yes, parse_duration, parse_time
from flowfabric.cli._output import Column
from flowfabric.cli._program import Group, confirm, default_of
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.api_key import Scope
from flowfabric.values.page import everything

if TYPE_CHECKING:
    from datetime import timedelta

    from flowfabric.engine import Engine
    from flowfabric.values.api_key import ApiKey, CreatedApiKey

app = typer.Typer(
    cls=Group, help="Create, list, rotate and revoke the keys of the server's callers.", invoke_without_command=True
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The key: its id or its name.", show_default=False)]


@app.command()
@default_of(app)
def ls(
    show_all: Annotated[bool, typer.Option("--all", help="Also keys that were revoked or have expired.")] = False,
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the keys, newest first. Secrets are never shown."""

    async def work(engine: Engine) -> None:
        found = await everything(
            lambda after, size: engine.list_api_keys(usable=not show_all, cursor=after, limit=size)
        )
        if json:
            _output.document({"items": found})
            return
        if not found:
            _output.note("there is no API key; `flowfabric api-keys create NAME --scope admin` makes one")
            return
        now = datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC)
        _output.table(
            [
                Column("ID"), Column("NAME", cut=16), Column("SCOPES", cut=12), Column("NAMESPACES", cut=10, drop=2),
                Column("PAYLOADS", drop=4), Column("LAST USE", drop=3), Column("EXPIRES", drop=1),
                *([Column("STATE")] if show_all else []),
            ],
            [
                (
                    one.key_id, one.name, ", ".join(one.scopes), _namespaces(one),
                    "hidden" if one.hides_payloads else "shown", one.last_used_at, one.expires_at,
                    *([_state(one, now)] if show_all else []),
                )
                for one in found
            ],
            wide=wide,
        )  # fmt: skip

    ask(dsn, work)


@app.command()
def create(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Who will use it, as the audit log and approvals show it.", show_default=False
        ),
    ],
    scope: Annotated[
        list[Scope],
        typer.Option(
            "--scope",
            "-s",
            metavar="SCOPE",
            help="What it may do: read, submit, operate, worker or admin (all of them).",
            show_default=False,
        ),
    ],
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="It reaches only these namespaces.", show_default=False),
    ] = None,
    hide_payloads: Annotated[
        bool,
        typer.Option("--hide-payloads", help="Its responses have no inputs, results, steps, frames or tracebacks."),
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="WHEN", help="When it stops working: 90d, or a time.", show_default=False),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Create a key and print it, this once: the database stores only a digest of its secret."""
    until = None if expires is None else _until(expires)

    async def work(engine: Engine) -> None:
        made = await engine.create_api_key(
            name, scope, namespaces=namespace or None, hides_payloads=hide_payloads, expires=until
        )
        _show(made, as_json=json, words="store it now: it is not shown again")

    ask(dsn, work)


@app.command()
def rotate(
    key: Key,
    grace: Annotated[
        str, typer.Option("--grace", metavar="DURATION", help="How long the old secret still works.")
    ] = "1h",
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Give a key another secret and print it, this once. Its id, name and rights stay."""
    span = parse_duration(grace, "--grace")

    async def work(engine: Engine) -> None:
        found = await _named(engine, key)
        left = f"in {_output.duration(span)}" if span else "at once"
        confirm(f"give {_output.printable(found.name)} another secret? The one before stops working {left}.", yes=yes)
        made = await engine.rotate_api_key(found.key_id, grace=span)
        _show(made, as_json=json, words=f"store it now: it is not shown again; the old key stops working {left}")

    ask(dsn, work)


@app.command()
def revoke(key: Key, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Make a key stop working for good, on every server within 5 seconds."""

    async def work(engine: Engine) -> None:
        found = await _named(engine, key)
        name = _output.printable(found.name)
        confirm(f"revoke the key of {name}? It cannot be undone.", yes=yes)
        await engine.revoke_api_key(found.key_id)
        if json:
            _output.document({"key_id": found.key_id, "name": found.name, "done": "revoked"})
        else:
            _output.say(f"the key of {name} is revoked; servers refuse it within 5 seconds")

    ask(dsn, work)


async def _named(engine: Engine, text: str) -> ApiKey:
    """The key of this id, or the usable key of this name."""
    found = await everything(lambda after, size: engine.list_api_keys(cursor=after, limit=size))
    for one in found:
        if one.key_id == text:
            return one
    for one in found:
        if one.name == text and one.revoked_at is None:
            return one
    raise NotFound("API key", text)


def _show(made: CreatedApiKey, *, as_json: bool, words: str) -> None:
    """Print a key: alone on standard output, so that a script can store it."""
    if as_json:
        _output.document({"key_id": made.key_id, "name": made.name, "key": made.key.reveal()})
    else:
        _output.say(made.key.reveal())
        _output.note(words)


def _until(text: str) -> datetime | timedelta:
    try:
        return parse_duration(text, "--expires")
    except InvalidInput:
        try:
            return parse_time(text, "--expires")
        except InvalidInput:
            raise InvalidInput(
                f"got {text!r}", field="--expires", allowed="a duration (90d) or a time (2030-05-01T12:00:00Z)"
            ) from None


def _namespaces(one: ApiKey) -> str:
    return "all" if one.namespaces is None else ", ".join(name or "(default)" for name in one.namespaces)


def _state(one: ApiKey, now: datetime) -> str:
    if one.revoked_at is not None:
        return "revoked"
    return "expired" if one.expires_at is not None and one.expires_at <= now else "usable"
