"""Headers that every answer has: what a browser must not do with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

Header = tuple[bytes, bytes]
SECURITY: Final[tuple[Header, ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NAMES: Final = frozenset(name for name, _ in SECURITY)
OVER_TLS: Final[Header] = (b"strict-transport-security", b"max-age=31536000")


def secured(headers: Collection[Header], scheme: str) -> list[Header]:
    """The headers of an answer with those of security that it does not set itself."""
    given = {name for name, _ in headers}
    if scheme == "http" and given.isdisjoint(_NAMES):
        return [*headers, *SECURITY]
    added = [one for one in SECURITY if one[0] not in given]
    if scheme == "https" and OVER_TLS[0] not in given:
        added.append(OVER_TLS)
    return [*headers, *added]
