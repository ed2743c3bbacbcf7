"""Helpers for tests of plans: an engine that counts the rows its calls handle, and statistics that are wrong.

The rows of a call are those of all plans of all statements that its functions run, as `auto_explain` reports them:
rows that a node returns or removes by a filter or a join condition, and how often it is started. That includes joins of
arrays, which the counters of tables do not see.

The pages show the entries that an index scan passes over; the server counts them for each table and index. Those of
plans would include the catalogs, of which a connection reads hundreds of pages again, also in the middle of a node,
whenever its server forgets what it cached: a migration in any other database does that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

import flowfabric as ff
from flowfabric._postgres.known_types import Connection

_EXPLAIN = """
load 'auto_explain';
set auto_explain.log_min_duration = 0;
set auto_explain.log_analyze = on;
set auto_explain.log_buffers = on;
set auto_explain.log_timing = off;
set auto_explain.log_nested_statements = on;
set auto_explain.log_format = json;
set auto_explain.log_level = notice;
"""
_OURS = "select c.oid from pg_class c where c.relnamespace = 'flowfabric'::regnamespace"
# Our tables, their indexes, and what is stored beside them.
_WITH_PAGES = f"""
with ours as (select c.oid, c.reltoastrelid from pg_class c where c.oid in ({_OURS}) and c.relkind in ('r', 'i'))
select array_agg(o.oid) from (
    select oid from ours union all select reltoastrelid from ours where reltoastrelid <> 0
    union all select i.indexrelid from ours join pg_index i on i.indrelid = ours.reltoastrelid) o
"""
# Their pages that the transaction has read or written.
PAGES = "select sum(pg_stat_get_xact_blocks_fetched(o))::bigint from unnest($1::oid[]) o"
_FORGET = f"delete from pg_statistic where starelid in ({_OURS});"
# Tables that are emptied again and again: a vacuum then leaves their pages and counts no row on them.
_QUEUES = (
    "ready", "ready_floor", "timer", "claim_grant", "waiter", "watch", "sleeper", "blocked", "pending_cascade",
    "sibling_cancel", "child_cancel", "cancel_backlog", "cancel_member", "flow_touched", "hook", "uncovered",
    "follower", "limit_due", "quota_slot", "quota_entry", "quota_head", "reservation", "budget_key", "budget_usage",
    "limit_set",
)  # fmt: skip
# What the planner believes, after `analyze`. It reads the number of pages from the file, and takes the rows per page
# from here; for a table that had no page it guesses them from the width of a row.
STATISTICS = {
    "none": _FORGET + f"update pg_class set reltuples = -1, relpages = 0 where oid in ({_OURS})",
    "of empty tables": _FORGET
    + "update pg_class set reltuples = 0, relpages = case when relname = any ('{"
    + ",".join(_QUEUES)
    + f"}}') then 1 else 0 end where oid in ({_OURS})",
    "of a million rows": (
        "update pg_class set reltuples = 1000000,"
        f" relpages = greatest(pg_relation_size(oid) / 8192, 1) where relkind in ('r', 'i') and oid in ({_OURS})"
    ),
}


class CountingEngine(ff.Engine):
    """An engine on one connection. While it counts, it adds up the rows that each function handled."""

    def __init__(self, engine: ff.Engine, connection: asyncpg.Connection[Any]) -> None:
        super().__init__(engine._database, engine._listener)
        self.connection = connection
        self.is_counting = False
        self.called: set[str] = set()
        self.handled = 0
        self.tables: list[int] = []
        self._pages_before = 0
        self.worst: list[tuple[int, str]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str) -> AsyncIterator[CountingEngine]:
        async with await ff.Engine.connect(dsn) as engine:
            connection = await asyncpg.connect(dsn, connection_class=Connection)
            counting = cls(engine, connection)
            counting.tables = await connection.fetchval(_WITH_PAGES)
            await connection.execute(_EXPLAIN)
            await connection.execute("set client_min_messages = error")
            connection.add_log_listener(counting._note)
            try:
                yield counting
            finally:
                connection.terminate()

    async def _fetch(self, statement: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        found: list[asyncpg.Record] = await self.connection.fetch(statement, *args)
        if self.is_counting:
            self.called.add(statement.partition("flowfabric.")[2].partition("(")[0])
            await asyncio.sleep(0)  # the listener is called by the loop
        return found

    async def _row(self, statement: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._fetch(statement, *args, repeatable=repeatable))[0]

    def _note(self, connection: Any, message: Any) -> None:
        head, found, plan = message.message.partition("plan:\n")
        if not found or not head.startswith("duration"):
            return
        read = json.loads(plan)
        rows = handled(read["Plan"])
        self.handled += rows
        self.worst = sorted([*self.worst, (rows, plan)], reverse=True, key=lambda one: one[0])[:3]

    @asynccontextmanager
    async def undone(self) -> AsyncIterator[None]:
        """Roll back what the calls in it do."""
        transaction = self.connection.transaction()
        await transaction.start()
        try:
            yield
        finally:
            self.is_counting = False
            await transaction.rollback()
            await self.connection.execute("set client_min_messages = error")

    async def count(self) -> None:
        """Count from here on."""
        # A plan that another call made, with its own settings, would hide what this one does on a new connection.
        await self.connection.execute("set client_min_messages = error; discard plans")
        self._pages_before = await self._all_pages()
        await self.connection.execute("set client_min_messages = notice")
        await asyncio.sleep(0)
        self.called, self.handled, self.worst = set(), 0, []
        self.is_counting = True

    async def pages(self) -> int:
        """Return the pages of tables and indexes that the calls have read or written; counts no more."""
        self.is_counting = False
        await self.connection.execute("set client_min_messages = error")
        return await self._all_pages() - self._pages_before

    async def _all_pages(self) -> int:
        return int(await self.connection.fetchval(PAGES, self.tables))


def handled(node: dict[str, Any]) -> int:
    """The rows that a node of a plan and those below it handled, and how often they were started.

    Not the locks of the server, which other test processes hold too.
    """
    below = sum(handled(one) for one in node.get("Plans", ()))
    if node.get("Function Name") == "pg_lock_status":
        return below
    each = 1 + node["Actual Rows"] + sum(count for name, count in node.items() if name.startswith("Rows Removed by"))
    return int(node["Actual Loops"] * each) + below
