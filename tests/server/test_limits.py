"""What a server refuses whatever is asked of it, and what every answer has."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec import Struct

from flowfabric.server.app import create_app
from flowfabric.server.call import Answer, Call, Caller, EventStream
from flowfabric.server.limits import Limits
from flowfabric.server.metrics import ServerMetrics
from flowfabric.server.operation import MEDIUM, Operation, Repeats, Scope, Within
from flowfabric.server.options import load_options
from flowfabric.server.service import Service
from flowfabric.server.stack import around
from flowfabric.server.telemetry import Telemetry

pytestmark = pytest.mark.asyncio(loop_scope="session")
SECRET = "ffk_k1_verysecret"
LINK = "link-token-nobody-may-log"


class Note(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str = ""


class Waiting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wait: float = 0.0


async def echo(call: Call) -> dict[str, Any]:
    """Return the length."""
    return {"length": len(call.body.text), "address": call.caller.address, "scheme": call.request.url.scheme}


async def long_answer(call: Call) -> Answer:
    """Return much."""
    return Answer(body=b"x" * 5000, media="text/plain")


async def hangs(call: Call) -> dict[str, Any]:
    """Wait for what never happens."""
    await asyncio.Event().wait()
    return {}


async def waits(call: Call) -> dict[str, Any]:
    """Wait until the server stops."""
    await asyncio.wait_for(call.service.draining.wait(), 30)
    return {"ended": True}


async def breaks(call: Call) -> dict[str, Any]:
    """Fail."""
    raise RuntimeError("postgresql://u:hunter2@h/db is what it said")


async def follow(call: Call) -> EventStream:
    """Stream."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: " + b"y" * 4000 + b"\n\n"
        await call.service.draining.wait()
        yield b"event: bye\n\n"

    return EventStream(pieces=pieces())


async def link(call: Call) -> dict[str, Any]:
    """Show a link."""
    return {}


def _operation(method: Any, path: str, handler: Any, **more: Any) -> Operation:
    values: dict[str, Any] = {"scope": Scope.READ, "within": Within.NONE, "answers": {200: dict}, **more}
    return Operation(method=method, path=path, handler=handler, **values)


OPERATIONS = (
    _operation("POST", "/v1/notes", echo, body=Note, repeats=Repeats.FENCED),
    _operation("POST", "/v1/signals", echo, body=Note, limit=MEDIUM, repeats=Repeats.FENCED),
    _operation("GET", "/v1/long", long_answer),
    _operation("GET", "/v1/hangs", hangs),
    _operation("GET", "/v1/waits", waits, query=Waiting),
    _operation("GET", "/v1/breaks", breaks),
    _operation("GET", "/v1/follow", follow, streams=True, media="text/event-stream"),
    _operation("GET", "/livez", link, scope=None),
    _operation("GET", "/w/{callback}", link, scope=None),
)


class OneKey:
    async def caller(self, key: str, address: str) -> Caller | None:
        if key != SECRET:
            return None
        return Caller(name="k", key_id="k1", scopes=frozenset({Scope.ADMIN}), address=address)


class Rig:
    """A server's layers around a few operations, without a database."""

    def __init__(self, peer: str = "192.0.2.1", **given: Any) -> None:
        self.options = load_options(given, {})
        self.service = Service(None, keys=OneKey())  # type: ignore[arg-type]  # no operation here asks the engine
        self.service.limits = Limits(self.options)
        self.telemetry = Telemetry(ServerMetrics())
        app = create_app(None, service=self.service, operations=OPERATIONS)  # type: ignore[arg-type]
        self.app = around(app, self.service, self.options, self.telemetry)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, client=(peer, 1)),
            base_url="http://server",
            headers={"Authorization": f"Bearer {SECRET}"},
        )

    def text(self) -> str:
        return self.telemetry.metrics.text(None).decode()


async def test_every_answer_has_a_request_id_and_the_headers_of_security() -> None:
    rig = Rig()
    for path, status in (("/v1/long", 200), ("/nope", 404), ("/v1/breaks", 500), ("/v1/notes", 405)):
        answer = await rig.client.get(path)
        assert answer.status_code == status, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert len(answer.headers.get_list("x-request-id")) == 1
        assert "strict-transport-security" not in answer.headers
        assert "server" not in answer.headers
    given = await rig.client.get("/v1/long", headers={"X-Request-Id": "my-request.7"})
    assert given.headers["x-request-id"] == "my-request.7"
    for forged in ("a b", "x" * 65, "a\tb", "<i>"):
        answer = await rig.client.get("/v1/long", headers={"X-Request-Id": forged})
        assert answer.headers["x-request-id"] != forged


async def test_an_error_of_the_server_is_a_problem_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answer = await Rig().client.get("/v1/breaks")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "internal_error"
    assert answer.json()["instance"] == answer.headers["x-request-id"]
    assert "hunter2" not in answer.text
    assert any(record.exc_info for record in caplog.records)


