-- take_best: take_ready for the best rows of several routes, of one namespace or of all
--
-- Called by claims of one namespace, whose rows have an index of their own, and by claims that end in grants. Rows that
-- another call was faster to take or to lock are passed over.
-- Takes    the routes, and where their rows begin. p_namespace: not the default one; null: all. p_granted: as take_ready.
create or replace function flowfabric.take_best(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_ids uuid[], p_namespace text, p_limit integer,
    p_reclaim boolean, p_granted timestamptz, p_now timestamptz)
returns flowfabric.taken
language plpgsql as $$
declare
    v_all flowfabric.taken := row('{}', '{}', '{}', false)::flowfabric.taken;
    v_taken flowfabric.taken;
    v_tried tid[] := '{}';
    v_best tid[];
begin
    for v_look in 1 .. 32 loop
        exit when cardinality(v_all.ids) >= p_limit;
        if p_namespace is null then
            select array_agg(b.tid) into v_best
            from (select c.tid
                  from unnest(p_routes, p_ranks, p_created, p_ids) as q (route, rank, created_at, id)
                  cross join lateral (
                      select r.ctid as tid, r.rank, r.created_at, r.id from flowfabric.ready r
                      where r.route = q.route and (r.rank, r.created_at, r.id) >= (q.rank, q.created_at, q.id)
                        and (r.granted_until is null or r.granted_until <= p_now)
                        and (r.deadline_at is null or r.deadline_at > p_now)
                        and (r.available_at is null or (p_reclaim and r.available_at <= p_now))
                        and r.ctid <> all (v_tried)
                      order by r.rank, r.created_at, r.id limit p_limit - cardinality(v_all.ids)) c
                  order by c.rank, c.created_at, c.id limit p_limit - cardinality(v_all.ids)) b;
        else
            select array_agg(b.tid) into v_best
            from (select c.tid
                  from unnest(p_routes, p_ranks, p_created, p_ids) as q (route, rank, created_at, id)
                  cross join lateral (
                      select r.ctid as tid, r.rank, r.created_at, r.id from flowfabric.ready r
                      where r.namespace = p_namespace and r.route = q.route
                        and (r.rank, r.created_at, r.id) >= (q.rank, q.created_at, q.id)
                        and (r.granted_until is null or r.granted_until <= p_now)
                        and (r.deadline_at is null or r.deadline_at > p_now)
                        and (r.available_at is null or (p_reclaim and r.available_at <= p_now))
                        and r.ctid <> all (v_tried)
                      order by r.rank, r.created_at, r.id limit p_limit - cardinality(v_all.ids)) c
                  order by c.rank, c.created_at, c.id limit p_limit - cardinality(v_all.ids)) b;
        end if;
        exit when v_best is null;
        v_taken := flowfabric.take_ready(v_best, null, null, null, null, p_limit, p_reclaim, p_granted, p_now);
        v_tried := v_tried || v_best;
        v_all.partitions := v_all.partitions || v_taken.partitions;
        v_all.ids := v_all.ids || v_taken.ids;
        v_all.tids := v_all.tids || v_taken.tids;
        v_all.again := v_all.again or v_taken.again;
    end loop;
    return v_all;
end;
$$;
