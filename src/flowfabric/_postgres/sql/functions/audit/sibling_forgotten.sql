-- audit_sibling_forgotten: Every upstream that a decided race no longer needs has ended, or is queued for cancellation.
create or replace function flowfabric.audit_sibling_forgotten(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'sibling_forgotten', g.partition, g.downstream, e.id::text from g
    join flowfabric.edge x on x.partition = g.partition and x.downstream = g.downstream
                           and x.flow_id is not distinct from g.flow_id
    join flowfabric.execution e on e.partition = x.partition and e.id = x.upstream
    where g.policy <> 'all_of' and g.cancel_rest and g.state <> 'pending' and x.applied_at is not null
      and e.completed_at is null and e.replays = 0
      and not exists (select from flowfabric.sibling_cancel s where s.partition = g.partition and s.flow_id = g.flow_id
                      and s.downstream = g.downstream and e.id = any (s.siblings))
$$;
