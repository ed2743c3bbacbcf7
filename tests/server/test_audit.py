"""The audit log over HTTP: a row for every call that changes something as an operator, and its outcome."""

from __future__ import annotations

from typing import Any

import asyncpg

from flowfabric.server.operation import Repeats
from flowfabric.server.operations import OPERATIONS
from flowfabric.values.api_key import ApiKeyText
from tests.each import Rows
from tests.server.examples import request_of
from tests.server.keyed import Keyed
from tests.server.test_namespaces import a_target
from tests.support import submit

AUDITED = [one for one in OPERATIONS if one.is_audited and one.scope is not None]


async def test_every_audited_operation_leaves_one_row_with_its_outcome(keyed: Keyed) -> None:
    client = await keyed.client("admin", name="alice")
    engine = keyed.engine
    rows = Rows()
    outcomes = set()
    for operation in AUDITED:
        with rows.row(operation.name):
            ids = await a_target(engine)
            before = len((await engine.list_operator_audit()).items)
            answer = await client.request(**request_of(operation, ids))
            (row, *others) = (await engine.list_operator_audit()).items
            assert len(others) == before
            assert (row.actor, row.operation) == ("alice", operation.name)
            assert row.outcome == ("ok" if answer.status_code < 400 else answer.json()["kind"]), answer.text
            assert row.request_id == answer.headers["x-request-id"]
            assert row.key_id and row.address
            if "{execution_id}" in operation.path:
                assert str(ids["execution_id"]) in str(row.target)
            outcomes.add(row.outcome)
    rows.tell()
    assert {"ok", "not_found"} <= outcomes


async def test_a_row_about_several_things_is_found_by_each(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    quota = (await keyed.engine.create_quota_policy(name="q", max_concurrent=1)).quota_policy_id
    target = await submit(keyed.engine)
    await client.post(f"/v1/quotas/{quota}/admissions/{target}")
    await client.post(f"/v1/executions/{target}/cancel")
    for one, expected in (
        (target, ["cancel_execution", "admit_execution"]),
        (quota, ["admit_execution"]),
        (f"{quota}, {target}", ["admit_execution"]),
        (str(target)[:8], []),
    ):
        found = await client.get("/v1/audit", params={"target": str(one)})
        assert [row["operation"] for row in found.json()["items"]] == expected, one


async def test_a_foreign_target_is_recorded_as_not_found(keyed: Keyed) -> None:
    ids = await a_target(keyed.engine)
    client = await keyed.client("operate", namespaces=["theirs"])
    await client.post(f"/v1/executions/{ids['execution_id']}/cancel")
    (row,) = (await keyed.engine.list_operator_audit()).items
    assert (row.operation, row.outcome, row.target) == ("cancel_execution", "not_found", str(ids["execution_id"]))


async def test_a_key_without_the_scope_leaves_a_row_of_its_attempt(keyed: Keyed) -> None:
    client = await keyed.client("read", "submit", "worker", name="mallory")
    engine = keyed.engine
    rows = Rows()
    for operation in AUDITED:
        with rows.row(operation.name):
            ids = await a_target(engine)
            before = len((await engine.list_operator_audit()).items)
            answer = await client.request(**request_of(operation, ids))
            (row, *others) = (await engine.list_operator_audit()).items
            assert (answer.status_code, len(others)) == (403, before)
            assert (row.actor, row.operation, row.outcome) == ("mallory", operation.name, "forbidden")
            assert row.request_id == answer.headers["x-request-id"]
            assert row.key_id and row.address
            if "{execution_id}" in operation.path:
                assert str(ids["execution_id"]) in str(row.target)
    rows.tell()


async def test_reads_submissions_and_unknown_keys_leave_no_row(keyed: Keyed) -> None:
    target = await submit(keyed.engine)
    client = await keyed.client("read", "submit")
    await client.get(f"/v1/executions/{target}")
    await client.post("/v1/executions", json={"execution_kind": "k"})
    await client.post(
        "/v1/executions/batch", json={"items": [{"execution_kind": "k"}]}, headers={"Idempotency-Key": "k"}
    )
    await client.get("/v1/audit")
    await keyed.with_text(ApiKeyText.make().reveal()).post(f"/v1/executions/{target}/cancel")
    assert (await keyed.engine.list_operator_audit()).items == []


async def test_the_log_is_read_over_http_and_never_shows_a_key(keyed: Keyed) -> None:
    client = await keyed.client("admin", name="alice")
    made = await client.post("/v1/api-keys", json={"name": "bob", "scopes": ["read"]})
    for _ in range(3):
        await client.delete(f"/v1/api-keys/{made.json()['key_id']}")
    first = await client.get("/v1/audit", params={"operation": "revoke_api_key", "limit": 2})
    assert [one["outcome"] for one in first.json()["items"]] == ["ok", "ok"]
    rest = await client.get(
        "/v1/audit", params={"operation": "revoke_api_key", "limit": 2, "cursor": first.json()["next_cursor"]}
    )
    assert len(rest.json()["items"]) == 1
    everything = await client.get("/v1/audit")
    assert [one["operation"] for one in everything.json()["items"]] == [*["revoke_api_key"] * 3, "create_api_key"]
    assert everything.json()["items"][-1]["target"] == made.json()["key_id"]
    assert made.json()["key"].split("_", 2)[2] not in everything.text
    assert (await client.get("/v1/audit", params={"actor": "bob"})).json()["items"] == []


async def test_operator_events_carry_the_name_of_the_key(keyed: Keyed) -> None:
    target = await submit(keyed.engine)
    client = await keyed.client("admin", name="alice")
    assert (await client.put(f"/v1/executions/{target}/priority", json={"priority": 7})).status_code == 200
    events = (await client.get(f"/v1/executions/{target}/events")).json()["items"]
    assert [one["actor"] for one in events if one["operator_type"] == "priority_changed"] == ["alice"]


async def test_the_row_is_part_of_the_transaction(keyed: Keyed, sql: asyncpg.Connection[Any]) -> None:
    """If it cannot be written, the operation has not happened."""
    target = await submit(keyed.engine)
    client = await keyed.client("admin")
    await sql.execute("alter table flowfabric.operator_audit add constraint t check (operation <> 'cancel_execution')")
    try:
        answer = await client.post(f"/v1/executions/{target}/cancel")
    finally:
        await sql.execute("alter table flowfabric.operator_audit drop constraint t")
    assert answer.status_code == 500
    assert (await client.get(f"/v1/executions/{target}/state")).json()["public_state"] == "waiting"
    assert (await client.post(f"/v1/executions/{target}/cancel")).status_code == 200


def test_no_audited_operation_is_fenced() -> None:
    assert [one.name for one in AUDITED if one.repeats is Repeats.FENCED] == []
