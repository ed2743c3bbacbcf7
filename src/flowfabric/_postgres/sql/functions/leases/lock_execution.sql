-- lock_execution: lock one execution and read it; all null if there is none
--
-- Called by the calls about one execution that need no lease. They read the time after it.
-- Locks    the execution.
create or replace function flowfabric.lock_execution(p_partition integer, p_id uuid) returns flowfabric.execution
language plpgsql as $$
declare
    e flowfabric.execution;
begin
    perform flowfabric.require_read_committed();
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    return e;
end;
$$;
