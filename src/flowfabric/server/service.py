"""The service: what all requests of a process share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from flowfabric.engine import Engine
from flowfabric.server.call import Caller
from flowfabric.server.operation import Scope

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.server.operation import Operation


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
    """The engine, and what stands between it and the requests of one process."""

    def __init__(
        self, engine: Engine, *, app: App | None = None, keys: Keys | None = None, owner: Engine | None = None
    ) -> None:
        """`app`: whose tasks check arguments, and whose codecs read and write payloads.

        `keys`: where API keys are looked up; None: there is none, and every operation that needs one is refused.
        `owner`: an engine connected as the owner of the schema, for what no other role may do.
        """
        self.engine = engine
        self.owner = owner
        self.app = app
        self.keys: Keys | None = keys
        self.codecs = None if app is None else app.codecs
        self.is_draining = False

    def limit_of(self, operation: Operation) -> int:
        """How many bytes a body may have."""
        return operation.limit

    def admit(self, operation: Operation, caller: Caller) -> None:
        """Refuse a request of a caller that sends too many."""

    async def close(self) -> None:
        """Stop what runs in the background. The engine stays open."""

    def __repr__(self) -> str:
        return f"Service({self.engine!r})"
