-- trim_events: empty every segment of the ring whose youngest event is older than the retention.
create or replace function flowfabric.trim_events(p_now timestamptz) returns integer
language plpgsql as $$
declare
    v_cutoff timestamptz;
    v_last timestamptz;
    v_last_seq bigint;
    v_n integer := 0;
begin
    select p_now - d.event_retention into v_cutoff from flowfabric.deployment d;
    for v_slot in 0 .. 7 loop
        continue when v_slot = flowfabric.event_slot(p_now);
        -- The last event of a segment is its youngest, except for concurrent calls.
        select e.occurred_at, e.seq into v_last, v_last_seq from flowfabric.event e where e.slot = v_slot
        order by e.seq desc limit 1;
        continue when v_last is null or v_last > v_cutoff;
        if flowfabric.empty_segment('event_' || v_slot, v_last_seq) then
            v_n := v_n + 1;
        end if;
    end loop;
    return v_n;
end;
$$;
