-- present_events: the events of executions that exist, of these partitions.
--
-- Not those of an execution with the same id that was deleted before: its end is older than the creation of this one.
create or replace function flowfabric.present_events(p_low integer, p_high integer) returns setof flowfabric.event
language sql stable as $$
    select (v.event).*
    from (select x as event, x.seq,
                 max(x.seq) filter (where x.outcome is not null and x.occurred_at < e.created_at)
                     over (partition by x.partition, x.id) as ended
          from flowfabric.event x
          join flowfabric.execution e on e.partition = x.partition and e.id = x.id
          where x.partition between p_low and p_high) v
    where v.seq > coalesce(v.ended, 0)
$$;
