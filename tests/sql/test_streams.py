"""Streams in the database: who may append, ids, modes, retention, closing, reading. The tables are the chapter's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.errors import StateError, ValidationFailed
from flowfabric.values.conditions import on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Fence, Handle, Operator
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy, TimeoutPolicy
from flowfabric.values.stream import Appended, BestEffortLive, DurableSummary, Frame, NewFrame, Position
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.each import each
from tests.ids import home
from tests.sql.cases import World, stranger
from tests.support import OTHER, RETRY, STATES, Clock, claim_one, new_id, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
LIVE = BestEffortLive(ttl=timedelta(seconds=5))
SUMMARY = DurableSummary()
HOUR = timedelta(hours=1)


async def append(engine: ff.Engine, handle: Handle | Fence, *payloads: Any, **fields: Any) -> list[Appended]:
    """Append frames in one call; what is not bytes is JSON."""
    frames = [NewFrame(payload=p if isinstance(p, bytes) else json.dumps(p).encode(), **fields) for p in payloads]
    answers = await engine.append_frames([(handle, frame) for frame in frames])
    for answer in answers:
        if isinstance(answer, ff.FlowFabricError):
            raise answer
    return [answer for answer in answers if isinstance(answer, Appended)]


async def payloads(engine: ff.Engine, handle: Handle, **fields: Any) -> list[bytes]:
    page = await engine.read_stream(handle.execution_id, handle.attempt_index, **{"count_limit": 10_000, **fields})
    return [frame.payload for frame in page.frames]


def position(frame: Frame | Appended) -> Position:
    ms, n = (frame.id if isinstance(frame, Frame) else frame.stream_id).split("-")
    return Position(int(ms), int(n))


# ---- who may append


# A stream is closed if its attempt has ended, or if its lease is known to be lost. Otherwise only the lease counts.
CLOSED = {
    "X": "lease_expired",
    "V": "lease_revoked",
    "W.r": "attempt_failure",
    "D.r": "attempt_failure",
    "W.p": "attempt_success",
    "T:completed": "attempt_success",
    "T:failed": "attempt_failure",
    "T:cancelled": "attempt_cancelled",
    "T:expired": "expired",
}


@pytest.mark.parametrize("state", STATES)
async def test_only_the_holder_of_a_live_lease_appends(world: World, state: str) -> None:
    at = await world.reach(state)
    if at.claimed is None:
        return
    before = await world.picture(at.id)
    if state == "A":
        await append(world.engine, at.handle, b"x")
        return
    with pytest.raises(StateError) as caught:
        await append(world.engine, at.handle, b"x")
    expected = ("stream_closed", CLOSED[state]) if state in CLOSED else ("stale_owner_cannot_append", "")
    assert (caught.value.kind, caught.value.detail) == expected
    assert await world.picture(at.id) == before
    assert await world.sql.fetchval("select count(*) from flowfabric.frame") == 0


async def test_a_lapsed_lease_that_was_never_marked_is_stale_and_stays_unmarked(world: World) -> None:
    at = await world.reach("A")
    await world.clock.advance(seconds=31)
    before = await world.picture(at.id)
    with pytest.raises(ff.LeaseLost) as caught:
        await append(world.engine, at.handle, b"x")
    assert caught.value.kind == "stale_owner_cannot_append"
    assert await world.picture(at.id) == before


async def test_another_lease_epoch_attempt_or_index_is_refused(world: World) -> None:
    at = await world.reach("A")
    replace = msgspec.structs.replace
    for wrong in (
        stranger(at.id),
        replace(at.handle, lease_id=new_id()),
        replace(at.handle, lease_epoch=at.handle.lease_epoch + 1),
        replace(at.handle, attempt_id=new_id()),
        replace(at.handle, attempt_index=at.handle.attempt_index + 1),
    ):
        with pytest.raises(StateError) as caught:
            await append(world.engine, wrong, b"x")
        assert caught.value.kind == "stale_owner_cannot_append"
    assert await payloads(world.engine, at.handle) == []


async def test_a_verdict_per_item_and_the_others_are_stored(world: World) -> None:
    one, other, gone = await world.reach("A"), await world.reach("A"), await world.reach("T:completed")
    unknown = Fence(execution_id=ff.ExecutionId(new_id()), lease_id=new_id(), lease_epoch=1, attempt_id=new_id())  # type: ignore[arg-type]
    large = NewFrame(payload=bytes(65_537))
    answers = await world.engine.append_frames(
        [
            (one.handle, NewFrame(payload=b"1")),
            (gone.handle, NewFrame(payload=b"2")),
            (other.handle, NewFrame(payload=b"3")),
            (one.handle, large),
            (unknown, NewFrame(payload=b"4")),
            (one.handle, NewFrame(payload=b"{}", mode=SUMMARY)),
            (one.handle, NewFrame(payload=b"[]", mode=SUMMARY)),
        ]
    )
    kinds = [answer.kind if isinstance(answer, ff.FlowFabricError) else type(answer).__name__ for answer in answers]
    assert kinds == [
        "Appended", "stream_closed", "Appended", "retention_limit_exceeded", "not_found", "Appended", "invalid_input",
    ]  # fmt: skip
    assert await payloads(world.engine, one.handle) == [b"1", b"{}"]
    assert await payloads(world.engine, other.handle) == [b"3"]


async def test_the_database_refuses_what_python_would_not_send(world: World) -> None:
    at = await world.reach("A")
    h = at.handle
    fence = [home(at.id)], [at.id], [h.lease_id], [h.lease_epoch], [h.attempt_id], [h.attempt_index]
    table: list[tuple[bytes, str | None, str | None, str]] = [
        (bytes(65_537), None, None, "retention_limit_exceeded"),
        (b"", None, "x" * 129, "invalid_input"),
        (b"", "lost", None, "invalid_input"),
        (b"no json", "summary", None, "invalid_input"),
        (b"[]", "summary", None, "invalid_input"),
        (b'{"a":"\\u0000"}', "summary", None, "invalid_input"),
        (b"\xff", "summary", None, "invalid_input"),
        (b'{"a":' * 17 + b"{}" + b"}" * 17, "summary", None, "invalid_input"),
        (b"[" * 30_000 + b"]" * 30_000, "summary", None, "invalid_input"),
    ]
    for payload, mode, frame_type, code in table:
        row = await world.sql.fetchrow(
            f"select code from flowfabric.append_frames({', '.join(f'${n}' for n in range(1, 21))})",
            *fence, [1], [payload], [mode] if mode else None, None, [frame_type] if frame_type else None, *[None] * 9,
        )  # fmt: skip
        assert row is not None and row["code"] == code, (payload[:20], mode)
    assert await world.sql.fetchval("select count(*) from flowfabric.frame") == 0


async def test_a_marked_frame_is_stored_once(world: World) -> None:
    at = await world.reach("A")
    items = [(at.handle, NewFrame(payload=b"%d" % n, mark=n, type_mark=n)) for n in (1, 2, 3)]
    assert len([one for one in await world.engine.append_frames(items) if isinstance(one, Appended)]) == 3
    items.append((at.handle, NewFrame(payload=b"4", mark=4)))
    assert [type(one).__name__ for one in await world.engine.append_frames(items)] == ["NoneType"] * 3 + ["Appended"]
    assert await payloads(world.engine, at.handle) == [b"1", b"2", b"3", b"4"]
    assert await world.engine.count_emitted(at.id, 0) == (4, {("durable", ""): 3})


async def test_marks_are_counted_by_mode_and_type_and_outlive_a_trim(world: World) -> None:
    at = await world.reach("A", policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=2)))
    marks = itertools.count(1)
    for n in range(1, 21):
        await append(world.engine, at.handle, b"x", frame_type="a", mark=next(marks), type_mark=n)
    await append(world.engine, at.handle, {}, mode=SUMMARY, mark=next(marks), type_mark=1)
    assert await world.engine.count_emitted(at.id, 0) == (21, {("durable", "a"): 20, ("summary", ""): 1})


# ---- ids


async def test_ids_strictly_grow_also_when_the_clock_steps_back(world: World) -> None:
    at = await world.reach("A")
    found = await append(world.engine, at.handle, b"1", b"2")
    await world.clock.advance(seconds=-20)
    found += await append(world.engine, at.handle, b"3")
    found += await append(world.engine, at.handle, b"4", mode=LIVE)
    found += await append(world.engine, at.handle, {}, mode=SUMMARY)
    await world.clock.advance(seconds=20)
    found += await append(world.engine, at.handle, b"6", mode=LIVE)
    found += await append(world.engine, at.handle, b"7")
    ids = [position(one) for one in found]
    assert ids == sorted(set(ids))
    assert [one.ms for one in ids[:5]] == [ids[0].ms] * 5  # until the clock is there again
    assert [one.n for one in ids[:5]] == [0, 1, 2, 3, 4]
    assert [one.frame_count for one in found] == list(range(1, 8))
    page = await world.engine.read_stream(at.id, 0)
    assert [position(frame) for frame in page.frames] == ids
    assert page.frame_count == 7


async def test_every_field_comes_back(world: World) -> None:
    at = await world.reach("A")
    await append(world.engine, at.handle, b"\xff\0", kind="stderr", correlation_id="c", seq=-5, encoding="json+x")
    await append(world.engine, at.handle, b"t", frame_type="delta", mode=LIVE, seq=2**63 - 1)
    await append(world.engine, at.handle, {"a": 1}, mode=SUMMARY, frame_type="summary_delta", kind="blob")
    one, two, three = (await world.engine.read_stream(at.id, 0)).frames
    assert (one.type, one.kind, one.mode, one.payload, one.correlation_id, one.seq, one.encoding) == (
        "stderr", "stderr", "durable", b"\xff\0", "c", -5, "json+x",
    )  # fmt: skip
    assert (two.type, two.mode, two.ttl, two.seq) == ("delta", "best_effort", timedelta(seconds=5), 2**63 - 1)
    assert (three.type, three.mode, three.summary_version) == ("summary_delta", "summary", 1)
    assert one.fields["ts"] == one.id.partition("-")[0]
    assert list(one.fields) == sorted(one.fields)


async def test_frames_of_many_forms_in_one_call_keep_their_order(world: World) -> None:
    at = await world.reach("A")
    forms: list[dict[str, Any]] = [
        {}, {"frame_type": "a"}, {"mode": LIVE}, {"mode": SUMMARY}, {"kind": "stdout"}, {"encoding": "x"}, {"seq": 1},
        {"mode": BestEffortLive(ttl=timedelta(seconds=9))}, {"correlation_id": "c"},
    ]  # fmt: skip
    frames = [NewFrame(payload=b'{"n":%d}' % n, **form) for n, form in enumerate(forms * 30)]
    answers = await world.engine.append_frames([(at.handle, frame) for frame in frames])
    found = (await world.engine.read_stream(at.id, 0, count_limit=10_000)).frames
    assert [frame.id for frame in found] == [one.stream_id for one in answers if isinstance(one, Appended)]
    assert [
        (f.payload, f.mode == "summary", f.mode == "best_effort", f.kind, f.encoding, f.seq, f.correlation_id)
        for f in found
    ] == [
        (f.payload, f.mode == SUMMARY, isinstance(f.mode, BestEffortLive), f.kind, f.encoding, f.seq, f.correlation_id)
        for f in frames
    ]
    assert [f.summary_version for f in found if f.mode == "summary"] == list(range(1, 31))


# ---- summaries: JSON merge patch

MERGES: list[tuple[Any, Any, Any]] = [
    ({}, {"a": 1}, {"a": 1}),
    ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
    ({"a": 1}, {"a": "__ff_null__"}, {"a": None}),
    ({"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"x": 1, "y": 2}}),
    ({"a": 1}, {"a": {"y": 2}}, {"a": {"y": 2}}),
    ({"a": {"x": 1}}, {"a": {}}, {"a": {"x": 1}}),
    ({}, {"a": {"x": None}}, {"a": {}}),
    ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
    ({}, {"a": ["__ff_null__", None, 1]}, {"a": [None, None, 1]}),
    # the rules beside the table
    ({"a": 1}, {}, {"a": 1}),
    ({"a": 1}, {"b": None}, {"a": 1}),
    ({}, {"__ff_null__": 1, "b": "x__ff_null__"}, {"__ff_null__": 1, "b": "x__ff_null__"}),
    ({}, {"a": [{"x": None, "y": "__ff_null__"}]}, {"a": [{"x": None, "y": None}]}),
    ({"a": {"1": 1}}, {"a": {"2": 2}}, {"a": {"1": 1, "2": 2}}),
    ({"a": []}, {"b": {}}, {"a": [], "b": {}}),
    ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}),
    ({"a": [1]}, {"a": {"0": 2}}, {"a": {"0": 2}}),
    ({"a": True}, {"a": False}, {"a": False}),
    ({"": 1}, {"": {"": None}}, {"": {}}),
]


@each(("before", "patch", "after"), MERGES)
async def test_a_delta_is_merged_into_the_document(engine: ff.Engine, before: Any, patch: Any, after: Any) -> None:
    held = await started(engine)
    assert await engine.read_summary(held.execution_id) is None
    if before:
        # The first delta makes the document; what is null in it is written as the sentinel.
        await append(engine, held.handle, before, mode=SUMMARY)
    (stored,) = await append(engine, held.handle, patch, mode=SUMMARY)
    found = await engine.read_summary(held.execution_id)
    assert found is not None
    assert found.document == after
    assert found.version == stored.summary_version == (2 if before else 1)
    assert found.first_applied_at <= found.last_updated_at


def merged(document: Any, patch: Any) -> Any:
    """The same in Python: RFC 7396, then every value that is the sentinel becomes null."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def unmasked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unmasked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [unmasked(one) for one in value]
    return None if value == "__ff_null__" else value


