"""Brings a database to the schema this package needs.

Schema steps are numbered files, applied once and in order; functions are replaced whole on every run, and never by
older ones. Everything happens in one transaction under a lock of a table, so any number of processes may migrate at the
same time and a crash leaves the database unchanged. Old and new processes may work while it happens: functions that
only the build before has are kept as long as its processes are served. Connecting never migrates: it compares versions
and says what to do (see `database.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import asyncpg

from flowfabric._postgres import statements
from flowfabric._postgres.build import THIS, Build, build_of, check_build, settings_of_functions, sql_files
from flowfabric._postgres.roles import Role, callers, functions_of
from flowfabric.errors import ConnectionFailed, InvalidInput

_LOCK = 708_300
_STEP = re.compile(r"^(\d{4})_([a-z0-9_]+)\.sql$")
_CREATE = re.compile(r"^create or replace function flowfabric\.(\w+)", re.MULTILINE)
# A step that waits for a lock makes all other calls wait behind it.
_LOCK_TIMEOUT = "500ms"
_PATIENCE = 60.0


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
    """The result of a run: the steps it applied, and the versions of the schema and of the functions now.

    `replaced` is false if nothing was changed: the database has newer functions, which serve this package too, or is
    current and was to be left alone.
    """

    applied: tuple[str, ...]
    version: int
    functions: int
    replaced: bool = True


def steps() -> tuple[Step, ...]:
    """Return the numbered steps of this package, in order."""
    found = []
    for path, sql in sql_files("schema"):
        name = path.rpartition("/")[2]
        match = _STEP.match(name)
        if match is None:
            raise ValueError(f"schema step {name} is not named like 0001_name.sql")
        found.append(Step(int(match[1]), match[2], sql))
    if [s.number for s in found] != list(range(1, len(found) + 1)):
        raise ValueError("schema steps are not numbered 1, 2, 3, ...")
    return tuple(found)


SCHEMA_VERSION = len(steps())


def check_steps(recorded: Sequence[str]) -> None:
    """Refuse a database whose recorded steps (`0001_name`) are not those of this package."""
    ours = {step.number: step.label for step in steps()}
    for label in recorded:
        known = ours.get(int(label.partition("_")[0]), label)
        if known != label:
            raise ConnectionFailed("schema_foreign", f"it has the step {label}, this package has {known}")


async def current_version(connection: asyncpg.Connection[Any]) -> tuple[int, Build | None]:
    """Return the version of the schema in the database and the build of its functions. Every role may call it.

    Version 0 without a schema; no build if the functions are of a time before builds had versions.
    """
    if await connection.fetchval("select to_regprocedure('flowfabric.deployment_info()') is not null"):
        with contextlib.suppress(asyncpg.UndefinedColumnError):
            row = await connection.fetchrow(statements.DEPLOYMENT_INFO)
            if row is not None:
                check_steps(row["steps"])
                return row["schema_version"] or 0, build_of(row)
    return await _recorded_version(connection), None


async def current_migration(connection: asyncpg.Connection[Any]) -> Migration | None:
    """Return the state of a database whose schema and functions are those of this package; None for any other."""
    version, build = await current_version(connection)
    if version < SCHEMA_VERSION or build is None or build.digest != THIS.digest:
        return None
    return Migration((), version, build.version, replaced=False)


async def _recorded_version(connection: asyncpg.Connection[Any]) -> int:
    if not await connection.fetchval("select to_regclass('flowfabric.schema_step') is not null"):
        return 0
    rows = await connection.fetch("select number, name from flowfabric.schema_step order by number")
    check_steps([Step(row["number"], row["name"], "").label for row in rows])
    return int(rows[-1]["number"]) if rows else 0


async def migrate(
    connection: asyncpg.Connection[Any],
    *,
    roles: Mapping[Role, Sequence[str]] = MappingProxyType({}),
    force: bool = False,
    patience: float = _PATIENCE,
) -> Migration:
    """Bring the schema up to date; safe to run from many processes at the same time, and under load.

    Functions that are newer than this package's stay, unless forced. A step that cannot have its locks at once gives
    way to the others and is tried again, for `patience` seconds. Each database role in `roles` gets EXECUTE on the
    functions of its kind and nothing on the tables. A role named once is stored, and later runs grant to it again;
    named under another kind, it has both.
    """
    until = time.monotonic() + patience
    pause = 0.1
    try:
        while True:
            try:
                # A process that waited for the lock must see its holder's changes.
                async with connection.transaction(isolation="read_committed"):
                    return await _migrate(connection, roles, force=force)
            except asyncpg.LockNotAvailableError as error:
                if time.monotonic() >= until:
                    raise ConnectionFailed("schema_locked", await _who_locks(connection)) from error
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads the tries
            pause = min(pause * 2, 2.0)
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConnectionFailed("missing_privileges", f"{await _who_may(connection)} ({error})") from error


async def _migrate(
    connection: asyncpg.Connection[Any], roles: Mapping[Role, Sequence[str]], *, force: bool
) -> Migration:
    await connection.execute("select set_config('lock_timeout', $1, true)", _LOCK_TIMEOUT)
    if await connection.fetchval("select to_regclass('flowfabric.build') is null"):
        await connection.execute("select pg_advisory_xact_lock($1)", _LOCK)  # who creates the tables
    # The names of functions are written with their schema, whatever the owner's search path is.
    await connection.execute("set local client_min_messages = warning; set local search_path = pg_catalog")
    await connection.execute("create schema if not exists flowfabric")
    await connection.execute(_OWN_TABLES)
    # Not an advisory lock: every role that can connect can take those.
    await connection.execute("lock table flowfabric.build in share row exclusive mode")
    version = await _recorded_version(connection)
    before = await _recorded_build(connection)
    if before is not None and before.version > THIS.version and not force:
        check_build(before)
        return Migration((), version, before.version, replaced=False)
    applied = []
    for step in steps()[version:]:
        await connection.execute(step.sql)
        await connection.execute(
            "insert into flowfabric.schema_step (number, name) values ($1, $2)", step.number, step.name
        )
        applied.append(step.label)
    await _replace_functions(connection, before)
    await connection.execute("select flowfabric.seed_keystore()")
    await connection.execute("select flowfabric.begin_epoch()")
    await _store_roles(connection, roles)
    await _grant(connection)
    return Migration(tuple(applied), max(version, SCHEMA_VERSION), THIS.version)


async def _replace_functions(connection: asyncpg.Connection[Any], before: Build | None) -> None:
    """Create or replace all functions; drop those of builds whose processes are not served any more."""
    # Functions may refer to each other in any order.
    await connection.execute("set local check_function_bodies = off")
    is_same = before is None or before.digest == THIS.digest
    old = {row["oid"]: row["place"] for row in await connection.fetch(_FUNCTIONS)}
    for path, sql in sql_files("functions"):
        try:
            async with contextlib.nullcontext() if is_same else connection.transaction():
                await connection.execute(sql)
        except asyncpg.InvalidFunctionDefinitionError as error:
            # It returns something else now, or names its arguments otherwise: it must be dropped and created.
            if before is not None and before.version != THIS.version and THIS.serves(before):
                raise ValueError(
                    f"{path} replaces a function that processes of version {before.version} call"
                ) from error
            names = _CREATE.findall(sql)
            for row in await connection.fetch(_FUNCTIONS):
                if row["name"] in names and old.get(row["oid"]) == row["place"]:
                    await connection.execute(row["drop"])
            await connection.execute(sql)
    for row in await connection.fetch(_FUNCTIONS):
        if old.get(row["oid"]) == row["place"]:  # this transaction has not replaced it
            await _keep_or_drop(connection, row, before)
    await connection.execute("delete from flowfabric.kept_function where to_regprocedure(signature) is null")
    await connection.execute(settings_of_functions())
    await connection.execute("delete from flowfabric.build")
    await connection.execute(
        "insert into flowfabric.build (functions, version, oldest) values ($1, $2, $3)",
        THIS.digest,
        THIS.version,
        THIS.oldest,
    )


async def _keep_or_drop(connection: asyncpg.Connection[Any], old: asyncpg.Record, before: Build | None) -> None:
    """Keep a function that this build does not have, if processes of the last build that had it are served."""
    last = await connection.fetchval(
        "select version from flowfabric.kept_function where signature = $1", old["signature"]
    )
    if last is None:
        # The same version with other functions is a build under development; no process needs what it had before.
        last = 0 if before is None or before.version == THIS.version else before.version
    # Calls that began with functions newer than these end with them; the next migration drops them.
    is_forced = before is not None and last == before.version > THIS.version
    if is_forced or THIS.oldest <= last < THIS.version:
        await connection.execute(_KEEP, old["signature"], last)
    else:
        await connection.execute(old["drop"])


async def _recorded_build(connection: asyncpg.Connection[Any]) -> Build | None:
    try:
        row = await connection.fetchrow("select version, oldest, functions from flowfabric.build")
    except asyncpg.UndefinedColumnError as error:
        raise ConnectionFailed("schema_foreign", "its functions have no version") from error
    return None if row is None else Build(row["version"], row["oldest"], row["functions"])


async def _who_may(connection: asyncpg.Connection[Any]) -> str:
    """Say who may migrate, to a user who may not."""
    row = await connection.fetchrow(
        "select current_user as who, current_database() as name, (select pg_get_userbyid(n.nspowner)"
        " from pg_namespace n where n.nspname = 'flowfabric') as owner"
    )
    if row["owner"] is None:
        return f"{row['who']} may not create a schema in {row['name']}; migrate as its owner"
    return f"the schema belongs to {row['owner']} and you are {row['who']}; migrate as {row['owner']}"


async def _who_locks(connection: asyncpg.Connection[Any]) -> str:
    rows = await connection.fetch(_LOCKERS, _LOCK)
    if not rows:
        return "try again"
    return "; ".join(
        f"process {row['pid']} of {row['usename']} ({row['application_name'] or 'no application name'}) has been in a "
        f"transaction since {row['since'] or 'some time'}"
        for row in rows
    )


_CREATE_ROLE = "`create role NAME login` makes it"
_OWN_TABLES = """
create table if not exists flowfabric.schema_step
    (number integer primary key, name text not null, applied_at timestamptz not null default now());
