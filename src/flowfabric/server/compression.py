"""Which answers are compressed: long ones, of the server itself.

An app that is mounted in another program leaves it to that program.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.middleware.gzip import GZipMiddleware

COMPRESSES: Final = "flowfabric.compresses"  # in the scope: the server serves the app
WORTH_IT: Final = 1024  # bytes; shorter answers are not compressed
VARIES: Final = (b"vary", b"Accept-Encoding")

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


def compressing(app: ASGIApp, scope: MutableMapping[str, Any]) -> ASGIApp:
    """The app with its answers compressed for clients that accept it, but server-sent events."""
    if scope["type"] != "http" or not scope.get(COMPRESSES, False):
        return app
    return GZipMiddleware(app, minimum_size=WORTH_IT, compresslevel=5)


def is_compressed(scope: MutableMapping[str, Any]) -> bool:
    """Whether the server compresses a long answer to this request."""
    if not scope.get(COMPRESSES, False):
        return False
    return any(name == b"accept-encoding" and b"gzip" in value and _accepts(value) for name, value in scope["headers"])


def _accepts(value: bytes) -> bool:
    """Whether gzip is among the encodings, with a weight above 0."""
    for one in value.lower().split(b","):
        name, _, weight = one.replace(b" ", b"").partition(b";q=")
        if name == b"gzip":
            return weight.strip(b"0.") != b"" or not weight
    return False