_KEYS = st.sampled_from(["a", "b", "c", "0", "1", "-1", "", "__ff_null__", "ä", "a.b"])
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.sampled_from(["", "x", "__ff_null__", "__ff_null__x", "1"]),
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4), max_leaves=12
)
_PATCHES = st.lists(st.dictionaries(_KEYS, _VALUES, max_size=5), min_size=1, max_size=8)


async def test_the_merge_in_sql_is_that_in_python(sql: asyncpg.Connection[Any]) -> None:
    histories: list[list[Any]] = []

    @settings(
        max_examples=sampling.examples(2000, 150), database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(_PATCHES)
    def collect(patches: list[Any]) -> None:
        histories.append(patches)

    collect()
    found = await sql.fetch(
        "select flowfabric.merge_all('{}', array(select p.value from jsonb_array_elements(h.value) with ordinality"
        " as p (value, o) order by p.o))::text as document"
        " from jsonb_array_elements($1::jsonb) with ordinality as h (value, o) order by h.o",
        json.dumps(histories),
    )
    assert len(found) > 100
    for patches, row in zip(histories, found, strict=True):
        document: Any = {}
        for patch in patches:
            document = unmasked(merged(document, patch))
        assert json.loads(row["document"]) == document, patches


async def test_a_document_of_many_deltas_is_folded_and_its_version_counts_them(engine: ff.Engine) -> None:
    held = await started(engine)
    expected: dict[str, Any] = {}
    for n in range(1, 101):
        patch = {f"k{n % 7}": n, "gone": None if n % 2 else n}
        (stored,) = await append(engine, held.handle, patch, mode=SUMMARY)
        await append(engine, held.handle, b"between")
        expected = merged(expected, patch)
        assert stored.summary_version == n
    found = await engine.read_summary(held.execution_id)
    assert found is not None
    assert (found.document, found.version) == (expected, 100)
    frames = (await engine.read_stream(held.execution_id, 0, count_limit=10_000)).frames
    assert [f.summary_version for f in frames if f.mode == "summary"] == list(range(37, 101))
    assert len([f for f in frames if f.mode == "durable"]) == 100


async def test_deltas_of_one_call_are_merged_in_order(engine: ff.Engine) -> None:
    held = await started(engine)
    found = await append(engine, held.handle, *({"n": n, str(n): n} for n in range(80)), mode=SUMMARY)
    assert [one.summary_version for one in found] == list(range(1, 81))
    summary = await engine.read_summary(held.execution_id)
    assert summary is not None and summary.version == 80
    assert summary.document == {"n": 79, **{str(n): n for n in range(80)}}


async def test_a_document_has_at_most_a_mebibyte(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    held = await started(engine)
    piece = "x" * 60_000
    accepted = 0
    refused: ValidationFailed | None = None
    for n in range(20):
        try:
            await append(engine, held.handle, {f"k{n}": piece}, mode=SUMMARY)
            accepted += 1
        except ValidationFailed as error:
            refused = error
            break
    assert refused is not None and refused.kind == "retention_limit_exceeded"
    assert accepted == 17  # 17 times 60,000 and what is between them
    found = await engine.read_summary(held.execution_id)
    assert found is not None and found.version == 17
    # Replacing a value does not make it larger, although the sum of the deltas is.
    for _ in range(5):
        await append(engine, held.handle, {"k0": piece}, mode=SUMMARY)
    await append(engine, held.handle, {"k1": None}, mode=SUMMARY)
    await append(engine, held.handle, {"k17": piece}, mode=SUMMARY)
    found = await engine.read_summary(held.execution_id)
    assert found is not None and found.version == 24 and "k1" not in found.document


async def test_the_document_is_of_its_attempt_and_outlives_it(engine: ff.Engine, clock: Clock) -> None:
    held = await started(engine, policy=RETRY)
    await append(engine, held.handle, {"a": 1}, mode=SUMMARY)
    await engine.fail(held.handle, "boom")
    await clock.advance(seconds=11)
    await engine.promote_delayed(held.execution_id)
    again = await claim_one(engine)
    assert await engine.read_summary(held.execution_id) is None  # the latest attempt has none
    await append(engine, again.handle, {"b": 1}, mode=SUMMARY)
    first, second = [await engine.read_summary(held.execution_id, n) for n in (0, 1)]
    assert first is not None and second is not None
    assert (first.document, second.document) == ({"a": 1}, {"b": 1})


# ---- best effort: rate and cap

RATES: list[tuple[str, tuple[float, int] | None, int, tuple[int, int, int, float], tuple[float, int]]] = [
    # what, (ema before, ms since), frames, (ttl, floor, ceiling, alpha), (ema, cap)
    ("the first", None, 1, (5000, 64, 16384, 0.2), (6.4, 64)),
    ("10 ms later", (6.4, 10), 1, (5000, 64, 16384, 0.2), (25.12, 252)),
    ("10 ms later again", (25.12, 10), 1, (5000, 64, 16384, 0.2), (40.096, 401)),
    ("10 s later", (40.096, 10_000), 1, (5000, 64, 16384, 0.2), (32.0968, 321)),
    ("in the same millisecond", (6.4, 0), 1, (5000, 64, 16384, 0.2), (205.12, 2052)),
    ("after a step back of the clock", (6.4, -500), 1, (5000, 64, 16384, 0.2), (205.12, 2052)),
    ("at the ceiling", (990.0, 1), 1, (30_000, 64, 16384, 0.2), (992.0, 16384)),
    ("bad parameters", None, 1, (5000, 0, -1, 2.0), (6.4, 64)),
    ("a ceiling below the floor", (6.4, 10), 1, (5000, 64, 10, 0.2), (25.12, 64)),
    ("without a time limit", None, 1, (0, 64, 16384, 0.2), (32000.0, 64)),
    ("three in one call", (6.4, 10), 3, (5000, 64, 16384, 0.2), (376.0768, 3761)),
    ("alpha 1", (6.4, 10), 1, (5000, 64, 16384, 1.0), (100.0, 1000)),
]


@each(("what", "before", "frames", "parameters", "after"), RATES)
async def test_the_rate_and_the_cap(
    sql: asyncpg.Connection[Any], what: str, before: Any, frames: int, parameters: Any, after: tuple[float, int]
) -> None:
    ema, since = before if before is not None else (None, None)
    row = await sql.fetchrow(
        "select r.ema, r.live_cap from flowfabric.live_rate(row(1, 1, null, 0, null, null, 0, 0, 0, 0, 0, null, false,"
        " null, null, 0, 0, $1::float8, $2::bigint, null)::flowfabric.stream_head, $3, 1000000, $4, $5, $6, $7) r",
        ema, None if since is None else 1_000_000 - since, frames, *parameters,
    )  # fmt: skip
    assert row is not None
    assert row["ema"] == pytest.approx(after[0], rel=1e-12)
    assert row["live_cap"] == after[1]


@pytest.mark.parametrize("alpha", [0.2, 0.9, 0.999999, 1.0, 1e-300])
async def test_a_call_of_many_best_effort_frames_has_a_rate_for_every_weight(
    engine: ff.Engine, clock: Clock, alpha: float
) -> None:
    held = await started(engine, lease_ttl=timedelta(days=1))
    mode = BestEffortLive(ttl=timedelta(seconds=5), ema_alpha=alpha)
    for _ in range(2):
        made = await append(engine, held.handle, *[b"x"] * 900, mode=mode)
        assert made[-1].maxlen_applied is not None
        assert 64 <= made[-1].maxlen_applied <= 10_000  # 1,000 frames a second, for twice 5 seconds
        await clock.advance(hours=5)


async def test_best_effort_frames_beyond_the_cap_are_invisible_and_do_not_come_back(engine: ff.Engine) -> None:
    held = await started(engine)
    tight = BestEffortLive(ttl=timedelta(seconds=5), maxlen_floor=3, maxlen_ceiling=3)
    wide = BestEffortLive(ttl=timedelta(seconds=5), maxlen_floor=100, maxlen_ceiling=100)
    for n in range(6):
        (one,) = await append(engine, held.handle, b"%d" % n, mode=tight)
        assert one.maxlen_applied == 3
    assert await payloads(engine, held.handle) == [b"3", b"4", b"5"]
    await append(engine, held.handle, b"6", mode=wide)
    assert await payloads(engine, held.handle) == [b"3", b"4", b"5", b"6"]
    page = await engine.read_stream(held.execution_id, 0)
    assert (page.frame_count, page.maxlen_applied_last) == (7, 100)
    await append(engine, held.handle, b"d")
    page = await engine.read_stream(held.execution_id, 0)
    assert (page.frame_count, page.maxlen_applied_last) == (8, 100)


async def test_a_best_effort_frame_is_invisible_after_twice_its_time(engine: ff.Engine, clock: Clock) -> None:
    held = await started(engine, lease_ttl=HOUR)
    await append(engine, held.handle, b"short", mode=LIVE)
    await append(engine, held.handle, b"long", mode=BestEffortLive(ttl=timedelta(minutes=1)))
    await append(engine, held.handle, b"endless", mode=BestEffortLive(ttl=timedelta(0)))
    await clock.advance(seconds=9)
    assert await payloads(engine, held.handle) == [b"short", b"long", b"endless"]
    await clock.advance(seconds=2)
    assert await payloads(engine, held.handle) == [b"long", b"endless"]
    await clock.advance(seconds=120)
    assert await payloads(engine, held.handle) == [b"endless"]


async def test_a_crash_or_an_emptied_ring_loses_best_effort_frames_only(
    engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    held = await started(engine)
    await append(engine, held.handle, b"1")
    await append(engine, held.handle, b"2", b"3", mode=LIVE)
    await append(engine, held.handle, {"a": 1}, mode=SUMMARY)
    before = await append(engine, held.handle, b"4", mode=LIVE)
    await sql.execute("truncate flowfabric.live_frame")
    assert await payloads(engine, held.handle) == [b"1", b'{"a": 1}']
    after = await append(engine, held.handle, b"5")
    assert position(after[0]) > position(before[0]) or position(after[0]).ms == position(before[0]).ms
    assert after[0].frame_count == 5  # the lost one behind the last durable frame is not counted
    await append(engine, held.handle, b"6", mode=LIVE)
    assert await payloads(engine, held.handle) == [b"1", b'{"a": 1}', b"5", b"6"]


async def test_the_sweep_empties_old_segments_of_the_ring(
    engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    held = await started(engine, lease_ttl=timedelta(days=1))
    await append(engine, held.handle, b"1", mode=BestEffortLive(ttl=timedelta(0)))
    await append(engine, held.handle, b"2")
    await sql.execute("select flowfabric.sweep(100)")
    assert await payloads(engine, held.handle) == [b"1", b"2"]
    await clock.advance(minutes=30)
    await sql.execute("select flowfabric.sweep(100)")
    assert await payloads(engine, held.handle) == [b"2"]
    await append(engine, held.handle, b"3", mode=LIVE)
    assert await payloads(engine, held.handle) == [b"2", b"3"]


async def test_ids_grow_over_a_sweep_though_the_clock_steps_back(
    engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    """The sweep must not take away the highest id of a stream: best-effort frames of the segment that comes next."""
    held = await started(engine, lease_ttl=timedelta(days=1))
    await clock.advance(minutes=15)
    last = (await append(engine, held.handle, *(b"%d" % n for n in range(5)), mode=LIVE))[-1]
    await clock.advance(minutes=-15)
    await sql.execute("select flowfabric.sweep(100)")
    await append(engine, held.handle, b"durable")
    page = await engine.tail_stream(held.execution_id, 0, after=last.stream_id)
    assert [frame.payload for frame in page.frames] == [b"durable"]


# ---- retention


async def test_a_stream_keeps_the_newest_durable_frames(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=20)))
    sent = 0
    for size in (1, 5, 13, 2, 1, 40, 1, 1, 7, 100, 3):
        await append(engine, held.handle, *(b"%d" % n for n in range(sent, sent + size)))
        sent += size
        found = await payloads(engine, held.handle)
        assert found == [b"%d" % n for n in range(max(sent - 20, 0), sent)]
    stored = await sql.fetchval("select sum(size) from flowfabric.frame")
    assert stored <= 20 + 100 + 3  # the last calls are removed with the next ones
    assert (await engine.read_stream(held.execution_id, 0)).frame_count == sent


async def test_deltas_between_durable_frames_do_not_keep_these_from_being_removed(
    engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=10)))
    frames = [NewFrame(payload=b"{}", mode=SUMMARY) if n % 2 else NewFrame(payload=b"d") for n in range(1000)]
    await engine.append_frames([(held.handle, frame) for frame in frames])
    for _ in range(30):
        await append(engine, held.handle, b"d")
    stored = dict(await sql.fetch("select mode, sum(size) from flowfabric.frame group by mode"))  # type: ignore[arg-type]
    assert stored["durable"] <= 10 + 2
    assert stored["summary"] == 64
    summary = await engine.read_summary(held.execution_id, 0)
    assert summary is not None
    assert summary.version == 500


async def test_a_removed_type_is_still_counted_for_a_re_run(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=10)))
    mark = 0
    used: dict[str, int] = {}

    async def emit(kind: str) -> None:
        nonlocal mark
        mark += 1
        used[kind] = used.get(kind, 0) + 1
        await append(engine, held.handle, b"x", frame_type=kind, mark=mark, type_mark=used[kind])

    for kind in ("start", "start", "plan"):
        await emit(kind)
    for _ in range(60):
        await emit("delta")
    assert await engine.count_emitted(held.execution_id, 0) == (
        mark,
        {("durable", kind): n for kind, n in used.items()},
    )
    assert len(await payloads(engine, held.handle)) == 10
    # A type for each frame is no type: these are removed in the end.
    for number in range(200):
        await emit(f"{number}")
    assert await sql.fetchval("select sum(size) from flowfabric.frame") <= 10 + 2 + 100
    assert len(await payloads(engine, held.handle)) == 10


