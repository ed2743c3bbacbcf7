"""Who may call what: every operation, with every scope, within and outside the namespaces of the key."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import flowfabric as ff
from flowfabric.server.openapi import statuses
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.server.operations import OPERATIONS
from flowfabric.values.attempt import Failure
from flowfabric.values.ids import mint_uuid, parse_execution_id
from flowfabric.values.step import NewStep
from flowfabric.values.stream import NewFrame
from tests.each import Rows
from tests.server.examples import UNAVAILABLE, UNKNOWN, request_of
from tests.server.keyed import Keyed, without_instance
from tests.support import WORKER, submit

KEYED = [one for one in OPERATIONS if one.scope is not None]
NAMESPACES: list[tuple[str, ...] | None] = [None, ("ours",), ("theirs",)]


async def a_target(engine: ff.Engine) -> dict[str, object]:
    """An execution and a flow of our namespace."""
    flow = await engine.create_flow(mint_uuid(), flow_kind="f", namespace="ours")  # type: ignore[arg-type]
    return {"execution_id": await submit(engine, namespace="ours"), "flow_id": flow.flow_id}


def expected(operation: Operation, scope: Scope, namespaces: tuple[str, ...] | None) -> int | None:
    """The status of the refusal; None: the request reaches the operation."""
    if scope not in (operation.scope, Scope.ADMIN):
        return 403
    if namespaces is None:
        return None
    if operation.within is Within.EVERY:
        return 403
    if operation.within in (Within.EXECUTION, Within.FLOW) and "ours" not in namespaces:
        return 404
    return None


def shown(answer: httpx.Response, ids: dict[str, object]) -> tuple[int, str]:
    """The status and, of a refusal, its words without the ids of the target."""
    words = "" if answer.status_code < 400 else str(answer.json()["detail"])
    for one in ids.values():
        words = words.replace(str(one), "...")
    return answer.status_code, words


async def test_every_operation_with_every_scope_and_namespace(keyed: Keyed) -> None:
    """A key of a target's namespace gets what a key without namespaces gets for another one just like it."""
    clients = {
        (scope, namespaces): await keyed.client(scope, namespaces=namespaces, leaves=True)
        for scope in Scope
        for namespaces in NAMESPACES
    }
    nobody = keyed.with_text(None)
    rows = Rows()
    for operation in KEYED:
        ids = await a_target(keyed.engine)
        with rows.row((operation.name, "no key")):
            answer = await nobody.request(**request_of(operation, ids))
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
        usual: set[tuple[int, str]] = set()
        assert operation.scope is not None
        for _ in range(2):  # what the first one makes exists for the second
            ids = await a_target(keyed.engine)
            answer = await clients[operation.scope, None].request(**request_of(operation, ids))
            usual.add(shown(answer, ids))
        for (scope, namespaces), client in clients.items():
            status = expected(operation, scope, namespaces)
            ids = await a_target(keyed.engine)
            with rows.row((operation.name, scope.value, namespaces)):
                answer = await client.request(**request_of(operation, ids))
                if status is not None:
                    assert answer.status_code == status, answer.text
                    assert answer.headers["content-type"] == "application/problem+json"
                    continue
                assert answer.status_code not in (401, 403), answer.text
                assert answer.status_code < 500 or operation.name in UNAVAILABLE, answer.text
                assert answer.status_code in (*operation.answers, *statuses(operation)), answer.text
                if namespaces != ("theirs",):  # where nothing is
                    assert shown(answer, ids) in usual, (answer.text, usual)
    for operation in (one for one in OPERATIONS if one.scope is None):
        with rows.row((operation.name, "needs no key")):
            answer = await nobody.request(**request_of(operation, {}))
            assert answer.status_code in (*operation.answers, 404, 503), answer.text
    rows.tell()


async def test_foreign_is_unknown_in_every_byte(keyed: Keyed) -> None:
    """A key of another namespace cannot tell what exists: not by status, headers or text."""
    client = await keyed.client("admin", namespaces=["theirs"])
    rows = Rows()
    for operation in KEYED:
        if operation.within not in (Within.EXECUTION, Within.FLOW):
            continue
        with rows.row(operation.name):
            ids = await a_target(keyed.engine)
            name = "flow_id" if operation.within is Within.FLOW else "execution_id"
            foreign = await client.request(**request_of(operation, ids))
            unknown = await client.request(**request_of(operation, {name: UNKNOWN}))
            found = without_instance(foreign)
            assert found[0] == 404
            text = str(found).replace(str(ids[name]), str(UNKNOWN))
            assert text == str(without_instance(unknown))
            assert len(foreign.content) == len(unknown.content)
    rows.tell()


