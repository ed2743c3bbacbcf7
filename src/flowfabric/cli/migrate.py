"""`flowfabric migrate`: create or update the schema, or check its version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import address
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._program import NO
from flowfabric.errors import ConnectionFailed

if TYPE_CHECKING:
    from flowfabric._postgres.build import Build


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
    force: Annotated[
        bool, typer.Option("--force", help="Also replace functions that are newer than this package's.")
    ] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Create or update the schema of the database. Safe to run at any time, also concurrently.

    The options for roles grant functions, never tables. They can be repeated; later runs grant the same again.
    """
    from flowfabric.engine.service import migrate_database, schema_build  # noqa: PLC0415

    with address(dsn) as chosen:
        if check:
            _tell(*asyncio.run(schema_build(chosen)), as_json=json)
            return
        with _output.busy("migrating"):
            done = asyncio.run(
                migrate_database(
                    chosen,
                    read_roles=read_role or (),
                    submit_roles=submit_role or (),
                    worker_roles=worker_role or (),
                    operate_roles=operate_role or (),
                    force=force,
                )
            )
    if json:
        _output.document(
            {
                "schema_version": done.version,
                "functions_version": done.functions,
                "applied": done.applied,
                "replaced": done.replaced,
            }
        )
        return
    if not done.replaced:
        _output.say(
            f"nothing was changed: the functions are of version {done.functions}, newer than this package's, "
            "and serve its processes too"
        )
        return
    applied = ", ".join(done.applied) or "no new steps"
    _output.say(f"the schema is at version {done.version} ({applied}; functions of version {done.functions})")
    given = {"read": read_role, "submit": submit_role, "run workers": worker_role, "operate": operate_role}
    for may, names in given.items():
        for name in names or ():
            _output.say(f"{_output.printable(name)} may {may}")


def _tell(version: int, build: Build | None, *, as_json: bool) -> None:
    """Print the schema's version. Exits with 1 unless this package can work with it."""
    from flowfabric._postgres.build import THIS, check_build  # noqa: PLC0415
    from flowfabric._postgres.migrate import SCHEMA_VERSION  # noqa: PLC0415

    problem = None
    if version == 0:
        problem = ConnectionFailed("schema_missing")
    elif version < SCHEMA_VERSION or build is None:
        problem = ConnectionFailed(
            "schema_older", f"the schema is version {version}, this package needs {SCHEMA_VERSION}"
        )
    else:
        try:
            check_build(build)
        except ConnectionFailed as error:
            problem = error
    if as_json:
        _output.document(
            {
                "schema_version": version,
                "functions_version": None if build is None else build.version,
                "needed": SCHEMA_VERSION,
                "functions_needed": THIS.version,
                "is_current": problem is None,
            }
        )
    elif problem is not None:
        _output.say(str(problem))
    elif build is not None and build.version > THIS.version:
        _output.say(f"the functions are of version {build.version}, newer than this package's, and serve its processes")
    else:
        _output.say(f"the schema is at version {version}, which is current")
    if problem is not None:
        raise typer.Exit(NO)