async def test_telemetry_never_displaces_output(engine: ff.Engine) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=10)))
    await append(engine, held.handle, *(b"d%d" % n for n in range(10)))
    for n in range(150):
        await append(engine, held.handle, {"n": n}, mode=SUMMARY)
    await append(engine, held.handle, *([b"live"] * 200), mode=LIVE)
    durable = await payloads(engine, held.handle, visibility="exclude_best_effort")
    assert [one for one in durable if one.startswith(b"d")] == [b"d%d" % n for n in range(10)]
    # and the other way round
    await append(engine, held.handle, *([b"more"] * 100))
    modes = [frame.mode for frame in (await engine.read_stream(held.execution_id, 0, count_limit=10_000)).frames]
    assert modes.count("summary") == 64
    assert modes.count("best_effort") > 64
    assert modes.count("durable") == 10


@pytest.mark.parametrize("maxlen", [0, 1])
async def test_a_stream_that_keeps_nothing_or_one(engine: ff.Engine, maxlen: int) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=maxlen)))
    for n in range(30):
        await append(engine, held.handle, b"%d" % n)
        assert len(await payloads(engine, held.handle)) == maxlen


# ---- closing


async def _complete(world: World, held: Any) -> None:
    await world.engine.complete(held.handle, b"done")


async def _fail(world: World, held: Any) -> None:
    await world.engine.fail(held.handle, "boom", failure_class="permanent")


