"""Options and arguments that several commands share, and how their values are parsed."""

from __future__ import annotations

import getpass
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import moment

Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="URL",
        help="Address of the database. Default: FLOWFABRIC_DSN, else the embedded server.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print whole ids, names and times and all columns, also on a narrow terminal.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
# For processes that another process of ours starts.
Parent = Annotated[int | None, typer.Option("--parent", hidden=True, help="Stop when this process has exited.")]
OfEnvironment = Annotated[
    bool,
    typer.Option("--dsn-of-environment", hidden=True, help="FLOWFABRIC_DSN takes precedence over the app's address."),
]
Id = Annotated[
    str,
    typer.Argument(metavar="ID", help="The execution: its id, or a unique end or beginning of it.", show_default=False),
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...", help="Executions: ids, or unique ends or beginnings of them.", show_default=False
    ),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Only this namespace.", show_default=False)
]
_MOMENT = "a time (2024-05-01T12:00:00Z) or an age (90s, 15m, 2h, 1d)"

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d|w)?\s*", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration(text: str, field: str) -> timedelta:
    """`30`, `30s`, `15m`, `2h`, `1d`, `500ms`, `1h30m`; a number without a unit is in seconds."""
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
    """A time in ISO 8601, in this machine's time zone unless it names one."""
    try:
        found = datetime.fromisoformat(text.strip())
        found = found.astimezone() if found.tzinfo is None else found
        moment(found, field)  # fails for the first and last days that datetime can represent
    except (ValueError, OverflowError, InvalidInput):
        raise InvalidInput(f"got {text!r}", field=field, allowed="a time such as 2024-05-01T12:00:00Z") from None
    return found


def parse_moment(text: str, field: str) -> datetime:
    """A time in ISO 8601, or a duration before now."""
    try:
        return parse_time(text, field)
    except InvalidInput:
        try:
            return datetime.now(UTC) - parse_duration(text, field)
        except InvalidInput:
            raise InvalidInput(f"got {text!r}", field=field, allowed=_MOMENT) from None


def parse_pair(text: str, field: str, allowed: str = "KEY=VALUE") -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput(f"got {text!r}", field=field, allowed=allowed)
    return key, value


def login_name() -> str | None:
    """The user's login name, if the system knows it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None
