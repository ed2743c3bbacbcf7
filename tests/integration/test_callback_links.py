"""Links of callbacks as a client takes them: how long they are valid, and how their payloads are stored."""

from __future__ import annotations

import zlib
from datetime import timedelta

import flowfabric as ff
from tests.support import CheckedEngine, Clock, started


class Deflate:
    name = "deflate"

    def encode(self, data: bytes) -> bytes:
        return zlib.compress(data)

    def decode(self, data: bytes) -> bytes:
        return zlib.decompress(data)


async def _link(engine: CheckedEngine) -> tuple[ff.ExecutionId, str]:
    claimed = await started(engine)
    made = await engine.create_waitpoint(claimed.handle, "payment", timedelta(hours=1))
    return claimed.execution_id, ff.callback_text(claimed.execution_id, made.waitpoint_id, made.token)


async def test_the_payload_of_a_callback_is_stored_as_the_apps_other_data(engine: CheckedEngine, database: str) -> None:
    body = b'{"reference": "p-17"}'
    async with ff.App(database, codecs=[Deflate()]) as app:
        execution_id, link = await _link(engine)
        client = await app.client()
        assert (await client.receive(link, body)).status == 202
        assert (await client.receive(link)).status == 202
        first, empty = (await engine.read_signals(execution_id)).items
    assert (first.payload, first.payload_encoding) == (zlib.compress(body), "json+deflate")
    assert (empty.payload, empty.payload_encoding) == (None, "json")


async def test_a_link_is_looked_at_until_its_key_verifies_no_more(
    engine: CheckedEngine, database: str, clock: Clock
) -> None:
    async with ff.App(database) as app:
        _, link = await _link(engine)
        client = await app.client()
        shown = await client.look(link)
        assert shown is not None
        assert (shown.waitpoint_key, shown.state) == ("payment", "pending")

        await engine.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32, timedelta(minutes=10))
        assert await client.look(link) == shown
        await clock.advance(minutes=11)
        assert await client.look(link) is None
        assert (await client.receive(link)).status == 401

        _, other = await _link(engine)
        assert await client.look(other) is not None
