"""Keys, streams and namespaces, used in ways that no client should."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import flowfabric as ff
from flowfabric.server.operation import Scope
from flowfabric.server.service import Service
from flowfabric.values.ids import mint_uuid
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.server.following import PATIENCE, Following
from tests.server.keyed import Keyed, without_instance
from tests.support import started, submit


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_head_of_a_stream_leaves_nothing_behind(
    plain_engine: ff.Engine, client: httpx.AsyncClient, service: Service
) -> None:
    held = await started(plain_engine)
    for _ in range(3):
        for path in ("/v1/events", f"/v1/executions/{held.execution_id}/attempts/0/stream/events"):
            answer = await client.head(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    assert plain_engine.followers.count == 0
    assert not service.clients._waiting


@pytest.mark.parametrize("what", ["revoked", "expired"])
async def test_a_stream_ends_when_its_key_does(keyed: Keyed, what: str) -> None:
    made = await keyed.engine.create_api_key("follower", ["read"])
    async with Following(keyed.app, "/v1/events", key=f"Bearer {made.key.reveal()}") as stream:
        await keyed.engine.revoke_api_key(made.key_id)
        keyed.now += 6
        await stream.ended()


async def test_an_export_ends_when_its_client_leaves(
    plain_engine: ff.Engine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        await submit(plain_engine)
    app = client._transport.app  # type: ignore[attr-defined]
    async with Following(app, "/v1/export", key=client.headers["authorization"]) as one:
        one.reads.clear()
        one._gone.set()
        one.body = b""
        one.reads.set()
        await one.ended()
        assert one.body.count(b"\n") < 10


async def test_two_keys_in_one_request_are_refused(keyed: Keyed) -> None:
    made = await keyed.engine.create_api_key("one", ["admin"])
    client = keyed.with_text(None)
    key, other = f"Bearer {made.key.reveal()}", "Bearer x"
    for pair in ((key, other), (other, key), (key, key)):
        answer = await client.get("/v1/executions", headers=[("Authorization", one) for one in pair])
        assert answer.status_code == 400, answer.text


async def test_a_budget_of_another_namespace_cannot_be_named(keyed: Keyed) -> None:
    theirs = await keyed.engine.create_budget(
        None, name="theirs", scope_type="namespace", scope_id="b", dimensions=["t"], hard_limits=[5], soft_limits=[0]
    )
    client = await keyed.client("submit", "read", namespaces=["a"])
    rows = Rows()
    told = []
    for budget in (theirs.budget_id, mint_uuid()):
        body = {"execution_kind": "x", "policy": {"budget_ids": [str(budget)]}}
        one = await client.post("/v1/executions", json=body)
        many = await client.post("/v1/executions/batch", json={"items": [body]})
        print(one.text, many.text)
        told.append(one.text.replace(str(budget), ""))
        with rows.row("one"):
            assert one.status_code in (404, 400, 422), one.text
        with rows.row("batch"):
            assert many.json()["items"][0]["status"] == "refused"
    rows.tell()


async def test_edges_tell_nothing_of_foreign_executions(keyed: Keyed) -> None:
    client = await keyed.client("admin", namespaces=["a"])
    flow = (await client.post("/v1/flows", json={"flow_kind": "f"})).json()["flow_id"]
    member = (await client.post("/v1/executions", json={"execution_kind": "x", "flow_id": flow})).json()["execution_id"]
    await client.post(f"/v1/flows/{flow}/members", json={"execution_id": member})
    foreign = await submit(keyed.engine, namespace="b")
    rows = Rows()
    for path, make in (
        ("edges", lambda one: {"upstream_execution_id": one, "downstream_execution_id": member, "expected_graph_revision": 1}),
        ("edges", lambda one: {"upstream_execution_id": member, "downstream_execution_id": one, "expected_graph_revision": 1}),
        ("edges", lambda one: {"upstream_execution_id": one, "downstream_execution_id": member, "expected_graph_revision": 1, "apply": True}),
        ("members", lambda one: {"execution_id": one}),
        ("extend", lambda one: {"nodes": {"n": {"execution_kind": "x", "after": [one]}}}),
    ):
        seen = []
        for one in (str(foreign), str(mint_uuid())):
            answer = await client.post(f"/v1/flows/{flow}/{path}", json=make(one))
            status, headers, body = without_instance(answer)
            seen.append((status, str(body).replace(one, "ID")))
        with rows.row(path):
            assert seen[0] == seen[1]
            assert seen[0][0] >= 400
            print(seen[0])
    for one in (str(foreign), str(mint_uuid())):
        answer = await client.post(f"/v1/flows/{flow}/edge-groups/{one}", json={"kind": "all_of"})
        print(answer.text)
    rows.tell()


async def test_if_match_of_a_priority_holds_until_it_is_changed(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    target = await submit(keyed.engine)
    tag = (await client.get(f"/v1/executions/{target}")).headers["etag"]
    answers = await asyncio.gather(
        *(client.put(f"/v1/executions/{target}/priority", json={"priority": n}, headers={"If-Match": tag}) for n in range(1, 9))
    )
    assert sorted(one.status_code for one in answers) == [200] + [412] * 7
