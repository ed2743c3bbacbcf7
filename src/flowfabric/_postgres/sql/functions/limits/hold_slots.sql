-- hold_slots: take the slots of an execution that is claimed without a check of its limits: with a grant, or by an operator
--
-- Called under the lock of the execution. A slot that was taken for its grant is kept.
-- Takes    p_until: when the grant expires. A slot of an expired grant may belong to another by the time of the lock.
-- Locks    the heads of its policies.
-- Returns  the time now; null: the grant expired, and nothing changed.
create or replace function flowfabric.hold_slots(p_partition integer, p_id uuid, p_until timestamptz) returns timestamptz
language plpgsql as $$
declare
    v_policies uuid[]; v_keys text[];
    v_now timestamptz;
begin
    select array_agg(p.id order by p.id), array_agg(k.key order by p.id) into v_policies, v_keys
    from flowfabric.execution e
    cross join lateral (select x.* from flowfabric.limit_set x where x.digest = e.limits limit 1) l
    cross join lateral unnest(l.quota_ids, l.quota_keys) as k (id, key)
    join flowfabric.quota_policy p on p.id = k.id and (p.max_requests > 0 or p.max_concurrent > 0)
    where e.partition = p_partition and e.id = p_id;
    if v_policies is not null then
        perform flowfabric.lock_heads(v_policies, v_keys, 'wait');
    end if;
    v_now := flowfabric.now();
    if p_until <= v_now then
        return null;
    end if;
    if v_policies is not null then
        insert into flowfabric.quota_slot as s (id, partition, policy_id, key, admitted_at, until, origin)
        select p_id, p_partition, u.policy_id, u.key, v_now, null, 'override'
        from unnest(v_policies, v_keys) as u (policy_id, key)
        on conflict (id, partition, policy_id) do update
        set until = null, key = case when s.until <= v_now then excluded.key else s.key end, number = default
        where s.until is not null;
    end if;
    return v_now;
end;
$$;
