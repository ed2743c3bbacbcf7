"""The worker's second thread, with its own event loop, which no handler can block.

It renews leases, keeps the worker registered, runs the duties, fires schedules and receives the notifications for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING

from flowfabric._duties import ALL, Duties
from flowfabric._waiting import first_of
from flowfabric.engine import Engine
from flowfabric.errors import (
    Conflict,
    Contention,
    ExecutionNotActive,
    FlowFabricError,
    Interrupted,
    InvalidInput,
    LeaseLost,
    NotFound,
)
from flowfabric.middleware import DutyHooks
from flowfabric.values.durations import counted
from flowfabric.values.lease import Handle, Renewed
from flowfabric.worker.runners.threads import raise_in
from flowfabric.worker.schedules import ScheduleDuty

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_CHUNK = 1000
_STALLED_AFTER = 5.0
_AT_ONCE = 0.1  # seconds: handlers that end sooner do not wake this thread; after twice as long it listens for them
_LOCKED_PAUSE = 0.05  # seconds until executions that other transactions have locked are tried again
_PATIENCE = timedelta(seconds=20)  # timeout of a duty's call; a hanging call would block the next ones of its kind
_LAST_ROUND = timedelta(seconds=2)  # time for a duty to finish its round when the worker stops


class SecondThread(threading.Thread):
    """The worker's second thread."""

    def __init__(self, worker: Worker, *, duties: bool) -> None:
        super().__init__(name="flowfabric second thread", daemon=True)
        self._worker = worker
        self._runs_duties = duties
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._has_leases = asyncio.Event()
        self._error: BaseException | None = None
        self._trouble = 0  # how many calls in a row have failed
        self.loop: asyncio.AbstractEventLoop | None = None
        self._telling: asyncio.TimerHandle | None = None  # on the worker's own loop

    def run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
            if self._ready.is_set():
                # Without heartbeats every lease would expire: stop visibly instead.
                log.critical("the worker's second thread failed; stopping the worker", exc_info=error)
                with contextlib.suppress(RuntimeError):
                    self._worker.loop.call_soon_threadsafe(self._worker.stop)
            self._ready.set()

    def leases_begin(self) -> None:
        """The worker holds leases again. Called on the worker's own loop.

        Waking this thread at once would delay the handlers: both need the interpreter lock.
        """
        if self._telling is None:
            self._telling = self._worker.loop.call_later(_AT_ONCE, self._tell_of_leases)

    def _tell_of_leases(self) -> None:
        self._telling = None
        loop = self.loop
        if loop is not None and self._worker.handlers.held:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._has_leases.set)

    async def started(self) -> None:
        """Start the thread and wait until it is connected; raises the error if it cannot connect."""
        self.start()
        await asyncio.to_thread(self._ready.wait)
        if self._error is not None:
            raise self._error

    async def stopped(self, timeout: float = 10.0) -> None:
        """Stop the thread and wait for it; raises the error that ended it."""
        loop, stopping = self.loop, self._stopping
        if loop is not None and stopping is not None and self.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopping.set)
        await asyncio.to_thread(self.join, timeout)
        if self._error is not None:
            raise self._error

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        worker = self._worker
        # A connection for each part, so that a slow duty does not delay the leases.
        engine = await worker.app.open_engine(
            min_size=1, max_size=6, command_timeout=_PATIENCE, reconnect_for=timedelta(0)
        )
        async with engine:
            await worker.registration.register(engine)
            duties = Duties(
                engine, (*ALL, ScheduleDuty) if self._runs_duties else (), watcher=DutyHooks(worker.app.middleware)
            )
            async with duties:
                self._ready.set()
                watching = asyncio.create_task(self._watch_the_loop())
                try:
                    await self._renew_until_stopped(engine, worker.lease_ttl.total_seconds())
                finally:
                    watching.cancel()
                    await worker.registration.leave(engine)
                    await duties.stop(_LAST_ROUND)

    # Leases

    async def _renew_until_stopped(self, engine: Engine, ttl: float) -> None:
        assert self._stopping is not None
        tick = min(1.0, ttl / 6)
        lost: asyncio.Event | None = None
        has_leases = is_listening = False
        with contextlib.ExitStack() as listening:
            while not self._stopping.is_set():
                self._has_leases.clear()
                renew_all = lost is not None and lost.is_set()
                if lost is not None:
                    lost.clear()
                had_leases, has_leases = has_leases, bool(self._worker.handlers.held)
                # Notifications about lost leases need a connection of their own: only while there are leases, and not
                # for handlers that end at once. Renewing all finds losses that were missed before.
                if not has_leases:
                    listening.close()
                    lost, is_listening = None, False
                elif had_leases and not is_listening:
                    lost, is_listening = listening.enter_context(engine.lost_wakeups(self._worker.instance_id)), True
                    renew_all = lost is not None
                are_locked = False
                before = self._trouble
                try:
                    are_locked = await self._renew(engine, ttl, renew_all=renew_all)
                except Exception:
                    log.exception("renewing leases failed")
                await self._stay_registered(engine)
                if self._trouble == before:
                    self._trouble = 0
                if are_locked:
                    await first_of(_LOCKED_PAUSE, self._stopping)
                elif self._trouble:
                    await first_of(min(tick * 2.0 ** min(self._trouble - 1, 10), ttl / 6), self._stopping)
                elif has_leases and not is_listening:
                    await first_of(_AT_ONCE, self._stopping)
                else:
                    await first_of(tick, self._stopping, lost if lost is not None else self._has_leases)

    async def _stay_registered(self, engine: Engine) -> None:
        try:
            await self._worker.registration.keep(engine)
        except (Conflict, InvalidInput) as error:  # another process has the instance, under this worker id or another
            log.critical("%s; stopping the worker", error)
            self._worker.registration.is_abandoned = True
            with contextlib.suppress(RuntimeError):
                self._worker.loop.call_soon_threadsafe(self._worker.stop)
        except (FlowFabricError, TimeoutError) as error:
            self._failed(engine, error, "the worker's heartbeat failed")
        except Exception:
            log.exception("the heartbeat of the worker failed")

    async def _renew(self, engine: Engine, ttl: float, *, renew_all: bool) -> bool:
        """Renew three times per lease: after two lost heartbeats there is time for a third.

        Renewals do not wait for locks, so that a transaction over one execution delays no other lease. Returns whether
        there was such a transaction: these leases must be tried again soon.
        """
        are_locked = False
        now = time.monotonic()
        living = [one for one in list(self._worker.handlers.held.values()) if not one.is_lost]
        if renew_all:
            for one in living:
                one.is_doubtful = True  # until a call says what became of it
        held = [one for one in living if one.is_doubtful or now - one.renewed_at >= ttl / 3]
        for at in range(0, len(held), _CHUNK):
            chunk = held[at : at + _CHUNK]
            asked = time.monotonic()
            try:
                # A heartbeat that takes longer than a third of the lease is too late.
                async with asyncio.timeout(max(ttl / 3, 0.5)):
                    verdicts = await self._renew_chunk(engine, [one.handle for one in chunk])
            except (FlowFabricError, TimeoutError) as error:
                self._failed(engine, error, f"{counted(len(chunk), 'lease')} could not be renewed")
                late = self._tell_late(chunk, ttl, "it could not be renewed in time")
                if late and engine.outage.is_on:
                    log.warning("%s expired while the database was away; the handlers stop", counted(late, "lease"))
                continue
            for one, verdict in zip(chunk, verdicts, strict=True):
                if isinstance(verdict, LeaseLost | ExecutionNotActive | NotFound):
                    self._tell(one, verdict)
                elif isinstance(verdict, Contention) and verdict.kind == "execution_locked":
                    are_locked = True
                    self._tell_late([one], ttl, "another transaction has kept the execution locked")
                elif isinstance(verdict, FlowFabricError):
                    log.warning("the lease of %s was not renewed: %s", one.claimed.execution_id, verdict)
                else:
                    one.renewed_at, one.is_doubtful = asked, False
        return are_locked

    async def _renew_chunk(self, engine: Engine, handles: list[Handle]) -> list[Renewed | FlowFabricError]:
        registration = self._worker.registration
        if (own := registration.due()) is None:
            return await engine.renew_many(handles, waits=False)
        asked = time.monotonic()
        verdicts, outcome = await engine.renew_and_heartbeat(handles, worker=own)
        registration.beaten(asked, outcome)
        return verdicts

    def _tell_late(self, unrenewed: list[Running], ttl: float, why: str) -> int:
        """Report the leases that have expired without a renewal; returns how many."""
        now = time.monotonic()
        late = [one for one in unrenewed if now - one.renewed_at >= ttl]
        for one in late:
            self._tell(one, LeaseLost("lease_expired", why))
        return len(late)

    def _failed(self, engine: Engine, error: Exception, what: str) -> None:
        """A call of this thread failed: the next ones are made less often."""
        self._trouble += 1
        if not engine.outage.covers(error):
            log.warning("%s: %s", what, error)

    def _tell(self, one: Running, error: FlowFabricError) -> None:
        """Report a lost lease: set the flag for threads immediately, and notify the loop."""
        if one.handle.lease_id not in self._worker.handlers.held:
            return  # it ended meanwhile
        one.is_lost = True
        one.stop_reason = str(error)
        one.interrupt_thread()
        with contextlib.suppress(RuntimeError):
            self._worker.loop.call_soon_threadsafe(self._worker.handlers.lost, one, error)

    # The handlers' loop

    async def _watch_the_loop(self) -> None:
        """Log when a handler blocks the loop, and interrupt it when its grace period has ended."""
        loop, thread = self._worker.loop, self._worker.thread_id
        while True:
            answered = threading.Event()
            asked = time.monotonic()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return  # it is closed
            said = False
            await asyncio.sleep(0.1)
            while not answered.is_set():
                stalled = time.monotonic() - asked
                culprit = self._worker.handlers.of_task(asyncio.current_task(loop))
                if stalled > _STALLED_AFTER and not said:
                    said = True
                    frame = sys._current_frames().get(thread)
                    log.warning(
                        "%s has blocked the worker's event loop for %.0f s:\n%s",
                        "something" if culprit is None else f"execution {culprit.claimed.execution_id}",
                        stalled,
                        "".join(traceback.format_stack(frame, limit=8)) if frame is not None else "",
                    )
                if culprit is not None and stalled > 1.0 and self._worker.handlers.is_over(culprit):
                    culprit.is_stopping = True
                    # Looked up again immediately before: only this handler may be interrupted.
                    if asyncio.current_task(loop) in culprit.tasks:
                        raise_in(thread, Interrupted)
                await asyncio.sleep(0.1)
            if said:
                log.warning("the event loop runs again after being blocked for %.0f s", time.monotonic() - asked)
            await asyncio.sleep(1.0)
