"""Which executions: the filter options of the commands that list or change many, and the filter they make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _completion
from flowfabric.cli._grouped import grouped
from flowfabric.cli._options import Namespace, parse_moment, parse_pair
from flowfabric.cli._pages import PAGE
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.engine.reads import Place
    from flowfabric.values.execution import ExecutionInfo
    from flowfabric.values.page import Page

States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        "-s",
        metavar="STATE",
        help="Only executions in this state.",
        autocompletion=_completion.states,
        show_default=False,
    ),
]
_LANE = typer.Option(
    "--lane", "-l", metavar="LANE", help="Only this lane.", autocompletion=_completion.lanes, show_default=False
)
Lane = Annotated[str | None, _LANE]
Lanes = Annotated[list[str] | None, _LANE]
Kinds = Annotated[
    list[str] | None,
    typer.Option("--kind", "-k", metavar="KIND", help="Only this kind: the name of a task.", show_default=False),
]
Tag = Annotated[
    str | None,
    typer.Option("--tag", "-t", metavar="KEY=VALUE", help="Only executions with this tag.", show_default=False),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Created at or after this time (2024-05-01T12:00:00Z), or this long ago (90s, 15m).",
        show_default=False,
    ),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="TIME", help="Created before this time, or this long ago.", show_default=False),
]
Stopped = Annotated[
    bool,
    typer.Option(
        "--stopped",
        help="Only executions that changed code stopped: they wait for code that fits their recorded steps.",
    ),
]
_OPTIONS = {
    "state": States,
    "lane": Lanes,
    "kind": Kinds,
    "namespace": Namespace,
    "tag": Tag,
    "since": Since,
    "until": Until,
    "stopped": Stopped,
}


@dataclass(frozen=True)
class Filter:
    """The executions that match every argument, which are those of `Engine.find_executions`."""

    arguments: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        *,
        state: list[State] | None,
        lane: list[str] | None,
        kind: list[str] | None,
        namespace: str | None,
        tag: str | None,
        since: str | None,
        until: str | None,
        stopped: bool | None = None,
    ) -> Filter:
        """The filter that the options ask for."""
        given: dict[str, Any] = {
            "states": state or None,
            "lane_ids": lane or None,
            "kinds": kind or None,
            "namespace": namespace,
            "tag": None if tag is None else parse_pair(tag, "--tag"),
            "created_from": None if since is None else parse_moment(since, "--since"),
            "created_before": None if until is None else parse_moment(until, "--until"),
            "stopped": stopped or None,
        }
        return cls({name: value for name, value in given.items() if value is not None})

    def __bool__(self) -> bool:
        return bool(self.arguments)

    @property
    def lanes(self) -> list[str]:
        """The lanes it names."""
        return list(self.arguments.get("lane_ids", ()))

    def replace(self, **arguments: Any) -> Filter:
        """The same with other arguments."""
        return Filter({**self.arguments, **arguments})

    def or_states(self, states: Collection[State]) -> Filter:
        """The same, in these states if it names none."""
        return self if self.arguments.keys() & {"states", "stopped"} else self.replace(states=list(states))

    async def page(self, engine: Engine, cursor: Place | None, size: int) -> Page[ExecutionInfo, Place]:
        """One page, newest first. It may be shorter than `size`, or empty, and still have a next one."""
        return await engine.find_executions(**self.arguments, cursor=cursor, limit=size)

    async def pages(
        self, engine: Engine, *, cursor: Place | None = None, size: int = PAGE
    ) -> AsyncIterator[Page[ExecutionInfo, Place]]:
        """Every page, newest first; some may be empty."""
        while True:
            page = await self.page(engine, cursor, size)
            yield page
            if page.next_cursor is None:
                return
            cursor = page.next_cursor


# Replaces a command's parameter `wanted` by the filter options.
filtered = grouped("wanted", _OPTIONS, Filter.of)
