"""The parts of a worker that need no database: lane shares, threads, interruptions, batches."""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.errors import FlowFabricError, Interrupted, InvalidInput, TransportError
from flowfabric.values.checks import check_worker
from flowfabric.worker import claims
from flowfabric.worker.batching import Batcher
from flowfabric.worker.claims import Claims, Shares, lane_weights
from flowfabric.worker.runners.threads import Interruptible, Threads

PATIENCE = 60.0
WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100), min_size=1)


# Shares


@given(WEIGHTS, st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_shares_fill_the_slots_and_are_never_more_than_one_off_in_the_long_run(
    weights: dict[str, int], limits: list[int]
) -> None:
    shares = Shares(weights)
    given_out: collections.Counter[str] = collections.Counter()
    for limit in limits:
        share = shares.of(limit)
        assert share.keys() == weights.keys()
        assert sum(share.values()) == limit
        assert min(share.values()) >= 0
        given_out.update(share)
    for lane, weight in weights.items():
        assert abs(given_out[lane] - sum(limits) * weight / sum(weights.values())) <= len(weights)


@given(WEIGHTS, st.integers(1, 500))
def test_each_lane_is_first_to_take_leftovers_as_often_as_its_weight_says(weights: dict[str, int], limit: int) -> None:
    shares = Shares(weights)
    first = collections.Counter(next(iter(shares.of(limit))) for _ in range(sum(weights.values())))
    assert first == weights


@pytest.mark.parametrize("lanes", ["default", [], {}, {"a": 0}, {"a": 101}, {"a": True}, {"a": 1.5}, ["a", "\n"]])
def test_lanes_that_make_no_sense_are_refused(lanes: object) -> None:
    with pytest.raises(InvalidInput):
        lane_weights(lanes)  # type: ignore[arg-type]


# Sleeping


class Asleep:
    """A worker without work, in a time of its own: each claim and announcement takes as long as the test says."""

    concurrency, lanes, serving, capabilities, namespace = 10, {"default": 1}, ["a"], frozenset[str](), None
    worker_id = instance_id = "w"
    lease_ttl, poll = timedelta(seconds=30), 1.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.takes = 0.0
        self.reconnects = False
        self.calls: list[str] = []
        self.engine = self.registration = self.listener = self
        self.connections = 1
        monkeypatch.setattr(claims, "time", self)

    def monotonic(self) -> float:
        return self.now

    def due(self) -> None:
        """No heartbeat is due."""

    async def claim_many(self, lane: str, **given: Any) -> list[Any]:
        self.calls.append("claim")
        return []

    async def sleep_for_work(self, lanes: list[str], at_most: timedelta, **given: Any) -> datetime:
        self.calls.append("announce")
        self.announced_until = self.now + min(at_most.total_seconds(), 60.0)  # the database's bound
        self.now += self.takes
        self.connections += self.reconnects
        return datetime.now(UTC)

    async def after_the_second_announcement(self) -> float:
        """Sleep as long as the worker does; returns how long it sleeps after it has announced a second sleep."""
        mine = Claims(self)  # type: ignore[arg-type]
        pause = 0.0
        while self.calls.count("announce") < 2:
            self.now += pause
            assert "announce" not in self.calls or self.now < self.announced_until
            pause = await mine._round(10, True)
        assert self.now + pause < self.announced_until
        return pause


async def test_a_worker_that_announces_its_next_sleep_in_time_does_not_poll_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Asleep(monkeypatch)
    assert await worker.after_the_second_announcement() > 0
    assert worker.calls[:3] == ["claim", "announce", "claim"], "after the first one it does"


@pytest.mark.parametrize("poll", [0.05, 30.0, 59.9, 600.0])
async def test_a_worker_with_any_poll_never_sleeps_without_an_announcement(
    monkeypatch: pytest.MonkeyPatch, poll: float
) -> None:
    worker = Asleep(monkeypatch)
    worker.poll = poll
    assert await worker.after_the_second_announcement() > 0


@pytest.mark.parametrize("why", ["too late", "reconnected"])
async def test_a_worker_whose_announcement_had_a_gap_polls_again(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    worker = Asleep(monkeypatch)
    if why == "too late":
        worker.takes = 0.3
    else:
        worker.reconnects = True
    assert await worker.after_the_second_announcement() == 0


# Threads


async def until(condition: object) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_threads_are_reused_and_never_more_than_allowed() -> None:
    threads = Threads(3)
    names: set[int] = set()
    now = most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            names.add(threading.get_ident())
        time.sleep(0.002)
        with lock:
            now -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(30)))
    assert most == 3
    for _ in range(10):
        await threads.run(work)
    assert len(names) == 3


