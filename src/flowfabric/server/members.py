"""Members that many requests have: the length of a page, tags, bytes, and durations, which are numbers of seconds."""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, overload

from msgspec import Meta, Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text

Limit = Annotated[int, Meta(ge=1, le=1000)]


class Payload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that are not JSON: in base64, with the name of their encoding."""

    base64: str
    encoding: str | None = None

    def read(self) -> tuple[bytes, str | None]:
        """The bytes and their encoding; `InvalidInput` names what is wrong with the member `input`."""
        try:
            data = base64.b64decode(self.base64, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput("not base64", field="input.base64", allowed="base64") from None
        return data, None if self.encoding is None else check_text(self.encoding, "input.encoding")


@overload
def span(seconds: float, field: str) -> timedelta: ...
@overload
def span(seconds: float | None, field: str) -> timedelta | None: ...
def span(seconds: float | None, field: str) -> timedelta | None:
    """A number of seconds as a duration; `field` names the member that has it."""
    if seconds is None:
        return None
    try:
        if math.isfinite(seconds):
            return timedelta(seconds=seconds)
    except OverflowError:
        pass
    raise InvalidInput(f"got {seconds}", field=field, allowed="a number of seconds")


def tag_of(text: str | None) -> tuple[str, str] | None:
    """The tag that a parameter `tag` names: its key and its value."""
    if text is None:
        return None
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput("not a tag", field="tag", allowed="key=value")
    return key, value


@contextlib.contextmanager
def named(**members: str) -> Iterator[None]:
    """Name the members of a request in what the engine refuses: `hard="hard_limits"` is its field `hard`."""
    try:
        yield
    except InvalidInput as error:
        field = error.field or ""
        head = field.split("[", 1)[0]
        if head not in members:
            raise
        raise InvalidInput(error.problem, field=members[head] + field[len(head) :], allowed=error.allowed) from None
