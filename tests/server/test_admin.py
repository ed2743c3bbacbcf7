"""Export, capabilities and groups of failures over HTTP."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from flowfabric.values.attempt import Failure
from flowfabric.values.execution import NewExecution
from tests.server.keyed import Keyed
from tests.support import WORKER, claim_one, submit


async def test_an_export_has_one_line_per_execution_with_input_and_result(keyed: Keyed) -> None:
    targets = [await submit(keyed.engine, input_payload=b'{"n": %d}' % n) for n in range(3)]
    held = await claim_one(keyed.engine)
    await keyed.engine.complete(held.handle, b'"done"')
    other = await submit(keyed.engine, execution_kind="other", input_payload=b"\xff", payload_encoding="raw")
    client = await keyed.client("read")
    answer = await client.get("/v1/export")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["execution_id"] for line in lines] == [str(one) for one in (other, *reversed(targets))]
    assert lines[0]["input"] == {"base64": "/w==", "encoding": "raw"}
    assert [line["input"] for line in lines[1:]] == [{"n": 2}, {"n": 1}, {"n": 0}]
    assert [line["result"] for line in lines].count("done") == 1
    assert all(line["execution_id"] in line["execution_id"] and "public_state" in line for line in lines)
    # A reader does not see the right to report for a worker.
    assert str(held.handle.lease_id) not in answer.text
    part = await client.get("/v1/export", params={"kind": "other", "state": "waiting"})
    assert [json.loads(line)["execution_id"] for line in part.text.splitlines()] == [str(other)]
    before = await client.get("/v1/export", params={"created_before": lines[1]["created_at"]})
    assert len(before.text.splitlines()) == 2
    assert (await client.get("/v1/export", params={"kind": "none"})).text == ""
    assert (await client.get("/v1/export", params={"limit": "5"})).status_code == 422


async def test_an_export_that_breaks_off_continues_without_losing_what_was_created_in_the_same_instant(
    keyed: Keyed,
) -> None:
    await keyed.engine.create_many([NewExecution(execution_kind="job") for _ in range(3)])
    client = await keyed.client("read")
    lines = [json.loads(line) for line in (await client.get("/v1/export")).text.splitlines()]
    assert len({line["created_at"] for line in lines}) == 1
    before = datetime.fromisoformat(lines[0]["created_at"]) + timedelta(microseconds=1)
    rest = (await client.get("/v1/export", params={"created_before": before.isoformat()})).text
    assert [json.loads(line) for line in rest.splitlines()] == lines


async def test_an_export_of_more_than_a_page_is_whole(keyed: Keyed) -> None:
    for _ in range(205):
        await submit(keyed.engine)
    text = (await (await keyed.client("read")).get("/v1/export")).text
    assert len({json.loads(line)["execution_id"] for line in text.splitlines()}) == 205


async def test_failures_are_grouped_and_their_texts_hidden_from_keys_that_hide_payloads(keyed: Keyed) -> None:
    trace = "\n\nTraceback (most recent call last):\n  File 'x'"
    for n in range(3):
        await submit(keyed.engine, namespace="ours")
        (held,) = await keyed.engine.claim_many(limit=1, **WORKER)
        reason = f"NoRoom: {n} left" + trace
        await keyed.engine.fail_many([Failure(authority=held.handle, reason=reason, failure_class="permanent")])
    client = await keyed.client("read")
    answer = (await client.get("/v1/failures")).json()
    assert (answer["examined"], answer["is_complete"]) == (3, True)
    (group,) = answer["groups"]
    assert (group["count"], group["error_type"], group["message"]) == (3, "NoRoom", "<n> left")
    assert group["last_text"] == "NoRoom: 2 left"
    hidden = await (await keyed.client("read", hides_payloads=True)).get("/v1/failures")
    assert hidden.json()["groups"][0]["error_type"] == "NoRoom" and "left" not in hidden.text
    for given, count in (
        ({"namespace": "ours"}, 1),
        ({"namespace": "x"}, 0),
        ({"state": "expired"}, 0),
        ({"tag": "a=b"}, 0),
    ):
        assert len((await client.get("/v1/failures", params=given)).json()["groups"]) == count, given
    for wrong in ({"tag": "a"}, {"state": "completed"}, {"most": "0"}, {"limit": "0"}, {"nothing": "1"}):
        assert (await client.get("/v1/failures", params=wrong)).status_code in (400, 422), wrong


async def test_capabilities_are_those_of_the_engine(keyed: Keyed) -> None:
    answer = await (await keyed.client("read")).get("/v1/capabilities")
    assert answer.json() == keyed.engine.capabilities()
