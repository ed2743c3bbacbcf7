"""The event log over HTTP: followed by server-sent events, read page by page, and by its durable consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest

import flowfabric as ff
from flowfabric.engine import followers
from flowfabric.server import sse
from flowfabric.server.app import create_app
from flowfabric.server.operation import Scope
from flowfabric.server.routes import events as routes
from flowfabric.server.service import Service
from flowfabric.values.event import EventCursor
from flowfabric.values.ids import FlowId, mint_uuid
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.server.following import Follow, Following
from tests.support import claim_one, end_one, started, submit, submit_member
from tests.until import until

EVENTS = "/v1/events"
TTL = timedelta(hours=1)


async def mixed(engine: ff.Engine) -> dict[str, Any]:
    """Events of all families, with and without everything that filters compare."""
    flow = FlowId(mint_uuid())
    member = await submit_member(engine, flow, namespace="a", tags={"tenant": "x"}, execution_kind="first")
    await engine.complete((await claim_one(engine)).handle)
    await end_one(engine, namespace="b", tags={"tenant": "x", "other": "y"}, execution_kind="second")
    await end_one(engine, tags={"tenant": "X"}, execution_kind="first")
    waiting = await submit(engine, namespace="a", execution_kind="second")
    await engine.change_priority(waiting, 5)
    await engine.cancel_flow(flow)
    await engine.register_worker("w", "w-1", lanes=["default"], liveness_ttl=TTL, namespace="a")
    await engine.mark_worker_dead("w-1", reason="broken", namespace="a")
    return {"flow": str(flow), "execution": str(member)}


async def cursors(engine: ff.Engine) -> list[str]:
    return [str(one.cursor) for one in (await engine.read_events()).items]


# ---- following


async def test_the_id_of_every_event_continues_after_it(plain_engine: ff.Engine, follow: Follow) -> None:
    await mixed(plain_engine)
    wanted = await cursors(plain_engine)
    async with follow(after="0") as whole:
        assert whole.status == 200
        assert whole.headers["content-type"] == "text/event-stream"
        assert whole.headers["cache-control"] == "no-store"
        got = await whole.events(len(wanted))
    assert [one.id for one in got] == wanted
    assert [one.json["cursor"] for one in got] == wanted
    for place, last in enumerate(["0", *wanted[:-1]]):
        for how in ({"last_id": last}, {"after": last}):
            async with follow(**how) as again:
                assert [one.id for one in await again.events(len(wanted) - place)] == wanted[place:]


async def test_the_header_wins_over_the_parameter_that_a_browser_repeats(
    plain_engine: ff.Engine, follow: Follow
) -> None:
    await mixed(plain_engine)
    wanted = await cursors(plain_engine)
    async with follow(after="0", last_id=wanted[2]) as again:
        assert (await again.event()).id == wanted[3]


async def test_a_client_from_now_on_can_continue_before_it_has_seen_an_event(
    plain_engine: ff.Engine, follow: Follow
) -> None:
    await end_one(plain_engine)
    async with follow(family="completion") as first:
        begin = await first.block()
        assert begin is not None
        assert begin.data is None
    missed = await end_one(plain_engine)
    async with follow(family="completion", last_id=begin.id) as second:
        assert (await second.event()).json["execution_id"] == str(missed)
        live = await end_one(plain_engine)
        assert (await second.event()).json["execution_id"] == str(live)


async def test_only_operators_are_shown_the_ids_of_leases(
    plain_engine: ff.Engine, follow: Follow, client_of: MakeClient
) -> None:
    held = await started(plain_engine)
    lease = str(held.handle.lease_id)
    await plain_engine.complete(held.handle)
    for by, sees in (
        (client_of(Scope.READ), False),
        (client_of(Scope.READ, Scope.OPERATE), True),
        (client_of(Scope.READ), False),
    ):
        async with follow(by=by, after="0", family="lease") as leases:
            shown = [one.data or "" for one in await leases.events(2)]
        assert "acquired" in shown[0]
        for text in (*shown, (await by.get(f"{EVENTS}/page")).text):
            assert (lease in text) is sees


async def test_filters_give_the_subsequence_that_matches(
    plain_engine: ff.Engine, follow: Follow, client: httpx.AsyncClient
) -> None:
    made = await mixed(plain_engine)
    every = [(one, one.families) for one in (await plain_engine.read_events()).items]
    cases: dict[str, tuple[dict[str, Any], Callable[[Any, Any], bool]]] = {
        "namespace": ({"namespace": "a"}, lambda one, _: one.namespace == "a"),
        "tag": ({"tag": "tenant=x"}, lambda one, _: one.tags.get("tenant") == "x"),
        "flow": ({"flow": made["flow"]}, lambda one, _: str(one.flow_id) == made["flow"]),
        "execution": ({"execution": made["execution"]}, lambda one, _: str(one.execution_id) == made["execution"]),
        "kind": ({"kind": "second"}, lambda one, _: one.execution_kind == "second"),
        "one family": ({"family": "worker"}, lambda _, families: "worker" in families),
        "two": ({"family": ["operator", "lease"]}, lambda _, families: {"operator", "lease"} & {*families}),
        "all at once": (
            {"family": "completion", "namespace": "a", "tag": "tenant=x", "kind": "first"},
            lambda one, families: "completion" in families and one.namespace == "a",
        ),
    }
    for name, (params, takes) in cases.items():
        wanted = [str(one.cursor) for one, families in every if takes(one, families)]
        assert wanted, name
        async with follow(after="0", **params) as events:
            assert [one.id for one in await events.events(len(wanted))] == wanted, name
        page = await client.get(f"{EVENTS}/page", params=params)
        assert [one["cursor"] for one in page.json()["items"]] == wanted, name


async def test_a_key_of_a_namespace_sees_events_of_no_other(
    plain_engine: ff.Engine, follow: Follow, client_of: MakeClient
) -> None:
    await mixed(plain_engine)
    wanted = [str(one.cursor) for one in (await plain_engine.read_events()).items if one.namespace == "a"]
    own = client_of(Scope.READ, namespaces=("a",))
    async with follow(by=own, after="0") as events:
        assert [one.id for one in await events.events(len(wanted))] == wanted
        await end_one(plain_engine, namespace="b")
        await end_one(plain_engine, namespace="a")
        assert [one.json["namespace"] for one in await events.events(2)] == ["a", "a"]
    page = await own.get(f"{EVENTS}/page")
    assert {one["namespace"] for one in page.json()["items"]} == {"a"}
    async with follow(by=own, namespace="b") as refused:
        assert (refused.status, refused.problem["code"]) == (404, "not_found")
    several = client_of(Scope.READ, namespaces=("a", "b"))
    async with follow(by=several) as refused:
        assert (refused.status, refused.problem["errors"][0]["allowed"]) == (422, "a, b")


async def test_cursors_that_this_log_never_gave_are_refused(
    plain_engine: ff.Engine, follow: Follow, client: httpx.AsyncClient
) -> None:
    await end_one(plain_engine)
    end = (await plain_engine.count_events()).cursor
    rows = Rows()
    for name, last, code in (
        ("garbage", "garbage", "invalid_input"),
        ("a negative number", "-1.0", "invalid_input"),
        ("too large a number", "9" * 19 + ".0", "invalid_input"),
        ("digits of another script", "\u0661.0", "invalid_input"),
        ("a cursor of a stream", "0/1780000000000-0/3", "invalid_input"),
        ("one of the future", str(EventCursor(end.position + 1000, end.epoch)), "cursor_ahead"),
    ):
        with rows.row(name):
            async with follow(last_id=last) as refused:
                assert (refused.status, refused.problem["code"]) == (400, code)
            page = await client.get(f"{EVENTS}/page", params={"after": last})
            assert (page.status_code, page.json()["code"]) == (400, code)
    rows.tell()


async def test_a_cursor_whose_events_are_gone_is_reset_to_the_oldest(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], follow: Follow, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        await end_one(plain_engine)
    known = await cursors(plain_engine)
    floor = EventCursor.parse(known[1])
    await sql.execute("update flowfabric.deployment set event_floor = $1", floor.position)
    async with follow(last_id=known[0]) as events:
        reset = await events.event()
        assert (reset.name, reset.id) == ("reset", str(floor))
        assert reset.json == {"code": "cursor_expired", "after": known[0], "oldest": str(floor)}
        assert [one.id for one in await events.events(2)] == known[2:]
    page = await client.get(f"{EVENTS}/page", params={"after": known[0]})
    assert (page.status_code, page.json()["code"]) == (400, "cursor_expired")
    await sql.execute("update flowfabric.deployment set event_floor = 0")


async def test_a_client_that_is_slow_over_a_trim_is_reset_too(
    plain_engine: ff.Engine,
    sql: asyncpg.Connection[Any],
    follow: Follow,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers, "QUEUE", 2)
    async with follow() as events:
        await until(lambda: plain_engine.followers.count == 1)
        events.reads.clear()
        for _ in range(4):
            await end_one(plain_engine)
        await until(lambda: plain_engine.followers.count == 0)  # its queue is full: it must read for itself
        floor = (await plain_engine.count_events()).cursor
        await sql.execute("update flowfabric.deployment set event_floor = $1", floor.position)
        events.reads.set()
        reset = await events.until(lambda one: one.name == "reset")
        assert reset.id == str(floor)
        last = await end_one(plain_engine)
        assert (await events.event()).json["execution_id"] == str(last)
    await sql.execute("update flowfabric.deployment set event_floor = 0")


async def test_a_log_that_a_restore_cut_short_is_reset_to_what_both_share(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], follow: Follow
) -> None:
    await end_one(plain_engine)
    end = (await plain_engine.count_events()).cursor
    lost = EventCursor(end.position + 5, end.epoch + 7)  # of an epoch that this log never had
    async with follow(last_id=str(lost)) as events:
        reset = await events.event()
        assert (reset.name, reset.json["code"], reset.json["after"]) == ("reset", "cursor_ahead", str(lost))
        assert EventCursor.parse(reset.json["oldest"]).epoch == end.epoch


async def test_a_silence_is_a_comment_and_what_does_not_match_moves_the_id(
    plain_engine: ff.Engine, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.05)
    monkeypatch.setattr(sse, "TICK_SECONDS", 0.02)
    async with follow(family="completion", kind="rare") as events:
        begin = await events.block()
        assert begin is not None
        assert (await events.until(lambda one: one.comment is not None)).id is None
        await end_one(plain_engine)  # of another kind
        end = (await plain_engine.count_events()).cursor
        moved = await events.until(lambda one: one.id is not None)
        assert moved.data is None
        while EventCursor.parse(moved.id or "").position < end.position:
            moved = await events.until(lambda one: one.id is not None)
    async with follow(family="completion", kind="rare", last_id=moved.id) as again:
        await end_one(plain_engine, execution_kind="rare")
        assert (await again.event()).json["execution_kind"] == "rare"


# ---- clients that leave, are slow, or outlive the server


async def test_a_client_that_leaves_leaves_nothing_behind(
    plain_engine: ff.Engine, follow: Follow, service: Service
) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(3):
        clients = [follow(after="0") for _ in range(20)]
        for one in clients:
            await one.__aenter__()
        await until(lambda: plain_engine.followers.count == 20)
        assert service.clients.following == 20
        for one in clients:
            await one.leave()
        assert service.clients.following == 0
        assert not service.clients._waiting
    await until(lambda: plain_engine.followers.count == 0)
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_an_event_is_written_once_for_all_clients(
    plain_engine: ff.Engine, follow: Follow, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = routes.event_for

    def counting(caller: Any, event: Any) -> Any:
        written.append(str(event.cursor))
        return real(caller, event)

    monkeypatch.setattr(routes, "event_for", counting)
    clients = [follow() for _ in range(5)]
    for one in clients:
        await one.__aenter__()
    await until(lambda: plain_engine.followers.count == 5)
    reads = plain_engine.followers.reads
    await end_one(plain_engine)
    for one in clients:
        assert len(await one.events(2)) == 2
    assert len(written) == len(set(written)) == 2
    assert plain_engine.followers.reads > reads
    for one in clients:
        await one.leave()


async def test_a_client_that_takes_nothing_is_cut_off_and_continues_with_its_last_id(
    plain_engine: ff.Engine, follow: Follow, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(sse, "TICK_SECONDS", 0.02)
    async with follow(after="0") as slow:
        await end_one(plain_engine)
        seen = [one.id for one in await slow.events(1)]
        slow.reads.clear()
        for _ in range(2):
            await end_one(plain_engine)
        await slow.ended()
        assert slow.was_aborted
    assert service.clients.cut_off == 1
    assert service.clients.following == 0
    wanted = await cursors(plain_engine)
    async with follow(last_id=seen[-1]) as again:
        assert [one.id for one in await again.events(len(wanted) - 1)] == wanted[1:]


async def test_a_client_that_is_behind_delays_no_other(
    plain_engine: ff.Engine, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "QUEUE", 2)
    async with follow(family="completion") as slow, follow(family="completion") as fast:
        await until(lambda: plain_engine.followers.count == 2)
        slow.reads.clear()
        ended = [str(await end_one(plain_engine)) for _ in range(8)]
        assert [one.json["execution_id"] for one in await fast.events(8)] == ended
        slow.reads.set()
        assert [one.json["execution_id"] for one in await slow.events(8)] == ended


async def test_followers_are_told_when_the_server_stops(
    plain_engine: ff.Engine, follow: Follow, service: Service
) -> None:
    await end_one(plain_engine)
    async with follow(after="0") as first, follow(family="signal") as second:
        last = (await first.events(2))[-1].id
        service.draining.set()
        for one in (first, second):
            bye = await one.event()
            assert (bye.name, bye.json) == ("bye", {})
            assert await one.block() is None
            await one.ended()
        assert first.last_id == last
    async with follow(last_id=last) as late:
        assert (await late.event()).name == "bye"


async def test_an_engine_that_closes_ends_the_response_and_the_client_continues(
    database: str, follow: Follow, client: httpx.AsyncClient, plain_engine: ff.Engine
) -> None:
    async with await ff.Engine.connect(database) as other:
        own = Service(other, keys=client._transport.app.state.service.keys)  # type: ignore[attr-defined]
        app = create_app(other, service=own)
        follower = Following(app, EVENTS, key=client.headers["authorization"], after="0")
        await follower.__aenter__()
        await end_one(plain_engine)
        await follower.events(2)
    await follower.ended()
    last = follower.last_id
    missed = await end_one(plain_engine)
    async with follow(last_id=last) as again:
        assert [one.json["execution_id"] for one in await again.events(2)] == [str(missed)] * 2


# ---- pages and consumers


async def test_pages_continue_with_their_cursor(plain_engine: ff.Engine, client: httpx.AsyncClient) -> None:
    await mixed(plain_engine)
    wanted = await cursors(plain_engine)
    got: list[str] = []
    params: dict[str, Any] = {"limit": 3}
    while True:
        page = (await client.get(f"{EVENTS}/page", params=params)).json()
        got += [one["cursor"] for one in page["items"]]
        if not page["items"]:
            break
        params["cursor"] = page["next_cursor"]
    assert got == wanted
    await end_one(plain_engine)
    assert len((await client.get(f"{EVENTS}/page", params=params)).json()["items"]) == 2


async def test_wrong_parameters_are_named(follow: Follow, client: httpx.AsyncClient) -> None:
    for params, name in (
        ({"family": "nothing"}, "family"),
        ({"tag": "nothing"}, "tag"),
        ({"tag": "=value"}, "tag"),
        ({"flow": "nothing"}, "flow"),
        ({"execution": "nothing"}, "execution"),
        ({"heartbeats": "perhaps"}, "heartbeats"),
        ({"after": ""}, "after"),
        ({"after": "nothing"}, "after"),
        ({"unknown": "1"}, "unknown"),
    ):
        async with follow(**params) as refused:
            assert refused.status in (400, 422), params
            shown = refused.problem["errors"][0]
            assert name in (shown.get("parameter"), (shown.get("pointer") or "").strip("/")), refused.problem
        page = await client.get(f"{EVENTS}/page", params=params)
        assert page.status_code == refused.status
    for limit in ("0.5", "-1", "10001", "x"):
        assert (await client.get(f"{EVENTS}/page", params={"limit": limit})).status_code in (400, 422)
    for cursor in ("", "nothing"):
        page = await client.get(f"{EVENTS}/page", params={"cursor": cursor, "after": "0"})
        assert page.status_code in (400, 422), cursor
        (shown,) = page.json()["errors"]
        assert "cursor" in (shown.get("parameter"), (shown.get("pointer") or "").strip("/")), shown


async def test_consumers_show_how_far_they_are(
    plain_engine: ff.Engine, client: httpx.AsyncClient, client_of: MakeClient
) -> None:
    assert (await client.get("/v1/consumers")).json()["items"] == []
    begin = await plain_engine.register_consumer("billing", families=("completion",), start=EventCursor())
    await end_one(plain_engine)
    (found,) = (await client.get("/v1/consumers")).json()["items"]
    assert (found["name"], found["cursor"], found["lag"]) == ("billing", str(begin), 2)
    assert (found["families"], found["instance"], found["is_expired"]) == (["completion"], None, False)
    for name in ("archive", "mail"):
        await plain_engine.register_consumer(name, families=("completion",), start=EventCursor())
    page = await client.get("/v1/consumers", params={"limit": 2})
    assert [one["name"] for one in page.json()["items"]] == ["archive", "billing"]
    rest = (await client.get(page.links["next"]["url"])).json()
    assert ([one["name"] for one in rest["items"]], rest["next_cursor"]) == (["mail"], None)
    foreign = await client_of(Scope.READ, namespaces=("a",)).get("/v1/consumers")
    assert foreign.status_code == 403
