"""Repeated requests: the answer is given again, and nothing is done twice."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import httpx

from flowfabric.server.operation import Repeats
from flowfabric.server.operations import OPERATIONS
from flowfabric.values.kept_answer import AnswerKey
from tests.each import Rows
from tests.server.examples import request_of
from tests.server.keyed import Keyed, without_instance
from tests.server.test_namespaces import a_target
from tests.support import Clock, submit

KEY = {"Idempotency-Key": "k-1"}


def same(first: httpx.Response, second: httpx.Response) -> bool:
    assert second.headers["idempotency-replayed"] == "true"
    return (first.status_code, first.content) == (second.status_code, second.content)


async def test_a_repeat_gets_the_first_answer(keyed: Keyed, clock: Clock) -> None:
    client = await keyed.client("admin")
    target = await submit(keyed.engine)
    path = f"/v1/executions/{target}/cancel"
    first = await client.post(path, json={"reason": "a"}, headers=KEY)
    assert first.status_code == 200 and "idempotency-replayed" not in first.headers
    assert same(first, await client.post(path, json={"reason": "a"}, headers=KEY))
    other = await client.post(path, json={"reason": "b"}, headers=KEY)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    elsewhere = await client.post(
        f"/v1/executions/{await submit(keyed.engine)}/cancel", json={"reason": "a"}, headers=KEY
    )
    assert elsewhere.json()["code"] == "idempotency_key_reused"
    assert len((await keyed.engine.list_operator_audit()).items) == 1
    await clock.advance(hours=25)
    assert (await client.post(path, json={"reason": "b"}, headers=KEY)).status_code == 200


async def test_keys_of_callers_and_operations_are_apart(keyed: Keyed) -> None:
    target = await submit(keyed.engine)
    first, second = await keyed.client("admin"), await keyed.client("admin")
    assert (await first.post(f"/v1/executions/{target}/cancel", headers=KEY)).status_code == 200
    answer = await second.post(f"/v1/executions/{target}/cancel", headers=KEY)
    assert answer.status_code == 200 and "idempotency-replayed" not in answer.headers
    assert (await first.post(f"/v1/executions/{target}/replay", headers=KEY)).status_code == 200


async def test_a_refusal_is_kept_too(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    target = await submit(keyed.engine)
    first = await client.post(f"/v1/executions/{target}/replay", headers=KEY)
    assert (first.status_code, first.json()["code"]) == (409, "execution_not_terminal")
    await keyed.engine.cancel_many([target], "now it could be replayed")
    assert same(first, await client.post(f"/v1/executions/{target}/replay", headers=KEY))


async def test_a_request_for_another_version_is_another_request(keyed: Keyed) -> None:
    """A caller whose tag was stale reads again, and repeats the request with the key it has."""
    client = await keyed.client("admin")
    path = "/v1/schedules/beat"
    first = await client.put(path, json={"execution_kind": "beat", "every_seconds": 60})
    current = await client.put(path, json={"execution_kind": "beat", "every_seconds": 61})
    for _ in range(2):
        stale = await client.post(f"{path}/pause", headers={**KEY, "If-Match": first.headers["etag"]})
        assert stale.status_code == 412 and "idempotency-replayed" not in stale.headers
    fresh = {**KEY, "If-Match": current.headers["etag"]}
    done = await client.post(f"{path}/pause", headers=fresh)
    assert (done.status_code, done.json()["paused"]) == (200, True), done.text
    # A repeat of what was done gets the first answer: its tag is stale because of it.
    assert same(done, await client.post(f"{path}/pause", headers=fresh))


async def test_a_secret_is_never_given_again(keyed: Keyed, sql: asyncpg.Connection[Any]) -> None:
    client = await keyed.client("admin")
    body = {"name": "ci", "scopes": ["read"]}
    made = await client.post("/v1/api-keys", json=body, headers=KEY)
    again = await client.post("/v1/api-keys", json=body, headers=KEY)
    assert (again.status_code, again.json()["code"]) == (409, "repeated_secret")
    assert "new" in again.json()["detail"]
    stored = str([dict(row) for row in await sql.fetch("select * from flowfabric.kept_answer")])
    assert made.json()["key"].split("_", 2)[2] not in stored
    # A refusal has no secret, and is not remembered.
    refused = await client.post("/v1/api-keys", json=body, headers={"Idempotency-Key": "other"})
    assert refused.json()["code"] == "api_key_exists"
    await keyed.engine.revoke_api_key(made.json()["key_id"])
    assert (await client.post("/v1/api-keys", json=body, headers={"Idempotency-Key": "other"})).status_code == 201


async def test_one_still_under_way_is_refused(keyed: Keyed) -> None:
    made = await keyed.engine.create_api_key("ci", ["admin"])
    client = keyed.with_text(made.key.reveal())
    target = await submit(keyed.engine)
    path = f"/v1/executions/{target}/cancel"
    answers = await asyncio.gather(*(client.post(path, headers=KEY) for _ in range(4)))
    statuses = sorted(one.status_code for one in answers)
    assert statuses[0] == 200 and set(statuses) <= {200, 409}
    assert all(one.json()["code"] == "request_in_progress" for one in answers if one.status_code == 409)
    assert len((await keyed.engine.list_operator_audit()).items) == 1
    held = AnswerKey(key_id=made.key_id, operation="replay_execution", idempotency_key="k-1", holder=uuid4())
    await keyed.engine.begin_answer(held, b"another body, so that it would be refused")
    other = await client.post(f"/v1/executions/{target}/replay", headers=KEY)
    assert other.json()["code"] == "idempotency_key_reused"


async def test_what_failed_on_our_side_can_be_repeated(keyed: Keyed, sql: asyncpg.Connection[Any]) -> None:
    client = await keyed.client("admin")
    target = await submit(keyed.engine)
    path = f"/v1/executions/{target}/cancel"
    await sql.execute("alter table flowfabric.operator_audit add constraint t check (false)")
    try:
        assert (await client.post(path, headers=KEY)).status_code == 500
    finally:
        await sql.execute("alter table flowfabric.operator_audit drop constraint t")
    assert (await client.get(f"/v1/executions/{target}/state")).json()["public_state"] == "waiting"
    assert (await client.post(path, headers=KEY)).status_code == 200
    for _ in range(2):
        unavailable = await client.post("/v1/admin/rotate-waitpoint-secret", headers=KEY)
        assert unavailable.status_code == 503 and "idempotency-replayed" not in unavailable.headers


async def test_every_operation_that_keeps_its_answer_gives_it_again(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    rows = Rows()
    for operation in OPERATIONS:
        if operation.repeats not in (Repeats.KEPT, Repeats.SECRET):
            continue
        with rows.row(operation.name):
            request = request_of(operation, await a_target(keyed.engine))
            first = await client.request(**request, headers=KEY)
            again = await client.request(**request, headers=KEY)
            if first.status_code in (422, 503):
                assert without_instance(again)[0] == first.status_code  # never began
            elif operation.repeats is Repeats.SECRET and first.status_code < 400:
                assert again.json()["code"] == "repeated_secret"
            elif operation.repeats is Repeats.KEPT:
                assert same(first, again), (first.text, again.text)
    rows.tell()


async def test_a_key_must_be_a_short_printable_text(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    for wrong in ("", " ", "x" * 256, "\x7f"):
        answer = await client.post(
            "/v1/bulk/cancel", json={"filter": {"kinds": ["k"]}}, headers={"Idempotency-Key": wrong}
        )
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), wrong
