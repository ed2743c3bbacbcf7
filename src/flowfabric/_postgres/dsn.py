"""The address of a database: checked before use, and described without its secrets."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from flowfabric.errors import ConnectionFailed

_HOST = re.compile(r"(?:\[[^\[\]@]*\]|[^\[\]:@]*)(?::[0-9]*)?")
_OPTION = re.compile(r"[\w.%]+=.*", re.DOTALL)
_NO_URL = "not a URL such as postgresql://user@host/database"
_AMBIGUOUS = "the address is ambiguous; percent-encode the password (@ as %40, / as %2F, ? as %3F, # as %23)"


def check_dsn(dsn: str) -> None:
    """Refuse an address in which part of the password may be read as another part; the error quotes nothing of it.

    Every function that takes a DSN calls this first: the errors of a driver or a parser would quote the secret.
    """
    if problem := _problem(dsn):
        raise ConnectionFailed("bad_address", problem)


def _problem(dsn: str) -> str | None:
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return _AMBIGUOUS
    if parts.scheme not in ("postgresql", "postgres") or "://" not in dsn:
        return _NO_URL
    who, at, hosts = parts.netloc.rpartition("@")
    is_clear = (
        "@" not in who + parts.path
        and "#" not in dsn
        and all(_HOST.fullmatch(host) for host in hosts.split(","))
        and (not parts.query or all(_OPTION.fullmatch(option) for option in parts.query.split("&")))
        # The beginning of user:1?a=b@host looks like host:port.
        and (at or parts.path or ":" not in hosts or "@" not in parts.query)
    )
    return None if is_clear else _AMBIGUOUS


def describe(dsn: str) -> str:
    """Return the address in a DSN, without user, password and options, for messages."""
    try:
        parts = urlsplit(dsn)
        if parts.scheme not in ("postgresql", "postgres") or "@" in parts.path + parts.query + parts.fragment:
            return "the given address"  # not a URL, or an unquoted secret was read as another part
        host = parts.hostname or "local socket"
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "the given address"
    return f"{host}{port}{parts.path}"


def next_host_first(dsn: str) -> str:
    """Return the DSN with its hosts rotated: the driver would spend the whole timeout on a hanging first host."""
    parts = urlsplit(dsn)
    user, at, hosts = parts.netloc.rpartition("@")
    first, comma, rest = hosts.partition(",")
    return urlunsplit(parts._replace(netloc=f"{user}{at}{rest},{first}")) if comma else dsn
