-- count_held: how many executions limits hold, by lane and limit; at most p_most are counted.
--
-- Roles    read, operate
create or replace function flowfabric.count_held(p_most integer)
returns table (lane text, limit_id uuid, what text, name text, held bigint)
language sql stable security definer as $$
    select c.lane, c.limit_id, case when q.id is not null then 'quota' else 'budget' end,
           coalesce(q.name, b.name, c.limit_id::text), c.held
    from (select r.lane, x.limit_id, count(*) as held
          from (select y.partition, y.id, y.limit_id from flowfabric.blocked y where y.limit_id is not null
                order by y.limit_id limit p_most) x
          join flowfabric.execution e on e.partition = x.partition and e.id = x.id
          join flowfabric.route r on r.id = e.route
          group by r.lane, x.limit_id) c
    left join flowfabric.quota_policy q on q.id = c.limit_id
    left join flowfabric.budget b on b.id = c.limit_id
    order by c.lane, c.held desc, c.limit_id
$$;
