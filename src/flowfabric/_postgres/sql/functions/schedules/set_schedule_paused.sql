-- set_schedule_paused: pause a schedule, or resume it. A resumed schedule continues at p_next_at.
-- A schedule that is in this state already is not changed, nor is its updated_at.
--
-- Takes    p_expected: only if the schedule was last changed at this time; null: whatever is stored.
-- Returns  whether it exists and, with p_expected, was not changed since.
-- Roles    operate
create or replace function flowfabric.set_schedule_paused(
    p_name text, p_paused boolean, p_next_at timestamptz, p_expected timestamptz)
returns boolean
language plpgsql security definer as $$
begin
    update flowfabric.schedule s
    set paused = p_paused, updated_at = case when s.paused = p_paused then s.updated_at else flowfabric.now() end,
        next_at = case when s.paused and not p_paused then coalesce(p_next_at, s.next_at) else s.next_at end
    where s.name = p_name and (p_expected is null or s.updated_at = p_expected);
    return found;
end;
$$;
