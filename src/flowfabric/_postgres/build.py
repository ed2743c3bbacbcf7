"""The build of the functions that this package brings: its version, and which processes may work with it.

`sql/version.json` states both. A process works with functions of its own version and of newer ones, as long as these
say that they still serve it. The number is raised when the functions change after a release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec
from msgspec import Struct

from flowfabric.errors import ConnectionFailed


class Build(Struct, frozen=True):
    """A build of the functions: its version, the oldest version of a process that it serves, what it consists of."""

    version: int
    oldest: int
    digest: str

    def serves(self, process: Build) -> bool:
        """Whether a process with the functions of `process` may call these."""
        return self.oldest <= process.version <= self.version


class _Stated(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    oldest: int
    released: dict[int, str]  # the digests of released versions


def sql_files(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the path below `sql/` and the text of every SQL file under a folder, in the order of the paths."""
    yield from _under(_sql() / folder, folder)


def settings_of_functions() -> str:
    """Return the statements that set the planner settings of functions."""
    return (_sql() / "settings.sql").read_text(encoding="utf-8")


def stated() -> _Stated:
    """Return what `sql/version.json` says."""
    return msgspec.json.decode((_sql() / "version.json").read_bytes(), type=_Stated)


def _sql() -> Traversable:
    return resources.files("flowfabric._postgres") / "sql"


def _under(folder: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _under(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".sql"):
            yield f"{path}/{entry.name}", entry.read_text(encoding="utf-8")


def _digest() -> str:
    digest = hashlib.sha256()
    for path, sql in (*sql_files("functions"), ("settings", settings_of_functions())):
        digest.update(f"{path}\0{sql}\0".encode())
    return digest.hexdigest()


THIS = Build(stated().version, stated().oldest, _digest())


def check_build(found: Build, target: str | None = None) -> None:
    """Refuse functions that this process cannot work with."""
    if found.version < THIS.version:
        raise ConnectionFailed(
            "schema_older",
            f"its functions are of version {found.version}, this package needs {THIS.version}",
            target=target,
        )
    if not found.serves(THIS):
        raise ConnectionFailed(
            "schema_newer",
            f"its functions are of version {found.version} and serve processes from version {found.oldest} on, "
            f"this package has version {THIS.version}",
            target=target,
        )


def build_of(row: Any) -> Build:
    """Return the build in a row of `deployment_info`; version 0 in a database that has none."""
    return Build(row["functions_version"] or 0, row["functions_oldest"] or 0, row["functions"] or "")
