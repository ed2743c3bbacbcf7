-- update_quota_policy: change the numbers of a policy, and promote what they have room for now
--
-- Running executions keep their slots, also above a lowered cap.
-- Takes    null for what stays. p_updated_at: change it only if it is still the one of that time; null: whatever it is.
-- Locks    the policy, then its heads, in order: it waits for admissions that are under way.
-- Returns  ok, not_found, or stale if the policy has changed.
-- Roles    operate
create or replace function flowfabric.update_quota_policy(
    p_id uuid, p_window_seconds bigint, p_max_requests bigint, p_max_concurrent bigint, p_jitter_ms bigint,
    p_updated_at timestamptz)
returns text
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_keys text[];
    v_old flowfabric.quota_policy;
    v_new flowfabric.quota_policy;
    v_slot smallint;
    v record;
begin
    perform flowfabric.require_read_committed();
    select p.* into v_old from flowfabric.quota_policy p where p.id = p_id for update;
    if not found then
        return 'not_found';
    end if;
    if v_old.updated_at <> p_updated_at then
        return 'stale';
    end if;
    select array_agg(h.key order by h.key) into v_keys from flowfabric.quota_head h where h.policy_id = p_id;
    if v_keys is not null then
        perform flowfabric.lock_heads(array_fill(p_id, array[cardinality(v_keys)]), v_keys, 'wait');
    end if;
    v_now := flowfabric.now();
    v_new := v_old;
    v_new.window_seconds := coalesce(p_window_seconds, v_old.window_seconds);
    v_new.max_requests := coalesce(p_max_requests, v_old.max_requests);
    v_new.max_concurrent := coalesce(p_max_concurrent, v_old.max_concurrent);
    v_new.jitter_ms := coalesce(p_jitter_ms, v_old.jitter_ms);
    perform flowfabric.check_quota(
        null, null, v_new.window_seconds, v_new.max_requests, v_new.max_concurrent, v_new.jitter_ms);
    update flowfabric.quota_policy p
    set window_seconds = v_new.window_seconds, max_requests = v_new.max_requests, max_concurrent = v_new.max_concurrent,
        jitter_ms = v_new.jitter_ms, updated_at = v_now
    where p.id = p_id;
    v_slot := flowfabric.open_log(v_now);
    insert into flowfabric.event (slot, occurred_at, partition, operator_type, details)
    values (v_slot, v_now, 0, 'quota_policy_changed', jsonb_build_object(
        'quota_policy_id', p_id, 'window_seconds', v_new.window_seconds, 'max_requests_per_window', v_new.max_requests,
        'max_concurrent', v_new.max_concurrent, 'jitter_ms', v_new.jitter_ms));
    for v in
        with recursive held as (
            (select b.limit_key as key from flowfabric.blocked b where b.limit_id = p_id order by b.limit_key limit 1)
            union all
            select n.key from held h cross join lateral (
                select b.limit_key as key from flowfabric.blocked b
                where b.limit_id = p_id and b.limit_key > h.key order by b.limit_key limit 1) n
        )
        select h.key from held h
    loop
        if flowfabric.open_limit(p_id, v.key, 1000, false, null, null, null) is null then
            perform flowfabric.look_at_limit(p_id, v.key, v_now, v_now);
        end if;
    end loop;
    return 'ok';
end;
$$;
