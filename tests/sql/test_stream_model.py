"""Random histories of streams beside a model in Python.

Appends of all modes by current and stale holders, clock steps, ends and new attempts, and readers that stop anywhere
and resume.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.stream import Appended, BestEffortLive, DurableSummary, Frame, NewFrame, Position, parse_position
from tests import sampling
from tests.sql.cases import World
from tests.sql.test_streams import merged, unmasked
from tests.support import OTHER, claim_one, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
CAP = 12
LIVE_CAP = 6
TTL = timedelta(hours=10)
LIVE = BestEffortLive(ttl=TTL, maxlen_floor=LIVE_CAP, maxlen_ceiling=LIVE_CAP)
POLICY = ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=CAP), max_reclaim_count=1000)
STEPS = 60


@dataclass
class Stream:
    """What a stream should hold."""

    frames: list[tuple[Position, str, bytes]] = field(default_factory=list)
    document: Any = field(default_factory=dict)
    closed: str | None = None

    def visible(self) -> list[tuple[Position, str, bytes]]:
        keep = {"durable": CAP, "summary": 64, "best_effort": LIVE_CAP}
        found: list[tuple[Position, str, bytes]] = []
        for one in reversed(self.frames):
            if keep[one[1]] > 0:
                keep[one[1]] -= 1
                found.append(one)
        return found[::-1]


def position(text: str) -> Position:
    return parse_position(text, "id")


class History:
    """One execution, its attempts, and the same in the model."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.engine = world.engine
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.held: list[Claimed] = []
        self.said = 0
        self.read: dict[int, list[tuple[Position, str, bytes]]] = {}
        self.now = self.high = 0.0

    async def move(self, seconds: float) -> None:
        """Move the clock, but not before the start."""
        seconds = max(seconds, -self.now)
        self.now += seconds
        self.high = max(self.high, self.now)
        await self.world.clock.advance(seconds=seconds)

    @property
    def current(self) -> Stream:
        return self.streams[-1]

    async def begin(self) -> None:
        self.held.append(await started(self.engine, policy=POLICY, lease_ttl=timedelta(days=30)))
        self.streams.append(Stream())

    def frame(self) -> NewFrame:
        self.said += 1
        match self.random.choice(["durable", "durable", "summary", "best_effort"]):
            case "summary":
                value = self.random.choice(
                    [self.said, None, {"x": self.said}, "__ff_null__", [None, "__ff_null__"], {}]
                )
                patch = {self.random.choice("abc"): value, "n": self.said}
                return NewFrame(payload=json.dumps(patch).encode(), mode=DurableSummary())
            case "best_effort":
                return NewFrame(payload=b"l%d" % self.said, mode=LIVE)
            case _:
                return NewFrame(payload=b"d%d" % self.said, frame_type=self.random.choice(["", "a", "b"]))

    async def append(self) -> None:
        frames = [self.frame() for _ in range(self.random.choice([1, 1, 2, 5, 20]))]
        which = self.random.randrange(len(self.held)) if self.random.random() < 0.2 else len(self.held) - 1
        answers = await self.engine.append_frames([(self.held[which].handle, frame) for frame in frames])
        stream = self.streams[which]
        if stream.closed is not None:
            kinds = {answer.kind if isinstance(answer, ff.FlowFabricError) else "stored" for answer in answers}
            assert kinds == {"stream_closed"}
            return
        for frame, answer in zip(frames, answers, strict=True):
            assert isinstance(answer, Appended), answer
            mode = {DurableSummary: "summary", BestEffortLive: "best_effort"}.get(type(frame.mode), "durable")
            at = position(answer.stream_id)
            assert not stream.frames or at > stream.frames[-1][0]
            stream.frames.append((at, mode, frame.payload))
            assert answer.frame_count == len(stream.frames)
            if mode == "summary":
                stream.document = unmasked(merged(stream.document, json.loads(frame.payload)))

    async def end(self) -> None:
        """End the attempt, and begin another."""
        held, engine = self.held[-1], self.engine
        await self.move(self.high - self.now)  # an attempt does not end before it began
        how = self.random.choice(["complete", "fail", "cancel", "revoke"])
        match how:
            case "complete":
                await engine.complete(held.handle, None)
            case "fail":
                await engine.fail(held.handle, "boom", failure_class="permanent")
            case "cancel":
                await engine.cancel(Operator(held.execution_id), "no")
            case _:
                await engine.revoke_lease(held.execution_id)
        ends = {"complete": "attempt_success", "fail": "attempt_failure", "cancel": "attempt_cancelled"}
        self.current.closed = ends.get(how, "reclaimed")
        if how != "revoke":
            if len(self.held) > 9:
                return
            await engine.replay_execution(held.execution_id)
        self.held.append(await claim_one(engine, lease_ttl=timedelta(days=30), **OTHER))
        self.streams.append(Stream())

    async def look(self) -> None:
        """Read on where a reader was: it gets what was stored since, as far as it is still there."""
        which = self.random.randrange(len(self.held))
        seen = self.read.setdefault(which, [])
        after = f"{seen[-1][0].ms}-{seen[-1][0].n}" if seen else "0-0"
        limit = self.random.choice([1, 3, 50])
        page = await self.engine.tail_stream(self.held[0].execution_id, which, after, count_limit=limit)
        stream = self.streams[which]
        expected = [one for one in stream.visible() if not seen or one[0] > seen[-1][0]][:limit]
        assert [self.facts(frame) for frame in page.frames] == expected
        assert page.closed_reason == stream.closed
        seen += expected

    @staticmethod
    def facts(frame: Frame) -> tuple[Position, str, bytes]:
        return position(frame.id), frame.mode, frame.payload

    async def check(self) -> None:
        for which, stream in enumerate(self.streams):
            page = await self.engine.read_stream(self.held[0].execution_id, which, count_limit=10_000)
            assert [self.facts(frame) for frame in page.frames] == stream.visible()
            assert page.frame_count == len(stream.frames)
            summary = await self.engine.read_summary(self.held[0].execution_id, which)
            count = sum(mode == "summary" for _, mode, _ in stream.frames)
            assert (None if summary is None else (summary.version, summary.document)) == (
                (count, stream.document) if count else None
            )

    async def play(self) -> None:
        await self.begin()
        for _ in range(STEPS):
            match self.random.choices(["append", "look", "clock", "end"], [60, 25, 10, 5])[0]:
                case "append":
                    await self.append()
                case "look":
                    await self.look()
                case "clock":
                    await self.move(self.random.choice([-30.0, -1.0, 0.01, 5.0, 60.0]))
                case _:
                    await self.end()
                    if self.current.closed is not None:
                        break
        await self.check()


@pytest.mark.parametrize("seed", range(sampling.examples(100, 6)))
async def test_a_stream_is_what_the_model_says(world: World, seed: int) -> None:
    await History(world, seed).play()
