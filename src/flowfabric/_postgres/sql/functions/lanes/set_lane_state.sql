-- set_lane_state: returns the previous state; registers an unknown lane.
--
-- Takes    p_expected: change nothing unless this is the state before; null: whatever it is.
-- Roles    operate
create or replace function flowfabric.set_lane_state(p_name text, p_state text, p_expected text) returns text
language plpgsql security definer as $$
declare
    v_before text;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.register_lanes(array[p_name]);
    select l.state into v_before from flowfabric.lane l where l.name = p_name for no key update;
    if v_before <> p_expected then
        return v_before;
    end if;
    update flowfabric.lane l set state = p_state where l.name = p_name;
    if p_state in ('active', 'draining') then
        perform pg_notify('flowfabric_' || s.instance, 'work') from flowfabric.sleeper s
        where s.lane = p_name and s.until > (select clock_timestamp());
    end if;
    return v_before;
end;
$$;
