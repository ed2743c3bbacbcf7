-- check_bindings: whether an execution may suspend on these waitpoints under this condition
--
-- Called by suspend and settle_wait, under the lock of the execution, for a caller that holds the lease. Checks in the
-- order of the contract: an open suspension, fresh ids, pending waitpoints, keys, signing key. A pending waitpoint
-- that has expired is marked.
-- Takes    p_keys: per waitpoint its key if it is fresh, null if it is pending.
-- Returns  the refusal (code and detail; no code: none), the keys of all waitpoints, those that are pending, and the
--          signing key for fresh ones.
create or replace function flowfabric.check_bindings(
    e flowfabric.execution, p_waitpoints uuid[], p_keys text[], p_condition jsonb, p_now timestamptz,
    out code text, out detail text, out keys text[], out pending uuid[], out kid text)
language plpgsql as $$
declare
    w flowfabric.waitpoint;
begin
    keys := p_keys; pending := '{}';
    if (flowfabric.open_suspension(e.partition, e.id)).id is not null then
        code := 'already_suspended';
    elsif exists (select from unnest(p_waitpoints, p_keys) as u (waitpoint_id, key)
               cross join lateral (select from flowfabric.waitpoint x where x.waitpoint_id = u.waitpoint_id offset 0) x
               where u.key is not null) then
        code := 'waitpoint_already_exists';
    end if;
    for i in 1 .. cardinality(p_waitpoints) loop
        exit when code is not null;
        continue when p_keys[i] is not null;
        pending := pending || p_waitpoints[i];
        select x.* into w from flowfabric.waitpoint x where x.waitpoint_id = p_waitpoints[i];
        code := case when w.waitpoint_id is null then 'waitpoint_not_found'
                     when w.id <> e.id or w.attempt_index <> e.attempt_index then 'invalid_waitpoint_for_execution'
                     when w.state = 'expired' then 'pending_waitpoint_expired'
                     when w.state <> 'pending' then 'waitpoint_not_pending'
                     when w.expires_at <= p_now then 'pending_waitpoint_expired' end;
        if w.state = 'pending' and code = 'pending_waitpoint_expired' then
            perform flowfabric.expire_waitpoints(array[e.partition], array[e.id], p_now);
        end if;
        keys[i] := w.waitpoint_key;
    end loop;
    if code is null and exists (select from flowfabric.leaves(p_condition) l where cardinality(l.keys) > 0) and (
            select array_agg(distinct k order by k) from flowfabric.leaves(p_condition) l cross join lateral unnest(l.keys) k)
            is distinct from (select array_agg(k order by k) from unnest(keys) k) then
        code := 'invalid_input'; detail := 'waitpoint_key_mismatch';
    end if;
    if code is null and cardinality(pending) < cardinality(p_waitpoints) then
        kid := (select k.kid from flowfabric.keystore k where k.state = 'current');
        if kid is null then
            code := 'invalid_input'; detail := 'hmac_secret_not_initialized';
        end if;
    end if;
end;
$$;
