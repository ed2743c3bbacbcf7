-- issue_claim_grant: for a scheduler; budgets and quotas are not checked here.
--
-- Locks    the execution.
-- Returns  ok with the key in detail and its expiry, or the refusal.
-- Roles    operate
create or replace function flowfabric.issue_claim_grant(
    p_partition integer, p_id uuid, p_lane text, p_worker text, p_instance text, p_capabilities text[], p_ttl_ms bigint,
    p_hash text, p_snapshot text, p_summary text)
returns table (code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz, lane text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_lane text;
    v_now timestamptz;
    v_code text;
    v_detail text;
    v_at timestamptz;
    e flowfabric.execution;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    select r.lane into v_lane from flowfabric.route r where r.id = e.route;
    if e.id is null then
        v_code := 'not_found';
    elsif p_lane <> v_lane then
        v_code := 'invalid_input'; v_detail := 'lane_id';
    elsif e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker'
          or flowfabric.is_uncovered(e, v_now) then
        v_code := 'execution_not_eligible';
    elsif exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                  and g.expires_at > v_now) then
        v_code := 'grant_already_exists';
    else
        v_detail := flowfabric.missing_capabilities(e.route, p_capabilities);
        if v_detail is not null then
            v_code := 'capability_mismatch';
            update flowfabric.execution x set capability_mismatch_at = v_now, mutated_at = v_now
            where x.partition = p_partition and x.id = p_id;
        else
            select w.grant_key, w.expires_at into v_detail, v_at
            from flowfabric.write_grant(e, 'claim', p_worker, p_instance, v_lane, p_hash, p_capabilities, p_snapshot,
                                        p_summary, p_ttl_ms, v_now) w;
            v_code := case when v_detail is null then 'unavailable' else 'ok' end;
        end if;
    end if;
    return query select v_code, v_detail, e.state, e.epoch, e.attempt_id, v_at, v_lane;
end;
$$;
