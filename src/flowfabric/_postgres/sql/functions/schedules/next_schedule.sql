-- next_schedule: seconds until the next schedule fires; null if none will.
--
-- One that waits for the end of its last execution (overlap `queue`) is left out: it is found when that has ended.
-- Roles    work, operate
create or replace function flowfabric.next_schedule() returns double precision
language sql volatile security definer as $$
    select extract(epoch from s.next_at - flowfabric.now()) from flowfabric.schedule s
    where not s.paused and s.next_at is not null
      and not (s.options ->> 'overlap' is not distinct from 'queue' and s.next_at <= flowfabric.now() and exists (
                   select from flowfabric.execution e where e.partition = s.last_partition and e.id = s.last_id
                   and e.state not in ('completed', 'failed', 'cancelled', 'expired', 'skipped')))
    order by s.next_at limit 1
$$;
