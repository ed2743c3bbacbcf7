-- advance_schedule: one row for the caller that advances a due schedule from the time it read; none for all others.
--
-- For a statement that uses this row to create the due executions in the same transaction.
-- Roles    work, operate
create or replace function flowfabric.advance_schedule(
    p_name text, p_expected timestamptz, p_next timestamptz, p_last timestamptz)
returns table (moved boolean)
language plpgsql volatile security definer as $$
begin
    perform flowfabric.check_time(p_next), flowfabric.check_time(p_last);
    return query
    update flowfabric.schedule s
    set next_at = p_next, last_at = coalesce(p_last, s.last_at)
    where s.name = p_name and s.next_at = p_expected and s.next_at <= flowfabric.now() and not s.paused
    returning true;
end;
$$;
