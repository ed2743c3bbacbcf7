-- audit_sibling_row: Siblings are queued only for a group that has siblings to cancel.
create or replace function flowfabric.audit_sibling_row(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    select 'sibling_row', s.partition, s.downstream, g.state from flowfabric.sibling_cancel s
    left join flowfabric.edge_group g on g.partition = s.partition and g.flow_id = s.flow_id and g.downstream = s.downstream
    where s.partition between p_low and p_high and g.cancel_siblings_pending is not true
$$;
