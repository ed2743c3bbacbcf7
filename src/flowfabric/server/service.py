"""The service: what all requests of a process share."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from flowfabric.bridges.callbacks import link_to
from flowfabric.client.outcomes import Outcomes
from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.server.call import Caller
from flowfabric.server.limits import Limits
from flowfabric.server.opening import Opening
from flowfabric.server.operation import Scope
from flowfabric.server.rates import address_group
from flowfabric.server.sse import Clients
from flowfabric.server.together import Together
from flowfabric.values.execution import Created, Duplicate, Execution, NewExecution, Outcome
from flowfabric.values.ids import ExecutionId

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.server.metrics import StoredGauges
    from flowfabric.server.operation import Operation
    from flowfabric.server.telemetry import Telemetry

log = logging.getLogger("flowfabric.server")


class Keys(Protocol):
    """Finds the caller of a request by the API key it shows."""

    async def caller(self, key: str, address: str) -> Caller | None:
        """Who the key belongs to; None if it is unknown, expired or revoked."""


class NoKeys:
    """Every request is an administrator's: for a server on the loopback address only."""

    _EVERYTHING = frozenset(Scope)

    async def caller(self, key: str, address: str) -> Caller | None:
        """The same caller for every request."""
        return Caller(name="anonymous", scopes=self._EVERYTHING, address=address)


class Service:
    """The engine of one process of the server, and everything that its requests share."""

    def __init__(
        self,
        engine: Engine,
        *,
        app: App | None = None,
        keys: Keys | None = None,
        owner: Engine | None = None,
        public_url: str | None = None,
    ) -> None:
        """`app`: whose tasks check arguments, and whose codecs read and write payloads.

        `keys`: where API keys are looked up; None: there is none, and every operation that needs one is refused.
        `owner`: an engine connected as the owner of the schema, for what no other role may do.
        `public_url`: the address under which people reach the server, for links; by default that of the settings.
        """
        self.engine = engine
        self.owner = owner
        self.app = app
        self.keys: Keys | None = keys
        self.codecs = None if app is None else app.codecs
        self.submissions: Together[NewExecution, Created | Duplicate] = Together(
            self._create, weigh=lambda item: len(item.input_payload)
        )
        self.reads: Together[ExecutionId, Execution | None] = Together(self._read)
        self._outcomes = Outcomes(engine, log.debug)
        self.opening = Opening()
        self.draining = asyncio.Event()  # set when the process is about to end: waiting requests are answered
        self.clients = Clients(self.draining)
        self.leaving: set[asyncio.Task[None]] = set()  # work that answered requests left to do
        self.limits = Limits()
        self.telemetry: Telemetry | None = None
        self.gauges: StoredGauges | None = None
        self._public_url = public_url

    async def _create(self, items: list[NewExecution]) -> list[Created | Duplicate | FlowFabricError]:
        return await self.engine.create_many(items)

    async def _read(self, execution_ids: list[ExecutionId]) -> list[Execution | None]:
        return await self.engine.read_executions(execution_ids)

    def limit_of(self, operation: Operation) -> int:
        """How many bytes a body may have."""
        return self.limits.body(operation)

    def admit(self, operation: Operation, caller: Caller) -> None:
        """Refuse a request of a caller that sends too many."""
        self.limits.take(caller.key_id)
        if operation.chapter == "links":
            self.limits.take_link(address_group(caller.address))

    async def outcome(self, execution_id: ExecutionId, wait: float) -> Outcome | None:
        """How an execution ended; None if it has not within this many seconds, or until the process is about to end."""
        found = (await self.engine.read_outcomes([execution_id])).get(execution_id)
        if found is not None or wait <= 0 or self.draining.is_set():
            return found
        ended = self._outcomes.future(execution_id)
        draining = asyncio.ensure_future(self.draining.wait())
        try:
            await asyncio.wait((ended, draining), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            ended.cancel()
            draining.cancel()

    def link(self, callback: str) -> str | None:
        """The link of a callback; None if the public address is not known."""
        return link_to(callback, self._public_url)

    async def close(self) -> None:
        """Stop what runs in the background. The engine stays open."""
        self.draining.set()
        await self._outcomes.close()
        self.opening.close()

    def __repr__(self) -> str:
        return f"Service({self.engine!r})"
