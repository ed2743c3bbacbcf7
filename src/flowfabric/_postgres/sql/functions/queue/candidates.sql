-- candidates: the first ready rows of a route, in claim order, without locks.
create or replace function flowfabric.candidates(
    p_route integer, p_limit integer, p_reclaim boolean, p_now timestamptz)
returns setof flowfabric.ready
language plpgsql as $$
declare
    v_rank integer := -1;
    v_created timestamptz := '-infinity';
    v_id uuid := flowfabric.zero_uuid();
begin
    select f.rank, f.created_at, f.id into v_rank, v_created, v_id
    from flowfabric.ready_floor f where f.route = p_route order by f.rank, f.created_at, f.id limit 1;
    return query
    select r.* from flowfabric.ready r
    where r.route = p_route
      and (r.rank, r.created_at, r.id) >= (coalesce(v_rank, -1), coalesce(v_created, '-infinity'),
                                           coalesce(v_id, flowfabric.zero_uuid()))
      and (r.granted_until is null or r.granted_until <= p_now)
      and (r.deadline_at is null or r.deadline_at > p_now)
      and (r.available_at is null or (p_reclaim and r.available_at <= p_now))
    order by r.rank, r.created_at, r.id limit p_limit;
end;
$$;
