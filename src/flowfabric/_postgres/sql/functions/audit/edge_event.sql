-- audit_edge_event: An edge names the event that resolved it.
create or replace function flowfabric.audit_edge_event(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    select 'edge_event', d.partition, d.edge_id, d.outcome from flowfabric.edge d
    where d.partition between p_low and p_high and d.resolved_event is not null
      and not exists (select from flowfabric.event v where v.seq = d.resolved_event and v.partition = d.partition
                      and v.id = d.upstream and v.outcome = d.outcome)
$$;
