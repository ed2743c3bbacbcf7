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
