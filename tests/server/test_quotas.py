"""Quotas over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

import flowfabric as ff
from flowfabric.server.operation import Scope
from flowfabric.values.ids import mint_uuid
from flowfabric.values.quota import quota_policy_id_of
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.support import submit

QUOTAS = "/v1/quotas"


async def create(client: httpx.AsyncClient, name: str = "api", **members: Any) -> str:
    answer = await client.post(QUOTAS, json={"name": name, **members})
    assert answer.status_code == 201, answer.text
    return f"{QUOTAS}/{answer.json()['quota_policy_id']}"


async def test_a_quota_is_created_once_read_and_listed(client: httpx.AsyncClient) -> None:
    body = {"name": "api", "max_requests_per_window": 10, "window_seconds": 30, "max_concurrent": 2, "key": "tenant"}
    made = await client.post(QUOTAS, json=body)
    assert made.json() == {"status": "quota_policy_created", "quota_policy_id": str(quota_policy_id_of("api"))}
    again = await client.post(QUOTAS, json=body)
    assert (again.status_code, again.json()["status"]) == (200, "quota_policy_exists")
    found = (await client.get(f"{QUOTAS}/{quota_policy_id_of('api')}")).json()
    assert (found["name"], found["key"], found["active"], found["waiting"]) == ("api", "tenant", 0, 0)
    assert found["limits"] == {
        "max_requests_per_window": 10, "requests_per_window_seconds": 30, "active_concurrency_cap": 2,
        "jitter_seconds": 0,
    }  # fmt: skip
    await create(client, "batch")
    names: list[str] = []
    params: dict[str, Any] = {"limit": 1}
    while True:
        page = (await client.get(QUOTAS, params=params)).json()
        names += [one["name"] for one in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert sorted(names) == ["api", "batch"]
    assert [one["name"] for one in (await client.get(QUOTAS, params={"prefix": "b"})).json()["items"]] == ["batch"]


async def test_a_change_of_a_quota_holds_only_for_the_numbers_that_were_read(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    quota = await create(client, max_concurrent=1)
    tag = (await client.get(quota)).headers["etag"]
    assert (await client.get(quota, headers={"If-None-Match": tag})).status_code == 304
    await client.post(f"{quota}/admissions/{await submit(plain_engine)}")
    assert (await client.get(quota, headers={"If-None-Match": tag})).status_code == 200  # a slot is held
    answers = await asyncio.gather(
        *(client.patch(quota, json={"max_concurrent": 2 + one}, headers={"If-Match": tag}) for one in range(4))
    )
    assert sorted(one.status_code for one in answers) == [200, 412, 412, 412]
    free = await client.patch(quota, json={"jitter_seconds": 0.5})
    assert (free.status_code, free.json()["limits"]["jitter_seconds"]) == (200, 0.5)
    assert free.headers["etag"] == (await client.get(quota)).headers["etag"]


async def test_admissions_take_slots_under_the_numbers_of_the_quota(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    quota = await create(client, max_concurrent=1)
    first, second = [f"{quota}/admissions/{await submit(plain_engine)}" for _ in range(2)]
    for path, wanted in (
        (first, "admitted"), (first, "already_admitted"), (second, "concurrency_exceeded"),
    ):  # fmt: skip
        assert (await client.post(path)).json() == {"status": wanted}
    assert (await client.post(second, json={"dimension": "other"})).json() == {"status": "admitted"}
    assert (await client.get(quota)).json()["active"] == 2
    for path in (first, first, second):
        assert (await client.delete(path)).status_code == 200
    assert (await client.get(quota)).json()["active"] == 0
    rated = await create(client, "rated", max_requests_per_window=1, window_seconds=60)
    assert (await client.post(f"{rated}/admissions/{mint_uuid()}")).json() == {"status": "admitted"}
    refused = (await client.post(f"{rated}/admissions/{mint_uuid()}")).json()
    assert refused["status"] == "rate_exceeded"
    assert 0 < refused["retry_after_seconds"] <= 60


async def test_wrong_quotas_change_nothing(client: httpx.AsyncClient) -> None:
    quota = await create(client, max_concurrent=1)
    unknown = f"{QUOTAS}/{mint_uuid()}"
    rows = Rows()
    for method, path, body, status in (
        ("POST", QUOTAS, {}, 400),
        ("POST", QUOTAS, {"name": "x", "max_concurrent": -1}, 400),
        ("POST", QUOTAS, {"name": "x", "max_concurrent": "1"}, 422),
        ("POST", QUOTAS, {"name": "x", "window_seconds": 0.5}, 400),
        ("POST", QUOTAS, {"name": "x", "window_seconds": 1e30}, 400),
        ("POST", QUOTAS, {"name": "x", "jitter_seconds": -1}, 400),
        ("POST", QUOTAS, {"name": "x", "burst": 1}, 422),
        ("POST", QUOTAS, {"name": "api", "quota_policy_id": str(mint_uuid())}, 400),
        ("PATCH", quota, {"max_concurrent": 10**10}, 400),
        ("PATCH", unknown, {"max_concurrent": 1}, 404),
        ("GET", unknown, None, 404),
        ("POST", f"{unknown}/admissions/{mint_uuid()}", None, 404),
        ("DELETE", f"{unknown}/admissions/{mint_uuid()}", None, 404),
        ("POST", f"{quota}/admissions/x", None, 422),
        ("POST", f"{quota}/admissions/{mint_uuid()}", {"slots": 2}, 422),
        ("GET", f"{QUOTAS}?cursor=x", None, 422),
    ):
        with rows.row((method, path.rsplit("/", 1)[1], body)):
            refused = await client.request(method, path, json=body)
            assert refused.status_code == status, refused.text
            assert refused.headers["content-type"] == "application/problem+json"
    rows.tell()
    (found,) = (await client.get(QUOTAS)).json()["items"]
    assert (found["name"], found["limits"]["active_concurrency_cap"]) == ("api", 1)


async def test_quotas_are_for_keys_of_all_namespaces(client: httpx.AsyncClient, client_of: MakeClient) -> None:
    quota = await create(client)
    limited, reader = client_of(Scope.ADMIN, namespaces=("a",)), client_of(Scope.READ)
    for method, path, body in (
        ("GET", QUOTAS, None),
        ("POST", QUOTAS, {"name": "x"}),
        ("GET", quota, None),
        ("PATCH", quota, {}),
        ("POST", f"{quota}/admissions/{mint_uuid()}", None),
        ("DELETE", f"{quota}/admissions/{mint_uuid()}", None),
    ):
        assert (await limited.request(method, path, json=body)).status_code == 403
        assert (await reader.request(method, path, json=body)).status_code == (200 if method == "GET" else 403)
