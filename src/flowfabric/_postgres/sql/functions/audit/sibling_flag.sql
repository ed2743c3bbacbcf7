-- audit_sibling_flag: A group has siblings to cancel exactly when its race is decided and its policy asks for it.
create or replace function flowfabric.audit_sibling_flag(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'sibling_flag', g.partition, g.downstream, concat_ws(' ', g.state, g.cancel_siblings_reason) from g
    where (g.cancel_siblings_pending and not exists (
               select from flowfabric.sibling_cancel s
               where s.partition = g.partition and s.flow_id = g.flow_id and s.downstream = g.downstream))
       or ((g.cancel_siblings_pending or g.cancel_siblings_reason is not null)
           and not (g.policy <> 'all_of' and g.cancel_rest and g.state <> 'pending'))
       or g.cancel_siblings_reason is distinct from case when g.policy <> 'all_of' and g.cancel_rest then
              case g.state when 'satisfied' then 'sibling_quorum_satisfied' when 'impossible' then 'sibling_quorum_impossible' end end
$$;
