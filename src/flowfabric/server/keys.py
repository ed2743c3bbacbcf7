"""API keys: who calls, by the key that a request shows.

A key is looked up once in 2.5 seconds per process, and streams ask every 2 seconds, so a revoked one works for less
than five seconds. Unknown, expired and revoked keys are refused alike, with the same work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.server.call import Caller
from flowfabric.values.api_key import ApiKey, StoredApiKey, parse_api_key

log = logging.getLogger("flowfabric.server")
CACHED_FOR: Final = 2.5
_USE_EVERY: Final = 60.0
_MOST: Final = 10_000  # ids in the cache; known ones and others apart, so that guesses do not drive out keys


class ApiKeyCache:
    """Looks API keys up in the database, and remembers what it found for a moment."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, StoredApiKey]] = OrderedDict()
        self._unknown: OrderedDict[str, tuple[float, StoredApiKey]] = OrderedDict()
        self._asking: dict[str, asyncio.Future[StoredApiKey]] = {}
        self._used: OrderedDict[str, float] = OrderedDict()
        self._callers: OrderedDict[str, tuple[StoredApiKey, Caller]] = OrderedDict()  # the last of each key

    async def caller(self, key: str, address: str) -> Caller | None:
        """Who the key belongs to; None if it is unknown, expired or revoked."""
        given = parse_api_key(key)
        if given is None:
            return None
        key_id, now = given.key_id, self._clock()
        held = self._known.get(key_id) or self._unknown.get(key_id)
        stored = held[1] if held is not None and now - held[0] < CACHED_FOR else await self._read(key_id, now)
        if not stored.accepts(given) or stored.api_key is None:
            return None
        if now - self._used.get(key_id, -_USE_EVERY) >= _USE_EVERY:
            await self._note_use(key_id, now)
        last = self._callers.get(key_id)
        if last is None or last[0] is not stored or last[1].address != address:
            last = self._callers[key_id] = (stored, _caller(stored.api_key, address))
            if len(self._callers) > _MOST:
                self._callers.popitem(last=False)
        return last[1]

    async def _read(self, key_id: str, now: float) -> StoredApiKey:
        if (asking := self._asking.get(key_id)) is None:
            # Its own task: a client that leaves does not end the lookup for the others.
            asking = self._asking[key_id] = asyncio.ensure_future(self._engine.read_api_key(key_id))
            asking.add_done_callback(lambda done: self._keep(key_id, now, done))
        return await asyncio.shield(asking)

    def _keep(self, key_id: str, since: float, done: asyncio.Future[StoredApiKey]) -> None:
        self._asking.pop(key_id, None)
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)
        if done.cancelled() or done.exception() is not None:
            return
        stored = done.result()
        cache = self._known if stored.api_key is not None else self._unknown
        cache[key_id] = (since, stored)
        if len(cache) > _MOST:
            cache.popitem(last=False)

    async def _note_use(self, key_id: str, now: float) -> None:
        self._used[key_id] = now
        if len(self._used) > _MOST:
            self._used.popitem(last=False)
        try:
            await self._engine.note_api_key_use(key_id)
        except FlowFabricError as error:
            log.warning("the last use of API key %s is not noted: %s", key_id, error)


def _caller(found: ApiKey, address: str) -> Caller:
    return Caller(
        name=found.name,
        key_id=found.key_id,
        scopes=frozenset(found.scopes),
        namespaces=found.namespaces,
        hides_payloads=found.hides_payloads,
        address=address,
    )
