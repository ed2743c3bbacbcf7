"""`bind` and `unbind` of `flowfabric budgets` and `flowfabric quotas`: which submissions get a limit unnamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._options import parse_pair
from flowfabric.cli._program import NO
from flowfabric.values.binding import Bind

if TYPE_CHECKING:
    from uuid import UUID

    from flowfabric.engine import Engine
    from flowfabric.values.binding import Binding

Lane = Annotated[
    str | None,
    typer.Option(
        "--lane", "-l", metavar="LANE", help="Of this lane.", autocompletion=_completion.lanes, show_default=False
    ),
]
Kind = Annotated[
    str | None,
    typer.Option("--kind", "-k", metavar="KIND", help="Of this kind: the name of a task.", show_default=False),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAMESPACE", help="In this namespace.", show_default=False),
]
Tag = Annotated[str | None, typer.Option("--tag", metavar="KEY=VALUE", help="With this tag.", show_default=False)]
Flow = Annotated[
    str | None,
    typer.Option("--flow", metavar="KIND", help="Nodes of flows of this kind.", show_default=False),
]
_SHOWN = 1000


def scope(lane: str | None, kind: str | None, namespace: str | None, tag: str | None, flow: str | None) -> Bind:
    """The scope that options describe."""
    pair = None if tag is None else parse_pair(tag, "--tag")
    return Bind(lane=lane, kind=kind, namespace=namespace, tag=pair, flow=flow)


async def bind(engine: Engine, limit_id: UUID, name: str, where: Bind, *, as_json: bool) -> None:
    """Bind a limit and say so."""
    is_new = await engine.bind_limit(limit_id, where)
    if as_json:
        _output.document({"name": name, "bind": where, "is_new": is_new})
    else:
        words = "is bound to" if is_new else "was already bound to"
        _output.say(f"{_output.printable(name)} {words} {_output.printable(str(where))}")


async def unbind(engine: Engine, limit_id: UUID, name: str, where: Bind, *, as_json: bool) -> int:
    """Remove a binding and say so; fails if there is none."""
    existed = await engine.unbind_limit(limit_id, where)
    if as_json:
        _output.document({"name": name, "bind": where, "existed": existed})
    elif existed:
        _output.say(f"{_output.printable(name)} is no longer bound to {_output.printable(str(where))}")
    else:
        _output.note(f"{_output.printable(name)} is not bound to {_output.printable(str(where))}")
    return 0 if existed else NO


async def bindings(engine: Engine, limit_id: UUID) -> list[Binding]:
    """The bindings of a limit."""
    return list((await engine.list_bindings(limit_id=limit_id, limit=_SHOWN)).items)


def show(found: list[Binding]) -> None:
    """A table of the bindings of a limit."""
    if found:
        _output.heading("Bound to submissions with")
        _output.table(
            ["SCOPE", "DECLARED", "SINCE"],
            [(str(one.bind), "by the app" if one.is_declared else "", one.created_at) for one in found],
        )
