"""Every setting that is not an argument: its environment name, its default, and where it is used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from flowfabric.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Read once when an engine connects. An argument given in code wins over the environment."""

    dsn: str | None = None  # FLOWFABRIC_DSN: the database; unset means the embedded server
    data_dir: Path = Path(".flowfabric")  # FLOWFABRIC_DATA_DIR: where the embedded server keeps its data
    pg_bin: Path | None = None  # FLOWFABRIC_PG_BIN: Postgres programs for the embedded server instead of the wheel's
    lanes: tuple[str, ...] = ("default",)  # FLOWFABRIC_LANES: registered by `prepare`, separated by commas
    test_dsn: str | None = None  # FLOWFABRIC_TEST_DSN: a server for the testing kit instead of its own
    public_url: str | None = None  # FLOWFABRIC_PUBLIC_URL: where people reach `flowfabric server`, for links

    def __repr__(self) -> str:
        # The DSN may contain a password.
        return f"Settings(data_dir={str(self.data_dir)!r}, lanes={self.lanes!r})"


ENVIRONMENT: Mapping[str, str] = {
    "dsn": "FLOWFABRIC_DSN",
    "data_dir": "FLOWFABRIC_DATA_DIR",
    "pg_bin": "FLOWFABRIC_PG_BIN",
    "lanes": "FLOWFABRIC_LANES",
    "test_dsn": "FLOWFABRIC_TEST_DSN",
    "public_url": "FLOWFABRIC_PUBLIC_URL",
}


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment; an empty variable counts as unset."""
    env = os.environ if environ is None else environ
    values = {name: text for name, variable in ENVIRONMENT.items() if (text := env.get(variable, "").strip())}
    lanes = Settings().lanes
    if "lanes" in values:
        lanes = tuple(part.strip() for part in values["lanes"].split(",") if part.strip())
        if not lanes:
            raise InvalidInput("no lane given", field=ENVIRONMENT["lanes"], allowed="lane names separated by commas")
    return Settings(
        dsn=values.get("dsn"),
        data_dir=Path(values.get("data_dir", ".flowfabric")),
        pg_bin=Path(values["pg_bin"]) if "pg_bin" in values else None,
        lanes=lanes,
        test_dsn=values.get("test_dsn"),
        public_url=_address(values["public_url"]) if "public_url" in values else None,
    )


def _address(text: str) -> str:
    """Return an address without its last slash."""
    try:
        parts = urlsplit(text)
        fits = (
            parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment or "@" in text)
        )
    except ValueError:
        fits = False
    if not fits:
        raise InvalidInput(
            "not an address", field=ENVIRONMENT["public_url"], allowed="http:// or https:// with a host, and a path"
        )
    return text.rstrip("/")


_INTERVAL = re.compile(r"FLOWFABRIC_([A-Z0-9_]+)_INTERVAL")


def load_intervals(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what the environment says about the intervals of duties: `FLOWFABRIC_LEASE_EXPIRY_INTERVAL`, by its duty.

    `Duties` reads it and knows the names. An empty variable counts as unset.
    """
    env = os.environ if environ is None else environ
    found = ((_INTERVAL.fullmatch(variable), text.strip()) for variable, text in env.items())
    return {match[1].lower(): text for match, text in found if match and text}


# Of `flowfabric server`, which has an option of the same name for each, and what holds without either; None: unset.
SERVER: Mapping[str, str | None] = {
    "listen": "127.0.0.1:8484",
    "processes": "1",
    "auth": "keys",
    "duties": "on",
    "grace": "30s",
    "app": None,
    "owner_dsn": None,
    "connections": "10",
    "tls_certificate": None,
    "tls_key": None,
    "cors_origins": None,
    "trusted_proxies": None,
    "large_body": "1MiB",
    "medium_body": "256KiB",
    "control_body": "64KiB",
    "key_rate": None,
    "address_rate": None,
    "link_rate": "5/s burst 30",
    "request_timeout": "30s",
    "max_connections": "2000",
    "log_level": "info",
    "log_json": "off",
    "access_log": "on",
}
SERVER_ENVIRONMENT: Mapping[str, str] = {name: f"FLOWFABRIC_{name.upper()}" for name in SERVER}


def load_server(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of the server that the environment has; an empty variable counts as unset."""
    env = os.environ if environ is None else environ
    return {name: text for name, variable in SERVER_ENVIRONMENT.items() if (text := env.get(variable, "").strip())}
