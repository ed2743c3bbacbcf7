"""Submitting a task many times in few calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar, Unpack, overload

from flowfabric.client import current
from flowfabric.client.creating import check_kind, is_free
from flowfabric.client.limits import learn
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable
from flowfabric.client.submitting import Submitting
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.middleware import overriding
from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId
from flowfabric.values.options import OptionNames, Options

R = TypeVar("R")
T = TypeVar("T")
_LINES = 2  # concurrent calls of one `submit_many`
_MOST = 1000  # of create_many
_MOST_BYTES = 1 << 25  # of payload in one call, unless a single item has more


class BulkSubmitting(Submitting):
    """Submits one task with many arguments."""

    @overload
    async def submit_many(
        self, task: Submittable[R], arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[Run[R]]: ...
    @overload
    async def submit_many(
        self, task: str, arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[Run[Any]]: ...
    async def submit_many(
        self, task: Submittable[Any] | str, arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[Run[Any]]:
        """Submit a task once per item of `arguments`, up to a thousand to a call.

        A tuple holds the arguments of one submission, anything else is its only argument; items made with
        `task.submission(...)` are used unchanged, with their own options. If any argument is wrong, nothing is stored.

        With a middleware around submissions they are sent one by one. If it refuses one, those before are stored and
        their handles lost: use `RateLimit(wait=True)` here.
        """
        known = self._task(task)
        chosen = known.defaults.merged(Options.of(options))
        if not isinstance(arguments, Iterable):
            raise InvalidInput(f"got {type(arguments).__name__}", field="arguments", allowed="one item per submission")
        given = list(arguments)
        if chosen.idempotency_key and sum(not isinstance(one, Submission) for one in given) > 1:
            raise InvalidInput(
                "one key for several",
                field="idempotency_key",
                allowed="task.submission(..., idempotency_key=...) for each",
            )
        is_plain = not overriding(self._connector.middleware, "submit") and current.scope_of(self._connector) is None
        if is_plain and known.codecs.is_plain and not any(isinstance(one, Submission) for one in given):
            encode = known.signature.encode
            payloads = [encode(one if isinstance(one, tuple) else (one,), {}) for one in given]
            await learn(self.engine, [Submission(task=known, options=chosen)])
            alike = await self._create_alike(
                chosen.item(
                    known.name,
                    b"",
                    None,
                    hooks=known.hooks(chosen, nested=False),
                    limits=known.limit_names.limits(chosen, known.name),
                ),
                payloads,
            )
            if alike is not None:
                return [Run(place, kind=known.name, connector=self._connector) for place in alike]
        submissions = [
            one
            if isinstance(one, Submission)
            else Submission(task=known, args=one if isinstance(one, tuple) else (one,), options=chosen)
            for one in given
        ]
        await learn(self.engine, submissions)
        items = [one.item() for one in submissions]
        if not is_plain:
            return [await self.send(one) for one in submissions]
        runs: list[Run[Any]] = []
        for batch in _batches(items, lambda item: len(item.input_payload)):
            verdicts = await self.engine.create_many(batch)
            await self._check_kinds(batch, verdicts)
            for item, verdict in zip(batch, verdicts, strict=True):
                one = submissions[len(runs)]
                if isinstance(verdict, FlowFabricError):
                    raise verdict
                if isinstance(verdict, Duplicate) and await is_free(self.engine, verdict, item, one.options):
                    verdict = await self.create(item, one.options)  # noqa: PLW2901 - the verdict of the second try
                runs.append(self._made(one, verdict))
        return runs

    async def _check_kinds(
        self, items: Sequence[NewExecution], verdicts: Sequence[Created | Duplicate | FlowFabricError]
    ) -> None:
        known = [
            (verdict, item.execution_kind)
            for item, verdict in zip(items, verdicts, strict=True)
            if isinstance(verdict, Duplicate)
        ]
        await _run_all([check_kind(self.engine, *one) for one in known])

    async def _create_alike(self, item: NewExecution, payloads: list[bytes]) -> list[ExecutionId] | None:
        """Create executions that differ only in their payload, in concurrent calls; None if the options forbid it."""
        if not self.engine.is_plain(item) or (payloads and max(map(len, payloads)) > MAX_PAYLOAD):
            return None
        batches = list(_batches(payloads, len))
        made: list[list[ExecutionId]] = [[] for _ in batches]
        numbers = iter(range(len(batches)))

        async def line() -> None:
            for number in numbers:
                made[number] = await self.engine.create_alike(item, batches[number])

        await _run_all([line() for _ in range(min(_LINES, len(batches)))])
        return [place for batch in made for place in batch]


async def _run_all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently; cancel the rest on the first error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    size = 0
    for item in items:
        size += size_of(item)
        if batch and (len(batch) == _MOST or size > _MOST_BYTES):
            yield batch
            batch, size = [], size_of(item)
        batch.append(item)
    if batch:
        yield batch
