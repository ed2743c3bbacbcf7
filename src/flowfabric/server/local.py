"""What protects a server without API keys: a web page that the same person has open must not be able to use it."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from flowfabric.server.problems import Problem


def check_local(headers: Iterable[tuple[bytes, bytes]], origins: Collection[str] = ()) -> Problem | None:
    """Refuse a request that names another host than this machine, or comes from a page of another.

    A page whose name resolves to 127.0.0.1 names itself as the host; a form that a page sends names its origin. The
    page of a link sends no referrer, so its origin is `null`, as is that of a sandboxed page of any site.
    `Sec-Fetch-Site`, which no page can set, tells the two apart.
    """
    named: list[str] = []
    is_own = False
    for name, value in headers:
        if name == b"host" and not _is_local(f"//{value.decode('latin-1')}"):
            return _refused("the request is addressed to a name that is not this machine's own")
        if name == b"origin":
            named.append(value.decode("latin-1"))
        elif name == b"sec-fetch-site":
            is_own = value == b"same-origin"
    if all(one in origins or _is_local(one) or (one == "null" and is_own) for one in named):
        return None
    return _refused("the request comes from a page of another site")


def _is_local(address: str) -> bool:
    try:
        host = urlsplit(address).hostname
        return host == "localhost" or (host is not None and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False


def _refused(detail: str) -> Problem:
    return Problem(403, "forbidden", f"{detail}; a server that asks for no keys refuses it")
