"""Schedules over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest

import flowfabric as ff
from flowfabric.server.operation import Scope
from flowfabric.worker.schedules import ScheduleDuty
from tests.server.conftest import MakeClient
from tests.support import Clock

NIGHTLY: dict[str, Any] = {
    "execution_kind": "report",
    "cron": "0 3 * * *",
    "timezone": "Europe/Berlin",
    "arguments": {"of": "yesterday"},
    "catch_up": "one",
    "overlap": "skip",
    "lane_id": "reports",
    "namespace": "billing",
    "tags": {"team.name": "ops"},
    "priority": 7,
    "execution_deadline_seconds": 3600,
}


async def test_a_schedule_is_stored_read_and_run(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    made = await client.put("/v1/schedules/nightly", json=NIGHTLY)
    assert (made.status_code, made.json()["status"]) == (201, "created"), made.text
    read = await client.get("/v1/schedules/nightly")
    assert read.json() == made.json()["schedule"]
    assert read.headers["etag"] == made.headers["etag"]
    for name, value in NIGHTLY.items():
        assert read.json()[name] == value, name
    assert read.json()["next_at"] is not None
    assert (await client.put("/v1/schedules/nightly", json=NIGHTLY)).json()["status"] == "unchanged"
    changed = await client.put("/v1/schedules/nightly", json={**NIGHTLY, "priority": 8})
    assert (changed.status_code, changed.json()["status"]) == (200, "changed")
    assert [one["name"] for one in (await client.get("/v1/schedules")).json()["items"]] == ["nightly"]

    ran = await client.post("/v1/schedules/nightly/run")
    assert ran.status_code == 201
    execution = await plain_engine.read_execution(ff.ExecutionId(UUID(ran.json()["execution_id"])))
    assert execution is not None
    assert (execution.execution_kind, execution.lane_id, execution.namespace, execution.priority) == (
        "report", "reports", "billing", 8,
    )  # fmt: skip
    assert ran.headers["location"] == f"/v1/executions/{execution.execution_id}"

    assert (await client.delete("/v1/schedules/nightly")).status_code == 204
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/run")):
        assert (await client.request(method, f"/v1/schedules/nightly{path}")).status_code == 404, path


async def test_a_schedule_is_paused_and_resumed(client: httpx.AsyncClient) -> None:
    every = {"execution_kind": "beat", "every_seconds": 60, "anchor": "2030-01-01T00:00:00Z"}
    made = (await client.put("/v1/schedules/beat", json=every)).json()["schedule"]
    assert (made["every_seconds"], made["anchor"], made["cron"]) == (60, "2030-01-01T00:00:00Z", None)
    assert (await client.post("/v1/schedules/beat/pause")).json()["paused"] is True
    assert (await client.get("/v1/schedules/beat")).json()["paused"] is True
    assert (await client.post("/v1/schedules/beat/resume")).json()["paused"] is False


async def test_what_cannot_be_scheduled_is_refused_and_stores_nothing(client: httpx.AsyncClient) -> None:
    beat = {"execution_kind": "beat", "every_seconds": 60}
    for members, status, pointer in (
        ({"cron": "0 3 * * *"}, 400, "/every_seconds"),
        ({"every_seconds": None}, 400, "/cron"),
        ({"every_seconds": 0.1}, 400, "/every_seconds"),
        ({"every_seconds": None, "cron": "0 3 * *"}, 400, "/cron"),
        ({"every_seconds": None, "cron": "@daily", "timezone": "Nowhere/Town"}, 400, "/timezone"),
        ({"every_seconds": None, "cron": "@daily", "anchor": "2030-01-01T00:00:00Z"}, 400, "/anchor"),
        ({"timezone": "Europe/Berlin"}, 400, "/timezone"),
        ({"catch_up": "some"}, 422, "/catch_up"),
        ({"overlap": "wait"}, 422, "/overlap"),
        ({"lane_id": "x" * 65}, 400, "/lane_id"),
        ({"namespace": "\0"}, 400, "/namespace"),
        ({"execution_kind": "x" * 300}, 400, "/execution_kind"),
        ({"priority": 2**40}, 400, "/priority"),
        ({"anchor": "2030-01-01T00:00:00"}, 400, "/anchor"),
    ):
        answer = await client.put("/v1/schedules/beat", json={**beat, **members})
        assert answer.status_code == status, (members, answer.text)
        assert answer.json()["errors"][0]["pointer"] == pointer, (members, answer.text)
    policy = await client.put("/v1/schedules/beat", json={**beat, "policy": {"retry_policy": 5}})
    assert (policy.status_code, policy.json()["code"]) == (400, "invalid_policy_json")
    unknown = await client.put("/v1/schedules/beat", json={**beat, "every": 5})
    assert (unknown.status_code, "every" in unknown.text) == (422, True)
    assert (await client.get("/v1/schedules")).json()["items"] == []


async def test_a_schedule_that_was_changed_meanwhile_is_not_overwritten_but_one_that_fired_is(
    client: httpx.AsyncClient, plain_engine: ff.Engine, clock: Clock
) -> None:
    beat = {"execution_kind": "beat", "every_seconds": 60}
    missing = await client.put("/v1/schedules/beat", json=beat, headers={"If-Match": '"1.2"'})
    assert missing.status_code == 412
    await client.put("/v1/schedules/beat", json=beat)
    read = await client.get("/v1/schedules/beat")
    await clock.advance(seconds=90)
    assert await ScheduleDuty(plain_engine).run_once() == 1
    fired = await client.get("/v1/schedules/beat", headers={"If-None-Match": read.headers["etag"]})
    assert fired.status_code == 200
    assert fired.json()["last_execution_id"] is not None
    tag = {"If-Match": read.headers["etag"]}
    changed = await client.put("/v1/schedules/beat", json={**beat, "priority": 1}, headers=tag)
    assert (changed.status_code, changed.json()["status"]) == (200, "changed")
    assert changed.headers["etag"] == (await client.get("/v1/schedules/beat")).headers["etag"]
    late = await client.put("/v1/schedules/beat", json={**beat, "priority": 2}, headers=tag)
    assert (late.status_code, late.json()["code"]) == (412, "precondition_failed")
    assert (await client.get("/v1/schedules/beat")).json()["priority"] == 1

    tag = {"If-Match": changed.headers["etag"]}
    several = await asyncio.gather(
        *(client.put("/v1/schedules/beat", json={**beat, "priority": n}, headers=tag) for n in (3, 4, 5))
    )
    assert sorted(one.status_code for one in several) == [200, 412, 412]


async def test_a_schedule_that_was_changed_meanwhile_is_not_paused_resumed_or_deleted(
    client: httpx.AsyncClient, plain_engine: ff.Engine, clock: Clock
) -> None:
    path = "/v1/schedules/beat"
    made = await client.put(path, json={"execution_kind": "beat", "every_seconds": 60})
    await clock.advance(seconds=90)
    assert await ScheduleDuty(plain_engine).run_once() == 1  # that it fires is no change
    paused = await client.post(f"{path}/pause", headers={"If-Match": made.headers["etag"]})
    assert (paused.status_code, paused.json()["paused"]) == (200, True), paused.text
    stale = {"If-Match": made.headers["etag"]}
    changes = (("POST", f"{path}/pause"), ("POST", f"{path}/resume"), ("DELETE", path))
    for method, where in changes:
        late = await client.request(method, where, headers=stale)
        assert (late.status_code, late.json()["code"]) == (412, "precondition_failed"), (method, where, late.text)
    read = await client.get(path)
    assert (read.json(), read.headers["etag"]) == (paused.json(), paused.headers["etag"])
    resumed = await client.post(f"{path}/resume", headers={"If-Match": f"W/{read.headers['etag']}"})
    assert (resumed.status_code, resumed.json()["paused"]) == (200, False), resumed.text
    assert (await client.post(f"{path}/pause", headers={"If-Match": "*"})).status_code == 200
    current = {"If-Match": (await client.get(path)).headers["etag"]}
    several = await asyncio.gather(  # it is paused: to pause it would change nothing
        *(client.request(method, where, headers=current) for method, where in (*changes[1:], *changes[1:]))
    )
    done, *others = sorted(one.status_code for one in several)
    assert done in (200, 204) and set(others) <= {404, 412}, [one.text for one in several]  # 404: it was deleted
    for method, where in changes:
        unknown = await client.request(method, where.replace("beat", "unknown"), headers=current)
        assert unknown.status_code == 404, unknown.text


async def test_a_put_for_whichever_version_there_is_makes_no_schedule_anew(
    client: httpx.AsyncClient, plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, beat = "/v1/schedules/beat", {"execution_kind": "beat", "every_seconds": 60}
    await client.put(path, json=beat)
    kept = await client.put(path, json={**beat, "priority": 1}, headers={"If-Match": "*"})
    assert (kept.status_code, kept.json()["status"]) == (200, "changed"), kept.text
    read = ff.Engine.server_time_ms

    async def deleted(engine: ff.Engine) -> int:
        """Between the read of the schedule and the change."""
        await engine.delete_schedule("beat")
        return await read(engine)

    monkeypatch.setattr(ff.Engine, "server_time_ms", deleted)
    late = await client.put(path, json=beat, headers={"If-Match": "*"})
    assert (late.status_code, late.json()["code"]) == (412, "precondition_failed"), late.text
    assert (await client.get(path)).status_code == 404


async def test_pausing_a_paused_schedule_and_resuming_another_change_nothing(
    client: httpx.AsyncClient, clock: Clock
) -> None:
    path = "/v1/schedules/beat"
    await client.put(path, json={"execution_kind": "beat", "every_seconds": 60})
    for change in ("resume", "pause"):
        if change == "pause":
            await client.post(f"{path}/pause")
        before = await client.get(path)
        await clock.advance(seconds=1)
        again = await client.post(f"{path}/{change}")
        assert (again.status_code, again.json()) == (200, before.json())
        assert again.headers["etag"] == before.headers["etag"]


async def test_more_than_one_if_match_is_refused(client: httpx.AsyncClient) -> None:
    made = await client.put("/v1/schedules/beat", json={"execution_kind": "beat", "every_seconds": 60})
    both = [("If-Match", '"1.2"'), ("If-Match", made.headers["etag"])]
    answer = await client.post("/v1/schedules/beat/pause", headers=both)
    assert (answer.status_code, answer.json()["detail"]) == (400, "the header if-match is given more than once")


async def test_a_schedule_that_an_app_declares_is_the_apps(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    await plain_engine.put_schedule(
        "declared", kind="beat", timing={"every_ms": 60_000}, next_at=None, options={"app": "shop"}
    )
    assert (await client.get("/v1/schedules/declared")).json()["app"] == "shop"
    refused = await client.put("/v1/schedules/declared", json={"execution_kind": "other", "every_seconds": 5})
    assert (refused.status_code, refused.json()["errors"][0]["parameter"]) == (400, "name")
    assert (await client.post("/v1/schedules/declared/pause")).status_code == 200


async def test_schedules_of_other_namespaces_are_unknown_and_payloads_can_be_hidden(
    client: httpx.AsyncClient, client_of: MakeClient
) -> None:
    await client.put("/v1/schedules/nightly", json=NIGHTLY)
    theirs = client_of(Scope.READ, Scope.OPERATE, namespaces=("other",))
    assert (await theirs.get("/v1/schedules")).json()["items"] == []
    unknown = await theirs.get("/v1/schedules/unknown")
    foreign = await theirs.get("/v1/schedules/nightly")
    assert (foreign.status_code, foreign.json()["detail"].replace("nightly", "unknown")) == (
        404, unknown.json()["detail"],
    )  # fmt: skip
    for method, path in (("PUT", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/run")):
        body = NIGHTLY if method == "PUT" else None
        assert (await theirs.request(method, f"/v1/schedules/nightly{path}", json=body)).status_code == 403
    ours = client_of(Scope.READ, namespaces=("billing",))
    assert [one["name"] for one in (await ours.get("/v1/schedules")).json()["items"]] == ["nightly"]
    hidden = client_of(Scope.READ, hides_payloads=True)
    assert "yesterday" not in (await hidden.get("/v1/schedules")).text
    assert "yesterday" not in (await hidden.get("/v1/schedules/nightly")).text
