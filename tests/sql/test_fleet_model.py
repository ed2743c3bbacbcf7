"""Random histories of a fleet, with a clock that moves both ways: what readers see of waiting executions."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any, TypeAlias

import asyncpg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests import sampling
from tests.registry_model import Registry
from tests.support import WORKER, Clock, Wipe, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
NEEDS = [(), ("gpu",), ("asr",), ("asr", "gpu")]
LANES = ["a", "b"]
KINDS = ["x", "y"]
SPACES = ["", "n"]
HAVE = st.tuples(
    st.sampled_from([(), ("gpu",), ("asr",), ("asr", "gpu", "more")]),
    st.sampled_from([("a",), ("b",), ("a", "b")]),
    st.sampled_from([None, ("x",), ("x", "y"), ("z",)]),
)
KEYS = st.tuples(st.sampled_from(SPACES), st.sampled_from(["w-1", "w-2", "w-3"]))
STEPS = st.one_of(
    st.tuples(st.just("register"), KEYS, HAVE, st.sampled_from([2, 5])),
    st.tuples(st.just("register"), KEYS, HAVE, st.sampled_from([2, 5])),
    st.tuples(st.just("mark_dead"), KEYS),
    st.tuples(st.just("heartbeat"), KEYS),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("claim"), st.sampled_from(LANES)),
    st.tuples(st.just("judge")),
    st.tuples(st.just("move"), st.sampled_from([1, 2, 3, 6, -1, -4])),
)
Have: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...] | None]


class Fleet:
    """The registry, and what each worker serves."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.have: dict[tuple[str, str], Have] = {}

    def covers(self, lane: str, kind: str, needs: tuple[str, ...], namespace: str) -> bool:
        for key, (capabilities, lanes, kinds) in self.have.items():
            if self.registry.live(key) is None or key[0] not in ("", namespace):
                continue
            if lane in lanes and (kinds is None or kind in kinds) and set(needs) <= set(capabilities):
                return True
        return False


async def play(engine: ff.Engine, clock: Clock, fleet: Fleet, step: tuple[Any, ...]) -> None:
    registry = fleet.registry
    match step:
        case "register", (namespace, instance), (capabilities, lanes, kinds), ttl:
            await engine.register_worker(
                "w", instance, namespace=namespace, lanes=lanes, capabilities=capabilities, kinds=kinds,
                liveness_ttl=timedelta(minutes=ttl),
            )  # fmt: skip
            registry.register((namespace, instance), "w", ttl * 60)
            fleet.have[namespace, instance] = capabilities, lanes, kinds
        case "mark_dead", (namespace, instance):
            await engine.mark_worker_dead(instance, namespace=namespace, reason="")
            registry.mark_dead((namespace, instance))
        case "heartbeat", (namespace, instance):
            await engine.heartbeat_worker(instance, namespace=namespace)
            registry.heartbeat((namespace, instance))
        case ("sweep",):
            await engine.sweep_workers()
            registry.sweep()
        case "claim", lane:
            assert await engine.claim(lane, **WORKER, kinds=["none of these"]) is None
        case ("judge",):
            await engine.judge_routes()
        case "move", minutes:
            await clock.advance(minutes=minutes)
            registry.now += minutes * 60


@settings(
    max_examples=sampling.examples(200, 20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=st.lists(STEPS, min_size=4, max_size=25))
async def test_an_execution_is_shown_as_blocked_only_while_no_live_worker_covers_it(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, history: list[tuple[Any, ...]]
) -> None:
    await (await Wipe.of(sql))()
    routes = list(product(LANES, KINDS, NEEDS, SPACES))
    made = {
        await submit(
            plain_engine, lane_id=lane, execution_kind=kind, namespace=space,
            policy=ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=needs)),
        ): (lane, kind, needs, space)
        for lane, kind, needs, space in routes
    }  # fmt: skip
    fleet = Fleet()
    went_back = False
    for place, step in enumerate(history):
        await play(plain_engine, clock, fleet, step)
        went_back = (step[0] == "move" and step[1] < 0) or (went_back and step[0] != "judge")
        page = await plain_engine.find_executions(limit=1000)
        blocked = {
            made[one.execution_id] for one in page.items if one.state_vector.eligibility_state == "blocked_by_route"
        }
        assert not [route for route in blocked if not route[2]], "without a requirement nothing is judged"
        uncovered = {route for route in routes if route[2] and not fleet.covers(*route)}
        # A worker that lapsed is alive again after the clock was set back; the duty notices.
        assert went_back or blocked <= uncovered, history[: place + 1]
        if step[0] == "judge":
            assert blocked == uncovered, history[: place + 1]
        assert await plain_engine.audit() == []
