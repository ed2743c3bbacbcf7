"""Health checks of a database: one finding per check, with advice.

Everything is read by catalogue queries on one connection and changes nothing. Some checks need rights that a worker
role does not have; such a check reports what it can see, and says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import asyncpg
from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric._postgres.build import THIS, build_of
from flowfabric._postgres.database import LOST, MINIMUM_SERVER, connection_failed
from flowfabric._postgres.dsn import describe
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric._postgres.roles import Role, functions_of
from flowfabric.errors import ConnectionFailed, FlowFabricError

_CLOCK_OFF = timedelta(seconds=2)
_OLD_TRANSACTION = timedelta(minutes=5)
_LATE_TIMER = timedelta(minutes=1)
_MANY_DEAD = 20_000
_BLOATED_BYTES = 64 * 1024 * 1024
_WRAPAROUND = 1_000_000_000
# These tables have few rows at any time: a large table or index is bloat from earlier rows.
_SHORT_LIVED = ("ready", "timer", "ready_floor", "waiter", "claim_grant")


class Finding(Struct, frozen=True):
    """The result of one check; `advice` says what to do unless it is ok."""

    check: str
    verdict: Literal["ok", "warning", "problem"]
    detail: str
    advice: str = ""


Check = Callable[["asyncpg.Connection[Any]"], Awaitable[Finding]]


async def examine(dsn: str) -> AsyncIterator[Finding]:
    """Run every check, one after another. Raises `ConnectionFailed` if the database is unreachable."""
    begun = time.monotonic()
    try:
        connection = await asyncpg.connect(
            dsn,
            timeout=15,
            command_timeout=30,
            statement_cache_size=0,
            server_settings={"application_name": "flowfabric doctor"},
        )
    except FlowFabricError:
        raise
    except Exception as error:
        raise connection_failed(error, describe(dsn)) from error
    try:
        took = (time.monotonic() - begun) * 1000
        yield Finding("connection", "ok", f"{describe(dsn)}, connected in {took:.0f} ms")
        for check in CHECKS:
            try:
                yield await check(connection)
            except (asyncpg.PostgresError, *LOST) as error:
                if connection.is_closed():
                    raise ConnectionFailed("unreachable", str(error), target=describe(dsn)) from error
                yield Finding(check.__name__.strip("_"), "warning", f"could not be checked: {error}")
    finally:
        await connection.close(timeout=5)


async def _server(connection: asyncpg.Connection[Any]) -> Finding:
    number = int(await connection.fetchval("show server_version_num"))
    words = await connection.fetchval("show server_version")
    if number < MINIMUM_SERVER:
        return Finding("server", "problem", f"PostgreSQL {words}", "15 or newer is needed")
    encoding = await connection.fetchval("show server_encoding")
    if encoding != "UTF8":
        return Finding("server", "problem", f"the database's encoding is {encoding}", "create a database in UTF8")
    return Finding("server", "ok", f"PostgreSQL {words}")


async def _schema(connection: asyncpg.Connection[Any]) -> Finding:
    migrate = "run `flowfabric migrate`"
    try:
        row = await connection.fetchrow(statements.DEPLOYMENT_INFO)
    except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
        return Finding("schema", "problem", "not installed", migrate)
    except asyncpg.UndefinedColumnError:
        return Finding("schema", "problem", "it belongs to another build", migrate)
    except asyncpg.InsufficientPrivilegeError as error:
        return Finding(
            "schema",
            "problem",
            str(error),
            "run `flowfabric migrate` with a role for this user as the owner of the schema",
        )
    version = (row["schema_version"] if row is not None else None) or 0
    if row is None or version < SCHEMA_VERSION:
        return Finding("schema", "problem", f"version {version}, this package needs {SCHEMA_VERSION}", migrate)
    build = build_of(row)
    words = f"version {version}, functions of version {build.version}"
    if build.version < THIS.version:
        return Finding("schema", "problem", f"{words}, this package needs {THIS.version}", migrate)
    if not build.serves(THIS):
        detail = f"{words}, which serve processes from version {build.oldest} on; this package has {THIS.version}"
        return Finding("schema", "problem", detail, "upgrade the package")
    if build.version > THIS.version:
        return Finding("schema", "ok", f"{words}, newer than this package's {THIS.version}, which they serve too")
    if build.digest != THIS.digest:
        return Finding("schema", "warning", f"{words}, which differ from this package's", migrate)
    return Finding("schema", "ok", words)


async def _privileges(connection: asyncpg.Connection[Any]) -> Finding:
    row = await connection.fetchrow(
        """
        select current_user as who,
               has_database_privilege(current_database(), 'create') as may_create,
               (select pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = 'flowfabric') as is_owner,
               (select has_schema_privilege(n.oid, 'usage') from pg_namespace n
                where n.nspname = 'flowfabric') as may_use,
               (select coalesce(array_agg(p.proname::text), '{}') from pg_proc p
                join pg_namespace n on n.oid = p.pronamespace
                where n.nspname = 'flowfabric' and p.prosecdef and has_function_privilege(p.oid, 'execute')) as open
        """
    )
    assert row is not None
    who = row["who"]
    if row["may_use"] is None:
        if row["may_create"]:
            return Finding("privileges", "ok", f"{who} may install the schema")
        return Finding(
            "privileges", "problem", f"{who} may not create in this database", "run `flowfabric migrate` as its owner"
        )
    if row["is_owner"]:
        return Finding("privileges", "ok", f"{who} owns the schema")
    options = ", ".join(f"`{role.option}`" for role in Role)
    grant = f"run `flowfabric migrate` with {options} {who} as the owner of the schema"
    if not row["may_use"]:
        return Finding("privileges", "problem", f"{who} may not use the schema", grant)
    held = [role for role in Role if row["open"] and set(functions_of([role])) <= set(row["open"])]
    if not held:
        return Finding("privileges", "problem", f"{who} has none of the roles {', '.join(Role)}", grant)
    lacking = [role for role in Role if role not in held]
    detail = f"{who} has the {'roles' if len(held) > 1 else 'role'} {', '.join(held)}"
    if lacking:
        detail = f"{detail}; not {', '.join(lacking)}"
    return Finding("privileges", "ok", detail)


async def _durability(connection: asyncpg.Connection[Any]) -> Finding:
    found = dict(
        await connection.fetch(
            "select name, setting from pg_settings where name in ('fsync', 'full_page_writes', 'synchronous_commit')"
        )
    )
    shown = ", ".join(f"{name} {value}" for name, value in sorted(found.items()))
    if found["fsync"] == "off" or found["full_page_writes"] == "off":
        return Finding("durability", "problem", shown, "a machine crash can destroy the database: turn both on")
    if found["synchronous_commit"] == "off":
        advice = "a crash may lose the last moments of acknowledged work: set it to on, or accept that"
        return Finding("durability", "warning", shown, advice)
    return Finding("durability", "ok", shown)


async def _connections(connection: asyncpg.Connection[Any]) -> Finding:
    row = await connection.fetchrow(
        "select current_setting('max_connections')::integer as most, sum(numbackends)::integer as used"
        " from pg_stat_database"
    )
    assert row is not None
    detail = f"{row['used']} of {row['most']} in use"
    if row["used"] >= row["most"] * 0.8:
        return Finding("connections", "warning", detail, "raise max_connections, or use a pooling proxy")
    if row["most"] < 50:
        return Finding("connections", "warning", detail, "a few workers use these up: raise max_connections")
    return Finding("connections", "ok", detail)


async def _autovacuum(connection: asyncpg.Connection[Any]) -> Finding:
    row = await connection.fetchrow(
        "select current_setting('autovacuum') as on, current_setting('track_counts') as counts,"
        " (select age(datfrozenxid) from pg_database where datname = current_database()) as age"
    )
    assert row is not None
    if row["on"] != "on" or row["counts"] != "on":
        detail = f"autovacuum {row['on']}, track_counts {row['counts']}"
        return Finding("autovacuum", "problem", detail, "turn both on: queues depend on it")
    if row["age"] > _WRAPAROUND:
        advice = "vacuum does not keep up: look for old transactions, then `vacuum (freeze)`"
        return Finding("autovacuum", "problem", f"the oldest transaction id is {row['age']:,} back", advice)
    return Finding("autovacuum", "ok", "on")


async def _clock(connection: asyncpg.Connection[Any]) -> Finding:
    before = time.time()
    server = await connection.fetchval("select clock_timestamp()")
    after = time.time()
    here = datetime.fromtimestamp((before + after) / 2, UTC)
    difference = server - here
    detail = (
        f"the server is {abs(difference.total_seconds()):.3f} s {'ahead' if difference > timedelta() else 'behind'}"
    )
    try:
        shift = await connection.fetchval("select flowfabric.server_now() - clock_timestamp()")
    except asyncpg.PostgresError:
        shift = timedelta()
    if abs(shift) > timedelta(seconds=1):
        detail = f"the deployment's clock was moved by {shift}"
        return Finding("clock", "warning", detail, "only tests do that: `update flowfabric.clock set shift = '0'`")
    # A difference below half the round trip cannot be measured.
    if abs(difference) > _CLOCK_OFF + timedelta(seconds=(after - before) / 2):
        advice = "only the server's clock counts, but times you give and logs will not agree: use NTP on both"
        return Finding("clock", "warning", detail, advice)
    return Finding("clock", "ok", detail)


async def _dead_rows(connection: asyncpg.Connection[Any]) -> Finding:
    rows = await connection.fetch(
        """
        select relname, n_live_tup as live, n_dead_tup as dead, greatest(last_vacuum, last_autovacuum) as vacuumed
        from pg_stat_user_tables where schemaname = 'flowfabric' order by n_dead_tup desc
        """
    )
    if not rows:
        return Finding("dead rows", "ok", "no table")
    total = sum(row["dead"] for row in rows)
    many = [row for row in rows if row["dead"] > _MANY_DEAD and row["dead"] > row["live"] * 0.5]
    if many:
        worst = ", ".join(f"{row['relname']} {row['dead']:,} (live {row['live']:,})" for row in many[:5])
        advice = "claims slow down: end transactions that block vacuum (see old transactions), or `vacuum` these tables"
        return Finding("dead rows", "warning", worst, advice)
    return Finding("dead rows", "ok", f"{total:,} in {len(rows)} tables")


async def _bloat(connection: asyncpg.Connection[Any]) -> Finding:
    rows = await connection.fetch(
        """
        select c.relname, pg_table_size(c.oid) as bytes, pg_indexes_size(c.oid) as index_bytes, s.n_live_tup as live
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        join pg_stat_user_tables s on s.relid = c.oid
        where n.nspname = 'flowfabric' and c.relkind = 'r'
        """
    )
    total = sum(row["bytes"] + row["index_bytes"] for row in rows)
    large = [
        row
        for row in rows
        if row["relname"] in _SHORT_LIVED
        and max(row["bytes"], row["index_bytes"]) > max(_BLOATED_BYTES, row["live"] * 1000)
    ]
    if large:
        worst = ", ".join(
            f"{row['relname']} {_size(row['bytes'])} and indexes {_size(row['index_bytes'])} for {row['live']:,} rows"
            for row in large
        )
        names = ", ".join(f"`reindex table concurrently flowfabric.{row['relname']}`" for row in large)
        return Finding("bloat", "warning", worst, f"{names}; `vacuum full` if the table itself is large")
    return Finding("bloat", "ok", f"{_size(total)} in all")


async def _old_transactions(connection: asyncpg.Connection[Any]) -> Finding:
    rows = await connection.fetch(
        """
        select pid, usename, application_name, state, clock_timestamp() - xact_start as age
        from pg_stat_activity
        where xact_start < clock_timestamp() - $1::interval and pid <> pg_backend_pid()
          and (backend_xmin is not null or backend_xid is not null) and backend_type <> 'autovacuum worker'
        order by xact_start
        """,
        _OLD_TRANSACTION,
    )
    sees_all = await connection.fetchval("select pg_has_role(current_user, 'pg_read_all_stats', 'usage')")
    blind = "" if sees_all else " (of this role; for all of them grant pg_read_all_stats)"
    slots = await connection.fetch(
        "select slot_name, active, age(coalesce(xmin, catalog_xmin)) as age from pg_replication_slots"
        " where coalesce(xmin, catalog_xmin) is not null"
    )
    stale = [row for row in slots if row["age"] is not None and row["age"] > 10_000_000]
    if rows:
        worst = "; ".join(
            f"pid {row['pid']} ({row['usename']}, {row['application_name'] or 'unnamed'}, {row['state']}) for"
            f" {_seconds(row['age'])}"
            for row in rows[:3]
        )
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        advice = "they keep dead rows alive: end them, or `select pg_terminate_backend(pid)`"
        return Finding("old transactions", "warning", f"{worst}{more}{blind}", advice)
    if stale:
        names = ", ".join(f"{row['slot_name']} ({row['age']:,} transactions back)" for row in stale)
        advice = "an unused replication slot keeps dead rows and WAL: drop it"
        return Finding("old transactions", "warning", names, advice)
    return Finding("old transactions", "ok", f"none older than {_seconds(_OLD_TRANSACTION)}{blind}")


async def _prepared_transactions(connection: asyncpg.Connection[Any]) -> Finding:
    row = await connection.fetchrow(
        "select count(*) as n, max(clock_timestamp() - prepared) as age,"
        " (select x.gid from pg_prepared_xacts x order by x.prepared limit 1) as oldest from pg_prepared_xacts"
    )
    assert row is not None
    if row["n"] and row["age"] > _OLD_TRANSACTION:
        advice = "it keeps locks and dead rows: `commit prepared` or `rollback prepared`"
        detail = f"{row['n']}, the oldest ({row['oldest']}) for {_seconds(row['age'])}"
        return Finding("prepared transactions", "warning", detail, advice)
    return Finding("prepared transactions", "ok", str(row["n"]) if row["n"] else "none")


async def _duties(connection: asyncpg.Connection[Any]) -> Finding:
    try:
        late = await connection.fetchval(
            "select flowfabric.server_now() - flowfabric.next_due('{lease,attempt,deadline,delay,parked,suspension}')"
        )
    except asyncpg.PostgresError:
        return Finding("duties", "ok", "unknown until the schema is installed")
    if late is not None and late > _LATE_TIMER:
        advice = "no process runs timers (retries, timeouts, lost leases): run a worker"
        return Finding("duties", "warning", f"the oldest timer is {_seconds(late)} late", advice)
    return Finding("duties", "ok", "no timer is late")


async def _workers(connection: asyncpg.Connection[Any]) -> Finding:
    try:
        alive = await connection.fetch(
            "select lanes, slots, package_version from flowfabric.list_workers(null, null, null, 10000)"
        )
    except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
        return Finding("workers", "ok", "unknown until the schema is installed")
    except asyncpg.InsufficientPrivilegeError:
        return Finding("workers", "ok", "this user may not list them")
    try:
        waiting = await connection.fetch(
            "select name, depth from flowfabric.lane_stats(null) where depth > 0 and state in ('active', 'draining')"
        )
    except asyncpg.InsufficientPrivilegeError:
        waiting = []  # a worker's user reads no lanes
    served = {lane for row in alive for lane in row["lanes"]}
    detail = f"{len(alive):,} alive, {sum(row['slots'] or 0 for row in alive):,} slots" if alive else "none is alive"
    if unserved := [row for row in waiting if row["name"] not in served]:
        lanes = ", ".join(f"{row['name']} ({row['depth']:,} waiting)" for row in unserved[:5])
        more = f" and {len(unserved) - 5} more" if len(unserved) > 5 else ""
        advice = "no live worker serves these lanes: run `flowfabric worker module:app` for them"
        return Finding("workers", "warning", f"{detail}; lanes without a worker: {lanes}{more}", advice)
    versions = sorted({row["package_version"] for row in alive if row["package_version"]})
    if len(versions) > 1:
        advice = "finish the rollout: old workers do not serve new tasks"
        return Finding("workers", "warning", f"{detail}, of flowfabric {', '.join(versions)}", advice)
    return Finding("workers", "ok", detail)


async def _changed_code(connection: asyncpg.Connection[Any]) -> Finding:
    name = "changed code"
    try:
        versions = await connection.fetch("select kind, version, executions, workers from flowfabric.list_versions()")
    except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
        return Finding(name, "ok", "unknown until the schema is installed")
    except asyncpg.InsufficientPrivilegeError:
        return Finding(name, "ok", "this user may not list workers")
    try:
        stopped = await connection.fetch(
            f"select kind from flowfabric.find({'null, ' * 12} 1000, 50000, null, true, false) where state is not null"  # noqa: S608
        )
    except asyncpg.InsufficientPrivilegeError:
        stopped = []  # a worker's user finds none
    details, advice = [], []
    if stopped:
        kinds = ", ".join(sorted({row["kind"] for row in stopped})[:5])
        details.append(f"{len(stopped):,} stopped, of {kinds}: they wait for code that fits their recorded steps")
        advice.append("`flowfabric failures --stopped` says what changed, and how to write code that fits")
    if unserved := [row for row in versions if row["workers"] == 0 and row["version"] is not None]:
        listed = ", ".join(f"{row['kind']} {row['version']} ({row['executions']:,})" for row in unserved[:5])
        details.append(f"versions with executions and no live worker: {listed}")
        advice.append("start workers of these versions, or of one with compatible_with=[...]")
    if details:
        return Finding(name, "warning", "; ".join(details), "; ".join(advice))
    none = "no execution waits for other code"
    if open_to_all := [row for row in versions if row["version"] is None]:
        # Workers of every version run them. That is harmless while the versions fit what these recorded.
        listed = ", ".join(f"{row['kind']} ({row['executions']:,})" for row in open_to_all[:5])
        return Finding(
            name, "ok", f"{none}; began without a version, so that workers of every version run them: {listed}"
        )
    return Finding(name, "ok", none)


async def _consumers(connection: asyncpg.Connection[Any]) -> Finding:
    name = "consumers"
    try:
        found = await connection.fetch(
            "select name, lag, next_at, is_expired, retention, failures, flowfabric.server_now() as now"
            " from flowfabric.list_consumers(null, null)"
        )
    except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
        return Finding(name, "ok", "unknown until the schema is installed")
    except asyncpg.InsufficientPrivilegeError:
        return Finding(name, "ok", "this user may not list them")
    if expired := [row["name"] for row in found if row["is_expired"]]:
        advice = "`flowfabric consumers set NAME --to start` continues with the oldest event that is kept"
        return Finding(name, "problem", f"events were removed before these read them: {', '.join(expired[:5])}", advice)
    late = [row for row in found if row["next_at"] is not None and row["now"] - row["next_at"] > row["retention"] / 2]
    if late:
        listed = ", ".join(f"{row['name']} ({row['lag']:,} events)" for row in late[:5])
        advice = "run them, or raise event_retention: events that are older than it are removed"
        return Finding(name, "warning", f"behind by more than half the retention of the event log: {listed}", advice)
    if failing := [row for row in found if row["failures"]]:
        listed = ", ".join(f"{row['name']} ({row['failures']:,} times)" for row in failing[:5])
        return Finding(name, "warning", f"their function fails: {listed}", "`flowfabric consumers` says why")
    return Finding(name, "ok", f"{len(found):,}, none is late" if found else "none")


CHECKS: tuple[Check, ...] = (
    _server,
    _schema,
    _privileges,
    _durability,
    _connections,
    _autovacuum,
    _clock,
    _dead_rows,
    _bloat,
    _old_transactions,
    _prepared_transactions,
    _workers,
    _changed_code,
    _consumers,
    _duties,
)


def _size(count: int) -> str:
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} TB"


def _seconds(span: timedelta) -> str:
    return str(timedelta(seconds=round(span.total_seconds())))
