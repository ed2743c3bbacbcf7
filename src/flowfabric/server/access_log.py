"""The access log: a line per request with its route, API key id and request id.

A line has the template of the path and never the path itself, which may contain a link; no query, no header, no body.
"""

from __future__ import annotations

import logging

log = logging.getLogger("flowfabric.access")


def write(
    *, method: str, route: str, status: int, seconds: float, key_id: str | None, address: str, request_id: str
) -> None:
    """Write the line of one request."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "method": method,
        "route": route,
        "status": status,
        "seconds": round(seconds, 6),
        "key_id": key_id,
        "address": address,
        "request_id": request_id,
    }
    log.info(
        "%s %s %d %.1f ms key %s from %s, request %s",
        method,
        route,
        status,
        seconds * 1000,
        key_id or "-",
        address or "-",
        request_id,
        extra=fields,
    )
