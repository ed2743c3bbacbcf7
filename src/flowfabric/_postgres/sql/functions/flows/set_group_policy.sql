-- set_group_policy: set how the edges into an execution join, before the first one is staged
--
-- Returns  set, already_set, or why not.
-- Roles    operate
create or replace function flowfabric.set_group_policy(
    p_partition integer, p_flow uuid, p_downstream uuid, p_policy text, p_k integer, p_cancel_rest boolean) returns text
language plpgsql security definer as $$
declare
    v_code text := flowfabric.open_flow(p_partition, p_flow, true);
    g flowfabric.edge_group;
begin
    perform flowfabric.require_read_committed();
    if v_code is not null then
        return v_code;
    end if;
    if exists (select from flowfabric.edge d
               where d.partition = p_partition and d.downstream = p_downstream and d.flow_id is not distinct from p_flow) then
        return 'edge_group_policy_already_fixed';
    end if;
    select x.* into g from flowfabric.edge_group x
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream for update;
    if g.downstream is not null and (g.policy, g.cancel_rest) = (p_policy, p_cancel_rest) and g.k is not distinct from p_k then
        return 'already_set';
    end if;
    insert into flowfabric.edge_group as x (partition, flow_id, downstream, policy, k, cancel_rest)
    values (p_partition, p_flow, p_downstream, p_policy, p_k, p_cancel_rest)
    on conflict (partition, flow_id, downstream) do update
        set policy = excluded.policy, k = excluded.k, cancel_rest = excluded.cancel_rest;
    return 'set';
end;
$$;
