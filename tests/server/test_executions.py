"""Executions over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

import flowfabric as ff
from flowfabric.server.app import create_app
from flowfabric.server.operation import Scope
from flowfabric.server.service import NoKeys, Service
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import ExecutionId
from flowfabric.values.step import NewStep
from flowfabric.values.stream import NewFrame
from tests.server.conftest import MakeClient, Submit

SECRET = "the arguments nobody should see"


async def claim(engine: ff.Engine, **how: Any) -> Claimed:
    found = await engine.claim(worker_id="w", worker_instance_id="w-1", **how)
    assert found is not None
    return found


async def read_all(client: httpx.AsyncClient, path: str) -> list[Any]:
    """The items of all pages of a list."""
    items: list[Any] = []
    while True:
        page = await client.get(path)
        assert page.status_code == 200, page.text
        items += page.json()["items"]
        if "next" not in page.links:
            return items
        path = page.links["next"]["url"]


async def test_a_submitted_execution_can_be_read_and_is_listed(client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/executions", json={"execution_kind": "greet", "arguments": {"name": "Ada"}})
    assert made.status_code == 201, made.text
    execution_id = made.json()["execution_id"]
    assert made.json() == {"status": "created", "execution_id": execution_id, "public_state": "waiting"}

    read = await client.get(made.headers["Location"])
    assert read.status_code == 200
    assert read.json()["execution_kind"] == "greet"
    assert read.json()["creator_identity"] == "tester"
    assert read.json()["created_at"].endswith("Z")
    state = await client.get(f"/v1/executions/{execution_id}/state")
    assert state.json() == {"execution_id": execution_id, "public_state": "waiting"}
    given = await client.get(f"/v1/executions/{execution_id}/input")
    assert given.json()["input"] == {"name": "Ada"}

    listed = await client.get("/v1/executions", params={"kind": "greet"})
    assert [one["execution_id"] for one in listed.json()["items"]] == [execution_id]
    assert listed.json()["next_cursor"] is None
    assert "link" not in listed.headers


async def test_an_idempotency_key_returns_the_existing_execution(client: httpx.AsyncClient, submit: Submit) -> None:
    first = await submit(idempotency_key="once")
    for repeat in (
        await client.post("/v1/executions", json={"execution_kind": "work", "idempotency_key": "once"}),
        await client.post("/v1/executions", json={"execution_kind": "work"}, headers={"Idempotency-Key": "once"}),
    ):
        assert repeat.status_code == 200
        assert repeat.json() == {"status": "duplicate", "execution_id": first}
    both = await client.post(
        "/v1/executions",
        json={"execution_kind": "work", "idempotency_key": "once"},
        headers={"Idempotency-Key": "other"},
    )
    assert (both.status_code, both.json()["errors"][0]["pointer"]) == (400, "/idempotency_key")


async def test_every_member_of_a_submission_arrives(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    execution_id = uuid4()
    budget = await plain_engine.create_budget(name="tokens", dimensions=["tokens"], hard_limits=[5], soft_limits=[0])
    made = await client.post(
        "/v1/executions",
        json={
            "execution_kind": "work",
            "idempotency_key": "once",
            "input": {"base64": base64.b64encode(b"\xff\x00").decode(), "encoding": "raw"},
            "lane_id": "slow",
            "namespace": "team",
            "priority": 7,
            "tags": {"a.b": "c"},
            "policy": {
                "retry_policy": {"max_retries": 2, "backoff": {"type": "fixed", "delay_seconds": 0.5}},
                "routing_requirements": {"required_capabilities": ["pdf"]},
                "budget_ids": [str(budget.budget_id)],
            },
            "delay_seconds": 3600,
            "execution_deadline_at": "2100-01-01T00:00:00Z",
            "execution_id": str(execution_id),
        },
    )
    assert made.json() == {"status": "created", "execution_id": str(execution_id), "public_state": "delayed"}
    found = (await client.get(made.headers["Location"])).json()
    assert (found["lane_id"], found["namespace"], found["priority"], found["tags"]) == ("slow", "team", 7, {"a.b": "c"})
    assert found["policy"]["retry_policy"]["max_retries"] == 2
    assert found["policy"]["routing_requirements"]["required_capabilities"] == ["pdf"]
    assert found["policy"]["budget_ids"] == [str(budget.budget_id)]
    assert found["deadline_at"] == "2100-01-01T00:00:00Z"
    given = (await client.get(f"{made.headers['Location']}/input")).json()
    assert given["input"] == {"base64": "/wA=", "encoding": "raw"}


async def test_a_batch_has_an_answer_for_each_item_in_order(client: httpx.AsyncClient, submit: Submit) -> None:
    known = await submit(idempotency_key="once")
    answer = await client.post(
        "/v1/executions/batch",
        json={
            "items": [
                {"execution_kind": "work", "idempotency_key": "once"},
                {"execution_kind": "work", "lane_id": "é"},
                {"execution_kind": "work"},
                {"execution_kind": "work", "input": {"base64": "?"}},
            ]
        },
    )
    assert answer.status_code == 200
    duplicate, wrong_lane, created, wrong_input = answer.json()["items"]
    assert duplicate == {"status": "duplicate", "execution_id": known}
    assert wrong_lane["status"] == "refused"
    assert wrong_lane["problem"]["errors"][0]["pointer"] == "/items/1/lane_id"
    assert (created["status"], created["public_state"]) == ("created", "waiting")
    assert wrong_input["problem"]["errors"][0]["pointer"] == "/items/3/input/base64"
    assert len((await client.get("/v1/executions")).json()["items"]) == 2


async def test_a_list_is_read_page_by_page_with_the_filters_of_its_cursor(
    client: httpx.AsyncClient, submit: Submit
) -> None:
    made = [await submit("a", lane_id=lane, tags={"x.y": "1"}) for lane in ("one", "two", "one", "two", "one")]
    await submit("b")
    seen: list[str] = []
    url = "/v1/executions?kind=a&limit=2&tag=x.y%3D1"
    while True:
        page = await client.get(url)
        assert page.status_code == 200, page.text
        seen += [one["execution_id"] for one in page.json()["items"]]
        if "next" not in page.links:
            break
        url = page.links["next"]["url"]
    assert seen == made[::-1]
    cursor = (await client.get("/v1/executions?kind=a&limit=2")).json()["next_cursor"]
    both = await client.get("/v1/executions", params={"kind": "a", "lane": ["one", "two"], "state": "waiting"})
    assert len(both.json()["items"]) == 5
    other = await client.get("/v1/executions", params={"kind": "b", "cursor": cursor})
    assert other.status_code == 422
    assert other.json()["errors"] == [
        {
            "detail": "belongs to a list with other filters",
            "parameter": "cursor",
            "allowed": "next_cursor of a page with the same filters",
        }
    ]
    larger = await client.get("/v1/executions", params={"kind": "a", "limit": 3, "cursor": cursor})
    assert len(larger.json()["items"]) == 3


async def test_wrong_filters_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for query, name in (
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("state=gone", "state"),
        ("colour=red", "colour"),
        ("stopped=perhaps", "stopped"),
        ("limit=1&limit=2", "limit"),
        ("created_from=yesterday", "created_from"),
        ("cursor=garbage", "cursor"),
        ("order_by=colour", "order_by"),
        ("flow_id=7", "flow_id"),
    ):
        answer = await client.get(f"/v1/executions?{query}")
        assert answer.status_code == 422, query
        assert answer.json()["errors"][0]["parameter"] == name, answer.text


async def test_the_result_is_bytes_and_its_absence_has_a_reason(
    client: httpx.AsyncClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit()
    url = f"/v1/executions/{execution_id}/result"
    assert (await client.get(url)).status_code == 404
    claimed = await claim(plain_engine)
    await plain_engine.complete(claimed.handle, b"\xff\x00", result_encoding="raw")
    done = await client.get(url)
    assert (done.status_code, done.content) == (200, b"\xff\x00")
    assert done.headers["content-type"] == "application/octet-stream"
    assert done.headers["x-result-encoding"] == "raw"

    cancelled = await submit()
    await client.post(f"/v1/executions/{cancelled}/cancel")
    ended = await client.get(f"/v1/executions/{cancelled}/result")
    assert (ended.status_code, ended.json()["kind"]) == (409, "cancelled")

    await client.post(f"/v1/executions/{execution_id}/redact")
    assert (await client.get(url)).status_code == 410
    assert (await client.delete(f"/v1/executions/{execution_id}")).status_code == 204
    gone = await client.get(url)
    assert (gone.status_code, gone.json()["code"]) == (410, "purged")
    assert (await client.get(f"/v1/executions/{uuid4()}/result")).status_code == 404


async def test_bytes_that_are_no_text_arrive_unchanged_everywhere(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    raw, shown = b"\x00\xff\xfe", {"base64": "AP/+", "encoding": "raw"}
    made = await client.post("/v1/executions", json={"execution_kind": "work", "input": shown})
    url = f"/v1/executions/{made.json()['execution_id']}"
    claimed = await claim(plain_engine)
    assert (claimed.input_payload, claimed.payload_encoding) == (raw, "raw")
    await plain_engine.record_steps([(claimed.handle, NewStep(name="s", result=raw, encoding="raw"))])
    await plain_engine.append_frame(claimed.handle, NewFrame(payload=raw, encoding="raw"))
    await plain_engine.complete(claimed.handle, raw, result_encoding="raw")
    assert (await client.get(f"{url}/input")).json()["input"] == shown
    assert (await client.get(f"{url}/steps")).json()["items"][0]["result"] == shown
    assert (await client.get(f"{url}/attempts/0/stream")).json()["frames"][0]["payload"] == shown
    assert (await client.get(f"{url}/result")).content == raw
    assert (await client.get(f"{url}/outcome")).json()["result"] == shown
    exported = json.loads((await client.get("/v1/export")).text)
    assert (exported["input"], exported["result"]) == (shown, shown)


async def test_the_history_of_an_execution_is_listed(
    client: httpx.AsyncClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit()
    claimed = await claim(plain_engine)
    for name, result in (("fetch", b'{"n": 1}'), ("then", b"2"), ("last", b"3")):
        await plain_engine.record_steps([(claimed.handle, ff.engine.steps.NewStep(name=name, result=result))])
    await plain_engine.fail(claimed.handle, "no luck", retry_policy={"max_retries": 0})
    for _ in range(2):
        await plain_engine.replay_execution(ff.ExecutionId(UUID(execution_id)))
        again = await claim(plain_engine)
        await plain_engine.fail(again.handle, "no luck", retry_policy={"max_retries": 0})
    for part, seen in (("attempts", "attempt_index"), ("steps", "name"), ("events", "lease_type"), ("signals", None)):
        answer = await client.get(f"/v1/executions/{execution_id}/{part}")
        assert answer.status_code == 200, answer.text
        items = answer.json()["items"]
        assert [seen in one for one in items] == ([True] * len(items) if seen else [])
        assert bool(items) == (seen is not None), part
        assert (await client.get(f"/v1/executions/{uuid4()}/{part}")).status_code == 404
    steps = (await client.get(f"/v1/executions/{execution_id}/steps")).json()["items"]
    assert [one["result"] for one in steps] == [{"n": 1}, 2, 3]
    first = await client.get(f"/v1/executions/{execution_id}/steps?limit=2")
    last = await client.get(first.links["next"]["url"])
    assert [*first.json()["items"], *last.json()["items"]] == steps
    assert last.json()["next_cursor"] is None
    for part in ("attempts", "steps"):
        path = f"/v1/executions/{execution_id}/{part}"
        whole = (await client.get(path)).json()["items"]
        assert await read_all(client, f"{path}?limit=1") == whole != []
        assert (await client.get(path, params={"limit": len(whole)})).json()["next_cursor"] is None
    events = await client.get(f"/v1/executions/{execution_id}/events?limit=1")
    rest = await client.get(events.links["next"]["url"])
    assert rest.json()["items"][0]["cursor"] != events.json()["items"][0]["cursor"]


async def test_an_outcome_is_waited_for(client: httpx.AsyncClient, submit: Submit, plain_engine: ff.Engine) -> None:
    execution_id = await submit()
    url = f"/v1/executions/{execution_id}/outcome"
    assert (await client.get(url)).json()["is_ended"] is False
    waiting = asyncio.ensure_future(client.get(url, params={"wait": 30}))
    claimed = await claim(plain_engine)
    await plain_engine.complete(claimed.handle, b'{"n": 1}')
    answer = (await waiting).json()
    assert (answer["is_ended"], answer["public_state"], answer["result"]) == (True, "completed", {"n": 1})
    assert (await client.get(f"/v1/executions/{uuid4()}/outcome?wait=30")).status_code == 404
    assert (await client.get(f"{url}?wait=61")).status_code == 422


async def test_a_waiting_outcome_is_answered_when_the_process_ends(
    client: httpx.AsyncClient, submit: Submit, service: Service
) -> None:
    waiting = asyncio.ensure_future(client.get(f"/v1/executions/{await submit()}/outcome?wait=60"))
    await asyncio.sleep(0)
    service.draining.set()
    answer = await waiting
    assert (answer.status_code, answer.json()["is_ended"]) == (200, False)


async def test_waiting_for_outcomes_holds_no_connection(database: str) -> None:
    async with await ff.Engine.connect(database, max_size=1) as engine:
        service = Service(engine, keys=NoKeys())
        transport = httpx.ASGITransport(create_app(engine, service=service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

            async def made() -> str:
                answer = await client.post("/v1/executions", json={"execution_kind": "work"})
                return str(answer.json()["execution_id"])

            ids = [await made() for _ in range(20)]
            waiting = [asyncio.ensure_future(client.get(f"/v1/executions/{one}/outcome?wait=60")) for one in ids]
            await made()
            for one in ids:
                await engine.cancel(ff.engine.executions.Operator(ExecutionId(UUID(one))), "enough")
            answers = await asyncio.gather(*waiting)
        await service.close()
    assert {one.json()["public_state"] for one in answers} == {"cancelled"}


async def test_the_id_of_a_lease_is_for_operators(
    client: httpx.AsyncClient, client_of: MakeClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit()
    claimed = await claim(plain_engine)
    reader = client_of(Scope.READ)
    for part in ("", "/attempts", "/events"):
        url = f"/v1/executions/{execution_id}{part}"
        assert str(claimed.handle.lease_id) in (await client.get(url)).text
        assert str(claimed.handle.lease_id) in (await client_of(Scope.READ, Scope.OPERATE).get(url)).text
        assert str(claimed.handle.lease_id) not in (await reader.get(url)).text


async def test_a_key_that_hides_payloads_shows_none(
    client: httpx.AsyncClient, client_of: MakeClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit(arguments={"text": SECRET})
    claimed = await claim(plain_engine)
    await plain_engine.record_steps(
        [(claimed.handle, ff.engine.steps.NewStep(name="a", result=f'"{SECRET}"'.encode()))]
    )
    await plain_engine.progress(claimed.handle, message=SECRET)
    await plain_engine.fail(claimed.handle, f"Traceback: {SECRET}", retry_policy={"max_retries": 0})
    hiding = client_of(Scope.READ, hides_payloads=True)
    for path in ("", "/attempts", "/steps", "/outcome", "/input", "/result"):
        url = f"/v1/executions/{execution_id}{path}"
        hidden = await hiding.get(url)
        assert SECRET not in hidden.text, path
        assert hidden.status_code == (403 if path in ("/input", "/result") else 200)
        if path != "/result":
            assert SECRET in (await client.get(url)).text, path
    assert SECRET in (await client.get("/v1/executions")).text
    assert SECRET not in (await hiding.get("/v1/executions")).text


async def test_another_namespace_looks_unknown(client_of: MakeClient, submit: Submit) -> None:
    ours, theirs = await submit(namespace="ours"), await submit(namespace="theirs")
    key = client_of(Scope.ADMIN, namespaces=("ours",))
    unknown = uuid4()
    for path in ("", "/state", "/input", "/result", "/attempts", "/steps", "/events", "/signals", "/outcome"):
        foreign, nothing = [await key.get(f"/v1/executions/{one}{path}") for one in (theirs, unknown)]
        assert foreign.status_code == nothing.status_code == 404, path
        assert foreign.json()["detail"].replace(theirs, "") == nothing.json()["detail"].replace(str(unknown), "")
    listed = (await key.get("/v1/executions")).json()["items"]
    assert [one["execution_id"] for one in listed] == [ours]
    assert (await key.get("/v1/executions?namespace=theirs")).status_code == 404
    into = await key.post("/v1/executions", json={"execution_kind": "work", "namespace": "theirs"})
    assert into.status_code == 404
    implied = await key.post("/v1/executions", json={"execution_kind": "work"})
    assert (await key.get(implied.headers["Location"])).json()["namespace"] == "ours"
    of_two = client_of(Scope.ADMIN, namespaces=("ours", "third"))
    unnamed = await of_two.post("/v1/executions", json={"execution_kind": "work"})
    assert (unnamed.status_code, unnamed.json()["errors"][0]["pointer"]) == (422, "/namespace")
    used = await key.post("/v1/executions", json={"execution_kind": "work", "execution_id": theirs})
    assert (used.status_code, theirs in used.text) == (409, False)
    batch = await key.post(
        "/v1/executions/batch",
        json={"items": [{"execution_kind": "work", "namespace": "theirs"}, {"execution_kind": "work"}]},
    )
    assert [one["status"] for one in batch.json()["items"]] == ["refused", "created"]


async def test_a_member_of_a_foreign_flow_is_refused(client_of: MakeClient, plain_engine: ff.Engine) -> None:
    flow = await plain_engine.create_flow(namespace="theirs")
    key = client_of(Scope.ADMIN, namespaces=("ours",))
    answer = await key.post("/v1/executions", json={"execution_kind": "work", "flow_id": str(flow.flow_id)})
    assert answer.status_code == 404


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


@pytest.fixture
def tasks(database: str) -> ff.App:
    app = ff.App(database)

    @app.task(lane="slow", retry=ff.RetryPolicy(max_retries=1))
    async def add(a: int, b: int = 2) -> int:
        return a + b

    return app


async def test_arguments_are_checked_by_the_signature_of_a_known_task(plain_engine: ff.Engine, tasks: ff.App) -> None:
    service = Service(plain_engine, app=tasks, keys=NoKeys())
    transport = httpx.ASGITransport(create_app(plain_engine, service=service))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        name = next(iter(tasks.tasks))
        wrong = await client.post(
            "/v1/executions", json={"execution_kind": name, "arguments": {"b": "x", "c": 1, "a/b": 2}}
        )
        assert wrong.status_code == 422
        assert {one["pointer"] for one in wrong.json()["errors"]} == {
            "/arguments/a", "/arguments/b", "/arguments/c", "/arguments/a~1b"
        }  # fmt: skip
        right = await client.post("/v1/executions", json={"execution_kind": name, "arguments": {"a": 1}})
        found = (await client.get(right.headers["Location"])).json()
        assert (found["lane_id"], found["policy"]["retry_policy"]["max_retries"]) == ("slow", 1)
        other = await client.post("/v1/executions", json={"execution_kind": "elsewhere", "arguments": {"z": 1}})
        assert other.status_code == 201
    await service.close()


async def test_a_known_task_has_the_limits_of_its_options(plain_engine: ff.Engine, database: str) -> None:
    app = ff.App(database)
    app.budget("team", hard={"tokens": 5})
    app.quota("api", concurrent=1, key="tenant")

    @app.task(budgets=["team", "acme"], quotas=["api"])
    async def ask() -> None: ...

    tags = {"tenant": "acme"}
    node = {"execution_kind": ask.name, "tags": tags}
    service = Service(plain_engine, app=app, keys=NoKeys())
    transport = httpx.ASGITransport(create_app(plain_engine, service=service))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        early = await client.post("/v1/executions", json=node)
        assert (early.status_code, early.json()["detail"][:27]) == (400, "budgets: there is no budget")
        await (await app.client()).create_budget("acme", hard={"tokens": 5})
        early = await client.post("/v1/executions", json=node)
        assert (early.status_code, "is declared but not stored" in early.json()["detail"]) == (400, True)
        await app.prepare()
        bare = await client.post("/v1/executions", json={"execution_kind": ask.name})
        assert (bare.status_code, "the tag 'tenant', which is missing" in bare.json()["detail"]) == (400, True)
        assert (await client.post("/v1/executions", json=node)).status_code == 201
        batch = await client.post("/v1/executions/batch", json={"items": [node]})
        assert [one["status"] for one in batch.json()["items"]] == ["created"]
        flow = await client.post("/v1/flows", json={"nodes": {"a": node}})
        assert flow.status_code == 201
        more = await client.post(f"/v1/flows/{flow.json()['flow_id']}/extend", json={"nodes": {"b": node}})
        assert more.is_success, more.json()
        nightly = {**node, "every_seconds": 60}
        assert (await client.put("/v1/schedules/nightly", json=nightly)).status_code == 201
        own = {"execution_kind": ask.name, "policy": {}}
        assert (await client.post("/v1/executions", json=own)).status_code == 201
    await service.close()
    found = [
        await plain_engine.read_execution(one.execution_id) for one in (await plain_engine.find_executions()).items
    ]
    assert sorted((len(one.budget_ids), len(one.quota_policy_ids)) for one in found if one) == [(0, 0), *[(2, 1)] * 4]
    await app.close()


async def test_requests_that_arrive_together_are_one_call(
    plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def count(name: str) -> None:
        call = getattr(plain_engine, name)

        async def counted(items: Any) -> Any:
            sizes.append(len(items))
            return await call(items)

        monkeypatch.setattr(plain_engine, name, counted)

    count("create_many")
    count("read_executions")
    service = Service(plain_engine, keys=NoKeys())
    transport = httpx.ASGITransport(create_app(plain_engine, service=service))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        bodies = [{"execution_kind": "work", "lane_id": "é" if n % 10 == 5 else "default"} for n in range(60)]
        made = await asyncio.gather(*(client.post("/v1/executions", json=one) for one in bodies))
        assert [one.status_code for one in made] == [400 if n % 10 == 5 else 201 for n in range(60)]
        ids = [one.json()["execution_id"] for one in made if one.status_code == 201]
        assert len(set(ids)) == 54
        assert sum(sizes) == 60
        assert len(sizes) < 30
        sizes.clear()
        asked = [ids[n] if n % 10 else str(uuid4()) for n in range(54)]
        found = await asyncio.gather(*(client.get(f"/v1/executions/{one}") for one in asked))
        assert [one.status_code for one in found] == [200 if n % 10 else 404 for n in range(54)]
        assert [one.json()["execution_id"] for one in found if one.status_code == 200] == [
            one for n, one in enumerate(asked) if n % 10
        ]
        assert sum(sizes) == 54
        assert len(sizes) < 27
        sizes.clear()
        await client.post("/v1/executions", json={"execution_kind": "work"})
        await client.get(f"/v1/executions/{ids[0]}")
        assert sizes == [1, 1]
    await service.close()


async def test_delays_have_bounds(client: httpx.AsyncClient) -> None:
    for members, pointer in (
        ({"delay_seconds": 1e300}, "/delay_seconds"),
        ({"delay_seconds": 1, "delay_until": "2030-01-01T00:00:00Z"}, "/delay_seconds"),
        ({"execution_deadline_seconds": -1e11}, "/execution_deadline_seconds"),
    ):
        answer = await client.post("/v1/executions", json={"execution_kind": "work", **members})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (400, pointer)
    past = await client.post(
        "/v1/executions", json={"execution_kind": "work", "delay_seconds": -timedelta(days=1).total_seconds()}
    )
    assert past.json()["public_state"] == "waiting"


async def test_a_record_says_why_the_execution_does_not_run(client: httpx.AsyncClient, submit: Submit) -> None:
    waiting = (await client.get(f"/v1/executions/{await submit()}")).json()
    delayed = (await client.get(f"/v1/executions/{await submit(delay_seconds=60)}")).json()
    assert (waiting["blocking_reason"], delayed["blocking_reason"]) == ("waiting_for_worker", "waiting_for_delay")
    assert "stored_blocking_reason" not in waiting


POLICY = {
    "delay_until": "2090-01-01T00:00:00Z",
    "retry_policy": {
        "max_retries": 2,
        "backoff": {"type": "exponential", "initial_delay_seconds": 0.5, "max_delay_seconds": 60.0, "multiplier": 2.0},
    },
    "timeout_policy": {"attempt_timeout_seconds": 90.0, "execution_deadline_seconds": 3600.0},
    "suspension_policy": {"default_timeout_seconds": 5.0, "timeout_behavior": "fail"},
    "fallback_policy": {"tiers": [{"provider": "a", "model": "b", "timeout_seconds": 1.5}]},
    "stream_policy": {"retention_ttl_seconds": 7.0},
    "dedup_window_seconds": 30.0,
}


async def test_durations_of_a_policy_are_seconds_and_come_back_as_they_were_given(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    made = await client.post("/v1/executions", json={"execution_kind": "work", "policy": POLICY})
    assert made.status_code == 201, made.text
    assert (await client.get(made.headers["location"])).json()["policy"] == POLICY
    stored = await plain_engine.read_execution(ExecutionId(UUID(made.json()["execution_id"])))
    assert stored is not None and stored.policy is not None
    assert stored.policy["timeout_policy"]["attempt_timeout_ms"] == 90_000
    assert stored.policy["delay_until"] == 3_786_912_000_000
    export = (await client.get("/v1/export")).text
    assert "attempt_timeout_seconds" in export or '"policy"' not in export
    assert '_ms"' not in export


async def test_durations_that_are_none_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for policy, field in (
        ({"dedup_window_ms": 5}, "/policy/dedup_window_ms"),
        ({"timeout_policy": {"attempt_timeout_ms": 5}}, "/policy/timeout_policy/attempt_timeout_ms"),
        ({"timeout_policy": {"attempt_timeout_seconds": "5"}}, "/policy/timeout_policy/attempt_timeout_seconds"),
        ({"timeout_policy": {"attempt_timeout_seconds": -1}}, "/policy/timeout_policy/attempt_timeout_seconds"),
        ({"timeout_policy": {"attempt_timeout_seconds": True}}, "/policy/timeout_policy/attempt_timeout_seconds"),
        ({"timeout_policy": {"attempt_timeout_seconds": 1e300}}, "/policy/timeout_policy/attempt_timeout_seconds"),
        ({"delay_until": 5}, "/policy/delay_until"),
        ({"delay_until": "2090-01-01T00:00:00"}, "/policy/delay_until"),
    ):
        refused = await client.post("/v1/executions", json={"execution_kind": "work", "policy": policy})
        assert refused.status_code == 400, refused.text
        assert refused.json()["errors"][0]["pointer"] == field
