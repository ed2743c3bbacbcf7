"""Claims: a worker takes the best executions it can run, and waits if there are none."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_duration, check_filled, check_int, check_list
from flowfabric.engine.workers import heartbeat_of, own, serving_columns, serving_of
from flowfabric.errors import InvalidInput
from flowfabric.values.attempt import Claimed
from flowfabric.values.checks import check_lane, check_text, check_worker, moment, worker_capabilities
from flowfabric.values.lease import HandleKind
from flowfabric.values.worker import Heartbeat, Kinds, OwnWorker

log = logging.getLogger("flowfabric.engine")
LEASE_TTL = timedelta(seconds=30)
_POLL = 1.0  # seconds between polls of a waiting claim, even without a wake-up


class Claims(Operations):
    """claim, claim_many, claim_lanes, sleep_for_work, sleep_and_heartbeat."""

    async def claim(
        self,
        lane_id: str = "default",
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = (),
        kinds: Kinds | None = None,
        namespace: str | None = None,
        lease_ttl: timedelta = LEASE_TTL,
        max_wait: timedelta | None = None,
    ) -> Claimed | None:
        """Take the best execution this worker can run; None if there is none, or none within `max_wait`.

        `namespace`: only of this namespace, which is not the default one; None: of all of them.
        """
        found = await self.claim_many(
            lane_id,
            limit=1,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
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
        kinds: Kinds | None = None,
        namespace: str | None = None,
        lease_ttl: timedelta = LEASE_TTL,
        max_wait: timedelta | None = None,
        asleep: datetime | None = None,
    ) -> list[Claimed]:
        """Take up to `limit` executions in one call, best first. `kinds` limits them to these tasks.

        `kinds` may say more (`Serving`, or a mapping to `Serves`): in which versions, and with which code. Names alone
        serve executions without a version; None serves every kind in every version. Executions that changed code
        stopped are given at once only to a caller that says its code.

        `namespace` limits them to one, which is not the default one. `asleep` is what `sleep_for_work` returned: the
        announcement ends with a claim that finds work.
        """
        return await self._claim(
            statements.CLAIM,
            [check_lane(lane_id)],
            (lane_id,),
            limit=limit,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
            lease_ttl=lease_ttl,
            max_wait=max_wait,
            asleep=asleep,
        )

    async def claim_lanes(
        self,
        shares: Mapping[str, int],
        *,
        limit: int,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = (),
        kinds: Kinds | None = None,
        namespace: str | None = None,
        lease_ttl: timedelta = LEASE_TTL,
        max_wait: timedelta | None = None,
        asleep: datetime | None = None,
    ) -> list[Claimed]:
        """Take up to `limit` executions of several lanes in one call; `namespace` and `asleep` as in `claim_many`.

        Takes up to its share from each lane first, then fills up to `limit` from the lanes in the order given.
        """
        if not isinstance(shares, Mapping) or not shares:
            raise InvalidInput(f"got {shares!r}", field="shares", allowed="at least one lane, with its share")
        lanes = tuple(shares)
        return await self._claim(
            statements.CLAIM_LANES,
            lanes,
            (_lanes_of(lanes), _shares_of(tuple(shares.values()))),
            limit=limit,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
            lease_ttl=lease_ttl,
            max_wait=max_wait,
            asleep=asleep,
        )

    async def _claim(
        self,
        statement: str,
        lanes: Sequence[str],
        places: tuple[Any, ...],
        *,
        limit: int,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str],
        kinds: Kinds | None,
        namespace: str | None,
        lease_ttl: timedelta,
        max_wait: timedelta | None,
        asleep: datetime | None,
    ) -> list[Claimed]:
        serving = serving_of(kinds)
        names = serving.names if serving is not None else kinds if kinds is None else check_list(kinds, "kinds")
        args = (
            *places,
            None if names is None else _as_array(names),
            list(worker_capabilities(capabilities)) if capabilities else [],
            check_worker(worker_id),
            check_worker(worker_instance_id, "worker_instance_id"),
            check_duration(lease_ttl, "lease_ttl"),
            check_int(limit, "limit", 1, 1000),
        )
        if max_wait is not None:
            check_duration(max_wait, "max_wait", least_ms=0)
        announced = None if asleep is None else moment(asleep, "asleep")
        only = check_namespace(namespace)
        code: tuple[int | None, bool, str | None] = (None, False, only)
        if serving is not None:
            code = (await self._service(serving, capabilities), serving.is_versioned, only)
        found = await self._fetch(statement, *args, self._instance, announced, *code, repeatable=True)
        if not found and max_wait:
            found = await self._claim_within(statement, args, code, lanes, limit, kinds, capabilities, max_wait)
        claimed = [rows.claimed(row, lease_ttl, worker_instance_id) for row in found]
        for one in claimed:
            if one.reclaim_count:
                warn_of_reclaims(one)
        return claimed

    async def _claim_within(
        self,
        sql: str,
        args: tuple[Any, ...],
        code: tuple[int | None, bool, str | None],
        lanes: Sequence[str],
        limit: int,
        kinds: Kinds | None,
        capabilities: Collection[str],
        max_wait: timedelta,
    ) -> list[asyncpg.Record]:
        loop = asyncio.get_running_loop()
        until = loop.time() + max_wait.total_seconds()
        if self._listener is None:
            while (left := until - loop.time()) > 0:
                await asyncio.sleep(min(left, _POLL))
                if found := await self._fetch(sql, *args, None, None, *code, repeatable=True):
                    return found
            return []
        asleep: datetime | None = None
        with self._listener.topic("work") as woken:
            await self._listener.listening(min(max_wait.total_seconds(), 1.0))
            while (left := until - loop.time()) > 0:
                # Announce first, poll again, then sleep: a submission after that poll sees the announcement.
                pause = min(left, _POLL)
                asleep = await self.sleep_for_work(
                    lanes,
                    timedelta(seconds=pause + 0.25),
                    slots=limit,
                    kinds=kinds,
                    capabilities=capabilities,
                    namespace=code[2],
                    before=asleep,
                )
                woken.clear()
                if found := await self._fetch(sql, *args, self._instance, asleep, *code, repeatable=True):
                    return found
                awake = loop.time() + pause
                while (pause := awake - loop.time()) > 0:
                    try:
                        await asyncio.wait_for(woken.wait(), pause)
                    except TimeoutError:
                        break
                    # Still announced: poll immediately.
                    woken.clear()
                    if found := await self._fetch(sql, *args, self._instance, asleep, *code, repeatable=True):
                        return found
            return await self._fetch(sql, *args, self._instance, asleep, *code, repeatable=True)

    @contextlib.contextmanager
    def work_wakeups(self) -> Iterator[asyncio.Event | None]:
        """Return an event that is set when there may be work, after `sleep_for_work`; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic("work") as woken:
            yield woken

    async def sleep_for_work(
        self,
        lanes: Collection[str],
        at_most: timedelta,
        *,
        slots: int = 1,
        kinds: Kinds | None = None,
        capabilities: Collection[str] = (),
        namespace: str | None = None,
        before: datetime | None = None,
    ) -> datetime:
        """Announce that this process waits for work, so that a submission wakes it. Poll once more afterwards.

        Returns until when it is announced. `before` is what the previous announcement returned; this one replaces it.
        """
        args = await self._sleep(lanes, at_most, slots, kinds, capabilities, namespace, before)
        row = await self._row(statements.SLEEP_FOR_WORK, *args, repeatable=True)
        until: datetime = row["until"]
        return until

    async def sleep_and_heartbeat(
        self,
        lanes: Collection[str],
        at_most: timedelta,
        *,
        worker: OwnWorker,
        slots: int = 1,
        kinds: Kinds | None = None,
        capabilities: Collection[str] = (),
        namespace: str | None = None,
        before: datetime | None = None,
    ) -> tuple[datetime, Heartbeat | None]:
        """Do the same, and say that a worker of this process is still there, as `heartbeat_own` does, in one call."""
        identity = own(worker)
        args = await self._sleep(lanes, at_most, slots, kinds, capabilities, namespace, before)
        row = await self._row(statements.SLEEP_AND_HEARTBEAT, *args, *identity, repeatable=True)
        return row["until"], heartbeat_of(row)

    async def _sleep(
        self,
        lanes: Collection[str],
        at_most: timedelta,
        slots: int,
        kinds: Kinds | None,
        capabilities: Collection[str],
        namespace: str | None,
        before: datetime | None,
    ) -> tuple[Any, ...]:
        """The arguments of an announcement. The worker's service is registered first, once."""
        served = [check_lane(lane, "lanes") for lane in check_list(lanes, "lanes")]
        slots = check_int(slots, "slots", 1, 100_000)
        span = check_duration(at_most, "at_most")
        replaced = None if before is None else moment(before, "before")
        only = check_namespace(namespace)
        return self._instance, served, await self._service(kinds, capabilities), slots, span, replaced, only

    async def _service(self, kinds: Kinds | None, capabilities: Collection[str]) -> int:
        """The number of what a worker serves; the first call registers it."""
        serving = serving_of(kinds)
        columns = None if serving is not None else serving_columns(kinds)
        named = serving if columns is None else None if columns[0] is None else tuple(columns[0])
        key = (named, tuple(worker_capabilities(capabilities)) if capabilities else ())
        if key not in self._services:
            row = await self._row(
                statements.REGISTER_SERVICE, *(columns or serving_columns(serving)), list(key[1]), repeatable=True
            )
            self._services[key] = row["service"]
        return self._services[key]


