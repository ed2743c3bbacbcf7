"""The random histories of the models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.dice import Step, histories


def test_a_history_that_fails_is_printed_without_the_steps_that_are_nothing() -> None:
    @settings(max_examples=50, database=None)
    @given(steps=histories(("a", "b"), 6))
    def fails(steps: list[Step]) -> None:
        assert "b" not in [name for name, _ in steps]

    with pytest.raises(AssertionError) as failed:
        fails()
    assert "steps = [('b', [])]" in failed.value.__notes__
