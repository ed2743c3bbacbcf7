-- Wake-ups are hints: one constant notification per call, and only if a process sleeps. Correctness rests on polling.

-- wake_workers: notify sleeping workers that there may be work.
create or replace function flowfabric.wake_workers() returns void
language plpgsql as $$
begin
    if exists (select from flowfabric.sleeper s where s.topic = 'work' and s.until > clock_timestamp()) then
        perform pg_notify('flowfabric', 'work');
    end if;
end;
$$;
