"""`flowfabric flow export`: draw a flow as Mermaid, Graphviz or SVG."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._options import Dsn
from flowfabric.cli.flow._options import Expand, Id
from flowfabric.errors import NotFound

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.flow import FlowGraph


class Format(StrEnum):
    """A format for pictures."""

    MERMAID = "mermaid"
    DOT = "dot"
    SVG = "svg"


_ENDINGS = {
    ".svg": Format.SVG,
    ".dot": Format.DOT,
    ".gv": Format.DOT,
    ".mmd": Format.MERMAID,
    ".mermaid": Format.MERMAID,
}


def export(
    flow: Id,
    language: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="mermaid, dot or svg. Default: from the ending of --out, else mermaid.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Write to this file. Default: standard output.", show_default=False
        ),
    ] = None,
    expand: Expand = False,
    dsn: Dsn = None,
) -> None:
    """Draw the current state of a flow as a Mermaid chart, a Graphviz graph or an SVG picture."""
    from flowfabric import drawing  # noqa: PLC0415

    chosen = language or _ENDINGS.get(out.suffix.lower() if out else "", Format.MERMAID)
    draw = {Format.MERMAID: drawing.to_mermaid, Format.DOT: drawing.to_dot, Format.SVG: drawing.to_svg}[chosen]

    async def work(engine: Engine) -> FlowGraph:
        flow_id = await resolve_flow(engine, flow)
        found = await engine.read_flow_graph(flow_id)
        if found is None:
            raise NotFound("flow", flow_id)
        return found

    # Always UTF-8, whatever the encoding of the output.
    data = draw(ask(dsn, work), fold=None if expand else drawing.FOLD).encode()
    if out is None:
        typer.echo(data, nl=False)
    else:
        out.write_bytes(data)
        _output.note(f"{_output.printable(out)}: {len(data):,} bytes of {chosen.value}")
