"""`flowfabric flow`: draw, list, export, follow, wait for, cancel, replay and delete flows."""

from __future__ import annotations

import typer

from flowfabric.cli._program import Group, default_of
from flowfabric.cli.flow import cancel, delete, export, ls, replay, show, tail, wait

app = typer.Typer(
    cls=Group,
    help="Draw, list, export, follow, wait for, cancel, replay and delete flows.",
    invoke_without_command=True,
)


for _command in (
    ls.ls, show.show, export.export, tail.tail, wait.wait, cancel.cancel, replay.replay, delete.delete,
):  # fmt: skip
    app.command()(_command)
default_of(app)(ls.ls)
