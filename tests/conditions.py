"""Resume conditions in plain Python, as the contract defines them. Tests compare the database with this.

Conditions are their JSON. This shares no code with the product, which flattens a tree; this walks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import strategies as st


class Sent(NamedTuple):
    """A recorded signal, as far as a condition looks at it."""

    key: str
    name: str
    signal_id: UUID
    source_type: str
    source_identity: str


def _passes(matcher: Any, sent: Sent) -> bool:
    return matcher in ("Wildcard", {"ByName": sent.name})


def _counted(count: dict[str, Any], signals: Sequence[Sent]) -> dict[Any, int]:
    """The distinct things that a count has seen, each with the place of its earliest signal."""
    seen: dict[Any, int] = {}
    for place, sent in enumerate(signals, 1):
        if sent.key in count["waitpoints"] and (count.get("matcher") is None or _passes(count["matcher"], sent)):
            thing = {
                "DistinctWaitpoints": sent.key,
                "DistinctSignals": sent.signal_id,
                "DistinctSources": (sent.source_type, sent.source_identity),
            }[count["count_kind"]]
            seen.setdefault(thing, place)
    return seen


def holds(condition: Any, signals: Sequence[Sent]) -> bool:
    """Whether a condition holds for these signals."""
    match condition:
        case {"Single": {"waitpoint_key": key, "matcher": matcher}}:
            return any(sent.key == key and _passes(matcher, sent) for sent in signals)
        case {"Composite": {"kind": "AllOf", "members": members}}:
            return all(holds(member, signals) for member in members)
        case {"Composite": {"kind": "Count", "n": n} as count}:
            return bool(len(_counted(count, signals)) >= n)
        case _:
            return False


def places(condition: Any, signals: Sequence[Sent]) -> set[int]:
    """The places, from 1, of the signals that have advanced a condition."""
    match condition:
        case {"Single": {"waitpoint_key": key, "matcher": matcher}}:
            found = [place for place, sent in enumerate(signals, 1) if sent.key == key and _passes(matcher, sent)]
            return set(found[:1])
        case {"Composite": {"kind": "AllOf", "members": members}}:
            return {place for member in members for place in places(member, signals)}
        case {"Composite": {"kind": "Count"} as count}:
            return set(_counted(count, signals).values())
        case _:
            return set()


def closer(condition: Any, signals: Sequence[Sent]) -> int | None:
    """The place of the signal with which a condition begins to hold."""
    return next((n for n in range(1, len(signals) + 1) if holds(condition, signals[:n])), None)


def match_detail(condition: Any, before: Sequence[Sent], sent: Sent) -> str:
    """What one more signal does for a condition."""
    if len(before) + 1 in places(condition, [*before, sent]):
        return "advanced"
    if places(condition, [sent]):
        return "duplicate_satisfier"
    return "matcher_failed" if _names(condition, sent.key) else "not_in_condition"


def _names(condition: Any, key: str) -> bool:
    match condition:
        case {"Single": {"waitpoint_key": one}}:
            return bool(one == key)
        case {"Composite": {"kind": "AllOf", "members": members}}:
            return any(_names(member, key) for member in members)
        case {"Composite": {"kind": "Count", "waitpoints": keys}}:
            return key in keys
        case _:
            return False


def required_names(condition: Any, key: str) -> list[str]:
    """The names a condition waits for on a key, depth first, each once."""
    found: list[str] = []
    match condition:
        case "OperatorOnly":
            found = ["__operator_only__"]
        case "TimeoutOnly":
            found = ["__timeout_only__"]
        case {"Single": {"waitpoint_key": one, "matcher": {"ByName": name}}} if one == key:
            found = [name]
        case {"Composite": {"kind": "Count", "waitpoints": keys, "matcher": {"ByName": name}}} if key in keys:
            found = [name]
        case {"Composite": {"kind": "AllOf", "members": members}}:
            found = [name for member in members for name in required_names(member, key)]
    return list(dict.fromkeys(found))


# Random trees and signals. The words are few, so that signals meet; two pairs of sources look alike when joined.

KEYS = ("a", "b", "a:b")
NAMES = ("x", "y", "x ", "OperatorOnly")
SOURCES = (("t", "alice"), ("t", "bob"), ("t", ""), ("t:a", "b"), ("t", "a:b"), ("T", "alice"))

MATCHERS = st.just("Wildcard") | st.builds(lambda name: {"ByName": name}, st.sampled_from(NAMES))


@st.composite
def _counts(draw: st.DrawFn, keys: Sequence[str]) -> Any:
    named = draw(st.lists(st.sampled_from(keys), min_size=1, unique=True))
    kind = draw(st.sampled_from(("DistinctWaitpoints", "DistinctSignals", "DistinctSources")))
    most = len(named) if kind == "DistinctWaitpoints" else 4
    count = {"kind": "Count", "n": draw(st.integers(1, most)), "count_kind": kind, "waitpoints": named}
    if (matcher := draw(st.none() | MATCHERS)) is not None:
        count["matcher"] = matcher
    return {"Composite": count}


def _within(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(members, min_size=1, max_size=3).map(lambda m: {"Composite": {"kind": "AllOf", "members": m}})


def trees(keys: Sequence[str] = KEYS) -> st.SearchStrategy[Any]:
    """Conditions of any shape over these keys, up to four deep."""
    singles = st.builds(
        lambda key, matcher: {"Single": {"waitpoint_key": key, "matcher": matcher}}, st.sampled_from(keys), MATCHERS
    )
    satisfiable = singles | _counts(keys)
    leaves = satisfiable | satisfiable | st.sampled_from(("OperatorOnly", "TimeoutOnly"))
    return leaves | _within(leaves | _within(leaves | _within(satisfiable | _within(singles))))


SIGNALS = st.lists(
    st.builds(
        lambda key, name, number, source: Sent(key, name, UUID(int=number), *source),
        st.sampled_from(KEYS),
        st.sampled_from(NAMES),
        st.integers(1, 6),
        st.sampled_from(SOURCES),
    ),
    max_size=10,
)
