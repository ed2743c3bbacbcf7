"""Conditions on signals that a suspended execution waits for, their JSON, and the rules for their shape.

A condition is one signal (`on`), several conditions together (`all_of`), or a number of signals (`any_of`,
`from_sources`, `count_signals`). The database evaluates them whenever a signal arrives.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text

MAX_DEPTH = 4
MAX_NODES = 256
MAX_KEYS = 256


class CountKind(StrEnum):
    """The things a `Count` counts."""

    DISTINCT_WAITPOINTS = "DistinctWaitpoints"
    DISTINCT_SIGNALS = "DistinctSignals"
    DISTINCT_SOURCES = "DistinctSources"


class ByName(Struct, frozen=True):
    """Lets signals of exactly this name through."""

    name: str


class Wildcard(Struct, frozen=True):
    """Lets every signal through."""


Matcher: TypeAlias = ByName | Wildcard


class Single(Struct, frozen=True):
    """One matching signal on one waitpoint."""

    waitpoint_key: str
    matcher: Matcher = Wildcard()


class OperatorOnly(Struct, frozen=True):
    """No signal satisfies it; it ends when an operator resumes the execution or the timeout expires."""


class TimeoutOnly(Struct, frozen=True):
    """No signal satisfies it; it ends when the timeout expires."""


class AllMet(Struct, frozen=True):
    """Every member is true. One signal may satisfy several members."""

    members: tuple[Condition, ...]


class Count(Struct, frozen=True):
    """At least `n` distinct waitpoints, signals or sources, counted over matching signals on these waitpoints."""

    n: int
    count_kind: CountKind
    waitpoints: tuple[str, ...]
    matcher: Matcher | None = None


Condition: TypeAlias = Single | OperatorOnly | TimeoutOnly | AllMet | Count
_TYPES = (Single, OperatorOnly, TimeoutOnly, AllMet, Count)


# Builders


def on(key: str, name: str | None = None) -> Single:
    """One signal on `key`, of any name or of this one."""
    return Single(key, Wildcard() if name is None else ByName(name))


def all_of(*conditions: Condition | str) -> AllMet:
    """All of these; a string means one signal on that key."""
    return AllMet(tuple(_condition(one) for one in conditions))


def any_of(*keys: str, n: int = 1, name: str | None = None) -> Count:
    """Signals on at least `n` of these keys."""
    return _count(n, CountKind.DISTINCT_WAITPOINTS, keys, name)


def from_sources(n: int, *keys: str, name: str | None = None) -> Count:
    """Signals of at least `n` different senders on these keys: two people, not one person twice."""
    return _count(n, CountKind.DISTINCT_SOURCES, keys, name)


def count_signals(n: int, *keys: str, name: str | None = None) -> Count:
    """At least `n` signals on these keys, from any sender."""
    return _count(n, CountKind.DISTINCT_SIGNALS, keys, name)


def _count(n: int, kind: CountKind, keys: Sequence[str], name: str | None) -> Count:
    return Count(n, kind, tuple(keys), None if name is None else ByName(name))


def _condition(value: Condition | str) -> Condition:
    return on(value) if isinstance(value, str) else value


# JSON


def condition_to_json(condition: Condition) -> Any:
    """A condition as it is stored and sent."""
    match condition:
        case Single(key, matcher):
            return {"Single": {"waitpoint_key": key, "matcher": _matcher_to_json(matcher)}}
        case OperatorOnly():
            return "OperatorOnly"
        case TimeoutOnly():
            return "TimeoutOnly"
        case AllMet(members):
            return {"Composite": {"kind": "AllOf", "members": [condition_to_json(member) for member in members]}}
        case Count(n, kind, waitpoints, matcher):
            found = {"kind": "Count", "n": n, "count_kind": kind.value, "waitpoints": list(waitpoints)}
            if matcher is not None:
                found["matcher"] = _matcher_to_json(matcher)
            return {"Composite": found}


def _matcher_to_json(matcher: Matcher) -> Any:
    return {"ByName": matcher.name} if isinstance(matcher, ByName) else "Wildcard"


def condition_from_json(value: Any) -> Condition:
    """Read a condition from its JSON; `InvalidInput` names the unknown or too deeply nested part."""
    return _from_json(value, "<root>", 1)


def _from_json(value: Any, path: str, depth: int) -> Condition:
    match value:
        case "OperatorOnly":
            return OperatorOnly()
        case "TimeoutOnly":
            return TimeoutOnly()
        case {"Single": {"waitpoint_key": str(key), "matcher": matcher, **rest}, **others} if not rest and not others:
            return Single(key, _matcher_from_json(matcher))
        case {"Composite": {"kind": "AllOf", "members": list(members), **rest}, **others} if not rest and not others:
            if depth > MAX_DEPTH:
                raise InvalidInput(f"depth {depth} exceeds cap {MAX_DEPTH} at {path}", field="resume_condition")
            return AllMet(
                tuple(_from_json(member, _below(path, number), depth + 1) for number, member in enumerate(members))
            )
        case {
            "Composite": {"kind": "Count", "n": int(n), "count_kind": str(kind), "waitpoints": list(keys), **rest},
            **others,
        } if not others and set(rest) <= {"matcher"} and type(n) is int:
            if kind not in list(CountKind):
                raise InvalidInput(
                    f"unknown count_kind {kind!r}", field="resume_condition", allowed=", ".join(CountKind)
                )
            if not all(isinstance(key, str) for key in keys):
                raise InvalidInput("a waitpoint key is not a string", field="resume_condition")
            matcher = rest.get("matcher")
            return Count(n, CountKind(kind), tuple(keys), None if matcher is None else _matcher_from_json(matcher))
    raise InvalidInput(
        f"unknown condition {reprlib.repr(value)}",
        field="resume_condition",
        allowed="Single, OperatorOnly, TimeoutOnly, Composite AllOf or Count",
    )


def _matcher_from_json(value: Any) -> Matcher:
    match value:
        case "Wildcard":
            return Wildcard()
        case {"ByName": str(name), **rest} if not rest:
            return ByName(name)
    raise InvalidInput(f"unknown matcher {reprlib.repr(value)}", field="resume_condition", allowed="ByName or Wildcard")


# Shape


def _below(path: str, number: int) -> str:
    return f"members[{number}]" if path == "<root>" else f"{path}.members[{number}]"


def named_keys(condition: Condition) -> list[str]:
    """Return the keys that a condition names, depth first, each once."""
    return list(dict.fromkeys(_keys(condition)))


def _keys(condition: Condition) -> Iterator[str]:
    match condition:
        case Single(key):
            yield key
        case Count(waitpoints=keys):
            yield from keys
        case AllMet(members):
            for member in members:
                yield from _keys(member)
        case _:
            pass


def check_condition(value: object, *, has_deadline: bool, field: str = "resume_condition") -> Condition:
    """Return the condition if its shape is valid; `InvalidInput` has the code and the path in the tree."""
    if isinstance(value, str | dict) and not isinstance(value, _TYPES):
        value = condition_from_json(value)
    if not isinstance(value, _TYPES):
        raise InvalidInput(
            f"got {type(value).__name__}", field=field, allowed="a condition, such as on(...) or all_of(...)"
        )
    nodes = 0

    def bad(path: str, code: str, allowed: str = "") -> InvalidInput:
        return InvalidInput(f"{code} at {path}", field=field, allowed=allowed)

    def check(node: object, path: str, depth: int) -> None:
        nonlocal nodes
        nodes += 1
        if nodes > MAX_NODES:
            raise bad("<root>", "condition_too_large", f"at most {MAX_NODES} nodes and {MAX_KEYS} keys")
        match node:
            case OperatorOnly():
                pass
            case TimeoutOnly():
                if not has_deadline:
                    raise bad(path, "timeout_only_without_deadline", "a timeout_at")
            case Single(key, matcher):
                _check_matcher(matcher, path, bad)
                _check_key(key, path, bad)
            case AllMet(members):
                if depth > MAX_DEPTH:
                    raise bad(path, f"depth {depth} exceeds cap {MAX_DEPTH}")
                if not isinstance(members, tuple | list) or not members:
                    raise bad(path, "allof_empty_members", "at least one member")
                for number, member in enumerate(members):
                    check(member, _below(path, number), depth + 1)
            case Count(n, kind, keys, matcher):
                if depth > MAX_DEPTH:
                    raise bad(path, f"depth {depth} exceeds cap {MAX_DEPTH}")
                if type(n) is not int or n > 2**31 - 1 or not isinstance(kind, CountKind):
                    raise bad(path, "unknown count", "an integer n and a CountKind")
                if n < 1:
                    raise bad(path, "count_n_zero", "n of at least 1")
                if not isinstance(keys, tuple | list) or not keys:
                    raise bad(path, "count_waitpoints_empty", "at least one key")
                if len({check_text(key, "resume_condition") for key in keys}) < len(keys):
                    raise bad(path, "count_duplicate_waitpoints", "distinct keys")
                if kind is CountKind.DISTINCT_WAITPOINTS and n > len(keys):
                    raise bad(path, "count_exceeds_waitpoint_set", f"n of at most {len(keys)}")
                if matcher is not None:
                    _check_matcher(matcher, path, bad)
                for key in keys:
                    _check_key(key, path, bad)
            case _:
                raise bad(path, f"unknown condition {type(node).__name__}")

    check(value, "<root>", 1)
    if len(named_keys(value)) > MAX_KEYS:
        raise bad("<root>", "condition_too_large", f"at most {MAX_NODES} nodes and {MAX_KEYS} keys")
    return value


def _check_key(key: object, path: str, bad: Any) -> None:
    if check_text(key, "resume_condition") == "":
        raise bad(path, "waitpoint_key_empty", "a non-empty key")


def _check_matcher(matcher: object, path: str, bad: Any) -> None:
    if isinstance(matcher, ByName):
        name = check_text(matcher.name, "resume_condition")
        if name == "":
            raise bad(path, "empty signal name", "a name")
        if name.startswith("__"):
            raise bad(path, "reserved_signal_name", "a name that does not begin with __")
    elif not isinstance(matcher, Wildcard):
        raise bad(path, f"unknown matcher {type(matcher).__name__}", "ByName or Wildcard")
