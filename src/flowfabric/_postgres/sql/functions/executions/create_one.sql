-- create_one: nothing -> waiting, for one execution with only a payload, a policy, and who submits it
--
-- Called by submitters: what create_executions does, with a third of the arguments.
-- Returns  the row of create_executions; none when the route is new, closed or has bindings, and nothing was created.
-- Roles    submit, work, operate
create or replace function flowfabric.create_one(
    p_lane text, p_kind text, p_capabilities text, p_partition integer, p_id uuid, p_payload bytea, p_policy text,
    p_creator text)
returns table (ordinal integer, code text, id uuid, state text)
language plpgsql security definer as $$
begin
    if flowfabric.create_plain(
           p_lane, p_kind, p_capabilities, array[p_partition], array[p_id], array[p_payload], p_policy::json,
           array[p_creator]) then
        ordinal := 0; code := 'created'; state := 'waiting';
        return next;
    end if;
end;
$$;
