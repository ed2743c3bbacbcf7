-- hold_routes: called before ready rows of these routes are inserted.
create or replace function flowfabric.hold_routes(p_routes integer[]) returns void
language plpgsql as $$
declare
    v_route integer;
begin
    if cardinality(p_routes) = 1 then
        perform pg_advisory_xact_lock_shared(flowfabric.ready_lock(), p_routes[1]);
        return;
    end if;
    for v_route in select distinct r from unnest(p_routes) r order by r loop
        perform pg_advisory_xact_lock_shared(flowfabric.ready_lock(), v_route);
    end loop;
end;
$$;
