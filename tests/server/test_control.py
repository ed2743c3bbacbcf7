"""What operators do to executions over HTTP."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import httpx

import flowfabric as ff
from flowfabric.server.operation import Scope
from flowfabric.server.routes import control
from flowfabric.values.conditions import OperatorOnly
from flowfabric.values.ids import ExecutionId
from flowfabric.values.wait import Fresh
from tests.each import Rows
from tests.server.conftest import MakeClient, Submit
from tests.server.test_executions import claim

BODIES: dict[str, Any] = {
    "reclaim_execution": {"worker_id": "w", "worker_instance_id": "w-1"},
    "change_priority": {"priority": 3},
    "set_tag": {"value": "x"},
}


async def test_an_execution_is_cancelled_replayed_and_forked(
    client: httpx.AsyncClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit(arguments={"a": 1, "b": 2})
    url = f"/v1/executions/{execution_id}"
    first = await client.post(f"{url}/cancel", json={"reason": "enough"})
    assert first.json() == {
        "execution_id": execution_id, "public_state": "cancelled", "has_children": False, "was_cancelled": False
    }  # fmt: skip
    assert (await client.post(f"{url}/cancel")).json()["was_cancelled"] is True
    assert (await client.get(url)).json()["cancellation_reason"] == "enough"
    again = await client.post(f"{url}/replay", json={"reason": "try again"})
    assert again.json() == {"execution_id": execution_id, "public_state": "waiting"}
    running = await client.post(f"{url}/replay")
    assert (running.status_code, running.json()["code"]) == (409, "execution_not_terminal")
    fork = await client.post(f"{url}/fork", json={"arguments": {"b": 3}})
    assert (fork.status_code, fork.json()["forked_from"]) == (201, execution_id)
    assert (await client.get(f"{fork.headers['Location']}/input")).json()["input"] == {"a": 1, "b": 3}
    wrong = await client.post(f"{url}/fork", json={"arguments": {"b": 3, "promt": 1}})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/arguments/promt"), wrong.text
    assert "a, b" in wrong.text
    nothing = await client.post(f"{url}/fork", json={"before_step": "never"})
    assert (nothing.status_code, nothing.json()["errors"][0]["pointer"]) == (400, "/before_step")
    attempts = (await client.get(f"{url}/attempts")).json()["items"]
    claimed = await claim(plain_engine)
    assert attempts == []
    assert str(claimed.execution_id) in (execution_id, fork.json()["execution_id"])


async def test_a_lease_is_revoked_and_the_execution_reclaimed(
    client: httpx.AsyncClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit()
    url = f"/v1/executions/{execution_id}"
    claimed = await claim(plain_engine)
    early = await client.post(f"{url}/reclaim", json=BODIES["reclaim_execution"])
    assert (early.status_code, early.json()["status"]) == (200, "not_reclaimable")
    other = await client.post(f"{url}/revoke-lease", json={"expected_lease_id": str(uuid4())})
    assert other.status_code == 409 or other.json()["status"] == "already_satisfied", other.text
    revoked = await client.post(f"{url}/revoke-lease", json={"expected_lease_id": str(claimed.handle.lease_id)})
    assert (revoked.status_code, revoked.json()["status"]) == (200, "revoked")
    repeat = await client.post(f"{url}/revoke-lease")
    assert repeat.status_code == 409 or repeat.json()["status"] == "already_satisfied"
    granted = await client.post(f"{url}/reclaim", json=BODIES["reclaim_execution"])
    assert (granted.status_code, granted.json()["status"]) == (200, "reclaim_grant")
    assert granted.headers["cache-control"] == "no-store"
    assert granted.json()["grant_key"]


async def test_an_execution_is_held_back_and_let_go(client: httpx.AsyncClient, submit: Submit) -> None:
    url = f"/v1/executions/{await submit()}"
    held = await client.post(f"{url}/block", json={"reason_detail": "maintenance"})
    assert held.json()["reason"] == "paused_by_operator"
    assert (await client.get(url)).json()["blocking_detail"] == "maintenance"
    twice = await client.post(f"{url}/block")
    assert (twice.status_code, twice.json()["kind"]) == (409, "execution_not_eligible")
    wrong = await client.post(f"{url}/unblock", json={"expected_blocking_reason": "waiting_for_quota"})
    assert wrong.status_code == 409
    assert (await client.post(f"{url}/unblock")).status_code == 200
    await client.post(f"{url}/cancel")
    ended = await client.post(f"{url}/block")
    assert (ended.status_code, ended.json()["kind"]) == (409, "execution_not_active")


async def test_a_suspended_execution_is_resumed(
    client: httpx.AsyncClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    execution_id = await submit()
    url = f"/v1/executions/{execution_id}"
    early = await client.post(f"{url}/resume")
    assert (early.status_code, early.json()["kind"]) == (409, "execution_not_suspended")
    claimed = await claim(plain_engine)
    await plain_engine.suspend(claimed.handle, waitpoints=[Fresh(uuid4(), "k")], resume_condition=OperatorOnly())
    resumed = await client.post(f"{url}/resume", json={"resume_delay_seconds": 0})
    assert resumed.json() == {"execution_id": execution_id, "public_state": "resumable"}


async def test_the_priority_changes_only_for_the_version_that_was_read(
    client: httpx.AsyncClient, submit: Submit
) -> None:
    url = f"/v1/executions/{await submit()}"
    tag = (await client.get(url)).headers["etag"]
    first = await client.put(f"{url}/priority", json={"priority": 5}, headers={"If-Match": tag})
    assert (first.status_code, first.json()["priority"]) == (200, 5)
    stale = await client.put(f"{url}/priority", json={"priority": 6}, headers={"If-Match": tag})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    assert (await client.get(url)).json()["priority"] == 5
    clamped = await client.put(f"{url}/priority", json={"priority": 100_000}, headers={"If-Match": "*"})
    assert clamped.json()["priority"] == (await client.get(url)).json()["priority"] == 9000


async def test_a_tag_is_set(client: httpx.AsyncClient, submit: Submit) -> None:
    url = f"/v1/executions/{await submit()}"
    assert (await client.put(f"{url}/tags/team.owner", json={"value": "ada"})).status_code == 200
    assert (await client.get(url)).json()["tags"] == {"team.owner": "ada"}
    wrong = await client.put(f"{url}/tags/Owner", json={"value": "ada"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_input")


async def test_only_ended_executions_are_deleted_and_redacted(client: httpx.AsyncClient, submit: Submit) -> None:
    url = f"/v1/executions/{await submit(arguments={'a': 1})}"
    assert (await client.delete(url)).status_code == (await client.post(f"{url}/redact")).status_code == 409
    await client.post(f"{url}/cancel")
    assert (await client.post(f"{url}/redact")).status_code == 200
    assert (await client.get(f"{url}/input")).json()["input"] is None
    assert (await client.post(f"{url}/replay")).json()["code"] == "execution_redacted"
    assert (await client.delete(url)).status_code == 204
    assert (await client.get(url)).status_code == 404


async def test_each_is_for_operators_of_the_namespace_and_finds_nothing_unknown(
    client_of: MakeClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    theirs = await submit(namespace="theirs")
    key = client_of(Scope.ADMIN, namespaces=("ours",))
    rows = Rows()
    for one in control.OPERATIONS:
        with rows.row(one.name):
            details = []
            for target in (theirs, str(uuid4())):
                path = one.path.format(execution_id=target, key="a.b")
                answer = await key.request(one.method, path, json=BODIES.get(one.name))
                assert answer.status_code == 404, answer.text
                details.append(answer.json()["detail"].replace(target, ""))
                everyone = await client_of(Scope.ADMIN).request(
                    one.method, one.path.format(execution_id=uuid4(), key="a.b"), json=BODIES.get(one.name)
                )
                assert everyone.status_code == 404, everyone.text
            assert details[0] == details[1]
            weak = await client_of(Scope.READ, Scope.SUBMIT, Scope.WORKER).request(one.method, path)
            assert weak.status_code == 403
    rows.tell()
    found = await plain_engine.read_execution(ExecutionId(UUID(theirs)))
    assert found is not None
    assert (found.public_state, found.tags, found.priority) == ("waiting", {}, 0)
