"""Which web pages may call the server: those of exactly the listed origins, none by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS: Final = b"GET, POST, PUT, PATCH, DELETE"
_REQUEST_HEADERS: Final = (
    b"authorization, content-type, idempotency-key, if-match, if-none-match, last-event-id, traceparent, tracestate,"
    b" x-request-id"
)
_ANSWER_HEADERS: Final = b"etag, idempotency-replayed, link, location, retry-after, x-request-id, x-result-encoding"
_REMEMBERED: Final = b"600"


class Cors:
    """Adds the headers that let a page of a listed origin read the answers, and answers its preflight requests."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        origin = next((value for name, value in headers if name == b"origin"), None)
        is_listed = origin in self._origins

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(b"vary", b"Origin")]
                if is_listed and origin is not None:
                    added += [
                        (b"access-control-allow-origin", origin),
                        (b"access-control-expose-headers", _ANSWER_HEADERS),
                    ]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        asks = any(name == b"access-control-request-method" for name, _ in headers)
        if is_listed and scope["method"] == "OPTIONS" and asks:
            await answer({"type": "http.response.start", "status": 204, "headers": list(_PREFLIGHT)})
            await answer({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, answer)


_PREFLIGHT: Final = (
    (b"access-control-allow-methods", _METHODS),
    (b"access-control-allow-headers", _REQUEST_HEADERS),
    (b"access-control-max-age", _REMEMBERED),
)
