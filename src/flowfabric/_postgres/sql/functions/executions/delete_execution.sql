-- Deleting one execution, or its data.

-- delete_execution: delete an ended execution and everything it owns, now.
--
-- Locks    the execution.
-- Returns  ok, not_found, execution_not_terminal, execution_in_flow, or execution_needed with the parent that needs
--          its result as detail.
-- Roles    operate
create or replace function flowfabric.delete_execution(p_partition integer, p_id uuid) returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    e flowfabric.execution;
    v_code text;
    v_parent text;
begin
    perform flowfabric.require_read_committed();
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for update;
    v_code := case when e.id is null then 'not_found' when e.completed_at is null then 'execution_not_terminal'
                   when e.flow_id is not null then 'execution_in_flow' else 'ok' end;
    if v_code = 'ok' and e.parent_id is not null then
        v_parent := flowfabric.kept_for(e.parent_id, flowfabric.result_step(e.id));
        v_code := case when v_parent is not null then 'execution_needed' else 'ok' end;
    end if;
    if v_code = 'ok' then
        perform flowfabric.purge_rows(array[p_partition], array[p_id]);
    end if;
    return query select 1, v_code, 'needed by ' || v_parent, e.state, e.epoch, e.attempt_id, null::timestamptz;
end;
$$;
