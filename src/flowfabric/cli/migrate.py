"""`flowfabric migrate`: bring a database to the schema this package needs, or tell whether it has it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from flowfabric import settings
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric.engine.service import migrate_database, schema_version
from flowfabric.errors import ConnectionFailed


def migrate(
    dsn: Annotated[
        str | None,
        typer.Option(help="The database. Default: FLOWFABRIC_DSN, else the embedded server.", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 unless the schema is current.")
    ] = False,
    worker_role: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A role that may run workers: it gets the functions and no table."),
    ] = None,
) -> None:
    """Bring the schema of the database up to date. Safe to run at any time and from many places at once."""
    with _database(dsn) as chosen:
        if check:
            _tell(asyncio.run(schema_version(chosen)))
            return
        done = asyncio.run(migrate_database(chosen, worker_roles=tuple(worker_role or ())))
    applied = ", ".join(done.applied) or "no new steps"
    typer.echo(f"the schema is version {done.version} ({applied}; functions replaced)")


def _tell(version: int) -> None:
    """Say how the schema stands; anything but current ends the program with 1."""
    if version == SCHEMA_VERSION:
        typer.echo(f"the schema is version {version}, which is current")
        return
    kind = "schema_missing" if version == 0 else "schema_older" if version < SCHEMA_VERSION else "schema_newer"
    detail = "" if version == 0 else f" (it is version {version}, the package needs {SCHEMA_VERSION})"
    typer.echo(ConnectionFailed.WORDING[kind] + detail)
    raise typer.Exit(1)


@contextlib.contextmanager
def _database(dsn: str | None) -> Iterator[str]:
    """The DSN given or of the environment; else that of the embedded server, held while it is used."""
    if chosen := dsn or settings.load().dsn:
        yield chosen
        return
    try:
        from flowfabric._postgres import embedded  # noqa: PLC0415 - not importable on every platform
    except ImportError as error:
        raise ConnectionFailed(
            "unreachable", f"no embedded server on this platform ({error}); give --dsn or set FLOWFABRIC_DSN"
        ) from error
    server = embedded.start()
    try:
        yield server.dsn
    finally:
        server.release()
