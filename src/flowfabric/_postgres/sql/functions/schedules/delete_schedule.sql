-- delete_schedule: delete a schedule.
--
-- Takes    p_expected: only if the schedule was last changed at this time; null: whatever is stored.
-- Returns  whether it existed and, with p_expected, was not changed since.
-- Roles    operate
create or replace function flowfabric.delete_schedule(p_name text, p_expected timestamptz) returns boolean
language plpgsql security definer as $$
begin
    delete from flowfabric.schedule s where s.name = p_name and (p_expected is null or s.updated_at = p_expected);
    return found;
end;
$$;
