-- count_events: how many events of each type follow a cursor; without one, only the current end of the log
--
-- A cursor after which events are missing is refused (check_cursor).
-- Returns  one row per type, then one row with the current epoch, and the number of the last event that it counted.
-- Roles    read, operate
create or replace function flowfabric.count_events(p_after bigint, p_epoch bigint)
returns table (seq bigint, lease_type text, outcome text, operator_type text, signal_effect text, worker_type text, n bigint, log_epoch bigint)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_upto bigint := flowfabric.log_end();
    v_next bigint;
    v_floor bigint;
begin
    if p_after is not null then
        v_next := flowfabric.check_cursor(p_after, p_epoch);
        return query
        select null::bigint, e.lease_type, e.outcome, e.operator_type, e.signal_effect, e.worker_type, count(*), null::bigint
        from flowfabric.event e where e.seq >= v_next and e.seq <= v_upto
        group by e.lease_type, e.outcome, e.operator_type, e.signal_effect, e.worker_type;
    end if;
    select d.event_floor, l.epoch into v_floor, log_epoch
    from flowfabric.deployment d, flowfabric.log_epoch l where l.last_position is null;
    select e.seq into seq from flowfabric.event e where e.seq <= v_upto order by e.seq desc limit 1;
    seq := greatest(seq, p_after, v_floor);
    return next;
end;
$$;