async def _retry(world: World, held: Any) -> None:
    await world.engine.fail(held.handle, "boom")


async def _cancel(world: World, held: Any) -> None:
    await world.engine.cancel(held.handle, "no")


async def _time_out(world: World, held: Any) -> None:
    await world.clock.advance(seconds=8)
    assert await world.engine.expire_execution(held.execution_id, "attempt_timeout") == "expired"


async def _time_out_and_retry(world: World, held: Any) -> None:
    await world.clock.advance(seconds=8)
    await world.engine.run_timers("attempt")


async def _pass_deadline(world: World, held: Any) -> None:
    await world.clock.advance(seconds=10)
    assert await world.engine.expire_execution(held.execution_id, "execution_deadline") == "expired"


def _suspend(behavior: str) -> Callable[[World, Any], Awaitable[None]]:
    async def end(world: World, held: Any) -> None:
        engine, now = world.engine, await world.clock.now()
        await engine.suspend(
            held.handle,
            waitpoints=[Fresh(mint_uuid(), "k")],
            resume_condition=on("k"),
            timeout_at=now + timedelta(seconds=2),
            timeout_behavior=behavior,  # type: ignore[arg-type]
        )
        page = await engine.read_stream(held.execution_id, 0)
        assert page.closed_at is None  # the same attempt continues later
        await world.clock.advance(seconds=3)
        await engine.expire_suspension(held.execution_id)

    return end


