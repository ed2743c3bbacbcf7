-- read_gauges: the numbers of a whole deployment for a monitor, in one call of bounded cost
--
-- Nothing here reads all executions: queues are counted in the order of their index, states by the narrow rows that each has.
-- Denials of claims are totals that the duty `unblock` keeps.
-- Roles    read, operate
-- Takes    p_most: how many rows are counted at most per kind and lane, per state, per reason.
-- Returns  one row per number: what it counts, of what, how many, and of a lane the time of the oldest.
create or replace function flowfabric.read_gauges(p_most integer)
returns table (what text, name text, value bigint, oldest_at timestamptz, at timestamptz)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
begin
    return query
    select 'lane'::text, l.name, coalesce(sum(c.n), 0)::bigint, min(c.oldest), v_now
    from flowfabric.lane l
    left join lateral (select distinct f.route from flowfabric.ready_floor f where f.lane = l.name) f on true
    left join lateral (select count(*) as n, min(y.created_at) as oldest
                       from (select x.created_at from flowfabric.ready x where x.route = f.route
                             order by x.rank, x.created_at, x.id limit p_most) y) c on f.route is not null
    group by l.name;

    return query
    select 'state'::text, k.state, count(*), null::timestamptz, v_now
    from (values ('lease', 'active'), ('delay', 'delayed'), ('parked', 'waiting_children')) k (kind, state)
    cross join lateral (
        (select u.partition, u.id
         from (select t.partitions, t.ids from flowfabric.timer t where t.kind = k.kind
               order by t.due_at desc limit p_most) t
         cross join lateral unnest(t.partitions, t.ids) as u (partition, id) limit 5 * p_most)
        union
        (select w.partition, w.id from flowfabric.waiter w where k.kind = 'parked' limit p_most)) p
    join flowfabric.execution e on e.partition = p.partition and e.id = p.id and e.state = k.state and e.lease_lost is null
    group by k.state;

    return query
    select 'state'::text, s.state, c.n, null::timestamptz, v_now
    from unnest(array['failed', 'cancelled', 'expired', 'skipped']) s (state)
    cross join lateral (select count(*) as n from (select from flowfabric.unsuccessful x where x.state = s.state limit p_most) y) c;

    return query
    select 'state'::text, 'suspended'::text, count(*), null::timestamptz, v_now
    from (select from flowfabric.suspension x where x.closed_at is null limit p_most) y;

    return query
    with recursive reason as (
        select (select b.blocking_reason from flowfabric.blocked b order by b.blocking_reason limit 1) as word
        union all
        select (select b.blocking_reason from flowfabric.blocked b where b.blocking_reason > r.word
                order by b.blocking_reason limit 1)
        from reason r where r.word is not null)
    select 'blocked'::text, r.word, c.n, null::timestamptz, v_now
    from reason r
    cross join lateral (select count(*) as n
                        from (select from flowfabric.blocked x where x.blocking_reason = r.word limit p_most) y) c
    where r.word is not null;

    return query
    select 'workers'::text, ''::text, count(*), null::timestamptz, v_now
    from flowfabric.registration r where flowfabric.is_alive(r, v_now);

    return query
    select 'slots'::text, ''::text, coalesce(sum(r.slots), 0)::bigint, null::timestamptz, v_now
    from flowfabric.registration r where flowfabric.is_alive(r, v_now);

    return query
    select 'cancelling'::text, ''::text, count(*), null::timestamptz, v_now
    from (select from flowfabric.cancel_backlog limit p_most) x;

    return query   -- without what claims left since the last round of the duty `unblock`
    select case when t.reason = 'budget' then 'denied_budget' else 'denied_quota' end,
           case when t.reason = 'budget' then t.dimension else t.reason end, t.count::bigint, null::timestamptz, v_now
    from flowfabric.denial_total t;
end;
$$;
