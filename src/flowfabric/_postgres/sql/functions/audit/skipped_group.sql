-- audit_skipped_group: Only the execution of an impossible group is skipped.
create or replace function flowfabric.audit_skipped_group(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'skipped_group', e.partition, e.id, g.state from flowfabric.execution e
    left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
    where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.state = 'skipped' and g.state is distinct from 'impossible'
$$;
