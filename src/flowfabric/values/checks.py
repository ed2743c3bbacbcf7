"""The rules for every name and number a caller may give.

A check returns the value in its normal form or raises `InvalidInput` naming the field. The checks do not know what the
values mean or whether they exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from typing import Final
from unicodedata import category

from flowfabric.errors import InvalidInput, ValidationFailed

TEXT_MAX_BYTES: Final = 256
KEY_MAX_BYTES: Final = 512
LANE_MAX_BYTES: Final = 64
MAX_CAPABILITIES: Final = 256
MAX_CAPABILITY_BYTES: Final = 4096
MAX_BATCH: Final = 1000
MAX_PAYLOAD: Final = 1 << 28  # a protocol message is limited to 1 GiB, and a call is one message
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)
_TAG_KEY: Final = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*")


def quoted(value: object) -> str:
    """Return the offending value for an error message: escaped and cut to a fixed length."""
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_text(value: object, field: str, max_bytes: int | None = TEXT_MAX_BYTES) -> str:
    """Text the database can hold: no NUL, no lone surrogate, at most `max_bytes` of UTF-8. May be empty."""
    if not isinstance(value, str):
        raise InvalidInput(f"not text: {quoted(value)}", field=field, allowed="a string")
    if "\0" in value:
        raise InvalidInput(f"contains NUL: {quoted(value)}", field=field, allowed="text without NUL")
    if value.isascii():
        size = len(value)
    else:
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"contains a lone surrogate: {quoted(value)}", field=field, allowed="valid Unicode text"
            ) from error
    if max_bytes is not None and size > max_bytes:
        raise InvalidInput(f"is {size} bytes long", field=field, allowed=f"at most {max_bytes} bytes")
    return value


def escape_text(value: object, max_bytes: int | None = None) -> str:
    """Turn any value into text the database can hold. For failure text, which must never be refused.

    NUL and lone surrogates become visible escapes; text longer than `max_bytes` is cut between characters.
    """
    try:
        text = str(value)
    except Exception:  # the user's own __str__ may do anything, and the failure must still be recorded
        text = object.__repr__(value)
    data = text.replace("\0", "\\x00").encode(errors="backslashreplace")
    return data[:max_bytes].decode(errors="ignore")


def check_key(value: object, field: str = "idempotency_key") -> str | None:
    """An idempotency key of at most 512 bytes; an empty string counts as no key."""
    if value is None:
        return None
    return check_text(value, field, KEY_MAX_BYTES) or None


def check_lane(value: object, field: str = "lane_id") -> str:
    """A lane name: 1 to 64 printable ASCII bytes."""
    allowed = f"1 to {LANE_MAX_BYTES} bytes of printable ASCII"
    text = check_text(value, field, None)
    if not text:
        raise InvalidInput("Empty", field=field, allowed=allowed)
    data = text.encode()
    if len(data) > LANE_MAX_BYTES:
        raise InvalidInput(f"TooLong({len(data)})", field=field, allowed=allowed)
    if not (text.isascii() and text.isprintable()):
        index = next(i for i, byte in enumerate(data) if not 0x20 <= byte <= 0x7E)
        raise InvalidInput(f"NonPrintable({index}): {quoted(text)}", field=field, allowed=allowed)
    return text


def _has_space_or_control(text: str) -> bool:
    if text.isascii() and text.isprintable() and " " not in text:
        return False
    # Cs: a lone surrogate has no bytes at all, so it can never be part of a stored name.
    return any(char.isspace() or category(char) in ("Cc", "Cs") for char in text)


def check_worker(value: object, field: str = "worker_id") -> str:
    """A worker id or worker instance id: 1 to 256 bytes, no whitespace, control character or vertical bar."""
    text = check_text(value, field)
    if not text:
        raise InvalidInput("is empty", field=field, allowed=f"1 to {TEXT_MAX_BYTES} bytes")
    if "|" in text or _has_space_or_control(text):
        raise InvalidInput(
            f"contains a forbidden character: {quoted(text)}",
            field=field,
            allowed="no whitespace, control character or vertical bar",
        )
    return text


def as_worker(text: str) -> str:
    """A text as the id of a worker: forbidden characters become a hyphen, and the end is cut off."""
    cut = text.encode()[:200].decode(errors="ignore")
    return "".join("-" if char == "|" or _has_space_or_control(char) else char for char in cut)


def check_tag_key(value: object, field: str = "key") -> str:
    """A tag key for the point operations: `namespace.field` in lower case."""
    if isinstance(value, str) and _TAG_KEY.fullmatch(value):
        return check_text(value, field)
    raise InvalidInput(
        f"not a tag key: {quoted(value)}",
        field=field,
        allowed="a lower-case namespace, a dot and a lower-case field, such as team.owner",
    )


def check_tags(value: Mapping[str, str] | None, field: str = "tags") -> dict[str, str]:
    """Check the tags of a new execution: any text to any text. The rule for tag keys does not apply here."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"not a mapping: {quoted(value)}", field=field, allowed="text keys and text values")
    return {
        check_text(key, f"{field} key", None): check_text(item, f"{field}[{quoted(key)}]", None)
        for key, item in value.items()
    }


