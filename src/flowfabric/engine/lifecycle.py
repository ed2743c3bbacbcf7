"""From creation to the end: what submitters and workers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from flowfabric._postgres import create_call, rows
from flowfabric._postgres.create_call import CreateCall
from flowfabric.engine.calls import (
    Batch,
    Calls,
    Fences,
    by_place,
    check_batch,
    check_duration,
    check_int,
    check_list,
    instant,
    is_override,
    optional_bytes,
    raised,
)
from flowfabric.errors import FlowFabricError, InvalidInput, StateError, TransportError
from flowfabric.values.attempt import (
    Cancelled,
    Claimed,
    Completed,
    Completion,
    Delayed,
    Failure,
    Moved,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.values.checks import check_lane, check_text, check_worker, escape_text, worker_capabilities
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.failure import classify
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lease import Authority, Fence, Handle, Operator, Released, Renewed
from flowfabric.values.policies import PolicyInput
from flowfabric.values.policy_json import retry_policy_to_json
from flowfabric.values.state import State

LEASE_TTL = timedelta(seconds=30)
_POLL = 1.0  # seconds between looks of a waiting claim, whether or not it was woken
_MAX_FAILURE_BYTES = 256 * 1024
_CLAIM = f"select {rows.CLAIMED} from flowfabric.claim($1, $2, $3, $4, $5, $6, $7)"  # noqa: S608
_CLAIM_LANES = f"select {rows.CLAIMED} from flowfabric.claim_lanes($1, $2, $3, $4, $5, $6, $7, $8)"  # noqa: S608
_RENEW = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at from flowfabric.renew($1, $2, $3, $4, $5, $6, $7)"
)
_COMPLETE = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.complete($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
_FAIL = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.fail($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
)
_PAUSE = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.pause($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
)
_CANCEL = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.cancel($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
_PROGRESS = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.progress($1, $2, $3, $4, $5, $6, $7, $8)"
)


class Lifecycle(Calls):
    """create, claim, renew, progress, complete, fail, delay, wait_children, release, cancel."""

    async def create_execution(
        self,
        *,
        execution_kind: str,
        lane_id: str = "default",
        namespace: str = "",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: dict[str, str] | None = None,
        policy: PolicyInput = None,
        delay_until: datetime | timedelta | None = None,
        execution_deadline_at: datetime | timedelta | None = None,
        execution_id: ExecutionId | None = None,
        flow_id: FlowId | None = None,
        connection: asyncpg.Connection[Any] | None = None,
    ) -> Created | Duplicate:
        """Submit one execution; a known key or id answers `Duplicate` and changes nothing.

        With `connection`, an asyncpg connection with a transaction of yours, the execution exists when you commit.
        """
        item = NewExecution(
            execution_kind=execution_kind,
            lane_id=lane_id,
            namespace=namespace,
            input_payload=input_payload,
            payload_encoding=payload_encoding,
            priority=priority,
            creator_identity=creator_identity,
            idempotency_key=idempotency_key,
            tags=tags,
            policy=policy,
            delay_until=delay_until,
            execution_deadline_at=execution_deadline_at,
            execution_id=execution_id,
            flow_id=flow_id,
        )
        answer = (await self.create_many([item], connection=connection))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def create_many(
        self, items: Sequence[NewExecution], *, connection: asyncpg.Connection[Any] | None = None
    ) -> list[Created | Duplicate | FlowFabricError]:
        """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
        check_batch(items)
        call = CreateCall(items, self._database.flow_partitions)
        found: Sequence[asyncpg.Record] = ()
        standing: Sequence[asyncpg.Record] = ()
        repeated = False
        if connection is not None:
            if not call.is_empty:
                found = await connection.fetch(create_call.SQL, *call.args)
            if call.doubts:
                standing = await connection.fetch(create_call.STANDING_SQL, *call.doubts)
        else:
            if not call.is_empty:
                found, repeated = await self._create(call.args)
            if call.doubts:
                standing = await self._fetch(create_call.STANDING_SQL, *call.doubts, repeatable=True)
        return call.verdicts([tuple(row) for row in found], [tuple(row) for row in standing], repeated=repeated)

    @staticmethod
    def is_plain(item: NewExecution) -> bool:
        """Whether an item says no more than lane, kind, payload and policy: what `create_alike` takes."""
        return create_call.is_plain(item)

    async def create_alike(self, item: NewExecution, payloads: Sequence[bytes]) -> list[tuple[int, UUID]]:
        """Submit up to 1,000 executions that differ in their payload alone; answers partition and uuid of each.

        For volume: nothing is made or checked per execution, so the item has to be a plain one (see `is_plain`).
        """
        check_batch(payloads, "payloads")
        if not self.is_plain(item):
            raise InvalidInput("says more than lane, kind and policy", field="item", allowed="a plain item")
        args = create_call.alike_args(item, payloads, self._database.flow_partitions)
        found, _ = await self._create(args)
        if found[0]["code"] == "lane_closed":
            raise StateError("lane_closed", "the lane takes no new executions")
        return list(zip(args[create_call.PARTITION_ARG], args[create_call.ID_ARG], strict=True))

    async def _create(self, args: list[Any]) -> tuple[list[asyncpg.Record], bool]:
        """The rows, and whether it had to be asked twice."""
        try:
            return await self._fetch(create_call.SQL, *args), False
        except TransportError as error:
            if not error.retryable:
                raise
            # The answer was lost, the ids are ours: asking again makes nothing twice.
            args[create_call.ID_GIVEN_ARG] = True
            return await self._fetch(create_call.SQL, *args, repeatable=True), True

    async def claim(
        self,
        lane_id: str = "default",
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = (),
        kinds: Collection[str] | None = None,
        lease_ttl: timedelta = LEASE_TTL,
        max_wait: timedelta | None = None,
    ) -> Claimed | None:
        """Take the best execution this worker can run; None when there is none, or none within `max_wait`."""
        found = await self.claim_many(
            lane_id,
            limit=1,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            lease_ttl=lease_ttl,
            max_wait=max_wait,
        )
        return found[0] if found else None

    async def claim_many(
        self,
        lane_id: str = "default",
        *,
        limit: int,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = (),
        kinds: Collection[str] | None = None,
        lease_ttl: timedelta = LEASE_TTL,
        max_wait: timedelta | None = None,
    ) -> list[Claimed]:
        """Take up to `limit` executions at once, best first. `kinds` limits them to what this worker can handle."""
        args = (
            check_lane(lane_id),
            None if kinds is None else [check_text(kind, "kinds") for kind in check_list(kinds, "kinds")],
            list(worker_capabilities(capabilities)) if capabilities else [],
            check_worker(worker_id),
            check_worker(worker_instance_id, "worker_instance_id"),
            check_duration(lease_ttl, "lease_ttl"),
            check_int(limit, "limit", 1, 1000),
        )
        if max_wait is not None:
            check_duration(max_wait, "max_wait", least_ms=0)
        found = await self._fetch(_CLAIM, *args, repeatable=True)
        if not found and max_wait:
            found = await self._claim_within(_CLAIM, args, max_wait)
        return [rows.claimed(row, lease_ttl, worker_instance_id) for row in found]

    async def claim_lanes(
        self,
        shares: Mapping[str, int],
        *,
        limit: int,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = (),
        kinds: Collection[str] | None = None,
        lease_ttl: timedelta = LEASE_TTL,
        max_wait: timedelta | None = None,
    ) -> list[Claimed]:
        """Take up to `limit` executions of several lanes in one call.

        Each lane first gives up to its share; what is still free is filled from the lanes in the order given.
        """
        if not isinstance(shares, Mapping) or not shares:
            raise InvalidInput(f"got {shares!r}", field="shares", allowed="at least one lane, with its share")
        args = (
            [check_lane(lane, "shares") for lane in shares],
            [check_int(share, "shares", 0, 1000) for share in shares.values()],
            None if kinds is None else [check_text(kind, "kinds") for kind in check_list(kinds, "kinds")],
            list(worker_capabilities(capabilities)) if capabilities else [],
            check_worker(worker_id),
            check_worker(worker_instance_id, "worker_instance_id"),
            check_duration(lease_ttl, "lease_ttl"),
            check_int(limit, "limit", 1, 1000),
        )
        if max_wait is not None:
            check_duration(max_wait, "max_wait", least_ms=0)
        found = await self._fetch(_CLAIM_LANES, *args, repeatable=True)
        if not found and max_wait:
            found = await self._claim_within(_CLAIM_LANES, args, max_wait)
        return [rows.claimed(row, lease_ttl, worker_instance_id) for row in found]

    async def _claim_within(self, sql: str, args: tuple[Any, ...], max_wait: timedelta) -> list[asyncpg.Record]:
        loop = asyncio.get_running_loop()
        until = loop.time() + max_wait.total_seconds()
        if self._listener is None:
            while (left := until - loop.time()) > 0:
                await asyncio.sleep(min(left, _POLL))
                if found := await self._fetch(sql, *args, repeatable=True):
                    return found
            return []
        with self._listener.topic("work") as woken:
            await self._listener.listening(min(max_wait.total_seconds(), 1.0))
            while (left := until - loop.time()) > 0:
                # Announce first, look again, then sleep: whoever submits after the look sees the announcement.
                pause = min(left, _POLL)
                await self._fetch(
                    "select flowfabric.sleep($1, 'work', $2, null)",
                    self._instance,
                    int(pause * 1000) + 250,
                    repeatable=True,
                )
                woken.clear()
                if found := await self._fetch(sql, *args, repeatable=True):
                    return found
                awake = loop.time() + pause
                while (pause := awake - loop.time()) > 0:
                    try:
                        await asyncio.wait_for(woken.wait(), pause)
                    except TimeoutError:
                        break
                    # The announcement still stands: look at once.
                    woken.clear()
                    if found := await self._fetch(sql, *args, repeatable=True):
                        return found
            return await self._fetch(sql, *args, repeatable=True)

    @contextlib.contextmanager
    def work_wakeups(self) -> Iterator[asyncio.Event | None]:
        """An event that is set when work may have come, while `sleep_for_work` holds; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic("work") as woken:
            yield woken

    async def sleep_for_work(self, at_most: timedelta) -> None:
        """Announce that this process waits for work, so that whoever submits some wakes it. Look once more after it."""
        await self._fetch(
            "select flowfabric.sleep($1, 'work', $2, null)",
            self._instance,
            check_duration(at_most, "at_most"),
            repeatable=True,
        )

    async def renew(self, authority: Handle | Fence, *, lease_ttl: timedelta | None = None) -> Renewed:
        """Keep the lease for its time to live from now, or for `lease_ttl`."""
        answer = (await self.renew_many([authority], lease_ttl=lease_ttl))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def renew_many(
        self, authorities: Sequence[Handle | Fence], *, lease_ttl: timedelta | None = None
    ) -> list[Renewed | FlowFabricError]:
        """Keep up to 1,000 leases in one call; one verdict per lease."""
        check_batch(authorities, "authorities")
        ttl = None if lease_ttl is None else check_duration(lease_ttl, "lease_ttl")

        def prepare(held: Sequence[Handle | Fence]) -> tuple[Fences, list[int | None]]:
            return Fences(held), [
                ttl if ttl is not None else check_duration(a.lease_ttl, "lease_ttl") if type(a) is Handle else None
                for a in held
            ]

        batch = Batch(authorities, prepare)
        if batch.is_empty:
            return batch.verdicts([])
        fences, ttls = batch.ready
        found = await self._fetch(_RENEW, *fences.columns, ttls, repeatable=True)
        return batch.verdicts(
            [
                Renewed(row["at"], row["lease_epoch"])
                if row["code"] == "ok"
                else raised(row, fences.execution_id(place))
                for place, row in enumerate(by_place(found, len(ttls)))
            ]
        )

    async def progress(
        self, authority: Handle | Fence, *, percent: int | None = None, message: str | None = None
    ) -> None:
        """Note how far the work is; what is not given stays as it was."""
        if percent is not None:
            check_int(percent, "percent", 0, 100)
        if message is not None:
            check_text(message, "message", 64 * 1024)
        fences = Fences([authority])
        row = await self._row(_PROGRESS, *fences.first, percent, message, repeatable=True)
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))

    async def complete(
        self, authority: Authority, result: bytes | None = None, *, result_encoding: str | None = None
    ) -> Completed:
        """End as completed. Repeating it with the same handle gives the first answer and changes nothing."""
        answer = (await self._complete([(authority, result, result_encoding)], operator=is_override(authority)))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def complete_many(self, items: Sequence[Completion | Handle | Fence]) -> list[Completed | FlowFabricError]:
        """Complete up to 1,000 executions in one call; one verdict per item. A bare handle completes without result."""
        check_batch(items)
        return await self._complete(
            [(i.authority, i.result, i.result_encoding) if type(i) is Completion else (i, None, None) for i in items],
            operator=False,
        )

    async def _complete(
        self, items: Sequence[tuple[Any, bytes | None, str | None]], *, operator: bool
    ) -> list[Completed | FlowFabricError]:
        batch = Batch(items, _checked_completions)
        if batch.is_empty:
            return batch.verdicts([])
        fences, results, encodings = batch.ready
        found = await self._fetch(
            _COMPLETE,
            *fences.columns,
            results if any(result is not None for result in results) else None,
            encodings if any(encoding is not None for encoding in encodings) else None,
            operator,
            repeatable=not operator,
        )
        answers: list[Completed | FlowFabricError] = [
            Completed(ExecutionId.of(partition, uuid))
            for partition, uuid in zip(fences.partitions, fences.ids, strict=True)
        ]
        for row in found:
            # Ordinal 0 speaks for all that went well.
            if row["ordinal"] and row["code"] != "replayed":
                place = row["ordinal"] - 1
                answers[place] = raised(row, fences.execution_id(place))
        return batch.verdicts(answers)

    async def fail(
        self,
        authority: Authority,
        reason: str,
        *,
        failure_class: str | None = None,
        category: str | None = None,
        retry_policy: Any = None,
    ) -> RetryScheduled | TerminalFailed:
        """Report a failure; the retry policy decides whether another attempt follows.

        `retry_policy` replaces the frozen one for this failure. Text that cannot be stored is escaped, never refused.
        """
        answer = (
            await self._fail(
                [
                    Failure(
                        authority=authority,  # type: ignore[arg-type]  # an operator fails one at a time
                        reason=reason,
                        failure_class=failure_class,
                        category=category,
                        retry_policy=retry_policy,
                    )
                ],
                operator=is_override(authority),
            )
        )[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def fail_many(self, items: Sequence[Failure]) -> list[RetryScheduled | TerminalFailed | FlowFabricError]:
        """Report up to 1,000 failures in one call; one verdict per item."""
        check_batch(items)
        return await self._fail(items, operator=False)

    async def _fail(
        self, items: Sequence[Failure], *, operator: bool
    ) -> list[RetryScheduled | TerminalFailed | FlowFabricError]:
        batch = Batch(items, _checked_failures)
        answers: list[RetryScheduled | TerminalFailed | FlowFabricError] = []
        if batch.is_empty:
            return batch.verdicts(answers)
        fences, columns = batch.ready
        found = await self._fetch(_FAIL, *fences.columns, *columns, operator, repeatable=not operator)
        for place, row in enumerate(by_place(found, len(fences.ids))):
            execution_id = fences.execution_id(place)
            if row["code"] not in ("ok", "replayed"):
                answers.append(raised(row, execution_id))
            elif row["detail"] == "retry_scheduled":
                following = row["lease_epoch"] if row["code"] == "ok" else None
                answers.append(RetryScheduled(execution_id, row["at"], following))
            else:
                answers.append(TerminalFailed(execution_id))
        return batch.verdicts(answers)

    async def _pause(
        self, call: str, authority: Authority, until: datetime | timedelta | None = None
    ) -> asyncpg.Record:
        fences = Fences([authority])
        at, ms = instant(until, "delay_until")
        row = await self._row(_PAUSE, call, *fences.first, at, ms, is_override(authority))
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        return row

    async def delay(self, authority: Authority, delay_until: datetime | timedelta) -> Delayed:
        """Give the lease back until a time (or for a duration); the same attempt continues then."""
        if delay_until is None:
            raise InvalidInput("missing", field="delay_until", allowed="an aware datetime or a timedelta")
        await self._pause("delay", authority, delay_until)
        return Delayed(_target(authority))

    async def wait_children(self, authority: Authority) -> Moved:
        """Give the lease back until dependencies are satisfied; at once claimable when none is open."""
        row = await self._pause("wait_children", authority)
        return Moved(_target(authority), State(row["state"]))

    async def release(self, authority: Authority) -> Released:
        """Give the lease back so that another worker continues the same attempt at once."""
        row = await self._pause("release", authority)
        return Released(_target(authority), State(row["state"]))

    async def cancel(self, authority: Authority, reason: str, *, source: str | None = None) -> Cancelled:
        """End as cancelled. A `Handle` cancels as lease holder; `Operator` as its source; a `Fence` as `source`."""
        text = escape_text(reason, _MAX_FAILURE_BYTES)
        holder = type(authority) is Handle
        if type(authority) is Operator and source is None:
            source = authority.source
        source = check_text("lease_holder" if source is None else source, "source")
        if not source:
            raise InvalidInput("empty", field="source", allowed="a non-empty text")
        if holder and source != "lease_holder":
            raise InvalidInput("a Handle cancels as lease_holder", field="source", allowed="a Fence or an Operator")
        fences = Fences([authority])
        row = await self._row(_CANCEL, *fences.columns, holder, source, text, repeatable=True)
        if row["code"] not in ("ok", "replayed"):
            raise raised(row, fences.execution_id(0))
        return Cancelled(fences.execution_id(0))


def _target(authority: Authority) -> ExecutionId:
    return authority.execution_id


def _checked_completions(
    items: Sequence[tuple[Any, Any, Any]],
) -> tuple[Fences, list[bytes | None], list[str | None]]:
    return (
        Fences([item[0] for item in items]),
        [optional_bytes(item[1], "result") for item in items],
        [None if item[2] is None else check_text(item[2], "result_encoding") for item in items],
    )


def _checked_failures(items: Sequence[Failure]) -> tuple[Fences, tuple[list[Any], ...]]:
    for item in items:
        if not isinstance(item, Failure):
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="Failure")
    classified = [classify(item.category, item.failure_class) for item in items]
    return Fences([item.authority for item in items]), (
        [escape_text(item.reason, _MAX_FAILURE_BYTES) for item in items],
        [failure_class.value for failure_class, _ in classified],
        [escape_text(category, 256) for _, category in classified],
        [retry_policy_to_json(item.retry_policy) for item in items],
    )
