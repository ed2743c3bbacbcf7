"""Brings a database to the schema this package needs.

Schema steps are numbered files, applied once and in order; functions are replaced whole on every run. Everything
happens in one transaction under an advisory lock, so any number of processes may migrate at the same time and a crash
leaves the database unchanged. Connecting never migrates: it compares versions and says what to do (see `database.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

import asyncpg

from flowfabric._postgres.roles import Role, functions_of
from flowfabric.errors import ConnectionFailed

_LOCK = 708_300
_STEP = re.compile(r"^(\d{4})_([a-z0-9_]+)\.sql$")


@dataclass(frozen=True)
class Step:
    """One numbered schema step."""

    number: int
    name: str
    sql: str

    @property
    def label(self) -> str:
        """The step for display and comparison: `0001_name`."""
        return f"{self.number:04d}_{self.name}"


@dataclass(frozen=True)
class Migration:
    """The result of a run: the steps it applied and the version of the schema now."""

    applied: tuple[str, ...]
    version: int


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the path below `sql/` and the text of every SQL file under a folder, in the order of the paths."""
    yield from _under(resources.files("flowfabric._postgres") / "sql" / folder, folder)


def _under(folder: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _under(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".sql"):
            yield f"{path}/{entry.name}", entry.read_text(encoding="utf-8")


def _settings() -> str:
    return (resources.files("flowfabric._postgres") / "sql" / "settings.sql").read_text(encoding="utf-8")


def steps() -> tuple[Step, ...]:
    """Return the numbered steps of this package, in order."""
    found = []
    for path, sql in _files("schema"):
        name = path.rpartition("/")[2]
        match = _STEP.match(name)
        if match is None:
            raise ValueError(f"schema step {name} is not named like 0001_name.sql")
        found.append(Step(int(match[1]), match[2], sql))
    if [s.number for s in found] != list(range(1, len(found) + 1)):
        raise ValueError("schema steps are not numbered 1, 2, 3, ...")
    return tuple(found)


def functions_digest() -> str:
    """Return the digest that identifies a build of the functions."""
    digest = hashlib.sha256()
    for path, sql in (*_files("functions"), ("settings", _settings())):
        digest.update(f"{path}\0{sql}\0".encode())
    return digest.hexdigest()


SCHEMA_VERSION = len(steps())
FUNCTIONS_DIGEST = functions_digest()


def check_steps(recorded: Sequence[str]) -> None:
    """Refuse a database whose recorded steps (`0001_name`) are not those of this package."""
    ours = {step.number: step.label for step in steps()}
    for label in recorded:
        known = ours.get(int(label.partition("_")[0]), label)
        if known != label:
            raise ConnectionFailed("schema_foreign", f"it has the step {label}, this package has {known}")


async def current_version(connection: asyncpg.Connection[Any]) -> int:
    """Return the version of the schema in the database; 0 without a schema. Every role may call it."""
    if await connection.fetchval("select to_regprocedure('flowfabric.deployment_info()') is not null"):
        with contextlib.suppress(asyncpg.UndefinedColumnError):  # a function of another build
            row = await connection.fetchrow("select schema_version, steps from flowfabric.deployment_info()")
            check_steps(row["steps"] if row is not None else ())
            return (row["schema_version"] if row is not None else None) or 0
    return await _recorded_version(connection)


async def _recorded_version(connection: asyncpg.Connection[Any]) -> int:
    if not await connection.fetchval("select to_regclass('flowfabric.schema_step') is not null"):
        return 0
    rows = await connection.fetch("select number, name from flowfabric.schema_step order by number")
    check_steps([Step(row["number"], row["name"], "").label for row in rows])
    return int(rows[-1]["number"]) if rows else 0


async def migrate(
    connection: asyncpg.Connection[Any], *, roles: Mapping[Role, Sequence[str]] = MappingProxyType({})
) -> Migration:
    """Bring the schema up to date; safe to run from many processes at the same time.

    Each database role in `roles` gets EXECUTE on the functions of its kind and nothing on the tables. A role named once
    is stored, and later runs grant to it again; named under another kind, it has both.
    """
    try:
        # A process that waited for the lock must see its holder's changes.
        async with connection.transaction(isolation="read_committed"):
            await connection.execute("select pg_advisory_xact_lock($1)", _LOCK)
            await connection.execute("set local client_min_messages = warning")
            await connection.execute("create schema if not exists flowfabric")
            await connection.execute(
                "create table if not exists flowfabric.schema_step"
                " (number integer primary key, name text not null, applied_at timestamptz not null default now())"
            )
            await connection.execute(_GRANTED_ROLE)
            version = await _recorded_version(connection)
            if version > SCHEMA_VERSION:
                raise ConnectionFailed(
                    "schema_newer",
                    f"the schema is version {version}, this package knows up to {SCHEMA_VERSION}",
                )
            applied = []
            for step in steps()[version:]:
                await connection.execute(step.sql)
                await connection.execute(
                    "insert into flowfabric.schema_step (number, name) values ($1, $2)",
                    step.number,
                    step.name,
                )
                applied.append(step.label)
            await connection.execute("create table if not exists flowfabric.build (functions text not null)")
            if await connection.fetchval("select functions from flowfabric.build") != FUNCTIONS_DIGEST:
                # Another build: drop all its functions. Grants are repeated below.
                await connection.execute(_DROP_FUNCTIONS)
            # Functions may refer to each other in any order.
            await connection.execute("set local check_function_bodies = off")
            for _, sql in _files("functions"):
                await connection.execute(sql)
            await connection.execute(_settings())
            await connection.execute("delete from flowfabric.build")
            await connection.execute("insert into flowfabric.build values ($1)", FUNCTIONS_DIGEST)
            await connection.execute("select flowfabric.seed_keystore()")
            await connection.execute("select flowfabric.begin_epoch()")
            await _store_roles(connection, roles)
            await _grant(connection)
            return Migration(tuple(applied), SCHEMA_VERSION)
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConnectionFailed("missing_privileges", str(error)) from error
    except asyncpg.UndefinedObjectError as error:
        raise ConnectionFailed("missing_privileges", f"{error}; create the role first") from error


_DROP_FUNCTIONS = """
do $$
declare
    v_function regprocedure;
begin
    for v_function in select p.oid::regprocedure from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace loop
        execute format('drop function %s', v_function);
    end loop;
end;
$$
"""

# Databases that were migrated before there were four roles have one list, of workers.
_GRANTED_ROLE = """
create table if not exists flowfabric.granted_role (
    name text not null,
    kind text not null constraint granted_role_kind_known check (kind in ('read', 'submit', 'work', 'operate')),
    primary key (name, kind)
);
do $$
begin
    if to_regclass('flowfabric.worker_role') is not null then
        insert into flowfabric.granted_role select w.name, 'work' from flowfabric.worker_role w on conflict do nothing;
        drop table flowfabric.worker_role;
    end if;
end;
$$
"""


async def _store_roles(connection: asyncpg.Connection[Any], roles: Mapping[Role, Sequence[str]]) -> None:
    named = [(name, kind.value) for kind, names in roles.items() for name in names]
    for name, _ in named:
        if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", name):
            raise ConnectionFailed("missing_privileges", f'role "{name}" does not exist; create the role first')
    await connection.executemany("insert into flowfabric.granted_role values ($1, $2) on conflict do nothing", named)


async def _grant(connection: asyncpg.Connection[Any]) -> None:
    """Let the stored roles call the functions of their kinds, and nobody else any function."""
    for statement in await connection.fetchval(_REVOKES):
        await connection.execute(statement)
    # A role that was dropped since is passed over; created again, it is served again.
    found = await connection.fetch(
        "select g.name, array_agg(g.kind) as kinds from flowfabric.granted_role g join pg_roles r on r.rolname = g.name"
        " group by g.name"
    )
    for row in found:
        for statement in await connection.fetchval(_GRANTS, row["name"], functions_of(row["kinds"])):
            await connection.execute(statement)


# First nobody may call anything: a role may have lost a kind, a function a role, and the owner's default privileges may
# have given a new function to others.
_REVOKES = """
select array['revoke all on all functions in schema flowfabric from public']
    || coalesce(array_agg(distinct format('revoke all on all functions in schema flowfabric from %I', r.rolname)), '{}')
from pg_proc p
cross join lateral aclexplode(p.proacl) a
join pg_roles r on r.oid = a.grantee
where p.pronamespace = 'flowfabric'::regnamespace and a.grantee <> p.proowner
"""

_GRANTS = """
select array[format('grant usage on schema flowfabric to %I', $1::text)]
    || array_agg(format('grant execute on function %s to %I', p.oid::regprocedure, $1::text))
from pg_proc p
where p.pronamespace = 'flowfabric'::regnamespace and p.prosecdef and p.proname = any ($2::text[])
"""
