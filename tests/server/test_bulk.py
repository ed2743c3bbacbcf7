"""Bulk jobs over HTTP."""

from __future__ import annotations

import httpx
import pytest

from flowfabric._duties.bulk_work import BulkWork
from tests.server.keyed import Keyed
from tests.support import submit


async def begin(client: httpx.AsyncClient, what: str = "cancel", **members: object) -> httpx.Response:
    return await client.post(f"/v1/bulk/{what}", json=members)


async def test_a_job_is_previewed_begun_followed_and_done(keyed: Keyed) -> None:
    targets = [await submit(keyed.engine) for _ in range(3)]
    client = await keyed.client("operate", name="alice")
    preview = await begin(client, filter={"kinds": ["test"]}, dry_run=True)
    assert (preview.status_code, preview.json()["count"], preview.json()["is_exact"]) == (200, 3, True)
    assert set(preview.json()["sample"]) == {str(one) for one in targets}
    begun = await begin(client, filter={"kinds": ["test"]}, reason="enough")
    assert begun.status_code == 202
    job = begun.json()
    assert (job["state"], job["actor"], job["reason"], job["changed"]) == ("running", "alice", "enough", 0)
    assert await BulkWork(keyed.engine).run_once() == 3
    done = (await client.get(begun.headers["location"])).json()
    assert (done["state"], done["changed"], done["refused"], done["refusals"]) == ("done", 3, 0, [])
    replayed = await begin(client, "replay", filter={"kinds": ["test"], "states": ["cancelled"]})
    await BulkWork(keyed.engine).run_once()
    assert (await client.get(replayed.headers["location"])).json()["changed"] == 3
    rows = (await keyed.engine.list_operator_audit()).items
    assert [(one.operation, one.target) for one in rows] == [
        ("replay_many", replayed.json()["bulk_id"]), ("cancel_many", job["bulk_id"]), ("cancel_many", "dry run"),
    ]  # fmt: skip


async def test_a_job_is_stopped(keyed: Keyed) -> None:
    for _ in range(3):
        await submit(keyed.engine)
    client = await keyed.client("operate")
    begun = await begin(client, filter={"kinds": ["test"]})
    for _ in range(2):
        stopped = await client.delete(begun.headers["location"])
        assert (stopped.status_code, stopped.json()["state"]) == (200, "stopped")
    assert await BulkWork(keyed.engine).run_once() == 0
    assert (await client.get(begun.headers["location"])).json()["changed"] == 0


@pytest.mark.parametrize("what", ["cancel", "replay"])
async def test_bad_filters_are_refused_by_name(keyed: Keyed, what: str) -> None:
    client = await keyed.client("operate", namespaces=["ours"])
    wrong = "completed" if what == "cancel" else "waiting"
    for given, status in (
        ({}, 400),
        ({"states": [wrong]}, 400),
        ({"states": ["nonsense"]}, 422),
        ({"kind": "test"}, 422),
        ({"flow_id": "x"}, 422),
        ({"lane_ids": ["é"]}, 400),
        ({"tag": ["a"]}, 422),
    ):
        answer = await begin(client, what, filter=given)
        assert answer.status_code == status, answer.text
        assert answer.json()["errors"][0].get("pointer", "").startswith("/filter"), answer.text
    assert (await begin(client, what)).status_code == 422
    assert await keyed.engine.list_running_bulk() == []


async def test_a_job_of_another_namespace_is_unknown(keyed: Keyed) -> None:
    for namespace in ("ours", "theirs"):
        await submit(keyed.engine, namespace=namespace)
    ours = await keyed.client("operate", namespaces=["ours"])
    theirs = await keyed.client("operate", namespaces=["theirs"])
    everybody = await keyed.client("operate")
    job = (await begin(ours, filter={"kinds": ["test"]})).json()
    whole = (await begin(everybody, filter={"kinds": ["none"]})).json()
    for client, bulk_id, status in (
        (ours, job["bulk_id"], 200),
        (everybody, job["bulk_id"], 200),
        (theirs, job["bulk_id"], 404),
        (ours, whole["bulk_id"], 404),
    ):
        for method in ("GET", "DELETE"):
            if (method, status) != ("DELETE", 200):
                answer = await client.request(method, f"/v1/bulk/{bulk_id}")
                assert answer.status_code == status, answer.text
    assert await BulkWork(keyed.engine).run_once() == 1
    found = (await everybody.get("/v1/executions", params={"limit": 10})).status_code
    assert found in (200, 403)
    assert (await ours.get(f"/v1/bulk/{job['bulk_id']}")).json()["changed"] == 1
    foreign = await begin(ours, filter={"namespace": "theirs"})
    assert foreign.status_code == 404
