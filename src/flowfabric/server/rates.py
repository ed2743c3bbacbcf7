"""Token buckets: how many requests a key or an address may make.

Each process counts by itself, in a bounded number of buckets: those that are full again are as good as none.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

from flowfabric.server.options import Rate

_MOST = 10_000


class Buckets:
    """One bucket per name. `take` returns 0, or the seconds after which it is worth trying again."""

    def __init__(self, rate: Rate | None, *, most: int = _MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._most = most
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what was left, and when

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str) -> float:
        """Take one request from the bucket of a name."""
        rate = self._rate
        if rate is None:
            return 0.0
        now = self._clock()
        left, at = self._buckets.get(name, (float(rate.burst), now))
        left = min(left + (now - at) * rate.per_second, rate.burst)
        # A refused request takes nothing: a client that keeps trying still gets the rate.
        wait = 0.0 if left >= 1 else (1 - left) / rate.per_second
        self._buckets[name] = (left - 1 if not wait else left, now)
        self._buckets.move_to_end(name)
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return wait


def retry_after(seconds: float) -> str:
    """The header `Retry-After`: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


@lru_cache(maxsize=4096)
def address_group(address: str) -> str:
    """Whose bucket an address uses: of IPv6 that of its network, of which one machine has all addresses."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6:
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address
