"""Lanes over HTTP."""

from __future__ import annotations

import asyncio

import httpx

import flowfabric as ff
from flowfabric.server.operation import Scope
from tests.server.conftest import MakeClient, Submit

STATE = "/v1/lanes/{}/state"


async def test_lanes_are_listed_with_their_work(client: httpx.AsyncClient, submit: Submit) -> None:
    await submit(lane_id="a")
    await submit(lane_id="b")
    await submit(lane_id="b")
    page = (await client.get("/v1/lanes", params={"limit": 1})).json()
    assert [(one["lane_id"], one["stats"]["depth"]) for one in page["items"]] == [("a", 1)]
    rest = (await client.get("/v1/lanes", params={"cursor": page["next_cursor"]})).json()
    assert [one["lane_id"] for one in rest["items"]] == ["b"]
    assert rest["items"][0]["stats"]["depth"] == 2
    assert rest["items"][0]["stats"]["oldest_age_seconds"] >= 0


async def test_a_key_with_namespaces_sees_states_and_no_counts(client_of: MakeClient, submit: Submit) -> None:
    await submit(lane_id="a", namespace="theirs")
    limited = client_of(Scope.READ, namespaces=("ours",))
    answer = await limited.get("/v1/lanes")
    assert answer.json()["items"] == [{"lane_id": "a", "state": "active", "stats": None}]
    changing = client_of(Scope.OPERATE, namespaces=("ours",))
    refused = await changing.put(STATE.format("a"), json={"state": "paused"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


async def test_a_lane_is_paused_and_opened(
    client: httpx.AsyncClient, client_of: MakeClient, submit: Submit, plain_engine: ff.Engine
) -> None:
    await submit(lane_id="a")
    paused = await client.put(STATE.format("a"), json={"state": "paused"})
    assert paused.json() == {"lane_id": "a", "before": "active", "state": "paused"}
    assert (await client.get(STATE.format("a"))).json() == {"lane_id": "a", "state": "paused"}
    opened = await client.put(STATE.format("a"), json={"state": "active"})
    assert opened.json()["before"] == "paused"
    assert (await client_of(Scope.READ).put(STATE.format("a"), json={"state": "paused"})).status_code == 403


async def test_a_misspelt_lane_is_not_made(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    assert (await client.get(STATE.format("nowhere"))).status_code == 404
    assert (await client.put(STATE.format("nowhere"), json={"state": "paused"})).status_code == 404
    assert [one.lane_id for one in (await plain_engine.list_lanes()).items] == []
    made = await client.put(STATE.format("new"), json={"state": "paused", "new": True})
    assert made.json()["before"] == "active"
    for body, pointer in (({"state": "open"}, "/state"), ({}, "/state"), ({"state": "paused", "lane": "x"}, "/lane")):
        answer = await client.put(STATE.format("new"), json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == pointer
    wrong = await client.put(STATE.format("x" * 65), json={"state": "paused", "new": True})
    assert wrong.status_code == 400


async def test_a_state_that_was_changed_meanwhile_is_not_overwritten(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    await plain_engine.set_lane_state("default", "active")
    read = await client.get(STATE.format("default"))
    tag = {"If-Match": read.headers["etag"]}
    await plain_engine.set_lane_state("default", "draining")
    refused = await client.put(STATE.format("default"), json={"state": "paused"}, headers=tag)
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    again = {"If-Match": (await client.get(STATE.format("default"))).headers["etag"]}
    assert (await client.get(STATE.format("default"), headers={"If-None-Match": again["If-Match"]})).status_code == 304
    assert (await client.put(STATE.format("default"), json={"state": "paused"}, headers=again)).status_code == 200


async def test_of_several_changes_with_the_same_tag_one_wins(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    await plain_engine.set_lane_state("default", "active")
    tag = {"If-Match": (await client.get(STATE.format("default"))).headers["etag"]}
    answers = await asyncio.gather(
        *(
            client.put(STATE.format("default"), json={"state": state}, headers=tag)
            for state in ("paused", "draining", "disabled")
        )
    )
    assert sorted(one.status_code for one in answers) == [200, 412, 412]
