-- The event log for people: the events of one execution, and how many events there are.

-- list_events: the events of one execution in the order of its history, as far back as the log goes
--
-- Not those of an execution with the same id that was deleted before.
-- One call looks at p_most numbers at most. A cursor beyond what its log shares with this one is refused (check_epoch).
-- For people: it shows events at once, and an event whose transaction is open while a later page is read may be missing.
-- Returns  the events, then one row with the current epoch, and the number to continue after, unless all were read.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_events(
    p_partition integer, p_id uuid, p_after bigint, p_epoch bigint, p_limit integer, p_most integer)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, worker_type text,
               lease_id uuid, lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text,
               worker_instance_id text, reason text, revoked_by text, details jsonb, parent_id uuid, lane text, kind text,
               actor text, log_epoch bigint)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    v_margin constant interval := '5 minutes';
    v_created_at timestamptz;
    v_completed_at timestamptz;
    v_from bigint;
    v_upto bigint;
    v_last bigint;
    v_found integer;
    v_sees boolean := flowfabric.may_operate();
begin
    select e.created_at, e.completed_at into v_created_at, v_completed_at
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
    if not found then
        return;
    end if;
    if p_after > 0 then
        perform flowfabric.check_epoch(p_after, p_epoch);
    end if;
    v_from := coalesce(p_after, flowfabric.seek_event(v_created_at - v_margin));
    v_last := flowfabric.last_position();
    if v_completed_at is not null then
        -- Only a signal that is repeated has events later.
        v_last := least(v_last, greatest(
            flowfabric.seek_event(v_completed_at + v_margin) + 1000,
            (select max(x.seq) from flowfabric.event x where x.id = p_id and x.signal_effect is not null)));
    end if;
    v_upto := least(v_last, v_from + p_most);
    return query
    with mine as materialized (
        select x as e from flowfabric.event x
        where x.seq > v_from and x.seq <= v_upto and x.partition = p_partition and x.id = p_id
    )
    select s.*, null::bigint
    from mine m
    left join flowfabric.worker w on w.id = (m.e).worker
    left join flowfabric.route r on r.id = (m.e).route
    cross join lateral flowfabric.shown_event(m.e, w, r, v_sees) s
    -- An end before it was created is that of another.
    where s.seq > coalesce((select max((x.e).seq) from mine x
                            where (x.e).outcome is not null and (x.e).occurred_at < v_created_at), 0)
    order by s.seq limit p_limit;
    get diagnostics v_found = row_count;
    if v_found < p_limit and v_upto < v_last then
        seq := v_upto;
    end if;
    select l.epoch into log_epoch from flowfabric.log_epoch l where l.last_position is null;
    return next;
end;
$$;

-- seek_event: a number that all events younger than a moment follow.
--
-- Numbers grow with time, except for concurrent calls, so a binary search finds the position with a few index probes;
-- callers leave a margin.
create or replace function flowfabric.seek_event(p_at timestamptz) returns bigint
language plpgsql stable as $$
declare
    v_low bigint := 0;
    v_high bigint;
    v_middle bigint;
    v_found timestamptz;
begin
    select n.last_value into v_high from flowfabric.event_number n;
    while v_high - v_low > 500 loop
        v_middle := (v_low + v_high) / 2;
        select e.occurred_at into v_found from flowfabric.event e where e.seq > v_middle order by e.seq limit 1;
        if found and v_found < p_at then
            v_low := v_middle;
        else
            v_high := v_middle;
        end if;
    end loop;
    return v_low;
end;
$$;
