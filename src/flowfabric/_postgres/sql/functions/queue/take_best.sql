-- take_best: take_ready for the best rows of several routes, of one namespace or of all
--
-- Called by claims of one namespace, whose rows have an index of their own, and by claims that end in grants. Rows that
-- another call was faster to take or to lock are passed over.
-- Takes    the routes, and where their rows begin. p_namespace: not the default one; null: all. p_granted: as take_ready.
create or replace function flowfabric.take_best(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_floors uuid[], p_namespace text, p_limit integer,
    p_reclaim boolean, p_granted timestamptz, p_now timestamptz)
returns flowfabric.taken
language plpgsql as $$
declare
    v_all flowfabric.taken := row('{}', '{}', '{}', false)::flowfabric.taken;
    v_taken flowfabric.taken;
    v_best tid[];
    -- After the last row seen.
    v_rank integer := -1; v_at timestamptz := '-infinity'; v_id uuid := flowfabric.zero_uuid();
begin
    for v_look in 1 .. 32 loop
        exit when cardinality(v_all.ids) >= p_limit;
        select array_agg(b.tid), (array_agg(b.rank))[count(*)], (array_agg(b.created_at))[count(*)], (array_agg(b.id))[count(*)]
        into v_best, v_rank, v_at, v_id
        from (select c.tid, c.rank, c.created_at, c.id
              from flowfabric.best_ready(p_routes, p_ranks, p_created, p_floors, p_namespace, v_rank, v_at, v_id,
                                         p_limit - cardinality(v_all.ids), p_reclaim, p_now) c
              order by c.rank, c.created_at, c.id limit p_limit - cardinality(v_all.ids)) b;
        exit when v_best is null;
        v_taken := flowfabric.take_ready(v_best, null, null, null, null, p_limit, p_reclaim, p_granted, p_now);
        v_all.partitions := v_all.partitions || v_taken.partitions;
        v_all.ids := v_all.ids || v_taken.ids;
        v_all.tids := v_all.tids || v_taken.tids;
        v_all.again := v_all.again or v_taken.again;
    end loop;
    return v_all;
end;
$$;

-- best_ready: the first claimable rows of each route after a position, without locks.
--
-- Takes    p_namespace: null: all. p_limit: of each route. p_reclaim: those with a lost lease too.
create or replace function flowfabric.best_ready(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_floors uuid[], p_namespace text, p_rank integer,
    p_at timestamptz, p_id uuid, p_limit integer, p_reclaim boolean, p_now timestamptz)
returns table (tid tid, rank integer, created_at timestamptz, id uuid, partition integer, limits bigint, available_at timestamptz)
language sql stable as $$
    select c.* from unnest(p_routes, p_ranks, p_created, p_floors) as q (route, rank, created_at, id)
    cross join lateral (
        select r.ctid, r.rank, r.created_at, r.id, r.partition, r.limits, r.available_at from flowfabric.ready r
        where p_namespace is null and r.route = q.route and (r.rank, r.created_at, r.id) >= (q.rank, q.created_at, q.id)
          and (r.rank, r.created_at, r.id) > (p_rank, p_at, p_id)
          and (r.granted_until is null or r.granted_until <= p_now) and (r.deadline_at is null or r.deadline_at > p_now)
          and (r.available_at is null or (p_reclaim and r.available_at <= p_now))
        order by r.rank, r.created_at, r.id limit p_limit) c
    union all
    select c.* from unnest(p_routes, p_ranks, p_created, p_floors) as q (route, rank, created_at, id)
    cross join lateral (
        select r.ctid, r.rank, r.created_at, r.id, r.partition, r.limits, r.available_at from flowfabric.ready r
        where p_namespace is not null and r.namespace = p_namespace and r.route = q.route
          and (r.rank, r.created_at, r.id) >= (q.rank, q.created_at, q.id)
          and (r.rank, r.created_at, r.id) > (p_rank, p_at, p_id)
          and (r.granted_until is null or r.granted_until <= p_now) and (r.deadline_at is null or r.deadline_at > p_now)
          and (r.available_at is null or (p_reclaim and r.available_at <= p_now))
        order by r.rank, r.created_at, r.id limit p_limit) c
$$;