async def _lapse(world: World, held: Any) -> None:
    await world.clock.advance(seconds=31)
    await world.engine.mark_lease_expired_if_due(held.execution_id)


async def _revoke(world: World, held: Any) -> None:
    await world.engine.revoke_lease(held.execution_id)


async def _reclaim(world: World, held: Any) -> None:
    await _lapse(world, held)
    await claim_one(world.engine, **OTHER)


LIMITS = TimeoutPolicy(attempt_timeout=timedelta(seconds=7), execution_deadline=timedelta(seconds=9))
RETRIED = ExecutionPolicy(timeout_policy=LIMITS, retry_policy=RETRY.retry_policy)
ENDS: list[tuple[Callable[[World, Any], Awaitable[None]], str, dict[str, Any]]] = [
    (_complete, "attempt_success", {}),
    (_fail, "attempt_failure", {}),
    (_retry, "attempt_failure", {"policy": RETRY}),
    (_cancel, "attempt_cancelled", {}),
    (_time_out, "expired", {"policy": ExecutionPolicy(timeout_policy=LIMITS)}),
    (_time_out_and_retry, "expired", {"policy": RETRIED}),
    (_pass_deadline, "expired", {"policy": ExecutionPolicy(timeout_policy=LIMITS)}),
    (_suspend("fail"), "suspension_timeout", {}),
    (_suspend("cancel"), "suspension_timeout", {}),
    (_suspend("expire"), "suspension_timeout", {}),
    (_lapse, "lease_expired", {}),
    (_revoke, "lease_revoked", {}),
    (_reclaim, "reclaimed", {}),
]


