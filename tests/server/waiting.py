"""Executions that wait, made by the engine, for tests that answer over HTTP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.callback import callback_text
from flowfabric.values.conditions import Condition, from_sources, named_keys, on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.wait import BoundWaitpoint
from tests.support import claim_one, submit

DECISION = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
TWO_PEOPLE = from_sources(2, "approval", name="approved")


class Waiting:
    """A task that waits, and its waitpoints by key."""

    def __init__(self, held: Claimed, points: dict[str, BoundWaitpoint]) -> None:
        self.held = held
        self.id = held.execution_id
        self.points = points

    @property
    def path(self) -> str:
        return f"/v1/executions/{self.id}"

    def callback(self, key: str = "approval") -> str:
        point = self.points[key]
        return callback_text(self.id, point.waitpoint_id, point.waitpoint_token)

    def link(self, key: str = "approval") -> str:
        return f"/w/{self.callback(key)}"


async def wait(
    engine: ff.Engine,
    condition: Condition | None = None,
    *,
    schema: str | None = None,
    timeout: timedelta | None = None,
    is_suspended: bool = True,
    **fields: Any,
) -> Waiting:
    """Start an execution and let it wait."""
    lane = f"lane-{mint_uuid().hex}"  # nobody else claims there
    await submit(engine, lane_id=lane, **fields)
    held = await claim_one(engine, lane_id=lane)
    chosen = on("approval") if condition is None else condition
    opened = await engine.open_wait(held.handle, "w", 0, named_keys(chosen), timeout, schema)
    if is_suspended:
        ids = [one.waitpoint_id for one in opened.waitpoints]
        await engine.suspend_on(held.handle, ids, chosen, reason_code="waiting_for_approval", timeout_at=timeout)
    return Waiting(held, {one.waitpoint_key: one for one in opened.waitpoints})


async def state_of(engine: ff.Engine, waiting: Waiting) -> str:
    found = await engine.read_execution(waiting.id)
    assert found is not None
    return found.public_state.value
