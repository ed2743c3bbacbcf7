-- audit_group_decision: The state of a group follows from its counters.
create or replace function flowfabric.audit_group_decision(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'group_decision', g.partition, g.downstream, g.state from g
    where not coalesce(case
        when g.policy in ('all_of', 'all_settled') or g.state = 'pending' then
            g.state = flowfabric.decide(g.policy, g.k, g.n, g.succeeded, g.failed + g.skipped, 'pending')
        when g.state = 'satisfied' then g.succeeded >= g.k
        when g.state = 'impossible' then g.failed + g.skipped > 0 and g.n >= g.k end, false)
$$;
