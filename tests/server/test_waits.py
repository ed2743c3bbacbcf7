"""Waits over HTTP: lists, tokens, signals, and who they come from."""

from __future__ import annotations

import base64
import zlib
from datetime import timedelta
from uuid import UUID

import httpx

import flowfabric as ff
from flowfabric.server.app import create_app
from flowfabric.server.operation import Scope
from flowfabric.server.service import NoKeys, Service
from flowfabric.values.callback import parse_callback
from flowfabric.values.conditions import all_of
from tests.server.conftest import MakeClient
from tests.server.waiting import DECISION, TWO_PEOPLE, state_of, wait


async def test_waits_are_listed_longest_waiting_first_with_filters_and_pages(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    first = await wait(plain_engine, execution_kind="pay", namespace="shop")
    second = await wait(plain_engine, timeout=timedelta(hours=1))

    page = (await client.get("/v1/waits", params={"limit": 1})).json()
    assert [one["execution_id"] for one in page["items"]] == [str(first.id)]
    assert page["items"][0] | {"waitpoint_key": "approval", "execution_kind": "pay"} == page["items"][0]
    rest = await client.get("/v1/waits", params={"limit": 1, "cursor": page["next_cursor"]})
    assert [one["execution_id"] for one in rest.json()["items"]] == [str(second.id)]
    assert rest.json()["items"][0]["timeout_at"] is not None

    of_shop = await client.get("/v1/waits", params={"namespace": "shop"})
    assert [one["execution_id"] for one in of_shop.json()["items"]] == [str(first.id)]
    assert (await client.get("/v1/waits", params={"key": "other"})).json()["items"] == []
    assert (await client.get("/v1/waits", params={"lane": "other"})).json()["items"] == []


async def test_pending_waitpoints_show_no_token(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine, all_of("a", "b"))
    answer = await client.get(f"{one.path}/pending-waitpoints")
    assert {item["waitpoint_key"] for item in answer.json()["items"]} == {"a", "b"}
    for point in one.points.values():
        assert point.waitpoint_token.reveal() not in answer.text
    page = (await client.get(f"{one.path}/pending-waitpoints", params={"limit": 1})).json()
    rest = await client.get(f"{one.path}/pending-waitpoints", params={"cursor": page["next_cursor"]})
    assert {page["items"][0]["waitpoint_key"], rest.json()["items"][0]["waitpoint_key"]} == {"a", "b"}
    unknown = await client.get(f"/v1/executions/{UUID(int=7)}/pending-waitpoints")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")


async def test_a_token_is_shown_to_operators_and_never_stored(
    client_of: MakeClient, plain_engine: ff.Engine, service: Service
) -> None:
    one = await wait(plain_engine)
    point = one.points["approval"]
    path = f"{one.path}/waitpoints/{point.waitpoint_id}/token"
    operator = client_of(Scope.OPERATE)
    answer = await operator.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    shown = answer.json()
    assert shown["token"] == point.waitpoint_token.reveal()
    assert parse_callback(shown["callback"]).waitpoint_id == point.waitpoint_id
    assert shown["link"] is None

    service._public_url = "https://flows.example/"
    assert (await operator.get(path)).json()["link"] == f"https://flows.example/w/{shown['callback']}"

    assert (await client_of(Scope.READ).get(path)).status_code == 403
    assert (await client_of(Scope.OPERATE, namespaces=("theirs",)).get(path)).status_code == 404
    # The waitpoint of one execution below the path of another, both of the same partition or not.
    other = await wait(plain_engine)
    crossed = await operator.get(f"{other.path}/waitpoints/{point.waitpoint_id}/token")
    assert crossed.status_code == 404
    assert (await operator.post(f"{one.path}/approve")).status_code == 200
    used = await operator.get(path)
    assert (used.status_code, used.headers["cache-control"]) == (404, "no-store")


async def test_two_keys_are_two_people_and_one_key_twice_is_one(client_of: MakeClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine, TWO_PEOPLE)
    alice, bob = client_of(Scope.OPERATE, name="alice"), client_of(Scope.OPERATE, name="bob")
    first = (await alice.post(f"{one.path}/approve", json={"key": "approval"})).json()
    assert (first["status"], first["effect"]) == ("accepted", "appended_to_waitpoint")
    again = (await alice.post(f"{one.path}/approve")).json()
    assert (again["status"], again["existing_signal_id"]) == ("duplicate_signal", first["signal_id"])
    # Neither another route nor another name of the signal makes another person of the same key.
    signalled = await alice.post(f"{one.path}/signal", json={"name": "approved"})
    assert signalled.json()["effect"] != "resume_condition_satisfied", signalled.text
    assert await state_of(plain_engine, one) == "suspended"
    second = (await bob.post(f"{one.path}/approve")).json()
    assert second["effect"] == "resume_condition_satisfied"
    signals = (await plain_engine.read_signals(one.id)).items
    assert [(each.source_type, each.source_identity) for each in signals] == [
        ("operator", "alice"), ("operator", "alice"), ("operator", "bob"),
    ]  # fmt: skip


async def test_the_body_cannot_say_who_decides(client: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine)
    for route in ("approve", "reject", "signal"):
        for member in ("by", "source_identity", "source_type"):
            answer = await client.post(f"{one.path}/{route}", json={member: "bob"})
            assert answer.status_code == 422
            assert member in answer.text
    assert await state_of(plain_engine, one) == "suspended"


async def test_a_payload_that_does_not_fit_is_refused_with_its_place_and_changes_nothing(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, schema=DECISION)
    for route, body, pointer in (
        ("approve", {"payload": {"ok": "yes"}}, "/payload/ok"),
        ("approve", None, "/payload"),
        ("reject", {"reason": "no"}, "/payload"),
        ("signal", {"payload": {"ok": 1}}, "/payload/ok"),
    ):
        answer = await client.post(f"{one.path}/{route}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "payload_refused"), answer.text
        assert answer.json()["errors"][0]["pointer"].startswith(pointer)
    assert (await plain_engine.read_signals(one.id)).items == []
    fits = await client.post(f"{one.path}/reject", json={"payload": {"ok": False}, "reason": "too dear"})
    assert fits.json()["effect"] == "resume_condition_satisfied"
    (signal,) = (await plain_engine.read_signals(one.id)).items
    assert (signal.signal_name, signal.payload) == ("rejected", b'{"ok":false,"reason":"too dear"}')


async def test_signals_and_decisions_take_bytes_and_give_them_back(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    raw = {"base64": "AAH/", "encoding": "raw"}
    for route, members in (("signal", {"name": "photo"}), ("approve", {}), ("reject", {})):
        one = await wait(plain_engine)
        sent = await client.post(f"{one.path}/{route}", json={**members, "input": raw})
        assert sent.json().get("effect") == "resume_condition_satisfied", sent.text
        (stored,) = (await plain_engine.read_signals(one.id)).items
        assert (stored.payload, stored.payload_encoding) == (b"\x00\x01\xff", "raw")
        (read,) = (await client.get(f"{one.path}/signals")).json()["items"]
        assert (read["payload"], read["payload_encoding"]) == (raw, "raw")
    # In base64 or not: JSON is the same payload.
    one = await wait(plain_engine, schema=DECISION)
    coded = {"base64": base64.b64encode(b'{"ok": true}').decode()}
    sent = await client.post(f"{one.path}/approve", json={"input": coded})
    assert sent.json().get("effect") == "resume_condition_satisfied", sent.text
    (read,) = (await client.get(f"{one.path}/signals")).json()["items"]
    assert (read["payload"], read["payload_encoding"]) == ({"ok": True}, "json")
    # A value that looks like bytes is a value.
    one = await wait(plain_engine)
    assert (await client.post(f"{one.path}/signal", json={"payload": raw})).status_code == 200
    (stored,) = (await plain_engine.read_signals(one.id)).items
    assert (stored.payload_encoding, b"AAH/" in (stored.payload or b"")) == ("json", True)


async def test_wrong_bytes_of_a_signal_are_refused_with_their_place_and_change_nothing(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    fits = base64.b64encode(b'{"ok": true}').decode()
    for schema in (DECISION, '{"type": ["string", "null"]}', None):  # without a schema any JSON fits
        one = await wait(plain_engine, schema=schema)
        for route in ("signal", "approve", "reject"):
            for data in (b"", b" ", b"\x00\x01\xff", b"{", b'"\xff"', b"NaN", b"[" * 5000 + b"]" * 5000):
                given = {"base64": base64.b64encode(data).decode()}
                answer = await client.post(f"{one.path}/{route}", json={"input": given})
                assert (answer.status_code, answer.json()["code"]) == (400, "invalid_input"), (data, answer.text)
                assert answer.json()["detail"].startswith("input: not JSON"), answer.text
                assert [each["pointer"] for each in answer.json()["errors"]] == ["/input"]
        assert (await plain_engine.read_signals(one.id)).items == []
    one = await wait(plain_engine, schema=DECISION)
    for route in ("signal", "approve", "reject"):
        for members, status, code, pointer in (
            ({"payload": {"ok": True}, "input": {"base64": fits}}, 400, "invalid_input", "/input"),
            ({"input": {"base64": "A"}}, 400, "invalid_input", "/input/base64"),
            ({"input": {"base64": fits, "encoding": "x" * 300}}, 400, "invalid_input", "/input/encoding"),
            ({"input": {"encoding": "raw"}}, 422, "invalid_request", "/input/base64"),
            ({"input": fits}, 422, "invalid_request", "/input"),
            ({"input": {"base64": fits, "encoding": "raw"}}, 422, "payload_refused", "/input"),
            ({"input": {"base64": base64.b64encode(b'{"ok": 1}').decode()}}, 422, "payload_refused", "/input"),
        ):
            answer = await client.post(f"{one.path}/{route}", json=members)
            assert (answer.status_code, answer.json()["code"]) == (status, code), (members, answer.text)
            assert [each["pointer"] for each in answer.json()["errors"]] == [pointer], (members, answer.text)
    for members, problem in (
        ({"base64": fits, "encoding": "raw"}, "input: encoding 'raw' is not 'json'"),
        ({"base64": fits, "encoding": "json+zip"}, "input: there is no codec 'zip'"),
        ({"base64": base64.b64encode(b'{"ok": 1}').decode()}, "input: ok: got an integer; allowed: true or false"),
        ({"base64": base64.b64encode(b"1").decode()}, "input: got an integer; allowed: an object"),
    ):
        answer = await client.post(f"{one.path}/signal", json={"input": members})
        assert answer.status_code == 422 and answer.json()["detail"].startswith(problem), answer.text
    both = await client.post(f"{one.path}/reject", json={"input": {"base64": fits}, "reason": "no"})
    assert (both.status_code, both.json()["errors"][0]["pointer"]) == (400, "/reason"), both.text
    assert (await plain_engine.read_signals(one.id)).items == []
    assert await state_of(plain_engine, one) == "suspended"


class Zlib:
    name = "zlib"

    def encode(self, data: bytes) -> bytes:
        return zlib.compress(data)

    def decode(self, data: bytes) -> bytes:
        return zlib.decompress(data)


async def test_bytes_that_the_codecs_of_the_app_wrote_are_checked_as_what_they_hold(plain_engine: ff.Engine) -> None:
    service = Service(plain_engine, keys=NoKeys(), app=ff.App(codecs=[Zlib()]))
    transport = httpx.ASGITransport(create_app(plain_engine, service=service), raise_app_exceptions=False)
    one = await wait(plain_engine, schema=DECISION)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for text, status in ((b'{"ok": 1}', 422), (b'{"ok": true}', 200)):
            given = {"base64": base64.b64encode(zlib.compress(text)).decode(), "encoding": "json+zlib"}
            answer = await client.post(f"{one.path}/signal", json={"input": given})
            assert answer.status_code == status, answer.text
        (read,) = (await client.get(f"{one.path}/signals")).json()["items"]
    await service.close()
    assert read["payload"] == {"ok": True}
    (stored,) = (await plain_engine.read_signals(one.id)).items
    assert (stored.payload, stored.payload_encoding) == (zlib.compress(text), "json+zlib")


class Counting(Zlib):
    opened = 0

    def decode(self, data: bytes) -> bytes:
        self.opened += 1
        return super().decode(data)


async def test_bytes_that_are_long_or_open_to_long_ones_are_refused(plain_engine: ff.Engine) -> None:
    codec = Counting()
    service = Service(plain_engine, keys=NoKeys(), app=ff.App(codecs=[codec]))
    transport = httpx.ASGITransport(create_app(plain_engine, service=service), raise_app_exceptions=False)
    one = await wait(plain_engine)
    most = b'"' + b"x" * (1024 * 1024 - 2) + b'"'
    thrice = zlib.compress(zlib.compress(zlib.compress(b" " * 3_000_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for data, encoding, code, opened in (
            (b"x" * 65_537, "json+zlib", "payload_too_large", 0),  # not opened, as it cannot be stored
            (b"x" * 65_537, "raw", "payload_too_large", 0),
            (zlib.compress(most + b" "), "json+zlib", "payload_too_large", 1),
            (zlib.compress(most), "json+zlib", None, 1),
            (thrice, "json+zlib+zlib+zlib", None, 0),  # no codec wrote this: stored as bytes of another kind
        ):
            codec.opened = 0
            given = {"base64": base64.b64encode(data).decode(), "encoding": encoding}
            answer = await client.post(f"{one.path}/signal", json={"input": given})
            assert answer.json().get("code") == code, answer.text
            assert codec.opened == opened, (len(data), encoding)
            if code is None:
                one = await wait(plain_engine)
    await service.close()


async def test_a_signal_needs_a_key_among_several_and_a_token_with_a_waitpoint(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, all_of("a", "b"))
    point = one.points["b"]
    token = point.waitpoint_token.reveal()
    for body, status, pointer in (
        ({}, 400, "/key"),
        ({"waitpoint_id": str(point.waitpoint_id)}, 400, "/waitpoint_token"),
        ({"waitpoint_token": token}, 400, "/waitpoint_id"),
        ({"waitpoint_id": str(point.waitpoint_id), "waitpoint_token": token, "key": "b"}, 400, "/key"),
        ({"key": "a", "name": "__timeout__"}, 400, "/name"),
        ({"key": "a", "resume_delay_seconds": 1e300}, 400, "/resume_delay_seconds"),
        ({"key": "a", "dedup_ttl_seconds": -1}, 400, "/dedup_ttl_seconds"),
        ({"key": 5}, 422, "/key"),
    ):
        answer = await client.post(f"{one.path}/signal", json=body)
        assert answer.status_code == status, (body, answer.text)
        assert answer.json()["errors"][0]["pointer"] == pointer, (body, answer.text)
    forged = {"waitpoint_id": str(one.points["a"].waitpoint_id), "waitpoint_token": token}
    refused = await client.post(f"{one.path}/signal", json=forged)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_token")
    assert token not in refused.text
    assert (await client.post(f"{one.path}/signal", json={"key": "c"})).status_code == 404
    sent = await client.post(f"{one.path}/signal", json={"key": "a", "payload": [1]})
    assert sent.json()["effect"] == "appended_to_waitpoint"
    right = {"waitpoint_id": str(point.waitpoint_id), "waitpoint_token": token}
    done = await client.post(f"{one.path}/signal", json=right)
    assert done.json()["effect"] == "resume_condition_satisfied", done.text


async def test_a_signal_is_accepted_once_per_idempotency_key(
    client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    headers = {"Idempotency-Key": "payment-17"}
    first = (await client.post(f"{one.path}/signal", json={}, headers=headers)).json()
    again = (await client.post(f"{one.path}/signal", json={}, headers=headers)).json()
    assert again == {"status": "duplicate_signal", "existing_signal_id": first["signal_id"], "refused": None}


async def test_answers_to_executions_of_other_namespaces_and_to_ended_ones_are_refused(
    client_of: MakeClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, namespace="theirs")
    foreign = client_of(Scope.OPERATE, Scope.READ, namespaces=("ours",))
    for route in ("signal", "approve", "reject"):
        unknown = await foreign.post(f"/v1/executions/{UUID(int=7)}/{route}")
        answer = await foreign.post(f"{one.path}/{route}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert _without_ids(answer, str(one.id)) == _without_ids(unknown, str(UUID(int=7)))
    assert (await foreign.get(f"{one.path}/pending-waitpoints")).status_code == 404
    assert (await foreign.get("/v1/waits")).json()["items"] == []
    assert (await client_of(Scope.READ).post(f"{one.path}/approve")).status_code == 403

    theirs = client_of(Scope.OPERATE, namespaces=("theirs",))
    assert (await theirs.post(f"{one.path}/approve")).status_code == 200
    over = await theirs.post(f"{one.path}/reject")
    assert over.status_code == 404, over.text


def _without_ids(answer: httpx.Response, execution_id: str) -> str:
    return answer.text.replace(answer.json()["instance"], "").replace(execution_id, "")
