"""Options that several commands about flows share."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli import _completion

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The flow: its id, or a unique end or beginning of it.",
        autocompletion=_completion.flows,
        show_default=False,
    ),
]
Expand = Annotated[
    bool, typer.Option("--expand", "-e", help="Draw every node. Default: similar nodes are drawn as one.")
]
