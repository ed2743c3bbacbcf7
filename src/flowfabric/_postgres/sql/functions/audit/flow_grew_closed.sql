-- audit_flow_grew_closed: Nothing is added to a flow after it was cancelled.
create or replace function flowfabric.audit_flow_grew_closed(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'flow_grew_closed', f.partition, f.flow_id, f.cancelled_at::text from f
    where f.cancelled_at is not null
      and (exists (select from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id
                   and (x.created_at > f.cancelled_at or x.applied_at > f.cancelled_at))
           or exists (select from flowfabric.execution e where e.flow_id = f.flow_id and e.created_at > f.cancelled_at))
$$;
