-- event_slot: the segment of the event ring that a moment belongs to: eight segments, each a quarter of the retention.
create or replace function flowfabric.event_slot(p_at timestamptz) returns smallint
language sql stable as $$
    select (floor(extract(epoch from p_at) / extract(epoch from d.event_retention / 4))::bigint % 8)::smallint
    from flowfabric.deployment d
$$;
