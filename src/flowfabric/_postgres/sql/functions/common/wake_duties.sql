-- wake_duties: a timer was set; notify the process that runs the timers if it would be too late for it.
--
-- With flowfabric.wake off, as in wake_route, its next poll finds the timer.
create or replace function flowfabric.wake_duties(p_due timestamptz) returns void
language sql volatile as $$
    select pg_notify('flowfabric_' || s.instance, 'timer')
    from flowfabric.sleeper s
    where s.lane = '' and s.until > (select clock_timestamp()) and (s.wakes_at is null or s.wakes_at > p_due)
      and current_setting('flowfabric.wake', true) is distinct from 'off'
$$;
