"""Policies and their JSON form."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.values.durations import MAX_DURATION_MS, duration
from flowfabric.values.failure import FailureClass, classify
from flowfabric.values.ids import BudgetId, QuotaPolicyId
from flowfabric.values.policies import (
    DEFAULT_DEDUP_WINDOW_MS,
    Derived,
    ExecutionPolicy,
    Exponential,
    FallbackPolicy,
    FallbackTier,
    Fixed,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    SuspensionPolicy,
    TimeoutPolicy,
)
from flowfabric.values.policy_json import freeze_policy, policy_to_json, retry_policy_to_json

ONE = BudgetId(UUID(int=1))
TWO = BudgetId(UUID(int=2))
QUOTA = QuotaPolicyId(UUID(int=3))

FULL = ExecutionPolicy(
    priority=5,
    delay_until=datetime(2030, 1, 1, tzinfo=UTC),
    retry_policy=RetryPolicy(
        max_retries=4,
        backoff=Exponential(initial=0.5, maximum=30, multiplier=3.0, jitter=True),
        retryable_categories=("net",),
    ),
    timeout_policy=TimeoutPolicy(attempt_timeout=90, execution_deadline=timedelta(hours=1)),
    max_reclaim_count=7,
    suspension_policy=SuspensionPolicy(default_timeout=10, timeout_behavior="cancel"),
    fallback_policy=FallbackPolicy(
        tiers=(FallbackTier(provider="p", model="m", timeout=1), FallbackTier(provider="q", model="n"))
    ),
    max_replay_count=2,
    budget_ids=(TWO, ONE, TWO),
    quota_policy_id=QUOTA,
    routing_requirements=RoutingRequirements(
        required_capabilities=("gpu", "cuda", "gpu"), preferred_locality="eu", isolation_level="strict"
    ),
    dedup_window=60,
    stream_policy=StreamPolicy(durability_mode="durable", retention_maxlen=50, retention_ttl=5),
    max_signals_per_execution=9,
)


def parsed(policy: Any) -> Any:
    text = policy_to_json(policy)
    assert text is not None
    return json.loads(text)


def test_the_json_has_exactly_the_fields_of_the_chapter() -> None:
    assert parsed(FULL) == {
        "priority": 5,
        "delay_until": 1_893_456_000_000,
        "retry_policy": {
            "max_retries": 4,
            "backoff": {
                "type": "exponential",
                "initial_delay_ms": 500,
                "max_delay_ms": 30_000,
                "multiplier": 3.0,
                "jitter": True,
            },
            "retryable_categories": ["net"],
        },
        "timeout_policy": {"attempt_timeout_ms": 90_000, "execution_deadline_ms": 3_600_000},
        "max_reclaim_count": 7,
        "suspension_policy": {"default_timeout_ms": 10_000, "timeout_behavior": "cancel"},
        "fallback_policy": {
            "tiers": [
                {"provider": "p", "model": "m", "timeout_ms": 1000},
                {"provider": "q", "model": "n"},
            ]
        },
        "max_replay_count": 2,
        "budget_ids": [str(TWO), str(ONE), str(TWO)],
        "quota_policy_id": str(QUOTA),
        "routing_requirements": {
            "required_capabilities": ["gpu", "cuda", "gpu"],
            "preferred_locality": "eu",
            "isolation_level": "strict",
        },
        "dedup_window_ms": 60_000,
        "stream_policy": {"durability_mode": "durable", "retention_maxlen": 50, "retention_ttl_ms": 5000},
        "max_signals_per_execution": 9,
    }


def test_a_default_policy_omits_what_is_absent() -> None:
    assert parsed(ExecutionPolicy()) == {
        "priority": 0,
        "max_reclaim_count": 100,
        "max_replay_count": 10,
        "budget_ids": [],
        "max_signals_per_execution": 10_000,
    }


def test_the_defaults_of_a_retry_policy_are_those_of_the_chapter_with_jitter() -> None:
    assert parsed(ExecutionPolicy(retry_policy=RetryPolicy()))["retry_policy"] == {
        "max_retries": 3,
        "backoff": {
            "type": "exponential",
            "initial_delay_ms": 1000,
            "max_delay_ms": 60_000,
            "multiplier": 2.0,
            "jitter": True,  # JSON that does not say is without
        },
        "retryable_categories": [],
    }
    policy = ExecutionPolicy(retry_policy=RetryPolicy(backoff=Fixed()))
    assert parsed(policy)["retry_policy"]["backoff"] == {"type": "fixed", "delay_ms": 1000}


def test_no_policy_is_not_a_policy_of_defaults() -> None:
    assert freeze_policy(None) == (None, Derived())
    assert policy_to_json(ExecutionPolicy()) is not None
    assert policy_to_json({}) == "{}"


def test_the_engine_keeps_what_it_derives() -> None:
    assert freeze_policy(FULL)[1] == Derived(
        required_capabilities=("cuda", "gpu"),
        budget_ids=(TWO, ONE),
        quota_policy_ids=(QUOTA,),
        delay_until_ms=1_893_456_000_000,
        execution_deadline_ms=3_600_000,
        dedup_window_ms=60_000,
    )
    for policy, window in ((None, DEFAULT_DEDUP_WINDOW_MS), ({}, 86_400_000), ({"dedup_window_ms": 0}, 0)):
        assert freeze_policy(policy)[1].dedup_window_ms == window


def test_a_value_and_its_own_json_freeze_alike() -> None:
    text, derived = freeze_policy(FULL)
    assert text is not None
    assert freeze_policy(json.loads(text)) == (text, derived)
    assert freeze_policy(text) == (text, derived)
    assert freeze_policy(text.encode()) == (text, derived)


def test_policies_are_values() -> None:
    assert Exponential(initial=1, maximum=60) == Exponential()
    assert Fixed(2) == Fixed(delay=timedelta(seconds=2))
    assert ExecutionPolicy(budget_ids=[ONE]) == ExecutionPolicy(budget_ids=(ONE,))  # type: ignore[arg-type]  # lists are taken too
    assert hash(FULL) == hash(pickle.loads(pickle.dumps(FULL)))
    with pytest.raises(AttributeError):
        FULL.priority = 6  # type: ignore[misc]  # the point of the test


def test_a_span_below_a_millisecond_does_not_vanish() -> None:
    policy = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(microseconds=1)))
    assert parsed(policy)["timeout_policy"] == {"attempt_timeout_ms": 1}


def test_a_time_in_another_zone_is_the_same_moment() -> None:
    zone = timezone(timedelta(hours=2))
    there = ExecutionPolicy(delay_until=datetime(2030, 1, 1, 2, tzinfo=zone))
    assert freeze_policy(there)[1].delay_until_ms == 1_893_456_000_000


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidInput, match="time zone") as caught:
        policy_to_json(ExecutionPolicy(delay_until=datetime(2030, 1, 1)))
    assert caught.value.field == "ExecutionPolicy.delay_until"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1), ("1.5 seconds", 1.5), ("90", 90), ("2 days", 172_800), ("1h30m", 5400), ("1 h, 30 min", 5400),
        (" 5 Minutes ", 300), ("1 week 1 day", 691_200), ("250ms", 0.25), ("0", 0),
    ],
)  # fmt: skip
def test_a_duration_may_be_given_in_words(text: str, seconds: float) -> None:
    assert duration(text, "pause") == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    [
        "1 parsec",
        "-1 s",
        "1e3",
        "one day",
        " ",
        "9" * 400,
        "",
        "s",
        "1 s 2",
        True,
        float("inf"),
        float("nan"),
        1e300,
        object(),
    ],
)
def test_an_invalid_duration_is_refused_immediately(value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Fixed(value)
    assert caught.value.field == "Fixed.delay"


def test_unknown_keys_are_kept_and_absent_ones_are_not_written() -> None:
    submitted = {
        "x-team": {"a": None, "b": [1, None]},
        "priority": None,
        "retry_policy": {"max_retries": None, "note": "kept"},
        "timeout_policy": None,
        "y": None,
    }
    assert parsed(submitted) == {
        "x-team": {"a": None, "b": [1, None]},
        "retry_policy": {"note": "kept"},
        "y": None,
    }


@pytest.mark.parametrize(
    ("policy", "path"),
    [
        ({"priority": "5"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"delay_until": -1}, "delay_until"),
        ({"delay_until": 2**62}, "delay_until"),
        ({"delay_until": "2030-01-01"}, "delay_until"),
        ({"retry_policy": 5}, "retry_policy"),
        ({"retry_policy": []}, "retry_policy"),
        ({"retry_policy": {"max_retries": "3"}}, "retry_policy.max_retries"),
        ({"retry_policy": {"max_retries": -1}}, "retry_policy.max_retries"),
        ({"retry_policy": {"max_retries": 2**32}}, "retry_policy.max_retries"),
        ({"retry_policy": {"max_retries": 10**100}}, "retry_policy.max_retries"),
        ({"retry_policy": {"backoff": "fixed"}}, "retry_policy.backoff"),
        ({"retry_policy": {"backoff": {"type": 1}}}, "retry_policy.backoff.type"),
        (
            {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": -1}}},
            "retry_policy.backoff.delay_ms",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "initial_delay_ms": "1"}}},
            "retry_policy.backoff.initial_delay_ms",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "max_delay_ms": MAX_DURATION_MS + 1}}},
            "retry_policy.backoff.max_delay_ms",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "multiplier": -1}}},
            "retry_policy.backoff.multiplier",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "multiplier": float("nan")}}},
            "retry_policy.backoff.multiplier",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "multiplier": 10**400}}},
            "retry_policy.backoff.multiplier",
        ),
        (
            {"retry_policy": {"backoff": {"type": "exponential", "jitter": 1}}},
            "retry_policy.backoff.jitter",
        ),
        ({"retry_policy": {"retryable_categories": "net"}}, "retry_policy.retryable_categories"),
        ({"retry_policy": {"retryable_categories": ["a", 1]}}, "retry_policy.retryable_categories[1]"),
        ({"timeout_policy": {"attempt_timeout_ms": 1.0}}, "timeout_policy.attempt_timeout_ms"),
        ({"timeout_policy": {"execution_deadline_ms": -5}}, "timeout_policy.execution_deadline_ms"),
        ({"timeout_policy": {"max_reclaim_count": -5}}, "timeout_policy.max_reclaim_count"),
        ({"max_reclaim_count": -1}, "max_reclaim_count"),
        ({"max_replay_count": 2**32}, "max_replay_count"),
        ({"suspension_policy": {"timeout_behavior": "explode"}}, "suspension_policy.timeout_behavior"),
        ({"suspension_policy": {"timeout_behavior": 3}}, "suspension_policy.timeout_behavior"),
        ({"suspension_policy": {"default_timeout_ms": "1"}}, "suspension_policy.default_timeout_ms"),
        ({"fallback_policy": {"tiers": {}}}, "fallback_policy.tiers"),
        ({"fallback_policy": {"tiers": [1]}}, "fallback_policy.tiers[0]"),
        ({"fallback_policy": {"tiers": [{"provider": "p"}]}}, "fallback_policy.tiers[0].model"),
        ({"budget_ids": str(ONE)}, "budget_ids"),
        ({"budget_ids": [5]}, "budget_ids[0]"),
        ({"quota_policy_id": 5}, "quota_policy_id"),
        ({"routing_requirements": {"isolation_level": 5}}, "routing_requirements.isolation_level"),
        ({"dedup_window_ms": -1}, "dedup_window_ms"),
        ({"dedup_window_ms": 2**64}, "dedup_window_ms"),
        ({"stream_policy": {"durability_mode": "lossy"}}, "stream_policy.durability_mode"),
        ({"stream_policy": {"retention_maxlen": -1}}, "stream_policy.retention_maxlen"),
        ({"max_signals_per_execution": []}, "max_signals_per_execution"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(policy: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        policy_to_json(policy)
    assert caught.value.kind == "invalid_policy_json"
    assert caught.value.detail.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("policy", "path"),
    [
        (ExecutionPolicy(priority=2**40), "priority"),
        (ExecutionPolicy(max_reclaim_count=-1), "max_reclaim_count"),
        (
            ExecutionPolicy(retry_policy=RetryPolicy(backoff=None)),  # type: ignore[arg-type]  # refused nowhere: absent
            None,
        ),
        (ExecutionPolicy(dedup_window=timedelta(days=40_000)), "dedup_window_ms"),
        (ExecutionPolicy(budget_ids="abc"), "budget_ids"),  # type: ignore[arg-type]  # the point of the test
        (
            ExecutionPolicy(retry_policy={"max_retries": "x"}),  # type: ignore[arg-type]  # unhashable, and wrong
            "retry_policy.max_retries",
        ),
    ],
)
def test_a_value_is_held_to_the_same_rules(policy: ExecutionPolicy, path: str | None) -> None:
    if path is None:
        assert "backoff" not in parsed(policy)["retry_policy"]
        return
    with pytest.raises(ValidationFailed) as caught:
        policy_to_json(policy)
    assert caught.value.detail.startswith(f"{path}: ")


@pytest.mark.parametrize("policy", ["{", b"\xff", "[]", "5", '"x"', [], 5, {"x": object()}])
def test_a_policy_that_is_not_an_object_is_malformed(policy: Any) -> None:
    with pytest.raises(ValidationFailed) as caught:
        policy_to_json(policy)
    assert (caught.value.kind, caught.value.detail) == ("invalid_policy_json", "malformed")


@pytest.mark.parametrize("routing", [5, "gpu", ["gpu"], True])
def test_routing_that_is_not_an_object_has_its_own_words(routing: Any) -> None:
    with pytest.raises(ValidationFailed) as caught:
        policy_to_json({"routing_requirements": routing})
    assert caught.value.kind == "invalid_policy_json"
    assert caught.value.detail == "routing_requirements:not_object"


@pytest.mark.parametrize(
    ("tokens", "detail"),
    [
        ("gpu", "required:not_array"),
        ({"gpu": True}, "required:not_array"),
        ([5], "required:non_string_token"),
        ([""], "required:empty_token"),
        (["a,b"], "required:comma_in_token"),
        (["a b"], "required:control_or_whitespace"),
        ([str(n) for n in range(257)], "required:too_many_tokens"),
        (["x" * 4097], "required:too_many_bytes"),
    ],
)
def test_bad_capabilities_never_become_no_requirement(tokens: Any, detail: str) -> None:
    for policy in (
        {"routing_requirements": {"required_capabilities": tokens}},
        ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=tokens)),
    ):
        with pytest.raises(ValidationFailed) as caught:
            policy_to_json(policy)
        assert (caught.value.kind, caught.value.detail) == ("invalid_capabilities", detail)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"budget_ids": ["nope"]}, "policy.budget_ids[0]"),
        ({"quota_policy_id": ""}, "policy.quota_policy_id"),
        ({"note": "a\0b"}, "policy"),
        ({"note": "\ud800"}, "policy"),
        ({"retry_policy": {"retryable_categories": ["\0"]}}, "policy.retry_policy.retryable_categories[0]"),
    ],
)
def test_bad_identifiers_and_text_are_invalid_input(policy: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        policy_to_json(policy)
    assert caught.value.field == field


def test_a_backslash_is_not_taken_for_nul() -> None:
    assert parsed({"note": "\\u0000"}) == {"note": "\\u0000"}
    with pytest.raises(InvalidInput):
        policy_to_json({"note": "\\\0"})


@pytest.mark.parametrize("backoff", [{}, {"type": "quantum", "delay_ms": "?"}, {"type": None}])
def test_a_backoff_of_unknown_type_is_kept(backoff: dict[str, Any]) -> None:
    assert "backoff" in parsed({"retry_policy": {"backoff": backoff}})["retry_policy"]


durations = st.timedeltas(timedelta(0), timedelta(days=30_000)) | st.integers(0, 10**9) | st.floats(0, 10**9)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
tokens = st.text("abcxyz-_.:09", min_size=1, max_size=8)
policies = st.builds(
    ExecutionPolicy,
    priority=st.integers(-(2**31), 2**31 - 1),
    delay_until=st.none() | st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)),
    retry_policy=st.none()
    | st.builds(
        RetryPolicy,
        max_retries=st.integers(0, 2**32 - 1),
        backoff=st.builds(
            lambda spans, **others: Exponential(initial=spans[0], maximum=spans[1], **others),
            st.tuples(durations, durations).map(lambda both: sorted(both, key=lambda one: duration(one, "any"))),
            multiplier=st.floats(0, 1000),
            jitter=st.booleans(),
        )
        | st.builds(Fixed, durations),
        retryable_categories=st.lists(texts, max_size=3).map(tuple),
    ),
    timeout_policy=st.none()
    | st.builds(TimeoutPolicy, attempt_timeout=st.none() | durations, execution_deadline=st.none() | durations),
    budget_ids=st.lists(st.uuids(), max_size=4).map(tuple),
    quota_policy_id=st.none() | st.uuids(),
    quota_policy_ids=st.none() | st.lists(st.uuids(), max_size=3).map(tuple),
    routing_requirements=st.none()
    | st.builds(RoutingRequirements, required_capabilities=st.lists(tokens, max_size=5).map(tuple)),
    dedup_window=st.none() | durations,
)


def has_null(value: object) -> bool:
    match value:
        case dict():
            return any(map(has_null, value.values()))
        case list():
            return any(map(has_null, value))
        case _:
            return value is None


@given(policies)
def test_any_policy_survives_its_json(policy: ExecutionPolicy) -> None:
    text, derived = freeze_policy(policy)
    assert text is not None
    value = json.loads(text)
    assert not has_null(value)
    assert freeze_policy(value)[1] == derived
    assert json.loads(policy_to_json(value) or "") == value
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_single_failure_may_bring_its_own_retry_policy() -> None:
    assert retry_policy_to_json(None) is None
    assert retry_policy_to_json("") is None
    assert json.loads(retry_policy_to_json(RetryPolicy(max_retries=1)) or "")["max_retries"] == 1
    assert json.loads(retry_policy_to_json('{"max_retries": 2, "x": 1}') or "") == {"max_retries": 2, "x": 1}
    for bad in ("{", "[]", {"max_retries": "x"}):
        with pytest.raises(ValidationFailed) as caught:
            retry_policy_to_json(bad)
        assert caught.value.kind == "invalid_policy_json"


@pytest.mark.parametrize(
    ("category", "failure_class", "expected"),
    [
        (None, None, ("transient", "transient")),
        ("", "", ("transient", "transient")),
        ("net", None, ("transient", "net")),
        *((word.value, None, (word.value, word.value)) for word in FailureClass),
        *((None, word.value, (word.value, word.value)) for word in FailureClass),
        ("net", "permanent", ("permanent", "net")),
        ("timeout", "permanent", ("permanent", "timeout")),
        ("a\0b", None, ("transient", "a\\x00b")),
        ("x" * 300, "timeout", ("timeout", "x" * 256)),
    ],
)
def test_class_and_category_fill_each_other_in(
    category: str | None, failure_class: str | None, expected: tuple[str, str]
) -> None:
    assert classify(category, failure_class) == expected


def test_an_unknown_failure_class_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        classify("net", "cosmic_ray")
    assert caught.value.field == "failure_class"


WRONG: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: RetryPolicy(max_retries=-1), "RetryPolicy.max_retries", "got -1"),
    (lambda: RetryPolicy(max_retries=2**32), "RetryPolicy.max_retries", "got 4294967296"),
    (lambda: RetryPolicy(max_retries=True), "RetryPolicy.max_retries", "got True"),
    (lambda: RetryPolicy(max_retries=[3]), "RetryPolicy.max_retries", "got"),  # type: ignore[arg-type]
    (lambda: RetryPolicy(backoff=5), "RetryPolicy.backoff", "got 5"),  # type: ignore[arg-type]
    (lambda: RetryPolicy(retryable_categories=(1,)), "RetryPolicy.retryable_categories", "got (1,)"),  # type: ignore[arg-type]
    (lambda: RetryPolicy(retryable_categories="a"), "RetryPolicy.retryable_categories", "got 'a'"),  # type: ignore[arg-type]
    (lambda: RetryPolicy(retries=3), "RetryPolicy", "did you mean 'max_retries'?"),  # type: ignore[call-arg]
    (lambda: RetryPolicy(3), "RetryPolicy", "takes its values by name, got 3"),  # type: ignore[misc]
    (lambda: Exponential(initial=10, maximum=1), "Exponential.initial", "got 10 s"),
    (lambda: Exponential(initial=-1), "Exponential.initial", "got -1 s"),
    (lambda: Exponential(maximum=-1), "Exponential.maximum", "got -1 s"),
    (lambda: Exponential(multiplier=-0.5), "Exponential.multiplier", "got -0.5"),
    (lambda: Exponential(multiplier=float("nan")), "Exponential.multiplier", "got nan"),
    (lambda: Exponential(multiplier=True), "Exponential.multiplier", "got True"),
    (lambda: Exponential(jitter=1), "Exponential.jitter", "got 1"),  # type: ignore[arg-type]
    (lambda: Fixed(-1), "Fixed.delay", "got -1 s"),
    (lambda: Fixed(timedelta(days=40_000)), "Fixed.delay", "got"),
    (lambda: ExecutionPolicy(max_replays=1), "ExecutionPolicy", "did you mean 'max_replay_count'?"),  # type: ignore[call-arg]
]


def test_a_policy_that_cannot_be_is_refused_where_it_is_written() -> None:
    for make, field, words in WRONG:
        with pytest.raises(InvalidInput) as refused:
            make()
        assert refused.value.field == field
        assert words in str(refused.value)
        assert refused.value.allowed


def test_an_equal_policy_that_was_frozen_before_does_not_let_a_bool_pass_for_an_integer() -> None:
    for name in ("max_replay_count", "max_reclaim_count", "priority", "max_signals_per_execution"):
        assert policy_to_json(ExecutionPolicy(**{name: 1}))  # type: ignore[arg-type]
        with pytest.raises(ValidationFailed, match="expected an integer, got a boolean"):
            policy_to_json(ExecutionPolicy(**{name: True}))  # type: ignore[arg-type]
