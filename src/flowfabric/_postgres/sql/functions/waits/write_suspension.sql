-- write_suspension: write a suspension: open, or already closed if the signals so far satisfy its condition
--
-- Called by suspend and settle_wait, under the lock of the execution, with the results of check_bindings and evaluate.
-- The lease is not touched (see give_up_lease).
-- Takes    p_keys: of all waitpoints. p_pending: the waitpoints that exist; the others are created.
-- Returns  the suspension; null if a fresh waitpoint's id was taken meanwhile, and then nothing was written.
create or replace function flowfabric.write_suspension(
    e flowfabric.execution, p_suspension uuid, p_waitpoints uuid[], p_keys text[], p_kid text, p_pending uuid[],
    p_condition jsonb, p_policy jsonb, p_reason text, p_requested_by text, p_timeout_at timestamptz, p_behavior text,
    p_pointer text, p_idempotency_key text, p_signals flowfabric.recorded, w flowfabric.weighed,
    p_now timestamptz)
returns flowfabric.suspension
language plpgsql as $$
#variable_conflict use_column
declare
    s flowfabric.suspension;
    v_number integer;
    v_satisfiers uuid[];
begin
    select coalesce(max(x.number), 0) + 1 into v_number from flowfabric.suspension x
    where x.partition = e.partition and x.id = e.id;
    if w.closer is not null then
        select array_agg(u.id order by u.place) into v_satisfiers
        from unnest(p_signals.ids, w.details) with ordinality as u (id, detail, place) where u.detail = 'advanced';
    end if;
    begin
        insert into flowfabric.waitpoint
            (partition, waitpoint_id, id, attempt_index, suspension_id, waitpoint_key, token_kid, state, outlives_attempt,
             required_signal_names, created_at, activated_at, expires_at)
        select e.partition, u.waitpoint_id, e.id, e.attempt_index, p_suspension, u.key, p_kid, 'active', false,
               flowfabric.required_names(p_condition, u.key), p_now, p_now, p_timeout_at
        from unnest(p_waitpoints, p_keys) as u (waitpoint_id, key) where u.waitpoint_id <> all (p_pending)
        order by u.waitpoint_id;   -- all in one order: two calls never wait for each other
    exception when unique_violation then
        return null;
    end;
    insert into flowfabric.suspension
        (partition, id, number, suspension_id, attempt_index, attempt_id, lease_id, lease_epoch, waitpoint_ids,
         waitpoint_keys, reason_code, requested_by, continuation_metadata_pointer, resume_condition, counts, resume_policy,
         suspended_at, timeout_at, timeout_behavior, idempotency_key, replay_until, is_early, last_signal_at,
         satisfied_at, closed_at, close_reason, closer_signal_id, satisfier_signal_ids)
    values
        (e.partition, e.id, v_number, p_suspension, e.attempt_index, e.attempt_id, e.lease_id, e.epoch, p_waitpoints,
         p_keys, p_reason, p_requested_by, p_pointer, p_condition, case when w.closer is null then w.counts end, p_policy,
         p_now, p_timeout_at, p_behavior, nullif(p_idempotency_key, ''),
         case when p_idempotency_key <> '' then p_now + least(
             case when p_timeout_at is not null then greatest(p_timeout_at - p_now, interval '0') + interval '60 seconds' end,
             interval '604800 seconds') end,
         w.closer is not null, p_signals.last_at, case when w.closer is not null then p_now end,
         case when w.closer is not null then p_now end, case when w.closer is not null then 'resumed' end,
         p_signals.ids[w.closer], v_satisfiers)
    returning * into s;
    if cardinality(p_pending) > 0 then
        update flowfabric.signal g
        set suspension_id = p_suspension, match_detail = u.detail,
            observed_effect = case when u.place = w.closer then 'resume_condition_satisfied' else 'appended_to_waitpoint' end,
            source_hash = case when u.by_source and w.closer is null
                then flowfabric.source_hash(p_suspension, g.source_type, g.source_identity) end
        from unnest(p_signals.tids, w.details, w.by_source) with ordinality as u (tid, detail, by_source, place)
        where g.ctid = u.tid;
        update flowfabric.waitpoint x
        set state = case when w.closer is null then 'active' else 'closed' end, suspension_id = p_suspension,
            activated_at = p_now, expires_at = p_timeout_at,
            required_signal_names = flowfabric.required_names(p_condition, x.waitpoint_key),
            dropped_upto = 0, counted_by = case when w.closer is null then coalesce(
                (select array_agg(u.leaf) from unnest(w.keys, w.key_leaves) as u (key, leaf) where u.key = x.waitpoint_key), '{}')
                else '{}' end,
            matched_signal_count = (select count(*) from flowfabric.signal g where g.partition = e.partition
                                    and g.waitpoint_id = x.waitpoint_id and g.match_detail = 'advanced'),
            satisfied_at = case when w.closer is not null then p_now end,
            closed_at = case when w.closer is not null then p_now end,
            close_reason = case when w.closer is not null then 'resumed' end
        from unnest(p_pending) as u (waitpoint_id)
        cross join lateral (select o.ctid as tid from flowfabric.waitpoint o
                            where o.partition = e.partition and o.waitpoint_id = u.waitpoint_id offset 0) f
        where x.ctid = f.tid;
    end if;
    if w.closer is not null then
        perform flowfabric.remember_wait(e.partition, e.id, s.waitpoint_ids, 'resumed', s.satisfier_signal_ids);
    end if;
    return s;
end;
$$;
