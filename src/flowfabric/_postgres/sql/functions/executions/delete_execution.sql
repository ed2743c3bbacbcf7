-- Deleting one execution, or its data.

-- delete_execution: delete an ended execution and everything it owns, now.
--
-- Locks    the execution.
-- Returns  ok, not_found, or execution_not_terminal.
-- Roles    operate
create or replace function flowfabric.delete_execution(p_partition integer, p_id uuid) returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    e flowfabric.execution;
    v_code text;
begin
    perform flowfabric.require_read_committed();
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for update;
    v_code := case when e.id is null then 'not_found' when e.completed_at is null then 'execution_not_terminal'
                   when e.flow_id is not null then 'execution_in_flow' else 'ok' end;
    if v_code = 'ok' then
        perform flowfabric.purge_rows(array[p_partition], array[p_id]);
    end if;
    return query select 1, v_code, null::text, e.state, e.epoch, e.attempt_id, null::timestamptz;
end;
$$;
