-- audit_sibling_row: Siblings are queued only for a group that has siblings to cancel.
create or replace function flowfabric.audit_sibling_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'sibling_row', s.partition, s.downstream, g.state from flowfabric.sibling_cancel s
    left join flowfabric.edge_group g on g.partition = s.partition and g.flow_id = s.flow_id and g.downstream = s.downstream
    where (s.partition, s.flow_id) between (p_low, p_from) and (p_high, p_to) and g.cancel_siblings_pending is not true
$$;
