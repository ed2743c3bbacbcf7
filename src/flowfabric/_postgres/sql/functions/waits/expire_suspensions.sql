-- expire_suspensions: end suspensions past their timeout, each with its timeout behaviour.
--
-- Called by the duty, under the locks of executions that are suspended and due.
create or replace function flowfabric.expire_suspensions(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    s flowfabric.suspension;
    v_slot smallint := flowfabric.open_log(p_now);
    v_signal uuid;
    v_behavior text;
begin
    for s in
        select x.* from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select o.* from flowfabric.suspension o
                            where o.partition = u.partition and o.id = u.id offset 0) x
        where x.closed_at is null and x.timeout_at <= p_now
        order by x.timeout_at
    loop
        v_behavior := flowfabric.known_behavior(s.timeout_behavior);
        if v_behavior = 'escalate' then
            update flowfabric.suspension x
            set reason_code = 'waiting_for_operator_review', timeout_at = null, timeout_behavior = null
            where x.partition = s.partition and x.id = s.id and x.number = s.number;
            update flowfabric.waitpoint w set expires_at = null
            where w.partition = s.partition and w.id = s.id and w.suspension_id = s.suspension_id and not s.keeps_waitpoints;
            update flowfabric.execution e
            set suspension_timeout_at = null, blocking_reason = 'paused_by_operator', mutated_at = p_now,
                transitioned_at = p_now,
                blocking_detail = 'missed its deadline of ' || flowfabric.time_text(s.timeout_at)
                    || ' (' || s.reason_code || '), waiting for an operator'
            where e.partition = s.partition and e.id = s.id;
            insert into flowfabric.event (slot, occurred_at, partition, id, flow_id, namespace, tags, operator_type,
                                          attempt_id, attempt_index, details)
            select v_slot, p_now, e.partition, e.id, e.flow_id, e.namespace, e.tags, 'suspension_escalated', e.attempt_id,
                   e.attempt_index, jsonb_build_object('reason_code', s.reason_code)
            from flowfabric.execution e where e.partition = s.partition and e.id = s.id;
            -- Once for each wait: a signal that is set aside suspends it again, past its time.
            update flowfabric.waitpoint w set is_escalated = true
            from unnest(flowfabric.late_waitpoints(s, p_now)) as u (waitpoint_id)
            cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                                where x.partition = s.partition and x.waitpoint_id = u.waitpoint_id and not x.is_escalated
                                offset 0) f
            where w.ctid = f.tid;
            if found then
                perform flowfabric.leave_hooks(array[s.partition], array[s.id], 'escalation', jsonb_build_object(
                    'reason', s.reason_code, 'waitpoints', s.waitpoint_keys, 'waiting_since', s.suspended_at,
                    'timeout_at', s.timeout_at), p_now);
            end if;
        elsif v_behavior = 'auto_resume_with_timeout_signal' and s.keeps_waitpoints then
            -- Of several waits: the handler finds out which timed out.
            perform flowfabric.close_suspension(
                s.partition, s.id, s.number, s.waitpoint_ids, 'timed_out_auto_resume', null, null, null, null, null, p_now);
            perform flowfabric.resume(s.partition, s.id, 0, p_now);
        elsif v_behavior = 'auto_resume_with_timeout_signal' then
            v_signal := gen_random_uuid();
            insert into flowfabric.signal
                (partition, id, ordinal, signal_id, waitpoint_id, waitpoint_key, suspension_id, signal_name,
                 signal_category, source_type, source_identity, correlation_id, payload_encoding, target_scope,
                 created_at, accepted_at, observed_effect, match_detail)
            select s.partition, s.id, coalesce(max(g.ordinal), 0) + 1, v_signal, s.waitpoint_ids[1], s.waitpoint_keys[1],
                   s.suspension_id, 'timeout', 'system', 'system', 'suspension_timeout', '', 'json', 'execution', p_now,
                   p_now, 'resume_condition_satisfied', 'not_evaluated'
            from flowfabric.signal g where g.partition = s.partition and g.id = s.id;
            perform flowfabric.close_suspension(
                s.partition, s.id, s.number, s.waitpoint_ids, 'timed_out_auto_resume', null, null, v_signal, array[v_signal],
                null, p_now);
            perform flowfabric.resume(s.partition, s.id, 0, p_now);
        else
            if v_behavior <> coalesce(s.timeout_behavior, 'fail') then
                raise warning 'suspension % has the unknown timeout behaviour %, taken as fail', s.suspension_id, s.timeout_behavior;
            end if;
            perform flowfabric.close_suspension(
                s.partition, s.id, s.number, s.waitpoint_ids, 'timed_out_' || v_behavior, null, null, null, null,
                null, p_now);
            perform flowfabric.end_executions(
                array[s.partition], array[s.id], null,
                case v_behavior when 'fail' then 'failed' when 'cancel' then 'cancelled' else 'expired' end,
                case v_behavior when 'fail' then 'terminal_failed' when 'cancel' then 'cancelled' else 'expired' end,
                null, null, array['suspension_timeout:' || v_behavior], array['timeout'],
                case v_behavior when 'cancel' then 'suspension_timeout:cancel' end,
                case v_behavior when 'cancel' then 'system_timeout' end,
                'suspension_timeout', 'reconciler', false, p_now);
        end if;
    end loop;
end;
$$;

-- late_waitpoints: the waitpoints of a suspension that timed out; of several waits, those of the waits that timed out
create or replace function flowfabric.late_waitpoints(s flowfabric.suspension, p_now timestamptz) returns uuid[]
language sql stable as $$
    select coalesce(array_agg(l.waitpoint_id) filter (where l.is_late), s.waitpoint_ids)
    from (select u.waitpoint_id,
                 coalesce(x.at, (select t.at from flowfabric.step t
                                 where t.partition = x.partition and t.id = x.id and t.generation = x.generation
                                   and t.kind = 'sleep' and t.name = 'timeout of wait ' || x.name || ' ' || x.n and t.n = 0)) <= p_now
                 as is_late
          from flowfabric.execution e
          join flowfabric.step x on x.partition = e.partition and x.id = e.id and x.generation = e.generation and x.kind = 'wait'
          cross join lateral unnest(x.waitpoint_ids) as u (waitpoint_id)
          where s.keeps_waitpoints and e.partition = s.partition and e.id = s.id and u.waitpoint_id = any (s.waitpoint_ids)) l
$$;

-- known_behavior: the timeout behaviour for a stored word; also maps an alias and unknown words.
create or replace function flowfabric.known_behavior(p_behavior text) returns text
language sql immutable as $$
    select case when p_behavior in ('fail', 'cancel', 'expire', 'auto_resume_with_timeout_signal', 'escalate') then p_behavior
                when p_behavior = 'auto_resume' then 'auto_resume_with_timeout_signal' else 'fail' end
$$;
