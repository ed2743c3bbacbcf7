"""How much a server takes: bodies, requests of a key or an address, connections, time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from flowfabric.server.operation import CONTROL, LARGE, MEDIUM, Operation
from flowfabric.server.options import Options, Rate
from flowfabric.server.problems import Problem
from flowfabric.server.rates import Buckets, retry_after

DEADLINE: Final = "flowfabric.deadline"  # in the scope: the timeout of the request
_REQUEST_TIMEOUT: Final = 30.0
_LINK_RATE: Final = Rate(5, 30)


class Limits:
    """The limits of one process. Without options: those of an app that is mounted in another program."""

    def __init__(self, options: Options | None = None) -> None:
        self.request_timeout = _REQUEST_TIMEOUT if options is None else options.request_timeout
        self.keys = Buckets(None if options is None else options.key_rate)
        self.addresses = Buckets(None if options is None else options.address_rate)
        self.links = Buckets(_LINK_RATE if options is None else options.link_rate)
        self.is_full: Callable[[], bool] = lambda: False  # the process knows its connections
        self._bodies = {LARGE: LARGE, MEDIUM: MEDIUM, CONTROL: CONTROL}
        if options is not None:
            self._bodies = {LARGE: options.large_body, MEDIUM: options.medium_body, CONTROL: options.control_body}

    def body(self, operation: Operation) -> int:
        """How many bytes a body of the operation may have."""
        return self._bodies.get(operation.limit, operation.limit)

    def take(self, key_id: str | None) -> None:
        """Count a request of an API key; a `Problem` says when to come back if there were too many."""
        if key_id is not None and (wait := self.keys.take(key_id)):
            raise Problem(
                429,
                "too_many_requests",
                "this API key sends more requests than the server takes",
                headers={"Retry-After": retry_after(wait)},
            )

    def take_link(self, address: str) -> None:
        """The same for a link, which anyone may try."""
        if wait := self.links.take(address):
            raise Problem(429, "too_many_requests", "too many links are opened from this address",
                          headers={"Retry-After": retry_after(wait)})  # fmt: skip


def more_time(scope: MutableMapping[str, Any], seconds: float | None) -> None:
    """Let a request take this many seconds more than others; None: no limit."""
    deadline: asyncio.Timeout | None = scope.get(DEADLINE)
    if deadline is None:
        return
    until = deadline.when()
    deadline.reschedule(None if seconds is None or until is None else until + seconds)
