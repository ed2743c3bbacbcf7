-- next_schedule: seconds until the next schedule fires; null if none will.
--
-- Roles    work, operate
create or replace function flowfabric.next_schedule() returns double precision
language sql volatile security definer as $$
    select extract(epoch from s.next_at - flowfabric.now()) from flowfabric.schedule s
    where not s.paused and s.next_at is not null order by s.next_at limit 1
$$;
