-- free_routes: mark routes whose submissions need not read bindings
--
-- create_plain reads this mark with the route. A call that creates a route sets it if no binding is being stored
-- (resolve_routes holds the row `deployment` for key share), bind_limit removes it; both never run at the same time, and no
-- submission waits. This function marks routes that were created without the mark, and those that unbind_limit frees:
-- unbind_limit calls it, and the duty `unblock`.
-- Locks    the row `deployment`, unless it is locked.
create or replace function flowfabric.free_routes() returns void
language plpgsql as $$
begin
    if not exists (select from flowfabric.route r
                   where not r.is_free and not r.limited and r.version is null and r.not_for is null
                     and not flowfabric.is_bound(r.lane, r.kind)) then
        return;
    end if;
    perform from flowfabric.deployment d for update skip locked;
    if found then
        update flowfabric.route r set is_free = true
        where not r.is_free and not r.limited and r.version is null and r.not_for is null
          and not flowfabric.is_bound(r.lane, r.kind);
    end if;
end;
$$;
