-- Ready rows, and the position below which a route has none.
--
-- A claimed ready row leaves a dead index entry that an old snapshot anywhere keeps alive, and a scan from the
-- beginning of the route reads all of them. Therefore claims start at the floor. Two rules keep it correct:
--   * a call that inserts ready rows holds the route's advisory lock shared until commit, and lowers the floor if the
--     new row is below it (by adding a row, never by waiting for one);
--   * a call that raises it holds that lock exclusively (or gives up immediately), so there is no insert it cannot see.

-- raise_floor: move the floor of a route up to its first live ready row; does nothing while rows are inserted.
create or replace function flowfabric.raise_floor(p_route integer) returns void
language plpgsql as $$
declare
    v_first flowfabric.ready;
    v_rank integer; v_created timestamptz; v_id uuid;
begin
    -- A snapshot older than the lock would not see earlier inserts.
    if current_setting('transaction_isolation') <> 'read committed'
       or not pg_try_advisory_xact_lock(flowfabric.ready_lock(), p_route) then
        return;
    end if;
    select f.rank, f.created_at, f.id into v_rank, v_created, v_id
    from flowfabric.ready_floor f where f.route = p_route order by f.rank, f.created_at, f.id limit 1;
    select r.* into v_first from flowfabric.ready r
    where r.route = p_route
      and (r.rank, r.created_at, r.id) >= (coalesce(v_rank, -1), coalesce(v_created, '-infinity'),
                                           coalesce(v_id, flowfabric.zero_uuid()))
    order by r.rank, r.created_at, r.id limit 1;
    if found then
        v_rank := v_first.rank; v_created := v_first.created_at; v_id := v_first.id;
    end if;
    -- An empty route keeps the lowest of its positions and loses the others.
    if v_rank is not null then
        delete from flowfabric.ready_floor f where f.route = p_route;
        insert into flowfabric.ready_floor values (p_route, v_rank, v_created, v_id);
    end if;
end;
$$;
