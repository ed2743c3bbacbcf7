"""`ff.all_settled`: a join that runs when all have ended, and gets outcomes instead of results."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric import drawing
from flowfabric.testing import Kit
from tests.integration.conftest import Ledger
from tests.integration.test_codecs import Sealed

HOUR = timedelta(hours=1)


class Tasks:
    """One task for each way to end, and one that tells how others ended."""

    def __init__(self, app: ff.App) -> None:
        @app.task
        async def double(n: int) -> int:
            return 2 * n

        @app.task
        async def boom(words: str = "no good") -> int:
            raise ValueError(words)

        @app.task
        async def nap(ctx: ff.Context, hours: int) -> int:
            await ctx.sleep(hours * HOUR)
            return hours

        @app.task
        async def tell(outcomes: list[ff.Settled[int]]) -> list[str]:
            told = []
            for one in outcomes:
                match one:
                    case ff.Succeeded(value):
                        told.append(f"{value + 0}")
                    case ff.Failed(message, error_type, category):
                        told.append(f"failed {error_type}: {message} ({category})")
                    case ff.Expired(message, _, category):
                        told.append(f"expired: {message} ({category})")
                    case ff.Cancelled(reason):
                        told.append(f"cancelled: {reason}")
                    case ff.Skipped():
                        told.append("skipped")
            return told

        self.double, self.boom, self.nap, self.tell = double, boom, nap, tell


@pytest.fixture
def tasks(kit_app: ff.App) -> Tasks:
    return Tasks(kit_app)


async def ended(kit: Kit, run: ff.FlowRun) -> dict[str, Any]:
    """The results of the nodes that succeeded."""
    with pytest.raises(ff.FlowFailed) as caught:
        await kit.run_until_ended(run)
    return caught.value.results


async def test_the_join_gets_every_kind_of_end_in_the_order_given(kit: Kit, kit_app: ff.App, tasks: Tasks) -> None:
    flow = kit_app.flow("all ends")
    bad = flow.add(tasks.boom)
    nodes = [
        flow.add(tasks.double, 4),
        bad,
        flow.add(tasks.double, bad, name="behind"),
        flow.add(tasks.nap, 2, deadline=HOUR, name="late"),
        flow.add(tasks.nap, 3, name="unwanted"),
    ]
    flow.add(tasks.tell, ff.all_settled(nodes))
    flow.add(tasks.double, 5, after=ff.all_settled(nodes[1:3]), name="clean up")
    run = await flow.submit()
    await run["unwanted"].cancel("not needed")
    results = await ended(kit, run)
    assert results["tell"] == [
        "8",
        "failed ValueError: no good (ValueError)",
        "skipped",
        "expired: execution_deadline (timeout)",
        "cancelled: not needed",
    ]
    assert results["clean up"] == 10
    text = "\n".join(drawing.plain(line) for line in drawing.to_text(await run.graph()))
    assert "after all 5 settled: " in text


async def test_reasons_are_opened_with_the_apps_codecs(kit: Kit) -> None:
    app = ff.App("postgresql://nobody@nowhere/nothing", codecs=[Sealed()], accept_plain=False)
    kit.use(app)
    tasks = Tasks(app)
    flow = app.flow("sealed")
    flow.add(tasks.tell, ff.all_settled(flow.add(tasks.boom, "a secret"), flow.add(tasks.double, 1)))
    assert (await ended(kit, await flow.submit()))["tell"] == ["failed ValueError: a secret (ValueError)", "2"]


async def test_of_one_node_that_did_not_succeed_a_plain_argument_is_none(
    kit: Kit, kit_app: ff.App, tasks: Tasks
) -> None:
    @kit_app.task
    async def show(value: Any) -> Any:
        return value

    flow = kit_app.flow("plain")
    bad, good = flow.add(tasks.boom), flow.add(tasks.double, 1)
    flow.add(show, {"one": bad, "list": [bad, good]}, after=ff.all_settled(bad, good))
    flow.add(show, bad, after=ff.all_settled(bad, good), name="none")
    results = await ended(kit, await flow.submit())
    assert (results["show"], results["none"]) == ({"list": [2]}, None)


async def test_every_attempt_gets_the_same_outcomes_while_an_upstream_is_replayed_and_a_replay_the_newest(
    kit: Kit, kit_app: ff.App, tasks: Tasks, did: Ledger
) -> None:
    works: list[int] = []

    @kit_app.task
    async def flaky() -> int:
        if not works:
            raise ValueError("not yet")
        return works.pop()

    @kit_app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(HOUR)))
    async def join(ctx: ff.Context, outcomes: list[ff.Settled[int]]) -> None:
        did.append(str([type(one).__name__ for one in outcomes]))
        if ctx.retry_count == 0 and ctx.replay_count == 0:
            works.append(7)
            client = await kit_app.client()
            await client.replay(flow_run.nodes["flaky"])
            raise ValueError("once more")

    flow = kit_app.flow("again")
    flow.add(join, ff.all_settled(flow.add(flaky), flow.add(tasks.double, 1)))
    flow_run = await flow.submit()
    await kit.run_until_ended(flow_run)
    assert did == ["['Failed', 'Succeeded']"] * 2
    await flow_run["join"].replay()
    await kit.run_until_ended(flow_run)
    assert did[2:] == ["['Succeeded', 'Succeeded']"]


async def test_a_replayed_join_waits_again_for_upstreams_that_run_again_and_not_for_those_that_failed(
    kit: Kit, kit_app: ff.App, tasks: Tasks
) -> None:
    flow = kit_app.flow("again")
    nodes = [flow.add(tasks.boom, "first"), flow.add(tasks.boom, "second")]
    flow.add(tasks.tell, ff.all_settled(nodes))
    run = await flow.submit()
    await run["tell"].cancel("too early")
    await ended(kit, run)
    # Replayed alone it does not wait for ends that are long past.
    await run["tell"].replay()
    assert (await ended(kit, run))["tell"] == [f"failed ValueError: {one} (ValueError)" for one in ("first", "second")]
    # Together with one of them it waits for that one.
    await run["boom"].replay()
    await run["tell"].replay()
    assert (await run.states())["tell"] is ff.State.WAITING_CHILDREN
    assert len((await ended(kit, run))["tell"]) == 2


async def test_a_flow_is_replayed_with_its_joins(kit: Kit, kit_app: ff.App, tasks: Tasks) -> None:
    corrected: list[bool] = []

    @kit_app.task
    async def careful(outcomes: list[ff.Settled[int]]) -> int:
        if not corrected:
            raise ValueError("cannot tell yet")
        return sum(isinstance(one, ff.Succeeded) for one in outcomes)

    @kit_app.task
    async def flaky() -> int:
        if not corrected:
            raise ValueError("not yet")
        return 1

    flow = kit_app.flow("all again")
    flow.add(careful, ff.all_settled(flow.add(flaky), flow.add(tasks.double, 1)))
    run = await flow.submit()
    await ended(kit, run)
    corrected.append(True)
    assert sorted(await run.replay()) == ["careful", "flaky"]
    assert (await kit.run_until_ended(run))["careful"] == 2


async def test_a_task_adds_a_join_after_nodes_that_have_ended(kit: Kit, kit_app: ff.App, tasks: Tasks) -> None:
    @kit_app.task
    async def grow(ctx: ff.Context, ids: list[str]) -> None:
        flow = ctx.flow()
        flow.add(tasks.tell, ff.all_settled([flow.member(one) for one in ids], flow.add(tasks.double, 3)))
        await flow.submit()

    flow = kit_app.flow("growing")
    nodes = [flow.add(tasks.boom), flow.add(tasks.double, 1)]
    run = await flow.submit()
    await ended(kit, run)
    more = ff.Flow(kit_app, "growing", grows=run.flow_id)
    more.add(grow, [run.nodes[node.name].__str__() for node in nodes])
    await more.submit()
    assert (await ended(kit, await run.refresh()))["tell"] == ["failed ValueError: no good (ValueError)", "2", "6"]
