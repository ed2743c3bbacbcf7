-- delete_schedule: delete a schedule. Returns whether it existed.
--
-- Roles    operate
create or replace function flowfabric.delete_schedule(p_name text) returns boolean
language plpgsql security definer as $$
begin
    delete from flowfabric.schedule s where s.name = p_name;
    return found;
end;
$$;
