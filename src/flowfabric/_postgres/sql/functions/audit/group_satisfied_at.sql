-- audit_group_satisfied_at: A group has a time of satisfaction exactly when it is satisfied.
create or replace function flowfabric.audit_group_satisfied_at(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'group_satisfied_at', g.partition, g.downstream, g.state from g
    where (g.satisfied_at is not null) <> (g.state = 'satisfied')
$$;
