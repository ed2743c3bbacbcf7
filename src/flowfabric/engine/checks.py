"""Checks of arguments: each check returns the value to send or raises `InvalidInput`."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import MAX_BATCH, MAX_PAYLOAD, check_text, moment
from flowfabric.values.ids import PartitionKey, partition_of_id
from flowfabric.values.page import ScannerFilter
from flowfabric.values.wait import WaitpointToken

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CURSOR = ">q16sHx"  # microseconds, id, partition; a multiple of three bytes needs no padding
MAX_GRANT_TTL = timedelta(seconds=60)
# NUL in JSON, which the database cannot hold; after an escaped backslash the u is text.
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def parse_partition(value: object, count: int) -> int:
    """Return the number of a partition, given as a number, as `{fp:N}`, or as the id of an execution that is in it."""
    if type(value) is int:
        return check_int(value, "partition_key", 0, count - 1)
    if isinstance(value, UUID):
        return partition_of_id(value, count)
    key = value if isinstance(value, PartitionKey) else PartitionKey.parse(value)
    if key.family != "fp" or key.index >= count:
        raise InvalidInput(f"got {key}", field="partition_key", allowed=f"an integer from 0 to {count - 1}")
    return key.index


def check_int(value: object, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"got {value!r}", field=field, allowed=f"an integer from {low} to {high}")
    return value


def check_limit(value: object, high: int, field: str = "limit") -> int:
    return min(check_int(value, field, 0, 2**31 - 1), high)


def most_rows(value: object) -> int | None:
    """The `limit` of a list that returns everything without one."""
    return None if value is None else check_int(value, "limit", 1, 100_000)


def check_batch(items: Sequence[Any], field: str = "items") -> None:
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise InvalidInput(f"got {type(items).__name__}", field=field, allowed="a list")
    if len(items) > MAX_BATCH:
        raise InvalidInput(f"{len(items)} items", field=field, allowed=f"at most {MAX_BATCH}")


def check_list(value: object, field: str) -> Collection[Any]:
    """A list, tuple or set; a string is refused, though Python would iterate over it."""
    if isinstance(value, list | tuple | AbstractSet):
        return value
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a list")


def check_filter(value: object, field: str = "filter") -> tuple[str | None, str | None, str | None]:
    """A filter as namespace, tag key and tag value."""
    if value is None:
        return None, None, None
    if not isinstance(value, ScannerFilter):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a ScannerFilter")
    namespace = None if value.namespace is None else check_text(value.namespace, f"{field}.namespace")
    return (namespace, *check_tag(value.instance_tag, f"{field}.instance_tag"))


def check_tag(value: object, field: str) -> tuple[str | None, str | None]:
    """A tag and the value it must have, or neither."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a (key, value) pair")
    return check_text(value[0], field, None), check_text(value[1], field, None)


def check_bool(value: object, field: str) -> bool:
    """A bool, and nothing that counts as one: "no" would be true."""
    if not isinstance(value, bool):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="True or False")
    return value


def check_duration(value: object, field: str, *, least_ms: int = 1, most: timedelta | None = None) -> int:
    """A duration in milliseconds."""
    allowed = f"a timedelta of at least {least_ms} ms" + (f" and at most {most}" if most is not None else "")
    if not isinstance(value, timedelta):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed=allowed)
    ms = value // timedelta(milliseconds=1)
    if ms < least_ms or ms > 10**13 or (most is not None and value > most):
        raise InvalidInput(f"got {value}", field=field, allowed=allowed)
    return ms


def check_low_water(value: object) -> datetime | None:
    """Return the time before which a queue is known to be empty; None if nothing is known."""
    return None if value is None else moment(value, "low_water")


def optional_bytes(value: object, field: str) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="bytes or None")
    if len(value) > MAX_PAYLOAD:
        raise InvalidInput(f"{len(value)} bytes", field=field, allowed=f"at most {MAX_PAYLOAD} bytes")
    return value if type(value) is bytes else bytes(value)


def check_filled(value: object, field: str, most: int = 256) -> str:
    text = check_text(value, field, most)
    if not text:
        raise InvalidInput("empty", field=field, allowed="a non-empty text")
    return text


def check_word(value: object, allowed: frozenset[str], field: str) -> str:
    if value == "auto_resume" and field == "timeout_behavior":
        return "auto_resume_with_timeout_signal"
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(f"got {value!r}", field=field, allowed=", ".join(sorted(allowed)))
    return value


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def time_cursor(at: datetime, uuid: UUID, partition: int = 0) -> str:
    """Return the cursor of a list in order of time: text without spaces, quotes or a sign at its beginning."""
    packed = struct.pack(_CURSOR, (at - _EPOCH) // timedelta(microseconds=1), uuid.bytes, partition)
    return base64.urlsafe_b64encode(packed).decode()


def parse_time_cursor(cursor: object) -> tuple[datetime | None, UUID | None]:
    """Return the time and id of a cursor; nothing for None."""
    return (None, None) if cursor is None else read_cursor(cursor)[:2]


def read_cursor(cursor: object, allowed: str = "a next_cursor of this list") -> tuple[datetime, UUID, int]:
    """Return what `time_cursor` was given."""
    try:
        since, uuid, partition = struct.unpack(_CURSOR, base64.b64decode(str(cursor), altchars=b"-_", validate=True))
        return _EPOCH + timedelta(microseconds=since), UUID(bytes=uuid), partition
    except (ValueError, OverflowError, struct.error):
        raise InvalidInput("cannot be read", field="cursor", allowed=allowed) from None


def check_token(value: object) -> str:
    """Return the text of a token. Text that cannot be one becomes "no token", which is refused like a wrong token."""
    text = value.reveal() if isinstance(value, WaitpointToken) else value
    if not isinstance(text, str):
        raise InvalidInput(f"got {type(value).__name__}", field="waitpoint_token", allowed="a token")
    if len(text) > 200 or not text.isascii() or "\0" in text:
        return "no token"
    return text