@each(("end", "reason", "fields"), ENDS)
@pytest.mark.parametrize("emits", [True, False])
async def test_the_end_of_an_attempt_closes_its_stream(
    world: World, end: Any, reason: str, fields: dict[str, Any], emits: bool
) -> None:
    await world.wipe()
    held = await started(world.engine, **fields)
    if emits:
        await append(world.engine, held.handle, b"x")
    assert (await world.engine.read_stream(held.execution_id, 0)).closed_at is None
    begun = await world.clock.now()
    await end(world, held)
    page = await world.engine.read_stream(held.execution_id, 0)
    assert page.closed_reason == reason
    assert page.closed_at is not None and page.closed_at >= begun
    assert len(page.frames) == emits
    with pytest.raises(StateError) as caught:
        await append(world.engine, held.handle, b"late")
    assert caught.value.kind == "stream_closed"
    # Whatever comes later, the time stays, and the reason too unless another worker takes over.
    await world.clock.advance(seconds=60)
    state = await world.engine.read_execution_state(held.execution_id)
    if state is not None and not state.is_terminal:
        await world.engine.cancel(Operator(held.execution_id), "enough")
    await world.engine.replay_execution(held.execution_id)
    await claim_one(world.engine)
    later = await world.engine.read_stream(held.execution_id, 0)
    assert (later.closed_at, later.closed_reason, later.frames) == (page.closed_at, reason, page.frames)


