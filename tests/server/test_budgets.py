"""Budgets over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest

import flowfabric as ff
from flowfabric.errors import RetriesExhausted
from flowfabric.server.operation import Scope
from flowfabric.values.budget import budget_id_of
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import BudgetId, mint_uuid
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.support import started, submit

BUDGETS = "/v1/budgets"


async def create(client: httpx.AsyncClient, name: str = "team", **members: Any) -> str:
    answer = await client.post(BUDGETS, json={"name": name, "hard_limits": {"tokens": 100}, **members})
    assert answer.status_code == 201, answer.text
    return f"{BUDGETS}/{answer.json()['budget_id']}"


async def test_a_budget_is_created_once_and_read(client: httpx.AsyncClient) -> None:
    body = {
        "name": "team", "hard_limits": {"tokens": 100, "calls": 5}, "soft_limits": {"tokens": 80},
        "scope_type": "team", "scope_id": "blue", "reset_interval_seconds": 3600,
    }  # fmt: skip
    made = await client.post(BUDGETS, json=body)
    assert (made.status_code, made.json()["status"]) == (201, "budget_created")
    again = await client.post(BUDGETS, json={"name": "team"})
    assert again.status_code == 200
    assert again.json() == {"status": "budget_exists", "budget_id": made.json()["budget_id"]}
    assert made.json()["budget_id"] == str(budget_id_of("team"))
    found = (await client.get(f"{BUDGETS}/{made.json()['budget_id']}")).json()
    assert found["hard_limits"] == {"tokens": 100, "calls": 5}
    assert found["soft_limits"]["tokens"] == 80
    assert (found["scope_type"], found["scope_id"], found["reset_interval_seconds"]) == ("team", "blue", 3600.0)
    assert found["usage"] == {} and found["next_reset_at"] is not None
    by_id = await client.post(BUDGETS, json={"budget_id": str(mint_uuid())})
    assert by_id.status_code == 201


async def test_usage_is_counted_once_per_key_and_says_what_a_limit_says(client: httpx.AsyncClient) -> None:
    budget = await create(client, soft_limits={"tokens": 50})
    key = {"Idempotency-Key": "call-17"}

    async def report(amount: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
        answer = await client.post(f"{budget}/usage", json={"usage": {"tokens": amount}}, headers=headers)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found

    assert await report(40, key) == {"status": "usage_ok", "remaining": {"tokens": 60}}
    assert (await report(40, key))["status"] == "already_applied"
    soft = await report(20)
    assert (soft["status"], soft["current_usage"], soft["soft_limit"]) == ("soft_breach", 60, 50)
    hard = await report(41)
    assert (hard["status"], hard["current_usage"], hard["requested"]) == ("hard_breach", 60, 41)
    assert (await client.get(budget)).json()["usage"] == {"tokens": 60}


async def test_a_change_holds_only_for_the_definition_that_was_read(client: httpx.AsyncClient) -> None:
    budget = await create(client)
    read = await client.get(budget)
    tag = read.headers["etag"]
    assert (await client.get(budget, headers={"If-None-Match": tag})).status_code == 304
    await client.post(f"{budget}/usage", json={"usage": {"tokens": 1}})
    assert (await client.get(budget, headers={"If-None-Match": tag})).status_code == 200
    # Usage moved, the definition did not.
    raised = await client.patch(budget, json={"raise_by": {"tokens": 50}}, headers={"If-Match": tag})
    assert (raised.status_code, raised.json()["hard_limits"]) == (200, {"tokens": 150})
    stale = await client.patch(budget, json={"raise_by": {"tokens": 50}}, headers={"If-Match": tag})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    tags = {"If-Match": f'"other", {raised.headers["etag"]}'}
    lowered = await client.patch(budget, json={"hard_limits": {"tokens": 1}, "enforcement_mode": "warn"}, headers=tags)
    assert (lowered.json()["hard_limits"], lowered.json()["enforcement_mode"]) == ({"tokens": 1}, "warn")
    for header in ({}, {"If-Match": "*"}):
        again = await client.patch(budget, json={"soft_limits": {"tokens": 1}}, headers=header)
        assert again.status_code == 200
    assert (await client.get(budget)).json()["hard_limits"] == {"tokens": 1}


async def test_a_conflict_in_the_database_is_no_stale_definition(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = await create(client)
    tries = 0

    async def update_budget(*_: Any, **__: Any) -> Any:
        nonlocal tries
        tries += 1
        raise RetriesExhausted("deadlock detected")

    monkeypatch.setattr(ff.Engine, "update_budget", update_budget)
    answer = await client.patch(budget, json={"raise_by": {"tokens": 50}})
    assert (answer.json()["code"], tries) == ("retry_exhausted", 3)


async def test_of_changes_at_the_same_time_with_one_tag_one_holds(client: httpx.AsyncClient) -> None:
    budget = await create(client)
    tag = {"If-Match": (await client.get(budget)).headers["etag"]}
    answers = await asyncio.gather(
        *(client.patch(budget, json={"raise_by": {"tokens": 1}}, headers=tag) for _ in range(6))
    )
    assert sorted(one.status_code for one in answers) == [200, 412, 412, 412, 412, 412]
    assert (await client.get(budget)).json()["hard_limits"] == {"tokens": 101}


async def test_a_reset_begins_a_new_period(client: httpx.AsyncClient) -> None:
    budget = await create(client)
    await client.post(f"{budget}/usage", json={"usage": {"tokens": 100}})
    assert (await client.get(budget)).json()["exhausted_by"] == "tokens"
    assert (await client.post(f"{budget}/reset")).json() == {"next_reset_at": None}
    found = (await client.get(budget)).json()
    assert (found["usage"], found["exhausted_by"], found["generation"]) == ({"tokens": 0}, None, 1)


async def test_spending_is_entered_in_the_ledger_and_released(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    budget = await create(client)
    first, second = [str(await submit(plain_engine)) for _ in range(2)]
    key = {"Idempotency-Key": "invoice-1"}
    for expected in ("usage_ok", "already_applied"):
        spent = await client.post(f"{budget}/spend", json={"execution_id": first, "usage": {"tokens": 30}}, headers=key)
        assert spent.json()["status"] == expected
    await client.post(f"{budget}/spend", json={"execution_id": second, "usage": {"tokens": 5, "calls": 1}})
    ledger = (await client.get(f"{budget}/spend")).json()["items"]
    assert {(one["execution_id"], one["dimension"], one["amount"]) for one in ledger} == {
        (first, "tokens", 30), (second, "tokens", 5), (second, "calls", 1)
    }  # fmt: skip
    some = (await client.get(f"{budget}/spend", params={"execution_id": first})).json()["items"]
    assert [one["amount"] for one in some] == [30]
    pages: list[Any] = []
    params: dict[str, Any] = {"limit": 1}
    while True:
        page = (await client.get(f"{budget}/spend", params=params)).json()
        pages += page["items"]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert pages == ledger
    released = await client.post(f"{budget}/release", json={"execution_id": first})
    assert released.json()["execution_id"] == first
    assert (await client.get(budget)).json()["usage"]["tokens"] == 5
    usage = (await client.get(f"/v1/executions/{second}/usage")).json()["items"]
    assert [(one["execution_id"], one["usage"]) for one in usage] == [(second, {"tokens": 5, "calls": 1})]


async def test_budgets_are_listed_by_name_and_filtered(client: httpx.AsyncClient) -> None:
    for name, scope in (("a1", "x"), ("a2", "y"), ("b1", "x")):
        await create(client, name, scope_type="team", scope_id=scope)
    await client.post(f"{BUDGETS}/{budget_id_of('a2')}/usage", json={"usage": {"tokens": 100}})
    for params, wanted in (
        ({}, ["a1", "a2", "b1"]),
        ({"prefix": "a"}, ["a1", "a2"]),
        ({"scope_type": "team", "scope_id": "x"}, ["a1", "b1"]),
        ({"exhausted": "true"}, ["a2"]),
        ({"exhausted": "false", "prefix": "a"}, ["a1"]),
        ({"namespace": "a"}, []),
        ({"limit": 2}, ["a1", "a2"]),
    ):
        found = await client.get(BUDGETS, params=params)
        assert [one["name"] for one in found.json()["items"]] == wanted, params
    rest = await client.get(BUDGETS, params={"limit": 2, "cursor": found.json()["next_cursor"]})
    assert [one["name"] for one in rest.json()["items"]] == ["b1"]
    assert rest.json()["next_cursor"] is None
    assert 'rel="next"' in found.headers["link"]


async def test_a_key_of_a_namespace_has_its_own_budgets(
    client: httpx.AsyncClient, client_of: MakeClient, plain_engine: ff.Engine
) -> None:
    own = client_of(Scope.READ, Scope.OPERATE, namespaces=("a",))
    other = client_of(Scope.READ, Scope.OPERATE, namespaces=("b",))
    mine, shared = await create(own, "mine"), await create(client, "shared")
    found = (await own.get(mine)).json()
    assert (found["scope_type"], found["scope_id"]) == ("namespace", "a")
    assert [one["name"] for one in (await own.get(BUDGETS)).json()["items"]] == ["mine"]
    assert (await other.get(BUDGETS)).json()["items"] == []
    assert (await own.get(BUDGETS, params={"scope_type": "team"})).json()["items"] == []
    here, there = [str(await submit(plain_engine, namespace=one)) for one in ("a", "b")]
    unknown = f"{BUDGETS}/{mint_uuid()}"
    spend = {"execution_id": here, "usage": {"tokens": 1}}
    rows = Rows()
    for method, rest, body in (
        ("GET", "", None),
        ("PATCH", "", {"raise_by": {"tokens": 1}}),
        ("POST", "/usage", {"usage": {"tokens": 1}}),
        ("POST", "/reset", None),
        ("GET", "/spend", None),
        ("POST", "/spend", spend),
        ("POST", "/release", {"execution_id": here}),
    ):
        with rows.row((method, rest)):
            bodies = []
            for by, path in ((other, mine), (own, shared), (own, unknown)):
                refused = await by.request(method, path + rest, json=body)
                assert (refused.status_code, refused.json()["code"]) == (404, "not_found"), path
                bodies.append(refused.json()["detail"].replace(path.rsplit("/", 1)[1], "ID"))
            assert len(set(bodies)) == 1, bodies
            if rest not in ("/spend", "/release") or method == "GET":
                assert (await own.request(method, mine + rest, json=body)).status_code == 200
    rows.tell()
    assert (await own.post(f"{mine}/spend", json={**spend, "execution_id": there})).status_code == 404
    assert (await own.post(f"{mine}/release", json={"execution_id": there})).status_code == 404
    assert (await own.post(f"{mine}/spend", json=spend)).status_code == 200
    assert (await client.get(shared)).json()["usage"] == {}
    # A name that another namespace has is taken; nothing says by which budget.
    for name in ("shared", "mine"):
        taken = await other.post(BUDGETS, json={"name": name})
        assert (taken.status_code, taken.json()["code"]) == (409, "conflict")
        assert str(budget_id_of(name)) not in taken.text
    taken = await other.post(BUDGETS, json={"name": "new", "budget_id": mine.rsplit("/", 1)[1]})
    assert taken.status_code == 409
    assert (await own.post(BUDGETS, json={"name": "mine"})).json()["status"] == "budget_exists"
    assert (await own.post(BUDGETS, json={"name": "x", "namespace": "b"})).status_code == 404
    wrong = await own.post(BUDGETS, json={"name": "x", "scope_type": "team"})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (400, "/scope_type")
    assert (await own.get(f"/v1/executions/{there}/usage")).status_code == 404


async def test_usage_of_children_in_another_namespace_is_left_out(
    client: httpx.AsyncClient, client_of: MakeClient, plain_engine: ff.Engine
) -> None:
    budget = BudgetId(UUID((await create(client)).rsplit("/", 1)[1]))
    parent = await started(plain_engine, namespace="a")
    ids = [parent.execution_id]
    for place, namespace in enumerate(("a", "b")):
        item = NewExecution(execution_kind="child", namespace=namespace)
        ids.append((await plain_engine.submit_child(parent.handle, "submit child", place, item)).execution_id)
    for one in ids:
        await plain_engine.record_spend(budget, one, {"tokens": 1})
    path = f"/v1/executions/{ids[0]}/usage"

    async def shown(by: httpx.AsyncClient, **params: Any) -> list[str]:
        return sorted(one["execution_id"] for one in (await by.get(path, params=params)).json()["items"])

    own = client_of(Scope.READ, namespaces=("a",))
    assert await shown(client) == sorted(map(str, ids))
    assert await shown(own) == sorted(map(str, ids[:2]))
    assert await shown(own, children="false") == [str(ids[0])]
    page = await client.get(path, params={"limit": 2})
    rest = (await client.get(page.links["next"]["url"])).json()
    assert [one["execution_id"] for one in (*page.json()["items"], *rest["items"])] == sorted(map(str, ids))
    assert (len(rest["items"]), rest["next_cursor"]) == (1, None)


async def test_wrong_budgets_change_nothing(client: httpx.AsyncClient) -> None:
    budget = await create(client)
    rows = Rows()
    for method, path, body, pointer in (
        ("POST", BUDGETS, {}, "/name"),
        ("POST", BUDGETS, {"name": "x", "hard_limits": {"tokens": -1}}, "/hard_limits"),
        ("POST", BUDGETS, {"name": "x", "hard_limits": {"": 1}}, "/hard_limits"),
        ("POST", BUDGETS, {"name": "x", "hard_limits": {"tokens": "1"}}, "/hard_limits"),
        ("POST", BUDGETS, {"name": "x", "enforcement_mode": "lax"}, "/enforcement_mode"),
        ("POST", BUDGETS, {"name": "x", "reset_interval_seconds": -1}, "/reset_interval_seconds"),
        ("POST", BUDGETS, {"name": "x", "reset_interval_seconds": 1e300}, "/reset_interval_seconds"),
        ("POST", BUDGETS, {"name": "x", "on_hard_limit": "suspend"}, "/on_hard_limit"),
        ("POST", BUDGETS, {"name": "x", "nothing": 1}, ""),
        ("POST", BUDGETS, {"name": str(mint_uuid())}, "/name"),
        ("PATCH", budget, {"raise_by": {"other": 1}}, "/raise_by"),
        ("PATCH", budget, {"raise_by": {"tokens": -100}}, "/raise_by"),
        ("PATCH", budget, {"hard_limits": {"tokens": 2**63}}, "/hard_limits"),
        ("POST", f"{budget}/usage", {}, ""),
        ("POST", f"{budget}/usage", {"usage": {"tokens": -1}}, "/usage"),
        ("POST", f"{budget}/spend", {"usage": {"tokens": 1}}, ""),
        ("POST", f"{budget}/spend", {"execution_id": "x", "usage": {}}, "/execution_id"),
    ):
        with rows.row((path.rsplit("/", 1)[1], body)):
            refused = await client.request(method, path, json=body)
            assert refused.status_code in (400, 422), refused.text
            shown = refused.json()["errors"][0]
            assert (shown.get("pointer") or "").startswith(pointer), refused.json()
    rows.tell()
    assert [one["name"] for one in (await client.get(BUDGETS)).json()["items"]] == ["team"]
    found = (await client.get(budget)).json()
    assert (found["usage"], found["hard_limits"]) == ({}, {"tokens": 100})
    for path in (f"{BUDGETS}/x", f"{BUDGETS}/{mint_uuid()}"):
        assert (await client.get(path)).status_code == (422 if path.endswith("x") else 404)
    assert (await client.get(BUDGETS, params={"cursor": "x"})).status_code == 422
    unknown = await client.get(f"/v1/executions/{mint_uuid()}/usage")
    assert unknown.status_code == 404


async def test_scopes_of_budgets(client: httpx.AsyncClient, client_of: MakeClient) -> None:
    budget = await create(client)
    reader, operator = client_of(Scope.READ), client_of(Scope.OPERATE)
    assert (await reader.get(budget)).status_code == 200
    assert (await operator.get(budget)).status_code == 403
    for rest, body in (("/usage", {"usage": {}}), ("/reset", None), ("/release", {"execution_id": str(mint_uuid())})):
        assert (await reader.post(budget + rest, json=body)).status_code == 403
        assert (await operator.post(budget + rest, json=body)).status_code == 200
    assert (await reader.patch(budget, json={})).status_code == 403
