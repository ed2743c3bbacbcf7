"""Limits of every call to the database: sizes and times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from flowfabric.errors import InvalidInput

MAX_BATCH = 1000
MAX_PAYLOAD = 1 << 28  # a protocol message is limited to 1 GiB, and a call is one message


def moment(value: object, field: str, allowed: str = "an aware datetime") -> datetime:
    """Return a point in time that the database can hold."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed=allowed)
    if value.utcoffset() is None:
        raise InvalidInput("a datetime without time zone", field=field, allowed=allowed)
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"got {value}", field=field, allowed=f"{allowed} within the years 1 to 9999") from None


def instant(value: object, field: str) -> tuple[datetime | None, int | None]:
    """Return a time as (absolute, None), a duration from the database's now as (None, milliseconds)."""
    if value is None:
        return None, None
    if isinstance(value, timedelta):
        ms = value // timedelta(milliseconds=1)
        if ms < 0 or ms > 10**13:
            raise InvalidInput(f"got {value}", field=field, allowed="a duration from 0 to about 300 years")
        return None, ms
    if isinstance(value, datetime):
        return moment(value, field, "an aware datetime or a timedelta"), None
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="an aware datetime or a timedelta")
