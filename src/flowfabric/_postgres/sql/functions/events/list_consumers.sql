-- list_consumers: the durable consumers of the log by name, and how far behind each is
--
-- p_after  only names after this one; null: from the first. p_limit: at most this many; null: all.
-- Returns  lag: how many events follow its position, of all families; exact up to 10,000, then how many numbers.
--          next_at: when the next event after its position happened; null: it is at the end. is_expired: events after it
--          were removed.
-- Roles    read, work, operate
create or replace function flowfabric.list_consumers(p_after text, p_limit integer)
returns table (name text, created_at timestamptz, instance uuid, host text, pid integer, families integer, filter jsonb,
               log_position bigint, log_epoch bigint, handled bigint, moved_at timestamptz, failures integer, failure text,
               lag bigint, next_at timestamptz, is_expired boolean, retention interval)
language sql volatile security definer as $$
    select c.name, c.created_at, case when c.until > (select clock_timestamp()) then c.instance end, c.host, c.pid,
           c.families, c.filter, c.position, c.epoch, c.handled, c.moved_at, c.failures, c.failure,
           case when n.events <= 10000 then n.events else l.last - c.position end, n.occurred_at, c.position < d.event_floor, d.event_retention
    from (select x.* from flowfabric.consumer x where p_after is null or x.name > p_after
          order by x.name limit p_limit) c
    cross join flowfabric.deployment d
    cross join (select flowfabric.last_position() as last) l
    cross join lateral (select count(*) as events, min(x.occurred_at) filter (where x.n = 1) as occurred_at
                        from (select e.occurred_at, row_number() over (order by e.seq) as n
                              from flowfabric.event e where e.seq > c.position order by e.seq limit 10001) x) n
    order by c.name
$$;
