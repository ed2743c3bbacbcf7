-- audit_cascade_event: A pending cascade names the event of its end.
create or replace function flowfabric.audit_cascade_event(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'cascade_event', o.partition, o.id, o.outcome from flowfabric.pending_cascade o
    where o.partition between p_low and p_high
      and not exists (select from flowfabric.event v where v.seq = o.seq and v.partition = o.partition
                      and v.id = o.id and v.outcome = o.outcome)
$$;
