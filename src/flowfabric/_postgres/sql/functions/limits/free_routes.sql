-- free_routes: mark routes for which submissions need not look for bindings
--
-- create_plain reads this mark with the route. Whoever creates a route makes it if no binding is being stored (resolve_routes
-- holds the row `deployment` for key share), bind_limit takes it away; both never run at the same time, and no submission
-- waits. What a creator left unmarked, and what unbind_limit frees, is marked here: called by it and by the duty `unblock`.
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
