"""Flows over HTTP: whole graphs in one call, reads and drawings, growing, replaying, cancelling."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx

import flowfabric as ff
from flowfabric._duties.sibling_cancel import SiblingCancel
from flowfabric.server.operation import Scope
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lease import Operator
from tests.server.conftest import MakeClient
from tests.support import claim_one

RELEASE: dict[str, Any] = {
    "flow_kind": "release",
    "tags": {"team.name": "ops"},
    "nodes": {
        "build": {"execution_kind": "build", "arguments": {"version": "v7"}},
        "unit": {"execution_kind": "test", "arguments": {"suite": "unit"}, "arguments_from": {"image": "build"}},
        "slow": {"execution_kind": "test", "arguments": {"suite": "slow"}, "arguments_from": {"image": "build"}},
        "ship": {"execution_kind": "ship", "arguments_from": {"reports": ["unit", "slow"], "image": "build"}},
    },
}


async def submit(client: httpx.AsyncClient, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = await client.post("/v1/flows", json=RELEASE if body is None else body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def three(join: dict[str, Any] | None, **members: Any) -> dict[str, Any]:
    """Three nodes and one behind them."""
    nodes: dict[str, Any] = {name: {"execution_kind": "part", "lane_id": name} for name in "abc"}
    nodes["last"] = {"execution_kind": "last", "lane_id": "last", "after": ["a", "b", "c"], **members}
    if join is not None:
        nodes["last"]["join"] = join
    return {"nodes": nodes}


async def end(engine: ff.Engine, lane: str, *, succeeds: bool = True) -> None:
    """Let the execution of a lane end."""
    held = await claim_one(engine, lane_id=lane)
    if succeeds:
        await engine.complete(held.handle, f'"{lane}"'.encode())
    else:
        await engine.cancel(Operator(held.execution_id), "broken")


async def states(client: httpx.AsyncClient, flow_id: str) -> dict[str, str]:
    graph = (await client.get(f"/v1/flows/{flow_id}/graph")).json()
    return {one["name"]: one["state"] for one in graph["nodes"]}


async def test_a_graph_is_submitted_in_one_call_and_a_worker_runs_it(client: httpx.AsyncClient, database: str) -> None:
    app = ff.App(dsn=database)

    @app.task
    async def build(version: str) -> str:
        return f"image of {version}"

    @app.task
    async def test(suite: str, image: str) -> str:
        return f"{suite} on {image}"

    @app.task
    async def ship(reports: list[str], image: str) -> str:
        return f"{image}: {', '.join(reports)}"

    made = await submit(client)
    assert made["status"] == "created"
    assert list(made["nodes"]) == ["build", "unit", "slow", "ship"]
    async with app, ff.Worker(app):
        while not (results := (await client.get(f"/v1/flows/{made['flow_id']}/results")).json())["is_ended"]:
            await asyncio.sleep(0.02)
    assert results["public_flow_state"] == "completed"
    assert results["results"]["ship"] == "image of v7: unit on image of v7, slow on image of v7"
    assert results["failures"] == {}


async def test_each_join_releases_its_node_when_it_should(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    for join, ends, rest in (
        (None, [True, True, True], {}),
        ({"kind": "all_of"}, [True, True, True], {}),
        ({"kind": "any_of"}, [True], {"b": "cancelled", "c": "cancelled"}),
        ({"kind": "any_of", "on_satisfied": "let_run"}, [True], {"b": "waiting", "c": "waiting"}),
        ({"kind": "quorum", "k": 2}, [True, True], {"c": "cancelled"}),
        ({"kind": "all_settled"}, [False, False, True], {"a": "cancelled", "b": "cancelled"}),
    ):
        made = await submit(client, three(join))
        flow_id = made["flow_id"]
        for lane, succeeds in zip("abc", ends, strict=False):
            assert (await states(client, flow_id))["last"] == "waiting_children", join
            await end(plain_engine, lane, succeeds=succeeds)
        found = await states(client, flow_id)
        assert found["last"] == "waiting", (join, found)
        await SiblingCancel(plain_engine).run_once()
        found = await states(client, flow_id)
        assert rest.items() <= found.items(), (join, found)
        await client.post(f"/v1/flows/{flow_id}/cancel", params={"wait": 5})


async def test_a_graph_that_is_wrong_is_refused_with_the_place_of_the_node(client: httpx.AsyncClient) -> None:
    work = {"execution_kind": "work"}
    for nodes, status, code, pointer in (
        ({"a": {**work, "after": ["b"]}}, 400, "invalid_input", "/nodes/a/after"),
        ({"a": {**work, "arguments_from": {"x": "b"}}}, 400, "invalid_input", "/nodes/a/arguments_from"),
        ({"a": work, "b/~": {**work, "priority": 2**40}}, 400, "invalid_input", "/nodes/b~1~0/priority"),
        ({"a": {**work, "join": {"kind": "any_of"}}}, 400, "invalid_input", "/nodes/a/policy"),
        ({"a": {**work, "join": {"kind": "quorum"}}}, 400, "invalid_input", "/nodes/a/join/k"),
        ({"a": {**work, "join": {"kind": "all_of", "k": 1}}}, 400, "invalid_input", "/nodes/a/join/k"),
        ({"a": {**work, "join": {"kind": "some_of"}}}, 422, "invalid_request", None),
        ({"a": {**work, "join": {"kind": "all_settled", "on_satisfied": "let_run"}}}, 400, "invalid_input",
         "/nodes/a/join/on_satisfied"),
        ({"a": work, "b": {**work, "arguments": {"x": 1}, "arguments_from": {"x": "a"}}}, 400, "invalid_input",
         "/nodes/b/arguments_from"),
        ({"a": {**work, "input": {"base64": "*"}}}, 400, "invalid_input", "/nodes/a/input/base64"),
        ({"a": {**work, "lane_id": "x" * 65}}, 400, "invalid_input", "/nodes/a/lane_id"),
        ({"": work}, 400, "invalid_input", "/nodes//name"),
        ({"a": {**work, "after": ["b"]}, "b": {**work, "after": ["a"]}}, 409, "cycle_detected", None),
        ({"a": {**work, "after": ["a"]}}, 409, "self_referencing_edge", None),
        ({"a": {**work, "policy": {"retry_policy": 5}}}, 400, "invalid_policy_json", None),
        ({"a": {}}, 422, "invalid_request", None),
        ({"a": {**work, "by": "x"}}, 422, "invalid_request", None),
    ):  # fmt: skip
        answer = await client.post("/v1/flows", json={"nodes": nodes})
        assert (answer.status_code, answer.json()["code"]) == (status, code), (nodes, answer.text)
        if pointer is not None:
            assert answer.json()["errors"][0]["pointer"] == pointer, (nodes, answer.text)
    assert (await client.get("/v1/flows")).json()["items"] == []
    assert (await client.get("/v1/executions")).json()["items"] == []


async def test_a_flow_is_submitted_once_per_id_and_per_key(client: httpx.AsyncClient) -> None:
    for given in ({"flow_id": str(uuid4())}, {}):
        headers = {} if given else {"Idempotency-Key": "release-7"}
        first = await client.post("/v1/flows", json={**RELEASE, **given}, headers=headers)
        again = await client.post("/v1/flows", json={**RELEASE, **given}, headers=headers)
        assert (first.status_code, again.status_code) == (201, 200), again.text
        assert again.json() == {**first.json(), "status": "exists"}
        assert again.headers["location"] == f"/v1/flows/{first.json()['flow_id']}"
    other = await client.post(
        "/v1/flows",
        json={"flow_kind": "release", "nodes": {"x": {"execution_kind": "x"}}},
        headers={"Idempotency-Key": "release-7"},
    )
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    both = await client.post(
        "/v1/flows", json={**RELEASE, "flow_id": str(uuid4())}, headers={"Idempotency-Key": "release-8"}
    )
    assert both.status_code == 400
    assert len((await client.get("/v1/flows")).json()["items"]) == 2


async def test_a_flow_is_read_listed_and_drawn(client: httpx.AsyncClient) -> None:
    made = await submit(client)
    path = f"/v1/flows/{made['flow_id']}"
    read = await client.get(path)
    assert read.json()["flow"]["flow_kind"] == "release"
    assert read.json()["flow"]["tags"] == {"team.name": "ops"}
    assert (read.json()["public_flow_state"], read.json()["summary"]["total_members"]) == ("blocked", 4)
    assert (await client.get(path, headers={"If-None-Match": read.headers["etag"]})).status_code == 304
    listed = (await client.get("/v1/flows", params={"kind": "release"})).json()["items"]
    assert [one["flow_id"] for one in listed] == [made["flow_id"]]
    assert (await client.get("/v1/flows", params={"kind": "other"})).json()["items"] == []

    graph = (await client.get(f"{path}/graph")).json()
    assert [one["name"] for one in graph["nodes"]] == ["build", "unit", "slow", "ship"]
    assert len(graph["edges"]) == 5
    for form, media, begins in (
        ("svg", "image/svg+xml", "<svg"),
        ("mermaid", "text/vnd.mermaid", "flowchart"),
        ("dot", "text/vnd.graphviz", "digraph"),
    ):
        drawn = await client.get(f"{path}/graph", params={"format": form})
        assert (drawn.status_code, drawn.headers["content-type"].split(";")[0]) == (200, media)
        assert drawn.text.lstrip().startswith(begins), drawn.text[:80]
        assert "default-src 'none'" in drawn.headers["content-security-policy"]
    assert (await client.get(f"{path}/graph", params={"format": "png"})).status_code == 422


async def test_a_drawing_contains_no_markup_of_users(client: httpx.AsyncClient) -> None:
    nasty = '"><script>alert(1)</script>'
    made = await submit(client, {"nodes": {nasty: {"execution_kind": nasty}}})
    drawn = await client.get(f"/v1/flows/{made['flow_id']}/graph", params={"format": "svg"})
    assert "<script" not in drawn.text


async def test_members_and_edges_come_in_pages(client: httpx.AsyncClient) -> None:
    made = await submit(client)
    path = f"/v1/flows/{made['flow_id']}"
    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await client.get(f"{path}/members", params={"limit": 3, **cursor})).json()
        names += [one["name"] for one in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert names == ["build", "unit", "slow", "ship"]
    page = (await client.get(f"{path}/edges", params={"limit": 3})).json()
    rest = (await client.get(f"{path}/edges", params={"limit": 3, "cursor": page["next_cursor"]})).json()
    assert (len(page["items"]), len(rest["items"]), rest["next_cursor"]) == (3, 2, None)
    into = (await client.get(f"{path}/edges", params={"incoming": made["nodes"]["ship"]})).json()["items"]
    assert {one["upstream_execution_id"] for one in into} == {made["nodes"][one] for one in ("build", "unit", "slow")}
    out = (await client.get(f"{path}/edges", params={"outgoing": made["nodes"]["build"]})).json()["items"]
    assert len(out) == 3
    for params in ({"limit": 0}, {"limit": 1001}, {"cursor": "x"}):
        assert (await client.get(f"{path}/edges", params=params)).status_code == 422
    assert (await client.get(f"{path}/members", params={"cursor": "x"})).status_code == 422
    both = {"incoming": made["nodes"]["ship"], "outgoing": made["nodes"]["ship"]}
    assert (await client.get(f"{path}/edges", params=both)).status_code == 400


async def test_a_flow_grows_after_members_by_name_and_by_id(client: httpx.AsyncClient) -> None:
    made = await submit(client)
    path = f"/v1/flows/{made['flow_id']}"
    more = {
        "nodes": {
            "announce": {"execution_kind": "announce", "arguments_from": {"what": "ship"}},
            "tidy": {"execution_kind": "tidy", "after": ["announce", made["nodes"]["build"]]},
        }
    }
    headers = {"Idempotency-Key": "more-1"}
    grown = await client.post(f"{path}/extend", json=more, headers=headers)
    assert grown.status_code == 201, grown.text
    again = await client.post(f"{path}/extend", json=more, headers=headers)
    assert (again.status_code, again.content) == (201, grown.content)
    other = {"nodes": {"else": {"execution_kind": "x"}}}
    reused = await client.post(f"{path}/extend", json=other, headers=headers)
    assert (reused.status_code, reused.json()["code"]) == (422, "idempotency_key_reused")
    edges = (await client.get(f"{path}/edges", params={"incoming": grown.json()["nodes"]["tidy"]})).json()["items"]
    assert {one["upstream_execution_id"] for one in edges} == {
        grown.json()["nodes"]["announce"], made["nodes"]["build"],
    }  # fmt: skip
    wrong = await client.post(f"{path}/extend", json={"nodes": {"x": {"execution_kind": "x", "after": ["nobody"]}}})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (400, "/nodes/x/after")
    assert len((await client.get(f"{path}/members")).json()["items"]) == 6
    await client.post(f"{path}/cancel")
    closed = await client.post(f"{path}/extend", json={"nodes": {"x": {"execution_kind": "x"}}})
    assert (closed.status_code, closed.json()["code"]) == (409, "flow_already_terminal")


async def test_a_flow_is_built_step_by_step(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    empty = await submit(client, {"flow_kind": "by hand", "tags": {"a.b": "c"}})
    flow_id, path = empty["flow_id"], f"/v1/flows/{empty['flow_id']}"
    assert empty["nodes"] == {}
    assert (await client.get(path)).json()["flow"]["tags"] == {"a.b": "c"}
    repeated = await client.post("/v1/flows", json={"flow_id": flow_id})
    assert (repeated.status_code, repeated.json()["status"]) == (200, "exists")
    members = []
    for lane in ("up", "down"):
        body = {"execution_kind": "work", "lane_id": lane, "flow_id": flow_id}
        execution_id = (await client.post("/v1/executions", json=body)).json()["execution_id"]
        added = await client.post(f"{path}/members", json={"execution_id": execution_id})
        assert (added.status_code, added.json()["status"]) == (201, "added"), added.text
        members.append(execution_id)
    again = await client.post(f"{path}/members", json={"execution_id": members[0]})
    assert again.json() == {"status": "already_member", "execution_id": members[0], "node_count": 2}
    alone = (await client.post("/v1/executions", json={"execution_kind": "work"})).json()["execution_id"]
    assert (await client.post(f"{path}/members", json={"execution_id": alone})).status_code == 400

    join = await client.post(f"{path}/edge-groups/{members[1]}", json={"kind": "any_of", "on_satisfied": "let_run"})
    assert join.json() == {"status": "set"}, join.text
    wrong = await client.post(f"{path}/edge-groups/{members[1]}", json={"kind": "quorum"})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (400, "/k")

    ends = {"upstream_execution_id": members[0], "downstream_execution_id": members[1]}
    stale = await client.post(f"{path}/edges", json={**ends, "expected_graph_revision": 0})
    assert (stale.status_code, stale.json()["retryable"]) == (409, True)
    revision = (await client.get(path)).json()["flow"]["graph_revision"]
    staged = await client.post(f"{path}/edges", json={**ends, "expected_graph_revision": revision})
    assert (staged.status_code, staged.json()["new_graph_revision"]) == (201, revision + 1), staged.text
    edge = {"edge_id": staged.json()["edge_id"], **ends}
    applied = await client.post(f"{path}/edges/apply", json=edge)
    assert applied.json() == {"status": "applied", "unsatisfied_count": 1}
    assert (await client.post(f"{path}/edges/apply", json=edge)).json() == {"status": "already_applied"}
    differs = await client.post(f"{path}/edges/apply", json={**edge, "data_passing_ref": "x"})
    assert (differs.status_code, differs.json()["code"]) == (400, "invalid_dependency")
    back = {"upstream_execution_id": members[1], "downstream_execution_id": members[0]}
    cycle = await client.post(f"{path}/edges", json={**back, "expected_graph_revision": revision + 1})
    assert (cycle.status_code, cycle.json()["code"]) == (409, "cycle_detected")

    body = {"execution_kind": "work", "lane_id": "third", "flow_id": flow_id}
    third = (await client.post("/v1/executions", json=body)).json()["execution_id"]
    await client.post(f"{path}/members", json={"execution_id": third})
    both = {"upstream_execution_id": members[1], "downstream_execution_id": third, "apply": True}
    at_once = await client.post(f"{path}/edges", json={**both, "expected_graph_revision": revision + 2})
    assert (at_once.status_code, at_once.json()["status"]) == (201, "edge_applied"), at_once.text
    assert (await plain_engine.read_execution(ExecutionId(UUID(third)))).public_state == "waiting_children"  # type: ignore[union-attr]


async def test_failed_nodes_and_those_skipped_because_of_them_are_replayed(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    made = await submit(client, {
        "nodes": {
            "first": {"execution_kind": "work", "lane_id": "first"},
            "then": {"execution_kind": "work", "lane_id": "then", "after": ["first"]},
        }
    })  # fmt: skip
    path = f"/v1/flows/{made['flow_id']}"
    held = await claim_one(plain_engine, lane_id="first")
    await plain_engine.fail(held.handle, "boom: secret-17", category="permanent")
    await plain_engine.dispatch_cascades()
    results = (await client.get(f"{path}/results")).json()
    assert results["failures"]["first"]["failure_reason"] == "boom: secret-17"
    assert (results["is_ended"], results["skipped"]) == (True, ["then"])
    replayed = await client.post(f"{path}/replay", json={"reason": "fixed"})
    assert [one["node"] for one in replayed.json()["replayed"]] == ["first", "then"], replayed.text
    assert replayed.json()["refused"] == []
    assert await states(client, made["flow_id"]) == {"first": "waiting", "then": "waiting_children"}
    assert (await client.post(f"{path}/replay")).json()["replayed"] == []


async def test_a_flow_is_cancelled_by_each_policy(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    for policy, expected in (
        ("cancel_all", {"a": "cancelled", "b": "cancelled", "c": "cancelled"}),
        ("cancel_pending", {"a": "active", "b": "cancelled", "c": "cancelled"}),
        ("flow_only", {"a": "active", "b": "waiting", "c": "waiting"}),
    ):
        made = await submit(
            client, {"nodes": {name: {"execution_kind": "w", "lane_id": f"{name}-{policy}"} for name in "abc"}}
        )
        path = f"/v1/flows/{made['flow_id']}"
        await claim_one(plain_engine, lane_id=f"a-{policy}")
        body = {"cancellation_policy": policy, "reason": "enough"}
        done = await client.post(f"{path}/cancel", params={"wait": 5}, json=body)
        assert (done.status_code, done.json()["status"]) == (200, "flow_cancelled"), done.text
        assert done.json()["cancellation_policy"] == policy
        assert await states(client, made["flow_id"]) == expected, policy
        read = (await client.get(path)).json()["flow"]
        assert (read["cancellation_policy"], read["cancel_reason"]) == (policy, "enough")
    for body, params in (({"cancellation_policy": "cancel_some"}, {}), (None, {"wait": 301}), (None, {"wait": "true"})):
        assert (await client.post(f"{path}/cancel", json=body, params=params)).status_code == 422


async def test_cancelling_without_waiting_leaves_the_members_to_the_duties(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    made = await submit(client, three(None))
    path = f"/v1/flows/{made['flow_id']}"
    scheduled = await client.post(f"{path}/cancel")
    assert (scheduled.json()["status"], scheduled.json()["member_count"]) == ("cancellation_scheduled", 4)
    # A second request that waits does what the first left.
    waited = await client.post(f"{path}/cancel", params={"wait": 5}, json={"cancellation_policy": "flow_only"})
    assert (waited.json()["status"], waited.json()["cancellation_policy"]) == ("flow_cancelled", "cancel_all")
    assert set((await states(client, made["flow_id"])).values()) == {"cancelled"}
    assert await plain_engine.read_cancel_backlog(FlowId(UUID(made["flow_id"]))) is None


async def test_a_repeated_cancel_gets_the_answer_of_its_transaction(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    made = await submit(client, three(None))
    key = {"Idempotency-Key": "stop"}
    path = f"/v1/flows/{made['flow_id']}/cancel?wait=5"
    first = await client.post(path, headers=key)
    assert first.json()["status"] == "flow_cancelled"
    again = await client.post(path, headers=key)
    assert (again.json()["status"], again.headers["idempotency-replayed"]) == ("cancellation_scheduled", "true")
    rows = (await plain_engine.list_operator_audit()).items
    assert [(row.actor, row.operation, row.target, row.outcome) for row in rows] == [
        ("tester", "cancel_flow", made["flow_id"], "ok")
    ]


async def test_a_cancel_that_waits_in_vain_says_so_and_holds_no_connection(
    client: httpx.AsyncClient, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    made = await submit(client, three(None))
    flow_id, path = FlowId(UUID(made["flow_id"])), f"/v1/flows/{made['flow_id']}"
    await plain_engine.cancel_flow_header(flow_id)
    async with sql.transaction():
        await sql.execute("select from flowfabric.cancel_backlog for update")
        answer = await client.post(f"{path}/cancel", params={"wait": 0.3})
        idle = (
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and state like 'idle in%' and pid <> pg_backend_pid()"
        )
        assert await sql.fetchval(idle) == 0
    assert (answer.status_code, answer.json()["code"], answer.json()["kind"]) == (504, "timeout", "timed_out")
    assert "closed" in answer.json()["detail"]
    assert (await client.post(f"{path}/cancel", params={"wait": 5})).json()["status"] == "flow_cancelled"


async def test_an_ended_flow_is_deleted(client: httpx.AsyncClient) -> None:
    made = await submit(client)
    path = f"/v1/flows/{made['flow_id']}"
    live = await client.delete(path)
    assert (live.status_code, live.json()["kind"]) == (409, "flow_not_terminal")
    await client.post(f"{path}/cancel", params={"wait": 5})
    assert (await client.delete(path)).status_code == 204
    assert (await client.get(path)).status_code == 404


READS = ("", "/graph", "/graph?format=svg", "/members", "/edges", "/results")


async def test_flows_of_other_namespaces_and_unknown_ones_are_the_same(
    client: httpx.AsyncClient, client_of: MakeClient
) -> None:
    made = await submit(client, {**RELEASE, "namespace": "theirs"})
    foreign = client_of(*Scope, namespaces=("ours",))
    limited = client_of(Scope.READ, Scope.SUBMIT, Scope.OPERATE, namespaces=("ours",))
    unknown = str(uuid4())
    some = made["nodes"]["build"]
    edge = {"upstream_execution_id": some, "downstream_execution_id": made["nodes"]["ship"]}
    requests: list[tuple[str, str, Any]] = [
        *(("GET", read, None) for read in READS),
        ("POST", "/members", {"execution_id": some}),
        ("POST", "/edges", {**edge, "expected_graph_revision": 9}),
        ("POST", "/edges/apply", {**edge, "edge_id": unknown}),
        ("POST", f"/edge-groups/{some}", {"kind": "any_of"}),
        ("POST", "/extend", {"nodes": {"x": {"execution_kind": "x"}}}),
        ("POST", "/replay", None),
        ("POST", "/cancel", None),
        ("DELETE", "", None),
    ]
    for who in (foreign, limited):
        for method, path, body in requests:
            there = await who.request(method, f"/v1/flows/{made['flow_id']}{path}", json=body)
            nowhere = await who.request(method, f"/v1/flows/{unknown}{path}", json=body)
            assert (there.status_code, nowhere.status_code) == (404, 404), (method, path, there.text)
            assert there.json()["detail"].replace(made["flow_id"], unknown) == nowhere.json()["detail"]
        assert (await who.get("/v1/flows")).json()["items"] == []
    for method, path, body in requests:  # without a namespace, too, the unknown is not found
        nowhere = await client.request(method, f"/v1/flows/{unknown}{path}", json=body)
        is_elsewhere = method == "POST" and path.startswith(
            ("/members", "/edge-groups")
        )  # an execution of another partition
        assert nowhere.status_code == (400 if is_elsewhere else 404), (method, path, nowhere.text)

    # Its id cannot be used to see it, and its executions cannot be taken.
    taken = await limited.post("/v1/flows", json={**RELEASE, "flow_id": made["flow_id"]})
    assert (taken.status_code, some in taken.text) == (404, False)
    ours = await limited.post("/v1/flows", json={"flow_kind": "ours"})
    assert ours.status_code == 201
    stolen = await limited.post(f"/v1/flows/{ours.json()['flow_id']}/members", json={"execution_id": some})
    nothing = await limited.post(f"/v1/flows/{ours.json()['flow_id']}/members", json={"execution_id": unknown})
    assert (stolen.status_code, nothing.status_code) == (404, 404)
    assert stolen.json()["detail"].replace(some, unknown) == nothing.json()["detail"]
    named = await limited.post("/v1/flows", json={**RELEASE, "namespace": "theirs"})
    assert named.status_code == 404


async def test_the_nodes_of_a_flow_are_of_its_namespace(
    client: httpx.AsyncClient, client_of: MakeClient, plain_engine: ff.Engine
) -> None:
    limited = client_of(Scope.SUBMIT, Scope.READ, namespaces=("ours",), name="ci")
    made = await submit(limited)
    await limited.post(f"/v1/flows/{made['flow_id']}/extend", json={"nodes": {"x": {"execution_kind": "x"}}})
    for execution in (await client.get("/v1/executions")).json()["items"]:
        assert execution["namespace"] == "ours"
    stored = await plain_engine.read_execution(ExecutionId(UUID(made["nodes"]["build"])))
    assert stored is not None
    assert stored.creator_identity == "ci"


async def test_a_key_needs_the_scope_and_may_hide_payloads(
    client: httpx.AsyncClient, client_of: MakeClient, plain_engine: ff.Engine
) -> None:
    made = await submit(client, {"nodes": {"a": {"execution_kind": "w", "lane_id": "a"}}})
    path = f"/v1/flows/{made['flow_id']}"
    held = await claim_one(plain_engine, lane_id="a")
    await plain_engine.fail(held.handle, "boom: secret-17", category="permanent")
    hiding = client_of(Scope.READ, hides_payloads=True)
    for read in READS:
        assert "secret-17" not in (await hiding.get(f"{path}{read}")).text
    reader, submitter = client_of(Scope.READ), client_of(Scope.SUBMIT)
    assert "secret-17" in (await reader.get(f"{path}/members")).text
    assert (await reader.post("/v1/flows", json=RELEASE)).status_code == 403
    assert (await reader.post(f"{path}/extend", json={"nodes": {}})).status_code == 403
    assert (await submitter.get(path)).status_code == 403
    for operation in ("cancel", "replay"):
        assert (await submitter.post(f"{path}/{operation}")).status_code == 403
    assert (await submitter.delete(path)).status_code == 403
