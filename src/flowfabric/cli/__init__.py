"""The command line. One module per command group; this one holds what they share: the program and its errors.

Exit codes: 0 done, 1 the answer to a question was no, 2 it could not be done, with one line on stderr that says why.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import flowfabric
from flowfabric.cli import migrate
from flowfabric.errors import FlowFabricError

__all__ = ["app", "main"]

app = typer.Typer(
    name="flowfabric",
    help="Durable execution on plain Postgres.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("migrate")(migrate.migrate)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flowfabric {flowfabric.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Durable execution on plain Postgres."""


def main() -> None:
    """Run the program with the arguments of this process."""
    try:
        app()
    except FlowFabricError as error:
        typer.echo(f"flowfabric: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
