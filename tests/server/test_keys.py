"""API keys over HTTP: who is let in, for how long a revoked key works, and how much work a check is."""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest

import flowfabric as ff
from flowfabric.server import sse
from flowfabric.server.keys import CACHED_FOR
from flowfabric.values.api_key import ApiKeyText, Scope
from tests.server.keyed import Keyed, MakeKeyed, without_instance
from tests.support import Clock, submit

CAPABILITIES = "/v1/capabilities"


async def test_unknown_expired_revoked_and_malformed_keys_get_the_same_answer(keyed: Keyed, clock: Clock) -> None:
    engine = keyed.engine
    expired = await engine.create_api_key("expired", ["read"], expires=timedelta(minutes=1))
    revoked = await engine.create_api_key("revoked", ["read"])
    good = await engine.create_api_key("good", ["read"])
    await engine.revoke_api_key(revoked.key_id)
    await clock.advance(seconds=61)
    answers = []
    for key in (
        None,
        "",
        "x",
        "ffk_",
        good.key.reveal()[:-1],
        good.key.reveal() + "x",
        ApiKeyText.make().reveal(),
        ApiKeyText.make(good.key_id).reveal(),
        expired.key.reveal(),
        revoked.key.reveal(),
    ):
        answers.append(without_instance(await keyed.with_text(key).get(CAPABILITIES)))
    assert all(one == answers[0] for one in answers)
    status, headers, body = answers[0]
    assert (status, body["code"]) == (401, "unauthenticated")
    assert headers["www-authenticate"].startswith("Bearer")
    assert (await keyed.with_text(good.key.reveal()).get(CAPABILITIES)).status_code == 200


async def test_the_scheme_is_bearer_in_any_case_and_nothing_else(keyed: Keyed) -> None:
    made = await keyed.engine.create_api_key("ci", ["read"])
    text = made.key.reveal()
    client = keyed.with_text(None)
    for shown, status in (
        (f"Bearer {text}", 200),
        (f"bearer {text}", 200),
        (f"BEARER   {text}", 200),
        (text, 401),
        (f"Basic {text}", 401),
        (f"Bearer{text}", 401),
        (f"Bearer {text} {text}", 401),
        (f"Bearer {text},", 401),
    ):
        answer = await client.get(CAPABILITIES, headers={"Authorization": shown})
        assert answer.status_code == status, shown
    # Neither the query nor a cookie is a place for a key.
    assert (await client.get(CAPABILITIES, params={"key": text})).status_code == 401
    assert (await client.get(CAPABILITIES, headers={"Cookie": f"key={text}"})).status_code == 401


async def test_a_revoked_key_stops_working_within_five_seconds_on_every_process(make_keyed: MakeKeyed) -> None:
    first, second = make_keyed(), make_keyed()
    made = await first.engine.create_api_key("ci", ["read"])
    clients = [one.with_text(made.key.reveal()) for one in (first, second)]

    async def statuses() -> list[int]:
        return [(await one.get(CAPABILITIES)).status_code for one in clients]

    assert await statuses() == [200, 200]
    await first.engine.revoke_api_key(made.key_id)
    first.now += CACHED_FOR
    assert await statuses() == [401, 200]
    second.now += CACHED_FOR
    assert await statuses() == [401, 401]
    assert CACHED_FOR + sse.CHECK_SECONDS <= 5  # the longest for a stream: what a check remembers, until the next check


