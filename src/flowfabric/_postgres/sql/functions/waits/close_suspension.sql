-- Ends of a suspension that are not the end of the execution

-- close_suspension: close an open suspension and all its waitpoints; the outcome of a task's wait is recorded with it
--
-- Of a suspension of several waits the waitpoints become pending again when it is resumed by a signal or a timeout: the handler
-- settles each wait. An operator who resumes it ends all of them.
-- Takes    p_waitpoint: where the signal arrived that closes it, to be counted there; null when none did.
--          p_is_task: whether it is a task's wait; null when that is not known.
create or replace function flowfabric.close_suspension(
    p_partition integer, p_id uuid, p_number integer, p_waitpoints uuid[], p_reason text, p_trigger text,
    p_waitpoint uuid, p_closer uuid, p_satisfiers uuid[], p_is_task boolean, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_satisfied_at timestamptz := case when p_reason = 'resumed' then p_now end;
    v_keeps boolean;
begin
    update flowfabric.suspension x
    set closed_at = p_now, close_reason = p_reason, trigger_type = p_trigger, closer_signal_id = p_closer,
        satisfier_signal_ids = p_satisfiers, satisfied_at = v_satisfied_at,
        last_signal_at = case when p_waitpoint is null then x.last_signal_at else p_now end
    where x.partition = p_partition and x.id = p_id and x.number = p_number
    returning x.keeps_waitpoints and p_reason in ('resumed', 'timed_out_auto_resume') into v_keeps;
    if v_keeps then
        perform flowfabric.return_waitpoints(p_partition, p_id, p_waitpoints, p_waitpoint, p_now);
        return;
    end if;
    if p_waitpoints = array[p_waitpoint] then
        update flowfabric.waitpoint w
        set state = 'closed', closed_at = p_now, close_reason = p_reason, satisfied_at = v_satisfied_at,
            signal_count = w.signal_count + 1, matched_signal_count = w.matched_signal_count + 1, last_signal_at = p_now
        where w.partition = p_partition and w.waitpoint_id = p_waitpoint;
    else
        update flowfabric.waitpoint w
        set state = 'closed', closed_at = p_now, close_reason = p_reason, satisfied_at = v_satisfied_at,
            signal_count = case when w.waitpoint_id = p_waitpoint then w.signal_count + 1 else w.signal_count end,
            matched_signal_count = case when w.waitpoint_id = p_waitpoint then w.matched_signal_count + 1
                                        else w.matched_signal_count end,
            last_signal_at = case when w.waitpoint_id = p_waitpoint then p_now else w.last_signal_at end
        from unnest(p_waitpoints) as u (waitpoint_id)
        cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                            where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) f
        where w.ctid = f.tid;
    end if;
    if p_is_task is null then
        select w.outlives_attempt into p_is_task from flowfabric.waitpoint w
        where w.partition = p_partition and w.waitpoint_id = p_waitpoints[1];
    end if;
    if p_is_task then
        perform flowfabric.remember_wait(p_partition, p_id, p_waitpoints, p_reason, p_satisfiers);
    end if;
end;
$$;
