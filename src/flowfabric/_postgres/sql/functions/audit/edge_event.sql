-- audit_edge_event: An edge names the event that resolved it.
create or replace function flowfabric.audit_edge_event(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'edge_event', d.partition, d.edge_id, d.outcome from flowfabric.edge d
    where (d.partition, d.flow_id) between (p_low, p_from) and (p_high, p_to) and d.resolved_event is not null
      and not exists (select from flowfabric.event v where v.seq = d.resolved_event and v.partition = d.partition
                      and v.id = d.upstream and v.outcome = d.outcome)
$$;
