"""The words in which a worker says why an execution is not its own any more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowfabric.errors import ExecutionNotActive
from flowfabric.values.ids import mint_uuid
from flowfabric.worker import told

NOW = datetime(2030, 1, 1, tzinfo=UTC)
OWN, LATER = mint_uuid(), mint_uuid()


@pytest.mark.parametrize(
    ("outcome", "attempt", "timeout", "words"),
    [
        ("success", OWN, None, "it was completed elsewhere"),
        ("cancelled", None, NOW, "it was cancelled"),
        ("success", LATER, NOW, "its attempt timed out"),
        ("failed", LATER, NOW, "its attempt timed out"),
        ("success", LATER, NOW + timedelta(1), "it was moved on by another process"),
        ("none", OWN, NOW, "its attempt timed out"),
    ],
)
def test_the_end_of_a_later_attempt_did_not_end_this_one(
    outcome: str, attempt: object, timeout: datetime | None, words: str
) -> None:
    running = cast(
        "Any",
        SimpleNamespace(
            claimed=SimpleNamespace(attempt_timeout_at=timeout, deadline_at=None),
            handle=SimpleNamespace(attempt_id=OWN),
            database_now=lambda: NOW,
        ),
    )
    error = ExecutionNotActive(
        "", execution_id=mint_uuid(), terminal_outcome=outcome, lease_epoch=1, lifecycle_phase="terminal",
        attempt_id=attempt,
    )  # fmt: skip
    assert told.why_stopped(running, error) == words
