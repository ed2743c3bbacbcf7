"""Who a request comes from, if it came through proxies that are trusted to say so."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

Headers = Iterable[tuple[bytes, bytes]]


class TrustedProxies:
    """The networks whose `X-Forwarded-For` and `X-Forwarded-Proto` count. Without any, the headers are ignored."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)
        self.trusts = lru_cache(maxsize=1024)(self._trusts)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def _trusts(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return any((mapped or found) in network for network in self._networks)

    def resolve(self, peer: str, scheme: str, headers: Headers) -> tuple[str, str]:
        """Return the client's address and the scheme it used.

        Each proxy appends the address that it saw, so the last one that is not a proxy's is the client's; the
        client may have invented those before it. A broken list counts up to the break.
        """
        if not self._networks or not self.trusts(peer):
            return peer, scheme
        forwarded: list[str] = []
        protos: list[str] = []
        for name, value in headers:
            if name == b"x-forwarded-for":
                forwarded += value.decode("latin-1").split(",")
            elif name == b"x-forwarded-proto":
                protos += value.decode("latin-1").split(",")
        address = peer
        for one in reversed(forwarded):
            found = _address(one)
            if found is None:
                break
            address = found
            if not self.trusts(found):
                break
        proto = protos[-1].strip().lower() if protos else scheme
        return address, proto if proto in ("http", "https") else scheme


def _address(text: str) -> str | None:
    """The address of one entry, which may have a port; None if it is not one."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
