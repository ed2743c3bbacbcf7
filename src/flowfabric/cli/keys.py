"""`flowfabric keys`: show and rotate the keys that sign waitpoint tokens."""

from __future__ import annotations

import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask
from flowfabric.cli._options import Dsn, Json, Yes, parse_duration
from flowfabric.cli._output import Column
from flowfabric.cli._program import Group, confirm
from flowfabric.errors import InvalidInput

if TYPE_CHECKING:
    from flowfabric.engine import Engine

app = typer.Typer(cls=Group, help="Show the keys that sign waitpoint tokens; rotate them.", invoke_without_command=True)

_MOST_READ = 4096


@app.callback()
def _default(ctx: typer.Context, json: Json = False, dsn: Dsn = None) -> None:
    """Show the keys that sign waitpoint tokens; rotate them. Without a command: list. Secrets are never shown."""
    if ctx.invoked_subcommand is None:
        list_(json=json, dsn=dsn)


@app.command("list")
def list_(json: Json = False, dsn: Dsn = None) -> None:
    """List the key that signs, and older keys whose tokens are still valid, until when."""

    async def work(engine: Engine) -> None:
        found = await engine.list_waitpoint_hmac_kids()
        if json:
            _output.document(found)
            return
        rows = [] if found.current_kid is None else [(found.current_kid, "current", None)]
        rows += [(one.kid, "verifying", one.expires_at) for one in found.verifying]  # type: ignore[misc]
        if rows:
            _output.table([Column("KEY", cut=20), "STATE", "UNTIL"], rows)
        else:
            _output.note("there is no key; `flowfabric migrate` creates one")

    ask(dsn, work)


@app.command()
def rotate(
    grace: Annotated[
        str,
        typer.Option("--grace", metavar="DURATION", help="How long tokens signed with the old key stay valid."),
    ] = "1d",
    kid: Annotated[
        str | None,
        typer.Option(
            "--kid",
            metavar="NAME",
            help="Name of the new key, never used before. Default: generated.",
            show_default=False,
        ),
    ] = None,
    secret_file: Annotated[
        str | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            help="Read the secret, 64 hexadecimal digits, from this file, or - for standard input."
            " Default: random, never shown.",
            show_default=False,
        ),
    ] = None,
    secret_env: Annotated[
        str | None,
        typer.Option(
            "--secret-env", metavar="NAME", help="Read the secret from this environment variable.", show_default=False
        ),
    ] = None,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Sign with a new key from now on. Earlier links expire after --grace; approving needs no token."""
    span = parse_duration(grace, "--grace")
    secret = _secret(secret_file, secret_env)
    name = f"k{datetime.now(UTC):%Y%m%d}-{secrets.token_hex(4)}" if kid is None else kid

    async def work(engine: Engine) -> None:
        from flowfabric.errors import Conflict  # noqa: PLC0415
        from flowfabric.values.keystore import RotationNoop  # noqa: PLC0415

        left = _output.duration(span)
        confirm(f"sign with a new key? Tokens and links signed with the current one stay valid for {left}.", yes=yes)
        (done,) = await engine.rotate_waitpoint_hmac_secret_all(name, secret, span)
        result = done.result
        if isinstance(result, Conflict):
            raise result
        is_new = not isinstance(result, RotationNoop)
        previous = None if isinstance(result, RotationNoop) else result.previous_kid
        if json:
            _output.document({"kid": name, "is_new": is_new, "previous_kid": previous})
        elif not is_new:
            _output.say(f"{name} is already the current key; nothing changed")
        else:
            _output.say(
                f"{name} signs from now on"
                + (f"; tokens of {_output.printable(previous)} stay valid for {left}" if previous else "")
            )

    ask(dsn, work)


def _secret(file: str | None, variable: str | None) -> str:
    """The secret from the file or the variable, else a random one. Never an argument: other users can see those."""
    if file is not None and variable is not None:
        raise InvalidInput("given with --secret-file", field="--secret-env", allowed="one of the two")
    if variable is not None:
        found = os.environ.get(variable, "")
        if not found:
            raise InvalidInput(f"{variable} is not set", field="--secret-env", allowed="a variable that is")
        return found.strip()
    if file is None:
        return secrets.token_hex(32)
    if file == "-":
        data = sys.stdin.buffer.read(_MOST_READ)
    else:
        with Path(file).open("rb") as opened:
            data = opened.read(_MOST_READ)
    return data.decode("ascii", errors="replace").strip()
