"""The shortest way through the engine."""

import pytest

from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import STATES, CheckedEngine, Clock, claim_one, submit


async def test_an_execution_is_created_claimed_and_completed(engine: CheckedEngine) -> None:
    created = await submit(engine, input_payload=b"in")
    claimed = await claim_one(engine)
    assert claimed.execution_id == created
    assert claimed.input_payload == b"in"
    await engine.complete(claimed.handle, b"out")
    assert await engine.get_execution_result(created) == b"out"


@pytest.mark.parametrize("name", STATES)
async def test_every_state_can_be_reached(engine: CheckedEngine, clock: Clock, name: str) -> None:
    await STATES[name](engine, clock)
