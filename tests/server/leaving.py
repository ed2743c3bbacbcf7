"""An app whose endless answers end for the client: it leaves after the first bytes of a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]


def leaving(app: App) -> App:
    """Clients of `app` get the head and the first bytes of a stream, and everything of other answers."""

    async def wrapped(
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        begun, is_stream, is_whole, is_read = asyncio.Event(), False, False, False

        async def sent(message: Message) -> None:
            nonlocal is_stream, is_whole
            if message["type"] == "http.response.start":
                is_stream = (b"content-type", b"text/event-stream") in message["headers"]
            elif is_stream and begun.is_set():
                return
            else:
                is_whole = not message.get("more_body", False)
            await send(message)
            if is_stream and message["type"] == "http.response.body":
                begun.set()

        async def received() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return await receive()
            begins = asyncio.create_task(begun.wait())
            arrives = asyncio.ensure_future(receive())
            try:
                await asyncio.wait({begins, arrives}, return_when=asyncio.FIRST_COMPLETED)
                return arrives.result() if arrives.done() else {"type": "http.disconnect"}
            finally:
                begins.cancel()
                arrives.cancel()

        await app(scope, received, sent)
        if is_stream and not is_whole:
            await send({"type": "http.response.body", "body": b""})

    return wrapped
