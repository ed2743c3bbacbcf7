-- release_admission: give the slot of an execution back, if it has one; its entry in the window stays
--
-- Locks    the head of the policy and key.
-- Returns  whether there was one.
-- Roles    work, operate
create or replace function flowfabric.release_admission(p_policy uuid, p_partition integer, p_id uuid) returns boolean
language plpgsql security definer as $$
declare
    v_key text;
begin
    perform flowfabric.require_read_committed();
    select s.key into v_key from flowfabric.quota_slot s
    where s.id = p_id and s.partition = p_partition and s.policy_id = p_policy;
    if not found then
        return false;
    end if;
    perform flowfabric.lock_heads(array[p_policy], array[v_key], 'wait');
    delete from flowfabric.quota_slot s where s.id = p_id and s.partition = p_partition and s.policy_id = p_policy;
    if not found then
        return false;
    end if;
    perform flowfabric.open_limit(p_policy, v_key, 1, true, null, null, null);
    return true;
end;
$$;
