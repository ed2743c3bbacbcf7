-- claim_one: consume a claim grant (or, for an operator, none) and start or continue the attempt
--
-- p_call   'fresh' and 'resumed' from claim_granted, 'operator' from claim_as_operator.
-- Locks    the execution, then the heads of its quota policies, then its ready row.
-- Returns  the lease as a row with code ok, or a row with the refusal only.
create or replace function flowfabric.claim_one(
    p_call text, p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_lease uuid,
    p_attempt uuid, p_ttl_ms bigint, p_grant_key text, p_policy text, p_timeout_ms bigint, p_deadline_at timestamptz)
returns setof flowfabric.granted
language plpgsql as $$
declare
    v_now timestamptz;
    v_code text := 'ok';
    v_detail text;
    v_refused flowfabric.granted;
    e flowfabric.execution;
    g flowfabric.claim_grant;
begin
    perform flowfabric.check_time(p_deadline_at);
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    select x.* into g from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane is not null and p_lane <> (select r.lane from flowfabric.route r where r.id = e.route) then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif p_call <> 'operator' and e.state = 'active' and e.lease_lost is null and e.lease_expires_at > v_now
          and e.lease_id = p_lease and (p_attempt is null or e.attempt_id = p_attempt) then
        -- The response to the first call was lost: return it again.
        return query
        select 'ok'::text, 'again'::text, e.partition, e.id,
               case when e.attempt_resumed_at is null then 'fresh' else 'resumed' end, e.attempt_index, e.attempt_id,
               coalesce(e.attempt_type, 'initial'), e.lease_id, e.epoch, e.lease_expires_at, r.lane, r.kind, e.namespace, e.flow_id,
               e.priority, e.created_at, coalesce(i.payload, e.payload),
               case when i.payload is null then e.payload_encoding else i.encoding end, e.tags, e.deadline_at,
               e.attempt_timeout_at, e.retries, e.reclaims, e.replays, i.upstreams, i.states, i.results, i.encodings,
               flowfabric.durability_of(e.policy), e.forked_from is not null
        from flowfabric.route r
        cross join lateral flowfabric.inputs_of(e.partition, e.id) i
        where r.id = e.route;
        return;
    elsif e.completed_at is not null or e.state in ('active', 'suspended') then
        v_code := case when p_call = 'operator' then 'execution_not_eligible' else 'execution_not_leaseable' end;
    elsif p_call = 'operator' and g.expires_at > v_now then
        v_code := 'grant_already_exists';
    elsif e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker' then
        v_code := case when p_call = 'operator' then 'execution_not_eligible' else 'execution_not_leaseable' end;
    elsif p_call = 'fresh' and e.pending = 'interrupted' then
        v_code := 'use_claim_resumed_execution';
    elsif p_call = 'resumed' and e.pending <> 'interrupted' then
        v_code := 'not_a_resumed_execution';
    elsif p_call <> 'operator' and (g.id is null or g.kind <> 'claim' or g.worker_id <> p_worker
          or (p_grant_key is not null
              and (p_grant_key <> g.grant_key or flowfabric.verify_grant(p_partition, p_id, p_grant_key)
                   not in ('ok', 'expired')))) then
        v_code := 'invalid_claim_grant';
    elsif p_call = 'fresh' and flowfabric.is_used(p_partition, p_id, p_lease, p_attempt) then
        v_code := 'invalid_input'; v_detail := 'used_id';
    elsif p_call <> 'operator' and g.expires_at <= v_now then
        v_code := 'claim_grant_expired';
        delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
    end if;
    if v_code = 'ok' and e.limits is not null then
        v_now := flowfabric.hold_slots(p_partition, p_id, case when p_call <> 'operator' then g.expires_at end);
        if v_now is null then
            v_code := 'claim_grant_expired';
            delete from flowfabric.claim_grant x where x.partition = p_partition and x.id = p_id;
        end if;
    end if;
    if v_code = 'ok' then
        return query select * from flowfabric.start_granted(
            p_partition, p_id, p_worker, p_instance, p_lease, p_attempt, p_ttl_ms, p_timeout_ms, p_deadline_at, p_policy,
            e.pending <> 'first', v_now);
    else
        v_refused.code := v_code; v_refused.detail := v_detail; v_refused.partition := p_partition; v_refused.id := p_id;
        v_refused.attempt_id := e.attempt_id; v_refused.lease_epoch := e.epoch;
        return next v_refused;
    end if;
end;
$$;
