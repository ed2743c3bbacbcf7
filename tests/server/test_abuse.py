"""Keys, streams and namespaces, used in ways that no client should."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import flowfabric as ff
from flowfabric.errors import NotFound
from flowfabric.server import front, sse
from flowfabric.server.limits import Limits
from flowfabric.server.routes import outside
from tests.each import Rows
from tests.server.examples import UNKNOWN
from tests.server.following import PATIENCE, Following
from tests.server.keyed import Keyed, without_instance
from tests.support import started, submit
from tests.until import until


async def test_a_stream_ends_when_its_key_does(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "CHECK_SECONDS", 0.01)
    stays = await keyed.engine.create_api_key("stays", ["read"])
    made = await keyed.engine.create_api_key("follower", ["read"])
    execution = await started(keyed.engine)
    for path in ("/v1/events", f"/v1/executions/{execution.execution_id}/attempts/0/stream/events"):
        key = await keyed.engine.rotate_api_key(made.key_id)
        keyed.now += 6
        async with (
            Following(keyed.app, path, key=f"Bearer {stays.key.reveal()}") as other,
            Following(keyed.app, path, key=f"Bearer {key.key.reveal()}") as stream,
            Following(keyed.app, path, key=f"Bearer {key.key.reveal()}") as second,
        ):
            await keyed.engine.rotate_api_key(made.key_id)
            keyed.now += 6
            await stream.ended()
            await second.ended()
            assert (stream.status, second.status) == (200, 200)
            assert not other._task.done()
    assert keyed.service.clients._guard is None
    assert keyed.service.clients.following == 0


async def test_a_poll_whose_key_is_revoked_meanwhile_is_refused(keyed: Keyed) -> None:
    made = await keyed.engine.create_api_key("poller", ["read"])
    held = await started(keyed.engine)
    client = keyed.with_text(made.key.reveal())
    asking = asyncio.create_task(client.get(f"/v1/executions/{held.execution_id}/outcome", params={"wait": 20}))
    await until(lambda: keyed.service._outcomes._waiting)
    await keyed.engine.revoke_api_key(made.key_id)
    keyed.now += 6
    await keyed.engine.complete(held.handle)
    assert (await asking).status_code == 401


async def test_an_export_ends_when_its_client_leaves(plain_engine: ff.Engine, client: httpx.AsyncClient) -> None:
    for _ in range(20):
        await submit(plain_engine)
    app = client._transport.app  # type: ignore[attr-defined]
    async with Following(app, "/v1/export", key=client.headers["authorization"]) as one:
        one._gone.set()
        await one.ended()
        assert one.body.count(b"\n") < 20


async def test_two_keys_in_one_request_are_refused(keyed: Keyed) -> None:
    made = await keyed.engine.create_api_key("one", ["admin"])
    client = keyed.with_text(None)
    key, other = f"Bearer {made.key.reveal()}", "Bearer x"
    for pair in ((key, other), (other, key), (key, key)):
        answer = await client.get("/v1/executions", headers=[("Authorization", one) for one in pair])
        assert answer.status_code == 400, answer.text


async def test_limits_of_other_namespaces_cannot_be_named(keyed: Keyed) -> None:
    """An execution uses its limits up: by naming one, a key could stop what another namespace does."""

    async def budget(name: str, scope_id: str) -> str:
        made = await keyed.engine.create_budget(
            name=name, scope_type="namespace" if scope_id else "", scope_id=scope_id, dimensions=["tokens"],
            hard_limits=[5], soft_limits=[0],
        )  # fmt: skip
        return str(made.budget_id)

    ours, theirs, shared, unknown = await budget("1", "a"), await budget("2", "b"), await budget("3", ""), str(UNKNOWN)
    quota = str((await keyed.engine.create_quota_policy(name="q", max_concurrent=1)).quota_policy_id)
    client = await keyed.client("submit", namespaces=["a"])
    flow = (await client.post("/v1/flows", json={})).json()["flow_id"]
    rows = Rows()
    for policy, what in (
        ({"budget_ids": [ours, theirs]}, ("budget", theirs)),
        ({"budget_ids": [shared]}, ("budget", shared)),
        ({"budget_ids": [unknown]}, ("budget", unknown)),
        ({"quota_policy_ids": [quota]}, ("quota_policy", quota)),
        ({"quota_policy_id": quota}, ("quota_policy", quota)),
        ({"quota_policy_id": unknown}, ("quota_policy", unknown)),
        ({"budget_ids": [ours]}, None),
    ):
        body = {"execution_kind": "x", "policy": policy}
        with rows.row(policy):
            answers = [
                await client.post("/v1/executions", json=body),
                await client.post("/v1/flows", json={"nodes": {"n": body}}),
                await client.post(f"/v1/flows/{flow}/extend", json={"nodes": {"n": body}}),
            ]
            item = (await client.post("/v1/executions/batch", json={"items": [body]})).json()["items"][0]
            if what is None:
                assert [one.status_code for one in answers] == [201] * 3, [one.text for one in answers]
                assert item["status"] == "created"
                continue
            assert [one.status_code for one in answers] == [404] * 3, [one.text for one in answers]
            wanted = str(NotFound(*what))
            assert {item["problem"]["detail"], *(one.json()["detail"] for one in answers)} == {wanted}
    rows.tell()


async def test_hooks_submit_only_to_the_namespaces_of_the_key(keyed: Keyed) -> None:
    """A hook is an execution to come: with another namespace, a key would reach what it may not."""
    client = await keyed.client("admin", namespaces=["a"])
    flow = (await client.post("/v1/flows", json={})).json()["flow_id"]
    theirs = await keyed.engine.create_budget(
        name="theirs", scope_type="namespace", scope_id="b", dimensions=["tokens"], hard_limits=[5], soft_limits=[0]
    )
    cases: list[tuple[Any, int]] = [
        ({}, 201),
        ({"namespace": "a"}, 201),
        ({"namespace": None}, 201),
        ({"namespace": "b"}, 404),
        ({"namespace": ""}, 404),
        ({"policy": {"budget_ids": [str(theirs.budget_id)]}}, 404),
        ("no object", 400),
    ]
    rows = Rows()
    for which in ("failure", "escalation"):
        for more, status in cases:
            hook = {"kind": "hook", **more} if isinstance(more, dict) else more
            body = {"execution_kind": "x", "policy": {"hooks": {which: hook}}}
            with rows.row((which, more)):
                answers = [
                    await client.post("/v1/executions", json=body),
                    await client.post("/v1/flows", json={"nodes": {"n": body}}),
                    await client.post(f"/v1/flows/{flow}/extend", json={"nodes": {"n": body}}),
                ]
                item = (await client.post("/v1/executions/batch", json={"items": [body]})).json()["items"][0]
                assert [one.status_code for one in answers] == [status] * 3, [one.text for one in answers]
                if status != 201:
                    assert item["problem"]["status"] == status
                    continue
                for made in (answers[0].json()["execution_id"], item["execution_id"]):
                    stored = (await client.get(f"/v1/executions/{made}")).json()["policy"]
                    assert stored["hooks"][which]["namespace"] == "a"
    rows.tell()


async def test_graphs_tell_nothing_of_foreign_executions(keyed: Keyed) -> None:
    client = await keyed.client("admin", namespaces=["a"])
    flow = (await client.post("/v1/flows", json={"flow_kind": "f"})).json()["flow_id"]
    own = (await client.post("/v1/executions", json={"execution_kind": "x", "flow_id": flow})).json()["execution_id"]
    await client.post(f"/v1/flows/{flow}/members", json={"execution_id": own})
    foreign = str(await submit(keyed.engine, namespace="b"))

    def edge(upstream: str, downstream: str, **more: Any) -> dict[str, Any]:
        return {
            "upstream_execution_id": upstream,
            "downstream_execution_id": downstream,
            "expected_graph_revision": 1,
            **more,
        }

    rows = Rows()
    for name, ask in {
        "edges from": lambda one: ("edges", edge(one, own)),
        "edges to": lambda one: ("edges", edge(own, one)),
        "apply": lambda one: ("edges", edge(one, own, apply=True)),
        "members": lambda one: ("members", {"execution_id": one}),
        "extend": lambda one: ("extend", {"nodes": {"n": {"execution_kind": "x", "after": [one]}}}),
    }.items():
        with rows.row(name):
            seen = []
            for one in (foreign, str(UNKNOWN)):
                path, body = ask(one)
                answer = await client.post(f"/v1/flows/{flow}/{path}", json=body)
                assert answer.status_code >= 400
                seen.append(str(without_instance(answer)).replace(one, "ID"))
            assert seen[0] == seen[1]
    rows.tell()


async def test_if_match_of_a_priority_holds_until_it_is_changed(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    target = await submit(keyed.engine)
    tag = (await client.get(f"/v1/executions/{target}")).headers["etag"]
    answers = await asyncio.gather(
        *(
            client.put(f"/v1/executions/{target}/priority", json={"priority": n}, headers={"If-Match": tag})
            for n in range(1, 9)
        )
    )
    assert sorted(one.status_code for one in answers) == [200] + [412] * 7
    now = (await client.get(f"/v1/executions/{target}")).headers["etag"]
    assert [one.headers["etag"] for one in answers if one.status_code == 200] == [now]


async def test_anonymous_callers_get_the_document_as_it_was_written_once(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside._document.cache_clear()
    written = []
    monkeypatch.setattr(outside, "document", lambda *given: written.append(given) or {})
    assert [(await client.get("/openapi.json")).json() for _ in range(3)] == [{}] * 3
    assert len(written) == 1
    outside._document.cache_clear()


@pytest.mark.parametrize("begins", [True, False])
async def test_a_client_that_does_not_take_its_answer_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    monkeypatch.setattr(front, "_LAST_WORDS", 0.01)
    limits = Limits()
    limits.request_timeout = 0.01
    aborted = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def blocked(*_: Any) -> None:
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/", "scheme": "http", "headers": [], "client": ("127.0.0.1", 1),
             "extensions": {sse.ABORT: aborted.set}}  # fmt: skip
    async with asyncio.timeout(PATIENCE):
        await front.Front(app, limits=limits)(scope, blocked, blocked)
    assert aborted.is_set()
