"""What does not fit is refused by name, as a problem, and changes nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
from starlette.requests import Request
from starlette.responses import Response

import flowfabric as ff
from flowfabric._taxonomy import TAXONOMY
from flowfabric.errors import NotFound
from flowfabric.server import problems
from flowfabric.server.app import create_app
from tests.each import Rows, each
from tests.server.conftest import Submit


async def refused(client: httpx.AsyncClient, data: bytes, **headers: str) -> httpx.Response:
    shown = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    answer = await client.post("/v1/executions", content=data, headers=shown)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (await client.get("/v1/executions")).json()["items"] == []
    return answer


@each(
    ("data", "expected"),
    [
        (b'{"execution_kind": 1, "colour": 2, "tags": {"a": 1}}', {"/execution_kind", "/colour", "/tags/a"}),
        (b"{}", {"/execution_kind"}),
        (b'{"execution_kind": "x", "input": {"base64": 1, "b/c": 2}}', {"/input/base64", "/input/b~1c"}),
        (b'{"execution_kind": "x", "priority": "high", "delay_until": "soon"}', {"/priority", "/delay_until"}),
        (b'{"execution_kind": "x", "delay_until": "2030-01-01T00:00:00"}', {"/delay_until"}),
        (b'{"execution_kind": "x", "execution_id": "7"}', {"/execution_id"}),
        (b'{"execution_kind": "x", "priority": 2.5}', {"/priority"}),
        (b'{"execution_kind": "x", "arguments": [1]}', {"/arguments"}),
        (b"[]", {""}),
        (b"null", {""}),
    ],
)
async def test_every_wrong_member_is_named(client: httpx.AsyncClient, data: bytes, expected: set[str]) -> None:
    answer = await refused(client, data)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid_request"), answer.text
    assert {one.get("pointer", "") for one in problem["errors"]} == expected, answer.text
    assert all(one["detail"] for one in problem["errors"])


@each(
    ("path", "allowed"),
    [
        ("/v1/events?family=nope", "lease, completion, operator, signal, worker"),
        ("/v1/events?execution=7", "a UUID"),
        ("/v1/executions?limit=5000", "an integer of at least 1 and at most 1000"),
        ("/v1/waits?limit=0", "an integer of at least 1 and at most 1000"),
        ("/v1/executions?created_from=yesterday", "an instant such as 2030-01-31T12:00:00Z"),
        ("/v1/executions?stopped=maybe", "true, false"),
        (
            f"/v1/executions/{UUID(int=7)}/attempts/0/stream/tail?block_seconds=99",
            "a number of at least 0 and at most 30",
        ),
    ],
)
async def test_a_wrong_parameter_is_refused_with_what_is_allowed(
    client: httpx.AsyncClient, path: str, allowed: str
) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["errors"][0]["allowed"]) == (422, allowed), answer.text


@each(
    ("policy", "pointer"),
    [
        ({"retries": 3}, "/policy/retries"),
        ({"retry_policy": {"retries": 3}}, "/policy/retry_policy/retries"),
        ({"timeout_policy": {"attempt_timeout": 3}}, "/policy/timeout_policy/attempt_timeout"),
        ({"timeout_policy": {"attempt_timeout_ms": 3}}, "/policy/timeout_policy/attempt_timeout_ms"),
        ({"retry_policy": {"backoff": {"type": "fixed", "seconds": 3}}}, "/policy/retry_policy/backoff/seconds"),
        ({"fallback_policy": {"tiers": [{"provider": "p", "model": "m", "cost": 3}]}}, "/policy/fallback_policy/tiers"),
        ({"hooks": {"success": {"kind": "k"}}}, "/policy/hooks/success"),
        ({"hooks": {"failure": {"kind": "k", "arguments": {}}}}, "/policy/hooks/failure/arguments"),
        ({"hooks": {"failure": {"kind": "k", "policy": {"retries": 3}}}}, "/policy/hooks/failure/policy/retries"),
    ],
)
async def test_a_policy_has_no_unknown_members(client: httpx.AsyncClient, policy: dict[str, Any], pointer: str) -> None:
    answer = await refused(client, json.dumps({"execution_kind": "work", "policy": policy}).encode())
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["pointer"]) == (400, pointer), answer.text
    assert error["allowed"]


@each(
    ("policy", "pointer"),
    [
        ({"retry_policy": {"max_retries": -1}}, "/policy/retry_policy/max_retries"),
        ({"retry_policy": 3}, "/policy/retry_policy"),
        ({"priority": "x"}, "/policy/priority"),
        ({"routing_requirements": 3}, "/policy/routing_requirements"),
        ({"hooks": {"failure": {}}}, "/policy/hooks/failure/kind"),
        (
            {"routing_requirements": {"required_capabilities": ["a b"]}},
            "/policy/routing_requirements/required_capabilities",
        ),
    ],
)
async def test_a_wrong_member_of_a_policy_is_named(
    client: httpx.AsyncClient, policy: dict[str, Any], pointer: str
) -> None:
    node = {"execution_kind": "k", "policy": policy}
    alone = (await client.post("/v1/executions", json=node)).json()
    batch = (await client.post("/v1/executions/batch", json={"items": [node]})).json()["items"][0]["problem"]
    flow = (await client.post("/v1/flows", json={"nodes": {"n": node}})).json()
    schedule = (await client.put("/v1/schedules/s", json={**node, "every_seconds": 60})).json()
    for found, before in ((alone, ""), (batch, "/items/0"), (flow, "/nodes/n"), (schedule, "")):
        assert (found["status"], found["family"]) == (400, "validation")
        assert [one["pointer"] for one in found["errors"]] == [f"{before}{pointer}"], found


async def test_what_the_engine_refuses_is_named_as_the_request_names_it(client: httpx.AsyncClient) -> None:
    odd = {"execution_kind": "k", "input": {"base64": "AA==", "encoding": "\0"}}
    pages = "\0", "0001-01-01T00:00:00+14:00"
    rows = Rows()
    for method, path, given, name in (
        ("POST", "/v1/executions", odd, "/input/encoding"),
        ("POST", "/v1/flows", {"nodes": {"n": odd}}, "/nodes/n/input/encoding"),
        ("POST", "/v1/api-keys", {"name": "a", "scopes": ["read"], "expires_at": "2050-01-01T00:00:00"}, "/expires_at"),
        ("POST", "/v1/api-keys", {"name": "a", "scopes": ["read"], "expires_seconds": -5}, "/expires_seconds"),
        ("POST", "/v1/bulk/cancel", {"filter": {"kinds": ["\0"]}}, "/filter/kinds"),
        ("GET", "/v1/audit", {"actor": pages[0]}, "actor"),
        ("GET", "/v1/audit", {"since": pages[1]}, "since"),
        ("GET", "/v1/executions", {"lane": pages[0]}, "lane"),
    ):
        with rows.row((path, name)):
            shown = {"params": given} if method == "GET" else {"json": given}
            problem = (await client.request(method, path, **shown)).json()  # type: ignore[arg-type]
            (error,) = problem["errors"]
            assert (problem["status"], error.get("pointer", error.get("parameter"))) == (400, name), problem
            assert "filter." not in problem["detail"] or "filter" in name, problem
    rows.tell()


async def test_a_body_nested_too_deep_is_refused_and_refuses_nothing_else(client: httpx.AsyncClient) -> None:
    def item(opening: str, closing: str, times: int) -> bytes:
        return f'{{"execution_kind":"k","policy":{opening * times}{{}}{closing * times}}}'.encode()

    json_type = {"Content-Type": "application/json"}
    for deep in (
        item('{"hooks":{"failure":{"policy":', "}}}", 150),
        *(b'{"execution_kind":"k","policy":{"%s":%s}}' % (name, b"[" * 900 + b"]" * 900)
          for name in (b"retry_policy", b"budget_ids", b"quota_policy_ids")),
    ):  # fmt: skip
        alone = await client.post("/v1/executions", content=deep, headers=json_type)
        assert (alone.status_code, alone.json()["errors"][0]["pointer"]) == (400, "/policy"), alone.text
        both = b'{"items":[%s,{"execution_kind":"k"}]}' % deep
        batch = await client.post("/v1/executions/batch", content=both, headers=json_type)
        assert [one["status"] for one in batch.json()["items"]] == ["refused", "created"], batch.text


@each("data", [b"", b"{", b"{'a': 1}", b'{"a": NaN}', b"\xff", b'{"execution_kind": "\\ud800"}', b"[" * 100_000])
async def test_a_body_that_is_not_json_is_a_bad_request(client: httpx.AsyncClient, data: bytes) -> None:
    answer = await refused(client, data)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_json"), answer.text


@each("media", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
async def test_only_json_is_read(client: httpx.AsyncClient, media: str) -> None:
    answer = await refused(client, b'{"execution_kind": "work"}', Content_Type=media)
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


async def test_a_compressed_body_is_refused(client: httpx.AsyncClient) -> None:
    body = b'{"execution_kind": "k"}'
    for encoding, data, status in (
        ("gzip", gzip.compress(body), 415),
        ("gzip", body, 415),
        ("br, gzip", body, 415),
        ("Identity", body, 201),
    ):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = await client.post("/v1/executions", content=data, headers=headers)
        assert answer.status_code == status, (encoding, answer.text)
        if status == 415:
            assert answer.json()["errors"][0]["parameter"] == "Content-Encoding"
            assert answer.headers["accept-encoding"] == "identity"


async def test_json_schema_calls_2_0_an_integer_and_so_do_we(client: httpx.AsyncClient) -> None:
    made = await client.post(
        "/v1/executions",
        content=b'{"execution_kind": "work", "priority": 2.0, "arguments": {"a": 2.0}}',
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert made.status_code == 201, made.text
    assert (await client.get(made.headers["Location"])).json()["priority"] == 2


async def test_a_body_is_refused_while_it_grows(client: httpx.AsyncClient, submit: Submit) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 10_000

    url = f"/v1/executions/{await submit()}/cancel"
    told = await client.post(url, content=b" " * 70_000, headers={"Content-Type": "application/json"})
    chunked = await client.post(url, content=endless(), headers={"Content-Type": "application/json"})
    for answer in (told, chunked):
        assert answer.status_code == 413
        problem = answer.json()
        assert (problem["code"], problem["limit_bytes"]) == ("body_too_large", 65_536)
        assert problem["route"] == "/v1/executions/{execution_id}/cancel"
    assert sent < 10


@each("given", ["7", "x" * 40, "%00", "..", "{fp:1}:", "00000000-0000-0000-0000-00000000000g", "%F0%9F%98%80"])
async def test_a_path_that_names_no_id_is_refused(client: httpx.AsyncClient, given: str) -> None:
    answer = await client.get(f"http://server/v1/executions/{given}/state")
    if given == "..":  # the client resolves it
        assert answer.status_code == 404
        return
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["parameter"] == "execution_id"


async def test_an_encoded_slash_does_not_lead_to_another_route(client: httpx.AsyncClient, submit: Submit) -> None:
    execution_id = await submit()
    answer = await client.get(f"/v1/executions/{execution_id}%2Fstate")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    doubled = await client.get(f"/v1//executions/{execution_id}")
    assert doubled.status_code == 404


async def test_paths_and_methods_that_do_not_exist_are_problems(client: httpx.AsyncClient) -> None:
    unknown = await client.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
    assert unknown.json()["instance"] == unknown.headers["x-request-id"]
    other = await client.delete("/v1/executions")
    assert (other.status_code, other.json()["code"]) == (405, "method_not_allowed")
    assert other.headers["allow"] == "GET, HEAD, POST"
    head = await client.head("/v1/executions")
    assert (head.status_code, head.content) == (200, b"")


def test_every_code_has_a_text() -> None:
    texts = problems.codes()
    assert all(texts.values())
    assert texts.keys() == {row.code for row in TAXONOMY} | problems.OWN.keys()


async def test_an_error_of_the_server_shows_nothing_of_it(
    client: httpx.AsyncClient, monkeypatch: Any, submit: Submit
) -> None:
    secret = "postgresql://user:hunter2@host"

    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(secret)

    url = f"/v1/executions/{await submit()}"
    service = client._transport.app.state.service  # type: ignore[attr-defined]
    monkeypatch.setattr(service.engine, "read_executions", broken)
    answer = await client.get(url)
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert secret not in answer.text


async def test_an_error_of_the_engine_on_a_page_beside_the_operations_is_a_problem(engine: ff.Engine) -> None:
    async def page(request: Request) -> Response:
        raise NotFound("thing", "x")

    app = create_app(engine)
    app.add_route("/page", page)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get("/page")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