create table if not exists flowfabric.build
    (functions text not null, version integer not null, oldest integer not null);
-- Functions that this build has not, with the last version that had them.
create table if not exists flowfabric.kept_function
    (signature text primary key, version integer not null, kinds text[] not null);
-- Who may call the functions of this build: the next one keeps some of them.
create table if not exists flowfabric.public_function (signature text primary key, kinds text[] not null);
create table if not exists flowfabric.granted_role (
    name text not null,
    kind text not null constraint granted_role_kind_known check (kind in ('read', 'submit', 'work', 'operate')),
    primary key (name, kind)
);
"""

# The place of its row changes when a function is replaced.
_FUNCTIONS = """
select p.oid, p.ctid::text as place, p.proname as name, p.oid::regprocedure::text as signature,
       format('drop function %s', p.oid::regprocedure) as drop
from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace
"""

_KEEP = """
insert into flowfabric.kept_function (signature, version, kinds)
select $1, $2, coalesce((select f.kinds from flowfabric.public_function f where f.signature = $1), '{}')
on conflict do nothing
"""

_LOCKERS = """
select a.pid, a.usename, a.application_name, to_char(a.xact_start, 'YYYY-MM-DD HH24:MI:SS TZ') as since
from pg_stat_activity a
where a.pid <> pg_backend_pid()
  and exists (select from pg_locks l left join pg_class c on c.oid = l.relation
              where l.pid = a.pid and l.granted
                and (c.relnamespace = to_regnamespace('flowfabric') or (l.locktype = 'advisory' and l.objid = $1)))
