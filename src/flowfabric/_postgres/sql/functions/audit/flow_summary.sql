-- audit_flow_summary: The summary of a flow that is not marked for counting has the right counts.
create or replace function flowfabric.audit_flow_summary(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    ), touched as (
        select x.* from flowfabric.flow_touched x where x.partition between p_low and p_high
    )
    select 'flow_summary', f.partition, f.flow_id, concat_ws(' ', s.state, n.state) from f
    left join flowfabric.flow_summary s on s.partition = f.partition and s.flow_id = f.flow_id
    left join lateral flowfabric.count_members(f) n on true
    where (to_jsonb(s) - 'updated_at') is distinct from (to_jsonb(n) - 'updated_at')
      and not exists (select from touched t where t.partition = f.partition and t.flow_id = f.flow_id)
$$;