async def test_a_function_cancelled_before_it_started_never_runs() -> None:
    threads = Threads(1)
    go = threading.Event()
    ran: list[str] = []
    first = asyncio.ensure_future(threads.run(lambda: go.wait(PATIENCE)))
    second = asyncio.ensure_future(threads.run(ran.append, "second"))
    third = asyncio.ensure_future(threads.run(ran.append, "third"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, third)
    assert ran == ["third"]


async def test_a_function_whose_caller_has_left_keeps_no_other_from_running() -> None:
    threads = Threads(1)
    go = threading.Event()
    begun = threading.Event()
    ended: list[str] = []

    def deaf() -> None:
        begun.set()
        go.wait(PATIENCE)
        ended.append("deaf")

    for _ in range(3):
        begun.clear()
        call = asyncio.ensure_future(threads.run(deaf))
        await until(begun.is_set)
        waiting = asyncio.ensure_future(threads.run(ended.append, "waiting"))
        await asyncio.sleep(0)
        call.cancel()
        await waiting
    assert threads.abandoned == 3
    assert await threads.run(lambda: "next") == "next"
    go.set()
    await until(lambda: not threads.abandoned)
    assert sorted(ended) == ["deaf"] * 3 + ["waiting"] * 3
    assert threads._count == 1


async def test_every_exception_comes_out_of_a_thread() -> None:
    threads = Threads(2)

    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), Interrupted(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            await threads.run(fail, error)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(fail, StopIteration())


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns all the time; none collects garbage, in whose callbacks an interruption would be lost."""
    before = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    gc.enable()


async def test_an_interruption_reaches_the_call_it_is_meant_for_and_no_other(restless: None) -> None:
    threads = Threads(2)
    rng = random.Random(7)

    def busy(number: int, seconds: float, begun: threading.Event) -> int:
        begun.set()
        busy_for(seconds)
        return number

    async def one(number: int) -> str:
        call, begun = Interruptible(), threading.Event()
        seconds, later = rng.random() * 0.002, rng.random() * 0.003
        told = number % 2 == 0

        def tell() -> None:  # in the middle, at the very end, after it
            begun.wait(PATIENCE)
            time.sleep(later)
            call.interrupt()
            call.interrupt()

        kwargs = {"number": number, "seconds": seconds, "begun": begun}
        running = asyncio.ensure_future(threads.run(call, busy, kwargs))
        if told:
            await asyncio.to_thread(tell)
        try:
            assert await running == number
        except Interrupted:
            assert told
            return "interrupted"
        return "told too late" if told else "ended"

    ends: collections.Counter[str] = collections.Counter()
    for _ in range(30):
        ends.update(await asyncio.gather(*(one(number) for number in range(10))))
    assert ends["ended"] == 150
    assert ends["interrupted"] > 10
    assert ends["told too late"] > 10


async def test_an_endless_call_is_interrupted_and_one_that_ended_is_not() -> None:
    threads = Threads(1)
    call = Interruptible()
    begun = threading.Event()

    def endless() -> None:
        begun.set()
        while True:
            pass

    running = asyncio.ensure_future(threads.run(call, endless, {}))
    await until(begun.is_set)
    call.interrupt()
    with pytest.raises(Interrupted):
        await running
    call.interrupt()
    over = Interruptible()
    assert await threads.run(over, lambda: 1, {}) == 1
    over.interrupt()
    assert await threads.run(busy_for, 0.01) == "untouched"


def busy_for(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "untouched"


# Batches


class Sent:
    """A batcher whose calls can be held, and what came of them."""

    def __init__(self, limit: int = 1000, lines: int = 1) -> None:
        self.calls: list[list[int]] = []
        self.answers: dict[int, int | FlowFabricError] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: list[Exception] = []
        self.poison: set[int] = set()
        self.batcher: Batcher[int, int] = Batcher(
            "numbers", self._call, self._answered, weigh=self._weigh, limit=limit, lines=lines
        )

    @staticmethod
    def _weigh(item: int) -> int:
        return item << 20

    async def _call(self, items: Sequence[int]) -> list[int | FlowFabricError]:
        self.calls.append(list(items))
        await self.gate.wait()
        if self.fails:
            raise self.fails.pop(0)
        if self.poison & set(items):
            raise TransportError("other", "poison")
        return [item * 2 for item in items]

    def _answered(self, item: int, verdict: int | FlowFabricError) -> None:
        assert item not in self.answers
        self.answers[item] = verdict
        if item == 13:
            raise RuntimeError("the caller is broken")

    def put(self, *items: int) -> None:
        for item in items:
            self.batcher.put(item)


async def test_items_that_arrive_during_a_call_go_with_the_next() -> None:
    sent = Sent()
    sent.gate.clear()
    sent.put(1, 2)
    await until(lambda: sent.calls)
    sent.put(3)
    await asyncio.sleep(0)
    sent.put(4, 5)
    sent.gate.set()
    assert await sent.batcher.flushed(PATIENCE)
    assert sent.calls == [[1, 2], [3, 4, 5]]
    assert sent.answers == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}


@pytest.mark.parametrize("lines", [1, 3])
async def test_calls_are_no_larger_and_no_more_at_a_time_than_allowed(lines: int) -> None:
    sent = Sent(limit=2, lines=lines)
    sent.gate.clear()
    sent.put(*range(9))
    await until(lambda: len(sent.calls) == lines)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(sent.calls) == lines
    sent.gate.set()
    assert await sent.batcher.flushed(PATIENCE)
    assert sorted(itertools.chain(*sent.calls)) == list(range(9))
    assert max(map(len, sent.calls)) == 2


async def test_calls_are_no_heavier_than_allowed_unless_one_item_is() -> None:
    sent = Sent()
    sent.put(10, 6, 1, 100, 3, 14)
    assert await sent.batcher.flushed(PATIENCE)
    assert sent.calls == [[10, 6], [1], [100], [3], [14]]


async def test_one_bad_item_does_not_take_the_others_down() -> None:
    sent = Sent()
    sent.poison = {3}
    sent.put(1, 2, 3, 4)
    assert await sent.batcher.flushed(PATIENCE)
    assert isinstance(sent.answers.pop(3), TransportError)
    assert sent.answers == {1: 2, 2: 4, 4: 8}
    assert sent.calls == [[1, 2, 3, 4], [1], [2], [3], [4]]


async def test_a_call_that_found_no_database_is_made_again_whole(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    sent.fails = [TransportError("transport", "gone"), TransportError("server_busy", "full")]
    sent.put(1, 2)
    assert await sent.batcher.flushed(PATIENCE)
    assert sent.calls == [[1, 2]] * 3
    assert sent.answers == {1: 2, 2: 4}
    assert "numbers: transport: gone; sending 2 items again" in caplog.text


async def test_a_call_that_takes_too_long_is_made_again_in_halves() -> None:
    sent = Sent()
    sent.fails = [TransportError("timeout", "slow"), TransportError("timeout", "slow")]
    sent.put(1, 2, 3, 4, 5)
    assert await sent.batcher.flushed(PATIENCE)
    assert sent.calls == [[1, 2, 3, 4, 5], [1, 2], [1], [2], [3, 4, 5]]
    assert sent.answers == {n: 2 * n for n in range(1, 6)}


async def test_an_unexpected_exception_is_a_verdict_too(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    sent.fails = [KeyError("x"), KeyError("y")]
    sent.put(1, 2)
    assert await sent.batcher.flushed(PATIENCE)
    assert isinstance(sent.answers[1], TransportError)
    assert sent.answers[2] == 4


async def test_a_failing_receiver_of_a_verdict_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    sent.put(1, 13, 2)
    assert await sent.batcher.flushed(PATIENCE)
    sent.put(15)
    assert await sent.batcher.flushed(PATIENCE)
    assert sent.answers[15] == 30
    assert "handling the response failed" in caplog.text


async def test_closing_gives_open_waiting_and_later_items_an_error() -> None:
    sent = Sent(limit=1)
    sent.gate.clear()
    sent.put(1, 2, 3)
    await until(lambda: sent.calls)
    assert not await sent.batcher.flushed(0.01)
    sent.batcher.close()
    sent.put(4)
    assert await sent.batcher.flushed(PATIENCE)
    assert [type(sent.answers[item]) for item in (1, 2, 3, 4)] == [TransportError] * 4
    assert sent.calls == [[1]]


@pytest.mark.parametrize("turns", [0, 1])
async def test_closing_gives_an_item_put_just_before_an_error(turns: int) -> None:
    sent = Sent()
    sent.put(1)
    for _ in range(turns):
        await asyncio.sleep(0)
    sent.batcher.close()
    assert await sent.batcher.flushed(PATIENCE)
    assert isinstance(sent.answers[1], TransportError)
    assert sent.calls == []


def test_a_worker_refuses_arguments_that_it_does_not_have_by_name() -> None:
    app = ff.App()
    for make, field, words in (
        (lambda: ff.Worker(app, concurency=5), "concurency", "did you mean 'concurrency'?"),  # type: ignore[call-arg]
        (lambda: ff.Worker(app, slots=5), "slots", "is not an argument"),  # type: ignore[call-arg]
        (lambda: ff.Worker(app, ["slow"]), "arguments", "too many positional"),  # type: ignore[misc]
        (lambda: ff.Worker(), "arguments", "missing a required argument: 'app'"),  # type: ignore[call-arg]
    ):
        with pytest.raises(ff.InvalidInput) as refused:
            make()
        assert refused.value.field == field
        assert words in str(refused.value)
        assert "concurrency" in str(refused.value.allowed)


@pytest.mark.parametrize("name", ["my agent", "a|b", "tab\tbed", "ü" * 128])
def test_any_name_of_an_app_makes_the_name_of_a_worker(name: str) -> None:
    worker = ff.Worker(ff.App(name=name))
    assert check_worker(worker.worker_id)
    assert check_worker(worker.instance_id)