async def test_lists_counts_and_groups_contain_nothing_foreign(keyed: Keyed) -> None:
    engine = keyed.engine
    theirs = await submit(engine, namespace="theirs", execution_kind="theirs")
    (held,) = await engine.claim_many(limit=1, kinds=["theirs"], **WORKER)
    await engine.fail_many([Failure(authority=held.handle, reason="theirs", failure_class="permanent")])
    ours = await submit(engine, namespace="ours")
    client = await keyed.client("read", "operate", namespaces=["ours"])
    for path in ("/v1/executions", "/v1/export", "/v1/failures", "/v1/events/page", "/v1/waits", "/v1/flows"):
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        assert str(theirs) not in answer.text and "theirs" not in answer.text, path
    assert str(ours) in (await client.get("/v1/executions")).text
    for path in ("/v1/executions", "/v1/export", "/v1/failures"):
        foreign = await client.get(path, params={"namespace": "theirs"})
        unknown = await client.get(path, params={"namespace": "others"})
        assert foreign.status_code == unknown.status_code == 404
    counted = await client.post(
        "/v1/bulk/cancel", json={"filter": {"kinds": ["theirs"], "states": ["waiting"]}, "dry_run": True}
    )
    assert counted.json()["count"] == 0


async def test_a_key_with_several_namespaces_must_name_one(keyed: Keyed) -> None:
    client = await keyed.client("admin", namespaces=["ours", "theirs"])
    in_query = {"detail": "missing", "parameter": "namespace", "allowed": "ours, theirs"}
    for request, wrong in (
        (client.get("/v1/executions"), in_query),
        (client.get("/v1/export"), in_query),
        (client.post("/v1/executions", json={"execution_kind": "k"}), {"pointer": "/namespace"}),
        (client.post("/v1/bulk/cancel", json={"filter": {"kinds": ["k"]}}), {"pointer": "/filter/namespace"}),
    ):
        answer = await request
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
        assert "namespace" in answer.json()["detail"]
        [error] = answer.json()["errors"]
        assert error == {"detail": "missing", "allowed": "ours, theirs", **wrong}
    made = await client.post("/v1/executions", json={"execution_kind": "k", "namespace": "theirs"})
    assert made.status_code == 201
    one = await keyed.client("submit", namespaces=["ours"])
    implied = (await one.post("/v1/executions", json={"execution_kind": "k"})).json()["execution_id"]
    found = await keyed.engine.read_execution_info(parse_execution_id(implied))
    assert found is not None and found.namespace == "ours"
    # Failures need no name: the database filters by several.
    assert (await client.get("/v1/failures")).status_code == 200


MARK = "c0ffee-payload"


async def a_world_with_payloads(engine: ff.Engine) -> list[ff.ExecutionId]:
    """Executions with a mark in everything that a user stores in them."""
    payload = f'{{"a": "{MARK}"}}'.encode()
    done = await submit(engine, input_payload=payload)
    failed = await submit(engine, input_payload=payload)
    held = {one.execution_id: one for one in await engine.claim_many(limit=2, **WORKER)}
    for one in held.values():
        await engine.record_steps([(one.handle, NewStep(name="s", result=payload))])
        await engine.record_steps([(one.handle, NewStep(name="e", error={"type": "E", "message": MARK}))])
        await engine.append_frames([(one.handle, NewFrame(payload=payload, frame_type="f"))])
    await engine.complete(held[done].handle, payload)
    await engine.fail_many(
        [
            Failure(
                authority=held[failed].handle,
                reason=f"E: {MARK}\n\nTraceback (most recent call last):\n  {MARK}",
                failure_class="permanent",
            )
        ]
    )
    return [done, failed]


async def texts(client: httpx.AsyncClient, targets: list[ff.ExecutionId]) -> dict[str, str]:
    """What every reading operation answers."""
    found: dict[str, str] = {}
    for operation in OPERATIONS:
        if operation.method == "GET" and (not operation.streams or operation.name == "export_executions"):
            for target in targets:
                answer = await client.request(**request_of(operation, {"execution_id": target}))
                found[operation.name] = found.get(operation.name, "") + answer.text
    return found


@pytest.mark.parametrize("scope", [Scope.READ, Scope.ADMIN])
async def test_a_key_that_hides_payloads_gets_no_byte_of_them(keyed: Keyed, scope: Scope) -> None:
    targets = await a_world_with_payloads(keyed.engine)
    hidden = await texts(await keyed.client(scope, hides_payloads=True), targets)
    assert [name for name, text in hidden.items() if MARK in text] == []
    shown: dict[str, Any] = await texts(await keyed.client(scope), targets)
    seen = {name for name, text in shown.items() if MARK in text}
    assert {"get_execution", "get_execution_input", "get_execution_result", "list_steps", "list_attempts"} <= seen
    assert {"export_executions", "list_failures", "read_stream"} <= seen
