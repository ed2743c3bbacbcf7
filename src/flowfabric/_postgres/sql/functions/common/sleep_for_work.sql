-- sleep_for_work: announce that a worker waits for work in these lanes; returns until when, for the next call.
--
-- Takes    p_before: until when the worker was announced before; that row is removed. p_namespace: the only one it serves;
--          null: all.
-- Roles    work, operate
create or replace function flowfabric.sleep_for_work(
    p_instance uuid, p_lanes text[], p_service integer, p_slots integer, p_ms bigint, p_before timestamptz,
    p_namespace text)
returns timestamptz
language plpgsql security definer as $$
declare
    v_until timestamptz := clock_timestamp() + flowfabric.ms(least(p_ms, 60000));
begin
    perform flowfabric.get_up(p_instance, p_lanes, p_before);
    insert into flowfabric.sleeper (lane, until, instance, service, slots, namespace)
    select distinct l.lane, v_until, p_instance, p_service, p_slots, p_namespace from unnest(p_lanes) as l (lane);
    return v_until;
end;
$$;

-- get_up: remove the announcement of a process.
create or replace function flowfabric.get_up(p_instance uuid, p_lanes text[], p_until timestamptz) returns void
language plpgsql as $$
begin
    if p_until is not null then
        delete from flowfabric.sleeper s using unnest(p_lanes) as l (lane)
        where s.lane = l.lane and s.until = p_until and s.instance = p_instance;
    end if;
end;
$$;