order by a.xact_start limit 3
"""


async def _store_roles(connection: asyncpg.Connection[Any], roles: Mapping[Role, Sequence[str]]) -> None:
    named = [(name, kind) for kind, names in roles.items() for name in names]
    for name, kind in named:
        if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", name):
            raise InvalidInput(
                f"there is no role {name!r} on this server",
                field=kind.option,
                allowed=f"one that exists: {_CREATE_ROLE}",
            )
    await connection.executemany(
        "insert into flowfabric.granted_role values ($1, $2) on conflict do nothing",
        [(name, kind.value) for name, kind in named],
    )


async def _grant(connection: asyncpg.Connection[Any]) -> None:
    """Let the stored roles call the functions of their kinds. No other role may call any function."""
    for statement in await connection.fetchval(_REVOKES):
        await connection.execute(statement)
    for statement in await connection.fetchval(_GRANTS_OF_KEPT):
        await connection.execute(statement)
    await connection.execute("delete from flowfabric.public_function")
    names = {name: sorted(roles) for name, roles in callers().items()}
    for row in await connection.fetch(_PUBLIC):
        if (kinds := names.get(row["name"])) is not None:
            await connection.execute(
                "insert into flowfabric.public_function (signature, kinds) values ($1, $2)", row["signature"], kinds
            )
    # A role that was dropped since is passed over; created again, it is served again.
    found = await connection.fetch(
        "select g.name, array_agg(g.kind) as kinds from flowfabric.granted_role g join pg_roles r on r.rolname = g.name"
        " group by g.name"
    )
    for row in found:
        for statement in await connection.fetchval(_GRANTS, row["name"], functions_of(row["kinds"])):
            await connection.execute(statement)


# First revoke everything: a role may have lost a kind, a function a role, and the owner's default privileges may have
# given a new function to others.
_REVOKES = """
select array['revoke all on all functions in schema flowfabric from public']
    || coalesce(array_agg(distinct format('revoke all on all functions in schema flowfabric from %I', r.rolname)), '{}')
from pg_proc p
cross join lateral aclexplode(p.proacl) a
join pg_roles r on r.oid = a.grantee
where p.pronamespace = 'flowfabric'::regnamespace and a.grantee <> p.proowner
"""

# Functions that only the version before had.
_GRANTS_OF_KEPT = """
select coalesce(array_agg(distinct format('grant execute on function %s to %I', p.oid::regprocedure, r.rolname)), '{}')
from flowfabric.kept_function k
join pg_proc p on p.oid = to_regprocedure(k.signature)
join flowfabric.granted_role g on g.kind = any (k.kinds)
join pg_roles r on r.rolname = g.name
"""
_PUBLIC = """
select p.proname as name, p.oid::regprocedure::text as signature from pg_proc p
where p.pronamespace = 'flowfabric'::regnamespace and p.prosecdef
"""

_GRANTS = """
select array[format('grant usage on schema flowfabric to %I', $1::text)]
    || array_agg(format('grant execute on function %s to %I', p.oid::regprocedure, $1::text))
from pg_proc p
where p.pronamespace = 'flowfabric'::regnamespace and p.prosecdef and p.proname = any ($2::text[])
"""
