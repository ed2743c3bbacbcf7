"""How a server runs: its options, from the command line, else from the environment, else their defaults.

Every option is text until here. An option that is wrong is refused under the name by which it was given: `--grace`, or
`FLOWFABRIC_GRACE`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from flowfabric import settings
from flowfabric.errors import InvalidInput
from flowfabric.values.durations import duration

Auth = Literal["keys", "none"]
_LEVELS: Final = ("debug", "info", "warning", "error")
_SIZE: Final = re.compile(r"(\d{1,12})\s*(b|kib|mib|gib)?", re.IGNORECASE)
_UNITS: Final = {"b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
_RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*/\s*s(?:\s+burst\s+(\d{1,9}))?", re.IGNORECASE)
_WORDS: Final = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}


class Rate(Struct, frozen=True):
    """How many requests per second on average, and how many at once."""

    per_second: float
    burst: int


class Options(Struct, frozen=True, kw_only=True):
    """The options of a server, checked."""

    host: str
    port: int
    processes: int
    auth: Auth
    duties: bool
    grace: float  # seconds
    app: str | None
    owner_dsn: str | None
    connections: int  # to the database, per process
    tls_certificate: str | None
    tls_key: str | None
    cors_origins: tuple[str, ...]
    trusted_proxies: tuple[str, ...]
    large_body: int  # bytes
    medium_body: int
    control_body: int
    key_rate: Rate | None
    address_rate: Rate | None
    link_rate: Rate | None
    request_timeout: float  # seconds
    max_connections: int  # of clients, per process
    log_level: str
    log_json: bool
    access_log: bool

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, port: int | None = None) -> str:
        """The address for people."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_certificate else 'http'}://{host}:{self.port if port is None else port}"

    def __repr__(self) -> str:
        # The owner's address may contain a password.
        return f"Options({self.url()})"


def load_options(
    given: Mapping[str, str | bool | int | None] | None = None, environ: Mapping[str, str] | None = None
) -> Options:
    """Return the options of a server: those `given` win over the environment's."""
    texts: dict[str, tuple[str | None, str]] = {
        name: (default, settings.SERVER_ENVIRONMENT[name]) for name, default in settings.SERVER.items()
    }
    for name, text in settings.load_server(environ).items():
        texts[name] = (text, settings.SERVER_ENVIRONMENT[name])
    for name, value in (given or {}).items():
        if value is not None:
            text = str(value) if not isinstance(value, bool) else "on" if value else "off"
            texts[name] = (text, f"--{name.replace('_', '-')}")
    parsed: dict[str, Any] = {}
    for name, (found, source) in texts.items():
        parsed[name] = None if found is None else _PARSERS[name](found, source)
    parsed["host"], parsed["port"] = parsed.pop("listen")
    for name in ("cors_origins", "trusted_proxies"):
        parsed[name] = parsed[name] or ()
    options = Options(**parsed)
    _check(options)
    return options


def _check(options: Options) -> None:
    """Refuse options that do not fit together."""
    for one, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
        if getattr(options, one) is not None and getattr(options, other) is None:
            raise InvalidInput("missing", field=f"--{other.replace('_', '-')}", allowed="the certificate and its key")
    if options.auth == "none" and not options.is_loopback:
        raise InvalidInput(
            f"not on {options.host}: anyone who reaches it could do everything",
            field="--auth none",
            allowed="an address of this machine alone, such as 127.0.0.1",
        )


def _address(text: str, field: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535 or len(port) > 5:
        raise InvalidInput(f"got {text!r}", field=field, allowed="HOST:PORT, such as 0.0.0.0:8484 or [::]:8484")
    return host, int(port)


def _int(least: int, most: int) -> Callable[[str, str], int]:
    def parse(text: str, field: str) -> int:
        if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
            raise InvalidInput(f"got {text!r}", field=field, allowed=f"{least}..{most}")
        return int(text)

    return parse


def _switch(text: str, field: str) -> bool:
    if text.lower() not in _WORDS:
        raise InvalidInput(f"got {text!r}", field=field, allowed="on, off")
    return _WORDS[text.lower()]


def _span(least: float) -> Callable[[str, str], float]:
    def parse(text: str, field: str) -> float:
        seconds = duration(text, field).total_seconds()
        if not least <= seconds <= 86_400:
            raise InvalidInput(f"got {text!r}", field=field, allowed=f"{least:g} seconds to 1 day")
        return seconds

    return parse


def _size(text: str, field: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS[(found[2] or "b").lower()] if found else 0
    if not 1024 <= size <= 1024**3:
        raise InvalidInput(f"got {text!r}", field=field, allowed="1KiB to 1GiB, such as 64KiB or 1MiB")
    return size


def _rate(text: str, field: str) -> Rate | None:
    if text.lower() in ("off", "none"):
        return None
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0 or (found[2] is not None and int(found[2]) < 1):
        raise InvalidInput(f"got {text!r}", field=field, allowed="off, or a rate such as 100/s, 100/s burst 200")
    per_second = float(found[1])
    return Rate(per_second, int(found[2]) if found[2] else max(1, round(per_second * 2)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _origins(text: str, field: str) -> tuple[str, ...]:
    for origin in (found := _names(text)):
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin:
            raise InvalidInput(
                f"got {origin!r}", field=field, allowed="origins such as https://app.example, separated by commas"
            )
    return found


def _networks(text: str, field: str) -> tuple[str, ...]:
    for network in (found := _names(text)):
        try:
            ipaddress.ip_network(network)
        except ValueError:
            raise InvalidInput(
                f"got {network!r}", field=field, allowed="addresses or networks such as 10.0.0.0/8, separated by commas"
            ) from None
    return found


def _word(*allowed: str) -> Callable[[str, str], str]:
    def parse(text: str, field: str) -> str:
        if text.lower() not in allowed:
            raise InvalidInput(f"got {text!r}", field=field, allowed=", ".join(allowed))
        return text.lower()

    return parse


def _file(text: str, field: str) -> str:
    path = Path(text)
    if not path.is_file():
        raise InvalidInput(f"there is no file {text}", field=field, allowed="a file in PEM format")
    return str(path)


def _text(text: str, field: str) -> str:
    return text


_PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "listen": _address,
    "processes": _int(1, 256),
    "auth": _word("keys", "none"),
    "duties": _switch,
    "grace": _span(0),
    "app": _text,
    "owner_dsn": _text,
    "connections": _int(2, 1000),
    "tls_certificate": _file,
    "tls_key": _file,
    "cors_origins": _origins,
    "trusted_proxies": _networks,
    "large_body": _size,
    "medium_body": _size,
    "control_body": _size,
    "key_rate": _rate,
    "address_rate": _rate,
    "link_rate": _rate,
    "request_timeout": _span(0.1),
    "max_connections": _int(1, 1_000_000),
    "log_level": _word(*_LEVELS),
    "log_json": _switch,
    "access_log": _switch,
}
