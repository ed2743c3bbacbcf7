-- trim_live: empty the segments of the ring of best-effort frames that are neither written now nor were before.
create or replace function flowfabric.trim_live(p_now timestamptz) returns integer
language plpgsql as $$
declare
    v_current smallint := flowfabric.live_slot(floor(extract(epoch from p_now) * 1000)::bigint);
    v_n integer := 0;
begin
    for v_slot in 0 .. 3 loop
        continue when v_slot in (v_current, (v_current + 3) % 4)
                      or not exists (select from flowfabric.live_frame f where f.slot = v_slot);
        begin
            case v_slot
                when 0 then truncate flowfabric.live_frame_0;
                when 1 then truncate flowfabric.live_frame_1;
                when 2 then truncate flowfabric.live_frame_2;
                when 3 then truncate flowfabric.live_frame_3;
            end case;
            v_n := v_n + 1;
        exception when lock_not_available then
            null;   -- a long reader; the next round tries again
        end;
    end loop;
    return v_n;
end;
$$;
