"""`flowfabric flow`: draw, list, export, follow, wait for, cancel, replay and delete flows."""

from __future__ import annotations

import typer

from flowfabric.cli._options import Dsn, Json, Wide
from flowfabric.cli._program import Group
from flowfabric.cli.flow import cancel, delete, export, ls, replay, show, tail, wait

app = typer.Typer(
    cls=Group,
    help="Draw, list, export, follow, wait for, cancel, replay and delete flows.",
    invoke_without_command=True,
)


@app.callback()
def _default(ctx: typer.Context, wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """Draw, list, export, follow, wait for, cancel, replay and delete flows. Without a command: ls."""
    if ctx.invoked_subcommand is None:
        ls.ls(wide=wide, json=json, dsn=dsn)


for _command in (
    ls.ls, show.show, export.export, tail.tail, wait.wait, cancel.cancel, replay.replay, delete.delete,
):  # fmt: skip
    app.command()(_command)
