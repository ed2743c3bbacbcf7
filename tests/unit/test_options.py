"""Options: which are refused, how they merge, and the new execution they produce."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

import flowfabric as ff
from flowfabric.values.options import OPTION_NAMES, OptionNames, Options

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
FIXED = ff.RetryPolicy(max_retries=2, backoff=ff.Fixed("1 minute"))


def test_the_keywords_that_type_checkers_see_are_the_options() -> None:
    assert get_type_hints(OptionNames).keys() == OPTION_NAMES


# Option, what was written, a word of what is wrong with it.
BAD = {
    "a lane that is no text": ("lane", 5, "not text"),
    "an empty lane": ("lane", "", "Empty"),
    "a lane of None": ("lane", None, "not text"),
    "a lane too long": ("lane", "x" * 65, "TooLong"),
    "a priority of text": ("priority", "high", "'high'"),
    "a priority of bool": ("priority", True, "True"),
    "a priority above the highest": ("priority", 9001, "got 9001"),
    "a priority below the lowest": ("priority", -1, "got -1"),
    "a number for a retry policy": ("retry", 3, "int"),
    "a mapping for a retry policy": ("retry", {"max_retries": 3}, "dict"),
    "categories with NUL": ("retry", ff.RetryPolicy(retryable_categories=("\0",)), "NUL"),
    "no time for an attempt": ("attempt_timeout", 0, "got 0"),
    "less than no time": ("attempt_timeout", -1, "got -1"),
    "words that are no duration": ("attempt_timeout", "soon", "not a duration"),
    "a number of days that is none": ("retention", "2 fortnights", "not a duration"),
    "more than a century": ("retention", timedelta(days=40_000), "got"),
    "a nan": ("retention", float("nan"), "not a duration"),
    "a bool for a duration": ("dedup_window", True, "not a duration"),
    "no window": ("dedup_window", timedelta(0), "got"),
    "a delay into the past": ("delay", -1, "got -1"),
    "a delay to a time": ("delay", NOON, "not a duration"),
    "a time without zone": ("at", datetime(2030, 1, 1), "without time zone"),
    "a time that is a duration": ("at", timedelta(hours=1), "timedelta"),
    "a time that is text": ("at", "2030-01-01", "str"),
    "a deadline without zone": ("deadline", datetime(2030, 1, 1), "without time zone"),
    "a deadline at once": ("deadline", 0, "got 0"),
    "a deadline of words": ("deadline", "tomorrow", "not a duration"),
    "one capability in place of a list": ("capabilities", "gpu", "'gpu'"),
    "a capability of two words": ("capabilities", ["big gpu"], "control_or_whitespace"),
    "a capability that is a number": ("capabilities", [1], "non_string_token"),
    "an empty capability": ("capabilities", ["gpu", ""], "empty_token"),
    "no collection of capabilities": ("capabilities", 5, "got 5"),
    "tags that are no mapping": ("tags", ["a"], "not a mapping"),
    "a namespace of None": ("namespace", None, "not text"),
    "a namespace with NUL": ("namespace", "a\0", "NUL"),
    "a key too long": ("idempotency_key", "k" * 513, "513 bytes"),
    "a key that is a number": ("idempotency_key", 7, "not text"),
    "another way with duplicates": ("on_duplicate", "ignore", "'ignore'"),
    "fewer reclaims than none": ("max_reclaims", -1, "got -1"),
    "a bool for a count": ("max_replays", True, "True"),
    "no count of replays": ("max_replays", None, "None"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_named_where_it_is_written(case: str) -> None:
    option, value, words = BAD[case]
    app = ff.App()

    @app.task
    async def publish(draft_id: int) -> None: ...

    def on_the_task() -> Any:
        return app.task(name="other", **{option: value})(publish.function)  # type: ignore[call-overload]

    for write in (
        lambda: Options.of({option: value}),
        lambda: ff.App(**{option: value}),
        lambda: publish.options(**{option: value}),  # type: ignore[misc]
        lambda: publish.submission(42, **{option: value}),
        on_the_task,
    ):
        with pytest.raises(ff.InvalidInput) as refused:
            write()
        assert refused.value.field == option
        assert words in refused.value.problem
        assert refused.value.allowed
    assert list(app.tasks) == ["publish"]


def test_a_tag_that_is_no_text_is_named_with_its_key() -> None:
    with pytest.raises(ff.InvalidInput, match=r"team\.size"):
        Options.of({"tags": {"team.size": 5}})


def test_a_delay_and_a_time_together_are_refused() -> None:
    with pytest.raises(ff.InvalidInput, match="one of them"):
        Options.of({"delay": 5, "at": NOON})


@pytest.mark.parametrize(
    ("name", "near"),
    [("prioritty", "priority"), ("tag", "tags"), ("retries", "retry"), ("idempotency", "idempotency_key")],
)
def test_an_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    app = ff.App()

    @app.task
    async def publish(draft_id: int) -> None: ...

    for write in (
        lambda: ff.App(**{name: 1}),  # type: ignore[arg-type]
        lambda: app.task(**{name: 1}),  # type: ignore[call-overload]
        lambda: publish.options(**{name: 1}),  # type: ignore[misc]
        lambda: publish.submission(42, **{name: 1}),
    ):
        with pytest.raises(ff.InvalidInput, match=f"did you mean '{near}'"):
            write()


def test_other_arguments_of_a_constructor_are_suggested_too() -> None:
    with pytest.raises(ff.InvalidInput, match="did you mean 'middleware'"):
        ff.App(middlewares=[])  # type: ignore[call-arg]
    with pytest.raises(ff.InvalidInput, match="did you mean 'permanent'"):
        ff.App().task(permanents=[ValueError])  # type: ignore[call-overload]


def test_a_name_without_a_near_match_lists_all_options() -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        Options.of({"xyzzy": 1})
    assert "did you mean" not in refused.value.problem
    assert refused.value.allowed == ", ".join(sorted(OPTION_NAMES))


# What the task says, what the submission says, what comes of it.
MERGED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "the later word wins": ({"priority": 1, "lane": "a"}, {"priority": 2}, {"priority": 2, "lane": "a"}),
    "None unsets": ({"retry": FIXED}, {"retry": None}, {"retry": None}),
    "tags are added": ({"tags": {"a": "1", "b": "1"}}, {"tags": {"b": "2"}}, {"tags": {"a": "1", "b": "2"}}),
    "no tags change nothing": ({"tags": {"a": "1"}}, {"tags": None}, {"tags": {"a": "1"}}),
    "a time replaces a delay": ({"delay": 5}, {"at": NOON}, {"at": NOON}),
    "a delay replaces a time": ({"at": NOON}, {"delay": 5}, {"delay": 5}),
    "taking the time away leaves a delay": ({"delay": 5}, {"at": None}, {"delay": 5, "at": None}),
    "capabilities are replaced": ({"capabilities": ["a"]}, {"capabilities": ["b"]}, {"capabilities": ["b"]}),
    "no capabilities": ({"capabilities": ["a"]}, {"capabilities": []}, {"capabilities": []}),
    "zero is a word": ({"priority": 5, "max_replays": 3}, {"priority": 0}, {"priority": 0, "max_replays": 3}),
}


@pytest.mark.parametrize("case", MERGED)
def test_options_merge(case: str) -> None:
    first, second, both = MERGED[case]
    assert Options.of(first).merged(Options.of(second)) == Options.of(both)


def test_an_app_a_task_its_options_and_a_submission_are_merged_in_this_order() -> None:
    app = ff.App(priority=1, lane="app", namespace="app", tags={"app": "1"})

    @app.task(priority=2, lane="task", tags={"task": "1"})
    async def publish(draft_id: int) -> None: ...

    options = publish.options(priority=3, tags={"options": "1"}).submission(42, priority=4).options
    assert (options.priority, options.lane, options.namespace) == (4, "task", "app")
    assert options.tags == {"app": "1", "task": "1", "options": "1"}
    assert publish.defaults.priority == 2  # `options` made another task and left this one alone


def test_merging_with_nothing_is_the_same() -> None:
    options = Options.of({"priority": 3})
    assert options.merged(Options()) is options


def test_a_keyword_that_is_both_goes_to_the_task() -> None:
    app = ff.App()

    @app.task(priority=3)
    async def rank(priority: int, lane: str = "left") -> None: ...

    made = rank.submission(priority=7, lane="right", tags={"a": "1"})
    assert made.kwargs == {"priority": 7, "lane": "right"}
    assert made.options.priority == 3
    assert made.options.lane is UNSET
    assert made.options.tags == {"a": "1"}
    assert rank.options(priority=5, lane="x").submission(priority=7).options.priority == 5


class Store:
    """Something shared."""


@pytest.mark.parametrize(
    ("name", "words"),
    [("ctx", "the worker provides it"), ("store", "the worker provides it"), ("draft", "did you mean 'draft_id'")],
)
def test_a_keyword_that_is_neither_is_explained(name: str, words: str) -> None:
    app = ff.App()

    @app.task
    async def publish(ctx: ff.Context, draft_id: int, store: ff.Data[Store]) -> None: ...

    with pytest.raises(ff.InvalidInput) as refused:
        publish.submission(draft_id=1, **{name: 1})  # type: ignore[arg-type]
    assert refused.value.field == name
    assert words in refused.value.problem
    assert refused.value.allowed == "draft_id"


def _policy(**options: Any) -> dict[str, Any]:
    policy: dict[str, Any] = msgspec.json.decode(Options.of(options).policy.text)
    return policy


# Options and the policy that is stored.
POLICIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"attempt_timeout": 30}, {"timeout_policy": {"attempt_timeout_ms": 30_000}}),
    ({"attempt_timeout": "1h 30m"}, {"timeout_policy": {"attempt_timeout_ms": 5_400_000}}),
    ({"attempt_timeout": 0.0000001}, None),  # type: ignore[list-item]
    ({"attempt_timeout": timedelta(microseconds=1)}, {"timeout_policy": {"attempt_timeout_ms": 1}}),
    ({"attempt_timeout": 0.0015}, {"timeout_policy": {"attempt_timeout_ms": 2}}),
    ({"retention": "2 days"}, {"stream_policy": {"retention_ttl_ms": 172_800_000}}),
    ({"dedup_window": timedelta(minutes=1)}, {"dedup_window_ms": 60_000}),
    ({"max_reclaims": 0, "max_replays": 0}, {"max_reclaim_count": 0, "max_replay_count": 0}),
    ({"capabilities": {"gpu", "big"}}, {"routing_requirements": {"required_capabilities": ["big", "gpu"]}}),
    ({"capabilities": ()}, {}),
    (
        {"retry": FIXED},
        {
            "retry_policy": {
                "max_retries": 2,
                "backoff": {"type": "fixed", "delay_ms": 60_000},
                "retryable_categories": [],
            }
        },
    ),
]


@pytest.mark.parametrize(("options", "stored"), POLICIES)
def test_only_set_options_are_stored_and_reclaims_default_to_five(
    options: dict[str, Any], stored: dict[str, Any] | None
) -> None:
    if stored is None:
        with pytest.raises(ff.InvalidInput):
            _policy(**options)
        return
    found = _policy(**options)
    if "routing_requirements" in found:
        found["routing_requirements"]["required_capabilities"].sort()
    assert found == {"max_reclaim_count": 5, **stored}


def test_the_same_policy_is_the_same_object() -> None:
    first, second = (Options.of({"retry": FIXED, "attempt_timeout": 5}).policy for _ in range(2))
    assert first is second


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "lane": st.sampled_from(["a", "b"]),
            "priority": st.integers(0, 9),
            "tags": st.dictionaries(st.sampled_from("abc"), st.sampled_from("123")),
            "delay": st.integers(0, 9),
            "max_replays": st.integers(0, 9),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "lane": st.sampled_from(["a", "b"]),
            "priority": st.integers(0, 9),
            "tags": st.dictionaries(st.sampled_from("abc"), st.sampled_from("123")),
            "at": st.just(NOON),
            "max_replays": st.integers(0, 9),
        },
    ),
)
def test_merging_keeps_options_that_are_not_set_again(first: dict[str, Any], second: dict[str, Any]) -> None:
    merged = Options.of(first).merged(Options.of(second)).checked()
    expected = {**first, **second}
    if "at" in second:
        expected.pop("delay", None)
    if "tags" in first and "tags" in second:
        expected["tags"] = {**first["tags"], **second["tags"]}
    assert merged == Options(**expected)
