-- list_held: the executions that a limit holds, in the order in which it lets them go
--
-- Takes    p_key: only of this value of the policy's key; null: of all. p_rank, p_created, p_id: after this position within
--          a key, p_after the key.
-- Roles    read, operate
create or replace function flowfabric.list_held(
    p_limit uuid, p_key text, p_after text, p_rank integer, p_created timestamptz, p_id uuid, p_size integer)
returns table (id uuid, kind text, lane text, namespace text, limit_id uuid, limit_key text, rank integer,
               created_at timestamptz, blocked_at timestamptz, retry_at timestamptz, needs jsonb, detail text)
language sql stable security definer as $$
    select b.id, r.kind, r.lane, e.namespace, b.limit_id, b.limit_key, b.rank, b.created_at, b.blocked_at, b.retry_at, b.needs,
           e.blocking_detail
    from (select x.* from flowfabric.blocked x
          where x.limit_id = p_limit and (p_key is null or x.limit_key = p_key collate "C")
            and (p_after is null
                 or (x.limit_key, x.rank, x.created_at, x.id) > (p_after collate "C", p_rank, p_created, p_id))
          order by x.limit_key, x.rank, x.created_at, x.id limit p_size) b
    join flowfabric.execution e on e.partition = b.partition and e.id = b.id
    join flowfabric.route r on r.id = e.route
    order by b.limit_key, b.rank, b.created_at, b.id
$$;

-- read_held: which limit holds an execution, since when and until when; no row if none does.
--
-- Roles    read, work, operate
create or replace function flowfabric.read_held(p_partition integer, p_id uuid)
returns table (id uuid, kind text, lane text, namespace text, limit_id uuid, limit_key text, rank integer,
               created_at timestamptz, blocked_at timestamptz, retry_at timestamptz, needs jsonb, detail text)
language sql stable security definer as $$
    select b.id, r.kind, r.lane, e.namespace, b.limit_id, b.limit_key, b.rank, b.created_at, b.blocked_at, b.retry_at, b.needs,
           e.blocking_detail
    from flowfabric.execution e
    join flowfabric.blocked b on b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id
                             and b.partition = e.partition
    join flowfabric.route r on r.id = e.route
    where e.partition = p_partition and e.id = p_id and b.limit_id is not null
$$;

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
