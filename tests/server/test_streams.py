"""Streams of attempts over HTTP: pages, long polls, server-sent events, summaries."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

import flowfabric as ff
from flowfabric.server import sse
from flowfabric.server.operation import Scope
from flowfabric.server.service import Service
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.stream import BestEffortLive, DurableSummary, NewFrame
from tests.each import Rows
from tests.server.conftest import MakeClient
from tests.server.following import PATIENCE, Follow
from tests.support import started, submit
from tests.until import until


def at(held: Claimed, rest: str = "stream") -> str:
    return f"/v1/executions/{held.execution_id}/attempts/{held.handle.attempt_index}/{rest}"


async def emit(engine: ff.Engine, held: Claimed, *texts: str | bytes, **options: Any) -> list[str]:
    """Append frames; returns their ids."""
    found = []
    for text in texts:
        payload = text.encode() if isinstance(text, str) else text
        made = await engine.append_frame(held.handle, NewFrame(payload=payload, **options))
        assert made is not None
        found.append(made.stream_id)
    return found


async def test_frames_are_read_between_two_ids(plain_engine: ff.Engine, client: httpx.AsyncClient) -> None:
    held = await started(plain_engine)
    ids = await emit(plain_engine, held, "a", "b", "c", frame_type="token")
    await emit(plain_engine, held, b"\xff", kind="blob", correlation_id="m-1", seq=7)
    page = (await client.get(at(held))).json()
    assert [one["payload"] for one in page["frames"]] == ["a", "b", "c", {"base64": "/w=="}]
    assert (page["frames"][0]["type"], page["frames"][3]["kind"]) == ("token", "blob")
    assert (page["frames"][3]["correlation_id"], page["frames"][3]["seq"]) == ("m-1", 7)
    assert (page["closed_at"], page["closed_reason"], page["frame_count"]) == (None, None, 4)
    part = (await client.get(at(held), params={"from": ids[1], "to": ids[2]})).json()
    assert [one["id"] for one in part["frames"]] == ids[1:]
    assert len((await client.get(at(held), params={"limit": 2})).json()["frames"]) == 2
    await plain_engine.complete(held.handle)
    closed = (await client.get(at(held), params={"from": "end"})).json()
    assert (closed["frames"], closed["closed_reason"]) == ([], "attempt_success")


async def test_best_effort_frames_can_be_left_out(plain_engine: ff.Engine, client: httpx.AsyncClient) -> None:
    held = await started(plain_engine)
    await emit(plain_engine, held, "kept")
    await emit(plain_engine, held, "live", mode=BestEffortLive(ttl=timedelta(minutes=5)))
    every = (await client.get(at(held))).json()["frames"]
    assert [(one["mode"], one["ttl_seconds"]) for one in every] == [("durable", None), ("best_effort", 300.0)]
    for rest in ("stream", "stream/tail"):
        some = (await client.get(at(held, rest), params={"visibility": "exclude_best_effort"})).json()["frames"]
        assert [one["payload"] for one in some] == ["kept"]


async def test_a_long_poll_waits_for_the_first_frame_or_the_end(
    plain_engine: ff.Engine, client: httpx.AsyncClient
) -> None:
    held = await started(plain_engine)
    (first,) = await emit(plain_engine, held, "a")
    assert (await client.get(at(held, "stream/tail"))).json()["frames"][0]["id"] == first
    assert (await client.get(at(held, "stream/tail"), params={"after": first})).json()["frames"] == []
    params = {"after": first, "block_seconds": 30}
    waiting = asyncio.ensure_future(client.get(at(held, "stream/tail"), params=params))
    await until(lambda: plain_engine.tails.count == 1)
    (second,) = await emit(plain_engine, held, "b")
    async with asyncio.timeout(PATIENCE):
        assert [one["id"] for one in (await waiting).json()["frames"]] == [second]
    params["after"] = second
    waiting = asyncio.ensure_future(client.get(at(held, "stream/tail"), params=params))
    await until(lambda: plain_engine.tails.count == 1)
    await plain_engine.complete(held.handle)
    async with asyncio.timeout(PATIENCE):
        assert (await waiting).json()["closed_reason"] == "attempt_success"


async def test_waiting_polls_are_answered_when_the_server_stops(
    plain_engine: ff.Engine, client: httpx.AsyncClient, service: Service
) -> None:
    held = await started(plain_engine)
    await emit(plain_engine, held, "a")
    params = {"after": "9999999999999-0", "block_seconds": 30}
    polls = [asyncio.ensure_future(client.get(at(held, "stream/tail"), params=params)) for _ in range(5)]
    await until(lambda: plain_engine.tails.count == 5)
    service.draining.set()
    async with asyncio.timeout(PATIENCE):
        for one in polls:
            answer = await one
            assert (answer.status_code, answer.json()["frames"]) == (200, [])
        late = await client.get(at(held, "stream/tail"), params=params)
    assert (late.status_code, late.json()["frame_count"]) == (200, 1)
    assert not service.clients._waiting


async def test_more_polls_than_an_engine_has_permits_for_are_refused(
    plain_engine: ff.Engine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await started(plain_engine)
    monkeypatch.setattr(plain_engine._stream_ops, "most", 1)
    waiting = asyncio.ensure_future(client.get(at(held, "stream/tail"), params={"block_seconds": 30}))
    await until(lambda: plain_engine.tails.count == 1)
    refused = await client.get(at(held))
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (
        429,
        "resource_exhausted",
        True,
    )
    assert int(refused.headers["retry-after"]) >= 1
    await emit(plain_engine, held, "a")
    assert (await waiting).status_code == 200


async def test_the_id_of_every_frame_continues_after_it_and_the_end_is_sent(
    plain_engine: ff.Engine, follow: Follow
) -> None:
    held = await started(plain_engine)
    path = at(held, "stream/events")
    async with follow(path) as live:
        assert live.headers["content-type"] == "text/event-stream"
        await emit(plain_engine, held, "a", "b\nc", frame_type="token")
        await emit(plain_engine, held, "live", mode=BestEffortLive(ttl=timedelta(minutes=5)))
        await emit(plain_engine, held, '{"done": 1}', mode=DurableSummary())
        got = await live.events(4)
        assert [(one.name, one.data) for one in got] == [
            ("token", "a"), ("token", "b\nc"), (None, "live"), ("summary_delta", '{"done": 1}')
        ]  # fmt: skip
        await plain_engine.complete(held.handle)
        end = await live.event()
        assert (end.name, end.json["closed_reason"]) == ("end", "attempt_success")
        assert await live.block() is None
    ids = [one.id for one in got]
    for place, last in enumerate([None, *ids]):
        async with follow(path, last_id=last) as again:
            found = await again.events(5 - place)
            assert [one.id for one in found] == [*ids[place:], end.id]
    async with follow(path, last_id=end.id) as over:
        assert (over.status, over.body) == (204, b"")


async def test_the_end_of_a_stream_that_never_began_is_sent_once(plain_engine: ff.Engine, follow: Follow) -> None:
    target = await submit(plain_engine)
    await plain_engine.cancel(Operator(target), "never started")
    path = f"/v1/executions/{target}/attempts/0/stream/events"
    async with follow(path) as first:
        end = await first.event()
        assert (end.name, end.json) == ("end", {"closed_at": None, "closed_reason": None})
    async with follow(path, last_id=end.id) as over:
        assert (over.status, over.body) == (204, b"")


async def test_cursors_of_other_streams_are_refused(plain_engine: ff.Engine, follow: Follow) -> None:
    held = await started(plain_engine)
    await emit(plain_engine, held, "a")
    rows = Rows()
    for last in ("garbage", "5.0", "1/1780000000000-0/1", "0/1780000000000-0/x", "0/-1-0", "x/end", "0/" + "9" * 50):
        with rows.row(last):
            async with follow(at(held, "stream/events"), last_id=last) as refused:
                assert (refused.status, refused.problem["code"]) == (400, "invalid_input")
    rows.tell()


async def test_frames_that_newer_ones_displaced_are_a_gap(plain_engine: ff.Engine, follow: Follow) -> None:
    policy = ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=10))
    held = await started(plain_engine, policy=policy)
    path = at(held, "stream/events")
    async with follow(path) as early:
        await emit(plain_engine, held, "0")
        first = await early.event()
    await emit(plain_engine, held, *map(str, range(1, 40)))
    async with follow(path, last_id=first.id) as late:
        gap = await late.event()
        assert gap.name == "gap"
        missing = gap.json["missing"]
        shown = await late.events(39 - missing)
        assert [one.data for one in shown] == [str(one) for one in range(missing + 1, 40)]
    async with follow(path, last_id=gap.id) as again:
        assert (await again.event()).data == shown[0].data


async def test_followers_of_a_stream_are_told_when_the_server_stops(
    plain_engine: ff.Engine, follow: Follow, service: Service
) -> None:
    held = await started(plain_engine)
    path = at(held, "stream/events")
    async with follow(path) as one:
        await emit(plain_engine, held, "a")
        await one.event()
        await until(lambda: plain_engine.tails.count == 1)
        service.draining.set()
        bye = await one.event()
        assert (bye.name, bye.id) == ("bye", one.last_id)
        assert await one.block() is None
    service.draining.clear()
    await emit(plain_engine, held, "b")
    async with follow(path, last_id=bye.id) as again:
        assert (await again.event()).data == "b"


async def test_followers_of_a_stream_share_its_reads_and_leave_nothing_behind(
    plain_engine: ff.Engine, follow: Follow, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await started(plain_engine)
    written: list[str] = []
    real = sse.sse.event

    def counting(item: Any, cursor: str | None = None) -> bytes:
        written.append(item.cursor)
        return real(item, cursor)

    monkeypatch.setattr(sse.sse, "event", counting)
    before = len(asyncio.all_tasks())
    clients = [follow(at(held, "stream/events")) for _ in range(10)]
    for one in clients:
        await one.__aenter__()
    await until(lambda: plain_engine.tails.count == 10)
    await emit(plain_engine, held, "a")
    for one in clients:
        assert (await one.event()).data == "a"
    assert len(written) == 1
    for one in clients:
        await one.leave()
    await until(lambda: plain_engine.tails.count == 0)
    assert (service.clients.following, len(service.clients._waiting)) == (0, 0)
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_summary_is_shown_with_its_version(plain_engine: ff.Engine, client: httpx.AsyncClient) -> None:
    held = await started(plain_engine)
    none = await client.get(at(held, "summary"))
    assert (none.status_code, none.json()["code"]) == (404, "not_found")
    await emit(plain_engine, held, '{"done": 1, "of": 3}', '{"done": 2}', mode=DurableSummary())
    found = (await client.get(at(held, "summary"))).json()
    assert (found["document"], found["version"], found["attempt_index"]) == ({"done": 2, "of": 3}, 2, 0)


async def test_streams_that_a_key_may_not_see_are_refused(
    plain_engine: ff.Engine, client: httpx.AsyncClient, client_of: MakeClient, follow: Follow
) -> None:
    held = await started(plain_engine, namespace="a")
    await emit(plain_engine, held, "secret text")
    await emit(plain_engine, held, '{"a": "secret text"}', mode=DurableSummary())
    unknown = f"/v1/executions/{mint_uuid()}/attempts/0"
    foreign, hiding = client_of(Scope.READ, namespaces=("b",)), client_of(Scope.READ, hides_payloads=True)
    own = client_of(Scope.READ, namespaces=("a",))
    for rest in ("stream", "stream/tail", "stream/events", "summary"):
        for by, path, status, code in (
            (client, f"{unknown}/{rest}", 404, "not_found"),
            (foreign, at(held, rest), 404, "not_found"),
            (hiding, at(held, rest), 403, "forbidden"),
            (client_of(Scope.SUBMIT), at(held, rest), 403, "forbidden"),
            (client_of(), at(held, rest), 401, "unauthenticated"),
        ):
            async with follow(path, by=by) as refused:
                assert (refused.status, refused.problem["code"]) == (status, code), (rest, code)
                assert b"secret text" not in refused.body
        if rest != "stream/events":
            assert (await own.get(at(held, rest))).status_code == 200


async def test_wrong_parameters_of_streams_are_named(plain_engine: ff.Engine, client: httpx.AsyncClient) -> None:
    held = await started(plain_engine)
    rows = Rows()
    for rest, params in (
        ("stream", {"from": "-"}),
        ("stream", {"to": "+"}),
        ("stream", {"limit": "0"}),
        ("stream", {"limit": "1001"}),
        ("stream", {"visibility": "none"}),
        ("stream/tail", {"after": "start"}),
        ("stream/tail", {"block_seconds": "31"}),
        ("stream/tail", {"block_seconds": "-1"}),
        ("stream/tail", {"block_seconds": "nan"}),
        ("stream/tail", {"block_seconds": "inf"}),
        ("stream/tail", {"limit": "1001"}),
        ("stream/events", {"after": "nothing"}),
        ("stream/events", {"limit": "1"}),
    ):
        with rows.row((rest, params)):
            answer = await client.get(at(held, rest), params=params)
            assert answer.status_code in (400, 422)
            assert answer.json()["errors"]
    rows.tell()
    for attempt in ("x", "-1", "2147483648"):
        path = f"/v1/executions/{held.execution_id}/attempts/{attempt}/stream"
        assert (await client.get(path)).status_code in (400, 422)
