"""Links: a page for people and JSON for programs; a guess tells nothing."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

import flowfabric as ff
from flowfabric.server.limits import Limits
from flowfabric.server.routes.links import wants_html
from flowfabric.server.service import Service
from flowfabric.values.callback import callback_text, parse_callback
from flowfabric.values.conditions import all_of, on
from flowfabric.values.lease import Operator
from tests.each import each
from tests.server.conftest import MakeClient
from tests.server.waiting import DECISION, TWO_PEOPLE, state_of, wait
from tests.support import Clock

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "Sec-Fetch-Site": "same-origin"}
NASTY = '<script>alert("1")</script>\'&{{987*123}}'


@pytest.fixture
def anybody(client_of: MakeClient) -> httpx.AsyncClient:
    """A client without a key."""
    return client_of()


async def test_opening_a_link_shows_what_is_asked_and_decides_nothing(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, execution_kind="refund", timeout=timedelta(hours=3))
    page = await anybody.get(one.link(), headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    buttons = ('value="approved">Approve<', 'value="rejected">Reject<')
    for words in ("refund", "approval", "UTC", *buttons, 'method="post"'):
        assert words in page.text
    asked = (await anybody.get(one.link())).json()
    assert asked["execution_kind"] == "refund"
    assert asked["waitpoint_key"] == "approval"
    assert asked["until"] is not None
    assert (await anybody.head(one.link())).status_code == 200
    assert (await plain_engine.read_signals(one.id)).items == []


async def test_the_buttons_are_the_names_that_the_task_waits_for(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, on("approval", "shipped"))
    page = (await anybody.get(one.link(), headers=BROWSER)).text
    assert 'value="shipped">shipped<' in page
    assert 'value="approved"' not in page
    assert (await anybody.get(one.link())).json()["signal_names"] == ["shipped"]


async def test_every_text_of_users_is_escaped(anybody: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine, on(NASTY, NASTY), execution_kind=NASTY, schema=DECISION)
    link = one.link(NASTY)
    page = await anybody.get(link, headers=BROWSER)
    refused = await anybody.post(link, headers=BROWSER, data={"name": NASTY, "payload": NASTY})
    assert refused.status_code == 422
    done = await anybody.post(link, headers=BROWSER, data={"name": NASTY, "payload": '{"ok": true}'})
    assert done.status_code == 200
    for answer in (page, refused, done):
        assert "<script" not in answer.text
        assert "alert(" in answer.text
        assert "{{987*123}}" in answer.text


async def test_a_form_decides_and_a_second_click_gets_the_same_thanks(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    page = (await anybody.get(one.link(), headers=BROWSER)).text
    once = page.split('name="once" value="')[1].split('"')[0]
    form = {"name": "approved", "once": once, "payload": ""}
    done = await anybody.post(one.link(), headers=BROWSER, data=form)
    assert (done.status_code, "Thank you" in done.text) == (200, True)
    again = await anybody.post(one.link(), headers=BROWSER, data=form)
    assert (again.status_code, again.text.split("once")[0]) == (200, done.text.split("once")[0])
    (signal,) = (await plain_engine.read_signals(one.id)).items
    assert (signal.signal_name, signal.source_type, signal.signal_category) == ("approved", "link", "approval")
    # The other answer comes too late, even from the same page.
    late = await anybody.post(one.link(), headers=BROWSER, data={**form, "name": "rejected", "once": uuid4().hex})
    assert late.status_code == 404


async def test_a_program_answers_with_json(anybody: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine, all_of("a", "b"), schema=DECISION)
    key = {"Idempotency-Key": "call-17"}
    first = await anybody.post(one.link("a"), params={"name": "paid"}, json={"ok": True}, headers=key)
    assert (first.status_code, first.json()["status"]) == (202, "accepted"), first.text
    again = await anybody.post(one.link("a"), params={"name": "paid"}, json={"ok": True}, headers=key)
    assert again.json() == {"status": "duplicate", "signal_id": first.json()["signal_id"]}
    misfit = await anybody.post(one.link("b"), json={"ok": 5})
    assert (misfit.status_code, misfit.headers["content-type"]) == (422, "application/problem+json")
    assert misfit.json()["errors"][0]["pointer"] == "/ok", "the body is the payload"
    assert str(one.id) not in misfit.text
    last = await anybody.post(one.link("b"), json={"ok": True}, params={"utm_source": "mail"})
    assert (last.status_code, last.json()["status"]) == (200, "resumed"), last.text
    names = {each.signal_name for each in (await plain_engine.read_signals(one.id)).items}
    assert names == {"paid", "callback"}


async def test_a_link_is_one_person_however_often_it_is_used(
    anybody: httpx.AsyncClient, client_of: MakeClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, TWO_PEOPLE)
    for _ in range(2):
        done = await anybody.post(one.link(), params={"name": "approved"})
        assert (done.status_code, done.json()["status"]) == (202, "accepted"), done.text
    assert await state_of(plain_engine, one) == "suspended"


async def _consumed(engine: ff.Engine, clock: Clock) -> str:
    one = await wait(engine)
    await engine.signal_execution(one.id, signal_name="go", source_type="test")
    return one.callback()


async def _cancelled(engine: ff.Engine, clock: Clock) -> str:
    one = await wait(engine)
    await engine.cancel(Operator(one.id), "no longer")
    return one.callback()


async def _expired(engine: ff.Engine, clock: Clock) -> str:
    held = await wait(engine, is_suspended=False, timeout=None)
    point = await engine.create_waitpoint(held.held.handle, "short", timedelta(seconds=1))
    await clock.advance(seconds=2)
    return callback_text(held.id, point.waitpoint_id, point.token)


async def _forged(engine: ff.Engine, clock: Clock | None) -> str:
    found = parse_callback((await wait(engine)).callback())
    kid, _, digest = found.token.reveal().partition(":")
    return callback_text(found.execution_id, found.waitpoint_id, f"{kid}:{digest[::-1]}")


async def _of_another(engine: ff.Engine, clock: Clock) -> str:
    one, other = await wait(engine), await wait(engine)
    return callback_text(one.id, one.points["approval"].waitpoint_id, other.points["approval"].waitpoint_token)


async def _unknown_key(engine: ff.Engine, clock: Clock) -> str:
    found = parse_callback((await wait(engine)).callback())
    digest = found.token.reveal().partition(":")[2]
    return callback_text(found.execution_id, found.waitpoint_id, f"nokey:{digest}")


async def _unknown_waitpoint(engine: ff.Engine, clock: Clock) -> str:
    found = parse_callback((await wait(engine)).callback())
    return callback_text(found.execution_id, UUID(int=7), found.token)


async def _unknown_execution(engine: ff.Engine, clock: Clock) -> str:
    found = parse_callback((await wait(engine)).callback())
    return callback_text(ff.ExecutionId(UUID(int=found.execution_id.int ^ 1 << 100)), found.waitpoint_id, found.token)


async def _deleted(engine: ff.Engine, clock: Clock) -> str:
    one = await wait(engine)
    await engine.cancel(Operator(one.id), "no longer")
    await engine.delete_execution(one.id)
    return one.callback()


async def _nonsense(engine: ff.Engine, clock: Clock) -> str:
    return "x" * 100


async def _short(engine: ff.Engine, clock: Clock) -> str:
    return "x"


NOT_ANSWERABLE = (
    _consumed, _cancelled, _expired, _forged, _of_another, _unknown_key, _unknown_waitpoint, _unknown_execution,
    _deleted, _nonsense, _short,
)  # fmt: skip


async def test_every_guess_gets_the_same_answer_byte_for_byte(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine, clock: Clock, service: Service
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "a browser opens it": {"method": "GET", "headers": BROWSER},
        "a program opens it": {"method": "GET"},
        "a browser answers": {"method": "POST", "headers": BROWSER, "data": {"name": "approved", "once": "1"}},
        "a program answers": {"method": "POST", "json": {"ok": True}},
        "a program repeats": {"method": "POST", "json": {"ok": True}, "headers": {"Idempotency-Key": "k"}},
    }
    seen: dict[str, set[tuple[Any, ...]]] = {way: set() for way in ways}
    for make in NOT_ANSWERABLE:
        link = f"/w/{await make(plain_engine, clock)}"
        service.limits = Limits()  # as many tries as one wants
        for way, request in ways.items():
            answer = await anybody.request(url=link, **request)
            headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
            seen[way].add((answer.status_code, answer.content, *sorted(headers.items())))
            assert answer.status_code == 404, (make.__name__, way, answer.text)
    for way, answers in seen.items():
        assert len(answers) == 1, (way, answers)


async def test_an_address_that_tries_too_many_links_has_to_wait(
    anybody: httpx.AsyncClient, client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    statuses = [(await anybody.get(f"/w/{n}")).status_code for n in range(40)]
    assert (statuses[0], statuses[-1]) == (404, 429)
    refused = await anybody.post(one.link())
    assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True)
    assert await state_of(plain_engine, one) == "suspended"
    assert (await client.get("/v1/waits")).status_code == 200  # keys have a limit of their own


async def test_pages_are_not_stored_shown_in_frames_or_sent_as_referrers(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    answers = [
        await anybody.get(one.link(), headers=BROWSER),
        await anybody.get(one.link()),
        await anybody.get("/w/nothing", headers=BROWSER),
        await anybody.get("/w/nothing"),
        await anybody.post(one.link(), headers=BROWSER, data={"name": "approved"}),
        await anybody.post("/w/nothing"),
    ]
    for answer in answers:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "script-src" not in answer.headers["content-security-policy"]
        assert one.callback() not in answer.text


async def test_a_form_of_another_site_is_refused(anybody: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine)
    form = {"name": "approved"}
    html = {"Accept": "text/html"}
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "https://server.evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://server"},
    ):
        answer = await anybody.post(one.link(), headers={**html, **headers}, data=form)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), headers
    assert (await plain_engine.read_signals(one.id)).items == []
    for headers in ({}, {"Origin": "null"}, {"Origin": "http://server"}, {"Sec-Fetch-Site": "none"}):
        other = await wait(plain_engine)
        assert (await anybody.post(other.link(), headers={**html, **headers}, data=form)).status_code == 200


async def test_an_unreadable_body_is_refused_to_a_sender_with_an_open_link(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    requests: list[tuple[int, str, dict[str, Any]]] = [
        (400, "invalid_json", {"content": b"{"}),
        (400, "bad_request", {"content": b"name=%ff", "headers": form}),
        (400, "payload_too_large", {"json": "x" * 70_000}),
        (400, "invalid_input", {"params": {"name": "__timeout__"}}),
        (403, "forbidden", {"data": {"name": "approved"}, "headers": {"Sec-Fetch-Site": "cross-site"}}),
    ]
    for status, code, request in requests:
        answer = await anybody.post(one.link(), **request)
        assert (answer.status_code, answer.json()["code"]) == (status, code), request
        guessed = await anybody.post("/w/nothing", **request)
        assert (guessed.status_code, guessed.json()["code"]) == (404, "not_found")
    for link in (one.link(), "/w/nothing"):
        large = await anybody.post(link, content=b'"' + b"x" * 300_000 + b'"')
        assert (large.status_code, large.json()["route"]) == (413, "/w/{callback}")
    assert await state_of(plain_engine, one) == "suspended"


async def test_decisions_by_link_are_in_the_audit_log_and_guesses_are_not(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine, schema=DECISION)
    await anybody.get(one.link())
    await anybody.post("/w/nothing")
    await anybody.post(f"/w/{await _forged(plain_engine, None)}")
    assert (await anybody.post(one.link(), json={"ok": 5})).status_code == 422
    key = {"Idempotency-Key": "k"}
    assert (await anybody.post(one.link(), json={"ok": True}, headers=key)).status_code == 200
    assert (await anybody.post(one.link(), json={"ok": True})).status_code == 404
    rows = (await plain_engine.list_operator_audit()).items
    target = f"{one.id}, {one.points['approval'].waitpoint_id}"
    assert [(row.actor, row.operation, row.target, row.outcome) for row in rows] == [
        ("link", "answer_link", target, "ok"),
        ("link", "answer_link", target, "payload_refused"),
    ]
    assert one.callback() not in repr(rows)


async def test_a_link_is_in_no_log(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    one = await wait(plain_engine, schema=DECISION)
    with caplog.at_level(logging.DEBUG, logger="flowfabric"):
        await anybody.get(one.link())
        await anybody.post(one.link(), json={"ok": 5})
        await anybody.post(one.link(), json={"ok": True})
        await anybody.post(one.link(), json={"ok": True})
    secret = one.points["approval"].waitpoint_token.reveal()
    for record in caplog.records:
        assert one.callback() not in record.getMessage()
        assert secret not in record.getMessage()


@each(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("text/html", True),
        (BROWSER["Accept"], True),
        ("application/json, text/html;q=0.9", False),
        ("application/json;q=0.5, text/html", True),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
    ],
)
def test_browsers_get_pages_and_programs_json(accept: str, expected: bool) -> None:
    assert wants_html(accept) is expected


async def test_the_handler_of_a_task_has_its_link(
    monkeypatch: pytest.MonkeyPatch, database: str, anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    app = ff.App(dsn=database)
    links: list[str] = []

    @app.task
    async def ask(ctx: ff.Context) -> str:
        point = await ctx.waitpoint("boss")
        links.append(point.link)
        return (await point.wait(timeout="1 day")).name

    monkeypatch.setenv("FLOWFABRIC_PUBLIC_URL", "https://flows.example/api/")
    async with app, ff.Worker(app):
        run = await ask.submit()
        while not await run.waits():
            await asyncio.sleep(0.02)
        assert links[0].startswith("https://flows.example/api/w/")
        callback = links[0].rpartition("/")[2]
        assert (await anybody.post(f"/w/{callback}", params={"name": "fine"})).status_code in (200, 202)
        assert await run.result() == "fine"


async def test_no_other_method_and_no_header_makes_a_request_decide(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        told = [
            (answer.status_code, answer.content.replace(answer.headers["x-request-id"].encode(), b""))
            for link in (one.link(), "/w/nothing")
            for answer in [await anybody.request(method, link, data={"name": "approved"})]
        ]
        assert told[0] == told[1]
        assert told[0][0] == 405, method
    for shown in ({"X-HTTP-Method-Override": "POST"}, {"X-Method-Override": "POST"}, {"X-HTTP-Method": "POST"}):
        opened = await anybody.get(one.link(), params={"name": "approved", "_method": "POST"}, headers=shown)
        assert opened.status_code == 200
    assert (await anybody.head(one.link(), params={"name": "approved"})).status_code == 200
    assert (await plain_engine.read_signals(one.id)).items == []


async def test_no_character_of_a_link_can_be_changed(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine, service: Service
) -> None:
    one = await wait(plain_engine)
    callback = one.callback()
    tried = 0
    for place, char in enumerate(callback):
        other = "B" if char != "B" else "C"
        changed = f"{callback[:place]}{other}{callback[place + 1 :]}"
        service.limits = Limits()  # as many tries as one wants
        answer = await anybody.post(f"/w/{changed}", data={"name": "approved"})
        assert answer.status_code == 404, (place, answer.text)
        tried += 1
    for changed in (
        callback[:-1],
        callback + "A",
        callback + "%00",
        callback + "=",
        f"{callback}/",
        callback.swapcase(),
    ):
        assert (await anybody.post(f"/w/{changed}", data={"name": "approved"})).status_code == 404, changed
    service.limits = Limits()
    assert tried > 60
    assert await state_of(plain_engine, one) == "suspended"
    assert (await anybody.post(one.link(), data={"name": "approved"})).status_code == 200


async def test_nothing_of_a_request_becomes_a_header_or_an_address_of_the_page(
    anybody: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    one = await wait(plain_engine)
    evil = "x\r\nSet-Cookie: a=b\r\nX-Evil: 1"
    hosts = {"Host": "evil.example", "X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"}
    answers = [
        await anybody.get(one.link(), headers={**BROWSER, **hosts}),
        await anybody.get(one.link(), params={"name": evil}, headers=BROWSER),
        await anybody.get("/w/x%0d%0aSet-Cookie:%20a=b", headers=BROWSER),
        await anybody.post("/w/x%0d%0aSet-Cookie:%20a=b", data={"name": evil}),
        await anybody.post(one.link(), params={"name": evil}, headers={"Idempotency-Key": "k"}),
        await anybody.post(one.link(), headers=BROWSER, data={"name": evil, "once": evil}),
    ]
    for answer in answers:
        assert not {"set-cookie", "x-evil", "location"} & set(answer.headers)
        assert not any(sign in value for value in answer.headers.values() for sign in "\r\n")
        assert "evil.example" not in answer.text


async def test_of_answers_at_the_same_time_one_decides(anybody: httpx.AsyncClient, plain_engine: ff.Engine) -> None:
    one = await wait(plain_engine)
    answers = await asyncio.gather(
        *(anybody.post(one.link(), data={"name": name}) for name in ("approved", "rejected") * 4)
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [404] * 7
    assert len((await plain_engine.read_signals(one.id)).items) == 1
