-- live_rate: the rate and the cap of a stream after best-effort frames of one call.
--
-- Takes    the head, how many frames, their milliseconds, and the parameters of the last of them; those out of range are
--          replaced by the defaults. The first frame counts from the one before the call, the others as 1 ms later each.
-- Returns  the head with the new rate, cap and floor.
create or replace function flowfabric.live_rate(
    p_head flowfabric.stream_head, p_frames integer, p_ms bigint, p_ttl_ms bigint, p_floor integer, p_ceiling integer,
    p_alpha double precision) returns flowfabric.stream_head
language plpgsql immutable as $$
declare
    v_ttl double precision := greatest(p_ttl_ms, 1) / 1000.0;
    v_floor integer := case when p_floor > 0 then p_floor else 64 end;
    v_ceiling integer := greatest(case when p_ceiling > 0 then p_ceiling else 16384 end, v_floor);
    -- Not smaller than what the arithmetic below can hold.
    v_alpha double precision := case when p_alpha > 0 and p_alpha <= 1 then greatest(p_alpha, 1e-9) else 0.2 end;
    v_is_first boolean := p_head.ema is null;
begin
    if v_is_first then
        p_head.ema := v_floor / (2 * v_ttl);
    else
        p_head.ema := v_alpha * 1000 / greatest(p_ms - p_head.live_ms, 1) + (1 - v_alpha) * p_head.ema;
    end if;
    if p_frames > 1 then
        -- A power too small for the type is an error of the server, and 0 here.
        p_head.ema := 1000 - (1000 - p_head.ema)
                             * case when v_alpha < 1 and (p_frames - 1) * ln(1 - v_alpha) > -600
                                    then power(1 - v_alpha, p_frames - 1) else 0 end;
    end if;
    p_head.live_cap := case when v_is_first and p_frames = 1 then v_floor
                            else greatest(least(ceil(p_head.ema * v_ttl * 2), v_ceiling), v_floor) end;
    p_head.live_ms := p_ms;
    p_head.live_floor := greatest(p_head.live_floor, p_head.live + p_frames - p_head.live_cap);
    return p_head;
end;
$$;

-- live_slot: the segment of the ring that a time belongs to: four segments of 15 minutes.
create or replace function flowfabric.live_slot(p_ms bigint) returns smallint
language sql immutable as $$ select (p_ms / 900000 % 4)::smallint $$;
