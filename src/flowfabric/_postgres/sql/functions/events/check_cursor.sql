-- check_cursor: refuse a cursor after which events are missing
--
-- A cursor of an older epoch is good up to where that epoch ended. An epoch that this log never had belongs to a server
-- whose events a restore has lost; it began during the last of our epochs before it, and shares the log up to its end.
-- Of an epoch younger than the current one, only the epochs before the current one are shared for certain.
-- Returns  the number of the next event; null at the end of the log.
create or replace function flowfabric.check_cursor(p_after bigint, p_epoch bigint) returns bigint
language plpgsql volatile as $$
declare
    v_floor bigint;
    v_epoch bigint;
    v_last bigint;
    v_next bigint;
    v_is_there boolean;
begin
    select d.event_floor, l.epoch into v_floor, v_epoch
    from flowfabric.deployment d, flowfabric.log_epoch l where l.last_position is null;
    if p_after = 0 then
        -- Not from the oldest row: after a change of the retention, events below the floor may be left beside a gap.
        return (select e.seq from flowfabric.event e where e.seq > v_floor order by e.seq limit 1);
    end if;
    if p_epoch <> v_epoch then
        perform flowfabric.check_epoch(p_after, p_epoch);
    end if;
    if p_after < v_floor then
        raise exception 'events up to % were removed', v_floor using errcode = 'FF006', detail = v_floor || ' ' || v_epoch;
    end if;
    select min(x.seq) filter (where x.seq > p_after), coalesce(bool_or(x.seq = p_after), false) into v_next, v_is_there
    from (select e.seq from flowfabric.event e where e.seq >= p_after order by e.seq limit 2) x;
    if v_next is null and not v_is_there and p_after > v_floor then
        v_last := flowfabric.last_position();
        raise exception 'the log ends at %', v_last using errcode = 'FF005', detail = v_last || ' ' || v_epoch;
    end if;
    return v_next;
end;
$$;

-- check_epoch: refuse a cursor of another epoch that is beyond the last position both share.
create or replace function flowfabric.check_epoch(p_after bigint, p_epoch bigint) returns void
language plpgsql volatile as $$
declare
    v_epoch bigint;
    v_shared bigint;
begin
    select l.epoch into v_epoch from flowfabric.log_epoch l where l.last_position is null;
    if p_epoch = v_epoch then
        return;
    end if;
    select l.last_position into v_shared from flowfabric.log_epoch l
    where l.epoch <= p_epoch and l.last_position is not null order by l.epoch desc limit 1;
    if p_after > coalesce(v_shared, 0) then
        raise exception 'a restore or failover lost events after %', coalesce(v_shared, 0)
        using errcode = 'FF005', detail = coalesce(v_shared, 0) || ' ' || v_epoch;
    end if;
end;
$$;
