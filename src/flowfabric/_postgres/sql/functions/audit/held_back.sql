-- audit_held_back: An execution that is not parked waits for dependencies exactly while its group is pending.
create or replace function flowfabric.audit_held_back(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'held_back', e.partition, e.id, e.state || ' ' || coalesce(g.state, 'no group')
    from flowfabric.execution e
    left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id and g.n > 0
    where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.completed_at is null
      and (e.flow_id is not null or e.state = 'waiting_children') and e.state not in ('active', 'suspended')
      and e.blocking_reason is distinct from 'paused_by_flow_cancel'
      and (e.state = 'waiting_children' and not e.is_parked) <> coalesce(g.state = 'pending', false)
$$;
