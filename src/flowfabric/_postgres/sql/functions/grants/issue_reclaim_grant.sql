-- issue_reclaim_grant: the right to replace a lost lease.
--
-- Locks    the execution.
-- Returns  ok with the key in detail and its expiry; not_reclaimable with the reason; reclaim_cap_exceeded (the
--          execution has then failed) with the count in lease_epoch; or the refusal.
-- Roles    operate
create or replace function flowfabric.issue_reclaim_grant(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_capabilities text[], p_ttl_ms bigint,
    p_hash text, p_snapshot text, p_summary text, p_max_reclaims bigint)
returns table (code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz, lane text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_lane text;
    v_now timestamptz;
    v_code text;
    v_detail text;
    v_at timestamptz;
    v_count bigint;
    e flowfabric.execution;
begin
    perform flowfabric.require_read_committed();
    if not exists (select from flowfabric.keystore k where k.state = 'current') then
        return query select 'unavailable', null::text, null::text, null::bigint, null::uuid, null::timestamptz, null::text;
        return;
    end if;
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    if e.id is not null and e.state = 'active' and e.lease_lost is null and e.lease_expires_at <= v_now then
        perform flowfabric.mark_expired(array[p_partition], array[p_id], v_now);
        select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    end if;
    select r.lane into v_lane from flowfabric.route r where r.id = e.route;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane <> v_lane then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif e.state <> 'active' then
        v_code := 'not_reclaimable'; v_detail := 'execution is ' || e.state;
    elsif e.lease_lost is null then
        v_code := 'not_reclaimable'; v_detail := 'the lease is live';
    elsif exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                  and g.expires_at > v_now) then
        v_code := 'grant_already_exists';
    else
        v_detail := flowfabric.missing_capabilities(e.route, p_capabilities);
        if v_detail is not null then
            v_code := 'not_reclaimable';
            v_detail := 'capability_mismatch:' || v_detail;
            update flowfabric.execution x set capability_mismatch_at = v_now, mutated_at = v_now
            where x.partition = p_partition and x.id = p_id;
        elsif e.reclaims >= flowfabric.reclaim_cap(e.policy, p_max_reclaims) then
            v_code := 'reclaim_cap_exceeded'; v_count := e.reclaims;
            perform flowfabric.end_capped(array[p_partition], array[p_id], v_now);
        else
            v_code := 'ok';
            select w.grant_key, w.expires_at into v_detail, v_at
            from flowfabric.write_grant(e, 'reclaim', p_worker, p_instance, v_lane, p_hash, p_capabilities, p_snapshot,
                                        p_summary, p_ttl_ms, v_now) w;
        end if;
    end if;
    return query select v_code, v_detail, e.state, v_count, e.attempt_id, v_at, v_lane;
end;
$$;
