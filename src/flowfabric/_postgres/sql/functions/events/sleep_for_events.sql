-- sleep_for_events: announce that a process follows the log and sleeps; returns until when, for the next call.
--
-- The process reads once more after this call (log_state). A hint: it also polls.
-- Takes    p_ms: null: it is awake. p_before: until when it was announced before; that row is removed.
-- Roles    read, work, operate
create or replace function flowfabric.sleep_for_events(p_instance uuid, p_ms bigint, p_before timestamptz)
returns timestamptz
language plpgsql security definer as $$
declare
    v_until timestamptz := case when p_ms is not null then clock_timestamp() + flowfabric.ms(least(p_ms, 60000)) end;
begin
    if p_before is not null then
        delete from flowfabric.follower f where f.until = p_before and f.instance = p_instance;
    end if;
    if v_until is not null then
        insert into flowfabric.follower (until, instance) values (v_until, p_instance);
    end if;
    return v_until;
end;
$$;
