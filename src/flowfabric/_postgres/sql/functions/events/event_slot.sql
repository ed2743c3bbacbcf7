-- event_slot: the segment of the event ring that a moment belongs to.
create or replace function flowfabric.event_slot(p_at timestamptz) returns smallint
language sql stable as $$ select flowfabric.slot_of(p_at, d.event_retention) from flowfabric.deployment d $$;

-- slot_of: the same, given how long events are kept: eight segments, each a quarter of that.
create or replace function flowfabric.slot_of(p_at timestamptz, p_retention interval) returns smallint
language sql stable as $$
    select (floor(date_part('epoch', p_at) / date_part('epoch', p_retention / 4))::bigint % 8)::smallint
$$;
