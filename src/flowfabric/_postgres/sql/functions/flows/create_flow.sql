-- Flows: creating them, adding members and edges, and the policies of their joins.
--
-- Lock order: the flow (for update where the graph grows, else shared), groups by downstream, executions by id.

-- create_flow: returns created, or exists if the id was used before.
--
-- Roles    submit, work, operate
create or replace function flowfabric.create_flow(p_partition integer, p_flow uuid, p_kind text, p_namespace text)
returns boolean
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
begin
    insert into flowfabric.flow (partition, flow_id, flow_kind, namespace, created_at, last_mutation_at)
    values (p_partition, p_flow, p_kind, p_namespace, v_now, v_now)
    on conflict do nothing;
    return found;
end;
$$;
