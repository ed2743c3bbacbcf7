"""The fleet as workers, schedulers and people meet it: namespaces, grants, capacity, and what nobody covers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric._duties import Unblock
from flowfabric.errors import Contention, Unavailable, WorkerAtCapacity
from flowfabric.values.grant import Granted, ReclaimGranted
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock, claim_one, submit
from tests.until import until

GPU = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))


class Doors:
    """Handlers that run until the test lets them."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.inside: list[str] = []


def make_app(dsn: str, doors: Doors) -> ff.App:
    app = ff.App(dsn, name="shop")

    @app.task
    async def work(name: str = "") -> str:
        doors.inside.append(name)
        await doors.open.wait()
        return name

    @app.task
    async def other() -> None: ...

    return app


async def test_a_worker_with_a_namespace_runs_only_its_own_and_says_so(plain_engine: ff.Engine, database: str) -> None:
    doors = Doors()
    doors.open.set()
    app = make_app(database, doors)
    foreign = [await app.tasks["work"].options(namespace=name).submit(name) for name in ("", "beta")]
    async with ff.Worker(app, namespace="acme", duties=False) as worker:
        run = await app.tasks["work"].options(namespace="acme").submit("acme")
        assert await run.result() == "acme"
        (found,) = (await plain_engine.list_workers("acme")).items
        assert (found.worker_instance_id, found.namespace) == (worker.instance_id, "acme")
        assert doors.inside == ["acme"]
    assert (await plain_engine.list_workers("acme")).items == []
    assert [await one.state() for one in foreign] == ["waiting", "waiting"]
    await app.close()


@pytest.mark.parametrize("namespace", ["", 5, "\0", "x" * 257])
def test_a_namespace_that_is_none_is_refused_by_name(namespace: Any) -> None:
    with pytest.raises(ff.InvalidInput, match="namespace"):
        ff.Worker(ff.App(), namespace=namespace)


async def grant(engine: ff.Engine, worker: ff.Worker, **fields: Any) -> Any:
    return await engine.claim_for_worker(
        "granted", worker_id=worker.worker_id, worker_instance_id=worker.instance_id, **fields
    )


async def test_a_worker_without_a_free_slot_refuses_a_grant_that_stays_good(
    plain_engine: ff.Engine, database: str
) -> None:
    doors = Doors()
    app = make_app(database, doors)
    runs = [await app.tasks["work"].options(lane="granted").submit(name) for name in ("a", "b")]
    async with ff.Worker(app, lanes=["default"], concurrency=1, duties=False) as worker:
        first, second = [await grant(plain_engine, worker, grant_ttl=timedelta(minutes=1)) for _ in range(2)]
        assert await worker.claim_from_grant(first) == runs[0].execution_id
        await until(lambda: doors.inside == ["a"])
        with pytest.raises(WorkerAtCapacity) as full:
            await worker.claim_from_grant(second)
        assert (full.value.slots, full.value.execution_id, full.value.error_class) == (
            1, runs[1].execution_id, "retryable",
        )  # fmt: skip
        assert await plain_engine.verify_grant(runs[1].execution_id, second.grant.grant_key) == "ok"
        doors.open.set()
        assert await runs[0].result() == "a"
        await until(lambda: not worker._running)
        assert await worker.claim_from_grant(second.grant) == runs[1].execution_id
        assert await runs[1].result() == "b"
    await app.close()


async def test_slots_that_are_being_consumed_count(plain_engine: ff.Engine, database: str) -> None:
    doors = Doors()
    app = make_app(database, doors)
    for name in "abc":
        await app.tasks["work"].options(lane="granted").submit(name)
    async with ff.Worker(app, lanes=["default"], concurrency=2, duties=False) as worker:
        grants = await grant(plain_engine, worker, max_grants=3)
        found = await asyncio.gather(*(worker.claim_from_grant(one) for one in grants), return_exceptions=True)
        assert [type(one).__name__ for one in found] == ["UUID", "UUID", "WorkerAtCapacity"]
        doors.open.set()
    await app.close()


