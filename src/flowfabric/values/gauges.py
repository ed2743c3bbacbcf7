"""The numbers of a whole deployment at one moment, for monitors."""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec import Struct

from flowfabric.values.held import Denials


class LaneGauge(Struct, frozen=True, kw_only=True):
    """A lane: how many executions wait in it for a worker, and for how long the oldest of them has existed."""

    lane_id: str
    depth: int
    oldest_age: timedelta


class Gauges(Struct, frozen=True, kw_only=True):
    """The numbers of a deployment. Counts are exact up to the limit of the call; above it they say the limit.

    `states` has those that can be counted without reading all executions: `waiting` (for a worker), `active`,
    `delayed`, `suspended`, `waiting_children` (without members of flows), `rate_limited`, and the unsuccessful ends.
    `blocked` counts by blocking reason. `denials` is what `Engine.read_denials` returns, up to a few seconds late.
    """

    at: datetime
    lanes: tuple[LaneGauge, ...]
    states: dict[str, int]
    blocked: dict[str, int]
    workers: int
    slots: int
    cancelling_flows: int
    denials: Denials
