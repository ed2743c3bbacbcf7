-- seek_events: a cursor that all events younger than a moment follow, and some that are older
--
-- Roles    read, operate
create or replace function flowfabric.seek_events(p_at timestamptz)
returns table (log_position bigint, log_epoch bigint)
language sql stable security definer as $$
    select greatest(flowfabric.seek_event(p_at - interval '1 minute'), d.event_floor), l.epoch
    from flowfabric.deployment d, flowfabric.log_epoch l where l.last_position is null
$$;
