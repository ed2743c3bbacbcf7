"""Policies in JSON: durations in seconds, and names of the user's own as they are."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.contracts.policy_form import shown_policy, stored_policy
from flowfabric.errors import InvalidInput

STORED: dict[str, Any] = {
    "delay_until": 1_893_456_000_000,
    "timeout_policy": {"attempt_timeout_ms": 1500},
    "budget": {"hard": {"timeout_ms": 5, "tokens": 7}, "soft": {"delay_ms": 3}},
    "tags": {"every_ms": "x"},
}
SHOWN: dict[str, Any] = {
    "delay_until": "2030-01-01T00:00:00Z",
    "timeout_policy": {"attempt_timeout_seconds": 1.5},
    "budget": {"hard": {"timeout_ms": 5, "tokens": 7}, "soft": {"delay_ms": 3}},
    "tags": {"every_ms": "x"},
}


def test_durations_are_in_seconds_and_own_names_stay() -> None:
    assert shown_policy(STORED) == SHOWN
    assert stored_policy(SHOWN) == STORED


@pytest.mark.parametrize("policy", [{"delay_until": 10**18}, {"delay_until": -(10**30)}, {"delay_ms": 10**400}])
def test_numbers_of_members_that_the_engine_does_not_know_are_shown_as_they_are(policy: dict[str, Any]) -> None:
    assert shown_policy({"own": policy}) == {"own": policy}


@pytest.mark.parametrize("value", ["5", True, -1, 1e300, float("nan"), float("inf")])
def test_a_duration_that_is_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        stored_policy({"timeout_policy": {"attempt_timeout_seconds": value}})
    assert refused.value.field == "policy.timeout_policy.attempt_timeout_seconds"


def test_milliseconds_are_refused_with_the_name_of_the_member_to_use() -> None:
    with pytest.raises(InvalidInput, match="attempt_timeout_seconds"):
        stored_policy({"timeout_policy": {"attempt_timeout_ms": 5}})
