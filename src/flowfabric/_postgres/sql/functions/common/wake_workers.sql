-- Wake-ups are hints: one constant notification per call, and only when a process sleeps. Polling is the truth.

-- wake_workers: notify the workers that sleep: something may be claimed.
create or replace function flowfabric.wake_workers() returns void
language plpgsql as $$
begin
    if exists (select from flowfabric.sleeper s where s.topic = 'work' and s.until > clock_timestamp()) then
        perform pg_notify('flowfabric', 'work');
    end if;
end;
$$;
