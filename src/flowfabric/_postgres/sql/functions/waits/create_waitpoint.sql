-- Waitpoints: pending until a suspension uses them, active while it is open, then closed or expired forever.
--
-- Every change of one holds the lock of its execution. An execution's waitpoints are read behind a fence (offset 0):
-- a plan made while the table was empty must not scan all open ones later.

-- create_waitpoint: a pending waitpoint and its token, for a lease holder to hand out before it suspends
--
-- Locks    the execution.
-- Returns  one verdict; with ok the token and when it expires.
-- Roles    work, operate
create or replace function flowfabric.create_waitpoint(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_waitpoint uuid, p_key text, p_ms double precision, p_outlives_attempt boolean)
returns table (ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
               token text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_held flowfabric.verdict;
    v_kid text;
    v_detail text;
    v_expires timestamptz;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return query select v_held.*, null::text;
        return;
    end if;
    v_now := v_held.at;
    v_kid := (select k.kid from flowfabric.keystore k where k.state = 'current');
    v_detail := case
        when p_key = '' then 'waitpoint_key_empty'
        when p_ms <= 0 then 'expires_in_not_positive'
        when (select count(*) from flowfabric.waitpoint w
              where w.partition = p_partition and w.id = p_id and w.state = 'pending' and w.expires_at > v_now) >= 1000
            then 'too_many_pending_waitpoints'
        when v_kid is null then 'hmac_secret_not_initialized' end;
    if v_detail is not null then
        return query select 1, 'invalid_input', v_detail, 'active', p_epoch, p_attempt, v_now, null::text;
        return;
    end if;
    v_expires := case when p_ms >= extract(epoch from flowfabric.far_date() - v_now) * 1000 then flowfabric.far_date()
                      else v_now + flowfabric.ms(p_ms) end;
    insert into flowfabric.waitpoint
        (partition, waitpoint_id, id, attempt_index, waitpoint_key, token_kid, state, outlives_attempt, created_at, expires_at)
    select p_partition, p_waitpoint, p_id, e.attempt_index, p_key, v_kid, 'pending', p_outlives_attempt, v_now, v_expires
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
    update flowfabric.execution e set has_waitpoints = true
    where e.partition = p_partition and e.id = p_id and not e.has_waitpoints;
    if v_expires < flowfabric.far_date() then
        perform flowfabric.set_timers('waitpoint', array[p_partition], array[p_id], array[v_expires]);
    end if;
    return query select 1, 'ok', null::text, 'active', null::bigint, null::uuid, v_expires,
                        flowfabric.sign_token(v_kid, p_partition, p_id, p_waitpoint);
end;
$$;
