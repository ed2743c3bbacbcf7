-- audit_group_policy: The numbers of a group agree with its policy.
create or replace function flowfabric.audit_group_policy(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'group_policy', g.partition, g.downstream, concat_ws(' ', g.policy, g.k, g.cancel_rest) from g
    where not coalesce(case when g.policy in ('all_of', 'all_settled') then g.k is null and not g.cancel_rest
                                     when g.policy = 'any_of' then g.k = 1 when g.policy = 'quorum' then g.k >= 1 end, false)
$$;
