-- reclaim: consume a reclaim grant: a new attempt under a new lease replaces the one that was lost.
--
-- Locks    the execution, then the heads of its quota policies, then its ready row.
-- Returns  the lease as a row with code ok; not_reclaimable, reclaim_cap_exceeded (count in lease_epoch),
--          grant_not_found, or the refusal.
-- Roles    work, operate
create or replace function flowfabric.reclaim(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_lease uuid, p_attempt uuid,
    p_ttl_ms bigint, p_grant_key text, p_policy text, p_max_reclaims bigint)
returns setof flowfabric.granted
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_code text := 'ok';
    v_detail text;
    v_count bigint;
    v_refused flowfabric.granted;
    e flowfabric.execution;
    g flowfabric.claim_grant;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    select x.* into g from flowfabric.claim_grant x
    where x.partition = p_partition and x.id = p_id and x.kind = 'reclaim' and x.expires_at > v_now;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane is not null and p_lane <> (select r.lane from flowfabric.route r where r.id = e.route) then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif g.id is null then
        v_code := 'grant_not_found';
    elsif g.worker_id <> p_worker then
        v_code := 'invalid_input'; v_detail := 'worker_id';
    elsif p_grant_key is not null
          and (p_grant_key <> g.grant_key or flowfabric.verify_grant(p_partition, p_id, p_grant_key) <> 'ok') then
        v_code := 'grant_not_found';
    elsif flowfabric.is_used(p_partition, p_id, p_lease, p_attempt) then
        v_code := 'invalid_input'; v_detail := 'used_id';
    elsif exists (select from flowfabric.cancel_member c where c.partition = e.partition and c.id = e.id) then
        v_code := 'not_reclaimable'; v_detail := 'its flow was cancelled';
        delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    elsif e.state <> 'active' or (e.lease_lost is null and e.lease_expires_at > v_now) then
        v_code := 'not_reclaimable';
        v_detail := case when e.state = 'active' then 'the lease is live' else 'execution is ' || e.state end;
        delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    else
        if e.lease_lost is null then
            perform flowfabric.mark_expired(array[p_partition], array[p_id], v_now);
        end if;
        if e.reclaims >= flowfabric.reclaim_cap(e.policy, p_max_reclaims) then
            v_code := 'reclaim_cap_exceeded'; v_count := e.reclaims;
            perform flowfabric.end_capped(array[p_partition], array[p_id], v_now);
        elsif e.limits is not null then
            v_now := flowfabric.hold_slots(p_partition, p_id, g.expires_at);   -- the lease begins when it has its slots
            if v_now is null then
                v_code := 'grant_not_found';
            end if;
        end if;
    end if;
    if v_code = 'ok' then
        return query select * from flowfabric.start_granted(
            p_partition, p_id, p_worker, p_instance, p_lease, p_attempt, p_ttl_ms, null, null, p_policy, true, v_now);
    else
        v_refused.code := v_code; v_refused.detail := v_detail; v_refused.partition := p_partition; v_refused.id := p_id;
        v_refused.lease_epoch := v_count;
        return next v_refused;
    end if;
end;
$$;