async def test_a_worker_takes_over_and_continues_by_grant(plain_engine: ff.Engine, database: str) -> None:
    doors = Doors()
    doors.open.set()
    app = make_app(database, doors)
    lost = await app.tasks["work"].options(lane="granted").submit("lost")
    await plain_engine.revoke_lease((await claim_one(plain_engine, lane_id="granted")).execution_id)
    async with ff.Worker(app, lanes=["default"], duties=False) as worker:
        outcome = await grant(plain_engine, worker)
        assert isinstance(outcome, ReclaimGranted)
        await worker.claim_from_grant(outcome)
        assert await lost.result() == "lost"
        with pytest.raises(Contention, match="invalid_claim_grant"):
            await worker.claim_from_grant(outcome)

        given_back = await app.tasks["work"].options(lane="granted").submit("given back")
        await plain_engine.release((await claim_one(plain_engine, lane_id="granted")).handle)
        outcome = await grant(plain_engine, worker)
        assert isinstance(outcome, Granted)
        await worker.claim_from_grant(outcome)
        assert await given_back.result() == "given back"
    with pytest.raises(Unavailable, match="claim_from_grant"):
        await worker.claim_from_grant(outcome)
    await app.close()


async def test_a_grant_for_a_task_that_the_worker_does_not_have_is_given_back(
    plain_engine: ff.Engine, database: str
) -> None:
    app = make_app(database, Doors())
    target = await submit(plain_engine, execution_kind="unknown", lane_id="granted")
    async with ff.Worker(app, lanes=["default"], duties=False) as worker:
        with pytest.raises(ff.InvalidInput, match="is for unknown, which this worker does not run"):
            await worker.claim_from_grant(await grant(plain_engine, worker))
        with pytest.raises(ff.InvalidInput, match="grant"):
            await worker.claim_from_grant(target)  # type: ignore[arg-type]
        assert worker._claims.free_slots == worker.concurrency
    assert await plain_engine.read_execution_state(target) == "waiting"
    await app.close()


async def test_the_duty_stores_what_no_live_worker_covers(plain_engine: ff.Engine) -> None:
    target = await submit(plain_engine, policy=GPU)
    duty = Unblock(plain_engine)
    assert await duty.run_once() == 1
    assert await duty.run_once() == 0
    found = await plain_engine.read_execution(target)
    assert found is not None
    assert found.state_vector.eligibility_state == "blocked_by_route"


async def test_people_see_what_no_live_worker_covers(plain_engine: ff.Engine, database: str, clock: Clock) -> None:
    target = await submit(plain_engine, execution_kind="render", lane_id="video", policy=GPU)
    await submit(plain_engine, execution_kind="render", lane_id="video", policy=GPU, namespace="acme")
    await plain_engine.register_worker(
        "w", "w-1", lanes=["video"], capabilities=["gpu"], namespace="acme", liveness_ttl=timedelta(days=1)
    )
    await plain_engine.judge_routes()
    said = await call("workers", dsn=database)
    assert "Waiting for a worker that is not there" in said.out
    assert "render" in said.out
    (route,) = (await call("workers", "--json", dsn=database)).json["uncovered"]
    assert (route["kind"], route["lane_id"], route["capabilities"]) == ("render", "video", ["gpu"])
    assert (route["served"], route["waiting"]) == (["acme"], 1)
    findings = {one["check"]: one for one in (await call("doctor", "--json", dsn=database, code=1)).json["findings"]}
    assert findings["tasks"]["detail"] == "no live worker serves render in lane video with gpu"
    assert "--capability" in findings["tasks"]["advice"]
    shown = (await call("show", target, dsn=database)).out
    assert "no live worker serves render in lane video with gpu (1 alive" in shown
    assert "because" not in shown, "said once"
    assert "no live worker covers 1 of these" in (await call("ls", dsn=database)).err
    await call("lanes", "pause", "video", dsn=database)
    shown = (await call("show", target, dsn=database)).out
    assert "lane video is paused; start it with" in shown
    assert "because" not in shown
    assert "2 of these wait in a lane that hands out no work" in (await call("ls", dsn=database)).err


async def test_capabilities_tell_that_grants_for_workers_exist() -> None:
    assert ff.Engine.capabilities()["supports"]["claim_for_worker"] is True
