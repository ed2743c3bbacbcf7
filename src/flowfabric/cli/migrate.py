"""`flowfabric migrate`: create or update the schema, or check its version."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import address
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._program import NO
from flowfabric.errors import ConnectionFailed


def migrate(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 unless the schema is current.")
    ] = False,
    read_role: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Let this database role read: lists, executions, flows.")
    ] = None,
    submit_role: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Let this database role submit, and read what it has the id of."),
    ] = None,
    worker_role: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Let this database role run workers.")
    ] = None,
    operate_role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Let this database role do everything but change signing keys and the clock."
        ),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Create or update the schema of the database. Safe to run at any time, also concurrently.

    The options for roles grant functions, never tables. They can be repeated; later runs grant the same again.
    """
    from flowfabric.engine.service import migrate_database, schema_version  # noqa: PLC0415

    with address(dsn) as chosen:
        if check:
            _tell(asyncio.run(schema_version(chosen)), as_json=json)
            return
        with _output.busy("migrating"):
            done = asyncio.run(
                migrate_database(
                    chosen,
                    read_roles=read_role or (),
                    submit_roles=submit_role or (),
                    worker_roles=worker_role or (),
                    operate_roles=operate_role or (),
                )
            )
    if json:
        _output.document({"schema_version": done.version, "applied": done.applied})
        return
    applied = ", ".join(done.applied) or "no new steps"
    _output.say(f"the schema is at version {done.version} ({applied}; functions replaced)")


def _tell(version: int, *, as_json: bool) -> None:
    """Print the schema's version. Exits with 1 unless it is current."""
    from flowfabric._postgres.migrate import SCHEMA_VERSION  # noqa: PLC0415

    is_current = version == SCHEMA_VERSION
    if as_json:
        _output.document({"schema_version": version, "needed": SCHEMA_VERSION, "is_current": is_current})
    elif is_current:
        _output.say(f"the schema is at version {version}, which is current")
    else:
        kind = "schema_missing" if version == 0 else "schema_older" if version < SCHEMA_VERSION else "schema_newer"
        detail = "" if version == 0 else f" (it is at version {version}, the package needs {SCHEMA_VERSION})"
        _output.say(ConnectionFailed.WORDING[kind] + detail)
    if not is_current:
        raise typer.Exit(NO)
