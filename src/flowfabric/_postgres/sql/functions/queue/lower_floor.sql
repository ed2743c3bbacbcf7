-- lower_floor: called after ready rows were inserted, with their positions.
create or replace function flowfabric.lower_floor(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_ids uuid[]) returns void
language plpgsql as $$
declare
    v_fixed_snapshot boolean := current_setting('transaction_isolation') <> 'read committed';
begin
    -- An old snapshot does not show the current floor: always lower it.
    insert into flowfabric.ready_floor (route, rank, created_at, id)
    select n.route, n.rank, n.created_at, n.id
    from (select distinct on (u.route) u.* from unnest(p_routes, p_ranks, p_created, p_ids)
              as u (route, rank, created_at, id)
          order by u.route, u.rank, u.created_at, u.id) n
    where v_fixed_snapshot
       or (exists (select from flowfabric.ready_floor f where f.route = n.route)
           and not exists (select from flowfabric.ready_floor f where f.route = n.route
                           and (f.rank, f.created_at, f.id) <= (n.rank, n.created_at, n.id)));
end;
$$;
