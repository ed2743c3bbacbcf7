-- empty_segment: truncate a segment of a ring, unless a long reader holds it: the next round of the duty tries again.
--
-- Takes    p_floor: for the event log, the highest number that is removed. The deployment stores it in the transaction
--          of the truncation, so that a reader knows why events are missing.
-- Returns  whether it is empty now.
create or replace function flowfabric.empty_segment(p_table text, p_floor bigint default null) returns boolean
language plpgsql as $$
begin
    if p_floor is not null then
        update flowfabric.deployment d set event_floor = greatest(d.event_floor, p_floor);
    end if;
    case p_table
        when 'event_0' then truncate flowfabric.event_0;
        when 'event_1' then truncate flowfabric.event_1;
        when 'event_2' then truncate flowfabric.event_2;
        when 'event_3' then truncate flowfabric.event_3;
        when 'event_4' then truncate flowfabric.event_4;
        when 'event_5' then truncate flowfabric.event_5;
        when 'event_6' then truncate flowfabric.event_6;
        when 'event_7' then truncate flowfabric.event_7;
        when 'live_frame_0' then truncate flowfabric.live_frame_0;
        when 'live_frame_1' then truncate flowfabric.live_frame_1;
        when 'live_frame_2' then truncate flowfabric.live_frame_2;
        when 'live_frame_3' then truncate flowfabric.live_frame_3;
    end case;
    return true;
exception when lock_not_available then
    return false;
end;
$$;
