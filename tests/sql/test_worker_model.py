"""Random histories of the registry, with a clock that moves both ways, against a small program."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.values.worker import Marked, Refreshed, Registered
from tests import sampling
from tests.registry_model import Registry
from tests.support import Clock, Wipe

SQL: TypeAlias = "asyncpg.Connection[Any]"
KEYS = st.tuples(st.sampled_from(["", "x"]), st.sampled_from(["w-1", "w-2"]))
# Whole minutes: a history takes less than one, so that both agree on what is over.
STEPS = st.one_of(
    st.tuples(st.just("register"), KEYS, st.sampled_from(["a", "b"]), st.sampled_from([2, 5])),
    st.tuples(st.just("heartbeat"), KEYS),
    st.tuples(st.just("mark_dead"), KEYS),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("move"), st.sampled_from([1, 1, 2, 3, 5, 9, -1, -4])),
)


async def play(engine: ff.Engine, clock: Clock, step: tuple[Any, ...]) -> Any:
    match step:
        case "register", (namespace, instance), worker_id, ttl:
            try:
                done = await engine.register_worker(
                    worker_id, instance, namespace=namespace, lanes=["l"], liveness_ttl=timedelta(minutes=ttl)
                )
            except ff.InvalidInput:
                return "reassigned"
            return "registered" if isinstance(done, Registered) else "refreshed"
        case "heartbeat", (namespace, instance):
            beat = await engine.heartbeat_worker(instance, namespace=namespace)
            return "refreshed" if isinstance(beat, Refreshed) else "not_registered"
        case "mark_dead", (namespace, instance):
            marked = await engine.mark_worker_dead(instance, namespace=namespace, reason="")
            return "marked" if isinstance(marked, Marked) else "not_registered"
        case ("sweep",):
            return await engine.sweep_workers()
        case "move", minutes:
            await clock.advance(minutes=minutes)
            return None


def expected(model: Registry, step: tuple[Any, ...]) -> Any:
    name, *arguments = step
    if name == "move":
        model.now += arguments[0] * 60
        return None
    if name == "register":
        arguments[2] *= 60
    return getattr(model, name)(*arguments)


@settings(
    max_examples=sampling.examples(300, 25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=st.lists(STEPS, min_size=5, max_size=30))
async def test_a_history_leaves_what_the_model_says(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, history: list[tuple[Any, ...]]
) -> None:
    await (await Wipe.of(sql))()
    model = Registry()
    for place, step in enumerate(history):
        wanted = expected(model, step)
        # The database's clock moves by itself: nothing may end in the moment of a step.
        assert await play(plain_engine, clock, step) == wanted, history[: place + 1]
        for namespace in ("", "x"):
            page = await plain_engine.list_workers(namespace)
            assert [(one.worker_instance_id, one.worker_id) for one in page.items] == model.listed(namespace)
    for (namespace, instance), told in model.told.items():
        found = await plain_engine.list_worker_events(instance, namespace=namespace, limit=1000)
        assert [one.event for one in reversed(found.items) if one.event != "heartbeat"] == told
    assert await plain_engine.audit(events=True) == []
