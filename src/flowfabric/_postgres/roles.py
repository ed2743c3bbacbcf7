"""Who may call what: four roles, as the header of every public function lists them.

A public function has a line `-- Roles    work, operate` above it, or `-- Roles    owner` if no role may call it.
`migrate.py` grants what these lines say; `database.py` asks them which role a refused call needs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Final

from flowfabric._postgres.build import sql_files
from flowfabric.errors import NotAllowed

_HEADER = re.compile(r"(?m)((?:^--[^\n]*\n)+)^create or replace function flowfabric\.(\w+)\(([^$]*)\$\$")
_LINE = re.compile(r"(?m)^-- Roles    (.+)$")
_CALL = re.compile(r"flowfabric\.(\w+)\(")
_DENIED = re.compile(r"^permission denied for function (\w+)")
_OWNER = "owner"


class Role(StrEnum):
    """What a database user may do. The database stores exactly these words."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    OPERATE = "operate"

    @property
    def option(self) -> str:
        """The option of `flowfabric migrate` that grants it."""
        return _OPTIONS[self]


_OPTIONS: Final[Mapping[Role, str]] = MappingProxyType(
    {
        Role.READ: "--read-role",
        Role.SUBMIT: "--submit-role",
        Role.WORK: "--worker-role",
        Role.OPERATE: "--operate-role",
    }
)


def declared(sql: str) -> dict[str, frozenset[Role]]:
    """Return the public functions of a file and the roles that may call them; no role: only the owner may."""
    found = {}
    for header, name, signature in _HEADER.findall(sql):
        if "security definer" not in signature:
            continue
        line = _LINE.search(header)
        if line is None:
            raise ValueError(f"{name}: its header has no line `-- Roles    ...`")
        words = line[1].split(", ")
        found[name] = frozenset() if words == [_OWNER] else frozenset(Role(word) for word in words)
    return found


@cache
def callers() -> Mapping[str, frozenset[Role]]:
    """Return who may call each public function."""
    found: dict[str, frozenset[Role]] = {}
    for _, sql in sql_files("functions"):
        found.update(declared(sql))
    return MappingProxyType(found)


def functions_of(kinds: Collection[str]) -> list[str]:
    """Return the functions that a user with these roles may call."""
    return sorted(name for name, roles in callers().items() if not roles.isdisjoint(kinds))


def not_allowed(message: str, statement: str) -> NotAllowed | None:
    """Return the error for a call that the server refused; None if it refused something else than one of our functions.

    The message names the function, in the server's language; the statement knows which names are ours. A function that
    does more for some users than for others names the one that they would need.
    """
    named = re.findall(r"\w+", message)
    ours = [*_CALL.findall(statement), *_DENIED.findall(message)]
    function = next((name for name in ours if name in named and name in callers()), None)
    if function is None:
        return None
    roles = [role for role in Role if role in callers()[function]]
    return NotAllowed(function, roles, option=roles[0].option if roles else None)
