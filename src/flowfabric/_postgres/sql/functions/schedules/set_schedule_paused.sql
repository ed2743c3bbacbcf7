-- set_schedule_paused: returns whether the schedule exists. A resumed schedule continues at p_next_at.
--
-- Roles    operate
create or replace function flowfabric.set_schedule_paused(p_name text, p_paused boolean, p_next_at timestamptz)
returns boolean
language plpgsql security definer as $$
begin
    update flowfabric.schedule s
    set paused = p_paused, updated_at = flowfabric.now(),
        next_at = case when s.paused and not p_paused then coalesce(p_next_at, s.next_at) else s.next_at end
    where s.name = p_name;
    return found;
end;
$$;
