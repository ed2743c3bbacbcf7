"""Long payloads are opened in threads: while a codec works, other clients get their answers."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from datetime import timedelta
from typing import Any

import httpx
import pytest

import flowfabric as ff
from flowfabric.contracts import json_form
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.server.app import create_app
from flowfabric.server.opening import SMALL, THREADS
from flowfabric.server.service import NoKeys, Service
from flowfabric.values.execution import NewExecution
from flowfabric.values.step import NewStep
from flowfabric.values.stream import NewFrame
from flowfabric.values.timing import Every
from tests.server.following import PATIENCE
from tests.support import WORKER

LONG = b'"' + b"x" * (SMALL + 1) + b'"'


class Slow:
    """Reads only once it may, and counts how many readers wait."""

    name = "slow"

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.was_free = True
        self._guard = threading.Lock()
        self.reading = self.most_reading = 0

    def encode(self, data: bytes) -> bytes:
        return data

    def decode(self, data: bytes) -> bytes:
        with self._guard:
            self.reading += 1
            self.most_reading = max(self.most_reading, self.reading)
        self.was_free &= self.may_read.wait(PATIENCE)
        with self._guard:
            self.reading -= 1
        return data


async def stored(engine: ff.Engine) -> dict[str, str]:
    """An execution that has a long payload everywhere; its paths, and those of what belongs to it."""
    codecs = Codecs([Slow()])
    made = await engine.create_many(
        [NewExecution(execution_kind=kind, input_payload=LONG, payload_encoding="json+slow") for kind in ("done", "no")]
    )
    first, second = [one.execution_id for one in made if not isinstance(one, ff.FlowFabricError)]
    for _ in range(2):
        claimed = await engine.claim(**WORKER)
        assert claimed is not None
        step = NewStep(name="long", result=LONG, encoding="json+slow")
        await engine.record_steps([(claimed.handle, step)])
        await engine.append_frame(claimed.handle, NewFrame(payload=LONG, encoding="json+slow"))
        if claimed.execution_id == first:
            await engine.complete(claimed.handle, LONG, result_encoding="json+slow")
        else:
            text = codecs.seal_text(LONG.decode(), second)
            await engine.fail(claimed.handle, text, retry_policy={"max_retries": 0})
    await engine.put_schedule(
        "long",
        kind="done",
        timing=Every(timedelta(seconds=5)).to_builtins(),
        next_at=None,
        payload=LONG,
        payload_encoding="json+slow",
    )
    at, failed = f"/v1/executions/{first}", f"/v1/executions/{second}"
    return {
        "input": f"{at}/input",
        "result": f"{at}/result",
        "outcome": f"{at}/outcome",
        "steps": f"{at}/steps",
        "failure": failed,
        "attempts": f"{failed}/attempts",
        "frames": f"{at}/attempts/0/stream",
        "tail": f"{at}/attempts/0/stream/tail",
        "follow": f"{at}/attempts/0/stream/events",
        "export": "/v1/export",
        "schedules": "/v1/schedules",
        "schedule": "/v1/schedules/long",
        "state": f"{at}/state",
    }


async def test_a_slow_codec_keeps_no_other_client_waiting(plain_engine: ff.Engine) -> None:
    codec = Slow()
    service = Service(plain_engine, keys=NoKeys(), app=ff.App(codecs=[codec]))
    transport = httpx.ASGITransport(create_app(plain_engine, service=service), raise_app_exceptions=False)
    paths = await stored(plain_engine)
    state = paths.pop("state")
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as client:
        for name, path in paths.items():
            codec.may_read.clear()
            asked = asyncio.ensure_future(client.get(path))
            async with asyncio.timeout(PATIENCE):
                while not codec.reading and not asked.done():  # it reaches the codec
                    assert (await client.get(state)).status_code == 200
            assert not asked.done(), name
            codec.may_read.set()
            assert "xxx" in (await asked).text, name
            assert codec.was_free, name
        codec.may_read.clear()
        many = [asyncio.ensure_future(client.get(paths["input"])) for _ in range(THREADS + 3)]
        async with asyncio.timeout(PATIENCE):
            while codec.reading < THREADS:
                assert (await client.get(state)).status_code == 200
        codec.may_read.set()
        assert {one.status_code for one in await asyncio.gather(*many)} == {200}
    assert codec.most_reading == THREADS
    await service.close()


class Bounded:
    name = "zlib"

    def encode(self, data: bytes) -> bytes:
        return zlib.compress(data)

    def decode(self, data: bytes, max_length: int = 0) -> bytes:
        opener = zlib.decompressobj()
        plain = opener.decompress(data, max_length)
        if not opener.eof:
            raise ValueError("too long")
        return plain


class BoundedAndBound(Bounded):
    binds = True

    def encode(self, data: bytes, execution_id: Any = None) -> bytes:
        return super().encode(data)

    def decode(self, data: bytes, execution_id: Any = None, /, max_length: int = 0) -> bytes:
        return super().decode(data, max_length)


@pytest.mark.parametrize("codec", [Bounded(), BoundedAndBound()])
def test_a_codec_that_takes_a_length_stops_there(codec: Any) -> None:
    codecs = Codecs([codec])
    data, encoding = codecs.seal(b"x" * 1000, None)
    assert codecs.open(data, encoding, None) == codecs.open(data, encoding, None, max_length=1000) == b"x" * 1000
    with pytest.raises(CannotDecode):
        codecs.open(data, encoding, None, max_length=999)


@pytest.mark.parametrize(
    "data",
    [
        LONG,
        b'{"a": ' + LONG + b', "b": [1.5, null, true, "\\u00e9\\n"]}',
        b"[\n" + LONG + b"]",
        b"[" + LONG + b", NaN]",
        b"[" + LONG + b"] x",
        b'["\xff", ' + LONG + b"]",
        b"[" + LONG + b', "\\ud800"]',
        b'"\\ud800"',
        b"x" * (SMALL + 1),
        b"\xff" * (SMALL + 1),
        b"[" * 5000 + b"]" * 5000,
        b'[9999999999999999999999, 1e5, {"a": 1, "a": 2}, ' + LONG + b"]",
    ],
)
async def test_long_payloads_have_the_form_of_short_ones(
    client: httpx.AsyncClient, plain_engine: ff.Engine, data: bytes
) -> None:
    made = await plain_engine.create_execution(execution_kind="k", input_payload=data)
    answer = await client.get(f"/v1/executions/{made.execution_id}/input")
    assert answer.status_code == 200, answer.text
    shown = json_form.payload(data, None, None, made.execution_id)
    assert answer.json()["input"] == shown
    (line,) = (await client.get("/v1/export")).content.splitlines()
    assert json.loads(line)["input"] == shown
