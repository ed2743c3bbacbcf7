"""Workers over HTTP: who is alive, whose leases expired, and grants."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx

import flowfabric as ff
from flowfabric.server.operation import Scope
from flowfabric.values.ids import mint_uuid
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.support import Clock, started, submit

TTL = timedelta(seconds=60)
CLAIM = "/v1/workers/pool/claim"


async def everything(client: httpx.AsyncClient, path: str, **params: Any) -> list[Any]:
    found: list[Any] = []
    while True:
        page = (await client.get(path, params={"limit": 1, **params})).json()
        found += page["items"]
        if page["next_cursor"] is None:
            return found
        params["cursor"] = page["next_cursor"]


async def test_live_workers_are_listed_by_namespace(
    plain_engine: ff.Engine, client: httpx.AsyncClient, client_of: MakeClient
) -> None:
    for instance, namespace in (("w-1", ""), ("w-2", "a"), ("w-3", "a"), ("w-2", "b")):
        await plain_engine.register_worker(
            "w", instance, lanes=["default"], liveness_ttl=TTL, namespace=namespace, kinds=["greet"]
        )
    every = await everything(client, "/v1/workers")
    assert [(one["namespace"], one["worker_instance_id"]) for one in every] == [
        ("", "w-1"), ("a", "w-2"), ("a", "w-3"), ("b", "w-2"),
    ]  # fmt: skip
    assert (every[0]["liveness_ttl_seconds"], every[0]["kinds"]) == (60.0, {"greet": []})
    for by in (client, client_of(Scope.READ, namespaces=("a", "b"))):
        own = await everything(by, "/v1/workers", namespace="a")
        assert [one["worker_instance_id"] for one in own] == ["w-2", "w-3"]
    only = client_of(Scope.READ, namespaces=("b",))
    assert [one["namespace"] for one in await everything(only, "/v1/workers")] == ["b"]
    for path in ("/v1/workers", "/v1/leases/expired"):
        assert (await only.get(path, params={"namespace": "a"})).status_code == 404
        assert (await client.get(path, params={"cursor": "x"})).status_code == 422
        assert (await client_of(Scope.WORKER).get(path)).status_code == 403


async def test_expired_leases_show_their_ids_to_operators_only(
    plain_engine: ff.Engine, clock: Clock, client: httpx.AsyncClient, client_of: MakeClient
) -> None:
    held = [await started(plain_engine, namespace=one) for one in ("a", "b", "")]
    assert (await client.get("/v1/leases/expired")).json()["items"] == []
    await clock.advance(minutes=5)
    for by, leases in (
        (client_of(Scope.READ), {None}),
        (client_of(Scope.READ, Scope.OPERATE), {str(one.handle.lease_id) for one in held}),
    ):
        every = await everything(by, "/v1/leases/expired")
        assert {one["execution_id"] for one in every} == {str(one.execution_id) for one in held}
        assert {one["lease_id"] for one in every} == leases
    own = await everything(client_of(Scope.READ, namespaces=("a",)), "/v1/leases/expired")
    assert [one["execution_id"] for one in own] == [str(held[0].execution_id)]
    early = await client.get("/v1/leases/expired", params={"as_of": "2020-01-01T00:00:00Z"})
    assert early.json()["items"] == []


async def test_a_worker_is_granted_what_it_can_run(plain_engine: ff.Engine, client_of: MakeClient) -> None:
    worker = client_of(Scope.WORKER)
    body = {"worker_instance_id": "pool-1", "kinds": ["greet"], "grant_ttl_seconds": 10}
    assert (await worker.post(CLAIM, json=body)).status_code == 204
    await submit(plain_engine, execution_kind="other")
    target = await submit(plain_engine, execution_kind="greet")
    granted = await worker.post(CLAIM, json=body)
    assert granted.status_code == 200
    assert granted.headers["cache-control"] == "no-store"
    found = granted.json()
    assert (found["kind"], found["execution_id"], found["lane_id"]) == ("claim", str(target), "default")
    assert (await worker.post(CLAIM, json=body)).status_code == 204  # reserved
    claimed = await plain_engine.claim_execution(
        target, worker_id="pool", worker_instance_id="pool-1", lease_id=mint_uuid(), attempt_id=mint_uuid(),
        grant_key=found["grant_key"],
    )  # fmt: skip
    assert claimed.execution_id == target


async def test_a_lost_lease_is_granted_for_reclaiming(
    plain_engine: ff.Engine, clock: Clock, client_of: MakeClient
) -> None:
    held = await started(plain_engine)
    await clock.advance(minutes=5)
    await plain_engine.mark_lease_expired_if_due(held.execution_id)
    granted = await client_of(Scope.WORKER).post(CLAIM, json={"worker_instance_id": "pool-1"})
    assert (granted.json()["kind"], granted.json()["execution_id"]) == ("reclaim", str(held.execution_id))


async def test_a_key_of_a_namespace_is_never_given_work_of_another(
    plain_engine: ff.Engine, client_of: MakeClient
) -> None:
    for namespace in ("b", "", "a", "b", ""):
        await submit(plain_engine, namespace=namespace, priority=0 if namespace == "a" else 9)
    own = client_of(Scope.WORKER, namespaces=("a",))
    body = {"worker_instance_id": "pool-1"}
    granted = await own.post(CLAIM, json=body)
    target = granted.json()["execution_id"]
    info = await plain_engine.read_execution_info(target)
    assert info is not None
    assert info.namespace == "a"
    assert (await own.post(CLAIM, json=body)).status_code == 204
    assert (await own.post(CLAIM, json={**body, "namespace": "b"})).status_code == 404
    both = client_of(Scope.WORKER, namespaces=("a", "b"))
    assert (await both.post(CLAIM, json=body)).status_code == 422
    assert (await both.post(CLAIM, json={**body, "namespace": "b"})).status_code == 200


async def test_wrong_claims_are_refused(
    plain_engine: ff.Engine, client: httpx.AsyncClient, client_of: MakeClient
) -> None:
    await submit(plain_engine)
    good = {"worker_instance_id": "pool-1"}
    rows = Rows()
    for path, body, status in (
        (CLAIM, {}, 422),
        (CLAIM, {**good, "grant_ttl_seconds": 0}, 400),
        (CLAIM, {**good, "grant_ttl_seconds": 61}, 400),
        (CLAIM, {**good, "lane_id": "é"}, 400),
        (CLAIM, {**good, "lane_id": ""}, 400),
        (CLAIM, {**good, "capabilities": ["a b"]}, 400),
        (CLAIM, {**good, "capabilities": "a"}, 422),
        (CLAIM, {**good, "kinds": [""]}, 400),
        (CLAIM, {**good, "namespace": ""}, 400),
        (CLAIM, {"worker_instance_id": "a b"}, 400),
        ("/v1/workers/a%20b/claim", good, 400),
        (f"/v1/workers/{'w' * 257}/claim", good, 400),
    ):
        with rows.row((path[:40], body)):
            refused = await client.post(path, json=body)
            assert refused.status_code == status, refused.text
    rows.tell()
    assert (await client_of(Scope.READ, Scope.OPERATE).post(CLAIM, json=good)).status_code == 403
    assert (await client_of(Scope.WORKER).post(CLAIM, json=good)).status_code == 200
