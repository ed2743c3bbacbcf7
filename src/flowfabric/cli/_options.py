"""Options and arguments that several commands share: their words in the help, and how they are read."""

from __future__ import annotations

import getpass
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _completion
from flowfabric.errors import InvalidInput
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.engine.reads import Place
    from flowfabric.values.execution import ExecutionInfo
    from flowfabric.values.page import Page

Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="URL",
        help="The database. Default: FLOWFABRIC_DSN, else the embedded server.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs instead of words for people.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The execution: its id, or the uuid in it.", show_default=False)]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Executions: ids, or the uuids in them.", show_default=False),
]
States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        "-s",
        metavar="STATE",
        help="Only in this state.",
        autocompletion=_completion.states,
        show_default=False,
    ),
]
Lanes = Annotated[
    list[str] | None,
    typer.Option(
        "--lane",
        "-l",
        metavar="LANE",
        help="Only in this lane.",
        autocompletion=_completion.lanes,
        show_default=False,
    ),
]
Kinds = Annotated[
    list[str] | None, typer.Option("--kind", "-k", metavar="KIND", help="Only of this kind.", show_default=False)
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Only in this namespace.", show_default=False)
]
Tag = Annotated[
    str | None,
    typer.Option("--tag", "-t", metavar="KEY=VALUE", help="Only with this tag.", show_default=False),
]
_MOMENT = "a time (2024-05-01T12:00:00Z) or so long ago (90s, 15m, 2h, 1d)"
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help=f"Only created from then on: {_MOMENT}.", show_default=False),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="TIME", help="Only created before then.", show_default=False),
]

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d|w)?\s*", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration(text: str, field: str) -> timedelta:
    """`30`, `30s`, `15m`, `2h`, `1d`, `500ms`, `1h30m`: a number without unit is seconds."""
    allowed = "a duration such as 30s, 15m, 2h or 1h30m"
    given = text.strip()
    place, seconds = 0, 0.0
    while place < len(given):
        found = _PART.match(given, place)
        if found is None or (found[2] is None and found[0] != given):
            raise InvalidInput(f"got {text!r}", field=field, allowed=allowed)
        seconds += float(found[1]) * _SECONDS[(found[2] or "s").lower()]
        place = found.end()
    if not given or seconds > 10**10:
        raise InvalidInput(f"got {text!r}", field=field, allowed=allowed)
    return timedelta(seconds=seconds)


def parse_time(text: str, field: str) -> datetime:
    """A time in ISO 8601, of this machine's time zone if it names none."""
    try:
        moment = datetime.fromisoformat(text.strip())
        moment = moment.astimezone() if moment.tzinfo is None else moment
        moment.astimezone(UTC)  # the first and the last day there are may have no such time
    except (ValueError, OverflowError):
        raise InvalidInput(f"got {text!r}", field=field, allowed="a time such as 2024-05-01T12:00:00Z") from None
    return moment


def parse_moment(text: str, field: str) -> datetime:
    """A time as `parse_time` takes it, or a duration, counted back from now."""
    try:
        return parse_time(text, field)
    except InvalidInput:
        try:
            return datetime.now(UTC) - parse_duration(text, field)
        except InvalidInput:
            raise InvalidInput(f"got {text!r}", field=field, allowed=_MOMENT) from None


def parse_pair(text: str, field: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput(f"got {text!r}", field=field, allowed="KEY=VALUE")
    return key, value


def login_name() -> str | None:
    """Who is at the keyboard, as far as the system knows."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


@dataclass(frozen=True)
class Filter:
    """What the list filters ask for, ready for `Engine.find_executions`."""

    arguments: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        states: list[State] | None,
        lanes: list[str] | None,
        kinds: list[str] | None,
        namespace: str | None,
        tag: str | None,
        since: str | None,
        until: str | None,
    ) -> Filter:
        given: dict[str, Any] = {
            "states": states or None,
            "lane_ids": lanes or None,
            "kinds": kinds or None,
            "namespace": namespace,
            "tag": None if tag is None else parse_pair(tag, "--tag"),
            "created_from": None if since is None else parse_moment(since, "--since"),
            "created_before": None if until is None else parse_moment(until, "--until"),
        }
        return cls({name: value for name, value in given.items() if value is not None})

    def __bool__(self) -> bool:
        return bool(self.arguments)

    async def pages(
        self, engine: Engine, *, cursor: Place | None = None, size: int = 1000
    ) -> AsyncIterator[Page[ExecutionInfo, Place]]:
        """Every page of what matches, newest first; some may be empty."""
        while True:
            page = await engine.find_executions(**self.arguments, cursor=cursor, limit=size)
            yield page
            if page.next_cursor is None:
                return
            cursor = page.next_cursor
