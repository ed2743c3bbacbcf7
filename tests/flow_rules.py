"""Invariants of flows once all duties are idle, and random graphs to check them with."""

from __future__ import annotations

from typing import Any

import asyncpg

import flowfabric as ff
from tests.support import Clock

# Beside what the audit asks for at any moment.
_QUIET = """
select 'undispatched' as rule, p.id::text as of, p.outcome as detail from flowfabric.pending_cascade p
union all
select 'impossible and alive', g.downstream::text, x.state from flowfabric.edge_group g
join flowfabric.execution x on x.partition = g.partition and x.id = g.downstream
where g.state = 'impossible' and x.completed_at is null
union all
select 'skipped for nothing', x.id::text, g.state from flowfabric.execution x
left join flowfabric.edge_group g on g.partition = x.partition and g.flow_id = x.flow_id and g.downstream = x.id
where x.state = 'skipped' and g.state is distinct from 'impossible'
union all
select 'siblings left', s.downstream::text, cardinality(s.siblings)::text from flowfabric.sibling_cancel s
union all
select 'cancelled and alive', e.id::text, e.state from flowfabric.flow f
join flowfabric.execution e on e.flow_id = f.flow_id
where f.cancellation_policy = 'cancel_all' and e.completed_at is null and e.replays = 0
union all
select 'children left', c.id::text, null from flowfabric.child_cancel c
union all
select 'owed', m.id::text, null from flowfabric.cancel_member m
union all
select 'backlog', b.flow_id::text, null from flowfabric.cancel_backlog b
union all
select 'uncounted', t.flow_id::text, null from flowfabric.flow_touched t
"""


async def settle_flows(engine: ff.Engine, clock: Clock) -> None:
    """Run what moves flows on until it finds nothing more, after the grace of whatever was cancelled."""
    await clock.advance(seconds=31)
    busy = True
    while busy:
        swept = await engine.dispatch_cascades()
        assert swept.failed == 0, swept
        siblings = await engine.cancel_siblings()
        children = await engine.cancel_children()
        cancelled = await engine.reconcile_cancellations()
        assert cancelled.failed == 0, cancelled
        busy = swept.seen > 0 or siblings.action != "none" or cancelled.handled > 0
        busy = busy or children.parent_id is not None
    await engine.project_flow_summaries()


async def check_settled(engine: ff.Engine, connection: asyncpg.Connection[Any]) -> None:
    """Nothing is left to do, and the repair finds nothing that was forgotten."""
    found = await connection.fetch(_QUIET)
    assert not found, [tuple(row) for row in found]
    repaired, place = await engine.reconcile_edges(limit=10_000)
    assert (repaired.reconciled, place) == (0, None)