async def test_an_answer_is_cached_from_when_it_was_asked_for(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slow lookup would let a key work for longer."""
    made = await keyed.engine.create_api_key("ci", ["read"])
    client = keyed.with_text(made.key.reveal())
    read = keyed.engine.read_api_key

    async def slow(key_id: str) -> Any:
        found = await read(key_id)
        keyed.now += 4
        return found

    monkeypatch.setattr(keyed.engine, "read_api_key", slow)
    assert (await client.get(CAPABILITIES)).status_code == 200
    await keyed.engine.revoke_api_key(made.key_id)
    keyed.now += 1
    assert (await client.get(CAPABILITIES)).status_code == 401


async def test_known_and_unknown_keys_cost_the_same_work(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = keyed.engine
    good = await engine.create_api_key("good", ["read"])
    revoked = await engine.create_api_key("revoked", ["read"])
    await engine.revoke_api_key(revoked.key_id)
    work: list[str] = []
    fetch, same = engine._database.fetch, hmac.compare_digest

    async def counted(sql: str, *args: Any, **given: Any) -> Any:
        if "note_api_key_use" not in sql:
            work.append("statement")
        return await fetch(sql, *args, **given)

    def compared(a: Any, b: Any) -> bool:
        work.append(f"compare {len(a)} {len(b)}")
        return same(a, b)

    monkeypatch.setattr(engine._database, "fetch", counted)
    monkeypatch.setattr(hmac, "compare_digest", compared)
    first, again = [], []
    for key in (good.key, revoked.key, ApiKeyText.make(good.key_id), ApiKeyText.make()):
        keyed.now += 10
        for found in (first, again):
            work.clear()
            await keyed.keys.caller(key.reveal(), "")
            found.append(list(work))
    compares = ["compare 32 32", "compare 32 32"]
    assert first == [["statement", *compares]] * 4
    assert again == [compares] * 4


async def test_guesses_do_not_drive_keys_out_of_the_cache(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.server.keys._MOST", 3)
    good = await keyed.engine.create_api_key("good", ["read"])
    await keyed.keys.caller(good.key.reveal(), "")
    for _ in range(10):
        await keyed.keys.caller(ApiKeyText.make().reveal(), "")
    assert len(keyed.keys._unknown) == 3
    assert list(keyed.keys._known) == [good.key_id]


async def test_the_last_use_is_noted_once_a_minute(keyed: Keyed, clock: Clock, sql: asyncpg.Connection[Any]) -> None:
    made = await keyed.engine.create_api_key("ci", ["read"])
    client = keyed.with_text(made.key.reveal())
    versions = []
    for seconds in (0, 1, 58, 2):
        keyed.now += seconds
        await clock.advance(seconds=seconds)
        await client.get(CAPABILITIES)
        versions.append(await sql.fetchval("select xmin::text from flowfabric.api_key"))
    assert versions[0] == versions[1] == versions[2] != versions[3]
    # A request with a guessed secret is not a use of the key.
    await sql.execute("update flowfabric.api_key set last_used_at = null")
    keyed.now += 100
    await keyed.with_text(ApiKeyText.make(made.key_id).reveal()).get(CAPABILITIES)
    assert await sql.fetchval("select last_used_at from flowfabric.api_key") is None


async def test_a_caller_has_the_address_of_this_request_and_the_rights_of_now(keyed: Keyed) -> None:
    made = await keyed.engine.create_api_key("phone", ["read"])
    text = made.key.reveal()
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1"):
        caller = await keyed.keys.caller(text, address)
        assert caller is not None
        assert (caller.address, caller.name, caller.scopes) == (address, "phone", frozenset({Scope.READ}))
    await keyed.engine.revoke_api_key(made.key_id)
    keyed.now += CACHED_FOR
    assert await keyed.keys.caller(text, "10.0.0.1") is None


async def test_a_scope_includes_no_other_and_admin_all(keyed: Keyed) -> None:
    target = await submit(keyed.engine)
    requests = {
        "read": ("GET", f"/v1/executions/{target}", None),
        "submit": ("POST", "/v1/executions", {"execution_kind": "k"}),
        "operate": ("POST", "/v1/bulk/cancel", {"filter": {"kinds": ["none"]}, "dry_run": True}),
        "admin": ("GET", "/v1/api-keys", None),
    }
    for scope in ("read", "submit", "operate", "worker", "admin"):
        client = await keyed.client(scope)
        for needed, (method, path, body) in requests.items():
            answer = await client.request(method, path, json=body)
            assert (answer.status_code < 300) == (scope in (needed, "admin")), (scope, needed, answer.text)
            if answer.status_code >= 300:
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def create(client: httpx.AsyncClient, **members: object) -> httpx.Response:
    return await client.post("/v1/api-keys", json={"name": "x", "scopes": ["read"], **members})


async def test_keys_are_made_listed_rotated_and_revoked_over_http(keyed: Keyed) -> None:
    client = await keyed.client("admin", name="root")
    made = await client.post(
        "/v1/api-keys",
        json={"name": "ci", "scopes": ["read"], "namespaces": ["a"], "hides_payloads": True, "expires_seconds": 60},
    )
    assert made.status_code == 201, made.text
    assert made.headers["cache-control"] == "no-store"
    key_id, key = made.json()["key_id"], made.json()["key"]
    listed = await client.get("/v1/api-keys", params={"limit": 1})
    (one,) = listed.json()["items"]
    assert {name: one[name] for name in ("key_id", "name", "scopes", "namespaces", "hides_payloads")} == {
        "key_id": key_id, "name": "ci", "scopes": ["read"], "namespaces": ["a"], "hides_payloads": True,
    }  # fmt: skip
    secret = key.split("_", 2)[2]
    assert secret not in listed.text and "digest" not in listed.text
    rest = await client.get("/v1/api-keys", params={"cursor": listed.json()["next_cursor"]})
    assert [item["name"] for item in rest.json()["items"]] == ["root"]
    rotated = await client.post(f"/v1/api-keys/{key_id}/rotate", json={"grace_seconds": 10})
    assert (rotated.json()["key_id"], rotated.status_code) == (key_id, 200)
    keyed.now += 10
    for text in (key, rotated.json()["key"]):
        assert (await keyed.with_text(text).get(CAPABILITIES)).status_code == 200
    assert (await client.delete(f"/v1/api-keys/{key_id}")).status_code == 204
    keyed.now += 10
    for text in (key, rotated.json()["key"]):
        assert (await keyed.with_text(text).get(CAPABILITIES)).status_code == 401
    for answer, status, code in (
        (await client.delete(f"/v1/api-keys/{'0' * 12}"), 404, "not_found"),
        (await client.post(f"/v1/api-keys/{key_id}/rotate"), 409, "api_key_revoked"),
        (await client.post("/v1/api-keys", json={"name": "root", "scopes": ["read"]}), 409, "api_key_exists"),
        (await create(client, scopes=["all"]), 422, "invalid_request"),
        (await create(client, scopes=[]), 400, "invalid_input"),
        (await create(client, digest="x"), 422, "invalid_request"),
        (await create(client, expires_seconds=1e300), 400, "invalid_input"),
        (await create(client, expires_seconds=5, expires_at="2050-01-01T00:00:00Z"), 400, "invalid_input"),
        (await client.get("/v1/api-keys", params={"cursor": "x"}), 422, "invalid_request"),
    ):  # fmt: skip
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


async def test_signing_keys_are_rotated_only_with_the_owners_address(
    keyed: Keyed,
    make_keyed: MakeKeyed,
    plain_engine: ff.Engine,
) -> None:
    path = "/v1/admin/rotate-waitpoint-secret"
    refused = await (await keyed.client("admin", name="root")).post(path)
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert "owner" in refused.json()["detail"]
    owned = make_keyed(owner=plain_engine)
    client = await owned.client("admin", name="owner's")
    before = (await plain_engine.list_waitpoint_hmac_kids()).current_kid
    done = await client.post(path, json={"kid": "new", "grace_seconds": 60})
    assert done.json() == {"kid": "new", "is_new": True, "previous_kid": before}
    assert (await plain_engine.list_waitpoint_hmac_kids()).current_kid == "new"
    assert (await client.post(path, json={"kid": "new"})).json()["code"] == "rotation_conflict"
    rows = (await plain_engine.list_operator_audit()).items
    assert [(one.actor, one.target, one.outcome) for one in rows] == [
        ("owner's", None, "rotation_conflict"), ("owner's", "new", "ok"), ("root", None, "unavailable"),
    ]  # fmt: skip


async def test_a_key_that_hides_payloads_gets_none(keyed: Keyed) -> None:
    target = await submit(keyed.engine, input_payload=b'{"secret": 1}')
    client = await keyed.client("admin", hides_payloads=True)
    export = await client.get("/v1/export")
    assert str(target) in export.text and "secret" not in export.text
    open_one = await keyed.client("admin")
    assert (await open_one.get("/v1/export")).json()["input"] == {"secret": 1}


async def test_a_key_that_hides_payloads_gets_no_key_that_shows_them(keyed: Keyed) -> None:
    shows = await keyed.engine.create_api_key("shows", ["read"])
    hides = await keyed.engine.create_api_key("hides", ["read"], hides_payloads=True)
    client = await keyed.client("admin", hides_payloads=True)
    body = {"name": "new", "scopes": ["read"]}
    assert (await client.post("/v1/api-keys", json=body)).status_code == 403
    assert (await client.post("/v1/api-keys", json={**body, "hides_payloads": True})).status_code == 201
    assert (await client.post(f"/v1/api-keys/{shows.key_id}/rotate")).status_code == 403
    assert (await client.post(f"/v1/api-keys/{hides.key_id}/rotate")).status_code == 200
    assert (await client.get("/v1/api-keys")).text.count('"hides_payloads":false') == 1
    assert (await keyed.with_text(shows.key.reveal()).get("/v1/executions")).status_code == 200
