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
        begin
            -- With the truncation: a reader never finds a gap that no number tells of.
            update flowfabric.deployment d set event_floor = greatest(d.event_floor, v_last_seq);
            case v_slot
                when 0 then truncate flowfabric.event_0;
                when 1 then truncate flowfabric.event_1;
                when 2 then truncate flowfabric.event_2;
                when 3 then truncate flowfabric.event_3;
                when 4 then truncate flowfabric.event_4;
                when 5 then truncate flowfabric.event_5;
                when 6 then truncate flowfabric.event_6;
                when 7 then truncate flowfabric.event_7;
            end case;
            v_n := v_n + 1;
        exception when lock_not_available then
            null;   -- a long reader; the next round tries again
        end;
    end loop;
    return v_n;
end;
$$;
