-- Timers: "check these executions at this time". A timer is never moved or removed early: when it is due, the duty
-- checks the execution itself, acts if the execution's own time is due, and otherwise sets the timer again. This way
-- renewing a lease or ending an execution touches no timer.

-- set_timers: check these executions at these times; one row per time. Wakes duty runners that would be too late.
create or replace function flowfabric.set_timers(
    p_kind text, p_partition integer[], p_id uuid[], p_due timestamptz[]) returns void
language plpgsql as $$
declare
    v_first timestamptz;
    v_past timestamptz := flowfabric.now() - interval '10 seconds';   -- rounds may start after what is long past
begin
    if p_id is null then
        return;
    end if;
    with set as (
        insert into flowfabric.timer (kind, due_at, partitions, ids)
        select p_kind, greatest(u.due, v_past), array_agg(u.partition), array_agg(u.id)
        from unnest(p_partition, p_id, p_due) as u (partition, id, due)
        group by 2
        returning due_at
    )
    select min(due_at) into v_first from set;
    if v_first is not null then
        perform flowfabric.wake_duties(v_first);
    end if;
end;
$$;