async def test_a_reclaim_changes_the_reason_and_not_the_time(world: World) -> None:
    again = await started(world.engine)
    for lose, reason in ((_lapse, "lease_expired"), (_revoke, "lease_revoked")):
        held = again
        await lose(world, held)
        lost = await world.engine.read_stream(held.execution_id, held.handle.attempt_index)
        await world.clock.advance(seconds=5)
        again = await claim_one(world.engine, **OTHER)
        found = await world.engine.read_stream(held.execution_id, held.handle.attempt_index)
        assert (lost.closed_reason, found.closed_reason) == (reason, "reclaimed")
        assert found.closed_at == lost.closed_at


async def test_a_reason_survives_redaction(world: World) -> None:
    for end, reason, fields in ENDS:
        await world.wipe()
        held = await started(world.engine, **fields)
        await end(world, held)
        state = await world.engine.read_execution_state(held.execution_id)
        if state is None or not state.is_terminal:
            continue
        await world.engine.redact_execution(held.execution_id)
        assert (await world.engine.read_stream(held.execution_id, 0)).closed_reason == reason


# ---- reading


async def test_ranges_are_inclusive_and_a_bare_millisecond_is_all_of_it(engine: ff.Engine, clock: Clock) -> None:
    held = await started(engine)
    first = await append(engine, held.handle, b"0", b"1", b"2")
    await clock.advance(seconds=1)
    second = await append(engine, held.handle, b"3", b"4")
    ids = [one.stream_id for one in first + second]
    ms = [position(one).ms for one in first + second]

    async def read(low: str, high: str, limit: int = 100) -> list[int]:
        page = await engine.read_stream(held.execution_id, 0, low, high, limit)
        return [int(frame.payload) for frame in page.frames]

    assert await read("start", "end") == [0, 1, 2, 3, 4]
    assert await read(ids[1], ids[3]) == [1, 2, 3]
    assert await read(str(ms[0]), str(ms[0])) == [0, 1, 2]
    assert await read("start", str(ms[3])) == [0, 1, 2, 3, 4]
    assert await read(str(ms[3]), "end") == [3, 4]
    assert await read("start", f"{ms[0]}-0") == [0]
    assert await read("end", "end") == []
    assert await read("start", "start") == []
    assert await read(ids[3], ids[1]) == []
    assert await read("start", "end", 2) == [0, 1]
    assert await read(ids[2], "end", 2) == [2, 3]
    assert await read("0", str(2**64 - 1)) == [0, 1, 2, 3, 4]


async def test_a_consumer_that_reads_page_by_page_gets_everything_once(engine: ff.Engine) -> None:
    held = await started(engine)
    sent = []
    for size in (1, 200, 3, 64, 65, 63, 1):
        sent += [b"%d" % n for n in range(len(sent), len(sent) + size)]
        await append(engine, held.handle, *sent[len(sent) - size :], frame_type=str(size))
    await engine.complete(held.handle, None)
    for limit in (1, 7, 64, 100, 397, 1000):
        after, found = "0-0", []
        while True:
            page = await engine.tail_stream(held.execution_id, 0, after, count_limit=limit)
            found += [frame.payload for frame in page.frames]
            assert page.closed_reason == "attempt_success"
            if len(page.frames) < limit:
                break
            after = page.frames[-1].id
        assert found == sent


async def test_the_filter_comes_before_the_count(engine: ff.Engine) -> None:
    held = await started(engine)
    for n in range(10):
        await append(engine, held.handle, *([b"live"] * 20), mode=LIVE)
        await append(engine, held.handle, b"%d" % n)
    page = await engine.read_stream(held.execution_id, 0, count_limit=3, visibility="exclude_best_effort")
    assert [frame.payload for frame in page.frames] == [b"0", b"1", b"2"]
    tail = await engine.tail_stream(held.execution_id, 0, page.frames[-1].id, visibility="exclude_best_effort")
    assert [frame.payload for frame in tail.frames] == [b"%d" % n for n in range(3, 10)]


