"""`bind` and `unbind` of `flowfabric budgets` and `quotas`: which submissions get a limit without naming it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask
from flowfabric.cli._grouped import grouped
from flowfabric.cli._options import Dsn, Json, parse_pair
from flowfabric.cli._program import NO, exit_with
from flowfabric.values.binding import Bind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from uuid import UUID

    from flowfabric.engine import Engine
    from flowfabric.values.binding import Binding

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Its name.", autocompletion=_completion.limit_of_group, show_default=False)
]
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


def _scope(lane: str | None, kind: str | None, namespace: str | None, tag: str | None, flow: str | None) -> Bind:
    pair = None if tag is None else parse_pair(tag, "--tag")
    return Bind(lane=lane, kind=kind, namespace=namespace, tag=pair, flow=flow)


_scoped = grouped("where", {"lane": Lane, "kind": Kind, "namespace": Namespace, "tag": Tag, "flow": Flow}, _scope)


def add_commands(app: typer.Typer, noun: str, find: Callable[[Engine, str], Awaitable[UUID]]) -> None:
    """Add `bind` and `unbind` to the commands of a limit; `find` returns the limit of a name."""

    @app.command(help=f"Give the {noun} to all submissions from now on that match every option.")
    @_scoped
    def bind(name: Name, *, where: Bind, json: Json = False, dsn: Dsn = None) -> None:
        async def work(engine: Engine) -> None:
            is_new = await engine.bind_limit(await find(engine, name), where)
            words = "is bound to" if is_new else "was already bound to"
            if json:
                _output.document({"name": name, "bind": where, "is_new": is_new})
            else:
                _output.say(f"{_output.printable(name)} {words} {_output.printable(str(where))}")

        ask(dsn, work)

    @app.command(help=f"Remove a binding with exactly these options. Existing executions keep the {noun}.")
    @_scoped
    def unbind(name: Name, *, where: Bind, json: Json = False, dsn: Dsn = None) -> None:
        async def work(engine: Engine) -> int:
            existed = await engine.unbind_limit(await find(engine, name), where)
            if json:
                _output.document({"name": name, "bind": where, "existed": existed})
            elif existed:
                _output.say(f"{_output.printable(name)} is no longer bound to {_output.printable(str(where))}")
            else:
                _output.note(f"{_output.printable(name)} is not bound to {_output.printable(str(where))}")
            return 0 if existed else NO

        exit_with(ask(dsn, work))


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
