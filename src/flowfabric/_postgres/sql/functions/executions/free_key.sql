-- free_key: let an idempotency key be used again whose execution ended without success, or is not stored any more.
--
-- Locks    the execution.
-- Returns  whether the key is free now, even if another call freed it.
-- Roles    submit, work, operate
create or replace function flowfabric.free_key(
    p_partition integer, p_id uuid, p_flow uuid, p_namespace text, p_key text) returns boolean
language plpgsql security definer as $$
declare
    v_state text;
begin
    perform flowfabric.require_read_committed();
    if p_partition <> (select flowfabric.partition_of(p_id, d.flow_partitions) from flowfabric.deployment d) then
        return false;
    elsif not exists (select from flowfabric.idempotency i
                      where i.scope = coalesce(p_flow, flowfabric.zero_uuid()) and i.namespace = p_namespace
                        and i.key = p_key and i.id = p_id) then
        return true;
    end if;
    select x.state into v_state from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    if v_state not in ('failed', 'cancelled', 'expired', 'skipped') then
        return false;
    end if;
    delete from flowfabric.idempotency i
    where i.scope = coalesce(p_flow, flowfabric.zero_uuid()) and i.namespace = p_namespace and i.key = p_key and i.id = p_id;
    return true;
end;
$$;