async def test_large_frames_are_stored_apart_and_read_in_order(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    held = await started(engine)
    sent = [bytes([n]) * 40_000 for n in range(20)]
    await append(engine, held.handle, *sent)
    assert await payloads(engine, held.handle) == sent
    assert await sql.fetchval("select max(size) from flowfabric.frame") <= 3


async def test_an_unknown_execution_or_attempt_is_an_empty_open_stream(engine: ff.Engine) -> None:
    held = await started(engine)
    for execution_id, attempt in ((ff.ExecutionId(new_id()), 0), (held.execution_id, 1)):
        page = await engine.read_stream(execution_id, attempt)
        assert (page.frames, page.closed_at, page.closed_reason) == ((), None, None)
        assert await engine.read_summary(execution_id, attempt) is None


async def test_many_streams_are_read_in_one_call(engine: ff.Engine) -> None:
    held = [await started(engine) for _ in range(5)]
    for n, one in enumerate(held):
        await append(engine, one.handle, *(b"%d" % k for k in range(n)))
    await engine.complete(held[2].handle, None)
    pages = await engine.read_streams([(one.execution_id, None, Position(0, 0)) for one in held])
    assert [[f.payload for f in page.frames] for page in pages] == [[b"%d" % k for k in range(n)] for n in range(5)]
    assert [page.has_ended for page in pages] == [False, False, True, False, False]


async def test_the_last_frames_of_many_executions(engine: ff.Engine) -> None:
    held = [await started(engine) for _ in range(3)]
    for n, one in enumerate(held):
        for k in range(n * 4):
            await append(engine, one.handle, b"%d" % k, b"and", frame_type=str(k % 2))
            await append(engine, one.handle, b"live", mode=LIVE)
    found = await engine.read_last_frames([one.execution_id for one in held], count_limit=3)
    assert {key: [f.payload for f in frames] for key, frames in found.items()} == {
        held[1].execution_id: [b"and", b"3", b"and"],
        held[2].execution_id: [b"and", b"7", b"and"],
    }


# ---- erasing


@pytest.mark.parametrize("erase", ["delete_execution", "redact_execution", "purge"])
async def test_erasing_removes_frames_and_documents(
    engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any], erase: str
) -> None:
    held = await started(engine)
    await append(engine, held.handle, b"1")
    await append(engine, held.handle, b"2", mode=LIVE)
    await append(engine, held.handle, *({"n": n} for n in range(40)), mode=SUMMARY)
    await engine.complete(held.handle, b"done")
    if erase == "purge":
        await clock.advance(days=8)
        await engine.run_timers("retention")
    else:
        await getattr(engine, erase)(held.execution_id)
    for table in ("frame", "live_frame", "summary"):
        assert await sql.fetchval(f"select count(*) from flowfabric.{table}") == 0, table
    page = await engine.read_stream(held.execution_id, 0)
    assert page.frames == ()
    assert (page.closed_reason == "attempt_success") == (erase == "redact_execution")


# ---- the audit

DAMAGES = {
    "frame_orphan": [
        "update flowfabric.frame set id = gen_random_uuid()",
        "update flowfabric.frame set attempt_index = 1",
        "update flowfabric.live_frame set id = gen_random_uuid()",
        "update flowfabric.live_frame set attempt_index = 1",
        "update flowfabric.summary set id = gen_random_uuid()",
        "update flowfabric.summary set attempt_index = 1",
    ],
    "frame_counts": [
        "update flowfabric.frame set size = size + 1 where durable = 3",
        "update flowfabric.frame set payloads = payloads[2:] where durable = 3",
        "update flowfabric.frame set frames = frames - 1 where durable = 4",
        "update flowfabric.frame set durable = durable - 1 where durable = 4",
        "update flowfabric.frame set version = version - 1 where version = 40",
        "update flowfabric.frame set marks = 0 where durable = 4",
        "update flowfabric.frame set n = -1 where durable = 4",
        "update flowfabric.frame set trimmed = 5 where durable = 4",
    ],
    "summary_version": [
        "update flowfabric.summary set version = version - 1",
        "update flowfabric.frame set folded = folded + 1 where folded > 0",
        "delete from flowfabric.frame where version = 41 and mode = 'summary'",
        'update flowfabric.summary set document = \'{"a": ["__ff_null__"]}\'',
        "delete from flowfabric.summary",
    ],
}


async def test_the_audit_finds_damaged_streams(world: World) -> None:
    held, engine = await started(world.engine), world.engine
    await append(engine, held.handle, b"1", b"2", b"3", mark=1)
    await append(engine, held.handle, b"4", mark=2)
    await append(engine, held.handle, *({"n": n} for n in range(39)), mode=SUMMARY)
    await append(engine, held.handle, {"n": 40}, mode=SUMMARY)
    await append(engine, held.handle, {"n": 41}, mode=SUMMARY)
    await append(engine, held.handle, b"5", mode=LIVE)
    for rule, statements in DAMAGES.items():
        for statement in statements:
            await world.sql.execute("begin")
            touched = await world.sql.execute(statement)
            found = {row["rule"] for row in await world.sql.fetch("select rule from flowfabric.audit(null, true)")}
            await world.sql.execute("rollback")
            assert not touched.endswith(" 0"), statement
            assert rule in found, statement