async def test_a_body_is_refused_while_it_arrives_as_soon_as_it_is_too_long() -> None:
    rig = Rig(control_body="2KiB", medium_body="4KiB")
    given = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(1000):
            given += 1
            yield b"x" * 512

    answer = await rig.client.post("/v1/notes", content=chunks())
    assert answer.status_code == 413
    assert answer.json()["limit_bytes"] == 2048
    assert answer.json()["route"] == "/v1/notes"
    assert given < 10
    announced = await rig.client.post("/v1/notes", content=b"x" * 3000)
    assert announced.status_code == 413
    fits = await rig.client.post("/v1/signals", json={"text": "x" * 3000})
    assert fits.json()["length"] == 3000


async def test_a_request_has_its_time_and_a_wait_that_it_asks_for_is_added() -> None:
    rig = Rig(request_timeout="0.1")
    answer = await rig.client.get("/v1/hangs")
    assert answer.status_code == 503
    assert answer.json()["code"] == "request_timeout"
    assert answer.headers["retry-after"] == "1"
    assert 'flowfabric_http_refused_total{reason="timeout"} 1.0' in rig.text()
    waiting = asyncio.create_task(rig.client.get("/v1/waits?wait=20"))
    assert (await rig.client.get("/v1/hangs")).status_code == 503  # as long again
    assert not waiting.done()
    rig.service.draining.set()
    assert (await waiting).json() == {"ended": True}