def check_namespace(value: str | None) -> str | None:
    """Check the namespace that a claim is limited to. Without one it takes from all of them."""
    return None if value is None else check_filled(value, "namespace")


def warn_of_reclaims(claimed: Claimed) -> None:
    """Warn every hundredth time an execution is taken over from a lost lease."""
    if claimed.handle.kind is HandleKind.RECLAIMED and claimed.reclaim_count % 100 == 0:
        log.warning(
            "execution %s (%s) was taken over for the %dth time: its handler may kill its worker, or block it",
            claimed.execution_id, claimed.execution_kind, claimed.reclaim_count,
        )  # fmt: skip


def _as_array(kinds: Collection[Any]) -> str:
    try:
        return _array_of(tuple(kinds))
    except TypeError:  # not hashable, so not text
        return _array_of.__wrapped__(tuple(kinds))


@functools.lru_cache(maxsize=64)
def _array_of(kinds: tuple[Any, ...]) -> str:
    """Return the kinds as a Postgres array in text: encoding a list of a thousand takes longer than the claim."""
    return _as_text([check_text(kind, "kinds") for kind in kinds])


@functools.lru_cache(maxsize=8)
def _lanes_of(lanes: tuple[Any, ...]) -> str:
    """Return the lanes in the same form."""
    return _as_text([check_lane(lane, "shares") for lane in lanes])


def _shares_of(shares: tuple[Any, ...]) -> str:
    if set(map(type, shares)) != {int} or min(shares) < 0 or max(shares) > 1000:
        shares = tuple(check_int(share, "shares", 0, 1000) for share in shares)  # refuses one of them
    return "{" + ",".join(map(str, shares)) + "}"


def _as_text(names: list[str]) -> str:
    quoted = (name.replace("\\", "\\\\").replace('"', '\\"') for name in names)
    return "{" + ",".join(f'"{name}"' for name in quoted) + "}"
