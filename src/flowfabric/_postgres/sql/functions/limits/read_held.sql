-- read_held: which limit holds an execution, since when and until when; no row if none does.
--
-- Roles    read, operate
create or replace function flowfabric.read_held(p_partition integer, p_id uuid)
returns table (id uuid, kind text, lane text, namespace text, limit_id uuid, limit_key text, rank integer,
               created_at timestamptz, blocked_at timestamptz, retry_at timestamptz, needs jsonb, detail text)
language sql stable security definer as $$
    select b.id, r.kind, r.lane, e.namespace, b.limit_id, b.limit_key, b.rank, b.created_at, b.blocked_at, b.retry_at, flowfabric.all_needs(b.needs, b.limit_id),
           e.blocking_detail
    from flowfabric.execution e
    join flowfabric.blocked b on b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id
                             and b.partition = e.partition
    join flowfabric.route r on r.id = e.route
    where e.partition = p_partition and e.id = p_id and b.limit_id is not null
$$;

-- all_needs: what a paused execution needs of the budget that holds it: the amounts it asked for, and what it held before.
create or replace function flowfabric.all_needs(p_needs jsonb, p_budget uuid) returns jsonb
language sql immutable as $$
    select case when p_needs -> 'held' -> p_budget::text is null then p_needs
                else jsonb_set(p_needs, '{amounts}', (
                    select jsonb_object_agg(n.dim, n.amount::numeric
                                            + coalesce((p_needs -> 'held' -> p_budget::text ->> n.dim)::numeric, 0))
                    from jsonb_each_text(p_needs -> 'amounts') as n (dim, amount))) end
$$;
