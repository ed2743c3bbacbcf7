-- apply_edge: a staged edge blocks its downstream from now on
--
-- Returns  ok or already_applied with the number of unsatisfied edges into the downstream; or why not.
-- Roles    operate
create or replace function flowfabric.apply_edge(
    p_partition integer, p_flow uuid, p_edge uuid, p_upstream uuid, p_downstream uuid, p_kind_known boolean, p_ref text)
returns table (code text, unsatisfied integer, detail text)
language plpgsql security definer as $$
declare
    d flowfabric.edge;
    v_member uuid;
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.open_flow(p_partition, p_flow, false);
    if code is null then
        select x.* into d from flowfabric.edge x
        where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = p_edge for update;
        if d.edge_id is null then
            code := 'edge_not_found';
        elsif (d.upstream, d.downstream) is distinct from (p_upstream, p_downstream)
              or not p_kind_known or d.data_passing_ref is distinct from p_ref then
            code := 'edge_differs';
            detail := case when d.upstream <> p_upstream then 'upstream_execution_id'
                           when d.downstream <> p_downstream then 'downstream_execution_id'
                           when not p_kind_known then 'dependency_kind' else 'data_passing_ref' end;
        else
            select e.flow_id into v_member from flowfabric.execution e where e.partition = p_partition and e.id = d.downstream;
            code := case when not found then 'execution_not_found' when v_member is null then 'execution_not_in_flow'
                         when v_member <> p_flow then 'execution_already_in_flow'
                         when d.applied_at is not null then 'already_applied' else 'ok' end;
        end if;
    end if;
    if code = 'ok' then
        perform flowfabric.apply_edges(p_partition, p_flow, array[p_edge]);
    end if;
    if code in ('ok', 'already_applied') then
        select g.n - g.succeeded - g.failed - g.skipped into unsatisfied from flowfabric.edge_group g
        where g.partition = p_partition and g.flow_id = p_flow and g.downstream = d.downstream;
    end if;
    return next;
end;
$$;
