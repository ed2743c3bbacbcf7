-- event_slot: the segment of the event ring that a moment belongs to: eight segments, each a quarter of the retention.
create or replace function flowfabric.event_slot(p_at timestamptz) returns smallint
language sql stable as $$ select flowfabric.slot_at(p_at, d.event_retention) from flowfabric.deployment d $$;

-- slot_at: the same, for a caller that has read the retention.
create or replace function flowfabric.slot_at(p_at timestamptz, p_retention interval) returns smallint
language sql immutable as $$
    select (floor(extract(epoch from p_at) / extract(epoch from p_retention / 4))::bigint % 8)::smallint
$$;
