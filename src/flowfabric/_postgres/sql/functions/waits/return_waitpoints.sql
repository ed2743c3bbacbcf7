-- return_waitpoints: the waitpoints of a suspension of several waits are pending again, with the signals they have
--
-- Called by close_suspension. A waitpoint that is due by now expires.
-- Takes    p_waitpoint: where the signal arrived that closed the suspension, to be counted there; null when none did.
create or replace function flowfabric.return_waitpoints(
    p_partition integer, p_id uuid, p_waitpoints uuid[], p_waitpoint uuid, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_expires timestamptz;   -- of the first that has a time of its own
begin
    with returned as (
        update flowfabric.waitpoint w
        set state = 'pending', suspension_id = null, activated_at = null, required_signal_names = '{}',
            signal_count = w.signal_count + (w.waitpoint_id is not distinct from p_waitpoint)::integer,
            matched_signal_count = w.matched_signal_count + (w.waitpoint_id is not distinct from p_waitpoint)::integer,
            last_signal_at = case when w.waitpoint_id = p_waitpoint then p_now else w.last_signal_at end
        from unnest(p_waitpoints) as u (waitpoint_id)
        cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                            where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) f
        where w.ctid = f.tid
        returning w.expires_at
    )
    select min(r.expires_at) into v_expires from returned r where r.expires_at < flowfabric.far_date();
    if v_expires is not null then
        perform flowfabric.expire_waitpoints(array[p_partition], array[p_id], p_now);
        perform flowfabric.set_timers('waitpoint', array[p_partition], array[p_id], array[greatest(v_expires, p_now)]);
    end if;
end;
$$;
