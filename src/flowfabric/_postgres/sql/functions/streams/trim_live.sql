-- trim_live: empty the segment of the ring of best-effort frames that was written longest ago.
--
-- The one written now and the one before have visible frames. The next one too, if the clock has stepped back: new ids
-- must be higher than those in it.
create or replace function flowfabric.trim_live(p_now timestamptz) returns integer
language plpgsql as $$
declare
    v_slot integer := (flowfabric.live_slot(floor(extract(epoch from p_now) * 1000)::bigint) + 2) % 4;
begin
    if not exists (select from flowfabric.live_frame f where f.slot = v_slot) then
        return 0;
    end if;
    return flowfabric.empty_segment('live_frame_' || v_slot)::integer;
end;
$$;
