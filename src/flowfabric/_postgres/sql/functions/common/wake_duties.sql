-- wake_duties: a timer was set; notify a sleeping duty runner that would be too late for it.
create or replace function flowfabric.wake_duties(p_due timestamptz) returns void
language plpgsql as $$
begin
    if exists (select from flowfabric.sleeper s where s.topic = 'timer' and s.until > clock_timestamp()
               and (s.wakes_at is null or s.wakes_at > p_due)) then
        perform pg_notify('flowfabric', 'timer');
    end if;
end;
$$;
