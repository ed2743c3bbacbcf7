"""Executions over HTTP."""

from __future__ import annotations

import httpx

from flowfabric.server.operation import Scope
from tests.server.conftest import MakeClient, Submit


async def test_a_submitted_execution_can_be_read_and_is_listed(client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/executions", json={"execution_kind": "greet", "arguments": {"name": "Ada"}})
    assert made.status_code == 201, made.text
    execution_id = made.json()["execution_id"]
    assert made.json() == {"status": "created", "execution_id": execution_id, "public_state": "waiting"}

    read = await client.get(made.headers["Location"])
    assert read.status_code == 200
    assert read.json()["execution_kind"] == "greet"
    assert read.json()["creator_identity"] == "tester"

    listed = await client.get("/v1/executions", params={"kind": "greet"})
    assert [one["execution_id"] for one in listed.json()["items"]] == [execution_id]
    assert listed.json()["next_cursor"] is None


async def test_a_key_without_the_scope_is_refused_as_a_problem(client_of: MakeClient, submit: Submit) -> None:
    execution_id = await submit()
    for client, status, code in (
        (client_of(), 401, "unauthenticated"),
        (client_of(Scope.SUBMIT), 403, "forbidden"),
        (client_of(Scope.READ, namespaces=("theirs",)), 404, "not_found"),
    ):
        answer = await client.get(f"/v1/executions/{execution_id}")
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == code
        assert answer.json()["instance"] == answer.headers["x-request-id"]


async def test_paths_and_methods_that_do_not_exist_are_problems(client: httpx.AsyncClient) -> None:
    unknown = await client.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
    other = await client.delete("/v1/executions")
    assert (other.status_code, other.json()["code"]) == (405, "method_not_allowed")
    assert other.headers["allow"] == "GET, HEAD, POST"
