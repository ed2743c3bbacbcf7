-- free_key: free the idempotency key of an execution that ended without success.
--
-- Locks    the execution.
-- Returns  whether the key is free now, also if another call freed it.
create or replace function flowfabric.free_key(p_partition integer, p_id uuid) returns boolean
language plpgsql security definer as $$
declare
    e flowfabric.execution;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    if e.id is not null and e.state not in ('failed', 'cancelled', 'expired', 'skipped') then
        return false;
    end if;
    delete from flowfabric.idempotency i
    where i.partition = p_partition and i.id = p_id
      and (e.id is null or (i.key = e.idempotency_key and i.namespace = e.namespace));
    return true;
end;
$$;
