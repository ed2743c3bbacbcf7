"""Resume conditions in the database: when they hold, which signals made them hold, and what each signal did.

Compared with the plain Python of `tests/conditions.py` over random trees and signals, first the functions alone, then
through `suspend` and `deliver_signal`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.values.conditions import (
    Condition,
    OperatorOnly,
    TimeoutOnly,
    all_of,
    any_of,
    condition_from_json,
    condition_to_json,
    count_signals,
    from_sources,
    named_keys,
    on,
)
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import AlreadySatisfied, Fresh, Suspended, UsePending
from tests import conditions as twin
from tests import sampling
from tests.conditions import KEYS, SIGNALS, Sent, trees
from tests.support import claim_one, new_id, started

RANDOM = settings(
    max_examples=sampling.examples(150, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
THROUGH_THE_ENGINE = settings(RANDOM, max_examples=sampling.examples(40))


async def evaluated(
    sql: asyncpg.Connection[Any], condition: Any, signals: Sequence[Sent]
) -> tuple[list[tuple[bool, list[int]]], int | None, list[str]]:
    """What the database says: for every prefix whether it holds and who advanced it, the closer, the match details."""
    columns = [list(column) for column in zip(*signals, strict=True)] if signals else [[], [], [], [], []]
    prefixes = await sql.fetch(
        "select f.closer is not null as holds, array(select p from unnest(f.details) with ordinality as d (detail, p)"
        " where d.detail = 'advanced' order by p) as places, f.closer, f.details"
        " from generate_series(0, cardinality($2::text[])) n, lateral flowfabric.satisfiers($1::jsonb, row(null,"
        " ($2::text[])[:n], ($3::text[])[:n], ($4::uuid[])[:n], ($5::text[])[:n], ($6::text[])[:n], null)"
        "::flowfabric.recorded) f order by n",
        json.dumps(condition), *columns,
    )  # fmt: skip
    details = [row["details"][-1] for row in prefixes[1:]]
    return [(row["holds"], row["places"]) for row in prefixes], prefixes[-1]["closer"], details


@RANDOM
@given(condition=trees(), signals=SIGNALS)
async def test_the_database_evaluates_any_condition_as_the_contract_words_it(
    sql: asyncpg.Connection[Any], condition: Any, signals: list[Sent]
) -> None:
    prefixes, closer, details = await evaluated(sql, condition, signals)
    for n, (holds, places) in enumerate(prefixes):
        assert holds == twin.holds(condition, signals[:n])
        assert places == sorted(twin.places(condition, signals[: min(n, twin.closer(condition, signals[:n]) or n)]))
    assert closer == twin.closer(condition, signals)
    if closer is not None:
        event("holds")
        assert closer in prefixes[closer][1]
    expected = [twin.match_detail(condition, signals[:n], sent) for n, sent in enumerate(signals)]
    assert details[:closer] == expected[:closer]
    if closer is not None:  # it was satisfied by then
        assert details[closer:] == [detail.replace("advanced", "duplicate_satisfier") for detail in expected[closer:]]


@RANDOM
@given(condition=trees(), signals=SIGNALS)
async def test_one_more_signal_never_takes_anything_back(
    sql: asyncpg.Connection[Any], condition: Any, signals: list[Sent]
) -> None:
    prefixes, _, _ = await evaluated(sql, condition, signals)
    for (held, before), (holds, after) in itertools.pairwise(prefixes):
        assert holds >= held
        assert after[: len(before)] == before


@RANDOM
@given(condition=trees())
async def test_the_required_names_are_those_of_the_tree(sql: asyncpg.Connection[Any], condition: Any) -> None:
    for key in (*KEYS, "unknown"):
        found = await sql.fetchval("select flowfabric.required_names($1::jsonb, $2)", json.dumps(condition), key)
        assert found == twin.required_names(condition, key)


@pytest.mark.parametrize(
    ("condition", "key", "names"),
    [
        (on("k", "x"), "k", ["x"]),
        (on("k", "x"), "other", []),
        (on("k"), "k", []),
        (any_of("k", "l", name="x"), "l", ["x"]),
        (any_of("k", "l"), "k", []),
        (OperatorOnly(), "k", ["__operator_only__"]),
        (TimeoutOnly(), "k", ["__timeout_only__"]),
        (
            all_of(
                on("k", "y"),
                all_of(on("k", "x"), on("l", "z")),
                OperatorOnly(),
                on("k", "y"),
                from_sources(2, "k", name="w"),
            ),
            "k",
            ["y", "x", "__operator_only__", "w"],
        ),
    ],
    ids=str,
)
async def test_required_names_come_depth_first_and_each_once(
    sql: asyncpg.Connection[Any], condition: Condition, key: str, names: list[str]
) -> None:
    form = json.dumps(condition_to_json(condition))
    assert await sql.fetchval("select flowfabric.required_names($1::jsonb, $2)", form, key) == names


# What was stored and is not understood.

SINGLE = {"Single": {"waitpoint_key": "a", "matcher": "Wildcard"}}
COUNT = {"kind": "Count", "n": 1, "count_kind": "DistinctSignals", "waitpoints": ["a"]}
UNKNOWN: list[Any] = [
    None, 5, True, "", "AnyOf", "Single", "Nonsense", "unknown", [], [SINGLE], ["Single"], {}, {"Future": {"key": "a"}},
    {"Single": None}, {"Single": {}}, {"Single": []}, {"Single": "a"}, {"Single": {"waitpoint_key": "a"}},
    {"Single": {"waitpoint_key": "a", "matcher": None}}, {"Single": {"waitpoint_key": "a", "matcher": "Any"}},
    {"Single": {"waitpoint_key": "a", "matcher": {}}}, {"Single": {"waitpoint_key": "a", "matcher": {"ByPrefix": "x"}}},
    {"Single": {"waitpoint_key": "5", "matcher": {"ByName": 5}}}, {"Single": {"waitpoint_key": "a", "matcher": ["x"]}},
    {"Single": {"waitpoint_key": ["a"], "matcher": "Wildcard"}}, {"Composite": None}, {"Composite": "Count"},
    {"Composite": {"kind": "AnyOf", "members": [SINGLE]}}, {"Composite": {"kind": "AllOf"}},
    {"Composite": {"kind": "AllOf", "members": []}}, {"Composite": {"kind": "AllOf", "members": SINGLE}},
    {"Composite": {"kind": "AllOf", "members": "x"}}, {"Composite": {"kind": "AllOf", "members": None}},
    {"Composite": {"members": [SINGLE]}}, {"Composite": {**COUNT, "kind": "count"}}, {"Composite": {"kind": "Count"}},
    *({"Composite": {**COUNT, "count_kind": kind}} for kind in ("Distinct", "DistinctNames", None, 1)),
    *({"Composite": {**COUNT, "n": n}} for n in (None, "1", "x", True, 0, -1, 0.5, 2**31, 1e300)),
    *({"Composite": {**COUNT, "waitpoints": keys}} for keys in (None, "a", {"a": 1}, 5)),
    *({"Composite": {**COUNT, "matcher": matcher}} for matcher in ("Any", {}, {"ByPrefix": "x"}, {"ByName": 5}, 5, [])),
]  # fmt: skip
PLENTY = [
    Sent(key, name, new_id(), source, identity)
    for key in ("a", "5", "")
    for name in ("x", "5", "", "null")
    for source, identity in (("t", "alice"), ("t", "bob"))
]


def _all_of(*members: Any) -> Any:
    return {"Composite": {"kind": "AllOf", "members": list(members)}}


@pytest.mark.parametrize(
    "around",
    [
        lambda node: node,
        lambda node: _all_of(node, SINGLE),
        lambda node: _all_of(SINGLE, node),
        lambda node: _all_of(_all_of(node)),
    ],
    ids=["alone", "before", "after", "inside"],
)
async def test_an_unknown_stored_condition_never_holds_and_warns(sql: asyncpg.Connection[Any], around: Any) -> None:
    told: list[str] = []
    sql.add_log_listener(lambda _, message: told.append(str(message.message)))
    for node in UNKNOWN:
        told.clear()
        prefixes, closer, details = await evaluated(sql, around(node), PLENTY)
        assert not any(holds for holds, _ in prefixes) and closer is None, node
        assert "a stored resume condition is not understood and never holds" in told, node
        known = twin.places(around("OperatorOnly"), PLENTY)
        assert {place for _, found in prefixes for place in found} == known, node
        assert details.count("advanced") == len(known), node


async def test_a_known_condition_does_not_warn(sql: asyncpg.Connection[Any]) -> None:
    told: list[str] = []
    sql.add_log_listener(lambda _, message: told.append(str(message.message)))
    known = all_of("a", on("a", "x"), OperatorOnly(), TimeoutOnly(), any_of("a"), from_sources(2, "a", name="x"))
    await evaluated(sql, condition_to_json(known), PLENTY)
    assert told == []


async def test_a_stored_condition_that_is_not_known_resumes_nothing_and_signals_are_still_taken(
    engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claimed = await started(engine)
    suspended = await suspend(engine, claimed.handle, on("a"), ["a"])
    await sql.execute("update flowfabric.suspension set resume_condition = $1", json.dumps({"Future": ["a"]}))
    answer = await deliver(engine, claimed.execution_id, suspended, PLENTY[0])
    assert isinstance(answer, Accepted)
    assert (answer.effect, answer.match_detail) == ("appended_to_waitpoint", "not_in_condition")
    assert await engine.read_execution_state(claimed.execution_id) is ff.State.SUSPENDED
    await engine.resume_execution(claimed.execution_id, "operator")


# Through the engine.


async def suspend(engine: ff.Engine, handle: Handle, condition: Condition, keys: Sequence[str]) -> Suspended:
    answer = await engine.suspend(
        handle,
        waitpoints=[Fresh(new_id(), key) for key in keys],
        resume_condition=condition,
        timeout_at=await soon(engine),
    )
    assert isinstance(answer, Suspended)
    return answer


async def soon(engine: ff.Engine) -> datetime:
    return datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC) + timedelta(hours=1)


def places_of(suspended: Suspended) -> dict[str, tuple[UUID, Any]]:
    details = suspended.details
    return {
        details.waitpoint_key: (details.waitpoint_id, details.waitpoint_token),
        **{bound.waitpoint_key: (bound.waitpoint_id, bound.waitpoint_token) for bound in details.additional_waitpoints},
    }


async def deliver(
    engine: ff.Engine, execution_id: ff.ExecutionId, suspended: Suspended, sent: Sent
) -> Accepted | DuplicateSignal:
    waitpoint_id, token = places_of(suspended)[sent.key]
    return await engine.deliver_signal(
        execution_id,
        waitpoint_id,
        token,
        signal_id=sent.signal_id,
        signal_name=sent.name,
        source_type=sent.source_type,
        source_identity=sent.source_identity,
    )


def sent(key: str, name: str = "x", by: str = "alice", number: int | None = None, of: str = "person") -> Sent:
    return Sent(key, name, new_id() if number is None else UUID(int=number), of, by)


APPENDED, RESUMED, DUPLICATE = "appended_to_waitpoint", "resume_condition_satisfied", "duplicate"
CASES: dict[str, tuple[Condition, list[tuple[Sent, str, str]]]] = {
    "one signal serves two members": (
        all_of(on("k"), on("k", "a")),
        [(sent("k", "a"), RESUMED, "advanced")],
    ),
    "the same source twice is one source": (
        from_sources(2, "k"),
        [
            (sent("k"), APPENDED, "advanced"),
            (sent("k"), APPENDED, "duplicate_satisfier"),
            (sent("k", by="bob"), RESUMED, "advanced"),
        ],
    ),
    "two nameless senders of one type are one source": (
        from_sources(2, "k"),
        [
            (sent("k", by=""), APPENDED, "advanced"),
            (sent("k", by=""), APPENDED, "duplicate_satisfier"),
            (sent("k", by="", of="machine"), RESUMED, "advanced"),
        ],
    ),
    "a source is a pair, not its joined text": (
        from_sources(2, "k"),
        [(sent("k", by="b", of="t:a"), APPENDED, "advanced"), (sent("k", by="a:b", of="t"), RESUMED, "advanced")],
    ),
    "the same signal twice is one": (
        count_signals(2, "k"),
        [
            (sent("k", number=1), APPENDED, "advanced"),
            (sent("k", number=1), DUPLICATE, ""),
            (sent("k", number=2), RESUMED, "advanced"),
        ],
    ),
    "two signals on one waitpoint are one waitpoint": (
        any_of("a", "b", n=2),
        [
            (sent("a"), APPENDED, "advanced"),
            (sent("a", by="bob"), APPENDED, "duplicate_satisfier"),
            (sent("b"), RESUMED, "advanced"),
        ],
    ),
    "another name is recorded and does not count": (
        count_signals(1, "k", name="x"),
        [(sent("k", "y"), APPENDED, "matcher_failed"), (sent("k", "x"), RESUMED, "advanced")],
    ),
    "names are compared byte for byte": (
        on("k", "x"),
        [
            (sent("k", "X"), APPENDED, "matcher_failed"),
            (sent("k", "x "), APPENDED, "matcher_failed"),
            (sent("k", "x"), RESUMED, "advanced"),
        ],
    ),
    "two counts never share what they counted": (
        all_of(from_sources(1, "a"), from_sources(1, "b")),
        [
            (sent("a"), APPENDED, "advanced"),
            (sent("a", by="bob"), APPENDED, "advanced"),
            (sent("b"), RESUMED, "advanced"),
        ],
    ),
    "no signal satisfies what only an operator ends": (
        OperatorOnly(),
        [
            (sent("k", "OperatorOnly"), APPENDED, "not_in_condition"),
            (sent("k", "operator_only"), APPENDED, "not_in_condition"),
        ],
    ),
    "no signal satisfies what only its time ends": (
        TimeoutOnly(),
        [
            (sent("k", "timeout"), APPENDED, "not_in_condition"),
            (sent("k", "TimeoutOnly"), APPENDED, "not_in_condition"),
        ],
    ),
    "an operator's part is never satisfied by signals": (
        all_of("k", OperatorOnly()),
        [(sent("k"), APPENDED, "advanced"), (sent("k"), APPENDED, "duplicate_satisfier")],
    ),
    "any of several": (any_of("a", "b", "c"), [(sent("b"), RESUMED, "advanced")]),
    "all of several": (
        all_of("a", "b", "c"),
        [
            (sent("c"), APPENDED, "advanced"),
            (sent("c"), APPENDED, "duplicate_satisfier"),
            (sent("a"), APPENDED, "advanced"),
            (sent("b"), RESUMED, "advanced"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_condition_holds_when_the_contract_says_so(engine: ff.Engine, case: str) -> None:
    condition, steps = CASES[case]
    claimed = await started(engine)
    suspended = await suspend(engine, claimed.handle, condition, named_keys(condition) or ["k"])
    for signal, effect, detail in steps:
        answer = await deliver(engine, claimed.execution_id, suspended, signal)
        if effect == DUPLICATE:
            assert answer == DuplicateSignal(signal.signal_id)
        else:
            assert answer == Accepted(signal.signal_id, effect, detail)
    resumed = steps[-1][1] == RESUMED
    state = await engine.read_execution_state(claimed.execution_id)
    assert state is (ff.State.RESUMABLE if resumed else ff.State.SUSPENDED)
    heard = [step[0] for step in steps if step[2] == "advanced"] if resumed else []
    assert [one.signal_id for one in await engine.observe_signals(suspended.handle)] == [one.signal_id for one in heard]


@THROUGH_THE_ENGINE
@given(condition=trees(), signals=SIGNALS)
async def test_signals_do_through_the_engine_what_the_contract_says(
    plain_engine: ff.Engine, condition: Any, signals: list[Sent]
) -> None:
    claimed = await started(plain_engine)
    parsed = condition_from_json(condition)
    keys = named_keys(parsed)
    if not keys and not isinstance(parsed, OperatorOnly | TimeoutOnly):
        parsed, condition, keys = OperatorOnly(), "OperatorOnly", []  # nothing could be bound to it
    suspended = await suspend(plain_engine, claimed.handle, parsed, keys or ["a"])
    listed = await plain_engine.list_pending_waitpoints(claimed.execution_id)
    for item in listed.items:
        assert list(item.required_signal_names) == twin.required_names(condition, item.waitpoint_key)

    accepted: list[Sent] = []
    bound = places_of(suspended)
    for signal in signals:
        if signal.key not in bound or twin.holds(condition, accepted):
            continue
        answer = await deliver(plain_engine, claimed.execution_id, suspended, signal)
        if signal.signal_id in [one.signal_id for one in accepted]:
            assert answer == DuplicateSignal(signal.signal_id)
            continue
        detail = twin.match_detail(condition, accepted, signal)
        accepted.append(signal)
        effect = RESUMED if twin.holds(condition, accepted) else APPENDED
        assert answer == Accepted(signal.signal_id, effect, detail)
    heard = await plain_engine.observe_signals(suspended.handle)
    if twin.holds(condition, accepted):
        event("resumed")
        assert [one.signal_id for one in heard] == [
            accepted[place - 1].signal_id for place in sorted(twin.places(condition, accepted))
        ]
        assert (await claim_one(plain_engine)).execution_id == claimed.execution_id
    else:
        assert heard == []
    await plain_engine.cancel(Operator(claimed.execution_id), "over")


ONE_KEY = trees(KEYS[:1]).filter(lambda tree: {*named_keys(condition_from_json(tree))} == {"a"})


@THROUGH_THE_ENGINE
@given(condition=ONE_KEY, signals=SIGNALS, early=st.integers(0, 4))
async def test_signals_count_whether_they_came_before_the_suspension_or_after(
    plain_engine: ff.Engine, condition: Any, signals: list[Sent], early: int
) -> None:
    claimed = await started(plain_engine)
    pending = await plain_engine.create_waitpoint(claimed.handle, "a", timedelta(hours=1))

    async def delivered(signal: Sent) -> Accepted | DuplicateSignal:
        return await plain_engine.deliver_signal(
            claimed.execution_id,
            pending.waitpoint_id,
            pending.token,
            signal_id=signal.signal_id,
            signal_name=signal.name,
            source_type=signal.source_type,
            source_identity=signal.source_identity,
        )

    different = list({one.signal_id: one._replace(key="a") for one in reversed(signals)}.values())
    before, after = different[:early], different[early:]
    for signal in before:
        assert await delivered(signal) == Accepted(signal.signal_id, "buffered_for_pending_waitpoint", "not_evaluated")
    answer = await plain_engine.suspend(
        claimed.handle,
        waitpoints=[UsePending(pending.waitpoint_id)],
        resume_condition=condition,
        timeout_at=await soon(plain_engine),
    )
    closer = twin.closer(condition, different)
    assert isinstance(answer, AlreadySatisfied) == (closer is not None and closer <= early)
    recorded = (await plain_engine.read_signals(claimed.execution_id)).items
    for place, one in enumerate(recorded, 1):
        assert one.observed_effect == (RESUMED if place == closer else APPENDED)
        if closer is None or place <= closer:
            assert one.match_detail == twin.match_detail(condition, before[: place - 1], before[place - 1])
    if isinstance(answer, Suspended):
        for place, signal in enumerate(after, early + 1):
            if closer is None or place <= closer:
                detail = twin.match_detail(condition, different[: place - 1], signal)
                expected = Accepted(signal.signal_id, RESUMED if place == closer else APPENDED, detail)
                assert await delivered(signal) == expected
    suspension = await plain_engine.read_suspension(claimed.execution_id)
    assert suspension is not None
    if closer is None:
        assert suspension.closed_at is None
    else:
        event("early" if closer <= early else "late")
        satisfiers = [different[place - 1].signal_id for place in sorted(twin.places(condition, different[:closer]))]
        assert (suspension.close_reason, suspension.closer_signal_id) == ("resumed", different[closer - 1].signal_id)
        assert list(suspension.satisfier_signal_ids) == satisfiers
        assert [one.signal_id for one in await plain_engine.observe_signals(claimed.handle)] == satisfiers
    await plain_engine.cancel(Operator(claimed.execution_id), "over")
