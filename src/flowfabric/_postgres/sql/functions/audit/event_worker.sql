-- audit_event_worker: The number of a worker in an event has a name.
create or replace function flowfabric.audit_event_worker(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'event_worker', v.partition, v.id, v.worker::text from flowfabric.event v
    where v.partition between p_low and p_high and v.worker is not null
      and not exists (select from flowfabric.worker w where w.id = v.worker)
$$;