async def test_a_slow_body_is_refused_in_time() -> None:
    rig = Rig(request_timeout="0.1")

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"text":'
        await asyncio.Event().wait()

    answer = await rig.client.post("/v1/notes", content=slowly(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 408
    assert answer.json()["code"] == "slow_body"
    assert answer.headers["connection"] == "close"


async def test_an_address_and_a_key_may_send_a_limited_number_of_requests() -> None:
    rig = Rig(address_rate="1/s burst 3")
    answers = [await rig.client.get("/nope") for _ in range(4)]
    assert [one.status_code for one in answers] == [404, 404, 404, 429]
    assert answers[-1].json()["code"] == "too_many_requests"
    assert answers[-1].headers["retry-after"] == "1"
    assert (await rig.client.get("/livez")).status_code == 200  # probes are always answered
    by_key = Rig(key_rate="1/s burst 2")
    assert [(await by_key.client.get("/v1/long")).status_code for _ in range(3)] == [200, 200, 429]
    nobody = [await by_key.client.get("/v1/long", headers={"Authorization": "Bearer wrong"}) for _ in range(3)]
    assert [one.status_code for one in nobody] == [401, 401, 401]


async def test_behind_a_trusted_proxy_each_client_has_its_own_rate() -> None:
    rig = Rig(peer="10.0.0.1", address_rate="1/s burst 1", trusted_proxies="10.0.0.0/8")
    for client in ("198.51.100.1", "198.51.100.2"):
        headers = {"X-Forwarded-For": f"1.2.3.4, {client}", "X-Forwarded-Proto": "https"}
        answer = await rig.client.post("/v1/notes", json={}, headers=headers)
        assert answer.json()["address"] == client
        assert answer.json()["scheme"] == "https"
        assert answer.headers["strict-transport-security"]
        assert (await rig.client.get("/nope", headers=headers)).status_code == 429
    stranger = Rig(peer="192.0.2.7", trusted_proxies="10.0.0.0/8")
    answer = await stranger.client.post("/v1/notes", json={}, headers={"X-Forwarded-For": "198.51.100.1"})
    assert answer.json()["address"] == "192.0.2.7"


async def test_a_full_server_refuses_all_but_probes() -> None:
    rig = Rig()
    rig.service.limits.is_full = lambda: True
    answer = await rig.client.get("/v1/long")
    assert answer.status_code == 503
    assert answer.json()["code"] == "too_many_connections"
    assert answer.headers["connection"] == "close"
    assert (await rig.client.get("/livez")).status_code == 200


async def test_pages_of_exactly_the_listed_origins_may_call() -> None:
    rig = Rig(cors_origins="https://app.example")
    asks = {"Access-Control-Request-Method": "POST", "Origin": "https://app.example"}
    nobody = {"Authorization": ""}
    preflight = await rig.client.options("/v1/notes", headers={**asks, **nobody})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = await rig.client.post("/v1/notes", json={}, headers={"Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    shown = set(answer.headers["access-control-expose-headers"].split(", "))
    assert {"retry-after", "idempotency-replayed", "x-result-encoding"} <= shown
    refused = await rig.client.post("/v1/notes", json={}, headers={"Origin": "https://app.example", **nobody})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    strangers = ["https://app.example.evil.example", "http://app.example", "null", "https://app.example:8443"]
    for origin in strangers:
        preflight = await rig.client.options("/v1/notes", headers={**asks, "Origin": origin})
        assert preflight.status_code == 405
        assert "access-control-allow-origin" not in preflight.headers
        answer = await rig.client.post("/v1/notes", json={}, headers={"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "Origin"
    off = await Rig().client.options("/v1/notes", headers=asks)
    assert off.status_code == 405
    assert "access-control-allow-origin" not in off.headers


async def test_long_answers_are_compressed_and_streams_are_not() -> None:
    rig = Rig()
    async with rig.client.stream("GET", "/v1/long", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert int(answer.headers["content-length"]) < 500
        assert answer.headers["vary"] == "Accept-Encoding"
    for others in ("identity", "gzip;q=0", "br, gzip; q=0.0", "xgzip"):
        plain = await rig.client.get("/v1/long", headers={"Accept-Encoding": others})
        assert "content-encoding" not in plain.headers
        assert plain.headers["vary"] == "Accept-Encoding"  # a cache keeps both apart
    short = await rig.client.get("/no/such/path", headers={"Accept-Encoding": "gzip"})
    assert (short.status_code, "content-encoding" in short.headers) == (404, False)
    rig.service.draining.set()
    answer = await rig.client.get("/v1/follow", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in answer.headers
    assert answer.text.endswith("event: bye\n\n")


async def test_while_the_server_stops_connections_close_after_their_answers() -> None:
    rig = Rig()
    assert "connection" not in (await rig.client.get("/v1/long")).headers
    rig.service.draining.set()
    assert (await rig.client.get("/v1/long")).headers["connection"] == "close"


async def test_the_access_log_has_templates_and_ids_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flowfabric.access")
    rig = Rig()
    await rig.client.get(f"/w/{LINK}?token={LINK}")
    await rig.client.post("/v1/notes", json={"text": LINK}, headers={"X-Request-Id": "r1", "Idempotency-Key": LINK})
    await rig.client.get(f"/nope/{LINK}", headers={"Authorization": f"Bearer {LINK}"})
    lines = [record for record in caplog.records if record.name == "flowfabric.access"]
    assert [record.route for record in lines] == ["/w/{callback}", "/v1/notes", "unknown"]  # type: ignore[attr-defined]
    assert [record.status for record in lines] == [422, 200, 404]  # type: ignore[attr-defined]
    assert [record.key_id for record in lines] == [None, "k1", None]  # type: ignore[attr-defined]
    assert lines[1].request_id == "r1"  # type: ignore[attr-defined]
    shown = json.dumps([{**vars(record), "line": record.getMessage()} for record in lines], default=str)
    assert LINK not in shown
    assert SECRET not in shown
    assert "192.0.2.1" in shown


async def test_requests_are_counted_by_template_and_status() -> None:
    rig = Rig()
    await rig.client.get(f"/w/{LINK}")
    await rig.client.get("/v1/breaks")
    await rig.client.request("BREW", "/v1/long")
    text = rig.text()
    assert 'flowfabric_http_requests_total{method="GET",path="/w/{callback}",status="200"} 1.0' in text
    assert 'flowfabric_http_requests_total{method="GET",path="/v1/breaks",status="500"} 1.0' in text
    assert 'flowfabric_http_requests_total{method="OTHER",path="unknown",status="405"} 1.0' in text
    assert 'flowfabric_http_request_seconds_bucket{le="0.0001",method="GET",path="/w/{callback}"}' in text
    assert "flowfabric_http_in_flight 0.0" in text
    rig.service.draining.set()
    await rig.client.get("/v1/follow")
    text = rig.text()
    assert 'flowfabric_http_requests_total{method="GET",path="/v1/follow",status="200"} 1.0' in text
    assert 'flowfabric_http_request_seconds_count{method="GET",path="/v1/follow"}' not in text
    assert LINK not in text


async def test_a_websocket_is_refused() -> None:
    rig = Rig()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await rig.app({"type": "websocket", "path": "/v1/follow", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1003}]


async def test_without_keys_no_web_page_of_another_site_can_use_the_server() -> None:
    rig = Rig(auth="none", cors_origins="https://app.example")
    local = [{}, {"Host": "127.0.0.1:8484"}, {"Host": "[::1]:1"}, {"Host": "localhost"}]
    local += [{"Origin": "http://localhost:3000"}, {"Origin": "https://app.example"}]
    local += [{"Origin": "null", "Sec-Fetch-Site": "same-origin"}]  # the page of a link, which sends no referrer
    for headers in local:
        answer = await rig.client.get("/v1/long", headers={"Host": "localhost", **headers})
        assert answer.status_code == 200, headers
    foreign = [{"Host": "rebound.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": ""}, {"Host": "a b"}]
    foreign += [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost.evil.example"}]
    foreign += [{"Origin": "null", "Sec-Fetch-Site": "cross-site"}, {"Origin": "null", "Sec-Fetch-Site": "none"}]
    foreign += [{"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"}]
    for headers in foreign:
        answer = await rig.client.get("/v1/long", headers={"Host": "localhost", **headers})
        assert answer.status_code == 403, headers
        assert answer.json()["code"] == "forbidden"
    with_keys = Rig()
    assert (await with_keys.client.get("/v1/long", headers={"Host": "rebound.example"})).status_code == 200
