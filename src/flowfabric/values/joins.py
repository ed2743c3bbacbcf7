"""How the upstreams of a node join: all of them, any of them, a quorum, or all once they have ended."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias

from msgspec import Struct

from flowfabric.errors import InvalidInput

MAX_QUORUM = 2**31 - 1


class OnSatisfied(StrEnum):
    """Whether the upstreams that a decided join no longer needs are cancelled."""

    CANCEL_REMAINING = "cancel_remaining"
    LET_RUN = "let_run"


class AllOf(Struct, frozen=True):
    """Every upstream has to succeed."""


class AnyOf(Struct, frozen=True):
    """One upstream has to succeed."""

    on_satisfied: OnSatisfied = OnSatisfied.CANCEL_REMAINING


class Quorum(Struct, frozen=True):
    """`k` upstreams have to succeed."""

    k: int
    on_satisfied: OnSatisfied = OnSatisfied.CANCEL_REMAINING


class AllSettled(Struct, frozen=True):
    """Every upstream has to end, with or without success."""


EdgeGroupPolicy: TypeAlias = AllOf | AnyOf | Quorum | AllSettled


def policy_from_json(value: Mapping[str, Any], field: str = "policy") -> EdgeGroupPolicy:
    """Read a policy from its wire form: `{"kind": "all_of"}` and so on."""
    kind = value.get("kind")
    rest = value.get("on_satisfied", OnSatisfied.CANCEL_REMAINING)
    match kind:
        case "all_of":
            return AllOf()
        case "any_of":
            return check_policy(AnyOf(rest), field)
        case "quorum":
            return check_policy(Quorum(value.get("k"), rest), field)  # type: ignore[arg-type]
        case "all_settled":
            return AllSettled()
    raise InvalidInput(f"got kind {kind!r}", field=field, allowed="all_of, any_of, quorum, all_settled")


def policy_to_json(policy: EdgeGroupPolicy) -> dict[str, Any]:
    """The wire form of a policy."""
    match policy:
        case AllOf():
            return {"kind": "all_of"}
        case AnyOf(on_satisfied):
            return {"kind": "any_of", "on_satisfied": str(on_satisfied)}
        case Quorum(k, on_satisfied):
            return {"kind": "quorum", "k": k, "on_satisfied": str(on_satisfied)}
        case AllSettled():
            return {"kind": "all_settled"}


def policy_columns(policy: EdgeGroupPolicy) -> tuple[str, int | None, bool]:
    """The stored form of a policy: kind, required successes, and whether the rest is cancelled."""
    match policy:
        case AllOf():
            return "all_of", None, False
        case AnyOf(on_satisfied):
            return "any_of", 1, on_satisfied == OnSatisfied.CANCEL_REMAINING
        case Quorum(k, on_satisfied):
            return "quorum", k, on_satisfied == OnSatisfied.CANCEL_REMAINING
        case AllSettled():
            return "all_settled", None, False


def check_policy(value: object, field: str = "policy") -> EdgeGroupPolicy:
    """Return the policy, or raise `InvalidInput`."""
    if isinstance(value, Mapping):
        return policy_from_json(value, field)
    if type(value) not in (AllOf, AnyOf, Quorum, AllSettled):
        raise InvalidInput(
            f"got {type(value).__name__}",
            field=field,
            allowed="AllOf(), AnyOf(on_satisfied), Quorum(k, on_satisfied) or AllSettled()",
        )
    if isinstance(value, AllOf | AllSettled):
        return value
    assert isinstance(value, AnyOf | Quorum)
    try:
        rest = OnSatisfied(value.on_satisfied)
    except ValueError:
        raise InvalidInput(
            f"got {value.on_satisfied!r}", field=f"{field}.on_satisfied", allowed=", ".join(OnSatisfied)
        ) from None
    if isinstance(value, AnyOf):
        return AnyOf(rest)
    if type(value.k) is not int or not 1 <= value.k <= MAX_QUORUM:
        raise InvalidInput(f"got {value.k!r}", field=f"{field}.k", allowed=f"an integer from 1 to {MAX_QUORUM}")
    return Quorum(value.k, rest)
