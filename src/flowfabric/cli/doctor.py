"""`flowfabric doctor`: check this machine and the database, with advice for every problem."""

from __future__ import annotations

import asyncio
import platform
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import address, embedded, is_embedded
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._program import CANNOT, NO
from flowfabric.errors import ConnectionFailed

if TYPE_CHECKING:
    from flowfabric._postgres.diagnosis import Finding


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
        _output.table(
            ["CHECK", "VERDICT", "FOUND", "WHAT TO DO"],
            [(one.check, one.verdict, one.detail, one.advice) for one in found],
        )
    if code:
        raise typer.Exit(code)


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


def _advice(error: ConnectionFailed) -> str:
    return {
        "unreachable": "check host, port and firewall in the DSN, and that the server runs",
        "wrong_password": "check user and password in the DSN",
        "database_missing": "create the database, or name another in the DSN",
    }.get(error.kind, "")
