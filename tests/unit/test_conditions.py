"""Resume conditions as values: how they are built, their JSON, and the rules for their shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given

import flowfabric as ff
from flowfabric.values.conditions import (
    AllMet,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
    all_of,
    any_of,
    check_condition,
    condition_from_json,
    condition_to_json,
    count_signals,
    from_sources,
    named_keys,
    on,
)
from tests.conditions import trees

SIGNALS = CountKind.DISTINCT_SIGNALS
SOURCES = CountKind.DISTINCT_SOURCES
WAITPOINTS = CountKind.DISTINCT_WAITPOINTS


def composite(kind: str, **fields: Any) -> dict[str, Any]:
    return {"Composite": {"kind": kind, **fields}}


# Builders


@pytest.mark.parametrize(
    ("built", "meant"),
    [
        (on("k"), Single("k", Wildcard())),
        (on("k", "x"), Single("k", ByName("x"))),
        (Single("k"), Single("k", Wildcard())),
        (all_of("a", on("b", "x"), OperatorOnly()), AllMet((on("a"), on("b", "x"), OperatorOnly()))),
        (any_of("a", "b"), Count(1, WAITPOINTS, ("a", "b"))),
        (any_of("a", "b", n=2, name="x"), Count(2, WAITPOINTS, ("a", "b"), ByName("x"))),
        (from_sources(2, "a"), Count(2, SOURCES, ("a",))),
        (from_sources(2, "a", name="x"), Count(2, SOURCES, ("a",), ByName("x"))),
        (count_signals(3, "a", "b"), Count(3, SIGNALS, ("a", "b"))),
        (count_signals(3, "a", name="x"), Count(3, SIGNALS, ("a",), ByName("x"))),
        (all_of("a", "b"), AllMet((Single("a", Wildcard()), Single("b", Wildcard())))),
    ],
    ids=str,
)
def test_a_builder_makes_the_condition_it_stands_for(built: Condition, meant: Condition) -> None:
    assert built == meant
    assert check_condition(built, has_deadline=True) is built


@pytest.mark.parametrize(
    ("condition", "keys"),
    [
        (OperatorOnly(), []),
        (on("k"), ["k"]),
        (any_of("b", "a"), ["b", "a"]),
        (all_of("c", any_of("b", "c"), all_of("a", TimeoutOnly()), "b"), ["c", "b", "a"]),
    ],
    ids=str,
)
def test_the_named_keys_come_depth_first_and_each_once(condition: Condition, keys: list[str]) -> None:
    assert named_keys(condition) == keys


# JSON

FORMS: list[tuple[Condition, Any]] = [
    (on("k", "x"), {"Single": {"waitpoint_key": "k", "matcher": {"ByName": "x"}}}),
    (on("k"), {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}),
    (OperatorOnly(), "OperatorOnly"),
    (TimeoutOnly(), "TimeoutOnly"),
    (
        all_of("k", OperatorOnly()),
        composite("AllOf", members=[{"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}, "OperatorOnly"]),
    ),
    (
        from_sources(2, "k", name="x"),
        composite("Count", n=2, count_kind="DistinctSources", matcher={"ByName": "x"}, waitpoints=["k"]),
    ),
    (count_signals(1, "k"), composite("Count", n=1, count_kind="DistinctSignals", waitpoints=["k"])),
    (
        Count(1, WAITPOINTS, ("k",), Wildcard()),
        composite("Count", n=1, count_kind="DistinctWaitpoints", matcher="Wildcard", waitpoints=["k"]),
    ),
]


@pytest.mark.parametrize(("condition", "form"), FORMS, ids=lambda value: str(value)[:60])
def test_a_condition_has_the_json_of_the_contract_both_ways(condition: Condition, form: Any) -> None:
    assert condition_to_json(condition) == form
    assert condition_from_json(form) == condition
    assert check_condition(form, has_deadline=True) == condition
    assert condition_from_json(json.loads(json.dumps(form))) == condition


def test_a_count_without_a_matcher_has_none_in_its_json() -> None:
    assert "matcher" not in condition_to_json(any_of("k"))["Composite"]


@given(trees())
def test_any_condition_comes_back_from_its_json(form: Any) -> None:
    condition = condition_from_json(form)
    assert condition_to_json(condition) == form
    assert condition_from_json(msgspec.json.decode(msgspec.json.encode(condition_to_json(condition)))) == condition
    assert check_condition(form, has_deadline=True) == condition


SINGLE = {"waitpoint_key": "k", "matcher": "Wildcard"}
COUNT = {"n": 1, "count_kind": "DistinctSignals", "waitpoints": ["k"]}


@pytest.mark.parametrize(
    "form",
    [
        None, 5, True, [], {}, "", "Single", "operatoronly", "AnyOf", {"AnyOf": ["k"]}, {"single": SINGLE},
        {"Single": None}, {"Single": {}}, {"Single": "k"}, {"Single": {"waitpoint_key": "k"}},
        {"Single": {"matcher": "Wildcard"}}, {"Single": {**SINGLE, "waitpoint_key": 5}},
        {"Single": {**SINGLE, "extra": 1}}, {"Single": SINGLE, "Composite": {}}, {"OperatorOnly": {}},
        {"Single": {**SINGLE, "matcher": None}}, {"Single": {**SINGLE, "matcher": "wildcard"}},
        {"Single": {**SINGLE, "matcher": "x"}}, {"Single": {**SINGLE, "matcher": {"ByPrefix": "x"}}},
        {"Single": {**SINGLE, "matcher": {"ByName": 5}}}, {"Single": {**SINGLE, "matcher": {}}},
        {"Single": {**SINGLE, "matcher": {"ByName": "x", "extra": 1}}},
        {"Composite": {}}, {"Composite": []}, composite("AnyOf", members=["OperatorOnly"]),
        composite("allof", members=[]),
        composite("AllOf"), composite("AllOf", members=None), composite("AllOf", members="OperatorOnly"),
        composite("AllOf", members={}), composite("AllOf", members=["Nonsense"]), composite("AllOf", members=[None]),
        composite("AllOf", members=["OperatorOnly"], n=1), {"Composite": {"members": ["OperatorOnly"]}},
        composite("Count"), composite("Count", **{**COUNT, "n": "1"}), composite("Count", **{**COUNT, "n": True}),
        composite("Count", **{**COUNT, "n": 1.0}), composite("Count", **{**COUNT, "n": None}),
        composite("Count", **{**COUNT, "count_kind": "Distinct"}), composite("Count", **{**COUNT, "count_kind": None}),
        composite("Count", **{**COUNT, "count_kind": "distinctsignals"}),
        composite("Count", **{**COUNT, "waitpoints": "k"}),
        composite("Count", **{**COUNT, "waitpoints": [5]}), composite("Count", **{**COUNT, "waitpoints": None}),
        composite("Count", **COUNT, extra=1), composite("Count", **COUNT, matcher={"Regex": "x"}),
    ],
    ids=lambda form: json.dumps(form)[:70],
)  # fmt: skip
def test_an_unknown_variant_kind_or_matcher_is_refused(form: Any) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        condition_from_json(form)
    assert refused.value.field == "resume_condition"
    with pytest.raises(ff.InvalidInput):
        check_condition(form, has_deadline=True)
    with pytest.raises(ff.InvalidInput):
        check_condition(composite("AllOf", members=["OperatorOnly", form]), has_deadline=True)


@pytest.mark.parametrize("what", ["condition", "matcher", "rubbish"])
def test_json_nested_without_end_is_refused_as_any_other(what: str) -> None:
    form: Any = "OperatorOnly"
    for _ in range(20_000):
        form = composite("AllOf", members=[form]) if what == "condition" else {"more": form}
    if what == "matcher":
        form = {"Single": {"waitpoint_key": "k", "matcher": form}}
    with pytest.raises(ff.InvalidInput) as refused:
        check_condition(form, has_deadline=True)
    assert len(str(refused.value)) < 1000
    if what == "condition":
        assert refused.value.problem == "depth 5 exceeds cap 4 at members[0].members[0].members[0].members[0]"


@pytest.mark.parametrize("value", [5, None, ["OperatorOnly"], {5}, OperatorOnly, ByName("x"), (on("k"),)], ids=str)
def test_an_invalid_condition_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(ff.InvalidInput, match="resume_condition"):
        check_condition(value, has_deadline=True)


# Shape


def nested(depth: int, inner: Condition) -> Condition:
    for _ in range(depth):
        inner = AllMet((inner,))
    return inner


def count(
    n: int = 1,
    kind: CountKind = SIGNALS,
    keys: tuple[str, ...] = ("k",),
    matcher: ByName | Wildcard | None = None,
) -> Count:
    return Count(n, kind, keys, matcher)


RULES: list[tuple[str, Condition]] = [
    ("allof_empty_members", AllMet(())),
    ("count_n_zero", count(0)),
    ("count_waitpoints_empty", count(keys=())),
    ("count_duplicate_waitpoints", count(keys=("a", "b", "a"))),
    ("count_exceeds_waitpoint_set", count(3, WAITPOINTS, ("a", "b"))),
    ("empty signal name", on("k", "")),
    ("empty signal name", count(matcher=ByName(""))),
    ("reserved_signal_name", on("k", "__timeout_only__")),
    ("reserved_signal_name", count(matcher=ByName("__"))),
    ("waitpoint_key_empty", on("")),
    ("waitpoint_key_empty", count(keys=("a", ""))),
    ("timeout_only_without_deadline", TimeoutOnly()),
]


@pytest.mark.parametrize(
    ("around", "path"),
    [
        (lambda node: node, "<root>"),
        (lambda node: all_of(node), "members[0]"),
        (lambda node: all_of("a", "b", node), "members[2]"),
        (lambda node: all_of(all_of("a", count(), node), "b"), "members[0].members[2]"),
        (lambda node: all_of("a", all_of(all_of("a", node))), "members[1].members[0].members[1]"),
    ],
    ids=["root", "first", "third", "inner", "deep"],
)
@pytest.mark.parametrize(("code", "node"), RULES, ids=[code for code, _ in RULES])
def test_every_rule_is_reported_with_its_code_and_node(code: str, node: Condition, around: Any, path: str) -> None:
    for value in (around(node), condition_to_json(around(node))):
        with pytest.raises(ff.InvalidInput) as refused:
            check_condition(value, has_deadline=False, field="where")
        assert (refused.value.problem, refused.value.field) == (f"{code} at {path}", "where")
        assert refused.value.kind == "invalid_input"


FOUR_DOWN = "members[0].members[0].members[0].members[0]"


@pytest.mark.parametrize("inner", [AllMet((on("k"),)), AllMet(()), count(), count(0)], ids=str)
def test_composites_nest_four_deep_and_no_deeper(inner: Condition) -> None:
    assert check_condition(nested(4, on("k")), has_deadline=False)
    assert check_condition(nested(3, count()), has_deadline=False)
    for value in (nested(4, inner), condition_to_json(nested(4, inner))):
        with pytest.raises(ff.InvalidInput) as refused:
            check_condition(value, has_deadline=False)
        assert refused.value.problem == f"depth 5 exceeds cap 4 at {FOUR_DOWN}"
    with pytest.raises(ff.InvalidInput, match="depth 5 exceeds cap 4 at members"):
        check_condition(nested(5000, on("k")), has_deadline=False)


@pytest.mark.parametrize(
    ("code", "condition"),
    [
        ("count_n_zero", count(0, WAITPOINTS, ())),
        ("count_n_zero", count(-1, WAITPOINTS, ("a", "a"), ByName(""))),
        ("count_waitpoints_empty", count(1, WAITPOINTS, (), ByName(""))),
        ("count_duplicate_waitpoints", count(3, WAITPOINTS, ("", ""), ByName(""))),
        ("count_exceeds_waitpoint_set", count(2, WAITPOINTS, ("",), ByName(""))),
        ("empty signal name", count(1, WAITPOINTS, ("",), ByName(""))),
        ("reserved_signal_name", count(1, WAITPOINTS, ("",), ByName("__x"))),
        ("waitpoint_key_empty", count(1, WAITPOINTS, ("",))),
        ("empty signal name", on("", "")),
        ("reserved_signal_name", on("", "__x")),
        ("waitpoint_key_empty", on("", "x")),
    ],
    ids=str,
)
def test_of_several_faults_of_a_node_the_first_of_the_table_is_reported(code: str, condition: Condition) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        check_condition(condition, has_deadline=False)
    assert refused.value.problem == f"{code} at <root>"


def test_of_several_faults_the_first_node_is_reported() -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        check_condition(all_of("a", on("b", ""), count(0), AllMet(())), has_deadline=False)
    assert refused.value.problem == "empty signal name at members[1]"


@pytest.mark.parametrize(
    "condition",
    [
        count(5, SIGNALS, ("a",)),
        count(5, SOURCES, ("a",)),
        count(2**31 - 1),
        count(2, WAITPOINTS, ("a", "b")),
        on(" "),
        on("k", " "),
        on("k", "_"),
        on("k", "x__"),
        on("k" * 256, "é" * 128),
        all_of("k", on("k", "x"), any_of("k")),
        OperatorOnly(),
        all_of(OperatorOnly(), "k"),
        AllMet(tuple(on(str(n)) for n in range(255))),
        Count(1, WAITPOINTS, tuple(str(n) for n in range(256))),
    ],
    ids=lambda condition: str(condition)[:60],
)
def test_a_valid_condition_is_accepted(condition: Condition) -> None:
    assert check_condition(condition, has_deadline=False) == condition


@pytest.mark.parametrize("condition", [TimeoutOnly(), all_of("k", TimeoutOnly())], ids=str)
def test_a_condition_that_waits_only_for_time_needs_a_timeout(condition: Condition) -> None:
    assert check_condition(condition, has_deadline=True) == condition
    with pytest.raises(ff.InvalidInput, match="timeout_only_without_deadline"):
        check_condition(condition, has_deadline=False)


@pytest.mark.parametrize(
    "condition",
    [
        AllMet(tuple(on("k") for _ in range(256))),
        AllMet(tuple(AllMet((on("k"),)) for _ in range(128))),
        AllMet((on("k"),) * 1_000_000),
        Count(1, SIGNALS, tuple(str(n) for n in range(257))),
        all_of(*(Count(1, SIGNALS, tuple(f"{m}.{n}" for n in range(100))) for m in range(3))),
    ],
    ids=["257 nodes", "257 nodes in two levels", "a million nodes", "257 keys of one node", "300 keys of three"],
)
def test_a_condition_has_at_most_256_nodes_and_keys(condition: Condition) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        check_condition(condition, has_deadline=False)
    assert refused.value.problem == "condition_too_large at <root>"


def test_a_key_that_is_named_often_counts_once() -> None:
    keys = tuple(str(n) for n in range(200))
    assert check_condition(all_of(Count(1, SIGNALS, keys), Count(1, SOURCES, keys)), has_deadline=False)


BAD_TEXTS: list[Any] = ["\0", "\ud800", "x" * 257, "é" * 129, 5, None, b"k", ["k"]]


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: repr(text)[:20])
def test_keys_and_names_are_text_that_the_database_can_hold(text: Any) -> None:
    for condition in (Single(text), Single("k", ByName(text)), count(keys=("k", text)), count(matcher=ByName(text))):
        with pytest.raises(ff.InvalidInput) as refused:
            check_condition(all_of(condition), has_deadline=False)
        assert refused.value.field == "resume_condition"


@pytest.mark.parametrize(
    "condition",
    [
        Single("k", "Wildcard"),  # type: ignore[arg-type]
        Single("k", None),  # type: ignore[arg-type]
        count(matcher="x"),  # type: ignore[arg-type]
        count(1.0),  # type: ignore[arg-type]
        count(True),
        count("1"),  # type: ignore[arg-type]
        count(2**31),
        count(kind="DistinctSignals"),  # type: ignore[arg-type]
        count(keys="k"),  # type: ignore[arg-type]
        AllMet("k"),  # type: ignore[arg-type]
        AllMet(("k",)),  # type: ignore[arg-type]
        AllMet((None,)),  # type: ignore[arg-type]
        AllMet(({"Single": SINGLE},)),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_tree_with_a_part_of_another_type_is_refused(condition: Condition) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        check_condition(condition, has_deadline=True)
    assert refused.value.field == "resume_condition"