def required_capabilities(value: object) -> tuple[str, ...]:
    """Return the capabilities an execution requires, sorted and without duplicates; None means none."""
    return _capabilities(value, "required")


def worker_capabilities(value: object) -> tuple[str, ...]:
    """Return the capabilities a worker offers, sorted and without duplicates."""
    return _capabilities(value, "worker")


def _capabilities(value: object, side: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | AbstractSet):
        raise ValidationFailed("invalid_capabilities", f"{side}:not_array")
    for token in value:
        if not isinstance(token, str):
            problem = "non_string_token"
        elif not token:
            problem = "empty_token"
        elif "," in token:
            problem = "comma_in_token"
        elif _has_space_or_control(token):
            problem = "control_or_whitespace"
        else:
            continue
        raise ValidationFailed("invalid_capabilities", f"{side}:{problem}")
    tokens = tuple(sorted(set(value)))
    if len(tokens) > MAX_CAPABILITIES:
        raise ValidationFailed("invalid_capabilities", f"{side}:too_many_tokens")
    if len(",".join(tokens).encode()) > MAX_CAPABILITY_BYTES:
        raise ValidationFailed("invalid_capabilities", f"{side}:too_many_bytes")
    return tokens


def capability_hash(tokens: Iterable[str]) -> str:
    """A short fingerprint of a capability set, for logs and audit; not for matching.

    FNV-1a over the sorted comma-joined tokens, the halves folded together.
    """
    value = 0xCBF29CE484222325
    for byte in ",".join(sorted(set(tokens))).encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return f"{value >> 32 ^ value & 0xFFFF_FFFF:08x}"


def moment(value: object, field: str, allowed: str = "an aware datetime") -> datetime:
    """Return a point in time that the database can hold."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed=allowed)
    if value.utcoffset() is None:
        raise InvalidInput("a datetime without time zone", field=field, allowed=allowed)
    try:
        found = value.astimezone(UTC)
    except OverflowError:
        found = _LAST
    # The driver writes the first and the last moment of Python as infinities.
    if not _FIRST < found < _LAST:
        raise InvalidInput(
            f"got {value}",
            field=field,
            allowed=f"{allowed} after the beginning of year 1 and before the end of year 9999",
        )
    return found


def instant(value: object, field: str) -> tuple[datetime | None, int | None]:
    """Return a time as (absolute, None), a duration from the database's now as (None, milliseconds).

    A time that has passed is allowed in both forms: a wait for it ends at once.
    """
    if value is None:
        return None, None
    if isinstance(value, timedelta):
        ms = value // timedelta(milliseconds=1)
        if abs(ms) > 10**13:
            raise InvalidInput(f"got {value}", field=field, allowed="a duration of at most about 300 years")
        return None, ms
    if isinstance(value, datetime):
        return moment(value, field, "an aware datetime or a timedelta"), None
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="an aware datetime or a timedelta")
